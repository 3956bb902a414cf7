"""Other tools: the indexes of DALI, wids and Energon, and what readers of the format would trip over in a set.

`dali.py`, `wids.py` and `energon.py` encode and check the index of one tool each, as bytes; `export.py` writes
them where the tools look for them; `lint.py` has the rules of `wdsfs check`. Nothing is served from here, but
`.wdsfs` shows some of the same texts. Start with `export.py`.
"""
