"""The command `doctor`: whether this machine can mount. What is looked at is `doctor.py`."""

from __future__ import annotations

import json
import sys

import click

from wdsfs.cli.console import json_option
from wdsfs.names import shown


@click.command()
@click.argument("mountpoint", required=False)
@click.option("--index-dir", type=click.Path(file_okay=False), envvar="WDSFS_INDEX_DIR", help="Look at this one.")
@json_option
def doctor(mountpoint: str | None, index_dir: str | None, as_json: bool) -> None:
    """Tell whether this machine can mount, and what to type if not.

    \b
    Example:
      wdsfs doctor /mnt/train
    """
    from dataclasses import asdict

    from wdsfs.cli.doctor import diagnose

    findings = diagnose(mountpoint, index_dir)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings]))
    else:
        for finding in findings:
            click.secho(
                f"{finding.level:<5}",
                nl=False,
                fg={"ok": "green", "warn": "yellow", "fail": "red"}[finding.level],
            )
            click.echo(shown(f"{finding.name}: {finding.detail}"))
            if finding.remedy:
                click.echo(shown(f"      -> {finding.remedy}"))
    sys.exit(5 if any(finding.level == "fail" for finding in findings) else 0)
