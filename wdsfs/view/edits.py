"""Changes of samples from the pages, by the same overlay as a mount's.

With `--overlay` the overlay is this process's own (`OwnFiles`): locked, and changed by the code that a mount runs.
A writable mount is changed through itself (`MountedFiles`). What both have in common, undo and the list of
changes, is `Edits`. One change at a time.
"""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import json
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from wdsfs import names
from wdsfs.commit import diff
from wdsfs.commit.changes import Changes, Rules
from wdsfs.dataset.indexing import indexed
from wdsfs.dataset.tree import AT_PARENT
from wdsfs.errors import EntryExists, NoSuchEntry, UsageError
from wdsfs.overlay import upper_format
from wdsfs.overlay.overlay_directory import OverlayDirectory
from wdsfs.overlay.restore import Restoration
from wdsfs.overlay.upper_format import OPEN_DIRECTORY, THE_WHITEOUT, UpperNode
from wdsfs.overlay.writable_tree import WritableTree
from wdsfs.previews.preview import Source
from wdsfs.storage.durable import Disk
from wdsfs.view.library import FILES_MAX, File, Library

EDIT_MAX = 1 << 20  # bytes of a file that can be edited in a page
UNDO_MAX, UNDO_BYTES = 100, 32 << 20  # changes that can be undone; bytes of files that are kept for that
UPPER_SECONDS = 1.0  # how long the names of an overlay that others may change are kept


class OverlayFiles(Protocol):
    """The files of a set with its changes."""

    def list(self, path: bytes) -> list[File]: ...

    def source(self, path: bytes) -> Source: ...

    def write(self, path: bytes, data: bytes) -> None: ...

    def remove(self, path: bytes) -> None: ...

    def restore(self, paths: Sequence[bytes]) -> None: ...


@dataclass(slots=True)
class OwnSource:
    """A file of a tree with changes, as `previews.preview.Source`."""

    files: OwnFiles
    inode: int
    size: int
    key: Hashable

    def read(self, offset: int, length: int) -> bytes:
        with self.files.library.lock:
            return indexed(self.files.tree.read, self.inode, offset, min(length, self.size - offset))


class OwnFiles:
    """The files of a tree with an overlay that nobody else uses."""

    def __init__(self, library: Library, tree: WritableTree) -> None:
        self.library, self.tree = library, tree

    def list(self, path: bytes) -> list[File]:
        with self.library.asking():
            node = indexed(self.tree.resolve, path)
            found: builtins.list[File] = []
            for one in self.tree.listing(node.inode, AT_PARENT):
                if stat.S_ISREG(one.node.mode) and len(found) < FILES_MAX:
                    found.append(File(one.name, one.node.size, one.node.mtime_ns))
            return found

    def source(self, path: bytes) -> Source:
        with self.library.asking():
            node = indexed(self.tree.resolve, path)
            if not stat.S_ISREG(node.mode):
                raise NoSuchEntry("only files can be read here")
            if node.upper is None:  # unchanged: read beside the lock
                return self.library.source(path)
            return OwnSource(self, node.inode, node.size, (node.inode, node.size, node.mtime_ns))

    def write(self, path: bytes, data: bytes) -> None:
        with self.library.asking():
            indexed(self._write, path, data)

    def _write(self, path: bytes, data: bytes) -> None:
        parent, _, name = path.rpartition(b"/")
        directory, temporary = self.tree.resolve(parent).inode, _temporary(name)
        with contextlib.suppress(NoSuchEntry):  # of an edit that was stopped
            self.tree.unlink(directory, temporary)
        inode = self.tree.create(directory, temporary, 0o644).inode
        written = 0
        while written < len(data):
            written += self.tree.write(inode, written, data[written:])
        self.tree.fsync(inode)
        self.tree.rename(directory, temporary, directory, name)
        self.tree.fsync(directory)

    def remove(self, path: bytes) -> None:
        with self.library.asking():
            indexed(self._remove, path)

    def _remove(self, path: bytes) -> None:
        directory = self.tree.resolve(path).inode
        for one in list(self.tree.listing(directory, AT_PARENT)):
            if not stat.S_ISDIR(one.node.mode):
                self.tree.unlink(directory, one.name)
        if not list(self.tree.listing(directory, AT_PARENT)):  # else it also holds other samples
            parent, _, name = path.rpartition(b"/")
            self.tree.rmdir(self.tree.resolve(parent).inode, name)
        self.tree.fsync(self.tree.resolve(path.rpartition(b"/")[0]).inode)

    def restore(self, paths: Sequence[bytes]) -> None:
        with self.library.asking():
            indexed(self.tree.restore, paths, lambda inode, name: None)


@dataclass(slots=True)
class MountedSource:
    """A file in a mount, as `previews.preview.Source`."""

    path: bytes
    size: int
    key: Hashable

    def read(self, offset: int, length: int) -> bytes:
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = []
            while length > 0 and (data := os.pread(fd, length, offset)):
                found.append(data)
                offset, length = offset + len(data), length - len(data)
            return b"".join(found)
        finally:
            os.close(fd)


class MountedFiles:
    """The files of a writable mount, by its paths. `undo` has its daemon restore paths below the top."""

    def __init__(self, mountpoint: str, undo: Callable[[Sequence[bytes]], None]) -> None:
        self._top, self.restore = os.fsencode(mountpoint), undo

    def _place(self, path: bytes) -> bytes:
        return self._top + b"/" + path

    def list(self, path: bytes) -> list[File]:
        found: builtins.list[File] = []
        with _as_entry_errors(path), os.scandir(self._place(path)) as entries:
            for one in entries:
                if one.is_file(follow_symlinks=False) and len(found) < FILES_MAX:
                    status = one.stat(follow_symlinks=False)
                    found.append(File(one.name, status.st_size, status.st_mtime_ns))
        return found

    def source(self, path: bytes) -> Source:
        with _as_entry_errors(path):
            status = os.lstat(self._place(path))
        if not stat.S_ISREG(status.st_mode):
            raise NoSuchEntry("only files can be read here")
        key = status.st_ino, status.st_size, status.st_mtime_ns
        return MountedSource(self._place(path), status.st_size, (path, *key))

    def write(self, path: bytes, data: bytes) -> None:
        place = self._place(path)
        directory, name = os.path.split(place)
        temporary = os.path.join(directory, _temporary(name))
        with _as_entry_errors(path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(temporary, flags, 0o644)
            try:
                written = 0
                while written < len(data):
                    written += os.write(fd, data[written:])
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, place)
            Disk().sync_directory(directory)

    def remove(self, path: bytes) -> None:
        with _as_entry_errors(path):
            for one in os.listdir(self._place(path)):
                place = self._place(path) + b"/" + one
                if not stat.S_ISDIR(os.lstat(place).st_mode):
                    os.unlink(place)
            if not os.listdir(self._place(path)):
                os.rmdir(self._place(path))
        Disk().sync_directory(os.path.dirname(self._place(path)))


def _temporary(name: bytes) -> bytes:
    """The name under which new content is written, before it replaces the old in one step.

    A commit leaves out one that a killed process has left (`names.is_leaving`).
    """
    return names.shorten(b"." + name, names.NAME_MAX - 4) + b".swp"


@contextlib.contextmanager
def _as_entry_errors(path: bytes) -> Any:
    try:
        yield
    except OSError as error:
        raise NoSuchEntry(f"{os.fsdecode(path)}: {error.strerror}") from error


def digest(data: bytes) -> str:
    """A checksum of the content of a file, by which a form notices that it has changed."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class Undo(NamedTuple):
    """How to take back one change: restore these paths, then write these files."""

    text: str
    paths: tuple[bytes, ...]
    files: tuple[tuple[bytes, bytes], ...]


class Edits:
    """The changes of one overlay. `command` are the arguments that name it to `wdsfs diff` and `commit`."""

    def __init__(
        self,
        library: Library,
        place: OverlayDirectory,
        files: OverlayFiles,
        command: Sequence[str],
    ) -> None:
        self.library, self.place, self.files, self.command = library, place, files, list(command)
        self._lock = threading.Lock()
        self._undo: deque[Undo] = deque(maxlen=UNDO_MAX)
        self._upper: UpperNode | None = None
        self._loaded = 0.0

    # --- what has changed

    def _top(self) -> UpperNode:
        """The names of the upper, at most UPPER_SECONDS old where others may change it."""
        found = self._upper  # several threads ask: each goes on with what it has found
        if found is None or time.monotonic() - self._loaded > UPPER_SECONDS:
            began, found = time.monotonic(), upper_format.empty()
            fd = self._open_upper()
            if fd >= 0:
                try:
                    found = upper_format.load(fd)
                finally:
                    os.close(fd)
            self._upper, self._loaded = found, began
        return found

    def mark(self, path: bytes) -> str:
        """ "removed", "changed" or nothing for a directory or file at this path."""
        node = self._top()
        for name in path.split(b"/"):
            child = node.children.get(name)
            if child is None:
                return "removed" if node.opaque else ""
            if child is THE_WHITEOUT:
                return "removed"
            node = child
        return "changed"

    def changes(self) -> Changes:
        """What `wdsfs diff` shows."""
        upper = self._open_upper()
        try:
            shown = upper_format.empty() if upper < 0 else upper_format.load(upper)

            def open_file(node: UpperNode) -> int:
                return upper_format.open_below(upper, node)

            with self.library.asking():
                return diff.find(self.library.tree, shown, open_file, Rules())
        finally:
            if upper >= 0:
                os.close(upper)

    def _open_upper(self) -> int:
        return os.open(self.place.upper, OPEN_DIRECTORY) if self.place.upper.is_dir() else -1

    # --- changing

    def write(self, path: bytes, change: Callable[[bytes], bytes], seen: str) -> None:
        """Give a file the content that `change` makes of its own. `seen` is the digest of what the user has seen.

        Raises EntryExists when the file has another one by now, EntryErrors, ShardErrors, OSErrors.
        """
        with self._lock:
            source = self.files.source(path)
            now = source.read(0, min(source.size, EDIT_MAX + 1))
            if digest(now) != seen:
                raise EntryExists("the file has been changed meanwhile: look at it again, then repeat your change")
            data = change(now)
            if max(len(data), len(now)) > EDIT_MAX:
                raise UsageError(f"a page edits files of up to {EDIT_MAX:,} bytes")
            if data == now:
                return
            before = [(path, now)] if self.is_changed(path) else []
            self._do(lambda: self.files.write(path, data), f"edit of {os.fsdecode(path)}", [path], before)

    def remove(self, path: bytes) -> None:
        """Delete a sample. Raises EntryErrors, ShardErrors, OSErrors."""
        with self._lock:
            before, size = [], 0
            files = [path + b"/" + one.name for one in self.files.list(path)]
            if not files:
                raise NoSuchEntry(f"{os.fsdecode(path)}: there is no such sample")
            for name in files:
                if self.is_changed(name):
                    source = self.files.source(name)
                    size += source.size
                    if size > UNDO_BYTES:
                        raise UsageError(f"{os.fsdecode(name)}: is too large to be kept for undo")
                    before.append((name, source.read(0, source.size)))
            self._do(lambda: self.files.remove(path), f"removal of {os.fsdecode(path)}", [path], before)

    def restore(self, path: bytes) -> None:
        """Undo all changes of a sample or a file, also its removal. Raises EntryErrors, ShardErrors, OSErrors."""
        with self._lock:
            try:
                if not self.is_changed(path):
                    raise NoSuchEntry(f"{os.fsdecode(path)}: is as the shard has it")
                self.files.restore([path])
            finally:
                self._upper = None

    def undo(self) -> str:
        """Take back the last change; returns what it was. Raises NoSuchEntry when there is none."""
        with self._lock:
            if not self._undo:
                raise NoSuchEntry("there is nothing to undo")
            last = self._undo.pop()
            try:
                paths = [path for path in last.paths if self.is_changed(path)]
                if paths:
                    self.files.restore(paths)
                for path, data in last.files:
                    self.files.write(path, data)
            finally:
                self._upper = None
            return last.text

    @property
    def undoable(self) -> str:
        """What `undo` would take back; empty for nothing."""
        with self._lock:
            return self._undo[-1].text if self._undo else ""

    def is_changed(self, path: bytes) -> bool:
        """True if the overlay has anything at a path, or hides it."""
        self._upper = None
        restoration = Restoration(self.library.tree, self._top())
        with self.library.asking():
            return bool(indexed(restoration.find, path))

    def _do(
        self, change: Callable[[], None], text: str, paths: list[bytes], before: list[tuple[bytes, bytes]]
    ) -> None:
        try:
            change()
            self._undo.append(Undo(text, tuple(paths), tuple(before)))
            while sum(len(data) for one in self._undo for _, data in one.files) > UNDO_BYTES:
                self._undo.popleft()
        finally:
            self._upper = None


def set_field(text: str, field: str, value: str) -> str:
    """The JSON `text` with another value of a field; names with dots between them, a number for a list.

    `value` is JSON, or else taken as a string. Everything else keeps its order; indented text stays so.
    Raises UsageError.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"this is no JSON: {error}") from None
    try:
        new: Any = json.loads(value)
    except (ValueError, RecursionError):
        new = value
    *way, last = field.split(".")
    at = found
    try:
        for step in way:
            at = at[int(step)] if isinstance(at, list) else at[step]
        if isinstance(at, list):
            at[int(last)] = new
        elif isinstance(at, dict):
            at[last] = new
        else:
            raise TypeError
    except (ValueError, LookupError, TypeError):
        raise UsageError(f"there is no place for a field {field!r}") from None
    lines = text.strip().splitlines()
    indent = len(lines[1]) - len(lines[1].lstrip()) if len(lines) > 1 else None
    end = "\n" if text.endswith("\n") else ""
    return json.dumps(found, ensure_ascii=False, indent=indent or None) + end
