"""Mounts an image over its shards, and ends all its mounts: the system calls, and what their errors mean.

The new mount calls (fsopen and so on, Linux 5.2) take any number of devices of any name; mount(2) takes one page
of options. Devices are named by descriptors, so that the kernel opens the very files that were checked. Linux 6.12
and later take files; before, each file has to be a loop device, which goes away with the mount.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

from wdsfs import host, mount_table, mount_users
from wdsfs.errors import MountError
from wdsfs.mount_table import MountPoint

FILES_SINCE = (6, 12)  # the first kernel that takes files for devices
_NEEDED = "only root may do that, with CAP_SYS_ADMIN and in no user namespace (rootless containers have one)"
LOOPS = "/dev/loop-control"

_LOOP_FREE, _LOOP_CONFIGURE = 0x4C82, 0x4C0A
_LOOP_CONFIG = struct.Struct("<II52xI176x64x")  # descriptor, block size, flags of loop_info64
_LOOP_READ_ONLY, _LOOP_AUTOCLEAR = 1, 4


def mount_image(image: str, mountpoint: str, devices: Sequence[int], attributes: int) -> None:
    """Mount the image at this path, read-only; `devices` are descriptors of its shards. Raises MountError."""
    try:
        _mount(image, mountpoint, [f"/proc/self/fd/{fd}" for fd in devices], attributes)
    except OSError as error:
        if error.errno != errno.ENOTBLK:
            raise MountError(_explained(image, mountpoint, error)) from None
        mount_by_loops(image, mountpoint, devices, attributes)


def mount_by_loops(image: str, mountpoint: str, devices: Sequence[int], attributes: int) -> None:
    """Mount an image as `mount_image`, on kernels before 6.12: image and shards become loop devices.

    They are released by the kernel when the mount ends. Raises MountError.
    """
    with contextlib.ExitStack() as stack:
        try:
            own = os.open(image, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, own)
            names = []
            for fd in (own, *devices):
                loop, name = _loop_device(fd)
                stack.callback(os.close, loop)
                names.append(name)
            _mount(names[0], mountpoint, names[1:], attributes)
        except OSError as error:
            raise MountError(_explained(image, mountpoint, error)) from None


def _mount(source: str, mountpoint: str, devices: Sequence[str], attributes: int) -> None:
    """Make the mount. Raises OSError."""
    settings = [(b"source", os.fsencode(source)), *((b"device", os.fsencode(device)) for device in devices)]
    attributes |= mount_table.READ_ONLY
    mount_table.mount(b"erofs", settings, [b"ro"], mountpoint, attributes)


def _loop_device(fd: int) -> tuple[int, str]:
    """Return a free loop device over a file, open, read-only, released with its last user. Raises OSError."""
    control = os.open(LOOPS, os.O_RDWR | os.O_CLOEXEC)
    try:
        while True:
            name = f"/dev/loop{fcntl.ioctl(control, _LOOP_FREE)}"
            loop = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.ioctl(loop, _LOOP_CONFIGURE, _LOOP_CONFIG.pack(fd, 512, _LOOP_READ_ONLY | _LOOP_AUTOCLEAR))
            except OSError as error:
                os.close(loop)
                if error.errno == errno.EBUSY:  # another process was faster
                    continue
                raise
            return loop, name
    finally:
        os.close(control)


def refusal_of_kernel() -> str | None:
    """Return why this process cannot mount any image; None if no reason is known. Makes the kernel load EROFS."""
    try:
        mount_table.attempt(b"erofs", ())  # without an image: this fails in any case
    except OSError as error:
        if error.errno == errno.EPERM:
            return f"this process may not mount: {_NEEDED}"
        if error.errno in (errno.ENODEV, errno.ENOSYS):
            return "this kernel has no EROFS"
    if host.kernel_version() < FILES_SINCE and not os.path.exists(LOOPS):
        return f"there is no {LOOPS}, which EROFS needs before Linux 6.12 (modprobe loop)"
    return None


def _explained(image: str, mountpoint: str, error: OSError) -> str:
    where = f"{mountpoint}: the kernel does not mount {image}"
    match error.errno:
        case errno.EPERM:
            return f"{where}: {_NEEDED}; or mount the shards by FUSE: wdsfs mount SHARDS... MOUNTPOINT"
        case errno.ENODEV | errno.ENOSYS:
            return f"{where}: it has no EROFS (modprobe erofs); or mount the shards by FUSE"
        case errno.EINVAL | errno.EOPNOTSUPP:
            return f"{where} ({error.strerror}): Linux 5.16 or later and a complete image are needed; see dmesg"
        case errno.EBADMSG | errno.EUCLEAN:
            return f"{where} ({error.strerror}): the image is damaged; remove it, and make it again: wdsfs image"
    missing = "" if error.filename is None else f"{error.filename}: "  # a loop device
    return f"{where}: {missing}{error.strerror}"


# --- the end of mounts


def detach(mountpoint: str) -> None:
    """End the mount at this path; files that are open stay open. Raises MountError."""
    try:
        mount_table.unmount(mountpoint, lazy=True)
    except OSError as error:
        raise MountError(f"{mountpoint}: cannot be unmounted: {error.strerror}") from None


class FileSystem(NamedTuple):
    """A file system in the list of mounts.

    A device number alone does not identify it: after its last mount another file system may get the number.
    """

    device: int
    fstype: str
    source: bytes


def filesystem_at(mountpoint: str) -> FileSystem | None:
    """Return the file system that is mounted at this path."""
    mount = mount_table.mounted_at(mountpoint)
    return None if mount is None else _filesystem_of(mount)


def _filesystem_of(mount: MountPoint) -> FileSystem:
    return FileSystem(mount.device, mount.fstype, mount.source)


def detach_everywhere(filesystem: FileSystem) -> None:
    """Detach every mount of this file system: at its mount point, bind mounts, and those in other namespaces.

    A container has a mount namespace of its own, in which a directory that it was given is a mount that stays when
    that of the host ends. Only root can enter the namespaces of others; one without a process is not found. Open
    files stay open.
    """
    _detach_here(filesystem, mount_table.mounts())
    for process in mount_users.holders(filesystem.device):
        with contextlib.suppress(OSError):  # no memory for a process: a writer waits for the other processes
            pid = os.fork()
            if not pid:
                _detach_there(process, filesystem)
            os.waitpid(pid, 0)


def _detach_here(filesystem: FileSystem, mounts: list[MountPoint]) -> None:
    newest = {mount.path: mount for mount in mounts}
    for mount in reversed(mounts):
        # Else another mount lies above it, and would be ended.
        if _filesystem_of(mount) == filesystem and newest[mount.path] is mount:
            with contextlib.suppress(OSError):  # it has just ended, or lies below another mount
                mount_table.unmount(os.fsdecode(mount.path), lazy=True)


def _detach_there(process: int, filesystem: FileSystem) -> None:
    """Enter the namespace of a process, detach the mount there, and end: runs in a forked process."""
    try:
        proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)  # there may be none in the namespace
        mount_table.enter_namespace(os.open(f"/proc/{process}/ns/mnt", os.O_RDONLY))
        with open(os.open("self/mountinfo", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc), "rb") as file:
            mounts = mount_table.parse_mountinfo(file.read())  # as they are seen from its root
        _detach_here(filesystem, mounts)
    finally:
        os._exit(0)
