"""A set of shards as directories, names and content, whoever serves it.

`shard_set.py` has the shards by number: whether each is still what it was (`freshness.py`, with the counters of
`generations.py`), open files and records (`open_files.py`, `open_records.py`), what is not indexed
(`indexing.py`); `content.py` reads. `shard_access.py` opens shards on behalf of other users.
The trees (`tree.py`: what each answers) decide which names and inodes exist: `shard_tree.py` (a directory
for each shard), `merged_tree.py` (`--merge`) and `numbered_tree.py` (`--index-tree`). `statistics.py`
is what `wdsfs info` shows. Everything here only reads, and knows neither FUSE nor the overlay.
Start with `tree.py`.
"""
