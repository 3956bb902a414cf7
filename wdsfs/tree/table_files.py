"""Writes a table of a set to a file: Parquet, CSV or JSON lines, by the end of its name.

The file is written under a hidden name, synced and renamed: whole, or not there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet

from wdsfs.durable import Disk, new_file
from wdsfs.errors import ExportError, UsageError
from wdsfs.tree.table_rows import SHARD

ROWS, BYTES = 1 << 17, 64 << 20  # of a group in Parquet, about

Write = Callable[[Any], None]


@contextmanager
def _parquet(stream: Any, schema: Any) -> Iterator[Write]:
    repeating = [field.name for field in schema if pa.types.is_string(field.type)] + [SHARD]
    whole = {field.name: "DELTA_BINARY_PACKED" for field in schema if pa.types.is_int64(field.type)}
    with pa.parquet.ParquetWriter(
        stream, schema, compression="zstd", use_dictionary=repeating, column_encoding=whole
    ) as writer:
        yield writer.write_table


@contextmanager
def _csv(stream: Any, schema: Any) -> Iterator[Write]:
    with pa.csv.CSVWriter(stream, schema) as writer:
        yield writer.write_table


@contextmanager
def _json_lines(stream: Any, schema: Any) -> Iterator[Write]:
    def write(table: Any) -> None:
        for at, field in enumerate(table.schema):
            if pa.types.is_floating(field.type):  # JSON has no NaN and no infinity
                finite = pa.compute.if_else(pa.compute.is_finite(table[at]), table[at], None)
                table = table.set_column(at, field, finite)
        rows = (json.dumps(row, ensure_ascii=False) + "\n" for row in table.to_pylist())
        stream.write("".join(rows).encode())

    yield write


_FORMS: dict[str, Callable[[Any, Any], AbstractContextManager[Write]]] = {
    ".parquet": _parquet,
    ".csv": _csv,
    ".jsonl": _json_lines,
}


def check_name(path: str) -> None:
    """Raise UsageError for a file whose name tells no form."""
    if os.path.splitext(path)[1] not in _FORMS:
        raise UsageError(f"{path}: a table is a .parquet, a .csv or a .jsonl file; name one")


def write_table(path: str, schema: Any, parts: Iterable[Any]) -> None:
    """Write the parts of a table to a new file, or in the place of one. Raises ExportError, ShardErrors."""
    target, disk = os.fsencode(path), Disk()
    form = _FORMS[os.path.splitext(path)[1]]
    try:
        with new_file(disk, target) as fd:
            with open(fd, "wb", closefd=False) as stream, form(stream, schema) as write:
                _write_groups(write, parts)
            disk.sync(fd)
        disk.sync_directory(os.path.dirname(target))
    except OSError as error:
        raise ExportError(f"{path}: cannot be written: {error.strerror}") from None


def _write_groups(write: Write, parts: Iterable[Any]) -> None:
    """Write the parts, while the next ones are made: two groups are in memory."""
    with ThreadPoolExecutor(1) as thread:
        writing: Future[Any] = thread.submit(lambda: None)
        for group in _groups(parts):
            writing.result()
            writing = thread.submit(write, group)
        writing.result()


def _groups(parts: Iterable[Any]) -> Iterator[Any]:
    """Yield the parts, small ones together."""
    waiting: list[Any] = []
    rows = size = 0
    for part in parts:
        waiting.append(part)
        rows, size = rows + len(part), size + part.nbytes
        if rows >= ROWS or size >= BYTES:
            yield pa.concat_tables(waiting)
            waiting, rows, size = [], 0, 0
    if waiting:
        yield pa.concat_tables(waiting)
