"""Bar charts of a set, as tables with bars: sizes by column, samples by shard and by class.

`tree/statistics.py` counts them. The tables are bounded for sets of any size: the largest columns and classes have
rows, and neighbouring shards share one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from wdsfs.errors import counted
from wdsfs.names import shown
from wdsfs.tree.statistics import UNREADABLE, Distribution

COLUMNS_DRAWN = 10
CLASSES_DRAWN = 100
BARS_MAX = 120  # neighbouring shards share a bar where there are more
NAME_MAX = 100  # characters of the name of a column or class


class Bar(NamedTuple):
    """A row of a chart: its cells, and the length of its bar, from 0 to 1."""

    cells: tuple[str, ...]
    length: float = 0.0


class Plot(NamedTuple):
    """A chart: its content in words, the names of the columns of its table, and its rows."""

    title: str
    alt: str
    columns: tuple[str, ...] = ()
    bars: tuple[Bar, ...] = ()


def plots_of(counts: Distribution) -> list[Plot]:
    """Return all charts of a set, in their order."""
    return [plot_sizes(counts), plot_shards(counts), plot_classes(counts)]


def plot_sizes(counts: Distribution) -> Plot:
    """Return the sizes of files by column: for each a histogram over powers of two."""
    title = "Sizes of files by column"
    ranked = sorted(counts.sizes.items(), key=lambda item: (-int(item[1].sum()), item[0]))
    if not ranked:
        return Plot(title, "There are no files in samples.")
    drawn = [(_name(extension) or "(none)", files) for extension, files in ranked[:COLUMNS_DRAWN]]
    bars = [
        Bar((name, _range_text(bits), f"{files[bits]:,}"), float(files[bits] / files.max()))
        for name, files in drawn
        for bits in np.flatnonzero(files).tolist()
    ]
    typical = ", ".join(f"{name} mostly {_range_text(int(files.argmax()))}" for name, files in drawn[:4])
    alt = f"{title}: {typical}{', and others' if len(ranked) > 4 else ''}."
    rest = len(ranked) - len(drawn) + counts.columns_left
    if rest:
        alt += f" {counted(rest, 'more column')} not drawn."
    return Plot(title, alt, ("column", "size", "files"), tuple(bars))


def plot_shards(counts: Distribution) -> Plot:
    """Return the samples of each shard, or of neighbours, in the order of the set."""
    title = "Samples by shard"
    samples = np.array(counts.samples, np.int64)
    readable = samples[samples != UNREADABLE]
    if not readable.any():
        return Plot(title, f"There are no samples in {counted(len(samples), 'shard')}.")
    alt = (
        f"{title}: {counted(len(samples), 'shard')} with {readable.min():,} to {readable.max():,} samples, "
        f"{readable.mean():,.0f} on average."
    )
    if len(readable) < len(samples):
        alt += f" {counted(len(samples) - len(readable), 'shard')} cannot be read."
    bars, first = [], 0
    for group in np.array_split(np.maximum(samples, 0), min(len(samples), BARS_MAX)):
        last = first + len(group) - 1
        numbers = f"{first:,}" if last == first else f"{first:,} to {last:,}"
        cells = (numbers, f"{group.min():,}", f"{group.mean():,.1f}", f"{group.max():,}")
        bars.append(Bar(cells, float(group.mean() / readable.max())))
        first = last + 1
    return Plot(title, alt, ("shards", "least samples", "mean", "most samples"), tuple(bars))


def plot_classes(counts: Distribution) -> Plot:
    """Return the samples of each class, the largest by name."""
    title = "Samples by folder"
    if not counts.classes:
        return Plot(title, "No class is known: the keys have no folders.")
    ranked = sorted(counts.classes.items(), key=lambda item: (-item[1], item[0]))
    most, least = ranked[0][1], ranked[-1][1]
    bars = [Bar((_name(name), f"{samples:,}"), samples / most) for name, samples in ranked[:CLASSES_DRAWN]]
    classes = f"{len(ranked):,} {'class' if len(ranked) == 1 else 'classes'}"
    more = "more than " if counts.samples_left else ""
    alt = f"{title}: {more}{classes} of {least:,} to {counted(most, 'sample')}."
    rest = ranked[CLASSES_DRAWN:]
    if rest:
        bars.append(Bar((f"{len(rest):,} more", f"{sum(samples for _, samples in rest):,}")))
    for samples, what in ((counts.in_no_class, "in no folder"), (counts.samples_left, "in further ones")):
        if samples:
            alt += f" {counted(samples, 'sample')} {what}."
            bars.append(Bar((what, f"{samples:,}")))
    return Plot(title, alt, ("folder", "samples"), tuple(bars))


def _range_text(bits: int) -> str:
    """Return the sizes that have this number of bits: `0 B`, `2 B to 3 B`, `8 KiB to 16 KiB`."""
    low, high = size_text(1 << bits - 1 if bits else 0), size_text((1 << bits) - 1)
    return low if low == high else f"{low} to {high}"


def size_text(size: int) -> str:
    """Return `0 B`, `512 B`, `4 KiB`: rounded up to whole units, so that the end of a range has a short name."""
    unit = 0
    while size >= 1000 and unit < 6:
        size = (size + 1023) >> 10
        unit += 1
    return f"{size:,} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB', 'EiB')[unit]}"


def _name(name: bytes) -> str:
    """Return the name of a column or class with its middle left out where it is long."""
    text, half = shown(name.decode("utf-8", "backslashreplace")), (NAME_MAX - 1) // 2
    return text if len(text) <= NAME_MAX else f"{text[:half]}…{text[-half:]}"
