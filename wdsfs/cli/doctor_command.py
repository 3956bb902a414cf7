"""The command `doctor`: shows if this machine can mount, or if shards can be read from a URL.

The checks of the machine are in `mount/doctor.py`, those of a URL in `store_checks.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from wdsfs.cli import completion
from wdsfs.cli.options import Directory, json_option, set_for_all, store_option
from wdsfs.cli.output import say, write_json

if TYPE_CHECKING:
    from wdsfs.host import MachineFinding

TOTAL_SECONDS = 10  # for a store that does not answer: a person waits


@click.command()
@click.argument("place", metavar="[MOUNTPOINT|URL]", required=False, shell_complete=completion.mount_points)
@click.option(
    "--index-dir",
    type=Directory(),
    envvar="WDSFS_INDEX_DIR",
    help="Check this directory for the index.  [env WDSFS_INDEX_DIR]",
)
@click.option(
    "--shards",
    "shards_dir",
    type=Directory(),
    help="Check if shards in this directory can be guarded when the kernel serves them (mount --engine kernel).",
)
@store_option
@json_option
def doctor(place: str | None, index_dir: str | None, shards_dir: str | None, as_json: bool) -> None:
    """Check if this machine can mount, or read shards from a URL, and say what to type if not.

    \b
    Examples:
      wdsfs doctor /mnt/train
      wdsfs doctor --shards /data/train
      wdsfs doctor s3://bucket/train-000000.tar
    """
    from wdsfs.kernel.engine_checks import check_engine, check_leases
    from wdsfs.mount.doctor import check_mountpoint, diagnose
    from wdsfs.remote.urls import is_url

    if place is not None and is_url(place):
        set_for_all("WDSFS_INDEX_DIR", index_dir)
        _show(_look_at_store(place), as_json, code=3)
    else:
        by_kernel = [check_engine(), *([] if shards_dir is None else [check_leases(shards_dir)])]
        about_place = [] if place is None else [check_mountpoint(place)]
        _show([*diagnose(index_dir=index_dir), *by_kernel, *about_place], as_json, code=5)


def _look_at_store(text: str) -> list[MachineFinding]:
    """The findings about a URL. Raises SpecError, UsageError."""
    from wdsfs.cli.store_checks import findings_of
    from wdsfs.remote.shard_paths import remote
    from wdsfs.remote.urls import parse

    given = os.environ.get("WDSFS_STORE_OPTIONS", "")
    set_for_all("WDSFS_STORE_OPTIONS", f"total_time={TOTAL_SECONDS} {given}")
    url = parse(text)
    return findings_of(url, remote().describe(url))


def _show(findings: Sequence[MachineFinding], as_json: bool, code: int) -> None:
    """Print the findings; end with this exit code if one of them is a failure."""
    if as_json:
        write_json([finding._asdict() for finding in findings])
    else:
        for finding in findings:
            click.secho(
                f"{finding.level:<5}",
                nl=False,
                fg={"ok": "green", "warn": "yellow", "fail": "red"}[finding.level],
            )
            say(f"{finding.name}: {finding.detail}")
            if finding.remedy:
                say(f"      -> {finding.remedy}")
    sys.exit(code if any(finding.level == "fail" for finding in findings) else 0)
