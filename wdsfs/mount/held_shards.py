"""An image and the shards below one mount of it, held open, and watched for changes: by leases, or by their times.

With a read lease (fcntl(2), F_SETLEASE) a program that opens one for writing, or truncates it, waits until the
lease is given up. Where a file system has no leases, the times of the file are compared; and where it shows files
of another one (an overlay, FUSE), in which they can be written past any lease.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import select
from dataclasses import dataclass
from pathlib import Path

from wdsfs import mount_table
from wdsfs.errors import MountError
from wdsfs.kernel.manifest import Manifest
from wdsfs.kernel.opened import OpenDevice, close_devices, open_devices
from wdsfs.mount import all_mounts
from wdsfs.mount.all_mounts import FileSystem

SUPERBLOCKS = Path("/sys/fs/erofs")  # a directory for each superblock, as long as somebody uses it
_OWN_FILES = 64  # descriptors besides those of shards


def superblocks() -> set[str]:
    """The names of all EROFS file systems that are mounted or still in use."""
    try:
        return set(os.listdir(SUPERBLOCKS)) - {"features"}
    except OSError:
        return set()


def raise_file_limit(shards: int) -> None:
    """Let this process have so many shards open, besides its own files. Raises MountError."""
    wanted = shards + _OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(wanted, hard)))
        except (OSError, ValueError):
            raise MountError(
                f"{wanted:,} files have to be open, and {hard:,} are allowed; see: ulimit -n"
            ) from None


@dataclass(slots=True)
class _Watched:
    """A file whose times are compared: `before` is what was found last."""

    device: OpenDevice
    before: os.stat_result
    was_written: bool = False

    def is_written(self) -> bool:
        """True if somebody has written it, as far as its times tell, or if it cannot be looked at any more.

        Another mode, owner or number of names (by `chmod`, or as the file was replaced or removed) explains a
        change of the ctime. A write changes the mtime, and who sets that back changes nothing else.
        """
        try:
            now = os.fstat(self.device.fd)
        except OSError:  # a daemon of FUSE is gone, a file handle of NFS is stale
            self.was_written = True
        else:
            before, self.before = self.before, now
            self.was_written |= (before.st_size, before.st_mtime_ns) != (now.st_size, now.st_mtime_ns)
            self.was_written |= before.st_ctime_ns != now.st_ctime_ns and _attributes(before) == _attributes(now)
        return self.was_written


def _attributes(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_mode, found.st_uid, found.st_gid, found.st_nlink


class HeldShards:
    """An image, which belongs to it now, and its shards. `mounted` is what the list of mounts has of them.

    `superblocks` are the names of those that the mount may have: for a process without inotify, and for the next
    guard. `deadline`: until when a writer waits for files of an ended mount that are still open.
    """

    def __init__(self, image: OpenDevice) -> None:
        self.image = image
        self.devices: list[OpenDevice] = []
        self.base, self.trusting = "", False  # how they were opened
        self.superblocks: set[str] = set()
        self.mounted: FileSystem | None = None
        self.deadline: float | None = None
        self.leased: list[OpenDevice] = []
        self._without_lease: list[_Watched] = []
        self._on_layers: list[_Watched] = []
        self.ending: int | None = None  # the descriptor that is readable when the mount has ended
        self._has_ended = False

    def open_shards(self, about: Manifest, base: str, trusting: bool) -> None:
        """Open the shards of the image, as `open_devices` does. Raises what that raises."""
        self.base, self.trusting = base, trusting
        self.devices = open_devices(about, os.fsencode(base), trusting)

    def take_leases(self) -> None:
        """Have every later writer wait for this process.

        Compare the shards afterwards: one may have been written before its lease was taken. Raises MountError for
        one that is being written, and for a copy without a lease: its times say when it was used, not that it was
        written.
        """
        layers = dict[int, bool]()  # by the number of the file system
        for one in (*self.devices, self.image):
            found = os.fstat(one.fd)
            try:
                fcntl.fcntl(one.fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
                self.leased.append(one)
                if found.st_dev not in layers:
                    layers[found.st_dev] = mount_table.is_layer(mount_table.filesystem_type(one.path))
                if layers[found.st_dev] and not one.copy:
                    self._on_layers.append(_Watched(one, found))
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    raise MountError(f"{os.fsdecode(one.file)}: a program has it open for writing") from None
                if one.copy:
                    raise MountError(
                        f"{one.copy}: its file system has no leases ({error.strerror}), so a writer could not be "
                        "noticed; mount by FUSE, or take another place for the cache (WDSFS_CACHE_DIR)"
                    ) from None
                self._without_lease.append(_Watched(one, found))

    @property
    def is_watching(self) -> bool:
        """True if times have to be compared."""
        return bool(self._without_lease or self._on_layers)

    def without_lease(self) -> list[str]:
        """The files that have no lease, so that their times are compared."""
        return [os.fsdecode(one.device.path) for one in self._without_lease]

    def on_layers(self) -> list[str]:
        """The files that have one, and can be written past it, so that their times are compared, too."""
        return [os.fsdecode(one.device.path) for one in self._on_layers]

    def changing(self) -> list[str]:
        """The files that somebody is about to write, or has written."""
        found = [one for one in self.leased if fcntl.fcntl(one.fd, fcntl.F_GETLEASE) != fcntl.F_RDLCK]
        found += [one.device for one in (*self._without_lease, *self._on_layers) if one.is_written()]
        return [os.fsdecode(one.file) for one in found]

    def watch_mount(self, mountpoint: str) -> None:
        """Notice the end of the mount of these shards, which is at this path now."""
        self.mounted = all_mounts.at(mountpoint)
        try:
            self.ending = mount_table.end_of_use(mountpoint)
            if self.mounted is None or os.stat(mountpoint).st_dev != self.mounted.device:
                self._stop_watching()
        except OSError:
            self._stop_watching()  # without inotify; or the mount is gone already

    def is_used(self) -> bool:
        """True while a program has files of the mount open, or another namespace has the mount."""
        if self.ending is None:
            return not self._has_ended and bool(self.superblocks & superblocks())
        poller = select.poll()
        poller.register(self.ending, select.POLLIN)
        if poller.poll(0):
            self._has_ended = True
            self._stop_watching()
        return not self._has_ended

    def _stop_watching(self) -> None:
        if self.ending is not None:
            os.close(self.ending)
            self.ending = None

    def end(self) -> None:
        """Detach the mount, also where else it is mounted; what is open of it stays open."""
        if self.mounted is not None:
            all_mounts.detach_everywhere(self.mounted)

    def close(self) -> None:
        """Give up the leases and close all files. It is not used any more."""
        self._stop_watching()
        close_devices([*self.devices, self.image])
        self.devices, self.leased, self._without_lease, self._on_layers = [], [], [], []
