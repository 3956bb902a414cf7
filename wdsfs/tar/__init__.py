"""The tar format: finds and reads members, and encodes the headers of new ones.

Pure functions over descriptors and bytes: no samples, no index, no overlay. `scan.py` finds all members of a tar
(v7, ustar, GNU, PAX, sparse): `walk.py` goes from header to header through a `window.py`, `columns.py` parses
many headers at once; `headers.py`, `extension_headers.py` and `sparse.py` know the formats, `problems.py` what
can be wrong, and `magic.py` what a file is that is no tar. `member_reader.py` reads one member whose place is
known, `gaps.py` finds what lies between members. `compressed.py` gives the tar inside a compressed shard,
`member_codecs.py` unpacks single members such as `x.json.gz`, `header_encoder.py` encodes ustar and PAX headers.
How member names group into samples is decided in `names.py`. Start with `scan.py`.
"""
