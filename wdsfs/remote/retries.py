"""When a request is sent again, and how many a store gets at once. Knows a clock, but no store and no network.

obstore's own retries are off: they ignore that a store is throttling, and may take three minutes.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from wdsfs.remote.counters import Traffic

Result = TypeVar("Result")


class Transient(Exception):
    """An attempt failed in a way that another one may not. Never leaves this package: `again` gives up with it."""

    def __init__(
        self,
        reason: str,
        *,
        throttled: bool = False,
        wait: float | None = None,
        attempts: int | None = None,
        refused: bool = False,
        silent: bool = False,
    ) -> None:
        super().__init__(reason)
        self.throttled = throttled  # the store wants fewer requests
        self.wait = wait  # seconds that it asked for (Retry-After)
        self.attempts = attempts  # no more than so many of this kind make sense
        self.refused = refused  # nobody listens there, or there is no such host: this was known at once
        self.silent = silent  # there was no answer, so another attempt may take as long


class Clock:
    """Time and chance, which tests replace."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def chance(self) -> float:
        """Between 0 and 1."""
        return random.random()


class Patience(NamedTuple):
    """How long a request is tried for."""

    total: float = 60.0  # seconds from the first attempt, after which no other is begun
    first: float = 0.1  # the longest wait before the second attempt; doubles with each
    longest: float = 15.0
    refused: int | None = None  # attempts, if connections are refused

    def wait(self, attempts: int, chance: float) -> float:
        """Seconds before the next attempt, at random: clients that failed together shall not return together."""
        return min(self.longest, self.first * 2.0 ** (attempts - 1)) * chance


class Limit:
    """How many requests a store gets at once: half after a complaint, then one more with each round (AIMD)."""

    def __init__(self, most: int, clock: Clock) -> None:
        self.allowed = float(most)
        self.under_way = 0
        self._most = most
        self._clock = clock
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._halved = float("-inf")
        self._pause_until = float("-inf")

    async def enter(self) -> None:
        """Wait for a place, in the order of coming, and for the end of a wait that the store asked for."""
        await self._place()
        try:
            while (pause := self._pause_until - self._clock.now()) > 0:
                await self._clock.sleep(pause)
        except asyncio.CancelledError:
            self.leave()
            raise

    async def _place(self) -> None:
        if self.under_way < int(self.allowed) and not self._waiting:
            self.under_way += 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place  # `leave` counts it
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        self.under_way -= 1
        while self._waiting and self.under_way < int(self.allowed):
            place = self._waiting.popleft()
            if not place.cancelled():
                self.under_way += 1
                place.set_result(None)

    def succeeded(self) -> None:
        self.allowed = min(float(self._most), self.allowed + 1 / self.allowed)

    def throttled(self, wait: float | None) -> None:
        """The store has complained. What comes within a second counts as one: it was sent before the first."""
        now = self._clock.now()
        if wait is not None:
            self._pause_until = max(self._pause_until, now + wait)
        if now - self._halved >= 1.0:
            self._halved = now
            self.allowed = max(1.0, self.allowed / 2)


async def again(
    attempt: Callable[[], Awaitable[Result]], limit: Limit, patience: Patience, clock: Clock, traffic: Traffic
) -> Result:
    """The result of the first attempt that succeeds. Raises the last Transient when time is up."""
    attempts, begun = 0, None
    while True:
        await limit.enter()
        now = clock.now()
        begun = now if begun is None else begun
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
        if failed.throttled:
            traffic.throttled += 1
            limit.throttled(failed.wait)
        wait = max(patience.wait(attempts, clock.chance()), failed.wait or 0)
        took = clock.now() - now if failed.silent else 0.0
        late = clock.now() + wait + took - begun > patience.total
        most = patience.refused if failed.refused else failed.attempts
        if late or (most is not None and attempts >= most):
            traffic.failures += 1
            if traffic.offline_since is None:
                traffic.offline_since = time.time() - (clock.now() - begun)
            raise failed
        traffic.retries += 1
        await clock.sleep(wait)
