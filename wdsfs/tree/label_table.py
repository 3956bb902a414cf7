"""Tables in the cache of label files and lists of keys: the rows by key, and which keys are listed.

A file of any format is read once (`label_rows.py`), so that memory stays flat and a shard's keys are looked up in
microseconds. The key of a table in the cache contains the fingerprint of the file. A table of labels is SQLite's
(key, line, values). That of a list is mapped and never loaded: the keys in the order of the list, and a row for
each of them, sorted by the CRC-32 of the key. Keys are compared byte by byte, so no equal sum chooses a sample
that is not listed.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import mmap
import os
import sqlite3
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsfs import names
from wdsfs.cache import file_cache
from wdsfs.cache.file_cache import NewFile
from wdsfs.door.shard_door import DOOR
from wdsfs.errors import MissingShard, UnreadableShard, ViewError, counted
from wdsfs.shards import Fingerprint
from wdsfs.tree.label_files import (
    COLUMNS_MAX,
    KEY_COLUMN_WAY_OUT,
    KEY_MAX,
    NO_KEY,
    TOO_LONG,
    LabelFile,
    LabelFiles,
    LabelSource,
    OpenFile,
    label_error,
    shorten,
    text_of_files,
)
from wdsfs.tree.label_names import ADD, BEGIN, END, Uses, forms_of, rows_meant, sample_name, shared_row
from wdsfs.tree.label_rows import read_keys, read_rows

FORMAT, LABELS, KEYS, NAMES = "6", "labels", "keys", "names"  # of tables in the cache, and their kinds
NAMED, SHOWN = 3, 200  # keys of no sample that a message names, bytes of each
_KEYS_MAX = 500  # keys in one query
_BATCH = 10_000  # rows written at a time
_VALUE = struct.Struct("<HI")  # number of the column, bytes


class Missing(NamedTuple):
    """The keys of a table that no sample has: how many of all `lines`, and the first ones."""

    number: int
    lines: int
    first: list[bytes]


class LabelRow(NamedTuple):
    """A row of label files: its number among all rows from 1 on, that of its file, and the values by extension.

    `is_file`: it names a file. `is_loose`: directories were left out to match it (step 3 of `label_names.py`).
    """

    number: int
    file: int
    is_file: bool
    values: dict[bytes, bytes]
    is_loose: bool = False


class OpenLabels:
    """The label files of an option, opened for lookups. Made by `open_labels`.

    `columns` are the names of all columns with a value, `guessed` those of the keys that no option has named.
    """

    def __init__(self, files: LabelFiles, fingerprints: Sequence[Fingerprint], db: sqlite3.Connection) -> None:
        self.files, self.fingerprints = files, fingerprints
        self._db = db
        self._names: dict[int, bytes] = dict(db.execute("SELECT number, name FROM columns"))
        self.columns = list(self._names.values())
        self.guessed = [name for (name,) in db.execute("SELECT name FROM guesses")]

    def find(self, keys: Sequence[bytes]) -> dict[bytes, list[LabelRow]]:
        """Return the rows of each of these keys that has any, as `label_names.py` says."""
        rows: dict[bytes, list[LabelRow]] = {}
        for key, row in self._rows("key", keys):
            rows.setdefault(key, []).append(row)
        for key, some in rows.items():
            if len(some) > 1:
                rows[key] = [row for row in some if not row.is_file] or some
        meant = rows_meant(self._db, [key for key in keys if key not in rows])
        numbers = sorted({number for some in meant.values() for number in some})
        loose = {row.number: row._replace(is_loose=True) for _, row in self._rows("rowid", numbers)}
        return rows | {key: [loose[number] for number in sorted(some)] for key, some in meant.items()}

    def _rows(self, column: str, values: Sequence[object]) -> Iterator[tuple[bytes, LabelRow]]:
        """Yield each row with one of these values in a column, and its key."""
        for start in range(0, len(values), _KEYS_MAX):
            some = values[start : start + _KEYS_MAX]
            where = f"{column} IN ({','.join('?' * len(some))})"
            query = f"SELECT key, rowid, file, is_file, packed FROM labels WHERE {where}"
            for key, number, file, is_file, packed in self._db.execute(query, some):
                yield key, LabelRow(number, file, bool(is_file), self._unpack(packed))

    def missing(self, uses: Iterable[Uses]) -> Missing:
        """Return the rows without a sample."""
        (count,) = self._db.execute("SELECT ifnull(max(rowid), 0) FROM labels").fetchone()
        is_used = np.zeros(count + 1, bool)
        is_used[0] = True
        for some in uses:
            is_used[some >> 1] = True
        first = np.flatnonzero(~is_used)[:NAMED].tolist()
        return Missing(int(count + 1 - is_used.sum()), count, [self.name(row)[:SHOWN] for row in first])

    @staticmethod
    def uses(matches: Iterable[Sequence[LabelRow]]) -> Uses:
        """Return which rows are used by samples that `find` has found these for."""
        rows = [some for some in matches if len(some) == 1 or not some[0].is_loose]
        return np.array([row.number << 1 | row.is_loose for some in rows for row in some], np.int64)

    def name(self, row: int) -> bytes:
        """Return the key in a row, without the extension of a file."""
        (key,) = self._db.execute("SELECT key FROM labels WHERE rowid = ?", (row,)).fetchone()
        return bytes(key)

    def _unpack(self, packed: bytes) -> dict[bytes, bytes]:
        values, at = {}, 0
        while at < len(packed):
            number, size = _VALUE.unpack_from(packed, at)
            at += _VALUE.size + size
            values[self._names[number]] = packed[at - size : at]
        return values


@contextlib.contextmanager
def open_labels(
    files: LabelFiles, fingerprints: Sequence[Fingerprint], open_file: OpenFile = DOOR.open_shard
) -> Iterator[OpenLabels]:
    """Open label files with these fingerprints, by their table in the cache.

    `open_file` opens them; SQLite opens a local one by its path.

    Raises MissingShard, UnreadableShard, IndexUnusable, ViewError for a file that does not contain labels.
    """
    fill = partial(_fill_labels, files, open_file)
    with open_table(files, fingerprints, LABELS, fill) as fd, contextlib.closing(_opened(fd)) as db:
        yield OpenLabels(files, fingerprints, db)


def _opened(fd: int) -> sqlite3.Connection:
    return sqlite3.connect(f"file:/proc/self/fd/{fd}?mode=ro&immutable=1", uri=True)


@contextlib.contextmanager
def open_table(
    files: LabelFiles, fingerprints: Sequence[Fingerprint], kind: str, fill: Callable[[NewFile], tuple[str, int]]
) -> Iterator[int]:
    """Open the table of label files, of this kind, in the cache; `fill` makes it. Raises as `open_labels`."""
    about = repr((FORMAT, *map(tuple, files), *map(tuple, fingerprints)))
    key = hashlib.blake2b(about.encode(), digest_size=16).hexdigest()
    cache, path = file_cache.cache(), files[0].text
    try:
        table = cache.make(key, (kind,), fill)
        try:
            yield table.fd
        finally:
            os.close(table.fd)
    except FileNotFoundError as error:
        raise MissingShard(f"{error.filename or path}: the file is gone") from None
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


_LABELS = """
    CREATE TABLE labels (key BLOB, is_file INTEGER, line INTEGER, file INTEGER, packed BLOB);
    CREATE TABLE columns (number INTEGER PRIMARY KEY, name BLOB);
    CREATE TABLE guesses (name TEXT PRIMARY KEY);
"""


@contextlib.contextmanager
def _new_database(table: NewFile) -> Iterator[sqlite3.Connection]:
    """Provide the database of a new table, for names of files and more."""
    with contextlib.closing(sqlite3.connect(table.path)) as db:
        # A process that is killed leaves a file that no other process uses.
        db.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;" + BEGIN)
        yield db
        db.execute(END)
        db.commit()


def _fill_labels(files: LabelFiles, open_file: OpenFile, table: NewFile) -> tuple[str, int]:
    """Read label files into a new table; returns the kind and the size (bytes) of that."""
    with _new_database(table) as db:
        db.executescript(_LABELS)
        numbers: dict[str, int] = {}
        rows = 0
        for at, file in enumerate(files):
            source = LabelSource(file, open_file)
            all_rows = read_rows(source)
            while batch := list(itertools.islice(all_rows, _BATCH)):
                is_key = source.has_keys
                packed = [
                    (*sample_name(key, file.reading, is_key=is_key), line, at, _pack(file, line, row, numbers))
                    for key, line, row in batch
                ]
                db.executemany("INSERT INTO labels VALUES (?, ?, ?, ?, ?)", packed)
                of_files = [(row, key) for row, (key, is_file, *_) in enumerate(packed, rows + 1) if is_file]
                db.executemany(ADD, forms_of(of_files))
                rows += len(packed)
                table.reserve(os.fstat(table.fd).st_size)
            if source.guessed is not None:
                db.execute("INSERT OR IGNORE INTO guesses VALUES (?)", (source.guessed,))
        columns = [(number, os.fsencode(name)) for name, number in numbers.items()]
        db.executemany("INSERT INTO columns VALUES (?, ?)", columns)
        db.execute("CREATE INDEX by_key ON labels (key)")
    return LABELS, os.fstat(table.fd).st_size


def _pack(file: LabelFile, line: int, values: dict[str, bytes], numbers: dict[str, int]) -> bytes:
    """Pack the values of a row; each column gets a number when it is first seen."""
    parts = []
    for column, value in values.items():
        number = numbers.get(column)
        if number is None:
            _refuse_surrogates(file, line, column)
            if len(numbers) >= COLUMNS_MAX:
                text = f"too many fields, at {shorten(column)}: the limit is {COLUMNS_MAX:,}"
                raise label_error(file, line, text)
            number = numbers[column] = len(numbers)
        parts += [_VALUE.pack(number, len(value)), value]
    return b"".join(parts)


def _refuse_surrogates(file: LabelFile, line: int, column: str) -> None:
    try:
        os.fsencode(column)
    except UnicodeEncodeError:
        raise label_error(file, line, f"the column {shorten(column)} has a name that is not text") from None


def refuse_column(file: LabelFile, name: bytes) -> None:
    """Raise ViewError for a column of samples whose name cannot be that of a file."""
    if len(name) > names.NAME_MAX or b"/" in name or b"\0" in name or name in (b".", b".."):
        what = f"the column {shorten(names.text_of(name))} cannot be the name of a file"
        raise label_error(file, None, f"{what}; rename the column, or choose other columns with --columns")


# -- lists of keys ---------------------------------------------------------------------------------------------

_LIST_HEAD = struct.Struct("<QQ")  # where the rows begin, how many there are
_LENGTH = struct.Struct("<I")  # in front of each key
_OF_FILE = 1 << 31  # is added to the length if the key was the name of a file
_PADS = [bytes(size) for size in range(8)]
_UNIT = 8  # bytes: keys begin at multiples, so that the place of one, in units, and its sum are 64 bits
_PLACE, _SUM = np.uint64((1 << 32) - 1), np.uint64(32)  # the lower half of a row; how far the upper one is shifted
_CHUNK = 1 << 20  # rows that are looked at at a time
_EQUAL_MAX = 100  # different keys of one sum: by chance 100 million keys have 5

Rows = NDArray[np.uint64]  # the sum of a key, and its place


class KeyList:
    """A list of keys, opened for lookups. Made by `open_key_list`.

    `guessed` are the names of the columns of the keys that no option has named. `names` is a database of the
    names of files in the list, if it `has_names`.
    """

    def __init__(self, files: LabelFiles, data: mmap.mmap) -> None:
        self.files, self._data = files, data
        start, self.lines = _LIST_HEAD.unpack_from(data)
        self._rows: Rows = np.frombuffer(data, np.uint64, self.lines, start)
        about = json.loads(data[start + self.lines * _UNIT :] or b"{}")
        self.guessed: list[str] = about.get("guessed", [])
        self.has_names: bool = about.get("has_names", False)
        self.names: sqlite3.Connection | None = None

    def name(self, row: int) -> bytes:
        """Return the key in a row, without the extension of a file."""
        return self.key_at(row)[1]

    def key_at(self, row: int) -> tuple[bool, bytes]:
        """Return whether a row has the name of a file, and its key."""
        at = (row & int(_PLACE)) * _UNIT
        (length,) = _LENGTH.unpack_from(self._data, at)
        return length >= _OF_FILE, self._data[at + _LENGTH.size : at + _LENGTH.size + length % _OF_FILE]

    def places(self) -> Iterator[NDArray[np.int64]]:
        """Yield the places of the keys, some at a time, each once: a key that is listed twice has equal rows."""
        last = -1
        for begin in range(0, self.lines, _CHUNK):
            places = (self._rows[begin : begin + _CHUNK] & _PLACE).astype(np.int64)
            fresh = np.diff(places, prepend=last) != 0
            last = int(places[-1])
            yield places[fresh]

    def find(self, shard: bytes, keys: Sequence[bytes]) -> tuple[NDArray[np.int64], Uses]:
        """Return for each key of a shard its first place in the list, or -1; and how all lines are used.

        Semantics decision: a line is `KEY`, of any shard, or `SHARD/KEY`, with the name of the shard in the mount.
        """
        places, used, plain = np.full(len(keys), -1, np.int64), set[int](), _sums(keys)
        for prefix in (b"", shard + b"/"):
            sums = plain ^ _changes(prefix, keys)
            order = np.argsort(sums)  # so that the search goes through the rows once
            firsts = np.searchsorted(self._rows, sums[order] << _SUM)
            same = self._rows[np.minimum(firsts, self.lines - 1)] >> _SUM == sums[order]
            for at, first in zip(order[same].tolist(), firsts[same].tolist(), strict=True):
                place = self._place(prefix + keys[at], first)
                if place is not None:
                    used.add(place << 1)
                    places[at] = place if places[at] < 0 else min(place, places[at])
        loose = list[int]()  # a row of two samples is there twice
        if self.names is not None:
            left = {keys[at]: at for at in np.flatnonzero(places < 0).tolist()}
            for key, meant in rows_meant(self.names, list(left)).items():
                if len(meant) == 1:
                    places[left[key]] = next(iter(meant))
                    loose.append(int(places[left[key]]) << 1 | 1)
        return places, np.array([*sorted(used), *loose], np.int64)

    def _place(self, key: bytes, first: int) -> int | None:
        """Return the place of a key among the rows with its sum, from the first on."""
        rows = self._rows[first : first + _EQUAL_MAX].tolist()
        alike = itertools.takewhile(lambda row: row >> int(_SUM) == rows[0] >> int(_SUM), rows)
        return next((row & int(_PLACE) for row in alike if self.name(row) == key), None)

    def missing(self, uses: Iterable[Uses]) -> Missing:
        """Return the keys without a sample; `uses` are those of the others, as `find` returns them."""
        bits = np.zeros(len(self._data) // (8 * _UNIT) + 1, np.uint8)
        for some in uses:
            places = some >> 1
            np.bitwise_or.at(bits, places >> 3, (1 << (places & 7)).astype(np.uint8))
        count, first = 0, np.zeros(0, np.int64)
        for places in self.places():
            places = places[bits[places >> 3] >> (places & 7) & 1 == 0]
            count += len(places)
            first = np.sort(np.concatenate((first, places)))[:NAMED]
        return Missing(count, self.lines, [self.name(place)[:SHOWN] for place in first.tolist()])


def guess_remarks(option: str, table: OpenLabels | KeyList) -> list[str]:
    """Return a remark on the columns of the keys, if no option has named them."""
    columns = " and ".join(map(repr, table.guessed))
    text = f"{option} {text_of_files(table.files)}: the keys are in {columns}; {KEY_COLUMN_WAY_OUT}"
    return [text] if columns else []


def refuse_shared(table: OpenLabels | KeyList, uses: Sequence[Uses]) -> None:
    """Raise ViewError if two samples have a row of the table by leaving out directories."""
    row = shared_row(uses)
    if row is not None:
        raise ViewError(
            f"{text_of_files(table.files)}: {names.readable(table.name(row))!r} is the name of several samples; "
            "write the directories that tell them apart, or keys without an extension"
        )


_MISSING = {  # of one, of several, of none that is not missing
    "key": ("is not in the set", "are not in the set", "is in the set"),
    "row": ("has no sample", "have no sample", "has a sample"),
}


def missing_text(missing: Missing, kind: str, uses: Sequence[Uses]) -> str:
    """Return `2 of its 9 rows have no sample: 'a', 'b'` for a message; `uses` are those of all samples."""
    single, several, there = _MISSING[kind]
    if any(map(len, uses)):
        lack = single if missing.number == 1 else several
        text = f"{missing.number:,} of its {counted(missing.lines, kind)} {lack}"
    else:
        text = f"none of its {kind}s {there}"
    first = ", ".join(repr(names.readable(key)) for key in missing.first)
    more = " ..." if missing.number > len(missing.first) else ""
    return f"{text}: {first}{more}" if first else text


@contextlib.contextmanager
def open_key_list(
    files: LabelFiles, fingerprints: Sequence[Fingerprint], open_file: OpenFile = DOOR.open_shard
) -> Iterator[KeyList]:
    """Open a list with these fingerprints, by its table in the cache. Raises as `open_labels`."""
    with open_table(files, fingerprints, KEYS, partial(_fill_keys, files, open_file)) as fd:
        keys = KeyList(files, mmap.mmap(fd, 0, prot=mmap.PROT_READ))
        if not keys.has_names:
            yield keys
            return
        with (
            open_table(files, fingerprints, NAMES, partial(_fill_names, keys)) as names_fd,
            contextlib.closing(_opened(names_fd)) as keys.names,
        ):
            yield keys


def _fill_keys(files: LabelFiles, open_file: OpenFile, table: NewFile) -> tuple[str, int]:
    """Read a list into a new table; returns the kind and the size (bytes) of that."""
    table.write(bytes(_LIST_HEAD.size))
    end, guessed, has_names = _LIST_HEAD.size, dict[str, None](), False
    with tempfile.TemporaryFile(dir=os.path.dirname(table.path)) as unsorted:  # memory does not grow with the list
        for file in files:
            source = LabelSource(file, open_file)
            for keys, numbers in read_keys(source):
                text, rows, of_files = _pack_keys(source, keys, numbers, end)
                has_names |= of_files
                table.write(text)
                unsorted.write(rows)
                end += len(text)
            guessed |= {} if source.guessed is None else {source.guessed: None}
        lines = unsorted.tell() // _UNIT
        if not lines:
            raise label_error(files[0], None, NO_KEY)
        unsorted.seek(0)
        while rows := unsorted.read(_CHUNK):
            table.write(rows)
    os.pwrite(table.fd, _LIST_HEAD.pack(end, lines), 0)
    data = mmap.mmap(table.fd, 0)
    _sort(files[0], np.frombuffer(data, np.uint64, lines, end), KeyList(files, data).name)
    about = json.dumps({"guessed": list(guessed), "has_names": has_names}).encode()
    table.write(about)
    return KEYS, end + lines * _UNIT + len(about)


def _fill_names(keys: KeyList, table: NewFile) -> tuple[str, int]:
    """Write the names of files in a list into a new table; returns the kind and the size (bytes) of that."""
    with _new_database(table) as db:
        for places in keys.places():
            texts = ((place, *keys.key_at(place)) for place in places.tolist())
            db.executemany(ADD, forms_of((place, key) for place, is_file, key in texts if is_file))
            table.reserve(os.fstat(table.fd).st_size)
    return NAMES, os.fstat(table.fd).st_size


def _pack_keys(
    source: LabelSource, keys: Sequence[bytes], lines: Sequence[int], end: int
) -> tuple[bytes, bytes, bool]:
    """Return what a table has of these keys: their text, which begins at `end`, and their rows.

    Also True if some are names of files.
    """
    file = source.file
    for key, line in zip(keys, lines, strict=True) if max(map(len, keys), default=0) > KEY_MAX else ():
        if len(key) > KEY_MAX:
            raise label_error(file, line, TOO_LONG)
    keys = list(filter(None, keys))
    is_file = np.zeros(len(keys), bool)
    if b"." in b"".join(keys):  # one search over all of them takes next to nothing
        pairs = [sample_name(key, file.reading, is_key=source.has_keys) for key in keys]
        keys, is_file = [key for key, _ in pairs], np.array([of_file for _, of_file in pairs])
    lengths = np.fromiter(map(len, keys), np.int64, len(keys))
    pads = -(lengths + _LENGTH.size) % _UNIT
    sizes = _LENGTH.size + lengths + pads
    marked = (lengths + is_file * _OF_FILE).tolist()
    parts = zip(map(_LENGTH.pack, marked), keys, map(_PADS.__getitem__, pads.tolist()), strict=True)
    text = b"".join(itertools.chain.from_iterable(parts))
    if end + len(text) >= _UNIT << 32:
        raise label_error(file, None, f"lists more than {_UNIT * 4} GiB of keys")
    places = (end + np.cumsum(sizes) - sizes).astype(np.uint64) // np.uint64(_UNIT)
    return text, (_sums(keys) << _SUM | places).tobytes(), bool(is_file.any())


def _changes(prefix: bytes, keys: Sequence[bytes]) -> Rows:
    """Return what to combine the CRC-32 of each key with, by XOR, for that of prefix and key.

    The sum is linear, so this depends on the length of the key alone.
    """
    lengths, which = np.unique(np.fromiter(map(len, keys), np.int64, len(keys)), return_inverse=True)
    zeros = map(bytes, lengths.tolist())
    return np.array([zlib.crc32(prefix + some) ^ zlib.crc32(some) for some in zeros], np.uint64)[which]


def _sums(keys: Sequence[bytes]) -> Rows:
    return np.fromiter(map(zlib.crc32, keys), np.uint64, len(keys))


def _sort(file: LabelFile, rows: Rows, key_of: Callable[[int], bytes]) -> None:
    """Sort rows by sum. Rows of equal keys become equal, and follow those of other keys of their sum."""
    rows.sort()
    for first, stop in _equal_sums(rows):
        places: dict[bytes, int] = {}
        for begin in range(first, stop, _CHUNK):
            for row in rows[begin : min(begin + _CHUNK, stop)].tolist():
                places.setdefault(key_of(row), row)
            if len(places) > _EQUAL_MAX:
                raise label_error(file, None, "has keys that were made to have one checksum")
        ordered = list(places.values())
        rows[first : first + len(ordered)] = ordered
        rows[first + len(ordered) : stop] = ordered[-1]


def _equal_sums(rows: Rows) -> Iterator[tuple[int, int]]:
    """Yield the first of several rows of equal sums, and the one after the last of them."""
    inside, first = False, 0
    for begin in range(0, len(rows), _CHUNK):
        sums = rows[begin : begin + _CHUNK + 1] >> _SUM
        same = np.concatenate(([inside], sums[1:] == sums[:-1]))
        for at in np.flatnonzero(same[1:] != same[:-1]).tolist():
            inside = bool(same[at + 1])
            if inside:
                first = begin + at
            else:
                yield first, begin + at + 1
    if inside:
        yield first, len(rows)
