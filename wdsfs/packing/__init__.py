"""New shards from an overlay, a view of a set, or a tree of files.

A source decides which shards there are, and of which pieces: `overlay_commit.py` (with the changes that
`upper_walk.py` and `diff.py` find, and the cuts of `source_layout.py`), `view_source.py`, or `file_source.py`
(with the files of `file_table.py`, made samples, ordered and split by `file_samples.py`, and the rows of
`sample_tables.py`); `reasons.py` says why a file cannot be packed. The plan (`plan.py`) is data, and is compared
with what a reader would find in the shards. `runner.py` writes its shards, by threads, processes or a cluster
(`cluster_units.py`), each by `shard_writer.py`; `replacement.py` replaces the shards of a set and survives a kill
at any point. Freezing a mount, and what it shows afterwards, is for `mount`. Start with `plan.py`.
"""
