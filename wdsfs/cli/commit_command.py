"""The command `commit`: packs the changes of an overlay, or what a view shows, into new shards."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from wdsfs.cli import completion, index_commands, options, output
from wdsfs.cli.output import bytes_bar, note_uneven, say, shards_bar, uneven_text, write_json
from wdsfs.cli.overlay_commands import NamedOverlay, named_overlay
from wdsfs.cli.process import INTERRUPTED, disk_errors, ended_in_order, when_interrupted
from wdsfs.door.urls import is_remote
from wdsfs.errors import ExportError, MountError, UsageError, and_others, counted

if TYPE_CHECKING:
    from wdsfs.mount.overlay_session import OverlaySession
    from wdsfs.packing.overlay_commit import OverlayCommit
    from wdsfs.packing.overlay_source import CommitOptions
    from wdsfs.packing.plan import Plan, Step
    from wdsfs.shards import Shard
    from wdsfs.tree.composition import Composition
    from wdsfs.tree.set_options import Opening, Tolerance

# Options that are about an overlay, or about shards that stay as they are.
_NOT_FOR_VIEWS = {
    "overlay": "shards are taken as they are below an overlay; commit it first, and then the new shards",
    "layout": "new shards have samples, however a mount shows them",
    "names": "new shards have samples, however a mount shows them",
    "merge": "samples stay in their shards; --maxcount and --maxsize divide them differently",
    "changed_only": "all samples are written",
    "in_place": "the shards stay as they are; name new ones with --output",
    "abandon": "there is nothing to end",
    "link": "all shards are written completely",
    "leave_out": "it is for files of an overlay",
    "with_leavings": "it is for files of an overlay",
    "ignore_times": "it is for files of an overlay",
    "executor": "a view is written by this process; --shard-id gives each machine a part of the shards",
}

log = logging.getLogger("wdsfs")


class Packing(NamedTuple):
    """The options of `commit`; `options` are those that the plan depends on."""

    options: CommitOptions
    abandon: bool
    exports: tuple[str, ...]
    space_check: bool
    dry_run: bool
    as_json: bool

    def check(self, tolerance: Tolerance) -> Packing:
        """Return the same, with what is tolerated. Raises UsageError for options that do not go together."""
        from wdsfs.packing.overlay_source import CommitOptions

        chosen = dataclasses.replace(self.options, allow_missing=tolerance.allow_missing)
        if self.abandon and (chosen != CommitOptions() or self.exports or self.dry_run):
            raise UsageError("--abandon only ends what was begun: it takes no option that says what to write")
        return self._replace(options=chosen if self.abandon else chosen.check())


def _packing(
    abandon: bool, exports: tuple[str, ...], space_check: bool, dry_run: bool, as_json: bool, **given: Any
) -> Packing:
    from wdsfs.packing.overlay_source import CommitOptions

    return Packing(CommitOptions(**given), abandon, exports, space_check, dry_run, as_json)


packing_options = options.handing_over(
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
            "--maxcount",
            type=click.IntRange(1),
            metavar="N",
            help="At most N samples in a new shard; all samples are divided among shards again.",
        ),
        "maxsize": click.option(
            "--maxsize",
            type=options.Bytes(),
            metavar="BYTES",
            help="The same for bytes of content, for example 3e9, 500MB or 1GiB.",
        ),
        "changed_only": options.flag(
            "--changed-only", "Only new and changed samples, whole, into shards of their own."
        ),
        "in_place": options.flag(
            "--in-place", "Replace the shards that change, and empty the overlay, but for what is left out."
        ),
        "abandon": options.flag(
            "--abandon",
            "End a commit in place that was stopped half-way: shards that it has replaced stay replaced, other "
            "changes stay in the overlay.",
        ),
        "link": options.flag(
            "--link", "Hard-link shards without changes, not copy them. (That changes their ctime.)"
        ),
        "sort": options.flag("--sort", "Sort the samples of each shard by key."),
        "leave_out": options.leave_out_option,
        "with_leavings": options.flag(
            "--with-leavings", "Also pack what programs have left behind (`.cls.swp`, `cls~`, `.DS_Store`)."
        ),
        "ignore_times": options.flag(
            "--ignore-times", "Files of which only the time has changed stay as they are in the shards."
        ),
        "exports": index_commands.export_option,
        "space_check": options.space_check_option(
            "Go ahead in place where the file system seems too full: it may have reflinks or compression."
        ),
        "dry_run": options.dry_run_option,
        "as_json": options.json_option,
    },
)


@click.command(cls=options.Command)
@named_overlay
@packing_options
@options.composition_options
@options.opening_options_with("Processes that index shards, and shards that are written at a time.", executor=True)
def commit(overlay: NamedOverlay, packing: Packing, composition: Composition, opening: Opening) -> None:
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
    if composition.is_plain:
        code, committed = _commit_overlay(overlay, packing, opening)
    else:
        code, committed = 0, _commit_view(overlay, packing, composition, opening)
    if committed is not None:
        _show(committed, packing, time.monotonic() - since)
        note_uneven(committed.uneven, opening.quiet)
        if not packing.dry_run and _export(committed.plan, committed.before, packing, opening):
            code = code or ExportError.exit_code
    if code:
        sys.exit(code)


class Committed(NamedTuple):
    """A commit that is planned, or done: its plan, the steps that this command did, and a note about the new set.

    `before` is the set before it. `unshown` are numbers of removed and renamed samples that the new shards do not
    show, `strays` that of members of a view in no sample.
    """

    plan: Plan
    done: Sequence[Step]
    uneven: str
    before: Sequence[Shard] = ()
    unshown: dict[str, int] | None = None
    strays: int = 0


# --- an overlay ----------------------------------------------------------------------------------------------


def _commit_overlay(overlay: NamedOverlay, packing: Packing, opening: Opening) -> tuple[int, Committed | None]:
    """Commit the overlay, or abandon its commit (None); return the exit code, too.

    Raises CommitError, ShardErrors.
    """
    chosen = packing.options
    whole = not (chosen.in_place or chosen.changed_only or packing.abandon)
    opened = overlay.opened(opening, freeze=not packing.dry_run, whole=whole)
    committed = None
    with disk_errors(), ended_in_order(), opened as session:
        if packing.abandon:
            _abandon(session, packing.as_json)
        else:
            committed = _commit_held(session, overlay, packing, opening)
    return MountError.exit_code if session.mount_is_wrong else 0, committed


def _commit_held(session: OverlaySession, overlay: NamedOverlay, packing: Packing, opening: Opening) -> Committed:
    from wdsfs.packing.overlay_commit import OverlayCommit
    from wdsfs.packing.plan import Step

    chosen, lower = packing.options, session.tree.lower
    if session.is_half_done and not chosen.in_place:
        raise overlay.unfinished()
    made = OverlayCommit(session.place, session.tree, chosen, session.mountpoint)
    plan, unshown = made.plan, None
    paths = [*(step.target for step in plan.steps), *(shard.path for shard in lower.shards if chosen.in_place)]
    output.refuse_exports(paths, packing.exports)
    if made.changes is not None and chosen.changed_only:
        kinds = Counter(sample.kind for sample in made.changes.samples)
        unshown = {kind: kinds[kind] for kind in ("removed", "renamed")}
    uneven, done = _uneven(made), list[Step]()
    _warn_of_folders(made)
    if not packing.dry_run:
        label = "packing and sending" if plan.sent else "packing"
        with bytes_bar(label, plan.length + plan.sent, opening.quiet) as on_bytes, _interrupts(made):
            done = made.write(opening, on_bytes, packing.space_check, session.show_new)
    return Committed(plan, done, uneven, lower.shards, unshown)


def _warn_of_folders(made: OverlayCommit) -> None:
    """Say before anything is written which copied folders become samples with their files as columns."""
    from wdsfs.packing import reasons

    notes = [] if made.changes is None else made.changes.notes
    folders = [remark.path for remark in notes if remark.reason == reasons.FOLDER]
    if folders:
        log.warning("%s%s: %s", os.fsdecode(folders[0]), and_others(len(folders)), reasons.FOLDER)


def _uneven(made: OverlayCommit) -> str:
    """Return a note if Hugging Face's loader would refuse the set after this commit, which changes its start."""
    from wdsfs.packing.plan import member_names

    if made.changes is None or not made.plan.steps or made.options.changed_only:  # no set of its own
        return ""
    first = made.plan.steps[0].output
    if made.options.in_place and first.target != made.lower.shards[0].path:
        return ""
    return uneven_text(first.target, member_names(first, made.lower))


@contextlib.contextmanager
def _interrupts(made: OverlayCommit) -> Iterator[None]:
    """Set, if the block is interrupted, the text that says what is there."""
    try:
        yield
    except KeyboardInterrupt:
        text = output.STOPPED
        if made.options.in_place:
            text = "; nothing was replaced, and the overlay is as it was"
        if made.is_half_way:
            text = " half-way, and the overlay cannot be used before it is finished: repeat the command"
        click.get_current_context().meta[INTERRUPTED] = text
        raise


def _abandon(session: OverlaySession, as_json: bool) -> None:
    """Give up an unfinished commit in place, and list the shards that are not written. Raises CommitError."""
    from wdsfs.packing.overlay_commit import abandon

    done, left, aside = abandon(session.place, session.tree, session.show_new)
    if as_json:
        steps = {"shards": [step.as_json() for step in done], "left": [step.as_json() for step in left]}
        write_json({**steps, "aside": None if aside is None else str(aside)})
        return
    say(f"abandoned: {len(done)} of {counted(len(done) + len(left), 'shard')} written")
    for step in left:
        say(f"not written: {os.fsdecode(step.target)}")
    if aside is None:
        say("changes that are in no shard are still in the overlay; see: wdsfs diff")
    else:
        say(f"In a merged tree wdsfs cannot know which shard a change belongs to: all changes are in {aside}")
    _say_further(done)


# --- a view --------------------------------------------------------------------------------------------------


def _commit_view(overlay: NamedOverlay, packing: Packing, composition: Composition, opening: Opening) -> Committed:
    """Write what SHARDS show with these options. Raises UsageError, CommitError, ViewError, ShardErrors."""
    from wdsfs.packing.view_source import ViewCommit
    from wdsfs.tree.opening import opened

    options.refuse_typed(_NOT_FOR_VIEWS, "the options of a view")
    _refuse_mount(overlay)
    label = "planning" if packing.dry_run else "packing"
    with (
        ended_in_order(),
        opened(overlay.sources, overlay.selection, opening, composition, whole=True) as below,
        shards_bar(label, len(below), opening.quiet) as on_shard,
        disk_errors(),
        when_interrupted(output.STOPPED),
    ):
        made = ViewCommit(below, packing.options, on_shard, jobs=opening.jobs)
        made.run(write=not packing.dry_run)
    uneven = uneven_text(made.plan.steps[0].target, made.first)
    return Committed(made.plan, made.done, uneven, strays=made.left_out)


def _refuse_mount(overlay: NamedOverlay) -> None:
    """Raise UsageError if there are no shards: a mount was named, or nothing."""
    from wdsfs import mount_registry

    if not overlay.sources:
        raise UsageError("name the SHARDS")
    if len(overlay.sources) == 1 and mount_registry.find(overlay.sources[0]) is not None:
        raise UsageError(f"{overlay.sources[0]} is a mount: name its SHARDS, with the options of the view")


# --- the report ----------------------------------------------------------------------------------------------


def _show(committed: Committed, packing: Packing, seconds: float) -> None:
    """Print the shards that are planned, or that were written, and in how many seconds."""
    plan, unshown = committed.plan, committed.unshown
    if packing.as_json:
        _show_json(committed, packing.dry_run, seconds)
        return
    if packing.dry_run:
        output.print_steps(plan.steps)
    output.say_left_out(plan)
    if not packing.dry_run and plan.steps:
        output.say_done(plan, committed.done, seconds)
        for step in plan.steps:
            if step.action == "new":
                say(f"new: {os.fsdecode(step.target)}")
    elif not packing.dry_run:
        say("the overlay changes no shard" if unshown is None else "the overlay adds and changes no sample")
    parts = [f"{count:,} {kind}" for kind, count in (unshown or {}).items() if count]
    if parts:
        say(f"these shards do not show which samples were removed or renamed: {', '.join(parts)}")
    if packing.options.in_place and not packing.dry_run:
        _say_further(plan.steps)
    if committed.strays:
        say(f"left out: {counted(committed.strays, 'member')} of the shards in no sample")


def _show_json(committed: Committed, dry_run: bool, seconds: float) -> None:
    plan, shards = committed.plan, [step.as_json() for step in committed.plan.steps]
    if dry_run:
        write_json(shards)
        return
    report = {
        "shards": shards,
        "written": len(committed.done),
        "left_out": [remark.as_json() for remark in plan.left_out],
        "seconds": round(seconds, 3),
    }
    write_json(report if committed.unshown is None else {**report, "not_told": committed.unshown})


def _say_further(steps: Sequence[Step]) -> None:
    """Say which new shards the next mount has to name."""
    new = [os.path.basename(os.fsdecode(step.target)) for step in steps if step.action == "new"]
    if new:
        shards = "this shard" if len(new) == 1 else "these shards"
        names = ", ".join(new) if len(new) <= 3 else f"{new[0]} ... {new[-1]}"
        say(f"SHARDS of the next mount must include {shards}, too: {names}")


def _export(plan: Plan, before: Sequence[Shard], packing: Packing, opening: Opening) -> bool:
    """Write the indexes that are asked for; True if any could not be written. `before` is the set as it was."""
    from wdsfs.spec.expand import expand, extended
    from wdsfs.tree.set_options import Tolerance

    targets, in_place = [step.target for step in plan.steps], packing.options.in_place
    if in_place:
        index_commands.warn_of_older([path for path in targets if not is_remote(path)], packing.exports)
    if not packing.exports or not (targets or in_place):
        return False
    # Also when nothing was written now: the commit that this one finishes may have been stopped before its export.
    new = [step.target for step in plan.steps if step.action == "new"]
    shards = extended(before, new) if in_place else expand(targets)
    return index_commands.after_commit(shards, in_place, opening._replace(tolerance=Tolerance()))
