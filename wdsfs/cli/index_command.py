"""The command `index`: builds the index of shards without a mount. What it does is `index/store.py`."""

from __future__ import annotations

import json
import logging
import sys
from typing import TYPE_CHECKING

import click

from wdsfs.cli.console import (
    build_index,
    index_options,
    jobs_of,
    json_option,
    path_of,
    set_options,
    shards_argument,
)
from wdsfs.cli.output import contents_text

if TYPE_CHECKING:
    from wdsfs.spec.expand import Selection

log = logging.getLogger("wdsfs")


@click.command("index")
@shards_argument
@set_options
@index_options
@click.option("--prune", is_flag=True, help="Also drop what is kept of shards and label files that are gone.")
@json_option
def index_command(
    shards: tuple[str, ...],
    selection: Selection,
    index_dir: str | None,
    jobs: int | None,
    quiet: bool,
    prune: bool,
    as_json: bool,
) -> None:
    """Build or refresh the index of SHARDS without mounting. Only what has changed is read.

    \b
    Example:
      wdsfs index --jobs 8 'train-{000000..000999}.tar'
    """
    import time

    from wdsfs.dataset.shard_set import ShardSet
    from wdsfs.errors import IndexUnusable
    from wdsfs.index.store import open_index
    from wdsfs.interop.soundness import Tolerance, judge
    from wdsfs.spec.expand import expand
    from wdsfs.views import label_files

    since = time.monotonic()
    found = expand(shards, *selection)
    index = open_index(path_of(index_dir))
    for notice in index.notices:
        log.warning("%s", notice)
    stale = [one for one, _ in index.stale(found)]
    unreadable = build_index(index, stale, jobs_of(jobs), quiet)
    for text in [*judge(ShardSet(found, index), unreadable, Tolerance(), whole=False), *index.miscounted(found)]:
        log.warning("%s", text)
    pruned = index.prune() + label_files.prune(index.label_tables) if prune else 0
    summaries = [index.summary(one.key) for one in found]
    samples = sum(one.samples for one in summaries if one)
    members = sum(one.members for one in summaries if one)
    report = {
        "shards": len(found),
        "rebuilt": len(stale),
        "unreadable": len(unreadable),
        "damaged": sum(bool(one.problems) for one in summaries if one),
        "samples": samples,
        "members": members,
        "pruned": pruned,
        "seconds": round(time.monotonic() - since, 3),
        "index": str(index.directory),
    }
    kept = not index.temporary
    index.close()
    if not kept:
        raise IndexUnusable("nothing is kept: the index was a temporary one; see above, or set --index-dir")
    if as_json:
        click.echo(json.dumps(report))
    else:
        click.echo(
            f"{contents_text(len(found), samples, members)}; "
            f"{report['rebuilt']} indexed in {report['seconds']} s\nkept in {report['index']}"
        )
    if report["unreadable"]:
        sys.exit(3)
