"""Owner, permissions and times of new files and directories in the upper.

A daemon that is not root must be able to open every file itself: then the permission bits of the file are wider
than those that the mount shows, and the attribute `user.wdsfs.mode` keeps the latter.
"""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from wdsfs.overlay.staging import Staging
from wdsfs.overlay.system_calls import SystemCalls
from wdsfs.overlay.upper_descriptors import Descriptors
from wdsfs.overlay.upper_format import DIRECTORY, FILE, MODE, SYMLINK, UpperNode


class UpperAttributes(NamedTuple):
    """The attributes of a new node. `owner`: uid and gid, or None for those of this process; times in ns."""

    mode: int
    owner: tuple[int, int] | None = None
    times: tuple[int, int] | None = None


class AttributeRules:
    """Sets the attributes of new nodes on disk."""

    def __init__(self, descriptors: Descriptors, staging: Staging, calls: SystemCalls) -> None:
        self.descriptors = descriptors
        self.staging = staging
        self.calls = calls
        self.as_root = os.geteuid() == 0
        self._own = os.geteuid(), os.getegid()

    def is_plain(self, attributes: UpperAttributes, kind: int) -> bool:
        """True if a node that this process creates has these attributes without further calls."""
        if attributes.times is not None or self.widened(attributes.mode, kind) != attributes.mode:
            return False
        return not self.as_root or attributes.owner is None or attributes.owner == self._own

    def widened(self, mode: int, kind: int) -> int:
        """The permission bits with which this process can always open the file."""
        if self.as_root or kind not in (FILE, DIRECTORY):
            return mode
        return mode | (0o700 if kind == DIRECTORY else 0o600)

    def dress(self, name: bytes, fd: int, node: UpperNode, attributes: UpperAttributes, parent: UpperNode) -> None:
        """Set the attributes of a new node in work/, whose descriptor is `fd` (-1: none)."""
        if attributes.times is None:
            attributes = self._as_in(parent, node.kind, attributes)
        if attributes.owner is not None and self.as_root:
            self.calls.chown(name, *attributes.owner, self.staging.directory)
        if node.kind != SYMLINK:
            mode = self.widened(attributes.mode, node.kind)
            if mode != attributes.mode:
                self.calls.setxattr(fd, MODE, b"%o" % attributes.mode)
                node.mode = attributes.mode
            self.calls.chmod(name, mode, self.staging.directory)
        if attributes.times is not None:
            self.calls.utime(name, attributes.times, self.staging.directory)

    def _as_in(self, parent: UpperNode, kind: int, attributes: UpperAttributes) -> UpperAttributes:
        """The attributes with what is inherited from a directory with setgid, as if the node was created there."""
        above = os.fstat(self.descriptors.directory(parent))
        if not above.st_mode & stat.S_ISGID:
            return attributes
        uid = -1 if attributes.owner is None else attributes.owner[0]
        mode = attributes.mode | (stat.S_ISGID if kind == DIRECTORY else 0)
        return attributes._replace(mode=mode, owner=(uid, above.st_gid))
