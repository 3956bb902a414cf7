"""One mount from start to end.

`mountpoint.py` checks the mount point; `session.py` takes the options, has the shards indexed, mounts, forks,
answers on the control socket, and ends in good order; `watch.py` is the process that learns of changed shards
and has the kernel ask again. It wires the other rooms together and decides nothing about names, bytes or
changes. Start with `session.py`.
"""
