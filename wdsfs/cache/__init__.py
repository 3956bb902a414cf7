"""The one cache of large files on this machine.

`cache_directory.py` has the files of the cache, `cache_room.py` decides which of them are evicted, and
`file_cache.py` makes files that never change. The room `remote` fills the cache with objects. Start with
`cache_directory.py`.
"""
