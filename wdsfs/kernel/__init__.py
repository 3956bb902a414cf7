"""Images of EROFS over shards: file systems of names and pointers, whose data are the shards themselves.

The kernel serves such an image without a process of ours. What a set looks like is decided by the trees of
`dataset`; this room writes down what they answer, in the format of the kernel. Mounting an image is for
`mount/image_mount.py`.

Start with `build.py`, which makes an image. `put_tree.py` goes from shard to shard, `shard_table.py` makes tables
(`table.py`) of each, and `layout.py` turns a table into bytes, by `erofs.py`. Directories of several shards are
kept for the end (`open_directories.py`).
`manifest.py` is what an image says of its shards.
"""
