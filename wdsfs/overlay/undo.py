"""Carries out `wdsfs restore` in a tree: names of the upper go, and those of the lower are seen again.

What has to go is worked out in `overlay/restore.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from wdsfs.errors import NoSuchEntry, ShardError
from wdsfs.inodes import ROOT, UP, kind_of
from wdsfs.overlay.merged_view import MergedView
from wdsfs.overlay.removals import Removals
from wdsfs.overlay.restore import Restoration, Target
from wdsfs.overlay.upper_format import THE_WHITEOUT


class Undo:
    """Undoes changes at paths.

    `notify` is called before each step, with a directory's inode and the name in it that the kernel has to look up
    again, or with an inode whose content and attributes have changed and an empty name.
    """

    def __init__(self, view: MergedView, removals: Removals, notify: Callable[[int, bytes], None]) -> None:
        self.view = view
        self.removals = removals
        self.tree = view.tree
        self.upper = view.upper
        self.nodes = view.nodes
        self.order = view.order
        self._notify = notify

    def restore(self, paths: Iterable[bytes]) -> None:
        """Undo what was changed at these paths (below the top, without a slash in front) and below them; see
        `overlay/restore.py`. Can be repeated from any point.

        Raises NoSuchEntry for a path in what was removed, replaced or renamed as a whole, and ShardErrors; then
        nothing is undone.
        """
        restoration = Restoration(self.tree, self.upper.top)
        targets = restoration.targets(paths)
        for target in targets:
            for one in list(restoration.entries(target)):
                if one.directory.children.get(one.name) is one.node:
                    self._undo(one)
        self._settle_numbers()
        for directory in {target.directory for target in targets}:
            if directory.chain()[-1] is self.upper.top:  # else it is gone, too
                self.upper.durability.sync(directory)

    def _undo(self, one: Target) -> None:
        """Remove a name from the upper, without a whiteout: a name of the lower is visible again."""
        self._notify(one.directory.inode, one.name)
        if one.node is THE_WHITEOUT:
            self.upper.whiteouts.reveal(one.directory, one.name)
            self.order.drop(one.directory)
        elif one.node.inode & UP:
            self.upper.names.remove(one.directory, one.name, one.node, False)
            self.removals.forget(one.node)
            self.order.drop(one.directory)
        else:
            self._undo_copy(one)

    def _undo_copy(self, one: Target) -> None:
        """The same for a copy: its number is that of the lower's node again.

        All names that it has from the lower go together, or the lower's and the copy would have one number.
        """
        node, number = one.node, one.node.inode
        self._notify(number, b"")
        places = node.places()
        homes = [place for place in places if (place[0].lower, place[1]) in self._lower_places(number)]
        going = homes if one[:2] in homes else [one[:2]]
        if len(going) == len(places):
            node.known = 0  # no orphan: who has it open sees the lower's
            if self.nodes.by_inode.get(number) is node:
                del self.nodes.by_inode[number]
        for directory, name in going:
            self._notify(directory.inode, name)
            self.upper.names.remove(directory, name, node, False)
            self.order.drop(directory)
        self.order.drop(node)

    def _lower_places(self, number: int) -> list[tuple[int, bytes]]:
        try:
            return self.tree.places(number)
        except (ShardError, NoSuchEntry):
            return []

    def _settle_numbers(self) -> None:
        """Let what is seen of the lower again have its number, and all its names."""
        # Samples before their files: where the one is decides whether the lower's others are seen.
        for number, node in sorted(self.nodes.by_inode.items(), key=lambda item: (kind_of(item[0]), item[0])):
            if number & UP or number == ROOT or node.lower == number or not self.nodes.is_moved(node, number):
                continue
            if self.upper.orphans.is_orphan(node):
                self.upper.orphans.destroy(node)
                del self.nodes.by_inode[number]
                continue
            for directory, name in node.places():
                self._notify(directory.inode, name)
            self.nodes.renumber(node, self.upper.descriptors.stat(node).st_ino | UP)
        self.nodes.gone = {inode for inode in self.nodes.gone if not self._is_seen_again(inode)}

    def _is_seen_again(self, inode: int) -> bool:
        try:
            return self.view.has_a_name(inode)
        except (ShardError, NoSuchEntry):
            return False
