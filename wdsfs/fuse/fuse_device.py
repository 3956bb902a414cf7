"""The FUSE descriptor of a mount: found in pyfuse3's session, cloned for a process, and told notifications."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import struct

log = logging.getLogger(__name__)

_CLONE = 0x8004E500  # FUSE_DEV_IOC_CLONE: _IOR(229, 0, uint32_t)


def find_device() -> int:
    """Return the descriptor of pyfuse3's session. pyfuse3 has no call that returns it, so search for it."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "/dev/fuse":
                return int(name)
    raise RuntimeError("no FUSE descriptor is open")


def clone_device(device: int) -> int:
    """Return a descriptor of the same connection; the kernel accounts requests in flight to each descriptor.

    Its number is higher, so that it is released before the socket of `auto_unmount`, too
    (`mount/fuse_session.py`). Raises OSError.
    """
    opened = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(opened, _CLONE, struct.pack("<I", device))
        return fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, device)
    finally:
        os.close(opened)


def notify(device: int, note: bytes) -> bool:
    """Send a notification; returns True if the kernel accepts it."""
    try:
        os.write(device, note)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            log.debug("a notification was refused: %s", error)
        return False
    return True
