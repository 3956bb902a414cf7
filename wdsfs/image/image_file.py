"""The file of an image while it is written: parts one behind the other, inodes of directories in advance."""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsfs.image import erofs
from wdsfs.image.layout import lay_out, lay_out_directory
from wdsfs.image.table import Ints, Table

_RESERVED = erofs.BLOCK // erofs.EXTENDED_SIZE  # inodes in a block of those that are written later


class Owner(NamedTuple):
    """Owner and group of everything in an image, and the umask for all modes."""

    uid: int = 0
    gid: int = 0
    umask: int = 0


class ImageFile:
    """Writes to the descriptor `fd`; `devices` is how many there are. The top of a `private` image, which is the
    first inode that is reserved, can be entered by its owner alone."""

    def __init__(self, fd: int, devices: int, times: erofs.Times, owner: Owner, private: bool = False) -> None:
        self._fd, self._times, self._owner, self._private = fd, times, owner, private
        self.metadata = erofs.metadata_block(devices)
        self.blocks = self.metadata + 1  # an empty block: no inode has the number 0
        self.inodes = 0
        self._reserved: list[int] = []

    def reserve(self) -> int:
        """The number of an inode that is written later."""
        if not self._reserved:
            first = (self.blocks - self.metadata) * erofs.SLOTS_PER_BLOCK
            step = erofs.EXTENDED_SIZE // erofs.SLOT
            self._reserved = [first + step * nth for nth in reversed(range(_RESERVED))]
            self.blocks += 1
        return self._reserved.pop()

    def append(self, table: Table) -> Ints:
        """Write a table; returns the inode numbers of its objects. Raises ImageError, OSError."""
        part = lay_out(self._masked(table), self.blocks, self.metadata, self._times, self._owner[:2])
        self._write(part.data, self.blocks * erofs.BLOCK)
        self.blocks += len(part.data) // erofs.BLOCK
        self.inodes += len(part.nids)
        return part.nids

    def write_directory(self, nid: int, table: Table) -> None:
        """Write the directory that is the one object of `table`, whose inode was reserved."""
        table = self._masked(table)
        if self._private and nid == erofs.SLOTS_PER_BLOCK:
            table.mode = table.mode & ~0o077
        inode, listing = lay_out_directory(table, nid, self.blocks, self._owner[:2])
        self._write(inode, self.metadata * erofs.BLOCK + nid * erofs.SLOT)
        self._write(listing, self.blocks * erofs.BLOCK)
        self.blocks += len(listing) // erofs.BLOCK
        self.inodes += 1

    def _masked(self, table: Table) -> Table:
        table.mode = table.mode & ~self._owner.umask
        return table

    def _write(self, data: NDArray[np.uint8], offset: int) -> None:
        view = data.data
        while view:
            done = os.pwrite(self._fd, view, offset)
            view, offset = view[done:], offset + done
