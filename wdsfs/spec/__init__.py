"""From the arguments of a user to an ordered list of shards.

A spec is a path, a pattern, a brace expression (`braces.py`), a directory, a URL (`objects.py`), or a file that
lists shards. `expand.py` is the way through the room: `spec_words.py` says which paths the specs name,
`existence.py` which shards there are, and `shard_names.py` how they are called in the mount. One module a format
reads the files: `wids_index.py`, `webdataset_yaml.py`, `energon_dataset.py`, `energon_metadataset.py`,
`portable_head.py`; below them `located.py` knows the place of each field. `dependencies.py` notes the
directories and files that were used, and `growth.py` compares two lists of a set that grows. No shard is opened
here: the rooms `tar` and `index` read them. Start with `expand.py`.
"""
