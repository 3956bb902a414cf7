"""Shards and upper as one tree: the questions of `tree/tree.py`, answered for both together.

A name is looked up in the upper (in memory, `upper_format.UpperNode`), then in the lower. The same holds for an
inode number: `overlay/node_table.py` has those of the upper. Nothing is changed here.

Semantics decisions:

- Names of the kernel's overlayfs and of wdsfs in the attributes of users can be neither set nor seen.
- A directory that the lower shows through has the link count 1: its subdirectories are not counted.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Iterator

from wdsfs import inodes
from wdsfs.errors import InvalidRequest, IsADirectory, NoSuchAttribute, NoSuchEntry, NotADirectory
from wdsfs.inodes import ROOT, UP
from wdsfs.overlay.name_order import NameOrder
from wdsfs.overlay.node_table import NodeTable
from wdsfs.overlay.upper_dir import UpperDirectory
from wdsfs.overlay.upper_format import DIRECTORY, FILE, RESERVED, SYMLINK, THE_WHITEOUT, UpperNode
from wdsfs.tree import content as content_module
from wdsfs.tree.content import Content
from wdsfs.tree.tree import AT_PARENT, AT_SELF, XATTR, Entry, LowerTree, Node, Totals, text_of

_USER = b"user."


class MergedView:
    """`tree` with the changes in `upper` over it. `inherited` as for `NodeTable`."""

    def __init__(self, tree: LowerTree, upper: UpperDirectory, inherited: bool = False) -> None:
        self.tree = tree
        self.upper = upper
        self.lower = tree.lower
        self.view = tree.view
        self.merged = tree.merged
        self.nodes = NodeTable(tree, upper, inherited)
        self.order = NameOrder(self.nodes)
        # Attributes, not methods: `remember` is called for every reply to lookup.
        self.remember, self.forget = self.nodes.remember, self.nodes.forget
        self._nodes = self.nodes.by_inode

    def prepare(self) -> None:
        """Do work once that the first request would otherwise wait for. Raises NotIndexed."""
        self.tree.prepare()
        self._follow()

    def close(self, clean: bool) -> None:
        """Close everything; after a `clean` end, when the mount is gone, all that was written is on disk."""
        try:
            self.upper.close(clean)
        finally:
            self.lower.close()

    def _follow(self) -> None:
        """Called first by every public method: find out what shows through now, if the lower has changed."""
        if self.nodes.generation != self.lower.generation:
            generation = self.lower.generation
            self.order.clear()
            self._complete(self.nodes.bind())
            self.nodes.generation = generation

    def _complete(self, copies: list[UpperNode]) -> None:
        """Copies of files that may lack some of their names: `WritableTree` gives them these."""

    # --- looking things up

    def lookup(self, parent: int, name: bytes) -> Node:
        """The child `name` of a directory.

        Every method raises what the same method of `dataset.tree.Tree` raises, and OSErrors of the upper.
        """
        self._follow()
        node = self._nodes.get(parent)
        if node is None:
            return self._over(self.tree.lookup(parent, name))
        if node.kind != DIRECTORY:
            raise NotADirectory(f"{text_of(name)!r}: its parent is a file")
        child = node.children.get(name)
        if child is None:
            below = self.nodes.below(node)
            if below:
                return self._over(self.tree.lookup(below, name))
        elif child is not THE_WHITEOUT:
            return self.status(child)
        raise NoSuchEntry(f"no {text_of(name)!r} in the directory {parent}")

    def resolve(self, path: bytes) -> Node:
        """The node at a path below the top, for callers without a kernel."""
        node = self.getattr(ROOT)
        for name in path.split(b"/"):
            if name not in (b"", b"."):
                node = self.lookup(node.inode, name)
        return node

    def getattr(self, inode: int) -> Node:
        self._follow()
        node = self._nodes.get(inode)
        if node is not None:
            return self.status(node)
        found = self.tree.getattr(inode)
        if inode in self.nodes.gone or (self.nodes.inherited and not self.has_a_name(inode)):
            return found._replace(links=0)
        return self.with_links(found)

    def has_a_name(self, inode: int) -> bool:
        """True if a node of the lower has a visible name; a worker that has taken over does not remember it."""
        if not self._is_touched(inode):
            return True
        return any(self.nodes.is_shown(parent, name) for parent, name in self.tree.places(inode))

    def _is_touched(self, inode: int) -> bool:
        """True if the shard of an inode (in a merged tree: any shard) has changes."""
        changed = self.upper.top.children
        return bool(changed) and (self.merged or self.lower.shards[inodes.unpack(inode)[1]].name in changed)

    def _over(self, found: Node) -> Node:
        """A node of the lower, or its copy, if another name of it was copied up."""
        node = self._nodes.get(found.inode)
        return self.with_links(found) if node is None else self.status(node)

    def with_links(self, found: Node) -> Node:
        """A file of the lower with several names may have lost some."""
        if found.links == 1 or stat.S_ISDIR(found.mode) or not self._is_touched(found.inode):
            return found
        shown = sum(self.nodes.is_shown(parent, name) for parent, name in self.tree.places(found.inode))
        return found._replace(links=shown)

    def status(self, node: UpperNode) -> Node:
        """The attributes of a node of the upper, as the mount shows them."""
        status = self.upper.descriptors.stat(node)
        mode, links = status.st_mode, status.st_nlink
        if node.mode >= 0:
            mode = stat.S_IFMT(mode) | node.mode
        if node.lower:
            links = 1
        elif self.upper.orphans.is_orphan(node):
            links = 0
        return Node(node.inode, mode, links, status.st_size, status.st_mtime_ns, status)

    def readlink(self, inode: int) -> bytes:
        self._follow()
        node = self._nodes.get(inode)
        if node is None:
            return self.tree.readlink(inode)
        if node.kind != SYMLINK:
            raise InvalidRequest(f"inode {inode} is no symbolic link")
        return self.upper.contents.readlink(node)

    def parent(self, inode: int) -> int:
        """The inode of the directory that holds this directory."""
        self._follow()
        node = self._nodes.get(inode)
        if node is None:
            return self.tree.parent(inode)
        return node.parent.inode if node.parent is not None and not self.upper.orphans.is_orphan(node) else ROOT

    def totals(self) -> Totals:
        """Sums over the lower."""
        return self.tree.totals()

    # --- listing

    def open_directory(self, inode: int) -> None:
        """Raises NotADirectory, or what a listing would raise."""
        self._follow()
        node = self._nodes.get(inode)
        if node is None:
            self.tree.open_directory(inode)
        elif node.kind != DIRECTORY:
            raise NotADirectory(f"inode {inode} is a file")
        else:
            self.nodes.below(node)

    def listing(self, inode: int, after: int = 0) -> Iterator[Entry]:
        """The children of a directory after the cursor `after`: those of the lower in its order, then new names.

        A cursor of the lower is its own; that of a new name is UP and a hash of the name
        (`overlay/name_order.py`). The iterator must be used up or dropped before any other call.
        """
        self._follow()
        node = self._nodes.get(inode)
        if node is None:
            for entry in self.tree.listing(inode, after):
                yield entry._replace(node=self._over(entry.node)) if self._may_be_over(entry.node) else entry
            return
        if node.kind != DIRECTORY:
            raise NotADirectory(f"inode {inode} is a file")
        if after < AT_SELF:
            yield Entry(b".", self.status(node), AT_SELF)
        if after < AT_PARENT:
            yield Entry(b"..", self.getattr(self.parent(inode)), AT_PARENT)
        below = self.nodes.below(node)
        if below and after < UP:
            yield from self._list_lower(node, below, max(after, AT_PARENT))
        for cursor, new, child in self.order.after(node, below, after):
            yield Entry(new, self.status(child), cursor)

    def _may_be_over(self, found: Node) -> bool:
        return found.links != 1 and not stat.S_ISDIR(found.mode)

    def _list_lower(self, directory: UpperNode, below: int, after: int) -> Iterator[Entry]:
        children = directory.children
        for entry in self.tree.listing(below, after):
            child = children.get(entry.name)
            if child is None:
                yield entry._replace(node=self._over(entry.node)) if self._may_be_over(entry.node) else entry
            elif child is not THE_WHITEOUT:
                yield entry._replace(node=self.status(child))

    # --- content and attributes

    def content(self, inode: int) -> Content | None:
        """Where the bytes of a file of the lower are; None for one in the upper, which `read` reads.

        Raises IsADirectory.
        """
        self._follow()
        node = self._nodes.get(inode)
        if node is None:
            return self.tree.content(inode)
        self.check_file(node)
        return None

    def read(self, inode: int, offset: int, size: int) -> bytes:
        """Up to `size` bytes of a file, fewer only at its end."""
        self._follow()
        node = self._nodes.get(inode)
        if node is None:
            return content_module.read(self.tree.content(inode), offset, size)
        self.check_file(node)
        return self.upper.contents.read(node, offset, size)

    def check_file(self, node: UpperNode) -> None:
        """Raise IsADirectory or InvalidRequest for anything but a regular file."""
        if node.kind == DIRECTORY:
            raise IsADirectory(f"inode {node.inode} is a directory")
        if node.kind != FILE:
            raise InvalidRequest(f"inode {node.inode} is no file")

    def xattrs(self, inode: int) -> list[bytes]:
        """Names of the extended attributes: of the lower where it shows through, and those of users."""
        self._follow()
        node = self._nodes.get(inode)
        if node is None:
            return self.tree.xattrs(inode)
        own = [name for name in self.upper.contents.listxattr(node) if is_users(name)]
        return (self.tree.xattrs(node.lower) if node.lower > 0 else []) + own

    def getxattr(self, inode: int, name: bytes) -> bytes:
        """The value of an attribute. Raises NoSuchAttribute."""
        self._follow()
        node = self._nodes.get(inode)
        if node is None:
            return self.tree.getxattr(inode, name)
        if name.startswith(XATTR) and node.lower > 0:
            return self.tree.getxattr(node.lower, name)
        if not is_users(name):
            raise NoSuchAttribute(f"no attribute {text_of(name)}")
        try:
            return self.upper.contents.getxattr(node, name)
        except OSError as error:
            if error.errno != errno.ENODATA:
                raise
            raise NoSuchAttribute(f"no attribute {text_of(name)}") from None


def is_users(name: bytes) -> bool:
    """True for an attribute of users; False for "user.overlay.x" and for all of other namespaces."""
    return name.startswith(_USER) and not name.startswith(RESERVED)
