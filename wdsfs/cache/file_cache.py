"""Whole files in the cache: each is made once, by one process, and never changed.

A file is written as a `part`, synced, and only then renamed to its kind. So a file of another kind is whole, even
after a kill or a power cut. The writer holds a lock on the part; other processes that need the file wait for it.

A new file evicts others if there is no room, until it takes half of the limit: its size is known only when it is
whole, and one that never fits must not evict all others before. Files that a process has open are evicted last.

The mtime of a file is always the same one, so that it shows if somebody has written into it since it was whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from wdsfs import waits
from wdsfs.cache import cache_directory
from wdsfs.cache.cache_directory import PART, READING, CacheDirectory, CacheEntry, is_at, unlink
from wdsfs.cache.cache_room import NEEDED, CacheRoom, chosen_limit
from wdsfs.errors import bytes_text

MADE_NS = 1_000_000_000  # the mtime of a file that is as it was made


class NoRoom(Exception):
    """Lack of room for a file; the text says why."""


class CachedFile(NamedTuple):
    """An open file of the cache, and its kind."""

    fd: int
    kind: str


class NewFile:
    """A file of at most `most` bytes that is being made, open to read and write at `fd`."""

    def __init__(self, fd: int, path: str, room: CacheRoom, most: int, age: float) -> None:
        self.fd, self.path = fd, path
        self._room, self._most, self._age = room, most, age
        self._reserved = 0

    def write(self, data: bytes) -> None:
        """Append data. Raises NoRoom, OSError."""
        self.reserve(self._reserved + len(data))
        view = memoryview(data)
        while view:
            view = view[os.write(self.fd, view) :]

    def reserve(self, size: int) -> None:
        """Reserve room for a file that has `size` bytes in all. Raises NoRoom, OSError."""
        further, is_large = size - self._reserved, size > self._most // 2
        if further < 0:
            self._room.give_back(-further)
        elif size > self._most or not self._room.reserve(further, math.inf if is_large else self._age):
            raise NoRoom(self._refusal(size))
        self._reserved = size

    def _refusal(self, size: int) -> str:
        taken, limit = self._room.state()
        if size > self._most:
            return f"it is larger than the cache may be ({bytes_text(limit)})"
        large = "it needs more than half of the cache, and " if size > self._most // 2 else ""
        return f"{large}the cache is full ({bytes_text(taken)} of {bytes_text(limit)} are in use)"


Fill = Callable[[NewFile], tuple[str, int]]  # writes a file; returns its kind, and how many bytes are valid


def cache(*, notes_use: bool = True) -> FileCache:
    """Return the cache that this process uses. Raises UsageError, IndexUnusable."""
    return FileCache(cache_directory.place(), chosen_limit(), notes_use=notes_use)


class FileCache:
    """The cache in `directory`, of at most `limit` bytes: None for a share of the disk.

    Without `notes_use` the ctime of a file stays the same when the file is used again.
    """

    def __init__(self, directory: Path, limit: int | None, *, notes_use: bool = True) -> None:
        self.directory, self.limit, self._notes_use = directory, limit, notes_use
        self._directory = CacheDirectory(directory)
        self.room = CacheRoom(self._directory, limit)

    def find(self, key: str, kinds: Collection[str]) -> CachedFile | None:
        """Return the file of a key of one of these kinds, if there is one. Raises OSError."""
        for kind in kinds:
            try:
                fd = os.open(self._directory.file(key, kind), READING)
            except FileNotFoundError:
                continue
            with contextlib.suppress(OSError):  # another user's, or the directory is read-only
                if self._notes_use:
                    os.utime(fd, ns=(time.time_ns(), os.fstat(fd).st_mtime_ns))
            with contextlib.suppress(BlockingIOError):  # being evicted; the bytes stay until it is closed
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return CachedFile(fd, kind)
        return None

    def make(
        self, key: str, kinds: Collection[str], fill: Fill, least: int = 0, age: float = NEEDED
    ) -> CachedFile:
        """Return the file of a key; `fill` writes it, unless another process has just done so.

        `least`: the least size in bytes that it will have. Files that were not used for more than `age` seconds
        are evicted for it. Raises NoRoom, OSError, trust.Untrusted and what `fill` raises.
        """
        part, most = self._directory.file(key, PART), self.room.most()
        begun = self._begin(key, kinds, part)
        if isinstance(begun, CachedFile):
            return begun
        new = NewFile(begun, part, self.room, most, age)
        try:
            new.reserve(least)
            new.reserve(0)
            kind, size = fill(new)
            os.ftruncate(begun, size)
            new.reserve(size)
            os.utime(begun, ns=(time.time_ns(), MADE_NS))
            os.fdatasync(begun)
            os.rename(part, self._directory.file(key, kind))
            return CachedFile(_reader_of(begun), kind)
        except BaseException as error:
            unlink(part)
            new.reserve(0)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NoRoom(f"the disk of {self.directory} is full") from None
            raise
        finally:
            fcntl.flock(begun, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file open, too
            os.close(begun)

    def _begin(self, key: str, kinds: Collection[str], part: str) -> CachedFile | int:
        """Return the finished file, or an empty part, locked by this process."""
        while True:
            finished = self.find(key, kinds)
            if finished is not None:
                return finished
            fd = self._directory.open(part)
            try:
                if _lock_part(fd, part):
                    finished = self.find(key, kinds)  # since the first look
                    if finished is None and os.fstat(fd).st_uid != os.geteuid():
                        # Left by another member of the group, whose times nobody else can set.
                        unlink(part)
                        os.close(fd)
                        continue
                    if finished is None:
                        os.ftruncate(fd, 0)
                        return fd
                    unlink(part)
                    os.close(fd)
                    return finished
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def place_of(self, fd: int) -> str | None:
        """Return the path of a file that `find` or `make` has opened. The path is valid while the file is open.

        None if the file is gone, or has changed since it was made and is therefore removed. Raises OSError.
        """
        fcntl.flock(fd, fcntl.LOCK_SH)  # if it is being removed, that ends first
        path = os.readlink(f"/proc/self/fd/{fd}")
        if not is_at(fd, path):
            return None
        if is_as_made(os.fstat(fd)):
            return path
        unlink(path)
        return None

    def drop(self, key: str, kind: str) -> None:
        """Remove a damaged file."""
        unlink(self._directory.file(key, kind))

    # --- all of the cache

    def group(self) -> int | None:
        """Return the group (gid) that shares the cache; None if only its owner may write to it."""
        return self._directory.group()

    def entries(self, kinds: Collection[str] = ()) -> list[CacheEntry]:
        """Return all files of these kinds, by default of any, the longest unused one first. Raises OSError."""
        return [entry for entry in self._directory.entries() if not kinds or entry.kind in kinds]

    def prune(self, kinds: Collection[str], keys: Collection[str]) -> None:
        """Remove the files of these kinds that have other keys, unless they are open. Raises OSError."""
        for entry in self.entries(kinds):
            if entry.key not in keys:
                self._directory.remove(entry)

    def trim(self, size: int | None = None) -> int:
        """Remove the longest unused files until at most `size` bytes (by default: the limit) are left.

        Files that are open stay. Returns the bytes freed. Raises OSError.
        """
        return self.room.trim(size) if self.directory.is_dir() else 0

    def clear(self) -> int:
        """Remove all files that are not open; return the bytes freed. Raises OSError."""
        freed = sum(entry.bytes for entry in self.entries() if self._directory.remove(entry))
        if freed:
            self.room.recount()
        return freed


def is_as_made(state: os.stat_result) -> bool:
    """Return True if nobody has written into a file of the cache since it was whole."""
    return state.st_mtime_ns == MADE_NS


def _reader_of(fd: int) -> int:
    """Return a finished file open to read, with a shared lock: no mount reads a file that is open to write."""
    fcntl.flock(fd, fcntl.LOCK_SH)
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(reader, fcntl.LOCK_SH)
    return reader


def _lock_part(fd: int, path: str) -> bool:
    """Lock a part for writing. If another process is writing it, wait for that and return False."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waits.lock(fd, fcntl.LOCK_SH)  # granted when the other process has finished, or died
        return False
    return is_at(fd, path)
