"""The state of an object that is read: which bytes have arrived, and which requests are in flight.

`passes.py` decides what to fetch ahead, `demand.py` when a request is made.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

from wdsfs.door.pins import Pin
from wdsfs.door.urls import Url
from wdsfs.remote.cached_object import BLOCK, CachedObject
from wdsfs.remote.messages import Span
from wdsfs.remote.passes import WINDOW_MAX, Passes
from wdsfs.remote.retries import in_thread

Thing = TypeVar("Thing")

# One thread: several would wait for the lock of a file, and take turns at the interpreter.
_writing = ThreadPoolExecutor(1, "writing")
SHORT = 256 << 10  # bytes of a range that comes in one piece and needs no thread for the cache, at most

Buffer = bytes | memoryview
PlacedBytes = tuple[int, memoryview]  # where it begins (bytes), and its bytes
Take = Callable[[int, Buffer], None]  # takes the pieces of a range in order: where each begins, and its bytes


class Intervals(Generic[Thing]):
    """Values by range of bytes, in order. No two ranges may overlap, which `add` does not check."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._rows: list[tuple[int, int, Thing]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[tuple[int, int, Thing]]:
        return iter(self._rows)

    def add(self, begin: int, end: int, thing: Thing) -> None:
        at = bisect_left(self._begins, begin)
        self._begins.insert(at, begin)
        self._rows.insert(at, (begin, end, thing))

    def remove(self, begin: int) -> None:
        """Remove the range that begins here. Raises KeyError."""
        at = bisect_left(self._begins, begin)
        if at == len(self._begins) or self._begins[at] != begin:
            raise KeyError(begin)
        del self._begins[at], self._rows[at]

    def overlapping(self, begin: int, end: int) -> list[tuple[int, int, Thing]]:
        """Return the rows that have bytes of this range, in order."""
        at = max(bisect_right(self._begins, begin) - 1, 0)
        rows = []
        for row in self._rows[at : bisect_left(self._begins, end)]:
            if row[1] > begin:
                rows.append(row)
        return rows

    def gaps(self, begin: int, end: int) -> list[Span]:
        """Return the parts of this range that are in no row."""
        gaps = []
        for start, stop, _ in self.overlapping(begin, end):
            if start > begin:
                gaps.append((begin, start))
            begin = max(begin, stop)
        if begin < end:
            gaps.append((begin, end))
        return gaps


def joined(spans: Iterable[Span]) -> list[Span]:
    """Return the spans in order, joined where they overlap or touch."""
    joins: list[Span] = []
    for begin, end in sorted(spans):
        if joins and begin <= joins[-1][1]:
            joins[-1] = joins[-1][0], max(joins[-1][1], end)
        elif begin < end:
            joins.append((begin, end))
    return joins


def split(spans: Iterable[Span], most: int) -> list[Span]:
    """Return the spans in pieces of at most `most` bytes."""
    return [(start, min(start + most, end)) for begin, end in spans for start in range(begin, end, most)]


class Arrival:
    """The bytes of a range as they come, for the readers that wait for them.

    The bytes from `begin` to `stop` were requested; readers have all other bytes of their ranges already.
    """

    def __init__(self, begin: int, stop: int) -> None:
        self.pieces: list[PlacedBytes] = []
        self.is_over = False
        self._error: Exception | None = None
        self._here, self._stop = begin, stop  # up to where its bytes have come, and will come
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []

    @property
    def size(self) -> int:
        """The bytes that have come."""
        return sum(len(data) for _, data in self.pieces)

    def expect(self, begin: int, stop: int) -> None:
        """Note which bytes will come. REQUIRES: none have come yet."""
        self._here, self._stop = begin, stop

    def add(self, begin: int, data: Buffer) -> None:
        """Add the next bytes; `wake` gives them to the readers."""
        self.pieces.append((begin, memoryview(data)))
        self._here = begin + len(data)

    async def reached(self, end: int) -> None:
        """Wait until the bytes up to `end` have arrived. Raises the error of the request if they do not."""
        if not self._has(end):
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append((end, waiter))
            await waiter
        if self._error is not None and self._here < min(end, self._stop):
            raise self._error

    def _has(self, end: int) -> bool:
        return self.is_over or min(end, self._stop) <= self._here

    def finish(self, error: Exception | None) -> None:
        """Note that no more bytes will come, because of this error if there is one."""
        self.is_over, self._error = True, error
        self.wake()

    def wake(self) -> None:
        """Wake the readers whose bytes have arrived."""
        for end, waiter in self._waiters:
            if self._has(end) and not waiter.done():
                waiter.set_result(None)
        self._waiters = [waiter for waiter in self._waiters if not waiter[1].done()]


class Storing:
    """Puts the pieces of an arrival, up to byte `stop`, into the cache, until the cache refuses a piece."""

    def __init__(self, arrival: Arrival, stop: int, cached: CachedObject) -> None:
        self.is_refused = False
        self._arrival, self._stop, self._cached = arrival, stop, cached
        self._task: asyncio.Task[None] | None = None
        self._count = 0  # pieces that were given to the cache
        self._partial = b""  # the bytes at their end that are not a whole block

    def put_at_once(self) -> bool:
        """Put the latest piece into the cache; return False if this thread would have to wait for room."""
        if self.is_refused:
            return True
        if self._task is not None:
            return False
        try:
            self.is_refused = not self._put(*self._arrival.pieces[-1], at_once=True)
        except BlockingIOError:
            return False
        self._count = len(self._arrival.pieces)
        return True

    def put_later(self, item: RemoteObject) -> None:
        """Put all pieces, also later ones, into the cache of this object, in a thread."""
        if not self.is_refused and self._task is None:
            self._task = item.start(self._put_pieces())

    async def _put_pieces(self) -> None:
        """Put arrived pieces into the cache, in steps that grow while the disk is slower than the network."""
        while not self.is_refused and self._count < len(self._arrival.pieces):
            pieces = self._arrival.pieces[self._count :]
            self._count += len(pieces)
            self.is_refused = not await in_thread(partial(self._put_all, pieces), _writing)
        self._task = None

    async def wait(self) -> None:
        """Wait until all bytes that have arrived were given to the cache."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def _put_all(self, pieces: Sequence[PlacedBytes]) -> bool:
        return all(self._put(*piece) for piece in pieces)

    def _put(self, begin: int, data: memoryview, *, at_once: bool = False) -> bool:
        """Put the complete blocks of arrived bytes into the cache; return False if it refuses them.

        `at_once`: raise BlockingIOError rather than wait. The caller then repeats the call where it may wait.
        """
        if self._partial:
            more = BLOCK - len(self._partial)
            block, begin, data = self._partial + bytes(data[:more]), begin - len(self._partial), data[more:]
            if len(block) < BLOCK and begin + len(block) < self._stop:
                self._partial = block
                return True
            if not self._cached.put(begin, block, at_once=at_once):
                return False
            begin += len(block)
        whole = len(data) if begin + len(data) == self._stop else len(data) // BLOCK * BLOCK
        if whole and not self._cached.put(begin, data[:whole], at_once=at_once):
            return False
        self._partial = bytes(data[whole:])
        return True


class Part:
    """A range of an object that one request fetches. Each reader continues as soon as its bytes have arrived.

    A part keeps its bytes, for waiting readers, as long as it has users or is in flight.
    """

    def __init__(self, item: RemoteObject, begin: int, end: int, *, urgent: bool) -> None:
        self.item, self.begin, self.end = item, begin, end
        self.urgent = urgent  # a reader waits for it
        self.is_prefetch = not urgent  # it was announced, and is fetched even if its readers leave
        self.users = 0  # readers that need it
        self.dropped = False
        self.task: asyncio.Task[None] | None = None
        self.counted = 0  # bytes of the memory that the part takes
        self.arrival = Arrival(begin, end)
        self._storing: Storing | None = None  # None: there is no cache, or nothing was requested
        self._is_requested = False

    @property
    def size(self) -> int:
        return self.end - self.begin

    @property
    def is_cached(self) -> bool:
        """True if all bytes that have arrived are in the cache."""
        return not self._is_requested if self._storing is None else not self._storing.is_refused

    def expect(self, begin: int, stop: int) -> None:
        """Note which bytes will be requested; all other bytes of the range are in the cache already."""
        self._is_requested = True
        self.arrival.expect(begin, stop)
        if self.item.cached is not None:
            self._storing = Storing(self.arrival, stop, self.item.cached)

    def take(self, begin: int, data: Buffer) -> None:
        """Add the next bytes; see `Take`."""
        self.arrival.add(begin, data)
        is_short = self.size <= SHORT  # comes in one piece: `finish` wakes its readers, once the cache has it
        if self._storing is not None and not (is_short and self._storing.put_at_once()):
            self._storing.put_later(self.item)
        if not is_short:
            self.arrival.wake()

    async def stored(self) -> None:
        """Wait until all bytes that have arrived were given to the cache."""
        if self._storing is not None:
            await self._storing.wait()


class RemoteObject:
    """An object that is read: its parts in the cache, and its parts in flight."""

    def __init__(self, url: Url, pin: Pin, cached: CachedObject | None, window: int = WINDOW_MAX) -> None:
        self.url, self.pin, self.cached = url, pin, cached
        self.parts: Intervals[Part] = Intervals()  # queued or in flight
        self.held: Intervals[memoryview] = Intervals()
        self.passes = Passes(pin.size, window)
        self.whole: asyncio.Task[None] | None = None  # fetches all of the object, whose server sends no parts
        self.tasks: set[asyncio.Task[None]] = set()  # use the cache, even after they were cancelled
        self.verified = False  # True also if it will be verified soon
        self.following: tuple[Url, Pin] | None = None  # the next object of the set
        self.successor: RemoteObject | None = None  # the next object while it is open for a pass over this one

    def rounded(self, begin: int, end: int) -> Span:
        return begin // BLOCK * BLOCK, min(-(-end // BLOCK) * BLOCK, self.pin.size)

    def lacking(self, spans: Iterable[Span]) -> list[Span]:
        """Return the parts of these ranges that have not arrived and are not in flight."""
        gaps = []
        for begin, end in spans:
            for start, stop in [(begin, end)] if self.cached is None else self.cached.missing(begin, end):
                for left, right in self.held.gaps(start, stop):
                    gaps += self.parts.gaps(left, right)
        return gaps

    @property
    def arrived(self) -> int:
        """The number of arrived bytes of parts in flight."""
        return sum(part.arrival.size for _, _, part in self.parts)

    def is_stored(self, begin: int, end: int) -> bool:
        """Return True if a range that has arrived is in the cache, too."""
        in_memory = self.held.overlapping(begin, end) or self.parts.overlapping(begin, end)
        return self.cached is not None and not in_memory

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work that uses the cache of this object."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def close(self) -> None:
        """Close the cache of an object that nobody reads, after the last write to it."""
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks)
        if self.cached is not None:
            self.cached.close()

    def assemble(self, begin: int, end: int, pieces: Sequence[PlacedBytes]) -> list[memoryview] | None:
        """Return the bytes of a range, from these pieces or from the cache.

        None when some bytes are in neither.
        """
        collected, at = [], begin
        while at < end:
            data, stop = None, end
            for start, piece in pieces:
                if start <= at < start + len(piece):
                    data = piece[at - start : end - start]
                    break
                if start > at:
                    stop = min(stop, start)
            if data is None:
                data = self._from_cache(at, stop)
            if data is None:
                return None
            collected.append(data)
            at += len(data)
        return collected

    def _from_cache(self, begin: int, end: int) -> memoryview | None:
        data = None if self.cached is None else self.cached.read(end - begin, begin)
        return None if data is None else memoryview(data)
