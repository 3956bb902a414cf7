"""The tree of a writable mount: `overlaid_tree.py` and all changes (create, write, rename, remove).

This module decides the meaning of a request: its checks, its copy-up (`CopyUp`) or whiteout, and the outcome of a
request during which a worker has died (`RequestJournal`). Then one change of the upper follows
(`overlay/upper_changes.py`). A removed file that the kernel still knows stays readable (`work_directory.Orphans`).

Semantics decisions:

- Modes of the lower are 0644 and 0755 here, so that its owner may write.
- A shard or a folder of keys cannot be renamed (EXDEV, which makes `mv` copy); a sample can, with its files.

Single-threaded: nothing changes during a call.
"""

from __future__ import annotations

import marshal
import mmap
import os
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from wdsfs import errors
from wdsfs.inodes import ROOT, SAMPLE, kind_of
from wdsfs.names import NAME_MAX, text_of
from wdsfs.overlay.overlaid_tree import Child, OverlaidTree, is_users
from wdsfs.overlay.restore import Undo
from wdsfs.overlay.upper_directory import UpperDirectory
from wdsfs.overlay.upper_files import EXCHANGE, NOREPLACE, Attributes
from wdsfs.overlay.upper_format import DIRECTORY, FILE, SYMLINK, THE_WHITEOUT, UpperNode
from wdsfs.tree import content as content_module
from wdsfs.tree.tree import AT_PARENT, LowerTree, Node

COPIED_AT_ONCE = 1 << 20  # bytes that are copied up at a time
JOURNAL_BYTES = 4096
_LENGTH = struct.Struct("<I")

Key = tuple[Any, ...]  # numbers and bytes


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

    def _make(
        self, what: str, parent: int, name: bytes, make: Callable[..., UpperNode], *arguments: object
    ) -> Node:
        """Make a new node by `make(directory, name, *arguments)`, for the request `what`; return it.

        The previous worker may have made it. Raises EntryExists, NameTooLong.
        """
        self._follow()
        repeated = self.journal.repeats(what, (parent, name)) is not None
        there = self.copies.child(parent, name)
        if there is not None:
            if not repeated:
                raise errors.EntryExists(f"{text_of(name)!r} exists already")
            return there if isinstance(there, Node) else self.status(there)
        directory = self.copies.directory(parent)
        self.journal.begin(what, (parent, name))
        return self._welcome(make(directory, name, *arguments), directory, name)

    def _welcome(self, node: UpperNode, directory: UpperNode, name: bytes) -> Node:
        """Take over a new node of the upper."""
        self._nodes[node.inode] = node
        self.order.entered(directory, name)
        return self.status(node)

    def create(self, parent: int, name: bytes, mode: int, owner: tuple[int, int] | None = None) -> Node:
        """Make an empty file, whose uid and gid are `owner`. Raises EntryExists, NameTooLong."""
        return self._make("create", parent, name, self.upper.changes.create, Attributes(stat.S_IMODE(mode), owner))

    def mkdir(self, parent: int, name: bytes, mode: int, owner: tuple[int, int] | None = None) -> Node:
        """Make a directory. Raises as `create`."""
        return self._make("mkdir", parent, name, self.upper.changes.mkdir, Attributes(stat.S_IMODE(mode), owner))

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
        attributes = Attributes(stat.S_IMODE(mode), owner)
        return self._make("mknod", parent, name, self.upper.changes.mknod, attributes, stat.S_IFMT(mode), device)

    def symlink(self, parent: int, name: bytes, target: bytes, owner: tuple[int, int] | None = None) -> Node:
        """Make a symbolic link. Raises as `create`."""
        return self._make("symlink", parent, name, self.upper.changes.symlink, Attributes(0o777, owner), target)

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
        self._remove("unlink", parent, name)

    def rmdir(self, parent: int, name: bytes) -> None:
        """Remove an empty directory. Raises NoSuchEntry, NotADirectory, NotEmpty."""
        self._remove("rmdir", parent, name)

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

    def _remove(self, what: str, parent: int, name: bytes) -> None:
        """Remove a name, if the previous worker has not done it; `what` is the request in the journal."""
        self._follow()
        about = self.journal.repeats(what, (parent, name))
        there = self.copies.child(parent, name)
        if about is not None and (there is None or there.inode != about[0]):
            return
        if there is None:
            raise errors.NoSuchEntry(f"no {text_of(name)!r} in the directory {parent}")
        self._check_removable(what, name, there)
        directory = self.copies.directory(parent)
        self.journal.begin(what, (parent, name), (there.inode,))
        if isinstance(there, Node):
            self.upper.whiteouts.hide(directory, name)
            self.note_hidden(there)
        else:
            self.upper.changes.remove(directory, name, there, hide=self.nodes.shows(directory, name))
            self.note_removed(there)

    def _check_removable(self, what: str, name: bytes, there: Child) -> None:
        if not is_directory(there):
            if what == "rmdir":
                raise errors.NotADirectory(f"{text_of(name)!r} is a file")
        elif what == "unlink":
            raise errors.IsADirectory(f"{text_of(name)!r} is a directory")
        else:
            self.check_empty(there)

    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int = 0) -> None:
        """Rename; an existing target is replaced, or with RENAME_EXCHANGE gets the old name.

        Raises NoSuchEntry, EntryExists (RENAME_NOREPLACE), NotEmpty, IsADirectory, NotADirectory, InvalidRequest
        (a directory into itself; other flags), CrossDevice for a directory that only copying can move.
        """
        self._follow()
        self._renames.rename(parent, name, new_parent, new_name, flags)

    def restore(self, paths: Sequence[bytes], notify: Callable[[int, bytes], None]) -> None:
        """Undo the changes at these paths (below the top, without a leading slash) and below them.

        `notify` as in `Undo`. Can be repeated from any point. Raises NoSuchEntry for a path in a directory that
        was removed, replaced or renamed as a whole, and ShardErrors. Then nothing is undone.
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
        """Set an attribute; `flags` as of setxattr(2). Raises Unsupported for a name that is not the user's."""
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
    """Renames in the tree, after the checks that POSIX asks for. Only nodes that have to move are copied up."""

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


class CopyUp:
    """Files and directories of the upper by inode number or name, copied up if only the lower has them.

    A file is copied up with all its names, or not at all; a directory together with its parents. `owner` (uid,
    gid) owns the files of the lower.
    """

    def __init__(self, overlaid: OverlaidTree, owner: tuple[int, int] | None) -> None:
        self.overlaid = overlaid
        self.tree = overlaid.tree
        self.upper = overlaid.upper
        self.nodes = overlaid.nodes
        self.order = overlaid.order
        self._owner = owner

    def anything(self, inode: int) -> UpperNode:
        """Return the node of an inode in the upper, copied up if necessary."""
        node = self.nodes.by_inode.get(inode)
        return self.copy_up(inode) if node is None else node

    def directory(self, inode: int) -> UpperNode:
        """Return a directory in the upper, made if the lower has it.

        Raises NoSuchEntry when it has been removed.
        """
        node = self.nodes.by_inode.get(inode)
        if node is None:
            node = self._copy_up_way(inode)
        if node.kind != DIRECTORY:
            raise errors.NotADirectory(f"inode {inode} is a file")
        if node.is_orphan:
            raise errors.NoSuchEntry(f"the directory {inode} has been removed")
        return node

    def _copy_up_way(self, inode: int) -> UpperNode:
        """Make a directory of the lower, and its parents, in the upper."""
        way: list[tuple[Node, bytes]] = []
        at = inode
        while at not in self.nodes.by_inode:
            original = self.tree.getattr(at)
            if not stat.S_ISDIR(original.mode):
                raise errors.NotADirectory(f"inode {at} is a file")
            parent, name = self.tree.places(at)[0]
            way.append((original, name))
            at = parent
        node = self.nodes.by_inode[at]
        if node.lower != at or way[-1][1] in node.children:
            raise errors.NoSuchEntry(f"the directory {inode} has been removed")
        for original, name in reversed(way):
            attributes = self._attributes(original)
            with self.upper.changes.same_times(node):
                made = self.upper.changes.mkdir(node, name, attributes, shows_lower=True)
            made.lower = original.inode
            self._take(made, original.inode)
            node = made
        return node

    def _take(self, copy: UpperNode, inode: int) -> None:
        """Give a copy the number of its original, which the kernel may have known for long."""
        copy.inode, copy.known = inode, None
        self.nodes.by_inode[inode] = copy

    def _attributes(self, original: Node) -> Attributes:
        """Return the attributes of a copy."""
        return Attributes(stat.S_IMODE(original.mode), self._owner, (original.mtime_ns, original.mtime_ns))

    def copy_up(self, inode: int, size: int | None = None) -> UpperNode:
        """Copy a node of the lower to the upper; of a file the first `size` bytes, or all.

        All its names are copied up, or none: a file that has lost them is made an orphan.
        """
        original = self.tree.getattr(inode)
        if stat.S_ISDIR(original.mode):
            return self.directory(inode)
        shown = [(parent, name) for parent, name in self.tree.places(inode) if self.nodes.is_shown(parent, name)]
        parent, name = (self.directory(shown[0][0]), shown[0][1]) if shown else (None, b"%x" % inode)
        where = self.upper.orphans.top if parent is None else parent
        attributes = self._attributes(original)
        if size not in (None, original.size):
            attributes = attributes._replace(times=(original.mtime_ns, None))  # its content changes
        changes = self.upper.changes
        with changes.same_times(where):
            if stat.S_ISLNK(original.mode):
                # It cannot have the attribute that keeps its number: the next worker gives it another one.
                node = changes.symlink(where, name, attributes, self.tree.readlink(inode))
            else:
                chunks = self._chunks(inode, original.size if size is None else min(size, original.size))
                node = changes.copy_up(where, name, attributes, chunks, self.nodes.origin(inode), size)
        self._take(node, inode)
        if parent is not None:
            self.order.entered(parent, name)
        for holder, another in shown[1:]:
            self._link_copy(node, holder, another)
        return node

    def _chunks(self, inode: int, size: int) -> Iterator[bytes]:
        content = self.tree.content(inode)
        for offset in range(0, size, COPIED_AT_ONCE):
            yield content_module.read(content, offset, min(COPIED_AT_ONCE, size - offset))

    def _link_copy(self, node: UpperNode, holder: int, name: bytes) -> None:
        directory = self.directory(holder)
        with self.upper.changes.same_times(directory):
            self.upper.changes.link(node, directory, name)
        self.order.entered(directory, name)

    def link_all(self, node: UpperNode) -> None:
        """Finish a copy-up that was stopped between the names of a file."""
        for holder, name in self.tree.places(node.inode):
            if self.nodes.is_shown(holder, name):
                self._link_copy(node, holder, name)

    def child(self, parent: int, name: bytes) -> Child | None:
        """Return the child with this name: a node of the upper, else one of the lower, else None."""
        if len(name) > NAME_MAX:
            raise errors.NameTooLong(f"a name of {len(name)} bytes")
        if name in (b"", b".", b"..") or b"/" in name or b"\0" in name:
            raise errors.InvalidRequest(f"{text_of(name)!r} cannot be a name")
        directory = self.nodes.by_inode.get(parent)
        if directory is not None and directory.is_orphan:
            raise errors.NoSuchEntry(f"the directory {parent} has been removed")
        try:
            there = self.overlaid.find(parent, name)
        except errors.NoSuchEntry:
            return None
        copy = self.nodes.by_inode.get(there.inode)
        if copy is None or isinstance(there, UpperNode) or is_directory(there):
            return there
        self.link_all(copy)
        return copy


def is_directory(there: Child) -> bool:
    """Return True for a directory, in the upper or the lower."""
    return stat.S_ISDIR(there.mode) if isinstance(there, Node) else there.kind == DIRECTORY


class RequestJournal:
    """The change that a worker is making, noted in `memory` (JOURNAL_BYTES) for the worker that takes over.

    The kernel sends the request of a worker that died again. Most requests can simply be done twice; but "create
    this name" fails the second time, because the name exists. So before such a change a worker notes it in memory
    that outlives the worker (made before the workers are forked; without it no note outlives the process), and
    clears the note when the reply has been sent. A new worker that gets the same request from the same thread
    knows that it was under way, and checks if it was carried out.

    `requester` is the thread (the pid in FUSE's header) whose request is served; `resent` is True if the kernel
    has sent the request before. The adapter sets both.
    """

    def __init__(self, memory: mmap.mmap | bytearray | None = None) -> None:
        self._memory = memoryview(bytearray(JOURNAL_BYTES) if memory is None else memory)
        self.requester = 0
        self.resent = True
        self._left: tuple[int, str, Key, Key] | None = self._read()

    def _read(self) -> tuple[int, str, Key, Key] | None:
        (length,) = _LENGTH.unpack_from(self._memory)
        if not length or length > JOURNAL_BYTES - _LENGTH.size:
            return None
        requester, what, key, about = marshal.loads(self._memory[_LENGTH.size : _LENGTH.size + length])
        return requester, what, key, about

    def begin(self, what: str, key: Key, about: Key = ()) -> None:
        """Note a coming change: `key` identifies its request, `about` serves to check the result."""
        entry = marshal.dumps((self.requester, what, key, about))
        self.drop_previous()  # the length comes last: a stop in between leaves no partial note
        if len(entry) <= JOURNAL_BYTES - _LENGTH.size:
            self._memory[_LENGTH.size : _LENGTH.size + len(entry)] = entry
            _LENGTH.pack_into(self._memory, 0, len(entry))

    def clear(self) -> None:
        """Clear the note: the reply has been sent.

        A note of the previous worker stays until it is known that its request does not come again: if this worker
        dies, the next one may need the note.
        """
        if self._left is None:
            _LENGTH.pack_into(self._memory, 0, 0)

    def drop_previous(self) -> None:
        """Drop the note of the previous worker: the kernel sends its request again before new ones, or never."""
        self._left = None
        self.clear()

    def repeats(self, what: str, key: Key) -> Key | None:
        """Return the `about` of the previous worker's note, if that was for this request of the same thread; once.

        A thread waits for its reply; so if it sends another request, the previous one was answered.
        """
        if self._left is None or not self.resent or self._left[0] != self.requester:
            return None
        _, left, left_key, about = self._left
        self._left = None
        return about if (left, left_key) == (what, key) else None
