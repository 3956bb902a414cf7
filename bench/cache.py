"""The page cache: what of a file is in it, getting it in and getting it out."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

_PIECE = 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def warm(paths: Iterable[Path]) -> None:
    """Read all of these files."""
    buffer = bytearray(_PIECE)
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            while os.readv(fd, [buffer]):
                pass
        finally:
            os.close(fd)


def evict(paths: Iterable[Path]) -> None:
    """Drop these files from the page cache. Works for whoever may read them; dirty pages are written first."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def resident(paths: Sequence[Path], most: int = 200) -> float:
    """The part of these files that is in the page cache, from 0 to 1; of many files some are looked at."""
    pages = there = 0
    for path in paths[:: max(1, len(paths) // most)]:
        size = path.stat().st_size
        if not size:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as memory:
            start = ctypes.c_char.from_buffer(memory)
            count = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
            vector = (ctypes.c_ubyte * count)()
            if _libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), vector) == 0:
                pages += count
                there += sum(byte & 1 for byte in bytes(vector))
            del start  # the map cannot be closed while something points into it
    return there / pages if pages else 0.0
