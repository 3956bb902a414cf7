"""A set of shards as directories, names and content, independent of how it is served.

`shard_set.py` has the shards by number. Its parts check if a shard has changed (`freshness.py`, with the counters
of `generations.py`), keep open files and records (`open_files.py`, `open_records.py`), and have shards indexed
(`indexing.py`); `content.py` reads. `shard_access.py` opens shards on behalf of other users. The trees
(interface: `tree.py`) decide which names and inodes exist: `shard_tree.py` (a directory for each shard, with the
names of `shown_names.py`), `merged_tree.py` (`--merge`, with `merged_paths.py` and `merged_rivals.py`) and
`numbered_tree.py` (`--index-tree`). What they show of a whole shard is in columns in `shown_columns.py`,
`merged_columns.py` and `content_columns.py`. `provenance.py` has extended attributes, `totals.py` and
`statistics.py` sums. Everything here only reads, and knows neither FUSE nor the overlay. Start with `tree.py`.
"""
