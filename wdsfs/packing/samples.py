"""Groups the files of trees into samples, and gives them their names in the tar.

Semantics decision: what is in a sample of the packed set is what `names.split` finds there, nothing else. A file
that would be in no sample, or in another one, is refused; with `leave_out` it is left out.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator

import numpy as np
import xxhash
from numpy.typing import NDArray

from wdsfs import names
from wdsfs.errors import CommitError
from wdsfs.packing.changes import DOTTED_KEY, HIDDEN, META, NO_EXTENSION, ONLY_CASE, OTHER_STEM, RESERVED
from wdsfs.packing.file_table import FileTable, FoundDirectory, LeftOut
from wdsfs.packing.layouts import CLASSES, SAMPLES, Layout

OUTSIDE = "is outside of a sample: in --layout samples its files are in a directory of its own"
OUTSIDE_CLASS = "is outside of a class: in --layout classes each class is a directory"

NO_CLASS = -1


class Samples:
    """The samples of trees, by number, in the order of the walk.

    `sizes` are bytes of content. `classes` are the names of all classes, sorted; `class_of` has the class of each
    sample (NO_CLASS outside of the layout classes), `directory_of` the number of the directory of its files;
    `starts` has its first place in `rows`, which has the rows of all files.
    """

    def __init__(self, table: FileTable, layout: Layout) -> None:
        self.table, self.layout = table, layout
        self.classes: list[bytes] = []
        self._rows, self._starts = array("q"), array("q")
        self._directories, self._classes = array("i"), array("i")
        self.class_of = self.directory_of = np.zeros(0, np.int32)
        self.sizes = np.zeros(0, np.int64)
        self.starts = np.zeros(1, np.int64)
        self.rows = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._directories)

    def begin(self, directory: int, label: int) -> None:
        """Begin a sample, whose files are in this directory."""
        self._starts.append(len(self._rows))
        self._directories.append(directory)
        self._classes.append(label)

    def add(self, row: int) -> None:
        """Add a file to the sample that was begun last."""
        self._rows.append(row)

    def finish(self) -> None:
        """All samples are there: make columns of them, without a copy."""
        if not len(self):
            return
        self._starts.append(len(self._rows))
        self.rows, self.starts = np.frombuffer(self._rows, np.int64), np.frombuffer(self._starts, np.int64)
        self.class_of = np.frombuffer(self._classes, np.int32)
        self.directory_of = np.frombuffer(self._directories, np.int32)
        self.sizes = np.add.reduceat(np.frombuffer(self.table.sizes, np.int64)[self.rows], self.starts[:-1])

    def directory_number(self, sample: int) -> int:
        """The number of the directory that has the files of a sample."""
        return self._directories[sample]

    def _directory(self, sample: int) -> FoundDirectory:
        return self.table.directories[self._directories[sample]]

    def key(self, sample: int) -> bytes:
        """The key of a sample in the tar."""
        directory = self._directory(sample)
        if self.layout.name == SAMPLES:
            return directory.path
        name = self.table.name(self._rows[self._starts[sample]])
        return directory.prefix + name.partition(b".")[0]

    def prefix(self, directory: int) -> bytes:
        """What stands in front of the name of a file in this directory, in its name in the tar."""
        found = self.table.directories[directory]
        if self.layout.name != SAMPLES:
            return found.prefix
        return names.split_folder(found.path)[0] if self.layout.full else found.path + b"."

    def rows_of(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows of the files of these samples, in order, and where among them each sample starts."""
        counts = self.starts[numbers + 1] - self.starts[numbers]
        starts = np.cumsum(counts) - counts
        within = np.arange(int(counts.sum())) - np.repeat(starts, counts)
        return self.rows[np.repeat(self.starts[numbers], counts) + within], starts


def group(table: FileTable, layout: Layout, left_out: LeftOut, class_column: bytes | None = None) -> Samples:
    """Return the samples; files of none go to `left_out`. `class_column` is added to each sample of a class.

    Raises CommitError for two samples of one key, and for a sample that has this column already.
    """
    found = _Grouping(table, layout, left_out, class_column).run()
    if len(table.roots) > 1:
        _refuse_equal_keys(found)
    return found


class _Grouping:
    def __init__(self, table: FileTable, layout: Layout, left_out: LeftOut, class_column: bytes | None) -> None:
        self.table, self.layout, self.left_out, self.class_column = table, layout, left_out, class_column
        self.samples = Samples(table, layout)

    def run(self) -> Samples:
        self.samples.classes = self._class_names()
        labels = {name: number for number, name in enumerate(self.samples.classes)}
        for number, directory in enumerate(self.table.directories):
            if self.layout.name == SAMPLES:
                self._sample_directory(number, directory)
            else:
                label = labels.get(_class_of(directory), NO_CLASS)
                self._files(number, directory, label)
        self.samples.finish()
        return self.samples

    def _class_names(self) -> list[bytes]:
        if self.layout.name != CLASSES:
            return []
        return sorted({_class_of(one) for one in self.table.directories if one.path})

    def _refuse(self, directory: FoundDirectory, name: bytes, reason: str) -> None:
        self.left_out.refuse(self.table.path_of(directory) + b"/" + name, reason)

    def _sample_directory(self, number: int, directory: FoundDirectory) -> None:
        """Take the files of a directory as one sample."""
        base = directory.path.rpartition(b"/")[2]
        whole = None if directory.path else OUTSIDE
        if b"." in base:
            whole = DOTTED_KEY
        start, begun, seen = (base + b".") if self.layout.full else b"", False, set[bytes]()
        for row, name in enumerate(self.table.names_in(directory), directory.first):
            reason = whole
            if reason is None and not name.startswith(start):
                reason = OTHER_STEM
            extension = name[len(start) :]
            reason = reason or _wrong_extension(extension, seen)
            if reason is None and names.is_meta(directory.path + b"." + extension):
                reason = META
            if reason is not None:
                self._refuse(directory, name, reason)
                continue
            seen.add(extension.lower())
            if not begun:
                self.samples.begin(number, NO_CLASS)
                begun = True
            self.samples.add(row)

    def _files(self, number: int, directory: FoundDirectory, label: int) -> None:
        """Take the files of a directory as samples by what their names begin with."""
        whole = META if names.is_meta(directory.prefix) else None
        if self.layout.name == CLASSES and not directory.path:
            whole = OUTSIDE_CLASS
        last, seen = None, set[bytes]()
        for row, name in enumerate(self.table.names_in(directory), directory.first):
            stem, dot, extension = name.partition(b".")
            if stem != last:
                seen = set()
            reason = whole or (None if stem else HIDDEN) or (None if dot else NO_EXTENSION)
            reason = reason or _wrong_extension(extension, seen)
            if reason is None and not directory.path and names.is_meta(name):
                reason = META
            if reason is not None:
                self._refuse(directory, name, reason)
                continue
            if stem != last:
                self.samples.begin(number, label)
                last = stem
            seen.add(extension.lower())
            if label != NO_CLASS and self.class_column is not None and extension.lower() == self.class_column:
                self._refuse_column(directory, name)
            self.samples.add(row)

    def _refuse_column(self, directory: FoundDirectory, name: bytes) -> None:
        where = os.fsdecode(self.table.path_of(directory) + b"/" + name)
        raise CommitError(
            f"{where} is the column that the class of each sample would be written to: name another one with "
            "--class-column, or use --class-as none, or --layout files"
        )


def _class_of(directory: FoundDirectory) -> bytes:
    return directory.path.partition(b"/")[0]


def _wrong_extension(extension: bytes, seen: set[bytes]) -> str | None:
    """Return why a sample cannot have a member of this extension, beside those that it has."""
    if not extension:
        return NO_EXTENSION
    if extension.startswith(b"."):
        return HIDDEN
    if extension in names.RESERVED:
        return RESERVED
    return ONLY_CASE if extension.lower() in seen else None


def _refuse_equal_keys(samples: Samples) -> None:
    """Raise CommitError if two samples have one key: they lie in different trees."""
    sums: NDArray[np.uint64] = np.fromiter(
        (xxhash.xxh3_64_intdigest(samples.key(number)) for number in range(len(samples))), np.uint64, len(samples)
    )
    order = np.argsort(sums, kind="stable")
    again = np.flatnonzero(sums[order][1:] == sums[order][:-1])
    for one, other in _pairs(order, again):
        if samples.key(one) == samples.key(other):
            table = samples.table
            places = [table.directories[samples.directory_number(number)] for number in (one, other)]
            where = " and ".join(os.fsdecode(table.path_of(place)) for place in places)
            raise CommitError(
                f"the key {os.fsdecode(samples.key(one))!r} comes twice, in {where}: pack the directory above "
                "them, so that the names of both are parts of the keys"
            )


def _pairs(order: NDArray[np.int64], again: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    # Keys with one sum are few: two of them at a time are enough.
    return ((int(order[at]), int(order[at + 1])) for at in again)
