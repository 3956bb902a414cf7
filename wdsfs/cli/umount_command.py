"""The command `umount`: ends one mount, or all. What it does is `mount/unmount.py`."""

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
    from wdsfs.kernel.manifest import mounted_images
    from wdsfs.mount.unmount import unmount
    from wdsfs.status import control

    if everything == bool(mountpoints):
        raise UsageError("name a MOUNTPOINT, or --all" if not everything else "--all takes no MOUNTPOINT")
    if everything:  # the latest first: it may lie in another one
        found = sorted(control.daemons(), key=lambda daemon: daemon.started, reverse=True)
        images = [os.fsdecode(one.mount.path) for one in mounted_images()][::-1] if os.geteuid() == 0 else []
        mountpoints = (*(daemon.mountpoint for daemon in found), *images)
        if not mountpoints:
            say("no wdsfs mounts")
    # This process does not keep the mount busy that it is typed in.
    mountpoints = tuple(map(control.canonical, mountpoints))
    os.chdir("/")
    code = 0
    for mountpoint in mountpoints:
        try:
            unmount(mountpoint, lazy)
        except MountError as error:  # the others are ended all the same
            log.error("%s", error)
            code = error.exit_code
        else:
            if everything:
                say(mountpoint)
    sys.exit(code)
