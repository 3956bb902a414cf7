"""The tree of a writable mount: `overlaid_tree.py` and all changes (create, write, rename, remove).

This module decides the meaning of a request: its checks, what is copied up (`overlay/copy_up.py`) or hidden by a
whiteout, and the outcome of a request during which a worker has died. Then one change of the upper follows
(`overlay/upper_changes.py`). A removed file that the kernel still knows stays readable (`work_directory.Orphans`).

Semantics decisions:

- Modes of the lower are 0644 and 0755 here, so that its owner may write.
- A shard or a folder of keys cannot be renamed (EXDEV, which makes `mv` copy); a sample can, with its files.

Single-threaded: nothing changes during a call.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from typing import NamedTuple

from wdsfs import errors
from wdsfs.inodes import ROOT, SAMPLE, kind_of
from wdsfs.names import text_of
from wdsfs.overlay.copy_up import CopyUp, is_directory
from wdsfs.overlay.overlaid_tree import Child, OverlaidTree, is_users
from wdsfs.overlay.request_journal import Key, RequestJournal
from wdsfs.overlay.restore import Undo
from wdsfs.overlay.upper_directory import UpperDirectory
from wdsfs.overlay.upper_files import EXCHANGE, NOREPLACE, Attributes
from wdsfs.overlay.upper_format import DIRECTORY, FILE, SYMLINK, THE_WHITEOUT, UpperNode
from wdsfs.tree.tree import AT_PARENT, LowerTree, Node


class AttributeChange(NamedTuple):
    """The change of a `setattr`; None leaves a value unchanged. Size in bytes, times in ns since the epoch."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


class WritableTree(OverlaidTree):
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
        umask: int = 0,
    ) -> None:
        tree.make_writable(umask)
        super().__init__(tree, upper)
        self.journal = RequestJournal() if journal is None else journal
        self.copies = CopyUp(self, owner)
        self._renames = Renames(self)

    def _complete(self, copies: list[UpperNode]) -> None:
        for node in copies if not self.upper.read_only else []:
            self.copies.link_all(node)

    # --- content

    def write(self, inode: int, offset: int, data: bytes | memoryview) -> int:
        """Write all data into a file; returns the number of bytes. Raises IsADirectory, OSErrors (ENOSPC ...)."""
        self._follow()
        node = self._nodes.get(inode)
        if node is None:
            node = self.copies.copy_up(inode)
        self.check_file(node)
        return self.upper.files.write(node, offset, data)

    def fsync(self, inode: int, *, only_data: bool = False) -> None:
        """Sync a file or directory, with every name on the paths to it. Shard files are already durable."""
        self._follow()
        node = self._nodes.get(inode)
        if node is not None:
            self.upper.files.sync(node, only_data=only_data)

    # --- new nodes

    def _check_vacant(self, what: str, parent: int, name: bytes) -> Node | None:
        """Return the node that the previous worker made for this request. Raises EntryExists."""
        repeated = self.journal.repeats(what, (parent, name)) is not None
        there = self.copies.child(parent, name)
        if there is None:
            return None
        if not repeated:
            raise errors.EntryExists(f"{text_of(name)!r} exists already")
        return there if isinstance(there, Node) else self.status(there)

    def _make(self, what: str, parent: int, name: bytes, make: Callable[[UpperNode], UpperNode]) -> Node:
        """Make a new node by `make`, for the request `what`. Raises EntryExists, NameTooLong."""
        self._follow()
        there = self._check_vacant(what, parent, name)
        if there is not None:
            return there
        directory = self.copies.directory(parent)
        self.journal.begin(what, (parent, name))
        return self._welcome(make(directory), directory, name)

    def _welcome(self, node: UpperNode, directory: UpperNode, name: bytes) -> Node:
        """Take over a new node of the upper."""
        self._nodes[node.inode] = node
        self.order.entered(directory, name)
        return self.status(node)

    def create(self, parent: int, name: bytes, mode: int, owner: tuple[int, int] | None = None) -> Node:
        """Make an empty file, whose uid and gid are `owner`. Raises EntryExists, NameTooLong."""
        attributes, create = Attributes(stat.S_IMODE(mode), owner), self.upper.changes.create
        return self._make("create", parent, name, lambda directory: create(directory, name, attributes))

    def mkdir(self, parent: int, name: bytes, mode: int, owner: tuple[int, int] | None = None) -> Node:
        """Make a directory. Raises as `create`."""
        attributes, mkdir = Attributes(stat.S_IMODE(mode), owner), self.upper.changes.mkdir
        # Opaque, because a later version of the shard may have a directory of this name.
        return self._make(
            "mkdir",
            parent,
            name,
            lambda directory: mkdir(directory, name, attributes, opaque=directory.may_show_lower),
        )

    def mknod(
        self, parent: int, name: bytes, mode: int, device: int = 0, owner: tuple[int, int] | None = None
    ) -> Node:
        """Make a file, fifo, socket or device, as the type bits of `mode` say.

        Raises what `create` raises, and NotPermitted for the device that is a whiteout.
        """
        if stat.S_ISREG(mode) or not stat.S_IFMT(mode):
            return self.create(parent, name, mode, owner)
        if stat.S_ISCHR(mode) and not device:
            raise errors.NotPermitted("the device 0:0 stands for a removed file in an overlay")
        attributes, form, mknod = (
            Attributes(stat.S_IMODE(mode), owner),
            stat.S_IFMT(mode),
            self.upper.changes.mknod,
        )
        return self._make(
            "mknod", parent, name, lambda directory: mknod(directory, name, attributes, form, device)
        )

    def symlink(self, parent: int, name: bytes, target: bytes, owner: tuple[int, int] | None = None) -> Node:
        """Make a symbolic link. Raises as `create`."""
        attributes, symlink = Attributes(0o777, owner), self.upper.changes.symlink
        return self._make("symlink", parent, name, lambda directory: symlink(directory, name, attributes, target))

    def link(self, inode: int, new_parent: int, new_name: bytes) -> Node:
        """Give a file another name. Raises EntryExists, NotPermitted for a directory."""
        self._follow()
        repeated = self.journal.repeats("link", (inode, new_parent, new_name)) is not None
        there = self.copies.child(new_parent, new_name)
        if there is not None:
            if repeated and there.inode == inode:
                return self.getattr(inode)
            raise errors.EntryExists(f"{text_of(new_name)!r} exists already")
        node = self.copies.anything(inode)
        if node.kind == DIRECTORY:
            raise errors.NotPermitted(f"inode {inode} is a directory")
        if node.is_orphan:
            raise errors.NoSuchEntry(f"inode {inode} has been removed")
        directory = self.copies.directory(new_parent)
        self.journal.begin("link", (inode, new_parent, new_name))
        self.upper.changes.link(node, directory, new_name)
        return self._welcome(node, directory, new_name)

    # --- removing and renaming

    def unlink(self, parent: int, name: bytes) -> None:
        """Remove a name of a file. Raises NoSuchEntry, IsADirectory."""
        self._follow()
        there = self._removable("unlink", parent, name)
        if there is None:
            return
        if is_directory(there):
            raise errors.IsADirectory(f"{text_of(name)!r} is a directory")
        self._remove("unlink", parent, name, there)

    def rmdir(self, parent: int, name: bytes) -> None:
        """Remove an empty directory. Raises NoSuchEntry, NotADirectory, NotEmpty."""
        self._follow()
        there = self._removable("rmdir", parent, name)
        if there is None:
            return
        if not is_directory(there):
            raise errors.NotADirectory(f"{text_of(name)!r} is a file")
        self.check_empty(there)
        self._remove("rmdir", parent, name, there)

    def _removable(self, what: str, parent: int, name: bytes) -> Child | None:
        """Return the node to remove; None if the previous worker has removed it. Raises NoSuchEntry."""
        about = self.journal.repeats(what, (parent, name))
        there = self.copies.child(parent, name)
        if about is not None and (there is None or there.inode != about[0]):
            return None
        if there is None:
            raise errors.NoSuchEntry(f"no {text_of(name)!r} in the directory {parent}")
        return there

    def check_empty(self, there: Child) -> None:
        """Raise NotEmpty for a directory that shows a name."""
        if isinstance(there, Node):
            below, children = there.inode, {}
        else:
            below, children = self.nodes.below(there), there.children
        if any(child is not THE_WHITEOUT for child in children.values()) or (
            below and any(entry.name not in children for entry in self.tree.listing(below, AT_PARENT))
        ):
            raise errors.NotEmpty(f"the directory {there.inode} is not empty")

    def _remove(self, what: str, parent: int, name: bytes, there: Child) -> None:
        """Remove a name; `there` is what it stands for, `what` the request in the journal."""
        directory = self.copies.directory(parent)
        self.journal.begin(what, (parent, name), (there.inode,))
        if isinstance(there, Node):
            self.upper.whiteouts.hide(directory, name)
            self.note_hidden(there)
        else:
            self.upper.changes.remove(directory, name, there, hide=self.nodes.shows(directory, name))
            self.note_removed(there)

    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int = 0) -> None:
        """Rename; an existing target is replaced, or with RENAME_EXCHANGE gets the old name.

        Raises NoSuchEntry, EntryExists (RENAME_NOREPLACE), NotEmpty, IsADirectory, NotADirectory, InvalidRequest
        (a directory into itself; other flags), CrossDevice for a directory that only copying can move.
        """
        self._follow()
        self._renames.rename(parent, name, new_parent, new_name, flags)

    def restore(self, paths: Sequence[bytes], notify: Callable[[int, bytes], None]) -> None:
        """Undo what was changed at these paths (below the top, without a leading slash) and below them.

        `notify` as in `Undo`. Can be repeated from any point. Raises NoSuchEntry for a path in what was
        removed, replaced or renamed as a whole, and ShardErrors; then nothing is undone.
        """
        self._follow()
        Undo(self, notify).restore(paths)

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
            self.upper.files.truncate(node, size)
        if change.uid is not None or change.gid is not None:
            self.upper.files.chown(node, change.uid, change.gid)
        if change.mode is not None:
            if node.kind == SYMLINK:
                raise errors.Unsupported("a symbolic link has no mode")
            self.upper.files.chmod(node, stat.S_IMODE(change.mode))
        if change.atime_ns is not None or change.mtime_ns is not None:
            self.upper.files.utime(node, change.atime_ns, change.mtime_ns)
        return self.status(node)

    def setxattr(self, inode: int, name: bytes, value: bytes, flags: int = 0) -> None:
        """Set an attribute; `flags` as of setxattr(2). Raises Unsupported for those that are not the user's."""
        self._follow()
        repeated = bool(flags) and self.journal.repeats("setxattr", (inode, name, flags)) is not None
        if not is_users(name):
            raise errors.Unsupported(f"the attribute {text_of(name)} cannot be set here")
        node = self._nodes.get(inode)
        if node is None:
            if flags & os.XATTR_REPLACE:
                raise errors.NoSuchAttribute(f"no attribute {text_of(name)}")
            node = self.copies.copy_up(inode)
        if flags:
            self.journal.begin("setxattr", (inode, name, flags))
        self.upper.files.setxattr(node, name, value, 0 if repeated else flags)

    def removexattr(self, inode: int, name: bytes) -> None:
        """Remove an attribute. Raises NoSuchAttribute, Unsupported."""
        self._follow()
        repeated = self.journal.repeats("removexattr", (inode, name)) is not None
        if not is_users(name):
            raise errors.Unsupported(f"the attribute {text_of(name)} cannot be removed here")
        node = self._nodes.get(inode)
        if node is None or name not in self.upper.files.listxattr(node):
            if repeated:
                return
            raise errors.NoSuchAttribute(f"no attribute {text_of(name)}")
        self.journal.begin("removexattr", (inode, name))
        self.upper.files.removexattr(node, name)


class Renames:
    """Renames in the tree, after the checks that POSIX asks for, and a copy-up of only what has to move."""

    def __init__(self, tree: WritableTree) -> None:
        self.tree = tree
        self.copies = tree.copies
        self.journal = tree.journal
        self.upper = tree.upper
        self.nodes = tree.nodes

    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int = 0) -> None:
        """Rename, as `WritableTree.rename`."""
        if flags not in (0, NOREPLACE, EXCHANGE):
            raise errors.InvalidRequest(f"renaming with the flags {flags}")
        key = (parent, name, new_parent, new_name, flags)
        about = self.journal.repeats("rename", key)
        source, target = self.copies.child(parent, name), self.copies.child(new_parent, new_name)
        if about is not None and self._was_renamed(about, parent, name, source, target):
            return
        if source is None:
            raise errors.NoSuchEntry(f"no {text_of(name)!r} in the directory {parent}")
        if target is not None and flags == NOREPLACE:
            raise errors.EntryExists(f"{text_of(new_name)!r} exists already")
        if target is None and flags == EXCHANGE:
            raise errors.NoSuchEntry(f"no {text_of(new_name)!r} in the directory {new_parent}")
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
        self, about: Key, parent: int, name: bytes, source: Child | None, target: Child | None
    ) -> bool:
        """Return True if the previous worker has carried out this rename; finishes its last step if needed."""
        moved, other = about
        if target is None or target.inode != moved:
            return False
        if source is None or source.inode == other:
            return True
        if source.inode == moved or is_directory(source):  # see upper_changes.UpperChanges._move_in_steps
            directory = self.copies.directory(parent)
            if isinstance(source, UpperNode) and name in directory.children:
                self.upper.changes.remove(directory, name, source, hide=self.nodes.shows(directory, name))
                self.tree.note_removed(source)
        return True

    def _check_not_inside(self, source: Child, parent: int) -> None:
        """Raise InvalidRequest if a directory would move into itself."""
        at = parent
        while is_directory(source) and at != ROOT:
            if at == source.inode:
                raise errors.InvalidRequest(f"the directory {at} would go into itself")
            at = self.tree.parent(at)

    def _check_replaceable(self, source: Child, target: Child | None) -> None:
        if target is None:
            return
        if is_directory(source):
            if not is_directory(target):
                raise errors.NotADirectory(f"inode {target.inode} is a file")
            self.tree.check_empty(target)
        elif is_directory(target):
            raise errors.IsADirectory(f"inode {target.inode} is a directory")

    def _movable(self, there: Child) -> UpperNode:
        """Return the node in the upper, through which nothing of the lower shows. Raises CrossDevice."""
        if not is_directory(there):
            return self.copies.anything(there.inode)
        if isinstance(there, UpperNode) and not there.may_show_lower:
            return there
        if kind_of(there.inode) != SAMPLE:
            raise errors.CrossDevice("a shard or a folder of keys cannot be renamed, only copied")
        directory = self.copies.directory(there.inode)
        missing = [
            entry.node.inode
            for entry in self.tree.tree.listing(directory.lower, AT_PARENT)
            if entry.name not in directory.children
        ]
        for inode in missing:
            self.copies.anything(inode)
        # The upper has all of it now, so this changes nothing visible.
        self.upper.whiteouts.make_opaque(directory, self.nodes.origin(there.inode))
        self.tree.order.drop(directory)  # its names are all its own now
        return directory

    def _move(self, key: tuple[int, bytes, int, bytes, int], source: Child, target: Child | None) -> None:
        parent, name, new_parent, new_name, _ = key
        node = self._movable(source)
        directory, to = self.copies.directory(parent), self.copies.directory(new_parent)
        if isinstance(target, Node) and not is_directory(target):
            # The old content is durable in a shard. A program that saves a file by rename relies on finding
            # either the old or the new content after a power cut.
            self.upper.files.sync_content(node)
        hide = self.nodes.shows(directory, name)
        self.journal.begin("rename", key, (source.inode, 0))
        try:
            self.upper.changes.rename(directory, name, node, to, new_name, hide)
        finally:
            there = to.children.get(new_name)
            if there is not None and there is not THE_WHITEOUT:
                self.nodes.by_inode.setdefault(there.inode, there)  # an error may leave another empty directory
            if isinstance(target, UpperNode):
                self.tree.note_removed(target)
        if isinstance(target, Node):
            self.tree.note_hidden(target)
        self.tree.order.entered(to, new_name)

    def _exchange(self, key: tuple[int, bytes, int, bytes, int], source: Child, target: Child) -> None:
        parent, name, new_parent, new_name, _ = key
        node, other = self._movable(source), self._movable(target)
        directory, to = self.copies.directory(parent), self.copies.directory(new_parent)
        self.journal.begin("rename", key, (source.inode, target.inode))
        self.upper.changes.exchange((directory, name), node, (to, new_name), other)
