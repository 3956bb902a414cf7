"""A worker: receives requests and answers them, one at a time, without an event loop.

pyfuse3 waits for its descriptor through trio, one round of the scheduler for each request. A worker has
nothing else to do, so it drives pyfuse3's own loop with the least that this loop needs of trio, and waits in
the receive itself: a short look whether the next request is there already (a client that reads file after file
is back within microseconds), then asleep in the kernel. Replacing the module's `trio` is what `pyfuse3.asyncio`
does, too.

Several workers share one descriptor and the kernel wakes one of them for each request. A worker remembers
nothing that another could not work out: it may be killed at any time.
"""

from __future__ import annotations

import select
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pyfuse3

SPIN_SECONDS = 50e-6


class _Closed(Exception):
    """What pyfuse3 takes for the end of its descriptor."""


class _Lock:
    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None: ...


class _Task:
    name = "worker"


class _Nursery:
    """Runs the one task that pyfuse3 starts."""

    def __init__(self) -> None:
        self._start: Callable[[], Awaitable[None]] | None = None

    def start_soon(self, function: Callable[..., Awaitable[None]], *arguments: Any, name: object = None) -> None:
        self._start = lambda: function(*arguments)

    async def __aenter__(self) -> _Nursery:
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is None and self._start is not None:
            await self._start()


class _Direct:
    """Stands in for trio in pyfuse3. `stop` is asked before each request."""

    Lock = _Lock
    ClosedResourceError = _Closed
    open_nursery = _Nursery

    def __init__(self, stop: Callable[[], bool], spin: float, wait: float | None) -> None:
        self.lowlevel = self
        self._stop, self._wait = stop, wait
        self._spin_ns = int(spin * 1e9)
        self._poll: select.poll | None = None

    @staticmethod
    def current_trio_token() -> None:
        return None

    @staticmethod
    def current_task() -> _Task:
        return _Task()

    async def wait_readable(self, fd: int) -> None:
        if self._stop():
            raise _Closed
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(fd, select.POLLIN)
        if self._wait is not None:
            while not self._poll.poll(self._wait * 1000):
                if self._stop():
                    raise _Closed
            return
        look, now = self._poll.poll, time.perf_counter_ns
        end = now() + self._spin_ns
        while not look(0) and now() < end:
            pass


def serve(stop: Callable[[], bool], spin: float = SPIN_SECONDS, wait: float | None = None) -> None:
    """Answer requests of pyfuse3's session until the file system is unmounted or `stop` returns True.

    `stop` is called before each request, and, when `wait` is given, after that many seconds without one.
    `spin` is how long (s) to look for the next request before sleeping. Handlers must not wait for anything
    by `await`.
    """
    pyfuse3.trio = _Direct(stop, spin, wait)  # type: ignore[attr-defined]  # the module has it, its stub not
    loop = pyfuse3.main(1, 1)
    try:
        loop.send(None)
    except StopIteration:
        return
    loop.close()
    raise RuntimeError("a handler has waited for an event loop, and there is none")
