"""The table of an object in the cache: which of its blocks are here, their checksums, and when it was used.

The table::

    0           magic
    8           seconds that the object had not been used before its present round of use (a double)
    16          ctime of the data file when all of it had been compared, checksum of this and the boot
    32          length of the text, seed of the checksums, text (JSON: URL as shown, pin), checksum of these three
    4096 * n    a byte per block: 1 when the block is in the data file, 2 when all of its group are
                8 bytes per block: XXH3 of its content, with the seed and the number of the block; for a group
                (16 blocks) XXH3 of the content of all, and 0 for the other blocks

A block counts only if its content has its checksum. So no order of writes and no sync is needed: a block that a
kill or a power cut has left half written, or that somebody has damaged, counts as missing. The table is read and
written by system calls, never mapped: a full or broken disk then gives an OSError, and not a signal.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from wdsfs.door.pins import Pin
from wdsfs.formats import Format
from wdsfs.storage.durable import write_at

BLOCK = 4096
GROUP = 16  # blocks, the first of which has a number that is a multiple; with one checksum if they come together
ROUND_SECONDS = 120.0  # without use end a round of use, for example a pass over the object
NEVER = 86400.0  # seconds that count as the time since the last use for an object that is new
AGE = 3  # an object is evicted for another one if it was unused this many times as long as that was
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
        """Return the blocks that have to be read to compare these, whole groups; None if not all are here.

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
        """Return the blocks whose content differs from what was put; of a group all. Raises OSError."""
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
        """Return the checksums of blocks; that of a block or group is never 0, as in a table without it.

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
        """Note that the object is used now. If the disk refuses the note, the object only looks older."""
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
