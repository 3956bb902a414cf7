"""Ranges of bytes: values by range, and ranges joined and split. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

Thing = TypeVar("Thing")
Span = tuple[int, int]  # begin and end (bytes)


class Intervals(Generic[Thing]):
    """Values by range of bytes, in order. No two ranges overlap; `add` does not check that."""

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
        """Return the rows that have bytes of this range, in order."""
        at = max(bisect_right(self._begins, begin) - 1, 0)
        rows = []
        for row in self._rows[at : bisect_left(self._begins, end)]:
            if row[1] > begin:
                rows.append(row)
        return rows

    def gaps(self, begin: int, end: int) -> list[Span]:
        """Return the parts of this range that are in no row."""
        gaps = []
        for start, stop, _ in self.overlapping(begin, end):
            if start > begin:
                gaps.append((begin, start))
            begin = max(begin, stop)
        if begin < end:
            gaps.append((begin, end))
        return gaps


def joined(spans: Iterable[Span], gap: int = 0) -> list[Span]:
    """Return the spans in order, those that overlap or are at most `gap` bytes apart as one."""
    joins: list[Span] = []
    for begin, end in sorted(spans):
        if joins and begin <= joins[-1][1] + gap:
            joins[-1] = joins[-1][0], max(joins[-1][1], end)
        elif begin < end:
            joins.append((begin, end))
    return joins


def split(spans: Iterable[Span], most: int) -> list[Span]:
    """Return the spans in pieces of at most `most` bytes."""
    return [(start, min(start + most, end)) for begin, end in spans for start in range(begin, end, most)]
