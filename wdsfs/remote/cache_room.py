"""Room in the cache of remote objects: how much is taken, whether there is more, and which objects go for it.

The sum of what is taken is kept in one small file, under its lock (flock): asking for room costs microseconds.
Only when there is none the directory is read, and the sum is then what the disk says. So the sum may be wrong for
a while (a process was killed between asking and writing) or be lost. A process takes some room in advance, and
small writes use that without the file: opening, locking and writing it costs as much as writing 100 kB.

Which objects go: those that were not used for the longest time, but only if that is three times as long as the
newcomer itself had not been used before; for an object that is new, a day. Without this condition a set that is
larger than the cache would wash it out in each epoch: an object would go shortly before it is wanted again. With
it the cache keeps what it has, and others are read without it; when the work moves on to another set, what it left
goes in the fourth epoch. (With a cache for half of a set, LRU has 0 % of hits in epochs in order and 15 % in
shuffled ones, where an object is wanted again after anything up to two epochs; "as long" has 50 and 19 %, "twice"
50 and 38 %, three times 50 and 46 %.) Objects beyond the limit, which may have been lowered, go in any case.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator

import xxhash

from wdsfs.remote.block_table import NEVER
from wdsfs.remote.cache_directory import CacheDirectory, flocked
from wdsfs.storage.cache_place import disk_room

SHARE = 0.5  # of the disk's free bytes, with what the cache has itself: the limit if none is given
# Of the limit: it is not filled by what is put, since tables need some of it, too, and nothing is to go only for
# these; and so much more is freed than is wanted, so that the directory is read seldom.
SLACK, SLACK_MAX = 1 / 16, 32 << 30
ADVANCE, ADVANCE_MAX = 1 / 16, 4 << 20  # of the slack, and bytes: what a process takes at a time
AGE = 3  # times as long unused as the newcomer was
RECOUNT_SECONDS = 600.0  # between two readings of the directory if nothing goes
# Bytes that are taken; no object was used longer ago than this; when the directory was read (seconds, epoch).
_SUMS = struct.Struct("<Qdd")
_CHECK = 8


class _Ledger:
    """The content of the file, which is locked."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        found = os.pread(fd, _SUMS.size + _CHECK, 0)
        self.is_known = found[_SUMS.size :] == xxhash.xxh3_64_digest(found[: _SUMS.size]) and bool(found)
        self.taken: int
        self.taken, self.oldest, self.counted = _SUMS.unpack_from(found) if self.is_known else (0, 0.0, 0.0)

    def write(self) -> None:
        sums = _SUMS.pack(max(self.taken, 0), self.oldest, self.counted)
        os.pwrite(self._fd, sums + xxhash.xxh3_64_digest(sums), 0)


class CacheRoom:
    """The room of one cache directory; `limit` in bytes, None for a share of the disk."""

    def __init__(self, directory: CacheDirectory, limit: int | None) -> None:
        self._directory = directory
        self._limit = limit
        self._lock = threading.Lock()  # over the next
        self._advance = 0  # bytes that this process has taken and not used yet

    def reserve(self, wanted: int, idle: Callable[[], float], is_needed: bool = False) -> bool:
        """Take room for bytes that are written next; False if they have to bypass the cache.

        `idle`: for how many seconds their object had not been used before. If `is_needed`, others go for it that
        are in use, too. Raises OSError.
        """
        with self._lock:
            if wanted <= self._advance:
                self._advance -= wanted
                return True
        with self._ledger() as ledger:
            if not self._has_room(ledger, wanted, -math.inf if is_needed else _age(idle)):
                return False
            limit = self.limit(ledger.taken)
            further = max(min(int(_slack(limit) * ADVANCE), ADVANCE_MAX) - self._advance, 0)
            if self._shortage(ledger.taken, wanted + further) > 0:
                further = 0
            ledger.taken += wanted + further
            ledger.write()
        with self._lock:
            self._advance += further
        return True

    def has_room(self, wanted: int, idle: Callable[[], float]) -> bool:
        """True if `reserve` will find so much room; what may go for that goes now. Raises OSError."""
        with self._ledger() as ledger:
            return wanted <= self.limit(ledger.taken) and self._has_room(ledger, wanted, _age(idle))

    def _has_room(self, ledger: _Ledger, wanted: int, idle: float) -> bool:
        if not ledger.is_known:
            self._evict(ledger, 0, math.inf)
        return self._shortage(ledger.taken, wanted) <= 0 or self._make_room(ledger, wanted, idle)

    def trim(self, size: int | None) -> int:
        """Remove what was used the longest time ago until the cache has at most `size` bytes; the bytes that go.

        None for the limit. Raises OSError.
        """
        objects = self._directory.objects()
        taken = before = sum(one.bytes for one in objects)
        size = self.limit(taken) if size is None else size
        for one in objects:  # not under the lock of the sum: that may take minutes
            if taken > size and self._directory.remove(one.key):
                taken -= one.bytes
        self.recount()
        return before - taken

    def recount(self) -> None:
        """Forget the sum: objects were removed. Raises OSError."""
        with self._ledger() as ledger:
            self._evict(ledger, 0, math.inf)

    def state(self) -> tuple[int, int]:
        """The bytes that are taken, and those that may be. Raises OSError."""
        with self._ledger() as ledger:
            if not ledger.is_known:
                self._evict(ledger, 0, math.inf)
            return ledger.taken, self.limit(ledger.taken)

    def limit(self, taken: int) -> int:
        """The bytes that the cache may have, when it has so many. Raises OSError."""
        if self._limit is not None:
            return self._limit
        return int((taken + max(disk_room(self._directory.path), 0)) * SHARE)

    def most(self) -> int:
        """The bytes of the largest object for which there can be room. Raises OSError."""
        with self._ledger() as ledger:
            limit = self.limit(ledger.taken)
            return min(limit - _slack(limit), ledger.taken + max(disk_room(self._directory.path), 0))

    @contextlib.contextmanager
    def _ledger(self) -> Iterator[_Ledger]:
        # Opened each time: the directory may have been made anew, and threads are to exclude each other.
        fd = self._directory.open(self._directory.room_file)
        try:
            with flocked(fd):
                yield _Ledger(fd)
        finally:
            os.close(fd)

    def _shortage(self, taken: int, wanted: int) -> int:
        """Bytes that have to go for others; 0 or less if there is room."""
        limit = self.limit(taken)
        return max(taken + wanted - limit + _slack(limit), wanted - disk_room(self._directory.path))

    def _make_room(self, ledger: _Ledger, wanted: int, idle: float) -> bool:
        is_over = ledger.taken > self.limit(ledger.taken)
        now = time.time()
        if not is_over and now - ledger.oldest <= idle and 0 <= now - ledger.counted <= RECOUNT_SECONDS:
            return False  # without reading the directory: nothing in it is old enough
        self._evict(ledger, wanted, idle)
        return self._shortage(ledger.taken, wanted) <= 0

    def _evict(self, ledger: _Ledger, wanted: int, idle: float) -> None:
        """Read the directory, and remove objects: those beyond the limit, and for `wanted` those that are idle.

        Raises OSError.
        """
        objects = self._directory.objects()
        ledger.taken = sum(one.bytes for one in objects)
        now = ledger.oldest = ledger.counted = time.time()
        for one in objects:
            limit = self.limit(ledger.taken)
            is_over = ledger.taken > limit
            goal = wanted + _slack(limit) if wanted else 0
            is_in_the_way = now - one.used > idle and self._shortage(ledger.taken, goal) > 0
            if (is_over or is_in_the_way) and self._directory.remove(one.key):
                ledger.taken -= one.bytes
            else:
                ledger.oldest = min(ledger.oldest, one.used)
        ledger.write()


def _slack(limit: int) -> int:
    return min(int(limit * SLACK), SLACK_MAX)


def _age(idle: Callable[[], float]) -> float:
    """For how many seconds another object has to be unused to go for one that was not used for so many."""
    return min(AGE * idle(), NEVER)
