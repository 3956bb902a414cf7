"""Walks trees of files for `pack`, and keeps the regular files as columns: names, sizes, times.

Order: the files of a directory, then its directories, both by name, bytewise. So the files of a sample are
neighbours in every layout, and the order is the same on every machine and file system. A file takes about 50 bytes
of memory, a directory about 200. Only directories are read. Single-threaded.
"""

from __future__ import annotations

import errno
import fnmatch
import itertools
import os
import stat
import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsfs import names
from wdsfs.errors import CommitError, UsageError, counted
from wdsfs.packing import reasons
from wdsfs.packing.plan import Remark

_ENCODING = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()  # `os.fsencode` would be a call per file
_KIND = 0o170000  # bits of a mode; `stat.S_ISREG` would be a call per file

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

# Semantics decision: `.git`, `.cache` and the like are not data. A hidden directory is refused like a hidden file.
HIDDEN_DIRECTORY = "is a hidden directory"
LINKED = f"{reasons.SYMBOLIC}: --follow-links packs what it leads to"
DANGLING = "is a symbolic link to nothing"
UNREADABLE_FILE = "cannot be read by this user"
LOOP = "is a symbolic link to a directory above it"


class WalkRules(NamedTuple):
    """Rules for which files are packed: targets of links; files left behind by programs (`names.is_leaving`).

    `exclude` are shell patterns for the path of a file or directory below its tree, or for its name. `tables` are
    absolute paths of files that describe the samples, and are not packed.
    """

    follow_links: bool = False
    with_leavings: bool = False
    exclude: tuple[str, ...] = ()
    tables: tuple[bytes, ...] = ()


def walk(
    directories: Sequence[str], rules: WalkRules, left_out: LeftOut, *, with_names: bool = False
) -> FileTable:
    """Return the files of these trees; add files that are not to be packed to `left_out`.

    `with_names`: paths of files in the trees begin with the name of their tree.
    Raises UsageError for a tree that is named twice, or lies in another one; CommitError for a directory that
    cannot be read.
    """
    roots = [os.fsencode(os.path.abspath(directory)) for directory in directories]
    _refuse_overlap(roots, directories)
    table = FileTable(roots, with_names=with_names)
    for number in range(len(roots)):
        _Walk(table, number, rules, left_out).run()
    return table


def _refuse_overlap(roots: Sequence[bytes], typed: Sequence[str]) -> None:
    real = [os.path.realpath(root) for root in roots]
    for number, path in enumerate(real):
        for other, above in enumerate(real):
            if number != other and os.path.commonpath([path, above]) == above:
                raise UsageError(f"{typed[number]} lies in {typed[other]}: its files would be packed twice")


class _Walk:
    """The walk of one tree."""

    def __init__(self, table: FileTable, root: int, rules: WalkRules, left_out: LeftOut) -> None:
        self.table, self.root, self.rules, self.left_out = table, root, rules, left_out
        self.top = table.roots[root]
        self.start = self.top.removeprefix(table.tops[root]).lstrip(b"/")
        self.checks_access = os.geteuid() != 0
        self.patterns = {os.fsencode(pattern).rstrip(b"/"): pattern for pattern in rules.exclude}
        real = os.path.realpath(self.top)
        places = ((os.path.realpath(os.path.dirname(path)), os.path.basename(path)) for path in rules.tables)
        self.tables = {os.path.relpath(os.path.join(*place), real) for place in places}

    def run(self) -> None:
        # When links are followed, the parents of each directory are needed to notice a loop.
        waiting: list[tuple[bytes, tuple[tuple[int, int], ...]]] = [(b"", ())]
        while waiting:
            path, above = waiting.pop()
            try:
                files, directories, identity = self._directory(path, above)
            except OSError as error:
                raise CommitError(f"{os.fsdecode(self._absolute(path))}: {error.strerror}") from None
            if files:
                self.table.add(self.root, b"/".join(filter(None, (self.start, path))), files)
            prefix = path + b"/" if path else b""
            waiting.extend((prefix + name, identity) for name in reversed(directories))

    def _absolute(self, path: bytes) -> bytes:
        return self.top + b"/" + path if path else self.top

    def _directory(
        self, path: bytes, above: tuple[tuple[int, int], ...]
    ) -> tuple[list[FoundFile], list[bytes], tuple[tuple[int, int], ...]]:
        """Return the files and directories in a directory, sorted, and the parents of these. Raises OSErrors."""
        # The directory itself may be a link only where links are followed, or if the user has named it.
        flags = _OPEN_DIRECTORY | (0 if self.rules.follow_links or not path else os.O_NOFOLLOW)
        fd = os.open(self._absolute(path), flags)
        try:
            if self.rules.follow_links:
                own = os.fstat(fd)
                identity = (own.st_dev, own.st_ino)
                if identity in above:
                    self.left_out.refuse(self._absolute(path), LOOP)
                    return [], [], above
                above = (*above, identity)
            files, directories = self._entries(fd, path)
        finally:
            os.close(fd)
        return sorted(files), sorted(directories), above

    def _entries(self, fd: int, path: bytes) -> tuple[list[FoundFile], list[bytes]]:
        files, directories = [], []
        follow, leavings = self.rules.follow_links, self.rules.with_leavings
        above, excludes = path + b"/" if path else b"", bool(self.patterns or self.tables)
        is_leaving, regular_kind = names.is_leaving, stat.S_IFREG
        with os.scandir(fd) as entries:
            for entry in entries:
                name = entry.name.encode(*_ENCODING)
                if excludes and self._is_excluded(above + name, name):
                    continue
                try:
                    about = entry.stat(follow_symlinks=follow)
                except FileNotFoundError:
                    self._note_gone(entry, path, name)
                    continue
                except OSError as error:
                    if error.errno != errno.ELOOP:
                        raise
                    self.left_out.refuse(self._absolute(path) + b"/" + name, DANGLING)
                    continue
                mode = about.st_mode
                regular = mode & _KIND == regular_kind
                if not leavings and is_leaving(name, directory=not regular and stat.S_ISDIR(mode)):
                    self.left_out.leave(self._absolute(path) + b"/" + name, reasons.LEAVING)
                elif regular:
                    if self.checks_access and not self._may_read(mode, fd, name):
                        self.left_out.refuse(self._absolute(path) + b"/" + name, UNREADABLE_FILE)
                    else:
                        files.append((name, about.st_size, about.st_mtime_ns))
                elif stat.S_ISDIR(mode) and not name.startswith(b"."):
                    directories.append(name)
                else:
                    self.left_out.refuse(self._absolute(path) + b"/" + name, _reason(mode))
        return files, directories

    def _is_excluded(self, path: bytes, name: bytes) -> bool:
        """Return True for a table, and for a path below the tree that a pattern excludes, which is counted."""
        for pattern, typed in self.patterns.items():
            if fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(name, pattern):
                self.left_out.excluded[typed] += 1
                return True
        return path in self.tables

    def _may_read(self, mode: int, fd: int, name: bytes) -> bool:
        # Checked only for the few files that not everybody can read: it is one more system call.
        return mode & 0o444 == 0o444 or os.access(name, os.R_OK, dir_fd=fd)

    def _note_gone(self, entry: os.DirEntry[str], path: bytes, name: bytes) -> None:
        if entry.is_symlink():
            self.left_out.refuse(self._absolute(path) + b"/" + name, DANGLING)
            return
        where = os.fsdecode(self._absolute(path) + b"/" + name)
        raise CommitError(
            f"{where} has vanished while the tree was read: repeat the command when nobody changes the tree"
        )


def _reason(mode: int) -> str:
    if stat.S_ISLNK(mode):
        return LINKED
    return HIDDEN_DIRECTORY if stat.S_ISDIR(mode) else reasons.SPECIAL


REMARKS_MAX = 1000  # files left out that are named; the others are counted


# A regular file: its name in its directory, size in bytes, mtime in ns. Not a named tuple, which takes longer.
FoundFile = tuple[bytes, int, int]


class FoundDirectory(NamedTuple):
    """A directory with files: the number of its root, its path below the top of that (or empty), its rows."""

    root: int
    path: bytes
    first: int
    stop: int

    @property
    def prefix(self) -> bytes:
        """Return the path of a folder in member names, with its last slash."""
        return self.path + b"/" if self.path else b""


class FileTable:
    """Files by row, and the directories that have them, in the order of the walk.

    `sizes` (bytes) and `times_ns` are columns by row. `roots` are the absolute paths of the trees. Paths of
    directories are relative to `tops`: the roots, or with `with_names` the directory above each root.
    """

    def __init__(self, roots: Sequence[bytes], *, with_names: bool = False) -> None:
        self.roots = list(roots)
        self.tops = list(map(os.path.dirname, roots)) if with_names else self.roots
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
        return self.tops[directory.root] + (b"/" + directory.path if directory.path else b"")


class LeftOut:
    """Files that go into no shard: `unpackable` ones, which are never left out silently, and leavings of programs.

    The first of each are named, with the reason; all are counted. `excluded` counts files and directories by the
    pattern that excludes them.
    """

    def __init__(self) -> None:
        self.unpackable: list[Remark] = []
        self.leavings: list[Remark] = []
        self.unpackable_count = self.leavings_count = 0
        self.excluded = Counter[str]()

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
        if self.excluded:
            parts.append(f"{counted(self.excluded.total(), 'path')} that --exclude names")
        return ", ".join(parts)
