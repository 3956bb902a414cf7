"""A writable mount as pages show it: its files, read through the mount, and what its overlay changes.

Nothing is changed from here. What a commit makes of the changes is decided in `packing`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from wdsfs import names as naming
from wdsfs.errors import NoSuchEntry, WdsfsError
from wdsfs.overlay import upper_format
from wdsfs.overlay.overlay_directory import OverlayDirectory
from wdsfs.overlay.upper_directory import load_upper, opened_upper
from wdsfs.overlay.upper_format import DIRECTORY, FILE, OPEN_DIRECTORY, THE_WHITEOUT, UpperNode
from wdsfs.packing import diff
from wdsfs.packing.diff import Changes
from wdsfs.pages.library import FILES_MAX, NOWHERE, File, Library, Sample
from wdsfs.pages.preview import Source
from wdsfs.tree.tree import FULL_NAMES

UPPER_SECONDS = 1.0  # how long the names in the upper are believed: others change it at any time
NEW_MAX = 10_000  # new samples that are listed; further ones are on the page of changes only
REST_SHARE = 20  # new samples are not searched again for this many times the duration of the last search


@dataclass(slots=True)
class MountedSource:
    """A file in a mount, as `preview.Source`."""

    mount: WritableMount
    path: bytes
    size: int
    key: Hashable

    def read(self, offset: int, length: int) -> bytes:
        with self.mount.directory_of(self.path) as (directory, name):
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
        parts = []
        with open(fd, "rb", buffering=0) as file:
            while length > 0 and (data := os.pread(file.fileno(), length, offset)):
                parts.append(data)
                offset, length = offset + len(data), length - len(data)
        return b"".join(parts)


class WritableMount:
    """The files of a mount by their paths, and the changes of its overlay, which is in the directory `overlay`.

    No symbolic link is followed on the way to a file: it could lead out of the mount.
    """

    def __init__(self, library: Library, mountpoint: str, overlay: str) -> None:
        self.mountpoint = mountpoint
        self._library, self._overlay = library, OverlayDirectory(Path(overlay))
        self._upper, self._upper_end = upper_format.empty(), 0.0
        self._new: Sequence[Sample] = ()
        self._new_of: UpperNode | None = None  # the upper that the new samples were searched in
        self._new_end = 0.0

    # --- files

    @contextlib.contextmanager
    def directory_of(self, path: bytes) -> Iterator[tuple[int, bytes]]:
        """Open the directory of a file or a sample; yield it and the name there. Raises NoSuchEntry, OSErrors."""
        *folders, name = path.split(b"/")
        with _entry_errors(path):
            directory = os.open(self.mountpoint, OPEN_DIRECTORY)
            try:
                for folder in folders:
                    above = directory
                    directory = os.open(folder, OPEN_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
                    os.close(above)
                yield directory, name
            finally:
                os.close(directory)

    def files(self, path: bytes) -> list[File]:
        """Return the files of a sample. Raises NoSuchEntry, OSErrors."""
        files: list[File] = []
        with self.directory_of(path + b"/") as (directory, _), os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False) and len(files) < FILES_MAX:
                    files.append(File(os.fsencode(entry.name), entry.stat(follow_symlinks=False).st_size))
        return files

    def source(self, path: bytes) -> Source:
        """Return the bytes of a file. Raises NoSuchEntry, OSErrors."""
        with self.directory_of(path) as (directory, name):
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            raise NoSuchEntry("only files can be read here")
        return MountedSource(self, path, status.st_size, (path, status.st_ino, status.st_size, status.st_mtime_ns))

    # --- changes

    def _names(self) -> UpperNode:
        """Return the names in the upper, at most UPPER_SECONDS old."""
        now = time.monotonic()
        if now > self._upper_end:
            with self._opened_upper() as (upper, _):
                self._upper, self._upper_end = upper, now + UPPER_SECONDS
            return upper
        return self._upper

    @contextlib.contextmanager
    def _opened_upper(self) -> Iterator[tuple[UpperNode, int]]:
        """Open the upper: its names, and a descriptor of its directory; before the first change none and -1."""
        with opened_upper(self._overlay) as directory:
            yield load_upper(self._overlay), directory

    def mark(self, path: bytes) -> str:
        """Return "removed", "changed", "new" or nothing for a directory or file at this path."""
        node = self._names()
        for name in path.split(b"/"):
            child = node.children.get(name)
            if child is THE_WHITEOUT or (child is None and node.opaque):
                return "removed"
            if child is None:
                return ""
            node = child
        return "changed" if self._library.answer(lambda now: now.has(path)) else "new"

    def changes(self) -> Changes:
        """Return the changes as `wdsfs diff` shows them."""
        with self._opened_upper() as (names, directory), self._library.asking():
            return diff.find(
                self._library.tree, names, lambda node: upper_format.open_below(directory, node.path())
            )

    def new_samples(self) -> Sequence[Sample]:
        """Return the samples that no shard has, by their paths. The list does not change."""
        names, began = self._names(), time.monotonic()
        if names is not self._new_of and began >= self._new_end:
            self._new, self._new_of = list(self._search_new(names)), names
            now = time.monotonic()
            self._new_end = now + (now - began) * REST_SHARE
        return self._new

    def _search_new(self, names: UpperNode) -> Iterator[Sample]:
        count = 0
        for path in _directories_with_files(names):
            if self._library.answer(lambda now, path=path: now.number_at(path)) is None:  # type: ignore[misc]
                with contextlib.suppress(WdsfsError, OSError):  # removed meanwhile
                    sample = self._new_sample(path)
                    if sample.names:
                        yield sample
                        count += 1
            if count == NEW_MAX:
                return

    def _new_sample(self, path: bytes) -> Sample:
        files = [file for file in self.files(path) if not naming.is_leaving(file.name)]
        names, sizes = tuple(file.name for file in files), tuple(file.size for file in files)
        columns = names
        if self._library.tree.view.names == FULL_NAMES:
            stem = path.rpartition(b"/")[2] + b"."
            columns = tuple(name.removeprefix(stem) for name in names)
        return Sample(NOWHERE, NOWHERE, NOWHERE, path, columns, names, sizes)


@contextlib.contextmanager
def _entry_errors(path: bytes) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise NoSuchEntry(f"{os.fsdecode(path)}: {error.strerror}") from error
        raise OSError(error.errno, error.strerror, os.fsdecode(path)) from error


def _directories_with_files(top: UpperNode) -> Iterator[bytes]:
    """Yield the paths of the directories of an upper that lie below another and hold a file, in the order of
    names.
    """
    waiting: list[tuple[bytes, UpperNode]] = [(b"", top)]
    while waiting:
        path, node = waiting.pop()
        children = sorted(node.children.items(), reverse=True)
        if b"/" in path and any(child.kind == FILE for _, child in children):
            yield path
        above = path + b"/" if path else b""
        waiting += [(above + name, child) for name, child in children if child.kind == DIRECTORY]
