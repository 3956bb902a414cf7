"""The format of the upper: the directory of changes of a writable mount, laid out as in the kernel's overlayfs.

A file is itself, a *whiteout* says that a name of the lower is gone, and an *opaque* directory shows nothing of
the lower::

    whiteout   a character device 0:0; or, where none can be made, an empty file with the attribute
               user.overlay.whiteout in a directory with user.overlay.opaque = "x"
    opaque     the attribute user.overlay.opaque = "y"

    merged     the attribute user.overlay.origin, also an empty one: the kernel then looks for whiteouts in this
               directory where the lower has none (any more); FUSE mounts do so anyway

Two attributes belong to wdsfs. `user.wdsfs.origin` = "<inode>:<sum>" keeps the inode number that a file (or a
renamed sample) has in the lower, as long as its shard's fingerprint has that sum (hexadecimal). `user.wdsfs.mode`
= the permission bits to show, in octal, where the bits on disk have to be wider for a daemon that is not root.

`load_names` reads the names into memory, as a tree of `UpperNode`s. Names are looked up there; a name without a
node is that of the lower. Attributes and content stay on disk.

This module knows no FUSE, no shards and no lower: `overlay/writable_tree.py` decides what is copied up or hidden.
The files beside the upper are in `overlay/overlay_directory.py`. One thread at a time.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from wdsfs.errors import OverlayUnusable
from wdsfs.inodes import ROOT, UP

FILE, DIRECTORY, SYMLINK, WHITEOUT, OTHER = range(5)

# Attributes of the format; all others in the namespace "user." belong to users.
RESERVED_ATTRIBUTES = (b"user.overlay.", b"trusted.overlay.", b"user.wdsfs.")
OPAQUE, WHITED_OUT = "user.overlay.opaque", "user.overlay.whiteout"
MERGED = "user.overlay.origin"
ORIGIN, MODE = "user.wdsfs.origin", "user.wdsfs.mode"

# Marks of an overlayfs that was mounted by hand, without which its upper cannot be understood.
_FOREIGN_MARKS = {
    *(f"{space}.overlay.{mark}" for space in ("user", "trusted") for mark in ("redirect", "metacopy")),
    *("trusted.overlay.opaque", "trusted.overlay.whiteout"),
}

ORPHANAGE = 0  # the inode number of the directory work/orphans, in memory

OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Origin(NamedTuple):
    """The inode number of the original in the lower, and the sum of its shard's fingerprint at that time."""

    inode: int
    sum: int


@dataclass(eq=False, repr=False, slots=True)
class UpperNode:
    """A node of the upper: a file, a directory, a symbolic link, a whiteout, or another kind (fifo ...).

    A file with several names in the upper is one node. `inode` is the number that the mount shows: as loaded it is
    the node's `own`, UP | st_ino; `overlaid_tree.NodeTable` sets that of the origin. `lower` is the number of the
    lower's directory that shows through (0: none, or not known since its shard cannot be read: `is_unread`);
    `NodeTable` sets both, too.
    """

    kind: int
    inode: int
    parent: UpperNode | None  # of one of its names; None for the top, a whiteout and a removed node
    name: bytes
    more: list[Place] | None = None  # its other names
    opaque: bool = False
    merged: bool = False  # a directory with the attribute of that name
    origin: Origin | None = None
    lower: int = 0
    is_unread: bool = False
    mode: int = -1  # permission bits to show; -1: those on disk
    dirty: bool = True  # not known to be on disk: a directory's names, a file's bytes
    known: int | None = None  # lookup count of the kernel; None: not known
    own: int = field(init=False)
    children: dict[bytes, UpperNode] = field(init=False)

    def __post_init__(self) -> None:
        self.own = self.inode
        self.children = {} if self.kind == DIRECTORY else _NO_CHILDREN

    @property
    def is_orphan(self) -> bool:
        """True for a node in work/orphans, which has lost its last name."""
        return self.parent is not None and self.parent.inode == ORPHANAGE

    @property
    def may_show_lower(self) -> bool:
        """True for a directory through which the lower shows, or may show once its shard can be read."""
        return bool(self.lower) or self.is_unread

    def enter(self, name: bytes, node: UpperNode) -> None:
        """Enter a name of a node into this directory."""
        self.children[name] = node
        self.dirty = True

    def places(self) -> list[Place]:
        """Return all its names: the directory and the name in it."""
        first = [] if self.parent is None else [(self.parent, self.name)]
        return first + (self.more or [])

    def chain(self) -> list[UpperNode]:
        """Return this node and the directories above it, the top last."""
        chain: list[UpperNode] = []
        node: UpperNode | None = self
        while node is not None:
            chain.append(node)
            node = node.parent
        return chain

    def path(self) -> bytes:
        """Return its path below the upper, without a slash in front; empty for the top."""
        return b"/".join(node.name for node in reversed(self.chain()[:-1]))

    def walk(self) -> Iterator[tuple[UpperNode, bytes, UpperNode]]:
        """Yield all nodes below as (directory, name, node), a directory before its children."""
        waiting = [self]
        while waiting:
            directory = waiting.pop()
            for name, node in directory.children.items():
                yield directory, name, node
                if node.kind == DIRECTORY:
                    waiting.append(node)

    def contents(self) -> Iterator[bytes]:
        """Yield the paths of everything below but directories and whiteouts."""
        waiting = [(self, b"")]
        while waiting:
            directory, path = waiting.pop()
            for name, node in directory.children.items():
                if node.kind == DIRECTORY:
                    waiting.append((node, path + name + b"/"))
                elif node.kind != WHITEOUT:
                    yield path + name


Place = tuple[UpperNode, bytes]  # a directory, and a name in it

_NO_CHILDREN: dict[bytes, UpperNode] = {}  # shared by all nodes that are not directories; stays empty
THE_WHITEOUT = UpperNode(WHITEOUT, 0, None, b"")  # shared by all names: whiteouts do not differ


def empty() -> UpperNode:
    """Return the top of an empty upper."""
    return UpperNode(DIRECTORY, ROOT, None, b"")


def open_below(directory: int, path: bytes, flags: int = os.O_RDONLY) -> int:
    """Open a path below a directory step by step: it may be longer than PATH_MAX. Raises OSErrors."""
    *way, name = path.split(b"/")
    fd = os.dup(directory)
    try:
        for step in way:
            above, fd = fd, os.open(step, OPEN_DIRECTORY, dir_fd=fd)
            os.close(above)
        return os.open(name or b".", flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=fd)
    finally:
        os.close(fd)


def load_names(directory: int) -> UpperNode:
    """Return the names in the upper that this descriptor is of; read-only.

    Raises OverlayUnusable for attributes that wdsfs does not understand, and OSErrors.
    """
    return _Loader(directory).load()


class _Loader:
    """Reads the names of an upper, each directory before those in it."""

    def __init__(self, directory: int) -> None:
        self.directory = directory
        self.device = os.fstat(directory).st_dev
        self.linked: dict[int, UpperNode] = {}

    def load(self) -> UpperNode:
        top = empty()
        waiting = [top]
        while waiting:
            node = waiting.pop()
            fd = open_below(self.directory, node.path(), OPEN_DIRECTORY)
            try:
                self._read_directory(node, fd)
                waiting += self._scan(node, fd)
            finally:
                os.close(fd)
        return top

    def _scan(self, parent: UpperNode, fd: int) -> list[UpperNode]:
        """Read the names of a directory; returns the directories among them."""
        directories = []
        prefix = b"/proc/self/fd/%d/" % fd
        with os.scandir(fd) as entries:
            for entry in entries:
                name = os.fsencode(entry.name)
                node = self._node(parent, name, entry.stat(follow_symlinks=False), prefix + name)
                parent.children[name] = node
                if node.kind == DIRECTORY:
                    directories.append(node)
        return directories

    def _node(self, parent: UpperNode, name: bytes, status: os.stat_result, path: bytes) -> UpperNode:
        if status.st_dev != self.device:
            raise OverlayUnusable(f"{os.fsdecode(name)!r} in the overlay is on another file system")
        kind = _kind_of(status)
        if kind == WHITEOUT:
            return THE_WHITEOUT
        if status.st_nlink > 1 and kind != DIRECTORY and status.st_ino in self.linked:
            node = self.linked[status.st_ino]
            node.more = [*(node.more or []), (parent, name)]
            return node
        node = UpperNode(kind, status.st_ino | UP, parent, name)
        if kind == FILE:
            attributes = os.listxattr(path, follow_symlinks=False)
            if attributes and self._read_file(node, path, attributes, not status.st_size):
                return THE_WHITEOUT
        if status.st_nlink > 1 and kind != DIRECTORY:
            self.linked[status.st_ino] = node
        return node

    def _read_file(self, node: UpperNode, path: bytes, attributes: list[str], empty: bool) -> bool:
        """Read a file's attributes into its node; returns True if it is a whiteout."""
        self._refuse_foreign(node, attributes)
        if empty and WHITED_OUT in attributes:
            return True
        _read_ours(node, path, attributes)
        return False

    def _read_directory(self, node: UpperNode, fd: int) -> None:
        attributes = os.listxattr(fd)
        if attributes:
            self._refuse_foreign(node, attributes)
            node.opaque = OPAQUE in attributes and os.getxattr(fd, OPAQUE) == b"y"
            node.merged = MERGED in attributes
            _read_ours(node, fd, attributes)

    def _refuse_foreign(self, node: UpperNode, attributes: list[str]) -> None:
        for name in _FOREIGN_MARKS.intersection(attributes):
            raise OverlayUnusable(
                f"{os.fsdecode(node.path())!r} in the overlay has the attribute {name} of an overlayfs that was "
                "mounted by hand; remove what it wrote, and make the change in a mount of wdsfs"
            )


def _kind_of(status: os.stat_result) -> int:
    """Return the kind of a file by its status alone: a whiteout that is an empty file counts as a file."""
    form = stat.S_IFMT(status.st_mode)
    if form == stat.S_IFREG:
        return FILE
    if form == stat.S_IFDIR:
        return DIRECTORY
    if form == stat.S_IFLNK:
        return SYMLINK
    return WHITEOUT if form == stat.S_IFCHR and status.st_rdev == 0 else OTHER


def _read_ours(node: UpperNode, where: bytes | int, attributes: list[str]) -> None:
    if ORIGIN in attributes:
        node.origin = parse_origin(os.getxattr(where, ORIGIN))
    if MODE in attributes:
        try:
            node.mode = int(os.getxattr(where, MODE), 8) & 0o7777
        except ValueError:
            node.mode = -1


def parse_origin(value: bytes) -> Origin | None:
    """Return the origin in the attribute of a copy; None if it is none."""
    inode, _, checksum = value.partition(b":")
    try:
        return Origin(int(inode), int(checksum, 16))
    except ValueError:
        return None  # only an inode number is lost: the file gets another one
