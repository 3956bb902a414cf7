"""Plots of a set: sizes per column, samples per shard, samples per class, as SVG and as PNG.

`plots.py` decides what is drawn, from the counts of `tree/distributions.py`, and says the same in words and as
a table; `drawing.py` has the shapes and writes them as SVG, `raster.py` as PNG. Nothing here reads a shard, and
only `raster.py` needs a library: bar charts are a few shapes, a plotting library is large, and its SVG would
follow neither a page's colours nor its fonts. Start with `plots.py`.
"""
