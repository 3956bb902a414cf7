"""Starts a mount with plain options: an image, or a set by the kernel or by FUSE.

`auto` takes the kernel where nothing is known to prevent it, and says which engine it takes, and why. What a
daemon does is decided in `fuse_session.py`, what a guard does in `kernel/image_mount.py`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from wdsfs import mount_table
from wdsfs.errors import ImageError, MountError, StaleShard, UsageError
from wdsfs.kernel import engine_checks
from wdsfs.kernel.guard import guard_of
from wdsfs.kernel.image_mount import ImageMount, end_if_wrong
from wdsfs.kernel.manifest import is_image
from wdsfs.kernel.set_image import CannotServe, ServedSet
from wdsfs.mount import image_session
from wdsfs.mount.mount_options import AUTO, MountOptions
from wdsfs.mount.mountpoint import split_options
from wdsfs.mount_registry import FUSE, canonical
from wdsfs.spec.dependencies import noted
from wdsfs.spec.expand import IMAGE_SUFFIX, expand

if TYPE_CHECKING:
    from wdsfs.tree.shard_set import ShardSet

log = logging.getLogger("wdsfs")


def start(mount: MountOptions) -> int:
    """Mount; returns an exit code when the tree is usable, in the foreground when the mount has ended.

    Raises WdsfsError.
    """
    if is_of_image(mount.specs):
        return _run(mount, _mount_of_image(mount))
    if mount.serving.engine != FUSE:
        code = _by_kernel(mount)
        if code is not None:
            return code
    from wdsfs.mount import fuse_session  # late: this import is slow, and a mount by the kernel does not need it

    return fuse_session.start(mount)


def is_guarded(specs: Sequence[str], mountpoint: str) -> bool:
    """Return True if the kernel serves these SHARDS at this path, and the guard lives."""
    guard = guard_of(canonical(mountpoint))
    return guard is not None and guard.alive and guard.specs == list(specs)


def is_of_image(specs: Sequence[str]) -> bool:
    """Return True if an image is named, or a file with the suffix of one, which may be damaged."""
    if len(specs) != 1 or "://" in specs[0]:
        return False
    return is_image(specs[0]) or (specs[0].endswith(IMAGE_SUFFIX) and os.path.isfile(specs[0]))


def _mount_of_image(mount: MountOptions) -> ImageMount:
    """Return the mount of an image that is named. Raises UsageError."""
    image, base, options = os.path.abspath(mount.specs[0]), mount.selection.base, mount.dash_o
    if base is not None and "://" in base:
        raise UsageError(f"--base {base}: the shards of an image are files; name their directory")
    if any(option.partition("=")[0] in ("uid", "gid", "umask") for option in split_options(options)):
        raise UsageError("-o uid, gid and umask are for FUSE; for an image give them to: wdsfs image")
    base = os.path.dirname(image) if base is None else os.path.abspath(base)
    return ImageMount(image, mount.mountpoint, base, mount.specs, options, mount.serving.trust_shards)


def _run(mount: MountOptions, image: ImageMount) -> int:
    image.removes_mountpoint = mount.removes_mountpoint
    if "wdsfs.remote.shard_paths" in sys.modules:  # the guard asks no store, and is not to keep the fetcher
        sys.modules["wdsfs.remote.shard_paths"].close()
    try:
        return image_session.run(image, mount.serving.foreground)
    finally:
        if image.cached >= 0:
            os.close(image.cached)  # here; the guard has its own


# --- the engine --------------------------------------------------------------------------------------------


def _for_fuse(mount: MountOptions) -> str | None:
    """Return why a mount with these options needs FUSE; None if the kernel may serve it."""
    serving = mount.serving
    given = {"--overlay": serving.overlay is not None, "--new": serving.new, "--lazy": serving.lazy}
    given |= {"--follow": serving.follow is not None, "--index-tree": mount.tree.index_tree}
    return next((f"{name} is for FUSE" for name, is_given in given.items() if is_given), None)


def _by_kernel(mount: MountOptions) -> int | None:
    """Mount a set by the kernel; return an exit code, or None if FUSE has to serve it. Raises WdsfsError."""
    is_choice, advice = mount.serving.engine == AUTO, list[str]()
    reason, image = _for_fuse(mount), None
    if reason is None:
        try:
            image = _prepared(mount, advice)
        except (CannotServe, ImageError) as error:
            reason = str(error)
            end_if_wrong(mount.mountpoint)
    if reason is not None and not is_choice:
        raise MountError(f"--engine kernel: {reason}; --engine auto takes FUSE instead")
    if is_choice:
        log.info("%s", "engine: kernel" if reason is None else f"engine: FUSE, because {reason}")
    return None if image is None else _run_with_advice(mount, image, advice)


def _run_with_advice(mount: MountOptions, image: ImageMount, advice: Sequence[str]) -> int | None:
    """Mount the image of a set, and give hints at it; returns as `_by_kernel`."""
    foreground = mount.serving.foreground
    if foreground:
        _say(advice)
    code = _run(mount, image)
    is_refused = code in (MountError.exit_code, StaleShard.exit_code)
    if mount.serving.engine == AUTO and is_refused and mount_table.mounted_at(mount.mountpoint) is None:
        log.info("engine: FUSE, because the kernel has not mounted it")
        return None
    if not code and not foreground:
        _say(advice)
    return code


def _say(lines: Sequence[str]) -> None:
    for line in lines:
        log.info("%s", line)


def _prepared(mount: MountOptions, advice: list[str]) -> ImageMount:
    """Make the image of a set, unless it is there, and return the mount. `advice` gets hints for the user.

    Raises CannotServe, WdsfsError.
    """
    tree, opening, serving = mount.tree, mount.opening, mount.serving
    with noted() as used:
        shards = expand(mount.specs, *mount.selection)
    if used.files:
        from wdsfs.tree.shard_access import refuse_foreign_lists  # late: most sets are named without a list

        refuse_foreign_lists(used.files, shared=True)
    reason = engine_checks.obstacle(shards, serving.trust_shards)
    if reason is None and serving.engine == AUTO:
        reason = engine_checks.obstacle_now(shards)  # else the guard says it, when the image is made
    if reason is not None:
        raise CannotServe(reason)
    image_session.check_place(mount.mountpoint, mount.dash_o)

    def advise(below: ShardSet) -> None:
        if not opening.quiet:
            from wdsfs.mount.hints import hints  # late: it loads NumPy

            advice.extend(hints(below, tree, writable=False))

    served = ServedSet(shards, tree, opening, advise)
    return image_session.prepare(served, mount.specs, mount.mountpoint, mount.dash_o, serving.trust_shards)
