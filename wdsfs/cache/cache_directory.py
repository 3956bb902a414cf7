"""The directory of the cache: finds, lists and removes its files by key and kind (`KEY.KIND`).

Remote objects, unpacked shards, images and tables lie there. `cache_room.py` decides which files are evicted;
`file_cache.py` writes files that are made once and never changed.

A directory that a trusted group may write is the cache of all its members: all may read and write its files.

An object that is filled bit by bit is two files: `KEY.data`, and `KEY.table`, whose lock is that of both and whose
mtime is the last use. Any other file is whole, or a `part` that is being written. The atime of such a file is the
last use, and a process that has it open holds a shared lock on it. A `note` is small, and is removed when it was
not written for a month.

The directory may be on a network file system that several nodes share. NFS implements flock(2) as a lock of all
bytes, and an exclusive lock needs write access. Ranges of a table are claimed by locks of bytes
(`remote/cached_object.py`); so the lock of the table itself is that of a byte beyond all ranges.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import re
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from wdsfs import host, trust
from wdsfs.errors import IndexUnusable
from wdsfs.shards import Fingerprint
from wdsfs.shared_settings import setting

DATA, TABLE, NOTE, PART, NEW = "data", "table", "note", "part", "new"
NOTE_SECONDS = 30 * 86400.0
LOCK_BYTE = 1 << 62  # of a table: beyond all ranges of objects
_SEEN_BYTE, _HELD_BYTE = LOCK_BYTE + 1, LOCK_BYTE + 2
READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
WRITING = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_NAME = re.compile(r"([0-9a-f]{32})\.([a-z]+)")
_ST_BLOCK = 512
_REOPENED = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid


class CacheEntry(NamedTuple):
    """A file of the cache, or both files of an object (as that of its table)."""

    used: float  # seconds since the epoch; 0 for data without a table, which is useless
    bytes: int  # of the disk
    key: str
    kind: str


def key_of(path: bytes, fingerprint: Fingerprint) -> str:
    """Return the key of a file that is made of a file or an object in this state."""
    return hashlib.blake2b(path + b"\0" + fingerprint.packed, digest_size=16).hexdigest()


def place() -> Path:
    """Return the directory of the cache: beside the index, or the one that `WDSFS_CACHE_DIR` names.

    By settings, because all processes of a mount or a command have to agree. Raises IndexUnusable.
    """
    given, index = setting("CACHE_DIR"), setting("INDEX_DIR")
    directory = Path(os.path.abspath(given)) if given else _beside(os.path.abspath(index or host.cache_dir()))
    try:
        trust.directory(directory, tighten=not given)
    except trust.Untrusted as error:
        # No other place is taken: it might have too little room.
        raise IndexUnusable(f"the cache is not used, since {error.strerror}") from None
    except OSError:
        pass  # not there yet; any other error is reported when a file in it is opened
    return directory


@functools.lru_cache(8)
def _beside(index: str) -> Path:
    """Return the cache beside an index, which may lie elsewhere than was named. Raises IndexUnusable."""
    notices: list[str] = []
    directory = host.index_place(Path(index), notices)
    if directory is None:
        raise IndexUnusable("; ".join(notices))
    return host.beside_index(directory) / "cache"


def is_at(fd: int, path: str | Path) -> bool:
    """Return True if a file is still the one with this name."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def flocked(fd: int) -> Iterator[None]:
    """Lock a file for the block. A child that was forked meanwhile has the descriptor, too, so it is unlocked."""
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def lock_range(fd: int, how: int, begin: int, size: int, *, wait: bool = False) -> None:
    """Lock bytes of an open file (`fcntl.F_WRLCK`), or unlock them (F_UNLCK), for its open file description.

    It ends with the last descriptor, also that of a killed process. Raises BlockingIOError or PermissionError if
    another one has it, unless it may `wait`; OSError.
    """
    lock = _FLOCK.pack(how, os.SEEK_SET, begin, size, 0)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, lock)


@contextlib.contextmanager
def table_locked(fd: int, *, wait: bool = True) -> Iterator[None]:
    """Lock a table, open to read and write, for the block. Raises as `lock_range`."""
    lock_range(fd, fcntl.F_WRLCK, LOCK_BYTE, 1, wait=wait)
    try:
        yield
    finally:
        lock_range(fd, fcntl.F_UNLCK, LOCK_BYTE, 1)


def see_others(fd: int) -> None:
    """Make a network file system show what other nodes have written into an open file until now. Raises OSError.

    NFS does so when bytes are locked; not even at an open if this node writes into the file, too.
    """
    lock_range(fd, fcntl.F_RDLCK, _SEEN_BYTE, 1)  # which nobody locks otherwise
    lock_range(fd, fcntl.F_UNLCK, _SEEN_BYTE, 1)


def hold(fd: int) -> None:
    """Keep an object in the cache as long as this open file of its table is open, here or in a child.

    Raises OSError.
    """
    lock_range(fd, fcntl.F_RDLCK, _HELD_BYTE, 1, wait=True)  # if it is being removed, that ends first


@contextlib.contextmanager
def _removal_locked(fd: int) -> Iterator[None]:
    """Lock any other file, open to read, for its removal. Raises BlockingIOError if it is in use, OSError."""
    with contextlib.ExitStack() as opened:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            fd = os.open(f"/proc/self/fd/{fd}", _REOPENED)  # NFS
            opened.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        opened.callback(fcntl.flock, fd, fcntl.LOCK_UN)  # a child that is forked now has the file, too
        yield


class CacheDirectory:
    """The directory, by path: it may be removed and made again at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_trusted = False
        self._group: int | None = None  # trusted group that shares the directory

    def file(self, key: str, kind: str) -> str:
        """Return the path of a file."""
        return f"{self.path}/{key}.{kind}"

    def open(self, path: str, flags: int = 0) -> int:
        """Open a file to read and write, made if there is none. Raises OSError, trust.Untrusted."""
        if self._is_trusted:
            with contextlib.suppress(FileNotFoundError):  # somebody has removed the directory
                return self._opened(path, flags)
        trust.directory(self.path, create=True)
        self._group = self.group()
        self._is_trusted = True
        return self._opened(path, flags)

    def group(self) -> int | None:
        """Return the group (gid) that shares the directory; None if only its owner may write to it."""
        with contextlib.suppress(OSError):
            status = os.stat(self.path)
            if status.st_mode & stat.S_IWGRP:
                return status.st_gid
        return None

    def _opened(self, path: str, flags: int) -> int:
        if self._group is None:
            return os.open(path, WRITING | os.O_CREAT | flags, 0o600)
        while True:
            with contextlib.suppress(FileNotFoundError):
                return os.open(path, WRITING | flags)
            with contextlib.suppress(FileExistsError):
                self._make_for_group(path, self._group)

    def _make_for_group(self, path: str, group: int) -> None:
        """Make an empty file that the group may read and write, whatever the umask. Raises FileExistsError.

        It has that mode before it has its name: no member ever meets a file that is closed to others.
        """
        new = self.file(os.urandom(16).hex(), NEW)
        fd = os.open(new, WRITING | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.fchown(fd, -1, group)
            os.fchmod(fd, 0o660)
            os.link(new, path)
        finally:
            os.close(fd)
            unlink(new)

    def entries(self) -> list[CacheEntry]:
        """Return all files but notes, the longest unused one first; old notes go. Raises OSError."""
        files, entries = dict(self._scan()), []
        for (key, kind), state in files.items():
            used, blocks = state.st_atime, state.st_blocks
            if kind == NOTE:
                if state.st_mtime < time.time() - NOTE_SECONDS:
                    unlink(self.file(key, NOTE))
                continue
            if kind == DATA:
                if (key, TABLE) in files:
                    continue
                used = 0.0
            if kind == TABLE:
                used = state.st_mtime
                blocks += files[key, DATA].st_blocks if (key, DATA) in files else 0
            entries.append(CacheEntry(used, blocks * _ST_BLOCK, key, kind))
        return sorted(entries)

    def _scan(self) -> Iterator[tuple[tuple[str, str], os.stat_result]]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as files:
            for file in files:
                name = _NAME.fullmatch(file.name)
                if name is not None:
                    with contextlib.suppress(FileNotFoundError):
                        yield (name[1], name[2]), file.stat(follow_symlinks=False)

    def _content(self, entry: CacheEntry) -> str:
        return self.file(entry.key, DATA if entry.kind == TABLE else entry.kind)

    def remove(self, entry: CacheEntry, *, even_open: bool = False) -> bool:
        """Remove a file, or both files of an object; return False if it stays.

        A file stays while it is written or opened, and while it is open unless `even_open`: then its bytes stay
        until it is closed. An object may be open, but not held. Raises OSError.
        """
        paths = [self.file(entry.key, entry.kind)]
        if entry.kind == TABLE:
            paths.insert(0, self._content(entry))  # goes first: a table without data is started again
        may_be_open = even_open and entry.kind not in (PART, TABLE)
        with contextlib.ExitStack() as opened:
            for path in reversed(paths):
                is_table = path.endswith(f".{TABLE}")
                try:
                    fd = os.open(path, WRITING if is_table else READING)
                    opened.callback(os.close, fd)
                    opened.enter_context(table_locked(fd, wait=False) if is_table else _removal_locked(fd))
                    if is_table:
                        lock_range(fd, fcntl.F_WRLCK, _HELD_BYTE, 1)
                except FileNotFoundError:
                    continue
                except PermissionError:
                    return False
                except BlockingIOError:
                    if not may_be_open:
                        return False
                if not is_at(fd, path):  # replaced since it was opened
                    return False
            for path in paths:
                unlink(path)
        return True


def unlink(path: str) -> None:
    """Remove a file if it is there. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
