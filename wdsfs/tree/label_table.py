"""Tables in the cache of label files and lists of keys: the rows by key, and which keys are listed.

A file of any format is read once (`label_rows.py`), so that memory stays flat and a shard's keys are looked up in
microseconds; the key of its table in the cache contains its fingerprint. A table of labels is SQLite's (key, line,
values). That of a list is mapped and never loaded: the keys in the order of the list, and a row for each of them,
sorted by the CRC-32 of the key. Keys are compared byte by byte, so no equal sum chooses a sample that is not
listed.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import itertools
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
from wdsfs.errors import MissingShard, UnreadableShard
from wdsfs.shards import Fingerprint
from wdsfs.tree.label_files import (
    COLUMNS_MAX,
    KEY_MAX,
    NO_KEY,
    TOO_LONG,
    LabelFile,
    LabelFiles,
    LabelSource,
    OpenFile,
    Row,
    label_error,
)
from wdsfs.tree.label_rows import read_keys, read_rows

FORMAT, LABELS, KEYS = "3", "labels", "keys"  # of tables in the cache, and their kinds
_KEYS_MAX = 500  # keys in one query
_BATCH = 10_000  # rows written at a time
_VALUE = struct.Struct("<HI")  # number of the column, bytes


class LabelRow(NamedTuple):
    """A row of label files: its number among all rows from 1 on, that of its file, and the values by extension."""

    number: int
    file: int
    values: dict[bytes, bytes]


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
        """Return the rows of each of these keys that has any."""
        rows: dict[bytes, list[LabelRow]] = {}
        for start in range(0, len(keys), _KEYS_MAX):
            some = keys[start : start + _KEYS_MAX]
            query = f"SELECT key, rowid, file, packed FROM labels WHERE key IN ({','.join('?' * len(some))})"
            for key, number, file, packed in self._db.execute(query, some):
                rows.setdefault(key, []).append(LabelRow(number, file, self._unpack(packed)))
        return rows

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
    with open_table(files, fingerprints, LABELS, partial(_fill_labels, files, open_file)) as fd:
        uri = f"file:/proc/self/fd/{fd}?mode=ro&immutable=1"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as db:
            yield OpenLabels(files, fingerprints, db)


@contextlib.contextmanager
def open_table(
    files: LabelFiles,
    fingerprints: Sequence[Fingerprint],
    kind: str,
    fill: Callable[[NewFile], tuple[str, int]],
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


def _fill_labels(files: LabelFiles, open_file: OpenFile, table: NewFile) -> tuple[str, int]:
    """Read label files into a new table; returns the kind and the size (bytes) of that."""
    with contextlib.closing(sqlite3.connect(table.path)) as db:
        db.executescript(
            # A process that is killed leaves a file that no other process uses.
            "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;"
            "CREATE TABLE labels (key BLOB, line INTEGER, file INTEGER, packed BLOB);"
            "CREATE TABLE columns (number INTEGER PRIMARY KEY, name BLOB);"
            "CREATE TABLE guesses (name TEXT PRIMARY KEY);"
        )
        numbers: dict[str, int] = {}
        for at, file in enumerate(files):
            source = LabelSource(file, open_file)
            for batch in batches(read_rows(source)):
                packed = [
                    (names.plain_key(key), line, at, _pack(file, line, row, numbers)) for key, line, row in batch
                ]
                db.executemany("INSERT INTO labels VALUES (?, ?, ?, ?)", packed)
                table.reserve(os.fstat(table.fd).st_size)
            if source.guessed is not None:
                db.execute("INSERT OR IGNORE INTO guesses VALUES (?)", (source.guessed,))
        columns = [(number, os.fsencode(name)) for name, number in numbers.items()]
        db.executemany("INSERT INTO columns VALUES (?, ?)", columns)
        db.execute("CREATE INDEX by_key ON labels (key)")
        db.commit()
    return LABELS, os.fstat(table.fd).st_size


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


# -- lists of keys ---------------------------------------------------------------------------------------------

NAMED, SHOWN = 3, 200  # keys of no sample that a message names, bytes of each
_LIST_HEAD = struct.Struct("<QQ")  # where the rows begin, how many there are
_LENGTH = struct.Struct("<I")  # in front of each key
_PADS = [bytes(size) for size in range(8)]
_UNIT = 8  # bytes: keys begin at multiples, so that the place of one, in units, and its sum are 64 bits
_PLACE, _SUM = np.uint64((1 << 32) - 1), np.uint64(32)  # the lower half of a row; how far the upper one is shifted
_CHUNK = 1 << 20  # rows that are looked at at a time
_EQUAL_MAX = 10_000  # different keys of one sum: by chance 100 million keys have 5

Rows = NDArray[np.uint64]  # the sum of a key, and its place


class Missing(NamedTuple):
    """The keys of a list that no sample has: how many of all `lines`, and the first ones."""

    number: int
    lines: int
    first: list[bytes]


class KeyList:
    """A list of keys, opened for lookups. Made by `open_key_list`."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        start, self.lines = _LIST_HEAD.unpack_from(data)
        self._rows: Rows = np.frombuffer(data, np.uint64, self.lines, start)
        self.guessed = data[start + self.lines * _UNIT :].decode().split("\0")[:-1]

    def _key(self, row: int) -> bytes:
        at = (row & int(_PLACE)) * _UNIT
        (length,) = _LENGTH.unpack_from(self._data, at)
        return self._data[at + _LENGTH.size : at + _LENGTH.size + length]

    def find(self, shard: bytes, keys: Sequence[bytes]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return for each key of a shard its first place in the list, or -1; and the places of all lines used.

        Semantics decision: a line is `KEY`, of any shard, or `SHARD/KEY`, with the name of the shard in the mount.
        """
        places, used, plain = np.full(len(keys), -1, np.int64), list[int](), _sums(keys)
        for prefix in (b"", shard + b"/"):
            sums = plain ^ _changes(prefix, keys)
            order = np.argsort(sums)  # so that the search goes through the rows once
            firsts = np.searchsorted(self._rows, sums[order] << _SUM)
            same = self._rows[np.minimum(firsts, self.lines - 1)] >> _SUM == sums[order]
            for at, first in zip(order[same].tolist(), firsts[same].tolist(), strict=True):
                place = self._place(prefix + keys[at], first)
                if place is not None:
                    used.append(place)
                    places[at] = place if places[at] < 0 else min(place, places[at])
        return places, np.unique(np.array(used, np.int64))

    def _place(self, key: bytes, first: int) -> int | None:
        """Return the place of a key among the rows with its sum, from the first on, in the order of their keys."""
        row = int(self._rows[first])
        if self._key(row) != key:
            stop = int(np.searchsorted(self._rows, self._rows[first] | _PLACE, "right"))
            at = bisect.bisect_left(range(stop), key, first, key=lambda row: self._key(int(self._rows[row])))
            row = int(self._rows[at]) if at < stop else row
        return row & int(_PLACE) if self._key(row) == key else None

    def missing(self, used: Iterable[NDArray[np.int64]]) -> Missing:
        """Return the keys without a sample; `used` are the places of the others, as `find` returns them."""
        bits = np.zeros(len(self._data) // (8 * _UNIT) + 1, np.uint8)
        for places in used:
            np.bitwise_or.at(bits, places >> 3, (1 << (places & 7)).astype(np.uint8))
        count, first, last = 0, np.zeros(0, np.int64), -1
        for begin in range(0, self.lines, _CHUNK):
            places = (self._rows[begin : begin + _CHUNK] & _PLACE).astype(np.int64)
            fresh = np.diff(places, prepend=last) != 0  # a key that is listed twice has equal rows
            last = int(places[-1])
            places = places[fresh & (bits[places >> 3] >> (places & 7) & 1 == 0)]
            count += len(places)
            first = np.sort(np.concatenate((first, places)))[:NAMED]
        return Missing(count, self.lines, [self._key(place)[:SHOWN] for place in first.tolist()])


@contextlib.contextmanager
def open_key_list(
    files: LabelFiles, fingerprints: Sequence[Fingerprint], open_file: OpenFile = DOOR.open_shard
) -> Iterator[KeyList]:
    """Open a list with these fingerprints, by its table in the cache. Raises as `open_labels`."""
    with open_table(files, fingerprints, KEYS, partial(_fill_keys, files, open_file)) as fd:
        yield KeyList(mmap.mmap(fd, 0, prot=mmap.PROT_READ))


def _fill_keys(files: LabelFiles, open_file: OpenFile, table: NewFile) -> tuple[str, int]:
    """Read a list into a new table; returns the kind and the size (bytes) of that."""
    table.write(bytes(_LIST_HEAD.size))
    end, guessed = _LIST_HEAD.size, dict[str, None]()
    with tempfile.TemporaryFile(dir=os.path.dirname(table.path)) as unsorted:  # memory does not grow with the list
        for file in files:
            source = LabelSource(file, open_file)
            for keys, numbers in read_keys(source):
                text, rows = _pack_keys(file, keys, numbers, end)
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
    _sort(files[0], np.frombuffer(data, np.uint64, lines, end), KeyList(data)._key)
    about = "".join(f"{name}\0" for name in guessed).encode("utf-8", "surrogateescape")
    table.write(about)
    return KEYS, end + lines * _UNIT + len(about)


def _pack_keys(file: LabelFile, keys: Sequence[bytes], lines: Sequence[int], end: int) -> tuple[bytes, bytes]:
    """Return what a table has of these keys: their text, which begins at `end`, and their rows."""
    for key, line in zip(keys, lines, strict=True) if max(map(len, keys), default=0) > KEY_MAX else ():
        if len(key) > KEY_MAX:
            raise label_error(file, line, TOO_LONG)
    keys = list(filter(None, keys))
    if b"./" in b"".join(keys):  # one search over all of them takes next to nothing
        keys = list(map(names.plain_key, keys))
    lengths = np.fromiter(map(len, keys), np.int64, len(keys))
    pads = -(lengths + _LENGTH.size) % _UNIT
    sizes = _LENGTH.size + lengths + pads
    parts = zip(map(_LENGTH.pack, lengths.tolist()), keys, map(_PADS.__getitem__, pads.tolist()), strict=True)
    text = b"".join(itertools.chain.from_iterable(parts))
    if end + len(text) >= _UNIT << 32:
        raise label_error(file, None, f"lists more than {_UNIT * 4} GiB of keys")
    places = (end + np.cumsum(sizes) - sizes).astype(np.uint64) // np.uint64(_UNIT)
    return text, (_sums(keys) << _SUM | places).tobytes()


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
    """Sort rows by sum and key, so that a hostile list takes no longer. Rows of equal keys become equal."""
    rows.sort()
    for first, stop in _equal_sums(rows):
        places: dict[bytes, int] = {}
        for begin in range(first, stop, _CHUNK):
            for row in rows[begin : min(begin + _CHUNK, stop)].tolist():
                places.setdefault(key_of(row), row)
            if len(places) > _EQUAL_MAX:
                raise label_error(file, None, "has keys that were made to have one checksum")
        ordered = [places[key] for key in sorted(places)]
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
