"""The file of an image while it is written: parts one behind the other, inodes of directories in advance."""

from __future__ import annotations

import numpy as np

from wdsfs.dataset.texts import Ints
from wdsfs.errors import ImageError
from wdsfs.image import erofs
from wdsfs.image.earlier import EarlierImage, Taking
from wdsfs.image.erofs_columns import Times
from wdsfs.image.layout import lay_out, lay_out_directories
from wdsfs.image.parts import Part, Wanted, checksum_of, map_of
from wdsfs.image.table import Table
from wdsfs.owner import Owner
from wdsfs.storage.durable import write_at

_RESERVED = erofs.BLOCK // erofs.EXTENDED_SIZE  # inodes in a block of those that are written later


class _Begun:
    """A part that is being written: what is known of it, and what was reserved before."""

    def __init__(self, first: int, reserved: list[int]) -> None:
        self.first, self.reserved = first, reserved
        self.nids: list[Ints] = []


class ImageFile:
    """Writes to the descriptor `fd`; `devices` is how many there are. The top of a `private` image, which is the
    first inode that is reserved, can be entered by its owner alone. Parts are taken from an `earlier` image,
    `taken_over` of them."""

    def __init__(
        self,
        fd: int,
        devices: int,
        times: Times,
        owner: Owner,
        private: bool = False,
        earlier: EarlierImage | None = None,
    ) -> None:
        self._fd, self._times, self._owner, self._private = fd, times, owner, private
        self.metadata = erofs.metadata_block(devices)
        self.blocks = self.metadata + 1  # an empty block: no inode has the number 0
        self.inodes = self.taken_over = 0
        self._reserved: list[int] = []
        self._begun: _Begun | None = None
        self._parts: list[Part] = []
        self._earlier = earlier
        self._taking = None if earlier is None else Taking(earlier, fd, self.metadata)

    def reserve(self) -> int:
        """The number of an inode that is written later."""
        if not self._reserved:
            first = self._nid_at(self.blocks)
            step = erofs.EXTENDED_SIZE // erofs.SLOT
            self._reserved = [first + step * nth for nth in reversed(range(_RESERVED))]
            self._grow(1)
        return self._reserved.pop()

    def take(self, wanted: Wanted) -> int | None:
        """Take a part over from the earlier image, if that has it; returns the inode number of its top.

        Raises ImageError, OSError.
        """
        if self._earlier is None or self._taking is None:
            return None
        first = self.blocks
        found = self._earlier.part(wanted, first)
        numbers = None if found is None else wanted.numbers_for(found)
        if found is None or numbers is None:
            return None
        self._taking.take(found, first, numbers)
        self._grow(found.end - found.first)
        self.inodes += found.inodes
        self.taken_over += 1
        return self._nid_at(first)

    def begin_part(self) -> int:
        """Begin a part: what is written until `end_part` is all of it.

        Returns the number that its top has to have, that of the first inode.
        """
        self._begun = _Begun(self.blocks, self._reserved)
        self._reserved = []
        return self._nid_at(self.blocks)

    def end_part(self, wanted: Wanted | None, with_missing: bool = False) -> None:
        """End the part that was begun. Without `wanted` no later image can take it.

        `with_missing`: it points to what is missing. Raises ImageError, OSError.
        """
        begun, self._begun = self._begun, None
        assert begun is not None
        self._reserved = begun.reserved
        if wanted is None:
            return
        nids, blocks = np.concatenate(begun.nids), self.blocks - begun.first
        data = map_of(nids - self._nid_at(begun.first), blocks)
        write_at(self._fd, data.data, self.blocks * erofs.BLOCK)
        self._grow(len(data) // erofs.BLOCK)
        missing = wanted.missing or 0 if with_missing else 0
        made = Part(wanted.key, begun.first, blocks, len(nids), missing, wanted.devices, 0)
        self._parts.append(made._replace(checksum=checksum_of(self._fd, made) or 0))

    def finish(self) -> list[Part]:
        """Write what is not written yet; returns all parts in their order. Raises ImageError, OSError."""
        if self._taking is not None:
            self._taking.flush()
            self._parts += self._taking.taken
        return sorted(self._parts, key=lambda one: one.first)

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
        self._count(part.nids)
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
        self._count(nids)

    def _count(self, nids: Ints) -> None:
        self.inodes += len(nids)
        if self._begun is not None:
            self._begun.nids.append(nids)

    def _masked(self, table: Table) -> Table:
        table.mode = table.mode & ~self._owner.umask
        return table
