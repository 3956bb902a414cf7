"""Charts of a set: their numbers and words, for small sets, for huge ones, and for hostile names."""

from __future__ import annotations

import importlib.util
import io
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

import numpy as np
import pytest
from PIL import Image

from wdsfs.errors import UsageError
from wdsfs.pages.plots import drawn, plot_classes, plot_shards, plot_sizes, plots_of
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
    assert plot.rows == (
        ("column", "size", "files"),
        ("cls", "0 B", "1"),
        ("cls", "1 B", "89"),
        ("jpg", "8 KiB to 16 KiB", "30"),
        ("jpg", "16 KiB to 32 KiB", "60"),
    )
    cls, jpg = plot.panels
    assert (cls.title, jpg.title) == ("cls: 90 files", "jpg: 90 files")
    assert cls.labels == jpg.labels  # one scale for all
    assert (cls.most[:2], jpg.most[-2:]) == ((1, 89), (30, 60))


def test_only_the_largest_columns_are_drawn() -> None:
    plot = plot_sizes(distribution({f"c{number}".encode(): {3: number + 1} for number in range(500)}))
    assert len(plot.panels) == 10
    assert plot.panels[0].title == "c499: 500 files"
    assert plot.alt.endswith(" 490 more columns not drawn.")


def test_shards() -> None:
    plot = plot_shards(distribution(samples=[100, 50, UNREADABLE, 100]))
    assert plot.alt == (
        "Samples by shard: 4 shards with 50 to 100 samples, 83 on average. 1 shard cannot be read."
    )
    assert plot.panels[0].most == plot.panels[0].least == (100, 50, 0, 100)
    assert plot.rows[2] == ("1", "50", "50.0", "50")


def test_many_shards_share_bars() -> None:
    samples = [1000] * 100_000
    samples[50_000] = 1
    plot = plot_shards(distribution(samples=samples))
    assert len(plot.rows) == 121
    (panel,) = plot.panels
    assert set(panel.most) == {1000}
    assert sorted(panel.least)[:2] == [1, 1000]
    [odd] = [row for row in plot.rows if row[1] == "1"]
    assert odd[0] == panel.labels[panel.least.index(1)]
    assert int(odd[0].split(" ")[0].replace(",", "")) <= 50_000


def test_classes() -> None:
    plot = plot_classes(distribution(classes={b"dog": 5, "Käse".encode(): 10, b"\xff": 1}))
    assert plot.rows == (("folder", "samples"), ("Käse", "10"), ("dog", "5"), (r"\xff", "1"))
    assert (plot.panels[0].labels, plot.panels[0].most) == (("Käse", "dog", r"\xff"), (10, 5, 1))
    assert plot.alt == "Samples by folder: 3 classes of 1 to 10 samples."


def test_many_classes() -> None:
    plot = plot_classes(distribution(classes={f"class {n}".encode(): 1 + n for n in range(100_000)}))
    assert len(plot.rows) == 1 + 24 + 1
    assert plot.rows[1] == ("class 99999", "100,000")
    assert plot.rows[-1][0] == "99,976 more"
    assert plot.alt == "Samples by folder: 100,000 classes of 1 to 100,000 samples."
    named, by_rank = plot.panels
    assert (len(named.labels), len(by_rank.labels), by_rank.labels[0]) == (24, 120, "1 to 834")
    assert len(drawn([plot], "svg")) < 100_000


def test_an_empty_set_has_sentences_instead_of_charts() -> None:
    sizes, shards, classes = plots_of(distribution())
    assert sizes.alt == "There are no files in samples."
    assert shards.alt == "There are no samples in 0 shards."
    assert "--class-from cls" in classes.alt
    assert b"There are no files in samples." in drawn([sizes, shards, classes], "svg")


def test_hostile_names_are_text() -> None:
    """They are no elements and no formulas, and their length is bounded."""
    hostile = b"$\\frac{</text><script>alert(1)</script>\"'&\x00\x1b[31m" + b"x" * 100_000
    plots = plots_of(distribution({hostile: {3: 5}}, [5], {hostile: 5}))
    tree = ElementTree.fromstring(drawn(plots, "svg"))
    assert drawn(plots, "svg") == drawn(plots, "svg"), "the same picture each time"
    texts = [one.text or "" for one in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert not list(tree.iter("{http://www.w3.org/2000/svg}script"))
    assert any(text.startswith("$\\frac{</text…xxx") for text in texts)
    assert all(len(text) <= 120 for text in texts)
    assert all(len(cell) <= 100 for plot in plots for row in plot.rows for cell in row)


def test_a_png_has_bars() -> None:
    with Image.open(io.BytesIO(drawn([plot_shards(distribution(samples=[100, 50]))], "png"))) as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 20) or ()}
    assert {(0x2F, 0x6F, 0xB2), (255, 255, 255)} <= colours


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install .*\[plot\]'"):
        drawn([], "svg")
