"""Reads the headers of one member whose place is known: its name and end; and the gap behind it.

Gaps hold global headers and end marks; a commit copies them or leaves them out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from wdsfs.errors import CorruptShard
from wdsfs.source import TarBytes, size_of
from wdsfs.tar.columns import Batch
from wdsfs.tar.headers import (
    BLOCK,
    EXTENSIONS,
    PAX_GLOBAL,
    WINDOW_MIN,
    ZERO_BLOCK,
    Window,
    is_header,
    number_of,
    own_name,
    padded,
    pax_records,
    read_fully,
    skip_zeros,
)
from wdsfs.tar.problems import Damage
from wdsfs.tar.scan import take_member


class Placed(NamedTuple):
    """A member by its own headers: raw name, first byte of its content, size (bytes)."""

    name: bytes
    data: int
    size: int


def placed(fd: TarBytes, head: int) -> Placed:
    """Return the member whose first header is at byte `head`. Raises CorruptShard."""
    batch = Batch()
    try:
        take_member(Window(fd, size_of(fd), WINDOW_MIN), head, batch, {})
    except Damage as error:
        raise CorruptShard(error.problem.text) from None
    if not batch.headers or not all(map(is_header, [*batch.extras, *batch.headers])):
        raise CorruptShard(f"no member at offset {head}")
    header, extended = batch.headers[0], batch.extended.get(0)
    name = own_name(header, extended)
    if (extended is None or extended.name is None) and header[257:263] == b"ustar\0" and header[345]:
        name = header[345:500].split(b"\0", 1)[0] + b"/" + name
    return Placed(name, batch.datas[0], batch.sizes[0])


def end_of(fd: TarBytes, head: int) -> int:
    """Return the offset after the member whose first header is at byte `head`, and after its padding.

    It may be after the end of a file that was written without its last padding. Raises CorruptShard.
    """
    try:
        end = take_member(Window(fd, size_of(fd), WINDOW_MIN), head, Batch(), {})
    except Damage as error:
        raise CorruptShard(error.problem.text) from None
    if end is None:
        raise CorruptShard(f"no member at offset {head}")
    return end


def split_gap(fd: TarBytes, start: int, end: int) -> Iterator[tuple[int, int, frozenset[bytes] | None]]:
    """Yield (start, end, keywords) of each part from byte `start` to the end mark, or to byte `end`.

    A part is a member with its headers (keywords None), or a global PAX header, which sets these keywords for all
    members after it. Raises CorruptShard.
    """
    while start < end:
        header = read_fully(fd, BLOCK, start)
        if len(header) < BLOCK or header == ZERO_BLOCK:
            return
        keywords = None
        if header[156] == PAX_GLOBAL:
            size = number_of(header[124:136]) or 0
            following = start + BLOCK + padded(size)
            try:
                keywords = frozenset(key for key, _ in pax_records(read_fully(fd, size, start + BLOCK), following))
            except Damage as error:
                raise CorruptShard(error.problem.text) from None
        else:
            following = end_of(fd, start)
        yield start, following, keywords
        start = following


def end_of_zeros(fd: TarBytes, start: int, end: int) -> int:
    """Return the offset of the first block after the zero block at `start` that is not zeros, at most `end`."""
    first = skip_zeros(fd, start + BLOCK, end)
    return min(first - first % BLOCK, end) if first < end else end


def global_headers(fd: TarBytes, head: int, data: int) -> list[tuple[int, int]]:
    """Return (start, end) of the global PAX headers between the first header of a member and its content."""
    headers = []
    while head < data - BLOCK:
        header = read_fully(fd, BLOCK, head)
        if header[156] not in EXTENSIONS:  # the member's own header; a sparse map may follow
            break
        following = head + BLOCK + padded(number_of(header[124:136]) or 0)
        if header[156] == PAX_GLOBAL:
            headers.append((head, following))
        head = following
    return headers
