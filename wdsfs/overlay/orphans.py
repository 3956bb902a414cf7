"""Orphans: files and directories without a name whose inode number the kernel still knows.

An inode number that the kernel knows must not be used for another file. So such a file or directory is moved to
work/orphans/<inode>, which keeps its content readable, also by the next worker, and its number taken. It is
removed when the kernel has forgotten it, or at the next mount.
"""

from __future__ import annotations

from wdsfs.overlay.staging import Staging
from wdsfs.overlay.upper_descriptors import Descriptors
from wdsfs.overlay.upper_format import DIRECTORY, WHITEOUT, UpperNode, load


class Orphans:
    """The orphans of an upper: the children of `top`, of which `directory` is a descriptor (-1 on a read-only file
    system)."""

    def __init__(self, directory: int, descriptors: Descriptors, staging: Staging) -> None:
        self.top = UpperNode(DIRECTORY, 0, None, b"orphans")
        self.directory = directory
        self.descriptors = descriptors
        self.staging = staging

    def load(self, inherited: bool) -> None:
        """Find the orphans of former processes: keep them if `inherited`, as the kernel may know them, else
        remove them."""
        self.top.children = load(self.directory).children
        for name, node in list(self.top.children.items()):
            if inherited and node.kind != WHITEOUT:
                node.parent, node.inode = self.top, _number(name)
            else:
                del self.top.children[name]
                self.staging.throw_away(name, self.directory)

    def remove_all(self) -> None:
        """Remove all, when the kernel knows no inode number any more."""
        for name in list(self.top.children):
            self.staging.throw_away(name, self.directory)

    def adopt(self, node: UpperNode) -> None:
        """Note in memory that a node has been moved to work/orphans."""
        node.parent, node.name = self.top, orphan_name(node)
        self.top.children[node.name] = node

    def is_orphan(self, node: UpperNode) -> bool:
        return node.parent is self.top

    def destroy(self, node: UpperNode) -> None:
        """Remove an orphan that the kernel has forgotten. Raises nothing."""
        self.descriptors.drop(node)
        self.staging.throw_away(node.name, self.directory)
        self.top.children.pop(node.name, None)
        node.parent = None


def orphan_name(node: UpperNode) -> bytes:
    """The name of a node in work/orphans."""
    return b"%x" % node.inode


def _number(name: bytes) -> int:
    try:
        return int(name, 16)
    except ValueError:
        return 0
