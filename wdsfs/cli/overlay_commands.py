"""The commands `diff` and `restore`, and the options by which these and `commit` name an overlay.

`mount/overlay_session.py` does the work. As in `cli/main.py`, functions import the modules of other rooms.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from wdsfs.cli.opening_options import index_options, set_for_all
from wdsfs.cli.option_kinds import Command, Decorator, flag, gather_options, json_option, offer_mounts_or_paths
from wdsfs.cli.output import say, write_json
from wdsfs.cli.process import disk_errors
from wdsfs.cli.view_options import set_options, view_options
from wdsfs.errors import CommitError, UsageError, counted

if TYPE_CHECKING:
    from wdsfs.mount.live_mount import LiveMount
    from wdsfs.mount.overlay_session import NamedSet, OverlaySession
    from wdsfs.packing.diff import ChangedSample, Changes
    from wdsfs.tree.set_options import Opening, Selection, TreeOptions

# --- naming an overlay -------------------------------------------------------------------------------------


def _overlay_option(text: str) -> Decorator[Any]:
    return click.option("--overlay", metavar="DIR", type=click.Path(exists=True, file_okay=False), help=text)


class NamedOverlay(NamedTuple):
    """The arguments of a command: a mount point; or an overlay, its shards and the options of their view."""

    sources: Sequence[str]
    selection: Selection
    overlay: str | None
    tree: TreeOptions

    def open_session(
        self, opening: Opening, *, freeze: bool = False, whole: bool = False
    ) -> AbstractContextManager[OverlaySession]:
        """Open the overlay; `whole`: open all shards of the set. Raises UsageError, MountError."""
        from wdsfs.mount import mount_search
        from wdsfs.mount.overlay_session import held_session, mounted_session

        if self.overlay is not None:
            return held_session(self.overlay, self._below(), opening, whole=whole)
        if len(self.sources) != 1:
            raise UsageError("name one MOUNTPOINT, or --overlay DIR and its SHARDS")
        if self.selection.arguments:
            raise UsageError(f"{self.selection.arguments[0]} is for SHARDS; leave it out for a mount")
        mount = mount_search.require_writable(self.sources[0])
        return mounted_session(mount, with_index_of(mount, opening), freeze=freeze, whole=whole)

    def _below(self) -> NamedSet:
        from wdsfs.mount.overlay_session import NamedSet

        context, default = click.get_current_context(), (ParameterSource.DEFAULT, None)
        names = ("layout", "names", "merge", *self.selection.reading._fields)
        typed = frozenset(name for name in names if context.get_parameter_source(name) not in default)
        return NamedSet(self.sources, self.selection, self.tree, typed)

    def unfinished(self) -> CommitError:
        """Return the error for an overlay with an unfinished commit, with the command that finishes it."""
        which = ["--overlay", self.overlay] if self.overlay is not None else []
        words = ["wdsfs", "commit", "--in-place", *which, *self.selection.arguments, *self.sources]
        return CommitError(
            f"a commit of this overlay was stopped half-way; finish it with: {shlex.join(words)} (to give it up, "
            "type --abandon instead of --in-place)"
        )


named_overlay = gather_options(
    "overlay",
    NamedOverlay,
    {
        "sources": click.argument(
            "sources", metavar="[MOUNTPOINT|SHARDS...]", nargs=-1, shell_complete=offer_mounts_or_paths
        ),
        "selection": set_options,
        "overlay": _overlay_option("The directory with the changes of a writable mount."),
        "tree": view_options,
    },
)


def with_index_of(mount: LiveMount, opening: Opening) -> Opening:
    """Return `opening` with the index of the mount for all processes, unless the user has typed --index-dir."""
    if opening.index_dir is not None or not mount.index:
        return opening
    set_for_all("INDEX_DIR", mount.index)
    return opening._replace(index_dir=Path(mount.index))


# --- diff --------------------------------------------------------------------------------------------------


@click.command(cls=Command)
@named_overlay
@json_option
@index_options
def diff(overlay: NamedOverlay, as_json: bool, opening: Opening) -> None:
    """Show the changes in a writable mount, or with --overlay DIR the changes to SHARDS: a line for each sample.

    The line ends with the extensions: +added ~changed -removed =same content with another time.

    \b
    Examples:
      wdsfs diff /mnt/train
      wdsfs diff --overlay edits 'train-{000000..000999}.tar'
    \f

    `diff` also lists files that cannot be packed, and conflicts, with the reason; the exit code is then 1.
    A conflict stops every commit, even with --leave-out. "time only" marks a sample of which only times changed.

    Leftovers of programs (`.cls.swp`, `cls~`, `.DS_Store`) have their own list. A commit packs them only with
    --with-leavings.
    """
    from wdsfs.packing.diff import changes_of

    with disk_errors(), overlay.open_session(opening) as session:
        if session.is_half_done:
            raise overlay.unfinished()
        changes = changes_of(session.place, session.tree)
    if as_json:
        write_json(changes.as_json())
    else:
        show_changes(changes)
    say(counts_line(changes), err=True)
    sys.exit(1 if changes.unpackable or changes.conflicts else 0)


def show_changes(changes: Changes) -> None:
    """Write the changes of an overlay, a line for each sample, then remarks."""
    from wdsfs.packing import reasons

    for sample in [*changes.samples, *changes.others]:
        say(_sample_line(sample))
    remarks = {
        "conflict": changes.conflicts,
        "cannot be packed": changes.unpackable,
        "left behind": changes.leavings,
        "note": changes.notes,
    }
    said = set[str]()
    for word, some in remarks.items():
        for remark in some:
            is_long, was_said = remark.reason == reasons.FOLDER, remark.reason in said
            reason = reasons.FOLDER_TOO if is_long and was_said else remark.reason
            say(f"{word}: {os.fsdecode(remark.path)}: {reason}")
            said.add(remark.reason)


def counts_line(changes: Changes) -> str:
    """Return a line with the number of changed samples of each kind, and of files that cannot be packed."""
    counts = Counter(sample.kind for sample in changes.samples)
    samples = [f"{counts[kind]:,} {kind}" for kind in ("added", "changed", "renamed", "removed")]
    samples += [f"{counts[kind]:,} {kind}" for kind in ("time only",) if counts[kind]]
    files = [f"{len(changes.unpackable):,} cannot be packed"]
    files += [counted(len(changes.conflicts), "conflict")] if changes.conflicts else []
    files += [f"{len(changes.leavings):,} left behind by programs"] if changes.leavings else []
    return f"samples: {', '.join(samples)}; {', '.join(files)}"


def _sample_line(sample: ChangedSample) -> str:
    path = os.fsdecode(sample.path)
    if sample.was:
        path = f"{os.fsdecode(sample.was)} -> {path}"
    columns = {"+": sample.added, "~": sample.changed, "-": sample.removed, "=": sample.times}
    marked = [mark + os.fsdecode(column) for mark, names in columns.items() for column in names]
    # Without the extensions of an added or removed sample: the whole sample changes.
    is_whole = sample.kind in ("added", "removed")
    return " ".join([f"{sample.kind:<8}", path, *(() if is_whole else marked)])


# --- restore -----------------------------------------------------------------------------------------------


@click.command(cls=Command)
@click.argument("arguments", metavar="[MOUNTPOINT] [PATH]...", nargs=-1, shell_complete=offer_mounts_or_paths)
@_overlay_option("The directory with the changes, if no mount uses it.")
@flag("-a", "--all", "everything", "Undo every change.")
@flag("-n", "--dry-run", "Only list the changes that would be undone.")
@json_option
@index_options
def restore(
    arguments: tuple[str, ...],
    overlay: str | None,
    everything: bool,
    dry_run: bool,
    as_json: bool,
    opening: Opening,
) -> None:
    """Undo the changes at PATH and below it. The mount shows the old content at once.

    Files, samples and directories are then as in the shards: removed files come back, new files disappear. You
    lose their changed content; --dry-run only lists the changes.

    PATH is a path in the mount, or, after MOUNTPOINT, a path below its top, as `wdsfs diff` shows it. For a
    renamed file or directory, type either name: it gets its old name back.

    \b
    Examples:
      wdsfs restore /mnt/train/train-000000/images/cat1/json
      wdsfs restore /mnt/train train-000000/images/cat2 train-000000/images/cat3
      wdsfs restore --dry-run --all /mnt/train
      wdsfs restore --overlay edits train-000000/images/dog1
    """
    from wdsfs.mount import mount_search

    mountpoint, given = (None, arguments) if overlay is not None else _apart(arguments)
    if everything and given:
        raise UsageError("--all takes no PATH")
    with _restorable(mountpoint, str(overlay), opening, bool(everything or given)) as session:
        paths = [b""] if everything else [mount_search.path_below_top(path, mountpoint) for path in given]
        undone = session.restore(paths, dry_run=dry_run)
    _show_undone(undone, dry_run, as_json)


def _restorable(
    mountpoint: str | None, overlay: str, opening: Opening, has_paths: bool
) -> AbstractContextManager[OverlaySession]:
    """Return the overlay of a mount, or the unmounted `overlay`, for undoing changes.

    Raises UsageError.
    """
    from wdsfs.mount import mount_search
    from wdsfs.mount.overlay_session import mounted_session, remembered_session

    # `require_writable` refuses a path that is no mount.
    mount = None if mountpoint is None else mount_search.require_writable(mountpoint)
    if not has_paths:
        raise UsageError("name the PATHs to restore, or --all")
    if mount is None:
        return remembered_session(overlay, opening)
    return mounted_session(mount, with_index_of(mount, opening))


def _apart(arguments: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the mount point and the PATHs. If the first argument is a PATH, its mount is the mount point."""
    from wdsfs.mount import mount_search

    if not arguments:
        raise UsageError("name PATHs in a mount; or a MOUNTPOINT and PATHs below it; or --overlay DIR and PATHs")
    above = mount_search.find_above(arguments[0])
    return (arguments[0], arguments[1:]) if above is None else (above, arguments)


def _show_undone(changes: Sequence[tuple[str, bytes, bytes]], dry_run: bool, as_json: bool) -> None:
    rows = [(kind, os.fsdecode(path), os.fsdecode(was)) for kind, path, was in changes]
    if as_json:
        undone = [{"kind": kind, "path": path, "was": was or None} for kind, path, was in rows]
        write_json({"undone": undone, "dry_run": dry_run})
        return
    for kind, path, was in rows:
        text = f"{was} -> {path}" if was else path
        say(f"{kind:<8} {text}")
    counts = Counter(kind for kind, *_ in rows)
    summary = ", ".join(
        f"{counts[kind]:,} {kind}" for kind in ("changed", "removed", "renamed", "new") if counts[kind]
    )
    say(f"{'would be undone' if dry_run else 'undone'}: {summary}", err=True)
