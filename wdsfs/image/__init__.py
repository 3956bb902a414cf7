"""Images of EROFS over shards: file systems of names and pointers, whose data are the shards themselves.

The kernel serves such an image without a process of ours. What a set looks like is decided by the trees of
`dataset`; this room writes down what they answer, in the format of the kernel. Mounting an image is for
`mount/image_mount.py`.

Start with `build.py`, which makes an image. `tree_walk.py` asks a tree, `shard_table.py` asks a whole shard at
once; both fill tables (`table.py`), and `layout.py` turns a table into bytes, by `erofs.py`. What has not changed
is taken from the image before (`whole_shards.py`, `parts.py`). `manifest.py` is what an image says of its shards.
"""
