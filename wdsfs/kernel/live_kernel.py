"""A live mount by the kernel: its image tells the set and options.

The guard may be gone, or there was none (mount(8)): then only the image is asked. An earlier release mounted
overlays by the kernel, too: `status` shows such a mount and `umount` ends it; other commands refuse it.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from wdsfs import mount_registry
from wdsfs.errors import MountError, several
from wdsfs.kernel import manifest
from wdsfs.kernel.guard import Guarded
from wdsfs.kernel.manifest import Manifest, image_of
from wdsfs.kernel.shown_image import ShownAccess, ShownImage, how_to_renew, shown_at
from wdsfs.mount.live_mount import LiveMount, ShownSet, options_of
from wdsfs.mount_registry import Registration
from wdsfs.mount_table import MountPoint
from wdsfs.tree.set_options import TreeOptions
from wdsfs.trust import user_name

SERVED = "served by the kernel"  # the state of a mount without a daemon


class KernelMount(LiveMount):
    """A mount of an image; `guard` is the registration of its guard.

    With an `overlay` it is one of an earlier release: the kernel's overlayfs above an image.
    """

    engine = mount_registry.KERNEL
    has_hidden_directory = has_attributes = False

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
        """Return what is mounted. Raises MountError."""
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
            f"{self.mountpoint}: an earlier wdsfs mounted its overlay by the kernel; this one only unmounts it. "
            f"Its changes are kept: wdsfs umount {place}, then mount the SHARDS with --overlay {overlay}"
        )

    def lower(self) -> NoReturn:
        raise self._of_earlier_release()

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
            about = manifest.read_manifest(self._source)
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
            **{name: getattr(about, name) for name in ("layout", "names", "merge", "index_tree", "composition")},
            "shards": len({device.path for device in devices}),
            "bytes": sum(device.size for device in devices),
            "files": known or about.paths(self._source),
        }

    # --- ending

    def _wait_for_process(self, registration: Registration, seconds: float, device: int) -> None:
        """Wait for the guard, which ends as soon as nothing of the mount is used. Raises MountError."""
        deadline = time.monotonic() + seconds
        while registration.alive:
            if time.monotonic() > deadline:
                raise MountError(
                    f"{self.mountpoint}: is unmounted, but {seconds:.0f} s later process {registration.pid} still "
                    "guards the shards: they are also mounted elsewhere (a bind mount, a container), or the "
                    f"process is stopped. See: grep -l {shlex.quote(os.fsdecode(self._source))} /proc/*/mountinfo"
                )
            time.sleep(0.01)
