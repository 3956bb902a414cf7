"""Plots of a set: what is drawn, said and listed, for small sets, for huge ones, and for hostile names."""

from __future__ import annotations

import importlib.util
import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

import numpy as np
import pytest
from PIL import Image

from wdsfs.errors import UsageError
from wdsfs.plots.drawing import document_of, stacked
from wdsfs.plots.plots import Plot, plot_classes, plot_shards, plot_sizes, plots_of
from wdsfs.plots.raster import png_of
from wdsfs.tree.distributions import BINS, UNREADABLE, Distribution

SVG = "{http://www.w3.org/2000/svg}"


def distribution(
    sizes: dict[bytes, dict[int, int]] | None = None,
    samples: Sequence[int] = (),
    classes: dict[bytes, int] | None = None,
) -> Distribution:
    """Counts of a set; `sizes` are numbers of files by the bits of their size."""
    found = Distribution()
    for extension, counts in (sizes or {}).items():
        found.sizes[extension] = np.bincount(list(counts), list(counts.values()), minlength=BINS).astype(np.int64)
    found.samples.extend(samples)
    found.classes = classes or {}
    return found


def hints(plot: Plot) -> list[str]:
    return [one.text or "" for one in ElementTree.fromstring(plot.svg).iter(f"{SVG}title")]


def texts(plot: Plot) -> list[str]:
    return [one.text or "" for one in ElementTree.fromstring(plot.svg).iter(f"{SVG}text")]


def heights(plot: Plot, role: str = "bar") -> list[float]:
    boxes = ElementTree.fromstring(plot.svg).iter(f"{SVG}rect")
    return [float(one.attrib["height"]) for one in boxes if one.attrib["class"] == f"plot-{role}"]


def test_sizes() -> None:
    plot = plot_sizes(distribution({b"jpg": {14: 30, 15: 60}, b"cls": {0: 1, 1: 89}}))
    assert hints(plot) == [
        "cls: 1 file of 0 B",
        "cls: 89 files of 1 B",
        "jpg: 30 files of 8 KiB to 16 KiB",
        "jpg: 60 files of 16 KiB to 32 KiB",
    ]
    low, high = heights(plot)[2:]
    assert abs(high - 2 * low) < 0.2
    assert plot.alt == "Sizes of files by column: cls mostly 1 B, jpg mostly 16 KiB to 32 KiB."
    assert plot.rows[0] == ("column", "from", "to", "files")
    assert plot.rows[-1] == ("jpg", "16 KiB", "32 KiB", "60")
    assert {"cls", "jpg", "90 files", "1 KiB"} <= set(texts(plot))


def test_only_the_largest_columns_are_drawn() -> None:
    plot = plot_sizes(distribution({f"c{number}".encode(): {3: number + 1} for number in range(500)}))
    assert len(hints(plot)) == 10
    assert "490 more columns not drawn" in texts(plot)


def test_shards() -> None:
    plot = plot_shards(distribution(samples=[100, 50, UNREADABLE, 100]))
    assert hints(plot) == [
        "shard 0: 100 samples", "shard 1: 50 samples", "shard 3: 100 samples"
    ]  # fmt: skip
    assert heights(plot) == [170, 85, 170]
    assert plot.alt == (
        "Samples by shard: 4 shards with 50 to 100 samples, 83 on average. 1 shard cannot be read."
    )
    assert plot.rows[2] == ("1", "50", "50.0", "50")


def test_many_shards_share_bars() -> None:
    samples = [1000] * 100_000
    samples[50_000] = 1
    plot = plot_shards(distribution(samples=samples))
    assert len(plot.rows) == 121
    assert len(heights(plot)) == 120
    [odd] = [row for row in plot.rows if row[1] == "1"]
    assert int(odd[0].split(" ")[0].replace(",", "")) <= 50_000
    assert odd[3] == "1,000"
    assert min(heights(plot)) < 1
    assert heights(plot, "soft") == [170]
    assert len(plot.svg) < 100_000


def test_classes() -> None:
    plot = plot_classes(distribution(classes={b"dog": 5, "Käse".encode(): 10, b"\xff": 1}))
    assert plot.rows == (("folder", "samples"), ("Käse", "10"), ("dog", "5"), (r"\xff", "1"))
    assert hints(plot) == ["Käse: 10 samples", "dog: 5 samples", r"\xff: 1 sample"]
    assert plot.alt == "Samples by folder: 3 classes of 1 to 10 samples."


def test_many_classes() -> None:
    plot = plot_classes(distribution(classes={f"class {n}".encode(): 1 + n for n in range(100_000)}))
    assert len(plot.rows) == 1 + 24 + 1
    assert plot.rows[1] == ("class 99999", "100,000")
    assert plot.rows[-1][0] == "99,976 more"
    assert plot.alt == "Samples by folder: 100,000 classes of 1 to 100,000 samples."
    assert len(plot.svg) < 100_000
    assert sum(hint.startswith("rank ") for hint in hints(plot)) >= 120


def test_without_anything_it_is_said() -> None:
    sizes, shards, classes = plots_of(distribution())
    assert sizes.alt == "There are no files in samples."
    assert shards.alt == "There are no samples in 0 shards."
    assert "--class-from cls" in classes.alt
    assert all(ElementTree.fromstring(plot.svg) is not None for plot in (sizes, shards, classes))


HOSTILE = b"</text><script>alert(1)</script>\"'&\x00\x1b[31m" + b"x" * 100_000


def test_hostile_names_are_text() -> None:
    found = distribution({HOSTILE: {3: 5}}, [5], {HOSTILE: 5})
    for plot in plots_of(found):
        for text in (plot.svg, document_of(plot.figure)):
            tree = ElementTree.fromstring(text)
            assert {one.tag for one in tree.iter()} <= {
                f"{SVG}{name}" for name in ("svg", "rect", "text", "title", "style")
            }
            assert not re.search("href|script(?!&gt;)|url", text.replace("&lt;script", "").replace("/script", ""))
            assert len(text) < 10_000
        assert all(len(cell) <= 100 for row in plot.rows for cell in row)
    png_of(stacked([plot.figure for plot in plots_of(found)]))


def test_a_plot_takes_the_colours_of_its_page() -> None:
    """No style that a strict page would refuse, no colour of its own."""
    for plot in plots_of(distribution({b"a": {3: 5}}, [5, 3], {b"a": 5})):
        assert "currentColor" in plot.svg
        assert "style" not in plot.svg
        assert "#" not in plot.svg
        root = ElementTree.fromstring(plot.svg)
        assert root.attrib["role"] == "img"
        assert root.attrib["aria-label"] == plot.alt


def test_a_document_has_both_colours() -> None:
    figure = stacked([plot.figure for plot in plots_of(distribution({b"a": {3: 5}}, [5], {b"a": 5}))])
    text = document_of(figure)
    assert "prefers-color-scheme: dark" in text
    assert 'fill="#2f6fb2"' in text
    assert "currentColor" not in text


def test_png_shows_the_same() -> None:
    figure = plot_shards(distribution(samples=[100, 50])).figure
    with Image.open(io.BytesIO(png_of(figure))) as image:
        assert image.size == (figure.width * 2, figure.height * 2)
        full, half = image.getpixel((2 * 200, 2 * 40)), image.getpixel((2 * 600, 2 * 40))
        assert (full, half) == ((0x2F, 0x6F, 0xB2), (255, 255, 255))
        assert image.getpixel((2 * 600, 2 * 190)) == full


def test_png_without_pillow_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install .*\[view\]'"):
        png_of(plot_shards(distribution(samples=[100, 50])).figure)
