"""Where the bytes of a shard come from, and how bytes get to disk for good.

A shard is read through a `TarBytes`: a descriptor, or a reader that unpacks on the way. `identity.py` decides
whether a file is still the same one, `unpack_cache.py` keeps unpacked copies, `seekable.py` reads compressed
files at any offset, `durable.py` writes files that are whole after a crash. What the bytes mean is for `tar`.
Start with `source.py`.
"""
