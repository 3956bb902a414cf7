"""Makes new shards from the old ones and an overlay.

`diff.py` finds the changes of an overlay, as samples and members (`walk.py`, `homes.py`, `summary.py`,
`changes.py`). `plan.py` decides which shards are written and from which pieces (`pieces.py`, `source_layout.py`,
`output_names.py`); a plan is data (`steps.py`). `run.py` writes its shards, each by `shard_writer.py`: copied
ranges and new members, synced, verified (`verify.py`), then renamed. `replace_in_place.py` replaces the shards of
a set and survives a crash at any point (`commit_journal.py`, `free_space.py`). `view_shards.py` writes what a view
shows, without an overlay. Nothing here knows FUSE; a mounted set is frozen by its daemon. Start with `plan.py`.

Makes shards of a tree of files.

`tree_walk.py` finds the files (`file_table.py`), `layouts.py` detects how they are laid out, `samples.py` groups
them into samples, `order.py` orders and splits these. `packing_plan.py` decides which shards there are;
`pack_run.py` has each written by `shard_unit.py`: a unit of work that needs nothing but the files, in any process.
Names, durable files and objects in stores are those of a commit.
"""
