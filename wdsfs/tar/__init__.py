"""The tar format: finds and reads members, and encodes the headers of new ones.

Pure functions over descriptors and bytes: no samples, no index, no overlay. `scan.py` goes from header to header,
decides where a tar ends, and reads one member by its place; `columns.py` parses many headers at once, `headers.py`
one, and encodes them; `sparse.py` has the maps of sparse members, `problems.py` the findings. `compressed.py`
unpacks a compressed shard into the cache by `streams.py`, which also knows the parts of a tar that was cut, or has
it read by its seek points (`seekable.py`). How the names of members group into samples is decided in `names.py`.
Start with `scan.py`.
"""
