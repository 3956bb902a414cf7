"""Starts the mount of an image as a process, after checks of `-o` and place; makes images of sets.

What the process does is in `kernel/image_mount.py`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from wdsfs import host, mount_registry, mount_table
from wdsfs.errors import UsageError
from wdsfs.kernel import erofs, manifest
from wdsfs.kernel.guard import Guarded
from wdsfs.kernel.image_mount import ImageMount, mount_of_set, serve, unguarded
from wdsfs.kernel.set_image import ServedSet
from wdsfs.mount import daemon
from wdsfs.mount.daemon import open_log
from wdsfs.mount.mountpoint import check_mountpoint, parse_options
from wdsfs.shards import Shard
from wdsfs.tree.options import Opening, Owner, Progress, Selection, TreeOptions

if TYPE_CHECKING:
    from wdsfs.kernel.image import Built

# Options of `-o` that need nothing: they hold for every mount of an image.
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
            raise UsageError(f"-o {option}: not for an image, which has no daemon; see docs/how-to/engines.md")
    return attributes, parsed.nonempty


def image_of_shards(guard: Guarded, opening: Opening, shards: Sequence[Shard]) -> ImageMount:
    """Make the image for a mount with an overlay over new shards, and return the mount.

    Raises CannotServe, WdsfsError.
    """
    tree = TreeOptions(guard.layout, guard.names, guard.merge)
    served = ServedSet(shards, tree, opening._replace(quiet=True, workers=None, progress=Progress()))
    overlay = None if guard.overlay is None else Path(guard.overlay)
    return prepare(served, guard.mountpoint, guard.options, guard.trusting, overlay)


def write_image(
    specs: Sequence[str],
    selection: Selection,
    tree: TreeOptions,
    opening: Opening,
    output: str,
    base: str | None,
    owner: Owner,
    linux: str,
) -> tuple[Built, list[str]]:
    """Write the image of the set that these words name; return what it has, and the paths of its shards.

    Paths below `base` (its own directory) are relative to that in the image; `linux` is the oldest version of the
    kernel that is to mount it. Raises UsageError, ImageError, and what `opened` raises.
    """
    from wdsfs.kernel.image import make_image  # late: a mount of an image needs none of these
    from wdsfs.tree.numbered_tree import check_name, make_numbered
    from wdsfs.tree.opening import opened

    target, view = os.path.abspath(os.fsencode(output)), tree.view(opening.tolerance.allow_missing)
    top = os.path.dirname(target) if base is None else os.path.abspath(os.fsencode(base))
    about = manifest.ImageOptions(
        *(owner, top, _version(linux), tree.merge, tree.composition.public_text),
        directory=os.getcwdb() if tree.composition.names_files else None,
    )
    with opened(specs, selection, opening, tree.composition, whole=True) as below:
        check_name(below.shards, view)
        with opening.progress.shards("writing", len(below)) as on_shard:
            built = make_image(make_numbered(below, view), target, about, on_shard)
    return built, [device.shard(os.fsdecode(top)) for device in manifest.read(target).devices]


def _version(text: str) -> tuple[int, int]:
    """Return the first two numbers of a kernel's version: `6.12.3-amd64` is (6, 12). Raises UsageError."""
    numbers = host.kernel_version(text)
    if len(numbers) < 2:
        raise UsageError(f"--linux {text}: a version such as 6.12 is needed")
    if numbers < erofs.OLDEST_KERNEL:
        oldest = ".".join(map(str, erofs.OLDEST_KERNEL))
        raise UsageError(f"--linux {text}: images over several files need Linux {oldest} or later")
    return numbers[0], numbers[1]
