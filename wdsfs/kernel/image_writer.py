"""Writes a tree into an image, shard by shard, with the directories that several shards share.

The tables of a shard (`shard_table.py`) are written one behind the other. A directory with names of several
shards, or of several tables, stays open until all its names are known; its inode is reserved before, for its
children name it. In memory are the tables of one shard, and the names of open directories.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import numpy as np

from wdsfs.errors import ImageError
from wdsfs.inodes import ROOT
from wdsfs.kernel import erofs
from wdsfs.kernel.layout import Outside, Stored, Table, Times, lay_out, lay_out_directories, placed
from wdsfs.kernel.shard_table import ContentPlaces, ShardFiles, ShardTables, is_one_table
from wdsfs.owner import Owner
from wdsfs.storage.durable import write_at
from wdsfs.tree.numbered_tree import LINK_MODE, LINK_NAME, NAME, PER_DIRECTORY, NumberedTree
from wdsfs.tree.shard_set import indexed
from wdsfs.tree.shard_tree import ShardTree
from wdsfs.tree.shown_names import ShownColumns
from wdsfs.tree.texts import Ints, Texts
from wdsfs.tree.tree import AT_PARENT, Entry, LowerTree, Node

_RESERVED = erofs.BLOCK // erofs.EXTENDED_SIZE  # inodes in a block of those that are written later
_STEP = erofs.EXTENDED_SIZE // erofs.SLOT  # between the numbers of these
_NAMES = 1 << 16  # of directories that are laid out together, unless one has more
_LINKS = 1 << 16  # in a table
TOP = b""  # the path of the top, among those of directories with names of several shards


class ImageFile:
    """Writes to the descriptor `fd` an image over `devices` shards. The top of a `private` image, which is the
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
            first = (self.blocks - self.metadata) * erofs.SLOTS_PER_BLOCK
            self._reserved = [first + _STEP * nth for nth in reversed(range(_RESERVED))]
            self._grow(1)
        return self._reserved.pop()

    def _grow(self, blocks: int) -> None:
        self.blocks += blocks
        if self.blocks > erofs.BLOCKS_MAX:
            raise ImageError("the image would have more than 2 TiB; make several images")

    def append(self, table: Table) -> Ints:
        """Write a table; returns the inode numbers of its objects. Raises ImageError, OSError."""
        table.mode &= ~self._owner.umask
        data, nids = lay_out(table, self.blocks, self.metadata, self._times, self._owner[:2])
        write_at(self._fd, data.data, self.blocks * erofs.BLOCK)
        self._grow(len(data) // erofs.BLOCK)
        self.inodes += len(nids)
        return nids

    def write_directories(self, nids: Ints, table: Table) -> None:
        """Write the directories that are the objects of `table`, whose inodes were reserved. Raises ImageError,
        OSError."""
        table.mode &= ~self._owner.umask
        if self._private:
            table.mode = np.where(nids == erofs.SLOTS_PER_BLOCK, table.mode & ~0o077, table.mode)
        inodes, listings = lay_out_directories(table, nids, self.blocks, self._owner[:2])
        # Those that were reserved one after the other lie side by side.
        ends = np.append(np.flatnonzero(np.diff(nids) != _STEP) + 1, len(nids))
        first = 0
        for end in ends.tolist():
            place = self.metadata * erofs.BLOCK + int(nids[first]) * erofs.SLOT
            write_at(self._fd, inodes[first:end].reshape(-1).view(np.uint8).data, place)
            first = end
        write_at(self._fd, listings.data, self.blocks * erofs.BLOCK)
        self._grow(len(listings) // erofs.BLOCK)
        self.inodes += len(nids)


class OpenDirectories:
    """Directories of `image` that are not written yet, by any keys."""

    def __init__(self, image: ImageFile) -> None:
        self._image = image
        self._nids: dict[object, int] = {}
        self._described: dict[int, tuple[Node, int]] = {}  # by inode number; with that of its directory
        self._parts = [Outside.directories([], [], [])]

    @property
    def nids(self) -> list[int]:
        """The inode numbers of all."""
        return [*self._nids.values()]

    def reserve(self, key: object) -> int:
        """The inode number of a directory."""
        nid = self._nids.get(key)
        if nid is None:
            nid = self._nids[key] = self._image.reserve()
        return nid

    def is_described(self, nid: int) -> bool:
        """True if the attributes of a directory are known."""
        return nid in self._described

    def describe(self, nid: int, node: Node, parent: int) -> None:
        """Set the attributes of a directory, and the one that it is in."""
        self._described[nid] = node, parent

    def add(self, names: Outside) -> None:
        """Add names to directories."""
        if len(names.nids):
            self._parts.append(names._replace(names=names.names.compact()))

    def write(self) -> None:
        """Write all that were described, and forget their names. Raises ImageError, OSError."""
        nids = np.array(sorted(self._described), np.int64)
        names = Outside.joined(self._parts)
        self._parts = self._parts[:1]
        order = np.argsort(names.holders, kind="stable")
        ends = np.searchsorted(names.holders[order], nids, "right")
        first = row = 0
        while first < len(nids):
            last = max(first + 1, int(np.searchsorted(ends, row + _NAMES, "right")))
            rows, row = order[row : ends[last - 1]], int(ends[last - 1])
            self._write(nids[first:last], names.take(rows))
            first = last
        self._described.clear()

    def _write(self, nids: Ints, names: Outside) -> None:
        described = [self._described[nid] for nid in nids.tolist()]
        nothing = np.zeros(len(nids), np.int64)
        table = Table(
            mode=np.array([node.mode for node, _ in described], np.int64),
            links=np.array([node.links for node, _ in described], np.int64),
            size=nothing,
            mtime_ns=np.array([node.mtime_ns for node, _ in described], np.int64),
            device=nothing,
            block=nothing,
            parent=np.array([placed(parent) for _, parent in described], np.int64),
            holder=np.searchsorted(nids, names.holders),
            child=placed(names.nids),
            kind=names.kinds.astype(np.int64),
            names=names.names.compact(),
        )
        self._image.write_directories(nids, table)


# --- shards


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
        return indexed(self._tree.numbers)

    def put(self, number: int) -> ShownColumns:
        """Put what is shown of a shard into the image; returns its columns."""
        tree = self._tree
        shown = indexed(tree.columns, number)
        files = ShardFiles(
            shown,
            indexed(tree.lower.content_columns, number),
            lambda member: indexed(tree.lower.content, number, tree.lower.tag(number), member),
            self._places,
        )
        # Folders of this shard alone that lie outside of its tables.
        own = None if is_one_table(files) else OpenDirectories(self._image)
        outside, names = self._folders(shown, own)
        tables = ShardTables(shown, files, (tree.directory_mode, tree.file_mode), self._root, outside)
        nids = np.concatenate([*map(self._image.append, tables), np.zeros(0, np.int64)])
        names = Outside.joined([names, tables.names_outside(nids)])
        if own is not None:
            is_own = np.isin(names.holders, own.nids)
            own.add(names.take(is_own))
            own.write()
            names = names.take(~is_own)
        self._directories.add(names)
        if not tree.merged:
            top = int(nids[0] if outside[0] < 0 else outside[0])
            self._directories.add(Outside.directories([self._root], [top], [tree.lower.shards[number].name]))
        return shown

    def _folders(self, shown: ShownColumns, own: OpenDirectories | None) -> tuple[Ints, Outside]:
        """The inode numbers of the folders that lie outside of the tables, -1 for the others; and the names of
        those that no shard before had. With `own` all lie outside: those that are not shared are opened there."""
        outside, new = np.full(len(shown.folders), -1, np.int64), []
        for folder, path in enumerate(shown.shared):
            directories = own if path is None else self._directories
            if directories is None:
                continue
            nid = outside[folder] = directories.reserve(folder if path is None else path)
            if not directories.is_described(nid):
                holder = int(shown.folder_holder[folder])
                parent = self._root if holder < 0 else int(outside[holder])
                directories.describe(nid, shown.folders[folder], parent)
                new.append(folder)
        below = np.array([folder for folder in new if folder], np.int64)
        kinds = np.full(len(below), erofs.DIRECTORY, np.int64)
        return outside, Outside(
            outside[shown.folder_holder[below]], outside[below], kinds, shown.names.take(below - 1)
        )


# --- links by number


class LinksByNumber:
    """The links of `--index-tree` on their way into `image`, whose top has the inode number `root`.

    They are taken shard by shard, and written when directories of them are complete.
    """

    def __init__(self, tree: NumberedTree, image: ImageFile, directories: OpenDirectories, root: int) -> None:
        self._tree, self._image, self._directories = tree, image, directories
        self._waiting = self._listed(root)  # directories of links that are not written
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
        self._directories.add(Outside.directories([parent], [nid], [entry.name]))
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
        """Write up to `count` directories of links; returns how many there were."""
        directories = list(islice(self._waiting, count))
        stop = (self._done + count) * PER_DIRECTORY
        end = int(np.searchsorted(self._numbers, stop))
        if directories:
            table = self._table(
                directories, self._numbers[:end], self._times[:end], self._targets.take(slice(end))
            )
            nids = self._image.append(table)
            inodes = nids[np.flatnonzero(table.mode != LINK_MODE)].tolist()
            parents, entries = zip(*directories, strict=True)
            self._directories.add(Outside.directories(parents, inodes, [entry.name for entry in entries]))
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
            values = np.empty(len(order), np.int64)
            values[:count], values[count:] = of_directories, of_links
            return values[order]

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
