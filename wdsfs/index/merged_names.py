"""Claims: which shards want a name in one tree over many shards, for a whole set.

Merged, equal names are distinguished by numbers: `a`, `a~2`, `a~3` and so on, in the order of the shards. So the
number of a shard's sample is its rank among the shards that want the name. The tables here have, for each path,
the numbers of these shards in ascending order: from a shard to its rank and back is a bisection, whatever the
number of shards.

Tables are sorted by the CRC-32 of the path. Different paths with equal sums are kept apart: there a *start* is a
row at which a path begins, and its *mark* is a hash of the path with a seed of the table. Anybody can make paths
with equal sums, but who makes a shard does not know the seed. A path that is alone with its sum has no mark, so
ask its first shard. `tree/merged_paths.py` does that; docs/format.md shows the bytes.
"""

from __future__ import annotations

import secrets
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from wdsfs import names
from wdsfs.index.record import Record
from wdsfs.index.record_columns import equal_range
from wdsfs.storage.identity import GONE, Fingerprint

_SUFFIXES = range(len(b"~2"), len(b"~999999999") + 1)  # bytes that `names.numbered` may add
STEM_MAX = names.NAME_MAX - _SUFFIXES[-1]  # bytes of a name that is never cut for its number


class Wants(NamedTuple):
    """The paths at which one shard wants to show something.

    `folders` are the plain paths of its folders. The other paths are the plain path of a folder, a slash, and a
    name in it as shown: `aliased` those of folders that are not shown under their plain name, `others` those of
    samples (or files).
    """

    folders: list[bytes]
    aliased: list[bytes]
    others: list[bytes]


class Table(NamedTuple):
    """Rows sorted by `sums`; `starts` are the rows at which a path begins that is not alone with its sum, `marks`
    tell these apart, and ascend for each sum."""

    sums: memoryview
    values: memoryview
    starts: memoryview
    marks: memoryview
    seed: int

    def has(self, crc: int) -> bool:
        """True if there is a path with this sum."""
        at = bisect_left(self.sums, crc)
        return at < len(self.sums) and self.sums[at] == crc

    def of(self, path: bytes) -> memoryview:
        """The values of a path. If it has none, those of the only other path with its sum may be returned."""
        rows = equal_range(self.sums, zlib.crc32(path))
        begin, end = bisect_left(self.starts, rows.start), bisect_left(self.starts, rows.stop)
        if begin == end:
            return self.values[rows.start : rows.stop]
        mark = _mark(path, self.seed)
        at = bisect_left(self.marks, mark, begin, end)
        if at == end or self.marks[at] != mark:
            return self.values[:0]
        return self.values[self.starts[at] : rows.stop if at + 1 == end else self.starts[at + 1]]


class Tables(NamedTuple):
    """`folders`, `aliased` and `others` (see `Wants`) have the numbers of shards.

    `numbered` has, under the path of `a`, 2 for `a~2` if anything wants that name; all its paths have marks. `cut`
    has the shards that want a long name, under the shorter one that gets the number. `leaders` has only values:
    the shards with a folder that no shard before them has.
    """

    folders: Table
    aliased: Table
    others: Table
    numbered: Table
    cut: Table
    leaders: Table


def stems(name: bytes) -> set[bytes]:
    """The name to which a number is added for this name: itself, unless it has to be cut."""
    if len(name) <= STEM_MAX:
        return {name}
    return {names.shorten(name, names.NAME_MAX - size) for size in _SUFFIXES}


def parse(body: memoryview) -> Tables:
    """The tables that these bytes contain, in place."""
    seed, found, at = int.from_bytes(body[:8], "little"), [], 8
    codes: tuple[Literal["I", "Q"], ...] = ("I", "I", "I", "Q")
    for _ in Tables._fields:
        columns = []
        for code in codes:
            size = (8 if code == "Q" else 4) * int.from_bytes(body[at : at + 8], "little")
            columns.append(body[at + 8 : at + 8 + size].cast(code))
            at += 8 + size
        sums, values, starts, marks = columns
        found.append(Table(sums, values, starts, marks, seed))
    return Tables(*found)


def build(
    count: int, records: Callable[[int], Record | None], wants: Callable[[Record], Wants]
) -> tuple[list[Fingerprint], bytes]:
    """Return the fingerprints of the records that went into the tables, and these as bytes."""
    fingerprints: list[Fingerprint] = []
    seed = secrets.randbits(64)
    folders, aliased, others, cut, numbered = (_TableRows(seed) for _ in range(5))
    ends: set[tuple[bytes, int]] = set()
    for number in range(count):
        one = records(number)
        fingerprints.append(GONE if one is None else one.fingerprint)
        if one is not None:
            wanted = wants(one)
            folders.add(number, wanted.folders)
            aliased.add(number, wanted.aliased)
            others.add(number, wanted.others)
            cut.add(number, _cut(wanted.others))
            ends.update(*map(_numbered, wanted))
    for path, number in sorted(ends):
        numbered.add(number, [path])
    of_folders = folders.sorted()
    sums, shards, starts, _ = of_folders
    first = np.diff(sums.astype(np.int64), prepend=-1) != 0
    first[starts] = True
    leaders = np.unique(shards[first])
    none = np.zeros(0, np.uint32)
    tables = (
        of_folders,
        aliased.sorted(),
        others.sorted(),
        numbered.sorted(all_marked=True),
        cut.sorted(),
        (none, leaders, none, none.astype(np.uint64)),
    )
    columns = (column for table in tables for column in table)
    packed = (part for column in columns for part in (len(column).to_bytes(8, "little"), column.tobytes()))
    return fingerprints, b"".join((seed.to_bytes(8, "little"), *packed))


class _TableRows:
    """Paths and their values, collected for a table."""

    def __init__(self, seed: int) -> None:
        self._mark = partial(_mark, seed=seed)
        self._sums: list[NDArray[np.uint32]] = [np.zeros(0, np.uint32)]
        self._marks: list[NDArray[np.uint64]] = [np.zeros(0, np.uint64)]
        self._values: list[NDArray[np.uint32]] = [np.zeros(0, np.uint32)]

    def add(self, value: int, paths: list[bytes]) -> None:
        if paths:
            self._sums.append(np.fromiter(map(zlib.crc32, paths), np.uint32, len(paths)))
            self._marks.append(np.fromiter(map(self._mark, paths), np.uint64, len(paths)))
            self._values.append(np.full(len(paths), value, np.uint32))

    def sorted(
        self, all_marked: bool = False
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint64]]:
        """Return the sums, values, starts and marks of the table."""
        sums, marks = np.concatenate(self._sums), np.concatenate(self._marks)
        order = np.argsort(sums, kind="stable")
        sums, marks = sums[order], marks[order]
        clash = (sums[1:] == sums[:-1]) & (marks[1:] != marks[:-1])
        shared = np.ones(len(sums), bool) if all_marked else np.isin(sums, sums[1:][clash])
        chosen = np.flatnonzero(shared)
        inner = np.lexsort((marks[chosen], sums[chosen]))
        order[chosen], marks[chosen] = order[chosen][inner], marks[chosen][inner]
        first = np.ones(len(sums), bool)
        first[1:] = (sums[1:] != sums[:-1]) | (marks[1:] != marks[:-1])
        starts = np.flatnonzero(first & shared)
        return sums, np.concatenate(self._values)[order], starts.astype(np.uint32), marks[starts]


def _mark(path: bytes, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(path, seed)


def _numbered(paths: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
    """Return the path without its number, and the number, for each path that ends like `a~2`."""
    for path in paths:
        if b"~" in path:
            folder, name = names.split_folder(path)
            found = names.number_of(name)
            if found is not None:
                yield folder + found[0], found[1]


def _cut(paths: list[bytes]) -> list[bytes]:
    """Return the shortened paths of those whose name has to be cut to get a number."""
    found = []
    for path in paths:
        if len(path) > STEM_MAX:
            folder, name = names.split_folder(path)
            found += [folder + stem for stem in sorted(stems(name)) if stem != name]
    return found
