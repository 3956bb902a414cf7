"""Shards and upper as one read-only tree: names, inode numbers, listings, attributes and content.

A name is looked up in the upper (in memory, `upper_format.UpperNode`), then in the lower; so is an inode number. A
node that was copied up keeps the number that it has in the lower, so a program that has it open sees the new
content. A new worker reads all of this state from disk, except the lookup counts of new numbers and the files of
the lower that have lost their names (`gone`). Changes are made in `overlay/writable_tree.py`.

Semantics decisions:

- Names of the kernel's overlayfs and of wdsfs in the attributes of users can be neither set nor seen.
- A directory that the lower shows through has the link count 1: its subdirectories are not counted.
"""

from __future__ import annotations

import bisect
import errno
import hashlib
import logging
import stat
from collections import OrderedDict
from collections.abc import Iterator

from wdsfs import inodes
from wdsfs.errors import InvalidRequest, IsADirectory, NoSuchAttribute, NoSuchEntry, NotADirectory, ShardError
from wdsfs.inodes import MEMBER, ROOT, UP, kind_of
from wdsfs.names import text_of
from wdsfs.overlay.upper_directory import UpperDirectory
from wdsfs.overlay.upper_format import (
    DIRECTORY,
    FILE,
    RESERVED_ATTRIBUTES,
    SYMLINK,
    THE_WHITEOUT,
    Origin,
    Place,
    UpperNode,
)
from wdsfs.overlay.work_directory import Orphans
from wdsfs.tree import content as content_module
from wdsfs.tree.content import Content
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.tree import AT_PARENT, AT_SELF, XATTR, Entry, LowerTree, Node, Totals

log = logging.getLogger(__name__)

ORDERS_MAX = 16  # listed directories whose order of new names is kept
_USER = b"user."

Child = UpperNode | Node  # what a name stands for: a node of the upper, else one of the lower


class NodeTable:
    """The nodes of the upper `top` by inode number, and which directories of `tree` show through them.

    `generation` is that of the lower for which `bind` was called last; the caller of `bind` sets it. `inherited`:
    an earlier worker has given numbers to the kernel, so lookup counts are not known. `orphans` are those of the
    upper; a command that only reads passes none.
    """

    def __init__(
        self, tree: LowerTree, top: UpperNode, orphans: Orphans | None = None, *, inherited: bool = False
    ) -> None:
        self.tree = tree
        self.top = top
        self.lower = tree.lower
        self.orphans = orphans
        self.by_inode: dict[int, UpperNode] = {}
        self.generation = -1
        self.gone: set[int] = set()  # files and directories of the lower that have no name any more
        self._is_half_bound = False
        self._known = None if inherited else 0

    # --- which directories of the lower show through which of the upper

    def bind(self) -> list[UpperNode]:
        """Find out what shows through each directory of the upper, in the present lower.

        Returns copies of the lower's files that may lack some of their names: a copy-up may have been stopped.
        """
        first = self.generation < 0
        # In a shard all numbers change together, in a merged tree one by one. A call that stopped because a shard
        # had to be indexed first may have done a part of them.
        deep = first or self.tree.merged or self._is_half_bound
        self._is_half_bound = True
        self.top.lower = ROOT
        waiting = [self.top]
        while waiting:
            directory = waiting.pop()
            for name, child in directory.children.items():
                if child.kind != DIRECTORY or child.opaque:
                    continue
                if self._bind_child(directory, name, child) or deep:
                    waiting.append(child)
        self._is_half_bound = False
        return self._number_all() if first else []

    def _bind_child(self, directory: UpperNode, name: bytes, child: UpperNode) -> bool:
        """Find the directory of the lower that shows through; return True if it has changed."""
        below, is_unread = 0, directory.is_unread
        try:
            below = self._directory_below(directory.lower, name)
        except ShardError as error:
            log.debug("%s cannot be looked up below the overlay: %s", text_of(child.path()), error)
            is_unread = True
        if (below, is_unread) == (child.lower, child.is_unread):
            return False
        child.lower, child.is_unread = below, is_unread
        self.renumber(child, below or child.own)
        return True

    def _directory_below(self, below: int, name: bytes) -> int:
        if not below:
            return 0
        try:
            candidate = self.tree.lookup(below, name)
        except NoSuchEntry:
            return 0
        return candidate.inode if stat.S_ISDIR(candidate.mode) else 0

    def below(self, directory: UpperNode) -> int:
        """Return the number of the lower's directory that shows through, 0 for none.

        Raises ShardErrors if it is not known.
        """
        if directory.is_unread:
            *above, _ = reversed(directory.chain())
            for parent, child in zip(above, [*above[1:], directory], strict=True):
                if child.is_unread:
                    child.lower, child.is_unread = self._directory_below(parent.lower, child.name), False
                    self.renumber(child, child.lower or child.own)
        return directory.lower

    # --- the numbers

    def _number_all(self) -> list[UpperNode]:
        """Give all nodes of the upper the numbers that the mount shows. Returns as `bind`."""
        self.by_inode[ROOT] = self.top
        self.top.inode = ROOT
        linked = []
        for _, _, node in self.top.walk():
            if node is THE_WHITEOUT:
                continue
            node.known = self._known
            number = self._original_number(node)
            if number and self.by_inode.get(number, node) is node and not self.is_moved(node, number):
                node.inode = number
                if kind_of(number) == MEMBER and self.tree.files_layout:
                    linked.append(node)
            self.by_inode.setdefault(node.inode, node)
        if self.orphans is not None:
            for node in list(self.orphans.top.children.values()):
                if node is not THE_WHITEOUT and self.by_inode.setdefault(node.inode, node) is not node:
                    self.orphans.destroy(node)  # it has got a name after all
        return linked

    def _original_number(self, node: UpperNode) -> int:
        """Return the number of a copy's original; 0 for a new node.

        Returns 0 also if the shard cannot be read: the copy then has a number of its own.
        """
        if node.origin is None or node.lower:
            return 0
        try:
            return number_of(self.lower, node.origin) or 0
        except ShardError:
            return 0

    def homes(self, node: UpperNode, number: int) -> list[Place]:
        """Return the places at which a copy and its original, which has this number in the lower, both are."""
        try:
            places = self.tree.places(number)
        except (ShardError, NoSuchEntry):
            return []
        return [place for place in node.places() if (place[0].lower, place[1]) in places]

    def is_moved(self, node: UpperNode, number: int) -> bool:
        """Return True if the lower shows the original of a copy at another place than that of the copy.

        Then the original has the number. This happens when a whiteout was removed, by `restore` or by hand.
        """
        return self.has_a_name(number) and not self.homes(node, number)

    def has_a_name(self, inode: int) -> bool:
        """Return True if a node of the lower has a visible name; False if its shard cannot be read."""
        try:
            return any(self.is_shown(*place) for place in self.tree.places(inode))
        except (ShardError, NoSuchEntry):
            return False

    def origin(self, inode: int) -> Origin:
        """Return the origin that a copy keeps on disk."""
        return Origin(inode, self.lower.fingerprint(inodes.unpack(inode)[1]).sum)

    def renumber(self, node: UpperNode, inode: int) -> None:
        """Give a node another number, because another directory shows through it."""
        if self.by_inode.get(node.inode) is node:
            del self.by_inode[node.inode]
            node.known = 0 if self._known == 0 else None
        node.inode = inode
        self.by_inode[inode] = node

    # --- which names of the lower are seen

    def is_shown(self, parent: int, name: bytes) -> bool:
        """Return True if this name in a directory of the lower shows through."""
        while True:
            node = self.by_inode.get(parent)
            if node is not None:
                return node.lower == parent and name not in node.children
            parent, name = self.tree.places(parent)[0]

    def shows(self, directory: UpperNode, name: bytes) -> bool:
        """Return True if the lower's name would show through if the upper had none."""
        if directory.is_unread:
            return True  # a needless whiteout is better than a removed file that comes back
        return directory.lower != 0 and self.has(directory.lower, name)

    def has(self, below: int, name: bytes) -> bool:
        """Return True if a directory of the lower has this name, or cannot be read and may have it."""
        try:
            self.tree.lookup(below, name)
        except NoSuchEntry:
            return False
        except ShardError:
            return True
        return True

    # --- what the kernel knows

    def remember(self, inode: int) -> None:
        """Count a reply that gave the kernel this number: of lookup, create ..., or an entry of a listing."""
        node = self.by_inode.get(inode)
        if node is not None and node.known is not None:
            node.known += 1

    def forget(self, inode: int, count: int) -> None:
        """Subtract `count` replies: the kernel has forgotten them. Raises nothing."""
        node = self.by_inode.get(inode)
        if node is None:
            self.gone.discard(inode)
        elif node.known is not None:
            node.known = max(node.known - count, 0)
            if not node.known and node.is_orphan:
                self.destroy_orphan(node)

    def destroy_orphan(self, node: UpperNode) -> None:
        """Remove an orphan, whose number may be used again. Raises nothing."""
        if self.orphans is not None:
            self.orphans.destroy(node)
        del self.by_inode[node.inode]


def number_of(lower: ShardSet, origin: Origin) -> int | None:
    """Return the inode number that an origin has now; None when its shard has changed.

    Raises NotIndexed, and ShardErrors of a shard that cannot be read.
    """
    _, shard, where = inodes.unpack(origin.inode)
    if shard >= len(lower) or not kind_of(where):
        return None
    if not lower.has_sum(shard, origin.sum):
        return None
    return inodes.pack(lower.tag(shard), shard, where)


class NameOrder:
    """The order in which a listing shows the names that only the upper has: by a hash of the name.

    So a listing can continue after names were made or removed, and in another worker. The order is kept for the
    few directories that were listed last, because a listing takes many requests.
    """

    def __init__(self, nodes: NodeTable) -> None:
        self.nodes = nodes
        self._orders: OrderedDict[UpperNode, list[tuple[int, bytes]]] = OrderedDict()

    def after(self, directory: UpperNode, below: int, cursor: int) -> Iterator[tuple[int, bytes, UpperNode]]:
        """Yield the new names after a cursor, each with its cursor and node.

        `below` is the lower's directory, or 0.
        """
        order = self._order(directory, below)
        at = bisect.bisect_right(order, cursor & UP - 1, key=lambda line: line[0]) if cursor >= UP else 0
        while at < len(order):
            place, name = order[at]
            child = directory.children.get(name)
            if child is not None and child is not THE_WHITEOUT:
                yield place | UP, name, child
            at += 1

    def _order(self, directory: UpperNode, below: int) -> list[tuple[int, bytes]]:
        """Return the names in their order; removed names may stay in it."""
        order = self._orders.get(directory)
        if order is None or len(order) > 2 * len(directory.children) + 64:
            order = sorted(
                (_hash(name), name)
                for name, child in directory.children.items()
                if child is not THE_WHITEOUT and not (below and self.nodes.has(below, name))
            )
            self._orders[directory] = order
            if len(self._orders) > ORDERS_MAX:
                self._orders.popitem(last=False)
        else:
            self._orders.move_to_end(directory)
        return order

    def entered(self, directory: UpperNode, name: bytes) -> None:
        """Note that a directory of the upper has a further name."""
        order = self._orders.get(directory)
        if order is not None and not (directory.lower and self.nodes.has(directory.lower, name)):
            line = _hash(name), name
            at = bisect.bisect_left(order, line)
            if at == len(order) or order[at] != line:
                order.insert(at, line)

    def drop(self, directory: UpperNode) -> None:
        """Forget the order of a directory: some of its names are now also in the lower, or are no longer."""
        self._orders.pop(directory, None)

    def clear(self) -> None:
        """Forget all: the lower has changed."""
        self._orders.clear()


def _hash(name: bytes) -> int:
    """Return a hash of a name, 60 bits: no two names of a directory will have the same one."""
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 4


class OverlaidTree:
    """`tree` with the changes in `upper` over it."""

    def __init__(self, tree: LowerTree, upper: UpperDirectory) -> None:
        self.tree = tree
        self.upper = upper
        self.lower = tree.lower
        self.view = tree.view
        self.merged = tree.merged
        self.nodes = NodeTable(tree, upper.top, upper.orphans, inherited=upper.inherited)
        self.order = NameOrder(self.nodes)
        # Attributes, not methods: `remember` is called for every reply to lookup.
        self.remember, self.forget = self.nodes.remember, self.nodes.forget
        self._nodes = self.nodes.by_inode

    def prepare(self) -> None:
        """Do in advance, once, what the first request would have to wait for. Raises NotIndexed."""
        self.tree.prepare()
        self._follow()

    def close(self, clean: bool) -> None:
        """Close everything; with `clean`, when the mount has ended, sync everything to disk before."""
        try:
            self.upper.close(clean=clean)
        finally:
            self.lower.close()

    def _follow(self) -> None:
        """Find out what shows through now, if the lower has changed; called first by every public method."""
        if self.nodes.generation != self.lower.generation:
            generation = self.lower.generation
            self.order.clear()
            self._complete(self.nodes.bind())
            self.nodes.generation = generation

    def _complete(self, copies: list[UpperNode]) -> None:
        """Return copies of files that may lack some of their names: `WritableTree` gives them these."""

    # --- looking things up

    def lookup(self, parent: int, name: bytes) -> Node:
        """Return the child `name` of a directory.

        Every method raises what the same method of `tree.tree.Tree` raises, and OSErrors of the upper.
        """
        self._follow()
        child = self.find(parent, name)
        if not isinstance(child, UpperNode):
            return self._over(child)
        if parent == ROOT and child.lower:
            # Its shard may have changed. A listing would meet that too late: the kernel repeats walks only.
            try:
                self.tree.getattr(child.lower)
            except ShardError:
                self._follow()
        return self.status(child)

    def find(self, parent: int, name: bytes) -> Child:
        """Return the child of a directory: the node in the upper, else that of the lower. Raises NoSuchEntry."""
        node = self._nodes.get(parent)
        if node is None:
            return self.tree.lookup(parent, name)
        if node.kind != DIRECTORY:
            raise NotADirectory(f"{text_of(name)!r}: its parent is a file")
        child = node.children.get(name)
        if child is None:
            below = self.nodes.below(node)
            if below:
                return self.tree.lookup(below, name)
        elif child is not THE_WHITEOUT:
            return child
        raise NoSuchEntry(f"no {text_of(name)!r} in the directory {parent}")

    def getattr(self, inode: int) -> Node:
        self._follow()
        node = self._nodes.get(inode)
        if node is not None:
            return self.status(node)
        original = self.tree.getattr(inode)
        if inode in self.nodes.gone or (self.upper.inherited and not self._has_a_name(inode)):
            return original._replace(links=0)
        return self._with_links(original)

    def _has_a_name(self, inode: int) -> bool:
        """Return True if a node of the lower has a visible name.

        A worker that has taken over does not remember it.
        """
        return not self._is_touched(inode) or any(self.nodes.is_shown(*place) for place in self.tree.places(inode))

    def _is_touched(self, inode: int) -> bool:
        """Return True if the shard of an inode (in a merged tree: any shard) has changes."""
        changed = self.upper.top.children
        return bool(changed) and (self.merged or self.lower.shards[inodes.unpack(inode)[1]].name in changed)

    def _over(self, original: Node) -> Node:
        """Return a node of the lower, or its copy if it was copied up under another of its names."""
        node = self._nodes.get(original.inode)
        return self._with_links(original) if node is None else self.status(node)

    def _with_links(self, original: Node) -> Node:
        """Return a file of the lower with the number of its remaining names."""
        if original.links == 1 or stat.S_ISDIR(original.mode) or not self._is_touched(original.inode):
            return original
        shown = sum(self.nodes.is_shown(*place) for place in self.tree.places(original.inode))
        return original._replace(links=shown)

    def status(self, node: UpperNode) -> Node:
        """Return the attributes of a node of the upper, as the mount shows them."""
        status = self.upper.files.stat(node)
        mode, links = status.st_mode, status.st_nlink
        if node.mode >= 0:
            mode = stat.S_IFMT(mode) | node.mode
        if node.may_show_lower:
            links = 1
        elif node.is_orphan:
            links = 0
        return Node(node.inode, mode, links, status.st_size, status.st_mtime_ns, status)

    def readlink(self, inode: int) -> bytes:
        self._follow()
        node = self._nodes.get(inode)
        if node is None:
            return self.tree.readlink(inode)
        if node.kind != SYMLINK:
            raise InvalidRequest(f"inode {inode} is no symbolic link")
        return self.upper.files.readlink(node)

    def parent(self, inode: int) -> int:
        """Return the inode of the directory that holds this directory."""
        self._follow()
        node = self._nodes.get(inode)
        if node is None:
            return self.tree.parent(inode)
        return node.parent.inode if node.parent is not None and not node.is_orphan else ROOT

    def totals(self) -> Totals:
        """Return sums over the lower."""
        return self.tree.totals()

    # --- removed nodes

    def note_hidden(self, node: Node) -> None:
        """Note that a name of a node of the lower is hidden now."""
        if stat.S_ISDIR(node.mode) or not self._with_links(node).links or node.links == 1:
            self.nodes.gone.add(node.inode)

    def note_removed(self, node: UpperNode) -> None:
        """Note that a name of a node of the upper is removed."""
        if node.parent is None or node.is_orphan:
            self.order.drop(node)
            node.lower, node.is_unread = 0, False
        if node.parent is None and self._nodes.get(node.inode) is node:
            del self._nodes[node.inode]

    # --- listing

    def listing(self, inode: int, after: int = 0) -> Iterator[Entry]:
        """Yield the children of a directory after a cursor: first the children of the lower, then new names.

        A child of the lower has the cursor of the lower. The cursor of a new name is UP and a hash of the name.
        The iterator must be used up or dropped before any other call.
        """
        self._follow()
        node = self._nodes.get(inode)
        if node is None:
            yield from map(self._entry_over, self.tree.listing(inode, after))
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

    def _list_lower(self, directory: UpperNode, below: int, after: int) -> Iterator[Entry]:
        children = directory.children
        while True:
            for entry in self.tree.listing(below, after):
                child = children.get(entry.name)
                if child is None:
                    yield self._entry_over(entry)
                elif child is not THE_WHITEOUT:
                    if self.nodes.generation != self.lower.generation:
                        break  # a shard has changed, perhaps that of the child
                    yield entry._replace(node=self.status(child))
                after = entry.cursor
            else:
                return
            self._follow()

    def _entry_over(self, entry: Entry) -> Entry:
        """Return an entry of the lower, with its copy if it was copied up under another of its names."""
        node = entry.node
        if node.links == 1 or stat.S_ISDIR(node.mode):
            return entry
        return entry._replace(node=self._over(node))

    # --- content and attributes

    def content(self, inode: int) -> Content | None:
        """Return the place of the bytes of a file of the lower; None for one in the upper, which `read` reads.

        Raises IsADirectory.
        """
        self._follow()
        node = self._nodes.get(inode)
        if node is None:
            return self.tree.content(inode)
        self.check_file(node)
        return None

    def read(self, inode: int, offset: int, size: int) -> bytes:
        """Return up to `size` bytes of a file, fewer only at its end."""
        self._follow()
        node = self._nodes.get(inode)
        if node is None:
            return content_module.read(self.tree.content(inode), offset, size)
        self.check_file(node)
        return self.upper.files.read(node, offset, size)

    def check_file(self, node: UpperNode) -> None:
        """Raise IsADirectory or InvalidRequest for anything but a regular file."""
        if node.kind == DIRECTORY:
            raise IsADirectory(f"inode {node.inode} is a directory")
        if node.kind != FILE:
            raise InvalidRequest(f"inode {node.inode} is no file")

    def xattrs(self, inode: int) -> list[bytes]:
        """Return names of the extended attributes: of the lower where it shows through, and those of users."""
        self._follow()
        node = self._nodes.get(inode)
        if node is None:
            return self.tree.xattrs(inode)
        own = [name for name in self.upper.files.listxattr(node) if is_users(name)]
        return (self.tree.xattrs(node.lower) if node.lower else []) + own

    def getxattr(self, inode: int, name: bytes) -> bytes:
        """Return the value of an attribute. Raises NoSuchAttribute."""
        self._follow()
        node = self._nodes.get(inode)
        if node is None:
            return self.tree.getxattr(inode, name)
        if name.startswith(XATTR) and node.lower:
            return self.tree.getxattr(node.lower, name)
        if not is_users(name):
            raise NoSuchAttribute(f"no attribute {text_of(name)}")
        try:
            return self.upper.files.getxattr(node, name)
        except OSError as error:
            if error.errno != errno.ENODATA:
                raise
            raise NoSuchAttribute(f"no attribute {text_of(name)}") from None


def is_users(name: bytes) -> bool:
    """Return True for an attribute of users; False for "user.overlay.x" and for all of other namespaces."""
    return name.startswith(_USER) and not name.startswith(RESERVED_ATTRIBUTES)
