"""Mounts the kernel's overlayfs above an image, and freezes it for a commit.

The image is mounted for a moment at a place of our own, the overlay is made over it and keeps it in use, and the
image is unmounted again. So there is one mount, and when it ends, both do.

Its marks are in the namespace "user." (`userxattr`), as those of the FUSE engine: both read the uppers of each
other, and a user cannot make a mark by setting an attribute, for the kernel writes that under another name.
Nothing is left in the upper that refers to one image (no `redirect_dir`, `metacopy`, `index`): the
image is made again when shards change.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wdsfs import host, mount_registry, mount_table
from wdsfs.errors import MountError, OverlayBusy, OverlayUnusable
from wdsfs.kernel import erofs_mount
from wdsfs.overlay.mounted_overlay import MountedOverlay
from wdsfs.overlay.overlay_directory import OverlayDirectory, escaped, is_used, unfinished
from wdsfs.overlay.upper_format import OPEN_DIRECTORY
from wdsfs.overlay.work_directory import PROTOTYPE
from wdsfs.shards import Shard
from wdsfs.tree.tree import View

_SETTINGS = (
    (b"redirect_dir", b"nofollow"),
    (b"metacopy", b"off"),
    (b"index", b"off"),
    (b"xino", b"on"),  # one device number for all of it, and the same inode numbers before and after a copy-up
)
# Parts of the inode numbers in a mount: the bit of what is in the image, and the number there.
OF_LOWER, NUMBER = 1 << 63, (1 << 62) - 1
_RELEASE_SECONDS = 10.0
_WHITEOUTS_BY_ATTRIBUTE = (6, 8)  # the first kernel that understands them


@dataclass(slots=True)
class OverlayOver:
    """An overlay to be mounted: its directory, and the set below it with its options.

    `owner` (uid, gid) owns the files of the shards. Nobody but the owner can enter a `private` mount.
    `options` of `-o` and `index` (a directory) are for commands that make a new image.
    """

    directory: Path
    shards: Sequence[Shard]
    view: View
    owner: tuple[int, int]
    private: bool
    options: list[str]
    index: str | None

    def taken(self, served_at: str | None) -> MountedOverlay:
        """Take the overlay for this process. Raises OverlayUnusable, OverlayBusy.

        `served_at` is the path of the overlay's mount, if the kernel serves it already without a guard.
        """
        overlay = MountedOverlay(*(self.directory, self.shards, self.view, self.owner), served_at=served_at)
        _refuse_whiteouts(overlay.place)
        return overlay

    def set_who_enters(self) -> None:
        """Set the mode of the upper's top, and so of the mount: only the owner may enter, or others, too."""
        upper = OverlayDirectory(self.directory).upper
        mode = stat.S_IMODE(upper.stat().st_mode)
        if self.private and mode & 0o077:
            upper.chmod(mode & ~0o077)
        elif not self.private and mode == 0o700:
            upper.chmod(0o755)

    def mount(
        self, image: str, mountpoint: str, devices: Sequence[int], attributes: int, instead: bool = False
    ) -> None:
        """Mount the overlay above an image; the arguments are as in `erofs_mount.mount_image`.

        `instead`: in the place of the mount that is there; before Linux 6.5 there is none for a moment. REQUIRES:
        this process has the overlay, and nobody can write to that mount. Raises MountError.
        """
        place = OverlayDirectory(self.directory)
        shutil.rmtree(place.kernel_work, ignore_errors=True)  # of a mount that a crash has ended
        with _staged(image, mountpoint, devices) as lower:
            try:
                place.kernel_work.mkdir(0o700, exist_ok=True)
                settings = (
                    (b"source", os.fsencode(image)),
                    (b"lowerdir", escaped(lower).replace(b":", b"\\:")),
                    (b"upperdir", escaped(place.upper)),
                    (b"workdir", escaped(place.kernel_work)),
                    *_SETTINGS,
                )
                _mount(settings, mountpoint, attributes, instead)
            except OSError as error:
                raise MountError(_explained(mountpoint, place, error)) from None

    def refuse_writable(self, mountpoint: str) -> None:
        """Raise MountError unless nobody can write to the mount: two mounts must not write into one upper."""
        mounted = mount_table.mounted_at(mountpoint)
        if mounted is None or "ro" not in mounted.super_options:
            raise MountError(f"{mountpoint}: has a writable overlay; unmount it, and mount it again")

    def clean_work(self) -> None:
        """Remove what the kernel has left in its work directory. REQUIRES: the mount has ended.

        The directory itself stays: it shows that the kernel has written into the upper. The kernel reports the end
        of a mount a moment before it releases the upper. This waits for that, so that the next mount can use it.
        """
        place, end = OverlayDirectory(self.directory), time.monotonic() + _RELEASE_SECONDS
        while is_used(place.upper):
            if time.monotonic() > end:
                return  # who asks next finds the work directory, and asks the kernel, too
            time.sleep(0.01)
        shutil.rmtree(place.kernel_work / "work", ignore_errors=True)

    def registered(self) -> dict[str, Any]:
        """Return the fields of the registration of its guard that are about the overlay."""
        shards = self.shards
        return {
            "overlay": str(self.directory),
            "shards": [[os.fsdecode(shard.path), os.fsdecode(shard.name)] for shard in shards],
            "reading": shards[0].reading._asdict(),
            "index": self.index,
            "options": self.options,
        }

    def show(self, shards: Sequence[tuple[str, str]]) -> None:
        """Note the shards (paths and names) of a new image."""
        reading = self.shards[0].reading
        self.shards = [Shard.of_texts(path, name, reading) for path, name in shards]


def _refuse_whiteouts(place: OverlayDirectory) -> None:
    """Raise OverlayUnusable for whiteouts that this kernel would show as empty files."""
    with suppress(FileNotFoundError):
        is_device = stat.S_ISCHR(os.lstat(os.fsencode(place.work) + b"/" + PROTOTYPE).st_mode)
        if not is_device and host.kernel_version() < _WHITEOUTS_BY_ATTRIBUTE:
            raise OverlayUnusable(
                f"{place.path}: its whiteouts are files with an attribute, which Linux understands since 6.8; "
                "mount it with --engine fuse"
            )


def _mount(settings: Sequence[tuple[bytes, bytes]], mountpoint: str, attributes: int, instead: bool) -> None:
    flags = [b"userxattr"]
    if instead:
        try:
            mount_table.mount(b"overlay", settings, flags, mountpoint, attributes, beneath=True)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
        else:
            mount_table.detach(mountpoint)
            return
        mount_table.detach(mountpoint)
    mount_table.mount(b"overlay", settings, flags, mountpoint, attributes)


@contextmanager
def _staged(image: str, mountpoint: str, devices: Sequence[int]) -> Iterator[Path]:
    """Mount an image at a directory of the mount registry for the time of the block. Raises MountError."""
    lower = mount_registry.file_of(mountpoint, ".lower")
    while mount_table.mounted_at(lower) is not None:  # of a process that was killed here
        erofs_mount.detach(str(lower))
    lower.mkdir(0o700, exist_ok=True)
    attributes = mount_table.READ_ONLY | mount_table.NO_SUID | mount_table.NO_DEVICES
    try:
        erofs_mount.mount_image(image, str(lower), devices, attributes)
        yield lower
    finally:
        if mount_table.mounted_at(lower) is not None:
            erofs_mount.detach(str(lower))
        lower.rmdir()


def _explained(mountpoint: str, place: OverlayDirectory, error: OSError) -> str:
    where = f"{mountpoint}: the kernel does not mount the overlay {place.path}"
    by_fuse = "or take --engine fuse"
    match error.errno:
        case errno.ENODEV:
            return f"{where}: it has no overlayfs (modprobe overlay); {by_fuse}"
        case errno.EROFS:
            return f"{where}: it lies on a read-only file system; {by_fuse}"
        case errno.EINVAL:
            return (
                f"{where} ({error.strerror}): the overlay has to be on a local file system such as ext4, xfs or "
                f"btrfs, that is not read-only (dmesg may say more); {by_fuse}"
            )
    return f"{where}: {error.strerror}; {by_fuse}"


@contextmanager
def frozen(mountpoint: str, place: OverlayDirectory) -> Iterator[None]:
    """Freeze the mount for a block: nobody can write to it, and everything written before is on disk.

    A commit in place that stops half-way leaves it frozen. Raises OverlayBusy, also if another commit is running.
    """
    work = os.open(place.work, OPEN_DIRECTORY)
    try:
        try:
            fcntl.flock(work, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the guard has that of the overlay itself
        except BlockingIOError:
            raise OverlayBusy(f"{mountpoint}: another commit or refresh is running; try again later") from None
        device = _device(mountpoint)
        _set_read_only(mountpoint, True)
        try:
            yield
        finally:
            if _device(mountpoint) == device and not unfinished(place):
                _set_read_only(mountpoint, False)
    finally:
        os.close(work)


def _device(mountpoint: str) -> int | None:
    mounted = mount_table.mounted_at(mountpoint)
    return None if mounted is None else mounted.device


def _set_read_only(mountpoint: str, read_only: bool) -> None:
    try:
        mount_table.set_read_only(mountpoint, read_only)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise OverlayBusy(
                f"{mountpoint}: programs have files open that are written to or were removed; close them first. "
                f"See which: fuser -vm {mountpoint}"
            ) from None
        if error.errno == errno.EPERM:
            raise OverlayBusy(f"{mountpoint}: the kernel serves this mount, so only root can do that") from None
        raise OverlayBusy(f"{mountpoint}: cannot be made read-only: {error.strerror}") from None
