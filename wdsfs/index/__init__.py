"""The index: one record for each shard, built once, stored on disk, looked up by path and fingerprint.

A record answers questions about a shard from its packed bytes. The builder makes it from the shard's bytes: a
draft of the members, their order and aliases, then the sections. Records are in LMDB; a pool of processes builds
those that are missing or stale. Portable indexes (`*.wdsidx`) bring records of others, which are checked before
use. Which shards form a set is for the room `tree`. Start with `record.py`.
"""
