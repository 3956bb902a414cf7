"""Ends all mounts of a file system: at its mount point, bind mounts of it, and those in other mount namespaces.

A container has a mount namespace of its own, in which a directory that it was given is a mount that stays when
that of the host ends. Only root can enter the namespaces of others; one without a process is not found.
"""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from wdsfs import mount_table
from wdsfs.mount_table import MountPoint


class FileSystem(NamedTuple):
    """A file system that is mounted, as the list of mounts has it. A device number alone may be given to another
    one when the last mount has ended."""

    device: int
    fstype: str
    source: bytes


def at(mountpoint: str) -> FileSystem | None:
    """What is mounted at this path."""
    found = mount_table.mounted_at(mountpoint)
    return None if found is None else _of(found)


def _of(mount: MountPoint) -> FileSystem:
    return FileSystem(mount.device, mount.fstype, mount.source)


def detach_everywhere(wanted: FileSystem) -> None:
    """Detach every mount of this file system, as far as they can be found. Whatever is open of it stays open."""
    _detach_here(wanted, mount_table.mounts())
    for process in mount_table.holders(wanted.device):
        with contextlib.suppress(OSError):  # no memory for a process: who writes waits for the others
            pid = os.fork()
            if not pid:
                _detach_there(process, wanted)
            os.waitpid(pid, 0)


def _detach_here(wanted: FileSystem, mounts: list[MountPoint]) -> None:
    newest = {one.path: one for one in mounts}
    for one in reversed(mounts):
        if _of(one) == wanted and newest[one.path] is one:  # else another one lies above it, and would be ended
            with contextlib.suppress(OSError):  # it has just ended, or lies below another mount
                mount_table.detach(os.fsdecode(one.path))


def _detach_there(process: int, wanted: FileSystem) -> None:
    """In a forked process: enter the namespace of that process, detach, and end."""
    try:
        proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)  # there may be none in the namespace
        mount_table.enter_namespace(os.open(f"/proc/{process}/ns/mnt", os.O_RDONLY))
        with open(os.open("self/mountinfo", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc), "rb") as file:
            mounts = mount_table.parse_mountinfo(file.read())  # as they are seen from its root
        _detach_here(wanted, mounts)
    finally:
        os._exit(0)
