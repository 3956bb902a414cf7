"""New things in the upper: files, directories, links, and copies of what the lower has.

What takes more than one system call is made in work/ with its content, owner and attributes and moved into place
by one rename, so a stop at any call leaves the upper as it was or complete. The names in memory change when the
last call has succeeded. What has to be copied up is decided in `overlay/writable_tree.py`.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator

from wdsfs.inodes import UP
from wdsfs.overlay.orphans import Orphans
from wdsfs.overlay.staging import Staging
from wdsfs.overlay.system_calls import EXCHANGE, NOREPLACE, SystemCalls, write_all
from wdsfs.overlay.upper_attributes import AttributeRules, UpperAttributes
from wdsfs.overlay.upper_descriptors import Descriptors
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
from wdsfs.overlay.whiteouts import Whiteouts


def new_node(kind: int, parent: UpperNode, name: bytes, status: os.stat_result) -> UpperNode:
    """The node of something that this process has just made, so that the kernel does not know it."""
    node = UpperNode(kind, status.st_ino | UP, parent, name)
    node.known = 0
    return node


class NewEntries:
    """Makes new things in the upper. REQUIRES for all: the upper has nothing under the name, or a whiteout; copies
    replace no whiteout."""

    def __init__(
        self,
        descriptors: Descriptors,
        staging: Staging,
        attributes: AttributeRules,
        whiteouts: Whiteouts,
        orphans: Orphans,
        calls: SystemCalls,
    ) -> None:
        self.descriptors = descriptors
        self.staging = staging
        self.attributes = attributes
        self.whiteouts = whiteouts
        self.orphans = orphans
        self.calls = calls

    # --- new things

    def create(self, parent: UpperNode, name: bytes, attributes: UpperAttributes) -> UpperNode:
        """A new, empty file."""
        if name in parent.children or not self.attributes.is_plain(attributes, FILE):
            return self._create_aside(parent, name, attributes)
        directory = self.descriptors.directory(parent)
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
        node = new_node(FILE, parent, name, status)
        parent.enter(name, node)
        self.descriptors.keep(node, fd)
        return node

    def _create_aside(self, parent: UpperNode, name: bytes, attributes: UpperAttributes) -> UpperNode:
        with self.staging.prepared() as temporary:
            fd = self.calls.create(temporary, os.O_RDWR, 0o600, self.staging.directory)
            try:
                node = new_node(FILE, parent, name, os.fstat(fd))
                self.attributes.dress(temporary, fd, node, attributes, parent)
                self._publish(temporary, node, parent, name)
            except BaseException:
                os.close(fd)
                raise
        self.descriptors.keep(node, fd)
        return node

    def mkdir(
        self, parent: UpperNode, name: bytes, attributes: UpperAttributes, opaque: bool = False
    ) -> UpperNode:
        """A new directory; `opaque` when the lower shows through its parent."""
        if name in parent.children or not self.attributes.is_plain(attributes, DIRECTORY):
            return self._mkdir_aside(parent, name, attributes, opaque)
        directory = self.descriptors.directory(parent)
        self.calls.mkdir(name, attributes.mode, directory)
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if stat.S_IMODE(status.st_mode) & ~stat.S_ISGID != attributes.mode & ~stat.S_ISGID:
                self.calls.chmod(name, attributes.mode | status.st_mode & stat.S_ISGID, directory)
        except BaseException:
            with contextlib.suppress(OSError):
                self.calls.rmdir(name, directory)
            raise
        node = new_node(DIRECTORY, parent, name, status)
        parent.enter(name, node)
        if opaque:
            # Not needed, since the lower has no such name now; a later version of the shard may have it.
            with contextlib.suppress(OSError):
                self.whiteouts.make_opaque(node)
        return node

    def _mkdir_aside(self, parent: UpperNode, name: bytes, attributes: UpperAttributes, opaque: bool) -> UpperNode:
        with self.staging.prepared() as temporary:
            self.calls.mkdir(temporary, 0o700, self.staging.directory)
            fd = os.open(temporary, OPEN_DIRECTORY, dir_fd=self.staging.directory)
            try:
                node = new_node(DIRECTORY, parent, name, os.fstat(fd))
                if opaque:
                    self.calls.setxattr(fd, OPAQUE, b"y")
                    node.opaque = True
                self.attributes.dress(temporary, fd, node, attributes, parent)
            finally:
                os.close(fd)
            self._publish(temporary, node, parent, name)
        return node

    def mknod(
        self, parent: UpperNode, name: bytes, attributes: UpperAttributes, form: int, device: int = 0
    ) -> UpperNode:
        """A new fifo, socket or device of the type `form` (S_IFIFO ...)."""
        with self.staging.prepared() as temporary:
            self.calls.mknod(temporary, form | 0o600, device, self.staging.directory)
            status = os.stat(temporary, dir_fd=self.staging.directory, follow_symlinks=False)
            kind = FILE if form == stat.S_IFREG else OTHER
            node = new_node(kind, parent, name, status)
            self.attributes.dress(temporary, -1, node, attributes, parent)
            self._publish(temporary, node, parent, name)
        return node

    def symlink(self, parent: UpperNode, name: bytes, attributes: UpperAttributes, target: bytes) -> UpperNode:
        with self.staging.prepared() as temporary:
            self.calls.symlink(target, temporary, self.staging.directory)
            status = os.stat(temporary, dir_fd=self.staging.directory, follow_symlinks=False)
            node = new_node(SYMLINK, parent, name, status)
            self.attributes.dress(temporary, -1, node, attributes, parent)
            self._publish(temporary, node, parent, name)
        return node

    def link(self, node: UpperNode, parent: UpperNode, name: bytes) -> None:
        """Another name for a file."""
        directory = self.descriptors.directory(parent)
        here = self.descriptors.where(node)
        if name in parent.children:
            with self.staging.prepared() as temporary:
                self.calls.link(node.name, here, temporary, self.staging.directory)
                self.calls.rename(temporary, self.staging.directory, name, directory)
        else:
            self.calls.link(node.name, here, name, directory)
        node.more = [*(node.more or []), (parent, name)]
        parent.enter(name, node)

    def _publish(self, temporary: bytes, node: UpperNode, parent: UpperNode, name: bytes) -> None:
        """Move something from work/ to its place, where there is nothing or a whiteout."""
        node.parent, node.name = parent, name
        directory = self.descriptors.directory(parent)
        if name not in parent.children:
            self.calls.rename(temporary, self.staging.directory, name, directory, NOREPLACE)
        elif node.kind != DIRECTORY:
            self.calls.rename(temporary, self.staging.directory, name, directory)
        else:
            self.calls.rename(temporary, self.staging.directory, name, directory, EXCHANGE)
            self.staging.throw_away(temporary, self.staging.directory)
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
        with self.staging.prepared() as temporary:
            fd = self.calls.create(temporary, os.O_RDWR, 0o600, self.staging.directory)
            try:
                node = new_node(FILE, parent, name, os.fstat(fd))
                node.known = None  # the kernel may have known the other for long
                end = 0
                for chunk in content:
                    write_all(self.calls, fd, chunk, end)
                    end += len(chunk)
                if size is not None and size != end:
                    self.calls.truncate(fd, size)
                if origin is not None:
                    self.calls.setxattr(fd, ORIGIN, b"%d:%x" % origin)
                    node.origin = origin
                self.attributes.dress(temporary, fd, node, attributes, parent)
                if end:
                    self.calls.fsync(fd)
                with self._same_times(parent):
                    self._publish(temporary, node, parent, name)
            except BaseException:
                os.close(fd)
                raise
        node.dirty = not end
        self.descriptors.keep(node, fd)
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
        fd = self.descriptors.directory(parent)
        before = os.fstat(fd)
        yield
        if parent is not self.orphans.top:
            with contextlib.suppress(OSError):
                self.calls.utime(
                    b".", (before.st_atime_ns, before.st_mtime_ns), self.descriptors.directory(parent)
                )
