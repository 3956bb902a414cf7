"""Reads of the kernel that workers hand over to the fetcher, which answers them on the kernel's own descriptor.

The kernel may send a request again, under a marked number, when a worker or a fetcher has died: it is answered
once. A request during which five fetchers have died gets EIO.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import struct
from collections.abc import Sequence

from wdsfs import waits
from wdsfs.remote.launcher import Alarm
from wdsfs.remote.messages import HandOver
from wdsfs.remote.open_objects import OpenObjects
from wdsfs.remote.parts import RemoteObject

log = logging.getLogger(__name__)

INTERRUPTED_MAX = 1024  # requests remembered that were interrupted before they were handed over
LOOKED_AT_MAX = 64  # clients that wait, at a time
DEATHS_MAX = 5  # of fetchers during attempts at the same request
_DEATHS = 1 << 8  # more than are ever counted
_REPLY_HEAD = struct.Struct("<IiQ")  # struct fuse_out_header: length, error, unique
_RESEND = 7  # FUSE_NOTIFY_RESEND
_IS_RESENT = 1 << 63  # FUSE_UNIQUE_RESEND
# The client was interrupted or the request was handed out again and answered; the file system was unmounted.
_NOBODY_WAITS = (errno.ENOENT, errno.ENODEV)


class KernelReplies:
    """Answers requests of the kernel by their numbers."""

    def __init__(self, device: int) -> None:
        self._device = device

    def data(self, unique: int, pieces: Sequence[memoryview]) -> None:
        self._write([_REPLY_HEAD.pack(_REPLY_HEAD.size + sum(map(len, pieces)), 0, unique), *pieces])

    def error(self, unique: int, number: int) -> None:
        self._write([_REPLY_HEAD.pack(_REPLY_HEAD.size, -number, unique)])

    def resend(self) -> None:
        """Make the kernel send again the requests that a dead fetcher has not answered."""
        with contextlib.suppress(OSError):  # before Linux 6.9 nothing is handed over
            os.write(self._device, _REPLY_HEAD.pack(_REPLY_HEAD.size, _RESEND, 0))

    def _write(self, reply: Sequence[bytes | memoryview]) -> None:
        try:
            os.writev(self._device, reply)
        except OSError as error:
            if error.errno not in _NOBODY_WAITS:
                log.error("a reply was refused: %s", error.strerror)


class FatalRequests:
    """Notes, in memory that outlives a fetcher, of the requests during which fetchers have died.

    So no request can kill one fetcher after the other. The memory holds the number of the present fetcher, then
    slots of two words: the number of a request that is under way; which fetcher began it, and how many had died
    before. If two requests share a slot, the count begins again.
    """

    def __init__(self, words: memoryview[int]) -> None:
        words[0] += 1
        self._fetcher, self._slots = words[0], words[1:]

    def begin(self, request: int) -> int:
        """Note that a request is under way; return during how many attempts at it a fetcher has died."""
        at, deaths = self._place(request), 0
        if self._slots[at] == request:
            fetcher, deaths = divmod(self._slots[at + 1], _DEATHS)
            deaths += fetcher != self._fetcher
        self._slots[at], self._slots[at + 1] = request, self._fetcher * _DEATHS + deaths
        return deaths

    def end(self, request: int) -> None:
        """Note that a request was answered."""
        at = self._place(request)
        if self._slots[at] == request:
            self._slots[at] = 0

    def _place(self, request: int) -> int:
        return request // 2 % (len(self._slots) // 2) * 2  # the kernel numbers by twos


class KernelReads:
    """The reads of the kernel that were handed over, answered from open objects; `replies` go to the kernel."""

    def __init__(self, opened: OpenObjects, replies: KernelReplies | None, alarm: Alarm) -> None:
        self._opened, self._replies = opened, replies
        self._fatal = FatalRequests(alarm.left)
        # By first number: the last number, the work, the thread that waits for it.
        self._handed: dict[int, tuple[int, asyncio.Task[None], int]] = {}
        self._looked_at: set[int] = set()  # the requests of the last look at clients
        self._look: asyncio.TimerHandle | None = None  # the next look; None while nothing is handed over
        self._interrupted: dict[int, None] = {}  # a set of first numbers, the oldest first

    @property
    def count(self) -> int:
        """The number of reads that are not answered yet."""
        return len(self._handed)

    def hand_over(self, item: RemoteObject, request: HandOver) -> None:
        """Answer a READ of the kernel from this object."""
        first = _first_unique(request.unique)
        before = self._handed.get(first)
        # Sent again: the kernel has forgotten the old number, even if a request with it arrives later, from a
        # worker that had received it before.
        if before is not None and before[0] != request.unique == first:
            return
        self._begin_reply(first, item, request)
        if before is not None:
            # Only after the new work uses the parts of the old one: parts without a user are dropped.
            asyncio.get_running_loop().call_soon(before[1].cancel)

    def _begin_reply(self, first: int, item: RemoteObject, request: HandOver) -> None:
        if first in self._interrupted:
            del self._interrupted[first]
            self._reply_error(request.unique, errno.EINTR)
            return
        if self._fatal.begin(first) > DEATHS_MAX:
            self._fatal.end(first)
            log.error("%s", _fatal_text(item, request))
            self._reply_error(request.unique, errno.EIO)
            return
        task = asyncio.create_task(self._reply(item, request))
        self._handed[first] = request.unique, task, request.client
        self._look_later()
        self._opened.open(item.url, item.pin, task)
        task.add_done_callback(lambda done: self._end_reply(first, item, done))

    def _end_reply(self, first: int, item: RemoteObject, task: asyncio.Task[None]) -> None:
        if first in self._handed and self._handed[first][1] is task:
            del self._handed[first]
            self._fatal.end(first)
        self._opened.close(item, task)

    def interrupt(self, unique: int) -> None:
        """Note that the client of a request no longer waits for its answer."""
        first = _first_unique(unique)
        handed = self._handed.get(first)
        if handed is not None:
            handed[1].cancel()
            self._reply_error(handed[0], errno.EINTR)  # not by the task, which may not have begun
            return
        # Another worker is about to hand the request over, or it is answered.
        self._interrupted[first] = None
        if len(self._interrupted) > INTERRUPTED_MAX:
            del self._interrupted[next(iter(self._interrupted))]

    def _look_later(self) -> None:
        if self._look is None and self._handed:
            self._look = asyncio.get_running_loop().call_later(waits.LOOK_SECONDS, self._look_at_clients)

    def _look_at_clients(self) -> None:
        """Release clients that are being killed and have waited since the last look.

        Their INTERRUPT may not arrive, because all workers wait themselves.
        """
        oldest = list(itertools.islice(self._handed, LOOKED_AT_MAX))
        for first in oldest:
            if first in self._looked_at and waits.is_ending(self._handed[first][2]):
                self.interrupt(first)
        self._looked_at, self._look = set(oldest), None
        self._look_later()

    async def _reply(self, item: RemoteObject, request: HandOver) -> None:
        try:
            pieces = await self._opened.read(item, request.begin, request.end, request.spans)
        except Exception as error:
            self._reply_error(request.unique, self._opened.errno_of(error))
        else:
            if self._replies is not None:
                self._replies.data(request.unique, pieces)

    def _reply_error(self, unique: int, number: int) -> None:
        if self._replies is not None:
            self._replies.error(unique, number)


def _first_unique(unique: int) -> int:
    """Return the number under which the kernel sent a request for the first time."""
    return unique & ~_IS_RESENT


def _fatal_text(item: RemoteObject, request: HandOver) -> str:
    return (
        f"{item.url.shown}: bytes {request.begin:,} to {request.end:,} are not read: the process that fetches has "
        f"died {DEATHS_MAX + 1} times at it"
    )
