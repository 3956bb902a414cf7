"""Serves sets by the kernel itself: images of EROFS over shards, their mounts and guards, and overlayfs above.

An image is a file system of names and pointers, whose data are the shards. What a set looks like is decided by the
trees of `tree`; this room writes down what they answer, in the format of the kernel, has it mounted
(`erofs_mount.py`, `overlayfs.py`), and guards the shards while it is.

Start with `image.py`, which makes an image: `image_writer.py` goes from shard to shard, `shard_table.py` makes
tables of each, and `layout.py` turns a table into bytes.
"""
