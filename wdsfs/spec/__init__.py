"""From the arguments of a user to an ordered list of shards.

A spec is a path, a pattern, a brace expression (`braces.py`), a directory, a URL (`objects.py`), or a file that
lists shards (`shard_lists.py`, read by `located.py`; `index_file.py`). `expand.py` decides which shards a spec
stands for, in which order and under which names in the mount; `dependencies.py` notes the directories and files
that were used, and `growth.py` compares two such lists of a set that grows. No shard is opened here: the rooms
`tar` and `index` read them. Start with `expand.py`.
"""
