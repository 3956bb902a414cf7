"""Puts the directory of a shard into an image at once: from the image before, or by the columns of its record."""

from __future__ import annotations

from collections.abc import Mapping

from wdsfs.dataset.indexing import indexed
from wdsfs.dataset.shard_tree import ShardTree
from wdsfs.image.content_places import DeviceFile
from wdsfs.image.image_file import ImageFile
from wdsfs.image.part_keys import PartKeys
from wdsfs.image.parts import Wanted
from wdsfs.image.shard_table import table_of
from wdsfs.inodes import FOLDER, POSITION, position, unpack

_SHARD_TOP = position(FOLDER, 0)


class WholeShards:
    """The shards of `tree`, which is not merged; `devices` by their paths."""

    def __init__(
        self, tree: ShardTree, image: ImageFile, devices: Mapping[bytes, DeviceFile], keys: PartKeys
    ) -> None:
        self._tree, self._image, self._devices, self._keys = tree, image, devices, keys

    def put(self, inode: int, parent: int) -> int | Wanted | None:
        """Put a directory into the image, if it is that of a shard; `parent` is the inode number of the one above.

        Returns its inode number in the image. If the walk has to ask for each name, by what the part is known that
        it makes, if it is one; else None. Raises ShardErrors.
        """
        if inode & POSITION != _SHARD_TOP:
            return None
        number = unpack(inode)[1]
        wanted = indexed(self._keys.of_shard, number, parent)
        taken = None if wanted is None else self._image.take(wanted)
        if taken is not None:
            return taken
        device = self._devices[self._tree.lower.shards[number].path]
        table = indexed(table_of, self._tree, number, device.number, device.size, parent)
        if table is None:
            return wanted
        top = self._image.begin_part()
        nids = self._image.append(table)
        assert nids[0] == top
        self._image.end_part(wanted)
        return top
