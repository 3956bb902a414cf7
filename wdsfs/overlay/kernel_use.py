"""Asks the kernel whether an upper is in use by its own overlayfs, which knows nothing of our lock.

Such a mount outlives the process that made it, and, detached but with files open, has no place in the list of
mounts. The kernel marks the upper of every overlay that is there, and refuses it to a second one that wants it for
itself (`index=on`). So it is asked for such a one, with directories that it refuses right after that check: an
upper cannot be its own work directory. Nothing is made by that.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from wdsfs import mount_table

_ESCAPE = re.compile(r"\\(.)", re.DOTALL)


def is_used(upper: Path) -> bool:
    """True if an overlay of the kernel's writes into this directory. Who is not root learns of visible mounts."""
    if os.geteuid() != 0:
        return mounted_on(upper) is not None
    place = escaped(upper)
    wanted = [(b"lowerdir", b"/"), (b"upperdir", place), (b"workdir", place), (b"index", b"on")]
    try:
        mount_table.attempt(b"overlay", wanted)
    except OSError as error:
        return error.errno == errno.EBUSY or mounted_on(upper) is not None
    return False


def is_served_at(upper: Path, mountpoint: str) -> bool:
    """True if what is mounted at this path is the kernel's overlayfs over this upper."""
    mounted = mount_table.mounted_at(mountpoint)
    found = None if mounted is None else upper_of(mounted)
    return found is not None and os.path.realpath(found) == os.path.realpath(upper)


def mounted_on(upper: Path) -> mount_table.MountPoint | None:
    """The mount of the kernel's overlayfs over this upper, as far as this process sees it."""
    wanted = os.path.realpath(upper)
    for one in mount_table.mounts():
        found = upper_of(one)
        if found is not None and os.path.realpath(found) == wanted:
            return one
    return None


def upper_of(mount: mount_table.MountPoint) -> str | None:
    """The upper of a mount of the kernel's overlayfs; None for all other mounts."""
    if mount.fstype != "overlay":
        return None
    found = next((one for one in mount.super_options if one.startswith("upperdir=")), None)
    return None if found is None else _ESCAPE.sub(r"\1", found.partition("=")[2])  # as it was given


def escaped(path: Path) -> bytes:
    """A path as overlayfs takes it: it reads a backslash as an escape."""
    return os.fsencode(path).replace(b"\\", b"\\\\")
