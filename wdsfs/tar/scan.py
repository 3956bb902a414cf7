"""Tar bytes: find the members of a shard and read their content.

Knows the tar formats (v7, ustar, GNU, PAX, sparse files) and nothing of samples, indexes, caches or FUSE.
Every function works on a descriptor that the caller opened, or on what stands for one (`source.TarBytes`), reads
with `pread` and keeps no state, so it may run in any thread or process.

The speed comes from two passes over each batch of headers: `_walk` hops from header to header and looks at
the size field only; `_decode` then parses names, times and checksums of up to `BATCH` headers at once with
NumPy. A header that the fast path does not understand takes the slow one, never a guess.

Sources: POSIX.1-2024 pax(1), the GNU tar manual ("Tar Internals"), CPython's tarfile for what a reader of
WebDataset shards (the webdataset library) accepts.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsfs.errors import CorruptShard
from wdsfs.storage.source import TarBytes, pread, size_of, skip_hole

BLOCK = 512
BATCH = 8192  # headers per chunk: 4 MiB of header bytes, so memory stays flat in shards of any size
WINDOW_MIN, WINDOW_MAX = 2048, 1 << 18  # bytes read at a time while hopping
ZEROS_MIN, ZEROS_MAX = 1 << 14, 1 << 20  # bytes of zeros read at a time; GNU tar pads to 10 KiB
EXTENSION_MAX = 1 << 20  # bytes of PAX and GNU headers before one member; most hold a path and a few numbers
SPARSE_MAX = 1 << 20  # segments of one sparse member
WEIGHT_MAX = 1 << 24  # bytes of extension headers and sparse maps per chunk; a fuller one ends early
FILE_SIZE_MAX = (1 << 63) - 1  # what the kernel accepts as a file size

REGULAR, HARD_LINK, SYMLINK, CHARACTER, BLOCK_DEVICE, DIRECTORY, FIFO = b"0123456"
_CONTIGUOUS, _GNU_SPARSE, _OLD_REGULAR = b"7S\0"
_PAX, _PAX_SOLARIS, _PAX_GLOBAL, _GNU_NAME, _GNU_LINK = b"xXgLK"
_DATALESS = frozenset((HARD_LINK, SYMLINK, CHARACTER, BLOCK_DEVICE, DIRECTORY, FIFO))
_EXTENSIONS = frozenset((_PAX, _PAX_SOLARIS, _PAX_GLOBAL, _GNU_NAME, _GNU_LINK))

_ZERO_BLOCK = bytes(BLOCK)
# What compressed files begin with; a zstd file also with a skippable frame (pzstd writes one first).
COMPRESSED = {
    "gzip": (b"\x1f\x8b\x08",),
    "bzip2": (b"BZh",),
    "xz": (b"\xfd7zXZ\0",),
    "zstd": (b"\x28\xb5\x2f\xfd", *(bytes((0x50 + n, 0x2A, 0x4D, 0x18)) for n in range(16))),
}

# Kinds of problems in spite of which everything that a reader sees is whole. (`index/record_builder.py` follows
# links.)
HARMLESS = frozenset(("no end mark", "behind end mark", "dangling link", "empty", "trailing header"))

Segments = Sequence[tuple[int, int]]  # (offset in the file, bytes) of the stored parts, ascending


class Problem(NamedTuple):
    """Something wrong with a shard: where (byte offset of a header; -1: the whole), what kind, in words."""

    offset: int
    kind: str
    text: str


@dataclass(slots=True)
class Chunk:
    """Up to `BATCH` consecutive members as columns of equal length n.

    `names` are the raw bytes of the header (a directory without its trailing slash), `types` one of the
    constants above for each member. `heads` is the byte offset of a member's first header, extension headers
    included; `datas` that of its payload; `sizes` the bytes that a reader of the file gets; `mtimes` ns since
    the epoch. `links` has the target of each row that is a link, `sparse` the segments of each sparse row.
    """

    names: list[bytes]
    types: NDArray[np.uint8]
    heads: NDArray[np.int64]
    datas: NDArray[np.int64]
    sizes: NDArray[np.int64]
    mtimes: NDArray[np.int64]
    links: dict[int, bytes] = field(default_factory=dict)
    sparse: dict[int, Segments] = field(default_factory=dict)


class _Damage(Exception):
    """Raised inside the scan where the tar stops making sense; becomes a Problem."""

    def __init__(self, offset: int, kind: str, text: str) -> None:
        super().__init__(text)
        self.problem = Problem(offset, kind, text)


@dataclass(slots=True)
class _Extended:
    """What extension headers said about the member that follows them."""

    name: bytes | None = None
    link: bytes | None = None
    size: int | None = None
    mtime: int | None = None
    records: list[tuple[bytes, bytes]] = field(default_factory=list)


class _Window:
    """Reads a file through one buffer whose size adapts to the distance between headers."""

    def __init__(self, fd: TarBytes, size: int, span: int = WINDOW_MAX // 4) -> None:
        self.fd, self.size = fd, size
        self.base, self.data = 0, b""
        self.span = span

    def seek(self, position: int, need: int = BLOCK) -> int:
        """Make `need` bytes at `position` available; returns their index in `data`.

        Raises `_Damage` when the file ends before them.
        """
        index = position - self.base
        if index >= 0 and index + need <= len(self.data):
            return index
        # One header per window means that the windows are mostly payload: read less. Several: read more.
        used = index < 2 * len(self.data)
        self.span = min(self.span * 2, WINDOW_MAX) if used else max(self.span // 2, WINDOW_MIN)
        self.data = _pread(self.fd, max(self.span, need), position)
        self.base = position
        if len(self.data) < need:
            text = f"the file ends at byte {position + len(self.data)}, inside the header at offset {position}"
            raise _Damage(position, "truncated", text)
        return 0


def _pread(fd: TarBytes, size: int, offset: int) -> bytes:
    """`pread` until `size` bytes or the end of the file."""
    data = os.pread(fd, size, offset) if isinstance(fd, int) else fd.pread(size, offset)
    while len(data) < size:
        more = pread(fd, size - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def scan(
    fd: TarBytes,
    problems: list[Problem],
    start: int = 0,
    limit: int | None = None,
    marks: list[int] | None = None,
) -> Iterator[Chunk]:
    """Yield the members of the tar at `fd` from byte `start` on, in order, `limit` of them at most.

    What cannot be read ends the scan and is appended to `problems`; the members before it are yielded. Like
    tarfile and GNU tar the scan ends at the first block of zeros, and a tar without one is complete when it
    ends behind a member; both the data behind such a mark and a missing mark are reported. Raises OSError
    when the file cannot be read.

    With `marks` it goes on where a header is the first thing behind the zeros, as GNU tar's --ignore-zeros does;
    the offsets of the end marks that it has passed so are appended.
    Semantics decision: anything else there ends the shard, where GNU tar looks at block after block for the next
    header: what looks like one may be the content of a member.
    """
    size = size_of(fd)
    window = _Window(fd, size)
    common: dict[bytes, bytes] = {}  # records of global PAX headers, for all members behind them
    position, more = start, True
    left = limit
    while more:
        batch = _Batch(marks is not None)
        wanted = BATCH if left is None else min(BATCH, left)
        try:
            position, more = _walk(window, position, wanted, batch, common)
            damage = None
        except _Damage as error:
            damage, more = error.problem, False
        chunk, broken = _decode(batch)
        if broken is not None:
            damage, more = broken, False
        if damage is None:
            damage = next((p for p in batch.problems if p.kind == "truncated"), None)
        if damage is not None and damage.offset == 0 and not chunk.names:
            damage = _no_tar(fd, damage)
        # A wrong checksum ends the shard where it stands: what the walk saw behind it counts for nothing.
        end = damage.offset if broken is not None and damage is not None else size + 1
        problems.extend(p for p in batch.problems if p.offset < end and p != damage)
        if marks is not None:
            marks.extend(mark for mark in batch.marks if mark < end)
        if damage is not None:
            problems.append(damage)
        if chunk.names:
            yield chunk
        if left is not None:
            left -= len(chunk.names)
            more = more and left > 0
    if limit is None and size == 0 and not problems:
        problems.append(Problem(0, "empty", "the file has 0 bytes; an empty tar has at least one zero block"))


def _no_tar(fd: TarBytes, damage: Problem) -> Problem:
    """Say what a file is that is damaged from its very first header on."""
    start = _pread(fd, BLOCK, 0)
    if is_header(start):
        return damage
    found = compression(start)
    if found is not None:
        return Problem(0, "compressed", f"this is {found}-compressed; unpack it to a plain .tar first")
    return (
        damage if damage.kind == "truncated" else Problem(0, "not a tar", f"this is no tar file ({damage.text})")
    )


def compression(start: bytes) -> str | None:
    """How a file is compressed that begins with these bytes (the first block, if it has one); None if it is not.

    A tar may begin with the same bytes: those of the name of its first member.
    """
    for name, magics in COMPRESSED.items():
        if start.startswith(magics):
            return None if is_header(start) else name
    return None


class _Batch:
    """What the walk collects for one chunk; `_decode` turns it into columns."""

    def __init__(self, ignore_zeros: bool = False) -> None:
        self.ignore_zeros = ignore_zeros
        self.marks: list[int] = []  # end marks that were passed
        self.headers: list[bytes] = []
        self.heads: list[int] = []
        self.datas: list[int] = []
        self.sizes: list[int] = []
        self.extended: dict[int, _Extended] = {}
        self.sparse: dict[int, Segments] = {}
        self.old_directories: list[int] = []  # rows that are directories by the slash behind their name
        self.weight = 0
        self.extras: list[bytes] = []  # extension headers, kept only to verify their checksums
        self.extra_offsets: list[int] = []
        self.problems: list[Problem] = []


def _walk(
    window: _Window, position: int, wanted: int, batch: _Batch, common: dict[bytes, bytes]
) -> tuple[int, bool]:
    """Hop over up to `wanted` members from `position`; returns where it stopped and whether more may follow."""
    headers, heads, datas, sizes = batch.headers, batch.heads, batch.datas, batch.sizes
    end = window.size
    data, base = window.data, window.base
    while len(headers) < wanted and position < end:
        index = position - base
        if index < 0 or index + BLOCK > len(data):
            index = window.seek(position)
            data, base = window.data, window.base
        kind = data[index + 156]
        terminator = data[index + 135]
        if (kind == REGULAR) and not common and (terminator == 0 or terminator == 32):
            digits = data[index + 124 : index + 135]
            if digits.isdigit():
                try:
                    size = int(digits, 8)
                except ValueError:
                    raise _bad_header(position) from None
                headers.append(data[index : index + BLOCK])
                heads.append(position)
                position += BLOCK
                datas.append(position)
                sizes.append(size)
                position += (size + 511) & ~511
                continue
        stop = _walk_slowly(window, position, batch, common)
        if stop is None:
            return position, False
        position = stop
        data, base = window.data, window.base
        if batch.weight > WEIGHT_MAX:
            break
    if position >= end and headers:
        _report_end(batch, end)
    return position, position < end


def _report_end(batch: _Batch, end: int) -> None:
    """Report that the file ends at byte `end` with its last member, or inside it, and not with an end mark."""
    head, stored = batch.heads[-1], batch.sizes[-1]
    segments = batch.sparse.get(len(batch.heads) - 1)
    if segments is not None:
        stored = sum(length for _, length in segments)
    missing = batch.datas[-1] + stored - end
    if missing > 0:
        text = f"the file ends at byte {end}, {missing} bytes before the end of the member at offset {head}"
        batch.problems.append(Problem(head, "truncated", text))
    else:
        text = "the file ends without an end-of-archive mark; it may be cut off behind a whole member"
        batch.problems.append(Problem(end, "no end mark", text))


def _bad_header(position: int) -> _Damage:
    return _Damage(position, "damaged", f"the header at offset {position} is damaged")


def _walk_slowly(window: _Window, position: int, batch: _Batch, common: dict[bytes, bytes]) -> int | None:
    """Take one member of any kind, with its extension headers; returns the next position, None at the end."""
    head, start, extended = position, position, None
    while True:
        index = window.seek(position)
        header = window.data[index : index + BLOCK]
        if header == _ZERO_BLOCK:
            if extended is not None:
                raise _Damage(head, "damaged", f"extension header at offset {head} without a member behind it")
            if position > start:
                text = (
                    f"no member follows the global PAX header at offset {start}: Python's tarfile and webdataset "
                    "raise ReadError there; any commit that changes the shard leaves it out"
                )
                batch.problems.append(Problem(start, "trailing header", text))
            following = _behind_mark(window, position, batch)
            if following is None:
                return None
            head = start = position = following
            continue
        kind = header[156]
        if kind not in _EXTENSIONS:
            break
        batch.extras.append(header)
        batch.extra_offsets.append(position)
        body_size = _number(header[124:136])
        if body_size is None or not 0 <= body_size <= EXTENSION_MAX - (position - start):
            text = f"the extension header at offset {position} has a size of {body_size} bytes"
            raise _Damage(position, "damaged", text)
        index = window.seek(position + BLOCK, body_size)
        body = window.data[index : index + body_size]
        position += BLOCK + _padded(body_size)
        if kind == _PAX_GLOBAL:
            # Only what changes a member counts (git archives start with a mere comment): the rest would
            # send every member of the shard down this slow path.
            records = _pax_records(body, position)
            common.update(record for record in records if record[0] in (b"path", b"linkpath", b"mtime"))
            head = head if extended else position
        else:
            extended = extended or _Extended()
            _extend(extended, kind, body, head)
    batch.weight += position - start
    if common or extended is not None:
        extended = extended or _Extended()
        _apply_records(extended, [*common.items(), *extended.records], start)
    return _take(window, head, position, header, extended, batch)


def _take(
    window: _Window, head: int, position: int, header: bytes, extended: _Extended | None, batch: _Batch
) -> int:
    """Add the member whose own header lies at `position`; returns where the next one starts."""
    row, kind = len(batch.headers), header[156]
    stored = extended.size if extended is not None and extended.size is not None else _number(header[124:136])
    data = position + BLOCK
    # Semantics decision, as in tarfile: links, directories, devices and fifos have no payload, whatever
    # their size field says; a v7 regular member whose name ends in "/" is a directory.
    dataless = kind in _DATALESS
    if kind == _OLD_REGULAR and _own_name(header, extended).endswith(b"/"):
        dataless = True
        batch.old_directories.append(row)
    if dataless:
        stored = 0
    if stored is None or not 0 <= stored <= FILE_SIZE_MAX - data:
        raise _bad_header(position)
    size = stored
    following = data + _padded(stored)
    segments: Segments | None = None
    if kind == _GNU_SPARSE:
        segments, size, data = _gnu_sparse(window, position, header)
        following = data + _padded(stored)
    elif extended is not None and extended.records and not dataless:
        found = _pax_sparse(window, extended.records, data)
        if found is not None:
            segments, size, shift = found
            data += shift
    if segments is not None:
        _check_segments(segments, size, following - data, position)
        batch.sparse[row] = segments
        batch.weight += 16 * len(segments)
    batch.headers.append(header)
    batch.heads.append(head)
    batch.datas.append(data)
    batch.sizes.append(size)
    if extended is not None:
        extended.records = []  # all said; a chunk of them may be large
        batch.extended[row] = extended
    return following


def _own_name(header: bytes, extended: _Extended | None) -> bytes:
    if extended is not None and extended.name is not None:
        return extended.name
    return header[:100].split(b"\0", 1)[0]


def _padded(size: int) -> int:
    return (size + BLOCK - 1) & -BLOCK


def _behind_mark(window: _Window, position: int, batch: _Batch) -> int | None:
    """Where another tar begins behind the end mark at `position`, if it is to be read; what is not is reported."""
    first = _skip_zeros(window.fd, position + BLOCK, window.size)
    if first == window.size:
        return None
    block = first - first % BLOCK
    joined = is_header(_pread(window.fd, BLOCK, block))
    if joined and batch.ignore_zeros:
        batch.marks.append(position)
        return block
    why = "; no header is there, so they are not read" if batch.ignore_zeros else ""
    why = why or "; as in tar and webdataset they are not read"
    text = (
        f"{window.size - first} bytes from offset {first} lie behind the end-of-archive mark at offset {position}"
        f"{why}{' (another tar: --ignore-zeros reads it)' if joined else ''}"
    )
    batch.problems.append(Problem(first, "behind end mark", text))
    return None


def _skip_zeros(fd: TarBytes, position: int, end: int) -> int:
    """The first byte from `position` on that is not 0; `end` if there is none in front of it."""
    span = ZEROS_MIN
    while position < end:
        found = skip_hole(fd, position)
        data = b"" if found is None else pread(fd, min(span, end - found), found)
        if found is None or not data:
            return end
        rest = len(data.lstrip(b"\0"))
        if rest:
            return found + len(data) - rest
        position, span = found + len(data), min(2 * span, ZEROS_MAX)
    return end


# --- header fields -----------------------------------------------------------------------------------------


def _number(raw: bytes) -> int | None:
    """A number field: octal text, or GNU base-256 when the high bit is set. None when it is neither."""
    if raw[0] in (0x80, 0xFF):
        value = int.from_bytes(raw[1:], "big")
        return value - (1 << 8 * (len(raw) - 1)) if raw[0] == 0xFF else value
    text = raw.split(b"\0", 1)[0].strip()
    if not text:
        return 0
    try:
        return int(text, 8)
    except ValueError:
        return None


def _checksums(header: bytes) -> tuple[int, int]:
    """The checksum of a header over unsigned bytes and, as some old tars wrote it, over signed ones."""
    counted = header[:148] + b" " * 8 + header[156:]
    unsigned = sum(counted)
    return unsigned, unsigned - 256 * sum(byte > 127 for byte in counted)


def _pax_records(body: bytes, position: int) -> list[tuple[bytes, bytes]]:
    """The `length key=value` records of a PAX header, in order (keys repeat in the sparse format 0.0)."""
    records, start = [], 0
    while start < len(body) and body[start]:
        space = body.find(b" ", start, start + 20)
        digits = body[start:space]
        end = start + int(digits) if space > 0 and digits.isdigit() else -1
        key, equals, value = body[space + 1 : end - 1].partition(b"=")
        if not space < end <= len(body) or not equals or body[end - 1] != 10:
            text = f"damaged PAX record in the extension header that ends at offset {position}"
            raise _Damage(position, "damaged", text)
        records.append((key, value))
        start = end
    return records


def _extend(extended: _Extended, kind: int, body: bytes, head: int) -> None:
    if kind == _GNU_NAME:
        extended.name = body.split(b"\0", 1)[0]
    elif kind == _GNU_LINK:
        extended.link = body.split(b"\0", 1)[0]
    else:
        extended.records += _pax_records(body, head)


def _apply_records(extended: _Extended, records: list[tuple[bytes, bytes]], start: int) -> None:
    """Let the records of PAX headers, in their order, say what they say of the member.

    An empty value takes back what was said before it, so that the member's own header counts, as in POSIX.
    """
    sparse_name = None
    for key, value in records:
        if key == b"mtime":
            extended.mtime = _nanoseconds(value)
        elif key == b"path":
            extended.name = value.rstrip(b"/") or None
        elif key == b"GNU.sparse.name":
            sparse_name = value
        elif key == b"linkpath":
            extended.link = value or None
        elif key == b"size":
            try:
                extended.size = int(value) if value else None
            except ValueError:
                text = f"damaged PAX value for {key!r} in the extension header at offset {start}"
                raise _Damage(start, "damaged", text) from None
    if sparse_name:  # "path" is made up then, for readers that know no sparse files
        extended.name = sparse_name


def _nanoseconds(value: bytes) -> int | None:
    """Decimal seconds, with any number of digits behind the point, in ns (rounded towards 0).

    None when it is no such number: a member is worth more than its time.
    """
    whole, _, fraction = value.partition(b".")
    try:
        if b"e" in value:  # as Python writes what is close to 0
            ns = int(float(value) * 10**9)
        else:
            ns = int((fraction + b"000000000")[:9])
            seconds = int(whole or (b"0" if fraction else b""))
            ns = seconds * 10**9 + (-ns if whole.startswith(b"-") else ns)
    except (ValueError, OverflowError):
        return None
    return max(min(ns, (1 << 63) - 1), -(1 << 63))


# --- sparse members ----------------------------------------------------------------------------------------


def _pairs(fields: list[int], position: int) -> list[tuple[int, int]]:
    if len(fields) % 2 or len(fields) > 2 * SPARSE_MAX:
        raise _Damage(position, "damaged", f"damaged sparse map of the member at offset {position}")
    # Empty segments fill up the fixed tables of the old format or mark the end of the file: they say nothing.
    return [pair for pair in zip(fields[::2], fields[1::2], strict=True) if pair[1]]


def _gnu_sparse(window: _Window, position: int, header: bytes) -> tuple[Segments, int, int]:
    """The old GNU format: 4 entries in the header, 21 in each extension block behind it."""
    fields: list[int | None] = [_number(header[at : at + 12]) for at in range(386, 482, 12)]
    size, more, data = _number(header[483:495]), header[482], position + BLOCK
    while more and len(fields) <= 2 * SPARSE_MAX:
        index = window.seek(data)
        block = window.data[index : index + BLOCK]
        fields += [_number(block[at : at + 12]) for at in range(0, 504, 12)]
        more = block[504]
        data += BLOCK
    numbers = [number for number in fields if number is not None]
    if len(numbers) != len(fields) or size is None:
        raise _Damage(position, "damaged", f"damaged sparse map of the member at offset {position}")
    return _pairs(numbers, position), size, data


def _pax_sparse(
    window: _Window, records: list[tuple[bytes, bytes]], data: int
) -> tuple[Segments, int, int] | None:
    """GNU sparse formats 0.0, 0.1 (map in the records) and 1.0 (map in front of the payload).

    Returns segments, size and the bytes by which the payload starts later; None for an ordinary member.
    """
    last = dict(records)
    try:
        if last.get(b"GNU.sparse.major") == b"1":
            fields, shift = _sparse_map(window, data)
            return _pairs(fields, data), int(last[b"GNU.sparse.realsize"]), shift
        if b"GNU.sparse.map" in last:
            text = last[b"GNU.sparse.map"]
            fields = [int(number) for number in text.split(b",")] if text else []
        elif b"GNU.sparse.size" in last:
            fields = [int(v) for k, v in records if k in (b"GNU.sparse.offset", b"GNU.sparse.numbytes")]
        else:
            return None
        return _pairs(fields, data), int(last[b"GNU.sparse.size"]), 0
    except (ValueError, KeyError):
        raise _Damage(data, "damaged", f"damaged sparse map of the member with data at {data}") from None


def _sparse_map(window: _Window, data: int) -> tuple[list[int], int]:
    """The map of format 1.0: decimal numbers, a line each, the first the number of entries, padded to a block."""
    text, lines, wanted = bytearray(), 0, 1
    while lines < wanted:
        index = window.seek(data + len(text))
        block = window.data[index : index + BLOCK]
        text += block
        if not lines and b"\n" in block:
            count = int(text[: text.index(b"\n")])
            if not 0 <= count <= SPARSE_MAX:
                raise ValueError(count)
            wanted = 1 + 2 * count
        lines += block.count(b"\n")
        if len(text) > 24 * wanted + BLOCK:  # no number has more digits
            raise ValueError(text)
    return [int(line) for line in bytes(text).split(b"\n")[1:wanted]], len(text)


def _check_segments(segments: Segments, size: int, stored: int, position: int) -> None:
    end = total = 0
    if stored < 0:
        raise _Damage(position, "damaged", f"damaged sparse map of the member at offset {position}")
    for offset, length in segments:
        total += length
        if length < 0 or offset < end or offset + length > size or total > stored:
            raise _Damage(position, "damaged", f"damaged sparse map of the member at offset {position}")
        end = offset + length
    if not 0 <= size <= FILE_SIZE_MAX:
        raise _Damage(position, "damaged", f"impossible size {size} of the sparse member at offset {position}")


# --- many headers at once ----------------------------------------------------------------------------------


def _decode(batch: _Batch) -> tuple[Chunk, Problem | None]:
    """Columns of the batch, cut before the first header whose checksum is wrong."""
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
    _settle_types(chunk, [row for row in batch.old_directories if row < count])
    _read_links(chunk, table, batch.extended)
    return chunk, damage


def _table(headers: list[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(headers), dtype=np.uint8).reshape(len(headers), BLOCK)


def _first_broken(table: NDArray[np.uint8], offsets: list[int]) -> Problem | None:
    """The first header whose checksum is wrong; `offsets` are those of the headers."""
    stored = _octal(table[:, 148:156], 8)
    total = table.sum(axis=1, dtype=np.int64)
    total += 8 * 32 - table[:, 148:156].sum(axis=1, dtype=np.int64)
    for row in np.flatnonzero(stored != total).tolist():
        header = table[row].tobytes()
        if _number(header[148:156]) not in _checksums(header):
            return Problem(offsets[row], "damaged", f"wrong checksum in the header at offset {offsets[row]}")
    return None


def _octal(field_bytes: NDArray[np.uint8], width: int) -> NDArray[np.int64]:
    """Numbers of a column of octal fields of `width` bytes; -1 where a field needs `_number`.

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
        number = _number(table[row, 136:148].tobytes())
        limit = (1 << 63) // 10**9 - 1
        seconds[row] = max(min(number or 0, limit), -limit)
    return seconds * 10**9


def _join_prefixes(table: NDArray[np.uint8], names: list[Any]) -> None:
    """Cut names at their first NUL and put the ustar prefix in front of those that have one."""
    if any(b"\0" in name for name in names):
        names[:] = [name.split(b"\0", 1)[0] for name in names]
    # Only POSIX's own magic has a prefix; GNU's ("ustar  ") keeps access times there, v7 has neither.
    posix = (table[:, 257:263] == np.frombuffer(b"ustar\0", dtype=np.uint8)).all(axis=1)
    for row in np.flatnonzero(posix & (table[:, 345] != 0)).tolist():
        prefix = table[row, 345:500].tobytes().split(b"\0", 1)[0]
        names[row] = prefix + b"/" + names[row]


def _settle_types(chunk: Chunk, old_directories: list[int]) -> None:
    """Reduce the type flags to the seven of POSIX and take the slash off directories."""
    types, names = chunk.types, chunk.names
    types[old_directories] = DIRECTORY
    for row in np.flatnonzero((types < REGULAR) | (types > FIFO) | (types == DIRECTORY)).tolist():
        if types[row] == DIRECTORY:
            names[row] = names[row].rstrip(b"/")
        elif types[row] in (_OLD_REGULAR, _CONTIGUOUS, _GNU_SPARSE):
            types[row] = REGULAR
        # POSIX has readers take unknown types for regular files.
        # Semantics decision: they keep their flag and are in no sample, as in the webdataset library (`isreg`).


def _read_links(chunk: Chunk, table: NDArray[np.uint8], extended: dict[int, _Extended]) -> None:
    for row in np.flatnonzero((chunk.types == HARD_LINK) | (chunk.types == SYMLINK)).tolist():
        entry = extended.get(row)
        if entry is not None and entry.link is not None:
            chunk.links[row] = entry.link
        else:
            chunk.links[row] = table[row, 157:257].tobytes().split(b"\0", 1)[0]


# --- content -----------------------------------------------------------------------------------------------


def read(fd: TarBytes, data: int, size: int, segments: Segments | None, offset: int, length: int) -> bytes:
    """Bytes `offset` to `offset + length` of a member of `size` bytes whose payload starts at byte `data`.

    Returns less at the end of the member only. Raises CorruptShard where the shard ends before that: the
    kernel would take fewer bytes for the end of the file, and a reader would never hear of the damage.
    """
    length = max(min(length, size - offset), 0)
    if segments is not None:
        return _read_sparse(fd, data, segments, offset, length)
    content = _pread(fd, length, data + offset)
    if len(content) < length:
        raise CorruptShard(f"the shard ends at byte {data + offset + len(content)}, inside a member")
    return content


def _read_sparse(fd: TarBytes, data: int, segments: Segments, offset: int, length: int) -> bytes:
    content = bytearray(length)
    for start, count in segments:
        first, last = max(start, offset), min(start + count, offset + length)
        if first < last:
            piece = _pread(fd, last - first, data + first - start)
            if len(piece) < last - first:
                raise CorruptShard(f"the shard ends inside a sparse member with data at byte {data}")
            content[first - offset : last - offset] = piece
        data += count
    return bytes(content)


def read_name(fd: TarBytes, head: int) -> bytes:
    """The raw name of the member whose first header lies at byte `head`. Raises CorruptShard."""
    batch = _Batch()
    try:
        _walk_slowly(_Window(fd, size_of(fd), WINDOW_MIN), head, batch, {})
    except _Damage as error:
        raise CorruptShard(error.problem.text) from None
    if not batch.headers or not all(map(is_header, [*batch.extras, *batch.headers])):
        raise CorruptShard(f"no member at offset {head}")
    header, extended = batch.headers[0], batch.extended.get(0)
    name = _own_name(header, extended)
    if (extended is None or extended.name is None) and header[257:263] == b"ustar\0" and header[345]:
        return header[345:500].split(b"\0", 1)[0] + b"/" + name
    return name


def is_header(block: bytes) -> bool:
    """Whether a block is a header, by its checksum."""
    stored = _number(block[148:156]) if len(block) == BLOCK else None
    # The unsigned sum first: it is that of nearly all headers, and 50 times as quick.
    return stored is not None and (stored == sum(block) - sum(block[148:156]) + 256 or stored in _checksums(block))


# --- cutting -----------------------------------------------------------------------------------------------


def end_of(fd: TarBytes, head: int) -> int:
    """The byte behind the member whose first header lies at byte `head`, its padding included.

    That may lie behind the end of a file that was written without its last padding. Raises CorruptShard.
    """
    try:
        end = _walk_slowly(_Window(fd, size_of(fd), WINDOW_MIN), head, _Batch(), {})
    except _Damage as error:
        raise CorruptShard(error.problem.text) from None
    if end is None:
        raise CorruptShard(f"no member at offset {head}")
    return end


def split_gap(fd: TarBytes, start: int, end: int) -> Iterator[tuple[int, int, frozenset[bytes] | None]]:
    """What lies from byte `start` to the end mark, or to byte `end`: (start, end, keywords) of each part.

    A part is a member with its headers, whose keywords are None, or a global PAX header, which sets these keywords
    for all members after it. Raises CorruptShard.
    """
    while start < end:
        header = _pread(fd, BLOCK, start)
        if len(header) < BLOCK or header == _ZERO_BLOCK:
            return
        keywords = None
        if header[156] == _PAX_GLOBAL:
            size = _number(header[124:136]) or 0
            behind = start + BLOCK + _padded(size)
            try:
                keywords = frozenset(key for key, _ in _pax_records(_pread(fd, size, start + BLOCK), behind))
            except _Damage as error:
                raise CorruptShard(error.problem.text) from None
        else:
            behind = end_of(fd, start)
        yield start, behind, keywords
        start = behind


def end_of_zeros(fd: TarBytes, start: int, end: int) -> int:
    """The first block from the zero block at byte `start` on that is not one; `end` if all are, up to there."""
    first = _skip_zeros(fd, start + BLOCK, end)
    return min(first - first % BLOCK, end) if first < end else end


def global_headers(fd: TarBytes, head: int, data: int) -> list[tuple[int, int]]:
    """Where global PAX headers lie between the first header of a member and its content: usually nowhere."""
    found = []
    while head < data - BLOCK:
        header = _pread(fd, BLOCK, head)
        if header[156] not in _EXTENSIONS:  # its own one; a sparse map may follow
            break
        behind = head + BLOCK + _padded(_number(header[124:136]) or 0)
        if header[156] == _PAX_GLOBAL:
            found.append((head, behind))
        head = behind
    return found
