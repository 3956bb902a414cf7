"""Undoes changes for `wdsfs restore`: removes names of the upper, so that the shards show through again.

`Restoration` decides which names are removed: for the command, which lists the changes, and for the worker of a
mount, which undoes them by `Undo`. A rename is one change: restoring one of its names restores both.

Semantics decision: nothing is restored alone below a directory that was removed, replaced or renamed as a whole.
The lower of such a directory is not shown, so a file in it would have no place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from wdsfs import inodes
from wdsfs.errors import NoSuchEntry, NotADirectory, ShardError, StaleShard
from wdsfs.inodes import ROOT, UP, kind_of
from wdsfs.names import text_of
from wdsfs.overlay.overlaid_tree import NodeTable, OverlaidTree, number_of
from wdsfs.overlay.upper_format import DIRECTORY, THE_WHITEOUT, Place, UpperNode
from wdsfs.tree.tree import folder_path

CHANGED, REMOVED, RENAMED, NEW = "changed", "removed", "renamed", "new"


class Target(NamedTuple):
    """A name in a directory of the upper, and its node."""

    directory: UpperNode
    name: bytes
    node: UpperNode

    @property
    def path(self) -> bytes:
        """The path below the top, without a slash in front."""
        above = self.directory.path()
        return above + b"/" + self.name if above else self.name


class RestoredChange(NamedTuple):
    """A change that is undone: its kind, its path, and for a rename the old path."""

    kind: str
    path: bytes
    was: bytes = b""


class Restoration:
    """Finds what to remove from the upper that `nodes` has been bound to. Methods raise what the tree raises."""

    def __init__(self, nodes: NodeTable) -> None:
        self.nodes = nodes
        self.tree, self.top = nodes.tree, nodes.top
        self._copied: dict[int, UpperNode] | None = None

    # --- finding

    def find(self, path: bytes) -> list[Target]:
        """Return the target at a path, none if it is not changed; for the top all targets in it.

        Raises NoSuchEntry, whose message names what to restore instead.
        """
        if not path:
            return [Target(self.top, name, node) for name, node in sorted(self.top.children.items())]
        directory = self.top
        *way, name = path.split(b"/")
        for at, step in enumerate(way):
            child = directory.children.get(step)
            if child is None:
                return []
            self._refuse_whole(directory, step, child, b"/".join(way[: at + 1]))
            directory = child
        node = directory.children.get(name)
        return [] if node is None else [Target(directory, name, node)]

    def _refuse_whole(self, parent: UpperNode, name: bytes, child: UpperNode, path: bytes) -> None:
        what = ""
        if child is THE_WHITEOUT:
            what = "was removed"
        elif child.kind != DIRECTORY:
            if not self._lookup(parent, name):
                raise NotADirectory(f"{text_of(path)} is a file")
            what = "was replaced"
        elif child.origin is not None and not self.nodes.below(child):
            what = "was renamed"
        elif child.opaque and self._lookup(parent, name):
            what = "was replaced"
        if what:
            raise NoSuchEntry(f"{text_of(path)} {what} as a whole: restore that")

    def targets(self, paths: Sequence[bytes]) -> list[Target]:
        """Return all targets at these paths, with the other names of renames. A directory is one target.

        Raises StaleShard when a name that the shards have might stay hidden, ShardErrors of unreadable shards.
        """
        targets: dict[Place, Target] = {}
        waiting = [target for path in paths for target in self.find(path)]
        while waiting:
            target = waiting.pop(0)
            if target[:2] not in targets:
                targets[target[:2]] = target
                for part in self.parts(target):
                    waiting.extend(self._others(part))
        self._refuse_unknown(list(targets.values()))
        return list(targets.values())

    def _refuse_unknown(self, targets: Sequence[Target]) -> None:
        """Raise StaleShard for a copy whose old name is not known: it would be hidden and lost.

        Semantics decision: after a shard was replaced a copy counts as changed in place if the shard has its
        name, and has it where it was. Any other copy may have been renamed, so it is removed only together with
        all whiteouts.
        """
        going = [part for target in targets for part in self.parts(target)]
        lost = next((part for part in going if self._is_lost(part)), None)
        if lost is None:
            return
        names = {part[:2] for part in going}
        for other in self.parts(Target(self.top, b"", self.top)):
            if other.node is not self.top and other[:2] not in names and self._hides(other):
                raise StaleShard(
                    f"{text_of(lost.path)}: its shard was replaced since, so its old name is not known, perhaps "
                    f"{text_of(other.path)}; restore all that was removed or replaced with it, or --all"
                )

    def _is_lost(self, target: Target) -> bool:
        """Return True for a copy whose original cannot be found."""
        origin = target.node.origin
        if origin is None or self.nodes.below(target.node) or self._number(target.node):
            return False
        here = self._lookup(target.directory, target.name)
        return not here or inodes.unpack(here)[1:] != inodes.unpack(origin.inode)[1:]

    def _hides(self, target: Target) -> bool:
        """Return True if a new node or a whiteout hides a name that the shards have or had."""
        if target.node is THE_WHITEOUT:
            return True
        if target.node.origin is not None or self.nodes.below(target.node):
            return False
        return bool(self._lookup(target.directory, target.name))

    def parts(self, target: Target) -> Iterator[Target]:
        """Yield a target and everything below it, the content of a directory before the directory."""
        rest = [Target(*part) for part in target.node.walk()] if target.node.kind == DIRECTORY else []
        yield from reversed([target, *rest])

    def _others(self, target: Target) -> Iterator[Target]:
        """Yield the other ends of renames: where the shard's entry of this name is now, where this entry was."""
        here, number = self._lookup(target.directory, target.name), self._number(target.node)
        if here and here != number and here != self.nodes.below(target.node):
            copy = self._copies().get(here)
            if copy is not None:
                # A hard link may be here under other names: then these, since all of them are one file.
                homes = self.nodes.homes(copy, here)
                yield from (Target(directory, name, copy) for directory, name in homes or copy.places())
        if number and not self.nodes.homes(target.node, number):
            for parent, name in self.tree.places(number):
                with contextlib.suppress(NoSuchEntry, NotADirectory):  # it is in another target
                    yield from self.find(folder_path(self.tree, parent) + name)

    # --- upper and lower

    def _lookup(self, directory: UpperNode, name: bytes) -> int:
        """Return the inode of a name in the lower, shown or not; 0 if the lower does not have it.

        Raises ShardErrors: a name that cannot be looked up may be there.
        """
        below = self.nodes.below(directory)
        try:
            return self.tree.lookup(below, name).inode if below else 0
        except (NoSuchEntry, NotADirectory):
            return 0

    def _number(self, node: UpperNode) -> int:
        """Return the inode of a copy's original in the lower; 0 for a new node. Raises ShardErrors."""
        if node.origin is None or self.nodes.below(node):
            return 0
        return number_of(self.tree.lower, node.origin) or 0

    def _copies(self) -> dict[int, UpperNode]:
        """Return copies in the upper by the number of what they are copies of."""
        if self._copied is None:
            self._copied = {}
            for _, _, node in self.top.walk():
                with contextlib.suppress(ShardError):  # a shard that cannot be read: its numbers are not needed
                    number = self._number(node)
                    if number:
                        self._copied[number] = node
        return self._copied

    # --- the changes

    def changes(self, targets: Sequence[Target]) -> list[RestoredChange]:
        """Return the changes that these targets undo, by path.

        A directory that is new, or was replaced as a whole, is one change.
        """
        changes = {change.path: change for target in targets for change in self._changes(target)}
        olds = {change.was for change in changes.values()}
        return [change for path, change in sorted(changes.items()) if change.kind != REMOVED or path not in olds]

    def _changes(self, target: Target) -> Iterator[RestoredChange]:
        waiting = [target]
        while waiting:
            part = waiting.pop()
            if self.nodes.below(part.node) and part.node.children:
                waiting.extend(Target(part.node, name, child) for name, child in part.node.children.items())
            else:
                yield self._change(part)

    def _change(self, target: Target) -> RestoredChange:
        path = target.path
        if target.node is THE_WHITEOUT:
            return RestoredChange(REMOVED, path)
        number = self._number(target.node)
        if number and not self.nodes.homes(target.node, number):
            parent, name = self.tree.places(number)[0]
            return RestoredChange(RENAMED, path, folder_path(self.tree, parent) + name)
        return RestoredChange(CHANGED if self._lookup(target.directory, target.name) else NEW, path)


class Undo:
    """Undoes changes at paths of a mount, as its worker.

    `notify` is called before each step. It gets a directory's inode and the name in it that the kernel has to look
    up again. Or it gets an inode whose content and attributes have changed, and an empty name.
    """

    def __init__(self, overlaid: OverlaidTree, notify: Callable[[int, bytes], None]) -> None:
        self.overlaid = overlaid
        self.upper = overlaid.upper
        self.nodes = overlaid.nodes
        self.order = overlaid.order
        self._notify = notify

    def restore(self, paths: Sequence[bytes]) -> None:
        """Undo the changes at these paths (below the top, without a slash in front) and below them.

        A call that was stopped at any point can be repeated. Raises NoSuchEntry for a path in a directory that was
        removed, replaced or renamed as a whole, and ShardErrors; then nothing is undone.
        """
        restoration = Restoration(self.nodes)
        targets = restoration.targets(paths)
        for target in targets:
            for part in list(restoration.parts(target)):
                if part.directory.children.get(part.name) is part.node:
                    self._undo(part)
        self._give_back_numbers()
        for directory in {target.directory for target in targets}:
            if directory.chain()[-1] is self.upper.top:  # else it is gone, too
                self.upper.files.sync(directory)

    def _undo(self, target: Target) -> None:
        """Remove a name from the upper, without a whiteout: a name of the lower is visible again."""
        directory, name, node = target
        self._notify(directory.inode, name)
        if node is THE_WHITEOUT:
            self.upper.whiteouts.reveal(directory, name)
            self.order.drop(directory)
        elif node.inode & UP:
            self.upper.changes.remove(directory, name, node, hide=False)
            self.overlaid.note_removed(node)
            self.order.drop(directory)
        else:
            self._undo_copy(target)

    def _undo_copy(self, target: Target) -> None:
        """Undo a copy likewise: the number belongs to the lower's node again.

        All names that it has from the lower are removed together, or two nodes would have the same number.
        """
        node, number = target.node, target.node.inode
        self._notify(number, b"")
        places, homes = node.places(), self.nodes.homes(node, number)
        going = homes if target[:2] in homes else [target[:2]]
        if len(going) == len(places):
            node.known = 0  # not an orphan: a program that has it open sees the lower's file
            if self.nodes.by_inode.get(number) is node:
                del self.nodes.by_inode[number]
        for directory, name in going:
            self._notify(directory.inode, name)
            self.upper.changes.remove(directory, name, node, hide=False)
            self.order.drop(directory)
        self.order.drop(node)

    def _give_back_numbers(self) -> None:
        """Give nodes of the lower that show through again their inode numbers and all their names."""
        # Samples before their files: the place of a sample decides whether the lower's files in it are seen.
        for number, node in sorted(self.nodes.by_inode.items(), key=lambda item: (kind_of(item[0]), item[0])):
            if number & UP or number == ROOT or node.lower == number or not self.nodes.is_moved(node, number):
                continue
            if node.is_orphan:
                self.nodes.destroy_orphan(node)
                continue
            for directory, name in node.places():
                self._notify(directory.inode, name)
            self.nodes.renumber(node, node.own)
        self.nodes.gone = {inode for inode in self.nodes.gone if not self.nodes.has_a_name(inode)}
