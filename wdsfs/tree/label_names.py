"""Names of samples in tables: keys, or names of files, with their extensions and any of their directories.

Semantics decision: the first of these steps that finds a sample decides.

1. A name without an extension is a key, and means the samples of this key alone.
2. A name with an extension is that of a file, and means the sample that a member of this name belongs to.
3. It also means the sample whose key is the end of that key (`0001` for `/data/images/0001.jpg`), or ends in it
   (`images/0001` for `0001.jpg`), at a slash. Directories that differ never match.

Where step 3 finds several rows for a sample, it has none of them; several samples for a row are an error. What a
row means follows from the table and the key alone, since views are made shard by shard: that it means one sample
alone is checked in each shard, and where the whole set is at hand.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import unquote_to_bytes

import numpy as np
from numpy.typing import NDArray

from wdsfs import names
from wdsfs.names import MEDIA, Reading

_DEPTH = 8  # directories that may be left out
_FORM_MAX = 1024  # bytes of a name in `names`
_KEYS_AT_ONCE = 100  # keys in one query
_LETTER = re.compile(rb"[A-Za-z]")
# With `last_dot` a key may have dots itself: only what hardly ends a key is an extension.
_KNOWN = MEDIA | frozenset(b"dcm nii gz txt json xml csv npy npz pdf html cls".split())
# Label Studio puts eight digits before the name of an uploaded file, and hands out local files by a query.
_LABEL_STUDIO = re.compile(rb"/data/(?:upload/[0-9]+/[0-9a-f]{8}-|local-files/\?d=)")

Uses = NDArray[np.int64]  # rows that samples use, each doubled, and one more where directories were left out


def sample_name(name: bytes, reading: Reading, *, is_key: bool = False) -> tuple[bytes, bool]:
    """Return the key that a name in a table stands for; and True if it is the name of a file.

    `is_key`: where keys may have dots, it is none.
    """
    if b"." not in name:
        return name, False
    key = names.plain_key(name)
    _, _, extension = key.rpartition(b"/")[2].rpartition(b".")
    is_file = extension.lower() in _KNOWN and not is_key if reading.last_dot else _LETTER.search(extension)
    if not is_file:
        number = key.removesuffix(b".0")  # as pandas writes whole numbers of a column with gaps
        return number if number.isdigit() and not reading.last_dot else key, False
    if b"\\" in key and b"/" not in key:
        key = key.replace(b"\\", b"/")
    if (prefix := _LABEL_STUDIO.match(key)) is not None:
        key = unquote_to_bytes(key[prefix.end() :])
    file_key = names.raw_key(key, last_dot=reading.last_dot)
    return (key, False) if file_key is None else (file_key, True)


def shorter_names(key: bytes) -> list[bytes]:
    """Return a key without its first directory, without the first two, and so on; eight at most."""
    parts = key.rsplit(b"/", _DEPTH)
    return [b"/".join(parts[at:]) for at in range(1, len(parts))]


# -- in the database of a table ---------------------------------------------------------------------------------

BEGIN = """
    CREATE TABLE names (name BLOB, is_whole INTEGER, first INTEGER, last INTEGER, PRIMARY KEY (name, is_whole))
    WITHOUT ROWID; CREATE TEMP TABLE given (name BLOB, is_whole INTEGER, row INTEGER);
"""
END = "INSERT INTO names SELECT name, is_whole, min(row), max(row) FROM given GROUP BY name, is_whole"
ADD = "INSERT INTO given VALUES (?, ?, ?)"


def forms_of(rows: Iterable[tuple[int, bytes]]) -> Iterator[tuple[bytes, bool, int]]:
    """Yield what `ADD` adds for rows of names of files, given by their numbers and keys."""
    for row, key in rows:
        for name in (key, *shorter_names(key)):
            if len(name) <= _FORM_MAX:
                yield name, name is key, row


def rows_meant(db: sqlite3.Connection, keys: Sequence[bytes]) -> dict[bytes, set[int]]:
    """Return the rows that each of these keys may mean by step 3: one, or two of several."""
    rows: dict[bytes, set[int]] = {}
    if db.execute("SELECT 1 FROM names LIMIT 1").fetchone() is None:
        return rows
    for start in range(0, len(keys), _KEYS_AT_ONCE):
        pairs = [(key, name) for key in keys[start : start + _KEYS_AT_ONCE] for name in (key, *shorter_names(key))]
        marks = ",".join("?" * len(pairs))
        query = f"SELECT name, is_whole, first, last FROM names WHERE name IN ({marks})"
        there = {(name, whole): outer for name, whole, *outer in db.execute(query, [name for _, name in pairs])}
        for key, name in pairs:
            if (outer := there.get((name, name is not key))) is not None:
                rows.setdefault(key, set()).update(outer)
    return rows


# -- that a row has one sample alone ----------------------------------------------------------------------------


def shared_row(uses: Sequence[Uses]) -> int | None:
    """Return a row that a sample uses by step 3, and another sample uses, too."""
    loose = np.sort(np.concatenate([np.zeros(0, np.int64), *(some[some & 1 == 1] >> 1 for some in uses)]))
    shared = loose[1:][loose[1:] == loose[:-1]]
    for some in uses if len(loose) else ():
        shared = np.concatenate((shared, np.intersect1d(some[some & 1 == 0] >> 1, loose)))
    return int(shared[0]) if len(shared) else None
