"""The state of an object that is read: which bytes have arrived, and which requests are in flight.

`demand.py` decides when a request is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

from wdsfs.door.pins import Pin
from wdsfs.door.urls import Url
from wdsfs.remote.cached_object import BLOCK, CachedObject
from wdsfs.remote.passes import WINDOW_MAX, Passes

Thing = TypeVar("Thing")
Span = tuple[int, int]  # begin and end (bytes)


class Intervals(Generic[Thing]):
    """Values by range of bytes, in order. No two ranges overlap; `add` does not check that."""

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


def joined(spans: Iterable[Span], gap: int = 0) -> list[Span]:
    """Return the spans in order, those that overlap or are at most `gap` bytes apart as one."""
    joins: list[Span] = []
    for begin, end in sorted(spans):
        if joins and begin <= joins[-1][1] + gap:
            joins[-1] = joins[-1][0], max(joins[-1][1], end)
        elif begin < end:
            joins.append((begin, end))
    return joins


def split(spans: Iterable[Span], most: int) -> list[Span]:
    """Return the spans in pieces of at most `most` bytes."""
    return [(start, min(start + most, end)) for begin, end in spans for start in range(begin, end, most)]


# One part after the other: several threads would wait for the lock of a file, and take turns at the interpreter.
_writing = ThreadPoolExecutor(1, "writing")
SLAB, SLABS = 4 << 20, 8  # bytes of memory in which pieces are held, at most; how many there are at least
SHORT = 256 << 10  # bytes of a range that comes as a whole, and is written to the cache without a thread, at most

Result = TypeVar("Result")
Buffer = bytes | memoryview
Piece = tuple[int, memoryview]  # where it begins (bytes), and its bytes
Take = Callable[[int, Buffer], None]  # gets the pieces of a range in order: where each begins, and its bytes


class Part:
    """A range of an object that one request fetches. Its readers continue as soon as their bytes have arrived.

    Bytes that have arrived are kept in `pieces`, for waiting readers, as long as the part has users or is in
    flight.
    """

    def __init__(self, item: RemoteObject, begin: int, end: int, urgent: bool) -> None:
        self.item, self.begin, self.end = item, begin, end
        self.urgent = urgent  # a reader waits for it
        self.users = 0  # readers that need it
        self.dropped = False
        self.task: asyncio.Task[None] | None = None
        self.counted = 0  # bytes of the budget that it takes
        self.pieces: list[Piece] = []
        self.is_cached = True  # all bytes that were given to the cache are in it; True if there are none
        self.done = False
        self._error: Exception | None = None
        self._here, self._stop = begin, end  # up to where its bytes have come, and will come
        self._cached: CachedObject | None = None
        self._storing: asyncio.Task[None] | None = None
        self._stored = 0  # pieces that were given to the cache
        self._partial = b""  # of them, the begin of a block
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []

    @property
    def size(self) -> int:
        return self.end - self.begin

    @property
    def fetched(self) -> int:
        """The bytes that have come."""
        return sum(len(data) for _, data in self.pieces)

    def expect(self, begin: int, stop: int) -> None:
        """Note which bytes will be requested; the other bytes of the range are there already."""
        self._cached = self.item.cached
        self._here, self._stop, self.is_cached = begin, stop, self._cached is not None

    async def reached(self, end: int) -> None:
        """Wait until its bytes up to `end` have arrived. Raises the error of the request."""
        if not self._has(end):
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append((end, waiter))
            await waiter
        if self._error is not None and self._here < min(end, self._stop):
            raise self._error

    def _has(self, end: int) -> bool:
        return self.done or min(end, self._stop) <= self._here

    def take(self, begin: int, data: Buffer) -> None:
        """Add the next bytes; see `Take`."""
        self.pieces.append((begin, memoryview(data)))
        self._here = begin + len(data)
        is_short = self.size <= SHORT  # comes as a whole: `finish` gives it to readers, when it is in the cache
        if is_short and self._keep_at_once():
            return
        if self.is_cached and self._storing is None:
            self._storing = self.item.start(self._store())
        if not is_short:
            self._wake()

    def _keep_at_once(self) -> bool:
        """Put the piece that has come into the cache; return False if this thread would have to wait for room."""
        if not self.is_cached:
            return True
        if self._storing is not None:
            return False
        try:
            self.is_cached = self._keep(*self.pieces[-1], at_once=True)
        except BlockingIOError:
            return False
        self._stored = len(self.pieces)
        return True

    async def _store(self) -> None:
        """Put arrived bytes into the cache, in steps that grow while the disk is slower than the network."""
        while self.is_cached and self._stored < len(self.pieces):
            pieces = self.pieces[self._stored :]
            self._stored += len(pieces)
            work = partial(self._keep_all, pieces)
            self.is_cached = await in_thread(work, _writing)
        self._storing = None

    def _keep_all(self, pieces: Sequence[Piece]) -> bool:
        return all(self._keep(*piece) for piece in pieces)

    async def stored(self) -> None:
        """Wait until all bytes that have arrived were given to the cache."""
        if self._storing is not None:
            await asyncio.wait([self._storing])

    def _keep(self, begin: int, data: memoryview, *, at_once: bool = False) -> bool:
        """Put the complete blocks of arrived bytes into the cache; return False if it refuses them.

        `at_once`: raise BlockingIOError rather than wait. The caller then repeats the call where it may wait.
        """
        assert self._cached is not None
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

    def finish(self, error: Exception | None = None) -> None:
        self.done, self._error = True, error
        self._wake()

    def _wake(self) -> None:
        for end, waiter in self._waiters:
            if self._has(end) and not waiter.done():
                waiter.set_result(None)
        self._waiters = [waiter for waiter in self._waiters if not waiter[1].done()]


class RemoteObject:
    """An object that is read: its parts in the cache, and its parts in flight."""

    def __init__(self, url: Url, pin: Pin, cached: CachedObject | None, window: int = WINDOW_MAX) -> None:
        self.url, self.pin, self.cached = url, pin, cached
        self.parts: Intervals[Part] = Intervals()  # queued or in flight
        self.held: Intervals[memoryview] = Intervals()
        self.passes = Passes(pin.size, window)
        self.whole: asyncio.Task[None] | None = None  # brings all of it: its server sends no parts
        self.tasks: set[asyncio.Task[None]] = set()  # that use the cache, also those that were cancelled
        self.verified = False  # or will be soon
        self.following: tuple[Url, Pin] | None = None  # the next object of the set
        self.successor: RemoteObject | None = None  # the same, while it is open for a pass over this one

    def rounded(self, begin: int, end: int) -> Span:
        return begin // BLOCK * BLOCK, min(-(-end // BLOCK) * BLOCK, self.pin.size)

    def lacking(self, spans: Iterable[Span]) -> list[Span]:
        """Return the parts of these ranges that have neither arrived nor are in flight."""
        gaps = []
        for begin, end in spans:
            for start, stop in [(begin, end)] if self.cached is None else self.cached.missing(begin, end):
                for left, right in self.held.gaps(start, stop):
                    gaps += self.parts.gaps(left, right)
        return gaps

    @property
    def arrived(self) -> int:
        """The number of bytes that have arrived of parts in flight."""
        return sum(part.fetched for _, _, part in self.parts)

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

    def held_of(self, begin: int, end: int) -> list[Piece]:
        """Return the pieces of a range that are held in memory."""
        return [(start, data) for start, _, data in self.held.overlapping(begin, end)]

    def assemble(self, begin: int, end: int, pieces: Sequence[Piece]) -> list[memoryview] | None:
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


class Held:
    """Bytes of objects that no cache has: pieces in slabs of memory, `most` bytes in all. The oldest goes first.

    In the heap, pieces of many sizes that stay for long would have holes of 100 MiB between them. Readers may
    still use a piece of a slab that was released.
    """

    def __init__(self, most: int) -> None:
        self._slab = max(min(SLAB, most // SLABS) // BLOCK * BLOCK, BLOCK)
        self._most = max(most // self._slab, 1)
        self._pieces: dict[mmap.mmap, set[tuple[RemoteObject, int]]] = {}  # by slab: their objects and first bytes
        self._free: memoryview | None = None  # of the newest slab

    @property
    def size(self) -> int:
        """The bytes of all slabs."""
        return len(self._pieces) * self._slab

    def add(self, item: RemoteObject, begin: int, data: memoryview) -> None:
        """Hold a copy of these bytes."""
        for start, stop in item.held.gaps(begin, begin + len(data)):
            while start < stop:
                free = self._free or self._new_slab()
                piece, self._free = free[: stop - start], free[stop - start :]
                piece[:] = data[start - begin : start - begin + len(piece)]
                item.held.add(start, start + len(piece), piece)
                self._pieces[_slab_of(piece)].add((item, start))
                start += len(piece)

    def forget(self, item: RemoteObject) -> None:
        """Release the bytes of an object, and the slabs that have no others."""
        for begin, _, piece in list(item.held):
            slab = _slab_of(piece)
            item.held.remove(begin)
            self._pieces[slab].remove((item, begin))
            if not self._pieces[slab]:
                self._release(slab)

    def release_oldest(self) -> None:
        """Release the oldest slab."""
        slab = next(iter(self._pieces))
        for item, begin in self._pieces[slab]:
            item.held.remove(begin)
        self._release(slab)

    def _new_slab(self) -> memoryview:
        while len(self._pieces) >= self._most:
            self.release_oldest()
        slab = mmap.mmap(-1, self._slab, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._pieces[slab] = set()
        return memoryview(slab)

    def _release(self, slab: mmap.mmap) -> None:
        del self._pieces[slab]  # its memory is free when the last reader has dropped its pieces
        if self._free is not None and _slab_of(self._free) is slab:
            self._free = None


def _slab_of(piece: memoryview) -> mmap.mmap:
    assert isinstance(piece.obj, mmap.mmap)
    return piece.obj


class Threads:
    """Up to `most` threads for calls that wait, of one event loop.

    Many results wake the loop once, which makes a call cost a third of what it does in an Executor.
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
        """Return the result of a call; if it is cancelled, the call goes on."""
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
        del call  # which may hold the last reference to its `Threads`


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
