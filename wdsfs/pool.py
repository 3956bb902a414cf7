"""Per-shard work in several processes: results as they come, memory flat, an interrupt in good order.

The work is a function of a path that touches nothing else, so any `concurrent.futures.Executor` can run it;
today that is a pool of processes on this machine.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from typing import TypeVar

from wdsfs.errors import ShardError
from wdsfs.spec import Shard

ALONE_BYTES = 64 << 20  # less work than this is done sooner in this process than a pool starts
AHEAD = 4  # results per process that may wait to be taken

Result = TypeVar("Result")


def default_jobs() -> int:
    """As many processes as this one may use cores."""
    return len(os.sched_getaffinity(0))


def each(
    function: Callable[[bytes], Result], shards: Sequence[Shard], jobs: int, executor: Executor | None = None
) -> Iterator[tuple[Shard, Result | ShardError]]:
    """Yield each shard with `function(shard.path)`, or with the ShardError that this raised, in any order.

    Other exceptions end the whole. Small sets are worked on in this process.
    """
    if executor is not None:
        yield from _through(executor, function, shards, jobs)
    elif jobs == 1 or len(shards) < 2 or _bytes_exceed(shards, ALONE_BYTES) is False:
        for one in shards:
            yield one, _try(function, one.path)
    else:
        # Forking a process that runs threads (a progress bar) is not safe: start from a clean server.
        context = multiprocessing.get_context("forkserver")
        pool = ProcessPoolExecutor(min(jobs, len(shards)), mp_context=context, initializer=_ignore_interrupts)
        try:
            yield from _through(pool, function, shards, jobs)
        finally:
            pool.shutdown(cancel_futures=True)


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


def _ignore_interrupts() -> None:
    """An interrupt is for the process that the user talks to; that one ends the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _through(
    executor: Executor, function: Callable[[bytes], Result], shards: Sequence[Shard], jobs: int
) -> Iterator[tuple[Shard, Result | ShardError]]:
    queue = iter(shards)
    running: dict[Future[Result | ShardError], Shard] = {}
    while True:
        for one in itertools.islice(queue, AHEAD * jobs - len(running)):
            running[executor.submit(_try, function, one.path)] = one
        if not running:
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            yield running.pop(future), future.result()
