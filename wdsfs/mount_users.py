"""The processes that keep a mount busy, or see it in a mount table of their own.

Only /proc is read: a mount that hangs is not asked. Standard library only; nothing is remembered between calls.
"""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from wdsfs.mount_table import lies_in, parse_mountinfo


def holders(device: int) -> list[int]:
    """Return processes that still see a file system (`st_dev`) in a mount table of their own: one per table.

    A container, or another process that unshares the mount table, keeps the mounts of that moment until it ends.
    Only root sees the processes of other users.
    """
    pids: dict[int, int] = {os.stat("/proc/self/ns/mnt").st_ino: 0}
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            table = os.stat(f"/proc/{process}/ns/mnt").st_ino
            if table not in pids:
                with open(f"/proc/{process}/mountinfo", "rb") as file:
                    sees = any(mount.device == device for mount in parse_mountinfo(file.read()))
                pids[table] = int(process) if sees else 0
    return [pid for pid in pids.values() if pid]


class Use(NamedTuple):
    """A process that uses a mount: its number, its command, and what it has there."""

    pid: int
    command: str
    what: str


def users(mountpoint: bytes) -> list[Use]:
    """Return the processes that keep a mount busy. Of those of other users only root sees what they use.

    Only the texts of links are read: a mount that hangs is not asked.
    """
    uses = []
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            what = _use(f"/proc/{pid}", mountpoint)
            if what:
                with open(f"/proc/{pid}/comm", errors="replace") as file:
                    uses.append(Use(pid, file.read().strip(), what))
    return uses


def _use(process: str, mountpoint: bytes) -> str:
    """Return in words why a process keeps a mount busy; "" if it does not."""
    for link, what in (("cwd", "its working directory"), ("root", "its root directory"), ("exe", "its program")):
        if _leads_into(f"{process}/{link}", mountpoint):
            return what
    for number in os.listdir(f"{process}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if _leads_into(f"{process}/fd/{number}", mountpoint):
                return "an open file"
    with open(f"{process}/maps", "rb") as file:
        places = (line.split(b" ", 5)[5].strip() for line in file if line.count(b" ") >= 5)
        return "a mapped file" if any(lies_in(place, mountpoint) for place in places) else ""


def _leads_into(link: str, mountpoint: bytes) -> bool:
    return lies_in(os.readlink(os.fsencode(link)).removesuffix(b" (deleted)"), mountpoint)
