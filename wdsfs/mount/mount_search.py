"""Finds mounts: the live mount at a path or around it, all mounts; or the obstacle to a mount at a path.

`doctor.py` explains refusals of fusermount3.
"""

from __future__ import annotations

import errno
import functools
import os
import shlex
import stat
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from wdsfs import mount_table
from wdsfs.errors import DEAD_MOUNT_ERRNOS, MountError, UsageError
from wdsfs.mount.engines import find_kernel_mount, is_kernel_mount, kernel_engine
from wdsfs.mount_registry import (
    FUSE,
    KERNEL,
    Registration,
    canonical,
    find_registration,
    registration_of,
    registrations,
)
from wdsfs.trust import LINKS_MAX

if TYPE_CHECKING:
    from wdsfs.mount.live_mount import LiveMount
    from wdsfs.mount_table import MountPoint


def find_mount(path: str) -> LiveMount | None:
    """Return the mount of wdsfs at this path, alive or dead; None if there is none.

    Raises MountError, NotInstalled.
    """
    mountpoint = canonical(path)
    registration = registration_of(mountpoint, Registration)
    if registration is not None and registration.engine == FUSE:
        return _by_fuse(mountpoint, registration)
    if registration is not None:
        kernel_engine()  # only the wing recognizes a mount of the kernel's engine
    mounted = mount_table.mounted_at(mountpoint)
    return None if mounted is None else _mount_of(mounted)


def _mount_of(mounted: MountPoint) -> LiveMount | None:
    """Return the mount of wdsfs that the kernel lists here; None for any other mount."""
    mountpoint = os.fsdecode(mounted.path)
    if mounted.fstype == "fuse.wdsfs":
        daemon = registration_of(mountpoint, Registration)
        return _by_fuse(mountpoint, daemon if daemon is not None and daemon.engine == FUSE else None)
    return find_kernel_mount(mounted)


def _by_fuse(mountpoint: str, daemon: Registration | None) -> LiveMount:
    """Return the mount by FUSE at this path; `daemon` is None if it is unknown."""
    from wdsfs.mount.live_mount import FuseMount  # late: the process of a mount does not need it

    return FuseMount(mountpoint, daemon)


def live_mounts() -> list[LiveMount]:
    """Return the mounts of this user, also dead mounts, and all mounts of others that this user may read.

    Root gets all mounts. Raises MountError.
    """
    daemons = [daemon for daemon in registrations(Registration) if daemon.engine == FUSE]
    own: list[LiveMount] = [_by_fuse(daemon.mountpoint, daemon) for daemon in daemons]
    listed = [
        mounted for mounted in mount_table.mounts() if mounted.fstype != "fuse.wdsfs" or _is_foreign(mounted)
    ]
    return own + [mount for mount in map(_mount_of, listed) if mount is not None]


def _is_foreign(mounted: MountPoint) -> bool:
    """Return True for a mount by FUSE of another user that this user may read; root sees all."""
    user = os.geteuid()
    return mounted.user != user and (user == 0 or "allow_other" in mounted.super_options)


def ending_order() -> list[LiveMount]:
    """Return the mounts that this user can end, the latest first: it may lie in an earlier mount."""
    is_root = os.geteuid() == 0
    started = {
        mount: 0.0 if mount.registration is None else mount.registration.started
        for mount in live_mounts()
        if mount.registration is not None or (is_root and mount.engine == KERNEL)
    }
    return sorted(started, key=lambda mount: started[mount], reverse=True)


def require_mount(path: str, otherwise: str = "see: wdsfs status") -> LiveMount:
    """Return the mount of wdsfs at this path. Raises MountError for any other path, with its state.

    `otherwise` is the advice if nothing is mounted.
    """
    mount = find_mount(path)
    if mount is not None:
        return mount
    mountpoint, top = canonical(path), find_above(path)
    if top is not None:
        raise MountError(f"{mountpoint}: lies in a mount; name its MOUNTPOINT: {shlex.quote(top)}")
    mounted = mount_table.mounted_at(mountpoint)
    if mounted is not None:
        raise MountError(f"{mountpoint}: is a mount of type {mounted.fstype}, not a mount of wdsfs")
    raise MountError(f"{mountpoint}: no mount of wdsfs is there; {otherwise}")


def find_viewed(sources: Sequence[str]) -> LiveMount | None:
    """Return the named mount; None for SHARDS. Raises MountError for a path in a mount."""
    if len(sources) != 1 or not os.path.isdir(sources[0]):
        return None
    mount = find_mount(sources[0])
    if mount is None and find_above(sources[0]) is not None:
        return require_mount(sources[0])  # which raises the error
    if mount is None and _has_entries(sources[0]) is False:
        raise UsageError(f"{sources[0]}: is an empty directory, and nothing is mounted there")
    return mount


def find_around(path: str) -> LiveMount | None:
    """Return the mount of wdsfs in which a path lies, or whose top it is; None if there is no such mount."""
    mounted = mount_table.mount_of(path)
    return None if mounted is None else _mount_of(mounted)


def find_above(path: str) -> str | None:
    """Return the mount point of the mount of wdsfs in which a path lies, below its top; else None."""
    mount = find_around(path)
    return None if mount is None or mount.mountpoint == canonical(path) else mount.mountpoint


def require_writable(path: str) -> LiveMount:
    """Return the mount with an overlay at this path. Raises MountError."""
    mount = require_mount(path, "for an unmounted overlay name --overlay DIR")
    if mount.overlay is None:
        text = f"{path}: the mount has no overlay, so it has no changes"
        if mount.registration is not None and mount.registration.composition:
            options = mount.registration.composition
            text += f"; to write its view into new shards: wdsfs pack {options} -o PATTERN SHARDS"
        raise MountError(text)
    return mount


def path_below_top(path: str, mountpoint: str | None) -> bytes:
    """Return a path below the top of the tree, without a leading slash. Raises UsageError for a path outside.

    Semantics decision: a relative PATH begins in the working directory, if it then leads into the mount; else it
    begins at the mount's top, as in the output of `diff`.
    """
    if not path:
        raise UsageError("a PATH is empty; to undo every change type --all")
    inside = os.path.normpath(path)
    if mountpoint is not None:
        for top in (os.path.abspath(mountpoint), canonical(mountpoint)):
            whole = os.path.normpath(os.path.join(os.getcwd(), path))
            if whole == top or whole.startswith(top.rstrip("/") + "/"):
                inside = os.path.relpath(whole, top)
                break
    if os.path.isabs(inside) or inside == ".." or inside.startswith("../"):
        raise UsageError(f"{path}: is outside of {mountpoint or 'the overlay'}")
    return b"" if inside == "." else os.fsencode(inside)


# --- obstacles to a mount


class Obstacle(NamedTuple):
    """The reason against a mount at a place, and the remedy, or "" if there is none to type.

    `mounted`: a mount of wdsfs already answers there, so nothing is wrong.
    """

    text: str
    remedy: str = ""
    mounted: bool = False


def check_mountpoint(mountpoint: str, nonempty: bool, busy: Sequence[bytes]) -> None:
    """Raise MountError if there is an obstacle to a mount there.

    `busy` are paths that the daemon itself needs: with a mount over such a path it would wait for itself forever.
    """
    problem = obstacle(mountpoint, busy, nonempty=nonempty)
    if problem is not None:
        raise MountError(f"{mountpoint}: {problem.text}" + (f"; {problem.remedy}" if problem.remedy else ""))


def obstacle(mountpoint: str, busy: Sequence[bytes] = (), *, nonempty: bool = False) -> Obstacle | None:
    """Return the obstacle to a mount here, or None. Raises MountError without a runtime directory."""
    quoted = shlex.quote(mountpoint)
    try:
        os.statvfs(mountpoint)  # the kernel alone may answer a stat of a dead mount
        status = os.stat(mountpoint)
    except FileNotFoundError:
        return Obstacle("no such directory", f"make it with: mkdir -p {quoted}")
    except OSError as error:
        if error.errno in DEAD_MOUNT_ERRNOS:
            return Obstacle("a dead mount is there", f"clear it with: wdsfs umount {quoted}")
        if error.errno == errno.EACCES:  # also the answer of a FUSE mount of another user, even to root
            return Obstacle("cannot be entered, or is another user's FUSE mount", f"see: findmnt {quoted}")
        return Obstacle(error.strerror or str(error))
    if not stat.S_ISDIR(status.st_mode):
        return Obstacle("is not a directory")
    mounted = mount_table.mounted_at(mountpoint)
    registration = None if mounted is None else find_registration(mountpoint)
    is_ours = mounted is not None and (mounted.fstype == "fuse.wdsfs" or is_kernel_mount(mounted))
    if is_ours or registration is not None:
        who = "" if registration is None else f" (process {registration.pid})"
        remedy = f"end that mount with: wdsfs umount {quoted}; or name another directory"
        return Obstacle(f"wdsfs is mounted there already{who}", remedy, mounted=True)
    top = os.fsencode(mountpoint)
    below = top.rstrip(b"/") + b"/"
    for path, place in _places_on_the_way(busy):
        if place.startswith(below) or place == top:
            return Obstacle(f"the mount would hide {os.fsdecode(path)}, which wdsfs needs")
    if mountpoint == "/":
        return Obstacle("is the root directory", "make a directory for the mount, such as /mnt/train")
    if not nonempty and _has_entries(mountpoint):
        return Obstacle(
            "is not empty", "name an empty directory, or type -o nonempty, which hides the files there"
        )
    return None


def _places_on_the_way(paths: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Yield each path with every directory and link on the way to it; the way to a directory only once."""
    parents: dict[bytes, bytes] = {}
    for path in paths:
        parent, _, name = path.rpartition(b"/")
        if name in (b"", b".", b"..") or not path.startswith(b"/"):
            path = os.path.abspath(path)
            parent, _, name = path.rpartition(b"/")
        if parent not in parents:
            parents[parent] = whole = os.path.abspath(parent or b"/")
            for place in _way(whole):
                parents[parent] = place
                yield path, place
        if _read_link(path) is None:
            yield path, parents[parent] + b"/" + name
        else:
            yield from ((path, place) for place in _way(path))


def _way(path: bytes) -> Iterator[bytes]:
    """Yield every directory and link on the way to a path: the path needs each of them.

    Unlike the walk of `trust`, this walk opens no step and refuses none: a step may be missing or private.
    """
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


def _read_link(path: bytes) -> bytes | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


_link_target = functools.lru_cache(1024)(_read_link)  # many ways share directories


def _has_entries(directory: str) -> bool | None:
    """Return True if a directory has entries; None if it cannot be read, of which libfuse reports the reason."""
    try:
        with os.scandir(directory) as entries:
            return any(True for _ in entries)
    except OSError:
        return None
