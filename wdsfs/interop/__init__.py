"""Indexes and rules of other tools: DALI, wids, Energon; and what the readers of the format would trip over.

`dali.py`, `wids.py` and `energon.py` encode and check the index of one tool each, as bytes; `export.py` writes
them where the tools look for them; `lint.py` has the rules of `wdsfs check`, `soundness.py` decides whether a
command goes on with a set that is not whole. Nothing is served from here, but `.wdsfs` shows some of the same
texts. Start with `export.py`.
"""
