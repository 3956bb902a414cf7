"""The tar format: finds and reads members, and encodes the headers of new ones.

Pure functions over descriptors and bytes: no samples, no index, no overlay. A scan goes from header to header,
and parses many headers at once; the content of one member is read by its place. A compressed shard is unpacked or
read at any offset. How member names group into samples is decided in `names.py`. Start with `scan.py`.
"""
