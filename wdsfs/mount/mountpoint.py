"""Whether a set can be mounted at a place: what `mount` asks before it begins, and `doctor` shows.

Nothing is changed. What only fusermount3 refuses is for `doctor` to explain.
"""

from __future__ import annotations

import errno
import functools
import os
import shlex
import stat
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from wdsfs import host
from wdsfs.errors import MountError
from wdsfs.status import control
from wdsfs.trust import LINKS_MAX

DEAD_MOUNT_ERRNOS = frozenset((errno.ENOTCONN, errno.ECONNABORTED))


class Obstacle(NamedTuple):
    """Why nothing can or should be mounted at a place, and the way out, empty where there is none to type.

    `mounted` says that a mount of wdsfs is there and answers, which is as it should be.
    """

    text: str
    remedy: str = ""
    mounted: bool = False


def check_mountpoint(mountpoint: str, nonempty: bool, busy: Sequence[bytes]) -> None:
    """Raises MountError when nothing can or should be mounted there.

    `busy` are paths that the daemon itself needs: over one of them it would wait for itself for ever.
    """
    found = obstacle(mountpoint, nonempty, busy)
    if found is not None:
        raise MountError(f"{mountpoint}: {found.text}" + (f"; {found.remedy}" if found.remedy else ""))


def obstacle(mountpoint: str, nonempty: bool = False, busy: Sequence[bytes] = ()) -> Obstacle | None:
    """What stands in the way of a mount, None if nothing does. Raises MountError without a runtime directory."""
    quoted = shlex.quote(mountpoint)
    try:
        os.statvfs(mountpoint)  # stat alone can be answered by the kernel when a mount is dead
        found = os.stat(mountpoint)
    except FileNotFoundError:
        return Obstacle("no such directory", f"make it with: mkdir -p {quoted}")
    except OSError as error:
        if error.errno in DEAD_MOUNT_ERRNOS:
            return Obstacle("a dead mount is there", f"clear it with: wdsfs umount {quoted}")
        if error.errno == errno.EACCES:  # also what a FUSE mount of another user answers, even to root
            return Obstacle("cannot be entered, or is another user's FUSE mount", f"see: findmnt {quoted}")
        return Obstacle(error.strerror or str(error))
    if not stat.S_ISDIR(found.st_mode):
        return Obstacle("is no directory")
    mounted = host.mounted_at(mountpoint)
    daemon = None if mounted is None else control.find(mountpoint)
    if mounted is not None and (daemon is not None or mounted.fstype == "fuse.wdsfs"):
        who = f" (process {daemon.pid})" if daemon is not None else ""
        return Obstacle(f"wdsfs is mounted there already{who}", mounted=True)
    top = os.fsencode(mountpoint)
    for path in busy:
        for place in _way(os.path.abspath(path)):
            if place == top or place.startswith(top.rstrip(b"/") + b"/"):
                return Obstacle(f"the mount would hide {os.fsdecode(path)}, which it needs itself")
    if not nonempty and _has_entries(mountpoint):
        return Obstacle("is not empty", "-o nonempty mounts over what is there")
    return None


def _way(path: bytes) -> Iterator[bytes]:
    """Every directory and link that is passed on the way to a path: each is as needed as where it leads to."""
    place, ahead, links = b"/", path.split(b"/")[::-1], 0
    while ahead and links < LINKS_MAX:
        name = ahead.pop()
        if name in (b"", b"."):
            continue
        place = os.path.dirname(place) if name == b".." else os.path.join(place, name)
        yield place
        target = _link_target(place)
        if target is not None:
            links += 1
            place = b"/" if target.startswith(b"/") else os.path.dirname(place)
            ahead.extend(target.split(b"/")[::-1])


@functools.lru_cache(1024)
def _link_target(path: bytes) -> bytes | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def _has_entries(directory: str) -> bool:
    try:
        with os.scandir(directory) as entries:
            return next(entries, None) is not None
    except OSError:  # not readable: libfuse will say what is wrong with it
        return False
