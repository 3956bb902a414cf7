"""Requests to stores as one process makes them: keeps clients, repeats attempts, translates errors.

`store_reader.py`, `listings.py` and `store_sender.py` know what is asked, and what an answer means. All use
asyncio, and only the fetcher may import them: a child of a process that has used obstore hangs, and one in ten
that has used its asyncio aborts when it ends (0.12.1), so the fetcher ends by `os._exit`.

What a store does, and what its caller gets:

=====================================  =======================================================================
a signed URL has expired               DeniedObject (EACCES), with the time at which it has
401, 403                               DeniedObject, after another look for credentials, at most once a minute
429, 503                               asked again after Retry-After or a while; half as many requests at once
... with a longer Retry-After          Unreachable at once, for that object, which is asked for again after 5 s
an answer slower than `lowest_rate`    counts as none, by `settings.Pace`
408, 425, 500, 502, 504, broken,       asked again after a while (full jitter)
no connection, no answer (`timeout`)
... for longer than `total_time`       Unreachable
redirects                              followed, Authorization only to the same host, never from https to http
redirects without a place (S3)         Unreachable: the region is wrong
a certificate of an authority          Unreachable; the message says how to make another one
other answers                          Unreachable at once
=====================================  =======================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import NamedTuple

from obstore import exceptions
from obstore.store import ObjectStore

from wdsfs.door import urls
from wdsfs.door.urls import WEB, Url
from wdsfs.errors import DeniedObject, ShardError, Unreachable
from wdsfs.remote import answers, settings, store_clients
from wdsfs.remote.retries import Clock, Counters, Limit, Patience, Result, Traffic, Transient, again, blocking
from wdsfs.remote.settings import Pace, Settings

CLIENTS = 256  # to keep open; creating one takes 5 ms and 0.1 MB. Each signed URL needs one of its own
ROUTES = 4096  # to remember, one for each object
REQUESTS = 128  # at once to a store, at most
REFUSED = 2  # attempts to learn what is there, if connections are refused
DOWN_SECONDS = 5.0  # how long a store that does not answer is not asked again
RENEW_SECONDS = 60.0  # until a client whose requests are refused is made again
HOW_LONG_SECONDS = 10.0  # limit for a request that only asks for Retry-After


class Route(NamedTuple):
    """Options, place and limits of requests for a URL; made once, because that takes as long as a request."""

    options: dict[str, str]
    place: tuple[object, ...]  # that has a client of its own
    path: str  # in that place
    pace: Pace
    patience: Patience
    limit: Limit
    traffic: Traffic


class StoreRequests:
    """The requests of this process to all stores: their clients, limits and pauses."""

    def __init__(self, chosen: Settings, counters: Counters, clock: Clock | None = None) -> None:
        self._settings = chosen
        self._counters = counters
        self.clock = clock or Clock()
        self._clients: OrderedDict[tuple[object, ...], tuple[ObjectStore, float]] = OrderedDict()
        self._making = asyncio.Lock()
        self._limits: dict[str, Limit] = {}
        # By store: until when it is not asked, and why. By object: until when its store asks to wait.
        self._down: dict[str, tuple[float, str]] = {}
        self._pauses: OrderedDict[Url, tuple[float, str]] = OrderedDict()
        self._asking_how_long: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by store
        self.route = lru_cache(ROUTES)(self._new_route)

    def _new_route(self, url: Url) -> Route:
        options = self._settings.options(url)
        location, path = store_clients.place(url)
        place = location, url.user, *sorted(options.items())
        pace = settings.pace(options)
        if url.store not in self._limits:
            self._limits[url.store] = Limit(int(float(options.get("requests", REQUESTS))), self.clock)
        limit, traffic = self._limits[url.store], self._counters.of(url.store)
        return Route(options, place, path, pace, Patience(pace.total), limit, traffic)

    def options(self, url: Url) -> dict[str, str]:
        """Return the options of the store of a URL."""
        return self.route(url).options

    # --- clients

    async def client(self, url: Url, seconds: float = 0, retries: int = 0) -> tuple[ObjectStore, str]:
        """Return a client for this URL, and the path of the object in it. Raises Unreachable.

        With `seconds`, one for requests that may take so long, each sent up to `retries` times more.
        """
        route = self.route(url)
        options, key = route.options, route.place
        if seconds:
            options = {**options, "timeout": str(seconds), "total_time": str(seconds)}
            key = seconds, retries, *key
        return await self.client_at(url, key, lambda: store_clients.make(url, options, retries)), route.path

    async def prepare(self, url: Url) -> None:
        """Make the client for this URL early: the first request would wait 20 ms for it. Raises nothing."""
        if not url.is_program and url.scheme != "hf":
            with contextlib.suppress(Exception):  # the first request gets the same one
                await self.client(url)

    async def client_at(self, url: Url, key: tuple[object, ...], make: Callable[[], ObjectStore]) -> ObjectStore:
        """Return the client that is kept under this key, made by `make` if there is none. Raises Unreachable."""
        client = self._clients.get(key)
        if client is None:
            async with self._making:  # of many requests for a new place, one makes the client
                client = self._clients.get(key) or (await self._make_client(url, make), self.clock.now())
                self._clients[key] = client
            while len(self._clients) > CLIENTS:
                self._clients.popitem(last=False)
        else:
            self._clients.move_to_end(key)
        return client[0]

    async def _make_client(self, url: Url, make: Callable[[], ObjectStore]) -> ObjectStore:
        try:
            return await asyncio.to_thread(make)
        except OSError as error:
            raise Unreachable(f"{url}: the file of its certificates cannot be read: {error.strerror}") from None
        except (exceptions.BaseError, ValueError):
            pass  # its text may have secrets
        raise Unreachable(f"{url}: the options of this store, or its variables in the environment, cannot be used")

    def _drop_old_clients(self, url: Url) -> bool:
        """Drop clients that were made a while ago, since credentials may have changed; return True if one was.

        A place has one for reading, and one for each size of uploads.
        """
        place, latest = self.route(url).place, self.clock.now() - RENEW_SECONDS
        old = [key for key, (_, made) in self._clients.items() if key[-len(place) :] == place and made < latest]
        for key in old:
            del self._clients[key]
        return bool(old)

    # --- attempts

    async def look(self, url: Url, attempt: Callable[[], Awaitable[Result]]) -> Result:
        """Repeat a request for metadata as `repeat`; cached objects do not depend on these requests.

        A refused connection counts at once, and thousands of shards do not wait, one after the other, for a store
        that is down. Raises ShardError.
        """

        async def ask() -> Result:
            until, reason = self._down.get(url.store, (0.0, ""))
            if self.clock.now() < until:
                raise Unreachable(f"{url}: {reason}")
            return await attempt()

        return await self.repeat(url, ask, refused=REFUSED)

    async def repeat(
        self,
        url: Url,
        attempt: Callable[[], Awaitable[Result]],
        seconds: float = 0,
        refused: int | None = None,
    ) -> Result:
        """Return the result of the first attempt that succeeds. Raises ShardError.

        Each may take `seconds`; there are no more than `refused` if connections are refused.
        """
        route = self.route(url)
        patience = route.patience._replace(total=route.patience.total + seconds, refused=refused)
        failed: ShardError
        if self._pauses and url in self._pauses and self.clock.now() < self._pauses[url][0]:
            raise Unreachable(f"{url}: {self._pauses[url][1]}")
        try:
            result = await again(attempt, route.limit, patience, self.clock, route.traffic)
            self._down.pop(url.store, None)
            if self._pauses:
                self._pauses.pop(url, None)
            return result
        except Transient as error:
            failed = self._lasting(url, error, patience)
        except DeniedObject as error:
            failed = _expired(url) or error
        if isinstance(failed, DeniedObject) and self._drop_old_clients(url):
            return await self.repeat(url, attempt, seconds, refused)
        raise failed

    def _lasting(self, url: Url, error: Transient, patience: Patience) -> ShardError:
        """Return the error for a request that was given up after this last failure; note why."""
        if error.wait is not None and error.wait > patience.total:
            return self._pause(url, error, error.wait)
        if error.instead is not None:
            return error.instead
        at_once = error.attempts is not None or (error.refused and patience.refused is not None)
        reason = f"{error}" if at_once else f"{error}; wdsfs tried for up to {patience.total:g} s"
        if error.refused or error.silent:
            self._down[url.store] = self.clock.now() + DOWN_SECONDS, reason
        return Unreachable(f"{url}: {reason}")

    def _pause(self, url: Url, error: Transient, seconds: float) -> Unreachable:
        """Note, for an object, a Retry-After that is longer than a reader waits; return its error.

        Requests for other objects, and for this one after a while, are sent all the same: the store may answer
        them.
        """
        until = time.time() + seconds
        reason = f"{error}, and asks to wait until {datetime.fromtimestamp(until):%Y-%m-%d %H:%M:%S}"
        self._pauses[url] = self.clock.now() + DOWN_SECONDS, reason
        if len(self._pauses) > ROUTES:
            self._pauses.popitem(last=False)
        self.route(url).traffic.told_until = until
        return Unreachable(f"{url}: {reason}")

    async def answer_of(
        self, url: Url, answer: Awaitable[Result], size: int = 0, seconds: float | None = None
    ) -> Result:
        """Return the answer of obstore; replace its errors, which contain secrets. Raises ShardError, Transient.

        The answer may take as long as the pace of the store allows for `size` bytes, or these `seconds`.
        """
        try:
            async with asyncio.timeout(self.route(url).pace.seconds(size) if seconds is None else seconds):
                return await answer
        except TimeoutError:
            raise Transient("its server does not answer, or too slowly", silent=True) from None
        except answers.OBSTORE_ERRORS as error:
            failed = answers.failure(error, url)
        if isinstance(failed, Transient) and failed.throttled and url.scheme in WEB:
            failed.wait = await self._how_long(url)
        raise failed

    async def _how_long(self, url: Url) -> float | None:
        """Return the seconds that a web server asks to wait. Of many requests that it refuses, only one asks."""
        lock = self._asking_how_long[url.store]
        if lock.locked():
            return None
        async with lock:
            ask = partial(store_clients.retry_after, url, self.options(url), HOW_LONG_SECONDS)
            with contextlib.suppress(Transient):
                return await blocking(ask, HOW_LONG_SECONDS)
        return None


def _expired(url: Url) -> DeniedObject | None:
    """Return the error for a URL whose signature has expired; None for any other."""
    end = urls.expiry(url)
    if end is None or end > time.time():
        return None
    when = datetime.fromtimestamp(end, UTC).isoformat(" ", "seconds")
    return DeniedObject(f"{url}: the signature in this URL ended at {when}: give a newly signed one")
