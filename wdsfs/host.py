"""Facts about this machine that other modules ask for: mounts, directories for our files, the kernel.

Standard library only, no FUSE, nothing kept between calls. Each function reads what it reports when it is
called; none of them changes anything, but for those that make a directory of ours.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from wdsfs import trust
from wdsfs.errors import IndexUnusable, MountError, WdsfsError

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

_ESCAPE = re.compile(rb"\\([0-7]{3})")


# -- mounts --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MountPoint:
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
        """Who has made a FUSE mount, 0 for others."""
        found = [one.partition("=")[2] for one in self.super_options if one.startswith("user_id=")]
        return int(found[0]) if found else 0


def parse_mountinfo(text: bytes) -> list[MountPoint]:
    """The mounts in the order of the text, which is the order in which they were made."""
    return [_parse_line(line) for line in text.split(b"\n") if line]


def _parse_line(line: bytes) -> MountPoint:
    # 36 35 98:0 /subtree /mnt rw,noatime master:1 - ext3 /dev/root rw,errors=continue    (proc(5))
    # The number of fields before the dash varies; the source can be empty.
    before, _, after = line.partition(b" - ")
    _, _, device, _, path, options = before.split(b" ")[:6]
    fstype, source, super_options = after.split(b" ", 2)
    major, minor = device.split(b":")
    return MountPoint(
        path=_unescape(path),
        fstype=os.fsdecode(_unescape(fstype)),
        source=_unescape(source),
        options=tuple(os.fsdecode(options).split(",")),
        super_options=tuple(os.fsdecode(_unescape(super_options)).split(",")),
        device=os.makedev(int(major), int(minor)),
    )


def _unescape(field: bytes) -> bytes:
    """Undo the kernel's escapes: space, tab, newline, backslash and `#` stand as a backslash and octal."""
    return _ESCAPE.sub(lambda match: bytes([int(match[1], 8) & 0xFF]), field)


def mounts() -> list[MountPoint]:
    """All mounts that this process sees, oldest first. Raises OSError without /proc."""
    with open(MOUNTINFO, "rb") as file:
        return parse_mountinfo(file.read())


def mount_of(path: str | bytes | os.PathLike[str]) -> MountPoint | None:
    """The mount that a path lies in; for a path that does not exist, the one it would be made in.

    The longest matching mount point, and of several at one place the newest, which hides the others.
    """
    real = os.path.realpath(os.fsencode(path))
    holding = [mount for mount in mounts() if _lies_in(real, mount.path)]
    return max(enumerate(holding), key=lambda item: (len(item[1].path), item[0]))[1] if holding else None


def _lies_in(path: bytes, directory: bytes) -> bool:
    return path == directory or path.startswith(directory.rstrip(b"/") + b"/")


def mounted_at(path: str | bytes | os.PathLike[str]) -> MountPoint | None:
    """The mount whose mount point is just this path, the newest of several; None when there is none.

    Works for a dead mount, too: nothing at the path itself is looked at.
    """
    parent, base = os.path.split(os.path.abspath(os.fsencode(path)))
    place = os.path.join(os.path.realpath(parent), base)
    here = [mount for mount in mounts() if mount.path == place]
    return here[-1] if here else None


def filesystem_type(path: str | bytes | os.PathLike[str]) -> str:
    """The type of the file system that a path lies in (`ext4`, `nfs4`, `fuse.sshfs`), "" when unknown."""
    try:
        mount = mount_of(path)
    except OSError:
        return ""  # no /proc
    return mount.fstype if mount else ""


def is_network(fstype: str) -> bool:
    """Whether files of this file system type are shared with other machines."""
    return fstype in NETWORK_TYPES


def set_readahead(device: int, size: int) -> None:
    """Have the kernel ask the file system with this `st_dev` for up to so many bytes at a time. Raises OSError."""
    name = f"{os.major(device)}:{os.minor(device)}"
    Path(f"/sys/class/bdi/{name}/read_ahead_kb").write_text(f"{size >> 10}\n")


def unwritten_bytes() -> int | None:
    """What the kernel has still to write to all disks of this machine; None when it does not say."""
    try:
        found = re.findall(rb"^(?:Dirty|Writeback): +(\d+) kB$", Path("/proc/meminfo").read_bytes(), re.M)
    except OSError:
        return None
    return sum(map(int, found)) << 10 if found else None


# -- directories ---------------------------------------------------------------------------------------------


def cache_dir() -> Path:
    """Where the index goes by default; not created. Without HOME, the home directory of the user database."""
    return _xdg("XDG_CACHE_HOME", ".cache") / "wdsfs"


def state_dir() -> Path:
    """Where logs go, for root as for everyone; not created."""
    return _xdg("XDG_STATE_HOME", ".local/state") / "wdsfs"


def _xdg(variable: str, default: str) -> Path:
    # The XDG specification: a relative path is to be ignored.
    chosen = os.environ.get(variable, "")
    return Path(chosen) if os.path.isabs(chosen) else Path(os.path.expanduser("~")) / default


def runtime_dir(create: bool = True) -> Path:
    """The directory of control sockets and process ids, created with mode 0700, unless it is only asked for.

    For root always /run/wdsfs, so that `status` finds in a login session what was mounted at boot. For others
    the session's runtime directory, with or without XDG_RUNTIME_DIR (cron jobs have none), where there is
    one of theirs (after `su` the variable still names the other user's); else /tmp/wdsfs-UID.

    Raises MountError when that one was prepared by another user, or cannot be made.
    """
    for parent in _runtime_parents():
        try:
            return private_directory(parent / "wdsfs", MountError, create)
        except MountError:
            continue  # no space, read-only ...: /tmp decides
    try:
        return private_directory(Path(f"/tmp/wdsfs-{os.geteuid()}"), MountError, create)
    except MountError as error:
        raise MountError(f"{error}; or set XDG_RUNTIME_DIR to a directory of your own") from None


def _runtime_parents() -> Iterator[Path]:
    user = os.geteuid()
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    places = [Path("/run")] if user == 0 else [Path(session), Path(f"/run/user/{user}")]
    for place in places:
        try:
            if place.is_absolute() and place.stat().st_uid == user:
                yield place
        except OSError:
            continue


def node_local_dir() -> Path:
    """A place for an index that is on this machine and outlives a reboot: /var/tmp/wdsfs-UID, mode 0700.

    Raises IndexUnusable when another user prepared it, or it cannot be made.
    """
    return private_directory(Path(f"/var/tmp/wdsfs-{os.geteuid()}"), IndexUnusable)


def index_place(home: Path, notices: list[str]) -> Path | None:
    """The directory of the index: `home`, or a place on this machine where that is not safe; None without one.

    LMDB is not safe on a network file system, and nothing is where somebody else can write (`trust`). `notices`
    get the reason for another place. What is missing of `home` is made.
    """
    why = _unfit(home)
    if why is None:
        return home
    try:
        local = node_local_dir()
    except IndexUnusable as error:
        notices.append(f"{why}, and {error}")
        return None
    if is_network(filesystem_type(local)):
        notices.append(f"{why}, and so is {local}")
        return None
    notices.append(f"{why}; using {local}")
    return local


def _unfit(home: Path) -> str | None:
    """Why there can be no index in this directory, if there is such a reason."""
    kind = filesystem_type(home)
    if is_network(kind):
        return f"{home} is on a network file system ({kind}), where LMDB is not safe"
    try:
        trust.directory(home, create=True, tighten=home == cache_dir())
    except trust.Untrusted as error:
        return f"the index directory {home} is not used, since {error.strerror}"
    except OSError:
        pass  # whoever opens it says what is wrong
    return None


def beside_index(directory: Path) -> Path:
    """Where a user keeps what goes with an index: in its directory, or if it is shared, in the user's own cache.

    Raises IndexUnusable.
    """
    try:
        found = os.stat(directory)
    except OSError:
        return directory  # whoever makes a file there says what is wrong
    if found.st_uid == os.geteuid() and not found.st_mode & stat.S_IWGRP:
        return directory
    notices: list[str] = []
    own = index_place(cache_dir(), notices)
    if own is None:
        raise IndexUnusable("; ".join(notices))
    return own


def private_directory(path: Path, error: type[WdsfsError], create: bool = True) -> Path:
    """Create a directory that only this user can use, or see that it is one, or without `create` could be.

    In /tmp anyone can make a directory or a link of a known name first, and would then own what is put into
    it. So it is opened without following a link, and its owner is checked on the descriptor; once it is ours,
    the sticky bit of its parent keeps others from replacing it. Raises `error`.
    """
    try:
        trust.way(path)
        if not create and not os.path.lexists(path):
            os.stat(path.parent)
            return path
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as problem:
        raise error(f"cannot use the directory {path}: {problem.strerror}") from problem
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid():
            raise error(f"the directory {path} belongs to another user (uid {found.st_uid}): have it removed")
        if create and stat.S_IMODE(found.st_mode) & 0o077:
            os.fchmod(fd, 0o700)
    finally:
        os.close(fd)
    return path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time is in here for each `path`, a file that is made for this and stays. Raises OSError."""
    fd = trust.open_lock(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


# -- the kernel ----------------------------------------------------------------------------------------------


def kernel_version(release: str | None = None) -> tuple[int, ...]:
    """The numbers at the start of the kernel's release: `6.9.0-rc1` -> (6, 9, 0), `6.18` -> (6, 18)."""
    numbers = re.match(r"\d+(?:\.\d+)*", os.uname().release if release is None else release)
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else ()
