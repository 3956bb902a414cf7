"""Removes names from the merged tree: a whiteout hides a name of the lower, a name of the upper is removed.

A removed file that the kernel still knows stays readable (`overlay/orphans.py`, `NodeTable.gone`).
"""

from __future__ import annotations

import stat

from wdsfs.errors import NoSuchEntry, NotEmpty
from wdsfs.overlay.copy_up import CopyUp
from wdsfs.overlay.merged_view import MergedView
from wdsfs.overlay.request_journal import RequestJournal
from wdsfs.overlay.upper_format import DIRECTORY, THE_WHITEOUT, UpperNode
from wdsfs.tree.tree import AT_PARENT, Node, text_of


class Removals:
    """Removes names from `view`. Each removal is in the journal before it begins."""

    def __init__(self, view: MergedView, copies: CopyUp, journal: RequestJournal) -> None:
        self.view = view
        self.copies = copies
        self.journal = journal
        self.tree = view.tree
        self.upper = view.upper
        self.nodes = view.nodes
        self.order = view.order

    def removable(self, what: str, parent: int, name: bytes) -> UpperNode | Node | None:
        """The node to remove; None if the previous worker has removed it. Raises NoSuchEntry."""
        about = self.journal.repeats(what, (parent, name))
        there = self.copies.child(parent, name)
        if about is not None and (there is None or there.inode != about[0]):
            return None
        if there is None:
            raise NoSuchEntry(f"no {text_of(name)!r} in the directory {parent}")
        return there

    def check_empty(self, there: UpperNode | Node) -> None:
        """Raises NotEmpty for a directory in which a name is seen."""
        if isinstance(there, Node):
            below, children = there.inode, {}
        else:
            below, children = self.nodes.below(there), there.children
        if any(child is not THE_WHITEOUT for child in children.values()):
            raise NotEmpty(f"the directory {there.inode} is not empty")
        if below and any(entry.name not in children for entry in self.tree.listing(below, AT_PARENT)):
            raise NotEmpty(f"the directory {there.inode} is not empty")

    def remove(self, what: str, parent: int, name: bytes, there: UpperNode | Node) -> None:
        """Remove a name; `there` is what it stands for, `what` the request in the journal."""
        directory = self.copies.directory(parent)
        hide = isinstance(there, Node) or self.nodes.shows(directory, name)
        self.journal.begin(what, (parent, name), (there.inode,))
        if isinstance(there, Node):
            self.upper.whiteouts.hide(directory, name)
            self.hidden(there)
        else:
            self.upper.names.remove(directory, name, there, hide)
            self.forget(there)

    def hidden(self, found: Node) -> None:
        """Note that a name of a node of the lower is hidden now."""
        if stat.S_ISDIR(found.mode) or not self.view.with_links(found).links or found.links == 1:
            self.nodes.gone.add(found.inode)

    def forget(self, node: UpperNode) -> None:
        """Note that a name of a node of the upper is removed."""
        if node.parent is None or self.upper.orphans.is_orphan(node):
            self.order.drop(node)
        self.nodes.removed(node)


def is_directory(there: UpperNode | Node) -> bool:
    return stat.S_ISDIR(there.mode) if isinstance(there, Node) else there.kind == DIRECTORY
