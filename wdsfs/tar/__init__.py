"""The tar format: finds and reads members, and encodes the headers of new ones.

Pure functions over descriptors and bytes: no samples, no index, no overlay. `scan.py` goes from header to header,
decides where a tar ends, and reads one member by its place. `columns.py` parses many headers at once; `headers.py`
parses and encodes one. `sparse.py` has the maps of sparse members, `problems.py` the findings. `compressed.py`
unpacks a compressed shard into the cache by `streams.py`, or has the shard read by its seek points
(`seekable.py`). `streams.py` also recognises the parts of a tar that was split. How the names of members group
into samples is decided in `names.py`. Start with `scan.py`.
"""
