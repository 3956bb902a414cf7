"""The images that are mounted on this machine, as the kernel lists them."""

from __future__ import annotations

import os
from typing import NamedTuple

from wdsfs import mount_table
from wdsfs.kernel.manifest import is_image
from wdsfs.mount_table import MountPoint


class MountedImage(NamedTuple):
    """A mount of an image: where it is, and the path of the image."""

    mount: MountPoint
    image: bytes


def mounted_images() -> list[MountedImage]:
    """All mounts of images of wdsfs, oldest first; of root's images those that this user may read."""
    found = ((one, image_of(one)) for one in mount_table.mounts())
    return [MountedImage(one, image) for one, image in found if image is not None]


def image_of(mount: MountPoint) -> bytes | None:
    """The path of the image of a mount, which may lie below an overlay; None if that is no image of wdsfs."""
    if mount.fstype not in ("erofs", "overlay"):
        return None
    path = mount.source
    if path.startswith(b"/dev/loop"):
        try:
            with open(b"/sys/block/" + os.path.basename(path) + b"/loop/backing_file", "rb") as file:
                path = file.read().removesuffix(b"\n")
        except OSError:
            return None
    return path if path.startswith(b"/") and is_image(path) else None  # those of others are called "overlay"
