"""How a set is distributed, counted from its records: sizes per column, samples per shard, samples per class.

No member is read. What is kept does not grow with samples: a number for each shard, 65 for each column, and one
for each class, up to `CLASSES_MAX`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdsfs.errors import ShardError
from wdsfs.index.record import STRAY, Record
from wdsfs.tree.indexing import indexed
from wdsfs.tree.shard_set import ShardSet

UNREADABLE = -1  # instead of the samples of a shard
BINS = 65  # sizes by the number of their bits: 0, 1, 2 to 3, 4 to 7 ... bytes
COLUMNS_MAX = 1000  # extensions that are counted apart
CLASSES_MAX = 1_000_000  # classes that are counted apart


class Distribution:
    """The counts of a set, added shard by shard, in the order of the set.

    `sizes` has the files of each column (an extension) by the bits of their size. `samples` are those of each
    shard, or UNREADABLE. `classes` are samples by class: the folder of their key, or that of `count_classes`.
    `columns_left` counts extensions beyond the limit, in each shard; `samples_left` the samples of classes beyond
    theirs, `in_no_class` those without one.
    """

    def __init__(self) -> None:
        self.sizes: dict[bytes, NDArray[np.int64]] = {}
        self.columns_left = 0
        self.samples = array("q")
        self.classes: dict[bytes, int] = {}
        self.in_no_class = self.samples_left = 0
        self.class_name = "folder"  # what a class is, for titles

    def add(self, record: Record) -> None:
        """Add the sizes and the number of samples of a shard."""
        self.samples.append(record.samples)
        for extension, sizes in sizes_by_extension(record):
            counts = self.sizes.get(extension)
            if counts is None:
                if len(self.sizes) >= COLUMNS_MAX:
                    self.columns_left += 1
                    continue
                counts = self.sizes[extension] = np.zeros(BINS, np.int64)
            counts += _by_bits(sizes)

    def add_unreadable(self) -> None:
        """Add a shard that cannot be read."""
        self.samples.append(UNREADABLE)

    def add_classes(self, record: Record) -> None:
        """Add the samples of a record by the folders of their keys."""
        for folder, count in _samples_of_folders(record):
            name = record.folder_path(folder)
            if not name:
                self.in_no_class += count
            elif name in self.classes or len(self.classes) < CLASSES_MAX:
                self.classes[name] = self.classes.get(name, 0) + count
            else:
                self.samples_left += count


def distribution_of(below: ShardSet) -> Distribution:
    """The distribution of all shards of a set; classes are the folders of keys."""
    found = Distribution()
    for number in range(len(below)):
        try:
            record = indexed(below.record, number)
        except ShardError:
            found.add_unreadable()
            continue
        found.add(record)
        found.add_classes(record)
    return found


def count_classes(found: Distribution, classes: ShardSet, name: str) -> None:
    """Replace the classes by those of a set whose folders are its classes (`tree/classes.py`), called `name`."""
    found.classes, found.in_no_class, found.samples_left, found.class_name = {}, 0, 0, name
    for number in range(len(classes)):
        try:
            found.add_classes(indexed(classes.record, number))
        except ShardError:
            continue
    counted = sum(found.classes.values()) + found.samples_left
    found.in_no_class = max(sum(count for count in found.samples if count != UNREADABLE) - counted, 0)


def sizes_by_extension(record: Record) -> Iterator[tuple[bytes, NDArray[Any]]]:
    """The sizes (bytes) of the members of samples, by extension."""
    if not record.members:
        return
    in_sample = members_in_samples(record)
    extensions, sizes = record.array("member.ext")[in_sample], record.array("member.size")[in_sample]
    order = np.argsort(extensions, kind="stable")
    numbers, starts = np.unique(extensions[order], return_index=True)
    bounds = [*starts.tolist(), len(order)]
    for at, number in enumerate(numbers.tolist()):
        yield record.extension_name[number], sizes[order[bounds[at] : bounds[at + 1]]]


def members_in_samples(record: Record) -> NDArray[np.bool_]:
    """For each member, True if it is in a sample."""
    stray = (record.array("entry.flags") & STRAY).astype(bool)
    firsts = record.array("entry.member").astype(np.int64)
    return ~np.repeat(stray, firsts[1:] - firsts[:-1])


def _by_bits(sizes: NDArray[Any]) -> NDArray[np.int64]:
    # frexp gives the bits of a whole number, exactly up to 2**53 bytes.
    bits = np.frexp(sizes.astype(np.float64))[1]
    return np.bincount(bits, minlength=BINS)[:BINS]


def _samples_of_folders(record: Record) -> Iterator[tuple[int, int]]:
    """The folders of a record that hold samples themselves, and how many."""
    is_sample = (record.array("entry.flags") & STRAY) == 0
    before = np.concatenate([[0], np.cumsum(is_sample)])
    bounds = record.array("folder.entry").astype(np.int64)
    counts = before[bounds[1:]] - before[bounds[:-1]]
    for folder in np.flatnonzero(counts).tolist():
        yield folder, int(counts[folder])
