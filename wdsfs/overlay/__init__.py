"""Changes beside the shards: the upper directory of a writable mount, merged with the shards below it.

The format of an upper is that of the kernel's overlayfs; each change is one atomic step. Turning changes into
shards is for `packing`. Start with `writable_tree.py`.
"""
