"""The set that a mounted image shows: its shards, opened only if they are still what the kernel reads.

The kernel goes on with the old file of a shard that was replaced, and labels are in the image. Opening the set by
its paths refuses each file that was replaced since, so that nobody mistakes the new file for the mounted one.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from wdsfs import mount_table
from wdsfs.door.shard_door import DOOR
from wdsfs.errors import MissingShard, MountError, RefusedShard, ShardError
from wdsfs.kernel import manifest
from wdsfs.kernel.guard import Guarded, guard_of
from wdsfs.kernel.manifest import Device, Manifest, identity_of, image_of, is_mounted_at
from wdsfs.names import Reading
from wdsfs.shards import GONE, Fingerprint, Shard
from wdsfs.tree.shard_access import Access


@dataclass(frozen=True, slots=True)
class ShownImage:
    """An image that is mounted: its manifest, and the registration of its guard, alive or not, if there is one.

    `paths` are those of all shards, if known those that were opened for this mount; relative paths are below
    `base`.
    """

    mountpoint: str
    identity: str
    about: Manifest
    base: str
    paths: list[str]
    guard: Guarded | None

    @property
    def shards(self) -> list[Shard]:
        """The shards of the set, in its order."""
        about = self.about.set
        reading, named = Reading(**about.reading), zip(self.paths, about.shards, strict=False)  # others are joined
        return [Shard.of_texts(path, name, reading, about.without.get(name, ())) for path, name in named]

    @property
    def directory(self) -> str:
        """The directory that relative paths in the options of the view are of."""
        return os.path.normpath(os.path.join(self.base, self.about.set.directory))


def how_to_renew(mountpoint: str) -> str:
    """Return the way to make a mount show the present files."""
    return f"wdsfs umount {shlex.quote(mountpoint)}, and mount it again"


def shown_at(mountpoint: str) -> ShownImage | None:
    """Return the image that is mounted at this path (canonical); None for any other mount, or none.

    Raises MountError if another image has taken its place, or if it does not say what its set is; OSErrors.
    """
    mount = mount_table.mounted_at(mountpoint)
    image = None if mount is None else image_of(mount)
    if mount is None or image is None:
        return None
    about, identity, guard = manifest.read_manifest(image), identity_of(image), guard_of(mountpoint)
    is_shown = is_mounted_at(identity, mountpoint)
    if is_shown is None:
        is_shown = guard is None or guard.identity == identity
    if not is_shown:
        raise MountError(
            f"{mountpoint}: its image, {os.fsdecode(image)}, has been replaced by another one; to show that one: "
            f"{how_to_renew(mountpoint)}"
        )
    if guard is not None and guard.identity != identity:
        guard = None
    base = os.fsdecode(os.path.dirname(image)) if guard is None else guard.base
    paths = [device.shard(base) for device in about.devices]
    return ShownImage(mountpoint, identity, about, base, paths, guard)


class _Then(NamedTuple):
    """A file as it was when the image was made, and the inode number of the one that its guard has opened."""

    device: Device
    inode: int | None = None


class ShownAccess(Access):
    """Reaches the shards and label files of a mounted image, as long as they are what the mount shows."""

    def __init__(self, shown: ShownImage) -> None:
        self._mountpoint = shown.mountpoint
        self._trusting = shown.guard is not None and shown.guard.trusting
        inodes: list[int | None] = [None] * len(shown.paths)
        if shown.guard is not None and shown.guard.paths == shown.paths:
            inodes = [*shown.guard.inodes]
        labels = {os.fsencode(label.shard(shown.base)): _Then(label) for label in shown.about.set.labels}
        shards = zip(map(os.fsencode, shown.paths), map(_Then, shown.about.devices, inodes), strict=True)
        self._files = {**dict(shards), **labels}

    def look(self, path: bytes) -> Fingerprint:
        try:
            fingerprint = super().look(path)
        except MissingShard:
            raise MissingShard(
                f"{os.fsdecode(path)}: was removed since it was mounted; to show what is there now: "
                f"{how_to_renew(self._mountpoint)}"
            ) from None
        if not self._is_shown(path) or not self._is_shown(path + b"-wal", unless_known=True):
            change = "replaced" if path in self._files else "created"
            raise RefusedShard(
                f"{os.fsdecode(path)}: was {change} since the set was mounted; to show what is there now: "
                f"{how_to_renew(self._mountpoint)}"
            )
        return fingerprint

    def others(self) -> Iterator[str]:
        """Return the paths of files that were replaced or removed since the set was mounted."""
        return (os.fsdecode(path) for path in self._files if not self._is_shown(path))

    def _is_shown(self, path: bytes, *, unless_known: bool = False) -> bool:
        if path not in self._files:
            return unless_known
        device, inode = self._files[path]
        try:
            if inode is not None and os.stat(path).st_ino != inode:
                return False
            now = DOOR.look(path)
        except (ShardError, OSError):
            now = GONE
        is_same_time = self._trusting or now.mtime_ns == device.mtime_ns
        return now.size == device.size and (is_same_time or not now.size)
