"""Schedules requests for ranges of objects: one request for each range, however many readers need it.

A needed range becomes *parts*; each part is one request to the store. A part has no bytes that are in the cache,
in memory or in flight already. Ranges of one reader that are close together are joined, long ones are split. Parts
wait in two queues. The *urgent* parts, which readers wait for, go first. Parts of prefetch get at most half of the
memory, and few of the requests. A part that no reader waits for any more is dropped; a part of prefetch continues
as prefetch.

Bytes go to the cache, and to the waiting readers, as they arrive. Without a cache, or if it is full, they are held
in memory for a while. One limit of memory covers bytes in flight and bytes held.

All of this runs in one event loop; code between two awaits is atomic.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from wdsfs import host
from wdsfs.errors import CacheFull, NoRanges
from wdsfs.remote.cached_object import BLOCK, CachedObject
from wdsfs.remote.held_bytes import Held
from wdsfs.remote.messages import Span
from wdsfs.remote.parts import Part, RemoteObject, joined, split
from wdsfs.remote.retries import Counters, in_thread

if TYPE_CHECKING:
    from wdsfs.remote.store_reader import StoreReader

log = logging.getLogger(__name__)

GAP = 64 << 10  # bytes between two ranges of a reader, at most: fetching these is cheaper than another request
PART, PART_MIN = 4 << 20, 1 << 20  # bytes of a request: at most, and of prefetch at least
PARALLEL = 8  # requests into which a stretch of prefetch is cut, if it is long enough
UNDIVIDED_SHARE = 12  # a range that is fetched by one request takes at most this part of the memory
REQUESTS, REQUESTS_AHEAD = 256, 16  # in flight: in all, and of prefetch
TRIES = 3  # how often bytes may vanish from the cache between their arrival and their use
HELD = 11  # fraction of the memory, in sixteenths, that may hold bytes: the rest allows for holes in the heap
GIVE_BACK_SECONDS = 2.0  # between two times that the heap gives its holes back to the system
WRITE = 1 << 20  # bytes that are written to the cache at a time when an object comes as a whole
VERIFY_SECONDS = 0.5  # after the last bytes of an object: a file that has just been changed cannot be verified
# The longest wait for another process that fetches a range, and the time between two looks.
CLAIM_SECONDS, CLAIM_LOOK_SECONDS = 60.0, 0.005


class Demand:
    """Fetches the bytes that readers need now, and that passes will need soon, within `memory` bytes."""

    def __init__(self, stores: StoreReader, memory: int, counters: Counters | None = None) -> None:
        self.memory = memory
        self._counters = counters or Counters()
        self.used_ahead = self.most = 0  # bytes in flight by prefetch; the highest value of `used` so far
        self.held = Held(memory * HELD // 16)
        self.requests = self.fetched = 0  # so far; bytes
        self._stores = stores
        self._urgent: deque[Part] = deque()
        self._ahead: deque[Part] = deque()
        self._running = self._running_ahead = 0
        self._counted = 0  # bytes of parts that are in flight, or that readers have not taken yet
        self._giving_back: asyncio.TimerHandle | None = None  # while requests are in flight
        self._full: set[str] = set()  # stores of whose objects the cache has refused some

    @property
    def used(self) -> int:
        """The bytes of memory that the limit counts."""
        return self._counted + self.held.size

    @property
    def queued(self) -> int:
        """The number of parts that wait for their turn."""
        return len(self._urgent) + len(self._ahead)

    @property
    def in_flight(self) -> int:
        """The number of requests that stores have not answered completely."""
        return self._running

    async def read(self, item: RemoteObject, begin: int, end: int, spans: Sequence[Span] = ()) -> list[memoryview]:
        """Return the bytes of a range; `spans` are other ranges that the same reader needs now or next.

        Raises what `StoreReader.fetch` raises.
        """
        for tried in range(TRIES + 1):
            if tried == TRIES:  # the cache keeps losing the bytes: read without the cache
                item.cached = None
            # From here on: others may need the memory.
            held = [(start, data) for start, _, data in item.held.overlapping(begin, end)]
            parts, is_here = self._parts_of(item, begin, end, spans), False
            try:
                for part in parts:
                    await part.arrival.reached(end)
                is_here = True
                arrived = [piece for part in parts for piece in part.arrival.pieces]
                pieces = item.assemble(begin, end, held + arrived)
            finally:
                for part in parts:
                    self._leave(part, is_here)
            if pieces is not None:
                self._count(item, end - begin, is_hit=not tried and not parts)
                return pieces
        raise no_room(item)  # an object that is fetched whole and needs the cache; others are read without one

    async def stored(self, item: RemoteObject, begin: int, end: int) -> None:
        """Wait until no part of a range is in flight, and the cache has all bytes that it accepts."""
        tasks = [part.task for _, _, part in item.parts.overlapping(begin, end) if part.task is not None]
        if tasks:
            await asyncio.wait(tasks)

    def _count(self, item: RemoteObject, size: int, is_hit: bool) -> None:
        traffic = self._counters.of(item.url.counted_as)
        traffic.reads += 1
        traffic.hits += is_hit
        traffic.used += size

    def prefetch(self, item: RemoteObject, begin: int, end: int, *, in_parallel: bool = True) -> None:
        """Fetch this range once no urgent part waits and memory is free; `in_parallel`: by several requests."""
        step = max(PART, self.memory // UNDIVIDED_SHARE // BLOCK * BLOCK)
        if in_parallel:
            step = max(PART_MIN, min(PART, (end - begin) // PARALLEL // PART_MIN * PART_MIN))
        for start, stop in split(item.lacking([item.rounded(begin, end)]), step):
            part = Part(item, start, stop, urgent=False)
            item.parts.add(start, stop, part)
            self._ahead.append(part)
        self._pump()

    def forget(self, item: RemoteObject) -> None:
        """Drop the held bytes and the parts of prefetch of an object that nobody will read."""
        for _, _, part in list(item.parts):
            if not part.users:
                self._drop(part)
        self.held.forget(item)

    def _parts_of(self, item: RemoteObject, begin: int, end: int, spans: Sequence[Span]) -> list[Part]:
        """Return the parts that fetch a range, and mark them as used; also make parts for `spans`."""
        ours = item.rounded(begin, end)
        lacking = _close_by(item, item.lacking(joined([ours, *(item.rounded(*span) for span in spans)])))
        for start, stop in split(lacking, PART):
            part = Part(item, start, stop, urgent=True)
            item.parts.add(start, stop, part)
            self._urgent.append(part)
        parts = [part for _, _, part in item.parts.overlapping(*ours)]
        for part in parts:
            part.users += 1
            if not part.urgent:
                part.urgent = True
                if part.task is None:
                    self._ahead.remove(part)
                    self._urgent.append(part)
        self._pump()
        return parts

    def _leave(self, part: Part, is_here: bool) -> None:
        """Remove a reader from a part: its bytes have arrived (`is_here`), or it no longer waits."""
        part.users -= 1
        if part.users:
            return
        if part.arrival.is_over:
            self._give_back(part)
            self._pump()
        elif not part.dropped and not is_here:
            if not part.is_prefetch:
                self._drop(part)
            elif part.task is None:
                self._urgent.remove(part)
                part.urgent = False
                self._ahead.appendleft(part)

    def _drop(self, part: Part) -> None:
        part.dropped = True
        part.item.parts.remove(part.begin)  # readers of these bytes get another part from now on
        if part.task is not None:
            part.task.cancel()
        else:
            (self._urgent if part.urgent else self._ahead).remove(part)

    # --- the budget

    def _admits(self, part: Part) -> bool:
        if self._running >= REQUESTS:
            return False
        if not part.urgent and (
            self._running_ahead >= REQUESTS_AHEAD or self.used_ahead + part.size > self.memory // 2
        ):
            return False
        self._make_room(part.size)
        return self.used + part.size <= self.memory

    def _make_room(self, size: int) -> None:
        while self.held.size and self.used + size > self.memory:
            self.held.release_oldest()

    def _give_back(self, part: Part) -> None:
        self._counted -= part.counted
        part.counted, part.arrival.pieces = 0, []

    # --- requests

    def _pump(self) -> None:
        """Start as many parts as the limits allow, urgent parts first."""
        while self._urgent and self._admits(self._urgent[0]):
            self._start(self._urgent.popleft())
        while not self._urgent and self._ahead and self._admits(self._ahead[0]):
            self._start(self._ahead.popleft())
        if self._urgent and not self._running:
            asyncio.get_running_loop().call_soon(self._unstick)

    def _unstick(self) -> None:
        """Start an urgent part although the memory is full, if no other part runs.

        Then the readers whose bytes fill the memory wait for parts themselves: other readers have released their
        bytes by now.
        """
        if self._urgent and not self._running:
            self._start(self._urgent.popleft())

    def _start(self, part: Part) -> None:
        self._running += 1
        part.counted = part.size
        self._counted += part.counted
        self.most = max(self.most, self.used)
        if not part.urgent:
            self._running_ahead += 1
            self.used_ahead += part.size
        part.task = part.item.start(self._run(part, ahead=not part.urgent))
        if self._giving_back is None:
            self._give_back_later()

    def _give_back_later(self) -> None:
        self._giving_back = asyncio.get_running_loop().call_later(GIVE_BACK_SECONDS, self._give_back_memory)

    def _give_back_memory(self) -> None:
        """Have the heap give back its free memory, if no request runs or if held bytes need the memory."""
        self._giving_back = None
        if self._running:
            self._give_back_later()
        if self.held.size or not self._running:
            host.give_back_free_memory()

    async def _run(self, part: Part, ahead: bool) -> None:
        error: Exception | None = None
        try:
            await self._fetch(part)
        except asyncio.CancelledError:
            error = ConnectionAbortedError("nobody waits for this any more")
        except Exception as failure:
            error = failure
            if not part.users:
                log.debug("prefetch: %s", failure)
        self._running -= 1
        if ahead:
            self._running_ahead -= 1
            self.used_ahead -= part.size
        if not part.dropped:
            part.item.parts.remove(part.begin)
        if error is None and not part.is_cached:
            self._counted -= part.counted  # from now on these bytes count as held
            part.counted = 0
            for begin, data in part.arrival.pieces:
                self.held.add(part.item, begin, data)
            self._make_room(0)
        part.arrival.finish(error)
        if not part.users:
            self._give_back(part)
        self._pump()
        if error is None and not part.item.parts:
            self._verify_soon(part.item)

    def _verify_soon(self, item: RemoteObject) -> None:
        """Verify an object that is complete now, so that readers need not compare its blocks."""
        cached = item.cached
        if cached is not None and not item.verified and cached.complete:
            item.verified = True
            item.start(_verify(item, cached))

    async def _fetch(self, part: Part) -> None:
        item = part.item
        if item.whole is None:
            try:
                await self._fetch_range(part)
                return
            except NoRanges:
                if item.cached is None:
                    raise
                if item.whole is None:
                    item.whole = item.start(self._bring_whole(item, item.cached))
        whole = item.whole
        try:
            await asyncio.shield(whole)
        except Exception:
            item.whole = None  # the next reader tries again
            raise
        if item.whole is whole and (item.cached is None or item.cached.missing(part.begin, part.end)):
            item.whole = None  # the cache has lost some of its bytes

    async def _bring_whole(self, item: RemoteObject, cached: CachedObject) -> None:
        """Bring an object into the cache from its first byte to its last. Raises CacheFull."""
        size = sum(end - begin for begin, end in cached.missing(0, item.pin.size))
        if not await in_thread(partial(cached.has_room, size)):
            raise no_room(item)
        rest, at = bytearray(), 0
        async for data in self._stores.get_all(item.url, item.pin):
            rest += data
            if len(rest) >= WRITE:
                size = len(rest) // BLOCK * BLOCK
                if not await in_thread(partial(cached.put, at, bytes(rest[:size]))):
                    raise no_room(item)
                at += size
                del rest[:size]
        if not await in_thread(partial(cached.put, at, bytes(rest))):
            raise no_room(item)

    async def _fetch_range(self, part: Part) -> None:
        item, cached = part.item, part.item.cached
        if cached is None:
            await self._request(part, part.begin, part.end)
            return
        claimed = await _claim(cached, part.begin, part.end)
        try:
            missing = cached.missing(part.begin, part.end)
            if not missing:  # another process has fetched the range meanwhile
                return
            await self._request(part, missing[0][0], missing[-1][1])
            if not part.is_cached and not cached.evicted:
                self._say_full(item)
        finally:
            if claimed:
                cached.release(part.begin, part.end)

    def _say_full(self, item: RemoteObject) -> None:
        """Log that the cache is full, once for each store: all shards of the store get the same error."""
        if item.url.counted_as not in self._full:
            self._full.add(item.url.counted_as)
            log.warning("%s: the cache is full; some shards are read without it", item.url.counted_as)

    async def _request(self, part: Part, begin: int, end: int) -> None:
        self.requests += 1
        part.expect(begin, end)
        try:
            await self._stores.fetch(part.item.url, part.item.pin, begin, end, part.take)
        finally:
            self.fetched += part.arrival.size
            await part.stored()


def no_room(item: RemoteObject) -> CacheFull:
    """Return the error for an object that can only be read from the cache."""
    return CacheFull(
        f"{item.url.shown}: the cache has no room for it ({item.pin.size:,} bytes): "
        "make the cache larger by --cache-size, or remove old files by `wdsfs cache --trim SIZE`"
    )


async def _verify(item: RemoteObject, cached: CachedObject) -> None:
    await asyncio.sleep(VERIFY_SECONDS)
    try:
        await in_thread(cached.verify)
    except OSError as error:  # its readers get the same error
        log.debug("%s: not verified: %s", item.url.shown, error.strerror)


def _close_by(item: RemoteObject, spans: list[Span]) -> list[Span]:
    """Return the spans, joined where they are close together and no bytes between them are in flight."""
    joins: list[Span] = []
    for begin, end in spans:
        if joins and begin - joins[-1][1] <= GAP and not item.parts.overlapping(joins[-1][1], begin):
            joins[-1] = joins[-1][0], end
        else:
            joins.append((begin, end))
    return joins


async def _claim(cached: CachedObject, begin: int, end: int) -> bool:
    """Wait until no other process fetches this range or a part; return True if this process has claimed it."""
    for _ in range(int(CLAIM_SECONDS / CLAIM_LOOK_SECONDS)):
        if cached.claim(begin, end):
            return True
        if not cached.missing(begin, end):
            return False
        await asyncio.sleep(CLAIM_LOOK_SECONDS)
    return False  # the other process hangs: fetching twice is better than waiting for it
