"""A wing: sets that the kernel itself serves, as EROFS images over plain local shards, their mounts and guards.

The room `mount` calls this room by `engine.py`. An image is a file of names and pointers into the shards, which
have the data. `image.py` makes an image: `shard_table.py` makes tables of each shard, `erofs_encoding.py` encodes
them as inodes and directories behind the header (`erofs_header.py`), `manifest.py` names the shards. `engine.py`
checks what the kernel can serve, keeps images in the cache, and starts the process of a mount: `guard.py` mounts
by `erofs_mount.py`, and guards the open files (`devices.py`) against writers. Commands use a mount as a
`live_kernel.py`. The trees of `tree` decide what a set looks like. Start with `image.py`.
"""
