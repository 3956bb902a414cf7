"""Changes beside the shards: the upper directory of a writable mount, merged with the shards below it.

`writable_tree.py` decides the effect of a request: a copy-up, a whiteout, a change. `overlaid_tree.py` shows upper
and shards as one tree. `upper_format.py` has the format, that of the kernel's overlayfs; `upper_directory.py`
opens an upper, of which `upper_files.py` and `upper_changes.py` change content and names, each change in one
atomic step. `whiteouts.py` marks hidden names, `work_directory.py` holds unfinished files and orphans.
`overlay_directory.py` has lock and settings, `overlay_shards.py` decides over which set an overlay may be used,
`mounted_overlay.py` is what the processes of a mount share; `restore.py` undoes changes. Turning changes into
shards is for `packing`. Start with `writable_tree.py`.
"""
