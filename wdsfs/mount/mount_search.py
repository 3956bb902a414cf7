"""Finds live mounts: at a path, around a path, or all, of both engines."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from wdsfs import mount_table
from wdsfs.errors import MountError, UsageError
from wdsfs.mount.engines import find_kernel_mount, kernel_engine
from wdsfs.mount.live_fuse import FuseMount
from wdsfs.mount.live_mount import LiveMount
from wdsfs.mount_registry import FUSE, KERNEL, Registration, canonical, registration_of, registrations

if TYPE_CHECKING:
    from wdsfs.mount_table import MountPoint


def find_mount(path: str) -> LiveMount | None:
    """Return the mount of wdsfs at this path, alive or dead; None if there is none.

    Raises MountError, NotInstalled.
    """
    mountpoint = canonical(path)
    registration = registration_of(mountpoint, Registration)
    if registration is not None and registration.engine == FUSE:
        return FuseMount(mountpoint, registration)
    if registration is not None:
        kernel_engine()  # a mount of the kernel's engine cannot be told without it
    mounted = mount_table.mounted_at(mountpoint)
    return None if mounted is None else _mount_of(mounted)


def _mount_of(mounted: MountPoint) -> LiveMount | None:
    """Return the mount of wdsfs that the kernel lists here; None for any other mount."""
    mountpoint = os.fsdecode(mounted.path)
    if mounted.fstype == "fuse.wdsfs":
        daemon = registration_of(mountpoint, Registration)
        return FuseMount(mountpoint, daemon if daemon is not None and daemon.engine == FUSE else None)
    return find_kernel_mount(mounted)


def live_mounts() -> list[LiveMount]:
    """Return the mounts of this user, those that are dead among them, and all others that this user may read.

    Root gets all mounts. Raises MountError.
    """
    daemons = [daemon for daemon in registrations(Registration) if daemon.engine == FUSE]
    own: list[LiveMount] = [FuseMount(daemon.mountpoint, daemon) for daemon in daemons]
    listed = [
        mounted for mounted in mount_table.mounts() if mounted.fstype != "fuse.wdsfs" or _is_foreign(mounted)
    ]
    return own + [mount for mount in map(_mount_of, listed) if mount is not None]


def _is_foreign(mounted: MountPoint) -> bool:
    """Return True for a mount by FUSE of another user that this one may read; root is shown the others, too."""
    user = os.geteuid()
    return mounted.user != user and (user == 0 or "allow_other" in mounted.super_options)


def ending_order() -> list[LiveMount]:
    """Return the mounts that this user can end, the latest first: it may lie in another one."""
    is_root = os.geteuid() == 0
    started = {
        mount: 0.0 if mount.registration is None else mount.registration.started
        for mount in live_mounts()
        if mount.registration is not None or (is_root and mount.engine == KERNEL)
    }
    return sorted(started, key=lambda mount: started[mount], reverse=True)


def require_mount(path: str, otherwise: str = "see: wdsfs status") -> LiveMount:
    """Return the mount of wdsfs at this path. Raises MountError, which says what is there, for any other path.

    `otherwise` is the advice where nothing is mounted.
    """
    mount = find_mount(path)
    if mount is not None:
        return mount
    mountpoint, top = canonical(path), find_above(path)
    if top is not None:
        raise MountError(f"{mountpoint}: lies in a mount; name its MOUNTPOINT: {shlex.quote(top)}")
    mounted = mount_table.mounted_at(mountpoint)
    if mounted is not None:
        raise MountError(f"{mountpoint}: that is a mount of type {mounted.fstype}, not one of wdsfs")
    raise MountError(f"{mountpoint}: no mount of wdsfs is there; {otherwise}")


def find_viewed(sources: Sequence[str]) -> LiveMount | None:
    """Return the mount that is named; None for SHARDS. Raises MountError for a path in a mount."""
    if len(sources) != 1 or not os.path.isdir(sources[0]):
        return None
    mount = find_mount(sources[0])
    if mount is None and find_above(sources[0]) is not None:
        return require_mount(sources[0])  # which says so
    if mount is None and _is_empty(sources[0]):
        raise UsageError(f"{sources[0]}: is an empty directory, and nothing is mounted there")
    return mount


def _is_empty(directory: str) -> bool:
    try:
        return not os.listdir(directory)
    except OSError:
        return False


def find_around(path: str) -> LiveMount | None:
    """Return the mount of wdsfs that a path lies in, its top among them; None if it lies in none."""
    mounted = mount_table.mount_of(path)
    return None if mounted is None else _mount_of(mounted)


def find_above(path: str) -> str | None:
    """Return the mount point of the mount of wdsfs that a path lies in, below its top; None if it lies in none."""
    mount = find_around(path)
    return None if mount is None or mount.mountpoint == canonical(path) else mount.mountpoint


def require_writable(path: str) -> LiveMount:
    """Return the mount with an overlay at this path. Raises MountError."""
    mount = require_mount(path, "for changes that are not mounted name --overlay DIR")
    if mount.overlay is None:
        text = f"{path}: that mount has no overlay, so nothing in it was changed"
        if mount.registration is not None and mount.registration.composition:
            options = mount.registration.composition
            text += f"; to write new shards of what it shows: wdsfs pack {options} -o PATTERN SHARDS"
        raise MountError(text)
    return mount


def path_below_top(path: str, mountpoint: str | None) -> bytes:
    """Return a path below the top of the tree, without a leading slash. Raises UsageError for a path outside.

    Semantics decision: a relative PATH is one from the working directory, if that leads into the mount; else it is
    one from the mount's top, as `diff` shows them.
    """
    if not path:
        raise UsageError("a PATH is empty; to undo every change say --all")
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
