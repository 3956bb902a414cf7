"""Futures that are under way, taken in the order in which they finish.

Not `concurrent.futures.wait`, which looks at every future each time: with thousands of them it takes longer than
the work. A callback puts each future into a queue when it is done.
"""

from __future__ import annotations

from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

What = TypeVar("What")


class InFlight(Generic[What]):
    """Futures, each with what it is for. Used by one thread; executors finish them in any."""

    def __init__(self) -> None:
        self._running: dict[Future[Any], What] = {}
        self._done: SimpleQueue[Future[Any]] = SimpleQueue()

    def __len__(self) -> int:
        return len(self._running)

    def add(self, future: Future[Any], what: What) -> None:
        self._running[future] = what
        future.add_done_callback(self._done.put)

    def next(self) -> tuple[Future[Any], What]:
        """Wait for the next future that is done. REQUIRES: there are some."""
        while True:
            future = self._done.get()
            if future in self._running:
                return future, self._running.pop(future)

    def drain(self) -> list[tuple[Future[Any], What]]:
        """Cancel all that have not begun, and return all, which are not under way any more."""
        left = list(self._running.items())
        self._running.clear()
        for future, _ in left:
            future.cancel()
        return left
