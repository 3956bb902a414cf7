"""What is drawn of a set, from its counts: the same in shapes, in words and as a table.

Each plot is bounded, for a set of any size: the most frequent columns and classes are drawn, and neighbouring
shards share a bar where there are more of them than bars.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsfs.errors import counted
from wdsfs.names import shown
from wdsfs.plots.drawing import BAR, GRID, LETTER, SOFT, Box, Figure, Shape, Text, cut, svg_of
from wdsfs.tree.distributions import UNREADABLE, Distribution

WIDTH = 720  # pixels
COLUMNS_SHOWN = 10
CLASSES_SHOWN = 24
BARS = 120  # of a plot; neighbouring shards, or classes by rank, share one where there are more
_LEFT = 190  # pixels for names
_RIGHT = 90  # pixels for figures
NAME_MAX = 100  # letters of the name of a column or a class
_ROW, _TALL, _FLAT = 56, 170, 20  # heights: of a column's histogram, of a plot of bars, of a class

Rows = tuple[tuple[str, ...], ...]


_HEAD = 22  # units of a figure that its title takes


class Plot(NamedTuple):
    """A plot of a set, and the same figures as a table."""

    title: str
    figure: Figure
    alt: str  # what can be seen, in words
    rows: Rows  # the first has the names of the columns

    @property
    def svg(self) -> str:
        """An `<svg>` element for a page, without the title, which is a heading there.

        It takes the page's colours; text of shards is escaped.
        """
        shapes = [shape._replace(y=shape.y - _HEAD) for shape in self.figure.shapes[1:]]
        return svg_of(self.figure._replace(height=self.figure.height - _HEAD, shapes=shapes))


def plots_of(found: Distribution) -> list[Plot]:
    """All plots of a set, in their order."""
    return [plot_sizes(found), plot_shards(found), plot_classes(found)]


# --- sizes


def plot_sizes(found: Distribution) -> Plot:
    """Sizes per column: for each a histogram over powers of two."""
    title = "Sizes of files by column"
    ranked = sorted(found.sizes.items(), key=lambda item: (-int(item[1].sum()), item[0]))
    if not ranked:
        return _empty(title, "There are no files in samples.")
    drawn = [(_name(extension) or "(none)", counts) for extension, counts in ranked[:COLUMNS_SHOWN]]
    used = np.flatnonzero(sum(counts for _, counts in drawn))
    first, last = int(used[0]), int(used[-1])
    rest = len(ranked) - len(drawn) + found.columns_left
    shapes = _headed(title)
    top = 34
    for name, counts in drawn:
        shapes += _histogram(name, counts, range(first, last + 1), top)
        top += _ROW
    shapes += _size_axis(first, last, top)
    height = top + 24
    if rest:
        shapes.append(Text(0, height + 4, f"{counted(rest, 'more column')} not drawn"))
        height += 16
    rows = [("column", "from", "to", "files")]
    for name, counts in drawn:
        rows += [
            (name, size_text(_low(at)), size_text(_high(at)), f"{counts[at]:,}")
            for at in np.flatnonzero(counts).tolist()
        ]
    typical = ", ".join(f"{name} mostly {_typical(counts)}" for name, counts in drawn[:4])
    alt = f"{title}: {typical}{', and others' if len(ranked) > 4 else ''}."
    return Plot(title, Figure(WIDTH, height, shapes, alt), alt, tuple(rows))


def _histogram(name: str, counts: NDArray[np.int64], bits: range, top: float) -> list[Shape]:
    step = (WIDTH - _LEFT - _RIGHT) / len(bits)
    most = int(counts.max())
    base = top + _ROW - 10
    shapes: list[Shape] = [
        Text(0, base - 14, cut(name, 27), bold=True),
        Text(0, base, counted(int(counts.sum()), "file")),
        Box(_LEFT, base, step * len(bits), 1, GRID),
    ]
    for at, bit in enumerate(bits):
        if count := int(counts[bit]):
            height = max((_ROW - 16) * count / most, 1)
            hint = f"{name}: {counted(count, 'file')} of {_range(bit)}"
            shapes.append(Box(_LEFT + at * step + 0.5, base - height, max(step - 1, 1), height, hint=hint))
    return shapes


def _size_axis(first: int, last: int, top: float) -> list[Shape]:
    """Labels at the lower ends of bars, as many as fit."""
    step = (WIDTH - _LEFT - _RIGHT) / (last - first + 1)
    every = max(math.ceil(60 / step), 1)
    # At 1 KiB, 1 MiB ... where there are labels at all.
    marks = [bit for bit in range(first, last + 1) if (bit - 11) % every == 0] or [first]
    return [Text(_LEFT + (bit - first) * step, top + 8, size_text(_low(bit)), "middle") for bit in marks]


def _low(bit: int) -> int:
    return 1 << bit - 1 if bit else 0


def _high(bit: int) -> int:
    return (1 << bit) - 1


def _range(bit: int) -> str:
    low, high = size_text(_low(bit)), size_text(_high(bit))
    return low if low == high else f"{low} to {high}"


def _typical(counts: NDArray[np.int64]) -> str:
    at = int(counts.argmax())
    return _range(at)


def size_text(size: int) -> str:
    """`0 B`, `512 B`, `4 KiB`: rounded up to whole units, so that the end of a range has a short name."""
    unit = 0
    while size >= 1000 and unit < 6:
        size = (size + 1023) >> 10
        unit += 1
    return f"{size:,} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB', 'EiB')[unit]}"


# --- shards


def plot_shards(found: Distribution) -> Plot:
    """Samples per shard, in the order of the set."""
    title = "Samples by shard"
    samples = np.frombuffer(found.samples, np.int64) if len(found.samples) else np.zeros(0, np.int64)
    unreadable = int((samples == UNREADABLE).sum())
    readable = np.maximum(samples, 0)
    if not len(samples) or not readable.any():
        return _empty(title, f"There are no samples in {counted(len(samples), 'shard')}.")
    known = samples[samples != UNREADABLE]
    alt = (
        f"{title}: {counted(len(samples), 'shard')} with {known.min():,} to {known.max():,} samples, "
        f"{known.mean():,.0f} on average."
    )
    if unreadable:
        alt += f" {counted(unreadable, 'shard')} cannot be read."
    shapes, rows = _bars(title, readable, "shard", 0)
    return Plot(title, Figure(WIDTH, _TALL + 64, shapes, alt), alt, rows)


class _Scale(NamedTuple):
    """How high a value is drawn, as a part of the whole height; `ticks` are the values with a line."""

    most: int
    is_logarithmic: bool

    def part(self, value: float) -> float:
        if not self.is_logarithmic:
            return value / self.most
        # From a half on, so that one sample has a bar.
        return math.log(value * 2) / math.log(self.most * 2) if value else 0.0

    @property
    def ticks(self) -> Sequence[int]:
        """Round numbers, some five of them, or the powers of ten."""
        if self.is_logarithmic:
            return [10**power for power in range(len(str(self.most)))]
        rough = max(self.most / 5, 1)
        power = 10 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
        return range(0, self.most + 1, step)


def _bars(
    title: str, values: NDArray[np.int64], what: str, first: int, is_logarithmic: bool = False
) -> tuple[list[Shape], Rows]:
    """A bar for each value, or for neighbours: solid up to the least of them, soft up to the most."""
    groups = np.array_split(values, min(len(values), BARS))
    scale = _Scale(int(values.max()), is_logarithmic)
    width, left, top = WIDTH - 70, 70, 34
    step = width / len(groups)
    shapes = _headed(title)
    for tick in scale.ticks:
        y = top + _TALL * (1 - scale.part(tick))
        shapes += [Box(left, y, width, 1, GRID), Text(left - 8, y + 4, f"{tick:,}", "end")]
    rows = [(f"{what}s", "least samples", "mean", "most samples")]
    at = first
    for number, group in enumerate(groups):
        low, high = int(group.min()), int(group.max())
        name = f"{at:,}" if len(group) == 1 else f"{at:,} to {at + len(group) - 1:,}"
        hint = f"{what} {name}: {counted(low, 'sample') if low == high else f'{low:,} to {high:,} samples'}"
        x, gap = left + number * step, min(step / 5, 2)
        for value, role in ((high, SOFT), (low, BAR)):
            height = _TALL * scale.part(value)
            if height and (role == BAR or high > low):
                shapes.append(Box(x + gap / 2, top + _TALL - height, max(step - gap, 0.5), height, role, hint))
        rows.append((name, f"{low:,}", f"{group.mean():,.1f}", f"{high:,}"))
        at += len(group)
    bottom = top + _TALL + 18
    shapes += [
        Text(left, bottom, f"{what} {first:,}"),
        Text(left + width, bottom, f"{what} {at - 1:,}", "end"),
    ]
    if len(groups) < len(values):
        shapes.append(Text(left + width / 2, bottom, "solid: the least of neighbours, soft: the most", "middle"))
    return shapes, tuple(rows)


# --- classes


def plot_classes(found: Distribution) -> Plot:
    """Samples per class: the largest by name, and all of them by rank where there are more."""
    title = f"Samples by {found.class_name}"
    if not found.classes:
        how = "the keys have no folders; wdsfs info --plot FILE --class-from cls counts the classes of a column"
        return _empty(
            title, f"No class is known: {how}." if found.class_name == "folder" else "No sample has a class."
        )
    ranked = sorted(found.classes.items(), key=lambda item: (-item[1], item[0]))
    drawn = ranked[:CLASSES_SHOWN]
    most = drawn[0][1]
    shapes = _headed(title)
    top, width = 34, WIDTH - _LEFT - _RIGHT
    rows = [(found.class_name, "samples")]
    for name, count in drawn:
        text = _name(name)
        shapes += [
            Text(_LEFT - 8, top + 12, cut(text, int(_LEFT / LETTER) - 2), "end"),
            Box(
                _LEFT, top + 2, max(width * count / most, 1), _FLAT - 6, hint=f"{text}: {counted(count, 'sample')}"
            ),
            Text(_LEFT + width * count / most + 6, top + 12, f"{count:,}"),
        ]
        rows.append((text, f"{count:,}"))
        top += _FLAT
    smallest = ranked[-1][1]
    alt = f"{title}: {_classes_text(found)} of {smallest:,} to {counted(most, 'sample')}."
    rest = ranked[CLASSES_SHOWN:]
    if rest:
        told = f"{len(rest):,} more with {smallest:,} to {rest[0][1]:,} samples"
        shapes.append(Text(0, top + 16, told))
        rows.append((f"{len(rest):,} more", f"{sum(count for _, count in rest):,}"))
        counts = np.array([count for _, count in ranked], np.int64)
        below, _ = _bars("All by rank, on a scale of powers of ten", counts, "rank", 1, is_logarithmic=True)
        shapes += [shape._replace(y=shape.y + top + 32) for shape in below]
        top += 32 + _TALL + 64
    for count, what in ((found.in_no_class, f"in no {found.class_name}"), (found.samples_left, "in further ones")):
        if count:
            alt += f" {counted(count, 'sample')} {what}."
            rows.append((what, f"{count:,}"))
    return Plot(title, Figure(WIDTH, top + 16, shapes, alt), alt, tuple(rows))


def _classes_text(found: Distribution) -> str:
    text = f"{len(found.classes):,}"
    if found.samples_left:
        text = f"more than {text}"
    return f"{text} {'class' if len(found.classes) == 1 else 'classes'}"


def _headed(title: str) -> list[Shape]:
    return [Text(0, 14, title, bold=True)]


def _empty(title: str, said: str) -> Plot:
    shapes = [*_headed(title), *(Text(0, 38 + 16 * n, line) for n, line in enumerate(_wrapped(said)))]
    return Plot(title, Figure(WIDTH, 44 + 16 * len(_wrapped(said)), shapes, f"{title}: {said}"), said, ())


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, int(WIDTH / LETTER))


def _name(name: bytes) -> str:
    return cut(shown(name.decode("utf-8", "backslashreplace")), NAME_MAX)
