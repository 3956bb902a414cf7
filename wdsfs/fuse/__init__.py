"""The kernel's requests: how they are received, parsed and answered, and the processes that do so.

`protocol.py` has the layouts of the kernel's messages, `read_ops.py` and `write_ops.py` translate requests into
calls of a tree and errors into errnos, `worker.py` is the loop of one worker, `supervisor.py` forks workers,
replaces those that die or hang, and has the kernel send their requests again; `counters.py` is the memory that
these processes share. What a name or a change means is decided by the trees. Start with `read_ops.py`.
"""
