"""Facts about the machine: directories with the wrong owner, the machine itself."""

import errno
import fcntl
import os
import resource
import sys
from pathlib import Path
from resource import RLIM_INFINITY

import pytest

from tests.processes import finished
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
    ("limits", "needed", "most", "after"),
    [
        ((1024, 4096), 0, None, (4096, 4096)),
        ((1024, 1 << 20), 0, None, (65536, 1 << 20)),
        ((1024, RLIM_INFINITY), 0, None, (65536, RLIM_INFINITY)),
        ((1024, RLIM_INFINITY), 70_000, None, (70_000, RLIM_INFINITY)),
        ((RLIM_INFINITY, RLIM_INFINITY), 70_000, None, (RLIM_INFINITY, RLIM_INFINITY)),
        ((100_000, 100_000), 0, None, (100_000, 100_000)),
        ((1024, 4096), 5000, None, (5000, 5000)),  # by root
        ((1024, 4096), 5000, 4096, (4096, 4096)),  # by others
        ((1024, 4096), 5000, 1024, (1024, 4096)),  # in a container that forbids any change
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_allowed(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], needed: int, most: int | None, after: tuple[int, int]
) -> None:
    now = [limits]

    def set_limits(_: int, limits: tuple[int, int]) -> None:
        if most is not None and max(limits) > most:
            raise ValueError("not allowed to raise maximum limit")
        now.append(limits)

    monkeypatch.setattr(resource, "getrlimit", lambda _: now[-1])
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    assert (host.raise_file_limit(needed), now[-1]) == (host.file_limit(), after)


# -- directories -------------------------------------------------------------------------------------------


def test_directories_follow_the_xdg_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    assert (host.cache_dir(), host.state_dir()) == (Path("/c/wdsfs"), Path("/s/wdsfs"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert (host.cache_dir(), host.state_dir()) == (Path("/h/.cache/wdsfs"), Path("/h/.local/state/wdsfs"))
    monkeypatch.delenv("HOME")  # at boot, systemd and mount(8) set none: the user database is asked
    assert host.cache_dir().is_absolute()


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


@pytest.mark.parametrize(("how", "is_in_heap"), [("mapped", "False"), ("default", "True")])
def test_large_blocks_are_mapped_after_one_was_freed(how: str, is_in_heap: str) -> None:
    assert finished(sys.executable, "-c", _HEAP, how).stdout.strip() == is_in_heap


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
    """A link or a file in its place is refused."""
    path = tmp_path / "p"
    for mode in (0o700, 0o755):
        assert host.private_directory(path, MountError) == path
        path.chmod(mode)
    host.private_directory(path, MountError)
    assert path.stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to("p")
    (tmp_path / "file").touch()
    for name in ("link", "file", "missing/p"):
        with pytest.raises(IndexUnusable, match=f"cannot use the directory .*/{name}: "):
            host.private_directory(tmp_path / name, IndexUnusable)


@pytest.mark.parametrize(
    ("user", "session", "place"),
    [
        (0, "OWN", "/run/wdsfs"),
        (54321, "OWN", "OWN/wdsfs"),
        (54321, "", "/tmp/wdsfs-54321"),
        (54321, "relative", "/tmp/wdsfs-54321"),
        (54321, "/", "/tmp/wdsfs-54321"),  # of another user, as after `su`
        (54321, "/nothing/here", "/tmp/wdsfs-54321"),
    ],
)
def test_the_runtime_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, user: int, session: str, place: str
) -> None:
    """Root's is always in /run, so that mounts made at boot are found in a session."""
    user = os.getuid() or user if session == "OWN" and user else user
    os.chown(tmp_path, user or -1, -1)
    monkeypatch.setattr(host, "private_directory", lambda path, *_, create: path)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setenv("XDG_RUNTIME_DIR", session.replace("OWN", str(tmp_path)))
    assert host.runtime_dir() == Path(place.replace("OWN", str(tmp_path)))


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
    assert os.uname().release.startswith(".".join(map(str, host.kernel_version())))


def test_default_jobs_are_the_cores_that_may_be_used() -> None:
    before = os.sched_getaffinity(0)
    assert host.default_jobs() == len(before)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert host.default_jobs() == 1
    finally:
        os.sched_setaffinity(0, before)
