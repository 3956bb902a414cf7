"""New shards from an overlay, a view of a set, or a tree of files.

The sources (`overlay_source.py`, `view_source.py`, `file_source.py`) decide which shards there are, and from which
pieces; a plan is data. `runner.py` writes its shards, by threads, processes or a cluster, each by
`shard_writer.py`; `replacement.py` replaces the shards of a set and survives a kill at any point. Nothing here
knows FUSE. Start with `plan.py`.
"""
