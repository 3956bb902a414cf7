"""The command `umount`: ends one mount, or all."""

from __future__ import annotations

import logging
import os
import sys

import click

from wdsfs.cli import completion
from wdsfs.cli.output import say
from wdsfs.errors import UsageError

log = logging.getLogger("wdsfs")


@click.command()
@click.argument("mountpoints", metavar="MOUNTPOINT...", nargs=-1, shell_complete=completion.mount_points)
@click.option(
    "-a", "--all", "everything", is_flag=True, help="End every mount that `wdsfs status` shows as yours."
)
@click.option("-l", "--lazy", is_flag=True, help="Detach now, end when the last user is gone.")
def umount(mountpoints: tuple[str, ...], everything: bool, lazy: bool) -> None:
    """End the mount at MOUNTPOINT, dead ones included. Returns when its daemon is gone.

    `wdsfs unmount` is the same.

    \b
    Examples:
      wdsfs umount /mnt/train
      wdsfs umount --all
    """
    from wdsfs.errors import MountError
    from wdsfs.mount import search
    from wdsfs.mount_registry import canonical

    if everything == bool(mountpoints):
        raise UsageError("name a MOUNTPOINT, or --all" if not everything else "--all takes no MOUNTPOINT")
    if everything:
        mountpoints = tuple(mount.mountpoint for mount in search.ending_order())
        if not mountpoints:
            say("no wdsfs mounts")
    # This process does not keep the mount busy that it is typed in.
    mountpoints = tuple(map(canonical, mountpoints))
    os.chdir("/")
    code = 0
    for mountpoint in mountpoints:
        try:
            search.named(mountpoint).end(lazy)
        except MountError as error:  # the others are ended all the same
            log.error("%s", error)
            code = error.exit_code
        else:
            if everything:
                say(mountpoint)
    sys.exit(code)
