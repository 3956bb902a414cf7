"""The command `restore`: gives back what the shards have, where an overlay has changed it.

As `cli/overlay_session.py`, it takes a mount or an overlay that is not mounted. What is undone is decided in
`overlay/restore.py`, and done by the worker of the mount, or here if there is none.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import click

from wdsfs.cli import completion
from wdsfs.cli.options import ViewOptions, index_options, json_option
from wdsfs.cli.output import say, write_json
from wdsfs.cli.overlay_session import mounted, tree_below
from wdsfs.errors import CommitError, MountError, NoSuchEntry, OverlayUnusable, UsageError, several
from wdsfs.names import shown

if TYPE_CHECKING:
    from wdsfs.overlay.overlay_directory import OverlayDirectory
    from wdsfs.overlay.restore import Restoration, RestoredChange
    from wdsfs.tree.opening_options import Opening
    from wdsfs.tree.tree import LowerTree


class _RestoreSession(NamedTuple):
    """An overlay over its set, and what undoes the changes at some paths in it."""

    place: OverlayDirectory
    tree: LowerTree
    restore: Callable[[Sequence[bytes]], None]


@click.command()
@click.argument(
    "arguments", metavar="[MOUNTPOINT] [PATH]...", nargs=-1, shell_complete=completion.mount_points_or_paths
)
@click.option(
    "--overlay",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False),
    help="The directory with the changes, if it is not mounted.",
)
@click.option("-a", "--all", "everything", is_flag=True, help="Undo every change.")
@click.option("-n", "--dry-run", is_flag=True, help="Only show what would be undone.")
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
    """Undo what was changed at PATH, and below it: files, samples and directories are as the shards have them,
    what was removed is there again, and what is new is gone. The mount shows it at once.

    PATH is a path in the mount, or, after MOUNTPOINT, one below its top, as `wdsfs diff` shows it. For
    something renamed give either name: it gets the old one back. What was written is lost; --dry-run shows what
    would be undone.

    \b
    Examples:
      wdsfs restore /mnt/train/train-000000/images/cat1/json
      wdsfs restore /mnt/train train-000000/images/cat2 train-000000/images/cat3
      wdsfs restore --dry-run --all /mnt/train
      wdsfs restore --overlay edits train-000000/images/dog1
    """
    from wdsfs.mount import search
    from wdsfs.overlay.merged_view import NodeTable
    from wdsfs.overlay.restore import Restoration
    from wdsfs.overlay.upper_directory import load_upper
    from wdsfs.tree.shard_set import indexed

    mountpoint, given = (None, arguments) if overlay is not None else _apart(arguments)
    if everything and given:
        raise UsageError("--all takes no PATH")
    if not everything and not given:
        if mountpoint is not None:
            search.writable(mountpoint)  # which says so, where it is no mount
        raise UsageError("name the PATHs that are to be restored, or --all")
    with _mounted(mountpoint, opening) if mountpoint is not None else _held(str(overlay), opening) as session:
        _refuse_unfinished(session.place)
        paths = [b""] if everything else [_below(path, mountpoint) for path in given]
        nodes = NodeTable(session.tree, load_upper(session.place))
        indexed(nodes.bind)
        restoration = Restoration(nodes)
        _refuse_absent(paths, restoration, session.tree)
        targets = indexed(restoration.targets, paths)
        changes = indexed(restoration.changes, targets)
        if not changes:
            raise NoSuchEntry(f"nothing was changed at {several([shown(path) for path in given]) or 'any path'}")
        if not dry_run:
            session.restore(paths)
    _show(changes, dry_run, as_json)


def _apart(arguments: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The mount point and the PATHs. Where the first one is a PATH, the mount that it lies in is meant."""
    if not arguments:
        raise UsageError("name PATHs in a mount, its MOUNTPOINT and PATHs below it, or --overlay DIR and PATHs")
    from wdsfs.mount import search

    above = search.above(arguments[0])
    return (arguments[0], arguments[1:]) if above is None else (above, arguments)


def _refuse_unfinished(place: OverlayDirectory) -> None:
    from wdsfs.overlay.overlay_directory import unfinished

    if unfinished(place):
        raise CommitError(
            f"a commit in place of {place.path} was stopped half-way: some of its changes are in the shards "
            "already. Finish it first: repeat that commit"
        )


@contextlib.contextmanager
def _mounted(mountpoint: str, opening: Opening) -> Iterator[_RestoreSession]:
    from wdsfs.mount import search

    mount = search.writable(mountpoint)
    if mount.lasting:
        raise MountError(f"{mountpoint}: {mount.lasting}")
    with mounted(mountpoint, opening, freeze=False) as one:
        yield _RestoreSession(one.place, one.tree, mount.restore)


@contextlib.contextmanager
def _held(overlay: str, opening: Opening) -> Iterator[_RestoreSession]:
    """The overlay with the shards that it was made over: it has their paths."""
    from pathlib import Path

    from wdsfs.overlay.overlay_directory import OverlayDirectory, held, read_settings
    from wdsfs.overlay.upper_directory import UpperDirectory
    from wdsfs.overlay.writable_tree import WritableTree
    from wdsfs.spec.expand import Shard
    from wdsfs.tree.shard_set import indexed

    place = OverlayDirectory(Path(os.path.abspath(overlay)))
    with contextlib.ExitStack() as stack:
        stack.enter_context(held(place))
        settings = read_settings(place)
        if settings is None:
            raise OverlayUnusable(
                f"{place.path} is no overlay of a mount of wdsfs; from an upper of the kernel's overlayfs remove "
                "by hand what is to go (docs/overlay.md)"
            )
        shards = [Shard(one.path, one.name, reading=settings.reading) for one in settings.shards]
        view = ViewOptions(settings.layout, settings.names, settings.merge)
        tree = stack.enter_context(tree_below(place, shards, view, opening))

        def undo(paths: Sequence[bytes]) -> None:
            upper = UpperDirectory(place)
            try:
                written = WritableTree(tree, upper)
                indexed(written.prepare)
                indexed(written.restore, paths, lambda inode, name: None)
            finally:
                upper.close(clean=True)

        yield _RestoreSession(place, tree, undo)


# --- paths -------------------------------------------------------------------------------------------------


def _below(path: str, mountpoint: str | None) -> bytes:
    """A path below the top of the tree, without a slash in front. Raises UsageError for one that is outside.

    Semantics decision: a relative PATH is one from the working directory, if that leads into the mount; else it is
    one from the mount's top, as `diff` shows them.
    """
    from wdsfs import mount_registry

    if not path:
        raise UsageError("a PATH is empty; to undo every change say --all")
    inside = os.path.normpath(path)
    if mountpoint is not None:
        for top in (os.path.abspath(mountpoint), mount_registry.canonical(mountpoint)):
            whole = os.path.normpath(os.path.join(os.getcwd(), path))
            if whole == top or whole.startswith(top.rstrip("/") + "/"):
                inside = os.path.relpath(whole, top)
                break
    if os.path.isabs(inside) or inside == ".." or inside.startswith("../"):
        raise UsageError(f"{path}: is outside of {mountpoint or 'the overlay'}")
    return b"" if inside == "." else os.fsencode(inside)


def _refuse_absent(paths: Sequence[bytes], restoration: Restoration, tree: LowerTree) -> None:
    """Raise NoSuchEntry for a path that neither the overlay nor its shards have."""
    from wdsfs.tree.shard_set import indexed

    for path in paths:
        if not indexed(restoration.find, path):
            indexed(tree.resolve, path)


# --- output -----------------------------------------------------------------------------------------------


def _show(changes: Sequence[RestoredChange], dry_run: bool, as_json: bool) -> None:
    rows = [(one.kind, os.fsdecode(one.path), os.fsdecode(one.was)) for one in changes]
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
