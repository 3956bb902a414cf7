"""Live mounts: how one is started, found, asked, followed and ended.

`start.py` chooses the engine for plain `mount_options.py`; `engines.py` reaches that of the kernel, which is a
wing; `mountpoint.py` checks the place and `-o`, `doctor.py` the machine. `fuse_session.py` mounts by FUSE,
serves, and ends in good order; `daemon.py` forks the process of a mount into the background. The processes by
FUSE share a `mounted_set.py`; `followed_set.py` shows its changes: `shard_watch.py` notices them, `look_again.py`
finds new shards. `control_socket.py` answers commands; `reports.py` and `hidden_directory.py` tell how the mount
does, `hints.py` what loaders would misread. Commands find mounts by `mount_search.py` and use each as a
`live_mount.py` (`live_fuse.py`, `kernel/live_kernel.py`), also for an `overlay_session.py` and for `where.py`.
Names, bytes and changes are decided in the rooms below. Start with `start.py`.
"""
