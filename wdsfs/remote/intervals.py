"""Ranges of bytes that do not overlap, in order, with something for each."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

Thing = TypeVar("Thing")
Span = tuple[int, int]  # begin and end (bytes)


class Intervals(Generic[Thing]):
    """Things by range of bytes. No two ranges overlap; `add` does not check that."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._rows: list[tuple[int, int, Thing]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[tuple[int, int, Thing]]:
        return iter(self._rows)

    def add(self, begin: int, end: int, thing: Thing) -> None:
        at = bisect_left(self._begins, begin)
        self._begins.insert(at, begin)
        self._rows.insert(at, (begin, end, thing))

    def remove(self, begin: int) -> None:
        """Remove the range that begins here. Raises KeyError."""
        at = bisect_left(self._begins, begin)
        if at == len(self._begins) or self._begins[at] != begin:
            raise KeyError(begin)
        del self._begins[at], self._rows[at]

    def overlapping(self, begin: int, end: int) -> list[tuple[int, int, Thing]]:
        """The rows that have bytes of this range, in order."""
        at = max(bisect_right(self._begins, begin) - 1, 0)
        rows = []
        for row in self._rows[at : bisect_left(self._begins, end)]:
            if row[1] > begin:
                rows.append(row)
        return rows

    def gaps(self, begin: int, end: int) -> list[Span]:
        """The parts of this range that are in no row."""
        found = []
        for start, stop, _ in self.overlapping(begin, end):
            if start > begin:
                found.append((begin, start))
            begin = max(begin, stop)
        if begin < end:
            found.append((begin, end))
        return found


def joined(spans: Iterable[Span], gap: int = 0) -> list[Span]:
    """The spans in order, those that overlap or are at most `gap` bytes apart as one."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif begin < end:
            found.append((begin, end))
    return found


def split(spans: Iterable[Span], most: int) -> list[Span]:
    """The spans in pieces of at most `most` bytes."""
    return [(start, min(start + most, end)) for begin, end in spans for start in range(begin, end, most)]
