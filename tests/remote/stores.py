"""A store and a cache in memory for tests: requests are counted, and answers come when a test lets them."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, ParamSpec

from wdsfs.door.pins import Pin
from wdsfs.door.urls import Url, parse
from wdsfs.errors import NoRanges
from wdsfs.remote.demand import Demand
from wdsfs.remote.messages import Span
from wdsfs.remote.parts import Intervals, Take, joined

BLOCK = 4096
Given = ParamSpec("Given")


def content(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


class MemoryStore:
    """Objects by URL. With `gated`, an answer comes when `let` is called, or with `piece` so many bytes of it."""

    def __init__(self, gated: bool = False) -> None:
        self.objects: dict[Url, bytes] = {}
        self.requests: list[Span] = []  # in the order in which they came
        self.cancelled: list[Span] = []
        self.waiting: list[tuple[Span, asyncio.Event]] = []
        self.gated = gated
        self.ranges = True
        self.piece = 1 << 30
        self.error: Exception | None = None

    def put(self, data: bytes, url: str = "s3://b/o.tar") -> tuple[Url, Pin]:
        self.objects[parse(url)] = data
        return parse(url), Pin(len(data), 0, '"e"', "")

    @property
    def fetched(self) -> int:
        return sum(end - begin for begin, end in self.requests)

    async def fetch(self, url: Url, pin: Pin, begin: int, end: int, take: Take) -> None:
        assert 0 <= begin < end <= pin.size
        self.requests.append((begin, end))
        try:
            for start in range(begin, end, self.piece):
                if self.gated:
                    gate = asyncio.Event()
                    self.waiting.append(((begin, end), gate))
                    await gate.wait()
                if self.error is not None:
                    raise self.error
                if not self.ranges:
                    raise NoRanges(f"{url.shown}: no ranges")
                # Of a buffer that is larger, as from a network.
                take(start, memoryview(self.objects[url])[start : min(start + self.piece, end)])
        except asyncio.CancelledError:
            self.cancelled.append((begin, end))
            self.waiting = [one for one in self.waiting if one[1] is not gate]
            raise

    async def get_all(self, url: Url, pin: Pin) -> AsyncIterator[bytes]:
        self.requests.append((0, pin.size))
        for at in range(0, pin.size, 100_000):
            if self.error is not None:
                raise self.error
            yield self.objects[url][at : at + 100_000]

    def latency(self, url: Url) -> float:
        return 0.0

    def let(self, count: int | None = None) -> None:
        """Answer the requests that wait, or the first of them."""
        for _, gate in self.waiting[:count]:
            gate.set()
        del self.waiting[:count]


class MemoryCache:
    """An object in the cache. `claims` is shared by the processes that have it open."""

    def __init__(self, data: dict[int, bytes], size: int, claims: list[Span]) -> None:
        self.blocks, self.size, self.claims = data, size, claims
        self.evicted = self.closed = False
        self.full = False
        self.is_busy: Callable[[], bool] = lambda: False  # another process makes room

    @property
    def complete(self) -> bool:
        return len(self.blocks) == -(-self.size // BLOCK)

    def verify(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = True

    def read(self, size: int, offset: int) -> bytes | None:
        first, last = offset // BLOCK, -(-(offset + size) // BLOCK)
        if any(number not in self.blocks for number in range(first, last)):
            return None
        return b"".join(self.blocks[n] for n in range(first, last))[offset - first * BLOCK :][:size]

    def missing(self, begin: int, end: int) -> list[Span]:
        numbers = range(begin // BLOCK, -(-end // BLOCK))
        lacking = [(n * BLOCK, min((n + 1) * BLOCK, self.size)) for n in numbers if n not in self.blocks]
        return joined(lacking)

    def has_room(self, size: int) -> bool:
        return not self.full

    def put(self, offset: int, data: bytes | memoryview, *, at_once: bool = False) -> bool:
        if at_once and self.is_busy():
            raise BlockingIOError
        if self.full:
            return False
        assert offset % BLOCK == 0
        for at in range(0, len(data), BLOCK):
            block = bytes(data[at : at + BLOCK])
            if len(block) == BLOCK or offset + at + len(block) == self.size:
                self.blocks[(offset + at) // BLOCK] = block
        return True

    def claim(self, begin: int, end: int) -> bool:
        if any(start < end and begin < stop for start, stop in self.claims):
            return False
        self.claims.append((begin, end))
        return True

    def release(self, begin: int, end: int) -> None:
        self.claims.remove((begin, end))


def memory_cache(size: int, data: dict[int, bytes] | None = None, claims: list[Span] | None = None) -> Any:
    """A `MemoryCache`, which takes the place of a `CachedObject`."""
    return MemoryCache({} if data is None else data, size, [] if claims is None else claims)


def demand_of(store: Any, memory: int) -> Demand:
    """Return the requests of a fetcher to a `MemoryStore`, which takes the place of the `Stores`."""
    return Demand(store, memory)


async def until(condition: Callable[[], object]) -> None:
    """Let the others run until this is so."""
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it does not become so")


async def settled() -> None:
    """Let the others run until they can go on no more: each step of a chain takes one turn of the loop."""
    for _ in range(50):
        await asyncio.sleep(0)


def in_loop(test: Callable[Given, Coroutine[Any, Any, None]]) -> Callable[Given, None]:
    """Run a test that is a coroutine in an event loop."""

    @functools.wraps(test)
    def run_test(*arguments: Given.args, **named: Given.kwargs) -> None:
        asyncio.run(test(*arguments, **named))

    return run_test


def covered(spans: list[Span]) -> Intervals[None]:
    """The spans, which must not overlap: nothing was fetched twice."""
    found: Intervals[None] = Intervals()
    for begin, end in spans:
        assert not found.overlapping(begin, end), f"{begin}-{end} was fetched before"
        found.add(begin, end, None)
    return found
