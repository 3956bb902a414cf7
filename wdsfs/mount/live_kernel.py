"""A live mount by the kernel: its image tells the set and options, its guard exchanges the image.

The guard may be gone, or there was none (mount(8)): then only the image is asked.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from wdsfs import mount_registry
from wdsfs.errors import MountError, OverlayBusy, ShardError, several
from wdsfs.kernel import erofs, manifest, overlayfs
from wdsfs.kernel.guard import Guarded, MadeBy
from wdsfs.kernel.image_mount import ImageMount, unguarded
from wdsfs.kernel.manifest import Manifest, identity_of, image_of
from wdsfs.kernel.remount import Remount, exchange, prepared
from wdsfs.kernel.shown_image import ShownAccess, ShownImage, shown_at
from wdsfs.mount import image_session
from wdsfs.mount.live_mount import Frozen, LiveMount, ShownSet, options_of
from wdsfs.mount_registry import Registration
from wdsfs.mount_table import MountPoint
from wdsfs.names import Reading, without_suffix
from wdsfs.overlay.overlay_directory import OverlayDirectory, held, is_half_done, upper_of
from wdsfs.overlay.overlay_shards import check_set
from wdsfs.shards import Shard
from wdsfs.spec.expand import extended
from wdsfs.tree.options import Opening, TreeOptions
from wdsfs.tree.shard_access import Access
from wdsfs.trust import user_name

SERVED = "served by the kernel"  # the state of a mount without a daemon
REFRESH_SECONDS = 24 * 3600.0  # how long a guard may take: it opens, and may compare, all shards


class KernelMount(LiveMount):
    """A mount of an image, and of the kernel's overlayfs above one; `guard` is the registration of its guard."""

    engine = mount_registry.KERNEL
    has_hidden_directory = has_attributes = False

    def __init__(self, mount: MountPoint, guard: Guarded | None) -> None:
        super().__init__(os.fsdecode(mount.path), guard)
        self.guard, self._mount = guard, mount
        self._way: tuple[object, ...] | None = None  # in which it has shown its set
        upper = upper_of(mount)
        if self.overlay is None and upper is not None:
            self.overlay = os.path.dirname(upper)

    @property
    def lasting(self) -> str:
        """Return why changes cannot be undone while the overlay is mounted."""
        place, overlay = shlex.quote(self.mountpoint), shlex.quote(str(self.overlay))
        return (
            "The kernel serves this mount, so changes cannot be undone while it is mounted. To undo them: "
            f"wdsfs umount {place}; wdsfs restore --overlay {overlay} PATH...; and mount it again."
        )

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
        """Return what is mounted. Raises MountError, too, for a mount with an unknown overlay."""
        shown = self._image
        if self.overlay is not None:
            self._guard_of_overlay()
        overlay = None if shown.guard is None else shown.guard.overlay
        way = (options_of(shown.about), shown.directory, overlay)
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
            "content, which cannot be read here. To show the new content in both: wdsfs refresh "
            f"{shlex.quote(self.mountpoint)}"
        )

    def lower(self) -> ShownSet:
        guard = self._guard_of_overlay()
        reading = Reading(**guard.reading)
        shards = [Shard.of_texts(path, name, reading) for path, name in guard.shards]
        return ShownSet((guard.identity, guard.shards), shards, Access())

    def _guard_of_overlay(self) -> Guarded:
        """Return the guard, alive or not.

        Raises MountError if there is none that knows what is below the overlay.
        """
        if self.guard is not None and self.guard.overlay is not None:
            return self.guard
        raise MountError(
            f"{self.mountpoint}: is served by the kernel, and was mounted by another user or in another place, so "
            "the shards below its overlay are not known; unmount it, then name --overlay "
            f"{shlex.quote(str(self.overlay))} and SHARDS"
        )

    def is_original(self, path: str, inode: int) -> bool | None:
        if not inode & overlayfs.OF_LOWER:  # also that of a copy whose original is in an earlier image
            return None
        with open(self._source, "rb") as image:
            return erofs.number_at(image, os.fsencode(path)) == inode & overlayfs.NUMBER

    # --- changing it

    def restore(self, paths: Sequence[bytes]) -> None:
        raise OverlayBusy(self.lasting)

    @contextlib.contextmanager
    def frozen(self, opening: Opening) -> Iterator[Frozen]:
        guard = self._guard_of_overlay()
        place = OverlayDirectory(Path(str(guard.overlay)))
        with contextlib.ExitStack() as stack:
            make_image = partial(image_session.image_of_shards, guard, opening)
            run = partial(image_session.run, foreground=False)
            remount = stack.enter_context(prepared(guard, make_image, run))
            if not guard.alive:
                stack.enter_context(self._held_without_guard(guard, place))
            stack.enter_context(overlayfs.frozen(self.mountpoint, place))
            yield _FrozenByKernel(self.lower(), remount)

    def _held_without_guard(
        self, guard: Guarded, place: OverlayDirectory
    ) -> contextlib.AbstractContextManager[None]:
        """Hold the overlay of a mount whose guard has died. Raises MountError if it is another mount by now."""
        if unguarded(self.mountpoint, place.path) is None:
            raise MountError(
                f"{self.mountpoint}: is not the mount whose guard (process {guard.pid}) has died; unmount it, and "
                f"name --overlay {shlex.quote(str(place.path))} and the SHARDS"
            )
        return held(place, served_at=self.mountpoint)

    def refresh(self, repeat: Callable[[MadeBy], ImageMount]) -> dict[str, Any]:
        guard = self.guard
        if guard is None or not guard.alive:
            raise MountError(
                f"{self.mountpoint}: has no guard, which a refresh needs; repeat the command that mounted it, "
                "without unmounting"
            )
        if is_half_done(guard.overlay):
            raise MountError(
                f"{self.mountpoint}: a commit in place was stopped half-way; finish it first: repeat that commit"
            )
        if guard.made is None:
            raise MountError(
                f"{self.mountpoint}: the command that mounted it was not kept, because there may be a secret in "
                f"it; type: wdsfs umount {shlex.quote(self.mountpoint)}, and mount it again"
            )
        try:
            image = repeat(guard.made)
        except ShardError as error:  # it may name an option of `mount`
            text = f"{error}; the mount is unchanged. Options can only be given when it is mounted again"
            raise type(error)(text) from None
        if identity_of(image.image) == guard.identity:
            _refuse_old_image(guard)
        else:
            self._exchange(guard, image)
        return _changes(guard, image)

    def _exchange(self, guard: Guarded, image_mount: ImageMount) -> None:
        """Ask the guard to mount another image. Raises OverlayUnusable, OverlayBusy, MountError."""
        shards: Sequence[Shard] = ()
        with contextlib.ExitStack() as stack:
            if guard.overlay is not None:
                if image_mount.overlay is None:
                    raise MountError(
                        f"{self.mountpoint}: has an overlay, and its command has none; please report this"
                    )
                place, shards = OverlayDirectory(image_mount.overlay.directory), image_mount.overlay.shards
                check_set(place, shards, image_mount.overlay.view)
                stack.enter_context(overlayfs.frozen(self.mountpoint, place))
            reason = exchange(guard, image_mount, shards, REFRESH_SECONDS)
        if reason:
            raise MountError(f"{self.mountpoint}: {reason}; the mount is unchanged")

    # --- reporting

    def report(self) -> dict[str, Any]:
        options = (*self._mount.options, *self._mount.super_options)
        half_done = is_half_done(self.overlay)
        report: dict[str, Any] = {
            "engine": self.engine,
            "mountpoint": self.mountpoint,
            "state": SERVED,
            "user": user_name(0),
            "specs": [os.fsdecode(self._source)],
            "image": os.fsdecode(self._source),
            "mode": "ro" if self.overlay is None or "ro" in options else "rw",
            "overlay": self.overlay,
            "unfinished_commit": half_done,
            "notices": [],
        }
        if self.overlay is not None and "ro" in self._mount.super_options and not half_done:
            report["notices"].append(
                "read-only for a commit; if that commit was killed, repeat it to make the mount writable"
            )
        try:
            about = manifest.read(self._source)
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
        copies = {device.path: device.copy for device in devices if device.copy is not None}
        known = guard.paths if guard is not None and len(guard.paths) == len(devices) else None
        return {
            **{name: getattr(about, name) for name in ("layout", "names", "merge", "index_tree", "composition")},
            "shards": len({device.path for device in devices}),
            "bytes": sum(device.size for device in devices),
            "files": known or about.paths(self._source),
            "copies": len(copies),
            "copies_bytes": sum(copy.size for copy in copies.values()),
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
                    f"process is stopped. See: grep -l {shlex.quote(registration.specs[0])} /proc/*/mountinfo"
                )
            time.sleep(0.01)


class _FrozenByKernel(Frozen):
    """A mount that is read-only, and gets a new image for new shards."""

    def __init__(self, lower: ShownSet, remount: Remount) -> None:
        super().__init__(lower)
        self._remount = remount

    @property
    def is_wrong(self) -> bool:
        return self._remount.failed

    def prepare(self, new: Sequence[bytes]) -> None:
        self._remount.make_image(extended(self.lower.shards, new))

    def show(self, new: Sequence[bytes], published: Sequence[bytes]) -> None:
        self._remount.run(extended(self.lower.shards, new))


def _refuse_old_image(guard: Guarded) -> None:
    """Raise MountError for an image that is mounted already, and is not of the shards that are there now."""
    replaced = guard.replaced()
    if replaced:
        raise MountError(
            f"{guard.image}: is older than {several(replaced)}; make it again with `wdsfs image`, then repeat this"
        )


def _changes(before: Guarded, image_mount: ImageMount) -> dict[str, Any]:
    """Compare two images; return the changes as a daemon does after a refresh."""
    about = manifest.read(image_mount.image)
    now = list(dict.fromkeys(device.shard(image_mount.base) for device in about.devices))
    replaced = before.replaced()

    def named(paths: Iterable[str]) -> list[dict[str, str]]:
        names = ((os.fsdecode(without_suffix(os.fsencode(os.path.basename(path)))), path) for path in paths)
        return [{"name": name, "shard": path} for name, path in names]

    return {
        "shards": len(now),
        "added": named(path for path in now if path not in before.paths),
        "removed": named(path for path in dict.fromkeys(before.paths) if path not in now),
        "replaced": [path for path in now if path in replaced],
        "left_out": [],
        "kept": "",
    }
