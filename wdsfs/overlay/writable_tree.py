"""The tree of a writable mount: `overlay/merged_view.py` and every request that changes it.

This module decides the meaning of a request: its checks, what has to be copied up (`overlay/copy_up.py`) or hidden
(`overlay/removals.py`, `overlay/renames.py`), the outcome of a request in which a worker has died, and then one
change of the upper (`overlay/upper_dir.py`).

Semantics decision: modes of the lower are 0644 and 0755 here, so that its owner may write.

One thread: nothing changes during a call.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from typing import NamedTuple

from wdsfs.errors import (
    EntryExists,
    IsADirectory,
    NoSuchAttribute,
    NoSuchEntry,
    NotADirectory,
    NotPermitted,
    Unsupported,
)
from wdsfs.overlay.copy_up import CopyUp
from wdsfs.overlay.merged_view import MergedView, is_users
from wdsfs.overlay.removals import Removals, is_directory
from wdsfs.overlay.renames import Renames
from wdsfs.overlay.request_journal import RequestJournal
from wdsfs.overlay.undo import Undo
from wdsfs.overlay.upper_attributes import UpperAttributes
from wdsfs.overlay.upper_dir import UpperDirectory
from wdsfs.overlay.upper_format import DIRECTORY, FILE, SYMLINK, UpperNode
from wdsfs.tree.tree import LowerTree, Node, text_of


class AttributeChange(NamedTuple):
    """The change of a `setattr`; None leaves a value as it is. Size in bytes, times in ns since the epoch."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


class WritableTree(MergedView):
    """`tree` with the changes in `upper` over it, which requests can change.

    `owner` (uid, gid) owns the files of the lower; `umask` is applied to their modes. `journal` has the note of
    the previous worker.
    """

    def __init__(
        self,
        tree: LowerTree,
        upper: UpperDirectory,
        owner: tuple[int, int] | None = None,
        journal: RequestJournal | None = None,
        inherited: bool = False,
        umask: int = 0,
    ) -> None:
        tree.make_writable(umask)
        super().__init__(tree, upper, inherited)
        self.journal = RequestJournal() if journal is None else journal
        self.copies = CopyUp(self, owner)
        self.removals = Removals(self, self.copies, self.journal)
        self.renames = Renames(self, self.copies, self.removals, self.journal)

    def _complete(self, copies: list[UpperNode]) -> None:
        for node in copies:
            self.copies.link_all(node)

    # --- content

    def write(self, inode: int, offset: int, data: bytes | memoryview) -> int:
        """Write all data into a file; returns the number of bytes. Raises IsADirectory, OSErrors (ENOSPC ...)."""
        self._follow()
        node = self._nodes.get(inode)
        if node is None:
            node = self.copies.copy_up(inode)
        self.check_file(node)
        return self.upper.contents.write(node, offset, data)

    def fsync(self, inode: int, only_data: bool = False) -> None:
        """Sync a file or directory, with every name on the paths to it. Shard files are already durable."""
        self._follow()
        node = self._nodes.get(inode)
        if node is not None:
            self.upper.durability.sync(node, only_data)

    # --- new nodes

    def _check_vacant(self, what: str, parent: int, name: bytes) -> Node | None:
        """Raise EntryExists if the name exists. Return the node that the previous worker made for the same
        request."""
        repeated = self.journal.repeats(what, (parent, name)) is not None
        there = self.copies.child(parent, name)
        if there is None:
            return None
        if not repeated:
            raise EntryExists(f"{text_of(name)!r} is there")
        return there if isinstance(there, Node) else self.status(there)

    def _welcome(self, node: UpperNode, directory: UpperNode, name: bytes) -> Node:
        """Take over a new node of the upper."""
        self._nodes[node.inode] = node
        self.order.entered(directory, name)
        return self.status(node)

    def create(self, parent: int, name: bytes, mode: int, owner: tuple[int, int] | None = None) -> Node:
        """Make an empty file, whose uid and gid are `owner`. Raises EntryExists, NameTooLong."""
        self._follow()
        there = self._check_vacant("create", parent, name)
        if there is not None:
            return there
        directory = self.copies.directory(parent)
        self.journal.begin("create", (parent, name))
        return self._welcome(self.upper.entries.create(directory, name, _new(mode, owner)), directory, name)

    def mkdir(self, parent: int, name: bytes, mode: int, owner: tuple[int, int] | None = None) -> Node:
        """Make a directory. Raises as `create`."""
        self._follow()
        there = self._check_vacant("mkdir", parent, name)
        if there is not None:
            return there
        directory = self.copies.directory(parent)
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
        directory = self.copies.directory(parent)
        self.journal.begin("mknod", (parent, name))
        node = self.upper.entries.mknod(directory, name, _new(mode, owner), stat.S_IFMT(mode), device)
        return self._welcome(node, directory, name)

    def symlink(self, parent: int, name: bytes, target: bytes, owner: tuple[int, int] | None = None) -> Node:
        """Make a symbolic link. Raises as `create`."""
        self._follow()
        there = self._check_vacant("symlink", parent, name)
        if there is not None:
            return there
        directory = self.copies.directory(parent)
        self.journal.begin("symlink", (parent, name))
        return self._welcome(
            self.upper.entries.symlink(directory, name, _new(0o777, owner), target), directory, name
        )

    def link(self, inode: int, new_parent: int, new_name: bytes) -> Node:
        """Give a file another name. Raises EntryExists, NotPermitted for a directory."""
        self._follow()
        repeated = self.journal.repeats("link", (inode, new_parent, new_name)) is not None
        there = self.copies.child(new_parent, new_name)
        if there is not None:
            if repeated and there.inode == inode:
                return self.getattr(inode)
            raise EntryExists(f"{text_of(new_name)!r} is there")
        node = self.copies.anything(inode)
        if node.kind == DIRECTORY:
            raise NotPermitted(f"inode {inode} is a directory")
        if self.upper.orphans.is_orphan(node):
            raise NoSuchEntry(f"inode {inode} has been removed")
        directory = self.copies.directory(new_parent)
        self.journal.begin("link", (inode, new_parent, new_name))
        self.upper.entries.link(node, directory, new_name)
        return self._welcome(node, directory, new_name)

    # --- removing and renaming

    def unlink(self, parent: int, name: bytes) -> None:
        """Remove a name of a file. Raises NoSuchEntry, IsADirectory."""
        self._follow()
        there = self.removals.removable("unlink", parent, name)
        if there is None:
            return
        if is_directory(there):
            raise IsADirectory(f"{text_of(name)!r} is a directory")
        self.removals.remove("unlink", parent, name, there)

    def rmdir(self, parent: int, name: bytes) -> None:
        """Remove an empty directory. Raises NoSuchEntry, NotADirectory, NotEmpty."""
        self._follow()
        there = self.removals.removable("rmdir", parent, name)
        if there is None:
            return
        if not is_directory(there):
            raise NotADirectory(f"{text_of(name)!r} is a file")
        self.removals.check_empty(there)
        self.removals.remove("rmdir", parent, name, there)

    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int = 0) -> None:
        """Rename; an existing target is replaced, or with RENAME_EXCHANGE gets the old name.

        Raises NoSuchEntry, EntryExists (RENAME_NOREPLACE), NotEmpty, IsADirectory, NotADirectory, InvalidRequest
        (a directory into itself; other flags), CrossDevice for a directory that only copying can move.
        """
        self._follow()
        self.renames.rename(parent, name, new_parent, new_name, flags)

    def restore(self, paths: Iterable[bytes], notify: Callable[[int, bytes], None]) -> None:
        """Undo what was changed at these paths (below the top, without a leading slash) and below them.

        `notify` as in `Undo`. Can be repeated from any point. Raises NoSuchEntry for a path in what was
        removed, replaced or renamed as a whole, and ShardErrors; then nothing is undone.
        """
        self._follow()
        Undo(self, self.removals, notify).restore(paths)

    # --- attributes

    def setattr(self, inode: int, change: AttributeChange) -> Node:
        """Change the attributes of an inode. Raises IsADirectory, Unsupported, OSErrors (EPERM ...)."""
        self._follow()
        node = self._nodes.get(inode)
        size = change.size
        if node is None:
            node = self.copies.copy_up(inode, size)
            size = None if node.kind == FILE else size
        if size is not None:
            self.check_file(node)
            self.upper.contents.truncate(node, size)
        if change.uid is not None or change.gid is not None:
            self._chown(node, change)
        if change.mode is not None:
            if node.kind == SYMLINK:
                raise Unsupported("a symbolic link has no mode")
            self.upper.contents.chmod(node, stat.S_IMODE(change.mode))
        if change.atime_ns is not None or change.mtime_ns is not None:
            self._utime(node, change)
        return self.status(node)

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

    def setxattr(self, inode: int, name: bytes, value: bytes, flags: int = 0) -> None:
        """Set an attribute; `flags` as of setxattr(2). Raises Unsupported for those that are not the user's."""
        self._follow()
        repeated = bool(flags) and self.journal.repeats("setxattr", (inode, name, flags)) is not None
        if not is_users(name):
            raise Unsupported(f"the attribute {text_of(name)} cannot be set here")
        node = self._nodes.get(inode)
        if node is None:
            if flags & os.XATTR_REPLACE:
                raise NoSuchAttribute(f"no attribute {text_of(name)}")
            node = self.copies.copy_up(inode)
        if flags:
            self.journal.begin("setxattr", (inode, name, flags))
        self.upper.contents.setxattr(node, name, value, 0 if repeated else flags)

    def removexattr(self, inode: int, name: bytes) -> None:
        """Remove an attribute. Raises NoSuchAttribute, Unsupported."""
        self._follow()
        repeated = self.journal.repeats("removexattr", (inode, name)) is not None
        if not is_users(name):
            raise Unsupported(f"the attribute {text_of(name)} cannot be removed here")
        node = self._nodes.get(inode)
        if node is None or name not in self.upper.contents.listxattr(node):
            if repeated:
                return
            raise NoSuchAttribute(f"no attribute {text_of(name)}")
        self.journal.begin("removexattr", (inode, name))
        self.upper.contents.removexattr(node, name)


def _new(mode: int, owner: tuple[int, int] | None) -> UpperAttributes:
    return UpperAttributes(stat.S_IMODE(mode), owner)
