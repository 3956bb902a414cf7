"""The kernel's end of the FUSE protocol for tests: requests put together, answers taken apart.

Written down from include/uapi/linux/fuse.h a second time, without a look at `wdsfs.fuse.protocol`: what is wrong
in one of the two shows.
"""

from __future__ import annotations

import collections
import re
import struct
from typing import Any, NamedTuple

OPCODES = {
    name: int(number)
    for name, number in re.findall(
        r"(\w+)=(\d+)",
        """
        LOOKUP=1 FORGET=2 GETATTR=3 SETATTR=4 READLINK=5 SYMLINK=6 MKNOD=8 MKDIR=9 UNLINK=10 RMDIR=11 RENAME=12
        LINK=13 OPEN=14 READ=15 WRITE=16 STATFS=17 RELEASE=18 FSYNC=20 SETXATTR=21 GETXATTR=22 LISTXATTR=23
        REMOVEXATTR=24 FLUSH=25 INIT=26 OPENDIR=27 READDIR=28 RELEASEDIR=29 FSYNCDIR=30 GETLK=31 SETLK=32
        SETLKW=33 ACCESS=34 CREATE=35 INTERRUPT=36 BMAP=37 DESTROY=38 IOCTL=39 POLL=40 NOTIFY_REPLY=41
        BATCH_FORGET=42 FALLOCATE=43 READDIRPLUS=44 RENAME2=45 LSEEK=46 COPY_FILE_RANGE=47 SETUPMAPPING=48
        REMOVEMAPPING=49 SYNCFS=50 TMPFILE=51 STATX=52
        """,
    )
}


class Layout:
    """A struct of fuse.h: `name:code` for each field, with the codes of `struct`."""

    def __init__(self, fields: str) -> None:
        names, codes = zip(*(field.split(":") for field in fields.split()), strict=True)
        self.struct = struct.Struct("<" + "".join(codes))
        self.size = self.struct.size
        self._made: Any = collections.namedtuple("Fields", names)

    def unpack(self, data: bytes, offset: int = 0) -> Any:
        return self._made(*self.struct.unpack_from(data, offset))

    def whole(self, data: bytes) -> Any:
        """Unpack what must be exactly this long."""
        return self._made(*self.struct.unpack(data))

    def pack(self, *values: int, **named: int) -> bytes:
        if named:
            values = self._made(**{name: named.get(name, 0) for name in self._made._fields})
        return self.struct.pack(*values)


_ATTR = (
    "ino:Q size:Q blocks:Q atime:Q mtime:Q ctime:Q atimensec:I mtimensec:I ctimensec:I "
    "mode:I nlink:I uid:I gid:I rdev:I blksize:I flags:I"
)
_ENTRY = "nodeid:Q generation:Q entry_valid:Q attr_valid:Q entry_valid_nsec:I attr_valid_nsec:I "
_INIT = "major:I minor:I max_readahead:I flags:I "

IN_HEADER = Layout("len:I opcode:I unique:Q nodeid:Q uid:I gid:I pid:I total_extlen:H padding:H")
OUT_HEADER = Layout("len:I error:i unique:Q")
ENTRY_OUT = Layout(_ENTRY + _ATTR)
ATTR_OUT = Layout("attr_valid:Q attr_valid_nsec:I dummy:I " + _ATTR)
OPEN_OUT = Layout("fh:Q open_flags:I padding:I")
READ_IN = Layout("fh:Q offset:Q size:I read_flags:I lock_owner:Q flags:I padding:I")
WRITE_IN = Layout("fh:Q offset:Q size:I write_flags:I lock_owner:Q flags:I padding:I")
KSTATFS = Layout(
    "blocks:Q bfree:Q bavail:Q files:Q ffree:Q bsize:I namelen:I frsize:I padding:I "
    "spare0:I spare1:I spare2:I spare3:I spare4:I spare5:I"
)
GETXATTR_IN = GETXATTR_OUT = Layout("size:I padding:I")
FORGET_IN = Layout("nlookup:Q")
BATCH_FORGET_IN = Layout("count:I dummy:I")
FORGET_ONE = Layout("nodeid:Q nlookup:Q")
INTERRUPT_IN = Layout("unique:Q")
INIT_IN = Layout(_INIT + "flags2:I " + " ".join(f"unused{n}:I" for n in range(11)))
INIT_OUT = Layout(
    _INIT + "max_background:H congestion_threshold:H max_write:I time_gran:I max_pages:H map_alignment:H flags2:I "
    "max_stack_depth:I request_timeout:H " + " ".join(f"unused{n}:H" for n in range(11))
)
INVAL_ENTRY = Layout("parent:Q namelen:I flags:I")
DIRENT = Layout("ino:Q off:Q namelen:I type:I")


def message(opcode: str | int, node: int, body: bytes = b"", unique: int = 5) -> bytes:
    """A request as a read of the FUSE descriptor gives it."""
    number = OPCODES[opcode] if isinstance(opcode, str) else opcode
    return IN_HEADER.pack(IN_HEADER.size + len(body), number, unique, node, 1000, 1000, 4711, 0, 0) + body


def lookup(parent: int, name: bytes) -> bytes:
    return message("LOOKUP", parent, name + b"\0")


def getattr(node: int) -> bytes:
    return message("GETATTR", node, bytes(16))


def read(node: int, offset: int, size: int, opcode: str = "READ") -> bytes:
    return message(opcode, node, READ_IN.pack(0, offset, size, 0, 0, 0, 0))


def getxattr(node: int, name: bytes, room: int) -> bytes:
    return message("GETXATTR", node, GETXATTR_IN.pack(room, 0) + name + b"\0")


def listxattr(node: int, room: int) -> bytes:
    return message("LISTXATTR", node, GETXATTR_IN.pack(room, 0))


class Line(NamedTuple):
    """A line of a listing; `entry` is what READDIRPLUS says besides."""

    name: bytes
    inode: int
    cursor: int
    type: int
    entry: Any = None


def lines(listing: bytes, plus: bool = False) -> list[Line]:
    """The lines of an answer to READDIR or READDIRPLUS; every byte of it must belong to one."""
    found = []
    at = 0
    while at < len(listing):
        assert at % 8 == 0
        entry = ENTRY_OUT.unpack(listing, at) if plus else None
        at += ENTRY_OUT.size if plus else 0
        head = DIRENT.unpack(listing, at)
        at += DIRENT.size
        name = listing[at : at + head.namelen]
        end = at + (head.namelen + 7) // 8 * 8
        assert listing[at + head.namelen : end] == bytes(end - at - head.namelen)
        found.append(Line(name, head.ino, head.off, head.type, entry))
        at = end
    assert at == len(listing)
    return found
