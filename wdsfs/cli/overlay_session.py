"""The overlay that `diff`, `commit` and `restore` work on, over its set; it may be mounted or not.

As in `cli/main.py`, what is worked with is imported when it is needed. What an overlay changes is decided in
`packing/diff.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import click
from click.core import ParameterSource

from wdsfs.cli import completion
from wdsfs.cli.options import ViewOptions, handing_over, set_for_all, set_options, view_options
from wdsfs.errors import CommitError, MissingShard, OverlayUnusable, UsageError, several
from wdsfs.remote.shard_paths import look
from wdsfs.tree.options import view_of

if TYPE_CHECKING:
    from wdsfs.mount.live_mount import Frozen
    from wdsfs.overlay.overlay_directory import OverlayDirectory, OverlaySettings
    from wdsfs.overlay.upper_format import UpperNode
    from wdsfs.packing.diff import Changes
    from wdsfs.packing.upper_walk import Rules
    from wdsfs.spec.expand import Shard
    from wdsfs.spec.selection import Selection
    from wdsfs.tree.opening_options import Opening
    from wdsfs.tree.shard_access import Access
    from wdsfs.tree.shard_set import ShardSet
    from wdsfs.tree.tree import LowerTree

log = logging.getLogger("wdsfs")

sources_argument = click.argument(
    "sources", metavar="[MOUNTPOINT|SHARDS...]", nargs=-1, shell_complete=completion.mount_points_or_paths
)
overlay_option = click.option(
    "--overlay",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False),
    help="The directory with the changes: of a writable mount, or the upperdir of the kernel's overlayfs.",
)


class Wanted(NamedTuple):
    """The arguments of a command: a mount point; or an overlay, the shards below it, and how they are shown."""

    sources: Sequence[str]
    selection: Selection
    overlay: str | None
    view: ViewOptions


wanted_options = handing_over(
    "wanted",
    Wanted,
    {"sources": sources_argument, "selection": set_options, "overlay": overlay_option, "view": view_options},
)


@dataclass(slots=True)
class OverlaySession:
    """An overlay over its set, protected from other writers.

    `directory` is a descriptor of its upper, None if it has none. If it is mounted, `mountpoint` is the place, and
    `frozen` is the mount, in which nobody writes.
    """

    place: OverlayDirectory
    tree: LowerTree
    directory: int | None
    mountpoint: str | None = None
    frozen: Frozen | None = None

    @property
    def mount_is_wrong(self) -> bool:
        """True if the mount does not show the new shards, or has ended. REQUIRES: the session has ended."""
        return self.frozen is not None and self.frozen.is_wrong

    def changes(self, rules: Rules | None = None) -> Changes:
        """Find the changes of the overlay, by these rules. Raises ShardErrors, and OSErrors that name a file."""
        from wdsfs.overlay import upper_format
        from wdsfs.overlay.upper_directory import load_upper
        from wdsfs.packing import diff, upper_walk

        directory = -1 if self.directory is None else self.directory

        def open_file(node: UpperNode) -> int:
            return upper_format.open_below(directory, node.path())

        # Even if nothing is changed yet: shards that other tools read otherwise are reported, too.
        upper = load_upper(self.place)
        return diff.find(self.tree, upper, open_file, rules or upper_walk.Rules())

    def prepare_new(self, new: Sequence[bytes]) -> None:
        """Prepare the mount, if there is one, for `new` shards. Raises CommitError: the mount is unchanged."""
        if self.frozen is not None:
            self.frozen.prepare(new)

    def show_new(self, new: Sequence[bytes], published: Sequence[bytes]) -> None:
        """Have the mount, if there is one, show `new` shards, and open replaced (`published`) ones anew."""
        if self.frozen is not None:
            self.frozen.show(new, published)


@contextlib.contextmanager
def overlay_session(
    wanted: Wanted, opening: Opening, freeze: bool, whole: bool = False
) -> Iterator[OverlaySession]:
    """The overlay of a mount, or one that is not mounted. `whole` says that all shards of the set are needed."""
    if wanted.overlay is None and len(wanted.sources) != 1:
        raise UsageError("name one MOUNTPOINT, or --overlay DIR and the SHARDS below it")
    if wanted.overlay is None and wanted.selection.arguments:
        raise UsageError(f"{wanted.selection.arguments[0]} is for SHARDS; a mount knows which it shows")
    with (
        mounted(wanted.sources[0], opening, freeze, whole)
        if wanted.overlay is None
        else _held(wanted.overlay, wanted, opening, whole) as one
    ):
        yield one


@contextlib.contextmanager
def _held(overlay: str, wanted: Wanted, opening: Opening, whole: bool) -> Iterator[OverlaySession]:
    """Hold the overlay and open the set below it, shown as it was when the overlay was made."""
    from pathlib import Path

    from wdsfs.overlay.overlay_directory import OverlayDirectory, clean, held, read_settings, unfinished
    from wdsfs.overlay.overlay_shards import refuse_outputs
    from wdsfs.spec.expand import expand, refuse_left_out

    place = OverlayDirectory(Path(os.path.abspath(overlay)))
    settings, selection, view = read_settings(place), wanted.selection, wanted.view
    if settings is not None:
        view = _agreed(settings, view, selection)
        selection = selection._replace(reading=settings.reading)
    with contextlib.ExitStack() as stack:
        stack.enter_context(held(place))
        selection = selection._replace(allow_missing=opening.tolerance.allow_missing)
        try:
            shards = expand(wanted.sources, *selection) if wanted.sources else _of_a_new_set(settings)
        except MissingShard as error:
            if not unfinished(place):
                raise
            text = (
                "a commit of this overlay was stopped half-way: put the shard back, or an empty tar in its place "
                "(truncate -s 10240 FILE)"
            )
            raise CommitError(
                f"{error}; {text}, then finish it (--in-place) or end it as it is (--abandon)"
            ) from None
        refuse_left_out(shards, "the overlay is of whole shards")
        if not unfinished(place):
            clean(place)
            refuse_outputs(place, [shard.path for shard in shards])
        tree = stack.enter_context(tree_below(place, shards, view, opening, whole))
        yield OverlaySession(place, tree, stack.enter_context(upper_of(place)))


def _of_a_new_set(settings: OverlaySettings | None) -> list[Shard]:
    """The shards of a set that begins empty: none. Raises UsageError if the overlay has shards below it."""
    if settings is None or settings.shards:
        raise UsageError("name the SHARDS below the overlay, too; only one of `mount --new` has none")
    return []


@contextlib.contextmanager
def mounted(mountpoint: str, opening: Opening, freeze: bool, whole: bool = False) -> Iterator[OverlaySession]:
    """The overlay of a mount; with `freeze` all writes to the mount are refused meanwhile."""
    from pathlib import Path

    from wdsfs.cli.mount_command import image_maker
    from wdsfs.mount import search
    from wdsfs.overlay.overlay_directory import OverlayDirectory, unfinished
    from wdsfs.overlay.overlay_shards import refuse_outputs

    mount = search.writable(mountpoint)
    if opening.index_dir is None and mount.index:
        opening = opening._replace(index_dir=Path(mount.index))
        set_for_all("WDSFS_INDEX_DIR", mount.index)
    with contextlib.ExitStack() as stack:
        frozen = stack.enter_context(mount.frozen(image_maker(opening))) if freeze else None
        lower = mount.lower() if frozen is None else frozen.lower
        place = OverlayDirectory(Path(str(mount.overlay)))
        if not unfinished(place):
            refuse_outputs(place, [shard.path for shard in lower.shards])
        # What the mount refuses to show, its user must not copy into shards, or write to, either.
        view = ViewOptions(*mount.options[:3])
        tree = stack.enter_context(tree_below(place, lower.shards, view, opening, whole, lower.access))
        upper = stack.enter_context(upper_of(place))
        yield OverlaySession(place, tree, upper, mountpoint, frozen)


@contextlib.contextmanager
def tree_below(
    place: OverlayDirectory,
    shards: Sequence[Shard],
    view: ViewOptions,
    opening: Opening,
    whole: bool = False,
    access: Access | None = None,
) -> Iterator[LowerTree]:
    """The tree below an overlay. Warns of shards that have changed since the overlay was made."""
    from wdsfs.overlay.overlay_directory import read_settings
    from wdsfs.tree.merged_tree import make_tree

    settings = read_settings(place)
    with _opened(shards, view, opening, whole, access) as below:
        if settings is not None:
            _warn_of_changed(place, settings, below)
        yield make_tree(below, view_of(view.layout, view.names), view.merge)


def _opened(
    shards: Sequence[Shard],
    view: ViewOptions,
    opening: Opening,
    whole: bool,
    access: Access | None = None,
) -> contextlib.AbstractContextManager[ShardSet]:
    """The set below an overlay. What cannot be read stays in it: changes of it are no new samples."""
    from wdsfs.tree.opening import opened_set

    if view.merge and opening.tolerance.allow_missing:
        raise UsageError(
            "--allow-missing is not for an overlay with --merge: a sample could be new, or belong to one "
            "that cannot be read"
        )
    whole = (whole or view.merge) and not opening.tolerance.allow_missing
    return opened_set(shards, opening, whole=whole, access=access)


@contextlib.contextmanager
def upper_of(place: OverlayDirectory) -> Iterator[int | None]:
    """A descriptor of the upper, None if there is none yet."""
    from wdsfs.overlay.upper_format import OPEN_DIRECTORY

    if not place.upper.is_dir():
        yield None
        return
    directory = os.open(place.upper, OPEN_DIRECTORY)
    try:
        yield directory
    finally:
        os.close(directory)


def _agreed(settings: OverlaySettings, view: ViewOptions, selection: Selection) -> ViewOptions:
    """The options of the view that the overlay was made with. Raises UsageError if the user gave others."""
    context = click.get_current_context()
    made = ViewOptions(settings.layout, settings.names, settings.merge)
    given = {**view._asdict(), **selection.reading._asdict()}
    for name, value in {**made._asdict(), **settings.reading._asdict()}.items():
        typed = context.get_parameter_source(name) not in (ParameterSource.DEFAULT, None)
        if typed and given[name] != value:
            raise UsageError(f"the overlay was made with {' '.join(settings.options)}: use these options, or none")
    return made


def _warn_of_changed(place: OverlayDirectory, settings: OverlaySettings, below: ShardSet) -> None:
    """Warn of shards that have changed since the overlay was made. Raises OverlayUnusable."""
    from wdsfs.overlay.overlay_directory import unfinished

    changed = _compare(settings, {shard.name: shard.path for shard in below.shards})
    if changed and not unfinished(place):  # else it is the commit that has changed them
        text = "%s: changed since the overlay was made; the changes apply to the current contents"
        log.warning(text, several(changed))


def _compare(settings: OverlaySettings, shards: dict[bytes, bytes]) -> list[str]:
    """Return the shards that have changed. Raises OverlayUnusable if the set is not the one below the overlay."""
    from wdsfs.errors import ShardError

    missing = [os.fsdecode(one.name) for one in settings.shards if one.name not in shards]
    if missing:
        raise OverlayUnusable(f"the overlay was made over a set with {several(missing)}: name the same SHARDS")
    changed = []
    for one in settings.shards:
        with contextlib.suppress(ShardError):  # an error where it is needed
            if look(shards[one.name]) != one.fingerprint:
                changed.append(os.fsdecode(shards[one.name]))
    return changed


def unfinished_advice(wanted: Wanted) -> CommitError:
    """The error for an overlay with an unfinished commit: how to finish it."""
    which = ["--overlay", wanted.overlay] if wanted.overlay is not None else []
    command = shlex.join(["wdsfs", "commit", "--in-place", *which, *wanted.selection.arguments, *wanted.sources])
    return CommitError(
        f"a commit of this overlay was stopped half-way; finish it with: {command} (or end it as it is: use "
        "--abandon instead of --in-place)"
    )
