"""Shared by the tests that run the program: `program` and its `mounted()`.

`Program` runs wdsfs as a real process, with an index, a state and a runtime directory of its own, as the user of
the tests or as an ordinary one. `Program.mounted()` mounts, and when its block is left sees to it that the mount
ended well: exit status 0, nothing mounted any more, the directory empty again, no process and no registration
left over, no descriptor leaked, and no warning in the log that the test has not declared with `expect_log`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import logging
import os
import pwd
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, settings

from tests import needs, processes, warm_start
from tests.processes import PATIENCE, Process, Word, finished, wait_until
from tests.warm_start import WarmProcess, WarmStart
from tests.web_server import WebServer
from wdsfs import mount_registry, mount_table
from wdsfs.kernel.manifest import image_of

if TYPE_CHECKING:
    from tests.servers import Server

processes.mark_programs()

# Many a container sets this. Then every process that the tests start compiles all of wdsfs anew: a sixth of
# the time that these processes take.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# What a script starts in the background ignores interrupts, and what `nohup` starts ignores SIGHUP; so would all
# programs to which the tests send these signals.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# No test measures time: they count steps, requests or bytes. In continuous integration all runs look at the same
# examples; elsewhere the search for others goes on.
settings.register_profile(
    "wdsfs",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],  # it measures time, too
)
settings.load_profile("wdsfs")

ROOT = Path(__file__).parent.parent
REQUIRED = bool(os.environ.get("WDSFS_REQUIRE_FUSE"))
USER_HOME = f"wdsfs-test-{os.getpid()}-"
DESCRIPTORS_OF_CHANGES = 264  # of files and directories of an overlay
# That a process of a mount may have besides those of shards: log, FUSE, epoll, LMDB, pipes, and the connections of
# commands that were open when it was forked.
DESCRIPTORS = 40
PROXIES = {"http_proxy", "https_proxy", "all_proxy"}
CONNECTIONS = 128  # of a fetcher, which keeps those to stores for a while

_WORTH_A_LOOK = re.compile(
    r" (WARNING|ERROR|CRITICAL) |^wdsfs: (warning|error|critical): |^Traceback|Exception ignored"
)

_CLONE_NEWNS, _MS_REC, _MS_SLAVE, _MNT_DETACH = 0x20000, 0x4000, 0x80000, 2
_CACHESTAT = 451  # the number of the system call, on all architectures

_FAILED, _NOTED = pytest.StashKey[bool](), pytest.StashKey[bool]()
_WARM: list[WarmStart] = []  # none: every program is started by an interpreter of its own


def pytest_configure(config: pytest.Config) -> None:
    """Give each process of a parallel run a mount table of its own, where it may have one.

    Commands such as `status` list every mount of the machine, so a test would also see those that the tests beside
    it make and end at that moment, with their odd names.
    """
    assert float(config.getini("timeout")) > 2 * PATIENCE, "a wait is to fail before its test, and to say for what"
    # Debian 13 has /tmp in memory, where no read can ask for cached bytes alone (RWF_NOWAIT).
    if mount_table.filesystem_type(tempfile.gettempdir()) == "tmpfs":
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/var/tmp")
    libc = ctypes.CDLL(None)
    if hasattr(config, "workerinput") and libc.unshare(_CLONE_NEWNS) == 0:
        # What is mounted here is seen by nobody else. What others unmount outside goes here, too, but not where
        # their mounts are private: a copy would keep a mount of other tests, and its daemon, as long as we run.
        assert libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None) == 0
        for one in reversed(mount_table.mounts()):
            if one.fstype == "fuse.wdsfs" or image_of(one) is not None:
                libc.umount2(one.path, _MNT_DETACH)  # it may be gone already


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by what they need, so that `-m` can leave them out."""
    needs.mark(items)


def drop_pages(fd: int) -> None:
    """Drop a file from the page cache, and return when none of its pages is left.

    The kernel keeps pages that it is just about to move or to reclaim, so it is asked again.
    """

    def is_dropped() -> bool:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return not _cached_pages(fd)

    wait_until(is_dropped, "the pages to be dropped")


def _cached_pages(fd: int) -> int:
    """How many pages of a file are in the page cache; 0 before Linux 6.5, which does not say it."""
    whole, found = (ctypes.c_uint64 * 2)(), (ctypes.c_uint64 * 5)()
    return int(found[0]) if ctypes.CDLL(None).syscall(_CACHESTAT, fd, whole, found, 0) == 0 else 0


def need_fuse() -> None:
    """Skip the test where there is no FUSE, or fail where WDSFS_REQUIRE_FUSE says that there has to be."""
    missing = ""
    if not os.path.exists("/dev/fuse"):
        missing = "there is no /dev/fuse"
    elif os.geteuid() and not shutil.which("fusermount3"):
        missing = "there is no fusermount3"
    if missing and REQUIRED:
        pytest.fail(f"{missing}, and WDSFS_REQUIRE_FUSE is set")
    if missing:
        pytest.skip(missing)


@contextlib.contextmanager
def device_for_everyone(device: str = "/dev/fuse", note: Path = Path("/run/wdsfs-tests-device")) -> Iterator[None]:
    """Let ordinary users mount, as udev does on a whole machine. Where nothing may be skipped it is done here.

    All processes that run tests at the same time share the device, so the last one that needs it so gives it back:
    each holds a lock of the file `note`, in which the mode is that the device had.
    """
    need_fuse()
    if os.geteuid():
        yield
        return
    with note.open("a+") as shared:
        fcntl.flock(shared, fcntl.LOCK_SH)
        while not _open_to_all(device):
            if not REQUIRED:
                pytest.skip("ordinary users may not open /dev/fuse; type: chmod 666 /dev/fuse")
            fcntl.flock(shared, fcntl.LOCK_EX)  # nobody has it open to all now, or is about to close it
            if not _open_to_all(device):
                shared.truncate(0)
                shared.write(f"{stat.S_IMODE(os.stat(device).st_mode):o}")
                shared.flush()
                os.chmod(device, 0o666)
            # Another process may have the lock between one kind and the other: hence the loop.
            fcntl.flock(shared, fcntl.LOCK_SH)
        try:
            yield
        finally:
            with contextlib.suppress(BlockingIOError):  # others need it still
                fcntl.flock(shared, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shared.seek(0)
                if mode := shared.read():
                    os.chmod(device, int(mode, 8))
                    shared.truncate(0)
            fcntl.flock(shared, fcntl.LOCK_UN)  # closing is not enough: a process forked meanwhile has it, too


def _open_to_all(device: str) -> bool:
    return os.stat(device).st_mode & 0o006 == 0o006


@pytest.fixture(scope="session", autouse=True)
def _reap_orphans(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Become the parent of every daemon, so that its exit status can be had and none is overlooked.

    What is left of all that the tests have started is killed, and the last test fails.
    """
    assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER
    processes.start_keeper(tmp_path_factory.getbasetemp(), Path(tempfile.gettempdir()) / USER_HOME)
    if os.environ.get("WDSFS_COLD_START") != "1":
        _WARM.append(WarmStart())
    yield
    while _WARM:
        _WARM.pop().close()
    assert processes.kill_marked(os.environ[processes.MARK], PATIENCE) == {}, "what the tests have left"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """When a test has failed, kill what it has left, so that it does not disturb the next ones."""
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    if call.when == "teardown" and item.stash[_FAILED] and item.stash.get(_NOTED, False):
        names = processes.marked(os.environ[processes.MARK])
        for pid in new_processes() & names.keys():
            print(f"ended after a test that has failed: {names[pid]}")
            processes.kill(pid)
    return report


@contextlib.contextmanager
def fails(*numbers: int) -> Iterator[None]:
    """The block ends with an OSError of one of these numbers."""
    with pytest.raises(OSError, check=lambda error: error.errno in numbers):
        yield


@dataclass(frozen=True)
class User:
    uid: int
    gid: int


FUSE, KERNEL = "fuse", "kernel"
# For tests that only read: their mounts are served by a daemon, and once more by the kernel.
BOTH_ENGINES = pytest.mark.parametrize("engine", [FUSE, KERNEL], indirect=True)


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> str:
    """Who serves the mounts of a test; FUSE unless the test is marked with BOTH_ENGINES."""
    found: str = getattr(request, "param", FUSE)
    if found == KERNEL:
        from tests.kernel.mounts import need_erofs  # late: it imports this module

        need_erofs()
    return found


@pytest.fixture
def program(tmp_path: Path, engine: str) -> Program:
    """The program as the user who runs the tests."""
    return Program(tmp_path, engine=engine)


@pytest.fixture
def user_program() -> Iterator[Program]:
    """The program as an ordinary user, in a directory that this user can reach."""
    user = None
    if os.geteuid() == 0:
        closed = [str(path) for path in ROOT.parents if not path.stat().st_mode & 0o001]
        assert not closed, f"other users must reach this checkout: chmod o+x {' '.join(closed)}"
        entry = pwd.getpwnam("nobody")
        user = User(entry.pw_uid, entry.pw_gid)
    with program_of(user) as program:
        yield program


@pytest.fixture
def web() -> Iterator[WebServer]:
    """A web server that counts what it is asked, and misbehaves where a test wants it."""
    with WebServer().running() as server:
        yield server


@pytest.fixture
def web_program(tmp_path: Path) -> Program:
    """The program with a cache of its own, and no proxy between it and the servers of the tests."""
    found = Program(tmp_path)
    for name in PROXIES | {one.upper() for one in PROXIES}:
        found.environment.pop(name, None)
    found.environment["WDSFS_CACHE_DIR"] = str(found.directory("cache"))
    return found


def _started_once(name: str) -> Any:
    """A fixture: a real server, started once for all tests that need it."""

    @pytest.fixture(scope="session", name=name)
    def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        from tests import servers  # late: it imports this module

        with getattr(servers, name)(tmp_path_factory.mktemp(name)) as server:
            yield server

    return started


seaweedfs, azurite = _started_once("seaweedfs"), _started_once("azurite")
fake_gcs, nginx = _started_once("fake_gcs"), _started_once("nginx")


@contextlib.contextmanager
def program_of(user: User | None) -> Iterator[Program]:
    """The program as this user (None: as the user of the tests), in a directory that this user can reach."""
    home = Path(tempfile.mkdtemp(prefix=USER_HOME))
    if user:
        os.chown(home, user.uid, user.gid)
    try:
        yield Program(home, user)
    finally:
        shutil.rmtree(home)


class Program:
    """Runs `wdsfs`. `home` is for everything that a test writes; `engine` serves what is mounted."""

    def __init__(self, home: Path, user: User | None = None, engine: str = FUSE) -> None:
        self.home, self.user, self.engine = home, user, engine
        self.uid = user.uid if user else os.geteuid()
        self.mountpoint = self.directory("mnt")
        self.directory("run")
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("WDSFS_", "XDG_"))},
            **warm_start.INTERPRETER,
            "HOME": str(home),
            "WDSFS_INDEX_DIR": str(home / "index"),
            "XDG_STATE_HOME": str(home / "state"),
            "XDG_RUNTIME_DIR": str(home / "run"),
        }

    def directory(self, name: str) -> Path:
        """An empty directory of this user in `home`."""
        path = self.home / name
        path.mkdir(mode=0o700)
        if self.user:
            os.chown(path, self.user.uid, self.user.gid)
        return path

    def command(self, *arguments: Word) -> list[str | bytes]:
        start = ["-m", "wdsfs"]
        if self.user is not None:
            start = [*warm_start.START, str(self.user.uid), str(self.user.gid)]
        return [sys.executable, *start, *(os.fspath(one) for one in arguments)]

    def start(self, *arguments: Word, new_interpreter: bool = False, **options: Any) -> subprocess.Popen[bytes]:
        """Start the program, by `warm_start` unless that would make a difference."""
        environment = {**self.environment, **options.pop("env", {})}
        given = {"cwd": self.home, "env": environment, **options}
        if _WARM and not new_interpreter and warm_start.serves(given):
            user = (self.user.uid, self.user.gid) if self.user else None
            return WarmProcess(_WARM[0], [os.fspath(one) for one in arguments], user, **given)
        return Process(self.command(*arguments), **given)

    def run(self, *arguments: Word, code: int | None = 0, **options: Any) -> subprocess.CompletedProcess[bytes]:
        """Run to the end and check the exit code (None: whatever it is)."""
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with self.start(*arguments, **{**streams, **options}) as process:
            try:
                out, err = process.communicate(timeout=PATIENCE)
            except BaseException:
                process.kill()
                raise
        assert code is None or process.returncode == code, (process.returncode, out, err)
        return subprocess.CompletedProcess(process.args, process.returncode, out or b"", err or b"")

    def on_terminal(self, *arguments: Word, code: int = 0, **options: Any) -> bytes:
        """Return what a command shows on a terminal, with standard error. It is read while the command runs: a
        terminal that nobody reads is full after some kilobytes, and the command would wait for ever."""
        main, terminal = os.openpty()
        shown = b""
        try:
            with self.start(
                *arguments, **{"stdin": subprocess.DEVNULL, "stdout": terminal, "stderr": terminal, **options}
            ) as process:
                os.close(terminal)
                with contextlib.suppress(OSError):  # EIO: nobody has the terminal open any more
                    while select.select([main], [], [], PATIENCE)[0]:
                        shown += os.read(main, 1 << 16)
                try:
                    assert process.wait(PATIENCE) == code, shown
                except BaseException:
                    process.kill()
                    raise
        finally:
            os.close(main)
        return shown

    def json(self, *arguments: Word, code: int | None = 0, **options: Any) -> Any:
        return json.loads(self.run(*arguments, "--json", code=code, **options).stdout)

    def refused(self, *arguments: Word, code: int, **options: Any) -> str:
        """The message of a command that fails with this code; it is one line, and no traceback."""
        done = self.run(*arguments, code=code, **options)
        lines = done.stderr.decode(errors="replace").splitlines()
        assert len(lines) == 1, lines
        return lines[0]

    def tool(self, *command: Word, code: int | None = 0, **options: Any) -> bytes:
        """The output of another program, run by the same user."""
        who = {"user": self.user.uid, "group": self.user.gid, "extra_groups": []} if self.user else {}
        place = {"cwd": self.home, "env": {**os.environ, "LC_ALL": "C.UTF-8", "TZ": "UTC"}}
        given: dict[str, Any] = {"text": False, **place, **who, **options}
        return bytes(finished(*command, code=code, **given).stdout or b"")

    def write(self, name: str | bytes, content: bytes) -> Path:
        """A shard, or another file, in `home`."""
        path = self.home / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def registration(self, mountpoint: Path) -> Path:
        """The file by which commands find the daemon of a mount, or its guard."""
        runtime = Path("/run/wdsfs") if self.uid == 0 else self.home / "run" / "wdsfs"
        return mount_registry.file_of(str(mountpoint), ".json", runtime)

    @contextlib.contextmanager
    def mounted(
        self,
        *arguments: Word,
        at: Path | None = None,
        foreground: bool = False,
        ends_itself: bool = False,
        **options: Any,
    ) -> Iterator[Mounted]:
        """Mount, with these arguments of `wdsfs mount` before the mount point.

        `ends_itself` says that the test ends the mount, and how: then only what is left over is checked.
        """
        with device_for_everyone() if self.user else contextlib.nullcontext():
            yield from self._mounted(arguments, at or self.mountpoint, foreground, ends_itself, **options)

    def _mounted(
        self,
        arguments: Sequence[Word],
        at: Path,
        foreground: bool,
        ends_itself: bool,
        **options: Any,
    ) -> Iterator[Mounted]:
        need_fuse()
        if self.engine == KERNEL:
            arguments = ("--engine", KERNEL, "-o", "allow_other", *arguments)
        mounted = Mounted(self, at)
        try:
            mounted.begin(arguments, foreground, **options)
            yield mounted
            if not ends_itself:
                mounted.check_processes()
                mounted.unmount()
                mounted.check_exit()
            mounted.check_leftovers()
            mounted.check_log()
        except BaseException:
            print(f"--- log of {mounted.path}\n{mounted.log()}---")
            raise
        finally:
            mounted.clean_up()


class InProcess(Program):
    """Runs commands inside this process, which is ten times as fast, where nothing speaks against it."""

    def run(self, *arguments: Word, code: int | None = 0, **options: Any) -> subprocess.CompletedProcess[bytes]:
        if arguments[0] == "mount" or options.keys() - {"env"}:
            return super().run(*arguments, code=code, **options)
        from wdsfs.cli import main  # late: most tests run the program as another process

        words = [os.fsdecode(os.fspath(one)) for one in arguments]
        environment = {**dict.fromkeys(os.environ), **self.environment, **options.get("env", {})}
        with contextlib.chdir(self.home):
            done = CliRunner().invoke(main.main, words, env=environment, prog_name="wdsfs")
        unexpected = done.exc_info if not isinstance(done.exception, SystemExit | None) else None
        assert unexpected is None, "".join(traceback.format_exception(*unexpected))
        assert code is None or done.exit_code == code, (done.exit_code, done.stdout, done.stderr)
        return subprocess.CompletedProcess(words, done.exit_code, done.stdout_bytes, done.stderr_bytes)


@pytest.fixture
def in_process(tmp_path: Path) -> Iterator[InProcess]:
    """The program inside this process, whose logging stays as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield InProcess(tmp_path)
    root.handlers[:] = handlers
    root.setLevel(level)


@dataclass
class Mounted:
    """A mount while it lasts."""

    program: Program
    path: Path
    pid: int = 0
    process: subprocess.Popen[bytes] | None = None  # when it is in the foreground
    output: str = ""  # of the command that mounted, until it returned
    expected: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)
    exit_status: int | None = None
    # When each of its processes has started: a mount of many tests may outlive the time in which the kernel gives
    # every number once, and then one of them may be that of another process, which must not be killed.
    _known: dict[int, int | None] = field(default_factory=dict)
    _overlay: str | None = None

    # --- beginning

    def begin(self, arguments: Sequence[Word], foreground: bool, **options: Any) -> None:
        before = descendants(os.getpid())
        if foreground:
            self._begin_in_foreground(arguments, **options)
        else:
            done = self.program.run("mount", *arguments, self.path, code=None, **options)
            self.output = (done.stdout + done.stderr).decode(errors="replace")
            assert done.returncode == 0, self.output
        # Not what servers of the tests have forked meanwhile, which are to go on.
        found = descendants(os.getpid(), *before) - before
        self._known = {pid: mount_registry.start_ticks(pid) for pid in found}
        told = json.loads(self.program.registration(self.path).read_text())
        self.pid, self._overlay = told["pid"], told.get("overlay")
        assert self.pid in self._known

    def _begin_in_foreground(self, arguments: Sequence[Word], **options: Any) -> None:
        """Start, and wait for the READY=1 of sd_notify(3), or for an early exit."""
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices,
            (self.program.home / "foreground.log").open("wb") as log,
        ):
            notices.bind(f"\0wdsfs-test-{os.getpid()}-{id(self)}")
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            told = {"NOTIFY_SOCKET": "@" + notices.getsockname()[1:].decode(), **options.pop("env", {})}
            words = "mount", "--foreground", *arguments, self.path
            self.process = self.program.start(*words, **streams, **options, env=told)
            ended = os.pidfd_open(self.process.pid)
            try:
                ready, _, _ = select.select([notices.fileno(), ended], [], [], PATIENCE)
                assert notices.fileno() in ready, f"it has ended, or is never ready:\n{self.log()}"
                assert notices.recv(1000) == b"READY=1"
            finally:
                os.close(ended)

    # --- while it lasts

    def log(self) -> str:
        """Everything that was said, on the terminal and in the log."""
        place = self.program.home / "foreground.log"
        if self.process is None:
            place = mount_registry.file_of(str(self.path), ".log", self.program.home / "state" / "wdsfs")
        return self.output + (place.read_text(errors="replace") if place.exists() else "")

    def expect_log(self, *patterns: str) -> None:
        """Declare warnings: each pattern has to be found in at least one line of the log."""
        self.expected.extend(patterns)

    def allow_log(self, *patterns: str) -> None:
        """Declare warnings that may come or not."""
        self.allowed.extend(patterns)

    def wait_for_log(self, pattern: str) -> None:
        wait_until(lambda: re.search(pattern, self.log()), f"{pattern!r} in the log")

    def status(self) -> dict[str, Any]:
        """Return the report of `wdsfs status --json`; from the daemon itself while it answers, which is faster.

        A daemon that is at work may be silent for longer than a command waits; then it is asked again.
        """
        report: dict[str, Any] = {}

        def is_told() -> bool:
            found = self._answer()
            if found is None:
                (found,) = self.program.json("status", self.path)
            report.clear()
            report.update(found)
            return bool(found["state"] != mount_registry.SILENT)

        wait_until(is_told, "the daemon to answer")
        return report

    def fetcher(self) -> int:
        """The fetcher's process: never 0 (there is none yet), by which `os.kill` means all that run the tests."""
        found = 0

        def there_is_one() -> bool:
            nonlocal found  # of this answer: at the next one it may be gone, when it has just been killed
            found = self.status()["remote"]["fetcher"]
            return bool(found)

        wait_until(there_is_one, "a fetcher")
        return found

    def _answer(self) -> dict[str, Any] | None:
        file = self.program.registration(self.path)
        if not file.exists() or self.program.engine == KERNEL:  # a guard says nothing of itself
            return None
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(PATIENCE)  # on a busy machine a daemon may take longer than a command waits
            directory = os.open(file.parent, os.O_PATH)  # its own path may be too long for an address
            try:
                client.connect(f"/proc/self/fd/{directory}/{file.stem}.sock")
                client.sendall(b'{"do": "status"}\n')
                with client.makefile("rb") as lines:
                    answer = lines.readline()
            except OSError:
                return None
            finally:
                os.close(directory)
        return {**json.loads(file.read_text()), "state": "running", **json.loads(answer)} if answer else None

    def processes(self) -> set[int]:
        return {self.pid} | descendants(self.pid)

    # --- ending

    def check_processes(self) -> None:
        """No process of the mount keeps descriptors that it has no use for."""
        wait_until(lambda: not self._crowded(), "descriptors to be closed")

    def _crowded(self) -> dict[int, list[str]]:
        found = {}
        for pid in self.processes():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                opened = f"/proc/{pid}/fd"
                links = [os.readlink(f"{opened}/{fd}") for fd in os.listdir(opened)]
                others = [link for link in links if not link.removesuffix(" (deleted)").endswith(".tar")]
                changed = [link for link in others if self._overlay and link.startswith(self._overlay)]
                fetches = b"wdsfs.remote.fetcher" in Path(f"/proc/{pid}/cmdline").read_bytes()
                limit = DESCRIPTORS + CONNECTIONS * fetches
                if len(others) - len(changed) > limit or len(changed) > DESCRIPTORS_OF_CHANGES:
                    found[pid] = others
        return found

    def unmount(self) -> None:
        command = ["umount"] if self.program.uid == 0 else ["fusermount3", "-u", "--"]
        done = subprocess.run([*command, self.path], capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done

    def wait_for_exit(self) -> int:
        """The exit status of the daemon (negative: the signal that ended it)."""
        if self.exit_status is None:
            if self.process is not None:
                self.exit_status = self.process.wait(PATIENCE)
            else:
                wait_until(lambda: os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT), "the end")
                self.exit_status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.exit_status

    def check_exit(self) -> None:
        assert self.wait_for_exit() == 0

    def check_leftovers(self) -> None:
        self.wait_for_exit()
        assert mount_table.mounted_at(self.path) is None
        left = self._known.keys() & descendants(os.getpid())
        try:
            wait_until(lambda: not any(map(self._lives, left)), "the end of all processes")
        except AssertionError:
            subprocess.run(["ps", "-o", "pid,ppid,stat,wchan,args", "-p", ",".join(map(str, left))], check=False)
            raise
        registration = self.program.registration(self.path)
        assert list(registration.parent.glob(f"{registration.stem}*")) == []
        assert stat.S_ISDIR(self.path.lstat().st_mode)
        assert list(self.path.iterdir()) == []

    def _lives(self, pid: int) -> bool:
        started = mount_registry.start_ticks(pid)
        return started is not None and started == self._known[pid]

    def check_log(self) -> None:
        lines = self.log().splitlines()
        odd = [line for line in lines if _WORTH_A_LOOK.search(line)]
        declared = [*self.expected, *self.allowed]
        undeclared = [line for line in odd if not any(re.search(one, line) for one in declared)]
        assert undeclared == [], "\n".join(lines)
        missing = [one for one in self.expected if not any(re.search(one, line) for line in lines)]
        assert missing == [], "\n".join(lines)

    def clean_up(self) -> None:
        """Remove everything, after a failure too."""
        force_unmount(self.path)
        for pid in self._known:
            with contextlib.suppress(ProcessLookupError):
                if self._lives(pid):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait()
        registration = self.program.registration(self.path)
        for file in registration.parent.glob(f"{registration.stem}*"):
            file.unlink()


def open_the_way(path: Path) -> None:
    """Let other users reach a path. Just before they do: each start of pytest closes its directory to them."""
    for place in (path, *path.parents):
        if not place.stat().st_mode & 0o001:
            place.chmod(place.stat().st_mode | 0o011)


def force_unmount(path: Path) -> None:
    """End a FUSE mount, whose requests that hang get an error, or one of an image."""
    for _ in range(3):  # there may be one on top of another
        mounted = mount_table.mounted_at(path)
        if mounted is not None and mounted.fstype.startswith(("fuse", "erofs")):
            processes.unmount(path)


_EARLIER: set[int] = set()
_HANDLED = [getattr(signal, f"SIG{name}") for name in ("HUP", "INT", "QUIT", "USR1", "PIPE", "TERM", "CHLD")]


@pytest.fixture(autouse=True)
def _own_process_state() -> Iterator[None]:
    """Give back what is of the whole process: a program that a test calls here changes it for itself."""
    handlers = {number: signal.getsignal(number) for number in _HANDLED}
    umask = os.umask(0o077)
    os.umask(umask)
    with mock.patch.dict(os.environ), contextlib.chdir(os.curdir):
        yield
    os.umask(umask)
    for number, handler in handlers.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _note_processes(request: pytest.FixtureRequest) -> None:
    """Note the processes of earlier tests and of wider fixtures, which the test does not count as its own."""
    request.node.stash[_NOTED] = True
    processes.reap(_EARLIER)
    _EARLIER.clear()
    _EARLIER.update(descendants(os.getpid()))


def new_processes() -> set[int]:
    """The processes that this test has started and that are still there.

    Not what the process does that forks the programs: at its start, during the first tests, importing trio runs
    `ldconfig`. The programs are no children of it.
    """
    return descendants(os.getpid(), *(one.pid for one in _WARM)) - _EARLIER


def descriptors() -> set[tuple[str, str]]:
    """The descriptors of this process that are open: number, and what it stands for.

    What a test leaves open is in a later set and not in an earlier one. The mere count may also become less
    meanwhile: earlier tests have left garbage, and threads that are about to end.
    """
    place, found = f"/proc/{os.getpid()}/fd", set()
    for name in os.listdir(place):
        with contextlib.suppress(FileNotFoundError):  # that of the list
            found.add((name, os.readlink(f"{place}/{name}")))
    return {one for one in found if one[1] != place}


def descendants(pid: int, *but_below: int) -> set[int]:
    """All processes below this one, zombies included, but none below those."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        if one in but_below:
            continue
        tasks: list[str] = []
        with contextlib.suppress(OSError):  # it has ended
            tasks = os.listdir(f"/proc/{one}/task")
        for task in tasks:
            with contextlib.suppress(OSError):  # this thread has ended
                children = Path(f"/proc/{one}/task/{task}/children").read_text().split()
                waiting.extend(int(child) for child in children)
                found.update(int(child) for child in children)
    return found
