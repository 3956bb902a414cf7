"""What a merged tree shows of a whole shard, in columns: the same as `MergedTree.listing` says name by name.

Nearly all names follow from the tables of the set: the plain name, or the number that is the rank of the shard
among those that want it. Where more is to be known (a folder has the name, or the number; different paths have one
checksum; samples share directories with folders), the tree is asked for these names alone.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsfs import names
from wdsfs.index.merged_names import STEM_MAX, Table, Tables
from wdsfs.index.record import Record
from wdsfs.inodes import MEMBER, SAMPLE, index_of, pack, position, unpack
from wdsfs.tree.merged_paths import TOP, MergedPlace, place_of
from wdsfs.tree.merged_tree import MergedTree
from wdsfs.tree.shown_columns import ShownColumns, columns_of
from wdsfs.tree.texts import Ints, Texts


class SharedFolder(NamedTuple):
    """A folder whose directory may have names of other shards, too; `appears` is False if this shard has no such
    folder, but files that lie in it."""

    place: MergedPlace
    appears: bool


class MergedColumns(NamedTuple):
    """The columns of a shard, and for each folder if it is shared."""

    shown: ShownColumns
    shared: list[SharedFolder | None]


def merged_columns_of(tree: MergedTree, number: int) -> MergedColumns:
    """The columns of a shard in a merged tree. Raises what `MergedTree.listing` raises."""
    shown, record = columns_of(tree, number), tree.lower.record(number)
    folders = [index_of(node.inode) for node in shown.folders]
    shared, doubtful = _shared(tree, record, folders, shown)
    first = len(shown.folders) - 1
    holder = shown.name_holder if tree.files_layout else shown.sample_holder
    wanted = shown.names.take(slice(first, first + len(holder)))
    prefixes = np.asarray(record.folder_prefix)[folders]
    sums = np.fromiter(map(zlib.crc32, wanted.to_list(), prefixes[holder].tolist()), np.uint32, len(holder))
    order = np.argsort(sums)  # neighbours in the tables are found much faster
    ranks, asked = np.empty(len(sums), np.int64), np.empty(len(sums), bool)
    ranks[order], asked[order] = _ranks(tree.paths.tables, number, sums[order])
    asked |= (ranks > 0) & (doubtful[holder] | (wanted.lengths > STEM_MAX))
    ranked = np.flatnonzero(~asked & (ranks > 0))
    shown = shown._replace(
        names=shown.names.replaced(first + ranked, _numbered(wanted.take(ranked), ranks[ranked] + 1))
    )
    rows = np.flatnonzero(asked)
    if tree.files_layout:
        found = _file_names(tree, number, shown.name_member[rows])
        return MergedColumns(shown._replace(names=shown.names.replaced(first + rows, found)), shared)
    return _asked_samples(tree, number, MergedColumns(shown, shared), rows)


def _numbered(wanted: Texts, numbers: Ints) -> Texts:
    """Names with these numbers. REQUIRES: none of them has to be cut."""
    different, which = np.unique(numbers, return_inverse=True)
    ends = Texts.of([names.numbered(b"", number) for number in different.tolist()])
    return Texts.chained([wanted, ends.take(which.reshape(-1))])


def _ranks(tables: Tables, shard: int, sums: NDArray[np.uint32]) -> tuple[Ints, NDArray[np.bool_]]:
    """How many shards before this one want each name, and where the tree has to be asked."""
    first, last = _rows(tables.others, sums)
    starts = np.asarray(tables.others.starts)
    asked = np.searchsorted(starts, first) < np.searchsorted(starts, last)
    for table in (tables.folders, tables.aliased):
        asked |= _has(table, sums)
    low, high, shards = first.copy(), last.copy(), np.asarray(tables.others.values)
    while (open_ := low < high).any():
        middle = np.minimum((low + high) // 2, len(shards) - 1)
        less = open_ & (shards[middle] < shard)
        low, high = np.where(less, middle + 1, low), np.where(open_ & ~less, middle, high)
    ranks = low - first
    return ranks, asked | ((ranks > 0) & _has(tables.numbered, sums))


def _rows(table: Table, sums: NDArray[np.uint32]) -> tuple[Ints, Ints]:
    """The rows of a table with these sums: the first, and the end."""
    column = np.asarray(table.sums, np.uint32)
    return np.searchsorted(column, sums), np.searchsorted(column, sums, "right")


def _has(table: Table, sums: NDArray[np.uint32]) -> NDArray[np.bool_]:
    first, last = _rows(table, sums)
    return np.asarray(first < last)


def _shared(
    tree: MergedTree, record: Record, folders: list[int], shown: ShownColumns
) -> tuple[list[SharedFolder | None], NDArray[np.bool_]]:
    """Which folders may have names of other shards, and in which a sample's files may have taken numbers."""
    places = [place_of(record, folder) for folder in folders]
    sums = np.array([zlib.crc32(place.path) for place in places], np.uint32)
    first, last = _rows(tree.paths.tables.folders, sums)
    plain = [record.folder_name[folder] for folder in folders[1:]]
    named = shown.names.take(np.arange(len(plain))).to_list()
    aliased = np.array([False, *(one != other for one, other in zip(plain, named, strict=True))])
    twins = aliased | _has(tree.paths.tables.others, sums)
    twins[0] = False
    shared = twins | (last - first > 1)
    shared[0] = True
    for folder in range(len(folders) - 1, 0, -1):  # children come after their parents
        if shared[folder]:
            shared[shown.folder_holder[folder]] = True
    pairs = zip([TOP, *places[1:]], shared.tolist(), strict=True)
    found = [SharedFolder(place, True) if one else None for place, one in pairs]
    return found, twins & (not tree.files_layout)


def _file_names(tree: MergedTree, number: int, members: Ints) -> Texts:
    """The names of these members, for which the tree is asked."""
    record = tree.lower.record(number)
    return Texts.of([tree.place_in(number, record, position(MEMBER, one))[1] for one in members.tolist()])


def _asked_samples(tree: MergedTree, number: int, columns: MergedColumns, rows: Ints) -> MergedColumns:
    """The columns with the names of the samples in these rows, for which the tree is asked. Files of samples that
    share the directory with a folder are put there."""
    shown, record = columns.shown, tree.lower.record(number)
    base = pack(tree.lower.tag(number), number, 0)
    named, twins = dict[int, bytes](), dict[int, MergedPlace]()
    for row in rows.tolist():
        sample = position(SAMPLE, int(shown.samples[row]))
        holder, _ = tree.place_in(number, record, position(MEMBER, record.entry_member[index_of(sample)]))
        if holder == base | sample:
            named[row] = tree.place_in(number, record, sample)[1]
        else:
            _, other, where = unpack(holder)
            twins[row] = place_of(tree.lower.record(other), index_of(where))
    at = np.array([*named], np.int64) + len(shown.folders) - 1
    shown = shown._replace(names=shown.names.replaced(at, Texts.of([*named.values()])))
    return _into_folders(tree, number, MergedColumns(shown, columns.shared), twins)


def _into_folders(
    tree: MergedTree, number: int, columns: MergedColumns, twins: dict[int, MergedPlace]
) -> MergedColumns:
    """The columns with the files of some samples, by row, in folders."""
    if not twins:
        return columns
    shown, shared = columns.shown, [*columns.shared]
    folders, samples = len(shown.folders), len(shown.samples)
    at = {one.place: folder for folder, one in enumerate(shared) if one is not None}
    for place in twins.values():
        if place not in at:
            at[place] = len(shared)
            shared.append(SharedFolder(place, False))
    more, rows, kept = len(shared) - folders, np.array([*twins]), np.ones(samples, bool)
    kept[rows] = False
    directory = np.arange(folders + samples)
    directory[folders:] = np.cumsum(kept) - 1 + len(shared)
    directory[folders + rows] = [at[place] for place in twins.values()]
    files = np.flatnonzero(np.isin(shown.name_holder, folders + rows))
    found = _file_names(tree, number, shown.name_member[files])
    texts = shown.names.replaced(files + folders - 1 + samples, found)
    of_samples = np.flatnonzero(kept) + folders - 1
    of_folders, of_files = slice(folders - 1), slice(folders - 1 + samples, None)
    parts = [texts.take(of_folders), Texts.of([b""] * more), texts.take(of_samples), texts.take(of_files)]
    return MergedColumns(
        shown._replace(
            folders=[*shown.folders, *shown.folders[:1] * more],
            folder_holder=np.append(shown.folder_holder, np.zeros(more, np.int64)),
            samples=shown.samples[kept],
            sample_holder=shown.sample_holder[kept],
            sample_mtime_ns=shown.sample_mtime_ns[kept],
            name_holder=directory[shown.name_holder],
            names=Texts.joined(parts),
        ),
        shared,
    )
