"""Puts the directory of a shard into an image at once: from the image before, or by the columns of its record."""

from __future__ import annotations

from collections.abc import Mapping

import xxhash

from wdsfs import __version__
from wdsfs.dataset.indexing import indexed
from wdsfs.dataset.shard_tree import ShardTree
from wdsfs.dataset.tree import LowerTree
from wdsfs.image import layout, parts
from wdsfs.image.content_places import DeviceFile
from wdsfs.image.image_file import ImageFile
from wdsfs.image.parts import Wanted
from wdsfs.image.shard_table import table_of
from wdsfs.inodes import FOLDER, POSITION, position, unpack

_SHARD_TOP = position(FOLDER, 0)


class WholeShards:
    """The shards of `tree`, `devices` by their paths, and the number of one that is `missing`.

    `settings` is a text that differs for every other way to show a set, or to write what is shown.
    """

    def __init__(
        self,
        tree: LowerTree,
        image: ImageFile,
        devices: Mapping[bytes, DeviceFile],
        missing: int | None,
        settings: str,
    ) -> None:
        below = tree if isinstance(tree, ShardTree) else getattr(tree, "tree", None)
        self._tree = below if isinstance(below, ShardTree) and not below.merged else None
        self._image, self._devices, self._missing = image, devices, missing
        modes = () if self._tree is None else (self._tree.directory_mode, self._tree.file_mode)
        self._settings = repr((__version__, parts.FORMAT, layout.FORMAT, settings, tree.view, modes))

    def put(self, inode: int, parent: int) -> int | Wanted | None:
        """Put a directory into the image, if it is that of a shard; `parent` is the inode number of the one above.

        Returns its inode number in the image. If the walk has to ask for each name, by what the part is known that
        it makes, if it is one; else None. Raises ShardErrors.
        """
        if self._tree is None or inode & POSITION != _SHARD_TOP:
            return None
        number = unpack(inode)[1]
        device = self._devices[self._tree.lower.shards[number].path]
        wanted = indexed(self._wanted, number, device, parent)
        taken = None if wanted is None else self._image.take(wanted)
        if taken is not None:
            return taken
        table = indexed(table_of, self._tree, number, device.number, device.size, parent)
        if table is None:
            return wanted
        self._image.begin_part()
        nids = self._image.append(table)
        self._image.end_part(wanted)
        return int(nids[0])

    def _wanted(self, number: int, device: DeviceFile, parent: int) -> Wanted | None:
        """By what the part of a shard is known; None if its content lies in other shards, too."""
        assert self._tree is not None
        record = self._tree.lower.record(number)
        if record.view is not None:
            return None
        # Nothing of the identity of the file: the same shards give the same image on any machine.
        own = (record.digest(), record.fingerprint.mtime_ns, device.size, parent)
        text = f"{self._settings}{own!r}"
        digest = xxhash.xxh3_128_digest(text.encode(errors="surrogateescape"))
        return Wanted(digest, (device.number,), self._missing)
