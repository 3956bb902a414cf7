"""The processes of a mount: what serving costs, and what happens when one of them dies, hangs or waits."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from tests.conftest import Mounted, Program, descriptors, drop_pages
from tests.processes import PATIENCE, wait_until
from wdsfs import mount_registry
from wdsfs.fuse import child_process
from wdsfs.fuse import counters as boards
from wdsfs.fuse.child_process import HelperProcess, in_child
from wdsfs.fuse.counters import DEADLY, Board
from wdsfs.fuse.pass_notes import PassNotes
from wdsfs.fuse.pusher import FAILURES_MAX, PushedMount, PusherProcess, push_ahead
from wdsfs.fuse.supervisor import LATE_MAX, Duty, Supervisor, Worker
from wdsfs.inodes import TAG_MAX
from wdsfs.shards import Fingerprint
from wdsfs.tree.freshness import Generations
from wdsfs.tree.tree import LowerTree

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
        start = [sys.executable, "-c", f"{self.patch}\nfrom wdsfs.cli.main import main\nmain(prog_name='wdsfs')"]
        return [*start, *(os.fspath(one) for one in arguments)]

    def start(
        self, *arguments: str | bytes | Path, new_interpreter: bool = True, **options: Any
    ) -> subprocess.Popen[bytes]:
        return super().start(*arguments, new_interpreter=new_interpreter, **options)


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


def read_raw(path: Path) -> bytes:
    """As `read`, without the ioctl by which Python before 3.13 asks whether it has opened a terminal."""
    with path.open("rb", buffering=0) as file:
        return file.read()


def workers_of(mounted: Mounted) -> list[int]:
    return [pid for pid in mounted.status()["processes"] if pid != mounted.pid]


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


# --- what serving costs


@pytest.fixture
def warm(program: Program, shard: Path) -> Iterator[tuple[Mounted, list[Path]]]:
    """A mount, and the files of a folder that was listed, which is the current directory.

    What leads there is asked for again every second, and what the kernel asks only once it has asked.
    """
    with program.mounted("--layout", "files", "--push", "off", shard) as mounted:
        names = [Path(path.name) for path in files_of(mounted)]
        with contextlib.chdir(mounted.path / "s" / "d"):
            os.close(os.open(names[0], os.O_RDONLY))
            yield mounted, names


@contextlib.contextmanager
def costs(mounted: Mounted, **expected: int) -> Iterator[None]:
    """The block makes the kernel ask exactly this."""
    before = mounted.status()["requests"]
    yield
    after = mounted.status()["requests"]
    spent = {kind: count - before.get(kind, 0) for kind, count in after.items()}
    assert {kind: count for kind, count in spent.items() if count} == expected


def test_reading_a_small_file_costs_one_request(warm: tuple[Mounted, list[Path]]) -> None:
    """After a listing: no lookup, getattr, open, flush or release. The second time it costs nothing."""
    mounted, paths = warm
    with costs(mounted, read=FILES):
        assert [read_raw(path) for path in paths] == [content(number) for number in range(FILES)]
    assert mounted.status()["bytes_read"] == FILES * SIZE
    with costs(mounted):
        assert [read_raw(path) for path in paths] == [content(number) for number in range(FILES)]


def test_opening_costs_nothing(warm: tuple[Mounted, list[Path]]) -> None:
    mounted, paths = warm
    with costs(mounted):
        for path in paths:
            os.close(os.open(path, os.O_RDONLY))


def test_a_second_listing_costs_nothing(warm: tuple[Mounted, list[Path]]) -> None:
    """Nor does a third, by somebody else and with everything that stat says."""
    mounted, paths = warm
    with costs(mounted):
        assert sorted(os.listdir()) == [path.name for path in paths]
        with os.scandir() as entries:
            assert {entry.stat().st_size for entry in entries} == {SIZE}


def test_a_listing_in_one_tree_costs_what_the_first_did(program: Program, shard: Path) -> None:
    """There a directory may change and keep its inode number, so the kernel keeps no listing."""
    with program.mounted("--layout", "files", "--merge", shard) as mounted:
        assert len(os.listdir(mounted.path / "d")) == FILES
        before = mounted.status()["requests"]["readdir"]
        assert len(os.listdir(mounted.path / "d")) == FILES
        assert mounted.status()["requests"]["readdir"] > before


def test_a_file_that_does_not_exist_is_asked_for_once(warm: tuple[Mounted, list[Path]]) -> None:
    mounted, paths = warm
    missing = [paths[0].with_name(f"nothing-{number}") for number in range(5)]
    with costs(mounted, lookup=len(missing)):
        for path in missing:
            assert not path.exists()
    with costs(mounted):
        for path in missing:
            for _ in range(5):
                assert not path.exists()


def test_stat_after_a_listing_costs_nothing(warm: tuple[Mounted, list[Path]]) -> None:
    mounted, paths = warm
    with costs(mounted):
        assert {path.stat().st_size for path in paths} == {SIZE}


def test_what_the_kernel_has_dropped_is_read_again(warm: tuple[Mounted, list[Path]]) -> None:
    mounted, paths = warm
    with costs(mounted, read=3):
        for _ in range(3):
            with paths[3].open("rb", buffering=0) as file:
                assert file.read() == content(3)
                drop_pages(file.fileno())


# --- death


def _verify(paths: list[Path], seed: int, problems: list[str], stop: threading.Event) -> None:
    """Read files at random until stopped; pages are dropped so that workers are asked each time."""
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
                # A worker that has answered: five that die before they answer anything are another story.
                assert not paths[0].with_name(f"nothing-{round_}").exists()
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


OLD_KERNEL = "from wdsfs.fuse.supervisor import Supervisor\nSupervisor._notify = lambda self, note: False"


def test_without_resend_a_killed_worker_fails_its_own_request_only(patched: Patched, shard: Path) -> None:
    """On kernels before 6.9. Here the notification is taken to be refused.

    A read ahead that fails the kernel tries again, page by page, so the reader may not even notice.
    """
    patched.patch = OLD_KERNEL + SLOW
    with patched.mounted("--layout", "files", shard) as mounted:
        mounted.expect_log("killed by SIGKILL")
        paths = files_of(mounted)
        with _waiting(patched, paths[7]) as waiting:
            victims = workers_of(mounted)
            for pid in victims:
                kill(pid)
            wait_until(lambda: mounted.status()["restarts"] >= len(victims), "new workers")
        assert (waiting.error, waiting.data) in ((errno.ECONNABORTED, b""), (None, content(7)))
        assert read(paths[8]) == content(8)


# A read of the file 0007 waits until the file "go" is there, having made the file "waits".
SLOW = """
import os, time
from wdsfs.tree import content
original_read, original_cached = content.read, content.read_cached
def slow_read(wanted, offset, length):
    data = original_read(wanted, offset, length)
    if data[:9] == MARK and not os.path.exists("go"):
        open("waits", "a").close()
        while not os.path.exists("go"):
            time.sleep(0.01)
    return data
HOME = os.getcwd()
MARK = __import__("random").Random(7).randbytes(3000)[:9]
content.read = lambda *a: (os.chdir(HOME), slow_read(*a))[1]
content.read_cached = lambda *a: None
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
        self.reader.join(PATIENCE)
        assert not self.reader.is_alive(), "the request is lost"


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


# A worker that is asked for the content of the file 0007 dies.
KILLER = """
import os
from wdsfs.tree.shard_tree import ShardTree
original = ShardTree.content
def content(self, inode):
    if inode & 0x3FFFFFFF == 7:
        os.kill(os.getpid(), 9)
    return original(self, inode)
ShardTree.content = content
"""


def test_a_request_that_kills_every_worker_gets_eio_and_the_mount_goes_on(patched: Patched, shard: Path) -> None:
    """Nobody else does, though its readers never rest: each request of theirs is answered."""
    patched.patch = KILLER
    with patched.mounted("--layout", "files", shard) as mounted:
        mounted.expect_log("killed by SIGKILL", f"{DEADLY} workers have died at the same request")
        paths = files_of(mounted)
        problems: list[str] = []
        stop = threading.Event()
        others = [path for number, path in enumerate(paths) if number != 7]
        readers = [threading.Thread(target=_read_again, args=(others, seed, problems, stop)) for seed in range(2)]
        for reader in readers:
            reader.start()
        try:
            assert _errno_of(lambda: read(paths[7])) == errno.EIO
            restarts = mounted.status()["restarts"]
            assert restarts >= DEADLY
            for _ in range(3):
                assert _errno_of(lambda: read(paths[7])) == errno.EIO
            assert mounted.status()["restarts"] == restarts, "it is known by now, and costs no further worker"
        finally:
            stop.set()
            for reader in readers:
                reader.join()
        assert problems == []
        assert mounted.status()["state"] == "running"


def _read_again(paths: list[Path], seed: int, problems: list[str], stop: threading.Event) -> None:
    """As `_verify`, for some of the files."""
    order = random.Random(seed)
    while not stop.is_set():
        path = order.choice(paths)
        try:
            with path.open("rb", buffering=0) as file:
                if file.read() != content(int(path.stem)):
                    problems.append(f"wrong bytes in {path}")
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            problems.append(repr(error))


def _errno_of(question: Callable[[], object]) -> int:
    try:
        question()
    except OSError as error:
        return error.errno or 0
    return 0


# A worker that is asked for the content of the file 0007 writes its pid into the file `holder` and waits until the
# file `open` is there. A worker that starts while the file `first` is there serves nothing until it has gone.
HELD = """
import os, time
from wdsfs.tree.shard_tree import ShardTree
from wdsfs.fuse.read_ops import Operations
original, start, home = ShardTree.content, Operations.attach, os.getcwd()
def content(self, inode):
    if inode & 0x3FFFFFFF == 7 and not os.path.exists(home + "/open"):
        with open(home + "/holder.new", "w") as file:
            file.write(str(os.getpid()))
        os.rename(home + "/holder.new", home + "/holder")
        while not os.path.exists(home + "/open"):
            time.sleep(0.01)
    return original(self, inode)
def attach(self, *arguments):
    while os.path.exists(home + "/first"):
        time.sleep(0.01)
    start(self, *arguments)
ShardTree.content, Operations.attach = content, attach
"""


def test_workers_that_are_killed_at_once_are_no_proof(patched: Patched, shard: Path) -> None:
    """The request of the first is sent to the next, which somebody kills too: it is not the cause."""
    patched.patch = HELD
    first, holder = patched.home / "first", patched.home / "holder"
    with patched.mounted("--layout", "files", "--workers", f"{DEADLY + 3}", shard) as mounted:
        mounted.expect_log("killed by SIGKILL")
        path, found = files_of(mounted)[7], list[bytes]()
        wait_until(lambda: len(workers_of(mounted)) == DEADLY + 3, "all workers")
        first.touch()
        reader = threading.Thread(target=lambda: found.append(read_raw(path)))
        reader.start()
        try:
            for _ in range(DEADLY + 2):
                wait_until(holder.exists, "a worker at the request")
                pid = int(holder.read_text())
                holder.unlink()
                kill(pid)
            wait_until(holder.exists, "the last worker at the request")
        finally:
            (patched.home / "open").touch()
            first.unlink()
            reader.join()
        assert found == [content(7)]


def test_a_request_that_kills_on_a_kernel_that_cannot_resend(patched: Patched, shard: Path) -> None:
    """There each death is somebody's error, and then it is refused."""
    patched.patch = OLD_KERNEL + KILLER
    with patched.mounted("--layout", "files", shard) as mounted:
        mounted.expect_log("killed by SIGKILL", f"{DEADLY} workers have died at the same request")
        paths = files_of(mounted)
        seen: list[int | None] = []
        while not seen or seen[-1] != errno.EIO:
            seen.append(_error_of_reading(paths[7]))
            assert len(seen) < 20
        assert set(seen[:-1]) <= {errno.ECONNABORTED}
        restarts = mounted.status()["restarts"]
        assert _error_of_reading(paths[7]) == errno.EIO
        assert mounted.status()["restarts"] == restarts
        assert _error_of_reading(paths[8]) is None


def _error_of_reading(path: Path) -> int | None:
    """In a thread: a request that is lost would hold the tests where no signal reaches them."""
    reader = _Reader(path)
    reader.start()
    reader.join(PATIENCE)
    assert not reader.is_alive(), "the request is lost"
    return reader.error


def test_where_no_worker_comes_up_all_requests_get_eio(patched: Patched, shard: Path) -> None:
    """Until one does."""
    patched.patch = """
import os
from wdsfs.fuse.read_ops import Operations
original, home = Operations.attach, os.getcwd()
def attach(self, *arguments):
    if os.path.exists(home + "/die"):
        os.kill(os.getpid(), 9)
    original(self, *arguments)
Operations.attach = attach
"""
    with patched.mounted("--layout", "files", shard) as mounted:
        mounted.expect_log("killed by SIGKILL", "workers die before they answer anything")
        paths = files_of(mounted)
        (patched.home / "die").touch()
        for pid in workers_of(mounted):
            kill(pid)
        assert _errno_of(lambda: read(paths[7])) == errno.EIO
        (patched.home / "die").unlink()
        wait_until(lambda: _reads(paths[8], content(8)), "normal service")
        assert mounted.status()["state"] == "running"


def _followers(mounted: Mounted) -> set[int]:
    """The process that hears of changes is one of the mount, and no worker."""
    known = {mounted.pid, *workers_of(mounted)}
    return {pid for pid in mounted.processes() - known if mount_registry.start_ticks(pid) is not None}


@pytest.mark.parametrize("merge", [False, True], ids=["", "merge"])
def test_changes_are_noticed_though_who_hears_of_them_is_killed(
    program: Program, shard: Path, merge: bool
) -> None:
    """Also a change that comes while nobody hears."""
    with program.mounted("--layout", "files", *["--merge"] * merge, shard) as mounted:
        mounted.allow_log(r"s\.tar")
        folder = mounted.path / "d" if merge else mounted.path / "s" / "d"
        for number in range(3):
            assert folder.exists()
            wait_until(lambda: _followers(mounted), "somebody who hears")
            for pid in _followers(mounted):
                kill(pid)
            new = program.home / "new"
            with tarfile.open(new, mode="w") as tar:
                info = tarfile.TarInfo(f"d/{number}.new")
                tar.addfile(info)
            new.rename(shard)
            wait_until(lambda: _names(folder) == [f"{number}.new"], "the change")  # noqa: B023  # at once
        assert mounted.status()["restarts"] == 0


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        if error.errno not in (errno.ESTALE, errno.EIO, errno.ENOENT):
            raise
        return []


def _reads(path: Path, expected: bytes) -> bool:
    try:
        return read(path) == expected
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return False


def test_a_worker_that_hangs_is_replaced(patched: Patched, shard: Path) -> None:
    """The clock of the one that hangs goes a thousand times faster: on a slow machine no other is taken for it."""
    patched.patch = """
import os, time
from pathlib import Path
from wdsfs.fuse import supervisor as engine
from wdsfs.tree.shard_tree import ShardTree
from wdsfs.fuse import counters
engine.WATCHDOG_SECONDS = 0.1
content_before, busy, hung = ShardTree.content, counters.Slot.busy_seconds.fget, Path("hung").absolute()
def content(self, inode):
    if inode & 0x3FFFFFFF == 7 and not hung.exists():
        hung.with_suffix(".new").write_text(str(os.getpid()))
        hung.with_suffix(".new").rename(hung)
        while True:
            time.sleep(1)
    return content_before(self, inode)
def busy_seconds(self):
    hangs = hung.exists() and self._words[counters._PID] == int(hung.read_text())
    return busy(self) * (1000 if hangs else 1)
ShardTree.content, counters.Slot.busy_seconds = content, property(busy_seconds)
"""
    with patched.mounted("--workers", "1", "--layout", "files", shard) as mounted:
        mounted.expect_log("has been at one request for", "killed by SIGKILL")
        assert read(files_of(mounted)[7]) == content(7)


def test_a_mount_whose_workers_cannot_be_forked_fails(patched: Patched, shard: Path) -> None:
    patched.patch = """
import errno, os, sys
fork = os.fork
def fork_unless_supervisor():
    if sys._getframe(1).f_code.co_name == "start_child":
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()
os.fork = fork_unless_supervisor
"""
    done = patched.run("mount", shard, patched.mountpoint, code=5)
    assert os.strerror(errno.EAGAIN).encode() in done.stderr
    assert not os.path.ismount(patched.mountpoint)


def test_a_mount_goes_on_while_no_process_can_be_forked(patched: Patched, shard: Path) -> None:
    patched.patch = """
import errno, os
from pathlib import Path
fork, refuse = os.fork, Path("refuse").absolute()
def fork_unless_refused():
    if refuse.exists():
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()
os.fork = fork_unless_refused
"""
    refuse, directory = patched.home / "refuse", patched.directory("set")
    shard.rename(directory / "s.tar")
    with patched.mounted("--follow=3600", "--workers", "2", "--layout", "files", directory) as mounted:
        mounted.expect_log("a worker cannot be started", "a question to the mount has failed", "shows the same")
        mounted.allow_log("noticed late", "nothing is pushed", "killed by SIGKILL")
        paths, before = files_of(mounted), _links(mounted.pid)
        workers = workers_of(mounted)
        refuse.touch()
        (directory / "t.tar").write_bytes((directory / "s.tar").read_bytes())
        assert "the log of the mount" in patched.refused("refresh", mounted.path, code=5)
        (report,) = patched.json("status", mounted.path)
        assert report["state"] == "running"
        assert any("the log" in notice for notice in report["notices"])
        kill(workers[0])
        mounted.wait_for_log("a worker cannot be started")
        assert [read(path) for path in paths] == [content(number) for number in range(FILES)]
        assert len(_links(mounted.pid)) <= len(before)
        refuse.unlink()
        wait_until(lambda: len(workers_of(mounted)) > 1, "another worker")
        wait_until(lambda: sorted(os.listdir(mounted.path)) == ["s", "t"], "the new shard, without a refresh")


def test_the_mount_outlives_its_supervisor(program: Program, shard: Path) -> None:
    with program.mounted("--layout", "files", shard, ends_itself=True) as mounted:
        paths = files_of(mounted)
        kill(mounted.pid)
        mounted.wait_for_exit()
        assert [read(path) for path in paths] == [content(number) for number in range(FILES)]
        (report,) = program.json("status", mounted.path)
        assert report["state"] == "without supervisor"
        program.run("umount", mounted.path)


@pytest.mark.root
@pytest.mark.parametrize("resends", [True, False], ids=["", "clones"])
def test_auto_unmount_waits_for_the_end_of_the_connection(patched: Patched, shard: Path, resends: bool) -> None:
    """The kernel releases the descriptors of a killed process from the highest number downwards.

    The last one has to be the socket by whose end fusermount3 notices that: while a FUSE descriptor is open, it
    takes the mount for alive.
    """
    if not resends:  # as on a kernel that does not know the notification
        patched.patch = """
from wdsfs.fuse import protocol
protocol.resend = lambda: protocol.header(0, 0, -1000)
"""
    with patched.mounted("-o", "auto_unmount", "--workers", "2", shard) as mounted:
        assert mounted.status()["processes"]
        wait_until(lambda: len(_followers(mounted)) == 2, "the follower, and fusermount3")
        devices = {pid: _devices(pid) for pid in mounted.processes()}
        assert sorted(map(len, devices.values())) == ([0, 1, 1, 1, 1] if resends else [0, 1, 1, 1, 3])
        for pid, numbers in devices.items():
            [socket] = _inherited_sockets(pid)
            assert not numbers or socket < min(numbers)


def _links(pid: int) -> dict[int, str]:
    place, links = f"/proc/{pid}/fd", {}
    for name in os.listdir(place):
        with contextlib.suppress(FileNotFoundError):  # it is closed by now
            links[int(name)] = os.readlink(f"{place}/{name}")
    return links


def _devices(pid: int) -> list[int]:
    return [number for number, link in _links(pid).items() if link == "/dev/fuse"]


def _inherited_sockets(pid: int) -> list[int]:
    """The sockets that programs inherit from this process: none of Python's, but that of libfuse."""

    def is_inherited(number: int) -> bool:
        try:
            text = Path(f"/proc/{pid}/fdinfo/{number}").read_text()
        except FileNotFoundError:  # closed since it was listed
            return False
        [flags] = re.findall(r"flags:\s*([0-7]+)", text)
        return not int(flags, 8) & os.O_CLOEXEC

    return [number for number, link in _links(pid).items() if link.startswith("socket:") and is_inherited(number)]


def test_more_shards_than_descriptors(program: Program) -> None:
    """Shards are opened as needed and the longest unused closed; 300 of them under `ulimit -n 128`."""
    for number in range(300):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            info = tarfile.TarInfo("a.txt")
            info.size = 4
            tar.addfile(info, io.BytesIO(b"%04d" % number))
        program.write(f"n-{number:03d}.tar", buffer.getvalue())

    def limit() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))

    with program.mounted(f"{program.home}/n-{{000..299}}.tar", preexec_fn=limit) as mounted:
        for _ in range(2):
            for number in range(300):
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


def test_three_deaths_in_a_row_make_a_request_deadly() -> None:
    board = Board()
    assert not board.watching
    assert [board.blame(17) for _ in range(DEADLY)] == list(range(1, DEADLY + 1))
    assert board.watching
    assert board.is_deadly(17)
    assert not board.is_deadly(18)
    board.absolve(17)
    assert board.is_deadly(17), "the answer was a refusal"
    assert board.blame(18) == 1
    board.absolve(18)
    assert (board.blame(18), board.blame(18)) == (1, 2)
    assert not board.is_deadly(18)


def test_only_a_worker_that_came_after_the_last_death_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others were killed together with the one that had the request first."""
    clock = itertools.count(10**15)
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(clock))
    board, before = Board(), next(clock)
    assert [board.blame(17, before) for _ in range(DEADLY + 1)] == [1] + [0] * DEADLY
    assert [board.blame(17, next(clock)) for _ in range(2)] == [2, DEADLY]
    assert board.is_deadly(17)


@pytest.mark.parametrize("request_", [0, 1, -1, (1 << 63) - 1, -(1 << 63)])
def test_any_number_can_be_a_request(request_: int) -> None:
    """They are what `hash` gives."""
    board = Board()
    for _ in range(DEADLY):
        assert not board.is_deadly(request_)
        board.blame(request_)
    assert board.is_deadly(request_)
    slot = board.slot(0)
    slot.begin(0, request_)
    assert slot.request == request_
    slot.end()
    assert slot.request is None


def test_a_deadly_request_is_tried_again_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [10**15]
    monkeypatch.setattr(time, "monotonic_ns", lambda: clock[0])
    board = Board()
    for _ in range(DEADLY):
        board.blame(17)
        clock[0] += 10**9
    clock[0] += boards.DEADLY_NS - 10**9 - 1
    assert board.is_deadly(17)
    clock[0] += 1
    assert not board.is_deadly(17)
    assert not board.watching
    assert board.blame(17) == 1


def test_what_is_known_of_deaths_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest are kept; which number a request has does not matter."""
    clock = itertools.count(10**15)
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(clock))
    board = Board()
    for request in range(100):
        for _ in range(DEADLY):
            board.blame(request)
    deadly = {request for request in range(100) if board.is_deadly(request)}
    assert deadly == set(range(100 - len(deadly), 100))
    assert len(deadly) >= 8


def test_what_a_worker_died_of_is_known_behind_its_death() -> None:
    board = Board()
    pid = os.fork()
    if not pid:
        board.slot(5).begin(boards.KINDS.index("read"), 4711)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert board.slot(5).request == 4711
    board.slot(5).reset()
    assert board.slot(5).request is None
    pid = os.fork()
    if not pid:
        os._exit(0 if board.blame(4711) == 1 and board.watching else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert board.watching, "all processes know"


def test_a_changed_shard_gets_another_tag_whatever_its_fingerprint() -> None:
    tags = Generations.at_mount(2)
    first = tags.of(0, Fingerprint(1, 2, 3))
    assert (
        tags.of(0, Fingerprint(1, 2, 3)) == first == Generations.at_mount(1).of(0, Fingerprint(1, 2, 3))
    )  # after a remount, too
    seen = [first]
    for number in range(1000):
        seen.append(tags.of(0, Fingerprint(1, 2, number + 4)))
        assert tags.of(0, Fingerprint(1, 2, number + 4)) == seen[-1] <= TAG_MAX
    assert all(one != other for one, other in itertools.pairwise(seen))
    assert len(set(seen)) == len(seen)
    tags.renew(0)
    assert tags.of(0, Fingerprint(1, 2, 1003)) not in seen
    assert tags.of(1, Fingerprint(1, 2, 3)) == first


def supervisor_of(*workers: Worker) -> Supervisor:
    """A supervisor of these workers, which are none of its children."""
    own = Supervisor.__new__(Supervisor)
    own.board, own._follower, own._pusher = Board(), HelperProcess("the follower"), None
    own.workers = {worker.pid: worker for worker in workers}
    return own


def test_workers_that_wait_for_disks_end_their_request_when_the_set_is_another() -> None:
    """What they are at may be long, and would begin anew. But not more and more of them."""
    count = LATE_MAX + 3
    pids = [_sleeping_process() for _ in range(count)]
    workers = [Worker(pid, slot, None, 0) for slot, pid in enumerate(pids)]
    own = supervisor_of(*workers)
    for slot in range(count - 1):  # the last one is idle
        own.board.slot(slot).begin(boards.KINDS.index("read"), 1)
        own.board.slot(slot).wait(True)

    async def exchange() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_reap_workers, own)
            assert not await own.exchange(lambda: pytest.fail("no worker is forked here"), None)
            nursery.cancel_scope.cancel()

    try:
        trio.run(exchange)
        assert [worker.duty for worker in workers[:LATE_MAX]] == [Duty.RETIRED] * LATE_MAX
        assert {worker.duty for worker in workers[LATE_MAX:]} == {Duty.DISMISSED}
        assert all(own.board.slot(slot).retirement[0] for slot in range(LATE_MAX))
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _sleeping_process() -> int:
    pid = os.fork()
    if not pid:
        signal.pause()
        os._exit(0)
    return pid


async def _reap_workers(own: Supervisor) -> None:
    while True:
        await trio.sleep(0.001)
        for pid in list(own.workers):
            if os.waitpid(pid, os.WNOHANG)[0]:  # noqa: ASYNC222  # it does not block
                del own.workers[pid]


def test_a_killed_worker_that_cannot_end_does_not_hold_up_another_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sleeps uninterruptibly, as on a hard NFS mount whose server is gone."""
    own, killed = supervisor_of(Worker(1, 0, None, 0)), list[int]()
    monkeypatch.setattr("wdsfs.fuse.supervisor.kill", killed.append)
    monkeypatch.setattr("wdsfs.fuse.supervisor.RETIRE_SECONDS", 0.01)

    async def exchange() -> bool:
        with trio.fail_after(PATIENCE):
            return await own.exchange(lambda: pytest.fail("no worker is forked here"), None)

    assert trio.run(exchange) is False
    assert 1 in killed


def refuse(number: int) -> Callable[[], int]:
    def refused() -> int:
        raise OSError(number, os.strerror(number))

    return refused


@pytest.mark.parametrize(
    ("call", "number"), [("fork", errno.EAGAIN), ("fork", errno.ENOMEM), ("pipe", errno.EMFILE)]
)
def test_without_a_process_a_question_has_no_answer(
    call: str, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = descriptors()
    monkeypatch.setattr(os, call, refuse(number))
    assert trio.run(in_child, lambda: {"done": True}, None) == {}
    monkeypatch.undo()
    assert descriptors() <= before
    assert os.strerror(number) in caplog.text


@pytest.mark.parametrize("text", [b"", b'{"done": tr', b'{"done": true}'])
def test_a_part_of_an_answer_is_none(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(fd: int, data: bytes, before: Callable[[int, bytes], int] = os.write) -> None:
        before(fd, text)
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(os, "write", write)
    assert trio.run(in_child, lambda: {"done": True}, None) == {}


def test_a_child_whose_answer_comes_too_late_leaves_no_zombie() -> None:
    pids, (receiver, sender) = list[int](), os.pipe()

    async def ask() -> None:
        with trio.move_on_after(0):
            await in_child(lambda: {"never": os.read(receiver, 1)}, None)
        pids.extend(child_process._killed)
        wait_until(lambda: os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOWAIT), "the end of the child")
        assert await in_child(lambda: {"done": True}, None) == {"done": True}

    trio.run(ask)
    os.close(receiver)
    os.close(sender)
    with pytest.raises(ChildProcessError):
        os.waitpid(pids[0], os.WNOHANG)


def test_a_pusher_that_cannot_be_forked_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pusher = PusherProcess(PassNotes())
    monkeypatch.setattr(os, "fork", refuse(errno.EAGAIN))
    for _ in range(2 * FAILURES_MAX):
        pusher.fork(lambda: 0)
        assert pusher.reap() is None
    assert not pusher.passes.off


def test_a_pusher_whose_listers_cannot_be_forked_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mount, tree = PushedMount(-1, ("/mnt", 1), -1, lambda _: None), types.SimpleNamespace(files_layout=False)
    monkeypatch.setattr("wdsfs.fuse.pusher._own_device", lambda shared: -2)
    monkeypatch.setattr("wdsfs.fuse.pusher.Lister", lambda *_, **__: refuse(errno.EAGAIN)())
    assert push_ahead(mount, cast(LowerTree, tree), PassNotes()) == 0
    assert os.strerror(errno.EAGAIN) in caplog.text


def test_a_worker_that_cannot_be_forked_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a kernel where each worker has a descriptor of its own."""
    own, before = supervisor_of(), descriptors()
    own.resends, own.device = False, -1
    monkeypatch.setattr("wdsfs.fuse.fuse_device.clone_device", lambda device: os.open(os.devnull, os.O_RDONLY))
    monkeypatch.setattr(os, "fork", refuse(errno.EAGAIN))
    own._fork()
    assert (own.workers, descriptors() - before) == ({}, set())


def test_the_board_is_shared_with_children() -> None:
    board = Board()
    pid = os.fork()
    if not pid:
        board.slot(0).failed()
        os._exit(0)
    os.waitpid(pid, 0)
    assert board.failures == 1
