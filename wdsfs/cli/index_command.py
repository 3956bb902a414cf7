"""The command `index`: builds the index of shards without a mount. What it does is `index/store.py`."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from wdsfs.cli import completion
from wdsfs.cli.options import flag, json_option, opening_options_with, set_options
from wdsfs.cli.output import contents_text, say, shards_bar, write_json
from wdsfs.cli.process import ended_in_order, when_interrupted
from wdsfs.errors import UsageError, bytes_text

if TYPE_CHECKING:
    from wdsfs.errors import ShardError
    from wdsfs.index.store import Index
    from wdsfs.spec.expand import Shard
    from wdsfs.spec.selection import Selection
    from wdsfs.storage.identity import Fingerprint
    from wdsfs.tree.opening import Refreshed
    from wdsfs.tree.options import Opening

log = logging.getLogger("wdsfs")


@click.command()
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
    from wdsfs.errors import IndexUnusable
    from wdsfs.index.portable_writer import checked_target
    from wdsfs.tree.opening import refresh_index

    since = time.monotonic()
    if output is not None and update is not None:
        raise UsageError("-o and --update: one writes an index, the other renews it; leave one out")
    target = None if (file := update or output) is None else checked_target(file)
    expanded = _shards(shards, update, selection._replace(allow_missing=allow_missing))
    index = _opened(opening, expanded)
    done = refresh_index(index, expanded, opening, exact=target is not None)
    _warn(index, expanded, done)
    pruned = index.prune() if prune else 0
    written = None
    if target is not None:
        written = _write(index, expanded, target, done.unreadable, allow_missing, opening.quiet)
    report = {
        **_counts(index, expanded, done),
        "pruned": pruned,
        "seconds": round(time.monotonic() - since, 3),
        "index": str(index.directory),
    }
    if written is not None:
        report |= {"written": output or update, "bytes": written}
    is_lasting = not index.temporary
    index.close()
    if not is_lasting and target is None:
        raise IndexUnusable("nothing is kept: the index was a temporary one; see above, or set --index-dir")
    if as_json:
        write_json(report)
    else:
        say(*_report_lines(report))
    if done.unreadable and not allow_missing:
        sys.exit(3)


def _opened(opening: Opening, shards: Sequence[Shard]) -> Index:
    """Open the index, with the portable ones of these shards."""
    from wdsfs.index.portable import attached
    from wdsfs.index.store import open_index

    index = open_index(opening.index_dir)
    index.log_notices()
    index.portables = attached(shards)
    return index


def _shards(specs: Sequence[str], update: str | None, selection: Selection) -> list[Shard]:
    """The shards that are named; before them those of the portable index that is to be renewed."""
    from wdsfs.spec.expand import expand

    if update is None:
        return expand(specs, *selection)
    if selection.slice is not None:
        raise UsageError("--shard-id: an index is renewed as a whole; leave it out with --update")
    listed = expand([update], *selection)
    known = {shard.path for shard in listed}
    further = expand(specs, *selection._replace(base=None)) if specs else []
    return listed + [shard for shard in further if shard.path not in known]


def _write(
    index: Index,
    shards: Sequence[Shard],
    target: bytes,
    unreadable: Mapping[bytes, ShardError],
    allow_missing: bool,
    quiet: bool,
) -> int:
    """Write the portable index; returns its size in bytes. Raises what `portable_writer.write_index` does."""
    from wdsfs.errors import UnreadableShard, several
    from wdsfs.index.portable_writer import write_index
    from wdsfs.tree.opening import readable

    if unreadable and not allow_missing:
        text = f"{several([*map(str, unreadable.values())])}: an index lacks nothing, unless with --allow-missing"
        raise UnreadableShard(text)
    with (
        when_interrupted("; nothing was written, what was indexed is kept"),
        ended_in_order(),
        shards_bar("writing", len(shards), quiet) as on_shard,
    ):
        return write_index(index, readable(shards, unreadable), target, on_shard)


def _warn(index: Index, shards: Sequence[Shard], done: Refreshed) -> None:
    """Log what is wrong with the shards, and counts of samples that differ from those in a list of shards."""
    from wdsfs.tree.opening import judge
    from wdsfs.tree.options import Tolerance
    from wdsfs.tree.shard_set import ShardSet

    below = ShardSet(shards, index)
    remarks = judge(below, done.unreadable, Tolerance(allow_missing=True), whole=False)
    for text in [*remarks, *index.miscounted(shards)]:
        log.warning("%s", text)


def _report_lines(report: Mapping[str, Any]) -> tuple[str, str]:
    written = "written" in report
    where = f"{bytes_text(report['bytes'])} in {report['written']}" if written else f"kept in {report['index']}"
    return (
        f"{contents_text(report['shards'], report['samples'], report['members'])}; "
        f"{report['rebuilt']} indexed in {report['seconds']} s",
        where,
    )


def _counts(index: Index, shards: Sequence[Shard], done: Refreshed) -> dict[str, Any]:
    summaries = [summary for summary in (index.summary(*known) for known in _known(shards)) if summary]
    return {
        "shards": len(shards),
        "rebuilt": done.indexed,
        "unreadable": len(done.unreadable),
        "damaged": sum(bool(summary.problems) for summary in summaries) - len(index.no_tars(shards)),
        "samples": sum(summary.samples for summary in summaries),
        "members": sum(summary.members for summary in summaries),
    }


def _known(shards: Sequence[Shard]) -> Iterator[tuple[bytes, Fingerprint]]:
    """The keys of the shards that can be read, with their fingerprints."""
    from wdsfs.errors import ShardError
    from wdsfs.remote import shard_paths

    for shard in shards:
        with contextlib.suppress(ShardError):
            yield shard.key, shard_paths.look(shard.path)
