"""Encodes tar headers, which a commit writes in front of a new member.

Plain ustar wherever it suffices, because every reader of the format understands it and it costs one block; a PAX
header in front of it for values that do not fit ustar. The same arguments always give the same bytes: no clock,
no process number, no user of this machine. Decoding is `headers.py`. Pure functions over bytes: no disks, no
state.

Sources: POSIX.1-2024 pax(1) ("ustar Interchange Format", "pax Extended Header"), and CPython's tarfile and
webdataset's TarWriter for the values of what POSIX leaves open (owner, mode, the name of a PAX header).
"""

from __future__ import annotations

import functools
from collections.abc import Collection

from wdsfs.tar.headers import BLOCK

END = bytes(2 * BLOCK)  # the end-of-archive mark

# What webdataset's TarWriter gives its members; the owner and mode in an upper directory are those of a person.
MODE, OWNER = 0o444, b"bigdata"

NAME_BYTES, PREFIX_BYTES = 100, 155
OCTAL_MAX = 8**11 - 1  # of the size and time fields: 11 digits and a NUL

# Keywords that describe a single member; a global header may set any of them.
OVERRIDABLE = (b"path", b"size", b"mtime", b"uid", b"gid", b"uname", b"gname")


def encode(name: bytes, size: int, mtime: int, common: Collection[bytes] = ()) -> bytes:
    """Return the header, or headers, of a regular member; a multiple of 512 bytes.

    `name` is the whole name as it is to be read back, any bytes; `size` is in bytes, `mtime` in whole
    seconds since the epoch, negative before it. `common` names the keywords that global PAX headers have set in
    front of the member: those are repeated, because they would override the ustar fields. Raises ValueError
    for an empty name and a negative size.
    """
    if not name or size < 0:
        raise ValueError(f"no member can be called {name!r} and have {size} bytes")
    prefix_and_base = _split(name)
    if prefix_and_base is not None and not common and size <= OCTAL_MAX and 0 <= mtime <= OCTAL_MAX:
        return _ustar(prefix_and_base[1], size, mtime, b"0", prefix_and_base[0])  # nearly always
    records = _needed(name, size, mtime, prefix_and_base is not None, common)
    # Readers without PAX take the start of the name, and 0 for a number that does not fit, as from tarfile.
    prefix, base = prefix_and_base or (b"", name.replace(b"\0", b"?")[:NAME_BYTES])
    own = _ustar(base, size if size <= OCTAL_MAX else 0, mtime if 0 <= mtime <= OCTAL_MAX else 0, b"0", prefix)
    return _pax(records) + own


def padding(size: int) -> int:
    """The number of zero bytes between the end of `size` bytes of content and the next header."""
    return -size % BLOCK


def _needed(
    name: bytes, size: int, mtime: int, name_fits: bool, common: Collection[bytes]
) -> list[tuple[bytes, bytes]]:
    """The PAX records that the member needs, in the order in which they are written."""
    values = {
        b"path": name,
        b"size": b"%d" % size,
        b"mtime": b"%d" % mtime,
        b"uid": b"0",
        b"gid": b"0",
        b"uname": OWNER,
        b"gname": OWNER,
    }
    wanted = set(common)
    if not name_fits:
        wanted.add(b"path")
    if size > OCTAL_MAX:
        wanted.add(b"size")
    if not 0 <= mtime <= OCTAL_MAX:
        wanted.add(b"mtime")
    records = [(key, values[key]) for key in OVERRIDABLE if key in wanted]
    if b"path" in wanted and not _is_utf8(name):
        # Values are UTF-8 unless this says otherwise: names are bytes here, in any encoding.
        records.insert(0, (b"hdrcharset", b"BINARY"))
    return records


def _split(name: bytes) -> tuple[bytes, bytes] | None:
    """The name as ustar's prefix and name fields, joined by a slash; None when it does not fit into them.

    Any bytes but NUL may stand in the fields: GNU tar, bsdtar and tarfile all write UTF-8 and other encodings as
    they are, and only a name that would lose bytes needs more.
    """
    if b"\0" in name:
        return None
    if len(name) <= NAME_BYTES:
        return b"", name
    # The longest prefix that fits. It must not be empty, or the slash after it is lost.
    slash = name.rfind(b"/", 1, PREFIX_BYTES + 1)
    base = name[slash + 1 :]
    return (name[:slash], base) if slash > 0 and 0 < len(base) <= NAME_BYTES else None


def _ustar(name: bytes, size: int, mtime: int, kind: bytes, prefix: bytes = b"", mode: int = MODE) -> bytes:
    """One header block::

    0 name 100 | 100 mode 8 | 108 uid 8 | 116 gid 8 | 124 size 12 | 136 mtime 12 | 148 checksum 8
    156 type 1 | 157 link 100 | 257 magic 6, version 2 | 265 user 32 | 297 group 32
    329 device 8 + 8 | 345 prefix 155 | 500 nothing 12
    """
    start = name.ljust(100, b"\0") + b"%07o\0%07o\0%07o\0%011o\0%011o\0" % (mode, 0, 0, size, mtime)
    rest, checksum = _second_part(kind, prefix)
    return start + b"%06o\0 " % (sum(start) + checksum) + rest


@functools.lru_cache(maxsize=1024)  # many members have the same, and adding it up is most of the work
def _second_part(kind: bytes, prefix: bytes) -> tuple[bytes, int]:
    """What follows the checksum, and the sum of it and of that field itself, taken for spaces."""
    owner = OWNER.ljust(32, b"\0")
    rest = kind + bytes(100) + b"ustar\00000" + owner + owner + bytes(16) + prefix
    rest = rest.ljust(BLOCK - 156, b"\0")
    return rest, 8 * 32 + sum(rest)


def _pax(records: list[tuple[bytes, bytes]]) -> bytes:
    """Return an extension header and its content for these records, nothing if there are none."""
    if not records:
        return b""
    body = b"".join(_record(key, value) for key, value in records)
    return _ustar(b"././@PaxHeader", len(body), 0, b"x", mode=0o644) + body + bytes(padding(len(body)))


def _record(key: bytes, value: bytes) -> bytes:
    """`length key=value`, where the length counts the whole record, its own digits and the newline included."""
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    if len(str(length)) > len(str(rest)):  # with this length the digits take one more byte
        length = rest + len(str(length))
    return b"%d %b=%b\n" % (length, key, value)


def _is_utf8(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True
