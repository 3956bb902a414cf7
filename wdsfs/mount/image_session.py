"""Starts the mount of an image as a process, after checks of `-o` and place; makes images of sets.

What the process does is in `kernel/image_mount.py`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from wdsfs import mount_registry, mount_table
from wdsfs.errors import UsageError
from wdsfs.kernel import erofs_header, manifest
from wdsfs.kernel.image_mount import ImageMount, mount_of_set, serve, unguarded
from wdsfs.kernel.set_image import ServedSet
from wdsfs.mount import daemon
from wdsfs.mount.daemon import open_log
from wdsfs.mount.mountpoint import check_mountpoint, parse_options
from wdsfs.tree.set_options import Opening, Owner, Selection, TreeOptions

if TYPE_CHECKING:
    from wdsfs.kernel.image import Built

# Options of `-o` that need nothing: they hold for every mount of an image.
_HOLD_ANYWAY = frozenset(
    (
        *("ro", "allow_other", "allow_root", "default_permissions", "nodev", "nosuid", "exec"),
        *("async", "atime", "sync", "dirsync"),
    )
)
_ADDED = {"noexec": mount_table.NO_PROGRAMS, "noatime": mount_table.NO_ACCESS_TIMES}
_TAKEN_AWAY = {"suid": mount_table.NO_SUID, "dev": mount_table.NO_DEVICES}
_NAMES = ("fsname=", "subtype=")  # for the mount table, in which the image is the source


def run(mount: ImageMount, foreground: bool) -> int:
    """Mount an image; returns an exit code when that is done, in the foreground when the mount has ended.

    Raises UsageError.
    """
    attributes, nonempty = _attributes(mount.options)
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
    served: ServedSet, specs: Sequence[str], mountpoint: str, options: Sequence[str], trusting: bool
) -> ImageMount:
    """Make the image of a set, unless it is there, and return its mount; `options` are those of `-o`.

    Raises what `mount_of_set` raises.
    """
    parsed = parse_options(options, False)
    place, private = mount_registry.canonical(mountpoint), "allow_other" not in parsed.fuse
    return mount_of_set(served, specs, place, options, trusting, parsed.owner, private)


def check_place(mountpoint: str, options: Sequence[str]) -> None:
    """Raise MountError for a mount point that cannot be used, before an image is made for it.

    A mount of an image whose guard is gone is no obstacle: it is guarded again.
    """
    place = mount_registry.canonical(mountpoint)
    if unguarded(place) is None:
        check_mountpoint(place, parse_options(options, False).nonempty, [])


def _attributes(options: Sequence[str]) -> tuple[int, bool]:
    """Return the attributes of a mount, and if the mount point may have entries. Raises UsageError."""
    parsed = parse_options(options, False)
    attributes = mount_table.NO_SUID | mount_table.NO_DEVICES | mount_table.READ_ONLY
    for option in sorted(parsed.fuse):
        attributes = (attributes | _ADDED.get(option, 0)) & ~_TAKEN_AWAY.get(option, 0)
        is_known = option in _HOLD_ANYWAY or option in _ADDED or option in _TAKEN_AWAY
        if not is_known and not option.startswith(_NAMES):
            raise UsageError(f"-o {option}: not for an image, which has no daemon; see docs/how-to/engines.md")
    return attributes, parsed.nonempty


def write_image(
    specs: Sequence[str],
    selection: Selection,
    tree: TreeOptions,
    opening: Opening,
    output: str,
    base: str | None,
    owner: Owner,
) -> tuple[Built, list[str]]:
    """Write the image of the set that these words name; return what it has, and the paths of its shards.

    Paths below `base` (its own directory) are relative to that in the image. Raises UsageError, ImageError, and
    what `opened` raises.
    """
    from wdsfs.kernel.image import make_image  # late: a mount of an image needs none of these
    from wdsfs.tree.merged_tree import make_tree
    from wdsfs.tree.opening import opened

    target, view = os.path.abspath(os.fsencode(output)), tree.view(opening.tolerance.allow_missing)
    top = os.path.dirname(target) if base is None else os.path.abspath(os.fsencode(base))
    about = manifest.ImageOptions(
        *(owner, top, erofs_header.OLDEST_KERNEL, tree.merge, tree.composition.public_text),
        directory=os.getcwdb() if tree.composition.names_files else None,
    )
    with (
        opened(specs, selection, opening, tree.composition, whole=True) as below,
        opening.progress.shards("writing", len(below)) as on_shard,
    ):
        built = make_image(make_tree(below, view), target, about, on_shard)
    return built, [device.shard(os.fsdecode(top)) for device in manifest.read(target).devices]
