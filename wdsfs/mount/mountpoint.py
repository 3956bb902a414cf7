"""The mount point and the options of `-o`: checked before a mount begins; `doctor` shows the checks, too.

They change nothing. What only fusermount3 refuses is explained by `doctor`.
"""

from __future__ import annotations

import errno
import functools
import os
import shlex
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from wdsfs import mount_registry, mount_table, names
from wdsfs.errors import DEAD_MOUNT_ERRNOS, MountError, UsageError
from wdsfs.mount.engines import is_kernel_mount
from wdsfs.tree.set_options import Owner
from wdsfs.trust import LINKS_MAX

ID_MAX = (1 << 32) - 2  # the last number means "no user" to the kernel


# Options of `-o` that libfuse or the kernel understands. Anything else is refused as a typing error.
_FLAGS = frozenset(
    (
        *("ro", "allow_other", "allow_root", "auto_unmount", "default_permissions", "nonempty"),
        *("dev", "nodev", "suid", "nosuid", "exec", "noexec", "sync", "async", "dirsync"),
        *("atime", "noatime"),
    )
)
_VALUES = frozenset(["fsname", "subtype", "context", "fscontext", "defcontext", "rootcontext"])


@dataclass(slots=True)
class FuseOptions:
    """The options of `-o`, parsed."""

    fuse: set[str] = field(default_factory=set)
    owner: Owner = field(default_factory=lambda: Owner(os.getuid(), os.getgid()))
    nonempty: bool = False


def parse_options(options: Sequence[str], *, writable: bool = False) -> FuseOptions:
    """Parse `-o` options. Raises UsageError for an unknown one."""
    parsed = FuseOptions()
    uid, gid, umask = parsed.owner.uid, parsed.owner.gid, 0
    for option in split_options(options):
        name, equals, value = option.partition("=")
        if name == "remount" or (name == "rw" and not writable):
            raise UsageError(f"-o {name}: this mount is read-only; --overlay DIR makes a writable one")
        if name == "rw":
            continue
        if name in ("uid", "gid", "umask") and equals:
            number = _parse_number(option, value, *((8, 0o777) if name == "umask" else (10, ID_MAX)))
            uid, gid, umask = (
                number if name == "uid" else uid,
                number if name == "gid" else gid,
                number if name == "umask" else umask,
            )
        elif option == "nonempty":
            parsed.nonempty = True
        elif option in _FLAGS or (equals and name in _VALUES):
            parsed.fuse.add(option)
        else:
            known = sorted(known_options())
            raise UsageError(
                f"-o {option}: no such option; known are {', '.join(known)}{names.meant(name, known)}"
            )
    parsed.owner = Owner(uid, gid, umask)
    return parsed


def known_options() -> set[str]:
    """Return all options of `-o`; one with a value ends in `=`."""
    return {*_FLAGS} | {f"{name}=" for name in _VALUES | {"uid", "gid", "umask"}}


def split_options(options: Sequence[str]) -> list[str]:
    """Return the single options of `-o`, which may be given several times, each with several options.

    As for libfuse and mount(8), a comma after a backslash or in double quotes belongs to a value; in the result it
    has a backslash. Raises UsageError for quotes without an end.
    """
    single, current = [], ""
    quoted = escaped = False
    for character in ",".join(options):
        if character == "," and not quoted and not escaped:
            single.append(current)
            current = ""
        else:
            current += "\\," if character == "," and not escaped else character
        quoted ^= character == '"' and not escaped
        escaped = character == "\\" and not escaped
    if quoted:
        raise UsageError(f'-o {current}: a double quote has no end; a quote in a value is written \\"')
    return [option for option in (*single, current) if option]


def _parse_number(option: str, value: str, base: int, largest: int) -> int:
    try:
        number = int(value, base)
    except ValueError:
        number = -1
    if not 0 <= number <= largest:
        kind = f"an octal number up to {largest:o}" if base == 8 else f"a number up to {largest}"
        raise UsageError(f"-o {option}: {kind} is needed")
    return number


class Obstacle(NamedTuple):
    """The reason why a place cannot or should not be mounted on, and the remedy; empty if there is none to type.

    `mounted`: a mount of wdsfs is there and answers, so nothing is wrong.
    """

    text: str
    remedy: str = ""
    mounted: bool = False


def check_mountpoint(mountpoint: str, nonempty: bool, busy: Sequence[bytes]) -> None:
    """Raise MountError if nothing can or should be mounted there.

    `busy` are paths that the daemon itself needs: over one of them it would wait for itself forever.
    """
    problem = obstacle(mountpoint, busy, nonempty=nonempty)
    if problem is not None:
        raise MountError(f"{mountpoint}: {problem.text}" + (f"; {problem.remedy}" if problem.remedy else ""))


def obstacle(mountpoint: str, busy: Sequence[bytes] = (), *, nonempty: bool = False) -> Obstacle | None:
    """Return what prevents a mount here; None if nothing does. Raises MountError without a runtime directory."""
    quoted = shlex.quote(mountpoint)
    try:
        os.statvfs(mountpoint)  # stat alone can be answered by the kernel when a mount is dead
        status = os.stat(mountpoint)
    except FileNotFoundError:
        return Obstacle("no such directory", f"make it with: mkdir -p {quoted}")
    except OSError as error:
        if error.errno in DEAD_MOUNT_ERRNOS:
            return Obstacle("a dead mount is there", f"clear it with: wdsfs umount {quoted}")
        if error.errno == errno.EACCES:  # also what a FUSE mount of another user answers, even to root
            return Obstacle("cannot be entered, or is another user's FUSE mount", f"see: findmnt {quoted}")
        return Obstacle(error.strerror or str(error))
    if not stat.S_ISDIR(status.st_mode):
        return Obstacle("is not a directory")
    mounted = mount_table.mounted_at(mountpoint)
    registration = None if mounted is None else mount_registry.find_registration(mountpoint)
    is_ours = mounted is not None and (mounted.fstype == "fuse.wdsfs" or is_kernel_mount(mounted))
    if is_ours or registration is not None:
        who = "" if registration is None else f" (process {registration.pid})"
        remedy = f"end that mount with: wdsfs umount {quoted}; or take another directory"
        return Obstacle(f"wdsfs is mounted there already{who}", remedy, mounted=True)
    top = os.fsencode(mountpoint)
    below = top.rstrip(b"/") + b"/"
    for path, place in _places_on_the_way(busy):
        if place.startswith(below) or place == top:
            return Obstacle(f"the mount would hide {os.fsdecode(path)}, which it needs itself")
    if mountpoint == "/":
        return Obstacle("is the root directory", "make a directory for the mount, such as /mnt/train")
    if not nonempty and _has_entries(mountpoint):
        return Obstacle("is not empty", "take an empty directory; or -o nonempty, which hides what is there")
    return None


def _places_on_the_way(paths: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Yield each path with every directory and link on the way to it, those of a directory of many only once."""
    parents: dict[bytes, bytes] = {}
    for path in paths:
        parent, _, name = path.rpartition(b"/")
        if name in (b"", b".", b"..") or not path.startswith(b"/"):
            path = os.path.abspath(path)
            parent, _, name = path.rpartition(b"/")
        if parent not in parents:
            parents[parent] = whole = os.path.abspath(parent or b"/")
            for place in _way(whole):
                parents[parent] = place
                yield path, place
        if _read_link(path) is None:
            yield path, parents[parent] + b"/" + name
        else:
            yield from ((path, place) for place in _way(path))


def _way(path: bytes) -> Iterator[bytes]:
    """Yield every directory and link on the way to a path: the path needs each of them.

    Not the walk of `trust`: that opens each step and refuses some, while here a step may be missing or private.
    """
    place, ahead, links = b"/", path.split(b"/")[::-1], 0
    while ahead and links < LINKS_MAX:
        name = ahead.pop()
        if name in (b"", b"."):
            continue
        place = os.path.dirname(place) if name == b".." else os.path.join(place, name)
        yield place
        target = _link_target(place)
        if target is not None:
            links += 1
            place = b"/" if target.startswith(b"/") else os.path.dirname(place)
            ahead.extend(target.split(b"/")[::-1])


def _read_link(path: bytes) -> bytes | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


_link_target = functools.lru_cache(1024)(_read_link)  # of directories, which many ways have in common


def _has_entries(directory: str) -> bool:
    try:
        with os.scandir(directory) as entries:
            return next(entries, None) is not None
    except OSError:  # not readable: libfuse will say what is wrong with it
        return False
