"""Inodes and indexes of chunks in the EROFS format (`erofs.py`), encoded by columns."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wdsfs.kernel.erofs import BLOCK, CHUNKS, COMPACT_SIZE, EXTENDED_SIZE, OWN_TIMES_KERNEL, WITH_INDEXES


def blocks_of_all(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """As `erofs.blocks_of`, of a column."""
    return -(-sizes // BLOCK)


def chunk_bits(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """For files of one chunk: how many times a block has to be doubled to cover the file."""
    blocks = np.maximum(blocks_of_all(sizes), 1)
    return np.frexp((blocks - 1).astype(np.float64))[1].astype(np.int64)


def chunk_words(device: NDArray[np.int64], block: NDArray[np.int64]) -> NDArray[np.uint32]:
    """The indexes of chunks: an array of two words for each."""
    found = np.empty((len(block), 2), np.uint32)
    found[:, 0] = device << 16
    found[:, 1] = block
    return found


class Inodes:
    """Columns of inodes that are encoded together.

    `content` is PLAIN, INLINE or CHUNKS, `address` the first block or the bits of the chunks, `extended` says
    which have the long form. Sizes are in bytes, times in ns.
    """

    def __init__(
        self,
        *,
        extended: NDArray[np.bool_],
        content: NDArray[np.int64],
        mode: NDArray[np.int64],
        links: NDArray[np.int64],
        size: NDArray[np.int64],
        address: NDArray[np.int64],
        number: NDArray[np.int64],
        mtime_ns: NDArray[np.int64],
        owner: tuple[int, int],
    ) -> None:
        self.extended, self.owner = extended, owner
        self.format = extended.astype(np.int64) | content << 1
        self.mode, self.links, self.size, self.number = mode, links, size, number
        self.address = np.where(content == CHUNKS, address | WITH_INDEXES, address)
        self.seconds, self.nanoseconds = np.divmod(mtime_ns, 10**9)

    def compact(self, epoch: int) -> NDArray[np.uint32]:
        """The short ones, eight words each; their times count from `epoch` (seconds)."""
        at = ~self.extended
        words = np.zeros((int(at.sum()), COMPACT_SIZE // 4), np.uint32)
        words[:, 0] = self.format[at]
        words[:, 1] = self.mode[at] | self.links[at] << 16
        words[:, 2] = self.size[at]
        words[:, 3] = self.seconds[at] - epoch
        words[:, 4] = self.address[at]
        words[:, 5] = self.number[at] & 0xFFFFFFFF
        words[:, 6] = self.owner[0] | self.owner[1] << 16 if len(words) else 0
        return words

    def long(self) -> NDArray[np.uint32]:
        """The long ones, sixteen words each."""
        at = self.extended
        words = np.zeros((int(at.sum()), EXTENDED_SIZE // 4), np.uint32)
        words[:, 0] = self.format[at]
        words[:, 1] = self.mode[at]
        words[:, 2], words[:, 3] = self.size[at] & 0xFFFFFFFF, self.size[at] >> 32
        words[:, 4] = self.address[at]
        words[:, 5] = self.number[at] & 0xFFFFFFFF
        words[:, 6], words[:, 7] = self.owner
        words[:, 8], words[:, 9] = self.seconds[at] & 0xFFFFFFFF, self.seconds[at] >> 32 & 0xFFFFFFFF
        words[:, 10], words[:, 11] = self.nanoseconds[at], self.links[at]
        return words


class Times:
    """Which times a compact inode can have.

    Before Linux 6.15 only one, that of the super block; since then any whole second from that on.
    """

    def __init__(self, common_ns: int, since: tuple[int, int]) -> None:
        self.own = since >= OWN_TIMES_KERNEL
        self.epoch_ns = 0 if self.own else common_ns

    def fit(self, mtime_ns: NDArray[np.int64]) -> NDArray[np.bool_]:
        """True where a compact inode tells the time exactly."""
        if not self.own:
            return np.asarray(mtime_ns == self.epoch_ns)
        return np.asarray((mtime_ns >= 0) & (mtime_ns % 10**9 == 0) & (mtime_ns < 10**9 << 32))
