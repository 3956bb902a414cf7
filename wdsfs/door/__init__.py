"""The door to the bytes of shards: which path is a file and which is an object elsewhere.

`urls.py` reads URLs and shows them without their secrets, and `pins.py` tells whether an object is still the same
one. The rooms above pass paths; the wing `remote` brings the bytes of URLs. Start with `urls.py`.
"""
