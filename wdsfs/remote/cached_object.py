"""One open object in the cache: a sparse file with the cached bytes, and a `BlockTable`.

An object never gives a wrong byte: a process compares blocks with their checksums when it reads them for the first
time, and again after any change of the file. A change shows in the ctime. Every read compares the ctime after it
has read the bytes, so bytes that are not compared again are the same as before. (A checksum for each read would
cost 10 us for 100 kB, comparing the ctime costs 1.5 us.) While an object is filled, its file changes all the time,
and blocks are compared more often.

Bytes that the disk cannot read count as missing: only `verify` raises OSError. Usable by several threads.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import mmap
import os
import re
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from os import fstat, pread, preadv  # by name: a hit must cost hardly more than these calls
from pathlib import Path
from time import monotonic

import xxhash

from wdsfs.cache import cache_directory
from wdsfs.cache.cache_room import NEEDED, CacheRoom
from wdsfs.door.pins import Pin
from wdsfs.durable import write_at
from wdsfs.formats import Format

BLOCK = 4096
GROUP = 16  # blocks that share one checksum if they come together; the number of the first is a multiple of this
ROUND_SECONDS = 120.0  # seconds without use that end a round of use, such as a pass over the object
NEVER = 86400.0  # seconds since the last use that count for a new object
AGE = 3  # an object is evicted for another object after this many times the unused time of the other object
CACHED_OBJECT = Format("a cached object", (1,))
_MAGIC = b"wdsfs-o%c" % CACHED_OBJECT.version
_IDLE_AT = 8
_TEXT_HEAD = struct.Struct("<II")
_WHOLE = struct.Struct("<Q8s")
_WHOLE_AT = 16
_TEXT_AT = _WHOLE_AT + _WHOLE.size
_PAGE = 4096
_TEXT_MAX = 1 << 20
_HERE, _GROUPED = b"\1", b"\2"
_GROUP = _GROUPED * GROUP
_OTHERS = [0] * (GROUP - 1)  # the checksums of the other blocks of a group
_ABSENT = re.compile(rb"[^\1\2]+")
_SUM = 8

# Bytes that one call writes. For more bytes the kernel takes huge pages, for which the host of a virtual machine
# may have to make room: 4 MiB at a time took seven times as long.
WRITE_MAX = 512 << 10

USE_SECONDS = 60.0  # between two notes of use
# Two changes in one tick of the kernel's clock (up to 10 ms) have the same ctime. So a comparison is valid only if
# the last change is older than this.
SETTLED_NS = 100_000_000
_SECOND = 1_000_000_000
_SHIFT = BLOCK.bit_length() - 1
_WRITING = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
_STEP = 256  # blocks that are verified at a time, whole groups
_SCRATCH_MAX = 2 << 20  # bytes
_UNCHECKED, _CHECKED = b"\0", b"\1"
_TAKEN = (errno.EAGAIN, errno.EACCES)
# Errors of a read that must not wait: the bytes are not in the page cache; the file system has no such reads.
_NOT_NOW = (errno.EAGAIN, errno.EOPNOTSUPP)


class BlockTable:
    """The table in an open file. Usable by several threads and processes."""

    def __init__(self, fd: int, shown: str, pin: Pin, seed: int, length: int) -> None:
        self.fd = fd
        self.shown, self.pin = shown, pin
        self.blocks = -(-pin.size // BLOCK)
        self._seed = seed
        self._here_at = -(-(_TEXT_AT + _TEXT_HEAD.size + length + _SUM) // _PAGE) * _PAGE
        self._sums_at = self._here_at + -(-self.blocks // _SUM) * _SUM

    @classmethod
    def load(cls, fd: int) -> BlockTable | None:
        """Return the table in a file; None if there is none, or an incomplete one. Raises OSError."""
        first = os.pread(fd, _PAGE, 0)
        if first[:_IDLE_AT] != _MAGIC or len(first) < _TEXT_AT + _TEXT_HEAD.size:
            return None
        length, seed = _TEXT_HEAD.unpack_from(first, _TEXT_AT)
        begin, end = _TEXT_AT + _TEXT_HEAD.size, _TEXT_AT + _TEXT_HEAD.size + length
        if length > _TEXT_MAX:
            return None
        if end + _SUM > len(first):
            first += os.pread(fd, end + _SUM - len(first), len(first))
        if first[end : end + _SUM] != xxhash.xxh3_64_digest(first[_TEXT_AT:end]):
            return None
        shown, *pin = json.loads(first[begin:end])
        return cls(fd, shown, Pin(*pin), seed, length)

    @classmethod
    def create(cls, fd: int, shown: str, pin: Pin) -> BlockTable:
        """Return a table without blocks in an empty file. Raises OSError."""
        text = json.dumps([shown, *pin]).encode()
        seed = int.from_bytes(os.urandom(4), "little")
        head = _TEXT_HEAD.pack(len(text), seed) + text
        table = cls(fd, shown, pin, seed, len(text))
        os.ftruncate(fd, table._sums_at + table.blocks * _SUM)
        write_at(fd, head + xxhash.xxh3_64_digest(head), _TEXT_AT)
        write_at(fd, struct.pack("<d", NEVER), _IDLE_AT)
        write_at(fd, _MAGIC, 0)
        return table

    # --- blocks

    def absent(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of blocks among these that are not here. Raises OSError."""
        first, last = max(first, 0), min(last, self.blocks)
        for run in _ABSENT.finditer(self._presence(first, last)):
            yield first + run.start(), first + run.end()

    def count(self) -> int:
        """Count the blocks that are here. Raises OSError."""
        here = self._presence(0, self.blocks)
        return here.count(_HERE) + here.count(_GROUPED)

    def is_full(self) -> bool:
        """Return True if all blocks are here. Raises OSError."""
        here = self._presence(0, self.blocks)
        # While an object is filled this is asked for often, and the first look ends at the first missing block.
        return b"\0" not in here and here.count(_HERE) + here.count(_GROUPED) == self.blocks

    def comparable(self, first: int, last: int) -> tuple[int, int] | None:
        """Return the blocks to read in order to compare these blocks: whole groups. None if a block is missing.

        Raises OSError.
        """
        low, high = first // GROUP * GROUP, min(-(-last // GROUP) * GROUP, self.blocks)
        here = self._presence(low, high)
        if _ABSENT.search(here, first - low, last - low):
            return None
        end = (last - 1) // GROUP * GROUP - low
        return low if here[:GROUP] == _GROUP else first, high if here[end:] == _GROUP else last

    def put(self, first: int, data: memoryview) -> None:
        """Note blocks that are in the data file from now on; `data` is their content. Raises OSError."""
        count = -(-len(data) // BLOCK)
        before = min(-first % GROUP, count)
        groups = (count - before) // GROUP
        here = _HERE * before + _GROUP * groups + _HERE * (count - before - groups * GROUP)
        sums = self._sums(first, data, here)
        write_at(self.fd, struct.pack(f"<{count}Q", *sums), self._sums_at + first * _SUM)
        write_at(self.fd, here, self._here_at + first)

    def wrong(self, first: int, data: memoryview) -> list[int]:
        """Return the blocks whose content has changed since `put`, all blocks of a group. Raises OSError."""
        here = self._presence(first, first - -len(data) // BLOCK)
        sums = self._sums(first, data, here)
        length = len(sums) * _SUM
        packed = os.pread(self.fd, length, self._sums_at + first * _SUM).ljust(length, b"\0")
        expected = struct.unpack(f"<{len(sums)}Q", packed)
        if tuple(sums) == expected:
            return []
        different = [number for number, (a, b) in enumerate(zip(sums, expected, strict=True)) if a != b]
        blocks = {at for number in different for at in range(number, number + _together(here, first, number))}
        return [first + at for at in sorted(blocks)]

    def drop(self, blocks: Sequence[int]) -> None:
        """Note that these blocks are not here. Raises OSError."""
        for block in blocks:
            write_at(self.fd, b"\0", self._here_at + block)

    def _presence(self, first: int, last: int) -> bytes:
        count = max(last - first, 0)
        return os.pread(self.fd, count, self._here_at + first).ljust(count, b"\0")

    def _sums(self, first: int, data: memoryview, here: bytes) -> list[int]:
        """Return the checksums of blocks. None is 0, which stands for no checksum in the table.

        `here` has the bytes of the table for these blocks.
        """
        seed, of, sums = self._seed + first, xxhash.xxh3_64_intdigest, list[int]()
        while (at := len(sums)) < len(here):
            count = _together(here, first, at)
            sums.append(of(data[at * BLOCK : (at + count) * BLOCK], seed + at) or 1)
            if count > 1:
                sums += _OTHERS
        return sums

    # --- all blocks

    def note_whole(self, changed: int) -> None:
        """Note that all blocks have been compared, with a data file of this ctime. Raises OSError."""
        write_at(self.fd, _WHOLE.pack(changed, self._check_of(changed)), _WHOLE_AT)

    def is_whole(self, changed: int) -> bool:
        """Return True if `note_whole` was called since this machine was started. Raises OSError."""
        note = os.pread(self.fd, _WHOLE.size, _WHOLE_AT)
        return note == _WHOLE.pack(changed, self._check_of(changed))

    def _check_of(self, changed: int) -> bytes:
        return xxhash.xxh3_64_digest(f"{changed} {_boot()}".encode(), self._seed)

    # --- use

    def used(self) -> float:
        """Return the time of the last use in seconds since the epoch. Raises OSError."""
        return os.fstat(self.fd).st_mtime

    def idle(self) -> float:
        """Return for how many seconds the object was not used before the present round. Raises OSError."""
        [idle] = struct.unpack("<d", os.pread(self.fd, 8, _IDLE_AT).ljust(8, b"\0"))
        return float(idle) if 0 <= idle <= NEVER else NEVER

    def age(self) -> float:
        """Return for how many seconds other objects must be unused to be evicted for this one. Raises OSError."""
        return min(AGE * self.idle(), NEVER)

    def note_use(self) -> None:
        """Note that the object is used now. Where the disk refuses the note, the object looks older, no more."""
        with contextlib.suppress(OSError):
            gap = time.time() - self.used()
            if gap > ROUND_SECONDS:
                write_at(self.fd, struct.pack("<d", min(gap, NEVER)), _IDLE_AT)
            os.utime(self.fd)


def _together(here: bytes, first: int, at: int) -> int:
    """Return how many blocks share a checksum from place `at` on; block `first` is at place 0."""
    return GROUP if (first + at) % GROUP == 0 and here.startswith(_GROUP, at) else 1


@functools.lru_cache(1)
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class _Scratch(threading.local):
    """Memory of a thread for blocks that it compares: new pages for each read would cost as much as reading."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def of(self, size: int) -> memoryview:
        if size > _SCRATCH_MAX:
            return memoryview(bytearray(size))
        if size > len(self._memory):
            self._memory = bytearray(_SCRATCH_MAX)
        return memoryview(self._memory)[:size]


_scratch = _Scratch()
_checking = threading.Lock()  # guards the notes of compared blocks of all objects; held for microseconds


def _renew_lock() -> None:
    global _checking
    _checking = threading.Lock()  # the thread that has it may be in the parent


os.register_at_fork(after_in_child=_renew_lock)


class CachedObject:
    """The blocks of an object that are in the cache; `fd` is open to read."""

    def __init__(self, fd: int, table: BlockTable, room: CacheRoom) -> None:
        self.fd = fd
        self.size = table.pin.size
        self._table, self._room = table, room
        # Hold `_checking` to change these two.
        self._checked = mmap.mmap(-1, max(table.blocks, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._find = self._checked.find
        self._as_of = os.fstat(fd).st_ctime_ns  # the ctime of the file when the blocks in `_checked` were compared
        with contextlib.suppress(OSError):
            if table.is_whole(self._as_of):
                self._checked[: table.blocks] = _CHECKED * table.blocks
        self._due = monotonic() + USE_SECONDS  # when the next use has to be noted
        self._flags = os.RWF_NOWAIT  # those of preadv(2) that the file system knows

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._table.fd)
        self._checked.close()

    @property
    def evicted(self) -> bool:
        """True if the object was removed from the cache: no other process finds bytes that are put from now on."""
        return os.fstat(self.fd).st_nlink == 0

    @property
    def complete(self) -> bool:
        try:
            return self._table.is_full()
        except OSError:
            return False

    # --- reading

    def read(self, size: int, offset: int) -> bytes | None:
        """Return the bytes of a range, fewer only at the end of the object; None if not all of them are here."""
        end = offset + size
        if end > self.size:
            size, end = self.size - offset, self.size
        if size <= 0:
            return b""
        as_of = self._as_of
        if self._find(_UNCHECKED, offset >> _SHIFT, (end - 1 >> _SHIFT) + 1) < 0:
            try:
                data = pread(self.fd, size, offset)
                if fstat(self.fd).st_ctime_ns == as_of:
                    if monotonic() > self._due:
                        self.use()
                    return data
            except OSError as error:
                self._lost(offset, end, error)
                return None
        checked = self._read_checked(size, offset)
        return None if checked is None else bytes(checked)

    def view(self, size: int, offset: int, flags: int = 0) -> memoryview | None:
        """Return the bytes of a range, valid until the next call of this thread: no memory is allocated for them.

        None if not all of it is here, or it goes beyond the end of the object. `flags` are those of preadv(2):
        with RWF_NOWAIT also None if the read would wait for the disk.
        """
        flags &= self._flags
        end = offset + size
        if not offset < end <= self.size:
            return memoryview(b"") if end == offset else None
        as_of = self._as_of
        if self._find(_UNCHECKED, offset >> _SHIFT, (end - 1 >> _SHIFT) + 1) < 0:
            try:
                data = _scratch.of(size)
                is_filled = preadv(self.fd, (data,), offset, flags) == size
                if fstat(self.fd).st_ctime_ns == as_of:
                    if monotonic() > self._due:
                        self.use()
                    return data if is_filled else None
            except OSError as error:
                self._lost(offset, end, error)
                return None
        return self._read_checked(size, offset, flags)

    def _read_checked(self, size: int, offset: int, flags: int = 0) -> memoryview | None:
        """Return bytes after comparing them with their checksums."""
        first, last = offset // BLOCK, -(-(offset + size) // BLOCK)
        self.use()
        try:
            data = self._check(first, last, flags)
        except OSError as error:
            self._lost(offset, offset + size, error)
            return None
        return None if data is None else data[offset - first * BLOCK :][:size]

    def _lost(self, begin: int, end: int, error: OSError) -> None:
        """Drop bytes that the disk cannot read, to be fetched again; keep them if the read would only wait."""
        if error.errno == errno.EOPNOTSUPP:
            self._flags = 0
        if error.errno not in _NOT_NOW:
            self._drop(range(begin // BLOCK, -(-end // BLOCK)))

    def _check(self, first: int, last: int, flags: int) -> memoryview | None:
        """Return the content of blocks; None if not all are here. Drops damaged blocks. Raises OSError."""
        changed = os.fstat(self.fd).st_ctime_ns
        with _checking:
            if changed != self._as_of:
                # In this order, because a reader takes the time first and then looks at the checked blocks.
                self._checked.madvise(mmap.MADV_DONTNEED)
                self._as_of = changed
        blocks = self._table.comparable(first, last)
        if blocks is None:
            return None
        begin, (first, last) = first, blocks
        data, wrong = self._compared(first, last, flags)
        if wrong:
            self._drop(wrong)
            return None
        if _is_settled(changed):
            with _checking:
                if self._as_of == changed:
                    self._checked[first:last] = _CHECKED * (last - first)
        return data[(begin - first) * BLOCK :]

    def _compared(self, first: int, last: int, flags: int = 0) -> tuple[memoryview, list[int]]:
        """Return the content of blocks, and the numbers of damaged ones. Raises OSError."""
        data = self._blocks(first, last, flags)
        wrong = self._table.wrong(first, data)
        if wrong:
            for fd in (self.fd, self._table.fd):
                cache_directory.see_others(fd)  # another node may have written them since
            data = self._blocks(first, last, flags)
            wrong = self._table.wrong(first, data)
        return data, wrong

    def _blocks(self, first: int, last: int, flags: int = 0) -> memoryview:
        """Return the content of blocks, valid until the next call of this thread. Raises OSError."""
        begin, end = first * BLOCK, min(last * BLOCK, self.size)
        data = _scratch.of(end - begin)
        size = preadv(self.fd, (data,), begin, flags)
        if size < len(data):
            if flags:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            data[size:] = bytes(len(data) - size)  # the file ends too early
        return data

    def _drop(self, blocks: Sequence[int]) -> None:
        with contextlib.suppress(OSError):
            self._table.drop(blocks)

    def hold(self) -> None:
        """Keep the object in the cache until this process and its children have closed it. Raises OSError."""
        cache_directory.hold(self._table.fd)

    def verify(self) -> int:
        """Compare all blocks in the cache with their checksums; drop the damaged ones and return their number.

        A complete object is then read without comparisons until its file changes or this machine is started again,
        also by processes that open it later. Raises OSError.
        """
        changed, blocks = os.fstat(self.fd).st_ctime_ns, self._table.blocks
        damaged = reached = 0
        absent = list(self._table.absent(0, blocks))
        for first, last in [*absent, (blocks, blocks)]:
            while reached < first:
                stop = min(reached // _STEP * _STEP + _STEP, first)
                _, wrong = self._compared(reached, stop)
                if wrong:
                    self._table.drop(wrong)
                damaged += len(wrong)
                reached = stop
            reached = last
        if not damaged and not absent and _is_settled(changed):
            self._table.note_whole(changed)
        return damaged

    # --- filling

    def missing(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the bytes that have to be fetched for a range: whole blocks, and the end of the object."""
        first, last = begin // BLOCK, -(-min(end, self.size) // BLOCK)
        try:
            absent = list(self._table.absent(first, last))
        except OSError:
            absent = [(first, last)]
        return [(low * BLOCK, min(high * BLOCK, self.size)) for low, high in absent]

    def has_room(self, size: int) -> bool:
        """Return True if the cache will take `size` more bytes of the object."""
        try:
            return self._room.has_room(size, self._table.age())
        except OSError:
            return False

    def put(
        self,
        offset: int,
        data: bytes | bytearray | memoryview,
        *,
        is_needed: bool = False,
        at_once: bool = False,
    ) -> bool:
        """Keep bytes of the object; return False if there is no room for some, or the disk refuses them.

        Incomplete blocks at both ends are ignored. Blocks that are in the cache already are not changed.
        `is_needed`: the bytes cannot be read without the cache, so other objects are evicted for them. `at_once`:
        raise BlockingIOError instead of waiting for room; some blocks may be in the cache by then.
        """
        view = memoryview(data).cast("B")[: max(self.size - offset, 0)]
        end = offset + len(view)
        first, last = -(-offset // BLOCK), self._table.blocks if end == self.size else end // BLOCK
        self.use()
        try:
            if self.evicted:
                return False
            age = NEEDED if is_needed else self._table.age()
            for low, high in list(self._table.absent(first, last)):
                begin, stop = low * BLOCK, min(high * BLOCK, self.size)
                if not self._room.reserve(stop - begin, age, at_once=at_once):
                    return False
                piece = view[begin - offset : stop - offset]
                self._write(piece, begin)
                self._table.put(low, piece)
        except OSError as error:
            if error.errno == errno.EBADF or (at_once and error.errno == errno.EAGAIN):
                raise
            return False
        return True

    def _write(self, data: memoryview, offset: int) -> None:
        # Open only for this write: most objects are only read. If a kernel mount of an earlier release reads the
        # file, the open fails at once, and these bytes are not kept.
        fd = os.open(f"/proc/self/fd/{self.fd}", _WRITING)
        try:
            for at in range(0, len(data), WRITE_MAX):
                write_at(fd, data[at : at + WRITE_MAX], offset + at)
        finally:
            os.close(fd)

    def claim(self, begin: int, end: int) -> bool:
        """Claim a range for this process to fetch; return False if another process has claimed a part.

        Ranges of one `CachedObject`, in any thread, do not exclude each other. A claim ends by `release`, or with
        the process. A process that has a claim must not fork: its child would share the claim.
        """
        try:
            cache_directory.lock_range(self._table.fd, fcntl.F_WRLCK, begin, end - begin)
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            raise
        return True

    def release(self, begin: int, end: int) -> None:
        """End the claim of a range."""
        cache_directory.lock_range(self._table.fd, fcntl.F_UNLCK, begin, end - begin)

    def use(self) -> None:
        """Note that the object is used now, at most once a minute; `read`, `view` and `put` do so themselves."""
        if monotonic() > self._due:
            self._due = monotonic() + USE_SECONDS
            self._table.note_use()


def _is_settled(changed: int) -> bool:
    """Return True if a later change of the file will show in its ctime, which is `changed` now."""
    tick = SETTLED_NS if changed % _SECOND else 2 * _SECOND  # the file system may count whole seconds
    return time.time_ns() - changed > tick
