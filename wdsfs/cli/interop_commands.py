"""The commands `check` and `export`, and all else that commands ask of the wing `interop`."""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import click

from wdsfs import wings
from wdsfs.cli.opening_options import (
    compressed_options,
    executor_option,
    jobs_of,
    opening_options_with,
    remote_options,
    trust_option,
    workers_of,
)
from wdsfs.cli.option_kinds import (
    Command,
    Decorator,
    Directory,
    flag,
    jobs_option,
    json_option,
    shards_argument,
)
from wdsfs.cli.output import contents_text, say, shards_bar, write_json
from wdsfs.cli.process import ended_in_order
from wdsfs.cli.view_options import keys_option, set_options
from wdsfs.errors import ExportError, UsageError, counted, several

if TYPE_CHECKING:
    from wdsfs.interop.export import Report
    from wdsfs.interop.lint import LintFinding
    from wdsfs.packing.plan import PlannedMember
    from wdsfs.shards import Shard
    from wdsfs.tree.set_options import Opening, Selection
    from wdsfs.tree.shard_set import ShardSet

log = logging.getLogger("wdsfs")

# --- check --------------------------------------------------------------------------------------------------


@click.command(cls=Command)
@shards_argument
@set_options
@jobs_option("Number of processes that read shards.  [default: one per core]")
@executor_option
@flag("--notes", "Also report harmless members: directories, __meta__.")
@keys_option
@compressed_options
@remote_options
@trust_option
@json_option
def check(
    shards: tuple[str, ...],
    selection: Selection,
    jobs: int | None,
    executor: str | None,
    notes: bool,
    keys: str | None,
    as_json: bool,
) -> None:
    """Check shards for problems of readers: a line for each finding.

    Exit code 0: no findings; 1: findings; 3: a shard is unreadable.

    \b
    Example:
      wdsfs check 'train-{000000..000999}.tar'
    \f

    \b
    Shards:   damaged; truncated; without samples; a number of samples that differs from a list of shards;
              an index of DALI or Energon that does not fit
    Samples:  split; members that lie apart; an extension twice; an extension missing that the others have;
              a key in several shards; with --keys a key of no sample
    Members:  in no sample; dots in a name that cut the key; a name that is not UTF-8; 0 bytes in a column with
              content; a column that only later shards have
    """
    wings.load("interop")
    from wdsfs.interop.judge import Judge
    from wdsfs.interop.lint import UNREADABLE
    from wdsfs.spec.expand import expand

    judge = Judge()
    counts: Counter[str] = Counter()
    expanded = expand(shards, *selection)
    in_shards = judge.findings(expanded, selection.reading, jobs_of(jobs), workers_of(executor, jobs))
    for path, finding in itertools.chain(in_shards, _missing_keys(expanded, keys)):
        counts["note" if finding.is_note else UNREADABLE if finding.kind == UNREADABLE else "finding"] += 1
        if finding.is_note and not notes:
            continue
        if as_json:
            write_json({"shard": path, **finding._asdict()})
        else:
            say(finding.line(path))
    hint = " (--notes shows them)" if counts["note"] and not notes else ""
    findings = counted(counts["finding"] + counts[UNREADABLE], "finding")
    contents = contents_text(len(expanded), judge.samples, judge.members)
    say(f"{contents}: {findings}, {counted(counts['note'], 'note')}{hint}", *_remarks(expanded), err=True)
    sys.exit(3 if counts[UNREADABLE] else 1 if counts["finding"] else 0)


def _missing_keys(shards: Sequence[Shard], keys: str | None) -> Iterator[tuple[str, LintFinding]]:
    """Yield a finding, with the list, if keys of this list are those of no sample. Raises ViewError."""
    if keys is None:
        return
    from wdsfs.interop.lint import LintFinding
    from wdsfs.tree.composition import Composition
    from wdsfs.tree.opening import keys_missing, open_known_set
    from wdsfs.tree.set_options import Opening

    with open_known_set(shards, Opening(quiet=True), Composition(keys=keys), on_demand=True) as below:
        missing = keys_missing(below)
    if missing is not None:
        yield keys, LintFinding("missing key", -1, "", missing.removeprefix(f"--keys {keys}: "))


def _remarks(shards: Sequence[Shard]) -> Iterator[str]:
    """Yield notes about samples that a mount leaves out, and about indexes that the check does not look for."""
    from wdsfs.door.urls import is_remote

    excluded = sum(len(shard.without) for shard in shards)
    if excluded:
        yield f"the counts include {counted(excluded, 'sample')} that a split file excludes"
    remote = sum(is_remote(shard.path) for shard in shards)
    if remote:
        yield f"not checked: indexes of other tools beside {counted(remote, 'remote shard')}"


def uneven_text(path: bytes, members: Iterable[PlannedMember]) -> str:
    """Return a note if Hugging Face's loader would refuse a set that begins with this new shard, else "".

    `members` are its members, in order.
    """
    if not wings.is_installed("interop"):
        return ""
    from wdsfs.interop.judge import first_samples, uneven

    finding = uneven(first_samples((member.key, member.extension) for member in members))
    return "" if finding is None else f"note: {os.fsdecode(path)}: the sample {finding.member} {finding.text}"


# --- export, --export ----------------------------------------------------------------------------------------


class Format(click.Choice[str]):
    """The type of options that name a tool to write an index for. `WRITTEN_BY` has the commands of other tools."""

    WRITTEN_BY: ClassVar = {
        # It refuses shards of a Mac: the hidden files of one folder are all samples with the same key to it.
        "energon": "energon prepare DIR (hidden files, ._x, are samples to it: `wdsfs pack` leaves them out)",
        "wids": "widsindex create SHARDS --output FILE.json",
        "wdsidx": "wdsfs index -o FILE.wdsidx SHARDS",
    }

    def __init__(self) -> None:
        super().__init__(("dali",))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in self.WRITTEN_BY:
            word = param.opts[0] if param is not None else ""
            raise UsageError(f"{word} {value}: no longer written; type: {self.WRITTEN_BY[value]}")
        wings.load("interop")  # before the shards are written
        return super().convert(value, param, ctx)


# Of the commands that write shards.
export_option: Decorator[Any] = click.option(
    "--export",
    "exports",
    type=Format(),
    multiple=True,
    help="Also write an index for NVIDIA DALI beside the new shards.",
)


def write_indexes(below: ShardSet, directory: bytes | None, opening: Opening) -> Report:
    """Write an index for DALI of each shard, with a bar; log warnings and failures. Raises ExportError."""
    wings.load("interop")
    from wdsfs.interop import export

    with ended_in_order(), shards_bar("exporting", len(below), opening.quiet) as on_shard:
        report = export.export(below, directory, opening.jobs, on_shard, opening.workers)
    for text in report.warnings:
        log.warning("%s", text)
    for text in report.failures:
        log.error("%s", text)
    return report


def warn_of_older(shards: Sequence[bytes], exports: Sequence[str]) -> None:
    """Warn of indexes beside replaced shards that still describe the old ones."""
    if not wings.is_installed("interop"):
        return
    from wdsfs.interop.export import left_behind

    older = left_behind(shards, renewed=bool(exports))
    if older:
        paths, commands = several([*map(os.fsdecode, older)]), ", ".join(dict.fromkeys(older.values()))
        log.warning("%s: made for the shards before this commit; renew them with: %s", paths, commands)


def after_commit(shards: Sequence[Shard], in_place: bool, opening: Opening) -> bool:
    """Write indexes for DALI of shards that a commit has written, or of a whole set in which it has replaced some.

    They go into the directory above all shards, or with `in_place` beside each. Returns True if one could not be
    written.
    """
    from wdsfs.door.urls import is_remote
    from wdsfs.tree.opening import open_known_set

    remote = next((shard for shard in shards if in_place and is_remote(shard.path)), None)
    if remote is not None:
        raise ExportError(
            f"{os.fsdecode(remote.path)}: no index is written beside a shard in a store; "
            "name a directory with --output"
        )
    directory = None if in_place else os.path.commonpath([os.path.dirname(shard.path) for shard in shards])
    with open_known_set(shards, opening) as below:
        report = write_indexes(below, directory, opening)
    return bool(report.failures)


@click.command(cls=Command)
@click.option("--format", "kinds", type=Format(), multiple=True, hidden=True)
@shards_argument
@set_options
@click.option(
    "-o", "--output", metavar="DIR", type=Directory(), required=True, help="The directory for the indexes."
)
@keys_option
@json_option
@opening_options_with("Number of processes that read shards.", executor=True)
def export(
    kinds: tuple[str, ...],
    shards: tuple[str, ...],
    selection: Selection,
    output: str,
    keys: str | None,
    as_json: bool,
    opening: Opening,
) -> None:
    """Write an index for NVIDIA DALI of each of the SHARDS: NAME.idx in the directory DIR.

    DALI reads it by `readers.webdataset(index_paths=...)`. With --keys, the index has only the listed samples.
    wdsfs names the members that DALI would read differently. Exit code 9: an index could not be written.

    \b
    Example:
      wdsfs export -o index 'train-{000000..000999}.tar'
    """
    from wdsfs.spec.expand import refuse_left_out
    from wdsfs.tree.composition import Composition
    from wdsfs.tree.opening import open_typed_set

    composition = None if keys is None else Composition(keys=keys)
    with open_typed_set(shards, selection, opening, composition, whole=True) as below:
        refuse_left_out(below.shards, "an index is of whole shards")
        report = write_indexes(below, os.fsencode(output), opening)
    if as_json:
        written = [os.fsdecode(path) for path in report.written]
        write_json({"written": written, "warnings": report.warnings, "failures": report.failures})
    else:
        say(f"{counted(len(report.written), 'file')} written, {counted(len(report.failures), 'failure')}")
    if report.failures:
        sys.exit(ExportError.exit_code)
