"""The command `info`: counts of a set. What is counted is `dataset/statistics.py`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from wdsfs.cli.console import (
    Opening,
    index_options,
    json_option,
    opened,
    set_options,
    shards_argument,
    soundness_options,
)
from wdsfs.cli.output import bytes_text, contents_text, print_table, table_of
from wdsfs.errors import counted
from wdsfs.names import shown

if TYPE_CHECKING:
    from wdsfs.interop.soundness import Tolerance
    from wdsfs.spec.expand import Selection


@click.command()
@shards_argument
@set_options
@json_option
@soundness_options
@index_options
def info(
    shards: tuple[str, ...],
    selection: Selection,
    as_json: bool,
    index_dir: str | None,
    jobs: int | None,
    quiet: bool,
    tolerance: Tolerance,
) -> None:
    """Count shards, samples, members and bytes, and the sizes of each extension.

    \b
    Example:
      wdsfs info 'train-{000000..000999}.tar'
    """
    from wdsfs.dataset.statistics import gather
    from wdsfs.views.composition import Composition

    opening = Opening(index_dir, jobs, quiet, tolerance)
    with opened(shards, selection, opening, Composition(), whole=True) as below:
        report = gather(below)
    if as_json:
        click.echo(json.dumps(report))
        return
    click.echo(
        f"{contents_text(report['shards'], report['samples'], report['members'])}, "
        f"{bytes_text(report['bytes'])} of content in {bytes_text(report['shard_bytes'])} of shards"
    )
    if report["damaged"]:
        verb = "is" if report["damaged"] == 1 else "are"
        click.echo(f"{counted(report['damaged'], 'shard')} {verb} damaged; see: wdsfs check")
    if report["apart"] or report["joined"]:
        told = f"{counted(report['apart'], 'sample')} with members that lie apart"
        click.echo(f"{told}, {counted(report['joined'], 'shard')} of several tars; a commit puts that right")
    table = table_of("extension", "files", "bytes", "smallest", "median", "90 %", "largest")
    for row in report["extensions"]:
        sizes = [row[key] for key in ("bytes", "min", "median", "p90", "max")]
        table.add_row(shown(row["extension"]) or "(none)", f"{row['count']:,}", *map(bytes_text, sizes))
    print_table(table)
