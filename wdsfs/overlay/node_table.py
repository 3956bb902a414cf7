"""Inode numbers and nodes of the upper: which number the mount shows for a node, and what of the lower shows
through.

A node that was copied up keeps the number that it has in the lower, so a program that has it open sees the new
content. Everything here is read from disk by a new worker, but for the lookup counts of new numbers and the files
of the lower that have lost their names (`gone`).
"""

from __future__ import annotations

import logging
import stat

from wdsfs import inodes
from wdsfs.errors import NoSuchEntry, ShardError
from wdsfs.inodes import MEMBER, ROOT, UP, kind_of
from wdsfs.overlay.restore import number_of
from wdsfs.overlay.upper_dir import UpperDirectory
from wdsfs.overlay.upper_format import DIRECTORY, THE_WHITEOUT, Origin, UpperNode
from wdsfs.tree.tree import LowerTree, text_of

log = logging.getLogger(__name__)

_BROKEN = -1  # what shows through a directory whose shard cannot be read now


class NodeTable:
    """The nodes of `upper` by inode number, over `tree`.

    `generation` is that of the lower for which `bind` has been called; its caller sets it. `inherited`: a worker
    before this one has given out numbers, so lookup counts are not known.
    """

    def __init__(self, tree: LowerTree, upper: UpperDirectory, inherited: bool) -> None:
        self.tree = tree
        self.upper = upper
        self.lower = tree.lower
        self.inherited = inherited
        self.by_inode: dict[int, UpperNode] = {}
        self.generation = -1
        self._is_half_bound = False
        self.gone: set[int] = set()  # files and directories of the lower that have no name any more
        self._known = None if inherited else 0

    # --- which directories of the lower show through which of the upper

    def bind(self) -> list[UpperNode]:
        """Find out what shows through each directory of the upper, in the lower as it is now.

        Returns copies of the lower's files that may lack some of their names: a copy-up may have been stopped.
        """
        first = self.generation < 0
        # The numbers in a shard change all together, those in a merged tree one by one. A call that stopped for a
        # shard to be indexed may have done a part of them.
        deep = first or self.tree.merged or self._is_half_bound
        self._is_half_bound = True
        self.upper.top.lower = ROOT
        waiting = [self.upper.top]
        while waiting:
            directory = waiting.pop()
            for name, child in directory.children.items():
                if child.kind != DIRECTORY or child.opaque:
                    continue
                if self._bind_one(directory, name, child) or deep:
                    waiting.append(child)
        self._is_half_bound = False
        return self._number_all() if first else []

    def _bind_one(self, directory: UpperNode, name: bytes, child: UpperNode) -> bool:
        """Find the directory of the lower that shows through; returns True if it is another one than before."""
        try:
            below = self._directory_below(directory.lower, name)
        except ShardError as error:
            log.debug("%s cannot be looked up below the overlay: %s", text_of(child.path()), error)
            below = _BROKEN
        if below == child.lower:
            return False
        child.lower = below
        self.renumber(child, below if below > 0 else self.upper.descriptors.stat(child).st_ino | UP)
        return True

    def _directory_below(self, below: int, name: bytes) -> int:
        if below <= 0:
            return below
        try:
            found = self.tree.lookup(below, name)
        except NoSuchEntry:
            return 0
        return found.inode if stat.S_ISDIR(found.mode) else 0

    def below(self, directory: UpperNode) -> int:
        """The number of the lower's directory that shows through, 0 for none. Raises ShardErrors if it is not
        known."""
        if directory.lower == _BROKEN:
            *above, _ = reversed(directory.chain())
            for parent, child in zip(above, [*above[1:], directory], strict=True):
                if child.lower == _BROKEN:
                    child.lower = self._directory_below(parent.lower, child.name)
                    self.renumber(child, child.lower or self.upper.descriptors.stat(child).st_ino | UP)
        return directory.lower

    # --- the numbers

    def _number_all(self) -> list[UpperNode]:
        """Give all nodes of the upper the numbers that the mount shows. Returns as `bind`."""
        self.by_inode[ROOT] = self.upper.top
        self.upper.top.inode = ROOT
        linked = []
        for _, _, node in self.upper.top.walk():
            if node is THE_WHITEOUT:
                continue
            node.known = self._known
            if node.lower <= 0 and node.origin is not None:
                number = self._number_of(node.origin)
                is_free = number is not None and self.by_inode.get(number, node) is node
                if number is not None and is_free and not self.is_moved(node, number):
                    node.inode = number
                    if kind_of(number) == MEMBER and self.tree.files_layout:
                        linked.append(node)
            self.by_inode.setdefault(node.inode, node)
        for node in list(self.upper.orphans.top.children.values()):
            if node is not THE_WHITEOUT and self.by_inode.setdefault(node.inode, node) is not node:
                self.upper.orphans.destroy(node)  # it has got a name after all
        return [] if self.upper.read_only else linked

    def _number_of(self, origin: Origin) -> int | None:
        """The number of an origin; None also if its shard cannot be read: the copy then has a number of its
        own."""
        try:
            return number_of(self.lower, origin)
        except ShardError:
            return None

    def is_moved(self, node: UpperNode, number: int) -> bool:
        """True if the lower shows the original of a copy at another place than the copy's: then the original has
        the number. A whiteout may have been removed, by `restore` or by hand."""
        try:
            places = self.tree.places(number)
            return any(self.is_shown(*place) for place in places) and not self._is_home(node, number)
        except (ShardError, NoSuchEntry):
            return False

    def _is_home(self, node: UpperNode, number: int) -> bool:
        """True if a copy is at the place of its original."""
        return any((directory.lower, name) in self.tree.places(number) for directory, name in node.places())

    def origin(self, inode: int) -> Origin:
        """The origin that a copy keeps on disk."""
        return Origin(inode, self.lower.fingerprint(inodes.unpack(inode)[1]).sum)

    def renumber(self, node: UpperNode, inode: int) -> None:
        """Give a node another number, because another directory shows through it."""
        if self.by_inode.get(node.inode) is node:
            del self.by_inode[node.inode]
            node.known = 0 if self._known == 0 else None
        node.inode = inode
        self.by_inode[inode] = node

    def removed(self, node: UpperNode) -> None:
        """Note that a name of a node is removed."""
        if node.parent is None or self.upper.orphans.is_orphan(node):
            node.lower = 0
        if node.parent is None and self.by_inode.get(node.inode) is node:
            del self.by_inode[node.inode]

    # --- which names of the lower are seen

    def is_shown(self, parent: int, name: bytes) -> bool:
        """True if this name in a directory of the lower shows through."""
        while True:
            node = self.by_inode.get(parent)
            if node is not None:
                return node.lower == parent and name not in node.children
            parent, name = self.tree.places(parent)[0]

    def shows(self, directory: UpperNode, name: bytes) -> bool:
        """True if the lower's name would show through if the upper had none."""
        if directory.lower == _BROKEN:
            return True  # rather a needless whiteout than a removed file that comes back
        return directory.lower != 0 and self.has(directory.lower, name)

    def has(self, below: int, name: bytes) -> bool:
        """True if a directory of the lower has this name, or cannot be read and may have it."""
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
        """Take `count` replies off again: the kernel has forgotten them. Raises nothing."""
        node = self.by_inode.get(inode)
        if node is None:
            self.gone.discard(inode)
        elif node.known is not None:
            node.known = max(node.known - count, 0)
            if not node.known and self.upper.orphans.is_orphan(node):
                self.upper.orphans.destroy(node)
                del self.by_inode[inode]
