"""Reads the rows of label files and lists of keys, whatever the format is: CSV, JSON, parquet, SQLite, text ...

READERS has the formats. A database of another user is read within limits, and computes nothing.
"""

from __future__ import annotations

import codecs
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
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, TextIO

import numpy as np

from wdsfs import source as sources
from wdsfs.door.shard_door import DOOR
from wdsfs.door.urls import is_remote
from wdsfs.errors import CorruptShard, StaleShard, UsageError
from wdsfs.shards import Fingerprint
from wdsfs.tree import json_fields
from wdsfs.tree.label_files import (
    ARROW,
    COLUMNS_MAX,
    CSV,
    JSON,
    KEY_COLUMNS,
    KEY_MAX,
    LINE_MAX,
    NO_KEY,
    NPY,
    PARQUET,
    ROW_BYTES,
    SQLITE,
    TEXT,
    TOO_LONG,
    TSV,
    UNPACKED_MAX,
    LabelFile,
    LabelSource,
    OpenFile,
    Row,
    columns_text,
    key_of,
    label_error,
    note_typed_name,
    open_content,
    open_text,
    shorten,
    values_of,
)

VALUE_MAX = 64 << 20  # bytes of a value of SQLite, parquet, Arrow
# Limits of reading: for each byte of the file, and the least. Pages of a damaged file may form a circle.
WORK, WORK_LEAST = 100, 1 << 20  # bytes of values, steps of SQLite's machine
_STEPS = 100_000  # between two checks of the limits
_WAL = slice(18, 20)  # of the header of a database: 2 for one with a log
_COPIES_TRIED = 5  # of a database that others write
_PRAGMAS = ((sqlite3.SQLITE_PRAGMA, "table_xinfo"), (sqlite3.SQLITE_PRAGMA, "trusted_schema"))  # that we use
_VIRTUAL = 2  # of a generated column that is not stored
_CREATES_TABLE = re.compile(r"CREATE\s+TABLE\b", re.I)
_PACKED = 10  # times WORK, for parquet and Arrow, whose values are packed
_BATCH, _NESTED_BATCH, _BATCH_BYTES = 10_000, 64, 64 << 20  # rows of these in memory at a time, and bytes
_ARROW = b"ARROW1"  # begins a file, and no stream
_NO_KEYS = (dict, list, bool)
_SPACE = re.compile(r"[ \t\n\r]*")
_BLOCK = 1 << 16  # characters of a list, bytes of parquet read at a time
_SHOWN = 200  # characters of pyarrow's message in ours

# -- CSV and TSV: the first line names the columns -------------------------------------------------------------


def read_csv(source: LabelSource) -> Iterator[Row]:
    """Yield the rows of a file of CSV or TSV. Raises ViewError, ShardErrors, OSErrors."""
    file = source.file
    delimiter = "\t" if file.kind == TSV else ","
    before = csv.field_size_limit(LINE_MAX)
    with open_text(source) as raw:
        stream = io.TextIOWrapper(raw, "utf-8-sig", "surrogateescape", newline="")
        given = _Lines(file, stream)
        lines = csv.reader(given, delimiter=delimiter, strict=True)
        try:
            columns = next(lines, [])
            _refuse_delimiter(file, columns, delimiter)
            _refuse_columns(file, 1, columns)
            key = columns.index(source.key_column(columns))
            given.length = 0
            for fields in lines:
                given.length = 0
                if not fields:  # an empty line
                    continue
                if len(fields) != len(columns):
                    text = f"has {len(fields)} fields; the first line has {len(columns)}"
                    way_out = f"(quote a value that has a {_MARKS[delimiter]})"
                    raise label_error(file, lines.line_num, f"{text} {way_out}")
                # Semantics decision: an empty field is no value, hence no file: CSV writes it in no other way.
                shown = {
                    name: os.fsencode(text)
                    for name, text in zip(columns, fields, strict=True)
                    if text and name != columns[key] and file.shows(name)
                }
                yield os.fsencode(fields[key]), lines.line_num, shown
        except csv.Error as error:
            text = str(error).replace("unexpected end of data", "a quote is not closed until the end of the file")
            raise label_error(file, lines.line_num, text) from None
        finally:
            csv.field_size_limit(before)


class _Lines:
    """The lines of a CSV file, with a limit for the length of a row: a value in quotes may have many lines."""

    def __init__(self, file: LabelFile, stream: TextIO) -> None:
        self._file, self._stream = file, stream
        self.length = 0  # the characters of this row until now

    def __iter__(self) -> Iterator[str]:
        for line, text in enumerate(iter(lambda: self._stream.readline(LINE_MAX + 1), ""), 1):
            self.length += len(text)
            if self.length > LINE_MAX:
                raise label_error(self._file, line, f"is part of a row of more than {LINE_MAX >> 20} MiB")
            yield text


_MARKS = {",": "comma", "\t": "tab", ";": "semicolon"}


def _refuse_delimiter(file: LabelFile, columns: list[str], delimiter: str) -> None:
    """Raise ViewError for a first line with another mark between its columns."""
    other = next((mark for mark in _MARKS if len(columns) == 1 and mark in columns[0] and mark != delimiter), None)
    if other and file.column not in columns:
        text = f"has a {_MARKS[other]} between its columns: save it with a {_MARKS[delimiter]} there"
        raise label_error(file, 1, text)


def _refuse_columns(file: LabelFile, line: int | None, columns: list[str]) -> None:
    """Raise ViewError for too many columns, or two of one name."""
    if len(columns) > COLUMNS_MAX:
        raise label_error(file, line, f"has {len(columns):,} columns; the limit is {COLUMNS_MAX:,}")
    twice = next((name for name, count in Counter(columns).items() if count > 1), None)
    if twice is not None:
        raise label_error(file, line, f"has two columns {shorten(twice)}")


# -- JSON: an object in each line, or a list of objects; a list of keys may have texts -----------------------


def read_json(source: LabelSource) -> Iterator[Row]:
    """Yield the rows of a file of JSON. Raises ViewError, ShardErrors, OSErrors."""
    file, name = source.file, ""
    with open_text(source) as raw:
        start = raw.peek(1).removeprefix(b"\xef\xbb\xbf").lstrip()
        for line, item in (_list_items if start.startswith(b"[") else _line_items)(file, raw):
            if isinstance(item, str | int) and file.is_list:
                yield key_of(file, line, "", item), line, {}
                continue
            if not isinstance(item, dict):
                raise label_error(file, line, "is not a JSON object")
            name = name or source.key_column(_scalar_fields(file, item), line=line)
            key = item[name] if name in item else json_fields.find(item, json_fields.parse_path(name))
            if key is json_fields.ABSENT:
                raise label_error(file, line, f"has no field {name!r} (fields: {columns_text(item)})")
            fields = ((column, value) for column, value in item.items() if column != name and file.shows(column))
            yield key_of(file, line, name, key), line, values_of(file, line, fields)


def _scalar_fields(file: LabelFile, row: dict[str, Any]) -> list[str]:
    """Return the names of the fields that may be a key; a field of an object in the row is `data.image`."""
    if file.column and file.column not in row:
        there = json_fields.find(row, json_fields.parse_path(file.column)) is not json_fields.ABSENT
        return [file.column] if there else list(row)
    parts = [(name, value) for name, value in row.items() if isinstance(value, dict)]
    inner = [(f"{name}.{field}", value) for name, part in parts for field, value in part.items()]
    named = (*KEY_COLUMNS, file.column)  # whatever they have
    return [name for name, value in (*row.items(), *inner) if name in named or not isinstance(value, _NO_KEYS)]


def _line_items(file: LabelFile, stream: IO[bytes]) -> Iterator[tuple[int, Any]]:
    for line, text in enumerate(iter(lambda: stream.readline(LINE_MAX + 1), b""), 1):
        if len(text) > LINE_MAX:
            what = f"is longer than {LINE_MAX >> 20} MiB; one object in each line is needed"
            raise label_error(file, line, what)
        if text.strip():
            try:
                item = json_fields.parse(text)
            except CorruptShard as error:
                way_out = "; write an object in each line, or a list of objects" if line == 1 else ""
                raise label_error(file, line, f"{error}{way_out}") from None
            yield line, item


def _list_items(file: LabelFile, stream: IO[bytes]) -> Iterator[tuple[int, Any]]:
    """Yield the items of a JSON list, with their numbers from 1 on."""
    text, decoder, number, rest, at = codecs.getincrementaldecoder("utf-8-sig")(), json.JSONDecoder(), 0, "", 0
    try:
        while True:
            at, sign = _sign_at(rest, at)
            begin, first = _sign_at(rest, at + 1)
            if sign not in (",]" if number else "["):
                raise ValueError(f"{sign!r} where a comma or the end of the list has to be")
            if sign == "]" or (sign == "[" and first == "]"):
                if rest[at if sign == "]" else begin :].strip() != "]" or stream.read(_BLOCK).strip():
                    raise ValueError("there is more after the end of the list")
                return
            end, item, why = _decoded(decoder, rest, begin)
            if end < len(rest):  # not cut off, as the digits of a number may be
                number, at = number + 1, end
                yield number, item
                continue
            if len(rest) - at > LINE_MAX:
                raise ValueError(f"an item is longer than {LINE_MAX >> 20} MiB")
            more = stream.read(max(_BLOCK, len(rest) - at))
            if not more:
                raise ValueError(why or "the list has no end")
            rest, at = rest[at:] + text.decode(more), 0
    except (ValueError, RecursionError) as error:
        raise label_error(file, number + 1, f"is not JSON: {error}") from None


def _sign_at(text: str, at: int) -> tuple[int, str]:
    """Return the place of the next sign that is no white space, and the sign, which is empty at the end."""
    at += len(_SPACE.match(text, at)[0])  # type: ignore[index]  # it always matches
    return at, text[at : at + 1]


def _decoded(decoder: json.JSONDecoder, text: str, at: int) -> tuple[int, Any, str]:
    """Return the end of the JSON at a place, and the item; the end of the text and the reason if there is none."""
    try:
        item, end = decoder.raw_decode(text, at)
    except json.JSONDecodeError as error:
        return len(text), None, error.msg
    return end, item, ""


# -- parquet and Arrow, by pyarrow -----------------------------------------------------------------------------


def read_arrow(source: LabelSource) -> Iterator[Row]:
    """Yield the rows of a file of parquet or Arrow. Raises ViewError, ShardErrors, OSErrors."""
    file, pyarrow = source.file, importlib.import_module("pyarrow")
    with open_content(file.path, source.open_file) as stream:
        bounds = _Bounds(file, os.fstat(stream.fileno()).st_size, WORK * _PACKED)
        try:
            yield from _arrow_rows(source, pyarrow, stream, bounds)
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
            text = str(error).partition("\n")[0][:_SHOWN] or "it needs too much memory"
            raise label_error(file, None, f"cannot be read as {file.kind}: {text}") from None


def _arrow_rows(source: LabelSource, pyarrow: Any, stream: BinaryIO, bounds: _Bounds) -> Iterator[Row]:
    file, lines = source.file, 0
    for batch, name in (_parquet_batches if file.kind == PARQUET else _arrow_batches)(source, pyarrow, stream):
        field, _, inner = (name, "", "") if name in batch.schema.names else name.partition(".")
        used = [column for column in batch.schema.names if column == field or file.shows(column)]
        columns = {column: _column_values(pyarrow, batch, column) for column in used}
        keys = [row and row[inner] for row in columns[field]] if inner else columns.pop(field)
        shown = [(column, values) for column, values in columns.items() if file.shows(column)]
        for line, key in enumerate(keys, lines + 1):
            content = values_of(file, line, ((column, cells[line - lines - 1]) for column, cells in shown))
            large = next((column for column, value in content.items() if len(value) > VALUE_MAX), None)
            if large is not None:
                raise label_error(file, line, f"the field {shorten(large)} has more than {VALUE_MAX >> 20} MiB")
            bounds.spend(line, content.values())
            yield key_of(file, line, name, key), line, content
        lines += len(keys)


def _column_values(pyarrow: Any, batch: Any, name: str) -> list[Any]:
    """Return the values of a column of a batch. Raises ValueError, which names it."""
    try:
        return _values_in(pyarrow, batch.column(name))
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise ValueError(f"the column {shorten(name)}: {error}") from None


def _values_in(pyarrow: Any, column: Any) -> list[Any]:
    """Return the values of a column; a text that is there many times is in memory once."""
    types, kind = pyarrow.types, column.type
    if types.is_dictionary(kind):
        numbers = column.indices.unique().drop_null()
        texts = dict(zip(numbers.to_pylist(), _values_in(pyarrow, column.dictionary.take(numbers)), strict=True))
        return [texts.get(number) for number in column.indices.to_pylist()]
    is_text = types.is_temporal(kind) or types.is_decimal(kind)
    values: list[Any] = (column.cast(pyarrow.string()) if is_text else column).to_pylist()
    return values


def _key_name(source: LabelSource, pyarrow: Any, schema: Any) -> str:
    """Return which column of a schema has the keys; `image.path` is a field in a column. Raises ViewError."""
    file, types = source.file, pyarrow.types
    _refuse_columns(file, None, schema.names)
    fields = [(field.name, field.type) for field in schema]
    structs = [(name, kind) for name, kind in fields if types.is_struct(kind)]
    fields += [(f"{name}.{part.name}", part.type) for name, kind in structs for part in kind]
    no_keys = (types.is_nested, types.is_binary, types.is_large_binary)
    return source.key_column(
        [name for name, kind in fields if name == file.column or not any(test(kind) for test in no_keys)]
    )


def _rows_at_once(pyarrow: Any, schema: Any, size: int, rows: int) -> int:
    """Return how many rows to have in memory: few if they are large, or if one value may be there many times."""
    most = _NESTED_BATCH if any(pyarrow.types.is_nested(field.type) for field in schema) else _BATCH
    return max(1, min(most, _BATCH_BYTES * max(rows, 1) // max(size, 1)))


def _parquet_batches(source: LabelSource, pyarrow: Any, stream: BinaryIO) -> Iterator[tuple[Any, str]]:
    """Yield the rows of a parquet file, and which column has the keys."""
    parquet, file, types = importlib.import_module("pyarrow.parquet"), source.file, pyarrow.types
    options = {"memory_map": False, "pre_buffer": False, "buffer_size": _BLOCK}
    with parquet.ParquetFile(stream, **options) as table:
        about, schema = table.metadata, table.schema_arrow
        name = _key_name(source, pyarrow, schema)
        groups = [about.row_group(number) for number in range(about.num_row_groups)]
        sizes = [(group.total_byte_size, group.num_rows) for group in groups]
        if sum(size for size, _ in sizes) > UNPACKED_MAX * os.fstat(stream.fileno()).st_size + LINE_MAX:
            raise label_error(file, None, f"unpacks to more than {UNPACKED_MAX} times its size")
        rows = min((_rows_at_once(pyarrow, schema, *group) for group in sizes), default=1)
        texts = [field.name for field in schema if types.is_string(field.type) or types.is_binary(field.type)]
    shown = [column for column in schema.names if file.shows(column) and column != name]
    stream.seek(0)
    with parquet.ParquetFile(stream, read_dictionary=texts, **options) as table:
        key = [] if name.partition(".")[0] in shown else [name]
        for batch in table.iter_batches(rows, columns=shown + key):
            yield batch, name


def _arrow_batches(source: LabelSource, pyarrow: Any, stream: BinaryIO) -> Iterator[tuple[Any, str]]:
    """Yield the rows of a file of Arrow (Feather), or of a stream, as the library datasets writes it; as above."""
    ipc, is_file = importlib.import_module("pyarrow.ipc"), stream.read(len(_ARROW)) == _ARROW
    stream.seek(0)
    with (ipc.open_file if is_file else ipc.open_stream)(stream) as table:
        name = _key_name(source, pyarrow, table.schema)
        for batch in map(table.get_batch, range(table.num_record_batches)) if is_file else table:
            batch.validate(full=True)  # else reading may leave its memory
            step = _rows_at_once(pyarrow, batch.schema, batch.nbytes, len(batch))
            for start in range(0, len(batch), step):
                yield batch.slice(start, step), name


# -- lists of numbers or texts, by NumPy ------------------------------------------------------------------------


def read_npy(source: LabelSource) -> Iterator[Row]:
    """Yield the keys of a NumPy array; objects, which are pickles, are refused. Raises ViewError, OSErrors.

    Semantics decision: two numbers of 64 bits, as DataComp has them, are a text of 32 hexadecimal digits.
    """
    file, npy = source.file, np.lib.format
    with open_content(file.path, source.open_file) as stream:
        try:
            readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
            shape, _, dtype = readers[npy.read_magic(stream)](stream)
        except Exception as error:  # NumPy parses the head as Python does, and may raise whatever that raises
            raise label_error(file, None, f"cannot be read as an array: {error!s:.{_SHOWN}}") from None
        is_uid = [dtype[name].kind for name in dtype.names or ()] == ["u", "u"] and dtype.itemsize == 16
        is_known = len(shape) == 1 and (dtype.kind in "SUiu" or is_uid)
        if not (is_known and 0 < dtype.itemsize <= KEY_MAX * 4):
            text = f"is an array of {shorten(dtype)} {shorten(shape)}; a row of texts or whole numbers is needed"
            raise label_error(file, None, text)
        step = max(1, KEY_MAX // dtype.itemsize)
        for start in range(0, shape[0], step):
            count = min(step, shape[0] - start)
            data = stream.read(count * dtype.itemsize)
            if len(data) < count * dtype.itemsize:
                raise label_error(file, None, "ends before its last key")
            if dtype.kind == "U" and np.frombuffer(data, f"{dtype.str[0]}u4").max() > sys.maxunicode:
                raise label_error(file, None, "has a text of signs that Unicode does not have")
            for line, value in enumerate(np.frombuffer(data, dtype).tolist(), start + 1):
                yield key_of(file, line, "", f"{value[0]:016x}{value[1]:016x}" if is_uid else value), line, {}


# -- SQLite -----------------------------------------------------------------------------------------------------


def read_sqlite(source: LabelSource) -> Iterator[Row]:
    """Yield the rows of a table of SQLite. Raises ViewError, ShardErrors, OSErrors."""
    file = source.file
    with _database(file.path, source.open_file) as (uri, size):
        bounds = _Bounds(file, size, WORK)
        try:
            with _guarded(uri, bounds) as db:
                yield from _table_rows(source, db, bounds)
        except sqlite3.Error as error:
            raise label_error(file, None, f"cannot be read as SQLite: {error}") from None


def _table_rows(source: LabelSource, db: sqlite3.Connection, bounds: _Bounds) -> Iterator[Row]:
    file = source.file
    table = _table(file, db)
    key, columns = _stored_columns(source, db, table)
    cursor = db.execute(f"SELECT {', '.join(map(_quoted, (key, *columns)))} FROM {_quoted(table)}")
    for line, row in enumerate(cursor, 1):
        values = values_of(file, line, zip(columns, row[1:], strict=True))
        bounds.spend(line, values.values())
        yield key_of(file, line, key, row[0]), line, values


def _stored_columns(source: LabelSource, db: sqlite3.Connection, table: str) -> tuple[str, list[str]]:
    """Return the column of the keys, and the others that are shown. Raises ViewError, sqlite3.Error."""
    file = source.file
    about = [row[1:] for row in db.execute(f"PRAGMA table_xinfo({_quoted(table)})")]
    primary = [(name, kind.upper()) for name, kind, _, _, number, _ in about if number]
    texts = [name for name, kind in primary if len(primary) == 1 and kind != "INTEGER"]
    names = [name for name, kind, *_ in about if name == file.column or kind.upper() != "BLOB"]
    key = source.key_column(names, texts, [name for name, _ in primary][:1])
    columns = [name for name, *_ in about if file.shows(name) and name != key]
    computed = next((name for name, *_, hidden in about if hidden == _VIRTUAL and name in (key, *columns)), None)
    if computed is not None:
        where = f"the column {shorten(computed)} of {shorten(table)}"
        text = "is computed by SQL in the file, and only stored columns are read; declare it STORED"
        raise label_error(file, None, f"{where} {text}")
    return key, columns


def _table(file: LabelFile, db: sqlite3.Connection) -> str:
    schema = db.execute("SELECT type, name, rootpage, sql FROM sqlite_master").fetchall()
    stored = [row for row in schema if row[0] == "table" and row[2] and _CREATES_TABLE.match(row[3] or "")]
    tables = [str(name) for _, name, *_ in stored if not name.startswith("sqlite_")]
    if file.table in tables or (file.table is None and len(tables) == 1):
        return file.table or tables[0]
    computed = [name for type_, name, *_ in schema if type_ in ("table", "view") and name not in tables]
    if file.table in computed or (file.table is None and computed and not tables):
        name = file.table or computed[0]
        text = "is computed by SQL in the file, and wdsfs reads only stored tables; store it as a table"
        way_out = f"CREATE TABLE labels AS SELECT * FROM {_quoted(name[:_SHOWN])}"
        raise label_error(file, None, f"{shorten(name)} {text}: {way_out}")
    what = "name one of its tables" if file.table is None else f"has no table {file.table!r}"
    example = f"{os.path.basename(os.fsdecode(file.path))}:TABLE"
    raise label_error(file, None, f"{what}, as in {example}: the tables are {columns_text(tables)}")


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
        log = path + b"-wal"
        log_size = os.path.getsize(log) if has_log and not is_remote(path) and os.path.exists(log) else 0
        if log_size:
            with _copied(path) as copy:
                yield f"{copy.as_uri()}?mode=rw", size + log_size
        elif has_log or is_remote(path):
            yield f"file:/proc/self/fd/{stream.fileno()}?mode=ro&immutable=1", size
        else:
            yield f"{Path(os.fsdecode(path)).as_uri()}?mode=ro", size


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
                yield copy
                return
        raise StaleShard(f"{os.fsdecode(path)} changes all the time")


class _Bounds:
    """The remaining cost of reading a file of this size: steps of SQLite's machine, bytes of values."""

    def __init__(self, file: LabelFile, size: int, work: int) -> None:
        self._file, self._work = file, work
        self.steps = self.bytes = work * size + WORK_LEAST

    def is_spent(self) -> bool:
        """Return True if SQLite has to stop. It calls this every _STEPS, which also lets an interrupt through."""
        self.steps -= _STEPS
        return self.steps < 0

    def spend(self, line: int, values: Iterable[bytes]) -> None:
        """Count a row of these values. Raises ViewError if a limit is exceeded."""
        self.bytes -= ROW_BYTES + sum(map(len, values))
        if self.bytes < 0:
            text = f"the rows hold more than {self._work:,} times the bytes of the file"
            raise label_error(self._file, line, text)


def _authorize(action: int, name: str | None, _: str | None, __: str | None, by: str | None) -> int:
    """Allow SQLite to read stored tables; refuse anything that has to be computed: views, functions."""
    is_read = action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ) and by is None
    return sqlite3.SQLITE_OK if is_read or (action, name) in _PRAGMAS else sqlite3.SQLITE_DENY


@contextlib.contextmanager
def _guarded(uri: str, bounds: _Bounds) -> Iterator[sqlite3.Connection]:
    """Open a database of another user to read. Raises sqlite3.Error, also for errors in the block."""
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as db:
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, VALUE_MAX)
        db.set_authorizer(_authorize)
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


# -- lists of keys as text, also lists that can be read only once ---------------------------------------------


def _text_keys(source: LabelSource, read: Callable[[int], bytes]) -> Iterator[tuple[list[bytes], Sequence[int]]]:
    """Yield the keys of a text, with empty ones.

    Semantics decision: each line is a key. If the first MiB has a NUL, NULs divide the keys, and keys may have
    newlines. If it has neither NULs nor newlines, but carriage returns, these divide the keys. Nothing else is
    left out: a key may have blanks, or begin with #. The first byte of lists of the library is a NUL.
    """
    file, block, lines, rest = source.file, read(KEY_MAX), 0, b""
    source.has_keys = block.startswith(b"\0")
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
    with sources.open_stream(0 if is_input else value) as stream, open(copy, "xb") as target:
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

        if not sum(any(keys) for keys, _ in _text_keys(LabelSource(file, DOOR.open_shard), read)):
            raise label_error(file, None, NO_KEY)
    return copy


# -- any format ------------------------------------------------------------------------------------------------

READERS: dict[str, Callable[[LabelSource], Iterator[Row]]] = {
    CSV: read_csv,
    TSV: read_csv,
    JSON: read_json,
    SQLITE: read_sqlite,
    PARQUET: read_arrow,
    ARROW: read_arrow,
    NPY: read_npy,
}


def read_rows(source: LabelSource) -> Iterator[Row]:
    """Yield the rows of a label file. Raises ViewError, which names file, line and field, and OSError."""
    yield from READERS[source.file.kind](source)


def read_keys(source: LabelSource) -> Iterator[tuple[list[bytes], Sequence[int]]]:
    """Yield the keys of a list, some MiB of them at a time, and their lines. Raises as `read_rows`."""
    if source.file.kind == TEXT:
        with open_text(source) as stream:
            yield from _text_keys(source, stream.read)
        return
    keys, lines, size = list[bytes](), list[int](), 0
    for key, line, _ in read_rows(source):
        keys.append(key)
        lines.append(line)
        size += ROW_BYTES + len(key)
        if size > KEY_MAX:
            yield keys, lines
            keys, lines, size = [], [], 0
    yield keys, lines
