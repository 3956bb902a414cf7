"""The kernel's calls for mounts, as Python has none: fsopen(2) and so on (Linux 5.2).

Nothing is known here of what is mounted. Everything raises OSError; where the kernel says more of the reason than
its number, the text of the error is what it says.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_FSOPEN, _FSCONFIG, _FSMOUNT, _FSPICK, _MOVE_MOUNT = 430, 431, 432, 433, 429  # on all architectures
_SET_FLAG, _SET_STRING, _CREATE, _RECONFIGURE = 0, 1, 6, 7
_CLOEXEC, _FROM_EMPTY_PATH, _AT_FDCWD = 1, 4, -100
_BENEATH = 0x200  # flag of move_mount
_NOT_BENEATH = (
    "it cannot take the place of the mount that is there (Linux 6.5 or later); unmount that, and mount anew"
)
_DETACH = 2  # flag of umount2
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
    beneath: bool = False,
) -> None:
    """Mount a file system of this type at this path, with these settings (name, value) and flags.

    `beneath`: below the mount that is there, so that it is seen when that one ends. EBUSY: that cannot be.
    """
    with _context(_FSOPEN, fstype, _CLOEXEC) as context:
        _create(context, settings, flags)
        mounted = _call(_FSMOUNT, context, _CLOEXEC, attributes)
    place = _FROM_EMPTY_PATH | (_BENEATH if beneath else 0)
    try:
        _call(_MOVE_MOUNT, mounted, b"", _AT_FDCWD, os.fsencode(mountpoint), place)
    except OSError as error:
        if beneath and error.errno == errno.EINVAL:
            raise OSError(errno.EBUSY, _NOT_BENEATH) from None
        raise
    finally:
        os.close(mounted)


def end_of_use(mountpoint: str) -> int:
    """A descriptor that is readable when the kernel has dropped the superblock that is mounted there.

    That is after the last file of it is closed, and the last namespace has lost the mount. The descriptor keeps
    neither in use. ENOSPC, EMFILE: there are too many inotify instances or watches.
    """
    fd = int(_libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))
    # With the end of the superblock the kernel reports IN_UNMOUNT, unasked; what is asked for never happens.
    if fd < 0 or _libc.inotify_add_watch(fd, os.fsencode(mountpoint), _IN_DELETE_SELF) < 0:
        number = ctypes.get_errno()
        if fd >= 0:
            os.close(fd)
        raise OSError(number, os.strerror(number), mountpoint)
    return fd


def attempt(fstype: bytes, settings: Sequence[tuple[bytes, bytes]]) -> None:
    """Have the kernel set up a file system with these settings, and drop it: nothing is mounted."""
    with _context(_FSOPEN, fstype, _CLOEXEC) as context:
        _create(context, settings, ())


def set_read_only(mountpoint: str, read_only: bool) -> None:
    """Make the file system that is mounted at this path read-only as a whole, or writable again.

    EBUSY: a program has a file of it open for writing, or one that was removed.
    """
    with _context(_FSPICK, _AT_FDCWD, os.fsencode(mountpoint), _CLOEXEC) as context:
        _call(_FSCONFIG, context, _SET_FLAG, b"ro" if read_only else b"rw", None, 0)
        _call(_FSCONFIG, context, _RECONFIGURE, None, None, 0)


def detach(mountpoint: str) -> None:
    """End the mount at this path; what is open of it stays open."""
    if _libc.umount2(os.fsencode(mountpoint), _DETACH):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def enter_namespace(fd: int) -> None:
    """Move this process, which must have one thread, into the mount namespace of this descriptor."""
    if _libc.setns(fd, _NEW_MOUNTS):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


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
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _last_message(context: int) -> str:
    """What the kernel has written about the failure: lines such as `e erofs: bad option`."""
    found = ""
    while True:
        try:
            found = os.read(context, 4096).decode(errors="replace").partition(" ")[2].strip()
        except OSError:
            return found
