"""A live mount by the kernel: the image has the set and options, the registration of the guard has the shards.

If a shard is replaced, the kernel continues with the old file; labels are in the image. A command that opens the
set by its paths gets an error for each replaced file, so that it does not read the new file for the mounted one.

The guard may have died, or never existed (mount(8)): then the image is the only source. An earlier release mounted
overlays by the kernel, too: `status` shows such a mount and `umount` ends it; other commands refuse it.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from wdsfs import mount_registry, mount_table
from wdsfs.door.shard_door import DOOR
from wdsfs.errors import MissingShard, MountError, RefusedShard, ShardError, several
from wdsfs.kernel.guard import Guarded, guard_of
from wdsfs.kernel.manifest import Device, Manifest, identity_of, image_of, is_mounted_at, read_manifest
from wdsfs.mount.live_mount import LiveMount, ShownSet, options_of
from wdsfs.mount_registry import Registration
from wdsfs.mount_table import MountPoint
from wdsfs.names import Reading
from wdsfs.shards import GONE, Fingerprint, Shard
from wdsfs.tree.set_options import TreeOptions
from wdsfs.tree.shard_access import Access
from wdsfs.trust import user_name

SERVED = "served by the kernel"  # the state of a mount without a daemon


@dataclass(frozen=True, slots=True)
class ShownImage:
    """An image that is mounted: its manifest, and the registration of its guard, alive or not, if there is one.

    `paths` are the paths of all shards as opened for this mount, if known; relative paths are below `base`.
    """

    mountpoint: str
    identity: str
    about: Manifest
    base: str
    paths: list[str]
    guard: Guarded | None

    @property
    def shards(self) -> list[Shard]:
        """The shards of the set, in its order."""
        about = self.about.set
        reading, named = Reading(**about.reading), zip(self.paths, about.shards, strict=False)  # others are joined
        return [Shard.of_texts(path, name, reading, about.without.get(name, ())) for path, name in named]

    @property
    def directory(self) -> str:
        """The directory in which relative paths of the view options begin."""
        return os.path.normpath(os.path.join(self.base, self.about.set.directory))


def how_to_renew(mountpoint: str) -> str:
    """Return the way to make a mount show the present files."""
    return f"wdsfs umount {shlex.quote(mountpoint)}, and mount it again"


def shown_at(mountpoint: str) -> ShownImage | None:
    """Return the image that is mounted at this path (canonical); None for any other mount, or none.

    Raises MountError if another image has taken its place, or if it does not say what its set is; OSErrors.
    """
    mount = mount_table.mounted_at(mountpoint)
    image = None if mount is None else image_of(mount)
    if mount is None or image is None:
        return None
    about, identity, guard = read_manifest(image), identity_of(image), guard_of(mountpoint)
    is_shown = is_mounted_at(identity, mountpoint)
    if is_shown is None:
        is_shown = guard is None or guard.identity == identity
    if not is_shown:
        raise MountError(
            f"{mountpoint}: its image, {os.fsdecode(image)}, has been replaced by another one; to show that one: "
            f"{how_to_renew(mountpoint)}"
        )
    if guard is not None and guard.identity != identity:
        guard = None
    base = os.fsdecode(os.path.dirname(image)) if guard is None else guard.base
    paths = [device.shard(base) for device in about.devices]
    return ShownImage(mountpoint, identity, about, base, paths, guard)


class ShownAccess(Access):
    """Opens the shards and label files of a mounted image, unless they have changed since the mount."""

    def __init__(self, shown: ShownImage) -> None:
        self._mountpoint = shown.mountpoint
        self._trusting = shown.guard is not None and shown.guard.trusting
        inodes: list[int | None] = [None] * len(shown.paths)
        if shown.guard is not None and shown.guard.paths == shown.paths:
            inodes = [*shown.guard.inodes]
        # Each file as it was when the image was made, and the inode number of the one that its guard has opened.
        devices = zip(shown.about.devices, inodes, strict=True)
        self._files = dict[bytes, tuple[Device, int | None]](
            zip(map(os.fsencode, shown.paths), devices, strict=True)
        )
        self._files |= {os.fsencode(label.shard(shown.base)): (label, None) for label in shown.about.set.labels}

    def look(self, path: bytes) -> Fingerprint:
        try:
            fingerprint = super().look(path)
        except MissingShard:
            raise MissingShard(
                f"{os.fsdecode(path)}: was removed since it was mounted; to show what is there now: "
                f"{how_to_renew(self._mountpoint)}"
            ) from None
        if not self._is_shown(path) or not self._is_shown(path + b"-wal", unless_known=True):
            change = "replaced" if path in self._files else "created"
            raise RefusedShard(
                f"{os.fsdecode(path)}: was {change} since the set was mounted; to show what is there now: "
                f"{how_to_renew(self._mountpoint)}"
            )
        return fingerprint

    def others(self) -> Iterator[str]:
        """Return the paths of files that were replaced or removed since the set was mounted."""
        return (os.fsdecode(path) for path in self._files if not self._is_shown(path))

    def _is_shown(self, path: bytes, *, unless_known: bool = False) -> bool:
        if path not in self._files:
            return unless_known
        device, inode = self._files[path]
        try:
            if inode is not None and os.stat(path).st_ino != inode:
                return False
            now = DOOR.look(path)
        except (ShardError, OSError):
            now = GONE
        is_same_time = self._trusting or now.mtime_ns == device.mtime_ns
        return now.size == device.size and (is_same_time or not now.size)


# --- the mount


class KernelMount(LiveMount):
    """A mount of an image; `guard` is the registration of its guard.

    With an `overlay` it is one of an earlier release: the kernel's overlayfs above an image.
    """

    engine = mount_registry.KERNEL
    is_by_fuse = False

    def __init__(self, mount: MountPoint, guard: Guarded | None) -> None:
        super().__init__(os.fsdecode(mount.path), guard)
        self.guard, self._mount = guard, mount
        self._way: tuple[object, ...] | None = None  # in which it has shown its set
        if self.overlay is None and mount.upperdir is not None:
            self.overlay = os.path.dirname(mount.upperdir)

    @property
    def remedy(self) -> str:
        return "repeat the command that mounted it, without unmounting"

    # --- what it shows

    @property
    def _image(self) -> ShownImage:
        shown = shown_at(self.mountpoint)
        if shown is None:
            raise MountError(f"{self.mountpoint}: the mount has ended, or its image has been removed")
        return shown

    @property
    def options(self) -> TreeOptions:
        return options_of(self.guard or self._image.about)

    @property
    def directory(self) -> str:
        return self._image.directory

    def shown(self) -> ShownSet:
        """Return the image that is mounted. Raises MountError."""
        if self.overlay is not None:
            raise self._of_earlier_release()
        shown = self._image
        way = (options_of(shown.about), shown.directory)
        if self._way not in (None, way):
            raise MountError(f"{self.mountpoint}: another mount has taken its place; start this command again")
        self._way = way
        access = ShownAccess(shown)
        others = sorted(access.others())
        return ShownSet((shown.identity, shown.paths, others), shown.shards, access, self._news(others))

    def _news(self, others: Sequence[str]) -> str:
        if not others:
            return ""
        return (
            f"Replaced, changed or removed since they were mounted: {several(others)}. The mount shows their old "
            f"content, which cannot be read here. To show the new content in both: {how_to_renew(self.mountpoint)}"
        )

    # --- its overlay, of an earlier release

    def _of_earlier_release(self) -> MountError:
        place, overlay = shlex.quote(self.mountpoint), shlex.quote(str(self.overlay))
        return MountError(
            f"{self.mountpoint}: an earlier wdsfs mounted its overlay by the kernel, and this wdsfs can only "
            f"unmount. The changes are kept: wdsfs umount {place}, then mount the SHARDS with --overlay {overlay}"
        )

    def frozen(self) -> NoReturn:
        raise self._of_earlier_release()

    def restore(self, paths: Sequence[bytes]) -> NoReturn:
        raise self._of_earlier_release()

    def refresh(self) -> NoReturn:
        raise MountError(
            f"{self.mountpoint}: the kernel shows the shards as they were when they were mounted; to show what is "
            f"there now: {how_to_renew(self.mountpoint)}. FUSE shows changes by itself (--follow)"
        )

    # --- reporting

    def report(self) -> dict[str, Any]:
        options = (*self._mount.options, *self._mount.super_options)
        report: dict[str, Any] = {
            "engine": self.engine,
            "mountpoint": self.mountpoint,
            "state": SERVED,
            "user": user_name(0),
            "specs": [os.fsdecode(self._source)],
            "image": os.fsdecode(self._source),
            "mode": "ro" if self.overlay is None or "ro" in options else "rw",
            "overlay": self.overlay,
            "unfinished_commit": self.unfinished_commit,
            "notices": [],
        }
        if self.overlay is not None:
            report["notices"].append(str(self._of_earlier_release()))
        try:
            about = read_manifest(self._source)
        except MountError as error:  # replaced by another file since, or removed
            return {**report, "shards": 0, "layout": "", "notices": [*report["notices"], str(error)]}
        return {**report, **self._report_of_guard(report["notices"]), **self._report_of_image(about)}

    @property
    def _source(self) -> bytes:
        """The path of the image, which may have been removed."""
        return image_of(self._mount) or self._mount.source

    def _report_of_guard(self, notices: list[str]) -> dict[str, Any]:
        guard = self.guard
        if guard is None or not guard.alive:
            notices.append("it has no guard, so writing into its shards goes unnoticed; repeat its mount command")
            return {}
        return {"pid": guard.pid, "log": guard.log, "replaced": guard.replaced()}

    def _report_of_image(self, about: Manifest) -> dict[str, Any]:
        guard, devices = self.guard, about.devices
        known = guard.paths if guard is not None and len(guard.paths) == len(devices) else None
        return {
            **about.options(),
            "shards": len({device.path for device in devices}),
            "bytes": sum(device.size for device in devices),
            "files": known or about.paths(self._source),
        }

    # --- ending

    def _wait_for_process(self, registration: Registration, seconds: float, device: int) -> None:
        """Wait for the end of the guard, that is, until no program uses the mount. Raises MountError."""
        deadline = time.monotonic() + seconds
        while registration.alive:
            if time.monotonic() > deadline:
                raise MountError(
                    f"{self.mountpoint}: is unmounted, but {seconds:.0f} s later process {registration.pid} still "
                    "guards the shards: they are also mounted elsewhere (a bind mount, a container), or the "
                    f"process is stopped. See: grep -l {shlex.quote(os.fsdecode(self._source))} /proc/*/mountinfo"
                )
            time.sleep(0.01)
