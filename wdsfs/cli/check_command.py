"""The command `check`: what readers of the format trip over. What is looked for is `interop/lint.py`."""

from __future__ import annotations

import functools
import json
import os
import sys
from typing import TYPE_CHECKING

import click

from wdsfs.cli.console import (
    compressed_options,
    jobs_of,
    json_option,
    left_out_text,
    set_options,
    shards_argument,
    trust_option,
)
from wdsfs.cli.output import contents_text
from wdsfs.errors import counted
from wdsfs.names import shown

if TYPE_CHECKING:
    from wdsfs.spec.expand import Selection


@click.command()
@shards_argument
@set_options
@click.option("-j", "--jobs", type=click.IntRange(1), help="Processes that read shards.  [default: one per core]")
@click.option("--notes", is_flag=True, help="Also what is harmless: directories, __meta__ members.")
@compressed_options
@trust_option
@json_option
def check(shards: tuple[str, ...], selection: Selection, jobs: int | None, notes: bool, as_json: bool) -> None:
    """Look for what readers of the format trip over: one line per finding.

    Damaged and truncated shards, samples that are split or whose members are not side by side, extensions
    that occur twice, members in no sample, samples without an extension that the others have, keys in
    several shards, other numbers of samples than an index says, indexes of DALI and Energon beside a shard that
    are not of it. Exit code 0: nothing found; 1: findings; 3: a shard could not be read.

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

    def tell(path: str, finding: LintFinding) -> None:
        counts["notes" if finding.is_note else "findings"] += 1
        if finding.is_note and not notes:
            return
        if as_json:
            click.echo(json.dumps({"shard": path, **finding._asdict()}))
            return
        click.echo(shown(finding.line(path)))

    look = functools.partial(lint, reading=selection.reading)
    for one, result in process_pool.each(look, found, jobs_of(jobs)):
        path = os.fsdecode(one.path)
        if isinstance(result, ShardError):
            counts["unreadable"] += 1
            tell(path, LintFinding("unreadable", -1, "", str(result)))
            continue
        for finding in judge.add(path, result, one.miscount(result.samples)):
            tell(path, finding)
    for path, finding in [*judge.shared_keys(), *judge.missing()]:
        tell(path, finding)
    summary = (
        f"{contents_text(len(found), judge.samples, judge.members)}: "
        f"{counted(counts['findings'], 'finding')}, {counted(counts['notes'], 'note')}"
        + (" (--notes shows them)" if counts["notes"] and not notes else "")
    )
    click.echo(summary, err=True)
    if left_out := left_out_text(found):
        click.echo(left_out, err=True)
    sys.exit(3 if counts["unreadable"] else 1 if counts["findings"] else 0)
