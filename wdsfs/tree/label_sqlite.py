"""Label files in SQLite: their rows. A database of another user is read within limits, and computes nothing."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from wdsfs.door.urls import is_remote
from wdsfs.errors import StaleShard
from wdsfs.shards import Fingerprint
from wdsfs.tree.label_files import (
    NAMED,
    ROW_BYTES,
    LabelFile,
    OpenFile,
    Row,
    key_column,
    label_error,
    open_content,
    value_of,
)

VALUE_MAX = 64 << 20  # bytes of a value
# Limits of reading: for each byte of the file, and the least. Pages of a damaged file may form a circle.
WORK, WORK_LEAST = 100, 1 << 20  # bytes of values, steps of SQLite's machine
_STEPS = 100_000  # between two checks of the limits
_WAL = slice(18, 20)  # of the header of a database: 2 for one with a log
_COPIES_TRIED = 5  # of a database that others write
_PRAGMAS = ((sqlite3.SQLITE_PRAGMA, "table_xinfo"), (sqlite3.SQLITE_PRAGMA, "trusted_schema"))  # that we use
_VIRTUAL = 2  # of a generated column that is not stored
_CREATES_TABLE = re.compile(r"CREATE\s+TABLE\b", re.I)


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
