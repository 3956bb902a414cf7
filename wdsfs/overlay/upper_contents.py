"""Content and attributes of files and directories in the upper: read, and changed in place.

Callers pass nodes; `overlay/upper_descriptors.py` has their descriptors. Changed nodes are marked as dirty, for
`overlay/durability.py`.
"""

from __future__ import annotations

import contextlib
import errno
import os

from wdsfs.inodes import ROOT
from wdsfs.overlay.system_calls import SystemCalls, write_all
from wdsfs.overlay.upper_attributes import AttributeRules
from wdsfs.overlay.upper_descriptors import Descriptors
from wdsfs.overlay.upper_format import DIRECTORY, FILE, MODE, UpperNode


class UpperContents:
    """Reads and changes files and directories of the upper. All methods raise OSErrors."""

    def __init__(self, descriptors: Descriptors, attributes: AttributeRules, calls: SystemCalls) -> None:
        self.descriptors = descriptors
        self.attributes = attributes
        self.calls = calls

    # --- reading

    def read(self, node: UpperNode, offset: int, size: int) -> bytes:
        return os.pread(self.descriptors.file(node), size, offset)

    def readlink(self, node: UpperNode) -> bytes:
        return os.readlink(node.name, dir_fd=self.descriptors.where(node))

    def _attributed(self, node: UpperNode) -> int | None:
        """A descriptor of a node that can have attributes of users, that is of a file or directory; else None."""
        if node.kind == FILE:
            return self.descriptors.file(node)
        return self.descriptors.directory(node) if node.kind == DIRECTORY else None

    def listxattr(self, node: UpperNode) -> list[bytes]:
        fd = self._attributed(node)
        return [] if fd is None else [os.fsencode(name) for name in os.listxattr(fd)]

    def getxattr(self, node: UpperNode, name: bytes) -> bytes:
        fd = self._attributed(node)
        if fd is None:
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
        return os.getxattr(fd, name)

    # --- changing

    def write(self, node: UpperNode, offset: int, data: bytes | memoryview) -> int:
        """Write all of the data into a file; returns how many bytes, which are all."""
        node.dirty = True
        return write_all(self.calls, self.descriptors.file(node, write=True), data, offset)

    def truncate(self, node: UpperNode, size: int) -> None:
        node.dirty = True
        self.calls.truncate(self.descriptors.file(node, write=True), size)

    def chmod(self, node: UpperNode, mode: int) -> None:
        node.dirty = True
        wide = self.attributes.widened(mode, node.kind)
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
        """Set owner and group; -1 leaves one as it is. A process that is not root gets the system's OSError."""
        node.dirty = True
        name, directory = self._itself(node)
        self.calls.chown(name, uid, gid, directory)

    def utime(self, node: UpperNode, times: tuple[int, int]) -> None:
        """Set the times of access and modification, in ns."""
        node.dirty = True
        name, directory = self._itself(node)
        self.calls.utime(name, times, directory)

    def _itself(self, node: UpperNode) -> tuple[bytes, int]:
        """A name of a node, and the descriptor of the directory that the name is in."""
        if node.inode == ROOT:
            return b".", self.descriptors.directory(node)
        return node.name, self.descriptors.where(node)

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
