"""The chart of shards: its numbers and words, for small sets and for huge ones."""

from __future__ import annotations

from wdsfs.pages.site import UNREADABLE, plot_shards


def test_shards() -> None:
    plot = plot_shards([100, 50, UNREADABLE, 100])
    assert "4 shards with 50 to 100 samples, 83 on average. 1 shard cannot" in plot.alt
    assert [bar.length for bar in plot.bars] == [1, 0.5, 0, 1]
    assert plot.bars[1].cells == ("1", "50", "50.0", "50")
    assert plot_shards([]).alt == "There are no samples in 0 shards."
    many = plot_shards([1000] * 50_000 + [1] + [1000] * 49_999)
    assert len(many.bars) == 120
    assert {bar.cells[3] for bar in many.bars} == {"1,000"}
    [odd] = [bar.cells for bar in many.bars if bar.cells[1] == "1"]
    assert int(odd[0].split(" ")[0].replace(",", "")) <= 50_000
