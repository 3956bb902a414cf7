"""The processes of a mount: what serving costs, and what happens when one of them dies, hangs or waits."""

from __future__ import annotations

import errno
import io
import itertools
import os
import random
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Mounted, Program, wait_until

from wdsfs import board as boards
from wdsfs.board import Board, Tags
from wdsfs.inodes import TAG_MAX

FILES = 200
SIZE = 3000


def content(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


@pytest.fixture
def shard(program: Program) -> Path:
    """A shard of small files with contents of their own."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for number in range(FILES):
            info = tarfile.TarInfo(f"d/{number:04d}.bin")
            info.size = SIZE
            tar.addfile(info, io.BytesIO(content(number)))
    return program.write("s.tar", buffer.getvalue())


class Patched(Program):
    """The program with lines of Python run before it."""

    patch = ""

    def command(self, *arguments: str | bytes | Path) -> list[str | bytes]:
        start = [sys.executable, "-c", f"{self.patch}\nfrom wdsfs.cli import main\nmain(prog_name='wdsfs')"]
        return [*start, *(os.fspath(one) for one in arguments)]


@pytest.fixture
def patched(program: Program) -> Patched:
    program.__class__ = Patched
    assert isinstance(program, Patched)
    return program


def files_of(mounted: Mounted) -> list[Path]:
    folder = mounted.path / "s" / "d"
    return [folder / name for name in sorted(os.listdir(folder))]


def read(path: Path) -> bytes:
    return path.read_bytes()


def workers_of(mounted: Mounted) -> list[int]:
    return [pid for pid in mounted.status()["processes"] if pid != mounted.pid]


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


# --- what serving costs


def test_reading_a_small_file_costs_two_requests(program: Program, shard: Path) -> None:
    """After a listing: open (with the content pushed) and release. No lookup, getattr, read or flush."""
    with program.mounted("--layout", "files", shard) as mounted:
        paths = files_of(mounted)
        before = mounted.status()["requests"]
        assert [read(path) for path in paths] == [content(number) for number in range(FILES)]
        wait_until(
            lambda: mounted.status()["requests"].get("release", 0) - before.get("release", 0) == FILES, "releases"
        )
        after = mounted.status()["requests"]
        spent = {kind: count - before.get(kind, 0) for kind, count in after.items()}
        assert {kind: count for kind, count in spent.items() if count} == {"open": FILES, "release": FILES}
        assert mounted.status()["pushed"] == FILES


def test_a_file_that_does_not_exist_is_asked_for_once(program: Program, shard: Path) -> None:
    with program.mounted("--layout", "files", shard) as mounted:
        files_of(mounted)
        for _ in range(5):
            assert not (mounted.path / "s" / "d" / "nothing").exists()
        assert mounted.status()["requests"]["lookup"] <= 3


def test_stat_after_a_listing_costs_nothing(program: Program, shard: Path) -> None:
    with program.mounted("--layout", "files", shard) as mounted:
        paths = files_of(mounted)
        before = mounted.status()["requests"]
        assert {path.stat().st_size for path in paths} == {SIZE}
        assert mounted.status()["requests"] == before


def test_what_the_kernel_has_dropped_is_read_again(program: Program, shard: Path) -> None:
    with program.mounted("--layout", "files", shard) as mounted:
        path = files_of(mounted)[3]
        for _ in range(3):
            with path.open("rb", buffering=0) as file:
                assert file.read() == content(3)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        status = mounted.status()
        assert status["pushed"] == 1
        assert status["requests"]["read"] == 2


# --- death


def _verify(paths: list[Path], seed: int, problems: list[str], stop: threading.Event) -> None:
    """Read files at random until told to stop; pages are dropped so that workers are asked each time."""
    order = random.Random(seed)
    while not stop.is_set():
        number = order.randrange(FILES)
        try:
            with paths[number].open("rb", buffering=0) as file:
                if file.read() != content(number):
                    problems.append(f"wrong bytes in {paths[number]}")
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if len(os.listdir(paths[number].parent)) != FILES:
                problems.append("a listing is not whole")
        except OSError as error:
            problems.append(repr(error))


@pytest.fixture
def readers() -> Iterator[list[threading.Thread]]:
    threads: list[threading.Thread] = []
    yield threads
    for thread in threads:
        thread.join()


def test_killed_workers_cost_no_reader_an_error(
    program: Program, shard: Path, readers: list[threading.Thread]
) -> None:
    with program.mounted("--layout", "files", shard) as mounted:
        mounted.expect_log("killed by SIGKILL")
        paths, problems, stop = files_of(mounted), list[str](), threading.Event()
        try:
            for seed in range(4):
                readers.append(threading.Thread(target=_verify, args=(paths, seed, problems, stop)))
                readers[-1].start()
            for round_ in range(20):
                victim = random.Random(round_).choice(workers_of(mounted))
                before = mounted.status()["restarts"]
                kill(victim)
                wait_until(lambda before=before: mounted.status()["restarts"] > before, "a new worker")
        finally:
            stop.set()
            for reader in readers:
                reader.join()
        assert problems == []
        assert mounted.status()["restarts"] == 20


OLD_KERNEL = "from wdsfs.engine import Engine\nEngine._resend = lambda self: False"


def test_without_resend_a_killed_worker_fails_its_own_request_only(patched: Patched, shard: Path) -> None:
    """On kernels before 6.9. Here the notification is taken to be refused."""
    patched.patch = OLD_KERNEL + SLOW
    with patched.mounted("--layout", "files", shard) as mounted:
        mounted.expect_log("killed by SIGKILL")
        paths = files_of(mounted)
        with _waiting(patched, paths[7]) as waiting:
            victims = workers_of(mounted)
            for pid in victims:
                kill(pid)
            wait_until(lambda: mounted.status()["restarts"] >= len(victims), "new workers")
        assert waiting.error == errno.ECONNABORTED
        assert read(paths[8]) == content(8)


# A read of the file 0007 waits until the file "go" is there, having made the file "waits".
SLOW = """
import os, time
from wdsfs import lower
original_read, original_cached = lower.read, lower.read_cached
def slow_read(wanted, offset, length):
    data = original_read(wanted, offset, length)
    if data[:9] == MARK and not os.path.exists("go"):
        open("waits", "a").close()
        while not os.path.exists("go"):
            time.sleep(0.01)
    return data
HOME = os.getcwd()
MARK = __import__("random").Random(7).randbytes(3000)[:9]
lower.read = lambda *a: (os.chdir(HOME), slow_read(*a))[1]
lower.read_cached = lambda *a: None
"""


class _Reader(threading.Thread):
    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self.path = path
        self.error: int | None = None
        self.data = b""

    def run(self) -> None:
        try:
            self.data = read(self.path)
        except OSError as error:
            self.error = error.errno


class _waiting:
    """A reader of a file whose worker waits for a disk as long as the block lasts."""

    def __init__(self, program: Program, path: Path) -> None:
        self.home, self.reader = program.home, _Reader(path)

    def __enter__(self) -> _Reader:
        self.reader.start()
        wait_until((self.home / "waits").exists, "the read")
        return self.reader

    def __exit__(self, *_: object) -> None:
        (self.home / "go").touch()
        self.reader.join()


def test_reads_that_wait_for_a_disk_do_not_hold_up_others(patched: Patched, shard: Path) -> None:
    """With a single worker, which waits, everybody else is served all the same."""
    patched.patch = SLOW
    with patched.mounted("--workers", "1", "--layout", "files", shard) as mounted:
        paths = files_of(mounted)
        with _waiting(patched, paths[7]) as waiting:
            for number in (3, 4, 5):
                assert read(paths[number]) == content(number)
            assert len(workers_of(mounted)) >= 2
        assert waiting.data == content(7)


def test_a_request_that_kills_every_worker_gets_eio_and_the_mount_goes_on(patched: Patched, shard: Path) -> None:
    patched.patch = """
import os
from wdsfs.tree import Tree
original = Tree.content
def content(self, inode):
    if inode & 0x3FFFFFFF == 7:
        os.kill(os.getpid(), 9)
    return original(self, inode)
Tree.content = content
"""
    with patched.mounted("--layout", "files", shard) as mounted:
        mounted.expect_log("killed by SIGKILL", "workers die before they answer anything")
        paths = files_of(mounted)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            read(paths[7])
        wait_until(lambda: _reads(paths[8], content(8)), "normal service")
        assert mounted.status()["state"] == "running"


def _reads(path: Path, expected: bytes) -> bool:
    try:
        return read(path) == expected
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return False


def test_a_worker_that_hangs_is_replaced(patched: Patched, shard: Path) -> None:
    patched.patch = """
import os, time
from wdsfs import engine
from wdsfs.tree import Tree
engine.HANG_SECONDS, engine.LOOK_SECONDS = 0.3, 0.1
original, home = Tree.content, os.getcwd()
def content(self, inode):
    if inode & 0x3FFFFFFF == 7 and not os.path.exists(home + "/hung"):
        open(home + "/hung", "w").close()
        while True:
            time.sleep(1)
    return original(self, inode)
Tree.content = content
"""
    with patched.mounted("--workers", "1", "--layout", "files", shard) as mounted:
        mounted.expect_log("has been at one request for", "killed by SIGKILL")
        assert read(files_of(mounted)[7]) == content(7)


def test_the_mount_outlives_its_supervisor(program: Program, shard: Path) -> None:
    with program.mounted("--layout", "files", shard, ends_itself=True) as mounted:
        paths = files_of(mounted)
        kill(mounted.pid)
        mounted.wait_for_exit()
        assert [read(path) for path in paths] == [content(number) for number in range(FILES)]
        (report,) = program.json("status", mounted.path)
        assert report["state"] == "without supervisor"
        program.run("umount", mounted.path)


def test_more_shards_than_descriptors(program: Program) -> None:
    """Shards are opened as needed and the longest unused closed; 600 of them under `ulimit -n 128`."""
    for number in range(600):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            info = tarfile.TarInfo("a.txt")
            info.size = 4
            tar.addfile(info, io.BytesIO(b"%04d" % number))
        program.write(f"n-{number:03d}.tar", buffer.getvalue())

    def limit() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))

    with program.mounted(f"{program.home}/n-{{000..599}}.tar", preexec_fn=limit) as mounted:
        for _ in range(2):
            for number in range(600):
                assert read(mounted.path / f"n-{number:03d}" / "a" / "txt") == b"%04d" % number
        assert mounted.status()["open_files"] <= 128


# --- the board


def test_counters_survive_the_worker_that_counted() -> None:
    board = Board()
    slot = board.slot(3)
    slot.begin(boards.KINDS.index("read"))
    slot.read(17)
    assert slot.busy_seconds >= 0
    slot.wait(True)
    assert (board.waiting, slot.busy_seconds) == (1, 0.0)
    slot.reset()
    slot.end()
    board.slot(4).begin(boards.KINDS.index("read"))
    assert board.counts() == {"read": 2}
    assert (board.bytes_read, board.waiting, board.done) == (17, 0, 1)


def test_a_push_is_claimed_once_until_the_kernel_forgets() -> None:
    board = Board()
    inodes = [position << 32 | 0xC0000000 | number for position in range(20) for number in range(1000)]
    claimed = [inode for inode in inodes if board.claim_push(inode)]
    assert len(claimed) > 0.99 * len(inodes)  # those that share a bit are read instead
    assert not any(board.claim_push(inode) for inode in inodes)
    board.forget(claimed[5])
    assert board.claim_push(claimed[5])


def test_a_changed_shard_gets_another_tag_whatever_its_fingerprint() -> None:
    tags = Tags(2)
    first = tags.of(0, (1, 2, 3))
    assert tags.of(0, (1, 2, 3)) == first == Tags(1).of(0, (1, 2, 3))  # after a remount, too
    seen = [first]
    for number in range(1000):
        seen.append(tags.of(0, (1, 2, number + 4)))
        assert tags.of(0, (1, 2, number + 4)) == seen[-1] <= TAG_MAX
    assert all(one != other for one, other in itertools.pairwise(seen))
    assert len(set(seen)) == len(seen)
    tags.renew(0)
    assert tags.of(0, (1, 2, 1003)) not in seen
    assert tags.of(1, (1, 2, 3)) == first


def test_the_board_is_shared_with_children() -> None:
    board = Board()
    pid = os.fork()
    if not pid:
        board.slot(0).failed()
        os._exit(0)
    os.waitpid(pid, 0)
    assert board.failures == 1


def _errno_of_listing(path: Path) -> int:
    try:
        os.listdir(path)
    except OSError as error:
        return error.errno or 0
    return 0


def test_a_killed_mount_process_leaves_a_mount_that_can_be_cleared(program: Program, shard: Path) -> None:
    with program.mounted("--layout", "files", shard, ends_itself=True) as mounted:
        for pid in [mounted.pid, *workers_of(mounted)]:
            kill(pid)
        mounted.wait_for_exit()
        wait_until(lambda: _errno_of_listing(mounted.path) == errno.ENOTCONN, "the end of the connection")
        assert subprocess.run(["ls", mounted.path], capture_output=True, check=False).returncode
        program.run("umount", mounted.path)
