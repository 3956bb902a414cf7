"""The interface of a tree: the questions that every tree answers, and the types of the answers.

A tree decides which names exist and under which inode numbers. Five classes are trees: `shard_tree.ShardTree`,
`merged_tree.MergedTree`, `numbered_tree.NumberedTree`, `overlay.writable_tree.WritableTree` and
`mount.hidden_directory.HiddenDirectory`. None of them has to inherit from another one or from these protocols:
mypy checks them where they are used.

| protocol | what it adds | users |
|---|---|---|
| `Tree` | names, attributes, listings | `fuse/read_ops.py`; all five answer |
| `MountedTree` | start and end | `mount/fuse_session.py`, a worker; all but the hidden directory |
| `LowerTree` | content, places, the view | overlay, commit, commands; the three that only show shards |
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from wdsfs.index.record import BY_EXTENSION, BY_NAME, FILES
from wdsfs.inodes import ROOT
from wdsfs.tree.content import Content
from wdsfs.tree.shard_set import ShardSet

SAMPLES_LAYOUT, CLASSES_LAYOUT = "samples", "classes"
EXTENSION_NAMES, FULL_NAMES = "ext", "full"

# Cursors of a listing: 0 is before everything, then come these two, then the children by position.
AT_SELF, AT_PARENT = 1, 2

DIRECTORY_MODE = stat.S_IFDIR | 0o555
XATTR = b"user.wdsfs."


@dataclass(frozen=True, slots=True)
class View:
    """The way in which a set is shown.

    `layout` is samples, files or classes. `names`, of the files in a sample, is ext or full. `merge` asks for one
    tree over all shards, `index_tree` for a link to each sample by its number. The class layout shows files of
    records whose folders are the classes (`tree/view_record.py`). With `partial`, a merged tree can be listed
    although a shard cannot be read.
    """

    layout: str = SAMPLES_LAYOUT
    names: str = EXTENSION_NAMES
    merge: bool = False
    index_tree: bool = False
    partial: bool = False

    @property
    def merged(self) -> bool:
        """True for one tree over all shards, as classes are shown: any shard may have samples of a class."""
        return self.merge or self.layout == CLASSES_LAYOUT

    @property
    def domain(self) -> int:
        """The domain of names in a record that is shown (`index/record.py`)."""
        if self.layout != SAMPLES_LAYOUT:
            return FILES
        return BY_NAME if self.names == FULL_NAMES else BY_EXTENSION


class Node(NamedTuple):
    """Attributes: inode number, type and permission bits, link count, size (bytes), mtime (ns since the epoch).

    `upper` has the attributes of the file in the upper of an overlay: owner, further times and so on.
    """

    inode: int
    mode: int
    links: int
    size: int
    mtime_ns: int
    upper: os.stat_result | None = None


class Entry(NamedTuple):
    """One line of a listing; the listing continues after it at `cursor`."""

    name: bytes
    node: Node
    cursor: int


class ListingRun(NamedTuple):
    """Neighbours of one kind in a listing.

    Inode numbers and cursors count up from those of the first; sizes (bytes) and mtimes (ns) are columns. `parent`
    is the inode number of the parent directory if `.` and `..` come before them, else 0.
    """

    names: list[bytes]
    inode: int
    cursor: int
    mode: int
    links: int
    sizes: Sequence[int] | NDArray[Any]
    mtimes_ns: Sequence[int] | NDArray[np.int64]
    parent: int = 0


class Totals(NamedTuple):
    """Totals over a set, or over its part that is indexed."""

    shards: int
    indexed: int
    samples: int
    members: int
    bytes: int
    damaged: int


class Tree(Protocol):
    """Names, attributes and listings, as the kernel asks for them.

    Every method may raise NotIndexed when a shard has to be indexed first, StaleShard or StaleEntry for an inode
    number of something that has changed, and other ShardErrors.
    """

    merged: bool  # True if a directory shows names of several shards, and so changes with any of them
    lower: ShardSet  # the shards that this is a tree of

    def lookup(self, parent: int, name: bytes) -> Node:
        """Return the child `name` of a directory. Raises NoSuchEntry, NotADirectory."""

    def getattr(self, inode: int) -> Node:
        """Return the attributes of an inode."""

    def readlink(self, inode: int) -> bytes:
        """Return the target of a symbolic link. Raises NoSuchEntry or InvalidRequest for anything else."""

    def parent(self, inode: int) -> int:
        """Return the inode of the directory that holds this directory; the top holds itself."""

    def listing(self, inode: int, after: int = 0) -> Iterator[Entry]:
        """Return the children of a directory after the cursor `after`, `.` and `..` first. Raises NotADirectory.

        Exhaust or drop the iterator before any other call.
        """

    def xattrs(self, inode: int) -> list[bytes]:
        """Return the names of the extended attributes of an inode."""

    def getxattr(self, inode: int, name: bytes) -> bytes:
        """Return the value of an extended attribute. Raises NoSuchAttribute."""

    def totals(self) -> Totals:
        """Return sums over the set, for `df` and `status`. Invalidates all records in use."""


class MountedTree(Tree, Protocol):
    """A tree that a worker serves as a mount."""

    def prepare(self) -> None:
        """Do in advance, once, what the first request would have to wait for."""

    def close(self, clean: bool) -> None:
        """Close everything; `clean` is True if the mount has ended."""


class LowerTree(MountedTree, Protocol):
    """A tree that shows only shards: the lower of an overlay, and the tree that commands list and compare."""

    view: View
    domain: int  # which names the files of a sample have (`index.record`: FILES, BY_NAME, BY_EXTENSION)
    files_layout: bool  # True if members are shown by their paths, without directories of samples
    directory_mode: int  # type and permission bits of directories
    file_mode: int  # and of files

    def make_writable(self, umask: int = 0) -> None:
        """Show modes with which the owner may write; `umask` is applied here, so copied-up files have it, too."""

    def resolve(self, path: bytes) -> Node:
        """Return the node at a path below the top, for callers without a kernel."""

    def open_directory(self, inode: int) -> None:
        """Raise NotADirectory, or what a listing would raise."""

    def run(self, inode: int, after: int, most: int) -> ListingRun | None:
        """Return up to `most` lines of `listing` in columns if the children are all of one kind; else None."""

    def content(self, inode: int) -> Content:
        """Return the place of the bytes of a file. Raises IsADirectory."""

    def places(self, inode: int) -> list[tuple[int, bytes]]:
        """Return every name of an inode except the top: the inode of the directory, and the name in it."""


def resolve(tree: Tree, path: bytes) -> Node:
    """Return the node at a path below the top of a tree."""
    node = tree.getattr(ROOT)
    for name in path.split(b"/"):
        if name not in (b"", b"."):
            node = tree.lookup(node.inode, name)
    return node


def own_entries(tree: Tree, inode: int, after: int) -> Iterator[Entry]:
    """Yield `.` and `..` of a directory, if they come after the cursor."""
    if after < AT_SELF:
        yield Entry(b".", tree.getattr(inode), AT_SELF)
    if after < AT_PARENT:
        yield Entry(b"..", tree.getattr(tree.parent(inode)), AT_PARENT)


def folder_path(tree: LowerTree, inode: int) -> bytes:
    """Return the path of a directory below the top of a tree, with a slash at its end; empty for the top."""
    steps: list[bytes] = []
    while inode != ROOT:
        inode, name = tree.places(inode)[0]
        steps.append(name + b"/")
    return b"".join(reversed(steps))
