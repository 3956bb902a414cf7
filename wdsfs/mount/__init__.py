"""Live mounts of both engines: how one is started, found, asked, followed and ended.

`mountpoint.py` checks the place and the options of `-o`, `options.py` the others. `fuse_session.py` has the shards
indexed, mounts by FUSE, serves, and ends in good order; `daemon.py` forks it into the background. Its processes
share a `mounted_set.py`; `followed_set.py` follows changes, and looks for new shards by `look_again.py`;
`control_socket.py` answers commands, `reports.py` and `hidden_directory.py` tell how the mount does. Commands find
mounts by `search.py` and use them as a `live_mount.py`. This room decides nothing about names, bytes or changes.
Start with `fuse_session.py`.
"""
