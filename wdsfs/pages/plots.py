"""Bar charts of a set: sizes by column, samples by shard and by class. `tree/statistics.py` counts them.

The charts are bounded for sets of any size: the largest columns and classes are drawn, and neighbouring shards
share a bar. Only `drawn` loads matplotlib.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import math
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsfs.errors import UsageError, counted
from wdsfs.extras import install_command
from wdsfs.names import shown
from wdsfs.tree.statistics import UNREADABLE, Distribution

FORMATS = ("svg", "png")
COLUMNS_DRAWN = 10
CLASSES_DRAWN = 24
BARS_MAX = 120  # neighbouring shards, or classes by rank, share a bar where there are more
NAME_MAX, LABEL_MAX = 100, 27  # characters of the name of a column or class: in words and tables; beside a bar
TICKS_MAX = 6
WIDTH = 9.0  # inches
LEFT, LEFT_OF_NAMES, GAP = 0.7, 2.2, 0.5  # beside and between axes
HEIGHT_OF_PANEL, HEIGHT_OF_CLASS, HEIGHT_OF_TITLE = 1.5, 0.2, 1.1
DARK, LIGHT = "#2f6fb2", "#acc5e0"


class Panel(NamedTuple):
    """The bars of a chart. A bar of several neighbours is dark up to the least of them, light up to the most."""

    title: str
    labels: tuple[str, ...]
    most: tuple[int, ...]
    least: tuple[int, ...] = ()
    is_horizontal: bool = False
    is_logarithmic: bool = False

    @property
    def height(self) -> float:
        return HEIGHT_OF_CLASS * (len(self.labels) + 3) if self.is_horizontal else HEIGHT_OF_PANEL


class Plot(NamedTuple):
    """A chart: its content in words, and its figures as a table whose first row has the names of the columns."""

    title: str
    alt: str
    rows: tuple[tuple[str, ...], ...] = ()
    panels: tuple[Panel, ...] = ()

    @property
    def height(self) -> float:
        return HEIGHT_OF_TITLE + sum(panel.height for panel in self.panels)


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
    used = np.flatnonzero(sum(files for _, files in drawn))
    bits = range(int(used[0]), int(used[-1]) + 1)
    labels = tuple(map(_range_text, bits))
    panels, rows = [], [("column", "size", "files")]
    for name, files in drawn:
        sizes = tuple(files[bits.start : bits.stop].tolist())
        panels.append(Panel(f"{_cut(name, LABEL_MAX)}: {counted(sum(sizes), 'file')}", labels, sizes, sizes))
        rows += [(name, label, f"{size:,}") for label, size in zip(labels, sizes, strict=True) if size]
    typical = ", ".join(f"{name} mostly {_range_text(int(files.argmax()))}" for name, files in drawn[:4])
    alt = f"{title}: {typical}{', and others' if len(ranked) > 4 else ''}."
    rest = len(ranked) - len(drawn) + counts.columns_left
    if rest:
        alt += f" {counted(rest, 'more column')} not drawn."
    return Plot(title, alt, tuple(rows), tuple(panels))


def plot_shards(counts: Distribution) -> Plot:
    """Return the samples of each shard, in the order of the set."""
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
    panel, rows = _grouped("", np.maximum(samples, 0), "shard", 0)
    return Plot(title, alt, rows, (panel,))


def plot_classes(counts: Distribution) -> Plot:
    """Return the samples of each class: of the largest by name, and of all by rank where there are more."""
    title = f"Samples by {counts.class_name}"
    if not counts.classes:
        if counts.class_name != "folder":
            return Plot(title, "No sample has a class.")
        advice = "wdsfs info --plot FILE --class-from cls counts the classes of a column"
        return Plot(title, f"No class is known: the keys have no folders; {advice}.")
    ranked = sorted(counts.classes.items(), key=lambda item: (-item[1], item[0]))
    drawn = [(_name(name), samples) for name, samples in ranked[:CLASSES_DRAWN]]
    labels, samples = tuple(_cut(name, LABEL_MAX) for name, _ in drawn), tuple(number for _, number in drawn)
    panels = [Panel("", labels, samples, samples, is_horizontal=True)]
    rows = [(counts.class_name, "samples"), *((name, f"{number:,}") for name, number in drawn)]
    least, most = ranked[-1][1], samples[0]
    alt = f"{title}: {_classes_text(counts)} of {least:,} to {counted(most, 'sample')}."
    rest = ranked[CLASSES_DRAWN:]
    if rest:
        by_rank = np.array([number for _, number in ranked], np.int64)
        panels.append(_grouped("All by rank", by_rank, "rank", 1)[0]._replace(is_logarithmic=True))
        rows.append((f"{len(rest):,} more", f"{sum(number for _, number in rest):,}"))
    for number, what in (
        (counts.in_no_class, f"in no {counts.class_name}"),
        (counts.samples_left, "in further ones"),
    ):
        if number:
            alt += f" {counted(number, 'sample')} {what}."
            rows.append((what, f"{number:,}"))
    return Plot(title, alt, tuple(rows), tuple(panels))


def _classes_text(counts: Distribution) -> str:
    number = f"{'more than ' if counts.samples_left else ''}{len(counts.classes):,}"
    return f"{number} {'class' if len(counts.classes) == 1 else 'classes'}"


def _grouped(
    title: str, values: NDArray[np.int64], what: str, first: int
) -> tuple[Panel, tuple[tuple[str, ...], ...]]:
    """Return a bar for each value, or for neighbours, and the table of them."""
    labels, rows = [], [(f"{what}s", "least samples", "mean", "most samples")]
    groups = np.array_split(values, min(len(values), BARS_MAX))
    for group in groups:
        last = first + len(group) - 1
        labels.append(f"{first:,}" if last == first else f"{first:,} to {last:,}")
        rows.append((labels[-1], f"{group.min():,}", f"{group.mean():,.1f}", f"{group.max():,}"))
        first = last + 1
    most, least = (tuple(int(edge(group)) for group in groups) for edge in (np.max, np.min))
    return Panel(title, tuple(labels), most, least), tuple(rows)


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
    return _cut(shown(name.decode("utf-8", "backslashreplace")), NAME_MAX)


def _cut(text: str, length: int) -> str:
    """Return a text of at most this length, with its middle left out."""
    half = (length - 1) // 2
    return text if len(text) <= length else f"{text[:half]}…{text[-half:]}"


# --- drawing -----------------------------------------------------------------------------------------------


def need_matplotlib() -> None:
    """Raise UsageError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"plots are drawn by matplotlib, which is not installed; type: {install_command('plot')}")


def drawn(plots: Sequence[Plot], suffix: str) -> bytes:
    """Return a picture of these charts, one below the other, in one of `FORMATS`. Raises UsageError."""
    need_matplotlib()
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it speaks of its cache of fonts
    import matplotlib
    from matplotlib.figure import Figure

    # Names of shards are no formulas. The text in an SVG stays text, and its identifiers are always the same.
    settings = {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "wdsfs", "font.size": 8}
    target = io.BytesIO()
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that the font lacks
        figure = Figure(figsize=(WIDTH, sum(plot.height for plot in plots)))
        top = figure.get_figheight()
        for plot in plots:
            _draw_plot(figure, plot, top)
            top -= plot.height
        figure.savefig(target, format=suffix, dpi=150, metadata={"Date": None} if suffix == "svg" else None)
    return target.getvalue()


def _draw_plot(figure: Any, plot: Plot, top: float) -> None:
    """Draw a chart whose upper edge is `top` inches above the lower edge of the figure."""
    height = figure.get_figheight()
    words = textwrap.fill(plot.alt.removeprefix(f"{plot.title}: "), 110)
    figure.text(LEFT / WIDTH, (top - 0.3) / height, plot.title, fontsize="large", weight="bold", va="top")
    figure.text(LEFT / WIDTH, (top - 0.5) / height, words, va="top")
    top -= HEIGHT_OF_TITLE
    for panel in plot.panels:
        left = LEFT_OF_NAMES if panel.is_horizontal else LEFT
        place = (left, top - panel.height + GAP, WIDTH - left - LEFT, panel.height - GAP)
        axes = figure.add_axes([place[0] / WIDTH, place[1] / height, place[2] / WIDTH, place[3] / height])
        _draw_panel(axes, panel)
        top -= panel.height


def _draw_panel(axes: Any, panel: Panel) -> None:
    places = range(len(panel.labels))
    axes.set_title(panel.title, loc="left", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    if panel.is_horizontal:
        axes.bar_label(axes.barh(places, panel.most, color=DARK), fmt="{:,.0f}", padding=3)
        axes.set_yticks(places, panel.labels)
        axes.invert_yaxis()
        return
    edges = [place - 0.5 for place in range(len(places) + 1)]
    axes.stairs(panel.most, edges, fill=True, color=LIGHT)
    axes.stairs(panel.least, edges, fill=True, color=DARK)
    labelled = places[:: math.ceil(len(places) / TICKS_MAX)]
    axes.set_xticks(labelled, [panel.labels[place] for place in labelled])
    if panel.is_logarithmic:
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.5)  # so that one sample has a bar
    axes.yaxis.set_major_formatter("{x:,.0f}")
