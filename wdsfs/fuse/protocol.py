"""The kernel's FUSE protocol: requests taken apart, answers put together, as bytes.

Knows layouts and numbers, not what they are used for, and touches no descriptor. The source of everything here is
the kernel's include/uapi/linux/fuse.h (protocol 7.31, which is Linux 5.4, to 7.45); names are those of that file
without their prefix. All numbers are little-endian here and native there: the two are the same on every machine
that the interpreter and its packages are built for; `import` fails on others.
"""

from __future__ import annotations

import struct
import sys
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if sys.byteorder != "little":
    raise ImportError("wdsfs runs on little-endian machines only")

# Opcodes, of the requests that are answered or told apart.
LOOKUP, FORGET, GETATTR, SETATTR, READLINK, SYMLINK = 1, 2, 3, 4, 5, 6
MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK, OPEN, READ, WRITE, STATFS = 8, 9, 10, 11, 12, 13, 14, 15, 16, 17
FSYNC, SETXATTR, GETXATTR, LISTXATTR, REMOVEXATTR, FLUSH, INIT = 20, 21, 22, 23, 24, 25, 26
OPENDIR, READDIR, RELEASEDIR, FSYNCDIR, ACCESS, CREATE, INTERRUPT = 27, 28, 29, 30, 34, 35, 36
BATCH_FORGET, READDIRPLUS, RENAME2 = 42, 44, 45

# Codes of notifications, which stand where an answer has its error.
_INVAL_INODE, _INVAL_ENTRY, _RESEND, _INC_EPOCH = 2, 3, 7, 8

# Flags of INIT.
ASYNC_READ, EXPORT_SUPPORT, BIG_WRITES = 1 << 0, 1 << 4, 1 << 5
DO_READDIRPLUS, PARALLEL_DIROPS, MAX_PAGES = 1 << 13, 1 << 18, 1 << 22
CACHE_SYMLINKS, EXPLICIT_INVAL_DATA, HANDLE_KILLPRIV_V2, INIT_EXT = 1 << 23, 1 << 25, 1 << 28, 1 << 30

_HEADER = struct.Struct("<4xIQQ16x")  # length, opcode, unique, node; uid, gid, pid, length of extensions
_ANSWER = struct.Struct("<IiQ")
_INIT_IN = struct.Struct("<IIII")
_INIT_OUT = struct.Struct("<IIIIHHIIHHI28x")
_ATTRIBUTES = "QQQqqqIIIIIIIIII"
_ATTRIBUTES_OUT = struct.Struct("<QII" + _ATTRIBUTES)
_ENTRY_OUT = struct.Struct("<QQQQII" + _ATTRIBUTES)
_DIRENT = struct.Struct("<QQII")
_DIRENT_PLUS = struct.Struct("<QQQQII" + _ATTRIBUTES + "QQII")
_READ_IN = struct.Struct("<QQI")
_WRITE_IN, _WRITE_OUT = struct.Struct("<8xQII16x"), struct.Struct("<II")
_SETATTR_IN = struct.Struct("<I12xQ8xqq8xII4xI4xII4x")
_MKNOD_IN, _MKDIR_IN, _RENAME2_IN = struct.Struct("<II8x"), struct.Struct("<I4x"), struct.Struct("<QI4x")
_NUMBER = struct.Struct("<Q")
_FSYNC_IN, _SETXATTR_IN = struct.Struct("<8xI4x"), struct.Struct("<II")
_FORGETS_IN, _FORGET_IN = struct.Struct("<I4x"), struct.Struct("<QQ")
_CALLER = struct.Struct("<24xIII")
_STATFS_OUT = struct.Struct("<QQQQQIII28x")
_XATTR_IN, _XATTR_OUT = struct.Struct("<II"), struct.Struct("<II")
_OPEN_OUT = struct.Struct("<QII")
_SELF_AND_PARENT = frozenset((b".", b".."))
_PADDING = tuple(bytes(-length & 7) for length in range(8))
_ENTRY_NOTE = struct.Struct("<QII")
_INODE_NOTE = struct.Struct("<Qqq")

HEADER_SIZE = _HEADER.size
MAJOR, MINOR, MINOR_MIN = 7, 38, 31
PAGE = 4096
LINE_MIN = _DIRENT_PLUS.size + 8  # bytes of the shortest line of a listing
REQUEST_MIN = 8192  # the least room for a request that the kernel accepts; there are names in it, and no contents
MAX_READ_PAGES = 256  # the most that the kernel asks for at once by default, 1 MiB


# What stat says: inode, size (bytes), blocks (512 bytes), then the times of the last access, modification and
# change in whole seconds, and the nanoseconds of each, mode, links, uid, gid, device, block size (bytes), flags.
Attributes = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int, int, int, int]
_MODE = 9


def take_apart(message: bytes) -> tuple[int, int, int, bytes]:
    """A message of the kernel as opcode, number of the request, inode number, and what is behind the header."""
    opcode, unique, node = _HEADER.unpack_from(message)
    return opcode, unique, node, message[HEADER_SIZE:]


def caller_of(message: bytes) -> tuple[int, int, int]:
    """Who asks: uid, gid, and the number of the thread."""
    uid, gid, pid = _CALLER.unpack_from(message)
    return uid, gid, pid


def is_resent(message: bytes) -> bool:
    """Whether the kernel has handed out this request before, to a worker that did not answer it."""
    return bool(message[15] & 0x80)  # the highest bit of the number


def opcode_of(message: bytes) -> int:
    """What a request asks for. No opcode is larger than a byte, but for that of CUSE."""
    return message[4]


def unique_of(message: bytes) -> int:
    """The number of a request."""
    unique: int = _HEADER.unpack_from(message)[1]
    return unique


def name_of(body: bytes) -> bytes:
    """The name that ends a request."""
    return body[:-1]


def read_of(body: bytes) -> tuple[int, int]:
    """Offset and size (bytes) of a READ, READDIR or READDIRPLUS; for the latter two the offset is a cursor."""
    _, offset, size = _READ_IN.unpack_from(body)
    return offset, size


def xattr_of(body: bytes) -> tuple[int, bytes]:
    """The room (bytes) of the one who asks, 0 for the question how much is needed, and the attribute's name."""
    return _XATTR_IN.unpack_from(body)[0], body[_XATTR_IN.size : -1]


# --- requests that change something ------------------------------------------------------------------------


class SetattrRequest(NamedTuple):
    """What SETATTR is to change; None stays. Size in bytes, times in ns since the epoch, or NOW."""

    mode: int | None
    uid: int | None
    gid: int | None
    size: int | None
    atime_ns: int | None
    mtime_ns: int | None
    drop_privileges: bool


NOW = -(1 << 63)  # a time that is the clock's
_MODE_BIT, _UID, _GID, _SIZE, _ATIME, _MTIME, _ATIME_NOW, _MTIME_NOW = 1, 2, 4, 8, 16, 32, 128, 256
_SETATTR_DROP, _WRITE_DROP, _DATA_ONLY = 1 << 11, 1 << 2, 1


def change_of(body: bytes) -> SetattrRequest:
    """What SETATTR asks for."""
    valid, size, atime, mtime, atime_ns, mtime_ns, mode, uid, gid = _SETATTR_IN.unpack_from(body)
    return SetattrRequest(
        mode if valid & _MODE_BIT else None,
        uid if valid & _UID else None,
        gid if valid & _GID else None,
        size if valid & _SIZE else None,
        _time(valid, _ATIME, _ATIME_NOW, atime * 10**9 + atime_ns),
        _time(valid, _MTIME, _MTIME_NOW, mtime * 10**9 + mtime_ns),
        bool(valid & _SETATTR_DROP),
    )


def _time(valid: int, given: int, clock: int, time_ns: int) -> int | None:
    if valid & clock:
        return NOW
    return time_ns if valid & given else None


def write_of(body: bytes) -> tuple[int, memoryview, bool]:
    """Offset and data of a WRITE, and whether the file is to lose its setuid and setgid bits."""
    offset, size, flags = _WRITE_IN.unpack_from(body)
    return offset, memoryview(body)[_WRITE_IN.size : _WRITE_IN.size + size], bool(flags & _WRITE_DROP)


def written(size: int) -> bytes:
    """Answer to WRITE: so many bytes were."""
    return _WRITE_OUT.pack(size, 0)


def mknod_of(body: bytes) -> tuple[int, int, bytes]:
    """Mode (the umask is taken off already), device number and name."""
    mode, device = _MKNOD_IN.unpack_from(body)
    return mode, device, body[_MKNOD_IN.size : -1]


def mkdir_of(body: bytes) -> tuple[int, bytes]:
    """Mode and name."""
    return _MKDIR_IN.unpack_from(body)[0], body[_MKDIR_IN.size : -1]


def symlink_of(body: bytes) -> tuple[bytes, bytes]:
    """Name and target."""
    name, target, _ = body.split(b"\0")
    return name, target


def link_of(body: bytes) -> tuple[int, bytes]:
    """The inode that gets another name, and the name."""
    return _NUMBER.unpack_from(body)[0], body[_NUMBER.size : -1]


def rename_of(body: bytes, flagged: bool) -> tuple[bytes, int, bytes, int]:
    """Old name, inode of the new directory, new name, and (of a RENAME2) the flags of renameat2(2)."""
    start = _RENAME2_IN if flagged else _NUMBER
    parent, *flags = start.unpack_from(body)
    old, new, _ = body[start.size :].split(b"\0")
    return old, parent, new, flags[0] if flags else 0


def data_only(body: bytes) -> bool:
    """Whether an FSYNC asks for the data only."""
    return bool(_FSYNC_IN.unpack_from(body)[0] & _DATA_ONLY)


def setxattr_of(body: bytes) -> tuple[bytes, bytes, int]:
    """Name, value and flags of setxattr(2)."""
    size, flags = _SETXATTR_IN.unpack_from(body)
    end = body.index(b"\0", _SETXATTR_IN.size)
    return body[_SETXATTR_IN.size : end], body[end + 1 : end + 1 + size], flags


def forget_of(body: bytes) -> int:
    """How many lookups a FORGET takes back."""
    count: int = _NUMBER.unpack_from(body)[0]
    return count


def forgets_of(body: bytes) -> list[tuple[int, int]]:
    """Of a BATCH_FORGET: inodes, and how many lookups of each are taken back."""
    (count,) = _FORGETS_IN.unpack_from(body)
    start = _FORGETS_IN.size
    return [_FORGET_IN.unpack_from(body, start + number * _FORGET_IN.size) for number in range(count)]


# --- answers -----------------------------------------------------------------------------------------------


def header(unique: int, length: int, error: int = 0) -> bytes:
    """What stands in front of an answer with this many bytes; `error` is an errno."""
    return _ANSWER.pack(_ANSWER.size + length, -error, unique)


def entry(timeout: int, attributes_timeout: int, attributes: Attributes) -> bytes:
    """Answer to LOOKUP; timeouts in seconds."""
    return _ENTRY_OUT.pack(attributes[0], 0, timeout, attributes_timeout, 0, 0, *attributes)


def no_entry(timeout: int) -> bytes:
    """Answer to LOOKUP: there is no such name, and that may be remembered so long (s)."""
    return _ENTRY_OUT.pack(0, 0, timeout, *(0,) * 19)


def attributes(timeout: int, of: Attributes) -> bytes:
    """Answer to GETATTR; timeout in seconds."""
    return _ATTRIBUTES_OUT.pack(timeout, 0, 0, *of)


def opened() -> bytes:
    """Answer to OPENDIR: opened, and what is listed is not to be kept."""
    return _OPEN_OUT.pack(0, 0, 0)


def statfs(
    blocks: int,
    files: int,
    block_size: int,
    fragment: int,
    name_max: int,
    free: tuple[int, int, int] = (0, 0, 0),
) -> bytes:
    """Answer to STATFS; `blocks` of `fragment` bytes. `free` are blocks, those for all users, and inodes."""
    blocks_free, available, files_free = free
    return _STATFS_OUT.pack(blocks, blocks_free, available, files, files_free, block_size, name_max, fragment)


def xattr_size(size: int) -> bytes:
    """Answer to the question how much room is needed (bytes)."""
    return _XATTR_OUT.pack(size, 0)


def line(name: bytes, cursor: int, inode: int, mode: int) -> bytes:
    """A line of the answer to READDIR; `cursor` is where the listing goes on behind it."""
    length = len(name)
    return _DIRENT.pack(inode, cursor, length, mode >> 12) + name + _PADDING[length & 7]


def line_plus(
    name: bytes, cursor: int, timeout: int, attributes_timeout: int, attributes: Attributes, told: bool = True
) -> bytes:
    """A line of the answer to READDIRPLUS, which lets the kernel know the file, too, if it is to be `told`;
    timeouts in seconds."""
    inode, length = attributes[0], len(name)
    # These two the kernel does not take for a lookup, and so would never forget.
    node = 0 if name in _SELF_AND_PARENT or not told else inode
    return (
        _DIRENT_PLUS.pack(
            *(node, 0, timeout, attributes_timeout, 0, 0),
            *attributes,
            *(inode, cursor, length, attributes[_MODE] >> 12),
        )
        + name
        + _PADDING[length & 7]
    )


_RUN = np.dtype(
    [(name, "<u8") for name in ("node", "generation", "entry_valid", "attributes_valid", "entry_valid_ns")]
    + [(name, "<u8") for name in ("inode", "size", "blocks")]
    + [(name, "<i8") for name in ("atime", "mtime", "ctime")]
    + [(name, "<u4") for name in ("atime_ns", "mtime_ns", "ctime_ns", "mode", "links", "uid", "gid", "device")]
    + [(name, "<u4") for name in ("block_size", "flags")]
    + [(name, "<u8") for name in ("same_inode", "cursor")]
    + [(name, "<u4") for name in ("length", "type")]
)


def lines_plus(
    names: list[bytes],
    sizes: NDArray[Any],
    mtimes_ns: NDArray[np.int64],
    first_inode: int,
    first_cursor: int,
    like: Attributes,
    timeout: int,
    attributes_timeout: int,
    room: int,
) -> bytes:
    """What `line_plus` gives for each of these, joined, as many as there is room for (bytes).

    Inode numbers and cursors count up from the first; `like` has what is the same for all.
    """
    lengths = np.fromiter(map(len, names), np.int64, len(names))
    ends = np.cumsum(_RUN.itemsize + (lengths + 7 & ~7))
    count = int(np.searchsorted(ends, room, "right"))
    if not count:
        return b""
    lengths, ends, numbers = lengths[:count], ends[:count], np.arange(count)
    rows = np.zeros(count, _RUN)
    rows["node"] = rows["inode"] = rows["same_inode"] = first_inode + numbers
    rows["cursor"] = first_cursor + numbers
    rows["entry_valid"], rows["attributes_valid"] = timeout, attributes_timeout
    rows["size"], rows["length"] = sizes[:count], lengths
    rows["blocks"] = (rows["size"] + 511) // 512
    seconds, ns = np.divmod(mtimes_ns[:count], 10**9)
    for time in ("atime", "mtime", "ctime"):
        rows[time], rows[time + "_ns"] = seconds, ns
    mode, links, uid, gid, device, block_size, _ = like[_MODE:]
    rows["mode"], rows["links"], rows["uid"], rows["gid"], rows["device"] = mode, links, uid, gid, device
    rows["block_size"], rows["type"] = block_size, mode >> 12
    # In words of 8 bytes, of which everything here is made up: first all rows, then all names, to their places.
    words = lengths + 7 >> 3
    starts = ends // 8 - words - _RUN.itemsize // 8
    out = np.zeros(int(ends[-1]) // 8, np.uint64)
    out[starts[:, None] + np.arange(_RUN.itemsize // 8)] = rows.view(np.uint64).reshape(count, -1)
    widest = int(words.max())
    table = np.array(names[:count], f"S{8 * widest}").view(np.uint64).reshape(count, widest)
    places = (starts + _RUN.itemsize // 8)[:, None] + np.arange(widest)
    used = np.arange(widest) < words[:, None]
    out[places[used]] = table[used]
    return out.tobytes()


# --- the start of a session --------------------------------------------------------------------------------


class Kernel(NamedTuple):
    """What the kernel says of itself: protocol version, flags, the most it would read ahead (bytes)."""

    minor: int
    flags: int
    readahead: int


def kernel_of(body: bytes) -> Kernel:
    """What INIT says. Raises ValueError for a protocol that is too old."""
    major, minor, readahead, flags = _INIT_IN.unpack_from(body)
    if major != MAJOR or minor < MINOR_MIN:
        raise ValueError(f"the kernel speaks FUSE {major}.{minor}; {MAJOR}.{MINOR_MIN} (Linux 5.4) is needed")
    if flags & INIT_EXT:
        flags |= int.from_bytes(body[_INIT_IN.size : _INIT_IN.size + 4], "little") << 32
    return Kernel(minor, flags, readahead)


def start(kernel: Kernel, wanted: int, background: int, max_write: int = PAGE) -> bytes:
    """Answer to INIT: these flags where the kernel has them, so many requests of readahead at a time, writes up to
    this many bytes."""
    flags = wanted & kernel.flags
    return _INIT_OUT.pack(
        *(MAJOR, min(kernel.minor, MINOR), kernel.readahead, flags & 0xFFFFFFFF),
        *(background, background * 3 // 4, max_write, 1, MAX_READ_PAGES, 0, flags >> 32),
    )


# --- notifications -----------------------------------------------------------------------------------------


def resend() -> bytes:
    """Hand out again what was received and not answered (Linux 6.9)."""
    return header(0, 0, -_RESEND)


def forget_all() -> bytes:
    """Ask again for every name that is known (Linux 6.16)."""
    return header(0, 0, -_INC_EPOCH)


def forget_entry(parent: int, name: bytes) -> bytes:
    """Ask again for this name, and for all below it."""
    body = _ENTRY_NOTE.pack(parent, len(name), 0) + name + b"\0"
    return header(0, len(body), -_INVAL_ENTRY) + body


def notes_of(data: bytes) -> list[bytes]:
    """Notifications that were written one behind the other."""
    found, at = [], 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        found.append(data[at : at + length])
        at += length
    return found


def forget_attributes(inode: int) -> bytes:
    """Ask again for what stat says of an inode."""
    return _inode_note(inode, -1)


def forget_content(inode: int) -> bytes:
    """Ask again for what stat says of an inode, and for its bytes."""
    return _inode_note(inode, 0)


def _inode_note(inode: int, offset: int) -> bytes:
    """From `offset` (bytes) on the content is dropped, too; a negative one keeps it."""
    return header(0, _INODE_NOTE.size, -_INVAL_INODE) + _INODE_NOTE.pack(inode, offset, 0)
