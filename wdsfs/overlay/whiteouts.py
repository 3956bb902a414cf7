"""The marks in an upper that hide names of the lower: whiteouts and opaque directories.

A whiteout is a hard link to one prototype in work/: a character device 0:0, or an empty file with an attribute
where no device can be made. `overlay/writable_tree.py` decides which names are hidden.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from wdsfs.overlay.upper_files import UpperFiles
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
from wdsfs.overlay.work_directory import WorkDirectory

PROTOTYPE = b"whiteout"  # in work/; all whiteouts are hard links to it
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}  # a later write fails with these; mounting is possible


class Whiteouts:
    """Makes and removes these marks.

    In a directory that shows nothing of the lower, the kernel's overlayfs lists whiteouts as names that cannot be
    looked up. So such a directory has no whiteouts. Where the lower's directory may disappear with another version
    of its shard, the directory of the upper has a mark.

    `by_attribute`: True if whiteouts here are files with an attribute, not devices.
    """

    def __init__(self, files: UpperFiles, work: WorkDirectory) -> None:
        self.files = files
        self.work = work
        self.calls = files.calls
        self.by_attribute = False

    # --- the prototype

    def start(self) -> None:
        """Find the prototype, or make it."""
        try:
            status = os.stat(PROTOTYPE, dir_fd=self.work.fd, follow_symlinks=False)
            self.by_attribute = not stat.S_ISCHR(status.st_mode)
        except FileNotFoundError:
            try:
                self._make_prototype()
            except OSError as error:
                if error.errno not in DISK_FULL:
                    raise

    def _make_prototype(self) -> None:
        with self.work.prepared() as temporary:
            try:
                self.calls.mknod(temporary, stat.S_IFCHR, 0, self.work.fd)
                self.by_attribute = False
            except PermissionError:
                self.by_attribute = True
                self.work.make_file(temporary, WHITED_OUT, b"y")
            self.calls.rename(temporary, self.work.fd, PROTOTYPE, self.work.fd)

    def link(self, name: bytes, directory: int) -> None:
        """Make a whiteout: a hard link to the prototype."""
        try:
            self.calls.link(PROTOTYPE, self.work.fd, name, directory)
        except OSError as error:
            if error.errno not in (errno.EMLINK, errno.ENOENT):
                raise
            self._make_prototype()  # the old prototype has the most links that a file can have
            self.calls.link(PROTOTYPE, self.work.fd, name, directory)

    # --- names that are hidden

    def hide(self, parent: UpperNode, name: bytes) -> None:
        """Hide a name that the lower has and the upper has not."""
        self.make(name, self.files.directory(parent), parent)
        parent.enter(name, THE_WHITEOUT)

    def reveal(self, parent: UpperNode, name: bytes) -> None:
        """Remove a whiteout: the name of the lower is visible again."""
        self.calls.unlink(name, self.files.directory(parent))
        del parent.children[name]
        parent.dirty = True

    def make(self, name: bytes, directory: int, parent: UpperNode) -> None:
        """Make a whiteout that is in the directory `parent`, or will be moved there."""
        self.mark(parent)
        self.link(name, directory)

    def mark(self, parent: UpperNode) -> None:
        """Mark a directory so that the kernel looks for whiteouts in it.

        Without the mark it ignores whiteouts that are files, and others when the lower's directory is gone.
        """
        if not parent.merged and not parent.opaque and parent.parent is not None:
            with contextlib.suppress(OSError):  # a removal must succeed on a full disk, too
                self.calls.setxattr(self.files.directory(parent), MERGED, b"")
                parent.merged = True
        if self.by_attribute:
            fd = self.files.directory(parent)
            if OPAQUE not in os.listxattr(fd):
                self.calls.setxattr(fd, OPAQUE, b"x")

    def make_opaque(self, node: UpperNode, origin: Origin | None = None) -> None:
        """Make a directory opaque: nothing of the lower shows through. `origin` keeps its inode number.

        Its whiteouts, which hide nothing any more, are removed.
        """
        fd = self.files.directory(node)
        if origin is not None:
            self.calls.setxattr(fd, ORIGIN, b"%d:%x" % origin)
            node.origin = origin
        self.calls.setxattr(fd, OPAQUE, b"y")
        node.opaque = True
        node.lower, node.is_unread = 0, False
        node.dirty = True
        self._clear(node)

    def _clear(self, directory: UpperNode) -> None:
        """Remove all whiteouts of a directory. Errors are ignored: the next start tries again."""
        for name in [name for name, child in directory.children.items() if child is THE_WHITEOUT]:
            with contextlib.suppress(OSError):
                self.reveal(directory, name)

    def remove_needless(self, top: UpperNode) -> None:
        """Remove whiteouts that can hide nothing, whatever the lower has, and mark the directories of the others.

        These are leftovers of a killed process, or of an earlier version of wdsfs.
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
