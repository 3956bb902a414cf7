"""The files of some trees in columns, in the order of the walk.

A file takes about 50 bytes, a directory some 200.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsfs.errors import counted
from wdsfs.packing.changes import Remark

REMARKS_MAX = 1000  # files left out that are named; the others are counted


# A regular file: its name in its directory, size in bytes, mtime in ns. Not a named tuple, which takes longer.
FoundFile = tuple[bytes, int, int]


class FoundDirectory(NamedTuple):
    """A directory with files: the number of its root, its path below that (empty for the root), its rows."""

    root: int
    path: bytes
    first: int
    stop: int

    @property
    def prefix(self) -> bytes:
        """The path of a folder in member names, with its last slash."""
        return self.path + b"/" if self.path else b""


class FileTable:
    """Files by row, and the directories that have them, in the order of the walk.

    `sizes` (bytes) and `times_ns` are columns by row; `roots` are the absolute paths of the trees.
    """

    def __init__(self, roots: Sequence[bytes]) -> None:
        self.roots = list(roots)
        self.directories: list[FoundDirectory] = []
        self.sizes, self.times_ns = array("q"), array("q")
        self._names, self._starts = bytearray(), array("q")

    def __len__(self) -> int:
        return len(self.sizes)

    def add(self, root: int, path: bytes, files: Sequence[FoundFile]) -> None:
        """Add a directory with its files, in their order."""
        first = len(self)
        names, sizes, times_ns = zip(*files, strict=True)
        self._starts.extend(itertools.accumulate((len(name) + 1 for name in names[:-1]), initial=len(self._names)))
        self.sizes.extend(sizes)
        self.times_ns.extend(times_ns)
        self._names += b"\0".join(names) + b"\0"  # no file name has a NUL
        self.directories.append(FoundDirectory(root, path, first, len(self)))

    def names_in(self, directory: FoundDirectory) -> list[bytes]:
        """Return the names of all files of a directory."""
        start, stop = self._starts[directory.first], self._end(directory.stop - 1)
        return bytes(self._names[start:stop]).split(b"\0")

    def names_of(self, rows: NDArray[np.int64]) -> bytes:
        """Return the names of these files, with a NUL between any two."""
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and bool((np.diff(rows) == 1).all()):
            return bytes(self._names[self._starts[int(rows[0])] : self._end(int(rows[-1]))])  # as they lie here
        return b"\0".join(map(self.name, rows.tolist()))

    def name(self, row: int) -> bytes:
        """Return the name of a file in its directory."""
        return bytes(self._names[self._starts[row] : self._end(row)])

    def _end(self, row: int) -> int:
        return (self._starts[row + 1] if row + 1 < len(self) else len(self._names)) - 1

    def path_of(self, directory: FoundDirectory) -> bytes:
        """Return the absolute path of a directory."""
        return self.roots[directory.root] + (b"/" + directory.path if directory.path else b"")


class LeftOut:
    """What is in no shard: `unpackable`, which nobody may lose without saying so, and leavings of programs.

    The first of each are named, with the reason; all are counted.
    """

    def __init__(self) -> None:
        self.unpackable: list[Remark] = []
        self.leavings: list[Remark] = []
        self.unpackable_count = self.leavings_count = 0

    def refuse(self, path: bytes, reason: str) -> None:
        """Note something that cannot be packed."""
        self.unpackable_count += 1
        if len(self.unpackable) < REMARKS_MAX:
            self.unpackable.append(Remark(path, reason))

    def leave(self, path: bytes, reason: str) -> None:
        """Note a leaving."""
        self.leavings_count += 1
        if len(self.leavings) < REMARKS_MAX:
            self.leavings.append(Remark(path, reason))

    @property
    def named(self) -> list[Remark]:
        return [*self.unpackable, *self.leavings]

    @property
    def summary(self) -> str:
        """`2 files that cannot be packed, 1 file that programs have left behind`; empty if there are none."""
        parts = []
        if self.unpackable_count:
            parts.append(f"{counted(self.unpackable_count, 'file')} that cannot be packed")
        if self.leavings_count:
            parts.append(f"{counted(self.leavings_count, 'file')} that programs have left behind")
        return ", ".join(parts)
