"""Copy-up: a file or directory of the lower is copied to the upper, with its inode number, before it is changed.

A file is copied up with all its names, or not at all; a directory together with its parents.
`overlay/writable_tree.py` decides when that is needed.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator

from wdsfs.errors import InvalidRequest, NameTooLong, NoSuchEntry, NotADirectory
from wdsfs.names import NAME_MAX, text_of
from wdsfs.overlay.overlaid_tree import Child, OverlaidTree
from wdsfs.overlay.upper_files import Attributes
from wdsfs.overlay.upper_format import DIRECTORY, UpperNode
from wdsfs.tree import content as content_module
from wdsfs.tree.tree import Node

COPIED_AT_ONCE = 1 << 20  # bytes that are copied up at a time


class CopyUp:
    """Files and directories of the upper by inode number or name, copied up if only the lower has them.

    `owner` (uid, gid) owns the files of the lower.
    """

    def __init__(self, overlaid: OverlaidTree, owner: tuple[int, int] | None) -> None:
        self.overlaid = overlaid
        self.tree = overlaid.tree
        self.upper = overlaid.upper
        self.nodes = overlaid.nodes
        self.order = overlaid.order
        self._owner = owner

    def anything(self, inode: int) -> UpperNode:
        """Return the node of an inode in the upper, copied up if necessary."""
        node = self.nodes.by_inode.get(inode)
        return self.copy_up(inode) if node is None else node

    def directory(self, inode: int) -> UpperNode:
        """Return a directory in the upper, made if the lower has it.

        Raises NoSuchEntry when it has been removed.
        """
        node = self.nodes.by_inode.get(inode)
        if node is None:
            node = self._copy_up_way(inode)
        if node.kind != DIRECTORY:
            raise NotADirectory(f"inode {inode} is a file")
        if node.is_orphan:
            raise NoSuchEntry(f"the directory {inode} has been removed")
        return node

    def _copy_up_way(self, inode: int) -> UpperNode:
        """Make a directory of the lower, and its parents, in the upper."""
        way: list[tuple[Node, bytes]] = []
        at = inode
        while at not in self.nodes.by_inode:
            original = self.tree.getattr(at)
            if not stat.S_ISDIR(original.mode):
                raise NotADirectory(f"inode {at} is a file")
            parent, name = self.tree.places(at)[0]
            way.append((original, name))
            at = parent
        node = self.nodes.by_inode[at]
        if node.lower != at or way[-1][1] in node.children:
            raise NoSuchEntry(f"the directory {inode} has been removed")
        for original, name in reversed(way):
            attributes = self._attributes(original)
            made = self.upper.changes.copy_up_directory(node, name, attributes)
            made.lower = made.inode = original.inode
            self.nodes.by_inode[original.inode] = made
            node = made
        return node

    def _attributes(self, original: Node) -> Attributes:
        """Return the attributes of a copy."""
        return Attributes(stat.S_IMODE(original.mode), self._owner, (original.mtime_ns, original.mtime_ns))

    def copy_up(self, inode: int, size: int | None = None) -> UpperNode:
        """Copy a node of the lower to the upper; of a file the first `size` bytes, or all.

        All its names are copied up, or none: a file that has lost them is made an orphan.
        """
        original = self.tree.getattr(inode)
        if stat.S_ISDIR(original.mode):
            return self.directory(inode)
        shown = [(parent, name) for parent, name in self.tree.places(inode) if self.nodes.is_shown(parent, name)]
        parent, name = (self.directory(shown[0][0]), shown[0][1]) if shown else (None, b"%x" % inode)
        where = self.upper.orphans.top if parent is None else parent
        attributes = self._attributes(original)
        if size not in (None, original.size):
            attributes = attributes._replace(times=(original.mtime_ns, None))  # its content changes
        if stat.S_ISLNK(original.mode):
            # A symbolic link cannot have the attribute that keeps its number: the next worker gives it another
            # one.
            node = self.upper.changes.copy_up_symlink(where, name, attributes, self.tree.readlink(inode))
        else:
            chunks = self._chunks(inode, original.size if size is None else min(size, original.size))
            node = self.upper.changes.copy_up(where, name, attributes, chunks, self.nodes.origin(inode), size)
        node.inode = inode
        self.nodes.by_inode[inode] = node
        if parent is not None:
            self.order.entered(parent, name)
        for holder, another in shown[1:]:
            self._link_copy(node, holder, another)
        return node

    def _chunks(self, inode: int, size: int) -> Iterator[bytes]:
        content = self.tree.content(inode)
        for offset in range(0, size, COPIED_AT_ONCE):
            yield content_module.read(content, offset, min(COPIED_AT_ONCE, size - offset))

    def _link_copy(self, node: UpperNode, holder: int, name: bytes) -> None:
        directory = self.directory(holder)
        self.upper.changes.copy_up_link(node, directory, name)
        self.order.entered(directory, name)

    def link_all(self, node: UpperNode) -> None:
        """Finish a copy-up that was stopped between the names of a file."""
        for holder, name in self.tree.places(node.inode):
            if self.nodes.is_shown(holder, name):
                self._link_copy(node, holder, name)

    def child(self, parent: int, name: bytes) -> Child | None:
        """Return the child with this name: a node of the upper, else one of the lower, else None."""
        if len(name) > NAME_MAX:
            raise NameTooLong(f"a name of {len(name)} bytes")
        if name in (b"", b".", b"..") or b"/" in name or b"\0" in name:
            raise InvalidRequest(f"{text_of(name)!r} cannot be a name")
        directory = self.nodes.by_inode.get(parent)
        if directory is not None and directory.is_orphan:
            raise NoSuchEntry(f"the directory {parent} has been removed")
        try:
            there = self.overlaid.find(parent, name)
        except NoSuchEntry:
            return None
        copy = self.nodes.by_inode.get(there.inode)
        if copy is None or isinstance(there, UpperNode) or is_directory(there):
            return there
        self.link_all(copy)
        return copy


def is_directory(there: Child) -> bool:
    """Return True for a directory, in the upper or the lower."""
    return stat.S_ISDIR(there.mode) if isinstance(there, Node) else there.kind == DIRECTORY
