"""Facts about this machine: directories for our files, the disks, the kernel.

Standard library only, no FUSE. Each function reads its facts when it is called. Some make a directory of ours, and
some set up this process (NumPy, the heap, its end); the others change nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import pwd
import re
import resource
import shutil
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from wdsfs import mount_table, trust, waits
from wdsfs.errors import IndexUnusable, MountError, WdsfsError

PROGRAMS = ("/usr/local/bin", "/usr/bin", "/bin")
FILES_MAX = 65536  # open files that a process asks for
LARGE_BLOCK = 2 << 20  # bytes: more than a READ takes, which must not cost a mapping each time
_M_ARENA_MAX, _M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -8, -3, -1  # of malloc.h
_PR_SET_PDEATHSIG = 1  # of prctl.h
_ALGEBRA_THREADS = "OPENBLAS_NUM_THREADS"
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_variables_set_here: set[str] = set()  # variables of the environment that were set here


class MachineFinding(NamedTuple):
    """The result of one check of `wdsfs doctor`: `fail` prevents mounts, `warn` costs something.

    `remedy` is what to type or do.
    """

    name: str
    level: Literal["ok", "warn", "fail"]
    detail: str
    remedy: str = ""


def set_readahead(device: int, size: int) -> None:
    """Set the readahead (bytes) of the file system with this `st_dev`. Raises OSError."""
    name = f"{os.major(device)}:{os.minor(device)}"
    Path(f"/sys/class/bdi/{name}/read_ahead_kb").write_text(f"{size >> 10}\n")


def unwritten_bytes() -> int | None:
    """Return the bytes that the kernel has yet to write to the disks of this machine; None if unknown."""
    try:
        amounts = re.findall(rb"^(?:Dirty|Writeback): +(\d+) kB$", Path("/proc/meminfo").read_bytes(), re.M)
    except OSError:
        return None
    return sum(map(int, amounts)) << 10 if amounts else None


# -- directories ---------------------------------------------------------------------------------------------


def cache_dir() -> Path:
    """Return the default directory of the index; not created."""
    return _xdg("XDG_CACHE_HOME", ".cache") / "wdsfs"


def refuse_algebra_threads() -> None:
    """Have NumPy, when it is imported, start no threads for linear algebra, of which this program does none.

    Starting them takes as much processor time as the rest of NumPy.
    """
    if _ALGEBRA_THREADS not in os.environ:
        os.environ[_ALGEBRA_THREADS] = "1"
        _variables_set_here.add(_ALGEBRA_THREADS)


def map_large_blocks(size: int = LARGE_BLOCK, free: int = 2 * LARGE_BLOCK, *, is_shared: bool = False) -> None:
    """Have the C library map each block of `size` bytes or more, in this process and its forks.

    Without this, one such block that is freed makes it keep the next ones in the heap, up to 32 MiB: the 2 MiB
    that LMDB wants zeroed are then memory of each worker, and holes stay for good. The heap keeps `free` bytes at
    its end. `is_shared`: all threads use one heap. Not by the environment, that commands of `pipe:` inherit.
    """
    with contextlib.suppress(OSError, AttributeError):  # a C library that has no such call
        libc = ctypes.CDLL(None)
        if is_shared:
            libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_MMAP_THRESHOLD, size)
        libc.mallopt(_M_TRIM_THRESHOLD, free)


def keep_freed_memory(size: int) -> None:
    """Have the C library keep up to twice `size` bytes that are freed, in this process and its later children.

    Else the end of the heap is given back to the kernel again and again: a third of the time of reading batches.
    The library learns it from a block of this size that is freed, unless the environment sets its limits.
    """
    bytearray(size)


def give_back_free_memory() -> None:
    """Return the free memory of the heap to the kernel. Takes some milliseconds for 100 MiB."""
    with contextlib.suppress(OSError, AttributeError):  # a C library that has no such call
        ctypes.CDLL(None).malloc_trim(0)


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, even if it is stopped."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def environment() -> dict[str, str]:
    """Return the environment that this program was given, for those of the user's that it starts."""
    return {name: value for name, value in os.environ.items() if name not in _variables_set_here}


def state_dir() -> Path:
    """Return the directory of logs; not created. The same rule for root and others."""
    return _xdg("XDG_STATE_HOME", ".local/state") / "wdsfs"


def config_dir() -> Path:
    """Return the directory of the user's configuration; not created."""
    return _xdg("XDG_CONFIG_HOME", ".config") / "wdsfs"


def _xdg(variable: str, default: str) -> Path:
    # The XDG specification: relative paths are ignored.
    chosen = os.environ.get(variable, "")
    return Path(chosen) if os.path.isabs(chosen) else _home() / default


def _home() -> Path:
    """Return HOME, or the home of this user in the user database.

    A relative path is ignored, as that of an XDG variable. A user number without either has the directory of
    `node_local_dir`, which is not created here.
    """
    home = os.environ.get("HOME", "")
    if not os.path.isabs(home):
        with contextlib.suppress(KeyError):
            home = pwd.getpwuid(os.geteuid()).pw_dir
    return Path(home) if os.path.isabs(home) else _local_place()


def _local_place() -> Path:
    return Path(f"/var/tmp/wdsfs-{os.geteuid()}")


def runtime_dir(*, create: bool = True) -> Path:
    """Return the directory of control sockets and process ids; `create` makes it with mode 0700.

    For root always /run/wdsfs, so that `status` in a login session finds mounts made at boot. For others the
    session's runtime directory, with or without XDG_RUNTIME_DIR (cron jobs have none), if it is this user's (after
    `su` the variable still names the other user's); else /tmp/wdsfs-UID. Where another user was there first, it is
    in the directory of logs, and stays there: so all processes of a user agree, and find each other's mounts.

    Raises MountError when none of them can be made, or is safe.
    """
    for parent in _runtime_parents():
        try:
            return private_directory(parent / "wdsfs", MountError, create=create)
        except MountError:
            continue  # no space, read-only ...: /tmp decides
    places = [Path(f"/tmp/wdsfs-{os.geteuid()}"), state_dir() / f"run-{os.uname().nodename}"]
    if os.path.isdir(places[-1]):
        places.reverse()
    problems: list[str] = []
    for place in places:
        try:
            return _below_own(place, create=create)
        except MountError as error:
            problems.append(str(error))
    raise MountError(f"{'; '.join(problems)}; or set XDG_RUNTIME_DIR to a directory of your own")


def _below_own(path: Path, *, create: bool) -> Path:
    """Return a directory as `private_directory` does, although its parent may be missing. Raises MountError."""
    above = next(parent for parent in path.parents if parent.exists())
    if not create and above != path.parent and os.access(above, os.W_OK | os.X_OK):
        return path
    try:
        if above != path.parent:
            trust.directory(path.parent, create=create)
    except OSError as error:
        raise MountError(f"cannot use the directory {path}: {error.strerror}") from None
    return private_directory(path, MountError, create=create)


def _runtime_parents() -> Iterator[Path]:
    user = os.geteuid()
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    places = [Path("/run")] if user == 0 else [Path(session), Path(f"/run/user/{user}")]
    for place in places:
        try:
            if place.is_absolute() and place.stat().st_uid == user:
                yield place
        except OSError:
            continue


def node_local_dir() -> Path:
    """Return a directory for an index on this machine that survives a reboot: /var/tmp/wdsfs-UID, mode 0700.

    Raises IndexUnusable when another user prepared it, or it cannot be made.
    """
    return private_directory(_local_place(), IndexUnusable)


def index_place(home: Path, notices: list[str]) -> Path | None:
    """Return the directory of the index: `home`, or a node-local one if that is not safe; None if neither is.

    LMDB is not safe on a network file system, and no file is where others can write (`trust`). Nor can a directory
    be made in a HOME that is not this user's, such as the `/` of containers. The reason for another place is added
    to `notices`. Missing directories of `home` are made.
    """
    why = _unfit(home)
    if why is None:
        return home
    try:
        local = node_local_dir()
    except IndexUnusable as error:
        notices.append(f"{why}, and {error}")
        return None
    if mount_table.is_network(mount_table.filesystem_type(local)):
        notices.append(f"{why}, and {local} is on a network file system, too")
        return None
    notices.append(f"{why}; using {local}")
    return local


def _unfit(home: Path) -> str | None:
    """Return why there can be no index in this directory; None if there can."""
    kind = mount_table.filesystem_type(home)
    if mount_table.is_network(kind):
        return f"{home} is on a network file system ({kind}), where LMDB is not safe"
    try:
        trust.directory(home, create=True, tighten=home == cache_dir())
    except trust.Untrusted as error:
        return f"the index directory {home} is not used, since {error.strerror}"
    except OSError as error:
        if error.errno in _FORBIDDEN and not os.path.exists(home):
            return f"the index directory {home} cannot be made ({error.strerror})"
        # Opening the index reports anything else.
    return None


def beside_index(directory: Path) -> Path:
    """Return the directory for files that go with an index: its own, or the user's cache if the index is shared.

    Raises IndexUnusable.
    """
    try:
        status = os.stat(directory)
    except OSError:
        return directory  # making a file there reports it
    if status.st_uid == os.geteuid() and not status.st_mode & stat.S_IWGRP:
        return directory
    notices: list[str] = []
    own = index_place(cache_dir(), notices)
    if own is None:
        raise IndexUnusable("; ".join(notices))
    return own


def private_directory(path: Path, error: type[WdsfsError], *, create: bool = True) -> Path:
    """Create a directory that only this user can use, or check an existing one; without `create` only check.

    In /tmp anyone can make a directory or a link of a known name first, and would then own the files in it. So the
    directory is opened without following a link, and its owner is checked on the descriptor. After that, the
    sticky bit of the parent keeps others from replacing it. Raises `error`.
    """
    try:
        trust.way(path)
        if not create and not os.path.lexists(path):
            os.stat(path.parent)
            return path
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as problem:
        raise error(f"cannot use the directory {path}: {problem.strerror}") from problem
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid():
            raise error(f"the directory {path} belongs to another user (uid {status.st_uid}): have it removed")
        if create and stat.S_IMODE(status.st_mode) & 0o077:
            os.fchmod(fd, 0o700)
    finally:
        os.close(fd)
    return path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes; `path` is a file made for this, which stays. Raises OSError, Interrupted."""
    fd = trust.open_lock(path)
    try:
        waits.lock(fd, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # a child that another thread has forked since then has the file open, too
        os.close(fd)


@contextlib.contextmanager
def in_directory(path: str) -> Iterator[None]:
    """Change the directory for a block, as `contextlib.chdir`, also from a removed one. Raises OSError."""
    before = os.open(".", os.O_PATH | os.O_CLOEXEC)
    try:
        os.chdir(path)
        yield
    finally:
        os.fchdir(before)
        os.close(before)


# -- open files ----------------------------------------------------------------------------------------------


def file_limit() -> int:
    """Return how many files this process may have open."""
    return _count(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def raise_file_limit(needed: int = 0) -> int:
    """Raise the limit of open files as far as this process may, up to FILES_MAX; return the limit.

    Root raises it further if more files are `needed`.
    """
    soft, hard = map(_count, resource.getrlimit(resource.RLIMIT_NOFILE))
    usual = min(hard, FILES_MAX)
    for limit in (max(usual, needed), usual):
        if soft >= limit:
            break
        with contextlib.suppress(OSError, ValueError):  # it is more than `hard`, and this is not root
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit if limit > hard else _limit(hard)))
            return limit
    return soft


def _count(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def _limit(count: int) -> int:
    return resource.RLIM_INFINITY if count == sys.maxsize else count


def files_for_shards(limit: int) -> int:
    """Return how many of a process's open files its shards may take.

    A mount needs some 25 by itself, and up to a quarter of the limit for an overlay.
    """
    return max((limit - 32) // 2, 1)


# -- processors and the kernel ------------------------------------------------------------------------------


def default_jobs() -> int:
    """Return the default number of processes: the cores that this one may use."""
    return len(os.sched_getaffinity(0))


def program(name: str) -> str | None:
    """Return the path of a program of the system, wherever PATH leads, as libfuse does; None if it is missing."""
    return shutil.which(name, path=os.pathsep.join((*PROGRAMS, os.environ.get("PATH", ""))))


def kernel_version(release: str | None = None) -> tuple[int, ...]:
    """Return the numbers at the start of the kernel's release: `6.9.0-rc1` -> (6, 9, 0), `6.18` -> (6, 18)."""
    numbers = re.match(r"\d+(?:\.\d+)*", os.uname().release if release is None else release)
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else ()


def version_text(version: tuple[int, ...]) -> str:
    """Return the text of a version: (6, 9) -> `6.9`."""
    return ".".join(map(str, version)) if version else "of unknown version"
