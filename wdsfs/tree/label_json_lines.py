"""Label files in JSON lines: their rows. Each line is an object."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from wdsfs.tree.label_files import (
    LINE_MAX,
    LabelFile,
    OpenFile,
    Row,
    columns_text,
    label_error,
    open_text,
    shorten,
    value_of,
)


def read_json_lines(file: LabelFile, open_file: OpenFile) -> Iterator[Row]:
    """Yield the rows of a file of JSON lines. Raises ViewError, ShardErrors, OSErrors."""
    with open_text(file, open_file) as stream:
        for line, text in enumerate(iter(lambda: stream.readline(LINE_MAX + 1), b""), 1):
            if text.strip():
                yield _row_of(file, line, _parse_object(file, line, text))


def _parse_object(file: LabelFile, line: int, text: bytes) -> dict[str, Any]:
    """Return the object in a line. Raises ViewError."""
    if len(text) > LINE_MAX:
        raise label_error(file, line, f"is longer than {LINE_MAX >> 20} MiB; one object in each line is needed")
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise label_error(file, line, f"is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise label_error(file, line, "is not a JSON object")
    return row


def _row_of(file: LabelFile, line: int, row: dict[str, Any]) -> Row:
    name = next((name for name in file.key_names if name in row), None)
    if name is None:
        what = " or ".join(map(repr, file.key_names))
        raise label_error(file, line, f"has no field {what}; it has {columns_text(row)}")
    key = value_of(file, line, name, row[name])
    if key is None or isinstance(row[name], dict | list | bool):
        raise label_error(file, line, f"the field {name!r} is not a key: {shorten(row[name])}")
    values = {
        column: value_of(file, line, column, value)
        for column, value in row.items()
        if column != name and file.shows(column)
    }
    return key, line, {column: value for column, value in values.items() if value is not None}
