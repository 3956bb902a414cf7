"""Where the bytes of a file are, as an image says it: in which device, from which block on.

What cannot be pointed at is stored in the image: decoded members, fields of JSON, values of label files, sparse
members whose parts do not begin at blocks, and what lies in a last block of a shard that is not whole. Of a shard
that ends too early, everything from the first block that is not there is on a device that does not exist, and so
is a field of JSON that cannot be parsed: reading it fails.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from wdsfs.errors import CorruptShard, ImageError
from wdsfs.kernel.erofs import BLOCK, CHUNK_BITS_MAX, NO_BLOCK, blocks_of
from wdsfs.kernel.erofs_columns import blocks_of_all
from wdsfs.kernel.table import Chunks
from wdsfs.tree import content as content_module
from wdsfs.tree.content import Content
from wdsfs.tree.content_columns import APART, ContentColumns
from wdsfs.tree.texts import Ints

STORED_MAX = 256 << 20  # bytes of one file that is stored
CHUNKS_MAX = 1 << 24  # of one file: 128 MiB of indexes
CHUNKS_DAMAGED = 1 << 18  # of one that is not whole, as far as its size can be believed
_PIECE = 1 << 20  # bytes that are read at a time


class Place(NamedTuple):
    """Where a file lies that is in one piece: the number of its device, and its first block."""

    device: int
    block: int


NOWHERE = Place(0, NO_BLOCK)  # of an empty file


class Pieces(NamedTuple):
    """The parts of a file that lie in a shard: where each is in the file, its size, where in the shard (bytes)."""

    start: Ints
    size: Ints
    place: Ints


class DeviceFile(NamedTuple):
    """A device: its number, and the size of the file that it is (bytes)."""

    number: int
    size: int


class ContentPlaces:
    """The places of content, with `devices` by path of shard, and the number of a device that is `missing`."""

    def __init__(self, devices: Mapping[bytes, DeviceFile], missing: int | None) -> None:
        self._devices, self._missing = devices, missing

    def of_all(self, contents: ContentColumns, members: Ints, sizes: Ints) -> tuple[Ints, Ints]:
        """The places of files, in columns: of these members of a shard, with these sizes (bytes).

        A device IN_DATA, APART or HELD is as `ContentColumns` says it. Raises ImageError.
        """
        devices = [*map(self._device, contents.paths), DeviceFile(0, 0)]
        numbers, rooms = np.array([[one.number, one.size // BLOCK] for one in devices], np.int64).T
        file, start = contents.file[members], contents.start[members]
        at = np.maximum(file, -1)  # the last row is of those that are in no file
        whole = start // BLOCK + blocks_of_all(sizes) <= rooms[at]
        device = np.where(file < 0, file, np.where(whole, numbers[at], APART))
        device[sizes == 0] = 0
        return device, np.where(device > 0, start // BLOCK, NO_BLOCK)

    def _device(self, path: bytes) -> DeviceFile:
        found = self._devices.get(path)
        if found is None:
            raise ImageError(f"{os.fsdecode(path)}: is no shard of the image")
        return found

    def of(self, content: Content) -> Place | Chunks | bytes:
        """The place of a file that lies in one piece; else where its chunks are, or its bytes.

        Raises ImageError, and ShardErrors when what is stored cannot be read.
        """
        if not content.size:
            return NOWHERE
        pieces = _pieces(content)
        if pieces is None:
            try:
                return _read(content, 0)
            except CorruptShard:
                if content.held is None or self._missing is None:
                    raise
                return self._unreadable(content, self._missing)
        device = self._device(content.file.path)
        if len(pieces.size) and pieces.size[0] == content.size:  # else there are holes, or nothing else
            first = int(pieces.place[0]) // BLOCK
            if first + blocks_of(content.size) <= device.size // BLOCK:
                return Place(device.number, first)
        return self._chunks(content, pieces, device)

    def _unreadable(self, content: Content, missing: int) -> Chunks:
        """A file that is made of what is damaged: reading it fails, as on a mount."""
        bits = _bits_of_small_chunks(content.size)
        count = -(-content.size // (BLOCK << bits))
        return Chunks(bits, np.full(count, missing, np.int64), np.zeros(count, np.int64), b"")

    def _chunks(self, content: Content, pieces: Pieces, device: DeviceFile) -> Chunks:
        bits = _chunk_bits(content, pieces)
        chunk = BLOCK << bits
        count = -(-content.size // chunk)
        if count > CHUNKS_MAX:
            raise ImageError(
                f"{os.fsdecode(content.file.path)}: a sparse member has more than {CHUNKS_MAX:,} pieces; mount "
                "this set by FUSE"
            )
        devices, blocks = np.zeros(count, np.int64), np.full(count, NO_BLOCK, np.int64)
        nth, begins, ends = _of_chunks(pieces, chunk)
        there = -(-ends // BLOCK) <= device.size // BLOCK
        stored = b""
        if not there.all() and int(ends[-1]) <= device.size:  # the last block of the shard is not whole
            stored, there[-1] = _read(content, int(nth[-1]) * chunk), True
        if self._missing is None and not there.all():
            raise ImageError(f"{os.fsdecode(content.file.path)}: ends before its last member does")
        devices[nth] = np.where(there, device.number, self._missing or 0)
        blocks[nth] = np.where(there, begins // BLOCK, 0)
        return Chunks(bits, devices, blocks, stored)


def _of_chunks(pieces: Pieces, chunk: int) -> tuple[Ints, Ints, Ints]:
    """The numbers of the chunks that lie in pieces, and where each begins and ends in the shard."""
    start, size, place = pieces
    first = start // chunk
    counts = -(-(start + size) // chunk) - first
    before = np.cumsum(counts) - counts
    nth = np.repeat(first - before, counts) + np.arange(counts.sum())
    begins = np.repeat(place - start, counts) + nth * chunk
    return nth, begins, np.minimum(begins + chunk, np.repeat(place + size, counts))


def _chunk_bits(content: Content, pieces: Pieces) -> int:
    """How many times a block is doubled to get the chunks of a file: none is in two pieces, or beside one."""
    edges = np.concatenate((pieces.start, pieces.start + pieces.size))
    edges = edges[edges != content.size]
    if edges.any():
        unit = int(np.gcd.reduce(edges))
        return (unit & -unit).bit_length() - BLOCK.bit_length()
    return _bits_of_small_chunks(content.size)  # a hole, or one piece, whose end is missing or no whole block


def _bits_of_small_chunks(size: int) -> int:
    """How many times a block is doubled to get chunks of a file that are small, but not too many."""
    return min((blocks_of(size) // CHUNKS_DAMAGED).bit_length(), CHUNK_BITS_MAX)


def _pieces(content: Content) -> Pieces | None:
    """The parts of a file that lie in a shard; None if a block of the file is no block of the shard."""
    if content.held is not None:
        return None
    extents = content.extents
    columns = ([0], [content.size], [0]) if extents is None else extents
    start, size, place = (np.array(column, np.int64) for column in columns)
    place += content.data
    if (start % BLOCK).any() or (place % BLOCK).any() or (size % BLOCK != 0)[start + size != content.size].any():
        return None
    return Pieces(start, size, place)


def _read(content: Content, start: int) -> bytes:
    """The bytes of a file from `start` on. Raises ImageError if they are too many, else as `content.read`."""
    if content.size - start > STORED_MAX:
        raise ImageError(
            f"{os.fsdecode(content.file.path)}: {content.size - start:,} bytes of a file would have to be stored "
            f"in the image, and {STORED_MAX:,} is the most; mount this set by FUSE"
        )
    pieces = range(start, content.size, _PIECE)
    return b"".join(content_module.read(content, at, min(_PIECE, content.size - at)) for at in pieces)
