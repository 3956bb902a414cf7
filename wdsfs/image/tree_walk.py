"""Goes through a tree and puts all of it into an image, in tables that are laid out when they have grown large.

A directory without directories in it goes into the table with its files. One with directories (or very many files)
gets its inode at once, for its children name it; its names are collected and written when all children are placed.
Only these are in memory, besides the table: of each directory on the way to where the walk is, some 25 bytes a
name.
"""

from __future__ import annotations

import itertools
import stat
from array import array
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from wdsfs.dataset.indexing import indexed
from wdsfs.dataset.tree import AT_PARENT, Entry, LowerTree, Node
from wdsfs.image import erofs
from wdsfs.image.content_places import NOWHERE, ContentPlaces, Place
from wdsfs.image.image_file import ImageFile
from wdsfs.image.parts import Wanted
from wdsfs.image.table import Special, Stored, Table, placed, resolved
from wdsfs.inodes import ROOT

BATCH = 1024  # entries of a directory that are listed at a time
OBJECTS_MAX, STORED_MAX = 1 << 16, 16 << 20  # in a table before it is laid out: objects, bytes of stored content

_KINDS = {stat.S_IFDIR: erofs.DIRECTORY, stat.S_IFREG: erofs.REGULAR, stat.S_IFLNK: erofs.SYMLINK}


class _Names:
    """The names of one or many directories: for each its kind, a reference, and its directory."""

    def __init__(self) -> None:
        self.text = bytearray(b"..")
        self.lengths, self.children, self.holders = array("q"), array("q"), array("q")
        self.kinds = bytearray()

    def add(self, name: bytes, node: Node, child: int, holder: int = 0) -> None:
        self.text += name
        self.lengths.append(len(name))
        self.children.append(child)
        self.holders.append(holder)
        self.kinds.append(_KINDS[stat.S_IFMT(node.mode)])


class _Directory:
    """A directory that is being listed: its names, and how far the listing has come."""

    def __init__(self, node: Node, nid: int, parent: int, batch: list[Entry]) -> None:
        self.node, self.nid, self.parent = node, nid, parent
        self.names = _Names()
        self.settled = 0  # so many of its references are placed
        self.take(batch)

    def take(self, batch: list[Entry]) -> None:
        self.ahead = iter(batch)
        self.cursor = batch[-1].cursor if batch else AT_PARENT
        self.more = len(batch) == BATCH

    def settle(self, nids: NDArray[np.int64]) -> None:
        """Replace references to objects of the table by their places."""
        children = self.names.children
        found = np.array(children[self.settled :], np.int64)
        self.names.children = children[: self.settled] + array("q", (~resolved(found, nids)).tolist())
        self.settled = len(children)


class TreeWalk:
    """Puts `tree` into `image`.

    `whole` puts a directory and all below it into the image at once, and returns its inode number there; its other
    argument is that of the directory above. Or it returns by what a part is known that is to be made here, name by
    name, or None. `on_directory` is called after each directory of the top.
    """

    def __init__(
        self,
        tree: LowerTree,
        image: ImageFile,
        places: ContentPlaces,
        whole: Callable[[int, int], int | Wanted | None] | None,
        on_directory: Callable[[], None],
    ) -> None:
        self._tree, self._image, self._places, self._whole = tree, image, places, whole
        self._on_directory = on_directory
        self._open: list[_Directory] = []
        self._linked: dict[int, int] = {}  # of files with several names: references
        self._part: tuple[Wanted, int] | None = None  # which is being made, and how many directories are above it
        self._start()

    def _start(self) -> None:
        self._nodes: list[tuple[int, int, int, int, int, int]] = []
        self._special: dict[int, Special] = {}
        self._parents: list[int] = []
        self._names = _Names()
        self._stored = 0
        self._closing: list[_Directory] = []  # complete, but some of their children are not placed yet
        self._waiting = 0  # names in these

    def run(self, root: int) -> None:
        """Put the whole tree into the image; `root` is the inode number of its top there."""
        batch = self._list(ROOT, AT_PARENT)
        self._open.append(_Directory(indexed(self._tree.getattr, ROOT), root, root, batch))
        while self._open:
            self._go_on(self._open[-1])
        self._flush()

    def _go_on(self, at: _Directory) -> None:
        """The next entry of a directory, or its end."""
        entry = next(at.ahead, None)
        if entry is None and at.more:
            at.take(self._list(at.node.inode, at.cursor))
        elif entry is None:
            self._closing.append(self._open.pop())
            self._waiting += len(at.names.children)
            self._flush_if_full()
            self._end_part()
            if len(self._open) == 1:
                self._on_directory()
        elif stat.S_ISDIR(entry.node.mode):
            self._directory(at, entry)
        else:
            at.names.add(entry.name, entry.node, self._file(entry.node))
            self._flush_if_full()

    def _directory(self, at: _Directory, entry: Entry) -> None:
        whole = None if self._whole is None else self._whole(entry.node.inode, at.nid)
        if isinstance(whole, int):
            at.names.add(entry.name, entry.node, placed(whole))
            if len(self._open) == 1:
                self._on_directory()
            return
        top = None if whole is None else self._begin_part(whole)
        batch = self._list(entry.node.inode, AT_PARENT)
        if len(batch) == BATCH or any(stat.S_ISDIR(one.node.mode) for one in batch):
            nid = self._image.reserve()
            assert top in (None, nid)
            at.names.add(entry.name, entry.node, placed(nid))
            self._open.append(_Directory(entry.node, nid, at.nid, batch))
            return
        own = self._object(entry.node, 0, 0)
        at.names.add(entry.name, entry.node, own)
        self._parents.append(placed(at.nid))
        for one in batch:
            self._names.add(one.name, one.node, self._file(one.node), own)
        self._flush_if_full()
        self._end_part()

    def _list(self, inode: int, after: int) -> list[Entry]:
        return indexed(lambda: list(itertools.islice(self._tree.listing(inode, after), BATCH)))

    def _object(self, node: Node, device: int, block: int) -> int:
        size = 0 if stat.S_ISDIR(node.mode) else node.size
        self._nodes.append((node.mode, node.links, size, node.mtime_ns, device, block))
        return len(self._nodes) - 1

    def _file(self, node: Node) -> int:
        """A reference to a file or symbolic link."""
        if node.links > 1 and node.inode in self._linked:
            return self._linked[node.inode]
        found: Place | Special
        if stat.S_ISLNK(node.mode):
            found = Stored(indexed(self._tree.readlink, node.inode))
        else:
            found = self._places.of(indexed(self._tree.content, node.inode)) if node.size else NOWHERE
        if isinstance(found, Place):
            own = self._object(node, *found)
        else:
            own = self._object(node, 0, 0)
            self._special[own] = found
            self._stored += (
                len(found.data) if isinstance(found, Stored) else found.block.nbytes + len(found.stored)
            )
        if node.links > 1:
            self._linked[node.inode] = own
        return own

    # --- parts

    def _begin_part(self, wanted: Wanted) -> int:
        """Have a part begin with the next directory, whose number this returns. All before lies in front of it."""
        self._flush()
        self._part = wanted, len(self._open)
        self._places.was_read = self._places.was_missing = False
        return self._image.begin_part()

    def _end_part(self) -> None:
        """End the part whose top has just been closed, if it was that of one."""
        if self._part is None or self._part[1] != len(self._open):
            return
        (wanted, _), self._part = self._part, None
        self._flush()
        self._linked.clear()  # no file has names in two parts
        # What was read may be other bytes at another time, of a shard with the same names, sizes and times.
        self._image.end_part(None if self._places.was_read else wanted, self._places.was_missing)

    # --- tables that are full

    def _flush_if_full(self) -> None:
        if len(self._nodes) + self._waiting > OBJECTS_MAX or self._stored > STORED_MAX:
            self._flush()

    def _flush(self) -> None:
        """Lay out the table, and the directories that wait for it."""
        if self._nodes:
            columns = np.array(self._nodes, np.int64).T
            nids = self._image.append(_table(columns, self._parents, self._names, self._special))
            for one in (*self._open, *self._closing):
                one.settle(nids)
            for inode, own in self._linked.items():
                self._linked[inode] = own if own < 0 else placed(int(nids[own]))
        for one in self._closing:
            self._image.write_directory(one.nid, _alone(one))
        self._start()


def _alone(at: _Directory) -> Table:
    """The table of one directory whose children are all placed."""
    node = at.node
    columns = np.array([[node.mode], [node.links], [0], [node.mtime_ns], [0], [0]], np.int64)
    return _table(columns, [placed(at.parent)], at.names, {})


def _table(columns: NDArray[np.int64], parents: list[int], names: _Names, special: dict[int, Special]) -> Table:
    mode, links, size, mtime_ns, device, block = columns
    lengths = np.array(names.lengths, np.int64)
    return Table(
        mode=mode,
        links=links,
        size=size,
        mtime_ns=mtime_ns,
        device=device,
        block=block,
        parent=np.array(parents, np.int64),
        holder=np.array(names.holders, np.int64),
        child=np.array(names.children, np.int64),
        kind=np.frombuffer(bytes(names.kinds), np.uint8).astype(np.int64),
        start=np.cumsum(lengths) - lengths + 2,
        length=lengths,
        text=np.frombuffer(bytes(names.text), np.uint8),
        special=special,
    )
