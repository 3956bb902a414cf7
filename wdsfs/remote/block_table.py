"""The table of a cached object: which blocks of it are here, and the checksum of each.

::

    0           magic
    8           seconds that the object had not been used before its present round of use (a double)
    16          ctime of the data file when all of it had been compared, checksum of this and the boot
    32          length of the text, seed of the checksums, text (JSON: URL as shown, pin), checksum of these three
    4096 * n    a byte per block: 1 when the block is in the data file
                8 bytes per block: XXH3 of its content, with the seed and the number of the block

The time of the last use is the mtime of the file.

A block counts only if its content has its checksum. So nothing here needs an order or a sync: what a kill or a
power cut leaves half done, and what somebody damages, is a block that is not here. The file is read and written by
calls, never mapped: a disk that is full or breaks is then an OSError, and not a signal.
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

from wdsfs.remote.urls import Pin
from wdsfs.storage.durable import write_at

BLOCK = 4096
ROUND_SECONDS = 120.0  # without use end a round of use, for example a pass over the object
NEVER = 86400.0  # seconds that count as the time since the last use for an object that is new
_MAGIC = b"wdsfs-o\1"
_IDLE_AT = 8
_HEAD = struct.Struct("<II")
_WHOLE = struct.Struct("<Q8s")
_WHOLE_AT = 16
_HEAD_AT = _WHOLE_AT + _WHOLE.size
_PAGE = 4096
_TEXT_MAX = 1 << 20
_HERE = b"\1"
_ABSENT = re.compile(rb"[^\1]+")
_SUM = 8


class BlockTable:
    """The table in an open file. Usable by several threads and processes."""

    def __init__(self, fd: int, shown: str, pin: Pin, seed: int, length: int) -> None:
        self.fd = fd
        self.shown, self.pin = shown, pin
        self.blocks = -(-pin.size // BLOCK)
        self._seed = seed
        self._here_at = -(-(_HEAD_AT + _HEAD.size + length + _SUM) // _PAGE) * _PAGE
        self._sums_at = self._here_at + -(-self.blocks // _SUM) * _SUM

    @classmethod
    def load(cls, fd: int) -> BlockTable | None:
        """The table in a file; None if there is none that is whole. Raises OSError."""
        first = os.pread(fd, _PAGE, 0)
        if first[:_IDLE_AT] != _MAGIC or len(first) < _HEAD_AT + _HEAD.size:
            return None
        length, seed = _HEAD.unpack_from(first, _HEAD_AT)
        begin, end = _HEAD_AT + _HEAD.size, _HEAD_AT + _HEAD.size + length
        if length > _TEXT_MAX:
            return None
        if end + _SUM > len(first):
            first += os.pread(fd, end + _SUM - len(first), len(first))
        if first[end : end + _SUM] != xxhash.xxh3_64_digest(first[_HEAD_AT:end]):
            return None
        shown, *pin = json.loads(first[begin:end])
        return cls(fd, shown, Pin(*pin), seed, length)

    @classmethod
    def create(cls, fd: int, shown: str, pin: Pin) -> BlockTable:
        """A table without blocks in an empty file. Raises OSError."""
        text = json.dumps([shown, *pin]).encode()
        seed = int.from_bytes(os.urandom(4), "little")
        head = _HEAD.pack(len(text), seed) + text
        table = cls(fd, shown, pin, seed, len(text))
        os.ftruncate(fd, table._sums_at + table.blocks * _SUM)
        write_at(fd, head + xxhash.xxh3_64_digest(head), _HEAD_AT)
        write_at(fd, struct.pack("<d", NEVER), _IDLE_AT)
        write_at(fd, _MAGIC, 0)
        return table

    # --- blocks

    def absent(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The ranges of blocks among these that are not here. Raises OSError."""
        first, last = max(first, 0), min(last, self.blocks)
        for run in _ABSENT.finditer(self._presence(first, last)):
            yield first + run.start(), first + run.end()

    def count(self) -> int:
        """The blocks that are here. Raises OSError."""
        return self._presence(0, self.blocks).count(_HERE)

    def put(self, first: int, data: memoryview) -> None:
        """Note blocks that are in the data file from now on; `data` is their content. Raises OSError."""
        sums = self._sums(first, data)
        write_at(self.fd, struct.pack(f"<{len(sums)}Q", *sums), self._sums_at + first * _SUM)
        write_at(self.fd, _HERE * len(sums), self._here_at + first)

    def wrong(self, first: int, data: memoryview) -> list[int]:
        """The blocks whose content is not what it was when they were put. Raises OSError."""
        sums = self._sums(first, data)
        length = len(sums) * _SUM
        kept = os.pread(self.fd, length, self._sums_at + first * _SUM).ljust(length, b"\0")
        expected = struct.unpack(f"<{len(sums)}Q", kept)
        if tuple(sums) == expected:
            return []
        return [first + number for number, (a, b) in enumerate(zip(sums, expected, strict=True)) if a != b]

    def drop(self, blocks: Sequence[int]) -> None:
        """Note that these blocks are not here. Raises OSError."""
        for block in blocks:
            write_at(self.fd, b"\0", self._here_at + block)

    def _presence(self, first: int, last: int) -> bytes:
        count = max(last - first, 0)
        return os.pread(self.fd, count, self._here_at + first).ljust(count, b"\0")

    def _sums(self, first: int, data: memoryview) -> list[int]:
        """The checksums of blocks; never 0, which is what a table has where nothing was put."""
        number = self._seed + first
        starts = range(0, len(data), BLOCK)
        of = xxhash.xxh3_64_intdigest
        return [of(data[start : start + BLOCK], number + i) or 1 for i, start in enumerate(starts)]

    # --- all blocks

    def note_whole(self, changed: int) -> None:
        """Note that all blocks have been compared, with a data file of this ctime. Raises OSError."""
        write_at(self.fd, _WHOLE.pack(changed, self._check_of(changed)), _WHOLE_AT)

    def is_whole(self, changed: int) -> bool:
        """True if that was noted since this machine was started. Raises OSError."""
        found = os.pread(self.fd, _WHOLE.size, _WHOLE_AT)
        return found == _WHOLE.pack(changed, self._check_of(changed))

    def _check_of(self, changed: int) -> bytes:
        return xxhash.xxh3_64_digest(f"{changed} {_boot()}".encode(), self._seed)

    # --- use

    def used(self) -> float:
        """The time of the last use in seconds since the epoch. Raises OSError."""
        return os.fstat(self.fd).st_mtime

    def idle(self) -> float:
        """For how many seconds the object was not used before the present round. Raises OSError."""
        [idle] = struct.unpack("<d", os.pread(self.fd, 8, _IDLE_AT).ljust(8, b"\0"))
        return float(idle) if 0 <= idle <= NEVER else NEVER

    def note_use(self) -> None:
        """The object is used now. A disk that does not take the note only makes it look older."""
        with contextlib.suppress(OSError):
            gap = time.time() - self.used()
            if gap > ROUND_SECONDS:
                write_at(self.fd, struct.pack("<d", min(gap, NEVER)), _IDLE_AT)
            os.utime(self.fd)


@functools.lru_cache(1)
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
