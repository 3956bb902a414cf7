"""Reads ahead where an index of another tool says that the headers of a shard are.

A scan is a chain of reads: each header says where the next one is. Between large members each read waits for the
disk, or the network. A DALI or Energon index beside the shard has all the offsets. Wrong ones do no harm, since
they are only a hint to the kernel: the scan reads and checks every header as usual. These indexes are read here
as far as that takes; they are written, and checked in full, in `interop`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from array import array
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

from wdsfs.remote.any_shard import OpenShard
from wdsfs.storage import source
from wdsfs.storage.source import open_beside

SPARSE = 64 << 10  # bytes of a shard per sample; with fewer a scan reads everything anyway, and in order
AROUND = 2048  # bytes on both sides of a place: extension headers before it, the next header after a small member
_PAGE = 4096


@contextlib.contextmanager
def reading_ahead(shard: OpenShard, path: bytes) -> Iterator[None]:
    """Have the headers of an open shard read ahead while it is scanned, if an index beside it has their places.

    Nothing is looked for beside a remote shard, for which `remote_scan.py` fetches ahead.
    """
    size = source.size_of(shard)
    places = _places(path, size) if isinstance(shard, int) else ()
    if not places or not isinstance(shard, int):
        yield
        return
    enough = threading.Event()
    thread = threading.Thread(target=_advise, args=(shard, size, places, enough), name="ahead")
    with contextlib.suppress(RuntimeError):  # there may be no more threads; the scan needs none
        thread.start()
    try:
        yield
    finally:
        enough.set()
        if thread.ident is not None:
            thread.join()


def _places(path: bytes, size: int) -> Sequence[int]:
    """The offsets of contents or headers by an index beside the shard; none if it is not worth it."""
    most = size // SPARSE
    for side, read in (
        (dali_path(path), dali_places),
        (energon_path(path), energon_places),
    ):
        # `wdsfs check` reports what is wrong with it.
        with contextlib.suppress(OSError, ValueError), open_beside(side) as file:
            if most and (found := read(file, most)):
                return found
    return ()


def _advise(fd: int, size: int, places: Sequence[int], enough: threading.Event) -> None:
    asked = 0
    for place in places:
        if enough.is_set():
            return
        start, end = max(place - AROUND, asked) & -_PAGE, min(place + AROUND, size)
        if start < end:  # not if it is after the end
            with contextlib.suppress(OSError):  # only advice
                os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_WILLNEED)
            asked = end


def dali_path(shard: bytes) -> bytes:
    """The path of the DALI index of a shard: where `wds2idx` puts it, if the name has no further dot."""
    return shard.removesuffix(b".tar") + b".idx"


class DaliRows(NamedTuple):
    """Columns of equal length: offsets and sizes of contents (bytes), and the numbers of their extensions."""

    offsets: array[int]
    sizes: array[int]
    extensions: array[int]

    @classmethod
    def empty(cls) -> DaliRows:
        return cls(array("q"), array("q"), array("q"))

    def add(self, offset: int, size: int, extension: int) -> None:
        self.offsets.append(offset)
        self.sizes.append(size)
        self.extensions.append(extension)


def dali_places(index: BinaryIO, most: int) -> Sequence[int]:
    """The offsets of contents by a DALI index, unless it has more than `most` samples.

    Raises ValueError for a file that is no such index.
    """
    words = index.readline(64).split()
    if len(words) != 2 or not words[1].isdigit() or int(words[1]) > most:
        return ()
    index.seek(0)
    return dali_rows(index, {})[0].offsets


def dali_rows(lines: Iterator[bytes], numbers: dict[bytes, int]) -> tuple[DaliRows, array[int]]:
    """Return the rows of an index, and for each line the number of rows up to its end. Raises ValueError."""
    version, *count = next(lines, b"").split()[:2] or (b"",)
    if version not in (b"v1.1", b"v1.2") or not count or not count[0].isdigit():
        raise ValueError("line 1 is not `v1.2` or `v1.1` and a number of samples")
    width, rows, ends = 4 if version == b"v1.2" else 3, DaliRows.empty(), array("q")
    for number, line in enumerate(lines, 2):
        words = line.split()
        # More than 18 digits are no offset in any file, and do not fit a column.
        numeric = all(word.isdigit() and len(word) < 19 for at in (1, 2) for word in words[at::width])
        if not words or len(words) % width or not numeric:
            raise ValueError(f"line {number} is not `extension offset size{' name' * (width - 3)}`, repeated")
        for at in range(0, len(words), width):
            rows.add(int(words[at + 1]), int(words[at + 2]), numbers.get(words[at], -2))
        ends.append(len(rows.offsets))
    if len(ends) != int(count[0]):
        raise ValueError(f"line 1 counts {int(count[0])} samples, and {len(ends)} lines follow")
    return rows, ends


def energon_path(shard: bytes) -> bytes:
    """The path at which Energon looks for the offsets of a shard called *.tar."""
    return shard + b".idx"


def energon_places(index: BinaryIO, most: int) -> Sequence[int]:
    """The offsets of samples by a `.tar.idx`, unless it has more than `most`.

    Raises ValueError for a file that is no such index.
    """
    found = array("Q")
    data = index.read(found.itemsize * (most + 2))
    if len(data) == found.itemsize * (most + 2):
        return ()
    found.frombytes(data)
    return found
