"""Puts a tree into an image, shard by shard.

What is shown of a shard goes into tables (`shard_table.py`); directories that have names of several shards, or of
several tables, stay open until all are known (`open_directories.py`). In memory are the tables of one shard, and
what is in open directories.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from wdsfs.inodes import ROOT
from wdsfs.kernel import erofs
from wdsfs.kernel.content_places import ContentPlaces
from wdsfs.kernel.image_file import ImageFile
from wdsfs.kernel.links_by_number import LinksByNumber
from wdsfs.kernel.open_directories import OpenDirectories
from wdsfs.kernel.shard_table import ShardFiles, ShardTables, is_one_table
from wdsfs.kernel.table import Outside, directory_in
from wdsfs.tree.indexing import indexed
from wdsfs.tree.merged_columns import SharedFolder, merged_columns_of
from wdsfs.tree.merged_paths import TOP
from wdsfs.tree.merged_tree import MergedTree
from wdsfs.tree.numbered_tree import NumberedTree
from wdsfs.tree.shard_tree import ShardTree
from wdsfs.tree.shown_columns import ShownColumns, columns_of
from wdsfs.tree.texts import Ints
from wdsfs.tree.tree import LowerTree


def put_tree(tree: LowerTree, image: ImageFile, places: ContentPlaces, on_shard: Callable[[], None]) -> int:
    """Put a tree into an image; returns the inode number of its top. `on_shard` is called after each shard.

    Raises ImageError, ShardErrors, OSError.
    """
    below = tree.tree if isinstance(tree, NumberedTree) else tree
    assert isinstance(below, ShardTree)
    directories = OpenDirectories(image)
    root = directories.reserve(TOP)
    directories.describe(root, indexed(tree.getattr, ROOT), root)
    shards = _Shards(below, image, places, directories)
    links = LinksByNumber(tree, image, directories, root) if isinstance(tree, NumberedTree) else None
    for number in shards.numbers():
        shown = shards.put(number)
        if links is not None:
            links.add(number, shown)
        on_shard()
    if links is not None:
        links.finish()
    directories.write()
    return root


class _Shards:
    """Puts the shards of `tree` into `image`."""

    def __init__(
        self, tree: ShardTree, image: ImageFile, places: ContentPlaces, directories: OpenDirectories
    ) -> None:
        self._tree, self._image, self._places, self._directories = tree, image, places, directories
        self._root = directories.reserve(TOP)

    def numbers(self) -> Iterable[int]:
        """The shards that are shown."""
        tree = self._tree
        return indexed(lambda: tree.numbers()) if isinstance(tree, MergedTree) else tree.lower.numbers

    def put(self, number: int) -> ShownColumns:
        """Put what is shown of a shard into the image; returns its columns."""
        shown, top = self._put_names(number)
        if not self._tree.merged:
            self._directories.add(directory_in(self._root, top, self._tree.lower.shards[number].name))
        return shown

    def _put_names(self, number: int) -> tuple[ShownColumns, int]:
        """Put what is shown of a shard into the image; returns its columns, and the inode number of its top."""
        tree = self._tree
        shown, shared = self.columns(number)
        files = ShardFiles(
            shown,
            indexed(tree.lower.content_columns, number),
            lambda member: indexed(tree.lower.content, number, tree.lower.tag(number), member),
            self._places,
        )
        # Folders of this shard alone that lie outside of its tables.
        own = None if is_one_table(files) else OpenDirectories(self._image)
        outside, names = self._folders(shown, shared, own)
        tables = ShardTables(shown, files, (tree.directory_mode, tree.file_mode), self._root, outside)
        nids = np.concatenate([*map(self._image.append, tables), np.zeros(0, np.int64)])
        names = Outside.joined([names, tables.names_outside(nids)])
        if own is not None:
            is_own = np.isin(names.holders, own.nids)
            own.add(names.take(is_own))
            own.write()
            names = names.take(~is_own)
        self._directories.add(names)
        return shown, int(nids[0] if outside[0] < 0 else outside[0])

    def columns(self, number: int) -> tuple[ShownColumns, Sequence[SharedFolder | None]]:
        """What is shown of a shard, and which of its folders are shared with other shards."""
        tree = self._tree
        if isinstance(tree, MergedTree):
            return indexed(merged_columns_of, tree, number)
        shown = indexed(columns_of, tree, number)
        return shown, [None] * len(shown.folders)

    def _folders(
        self, shown: ShownColumns, shared: Sequence[SharedFolder | None], own: OpenDirectories | None
    ) -> tuple[Ints, Outside]:
        """The inode numbers of the folders that lie outside of the tables, -1 for the others; and the names of
        those that no shard before had. With `own` all lie outside: those that are not shared are opened there."""
        outside, new = np.full(len(shown.folders), -1, np.int64), []
        for folder, one in enumerate(shared):
            directories = own if one is None else self._directories
            if directories is None:
                continue
            nid = outside[folder] = directories.reserve(folder if one is None else one.place)
            if (one is None or one.appears) and not directories.is_described(nid):
                holder = int(shown.folder_holder[folder])
                directories.describe(
                    nid, shown.folders[folder], self._root if holder < 0 else int(outside[holder])
                )
                new.append(folder)
        below = np.array([folder for folder in new if folder], np.int64)
        kinds = np.full(len(below), erofs.DIRECTORY, np.int64)
        return outside, Outside(
            outside[shown.folder_holder[below]], outside[below], kinds, shown.names.take(below - 1)
        )
