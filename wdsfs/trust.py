"""Who is trusted, and so which directories and files: those that nobody else can write or replace.

This user and root are trusted, and whom `WDSFS_TRUST` (`--trust`) names. Whoever can write a directory on the way
to a file decides what lies there, and where a link in it leads. So a way is gone step by step, with a descriptor
of each directory, and links are taken apart by hand: every directory and link has to belong to somebody who is
trusted, and nobody else may write to a directory on the way, unless it is sticky (as /tmp is), where only owners
replace things. When a whole way is so, its path means the same tomorrow, and LMDB and SQLite may open files by it.

The one home for these rules; docs/design.md lists who asks ("Who is trusted"). Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import grp
import os
import pwd
import shlex
import stat
from collections.abc import Callable
from typing import NamedTuple

from wdsfs.errors import UsageError

EVERYONE = "everyone"
LINKS_MAX = 40  # what the kernel follows on the way to a file
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe in the place of a file must not be waited for
_EVERY_ID = ["0", "0", "4294967295"]  # the uid_map of a process that is in no user namespace of its own


class Untrusted(PermissionError):
    """Somebody else can write a place; `strerror` says who, where, and the way out."""

    def __init__(self, text: str) -> None:
        super().__init__(errno.EACCES, text)


class Trust(NamedTuple):
    """Who is trusted: owners by uid, and groups by gid, which may write; `users` and `named` groups were named.

    What belongs to one of the named groups was made by one of its members, so that its owner is trusted, too.
    """

    owners: frozenset[int]
    groups: frozenset[int]
    users: frozenset[int]
    named: frozenset[int]
    everyone: bool = False

    def owns(self, found: os.stat_result) -> bool:
        """Whether something belongs to somebody who is trusted."""
        return self.everyone or found.st_uid in self.owners or found.st_gid in self.named


def trusted() -> Trust:
    """Whom this process trusts. Raises UsageError for a name in `WDSFS_TRUST` that nobody has."""
    return _trusted(os.geteuid(), os.environ.get("WDSFS_TRUST", ""))


@functools.lru_cache(8)
def _trusted(user: int, names: str) -> Trust:
    users, named = set(), set()
    given = [name.strip() for name in names.split(",") if name.strip()]
    for name in given:
        if name.startswith("@"):
            named.add(_number(name, name[1:], lambda text: grp.getgrnam(text).gr_gid))
        elif name != EVERYONE:
            users.add(_number(name, name, lambda text: pwd.getpwnam(text).pw_uid))
    groups = {0, *_private_group(user), *named}
    owners = {0, user, *users}
    return Trust(frozenset(owners), frozenset(groups), frozenset(users), frozenset(named), EVERYONE in given)


def _number(name: str, text: str, find: Callable[[str], int]) -> int:
    try:
        return int(text) if text.isdecimal() else find(text)
    except KeyError:
        kind = "group" if name.startswith("@") else "user"
        raise UsageError(
            f"--trust {name}: there is no such {kind}; write USER, @GROUP (names or numbers) or {EVERYONE}"
        ) from None


def _private_group(user: int) -> set[int]:
    """The group that only this user is in, by the custom of giving each user one of the same name.

    With it goes the umask 002, so directories of such users can be written by that group.
    """
    try:
        one = pwd.getpwuid(user)
        group = grp.getgrgid(one.pw_gid)
    except KeyError:
        return set()
    alone = group.gr_name == one.pw_name and set(group.gr_mem) <= {one.pw_name}
    return {one.pw_gid} if alone else set()


# --- directories -------------------------------------------------------------------------------------------


def directory(path: str | os.PathLike[str], create: bool = False, tighten: bool = False) -> None:
    """See that nobody who is not trusted can write a directory, or replace it or anything on the way to it.

    With `create` what is missing is made, with the mode 0700 whatever the umask. `tighten` is for a directory that
    only wdsfs uses: when it is this user's, all others lose the right to write. Raises Untrusted, OSErrors.
    """
    _walk(os.path.abspath(path), create, tighten, False)


def holds(path: bytes) -> bool:
    """Whether only those who are trusted can have changed what lies at a path, and where its links lead."""
    try:
        for _ in range(LINKS_MAX):
            directory(os.fsdecode(os.path.dirname(path)))
            if not os.path.islink(path):
                return True
            path = os.path.join(os.path.dirname(path), os.readlink(path))
    except OSError:
        pass
    return False


def way(path: str | os.PathLike[str]) -> None:
    """As `directory`, of the way to something but not of that itself: it may lie in a sticky directory."""
    _walk(os.path.dirname(os.path.abspath(path)), False, False, True)


def _walk(path: str, create: bool, tighten: bool, further: bool) -> None:
    """Go the way to a directory, looking at every step. `further`: it is on the way to something itself."""
    trust, place, links, device = trusted(), "/", 0, -1
    fd = os.open("/", _STEP | os.O_DIRECTORY)
    ahead = _parts(path, typed=True)
    try:
        while True:
            found = os.fstat(fd)
            if tighten and not ahead and found.st_uid == os.geteuid() and found.st_mode & _OTHERS:
                os.chmod(f"/proc/self/fd/{fd}", stat.S_IMODE(found.st_mode) & ~_OTHERS)
                found = os.fstat(fd)
            _require_directory(place, fd, found, device, not ahead and not further, trust)
            device = found.st_dev
            while True:
                if not ahead:
                    return
                name, typed = ahead.pop()
                inner = _open_step(fd, name, create and typed)
                try:
                    target = _link_at(inner, os.path.join(place, name), trust)
                except BaseException:
                    os.close(inner)
                    raise
                if target is None:
                    break
                os.close(inner)
                links += 1
                if links > LINKS_MAX:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                ahead += _parts(target, typed=False)
                if target.startswith("/"):
                    os.close(fd)
                    fd, place = os.open("/", _STEP | os.O_DIRECTORY), "/"
            os.close(fd)
            fd, place = inner, os.path.normpath(os.path.join(place, name))
    finally:
        os.close(fd)


def _parts(path: str, typed: bool) -> list[tuple[str, bool]]:
    """The names in a path, the first one last, and whether they are of the path that was asked for."""
    return [(name, typed) for name in reversed(path.split("/")) if name not in ("", ".")]


def _open_step(fd: int, name: str, create: bool) -> int:
    try:
        return os.open(name, _STEP, dir_fd=fd)
    except FileNotFoundError:
        if not create:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=fd)
    return os.open(name, _STEP, dir_fd=fd)


def _link_at(fd: int, place: str, trust: Trust) -> str | None:
    """Where a step leads that is a link of somebody who is trusted; None for a directory.

    Raises Untrusted, NotADirectoryError.
    """
    found = os.fstat(fd)
    if stat.S_ISLNK(found.st_mode):
        _require_owner(place, found, False, trust)
        return os.readlink("", dir_fd=fd)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), place)
    return None


def _require_directory(place: str, fd: int, found: os.stat_result, device: int, last: bool, trust: Trust) -> None:
    """Raises Untrusted for a directory that others can change. `device` is that of the step before."""
    _require_owner(place, found, last, trust)
    if trust.everyone:
        return
    if found.st_dev != device:
        mounter = _fuse_mounter(found.st_dev)
        if mounter is not None and mounter not in trust.owners:
            who = user_name(mounter)
            raise Untrusted(f"{place} is a FUSE mount of another user ({who}): take another, or --trust {who}")
    mode, quoted = stat.S_IMODE(found.st_mode), shlex.quote(place)
    if not mode & _OTHERS or (mode & stat.S_ISVTX and not last):
        return
    if mode & stat.S_ISVTX:
        raise Untrusted(f"others can write to {place} (mode {mode:04o}): take a directory of your own below it")
    if mode & stat.S_IWOTH:
        raise Untrusted(
            f"others can write to {place} (mode {mode:04o}): chmod go-w {quoted}, or take another directory"
        )
    if found.st_gid not in trust.groups or _has_acl(fd):
        who = group_name(found.st_gid)
        raise Untrusted(
            f"the group {who} can write to {place} (mode {mode:04o}): chmod g-w {quoted}, or --trust @{who}"
        )


def _require_owner(place: str, found: os.stat_result, last: bool, trust: Trust) -> None:
    if trust.owns(found):
        return
    # In a user namespace root outside shows as nobody, and /tmp and /home belong to it.
    if not last and found.st_uid == _unmapped_owner():
        return
    who = user_name(found.st_uid)
    raise Untrusted(f"{place} belongs to another user ({who}): take a place of your own, or --trust {who}")


def _has_acl(fd: int) -> bool:
    """Whether more may be granted than the mode says: with a list the group's bits are those of all in it."""
    try:
        return "system.posix_acl_access" in os.listxattr(f"/proc/self/fd/{fd}")
    except OSError:
        return False


def _fuse_mounter(device: int) -> int | None:
    """The user (uid) who mounted this file system by FUSE, whose daemon may say of any file that it is ours."""
    wanted = f"{os.major(device)}:{os.minor(device)}".encode()
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            lines = file.read().split(b"\n")
    except OSError:
        return None
    for line in lines:
        fields, _, rest = line.partition(b" - ")
        if fields.split(b" ")[2:3] != [wanted] or not rest.startswith(b"fuse"):
            continue
        for option in rest.split(b" ")[2].split(b","):
            if option.startswith(b"user_id="):
                return int(option[8:])
    return None


@functools.lru_cache(1)
def _unmapped_owner() -> int | None:
    """The owner that files of users outside of this user namespace seem to have; None outside of such."""
    try:
        with open("/proc/self/uid_map") as file:
            if file.read().split() == _EVERY_ID:
                return None
        with open("/proc/sys/kernel/overflowuid") as file:
            return int(file.read())
    except OSError:
        return None


def user_name(uid: int) -> str:
    """The name of a user, or the number of one without."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_name(gid: int) -> str:
    """The name of a group, or the number of one without."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


# --- files -------------------------------------------------------------------------------------------------


def require_file(found: os.stat_result, path: object) -> None:
    """See that a file is a regular one with one name, of somebody trusted, and that nobody else can write it.

    Raises Untrusted.
    """
    trust = trusted()
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        what = "has several names (hard links)" if stat.S_ISREG(found.st_mode) else "is no regular file"
        raise Untrusted(f"{path} {what}: remove it")
    if not trust.owns(found):
        raise Untrusted(f"{path} belongs to another user ({user_name(found.st_uid)}): remove it")
    others = found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and found.st_gid not in trust.groups)
    if others and not trust.everyone:
        raise Untrusted(f"others can write to {path} (mode {stat.S_IMODE(found.st_mode):04o}): remove it")


def open_file(path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> int:
    """A descriptor of a file that wdsfs keeps: never through a link, and only of one that `require_file` passes.

    Nothing is truncated: O_TRUNC would do so before the look. Raises Untrusted, OSErrors.
    """
    try:
        fd = os.open(path, flags & ~os.O_TRUNC | _FILE, mode)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise Untrusted(f"{os.fspath(path)} is a symbolic link: remove it") from None
    try:
        require_file(os.fstat(fd), os.fspath(path))
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_lock(path: str | os.PathLike[str], mode: int = 0o600) -> int:
    """As `open_file`, of a file that is only locked: the message says that it can be removed without a loss.

    Semantics decision: a lock with several names is not locked, and not replaced either. Each name would be the
    lock of another directory (`cp -al`), and a process that holds the old file would not see a new one.
    """
    try:
        return open_file(path, os.O_RDWR | os.O_CREAT, mode)
    except Untrusted as error:
        raise Untrusted(f"{error.strerror} (it is only a lock: nothing else is in it)") from None
