"""The command that writes the indexes of other tools, and what `commit --export` has of it.

As in `cli/main.py`, what the command works with is imported when it is called. What is written is decided in
`interop/export.py`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from wdsfs.cli.console import (
    Opening,
    ended_in_order,
    index_options_with,
    jobs_of,
    json_option,
    opened,
    opened_set,
    set_options,
    shards_argument,
    soundness_options,
)
from wdsfs.errors import ExportError, counted, several

if TYPE_CHECKING:
    from wdsfs.dataset.shard_set import ShardSet
    from wdsfs.interop.export import Report
    from wdsfs.interop.soundness import Tolerance
    from wdsfs.spec.expand import Selection, Shard

log = logging.getLogger("wdsfs")

FORMATS = click.Choice(["dali", "energon", "wids"])


@click.command()
@click.option("--format", "kinds", type=FORMATS, multiple=True, required=True, help="Whose index; repeatable.")
@shards_argument
@set_options
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    type=click.Path(file_okay=False),
    required=True,
    help="Where it goes; for energon the root of the data set, which has the shards.",
)
@click.option("--md5", is_flag=True, help="For wids: the MD5 of each shard, which takes reading all of it.")
@json_option
@soundness_options
@index_options_with("Processes that read shards.")
def export(
    kinds: tuple[str, ...],
    shards: tuple[str, ...],
    selection: Selection,
    output: str,
    md5: bool,
    as_json: bool,
    index_dir: str | None,
    jobs: int | None,
    quiet: bool,
    tolerance: Tolerance,
) -> None:
    """Write the indexes of SHARDS that other tools read, into the directory DIR.

    \b
    dali     a NAME.idx for each shard, for `readers.webdataset(index_paths=...)`
    energon  .nv-meta, and a NAME.tar.idx beside each shard, as `energon prepare` writes them
    wids     shardindex.json, for `wids.ShardListDataset`

    What a tool would read otherwise than wdsfs is told, with the member. Exit code 9: something could not be
    written.

    \b
    Examples:
      wdsfs export --format dali -o index 'train-{000000..000999}.tar'
      wdsfs export --format energon -o /data/set /data/set
    """
    from wdsfs.spec.expand import refuse_left_out

    opening = Opening(index_dir, jobs, quiet, tolerance)
    with opened(shards, selection, opening, whole=True) as below:
        refuse_left_out(below.shards, "an index is of whole shards")
        report = write(below, kinds, os.fsencode(output), jobs_of(jobs), quiet, md5)
    if as_json:
        written = [os.fsdecode(path) for path in report.written]
        click.echo(json.dumps({"written": written, "warnings": report.warnings, "failures": report.failures}))
    else:
        click.echo(f"{counted(len(report.written), 'file')} written, {counted(len(report.failures), 'failure')}")
    if report.failures:
        sys.exit(ExportError.exit_code)


def write(
    below: ShardSet, kinds: Sequence[str], directory: bytes | None, jobs: int, quiet: bool, md5: bool = False
) -> Report:
    """Write these indexes of a set, and tell what there is to know. Raises ExportError, ShardErrors."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from wdsfs.interop.export import Export

    console = Console(stderr=True)
    columns = (
        TextColumn("exporting"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("shards"),
        TimeRemainingColumn(),
    )
    hidden = quiet or not console.is_terminal
    with ended_in_order(), Progress(*columns, console=console, disable=hidden) as progress:
        task = progress.add_task("exporting", total=len(below) * len(kinds))
        exporting = Export(below, jobs, on_shard=lambda: progress.advance(task))
        try:
            for kind in dict.fromkeys(kinds):
                exporting.write(kind, directory, md5)
            exporting.finish()
        except OSError as error:
            where = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
            raise ExportError(f"{where}{error.strerror}; repeat the command when there is a remedy") from None
    for text in exporting.report.warnings:
        log.warning("%s", text)
    for text in exporting.report.failures:
        log.error("%s", text)
    return exporting.report


def warn_of_older(shards: Sequence[bytes], kinds: Sequence[str]) -> None:
    """Say which indexes beside shards that were replaced are not of the new ones."""
    from wdsfs.interop.export import left_behind

    older = [os.fsdecode(path) for path in left_behind(shards, kinds)]
    if older:
        log.warning("%s: of the shards as they were before; renew them with: wdsfs export", several(older))


def after_commit(shards: Sequence[Shard], kinds: Sequence[str], in_place: bool, opening: Opening) -> bool:
    """Write these indexes of shards that a commit has written, or of a whole set in which it has replaced some.

    They go beside the shards; what is there once for a set goes above them all, or in place where it was. Returns
    whether something could not be written.
    """
    directory = None if in_place else os.path.commonpath([os.path.dirname(one.path) for one in shards])
    with opened_set(shards, opening) as below:
        report = write(below, kinds, directory, jobs_of(opening.jobs), opening.quiet)
    return bool(report.failures)
