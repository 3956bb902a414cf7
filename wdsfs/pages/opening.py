"""Opens the subject of the pages: a set of shards, or the set of a live mount, renewed while it changes."""

from __future__ import annotations

import contextlib
import shlex
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from wdsfs.errors import ShardError, UsageError, WdsfsError, counted
from wdsfs.host import in_directory
from wdsfs.index.portable import attached
from wdsfs.mount.live_mount import LiveMount
from wdsfs.pages.library import Library
from wdsfs.pages.writable_mount import WritableMount
from wdsfs.spec.selection import Selection
from wdsfs.tree import view_set
from wdsfs.tree.merged_tree import make_tree
from wdsfs.tree.opening import make_view, opened
from wdsfs.tree.options import Composition, Opening, view_of
from wdsfs.tree.shard_set import ShardSet, indexed
from wdsfs.tree.tree import LowerTree
from wdsfs.tree.view_sources import Companions

# Seconds between two renewals, and how many times as long as the last one: with many shards it takes its time.
RENEWAL_SECONDS, REST_SHARE = 1.0, 10


class Place(NamedTuple):
    """The place where samples are changed: below the directory `top`, once `command` has been typed."""

    top: str
    command: str


class Subject(NamedTuple):
    """The subject of the pages: a set, and `mount`, the writable mount that shows it, if there is one.

    `place` is None where samples have other paths in a mount than here. `note` is shown on every page: what is
    special about this view of the set. `renewal` is that of a mount.
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
            "The mount has another layout than the pages, so these are the shards without its changes: "
            f"wdsfs diff {shlex.quote(mount.mountpoint)} shows them, and files are changed in the mount."
        )
    if mount.options.merge and mount.options.layout != "classes":
        return "The mount is one tree over all shards; here samples are below their shards."
    return ""


def _samples_of(shards: ShardSet, names: str = "ext") -> LowerTree:
    """Return the tree of the pages: a directory for each sample, below that of its shard."""
    return make_tree(shards, view_of("samples", names), merge=False)


class Renewal:
    """The set of a mount over time: asks the mount again before a page is made, at most every few seconds.

    Answers that have begun go on with the set that they began with.
    """

    library: Library

    def __init__(self, mount: LiveMount) -> None:
        self._mount, self._shown, options = mount, mount.shown(), mount.options
        if not self._shown.shards:
            raise UsageError(f"{mount.mountpoint}: has no shards yet; commit what is in it first")
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
            return f"The set is shown as it was, for it cannot be read again: {self._error}"
        now = {shard.name for shard in self.library.tree.lower.shards}
        changes = (len(now - self._begun), "came"), (len(self._begun - now), "went")
        texts = [f"{counted(number, 'shard')} {word}" for number, word in changes if number]
        changed = f"{' and '.join(texts)} since this view began." if texts else ""
        return " ".join(filter(None, (changed, self._shown.news)))
