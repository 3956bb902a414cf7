"""The kernel's FUSE protocol: parses requests and makes replies, as bytes.

It knows layouts and numbers, not their use, and touches no descriptor. The source of everything here is the
kernel's include/uapi/linux/fuse.h (protocol 7.31, which is Linux 5.4, to 7.45); names are those of that file
without their prefix. All numbers are little-endian here and in the machine's byte order there. Both are the same
on every machine that the interpreter and its packages are built for; on others `import` fails.
"""

from __future__ import annotations

import struct
import sys
from typing import NamedTuple

import numpy as np

from wdsfs.tree.tree import ListingRun

if sys.byteorder != "little":
    raise ImportError("wdsfs runs on little-endian machines only")

# Opcodes of the requests that have a reply or are recognised.
LOOKUP, FORGET, GETATTR, SETATTR, READLINK, SYMLINK = 1, 2, 3, 4, 5, 6
MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK, OPEN, READ, WRITE, STATFS = 8, 9, 10, 11, 12, 13, 14, 15, 16, 17
FSYNC, SETXATTR, GETXATTR, LISTXATTR, REMOVEXATTR, FLUSH, INIT = 20, 21, 22, 23, 24, 25, 26
OPENDIR, READDIR, RELEASEDIR, FSYNCDIR, ACCESS, CREATE, INTERRUPT = 27, 28, 29, 30, 34, 35, 36
BATCH_FORGET, READDIRPLUS, RENAME2 = 42, 44, 45

# Codes of notifications, which stand where an answer has its error.
_INVAL_INODE, _INVAL_ENTRY, _STORE, _RESEND, _INC_EPOCH = 2, 3, 4, 7, 8

# Flags of INIT.
ASYNC_READ, EXPORT_SUPPORT, BIG_WRITES = 1 << 0, 1 << 4, 1 << 5
DO_READDIRPLUS, PARALLEL_DIROPS, MAX_PAGES = 1 << 13, 1 << 18, 1 << 22
CACHE_SYMLINKS, EXPLICIT_INVAL_DATA, HANDLE_KILLPRIV_V2, INIT_EXT = 1 << 23, 1 << 25, 1 << 28, 1 << 30

_REQUEST_HEADER = struct.Struct("<4xIQQIII4x")  # length, opcode, unique, node, uid, gid, pid, length of extensions
_ANSWER = struct.Struct("<IiQ")
_INIT_IN = struct.Struct("<IIII")
_INIT_OUT = struct.Struct("<IIIIHHIIHHI28x")
_ATTRIBUTES = "QQQqqqIIIIIIIIII"
_ATTRIBUTES_OUT = struct.Struct("<QII" + _ATTRIBUTES)
_ENTRY_OUT = struct.Struct("<QQQQII" + _ATTRIBUTES)
_DIRENT = struct.Struct("<QQII")
_DIRENT_PLUS = struct.Struct("<QQQQII" + _ATTRIBUTES + "QQII")
_DOTS = struct.Struct("<" + 2 * "128xQQII8s")
_READ_IN, _READ_FLAGS = struct.Struct("<QQI"), struct.Struct("<32xI")
_WRITE_IN, _SIZE_OUT = struct.Struct("<8xQII16x"), struct.Struct("<II")
_SETATTR_IN = struct.Struct("<I12xQ8xqq8xII4xI4xII4x")
_MKNOD_IN, _MKDIR_IN, _RENAME2_IN = struct.Struct("<II8x"), struct.Struct("<I4x"), struct.Struct("<QI4x")
_NUMBER = struct.Struct("<Q")
_FSYNC_IN, _SETXATTR_IN = struct.Struct("<8xI4x"), struct.Struct("<II")
_FORGETS_IN, _FORGET_IN = struct.Struct("<I4x"), struct.Struct("<QQ")
_STATFS_OUT = struct.Struct("<QQQQQIII28x")
_XATTR_IN = struct.Struct("<II")
_OPEN_OUT, _KEEP_CACHE, _CACHE_DIR = struct.Struct("<QII"), 1 << 1, 1 << 3
_SELF_AND_PARENT = frozenset((b".", b".."))
_PADDING = tuple(bytes(-length & 7) for length in range(8))
_ENTRY_NOTE = struct.Struct("<QII")
_INODE_NOTE = struct.Struct("<Qqq")
_STORE_NOTE = struct.Struct("<IiQQQI4x")  # the head of an answer, inode, offset, size

HEADER_SIZE = _REQUEST_HEADER.size
MAJOR, MINOR, MINOR_MIN = 7, 38, 31
MINOR_RESEND = 40  # from which on the kernel can hand out requests again (FUSE_NOTIFY_RESEND, Linux 6.9)
PAGE = 4096
_DIRECTORY = 4  # the type of a directory in a listing
LINE_MIN = _DIRENT_PLUS.size + 8  # bytes of the shortest line of a listing
FEW = 24  # lines that are made quicker without arrays
REQUEST_MIN = 8192  # the least room for a request that the kernel accepts: for names, not for the data of a WRITE
MAX_READ_PAGES = 256  # the most that the kernel asks for at once by default, 1 MiB


# The attributes of stat(2): inode, size (bytes), blocks (512 bytes), then the times of the last access,
# modification and change in whole seconds, and the nanoseconds of each, mode, links, uid, gid, device, block size
# (bytes), flags.
Attributes = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int, int, int, int]
CommonAttributes = tuple[int, int, int, int, int, int, int]  # from the mode on
_MODE = 9


class Request:
    """A message of the kernel with its header taken apart.

    `node` is an inode number, `pid` the number of the thread that asks. `body` has the bytes after the header: it
    lies in the memory in which the message was received, and is valid until the next request.
    """

    __slots__ = ("body", "gid", "node", "opcode", "pid", "uid", "unique")
    opcode: int
    unique: int
    node: int
    uid: int
    gid: int
    pid: int

    def __init__(self, message: memoryview) -> None:
        self.opcode, self.unique, self.node, self.uid, self.gid, self.pid = _REQUEST_HEADER.unpack_from(message)
        self.body = message[HEADER_SIZE:]

    @property
    def is_resent(self) -> bool:
        """True if the kernel has handed out this request before, to a worker that did not answer it."""
        return self.unique >> 63 != 0


def name_of(body: memoryview) -> bytes:
    """Return the name that ends a request."""
    return body.tobytes()[:-1]


def read_of(body: memoryview) -> tuple[int, int]:
    """Return offset and size (bytes) of a READ, READDIR or READDIRPLUS; of a listing the offset is a cursor."""
    _, offset, size = _READ_IN.unpack_from(body)
    return offset, size


def flags_of(body: memoryview) -> int:
    """Return the flags of open(2) of the descriptor that a READ, READDIR or READDIRPLUS comes from."""
    flags: int = _READ_FLAGS.unpack_from(body)[0]
    return flags


def number_of(body: memoryview) -> int:
    """Return the number of the request that an INTERRUPT ends."""
    number: int = _NUMBER.unpack_from(body)[0]
    return number


def lookups_of(body: memoryview) -> int:
    """Return by how much a FORGET lowers the lookup count."""
    return number_of(body)


def xattr_of(body: memoryview) -> tuple[int, bytes]:
    """Return the room of the caller in bytes (0: it asks for the size of the value), and the attribute's name."""
    return _XATTR_IN.unpack_from(body)[0], bytes(body[_XATTR_IN.size : -1])


# --- requests that change something ------------------------------------------------------------------------


_MODE_BIT, _UID, _GID, _SIZE, _ATIME_NOW, _MTIME_NOW = 1, 2, 4, 8, 128, 256
_ATIME, _MTIME = 16 | _ATIME_NOW, 32 | _MTIME_NOW
_SETATTR_DROP, _WRITE_DROP, _DATA_ONLY = 1 << 11, 1 << 2, 1


def change_of(body: memoryview, now_ns: int) -> tuple[list[int | None], bool]:
    """Return the change of a SETATTR, and True if it clears the setuid and setgid bits of the file.

    Mode, uid, gid, size (bytes), times of the last access and modification (ns since the epoch). None leaves a
    value unchanged.
    """
    valid, size, atime, mtime, atime_ns, mtime_ns, mode, uid, gid = _SETATTR_IN.unpack_from(body)
    atime_ns = now_ns if valid & _ATIME_NOW else atime * 10**9 + atime_ns
    mtime_ns = now_ns if valid & _MTIME_NOW else mtime * 10**9 + mtime_ns
    values = (_MODE_BIT, mode), (_UID, uid), (_GID, gid), (_SIZE, size), (_ATIME, atime_ns), (_MTIME, mtime_ns)
    return [value if valid & bits else None for bits, value in values], bool(valid & _SETATTR_DROP)


def write_of(body: memoryview) -> tuple[int, memoryview, bool]:
    """Return offset and data of a WRITE, and True if it clears the setuid and setgid bits of the file."""
    offset, size, flags = _WRITE_IN.unpack_from(body)
    return offset, body[_WRITE_IN.size : _WRITE_IN.size + size], bool(flags & _WRITE_DROP)


def mknod_of(body: memoryview) -> tuple[int, int, bytes]:
    """Return mode (with the umask applied), device number and name."""
    mode, device = _MKNOD_IN.unpack_from(body)
    return mode, device, bytes(body[_MKNOD_IN.size : -1])


def mkdir_of(body: memoryview) -> tuple[int, bytes]:
    """Return mode and name."""
    return _MKDIR_IN.unpack_from(body)[0], bytes(body[_MKDIR_IN.size : -1])


def symlink_of(body: memoryview) -> tuple[bytes, bytes]:
    """Return name and target."""
    name, target, _ = bytes(body).split(b"\0")
    return name, target


def link_of(body: memoryview) -> tuple[int, bytes]:
    """Return the inode that gets another name, and that name."""
    return _NUMBER.unpack_from(body)[0], bytes(body[_NUMBER.size : -1])


def rename_of(body: memoryview, flagged: bool) -> tuple[bytes, int, bytes, int]:
    """Return old name, inode of the new directory, new name, and (of a RENAME2) the flags of renameat2(2)."""
    start = _RENAME2_IN if flagged else _NUMBER
    parent, *flags = start.unpack_from(body)
    old, new, _ = bytes(body[start.size :]).split(b"\0")
    return old, parent, new, flags[0] if flags else 0


def data_only(body: memoryview) -> bool:
    """Return True if an FSYNC asks for the data only."""
    return bool(_FSYNC_IN.unpack_from(body)[0] & _DATA_ONLY)


def setxattr_of(body: memoryview) -> tuple[bytes, bytes, int]:
    """Return name, value and flags of setxattr(2)."""
    size, flags = _SETXATTR_IN.unpack_from(body)
    name, _, rest = bytes(body[_SETXATTR_IN.size :]).partition(b"\0")
    return name, rest[:size], flags


def forgets_of(body: memoryview) -> list[tuple[int, int]]:
    """Return the inodes of a BATCH_FORGET, each with the number by which its lookup count is lowered."""
    (count,) = _FORGETS_IN.unpack_from(body)
    start = _FORGETS_IN.size
    return [_FORGET_IN.unpack_from(body, start + number * _FORGET_IN.size) for number in range(count)]


# --- replies -----------------------------------------------------------------------------------------------


def header(unique: int, length: int, error: int = 0) -> bytes:
    """Return the header of a reply whose body has this many bytes; `error` is an errno."""
    return _ANSWER.pack(_ANSWER.size + length, -error, unique)


def entry(timeout: int, attributes_timeout: int, attributes: Attributes) -> bytes:
    """Reply to LOOKUP; timeouts in seconds."""
    return _ENTRY_OUT.pack(attributes[0], 0, timeout, attributes_timeout, 0, 0, *attributes)


def no_entry(timeout: int) -> bytes:
    """Reply to LOOKUP: there is no such name, and the kernel may cache that for `timeout` seconds."""
    return _ENTRY_OUT.pack(0, 0, timeout, *(0,) * 19)


def attributes(timeout: int, of: Attributes) -> bytes:
    """Reply to GETATTR; timeout in seconds."""
    return _ATTRIBUTES_OUT.pack(timeout, 0, 0, *of)


def opendir_reply(*, caches: bool = False) -> bytes:
    """Return the reply to OPENDIR; `caches`: the kernel may cache the listing, and keep the one it has."""
    return _OPEN_OUT.pack(0, _KEEP_CACHE | _CACHE_DIR if caches else 0, 0)


def statfs(
    blocks: int,
    files: int,
    block_size: int,
    fragment: int,
    name_max: int,
    free: tuple[int, int, int] = (0, 0, 0),
) -> bytes:
    """Reply to STATFS; `blocks` of `fragment` bytes. `free`: blocks, blocks for users but root, inodes."""
    blocks_free, available, files_free = free
    return _STATFS_OUT.pack(blocks, blocks_free, available, files, files_free, block_size, name_max, fragment)


def size_reply(size: int) -> bytes:
    """Reply to WRITE with the bytes written; to GETXATTR or LISTXATTR without room with the bytes of the value."""
    return _SIZE_OUT.pack(size, 0)


def line(name: bytes, cursor: int, inode: int, mode: int) -> bytes:
    """Return a line of the reply to READDIR; the listing continues after it at `cursor`."""
    length = len(name)
    return _DIRENT.pack(inode, cursor, length, mode >> 12) + name + _PADDING[length & 7]


def line_plus(
    name: bytes,
    cursor: int,
    timeout: int,
    attributes_timeout: int,
    attributes: Attributes,
    *,
    is_lookup: bool = True,
) -> bytes:
    """Return a line of the reply to READDIRPLUS; timeouts in seconds. With `is_lookup` it counts as a lookup."""
    # The kernel does not count these two as lookups, and so would never forget them.
    node = 0 if name in _SELF_AND_PARENT or not is_lookup else attributes[0]
    start = _ENTRY_OUT.pack(node, 0, timeout, attributes_timeout, 0, 0, *attributes)
    return start + line(name, cursor, attributes[0], attributes[_MODE])


def self_and_parent(inode: int, parent: int) -> bytes:
    """Return the lines of `.` and `..`, with the cursors 1 and 2, without attributes: the kernel ignores these."""
    return _DOTS.pack(inode, 1, 1, _DIRECTORY, b".", parent, 2, 2, _DIRECTORY, b"..")


_RUN = np.dtype(
    [(name, "<u8") for name in ("node", "generation", "entry_valid", "attributes_valid", "entry_valid_ns")]
    + [(name, "<u8") for name in ("inode", "size", "blocks")]
    + [(name, "<i8") for name in ("atime", "mtime", "ctime")]
    + [(name, "<u4") for name in ("atime_ns", "mtime_ns", "ctime_ns", "mode", "links", "uid", "gid", "device")]
    + [(name, "<u4") for name in ("block_size", "flags")]
    + [(name, "<u8") for name in ("same_inode", "cursor")]
    + [(name, "<u4") for name in ("length", "type")]
)


def lines_plus(run: ListingRun, common: CommonAttributes, timeout: int, room: int) -> bytes:
    """Return the lines of `line_plus` for a run, joined, as many as fit into `room` bytes; timeout in seconds."""
    names = run.names
    if len(names) <= FEW:
        return _few_lines_plus(run, common, timeout, room)
    sizes, mtimes_ns = np.asarray(run.sizes), np.asarray(run.mtimes_ns)
    lengths = np.fromiter(map(len, names), np.int64, len(names))
    ends = np.cumsum(_RUN.itemsize + (lengths + 7 & ~7))
    count = int(np.searchsorted(ends, room, "right"))
    if not count:
        return b""
    lengths, ends, numbers = lengths[:count], ends[:count], np.arange(count)
    rows = np.zeros(count, _RUN)
    rows["node"] = rows["inode"] = rows["same_inode"] = run.inode + numbers
    rows["cursor"] = run.cursor + numbers
    rows["entry_valid"] = rows["attributes_valid"] = timeout
    rows["size"], rows["length"] = sizes[:count], lengths
    rows["blocks"] = (rows["size"] + 511) // 512
    seconds, ns = np.divmod(mtimes_ns[:count], 10**9)
    for time in ("atime", "mtime", "ctime"):
        rows[time], rows[time + "_ns"] = seconds, ns
    mode, links, uid, gid, device, block_size, _ = common
    rows["mode"], rows["links"], rows["uid"], rows["gid"], rows["device"] = mode, links, uid, gid, device
    rows["block_size"], rows["type"] = block_size, mode >> 12
    # All sizes here are multiples of 8 bytes, so whole words are copied: first all rows, then all names.
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


def _few_lines_plus(run: ListingRun, common: CommonAttributes, timeout: int, room: int) -> bytes:
    """Return what `lines_plus` does, without arrays."""
    pack, lines, inode, cursor = _DIRENT_PLUS.pack, b"", run.inode, run.cursor
    mode, links, uid, gid, device, block_size, flags = common
    # A narrow number of NumPy would overflow.
    for name, size, mtime_ns in zip(run.names, map(int, run.sizes), map(int, run.mtimes_ns), strict=True):
        length, (s, ns) = len(name), divmod(mtime_ns, 10**9)
        # Numbers in place, because unpacked tuples take half as long again.
        # fmt: off
        text = pack(
            inode, 0, timeout, timeout, 0, 0,
            inode, size, (size + 511) // 512, s, s, s, ns, ns, ns,
            mode, links, uid, gid, device, block_size, flags,
            inode, cursor, length, mode >> 12,
        ) + name + _PADDING[length & 7]
        # fmt: on
        if len(lines) + len(text) > room:
            break
        lines += text
        inode, cursor = inode + 1, cursor + 1
    return lines


# --- the start of a session --------------------------------------------------------------------------------


class Kernel(NamedTuple):
    """The kernel's side of INIT: protocol version, flags, maximum readahead (bytes)."""

    minor: int
    flags: int
    readahead: int


def kernel_of(body: memoryview) -> Kernel:
    """Return the kernel's side of INIT. Raises ValueError for a protocol that is too old."""
    major, minor, readahead, flags = _INIT_IN.unpack_from(body)
    if major != MAJOR or minor < MINOR_MIN:
        raise ValueError(f"the kernel speaks FUSE {major}.{minor}; {MAJOR}.{MINOR_MIN} (Linux 5.4) is needed")
    if flags & INIT_EXT:
        flags |= int.from_bytes(body[_INIT_IN.size : _INIT_IN.size + 4], "little") << 32
    return Kernel(minor, flags, readahead)


def init_reply(kernel: Kernel, flags: int, background: int, max_write: int = PAGE) -> bytes:
    """Reply to INIT: the flags that the kernel knows, readahead requests at a time, the largest WRITE (bytes)."""
    flags = flags & kernel.flags
    return _INIT_OUT.pack(
        *(MAJOR, min(kernel.minor, MINOR), kernel.readahead, flags & 0xFFFFFFFF),
        *(background, background * 3 // 4, max_write, 1, MAX_READ_PAGES, 0, flags >> 32),
    )


# --- notifications -----------------------------------------------------------------------------------------


def resend() -> bytes:
    """Send all requests again that a worker received and did not answer (Linux 6.9)."""
    return header(0, 0, -_RESEND)


def forget_all() -> bytes:
    """Invalidate all cached names (Linux 6.16)."""
    return header(0, 0, -_INC_EPOCH)


def forget_entry(parent: int, name: bytes) -> bytes:
    """Invalidate this name and all below it."""
    body = _ENTRY_NOTE.pack(parent, len(name), 0) + name + b"\0"
    return header(0, len(body), -_INVAL_ENTRY) + body


def store(inode: int, offset: int, size: int) -> bytes:
    """Put the `size` bytes that follow into the page cache of a file, from `offset` on.

    The kernel refuses that with ENOENT for an inode that it does not know, and waits for pages that are locked by
    a READ. Bytes beyond the size of the file would let it grow.
    """
    return _STORE_NOTE.pack(_STORE_NOTE.size + size, _STORE, 0, inode, offset, size)


def notes_of(data: bytes) -> list[bytes]:
    """Split notifications that were joined."""
    forgets, at = [], 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        forgets.append(data[at : at + length])
        at += length
    return forgets


def forget_attributes(inode: int) -> bytes:
    """Invalidate the attributes of an inode."""
    return _inode_note(inode, -1)


def forget_content(inode: int) -> bytes:
    """Invalidate the attributes and the content of an inode."""
    return _inode_note(inode, 0)


def _inode_note(inode: int, offset: int) -> bytes:
    """Invalidate the attributes, and the content from `offset` (bytes) on; a negative one keeps the content."""
    return header(0, _INODE_NOTE.size, -_INVAL_INODE) + _INODE_NOTE.pack(inode, offset, 0)
