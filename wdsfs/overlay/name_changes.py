"""Removes and renames nodes of the upper, and leaves a whiteout where the lower has the name, too.

Each change is one atomic system call, after preparations in work/; so a stop at any call leaves the upper as it
was or with the whole change. The names in memory change when the last call has succeeded: an error leaves them
true. A node that loses its last name while the kernel knows it becomes an orphan (`overlay/orphans.py`).

Which names have to be hidden is decided in `overlay/writable_tree.py`, which passes `hide`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from wdsfs.overlay.new_entries import new_node
from wdsfs.overlay.orphans import orphan_name
from wdsfs.overlay.system_calls import EXCHANGE, WITH_WHITEOUT
from wdsfs.overlay.upper_attributes import UpperAttributes
from wdsfs.overlay.upper_format import DIRECTORY, OPAQUE, OPEN_DIRECTORY, THE_WHITEOUT, UpperNode
from wdsfs.overlay.upper_parts import UpperParts

_NO_SUCH_RENAME = {errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}


class NameChanges:
    """Removes and moves names of the upper. `hide`: the lower has the old name, too."""

    def __init__(self, parts: UpperParts) -> None:
        self.parts = parts
        self._renames_with_whiteout = True

    # --- removing

    def remove(self, parent: UpperNode, name: bytes, node: UpperNode, hide: bool) -> None:
        """Remove a name of a file, or an empty directory with all its whiteouts."""
        directory = self.parts.descriptors.directory(parent)
        if not node.more and node.known != 0:
            self._move_away(parent, name, node, hide, orphan_name(node), self.parts.orphans.directory)
            self._leave(parent, name, node, hide)
            self.parts.orphans.adopt(node)
            return
        if node.kind == DIRECTORY and (hide or node.children):
            with self.parts.staging.prepared() as temporary:
                self._move_away(parent, name, node, hide, temporary, self.parts.staging.directory)
            self.parts.staging.throw_away(temporary, self.parts.staging.directory)
        elif hide:
            with self.parts.staging.prepared() as temporary:
                self.parts.whiteouts.make(temporary, self.parts.staging.directory, parent)
                self.parts.calls.rename(temporary, self.parts.staging.directory, name, directory)
        elif node.kind == DIRECTORY:
            self.parts.calls.rmdir(name, directory)
        else:
            self.parts.calls.unlink(name, directory)
        self._leave(parent, name, node, hide)
        if node.parent is None:
            self.parts.descriptors.drop(node)

    def _move_away(
        self, parent: UpperNode, name: bytes, node: UpperNode, hide: bool, new: bytes, where: int
    ) -> None:
        """Move a node out of the upper, and with `hide` leave a whiteout."""
        directory = self.parts.descriptors.directory(parent)
        if not hide:
            self.parts.calls.rename(name, directory, new, where)
            return
        self.parts.whiteouts.make(new, where, parent)
        try:
            self.parts.calls.rename(new, where, name, directory, EXCHANGE)
        except BaseException:
            self.parts.staging.throw_away(new, where)
            raise

    def _leave(self, parent: UpperNode, name: bytes, node: UpperNode, hide: bool) -> None:
        """The name is gone, in memory too."""
        if hide:
            parent.children[name] = THE_WHITEOUT
        else:
            del parent.children[name]
        parent.dirty = True
        places = [place for place in node.places() if place != (parent, name)]
        if places:
            (node.parent, node.name), *more = places
            node.more = more or None
        else:
            node.parent = None

    # --- moving

    def rename(
        self, parent: UpperNode, name: bytes, node: UpperNode, to: UpperNode, new: bytes, hide: bool
    ) -> None:
        """Rename a node; an existing target (a file, or an empty directory) is removed.

        `hide`: the lower has the old name, too. REQUIRES: the two are not the same file; a directory shows nothing
        of the lower.
        """
        victim = to.children.get(new)
        if victim is THE_WHITEOUT:
            victim = None
        if node.kind == DIRECTORY and to.lower and not node.opaque:
            self.parts.whiteouts.make_opaque(node)
        if victim is not None:
            self._save(to, new, victim)
        try:
            self._move(parent, name, node, to, new, hide)
        except OSError:
            if victim is not None and victim.kind != DIRECTORY and not victim.more:
                self.parts.staging.throw_away(orphan_name(victim), self.parts.orphans.directory)
            raise
        if victim is not None and victim.kind != DIRECTORY:
            self._leave(to, new, victim, False)
            if not victim.more and victim.parent is None and victim.known != 0:
                self.parts.orphans.adopt(victim)
            elif victim.parent is None:
                self.parts.descriptors.drop(victim)
        self._leave_for(parent, name, node, to, new)
        if hide:
            parent.children[name] = THE_WHITEOUT

    def _leave_for(self, parent: UpperNode, name: bytes, node: UpperNode, to: UpperNode, new: bytes) -> None:
        """In memory, one of the names of a node becomes another."""
        del parent.children[name]
        parent.dirty = True
        rest = [place for place in node.places() if place != (parent, name)]
        node.parent, node.name = to, new
        node.more = rest or None
        to.enter(new, node)

    def _save(self, to: UpperNode, new: bytes, victim: UpperNode) -> None:
        """Before a node is replaced: keep it as an orphan if the kernel knows it."""
        directory, orphans = self.parts.descriptors.directory(to), self.parts.orphans.directory
        if victim.kind != DIRECTORY:
            if victim.more or victim.known == 0:
                return
            self.parts.staging.throw_away(orphan_name(victim), orphans)  # of an earlier attempt
            self.parts.calls.link(new, directory, orphan_name(victim), orphans)
            return
        # An empty directory may hold whiteouts, which a rename does not replace. So a bare one takes its place.
        status = self.parts.descriptors.stat(victim)
        with self.parts.staging.prepared() as temporary:
            self.parts.calls.mkdir(temporary, 0o700, self.parts.staging.directory)
            fd = os.open(temporary, OPEN_DIRECTORY, dir_fd=self.parts.staging.directory)
            try:
                bare = new_node(DIRECTORY, to, new, os.fstat(fd))
                self.parts.calls.setxattr(fd, OPAQUE, b"y")
                bare.opaque = True
                mode = victim.mode if victim.mode >= 0 else stat.S_IMODE(status.st_mode)
                owner = (status.st_uid, status.st_gid) if self.parts.attributes.as_root else None
                times = status.st_atime_ns, status.st_mtime_ns
                self.parts.attributes.dress(temporary, fd, bare, UpperAttributes(mode, owner, times), to)
            finally:
                os.close(fd)
            self.parts.calls.rename(temporary, self.parts.staging.directory, new, directory, EXCHANGE)
        self._leave(to, new, victim, False)
        to.enter(new, bare)
        if victim.known == 0:
            self.parts.staging.throw_away(temporary, self.parts.staging.directory)
            self.parts.descriptors.drop(victim)
            return
        with contextlib.suppress(OSError):
            self.parts.calls.rename(temporary, self.parts.staging.directory, orphan_name(victim), orphans)
            self.parts.orphans.adopt(victim)

    def _move(
        self, parent: UpperNode, name: bytes, node: UpperNode, to: UpperNode, new: bytes, hide: bool
    ) -> None:
        """The system calls of a rename. What `_save` left under the new name is replaced."""
        directory, target = self.parts.descriptors.directory(parent), self.parts.descriptors.directory(to)
        there = to.children.get(new)
        if hide:
            self.parts.whiteouts.mark(parent)
        if there is THE_WHITEOUT and node.kind == DIRECTORY:  # a directory does not replace a device
            self.parts.calls.rename(name, directory, new, target, EXCHANGE)
            if not hide:
                self.parts.staging.throw_away(name, directory)
        elif not hide:
            self.parts.calls.rename(name, directory, new, target)
        elif not self._rename_with_whiteout(name, directory, new, target):
            if there is not None and there is not THE_WHITEOUT:
                self._move_in_steps(parent, name, node, to, new)
                return
            if there is None:
                self.parts.whiteouts.make(new, target, to)
                to.children[new] = THE_WHITEOUT  # should the next call fail; the lower has nothing there
            self.parts.calls.rename(name, directory, new, target, EXCHANGE)

    def _rename_with_whiteout(self, name: bytes, directory: int, new: bytes, target: int) -> bool:
        """Rename and leave a whiteout, in one call; False where the file system cannot do that."""
        if self.parts.whiteouts.by_attribute or not self._renames_with_whiteout:
            return False
        try:
            self.parts.calls.rename(name, directory, new, target, WITH_WHITEOUT)
        except OSError as error:
            if error.errno not in _NO_SUCH_RENAME:
                raise
            self._renames_with_whiteout = False
        return self._renames_with_whiteout

    def _move_in_steps(self, parent: UpperNode, name: bytes, node: UpperNode, to: UpperNode, new: bytes) -> None:
        """Replace a node by a rename that leaves a whiteout, where the file system cannot do it in one call.

        After a stop between the two calls source and target are the same file, or the source is an empty
        directory.
        """
        directory, target = self.parts.descriptors.directory(parent), self.parts.descriptors.directory(to)
        with self.parts.staging.prepared() as temporary:
            if node.kind == DIRECTORY:
                self.parts.calls.rename(name, directory, new, target, EXCHANGE)
            else:
                self.parts.calls.link(name, directory, temporary, self.parts.staging.directory)
                self.parts.calls.rename(temporary, self.parts.staging.directory, new, target)
        with self.parts.staging.prepared() as temporary:
            self.parts.whiteouts.make(temporary, self.parts.staging.directory, parent)
            self.parts.calls.rename(temporary, self.parts.staging.directory, name, directory, EXCHANGE)
        self.parts.staging.throw_away(temporary, self.parts.staging.directory)

    def exchange(self, one: tuple[UpperNode, bytes, UpperNode], other: tuple[UpperNode, bytes, UpperNode]) -> None:
        """Swap two nodes: (directory, name, node) each. REQUIRES: as for `rename`."""
        (parent, name, node), (to, new, second) = one, other
        directory_of, rename = self.parts.descriptors.directory, self.parts.calls.rename
        for moved, where in ((node, to), (second, parent)):
            if moved.kind == DIRECTORY and where.lower and not moved.opaque:
                self.parts.whiteouts.make_opaque(moved)
        rename(name, directory_of(parent), new, directory_of(to), EXCHANGE)
        rest = [place for place in node.places() if place != (parent, name)]
        rest_of_second = [place for place in second.places() if place != (to, new)]
        node.parent, node.name, node.more = to, new, rest or None
        second.parent, second.name, second.more = parent, name, rest_of_second or None
        to.enter(new, node)
        parent.enter(name, second)
