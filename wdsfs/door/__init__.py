"""The door to the bytes of shards: which path is a file and which is an object elsewhere.

All rooms above pass paths to the object of `shard_door.py`. It looks at files and opens them itself; for URLs it
loads the wing `remote`, which it knows by the interfaces of `remote_side.py`. `urls.py` reads URLs and shows them
without their secrets, and `pins.py` tells whether an object is still the same one. Start with `shard_door.py`.
"""
