"""The open files of a kernel mount (image and shards), watched for writers by leases or by times.

With a read lease (fcntl(2), F_SETLEASE), a program that opens a file for writing, or truncates it, waits until the
lease is released. If the file system of a file has no leases, this module compares the times of the file. It also
compares them if the file system shows files of another one (an overlay, FUSE), because a program can write there
without regard to leases.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from wdsfs import host, mount_table, trust
from wdsfs.cache.file_cache import is_as_made
from wdsfs.errors import MissingShard, MountError, StaleShard, UnreadableShard, several
from wdsfs.kernel import erofs_mount
from wdsfs.kernel.erofs_mount import FileSystem
from wdsfs.kernel.manifest import Device, Manifest

_OWN_FILES = 64  # descriptors besides those of shards


class OpenDevice(NamedTuple):
    """A shard of an image, or the image itself: its path, and the descriptor of the file that the kernel reads."""

    path: bytes
    fd: int


def open_image(path: str) -> OpenDevice:
    """Open an image that other users can neither write nor replace; the caller closes it. Raises MountError.

    Semantics decision: the kernel trusts an image, and an image names the files of this machine that are shown.
    A user who has typed `sudo` is trusted with this, because root can read these files in any case.
    """
    try:
        trust.content(path, trust.behind_sudo())
        return OpenDevice(os.fsencode(path), os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except trust.Untrusted as error:
        raise MountError(
            f"{path}: an image can show any file, so other users must not be able to write it: {error.strerror}"
        ) from None
    except OSError as error:
        raise MountError(f"{path}: {error.strerror}") from None


def check_image(image: OpenDevice) -> None:
    """Raise StaleShard if the image was replaced: the kernel may have opened the new file."""
    try:
        is_same = os.path.samestat(os.fstat(image.fd), os.stat(image.path))
    except OSError:
        is_same = False
    if not is_same:
        raise StaleShard(f"{os.fsdecode(image.path)}: was replaced during the mount; repeat the command")


def open_devices(manifest: Manifest, base: str, trusting: bool) -> list[OpenDevice]:
    """Open the shards of an image, relative paths below `base`; the caller closes them.

    A shard must have the size and the time in the image. `trusting`: only the size, for copies with other times.
    Raises MissingShard, UnreadableShard, StaleShard, MountError.
    """
    devices: list[OpenDevice] = []
    try:
        for device in manifest.devices:
            path = device.shard(base)
            devices.append(OpenDevice(os.fsencode(path), _open_shard(path)))
        check_devices(devices, manifest, trusting)
    except BaseException:
        close_devices(devices)
        raise
    return devices


def check_devices(devices: Sequence[OpenDevice], manifest: Manifest, trusting: bool) -> None:
    """Raise StaleShard unless these are the shards of the image, as for `open_devices`."""
    pairs = zip(devices, manifest.devices, strict=True)
    changed = [
        os.fsdecode(shard.path) for shard, device in pairs if not _is_same(os.fstat(shard.fd), device, trusting)
    ]
    if changed:
        hint = "" if trusting else "; or, if they are copies of the same shards, mount with --trust-shards"
        raise StaleShard(
            f"shards have changed since the image was made: {several(changed)}; make the image again with: wdsfs "
            f"image{hint}"
        )


def close_devices(devices: Sequence[OpenDevice]) -> None:
    """Close all descriptors."""
    for device in devices:
        os.close(device.fd)


def _is_same(status: os.stat_result, device: Device, trusting: bool) -> bool:
    return status.st_size == device.size and (trusting or status.st_mtime_ns == device.mtime_ns)


def was_written(path: str, device: Device, trusting: bool) -> bool:
    """Return True if the shard at this path has changed since the image was made.

    A removed shard has not changed, because the kernel still has its file.
    """
    try:
        return not _is_same(os.stat(path), device, trusting)
    except OSError:
        return False


def _open_shard(path: str) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise MissingShard(
            f"{path}: there is no such shard; --base DIR says where the shards of an image are"
        ) from None
    except OSError as error:
        raise UnreadableShard(f"{path}: {error.strerror}") from None
    try:
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        refusal = trust.foreign_link(os.fsencode(path), fd) if is_file else f"{path}: is not a regular file"
    except OSError as error:
        os.close(fd)
        raise UnreadableShard(f"{path}: {error.strerror}") from None
    if refusal is not None:
        os.close(fd)
        raise MountError(refusal)
    return fd


def require_file_limit(shards: int) -> None:
    """Raise the limit of open files to this many shards and the process's own files. Raises MountError."""
    files = shards + _OWN_FILES
    limit = host.raise_file_limit(files)
    if limit < files:
        raise MountError(
            f"the mount needs {files:,} open files, and the limit is {limit:,}; raise it: ulimit -n {files}"
        )


# --- writers


def is_written(fd: int) -> bool:
    """Return True if a program has this file open for writing. Raises OSError without leases."""
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # ignored; SIGIO, the usual signal, ends a process
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return True
        raise
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


@dataclass(slots=True)
class _Watched:
    """An open file whose times are compared, even with a lease; `before` are the times at the last look."""

    device: OpenDevice
    before: os.stat_result
    has_lease: bool
    was_written: bool = False

    def is_written(self) -> bool:
        """Return True if, by its times, a program has written the file, or if its times cannot be read any more.

        Another mode, owner or number of names (by `chmod`, or as the file was replaced or removed) explains a
        change of the ctime. A write changes the mtime, and a program that sets the mtime back changes nothing
        else.
        """
        try:
            now = os.fstat(self.device.fd)
        except OSError:  # a daemon of FUSE is gone, a file handle of NFS is stale
            self.was_written = True
        else:
            before, self.before = self.before, now
            self.was_written |= (before.st_size, before.st_mtime_ns) != (now.st_size, now.st_mtime_ns)
            self.was_written |= before.st_ctime_ns != now.st_ctime_ns and _mode_and_owner(
                before
            ) == _mode_and_owner(now)
        return self.was_written


def _mode_and_owner(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_mode, status.st_uid, status.st_gid, status.st_nlink


class HeldShards:
    """An image and its shards, all of which this object closes. `mounted` is their mount in the kernel's list.

    The descriptor `ending` is readable when no program uses the mount any more.
    """

    def __init__(self, image: OpenDevice) -> None:
        self.image = image
        self.devices: list[OpenDevice] = []
        self.mounted: FileSystem | None = None
        self.leased: list[OpenDevice] = []
        self._watched: list[_Watched] = []
        self.ending = -1

    def take_leases(self) -> None:
        """Take leases, so that every later writer waits for this process.

        Compare the shards afterwards: a shard may have been written before its lease was taken. Raises MountError
        for a shard that is being written.
        """
        layers = dict[int, bool]()  # by the number of the file system
        for device in (*self.devices, self.image):
            status = os.fstat(device.fd)
            # The times of an image in the cache say when it was used; nobody writes it.
            is_watched = device is not self.image or not is_as_made(status)
            try:
                fcntl.fcntl(device.fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
                self.leased.append(device)
                if status.st_dev not in layers:
                    layers[status.st_dev] = mount_table.is_layer(mount_table.filesystem_type(device.path))
                if layers[status.st_dev] and is_watched:
                    self._watched.append(_Watched(device, status, has_lease=True))
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    raise MountError(f"{os.fsdecode(device.path)}: a program has it open for writing") from None
                if is_watched:
                    self._watched.append(_Watched(device, status, has_lease=False))

    @property
    def is_watching(self) -> bool:
        """True if the times of files must be compared."""
        return bool(self._watched)

    def watched(self, *, has_lease: bool) -> list[str]:
        """Return the files whose times are compared: without a lease, or with content of another file system."""
        return [os.fsdecode(file.device.path) for file in self._watched if file.has_lease == has_lease]

    def changing(self) -> list[str]:
        """Return the files that a program is about to write, or has written."""
        changing = [file for file in self.leased if fcntl.fcntl(file.fd, fcntl.F_GETLEASE) != fcntl.F_RDLCK]
        changing += [file.device for file in self._watched if file.is_written()]
        return [os.fsdecode(device.path) for device in changing]

    def watch_mount(self, mountpoint: str) -> None:
        """Watch for the end of the mount of these shards, which is at this path now. Raises MountError."""
        try:
            self.ending = mount_table.end_of_use(mountpoint)
            shown = erofs_mount.filesystem_at(mountpoint)
            is_there = shown is not None and os.stat(mountpoint).st_dev == shown.device
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENOSPC):
                way_out = "raise the limits of inotify (sysctl fs.inotify.max_user_instances), or unmount this"
                text = f"{mountpoint}: cannot be watched: {error.strerror}; {way_out} and mount with --engine fuse"
                raise MountError(text) from None
            shown, is_there = None, False
        if not is_there or self.mounted not in (None, shown):
            raise MountError(f"{mountpoint}: another process has unmounted it, or mounted over it")
        self.mounted = shown

    def is_used(self) -> bool:
        """Return True while a program has files of the mount open, or another namespace has the mount."""
        poller = select.poll()
        poller.register(self.ending, select.POLLIN)
        return not poller.poll(0)

    def end(self) -> None:
        """Detach the mount at all its places; open files stay open."""
        if self.mounted is not None:
            erofs_mount.detach_everywhere(self.mounted)

    def close(self) -> None:
        """Give up the leases and close all files."""
        if self.ending >= 0:
            os.close(self.ending)
            self.ending = -1
        close_devices([*self.devices, self.image])
        self.devices, self.leased, self._watched = [], [], []
