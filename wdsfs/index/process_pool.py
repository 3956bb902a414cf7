"""Work on each shard by several processes: results as they come, memory flat, an orderly interrupt.

The work is a function of a path (or of another unit) that touches nothing else, so it can be done anywhere: by the
workers of a cluster (`index/spread.py`), or here. Here that is a thread for each of some processes; a thread
hands its process one unit at a time, through pipes.

Threads of this process read remote shards: it has the connection to the fetcher, with the secrets of the stores,
and waits for the network most of the time.

Not a pool of `multiprocessing`: its helpers (a server to fork from, a tracker of semaphores) live as long as
this process and hold its standard output open, its workers survive a parent that is killed, and an interrupt would
wait for them. Here every process sees the end of its pipe.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from wdsfs import host, shared_settings
from wdsfs.cluster_workers import Workers
from wdsfs.daemon_threads import DaemonThreads
from wdsfs.door.shard_door import DOOR
from wdsfs.door.urls import is_output, is_remote
from wdsfs.errors import ShardError, StaleMount, UnreadableShard
from wdsfs.index.spread import InFlight, Job, SeenShard, on_shard, spread
from wdsfs.shards import Fingerprint, Shard, wait_for_tick

ALONE_BYTES = 64 << 20  # less work than this is finished here before other processes have started
RESULTS_AHEAD = 4  # results per process that may wait to be taken
TOGETHER = 8  # remote shards that are worked at at the same time


_START = (
    "import os, sys, pickle; sys.stdin.buffer.peek(1) or os._exit(0); "  # the pipe ends if the parent has died
    "sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from wdsfs.index import process_pool; process_pool.work()"
)

# Modules are imported from the same places as here, but without the start of `site`, which an editable
# installation needs.
_IMPORT_PATH = [str(Path(__file__).parents[2]), *sys.path]

Item = TypeVar("Item")
Result = TypeVar("Result")
Results = Generator[tuple[Shard, Result | ShardError], None, None]


def together(shards: Sequence[Shard], workers: Workers | None = None) -> int:
    """Return how many of these shards one machine reads from stores at the same time, at least 1."""
    if workers is not None:
        return 1
    return min(max(sum(is_remote(shard.path) for shard in shards), 1), TOGETHER)


def each(
    function: Callable[[Any], Result],
    shards: Sequence[Shard],
    jobs: int,
    workers: Workers | None = None,
    argument: Callable[[Shard], Any] = lambda shard: shard.path,
    adopt: Callable[[Result, Fingerprint], Result] = lambda result, _: result,
) -> Results[Result]:
    """Yield each shard with `function(argument(shard))`, or with the ShardError that this raised, in any order.

    `function` must be importable by its name; `argument` is called here. Other exceptions end all the work, and so
    does closing the generator. Small sets are handled in this process. With `workers` the work is theirs, as
    `spread.py` says; `adopt` then makes a result ours: it gets the fingerprint that the shard has here.
    """
    if workers is not None:
        local = [shard for shard in shards if is_output(shard.path)]  # only this machine can read it
        elsewhere = [shard for shard in shards if not is_output(shard.path)]
        yield from _in_threads(function, local, argument)
        yield from _by_workers(workers, function, elsewhere, argument, adopt)
        return
    remote = [shard for shard in shards if is_remote(shard.path)]
    if remote:
        shards = [shard for shard in shards if not is_remote(shard.path)]
        yield from _in_threads(function, remote, argument)
    if not _bytes_exceed(shards, ALONE_BYTES):
        jobs = 1
    yield from units(function, shards, jobs, name=lambda shard: os.fsdecode(shard.path), prepare=argument)


def units(
    function: Callable[[Any], Result],
    items: Sequence[Item],
    jobs: int,
    workers: Workers | None = None,
    name: Callable[[Item], str] = str,
    prepare: Callable[[Item], Any] = lambda item: item,
) -> Generator[tuple[Item, Result | ShardError], None, None]:
    """Yield each item with `function(prepare(item))`, as `each`: by `jobs` processes here or by `workers`.

    `name` is what messages call an item.
    """
    if workers is not None:
        yield from spread(workers, Job(function, prepare, name), items)
    elif jobs == 1 or len(items) < 2:
        for item in items:
            yield item, _try(lambda item: function(prepare(item)), item)
    else:
        yield from _in_processes(function, items, min(jobs, len(items)), name, prepare)


def _by_workers(
    workers: Workers,
    function: Callable[[Any], Result],
    shards: Sequence[Shard],
    argument: Callable[[Shard], Any],
    adopt: Callable[[Result, Fingerprint], Result],
) -> Generator[tuple[Shard, Result | ShardError], None, None]:
    """Yield each shard with `adopt(function(argument(shard)), fingerprint)`, or with the ShardError it gave.

    The fingerprint is the one that the shard had here before the worker looked at it. A worker that sees another
    shard gives StaleMount. Raises as `spread`.
    """
    seen: dict[bytes, Fingerprint] = {}

    def prepare(shard: Shard) -> tuple[Callable[[Any], Any], SeenShard, Any]:
        seen_shard = seen_here(shard.path)
        seen[shard.path] = seen_shard.fingerprint
        return function, seen_shard, argument(shard)

    def has_changed(shard: Shard, sent: tuple[Any, SeenShard, Any], error: ShardError) -> bool:
        """Return True if the shard has changed since it was looked at here."""
        return isinstance(error, StaleMount) and not sent[1].is_same(DOOR.look_again(shard.path))

    job = Job(on_shard, prepare, lambda shard: os.fsdecode(shard.path), has_changed)
    for shard, result in spread(workers, job, shards):
        fingerprint = seen.pop(shard.path, None)
        if isinstance(result, ShardError) or fingerprint is None:
            yield shard, result
            continue
        try:
            ours: Result | ShardError = adopt(result, fingerprint)
        except StaleMount as error:
            ours = StaleMount(f"{os.fsdecode(shard.path)}: {error}")
        yield shard, ours


def seen_here(path: bytes) -> SeenShard:
    """Return the shard at `path` as this machine sees it, for a worker to compare. Raises ShardError."""
    if not is_remote(path):
        return SeenShard(path, _fingerprint_after_tick(path))
    url = DOOR.remote.url_of(path)
    return SeenShard(path, DOOR.look(path), url if url.query or url.user else None)


def _fingerprint_after_tick(path: bytes) -> Fingerprint:
    """Return the fingerprint of a file, which another write from now on changes."""
    with contextlib.suppress(OSError):  # the fingerprint has this time
        wait_for_tick(os.stat(path))
    return Fingerprint.at(path)


def _bytes_exceed(shards: Sequence[Shard], limit: int) -> bool:
    total = 0
    for shard in shards:
        try:
            total += os.stat(shard.path).st_size
        except OSError:
            continue
        if total > limit:
            return True
    return False


def _try(function: Callable[[Any], Result], unit: Any) -> Result | ShardError:
    try:
        return function(unit)
    except ShardError as error:
        return error


def _through(
    executor: Executor,
    call: Callable[[Item, Any], Result | ShardError],
    items: Sequence[Item],
    jobs: int,
    prepare: Callable[[Item], Any],
) -> Generator[tuple[Item, Result | ShardError], None, None]:
    queue = iter(items)
    running: InFlight[Item] = InFlight()
    try:
        while True:
            for item in itertools.islice(queue, RESULTS_AHEAD * jobs - len(running)):
                try:
                    unit = prepare(item)
                except ShardError as error:
                    yield item, error
                else:
                    running.add(executor.submit(call, item, unit), item)
            if not running:
                return
            future, item = running.next()
            yield item, future.result()
    finally:
        running.drain()


def _in_threads(
    function: Callable[[Any], Result], shards: Sequence[Shard], argument: Callable[[Shard], Any]
) -> Results[Result]:
    if not shards:
        return

    def call(_: Shard, unit: Any) -> Result | ShardError:
        return _try(function, unit)

    threads = DaemonThreads(min(TOGETHER, len(shards)))
    try:
        yield from _through(threads, call, shards, TOGETHER, argument)
    finally:
        threads.shutdown()


def _in_processes(
    function: Callable[[Any], Result],
    items: Sequence[Item],
    jobs: int,
    name: Callable[[Item], str],
    prepare: Callable[[Item], Any],
) -> Generator[tuple[Item, Result | ShardError], None, None]:
    processes = _Processes()
    threads = ThreadPoolExecutor(jobs, "pool")

    def call(item: Item, unit: Any) -> Result | ShardError:
        try:
            return processes.call(function, unit, lambda: name(item))
        except ShardError as error:
            return error

    try:
        yield from _through(threads, call, items, jobs, prepare)
    finally:
        processes.kill()
        threads.shutdown(cancel_futures=True)
        processes.close()


class _Processes:
    """A process for each calling thread."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._lock = threading.Lock()
        self._all: list[subprocess.Popen[bytes]] = []
        self._killed = False

    def call(self, function: Callable[[Any], Result], unit: Any, name: Callable[[], str]) -> Result:
        """Return `function(unit)`, called in this thread's process. Raises what that raises."""
        process = self._own.__dict__.get("process") or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump((function, unit), process.stdin)
            process.stdin.flush()
            result, error = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            self._own.process = None  # the next shard gets another
            code = self._reap(process)
            if code >= 0:
                raise RuntimeError(f"a process of the pool has ended by itself, with exit code {code}") from None
            how = signal.Signals(-code).name
            text = f"the process that worked on it was killed ({how}); is there enough memory?"
            raise UnreadableShard(f"{name()}: {text}") from None
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]  # what `function` has returned

    def _start(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._killed:
                raise RuntimeError("the pool has ended")
            process = subprocess.Popen(
                # Isolated, so that nothing is imported from the working directory; then with our own path.
                [sys.executable, "-I", "-S", "-c", _START],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **shared_settings.variables()},
                process_group=0,  # an interrupt is handled by the parent, which ends the others
            )
            self._all.append(process)
        assert process.stdin is not None
        pickle.dump(_IMPORT_PATH, process.stdin)
        self._own.process = process
        return process

    def kill(self) -> None:
        """End all processes at once, also in the middle of their work, which leaves no traces."""
        with self._lock:
            self._killed = True
            for process in self._all:
                process.kill()

    def close(self) -> None:
        """Wait for the end of all processes."""
        while self._all:
            self._reap(self._all[-1])

    def _reap(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the end of a process; return its exit code."""
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):  # data that it did not read any more
                stream.close()
        code = process.wait()
        with self._lock:
            self._all.remove(process)
        return code


def work() -> None:
    """Run the main loop of a process of the pool, until its parent closes the pipe.

    When the parent dies it ends at once, also in the middle of a shard.
    """
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    host.end_with_parent()
    pipe = select.poll()
    pipe.register(requests, 0)
    if pipe.poll(0):  # it had died before
        os._exit(0)
    while True:
        try:
            function, unit = pickle.load(requests)
            outcome = _outcome(function, unit)
            pickle.dump(outcome, replies)
            replies.flush()
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            os._exit(0)  # nobody reads the rest


def _outcome(function: Callable[[Any], Any], unit: Any) -> tuple[Any, BaseException | None]:
    try:
        return function(unit), None
    except Exception as error:
        return None, error
