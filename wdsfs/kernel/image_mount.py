"""Mounts an image and starts its guard; adopts a mount without a guard, or ends one that cannot be trusted.

The kernel serves the mount. The one process that stays, the guard (`guard.py`), serves nothing: when it dies the
mount goes on, unguarded. The process, its log, and options of `-o` are for `mount/image_session.py`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from wdsfs import host, mount_registry, mount_table
from wdsfs.errors import MountError, StaleShard, several
from wdsfs.kernel import devices, erofs_mount, manifest
from wdsfs.kernel.devices import HeldShards, OpenDevice, check_devices, open_image, raise_file_limit
from wdsfs.kernel.guard import Guard, Guarded, MadeBy, guard_of
from wdsfs.kernel.manifest import Manifest, identity_of, image_of, is_mounted_at
from wdsfs.kernel.set_image import ServedSet, find_or_make
from wdsfs.tree.options import Owner

if TYPE_CHECKING:
    from wdsfs.kernel.overlayfs import OverlayOver
    from wdsfs.overlay.overlay_directory import OverlayDirectory

log = logging.getLogger(__name__)

Check = Callable[[Sequence[bytes]], None]  # of the mount point, given the paths that the mount needs


@dataclass(slots=True)
class ImageMount:
    """The options of a mount: image and mount point, both absolute; relative paths of shards are below `base`.

    `options` are those of `-o`; `trusting`: shards may have other times, and lie where others can change them.
    `made` is the command, for `wdsfs refresh`. `overlay` comes above the image. `open_files` are those of the
    cache, which are open until the mount has them.
    """

    image: str
    mountpoint: str
    base: str
    options: list[str] = field(default_factory=list)
    trusting: bool = False
    made: MadeBy | None = None
    overlay: OverlayOver | None = None
    open_files: ExitStack = field(default_factory=ExitStack)


def mount_of_set(
    served: ServedSet,
    mountpoint: str,
    options: Sequence[str],
    trusting: bool,
    owner: Owner,
    private: bool,
    overlay: Path | None,
) -> ImageMount:
    """Make the image of a set, unless it is there, and return its mount at this path (canonical).

    `options` are those of `-o`, `owner` and `private` what they say of the image; `overlay` is the directory of an
    overlay above it. Raises CannotServe, ImageError, ShardErrors, UsageError.
    """
    image, open_files = find_or_make(served, served.options(owner, private, overlay is not None))
    mount = ImageMount(image, mountpoint, "/", list(options), trusting, open_files=open_files)
    if overlay is not None:
        from wdsfs.kernel.overlayfs import OverlayOver

        view, index = served.tree.view(served.partial), served.opening.index_dir
        mount.overlay = OverlayOver(
            *(overlay.absolute(), served.shards, view, owner[:2], private),
            *(list(options), None if index is None else str(index.absolute())),
        )
    return mount


class Unguarded(NamedTuple):
    """A mount of the image at the path `image` whose guard is gone.

    `known` is the registration that the guard left, if any: always with an `overlay` above the image.
    """

    image: str
    known: Guarded | None
    overlay: OverlayDirectory | None = None

    def shows(self, image: str, mountpoint: str) -> bool:
        """Return True if this image is what is mounted, as far as can be known."""
        identity = identity_of(image)
        shown = None if self.overlay is not None else is_mounted_at(identity, mountpoint)
        return shown if shown is not None else self.known is not None and self.known.identity == identity


def unguarded(mountpoint: str, overlay: Path | None) -> Unguarded | None:
    """Return the mount at this path (canonical) if that is an image without a living guard.

    With an `overlay` (a directory) only if that is above the image, and the guard has left its registration: the
    kernel does not say what is below an overlay.
    """
    mounted = mount_table.mounted_at(mountpoint)
    image = None if mounted is None else image_of(mounted)
    known = guard_of(mountpoint)
    if mounted is None or image is None or (known is not None and known.alive):
        return None
    if overlay is None:
        return Unguarded(os.fsdecode(image), known) if mounted.fstype == "erofs" else None
    from wdsfs.overlay.overlay_directory import OverlayDirectory, is_served_at

    place = OverlayDirectory(overlay)
    is_ours = known is not None and known.overlay is not None and known.device == mounted.device
    is_above = is_ours and is_served_at(place.upper, mountpoint)
    return Unguarded(os.fsdecode(image), known, place) if is_above else None


def serve(
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
    guard = Guard(held, mount.mountpoint, check, log_file, mount.made, mount.overlay)
    try:
        _begin(mount, attributes, check, guard, held)
        leave(log_file)
        with guard.registered():
            ready()
            guard.run()
    finally:
        guard.close()


def _begin(mount: ImageMount, attributes: int, check: Check, guard: Guard, held: HeldShards) -> None:
    """Mount the image that `guard` holds, or adopt the mount that is there. Raises as `serve`."""
    about = manifest.read(mount.image)
    if host.kernel_version() < host.kernel_version(about.since):
        log.warning(
            "%s: was made for Linux %s; with this older kernel its files have the time 1970-01-01. Make the image "
            "without --linux",
            *(mount.image, about.since),
        )
    raise_file_limit(len(about.devices) + sum(device.copy is not None for device in about.devices))
    current = unguarded(mount.mountpoint, None if mount.overlay is None else mount.overlay.directory)
    is_shown = current is not None and current.shows(mount.image, mount.mountpoint)
    try:
        held.open_shards(about, mount.base, mount.trusting)
    except StaleShard:
        if current is not None and is_shown:
            _end_if_written(mount.mountpoint, current, about, mount.base, mount.trusting)
        raise
    if current is None:
        check([*_own_paths(mount), *(device.file for device in held.devices)])
    if not mount.trusting:
        _refuse_network([*held.devices, held.image])
    guard.take(current is not None)
    check_devices(held.devices, about, mount.trusting)  # from now on nobody can write unnoticed
    if current is not None and is_shown:
        guard.adopt(attributes, current.known)
    elif current is not None and current.overlay is not None:
        from wdsfs.kernel.overlayfs import frozen

        with frozen(mount.mountpoint, current.overlay):
            guard.mount(attributes, instead=True)
    else:
        guard.mount(attributes, instead=current is not None)
    mount.open_files.close()  # the mount holds them now


def end_if_wrong(mountpoint: str, overlay: Path | None) -> None:
    """End the mount at this path if it has no guard and its shards were written: readers may get a mix.

    `overlay` is as in `unguarded`.
    """
    place = mount_registry.canonical(mountpoint)
    current = unguarded(place, overlay)
    if current is not None and current.shows(current.image, place):
        base = os.path.dirname(current.image) if current.known is None else current.known.base
        trusting = current.known is not None and current.known.trusting
        _end_if_written(place, current, manifest.read(current.image), base, trusting)


def _end_if_written(mountpoint: str, current: Unguarded, about: Manifest, base: str, trusting: bool) -> None:
    """End a mount if a shard, or a copy, was written in place or is damaged.

    A shard that was replaced by another file, according to the guard's registration, is whole in the mount.
    """
    replaced = set(() if current.known is None else current.known.replaced())
    changed = []
    for device in about.devices:
        path = device.shard(base)
        if path not in replaced and devices.was_written(path, device, trusting):
            changed.append(path)
    shown = erofs_mount.at(mountpoint)
    if changed and shown is not None:
        erofs_mount.detach_everywhere(shown)
        log.error(
            "%s: unmounted, because files that it reads were written while it had no guard, or are damaged: %s",
            *(mountpoint, several(changed)),
        )


def _own_paths(mount: ImageMount) -> list[bytes]:
    """Return the paths that the mount needs besides the shards. Raises MountError if it lies in the overlay."""
    if mount.overlay is None:
        return [os.fsencode(mount.image)]
    directory = mount.overlay.directory
    if directory.resolve() in Path(mount.mountpoint).parents:
        raise MountError(f"{mount.mountpoint}: lies in the overlay {directory}; take another mount point")
    return [os.fsencode(mount.image), os.fsencode(directory)]


def _refuse_network(files: Sequence[OpenDevice]) -> None:
    """Raise MountError for files that another machine can change unnoticed."""
    place = mount_table.on_network(device.file for device in files)
    if place is not None:
        path, fstype = place
        raise MountError(
            f"{os.fsdecode(path)}: lies on {fstype}, where other machines can write it unnoticed. Mount with "
            "--trust-shards if nobody will; or mount the shards by FUSE"
        )
