"""The guarantee of fsync: when it returns, the bytes of a file or the names of a directory are on disk, and every
name on the paths to it from the top of the upper.

A node is `dirty` until its own bytes or names are known to be on disk. With `only_data` (fdatasync) attributes of
a file may be missing after a power cut, its bytes and size not. Copies of the lower are on disk before they get
their names (`overlay/new_entries.py`); a clean unmount writes everything (`upper_dir.UpperDirectory.close`).
"""

from __future__ import annotations

from wdsfs.overlay.orphans import Orphans
from wdsfs.overlay.system_calls import SystemCalls
from wdsfs.overlay.upper_descriptors import Descriptors
from wdsfs.overlay.upper_format import DIRECTORY, FILE, UpperNode


class Durability:
    """Syncs nodes of the upper to disk. All methods raise OSErrors."""

    def __init__(self, descriptors: Descriptors, orphans: Orphans, calls: SystemCalls) -> None:
        self.descriptors = descriptors
        self.orphans = orphans
        self.calls = calls

    def sync(self, node: UpperNode, only_data: bool = False) -> None:
        """Sync a node, and every name on the paths to it."""
        if node.dirty and node.kind == FILE:
            if only_data:
                self.calls.fdatasync(self.descriptors.file(node))
            else:
                self.calls.fsync(self.descriptors.file(node))
                node.dirty = False
        if node.kind == DIRECTORY:
            self._sync_up(node)
        for parent, _ in node.places():
            if parent is not self.orphans.top:
                self._sync_up(parent)

    def _sync_up(self, node: UpperNode) -> None:
        for directory in node.chain():
            if directory.dirty and directory is not self.orphans.top:
                self.calls.fsync(self.descriptors.directory(directory))
                directory.dirty = False

    def sync_content(self, node: UpperNode) -> None:
        """Write a file's content to disk; its names may still be in memory only."""
        if node.dirty and node.kind == FILE:
            self.calls.fsync(self.descriptors.file(node))
            node.dirty = False
