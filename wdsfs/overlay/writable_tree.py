"""The tree of a writable mount: what the lower shows, with the changes of an upper over it.

Answers what `shard_tree.ShardTree` answers, in the same words, and makes changes. What an upper looks like on disk
and how it is changed is the business of `overlay/upper_dir.py`; what is in the shards, that of the tree below.
Decided here is what is seen of both, what has to be copied up or hidden, and what a request means.

A name is looked up in the upper's names (in memory, `upper_format.UpperNode`); what is not there is as the lower
has it. So is an inode number: `_nodes` has those of the upper. Something that was copied up keeps its number, so
whoever has it open sees the new content. Nothing is remembered that a new worker could not read from disk, but for
how often the kernel was told of a new number, and which files of the lower have lost their names.

Semantics decisions:

- A shard or a folder of keys cannot be renamed (EXDEV, which makes `mv` copy); a sample can, with its files.
- Names of the kernel's overlayfs and of wdsfs in the attributes of users can be neither set nor seen.
- A directory that the lower shows through has the link count 1: nobody counts its subdirectories.
- Modes of the lower are 0644 and 0755 here, so that its owner may write.

One thread: a call runs from start to end with what it looked at.
"""

from __future__ import annotations

import bisect
import errno
import hashlib
import logging
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from wdsfs import inodes
from wdsfs.dataset import shard_set
from wdsfs.dataset.shard_set import Content
from wdsfs.dataset.shard_tree import AT_PARENT, AT_SELF, XATTR, Entry, Node, ShardTree, Totals, text_of
from wdsfs.errors import (
    CrossDevice,
    EntryExists,
    InvalidRequest,
    IsADirectory,
    NameTooLong,
    NoSuchAttribute,
    NoSuchEntry,
    NotADirectory,
    NotEmpty,
    NotPermitted,
    ShardError,
    Unsupported,
)
from wdsfs.inodes import MEMBER, ROOT, SAMPLE, UP, kind_of
from wdsfs.names import NAME_MAX
from wdsfs.overlay.request_journal import RequestJournal
from wdsfs.overlay.restore import Restoration, Target, number_of
from wdsfs.overlay.system_calls import EXCHANGE, NOREPLACE
from wdsfs.overlay.upper_attributes import UpperAttributes
from wdsfs.overlay.upper_dir import UpperDirectory
from wdsfs.overlay.upper_format import DIRECTORY, FILE, RESERVED, SYMLINK, THE_WHITEOUT, Origin, UpperNode
from wdsfs.storage.identity import sum_of

log = logging.getLogger(__name__)

CHUNK = 1 << 20  # bytes that are copied up at a time
ORDERS_MAX = 16  # listed directories whose order of new names is kept
_BROKEN = -1  # what shows through a directory whose shard cannot be read now
_USER = b"user."


class AttributeChange(NamedTuple):
    """What `setattr` is to change; None stays. Size in bytes, times in ns since the epoch."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


class WritableTree:
    """`tree` with the changes in `upper` over it.

    `owner` (uid, gid) is whom the files of the lower belong to. `journal` is what the worker before left.
    """

    def __init__(
        self,
        tree: ShardTree,
        upper: UpperDirectory,
        owner: tuple[int, int] | None = None,
        journal: RequestJournal | None = None,
        inherited: bool = False,
        umask: int = 0,
    ) -> None:
        tree.make_writable(umask)
        self.tree = tree
        self.upper = upper
        self.lower = tree.lower
        self.view = tree.view
        self.merged = tree.merged
        self.journal = RequestJournal() if journal is None else journal
        self._owner = owner
        self._known = None if inherited else 0
        self._nodes: dict[int, UpperNode] = {}
        self._generation = -1
        self._gone: set[int] = set()  # files and directories of the lower that have no name any more
        self._orders: OrderedDict[UpperNode, list[tuple[int, bytes]]] = OrderedDict()

    def prepare(self) -> None:
        """Do once what the first request would otherwise wait for. Raises NotIndexed."""
        self.tree.prepare()
        self._follow()

    def close(self, clean: bool) -> None:
        """Let go of everything; at a `clean` end, when the mount is gone, what was written is on disk then."""
        try:
            self.upper.close(clean)
        finally:
            self.lower.close()

    # --- which directories of the lower show through which of the upper

    def _follow(self) -> None:
        """Called first by every public method: find out what shows through now, if the lower has changed."""
        if self._generation != self.lower.generation:
            self._bind()

    def _bind(self) -> None:
        generation, first = self.lower.generation, self._generation < 0
        self.upper.top.lower = ROOT
        self._orders.clear()
        waiting = [self.upper.top]
        while waiting:
            directory = waiting.pop()
            for name, child in directory.children.items():
                if child.kind != DIRECTORY or child.opaque:
                    continue
                # The numbers in a shard change all together, those in a merged tree one by one.
                if self._bind_one(directory, name, child) or first or self.merged:
                    waiting.append(child)
        if first:
            self._number_all()
        self._generation = generation

    def _bind_one(self, directory: UpperNode, name: bytes, child: UpperNode) -> bool:
        """Find what shows through a directory. Whether it is another than before."""
        try:
            below = self._directory_below(directory.lower, name)
        except ShardError as error:
            log.debug("%s is not to be seen below the overlay: %s", text_of(child.path()), error)
            below = _BROKEN
        if below == child.lower:
            return False
        child.lower = below
        self._renumber(child, below if below > 0 else self.upper.descriptors.stat(child).st_ino | UP)
        return True

    def _directory_below(self, below: int, name: bytes) -> int:
        if below <= 0:
            return below
        try:
            found = self.tree.lookup(below, name)
        except NoSuchEntry:
            return 0
        return found.inode if stat.S_ISDIR(found.mode) else 0

    def _below(self, directory: UpperNode) -> int:
        """The number of what shows through a directory, 0 for nothing. Raises what made that unknown."""
        if directory.lower == _BROKEN:
            *above, _ = reversed(directory.chain())
            for parent, child in zip(above, [*above[1:], directory], strict=True):
                if child.lower == _BROKEN:
                    child.lower = self._directory_below(parent.lower, child.name)
                    self._renumber(child, child.lower or self.upper.descriptors.stat(child).st_ino | UP)
        return directory.lower

    def _number_all(self) -> None:
        """Give everything that was found in the upper the number that the mount shows."""
        self._nodes[ROOT] = self.upper.top
        self.upper.top.inode = ROOT
        linked = []
        for _, _, node in self.upper.top.walk():
            if node is THE_WHITEOUT:
                continue
            node.known = self._known
            if node.lower <= 0 and node.origin is not None:
                number = self._number_of(node.origin)
                is_free = number is not None and self._nodes.get(number, node) is node
                if number is not None and is_free and not self._is_moved(node, number):
                    node.inode = number
                    if kind_of(number) == MEMBER and self.tree.files_layout:
                        linked.append(node)
            self._nodes.setdefault(node.inode, node)
        for node in list(self.upper.orphans.top.children.values()):
            if node is not THE_WHITEOUT and self._nodes.setdefault(node.inode, node) is not node:
                self.upper.orphans.destroy(node)  # it has got a name after all
        if not self.upper.read_only:
            for node in linked:
                self._link_all(node)

    def _number_of(self, origin: Origin) -> int | None:
        """The number of an origin; None also when its shard cannot be read: the copy is seen without it."""
        try:
            return number_of(self.lower, origin)
        except ShardError:
            return None

    def _is_moved(self, node: UpperNode, number: int) -> bool:
        """Whether the lower shows what a node is a copy of, at another place than the node's: then the number is
        that of the lower's. A whiteout may be gone, by `restore` or by hand."""
        try:
            places = self.tree.places(number)
            return any(self._is_shown(*place) for place in places) and not self._is_home(node, number)
        except (ShardError, NoSuchEntry):
            return False

    def _is_home(self, node: UpperNode, number: int) -> bool:
        """Whether a node is where the lower has what it is a copy of."""
        return any((directory.lower, name) in self.tree.places(number) for directory, name in node.places())

    def _origin(self, inode: int) -> Origin:
        return Origin(inode, sum_of(self.lower.fingerprint(inodes.unpack(inode)[1])))

    def _renumber(self, node: UpperNode, inode: int) -> None:
        if self._nodes.get(node.inode) is node:
            del self._nodes[node.inode]
            node.known = 0 if self._known == 0 else None
        node.inode = inode
        self._nodes[inode] = node

    # --- looking things up

    def lookup(self, parent: int, name: bytes) -> Node:
        """The child `name` of a directory.

        Raises, as every method, what the same method of `shard_tree.ShardTree` raises, and OSErrors of the upper.
        """
        self._follow()
        node = self._nodes.get(parent)
        if node is None:
            return self._over(self.tree.lookup(parent, name))
        if node.kind != DIRECTORY:
            raise NotADirectory(f"{text_of(name)!r}: its parent is a file")
        child = node.children.get(name)
        if child is None:
            below = self._below(node)
            if below:
                return self._over(self.tree.lookup(below, name))
        elif child is not THE_WHITEOUT:
            return self._status(child)
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
            return self._status(node)
        found = self.tree.getattr(inode)
        if inode in self._gone or (self._known is None and not self._has_a_name(inode)):
            return found._replace(links=0)
        return self._with_links(found)

    def _has_a_name(self, inode: int) -> bool:
        """Whether something of the lower is still to be seen: what a worker that took over does not remember."""
        if not self._is_touched(inode):
            return True
        return any(self._is_shown(parent, name) for parent, name in self.tree.places(inode))

    def _is_touched(self, inode: int) -> bool:
        """Whether there are changes in the shard that something is in (in any, if they are merged)."""
        changed = self.upper.top.children
        return bool(changed) and (self.merged or self.lower.shards[inodes.unpack(inode)[1]].name in changed)

    def _over(self, found: Node) -> Node:
        """What the lower has, unless it is shown from the upper: another name of it was copied up."""
        node = self._nodes.get(found.inode)
        return self._with_links(found) if node is None else self._status(node)

    def _with_links(self, found: Node) -> Node:
        """A file of the lower with several names may have lost some."""
        if found.links == 1 or stat.S_ISDIR(found.mode) or not self._is_touched(found.inode):
            return found
        shown = sum(self._is_shown(parent, name) for parent, name in self.tree.places(found.inode))
        return found._replace(links=shown)

    def _status(self, node: UpperNode) -> Node:
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
            self._below(node)

    def listing(self, inode: int, after: int = 0) -> Iterator[Entry]:
        """The children of a directory behind the cursor `after`: those of the lower in its order, then new names.

        A cursor of the lower is its own; that of a new name is UP and a hash of the name, by which they are in
        order. So a listing goes on rightly whatever is made or removed meanwhile, by another worker too. The
        iterator must be used up or dropped before any other call.
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
            yield Entry(b".", self._status(node), AT_SELF)
        if after < AT_PARENT:
            yield Entry(b"..", self.getattr(self.parent(inode)), AT_PARENT)
        below = self._below(node)
        if below and after < UP:
            yield from self._list_lower(node, below, max(after, AT_PARENT))
        yield from self._list_new(node, below, after)

    def _may_be_over(self, found: Node) -> bool:
        return found.links != 1 and not stat.S_ISDIR(found.mode)

    def _list_lower(self, directory: UpperNode, below: int, after: int) -> Iterator[Entry]:
        children = directory.children
        for entry in self.tree.listing(below, after):
            child = children.get(entry.name)
            if child is None:
                yield entry._replace(node=self._over(entry.node)) if self._may_be_over(entry.node) else entry
            elif child is not THE_WHITEOUT:
                yield entry._replace(node=self._status(child))

    def _list_new(self, directory: UpperNode, below: int, after: int) -> Iterator[Entry]:
        order = self._order(directory, below)
        children = directory.children
        at = bisect.bisect_right(order, after & UP - 1, key=_first) if after >= UP else 0
        while at < len(order):
            cursor, name = order[at]
            child = children.get(name)
            if child is not None and child is not THE_WHITEOUT:
                yield Entry(name, self._status(child), cursor | UP)
            at += 1

    def _order(self, directory: UpperNode, below: int) -> list[tuple[int, bytes]]:
        """The names in a directory that the lower has not, in the order in which they are listed.

        Kept for a few directories, because a listing asks again and again. Removed names may stay in it.
        """
        order = self._orders.get(directory)
        if order is None or len(order) > 2 * len(directory.children) + 64:
            order = sorted(
                (_hash(name), name)
                for name, child in directory.children.items()
                if child is not THE_WHITEOUT and not (below and self._has(below, name))
            )
            self._orders[directory] = order
            if len(self._orders) > ORDERS_MAX:
                self._orders.popitem(last=False)
        else:
            self._orders.move_to_end(directory)
        return order

    def _entered(self, directory: UpperNode, name: bytes) -> None:
        """A name has come into a directory of the upper."""
        order = self._orders.get(directory)
        if order is not None and not (directory.lower > 0 and self._has(directory.lower, name)):
            entry = _hash(name), name
            at = bisect.bisect_left(order, entry)
            if at == len(order) or order[at] != entry:
                order.insert(at, entry)

    def _has(self, below: int, name: bytes) -> bool:
        """Whether a directory of the lower has a name. One that cannot be read may have any."""
        try:
            self.tree.lookup(below, name)
        except NoSuchEntry:
            return False
        except ShardError:
            return True
        return True

    # --- content

    def content(self, inode: int) -> Content | None:
        """Where the bytes of a file of the lower are; None for one in the upper, which `read` reads.

        Raises IsADirectory.
        """
        self._follow()
        node = self._nodes.get(inode)
        if node is None:
            return self.tree.content(inode)
        self._check_file(node)
        return None

    def read(self, inode: int, offset: int, size: int) -> bytes:
        """Up to `size` bytes of a file, fewer only at its end."""
        self._follow()
        node = self._nodes.get(inode)
        if node is None:
            return shard_set.read(self.tree.content(inode), offset, size)
        self._check_file(node)
        return self.upper.contents.read(node, offset, size)

    def write(self, inode: int, offset: int, data: bytes | memoryview) -> int:
        """Write into a file; returns how many bytes, which are all. Raises IsADirectory, OSErrors (ENOSPC ...)."""
        self._follow()
        node = self._nodes.get(inode)
        if node is None:
            node = self._copy_up(inode)
        self._check_file(node)
        return self.upper.contents.write(node, offset, data)

    def fsync(self, inode: int, only_data: bool = False) -> None:
        """Have a file or directory on disk, with every name that leads to it. What is in a shard is so."""
        self._follow()
        node = self._nodes.get(inode)
        if node is not None:
            self.upper.durability.sync(node, only_data)

    def _check_file(self, node: UpperNode) -> None:
        if node.kind == DIRECTORY:
            raise IsADirectory(f"inode {node.inode} is a directory")
        if node.kind != FILE:
            raise InvalidRequest(f"inode {node.inode} is no file")

    # --- copying up

    def _directory(self, inode: int) -> UpperNode:
        """A directory in the upper, made if the lower has it. Raises NoSuchEntry when it has been removed."""
        node = self._nodes.get(inode)
        if node is None:
            node = self._copy_up_way(inode)
        if node.kind != DIRECTORY:
            raise NotADirectory(f"inode {inode} is a file")
        if self.upper.orphans.is_orphan(node):
            raise NoSuchEntry(f"the directory {inode} has been removed")
        return node

    def _copy_up_way(self, inode: int) -> UpperNode:
        """Make a directory of the lower, and those that it lies in, in the upper."""
        way: list[tuple[Node, bytes]] = []
        at = inode
        while at not in self._nodes:
            found = self.tree.getattr(at)
            if not stat.S_ISDIR(found.mode):
                raise NotADirectory(f"inode {at} is a file")
            parent, name = self.tree.places(at)[0]
            way.append((found, name))
            at = parent
        node = self._nodes[at]
        if node.lower != at or way[-1][1] in node.children:
            raise NoSuchEntry(f"the directory {inode} has been removed")
        for found, name in reversed(way):
            attributes = self._attributes(found)
            made = self.upper.entries.copy_up_directory(node, name, attributes)
            made.lower = made.inode = found.inode
            self._nodes[found.inode] = made
            node = made
        return node

    def _attributes(self, found: Node) -> UpperAttributes:
        """What a copy of something in the lower is to have."""
        return UpperAttributes(stat.S_IMODE(found.mode), self._owner, (found.mtime_ns, found.mtime_ns))

    def _is_shown(self, parent: int, name: bytes) -> bool:
        """Whether the lower's name in the lower's directory shows through."""
        while True:
            node = self._nodes.get(parent)
            if node is not None:
                return node.lower == parent and name not in node.children
            parent, name = self.tree.places(parent)[0]

    def _copy_up(self, inode: int, size: int | None = None) -> UpperNode:
        """Something of the lower, as a thing of the upper; of a file the first `size` bytes, or all.

        All its names are copied up, or none: a file that has lost them is made an orphan.
        """
        found = self.tree.getattr(inode)
        if stat.S_ISDIR(found.mode):
            return self._directory(inode)
        shown = [(parent, name) for parent, name in self.tree.places(inode) if self._is_shown(parent, name)]
        parent, name = (self._directory(shown[0][0]), shown[0][1]) if shown else (None, b"%x" % inode)
        where = self.upper.orphans.top if parent is None else parent
        attributes = self._attributes(found)
        if stat.S_ISLNK(found.mode):
            # A link cannot have the attribute that keeps its number: the next worker knows it under another one.
            node = self.upper.entries.copy_up_symlink(where, name, attributes, self.tree.readlink(inode))
        else:
            chunks = self._chunks(inode, found.size if size is None else min(size, found.size))
            node = self.upper.entries.copy_up(where, name, attributes, chunks, self._origin(inode), size)
        node.inode = inode
        self._nodes[inode] = node
        if parent is not None:
            self._entered(parent, name)
        for holder, another in shown[1:]:
            self._link_copy(node, holder, another)
        return node

    def _chunks(self, inode: int, size: int) -> Iterator[bytes]:
        content = self.tree.content(inode)
        for offset in range(0, size, CHUNK):
            yield shard_set.read(content, offset, min(CHUNK, size - offset))

    def _link_copy(self, node: UpperNode, holder: int, name: bytes) -> None:
        directory = self._directory(holder)
        self.upper.entries.copy_up_link(node, directory, name)
        self._entered(directory, name)

    def _link_all(self, node: UpperNode) -> None:
        """Finish a copy-up that was stopped between the names of a file."""
        for holder, name in self.tree.places(node.inode):
            if self._is_shown(holder, name):
                self._link_copy(node, holder, name)

    def _anything(self, inode: int) -> UpperNode:
        """Something in the upper, copied up if the lower has it."""
        node = self._nodes.get(inode)
        return self._copy_up(inode) if node is None else node

    # --- new things

    def _child(self, parent: int, name: bytes) -> UpperNode | Node | None:
        """What a name stands for: something in the upper, or only in the lower, or nothing."""
        if len(name) > NAME_MAX:
            raise NameTooLong(f"a name of {len(name)} bytes")
        if name in (b"", b".", b"..") or b"/" in name or b"\0" in name:
            raise InvalidRequest(f"{text_of(name)!r} is no name")
        directory = self._nodes.get(parent)
        if directory is None:
            below = parent
        else:
            if directory.kind != DIRECTORY:
                raise NotADirectory(f"inode {parent} is a file")
            if self.upper.orphans.is_orphan(directory):
                raise NoSuchEntry(f"the directory {parent} has been removed")
            child = directory.children.get(name)
            if child is not None:
                return None if child is THE_WHITEOUT else child
            below = self._below(directory)
        try:
            found = self.tree.lookup(below, name) if below else None
        except NoSuchEntry:
            return None
        if found is not None and found.inode in self._nodes and not stat.S_ISDIR(found.mode):
            self._link_all(self._nodes[found.inode])
            return self._nodes[found.inode]
        return found

    def _check_vacant(self, what: str, parent: int, name: bytes) -> Node | None:
        """Raises EntryExists when there is the name; unless the worker before has made it, then this is it."""
        repeated = self.journal.repeats(what, (parent, name)) is not None
        there = self._child(parent, name)
        if there is None:
            return None
        if not repeated:
            raise EntryExists(f"{text_of(name)!r} is there")
        return there if isinstance(there, Node) else self._status(there)

    def _welcome(self, node: UpperNode, directory: UpperNode, name: bytes) -> Node:
        """Something new has come."""
        self._nodes[node.inode] = node
        self._entered(directory, name)
        return self._status(node)

    def create(self, parent: int, name: bytes, mode: int, owner: tuple[int, int] | None = None) -> Node:
        """Make an empty file, whose uid and gid are `owner`. Raises EntryExists, NameTooLong."""
        self._follow()
        there = self._check_vacant("create", parent, name)
        if there is not None:
            return there
        directory = self._directory(parent)
        self.journal.begin("create", (parent, name))
        return self._welcome(self.upper.entries.create(directory, name, _new(mode, owner)), directory, name)

    def mkdir(self, parent: int, name: bytes, mode: int, owner: tuple[int, int] | None = None) -> Node:
        """Make a directory. Raises as `create`."""
        self._follow()
        there = self._check_vacant("mkdir", parent, name)
        if there is not None:
            return there
        directory = self._directory(parent)
        self.journal.begin("mkdir", (parent, name))
        opaque = directory.lower != 0
        node = self.upper.entries.mkdir(directory, name, _new(mode, owner), opaque)
        return self._welcome(node, directory, name)

    def mknod(
        self, parent: int, name: bytes, mode: int, device: int = 0, owner: tuple[int, int] | None = None
    ) -> Node:
        """Make a file, fifo, socket or device, as the type bits of `mode` say.

        Raises what `create` raises, and NotPermitted for the device that is a whiteout.
        """
        if stat.S_ISREG(mode) or not stat.S_IFMT(mode):
            return self.create(parent, name, mode, owner)
        self._follow()
        there = self._check_vacant("mknod", parent, name)
        if there is not None:
            return there
        if stat.S_ISCHR(mode) and not device:
            raise NotPermitted("the device 0:0 stands for a removed file in an overlay")
        directory = self._directory(parent)
        self.journal.begin("mknod", (parent, name))
        node = self.upper.entries.mknod(directory, name, _new(mode, owner), stat.S_IFMT(mode), device)
        return self._welcome(node, directory, name)

    def symlink(self, parent: int, name: bytes, target: bytes, owner: tuple[int, int] | None = None) -> Node:
        """Make a symbolic link. Raises as `create`."""
        self._follow()
        there = self._check_vacant("symlink", parent, name)
        if there is not None:
            return there
        directory = self._directory(parent)
        self.journal.begin("symlink", (parent, name))
        return self._welcome(
            self.upper.entries.symlink(directory, name, _new(0o777, owner), target), directory, name
        )

    def link(self, inode: int, new_parent: int, new_name: bytes) -> Node:
        """Give a file another name. Raises EntryExists, NotPermitted for a directory."""
        self._follow()
        repeated = self.journal.repeats("link", (inode, new_parent, new_name)) is not None
        there = self._child(new_parent, new_name)
        if there is not None:
            if repeated and there.inode == inode:
                return self.getattr(inode)
            raise EntryExists(f"{text_of(new_name)!r} is there")
        node = self._anything(inode)
        if node.kind == DIRECTORY:
            raise NotPermitted(f"inode {inode} is a directory")
        if self.upper.orphans.is_orphan(node):
            raise NoSuchEntry(f"inode {inode} has been removed")
        directory = self._directory(new_parent)
        self.journal.begin("link", (inode, new_parent, new_name))
        self.upper.entries.link(node, directory, new_name)
        return self._welcome(node, directory, new_name)

    # --- removing

    def _shows(self, directory: UpperNode, name: bytes) -> bool:
        """Whether the lower's name would be seen if the upper had none."""
        if directory.lower == _BROKEN:
            return True  # better a whiteout for nothing than a removed file that comes back
        return directory.lower != 0 and self._has(directory.lower, name)

    def _removable(self, what: str, parent: int, name: bytes) -> UpperNode | Node | None:
        """What is to be removed; None when the worker before has done so. Raises NoSuchEntry."""
        about = self.journal.repeats(what, (parent, name))
        there = self._child(parent, name)
        if about is not None and (there is None or there.inode != about[0]):
            return None
        if there is None:
            raise NoSuchEntry(f"no {text_of(name)!r} in the directory {parent}")
        return there

    def unlink(self, parent: int, name: bytes) -> None:
        """Remove a name of a file. Raises NoSuchEntry, IsADirectory."""
        self._follow()
        there = self._removable("unlink", parent, name)
        if there is None:
            return
        if _is_directory(there):
            raise IsADirectory(f"{text_of(name)!r} is a directory")
        self._remove("unlink", parent, name, there)

    def rmdir(self, parent: int, name: bytes) -> None:
        """Remove an empty directory. Raises NoSuchEntry, NotADirectory, NotEmpty."""
        self._follow()
        there = self._removable("rmdir", parent, name)
        if there is None:
            return
        if not _is_directory(there):
            raise NotADirectory(f"{text_of(name)!r} is a file")
        self._check_empty(there)
        self._remove("rmdir", parent, name, there)

    def _check_empty(self, there: UpperNode | Node) -> None:
        if isinstance(there, Node):
            below, children = there.inode, {}
        else:
            below, children = self._below(there), there.children
        if any(child is not THE_WHITEOUT for child in children.values()):
            raise NotEmpty(f"the directory {there.inode} is not empty")
        if below and any(entry.name not in children for entry in self.tree.listing(below, AT_PARENT)):
            raise NotEmpty(f"the directory {there.inode} is not empty")

    def _remove(self, what: str, parent: int, name: bytes, there: UpperNode | Node) -> None:
        directory = self._directory(parent)
        hide = isinstance(there, Node) or self._shows(directory, name)
        self.journal.begin(what, (parent, name), (there.inode,))
        if isinstance(there, Node):
            self.upper.whiteouts.hide(directory, name)
            self._hidden(there)
        else:
            self.upper.names.remove(directory, name, there, hide)
            self._forget_removed(there)

    def _hidden(self, found: Node) -> None:
        """A name of something in the lower is not to be seen any more."""
        if stat.S_ISDIR(found.mode) or not self._with_links(found).links or found.links == 1:
            self._gone.add(found.inode)

    def _forget_removed(self, node: UpperNode) -> None:
        """A name of this has been taken away."""
        if node.parent is None or self.upper.orphans.is_orphan(node):
            node.lower = 0
            self._orders.pop(node, None)
        if node.parent is None and self._nodes.get(node.inode) is node:
            del self._nodes[node.inode]

    # --- renaming

    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int = 0) -> None:
        """Give something another name; what has that name is replaced, or with RENAME_EXCHANGE gets the old one.

        Raises NoSuchEntry, EntryExists (RENAME_NOREPLACE), NotEmpty, IsADirectory, NotADirectory, InvalidRequest
        (a directory into itself; other flags), CrossDevice for a directory that only copying can move.
        """
        self._follow()
        if flags not in (0, NOREPLACE, EXCHANGE):
            raise InvalidRequest(f"renaming with the flags {flags}")
        key = (parent, name, new_parent, new_name, flags)
        about = self.journal.repeats("rename", key)
        source, target = self._child(parent, name), self._child(new_parent, new_name)
        if about is not None and self._was_renamed(about, parent, name, source, target):
            return
        if source is None:
            raise NoSuchEntry(f"no {text_of(name)!r} in the directory {parent}")
        if target is not None and flags == NOREPLACE:
            raise EntryExists(f"{text_of(new_name)!r} is there")
        if target is None and flags == EXCHANGE:
            raise NoSuchEntry(f"no {text_of(new_name)!r} in the directory {new_parent}")
        if target is not None and source.inode == target.inode:
            return  # two names of one file: nothing happens, says POSIX
        self._check_not_inside(source, new_parent)
        if flags == EXCHANGE and target is not None:
            self._check_not_inside(target, parent)
            self._exchange(key, source, target)
        else:
            self._check_replaceable(source, target)
            self._move(key, source, target)

    def _was_renamed(
        self, about: tuple[int, int], parent: int, name: bytes, source: UpperNode | Node | None,
        target: UpperNode | Node | None,
    ) -> bool:  # fmt: skip
        """Whether the worker before has renamed this, or nearly: then it is finished."""
        moved, other = about
        if target is None or target.inode != moved:
            return False
        if source is None or source.inode == other:
            return True
        if source.inode == moved or _is_directory(source):  # see name_changes.NameChanges._move_in_steps
            directory = self._directory(parent)
            if isinstance(source, UpperNode) and name in directory.children:
                self.upper.names.remove(directory, name, source, self._shows(directory, name))
                self._forget_removed(source)
        return True

    def _check_not_inside(self, source: UpperNode | Node, parent: int) -> None:
        """A directory does not go into itself."""
        at = parent
        while _is_directory(source) and at != ROOT:
            if at == source.inode:
                raise InvalidRequest(f"the directory {at} would go into itself")
            at = self.parent(at)

    def _check_replaceable(self, source: UpperNode | Node, target: UpperNode | Node | None) -> None:
        if target is None:
            return
        if _is_directory(source):
            if not _is_directory(target):
                raise NotADirectory(f"inode {target.inode} is a file")
            self._check_empty(target)
        elif _is_directory(target):
            raise IsADirectory(f"inode {target.inode} is a directory")

    def _movable(self, there: UpperNode | Node) -> UpperNode:
        """Something of which nothing shows through from the lower. Raises CrossDevice."""
        if not _is_directory(there):
            return self._anything(there.inode)
        if isinstance(there, UpperNode) and not there.lower:
            return there
        if kind_of(there.inode) != SAMPLE:
            raise CrossDevice("a shard or a folder of keys cannot be renamed, only copied")
        directory = self._directory(there.inode)
        missing = [
            entry.node.inode
            for entry in self.tree.listing(directory.lower, AT_PARENT)
            if entry.name not in directory.children
        ]
        for inode in missing:
            self._anything(inode)
        # Now that it holds everything itself, this changes nothing that can be seen.
        self.upper.whiteouts.make_opaque(directory, self._origin(there.inode))
        directory.lower = 0
        self._orders.pop(directory, None)  # its names are all its own now
        return directory

    def _move(
        self,
        key: tuple[int, bytes, int, bytes, int],
        source: UpperNode | Node,
        target: UpperNode | Node | None,
    ) -> None:
        parent, name, new_parent, new_name, _ = key
        node = self._movable(source)
        directory, to = self._directory(parent), self._directory(new_parent)
        if isinstance(target, Node) and not _is_directory(target):
            # The name of bytes that are safe in a shard: whoever saves a file so may rely on it that either these
            # or the new ones are there after a power cut.
            self.upper.durability.sync_content(node)
        hide = self._shows(directory, name)
        self.journal.begin("rename", key, (source.inode, 0))
        try:
            self.upper.names.rename(directory, name, node, to, new_name, hide)
        finally:
            there = to.children.get(new_name)
            if there is not None and there is not THE_WHITEOUT:
                self._nodes.setdefault(there.inode, there)  # an error may leave another empty directory
            if isinstance(target, UpperNode):
                self._forget_removed(target)
        if isinstance(target, Node):
            self._hidden(target)
        self._entered(to, new_name)

    def _exchange(
        self, key: tuple[int, bytes, int, bytes, int], source: UpperNode | Node, target: UpperNode | Node
    ) -> None:
        parent, name, new_parent, new_name, _ = key
        node, other = self._movable(source), self._movable(target)
        directory, to = self._directory(parent), self._directory(new_parent)
        self.journal.begin("rename", key, (source.inode, target.inode))
        self.upper.names.exchange((directory, name, node), (to, new_name, other))

    # --- giving back what the lower has

    def restore(self, paths: Iterable[bytes], told: Callable[[int, bytes], None]) -> None:
        """Undo what was changed at these paths (below the top, without a slash in front) and below them; see
        `overlay/restore.py`. Can be repeated from any point.

        `told` hears, before each step, which name of which directory the kernel has to ask again for, and with an
        empty name of which inode. Raises NoSuchEntry for something in what was removed, replaced or renamed, and
        ShardErrors; then nothing is undone.
        """
        self._follow()
        restoration = Restoration(self.tree, self.upper.top)
        targets = restoration.targets(paths)
        for target in targets:
            for one in list(restoration.entries(target)):
                if one.directory.children.get(one.name) is one.node:
                    self._give_back(one, told)
        self._settle_numbers(told)
        for directory in {target.directory for target in targets}:
            if directory.chain()[-1] is self.upper.top:  # else it is gone, too
                self.upper.durability.sync(directory)

    def _give_back(self, one: Target, told: Callable[[int, bytes], None]) -> None:
        """Take a name away that the upper has, and do not hide the lower's."""
        told(one.directory.inode, one.name)
        if one.node is THE_WHITEOUT:
            self.upper.whiteouts.reveal(one.directory, one.name)
            self._orders.pop(one.directory, None)
        elif one.node.inode & UP:
            self.upper.names.remove(one.directory, one.name, one.node, False)
            self._forget_removed(one.node)
            self._orders.pop(one.directory, None)
        else:
            self._give_copy_back(one, told)

    def _give_copy_back(self, one: Target, told: Callable[[int, bytes], None]) -> None:
        """The same of a copy of something in the lower, whose number it has: that is the lower's again.

        All names that it has from the lower go together, or the lower's and the copy would have one number.
        """
        node, number = one.node, one.node.inode
        told(number, b"")
        places = node.places()
        homes = [place for place in places if (place[0].lower, place[1]) in self._lower_places(number)]
        going = homes if one[:2] in homes else [one[:2]]
        if len(going) == len(places):
            node.known = 0  # no orphan: who has it open sees the lower's
            if self._nodes.get(number) is node:
                del self._nodes[number]
        for directory, name in going:
            told(directory.inode, name)
            self.upper.names.remove(directory, name, node, False)
            self._orders.pop(directory, None)
        self._orders.pop(node, None)

    def _lower_places(self, number: int) -> list[tuple[int, bytes]]:
        try:
            return self.tree.places(number)
        except (ShardError, NoSuchEntry):
            return []

    def _settle_numbers(self, told: Callable[[int, bytes], None]) -> None:
        """Let what is seen of the lower again have its number, and all its names."""
        # Samples before their files: where the one is decides whether the lower's others are seen.
        for number, node in sorted(self._nodes.items(), key=lambda item: (kind_of(item[0]), item[0])):
            if number & UP or number == ROOT or node.lower == number or not self._is_moved(node, number):
                continue
            if self.upper.orphans.is_orphan(node):
                self.upper.orphans.destroy(node)
                del self._nodes[number]
                continue
            for directory, name in node.places():
                told(directory.inode, name)
            self._renumber(node, self.upper.descriptors.stat(node).st_ino | UP)
        self._gone = {inode for inode in self._gone if not self._is_seen_again(inode)}

    def _is_seen_again(self, inode: int) -> bool:
        try:
            return self._has_a_name(inode)
        except (ShardError, NoSuchEntry):
            return False

    # --- attributes

    def setattr(self, inode: int, change: AttributeChange) -> Node:
        """Change what stat says of something. Raises IsADirectory, Unsupported, OSErrors (EPERM ...)."""
        self._follow()
        node = self._nodes.get(inode)
        size = change.size
        if node is None:
            node = self._copy_up(inode, size)
            size = None if node.kind == FILE else size
        if size is not None:
            self._check_file(node)
            self.upper.contents.truncate(node, size)
        if change.uid is not None or change.gid is not None:
            self._chown(node, change)
        if change.mode is not None:
            if node.kind == SYMLINK:
                raise Unsupported("a symbolic link has no mode")
            self.upper.contents.chmod(node, stat.S_IMODE(change.mode))
        if change.atime_ns is not None or change.mtime_ns is not None:
            self._utime(node, change)
        return self._status(node)

    def _chown(self, node: UpperNode, change: AttributeChange) -> None:
        status = self.upper.descriptors.stat(node)
        uid = -1 if change.uid is None or change.uid == status.st_uid else change.uid
        gid = -1 if change.gid is None or change.gid == status.st_gid else change.gid
        self.upper.contents.chown(node, uid, gid)

    def _utime(self, node: UpperNode, change: AttributeChange) -> None:
        atime, mtime = change.atime_ns, change.mtime_ns
        if atime is None or mtime is None:
            status = self.upper.descriptors.stat(node)
            atime = status.st_atime_ns if atime is None else atime
            mtime = status.st_mtime_ns if mtime is None else mtime
        self.upper.contents.utime(node, (atime, mtime))

    def xattrs(self, inode: int) -> list[bytes]:
        """Names of the extended attributes: of the lower where it shows through, and those of users."""
        self._follow()
        node = self._nodes.get(inode)
        if node is None:
            return self.tree.xattrs(inode)
        own = [name for name in self.upper.contents.listxattr(node) if _is_users(name)]
        return (self.tree.xattrs(node.lower) if node.lower > 0 else []) + own

    def getxattr(self, inode: int, name: bytes) -> bytes:
        """The value of an attribute. Raises NoSuchAttribute."""
        self._follow()
        node = self._nodes.get(inode)
        if node is None:
            return self.tree.getxattr(inode, name)
        if name.startswith(XATTR) and node.lower > 0:
            return self.tree.getxattr(node.lower, name)
        if not _is_users(name):
            raise NoSuchAttribute(f"no attribute {text_of(name)}")
        try:
            return self.upper.contents.getxattr(node, name)
        except OSError as error:
            if error.errno != errno.ENODATA:
                raise
            raise NoSuchAttribute(f"no attribute {text_of(name)}") from None

    def setxattr(self, inode: int, name: bytes, value: bytes, flags: int = 0) -> None:
        """Set an attribute; `flags` as of setxattr(2). Raises Unsupported for those that are not the user's."""
        self._follow()
        repeated = bool(flags) and self.journal.repeats("setxattr", (inode, name, flags)) is not None
        if not _is_users(name):
            raise Unsupported(f"the attribute {text_of(name)} cannot be set here")
        node = self._nodes.get(inode)
        if node is None:
            if flags & os.XATTR_REPLACE:
                raise NoSuchAttribute(f"no attribute {text_of(name)}")
            node = self._copy_up(inode)
        if flags:
            self.journal.begin("setxattr", (inode, name, flags))
        self.upper.contents.setxattr(node, name, value, 0 if repeated else flags)

    def removexattr(self, inode: int, name: bytes) -> None:
        """Remove an attribute. Raises NoSuchAttribute, Unsupported."""
        self._follow()
        repeated = self.journal.repeats("removexattr", (inode, name)) is not None
        if not _is_users(name):
            raise Unsupported(f"the attribute {text_of(name)} cannot be removed here")
        node = self._nodes.get(inode)
        if node is None or name not in self.upper.contents.listxattr(node):
            if repeated:
                return
            raise NoSuchAttribute(f"no attribute {text_of(name)}")
        self.journal.begin("removexattr", (inode, name))
        self.upper.contents.removexattr(node, name)

    # --- what the kernel knows

    def remember(self, inode: int) -> None:
        """The kernel has been told of this once more: a reply to lookup, create ... or an entry of a listing."""
        node = self._nodes.get(inode)
        if node is not None and node.known is not None:
            node.known += 1

    def forget(self, inode: int, count: int) -> None:
        """The kernel has dropped `count` of what it was told. Raises nothing."""
        node = self._nodes.get(inode)
        if node is None:
            self._gone.discard(inode)
        elif node.known is not None:
            node.known = max(node.known - count, 0)
            if not node.known and self.upper.orphans.is_orphan(node):
                self.upper.orphans.destroy(node)
                del self._nodes[inode]


def _is_directory(there: UpperNode | Node) -> bool:
    return stat.S_ISDIR(there.mode) if isinstance(there, Node) else there.kind == DIRECTORY


def _new(mode: int, owner: tuple[int, int] | None) -> UpperAttributes:
    return UpperAttributes(stat.S_IMODE(mode), owner)


def _is_users(name: bytes) -> bool:
    """Whether an attribute is one that users have. "user.overlay.x" is not, nor is any of other namespaces."""
    return name.startswith(_USER) and not name.startswith(RESERVED)


def _first(entry: tuple[int, bytes]) -> int:
    return entry[0]


def _hash(name: bytes) -> int:
    """60 bits of a name. That two names of one directory have the same ones will not happen."""
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 4
