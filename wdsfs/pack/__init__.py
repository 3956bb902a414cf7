"""Makes shards of a tree of files.

`tree_walk.py` finds the files (`file_table.py`), `layouts.py` detects how they are laid out, `samples.py` groups
them into samples, `order.py` orders and splits these. `packing_plan.py` decides which shards there are; `run.py`
has each written by `shard_unit.py`: a unit of work that needs nothing but the files, in any process. Names,
durable files and objects in stores are those of the room `commit`. Start with `packing_plan.py`.
"""
