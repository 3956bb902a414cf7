"""Per-shard work in several processes: results as they come, memory flat, an interrupt in good order.

The work is a function of a path that touches nothing else, so any `concurrent.futures.Executor` can run it. Here
that is a thread for each of some processes; a thread hands its process one path at a time, through pipes.

Not a pool of `multiprocessing`: what that needs besides (a server to fork from, a tracker of semaphores) lives
as long as this process and holds its standard output open, its workers survive a parent that is killed, and an
interrupt would wait for them. The end of a pipe reaches everybody.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

from wdsfs.errors import ShardError, UnreadableShard
from wdsfs.spec.expand import Shard

ALONE_BYTES = 64 << 20  # less work than this is done sooner in this process than others start
AHEAD = 4  # results per process that may wait to be taken

_START = (
    "import sys, pickle; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from wdsfs.index import process_pool; process_pool.work()"
)

# What is imported from where: as here, but without the start of `site`, which an editable installation needs.
_IMPORT_PATH = [str(Path(__file__).parents[2]), *sys.path]

Result = TypeVar("Result")
Results = Generator[tuple[Shard, Result | ShardError], None, None]


def default_jobs() -> int:
    """As many processes as this one may use cores."""
    return len(os.sched_getaffinity(0))


def each(
    function: Callable[[bytes], Result], shards: Sequence[Shard], jobs: int, executor: Executor | None = None
) -> Results[Result]:
    """Yield each shard with `function(shard.path)`, or with the ShardError that this raised, in any order.

    `function` must be importable by its name. Other exceptions end the whole, and so does closing the generator.
    Small sets are worked on in this process.
    """
    if executor is not None:
        yield from _through(executor, function, shards, jobs)
    elif jobs == 1 or len(shards) < 2 or not _bytes_exceed(shards, ALONE_BYTES):
        for one in shards:
            yield one, _try(function, one.path)
    else:
        yield from _in_processes(function, shards, min(jobs, len(shards)))


def _bytes_exceed(shards: Sequence[Shard], limit: int) -> bool:
    total = 0
    for one in shards:
        try:
            total += os.stat(one.path).st_size
        except OSError:
            continue
        if total > limit:
            return True
    return False


def _try(function: Callable[[bytes], Result], path: bytes) -> Result | ShardError:
    try:
        return function(path)
    except ShardError as error:
        return error


def _through(
    executor: Executor, function: Callable[[bytes], Result], shards: Sequence[Shard], jobs: int
) -> Results[Result]:
    queue = iter(shards)
    running: dict[Future[Result | ShardError], Shard] = {}
    try:
        while True:
            for one in itertools.islice(queue, AHEAD * jobs - len(running)):
                running[executor.submit(_try, function, one.path)] = one
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()
    finally:
        for future in running:
            future.cancel()


def _in_processes(function: Callable[[bytes], Result], shards: Sequence[Shard], jobs: int) -> Results[Result]:
    processes = _Processes()
    threads = ThreadPoolExecutor(jobs, "pool")

    def call(path: bytes) -> Result:
        return processes.call(function, path)

    try:
        yield from _through(threads, call, shards, jobs)
    finally:
        processes.kill()
        threads.shutdown(cancel_futures=True)
        processes.close()


class _Processes:
    """A process for each thread that calls."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._lock = threading.Lock()
        self._all: list[subprocess.Popen[bytes]] = []
        self._killed = False

    def call(self, function: Callable[[bytes], Result], path: bytes) -> Result:
        """`function(path)` in this thread's process. Raises what that raises."""
        process = self._own.__dict__.get("process") or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump((function, path), process.stdin)
            process.stdin.flush()
            result, error = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            self._own.process = None  # the next shard gets another
            code = self._bury(process)
            if code >= 0:
                raise RuntimeError(f"a process of the pool has ended by itself, with exit code {code}") from None
            how = signal.Signals(-code).name
            text = (
                f"{os.fsdecode(path)}: the process that worked on it was killed ({how}); is there enough memory?"
            )
            raise UnreadableShard(text) from None
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
                process_group=0,  # an interrupt is for the process that the user talks to; it ends the others
            )
            self._all.append(process)
        assert process.stdin is not None
        pickle.dump(_IMPORT_PATH, process.stdin)
        self._own.process = process
        return process

    def kill(self) -> None:
        """End all at once, also in the middle of their work: it is a function of a path and leaves nothing."""
        with self._lock:
            self._killed = True
            for process in self._all:
                process.kill()

    def close(self) -> None:
        while self._all:
            self._bury(self._all[-1])

    def _bury(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the end of a process; returns its code."""
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):  # what it did not take any more
                stream.close()
        code = process.wait()
        with self._lock:
            self._all.remove(process)
        return code


def work() -> None:
    """What a process of the pool does, until its pipe ends because its parent wants that, or is dead."""
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            function, path = pickle.load(requests)
            outcome = _outcome(function, path)
            pickle.dump(outcome, replies)
            replies.flush()
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            os._exit(0)  # with nobody there to take what is not sent yet


def _outcome(function: Callable[[bytes], Any], path: bytes) -> tuple[Any, BaseException | None]:
    try:
        return function(path), None
    except Exception as error:
        return None, error
