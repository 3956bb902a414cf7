"""Makes the table of the set that the pages show, in the background, and keeps it in a database of DuckDB.

First keys and sizes of all shards, by their records; then the values of small files, shard by shard, from the
cache or read now. The rows of a shard stay as long as a snapshot has the shard with this content, so a set that
grows is read once. A shard that is taken out or changes loses its rows.

The database is in memory, compressed, and bounded: shards beyond the limit are left out, and the pages say so. No
name of a column is part of SQL: the columns of the database are numbered.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa
from pyarrow import compute

from wdsfs.door.urls import is_remote
from wdsfs.errors import ShardError, StaleShard, counted
from wdsfs.index.record import Record
from wdsfs.pages.shown_set import Snapshot, Subject
from wdsfs.tree.sample_reader import SampleReader
from wdsfs.tree.set_table import ShardValues, as_type, left_of
from wdsfs.tree.table_rows import SIZE, Left, ShardMembers, common_type, entries_of, folders_of, keys_of

log = logging.getLogger("wdsfs")

COLUMNS_MAX = 400  # of the table
ROWS_AT_ONCE, SECONDS_AT_ONCE = 100_000, 0.3  # that wait to be inserted together
INSERTED = 10_000  # rows: DuckDB never packs larger pieces
MEMORY_MAX, MEMORY_SHARE = 8 << 30, "25%"  # bytes, and the part of what this process may use, for the database
CLOSE_SECONDS = 10.0  # that the thread has to end
AGAIN_SECONDS = 0.5  # until the table of a set that changes is made again
# Of the database's memory: packed rows, and rows that wait to be packed; questions have the rest.
TABLE_SHARE, FRESH_SHARE = 0.5, 0.1
PACKED_AT_ONCE = 2 * 122_880  # rows
SIZES, WHOLE = "sizes", "whole"  # tables of the database: keys and sizes; and these with the values
FOLDER = "__folder__"  # the column with the folder of the key
CLASSES = {FOLDER, "cls", "cls2", "class", "label", "category"}  # last names of columns that are classes

_TYPES = {pa.int64(): "BIGINT", pa.float64(): "DOUBLE", pa.bool_(): "BOOLEAN", pa.string(): "VARCHAR"}


class Column(NamedTuple):
    """A column of the table: its name, its kind (`class`, `size`, `number`, `text`, `truth`), and its type.

    `field` is its name in the database.
    """

    name: str
    field: str
    type: Any

    @property
    def kind(self) -> str:
        """The kind of its values."""
        if self.name.startswith(SIZE):
            return "size"
        last = self.name.partition("~")[0].rpartition(".")[2]
        if last in CLASSES and not pa.types.is_floating(self.type):
            return "class"
        if pa.types.is_boolean(self.type):
            return "truth"
        return "text" if pa.types.is_string(self.type) else "number"


class _Ended(BaseException):
    """The server ends."""


class _Full(Exception):
    """The database has no room for more rows."""


class _Turns:
    """The lock of a set for a reader in the background, which lets others in, and ends when it is told to."""

    def __init__(self, lock: AbstractContextManager[Any], check: Callable[[], None]) -> None:
        self._lock, self._check, self._count = lock, check, 0

    def __enter__(self) -> None:
        self._count += 1
        if self._count % 100 == 0:
            time.sleep(0.0005)  # else the others might never get the lock
        self._check()
        self._lock.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._lock.__exit__(*error)


class TableMaker:
    """The table, and the thread that makes it. `close` ends both.

    `rows_of` says which rows are those of a snapshot. `problem` is a sentence about what is not in the table.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.state = 0  # another one whenever rows or columns have changed
        self.problem = ""
        self._begin()
        self._changed = threading.Condition()
        # Of the last snapshot that was asked for, of the one that is made, and of the last one that is ready.
        self._version: tuple[int, int] | None = None
        self._made: tuple[int, int] | None = None
        self._ready: tuple[int, int] | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="table", daemon=True)
        self._thread.start()

    def _begin(self) -> None:
        """Begin with an empty database."""
        self.database, self._memory = _database()
        self._cursor, self._packed = self.database.cursor(), 0  # bytes after the last checkpoint
        self._rows = self._row_bytes = 0  # rows, and the bytes of one that is not packed
        self.columns: dict[str, Column] = {}
        self._has_all_columns = True
        self._unread: dict[int, str] = {}  # why shards have no values, by their numbers here
        self._left: dict[int, Left] = {}  # values that the table lacks, by shard
        self._numbers: dict[str, int] = {}  # of shards in the database, by the keys of their content
        self._next = itertools.count()
        self._known: dict[tuple[int, int, int], int] = {}  # the same, by their versions in snapshots
        self.done: dict[str, set[int]] = {SIZES: set(), WHOLE: set()}  # shards that are in the tables
        self._waiting: list[tuple[int, Any]] = []

    def close(self) -> None:
        """End the thread and the database."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join(CLOSE_SECONDS)  # it ends at its next look at the set
        self.database.close()

    def follow(self, now: Snapshot) -> None:
        """Make the table of this snapshot from now on."""
        if now.version != self._version:
            with self._changed:
                self._version = now.version
                self._changed.notify_all()

    @property
    def is_ready(self) -> bool:
        """True if the table will have no more rows of the present set."""
        return self._version == self._ready

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for a condition of the table, at most so long; return whether it holds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended or condition(), seconds)

    def number_of(self, now: Snapshot, shard: int) -> int | None:
        """Return the number that a shard of a snapshot has in the table; None if it is not there yet."""
        return self._known.get(now.version_of(shard))

    # --- the thread

    def _check(self) -> None:
        if self._ended:
            raise _Ended

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._ended or self._version != self._made)
                self._check()
                self._made = self._version
                self._make()
        except _Ended:
            return

    def _make(self) -> None:
        """Bring the table to the present snapshot. The pages show errors."""
        problem = ""
        try:
            with self._subject.snapshots.snapshot() as now:
                self._add_all(now)
            problem = self._left_out()
        except ShardError:  # of a shard that was there in the snapshot
            with self._changed:
                self._changed.wait_for(lambda: self._ended, AGAIN_SECONDS)
                self._made = None
        except (_Full, duckdb.OutOfMemoryException, duckdb.FatalException) as error:
            if isinstance(error, duckdb.FatalException):  # no memory for a checkpoint: the database is lost
                self._begin()
            problem = f"The memory for the table ({self._memory >> 20:,} MiB) is full: some shards are not in it."
        except Exception as error:
            log.debug("the table of the pages", exc_info=True)
            problem = f"The table cannot be made: {error}"
        with self._changed:
            self._waiting.clear()
            self.problem, self._ready = problem, self._made
            self.state += 1
            self._changed.notify_all()

    def _left_out(self) -> str:
        """Return sentences about the values that the table lacks."""
        texts = []
        if self._unread:
            first = next(iter(self._unread.values()))
            texts.append(f"The values of {counted(len(self._unread), 'shard')} are not in the table: {first}.")
        left = functools.reduce(Left.plus, self._left.values(), Left())
        if left.unreadable:
            texts.append(f"{counted(left.unreadable, 'file')} without a value, the first: {left.example}.")
        if not self._has_all_columns:
            texts.append(f"The table has the first {len(self.columns)} columns.")
        return " ".join(texts)

    def _add_all(self, now: Snapshot) -> None:
        snapshots = self._subject.snapshots
        with snapshots.asking():  # before the keys are made, which are those of the snapshot or raise StaleShard
            turns = _Turns(snapshots.lock, self._check)
            reader = SampleReader(now.lower, turns, in_classes=snapshots.in_classes, skip_unreadable=True)
        values = ShardValues(now.lower, self._subject.composition, reader)

        def key_now(shard: int) -> str:
            return now.record(shard, lambda _: values.key(shard))

        for shard in self._shards(now):
            key = values.keys[shard] = key_now(shard)
            number = self._numbers.get(key)
            if number is None:
                number = self._numbers[key] = next(self._next)
            if number not in self.done[SIZES]:
                self._add(SIZES, number, self._sizes(now, shard, number))
            self._known[now.version_of(shard)] = number
        self._flush(SIZES)
        self._forget(now, values.keys)
        for shard in self._shards(now):
            number = self._known[now.version_of(shard)]
            if number not in self.done[WHOLE]:
                rows = self._sizes(now, shard, number)
                self._add(WHOLE, number, self._with_values(rows, values, shard, number, now))
        self._flush(WHOLE)
        self._pack()

    def _shards(self, now: Snapshot) -> Iterator[int]:
        """Yield the shards that can be read, until a page asks for another snapshot."""
        for shard in list(now.readable):
            self._check()
            if self._version not in (self._made, now.version):
                raise StaleShard("the set has changed")
            yield shard

    def _forget(self, now: Snapshot, keys: Mapping[int, str]) -> None:
        """Delete the rows of all shards but those of a snapshot."""
        self._numbers = {key: self._numbers[key] for key in keys.values()}
        self._known = {now.version_of(shard): self._numbers[key] for shard, key in keys.items()}
        numbers = set(self._known.values())
        for table, done in self.done.items():
            gone = done - numbers
            if gone:
                self._cursor.execute(f"DELETE FROM {table} WHERE list_contains(?, shard)", [sorted(gone)])
                done -= gone
        for notes in (self._unread, self._left):
            for number in notes.keys() - numbers:
                del notes[number]

    # --- rows

    def _sizes(self, now: Snapshot, shard: int, number: int) -> dict[str, Any]:
        """Return the rows of a shard by the names of columns, without values. Raises ShardErrors."""
        entries = entries_of(now.order(shard))

        def ask(record: Record) -> tuple[Any, dict[str, Any]]:
            """Return the keys, and the folders and sizes by the names of columns."""
            sizes = ShardMembers(record, entries).sizes()
            columns = {SIZE + name: column for name, column in sizes.items()}
            return keys_of(record, entries), columns | _folders(record, entries)

        keys, sizes = now.record(shard, ask)
        places = pa.array(np.arange(len(entries), dtype=np.int32))
        fixed = {"shard": pa.repeat(pa.scalar(number, pa.int32()), len(entries)), "place": places, "key": keys}
        return fixed | self._named(sizes)

    def _with_values(
        self, rows: dict[str, Any], values: ShardValues, shard: int, number: int, now: Snapshot
    ) -> dict[str, Any]:
        """Return rows with the values of their shard, which is not read if that would need the network."""
        try:
            path = now.shards[shard].path
            table = values.find(shard) if is_remote(path) else values.table(shard)
        except StaleShard:
            raise
        except ShardError as error:
            self._unread[number] = str(error)
            return rows
        if table is None:
            self._unread[number] = f"{os.fsdecode(path)} is remote; `wdsfs table` reads such values into the cache"
            return rows
        self._left[number] = left_of(table.schema)
        return rows | self._named(dict(zip(table.column_names, table.columns, strict=True)))

    def _named(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Return columns by their names in the database. Missing columns are added to it."""
        named = {}
        for name, array in arrays.items():
            if not pa.types.is_null(array.type):
                column = self._column(name, array.type)
                if column is not None:
                    values = as_type(array, column.type)
                    is_text = pa.types.is_string(values.type)
                    named[column.field] = compute.utf8_trim(values, " \t\r\n") if is_text else values
        return named

    def _column(self, name: str, kind: Any) -> Column | None:
        """Return a column that has such values; None if there are too many."""
        column = self.columns.get(name)
        if column is None:
            # Half of them have room for values, whatever files samples have.
            if len(self.columns) >= COLUMNS_MAX // (1 + is_of_records(name)):
                self._has_all_columns = False
                return None
            column = Column(name, f"c{len(self.columns)}", kind)
            change = f"ADD COLUMN {column.field} {_TYPES[kind]}"
        elif common_type(column.type, kind) != column.type:
            column = column._replace(type=common_type(column.type, kind))
            change = f"ALTER COLUMN {column.field} TYPE {_TYPES[column.type]}"
        else:
            return column
        for table in (SIZES, WHOLE) if is_of_records(name) else (WHOLE,):
            self._cursor.execute(f"ALTER TABLE {table} {change}")
        self.columns = {**self.columns, name: column}  # others are reading the old one
        return column

    def _add(self, table: str, number: int, rows: dict[str, Any]) -> None:
        """Add the rows of a shard, small shards together."""
        if not self._waiting:
            self._began = time.monotonic()
        self._waiting.append((number, rows))
        if (
            sum(len(rows["place"]) for _, rows in self._waiting) >= ROWS_AT_ONCE
            or time.monotonic() - self._began > SECONDS_AT_ONCE
        ):
            self._flush(table)

    def _flush(self, table: str) -> None:
        for rows in _together(rows for _, rows in self._waiting):
            self._rows += len(rows)
            self._row_bytes = max(self._row_bytes, rows.nbytes // max(len(rows), 1))
            for begin in range(0, len(rows), INSERTED):
                # In one piece: DuckDB takes 30 times as long for thousands of small ones with many columns.
                self._cursor.register("part", rows.slice(begin, INSERTED).combine_chunks())
                self._cursor.execute(f"INSERT INTO {table} BY NAME SELECT * FROM part")
                self._cursor.unregister("part")
        with self._changed:
            self.problem = self._left_out()  # before the table may be complete
            self.done[table] |= {number for number, _ in self._waiting}
            self.state += 1
            self._changed.notify_all()
        self._waiting.clear()
        if self._used() - self._packed > self._memory * FRESH_SHARE:
            self._pack()

    def _pack(self) -> None:
        """Pack the rows, if there is memory for it: DuckDB unpacks two groups of rows at once. Raises _Full."""
        at_once = min(PACKED_AT_ONCE, self._rows) * 2 * self._row_bytes
        if self._used() + at_once < self._memory * 0.9:  # else the database might be lost
            self._cursor.execute("CHECKPOINT")
        self._packed = self._used()
        if self._packed > self._memory * TABLE_SHARE:
            raise _Full

    def _used(self) -> int:
        """Return the memory of the database (bytes)."""
        rows = self._cursor.execute("SELECT sum(memory_usage_bytes) FROM duckdb_memory()").fetchall()
        return int(rows[0][0])


def is_of_records(name: str) -> bool:
    """Return True for a column of the table that the records have."""
    return name == FOLDER or name.startswith(SIZE)


def _folders(record: Record, entries: Any) -> dict[str, Any]:
    """Return the column with the folders of the keys of samples; none where no key has a folder."""
    if record.folders == 1:
        return {}
    paths = [record.folder_path(folder).decode("utf-8", "backslashreplace") for folder in range(record.folders)]
    texts = pa.array([path or None for path in paths], pa.string())
    return {FOLDER: texts.take(pa.array(folders_of(record, entries)))}


def _together(parts: Iterator[dict[str, Any]]) -> list[Any]:
    """Return parts as one table of Arrow; as several if the type of a column has changed between them."""
    tables = [pa.table(part) for part in parts]
    try:
        return [pa.concat_tables(tables, promote_options="permissive")] if tables else []
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return tables


def _database() -> tuple[Any, int]:
    """Return an empty database, which reaches no file, loads no extension and has a limit of memory (bytes)."""
    database = duckdb.connect(
        ":memory:",
        config={
            "threads": 2,
            "memory_limit": MEMORY_SHARE,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "allow_community_extensions": False,
            "python_enable_replacements": False,
        },
    )
    size, unit = database.execute("SELECT current_setting('memory_limit')").fetchall()[0][0].split()
    memory = min(MEMORY_MAX, int(float(size) * 1024 ** ("bytes", "KiB", "MiB", "GiB", "TiB").index(unit)))
    fixed = "shard INTEGER, place INTEGER, key VARCHAR"
    for line in (
        f"SET memory_limit = '{memory >> 20}MiB'",
        "SET temp_directory = ''",
        "SET enable_external_access = false",
        "SET lock_configuration = true",
        f"CREATE TABLE {SIZES} ({fixed})",
        f"CREATE TABLE {WHOLE} ({fixed})",
    ):
        database.execute(line)
    return database, memory
