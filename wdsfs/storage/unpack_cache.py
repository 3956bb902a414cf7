"""The cache of unpacked shards: whole files in one directory, up to a limit in bytes.

A file is named after its shard and the state of the shard (`key_of`), with a suffix that says what it holds. It is
written under the suffix `part`, synced, and only then renamed, so a file with another suffix is whole, also after
a kill or a power cut. The writer holds a lock on the part; other processes that need the file wait for the lock.

A new file evicts others if there is no room, the least recently opened first, until it takes half of the limit:
its size is known only when it is whole, and one that never fits must not evict all others before. A process that
has a file open holds a shared lock on it; such files are evicted last, and their bytes stay until they are closed.
Those that a mount of the kernel's reads (`held_files.py`) are not evicted.

The atime of a file is when it was last opened. Its mtime is always the same one, so that it shows if somebody has
written into a file that was whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from wdsfs import trust, waits
from wdsfs.errors import bytes_text
from wdsfs.storage import cache_place, held_files
from wdsfs.storage.identity import Fingerprint

# What a file holds. A copy is the intact part of its shard: all of it (with or without other data after it), or
# the part before the end or the damage; an index has the seek points to read the shard without a copy.
WHOLE, TRAILING, TRUNCATED, DAMAGED, INDEX = "tar", "trailing", "truncated", "damaged", "seek"
COPIES = (WHOLE, TRAILING, TRUNCATED, DAMAGED)
_PART = "part"

DEFAULT_LIMIT = 32 << 30  # bytes
STEP = 32 << 20  # bytes that are written between two checks of the free space
RECENT_SECONDS = 3600.0
MADE_NS = 1_000_000_000  # the mtime of a file that is as it was made

Write = Callable[[bytes], None]
Fill = Callable[[Write], tuple[str, int]]  # writes a file; returns what it holds, and how many bytes are valid


class NoRoom(Exception):
    """There is no room for a file; the text says why."""


class Kept(NamedTuple):
    """An open file of the cache, and what it holds."""

    fd: int
    state: str


class CachedFile(NamedTuple):
    opened: float  # seconds since the epoch
    size: int
    path: str


def key_of(path: bytes, found: os.stat_result) -> str:
    """Return the name for a shard in this state: other content has another name.

    Not made from a Fingerprint: the format (docs/format.md) has ctime and inode number apart.
    """
    state = f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}".encode()
    return hashlib.blake2b(path + b"\0" + state, digest_size=16).hexdigest()


def key_of_object(path: bytes, fingerprint: Fingerprint) -> str:
    """As `key_of`, for a shard that is no file: its URL as it is shown, and its fingerprint."""
    return hashlib.blake2b(path + b"\0" + fingerprint.packed, digest_size=16).hexdigest()


def cache() -> UnpackCache:
    """Return the cache that this process uses. Raises UsageError, IndexUnusable."""
    directory = cache_place.place("unpacked shards", beside_index="unpacked", in_given="")
    limit = cache_place.limit()
    return UnpackCache(directory, DEFAULT_LIMIT if limit is None else limit)


@dataclass(frozen=True, slots=True)
class UnpackCache:
    """Files in `directory`, at most `limit` bytes in all."""

    directory: Path
    limit: int

    def find(self, key: str, states: Collection[str]) -> Kept | None:
        """Return the file of a shard of one of these kinds, if there is one. Raises OSError."""
        for state in states:
            try:
                fd = os.open(self._path(key, state), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue
            with contextlib.suppress(OSError):  # another user's, or the directory is read-only
                os.utime(fd, ns=(time.time_ns(), os.fstat(fd).st_mtime_ns))
            with contextlib.suppress(BlockingIOError):  # it is being evicted; its bytes stay until it is closed
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return Kept(fd, state)
        return None

    def make(
        self, key: str, states: Collection[str], fill: Fill, least: int = 0, spare_recent: bool = False
    ) -> Kept:
        """Return the file of a shard; `fill` writes it, unless another process has just done so.

        `least`: the least size in bytes that it will have. `spare_recent`: evict no file that was opened within
        the last hour. Raises NoRoom, OSError and what `fill` raises.
        """
        trust.directory(self.directory, create=True)
        # Not by `durable.new_file`: others wait for the lock on the part, and its descriptor stays open.
        found = self._begin(key, states)
        if isinstance(found, Kept):
            return found
        part = self._path(key, _PART)
        try:
            self._make_room(key, 0, least, spare_recent)
            state, size = fill(self._writer(found, key, spare_recent))
            os.ftruncate(found, size)
            os.utime(found, ns=(time.time_ns(), MADE_NS))
            os.fdatasync(found)
            os.rename(part, self._path(key, state))
            reader = _reader_of(found)
        except BaseException as error:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
            os.close(found)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NoRoom(f"the disk of {self.directory} is full") from None
            raise
        os.close(found)
        return Kept(reader, state)

    def drop(self, key: str, state: str) -> None:
        """Remove a damaged file."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(key, state))

    def hold(self, fd: int) -> str | None:
        """Hold a file that `find` or `make` has opened; returns its path.

        None if it is gone again, or is not as it was made; then it is removed. Raises OSError.
        """
        fcntl.flock(fd, fcntl.LOCK_SH)  # if it is being evicted, that ends first
        path = os.readlink(f"/proc/self/fd/{fd}")
        if not cache_place.is_at(fd, path):
            return None
        if not is_as_made(os.fstat(fd)):
            os.unlink(path)
            return None
        held_files.mark(fd)
        return path

    def held(self) -> list[CachedFile]:
        """Return the files that mounts of the kernel's read."""
        return [one for one in self._entries() if held_files.is_held_at(one.path)]

    def _path(self, key: str, state: str) -> str:
        return f"{self.directory}/{key}.{state}"

    def _begin(self, key: str, states: Collection[str]) -> Kept | int:
        """Return the finished file, or an empty part, locked by this process."""
        path = self._path(key, _PART)
        while True:
            kept = self.find(key, states)
            if kept is not None:
                return kept
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                if _lock_of(fd, path):
                    kept = self.find(key, states)  # finished meanwhile
                    if kept is None:
                        os.ftruncate(fd, 0)
                        return fd
                    os.unlink(path)
                    os.close(fd)
                    return kept
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _writer(self, fd: int, key: str, spare_recent: bool) -> Write:
        done = room = 0

        def write(data: bytes) -> None:
            nonlocal done, room
            if done + len(data) > room:
                free = self._make_room(key, done, len(data), spare_recent)
                room = done + len(data) + min(STEP, free)
            done += len(data)
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]

        return write

    # --- room

    def _entries(self) -> Iterator[CachedFile]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self.directory) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    if entry.name.rpartition(".")[2] in (*COPIES, INDEX, _PART):
                        yield CachedFile(found.st_atime, found.st_size, entry.path)

    def _make_room(self, key: str, done: int, more: int, spare_recent: bool) -> int:
        """Make room for `more` bytes in the part of `key`, which has `done`; return how many more would fit.

        Raises NoRoom.
        """
        if done + more > self.limit:
            raise NoRoom(f"it unpacks to more than the cache may hold ({bytes_text(self.limit)})")
        others = sorted(one for one in self._entries() if one.path != self._path(key, _PART))
        used = sum(one.size for one in others) + done
        youngest = time.time() - RECENT_SECONDS if spare_recent else float("inf")
        is_large = done + more > self.limit // 2
        # The second round is for files that are open: their bytes stay until they are closed.
        rounds = (False,) if spare_recent else (False, True)
        for also_open in () if is_large else rounds:
            for one in others:
                if min(self.limit - used, cache_place.disk_room(self.directory)) >= more:
                    break
                if one.opened < youngest and _remove(one.path, also_open):
                    used -= one.size
        free, disk = self.limit - used, cache_place.disk_room(self.directory)
        if free < more and is_large and used > done:
            raise NoRoom(
                f"it unpacks to more than half of what the cache may hold ({bytes_text(self.limit)}), "
                "and the rest is in use"
            )
        if free < more:
            raise NoRoom(f"the cache is full ({bytes_text(used)} of {bytes_text(self.limit)} are in use)")
        if disk < more:
            raise NoRoom(f"the disk of {self.directory} would be full")
        return min(free, disk) - more

    def files(self) -> list[CachedFile]:
        """Return all files, the one first that was opened the longest time ago."""
        return sorted(self._entries())

    def trim(self, size: int | None = None) -> int:
        """Evict the least recently opened files until at most `size` bytes are left; returns the bytes freed.

        Without a size down to the limit. Files that are open or held stay. Raises OSError.
        """
        size = self.limit if size is None else size
        files = self.files()
        used = before = sum(one.size for one in files)
        for one in files:
            if used > size and _remove(one.path, False):
                used -= one.size
        return before - used

    def prune(self, keys: Collection[str]) -> None:
        """Remove the files of all other keys, unless they are open."""
        for one in list(self._entries()):
            if os.path.basename(one.path).partition(".")[0] not in keys:
                _remove(one.path, False)


def _reader_of(fd: int) -> int:
    """A descriptor to read a finished file, with a shared lock; no mount reads what somebody has open to write."""
    fcntl.flock(fd, fcntl.LOCK_SH)
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(reader, fcntl.LOCK_SH)
    return reader


def is_as_made(found: os.stat_result) -> bool:
    """True if nobody has written into a file of the cache since it was whole."""
    return found.st_mtime_ns == MADE_NS


def _lock_of(fd: int, path: str) -> bool:
    """Lock a part for writing. If another process is writing it, wait for that and return False."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waits.lock(fd, fcntl.LOCK_SH)  # granted when the other process has finished, or died
        return False
    return cache_place.is_at(fd, path)


def _remove(path: str, also_open: bool) -> bool:
    """Remove a file; return True if that frees its room. A file that is being written, or is held, stays."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, PermissionError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not cache_place.is_at(fd, path) or held_files.is_held(fd):  # renamed since it was opened
            return False
        os.unlink(path)  # under the lock: a process that waits for it sees that it has no name
    except BlockingIOError:
        if not also_open or path.endswith("." + _PART) or held_files.is_held(fd):
            return False
        os.unlink(path)
    except FileNotFoundError:  # removed by another process
        return False
    finally:
        os.close(fd)
    return True
