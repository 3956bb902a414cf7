"""The one reader of label files and lists of keys, whatever the format is; and what was read, as a table by key.

READERS has the formats. A file of any format is read once into a table in the cache (SQLite: key, line, values),
so that memory stays flat and a shard's keys are looked up in microseconds. Its key in the cache contains the
fingerprint of the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import sqlite3
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from wdsfs import names
from wdsfs.cache import file_cache
from wdsfs.cache.file_cache import NewFile
from wdsfs.door.shard_door import DOOR
from wdsfs.errors import MissingShard, UnreadableShard
from wdsfs.shards import Fingerprint
from wdsfs.tree import label_csv, label_json_lines, label_parquet, label_sqlite, label_text
from wdsfs.tree.label_files import (
    COLUMNS_MAX,
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
    label_error,
    open_text,
)

FORMAT, KIND = "2", "labels"  # of tables in the cache
_KEYS_MAX = 500  # keys in one query
_BATCH = 10_000  # rows written at a time
_VALUE = struct.Struct("<HI")  # number of the column, bytes

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


class OpenLabels:
    """A label file, opened for lookups. Made by `open_labels`."""

    def __init__(self, path: bytes, fingerprint: Fingerprint, db: sqlite3.Connection) -> None:
        self.path, self.fingerprint = path, fingerprint
        self._db = db
        self._columns = dict(db.execute("SELECT number, name FROM columns"))

    def find(self, keys: Sequence[bytes]) -> dict[bytes, list[dict[bytes, bytes]]]:
        """Return the rows of each of these keys that has any: values by extension."""
        rows: dict[bytes, list[dict[bytes, bytes]]] = {}
        for start in range(0, len(keys), _KEYS_MAX):
            some = keys[start : start + _KEYS_MAX]
            marks = ",".join("?" * len(some))
            for key, packed in self._db.execute(f"SELECT key, packed FROM labels WHERE key IN ({marks})", some):
                rows.setdefault(key, []).append(self._unpack(packed))
        return rows

    def _unpack(self, packed: bytes) -> dict[bytes, bytes]:
        values, at = {}, 0
        while at < len(packed):
            number, size = _VALUE.unpack_from(packed, at)
            at += _VALUE.size + size
            values[self._columns[number]] = packed[at - size : at]
        return values


@contextlib.contextmanager
def open_labels(
    file: LabelFile, fingerprint: Fingerprint, open_file: OpenFile = DOOR.open_shard
) -> Iterator[OpenLabels]:
    """Open a label file with this fingerprint, by its table in the cache.

    `open_file` opens it; SQLite opens a local one by its path.

    Raises MissingShard, UnreadableShard, IndexUnusable, ViewError for a file that does not contain labels.
    """
    with open_table(file, fingerprint, KIND, partial(_fill, file, open_file)) as fd:
        uri = f"file:/proc/self/fd/{fd}?mode=ro&immutable=1"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as db:
            yield OpenLabels(file.path, fingerprint, db)


@contextlib.contextmanager
def open_table(
    file: LabelFile, fingerprint: Fingerprint, kind: str, fill: Callable[[NewFile], tuple[str, int]]
) -> Iterator[int]:
    """Open the table of a label file, of this kind, in the cache; `fill` makes it. Raises as `open_labels`."""
    key = hashlib.blake2b(repr((FORMAT, *file, *fingerprint)).encode(), digest_size=16).hexdigest()
    cache, path = file_cache.cache(), os.fsdecode(file.path)
    try:
        table = cache.make(key, (kind,), fill)
        try:
            yield table.fd
        finally:
            os.close(table.fd)
    except FileNotFoundError:
        raise MissingShard(f"{file.text}: the file is gone") from None
    except file_cache.NoRoom as error:
        raise UnreadableShard(
            f"{path}: the cache {cache.directory} has no room for the table of its labels: {error}"
        ) from None
    except OSError as error:
        raise UnreadableShard(f"{path}: {error.strerror}") from None
    except sqlite3.Error as error:
        if error.sqlite_errorcode in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            cache.drop(key, kind)  # the next process makes it again
        raise UnreadableShard(f"the table of {path} in {cache.directory}: {error}") from None


def _fill(file: LabelFile, open_file: OpenFile, table: NewFile) -> tuple[str, int]:
    """Read a label file into a new table; returns the kind and the size (bytes) of that."""
    with contextlib.closing(sqlite3.connect(table.path)) as db:
        db.executescript(
            # A process that is killed leaves a file that no other process uses.
            "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;"
            "CREATE TABLE labels (key BLOB, line INTEGER, packed BLOB);"
            "CREATE TABLE columns (number INTEGER PRIMARY KEY, name BLOB);"
        )
        numbers: dict[str, int] = {}
        for batch in batches(read_rows(file, open_file)):
            packed = [(names.plain_key(key), line, _pack(file, line, row, numbers)) for key, line, row in batch]
            db.executemany("INSERT INTO labels VALUES (?, ?, ?)", packed)
            table.reserve(os.fstat(table.fd).st_size)
        columns = [(number, os.fsencode(name)) for name, number in numbers.items()]
        db.executemany("INSERT INTO columns VALUES (?, ?)", columns)
        db.execute("CREATE INDEX by_key ON labels (key)")
        db.commit()
    return KIND, os.fstat(table.fd).st_size


def batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Yield the rows in lists."""
    while batch := list(itertools.islice(rows, _BATCH)):
        yield batch


def _pack(file: LabelFile, line: int, values: dict[str, bytes], numbers: dict[str, int]) -> bytes:
    """Pack the values of a row; each column gets a number when it is first seen."""
    parts = []
    for column, value in values.items():
        number = numbers.get(column)
        if number is None:
            _check_name(file, line, column)
            if len(numbers) >= COLUMNS_MAX:
                raise label_error(file, line, f"too many fields, at {column!r}: the limit is {COLUMNS_MAX:,}")
            number = numbers[column] = len(numbers)
        parts += [_VALUE.pack(number, len(value)), value]
    return b"".join(parts)


def _check_name(file: LabelFile, line: int, column: str) -> None:
    try:
        fits = 0 < len(os.fsencode(column)) <= names.NAME_MAX
    except UnicodeEncodeError:
        fits = False
    if not fits or "/" in column or "\0" in column or column in (".", ".."):
        raise label_error(file, line, f"the column {column!r} cannot be the name of a file; rename it")
