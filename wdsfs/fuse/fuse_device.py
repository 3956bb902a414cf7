"""The FUSE descriptor of a mount: found in pyfuse3's session, cloned, notified; and the loop that answers at it.

A worker polls the descriptor for a short time, because a client that reads file after file sends the next request
within microseconds; then it sleeps in the kernel. Several workers share one descriptor, and the kernel wakes one
of them for each request. No state is kept between two requests: a worker may be killed at any time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import select
import struct
import time
from collections.abc import Callable

from wdsfs.fuse import protocol
from wdsfs.fuse.protocol import Request

log = logging.getLogger(__name__)

_CLONE = 0x8004E500  # FUSE_DEV_IOC_CLONE: _IOR(229, 0, uint32_t)
SPIN_SECONDS = 50e-6
MISSES_MAX = 16  # polls in a row without a request, after which only one request in this many is polled for

# Errors of a reply: the client was interrupted, or another worker has answered the request, which the kernel
# handed out again under another number; or the mount is gone.
_NOBODY_WAITS = (errno.ENOENT, errno.ENODEV)
# Errors of a receive: the request was interrupted before it was received, or a signal came.
_TRY_AGAIN = (errno.ENOENT, errno.EINTR, errno.EAGAIN)

# A body, an errno, or None for a request that wants no reply.
Reply = bytes | memoryview | int | None
Handler = Callable[[Request], Reply]


def find_device() -> int:
    """Search for the descriptor of pyfuse3's session, because no call of pyfuse3 returns it."""
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


# --- the loop of a worker


def answer_requests(
    device: int,
    handler: Handler,
    stop: Callable[[], object],
    after_reply: Callable[[], None] = lambda: None,
    spin: float = SPIN_SECONDS,
    wait: float | None = None,
    room: int = protocol.REQUEST_MIN,
) -> bool:
    """Answer requests. Return True when `stop` returns True, False when the file system was unmounted.

    `stop` is called before each request, and, when `wait` is given, after that many seconds without one.
    `after_reply` is called when the reply to a request has been sent. `spin` is how long (s) to poll for the next
    request before sleeping; `room` is the size of the largest request (bytes). Raises OSError when the descriptor
    cannot be used.
    """
    poll = select.poll()
    poll.register(device, select.POLLIN)
    wait_for = _patient(poll, stop, wait) if wait is not None else _eager(poll, spin)
    # The pages are written (not zeros), so that they exist from the start: if the kernel had to allocate one for a
    # process that is being killed, it would fail the request instead of sending it again.
    buffer = bytearray(b"-" * room)
    buffers, received = (buffer,), memoryview(buffer)
    while not stop():
        if not wait_for():
            return True
        try:
            size = os.readv(device, buffers)
        except OSError as error:
            if error.errno in _TRY_AGAIN:
                continue
            if error.errno == errno.ENODEV:  # unmounted
                return False
            raise
        request = Request(received[:size])
        reply = handler(request)
        if reply is not None:
            _send(device, request.unique, reply)
        after_reply()
    return True


def _eager(poll: select.poll, spin: float) -> Callable[[], bool]:
    """Return a function that polls up to `spin` seconds for a request, before an unlimited wait."""
    give_way = os.sched_yield  # the client that was just answered may be waiting for this processor
    look, now, spin_ns = poll.poll, time.perf_counter_ns, int(spin * 1e9)
    missed = 0  # polls in a row that found no request

    def wait() -> bool:
        nonlocal missed
        if not spin_ns or look(0):
            return True
        # Clients are slower, or need this processor: poll only from time to time.
        if missed >= MISSES_MAX and missed % MISSES_MAX:
            missed += 1
            return True
        end = now() + spin_ns
        while now() < end:
            give_way()
            if look(0):
                missed = 0
                return True
        missed += 1
        return True

    return wait


def _patient(poll: select.poll, stop: Callable[[], object], seconds: float) -> Callable[[], bool]:
    """Return a function that waits for a request (True), or until `stop` returns True (False).

    It calls `stop` once every `seconds`.
    """

    def wait() -> bool:
        while not poll.poll(seconds * 1000):
            if stop():
                return False
        return True

    return wait


def _send(device: int, unique: int, reply: bytes | memoryview | int) -> None:
    try:
        if isinstance(reply, int):
            os.write(device, protocol.header(unique, 0, reply))
        else:
            os.writev(device, (protocol.header(unique, len(reply)), reply))
    except OSError as error:
        if error.errno in _NOBODY_WAITS:
            return
        log.error("the kernel has refused a reply: %s", error.strerror)
        raise
