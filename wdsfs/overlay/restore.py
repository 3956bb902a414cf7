"""Decides which names of an upper `wdsfs restore` removes, so that the shards show through again.

Used twice: by the command, to list the changes, and by the worker of a mount, to undo them
(`writable_tree.WritableTree.restore`). A rename is one change: restoring one of its names restores both.

Semantics decision: nothing is restored alone below a directory that was removed, replaced or renamed as a whole.
The lower of such a directory is not shown, so a file of it would have no place.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from wdsfs import inodes
from wdsfs.errors import NoSuchEntry, NotADirectory, ShardError, StaleShard
from wdsfs.inodes import ROOT, kind_of
from wdsfs.overlay.upper_format import DIRECTORY, THE_WHITEOUT, Origin, UpperNode
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.tree import LowerTree, text_of

CHANGED, REMOVED, RENAMED, NEW = "changed", "removed", "renamed", "new"
PATTERN = frozenset(b"*?[")


class Target(NamedTuple):
    """A name in a directory of the upper, and its node."""

    directory: UpperNode
    name: bytes
    node: UpperNode

    @property
    def path(self) -> bytes:
        """Its path below the top, without a slash in front."""
        above = self.directory.path()
        return above + b"/" + self.name if above else self.name


class RestoredChange(NamedTuple):
    """A change that is undone: its kind, its path, and for a rename the old path."""

    kind: str
    path: bytes
    was: bytes = b""


def number_of(lower: ShardSet, origin: Origin) -> int | None:
    """The inode number that an origin has now; None when its shard is no longer what it was. Raises NotIndexed,
    and ShardErrors of a shard that cannot be read."""
    _, shard, where = inodes.unpack(origin.inode)
    if shard >= len(lower) or not kind_of(where):
        return None
    if lower.fingerprint(shard).sum != origin.sum:
        return None
    return inodes.pack(lower.tag(shard), shard, where)


def matching(top: UpperNode, pattern: bytes) -> list[bytes]:
    """The paths in an upper that a pattern of the shell matches: names that were removed, too."""
    found: list[tuple[bytes, UpperNode]] = [(b"", top)]
    for step in pattern.split(b"/"):
        found = [
            (path + b"/" + name if path else name, child)
            for path, directory in found
            for name, child in directory.children.items()
            if fnmatchcase(os.fsdecode(name), os.fsdecode(step))
        ]
    return sorted(path for path, _ in found)


class Restoration:
    """Finds what to remove from the upper `top` over `tree`. Methods raise what the tree raises."""

    def __init__(self, tree: LowerTree, top: UpperNode) -> None:
        self.tree, self.top = tree, top
        self._lower: dict[UpperNode, int] = {top: ROOT}
        self._copied: dict[int, UpperNode] | None = None

    # --- finding

    def find(self, path: bytes) -> list[Target]:
        """The target at a path, none if it is not changed; for the top all targets in it.

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
        elif child.origin is not None and not self._below(child):
            what = "was renamed"
        elif child.opaque and self._lookup(parent, name):
            what = "was replaced"
        if what:
            raise NoSuchEntry(f"{text_of(path)} {what} as a whole: restore that")

    def targets(self, paths: Iterable[bytes]) -> list[Target]:
        """All targets at these paths, with the other names of renames. A directory is one target.

        Raises StaleShard when a name that the shards have might stay hidden, ShardErrors of what cannot be read.
        """
        found: dict[tuple[UpperNode, bytes], Target] = {}
        waiting = [target for path in paths for target in self.find(path)]
        while waiting:
            target = waiting.pop(0)
            if target[:2] in found:
                continue
            found[target[:2]] = target
            for one in self.entries(target):
                waiting.extend(self._others(one))
        targets = list(found.values())
        self._refuse_unknown(targets)
        return targets

    def _refuse_unknown(self, targets: Sequence[Target]) -> None:
        """Raise StaleShard for a copy whose old name is not known: that name would stay hidden, and a commit
        would lose it.

        Semantics decision: after a shard was replaced a copy counts as changed in place if the shard has its
        name, and has it where it was. Any other copy may have been renamed, so it is removed only together with
        all whiteouts.
        """
        going = [one for target in targets for one in self.entries(target)]
        lost = next((one for one in going if self._is_lost(one)), None)
        if lost is None:
            return
        names = {one[:2] for one in going}
        for one in self.entries(Target(self.top, b"", self.top)):
            if one.node is not self.top and one[:2] not in names and self._hides(one):
                raise StaleShard(
                    f"{text_of(lost.path)}: its shard was replaced since, so its old name is not known; it may "
                    f"have been {text_of(one.path)}. Restore all that was removed or replaced with it, or --all"
                )

    def _is_lost(self, one: Target) -> bool:
        """True for a copy whose original cannot be found."""
        origin = one.node.origin
        if origin is None or self._below(one.node) or self._number(one.node):
            return False
        here = self._lookup(one.directory, one.name)
        return not here or inodes.unpack(here)[1:] != inodes.unpack(origin.inode)[1:]

    def _hides(self, one: Target) -> bool:
        """True if a new node or a whiteout hides a name that the shards have or had."""
        if one.node is THE_WHITEOUT:
            return True
        if one.node.origin is not None or self._below(one.node):
            return False
        return bool(self._lookup(one.directory, one.name))

    def entries(self, target: Target) -> Iterator[Target]:
        """A target and all that is below it, what is in a directory before the directory."""
        rest = [Target(*found) for found in target.node.walk()] if target.node.kind == DIRECTORY else []
        yield from reversed([target, *rest])

    def _others(self, one: Target) -> Iterator[Target]:
        """The other end of a rename: where the shard's entry of this name was moved, and where this came from."""
        here, number = self._lookup(one.directory, one.name), self._number(one.node)
        if here and here != number and here != self._below(one.node):
            copy = self._copies().get(here)
            if copy is not None:
                # Of a hard link that is there under another of its names these names, for all are one file.
                homes = self._homes(copy, here)
                yield from (Target(directory, name, copy) for directory, name in homes or copy.places())
        if number and not self._homes(one.node, number):
            for parent, name in self.tree.places(number):
                with contextlib.suppress(NoSuchEntry, NotADirectory):  # it is in another target
                    yield from self.find(self._path(parent) + name)

    def _path(self, inode: int) -> bytes:
        """The path of a directory of the lower, with a trailing slash; empty for the top."""
        steps: list[bytes] = []
        while inode != ROOT:
            inode, name = self.tree.places(inode)[0]
            steps.append(name + b"/")
        return b"".join(reversed(steps))

    # --- upper and lower

    def _below(self, directory: UpperNode) -> int:
        """The inode of what shows through a directory, 0 for nothing."""
        if directory.kind != DIRECTORY or (directory.opaque and directory is not self.top):
            return 0
        found = self._lower.get(directory)
        if found is None:
            found = 0
            if directory.parent is not None:
                inode = self._lookup(directory.parent, directory.name)
                found = inode if inode and kind_of(inode) != inodes.MEMBER else 0
            self._lower[directory] = found
        return found

    def _lookup(self, directory: UpperNode, name: bytes) -> int:
        """The inode of what the lower has under a name, shown or not; 0 for nothing. Raises ShardErrors: a name
        that cannot be looked up may be there."""
        below = self._below(directory)
        try:
            return self.tree.lookup(below, name).inode if below else 0
        except (NoSuchEntry, NotADirectory):
            return 0

    def _number(self, node: UpperNode) -> int:
        """The inode of a copy's original in the lower; 0 for a new node."""
        if node.origin is None or self._below(node):
            return 0
        return number_of(self.tree.lower, node.origin) or 0

    def _homes(self, node: UpperNode, number: int) -> list[tuple[UpperNode, bytes]]:
        """The places of a node that are those of what it is a copy of."""
        return [place for place in node.places() if self._lookup(*place) == number]

    def _copies(self) -> dict[int, UpperNode]:
        """Copies in the upper by the number of what they are copies of."""
        if self._copied is None:
            self._copied = {}
            for _, _, node in self.top.walk():
                with contextlib.suppress(ShardError):  # a shard that cannot be read: its numbers are not needed
                    number = self._number(node)
                    if number:
                        self._copied[number] = node
        return self._copied

    # --- telling

    def changes(self, targets: Sequence[Target]) -> list[RestoredChange]:
        """The changes that these targets undo, by path. What is new or was replaced as a whole is one change."""
        found = {change.path: change for target in targets for change in self._changes(target)}
        olds = {change.was for change in found.values()}
        return [one for path, one in sorted(found.items()) if one.kind != REMOVED or path not in olds]

    def _changes(self, target: Target) -> Iterator[RestoredChange]:
        waiting = [target]
        while waiting:
            one = waiting.pop()
            if self._below(one.node) and one.node.children:
                waiting.extend(Target(one.node, name, child) for name, child in one.node.children.items())
            else:
                yield self._change(one)

    def _change(self, one: Target) -> RestoredChange:
        path = one.path
        if one.node is THE_WHITEOUT:
            return RestoredChange(REMOVED, path)
        number = self._number(one.node)
        if number and not self._homes(one.node, number):
            parent, name = self.tree.places(number)[0]
            return RestoredChange(RENAMED, path, self._path(parent) + name)
        return RestoredChange(CHANGED if self._lookup(one.directory, one.name) else NEW, path)
