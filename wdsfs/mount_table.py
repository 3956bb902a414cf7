"""The mounts that this process sees, as the kernel lists them, and what their file systems are.

Standard library only, nothing kept between calls.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from typing import NamedTuple

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
        found = [one.partition("=")[2] for one in self.super_options if one.startswith("user_id=")]
        return int(found[0]) if found else 0


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
        super_options=tuple(os.fsdecode(_unescape(one)) for one in super_options.split(b",")),
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
    """The list of mounts as it is: commands ask it often, and a line is parsed more slowly than passed over."""
    with open(MOUNTINFO, "rb") as file:
        return _lines_of(file.read())


def _lines_of(text: bytes) -> list[bytes]:
    return [line for line in text.split(b"\n") if line]  # and not at a carriage return, which may be in a name


def mount_of(path: str | bytes | os.PathLike[str]) -> MountPoint | None:
    """Return the mount that a path lies in; for a missing path, the one it would be made in.

    The longest matching mount point, and of several at one place the newest, which hides the others.
    """
    real = os.path.realpath(os.fsencode(path))
    holding = [mount for mount in mounts() if _lies_in(real, mount.path)]
    return max(enumerate(holding), key=lambda item: (len(item[1].path), item[0]))[1] if holding else None


def _lies_in(path: bytes, directory: bytes) -> bool:
    return path == directory or path.startswith(directory.rstrip(b"/") + b"/")


def mounted_at(path: str | bytes | os.PathLike[str]) -> MountPoint | None:
    """Return the mount with this mount point, the newest of several; None if there is none.

    Works for a dead mount, too: nothing at the path itself is looked at.
    """
    parent, base = os.path.split(os.path.abspath(os.fsencode(path)))
    place = os.path.join(os.path.realpath(parent), base)
    here = [line for line in _lines() if _unescape(line.split(b" ", 5)[4]) == place]
    return _parse_line(here[-1]) if here else None


def holders(device: int) -> list[int]:
    """Processes that still see a file system (`st_dev`) in a mount table of their own: one of each such table.

    A container, or another process that unshares the mount table, keeps what was mounted then until it ends. Of
    the processes of other users only root is told.
    """
    found: dict[int, int] = {os.stat("/proc/self/ns/mnt").st_ino: 0}
    for one in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            table = os.stat(f"/proc/{one}/ns/mnt").st_ino
            if table not in found:
                with open(f"/proc/{one}/mountinfo", "rb") as file:
                    sees = any(mount.device == device for mount in parse_mountinfo(file.read()))
                found[table] = int(one) if sees else 0
    return [pid for pid in found.values() if pid]


class Use(NamedTuple):
    """A process that uses a mount: its number, its command, and what it has there."""

    pid: int
    command: str
    what: str


def users(mountpoint: bytes) -> list[Use]:
    """The processes that keep a mount busy. Of those of other users only root sees what they use.

    Only the texts of links are read: a mount that hangs is not asked.
    """
    found = []
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            what = _use(f"/proc/{pid}", mountpoint)
            if what:
                with open(f"/proc/{pid}/comm", errors="replace") as file:
                    found.append(Use(pid, file.read().strip(), what))
    return found


def _use(process: str, mountpoint: bytes) -> str:
    """Return in words why a process keeps a mount busy; "" if it does not."""
    for link, what in (("cwd", "its working directory"), ("root", "its root directory"), ("exe", "its program")):
        if _leads_into(f"{process}/{link}", mountpoint):
            return what
    for number in os.listdir(f"{process}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if _leads_into(f"{process}/fd/{number}", mountpoint):
                return "an open file"
    with open(f"{process}/maps", "rb") as file:
        places = (line.split(b" ", 5)[5].strip() for line in file if line.count(b" ") >= 5)
        return "a mapped file" if any(_lies_in(place, mountpoint) for place in places) else ""


def _leads_into(link: str, mountpoint: bytes) -> bool:
    return _lies_in(os.readlink(os.fsencode(link)).removesuffix(b" (deleted)"), mountpoint)


def filesystem_type(path: str | bytes | os.PathLike[str]) -> str:
    """Return the type of the file system that a path lies in (`ext4`, `nfs4`, `fuse.sshfs`); "" if unknown."""
    try:
        mount = mount_of(path)
    except OSError:
        return ""  # no /proc
    return mount.fstype if mount else ""


def is_network(fstype: str) -> bool:
    """True if files of this file system type are shared with other machines."""
    return fstype in NETWORK_TYPES


def is_layer(fstype: str) -> bool:
    """True if files of this file system type may be shown from another file system, below it."""
    return fstype in _LAYERS or fstype.startswith("fuse.")


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
    """The device number of the file system that a path lies in; 0 for a missing path."""
    try:
        return os.stat(path).st_dev
    except OSError:
        return 0
