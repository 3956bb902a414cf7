"""Changes of the names in an upper: new nodes, copies of the lower, links, removals and renames.

Each change is one atomic system call, after preparations in work/ (`overlay/work_directory.py`); so a stop at any
call leaves the upper as it was or with the whole change. The names in memory change when the last call has
succeeded: an error leaves them true.

`overlay/writable_tree.py` decides what is copied up, and which names have to be hidden (`hide`: the lower has the
old name, too).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator

from wdsfs.inodes import UP
from wdsfs.overlay.upper_files import EXCHANGE, NOREPLACE, WITH_WHITEOUT, Attributes, UpperFiles
from wdsfs.overlay.upper_format import (
    DIRECTORY,
    FILE,
    OPAQUE,
    OPEN_DIRECTORY,
    ORIGIN,
    OTHER,
    SYMLINK,
    THE_WHITEOUT,
    Origin,
    Place,
    UpperNode,
)
from wdsfs.overlay.whiteouts import Whiteouts
from wdsfs.overlay.work_directory import Orphans, WorkDirectory, orphan_name

_NO_SUCH_RENAME = {errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}


class UpperChanges:
    """Makes, copies, removes and moves names of an upper.

    REQUIRES for new nodes: the upper has nothing under the name, or a whiteout; copies replace no whiteout.
    """

    def __init__(self, files: UpperFiles, work: WorkDirectory, whiteouts: Whiteouts, orphans: Orphans) -> None:
        self.files = files
        self.work = work
        self.whiteouts = whiteouts
        self.orphans = orphans
        self.calls = files.calls
        self._renames_with_whiteout = True

    # --- new nodes

    def create(self, parent: UpperNode, name: bytes, attributes: Attributes) -> UpperNode:
        """Return a new, empty file."""
        if name in parent.children or not self.files.is_plain(attributes):
            return self._make_file(parent, name, attributes, lambda node, fd: 0)
        # Made directly in its place: this call is most of the cost of writing many small files.
        directory = self.files.directory(parent)
        fd = self.calls.create(name, os.O_RDWR, attributes.mode, directory)
        try:
            status = os.fstat(fd)
            if stat.S_IMODE(status.st_mode) != attributes.mode:  # the umask of this process
                self.calls.chmod(name, attributes.mode, directory)
        except BaseException:
            os.close(fd)
            self.work.throw_away(name, directory)
            raise
        node = _new_node(FILE, parent, name, status)
        parent.enter(name, node)
        self.files.keep(node, fd)
        return node

    def _make_file(
        self, parent: UpperNode, name: bytes, attributes: Attributes, fill: Callable[[UpperNode, int], int]
    ) -> UpperNode:
        """Make a file whose content `fill` writes; the content is on disk before the file gets its name.

        `fill` gets the node and a descriptor, and returns how many bytes it has written. An empty file is not
        synced.
        """
        with self.work.prepared() as temporary:
            fd = self.calls.create(temporary, os.O_RDWR, 0o600, self.work.fd)
            try:
                node = _new_node(FILE, parent, name, os.fstat(fd))
                filled = fill(node, fd)
                self.files.dress(temporary, self.work.fd, fd, node, attributes)
                if filled:
                    self.calls.fsync(fd)
                self._publish(temporary, node)
            except BaseException:
                os.close(fd)
                raise
        node.dirty = not filled
        self.files.keep(node, fd)
        return node

    def mkdir(
        self, parent: UpperNode, name: bytes, attributes: Attributes, *, shows_lower: bool = False
    ) -> UpperNode:
        """Return a new directory, through which the lower's shows if that is said."""
        # Else opaque, because a later version of the shard may have a directory of this name.
        opaque = parent.may_show_lower and not shows_lower
        with self.work.prepared() as temporary:
            node = self._make_directory(temporary, parent, name, attributes, opaque)
            self._publish(temporary, node)
        return node

    def _make_directory(
        self, temporary: bytes, parent: UpperNode, name: bytes, attributes: Attributes, opaque: bool
    ) -> UpperNode:
        """Make a directory in work/, complete but for its name."""
        self.calls.mkdir(temporary, 0o700, self.work.fd)
        fd = os.open(temporary, OPEN_DIRECTORY, dir_fd=self.work.fd)
        try:
            node = _new_node(DIRECTORY, parent, name, os.fstat(fd))
            if opaque:
                self.calls.setxattr(fd, OPAQUE, b"y")
                node.opaque = True
            self.files.dress(temporary, self.work.fd, fd, node, attributes)
        finally:
            os.close(fd)
        return node

    def mknod(
        self, parent: UpperNode, name: bytes, attributes: Attributes, form: int, device: int = 0
    ) -> UpperNode:
        """Return a new fifo, socket or device of the type `form` (S_IFIFO ...)."""
        with self.work.prepared() as temporary:
            self.calls.mknod(temporary, form | 0o600, device, self.work.fd)
            return self._place_special(temporary, OTHER, parent, name, attributes)

    def symlink(self, parent: UpperNode, name: bytes, attributes: Attributes, target: bytes) -> UpperNode:
        """Return a symbolic link."""
        with self.work.prepared() as temporary:
            self.calls.symlink(target, temporary, self.work.fd)
            return self._place_special(temporary, SYMLINK, parent, name, attributes)

    def _place_special(
        self, temporary: bytes, kind: int, parent: UpperNode, name: bytes, attributes: Attributes
    ) -> UpperNode:
        status = os.stat(temporary, dir_fd=self.work.fd, follow_symlinks=False)
        node = _new_node(kind, parent, name, status)
        self.files.dress(temporary, self.work.fd, -1, node, attributes)
        self._publish(temporary, node)
        return node

    def link(self, node: UpperNode, parent: UpperNode, name: bytes) -> None:
        """Make another name for a file."""
        directory, home = self.files.directory(parent), self.files.where(node)
        if name in parent.children:
            with self.work.prepared() as temporary:
                self.calls.link(node.name, home, temporary, self.work.fd)
                self.calls.rename(temporary, self.work.fd, name, directory)
        else:
            self.calls.link(node.name, home, name, directory)
        node.more = [*(node.more or []), (parent, name)]
        parent.enter(name, node)

    def _publish(self, temporary: bytes, node: UpperNode) -> None:
        """Move a node from work/ to its place, where nothing is, or a whiteout."""
        parent, name = node.places()[0]
        directory = self.files.directory(parent)
        if name not in parent.children:
            self.calls.rename(temporary, self.work.fd, name, directory, NOREPLACE)
        elif node.kind != DIRECTORY:
            self.calls.rename(temporary, self.work.fd, name, directory)
        else:
            self.calls.rename(temporary, self.work.fd, name, directory, EXCHANGE)
            self.work.throw_away(temporary)
        parent.enter(name, node)

    # --- copying up

    def copy_up(
        self,
        parent: UpperNode,
        name: bytes,
        attributes: Attributes,
        content: Iterable[bytes],
        origin: Origin,
        size: int | None,
    ) -> UpperNode:
        """Return a file with the content (cut or filled up to `size`) of one in the lower."""

        def fill(node: UpperNode, fd: int) -> int:
            end = 0
            for chunk in content:
                end += self.files.write_all(fd, chunk, end)
            if size is not None and size != end:
                self.calls.truncate(fd, size)
            self.calls.setxattr(fd, ORIGIN, b"%d:%x" % origin)
            node.origin = origin
            return end

        return self._make_file(parent, name, attributes, fill)

    @contextlib.contextmanager
    def same_times(self, parent: UpperNode) -> Iterator[None]:
        """Restore the times of a directory after a copy-up into it, so that users see no change."""
        before = os.fstat(self.files.directory(parent))
        yield
        if parent is not self.orphans.top:
            with contextlib.suppress(OSError):
                times = before.st_atime_ns, before.st_mtime_ns
                self.calls.utime(b".", times, self.files.directory(parent))

    # --- removing

    def remove(self, parent: UpperNode, name: bytes, node: UpperNode, *, hide: bool) -> None:
        """Remove a name of a file, or an empty directory with all its whiteouts.

        A node that loses its last name while the kernel knows it becomes an orphan.
        """
        is_known = not node.more and node.known != 0
        with self.work.prepared() as temporary:
            new, where = (orphan_name(node), self.orphans.fd) if is_known else (temporary, self.work.fd)
            self._move_away((parent, name), hide, new, where)
        self._drop_name((parent, name), node, hide=hide)
        if is_known:
            self.orphans.adopt(node)
            return
        self.work.throw_away(temporary)
        if node.parent is None:
            self.files.drop(node)

    def _move_away(self, place: Place, hide: bool, new: bytes, where: int) -> None:
        """Move a node out of the upper, and with `hide` leave a whiteout."""
        parent, name = place
        directory = self.files.directory(parent)
        if not hide:
            self.calls.rename(name, directory, new, where)
            return
        self.whiteouts.make(new, where, parent)
        try:
            self.calls.rename(new, where, name, directory, EXCHANGE)
        except BaseException:
            self.work.throw_away(new, where)
            raise

    def _drop_name(self, place: Place, node: UpperNode, *, hide: bool = False) -> None:
        """Note, in memory, that a node has lost one of its names."""
        parent, name = place
        if hide:
            parent.children[name] = THE_WHITEOUT
        else:
            del parent.children[name]
        parent.dirty = True
        _set_places(node, _other_places(node, place))

    # --- moving

    def rename(
        self, parent: UpperNode, name: bytes, node: UpperNode, to: UpperNode, new: bytes, hide: bool
    ) -> None:
        """Rename a node; an existing target (a file, or an empty directory) is removed.

        REQUIRES: the two are not the same file; a directory shows nothing of the lower.
        """
        victim = to.children.get(new)
        if victim is THE_WHITEOUT:
            victim = None
        self._make_independent(node, to)
        if victim is not None:
            self._save(to, new, victim)
        try:
            self._move(parent, name, node, to, new, hide)
        except OSError:
            if victim is not None and victim.kind != DIRECTORY and not victim.more:
                self.orphans.throw_away(orphan_name(victim))
            raise
        if victim is not None and victim.kind != DIRECTORY:
            self._drop_name((to, new), victim)
            if not victim.more and victim.parent is None and victim.known != 0:
                self.orphans.adopt(victim)
            elif victim.parent is None:
                self.files.drop(victim)
        others = _other_places(node, (parent, name))
        self._drop_name((parent, name), node, hide=hide)
        _set_places(node, [(to, new), *others])
        to.enter(new, node)

    def _make_independent(self, node: UpperNode, to: UpperNode) -> None:
        """Make a directory opaque at its new place, so that nothing of the lower shows through."""
        if node.kind == DIRECTORY and to.may_show_lower and not node.opaque:
            self.whiteouts.make_opaque(node)

    def _save(self, to: UpperNode, new: bytes, victim: UpperNode) -> None:
        """Keep a node that is about to be replaced as an orphan, if the kernel knows it."""
        directory = self.files.directory(to)
        if victim.kind == DIRECTORY:
            self._replace_by_bare(to, new, victim)
        elif not victim.more and victim.known != 0:
            self.orphans.throw_away(orphan_name(victim))  # of an earlier attempt
            self.calls.link(new, directory, orphan_name(victim), self.orphans.fd)

    def _replace_by_bare(self, to: UpperNode, new: bytes, victim: UpperNode) -> None:
        """Replace an empty directory, which may hold whiteouts, by a bare one: a rename replaces only that."""
        status = self.files.stat(victim)
        mode = victim.mode if victim.mode >= 0 else stat.S_IMODE(status.st_mode)
        owner = (status.st_uid, status.st_gid) if self.files.as_root else None
        attributes = Attributes(mode, owner, (status.st_atime_ns, status.st_mtime_ns))
        with self.work.prepared() as temporary:
            bare = self._make_directory(temporary, to, new, attributes, opaque=True)
            self.calls.rename(temporary, self.work.fd, new, self.files.directory(to), EXCHANGE)
        self._drop_name((to, new), victim)
        to.enter(new, bare)
        if victim.known == 0:
            self.work.throw_away(temporary)
            self.files.drop(victim)
            return
        with contextlib.suppress(OSError):
            self.calls.rename(temporary, self.work.fd, orphan_name(victim), self.orphans.fd)
            self.orphans.adopt(victim)

    def _move(
        self, parent: UpperNode, name: bytes, node: UpperNode, to: UpperNode, new: bytes, hide: bool
    ) -> None:
        """Make the system calls of a rename.

        | under the new name is       | nothing is left under the old | with `hide`: a whiteout is left there |
        |-----------------------------|-------------------------------|---------------------------------------|
        | nothing                     | rename                        | rename with whiteout (W); else a      |
        |                             |                               | whiteout there first, and exchange    |
        | a whiteout, for a directory | exchange, remove the whiteout | exchange                              |
        | a whiteout, for a file      | rename                        | W; else exchange                      |
        | what `_save` has left       | rename                        | W; else `_move_in_steps`              |
        """
        directory, target = self.files.directory(parent), self.files.directory(to)
        there = to.children.get(new)
        if hide:
            self.whiteouts.mark(parent)
        if there is THE_WHITEOUT and node.kind == DIRECTORY:  # a directory does not replace a device
            self.calls.rename(name, directory, new, target, EXCHANGE)
            if not hide:
                self.work.throw_away(name, directory)
        elif not hide:
            self.calls.rename(name, directory, new, target)
        elif not self._rename_with_whiteout(name, directory, new, target):
            if there is not None and there is not THE_WHITEOUT:
                self._move_in_steps(parent, name, node, to, new)
                return
            if there is None:
                self.whiteouts.make(new, target, to)
                to.children[new] = THE_WHITEOUT  # true if the next call fails; the lower has no such name
            self.calls.rename(name, directory, new, target, EXCHANGE)

    def _rename_with_whiteout(self, name: bytes, directory: int, new: bytes, target: int) -> bool:
        """Rename and leave a whiteout, in one call; False where the file system cannot do that."""
        if self.whiteouts.by_attribute or not self._renames_with_whiteout:
            return False
        try:
            self.calls.rename(name, directory, new, target, WITH_WHITEOUT)
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
        directory, target = self.files.directory(parent), self.files.directory(to)
        if node.kind == DIRECTORY:
            self.calls.rename(name, directory, new, target, EXCHANGE)
        else:
            with self.work.prepared() as temporary:
                self.calls.link(name, directory, temporary, self.work.fd)
                self.calls.rename(temporary, self.work.fd, new, target)
        with self.work.prepared() as temporary:
            self.whiteouts.make(temporary, self.work.fd, parent)
            self.calls.rename(temporary, self.work.fd, name, directory, EXCHANGE)
        self.work.throw_away(temporary)

    def exchange(self, first: Place, node: UpperNode, second: Place, other: UpperNode) -> None:
        """Swap two nodes. REQUIRES: as for `rename`."""
        (parent, name), (to, new) = first, second
        self._make_independent(node, to)
        self._make_independent(other, parent)
        self.calls.rename(name, self.files.directory(parent), new, self.files.directory(to), EXCHANGE)
        _set_places(node, [second, *_other_places(node, first)])
        _set_places(other, [first, *_other_places(other, second)])
        to.enter(new, node)
        parent.enter(name, other)


def _new_node(kind: int, parent: UpperNode, name: bytes, status: os.stat_result) -> UpperNode:
    """Return the node of a file that this process has made: the kernel does not know it yet."""
    node = UpperNode(kind, status.st_ino | UP, parent, name)
    node.known = 0
    return node


def _other_places(node: UpperNode, place: Place) -> list[Place]:
    return [other for other in node.places() if other != place]


def _set_places(node: UpperNode, places: list[Place]) -> None:
    """Set all the names of a node in memory."""
    if places:
        (node.parent, node.name), *more = places
        node.more = more or None
    else:
        node.parent = None
