"""The links of `--index-tree` in an image: taken shard by shard, written when directories of them are complete."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from wdsfs.kernel import erofs
from wdsfs.kernel.image_file import ImageFile
from wdsfs.kernel.open_directories import OpenDirectories
from wdsfs.kernel.table import Outside, Stored, Table, directory_in, placed
from wdsfs.tree.indexing import indexed
from wdsfs.tree.numbered_tree import LINK_MODE, LINK_NAME, NAME, PER_DIRECTORY, NumberedTree
from wdsfs.tree.shown_columns import ShownColumns
from wdsfs.tree.texts import Ints, Texts
from wdsfs.tree.tree import AT_PARENT, Entry

_LINKS = 1 << 16  # in a table


class LinksByNumber:
    """The links of `tree` on their way into `image`, whose top has the inode number `root`."""

    def __init__(self, tree: NumberedTree, image: ImageFile, directories: OpenDirectories, root: int) -> None:
        self._tree, self._image, self._directories = tree, image, directories
        self._list = self._listed(root)  # directories of links that are not written
        self._done = 0  # and how many are
        self._numbers, self._times, self._targets = np.zeros(0, np.int64), np.zeros(0, np.int64), Texts.of([])

    def _listed(self, root: int) -> Iterator[tuple[int, Entry]]:
        """The directories of links, each with the inode number of the one that it is in."""
        top = indexed(self._tree.links_top)
        if top is None:
            return
        above = self._open(root, Entry(NAME, top, 0))
        for million in self._children(top.inode):
            nid = self._open(above, million)
            yield from ((nid, entry) for entry in self._children(million.node.inode))

    def _children(self, inode: int) -> list[Entry]:
        return indexed(lambda: list(self._tree.listing(inode, AT_PARENT)))

    def _open(self, parent: int, entry: Entry) -> int:
        nid = self._directories.reserve(entry.node.inode)
        self._directories.describe(nid, entry.node, parent)
        self._directories.add(directory_in(parent, nid, entry.name))
        return nid

    def add(self, shard: int, shown: ShownColumns) -> None:
        """Add the links to the samples of a shard, of which the tree shows this. Raises ImageError, ShardErrors,
        OSError."""
        numbers, mtime_ns, targets = indexed(self._tree.links_in, shard, shown)
        self._numbers = np.append(self._numbers, np.arange(numbers.start, numbers.stop))
        self._times = np.append(self._times, np.full(len(numbers), mtime_ns))
        self._targets = Texts.joined([self._targets, targets])
        if len(self._numbers) > _LINKS:
            self._write(numbers.stop // PER_DIRECTORY - self._done)

    def finish(self) -> None:
        """Write what is left. Raises ImageError, ShardErrors, OSError."""
        while self._write(_LINKS // PER_DIRECTORY):
            pass

    def _write(self, count: int) -> int:
        """Write so many directories of links, or as many as there are; returns how many."""
        directories = list(islice(self._list, count))
        stop = (self._done + count) * PER_DIRECTORY
        end = int(np.searchsorted(self._numbers, stop))
        if directories:
            table = self._table(
                directories, self._numbers[:end], self._times[:end], self._targets.take(slice(end))
            )
            nids = self._image.append(table)
            inodes = nids[np.flatnonzero(table.mode != LINK_MODE)]
            parents, entries = zip(*directories, strict=True)
            self._directories.add(
                Outside(
                    np.array(parents, np.int64),
                    inodes,
                    np.full(len(inodes), erofs.DIRECTORY, np.int64),
                    Texts.of([one.name for one in entries]),
                )
            )
        self._done += len(directories)
        self._numbers, self._times = self._numbers[end:], self._times[end:]
        self._targets = self._targets.take(slice(end, None)).compact()
        return len(directories)

    def _table(self, directories: list[tuple[int, Entry]], numbers: Ints, times: Ints, targets: Texts) -> Table:
        nodes, count = [entry.node for _, entry in directories], len(directories)
        holder = numbers // PER_DIRECTORY - self._done
        order = np.argsort(np.concatenate([np.arange(count), holder]), kind="stable")
        own = np.empty(len(order), np.int64)  # the object of each directory, then of each link
        own[order] = np.arange(len(order))

        def column(of_directories: list[int], of_links: Ints | int) -> Ints:
            found = np.empty(len(order), np.int64)
            found[:count], found[count:] = of_directories, of_links
            return found[order]

        return Table(
            mode=column([node.mode for node in nodes], LINK_MODE),
            links=column([node.links for node in nodes], 1),
            size=column([0] * count, targets.lengths),
            mtime_ns=column([node.mtime_ns for node in nodes], times),
            device=np.zeros(len(order), np.int64),
            block=np.zeros(len(order), np.int64),
            parent=np.array([placed(parent) for parent, _ in directories], np.int64),
            holder=own[holder],
            child=own[count:],
            kind=np.full(len(numbers), erofs.SYMLINK, np.int64),
            names=Texts.of([LINK_NAME % number for number in numbers.tolist()]),
            stored=Stored(own[count:], targets),
        )
