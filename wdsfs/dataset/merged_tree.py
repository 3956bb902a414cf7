"""One tree over all shards of a set: `--merge`.

A directory of this tree is the sum of the folders with its path in all shards. Nothing is kept in memory: a table
of the set (`index/merged_names.py`) says which shards want a path, and no question is asked of more than a few of
them. Its inode number is that of the folder in the first shard that has it.

Semantics decision: when several shards want one name, the first shard's gets it, later ones are shown as
`name~2`, `name~3` and so on; a folder always keeps its name, being one folder in all shards. A sample whose
key is also a folder shares the directory with it, also when they come from different shards.

Semantics decision: while a shard cannot be read, nobody knows which names it would add. What is known can be
opened, but a listing would be a smaller set without a word, and a name that is not found may be in that shard:
both are errors, unless the view may be partial.
"""

from __future__ import annotations

import logging
import time
import zlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from wdsfs import inodes, names
from wdsfs.dataset.shard_set import ShardSet
from wdsfs.dataset.shard_tree import ShardTree, home_of
from wdsfs.dataset.tree import (
    AT_PARENT,
    AT_SELF,
    CLASSES_LAYOUT,
    Entry,
    ListingRun,
    LowerTree,
    Node,
    View,
    text_of,
)
from wdsfs.errors import NoSuchEntry, NotADirectory, ShardError, StaleShard, UnreadableShard
from wdsfs.index.merged_names import Table, Tables, Wants, stems
from wdsfs.index.record import STRAY, Record
from wdsfs.index.set_tables import Claims
from wdsfs.inodes import FOLDER, MEMBER, ROOT, SAMPLE, index_of, kind_of, position

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0  # how often a name that is not there makes all shards be looked at
_TAG_SHIFT, _TAG_MAX = 53, (1 << 9) - 1  # bit 62 is that of the cursors of an overlay
DIRECTORIES_MAX = 1000  # directories of which it is kept what they are made of


class MergedPlace(NamedTuple):
    """A directory of the merged tree: its plain path, and whether it is the top (a folder may be called ``)."""

    path: bytes
    top: bool

    def below(self, name: bytes) -> bytes:
        return name if self.top else self.path + b"/" + name

    def sum(self, name: bytes) -> int:
        """The checksum under which a path below is filed."""
        return zlib.crc32(self.below(name))


class MergedChild(NamedTuple):
    """Something in a shard: the shard's number and the position in its record."""

    shard: int
    where: int


class Directory(NamedTuple):
    """A directory, and the sample whose files are in it, too."""

    place: MergedPlace
    twin: MergedChild | None


class Rivals(NamedTuple):
    """All that want one name in a directory, by right: a folder, samples (or files) of shards, a file of the twin.

    Shards are in ascending order; the samples of the first `skipped` (0 or 1) live in the folder's directory.
    """

    folder: MergedChild | None
    shards: Sequence[int]
    skipped: int
    file: MergedChild | None

    def __len__(self) -> int:
        return (self.folder is not None) + len(self.shards) - self.skipped + (self.file is not None)


Answer = TypeVar("Answer")

_TOP = MergedPlace(b"", True)
_NOBODY: Sequence[int] = ()


class MergedTree(ShardTree):
    """All shards as one tree. Raises what `ShardTree` raises."""

    merged = True

    def __init__(self, lower: ShardSet, view: View) -> None:
        super().__init__(lower, view)
        self._generation = -1
        self._lost: list[int] = []  # shards that cannot be read: their names are missing
        self._tag = 0
        self._looked, self._heard = 0.0, 0
        self._directories: OrderedDict[int, Directory] = OrderedDict()
        self._numbers_in_twin: tuple[MergedChild, dict[bytes, list[int]]] | None = None

    def prepare(self) -> None:
        self._load()

    def _load(self) -> None:
        """Make or find the claims for what the shards are now. Raises NotIndexed while one is not indexed.

        To be called first by every public method: it lets go of the records that are in use.
        """
        if self._generation != self.lower.generation:
            self._lost.clear()
            for number in range(len(self.lower)):
                if self._record_or_none(number) is None:
                    self._lost.append(number)
            self._claims: Claims = self.lower.claims(b"%d" % self.domain, self._record_or_none, self._wants)
            self._directories.clear()
            self._numbers_in_twin = None
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

    def _refuse_partial(self) -> None:
        """Raises UnreadableShard where names of the tree are missing, and may not be. NotIndexed, as `_load`."""
        while self._lost and not self.view.partial:
            try:
                for number in self._lost:
                    self.lower.record(number)
            except ShardError as error:
                text = "until it can be read, names in the merged tree are missing"
                raise UnreadableShard(f"{error}; {text}") from None
            self._generation = -1  # they are back
            self._load()

    def _record_or_none(self, number: int) -> Record | None:
        try:
            return self.lower.record(number)
        except ShardError:  # reported by the lower; the others are shown
            return None

    def _wants(self, record: Record) -> Wants:
        """The paths at which a shard wants to show something."""
        paths = [record.folder_path(folder) for folder in range(record.folders)]
        prefixes = [path + b"/" if folder else b"" for folder, path in enumerate(paths)]
        folders = [paths[folder] for folder in range(1, record.folders) if self._is_shown(record, folder)]
        others: list[bytes | None]
        if self.files_layout:
            others = [name for folder, prefix in enumerate(prefixes) for name in _files_of(record, folder, prefix)]
            for member in range(record.members) if record.has_links else ():
                if record.link_target(member) is None:
                    others[member] = None
        else:
            shown = zip(record.paths(), record.entry_flags, strict=True)
            others = [None if flags & STRAY else path for path, flags in shown]
        aliased, aliases = [], record.aliases[self.domain]
        for child, parent, name in aliases.all() if aliases is not None else ():
            if kind_of(child) == MEMBER and not self.files_layout:
                continue  # it is in the directory of a sample
            path = prefixes[index_of(parent)] + name
            if kind_of(child) == FOLDER and self._is_shown(record, index_of(child)):
                aliased.append(path)
            for one in self._claimants(record, child):
                others[index_of(one)] = path
        return Wants(folders, aliased, [path for path in others if path is not None])

    # --- which shards have a path

    @property
    def _tables(self) -> Tables:
        return self._claims.tables()

    def _group(self, table: Table, crc: int, has: Callable[[int, Record], object]) -> Sequence[int]:
        """The shards of `table` with a path that has this sum, and that a shard `has`."""
        possible = [shards for shards in table.groups(crc) if self._first_of(shards, has)]
        while len(possible) > 1:  # paths with one sum, and shards with several of them
            *_, one, other = possible
            first = self._first_of(sorted({*one} ^ {*other}), lambda number, record: (has(number, record), number))
            # A shard that is in one of the two only: if it has the path, that one is right, and else wrong.
            wrong = other if not first or bool(first[0]) == (first[1] in one) else one
            possible = [shards for shards in possible if shards is not wrong]
        return possible[0] if possible else _NOBODY

    def _first_of(self, shards: Sequence[int], question: Callable[[int, Record], Answer]) -> Answer | None:
        """The answer for the first of these shards that can be read."""
        for number in shards:
            record = self._record_or_none(number)
            if record is not None:
                return question(number, record)
        return None

    def _with_folder(self, place: MergedPlace) -> Sequence[int]:
        """The shards that have a folder there, shown."""
        if place.top:
            return range(len(self.lower))
        return self._group(
            self._tables.folders, zlib.crc32(place.path), lambda _, record: self._folder_in(record, place)
        )

    def _folder_in(self, record: Record, place: MergedPlace) -> int | None:
        folder = 0 if place.top else record.find_path(place.path)
        return None if folder is None or not (place.top or self._is_shown(record, folder)) else folder

    def _folders_at(self, place: MergedPlace, first: int = 0) -> Iterator[tuple[int, Record, int]]:
        """The folders of all shards that make up a directory, in the order of the shards, from one on."""
        shards = self._with_folder(place)
        for number in shards[bisect_left(shards, first) :]:
            record = self._record_or_none(number)
            folder = None if record is None else self._folder_in(record, place)
            if record is not None and folder is not None:
                yield number, record, folder

    def _first_folder(self, place: MergedPlace) -> MergedChild | None:
        for number, _, folder in self._folders_at(place):
            return MergedChild(number, position(FOLDER, folder))
        return None

    def _place(self, record: Record, folder: int) -> MergedPlace:
        return MergedPlace(record.folder_path(folder), folder == 0)

    # --- who wants a name

    def _own(self, record: Record, folder: int, name: bytes) -> Iterator[int]:
        """The sample (or file, in the files layout) that one shard shows under this name in this folder."""
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

    def _child_in(self, number: int, record: Record, place: MergedPlace, name: bytes) -> MergedChild | None:
        """The sample (or file) of one shard that wants this name in this directory."""
        folder = 0 if place.top else record.find_path(place.path)
        where = None if folder is None else next(self._own(record, folder, name), None)
        return None if where is None else MergedChild(number, where)

    def _wanting(self, place: MergedPlace, name: bytes, sure: bool = False) -> Sequence[int]:
        """The shards whose samples (or files) want this name in this directory, in order.

        `sure` says that one of them does: then nobody has to be asked, unless different paths have one sum.
        """
        crc, table = place.sum(name), self._tables.others
        if sure:
            groups = table.groups(crc)
            if len(groups) == 1:
                return groups[0]
        return self._group(table, crc, lambda number, record: self._child_in(number, record, place, name))

    def _folder_named(self, place: MergedPlace, name: bytes) -> MergedChild | None:
        """The folder shown under this name. Its plain name follows from the shown one."""
        crc, tables = place.sum(name), self._tables
        if b"%" not in name and not tables.folders.has(crc):
            return None
        for plain in {name, names.unescape(name)}:
            child = self._first_folder(MergedPlace(place.below(plain), False))
            if child is not None and self._shown(self.lower.record(child.shard), child.where) == name:
                return child
        found: list[MergedPlace] = []  # a name that was cut is found by itself

        def has_alias(_: int, record: Record) -> bool:
            folder = 0 if place.top else record.find_path(place.path)
            aliases = record.aliases[self.domain]
            if folder is not None and aliases is not None:
                where = aliases.find(record.crc_below(folder, name), position(FOLDER, folder), name)
                if where is not None and kind_of(where) == FOLDER:
                    found.append(self._place(record, index_of(where)))
            return bool(found)

        self._group(tables.aliased, crc, has_alias)
        return self._first_folder(found[0]) if found else None

    def _twin(self, place: MergedPlace) -> MergedChild | None:
        """The sample that shares a directory with the folder at `place`: the first of that key."""
        if place.top or self.files_layout:
            return None
        first = self._first_folder(place)
        if first is None:
            return None
        record, folder = self.lower.record(first.shard), index_of(first.where)
        parent, name = self._place(record, record.folder_parent[folder]), self._shown(record, first.where)
        for number in self._wanting(parent, name):
            return self._child_in(number, self.lower.record(number), parent, name)
        return None

    def _rivals(self, at: Directory, name: bytes, sure: bool = False) -> Rivals:
        """All that want a name in a directory. `sure` says that a sample (or file) of a shard does."""
        place, twin = at
        folder = self._folder_named(place, name)
        shards = self._wanting(place, name, sure)
        file = None if twin is None else self._find(self.lower.record(twin.shard), twin.where, name)
        return Rivals(
            folder,
            shards,
            1 if folder is not None and len(shards) and not self.files_layout else 0,
            None if twin is None or file is None else MergedChild(twin.shard, file),
        )

    def _rival(self, at: Directory, rivals: Rivals, name: bytes, nth: int) -> MergedChild | None:
        """The one that is `nth` by right. None where all were `sure` that it is there, and it is not."""
        if rivals.folder is not None:
            if not nth:
                return rivals.folder
            nth -= 1
        nth += rivals.skipped
        if nth >= len(rivals.shards):
            return rivals.file
        number = rivals.shards[nth]
        return self._child_in(number, self.lower.record(number), at.place, name)

    def _right(self, rivals: Rivals, child: MergedChild) -> int | None:
        """Which one by right this child is; None for the sample that lives in the folder's directory."""
        if child in (rivals.folder, rivals.file):
            return 0 if child == rivals.folder else len(rivals) - 1
        nth = bisect_left(rivals.shards, child.shard)
        if nth == len(rivals.shards) or rivals.shards[nth] != child.shard or nth < rivals.skipped:
            return None
        return nth - rivals.skipped + (rivals.folder is not None)

    # --- numbers

    def _taken(self, at: Directory, name: bytes) -> list[int]:
        """The numbers that those who want `name` do not get, in order: something is called `name~2` itself."""
        table, found = self._tables.numbered, set[int]()
        if not len(table.sums) and at.twin is None:
            return []
        for stem in stems(name):
            for group in table.groups(at.place.sum(stem)):
                found.update(group)
            if at.twin is not None:
                found.update(self._numbered_in(at.twin).get(stem, ()))
        return sorted(number for number in found if len(self._rivals(at, names.numbered(name, number))))

    def _numbered_in(self, twin: MergedChild) -> dict[bytes, list[int]]:
        """The numbers at the ends of the names of a sample's files. Kept for one: a listing asks for each name."""
        if self._numbers_in_twin is None or self._numbers_in_twin[0] != twin:
            record, numbers = self.lower.record(twin.shard), dict[bytes, list[int]]()
            for member in record.entry_members(index_of(twin.where)):
                ends = names.number_of(self._shown(record, position(MEMBER, member)))
                if ends is not None:
                    numbers.setdefault(ends[0], []).append(ends[1])
            self._numbers_in_twin = twin, numbers
        return self._numbers_in_twin[1]

    def _name_of(self, at: Directory, name: bytes, child: MergedChild) -> bytes | None:
        """What a child that wants `name` is called; None for the sample that lives in a folder's directory."""
        rivals = self._rivals(at, name, sure=True)
        nth = self._right(rivals, child)
        if not nth:
            return None if nth is None else name
        number = nth + 1
        for taken in self._taken(at, name):
            if taken > number:
                break
            number += 1
        return names.numbered(name, number)

    def _find_numbered(self, at: Directory, name: bytes) -> MergedChild | None:
        """What has got this name, ending in a number, because it was not the first to want the one without."""
        ends = names.number_of(name)
        if ends is None:
            return None
        stem, number = ends
        for wanted in (stem, *self._uncut(at.place, stem, len(name) - len(stem))):
            rivals = self._rivals(at, wanted, sure=True)
            if len(rivals) < 2 or names.numbered(wanted, number) != name:
                continue
            taken = self._taken(at, wanted)
            nth = number - 1 - bisect_left(taken, number)
            if number not in taken and 0 < nth < len(rivals):
                child = self._rival(at, rivals, wanted, nth)
                if child is not None:
                    return child
        return None

    def _uncut(self, place: MergedPlace, stem: bytes, size: int) -> Iterator[bytes]:
        """The names that are cut to `stem` to get a number that takes `size` bytes."""
        found: list[bytes] = []

        def has(_: int, record: Record) -> bool:
            folder = 0 if place.top else record.find_path(place.path)
            for where in () if folder is None else self._raw_children(record, folder, 0):
                shown = self._shown(record, where)
                if shown != stem and names.shorten(shown, names.NAME_MAX - size) == stem:
                    found.append(shown)
                    return True
            return False

        self._group(self._tables.cut, place.sum(stem), has)
        yield from found

    # --- the tree

    def lookup(self, parent: int, name: bytes) -> Node:
        self._load()
        if parent != ROOT and kind_of(parent) == MEMBER:
            raise NotADirectory(f"{text_of(name)!r}: its parent is a file")
        if parent != ROOT and kind_of(parent) == SAMPLE:
            return super().lookup(parent, name)
        at = self._directory(parent)
        rivals = self._rivals(at, name)
        child = self._rival(at, rivals, name, 0) if len(rivals) else self._find_numbered(at, name)
        if child is not None:
            return self._node_of(child)
        if self._look_around():
            return self.lookup(parent, name)
        self._refuse_partial()
        raise NoSuchEntry(f"no {text_of(name)!r} in {text_of(at.place.path)!r} of the merged tree")

    def _directory(self, inode: int) -> Directory:
        """What the directory with this inode number is made of. Kept for those that were asked for last."""
        if inode == ROOT:
            return Directory(_TOP, None)
        _, record, where = self._open(inode)
        found = self._directories.get(inode)
        if found is None:
            place = self._place(record, index_of(where))
            found = self._directories[inode] = Directory(place, self._twin(place))
            if len(self._directories) > DIRECTORIES_MAX:
                self._directories.popitem(last=False)
        return found

    def _node_of(self, child: MergedChild) -> Node:
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
        return self._node_of(MergedChild(number, where))

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
        shown = self._shown(record, where)
        if kind_of(where) == MEMBER and not self.files_layout:
            sample = position(SAMPLE, record.entry_of(index_of(where)))
            folder = self._folder_of_twin(number, record, sample)
            if folder is None:
                return inodes.pack(self.lower.tag(number), number, sample), shown
            place = self._place(self.lower.record(folder.shard), index_of(folder.where))
        else:
            place = self._place(record, index_of(self._holder(record, where)))
        first = None if place.top else self._first_folder(place)
        name = None
        if kind_of(where) != FOLDER:
            name = self._name_of(Directory(place, self._twin(place)), shown, MergedChild(number, where))
        return ROOT if first is None else self._node_of(first).inode, name or shown

    def _folder_of_twin(self, number: int, record: Record, sample: int) -> MergedChild | None:
        """The folder, of another shard too, whose directory this sample shares."""
        parent = self._place(record, record.folder_of(index_of(sample)))
        folder = self._folder_named(parent, self._shown(record, sample))
        if folder is None:
            return None
        place = self._place(self.lower.record(folder.shard), index_of(folder.where))
        return folder if self._twin(place) == MergedChild(number, sample) else None

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
        for number, record, folder in self._folders_at(at.place, shard):
            yield from self._list_shard(at, number, record, folder, where if number == shard else 0)

    def _is_of_this_set(self, cursor: int) -> bool:
        """Whether a listing may go on at this cursor."""
        if cursor >> _TAG_SHIFT == self._tag >> _TAG_SHIFT:
            return True
        # Another process, which began it, may know of a change that this one has not looked for yet.
        self.lower.distrust()
        self.lower.look_at_all()
        self._load()
        return cursor >> _TAG_SHIFT == self._tag >> _TAG_SHIFT

    def run(self, inode: int, after: int, most: int) -> ListingRun | None:
        return None

    def _list_twin(self, at: Directory, after: int) -> Iterator[Entry]:
        if at.twin is None:
            return
        number, sample = at.twin
        record = self.lower.record(number)
        for where in self._children(record, sample, after):
            child, shown = MergedChild(number, where), self._shown(record, where)
            yield Entry(self._name_of(at, shown, child) or shown, self._node_of(child), self._tag | where)

    def _list_shard(self, at: Directory, number: int, record: Record, folder: int, after: int) -> Iterator[Entry]:
        base = self._tag | (number + 1) << 32
        leads = self._leads(number)
        for where in self._raw_children(record, folder, after):
            child, shown = MergedChild(number, where), self._shown(record, where)
            if kind_of(where) == FOLDER:
                if leads and self._first_folder(self._place(record, index_of(where))) == child:
                    yield Entry(shown, self._node_of(child), base | where)
            else:
                name = self._name_of(at, shown, child)
                if name is not None:
                    yield Entry(name, self._node(number, record, where), base | where)

    def _leads(self, number: int) -> bool:
        """Whether a shard has a folder that none before it has."""
        leaders = self._tables.leaders.values
        at = bisect_left(leaders, number)
        return at < len(leaders) and leaders[at] == number

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


def _files_of(record: Record, folder: int, prefix: bytes) -> Iterator[bytes]:
    """The paths of a folder's files."""
    entries = record.folder_entries(folder)
    for name in record.file_names(range(record.entry_member[entries.start], record.entry_member[entries.stop])):
        yield prefix + name


def make_tree(lower: ShardSet, view: View, merge: bool) -> LowerTree:
    """The tree that a mount with these options shows."""
    return MergedTree(lower, view) if is_merged(view, merge) else ShardTree(lower, view)


def is_merged(view: View, merge: bool) -> bool:
    """Whether that is one tree over all shards: of one class there may be samples in any of them."""
    return merge or view.layout == CLASSES_LAYOUT
