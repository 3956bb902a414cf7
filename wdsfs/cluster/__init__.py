"""Work on other machines: what `--executor` names, how units of work get there, and what is done there.

No network protocol of our own: an engine that is there already (Dask, Ray, MPI, Slurm, anything with a
`concurrent.futures.Executor`) carries pickled units to its workers, and results back. `engines.py` opens the
engine that a user names, `workers.py` keeps it for a command, `spread.py` hands units out and copes with workers
that die. `far_side.py` is what a worker runs: it checks that it has the same wdsfs and sees the same shards;
`shard_units.py` makes units of shards. `in_flight.py` collects finished futures, for the processes of this
machine, too.

Which units there are, and what is done for each, is for the rooms above; a unit is anything that can be pickled.
Start with `spread.py`.
"""
