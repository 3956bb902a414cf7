"""`mount --engine kernel`: makes the image of a set, or takes that of the last mount, and has the kernel mount it.

`auto` takes the kernel where nothing is known to prevent it, and says which engine it takes, and why.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from wdsfs import host, mount_table
from wdsfs.cli.output import shards_bar, write_image
from wdsfs.cli.process import ended_in_order
from wdsfs.errors import CorruptShard, MountError, ShardError, UnreadableShard
from wdsfs.remote.shard_paths import is_remote

if TYPE_CHECKING:
    from pathlib import Path

    from wdsfs.kernel.manifest import ImageOptions
    from wdsfs.mount.image_mount import ImageMount
    from wdsfs.spec.expand import Shard
    from wdsfs.tree.local_copies import LocalCopies
    from wdsfs.tree.options import Opening, TreeOptions
    from wdsfs.tree.shard_set import ShardSet

log = logging.getLogger("wdsfs")

_OWNER = ("uid", "gid", "umask")  # options of `-o` that are part of an image


def image_mount(
    shards: Sequence[Shard],
    mountpoint: str,
    tree: TreeOptions,
    opening: Opening,
    options: Sequence[str],
    trusting: bool,
    overlay: Path | None = None,
    adviser: Callable[[ShardSet], None] = lambda _: None,
) -> ImageMount:
    """Make the image of a set for this mount point, unless it is there, and return what is to be mounted.

    `options` are those of `-o`, `overlay` is the directory of an overlay above it. `adviser` is called
    with the set when its image is made. Raises CannotServe, ImageError, ShardErrors, UsageError.
    """
    from wdsfs.kernel import kept_images
    from wdsfs.kernel.erofs import OWN_TIMES_KERNEL
    from wdsfs.kernel.manifest import ImageOptions
    from wdsfs.mount.image_mount import ImageMount
    from wdsfs.mount.mountpoint import parse_options

    parsed = parse_options(options, overlay is not None)
    since = min(host.kernel_version()[:2], OWN_TIMES_KERNEL)
    owner = parsed.owner
    private = "allow_other" not in parsed.fuse
    wanted = ImageOptions(
        *(owner, b"/", (since[0], since[1]), tree.merge, tree.composition.public_text, private),
        writable=overlay is not None,
        directory=os.getcwdb() if tree.composition.names_files else None,
    )
    target, copies = kept_images.path_of(mountpoint), None
    if _is_known(shards, target, tree, opening, wanted):
        _note_use(target, mountpoint)
    else:
        copies = _made(shards, target, mountpoint, tree, opening, wanted, adviser)
    rest = [one for one in ",".join(options).split(",") if one.partition("=")[0] not in _OWNER]
    found = ImageMount(str(target), mountpoint, "/", [one for one in rest if one], trusting, copies=copies)
    if overlay is not None:
        from wdsfs.kernel.overlayfs import OverlayOver
        from wdsfs.tree.merged_tree import is_merged

        view, index = tree.view(opening.tolerance.allow_missing), opening.index_dir
        merged = is_merged(view, tree.merge)
        found.overlay = OverlayOver(
            *(overlay.absolute(), shards, view, merged, owner[:2], private, list(options)),
            index=None if index is None else str(index.absolute()),
        )
    return found


def _is_known(
    shards: Sequence[Shard], target: Path, tree: TreeOptions, opening: Opening, wanted: ImageOptions
) -> bool:
    """True if the image at this path is known to be that of the set, without a look into the index.

    That can be if shards are shown as they are and nothing is to be said of them: then the key follows from their
    fingerprints. To open the index takes longer than all the rest of a mount.
    """
    from wdsfs.kernel import kept_images
    from wdsfs.storage.identity import Fingerprint

    is_plain = tree.composition.is_plain and not any(one.without or one.index_file for one in shards)
    if not is_plain or opening.tolerance.strict or any(is_remote(one.path) for one in shards):
        return False
    try:
        looked = [(one.key, one.name, Fingerprint.at(one.path)) for one in shards]
    except ShardError:
        return False  # what that means is decided where the set is opened
    partial = opening.tolerance.allow_missing
    key = kept_images.key_of_plain(looked, tree.layout, tree.names, tree.index_tree, partial, wanted)
    return kept_images.is_there(target, key)


def _made(
    shards: Sequence[Shard],
    target: Path,
    mountpoint: str,
    tree: TreeOptions,
    opening: Opening,
    wanted: ImageOptions,
    adviser: Callable[[ShardSet], None],
) -> LocalCopies:
    """Make the image of a set at this path, unless it is there; returns the copies that it reads.

    Raises what `image_mount` raises.
    """
    from wdsfs.kernel import kept_images
    from wdsfs.tree.numbered_tree import check_name, make_numbered
    from wdsfs.tree.opening import opened_set

    view = tree.view(opening.tolerance.allow_missing)
    with opened_set(shards, opening, tree.composition, whole=True, shared=True) as below:
        check_name(below.shards, view, tree.merge)
        shown = make_numbered(below, view, tree.merge)
        copies = _copies_of(below, opening.quiet)
        wanted = wanted._replace(copies=copies.files)
        wanted = wanted._replace(key=kept_images.key_of(shown, wanted))
        if kept_images.is_there(target, wanted.key):
            _note_use(target, mountpoint)
        else:
            write_image(shown, os.fsencode(target), wanted, opening.quiet)
            adviser(below)
    return copies


def _note_use(image: Path, mountpoint: str) -> None:
    """`wdsfs cache` removes first what was not mounted for long."""
    if mount_table.mounted_at(mountpoint) is None:  # else its guard may look at the times
        os.utime(image)


def _copies_of(below: ShardSet, quiet: bool) -> LocalCopies:
    """The copies that the kernel is to read in the place of shards. Raises CannotServe, ShardErrors."""
    from wdsfs.kernel.devices import raise_file_limit
    from wdsfs.mount.image_mount import CannotServe
    from wdsfs.tree import local_copies

    needed = local_copies.wanted(below)
    raise_file_limit(2 * len(needed))
    with ended_in_order(), shards_bar("looking at copies", len(needed), quiet or not needed) as on_shard:
        try:
            return local_copies.held(needed, on_shard)
        except (UnreadableShard, CorruptShard) as error:
            raise CannotServe(str(error)) from None


def check_place(mountpoint: str, options: Sequence[str], overlay: Path | None) -> None:
    """Raise MountError for a mount point that cannot be used, before an image is made for it.

    A mount of an image whose guard is gone is no obstacle: it is guarded again, or gives way to the new image.
    """
    from wdsfs import mount_registry
    from wdsfs.mount.image_mount import unguarded
    from wdsfs.mount.mountpoint import check_mountpoint, parse_options

    place = mount_registry.canonical(mountpoint)
    if unguarded(place, overlay) is None:
        check_mountpoint(place, parse_options(options, overlay is not None).nonempty, [])


def refused(reason: str) -> MountError:
    """The error for `--engine kernel` where the kernel cannot be taken."""
    return MountError(f"--engine kernel: {reason}; --engine auto takes FUSE then")
