"""Mounts a set or an image as a process, after checks of `-o` and the mount point; makes images of sets.

What the process does is in `kernel/image_mount.py`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from wdsfs import mount_registry, mount_table
from wdsfs.door.shard_door import DOOR
from wdsfs.errors import ImageError, MountError, StaleShard, UsageError
from wdsfs.kernel import engine_checks, erofs_header, manifest
from wdsfs.kernel.image_mount import ImageMount, end_if_wrong, mount_and_guard, mount_of_set, unguarded
from wdsfs.kernel.set_image import ServedSet
from wdsfs.mount import daemon
from wdsfs.mount.daemon import open_log
from wdsfs.mount.engines import CannotServe
from wdsfs.mount.mount_options import AUTO, MountOptions
from wdsfs.mount.mountpoint import check_mountpoint, parse_options, split_options
from wdsfs.tree.set_options import Opening, Owner, Selection, TreeOptions

if TYPE_CHECKING:
    from wdsfs.kernel.image import Built
    from wdsfs.shards import Shard
    from wdsfs.tree.shard_set import ShardSet

log = logging.getLogger("wdsfs")

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


def mount_image(mount: MountOptions) -> int:
    """Mount the image that is named; return an exit code. Raises UsageError, MountError."""
    image, base, options = os.path.abspath(mount.specs[0]), mount.selection.base, mount.dash_o
    if base is not None and "://" in base:
        raise UsageError(f"--base {base}: the shards of an image are files; name their directory")
    if any(option.partition("=")[0] in ("uid", "gid", "umask") for option in split_options(options)):
        raise UsageError("-o uid, gid and umask are for FUSE; for an image give them to: wdsfs image")
    base = os.path.dirname(image) if base is None else os.path.abspath(base)
    return _run(mount, ImageMount(image, mount.mountpoint, base, mount.specs, options, mount.serving.trust_shards))


def mount_set(mount: MountOptions, shards: Sequence[Shard]) -> int:
    """Make the image of a set, unless it is there, mount it, and give hints; return an exit code.

    With the engine AUTO, CannotServe is raised also if the kernel refuses the mount. Raises CannotServe,
    WdsfsError.
    """
    is_choice, foreground = mount.serving.engine == AUTO, mount.serving.foreground
    advice = list[str]()
    try:
        image = _make_image(mount, shards, advice)
    except (CannotServe, ImageError) as error:
        end_if_wrong(mount.mountpoint)
        raise CannotServe(str(error)) from None
    if is_choice:
        log.info("engine: kernel")
    if foreground:
        _give(advice)
    code = _run(mount, image)
    is_refused = code in (MountError.exit_code, StaleShard.exit_code)
    if is_choice and is_refused and mount_table.mounted_at(mount.mountpoint) is None:
        raise CannotServe("the kernel has not mounted it")
    if not code and not foreground:
        _give(advice)
    return code


def _give(advice: Sequence[str]) -> None:
    for line in advice:
        log.info("%s", line)


def _make_image(mount: MountOptions, shards: Sequence[Shard], advice: list[str]) -> ImageMount:
    """Make the image of a set, unless it is there, and return the mount. `advice` gets hints for the user.

    Raises CannotServe, WdsfsError.
    """
    tree, opening, serving = mount.tree, mount.opening, mount.serving
    reason = engine_checks.obstacle(shards, serving.trust_shards)
    if reason is None and serving.engine == AUTO:
        reason = engine_checks.obstacle_now(shards)  # else the guard says it, when the image is made
    if reason is not None:
        raise CannotServe(reason)
    check_place(mount.mountpoint, mount.dash_o)

    def advise(below: ShardSet) -> None:
        if not opening.quiet:
            from wdsfs.mount.hints import hints  # late: it loads NumPy

            advice.extend(hints(below, tree, writable=False))

    served = ServedSet(shards, tree, opening, advise)
    return _prepare(served, mount.specs, mount.mountpoint, mount.dash_o, serving.trust_shards)


def _run(mount: MountOptions, image: ImageMount) -> int:
    image.removes_mountpoint = mount.removes_mountpoint
    DOOR.close()  # the guard asks no store, and is not to keep the fetcher
    try:
        return run(image, mount.serving.foreground)
    finally:
        if image.cached >= 0:
            os.close(image.cached)  # here; the guard has its own


def run(mount: ImageMount, foreground: bool) -> int:
    """Mount an image; returns an exit code when that is done, in the foreground when the mount has ended.

    Raises UsageError.
    """
    attributes, nonempty = _mount_attributes(mount.options)
    mount.mountpoint = mount_registry.canonical(mount.mountpoint)

    def check(needed: Sequence[bytes]) -> None:
        check_mountpoint(mount.mountpoint, nonempty, needed)

    if foreground:
        ready = partial(daemon.notify_systemd, "READY=1")
        return daemon.guarded(lambda: mount_and_guard(mount, attributes, check, None, lambda _: None, ready))
    return daemon.fork(
        mount.mountpoint,
        lambda leave, ready: mount_and_guard(mount, attributes, check, open_log(mount.mountpoint), leave, ready),
    )


def _prepare(
    served: ServedSet, specs: Sequence[str], mountpoint: str, options: Sequence[str], trusting: bool
) -> ImageMount:
    """Make the image of a set, unless it is there, and return its mount; `options` are those of `-o`.

    Raises what `mount_of_set` raises.
    """
    parsed = parse_options(options)
    place, private = mount_registry.canonical(mountpoint), "allow_other" not in parsed.fuse
    return mount_of_set(served, specs, place, options, trusting, parsed.owner, private)


def check_place(mountpoint: str, options: Sequence[str]) -> None:
    """Raise MountError for a mount point that cannot be used, before an image is made for it.

    A mount of an image whose guard is gone is no obstacle: it is guarded again.
    """
    place = mount_registry.canonical(mountpoint)
    if unguarded(place) is None:
        check_mountpoint(place, parse_options(options).nonempty, [])


def _mount_attributes(options: Sequence[str]) -> tuple[int, bool]:
    """Return the attributes of a mount, and if the mount point may have entries. Raises UsageError."""
    parsed = parse_options(options)
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
    what `open_typed_set` raises.
    """
    from wdsfs.kernel.image import make_image  # late: a mount of an image needs none of these
    from wdsfs.tree.merged_tree import make_tree
    from wdsfs.tree.opening import open_typed_set

    target, view = os.path.abspath(os.fsencode(output)), tree.view(partial=opening.tolerance.allow_missing)
    top = os.path.dirname(target) if base is None else os.path.abspath(os.fsencode(base))
    about = manifest.ImageOptions(
        *(owner, top, erofs_header.OLDEST_KERNEL, tree.merge, tree.composition.public_text),
        directory=os.getcwdb() if tree.composition.names_files else None,
    )
    with (
        open_typed_set(specs, selection, opening, tree.composition, whole=True) as below,
        opening.progress.shards("writing", len(below)) as on_shard,
    ):
        built = make_image(make_tree(below, view), target, about, on_shard)
    return built, [device.shard(os.fsdecode(top)) for device in manifest.read_manifest(target).devices]
