"""The commands `index` and `export`, and `--export` of the commands that write shards: indexes as files.

`index/store.py` and `interop/export.py` make them.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import click

from wdsfs.cli import completion
from wdsfs.cli.command_help import Command, Decorator
from wdsfs.cli.opening_options import opening_options_with
from wdsfs.cli.option_kinds import Directory, flag, json_option, retired, shards_argument
from wdsfs.cli.output import contents_text, say, shards_bar, write_json
from wdsfs.cli.process import ended_in_order, when_interrupted
from wdsfs.cli.view_options import keys_option, set_options
from wdsfs.errors import ExportError, UsageError, bytes_text, counted, several

if TYPE_CHECKING:
    from wdsfs.interop.export import Report
    from wdsfs.shards import Shard
    from wdsfs.tree.set_options import Opening, Selection
    from wdsfs.tree.shard_set import ShardSet

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
    further = expand(specs, *selection._replace(base=None)) if specs else []
    return listed + [shard for shard in further if shard.path not in known]


def _report_lines(report: Mapping[str, Any]) -> tuple[str, str]:
    written = "written" in report
    where = f"{bytes_text(report['bytes'])} in {report['written']}" if written else f"kept in {report['index']}"
    return (
        f"{contents_text(report['shards'], report['samples'], report['members'])}; "
        f"{report['rebuilt']} indexed in {report['seconds']} s",
        where,
    )


# --- export, --export ----------------------------------------------------------------------------------------


class Format(click.Choice[str]):
    """The type of the options that name a tool whose index is written; it knows how others are written."""

    WRITTEN_BY: ClassVar = {
        "energon": "energon prepare DIR",
        "wids": "widsindex create SHARDS --output FILE.json",
        "wdsidx": "wdsfs index -o FILE.wdsidx SHARDS",
    }

    def __init__(self) -> None:
        super().__init__(("dali",))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in self.WRITTEN_BY:
            word = param.opts[0] if param is not None else ""
            raise UsageError(f"{word} {value}: no longer written; type: {self.WRITTEN_BY[value]}")
        return super().convert(value, param, ctx)


# Of the commands that write shards.
export_option: Decorator[Any] = click.option(
    "--export",
    "exports",
    type=Format(),
    multiple=True,
    help="Also write the index that NVIDIA DALI reads, beside the new shards.",
)


def write_indexes(below: ShardSet, directory: bytes | None, opening: Opening) -> Report:
    """Write an index for DALI of each shard, with a bar; log warnings and failures. Raises ExportError."""
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
    from wdsfs.tree.opening import opened_set

    directory = None if in_place else os.path.commonpath([os.path.dirname(shard.path) for shard in shards])
    with opened_set(shards, opening) as below:
        report = write_indexes(below, directory, opening)
    return bool(report.failures)


@click.command(cls=Command)
@click.option("--format", "kinds", type=Format(), multiple=True, hidden=True)
@shards_argument
@set_options
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    type=Directory(),
    required=True,
    help="Where it goes.",
)
@retired("--md5", "`widsindex create` writes the index with the MD5 of each shard")
@keys_option
@json_option
@opening_options_with("Processes that read shards.", executor=True)
def export(
    kinds: tuple[str, ...],
    shards: tuple[str, ...],
    selection: Selection,
    output: str,
    keys: str | None,
    as_json: bool,
    opening: Opening,
) -> None:
    """Write the index that NVIDIA DALI reads of each of the SHARDS: a NAME.idx in the directory DIR.

    It is for `readers.webdataset(index_paths=...)`. With --keys it has the listed samples only. Members that DALI
    would read differently are named. Exit code 9: something could not be written.

    \b
    Example:
      wdsfs export -o index 'train-{000000..000999}.tar'
    """
    from wdsfs.spec.expand import refuse_left_out
    from wdsfs.tree.composition import Composition
    from wdsfs.tree.opening import opened

    composition = None if keys is None else Composition(keys=keys)
    with opened(shards, selection, opening, composition, whole=True) as below:
        refuse_left_out(below.shards, "an index is of whole shards")
        report = write_indexes(below, os.fsencode(output), opening)
    if as_json:
        written = [os.fsdecode(path) for path in report.written]
        write_json({"written": written, "warnings": report.warnings, "failures": report.failures})
    else:
        say(f"{counted(len(report.written), 'file')} written, {counted(len(report.failures), 'failure')}")
    if report.failures:
        sys.exit(ExportError.exit_code)
