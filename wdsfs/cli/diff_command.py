"""The command `diff`: what an overlay changes. What that is, is decided in `packing/diff.py`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from wdsfs.cli.options import index_options, json_option
from wdsfs.cli.output import say, write_json
from wdsfs.cli.overlay_report import changes_json, counts_line, show_changes
from wdsfs.cli.overlay_session import Wanted, overlay_session, unfinished_advice, wanted_options
from wdsfs.cli.process import disk_errors

if TYPE_CHECKING:
    from wdsfs.tree.opening_options import Opening


@click.command()
@wanted_options
@json_option
@index_options
def diff(wanted: Wanted, as_json: bool, opening: Opening) -> None:
    """Show what was changed in a writable mount, or with --overlay DIR in SHARDS: samples added, changed, removed
    and renamed.

    A line for a changed sample ends with its extensions: +added ~changed -removed =same content with another time
    ("time only" if that is all). Files that cannot be packed are listed with the reason, and so are conflicts,
    which stop every commit, even one with --leave-out. If there are any, the exit code is 1. Files that programs
    leave behind (`.cls.swp`, `cls~`, `.DS_Store`) are listed apart, and no commit packs them without
    --with-leavings.

    \b
    Examples:
      wdsfs diff /mnt/train
      wdsfs diff --overlay edits 'train-{000000..000999}.tar'
    """
    from wdsfs.overlay.overlay_directory import unfinished

    with disk_errors(), overlay_session(wanted, opening, freeze=False) as session:
        if unfinished(session.place):
            raise unfinished_advice(wanted)
        found = session.changes()
    if as_json:
        write_json(changes_json(found))
    else:
        show_changes(found)
    say(counts_line(found), err=True)
    sys.exit(1 if found.unpackable or found.conflicts else 0)
