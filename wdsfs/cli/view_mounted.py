"""What `view` shows of a mount: the same set, seen by the same options, as the mount tells them.

It is asked again while the pages are served, so that shards that come or go there do so here.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from wdsfs.cli.options import set_for_all
from wdsfs.errors import ShardError, UsageError
from wdsfs.host import in_directory
from wdsfs.tree.options import view_of

if TYPE_CHECKING:
    from wdsfs.mount.live_mount import LiveMount
    from wdsfs.pages.opening import Subject
    from wdsfs.tree.composition import Composition
    from wdsfs.tree.opening_options import Opening
    from wdsfs.tree.shard_set import ShardSet
    from wdsfs.tree.tree import LowerTree


def samples_of(below: ShardSet, names: str = "ext") -> LowerTree:
    """The tree of the pages: a directory for each sample, below that of its shard."""
    from wdsfs.tree.merged_tree import make_tree

    return make_tree(below, view_of("samples", names), merge=False)


@contextlib.contextmanager
def of_a_mount(mount: LiveMount, opening: Opening) -> Iterator[Subject]:
    """The set of a mount, with the changes of its overlay."""
    from wdsfs.pages.library import Library
    from wdsfs.pages.opening import Place, Renewal, Subject
    from wdsfs.pages.writable_mount import WritableMount

    if opening.index_dir is None and mount.index:
        opening = opening._replace(index_dir=Path(mount.index))
        set_for_all("WDSFS_INDEX_DIR", mount.index)
    mounted = _MountedSet(mount)
    if not mounted.told.shards:
        raise UsageError(f"{mount.mountpoint}: has no shards yet; commit what is in it first")
    with mounted.opened(opening) as below:
        library = Library(samples_of(below, mounted.names), in_classes=mount.options.layout == "classes")
        renewal = Renewal(library, mounted.look, lambda: mounted.told.news)
        writable = place = None
        if mount.options.layout == "samples" and not mount.options.merge:
            place = Place(mount.mountpoint, "")
            if mount.overlay is not None:
                writable = WritableMount(library, mount.mountpoint, mount.overlay)
        yield Subject(library, writable, place, "" if writable is not None else _note(mount), renewal)


def _note(mount: LiveMount) -> str:
    """How the pages differ from the mount."""
    if mount.overlay is not None:
        return (
            "The mount has another layout than the pages, so these are the shards without its changes: "
            f"wdsfs diff {shlex.quote(mount.mountpoint)} shows them, and files are changed in the mount."
        )
    if mount.options.merge and mount.options.layout != "classes":
        return "The mount is one tree over all shards; here samples are below their shards."
    return ""


class _MountedSet:
    """The set of a mount, as `told` by the mount last."""

    def __init__(self, mount: LiveMount) -> None:
        self._mount = mount
        self.told = mount.shown()

    @property
    def names(self) -> str:
        """How files are called in the directory of a sample."""
        return self._mount.options.names if self._mount.options.layout == "samples" else "ext"

    @contextlib.contextmanager
    def opened(self, opening: Opening) -> Iterator[ShardSet]:
        """The set, with the options of the mount, which has been judged: it shows the shards that it can."""
        from wdsfs.tree.opening import opened_set

        opening = opening._replace(tolerance=opening.tolerance._replace(is_option=False))
        with contextlib.ExitStack() as stack:
            with self._where_it_was_typed():
                found = opened_set(self.told.shards, opening, self._composition, access=self.told.access)
                below = stack.enter_context(found)
            yield below

    @property
    def _composition(self) -> Composition | None:
        from wdsfs.tree.view_set import is_view

        wanted = self._mount.options.composition
        return wanted if is_view(self.told.shards, wanted) else None

    def _where_it_was_typed(self) -> contextlib.AbstractContextManager[None]:
        """Relative paths of joined shards and label files are of the directory of the mount's command."""
        names_files = self._mount.options.composition.names_files
        return in_directory(self._mount.directory) if names_files else contextlib.nullcontext()

    def look(self, below: ShardSet) -> LowerTree | None:
        """The tree of the set as it is now, None for the one that is shown. Raises WdsfsErrors, OSErrors."""
        before, self.told = self.told, self._mount.shown()
        if self.told == before:
            return None
        try:
            with self._where_it_was_typed():
                return samples_of(self._opened_again(below), self.names)
        except BaseException:
            self.told = before  # to be tried again
            raise

    def _opened_again(self, below: ShardSet) -> ShardSet:
        """The set as it is now, over the same index; what is new is indexed when it is asked for."""
        from wdsfs.index.portable import attached
        from wdsfs.tree.opening import make_view
        from wdsfs.tree.opening_options import Opening
        from wdsfs.tree.shard_set import ShardSet, indexed
        from wdsfs.tree.view_set import open_set
        from wdsfs.tree.view_sources import Companions

        shards, index, composition, access = self.told.shards, below.index, self._composition, self.told.access
        companions = None if composition is None else Companions(composition, shards[0].reading)
        further = [] if companions is None else companions.shards
        index.portables = attached([*shards, *further])
        if composition is None or companions is None:
            return ShardSet(shards, index, access=access)
        found = open_set(shards, index, composition, companions, access=access)
        for source in found.sources:
            for number in source.numbers:
                with contextlib.suppress(ShardError):  # told on the page of problems
                    indexed(source.summary, number)
        make_view(found, Opening(quiet=True))
        return found
