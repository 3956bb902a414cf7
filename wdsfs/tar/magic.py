"""Recognises by their first bytes what files are that are no plain tar."""

from __future__ import annotations

from wdsfs.errors import counted
from wdsfs.tar.headers import BLOCK, is_header

# What compressed files begin with; a zstd file also with a skippable frame (pzstd writes one first).
COMPRESSED = {
    "gzip": (b"\x1f\x8b\x08",),
    "bzip2": (b"BZh",),
    "xz": (b"\xfd7zXZ\0",),
    "zstd": (b"\x28\xb5\x2f\xfd", *(bytes((0x50 + n, 0x2A, 0x4D, 0x18)) for n in range(16))),
}

AGAIN = "download it again"
# Files that failed downloads leave in place of a tar: their beginning (in lower case), a name, the way out.
_LEFT_BEHIND = (
    (b"version https://git-lfs.github.com/", "a git LFS pointer", "its content comes by: git lfs pull"),
    (b"<!doctype html", "an HTML page", AGAIN),
    (b"<html", "an HTML page", AGAIN),
    (b"<?xml", "an XML document, as stores send errors", AGAIN),
    (b"pk\x03\x04", "a zip archive", "make a tar of what is in it"),
    (b"par1", "a Parquet file", "only tars can be shards"),
)
_TEXT_BYTES = bytes([*b"\t\n\f\r", *range(32, 127), *range(128, 256)])
_SHOWN = 40  # bytes of a text that a message has


def appearance(start: bytes) -> str:
    """Return in words what a file that is no tar looks like, by its first block, and what to do about it."""
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for mark, name, way_out in _LEFT_BEHIND:
        if text.startswith(mark):
            return f"is {name}, not a tar: {way_out}"
    if not text.translate(None, delete=_TEXT_BYTES):
        begin = start[:_SHOWN].decode(errors="replace")
        return f"is text, not a tar, and begins with {begin!a}: {AGAIN}"
    size = f" of {counted(len(start), 'byte')}, less than a header has" if len(start) < BLOCK else ""
    return f"is not a tar, but another file{size}: {AGAIN}"


def compression(start: bytes) -> str | None:
    """Return the format in which a file with this first block (or less) is compressed, None if it is not.

    A tar may begin with the same bytes, as the name of its first member; the checksum of its header shows that.
    """
    for name, magics in COMPRESSED.items():
        if start.startswith(magics):
            return None if is_header(start) else name
    return None
