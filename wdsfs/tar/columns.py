"""Parses and writes many tar headers at once, by NumPy: names, types, times and checksums as columns."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdsfs.tar import headers
from wdsfs.tar.headers import BLOCK, DIRECTORY, Extended
from wdsfs.tar.problems import Problem
from wdsfs.tar.sparse import Segments


class Batch:
    """Headers and places of members, collected for one chunk; `columns.decode` makes columns of them."""

    def __init__(self, *, ignore_zeros: bool = False) -> None:
        self.ignore_zeros = ignore_zeros
        self.marks: list[int] = []  # end marks that were passed
        self.headers: list[bytes] = []
        self.heads: list[int] = []
        self.datas: list[int] = []
        self.sizes: list[int] = []
        self.extended: dict[int, Extended] = {}
        self.sparse: dict[int, Segments] = {}
        self.old_directories: list[int] = []  # rows that are directories because their name ends in a slash
        self.weight = 0
        self.extras: list[bytes] = []  # extension headers, kept only to verify their checksums
        self.extra_offsets: list[int] = []
        self.problems: list[Problem] = []


@dataclass(slots=True)
class Chunk:
    """Columns of at most `BATCH` consecutive members, all of the same length.

    `names` are the raw bytes of the header (a directory without its trailing slash), `types` one of the type flags
    of `headers.py` for each member. `heads` has the byte offset of each member's first header, extension headers
    included. `datas` has the byte offset of its payload, `sizes` the bytes that a reader of the file gets,
    `mtimes` ns since the epoch. `links` has the target of each row that is a link, `sparse` the segments of each
    sparse row.
    """

    names: list[bytes]
    types: NDArray[np.uint8]
    heads: NDArray[np.int64]
    datas: NDArray[np.int64]
    sizes: NDArray[np.int64]
    mtimes: NDArray[np.int64]
    links: dict[int, bytes] = field(default_factory=dict)
    sparse: dict[int, Segments] = field(default_factory=dict)


def decode(batch: Batch) -> tuple[Chunk, Problem | None]:
    """Return a batch as columns, cut before the first header with a wrong checksum, and that problem."""
    table = _table(batch.headers)
    broken = [_first_broken(table, batch.heads), _first_broken(_table(batch.extras), batch.extra_offsets)]
    damage = min((problem for problem in broken if problem is not None), default=None)
    count = len(table) if damage is None else bisect.bisect_right(batch.datas, damage.offset)
    table = table[:count]
    types = table[:, 156].copy()
    names = np.ascontiguousarray(table[:, :100]).view("S100").ravel().tolist()
    _join_prefixes(table, names)
    mtimes = _mtimes(table)
    chunk = Chunk(
        names,
        types,
        np.array(batch.heads[:count], dtype=np.int64),
        np.array(batch.datas[:count], dtype=np.int64),
        np.array(batch.sizes[:count], dtype=np.int64),
        mtimes,
        sparse={row: segments for row, segments in batch.sparse.items() if row < count},
    )
    for row, extended in batch.extended.items():
        if row < count:
            if extended.name is not None:
                names[row] = extended.name
            if extended.mtime is not None:
                mtimes[row] = extended.mtime
    _reduce_types(chunk, [row for row in batch.old_directories if row < count])
    _read_links(chunk, table, batch.extended)
    return chunk, damage


def _table(blocks: list[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(blocks), dtype=np.uint8).reshape(len(blocks), BLOCK)


def _first_broken(table: NDArray[np.uint8], offsets: list[int]) -> Problem | None:
    """Return the problem of the first header with a wrong checksum; `offsets` are those of the headers."""
    stored = _octal(table[:, 148:156], 8)
    total = table.sum(axis=1, dtype=np.int64)
    total += 8 * 32 - table[:, 148:156].sum(axis=1, dtype=np.int64)
    for row in np.flatnonzero(stored != total).tolist():
        header = table[row].tobytes()
        if headers.number_of(header[148:156]) not in headers.checksums_of(header):
            return Problem(offsets[row], "damaged", f"wrong checksum in the header at offset {offsets[row]}")
    return None


def _octal(field_bytes: NDArray[np.uint8], width: int) -> NDArray[np.int64]:
    """Return the numbers in a column of octal fields of `width` bytes, -1 for a field that needs `number_of`.

    Understands what nearly all tars hold: octal digits, then only NULs and spaces.
    """
    digits = field_bytes.astype(np.int64) - 48
    valid = (digits >= 0) & (digits <= 7)
    count = valid.sum(axis=1)
    leading = np.logical_and.accumulate(valid, axis=1).sum(axis=1)
    blank = (field_bytes == 0) | (field_bytes == 32)
    clean = (leading == count) & (count + blank.sum(axis=1) == width) & (count > 0)
    value = np.zeros(len(field_bytes), dtype=np.int64)
    for column in range(width):
        value = np.where(column < leading, value * 8 + digits[:, column], value)
    return np.where(clean, value, -1)


def _mtimes(table: NDArray[np.uint8]) -> NDArray[np.int64]:
    seconds = _octal(table[:, 136:148], 12)
    for row in np.flatnonzero(seconds < 0).tolist():
        number = headers.number_of(table[row, 136:148].tobytes())
        limit = (1 << 63) // 10**9 - 1
        seconds[row] = max(min(number or 0, limit), -limit)
    return seconds * 10**9


def _join_prefixes(table: NDArray[np.uint8], names: list[Any]) -> None:
    """Cut names at their first NUL and put the ustar prefix, if any, in front."""
    if any(b"\0" in name for name in names):
        names[:] = [name.split(b"\0", 1)[0] for name in names]
    # Only POSIX's own magic has a prefix; GNU's ("ustar  ") keeps access times there, v7 has neither.
    posix = (table[:, 257:263] == np.frombuffer(b"ustar\0", dtype=np.uint8)).all(axis=1)
    for row in np.flatnonzero(posix & (table[:, 345] != 0)).tolist():
        prefix = table[row, 345:500].tobytes().split(b"\0", 1)[0]
        names[row] = prefix + b"/" + names[row]


def _reduce_types(chunk: Chunk, old_directories: list[int]) -> None:
    """Reduce the type flags to the seven of POSIX and take the slash off directories."""
    types, names = chunk.types, chunk.names
    types[old_directories] = DIRECTORY
    for row in np.flatnonzero((types < headers.REGULAR) | (types > headers.FIFO) | (types == DIRECTORY)).tolist():
        # Semantics decision: a directory of an incremental GNU tar is a directory: its content is only a list of
        # files.
        if types[row] in (DIRECTORY, headers.GNU_DUMP_DIRECTORY):
            types[row], chunk.sizes[row] = DIRECTORY, 0
            names[row] = names[row].rstrip(b"/")
        elif types[row] in (headers.OLD_REGULAR, headers.CONTIGUOUS, headers.GNU_SPARSE):
            types[row] = headers.REGULAR
        # POSIX wants readers to take unknown types for regular files.
        # Semantics decision: they keep their flag and are in no sample, as in the webdataset library (`isreg`).


def _read_links(chunk: Chunk, table: NDArray[np.uint8], extended: dict[int, Extended]) -> None:
    for row in np.flatnonzero((chunk.types == headers.HARD_LINK) | (chunk.types == headers.SYMLINK)).tolist():
        entry = extended.get(row)
        if entry is not None and entry.link is not None:
            chunk.links[row] = entry.link
        else:
            chunk.links[row] = table[row, 157:257].tobytes().split(b"\0", 1)[0]


# --- writing -------------------------------------------------------------------------------------------------

_PLAIN = np.frombuffer(headers.encode(b"-", 0, 0), np.uint8)
_REST_SUM = int(_PLAIN[156:].sum())  # of the fields behind the checksum
_DIGIT_SHIFTS = np.arange(30, -1, -3)  # of 11 octal digits


def encode(
    names: Sequence[bytes], sizes: Sequence[int], mtimes: Sequence[int], common: Sequence[Collection[bytes]]
) -> list[bytes]:
    """Return the headers of each of these members, as `headers.encode`. Raises ValueError as it does."""
    numbers = np.array([sizes, mtimes])
    lengths = np.fromiter(map(len, names), np.int64, len(names))
    plain = (
        (lengths > 0)
        & (lengths <= headers.NAME_BYTES)
        & (numbers >= 0).all(0)
        & (numbers <= headers.OCTAL_MAX).all(0)
    )
    if any(common) or b"\0" in b"".join(names):
        plain &= [not keywords and b"\0" not in name for name, keywords in zip(names, common, strict=True)]
    table = np.tile(_PLAIN, (len(names), 1))
    table[:, :100] = np.array(names, "S100").view(np.uint8).reshape(-1, 100)
    table[:, 124:135], table[:, 136:147] = (_digits(np.where(plain, values, 0)) for values in numbers)
    table[:, 148:156] = 32  # the checksum counts its own field as spaces
    table[:, 148:154] = _digits(table[:, :156].sum(axis=1, dtype=np.uint32) + _REST_SUM)[:, -6:]
    table[:, 154] = 0
    data = table.tobytes()
    result = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
    for row in np.flatnonzero(~plain).tolist():
        result[row] = headers.encode(names[row], sizes[row], mtimes[row], common[row])
    return result


def _digits(numbers: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the eleven octal digits of each number, as text."""
    digits: NDArray[np.uint8] = ((numbers.astype(np.int64)[:, None] >> _DIGIT_SHIFTS & 7) + 48).astype(np.uint8)
    return digits
