"""New files, directories and links in the upper, and copies of the lower.

A node that takes more than one system call is made in work/ with its content, owner and attributes and moved into
place by one rename, so a stop at any call leaves the upper as it was or complete. The names in memory change when
the last call has succeeded. What has to be copied up is decided in `overlay/writable_tree.py`.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator

from wdsfs.inodes import UP
from wdsfs.overlay.system_calls import EXCHANGE, NOREPLACE, write_all
from wdsfs.overlay.upper_attributes import UpperAttributes
from wdsfs.overlay.upper_format import (
    DIRECTORY,
    FILE,
    OPAQUE,
    OPEN_DIRECTORY,
    ORIGIN,
    OTHER,
    SYMLINK,
    Origin,
    UpperNode,
)
from wdsfs.overlay.upper_parts import UpperParts


def new_node(kind: int, parent: UpperNode, name: bytes, status: os.stat_result) -> UpperNode:
    """The node of what this process has just made: the kernel does not know it yet."""
    node = UpperNode(kind, status.st_ino | UP, parent, name)
    node.known = 0
    return node


class NewEntries:
    """Makes new nodes in the upper. REQUIRES for all: the upper has nothing under the name, or a whiteout; copies
    replace no whiteout."""

    def __init__(self, parts: UpperParts) -> None:
        self.parts = parts

    # --- new nodes

    def create(self, parent: UpperNode, name: bytes, attributes: UpperAttributes) -> UpperNode:
        """A new, empty file."""
        if name in parent.children or not self.parts.attributes.is_plain(attributes, FILE):
            return self._create_aside(parent, name, attributes)
        directory = self.parts.descriptors.directory(parent)
        fd = self.parts.calls.create(name, os.O_RDWR, attributes.mode, directory)
        try:
            status = os.fstat(fd)
            if stat.S_IMODE(status.st_mode) != attributes.mode:  # the umask of this process
                self.parts.calls.chmod(name, attributes.mode, directory)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                self.parts.calls.unlink(name, directory)
            raise
        node = new_node(FILE, parent, name, status)
        parent.enter(name, node)
        self.parts.descriptors.keep(node, fd)
        return node

    def _create_aside(self, parent: UpperNode, name: bytes, attributes: UpperAttributes) -> UpperNode:
        with self.parts.staging.prepared() as temporary:
            fd = self.parts.calls.create(temporary, os.O_RDWR, 0o600, self.parts.staging.directory)
            try:
                node = new_node(FILE, parent, name, os.fstat(fd))
                self.parts.attributes.dress(temporary, fd, node, attributes, parent)
                self._publish(temporary, node, parent, name)
            except BaseException:
                os.close(fd)
                raise
        self.parts.descriptors.keep(node, fd)
        return node

    def mkdir(
        self, parent: UpperNode, name: bytes, attributes: UpperAttributes, opaque: bool = False
    ) -> UpperNode:
        """A new directory; `opaque` when the lower shows through its parent."""
        if name in parent.children or not self.parts.attributes.is_plain(attributes, DIRECTORY):
            return self._mkdir_aside(parent, name, attributes, opaque)
        directory = self.parts.descriptors.directory(parent)
        self.parts.calls.mkdir(name, attributes.mode, directory)
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if stat.S_IMODE(status.st_mode) & ~stat.S_ISGID != attributes.mode & ~stat.S_ISGID:
                self.parts.calls.chmod(name, attributes.mode | status.st_mode & stat.S_ISGID, directory)
        except BaseException:
            with contextlib.suppress(OSError):
                self.parts.calls.rmdir(name, directory)
            raise
        node = new_node(DIRECTORY, parent, name, status)
        parent.enter(name, node)
        if opaque:
            # Not needed, since the lower has no such name now; a later version of the shard may have it.
            with contextlib.suppress(OSError):
                self.parts.whiteouts.make_opaque(node)
        return node

    def _mkdir_aside(self, parent: UpperNode, name: bytes, attributes: UpperAttributes, opaque: bool) -> UpperNode:
        with self.parts.staging.prepared() as temporary:
            self.parts.calls.mkdir(temporary, 0o700, self.parts.staging.directory)
            fd = os.open(temporary, OPEN_DIRECTORY, dir_fd=self.parts.staging.directory)
            try:
                node = new_node(DIRECTORY, parent, name, os.fstat(fd))
                if opaque:
                    self.parts.calls.setxattr(fd, OPAQUE, b"y")
                    node.opaque = True
                self.parts.attributes.dress(temporary, fd, node, attributes, parent)
            finally:
                os.close(fd)
            self._publish(temporary, node, parent, name)
        return node

    def mknod(
        self, parent: UpperNode, name: bytes, attributes: UpperAttributes, form: int, device: int = 0
    ) -> UpperNode:
        """A new fifo, socket or device of the type `form` (S_IFIFO ...)."""
        with self.parts.staging.prepared() as temporary:
            self.parts.calls.mknod(temporary, form | 0o600, device, self.parts.staging.directory)
            status = os.stat(temporary, dir_fd=self.parts.staging.directory, follow_symlinks=False)
            kind = FILE if form == stat.S_IFREG else OTHER
            node = new_node(kind, parent, name, status)
            self.parts.attributes.dress(temporary, -1, node, attributes, parent)
            self._publish(temporary, node, parent, name)
        return node

    def symlink(self, parent: UpperNode, name: bytes, attributes: UpperAttributes, target: bytes) -> UpperNode:
        """A symbolic link."""
        with self.parts.staging.prepared() as temporary:
            self.parts.calls.symlink(target, temporary, self.parts.staging.directory)
            status = os.stat(temporary, dir_fd=self.parts.staging.directory, follow_symlinks=False)
            node = new_node(SYMLINK, parent, name, status)
            self.parts.attributes.dress(temporary, -1, node, attributes, parent)
            self._publish(temporary, node, parent, name)
        return node

    def link(self, node: UpperNode, parent: UpperNode, name: bytes) -> None:
        """Another name for a file."""
        directory = self.parts.descriptors.directory(parent)
        here = self.parts.descriptors.where(node)
        if name in parent.children:
            with self.parts.staging.prepared() as temporary:
                self.parts.calls.link(node.name, here, temporary, self.parts.staging.directory)
                self.parts.calls.rename(temporary, self.parts.staging.directory, name, directory)
        else:
            self.parts.calls.link(node.name, here, name, directory)
        node.more = [*(node.more or []), (parent, name)]
        parent.enter(name, node)

    def _publish(self, temporary: bytes, node: UpperNode, parent: UpperNode, name: bytes) -> None:
        """Move a node from work/ to its place, where there is nothing or a whiteout."""
        node.parent, node.name = parent, name
        directory = self.parts.descriptors.directory(parent)
        if name not in parent.children:
            self.parts.calls.rename(temporary, self.parts.staging.directory, name, directory, NOREPLACE)
        elif node.kind != DIRECTORY:
            self.parts.calls.rename(temporary, self.parts.staging.directory, name, directory)
        else:
            self.parts.calls.rename(temporary, self.parts.staging.directory, name, directory, EXCHANGE)
            self.parts.staging.throw_away(temporary, self.parts.staging.directory)
        parent.enter(name, node)

    # --- copying up

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
        with self.parts.staging.prepared() as temporary:
            fd = self.parts.calls.create(temporary, os.O_RDWR, 0o600, self.parts.staging.directory)
            try:
                node = new_node(FILE, parent, name, os.fstat(fd))
                node.known = None  # the kernel may have known the other for long
                end = 0
                for chunk in content:
                    write_all(self.parts.calls, fd, chunk, end)
                    end += len(chunk)
                if size is not None and size != end:
                    self.parts.calls.truncate(fd, size)
                if origin is not None:
                    self.parts.calls.setxattr(fd, ORIGIN, b"%d:%x" % origin)
                    node.origin = origin
                self.parts.attributes.dress(temporary, fd, node, attributes, parent)
                if end:
                    self.parts.calls.fsync(fd)
                with self._same_times(parent):
                    self._publish(temporary, node, parent, name)
            except BaseException:
                os.close(fd)
                raise
        node.dirty = not end
        self.parts.descriptors.keep(node, fd)
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
        """A copy of a symbolic link of the lower."""
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
        """Restore the times of the directory after the block, so that users see no change of it."""
        fd = self.parts.descriptors.directory(parent)
        before = os.fstat(fd)
        yield
        if parent is not self.parts.orphans.top:
            with contextlib.suppress(OSError):
                self.parts.calls.utime(
                    b".", (before.st_atime_ns, before.st_mtime_ns), self.parts.descriptors.directory(parent)
                )
