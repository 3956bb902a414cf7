"""Opens the subject of the pages: a set of shards, or a live mount with what its overlay changes; renews both.

Files of a writable mount are read through the mount. Nothing is changed from here; what a commit makes of the
changes is decided in `packing`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import stat
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from wdsfs import names as naming
from wdsfs.errors import NoSuchEntry, ShardError, UsageError, WdsfsError, counted
from wdsfs.host import in_directory
from wdsfs.index.portable import attached
from wdsfs.mount.live_mount import LiveMount
from wdsfs.overlay import upper_format
from wdsfs.overlay.overlay_directory import OverlayDirectory
from wdsfs.overlay.upper_directory import load_upper, opened_upper
from wdsfs.overlay.upper_format import DIRECTORY, FILE, OPEN_DIRECTORY, THE_WHITEOUT, UpperNode
from wdsfs.pages.library import FILES_MAX, NOWHERE, File, Library, Sample
from wdsfs.pages.preview import Source
from wdsfs.tree import view_set
from wdsfs.tree.indexing import indexed
from wdsfs.tree.merged_tree import make_tree
from wdsfs.tree.opening import make_view, opened
from wdsfs.tree.options import Composition, Opening, Selection, TreeOptions
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.tree import FULL_NAMES, LowerTree
from wdsfs.tree.view_sources import Companions

UPPER_SECONDS = 1.0  # how long the names in the upper are believed: others change it at any time
NEW_MAX = 10_000  # new samples that are listed; `wdsfs diff` lists further ones, too
SEARCH_REST_SHARE = 20  # new samples are not searched again for this many times the duration of the last search


@dataclass(slots=True)
class MountedSource:
    """A file in a mount, as `preview.Source`."""

    mount: WritableMount
    path: bytes
    size: int
    key: Hashable

    def read(self, offset: int, length: int) -> bytes:
        """Return these bytes, fewer only at the end. Raises NoSuchEntry, OSErrors."""
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
            with opened_upper(self._overlay):
                self._upper, self._upper_end = load_upper(self._overlay), now + UPPER_SECONDS
        return self._upper

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

    def new_samples(self) -> Sequence[Sample]:
        """Return the samples that no shard has, by their paths. The list does not change."""
        names, began = self._names(), time.monotonic()
        if names is not self._new_of and began >= self._new_end:
            self._new, self._new_of = list(self._search_new(names)), names
            now = time.monotonic()
            self._new_end = now + (now - began) * SEARCH_REST_SHARE
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
    """Yield the paths of directories in an upper that lie below another and hold a file, in the order of names."""
    waiting: list[tuple[bytes, UpperNode]] = [(b"", top)]
    while waiting:
        path, node = waiting.pop()
        children = sorted(node.children.items(), reverse=True)
        if b"/" in path and any(child.kind == FILE for _, child in children):
            yield path
        above = path + b"/" if path else b""
        waiting += [(above + name, child) for name, child in children if child.kind == DIRECTORY]


# Seconds between two renewals, and how many times as long as the last one: with many shards it takes its time.
RENEWAL_SECONDS, REST_SHARE = 1.0, 10


class Place(NamedTuple):
    """The place where samples are changed: below the directory `top`, once `command` has been typed."""

    top: str
    command: str


class Subject(NamedTuple):
    """The subject of the pages: a set, and `mount`, the writable mount that shows it, if there is one.

    `place` is None where samples have other paths in a mount than here. `note` is shown on every page: how the
    pages differ from the mount. `renewal` is that of a mount.
    """

    library: Library
    mount: WritableMount | None = None
    place: Place | None = None
    note: str = ""
    renewal: Renewal | None = None


@contextlib.contextmanager
def opened_shards(
    specs: Sequence[str], selection: Selection, composition: Composition, opening: Opening
) -> Iterator[Subject]:
    """Open the set that these words name. Raises what `tree.opening.opened` raises."""
    place = None
    if composition.is_plain:  # else no overlay can be made
        command = ["wdsfs", "mount", "--overlay", "DIR", *selection.arguments, *specs, "MOUNTPOINT"]
        place = Place("MOUNTPOINT", shlex.join(command))
    with opened(specs, selection, opening, composition) as shards:
        yield Subject(Library(_samples_of(shards)), place=place)


@contextlib.contextmanager
def opened_mount(mount: LiveMount, opening: Opening) -> Iterator[Subject]:
    """Open the set of a mount, with its overlay's changes. Raises MountError, and what `LiveMount.opened` raises.

    A mount is shown by the same options as it shows its set.
    """
    options = mount.options
    writable = place = None
    with Renewal.opened(mount, opening) as renewal:
        if options.layout == "samples" and not options.merge:
            place = Place(mount.mountpoint, "")
            if mount.overlay is not None:
                writable = WritableMount(renewal.library, mount.mountpoint, mount.overlay)
        yield Subject(renewal.library, writable, place, "" if writable else _note(mount), renewal)


def _note(mount: LiveMount) -> str:
    """Return the difference between the pages and the mount, in a sentence; empty if there is none."""
    if mount.overlay is not None:
        return (
            "The mount has another layout than the pages, so these are the shards without its changes. List the "
            f"changes: wdsfs diff {shlex.quote(mount.mountpoint)}. Files are changed in the mount."
        )
    if mount.options.merge and mount.options.layout != "classes":
        return "The mount is one tree over all shards; here samples are below their shards."
    return ""


def _samples_of(shards: ShardSet, names: str = "ext") -> LowerTree:
    """Return the tree of the pages: a directory for each sample, below that of its shard."""
    return make_tree(shards, TreeOptions(names=names).view())


class Renewal:
    """The set of a mount over time: asks the mount again before a page is made, at most every few seconds.

    Answers that have begun go on with the set that they began with.
    """

    library: Library

    def __init__(self, mount: LiveMount) -> None:
        self._mount, self._shown, options = mount, mount.shown(), mount.options
        if not self._shown.shards:
            raise UsageError(f"{mount.mountpoint}: has no shards yet; commit its files first")
        self._composition, self._in_classes = options.composition, options.layout == "classes"
        self._names = options.names if options.layout == "samples" else "ext"
        self._begun = {shard.name for shard in self._shown.shards}
        self._renewing = threading.Lock()
        self._next = 0.0
        self._error = ""

    @classmethod
    @contextlib.contextmanager
    def opened(cls, mount: LiveMount, opening: Opening) -> Iterator[Renewal]:
        """Open the set of a mount, which was judged before, so all that can be read is shown."""
        self = cls(mount)
        with mount.opened(self._shown, opening) as shards:
            self.library = Library(_samples_of(shards, self._names), self._in_classes)
            yield self

    @property
    def _view(self) -> Composition | None:
        return self._composition if view_set.is_view(self._shown.shards, self._composition) else None

    def _in_directory(self) -> contextlib.AbstractContextManager[None]:
        """Enter the directory of the mount's command, for relative paths of joined shards and label files."""
        return in_directory(self._mount.directory) if self._composition.names_files else contextlib.nullcontext()

    def renew(self) -> None:
        """Ask the mount again, unless that was done a moment ago."""
        with self._renewing:
            began = time.monotonic()
            if began < self._next:
                return
            try:
                self._renew()
                self._error = ""
            except (WdsfsError, OSError) as error:
                self._error = str(error)
            finally:
                now = time.monotonic()
                self._next = now + max(RENEWAL_SECONDS, (now - began) * REST_SHARE)

    def _renew(self) -> None:
        before, self._shown = self._shown, self._mount.shown()
        if self._shown == before:
            return
        try:
            with self.library.lock, self._in_directory():
                shards = self._opened_again(self.library.tree.lower)
                self.library.renew(_samples_of(shards, self._names))
        except BaseException:
            self._shown = before  # to be tried again
            raise

    def _opened_again(self, before: ShardSet) -> ShardSet:
        """Open the present set, over the same index; new shards are indexed when they are needed."""
        shards, index, view, access = self._shown.shards, before.index, self._view, self._shown.access
        companions = None if view is None else Companions(view, shards[0].reading)
        further = [] if companions is None else companions.shards
        index.portables = attached([*shards, *further])
        if view is None or companions is None:
            return ShardSet(shards, index, access=access)
        view_of_shards = view_set.open_set(shards, index, view, companions, access=access)
        for source in view_of_shards.sources:
            for number in source.numbers:
                with contextlib.suppress(ShardError):  # is on the page of problems
                    indexed(source.summary, number)
        make_view(view_of_shards, Opening(quiet=True))
        return view_of_shards

    @property
    def news(self) -> str:
        """The news for each page; empty while nothing has changed."""
        if self._error:
            return f"The pages still show the set as before, because it cannot be read again: {self._error}"
        now = {shard.name for shard in self.library.tree.lower.shards}
        changes = (len(now - self._begun), "came"), (len(self._begun - now), "went")
        texts = [f"{counted(number, 'shard')} {word}" for number, word in changes if number]
        changed = f"{' and '.join(texts)} since this view began." if texts else ""
        return " ".join(filter(None, (changed, self._shown.news)))
