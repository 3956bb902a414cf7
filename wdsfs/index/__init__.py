"""The index: one record for each shard, built once, kept on disk, found by path and fingerprint.

`record.py` answers questions about a shard from its packed record, `record_builder.py` makes that record from
the shard's bytes. `store.py` keeps records in LMDB and copes with a directory that is missing, full or damaged,
which `lmdb_check.py` detects; `process_pool.py` builds records in several processes; `merged_names.py` has the
tables by which `--merge` numbers equal names; `hints.py` reads ahead with the help of foreign indexes. Which
shards form a set is for `dataset`. Start with `record.py`.
"""
