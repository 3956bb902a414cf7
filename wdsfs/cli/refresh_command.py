"""The command `refresh`: has a mount look at its SHARDS again, and says what came and what went."""

from __future__ import annotations

import click

from wdsfs.cli import completion
from wdsfs.cli.options import json_option
from wdsfs.cli.output import say, write_json
from wdsfs.errors import counted


@click.command()
@click.argument("mountpoint", shell_complete=completion.mount_points)
@json_option
def refresh(mountpoint: str, as_json: bool) -> None:
    """Look again at the SHARDS of the mount at MOUNTPOINT: show new ones, and hide those that are gone.

    Returns when the mount shows what is there now. A mount with --follow looks by itself, too. One that the kernel
    serves gets a new image in the place of the old one; open files keep what they were. With --overlay no file
    may be open for writing then.

    \b
    Examples:
      wdsfs refresh /mnt/train
      wdsfs refresh --json /mnt/train
    """
    from wdsfs.cli.mount_command import image_maker
    from wdsfs.mount import search

    answer = search.named(mountpoint).refresh(image_maker())
    if as_json:
        write_json(answer)
        return
    for sign, key in (("+", "added"), ("-", "removed")):
        for one in answer[key]:
            say(f"{sign} {one['name']}  {one['shard']}")
    for one in answer.get("replaced", ()):
        say(f"~ {one}")
    for one in answer["left_out"]:
        say(f"not shown: {one['shard']}: {one['why']}", err=True)
    if answer["kept"]:
        say(f"kept: {answer['kept']}", err=True)
    changes = f"{len(answer['added']):,} added, {len(answer['removed']):,} removed"
    if answer.get("replaced"):
        changes += f", {len(answer['replaced']):,} replaced"
    say(f"{counted(answer['shards'], 'shard')}: {changes}")
