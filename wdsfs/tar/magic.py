"""Recognises compressed files by their first bytes."""

from __future__ import annotations

from wdsfs.tar.headers import is_header

# What compressed files begin with; a zstd file also with a skippable frame (pzstd writes one first).
COMPRESSED = {
    "gzip": (b"\x1f\x8b\x08",),
    "bzip2": (b"BZh",),
    "xz": (b"\xfd7zXZ\0",),
    "zstd": (b"\x28\xb5\x2f\xfd", *(bytes((0x50 + n, 0x2A, 0x4D, 0x18)) for n in range(16))),
}


def compression(start: bytes) -> str | None:
    """Return the format in which a file with this first block (or less) is compressed, None if it is not.

    A tar may begin with the same bytes, as the name of its first member; the checksum of its header shows that.
    """
    for name, magics in COMPRESSED.items():
        if start.startswith(magics):
            return None if is_header(start) else name
    return None
