"""One tree over all shards of a set: `--merge`.

A directory of this tree is the sum of the folders with its path in all shards. Its inode number is that of the
folder in the first shard that has it. Which shards have a path is looked up in `merged_paths.py`, which shard
gets a name in `merged_rivals.py`.

Semantics decision: while a shard cannot be read, its names are unknown. Names of other shards can be opened, but a
listing would silently be a smaller set, and a name that is not found may be in that shard: both are errors, unless
the view may be partial.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator

from wdsfs import inodes
from wdsfs.errors import NoSuchEntry, NotADirectory, ShardError, StaleShard, UnreadableShard
from wdsfs.index.record import Record
from wdsfs.inodes import FOLDER, MEMBER, ROOT, SAMPLE, index_of, kind_of, position
from wdsfs.tree.merged_paths import TOP, MergedChild, MergedPaths, place_of
from wdsfs.tree.merged_rivals import MergedDirectory, MergedNames
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.shard_tree import ShardTree
from wdsfs.tree.tree import AT_PARENT, AT_SELF, CLASSES_LAYOUT, Entry, ListingRun, LowerTree, Node, View, text_of

LOOK_SECONDS = 5.0  # how often a name that is not found causes a look at all shards
_TAG_SHIFT, _TAG_MAX = 53, (1 << 9) - 1  # bit 62 is that of the cursors of an overlay
DIRECTORIES_MAX = 1000  # directories whose path and twin are cached


class MergedTree(ShardTree):
    """All shards as one tree. Raises what `ShardTree` raises."""

    merged = True

    def __init__(self, lower: ShardSet, view: View) -> None:
        super().__init__(lower, view)
        self.paths = MergedPaths(lower, self.names)
        self._entries = MergedNames(self.paths)
        self._tag = 0
        self._looked, self._heard = 0.0, 0
        self._directories: OrderedDict[int, MergedDirectory] = OrderedDict()

    def prepare(self) -> None:
        self._load()

    def _load(self) -> None:
        """Be up to date with the set. Raises NotIndexed while a shard is not indexed.

        Every public method calls this first: it may invalidate the records in use.
        """
        if self.paths.load():
            self._directories.clear()
            self._entries.reset()
            self._tag = (self.lower.version() & _TAG_MAX) << _TAG_SHIFT

    def _look_around(self) -> bool:
        """Look at all shards, as any of them may have a new name; returns True if one has changed.

        Only every few seconds, or after an alarm.
        """
        alarms = self.lower.generations.alarms
        if time.monotonic() - self._looked < LOOK_SECONDS and alarms == self._heard:
            return False
        self._heard = alarms
        self.lower.look_at_all()
        self._looked = time.monotonic()
        return not self.paths.is_current

    def _refuse_partial(self) -> None:
        """Raise UnreadableShard if names of the tree are missing and the view may not be partial. NotIndexed as
        `_load`."""
        while self.paths.lost and not self.view.partial:
            try:
                for number in self.paths.lost:
                    self.lower.record(number)
            except ShardError as error:
                text = "until it can be read, names in the merged tree are missing"
                raise UnreadableShard(f"{error}; {text}") from None
            self.paths.invalidate()  # all shards can be read again
            self._load()

    def numbers(self) -> list[int]:
        """The shards that have names in the tree. Raises as a listing does."""
        self._load()
        self._refuse_partial()
        lost = frozenset(self.paths.lost)
        return [number for number in self.lower.numbers if number not in lost]

    # --- the tree

    def lookup(self, parent: int, name: bytes) -> Node:
        self._load()
        if parent != ROOT and kind_of(parent) == MEMBER:
            raise NotADirectory(f"{text_of(name)!r}: its parent is a file")
        if parent != ROOT and kind_of(parent) == SAMPLE:
            return super().lookup(parent, name)
        at = self._directory(parent)
        child = self._entries.find(at, name)
        if child is not None:
            return self._node_of(child)
        if self._look_around():
            return self.lookup(parent, name)
        self._refuse_partial()
        where = f"in the directory {text_of(at.place.path)!r}" if at.place.path else "at the top"
        raise NoSuchEntry(f"no {text_of(name)!r} {where} of the merged tree")

    def _directory(self, inode: int) -> MergedDirectory:
        """The path and the twin of a directory. Those that were asked for last are cached."""
        if inode == ROOT:
            return MergedDirectory(TOP, None)
        _, record, where = self._open(inode)
        found = self._directories.get(inode)
        if found is None:
            place = place_of(record, index_of(where))
            found = self._directories[inode] = MergedDirectory(place, self._entries.twin(place))
            if len(self._directories) > DIRECTORIES_MAX:
                self._directories.popitem(last=False)
        return found

    def _node_of(self, child: MergedChild) -> Node:
        record = self.lower.record(child.shard)
        if kind_of(child.where) == SAMPLE:
            return self._node(child.shard, record, child.where)
        node = self._node(child.shard, record, child.where)
        # One link: the subdirectories over all shards are not counted.
        return node._replace(links=1) if kind_of(child.where) == FOLDER else node

    def getattr(self, inode: int) -> Node:
        self._load()
        if inode == ROOT:
            return Node(ROOT, self.directory_mode, 1, 0, self._root_mtime)
        _, number, where = inodes.unpack(inode)
        self._open(inode)
        return self._node_of(MergedChild(number, where))

    def parent(self, inode: int) -> int:
        self._load()
        if inode == ROOT:
            return ROOT
        _, record, where = self._open(inode)
        index = index_of(where)
        folder = record.folder_parent[index] if kind_of(where) == FOLDER else record.folder_of(index)
        first = self.paths.first_folder(place_of(record, folder)) if folder else None
        return ROOT if first is None else self._node_of(first).inode

    def _parent_node(self, number: int, record: Record, where: int) -> Node:
        return self.getattr(self.parent(inodes.pack(self.lower.tag(number), number, where)))

    def places(self, inode: int) -> list[tuple[int, bytes]]:
        self._load()
        number, record, where = self._open(inode)
        return [self.place_in(number, record, one) for one in self.names.positions_of(record, where)]

    def place_in(self, number: int, record: Record, where: int) -> tuple[int, bytes]:
        """The place of one position of a shard: the inode of the directory, and the name in it."""
        shown = self.names.shown(record, where)
        if kind_of(where) == MEMBER and not self.files_layout:
            sample = position(SAMPLE, record.entry_of(index_of(where)))
            folder = self._folder_of_twin(number, record, sample)
            if folder is None:
                return inodes.pack(self.lower.tag(number), number, sample), shown
            place = place_of(self.lower.record(folder.shard), index_of(folder.where))
        else:
            place = place_of(record, index_of(self.names.holder(record, where)))
        first = None if place.top else self.paths.first_folder(place)
        name = None
        if kind_of(where) != FOLDER:
            name = self._entries.name_of(
                MergedDirectory(place, self._entries.twin(place)), shown, MergedChild(number, where)
            )
        return ROOT if first is None else self._node_of(first).inode, name or shown

    def _folder_of_twin(self, number: int, record: Record, sample: int) -> MergedChild | None:
        """The folder, of any shard, whose directory this sample shares."""
        parent = place_of(record, record.folder_of(index_of(sample)))
        folder = self._entries.folder_named(parent, self.names.shown(record, sample))
        if folder is None:
            return None
        place = place_of(self.lower.record(folder.shard), index_of(folder.where))
        return folder if self._entries.twin(place) == MergedChild(number, sample) else None

    def listing(self, inode: int, after: int = 0) -> Iterator[Entry]:
        """As `Tree.listing`. A cursor has the version of the set (9 bits), the shard's number plus one (21 bits),
        and the position in its record: a listing never continues in another version of the set.
        """
        if self.lower.generations.alarms != self._heard:  # a worker with the new set would refuse the cursors
            self._look_around()
        self._load()
        if inode != ROOT and kind_of(inode) != FOLDER:
            yield from super().listing(inode, after)
            return
        self._refuse_partial()
        if after > AT_PARENT and not self._is_of_this_set(after):
            path = text_of(self._directory(inode).place.path)
            raise StaleShard(f"a shard has changed while {path!r} of the merged tree was listed")
        if after < AT_SELF:
            yield Entry(b".", self.getattr(inode), AT_SELF)
        if after < AT_PARENT:
            yield Entry(b"..", self.getattr(self.parent(inode)), AT_PARENT)
        at = self._directory(inode)
        after &= (1 << _TAG_SHIFT) - 1
        shard, where = (after >> 32) - 1, after & 0xFFFFFFFF
        if shard < 0:
            yield from self._list_twin(at, where if kind_of(where) == MEMBER else 0)
            where = 0
        for number, record, folder in self.paths.folders_at(at.place, shard):
            yield from self._list_shard(at, number, record, folder, where if number == shard else 0)

    def _is_of_this_set(self, cursor: int) -> bool:
        """True if a listing may continue at this cursor."""
        if cursor >> _TAG_SHIFT == self._tag >> _TAG_SHIFT:
            return True
        # The process that began the listing may have noticed a change that this one has not.
        self.lower.distrust()
        self.lower.look_at_all()
        self._load()
        return cursor >> _TAG_SHIFT == self._tag >> _TAG_SHIFT

    def run(self, inode: int, after: int, most: int) -> ListingRun | None:
        return None

    def _list_twin(self, at: MergedDirectory, after: int) -> Iterator[Entry]:
        if at.twin is None:
            return
        number, sample = at.twin
        record = self.lower.record(number)
        for where in self.names.children(record, sample, after):
            child, shown = MergedChild(number, where), self.names.shown(record, where)
            yield Entry(self._entries.name_of(at, shown, child) or shown, self._node_of(child), self._tag | where)

    def _list_shard(
        self, at: MergedDirectory, number: int, record: Record, folder: int, after: int
    ) -> Iterator[Entry]:
        base = self._tag | (number + 1) << 32
        leads = self.paths.leads(number)
        for where in self.names.raw_children(record, folder, after):
            child, shown = MergedChild(number, where), self.names.shown(record, where)
            if kind_of(where) == FOLDER:
                if leads and self.paths.first_folder(place_of(record, index_of(where))) == child:
                    yield Entry(shown, self._node_of(child), base | where)
            else:
                name = self._entries.name_of(at, shown, child)
                if name is not None:
                    yield Entry(name, self._node(number, record, where), base | where)


def make_tree(lower: ShardSet, view: View, merge: bool) -> LowerTree:
    """The tree that a mount with these options shows."""
    return MergedTree(lower, view) if is_merged(view, merge) else ShardTree(lower, view)


def is_merged(view: View, merge: bool) -> bool:
    """True if these options show one tree over all shards, as the class layout does: any shard may have samples
    of a class."""
    return merge or view.layout == CLASSES_LAYOUT
