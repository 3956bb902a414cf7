"""One mount from start to end.

`options.py` takes the options and `mountpoint.py` checks the mount point; `session.py` has the shards indexed,
mounts, serves, and ends in good order. Its processes share a `mounted_set.py`; `daemon.py` forks it into the
background and `daemon_log.py` keeps its log; `control_socket.py` answers the other commands, with `child.py`
for what the supervisor must not do itself; `watch.py` is the process that follows changed shards. `unmount.py`
ends a mount. This room wires the other rooms together and decides nothing about names, bytes or changes. Start
with `session.py`.
"""
