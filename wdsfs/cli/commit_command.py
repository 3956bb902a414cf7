"""The command `commit`: writes the changes of an overlay into new shards."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from wdsfs.cli import interop_commands, output
from wdsfs.cli.opening_options import opening_options_with
from wdsfs.cli.option_kinds import (
    RARE,
    Command,
    Decorator,
    dry_run_option,
    flag,
    gather_options,
    group_in_section,
    json_option,
    leave_out_option,
    offer_paths,
    space_check_option,
)
from wdsfs.cli.output import bytes_bar, note_uneven, say, write_json
from wdsfs.cli.overlay_commands import NamedOverlay, named_overlay
from wdsfs.cli.process import INTERRUPTED, disk_errors, ended_in_order
from wdsfs.door.urls import is_remote
from wdsfs.errors import ExportError, MountError, UsageError, and_others, counted

if TYPE_CHECKING:
    from wdsfs.mount.overlay_session import OverlaySession
    from wdsfs.packing.overlay_commit import CommitOptions, OverlayCommit
    from wdsfs.packing.plan import Plan, Step
    from wdsfs.shards import Shard
    from wdsfs.tree.set_options import Opening, Tolerance

log = logging.getLogger("wdsfs")


class Packing(NamedTuple):
    """The options of `commit`. The plan depends on `options`, the rest concerns this command only."""

    options: CommitOptions
    abandon: bool
    exports: tuple[str, ...]
    space_check: bool
    dry_run: bool
    as_json: bool

    def check(self, tolerance: Tolerance) -> Packing:
        """Return the same with the tolerance. Raises UsageError for options that cannot be combined."""
        from wdsfs.packing.overlay_commit import CommitOptions

        chosen = dataclasses.replace(self.options, allow_missing=tolerance.allow_missing)
        if self.abandon and (chosen != CommitOptions() or self.exports or self.dry_run):
            raise UsageError(
                "--abandon gives up an unfinished commit and writes nothing: leave out the other options"
            )
        return self._replace(options=chosen if self.abandon else chosen.check())


def _packing(
    abandon: bool, exports: tuple[str, ...], space_check: bool, dry_run: bool, as_json: bool, **given: Any
) -> Packing:
    from wdsfs.packing.overlay_commit import CommitOptions

    return Packing(CommitOptions(**given), abandon, exports, space_check, dry_run, as_json)


_RARE: dict[str, Decorator[Any]] = {
    "abandon": flag(
        "--abandon",
        "Give up a commit in place that was stopped half-way: replaced shards stay replaced, the other changes "
        "stay in the overlay.",
    ),
    "link": flag("--link", "Hard-link unchanged shards instead of copying them. (This changes their ctime.)"),
    "leave_out": leave_out_option,
    "with_leavings": flag("--with-leavings", "Also pack leftovers of programs (`.cls.swp`, `cls~`, `.DS_Store`)."),
    "ignore_times": flag("--ignore-times", "Ignore files of which only the time has changed."),
    "exports": interop_commands.export_option,
    "space_check": space_check_option(
        "Write in place even if the file system seems too full: it may have reflinks or compression."
    ),
}
packing_options = gather_options(
    "packing",
    _packing,
    {
        "output": click.option(
            "-o",
            "--output",
            metavar="PATTERN",
            shell_complete=offer_paths,
            help="Names of the new shards: 'out/train-%06d.tar' or braces; also 's3://...', gs, az, ais.",
        ),
        "in_place": flag(
            "--in-place", "Replace the changed shards, and remove the packed changes from the overlay."
        ),
        "dry_run": dry_run_option,
        "as_json": json_option,
        **group_in_section(RARE, _RARE),
    },
)


# --- errors for options of `pack` -------------------------------------------------------------------------------

_OF_PACK = {
    *("--columns", "--field", "--join", "--associate", "--keys", "--missing", "--duplicates", "--ignore-case"),
    *("--maxcount", "--maxsize", "--sort"),
}
_PACK = "wdsfs pack{} -o PATTERN SHARDS"


class _Command(Command):
    """The command `commit`, with errors for options that only `pack` has: they name the command to type."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        typed = set() if ctx.resilient_parsing else {word.partition("=")[0] for word in args}  # else a completion
        for option in sorted(_OF_PACK & typed):
            way_out = f"commit without it, then pack the new shards: {_PACK.format(f' {option} ...')}"
            raise UsageError(f"commit: {option} is an option of pack: {way_out}")
        return super().parse_args(ctx, args)


def _refuse_without_overlay(overlay: NamedOverlay) -> None:
    """Raise UsageError or MountError for SHARDS without an overlay: there are no changes to write."""
    from wdsfs import mount_registry

    sources = overlay.sources
    if overlay.overlay is not None or any(
        os.path.isdir(source) or mount_registry.find_registration(source) for source in sources
    ):
        return
    text = "commit writes the changes of an overlay: name one MOUNTPOINT, or name --overlay DIR and its SHARDS"
    if sources:
        text += f"; to make new shards of SHARDS alone type: {_PACK.format('')}"
    raise MountError(text) if len(sources) == 1 else UsageError(text)


# --- the command ---------------------------------------------------------------------------------------------


@click.command(cls=_Command)
@named_overlay
@packing_options
@opening_options_with("Number of processes that index shards, and of shards written at a time.", executor=True)
def commit(overlay: NamedOverlay, packing: Packing, opening: Opening) -> None:
    """Write the changes of a writable mount, or with --overlay DIR the changes to SHARDS, into new shards.

    The source shards stay unchanged, unless you type --in-place. To finish a stopped commit, repeat the command.

    \b
    Examples:
      wdsfs commit /mnt/train -o 'new/train-%06d.tar'
      wdsfs commit /mnt/train --in-place
      wdsfs commit --overlay edits -o 'new/train-%06d.tar' 'train-{000000..000999}.tar'
    \f

    During the commit of a mount, writers get EBUSY and readers continue. After --in-place the mount shows the new
    shards; a file that is still open from a replaced shard gives ESTALE.

    \b
    More examples:
      wdsfs commit --overlay edits --in-place 'train-{000000..000999}.tar'
      wdsfs commit --overlay edits -o 's3://bucket/new/train-%06d.tar' 'train-{000000..000999}.tar'
    """
    since = time.monotonic()
    _refuse_without_overlay(overlay)
    packing = packing.check(opening.tolerance)
    code, committed = _commit_overlay(overlay, packing, opening)
    if committed is not None:
        _report_commit(committed, packing, time.monotonic() - since)
        note_uneven(committed.uneven, opening.quiet)
        if not packing.dry_run and _export(committed.plan, committed.before, packing, opening):
            code = code or ExportError.exit_code
    if code:
        sys.exit(code)


class Committed(NamedTuple):
    """A planned or finished commit: its plan, the steps that this command did, and a note about the new set.

    `before` is the set before the commit.
    """

    plan: Plan
    done: Sequence[Step]
    uneven: str
    before: Sequence[Shard]


def _commit_overlay(overlay: NamedOverlay, packing: Packing, opening: Opening) -> tuple[int, Committed | None]:
    """Commit the overlay, or abandon its commit (None). Return the exit code and the commit.

    Raises CommitError, ShardErrors.
    """
    chosen = packing.options
    whole = not (chosen.in_place or packing.abandon)
    opened = overlay.open_session(opening, freeze=not packing.dry_run, whole=whole)
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
    plan = made.plan
    paths = [*(step.target for step in plan.steps), *(shard.path for shard in lower.shards if chosen.in_place)]
    output.refuse_exports(paths, packing.exports)
    uneven, done = _uneven(made), list[Step]()
    _warn_of_folders(made)
    if not packing.dry_run:
        label = "packing and sending" if plan.sent else "packing"
        with bytes_bar(label, plan.length + plan.sent, opening.quiet) as on_bytes, _interrupts(made):
            done = made.write(opening, on_bytes, session.show_new, space_check=packing.space_check)
    return Committed(plan, done, uneven, lower.shards)


def _warn_of_folders(made: OverlayCommit) -> None:
    """Warn, before the first write, of copied folders that become samples with their files as columns."""
    from wdsfs.packing import reasons

    notes = [] if made.changes is None else made.changes.notes
    folders = [remark.path for remark in notes if remark.reason == reasons.FOLDER]
    if folders:
        log.warning("%s%s: %s", os.fsdecode(folders[0]), and_others(len(folders)), reasons.FOLDER)


def _uneven(made: OverlayCommit) -> str:
    """Return a note if Hugging Face's loader would refuse the set because of the start of the first shard."""
    from wdsfs.packing.plan import planned_members

    if made.changes is None or not made.plan.steps:
        return ""
    first = made.plan.steps[0].output
    if made.options.in_place and first.target != made.lower.shards[0].path:
        return ""
    return interop_commands.uneven_text(first.target, planned_members(first, made.lower))


@contextlib.contextmanager
def _interrupts(made: OverlayCommit) -> Iterator[None]:
    """Set the text for an interrupt of the block: the state of the shards and the overlay."""
    try:
        yield
    except KeyboardInterrupt:
        text = output.STOPPED
        if made.options.in_place:
            text = "; no shard was replaced, and the overlay is unchanged"
        if made.is_half_way:
            text = " half-way: repeat the command to finish the commit; until then the overlay cannot be used"
        click.get_current_context().meta[INTERRUPTED] = text
        raise


def _abandon(session: OverlaySession, as_json: bool) -> None:
    """Give up an unfinished commit in place, and list the unwritten shards. Raises CommitError."""
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
        say("the overlay still has the other changes; see: wdsfs diff")
    else:
        say(f"In a merged tree wdsfs does not know the shard of a change: all changes are in {aside}")
    _say_further(done)


# --- the report ----------------------------------------------------------------------------------------------


def _report_commit(committed: Committed, packing: Packing, seconds: float) -> None:
    """Print the planned or written shards, and the time."""
    plan = committed.plan
    if packing.as_json:
        shards, left_out = ([row.as_json() for row in rows] for rows in (plan.steps, plan.left_out))
        done = {"written": len(committed.done), "left_out": left_out, "seconds": round(seconds, 3)}
        write_json(shards if packing.dry_run else {"shards": shards, **done})
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
        say("the overlay changes no shard")
    if packing.options.in_place and not packing.dry_run:
        _say_further(plan.steps)


def _say_further(steps: Sequence[Step]) -> None:
    """Name the new shards that the next mount must include."""
    new = [os.path.basename(os.fsdecode(step.target)) for step in steps if step.action == "new"]
    if new:
        shards = "this shard" if len(new) == 1 else "these shards"
        names = ", ".join(new) if len(new) <= 3 else f"{new[0]} ... {new[-1]}"
        say(f"the next mount must also name {shards}: {names}")


def _export(plan: Plan, before: Sequence[Shard], packing: Packing, opening: Opening) -> bool:
    """Write the indexes of --export; return True if one failed. `before` is the set before the commit."""
    from wdsfs.spec.expand import expand, extended
    from wdsfs.tree.set_options import Tolerance

    targets, in_place = [step.target for step in plan.steps], packing.options.in_place
    if in_place:
        interop_commands.warn_of_older([path for path in targets if not is_remote(path)], packing.exports)
    if not packing.exports or not (targets or in_place):
        return False
    # Even if this command wrote no shard: the commit that it finishes may have stopped before its export.
    new = [step.target for step in plan.steps if step.action == "new"]
    shards = extended(before, new) if in_place else expand(targets)
    return interop_commands.after_commit(shards, in_place, opening._replace(tolerance=Tolerance()))
