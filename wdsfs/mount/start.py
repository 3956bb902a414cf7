"""Starts a mount with plain options: an image, or a set by the kernel or by FUSE.

`auto` chooses the kernel unless a reason against it is known, and logs the choice with the reason.
`fuse_session.py` has the work of a daemon, `kernel/guard.py` the work of a guard.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from wdsfs.errors import MountError
from wdsfs.mount.engines import CannotServe, is_installed, kernel_engine
from wdsfs.mount.mount_options import AUTO, MountOptions
from wdsfs.mount_registry import FUSE
from wdsfs.spec.dependencies import noted
from wdsfs.spec.existence import IMAGE_SUFFIX
from wdsfs.spec.expand import expand

if TYPE_CHECKING:
    from wdsfs.shards import Shard

log = logging.getLogger("wdsfs")


def start_mount(mount: MountOptions) -> int:
    """Mount. Return an exit code when the tree is usable, or, in the foreground, when the mount has ended.

    Raises WdsfsError.
    """
    if is_of_image(mount.specs):
        return kernel_engine().mount_image(mount)
    if mount.serving.engine != FUSE:
        code = _start_by_kernel(mount)
        if code is not None:
            return code
    from wdsfs.mount import fuse_session  # late: this import is slow, and the kernel's engine does not need it

    return fuse_session.mount_by_fuse(mount)


def is_guarded(specs: Sequence[str], mountpoint: str) -> bool:
    """Return True if the kernel serves these SHARDS at this path, and the guard lives."""
    return is_installed() and kernel_engine().is_guarded(specs, mountpoint)


def is_of_image(specs: Sequence[str]) -> bool:
    """Return True for an image, and for any file with the suffix of an image: a damaged image has only that."""
    if len(specs) != 1 or "://" in specs[0]:
        return False
    if specs[0].endswith(IMAGE_SUFFIX) and os.path.isfile(specs[0]):
        return True
    return is_installed() and kernel_engine().is_image(specs[0])


def _start_by_kernel(mount: MountOptions) -> int | None:
    """Mount a set by the kernel; return an exit code, or None if FUSE must serve the set. Raises WdsfsError."""
    is_choice = mount.serving.engine == AUTO
    try:
        if is_choice and not is_installed():
            raise CannotServe("the kernel's engine is not installed")
        engine = kernel_engine()
        _refuse_options_for_fuse(mount)
        return engine.mount_set(mount, _expanded(mount))
    except CannotServe as reason:
        if not is_choice:
            raise MountError(f"--engine kernel: {reason}; --engine auto takes FUSE instead") from None
        log.info("engine: FUSE, because %s", reason)
        return None


def _refuse_options_for_fuse(mount: MountOptions) -> None:
    """Raise CannotServe for options that only FUSE has."""
    serving = mount.serving
    given = {"--overlay": serving.overlay is not None, "--new": serving.new, "--lazy": serving.lazy}
    given |= {"--follow": serving.follow is not None, "--index-tree": mount.tree.index_tree}
    for name, is_given in given.items():
        if is_given:
            raise CannotServe(f"{name} is for FUSE")


def _expanded(mount: MountOptions) -> Sequence[Shard]:
    """Return the shards that SHARDS name.

    Raises the errors of `expand`, and MountError for a list that other users can write.
    """
    with noted() as used:
        shards = expand(mount.specs, *mount.selection)
    if used.files:
        from wdsfs.tree.shard_access import refuse_foreign_lists  # late: most users name no list

        refuse_foreign_lists(used.files, shared=True)
    return shards
