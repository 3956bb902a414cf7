"""Live mounts: how one is started, found, asked, followed and ended.

`start.py` chooses the engine for plain `mount_options.py` (`-o` among them); `engines.py` reaches that of the
kernel, which is a wing; `doctor.py` checks the machine. `fuse_session.py` mounts by FUSE, serves, and ends in good
order; `daemon.py` forks a mount into the background. The processes by FUSE share a `mounted_set.py`;
`followed_set.py` notices and shows its changes, `look_again.py` finds new shards. `control_socket.py` answers
commands; `reports.py` and `hidden_directory.py` tell how the mount does, `hints.py` what loaders would misread.
Commands find mounts, and places for them, by `mount_search.py` and use each as a `live_mount.py` (by the kernel
`kernel/live_kernel.py`), also for an `overlay_session.py` and for `where.py`. Names, bytes and changes are decided
in the rooms below. Start with `start.py`.
"""
