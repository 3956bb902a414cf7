"""Which shards of a set have a path: what a merged tree asks before it asks a record.

Nothing is kept in memory: a table of the set (`index/merged_names.py`) gives the shards that have a path, so no
lookup opens more than a few records.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from wdsfs.errors import IndexUnusable, MissingShard, ShardError
from wdsfs.index.merged_names import Table, Tables, Wants
from wdsfs.index.record import STRAY, Record
from wdsfs.index.set_tables import Claims
from wdsfs.inodes import FOLDER, MEMBER, index_of, kind_of, position
from wdsfs.tree.indexing import NotIndexed
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.shown_names import ShownNames

Answer = TypeVar("Answer")


class MergedPlace(NamedTuple):
    """A directory of the merged tree: its plain path, and True for the top (a folder may have an empty name,
    too)."""

    path: bytes
    top: bool

    def below(self, name: bytes) -> bytes:
        """The plain path of a child."""
        return name if self.top else self.path + b"/" + name

    def sum(self, name: bytes) -> int:
        """The checksum of the path of a child, which is its key in the tables."""
        return zlib.crc32(self.below(name))


class MergedChild(NamedTuple):
    """Something in a shard: the shard's number and the position in its record."""

    shard: int
    where: int


TOP = MergedPlace(b"", True)
NO_SHARDS: Sequence[int] = ()


class MergedPaths:
    """The shards of `lower` by the paths that they show under `names`.

    Call `load` before each request. `lost` are the shards that cannot be read: their paths are missing.
    """

    def __init__(self, lower: ShardSet, names: ShownNames) -> None:
        self.lower, self.names = lower, names
        self.lost: list[int] = []
        self.generation = -1  # of the set that the tables are of

    @property
    def is_current(self) -> bool:
        """True if no change of the set has been noticed since `load`."""
        return self.generation == self.lower.generation

    def load(self) -> bool:
        """Make or find the table for the set as it is now; returns True if it is another one than before.

        Invalidates the records in use then. Raises NotIndexed while a shard is not indexed.
        """
        if self.generation == self.lower.generation:  # as `is_current`: every request comes here
            return False
        self.lost.clear()
        self.lost += [number for number in self.lower.numbers if self._is_lost(number)]
        self._claims: Claims = self.lower.claims(self._kind, self._record_in_set, self._wants)
        self.generation = self.lower.generation
        return True

    @property
    def _kind(self) -> bytes:
        """The name of the rule of `_wants`."""
        return b"%d" % self.names.domain

    def _is_lost(self, number: int) -> bool:
        """True if a shard cannot be read."""
        try:
            self.lower.record(number)
        except MissingShard:  # of a set that is followed it is about to be taken out: its names are gone
            return not self.lower.generations.followed
        except ShardError:
            return True
        return False

    def invalidate(self) -> None:
        """Make the table again at the next `load`."""
        self.generation = -1

    def _record_in_set(self, number: int) -> Record | None:
        return None if number in self.lower.out else self._record_or_none(number)

    def _record_or_none(self, number: int) -> Record | None:
        try:
            return self.lower.record(number)
        except ShardError:  # the set of shards logs it; the others are shown
            return None

    def _wants(self, record: Record) -> Wants:
        """The paths at which a shard wants to show something."""
        paths = [record.folder_path(folder) for folder in range(record.folders)]
        prefixes = [path + b"/" if folder else b"" for folder, path in enumerate(paths)]
        folders = [paths[folder] for folder in range(1, record.folders) if self.names.is_shown(record, folder)]
        others: list[bytes | None]
        if self.names.files_layout:
            others = [name for folder, prefix in enumerate(prefixes) for name in _files_of(record, folder, prefix)]
            for member in range(record.members) if record.has_links else ():
                if record.link_target(member) is None:
                    others[member] = None
        else:
            shown = zip(record.paths(), record.entry_flags, strict=True)
            others = [None if flags & STRAY else path for path, flags in shown]
        aliased, aliases = [], record.aliases[self.names.domain]
        for child, parent, name in aliases.all() if aliases is not None else ():
            if kind_of(child) == MEMBER and not self.names.files_layout:
                continue  # it is in the directory of a sample
            path = prefixes[index_of(parent)] + name
            if kind_of(child) == FOLDER and self.names.is_shown(record, index_of(child)):
                aliased.append(path)
            for one in self.names.claimants(record, child):
                others[index_of(one)] = path
        return Wants(folders, aliased, [path for path in others if path is not None])

    # --- which shards have a path

    @property
    def tables(self) -> Tables:
        """Raises NotIndexed when they have to be made again."""
        try:
            return self._claims.tables()
        except IndexUnusable:  # a mount that has grown since has dropped them
            self.invalidate()
            raise NotIndexed(self.lower, next(self.lower.numbers)) from None

    def group(self, table: Table, path: bytes, has: Callable[[int, Record], object]) -> Sequence[int]:
        """The shards of `table` with this path; `has` returns true for a shard with the path."""
        shards = table.of(path)
        return shards if self.first_of(shards, has) else NO_SHARDS

    def first_of(self, shards: Sequence[int], question: Callable[[int, Record], Answer]) -> Answer | None:
        """The answer for the first of these shards that can be read."""
        for number in shards:
            record = self._record_or_none(number)
            if record is not None:
                return question(number, record)
        return None

    def _with_folder(self, place: MergedPlace) -> Sequence[int]:
        """The shards that show a folder there."""
        if place.top:
            return list(self.lower.numbers) if self.lower.out else range(len(self.lower))
        return self.group(self.tables.folders, place.path, lambda _, record: self._folder_in(record, place))

    def _folder_in(self, record: Record, place: MergedPlace) -> int | None:
        folder = 0 if place.top else record.find_path(place.path)
        return None if folder is None or not (place.top or self.names.is_shown(record, folder)) else folder

    def folders_at(self, place: MergedPlace, first: int = 0) -> Iterator[tuple[int, Record, int]]:
        """The folders that make up a directory, in the order of their shards, from the shard `first` on."""
        shards = self._with_folder(place)
        for number in shards[bisect_left(shards, first) :]:
            record = self._record_or_none(number)
            folder = None if record is None else self._folder_in(record, place)
            if record is not None and folder is not None:
                yield number, record, folder

    def first_folder(self, place: MergedPlace) -> MergedChild | None:
        """The folder of the first shard that has one at this place."""
        for number, _, folder in self.folders_at(place):
            return MergedChild(number, position(FOLDER, folder))
        return None

    def leads(self, number: int) -> bool:
        """True if a shard has a folder that no shard before it has."""
        leaders = self.tables.leaders.values
        at = bisect_left(leaders, number)
        return at < len(leaders) and leaders[at] == number


def place_of(record: Record, folder: int) -> MergedPlace:
    """The place of a folder in the merged tree."""
    return MergedPlace(record.folder_path(folder), folder == 0)


def _files_of(record: Record, folder: int, prefix: bytes) -> Iterator[bytes]:
    """The paths of a folder's files."""
    entries = record.folder_entries(folder)
    for name in record.file_names(range(record.entry_member[entries.start], record.entry_member[entries.stop])):
        yield prefix + name
