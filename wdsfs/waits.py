"""Waits of a request of the kernel for servers and for other processes: they end when its client is ending.

A program that waits for an answer of a mount dies only when it has that answer. The kernel's INTERRUPT does not
help: it comes once, also for signals that end no program. Any process of the mount may receive it, or none while
all of them wait. So the waiting process checks several times a second whether a signal that ends the client is
pending. For a client that cannot be seen (in a process namespace above ours) the wait goes on to its own end.
"""

from __future__ import annotations

import fcntl
import re
import signal
import time
from collections.abc import Callable

from wdsfs.errors import Interrupted

LOOK_SECONDS = 0.2  # how often a wait looks
LOCK_SECONDS = 0.02  # how often a lock is tried that another process has

client = 0  # the thread whose request this process is at; 0 without one
begins: Callable[[], None] | None = None  # called at each look during a request

_SIGNALS = re.compile(rb"^(SigPnd|ShdPnd|SigBlk):\t([0-9a-f]+)$", re.MULTILINE)
# A signal that ends a program by default appears as SIGKILL. The others end programs that handle them, or dump
# memory.
_ENDS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT)
_ENDING = sum(1 << number - 1 for number in _ENDS)


def is_ending(thread: int) -> bool:
    """Return True if a signal that ends a thread is pending."""
    try:
        with open(f"/proc/{thread}/status", "rb") as file:
            masks = {name: int(mask, 16) for name, mask in _SIGNALS.findall(file.read())}
    except OSError:
        return False
    pending = masks.get(b"SigPnd", 0) | masks.get(b"ShdPnd", 0)
    return bool(pending & ~masks.get(b"SigBlk", 0) & _ENDING)


def look() -> None:
    """Raise Interrupted if the client of the request that this process is at is ending."""
    if client:
        if begins is not None:
            begins()
        if is_ending(client):
            raise Interrupted("the client is ending")


def lock(fd: int, how: int) -> None:
    """Lock a file as flock(2), waiting for other processes. Raises OSError, Interrupted."""
    while client:
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            look()
            time.sleep(LOCK_SECONDS)
    fcntl.flock(fd, how)
