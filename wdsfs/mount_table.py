"""The mounts that this process sees, the file systems below them, and the kernel's calls that Python lacks.

Those are fsopen(2) and its kin (Linux 5.2). They raise OSError; where the kernel gives more of the reason than a
number, it is the text of the error. Standard library only; nothing is remembered between calls.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

_FSOPEN, _FSCONFIG, _FSMOUNT, _MOVE_MOUNT = 430, 431, 432, 429  # on all architectures
_OPEN_TREE, _CLONE = 428, 1
_SET_FLAG, _SET_STRING, _CREATE = 0, 1, 6
_CLOEXEC, _FROM_EMPTY_PATH, _AT_FDCWD = 1, 4, -100
_FORCE, _DETACH, _NO_FOLLOW = 1, 2, 8  # flags of umount2
_NEW_MOUNTS = 0x20000  # flag of setns: a mount namespace
_IN_DELETE_SELF = 0x400
# Attributes of a mount.
READ_ONLY, NO_SUID, NO_DEVICES, NO_PROGRAMS, NO_ACCESS_TIMES = 1, 2, 4, 8, 16

_libc: Any = ctypes.CDLL(None, use_errno=True)


def mount(
    fstype: bytes,
    settings: Sequence[tuple[bytes, bytes]],
    flags: Sequence[bytes],
    mountpoint: str,
    attributes: int,
) -> None:
    """Mount a file system of this type at this path, with these settings (name, value) and flags."""
    with _context(_FSOPEN, fstype, _CLOEXEC) as context:
        _create(context, settings, flags)
        mounted = _call(_FSMOUNT, context, _CLOEXEC, attributes)
    try:
        _call(_MOVE_MOUNT, mounted, b"", _AT_FDCWD, os.fsencode(mountpoint), _FROM_EMPTY_PATH)
    finally:
        os.close(mounted)


def end_of_use(mountpoint: str) -> int:
    """Return a descriptor that is readable when the kernel has dropped the superblock that is mounted there.

    That is after its last file is closed, and the mount is gone from the last namespace. The descriptor itself
    does not keep the superblock in use. ENOSPC, EMFILE: there are too many inotify instances or watches.
    """
    fd = int(_libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))
    # At the end of the superblock the kernel reports IN_UNMOUNT, unasked. The event that is asked for never
    # happens.
    if fd < 0 or _libc.inotify_add_watch(fd, os.fsencode(mountpoint), _IN_DELETE_SELF) < 0:
        error = _failure(mountpoint)
        if fd >= 0:
            os.close(fd)
        raise error
    return fd


def detached(mountpoint: str) -> int:
    """Return a descriptor of the top of a mount, by a detached mount of its own: that one can be unmounted.

    Without CAP_SYS_ADMIN the descriptor keeps the mount itself busy. Raises OSError.
    """
    try:
        return _call(_OPEN_TREE, _AT_FDCWD, os.fsencode(mountpoint), _CLONE | os.O_CLOEXEC)
    except PermissionError:
        return os.open(mountpoint, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def attempt(fstype: bytes, settings: Sequence[tuple[bytes, bytes]]) -> None:
    """Set up a file system with these settings in the kernel, and drop it: nothing is mounted."""
    with _context(_FSOPEN, fstype, _CLOEXEC) as context:
        _create(context, settings, ())


def unmount(mountpoint: str, *, lazy: bool) -> None:
    """End the mount at this path; `lazy`: now, and files that are open stay open. Raises OSError, as EBUSY.

    Unlike umount(8), the kernel asks the file system nothing, so one that nobody serves keeps nobody waiting.
    """
    if _libc.umount2(os.fsencode(mountpoint), _NO_FOLLOW | (_DETACH if lazy else 0)):
        raise _failure()


def abort(mount: MountPoint) -> None:
    """Fail all requests of a FUSE mount, now and later. Raises OSError; PermissionError: only root may do so here.

    The kernel's file for it belongs to the user of the mount, but is not everywhere.
    """
    try:
        with open(f"/sys/fs/fuse/connections/{os.minor(mount.device)}/abort", "wb", buffering=0) as file:
            file.write(b"1")
    except OSError:
        if _libc.umount2(mount.path, _FORCE) and ctypes.get_errno() not in (errno.EBUSY, errno.EINVAL):
            raise _failure() from None


def enter_namespace(fd: int) -> None:
    """Move this process, which must have one thread, into the mount namespace of this descriptor."""
    if _libc.setns(fd, _NEW_MOUNTS):
        raise _failure()


@contextmanager
def _context(call: int, *arguments: Any) -> Iterator[int]:
    context = _call(call, *arguments)
    try:
        yield context
    finally:
        os.close(context)


def _create(context: int, settings: Sequence[tuple[bytes, bytes]], flags: Sequence[bytes]) -> None:
    try:
        for name, value in settings:
            _call(_FSCONFIG, context, _SET_STRING, name, value, 0)
        for flag in flags:
            _call(_FSCONFIG, context, _SET_FLAG, flag, None, 0)
        _call(_FSCONFIG, context, _CREATE, None, None, 0)
    except OSError as error:
        raise OSError(error.errno, _last_message(context) or error.strerror) from None


def _call(number: int, *arguments: Any) -> int:
    result = int(_libc.syscall(number, *arguments))
    if result < 0:
        raise _failure()
    return result


def _failure(path: str | None = None) -> OSError:
    """Return the error of the last call of the C library."""
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code), path)


def _last_message(context: int) -> str:
    """Return the kernel's message about the failure: lines such as `e erofs: bad option`."""
    message = ""
    while True:
        try:
            message = os.read(context, 4096).decode(errors="replace").partition(" ")[2].strip()
        except OSError:
            return message


MOUNTINFO = "/proc/self/mountinfo"

# File systems whose files another machine can change or lock, under the names that /proc gives them. What
# matters for LMDB: its locks are words in a shared map, and a map is shared within one kernel only. So the
# shared-disk file systems (gfs2, ocfs2) and those of a virtual machine's host (9p, virtiofs, vboxsf ...) are
# here, too.
_KERNEL_TYPES = """
    9p afs beegfs ceph cifs coda dvs gfs2 glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 orangefs panfs prl_fs
    pvfs2 smb3 smbfs vboxsf virtiofs vmhgfs wekafs
"""
# A FUSE type that is not here counts as local: most are (fuseblk, fuse.mergerfs, fuse.gocryptfs).
_FUSE_TYPES = """
    blobfuse blobfuse2 ceph ceph-fuse davfs dfuse gcsfuse geesefs glusterfs goofys juicefs lizardfs mfs
    moosefs mount-s3 mountpoint-s3 rclone s3fs saunafs seaweedfs sshfs vmhgfs-fuse
"""
NETWORK_TYPES = frozenset(_KERNEL_TYPES.split()) | {f"fuse.{name}" for name in _FUSE_TYPES.split()}

# File systems whose files are those of another one, where they can be written without this one noticing.
_LAYERS = ("aufs", "ecryptfs", "fuse", "overlay")  # and FUSE under other names: fuse.bindfs, fuse.mergerfs ...

_ESCAPE = re.compile(rb"\\([0-7]{3})")
_OVERLAY_ESCAPE = re.compile(r"\\(.)", re.DOTALL)  # in options of overlayfs


class MountPoint(NamedTuple):
    """One line of mountinfo.

    `path` and `source` are unescaped bytes, `device` is as `st_dev` of a file in it, `options` are those of
    this mount and `super_options` those of the file system.
    """

    path: bytes
    fstype: str
    source: bytes
    options: tuple[str, ...]
    super_options: tuple[str, ...]
    device: int

    @property
    def user(self) -> int:
        """The uid that made a FUSE mount; 0 for other mounts."""
        users = [option.partition("=")[2] for option in self.super_options if option.startswith("user_id=")]
        return int(users[0]) if users else 0

    @property
    def upperdir(self) -> str | None:
        """The upper of a mount of the kernel's overlayfs, as it was given; None for all other mounts."""
        if self.fstype != "overlay":
            return None
        option = next((option for option in self.super_options if option.startswith("upperdir=")), None)
        return None if option is None else _OVERLAY_ESCAPE.sub(r"\1", option.partition("=")[2])


def parse_mountinfo(text: bytes) -> list[MountPoint]:
    """Return the mounts in the order of the text, which is the order in which they were made."""
    return [_parse_line(line) for line in _lines_of(text)]


def _parse_line(line: bytes) -> MountPoint:
    # 36 35 98:0 /subtree /mnt rw,noatime master:1 - ext3 /dev/root rw,errors=continue    (proc(5))
    # The number of fields before the dash varies; the source can be empty. A comma in a value is escaped, too.
    before, _, after = line.partition(b" - ")
    _, _, device, _, path, options = before.split(b" ")[:6]
    fstype, source, super_options = after.split(b" ", 2)
    major, minor = device.split(b":")
    return MountPoint(
        path=_unescape(path),
        fstype=os.fsdecode(_unescape(fstype)),
        source=_unescape(source),
        options=tuple(os.fsdecode(options).split(",")),
        super_options=tuple(os.fsdecode(_unescape(option)) for option in super_options.split(b",")),
        device=os.makedev(int(major), int(minor)),
    )


def _unescape(field: bytes) -> bytes:
    """Undo the kernel's escapes: space, tab, newline, backslash and `#` stand as a backslash and octal."""
    return _ESCAPE.sub(lambda match: bytes([int(match[1], 8) & 0xFF]), field)


def mounts() -> list[MountPoint]:
    """Return all mounts that this process sees, oldest first. Raises OSError without /proc."""
    return [_parse_line(line) for line in _lines()]


def mounts_of(device: int) -> list[MountPoint]:
    """Return the mounts of the file system with this device number, oldest first. Raises as `mounts`."""
    number = f"{os.major(device)}:{os.minor(device)}".encode()
    return [_parse_line(line) for line in _lines() if line.split(b" ", 3)[2] == number]


def _lines() -> list[bytes]:
    """Return the list of mounts, not parsed.

    Commands ask it often, and a line is parsed more slowly than passed over.
    """
    with open(MOUNTINFO, "rb") as file:
        return _lines_of(file.read())


def _lines_of(text: bytes) -> list[bytes]:
    return [line for line in text.split(b"\n") if line]  # and not at a carriage return, which may be in a name


def mount_of(path: str | bytes | os.PathLike[str]) -> MountPoint | None:
    """Return the mount that a path lies in; for a missing path, the one it would be made in.

    The longest matching mount point, and of several at one place the newest, which hides the others.
    """
    real = os.path.realpath(os.fsencode(path))
    holding = [mount for mount in mounts() if lies_in(real, mount.path)]
    return max(enumerate(holding), key=lambda item: (len(item[1].path), item[0]))[1] if holding else None


def lies_in(path: bytes, directory: bytes) -> bool:
    """Return True if a path is this directory, or below it; only the texts are compared."""
    return path == directory or path.startswith(directory.rstrip(b"/") + b"/")


def mounted_at(path: str | bytes | os.PathLike[str]) -> MountPoint | None:
    """Return the mount with this mount point, the newest of several; None if there is none.

    Works for a dead mount, too: nothing at the path itself is looked at.
    """
    parent, base = os.path.split(os.path.abspath(os.fsencode(path)))
    place = os.path.join(os.path.realpath(parent), base)
    here = [line for line in _lines() if _unescape(line.split(b" ", 5)[4]) == place]
    return _parse_line(here[-1]) if here else None


def filesystem_type(path: str | bytes | os.PathLike[str]) -> str:
    """Return the type of the file system that a path lies in (`ext4`, `nfs4`, `fuse.sshfs`); "" if unknown."""
    try:
        mount = mount_of(path)
    except OSError:
        return ""  # no /proc
    return mount.fstype if mount else ""


def is_network(fstype: str) -> bool:
    """Return True if files of this file system type are shared with other machines."""
    return fstype in NETWORK_TYPES


def is_layer(fstype: str) -> bool:
    """Return True if files of this file system type may be shown from another file system, below it."""
    return fstype in _LAYERS or fstype.startswith("fuse.")


def types_of(device: int) -> set[str]:
    """Return the types of the mounts with this device number (`st_dev`).

    Empty for one that is in no table, such as that of a subvolume of btrfs, and without /proc.
    """
    try:
        return {mount.fstype for mount in mounts_of(device)}
    except OSError:
        return set()


def on_network(paths: Iterable[bytes]) -> tuple[bytes, str] | None:
    """Return the first of these files that another machine can change unnoticed, and its file system's type."""
    types: dict[tuple[bytes, int], str] = {}
    for path in paths:
        real = os.path.realpath(path) if os.path.islink(path) else path
        # Files of one directory lie in one file system, unless another one is mounted on the file itself.
        place = os.path.dirname(real), _device(real)
        if place not in types:
            types[place] = filesystem_type(real)
        if is_network(types[place]):
            return path, types[place]
    return None


def _device(path: bytes) -> int:
    """Return the device number of the file system that a path lies in; 0 for a missing path."""
    try:
        return os.stat(path).st_dev
    except OSError:
        return 0
