"""Work on other machines: the engine that `--executor` names, how units of work get there, and who runs them.

No network protocol of our own: an engine that is there already (Dask, Ray, MPI, Slurm, anything with a
`concurrent.futures.Executor`) carries pickled units to its workers, and results back. A worker checks that it has
the same wdsfs and sees the same shards. Units and the work for each come from the rooms above; a unit is anything
that can be pickled. Start with `spread.py`.
"""
