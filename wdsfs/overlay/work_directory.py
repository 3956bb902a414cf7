"""The directory work/ beside an upper: unfinished files, the prototype of whiteouts, and orphans.

Temporary names start with "#". A process that is killed leaves them; the next start removes them.

A whiteout is a hard link to one prototype in work/: a character device 0:0, or an empty file with an attribute
where no device can be made. An *orphan* is a file or directory without a name whose inode number the kernel still
knows. Its number must not be used for another file. So it is moved to work/orphans/<inode>. There its content
stays readable, also for the next worker, and its number stays in use, until the kernel has forgotten it or until
the next mount.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from wdsfs.errors import OverlayUnusable
from wdsfs.overlay import upper_format
from wdsfs.overlay.upper_files import EXCHANGE, SystemCalls, UpperFiles

PROTOTYPE = b"whiteout"  # in work/; all whiteouts are hard links to it
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}  # a later write fails with these; mounting is possible


class WorkDirectory:
    """Temporary names in work/, and the prototype of whiteouts.

    `path` is for messages, `fd` its descriptor, -1 on a read-only file system, where nothing is made.
    `by_attribute`: True if whiteouts here are files with an attribute, not devices.
    """

    def __init__(self, path: Path, fd: int, calls: SystemCalls) -> None:
        self.path = path
        self.fd = fd
        self.calls = calls
        self.by_attribute = False
        self._temporaries = 0

    def start(self) -> None:
        """Remove temporary files of former processes, and find the prototype, or make it."""
        for name in map(os.fsencode, os.listdir(self.fd)):
            if name.startswith(b"#"):
                self.throw_away(name)
        try:
            status = os.stat(PROTOTYPE, dir_fd=self.fd, follow_symlinks=False)
            self.by_attribute = not stat.S_ISCHR(status.st_mode)
        except FileNotFoundError:
            try:
                self._make_prototype()
            except OSError as error:
                if error.errno not in DISK_FULL:
                    raise

    @contextlib.contextmanager
    def prepared(self) -> Iterator[bytes]:
        """Yield a temporary name in work/; when the block fails, the file of this name is removed."""
        self._temporaries += 1
        name = b"#%d-%x" % (os.getpid(), self._temporaries)
        try:
            yield name
        except BaseException:
            self.throw_away(name)
            raise

    def throw_away(self, name: bytes, directory: int = -1) -> None:
        """Remove a file, or a directory with nothing but whiteouts in it, from work/ or another directory.

        Errors are ignored: the next start tries again.
        """
        directory = self.fd if directory < 0 else directory
        with contextlib.suppress(OSError):
            try:
                self.calls.unlink(name, directory)
                return
            except IsADirectoryError:
                fd = os.open(name, upper_format.OPEN_DIRECTORY, dir_fd=directory)
            try:
                for entry in os.listdir(fd):
                    self.calls.unlink(os.fsencode(entry), fd)
            finally:
                os.close(fd)
            self.calls.rmdir(name, directory)

    def _make_prototype(self) -> None:
        with self.prepared() as temporary:
            try:
                self.calls.mknod(temporary, stat.S_IFCHR, 0, self.fd)
                self.by_attribute = False
            except PermissionError:
                self.by_attribute = True
                self._make_file(temporary, upper_format.WHITED_OUT, b"y")
            self.calls.rename(temporary, self.fd, PROTOTYPE, self.fd)

    def _make_file(self, name: bytes, attribute: str, value: bytes) -> None:
        fd = self.calls.create(name, os.O_RDWR, 0o600, self.fd)
        try:
            self.calls.setxattr(fd, attribute, value)
        finally:
            os.close(fd)

    def link_whiteout(self, name: bytes, directory: int) -> None:
        """Make a whiteout."""
        try:
            self.calls.link(PROTOTYPE, self.fd, name, directory)
        except OSError as error:
            if error.errno not in (errno.EMLINK, errno.ENOENT):
                raise
            self._make_prototype()  # the old prototype has the most links that a file can have
            self.calls.link(PROTOTYPE, self.fd, name, directory)

    def check(self, upper: int) -> None:
        """Raise OverlayUnusable if the file system cannot hold an overlay; `upper` is a descriptor of upper/."""
        needed = "attributes in the namespace 'user'"
        try:
            with self.prepared() as name, self.prepared() as other:
                self._make_file(name, upper_format.ORIGIN, b"0:0")
                needed = "hard links, or the exchange of two names"
                self.calls.link(PROTOTYPE, self.fd, other, self.fd)
                self.calls.rename(name, self.fd, other, self.fd, EXCHANGE)
                needed = "one device number for files and directories"  # an overlayfs over two disks has two
                if os.stat(other, dir_fd=self.fd).st_dev != os.fstat(upper).st_dev:
                    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
                with contextlib.suppress(FileNotFoundError):  # EXDEV would come before the name is looked up
                    self.calls.rename(b"#none", self.fd, b"#none", upper)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise OverlayUnusable(
                    f"the file system of {self.path.parent} cannot take an overlay: it lacks {needed} "
                    f"({error.strerror}); name a directory on another one, such as ext4, xfs, btrfs or tmpfs"
                ) from None
        self.throw_away(name)
        self.throw_away(other)


class Whiteouts:
    """The marks in the upper that hide names of the lower: whiteouts and opaque directories.

    `overlay/writable_tree.py` decides which names are hidden. In a directory that shows nothing of the lower, the
    kernel's overlayfs lists whiteouts as names that cannot be looked up. So such a directory has no whiteouts.
    Where the lower's directory may disappear with another version of its shard, the directory of the upper has a
    mark.
    """

    def __init__(self, files: UpperFiles, work: WorkDirectory) -> None:
        self.files = files
        self.work = work
        self.calls = files.calls

    def hide(self, parent: upper_format.UpperNode, name: bytes) -> None:
        """Hide a name that the lower has and the upper has not."""
        self.make(name, self.files.directory(parent), parent)
        parent.enter(name, upper_format.THE_WHITEOUT)

    def reveal(self, parent: upper_format.UpperNode, name: bytes) -> None:
        """Remove a whiteout: the name of the lower is visible again."""
        self.calls.unlink(name, self.files.directory(parent))
        del parent.children[name]
        parent.dirty = True

    def make(self, name: bytes, directory: int, parent: upper_format.UpperNode) -> None:
        """Make a whiteout that is in the directory `parent`, or will be moved there."""
        self.mark(parent)
        self.work.link_whiteout(name, directory)

    def mark(self, parent: upper_format.UpperNode) -> None:
        """Mark a directory so that the kernel looks for whiteouts in it.

        Without the mark it ignores whiteouts that are files, and others when the lower's directory is gone.
        """
        if not parent.merged and not parent.opaque and parent.parent is not None:
            with contextlib.suppress(OSError):  # a removal must succeed on a full disk, too
                self.calls.setxattr(self.files.directory(parent), upper_format.MERGED, b"")
                parent.merged = True
        if self.work.by_attribute:
            fd = self.files.directory(parent)
            if upper_format.OPAQUE not in os.listxattr(fd):
                self.calls.setxattr(fd, upper_format.OPAQUE, b"x")

    def make_opaque(self, node: upper_format.UpperNode, origin: upper_format.Origin | None = None) -> None:
        """Make a directory opaque: nothing of the lower shows through. `origin` keeps its inode number.

        Its whiteouts, which hide nothing any more, are removed.
        """
        fd = self.files.directory(node)
        if origin is not None:
            self.calls.setxattr(fd, upper_format.ORIGIN, b"%d:%x" % origin)
            node.origin = origin
        self.calls.setxattr(fd, upper_format.OPAQUE, b"y")
        node.opaque = True
        node.lower = 0
        node.dirty = True
        self._clear(node)

    def _clear(self, directory: upper_format.UpperNode) -> None:
        """Remove all whiteouts of a directory. Errors are ignored: the next start tries again."""
        for name in [name for name, child in directory.children.items() if child is upper_format.THE_WHITEOUT]:
            with contextlib.suppress(OSError):
                self.reveal(directory, name)

    def settle(self, top: upper_format.UpperNode) -> None:
        """Remove whiteouts that can hide nothing, whatever the lower has, and mark the directories of the others.

        These are leftovers of a killed process, or of an earlier version of wdsfs.
        """
        waiting = [(top, True)]
        while waiting:
            directory, is_seen_through = waiting.pop()
            if any(child is upper_format.THE_WHITEOUT for child in directory.children.values()):
                if is_seen_through:
                    self.mark(directory)
                else:
                    self._clear(directory)
            waiting += [
                (child, is_seen_through and not child.opaque)
                for child in directory.children.values()
                if child.kind == upper_format.DIRECTORY
            ]


class Orphans:
    """The orphans of an upper: the children of `top`, which stands for work/orphans."""

    def __init__(self, files: UpperFiles, work: WorkDirectory) -> None:
        self.top = upper_format.UpperNode(upper_format.DIRECTORY, upper_format.ORPHANAGE, None, b"orphans")
        self.files = files
        self.work = work

    @property
    def fd(self) -> int:
        """A descriptor of work/orphans."""
        return self.files.directory(self.top)

    def start(self, inherited: bool) -> None:
        """Find the orphans of former processes; keep them if `inherited`, as the kernel may know them."""
        self.top.children = upper_format.load(self.fd).children
        for name, node in list(self.top.children.items()):
            if inherited and node.kind != upper_format.WHITEOUT:
                node.parent, node.inode = self.top, _number(name)
            else:
                del self.top.children[name]
                self.throw_away(name)

    def throw_away(self, name: bytes) -> None:
        """Remove the file of this name in work/orphans, if that is possible."""
        self.work.throw_away(name, self.fd)

    def remove_all(self) -> None:
        """Remove all, when the kernel knows no inode number any more."""
        for name in list(self.top.children):
            self.throw_away(name)

    def adopt(self, node: upper_format.UpperNode) -> None:
        """Note in memory that a node has been moved to work/orphans."""
        node.parent, node.name = self.top, orphan_name(node)
        self.top.children[node.name] = node

    def destroy(self, node: upper_format.UpperNode) -> None:
        """Remove an orphan that the kernel has forgotten. Raises nothing."""
        self.files.drop(node)
        self.throw_away(node.name)
        self.top.children.pop(node.name, None)
        node.parent = None


def orphan_name(node: upper_format.UpperNode) -> bytes:
    """Return the name of a node in work/orphans."""
    return b"%x" % node.inode


def _number(name: bytes) -> int:
    try:
        return int(name, 16)
    except ValueError:
        return 0
