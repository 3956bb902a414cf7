"""Other tools: the index of DALI, and what readers of the format would trip over in a set.

`lint.py` checks a shard and `judge.py` a set: the rules of `wdsfs check` and `--strict`. `dali.py` and
`energon.py` compare indexes that lie beside a shard with it. `dali.py` also makes the index that `export.py`
writes where DALI looks. What a sample is, is decided in `names.py` and `index`; lists of shards of other tools are
read in `spec`. The room is a wing: commands reach it by `cli/interop_commands.py`, `--strict` by
`tree/opening.py`. Start with `lint.py`.
"""
