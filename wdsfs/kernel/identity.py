"""The identity of an image: as `build.py` writes it, and as the kernel shows it for a mount."""

from __future__ import annotations

import os

from wdsfs import host
from wdsfs.errors import MountError
from wdsfs.kernel import erofs

_SHOWN_SINCE = (6, 12)  # kernels whose statfs shows the identity of an image


def identity_of(image: str | bytes) -> str:
    """The identity of an image, in hexadecimal digits: the same for the same shards and options.

    Raises MountError, OSError.
    """
    fd = os.open(image, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = erofs.parsed_super_block(os.pread(fd, erofs.SUPER_SIZE, erofs.SUPER_OFFSET))
    finally:
        os.close(fd)
    if found is None:
        raise MountError(f"{os.fsdecode(image)}: is no image of wdsfs")
    return found.identity.hex()


def is_mounted_at(identity: str, mountpoint: str) -> bool | None:
    """If the image with this identity is mounted at this path; None where the kernel does not show that."""
    if host.kernel_version() < _SHOWN_SINCE:
        return None
    raw = bytes.fromhex(identity)
    number = int.from_bytes(raw[:8], "little") ^ int.from_bytes(raw[8:], "little")
    return os.statvfs(mountpoint).f_fsid == number
