"""One tree over all shards of a set: `--merge`.

A directory of this tree is the sum of the folders with its path in all shards. Nothing is kept in memory: the
union (`index.Union`) tells which shards may have a path, and those are asked. Its inode number is that of the
folder in the first shard that has it.

Semantics decision: when several shards want one name, the first shard's gets it, later ones are shown as
`name~2`, `name~3` and so on; a folder always keeps its name, being one folder in all shards. A sample whose
key is also a folder shares the directory with it, also when they come from different shards.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from wdsfs import inodes, names
from wdsfs.errors import NoSuchEntry, NotADirectory, ShardError, StaleShard
from wdsfs.inodes import FOLDER, MEMBER, ROOT, SAMPLE, index_of, kind_of, position
from wdsfs.lower import Lower
from wdsfs.record import STRAY, Record, equal_range
from wdsfs.tree import AT_PARENT, AT_SELF, CLASSES_LAYOUT, Entry, Node, Run, Tree, View, home_of, text_of

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0  # how often a name that is not there makes all shards be looked at
_TAG_SHIFT, _TAG_MAX = 53, (1 << 9) - 1  # bit 62 is that of the cursors of an overlay
KNOWN_MAX = 100_000  # names that are worked out and kept


class Place(NamedTuple):
    """A directory of the merged tree: its plain path, and whether it is the top (a folder may be called ``)."""

    path: bytes
    top: bool

    def below(self, name: bytes) -> bytes:
        return name if self.top else self.path + b"/" + name


class Child(NamedTuple):
    """Something in a shard: the shard's number and the position in its record."""

    shard: int
    where: int


_TOP = Place(b"", True)


class MergedTree(Tree):
    """All shards as one tree. Raises what `Tree` raises."""

    merged = True

    def __init__(self, lower: Lower, view: View) -> None:
        super().__init__(lower, view)
        self._generation = -1
        self._tag = 0
        self._looked, self._heard = 0.0, 0
        self._known: dict[tuple[Place, Child | None, bytes, int], list[tuple[Child, bytes]]] = {}
        self._known_size = 0

    def prepare(self) -> None:
        self._load()

    def _load(self) -> None:
        """Make or find the union for what the shards are now. Raises NotIndexed while one is not indexed.

        To be called first by every public method: it lets go of the records that are in use.
        """
        if self._generation != self.lower.generation:
            for number in range(len(self.lower)):
                self._record_or_none(number)
            self.union = self.lower.union(self._record_or_none)
            self._generation = self.lower.generation
            self._tag = (self.lower.version() & _TAG_MAX) << _TAG_SHIFT

    def _look_around(self) -> bool:
        """Whether a look at all shards finds one changed: a new name may be in any of them.

        Only every few seconds, or when a change was heard of.
        """
        alarms = self.lower.alarms
        if time.monotonic() - self._looked < LOOK_SECONDS and alarms == self._heard:
            return False
        self._heard = alarms
        self.lower.look_at_all()
        self._looked = time.monotonic()
        return self._generation != self.lower.generation

    def _record_or_none(self, number: int) -> Record | None:
        try:
            return self.lower.record(number)
        except ShardError:  # reported by the lower; the others are shown
            return None

    # --- which shards have a path

    def _shards(self, kind: int, crc: int) -> list[int]:
        """Numbers of the shards that may have a folder (kind 0) or something else (1) with this checksum."""
        sums, owners = self.union.columns()[kind]
        return sorted({owners[at] for at in equal_range(sums, crc)})

    def _count(self, kind: int, crc: int) -> int:
        return len(equal_range(self.union.columns()[kind][0], crc))

    def _folders_at(self, place: Place) -> Iterator[tuple[int, Record, int]]:
        """The folders of all shards that make up a directory, in the order of the shards."""
        shards = range(len(self.lower)) if place.top else self._shards(0, zlib.crc32(place.path))
        for number in shards:
            record = self._record_or_none(number)
            folder = None if record is None else 0 if place.top else record.find_path(place.path)
            if record is not None and folder is not None and (place.top or self._is_shown(record, folder)):
                yield number, record, folder

    def _first_folder(self, place: Place) -> Child | None:
        for number, _, folder in self._folders_at(place):
            return Child(number, position(FOLDER, folder))
        return None

    def _place(self, record: Record, folder: int) -> Place:
        return Place(record.folder_path(folder), folder == 0)

    # --- who wants a name

    def _own(self, record: Record, folder: int, name: bytes) -> Iterator[int]:
        """The samples (or files, in the files layout) that one shard shows under this name in this folder."""
        aliases = record.aliases[self.domain]
        crc = record.crc_below(folder, name)
        if aliases is not None:
            child = aliases.find(crc, position(FOLDER, folder), name)
            if child is not None:
                yield from self._claimants(record, child)
        if self.files_layout:
            plain = self._find_file(record, folder, name, crc)
        else:
            entries = record.find_entries(folder, name, crc)
            plain = (position(SAMPLE, entry) for entry in entries if not record.entry_flags[entry] & STRAY)
        for child in plain:
            if aliases is None or aliases.of(home_of(record, child)) is None:
                yield child

    def _claimants(self, record: Record, child: int) -> Iterator[int]:
        """The sample (or file) that is shown under the name of this child: itself, or a folder's twin."""
        twin = None
        if kind_of(child) == FOLDER and not self.files_layout:
            twin = record.twin_sample(index_of(child))
        if twin is not None:
            yield position(SAMPLE, twin)
        elif kind_of(child) == (MEMBER if self.files_layout else SAMPLE):
            yield child

    def _wanting(self, place: Place, name: bytes) -> Iterator[Child]:
        """The samples (or files) of all shards that want this name in this directory, in order."""
        shards = set(self._shards(1, zlib.crc32(place.below(name))))
        if self.files_layout and b"." in name:
            shards.update(self._shards(1, zlib.crc32(place.below(name.partition(b".")[0]))))
        for number in sorted(shards):
            record = self._record_or_none(number)
            folder = None if record is None else 0 if place.top else record.find_path(place.path)
            if record is not None and folder is not None:
                for child in self._own(record, folder, name):
                    yield Child(number, child)

    def _folder_named(self, place: Place, name: bytes) -> Child | None:
        """The folder shown under this name. Its plain name follows from the shown one."""
        for plain in {name, names.unescape(name)}:
            child = self._first_folder(Place(place.below(plain), False))
            if child is not None and self._shown(self.lower.record(child.shard), child.where) == name:
                return child
        aliased = self._shards(0, zlib.crc32(place.below(name)))  # a name that was cut is found by itself
        for number in aliased:
            record = self._record_or_none(number)
            folder = None if record is None else 0 if place.top else record.find_path(place.path)
            table = None if record is None else record.aliases[self.domain]
            if record is not None and folder is not None and table is not None:
                where = table.find(record.crc_below(folder, name), position(FOLDER, folder), name)
                if where is not None and kind_of(where) == FOLDER:
                    return self._first_folder(self._place(record, index_of(where)))
        return None

    def _twin(self, place: Place) -> Child | None:
        """The sample that shares a directory with the folder at `place`: the first of that key."""
        if place.top or self.files_layout:
            return None
        first = self._first_folder(place)
        if first is None:
            return None
        record, folder = self.lower.record(first.shard), index_of(first.where)
        parent = self._place(record, record.folder_parent[folder])
        return next(self._wanting(parent, self._shown(record, first.where)), None)

    def _claims(self, place: Place, twin: Child | None, name: bytes) -> list[Child]:
        """Everything that wants a name in a directory, by right: the first one gets it."""
        folder = self._folder_named(place, name)
        wanting = list(self._wanting(place, name))
        if folder is not None and not self.files_layout:
            wanting = wanting[1:]  # the first sample lives in the folder's directory
        claims = ([folder] if folder is not None else []) + wanting
        if twin is not None:
            record = self.lower.record(twin.shard)
            file = self._find(record, twin.where, name)
            if file is not None:
                claims.append(Child(twin.shard, file))
        return claims

    def _named(self, place: Place, twin: Child | None, name: bytes) -> list[tuple[Child, bytes]]:
        """Those that want `name`, with the names that they get. Kept for a while: listings ask again and again."""
        key = (place, twin, name, self._generation)
        found = self._known.get(key)
        if found is None:
            found, number = [], 1
            for nth, child in enumerate(self._claims(place, twin, name)):
                shown = name
                while nth and (shown == name or self._claims(place, twin, shown)):
                    number += 1
                    shown = names.numbered(name, number)
                found.append((child, shown))
            if self._known_size > KNOWN_MAX:
                self._known.clear()
                self._known_size = 0
            self._known[key] = found
            self._known_size += 1 + len(found)
        return found

    def _name_of(self, place: Place, twin: Child | None, name: bytes, child: Child) -> bytes | None:
        """What a child that wants `name` is called; None for the sample that lives in a folder's directory."""
        return next((shown for one, shown in self._named(place, twin, name) if one == child), None)

    # --- the tree

    def lookup(self, parent: int, name: bytes) -> Node:
        self._load()
        if parent != ROOT and kind_of(parent) == MEMBER:
            raise NotADirectory(f"{text_of(name)!r}: its parent is a file")
        if parent != ROOT and kind_of(parent) == SAMPLE:
            return super().lookup(parent, name)
        place = self._place_of(parent)
        twin = self._twin(place)
        claims = self._claims(place, twin, name)
        if claims:
            return self._node_of(claims[0])
        numbered = names.number_of(name)
        if numbered is not None:
            for child, shown in self._named(place, twin, numbered[0]):
                if shown == name:
                    return self._node_of(child)
        if self._look_around():
            return self.lookup(parent, name)
        raise NoSuchEntry(f"no {text_of(name)!r} in {text_of(place.path)!r} of the merged tree")

    def _place_of(self, inode: int) -> Place:
        if inode == ROOT:
            return _TOP
        _, record, where = self._open(inode)
        return self._place(record, index_of(where))

    def _node_of(self, child: Child) -> Node:
        record = self.lower.record(child.shard)
        if kind_of(child.where) == SAMPLE:
            return self._node(child.shard, record, child.where)
        node = self._node(child.shard, record, child.where)
        # Nobody counts the subdirectories over all shards; one link is how a file system says so.
        return node._replace(links=1) if kind_of(child.where) == FOLDER else node

    def getattr(self, inode: int) -> Node:
        self._load()
        if inode == ROOT:
            return Node(ROOT, self.directory_mode, 1, 0, self._root_mtime)
        _, number, where = inodes.unpack(inode)
        self._open(inode)
        return self._node_of(Child(number, where))

    def parent(self, inode: int) -> int:
        self._load()
        if inode == ROOT:
            return ROOT
        _, record, where = self._open(inode)
        index = index_of(where)
        folder = record.folder_parent[index] if kind_of(where) == FOLDER else record.folder_of(index)
        first = self._first_folder(self._place(record, folder)) if folder else None
        return ROOT if first is None else self._node_of(first).inode

    def places(self, inode: int) -> list[tuple[int, bytes]]:
        self._load()
        number, record, where = self._open(inode)
        return [self._merged_place(number, record, one) for one in self._names_of(record, where)]

    def _merged_place(self, number: int, record: Record, where: int) -> tuple[int, bytes]:
        shown, holder = self._shown(record, where), self._holder(record, where)
        if kind_of(holder) == SAMPLE:
            folder = self._folder_of_twin(number, record, holder)
            if folder is None:
                return inodes.pack(self.lower.tag(number), number, holder), shown
            place = self._place(self.lower.record(folder.shard), index_of(folder.where))
        else:
            place = self._place(record, index_of(holder))
        first = None if place.top else self._first_folder(place)
        name = None
        if kind_of(where) != FOLDER:
            name = self._name_of(place, self._twin(place), shown, Child(number, where))
        return ROOT if first is None else self._node_of(first).inode, name or shown

    def _folder_of_twin(self, number: int, record: Record, sample: int) -> Child | None:
        """The folder, of another shard too, whose directory this sample shares."""
        parent = self._place(record, record.folder_of(index_of(sample)))
        folder = self._folder_named(parent, self._shown(record, sample))
        if folder is None:
            return None
        place = self._place(self.lower.record(folder.shard), index_of(folder.where))
        return folder if self._twin(place) == Child(number, sample) else None

    def listing(self, inode: int, after: int = 0) -> Iterator[Entry]:
        """As `Tree.listing`. A cursor has the version of the set (9 bits), the shard's number and one (21 bits),
        and the position in its record: a listing never goes on in other shards than it began with.
        """
        if self.lower.alarms != self._heard:  # an old cursor would end the listing in another process
            self._look_around()
        self._load()
        if inode != ROOT and kind_of(inode) != FOLDER:
            yield from super().listing(inode, after)
            return
        if after > AT_PARENT and not self._is_of_this_set(after):
            path = text_of(self._place_of(inode).path)
            raise StaleShard(f"a shard has changed while {path!r} of the merged tree was listed")
        if after < AT_SELF:
            yield Entry(b".", self.getattr(inode), AT_SELF)
        if after < AT_PARENT:
            yield Entry(b"..", self.getattr(self.parent(inode)), AT_PARENT)
        place = self._place_of(inode)
        twin = self._twin(place)
        after &= (1 << _TAG_SHIFT) - 1
        shard, where = (after >> 32) - 1, after & 0xFFFFFFFF
        if shard < 0:
            yield from self._list_twin(place, twin, where if kind_of(where) == MEMBER else 0)
            where = 0
        for number, record, folder in self._folders_at(place):
            if number >= shard:
                yield from self._list_shard(place, twin, number, record, folder, where if number == shard else 0)

    def _is_of_this_set(self, cursor: int) -> bool:
        """Whether a listing may go on at this cursor."""
        if cursor >> _TAG_SHIFT == self._tag >> _TAG_SHIFT:
            return True
        # Another process, which began it, may know of a change that this one has not looked for yet.
        self.lower.distrust()
        self.lower.look_at_all()
        self._load()
        return cursor >> _TAG_SHIFT == self._tag >> _TAG_SHIFT

    def run(self, inode: int, after: int, most: int) -> Run | None:
        return None

    def _list_twin(self, place: Place, twin: Child | None, after: int) -> Iterator[Entry]:
        if twin is None:
            return
        record = self.lower.record(twin.shard)
        for where in self._children(record, position(SAMPLE, index_of(twin.where)), after):
            child, shown = Child(twin.shard, where), self._shown(record, where)
            name = self._name_of(place, twin, shown, child) or shown
            yield Entry(name, self._node_of(child), self._tag | where)

    def _list_shard(
        self, place: Place, twin: Child | None, number: int, record: Record, folder: int, after: int
    ) -> Iterator[Entry]:
        base = self._tag | (number + 1) << 32
        for where in self._raw_children(record, folder, after):
            child, shown = Child(number, where), self._shown(record, where)
            if kind_of(where) == FOLDER:
                if self._first_folder(self._place(record, index_of(where))) == child:
                    yield Entry(shown, self._node_of(child), base | where)
            elif twin is None and self._is_alone(place, shown):
                yield Entry(shown, self._node(number, record, where), base | where)
            else:
                name = self._name_of(place, twin, shown, child)
                if name is not None:
                    yield Entry(name, self._node_of(child), base | where)

    def _is_alone(self, place: Place, name: bytes) -> bool:
        """Whether the checksums alone say that nothing else can want this name."""
        crc = zlib.crc32(place.below(name))
        if self._count(0, crc):
            return False
        found = self._count(1, crc)
        if self.files_layout and b"." in name:
            found += self._count(1, zlib.crc32(place.below(name.partition(b".")[0])))
        return found == 1

    def _raw_children(self, record: Record, folder: int, after: int) -> Iterator[int]:
        """Folders and samples (or files) of one shard's folder; a sample that shares a directory, too."""
        if self.files_layout:
            yield from self._children(record, position(FOLDER, folder), after)
            return
        if kind_of(after) in (0, FOLDER):
            first = index_of(after) + 1 if after else 0
            for child in record.child_folders(folder):
                if child >= first and self._is_shown(record, child):
                    yield position(FOLDER, child)
        first = index_of(after) + 1 if kind_of(after) == SAMPLE else 0
        entries = record.folder_entries(folder)
        for entry in range(max(entries.start, first), entries.stop):
            if not record.entry_flags[entry] & STRAY:
                yield position(SAMPLE, entry)


def make_tree(lower: Lower, view: View, merge: bool) -> Tree:
    """The tree that a mount with these options shows."""
    return MergedTree(lower, view) if is_merged(view, merge) else Tree(lower, view)


def is_merged(view: View, merge: bool) -> bool:
    """Whether that is one tree over all shards: of one class there may be samples in any of them."""
    return merge or view.layout == CLASSES_LAYOUT
