"""Label files: small columns by key, from SQLite, CSV, TSV or JSON lines (`--associate`).

Whatever the format, a file is read once into a table of ours beside the index (SQLite: key, line, values), so
that memory stays flat and a shard's keys are looked up in microseconds. The table is valid as long as the file
is what it was: its fingerprint is kept in it.

The idea is the webdataset library's `associate` (`filters.py`): a mapping from `__key__` to further columns.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import os
import sqlite3
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from wdsfs import host, names, trust
from wdsfs.errors import MissingShard, StaleShard, UnreadableShard, UsageError, ViewError

FORMAT = "1"
KEYS = ("__key__", "key")
_SQLITE, _CSV, _TSV, _LINES = "SQLite", "CSV", "TSV", "JSON lines"
KINDS = {
    **dict.fromkeys((".sqlite", ".sqlite3", ".db"), _SQLITE),
    ".csv": _CSV,
    ".tsv": _TSV,
    **dict.fromkeys((".jsonl", ".ndjson"), _LINES),
}
FIELD_MAX = 64 << 20  # characters of one field of a CSV file, bytes of one of the JSON lines
COLUMNS_MAX = 1 << 16  # different columns of one file
_ASKED = 500  # keys in one question
_BATCH = 10_000  # rows written at a time
_VALUE = struct.Struct("<HI")  # number of the column, bytes

Row = tuple[bytes, int, dict[str, bytes]]  # key, line, values by column


class LabelFile(NamedTuple):
    """A label file as it was typed: an absolute path and, of SQLite, a table."""

    path: bytes
    kind: str
    table: str | None = None

    @property
    def parts(self) -> list[bytes]:
        """The files that it consists of: SQLite keeps what was written last beside it."""
        return [self.path, self.path + b"-wal"] if self.kind == _SQLITE else [self.path]


def label_file(text: str) -> LabelFile:
    """The label file of `--associate FILE` or `FILE.sqlite:TABLE`. Raises UsageError."""
    path, table = text, None
    if not os.path.exists(text):
        before, colon, behind = text.rpartition(":")
        if colon and KINDS.get(Path(before).suffix.lower()) == _SQLITE:
            path, table = before, behind
    kind = KINDS.get(Path(path).suffix.lower())
    if kind is None:
        raise UsageError(f"--associate {text}: no kind of label file that is known; they end in {' '.join(KINDS)}")
    if not os.path.isfile(path):
        raise UsageError(f"--associate {text}: there is no such file")
    return LabelFile(os.fsencode(os.path.abspath(path)), kind, table)


class OpenLabels:
    """A label file, ready for questions: `find`. Made by `opened`."""

    def __init__(self, path: bytes, fingerprint: tuple[int, int, int], db: sqlite3.Connection) -> None:
        self.path, self.fingerprint = path, fingerprint
        self._db = db
        self._columns = dict(db.execute("SELECT number, name FROM columns"))

    def find(self, keys: Sequence[bytes]) -> dict[bytes, list[dict[bytes, bytes]]]:
        """The rows of each of these keys that there are: values by extension."""
        found: dict[bytes, list[dict[bytes, bytes]]] = {}
        for start in range(0, len(keys), _ASKED):
            asked = keys[start : start + _ASKED]
            marks = ",".join("?" * len(asked))
            for key, packed in self._db.execute(f"SELECT key, packed FROM labels WHERE key IN ({marks})", asked):
                found.setdefault(key, []).append(self._unpack(packed))
        return found

    def _unpack(self, packed: bytes) -> dict[bytes, bytes]:
        values, at = {}, 0
        while at < len(packed):
            number, size = _VALUE.unpack_from(packed, at)
            at += _VALUE.size + size
            values[self._columns[number]] = packed[at - size : at]
        return values


def _open_file(path: bytes) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


@contextlib.contextmanager
def opened(
    file: LabelFile,
    fingerprint: tuple[int, int, int],
    directory: Path,
    open_file: Callable[[bytes], int] = _open_file,
) -> Iterator[OpenLabels]:
    """The file as it is now, which is what `fingerprint` says; its table lies in `directory`.

    `open_file` gives a descriptor of it; SQLite opens by the path.

    Raises MissingShard, UnreadableShard, ViewError for what cannot be read as labels.
    """
    table = directory / (hashlib.blake2b(repr(file).encode(), digest_size=16).hexdigest() + ".sqlite")
    try:
        trust.directory(directory, create=True, tighten=True)
        if not _fits(table, fingerprint):
            with host.locked(directory / "lock"):
                if not _fits(table, fingerprint):  # another process may have read it meanwhile
                    _import(file, fingerprint, table, open_file)
        with contextlib.closing(_open(table)) as db:
            if _meta(db) != _state(fingerprint):
                raise StaleShard(f"{os.fsdecode(file.path)} has changed while it was read")
            yield OpenLabels(file.path, fingerprint, db)
    except FileNotFoundError:
        raise MissingShard(f"{os.fsdecode(file.path)}: the label file is gone") from None
    except OSError as error:
        raise UnreadableShard(f"{os.fsdecode(file.path)}: {error.strerror}") from None
    except sqlite3.Error as error:
        if error.sqlite_errorcode in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            table.unlink(missing_ok=True)  # whoever comes next makes it anew
        raise UnreadableShard(f"the table of {os.fsdecode(file.path)} in {directory}: {error}") from None


def prune(directory: Path) -> int:
    """Drop the tables of label files that are gone, and those that nobody can read; returns how many."""
    if not directory.is_dir():
        return 0
    with host.locked(directory / "lock"):
        for unfinished in directory.glob("*.new"):  # of processes that were killed, for others hold the lock
            unfinished.unlink()
    dropped = 0
    for table in directory.glob("*.sqlite"):
        try:
            with contextlib.closing(_open(table)) as db:
                (path,) = db.execute("SELECT path FROM meta").fetchone()
            there = os.path.exists(path)
        except (sqlite3.Error, TypeError):  # damaged, or half of one
            there = False
        if not there:
            table.unlink(missing_ok=True)
            dropped += 1
    return dropped


def _state(fingerprint: Sequence[int]) -> str:
    return f"{FORMAT} {' '.join(map(str, fingerprint))}"


def _meta(db: sqlite3.Connection) -> str | None:
    found = db.execute("SELECT state FROM meta").fetchone()
    return None if found is None else str(found[0])


def _open(table: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{table.as_uri()}?mode=ro", uri=True)


def _fits(table: Path, fingerprint: Sequence[int]) -> bool:
    """Whether there is a table of the file as it is now; one that is damaged is none."""
    if not table.exists():
        return False
    try:
        with contextlib.closing(_open(table)) as db:
            return _meta(db) == _state(fingerprint)
    except sqlite3.Error:
        return False


def _import(file: LabelFile, fingerprint: Sequence[int], table: Path, open_file: Callable[[bytes], int]) -> None:
    new = table.with_suffix(".new")
    new.unlink(missing_ok=True)
    try:
        with contextlib.closing(sqlite3.connect(new)) as db:
            db.executescript(
                # Whoever is killed leaves a file that nobody looks at.
                "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;"
                "CREATE TABLE labels (key BLOB, line INTEGER, packed BLOB);"
                "CREATE TABLE columns (number INTEGER PRIMARY KEY, name BLOB);"
                "CREATE TABLE meta (state TEXT, path BLOB);"
            )
            numbers: dict[str, int] = {}
            batch: list[tuple[bytes, int, bytes]] = []
            for key, line, values in _rows(file, open_file):
                batch.append((names.plain_key(key), line, _pack(file, line, values, numbers)))
                if len(batch) == _BATCH:
                    db.executemany("INSERT INTO labels VALUES (?, ?, ?)", batch)
                    batch.clear()
            db.executemany("INSERT INTO labels VALUES (?, ?, ?)", batch)
            db.executemany(
                "INSERT INTO columns VALUES (?, ?)", [(n, os.fsencode(name)) for name, n in numbers.items()]
            )
            db.execute("CREATE INDEX by_key ON labels (key)")
            db.execute("INSERT INTO meta VALUES (?, ?)", (_state(fingerprint), file.path))
            db.commit()
        with open(new, "rb") as file_:  # a power cut could leave a table with holes, which looks whole
            os.fsync(file_.fileno())
        new.replace(table)
    finally:
        new.unlink(missing_ok=True)


def _pack(file: LabelFile, line: int, values: dict[str, bytes], numbers: dict[str, int]) -> bytes:
    """The values of a row as one; each column gets its number when it is first seen."""
    parts = []
    for column, value in values.items():
        number = numbers.get(column)
        if number is None:
            _check_column(file, line, column)
            if len(numbers) >= COLUMNS_MAX:
                raise _wrong(file, line, f"the field {column!r} is one too many: there are {COLUMNS_MAX:,} others")
            number = numbers[column] = len(numbers)
        parts += [_VALUE.pack(number, len(value)), value]
    return b"".join(parts)


def _check_column(file: LabelFile, line: int, column: str) -> None:
    try:
        fits = 0 < len(os.fsencode(column)) <= names.NAME_MAX
    except UnicodeEncodeError:
        fits = False
    if not fits or "/" in column or "\0" in column or column in (".", ".."):
        raise _wrong(file, line, f"the column {column!r} cannot be the name of a file; rename it")


def _wrong(file: LabelFile, line: int | None, text: str) -> ViewError:
    where = os.fsdecode(file.path) if line is None else f"{os.fsdecode(file.path)}:{line}"
    return ViewError(f"{where}: {text}")


def _key_column(file: LabelFile, columns: Sequence[str], others: Sequence[str] = ()) -> str:
    for name in (*KEYS, *others):
        if name in columns:
            return name
    listed = ", ".join(map(repr, columns)) or "none"
    raise _wrong(
        file, None, f"has no column '__key__' or 'key' that says which sample a row is for; it has {listed}"
    )


def _is_shown(column: str) -> bool:
    """Semantics decision: `__url__` and the like are metadata by the webdataset library's convention."""
    return not column.startswith("__")


def _value(file: LabelFile, line: int, column: str, value: Any) -> bytes | None:
    """What the file of a value holds; None for no file."""
    if value is None:
        return None
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        text = value
    elif isinstance(value, float):
        text = repr(value)
    else:
        text = json.dumps(value, ensure_ascii=False)
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise _wrong(
            file, line, f"the field {column!r} holds half of a surrogate pair, which is no text"
        ) from None


def _rows(file: LabelFile, open_file: Callable[[bytes], int]) -> Iterator[Row]:
    """The rows of a label file. Raises ViewError, which names file, line and field; OSError."""
    if file.kind == _SQLITE:
        yield from _sqlite_rows(file)
    elif file.kind == _LINES:
        yield from _json_rows(file, open_file)
    else:
        yield from _csv_rows(file, open_file)


def _csv_rows(file: LabelFile, open_file: Callable[[bytes], int]) -> Iterator[Row]:
    delimiter = "\t" if file.kind == _TSV else ","
    before = csv.field_size_limit(FIELD_MAX)
    with open(open_file(file.path), newline="", encoding="utf-8-sig", errors="surrogateescape") as stream:
        lines = csv.reader(stream, delimiter=delimiter, strict=True)
        try:
            columns = next(lines, [])
            key = columns.index(_key_column(file, columns))
            twice = next((name for name in columns if columns.count(name) > 1), None)
            if twice is not None:
                raise _wrong(file, 1, f"the column {twice!r} is there twice")
            for fields in lines:
                if not fields:  # an empty line
                    continue
                if len(fields) != len(columns):
                    raise _wrong(
                        file, lines.line_num, f"has {len(fields)} fields; the first line has {len(columns)}"
                    )
                # Semantics decision: an empty field is no value, hence no file: CSV has no other way to say so.
                shown = {
                    name: os.fsencode(text)
                    for name, text in zip(columns, fields, strict=True)
                    if text and name != columns[key] and _is_shown(name)
                }
                yield os.fsencode(fields[key]), lines.line_num, shown
        except csv.Error as error:
            raise _wrong(file, lines.line_num, str(error)) from None
        finally:
            csv.field_size_limit(before)


def _json_rows(file: LabelFile, open_file: Callable[[bytes], int]) -> Iterator[Row]:
    with os.fdopen(open_file(file.path), "rb") as stream:
        for line, text in enumerate(iter(lambda: stream.readline(FIELD_MAX + 1), b""), 1):
            if not text.strip():
                continue
            if len(text) > FIELD_MAX:
                raise _wrong(
                    file, line, f"is longer than {FIELD_MAX >> 20} MiB; one object in each line is needed"
                )
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise _wrong(file, line, f"is no JSON: {error}") from None
            if not isinstance(row, dict):
                raise _wrong(file, line, "is no JSON object")
            name = next((one for one in KEYS if one in row), None)
            if name is None:
                raise _wrong(file, line, f"has no field '__key__' or 'key'; it has {', '.join(map(repr, row))}")
            key = _value(file, line, name, row[name])
            if key is None or isinstance(row[name], dict | list | bool):
                raise _wrong(file, line, f"the field {name!r} is no key: {row[name]!r}")
            found = {
                column: _value(file, line, column, value)
                for column, value in row.items()
                if column != name and _is_shown(column)
            }
            yield key, line, {column: value for column, value in found.items() if value is not None}


def _sqlite_rows(file: LabelFile) -> Iterator[Row]:
    uri = Path(os.fsdecode(file.path)).as_uri()
    try:
        with contextlib.closing(sqlite3.connect(f"{uri}?mode=ro", uri=True)) as db:
            table = _table(file, db)
            # Text that is not UTF-8 goes through as it is.
            db.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
            about = db.execute(f"PRAGMA table_info({_quoted(table)})").fetchall()
            primary = [os.fsdecode(name) for _, name, *_, number in about if number]
            cursor = db.execute(f"SELECT * FROM {_quoted(table)}")
            columns = [name for name, *_ in cursor.description]  # generated ones, too
            key = _key_column(file, columns, primary if len(primary) == 1 else ())
            at = columns.index(key)
            for line, row in enumerate(cursor, 1):
                name = _value(file, line, key, row[at])
                if name is None:
                    raise _wrong(file, line, f"the column {key!r} is NULL in this row of {table!r}")
                found = {
                    column: _value(file, line, column, value)
                    for column, value in zip(columns, row, strict=True)
                    if column != key and _is_shown(column)
                }
                yield name, line, {column: value for column, value in found.items() if value is not None}
    except sqlite3.Error as error:
        raise _wrong(file, None, f"cannot be read as SQLite: {error}") from None


def _table(file: LabelFile, db: sqlite3.Connection) -> str:
    query = (
        "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
    )
    tables = [str(name) for (name,) in db.execute(query)]
    if file.table is None and len(tables) == 1:
        return tables[0]
    if file.table in tables:
        return str(file.table)
    listed = ", ".join(tables) or "none"
    what = "name one of its tables" if file.table is None else f"has no table {file.table!r}"
    raise _wrong(file, None, f"{what}, as in {os.path.basename(os.fsdecode(file.path))}:TABLE; it has {listed}")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
