"""A set of shards as directories, names and content, plain or as a view, for any process that serves it.

`opening.py` opens a set from what a user types, with the values of `set_options.py`. `shard_set.py` has the shards
by number: `freshness.py` decides which have changed, `indexing.py` indexes them again, `open_shards.py` keeps
files and records open, `shard_access.py` opens files on behalf of other users. `content.py` reads members, and
`sample_reader.py` whole samples, which `sample_decoder.py` decodes. `sample_order.py` has the order of training.

The trees (interface: `tree.py`) decide which names and inodes exist: `shard_tree.py`, `merged_tree.py` (with the
tables of `path_table.py`) and `numbered_tree.py`. The names in a shard are those of `shown_names.py`; `texts.py`
has them in columns. `statistics.py` counts. `set_table.py` makes a table with a row for each sample, of the rows
of `table_rows.py`, and `table_files.py` writes that to a file.

A view is a set of shards with records of its own (`view_set.py`), so trees and listings serve it as they serve
shards; `composition.py` has its options. `view_record.py` makes such a record in steps over a `draft.py`, with
`classes.py`, `json_fields.py` and the tables of `label_table.py`. For these tables `label_files.py` decides the
format and the key column of a file, `label_rows.py` reads its rows, and `label_names.py` decides which samples
they mean. `companions.py` has the other files that a view depends on (joined sets, names of classes), and notices
when one of these changes. `view_content.py` finds the bytes.

Sets are only read here: changes are for `overlay`, serving is for `fuse` and `kernel`. Start with `tree.py`.
"""
