"""The distribution of units of work over workers: batches, retries, and the meaning of a lost worker.

Small units are sent several at a time, so that a message costs less than the work. A unit whose worker has died is
tried again, alone; one that has lost `TRIES` workers is reported. When the whole executor breaks (as a pool of
processes does when one of them is killed), it is made again, and then the units that were under way are tried one
by one, which shows the one that kills. Futures are taken in the order in which they finish, by callbacks into a
queue: `concurrent.futures.wait` looks at every future each time, which takes longer than the work when there are
thousands.

Single-threaded: runs in the thread of the command.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import BrokenExecutor, Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from wdsfs.cluster_workers import LOST, Workers
from wdsfs.errors import ExecutorUnusable, ShardError, UnreadableShard, WdsfsError
from wdsfs.index.far_side import Batch, Outcome, options, run

What = TypeVar("What")


class InFlight(Generic[What]):
    """Futures, each with the work that it stands for. Used by one thread; executors finish them in any."""

    def __init__(self) -> None:
        self._running: dict[Future[Any], What] = {}
        self._done: SimpleQueue[Future[Any]] = SimpleQueue()

    def __len__(self) -> int:
        return len(self._running)

    def add(self, future: Future[Any], what: What) -> None:
        """Add a future."""
        self._running[future] = what
        future.add_done_callback(self._done.put)

    def next(self) -> tuple[Future[Any], What]:
        """Wait for the next future that is done. REQUIRES: there are some."""
        while True:
            future = self._done.get()
            if future in self._running:
                return future, self._running.pop(future)

    def drain(self) -> list[tuple[Future[Any], What]]:
        """Cancel all futures that have not begun; return and forget all."""
        left = list(self._running.items())
        self._running.clear()
        for future, _ in left:
            future.cancel()
        return left


TRIES = 3  # workers that a unit may lose
BARREN = 12  # losses in a row, without a result, after which the executor counts as broken
TOGETHER_SECONDS, TOGETHER_MAX = 0.1, 64  # of work that is sent as one batch, and units in it
WIDTH_EVERY = 256  # results after which the engine is asked again how many workers it has

Item = TypeVar("Item")

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Job(Generic[Item]):
    """Work for each item of a list.

    `prepare` makes a unit of an item when it is sent, and `function` gets it on a worker; both can be pickled. A
    ShardError of either is the result of the item. `name` is what messages call an item. `must_repeat` returns
    True if an item has to be sent again (once) after this error of the unit that was sent.
    """

    function: Callable[[Any], Any]
    prepare: Callable[[Item], Any]
    name: Callable[[Item], str]
    must_repeat: Callable[[Item, Any, ShardError], bool] = lambda _item, _sent, _error: False


@dataclass(slots=True)
class _Unit(Generic[Item]):
    item: Item
    sent: Any = None
    losses: int = 0
    repeated: bool = False


def spread(
    workers: Workers, job: Job[Item], items: Iterable[Item]
) -> Generator[tuple[Item, Any | ShardError], None, None]:
    """Yield each item with its result, or the ShardError that it gave, in any order.

    Any other error ends the work, and so does closing the generator: what has not begun is cancelled. Raises
    ExecutorUnusable.
    """
    spreading = _Spreading(workers, job, items)
    try:
        yield from spreading.results()
    finally:
        spreading.running.drain()


class _Spreading(Generic[Item]):
    def __init__(self, workers: Workers, job: Job[Item], items: Iterable[Item]) -> None:
        self._workers, self._job = workers, job
        self._items = iter(items)
        self._exhausted = False
        self._lost: deque[_Unit[Item]] = deque()  # to be tried again, each alone
        self._suspected = False  # one of `_lost` has broken the executor
        self._ready: deque[tuple[Item, Any | ShardError]] = deque()
        self._seconds = 0.0  # that a unit takes, about
        self._count = self._barren = 0
        self._limit = workers.in_flight()
        self._options = options()
        self.running: InFlight[list[_Unit[Item]]] = InFlight()

    def results(self) -> Generator[tuple[Item, Any | ShardError], None, None]:
        """Yield each item with its result or error."""
        while True:
            self._fill()
            while self._ready:
                yield self._ready.popleft()
            if not self.running:
                if self._lost or not self._exhausted:
                    continue
                return
            self._settle(*self.running.next())

    # --- sending

    def _fill(self) -> None:
        while len(self.running) < (1 if self._suspected else self._limit) and not self._ready:
            batch = self._next_batch()
            if not batch:
                return
            self._send(batch)

    def _next_batch(self) -> list[_Unit[Item]]:
        if self._lost:
            return [self._lost.popleft()]
        if self._suspected:  # all of them have been tried
            self._suspected = False
        size = 1
        if self._seconds:
            size = max(1, min(int(TOGETHER_SECONDS / self._seconds), TOGETHER_MAX))
        batch: list[_Unit[Item]] = []
        for item in self._items:
            unit = _Unit(item)
            if self._prepare(unit):
                batch.append(unit)
            if len(batch) == size or self._ready:
                return batch
        self._exhausted = True
        return batch

    def _prepare(self, unit: _Unit[Item]) -> bool:
        """Make what is sent; False if the item has its result already, which is an error."""
        try:
            unit.sent = self._job.prepare(unit.item)
        except ShardError as error:
            self._ready.append((unit.item, error))
            return False
        return True

    def _send(self, units: list[_Unit[Item]]) -> None:
        batch = Batch(self._job.function, [unit.sent for unit in units], self._options)
        try:
            future = self._workers.submit(run, batch)
        except RuntimeError as error:  # it has broken, or was shut down since
            self._break(units, error, suspect=False)
        else:
            self.running.add(future, units)

    # --- receiving

    def _settle(self, future: Future[list[Outcome]], units: list[_Unit[Item]]) -> None:
        engine = self._workers.engine
        try:
            outcomes = future.result()
        except BrokenExecutor as error:
            self._break(units, error, suspect=True)
        except LOST + engine.lost as error:
            self._note_barren(error)
            for unit in units:
                self._lose(unit, error, TRIES if engine.retries and len(units) == 1 else 1)
        except WdsfsError:
            raise
        except Exception as error:  # of the engine: what it could not send, unpack or run there
            text = str(error).strip() or type(error).__name__
            raise ExecutorUnusable(
                f"--executor {self._workers.name}: a worker cannot run wdsfs: {text}; install this version there"
            ) from error
        else:
            self._barren = 0
            for unit, outcome in zip(units, outcomes, strict=True):
                self._take(unit, outcome)

    def _take(self, unit: _Unit[Item], outcome: Outcome) -> None:
        self._count += 1
        self._seconds = (self._seconds or outcome.seconds) * 0.9 + outcome.seconds * 0.1
        if self._count % WIDTH_EVERY == 0:
            self._limit = self._workers.in_flight()
        error = outcome.error
        if error is None:
            self._ready.append((unit.item, outcome.result))
        elif not isinstance(error, ShardError):
            raise error
        elif not unit.repeated and self._job.must_repeat(unit.item, unit.sent, error):
            unit.repeated = True
            if self._prepare(unit):
                self._lost.append(unit)
        else:
            self._ready.append((unit.item, error))

    # --- losses

    def _break(self, units: list[_Unit[Item]], error: Exception, suspect: bool) -> None:
        """Make a broken executor again, and try the units that were under way one by one.

        If these units were all that was under way, they are the suspect.
        """
        self._note_barren(error)
        log.warning("a worker of %s has died; its work is repeated", self._workers.name)
        alone = suspect and self._suspected and len(units) == 1
        lost = [units]
        for future, others in self.running.drain():
            if future.done() and not future.cancelled() and future.exception() is None:
                self._settle(future, others)
            else:
                lost.append(others)
        self._workers.renew()
        for unit in itertools.chain(*lost):
            self._lose(unit, error, 1 if alone else 0)
        self._suspected = True

    def _lose(self, unit: _Unit[Item], error: BaseException, losses: int) -> None:
        unit.losses += losses
        if unit.losses < TRIES:
            self._lost.append(unit)
            return
        text = f"the worker that worked on it has died, {TRIES} times or more ({type(error).__name__})"
        name = self._job.name(unit.item)
        self._ready.append((unit.item, UnreadableShard(f"{name}: {text}; is there enough memory?")))

    def _note_barren(self, error: BaseException) -> None:
        self._barren += 1
        if self._barren > BARREN:
            raise ExecutorUnusable(
                f"--executor {self._workers.name}: all its workers die ({type(error).__name__}); what is finished "
                "is kept: repeat the command when it works again"
            ) from error
