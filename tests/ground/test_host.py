"""Facts about the machine: directories with the wrong owner, the machine itself."""

import errno
import fcntl
import os
import resource
import subprocess
import sys
from pathlib import Path
from resource import RLIM_INFINITY

import pytest

from wdsfs import host, trust
from wdsfs.errors import IndexUnusable, MountError

# -- locks --------------------------------------------------------------------------------------------------


def test_a_lock_is_not_left_to_a_child(tmp_path: Path) -> None:
    """A child that another thread forks while the lock is held inherits the file, and may live for days."""
    until_closed, alive = os.pipe()
    with host.locked(tmp_path / "lock"):
        child = os.fork()
        if not child:
            os.close(alive)
            os.read(until_closed, 1)
            os._exit(0)
    with open(tmp_path / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(alive)
    assert os.waitpid(child, 0)[1] == 0
    os.close(until_closed)


# -- open files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "needed", "after"),
    [
        ((1024, 4096), 0, (4096, 4096)),
        ((1024, 1 << 20), 0, (65536, 1 << 20)),
        ((1024, RLIM_INFINITY), 0, (65536, RLIM_INFINITY)),
        ((1024, RLIM_INFINITY), 70_000, (70_000, RLIM_INFINITY)),
        ((RLIM_INFINITY, RLIM_INFINITY), 70_000, (RLIM_INFINITY, RLIM_INFINITY)),
        ((100_000, 100_000), 0, (100_000, 100_000)),
        ((1024, 4096), 5000, (5000, 5000)),  # by root
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_allowed(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], needed: int, after: tuple[int, int]
) -> None:
    now = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda _: now[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: now.append(limits))
    limit = host.raise_file_limit(needed)
    assert now[-1] == after
    assert limit == host.file_limit()


@pytest.mark.parametrize(("most", "after"), [(1024, 1024), (4096, 4096)])
def test_a_limit_of_open_files_that_cannot_be_raised(
    monkeypatch: pytest.MonkeyPatch, most: int, after: int
) -> None:
    """Only root may raise the hard limit, and a container may forbid any change."""

    def refuse(_: int, limits: tuple[int, int]) -> None:
        if max(limits) > most:
            raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert host.raise_file_limit(5000) == after


# -- directories -------------------------------------------------------------------------------------------


def test_directories_follow_the_xdg_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    assert (host.cache_dir(), host.state_dir()) == (Path("/c/wdsfs"), Path("/s/wdsfs"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert (host.cache_dir(), host.state_dir()) == (
        Path("/h/.cache/wdsfs"),
        Path("/h/.local/state/wdsfs"),
    )


def test_what_is_set_for_numpy_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "OPENBLAS_NUM_THREADS"
    monkeypatch.setattr(host, "_variables_set_here", set())
    monkeypatch.setenv(name, "7")
    host.refuse_algebra_threads()
    assert host.environment()[name] == os.environ[name] == "7"
    monkeypatch.delenv(name)
    host.refuse_algebra_threads()
    assert os.environ[name] == "1"
    assert name not in host.environment()


_HEAP = """
import ctypes, sys
from wdsfs import host
if sys.argv[1] == "mapped":
    host.map_large_blocks()
bytearray(16 << 20)
data = bytearray(3 << 20)
at = ctypes.addressof((ctypes.c_char * len(data)).from_buffer(data))
heap = next(line.split()[0] for line in open("/proc/self/maps") if "[heap]" in line)
begin, end = (int(number, 16) for number in heap.split("-"))
print(begin <= at < end)
"""


@pytest.mark.parametrize(("how", "is_in_heap"), [("mapped", b"False"), ("default", b"True")])
def test_large_blocks_are_mapped_after_one_was_freed(how: str, is_in_heap: bytes) -> None:
    answer = subprocess.run([sys.executable, "-c", _HEAP, how], check=True, capture_output=True)
    assert answer.stdout.strip() == is_in_heap


def test_without_home_the_user_database_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """At boot, systemd and mount(8) set no HOME."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert host.cache_dir().is_absolute()


@pytest.mark.parametrize("home", [None, "", "relative"])
def test_a_user_without_a_home_has_a_directory_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, home: str | None
) -> None:
    """Whatever the working directory is: not one called `~` in it."""
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000_001)
    monkeypatch.delenv("HOME")
    if home is not None:
        monkeypatch.setenv("HOME", home)
    for variable in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, "relative, too")
    for directory in (host.cache_dir(), host.state_dir(), host.config_dir()):
        assert Path("/var/tmp/wdsfs-4000000001") in directory.parents


def test_an_index_that_may_not_be_made_in_home_is_in_var_tmp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HOME=/ in a container."""

    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(trust, "directory", refuse)
    monkeypatch.setattr(host, "_local_place", lambda: tmp_path / "local")
    notices: list[str] = []
    assert host.index_place(tmp_path / ".cache/wdsfs", notices) == tmp_path / "local"
    assert notices == [f"the index directory {tmp_path}/.cache/wdsfs cannot be made (no); using {tmp_path}/local"]
    assert host.index_place(tmp_path, notices) == tmp_path  # it can be read


def test_a_private_directory_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "p"
    for _ in range(2):
        assert host.private_directory(path, MountError) == path
        assert path.stat().st_mode & 0o777 == 0o700
    path.chmod(0o755)
    host.private_directory(path, MountError)
    assert path.stat().st_mode & 0o777 == 0o700


def test_a_private_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(MountError, match=r"p belongs to another user \(uid \d+\)"):
        host.private_directory(tmp_path / "p", MountError)


def test_a_link_or_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "file").touch()
    for name in ("link", "file", "missing/p"):
        with pytest.raises(IndexUnusable, match=f"cannot use the directory .*/{name}: "):
            host.private_directory(tmp_path / name, IndexUnusable)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Stands in for private_directory: what it was asked for."""
    asked: list[Path] = []

    def private_directory(path: Path, error: type[Exception], *, create: bool = True) -> Path:
        asked.append(path)
        return path

    monkeypatch.setattr(host, "private_directory", private_directory)
    return asked


def test_root_always_uses_run(made: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert host.runtime_dir() == Path("/run/wdsfs")


def test_a_user_has_the_directory_of_the_session(
    made: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    user = os.getuid() or 54321
    os.chown(tmp_path, user, -1)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert host.runtime_dir() == tmp_path / "wdsfs"


@pytest.mark.parametrize("session", ["", "relative", "/", "/nothing/here"])
def test_without_a_session_of_ones_own_it_is_in_tmp(
    made: list[Path], monkeypatch: pytest.MonkeyPatch, session: str
) -> None:
    """ "/" stands for a directory of another user, as after `su`."""
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    monkeypatch.setenv("XDG_RUNTIME_DIR", session)
    assert host.runtime_dir() == Path("/tmp/wdsfs-54321")


def test_the_node_local_directory(made: list[Path]) -> None:
    assert host.node_local_dir() == Path(f"/var/tmp/wdsfs-{os.geteuid()}")


# -- the kernel --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "version"),
    [
        ("6.18.44-fc-v669", (6, 18, 44)),
        ("6.9.0-rc1", (6, 9, 0)),
        ("5.15.167.4-microsoft-standard-WSL2", (5, 15, 167, 4)),
        ("6.1", (6, 1)),
        ("odd", ()),
    ],
)
def test_the_kernels_version(release: str, version: tuple[int, ...]) -> None:
    assert host.kernel_version(release) == version


def test_this_kernels_version() -> None:
    release = subprocess.run(["uname", "-r"], capture_output=True, text=True, check=True).stdout
    assert release.startswith(".".join(map(str, host.kernel_version())))


def test_default_jobs_are_the_cores_that_may_be_used() -> None:
    before = os.sched_getaffinity(0)
    assert host.default_jobs() == len(before)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert host.default_jobs() == 1
    finally:
        os.sched_setaffinity(0, before)
