"""The calls that the rest of wdsfs makes to this room: serve a set or an image, find mounts of images.

`mount/engines.py` has the interface.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from wdsfs.kernel.engine_checks import check_engine as check_machine
from wdsfs.kernel.guard import Guarded, guard_of
from wdsfs.kernel.image_session import mount_image, mount_set, write_image
from wdsfs.kernel.manifest import image_of, is_image
from wdsfs.mount_registry import canonical, registration_of

if TYPE_CHECKING:
    from wdsfs.kernel.live_kernel import KernelMount
    from wdsfs.mount_table import MountPoint

__all__ = ["check_machine", "is_image", "mount_image", "mount_set", "write_image"]


def is_guarded(specs: Sequence[str], mountpoint: str) -> bool:
    """Return True if the kernel serves these SHARDS at this path, and the guard lives."""
    guard = guard_of(canonical(mountpoint))
    return guard is not None and guard.alive and guard.specs == list(specs)


def is_mount(mounted: MountPoint) -> bool:
    """Return True if the kernel lists the mount of an image here."""
    return image_of(mounted) is not None


def find_mount(mounted: MountPoint) -> KernelMount | None:
    """Return the mount of an image that the kernel lists here; None for any other mount.

    It may be one whose image was removed.
    """
    from wdsfs.kernel.live_kernel import KernelMount  # late: the process of a mount needs none of it

    guard = registration_of(os.fsdecode(mounted.path), Guarded)
    if guard is not None and not guard.is_of(mounted):
        guard = None
    return None if guard is None and image_of(mounted) is None else KernelMount(mounted, guard)
