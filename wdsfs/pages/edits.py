"""Changes of samples from the pages, by the same overlay as a mount's.

With `--overlay` the overlay is this process's own (`OwnFiles`): locked, and changed by the code that a mount runs.
A writable mount is changed through itself (`MountedFiles`). What both have in common, undo and the list of
changes, is `Edits`. One change at a time.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import hashlib
import itertools
import os
import secrets
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from wdsfs.errors import EntryError, EntryExists, NoSuchEntry, UsageError, WdsfsError, bytes_text
from wdsfs.overlay import upper_format
from wdsfs.overlay.overlay_directory import OverlayDirectory, load_upper
from wdsfs.overlay.restore import Restoration
from wdsfs.overlay.upper_format import OPEN_DIRECTORY, THE_WHITEOUT, UpperNode
from wdsfs.overlay.writable_tree import AttributeChange, WritableTree
from wdsfs.packing import diff
from wdsfs.packing.changes import Changes, Rules
from wdsfs.pages.library import FILES_MAX, File, Library, Sample
from wdsfs.pages.new_samples import NewSamples
from wdsfs.pages.preview import Source
from wdsfs.tree.indexing import indexed
from wdsfs.tree.tree import AT_PARENT

EDIT_MAX = 1 << 20  # bytes of a file that can be edited in a page
UNDO_MAX, UNDO_BYTES = 100, 32 << 20  # changes that can be undone; bytes of files that are kept for that
UPPER_SECONDS = 1.0  # how long the names of an overlay that others may change are kept


class OverlayFiles(Protocol):
    """The files of a set with its changes."""

    def list(self, path: bytes) -> list[File]: ...

    def source(self, path: bytes) -> Source: ...

    def write(self, path: bytes, data: bytes, mtime_ns: int | None = None) -> None: ...

    def remove(self, path: bytes) -> None: ...

    def make_directory(self, path: bytes) -> None: ...

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
                with self.library.snapshot() as now:
                    return now.source(path)
            return OwnSource(self, node.inode, node.size, (node.inode, node.size, node.mtime_ns))

    def write(self, path: bytes, data: bytes, mtime_ns: int | None = None) -> None:
        with self.library.asking():
            indexed(self._write, path, data, mtime_ns)

    def _write(self, path: bytes, data: bytes, mtime_ns: int | None) -> None:
        parent, _, name = path.rpartition(b"/")
        directory, temporary = self.tree.resolve(parent).inode, _temporary()
        inode = self.tree.create(directory, temporary, 0o644).inode
        try:
            written = 0
            while written < len(data):
                written += self.tree.write(inode, written, data[written:])
            if mtime_ns is not None:
                self.tree.setattr(inode, AttributeChange(mtime_ns=mtime_ns))
            self.tree.fsync(inode)
            self.tree.rename(directory, temporary, directory, name)
        except BaseException:
            with contextlib.suppress(WdsfsError, OSError):
                self.tree.unlink(directory, temporary)
            raise
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

    def make_directory(self, path: bytes) -> None:
        with self.library.asking(), contextlib.suppress(EntryExists):
            above, _, name = path.rpartition(b"/")
            directory = indexed(self.tree.resolve, above).inode
            indexed(self.tree.mkdir, directory, name, 0o755)
            indexed(self.tree.fsync, directory)

    def restore(self, paths: Sequence[bytes]) -> None:
        with self.library.asking():
            indexed(self.tree.restore, paths, lambda inode, name: None)


@dataclass(slots=True)
class MountedSource:
    """A file in a mount, as `previews.preview.Source`."""

    files: MountedFiles
    path: bytes
    size: int
    key: Hashable

    def read(self, offset: int, length: int) -> bytes:
        with self.files.directory_of(self.path) as (directory, name):
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
        try:
            found = []
            while length > 0 and (data := os.pread(fd, length, offset)):
                found.append(data)
                offset, length = offset + len(data), length - len(data)
            return b"".join(found)
        finally:
            os.close(fd)


class MountedFiles:
    """The files of a writable mount, by its paths. `undo` has the mount restore paths below its top.

    No symbolic link is followed on the way to a file: it could lead out of the mount.
    """

    def __init__(self, mountpoint: str, undo: Callable[[Sequence[bytes]], None]) -> None:
        self._top, self.restore = os.fsencode(mountpoint), undo

    @contextlib.contextmanager
    def directory_of(self, path: bytes) -> Iterator[tuple[int, bytes]]:
        """The directory that a file or a sample is in, open, and its name there. Raises NoSuchEntry, OSErrors."""
        *way, name = path.split(b"/")
        with _as_entry_errors(path):
            directory = os.open(self._top, OPEN_DIRECTORY)
            try:
                for step in way:
                    above, directory = directory, os.open(step, OPEN_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
                    os.close(above)
                yield directory, name
            finally:
                os.close(directory)

    def list(self, path: bytes) -> list[File]:
        found: builtins.list[File] = []
        with self.directory_of(path + b"/") as (directory, _), os.scandir(directory) as entries:
            for one in entries:
                if one.is_file(follow_symlinks=False) and len(found) < FILES_MAX:
                    status = one.stat(follow_symlinks=False)
                    found.append(File(os.fsencode(one.name), status.st_size, status.st_mtime_ns))
        return found

    def source(self, path: bytes) -> Source:
        with self.directory_of(path) as (directory, name):
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            raise NoSuchEntry("only files can be read here")
        key = status.st_ino, status.st_size, status.st_mtime_ns
        return MountedSource(self, path, status.st_size, (path, *key))

    def write(self, path: bytes, data: bytes, mtime_ns: int | None = None) -> None:
        with self.directory_of(path) as (directory, name):
            temporary = _temporary()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fd = os.open(temporary, flags, 0o644, dir_fd=directory)
            try:
                try:
                    written = 0
                    while written < len(data):
                        written += os.write(fd, data[written:])
                    if mtime_ns is not None:
                        os.utime(fd, ns=(mtime_ns, mtime_ns))
                    os.fsync(fd)
                finally:
                    os.close(fd)
                os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=directory)
                raise
            os.fsync(directory)

    def remove(self, path: bytes) -> None:
        with self.directory_of(path + b"/") as (directory, _):
            for one in os.listdir(directory):
                status = os.stat(one, dir_fd=directory, follow_symlinks=False)
                if not stat.S_ISDIR(status.st_mode):
                    os.unlink(one, dir_fd=directory)
            is_empty = not os.listdir(directory)  # else it also holds other samples
        with self.directory_of(path) as (above, name):
            if is_empty:
                os.rmdir(name, dir_fd=above)
            os.fsync(above)

    def make_directory(self, path: bytes) -> None:
        with self.directory_of(path) as (above, name), contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=above)
            os.fsync(above)


def _temporary() -> bytes:
    """A name under which new content is written, before it replaces the old in one step.

    No other file has it, nor an editor's swap file. What a kill leaves behind is known to a commit as a program's
    leaving (`names.is_leaving`).
    """
    return b".wdsfs-view-%s.swp" % secrets.token_hex(8).encode()


@contextlib.contextmanager
def _as_entry_errors(path: bytes) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise NoSuchEntry(f"{os.fsdecode(path)}: {error.strerror}") from error
        raise OSError(error.errno, error.strerror, os.fsdecode(path)) from error


def digest(data: bytes) -> str:
    """A checksum of the content of a file, by which a form notices that it has changed."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class Kept(NamedTuple):
    """A file as it was before a change: its path, its content, its time (ns; None: not known)."""

    path: bytes
    data: bytes
    mtime_ns: int | None


class Undo(NamedTuple):
    """How to take back one change of a path: restore it, then write these files.

    `after` is the digest of the file that the change has made, GONE for a removal: what is there now has to be
    that, or somebody else's change would be lost. UNKNOWN for a change that went half way.
    """

    text: str
    path: bytes
    restores: bool
    files: tuple[Kept, ...]
    after: str
    number: int = 0  # of the change, in this view


GONE, UNKNOWN = "gone", "unknown"


class Edits:
    """The changes of one overlay. `command` are the arguments that name it to `wdsfs diff` and `commit`.

    `lasting` says why nothing can be restored now, if that is so. Then a change is taken back by writing the files
    anew, and the removal of a sample of the shards is not.
    """

    def __init__(
        self,
        library: Library,
        place: OverlayDirectory,
        files: OverlayFiles,
        command: Sequence[str],
        lasting: str = "",
    ) -> None:
        self.library, self.place, self.files, self.command = library, place, files, list(command)
        self.lasting = lasting
        self._lock = threading.Lock()
        self._undo: deque[Undo] = deque(maxlen=UNDO_MAX)
        self._numbers = itertools.count(1)
        self._upper: UpperNode | None = None
        self._loaded = 0.0
        self._new = NewSamples(library, self._top, files.list)

    # --- what has changed

    def _top(self) -> UpperNode:
        """The names of the upper, at most UPPER_SECONDS old where others may change it."""
        found = self._upper  # several threads ask: each goes on with what it has found
        if found is None or time.monotonic() - self._loaded > UPPER_SECONDS:
            began, found = time.monotonic(), upper_format.empty()
            fd = self._open_upper()
            if fd >= 0:
                try:
                    found = load_upper(self.place, fd)
                finally:
                    os.close(fd)
            self._upper, self._loaded = found, began
        return found

    def mark(self, path: bytes) -> str:
        """ "removed", "changed", "new" or nothing for a directory or file at this path."""
        found = self._mark_in_upper(path)
        return "new" if found == "changed" and not self._has(path) else found

    def _has(self, path: bytes) -> bool:
        return self.library.answer(lambda now: now.has(path))

    def new_samples(self) -> Sequence[Sample]:
        """The samples that no shard has."""
        return self._new.all()

    def _mark_in_upper(self, path: bytes) -> str:
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
            shown = upper_format.empty() if upper < 0 else load_upper(self.place, upper)

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
                raise UsageError(f"a page edits files of up to {bytes_text(EDIT_MAX)}")
            if data == now:
                return
            before = (self._kept(path, now),) if self.lasting or self.is_changed(path) else ()
            with self._changing():
                self.files.write(path, data)
                self._keep(Undo(f"edit of {os.fsdecode(path)}", path, not before, before, digest(data)))

    def remove(self, path: bytes) -> None:
        """Delete a sample. Raises EntryErrors, ShardErrors, OSErrors."""
        with self._lock:
            before, size = [], 0
            files = [(path + b"/" + one.name, one.mtime_ns) for one in self.files.list(path)]
            if not files:
                raise NoSuchEntry(f"{os.fsdecode(path)}: there is no such sample")
            for name, mtime_ns in files:
                if self.is_changed(name):
                    source = self.files.source(name)
                    size += source.size
                    if size > UNDO_BYTES:
                        raise UsageError(f"{os.fsdecode(name)}: is too large to be kept for undo")
                    before.append(Kept(name, source.read(0, source.size), mtime_ns))
            is_new = len(before) == len(files) and not self._has(path)
            undo = Undo(f"removal of {os.fsdecode(path)}", path, not is_new, tuple(before), GONE)
            with self._changing():
                try:
                    self.files.remove(path)
                except BaseException:
                    self._keep(undo._replace(after=UNKNOWN))  # some files may be gone
                    raise
                self._keep(undo)

    def restore(self, path: bytes) -> None:
        """Undo all changes of a sample or a file, also its removal. Raises EntryErrors, ShardErrors, OSErrors."""
        with self._lock:
            if not self.is_changed(path):
                raise NoSuchEntry(f"{os.fsdecode(path)}: is as the shard has it")
            with self._changing():
                self.files.restore([path])

    def undo(self, number: int | None = None) -> str:
        """Take back the last change; returns what it was. Raises NoSuchEntry when there is none."""
        with self._lock:
            if not self._undo:
                raise NoSuchEntry("there is nothing to undo")
            last = self._undo[-1]
            if number not in (None, last.number):
                raise EntryExists(f"the last change is the {last.text} by now: nothing was undone")
            if last.after not in (UNKNOWN, self._state(last.path)) or not self._can_undo(last):
                self._undo.pop()
                raise EntryExists(
                    f"the {last.text} cannot be undone: what was changed has been changed again, restored or "
                    "committed since then"
                )
            with self._changing():
                if last.restores and self.is_changed(last.path):
                    self.files.restore([last.path])
                    self._undo[-1] = last = last._replace(restores=False, after=UNKNOWN)
                if last.files and last.files[0].path != last.path:  # a new sample, which went with its directory
                    self.files.make_directory(last.path)
                for one in last.files:
                    self.files.write(*one)
            self._undo.pop()
            return last.text

    def _kept(self, path: bytes, data: bytes) -> Kept:
        directory, _, name = path.rpartition(b"/")
        times = (one.mtime_ns for one in self.files.list(directory) if one.name == name)
        return Kept(path, data, next(times, None))

    def _state(self, path: bytes) -> str:
        """What is at a path, as `Undo.after` says it."""
        try:
            source = self.files.source(path)
        except EntryError:  # a sample
            with contextlib.suppress(EntryError):
                return "" if self.files.list(path) else GONE
            return GONE
        return digest(source.read(0, min(source.size, EDIT_MAX + 1)))

    def _can_undo(self, change: Undo) -> bool:
        """True if there is something to be done: what was committed has nothing to restore."""
        return bool(change.files) or not change.restores or self.is_changed(change.path)

    @property
    def undoable(self) -> Undo | None:
        """What `undo` would take back; None for nothing."""
        # Without the lock: every page asks this, and a change may wait for the end of a commit.
        with contextlib.suppress(IndexError):
            return self._undo[-1]
        return None

    def is_changed(self, path: bytes) -> bool:
        """True if the overlay has anything at a path, or hides it."""
        self._upper = None
        restoration = Restoration(self.library.tree, self._top())
        with self.library.asking():
            return bool(indexed(restoration.find, path))

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Look at the overlay anew after a change, whether it was made or not."""
        try:
            yield
        finally:
            self._upper = None
            self._new.forget()

    def _keep(self, undo: Undo) -> None:
        if self.lasting and undo.restores:
            self._undo.clear()  # what was changed before it is not the last change any more
            return
        self._undo.append(undo._replace(number=next(self._numbers)))
        while sum(len(kept.data) for one in self._undo for kept in one.files) > UNDO_BYTES:
            self._undo.popleft()
