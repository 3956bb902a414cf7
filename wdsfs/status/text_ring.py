"""Texts that one process of a mount makes and any other process serves.

A status text differs from moment to moment and from worker to worker. A reader has to get one text to its end,
though any worker may serve any part of it. So the text is kept as it was when its name was looked up, under a
number that is part of the inode number.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterator
from typing import NamedTuple

# Texts that are kept: how many at a time, and how long each may be (bytes). What is not used takes no memory.
SNAPSHOTS, _ROOM = 256, 64 << 10
_LAST, _HEAD = struct.Struct("<Q"), struct.Struct("<QIIq")  # number, bytes, CRC-32, ns since the epoch
TEXT_MAX = _ROOM - _HEAD.size


class RingText(NamedTuple):
    """A text as of the lookup of its name, and the time of that (ns since the epoch)."""

    text: bytes
    taken_ns: int


class TextRing:
    """The last texts that the workers of a mount have made, by number; each worker can serve those of the others.

    A file in memory, made before the workers are forked. Numbers begin with 1 and are never used again. A text
    that is being written when its process is killed has no number yet.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("wdsfs-snapshots")

    def put(self, text: bytes) -> int:
        """Keep a text of up to TEXT_MAX bytes, and evict the oldest; returns its number."""
        with self._locked():
            number = self._last() + 1
            now = time.time_ns()
            head = _HEAD.pack(number, len(text), zlib.crc32(text), now)
            os.pwrite(self._file, head + text, _place_of(number))
            os.pwrite(self._file, _LAST.pack(number), 0)
        return number

    def get(self, number: int) -> RingText | None:
        """The text of this number; None if it has been evicted, or never existed."""
        kept = os.pread(self._file, _HEAD.size + TEXT_MAX, _place_of(number))
        if len(kept) < _HEAD.size:
            return None
        found, length, crc, taken_ns = _HEAD.unpack_from(kept)
        text = kept[_HEAD.size : _HEAD.size + length]
        # Read without the lock: what is being replaced meanwhile has another number, or another sum.
        return RingText(text, taken_ns) if number and (found, crc) == (number, zlib.crc32(text)) else None

    def _last(self) -> int:
        last: int = _LAST.unpack(os.pread(self._file, _LAST.size, 0).ljust(_LAST.size, b"\0"))[0]
        return last

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._file, fcntl.LOCK_EX)  # let go of by the kernel when this process dies
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)


def _place_of(number: int) -> int:
    return mmap.PAGESIZE + number % SNAPSHOTS * _ROOM
