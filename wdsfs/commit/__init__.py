"""New shards from the old ones and an overlay.

`diff.py` says what the overlay changes, in samples and members; `plan.py` decides which shards are written and
from which pieces, and runs that plan; `shard_writer.py` writes one shard: copied ranges and new members, synced,
verified, then renamed; `replace_in_place.py` replaces the shards of a set and survives a crash at any point.
Nothing here knows FUSE; a mounted set is frozen by its daemon. Start with `plan.py`.
"""
