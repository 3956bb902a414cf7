"""Which shard gets a name of a merged tree, and under which number the others are shown.

Semantics decision: when several shards want one name, the first shard gets it, later ones are shown as `name~2`,
`name~3` and so on; a folder always keeps its name, being one folder in all shards. A sample whose key is also a
folder shares the directory with it, also when they come from different shards.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from wdsfs import names
from wdsfs.index.merged_names import stems
from wdsfs.index.record import Record
from wdsfs.inodes import FOLDER, MEMBER, index_of, kind_of, position
from wdsfs.tree.merged_paths import MergedChild, MergedPaths, MergedPlace, place_of


class MergedDirectory(NamedTuple):
    """A directory, and the sample whose files are in it, too."""

    place: MergedPlace
    twin: MergedChild | None


class Rivals(NamedTuple):
    """All that want one name in a directory, by rank: a folder, samples (or files) of shards, a file of the twin.

    Shards are in ascending order; the samples of the first `skipped` (0 or 1) live in the folder's directory.
    """

    folder: MergedChild | None
    shards: Sequence[int]
    skipped: int
    file: MergedChild | None

    def __len__(self) -> int:
        return (self.folder is not None) + len(self.shards) - self.skipped + (self.file is not None)


class MergedNames:
    """Who has which name in the directories of a merged tree."""

    def __init__(self, paths: MergedPaths) -> None:
        self.paths, self.lower, self.shown = paths, paths.lower, paths.names
        self._numbers_in_twin: tuple[MergedChild, dict[bytes, list[int]]] | None = None

    def reset(self) -> None:
        """The set has changed: drop what is cached of it."""
        self._numbers_in_twin = None

    def find(self, at: MergedDirectory, name: bytes) -> MergedChild | None:
        """The child that is shown under this name."""
        rivals = self._rivals(at, name)
        return self._rival(at, rivals, name, 0) if len(rivals) else self._find_numbered(at, name)

    def name_of(self, at: MergedDirectory, name: bytes, child: MergedChild) -> bytes | None:
        """The shown name of a child that wants `name`; None for the sample that lives in a folder's directory."""
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

    def folder_named(self, place: MergedPlace, name: bytes) -> MergedChild | None:
        """The folder shown under this name. Its plain name follows from the shown one."""
        tables = self.paths.tables
        if b"%" not in name and not tables.folders.has(place.sum(name)):
            return None
        for plain in {name, names.unescape(name)}:
            child = self.paths.first_folder(MergedPlace(place.below(plain), False))
            if child is not None and self.shown.shown(self.lower.record(child.shard), child.where) == name:
                return child
        found: list[MergedPlace] = []  # from a name that was cut the plain name does not follow

        def has_alias(_: int, record: Record) -> bool:
            folder = 0 if place.top else record.find_path(place.path)
            aliases = record.aliases[self.shown.domain]
            if folder is not None and aliases is not None:
                where = aliases.find(record.crc_below(folder, name), position(FOLDER, folder), name)
                if where is not None and kind_of(where) == FOLDER:
                    found.append(place_of(record, index_of(where)))
            return bool(found)

        self.paths.group(tables.aliased, place.below(name), has_alias)
        return self.paths.first_folder(found[0]) if found else None

    def twin(self, place: MergedPlace) -> MergedChild | None:
        """The sample that shares a directory with the folder at `place`: the first of that key."""
        if place.top or self.shown.files_layout:
            return None
        first = self.paths.first_folder(place)
        if first is None:
            return None
        record, folder = self.lower.record(first.shard), index_of(first.where)
        parent, name = place_of(record, record.folder_parent[folder]), self.shown.shown(record, first.where)
        for number in self._wanting(parent, name):
            return self._child_in(number, self.lower.record(number), parent, name)
        return None

    # --- rivals

    def _rivals(self, at: MergedDirectory, name: bytes, sure: bool = False) -> Rivals:
        """All that want a name in a directory. `sure`: a sample (or file) of a shard is known to be one of
        them."""
        place, twin = at
        folder = self.folder_named(place, name)
        shards = self._wanting(place, name, sure)
        file = None if twin is None else self.shown.find(self.lower.record(twin.shard), twin.where, name)
        return Rivals(
            folder,
            shards,
            1 if folder is not None and len(shards) and not self.shown.files_layout else 0,
            None if twin is None or file is None else MergedChild(twin.shard, file),
        )

    def _rival(self, at: MergedDirectory, rivals: Rivals, name: bytes, nth: int) -> MergedChild | None:
        """The rival of rank `nth`; None if it does not exist, as may be after `sure`."""
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
        """The rank of this child; None for the sample that lives in the folder's directory."""
        if child in (rivals.folder, rivals.file):
            return 0 if child == rivals.folder else len(rivals) - 1
        nth = bisect_left(rivals.shards, child.shard)
        if nth == len(rivals.shards) or rivals.shards[nth] != child.shard or nth < rivals.skipped:
            return None
        return nth - rivals.skipped + (rivals.folder is not None)

    def _wanting(self, place: MergedPlace, name: bytes, sure: bool = False) -> Sequence[int]:
        """The shards whose samples (or files) want this name in this directory, in order.

        `sure`: one of them is known to. Then no record is opened.
        """
        path, table = place.below(name), self.paths.tables.others
        if sure:
            return table.of(path)
        return self.paths.group(table, path, lambda number, record: self._child_in(number, record, place, name))

    def _child_in(self, number: int, record: Record, place: MergedPlace, name: bytes) -> MergedChild | None:
        """The sample (or file) of one shard that wants this name in this directory."""
        folder = 0 if place.top else record.find_path(place.path)
        where = None if folder is None else next(self.shown.own(record, folder, name), None)
        return None if where is None else MergedChild(number, where)

    # --- numbers

    def _taken(self, at: MergedDirectory, name: bytes) -> list[int]:
        """The numbers that no rival gets, in order, because something has the plain name `name~2` itself."""
        table, found = self.paths.tables.numbered, set[int]()
        if not len(table.sums) and at.twin is None:
            return []
        for stem in stems(name):
            found.update(table.of(at.place.below(stem)))
            if at.twin is not None:
                found.update(self._numbered_in(at.twin).get(stem, ()))
        return sorted(number for number in found if len(self._rivals(at, names.numbered(name, number))))

    def _numbered_in(self, twin: MergedChild) -> dict[bytes, list[int]]:
        """The numbers at the ends of the names of a sample's files. Cached for one sample: a listing asks for each
        name."""
        if self._numbers_in_twin is None or self._numbers_in_twin[0] != twin:
            record, numbers = self.lower.record(twin.shard), dict[bytes, list[int]]()
            for member in record.entry_members(index_of(twin.where)):
                ends = names.number_of(self.shown.shown(record, position(MEMBER, member)))
                if ends is not None:
                    numbers.setdefault(ends[0], []).append(ends[1])
            self._numbers_in_twin = twin, numbers
        return self._numbers_in_twin[1]

    def _find_numbered(self, at: MergedDirectory, name: bytes) -> MergedChild | None:
        """The child that is shown under this name with a number, because an earlier shard has the plain name."""
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
        """The names that are cut to `stem` to make room for a number of `size` bytes."""
        found: list[bytes] = []

        def has(_: int, record: Record) -> bool:
            folder = 0 if place.top else record.find_path(place.path)
            for where in () if folder is None else self.shown.raw_children(record, folder, 0):
                shown = self.shown.shown(record, where)
                if shown != stem and names.shorten(shown, names.NAME_MAX - size) == stem:
                    found.append(shown)
                    return True
            return False

        self.paths.group(self.paths.tables.cut, place.below(stem), has)
        yield from found
