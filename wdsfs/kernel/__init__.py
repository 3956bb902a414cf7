"""Sets that the kernel itself serves: EROFS images over plain local shards, their mounts and guards.

An image is a file of names and pointers, whose data are the shards. `image.py` makes one: `shard_table.py` makes
tables of each shard, `erofs_encoding.py` encodes them as inodes and directories behind the header
(`erofs_header.py`), `manifest.py` names the shards; `set_image.py` keeps images in the cache. `image_mount.py`
mounts one by `erofs_mount.py`, after the checks of `engine_checks.py`; `guard.py` stays and guards the open files
(`devices.py`) against writers. `shown_image.py` says which set a mount shows. What a set looks like is decided by
the trees of `tree`, which engine a mount gets in `mount`. Start with `image.py`.
"""
