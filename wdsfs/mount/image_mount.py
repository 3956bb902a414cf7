"""The mount of an image: options, checks of mount point and shards, the kernel's mount, and its guard.

The kernel serves the mount. The one process that stays, the guard (`guard.py`), serves nothing: when it dies the
mount goes on, unguarded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from wdsfs import host, mount_registry, mount_table
from wdsfs.errors import MountError, StaleShard, UsageError, several
from wdsfs.kernel import devices, erofs_mount, manifest
from wdsfs.kernel.devices import HeldShards, OpenDevice, check_devices, open_image, raise_file_limit
from wdsfs.kernel.manifest import Manifest, identity_of, image_of, is_mounted_at
from wdsfs.mount import daemon
from wdsfs.mount.daemon import open_log
from wdsfs.mount.guard import Guard, Guarded, MadeBy, guard_of
from wdsfs.mount.mountpoint import check_mountpoint, parse_options

if TYPE_CHECKING:
    from wdsfs.kernel.overlayfs import OverlayOver
    from wdsfs.overlay.overlay_directory import OverlayDirectory
    from wdsfs.tree.local_copies import LocalCopies

log = logging.getLogger(__name__)

# Options of `-o` that need nothing: they say what holds for every mount of an image.
_HOLD_ANYWAY = frozenset(
    (
        *("ro", "allow_other", "allow_root", "default_permissions", "nodev", "nosuid", "exec"),
        *("async", "atime"),
    )
)
_HOLD_UNLESS_WRITABLE = frozenset(("sync", "dirsync"))
_ADDED = {"noexec": mount_table.NO_PROGRAMS, "noatime": mount_table.NO_ACCESS_TIMES}
_TAKEN_AWAY = {"suid": mount_table.NO_SUID, "dev": mount_table.NO_DEVICES}
_NAMES = ("fsname=", "subtype=")  # for the mount table, in which the image is the source
_OWNERS = ("uid", "gid", "umask")


@dataclass(slots=True)
class ImageMount:
    """What to mount: the image and the mount point, absolute; relative paths of shards are below `base`.

    `options` are those of `-o`; `trusting`: shards may have other times, and lie where others can change them.
    `made` is the command, for `wdsfs refresh`. `overlay` is what is to be above it. `copies` are open until the
    mount has them.
    """

    image: str
    mountpoint: str
    base: str
    options: list[str] = field(default_factory=list)
    trusting: bool = False
    made: MadeBy | None = None
    overlay: OverlayOver | None = None
    copies: LocalCopies | None = None


class CannotServe(Exception):
    """Why the kernel cannot serve a set, as that turns out when its image is made."""


class Unguarded(NamedTuple):
    """A mount of an image whose guard is gone; `known` is what that one has left, if anything.

    With an `overlay` above the image there is that, and it is of this very mount.
    """

    known: Guarded | None
    overlay: OverlayDirectory | None = None

    def shows(self, image: str, mountpoint: str) -> bool:
        """True if this image is what is mounted, as far as can be known."""
        identity = identity_of(image)
        found = None if self.overlay is not None else is_mounted_at(identity, mountpoint)
        return found if found is not None else self.known is not None and self.known.identity == identity


def unguarded(mountpoint: str, overlay: Path | None) -> Unguarded | None:
    """What is mounted at this path (canonical), if that is an image without a living guard.

    With an `overlay` (a directory) only if that is above the image, and the guard has left a sign: the kernel does
    not say what is below an overlay.
    """
    mounted = mount_table.mounted_at(mountpoint)
    known = guard_of(mountpoint)
    if mounted is None or image_of(mounted) is None or (known is not None and known.alive):
        return None
    if overlay is None:
        return Unguarded(known) if mounted.fstype == "erofs" else None
    from wdsfs.overlay.overlay_directory import OverlayDirectory, is_served_at

    place = OverlayDirectory(overlay)
    is_ours = known is not None and known.overlay is not None and known.device == mounted.device
    return Unguarded(known, place) if is_ours and is_served_at(place.upper, mountpoint) else None


def mount_in_background(wanted: ImageMount) -> int:
    """Mount an image and leave its guard; returns an exit code. Raises UsageError."""
    _attributes(wanted)
    wanted.mountpoint = mount_registry.canonical(wanted.mountpoint)
    return daemon.fork(
        wanted.mountpoint, lambda leave, ready: serve(wanted, open_log(wanted.mountpoint), leave, ready)
    )


def mount_in_front(wanted: ImageMount) -> int:
    """Mount an image and guard it; returns an exit code when the mount has ended. Raises UsageError."""
    _attributes(wanted)
    wanted.mountpoint = mount_registry.canonical(wanted.mountpoint)
    return daemon.guarded(lambda: serve(wanted, None, lambda _: None, lambda: daemon.notify_systemd("READY=1")))


def serve(
    wanted: ImageMount, log_file: Path | None, leave: Callable[[Path | None], None], ready: Callable[[], None]
) -> None:
    """Mount an image and guard it until the mount ends.

    `leave` and `ready` are as in `daemon.fork`. Raises UsageError, MountError, and what `open_devices` raises.
    """
    host.runtime_dir()  # an error of it is to be known before the mount
    held = HeldShards(open_image(wanted.image))
    guard = Guard(held, wanted.mountpoint, log_file, wanted.made, wanted.overlay)
    try:
        _begin(wanted, guard, held)
        leave(log_file)
        with guard.registered():
            ready()
            guard.run()
    finally:
        guard.close()


def _begin(wanted: ImageMount, guard: Guard, held: HeldShards) -> None:
    """Have the kernel mount the image that `guard` holds, or adopt the mount that is there. Raises as `serve`."""
    attributes, nonempty = _attributes(wanted)
    found = manifest.read(wanted.image)
    if host.kernel_version() < host.kernel_version(found.since):
        log.warning(
            "%s: was made for Linux %s; with this kernel its files have the time 1970-01-01. Without --linux an "
            "image has all times",
            *(wanted.image, found.since),
        )
    raise_file_limit(len(found.devices) + (0 if wanted.copies is None else len(wanted.copies.files)))
    there = unguarded(wanted.mountpoint, None if wanted.overlay is None else wanted.overlay.directory)
    is_shown = there is not None and there.shows(wanted.image, wanted.mountpoint)
    try:
        held.open_shards(found, wanted.base, wanted.trusting)
    except StaleShard:
        if there is not None and is_shown:
            _end_if_written(wanted, found, there)
        raise
    if there is None:
        needed = [*_own_paths(wanted), *(one.file for one in held.devices)]
        check_mountpoint(wanted.mountpoint, nonempty, needed)
    if not wanted.trusting:
        _refuse_network([*held.devices, held.image])
    guard.take(there is not None)
    check_devices(held.devices, found, wanted.trusting)  # from now on nobody can write unnoticed
    if there is not None and is_shown:
        guard.adopt(attributes, there.known)
    elif there is not None and there.overlay is not None:
        from wdsfs.kernel.overlayfs import frozen

        with frozen(wanted.mountpoint, there.overlay):
            guard.mount(attributes, instead=True)
    else:
        guard.mount(attributes, instead=there is not None)
    if wanted.copies is not None:
        wanted.copies.close()  # the mount holds them now


def _end_if_written(wanted: ImageMount, found: Manifest, there: Unguarded) -> None:
    """End a mount that was not guarded, if a shard of it is not as it was: readers may get a mix.

    One that was replaced by another file, as far as its guard has left a sign of that, is whole in the mount.
    """
    replaced = set(() if there.known is None else there.known.replaced())
    changed = []
    for one in found.devices:
        if one.copy is not None:
            continue  # one that was written has been made anew since, and is in another image
        path = os.path.join(wanted.base, one.path)
        try:
            now = os.stat(path)
        except OSError:
            continue  # removed
        is_same = now.st_size == one.size and (wanted.trusting or now.st_mtime_ns == one.mtime_ns)
        if not is_same and path not in replaced:
            changed.append(path)
    shown = erofs_mount.at(wanted.mountpoint)
    if changed and shown is not None:
        erofs_mount.detach_everywhere(shown)
        log.error(
            "%s: is ended, because shards were written while it had no guard: %s",
            wanted.mountpoint,
            several(changed),
        )


def end_if_damaged(mountpoint: str, overlay: Path | None) -> None:
    """End the mount at this path if it has no guard, and a copy that it reads has been damaged meanwhile.

    `overlay` is as in `unguarded`.
    """
    path = mount_registry.canonical(mountpoint)
    there, mounted = unguarded(path, overlay), mount_table.mounted_at(path)
    image = None if there is None or mounted is None else image_of(mounted)
    if there is None or image is None or not there.shows(os.fsdecode(image), path):
        return
    damaged = [one.path for one in manifest.read(image).devices if one.copy and devices.is_damaged(one.copy)]
    shown = erofs_mount.at(path)
    if damaged and shown is not None:
        erofs_mount.detach_everywhere(shown)
        log.error("%s: is ended, because it had no guard, and what it read is damaged: %s", path, several(damaged))


def _own_paths(wanted: ImageMount) -> list[bytes]:
    """What the mount itself needs besides the shards. Raises MountError for a mount point in the overlay."""
    if wanted.overlay is None:
        return [os.fsencode(wanted.image)]
    directory = wanted.overlay.directory
    if directory.resolve() in Path(wanted.mountpoint).parents:
        raise MountError(f"{wanted.mountpoint}: lies in the overlay {directory}; take another directory")
    return [os.fsencode(wanted.image), os.fsencode(directory)]


def _refuse_network(devices: Sequence[OpenDevice]) -> None:
    """Raise MountError for files that another machine can change unnoticed."""
    found = mount_table.on_network(one.file for one in devices)
    if found is not None:
        path, fstype = found
        raise MountError(
            f"{os.fsdecode(path)}: lies on {fstype}, where another machine can write it without this one noticing."
            " Mount with --trust-shards if nobody will; or mount the shards by FUSE"
        )


def _attributes(wanted: ImageMount) -> tuple[int, bool]:
    """The attributes of the mount, and if the mount point may have entries. Raises UsageError."""
    parsed = parse_options(wanted.options, wanted.overlay is not None)
    given = {option.partition("=")[0] for option in ",".join(wanted.options).split(",")}
    if not given.isdisjoint(_OWNERS):
        raise UsageError("-o uid, gid and umask are for FUSE; of an image they are options of: wdsfs image")
    attributes = mount_table.NO_SUID | mount_table.NO_DEVICES
    if wanted.overlay is None or "ro" in parsed.fuse:
        attributes |= mount_table.READ_ONLY
    for option in sorted(parsed.fuse):
        attributes = (attributes | _ADDED.get(option, 0)) & ~_TAKEN_AWAY.get(option, 0)
        is_known = option in _HOLD_ANYWAY or option in _ADDED or option in _TAKEN_AWAY
        if option in _HOLD_UNLESS_WRITABLE and wanted.overlay is not None:
            raise UsageError(f"-o {option}: the kernel's overlay has no such option; it is for FUSE")
        if not is_known and option not in _HOLD_UNLESS_WRITABLE and not option.startswith(_NAMES):
            raise UsageError(f"-o {option}: not for an image, which has no daemon; see docs/engines.md")
    return attributes, parsed.nonempty
