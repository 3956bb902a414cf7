"""Moves parts of an image to another place: everything in them that says where something is gets its new value.

Where inodes begin is known; all else follows from the format (`erofs.py`). What is changed: the numbers of inodes
in themselves and in directories, the addresses of directories and of stored content, and the numbers of devices.
What lies outside of the part keeps its number, as do holes. All work is on whole columns.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsfs.dataset.texts import Ints
from wdsfs.errors import ImageError
from wdsfs.image import erofs, erofs_columns
from wdsfs.image.erofs import BLOCK, CHUNK_SIZE, DIRENT_SIZE, NO_BLOCK, SLOT, SLOTS_PER_BLOCK

_WORD = 4
_PER_SLOT, _PER_BLOCK = SLOT // _WORD, BLOCK // _WORD  # words
_AT_ONCE = 1 << 15  # inodes that are looked at together


class Move(NamedTuple):
    """From where to where: the first block, the block at which the metadata of the image begins, and the new
    number of each device."""

    block_before: int
    block: int
    metadata_before: int
    metadata: int
    devices: Mapping[int, int]

    @property
    def nid_before(self) -> int:
        """The number of the inode that begins in the first slot."""
        return (self.block_before - self.metadata_before) * SLOTS_PER_BLOCK

    @property
    def nid_step(self) -> int:
        """What is added to inode numbers."""
        return (self.block - self.metadata) * SLOTS_PER_BLOCK - self.nid_before

    @property
    def changes_nothing(self) -> bool:
        """True if the bytes stay as they are."""
        return (self.block, self.metadata) == (self.block_before, self.metadata_before) and all(
            one == other for one, other in self.devices.items()
        )


def relocate(words: NDArray[np.uint32], slots: Ints, move: Move) -> None:
    """Change the parts of an image that `words` is, one behind the other; inodes begin at these slots.

    Raises ImageError if they point to a device that has no new number.
    """
    for first in range(0, len(slots), _AT_ONCE):
        inodes = _Inodes(words, slots[first : first + _AT_ONCE])
        if move.nid_step:
            _renumber(words, inodes, move)
        if move.block != move.block_before:
            at = inodes.at[(inodes.content == erofs.PLAIN) & (inodes.address != NO_BLOCK)] + 4
            words[at] += np.int64(move.block - move.block_before).astype(np.uint32)
        _relocate_chunks(words, inodes, move)


class _Inodes:
    """Columns of inodes: where they begin and end (words), where their content is, and their size (bytes)."""

    def __init__(self, words: NDArray[np.uint32], slots: Ints) -> None:
        self.at = slots * _PER_SLOT
        form = words[self.at]
        long = (form & 1) == 1
        self.content = form >> 1 & 7
        self.end = self.at + np.where(long, erofs.EXTENDED_SIZE, erofs.COMPACT_SIZE) // _WORD
        self.size = words[self.at + 2].astype(np.int64)
        self.size[long] |= words[self.at[long] + 3].astype(np.int64) << 32
        self.address = words[self.at + 4]
        self.is_directory = (words[self.at + 1] & 0o170000) == stat.S_IFDIR


def _renumber(words: NDArray[np.uint32], inodes: _Inodes, move: Move) -> None:
    """Change inode numbers, in inodes and in directories. REQUIRES: addresses are those of before."""
    words[inodes.at + 5] += np.int64(move.nid_step).astype(np.uint32)
    inline = inodes.is_directory & (inodes.content == erofs.INLINE)
    plain = inodes.is_directory & (inodes.content == erofs.PLAIN)
    blocks = erofs_columns.blocks_of_all(inodes.size[plain])
    first = (inodes.address[plain].astype(np.int64) - move.block_before) * _PER_BLOCK
    lists = np.concatenate([inodes.end[inline], np.repeat(first, blocks) + _counted(blocks) * _PER_BLOCK])
    # The first entry of a list says where its name begins, which is behind the last entry.
    counts = (words[lists + 2] & 0xFFFF).astype(np.int64) // DIRENT_SIZE
    at = np.repeat(lists, counts) + _counted(counts) * (DIRENT_SIZE // _WORD)
    nids = words[at].astype(np.int64) | words[at + 1].astype(np.int64) << 32
    within = (nids >= move.nid_before) & (nids < move.nid_before + len(words) // _PER_SLOT)
    at, nids = at[within], nids[within] + move.nid_step
    words[at], words[at + 1] = nids & 0xFFFFFFFF, nids >> 32


def _relocate_chunks(words: NDArray[np.uint32], inodes: _Inodes, move: Move) -> None:
    """Change the numbers of devices, and the addresses of last chunks that are stored in the image."""
    chunked = inodes.content == erofs.CHUNKS
    size, bits = inodes.size[chunked], (inodes.address[chunked] & erofs.CHUNK_BITS_MAX).astype(np.int64)
    counts = np.maximum(-(-size // (BLOCK << bits)), 1)  # an empty file has one index, too
    at = np.repeat(inodes.end[chunked], counts) + _counted(counts) * (CHUNK_SIZE // _WORD)
    device = words[at] >> 16
    stored = at[(device == 0) & (words[at + 1] != NO_BLOCK)] + 1
    words[stored] += np.int64(move.block - move.block_before).astype(np.uint32)
    after = np.full(1 << 16, -1, np.int64)
    after[0] = 0
    after[list(move.devices)] = list(move.devices.values())
    device = after[device]
    if bool((device < 0).any()):
        raise ImageError("a part of the earlier image points to a shard that it does not name; please report this")
    words[at] = device << 16


def _counted(counts: Ints) -> Ints:
    """0, 1, 2 ... for each count, one behind the other."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
