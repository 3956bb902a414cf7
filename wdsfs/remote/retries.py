"""Retries, limits and threads: when to repeat a request, how many to send at once, and which threads wait.

This module works for every kind of store. The retries of obstore are off, because they ignore throttling by a
store, and may take three minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, asdict, dataclass
from functools import lru_cache, partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, TypeVar

from wdsfs.errors import ShardError
from wdsfs.remote.settings import TOTAL_TIME

Result = TypeVar("Result")


@dataclass
class Traffic:
    """The traffic with one store."""

    requests: int = 0
    bytes: int = 0  # of content that was fetched
    retries: int = 0
    throttled: int = 0  # answers that asked for fewer requests (429, 503)
    failures: int = 0  # requests that were given up
    # Time since which all requests fail (seconds since the epoch); None: the store answers.
    offline_since: float | None = None
    # Time until which the store wants no requests for some object (seconds since the epoch).
    told_until: float | None = None
    reads: int = 0  # of clients, and of the kernel
    hits: int = 0  # reads among these that did not have to wait
    used: int = 0  # bytes that were read


class Counters:
    """The traffic of a process by store (as `Url.store` has it: no secret is in it)."""

    def __init__(self) -> None:
        self._stores: defaultdict[str, Traffic] = defaultdict(Traffic)

    def of(self, store: str) -> Traffic:
        return self._stores[store]

    def report(self) -> dict[str, dict[str, Any]]:
        return {store: asdict(traffic) for store, traffic in self._stores.items()}


THREADS = 16  # for calls that block; a pool of its own, because some calls may never return


@dataclass(eq=False)
class Transient(Exception):
    """A failure after which another attempt may succeed. It never leaves this room."""

    reason: str
    _: KW_ONLY
    throttled: bool = False  # the store wants fewer requests
    wait: float | None = None  # seconds that it asked for (Retry-After)
    attempts: int | None = None  # more attempts of this kind make no sense
    refused: bool = False  # no server listens there, or the host does not exist: this was known at once
    silent: bool = False  # there was no answer, so another attempt may take as long
    instead: ShardError | None = None  # for the caller when all attempts have failed so; None: Unreachable


class Clock:
    """Time and chance, which tests replace."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def chance(self) -> float:
        """Return a random number between 0 and 1."""
        return random.random()


class Patience(NamedTuple):
    """Limits of time for the attempts at a request."""

    # Seconds from the request on, waits for its turn included, after which no attempt is begun.
    total: float = TOTAL_TIME
    first: float = 0.1  # the longest wait before the second attempt; doubles with each
    longest: float = 15.0
    refused: int | None = None  # attempts, if connections are refused

    def wait(self, attempts: int, chance: float) -> float:
        """Return the seconds before the next attempt, at random: clients that failed together retry apart."""
        return min(self.longest, self.first * 2.0 ** (attempts - 1)) * chance


class Limit:
    """The number of requests that a store gets at once: halved by a complaint, one more with each round (AIMD)."""

    def __init__(self, most: int, clock: Clock) -> None:
        self.allowed = float(most)
        self.under_way = 0
        self.is_quick = False  # its last long answer was
        self.latency = 0.0  # seconds to the first byte: a low value among the last answers
        self._most = most
        self._clock = clock
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._halved = float("-inf")
        self._pause_until = float("-inf")
        self._succeeded = float("-inf")  # when a request has last done so

    async def enter(self, patience: float = TOTAL_TIME) -> float:
        """Wait for a place, first come first served, and for the end of a pause that the store has asked for.

        The wait lasts at most `patience` (seconds). A pause that would end later is ignored: a store may ask for
        it because of one object only, and may answer earlier. Returns the time of the last answer of the store, or
        of the beginning of the wait. Raises Transient if no place became free within `patience`, and no request
        before this one has succeeded.
        """
        come = self._clock.now()
        await self._place(patience)
        begun = max(come, self._succeeded)
        try:
            while self._clock.now() < self._pause_until <= begun + patience:
                await self._clock.sleep(self._pause_until - self._clock.now())
        except asyncio.CancelledError:
            self.leave()
            raise
        return begun

    async def _place(self, patience: float) -> None:
        if self.under_way < int(self.allowed) and not self._waiting:
            self.under_way += 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._look_later(place, patience)
        try:
            await place  # `leave` counts it
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.leave()
            raise

    def _look_later(self, place: asyncio.Future[None], patience: float) -> None:
        """Stop waiting for a place, unless requests before this one have succeeded meanwhile."""
        before = self._succeeded

        def look() -> None:
            if not place.done() and self._succeeded == before:
                place.set_exception(Transient("its store answers none of the requests before", silent=True))
            elif not place.done():
                self._look_later(place, patience)

        timer = asyncio.get_running_loop().call_later(patience, look)
        place.add_done_callback(lambda _: timer.cancel())

    def leave(self) -> None:
        self.under_way -= 1
        while self._waiting and self.under_way < int(self.allowed):
            place = self._waiting.popleft()
            if not place.done():  # the place is done, for example, if its request was given up
                self.under_way += 1
                place.set_result(None)

    def succeeded(self) -> None:
        self._succeeded = self._clock.now()
        self.allowed = min(float(self._most), self.allowed + 1 / self.allowed)

    def answered(self, seconds: float) -> None:
        """Note the time to the first byte of an answer. Long ones count little: this process was busy."""
        self.latency = min(seconds, self.latency + (seconds - self.latency) / 16) if self.latency else seconds

    def throttled(self, wait: float | None) -> None:
        """Count a complaint of the store; several within a second count as one, as answers to earlier requests."""
        now = self._clock.now()
        if wait is not None:
            self._pause_until = max(self._pause_until, now + wait)
        if now - self._halved >= 1.0:
            self._halved = now
            self.allowed = max(1.0, self.allowed / 2)


async def again(
    attempt: Callable[[], Awaitable[Result]], limit: Limit, patience: Patience, clock: Clock, traffic: Traffic
) -> Result:
    """Return the result of the first successful attempt. Raises the last Transient when the time is over."""
    attempts, begun = 0, None
    while True:
        left = patience.total if begun is None else max(begun + patience.total - clock.now(), 0.0)
        try:
            entered = await limit.enter(left)
        except Transient:
            _give_up(traffic, patience.total)
            raise
        begun, now = entered if begun is None else begun, clock.now()
        attempts += 1
        traffic.requests += 1
        try:
            result = await attempt()
        except Transient as error:
            failed = error
        else:
            limit.succeeded()
            traffic.offline_since = None
            return result
        finally:
            limit.leave()
        wait = max(patience.wait(attempts, clock.chance()), failed.wait or 0)
        if failed.throttled:
            traffic.throttled += 1
            limit.throttled(failed.wait if wait <= patience.total else None)
        took = clock.now() - now if failed.silent else 0.0
        late = clock.now() + wait + took - begun > patience.total
        most = patience.refused if failed.refused else failed.attempts
        if late or (most is not None and attempts >= most):
            _give_up(traffic, clock.now() - begun)
            raise failed
        traffic.retries += 1
        await clock.sleep(wait)


# --- calls that wait, in threads ---------------------------------------------------------------------------


class Threads:
    """Threads of one event loop for calls that wait: at most `most`.

    Many results wake the loop once, so a call costs a third of a call in an Executor.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._started = self._busy = 0
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._results: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._is_woken = False  # the loop will look at the results

    @property
    def is_free(self) -> bool:
        """True if a call begins at once."""
        return self._busy < self._most

    def call(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        """Return the result of a call. If the waiting task is cancelled, the call continues."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._busy += 1
        if self._started < min(self._busy, self._most):
            self._started += 1
            Thread(target=_make_calls, args=(self._calls,), daemon=True).start()
        self._calls.put(partial(self._make, future, work))
        return future

    def _make(self, future: asyncio.Future[Result], work: Callable[[], Result]) -> None:
        try:
            self._results.append((future, work(), None))
        except BaseException as error:
            self._results.append((future, None, error))
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                future.get_loop().call_soon_threadsafe(self._give_results)

    def _give_results(self) -> None:
        self._is_woken = False
        while self._results:
            future, result, error = self._results.popleft()
            self._busy -= 1
            if future.done():  # nobody waits any more
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def __del__(self) -> None:
        for _ in range(self._started):
            self._calls.put(None)


def _make_calls(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # it may hold the last reference to its `Threads`


async def in_thread(work: Callable[[], Result], threads: ThreadPoolExecutor | None = None) -> Result:
    """Do work that uses the cache in one of `threads`, or of those of the event loop; return its result.

    A task that is cancelled meanwhile waits for the end of the work.
    """
    running = asyncio.get_running_loop().run_in_executor(threads, work)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return running.result()


async def blocking(work: Callable[[], Result], seconds: float) -> Result:
    """Make a call that waits for a server in a thread; return its result.

    Raises Transient when the call takes longer, while its thread goes on.
    """
    try:
        # Not `wait_for`: before Python 3.12 it loses a cancellation that comes at the same time as the result.
        async with asyncio.timeout(seconds):
            return await asyncio.get_running_loop().run_in_executor(_threads(), work)
    except TimeoutError:
        raise Transient("its server does not answer in time", silent=True) from None


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS)


def _give_up(traffic: Traffic, tried: float) -> None:
    """Count a request that was given up after `tried` seconds."""
    traffic.failures += 1
    if traffic.offline_since is None:
        traffic.offline_since = time.time() - tried
