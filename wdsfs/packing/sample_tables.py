"""Tables whose rows describe the samples of `pack`: a row's values become members of its sample.

Rows are looked up by the key of the sample, in the table that `tree/label_table.py` keeps in the cache: once to
measure all samples, and again when a shard is written, so that no value stays in memory.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from wdsfs.door.shard_door import DOOR
from wdsfs.errors import CommitError, UsageError, several
from wdsfs.names import KEY_COLUMN, Reading, lower_case, readable
from wdsfs.packing import reasons
from wdsfs.packing.cluster_units import changed_since_planned
from wdsfs.packing.file_samples import Samples
from wdsfs.shards import Fingerprint
from wdsfs.tar.headers import BLOCK, padded
from wdsfs.tree.composition import Column
from wdsfs.tree.label_files import (
    KEY_COLUMN_WAY_OUT,
    TABLE,
    LabelFile,
    LabelFiles,
    columns_text,
    fingerprints_of,
    label_files,
    text_of_files,
)
from wdsfs.tree.label_names import Uses
from wdsfs.tree.label_table import (
    NAMED,
    OpenLabels,
    guess_remarks,
    missing_text,
    open_labels,
    refuse_column,
    refuse_shared,
)

AT_ONCE = 10_000  # samples whose rows are looked up together

Added = Sequence[tuple[bytes, bytes]]  # members that a sample gets beside its files: extension and content
Row = dict[bytes, bytes]  # values by column


class _Table(NamedTuple):
    """Files that are one table. Names in it are relative to `below`, a path of a folder with its last slash."""

    files: LabelFiles
    fingerprints: tuple[Fingerprint, ...]
    below: bytes


class SampleTables:
    """The tables of `--table`, and the `columns` of them that become members; without any all columns do.

    Semantics decision: a table in a folder of `directories` has the files in this folder, if there are any besides
    it, by paths from there: Hugging Face's ImageFolder has such a table in each split.

    `extensions` are those of the members, in lower case, each with the option that renames it. After `measure`,
    `sizes` has the bytes of content that each sample gets, and `lengths` those in the tar. Raises UsageError,
    ViewError, ShardErrors. `with_keys`: each sample also gets KEY_COLUMN.
    """

    def __init__(
        self,
        texts: Sequence[str],
        columns: Sequence[Column],
        directories: Sequence[str],
        *,
        with_keys: bool = False,
    ) -> None:
        self._with_keys, self._columns = with_keys, columns
        self._tables: list[_Table] = []
        for text in texts:
            named = label_files(text, TABLE, Reading(last_dot=with_keys))
            for below, some in itertools.groupby(named, lambda file: _folder_of(file, directories)):
                files = tuple(some)
                self._tables.append(_Table(files, fingerprints_of(files, DOOR.look), below))
        self.guesses: list[str] = []  # which columns have the keys
        self.remarks: list[str] = []  # rows and samples without a partner, after `measure`
        self.extensions = self._named()

    @property
    def paths(self) -> tuple[bytes, ...]:
        """The files of the tables."""
        return tuple(path for table in self._tables for file in table.files for path in file.parts)

    def _named(self) -> dict[bytes, str]:
        """Return `extensions`. Raises UsageError for a column that cannot be one, or that no table has."""
        there: dict[bytes, None] = {}
        for table in self._tables:
            with open_labels(table.files, table.fingerprints) as labels:
                for name in () if self._columns else labels.columns:
                    refuse_column(table.files[0], name)
                there |= dict.fromkeys(labels.columns)
                self.guesses += guess_remarks(TABLE, labels)
        pairs = [(name, column.name or name) for column in self._columns for name in column.alternatives]
        extensions = dict[bytes, str]()
        for name, extension in pairs or [(name, name) for name in there]:
            text, lower = readable(name), lower_case(extension)
            if name not in there:
                raise UsageError(
                    f"--columns: no table has {text!r}; columns: {columns_text(map(readable, there))}"
                )
            reason = reasons.misread(b"sample", extension)
            if lower in extensions and not self._columns:
                reason = "differs from another one in letter case only, and readers take the two for one"
            if self._with_keys and lower == KEY_COLUMN:
                reason = "it gets the keys with their dots"
            if reason is not None:
                raise UsageError(f"--table: the column {text!r}: {reason}; rename it: --columns NAME={text}")
            extensions[lower] = f"--columns NAME={text}"
        return extensions | ({KEY_COLUMN: "--key-ends first-dot"} if self._with_keys else {})

    def members_of(self, keys: Sequence[bytes], uses: Sequence[list[Uses]] = ()) -> list[Added]:
        """Return the members that the samples of these keys get; none for a sample without a row.

        `uses` gets which rows of each table are used. Raises CommitError for a sample with two
        rows, ViewError, ShardErrors.
        """
        rows: list[Row] = [{} for _ in keys]
        for at, (files, fingerprints, below) in enumerate(self._tables):
            names = {key: key.removeprefix(below) for key in keys if key.startswith(below)}
            with open_labels(files, fingerprints) as labels:
                there = labels.find([*names.values()])
            for some in uses[at : at + 1]:
                some.append(OpenLabels.uses(there.values()))
            if fingerprints_of(files, DOOR.look) != fingerprints:
                raise changed_since_planned(files[0].path)
            for key, row in zip(keys, rows, strict=True):
                given = there.get(names[key], ()) if key in names else ()
                if len(given) > 1 or (given and not row.keys().isdisjoint(given[0].values)):
                    text = "has several rows: write one, with a JSON list in a column that has several values"
                    text += "" if self._with_keys else "; if they are for files with dots: --key-ends last-dot"
                    raise CommitError(f"{files[0].text}: the sample {readable(key)!r} {text}")
                row |= given[0].values if given else {}
        own = [((KEY_COLUMN, key),) if self._with_keys else () for key in keys]
        return [(*key, *self._renamed(row)) for key, row in zip(own, rows, strict=True)]

    def _renamed(self, row: Row) -> Iterator[tuple[bytes, bytes]]:
        if not self._columns:
            yield from row.items()
        for column in self._columns:
            some = next((name for name in column.alternatives if name in row), None)
            if some is not None:
                yield column.name or some, row[some]

    def measure(self, samples: Samples) -> None:
        """Look up the rows of all samples. Raises as `members_of`, and CommitError if there are none."""
        folders = [directory.prefix for directory in samples.table.directories]
        for at, table in enumerate(self._tables):
            if not any(folder.startswith(table.below) for folder in folders):
                self._tables[at] = table._replace(below=b"")
        without, first = 0, list[bytes]()
        self.sizes, self.lengths = np.zeros(len(samples), np.int64), np.zeros(len(samples), np.int64)
        uses = [list[Uses]() for _ in self._tables]
        for start in range(0, len(samples) if self._tables or self._with_keys else 0, AT_ONCE):
            numbers = range(start, min(start + AT_ONCE, len(samples)))
            keys = [*map(samples.key, numbers)]
            for number, key, added in zip(numbers, keys, self.members_of(keys, uses), strict=True):
                self.sizes[number] = sum(len(content) for _, content in added)
                self.lengths[number] = sum(BLOCK + padded(len(content)) for _, content in added)
                if len(added) == self._with_keys:
                    without, first = without + 1, first if len(first) == NAMED else [*first, key]
        if without and self._tables:
            text = f"samples without a row: {without:,} of {len(samples):,}"
            self.remarks.append(f"--table: {text}: {several([*map(readable, first)])}")
        for table, some in zip(self._tables, uses, strict=True):
            self._compare(table, some)

    def _compare(self, table: _Table, uses: Sequence[Uses]) -> None:
        """Remark on rows of no sample. Raises CommitError if all are, ViewError for a row of several samples."""
        with open_labels(table.files, table.fingerprints) as labels:
            refuse_shared(labels, uses)
            missing = labels.missing(uses)
        if missing.number or not missing.lines:
            text = missing_text(missing, "row", uses)
            text = f"--table {text_of_files(table.files)}: {text}"
            if not any(map(len, uses)):
                raise CommitError(*self.remarks, f"{text}; {KEY_COLUMN_WAY_OUT}")
            self.remarks.append(text)


def _folder_of(file: LabelFile, directories: Sequence[str]) -> bytes:
    """Return the path of the folder of a table below the packed folder, with its last slash; b"" for any other."""
    place = os.path.realpath(os.path.dirname(file.path)) + b"/"
    tops = (os.path.realpath(os.fsencode(directory)) + b"/" for directory in directories)
    return next((place[len(top) :] for top in tops if place.startswith(top)), b"")
