"""Changes to an upper: each is one atomic system call, whatever has to be prepared for it.

What takes more than one call is made in work/ (a file with its content, owner, attributes) and then moved into
place by one rename. So a stop at any call leaves the upper as it was or as it is to be, and things in work/ that
the next start throws away. The names in memory (`upper_format.UpperNode`) change when the last call has succeeded,
so an error leaves them as true as they were.

An inode number that the kernel knows must not come to mean another file. So what loses its last name while the
kernel knows it becomes an *orphan*: it is moved to work/orphans/<inode>, which keeps its content readable, by the
next worker too, and its number taken.

Names are reached by descriptors of their directories, step by step: paths may be longer than PATH_MAX. Few
descriptors are open at a time, and none is needed again: a handle is never more than a node.

What is to be hidden, copied up or made opaque is for `overlay/writable_tree.py` to say. One thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from wdsfs.errors import OverlayUnusable
from wdsfs.inodes import UP
from wdsfs.overlay.overlay_directory import OverlayDirectory, sync_directory
from wdsfs.overlay.system_calls import EXCHANGE, FILE_FLAGS, NOREPLACE, WITH_WHITEOUT, SystemCalls
from wdsfs.overlay.upper_format import (
    DIRECTORY,
    FILE,
    MODE,
    OPAQUE,
    OPEN_DIRECTORY,
    ORIGIN,
    OTHER,
    SYMLINK,
    THE_WHITEOUT,
    WHITED_OUT,
    WHITEOUT,
    Origin,
    UpperNode,
    load,
)

DESCRIPTORS = 128  # open directories, and as many open files
_LEAST = 16  # so many stay open at least: one call works with a few at a time
_PROTOTYPE = b"whiteout"  # in work/; all whiteouts are hard links to it
_FULL = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
}  # whoever wants to write gets these; that is no reason not to start
_NO_SUCH_RENAME = {errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}


class UpperAttributes(NamedTuple):
    """What something new is to have. `owner`: uid and gid, or None for those of this process; times in ns."""

    mode: int
    owner: tuple[int, int] | None = None
    times: tuple[int, int] | None = None


class UpperDirectory:
    """The upper of an overlay, for one process at a time: the caller has it on `overlay_directory.hold`.

    `inherited`: a worker before this one has died, and the kernel still knows what that worker told it; so orphans
    stay. `owner` (uid, gid) is that of the top directory if it has to be made. Raises OverlayUnusable, OSErrors.
    """

    def __init__(
        self,
        place: OverlayDirectory,
        owner: tuple[int, int] | None = None,
        inherited: bool = False,
        calls: SystemCalls | None = None,
        descriptors: int = DESCRIPTORS,
    ) -> None:
        self.place = place
        self.calls = SystemCalls() if calls is None else calls
        self.as_root = os.geteuid() == 0
        self._own = os.geteuid(), os.getegid()
        self._descriptors = max(descriptors, _LEAST)
        self._directories: OrderedDict[UpperNode, int] = OrderedDict()
        self._files: OrderedDict[UpperNode, int] = OrderedDict()
        self._unwritable: set[UpperNode] = set()  # those of _files that could only be opened for reading
        self._pinned: dict[UpperNode, int] = {}
        self._temporaries = 0
        self._by_attribute = False
        self._renames_with_whiteout = True
        self.read_only = self._make_directories(owner)
        self.orphans = UpperNode(DIRECTORY, 0, None, b"orphans")
        try:
            self._open(inherited)
        except BaseException:
            self._close_all()
            raise

    # --- starting and ending

    def _make_directories(self, owner: tuple[int, int] | None) -> bool:
        """Make what is missing in DIR. Whether the file system is read-only."""
        place = self.place
        if place.is_bare:
            raise OverlayUnusable(
                f"{place.path} is not empty and no overlay of wdsfs; an upper directory that the kernel's "
                f"overlayfs wrote can be given to diff and commit, not be mounted"
            )
        try:
            new = not place.upper.is_dir()
            for path, mode in ((place.upper, 0o755), (place.work, 0o700), (place.work / "orphans", 0o700)):
                if not path.is_dir():
                    path.mkdir(mode, parents=True)
                    path.chmod(mode)  # whatever the umask of whoever mounts
            if new and owner is not None and self.as_root:
                os.chown(place.upper, *owner)
            if new:
                sync_directory(place.path)
        except OSError as error:
            if error.errno == errno.EROFS and place.upper.is_dir():
                return True
            raise OverlayUnusable(f"{place.path} cannot be used as an overlay: {error.strerror}") from error
        return bool(os.statvfs(place.upper).f_flag & os.ST_RDONLY)

    def _open(self, inherited: bool) -> None:
        top = os.open(self.place.upper, OPEN_DIRECTORY)
        self.top = UpperNode(DIRECTORY, 0, None, b"")  # so that it is closed when loading fails
        self._pinned[self.top] = top
        try:
            self.work = os.open(self.place.work, OPEN_DIRECTORY)
            self._pinned[UpperNode(DIRECTORY, 0, None, b"work")] = self.work
            self._pinned[self.orphans] = os.open(b"orphans", OPEN_DIRECTORY, dir_fd=self.work)
        except OSError:
            if not self.read_only:
                raise
            self.work = -1
        if not self.read_only:
            self._clear(inherited)
            self._find_prototype()
            if not inherited:
                self._probe()
        loaded = load(top)
        del self._pinned[self.top]
        self.top = loaded
        self._pinned[loaded] = top

    def _clear(self, inherited: bool) -> None:
        """Throw away what former processes were about to do, and orphans unless the kernel may know them."""
        for name in map(os.fsencode, os.listdir(self.work)):
            if name.startswith(b"#"):
                self._throw_away(name, self.work)
        orphans = self._pinned[self.orphans]
        self.orphans.children = load(orphans).children
        for name, node in list(self.orphans.children.items()):
            if inherited and node.kind != WHITEOUT:
                node.parent, node.inode = self.orphans, _number(name)
            else:
                del self.orphans.children[name]
                self._throw_away(name, orphans)

    def _probe(self) -> None:
        """Find out whether the file system can take an overlay. Raises OverlayUnusable when it cannot."""
        name, other = self._temporary(), self._temporary()
        needed = "attributes in the namespace 'user'"
        try:
            fd = self.calls.create(name, os.O_RDWR, 0o600, self.work)
            try:
                self.calls.setxattr(fd, ORIGIN, b"0:0")
            finally:
                os.close(fd)
            needed = "hard links, or the exchange of two names"
            self.calls.link(_PROTOTYPE, self.work, other, self.work)
            self.calls.rename(name, self.work, other, self.work, EXCHANGE)
        except OSError as error:
            if error.errno not in _FULL:
                raise OverlayUnusable(
                    f"the file system of {self.place.path} cannot take an overlay: it lacks {needed} "
                    f"({error.strerror})"
                ) from None
        finally:
            self._throw_away(name, self.work)
            self._throw_away(other, self.work)

    def _find_prototype(self) -> None:
        """See which form whiteouts have here, or make the first."""
        try:
            status = os.stat(_PROTOTYPE, dir_fd=self.work, follow_symlinks=False)
            self._by_attribute = not stat.S_ISCHR(status.st_mode)
        except FileNotFoundError:
            try:
                self._make_prototype()
            except OSError as error:
                if error.errno not in _FULL:
                    raise

    def _make_prototype(self) -> None:
        """The file that whiteouts are links to: a device, or where none can be made, a file with an attribute."""
        with self._prepared() as temporary:
            try:
                self.calls.mknod(temporary, stat.S_IFCHR, 0, self.work)
                self._by_attribute = False
            except PermissionError:
                self._by_attribute = True
                fd = self.calls.create(temporary, os.O_RDWR, 0o600, self.work)
                try:
                    self.calls.setxattr(fd, WHITED_OUT, b"y")
                finally:
                    os.close(fd)
            self.calls.rename(temporary, self.work, _PROTOTYPE, self.work)

    def close(self, clean: bool = False) -> None:
        """Close every descriptor. At a `clean` end (the kernel knows nothing any more) orphans are removed, and
        what is still in memory is written to disk. Raises OSErrors."""
        try:
            if clean and not self.read_only:
                for name in list(self.orphans.children):
                    self._throw_away(name, self._pinned[self.orphans])
                self.calls.syncfs(self._pinned[self.top])
        finally:
            self._close_all()

    def _close_all(self) -> None:
        for table in (self._files, self._directories, self._pinned):
            for fd in table.values():
                os.close(fd)
            table.clear()

    # --- descriptors

    def directory(self, node: UpperNode) -> int:
        """A descriptor of a directory, for the next few calls."""
        fd = self._pinned.get(node)
        if fd is not None:
            return fd
        fd = self._directories.get(node)
        if fd is None:
            fd = self._descend(node)
            self._directories[node] = fd
            _shrink(self._directories, self._descriptors)
        else:
            self._directories.move_to_end(node)
        return fd

    def _descend(self, node: UpperNode) -> int:
        """Open a directory from the nearest open one above it."""
        way: list[UpperNode] = []
        at: UpperNode | None = node
        while at is not None and at not in self._pinned and at not in self._directories:
            way.append(at)
            at = at.parent
        if at is None:
            raise FileNotFoundError(errno.ENOENT, "it has been removed", os.fsdecode(node.name))
        fd = own = self._pinned[at] if at in self._pinned else self._directories[at]
        for step in reversed(way):
            try:
                inner = os.open(step.name, OPEN_DIRECTORY, dir_fd=fd)
            finally:
                if fd != own:
                    os.close(fd)
            fd = inner
        return fd

    def where(self, node: UpperNode) -> int:
        """A descriptor of the directory that holds something."""
        if node.parent is None:
            raise FileNotFoundError(errno.ENOENT, "it has been removed", os.fsdecode(node.name))
        return self.directory(node.parent)

    def file(self, node: UpperNode, write: bool = False) -> int:
        """A descriptor of a file, for the next few calls; to be written, or raises why it cannot be."""
        fd = self._files.get(node)
        if fd is not None and not (write and node in self._unwritable):
            self._files.move_to_end(node)
            return fd
        self._drop(node)
        directory = self.where(node)
        try:
            fd = os.open(node.name, os.O_RDWR | FILE_FLAGS, dir_fd=directory)
        except OSError as error:
            if write or error.errno not in (errno.EROFS, errno.EACCES, errno.ETXTBSY, errno.EPERM):
                raise
            fd = os.open(node.name, os.O_RDONLY | FILE_FLAGS, dir_fd=directory)
            self._unwritable.add(node)
        self._keep(node, fd)
        return fd

    def _keep(self, node: UpperNode, fd: int) -> None:
        self._files[node] = fd
        _shrink(self._files, self._descriptors)
        if len(self._unwritable) > len(self._files):
            self._unwritable &= self._files.keys()

    def _drop(self, node: UpperNode) -> None:
        self._unwritable.discard(node)
        for table in (self._files, self._directories):
            fd = table.pop(node, None)
            if fd is not None:
                os.close(fd)

    # --- reading

    def stat(self, node: UpperNode) -> os.stat_result:
        fd = self._files.get(node)
        if fd is None and node.kind == DIRECTORY:
            fd = self._directories.get(node)
            if node is self.top:
                fd = self._pinned[node]
        if fd is not None:
            return os.fstat(fd)
        return os.stat(node.name, dir_fd=self.where(node), follow_symlinks=False)

    def read(self, node: UpperNode, offset: int, size: int) -> bytes:
        return os.pread(self.file(node), size, offset)

    def readlink(self, node: UpperNode) -> bytes:
        return os.readlink(node.name, dir_fd=self.where(node))

    def _attributed(self, node: UpperNode) -> int | None:
        """A descriptor of what can have attributes of users: files and directories."""
        if node.kind == FILE:
            return self.file(node)
        return self.directory(node) if node.kind == DIRECTORY else None

    def listxattr(self, node: UpperNode) -> list[bytes]:
        fd = self._attributed(node)
        return [] if fd is None else [os.fsencode(name) for name in os.listxattr(fd)]

    def getxattr(self, node: UpperNode, name: bytes) -> bytes:
        fd = self._attributed(node)
        if fd is None:
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
        return os.getxattr(fd, name)

    def statvfs(self) -> os.statvfs_result:
        return os.fstatvfs(self._pinned[self.top])

    # --- making things in work/

    def _temporary(self) -> bytes:
        self._temporaries += 1
        return b"#%d-%x" % (os.getpid(), self._temporaries)

    @contextlib.contextmanager
    def _prepared(self) -> Iterator[bytes]:
        """A name in work/ for something on its way; when the block fails, nothing stays under it."""
        name = self._temporary()
        try:
            yield name
        except BaseException:
            self._throw_away(name, self.work)
            raise

    def _throw_away(self, name: bytes, directory: int) -> None:
        """Remove a file, or a directory with nothing but whiteouts in it. What fails is left to the next start."""
        with contextlib.suppress(OSError):
            try:
                self.calls.unlink(name, directory)
                return
            except IsADirectoryError:
                fd = os.open(name, OPEN_DIRECTORY, dir_fd=directory)
            try:
                for entry in os.listdir(fd):
                    self.calls.unlink(os.fsencode(entry), fd)
            finally:
                os.close(fd)
            self.calls.rmdir(name, directory)

    def _whiteout(self, name: bytes, directory: int, parent: UpperNode) -> None:
        """Make a whiteout that is, or is going to be, in the directory `parent`."""
        self._mark(parent)
        try:
            self.calls.link(_PROTOTYPE, self.work, name, directory)
        except OSError as error:
            if error.errno not in (errno.EMLINK, errno.ENOENT):
                raise
            self._make_prototype()  # the old one has as many links as a file can have
            self.calls.link(_PROTOTYPE, self.work, name, directory)

    def _mark(self, parent: UpperNode) -> None:
        """Whiteouts in the form of an attribute are looked for in marked directories only, by the kernel."""
        if self._by_attribute:
            fd = self.directory(parent)
            if OPAQUE not in os.listxattr(fd):
                self.calls.setxattr(fd, OPAQUE, b"x")

    def _is_plain(self, attributes: UpperAttributes, kind: int) -> bool:
        """Whether something made by this process without further ado gets these attributes."""
        if attributes.times is not None or self._widened(attributes.mode, kind) != attributes.mode:
            return False
        return not self.as_root or attributes.owner is None or attributes.owner == self._own

    def _widened(self, mode: int, kind: int) -> int:
        """The permission bits that a file has to have so that this process can always open it."""
        if self.as_root or kind not in (FILE, DIRECTORY):
            return mode
        return mode | (0o700 if kind == DIRECTORY else 0o600)

    def _dress(
        self, name: bytes, fd: int, node: UpperNode, attributes: UpperAttributes, parent: UpperNode
    ) -> None:
        """Give something new in work/, whose descriptor (-1: none) is `fd`, what it is to have."""
        if attributes.times is None:
            attributes = self._as_in(parent, node.kind, attributes)
        if attributes.owner is not None and self.as_root:
            self.calls.chown(name, *attributes.owner, self.work)
        if node.kind != SYMLINK:
            mode = self._widened(attributes.mode, node.kind)
            if mode != attributes.mode:
                self.calls.setxattr(fd, MODE, b"%o" % attributes.mode)
                node.mode = attributes.mode
            self.calls.chmod(name, mode, self.work)
        if attributes.times is not None:
            self.calls.utime(name, attributes.times, self.work)

    def _as_in(self, parent: UpperNode, kind: int, attributes: UpperAttributes) -> UpperAttributes:
        """What something new gets from a directory whose group is inherited, as where it is made in place."""
        above = os.fstat(self.directory(parent))
        if not above.st_mode & stat.S_ISGID:
            return attributes
        uid = -1 if attributes.owner is None else attributes.owner[0]
        mode = attributes.mode | (stat.S_ISGID if kind == DIRECTORY else 0)
        return attributes._replace(mode=mode, owner=(uid, above.st_gid))

    def _publish(self, temporary: bytes, node: UpperNode, parent: UpperNode, name: bytes) -> None:
        """Move something from work/ to its place, where there is nothing or a whiteout."""
        node.parent, node.name = parent, name
        directory = self.directory(parent)
        if name not in parent.children:
            self.calls.rename(temporary, self.work, name, directory, NOREPLACE)
        elif node.kind != DIRECTORY:
            self.calls.rename(temporary, self.work, name, directory)
        else:
            self.calls.rename(temporary, self.work, name, directory, EXCHANGE)
            self._throw_away(temporary, self.work)
        self._enter(node, parent, name)

    def _enter(self, node: UpperNode, parent: UpperNode, name: bytes) -> None:
        parent.children[name] = node
        parent.dirty = True

    def _new(self, kind: int, parent: UpperNode, name: bytes, status: os.stat_result) -> UpperNode:
        node = UpperNode(kind, status.st_ino | UP, parent, name)
        node.known = 0
        return node

    # --- new things; REQUIRES for all: the name is not in the upper, or as a whiteout

    def create(self, parent: UpperNode, name: bytes, attributes: UpperAttributes) -> UpperNode:
        """A new, empty file."""
        if name in parent.children or not self._is_plain(attributes, FILE):
            return self._create_aside(parent, name, attributes)
        directory = self.directory(parent)
        fd = self.calls.create(name, os.O_RDWR, attributes.mode, directory)
        try:
            status = os.fstat(fd)
            if stat.S_IMODE(status.st_mode) != attributes.mode:  # the umask of this process
                self.calls.chmod(name, attributes.mode, directory)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                self.calls.unlink(name, directory)
            raise
        node = self._new(FILE, parent, name, status)
        self._enter(node, parent, name)
        self._keep(node, fd)
        return node

    def _create_aside(self, parent: UpperNode, name: bytes, attributes: UpperAttributes) -> UpperNode:
        with self._prepared() as temporary:
            fd = self.calls.create(temporary, os.O_RDWR, 0o600, self.work)
            try:
                node = self._new(FILE, parent, name, os.fstat(fd))
                self._dress(temporary, fd, node, attributes, parent)
                self._publish(temporary, node, parent, name)
            except BaseException:
                os.close(fd)
                raise
        self._keep(node, fd)
        return node

    def mkdir(
        self, parent: UpperNode, name: bytes, attributes: UpperAttributes, opaque: bool = False
    ) -> UpperNode:
        """A new directory; `opaque` when the lower shows through its parent."""
        if name in parent.children or not self._is_plain(attributes, DIRECTORY):
            return self._mkdir_aside(parent, name, attributes, opaque)
        directory = self.directory(parent)
        self.calls.mkdir(name, attributes.mode, directory)
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if stat.S_IMODE(status.st_mode) & ~stat.S_ISGID != attributes.mode & ~stat.S_ISGID:
                self.calls.chmod(name, attributes.mode | status.st_mode & stat.S_ISGID, directory)
        except BaseException:
            with contextlib.suppress(OSError):
                self.calls.rmdir(name, directory)
            raise
        node = self._new(DIRECTORY, parent, name, status)
        self._enter(node, parent, name)
        if opaque:
            # Not needed, since the lower has no such name; only in case that it has one some day.
            with contextlib.suppress(OSError):
                self.make_opaque(node)
        return node

    def _mkdir_aside(
        self,
        parent: UpperNode,
        name: bytes,
        attributes: UpperAttributes,
        opaque: bool,
        origin: Origin | None = None,
    ) -> UpperNode:
        with self._prepared() as temporary:
            self.calls.mkdir(temporary, 0o700, self.work)
            fd = os.open(temporary, OPEN_DIRECTORY, dir_fd=self.work)
            try:
                node = self._new(DIRECTORY, parent, name, os.fstat(fd))
                if opaque:
                    self.calls.setxattr(fd, OPAQUE, b"y")
                    node.opaque = True
                self._dress(temporary, fd, node, attributes, parent)
            finally:
                os.close(fd)
            self._publish(temporary, node, parent, name)
        return node

    def mknod(
        self, parent: UpperNode, name: bytes, attributes: UpperAttributes, form: int, device: int = 0
    ) -> UpperNode:
        """A new fifo, socket or device of the type `form` (S_IFIFO ...)."""
        with self._prepared() as temporary:
            self.calls.mknod(temporary, form | 0o600, device, self.work)
            status = os.stat(temporary, dir_fd=self.work, follow_symlinks=False)
            kind = FILE if form == stat.S_IFREG else OTHER
            node = self._new(kind, parent, name, status)
            self._dress(temporary, -1, node, attributes, parent)
            self._publish(temporary, node, parent, name)
        return node

    def symlink(self, parent: UpperNode, name: bytes, attributes: UpperAttributes, target: bytes) -> UpperNode:
        with self._prepared() as temporary:
            self.calls.symlink(target, temporary, self.work)
            status = os.stat(temporary, dir_fd=self.work, follow_symlinks=False)
            node = self._new(SYMLINK, parent, name, status)
            self._dress(temporary, -1, node, attributes, parent)
            self._publish(temporary, node, parent, name)
        return node

    def link(self, node: UpperNode, parent: UpperNode, name: bytes) -> None:
        """Another name for a file."""
        directory = self.directory(parent)
        here = self.where(node)
        if name in parent.children:
            with self._prepared() as temporary:
                self.calls.link(node.name, here, temporary, self.work)
                self.calls.rename(temporary, self.work, name, directory)
        else:
            self.calls.link(node.name, here, name, directory)
        node.more = [*(node.more or []), (parent, name)]
        self._enter(node, parent, name)

    # --- copying up; REQUIRES: the upper has nothing under the name

    def copy_up(
        self,
        parent: UpperNode,
        name: bytes,
        attributes: UpperAttributes,
        content: Iterable[bytes],
        origin: Origin | None,
        size: int | None = None,
    ) -> UpperNode:
        """A file with the content (cut or filled up to `size`) of one in the lower.

        It is on disk before it takes the place of the other, but for an empty one.
        """
        with self._prepared() as temporary:
            fd = self.calls.create(temporary, os.O_RDWR, 0o600, self.work)
            try:
                node = self._new(FILE, parent, name, os.fstat(fd))
                node.known = None  # the kernel may have known the other for long
                end = 0
                for chunk in content:
                    self._write(fd, chunk, end)
                    end += len(chunk)
                if size is not None and size != end:
                    self.calls.truncate(fd, size)
                if origin is not None:
                    self.calls.setxattr(fd, ORIGIN, b"%d:%x" % origin)
                    node.origin = origin
                self._dress(temporary, fd, node, attributes, parent)
                if end:
                    self.calls.fsync(fd)
                with self._same_times(parent):
                    self._publish(temporary, node, parent, name)
            except BaseException:
                os.close(fd)
                raise
        node.dirty = not end
        self._keep(node, fd)
        return node

    def copy_up_directory(self, parent: UpperNode, name: bytes, attributes: UpperAttributes) -> UpperNode:
        """A directory through which the lower's shows."""
        with self._same_times(parent):
            node = self._mkdir_aside(parent, name, attributes, opaque=False)
        node.known = None
        return node

    def copy_up_symlink(
        self, parent: UpperNode, name: bytes, attributes: UpperAttributes, target: bytes
    ) -> UpperNode:
        with self._same_times(parent):
            node = self.symlink(parent, name, attributes, target)
        node.known = None
        return node

    def copy_up_link(self, node: UpperNode, parent: UpperNode, name: bytes) -> None:
        """Another name of a file that was copied up."""
        with self._same_times(parent):
            self.link(node, parent, name)

    @contextlib.contextmanager
    def _same_times(self, parent: UpperNode) -> Iterator[None]:
        """Nothing happens to the directory in the block, as far as a user can see."""
        fd = self.directory(parent)
        before = os.fstat(fd)
        yield
        if parent is not self.orphans:
            with contextlib.suppress(OSError):
                self.calls.utime(b".", (before.st_atime_ns, before.st_mtime_ns), self.directory(parent))

    # --- removing; `hide`: the lower has the name, too

    def hide(self, parent: UpperNode, name: bytes) -> None:
        """Remove a name that the lower has and the upper has not."""
        self._whiteout(name, self.directory(parent), parent)
        self._enter(THE_WHITEOUT, parent, name)

    def reveal(self, parent: UpperNode, name: bytes) -> None:
        """Take a whiteout away: what the lower has under its name is seen again."""
        self.calls.unlink(name, self.directory(parent))
        del parent.children[name]
        parent.dirty = True

    def remove(self, parent: UpperNode, name: bytes, node: UpperNode, hide: bool) -> None:
        """Remove a name of a file, or an empty directory with all its whiteouts."""
        directory = self.directory(parent)
        if not node.more and node.known != 0:
            self._move_away(parent, name, node, hide, _orphan_name(node), self._pinned[self.orphans])
            self._leave(parent, name, node, hide)
            self._adopt(node)
            return
        if node.kind == DIRECTORY and (hide or node.children):
            with self._prepared() as temporary:
                self._move_away(parent, name, node, hide, temporary, self.work)
            self._throw_away(temporary, self.work)
        elif hide:
            with self._prepared() as temporary:
                self._whiteout(temporary, self.work, parent)
                self.calls.rename(temporary, self.work, name, directory)
        elif node.kind == DIRECTORY:
            self.calls.rmdir(name, directory)
        else:
            self.calls.unlink(name, directory)
        self._leave(parent, name, node, hide)
        if node.parent is None:
            self._drop(node)

    def _move_away(
        self, parent: UpperNode, name: bytes, node: UpperNode, hide: bool, new: bytes, where: int
    ) -> None:
        """Move something out of the upper, where a whiteout stays if it is to `hide`."""
        directory = self.directory(parent)
        if not hide:
            self.calls.rename(name, directory, new, where)
            return
        self._whiteout(new, where, parent)
        try:
            self.calls.rename(new, where, name, directory, EXCHANGE)
        except BaseException:
            self._throw_away(new, where)
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

    def _adopt(self, node: UpperNode) -> None:
        node.parent, node.name = self.orphans, _orphan_name(node)
        self.orphans.children[node.name] = node

    def is_orphan(self, node: UpperNode) -> bool:
        return node.parent is self.orphans

    def destroy(self, node: UpperNode) -> None:
        """An orphan that the kernel has forgotten. Raises nothing."""
        self._drop(node)
        self._throw_away(node.name, self._pinned[self.orphans])
        self.orphans.children.pop(node.name, None)
        node.parent = None

    # --- moving

    def rename(
        self, parent: UpperNode, name: bytes, node: UpperNode, to: UpperNode, new: bytes, hide: bool
    ) -> None:
        """Give something another name; what has that name (a file, or an empty directory) is removed.

        `hide`: the lower has the old name, too. REQUIRES: the two are not the same file; a directory shows nothing
        of the lower.
        """
        victim = to.children.get(new)
        if victim is THE_WHITEOUT:
            victim = None
        if node.kind == DIRECTORY and to.lower and not node.opaque:
            self.make_opaque(node)
        if victim is not None:
            self._save(to, new, victim)
        try:
            self._move(parent, name, node, to, new, hide)
        except OSError:
            if victim is not None and victim.kind != DIRECTORY and not victim.more:
                self._throw_away(_orphan_name(victim), self._pinned[self.orphans])
            raise
        if victim is not None and victim.kind != DIRECTORY:
            self._leave(to, new, victim, False)
            if not victim.more and victim.parent is None and victim.known != 0:
                self._adopt(victim)
            elif victim.parent is None:
                self._drop(victim)
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
        self._enter(node, to, new)

    def _save(self, to: UpperNode, new: bytes, victim: UpperNode) -> None:
        """Before something is replaced: keep it as an orphan if the kernel knows it."""
        directory, orphans = self.directory(to), self._pinned[self.orphans]
        if victim.kind != DIRECTORY:
            if victim.more or victim.known == 0:
                return
            self._throw_away(_orphan_name(victim), orphans)  # of a former try
            self.calls.link(new, directory, _orphan_name(victim), orphans)
            return
        # An empty directory may hold whiteouts, which a rename does not replace. So a bare one takes its place.
        status = self.stat(victim)
        with self._prepared() as temporary:
            self.calls.mkdir(temporary, 0o700, self.work)
            fd = os.open(temporary, OPEN_DIRECTORY, dir_fd=self.work)
            try:
                bare = self._new(DIRECTORY, to, new, os.fstat(fd))
                self.calls.setxattr(fd, OPAQUE, b"y")
                bare.opaque = True
                mode = victim.mode if victim.mode >= 0 else stat.S_IMODE(status.st_mode)
                owner = (status.st_uid, status.st_gid) if self.as_root else None
                times = status.st_atime_ns, status.st_mtime_ns
                self._dress(temporary, fd, bare, UpperAttributes(mode, owner, times), to)
            finally:
                os.close(fd)
            self.calls.rename(temporary, self.work, new, directory, EXCHANGE)
        self._leave(to, new, victim, False)
        self._enter(bare, to, new)
        if victim.known == 0:
            self._throw_away(temporary, self.work)
            self._drop(victim)
            return
        with contextlib.suppress(OSError):
            self.calls.rename(temporary, self.work, _orphan_name(victim), orphans)
            self._adopt(victim)

    def _move(
        self, parent: UpperNode, name: bytes, node: UpperNode, to: UpperNode, new: bytes, hide: bool
    ) -> None:
        """The system calls of a rename. What `_save` left under the new name is replaced."""
        directory, target = self.directory(parent), self.directory(to)
        there = to.children.get(new)
        if there is THE_WHITEOUT and node.kind == DIRECTORY:  # a directory does not replace a device
            if hide:
                self._mark(parent)
            self.calls.rename(name, directory, new, target, EXCHANGE)
            if not hide:
                self._throw_away(name, directory)
        elif not hide:
            self.calls.rename(name, directory, new, target)
        elif not self._rename_with_whiteout(name, directory, new, target):
            if there is not None and there is not THE_WHITEOUT:
                self._move_in_steps(parent, name, node, to, new)
                return
            if there is None:
                self._whiteout(new, target, to)
                to.children[new] = THE_WHITEOUT  # should the next call fail; the lower has nothing there
            self._mark(parent)
            self.calls.rename(name, directory, new, target, EXCHANGE)

    def _rename_with_whiteout(self, name: bytes, directory: int, new: bytes, target: int) -> bool:
        """Rename and leave a whiteout, in one call; False where the file system cannot do that."""
        if self._by_attribute or not self._renames_with_whiteout:
            return False
        try:
            self.calls.rename(name, directory, new, target, WITH_WHITEOUT)
        except OSError as error:
            if error.errno not in _NO_SUCH_RENAME:
                raise
            self._renames_with_whiteout = False
        return self._renames_with_whiteout

    def _move_in_steps(self, parent: UpperNode, name: bytes, node: UpperNode, to: UpperNode, new: bytes) -> None:
        """Replace something by a rename that leaves a whiteout, where the file system cannot do it in one call.

        After a stop between the two calls source and target are the same file, or the source is an empty
        directory.
        """
        directory, target = self.directory(parent), self.directory(to)
        with self._prepared() as temporary:
            if node.kind == DIRECTORY:
                self.calls.rename(name, directory, new, target, EXCHANGE)
            else:
                self.calls.link(name, directory, temporary, self.work)
                self.calls.rename(temporary, self.work, new, target)
        with self._prepared() as temporary:
            self._whiteout(temporary, self.work, parent)
            self.calls.rename(temporary, self.work, name, directory, EXCHANGE)
        self._throw_away(temporary, self.work)

    def exchange(self, one: tuple[UpperNode, bytes, UpperNode], other: tuple[UpperNode, bytes, UpperNode]) -> None:
        """Swap two things: (directory, name, node) each. REQUIRES: as for `rename`."""
        (parent, name, node), (to, new, second) = one, other
        for moved, where in ((node, to), (second, parent)):
            if moved.kind == DIRECTORY and where.lower and not moved.opaque:
                self.make_opaque(moved)
        self.calls.rename(name, self.directory(parent), new, self.directory(to), EXCHANGE)
        rest = [place for place in node.places() if place != (parent, name)]
        rest_of_second = [place for place in second.places() if place != (to, new)]
        node.parent, node.name, node.more = to, new, rest or None
        second.parent, second.name, second.more = parent, name, rest_of_second or None
        self._enter(node, to, new)
        self._enter(second, parent, name)

    def make_opaque(self, node: UpperNode, origin: Origin | None = None) -> None:
        """Let nothing of the lower show through a directory; `origin` keeps its inode number."""
        fd = self.directory(node)
        if origin is not None:
            self.calls.setxattr(fd, ORIGIN, b"%d:%x" % origin)
            node.origin = origin
        self.calls.setxattr(fd, OPAQUE, b"y")
        node.opaque = True
        node.dirty = True

    # --- changing what is there

    def write(self, node: UpperNode, offset: int, data: bytes | memoryview) -> int:
        """All of the data is written, or an OSError tells why not."""
        node.dirty = True
        return self._write(self.file(node, write=True), data, offset)

    def _write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        size = len(data)
        done = self.calls.write(fd, data, offset)
        while done < size:  # a disk that fills up; the next call says so
            done += self.calls.write(fd, memoryview(data)[done:], offset + done)
        return size

    def truncate(self, node: UpperNode, size: int) -> None:
        node.dirty = True
        self.calls.truncate(self.file(node, write=True), size)

    def chmod(self, node: UpperNode, mode: int) -> None:
        node.dirty = True
        wide = self._widened(mode, node.kind)
        name, directory = self._itself(node)
        fd = self._attributed(node) if wide != mode or node.mode >= 0 else None
        if fd is not None and wide != mode:
            self.calls.setxattr(fd, MODE, b"%o" % mode)
            node.mode = mode
        self.calls.chmod(name, wide, directory)
        if fd is not None and wide == mode:
            with contextlib.suppress(OSError):
                self.calls.removexattr(fd, MODE)
            node.mode = -1

    def chown(self, node: UpperNode, uid: int, gid: int) -> None:
        """-1 leaves one as it is. Raises what the system says to a process that is not root."""
        node.dirty = True
        name, directory = self._itself(node)
        self.calls.chown(name, uid, gid, directory)

    def utime(self, node: UpperNode, times: tuple[int, int]) -> None:
        """Set the times of access and modification, in ns."""
        node.dirty = True
        name, directory = self._itself(node)
        self.calls.utime(name, times, directory)

    def _itself(self, node: UpperNode) -> tuple[bytes, int]:
        return (b".", self.directory(node)) if node is self.top else (node.name, self.where(node))

    def setxattr(self, node: UpperNode, name: bytes, value: bytes, flags: int = 0) -> None:
        fd = self._attributed(node)
        if fd is None:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        node.dirty = True
        self.calls.setxattr(fd, name, value, flags)

    def removexattr(self, node: UpperNode, name: bytes) -> None:
        fd = self._attributed(node)
        if fd is None:
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
        node.dirty = True
        self.calls.removexattr(fd, name)

    # --- to disk

    def sync(self, node: UpperNode, only_data: bool = False) -> None:
        """Have something on disk, with every name that leads to it."""
        if node.dirty and node.kind == FILE:
            if only_data:
                self.calls.fdatasync(self.file(node))
            else:
                self.calls.fsync(self.file(node))
                node.dirty = False
        if node.kind == DIRECTORY:
            self._sync_up(node)
        for parent, _ in node.places():
            if parent is not self.orphans:
                self._sync_up(parent)

    def _sync_up(self, node: UpperNode) -> None:
        for directory in node.chain():
            if directory.dirty and directory is not self.orphans:
                self.calls.fsync(self.directory(directory))
                directory.dirty = False

    def sync_content(self, node: UpperNode) -> None:
        """Have a file's content on disk, under whatever name."""
        if node.dirty and node.kind == FILE:
            self.calls.fsync(self.file(node))
            node.dirty = False


def _orphan_name(node: UpperNode) -> bytes:
    return b"%x" % node.inode


def _number(name: bytes) -> int:
    try:
        return int(name, 16)
    except ValueError:
        return 0


def _shrink(table: OrderedDict[UpperNode, int], most: int) -> None:
    """Close the descriptor that has not been used for longest, if there are too many."""
    if len(table) > most:
        _, fd = table.popitem(last=False)
        os.close(fd)
