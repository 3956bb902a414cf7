"""By what the parts of shards are known: digests of all that their bytes depend on but their places.

What is missing here would be silent corruption, for a part of an earlier image with the same key is taken over
unseen. What is too much only costs the parts of other images. Nothing of where or when an image is made is in a
key, since it is stored in the image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import xxhash

from wdsfs import __version__
from wdsfs.dataset.content_columns import APART
from wdsfs.dataset.shard_tree import ShardTree
from wdsfs.image import erofs, parts
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
            (__version__, erofs.LAYOUT, parts.FORMAT, settings, tree.view, tree.directory_mode, tree.file_mode)
        )

    def of_shard(self, number: int, parent: int) -> Wanted | None:
        """For a shard whose directory is in the directory with the inode number `parent`, all of it by itself.

        In a merged tree the numbers of all directories in which it has names would belong to the key, and which
        names of it are shown. None for a shard whose part is not to be taken over. Raises what `ShardSet.content`
        raises.
        """
        record = self._lower.record(number)
        paths, contents = self._contents(number)
        devices = [self._devices[one] for one in paths if one in self._devices]
        if contents is None or len(devices) < len(paths):
            return None
        own = (record.digest(), record.fingerprint.mtime_ns, [one.size for one in devices], contents, parent)
        digest = xxhash.xxh3_128_digest(f"{self._settings}{own!r}".encode(errors="surrogateescape"))
        return Wanted(digest, tuple(one.number for one in devices), self._missing)

    def _contents(self, number: int) -> tuple[Sequence[bytes], tuple[object, ...] | None]:
        """The shards that the content of one lies in, and what their places depend on besides the record.

        In a view the record says only which members of which shards they are; None for what is in pieces there.
        """
        if self._lower.record(number).view is None:
            return [self._lower.shards[number].path], ()
        columns = self._lower.content_columns(number)
        if bool((columns.file == APART).any()):
            return columns.paths, None
        return columns.paths, tuple(xxhash.xxh3_128_digest(one.data) for one in (columns.file, columns.start))
