"""Shared memory of the processes of a mount: counters of each worker, and requests at which workers have died.

Plain shared memory, made before the workers are forked: nothing is lost with a worker, and no process waits for
another. Words are written whole. If a process sees a word late, a number in `wdsfs status` is slightly wrong.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from wdsfs.fuse.pass_notes import PassNotes

SLOTS = 64  # workers at a time
KINDS = (
    "lookup",
    "getattr",
    "readlink",
    "read",
    "readdir",
    "getxattr",
    "listxattr",
    "statfs",
    "forget",
    "write",
    "change",
    "other",
)

# Words of a slot after the counters of the kinds: totals, then the state of the worker.
_BYTES_READ, _FAILED, _DONE, _SINCE, _REQUEST, _WAITING, _OPEN_FILES, _PID, _RETIRED = range(
    len(KINDS), len(KINDS) + 9
)
_WORDS = _RETIRED + 1

# Words of the supervisor: its pid, that of the process that follows changes, and the number of replaced workers.
_SUPERVISOR, _HELPER, _RESTARTS = range(3)

# Suspects are requests during which a worker has died. Each has the request, the deaths in a row, and the
# time (ns) until which it counts. The first word is their number.
_SUSPECTS = 16
_SUSPECT_WORDS = 3
DEADLY = 3  # deaths in a row after which a request gets EIO
DEADLY_NS = 60 * 10**9  # seconds for which such a request gets EIO; then it is tried again


class Hits(NamedTuple):
    """Reads of remote shards that workers have answered from the cache."""

    reads: int
    bytes: int


class Board:
    """The shared memory of a mount; `stores` are the stores of its remote shards."""

    def __init__(self, stores: Sequence[str] = ()) -> None:
        self.passes: PassNotes | None = None  # of a mount with a pusher
        # After the words of a slot, two for each store: hits and their bytes.
        self._stores = {store: _WORDS + 2 * number for number, store in enumerate(stores)}
        self._size = _WORDS + 2 * len(stores)
        slots, suspects = SLOTS * self._size * 8, (1 + _SUSPECTS * _SUSPECT_WORDS) * 8
        self._memory = memoryview(mmap.mmap(-1, slots + suspects + (_RESTARTS + 1) * 8))
        self._words = self._memory[:slots].cast("q")
        self._suspects = self._memory[slots : slots + suspects].cast("q")
        self._supervised = self._memory[slots + suspects :].cast("q")

    def slot(self, number: int) -> Slot:
        """Return the words of the worker with this number."""
        return Slot(self._words[number * self._size : (number + 1) * self._size], self._stores)

    def counts(self) -> dict[str, int]:
        """Return requests by kind, over all workers since the start of the mount."""
        counts = {kind: self._total(at) for at, kind in enumerate(KINDS)}
        return {kind: count for kind, count in counts.items() if count}

    def _total(self, word: int) -> int:
        return sum(self._words[word :: self._size])

    @property
    def hits(self) -> dict[str, Hits]:
        """Reads that workers have answered from the cache, by store; empty in a mount without remote shards."""
        return {store: Hits(self._total(at), self._total(at + 1)) for store, at in self._stores.items()}

    @property
    def bytes_read(self) -> int:
        """The bytes that the kernel has read."""
        return self._total(_BYTES_READ)

    @property
    def failures(self) -> int:
        """The number of requests that failed."""
        return self._total(_FAILED)

    @property
    def done(self) -> int:
        """The number of requests that were answered: while it grows, the mount makes progress."""
        return self._total(_DONE)

    @property
    def busy(self) -> bool:
        """True if any worker is at a request."""
        return any(self._words[_SINCE :: self._size])

    @property
    def waiting(self) -> int:
        """The number of workers that wait for a disk."""
        return self._total(_WAITING)

    @property
    def open_files(self) -> int:
        """The number of open shards, counted in each worker."""
        return self._total(_OPEN_FILES)

    @property
    def restarts(self) -> int:
        """The number of workers that were replaced."""
        return self._supervised[_RESTARTS]

    def replaced(self, workers: int) -> None:
        """Add to the number of replaced workers."""
        self._supervised[_RESTARTS] += workers

    @property
    def processes(self) -> list[int]:
        """The pids of the supervisor and of the current workers."""
        return [pid for pid in (self._supervised[_SUPERVISOR], *self._words[_PID :: self._size]) if pid]

    def supervise(self, pid: int) -> None:
        """Note the pid of the supervisor."""
        self._supervised[_SUPERVISOR] = pid

    @property
    def helper(self) -> int:
        """The pid of the process that follows changes of shards, 0 for none."""
        return self._supervised[_HELPER]

    @helper.setter
    def helper(self, pid: int) -> None:
        self._supervised[_HELPER] = pid

    # --- requests at which workers have died

    @property
    def watching(self) -> bool:
        """True if any request is a suspect. A worker asks this first: it is cheap."""
        return self._suspects[0] != 0

    def blame(self, request: int, started: int | None = None) -> int:
        """Count the death of a worker at this request; return the number of such deaths since its last reply.

        The death of a worker that was started (`started`, monotonic ns) before the last such death does not count,
        and 0 is returned. If all workers are killed at once, they die one after the other at the request that the
        kernel sends again, but the request is not the cause.
        """
        now = time.monotonic_ns()
        at = self._suspect(request)
        if at is None:  # evict the suspect that expires first
            at = min(range(1, len(self._suspects), _SUSPECT_WORDS), key=lambda at: self._suspects[at + 2])
            self._suspects[at], self._suspects[at + 1] = request, 0
        elif started is not None and started <= self._suspects[at + 2] - DEADLY_NS:
            return 0
        self._suspects[at + 1] += 1
        self._suspects[at + 2] = now + DEADLY_NS
        self._count_suspects()
        return self._suspects[at + 1]

    def is_deadly(self, request: int) -> bool:
        """Return True if this request must be refused for now."""
        at = self._suspect(request)
        if at is None or self._suspects[at + 1] < DEADLY:
            return False
        if time.monotonic_ns() < self._suspects[at + 2]:
            return True
        self._acquit(at)
        return False

    def absolve(self, request: int) -> None:
        """Forget the deaths at an answered request, unless they make it refused now."""
        at = self._suspect(request)
        if at is not None and self._suspects[at + 1] < DEADLY:
            self._acquit(at)

    def _acquit(self, at: int) -> None:
        self._suspects[at + 1] = self._suspects[at + 2] = 0
        self._count_suspects()

    def _suspect(self, request: int) -> int | None:
        for at in range(1, len(self._suspects), _SUSPECT_WORDS):
            if self._suspects[at] == request and self._suspects[at + 1]:
                return at
        return None

    def _count_suspects(self) -> None:
        self._suspects[0] = sum(deaths > 0 for deaths in self._suspects[2::_SUSPECT_WORDS])


class Slot:
    """The words of one worker, which writes them; all processes read them."""

    __slots__ = ("_stores", "_words")

    def __init__(self, words: memoryview, stores: Mapping[str, int]) -> None:
        self._words, self._stores = words, stores

    def start(self, pid: int) -> None:
        """Note the pid of the worker."""
        self._words[_PID] = pid

    def begin(self, kind: int, request: int = 0) -> None:
        """Note the start of a request of this kind; `request` is a number that equal requests share."""
        words = self._words
        words[kind] += 1
        words[_REQUEST] = request
        words[_SINCE] = time.monotonic_ns()

    def end(self) -> None:
        """Note the end of the request, which is then counted."""
        words = self._words
        words[_SINCE] = 0
        words[_DONE] += 1

    def failed(self) -> None:
        """Count a request that failed."""
        self._words[_FAILED] += 1

    def read(self, count: int) -> None:
        """Count bytes that the kernel has read."""
        self._words[_BYTES_READ] += count

    def hit(self, store: str, count: int) -> None:
        """Note a read of a remote shard that was answered from the cache."""
        at = self._stores.get(store)
        if at is not None:  # None: a commit has added the store of the shard
            self._words[at] += 1
            self._words[at + 1] += count

    def files(self, count: int) -> None:
        """Note the number of shards that the worker has open."""
        self._words[_OPEN_FILES] = count

    def wait(self, waiting: bool) -> None:
        """Note that the worker begins, or ends, to wait for a disk or to index a shard."""
        self._words[_WAITING] = waiting
        self._words[_SINCE] = time.monotonic_ns()  # the watchdog counts from the end of the wait

    @property
    def waiting(self) -> bool:
        """True if the worker waits for a disk or indexes a shard."""
        return bool(self._words[_WAITING])

    def retire(self) -> None:
        """Tell the worker to end after its current request. Called by the supervisor."""
        self._words[_RETIRED] = 1

    @property
    def retirement(self) -> memoryview[int]:
        """One word, which is not zero when the worker has to end. It is read before each request."""
        return self._words[_RETIRED : _RETIRED + 1]

    @property
    def busy_seconds(self) -> float:
        """The time (s) that the worker has worked at its request without waiting for a disk."""
        since = self._words[_SINCE]
        return 0.0 if not since or self.waiting else (time.monotonic_ns() - since) / 1e9

    @property
    def request(self) -> int | None:
        """The request that the worker is at, None if it is idle."""
        return self._words[_REQUEST] if self._words[_SINCE] else None

    def reset(self) -> None:
        """Clear the state of an ended worker, but not its totals."""
        for word in (_SINCE, _WAITING, _OPEN_FILES, _PID, _RETIRED):
            self._words[word] = 0
