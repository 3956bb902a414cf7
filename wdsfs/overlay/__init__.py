"""Changes beside the shards: the upper directory of a writable mount, merged with the shards below it.

`overlay_directory.py` is the layout of what `--overlay` names, its lock and settings; `upper_format.py` is the
format of the changes in it (that of the kernel's overlayfs). `upper_dir.py` opens them and holds the parts that
change them, each change by one atomic step: `new_entries.py`, `name_changes.py`, `whiteouts.py`, `orphans.py`,
`upper_contents.py`, `durability.py`. `merged_view.py` shows shards and upper as one tree (with `node_table.py`,
`name_order.py`), `writable_tree.py` decides what a change copies up, hides or refuses (with `copy_up.py`,
`removals.py`, `renames.py`, `undo.py`). `restore.py` works out what `wdsfs restore` undoes,
`request_journal.py` lets a new worker know what the last one had begun, `mounted_overlay.py` locks the directory
and checks that it fits the set. Turning changes into shards is for `commit`. Start with `writable_tree.py`.
"""
