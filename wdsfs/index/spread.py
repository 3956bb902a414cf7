"""Units of work spread over workers: batches, retries, the meaning of a lost worker, and the work in a worker.

Small units are sent several at a time, so that a message costs less than the work. A unit whose worker has died is
tried again, alone; one that has lost `TRIES` workers is reported. When the whole executor breaks (as a pool of
processes does when one of them is killed), it is made again, and then the units that were under way are tried one
by one, which shows the one that kills. Futures are taken in the order in which they finish, by callbacks into a
queue: `concurrent.futures.wait` looks at every future each time, which takes longer than the work when there are
thousands.

The driver's side is single-threaded: it runs in the thread of the command. A worker (`run`) is any process of the
engine: it may serve other commands, of other options, before and at the same time. So the shared settings of the
command come with each batch, and batches of different settings wait for each other.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import pickle
import socket
import threading
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from wdsfs import __version__, shared_settings
from wdsfs.cluster_workers import LOST, Workers
from wdsfs.door.shard_door import DOOR
from wdsfs.door.urls import Url, is_remote
from wdsfs.errors import ExecutorUnusable, MissingShard, ShardError, StaleMount, UnreadableShard, WdsfsError
from wdsfs.shards import Fingerprint
from wdsfs.shared_settings import setting

# Options that all processes of a command share. No secret is among them: `--store-option` takes
# none, and configuration files and credentials are read where the work is done.
_OPTIONS = ("STORE_OPTIONS", "ALLOW_PIPE", "TRUST", "CACHE_SIZE", "FETCH_MEMORY", "UNPACK", "UNPACK_MEMORY")
_PLACES = ("INDEX_DIR", "CACHE_DIR")  # a worker that has its own keeps it
_OWN_PLACES = frozenset(filter(setting, _PLACES))


class Batch:
    """Units for a function. Its repr, which engines write to their logs, shows no unit: one may hold secrets."""

    __slots__ = ("environment", "function", "units", "version")

    def __init__(
        self, function: Callable[[Any], Any], units: Sequence[Any], environment: Mapping[str, str | None]
    ) -> None:
        self.version, self.environment = version(), environment
        self.function, self.units = function, units

    def __repr__(self) -> str:
        return f"<{len(self.units)} units of wdsfs>"


class Outcome(NamedTuple):
    """Outcome of a unit: its result, or the error that the function raised, and the time it took (seconds)."""

    result: Any
    error: Exception | None
    seconds: float


class SeenShard(NamedTuple):
    """A shard as the driver sees it; `url` is its address if the path leaves out a part of that."""

    path: bytes
    fingerprint: Fingerprint
    url: Url | None = None

    def is_same(self, other: Fingerprint) -> bool:
        """Return True if another machine sees the same content.

        Inode and ctime belong to a machine, ETags to all.
        """
        return self.fingerprint == other if is_remote(self.path) else self.fingerprint[:2] == other[:2]


def options() -> dict[str, str | None]:
    """Return the settings of this command that its workers need, None for one that is not set."""
    return {name: setting(name) or None for name in (*_OPTIONS, *_PLACES)}


def run(batch: Batch) -> list[Outcome]:
    """Work at the units of a batch, one after another. Raises ExecutorUnusable."""
    if batch.version != version():
        raise ExecutorUnusable(
            f"{here()} has wdsfs {version()}, and this command {batch.version}: install the same version there, "
            "and start the workers again"
        )
    with _options.held(batch.environment):
        return [_outcome(batch.function, unit) for unit in batch.units]


@functools.cache
def version() -> str:
    """Return the version of wdsfs in this process, with a checksum of its sources."""
    total = 0
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        total = zlib.crc32(file.read_bytes(), total)
    return f"{__version__}+{total:08x}"


def here() -> str:
    """Return the name of this worker, for messages."""
    return f"the worker on {socket.gethostname()}"


def on_shard(unit: tuple[Callable[[Any], Any], SeenShard, Any]) -> Any:
    """Call a function with its argument if this worker sees the shard that the driver sees.

    Raises StaleMount, UnreadableShard, and what the function raises.
    """
    function, seen, argument = unit
    agree(seen)
    return function(argument)


def agree(seen: SeenShard) -> Fingerprint:
    """Check that this worker sees the driver's shard; return its fingerprint here.

    Raises StaleMount, UnreadableShard.
    """
    if seen.url is not None:
        DOOR.remote.path_of(seen.url)
    shown = os.fsdecode(seen.path)
    try:
        now = DOOR.look(seen.path)
        if not seen.is_same(now):
            now = DOOR.look_again(seen.path)  # what this machine knows of an object may be old
    except MissingShard as error:
        if is_remote(seen.path):
            raise
        raise UnreadableShard(f"{shown}: {here()} has no such file: workers need the same paths") from error
    if not seen.is_same(now):
        raise StaleMount(
            f"{shown}: {here()} sees another file ({now.size:,} bytes, this machine {seen.fingerprint.size:,}; "
            "or another time): check that it has the same file system mounted, and not a stale copy"
        )
    return now


def _outcome(function: Callable[[Any], Any], unit: Any) -> Outcome:
    since = time.perf_counter()
    try:
        result, error = function(unit), None
    except Exception as raised:
        result, error = None, _portable(raised)
    return Outcome(result, error, time.perf_counter() - since)


def _portable(error: Exception) -> Exception:
    """Return an error that can be pickled; of a bug also where it was raised."""
    if not isinstance(error, WdsfsError):
        error.add_note(f"on {here()}:\n" + "".join(traceback.format_exception(error)))
    error.__cause__ = error.__context__ = None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an exception of any library, with any constructor
        return RuntimeError("".join(traceback.format_exception(error)))
    return error


class _Options:
    """The options of the batches in work; batches with other options wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users = 0
        self._environment: Mapping[str, str | None] = {}

    @contextlib.contextmanager
    def held(self, environment: Mapping[str, str | None]) -> Iterator[None]:
        """Apply these options for the block."""
        with self._changed:
            self._changed.wait_for(lambda: not self._users or self._environment == environment)
            if self._environment != environment:
                self._apply(environment)
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def _apply(self, environment: Mapping[str, str | None]) -> None:
        changed = False
        for name, value in environment.items():
            if setting(name) == (value or "") or name in _OWN_PLACES or (value is None and name in _PLACES):
                continue
            changed = True
            shared_settings.choose(name, value or "")
        self._environment = environment
        if changed:
            DOOR.close()  # its fetcher has the earlier options


_options = _Options()


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

    Any other error ends the work, and so does closing the generator: units that have not begun are cancelled.
    Raises ExecutorUnusable.
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
        self._to_repeat: deque[_Unit[Item]] = deque()  # to be tried again, each alone
        self._suspected = False  # one of `_to_repeat` has broken the executor
        self._ready: deque[tuple[Item, Any | ShardError]] = deque()
        self._seconds = 0.0  # seconds that a unit takes, about
        self._count = self._losses_in_row = 0
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
                if self._to_repeat or not self._exhausted:
                    continue
                return
            self._receive(*self.running.next())

    # --- sending

    def _fill(self) -> None:
        while len(self.running) < (1 if self._suspected else self._limit) and not self._ready:
            batch = self._next_batch()
            if not batch:
                return
            self._send(batch)

    def _next_batch(self) -> list[_Unit[Item]]:
        if self._to_repeat:
            return [self._to_repeat.popleft()]
        self._suspected = False  # all of them have been tried
        size = max(1, min(int(TOGETHER_SECONDS / self._seconds), TOGETHER_MAX)) if self._seconds else 1
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
        """Make the unit of an item; False if that raises an error, which is the item's result then."""
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

    def _receive(self, future: Future[list[Outcome]], units: list[_Unit[Item]]) -> None:
        engine = self._workers.engine
        try:
            outcomes = future.result()
        except BrokenExecutor as error:
            self._break(units, error, suspect=True)
        except LOST + engine.lost as error:
            self._count_loss(error)
            for unit in units:
                self._repeat_or_report(unit, error, TRIES if engine.retries and len(units) == 1 else 1)
        except WdsfsError:
            raise
        except Exception as error:  # of the engine: what it could not send, unpack or run there
            text = str(error).strip() or type(error).__name__
            raise ExecutorUnusable(
                f"--executor {self._workers.name}: a worker cannot run wdsfs: {text}; install this version there"
            ) from error
        else:
            self._losses_in_row = 0
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
                self._to_repeat.append(unit)
        else:
            self._ready.append((unit.item, error))

    # --- losses

    def _break(self, units: list[_Unit[Item]], error: Exception, suspect: bool) -> None:
        """Make a broken executor again, and try the units that were under way one by one.

        If these units were all that was under way, they are the suspect.
        """
        self._count_loss(error)
        log.warning("a worker of %s has died: repeating its work", self._workers.name)
        alone = suspect and self._suspected and len(units) == 1
        lost = [units]
        for future, others in self.running.drain():
            if future.done() and not future.cancelled() and future.exception() is None:
                self._receive(future, others)
            else:
                lost.append(others)
        self._workers.renew()
        for unit in itertools.chain(*lost):
            self._repeat_or_report(unit, error, 1 if alone else 0)
        self._suspected = True

    def _repeat_or_report(self, unit: _Unit[Item], error: BaseException, losses: int) -> None:
        unit.losses += losses
        if unit.losses < TRIES:
            self._to_repeat.append(unit)
            return
        text = f"the worker that worked on it has died, {TRIES} times or more ({type(error).__name__})"
        name = self._job.name(unit.item)
        self._ready.append((unit.item, UnreadableShard(f"{name}: {text}; is there enough memory?")))

    def _count_loss(self, error: BaseException) -> None:
        self._losses_in_row += 1
        if self._losses_in_row > BARREN:
            raise ExecutorUnusable(
                f"--executor {self._workers.name}: all its workers die ({type(error).__name__}); finished work "
                "is kept: repeat the command when the executor works again"
            ) from error
