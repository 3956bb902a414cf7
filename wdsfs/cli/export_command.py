"""The command `export`: writes the indexes of other tools. What is written is decided in `interop/export.py`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from wdsfs.cli.exporting import FORMATS, write_indexes
from wdsfs.cli.options import (
    Directory,
    json_option,
    opening_options_with,
    set_options,
    shards_argument,
    soundness_options,
)
from wdsfs.cli.output import say, write_json
from wdsfs.errors import ExportError, counted

if TYPE_CHECKING:
    from wdsfs.spec.selection import Selection
    from wdsfs.tree.opening import Opening


@click.command()
@click.option("--format", "kinds", type=FORMATS, multiple=True, required=True, help="Whose index; repeatable.")
@shards_argument
@set_options
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    type=Directory(),
    required=True,
    help="Where it goes; for energon the root of the data set, which has the shards.",
)
@click.option("--md5", is_flag=True, help="For wids: the MD5 of each shard, which takes reading all of it.")
@json_option
@soundness_options
@opening_options_with("Processes that read shards.", executor=True)
def export(
    kinds: tuple[str, ...],
    shards: tuple[str, ...],
    selection: Selection,
    output: str,
    md5: bool,
    as_json: bool,
    opening: Opening,
) -> None:
    """Write the indexes of SHARDS that other tools read, into the directory DIR.

    \b
    dali     a NAME.idx for each shard, for `readers.webdataset(index_paths=...)`
    energon  .nv-meta, and a NAME.tar.idx beside each shard, as `energon prepare` writes them
    wids     shardindex.json, for `wids.ShardListDataset`
    wdsidx   set.wdsidx, for wdsfs on other machines; `wdsfs index -o` writes the same

    Members that a tool would read otherwise than wdsfs are named. Exit code 9: something could not be written.

    \b
    Examples:
      wdsfs export --format dali -o index 'train-{000000..000999}.tar'
      wdsfs export --format energon -o /data/set /data/set
    """
    from wdsfs.spec.expand import refuse_left_out
    from wdsfs.tree.opening import opened

    with opened(shards, selection, opening, whole=True) as below:
        refuse_left_out(below.shards, "an index is of whole shards")
        report = write_indexes(below, kinds, os.fsencode(output), opening, md5)
    if as_json:
        written = [os.fsdecode(path) for path in report.written]
        write_json({"written": written, "warnings": report.warnings, "failures": report.failures})
    else:
        say(f"{counted(len(report.written), 'file')} written, {counted(len(report.failures), 'failure')}")
    if report.failures:
        sys.exit(ExportError.exit_code)
