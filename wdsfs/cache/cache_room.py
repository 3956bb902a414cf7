"""The room in the cache: its limit, how much is taken, and which files are evicted when it is full.

The number of bytes in use is kept in one small file, under its lock (flock): asking for room costs microseconds.
The directory is read only when there is none; then the sum is counted again from the disk. So the sum may be wrong
for a while (a process was killed between asking and writing) or be lost. A process takes some room in advance, and
small writes use that room without the file: opening, locking and writing the file costs as much as writing 100 kB.

The least recently used files are evicted first, and only files that were unused for longer than the newcomer asks
(`victims`). A part of an object asks for three times as long as the object itself had not been used before; a new
object asks for a day. Without this condition a set that is larger than the cache would wash it out in each epoch:
an object would be evicted shortly before it is read again. With the condition the cache keeps its files, and other
objects are read without the cache. When the work moves on to another set, the old files are evicted in the fourth
epoch.

Measured with a cache for half of a set, hits in epochs in order, and in shuffled epochs, where an object is read
again after up to two epochs: LRU 0 and 15 %, "as long" 50 and 19 %, "twice" 50 and 38 %, three times 50 and 46 %.

Files beyond the limit, which may have been lowered, are evicted in any case.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import xxhash

from wdsfs.cache.cache_directory import CacheDirectory, CacheEntry, flocked
from wdsfs.errors import parse_size
from wdsfs.shared_settings import setting

NEEDED = -math.inf  # for files that cannot be read without the cache: others are evicted even in use
SHARE = 0.5  # of the disk's free bytes, with what the cache has itself: the limit if none is given
DISK_KEPT = 4 << 30  # bytes of a disk that the cache leaves to others; of a small one 5 %
# Of the limit, a part that stays free: tables need some room, too, without evictions; and as much more is freed
# than is asked for, so that the directory is read seldom.
SLACK, SLACK_MAX = 1 / 16, 32 << 30
ADVANCE, ADVANCE_MAX = 1 / 16, 4 << 20  # of the slack, and bytes: what a process takes at a time
RECOUNT_SECONDS = 600.0  # between two readings of the directory if nothing goes
# Bytes that are taken; no file was used longer ago than this; when the directory was read (seconds, epoch).
_SUMS = struct.Struct("<Qdd")
_CHECK = 8


def victims(entries: Sequence[CacheEntry], over: int, short: int, age: float, now: float) -> Sequence[CacheEntry]:
    """Return the entries to evict: the first of `entries`, which are in the order of their last use.

    In any case entries with `over` bytes in all; then, until `short` bytes are free, entries that were not used
    for more than `age` seconds.
    """
    freed = 0
    for count, entry in enumerate(entries):
        if freed >= over and (freed >= short or now - entry.used <= age):
            return entries[:count]
        freed += entry.bytes
    return entries


def chosen_limit() -> int | None:
    """Return the limit of `WDSFS_CACHE_SIZE` in bytes, if there is one. Raises UsageError."""
    size = setting("CACHE_SIZE")
    return parse_size(size) if size else None


def disk_room(directory: str | os.PathLike[str]) -> int:
    """Return the bytes of the disk that are free and not left to others. Raises OSError."""
    disk = os.statvfs(directory)
    return disk.f_frsize * (disk.f_bavail - min(disk.f_blocks // 20, DISK_KEPT // disk.f_frsize))


class _Ledger:
    """The content of the file with the sums, which is locked."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        packed = os.pread(fd, _SUMS.size + _CHECK, 0)
        sums = packed[: _SUMS.size]
        self.is_known = packed[_SUMS.size :] == xxhash.xxh3_64_digest(sums) and bool(packed)
        self.taken: int
        self.taken, self.oldest, self.counted = _SUMS.unpack(sums) if self.is_known else (0, 0.0, 0.0)

    def write(self) -> None:
        """Write the sums."""
        sums = _SUMS.pack(max(self.taken, 0), self.oldest, self.counted)
        os.pwrite(self._fd, sums + xxhash.xxh3_64_digest(sums), 0)


class CacheRoom:
    """The room of one cache directory; `limit` in bytes, None for a share of the disk."""

    def __init__(self, directory: CacheDirectory, limit: int | None) -> None:
        self._directory, self._limit = directory, limit
        self._file = f"{directory.path}/room"
        self._lock = threading.Lock()  # over the next
        self._advance = 0  # bytes that this process has taken and not used yet

    def reserve(self, size: int, age: float, *, at_once: bool = False) -> bool:
        """Take room for bytes that are written next; return False if they have to stay outside of the cache.

        Files that were not used for more than `age` seconds are evicted for it. `at_once`:
        raise BlockingIOError instead of evicting, or of waiting for another process that evicts. Raises OSError.
        """
        with self._lock:
            if size <= self._advance:
                self._advance -= size
                return True
        if at_once:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        with self._ledger() as ledger:
            if not self._has_room(ledger, size, age):
                return False
            limit = self.limit(ledger.taken)
            further = max(min(int(_slack(limit) * ADVANCE), ADVANCE_MAX) - self._advance, 0)
            if self._shortage(ledger.taken, size + further) > 0:
                further = 0
            ledger.taken += size + further
            ledger.write()
        self.give_back(further)
        return True

    def give_back(self, size: int) -> None:
        """Leave reserved bytes that were not written to the next writes of this process."""
        with self._lock:
            self._advance += size

    def has_room(self, size: int, age: float) -> bool:
        """Make room for `size` bytes, without taking it; return True if there is enough. Raises OSError."""
        with self._ledger() as ledger:
            return size <= self.limit(ledger.taken) and self._has_room(ledger, size, age)

    def _has_room(self, ledger: _Ledger, size: int, age: float) -> bool:
        return self._shortage(ledger.taken, size) <= 0 or self._make_room(ledger, size, age)

    def trim(self, size: int | None) -> int:
        """Remove the longest unused files until at most `size` bytes are left; return the bytes freed.

        None for the limit. Files that are open stay. Raises OSError.
        """
        entries = self._directory.entries()
        taken = sum(entry.bytes for entry in entries)
        most = self.limit(taken) if size is None else size
        # Not under the lock of the sum: that may take minutes.
        _, freed = self._remove_victims(entries, lambda freed: (taken - freed - most, 0), math.inf)
        self.recount()
        return freed

    def recount(self) -> None:
        """Forget the sum: files were removed. Raises OSError."""
        with self._ledger() as ledger:
            self._evict(ledger, 0, math.inf)

    def state(self) -> tuple[int, int]:
        """Return the bytes in use, and the limit. Raises OSError."""
        with self._ledger() as ledger:
            return ledger.taken, self.limit(ledger.taken)

    def limit(self, taken: int) -> int:
        """Return the limit in bytes if `taken` bytes are in use. Raises OSError."""
        if self._limit is not None:
            return self._limit
        return int((taken + max(disk_room(self._directory.path), 0)) * SHARE)

    def most(self) -> int:
        """Return the bytes of the largest file for which there can be room. Raises OSError."""
        with self._ledger() as ledger:
            limit = self.limit(ledger.taken)
            return min(limit - _slack(limit), ledger.taken + max(disk_room(self._directory.path), 0))

    @contextlib.contextmanager
    def _ledger(self) -> Iterator[_Ledger]:
        # Opened each time: the directory may have been made again, and threads are to exclude each other.
        fd = self._directory.open(self._file)
        try:
            with flocked(fd):
                ledger = _Ledger(fd)
                if not ledger.is_known:
                    self._evict(ledger, 0, math.inf)
                yield ledger
        finally:
            os.close(fd)

    def _shortage(self, taken: int, size: int) -> int:
        """Return the bytes that have to go for others; 0 or less if there is room."""
        limit = self.limit(taken)
        return max(taken + size - limit + _slack(limit), size - disk_room(self._directory.path))

    def _make_room(self, ledger: _Ledger, size: int, age: float) -> bool:
        is_over = ledger.taken > self.limit(ledger.taken)
        now = time.time()
        if not is_over and now - ledger.oldest <= age and 0 <= now - ledger.counted <= RECOUNT_SECONDS:
            return False  # without reading the directory: nothing in it is old enough
        self._evict(ledger, size, age)
        return self._shortage(ledger.taken, size) <= 0

    def _evict(self, ledger: _Ledger, size: int, age: float) -> None:
        """Read the directory, and remove files beyond the limit, or for `size` bytes. Raises OSError."""
        entries = self._directory.entries()
        taken = sum(entry.bytes for entry in entries)
        goal = size + _slack(self.limit(taken)) if size else 0

        def need(freed: int) -> tuple[int, int]:
            left = taken - freed
            return left - self.limit(left), self._shortage(left, goal) if goal else 0

        rest, freed = self._remove_victims(entries, need, age)
        ledger.taken, ledger.counted = taken - freed, time.time()
        ledger.oldest = min([ledger.counted, *(entry.used for entry in rest)])
        ledger.write()

    def _remove_victims(
        self, entries: list[CacheEntry], need: Callable[[int], tuple[int, int]], age: float
    ) -> tuple[list[CacheEntry], int]:
        """Remove victims; return the other entries, without entries that cannot be removed, and the bytes freed.

        `need` returns how many bytes still have to be freed: in any case, and of unused files.
        """
        rest, open_ones, freed = self._remove_first(entries, need, age, 0, even_open=False)
        if age == NEEDED:
            rest, _, freed = self._remove_first(sorted(rest + open_ones), need, age, freed, even_open=True)
        return rest, freed

    def _remove_first(
        self,
        entries: list[CacheEntry],
        need: Callable[[int], tuple[int, int]],
        age: float,
        freed: int,
        *,
        even_open: bool,
    ) -> tuple[list[CacheEntry], list[CacheEntry], int]:
        """Remove victims from the start of `entries`, after `freed` bytes before.

        Return the rest, the victims that cannot be removed, and the bytes freed in all.
        """
        staying = list[CacheEntry]()
        while going := victims(entries, *need(freed), age, time.time()):
            entries = entries[len(going) :]
            for entry in going:
                if self._directory.remove(entry, even_open=even_open):
                    freed += entry.bytes
                else:
                    staying.append(entry)
        return entries, staying, freed


def _slack(limit: int) -> int:
    return min(int(limit * SLACK), SLACK_MAX)
