"""By what the parts of shards are known: digests of all that their bytes depend on but their places.

What is missing here would be silent corruption, for a part of an earlier image with the same key is taken over
unseen. What is too much only costs the parts of other images. Nothing of where or when an image is made is in a
key, since it is stored in the image.
"""

from __future__ import annotations

from collections.abc import Mapping

import xxhash

from wdsfs import __version__
from wdsfs.dataset.shard_tree import ShardTree
from wdsfs.image import layout, parts
from wdsfs.image.content_places import DeviceFile
from wdsfs.image.parts import Wanted


class PartKeys:
    """For the shards of `tree`, with `devices` by their paths, and the number of one that is `missing`.

    `settings` is a text that differs for every other way to show a set, or to write what is shown.
    """

    def __init__(
        self, tree: ShardTree, devices: Mapping[bytes, DeviceFile], missing: int | None, settings: str
    ) -> None:
        self._lower, self._devices, self._missing = tree.lower, devices, missing
        self._settings = repr(
            (__version__, layout.FORMAT, parts.FORMAT, settings, tree.view, tree.directory_mode, tree.file_mode)
        )

    def of_shard(self, number: int, parent: int) -> Wanted | None:
        """For a shard whose directory is in the directory with the inode number `parent`, all of it by itself.

        In a merged tree the numbers of all directories in which it has names would belong to the key, and which
        names of it are shown. None for a shard of a view: its content lies in others, too. Raises what
        `ShardSet.record` raises.
        """
        record = self._lower.record(number)
        if record.view is not None:
            return None
        device = self._devices[self._lower.shards[number].path]
        own = (record.digest(), record.fingerprint.mtime_ns, device.size, parent)
        text = f"{self._settings}{own!r}"
        digest = xxhash.xxh3_128_digest(text.encode(errors="surrogateescape"))
        return Wanted(digest, (device.number,), self._missing)
