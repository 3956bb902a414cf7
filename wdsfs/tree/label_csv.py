"""Label files in CSV and TSV: their rows. The first line names the columns."""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Iterator
from typing import TextIO

from wdsfs.tree.label_files import (
    COLUMNS_MAX,
    LINE_MAX,
    TSV,
    LabelFile,
    OpenFile,
    Row,
    key_column,
    label_error,
    open_text,
    shorten,
)


def read_csv(file: LabelFile, open_file: OpenFile) -> Iterator[Row]:
    """Yield the rows of a file of CSV or TSV. Raises ViewError, ShardErrors, OSErrors."""
    delimiter = "\t" if file.kind == TSV else ","
    before = csv.field_size_limit(LINE_MAX)
    with open_text(file, open_file) as raw:
        stream = io.TextIOWrapper(raw, "utf-8-sig", "surrogateescape", newline="")
        given = _Lines(file, stream)
        lines = csv.reader(given, delimiter=delimiter, strict=True)
        try:
            columns = next(lines, [])
            key = _checked_columns(file, columns)
            given.next_row()
            for fields in lines:
                given.next_row()
                if not fields:  # an empty line
                    continue
                if len(fields) != len(columns):
                    raise label_error(
                        file, lines.line_num, f"has {len(fields)} fields; the first line has {len(columns)}"
                    )
                # Semantics decision: an empty field is no value, hence no file: CSV has no other way to write
                # that.
                shown = {
                    name: os.fsencode(text)
                    for name, text in zip(columns, fields, strict=True)
                    if text and name != columns[key] and file.shows(name)
                }
                yield os.fsencode(fields[key]), lines.line_num, shown
        except csv.Error as error:
            raise label_error(file, lines.line_num, str(error)) from None
        finally:
            csv.field_size_limit(before)


class _Lines:
    """The lines of a CSV file, with a limit for the length of a row: a value in quotes may have many lines."""

    def __init__(self, file: LabelFile, stream: TextIO) -> None:
        self._file, self._stream = file, stream
        self._line = self._length = 0  # the lines until now, and the characters of this row

    def next_row(self) -> None:
        self._length = 0

    def __iter__(self) -> Iterator[str]:
        while line := self._stream.readline(LINE_MAX + 1):
            self._line += 1
            self._length += len(line)
            if self._length > LINE_MAX:
                raise label_error(self._file, self._line, f"is part of a row of more than {LINE_MAX >> 20} MiB")
            yield line


def _checked_columns(file: LabelFile, columns: list[str]) -> int:
    """Return the place of the key among the columns of a CSV file. Raises ViewError."""
    if len(columns) > COLUMNS_MAX:
        raise label_error(file, 1, f"has {len(columns):,} columns; the limit is {COLUMNS_MAX:,}")
    twice = next((name for name, count in Counter(columns).items() if count > 1), None)
    if twice is not None:
        raise label_error(file, 1, f"has two columns {shorten(twice)}")
    return columns.index(key_column(file, columns))
