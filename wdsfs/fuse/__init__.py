"""Requests of the kernel by FUSE: received, parsed and answered, and the processes that do so.

`protocol.py` has the layouts of the kernel's messages. `read_ops.py` and `write_ops.py` translate requests into
calls of a tree, and errors into errnos. `fuse_device.py` is the descriptor, and the loop of a worker that answers
its requests. `supervisor.py` forks workers, replaces workers that die or hang, and makes the kernel send their
requests again. `child_process.py` has the other processes that it forks, `counters.py` the memory that these
processes share. Workers note sequential readers (`pass_notes.py`). The pusher (`pusher.py`) reads ahead of these
readers into the kernel's cache (`page_cache.py`), and lists ahead of them (`lister.py`). This room decides which
process answers and what the kernel may cache. The trees (`tree`, `overlay`) decide what a name or a change means.
Start with `read_ops.py`.
"""
