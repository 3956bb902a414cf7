"""Writes the indexes of other tools for a command: `export`, and `commit` and `pack` with `--export`.

What is written is decided in `interop/export.py`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from wdsfs.cli.options import Decorator
from wdsfs.cli.process import ended_in_order
from wdsfs.cli.progress import shards_bar
from wdsfs.errors import ExportError, several
from wdsfs.interop import formats

if TYPE_CHECKING:
    from wdsfs.interop.export import Report
    from wdsfs.spec.expand import Shard
    from wdsfs.tree.opening import Opening
    from wdsfs.tree.shard_set import ShardSet

log = logging.getLogger("wdsfs")

FORMATS = click.Choice(formats.FORMATS)

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
    """Write these indexes of a set and log warnings and failures. Raises ExportError, ShardErrors."""
    from wdsfs.interop.export import Export

    with ended_in_order(), shards_bar("exporting", len(below) * len(kinds), opening.quiet) as on_shard:
        exporting = Export(below, opening.jobs, on_shard=on_shard, workers=opening.workers)
        try:
            for kind in dict.fromkeys(kinds):
                exporting.write(kind, directory, md5)
            exporting.finish()
        except OSError as error:
            where = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
            raise ExportError(f"{where}{error.strerror}; mend that, then repeat the command") from None
    for text in exporting.report.warnings:
        log.warning("%s", text)
    for text in exporting.report.failures:
        log.error("%s", text)
    return exporting.report


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

    directory = None if in_place else os.path.commonpath([os.path.dirname(one.path) for one in shards])
    with opened_set(shards, opening) as below:
        report = write_indexes(below, kinds, directory, opening)
    return bool(report.failures)
