"""The command `export`, and `--export` of the commands that write shards: the indexes of other tools.

`interop/export.py` writes them.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from wdsfs.cli.options import (
    Decorator,
    Directory,
    flag,
    json_option,
    opening_options_with,
    set_options,
    shards_argument,
)
from wdsfs.cli.output import say, shards_bar, write_json
from wdsfs.cli.process import ended_in_order
from wdsfs.errors import ExportError, counted, several

if TYPE_CHECKING:
    from wdsfs.interop.export import Report
    from wdsfs.spec.expand import Shard
    from wdsfs.spec.selection import Selection
    from wdsfs.tree.options import Opening
    from wdsfs.tree.shard_set import ShardSet

log = logging.getLogger("wdsfs")

FORMATS = click.Choice(("dali", "energon", "wids", "wdsidx"))

# Of the commands that write shards.
export_option: Decorator[Any] = click.option(
    "--export",
    "exports",
    type=FORMATS,
    multiple=True,
    help="Also write the index that this tool reads, beside the new shards; repeatable.",
)


def write_indexes(
    below: ShardSet, kinds: Sequence[str], directory: bytes | None, opening: Opening, md5: bool = False
) -> Report:
    """Write these indexes of a set, with a bar; log warnings and failures. Raises ExportError, ShardErrors."""
    from wdsfs.interop import export

    with ended_in_order(), shards_bar("exporting", len(below) * len(kinds), opening.quiet) as on_shard:
        report = export.export(below, kinds, directory, opening.jobs, on_shard, opening.workers, md5)
    for text in report.warnings:
        log.warning("%s", text)
    for text in report.failures:
        log.error("%s", text)
    return report


def warn_of_older(shards: Sequence[bytes], kinds: Sequence[str]) -> None:
    """Warn of indexes beside replaced shards that still describe the old ones."""
    from wdsfs.interop.export import left_behind

    older = [os.fsdecode(path) for path in left_behind(shards, kinds)]
    if older:
        log.warning("%s: made for the shards before this commit; renew them with: wdsfs export", several(older))


def after_commit(shards: Sequence[Shard], kinds: Sequence[str], in_place: bool, opening: Opening) -> bool:
    """Write these indexes of shards that a commit has written, or of a whole set in which it has replaced some.

    An index of a shard goes beside it; one of the whole set goes into the directory above all shards, or with
    `in_place` where the old one is. Returns True if something could not be written.
    """
    from wdsfs.tree.opening import opened_set

    directory = None if in_place else os.path.commonpath([os.path.dirname(shard.path) for shard in shards])
    with opened_set(shards, opening) as below:
        report = write_indexes(below, kinds, directory, opening)
    return bool(report.failures)


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
@flag("--md5", "For wids: the MD5 of each shard, which takes reading all of it.")
@json_option
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
