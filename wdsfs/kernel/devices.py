"""The open files of a kernel mount (image, shards, copies), watched for writers by leases or by times.

A copy is what the kernel reads in the place of a shard that is no plain tar of this machine. With a read lease
(fcntl(2), F_SETLEASE) a program that opens a file for writing, or truncates it, waits until the lease is given up.
Where a file system has no leases, the times of the file are compared; and where it shows files of another one (an
overlay, FUSE), in which they can be written past any lease.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from wdsfs import host, mount_table, trust
from wdsfs.errors import MissingShard, MountError, ShardError, StaleShard, UnreadableShard, WdsfsError, several
from wdsfs.kernel import erofs_mount
from wdsfs.kernel.erofs_mount import FileSystem
from wdsfs.kernel.manifest import Device, Manifest
from wdsfs.shards import Fingerprint
from wdsfs.storage.cache_directory import DATA, key_of
from wdsfs.storage.file_cache import is_as_made
from wdsfs.storage.held_files import HeldFile

SUPERBLOCKS = Path("/sys/fs/erofs")  # a directory for each superblock, as long as somebody uses it
_OWN_FILES = 64  # descriptors besides those of shards
_COPY_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class OpenDevice(NamedTuple):
    """A shard of an image, or the image: its path, and the descriptor of the file that the kernel reads.

    `copy` is the path of that file if it is a copy in the cache.
    """

    path: bytes
    fd: int
    copy: str = ""

    @property
    def file(self) -> bytes:
        """The path of what the kernel reads."""
        return os.fsencode(self.copy) or self.path


def open_image(path: str) -> OpenDevice:
    """Open an image that other users can neither write nor replace; the caller closes it. Raises MountError.

    Semantics decision: the kernel believes what an image says, and an image says which files of this machine are
    shown. A user who has typed `sudo` is trusted with that, for it could be done in any case.
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


def open_devices(manifest: Manifest, base: bytes, trusting: bool) -> list[OpenDevice]:
    """Open the shards of an image, relative paths below `base`; the caller closes them.

    A shard has to have the size and the time that it had. `trusting`: the size alone, for copies that have got
    other times. What the kernel reads in the place of a shard has to be as it was made, of the shard that is there
    now. Raises MissingShard, UnreadableShard, StaleShard, MountError.
    """
    devices: list[OpenDevice] = []
    try:
        for device in manifest.devices:
            devices.append(_opened(device, os.fsdecode(base)))
        check_devices(devices, manifest, trusting)
    except BaseException:
        close_devices(devices)
        raise
    return devices


def check_devices(devices: Sequence[OpenDevice], manifest: Manifest, trusting: bool) -> None:
    """Raise StaleShard unless these are the shards of the image, as for `open_devices`."""
    pairs = zip(devices, manifest.devices, strict=True)
    changed = [os.fsdecode(opened.path) for opened, device in pairs if not _is_same(opened, device, trusting)]
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


def _is_same(opened: OpenDevice, device: Device, trusting: bool) -> bool:
    if device.copy is not None:
        return is_sound(opened.fd, device.copy) and is_copy_of(os.fsdecode(opened.path), opened.copy)
    status = os.fstat(opened.fd)
    return status.st_size == device.size and (trusting or status.st_mtime_ns == device.mtime_ns)


def was_written(path: str, device: Device, trusting: bool) -> bool:
    """Return True if the shard at this path, or its copy, has changed since the image was made.

    A removed shard has not: the kernel still has its file.
    """
    if device.copy is not None:
        return _is_damaged(device.copy)
    try:
        status = os.stat(path)
    except OSError:
        return False
    return status.st_size != device.size or not (trusting or status.st_mtime_ns == device.mtime_ns)


def _opened(device: Device, base: str) -> OpenDevice:
    path = device.shard(base)
    if device.copy is None:
        return OpenDevice(os.fsencode(path), _open_shard(path))
    return OpenDevice(os.fsencode(path), _open_copy(path, device.copy.path), device.copy.path)


def _open_copy(shard: str, path: str) -> int:
    try:
        fd = os.open(path, _COPY_FLAGS)
    except OSError as error:
        raise StaleShard(
            f"{shard}: its copy in the cache cannot be opened: {error.strerror}; repeat the command"
        ) from None
    _refuse_irregular(path, fd)
    with contextlib.suppress(BlockingIOError):  # eviction has locked it; the kernel holds it once it is mounted
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return fd


def _open_shard(path: str) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise MissingShard(
            f"{path}: there is no such shard; --base DIR says where the shards of an image are"
        ) from None
    except OSError as error:
        raise UnreadableShard(f"{path}: {error.strerror}") from None
    _refuse_irregular(path, fd)
    try:
        refusal = trust.foreign_link(os.fsencode(path), fd)
    except OSError as error:
        os.close(fd)
        raise UnreadableShard(f"{path}: {error.strerror}") from None
    if refusal is not None:
        os.close(fd)
        raise MountError(refusal)
    return fd


def _refuse_irregular(path: str, fd: int) -> None:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise MountError(f"{path}: is not a regular file")


def raise_file_limit(shards: int) -> None:
    """Raise the limit of open files to this many shards and the process's own files. Raises MountError."""
    files = shards + _OWN_FILES
    limit = host.raise_file_limit(files)
    if limit < files:
        raise MountError(
            f"the mount needs {files:,} open files, and the limit is {limit:,}; raise it: ulimit -n {files}"
        )


# --- copies


def is_unpacked(copy: str) -> bool:
    """Return True for the copy (a path) of a compressed shard; else it is that of a remote one."""
    return copy.rpartition(".")[2] != DATA


def is_sound(fd: int, copy: HeldFile) -> bool:
    """Return True if an open file is this copy, all of which is there, and nobody has written into it.

    Raises OSError.
    """
    status = os.fstat(fd)
    if (status.st_size, status.st_ino) != (copy.size, copy.inode):
        return False
    if is_unpacked(copy.path):
        return is_as_made(status)
    from wdsfs.remote.cached_object import is_certified  # late: most sets are local

    return is_certified(copy.path, fd)


def _is_damaged(copy: HeldFile) -> bool:
    """Return True if the copy is still there, but was written into, or has wrong bytes."""
    try:
        fd = os.open(copy.path, _COPY_FLAGS)
    except OSError:
        return False
    try:
        return os.fstat(fd).st_ino == copy.inode and not is_sound(fd, copy)
    except OSError:
        return True
    finally:
        os.close(fd)


def is_copy_of(shard: str, copy: str) -> bool:
    """Return True if this copy (a path) was made of the file that is at the path of the shard now.

    For a remote shard, the object that its store had when it was last asked, by any process.
    """
    if "://" in shard:
        return _is_copy_of_object(shard, copy)
    path = os.fsencode(shard)
    try:
        return _stem(copy) == key_of(path, Fingerprint.at(path))
    except ShardError:
        return False


def _is_copy_of_object(url: str, copy: str) -> bool:
    from wdsfs.remote import object_cache

    try:
        cache = object_cache.cache()
    except WdsfsError:
        return True  # nothing else is known
    if cache.is_gone(url):
        return False
    known = cache.pin_of(url)
    if known is None:
        return True
    return _stem(copy) == object_cache.key_of(url, known[0])


def _stem(copy: str) -> str:
    return os.path.basename(copy).partition(".")[0]


# --- writers


def superblocks() -> set[str]:
    """Return the names of all EROFS file systems that are mounted or still in use."""
    try:
        return set(os.listdir(SUPERBLOCKS)) - {"features"}
    except OSError:
        return set()


@dataclass(slots=True)
class _Watched:
    """An open file whose times are compared; `before` are those at the last look."""

    device: OpenDevice
    before: os.stat_result
    was_written: bool = False

    def is_written(self) -> bool:
        """Return True if somebody has written it, as far as its times tell, or if it cannot be looked at any more.

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


def _attributes(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_mode, status.st_uid, status.st_gid, status.st_nlink


class HeldShards:
    """An image, which belongs to it now, and its shards. `mounted` is the mount of these in the kernel's list.

    `superblocks` are the names of those that the mount may have: for a process without inotify, and for the next
    guard. `deadline`: until when a writer waits for files of an ended mount that are still open.
    """

    def __init__(self, image: OpenDevice) -> None:
        self.image = image
        self.devices: list[OpenDevice] = []
        self.about: Manifest
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
        self.about, self.base, self.trusting = about, base, trusting
        self.devices = open_devices(about, os.fsencode(base), trusting)

    def take_leases(self) -> None:
        """Take leases, so that every later writer waits for this process.

        Compare the shards afterwards: a shard may have been written before its lease was taken. Raises MountError
        for a shard that is being written, and for a copy without a lease, of which no time shows a write.
        """
        layers = dict[int, bool]()  # by the number of the file system
        for device in (*self.devices, self.image):
            status = os.fstat(device.fd)
            # The times of an image in the cache say when it was used; nobody writes it.
            is_watched = not device.copy and not (device is self.image and is_as_made(status))
            try:
                fcntl.fcntl(device.fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
                self.leased.append(device)
                if status.st_dev not in layers:
                    layers[status.st_dev] = mount_table.is_layer(mount_table.filesystem_type(device.path))
                if layers[status.st_dev] and is_watched:
                    self._on_layers.append(_Watched(device, status))
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    raise MountError(f"{os.fsdecode(device.file)}: a program has it open for writing") from None
                if device.copy:
                    raise MountError(
                        f"{device.copy}: its file system has no leases ({error.strerror}), so writers go "
                        "unnoticed; mount by FUSE, or set WDSFS_CACHE_DIR to a directory on another file system"
                    ) from None
                if is_watched:
                    self._without_lease.append(_Watched(device, status))

    @property
    def is_watching(self) -> bool:
        """True if times have to be compared."""
        return bool(self._without_lease or self._on_layers)

    def without_lease(self) -> list[str]:
        """Return the files that have no lease, so that their times are compared."""
        return [os.fsdecode(watched.device.path) for watched in self._without_lease]

    def on_layers(self) -> list[str]:
        """Return the files that can be written in spite of their lease, so that their times are compared, too."""
        return [os.fsdecode(watched.device.path) for watched in self._on_layers]

    def changing(self) -> list[str]:
        """Return the files that somebody is about to write, or has written."""
        watched = (*self._without_lease, *self._on_layers)
        changing = [file for file in self.leased if fcntl.fcntl(file.fd, fcntl.F_GETLEASE) != fcntl.F_RDLCK]
        changing += [file.device for file in watched if file.is_written()]
        return [os.fsdecode(device.file) for device in changing]

    def watch_mount(self, mountpoint: str) -> None:
        """Notice the end of the mount of these shards, which is at this path now."""
        self.mounted = erofs_mount.at(mountpoint)
        try:
            self.ending = mount_table.end_of_use(mountpoint)
            if self.mounted is None or os.stat(mountpoint).st_dev != self.mounted.device:
                self._stop_watching()
        except OSError:
            self._stop_watching()  # without inotify; or the mount is gone already

    def is_used(self) -> bool:
        """Return True while a program has files of the mount open, or another namespace has the mount."""
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
        """Detach the mount at all places where it is mounted; files that are open stay open."""
        if self.mounted is not None:
            erofs_mount.detach_everywhere(self.mounted)

    def close(self) -> None:
        """Give up the leases and close all files."""
        self._stop_watching()
        close_devices([*self.devices, self.image])
        self.devices, self.leased, self._without_lease, self._on_layers = [], [], [], []
