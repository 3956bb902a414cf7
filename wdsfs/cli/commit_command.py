"""The command `commit`: packs the changes of an overlay into shards.

What is written is decided in `packing/overlay_source.py` and `packing/replacement.py`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from wdsfs.cli import completion, export_command
from wdsfs.cli.options import (
    AtLeastOne,
    dry_run_option,
    handing_over,
    json_option,
    leave_out_option,
    opening_options_with,
    soundness_options,
    space_check_option,
)
from wdsfs.cli.output import note_uneven, say, uneven_text, write_json
from wdsfs.cli.overlay_report import show_done, show_further, show_plan, steps_json, unshown_samples
from wdsfs.cli.overlay_session import OverlaySession, Wanted, overlay_session, unfinished_advice, wanted_options
from wdsfs.cli.process import INTERRUPTED, disk_errors, ended_in_order, when_interrupted
from wdsfs.cli.progress import bytes_bar
from wdsfs.cli.tree_options import composition_options
from wdsfs.errors import CommitError, ExportError, MountError, UsageError, counted
from wdsfs.remote.shard_paths import is_remote

if TYPE_CHECKING:
    from wdsfs.packing.diff import Changes
    from wdsfs.packing.overlay_source import CommitOptions
    from wdsfs.packing.plan import Plan, Step
    from wdsfs.packing.replacement import Replacement
    from wdsfs.packing.runner import Runner
    from wdsfs.spec.expand import Shard
    from wdsfs.tree.composition import Composition
    from wdsfs.tree.opening_options import Opening, Tolerance
    from wdsfs.tree.shard_set import ShardSet


class Packing(NamedTuple):
    """The options of `commit`; `options` are those that the plan depends on."""

    options: CommitOptions
    abandon: bool
    copy: bool
    exports: tuple[str, ...]
    space_check: bool
    dry_run: bool
    as_json: bool

    def check(self, tolerance: Tolerance) -> Packing:
        """Return the same, with what is tolerated. Raises UsageError for options that do not go together."""
        from wdsfs.packing.overlay_source import CommitOptions

        options = dataclasses.replace(self.options, allow_missing=tolerance.allow_missing)
        if not self.abandon:
            _check(options, self.copy)
        elif options != CommitOptions() or self.copy or self.exports or self.dry_run:
            raise UsageError("--abandon only ends what was begun: it takes no option that says what to write")
        return self._replace(options=options)


def _packing(
    abandon: bool,
    copy: bool,
    exports: tuple[str, ...],
    space_check: bool,
    dry_run: bool,
    as_json: bool,
    **given: Any,
) -> Packing:
    from wdsfs.packing.overlay_source import CommitOptions

    return Packing(CommitOptions(**given), abandon, copy, exports, space_check, dry_run, as_json)


packing_options = handing_over(
    "packing",
    _packing,
    {
        "output": click.option(
            "-o",
            "--output",
            metavar="PATTERN",
            shell_complete=completion.paths,
            help="Names of the new shards: 'out/train-%06d.tar' or braces; also 's3://...', gs, az, ais.",
        ),
        "maxcount": click.option(
            "--maxcount", type=click.IntRange(1), help="Samples in a new shard; samples are split up anew."
        ),
        "maxsize": click.option(
            "--maxsize",
            type=AtLeastOne(),
            metavar="BYTES",
            help="The same for bytes of content, for example 3e9.",
        ),
        "changed_only": click.option(
            "--changed-only", is_flag=True, help="Only new and changed samples, whole, into shards of their own."
        ),
        "in_place": click.option(
            "--in-place",
            is_flag=True,
            help="Replace the shards that change, and empty the overlay, but for what is left out.",
        ),
        "abandon": click.option(
            "--abandon",
            is_flag=True,
            help="End a commit in place that was stopped half-way as it is: what is not replaced stays in the "
            "overlay.",
        ),
        "link": click.option(
            "--link", is_flag=True, help="Hard-link shards without changes. (That changes their ctime.)"
        ),
        "copy": click.option("--copy", is_flag=True, help="Copy shards without changes.  [default]"),
        "sort": click.option("--sort", is_flag=True, help="Sort the samples of each shard by key."),
        "leave_out": leave_out_option,
        "with_leavings": click.option(
            "--with-leavings",
            is_flag=True,
            help="Also pack what programs have left behind (`.cls.swp`, `cls~`, `.DS_Store`).",
        ),
        "ignore_times": click.option(
            "--ignore-times",
            is_flag=True,
            help="Files of which only the time has changed stay as they are in the shards.",
        ),
        "exports": export_command.export_option,
        "space_check": space_check_option(
            "Go ahead in place where the file system seems too full: it may have reflinks or compression."
        ),
        "dry_run": dry_run_option,
        "as_json": json_option,
    },
)


@click.command()
@wanted_options
@packing_options
@composition_options
@soundness_options
@opening_options_with("Processes that index shards, and shards that are written at a time.", executor=True)
def commit(wanted: Wanted, packing: Packing, composition: Composition, opening: Opening) -> None:
    """Pack the changes of a writable mount, or with --overlay DIR those to SHARDS, into new shards.

    With the options of a view (--columns, --field, --join ...) there is no overlay: what a mount of SHARDS with
    these options shows is written into new shards.

    The sources stay as they are, unless --in-place is given. A commit that was stopped goes on when it is
    repeated. While a mount is committed, writers get EBUSY and readers go on. After --in-place the mount shows
    the new shards, and files that are still open from a replaced shard give ESTALE.

    \b
    Examples:
      wdsfs commit /mnt/train -o 'new/train-%06d.tar'
      wdsfs commit /mnt/train --in-place
      wdsfs commit --overlay edits -o 'new/train-%06d.tar' 'train-{000000..000999}.tar'
      wdsfs commit --overlay edits --in-place 'train-{000000..000999}.tar'
      wdsfs commit --overlay edits -o 's3://bucket/new/train-%06d.tar' 'train-{000000..000999}.tar'
      wdsfs commit --overlay edits --changed-only -o 'delta-%06d.tar' 'train-*.tar'
      wdsfs commit --columns 'img=jpg;png' --field caption.txt=json:caption -o 'new/%06d.tar' 'train-*.tar'
    """
    since = time.monotonic()
    packing = packing.check(opening.tolerance)
    options, as_json = packing.options, packing.as_json
    if not composition.is_plain:
        _commit_view(wanted, packing, composition, opening)
        return
    whole = not (options.in_place or options.changed_only or packing.abandon)
    held = overlay_session(wanted, opening, freeze=not packing.dry_run, whole=whole)
    with disk_errors(), ended_in_order(), held as session:
        committed = None
        if packing.abandon:
            _abandon(session, as_json)
        else:
            committed = _commit(session, wanted, packing, opening)
    code = MountError.exit_code if session.mount_is_wrong else 0
    if committed is not None:
        plan = committed.plan
        show_done(plan, committed.done, committed.unshown, time.monotonic() - since, as_json)
        if options.in_place and not as_json:
            show_further(plan.steps)
        note_uneven(committed.uneven, opening.quiet)
        if _export(plan, committed.before, packing, opening):
            code = code or ExportError.exit_code
    if code:
        sys.exit(code)


class Committed(NamedTuple):
    """A commit that is done: its plan, the steps that this command did, the numbers of removed and renamed samples
    that the new shards do not show, the set before it, and a note about the new set."""

    plan: Plan
    done: list[Step]
    unshown: dict[str, int] | None
    before: Sequence[Shard]
    uneven: str


def _commit(session: OverlaySession, wanted: Wanted, packing: Packing, opening: Opening) -> Committed | None:
    """Make the plan and write its shards; None for a dry run. Raises CommitError, ShardErrors."""
    from wdsfs.overlay.overlay_directory import unfinished

    options = packing.options
    begun = unfinished(session.place)
    if begun and not options.in_place:
        raise unfinished_advice(wanted)
    found = None if begun else session.changes(options.rules)
    plan = _plan(session, found, options)
    unshown = unshown_samples(found) if found is not None and options.changed_only else None
    session.refuse_inside(plan)
    _refuse_exports(plan, session.tree.lower.shards if options.in_place else (), packing.exports)
    uneven = "" if begun else _uneven(plan, session.tree.lower, options)
    if packing.dry_run:
        show_plan(plan, unshown, packing.as_json)
        note_uneven(uneven, opening.quiet)
        return None
    done = _write(session, plan, found, packing, opening)
    return Committed(plan, done, unshown, session.tree.lower.shards, uneven)


def _uneven(plan: Plan, lower: ShardSet, options: CommitOptions) -> str:
    """Return a note if Hugging Face's loader would refuse the set after this commit, which changes its start."""
    from wdsfs.packing.plan import member_names

    if not plan.steps or options.changed_only:  # no set of its own
        return ""
    first = plan.steps[0].output
    if options.in_place and first.target != lower.shards[0].path:
        return ""
    return uneven_text(first.target, member_names(first, lower))


def _commit_view(wanted: Wanted, packing: Packing, composition: Composition, opening: Opening) -> None:
    """Write what the set shows, and the indexes of the new shards that are asked for."""
    from wdsfs.cli.view_commit import commit_view

    made = commit_view(
        wanted, composition, packing.options, opening, dry_run=packing.dry_run, as_json=packing.as_json
    )
    if not packing.dry_run and _export(made.plan, (), packing, opening):
        sys.exit(ExportError.exit_code)


def _refuse_exports(plan: Plan, shards: Sequence[Shard], exports: Sequence[str]) -> None:
    """Raise UsageError for indexes that would go into a store."""
    paths = [*(step.output.target for step in plan.steps), *(shard.path for shard in shards)]
    if exports and any(map(is_remote, paths)):
        text = (
            "--export writes beside the new shards, which a store is no place for: afterwards use `wdsfs export`"
        )
        raise UsageError(text)


def _plan(session: OverlaySession, found: Changes | None, options: CommitOptions) -> Plan:
    """Return the plan for these changes; None: that of the commit that was begun.

    Raises CommitError, ShardErrors.
    """
    from wdsfs.packing.overlay_source import Planner
    from wdsfs.packing.replacement import read_plan

    below = session.tree.lower
    return read_plan(session.place, below) if found is None else Planner(below, found, options).make()


def _write(
    session: OverlaySession, plan: Plan, found: Changes | None, packing: Packing, opening: Opening
) -> list[Step]:
    """Write the shards of the plan; returns the steps that were done. Raises CommitError and ShardErrors."""
    from wdsfs.packing.replacement import Replacement
    from wdsfs.packing.runner import Runner

    label = "packing and sending" if plan.sent else "packing"
    with bytes_bar(label, plan.length + plan.sent, opening.quiet) as on_bytes:
        below, workers = session.tree.lower, opening.workers
        space_check = packing.options.in_place and packing.space_check
        runner = Runner(
            *(plan, session.files(), below, opening.jobs),
            on_bytes=on_bytes,
            workers=workers,
            space_check=space_check,
        )
        if packing.options.in_place:
            replacement = Replacement(session.place, runner, session.prepare_new, session.show_new)
            return _replace(runner, replacement, begun=found is None)
        pattern = packing.options.output
        assert found is not None
        assert pattern is not None
        session.note_outputs(plan, found, pattern, done=False)
        with when_interrupted("; what is finished is kept, and the same command goes on from there"):
            done = runner.write()
        session.note_outputs(plan, found, pattern, done=True)
        return done


def _replace(runner: Runner, replacement: Replacement, begun: bool) -> list[Step]:
    """Replace shards in place; `begun`: go on with what was stopped. Raises CommitError and ShardErrors."""
    if not runner.plan.steps:
        return []
    try:
        if not begun:
            replacement.begin()
        return replacement.finish()
    except KeyboardInterrupt:
        click.get_current_context().meta[INTERRUPTED] = (
            " half-way, and the overlay cannot be used before it is finished: repeat the command"
            if replacement.journal.exists()
            else "; nothing was replaced, and the overlay is as it was"
        )
        raise


def _export(plan: Plan, before: Sequence[Shard], packing: Packing, opening: Opening) -> bool:
    """Write the indexes that are asked for; True if any could not be written. `before` is the set as it was."""
    from wdsfs.spec.expand import expand, extended
    from wdsfs.tree.opening_options import Tolerance

    targets = [step.output.target for step in plan.steps]
    in_place = packing.options.in_place
    if in_place:
        export_command.warn_of_older([path for path in targets if not is_remote(path)], packing.exports)
    if not packing.exports or not (targets or in_place):
        return False
    # Also when nothing was written now: the commit that this one finishes may have been stopped before its export.
    new = [step.output.target for step in plan.steps if step.action == "new"]
    shards = extended(before, new) if in_place else expand(targets)
    return export_command.after_commit(shards, packing.exports, in_place, opening._replace(tolerance=Tolerance()))


def _abandon(session: OverlaySession, as_json: bool) -> None:
    """End a commit in place as it is, and list the shards that are not written. Raises CommitError."""
    from wdsfs.overlay.overlay_directory import unfinished
    from wdsfs.packing.replacement import Replacement, read_plan
    from wdsfs.packing.runner import Runner

    if not unfinished(session.place):
        raise CommitError("no commit in place of this overlay was stopped half-way, so there is none to abandon")
    below = session.tree.lower
    runner = Runner(read_plan(session.place, below), session.files(), below)
    done, aside = Replacement(session.place, runner, show=session.show_new).abandon(session.tree.merged)
    left = [step for step in runner.plan.steps if step not in done]
    if as_json:
        report = {
            "shards": steps_json(done),
            "left": steps_json(left),
            "aside": None if aside is None else str(aside),
        }
        write_json(report)
        return
    say(f"abandoned: {len(done)} of {counted(len(runner.plan.steps), 'shard')} written")
    for step in left:
        say(f"not written: {os.fsdecode(step.output.target)}")
    if aside is None:
        say("changes that are in no shard are still in the overlay; see: wdsfs diff")
    else:
        say(f"In a merged tree wdsfs cannot know which shard a change belongs to: all changes are in {aside}")
    show_further(done)


def _check(options: CommitOptions, copy: bool) -> None:
    """Refuse options that do not go together, and names that no shard can have. Raises UsageError."""
    from wdsfs.packing.output_names import check_output
    from wdsfs.remote.urls import is_url

    in_store = options.output is not None and is_url(options.output)
    clashes = [
        (options.link and copy, "--link and --copy exclude each other"),
        (options.in_place and options.changed_only, "--in-place and --changed-only exclude each other"),
        (options.in_place and options.link, "--in-place leaves shards without changes alone; there is no --link"),
        (options.in_place and options.leave_out, "--in-place packs all changes, so there is no --leave-out"),
        (options.changed_only and options.link, "--changed-only writes no shard without changes to --link"),
        (options.link and (options.sort or options.resplits), "--link is for shards that stay as they are"),
        (options.link and in_store, "--link is for files, and --output names objects in a store"),
        (
            not options.in_place and options.output is None,
            "name the new shards with --output, such as -o 'new/%06d.tar', or use --in-place",
        ),
    ]
    for wrong, text in clashes:
        if wrong:
            raise UsageError(text)
    if options.output is not None:
        check_output(options.output)
