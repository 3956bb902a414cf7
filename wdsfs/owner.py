"""The owner (uid, gid) of the files that a mount or an image shows."""

from __future__ import annotations

from typing import NamedTuple


class Owner(NamedTuple):
    """Owner and group of all files and directories, and the umask for their modes 0444 and 0555."""

    uid: int = 0
    gid: int = 0
    umask: int = 0
