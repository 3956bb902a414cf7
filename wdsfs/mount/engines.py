"""The interface of the kernel's engine. That engine is a wing, which only this module loads.

The module `engine.py` of the room `kernel` decides which sets the kernel can serve, and how. The room `fuse`
serves every set by FUSE, for `fuse_session.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from wdsfs import wings

if TYPE_CHECKING:
    from wdsfs.host import MachineFinding
    from wdsfs.mount.live_mount import LiveMount
    from wdsfs.mount.mount_options import MountOptions
    from wdsfs.mount_table import MountPoint
    from wdsfs.shards import Shard
    from wdsfs.tree.set_options import Opening, Owner, Selection, TreeOptions


KERNEL_ENGINE = "kernel engine"  # the name of a check of `wdsfs doctor`


class CannotServe(Exception):
    """The kernel cannot serve a set; the text says why."""


class KernelEngine(Protocol):
    """The functions of `kernel/engine.py`."""

    def is_image(self, path: str) -> bool:
        """Return True if this file is an image that wdsfs has made, whole or not."""

    def mount_image(self, mount: MountOptions) -> int:
        """Mount the named image; return an exit code. Raises WdsfsError."""

    def mount_set(self, mount: MountOptions, shards: Sequence[Shard]) -> int:
        """Make the image of a set, unless it exists, and mount it; return an exit code.

        Raises CannotServe, WdsfsError.
        """

    def is_guarded(self, specs: Sequence[str], mountpoint: str) -> bool:
        """Return True if the kernel serves these SHARDS at this path, and the guard lives."""

    def is_mount(self, mounted: MountPoint) -> bool:
        """Return True if the kernel lists the mount of an image here."""

    def find_mount(self, mounted: MountPoint) -> LiveMount | None:
        """Return the mount of an image that the kernel lists here; None for any other mount."""

    def check_machine(self) -> MachineFinding:
        """Return the finding of `wdsfs doctor` about the kernel's engine."""

    def write_image(
        self,
        specs: Sequence[str],
        selection: Selection,
        tree: TreeOptions,
        opening: Opening,
        output: str,
        base: str | None,
        owner: Owner,
    ) -> tuple[Any, list[str]]:
        """Write the image of a set to a file; return its counts and the paths of its shards.

        Raises UsageError, ImageError, ShardErrors.
        """


def is_installed() -> bool:
    """Return True if the kernel's engine is installed."""
    return wings.is_installed("kernel")


def kernel_engine() -> KernelEngine:
    """Return the kernel's engine. Raises NotInstalled."""
    return cast(KernelEngine, wings.load("kernel", "engine"))


def is_kernel_mount(mounted: MountPoint) -> bool:
    """Return True if the kernel lists the mount of an image here; False without the wing."""
    return _may_be_image(mounted) and kernel_engine().is_mount(mounted)


def find_kernel_mount(mounted: MountPoint) -> LiveMount | None:
    """Return the mount of an image that the kernel lists here; None for any other mount, and without the wing."""
    return kernel_engine().find_mount(mounted) if _may_be_image(mounted) else None


def _may_be_image(mounted: MountPoint) -> bool:
    # An earlier release mounted overlays over images.
    return mounted.fstype in ("erofs", "overlay") and is_installed()
