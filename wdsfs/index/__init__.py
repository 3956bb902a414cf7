"""The index: one record for each shard, built once, stored on disk, found by path and fingerprint.

`record.py` answers questions about a shard from packed bytes, and decides what a record holds. `record_of_file.py`
reads a shard for it, once nobody writes to the shard. `record_builder.py` makes it of a scan: the members
(`member_draft.py`), their order and aliases, the sections (`record_columns.py`). `store.py` keeps records in LMDB,
in a directory that `index_directory.py` and `lmdb_check.py` check. Portable indexes (`portable.py`,
`portable_writer.py`) bring records of others, checked by `record_check.py`.

Records that are missing are built by processes (`process_pool.py`): of this machine, or of a cluster, to which an
existing engine (Dask, Ray, MPI, Slurm) carries pickled units, without a protocol of our own. `spread.py` puts
units into batches, runs a batch in a worker, and repeats units that were lost. The worker checks that it has the
same wdsfs and sees the same shards. A unit is any function that can be pickled: the rooms above use the same
processes. The room `tree` decides which shards form a set, and what a mount shows of a record. Start with
`record.py`.
"""
