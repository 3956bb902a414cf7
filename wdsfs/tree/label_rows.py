"""Reads the rows of label files and lists of keys, whatever the format is: CSV, JSON lines, parquet, SQLite, text.

READERS has the formats. A database of another user is read within limits, and computes nothing.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import json
import os
import re
import shutil
import sqlite3
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from wdsfs import source
from wdsfs.door.urls import is_remote
from wdsfs.errors import StaleShard, UsageError
from wdsfs.shards import Fingerprint
from wdsfs.tree.label_files import (
    COLUMNS_MAX,
    CSV,
    JSON_LINES,
    KEY_MAX,
    LINE_MAX,
    NAMED,
    NO_KEY,
    PARQUET,
    ROW_BYTES,
    SQLITE,
    TEXT,
    TOO_LONG,
    TSV,
    LabelFile,
    OpenFile,
    Row,
    columns_text,
    key_column,
    label_error,
    note_typed_name,
    open_content,
    open_text,
    shorten,
    value_of,
)

VALUE_MAX = 64 << 20  # bytes of a value of SQLite
# Limits of reading: for each byte of the file, and the least. Pages of a damaged file may form a circle.
WORK, WORK_LEAST = 100, 1 << 20  # bytes of values, steps of SQLite's machine
_STEPS = 100_000  # between two checks of the limits
_WAL = slice(18, 20)  # of the header of a database: 2 for one with a log
_COPIES_TRIED = 5  # of a database that others write
_PRAGMAS = ((sqlite3.SQLITE_PRAGMA, "table_xinfo"), (sqlite3.SQLITE_PRAGMA, "trusted_schema"))  # that we use
_VIRTUAL = 2  # of a generated column that is not stored
_CREATES_TABLE = re.compile(r"CREATE\s+TABLE\b", re.I)
_BATCH = 10_000  # rows of parquet read at a time
_SHOWN = 200  # characters of pyarrow's message in ours

# -- CSV and TSV: the first line names the columns -------------------------------------------------------------


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


# -- JSON lines: each is an object ---------------------------------------------------------------------------


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


# -- parquet, by pyarrow: keys alone, without values -----------------------------------------------------------


def read_parquet(file: LabelFile, open_file: OpenFile) -> Iterator[Row]:
    """Yield the keys of a file of parquet. Raises ViewError, ShardErrors, OSErrors."""
    pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    with open_content(file.path, open_file) as stream:
        try:
            with parquet.ParquetFile(stream, memory_map=False, pre_buffer=False) as table:
                column = key_column(file, table.schema_arrow.names)
                lines = 0
                for batch in table.iter_batches(_BATCH, columns=[column]):
                    for line, value in enumerate(batch.column(0).to_pylist(), lines + 1):
                        key = value_of(file, line, column, value)
                        if key is None:
                            raise label_error(file, line, f"the column {column!r} is null in this row")
                        yield key, line, {}
                    lines += len(batch)
        except pyarrow.ArrowException as error:
            raise label_error(
                file, None, f"cannot be read as parquet: {str(error).partition(chr(10))[0][:_SHOWN]}"
            ) from None


# -- SQLite -----------------------------------------------------------------------------------------------------


def read_sqlite(file: LabelFile, open_file: OpenFile) -> Iterator[Row]:
    """Yield the rows of a table of SQLite. Raises ViewError, ShardErrors, OSErrors."""
    with _database(file.path, open_file) as (uri, size):
        bounds = _Bounds(size)
        try:
            with _guarded(uri, bounds) as db:
                yield from _table_rows(file, db, bounds)
        except sqlite3.Error as error:
            raise label_error(file, None, f"cannot be read as SQLite: {error}") from None


def _table_rows(file: LabelFile, db: sqlite3.Connection, bounds: _Bounds) -> Iterator[Row]:
    table = _table(file, db)
    columns, primary = _stored_columns(file, db, table)
    key = key_column(file, columns, primary if len(primary) == 1 else ())
    at = columns.index(key)
    cursor = db.execute(f"SELECT {', '.join(map(_quoted, columns))} FROM {_quoted(table)}")
    for line, row in enumerate(cursor, 1):
        name = value_of(file, line, key, row[at])
        if name is None:
            raise label_error(file, line, f"the column {key!r} is NULL in this row of {table!r}")
        values = {
            column: content
            for column, value in zip(columns, row, strict=True)
            if column != key and (content := value_of(file, line, column, value)) is not None
        }
        if bounds.spend(values.values()):
            raise label_error(
                file, line, f"the rows of {table!r} hold more than {WORK} times the bytes of the file"
            )
        yield name, line, values


def _stored_columns(file: LabelFile, db: sqlite3.Connection, table: str) -> tuple[list[str], list[str]]:
    """Return the shown columns of a table, and those of its primary key. Raises ViewError, sqlite3.Error."""
    about = db.execute(f"PRAGMA table_xinfo({_quoted(table)})").fetchall()
    primary = [name for _, name, *_, number, _ in about if number]
    keys = {*file.key_names, *(primary if file.is_list else ())}
    shown = [(name, hidden) for _, name, *_, hidden in about if file.shows(name) or name in keys]
    computed = next((name for name, hidden in shown if hidden == _VIRTUAL), None)
    if computed is not None:
        raise label_error(
            file,
            None,
            f"the column {computed!r} of {table!r} is computed by SQL in the file, and only stored columns are "
            "read; declare it STORED",
        )
    return [name for name, _ in shown], primary


def _table(file: LabelFile, db: sqlite3.Connection) -> str:
    schema = db.execute("SELECT type, name, rootpage, sql FROM sqlite_master").fetchall()
    tables = [
        name
        for type_, name, root, sql in schema
        if type_ == "table" and root and _CREATES_TABLE.match(sql or "") and not name.startswith("sqlite_")
    ]
    if file.table is None and len(tables) == 1:
        return str(tables[0])
    if file.table in tables:
        return str(file.table)
    computed = [name for type_, name, *_ in schema if type_ in ("table", "view") and name not in tables]
    if file.table in computed or (file.table is None and computed and not tables):
        name = file.table or computed[0]
        raise label_error(
            file,
            None,
            f"{name!r} is computed by SQL in the file, and wdsfs reads only stored tables; store it as a table: "
            f"CREATE TABLE labels AS SELECT * FROM {_quoted(name)}",
        )
    what = "name one of its tables" if file.table is None else f"has no table {file.table!r}"
    listed = ", ".join(tables[:NAMED]) or "none"
    raise label_error(
        file, None, f"{what}, as in {os.path.basename(os.fsdecode(file.path))}:TABLE; it has {listed}"
    )


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


@contextlib.contextmanager
def _database(path: bytes, open_file: OpenFile) -> Iterator[tuple[str, int]]:
    """Provide the URI of a database to read, and its size in bytes. Raises ShardError, OSError.

    Reading a file in WAL mode would create two files beside it. So it is read without its log; if there is a log,
    a copy of both is read. Of a remote database only the file itself is read.
    """
    with open_content(path, open_file) as stream:
        size = os.fstat(stream.fileno()).st_size
        has_log = 2 in stream.read(_WAL.stop)[_WAL]
        if has_log and not is_remote(path) and _size_of(path + b"-wal"):
            with _copied(path) as copy:
                yield f"{copy.as_uri()}?mode=rw", size + _size_of(path + b"-wal")
        elif has_log or is_remote(path):
            yield f"file:/proc/self/fd/{stream.fileno()}?mode=ro&immutable=1", size
        else:
            yield f"{Path(os.fsdecode(path)).as_uri()}?mode=ro", size


def _size_of(path: bytes) -> int:
    with contextlib.suppress(FileNotFoundError):
        return os.stat(path).st_size
    return 0


@contextlib.contextmanager
def _copied(path: bytes) -> Iterator[Path]:
    """Copy a database with its log for the block. Raises StaleShard if both change all the time, OSError."""
    with tempfile.TemporaryDirectory(prefix="wdsfs-labels-") as directory:
        copy = Path(directory, "copy")
        parts = {path: copy, path + b"-wal": copy.with_name("copy-wal")}
        for _ in range(_COPIES_TRIED):
            before = list(map(Fingerprint.at, parts))
            for part, to in parts.items():
                shutil.copyfile(part, to)
            if before == list(map(Fingerprint.at, parts)):
                break
        else:
            raise StaleShard(f"{os.fsdecode(path)} changes all the time")
        yield copy


class _Bounds:
    """The remaining cost of reading a database: steps of SQLite's machine, bytes of values."""

    def __init__(self, size: int) -> None:
        self.steps = self.bytes = WORK * size + WORK_LEAST

    def is_spent(self) -> bool:
        """Return True if SQLite has to stop. It calls this every _STEPS, which also lets an interrupt through."""
        self.steps -= _STEPS
        return self.steps < 0

    def spend(self, values: Iterable[bytes]) -> bool:
        """Count a row of these values; return True if a limit is exceeded."""
        self.bytes -= ROW_BYTES + sum(map(len, values))
        return self.bytes < 0


def _may(action: int, name: str | None, _: str | None, __: str | None, by: str | None) -> int:
    """Allow SQLite to read stored tables; refuse anything that has to be computed: views, functions."""
    is_read = action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ) and by is None
    return sqlite3.SQLITE_OK if is_read or (action, name) in _PRAGMAS else sqlite3.SQLITE_DENY


@contextlib.contextmanager
def _guarded(uri: str, bounds: _Bounds) -> Iterator[sqlite3.Connection]:
    """Open a database of another user to read. Raises sqlite3.Error, also of the block."""
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as db:
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, VALUE_MAX)
        db.set_authorizer(_may)
        db.set_progress_handler(bounds.is_spent, _STEPS)
        # Text that is not UTF-8 stays unchanged.
        db.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
        try:
            db.execute("PRAGMA trusted_schema = OFF")
            yield db
        except sqlite3.OperationalError as error:
            # An exception of a signal handler, which Python runs while SQLite calls back, does not pass SQLite.
            if error.sqlite_errorcode == sqlite3.SQLITE_INTERRUPT and bounds.steps >= 0:
                raise KeyboardInterrupt from None
            raise


# -- lists of keys as text, also those that can be read only once ---------------------------------------------


def _text_keys(file: LabelFile, read: Callable[[int], bytes]) -> Iterator[tuple[list[bytes], Sequence[int]]]:
    """Yield the keys of a text, with empty ones.

    Semantics decision: a key in each line; if there is a NUL in the first MiB, NULs are between the keys, which
    may then have newlines; if there are neither NULs nor newlines, but carriage returns, these are. Nothing else
    is left out: a key may have blanks, or begin with #.
    """
    block, lines, rest = read(KEY_MAX), 0, b""
    if block.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise label_error(file, None, "is in UTF-16: save it as UTF-8")
    block = block.removeprefix(b"\xef\xbb\xbf")
    parts = ((b"\0", block), (b"\n", block), (b"\r", block[:-1]))  # the last one may be half of a CRLF
    between = next((mark for mark, part in parts if mark in part), b"\n")
    while block:
        text = rest + block
        *keys, rest = text.split(between)
        if between == b"\n" and b"\r" in text:
            keys = [key.removesuffix(b"\r") for key in keys]
        if len(keys) > KEY_MAX // 2 and not any(keys):
            raise label_error(file, lines + 1, "is the first of half a million empty lines")
        yield keys, range(lines + 1, lines + 1 + len(keys))
        lines += len(keys)
        if len(rest) > KEY_MAX:
            raise label_error(file, lines + 1, TOO_LONG)
        block = read(KEY_MAX)
    yield [rest if between == b"\0" else rest.removesuffix(b"\r")], [lines + 1]


def copy_list(value: str, option: str, directory: str) -> str:
    """Copy a list that can be read only once, `-` for the standard input, into a file in this directory.

    Returns its path. At most half of the room there is taken. Raises UsageError, ViewError, OSError.
    """
    copy, is_input = os.path.join(directory, "keys.txt"), value == "-"
    file = LabelFile(os.fsencode(copy), TEXT, is_list=True)
    note_typed_name(file.path, "standard input" if is_input else value)
    with source.open_stream(0 if is_input else value) as stream, open(copy, "xb") as target:
        about, room = os.fstat(stream.fileno()), os.statvfs(copy)
        if stat.S_ISCHR(about.st_mode) and not stream.isatty() and about.st_rdev != os.stat(os.devnull).st_rdev:
            raise UsageError(f"{option} {value}: is a device; name a file, a pipe or - for the standard input")
        most = room.f_bavail * room.f_frsize // 2

        def read(size: int) -> bytes:
            data = stream.read(size)
            if target.tell() + len(data) > most:
                raise UsageError(
                    f"{option} {value}: is larger than half of the room in {directory}; write it into a file"
                )
            target.write(data)
            return data

        if not sum(any(keys) for keys, _ in _text_keys(file, read)):
            raise label_error(file, None, NO_KEY)
    return copy


# -- any format ------------------------------------------------------------------------------------------------

READERS: dict[str, Callable[[LabelFile, OpenFile], Iterator[Row]]] = {
    CSV: read_csv,
    TSV: read_csv,
    JSON_LINES: read_json_lines,
    SQLITE: read_sqlite,
    PARQUET: read_parquet,
}


def read_rows(file: LabelFile, open_file: OpenFile) -> Iterator[Row]:
    """Yield the rows of a label file. Raises ViewError, which names file, line and field, and OSError."""
    yield from READERS[file.kind](file, open_file)


def read_keys(file: LabelFile, open_file: OpenFile) -> Iterator[tuple[list[bytes], Sequence[int]]]:
    """Yield the keys of a list, some MiB of them at a time, and their lines. Raises as `read_rows`."""
    if file.kind == TEXT:
        with open_text(file, open_file) as stream:
            yield from _text_keys(file, stream.read)
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
