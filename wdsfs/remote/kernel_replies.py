"""Replies of the fetcher to the kernel, on the descriptor of /dev/fuse.

Workers hand READ requests over, and this is where their answers go; the rest of the protocol is the business of
`fuse/protocol.py`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
from collections.abc import Sequence

log = logging.getLogger(__name__)

_HEADER = struct.Struct("<IiQ")  # struct fuse_out_header: length, error, unique
_RESEND = 7  # FUSE_NOTIFY_RESEND
_IS_RESENT = 1 << 63  # FUSE_UNIQUE_RESEND
# The client was interrupted or the request was handed out again and answered; the file system was unmounted.
_NOBODY_WAITS = (errno.ENOENT, errno.ENODEV)


def first_unique(unique: int) -> int:
    """The number under which a request was handed out for the first time."""
    return unique & ~_IS_RESENT


class KernelReplies:
    """Answers requests of the kernel by their numbers."""

    def __init__(self, device: int) -> None:
        self._device = device

    def data(self, unique: int, pieces: Sequence[memoryview]) -> None:
        self._write([_HEADER.pack(_HEADER.size + sum(map(len, pieces)), 0, unique), *pieces])

    def error(self, unique: int, number: int) -> None:
        self._write([_HEADER.pack(_HEADER.size, -number, unique)])

    def resend(self) -> None:
        """Have the kernel hand out again what a fetcher that died has not answered."""
        with contextlib.suppress(OSError):  # before Linux 6.9 nothing is handed over
            os.write(self._device, _HEADER.pack(_HEADER.size, _RESEND, 0))

    def _write(self, reply: Sequence[bytes | memoryview]) -> None:
        try:
            os.writev(self._device, reply)
        except OSError as error:
            if error.errno not in _NOBODY_WAITS:
                log.error("a reply was refused: %s", error.strerror)
