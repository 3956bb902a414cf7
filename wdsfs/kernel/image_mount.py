"""Mounts an image and starts its guard; adopts a mount without a guard, or ends one that cannot be trusted.

The kernel serves the mount. The one process that stays, the guard (`guard.py`), serves nothing: when it dies the
mount goes on, unguarded. The process, its log, and options of `-o` are for `mount/image_session.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from wdsfs import host, mount_registry, mount_table
from wdsfs.errors import MountError, StaleShard, several
from wdsfs.kernel import devices, erofs_mount, manifest
from wdsfs.kernel.devices import HeldShards, OpenDevice, check_devices, open_image, require_file_limit
from wdsfs.kernel.guard import Guard, Guarded, guard_of
from wdsfs.kernel.manifest import Manifest, identity_of, image_of, is_mounted_at
from wdsfs.kernel.set_image import ServedSet, find_or_make
from wdsfs.tree.set_options import Owner

log = logging.getLogger(__name__)

Check = Callable[[Sequence[bytes]], None]  # of the mount point, given the paths that the mount needs


@dataclass(slots=True)
class ImageMount:
    """The options of a mount: image and mount point, both absolute; relative paths of shards are below `base`.

    `options` are those of `-o`; `trusting`: shards may have other times, and lie where others can change them.
    `specs` are SHARDS, or the image. `cached` is a descriptor of an image in the cache, -1 for any other: an
    image is not evicted while this process or the guard has it open. `removes_mountpoint`: the directory
    of the mount point is removed when the mount ends.
    """

    image: str
    mountpoint: str
    base: str
    specs: Sequence[str]
    options: list[str] = field(default_factory=list)
    trusting: bool = False
    cached: int = -1
    removes_mountpoint: bool = False


def mount_of_set(
    served: ServedSet,
    specs: Sequence[str],
    mountpoint: str,
    options: Sequence[str],
    trusting: bool,
    owner: Owner,
    private: bool,
) -> ImageMount:
    """Make the image of a set, unless it is there, and return its mount at this path (canonical).

    `options` are those of `-o`; `owner` and `private` follow from them. Raises CannotServe, ImageError,
    ShardErrors, UsageError.
    """
    image, fd = find_or_make(served, served.options(owner, private))
    return ImageMount(image, mountpoint, "/", specs, list(options), trusting, fd)


class Unguarded(NamedTuple):
    """A mount of the image at the path `image` whose guard is gone.

    `known` is the registration that the guard left, if any.
    """

    image: str
    known: Guarded | None

    def shows(self, image: str, mountpoint: str) -> bool:
        """Return True if this image is what is mounted, as far as can be known."""
        identity = identity_of(image)
        shown = is_mounted_at(identity, mountpoint)
        return shown if shown is not None else self.known is not None and self.known.identity == identity


def unguarded(mountpoint: str) -> Unguarded | None:
    """Return the mount at this path (canonical) if that is an image without a living guard."""
    mounted = mount_table.mounted_at(mountpoint)
    image = None if mounted is None or mounted.fstype != "erofs" else image_of(mounted)
    known = guard_of(mountpoint)
    if image is None or (known is not None and known.alive):
        return None
    return Unguarded(os.fsdecode(image), known)


def mount_and_guard(
    mount: ImageMount,
    attributes: int,
    check: Check,
    log_file: Path | None,
    leave: Callable[[Path | None], None],
    ready: Callable[[], None],
) -> None:
    """Mount an image with these attributes and guard it until the mount ends.

    `check` raises MountError for a mount point that cannot be used. `leave` and `ready` are as in
    `mount/daemon.fork`. Raises MountError, and what `open_devices` raises.
    """
    host.runtime_dir()  # its errors have to show before the mount
    held = HeldShards(open_image(mount.image))
    guard = Guard(held, mount.mountpoint, check, log_file, mount.specs)
    try:
        _begin(mount, attributes, check, guard, held)
        leave(log_file)
        with guard.registered():
            ready()
            guard.run()
            if mount.removes_mountpoint:
                with contextlib.suppress(OSError):  # somebody has put something there
                    os.rmdir(mount.mountpoint)
    finally:
        guard.close()


def _begin(mount: ImageMount, attributes: int, check: Check, guard: Guard, held: HeldShards) -> None:
    """Mount the image that `guard` holds, or adopt the mount that is there. Raises as `mount_and_guard`."""
    about = manifest.read_manifest(mount.image)
    if host.kernel_version() < host.kernel_version(about.since):
        log.warning(
            "%s: was made for Linux %s; with this older kernel its files have the time 1970-01-01. Make the image "
            "again: wdsfs image",
            *(mount.image, about.since),
        )
    require_file_limit(len(about.devices))
    current = _left_by_a_guard(mount)
    try:
        held.open_shards(about, mount.base, mount.trusting)
    except StaleShard:
        if current is not None:
            _end_if_written(mount.mountpoint, current, about, mount.base, mount.trusting)
        raise
    if current is None:
        check([os.fsencode(mount.image), *(device.path for device in held.devices)])
    if not mount.trusting:
        _refuse_network([*held.devices, held.image])
    guard.take()
    check_devices(held.devices, about, mount.trusting)  # from now on nobody can write unnoticed
    if current is not None:
        guard.adopt(current.known)
    else:
        guard.mount(attributes)


def _left_by_a_guard(mount: ImageMount) -> Unguarded | None:
    """Return the mount of this image that is there without a guard, if any; end one whose shards were written.

    Raises StaleShard if another image is mounted there.
    """
    current = unguarded(mount.mountpoint)
    if current is not None and not current.shows(mount.image, mount.mountpoint):
        end_if_wrong(mount.mountpoint)
        current = unguarded(mount.mountpoint)
    if current is not None and not current.shows(mount.image, mount.mountpoint):
        raise StaleShard(
            f"{mount.mountpoint}: other shards were mounted there, or these have changed since; to show what is "
            f"there now: wdsfs umount {shlex.quote(mount.mountpoint)}, and repeat the command"
        )
    return current


def end_if_wrong(mountpoint: str) -> None:
    """End the mount at this path if it has no guard and its shards were written: readers may get a mix."""
    place = mount_registry.canonical(mountpoint)
    current = unguarded(place)
    if current is not None and current.shows(current.image, place):
        base = os.path.dirname(current.image) if current.known is None else current.known.base
        trusting = current.known is not None and current.known.trusting
        _end_if_written(place, current, manifest.read_manifest(current.image), base, trusting)


def _end_if_written(mountpoint: str, current: Unguarded, about: Manifest, base: str, trusting: bool) -> None:
    """End a mount if a shard was written in place.

    A shard that was replaced by another file, according to the guard's registration, is whole in the mount.
    """
    replaced = set(() if current.known is None else current.known.replaced())
    changed = []
    for device in about.devices:
        path = device.shard(base)
        if path not in replaced and devices.was_written(path, device, trusting):
            changed.append(path)
    shown = erofs_mount.filesystem_at(mountpoint)
    if changed and shown is not None:
        erofs_mount.detach_everywhere(shown)
        log.error(
            "%s: unmounted, because files that it reads were written while it had no guard: %s",
            *(mountpoint, several(changed)),
        )


def _refuse_network(files: Sequence[OpenDevice]) -> None:
    """Raise MountError for files that another machine can change unnoticed."""
    place = mount_table.on_network(device.path for device in files)
    if place is not None:
        path, fstype = place
        raise MountError(
            f"{os.fsdecode(path)}: lies on {fstype}, where other machines can write it unnoticed. Mount with "
            "--trust-shards if nobody will; or mount the shards by FUSE"
        )
