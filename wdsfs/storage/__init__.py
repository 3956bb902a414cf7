"""Bytes of this machine: where those of a shard come from, durable writes, and the one cache of large files.

A shard is read through a `TarBytes` (`source.py`): a descriptor, or a reader that unpacks while it reads
(`seekable.py`). A durable file (`durable.py`) is whole after a crash, or not there at all. `cache_directory.py`
has the files of the cache, `cache_room.py` decides which of them are evicted, and `file_cache.py` makes those that
never change. The room `tar` knows what the bytes mean, `shards.py` when a file is still the same, and `remote`
fills the cache with objects. Start with `source.py`.
"""
