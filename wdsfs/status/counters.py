"""What the processes of a mount tell each other: counters of each worker, and which requests workers have died of.

Plain shared memory, made before the workers are forked, so that nothing is lost with a worker and nobody waits
for anybody. Words are written whole; one that another process sees late costs a wrong digit in `wdsfs status`.
"""

from __future__ import annotations

import mmap
import time

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

# Words of a slot behind the counters of the kinds: totals, then what the worker is doing now.
_BYTES_READ, _FAILED, _DONE, _SINCE, _REQUEST, _WAITING, _FILES, _PID = range(len(KINDS), len(KINDS) + 8)
_WORDS = _PID + 1

# What the supervisor has to tell: itself, the process that serves nothing, and how many workers were replaced.
_SUPERVISOR, _HELPER, _RESTARTS = range(3)

# Requests that are watched because a worker has died at them: for each the request, the deaths in a row and the
# time (ns) until which it counts. The first word says how many there are.
_SUSPECTS = 16
_SUSPECT_WORDS = 3
DEADLY = 3  # deaths in a row after which a request gets EIO
DEADLY_NS = 60 * 10**9  # for how long; then it is tried again


class Board:
    """The shared memory of a mount."""

    def __init__(self) -> None:
        slots, suspects = SLOTS * _WORDS * 8, (1 + _SUSPECTS * _SUSPECT_WORDS) * 8
        self._memory = memoryview(mmap.mmap(-1, slots + suspects + (_RESTARTS + 1) * 8))
        self._words = self._memory[:slots].cast("q")
        self._suspects = self._memory[slots : slots + suspects].cast("q")
        self._supervised = self._memory[slots + suspects :].cast("q")

    def slot(self, number: int) -> Slot:
        return Slot(self._words[number * _WORDS : (number + 1) * _WORDS])

    def counts(self) -> dict[str, int]:
        """Requests by kind, over all workers that there have been."""
        counts = {kind: self._total(at) for at, kind in enumerate(KINDS)}
        return {kind: count for kind, count in counts.items() if count}

    def _total(self, word: int) -> int:
        return sum(self._words[word::_WORDS])

    @property
    def bytes_read(self) -> int:
        return self._total(_BYTES_READ)

    @property
    def failures(self) -> int:
        return self._total(_FAILED)

    @property
    def done(self) -> int:
        """Requests that were answered: what shows that the mount gets on."""
        return self._total(_DONE)

    @property
    def busy(self) -> bool:
        """Whether any worker is at a request."""
        return any(self._words[_SINCE::_WORDS])

    @property
    def waiting(self) -> int:
        """How many workers wait for a disk."""
        return self._total(_WAITING)

    @property
    def open_files(self) -> int:
        return self._total(_FILES)

    @property
    def restarts(self) -> int:
        """How many workers were replaced."""
        return self._supervised[_RESTARTS]

    def replaced(self, workers: int) -> None:
        """So many workers more have died."""
        self._supervised[_RESTARTS] += workers

    @property
    def processes(self) -> list[int]:
        """The supervisor, and the workers that there are now."""
        return [pid for pid in (self._supervised[_SUPERVISOR], *self._words[_PID::_WORDS]) if pid]

    def supervise(self, pid: int) -> None:
        """The process with this number is the supervisor."""
        self._supervised[_SUPERVISOR] = pid

    @property
    def helper(self) -> int:
        """The process that serves nothing but belongs to the mount, 0 for none."""
        return self._supervised[_HELPER]

    @helper.setter
    def helper(self, pid: int) -> None:
        self._supervised[_HELPER] = pid

    # --- requests that workers have died of

    @property
    def watching(self) -> bool:
        """Whether any request is watched: what a worker asks before it asks about its own."""
        return self._suspects[0] != 0

    def blame(self, request: int) -> int:
        """A worker has died at this request; returns how many have done so without an answer in between."""
        now = time.monotonic_ns()
        at = self._suspect(request)
        if at is None:  # the one that is forgotten first makes room
            at = min(range(1, len(self._suspects), _SUSPECT_WORDS), key=lambda at: self._suspects[at + 2])
            self._suspects[at], self._suspects[at + 1] = request, 0
        self._suspects[at + 1] += 1
        self._suspects[at + 2] = now + DEADLY_NS
        self._count_suspects()
        return self._suspects[at + 1]

    def is_deadly(self, request: int) -> bool:
        """Whether this request must not be tried for now."""
        at = self._suspect(request)
        if at is None or self._suspects[at + 1] < DEADLY:
            return False
        if time.monotonic_ns() < self._suspects[at + 2]:
            return True
        self._acquit(at)
        return False

    def absolve(self, request: int) -> None:
        """This request was answered. One that is deadly stays so for its time: the answer was a refusal."""
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
    """The words of one worker; the worker writes, everybody reads."""

    __slots__ = ("_words",)

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def start(self, pid: int) -> None:
        """The process with this number is the worker from now on."""
        self._words[_PID] = pid

    def begin(self, kind: int, request: int = 0) -> None:
        """A request of this kind has come in. `request` is a number that an equal one would have, too."""
        words = self._words
        words[kind] += 1
        words[_REQUEST] = request
        words[_SINCE] = time.monotonic_ns()

    def end(self) -> None:
        words = self._words
        words[_SINCE] = 0
        words[_DONE] += 1

    def failed(self) -> None:
        self._words[_FAILED] += 1

    def read(self, count: int) -> None:
        self._words[_BYTES_READ] += count

    def files(self, count: int) -> None:
        """How many shards the worker has open."""
        self._words[_FILES] = count

    def wait(self, waiting: bool) -> None:
        """The worker waits for a disk, or indexes a shard, and is rightly not heard of."""
        self._words[_WAITING] = waiting
        self._words[_SINCE] = time.monotonic_ns()  # what comes behind the wait may take its own time

    @property
    def waiting(self) -> bool:
        return bool(self._words[_WAITING])

    @property
    def busy_seconds(self) -> float:
        """How long the worker has been at one request without a reason to wait."""
        since = self._words[_SINCE]
        return 0.0 if not since or self.waiting else (time.monotonic_ns() - since) / 1e9

    @property
    def request(self) -> int | None:
        """The request that the worker is at."""
        return self._words[_REQUEST] if self._words[_SINCE] else None

    def reset(self) -> None:
        """The worker is gone; its totals stay."""
        for word in (_SINCE, _WAITING, _FILES, _PID):
            self._words[word] = 0
