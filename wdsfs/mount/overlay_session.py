"""Opens an overlay with its set for `diff`, `commit` and `restore`: by its live mount, or locked without one.

`packing` decides the changes of an overlay and the output of a commit. `overlay/restore.py` decides which names a
restoration removes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from wdsfs.errors import CommitError, MissingShard, NoSuchEntry, OverlayUnusable, UsageError, several
from wdsfs.mount.live_mount import Frozen, LiveMount
from wdsfs.names import shown
from wdsfs.overlay.overlaid_tree import NodeTable
from wdsfs.overlay.overlay_directory import (
    OverlayDirectory,
    OverlaySettings,
    clean,
    held,
    read_settings,
    unfinished,
)
from wdsfs.overlay.overlay_shards import check_set
from wdsfs.overlay.restore import Restoration, RestoredChange
from wdsfs.overlay.upper_directory import UpperDirectory, load_upper
from wdsfs.overlay.writable_tree import WritableTree
from wdsfs.shards import Shard
from wdsfs.spec.expand import expand, refuse_left_out
from wdsfs.tree.indexing import indexed
from wdsfs.tree.merged_tree import make_tree
from wdsfs.tree.opening import open_known_set
from wdsfs.tree.set_options import Opening, Selection, TreeOptions
from wdsfs.tree.shard_access import Access
from wdsfs.tree.tree import LowerTree, View


class NamedSet(NamedTuple):
    """The SHARDS below an unmounted overlay, and the options of their view, as typed by a user.

    `typed` has the names of the typed options, which must have the same values as when the overlay was made.
    """

    specs: Sequence[str]
    selection: Selection
    tree: TreeOptions = TreeOptions()
    typed: frozenset[str] = frozenset()

    def as_made(self, settings: OverlaySettings | None) -> NamedSet:
        """Return the set with the options with which the overlay was made.

        Raises UsageError if the user typed others.
        """
        if settings is None:
            return self
        reading = settings.reading
        tree = TreeOptions(settings.layout, settings.names, settings.merge)
        before = {**self.tree._asdict(), **self.selection.reading._asdict()}
        after = {**tree._asdict(), **reading._asdict()}
        if any(before[name] != after[name] for name in self.typed):
            raise UsageError(
                f"the overlay was made with {' '.join(settings.options)}: type these options, or none"
            )
        return self._replace(tree=tree, selection=self.selection._replace(reading=reading))


@dataclass(slots=True)
class OverlaySession:
    """An overlay over its set: locked, or in use by `mount`, which is `frozen` if it refuses writes."""

    place: OverlayDirectory
    tree: LowerTree
    mount: LiveMount | None = None
    frozen: Frozen | None = None

    @property
    def mountpoint(self) -> str | None:
        """Return the mount point; None if the overlay is not mounted."""
        return None if self.mount is None else self.mount.mountpoint

    @property
    def mount_is_wrong(self) -> bool:
        """True if the mount may not show the new shards."""
        return self.frozen is not None and self.frozen.is_wrong

    @property
    def is_half_done(self) -> bool:
        """True if a commit in place of this overlay was stopped half-way."""
        return unfinished(self.place)

    # --- a commit of the overlay

    def show_new(self, new: Sequence[bytes], published: Sequence[bytes]) -> None:
        """Make the mount, if any, show the `new` shards, and open the replaced shards (`published`) again."""
        if self.frozen is not None:
            self.frozen.show(new, published)

    # --- undoing

    def restore(self, paths: Sequence[bytes], *, dry_run: bool = False) -> list[RestoredChange]:
        """Undo the changes at these paths (below the top; empty for all) and below them; return the changes.

        Raises NoSuchEntry for a path that does not exist, or in a directory that changed as a whole. Raises
        CommitError after a commit that was stopped half-way, ShardErrors, MountError, OverlayBusy. An error undoes
        nothing.
        """
        if self.is_half_done:
            raise CommitError(
                f"a commit in place of {self.place.path} was stopped half-way: the shards already have some of "
                "its changes. Repeat the commit first"
            )
        nodes = NodeTable(self.tree, load_upper(self.place))
        indexed(nodes.bind)
        restoration = Restoration(nodes)
        for path in paths:
            if not indexed(restoration.find, path):
                indexed(self.tree.resolve, path)  # the path exists, unchanged
        undone = indexed(restoration.changes, indexed(restoration.targets, paths))
        if not undone:
            where = several([shown(os.fsdecode(path)) for path in paths if path]) or "any path"
            raise NoSuchEntry(f"there are no changes at {where}")
        if not dry_run:
            self._undo(paths)
        return undone

    def _undo(self, paths: Sequence[bytes]) -> None:
        if self.mount is not None:
            self.mount.restore(paths)
            return
        upper = UpperDirectory(self.place)
        try:
            tree = WritableTree(self.tree, upper)
            indexed(tree.prepare)
            indexed(tree.restore, paths, lambda inode, name: None)
        finally:
            upper.close(clean=True)


@contextlib.contextmanager
def mounted_session(
    mount: LiveMount, opening: Opening, *, freeze: bool = False, whole: bool = False
) -> Iterator[OverlaySession]:
    """Open the overlay of a mount; with `freeze` the mount refuses all writes for the block.

    `whole`: open all shards of the set. Raises MountError, OverlayBusy, OverlayUnusable, CommitError.
    """
    with contextlib.ExitStack() as stack:
        frozen = stack.enter_context(mount.frozen()) if freeze else None
        lower = mount.shown() if frozen is None else frozen.lower
        place, options = OverlayDirectory(Path(str(mount.overlay))), mount.options
        # A commit must not copy or write files that the mount refuses to show.
        below = _tree_below(place, lower.shards, options.view(), opening, lower.access, whole=whole)
        yield OverlaySession(place, stack.enter_context(below), mount, frozen)


@contextlib.contextmanager
def held_session(
    directory: str, below: NamedSet, opening: Opening, *, whole: bool = False
) -> Iterator[OverlaySession]:
    """Lock the overlay in a directory, and open its set, with the view with which the overlay was made.

    Raises OverlayBusy, OverlayUnusable, UsageError, CommitError.
    """
    place = OverlayDirectory(Path(os.path.abspath(directory)))
    settings = read_settings(place)
    below = below.as_made(settings)
    with held(place):
        shards = _shards_of(place, settings, below, opening)
        refuse_left_out(shards, "an overlay is for whole shards")
        if not unfinished(place):
            clean(place)
        with _tree_below(place, shards, below.tree.view(), opening, whole=whole) as tree:
            yield OverlaySession(place, tree)


def _shards_of(
    place: OverlayDirectory, settings: OverlaySettings | None, below: NamedSet, opening: Opening
) -> Sequence[Shard]:
    """Return the SHARDS of an overlay as typed; none for a set that begins empty."""
    if not below.specs:
        if settings is None or settings.shards:
            raise UsageError("name the SHARDS of the overlay, too; only an overlay of `mount --new` has none")
        return []
    try:
        return expand(below.specs, *below.selection._replace(allow_missing=opening.tolerance.allow_missing))
    except MissingShard as error:
        if not unfinished(place):
            raise
        raise CommitError(
            f"{error}; a commit of this overlay was stopped half-way: put the shard back, or an empty tar in its "
            "place (truncate -s 10240 FILE), then finish the commit (--in-place) or give it up (--abandon)"
        ) from None


@contextlib.contextmanager
def remembered_session(directory: str, opening: Opening) -> Iterator[OverlaySession]:
    """Lock the overlay in a directory, and open the shards at its recorded paths. Raises as `held_session`."""
    place = OverlayDirectory(Path(os.path.abspath(directory)))
    with held(place):
        settings = read_settings(place)
        if settings is None:
            raise OverlayUnusable(f"{place.path} is not an overlay of a mount of wdsfs")
        shards = [Shard(shard.path, shard.name, reading=settings.reading) for shard in settings.shards]
        view = TreeOptions(settings.layout, settings.names, settings.merge).view()
        with _tree_below(place, shards, view, opening) as tree:
            yield OverlaySession(place, tree)


@contextlib.contextmanager
def _tree_below(
    place: OverlayDirectory,
    shards: Sequence[Shard],
    view: View,
    opening: Opening,
    access: Access | None = None,
    *,
    whole: bool = False,
) -> Iterator[LowerTree]:
    """Open the tree below an overlay. Unreadable shards stay in it, so that their changes are no new samples."""
    if view.merged and opening.tolerance.allow_missing:
        raise UsageError(
            "--allow-missing cannot be used with an overlay of --merge: a sample could be new, or belong to an "
            "unreadable shard"
        )
    check_set(place, shards, view)
    whole = (whole or view.merged) and not opening.tolerance.allow_missing
    with open_known_set(shards, opening, whole=whole, access=access) as below:
        yield make_tree(below, view)
