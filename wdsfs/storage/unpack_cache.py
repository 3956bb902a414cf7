"""The cache of what compressed shards are unpacked to: whole files in one directory, up to so many bytes.

A file is named after its shard and what that was at the time (`key_of`), with a suffix that says what it holds. It
is written under the suffix `part`, synced, and only then renamed, so what has another suffix is whole: also after
a kill or a power cut. Whoever writes holds a lock on the part; who else needs the file waits for that, and finds
it.

What does not fit beside the others makes room: those go first that nobody has opened for the longest time. Who has
a file open holds a shared lock on it; such files go last, and whoever has one open keeps its bytes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from wdsfs import host, trust
from wdsfs.errors import IndexUnusable, UsageError

# What a file holds. A copy is what is intact of its shard: all of it (with something else behind it or not), or
# what is in front of where it is cut off or damaged; an index tells how to read the shard without a copy.
WHOLE, TRAILING, TRUNCATED, DAMAGED, INDEX = "tar", "trailing", "truncated", "damaged", "seek"
COPIES = (WHOLE, TRAILING, TRUNCATED, DAMAGED)
_PART = "part"

DEFAULT_LIMIT = 32 << 30  # bytes
DISK_KEPT = 4 << 30  # bytes of a disk that the cache leaves to others; of a small one 5 %
STEP = 32 << 20  # bytes that are written between two looks at how much room there is
RECENT_SECONDS = 3600.0
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

Write = Callable[[bytes], None]
Fill = Callable[[Write], tuple[str, int]]  # writes; returns what it is, and how many bytes of it count


class NoRoom(Exception):
    """The text says why there is no room for a file."""


class Kept(NamedTuple):
    """An open file of the cache, and what it holds."""

    fd: int
    state: str


class _CachedFile(NamedTuple):
    opened: float  # seconds since the epoch
    size: int
    path: str


def key_of(path: bytes, found: os.stat_result) -> str:
    """The name for a shard as it is now: other content has another one."""
    state = f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}".encode()
    return hashlib.blake2b(path + b"\0" + state, digest_size=16).hexdigest()


def parse_size(text: str) -> int:
    """`800M`, `32G`, or plain bytes. Raises UsageError."""
    number, unit = (text[:-1], text[-1:].upper()) if text[-1:].isalpha() else (text, "")
    if unit not in _UNITS or not number.isascii() or not number.isdigit():
        raise UsageError(f"{text!r} is no size: write bytes, or a number with K, M, G or T, for example 32G")
    return int(number) * _UNITS[unit]


def cache() -> UnpackCache:
    """The cache that this process uses.

    In `WDSFS_CACHE_DIR`, else beside the index; `WDSFS_CACHE_SIZE` is its limit. By the environment, because all
    processes of a mount or a command have to agree. Raises UsageError, IndexUnusable.
    """
    place, index = os.environ.get("WDSFS_CACHE_DIR"), os.environ.get("WDSFS_INDEX_DIR")
    size = os.environ.get("WDSFS_CACHE_SIZE")
    directory = Path(place) if place else _beside(Path(os.path.abspath(index or host.cache_dir())))
    directory = Path(os.path.abspath(directory))
    try:
        trust.directory(directory, tighten=not place)
    except trust.Untrusted as error:
        # Not another place: it may have to hold more than others have room for.
        raise IndexUnusable(f"the cache of unpacked shards is not used, since {error.strerror}") from None
    except OSError:
        pass  # not there yet; or else whoever opens a file in it says what is wrong
    return UnpackCache(directory, parse_size(size) if size else DEFAULT_LIMIT)


@functools.lru_cache(8)
def _beside(index: Path) -> Path:
    """Where the index goes, which may be another place than the one that was named. Raises IndexUnusable."""
    notices: list[str] = []
    found = host.index_place(index, notices)
    if found is None:
        raise IndexUnusable("; ".join(notices))
    return host.beside_index(found) / "unpacked"


@dataclass(frozen=True, slots=True)
class UnpackCache:
    """Files in `directory`, not more than `limit` bytes of them."""

    directory: Path
    limit: int

    def find(self, key: str, states: Collection[str]) -> Kept | None:
        """The file of a shard, if there is one of these kinds. Raises OSError."""
        for state in states:
            try:
                fd = os.open(self._path(key, state), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue
            with contextlib.suppress(OSError):  # somebody else's, or the directory cannot be written
                os.utime(fd)
            with contextlib.suppress(BlockingIOError):  # it is about to go; its bytes stay
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return Kept(fd, state)
        return None

    def make(
        self, key: str, states: Collection[str], fill: Fill, least: int = 0, spare_recent: bool = False
    ) -> Kept:
        """The file of a shard, filled now unless another process has just done so.

        `least`: bytes that it will have in any case. `spare_recent`: nothing that was opened within the last hour
        has to go for it. Raises NoRoom, OSError and what `fill` raises.
        """
        trust.directory(self.directory, create=True)
        found = self._begin(key, states)
        if isinstance(found, Kept):
            return found
        part = self._path(key, _PART)
        try:
            self._make_room(key, 0, least, spare_recent)
            state, size = fill(self._writer(found, key, spare_recent))
            os.ftruncate(found, size)
            os.fdatasync(found)
            os.lseek(found, 0, os.SEEK_SET)
            os.rename(part, self._path(key, state))
            fcntl.flock(found, fcntl.LOCK_SH)
        except BaseException as error:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
            os.close(found)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NoRoom(f"the disk of {self.directory} is full") from None
            raise
        return Kept(found, state)

    def drop(self, key: str, state: str) -> None:
        """Remove a file that turned out to be damaged."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(key, state))

    def _path(self, key: str, state: str) -> str:
        return f"{self.directory}/{key}.{state}"

    def _begin(self, key: str, states: Collection[str]) -> Kept | int:
        """The finished file, or an empty part of which this process has the lock."""
        path = self._path(key, _PART)
        while True:
            kept = self.find(key, states)
            if kept is not None:
                return kept
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                if _lock_of(fd, path):
                    kept = self.find(key, states)  # finished since we looked
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

    def _entries(self) -> Iterator[_CachedFile]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self.directory) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    if entry.name.rpartition(".")[2] in (*COPIES, INDEX, _PART):
                        yield _CachedFile(found.st_mtime, found.st_size, entry.path)

    def _make_room(self, key: str, done: int, more: int, spare_recent: bool) -> int:
        """See that the part of `key`, of `done` bytes, may have more; returns how many further ones are free.

        Raises NoRoom.
        """
        if done + more > self.limit:
            raise NoRoom(f"it unpacks to more than the cache may hold ({self.limit} bytes)")
        others = sorted(one for one in self._entries() if one.path != self._path(key, _PART))
        used = sum(one.size for one in others) + done
        youngest = time.time() - RECENT_SECONDS if spare_recent else float("inf")
        # A second round for what is open: its bytes stay until it is closed.
        for also_open in (False,) if spare_recent else (False, True):
            for one in others:
                if min(self.limit - used, self._disk()) >= more:
                    break
                if one.opened < youngest and _remove(one.path, also_open):
                    used -= one.size
        free, disk = self.limit - used, self._disk()
        if free < more:
            raise NoRoom(f"the cache is full ({used} of {self.limit} bytes are in use)")
        if disk < more:
            raise NoRoom(f"the disk of {self.directory} would be full")
        return min(free, disk) - more

    def _disk(self) -> int:
        """Bytes of the disk that are free and not left to others."""
        found = os.statvfs(self.directory)
        return found.f_frsize * (found.f_bavail - min(found.f_blocks // 20, DISK_KEPT // found.f_frsize))

    def prune(self, keys: Collection[str]) -> None:
        """Remove what belongs to none of these, unless it is open."""
        for one in list(self._entries()):
            if os.path.basename(one.path).partition(".")[0] not in keys:
                _remove(one.path, False)


def _lock_of(fd: int, path: str) -> bool:
    """Lock a part for writing. If another process is at it, wait for that instead, and return False."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(fd, fcntl.LOCK_SH)  # which whoever has finished grants, and the death of whoever has not
        return False
    return _is_at(fd, path)


def _is_at(fd: int, path: str) -> bool:
    """Whether a file is still the one with this name."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _remove(path: str, also_open: bool) -> bool:
    """Remove a file; returns whether this has given its room back. What is being written stays in any case."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, PermissionError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(fd, path):  # finished since it was opened
            return False
        os.unlink(path)  # under the lock: who waits for it will see that it has no name
    except BlockingIOError:
        if not also_open or path.endswith("." + _PART):
            return False
        os.unlink(path)
    except FileNotFoundError:  # removed by somebody else
        return False
    finally:
        os.close(fd)
    return True
