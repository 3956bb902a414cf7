"""The header block of a member: type flags, number fields, checksum.

Sources: POSIX.1-2024 pax(1), the GNU tar manual ("Tar Internals"), CPython's tarfile for what a reader of
WebDataset shards (the webdataset library) accepts. Encoding is `header_encoder.py`.
"""

from __future__ import annotations

BLOCK = 512
MAGIC = slice(257, 262)  # where the headers of all formats but v7 say "ustar"
FILE_SIZE_MAX = (1 << 63) - 1  # what the kernel accepts as a file size
ZERO_BLOCK = bytes(BLOCK)

REGULAR, HARD_LINK, SYMLINK, CHARACTER, BLOCK_DEVICE, DIRECTORY, FIFO = b"0123456"
CONTIGUOUS, GNU_SPARSE, OLD_REGULAR = b"7S\0"
PAX, PAX_SOLARIS, PAX_GLOBAL, GNU_NAME, GNU_LINK = b"xXgLK"
DATALESS = frozenset((HARD_LINK, SYMLINK, CHARACTER, BLOCK_DEVICE, DIRECTORY, FIFO))
EXTENSIONS = frozenset((PAX, PAX_SOLARIS, PAX_GLOBAL, GNU_NAME, GNU_LINK))


def number_of(raw: bytes) -> int | None:
    """Return the value of a number field: octal text, or GNU base-256 if the high bit is set; None if neither."""
    if raw[0] in (0x80, 0xFF):
        value = int.from_bytes(raw[1:], "big")
        return value - (1 << 8 * (len(raw) - 1)) if raw[0] == 0xFF else value
    text = raw.split(b"\0", 1)[0].strip()
    if not text:
        return 0
    try:
        return int(text, 8)
    except ValueError:
        return None


def checksums_of(header: bytes) -> tuple[int, int]:
    """The checksum of a header over unsigned bytes and, as some old tars wrote it, over signed ones."""
    counted = header[:148] + b" " * 8 + header[156:]
    unsigned = sum(counted)
    return unsigned, unsigned - 256 * sum(byte > 127 for byte in counted)


def is_header(block: bytes) -> bool:
    """True if a block is a header, by its checksum."""
    stored = number_of(block[148:156]) if len(block) == BLOCK else None
    if stored is None:
        return False
    # The unsigned sum first: nearly all headers have it, and it is computed 50 times as fast.
    return stored == sum(block) - sum(block[148:156]) + 256 or stored in checksums_of(block)


def padded(size: int) -> int:
    """The size with padding: the next multiple of a block."""
    return (size + BLOCK - 1) & -BLOCK
