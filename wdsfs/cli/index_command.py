"""The command `index`: builds the index of shards, and writes portable ones."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from wdsfs.cli import completion
from wdsfs.cli.opening_options import opening_options_with
from wdsfs.cli.option_kinds import Command, flag, json_option
from wdsfs.cli.output import contents_text, say, write_json
from wdsfs.cli.process import when_interrupted
from wdsfs.cli.view_options import set_options
from wdsfs.errors import UsageError, bytes_text

if TYPE_CHECKING:
    from wdsfs.shards import Shard
    from wdsfs.tree.set_options import Opening, Selection

log = logging.getLogger("wdsfs")


@click.command(cls=Command)
@click.argument("shards", nargs=-1, shell_complete=completion.paths)
@set_options
@opening_options_with(executor=True, tolerance=False)
@click.option(
    "-o",
    "--output",
    metavar="FILE|URL",
    shell_complete=completion.paths,
    help="Also write all of it to FILE.wdsidx, for other machines and places.",
)
@click.option(
    "--update",
    metavar="FILE|URL",
    shell_complete=completion.paths,
    help="Renew FILE.wdsidx: its shards as they are now, and SHARDS at the end.",
)
@flag("--allow-missing", "Leave shards out of FILE.wdsidx that are missing or cannot be read.")
@flag("--prune", "Also drop what is kept of shards that are gone.")
@json_option
def index(
    shards: tuple[str, ...],
    selection: Selection,
    opening: Opening,
    output: str | None,
    update: str | None,
    allow_missing: bool,
    prune: bool,
    as_json: bool,
) -> None:
    """Build or refresh the index of SHARDS without mounting. Only what has changed is read.

    \b
    Examples:
      wdsfs index --jobs 8 'train-{000000..000999}.tar'
      wdsfs index -o set.wdsidx 'train-{000000..000999}.tar'
      wdsfs index --update set.wdsidx 'train-{001000..001999}.tar'
    """
    from wdsfs.tree.opening import index_set

    since = time.monotonic()
    if output is not None and update is not None:
        raise UsageError("-o and --update: one writes an index, the other renews it; leave one out")
    expanded = _shards(shards, update, selection._replace(allow_missing=allow_missing))
    text = "; no index was written, what was indexed is kept" if update or output else "; what was indexed is kept"
    with when_interrupted(text):
        counts = index_set(expanded, opening, update or output, allow_missing, prune)
    report = {**counts, "seconds": round(time.monotonic() - since, 3)}
    if as_json:
        write_json(report)
    else:
        say(*_report_lines(report))
    if report["unreadable"] and not allow_missing:
        sys.exit(3)


def _shards(specs: Sequence[str], update: str | None, selection: Selection) -> list[Shard]:
    """Return the named shards; with `update`, the shards of that portable index come first."""
    from wdsfs.spec.expand import expand

    if update is None:
        return expand(specs, *selection)
    if selection.slice is not None:
        raise UsageError("--shard-id: an index is renewed as a whole; leave it out with --update")
    listed = expand([update], *selection)
    known = {shard.path for shard in listed}
    named = expand(specs, *selection._replace(base=None)) if specs else []
    return listed + [shard for shard in named if shard.path not in known]


def _report_lines(report: Mapping[str, Any]) -> tuple[str, str]:
    written = "written" in report
    where = f"{bytes_text(report['bytes'])} in {report['written']}" if written else f"kept in {report['index']}"
    return (
        f"{contents_text(report['shards'], report['samples'], report['members'])}; "
        f"{report['rebuilt']} indexed in {report['seconds']} s",
        where,
    )
