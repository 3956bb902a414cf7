"""Whiteouts and opaque directories: the marks in the upper that hide names of the lower.

A whiteout is a hard link to one prototype in work/: a character device 0:0, or an empty file with an attribute
where no device can be made. Which names are hidden is decided in `overlay/writable_tree.py`.

The kernel's overlayfs lists the whiteouts of a directory that shows nothing of the lower, as names that cannot be
looked up. So there are none in such a directory; and where the lower's directory may go, with another version of
its shard, the directory of the upper has a mark.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from wdsfs.overlay.staging import Staging
from wdsfs.overlay.system_calls import SystemCalls
from wdsfs.overlay.upper_descriptors import Descriptors
from wdsfs.overlay.upper_format import (
    DIRECTORY,
    MERGED,
    OPAQUE,
    ORIGIN,
    THE_WHITEOUT,
    WHITED_OUT,
    Origin,
    UpperNode,
)

PROTOTYPE = b"whiteout"  # in work/; all whiteouts are hard links to it
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}  # a later write fails with these; no reason not to mount


class Whiteouts:
    """Makes and removes whiteouts, and makes directories opaque.

    `by_attribute`: True if whiteouts here are files with an attribute, not devices.
    """

    def __init__(self, descriptors: Descriptors, staging: Staging, calls: SystemCalls) -> None:
        self.descriptors = descriptors
        self.staging = staging
        self.calls = calls
        self.by_attribute = False

    def find_prototype(self) -> None:
        """Find the prototype and with it the form of whiteouts, or make it."""
        try:
            status = os.stat(PROTOTYPE, dir_fd=self.staging.directory, follow_symlinks=False)
            self.by_attribute = not stat.S_ISCHR(status.st_mode)
        except FileNotFoundError:
            try:
                self._make_prototype()
            except OSError as error:
                if error.errno not in DISK_FULL:
                    raise

    def _make_prototype(self) -> None:
        """Make the file that whiteouts are links to: a device, or a file with an attribute if no device can be
        made."""
        with self.staging.prepared() as temporary:
            try:
                self.calls.mknod(temporary, stat.S_IFCHR, 0, self.staging.directory)
                self.by_attribute = False
            except PermissionError:
                self.by_attribute = True
                fd = self.calls.create(temporary, os.O_RDWR, 0o600, self.staging.directory)
                try:
                    self.calls.setxattr(fd, WHITED_OUT, b"y")
                finally:
                    os.close(fd)
            self.calls.rename(temporary, self.staging.directory, PROTOTYPE, self.staging.directory)

    def hide(self, parent: UpperNode, name: bytes) -> None:
        """Hide a name that the lower has and the upper has not."""
        self.make(name, self.descriptors.directory(parent), parent)
        parent.enter(name, THE_WHITEOUT)

    def reveal(self, parent: UpperNode, name: bytes) -> None:
        """Remove a whiteout: the name of the lower is visible again."""
        self.calls.unlink(name, self.descriptors.directory(parent))
        del parent.children[name]
        parent.dirty = True

    def make(self, name: bytes, directory: int, parent: UpperNode) -> None:
        """Make a whiteout that is in the directory `parent`, or will be moved there."""
        self.mark(parent)
        try:
            self.calls.link(PROTOTYPE, self.staging.directory, name, directory)
        except OSError as error:
            if error.errno not in (errno.EMLINK, errno.ENOENT):
                raise
            self._make_prototype()  # the old one has as many links as a file can have
            self.calls.link(PROTOTYPE, self.staging.directory, name, directory)

    def mark(self, parent: UpperNode) -> None:
        """Mark a directory for whiteouts: the kernel looks for them in marked ones only, once the lower's is gone,
        and always for those in the form of an attribute."""
        if not parent.merged and not parent.opaque and parent.parent is not None:
            with contextlib.suppress(OSError):  # a full disk is no reason to keep what shall go
                self.calls.setxattr(self.descriptors.directory(parent), MERGED, b"")
                parent.merged = True
        if self.by_attribute:
            fd = self.descriptors.directory(parent)
            if OPAQUE not in os.listxattr(fd):
                self.calls.setxattr(fd, OPAQUE, b"x")

    def make_opaque(self, node: UpperNode, origin: Origin | None = None) -> None:
        """Make a directory opaque: nothing of the lower shows through, and its whiteouts, which hide nothing any
        more, go. `origin` keeps its inode number."""
        fd = self.descriptors.directory(node)
        if origin is not None:
            self.calls.setxattr(fd, ORIGIN, b"%d:%x" % origin)
            node.origin = origin
        self.calls.setxattr(fd, OPAQUE, b"y")
        node.opaque = True
        node.lower = 0
        node.dirty = True
        self._clear(node)

    def _clear(self, directory: UpperNode) -> None:
        """Remove all whiteouts of a directory. Errors are ignored: the next start tries again."""
        for name in [name for name, child in directory.children.items() if child is THE_WHITEOUT]:
            with contextlib.suppress(OSError):
                self.reveal(directory, name)

    def settle(self, top: UpperNode) -> None:
        """Remove whiteouts that hide nothing, whatever the lower has, and mark the directories of the others.

        A process that was killed has left them, or an earlier version.
        """
        waiting = [(top, True)]
        while waiting:
            directory, is_seen_through = waiting.pop()
            if any(child is THE_WHITEOUT for child in directory.children.values()):
                if is_seen_through:
                    self.mark(directory)
                else:
                    self._clear(directory)
            waiting += [
                (child, is_seen_through and not child.opaque)
                for child in directory.children.values()
                if child.kind == DIRECTORY
            ]
