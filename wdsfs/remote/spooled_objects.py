"""Objects of servers that give neither ETag nor Last-Modified: each is fetched whole, by one request.

Of two answers of such a server nobody can say that they are of the same object. So one answer goes into the cache
from its first byte to its last, and the sum of its bytes is the ETag of the pin. What was evicted is fetched whole
again; other bytes than before are then another object. Before that, one of the same size is not noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from io import BufferedIOBase

from wdsfs.errors import ObjectChanged, Unreachable, UnreadableShard
from wdsfs.remote.demand import Store
from wdsfs.remote.object_cache import ObjectCache
from wdsfs.remote.parts import Buffer
from wdsfs.remote.spool import keep, spool
from wdsfs.remote.urls import SPOOLED, Pin, Url

ATTEMPTS = 3  # answers that are cut: what has come of one is of no use for another
AT_ONCE = 8  # objects that are fetched


class SpooledObjects:
    """Such objects of `stores`, in `cache`."""

    def __init__(self, stores: Store, cache: ObjectCache | None) -> None:
        self._stores, self._cache = stores, cache
        self._turns: defaultdict[Url, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._places = asyncio.Semaphore(AT_ONCE)

    async def pin(self, url: Url, found: Pin) -> Pin:
        """The pin of an object, of which its server says that it is `found`. Raises ShardError."""
        cache = self._needed_cache(url)
        async with self._turns[url]:
            known = cache.pin_of(url.shown)
            if known is not None and known[0].is_spooled and known[0].size == found.size:
                with contextlib.suppress(OSError), contextlib.closing(cache.open(url.shown, known[0])) as cached:
                    if cached.complete:
                        return known[0]
            return await self._fetch(cache, url, found)

    async def read(self, url: Url, pin: Pin, begin: int, end: int) -> bytes:
        """Bytes `begin` to `end` (not included) of the pinned object. Raises ShardError."""
        cache = self._needed_cache(url)
        async with self._turns[url]:
            with contextlib.closing(cache.open(url.shown, pin)) as cached:
                data = cached.read(end - begin, begin)
                if data is None:
                    now = await self._fetch(cache, url, Pin(pin.size, 0, "", ""))
                    if now != pin:
                        cache.keep_pin(url.shown, now)
                        raise ObjectChanged(f"{url}: it has been replaced: other bytes come than before")
                    data = cached.read(end - begin, begin)
        if data is None:
            raise UnreadableShard(f"{url}: does not stay in the cache: --cache-size gives it more room")
        return data

    async def _fetch(self, cache: ObjectCache, url: Url, found: Pin) -> Pin:
        """Bring one whole answer into the cache."""
        async with self._places:
            for attempt in range(1, ATTEMPTS + 1):
                body = _Body(self._stores.get_all(url, found), asyncio.get_running_loop())
                try:
                    return await asyncio.to_thread(_spool, cache, url, body)
                except Unreachable:
                    if attempt == ATTEMPTS:
                        raise
        raise AssertionError("the last attempt returns or raises")

    def _needed_cache(self, url: Url) -> ObjectCache:
        if self._cache is None:
            raise UnreadableShard(f"{url}: its server gives neither ETag nor Last-Modified, and there is no cache")
        return self._cache


def _spool(cache: ObjectCache, url: Url, body: BufferedIOBase) -> Pin:
    spooled = spool(cache, url.shown, body)
    with spooled.file:
        pin = Pin(spooled.size, 0, f'{SPOOLED}{spooled.digest}"', "")
        keep(cache, url.shown, pin, spooled)
    return pin


class _Body(BufferedIOBase):
    """The body of an answer, which comes in the loop, to be read by a thread."""

    def __init__(self, pieces: AsyncIterator[Buffer], loop: asyncio.AbstractEventLoop) -> None:
        self._pieces, self._loop = pieces, loop

    def read1(self, size: int = -1, /) -> bytes:
        return bytes(asyncio.run_coroutine_threadsafe(self._next(), self._loop).result())

    async def _next(self) -> Buffer:
        return await anext(self._pieces, b"")
