"""The commands that turn an overlay into shards: `diff` and `commit`.

Both take a mount point, or a directory with an overlay and the shards that it is over. As in `cli/main.py`, each
imports what it works with when it is called. What an overlay changes is `commit/diff.py`, what is written
`commit/plan.py` and `commit/replace_in_place.py`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from wdsfs.cli import export_commands
from wdsfs.cli.console import (
    INTERRUPTED,
    Opening,
    ended_in_order,
    index_options,
    index_options_with,
    jobs_of,
    json_option,
    opened_set,
    set_options,
    soundness_options,
    tell_all,
    view_of,
    view_options,
)
from wdsfs.cli.output import bytes_text, print_table, say, table_of
from wdsfs.errors import (
    CommitError,
    ExportError,
    MissingShard,
    MountError,
    OverlayBusy,
    OverlayUnusable,
    UsageError,
    counted,
    several,
)

if TYPE_CHECKING:
    from wdsfs.commit.changes import ChangedSample, Changes, Remark, Rules
    from wdsfs.commit.run import Files, Runner
    from wdsfs.commit.steps import Plan, Step
    from wdsfs.dataset.shard_access import Access
    from wdsfs.dataset.shard_set import ShardSet
    from wdsfs.dataset.tree import LowerTree
    from wdsfs.interop.soundness import Tolerance
    from wdsfs.overlay.overlay_directory import OverlayDirectory, OverlaySettings
    from wdsfs.overlay.upper_format import UpperNode
    from wdsfs.spec.expand import Selection, Shard
    from wdsfs.status.control import Daemon, Talk

log = logging.getLogger("wdsfs")

FREEZE_SECONDS, RENEW_SECONDS = 60.0, 60.0  # how long a daemon may take to do what it is asked for

sources_argument = click.argument("sources", metavar="MOUNTPOINT|SHARDS...", nargs=-1, required=True)
overlay_option = click.option(
    "--overlay",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False),
    help="The directory with the changes: of a writable mount, or the upperdir of the kernel's overlayfs.",
)


class Wanted(NamedTuple):
    """What the user names: a mount point, or shards and which of them."""

    sources: Sequence[str]
    selection: Selection


@dataclass(slots=True)
class OverlaySession:
    """An overlay over its set, which nobody else changes. `directory` is a descriptor of its upper, None if it has
    none; `talk` is with the daemon of the mount, if it is mounted, at `mountpoint`."""

    place: OverlayDirectory
    tree: LowerTree
    directory: int | None
    talk: Talk | None = None
    mountpoint: str | None = None

    def changes(self, rules: Rules | None = None) -> Changes:
        from wdsfs.commit import changes, diff
        from wdsfs.overlay import upper_format

        directory = -1 if self.directory is None else self.directory

        def open_file(node: UpperNode) -> int:
            return upper_format.open_below(directory, node)

        # Also where nothing is changed yet: there is something to say of shards that other tools read otherwise.
        upper = upper_format.empty() if self.directory is None else upper_format.load(directory)
        return diff.find(self.tree, upper, open_file, rules or changes.Rules())

    def files(self) -> Files:
        from wdsfs.commit.run import Files

        return Files(-1 if self.directory is None else self.directory)

    def refuse_inside(self, plan: Plan) -> None:
        """Raise UsageError for new shards that would come to lie in the overlay, or in the mount of it."""
        from wdsfs.commit.output_names import refuse_below

        refuse_below(plan, str(self.place.path), "the directory of the overlay")
        if self.mountpoint is not None:
            refuse_below(plan, self.mountpoint, "the mount that is committed")

    def note_outputs(self, plan: Plan, changes: Changes, pattern: str, done: bool) -> None:
        """Keep in mind which shards have the changes of the overlay, so that it is not used over them."""
        from wdsfs.overlay.overlay_directory import Written, add_outputs, sample_of

        written = []
        for step in plan.steps:
            if step.number in changes.shards or (step.number is None and (changes.shards or changes.further)):
                path = os.path.realpath(step.output.target)
                mtime_ns = os.stat(path).st_mtime_ns if done else 0
                sample = sample_of(path, step.output.first_change) if done else None
                written.append(Written(path, step.output.length, mtime_ns, pattern, sample))
        try:
            if written:
                add_outputs(self.place, written)
        except OSError as error:  # an overlay on a read-only disk can be committed, too
            text = "%s cannot be written (%s): nothing will stop this overlay from being used over the new shards"
            log.warning(text, self.place.outputs, error.strerror)

    def tell(self, new: Sequence[bytes], published: Sequence[bytes]) -> None:
        """Have the mount, if it is one, show what is there now: `new` shards, and `published` ones as replaced."""
        if self.talk is not None:
            paths = {"new": new, "published": published}
            try:
                question = {key: [os.fsdecode(path) for path in some] for key, some in paths.items()}
                self.talk.ask(question, RENEW_SECONDS)
            except (OSError, ValueError) as error:  # nobody is there to be told; the shards are as they are
                log.warning("the daemon of the mount has not answered (%s); mount it again", error)


@contextlib.contextmanager
def _session(
    overlay: str | None, wanted: Wanted, view: dict[str, Any], opening: Opening, freeze: bool, whole: bool = False
) -> Iterator[OverlaySession]:
    """The overlay of a mount, or one that is not mounted. `whole` says that all shards of the set are needed."""
    if overlay is None and len(wanted.sources) != 1:
        raise UsageError("name one MOUNTPOINT, or --overlay DIR and the SHARDS below it")
    if overlay is None and wanted.selection.arguments:
        raise UsageError(f"{wanted.selection.arguments[0]} is for SHARDS; a mount knows which it shows")
    with (
        mounted(wanted.sources[0], view, opening, freeze, whole)
        if overlay is None
        else _held(overlay, wanted, view, opening, whole) as one
    ):
        yield one


@contextlib.contextmanager
def _held(
    overlay: str, wanted: Wanted, view: dict[str, Any], opening: Opening, whole: bool
) -> Iterator[OverlaySession]:
    """Hold the overlay and open the set below it, shown as it was when the overlay was made."""
    from pathlib import Path

    from wdsfs.overlay.overlay_directory import (
        OverlayDirectory,
        clean,
        held,
        read_settings,
        refuse_outputs,
        unfinished,
    )
    from wdsfs.spec.expand import expand, refuse_left_out

    place = OverlayDirectory(Path(os.path.abspath(overlay)))
    settings, selection = read_settings(place), wanted.selection
    if settings is not None:
        _agree(settings, view, selection)
        selection = selection._replace(reading=settings.reading)
    with contextlib.ExitStack() as stack:
        stack.enter_context(held(place))
        selection = selection._replace(allow_missing=opening.tolerance.allow_missing)
        try:
            shards = expand(wanted.sources, *selection)
        except MissingShard as error:
            if not unfinished(place):
                raise
            text = (
                "a commit of this overlay was stopped half-way: put the shard back, or an empty file in its place"
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


@contextlib.contextmanager
def mounted(
    mountpoint: str, view: dict[str, Any], opening: Opening, freeze: bool, whole: bool = False
) -> Iterator[OverlaySession]:
    """The overlay of a mount; with `freeze` nobody changes anything in it for the time."""
    from pathlib import Path

    from wdsfs.dataset.shard_access import access_from_json
    from wdsfs.overlay.overlay_directory import OverlayDirectory, refuse_outputs, unfinished
    from wdsfs.reading import Reading
    from wdsfs.spec.expand import Shard
    from wdsfs.status import control

    daemon, directory = daemon_of(mountpoint)
    view.update(layout=daemon.layout, names=daemon.names, merge=daemon.merge)
    opening = replace(opening, index_dir=opening.index_dir or daemon.index)
    tell_all("WDSFS_INDEX_DIR", opening.index_dir)
    with contextlib.ExitStack() as stack:
        if freeze:
            _sync(mountpoint)
        try:
            talk = stack.enter_context(control.Talk(daemon))
            answer = talk.ask({"do": "freeze" if freeze else "shards"}, FREEZE_SECONDS)
        except (OSError, ValueError) as error:
            raise silent(mountpoint, error) from None
        if "error" in answer:
            raise OverlayBusy(answer["error"])
        reading = Reading(**answer.get("reading", {}))
        shards = [Shard(os.fsencode(path), os.fsencode(name), reading=reading) for name, path in answer["shards"]]
        place = OverlayDirectory(Path(directory))
        if not unfinished(place):
            refuse_outputs(place, [shard.path for shard in shards])
        # What the mount refuses to show, its user must not copy into shards, or write to, either.
        access = access_from_json(answer.get("seen"))
        tree = stack.enter_context(tree_below(place, shards, view, opening, whole, access))
        upper = stack.enter_context(upper_of(place))
        yield OverlaySession(place, tree, upper, talk if freeze else None, mountpoint)


@contextlib.contextmanager
def tree_below(
    place: OverlayDirectory,
    shards: Sequence[Shard],
    view: dict[str, Any],
    opening: Opening,
    whole: bool = False,
    access: Access | None = None,
) -> Iterator[LowerTree]:
    """The tree below an overlay. Says which of its shards have changed since the overlay was made."""
    from wdsfs.dataset.merged_tree import make_tree
    from wdsfs.overlay.overlay_directory import read_settings

    settings = read_settings(place)
    with _opened(shards, view, opening, whole, access) as below:
        if settings is not None:
            _warn_of_changed(place, settings, below)
        yield make_tree(below, view_of(view["layout"], view["names"]), view["merge"])


def daemon_of(mountpoint: str) -> tuple[Daemon, str]:
    """The daemon of a mount, and the directory of its overlay. Raises MountError when it has none."""
    from wdsfs.status import control

    daemon = control.find(mountpoint)
    if daemon is None:
        raise MountError(
            f"{mountpoint}: no mount of wdsfs is there; for one that is not mounted name --overlay DIR"
        )
    if daemon.overlay is None:
        raise MountError(f"{mountpoint}: that mount has no overlay, so nothing in it was changed")
    return daemon, daemon.overlay


def silent(mountpoint: str, error: Exception) -> MountError:
    again = f"end it with `wdsfs umount {shlex.quote(mountpoint)}`, and mount it again"
    return MountError(f"{mountpoint}: its daemon does not answer ({error}); {again}")


def _sync(mountpoint: str) -> None:
    """Have what programs have changed in mapped files written to the overlay. Raises CommitError."""
    from wdsfs.overlay.system_calls import sync_filesystem

    try:
        sync_filesystem(mountpoint)
    except OSError as error:
        # The kernel says this once, whichever file it is of; what it could not write is dropped.
        why = "its shard was replaced meanwhile" if error.errno == errno.ESTALE else error.strerror
        raise CommitError(
            f"{mountpoint}: something that a program has changed in a mapped file could not be written ({why}), "
            "so nothing was committed; the log (see `wdsfs status`) says more. Make the change again if it is "
            "needed, then repeat the command"
        ) from None


def _opened(
    shards: Sequence[Shard],
    view: dict[str, Any],
    opening: Opening,
    whole: bool,
    access: Access | None = None,
) -> contextlib.AbstractContextManager[ShardSet]:
    """The set below an overlay. What cannot be read stays in it: changes of it are no new samples."""
    if view["merge"] and opening.tolerance.allow_missing:
        raise UsageError(
            "--allow-missing is not for an overlay with --merge: nobody could say whether a sample is new, or "
            "belongs to one that cannot be read"
        )
    whole = (whole or view["merge"]) and not opening.tolerance.allow_missing
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


def _agree(settings: OverlaySettings, view: dict[str, Any], selection: Selection) -> None:
    """Take the options of the view from the overlay where the user gave none. Raises UsageError for others."""
    context = click.get_current_context()
    made = {"layout": settings.layout, "names": settings.names, "merge": settings.merge}
    given = {**view, **selection.reading._asdict()}
    for name, value in {**made, **settings.reading._asdict()}.items():
        typed = context.get_parameter_source(name) not in (ParameterSource.DEFAULT, None)
        if typed and given[name] != value:
            raise UsageError(f"the overlay was made with {' '.join(settings.options)}: use these options, or none")
    view.update(made)


def _warn_of_changed(place: OverlayDirectory, settings: OverlaySettings, below: ShardSet) -> None:
    """Say which shards are not what they were when the overlay was made. Raises OverlayUnusable."""
    from wdsfs.overlay.overlay_directory import unfinished

    changed = _compare(settings, {shard.name: shard.path for shard in below.shards})
    if changed and not unfinished(place):  # else it is the commit that has changed them
        text = "%s: changed since the overlay was made; the changes apply to the current contents"
        log.warning(text, several(changed))


def _compare(settings: OverlaySettings, shards: dict[bytes, bytes]) -> list[str]:
    """See that the set is the one below the overlay; returns what has changed. Raises OverlayUnusable."""
    from wdsfs.errors import ShardError
    from wdsfs.storage.identity import look

    missing = [os.fsdecode(one.name) for one in settings.shards if one.name not in shards]
    if missing:
        raise OverlayUnusable(f"the overlay was made over a set with {several(missing)}: name the same SHARDS")
    changed = []
    for one in settings.shards:
        with contextlib.suppress(ShardError):  # whoever needs it will hear of it
            if look(shards[one.name]) != one.fingerprint:
                changed.append(os.fsdecode(shards[one.name]))
    return changed


def _unfinished_advice(overlay: str | None, wanted: Wanted) -> CommitError:
    which = ["--overlay", overlay] if overlay is not None else []
    command = shlex.join(["wdsfs", "commit", "--in-place", *which, *wanted.selection.arguments, *wanted.sources])
    return CommitError(
        f"a commit of this overlay was stopped half-way; finish it with: {command} (or end it as it is: use "
        "--abandon instead of --in-place)"
    )


# --- diff --------------------------------------------------------------------------------------------------


@click.command()
@sources_argument
@set_options
@overlay_option
@view_options
@json_option
@index_options
def diff(
    sources: tuple[str, ...],
    selection: Selection,
    overlay: str | None,
    layout: str,
    names: str,
    merge: bool,
    as_json: bool,
    index_dir: str | None,
    jobs: int | None,
    quiet: bool,
) -> None:
    """Show what was changed in a writable mount, or with --overlay DIR in SHARDS: samples added, changed, removed
    and renamed.

    After a changed sample stand its extensions: +added ~changed -removed =same content with another time ("time
    only" if that is all). What cannot be packed is listed with the reason, and so are conflicts, which stand in
    the way of every commit, with --leave-out, too. The exit code is 1 then. What programs leave behind
    (`.cls.swp`, `cls~`, `.DS_Store`) is listed apart, and no commit packs it without --with-leavings.

    \b
    Examples:
      wdsfs diff /mnt/train
      wdsfs diff --overlay edits 'train-{000000..000999}.tar'
    """
    from wdsfs.overlay.overlay_directory import unfinished

    wanted = Wanted(sources, selection)
    view = {"layout": layout, "names": names, "merge": merge}
    opening = Opening(index_dir, jobs, quiet)
    with _session(overlay, wanted, view, opening, freeze=False) as session:
        if unfinished(session.place):
            raise _unfinished_advice(overlay, wanted)
        found = session.changes()
    if as_json:
        click.echo(json.dumps(_report(found)))
    else:
        for sample in [*found.samples, *found.others]:
            say(_line(sample))
        remarks = {
            "conflict": found.conflicts,
            "cannot be packed": found.unpackable,
            "left behind": found.leavings,
            "note": found.notes,
        }
        for word, some in remarks.items():
            for one in some:
                say(f"{word}: {os.fsdecode(one.path)}: {one.reason}")
    counts = Counter(sample.kind for sample in found.samples)
    told = [f"{counts[kind]:,} {kind}" for kind in ("added", "changed", "renamed", "removed")]
    told += [f"{counts[kind]:,} {kind}" for kind in ("time only",) if counts[kind]]
    files = [f"{len(found.unpackable):,} cannot be packed"]
    files += [counted(len(found.conflicts), "conflict")] if found.conflicts else []
    files += [f"{len(found.leavings):,} left behind by programs"] if found.leavings else []
    click.echo(f"samples: {', '.join(told)}; {', '.join(files)}", err=True)
    sys.exit(1 if found.unpackable or found.conflicts else 0)


def _line(sample: ChangedSample) -> str:
    path = os.fsdecode(sample.path)
    if sample.was:
        path = f"{os.fsdecode(sample.was)} -> {path}"
    columns = [("+", sample.added), ("~", sample.changed), ("-", sample.removed), ("=", sample.times)]
    shown = [mark + os.fsdecode(one) for mark, some in columns for one in some]
    # Of a sample that comes or goes as a whole its extensions say nothing new.
    whole = sample.kind in ("added", "removed")
    return " ".join([f"{sample.kind:<8}", path, *(() if whole else shown)])


def _report(found: Changes) -> dict[str, Any]:
    def row(sample: ChangedSample) -> dict[str, Any]:
        columns = {name: _texts(getattr(sample, name)) for name in ("added", "changed", "removed", "times")}
        return {"kind": sample.kind, "path": _text(sample.path), "was": _text(sample.was) or None, **columns}

    remarks = {
        "conflicts": found.conflicts,
        "unpackable": found.unpackable,
        "leavings": found.leavings,
        "notes": found.notes,
    }
    return {
        "samples": [row(sample) for sample in found.samples],
        "others": [row(sample) for sample in found.others],
        **{key: _remarks(rows) for key, rows in remarks.items()},
    }


def _remarks(rows: Sequence[Remark]) -> list[dict[str, str]]:
    return [{"path": _text(one.path), "reason": one.reason} for one in rows]


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _texts(names: Sequence[bytes]) -> list[str]:
    return [_text(name) for name in names]


# --- commit ------------------------------------------------------------------------------------------------


@click.command()
@sources_argument
@set_options
@overlay_option
@view_options
@click.option("-o", "--output", metavar="PATTERN", help="Names of the new shards: 'out/train-%06d.tar' or braces.")
@click.option("--maxcount", type=click.IntRange(1), help="Samples in a new shard; samples are split up anew.")
@click.option(
    "--maxsize", type=click.FloatRange(1), metavar="BYTES", help="The same for bytes of content, for example 3e9."
)
@click.option(
    "--changed-only", is_flag=True, help="Only new and changed samples, whole, into shards of their own."
)
@click.option(
    "--in-place",
    is_flag=True,
    help="Replace the shards that change, and empty the overlay, but for what is left out.",
)
@click.option(
    "--abandon",
    is_flag=True,
    help="End a commit in place that was stopped half-way as it is: what is not replaced stays in the overlay.",
)
@click.option("--link", is_flag=True, help="Hard-link shards without changes. (That changes their ctime.)")
@click.option("--copy", is_flag=True, help="Copy shards without changes.  [default]")
@click.option("--sort", is_flag=True, help="Sort the samples of each shard by key.")
@click.option("--leave-out", is_flag=True, help="Go ahead without the files that cannot be packed.")
@click.option(
    "--with-leavings",
    is_flag=True,
    help="Also pack what programs have left behind (`.cls.swp`, `cls~`, `.DS_Store`).",
)
@click.option(
    "--ignore-times", is_flag=True, help="Files of which only the time has changed stay as they are in the shards."
)
@click.option(
    "--export",
    "exports",
    type=export_commands.FORMATS,
    multiple=True,
    help="Also write the index that this tool reads, beside the new shards; repeatable.",
)
@click.option(
    "--no-space-check",
    "space_check",
    is_flag=True,
    default=True,
    flag_value=False,
    help="Go ahead in place where the file system seems too full: it may have reflinks or compression.",
)
@click.option("-n", "--dry-run", is_flag=True, help="Only show which shards would be written.")
@json_option
@soundness_options
@index_options_with("Processes that index shards, and shards that are written at a time.")
def commit(
    sources: tuple[str, ...],
    selection: Selection,
    overlay: str | None,
    layout: str,
    names: str,
    merge: bool,
    output: str | None,
    maxcount: int | None,
    maxsize: float | None,
    changed_only: bool,
    in_place: bool,
    abandon: bool,
    link: bool,
    copy: bool,
    sort: bool,
    leave_out: bool,
    with_leavings: bool,
    ignore_times: bool,
    exports: tuple[str, ...],
    space_check: bool,
    dry_run: bool,
    as_json: bool,
    index_dir: str | None,
    jobs: int | None,
    quiet: bool,
    tolerance: Tolerance,
) -> None:
    """Pack the changes of a writable mount, or with --overlay DIR those to SHARDS, into new shards.

    The sources stay as they are, unless --in-place is given. A commit that was stopped goes on when it is
    repeated. While a mount is committed who writes to it gets EBUSY, and who reads goes on; after --in-place it
    shows the new shards, and what is still open from a shard that was replaced gets ESTALE.

    \b
    Examples:
      wdsfs commit /mnt/train -o 'new/train-%06d.tar'
      wdsfs commit /mnt/train --in-place
      wdsfs commit --overlay edits -o 'new/train-%06d.tar' 'train-{000000..000999}.tar'
      wdsfs commit --overlay edits --in-place 'train-{000000..000999}.tar'
      wdsfs commit --overlay edits --changed-only -o 'delta-%06d.tar' 'train-*.tar'
    """
    from wdsfs.commit.commit_journal import read_plan
    from wdsfs.commit.plan import CommitOptions, Planner
    from wdsfs.commit.replace_in_place import Replacement
    from wdsfs.commit.run import Runner
    from wdsfs.overlay.overlay_directory import unfinished
    from wdsfs.spec.expand import expand, extended

    since = time.monotonic()
    options = CommitOptions(
        *(output, maxcount, maxsize, changed_only, in_place, link, sort),
        *(leave_out, with_leavings, ignore_times),
        allow_missing=tolerance.allow_missing,
    )
    if abandon and (options != CommitOptions() or copy or exports or dry_run):
        raise UsageError("--abandon only ends what was begun: it takes no option that says what to write")
    if not abandon:
        _check(options, copy)
    wanted = Wanted(sources, selection)
    view = {"layout": layout, "names": names, "merge": merge}
    opening = Opening(index_dir, jobs, quiet, tolerance)
    writes_all = not (in_place or changed_only or abandon)
    session_of = _session(overlay, wanted, view, opening, freeze=not dry_run, whole=writes_all)
    with ended_in_order(), session_of as session:
        below = session.tree.lower
        begun = unfinished(session.place)
        if abandon:
            _abandon(session, begun, as_json)
            return
        if begun and not in_place:
            raise _unfinished_advice(overlay, wanted)
        found = None if begun else session.changes(options.rules)
        plan = read_plan(session.place, below) if found is None else Planner(below, found, options).make()
        untold = _untold(found) if found is not None and changed_only else None
        session.refuse_inside(plan)
        if dry_run:
            _show_plan(plan, untold, as_json)
            return
        new = [step.output.target for step in plan.steps if step.action == "new"]
        with _bar(plan, quiet) as on_bytes:
            runner = Runner(below, plan, session.files(), jobs_of(jobs), on_bytes=on_bytes)
            if in_place:
                replacement = Replacement(session.place, runner, session.tell, space_check)
                with _disk_errors():
                    done = _run(runner, replacement, begun)
            else:
                assert found is not None
                assert output is not None
                session.note_outputs(plan, found, output, done=False)
                with _disk_errors():
                    done = _run(runner, None, begun)
                session.note_outputs(plan, found, output, done=True)
        below_shards = below.shards
    _show_done(plan, done, untold, time.monotonic() - since, as_json)
    if in_place and not as_json:
        _show_further(plan.steps)
    targets = [step.output.target for step in plan.steps]
    if in_place:
        export_commands.warn_of_older(targets, exports)
    if exports and (targets or in_place):
        # Whatever was written now: the commit that this one finishes may have been stopped in front of it.
        shards = extended(below_shards, new) if in_place else expand(targets)
        failures = export_commands.after_commit(shards, exports, in_place, Opening(index_dir, jobs, quiet))
        sys.exit(ExportError.exit_code if failures else 0)


def _abandon(session: OverlaySession, begun: bool, as_json: bool) -> None:
    """End a commit in place as it is, and tell what is in the shards and what is not. Raises CommitError."""
    from wdsfs.commit.commit_journal import read_plan
    from wdsfs.commit.replace_in_place import Replacement
    from wdsfs.commit.run import Runner

    if not begun:
        raise CommitError("no commit in place of this overlay was stopped half-way, so there is none to abandon")
    below = session.tree.lower
    runner = Runner(below, read_plan(session.place, below), session.files())
    with _disk_errors():
        done, aside = Replacement(session.place, runner, session.tell).abandon(session.tree.merged)
    left = [step for step in runner.plan.steps if step not in done]
    if as_json:
        report = {"shards": _rows(done), "left": _rows(left), "aside": None if aside is None else str(aside)}
        click.echo(json.dumps(report))
        return
    click.echo(f"abandoned: {len(done)} of {counted(len(runner.plan.steps), 'shard')} written")
    for step in left:
        say(f"not written: {os.fsdecode(step.output.target)}")
    if aside is None:
        click.echo("what is in no shard is still in the overlay; see: wdsfs diff")
    else:
        click.echo(
            f"In a merged tree wdsfs cannot know which shard a change belongs to: all changes are in {aside}"
        )
    _show_further(done)


def _check(options: Any, copy: bool) -> None:
    """Refuse options that do not go together, and names that no shard can have. Raises UsageError."""
    from wdsfs.commit.output_names import check_output

    clashes = [
        (options.link and copy, "--link and --copy exclude each other"),
        (options.in_place and options.changed_only, "--in-place and --changed-only exclude each other"),
        (options.in_place and options.link, "--in-place leaves shards without changes alone; there is no --link"),
        (options.in_place and options.leave_out, "--in-place packs all changes, so there is no --leave-out"),
        (options.changed_only and options.link, "--changed-only writes no shard without changes to --link"),
        (options.link and (options.sort or options.resplits), "--link is for shards that stay as they are"),
        (not options.in_place and options.output is None, "name the new shards with --output, or use --in-place"),
    ]
    for wrong, text in clashes:
        if wrong:
            raise UsageError(text)
    if options.output is not None:
        check_output(options.output)


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """Raise CommitError for what a disk says."""
    try:
        yield
    except OSError as error:
        where = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        raise CommitError(f"{where}{error.strerror}; repeat the command when there is a remedy") from None


def _run(runner: Runner, replacement: Any, begun: bool) -> list[Step]:
    """Do what is planned. Raises what the runner raises, and OSErrors."""
    try:
        if replacement is None:
            return runner.write()
        if not runner.plan.steps:
            return []
        if not begun:
            replacement.begin()
        done: list[Step] = replacement.finish()
        return done
    except KeyboardInterrupt:
        half = replacement is not None and replacement.journal.exists()
        click.get_current_context().meta[INTERRUPTED] = (
            " half-way, and the overlay cannot be used before it is finished: repeat the command"
            if half
            else "; what is finished is kept, and the same command goes on from there"
            if replacement is None
            else "; nothing was replaced, and the overlay is as it was"
        )
        raise


@contextlib.contextmanager
def _bar(plan: Plan, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar over the bytes of a plan, when somebody watches."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("packing"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task("packing", total=plan.length)
        yield lambda count: progress.advance(task, count)


def _rows(steps: Sequence[Step]) -> list[dict[str, Any]]:
    return [
        {
            "shard": _text(step.output.target),
            "action": step.action,
            "samples": step.samples,
            "bytes": step.output.length,
        }
        for step in steps
    ]


def _untold(found: Changes) -> dict[str, int]:
    """How many samples of the set are gone, without a trace in shards that only have what is new or changed."""
    kinds = Counter(sample.kind for sample in found.samples)
    return {kind: kinds[kind] for kind in ("removed", "renamed")}


def _show_untold(untold: dict[str, int] | None) -> None:
    told = [f"{count:,} {kind}" for kind, count in (untold or {}).items() if count]
    if told:
        click.echo(f"these shards do not tell which samples are gone under their old names: {', '.join(told)}")


def _show_plan(plan: Plan, untold: dict[str, int] | None, as_json: bool) -> None:
    rows = _rows(plan.steps)
    if as_json:
        click.echo(json.dumps(rows))
        return
    table = table_of("shard", "action", "samples", "bytes")
    for row in rows:
        table.add_row(row["shard"], row["action"], f"{row['samples']:,}", bytes_text(row["bytes"]))
    print_table(table)
    _show_left_out(plan)
    _show_untold(untold)


def _show_done(
    plan: Plan, done: Sequence[Step], untold: dict[str, int] | None, seconds: float, as_json: bool
) -> None:
    if as_json:
        left_out = _remarks(plan.left_out)
        report = {
            "shards": _rows(plan.steps),
            "written": len(done),
            "left_out": left_out,
            "seconds": round(seconds, 3),
        }
        click.echo(json.dumps(report if untold is None else {**report, "not_told": untold}))
        return
    _show_left_out(plan)
    if not plan.steps:
        click.echo("the overlay changes no shard" if untold is None else "the overlay adds and changes no sample")
        _show_untold(untold)
        return
    counts = Counter(step.action for step in plan.steps)
    told = [f"{counts[action]:,} {word}" for action, word in _WORDS.items() if counts[action]]
    kept = f", {len(plan.steps) - len(done)} of them there already" if len(done) < len(plan.steps) else ""
    samples = sum(step.samples for step in plan.steps)
    size = bytes_text(sum(step.output.length for step in plan.steps))
    click.echo(f"shards: {', '.join(told)}{kept}; {samples:,} samples, {size}, in {seconds:.1f} s")
    for step in plan.steps:
        if step.action == "new":
            say(f"new: {os.fsdecode(step.output.target)}")
    _show_untold(untold)


def _show_left_out(plan: Plan) -> None:
    for one in plan.left_out:
        say(f"left out: {os.fsdecode(one.path)}: {one.reason}")


def _show_further(steps: Sequence[Step]) -> None:
    """The new shards are in the set of whoever names them."""
    new = [os.path.basename(os.fsdecode(step.output.target)) for step in steps if step.action == "new"]
    if new:
        shards = "this shard" if len(new) == 1 else "these shards"
        names = ", ".join(new) if len(new) <= 3 else f"{new[0]} ... {new[-1]}"
        say(f"SHARDS of the next mount must include {shards}, too: {names}")


_WORDS = {"rewrite": "rewritten", "new": "new", "copy": "copied", "link": "linked"}
