"""Charts of a set: their numbers and words, for small sets, for huge ones, and for hostile names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wdsfs.pages.site import Bar, plot_classes, plot_shards, plot_sizes, plots_of
from wdsfs.tree.statistics import BINS, UNREADABLE, Distribution


def distribution(
    sizes: dict[bytes, dict[int, int]] | None = None,
    samples: Sequence[int] = (),
    classes: dict[bytes, int] | None = None,
) -> Distribution:
    """Counts of a set; `sizes` are numbers of files by the bits of their size."""
    counts = Distribution()
    for extension, files in (sizes or {}).items():
        counts.sizes[extension] = np.bincount(list(files), list(files.values()), minlength=BINS).astype(np.int64)
    counts.samples.extend(samples)
    counts.classes = classes or {}
    return counts


def test_sizes() -> None:
    plot = plot_sizes(distribution({b"jpg": {14: 30, 15: 60}, b"cls": {0: 1, 1: 89}}))
    assert plot.alt == "Sizes of files by column: cls mostly 1 B, jpg mostly 16 KiB to 32 KiB."
    assert plot.columns == ("column", "size", "files")
    assert plot.bars == (
        Bar(("cls", "0 B", "1"), 1 / 89),
        Bar(("cls", "1 B", "89"), 1),
        Bar(("jpg", "8 KiB to 16 KiB", "30"), 0.5),
        Bar(("jpg", "16 KiB to 32 KiB", "60"), 1),
    )
    assert plot_sizes(distribution()).alt == "There are no files in samples."
    many = plot_sizes(distribution({f"c{number}".encode(): {3: number + 1} for number in range(500)}))
    assert (len(many.bars), many.bars[0].cells) == (10, ("c499", "4 B to 7 B", "500"))
    assert many.alt.endswith(" 490 more columns not drawn.")


def test_shards() -> None:
    plot = plot_shards(distribution(samples=[100, 50, UNREADABLE, 100]))
    assert plot.alt == (
        "Samples by shard: 4 shards with 50 to 100 samples, 83 on average. 1 shard cannot be read."
    )
    assert [bar.length for bar in plot.bars] == [1, 0.5, 0, 1]
    assert plot.bars[1].cells == ("1", "50", "50.0", "50")
    assert plot_shards(distribution()).alt == "There are no samples in 0 shards."
    many = plot_shards(distribution(samples=[1000] * 50_000 + [1] + [1000] * 49_999))
    assert len(many.bars) == 120
    assert {bar.cells[3] for bar in many.bars} == {"1,000"}
    [odd] = [bar.cells for bar in many.bars if bar.cells[1] == "1"]
    assert int(odd[0].split(" ")[0].replace(",", "")) <= 50_000


def test_classes() -> None:
    plot = plot_classes(distribution(classes={b"dog": 5, "Käse".encode(): 10, b"\xff": 1}))
    assert plot.columns == ("folder", "samples")
    assert plot.bars == (Bar(("Käse", "10"), 1), Bar(("dog", "5"), 0.5), Bar((r"\xff", "1"), 0.1))
    assert plot.alt == "Samples by folder: 3 classes of 1 to 10 samples."
    assert plot_classes(distribution()).alt == "The keys have no folders."
    many = plot_classes(distribution(classes={f"class {n}".encode(): 1 + n for n in range(100_000)}))
    assert (len(many.bars), many.bars[0].cells) == (100 + 1, ("class 99999", "100,000"))
    assert many.bars[-1].cells[0] == "99,900 more"
    assert many.alt == "Samples by folder: 100,000 classes of 1 to 100,000 samples."


def test_long_names_are_bounded() -> None:
    hostile = b"$</text><script>alert(1)</script>\"'&\x00\x1b[31m" + b"x" * 100_000
    plots = plots_of(distribution({hostile: {3: 5}}, [5], {hostile: 5}))
    assert all(len(cell) <= 100 for plot in plots for bar in plot.bars for cell in bar.cells)
    assert not any("\x1b" in cell for plot in plots for bar in plot.bars for cell in bar.cells)
