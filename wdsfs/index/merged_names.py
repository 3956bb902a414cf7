"""Claims: which shards want a name in one tree over many shards, for a whole set.

Merged, equal names are distinguished by numbers: `a`, `a~2`, `a~3` and so on, in the order of the shards. So the
number of a shard's sample is its rank among the shards that want the name. The tables here have, for each path,
the numbers of these shards in ascending order: from a shard to its rank and back is a bisection, whatever the
number of shards.

Tables are sorted by the CRC-32 of the path. Different paths with equal sums are kept apart: a *break* is a row at
which the next path begins. The path of a group of rows is not in the table, so ask the first shard of the group.
`merged` does that; docs/format.md shows the bytes.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsfs import names
from wdsfs.index.record import Record
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
    """Rows sorted by `sums`; `breaks` are the rows at which another path with the same sum begins."""

    sums: memoryview
    values: memoryview
    breaks: memoryview

    def has(self, crc: int) -> bool:
        """True if there is a path with this sum."""
        at = bisect_left(self.sums, crc)
        return at < len(self.sums) and self.sums[at] == crc

    def groups(self, crc: int) -> list[memoryview]:
        """The values of each path with this sum: nearly always one path, or none."""
        first = bisect_left(self.sums, crc)
        if first == len(self.sums) or self.sums[first] != crc:
            return []
        end = bisect_right(self.sums, crc, first)
        breaks = self.breaks[bisect_right(self.breaks, first) : bisect_left(self.breaks, end)]
        bounds = [first, *breaks, end]
        return [self.values[begin:stop] for begin, stop in pairwise(bounds)]


class Tables(NamedTuple):
    """`folders`, `aliased` and `others` (see `Wants`) have the numbers of shards.

    `numbered` has, under the path of `a`, 2 for `a~2` if anything wants that name. `cut` has the shards that want
    a long name, under the shorter one that gets the number. `leaders` has only values: the shards with a folder
    that no shard before them has.
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
    found, at = [], 0
    for _ in Tables._fields:
        columns = []
        for _ in Table._fields:
            size = 4 * int.from_bytes(body[at : at + 8], "little")
            columns.append(body[at + 8 : at + 8 + size].cast("I"))
            at += 8 + size
        found.append(Table(*columns))
    return Tables(*found)


def build(
    count: int, records: Callable[[int], Record | None], wants: Callable[[Record], Wants]
) -> tuple[list[Fingerprint], bytes]:
    """Return the fingerprints of the records that went into the tables, and these as bytes."""
    fingerprints: list[Fingerprint] = []
    folders, aliased, others, cut = (_TableRows() for _ in range(4))
    numbered: set[tuple[int, int]] = set()
    for number in range(count):
        one = records(number)
        fingerprints.append(GONE if one is None else one.fingerprint)
        if one is not None:
            wanted = wants(one)
            folders.add(number, wanted.folders)
            aliased.add(number, wanted.aliased)
            others.add(number, wanted.others)
            cut.add(number, _cut(wanted.others))
            numbered.update(*map(_numbered, wanted))
    of_folders = folders.sorted()
    starts = np.ones(len(of_folders[0]), bool)
    starts[1:] = of_folders[0][1:] != of_folders[0][:-1]
    starts[of_folders[2]] = True
    pairs = np.array(sorted(numbered), np.uint32).reshape(-1, 2)
    none = np.zeros(0, np.uint32)
    tables = (
        of_folders,
        aliased.sorted(),
        others.sorted(),
        (pairs[:, 0], pairs[:, 1], none),
        cut.sorted(),
        (none, np.unique(of_folders[1][starts]), none),
    )
    columns = (np.ascontiguousarray(column, "<u4") for table in tables for column in table)
    return fingerprints, b"".join(
        part for one in columns for part in (len(one).to_bytes(8, "little"), one.tobytes())
    )


class _TableRows:
    """Paths and shards, collected for a table."""

    def __init__(self) -> None:
        self._sums: list[NDArray[np.uint32]] = [np.zeros(0, np.uint32)]
        self._hashes: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
        self._shards: list[NDArray[np.uint32]] = [np.zeros(0, np.uint32)]

    def add(self, shard: int, paths: list[bytes]) -> None:
        if paths:
            self._sums.append(np.fromiter(map(zlib.crc32, paths), np.uint32, len(paths)))
            # Python's own hash: 64 bits with a key that no shard can know. It ends with this process.
            self._hashes.append(np.fromiter(map(hash, paths), np.int64, len(paths)))
            self._shards.append(np.full(len(paths), shard, np.uint32))

    def sorted(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.int64]]:
        """Return the sums, shards and breaks of the table."""
        sums, hashes = np.concatenate(self._sums), np.concatenate(self._hashes)
        order = np.argsort(sums, kind="stable")
        sums, hashes = sums[order], hashes[order]
        clash = (sums[1:] == sums[:-1]) & (hashes[1:] != hashes[:-1])
        if clash.any():
            chosen = np.flatnonzero(np.isin(sums, sums[1:][clash]))
            inner = np.lexsort((hashes[chosen], sums[chosen]))
            order[chosen], hashes[chosen] = order[chosen][inner], hashes[chosen][inner]
            clash = (sums[1:] == sums[:-1]) & (hashes[1:] != hashes[:-1])
        return sums, np.concatenate(self._shards)[order], np.flatnonzero(clash) + 1


def _numbered(paths: Iterable[bytes]) -> Iterator[tuple[int, int]]:
    """Return the sum of the path without its number, and the number, for each path that ends like `a~2`."""
    for path in paths:
        if b"~" in path:
            folder, name = names.split_folder(path)
            found = names.number_of(name)
            if found is not None:
                yield zlib.crc32(folder + found[0]), found[1]


def _cut(paths: list[bytes]) -> list[bytes]:
    """Return the shortened paths of those whose name has to be cut to get a number."""
    found = []
    for path in paths:
        if len(path) > STEM_MAX:
            folder, name = names.split_folder(path)
            found += [folder + stem for stem in sorted(stems(name)) if stem != name]
    return found
