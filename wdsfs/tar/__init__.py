"""What the bytes of a tar mean, and how those of new members are written.

Pure functions over descriptors and bytes: no samples, no index, no overlay. `scan.py` finds members and reads
their content (v7, ustar, GNU, PAX, sparse), `compressed.py` gives the tar inside a compressed shard,
`member_codecs.py` unpacks single members such as `x.json.gz`, `header_encoder.py` encodes ustar and PAX headers.
How member names group into samples is decided in `names.py`. Start with `scan.py`.
"""
