"""`wdsfs commit` with the options of a view: what the set shows becomes new shards, without an overlay."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from wdsfs.cli.output import note_uneven, say, uneven_text
from wdsfs.cli.overlay_report import show_done, show_plan
from wdsfs.cli.process import disk_errors, ended_in_order, when_interrupted
from wdsfs.cli.progress import shards_bar
from wdsfs.errors import UsageError, counted

if TYPE_CHECKING:
    from wdsfs.cli.overlay_session import Wanted
    from wdsfs.packing.overlay_source import CommitOptions
    from wdsfs.packing.view_source import ViewCommit
    from wdsfs.tree.composition import Composition
    from wdsfs.tree.opening_options import Opening

# Options of `commit` that are about an overlay, or about shards that stay as they are.
_NOT_FOR_VIEWS = {
    "overlay": "shards are taken as they are below an overlay; commit it first, and then the new shards",
    "layout": "new shards have samples, however a mount shows them",
    "names": "new shards have samples, however a mount shows them",
    "merge": "samples stay in their shards; --maxcount and --maxsize split them up anew",
    "changed_only": "all samples are written",
    "in_place": "the shards stay as they are; name new ones with --output",
    "abandon": "there is nothing to end",
    "link": "all shards are written anew",
    "copy": "all shards are written anew",
    "leave_out": "it is for files of an overlay",
    "with_leavings": "it is for files of an overlay",
    "ignore_times": "it is for files of an overlay",
    "executor": "a view is written by this process; --shard-id gives each machine a part of the shards",
}


def commit_view(
    wanted: Wanted,
    composition: Composition,
    options: CommitOptions,
    opening: Opening,
    *,
    dry_run: bool,
    as_json: bool,
) -> ViewCommit:
    """Write what SHARDS show with these options. Raises UsageError, CommitError, ViewError, ShardErrors."""
    from wdsfs.packing.view_source import ViewCommit
    from wdsfs.tar.problems import UNDECODED
    from wdsfs.tree.opening import opened

    since = time.monotonic()
    _refuse_options()
    _refuse_mount(wanted)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ended_in_order())
        below = stack.enter_context(
            opened(wanted.sources, wanted.selection, opening, composition, whole=True),
        )
        label = "planning" if dry_run else "packing"
        on_shard = stack.enter_context(shards_bar(label, len(below), opening.quiet))
        # What cannot be decoded is packed as it is.
        made = ViewCommit(below, options, frozenset((UNDECODED,)), on_shard)
        stack.enter_context(disk_errors())
        stack.enter_context(
            when_interrupted("; what is finished is kept, and the same command goes on from there")
        )
        made.run(write=not dry_run)
    if dry_run:
        show_plan(made.plan, None, as_json)
    else:
        show_done(made.plan, made.done, None, time.monotonic() - since, as_json)
    if made.left_out and not as_json:
        say(f"left out: {counted(made.left_out, 'member')} of the shards in no sample")
    note_uneven(uneven_text(made.plan.steps[0].output.target, made.first), opening.quiet)
    return made


def _refuse_options() -> None:
    """Raise UsageError for options of an overlay."""
    context = click.get_current_context()
    for param in context.command.params:
        reason = _NOT_FOR_VIEWS.get(str(param.name))
        typed = context.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE
        if reason is not None and typed:
            raise UsageError(f"{param.opts[-1]}: not with the options of a view: {reason}")


def _refuse_mount(wanted: Wanted) -> None:
    """Raise UsageError if there are no shards: a mount was named, or nothing."""
    from wdsfs import mount_registry

    if not wanted.sources:
        raise UsageError("name the SHARDS")
    if len(wanted.sources) == 1 and mount_registry.find(wanted.sources[0]) is not None:
        raise UsageError(f"{wanted.sources[0]} is a mount: name its SHARDS, with the options of the view")
