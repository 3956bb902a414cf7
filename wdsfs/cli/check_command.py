"""The command `check`: what readers of the format trip over. What is looked for is `interop/lint.py`."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from wdsfs.cli.options import (
    compressed_options,
    executor_option,
    jobs_of,
    json_option,
    remote_options,
    set_options,
    shards_argument,
    trust_option,
    workers_of,
)
from wdsfs.cli.output import contents_text, say, write_json
from wdsfs.errors import counted
from wdsfs.remote.shard_paths import is_remote

if TYPE_CHECKING:
    from wdsfs.spec.expand import Shard
    from wdsfs.spec.selection import Selection


@click.command()
@shards_argument
@set_options
@click.option("-j", "--jobs", type=click.IntRange(1), help="Processes that read shards.  [default: one per core]")
@executor_option
@click.option("--notes", is_flag=True, help="Also what is harmless: directories, __meta__ members.")
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
    as_json: bool,
) -> None:
    """Look for what readers of the format trip over: one line per finding.

    Damaged and truncated shards, samples that are split or whose members are not side by side, extensions
    that occur twice, members in no sample, samples without an extension that the others have, keys in
    several shards, numbers of samples that differ from those in a list of shards, indexes of DALI and Energon that
    do not fit the shard beside them. Exit code 0: nothing found; 1: findings; 3: a shard could not be read.

    \b
    Example:
      wdsfs check 'train-{000000..000999}.tar'
    """
    from wdsfs.errors import ShardError
    from wdsfs.index import process_pool
    from wdsfs.interop.lint import Judge, LintFinding, lint
    from wdsfs.spec.expand import expand

    judge = Judge()
    counts = {"findings": 0, "notes": 0, "unreadable": 0}
    found = expand(shards, *selection)

    def show(path: str, finding: LintFinding) -> None:
        counts["notes" if finding.is_note else "findings"] += 1
        if finding.is_note and not notes:
            return
        if as_json:
            write_json({"shard": path, **finding._asdict()})
            return
        say(finding.line(path))

    workers = workers_of(executor, jobs)
    look = functools.partial(lint, reading=selection.reading, together=process_pool.together(found, workers))
    for one, result in process_pool.each(look, found, jobs_of(jobs), workers):
        path = os.fsdecode(one.path)
        if isinstance(result, ShardError):
            counts["unreadable"] += 1
            show(path, LintFinding("unreadable", -1, "", str(result)))
            continue
        for finding in judge.add(path, result, one.miscount(result.samples)):
            show(path, finding)
    for path, finding in [*judge.shared_keys(), *judge.missing(), *judge.uneven()]:
        show(path, finding)
    hint = " (--notes shows them)" if counts["notes"] and not notes else ""
    contents = contents_text(len(found), judge.samples, judge.members)
    findings = f"{counted(counts['findings'], 'finding')}, {counted(counts['notes'], 'note')}{hint}"
    say(f"{contents}: {findings}", err=True)
    for text in filter(None, (_left_out_text(found), _not_looked_for_text(found))):
        say(text, err=True)
    sys.exit(3 if counts["unreadable"] else 1 if counts["findings"] else 0)


def _left_out_text(shards: Sequence[Shard]) -> str:
    """Return the note that samples are counted which a mount leaves out; empty if it leaves out none."""
    keys = sum(len(one.without) for one in shards)
    return f"counted here, too: {counted(keys, 'sample')} excluded by a split file" if keys else ""


def _not_looked_for_text(shards: Sequence[Shard]) -> str:
    """Return the note that nothing is looked for beside remote shards; empty without any."""
    remote = sum(is_remote(one.path) for one in shards)
    return f"not looked for: indexes of other tools beside {counted(remote, 'remote shard')}" if remote else ""
