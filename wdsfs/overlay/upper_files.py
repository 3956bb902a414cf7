"""The files and directories of an upper on disk: opened, read, changed in place and synced.

`overlay/upper_format.py` keeps the names in memory; `overlay/upper_changes.py` makes, moves and removes names.
Every system call that changes an upper is a method of `SystemCalls`: a test passes a subclass that fails, stops or
records them.

The guarantee of fsync: when it returns, the bytes of a file or the names of a directory are on disk. So is every
name on the paths to it from the top of the upper. A node is `dirty` until its own bytes or names are known to be
on disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections import OrderedDict
from typing import Any, NamedTuple

from wdsfs import host
from wdsfs.inodes import ROOT
from wdsfs.overlay.upper_format import DIRECTORY, FILE, MODE, OPEN_DIRECTORY, SYMLINK, UpperNode

NOREPLACE, EXCHANGE, WITH_WHITEOUT = 1, 2, 4  # flags of renameat2(2)
FILE_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # of open(2), for files of the upper
DESCRIPTORS = 128  # open directories, and as many open files; at most an eighth of what the process may have
_ATTRIBUTED = (FILE, DIRECTORY)  # kinds of nodes that have attributes of users
_LEAST = 8  # descriptors that always stay open: a call needs a few at a time

_libc = ctypes.CDLL(None, use_errno=True)
_renameat2 = getattr(_libc, "renameat2", None)  # not every libc has it
if _renameat2 is not None:
    _renameat2.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]


class SystemCalls:
    """System calls, a method for each. Directories are descriptors, names relative to them. Raises OSErrors."""

    def create(self, name: bytes, flags: int, mode: int, directory: int) -> int:
        return os.open(name, flags | os.O_CREAT | os.O_EXCL | FILE_FLAGS, mode, dir_fd=directory)

    def mkdir(self, name: bytes, mode: int, directory: int) -> None:
        os.mkdir(name, mode, dir_fd=directory)

    def mknod(self, name: bytes, mode: int, device: int, directory: int) -> None:
        os.mknod(name, mode, device, dir_fd=directory)

    def symlink(self, target: bytes, name: bytes, directory: int) -> None:
        os.symlink(target, name, dir_fd=directory)

    def link(self, name: bytes, directory: int, new: bytes, new_directory: int) -> None:
        os.link(name, new, src_dir_fd=directory, dst_dir_fd=new_directory, follow_symlinks=False)

    def unlink(self, name: bytes, directory: int) -> None:
        os.unlink(name, dir_fd=directory)

    def rmdir(self, name: bytes, directory: int) -> None:
        os.rmdir(name, dir_fd=directory)

    def rename(self, name: bytes, directory: int, new: bytes, new_directory: int, flags: int = 0) -> None:
        if not flags:
            os.rename(name, new, src_dir_fd=directory, dst_dir_fd=new_directory)
        elif _renameat2 is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        elif _renameat2(directory, name, new_directory, new, flags):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), name)

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def setxattr(self, fd: int, name: bytes | str, value: bytes, flags: int = 0) -> None:
        os.setxattr(fd, name, value, flags)

    def removexattr(self, fd: int, name: bytes | str) -> None:
        os.removexattr(fd, name)

    def chmod(self, name: bytes, mode: int, directory: int) -> None:
        os.chmod(name, mode, dir_fd=directory)

    def chown(self, name: bytes, uid: int, gid: int, directory: int) -> None:
        os.chown(name, uid, gid, dir_fd=directory, follow_symlinks=False)

    def utime(self, name: bytes, times: tuple[int, int], directory: int) -> None:
        os.utime(name, ns=times, dir_fd=directory, follow_symlinks=False)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def syncfs(self, fd: int) -> None:
        if _libc.syncfs(fd):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


class Attributes(NamedTuple):
    """The attributes of a new node. `owner`: uid and gid, or None for those of this process.

    `times` of access and modification are in ns; without the second a file keeps the time of its last write.
    """

    mode: int
    owner: tuple[int, int] | None = None
    times: tuple[int, int | None] | None = None


class UpperFiles:
    """Opens, reads, changes and syncs the nodes of an upper. All methods but `drop` and `close` raise OSErrors.

    Files and directories are reached by the descriptors of the directories above them, step by step: paths may be
    longer than PATH_MAX. At most `most` directories and as many files are open, beside the pinned directories; the
    least recently used are closed. A descriptor is valid for the next few calls only;
    callers keep nodes.

    A daemon that is not root must be able to open every file itself. So the file on disk may have wider permission
    bits than the mount shows; the attribute `user.wdsfs.mode` has the shown bits.
    """

    def __init__(self, calls: SystemCalls, most: int = DESCRIPTORS) -> None:
        self.calls = calls
        self.as_root = os.geteuid() == 0
        self._most = max(min(most, host.file_limit() // 8), _LEAST)
        self._directories: OrderedDict[UpperNode, int] = OrderedDict()
        self._files: OrderedDict[tuple[UpperNode, bool], int] = OrderedDict()  # True: to be written
        self._pinned: dict[UpperNode, int] = {}

    # --- descriptors

    def pin(self, node: UpperNode, fd: int) -> None:
        """Keep this descriptor of a directory open until `close`: all paths start here."""
        self._pinned[node] = fd

    def close(self) -> None:
        """Close all descriptors."""
        for table in (self._files, self._directories, self._pinned):
            for fd in table.values():
                os.close(fd)
            table.clear()

    def directory(self, node: UpperNode) -> int:
        """Return a descriptor of a directory, for the next few calls."""
        fd = self._pinned.get(node)
        if fd is not None:
            return fd
        fd = self._directories.get(node)
        if fd is None:
            fd = self._descend(node)
            self._directories[node] = fd
            _shrink(self._directories, self._most)
        else:
            self._directories.move_to_end(node)
        return fd

    def _descend(self, node: UpperNode) -> int:
        """Open a directory, from the nearest one above it that is open."""
        way: list[UpperNode] = []
        at: UpperNode | None = node
        while at is not None and at not in self._pinned and at not in self._directories:
            way.append(at)
            at = at.parent
        if at is None:
            raise FileNotFoundError(errno.ENOENT, "it has been removed", os.fsdecode(node.name))
        if at in self._pinned:
            fd = nearest = self._pinned[at]
        else:
            fd = nearest = self._directories[at]
            self._directories.move_to_end(at)
        for step in reversed(way):
            try:
                inner = os.open(step.name, OPEN_DIRECTORY, dir_fd=fd)
            finally:
                if fd != nearest:
                    os.close(fd)
            fd = inner
        return fd

    def where(self, node: UpperNode) -> int:
        """Return a descriptor of the directory that holds a node."""
        if node.parent is None:
            raise FileNotFoundError(errno.ENOENT, "it has been removed", os.fsdecode(node.name))
        return self.directory(node.parent)

    def file(self, node: UpperNode, *, write: bool = False) -> int:
        """Return a descriptor of a file, for the next few calls; with `write` one for writing."""
        fd = self._files.get((node, write))
        if fd is None:
            flags = FILE_FLAGS | (os.O_RDWR if write else os.O_RDONLY)
            fd = os.open(node.name, flags, dir_fd=self.where(node))
            self.keep(node, fd, write=write)
        else:
            self._files.move_to_end((node, write))
        return fd

    def keep(self, node: UpperNode, fd: int, *, write: bool = True) -> None:
        """Take over an open descriptor of a file."""
        self._files[node, write] = fd
        _shrink(self._files, self._most)

    def drop(self, node: UpperNode) -> None:
        """Close the descriptors of a node, if there are any."""
        files = self._files.pop((node, False), None), self._files.pop((node, True), None)
        for fd in (*files, self._directories.pop(node, None)):
            if fd is not None:
                os.close(fd)

    def _attributed(self, node: UpperNode, error: int = errno.ENODATA) -> int:
        """Return a descriptor of a file or directory. Raises OSError for other nodes: they have no attributes."""
        if node.kind not in _ATTRIBUTED:
            raise OSError(error, os.strerror(error))
        return self.file(node) if node.kind == FILE else self.directory(node)

    # --- reading

    def stat(self, node: UpperNode) -> os.stat_result:
        """Return the attributes of a node."""
        name, directory = self._itself(node)
        return os.stat(name, dir_fd=directory, follow_symlinks=False)

    def read(self, node: UpperNode, offset: int, size: int) -> bytes:
        return os.pread(self.file(node), size, offset)

    def readlink(self, node: UpperNode) -> bytes:
        return os.readlink(node.name, dir_fd=self.where(node))

    def listxattr(self, node: UpperNode) -> list[bytes]:
        return list(map(os.fsencode, os.listxattr(self._attributed(node)))) if node.kind in _ATTRIBUTED else []

    def getxattr(self, node: UpperNode, name: bytes) -> bytes:
        return os.getxattr(self._attributed(node), name)

    # --- changing

    def write(self, node: UpperNode, offset: int, data: bytes | memoryview) -> int:
        """Write all of the data into a file; return the number of bytes."""
        node.dirty = True
        return self.write_all(self.file(node, write=True), data, offset)

    def write_all(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        """Write all of the data, or raise the OSError that says why not."""
        size = len(data)
        done = self.calls.write(fd, data, offset)
        while done < size:  # a short write: the disk is getting full, and the next call raises the error
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

    def chown(self, node: UpperNode, uid: int | None, gid: int | None) -> None:
        """Set owner and group; None leaves either unchanged. Raises OSError without the rights."""
        status = self.stat(node)
        node.dirty = True
        name, directory = self._itself(node)
        new_uid = -1 if uid is None or uid == status.st_uid else uid
        new_gid = -1 if gid is None or gid == status.st_gid else gid
        self.calls.chown(name, new_uid, new_gid, directory)

    def utime(self, node: UpperNode, atime_ns: int | None, mtime_ns: int | None) -> None:
        """Set the times of access and modification; None leaves either unchanged."""
        status = self.stat(node)
        node.dirty = True
        name, directory = self._itself(node)
        atime_ns = status.st_atime_ns if atime_ns is None else atime_ns
        mtime_ns = status.st_mtime_ns if mtime_ns is None else mtime_ns
        self.calls.utime(name, (atime_ns, mtime_ns), directory)

    def _itself(self, node: UpperNode) -> tuple[bytes, int]:
        """Return a name of a node, and the descriptor of the directory that the name is in."""
        if node.inode == ROOT:
            return b".", self.directory(node)
        return node.name, self.where(node)

    def setxattr(self, node: UpperNode, name: bytes, value: bytes, flags: int = 0) -> None:
        fd = self._attributed(node, errno.EPERM)
        node.dirty = True
        self.calls.setxattr(fd, name, value, flags)

    def removexattr(self, node: UpperNode, name: bytes) -> None:
        fd = self._attributed(node)
        node.dirty = True
        self.calls.removexattr(fd, name)

    # --- attributes of new nodes

    def _widened(self, mode: int, kind: int) -> int:
        """Return the permission bits with which this process can always open the file."""
        if self.as_root or kind not in (FILE, DIRECTORY):
            return mode
        return mode | (0o700 if kind == DIRECTORY else 0o600)

    def is_plain(self, attributes: Attributes) -> bool:
        """Return True if a file that this process creates has these attributes without further calls."""
        if attributes.times is not None or self._widened(attributes.mode, FILE) != attributes.mode:
            return False
        return not self.as_root or attributes.owner in (None, (os.geteuid(), os.getegid()))

    def dress(self, name: bytes, directory: int, fd: int, node: UpperNode, attributes: Attributes) -> None:
        """Set the attributes of a new node before it goes to its parent.

        It has this name in `directory`, and the descriptor `fd` (-1: none).
        """
        if attributes.times is None and node.parent is not None:
            attributes = self._inherited(node.parent, node.kind, attributes)
        if attributes.owner is not None and self.as_root:
            self.calls.chown(name, *attributes.owner, directory)
        if node.kind != SYMLINK:
            mode = self._widened(attributes.mode, node.kind)
            if mode != attributes.mode:
                self.calls.setxattr(fd, MODE, b"%o" % attributes.mode)
                node.mode = attributes.mode
            self.calls.chmod(name, mode, directory)
        if attributes.times is not None:
            atime_ns, mtime_ns = attributes.times
            mtime_ns = os.fstat(fd).st_mtime_ns if mtime_ns is None else mtime_ns
            self.calls.utime(name, (atime_ns, mtime_ns), directory)

    def _inherited(self, parent: UpperNode, kind: int, attributes: Attributes) -> Attributes:
        """Return the attributes of a new node, with the group and bit that a directory with setgid passes on."""
        above = os.fstat(self.directory(parent))
        if not above.st_mode & stat.S_ISGID:
            return attributes
        uid = -1 if attributes.owner is None else attributes.owner[0]
        mode = attributes.mode | (stat.S_ISGID if kind == DIRECTORY else 0)
        return attributes._replace(mode=mode, owner=(uid, above.st_gid))

    # --- durability

    def sync(self, node: UpperNode, *, only_data: bool = False) -> None:
        """Sync a node, and every name on the paths to it.

        With `only_data` (fdatasync) attributes of a file may be missing after a power cut, its bytes and size not.
        """
        if node.kind == FILE and node.dirty and only_data:
            self.calls.fdatasync(self.file(node))
        else:
            self.sync_content(node)
        if node.kind == DIRECTORY:
            self._sync_up(node)
        for parent, _ in node.places():
            self._sync_up(parent)

    def sync_content(self, node: UpperNode) -> None:
        """Write a file's content to disk. Its names may still be in memory only."""
        if node.dirty and node.kind == FILE:
            self.calls.fsync(self.file(node))
            node.dirty = False

    def _sync_up(self, node: UpperNode) -> None:
        for directory in node.chain():
            if directory.dirty:
                self.calls.fsync(self.directory(directory))
                directory.dirty = False


def _shrink(table: OrderedDict[Any, int], most: int) -> None:
    """Close the descriptor that has not been used for longest, if there are too many."""
    if len(table) > most:
        _, fd = table.popitem(last=False)
        os.close(fd)


def sync_filesystem(path: str) -> None:
    """Write the dirty pages of the file system that `path` is in to disk. Raises OSError.

    On a mount of wdsfs this sends the worker the pages that programs have changed in mapped files. Not every
    kernel waits for the answers of a FUSE file system. But the worker answers requests in turn, so all pages are
    written after one more answer; a second call reports failures.
    """
    calls = SystemCalls()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        calls.syncfs(fd)
        os.fstatvfs(fd)
        calls.syncfs(fd)
    finally:
        os.close(fd)
