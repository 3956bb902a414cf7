"""The calls that the rest of wdsfs makes to this room: serve a set or an image, find mounts of images.

`mount/engines.py` has the interface. What a function needs is loaded when it is called: every mount and every
`wdsfs status` loads this module.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from wdsfs.kernel.manifest import image_of, is_image
from wdsfs.mount_registry import canonical, registration_of

if TYPE_CHECKING:
    from wdsfs.host import MachineFinding
    from wdsfs.kernel.image import Built
    from wdsfs.kernel.live_kernel import KernelMount
    from wdsfs.mount.mount_options import MountOptions
    from wdsfs.mount_table import MountPoint
    from wdsfs.shards import Shard
    from wdsfs.tree.set_options import Opening, Owner, Selection, TreeOptions

__all__ = ["is_image"]


def check_machine() -> MachineFinding:
    """Return what `wdsfs doctor` says about the kernel's engine."""
    from wdsfs.kernel.engine_checks import check_engine

    return check_engine()


def mount_image(mount: MountOptions) -> int:
    """Mount the image that is named; return an exit code. Raises UsageError, MountError."""
    from wdsfs.kernel import image_session

    return image_session.mount_image(mount)


def mount_set(mount: MountOptions, shards: Sequence[Shard]) -> int:
    """Make the image of a set, unless it is there, and mount it.

    Returns and raises as `image_session.mount_set`.
    """
    from wdsfs.kernel import image_session

    return image_session.mount_set(mount, shards)


def write_image(
    specs: Sequence[str],
    selection: Selection,
    tree: TreeOptions,
    opening: Opening,
    output: str,
    base: str | None,
    owner: Owner,
) -> tuple[Built, list[str]]:
    """Write the image of a set to a file. Returns and raises as `image_session.write_image`."""
    from wdsfs.kernel import image_session

    return image_session.write_image(specs, selection, tree, opening, output, base, owner)


def is_guarded(specs: Sequence[str], mountpoint: str) -> bool:
    """Return True if the kernel serves these SHARDS at this path, and the guard lives."""
    from wdsfs.kernel.guard import guard_of

    guard = guard_of(canonical(mountpoint))
    return guard is not None and guard.alive and guard.specs == list(specs)


def is_mount(mounted: MountPoint) -> bool:
    """Return True if the kernel lists the mount of an image here."""
    return image_of(mounted) is not None


def find_mount(mounted: MountPoint) -> KernelMount | None:
    """Return the mount of an image that the kernel lists here; None for any other mount.

    It may be one whose image was removed.
    """
    from wdsfs.kernel.guard import Guarded
    from wdsfs.kernel.live_kernel import KernelMount

    guard = registration_of(os.fsdecode(mounted.path), Guarded)
    if guard is not None and not guard.is_of(mounted):
        guard = None
    return None if guard is None and image_of(mounted) is None else KernelMount(mounted, guard)
