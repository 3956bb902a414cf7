"""Starts a mount with plain options: an image, or a set by the kernel or by FUSE.

`auto` takes the kernel where nothing is known to prevent it, and says which engine it takes, and why. What a
daemon does is decided in `fuse_session.py`, what a guard does in `kernel/image_mount.py`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from wdsfs import mount_table
from wdsfs.errors import ImageError, MountError, StaleShard, UsageError
from wdsfs.host import in_directory
from wdsfs.kernel import engine_checks
from wdsfs.kernel.guard import MadeBy, guard_of
from wdsfs.kernel.image_mount import ImageMount, end_if_wrong
from wdsfs.kernel.manifest import is_image
from wdsfs.kernel.set_image import CannotServe, ServedSet
from wdsfs.mount import image_session
from wdsfs.mount.mountpoint import split_options
from wdsfs.mount.options import AUTO, MountOptions, refuse_view
from wdsfs.mount_registry import FUSE, KERNEL, canonical
from wdsfs.spec.dependencies import noted
from wdsfs.spec.expand import IMAGE_SUFFIX, expand

if TYPE_CHECKING:
    from wdsfs.tree.shard_set import ShardSet

log = logging.getLogger("wdsfs")

# Variables that say where the index, and the caches beside it, are, what these may hold, and if commands may run.
ENVIRONMENT = (
    *("WDSFS_ALLOW_PIPE", "WDSFS_INDEX_DIR", "WDSFS_CACHE_DIR", "WDSFS_CACHE_SIZE", "WDSFS_UNPACK"),
    *("WDSFS_UNPACK_MEMORY", "XDG_CACHE_HOME", "HOME"),
)


def start(mount: MountOptions, made: MadeBy | None = None) -> int:
    """Mount; returns an exit code when the tree is usable, in the foreground when the mount has ended.

    `made` is the command, if it may be kept for `refresh`. Raises WdsfsError.
    """
    if is_of_image(mount.specs):
        return _run(_mount_of_image(mount), made, mount.serving.foreground)
    if mount.serving.engine != FUSE:
        code = _by_kernel(mount, made)
        if code is not None:
            return code
    from wdsfs.mount import fuse_session  # late: this import is slow, and a mount by the kernel does not need it

    return fuse_session.start(mount)


def made_by(arguments: Sequence[str]) -> MadeBy:
    """Return the command of a mount, for `refresh` to repeat: its arguments, directory and environment."""
    try:
        directory = os.getcwd()
    except FileNotFoundError:  # it was removed: then no argument is relative to it
        directory = "/"
    environment = {name: os.environ[name] for name in ENVIRONMENT if os.environ.get(name)}
    return MadeBy(list(arguments), directory, environment)


def has_made(arguments: Sequence[str], mountpoint: str) -> bool:
    """Return True if the mount at this path is one by the kernel that a command with these arguments has made.

    Its guard has to live.
    """
    guard = guard_of(canonical(mountpoint))
    return guard is not None and guard.alive and guard.made is not None and guard.made.arguments == list(arguments)


def repeated(
    options_of: Callable[[Sequence[str]], AbstractContextManager[MountOptions]], made: MadeBy
) -> ImageMount:
    """Return the mount that the command of a mount by the kernel would make now. Raises WdsfsError.

    `options_of` reads its arguments, and has them in force for a block.
    """
    before = {name: os.environ.pop(name, None) for name in ENVIRONMENT}
    os.environ.update(made.environment)
    try:
        with in_directory(made.directory), options_of(made.arguments) as mount:
            return prepared_again(mount)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def prepared_again(mount: MountOptions) -> ImageMount:
    """Return the mount that these options of a mount by the kernel would make now. Raises WdsfsError.

    Its image is made, unless it is there; nothing is said of the set again.
    """
    if is_of_image(mount.specs):
        return _mount_of_image(mount)
    try:
        if _for_fuse(mount) is None:
            return _prepared(mount, repeated=True, advice=[])
    except CannotServe as error:
        if mount.serving.engine == KERNEL:
            raise _refused(str(error)) from None
    except ImageError:
        if mount.serving.engine == KERNEL:
            raise
    raise MountError("its command would now mount by FUSE, not by the kernel; unmount it, and mount it again")


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
    return ImageMount(image, mount.mountpoint, base, options, mount.serving.trust_shards)


def _run(image: ImageMount, made: MadeBy | None, foreground: bool) -> int:
    image.made = made
    if "wdsfs.remote.shard_paths" in sys.modules:  # the guard asks no store, and is not to keep the fetcher
        sys.modules["wdsfs.remote.shard_paths"].close()
    return image_session.run(image, foreground)


# --- the engine --------------------------------------------------------------------------------------------


def _for_fuse(mount: MountOptions) -> str | None:
    """Return why a mount with these options needs FUSE; None if the kernel may serve it."""
    serving = mount.serving
    given = {"--new": serving.new, "--lazy": serving.lazy, "--follow": serving.follow is not None}
    reason = next((f"{name} is for FUSE" for name, is_given in given.items() if is_given), None)
    if reason is None and serving.overlay is not None and serving.engine == AUTO:
        return "with --overlay FUSE does more (--engine kernel takes the kernel)"
    return reason


def _by_kernel(mount: MountOptions, made: MadeBy | None) -> int | None:
    """Mount a set by the kernel; return an exit code, or None if FUSE has to serve it. Raises WdsfsError."""
    is_choice, advice = mount.serving.engine == AUTO, list[str]()
    reason, image = _for_fuse(mount), None
    if reason is None:
        try:
            image = _prepared(mount, repeated=False, advice=advice)
        except CannotServe as error:
            reason = str(error)
            end_if_wrong(mount.mountpoint, mount.overlay)
        except ImageError as error:
            if not is_choice:
                raise
            reason = str(error)
    if reason is not None and not is_choice:
        raise _refused(reason)
    if is_choice:
        log.info("%s", "engine: kernel" if reason is None else f"engine: FUSE, because {reason}")
    return None if image is None else _run_with_advice(mount, image, made, advice)


def _refused(reason: str) -> MountError:
    return MountError(f"--engine kernel: {reason}; --engine auto takes FUSE instead")


def _run_with_advice(
    mount: MountOptions, image: ImageMount, made: MadeBy | None, advice: Sequence[str]
) -> int | None:
    """Mount the image of a set, and give hints at it; returns as `_by_kernel`."""
    foreground = mount.serving.foreground
    if foreground:
        _say(advice)
    code = _run(image, made, foreground)
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


def _prepared(mount: MountOptions, repeated: bool, advice: list[str]) -> ImageMount:
    """Make the image of a set, unless it is there, and return the mount. `advice` gets hints for the user.

    `repeated`: for a mount that is there. Raises CannotServe, WdsfsError.
    """
    tree, opening, serving = mount.tree, mount.opening, mount.serving
    with noted() as used:
        shards = expand(mount.specs, *mount.selection)
    if used.files:
        from wdsfs.tree.shard_access import refuse_foreign_lists  # late: most sets are named without a list

        refuse_foreign_lists(used.files, shared=True)
    reason = engine_checks.obstacle(shards, serving.trust_shards)
    if reason is None and serving.engine == AUTO and not repeated:
        reason = engine_checks.obstacle_now(shards)  # else the guard says it, when the image is made
    if reason is not None:
        raise CannotServe(reason)
    if not repeated:
        image_session.check_place(mount.mountpoint, mount.dash_o, mount.overlay)
    if mount.overlay is not None:
        refuse_view(shards, tree)

    def advise(below: ShardSet) -> None:
        if not (opening.quiet or repeated):
            from wdsfs.mount.hints import hints  # late: it loads NumPy

            advice.extend(hints(below, tree, mount.overlay is not None))

    served = ServedSet(shards, tree, opening, advise)
    return image_session.prepare(served, mount.mountpoint, mount.dash_o, serving.trust_shards, mount.overlay)
