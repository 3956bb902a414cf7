"""A set seen in another way: chosen columns, fields of JSON, joined shards, label files, classes as folders.

`composition.py` has the options. `view_record.py` derives the record of a shard in a view from the records and
values that it is made of: a `draft.py` on which `join.py`, `decode.py`, `associate.py`, `fields.py`,
`select_columns.py` and `classes.py` work in turn. `view_set.py` is the set of shards with such records, so the
trees of `dataset` serve a view as they serve the shards. Its parts: `companions.py` (other files that it depends
on), `source_sets.py` (plain sets that it is made of), `joined_sets.py` (samples of these by key),
`record_maker.py` (records of what may be changing), `derived_content.py` (the bytes of members). `label_files.py`
reads the columns of `--associate`, `json_fields.py` knows fields of JSON. Start with `view_record.py`.
"""
