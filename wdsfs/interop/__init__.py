"""Other tools: the indexes of DALI, wids and Energon, and what readers of the format would trip over in a set.

`dali.py`, `wids.py` and `energon.py` encode and check the files of one tool each, as bytes, and decide where that
tool finds other samples than wdsfs; `export.py` writes them where the tools look for them; `lint.py` has the rules
of `wdsfs check` and `--strict`. What a sample is, is decided in `names.py` and `index`; lists of shards of these
tools are read in `spec`. Nothing is served from here, but `.wdsfs` shows some of the same texts. Start with
`export.py`.
"""
