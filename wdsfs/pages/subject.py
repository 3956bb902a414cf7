"""Opens the set that the pages show, of shards or of a live mount, and renews that of a mount.

Of a writable mount the pages show the shards, without the changes of the overlay, and say so.
"""

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
from wdsfs.pages.snapshots import Snapshots
from wdsfs.tree import view_set
from wdsfs.tree.companions import Companions
from wdsfs.tree.composition import Composition
from wdsfs.tree.indexing import indexed
from wdsfs.tree.merged_tree import make_tree
from wdsfs.tree.opening import make_view, open_typed_set
from wdsfs.tree.set_options import Opening, Selection, TreeOptions
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.tree import LowerTree

# Seconds between two renewals, and how many times as long as the last one: with many shards it takes its time.
RENEWAL_SECONDS, REST_SHARE = 1.0, 10


class Place(NamedTuple):
    """The place where samples are changed: below the directory `top`, once `command` has been typed."""

    top: str
    command: str


class Subject(NamedTuple):
    """The set that the pages show.

    `place` is None where samples have other paths in a mount than here. `note` is shown on every page: how the
    pages differ from the mount. `renewal` is that of a mount.
    """

    snapshots: Snapshots
    place: Place | None = None
    note: str = ""
    renewal: Renewal | None = None


@contextlib.contextmanager
def open_shards(
    specs: Sequence[str], selection: Selection, composition: Composition, opening: Opening
) -> Iterator[Subject]:
    """Open the set that these words name. Raises what `tree.opening.open_typed_set` raises."""
    place = None
    if composition.is_plain:  # else no overlay can be made
        command = ["wdsfs", "mount", "--overlay", "DIR", *selection.arguments, *specs, "MOUNTPOINT"]
        place = Place("MOUNTPOINT", shlex.join(command))
    with open_typed_set(specs, selection, opening, composition) as shards:
        yield Subject(Snapshots(_samples_of(shards)), place=place)


@contextlib.contextmanager
def open_mount(mount: LiveMount, opening: Opening) -> Iterator[Subject]:
    """Open the set of a mount, as its options show it. Raises MountError, and what `LiveMount.opened` raises."""
    with Renewal.begin(mount, opening) as renewal:
        has_same_paths = mount.options.layout == "samples" and not mount.options.merge
        place = Place(mount.mountpoint, "") if has_same_paths else None
        yield Subject(renewal.snapshots, place, difference_from(mount), renewal)


def difference_from(mount: LiveMount) -> str:
    """Return the difference between the pages and the mount, in sentences; empty if there is none."""
    notes = []
    if mount.overlay is not None:
        notes.append(
            "The pages show the shards, without the changes that were made in the mount. List the changes: "
            f"wdsfs diff {shlex.quote(mount.mountpoint)}."
        )
    if mount.options.merge and mount.options.layout != "classes":
        notes.append("The mount is one tree over all shards; here samples are below their shards.")
    return " ".join(notes)


def _samples_of(shards: ShardSet, names: str = "ext") -> LowerTree:
    """Return the tree of the pages: a directory for each sample, below that of its shard."""
    return make_tree(shards, TreeOptions(names=names).view())


class Renewal:
    """The set of a mount over time: asks the mount again before a page is made, at most every few seconds.

    Answers that have begun go on with the set that they began with.
    """

    snapshots: Snapshots

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
    def begin(cls, mount: LiveMount, opening: Opening) -> Iterator[Renewal]:
        """Open the set of a mount, which was judged before, so all that can be read is shown."""
        self = cls(mount)
        with mount.opened(self._shown, opening) as shards:
            self.snapshots = Snapshots(_samples_of(shards, self._names), in_classes=self._in_classes)
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
            with self.snapshots.lock, self._in_directory():
                shards = self._opened_again(self.snapshots.tree.lower)
                self.snapshots.renew(_samples_of(shards, self._names))
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
        view_of_shards = view_set.make_shard_set(shards, index, view, companions, access=access)
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
        now = {shard.name for shard in self.snapshots.tree.lower.shards}
        changes = (len(now - self._begun), "came"), (len(self._begun - now), "went")
        texts = [f"{counted(number, 'shard')} {word}" for number, word in changes if number]
        changed = f"{' and '.join(texts)} since this view began." if texts else ""
        return " ".join(filter(None, (changed, self._shown.news)))
