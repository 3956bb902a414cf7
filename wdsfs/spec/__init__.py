"""From the arguments of a user to an ordered list of shards.

A spec is a path, a pattern, a brace expression, a directory, a URL, or a file that lists shards. `expand` returns
one `Shard` for each, with its name in the mount and its absolute path. No shard is opened here: the rooms `tar`
and `index` read them. Start with `expand.py`.
"""
