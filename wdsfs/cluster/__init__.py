"""Work on other machines: batches of units, and the workers that run them.

An engine that is there already (Dask, Ray, MPI, Slurm, any `concurrent.futures.Executor`) carries pickled units to
its workers, and results back: there is no network protocol of our own. `wdsfs/executors.py` opens the engine that
`--executor` names, `spread.py` decides what goes into a batch and what is tried again, `far_side.py` runs a batch
in a worker, which checks that it has the same wdsfs, and `shard_units.py` that it sees the same shards. What a
unit does is decided by the rooms above; it is anything that can be pickled. Start with `spread.py`.
"""
