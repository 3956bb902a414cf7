"""Bytes of this machine: where those of a shard come from, durable writes, and caches of large files.

A shard is read through a `TarBytes`: a descriptor, or a reader that unpacks while it reads. A fingerprint decides
if a file is still the same file. A durable file is whole after a crash, or not there at all. The room `tar` knows
what the bytes mean. Start with `source.py`.
"""
