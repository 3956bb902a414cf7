"""A set seen in another way: chosen columns, joined shards, label files, classes as folders.

`composition.py` has the options. `view_record.py` derives the record of a shard in a view from the records and
values that it is made of: a `draft.py` on which `join.py`, `decode.py`, `associate.py`, `select_columns.py` and
`classes.py` work in turn. `view_set.py` is the set of shards with such records; so the trees of `dataset` serve a
view as they serve the shards. `label_files.py` reads the columns of `--associate`. Start with `view_record.py`.
"""
