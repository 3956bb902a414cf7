"""Columns of byte strings over one buffer: names, targets of links, values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_SHORT = 256  # bytes up to which texts are copied many at a time; longer ones take longer byte by byte
_ROWS = 1 << 16  # texts that are copied at a time


class Texts(NamedTuple):
    """Texts in one array, in any order: each is `lengths` bytes of `text` from `starts` on."""

    text: NDArray[np.uint8]
    starts: Ints
    lengths: Ints

    @staticmethod
    def of(texts: Sequence[bytes]) -> Texts:
        """Return these byte strings as texts, one after the other."""
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        return Texts(np.frombuffer(b"".join(texts), np.uint8), np.cumsum(lengths) - lengths, lengths)

    @staticmethod
    def packed(text: NDArray[np.uint8], bounds: NDArray[Any]) -> Texts:
        """Return the texts side by side, between `bounds`."""
        starts = bounds.astype(np.int64)
        return Texts(text, starts[:-1], starts[1:] - starts[:-1])

    @staticmethod
    def joined(parts: Sequence[Texts]) -> Texts:
        """Return all of these, in their order."""
        parts = [part for part in parts if len(part.starts)] or parts[:1]
        if len(parts) == 1:
            return parts[0]
        sizes = np.cumsum([0, *(len(part.text) for part in parts)])
        return Texts(
            np.concatenate([part.text for part in parts]),
            np.concatenate([part.starts + size for part, size in zip(parts, sizes.tolist(), strict=False)]),
            np.concatenate([part.lengths for part in parts]),
        )

    def take(self, rows: NDArray[Any] | slice) -> Texts:
        """Return these rows, without a copy of the text."""
        return Texts(self.text, self.starts[rows], self.lengths[rows])

    def replaced(self, rows: NDArray[Any], others: Texts) -> Texts:
        """Return the texts with others in these rows."""
        if not len(rows):
            return self
        both = Texts.joined([self, others])
        at = np.arange(len(self.starts))
        at[rows] = np.arange(len(self.starts), len(both.starts))
        return both.take(at)

    @staticmethod
    def chained(parts: Sequence[Texts]) -> Texts:
        """Return the first of all parts as one text, then the second of all, and so on."""
        lengths = np.asarray(np.sum([part.lengths for part in parts], axis=0), np.int64)
        starts = np.cumsum(lengths) - lengths
        text, place = np.empty(int(lengths.sum()), np.uint8), starts
        for part in parts:
            part.copy_to(text, place)
            place = place + part.lengths
        return Texts(text, starts, lengths)

    def copy_to(self, data: NDArray[np.uint8], places: Ints) -> None:
        """Copy each to its place in `data`."""
        long = np.flatnonzero(self.lengths > _SHORT)
        for row in long.tolist():
            begin, at, size = int(self.starts[row]), int(places[row]), int(self.lengths[row])
            data[at : at + size] = self.text[begin : begin + size]
        lengths = np.where(self.lengths > _SHORT, 0, self.lengths) if len(long) else self.lengths
        for low in range(0, len(places), _ROWS):
            count, start, place = (column[low : low + _ROWS] for column in (lengths, self.starts, places))
            offsets = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
            data[np.repeat(place, count) + offsets] = self.text[np.repeat(start, count) + offsets]

    def compact(self) -> Texts:
        """Return the same texts over a buffer that has nothing else, in their order."""
        ends = self.starts + self.lengths
        if len(ends) and bool(np.array_equal(self.starts[1:], ends[:-1])):  # side by side
            return Texts(self.text[self.starts[0] : ends[-1]].copy(), self.starts - self.starts[0], self.lengths)
        return Texts.chained([self])

    def to_list(self) -> list[bytes]:
        """Return the texts as a list of bytes objects."""
        text, ends = self.text.tobytes(), self.starts + self.lengths
        return [text[start:end] for start, end in zip(self.starts.tolist(), ends.tolist(), strict=True)]
