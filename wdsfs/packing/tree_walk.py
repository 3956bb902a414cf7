"""Walks the trees that are packed, and finds their regular files.

Order: the files of a directory, then its directories, both by name, bytewise. So the files of a sample are side by
side in every layout, and the order is the same on every machine and file system.

Reads directories only. One thread.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from typing import NamedTuple

from wdsfs import names
from wdsfs.errors import CommitError, UsageError
from wdsfs.packing.changes import LEAVING, SPECIAL, SYMBOLIC
from wdsfs.packing.file_table import FileTable, FoundFile, LeftOut

_KIND = 0o170000  # bits of a mode: not `stat.S_ISREG`, a call that each file would pay for

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

# Semantics decision: `.git`, `.cache` and the like are not data. A hidden directory is refused like a hidden file.
HIDDEN_DIRECTORY = "is a hidden directory"
LINKED = f"{SYMBOLIC}: --follow-links packs what it leads to"
DANGLING = "is a symbolic link to nothing"
UNREADABLE = "cannot be read by this user"
LOOP = "is a symbolic link to a directory above it"


class WalkRules(NamedTuple):
    """Rules of which files are packed: what links lead to; what programs have left behind (`names.is_leaving`)."""

    follow_links: bool = False
    with_leavings: bool = False


def walk(directories: Sequence[str], rules: WalkRules, left_out: LeftOut) -> FileTable:
    """Return the files of these trees; what is no file to pack goes to `left_out`.

    Raises UsageError for a tree that is named twice, or lies in another one; CommitError for a directory that
    cannot be read.
    """
    roots = [os.fsencode(os.path.abspath(one)) for one in directories]
    _refuse_overlap(roots, directories)
    table = FileTable(roots)
    for number in range(len(roots)):
        _Walk(table, number, rules, left_out).run()
    return table


def _refuse_overlap(roots: Sequence[bytes], typed: Sequence[str]) -> None:
    real = [os.path.realpath(root) for root in roots]
    for one, path in enumerate(real):
        for other, above in enumerate(real):
            if one != other and os.path.commonpath([path, above]) == above:
                raise UsageError(f"{typed[one]} lies in {typed[other]}: its files would be packed twice")


class _Found(NamedTuple):
    files: list[FoundFile]
    directories: list[bytes]


class _Walk:
    """The walk of one tree."""

    def __init__(self, table: FileTable, root: int, rules: WalkRules, left_out: LeftOut) -> None:
        self.table, self.root, self.rules, self.left_out = table, root, rules, left_out
        self.top = table.roots[root]
        self.checks_access = os.geteuid() != 0

    def run(self) -> None:
        # With links followed, what is above each directory is needed, to notice a loop.
        waiting: list[tuple[bytes, tuple[tuple[int, int], ...]]] = [(b"", ())]
        while waiting:
            path, above = waiting.pop()
            try:
                found, identity = self._directory(path, above)
            except OSError as error:
                raise CommitError(f"{os.fsdecode(self._absolute(path))}: {error.strerror}") from None
            if found.files:
                self.table.add(self.root, path, found.files)
            prefix = path + b"/" if path else b""
            waiting.extend((prefix + name, identity) for name in reversed(found.directories))

    def _absolute(self, path: bytes) -> bytes:
        return self.top + b"/" + path if path else self.top

    def _directory(
        self, path: bytes, above: tuple[tuple[int, int], ...]
    ) -> tuple[_Found, tuple[tuple[int, int], ...]]:
        """Return the files and directories in a directory, sorted, and what is above these. Raises OSErrors."""
        # The directory itself may be a link only where links are followed, or if the user has named it.
        flags = _OPEN_DIRECTORY | (0 if self.rules.follow_links or not path else os.O_NOFOLLOW)
        fd = os.open(self._absolute(path), flags)
        try:
            if self.rules.follow_links:
                own = os.fstat(fd)
                identity = (own.st_dev, own.st_ino)
                if identity in above:
                    self.left_out.refuse(self._absolute(path), LOOP)
                    return _Found([], []), above
                above = (*above, identity)
            found = self._entries(fd, path)
        finally:
            os.close(fd)
        found.files.sort()
        found.directories.sort()
        return found, above

    def _entries(self, fd: int, path: bytes) -> _Found:
        files, directories = [], []
        follow, leavings = self.rules.follow_links, self.rules.with_leavings
        is_leaving, encoded = names.is_leaving, os.fsencode
        with os.scandir(fd) as entries:
            for entry in entries:
                name = encoded(entry.name)
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
                regular = mode & _KIND == stat.S_IFREG
                if not leavings and is_leaving(name, not regular and stat.S_ISDIR(mode)):
                    self.left_out.leave(self._absolute(path) + b"/" + name, LEAVING)
                elif regular:
                    if self.checks_access and not self._may_read(mode, fd, name):
                        self.left_out.refuse(self._absolute(path) + b"/" + name, UNREADABLE)
                    else:
                        files.append((name, about.st_size, about.st_mtime_ns))
                elif stat.S_ISDIR(mode) and not name.startswith(b"."):
                    directories.append(name)
                else:
                    self.left_out.refuse(self._absolute(path) + b"/" + name, _reason(mode))
        return _Found(files, directories)

    def _may_read(self, mode: int, fd: int, name: bytes) -> bool:
        # Asked of the few that not everybody can read: it is one more system call.
        return mode & 0o444 == 0o444 or os.access(name, os.R_OK, dir_fd=fd)

    def _note_gone(self, entry: os.DirEntry[str], path: bytes, name: bytes) -> None:
        if entry.is_symlink():
            self.left_out.refuse(self._absolute(path) + b"/" + name, DANGLING)
            return
        where = os.fsdecode(self._absolute(path) + b"/" + name)
        raise CommitError(f"{where} has vanished while the tree was read: start again when nobody changes it")


def _reason(mode: int) -> str:
    if stat.S_ISLNK(mode):
        return LINKED
    return HIDDEN_DIRECTORY if stat.S_ISDIR(mode) else SPECIAL
