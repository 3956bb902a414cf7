"""The open objects of the fetcher: reads ranges from the cache or by `demand.py`, and fetches whole objects.

`fetcher.py` knows the readers, and answers clients and the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from wdsfs.door.pins import Pin
from wdsfs.door.urls import Url
from wdsfs.errors import MissingObject, ObjectChanged, UnreadableShard, WdsfsError
from wdsfs.log_lines import LoggedMessages
from wdsfs.remote.demand import PART, Demand, no_room
from wdsfs.remote.messages import STREAM, UNDIVIDED, Alarm, Read, Span
from wdsfs.remote.parts import RemoteObject, split
from wdsfs.remote.passes import WINDOW_MAX, WINDOW_MIN
from wdsfs.remote.retries import Counters

if TYPE_CHECKING:
    from wdsfs.remote.cached_object import CachedObject
    from wdsfs.remote.object_cache import ObjectCache
    from wdsfs.remote.store_reader import StoreReader

log = logging.getLogger(__name__)

FETCHES = 16  # requests at a time for a whole object
RATE = 1e9  # bytes a second that a reader takes: times the latency of a store, the first window of a pass
BEAT = 0.5  # seconds between signs of life for a client that waits for an upload, or for a whole object


class _Coming:
    """An object that is fetched whole: the cache lacks `left` bytes, and `progress` gets the number of others."""

    def __init__(self, item: RemoteObject, left: int, progress: Callable[[int], None]) -> None:
        self.left = left
        self._item, self._progress, self._reported = item, progress, 0

    def report(self, arrived: int = 0) -> None:
        """Report the bytes in the cache plus the `arrived` bytes of unfinished parts, never fewer than before."""
        self._reported = max(self._reported, self._item.pin.size - self.left + arrived)
        self._progress(self._reported)

    async def beat(self) -> None:
        """Report again and again, without an end."""
        while True:
            await asyncio.sleep(BEAT)
            self.report(min(self._item.arrived, self.left))


class OpenObjects:
    """Objects by URL and pin, each open as long as it has a user."""

    def __init__(
        self,
        stores: StoreReader,
        cache: ObjectCache | None,
        alarm: Alarm,
        memory: int,
        counters: Counters | None,
    ) -> None:
        self._counters = counters or Counters()
        self.stores, self.demand = stores, Demand(stores, memory, self._counters)
        self._cache, self._alarm = cache, alarm
        self._window = WINDOW_MAX if cache is not None else memory // 4
        self._objects: dict[tuple[Url, Pin], tuple[RemoteObject, list[object]]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._changes: dict[RemoteObject, asyncio.Task[None]] = {}
        self._logged = LoggedMessages()
        self._refusals: set[str] = set()  # the reasons that were logged why the cache cannot be used
        # The object of a pass near its end, and the next object, where the pass may continue; or nothing.
        self._going_on: tuple[RemoteObject, ...] = ()
        self._is_usual = True  # the latest pass did continue in the next object
        self.waiting = 0  # reads that are not answered yet
        self._coming = 0  # missing bytes of the objects that `fetch` brings now

    # --- objects

    def open(self, url: Url, pin: Pin, user: object) -> RemoteObject:
        """Return the object, in use by `user` until `close` is called with the same."""
        opened = self._objects.get((url, pin))
        if opened is None:
            opened = self._objects[url, pin] = RemoteObject(url, pin, self._cached(url, pin), self._window), []
        opened[1].append(user)
        return opened[0]

    def close(self, item: RemoteObject, user: object) -> None:
        _, users = self._objects[item.url, item.pin]
        users.remove(user)
        if not users:
            del self._objects[item.url, item.pin]
            self.demand.forget(item)
            if item.successor is not None:
                self.close(item.successor, item)
            task = asyncio.create_task(item.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _cached(self, url: Url, pin: Pin) -> CachedObject | None:
        if self._cache is None:
            return None
        try:
            return self._cache.open(url.shown, pin)
        except OSError as error:
            reason = os.strerror(error.errno or errno.EIO)
            if reason not in self._refusals:  # it is the same for all objects: logged once
                self._refusals.add(reason)
                log.warning("%s: remote shards are read without the cache: %s", self._cache.directory, reason)
            return None

    async def changed(self, item: RemoteObject) -> None:
        """Tell all processes that the store has another object in the place of this one."""
        task = self._changes.get(item)
        if task is None:
            task = self._changes[item] = asyncio.create_task(self._renew_pin(item.url))
            task.add_done_callback(lambda _: self._changes.pop(item, None))
        await asyncio.shield(task)

    async def _renew_pin(self, url: Url) -> None:
        try:
            pin = await self.stores.head(url)
            if self._cache is not None:
                self._cache.keep_pin(url.shown, pin)
        except (WdsfsError, OSError) as error:  # the next reader of the object gets the same error
            self.say(f"{error}")
            if self._cache is not None and isinstance(error, MissingObject):
                with contextlib.suppress(OSError):
                    self._cache.drop_pin(url.shown)
        self._alarm.ring()

    # --- reading

    async def read(
        self, item: RemoteObject, begin: int, end: int, spans: Sequence[Span] = (), *, is_file: bool = False
    ) -> list[memoryview]:
        """Return the bytes of a range, and prefetch for the pass that it may belong to. Raises ShardError."""
        if item.cached is not None and item.cached.evicted and not item.tasks:
            item.cached.close()
            item.cached, item.verified = self._cached(item.url, item.pin), False
        low, high = min([begin, *(span[0] for span in spans)]), max([end, *(span[1] for span in spans)])
        self._keep_to(item)
        ahead = item.passes.seen(low, high, high - low, is_file=is_file)
        if ahead is not None:  # later, when the read itself is queued
            asyncio.get_running_loop().call_soon(self._fetch_ahead, item, *ahead)
        return await self._read(item, begin, end, spans)

    async def _read(
        self, item: RemoteObject, begin: int, end: int, spans: Sequence[Span] = ()
    ) -> list[memoryview]:
        self.waiting += 1
        try:
            return await self.demand.read(item, begin, end, spans)
        except ObjectChanged:
            await self.changed(item)
            raise
        finally:
            self.waiting -= 1

    def note(self, item: RemoteObject, begin: int, end: int, used: int) -> None:
        """Note that a client has read this range from the cache."""
        self._keep_to(item)
        ahead = item.passes.seen(begin, end, used, is_miss=False)
        if ahead is not None:
            self._fetch_ahead(item, *ahead)

    def _keep_to(self, item: RemoteObject) -> None:
        """Note a read of this object; forget that a pass may continue in another object, if there was one."""
        item.passes.opening = max(int(RATE * self.stores.latency(item.url)), WINDOW_MIN)
        if self._going_on and item is not self._going_on[0]:
            self._is_usual = item is self._going_on[1]
            if not self._is_usual:
                self._going_on[1].passes.gone_elsewhere()
            self._going_on = ()

    def _fetch_ahead(self, item: RemoteObject, begin: int, end: int) -> None:
        """Prefetch for a pass; near the end of its object it may continue in the next one of the set."""
        if (item.url, item.pin) not in self._objects:  # closed since
            return
        self.demand.prefetch(item, begin, end)
        if end < item.pin.size or item.following is None:
            return
        if item.following in self._objects:  # open already: a set may have a shard twice
            following = self._objects[item.following][0]
        else:
            following = item.successor = self.open(*item.following, item)
        further = following.passes.go_on(item.passes, is_usual=self._is_usual)
        if further is not None:
            self._going_on = item, following
            self.demand.prefetch(following, *further)

    def will_need(self, item: RemoteObject, needed: Read) -> None:
        """Prefetch a range that a reader has announced; `needed.extra` says how."""
        is_stream = needed.extra == STREAM
        ahead = item.passes.announced(needed.begin) if is_stream else (needed.begin, needed.end)
        if ahead is not None:
            self.demand.prefetch(item, *ahead, in_parallel=needed.extra != UNDIVIDED)

    async def fetch(self, item: RemoteObject, progress: Callable[[int], None]) -> None:
        """Bring all of an object into the cache, or nothing if there is no room for it. Raises ShardError."""
        cached = item.cached
        if cached is None:
            raise UnreadableShard(f"{item.url.shown}: there is no cache to fetch it into")
        missing = cached.missing(0, item.pin.size)
        coming = _Coming(item, sum(end - begin for begin, end in missing), progress)
        turn = asyncio.Semaphore(FETCHES)

        async def bring(begin: int, end: int) -> None:
            async with turn:
                await self._read(item, begin, end)
                await self.demand.stored(item, begin, end)
            if cached.missing(begin, end):
                raise no_room(item)
            coming.left -= end - begin
            self._coming -= end - begin
            coming.report()

        coming.report()
        self._coming += coming.left
        beating = asyncio.create_task(coming.beat())
        try:
            if coming.left and not await asyncio.to_thread(cached.has_room, self._coming):
                raise no_room(item)
            async with asyncio.TaskGroup() as group:
                for span in split(missing, PART):
                    group.create_task(bring(*span))
        finally:
            beating.cancel()
            self._coming -= coming.left

    # --- what it says

    def errno_of(self, error: Exception) -> int:
        """Return the errno of an error, which is logged."""
        if isinstance(error, WdsfsError):
            self.say(f"{error}")
            return error.errno
        log.error("a request failed, the fetcher goes on", exc_info=error)
        return errno.EIO

    def say(self, text: str) -> None:
        """Log a message, but not again and again."""
        if self._logged.add(text):
            log.warning("%s", text)

    def stats(self) -> dict[str, Any]:
        """Return its state as JSON."""
        demand, waiting = self.demand, self._waiting_by_store()
        return {
            "stores": {store: {**traffic, **waiting[store]} for store, traffic in self._counters.report().items()},
            "requests": demand.requests,
            "bytes_fetched": demand.fetched,
            "in_flight": demand.in_flight,
            "queued": demand.queued,
            "memory": demand.used,
            "memory_most": demand.most,
            "waiting": self.waiting,
            "objects": len(self._objects),
            "alarms": self._alarm.count,
        }

    def _waiting_by_store(self) -> defaultdict[str, dict[str, int]]:
        """Return how many requests of each store are queued and in flight."""
        counts: defaultdict[str, dict[str, int]] = defaultdict(lambda: {"queued": 0, "in_flight": 0})
        for item, _ in self._objects.values():
            for _, _, part in item.parts:
                counts[item.url.counted_as]["queued" if part.task is None else "in_flight"] += 1
        return counts
