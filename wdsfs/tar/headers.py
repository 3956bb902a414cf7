"""Tar headers, read and written: header blocks, and the PAX and GNU extension headers in front of them.

A new member gets a plain ustar header wherever that suffices: every reader understands one, and it costs one
block. For values that do not fit ustar, a PAX header stands in front. The same arguments always give the same
bytes: no clock, no process number, no user of this machine. Pure functions over bytes.

Sources: POSIX.1-2024 pax(1) ("ustar Interchange Format", "pax Extended Header"), the GNU tar manual ("Tar
Internals"), CPython's tarfile for the headers that the webdataset library accepts, and that library's TarWriter
for the values that POSIX leaves open (owner, mode, the name of a PAX header).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection
from dataclasses import dataclass, field

from wdsfs.names import is_utf8
from wdsfs.source import TarBytes, pread, skip_hole
from wdsfs.tar.problems import Damage

BLOCK = 512
MAGIC = slice(257, 262)  # where the headers of all formats but v7 say "ustar"
FILE_SIZE_MAX = (1 << 63) - 1  # what the kernel accepts as a file size
ZERO_BLOCK = bytes(BLOCK)

REGULAR, HARD_LINK, SYMLINK, CHARACTER, BLOCK_DEVICE, DIRECTORY, FIFO = b"0123456"
CONTIGUOUS, GNU_SPARSE, OLD_REGULAR = b"7S\0"
GNU_DUMP_DIRECTORY, GNU_VOLUME_LABEL, GNU_CONTINUED = b"DVM"
PAX, PAX_SOLARIS, PAX_GLOBAL, GNU_NAME, GNU_LINK = b"xXgLK"
DATALESS = frozenset((HARD_LINK, SYMLINK, CHARACTER, BLOCK_DEVICE, DIRECTORY, FIFO))
# Semantics decision: a mount shows neither devices, nor the label of a volume, nor the rest of a file that begins
# in another volume. GNU tar extracts no file for the last two.
UNSHOWN = (CHARACTER, BLOCK_DEVICE, FIFO, GNU_VOLUME_LABEL, GNU_CONTINUED)
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
    """Return the checksum of a header over unsigned bytes and, as some old tars wrote it, over signed ones."""
    counted = header[:148] + b" " * 8 + header[156:]
    unsigned = sum(counted)
    return unsigned, unsigned - 256 * sum(byte > 127 for byte in counted)


def is_header(block: bytes) -> bool:
    """Return True if a block is a header, by its checksum."""
    stored = number_of(block[148:156]) if len(block) == BLOCK else None
    if stored is None:
        return False
    # The unsigned sum first: nearly all headers have it, and it is computed 50 times as fast.
    return stored == sum(block) - sum(block[148:156]) + 256 or stored in checksums_of(block)


def padded(size: int) -> int:
    """Return the size with padding: the next multiple of a block."""
    return (size + BLOCK - 1) & -BLOCK


# Semantics decision: bytes of a name or of a link's target, as many as the kernel takes, and folders of a name.
NAME_MAX, DEPTH_MAX = 4095, 256


@dataclass(slots=True)
class Extended:
    """The fields that extension headers set for the next member. `records` are PAX records not applied yet."""

    name: bytes | None = None
    link: bytes | None = None
    size: int | None = None
    mtime: int | None = None
    records: list[tuple[bytes, bytes]] = field(default_factory=list)

    def add(self, kind: int, body: bytes, head: int) -> None:
        """Take in the body of one extension header. Raises Damage, for the member with the head at `head`."""
        if kind == GNU_NAME:
            self.name = body.split(b"\0", 1)[0]
        elif kind == GNU_LINK:
            self.link = body.split(b"\0", 1)[0]
        else:
            self.records += pax_records(body, head)

    def apply(self, records: list[tuple[bytes, bytes]], start: int) -> None:
        """Apply PAX records in their order. Raises Damage, for the extension header at `start`.

        An empty value cancels an earlier value, so that the member's own header counts, as in POSIX.
        """
        sparse_name = None
        for key, value in records:
            if key == b"mtime":
                self.mtime = _nanoseconds(value)
            elif key == b"path":
                self.name = value.rstrip(b"/") or None
            elif key == b"GNU.sparse.name":
                sparse_name = value
            elif key == b"linkpath":
                self.link = value or None
            elif key == b"size":
                try:
                    self.size = int(value) if value else None
                except ValueError:
                    text = f"damaged PAX value for {key!r} in the extension header at offset {start}"
                    raise Damage(start, "damaged", text) from None
        if sparse_name:  # "path" is a made-up name then, for readers that do not know sparse files
            self.name = sparse_name


def unusable(extended: Extended) -> str | None:
    """Return why a name or target is too long; None if none is. (In a header block none ever is.)"""
    why = None if extended.name is None else name_beyond_limit(extended.name)
    if why is None and extended.link is not None and len(extended.link) > NAME_MAX:
        return f"its target has {len(extended.link):,} bytes, and the limit is {NAME_MAX:,}"
    return why


def name_beyond_limit(name: bytes) -> str | None:
    """Return why the reader leaves out a member of this name; None if it is shown. Writers refuse such names."""
    if len(name) > NAME_MAX:
        return f"its name has {len(name):,} bytes, and the limit is {NAME_MAX:,}"
    folders = name.count(b"/")
    return f"its name has {folders:,} folders, and the limit is {DEPTH_MAX}" if folders > DEPTH_MAX else None


def own_name(header: bytes, extended: Extended | None) -> bytes:
    """Return the name of a member, without the prefix that a ustar header may have."""
    if extended is not None and extended.name is not None:
        return extended.name
    return header[:100].split(b"\0", 1)[0]


def pax_records(body: bytes, position: int) -> list[tuple[bytes, bytes]]:
    """Return the `length key=value` records of a PAX header, in order (keys repeat in the sparse format 0.0).

    Raises Damage for the header that ends at `position`.
    """
    records, start = [], 0
    while start < len(body) and body[start]:
        space = body.find(b" ", start, start + 20)
        digits = body[start:space]
        end = start + int(digits) if space > 0 and digits.isdigit() else -1
        key, equals, value = body[space + 1 : end - 1].partition(b"=")
        if not space < end <= len(body) or not equals or body[end - 1] != 10:
            text = f"damaged PAX record in the extension header that ends at offset {position}"
            raise Damage(position, "damaged", text)
        records.append((key, value))
        start = end
    return records


def _nanoseconds(value: bytes) -> int | None:
    """Return decimal seconds in ns, rounded towards 0; None if the value is not a number.

    A wrong time is no reason to give up the member.
    """
    whole, _, fraction = value.partition(b".")
    try:
        if b"e" in value:  # Python writes numbers close to 0 with an exponent
            ns = int(float(value) * 10**9)
        else:
            ns = int((fraction + b"000000000")[:9])
            seconds = int(whole or (b"0" if fraction else b""))
            ns = seconds * 10**9 + (-ns if whole.startswith(b"-") else ns)
    except (ValueError, OverflowError):
        return None
    return max(min(ns, (1 << 63) - 1), -(1 << 63))


END = bytes(2 * BLOCK)  # the end-of-archive mark

# What webdataset's TarWriter gives its members; the owner and mode in an upper directory are those of a person.
MODE, OWNER = 0o444, b"bigdata"

NAME_BYTES, PREFIX_BYTES = 100, 155
OCTAL_MAX = 8**11 - 1  # of the size and time fields: 11 digits and a NUL

# Keywords that describe a single member; a global header may set any of them.
OVERRIDABLE = (b"path", b"size", b"mtime", b"uid", b"gid", b"uname", b"gname")


def encode(name: bytes, size: int, mtime: int, common: Collection[bytes] = ()) -> bytes:
    """Return the header, or headers, of a regular member; a multiple of 512 bytes.

    `name` is the whole name that readers get, any bytes; `size` is in bytes, `mtime` in whole
    seconds since the epoch, negative before it. `common` names the keywords that global PAX headers have set in
    front of the member: those are repeated, because they would override the ustar fields. Raises ValueError
    for an empty name and a negative size.
    """
    if not name or size < 0:
        raise ValueError(f"a member with the name {name!r} and {size} bytes is impossible")
    prefix_and_base = _split(name)
    if prefix_and_base is not None and not common and size <= OCTAL_MAX and 0 <= mtime <= OCTAL_MAX:
        return _ustar(prefix_and_base[1], size, mtime, b"0", prefix_and_base[0])  # nearly always
    records = _needed_records(name, size, mtime, prefix_and_base is not None, common)
    # Readers without PAX take the start of the name, and 0 for a number that does not fit, as from tarfile.
    prefix, base = prefix_and_base or (b"", name.replace(b"\0", b"?")[:NAME_BYTES])
    own = _ustar(base, size if size <= OCTAL_MAX else 0, mtime if 0 <= mtime <= OCTAL_MAX else 0, b"0", prefix)
    return _pax(records) + own


def padding(size: int) -> int:
    """Return the number of zero bytes between the end of `size` bytes of content and the next header."""
    return -size % BLOCK


def _needed_records(
    name: bytes, size: int, mtime: int, name_fits: bool, common: Collection[bytes]
) -> list[tuple[bytes, bytes]]:
    """Return the PAX records that the member needs, in the order in which they are written."""
    values = {
        b"path": name,
        b"size": b"%d" % size,
        b"mtime": b"%d" % mtime,
        b"uid": b"0",
        b"gid": b"0",
        b"uname": OWNER,
        b"gname": OWNER,
    }
    misfits = {b"path": not name_fits, b"size": size > OCTAL_MAX, b"mtime": not 0 <= mtime <= OCTAL_MAX}
    keys = {*common, *(key for key, misfit in misfits.items() if misfit)}
    records = [(key, values[key]) for key in OVERRIDABLE if key in keys]
    if b"path" in keys and not is_utf8(name):
        # Values are UTF-8 unless this says otherwise: names are bytes here, in any encoding.
        records.insert(0, (b"hdrcharset", b"BINARY"))
    return records


def _split(name: bytes) -> tuple[bytes, bytes] | None:
    """Return the name as ustar's prefix and name fields, joined by a slash; None when it does not fit into them.

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
    """Return one header block::

    0 name 100 | 100 mode 8 | 108 uid 8 | 116 gid 8 | 124 size 12 | 136 mtime 12 | 148 checksum 8
    156 type 1 | 157 link 100 | 257 magic 6, version 2 | 265 user 32 | 297 group 32
    329 device 8 + 8 | 345 prefix 155 | 500 nothing 12
    """
    start = name.ljust(100, b"\0") + b"%07o\0%07o\0%07o\0%011o\0%011o\0" % (mode, 0, 0, size, mtime)
    rest, checksum = _second_part(kind, prefix)
    return start + b"%06o\0 " % (sum(start) + checksum) + rest


@functools.lru_cache(maxsize=1024)  # many members have the same bytes, and adding them up is most of the work
def _second_part(kind: bytes, prefix: bytes) -> tuple[bytes, int]:
    """Return the bytes behind the checksum, and their sum with that field, which counts as spaces."""
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
    """Return `length key=value`; the length counts the whole record, with its own digits and the newline."""
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    if len(str(length)) > len(str(rest)):  # with this length the digits take one more byte
        length = rest + len(str(length))
    return b"%d %b=%b\n" % (length, key, value)


WINDOW_MIN, WINDOW_MAX = 2048, 1 << 18  # bytes read at a time from header to header
ZEROS_MIN, ZEROS_MAX = 1 << 14, 1 << 20  # bytes of zeros read at a time; GNU tar pads to 10 KiB


class Window:
    """A buffer over a file. Its size adapts to the distance between headers."""

    def __init__(self, fd: TarBytes, size: int, span: int = WINDOW_MAX // 4) -> None:
        self.fd, self.size = fd, size
        self.base, self.data = 0, b""
        self.span = span

    def seek(self, position: int, need: int = BLOCK) -> int:
        """Make `need` bytes at `position` available and return their index in `data`.

        Raises Damage if the file ends before that.
        """
        index = position - self.base
        if index >= 0 and index + need <= len(self.data):
            return index
        # One header per window means that the windows are mostly payload: read less. Several: read more.
        used = index < 2 * len(self.data)
        self.span = min(self.span * 2, WINDOW_MAX) if used else max(self.span // 2, WINDOW_MIN)
        self.data = read_fully(self.fd, max(self.span, need), position)
        self.base = position
        if len(self.data) < need:
            text = f"the file ends at byte {position + len(self.data)}, inside the header at offset {position}"
            raise Damage(position, "truncated", text)
        return 0


def read_fully(fd: TarBytes, size: int, offset: int) -> bytes:
    """Read as `source.pread`, repeated until there are `size` bytes or the file ends. Raises OSError."""
    data = os.pread(fd, size, offset) if isinstance(fd, int) else fd.pread(size, offset)
    while len(data) < size:
        more = pread(fd, size - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def skip_zeros(fd: TarBytes, position: int, end: int) -> int:
    """Return the offset of the first byte from `position` on that is not 0, at most `end`."""
    span = ZEROS_MIN
    while position < end:
        data_at = skip_hole(fd, position)
        data = b"" if data_at is None else pread(fd, min(span, end - data_at), data_at)
        if data_at is None or not data:
            return end
        rest = len(data.lstrip(b"\0"))
        if rest:
            return data_at + len(data) - rest
        position, span = data_at + len(data), min(2 * span, ZEROS_MAX)
    return end
