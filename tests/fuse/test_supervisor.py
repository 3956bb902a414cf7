"""The processes of a mount: what serving costs, and what happens when one of them dies, hangs or waits."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from tests import tars
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
from wdsfs.tree.tree import LowerTree

FILES = 200
SIZE = 3000


def content(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


@pytest.fixture
def shard(program: Program) -> Path:
    """A shard of small files with contents of their own."""
    members = (tars.member(b"d/%04d.bin" % number, content(number)) for number in range(FILES))
    return program.write("s.tar", tars.tar(*members))


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


def read_raw(path: Path) -> bytes:
    """Read without the ioctl by which Python before 3.13 asks whether it has opened a terminal."""
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


@contextlib.contextmanager
def costs(mounted: Mounted, **expected: int) -> Iterator[None]:
    """The block makes the kernel ask exactly this."""
    before = mounted.status()["requests"]
    yield
    after = mounted.status()["requests"]
    spent = {kind: count - before.get(kind, 0) for kind, count in after.items()}
    assert {kind: count for kind, count in spent.items() if count} == expected


def test_what_serving_costs(program: Program, shard: Path) -> None:
    """After a listing a small file costs one request: no lookup, getattr, open, flush or release.

    In the folder, which is the current directory: what leads there is asked for again every second.
    """
    with program.mounted("--layout", "files", "--push", "off", shard) as mounted:
        paths = [Path(path.name) for path in files_of(mounted)]
        missing = [Path(f"nothing-{number}") for number in range(5)]
        with contextlib.chdir(mounted.path / "s" / "d"):
            os.close(os.open(paths[0], os.O_RDONLY))  # the kernel asks once whether files are opened
            with costs(mounted):  # opening, stat, another listing, also with all that stat says
                for path in paths:
                    os.close(os.open(path, os.O_RDONLY))
                assert {path.stat().st_size for path in paths} == {SIZE}
                assert sorted(os.listdir()) == [path.name for path in paths]
                with os.scandir() as entries:
                    assert {entry.stat().st_size for entry in entries} == {SIZE}
            with costs(mounted, read=FILES):
                assert [read_raw(path) for path in paths] == [content(number) for number in range(FILES)]
            assert mounted.status()["bytes_read"] == FILES * SIZE
            with costs(mounted):
                assert [read_raw(path) for path in paths] == [content(number) for number in range(FILES)]
            with costs(mounted, lookup=len(missing)):
                assert not any(path.exists() for path in 6 * missing)
            with costs(mounted, read=3):  # what the kernel has dropped is read again
                for _ in range(3):
                    with paths[3].open("rb", buffering=0) as file:
                        drop_pages(file.fileno())
                        assert file.read() == content(3)


# --- death


@contextlib.contextmanager
def loops(*steps: Callable[[], None]) -> Iterator[None]:
    """As long as the block lasts, each step is made again and again, in a thread of its own. None may fail."""
    stop, failures = threading.Event(), list[BaseException]()

    def go(step: Callable[[], None]) -> None:
        try:
            while not stop.is_set():
                step()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=go, args=(step,), daemon=True) for step in steps]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)
        assert not failures, failures[0]  # said first: a test waits in vain for readers that have ended
    assert not any(thread.is_alive() for thread in threads), "a reader waits for ever"


def readers(paths: list[Path], count: int, *, lists: bool = False) -> contextlib.AbstractContextManager[None]:
    """As long as the block lasts, threads read files at random, and drop their pages. None gets a wrong byte."""

    def verify(order: random.Random) -> None:
        path = order.choice(paths)
        with path.open("rb", buffering=0) as file:
            assert file.read() == content(int(path.stem)), f"wrong bytes in {path}"
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert not lists or len(os.listdir(path.parent)) == FILES, "a listing is not whole"

    return loops(*(partial(verify, random.Random(seed)) for seed in range(count)))


def test_killed_workers_cost_no_reader_an_error(program: Program, shard: Path) -> None:
    with program.mounted("--layout", "files", shard) as mounted:
        mounted.expect_log("killed by SIGKILL")
        paths = files_of(mounted)
        with readers(paths, 4, lists=True):
            for round_ in range(20):
                # A worker that has answered: five that die before they answer anything are another story.
                assert not paths[0].with_name(f"nothing-{round_}").exists()
                before = mounted.status()["restarts"]
                kill(random.Random(round_).choice(workers_of(mounted)))
                wait_until(lambda before=before: mounted.status()["restarts"] > before, "a new worker")
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
        with waiting(patched, paths[7]) as reader:
            victims = workers_of(mounted)
            for pid in victims:
                kill(pid)
            wait_until(lambda: mounted.status()["restarts"] >= len(victims), "new workers")
        assert (reader.error, reader.data) in ((errno.ECONNABORTED, b""), (0, content(7)))
        assert paths[8].read_bytes() == content(8)


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


class Reader(threading.Thread):
    """Reads a file in a thread: a request that is lost would hold the tests where no signal reaches them."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self.path, self.data, self.error = path, b"", 0
        self.start()

    def run(self) -> None:
        try:
            self.data = read_raw(self.path)
        except OSError as error:
            self.error = error.errno or 0

    def end(self) -> int:
        """Wait for its end; the errno, 0 without one."""
        self.join(PATIENCE)
        assert not self.is_alive(), "the request is lost"
        return self.error


@contextlib.contextmanager
def waiting(program: Program, path: Path) -> Iterator[Reader]:
    """A reader of a file whose worker waits for a disk as long as the block lasts."""
    reader = Reader(path)
    try:
        wait_until((program.home / "waits").exists, "the read")
        yield reader
    finally:
        (program.home / "go").touch()
        reader.end()


def test_reads_that_wait_for_a_disk_do_not_hold_up_others(patched: Patched, shard: Path) -> None:
    """With a single worker, which waits, everybody else is served all the same."""
    patched.patch = SLOW
    with patched.mounted("--workers", "1", "--layout", "files", shard) as mounted:
        paths = files_of(mounted)
        with waiting(patched, paths[7]) as reader:
            for number in (3, 4, 5):
                assert paths[number].read_bytes() == content(number)
            assert len(workers_of(mounted)) >= 2
        assert reader.data == content(7)


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
        with readers([path for number, path in enumerate(paths) if number != 7], 2):
            assert Reader(paths[7]).end() == errno.EIO
            restarts = mounted.status()["restarts"]
            assert restarts >= DEADLY
            assert [Reader(paths[7]).end() for _ in range(3)] == [errno.EIO] * 3
            assert mounted.status()["restarts"] == restarts, "it is known by now, and costs no further worker"
        assert mounted.status()["state"] == "running"


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
        path = files_of(mounted)[7]
        wait_until(lambda: len(workers_of(mounted)) == DEADLY + 3, "all workers")
        first.touch()
        reader = Reader(path)
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
            assert reader.end() == 0
        assert reader.data == content(7)


def test_a_request_that_kills_on_a_kernel_that_cannot_resend(patched: Patched, shard: Path) -> None:
    """There each death is somebody's error, and then it is refused."""
    patched.patch = OLD_KERNEL + KILLER
    with patched.mounted("--layout", "files", shard) as mounted:
        mounted.expect_log("killed by SIGKILL", f"{DEADLY} workers have died at the same request")
        paths = files_of(mounted)
        seen = list[int]()
        while not seen or seen[-1] != errno.EIO:
            seen.append(Reader(paths[7]).end())
            assert len(seen) < 20
        assert set(seen[:-1]) <= {errno.ECONNABORTED}
        restarts = mounted.status()["restarts"]
        assert Reader(paths[7]).end() == errno.EIO
        assert mounted.status()["restarts"] == restarts
        assert Reader(paths[8]).end() == 0


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
        assert Reader(paths[7]).end() == errno.EIO
        (patched.home / "die").unlink()
        wait_until(lambda: Reader(paths[8]).end() == 0, "normal service")
        assert paths[8].read_bytes() == content(8)
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
            program.write("new", tars.tar(tars.member(b"d/%d.new" % number))).rename(shard)
            wait_until(lambda: _names(folder) == [f"{number}.new"], "the change")  # noqa: B023  # at once
        assert mounted.status()["restarts"] == 0


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        if error.errno not in (errno.ESTALE, errno.EIO, errno.ENOENT):
            raise
        return []


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
        assert files_of(mounted)[7].read_bytes() == content(7)


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
        assert [path.read_bytes() for path in paths] == [content(number) for number in range(FILES)]
        assert len(_links(mounted.pid)) <= len(before)
        refuse.unlink()
        wait_until(lambda: len(workers_of(mounted)) > 1, "another worker")
        wait_until(lambda: sorted(os.listdir(mounted.path)) == ["s", "t"], "the new shard, without a refresh")


def test_the_mount_outlives_its_supervisor(program: Program, shard: Path) -> None:
    with program.mounted("--layout", "files", shard, ends_itself=True) as mounted:
        paths = files_of(mounted)
        kill(mounted.pid)
        mounted.wait_for_exit()
        assert [path.read_bytes() for path in paths] == [content(number) for number in range(FILES)]
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
        program.write(f"n-{number:03d}.tar", tars.tar(tars.member(b"a.txt", b"%04d" % number)))

    def limit() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))

    with program.mounted(f"{program.home}/n-{{000..299}}.tar", preexec_fn=limit) as mounted:
        for _ in range(2):
            for number in range(300):
                assert (mounted.path / f"n-{number:03d}" / "a" / "txt").read_bytes() == b"%04d" % number
        assert mounted.status()["open_files"] <= 128


# --- without a mount


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
