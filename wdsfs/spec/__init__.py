"""Make an ordered list of shards from the arguments of a user.

A spec is a path, a pattern, a brace expression, a directory, a URL (`objects.py`), or a file that lists shards.
`expand.py` is the way through the room, and names the shards in the mount: `spec_words.py` says which paths the
specs name, `existence.py` which shards there are, also in lists of the webdataset library. Other files that list
shards are read by `energon_dataset.py` and `portable_head.py` (`.wdsidx`); `located.py` knows the place of each
field. `dependencies.py` notes the directories and files that were used, and `growth.py` compares two lists of a
set that grows. No shard is opened here: the rooms `tar` and `index` read them. Start with `expand.py`.
"""
