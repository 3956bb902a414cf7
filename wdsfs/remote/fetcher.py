"""The fetcher: the one process of a mount or command that speaks to the network.

A process that has used the library for object stores must not fork, so the fetcher is a fresh interpreter that
never forks. Clients send frames on a Unix socket (`messages.py`). Workers hand READ requests of the kernel over,
and the fetcher answers them on the kernel's own descriptor. A fetcher has no state that its successor cannot get
again. When a fetcher dies, a client starts a new one (`client.py`), and clients and kernel repeat all unanswered
requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import signal
import socket
import struct
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wdsfs import host, waits
from wdsfs.door.pins import Pin
from wdsfs.door.urls import Url
from wdsfs.errors import WdsfsError
from wdsfs.log_lines import TerminalFormatter
from wdsfs.remote import messages
from wdsfs.remote.messages import WAITING, Alarm, Configuration, Frame, HandOver, configuration_in, hold, peer_user
from wdsfs.remote.open_objects import BEAT, OpenObjects
from wdsfs.remote.parts import RemoteObject
from wdsfs.remote.retries import Counters

if TYPE_CHECKING:
    from wdsfs.remote.object_cache import ObjectCache
    from wdsfs.remote.store_reader import StoreReader
    from wdsfs.remote.store_sender import StoreSender


INTERRUPTED_MAX = 1024  # remembered requests that were interrupted before a worker handed them over
LOOKED_AT_MAX = 64  # clients that one look checks
DEATHS_MAX = 5  # of fetchers during attempts at the same request
_DEATHS = 1 << 8  # a factor, larger than any count of deaths
_REPLY_HEAD = struct.Struct("<IiQ")  # struct fuse_out_header: length, error, unique
_RESEND = 7  # FUSE_NOTIFY_RESEND
_IS_RESENT = 1 << 63  # FUSE_UNIQUE_RESEND
# The client was interrupted, or the request was sent again and answered; the file system was unmounted.
_NOBODY_WAITS = (errno.ENOENT, errno.ENODEV)

log = logging.getLogger(__name__)

HEAP_KEPT = 32 << 20  # bytes: the size from which on memory gets a mapping, and free bytes at the end of the heap


class KernelReplies:
    """Answers requests of the kernel by their numbers."""

    def __init__(self, device: int) -> None:
        self._device = device

    def data(self, unique: int, pieces: Sequence[memoryview]) -> None:
        self._write([_REPLY_HEAD.pack(_REPLY_HEAD.size + sum(map(len, pieces)), 0, unique), *pieces])

    def error(self, unique: int, number: int) -> None:
        self._write([_REPLY_HEAD.pack(_REPLY_HEAD.size, -number, unique)])

    def resend(self) -> None:
        """Have the kernel send the requests again that a dead fetcher has not answered."""
        with contextlib.suppress(OSError):  # before Linux 6.9 nothing is handed over
            os.write(self._device, _REPLY_HEAD.pack(_REPLY_HEAD.size, _RESEND, 0))

    def _write(self, reply: Sequence[bytes | memoryview]) -> None:
        try:
            os.writev(self._device, reply)
        except OSError as error:
            if error.errno not in _NOBODY_WAITS:
                log.error("a reply was refused: %s", error.strerror)


class FatalRequests:
    """Counts the fetchers that have died at each request, in memory that outlives a fetcher.

    So no request can kill one fetcher after the other. The memory has the number of the current fetcher, then
    slots of two words. The first word is the number of a request that is under way. The second word is the number
    of the fetcher that began the request, together with the number of earlier deaths. If two requests share a
    slot, the count starts again.
    """

    def __init__(self, words: memoryview[int]) -> None:
        words[0] += 1
        self._fetcher, self._slots = words[0], words[1:]

    def begin(self, request: int) -> int:
        """Note that a request is under way; return how many fetchers have died at it."""
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
        return request // 2 % (len(self._slots) // 2) * 2  # the kernel gives even numbers only


class KernelReads:
    """Answers the reads of the kernel that workers have handed over, from open objects, by `replies`."""

    def __init__(self, opened: OpenObjects, replies: KernelReplies, alarm: Alarm) -> None:
        self._opened, self._replies = opened, replies
        self._fatal = FatalRequests(alarm.left)
        # By the first number of a request: its latest number, its task, the thread that waits for the answer.
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
        # The kernel has sent the request again and has forgotten the old number. A worker that received the
        # request before may still hand it over with the old number.
        if before is not None and before[0] != request.unique == first:
            return
        self._begin_reply(first, item, request)
        if before is not None:
            # Cancel the old task later, when the new task uses its parts: parts without a user are dropped.
            asyncio.get_running_loop().call_soon(before[1].cancel)

    def _begin_reply(self, first: int, item: RemoteObject, request: HandOver) -> None:
        if first in self._interrupted:
            del self._interrupted[first]
            self._replies.error(request.unique, errno.EINTR)
            return
        if self._fatal.begin(first) > DEATHS_MAX:
            self._fatal.end(first)
            log.error("%s", _fatal_text(item, request))
            self._replies.error(request.unique, errno.EIO)
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
            self._replies.error(handed[0], errno.EINTR)  # not by the task: a task may not have begun
            return
        # Another worker is about to hand the request over, or the request is answered already.
        self._interrupted[first] = None
        if len(self._interrupted) > INTERRUPTED_MAX:
            del self._interrupted[next(iter(self._interrupted))]

    def _look_later(self) -> None:
        if self._look is None and self._handed:
            self._look = asyncio.get_running_loop().call_later(waits.LOOK_SECONDS, self._look_at_clients)

    def _look_at_clients(self) -> None:
        """Interrupt the requests of clients that are being killed, if they have waited since the last look.

        Their INTERRUPT may not arrive, because all workers may be waiting themselves.
        """
        oldest = list(itertools.islice(self._handed, LOOKED_AT_MAX))
        for first in oldest:
            if first in self._looked_at and waits.is_ending(self._handed[first][2]):
                self.interrupt(first)
        self._looked_at, self._look = set(oldest), None
        self._look_later()

    async def _reply(self, item: RemoteObject, request: HandOver) -> None:
        try:
            pieces = await self._opened.read(item, request.begin, request.end, request.spans, is_file=True)
        except Exception as error:
            self._replies.error(request.unique, self._opened.errno_of(error))
        else:
            self._replies.data(request.unique, pieces)


def _first_unique(unique: int) -> int:
    """Return the number under which the kernel sent a request for the first time."""
    return unique & ~_IS_RESENT


def _fatal_text(item: RemoteObject, request: HandOver) -> str:
    return (
        f"{item.url.shown}: bytes {request.begin:,} to {request.end:,} are not read: the process that fetches has "
        f"died {DEATHS_MAX + 1} times at it"
    )


class ClientConnection(asyncio.Protocol):
    """A client: its objects, and the requests that it waits for."""

    transport: asyncio.Transport

    def __init__(self, opened: OpenObjects, kernel: KernelReads, sender: StoreSender | None, user: int) -> None:
        self._opened, self._kernel, self._sender, self._user = opened, kernel, sender, user
        self._received = bytearray()
        self._objects: dict[int, RemoteObject] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        user = peer_user(transport.get_extra_info("socket"))
        if user != self._user:
            self._opened.say(f"user {user} has connected to the fetcher, and is not served")
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._received += data
        try:
            for frame in messages.frames_of(self._received):
                self._take(frame)
        except (ValueError, KeyError):  # the client was killed while it wrote: the rest of a frame is missing
            log.exception("a client is not understood")
            self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        for task in self._tasks:
            if not task.cancelling():  # a cancelled task may be about to abort an upload
                task.cancel()
        for item in self._objects.values():
            self._opened.close(item, self)
        self._objects.clear()

    def _take(self, frame: Frame) -> None:
        opened = self._opened
        match frame.kind:
            case messages.HAND_OVER:
                request = messages.hand_over_of(frame.body)
                self._kernel.hand_over(self._objects[request.object], request)
            case messages.INTERRUPT:
                self._kernel.interrupt(frame.value)
            case messages.NOTE:
                noted = messages.range_of(frame.body)
                opened.note(self._objects[noted.object], noted.begin, noted.end, noted.extra)
            case messages.WILL_NEED:
                needed = messages.range_of(frame.body)
                opened.will_need(self._objects[needed.object], needed)
            case messages.OPEN:
                number, url, pin, following = frame.value
                item = self._objects[number] = opened.open(Url(*url), Pin(*pin), self)
                if following is not None:
                    item.following = Url(*following[0]), Pin(*following[1])
            case messages.CLOSE:
                opened.close(self._objects.pop(frame.value), self)
            case messages.READ:
                read = messages.range_of(frame.body)
                item = self._objects[read.object]
                self._start(frame, self._read(frame.number, read, item), item)
            case messages.FETCH:
                item = self._objects[frame.value]
                self._start(frame, self._fetch(frame, item), item)
            case _:
                works = {messages.UPLOAD: self._upload, messages.COPY: self._copy}
                self._start(frame, works.get(frame.kind, self._tell)(frame))

    def _start(self, frame: Frame, work: Coroutine[Any, Any, None], item: RemoteObject | None = None) -> None:
        """Start a task for the work; `item` stays open until its end, even if the client closes the object."""
        task = asyncio.create_task(self._answered(frame, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if item is not None:
            self._opened.open(item.url, item.pin, task)
            task.add_done_callback(lambda done: self._opened.close(item, done))

    async def _answered(self, frame: Frame, work: Coroutine[Any, Any, None]) -> None:
        """Do the work; answer with an error if it raises one."""
        try:
            await work
        except Exception as error:
            if isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            if not isinstance(error, WdsfsError):
                log.error("a request failed, the fetcher goes on", exc_info=error)
            self.transport.write(messages.text(messages.FAILURE, frame.number, messages.failure(error)))

    async def _read(self, number: int, request: messages.Read, item: RemoteObject) -> None:
        pieces = await self._opened.read(item, request.begin, request.end)
        if request.extra and item.is_stored(request.begin, request.end):
            self.transport.write(messages.frame(messages.CACHED, number))
            return
        self.transport.write(messages.head(messages.DATA, number, sum(map(len, pieces))))
        self.transport.writelines(pieces)

    async def _fetch(self, frame: Frame, item: RemoteObject) -> None:
        def progress(size: int) -> None:
            self.transport.write(messages.text(messages.PROGRESS, frame.number, size))

        await self._opened.fetch(item, progress)
        self.transport.write(messages.text(messages.RESULT, frame.number, item.pin.size))

    async def _upload(self, frame: Frame) -> None:
        url, file, replaces = frame.value
        pinned = None if replaces is None else Pin(*replaces)
        assert self._sender is not None
        await self._answer_with_pin(frame, self._sender.upload(Url(*url), file, pinned))

    async def _copy(self, frame: Frame) -> None:
        url, pin, target = frame.value
        assert self._sender is not None
        await self._answer_with_pin(frame, self._sender.copy(Url(*url), Pin(*pin), Url(*target)))

    async def _answer_with_pin(self, frame: Frame, work: Coroutine[Any, Any, Pin]) -> None:
        """Answer with the pin of the object that the work makes."""
        beating = asyncio.create_task(self._beat(frame))
        try:
            pin = await work
        finally:
            beating.cancel()
        self.transport.write(messages.text(messages.RESULT, frame.number, pin))

    async def _beat(self, frame: Frame) -> None:
        """Send a sign of life from time to time: at each one the client may stop the work."""
        while True:
            self.transport.write(messages.text(messages.PROGRESS, frame.number, 0))
            await asyncio.sleep(BEAT)

    async def _tell(self, frame: Frame) -> None:
        value, stores = frame.value, self._opened.stores
        result: Any
        match frame.kind:
            case messages.HEAD:
                urls = [Url(*url) for url in value]
                result = list(
                    map(messages.outcome, await asyncio.gather(*map(stores.head, urls), return_exceptions=True))
                )
            case messages.LIST:
                result = await stores.list(Url(*value[0]), deep=value[1])
            case messages.DESCRIBE:
                result = await stores.describe(Url(*value))
            case messages.STATS:
                result = {**self._opened.stats(), "handed_over": self._kernel.count}
            case _:
                raise ValueError(f"there is no request {frame.kind}")
        self.transport.write(messages.text(messages.RESULT, frame.number, result))


def main(descriptor: int) -> None:
    """Serve until no process can send requests any more. `descriptor` is the file with the configuration."""
    configuration = start(descriptor)
    if configuration is None:
        return
    # Imported here, because everything else works, and is tested, without the libraries for stores and cache.
    from wdsfs.remote.object_cache import ObjectCache
    from wdsfs.remote.settings import Settings
    from wdsfs.remote.store_reader import StoreReader
    from wdsfs.remote.store_requests import StoreRequests
    from wdsfs.remote.store_sender import StoreSender

    counters = Counters()
    cache = None
    if configuration.cache is not None:
        directory, limit = configuration.cache
        cache = ObjectCache(Path(directory), limit)
        if configuration.device is not None and limit is not None:  # of a mount: perhaps lower than the last limit
            threading.Thread(target=_trim, args=(cache, limit), daemon=True).start()

    async def serve_stores() -> None:
        settings = Settings([(prefix, options) for prefix, options in configuration.settings])
        requests = StoreRequests(settings, counters)
        reader = StoreReader(requests, cache)
        preparing = [requests.prepare(Url(*first)) for first in [configuration.first] if first]
        serving = serve(configuration, reader, cache, counters, StoreSender(requests, reader))
        await asyncio.gather(serving, *preparing)

    asyncio.run(serve_stores())


def _trim(cache: ObjectCache, limit: int) -> None:
    try:
        cache.room.trim(limit)
    except OSError as error:
        log.warning("the cache could not be trimmed: %s", error.strerror)


def start(descriptor: int) -> Configuration | None:
    """Become the fetcher of this configuration, and return it; None if there is a fetcher already."""
    if not hold(descriptor):
        return None
    configuration = configuration_in(descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the fetcher ends after its clients
    host.raise_file_limit()  # for the objects of all clients
    # Threads share one heap, so memory that one thread has freed serves the others. Parts come from the heap, too:
    # the kernel would zero a mapping for each part, page by page.
    host.map_large_blocks(HEAP_KEPT, HEAP_KEPT, is_shared=True)
    _log_to(configuration.log)
    return configuration


async def serve(
    configuration: Configuration,
    reader: StoreReader,
    cache: ObjectCache | None,
    counters: Counters | None = None,
    sender: StoreSender | None = None,
) -> None:
    """Serve clients and the kernel; end the process when no other process is left that could send requests."""
    # Without a device nothing is handed over, so there is nothing to answer.
    replies = KernelReplies(-1 if configuration.device is None else configuration.device)
    alarm = Alarm(configuration.alarm)
    opened = OpenObjects(reader, cache, alarm, configuration.memory, counters)
    kernel = KernelReads(opened, replies, alarm)
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(configuration.life, ended.set)
    listener = socket.socket(fileno=configuration.listener)
    await loop.create_unix_server(
        lambda: ClientConnection(opened, kernel, sender, configuration.user), sock=listener, backlog=WAITING
    )
    if configuration.has_predecessor and configuration.device is not None:
        replies.resend()  # requests for the first fetcher wait in its connections
    await ended.wait()
    reader.end()
    if sender is not None:
        await sender.end()
    logging.shutdown()
    os._exit(0)  # no client waits for the requests that are under way


def _log_to(path: str | None) -> None:
    fd = 2 if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    stream = os.fdopen(fd, "a", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    handler = logging.StreamHandler(stream)
    plain, full = "wdsfs: %(word)s: %(message)s", "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"
    handler.addFilter(_named_level)
    handler.setFormatter(TerminalFormatter(plain if path is None else full))
    logging.getLogger().addHandler(handler)


def _named_level(record: logging.LogRecord) -> bool:
    """Give a record the word for its level, as the command writes it."""
    record.word = record.levelname.lower()
    return True
