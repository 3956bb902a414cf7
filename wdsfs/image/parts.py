"""The parts of an image, which a later image can take over: the directory of a shard each, with all below it.

A part is a range of blocks. Nothing outside refers into it but the name of its top, whose inode is in its first
slot, and it refers to nothing outside but directories above it and devices. Behind its blocks lies its *map*: a
bit for each slot, set where an inode begins, in blocks of its own. From that all else that depends on the place of
a part can be found (`relocation.py`).

The table of the parts lies behind the last block of the image; the manifest says where, and has its checksum. Only
who makes another image reads it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from wdsfs.dataset.texts import Ints
from wdsfs.image.erofs import BLOCK, SLOTS_PER_BLOCK, blocks_of

FORMAT = 1  # of the table and the maps

_HEAD = struct.Struct("<8sIIQ")  # magic, format, the block at which the metadata begins, number of parts
_PART = struct.Struct("<16sIIIHHQ")
_MAGIC = b"wdsfs-p\n"
_PIECE = 1 << 20  # bytes that are read at a time


class Wanted(NamedTuple):
    """By what a part is known: a digest of all that its bytes depend on but its place and the numbers of its
    devices; these numbers, and the one of what is missing (no device has it)."""

    key: bytes
    devices: tuple[int, ...]
    missing: int | None

    def numbers_for(self, part: Part) -> dict[int, int] | None:
        """By the number of a device in a part that has this key: the number that it is to have. None if there is
        not one for each: what is missing has none, or one shard stood for what are two shards now."""
        found: dict[int, int] = {}
        pairs = [*zip(part.devices, self.devices, strict=True)]
        if part.missing:
            pairs.append((part.missing, self.missing or 0))
        is_one = all(after and found.setdefault(before, after) == after for before, after in pairs)
        return found if is_one else None


class Part(NamedTuple):
    """A part that is in an image: `blocks` from the block `first` on, without its map. `devices` are the numbers
    that `Wanted` had, `missing` that of what is missing, or 0. `checksum` is over the blocks and the map."""

    key: bytes
    first: int
    blocks: int
    inodes: int
    missing: int
    devices: tuple[int, ...]
    checksum: int

    @property
    def end(self) -> int:
        """The block behind the part and its map."""
        return self.first + self.blocks + map_blocks(self.blocks)


def map_blocks(blocks: int) -> int:
    """How many blocks the map of a part of so many blocks has."""
    return blocks_of(blocks * SLOTS_PER_BLOCK // 8)


def map_of(slots: Ints, blocks: int) -> NDArray[np.uint8]:
    """The map of a part whose inodes begin at these slots."""
    bits = np.zeros(map_blocks(blocks) * BLOCK * 8, bool)
    bits[slots] = True
    return np.packbits(bits, bitorder="little")


def slots_of(found: NDArray[np.uint8]) -> Ints:
    """The slots at which inodes begin, by the map."""
    return np.flatnonzero(np.unpackbits(found, bitorder="little"))


def checksum_of(fd: int, part: Part) -> int | None:
    """The checksum of a part and its map as they are in a file; None if the file ends before. Raises OSError."""
    found, at, end = xxhash.xxh3_64(), part.first * BLOCK, part.end * BLOCK
    while at < end:
        data = os.pread(fd, min(_PIECE, end - at), at)
        if not data:
            return None
        found.update(data)
        at += len(data)
    return found.intdigest()


def encoded(metadata: int, parts: Sequence[Part]) -> bytes:
    """The table of the parts of an image whose metadata begins at the block `metadata`."""
    return _HEAD.pack(_MAGIC, FORMAT, metadata, len(parts)) + b"".join(map(_packed, parts))


def _packed(part: Part) -> bytes:
    *head, devices, checksum = part
    return _PART.pack(*head, len(devices), checksum) + struct.pack(f"<{len(devices)}H", *devices)


def decoded(data: bytes) -> tuple[int, list[Part]]:
    """What `encoded` was made of. Raises ValueError, struct.error."""
    magic, number, metadata, count = _HEAD.unpack_from(data)
    if (magic, number) != (_MAGIC, FORMAT):
        raise ValueError("parts of another format")
    parts, at = list[Part](), _HEAD.size
    for _ in range(count):
        key, first, blocks, inodes, missing, devices, checksum = _PART.unpack_from(data, at)
        numbers = struct.unpack_from(f"<{devices}H", data, at + _PART.size)
        parts.append(Part(key, first, blocks, inodes, missing, numbers, checksum))
        at += _PART.size + 2 * devices
    return metadata, parts
