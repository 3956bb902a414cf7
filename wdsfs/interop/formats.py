"""The names of the formats that `export.py` writes: the command line needs them without loading NumPy."""

from __future__ import annotations

DALI, ENERGON, WIDS, WDSIDX = FORMATS = ("dali", "energon", "wids", "wdsidx")
