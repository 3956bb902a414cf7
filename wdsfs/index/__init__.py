"""The index: one record for each shard, built once, kept on disk, found by path and fingerprint.

`record.py` answers questions about a shard from its packed record (`record_columns.py`). `record_builder.py`
makes that record from the shard's bytes: `member_draft.py` collects the members, `hard_links.py` resolves links,
`record_order.py` sorts, `aliases.py` finds names that repeat or are odd, `record_sections.py` packs;
`record_of_file.py` makes it from the shard's file. `store.py` keeps records in LMDB; `index_directory.py` copes
with a directory that is missing, full or damaged, `lmdb_env.py` opens LMDB in it, `lmdb_check.py` detects
damage. `process_pool.py` builds records in several processes; `set_tables.py` has tables over all shards of a
set, and `merged_names.py` those by which `--merge` numbers equal names. `portable.py` uses the records of
`*.wdsidx` files, which `portable_writer.py` writes and `record_check.py` does not trust. Which shards form a set
is for `dataset`. Start with `record.py`.
"""
