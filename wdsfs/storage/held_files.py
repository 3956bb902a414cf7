"""Files of the cache that a kernel mount reads: marked, and not evicted while they are in use.

A command that is going to mount a file opens and marks it. A file is held as long as it is marked and a process or
the kernel has it open; a mark alone does not hold it. The kernel itself has the devices of a mount open. So a file
is held as long as the mount is used, in any namespace, also when processes of wdsfs are killed, and not after a
reboot. The mark is removed together with the file.

Whether a file is open elsewhere is asked by a write lease (fcntl(2), F_SETLEASE), which nobody gets for a file
that others have open.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import stat
from typing import NamedTuple

_MARK = stat.S_ISVTX  # which means nothing else on a file
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class HeldFile(NamedTuple):
    """A file that is held: its path, its size (bytes), and the number of its inode.

    While it is held, no other file gets this number.
    """

    path: str
    size: int
    inode: int


def mark(fd: int) -> None:
    """Hold an open file until nobody has it open any more. Raises OSError, also if there are no leases."""
    try:
        is_written(fd)  # for its OSError; the answer matters when the file is mounted
    except OSError as error:
        reason = f"the file system has no leases ({error.strerror}); set WDSFS_CACHE_DIR to another one"
        raise OSError(error.errno, reason) from None
    mode = os.fstat(fd).st_mode
    if not mode & _MARK:
        os.fchmod(fd, stat.S_IMODE(mode) | _MARK)


def is_written(fd: int) -> bool:
    """Return True if a program has this file open for writing. Raises OSError without leases."""
    _ignore_breaks(fd)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return True
        raise
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def is_held(fd: int) -> bool:
    """Return True if a file is held by others than this descriptor, which has been opened to read.

    Raises OSError.
    """
    if not os.fstat(fd).st_mode & _MARK:
        return False
    _ignore_breaks(fd)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        # EACCES: it is another user's, and the mark is believed. Else it has no leases, and is in no mount
        # (`kernel/devices.py`).
        return error.errno in (errno.EAGAIN, errno.EACCES)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def _ignore_breaks(fd: int) -> None:
    """Make the kernel report by SIGURG, which is ignored, that somebody opens the leased file and waits.

    SIGIO, the usual signal, ends a process.
    """
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)


def is_held_at(path: str) -> bool:
    """Return True if the file at a path is held, as `is_held`; False if none can be opened there."""
    with contextlib.suppress(OSError):
        fd = os.open(path, _FLAGS)
        try:
            return is_held(fd)
        finally:
            os.close(fd)
    return False
