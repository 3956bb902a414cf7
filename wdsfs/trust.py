"""Trust in paths: checks that only trusted users can write or replace a file and the directories above it.

This user and root are trusted, and the users and groups that `WDSFS_TRUST` (`--trust`) names. A user who can write
to a directory on the way to a file decides what lies there, and where a link in it leads. So a path is walked step
by step, with a descriptor of each directory, and links are resolved here. Every directory and link has to belong
to a trusted user. Nobody else may write to a directory on the way, unless it is sticky (as /tmp is): there only
owners can replace files. A path that passes means the same tomorrow, so LMDB and SQLite may open files by it.

The one home of these rules; docs/explanation/trust.md lists the callers ("How each place is protected"). Standard
library.
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
from collections.abc import Callable, Iterator
from typing import NamedTuple

from wdsfs import mount_table
from wdsfs.errors import UsageError
from wdsfs.shared_settings import setting

EVERYONE = "everyone"
LINKS_MAX = 40  # what the kernel follows on the way to a file
_LOCK_MODE = 0o600
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe in the place of a file must not be waited for
_EVERY_ID = ["0", "0", "4294967295"]  # the uid_map of a process that is in no user namespace of its own


class Untrusted(PermissionError):
    """A user who is not trusted can write to a place; `strerror` says who, where, and what to do."""

    def __init__(self, text: str) -> None:
        super().__init__(errno.EACCES, text)


class Trust(NamedTuple):
    """Trusted owners (uids), and groups (gids) that may write; `users` and `named` are those named by the user.

    A file of a named group was made by a member of the group, so its owner is trusted, too.
    """

    owners: frozenset[int]
    groups: frozenset[int]
    users: frozenset[int]
    named: frozenset[int]
    everyone: bool = False

    def owns(self, status: os.stat_result) -> bool:
        """Return True if a file belongs to a trusted user."""
        return self.everyone or status.st_uid in self.owners or status.st_gid in self.named

    def lets_others_write(self, status: os.stat_result) -> bool:
        """Return True if a user or group that is not trusted may write to a file."""
        by_group = status.st_mode & stat.S_IWGRP and status.st_gid not in self.groups
        return bool(status.st_mode & stat.S_IWOTH or by_group) and not self.everyone


def trusted() -> Trust:
    """Return whom this process trusts. Raises UsageError for an unknown name in `WDSFS_TRUST`."""
    return _trusted(os.geteuid(), setting("TRUST"))


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
    """Return the user's private group: many systems give each user a group of the same name.

    They also set the umask 002, so the group can write to the directories of such users.
    """
    try:
        account = pwd.getpwuid(user)
        group = grp.getgrgid(account.pw_gid)
    except KeyError:
        return set()
    alone = group.gr_name == account.pw_name and set(group.gr_mem) <= {account.pw_name}
    return {account.pw_gid} if alone else set()


# --- directories -------------------------------------------------------------------------------------------


def directory(path: str | os.PathLike[str], *, create: bool = False, tighten: bool = False) -> None:
    """Check that only trusted users can write to a directory, replace it, or replace a directory on the way to it.

    `create` makes missing directories, with the mode 0700 whatever the umask. `tighten` is for a directory that
    only wdsfs uses: if it is this user's, all others lose the right to write. Raises Untrusted, OSErrors.
    """
    _walk(_absolute(path), create, tighten, False)


def holds(path: bytes, also: int | None = None) -> bool:
    """Return True if only trusted users can have changed the file at a path, and the links on the way to it.

    `also` is as in `content`.
    """
    try:
        list(_places(path, False, _trusting(also)))
    except OSError:
        return False
    return True


def way(path: str | os.PathLike[str]) -> None:
    """Check, as `directory`, only the directories above a path, which itself may lie in a sticky one."""
    _walk(os.path.dirname(_absolute(path)), False, False, True)


def content(path: str | os.PathLike[str], also: int | None = None) -> None:
    """Check that only trusted users can write to a file, replace it, or lead a link to another one.

    `also` is a user who is trusted here, too. Raises Untrusted, OSErrors.
    """
    trust = _trusting(also)
    for place in _places(path, True, trust):
        status = os.lstat(place)
        _require_owner(place, status, True, trust)
    if trust.lets_others_write(status):
        mode, quoted = stat.S_IMODE(status.st_mode), shlex.quote(place)
        raise Untrusted(f"others can write to {place} (mode {mode:04o}): chmod go-w {quoted}")


def _absolute(path: str | bytes | os.PathLike[str]) -> str:
    """Return a path from the root on. Not by `abspath`: for the kernel `..` after a link is above its target."""
    typed = os.fsdecode(path)
    return typed if typed.startswith("/") else os.path.join(os.getcwd(), typed)


def _places(path: str | bytes | os.PathLike[str], further: bool, trust: Trust) -> Iterator[str]:
    """Yield where a file is, without links on the way to it; if it is a link, then where each target is.

    The way to each of them is checked: `further` as in `_walk`. Raises Untrusted, OSErrors.
    """
    place = _absolute(path)
    for _ in range(LINKS_MAX):
        directory, name = os.path.split(place)
        place = os.path.join(_walk(directory, False, False, further, trust), name)
        yield place
        if not os.path.islink(place):
            return
        place = os.path.join(os.path.dirname(place), os.readlink(place))
    raise _loop(os.fsdecode(path))


def _loop(path: str) -> OSError:
    return OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def _trusting(also: int | None) -> Trust:
    trust = trusted()
    if also is None:
        return trust
    return trust._replace(owners=trust.owners | {also}, groups=trust.groups | _private_group(also))


def behind_sudo() -> int | None:
    """Return the user who has typed `sudo`."""
    user = os.environ.get("SUDO_UID", "")
    return int(user) if user.isdecimal() else None


def foreign_link(path: bytes, fd: int) -> str | None:
    """Return why a file that is open must not be shown to others: `own_links` refuses it. None if it may be.

    Semantics decision: a mount that others may see, and an image, show no file to which the link of another user
    leads, unless it is a file of that user. Whose link it is must not get at files of others by a mount of root's.
    Raises OSError.
    """
    try:
        own_links(path, fd, behind_sudo())
    except Untrusted as error:
        return f"{os.fsdecode(path)}: {error.strerror}"
    return None


def is_another_name(status: os.stat_result) -> bool:
    """Return True for a file that not everybody may read and that has several names.

    One may be a hard link of others.
    """
    return status.st_nlink > 1 and not status.st_mode & stat.S_IROTH


def has_foreign_links(directory: bytes, fd: int) -> bool:
    """Return True if a link of an untrusted user may have led to a directory that is open. Raises OSError."""
    if _has_path(fd, directory):
        return False
    links, status = _links_on(os.fsdecode(directory))
    trust = _trusting(behind_sudo())
    return not os.path.samestat(status, os.fstat(fd)) or not all(map(trust.owns, links))


def own_links(path: bytes, fd: int, also: int | None = None) -> None:
    """Check that no link of an untrusted user has led to a file of another user, which is open.

    Else such a user could have a program of root show a file that only root can read. `also` is as in `content`.
    Raises Untrusted, OSErrors.
    """
    opened = os.fstat(fd)
    has_names = is_another_name(opened)
    if not has_names and _has_path(fd, path):
        return  # the usual case: there is no link
    trust = _trusting(also)
    if has_names and opened.st_uid in trust.owners and not holds(path, also):
        owner = user_name(opened.st_uid)
        raise Untrusted(f"is a hard link of a file of {owner} that not all may read, and others can write there")
    links, status = _links_on(os.fsdecode(path))
    if not os.path.samestat(status, opened):  # while it was looked at
        raise OSError(errno.ESTALE, "was replaced by another file", path)
    foreign = {link.st_uid for link in links if not trust.owns(link)} - {opened.st_uid}
    if foreign:
        who, owner = user_name(min(foreign)), user_name(opened.st_uid)
        raise Untrusted(
            f"a link of another user ({who}) leads to a file of {owner}: name the file, or --trust {who}"
        )


def _has_path(fd: int, path: bytes) -> bool:
    """Return True if this is the path of an open file without any link."""
    try:
        return os.readlink(b"/proc/self/fd/%d" % fd) == path
    except OSError:  # no /proc
        return False


def _links_on(path: str) -> tuple[list[os.stat_result], os.stat_result]:
    """Return the links on the way to a file, and the file; no step can be changed while it is looked at."""
    links: list[os.stat_result] = []
    fd, ahead = os.open("/", _STEP | os.O_DIRECTORY), _parts(path, typed=True)
    try:
        while ahead:
            step = os.open(ahead.pop()[0], _STEP, dir_fd=fd)
            status = os.fstat(step)
            if stat.S_ISLNK(status.st_mode):
                links.append(status)
                if len(links) > LINKS_MAX:
                    os.close(step)
                    raise _loop(path)
                target = os.readlink("", dir_fd=step)
                ahead += _parts(target, typed=False)
                os.close(step)
                if not target.startswith("/"):
                    continue
                step = os.open("/", _STEP | os.O_DIRECTORY)
            os.close(fd)
            fd = step
        return links, os.fstat(fd)
    finally:
        os.close(fd)


def _walk(path: str, create: bool, tighten: bool, further: bool, trust: Trust | None = None) -> str:
    """Walk to a directory and check every step. `further`: the directory is not the end of the way.

    Returns the path of the directory without links.
    """
    trust = trusted() if trust is None else trust
    place, links, device = "/", 0, -1
    fd = os.open("/", _STEP | os.O_DIRECTORY)
    ahead = _parts(path, typed=True)
    try:
        while True:
            status = os.fstat(fd)
            if tighten and not ahead and status.st_uid == os.geteuid() and status.st_mode & _OTHERS:
                os.chmod(f"/proc/self/fd/{fd}", stat.S_IMODE(status.st_mode) & ~_OTHERS)
                status = os.fstat(fd)
            _require_directory(place, fd, status, device, not ahead and not further, trust)
            device = status.st_dev
            while True:
                if not ahead:
                    return place
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
                    raise _loop(path)
                ahead += _parts(target, typed=False)
                if target.startswith("/"):
                    os.close(fd)
                    fd, place = os.open("/", _STEP | os.O_DIRECTORY), "/"
            os.close(fd)
            fd, place = inner, os.path.normpath(os.path.join(place, name))
    finally:
        os.close(fd)


def _parts(path: str, typed: bool) -> list[tuple[str, bool]]:
    """Return the names in a path, the first one last, each with `typed`: it is of the path that was asked for."""
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
    """Return the target of a step that is a link of a trusted user; None for a directory.

    Raises Untrusted, NotADirectoryError.
    """
    status = os.fstat(fd)
    if stat.S_ISLNK(status.st_mode):
        _require_owner(place, status, False, trust)
        return os.readlink("", dir_fd=fd)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), place)
    return None


def _require_directory(place: str, fd: int, status: os.stat_result, device: int, last: bool, trust: Trust) -> None:
    """Raise Untrusted for a directory that others can change. `device` is that of the step before."""
    _require_owner(place, status, last, trust)
    if trust.everyone:
        return
    if status.st_dev != device:
        mounter = _fuse_mounter(status.st_dev)
        if mounter is not None and mounter not in trust.owners:
            who = user_name(mounter)
            raise Untrusted(f"{place} is a FUSE mount of another user ({who}): take another, or --trust {who}")
    mode, quoted = stat.S_IMODE(status.st_mode), shlex.quote(place)
    if not mode & _OTHERS or (mode & stat.S_ISVTX and not last):
        return
    if mode & stat.S_ISVTX:
        raise Untrusted(f"others can write to {place} (mode {mode:04o}): take a directory of your own below it")
    if mode & stat.S_IWOTH:
        raise Untrusted(
            f"others can write to {place} (mode {mode:04o}): chmod go-w {quoted}, or take another directory"
        )
    if status.st_gid not in trust.groups or _has_acl(fd):
        who = group_name(status.st_gid)
        raise Untrusted(
            f"the group {who} can write to {place} (mode {mode:04o}): chmod g-w {quoted}, or --trust @{who}"
        )


def _require_owner(place: str, status: os.stat_result, last: bool, trust: Trust) -> None:
    if trust.owns(status):
        return
    # In a user namespace root outside shows as nobody, and /tmp and /home belong to it.
    if not last and status.st_uid == _unmapped_owner():
        return
    who = user_name(status.st_uid)
    raise Untrusted(f"{place} belongs to another user ({who}): take a place of your own, or --trust {who}")


def _has_acl(fd: int) -> bool:
    """Return True if there is an access list.

    Then the group bits of the mode are the maximum over all its entries.
    """
    try:
        return "system.posix_acl_access" in os.listxattr(f"/proc/self/fd/{fd}")
    except OSError:
        return False


def _fuse_mounter(device: int) -> int | None:
    """Return the uid that mounted this FUSE file system: its daemon can claim any owner for a file."""
    try:
        mounts = mount_table.mounts_of(device)
    except OSError:  # no /proc
        return None
    return next((mount.user for mount in mounts if mount.fstype.startswith("fuse")), None)


@functools.lru_cache(1)
def _unmapped_owner() -> int | None:
    """Return the owner shown for files of users outside of this user namespace; None without such a namespace."""
    try:
        with open("/proc/self/uid_map") as file:
            if file.read().split() == _EVERY_ID:
                return None
        with open("/proc/sys/kernel/overflowuid") as file:
            return int(file.read())
    except OSError:
        return None


def user_name(uid: int) -> str:
    """Return the name of a user, or the number if there is no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_name(gid: int) -> str:
    """Return the name of a group, or the number if there is no name."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


# --- files -------------------------------------------------------------------------------------------------


def require_file(status: os.stat_result, path: object) -> None:
    """Check that a file is regular, has one name and a trusted owner, and that nobody else can write to it.

    Raises Untrusted.
    """
    trust = trusted()
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        what = "has several names (hard links)" if stat.S_ISREG(status.st_mode) else "is not a regular file"
        raise Untrusted(f"{path} {what}: remove it")
    if not trust.owns(status):
        raise Untrusted(f"{path} belongs to another user ({user_name(status.st_uid)}): remove it")
    if trust.lets_others_write(status):
        raise Untrusted(f"others can write to {path} (mode {stat.S_IMODE(status.st_mode):04o}): remove it")


def open_file(path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> int:
    """Open a file that wdsfs keeps: never through a link, and only if `require_file` accepts it.

    O_TRUNC is ignored, since it would truncate the file before the check. Raises Untrusted, OSErrors.
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


def open_lock(path: str | os.PathLike[str]) -> int:
    """Open a lock file as `open_file`; nobody else may open it, as its readers could lock it and make all wait.

    This user's lock files become unreadable for others. The message says that they can be removed without loss.

    Semantics decision: a lock with several names is not locked, and not replaced either. Each name would be the
    lock of another directory (`cp -al`), and a process that holds the old file would not see a new one.
    """
    try:
        fd = open_file(path, os.O_RDWR | os.O_CREAT, _LOCK_MODE)
    except Untrusted as error:
        raise Untrusted(f"{error.strerror} (it is only a lock: nothing else is in it)") from None
    if stat.S_IMODE(os.fstat(fd).st_mode) & ~_LOCK_MODE:
        with contextlib.suppress(PermissionError):  # it is another trusted user's
            os.fchmod(fd, _LOCK_MODE)
    return fd


def foreign_holder(fd: int) -> str | None:
    """Return which process of an untrusted user has locked (flock) an open file or directory; None for none.

    A directory that others can read they can lock, and so could files of earlier versions.
    """
    status, trust = os.fstat(fd), trusted()
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError), open("/proc/locks") as locks:
        for fields in map(str.split, locks):
            if fields[1] == "FLOCK" and place in fields:
                pid = fields[fields.index(place) - 1]
                with contextlib.suppress(OSError):  # it has ended, and one of its children has the lock
                    owner = os.stat(f"/proc/{pid}").st_uid
                    if owner not in trust.owners and not trust.everyone:
                        return f"process {pid} of another user ({user_name(owner)})"
    return None
