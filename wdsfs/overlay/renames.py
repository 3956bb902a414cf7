"""Renames in the merged tree: checks, and copy-up of only what has to move.

Semantics decision: a shard or a folder of keys cannot be renamed (EXDEV, which makes `mv` copy); a sample can,
with its files.
"""

from __future__ import annotations

from wdsfs.errors import CrossDevice, EntryExists, InvalidRequest, IsADirectory, NoSuchEntry, NotADirectory
from wdsfs.inodes import ROOT, SAMPLE, kind_of
from wdsfs.overlay.copy_up import CopyUp
from wdsfs.overlay.merged_view import MergedView
from wdsfs.overlay.removals import Removals, is_directory
from wdsfs.overlay.request_journal import RequestJournal
from wdsfs.overlay.system_calls import EXCHANGE, NOREPLACE
from wdsfs.overlay.upper_format import THE_WHITEOUT, UpperNode
from wdsfs.tree.tree import AT_PARENT, Node, text_of


class Renames:
    """Renames in the merged tree, after the checks that POSIX asks for."""

    def __init__(self, view: MergedView, copies: CopyUp, removals: Removals, journal: RequestJournal) -> None:
        self.view = view
        self.copies = copies
        self.removals = removals
        self.journal = journal
        self.tree = view.tree
        self.upper = view.upper
        self.nodes = view.nodes
        self.order = view.order

    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int = 0) -> None:
        """Rename; an existing target is replaced, or with RENAME_EXCHANGE gets the old name.

        Raises NoSuchEntry, EntryExists (RENAME_NOREPLACE), NotEmpty, IsADirectory, NotADirectory, InvalidRequest
        (a directory into itself; other flags), CrossDevice for a directory that only copying can move.
        """
        if flags not in (0, NOREPLACE, EXCHANGE):
            raise InvalidRequest(f"renaming with the flags {flags}")
        key = (parent, name, new_parent, new_name, flags)
        about = self.journal.repeats("rename", key)
        source, target = self.copies.child(parent, name), self.copies.child(new_parent, new_name)
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
        """True if the previous worker has carried out this rename; finishes its last step if needed."""
        moved, other = about
        if target is None or target.inode != moved:
            return False
        if source is None or source.inode == other:
            return True
        if source.inode == moved or is_directory(source):  # see name_changes.NameChanges._move_in_steps
            directory = self.copies.directory(parent)
            if isinstance(source, UpperNode) and name in directory.children:
                self.upper.names.remove(directory, name, source, self.nodes.shows(directory, name))
                self.removals.forget(source)
        return True

    def _check_not_inside(self, source: UpperNode | Node, parent: int) -> None:
        """Raise InvalidRequest if a directory would move into itself."""
        at = parent
        while is_directory(source) and at != ROOT:
            if at == source.inode:
                raise InvalidRequest(f"the directory {at} would go into itself")
            at = self.view.parent(at)

    def _check_replaceable(self, source: UpperNode | Node, target: UpperNode | Node | None) -> None:
        if target is None:
            return
        if is_directory(source):
            if not is_directory(target):
                raise NotADirectory(f"inode {target.inode} is a file")
            self.removals.check_empty(target)
        elif is_directory(target):
            raise IsADirectory(f"inode {target.inode} is a directory")

    def _movable(self, there: UpperNode | Node) -> UpperNode:
        """The node in the upper, complete: copied up so that nothing of the lower shows through. Raises
        CrossDevice."""
        if not is_directory(there):
            return self.copies.anything(there.inode)
        if isinstance(there, UpperNode) and not there.lower:
            return there
        if kind_of(there.inode) != SAMPLE:
            raise CrossDevice("a shard or a folder of keys cannot be renamed, only copied")
        directory = self.copies.directory(there.inode)
        missing = [
            entry.node.inode
            for entry in self.tree.listing(directory.lower, AT_PARENT)
            if entry.name not in directory.children
        ]
        for inode in missing:
            self.copies.anything(inode)
        # The upper has all of it now, so this changes nothing visible.
        self.upper.whiteouts.make_opaque(directory, self.nodes.origin(there.inode))
        self.order.drop(directory)  # its names are all its own now
        return directory

    def _move(
        self,
        key: tuple[int, bytes, int, bytes, int],
        source: UpperNode | Node,
        target: UpperNode | Node | None,
    ) -> None:
        parent, name, new_parent, new_name, _ = key
        node = self._movable(source)
        directory, to = self.copies.directory(parent), self.copies.directory(new_parent)
        if isinstance(target, Node) and not is_directory(target):
            # The old content is durable in a shard. A program that saves a file by rename relies on finding
            # either the old or the new content after a power cut.
            self.upper.durability.sync_content(node)
        hide = self.nodes.shows(directory, name)
        self.journal.begin("rename", key, (source.inode, 0))
        try:
            self.upper.names.rename(directory, name, node, to, new_name, hide)
        finally:
            there = to.children.get(new_name)
            if there is not None and there is not THE_WHITEOUT:
                self.nodes.by_inode.setdefault(there.inode, there)  # an error may leave another empty directory
            if isinstance(target, UpperNode):
                self.removals.forget(target)
        if isinstance(target, Node):
            self.removals.hidden(target)
        self.order.entered(to, new_name)

    def _exchange(
        self, key: tuple[int, bytes, int, bytes, int], source: UpperNode | Node, target: UpperNode | Node
    ) -> None:
        parent, name, new_parent, new_name, _ = key
        node, other = self._movable(source), self._movable(target)
        directory, to = self.copies.directory(parent), self.copies.directory(new_parent)
        self.journal.begin("rename", key, (source.inode, target.inode))
        self.upper.names.exchange((directory, name, node), (to, new_name, other))
