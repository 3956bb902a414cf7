"""A set of shards as directories, names and content, independent of how it is served.

`shard_set.py` has the shards by number. Its parts check if a shard has changed (`freshness.py`, with the counters
of `generations.py`), keep open files and records (`open_files.py`, `open_records.py`), and have shards indexed
(`indexing.py`); `content.py` reads. `shard_access.py` opens shards on behalf of other users. The trees
(interface: `tree.py`) decide which names and inodes exist: `shard_tree.py` (a directory for each shard, with the
names of `shown_names.py`), `merged_tree.py` (`--merge`, with `merged_paths.py` and `merged_rivals.py`) and
`numbered_tree.py` (`--index-tree`). What they show of a whole shard is in columns in `shown_columns.py`,
`merged_columns.py` and `content_columns.py`. `provenance.py` has extended attributes, `totals.py` and
`statistics.py` sums. Everything here only reads, and knows neither FUSE nor the overlay.

A set seen in another way: chosen columns, fields of JSON, joined shards, label files, classes as folders.

`composition.py` has the options. `view_record.py` derives the record of a shard in a view from the records and
values that it is made of: a `draft.py` on which `join.py`, `decode.py`, `associate.py`, `fields.py`,
`select_columns.py` and `classes.py` work in turn. `view_set.py` is the set of shards with such records, so the
trees serve a view as they serve the shards. Its parts: `companions.py` (other files that it depends
on), `source_sets.py` (plain sets that it is made of), `joined_sets.py` (samples of these by key),
`record_maker.py` (records of what may be changing), `derived_content.py` (the bytes of members). `label_files.py`
reads the columns of `--associate`, `json_fields.py` knows fields of JSON. Start with `tree.py`.
"""
