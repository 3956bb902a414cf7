"""Starts the mount of an image as a process, after checks of `-o` and place; makes the image of new shards.

What the process does is in `kernel/image_mount.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wdsfs import mount_registry, mount_table
from wdsfs.errors import UsageError
from wdsfs.kernel.guard import Guarded
from wdsfs.kernel.image_mount import ImageMount, mount_of_set, serve, unguarded
from wdsfs.kernel.set_image import ServedSet
from wdsfs.mount import daemon
from wdsfs.mount.daemon import open_log
from wdsfs.mount.mountpoint import check_mountpoint, parse_options
from wdsfs.shards import Shard
from wdsfs.tree.options import Composition, Opening, Progress, TreeOptions

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


def run(mount: ImageMount, foreground: bool) -> int:
    """Mount an image; returns an exit code when that is done, in the foreground when the mount has ended.

    Raises UsageError.
    """
    attributes, nonempty = _attributes(mount.options, mount.overlay is not None)
    mount.mountpoint = mount_registry.canonical(mount.mountpoint)

    def check(needed: Sequence[bytes]) -> None:
        check_mountpoint(mount.mountpoint, nonempty, needed)

    if foreground:
        ready = lambda: daemon.notify_systemd("READY=1")  # noqa: E731
        return daemon.guarded(lambda: serve(mount, attributes, check, None, lambda _: None, ready))
    return daemon.fork(
        mount.mountpoint,
        lambda leave, ready: serve(mount, attributes, check, open_log(mount.mountpoint), leave, ready),
    )


def prepare(
    served: ServedSet, mountpoint: str, options: Sequence[str], trusting: bool, overlay: Path | None
) -> ImageMount:
    """Make the image of a set, unless it is there, and return its mount; `options` are those of `-o`.

    Raises what `mount_of_set` raises.
    """
    parsed = parse_options(options, overlay is not None)
    place, private = mount_registry.canonical(mountpoint), "allow_other" not in parsed.fuse
    return mount_of_set(served, place, options, trusting, parsed.owner, private, overlay)


def check_place(mountpoint: str, options: Sequence[str], overlay: Path | None) -> None:
    """Raise MountError for a mount point that cannot be used, before an image is made for it.

    A mount of an image whose guard is gone is no obstacle: it is guarded again, or gives way to the new image.
    """
    place = mount_registry.canonical(mountpoint)
    if unguarded(place, overlay) is None:
        check_mountpoint(place, parse_options(options, overlay is not None).nonempty, [])


def _attributes(options: Sequence[str], writable: bool) -> tuple[int, bool]:
    """Return the attributes of a mount, and if the mount point may have entries. Raises UsageError."""
    parsed = parse_options(options, writable)
    attributes = mount_table.NO_SUID | mount_table.NO_DEVICES
    if not writable or "ro" in parsed.fuse:
        attributes |= mount_table.READ_ONLY
    for option in sorted(parsed.fuse):
        attributes = (attributes | _ADDED.get(option, 0)) & ~_TAKEN_AWAY.get(option, 0)
        is_known = option in _HOLD_ANYWAY or option in _ADDED or option in _TAKEN_AWAY
        if option in _HOLD_UNLESS_WRITABLE and writable:
            raise UsageError(f"-o {option}: the kernel's overlay has no such option; it is for FUSE")
        if not is_known and option not in _HOLD_UNLESS_WRITABLE and not option.startswith(_NAMES):
            raise UsageError(f"-o {option}: not for an image, which has no daemon; see docs/engines.md")
    return attributes, parsed.nonempty


def image_of_shards(guard: Guarded, opening: Opening, shards: Sequence[Shard]) -> ImageMount:
    """Make the image for a mount with an overlay over new shards, and return the mount.

    Raises CannotServe, WdsfsError.
    """
    tree = TreeOptions(guard.layout, guard.names, guard.merge, index_tree=False, composition=Composition())
    served = ServedSet(shards, tree, opening._replace(quiet=True, workers=None, progress=Progress()))
    overlay = None if guard.overlay is None else Path(guard.overlay)
    return prepare(served, guard.mountpoint, guard.options, guard.trusting, overlay)
