"""Directories whose names come from several tables: the top, folders of several shards, large directories.

The inode of one is reserved when it is first seen, for its children name it. Its names are collected as columns,
and written when all are known.
"""

from __future__ import annotations

import numpy as np

from wdsfs.kernel.image_file import ImageFile
from wdsfs.kernel.table import NO_NAMES, Outside, Table, placed
from wdsfs.tree.texts import Ints
from wdsfs.tree.tree import Node

_NAMES = 1 << 16  # of directories that are laid out together, unless one has more


class OpenDirectories:
    """Directories of `image` that are not written yet, by any keys."""

    def __init__(self, image: ImageFile) -> None:
        self._image = image
        self._nids: dict[object, int] = {}
        self._described: dict[int, tuple[Node, int]] = {}  # by inode number; with that of its directory
        self._parts: list[Outside] = [NO_NAMES]

    @property
    def nids(self) -> list[int]:
        """The inode numbers of all."""
        return [*self._nids.values()]

    def reserve(self, key: object) -> int:
        """The inode number of a directory."""
        nid = self._nids.get(key)
        if nid is None:
            nid = self._nids[key] = self._image.reserve()
        return nid

    def is_described(self, nid: int) -> bool:
        """True if the attributes of a directory are known."""
        return nid in self._described

    def describe(self, nid: int, node: Node, parent: int) -> None:
        """Say which attributes a directory has, and in which one it is."""
        self._described[nid] = node, parent

    def add(self, names: Outside) -> None:
        """Add names to directories."""
        if len(names.nids):
            self._parts.append(names._replace(names=names.names.compact()))

    def write(self) -> None:
        """Write all that were described, and forget their names. Raises ImageError, OSError."""
        nids = np.array(sorted(self._described), np.int64)
        names = Outside.joined(self._parts)
        self._parts = [NO_NAMES]
        order = np.argsort(names.holders, kind="stable")
        ends = np.searchsorted(names.holders[order], nids, "right")
        first = row = 0
        while first < len(nids):
            last = max(first + 1, int(np.searchsorted(ends, row + _NAMES, "right")))
            rows, row = order[row : ends[last - 1]], int(ends[last - 1])
            self._write(nids[first:last], names, rows)
            first = last
        self._described.clear()

    def _write(self, nids: Ints, names: Outside, rows: Ints) -> None:
        described = [self._described[nid] for nid in nids.tolist()]
        nothing, texts = np.zeros(len(nids), np.int64), names.names.take(rows).compact()
        table = Table(
            mode=np.array([node.mode for node, _ in described], np.int64),
            links=np.array([node.links for node, _ in described], np.int64),
            size=nothing,
            mtime_ns=np.array([node.mtime_ns for node, _ in described], np.int64),
            device=nothing,
            block=nothing,
            parent=np.array([placed(parent) for _, parent in described], np.int64),
            holder=np.searchsorted(nids, names.holders[rows]),
            child=placed(names.nids[rows]),
            kind=names.kinds[rows].astype(np.int64),
            names=texts,
        )
        self._image.write_directories(nids, table)
