"""The one reader of label files and lists of keys: their rows or keys, whatever the format is (READERS)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from wdsfs.tree import label_csv, label_json_lines, label_parquet, label_sqlite, label_text
from wdsfs.tree.label_files import (
    CSV,
    JSON_LINES,
    KEY_MAX,
    PARQUET,
    ROW_BYTES,
    SQLITE,
    TEXT,
    TSV,
    LabelFile,
    OpenFile,
    Row,
    open_text,
)

READERS: dict[str, Callable[[LabelFile, OpenFile], Iterator[Row]]] = {
    CSV: label_csv.read_csv,
    TSV: label_csv.read_csv,
    JSON_LINES: label_json_lines.read_json_lines,
    SQLITE: label_sqlite.read_sqlite,
    PARQUET: label_parquet.read_parquet,
}


def read_rows(file: LabelFile, open_file: OpenFile) -> Iterator[Row]:
    """Yield the rows of a label file. Raises ViewError, which names file, line and field, and OSError."""
    yield from READERS[file.kind](file, open_file)


def read_keys(file: LabelFile, open_file: OpenFile) -> Iterator[tuple[list[bytes], Sequence[int]]]:
    """Yield the keys of a list, some MiB of them at a time, and their lines. Raises as `read_rows`."""
    if file.kind == TEXT:
        with open_text(file, open_file) as stream:
            yield from label_text.read_keys(file, stream.read)
        return
    keys, lines, size = list[bytes](), list[int](), 0
    for key, line, _ in read_rows(file, open_file):
        keys.append(key)
        lines.append(line)
        size += ROW_BYTES + len(key)
        if size > KEY_MAX:
            yield keys, lines
            keys, lines, size = [], [], 0
    yield keys, lines
