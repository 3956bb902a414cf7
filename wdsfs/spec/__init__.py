"""The arguments of a user -> an ordered list of shards.

A spec is a path, a pattern, a brace expression, a directory, or a file that lists shards. `expand` returns one
`Shard` for each, with its name in the mount and its absolute path. No shard is opened here: the rooms `tar`
and `index` read them. Start with `expand.py`; `shard_lists.py` reads the list files of wids,
webdataset and Energon, `located.py` gives their values with file, field and line for error messages, `braces.py`
expands braces and bounds their number.
"""
