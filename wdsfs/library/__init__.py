"""wdsfs as a library: the samples, the files and the table of a set without a mount.

Users import `wdsfs` itself, which loads this room when it is used. `opened_set.py` takes the options and opens a
set for threads, forks and pickles, with the lists of `key_lists.py`. `samples.py` is its sequence of samples, and
its table. `shuffle.py` has the order in which a training loop takes them. `files.py` is the set's tree of files,
and `fsspec_files.py` that tree as a file system of fsspec. `temporary_mount.py` mounts it for a block, and
`prefetch.py` reads files of mounts ahead. The room `tree` decides how a set is opened and read. Start with
`opened_set.py`.
"""
