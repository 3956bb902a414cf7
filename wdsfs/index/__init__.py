"""The index: one record for each shard, built once, kept on disk, found by path and fingerprint.

`record.py` answers questions about a shard from its packed record, `record_builder.py` makes that record from
the shard's bytes, `record_of_file.py` from its file. `store.py` keeps records in LMDB; `index_directory.py` copes
with a directory that is missing, full or damaged, `lmdb_env.py` opens LMDB in it, `lmdb_check.py` detects damage.
`process_pool.py` builds records in several processes; `set_tables.py` has tables over all shards of a set, and
`merged_names.py` those by which `--merge` numbers equal names; `hints.py` reads ahead with the help of foreign
indexes. Which shards form a set is for `dataset`. Start with `record.py`.
"""
