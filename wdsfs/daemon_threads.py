"""Threads that do not delay the end of a program."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")


class DaemonThreads(Executor):
    """Threads that nobody waits for after an interrupt: a store may be silent for a minute."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        for _ in range(count):
            threading.Thread(target=self._run, name="pool", daemon=True).start()

    def submit(self, function: Callable[..., Result], /, *arguments: Any, **options: Any) -> Future[Result]:
        future: Future[Result] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*arguments, **options))
                except BaseException as error:
                    future.set_exception(error)

        self._work.put(work)
        return future

    def shutdown(self, *_how: Any, **_more: Any) -> None:
        """End the threads, each after its present work."""
        for _ in range(self._count):
            self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
