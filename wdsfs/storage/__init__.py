"""Where the bytes of a shard come from, and how files are written durably.

A shard is read through a `TarBytes`: a descriptor, or a reader that unpacks while it reads. `identity.py` decides
if a file is still the same one, `unpack_cache.py` keeps unpacked copies, `seekable.py` reads compressed files at
any offset, `durable.py` writes files that are whole after a crash. The room `tar` knows what the bytes mean.
Start with `source.py`.
"""
