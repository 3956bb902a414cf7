"""Descriptors of what is in the upper, opened when they are needed, the least recently used closed first.

Files and directories are reached by the descriptors of the directories above them, step by step: paths may be
longer than PATH_MAX. A descriptor is good for the next few calls only; callers keep nodes
(`upper_format.UpperNode`), not descriptors. Nothing is changed here.
"""

from __future__ import annotations

import errno
import os
from collections import OrderedDict

from wdsfs.overlay.system_calls import FILE_FLAGS
from wdsfs.overlay.upper_format import DIRECTORY, OPEN_DIRECTORY, UpperNode

DESCRIPTORS = 128  # open directories, and as many open files
_LEAST = 16  # so many stay open at least: one call works with a few at a time


class Descriptors:
    """Open descriptors by node: at most `most` of directories and as many of files, and the pinned ones."""

    def __init__(self, most: int = DESCRIPTORS) -> None:
        self._most = max(most, _LEAST)
        self._directories: OrderedDict[UpperNode, int] = OrderedDict()
        self._files: OrderedDict[UpperNode, int] = OrderedDict()
        self._unwritable: set[UpperNode] = set()  # those of _files that could only be opened for reading
        self._pinned: dict[UpperNode, int] = {}

    def pin(self, node: UpperNode, fd: int) -> None:
        """Keep this descriptor of a directory open until `close`: the ways to all others start here."""
        self._pinned[node] = fd

    def pin_instead(self, node: UpperNode, before: UpperNode) -> None:
        """Let a pinned descriptor be that of another node."""
        self._pinned[node] = self._pinned.pop(before)

    def close(self) -> None:
        """Close all."""
        for table in (self._files, self._directories, self._pinned):
            for fd in table.values():
                os.close(fd)
            table.clear()

    def directory(self, node: UpperNode) -> int:
        """A descriptor of a directory, for the next few calls."""
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
        """A descriptor of the directory that holds a node."""
        if node.parent is None:
            raise FileNotFoundError(errno.ENOENT, "it has been removed", os.fsdecode(node.name))
        return self.directory(node.parent)

    def file(self, node: UpperNode, write: bool = False) -> int:
        """A descriptor of a file, for the next few calls; with `write` one for writing. Raises OSErrors."""
        fd = self._files.get(node)
        if fd is not None and not (write and node in self._unwritable):
            self._files.move_to_end(node)
            return fd
        self.drop(node)
        directory = self.where(node)
        try:
            fd = os.open(node.name, os.O_RDWR | FILE_FLAGS, dir_fd=directory)
        except OSError as error:
            if write or error.errno not in (errno.EROFS, errno.EACCES, errno.ETXTBSY, errno.EPERM):
                raise
            fd = os.open(node.name, os.O_RDONLY | FILE_FLAGS, dir_fd=directory)
            self._unwritable.add(node)
        self.keep(node, fd)
        return fd

    def keep(self, node: UpperNode, fd: int) -> None:
        """Take over an open descriptor of a file, which can be written."""
        self._files[node] = fd
        _shrink(self._files, self._most)
        if len(self._unwritable) > len(self._files):
            self._unwritable &= self._files.keys()

    def drop(self, node: UpperNode) -> None:
        """Close the descriptors of a node, if there are any."""
        self._unwritable.discard(node)
        for table in (self._files, self._directories):
            fd = table.pop(node, None)
            if fd is not None:
                os.close(fd)

    def stat(self, node: UpperNode) -> os.stat_result:
        """The attributes of a node; by its descriptor when it is open."""
        fd = self._files.get(node)
        if fd is None and node.kind == DIRECTORY:
            fd = self._directories.get(node)
            if fd is None:
                fd = self._pinned.get(node)
        if fd is not None:
            return os.fstat(fd)
        return os.stat(node.name, dir_fd=self.where(node), follow_symlinks=False)


def _shrink(table: OrderedDict[UpperNode, int], most: int) -> None:
    """Close the descriptor that has not been used for longest, if there are too many."""
    if len(table) > most:
        _, fd = table.popitem(last=False)
        os.close(fd)
