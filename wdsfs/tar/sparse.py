"""Sparse members: the maps of the old GNU format and of GNU's PAX formats 0.0, 0.1 and 1.0."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from wdsfs.errors import CorruptShard
from wdsfs.source import TarBytes
from wdsfs.tar.headers import BLOCK, FILE_SIZE_MAX, Window, number_of, read_fully
from wdsfs.tar.problems import Damage

SPARSE_MAX = 1 << 20  # segments of one sparse member

Segments = Sequence[tuple[int, int]]  # (offset in the file, bytes) of the stored parts, ascending


class Extents(NamedTuple):
    """The stored parts of a sparse member: offset in the file, size, and bytes stored before it, ascending."""

    offsets: Sequence[int]
    sizes: Sequence[int]
    places: Sequence[int]


NO_EXTENTS = Extents((), (), ())


def gnu_map(window: Window, position: int, header: bytes) -> tuple[Segments, int, int]:
    """Read a map of the old GNU format: 4 entries in the header, 21 in each extension block after it.

    Returns segments, size of the file and where the payload starts. Raises Damage.
    """
    fields: list[int | None] = [number_of(header[at : at + 12]) for at in range(386, 482, 12)]
    size, more, data = number_of(header[483:495]), header[482], position + BLOCK
    while more and len(fields) <= 2 * SPARSE_MAX:
        index = window.seek(data)
        block = window.data[index : index + BLOCK]
        fields += [number_of(block[at : at + 12]) for at in range(0, 504, 12)]
        more = block[504]
        data += BLOCK
    numbers = [number for number in fields if number is not None]
    if len(numbers) != len(fields) or size is None:
        raise Damage(position, "damaged", f"damaged sparse map of the member at offset {position}")
    return _pairs(numbers, position), size, data


def pax_map(window: Window, records: list[tuple[bytes, bytes]], data: int) -> tuple[Segments, int, int] | None:
    """Read a map of the GNU formats 0.0, 0.1 (in the PAX records) or 1.0 (in front of the payload).

    Returns segments, size of the file and the length of the map in front of the payload; None for an ordinary
    member. Raises Damage.
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
        raise Damage(data, "damaged", f"damaged sparse map of the member with data at {data}") from None


def _sparse_map(window: Window, data: int) -> tuple[list[int], int]:
    """Read a map of format 1.0: decimal numbers, one a line, the first the number of entries, padded to a block.

    Returns the numbers after the first, and the length of the map. Raises ValueError, Damage.
    """
    text, lines, needed = bytearray(), 0, 1
    while lines < needed:
        index = window.seek(data + len(text))
        block = window.data[index : index + BLOCK]
        text += block
        if not lines and b"\n" in block:
            count = int(text[: text.index(b"\n")])
            if not 0 <= count <= SPARSE_MAX:
                raise ValueError(count)
            needed = 1 + 2 * count
        lines += block.count(b"\n")
        if len(text) > 24 * needed + BLOCK:  # no number has more digits
            raise ValueError(text)
    return [int(line) for line in bytes(text).split(b"\n")[1:needed]], len(text)


def _pairs(fields: list[int], position: int) -> list[tuple[int, int]]:
    if len(fields) % 2 or len(fields) > 2 * SPARSE_MAX:
        raise Damage(position, "damaged", f"damaged sparse map of the member at offset {position}")
    # Empty segments only fill up the fixed tables of the old format, or mark the end of the file.
    return [pair for pair in zip(fields[::2], fields[1::2], strict=True) if pair[1]]


def check_segments(segments: Segments, size: int, stored: int, position: int) -> None:
    """Raise Damage unless segments are in order, in a file of `size` bytes, and at most `stored` bytes in all."""
    end = total = 0
    if stored < 0:
        raise Damage(position, "damaged", f"damaged sparse map of the member at offset {position}")
    for offset, length in segments:
        total += length
        if length < 0 or offset < end or offset + length > size or total > stored:
            raise Damage(position, "damaged", f"damaged sparse map of the member at offset {position}")
        end = offset + length
    if not 0 <= size <= FILE_SIZE_MAX:
        raise Damage(position, "damaged", f"impossible size {size} of the sparse member at offset {position}")


def read_extents(fd: TarBytes, data: int, extents: Extents, offset: int, length: int) -> bytes:
    """Return bytes `offset` to `offset + length` of a sparse member whose payload starts at byte `data`.

    Their stored parts lie in one piece. Raises CorruptShard if the shard ends before that.
    """
    offsets, sizes, places = extents
    content = bytearray(length)
    rows = range(max(bisect_right(offsets, offset) - 1, 0), bisect_left(offsets, offset + length))
    if not rows:
        return bytes(content)
    first, last = rows[0], rows[-1]
    begin = places[first] + min(max(offset - offsets[first], 0), sizes[first])
    end = places[last] + min(sizes[last], offset + length - offsets[last])
    stored = read_fully(fd, end - begin, data + begin)
    if len(stored) < end - begin:
        raise CorruptShard(f"the shard ends inside a sparse member with data at byte {data}")
    for row in rows:
        start, stop = max(offsets[row], offset), min(offsets[row] + sizes[row], offset + length)
        if start < stop:
            at = places[row] + start - offsets[row] - begin
            content[start - offset : stop - offset] = stored[at : at + stop - start]
    return bytes(content)
