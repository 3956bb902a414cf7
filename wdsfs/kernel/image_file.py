"""The file of an image while it is written: tables one behind the other, inodes of directories in advance."""

from __future__ import annotations

import numpy as np

from wdsfs.errors import ImageError
from wdsfs.kernel import erofs
from wdsfs.kernel.erofs_columns import Times
from wdsfs.kernel.layout import lay_out, lay_out_directories
from wdsfs.kernel.table import Table
from wdsfs.owner import Owner
from wdsfs.storage.durable import write_at
from wdsfs.tree.texts import Ints

_RESERVED = erofs.BLOCK // erofs.EXTENDED_SIZE  # inodes in a block of those that are written later


class ImageFile:
    """Writes to the descriptor `fd`; `devices` is how many there are. The top of a `private` image, which is the
    first inode that is reserved, can be entered by its owner alone."""

    def __init__(self, fd: int, devices: int, times: Times, owner: Owner, private: bool = False) -> None:
        self._fd, self._times, self._owner, self._private = fd, times, owner, private
        self.metadata = erofs.metadata_block(devices)
        self.blocks = self.metadata + 1  # an empty block: no inode has the number 0
        self.inodes = 0
        self._reserved: list[int] = []

    def reserve(self) -> int:
        """The number of an inode that is written later."""
        if not self._reserved:
            first = self._nid_at(self.blocks)
            step = erofs.EXTENDED_SIZE // erofs.SLOT
            self._reserved = [first + step * nth for nth in reversed(range(_RESERVED))]
            self._grow(1)
        return self._reserved.pop()

    def _nid_at(self, block: int) -> int:
        """The number of the inode that begins at this block."""
        return (block - self.metadata) * erofs.SLOTS_PER_BLOCK

    def _grow(self, blocks: int) -> None:
        self.blocks += blocks
        if self.blocks > erofs.BLOCKS_MAX:
            raise ImageError("the image would have more than 2 TiB; make several images")

    def append(self, table: Table) -> Ints:
        """Write a table; returns the inode numbers of its objects. Raises ImageError, OSError."""
        part = lay_out(self._masked(table), self.blocks, self.metadata, self._times, self._owner[:2])
        write_at(self._fd, part.data.data, self.blocks * erofs.BLOCK)
        self._grow(len(part.data) // erofs.BLOCK)
        self.inodes += len(part.nids)
        return part.nids

    def write_directories(self, nids: Ints, table: Table) -> None:
        """Write the directories that are the objects of `table`, whose inodes were reserved. Raises ImageError,
        OSError."""
        table = self._masked(table)
        if self._private:
            table.mode = np.where(nids == erofs.SLOTS_PER_BLOCK, table.mode & ~0o077, table.mode)
        inodes, listings = lay_out_directories(table, nids, self.blocks, self._owner[:2])
        # Those that were reserved one after the other lie side by side.
        ends = np.append(np.flatnonzero(np.diff(nids) != erofs.EXTENDED_SIZE // erofs.SLOT) + 1, len(nids))
        first = 0
        for end in ends.tolist():
            place = self.metadata * erofs.BLOCK + int(nids[first]) * erofs.SLOT
            write_at(self._fd, inodes[first:end].reshape(-1).view(np.uint8).data, place)
            first = end
        write_at(self._fd, listings.data, self.blocks * erofs.BLOCK)
        self._grow(len(listings) // erofs.BLOCK)
        self.inodes += len(nids)

    def _masked(self, table: Table) -> Table:
        table.mode = table.mode & ~self._owner.umask
        return table
