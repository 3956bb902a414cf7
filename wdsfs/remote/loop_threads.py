"""Calls that wait, made in threads for an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

Result = TypeVar("Result")


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
