"""Finds global headers and end marks between members, for a commit that copies them or leaves them out."""

from __future__ import annotations

from collections.abc import Iterator

from wdsfs.errors import CorruptShard
from wdsfs.storage.source import TarBytes
from wdsfs.tar.extension_headers import pax_records
from wdsfs.tar.headers import BLOCK, EXTENSIONS, PAX_GLOBAL, ZERO_BLOCK, number_of, padded
from wdsfs.tar.member_reader import end_of
from wdsfs.tar.problems import Damage
from wdsfs.tar.window import read_fully, skip_zeros


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
    found = []
    while head < data - BLOCK:
        header = read_fully(fd, BLOCK, head)
        if header[156] not in EXTENSIONS:  # the member's own header; a sparse map may follow
            break
        following = head + BLOCK + padded(number_of(header[124:136]) or 0)
        if header[156] == PAX_GLOBAL:
            found.append((head, following))
        head = following
    return found
