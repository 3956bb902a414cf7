"""One tree over all shards of a set: `--merge`.

A directory of this tree is the sum of the folders with its path in all shards. Its inode number is that of the
folder in the first shard that has it. A table of the set (`path_table.py`) lists the shards with each path. So
nothing is kept in memory, and a lookup opens only a few records.

Semantics decision: a folder keeps its name, because it is one folder in all shards. Of several samples or files
with the same path the one of the first shard keeps the name, and the others are `NAME~SHARD`, with the name of
their shard. A sample whose path is a folder in other shards only is `NAME~SHARD`, too; in a shard that has both,
sample and folder share the directory, as without `--merge`.

Semantics decision: while a shard cannot be read, its names are unknown. Names of other shards can be opened, but a
listing would silently show a smaller set, and a name that does not exist elsewhere may be in that shard. Both are
errors, unless the view may be partial.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from wdsfs import inodes, names
from wdsfs.errors import (
    IndexUnusable,
    MissingShard,
    NoSuchEntry,
    NotADirectory,
    ShardError,
    StaleShard,
    UnreadableShard,
)
from wdsfs.index.record import BY_EXTENSION, BY_NAME, FILES, IS_TWIN, TWIN, Record
from wdsfs.inodes import FOLDER, MEMBER, ROOT, SAMPLE, index_of, kind_of, position
from wdsfs.names import NAME_MAX, text_of
from wdsfs.shards import GONE, Fingerprint
from wdsfs.tree.indexing import NotIndexed
from wdsfs.tree.path_table import Keys, PathTable, ShownPaths, key_below, keys_below, new_top
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.shard_tree import ShardTree
from wdsfs.tree.shown_names import NameColumns, ShownNames, names_of
from wdsfs.tree.texts import Texts
from wdsfs.tree.tree import AT_PARENT, Entry, ListingRun, LowerTree, Node, View, own_entries

LOOK_SECONDS = 5.0  # how often a name that does not exist causes a check of all shards
PLACES_MAX = 1000  # directories whose path is cached
TABLES = tuple(b"m%d" % domain for domain in (BY_EXTENSION, BY_NAME, FILES))  # their kinds in the index
_TAG_SHIFT, _TAG_MAX = 53, (1 << 9) - 1  # bit 62 is that of the cursors of an overlay
_SUFFIX_MAX = 100  # bytes of the name of a shard at the end of a name
_ENDS_WITH_PLACE = re.compile(rb"%[0-9a-f]{8}\Z")


class MergedPlace(NamedTuple):
    """A directory of the merged tree: its path, empty for the top, and the key of the path in the table."""

    path: bytes
    key: int

    def below(self, name: bytes) -> MergedPlace:
        """Return the place of a child."""
        path = self.path + b"/" + name if self.path else name
        return MergedPlace(path, key_below(name, self.key))


class MergedChild(NamedTuple):
    """A child in a shard: the shard's number and the position in its record."""

    shard: int
    where: int


class MergedTree(ShardTree):
    """All shards as one tree. Raises the errors of `ShardTree`."""

    merged = True

    def __init__(self, lower: ShardSet, view: View) -> None:
        super().__init__(lower, view)
        self.lost: list[int] = []  # shards that cannot be read: their names are missing
        self._suffixes = {shard_suffix(lower.shards[number].name): number for number in lower.numbers}
        self._generation, self._tag = -1, 0
        self._key, self._table, self._snapshot = b"", PathTable.parse(memoryview(PathTable.build(0, []))), -1
        self._last_look, self._seen_alarms = 0.0, 0
        self._places: OrderedDict[int, MergedPlace] = OrderedDict()

    # --- the table of the set

    def prepare(self) -> None:
        self._load()

    def _load(self) -> None:
        """Make or find the table of the current set. Raises NotIndexed while a shard is not indexed.

        Every public method calls this first: it may invalidate the records in use.
        """
        if self._generation == self.lower.generation:
            return
        self.lost[:] = [number for number in self.lower.numbers if self._is_lost(number)]
        self._key = self.lower.keep_table(TABLES[self.domain], self._build_table)
        self._snapshot = -1
        self._generation = self.lower.generation
        self._places.clear()
        self._tag = (self.lower.version() & _TAG_MAX) << _TAG_SHIFT

    def _is_lost(self, number: int) -> bool:
        """Return True if a shard cannot be read."""
        try:
            self.lower.record(number)
        except MissingShard:  # a followed set is about to take it out: its names are gone
            return not self.lower.generations.followed
        except ShardError:
            return True
        return False

    def _build_table(self) -> tuple[list[Fingerprint], bytes]:
        top, parts, fingerprints = new_top(), [], []
        for number in range(len(self.lower)):
            record = None if number in self.lower.out else self._record_or_none(number)
            fingerprints.append(GONE if record is None else record.fingerprint)
            if record is not None:
                parts.append((number, _paths_of(record, self.names, top)))
        return fingerprints, PathTable.build(top, parts)

    def _record_or_none(self, number: int) -> Record | None:
        try:
            return self.lower.record(number)
        except ShardError:  # the set of shards logs the error; the other shards are shown
            return None

    @property
    def table(self) -> PathTable:
        """The loaded table, valid until the index is renewed. Raises NotIndexed if a new table is needed."""
        if self._snapshot != self.lower.index.snapshot:
            try:
                table = PathTable.parse(self.lower.index.table(self._key))
            except IndexUnusable:  # a mount that has grown since has dropped it
                self._generation = -1
                raise NotIndexed(self.lower, next(self.lower.numbers)) from None
            if table.top != self._table.top:  # another process has made the table again: places have other keys
                self._places.clear()
            self._table, self._snapshot = table, self.lower.index.snapshot
        return self._table

    def _check_all(self) -> bool:
        """Check all shards, since any of them may have a new name; return True if a shard has changed.

        The check runs every few seconds only, and after an alarm.
        """
        alarms = self.lower.generations.alarms
        if time.monotonic() - self._last_look < LOOK_SECONDS and alarms == self._seen_alarms:
            return False
        self._seen_alarms = alarms
        self.lower.look_at_all()
        self._last_look = time.monotonic()
        return self._generation != self.lower.generation

    def _refuse_partial(self) -> None:
        """Raise UnreadableShard if names are missing, unless the view may be partial; NotIndexed as `_load`."""
        while self.lost and not self.view.partial:
            try:
                for number in self.lost:
                    self.lower.record(number)
            except ShardError as error:
                text = "until it can be read, names in the merged tree are missing"
                raise UnreadableShard(f"{error}; {text}") from None
            self._generation = -1  # all shards can be read again
            self._load()

    def numbers(self) -> Sequence[int]:
        self._load()
        self._refuse_partial()
        lost = frozenset(self.lost)
        return [number for number in self.lower.numbers if number not in lost]

    # --- names

    def name_of(self, place: MergedPlace, number: int, record: Record, where: int) -> bytes | None:
        """Return the name in a directory of the child that the directory's folder in this shard has at a position.

        None if the child is shown elsewhere: a sample that shares the directory of a folder, or a file of a sample
        that does not.
        """
        shown, table = self.names.shown(record, where), self.table
        if kind_of(where) == FOLDER:
            return shown
        if kind_of(where) == MEMBER and not self.files_layout and table.first(place.key) != number:
            return None
        key = key_below(shown, place.key)
        is_first = table.first(key) == number
        if is_first and kind_of(where) == SAMPLE and record.entry_flags[index_of(where)] & TWIN:
            return None
        if is_first and not table.has_folder(key) and self._split_suffix(shown) is None:
            return shown
        return merged_name(shown, shard_suffix(self.lower.shards[number].name), where, self._is_folder(place.key))

    def _split_suffix(self, name: bytes) -> tuple[int, bytes] | None:
        """Return the number of the shard that a name ends with, and the name without it; else None.

        Semantics decision: a plain name with such an ending also gets the name of its shard as a suffix. So each
        name with a suffix belongs to one shard, and no name has two meanings.
        """
        stem, tilde, end = name.rpartition(b"~")
        number = self._suffixes.get(tilde + end) if stem else None
        return None if number is None else (number, stem)

    def _is_folder(self, directory: int) -> Callable[[bytes], bool]:
        """Return a function that returns True for the name of a folder in this directory."""
        table = self.table
        return lambda name: table.has_folder(key_below(name, directory))

    def _find(self, place: MergedPlace, name: bytes) -> MergedChild | None:
        """Return the child of a directory that is shown under this name."""
        below = place.below(name)
        folder = self._first_folder(below)
        if folder is not None:
            return folder
        number, stem = self._split_suffix(name) or (self.table.first(below.key), name)
        record = None if number is None else self._record_or_none(number)
        holder = None if record is None else self._folder_at(record, place.path)
        if number is None or record is None or holder is None:
            return None
        for where in self._positions_named(record, holder, stem):
            if self.name_of(place, number, record, where) == name:
                return MergedChild(number, where)
        return None

    def _positions_named(self, record: Record, folder: int, stem: bytes) -> Iterator[int]:
        """Yield the positions in a folder of a shard whose merged name may be this one, without its suffix."""
        where = self.names.find(record, position(FOLDER, folder), stem)
        if where is not None:
            yield where
        if where is not None and kind_of(where) == FOLDER and not self.files_layout:
            twin = record.twin_sample(index_of(where))
            if twin is not None:
                yield position(SAMPLE, twin)
        if _ENDS_WITH_PLACE.search(stem):
            where = int(stem[-8:], 16)
            count = {SAMPLE: record.entries, MEMBER: record.members}.get(kind_of(where), 0)
            if index_of(where) < count and self.names.holder(record, where) == position(FOLDER, folder):
                yield where

    # --- folders

    def _folder_at(self, record: Record, path: bytes) -> int | None:
        """Return the folder of a shard that is shown at this path."""
        folder: int | None = 0
        if path and record.aliases[self.domain] is None:
            folder = record.find_path(path)
        elif path:
            for name in path.split(b"/"):
                where = self.names.find(record, position(FOLDER, folder or 0), name)
                if where is None or kind_of(where) != FOLDER:
                    return None
                folder = index_of(where)
        return folder if folder is None or not path or self.names.is_shown(record, folder) else None

    def _folders_at(self, place: MergedPlace, first: int = 0) -> Iterator[tuple[int, Record, int]]:
        """Yield the folders of a directory, in the order of their shards, from the shard `first` on."""
        shards = self.table.with_folder(place.key) if place.path else self.lower.numbers
        for number in shards:
            record = None if number < first else self._record_or_none(number)
            folder = None if record is None else self._folder_at(record, place.path)
            if record is not None and folder is not None:
                yield number, record, folder

    def _first_folder(self, place: MergedPlace) -> MergedChild | None:
        """Return the folder of the first shard that has one at this place."""
        for number, _, folder in self._folders_at(place):
            return MergedChild(number, position(FOLDER, folder))
        return None

    def _place_of(self, record: Record, folder: int) -> MergedPlace:
        """Return the place of a folder of a shard."""
        place = MergedPlace(b"", self.table.top)
        for name in reversed([*_names_to_top(record, folder, self.names)]):
            place = place.below(name)
        return place

    def _place(self, inode: int) -> MergedPlace:
        """Return the place of a directory. The last places are cached."""
        top = self.table.top  # of the present table, before cached places are used
        if inode == ROOT:
            return MergedPlace(b"", top)
        _, record, where = self._open(inode)
        place = self._places.get(inode)
        if place is None:
            place = self._places[inode] = self._place_of(record, index_of(where))
            if len(self._places) > PLACES_MAX:
                self._places.popitem(last=False)
        return place

    def _inode_at(self, place: MergedPlace) -> int:
        """Return the inode of the directory at a place."""
        first = self._first_folder(place) if place.path else None
        return ROOT if first is None else self._node_of(first).inode

    # --- the tree

    def lookup(self, parent: int, name: bytes) -> Node:
        self._load()
        if parent != ROOT and kind_of(parent) == MEMBER:
            raise NotADirectory(f"{text_of(name)!r}: its parent is a file")
        if parent != ROOT and kind_of(parent) == SAMPLE:
            return super().lookup(parent, name)
        place = self._place(parent)
        child = self._find(place, name)
        if child is not None:
            return self._node_of(child)
        if self._check_all():
            return self.lookup(parent, name)
        self._refuse_partial()
        where = f"in the directory {text_of(place.path)!r}" if place.path else "at the top"
        raise NoSuchEntry(f"no {text_of(name)!r} {where} of the merged tree")

    def _node_of(self, child: MergedChild) -> Node:
        node = self._node(child.shard, self.lower.record(child.shard), child.where)
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
        return self._inode_at(self._place_of(record, folder))

    def places(self, inode: int) -> list[tuple[int, bytes]]:
        self._load()
        number, record, where = self._open(inode)
        return [self._place_in(number, record, at) for at in self.names.positions_of(record, where)]

    def _place_in(self, number: int, record: Record, where: int) -> tuple[int, bytes]:
        shown, holder = self.names.shown(record, where), self.names.holder(record, where)
        if kind_of(holder) == FOLDER:
            place = self._place_of(record, index_of(holder))
            name = self.name_of(place, number, record, where)
            if name is not None or kind_of(where) == SAMPLE:
                return self._inode_at(place), name or shown
            holder = position(SAMPLE, record.entry_of(index_of(where)))
        return inodes.pack(self.lower.tag(number), number, holder), shown

    def listing(self, inode: int, after: int = 0) -> Iterator[Entry]:
        """Yield as `Tree.listing`; a listing never continues in another version of the set.

        A cursor has the set's version (9 bits), the shard's number plus one (21 bits), and the position in the
        record.
        """
        if self.lower.generations.alarms != self._seen_alarms:  # a worker of the new set would refuse old cursors
            self._check_all()
        self._load()
        if inode != ROOT and kind_of(inode) != FOLDER:
            yield from super().listing(inode, after)
            return
        self._refuse_partial()
        if after > AT_PARENT and not self._is_of_this_set(after):
            path = text_of(self._place(inode).path)
            raise StaleShard(f"a shard has changed while {path!r} of the merged tree was listed")
        yield from own_entries(self, inode, after)
        after &= (1 << _TAG_SHIFT) - 1
        shard, place = (after >> 32) - 1, self._place(inode)
        for number, record, folder in self._folders_at(place, shard):
            yield from self._list_shard(place, number, record, folder, after if number == shard else 0)

    def _list_shard(
        self, place: MergedPlace, number: int, record: Record, folder: int, after: int
    ) -> Iterator[Entry]:
        base = self._tag | (number + 1) << 32
        leads = self.table.leads(number)
        for where in self.names.children(record, position(FOLDER, folder), after & inodes.POSITION, twins=True):
            name = None
            if kind_of(where) != FOLDER:
                name = self.name_of(place, number, record, where)
            elif leads:
                shown = self.names.shown(record, where)
                name = shown if self._first_folder(place.below(shown)) == (number, where) else None
            if name is not None:
                yield Entry(name, self._node_of(MergedChild(number, where)), base | where)

    def _is_of_this_set(self, cursor: int) -> bool:
        """Return True if a listing may continue at this cursor."""
        if cursor >> _TAG_SHIFT == self._tag >> _TAG_SHIFT:
            return True
        # Another process may have begun the listing, and may know a change that this process has not noticed.
        self.lower.distrust()
        self.lower.look_at_all()
        self._load()
        return cursor >> _TAG_SHIFT == self._tag >> _TAG_SHIFT

    def run(self, inode: int, after: int, most: int) -> ListingRun | None:
        return None

    # --- all names of a shard

    def name_columns(self, number: int) -> NameColumns:
        self._load()
        record, table = self.lower.record(number), self.table
        named = names_of(record, self.names)
        folders = _keys_of_folders(named, table.top)
        apart = [
            twin
            for folder, key in zip(named.folders, folders.tolist(), strict=True)
            if not self.files_layout
            and (twin := record.twin_sample(folder)) is not None
            and table.first(key) != number
        ]
        if apart:
            named = names_of(record, self.names, sorted(apart))
        return self._with_suffixes(number, named, folders)._replace(shared=_shared(named, table, folders))

    def _with_suffixes(self, number: int, named: NameColumns, folders: Keys) -> NameColumns:
        """Return the columns of a shard with the names that have a suffix in the merged tree."""
        table, suffix = self.table, shard_suffix(self.lower.shards[number].name)
        rows, holder = named.rows_in_folders()
        texts, directories = named.names.take(rows).to_list(), folders[holder]
        keys = keys_below(texts, directories)
        keeps = table.are_first(keys, number) & (table.count_folders(keys) == 0)
        keeps &= np.fromiter((self._split_suffix(text) is None for text in texts), bool, len(texts))
        changed = np.flatnonzero(~keeps)
        rows, directories = rows[changed], directories[changed]
        # Most of these names are free with their suffix; the others are checked one by one.
        merged = [texts[row] + suffix for row in changed.tolist()]
        taken = (table.count_folders(keys_below(merged, directories)) > 0).tolist()
        for at, row in enumerate(changed.tolist()):
            if taken[at] or needs_place(texts[row], suffix):
                where, is_folder = named.position_of(int(rows[at])), self._is_folder(int(directories[at]))
                merged[at] = merged_name(texts[row], suffix, where, is_folder)
        return named._replace(names=named.names.replaced(rows, Texts.of(merged)))


def shard_suffix(shard: bytes) -> bytes:
    """Return the suffix for names of this shard that an earlier shard also has. Each shard has a different suffix.

    Semantics decision: a tilde in the name of a shard is written as `%7E` there, and a percent sign as `%25`.
    """
    return b"~" + names.shorten(shard.replace(b"%", b"%25").replace(b"~", b"%7E"), _SUFFIX_MAX)


def merged_name(name: bytes, suffix: bytes, where: int, is_folder: Callable[[bytes], bool]) -> bytes:
    """Return the name, with the suffix of its shard, of a sample or file whose plain name is taken.

    `where` is its position in the record; `is_folder` returns True for the name of a folder in the same directory.

    Semantics decision: a result that is too long for a file system, or is the name of a folder, ends with the
    position in the record (`%` and 8 hexadecimal digits), and is cut if necessary. A plain name with such an
    ending gets the position, too.
    """
    if not needs_place(name, suffix) and not is_folder(name + suffix):
        return name + suffix
    place = b"%%%08x" % where
    while True:
        name = names.shorten(name, NAME_MAX - len(place + suffix)) + place
        if not is_folder(name + suffix):
            return name + suffix


def needs_place(name: bytes, suffix: bytes) -> bool:
    """Return True if a name with this suffix would be too long, or looks as if it ended with a position."""
    return len(name) + len(suffix) > NAME_MAX or _ENDS_WITH_PLACE.search(name) is not None


def _names_to_top(record: Record, folder: int, shown: ShownNames) -> Iterator[bytes]:
    """Yield the shown names of a folder and of its parents, without the top."""
    while folder:
        yield shown.shown(record, position(FOLDER, folder))
        folder = record.folder_parent[folder]


def _keys_of_folders(named: NameColumns, top: int) -> Keys:
    """Return the keys of the paths of the folders of these names, that of the top first."""
    keys = [top]
    for holder, name in zip(named.folder_holder[1:].tolist(), named.folder_names(), strict=True):
        keys.append(key_below(name, keys[holder]))
    return np.array(keys, np.uint64)


def _paths_of(record: Record, shown: ShownNames, top: int) -> ShownPaths:
    """Return the keys of the paths that a shard shows; samples in the directories of folders have theirs."""
    named = names_of(record, shown)
    folders = _keys_of_folders(named, top)
    rows, holder = named.rows_in_folders()
    others = keys_below(named.names.take(rows).to_list(), folders[holder])
    if not shown.files_layout:
        twins = (record.array("folder.flags")[named.folders] & IS_TWIN) != 0
        others = np.concatenate([others, folders[twins]])
    return ShownPaths(folders[1:], others)


def _shared(named: NameColumns, table: PathTable, keys: Keys) -> list[bytes | None]:
    """Return the paths of the folders whose directories may have names of other shards."""
    shared = table.count_folders(keys) > 1
    shared[0] = True
    paths = [b""]
    for holder, name in zip(named.folder_holder[1:].tolist(), named.folder_names(), strict=True):
        paths.append(paths[holder] + b"/" + name if paths[holder] else name)
    for folder in range(len(keys) - 1, 0, -1):  # children come after their parents
        if shared[folder]:
            shared[named.folder_holder[folder]] = True
    return [path if is_shared else None for path, is_shared in zip(paths, shared.tolist(), strict=True)]


def make_tree(lower: ShardSet, view: View) -> LowerTree:
    """Return the tree that a mount with these options shows."""
    return MergedTree(lower, view) if view.merged else ShardTree(lower, view)
