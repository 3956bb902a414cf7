"""A worker's loop: receives requests from the FUSE descriptor and answers them, one at a time.

A short look whether the next request is there already (a client that reads file after file is back within
microseconds), as long as looking helps, then asleep in the kernel. Several workers share one descriptor and
the kernel wakes one of them for each request. Nothing is remembered between two requests: a worker may be
killed at any time.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import time
from collections.abc import Callable

from wdsfs.fuse import protocol

log = logging.getLogger(__name__)

SPIN_SECONDS = 50e-6
VAIN = 16  # looks in vain after which only every so many requests are looked for

# What answering may meet: the client was interrupted, or the request was handed out again under another number and
# somebody else has answered it.
_NOBODY_WAITS = (errno.ENOENT,)
# What receiving may meet: a request that was interrupted before it was received, a signal.
_TRY_AGAIN = (errno.ENOENT, errno.EINTR, errno.EAGAIN)

# A request as the kernel has written it; the answer behind its header, an errno, or None where none is wanted.
Answer = bytes | bytearray | memoryview | int | None
Handler = Callable[[bytes], Answer]


def serve(
    device: int,
    handler: Handler,
    stop: Callable[[], bool],
    spin: float = SPIN_SECONDS,
    wait: float | None = None,
    room: int = protocol.REQUEST_MIN,
) -> None:
    """Answer requests until the file system is unmounted or `stop` returns True.

    `stop` is called before each request, and, when `wait` is given, after that many seconds without one.
    `spin` is how long (s) to look for the next request before sleeping; `room` what a request may take (bytes).
    Raises OSError when the descriptor cannot be used.
    """
    poll = select.poll()
    poll.register(device, select.POLLIN)
    wait_for = _patient(poll, stop, wait) if wait is not None else _eager(poll, spin)
    # Memory that is there already: where the kernel has to find some for a process that is being killed, it gives
    # up and fails the request, which then is not handed out again.
    buffer = bytearray(b"-" * room)
    received = memoryview(buffer)
    while not stop():
        if not wait_for():
            return
        try:
            message = bytes(received[: os.readv(device, [buffer])])
        except OSError as error:
            if error.errno in _TRY_AGAIN:
                continue
            if error.errno == errno.ENODEV:  # unmounted
                return
            raise
        answer = handler(message)
        if answer is not None:
            _send(device, protocol.unique_of(message), answer)


def _eager(poll: select.poll, spin: float) -> Callable[[], bool]:
    """Returns a function that looks for a request for `spin` seconds; the receive itself waits for longer."""
    give_way = os.sched_yield  # the client that was just answered may be waiting for this very processor
    look, now, spin_ns = poll.poll, time.perf_counter_ns, int(spin * 1e9)
    missed = 0  # looks in a row that were in vain

    def wait() -> bool:
        nonlocal missed
        if look(0) or not spin_ns:
            return True
        # Clients that think for longer, or that need this processor to think: only a try from time to time.
        if missed >= VAIN and missed % VAIN:
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


def _patient(poll: select.poll, stop: Callable[[], bool], seconds: float) -> Callable[[], bool]:
    """Returns a function that waits for a request and asks `stop` from time to time; False if that said so."""

    def wait() -> bool:
        while not poll.poll(seconds * 1000):
            if stop():
                return False
        return True

    return wait


def _send(device: int, unique: int, answer: bytes | bytearray | memoryview | int) -> None:
    try:
        if isinstance(answer, int):
            os.write(device, protocol.header(unique, 0, answer))
        else:
            os.writev(device, (protocol.header(unique, len(answer)), answer))
    except OSError as error:
        if error.errno in _NOBODY_WAITS or error.errno == errno.ENODEV:
            return
        log.error("an answer was refused: %s", error.strerror)
        raise
