"""The set that a mounted image shows: its shards, and whether what is at their paths is what the kernel reads.

The kernel goes on with the old file of a shard that was replaced, and labels are in the image. Who opens the set
by its paths is refused whatever is another file by now, so that nobody takes one for the other.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from wdsfs import mount_table
from wdsfs.errors import MountError, RefusedShard, ShardError
from wdsfs.kernel import devices, manifest
from wdsfs.kernel.guard import Guarded, guard_of
from wdsfs.kernel.manifest import Device, ImageSet, Manifest, identity_of, image_of, is_mounted_at
from wdsfs.mount_table import MountPoint
from wdsfs.names import Reading
from wdsfs.remote import shard_paths
from wdsfs.spec.expand import Shard
from wdsfs.storage.identity import GONE, Fingerprint
from wdsfs.tree.shard_access import Access


@dataclass(frozen=True, slots=True)
class ShownImage:
    """An image that is mounted: what it says, and the registration of its guard, alive or not, if there is one.

    `paths` are those of all shards, as far as is known the ones that were opened for this mount; relative ones are
    below `base`.
    """

    mountpoint: str
    identity: str
    about: Manifest
    set: ImageSet
    base: str
    paths: list[str]
    guard: Guarded | None

    @property
    def shards(self) -> list[Shard]:
        """The shards of the set, in its order."""
        without, reading = self.set.without, Reading(**self.set.reading)
        named = zip(self.paths, self.set.shards, strict=False)  # further ones are joined
        return [Shard.of_texts(path, name, reading, without.get(name, ())) for path, name in named]

    @property
    def directory(self) -> str:
        """The directory that relative paths in the options of the view are of."""
        return os.path.normpath(os.path.join(self.base, self.set.directory))


def shown_at(mountpoint: str) -> ShownImage | None:
    """The image that is mounted at this path (canonical); None for any other mount, or none.

    Raises MountError if another image has taken its place, or if it does not say what its set is; OSErrors.
    """
    mount = mount_table.mounted_at(mountpoint)
    image = None if mount is None else image_of(mount)
    if mount is None or image is None:
        return None
    about = manifest.read(image)
    check_is_of_mount(image, mount)
    identity, guard = identity_of(image), guard_of(mountpoint)
    if guard is not None and guard.identity != identity:
        guard = None
    base = os.fsdecode(os.path.dirname(image)) if guard is None else guard.base
    paths = [one.shard(base) for one in about.devices]
    return ShownImage(mountpoint, identity, about, about.set, base, paths, guard)


def check_is_of_mount(image: bytes, mount: MountPoint) -> None:
    """Raise MountError if another image has taken the place of the one that is mounted, as far as can be known."""
    if not _is_of_mount(image, mount):
        mountpoint = os.fsdecode(mount.path)
        raise MountError(
            f"{mountpoint}: its image, {os.fsdecode(image)}, has been replaced by another one; see: "
            f"wdsfs refresh {shlex.quote(mountpoint)}"
        )


def _is_of_mount(image: bytes, mount: MountPoint) -> bool:
    identity, mountpoint = identity_of(image), os.fsdecode(mount.path)
    # An overlay, and an older kernel, do not show which image it is.
    shown = is_mounted_at(identity, mountpoint) if mount.fstype == "erofs" else None
    if shown is not None:
        return shown
    guard = guard_of(mountpoint)
    return guard is None or guard.identity == identity


@dataclass(frozen=True, slots=True)
class _Seen:
    """A file as it was when the image was made, and the inode number of the one that its guard has opened."""

    about: Device
    inode: int | None = None


class ShownAccess(Access):
    """Reaches the shards and label files of a mounted image, as long as they are what the mount shows."""

    def __init__(self, shown: ShownImage) -> None:
        self._mountpoint = shown.mountpoint
        self._trusting = shown.guard is not None and shown.guard.trusting
        inodes: list[int | None] = [None] * len(shown.paths)
        if shown.guard is not None and shown.guard.paths == shown.paths:
            inodes = [*shown.guard.inodes]
        seen = zip(shown.paths, map(_Seen, shown.about.devices, inodes), strict=True)
        labels = ((one.shard(shown.base), _Seen(one)) for one in shown.set.labels)
        self._seen = {os.fsencode(path): one for path, one in (*seen, *labels)}

    def look(self, path: bytes) -> Fingerprint:
        found = super().look(path)
        if not self._is_shown(path) or not self._is_shown(path + b"-wal", True):
            what = "is another file than the one that is" if path in self._seen else "is there since it was"
            raise RefusedShard(
                f"{os.fsdecode(path)}: {what} mounted; to show what is there now: "
                f"wdsfs refresh {shlex.quote(self._mountpoint)}"
            )
        return found

    def others(self) -> Iterator[str]:
        """The paths at which there is something else now than the mount shows, or nothing."""
        return (os.fsdecode(path) for path in self._seen if not self._is_shown(path))

    def _is_shown(self, path: bytes, unless_known: bool = False) -> bool:
        seen = self._seen.get(path)
        if seen is None:
            return unless_known
        about = seen.about
        if about.copy is not None:
            return devices.is_copy_of(os.fsdecode(path), about.copy.path)
        try:
            if seen.inode is not None and os.stat(path).st_ino != seen.inode:
                return False
            found = shard_paths.look(path)
        except (ShardError, OSError):
            found = GONE
        is_same_time = self._trusting or found.mtime_ns == about.mtime_ns
        return found.size == about.size and (is_same_time or not found.size)
