"""Label files (`--associate`): small columns by key, from SQLite, CSV, TSV, JSON lines; lists of keys (`--keys`).

A file of any format is read once into a table in the cache (SQLite: key, line, values), so that memory stays flat
and a shard's keys are looked up in microseconds. Its key there contains the fingerprint of the file.

The idea is the webdataset library's `associate` (`filters.py`): a mapping from `__key__` to further columns.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import hashlib
import importlib.util
import io
import itertools
import json
import os
import re
import reprlib
import shutil
import sqlite3
import stat
import struct
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, TextIO

from wdsfs import extras, names
from wdsfs.door.urls import is_remote
from wdsfs.errors import CorruptShard, MissingShard, StaleShard, UnreadableShard, UsageError, ViewError
from wdsfs.remote.shard_paths import OpenShard, open_shard
from wdsfs.shards import Fingerprint
from wdsfs.spec import objects
from wdsfs.storage import file_cache, source
from wdsfs.storage.file_cache import NewFile
from wdsfs.tree import json_fields

FORMAT, KIND = "2", "labels"  # of tables in the cache
KEYS = ("__key__", "key")
_SQLITE, _CSV, _TSV, _LINES, _PARQUET, _TEXT = "SQLite", "CSV", "TSV", "JSON lines", "parquet", "text"
KINDS = {
    **dict.fromkeys((".sqlite", ".sqlite3", ".db"), _SQLITE),
    ".csv": _CSV,
    ".tsv": _TSV,
    **dict.fromkeys((".jsonl", ".ndjson"), _LINES),
}
LINE_MAX = json_fields.JSON_MAX  # bytes of a line of JSON, characters of a row of CSV
VALUE_MAX = 64 << 20  # bytes of a value in SQLite
KEY_MAX = 1 << 20  # bytes of a line of a list of keys
UNPACKED_MAX = 200  # bytes for each of a file in gzip, as of compressed shards
# Limits of reading SQLite: for each byte of the file, and the least. Pages of a damaged file may form a circle.
WORK, WORK_LEAST = 100, 1 << 20  # bytes of values, steps of SQLite's machine
_ROW, _STEPS = 16, 100_000  # bytes that a row counts for; steps between two checks of the limits
_WAL = slice(18, 20)  # of the header of a database: 2 for one with a log
_COPIES_TRIED = 5  # of a database that others write
_PRAGMAS = ((sqlite3.SQLITE_PRAGMA, "table_xinfo"), (sqlite3.SQLITE_PRAGMA, "trusted_schema"))  # that we use
COLUMNS_MAX = 1 << 16  # different columns of one file
_KEYS_MAX = 500  # keys in one query
_NAMED, _SHOWN = 20, 200  # columns that a message names, characters of a text in one
_BATCH = 10_000  # rows written at a time
_VALUE = struct.Struct("<HI")  # number of the column, bytes
LABELS, LIST, ORDER = "--associate", "--keys", "--order"  # the options that name a file
_typed: dict[bytes, str] = {}  # of copies of what can be read only once, by path: what the user has named

Row = tuple[bytes, int, dict[str, bytes]]  # key, line, values by column


class LabelFile(NamedTuple):
    """A label file of the options: an absolute path, or a URL without secrets, and for SQLite a table.

    `column` has the keys, if its name is not one of the usual ones. `is_list`: only the keys are read.
    """

    path: bytes
    kind: str
    table: str | None = None
    column: str | None = None
    is_list: bool = False

    @property
    def key_names(self) -> tuple[str, ...]:
        """The names that the column of the keys may have."""
        return KEYS if self.column is None else (self.column,)

    def shows(self, column: str) -> bool:
        """Return True for a column of the file that becomes a column of samples.

        Semantics decision: `__url__` and the like are metadata by the webdataset library's convention.
        """
        return not (self.is_list or column.startswith("__"))

    @property
    def text(self) -> str:
        """The name of the file for messages."""
        return _typed.get(self.path) or os.fsdecode(self.path)

    @property
    def parts(self) -> list[bytes]:
        """The file and those beside it in which SQLite keeps the latest writes."""
        has_more = self.kind == _SQLITE and not is_remote(self.path)
        return [self.path, self.path + b"-wal"] if has_more else [self.path]


def settled_label(text: str) -> str:
    """Return a label file of the options that means the same later, as `spec.expand.settled` has it."""
    return os.path.abspath(text) if objects.is_url(text) and os.path.exists(text) else text


def label_file(text: str, option: str = LABELS) -> LabelFile:
    """Return the label file FILE or FILE.sqlite:TABLE; for other options a list. Raises UsageError.

    A list is FILE, FILE:COLUMN or FILE.sqlite:TABLE:COLUMN.
    """
    path, table, column, is_list = text, None, None, option != LABELS
    refuse_empty(text, option)
    if os.path.exists(text):  # whatever it looks like, as for SHARDS
        path = text = os.path.abspath(text)
    else:
        path, table, column = _divided(text, is_list)
    shown = objects.without_secrets(text) if objects.is_url(text) else text
    path = objects.path_of(path) if objects.is_url(path) else os.path.abspath(path)
    kind = _kind_of(path, is_list) or (_TEXT if is_list else None)
    if kind is None:
        known = " ".join(KINDS)
        raise UsageError(f"{option} {shown}: not a kind of label file that wdsfs knows; these end in {known}")
    if not objects.is_file(path):
        raise UsageError(f"{option} {shown}: {_why_not(path)}{_of_a_column(text) if is_list else ''}")
    if kind == _PARQUET and importlib.util.find_spec("pyarrow") is None:
        raise UsageError(f"{option} {shown}: needs pyarrow; type: {extras.install_command('parquet')}")
    return LabelFile(os.fsencode(path), kind, table, column, is_list)


def refuse_empty(text: str, option: str) -> None:
    """Raise UsageError for an option without a file, as an unset variable of a shell leaves it."""
    if not text:
        raise UsageError(f"{option} '': name the file")


def _why_not(path: str) -> str:
    if os.path.isdir(path):
        return "is a directory"
    return "is no file that can be read again" if os.path.exists(path) else "there is no such file"


def _of_a_column(text: str) -> str:
    """Return the end of a message about FILE:COLUMN if there is such a file, of another kind."""
    before, colon, _ = text.rpartition(":")
    if not colon or not os.path.isfile(before):
        return ""
    known = " ".join((*KINDS, ".parquet"))
    return f"; there is {before}, but columns are read from files that end in {known}"


def _divided(text: str, is_list: bool) -> tuple[str, str | None, str | None]:
    """Divide the text of an option into the file, the table of SQLite, and for a list the column of the keys."""
    before, colon, after = text.rpartition(":")
    kind = _kind_of(before, is_list) if colon else None
    if kind == _SQLITE:
        return before, after, None
    if kind is not None and is_list:
        return before, None, after
    above, colon, table = before.rpartition(":")
    if is_list and colon and _kind_of(above, is_list) == _SQLITE:
        return above, table, after
    return text, None, None


def _kind_of(path: str, is_list: bool) -> str | None:
    """Return the kind of a file by its name, which may end in `.gz`; None for one that is not known."""
    name = path.partition("?")[0] if objects.is_url(path) else path
    plain = Path(name.removesuffix(".gz"))
    kind = _PARQUET if is_list and plain.suffix.lower() == ".parquet" else KINDS.get(plain.suffix.lower())
    return None if name.endswith(".gz") and kind in (_SQLITE, _PARQUET) else kind


class OpenLabels:
    """A label file, opened for lookups. Made by `opened`."""

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
def opened(
    file: LabelFile, fingerprint: Fingerprint, open_file: Callable[[bytes], OpenShard] = open_shard
) -> Iterator[OpenLabels]:
    """Open a label file with this fingerprint, by its table in the cache.

    `open_file` opens it; SQLite opens a local one by its path.

    Raises MissingShard, UnreadableShard, IndexUnusable, ViewError for a file that does not contain labels.
    """
    with table_of(file, fingerprint, KIND, partial(_import, file, open_file)) as fd:
        uri = f"file:/proc/self/fd/{fd}?mode=ro&immutable=1"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as db:
            yield OpenLabels(file.path, fingerprint, db)


@contextlib.contextmanager
def table_of(
    file: LabelFile, fingerprint: Fingerprint, kind: str, fill: Callable[[NewFile], tuple[str, int]]
) -> Iterator[int]:
    """Open the table of a label file, of this kind, in the cache; `fill` makes it. Raises as `opened`."""
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


def _import(file: LabelFile, open_file: Callable[[bytes], OpenShard], table: NewFile) -> tuple[str, int]:
    """Read a label file into a new table; returns the kind and the size (bytes) of that."""
    with contextlib.closing(sqlite3.connect(table.path)) as db:
        db.executescript(
            # A process that is killed leaves a file that no other process uses.
            "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;"
            "CREATE TABLE labels (key BLOB, line INTEGER, packed BLOB);"
            "CREATE TABLE columns (number INTEGER PRIMARY KEY, name BLOB);"
        )
        numbers: dict[str, int] = {}
        for batch in batches(rows(file, open_file)):
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
            _check_column(file, line, column)
            if len(numbers) >= COLUMNS_MAX:
                raise wrong(file, line, f"too many fields, at {column!r}: the limit is {COLUMNS_MAX:,}")
            number = numbers[column] = len(numbers)
        parts += [_VALUE.pack(number, len(value)), value]
    return b"".join(parts)


def _check_column(file: LabelFile, line: int, column: str) -> None:
    try:
        fits = 0 < len(os.fsencode(column)) <= names.NAME_MAX
    except UnicodeEncodeError:
        fits = False
    if not fits or "/" in column or "\0" in column or column in (".", ".."):
        raise wrong(file, line, f"the column {column!r} cannot be the name of a file; rename it")


def wrong(file: LabelFile, line: int | None, text: str) -> ViewError:
    """Return an error about a label file."""
    return ViewError(f"{file.text}: {text}" if line is None else f"{file.text}:{line}: {text}")


def _key_column(file: LabelFile, columns: Sequence[str], others: Sequence[str] = ()) -> str:
    for name in file.key_names if file.column else (*KEYS, *others):
        if name in columns:
            return name
    what = " or ".join(map(repr, file.key_names))
    text = f"has no column {what} that says which sample a row is for; it has {_listed(columns)}"
    other = (
        f"; name another one as in {file.text}:COLUMN" if file.is_list and columns and file.kind != _SQLITE else ""
    )
    raise wrong(file, None, text + other)


def _value(file: LabelFile, line: int, column: str, value: Any) -> bytes | None:
    """Return the content of the file for a value; None for no file."""
    try:
        return json_fields.content_of(value)
    except CorruptShard as error:
        raise wrong(file, line, f"the field {column!r} {error}") from None


@contextlib.contextmanager
def _content(path: bytes, open_file: Callable[[bytes], OpenShard]) -> Iterator[BinaryIO]:
    """Open a label file to read; a remote one is brought into the cache. Raises ShardError, OSError."""
    shard = open_file(path)
    if isinstance(shard, int):
        with os.fdopen(shard, "rb") as stream:
            yield stream
    else:
        with contextlib.closing(shard), open(f"/proc/self/fd/{shard.whole()}", "rb") as stream:
            yield stream


@contextlib.contextmanager
def _unpacked(file: LabelFile, open_file: Callable[[bytes], OpenShard]) -> Iterator[IO[bytes]]:
    """Open a file of text as `_content`, unpacked if its name ends in `.gz`. Raises also ViewError."""
    with _content(file.path, open_file) as stream:
        if not file.path.partition(b"?" if is_remote(file.path) else b"\0")[0].endswith(b".gz"):
            yield stream
            return
        most = UNPACKED_MAX * os.fstat(stream.fileno()).st_size + LINE_MAX
        try:
            yield io.BufferedReader(_Bounded(file, gzip.GzipFile(fileobj=stream), most))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise wrong(file, None, f"cannot be unpacked: {error}") from None


class _Bounded(io.RawIOBase):
    """A file that is unpacked, of at most `most` bytes. Raises ViewError at the next one."""

    def __init__(self, file: LabelFile, stream: gzip.GzipFile, most: int) -> None:
        super().__init__()
        self._file, self._stream, self._left = file, stream, most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise wrong(self._file, None, f"unpacks to more than {UNPACKED_MAX} times its size")
        buffer[: len(data)] = data
        return len(data)


def rows(file: LabelFile, open_file: Callable[[bytes], OpenShard]) -> Iterator[Row]:
    """Yield the rows of a label file. Raises ViewError, which names file, line and field, and OSError."""
    read = {_SQLITE: _sqlite_rows, _LINES: _json_rows, _PARQUET: _parquet_rows}
    yield from read.get(file.kind, _csv_rows)(file, open_file)


def key_batches(
    file: LabelFile, open_file: Callable[[bytes], OpenShard]
) -> Iterator[tuple[list[bytes], Sequence[int]]]:
    """Yield the keys of a list, some MiB of them at a time, and their lines. Raises as `rows`."""
    if file.kind == _TEXT:
        with _unpacked(file, open_file) as stream:
            yield from _text_keys(file, stream.read)
        return
    keys, lines, size = list[bytes](), list[int](), 0
    for key, line, _ in rows(file, open_file):
        keys.append(key)
        lines.append(line)
        size += _ROW + len(key)
        if size > KEY_MAX:
            yield keys, lines
            keys, lines, size = [], [], 0
    yield keys, lines


def _text_keys(file: LabelFile, read: Callable[[int], bytes]) -> Iterator[tuple[list[bytes], Sequence[int]]]:
    """Yield the keys of a text, with empty ones.

    Semantics decision: a key in each line; if there is a NUL in the first MiB, NULs are between the keys, which
    may then have newlines; if there are neither NULs nor newlines, but carriage returns, these are. Nothing else
    is left out: a key may have blanks, or begin with #.
    """
    block, lines, rest = read(KEY_MAX), 0, b""
    if block.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise wrong(file, None, "is in UTF-16: save it as UTF-8")
    block = block.removeprefix(b"\xef\xbb\xbf")
    parts = ((b"\0", block), (b"\n", block), (b"\r", block[:-1]))  # the last one may be half of a CRLF
    between = next((mark for mark, part in parts if mark in part), b"\n")
    while block:
        text = rest + block
        *keys, rest = text.split(between)
        if between == b"\n" and b"\r" in text:
            keys = [key.removesuffix(b"\r") for key in keys]
        if len(keys) > KEY_MAX // 2 and not any(keys):
            raise wrong(file, lines + 1, "is the first of half a million empty lines")
        yield keys, range(lines + 1, lines + 1 + len(keys))
        lines += len(keys)
        if len(rest) > KEY_MAX:
            raise wrong(file, lines + 1, TOO_LONG)
        block = read(KEY_MAX)
    yield [rest if between == b"\0" else rest.removesuffix(b"\r")], [lines + 1]


def copied(value: str, option: str, directory: str) -> str:
    """Copy a list that can be read only once, `-` for the standard input, into a file in this directory.

    Returns its path. At most half of the room there is taken. Raises UsageError, ViewError, OSError.
    """
    copy, is_input = os.path.join(directory, "keys.txt"), value == "-"
    file = LabelFile(os.fsencode(copy), _TEXT, is_list=True)
    _typed[file.path] = "standard input" if is_input else value
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
            raise wrong(file, None, NO_KEY)
    return copy


NO_KEY = "lists no key"
TOO_LONG = f"is longer than {KEY_MAX >> 20} MiB; a key in each line is needed"


def _parquet_rows(file: LabelFile, open_file: Callable[[bytes], OpenShard]) -> Iterator[Row]:
    """Yield the keys of a parquet file."""
    pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    with _content(file.path, open_file) as stream:
        try:
            with parquet.ParquetFile(stream, memory_map=False, pre_buffer=False) as table:
                column = _key_column(file, table.schema_arrow.names)
                lines = 0
                for batch in table.iter_batches(_BATCH, columns=[column]):
                    for line, value in enumerate(batch.column(0).to_pylist(), lines + 1):
                        key = _value(file, line, column, value)
                        if key is None:
                            raise wrong(file, line, f"the column {column!r} is null in this row")
                        yield key, line, {}
                    lines += len(batch)
        except pyarrow.ArrowException as error:
            raise wrong(
                file, None, f"cannot be read as parquet: {str(error).partition(chr(10))[0][:_SHOWN]}"
            ) from None


def _csv_rows(file: LabelFile, open_file: Callable[[bytes], OpenShard]) -> Iterator[Row]:
    delimiter = "\t" if file.kind == _TSV else ","
    before = csv.field_size_limit(LINE_MAX)
    with _unpacked(file, open_file) as raw:
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
                    raise wrong(
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
            raise wrong(file, lines.line_num, str(error)) from None
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
                raise wrong(self._file, self._line, f"is part of a row of more than {LINE_MAX >> 20} MiB")
            yield line


def _checked_columns(file: LabelFile, columns: list[str]) -> int:
    """Return the place of the key among the columns of a CSV file. Raises ViewError."""
    if len(columns) > COLUMNS_MAX:
        raise wrong(file, 1, f"has {len(columns):,} columns; the limit is {COLUMNS_MAX:,}")
    twice = next((name for name, count in Counter(columns).items() if count > 1), None)
    if twice is not None:
        raise wrong(file, 1, f"has two columns {_short(twice)}")
    return columns.index(_key_column(file, columns))


def _short(value: object) -> str:
    """Return a value for a message: it may be as long as a line."""
    return reprlib.repr(value)


def _listed(columns: Iterable[str]) -> str:
    """Return names of columns for a message, the first ones of many."""
    first = list(itertools.islice(columns, _NAMED + 1))
    return (", ".join(map(_short, first[:_NAMED])) or "none") + (", ..." if len(first) > _NAMED else "")


def _json_rows(file: LabelFile, open_file: Callable[[bytes], OpenShard]) -> Iterator[Row]:
    with _unpacked(file, open_file) as stream:
        for line, text in enumerate(iter(lambda: stream.readline(LINE_MAX + 1), b""), 1):
            if not text.strip():
                continue
            if len(text) > LINE_MAX:
                raise wrong(file, line, f"is longer than {LINE_MAX >> 20} MiB; one object in each line is needed")
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise wrong(file, line, f"is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise wrong(file, line, "is not a JSON object")
            name = next((name for name in file.key_names if name in row), None)
            if name is None:
                what = " or ".join(map(repr, file.key_names))
                raise wrong(file, line, f"has no field {what}; it has {_listed(row)}")
            key = _value(file, line, name, row[name])
            if key is None or isinstance(row[name], dict | list | bool):
                raise wrong(file, line, f"the field {name!r} is not a key: {_short(row[name])}")
            values = {
                column: _value(file, line, column, value)
                for column, value in row.items()
                if column != name and file.shows(column)
            }
            yield key, line, {column: value for column, value in values.items() if value is not None}


@contextlib.contextmanager
def _database(path: bytes, open_file: Callable[[bytes], OpenShard]) -> Iterator[tuple[str, int]]:
    """Provide the URI of a database to read, and its size in bytes. Raises ShardError, OSError.

    Reading a file in WAL mode would create two files beside it. So it is read without its log; if there is a log,
    a copy of both is read. Of a remote database only the file itself is read.
    """
    with _content(path, open_file) as stream:
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
        self.bytes -= _ROW + sum(map(len, values))
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


def _sqlite_rows(file: LabelFile, open_file: Callable[[bytes], OpenShard]) -> Iterator[Row]:
    with _database(file.path, open_file) as (uri, size):
        bounds = _Bounds(size)
        try:
            with _guarded(uri, bounds) as db:
                yield from _table_rows(file, db, bounds)
        except sqlite3.Error as error:
            raise wrong(file, None, f"cannot be read as SQLite: {error}") from None


def _table_rows(file: LabelFile, db: sqlite3.Connection, bounds: _Bounds) -> Iterator[Row]:
    table = _table(file, db)
    columns, primary = _stored_columns(file, db, table)
    key = _key_column(file, columns, primary if len(primary) == 1 else ())
    at = columns.index(key)
    cursor = db.execute(f"SELECT {', '.join(map(_quoted, columns))} FROM {_quoted(table)}")
    for line, row in enumerate(cursor, 1):
        name = _value(file, line, key, row[at])
        if name is None:
            raise wrong(file, line, f"the column {key!r} is NULL in this row of {table!r}")
        values = {
            column: content
            for column, value in zip(columns, row, strict=True)
            if column != key and (content := _value(file, line, column, value)) is not None
        }
        if bounds.spend(values.values()):
            raise wrong(file, line, f"the rows of {table!r} hold more than {WORK} times the bytes of the file")
        yield name, line, values


def _stored_columns(file: LabelFile, db: sqlite3.Connection, table: str) -> tuple[list[str], list[str]]:
    """Return the shown columns of a table, and those of its primary key. Raises ViewError, sqlite3.Error."""
    about = db.execute(f"PRAGMA table_xinfo({_quoted(table)})").fetchall()
    primary = [name for _, name, *_, number, _ in about if number]
    keys = {*file.key_names, *(primary if file.is_list else ())}
    shown = [(name, hidden) for _, name, *_, hidden in about if file.shows(name) or name in keys]
    computed = next((name for name, hidden in shown if hidden == _VIRTUAL), None)
    if computed is not None:
        raise wrong(
            file,
            None,
            f"the column {computed!r} of {table!r} is computed by SQL in the file, and only stored columns are "
            "read; declare it STORED",
        )
    return [name for name, _ in shown], primary


_VIRTUAL = 2  # of a generated column that is not stored


def _table(file: LabelFile, db: sqlite3.Connection) -> str:
    schema = db.execute("SELECT type, name, rootpage, sql FROM sqlite_master").fetchall()
    tables = [
        name
        for type_, name, root, sql in schema
        if type_ == "table" and root and _PLAIN.match(sql or "") and not name.startswith("sqlite_")
    ]
    if file.table is None and len(tables) == 1:
        return str(tables[0])
    if file.table in tables:
        return str(file.table)
    computed = [name for type_, name, *_ in schema if type_ in ("table", "view") and name not in tables]
    if file.table in computed or (file.table is None and computed and not tables):
        name = file.table or computed[0]
        raise wrong(
            file,
            None,
            f"{name!r} is computed by SQL in the file, and wdsfs reads only stored tables; store it as a table: "
            f"CREATE TABLE labels AS SELECT * FROM {_quoted(name)}",
        )
    what = "name one of its tables" if file.table is None else f"has no table {file.table!r}"
    listed = ", ".join(tables[:_NAMED]) or "none"
    raise wrong(file, None, f"{what}, as in {os.path.basename(os.fsdecode(file.path))}:TABLE; it has {listed}")


_PLAIN = re.compile(r"CREATE\s+TABLE\b", re.I)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
