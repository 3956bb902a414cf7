"""Indexes a shard when a question needs it: asks again, gives up in the end, and remembers failures.

A question about a shard that is not indexed raises `NotIndexed`. `indexed` indexes the shard and repeats the
question; a worker (`fuse/read_ops.py`) has a loop of its own, which releases old snapshots between its attempts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

from wdsfs.door.shard_door import DOOR
from wdsfs.errors import ShardError, UnreadableShard
from wdsfs.index.store import Index
from wdsfs.shards import Fingerprint, Shard

# A shard that cannot be indexed is tried again after the first number of seconds, doubled each time up to the
# second number. The wait is at least the duration of the attempt times the third number. Without a wait, each
# request in a merged tree would try.
FAILED_SECONDS, FAILED_SECONDS_MAX, FAILED_SHARE = 5.0, 60.0, 50
ATTEMPTS_MAX = 10  # how often a shard that changes all the time is indexed for one question


P = ParamSpec("P")
Reply = TypeVar("Reply")


class Indexable(Protocol):
    """A set of shards (`shard_set.py`) that indexes one when it is asked to."""

    def path_text(self, number: int) -> str:
        """Return the path of a shard for a message."""

    def was_indexed_elsewhere(self, number: int) -> bool:
        """Return True if a shard that was NotIndexed is indexed now, by another process."""

    def index_now(self, number: int) -> None:
        """Index a shard, unless another process has done so by now. Raises ShardErrors."""

    def try_index(self, number: int) -> None:
        """Index a shard for a request that may be about other shards only; a failure is kept."""


class NotIndexed(Exception):
    """The shard with this number of the set `shards` has to be indexed first.

    `shards` may be another set than the one that was asked: a view is made of the shards of several sets.
    """

    def __init__(self, shards: Indexable, number: int) -> None:
        super().__init__(number)
        self.shards, self.number = shards, number


class Attempts:
    """The attempts of one question to have each shard indexed, at most ATTEMPTS_MAX."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[Indexable, int]] = Counter()

    def index(self, error: NotIndexed) -> None:
        """Index the shard that the question needs; then the question can be asked again.

        Raises UnreadableShard for a shard that changes each time, ShardErrors where the question would meet
        NotIndexed again.
        """
        shards, number = error.shards, error.number
        self._counts[shards, number] += 1
        if self._counts[shards, number] > ATTEMPTS_MAX:
            text = "changes each time it is indexed; try again when it is finished"
            raise UnreadableShard(f"{shards.path_text(number)}: {text}") from None
        shards.try_index(number)


def indexed(question: Callable[P, Reply], *args: P.args, **kwargs: P.kwargs) -> Reply:
    """Return the answer to a question; shards that are not indexed are indexed for it.

    If a shard cannot be indexed, each use raises its error then, and the question decides what that means. Raises
    what the question raises, and ShardErrors.
    """
    attempts = Attempts()
    while True:
        try:
            return question(*args, **kwargs)
        except NotIndexed as wanted:
            attempts.index(wanted)


class Failure(NamedTuple):
    """The failed attempt to index a shard with this fingerprint, and its reason.

    There is no new attempt before `until` (monotonic seconds), which is `wait` seconds or more after the failure.
    """

    fingerprint: Fingerprint
    wait: float
    until: float
    text: str


class Failures:
    """The shards that could not be indexed, by number: they are not tried again at once.

    It starts with the failures that `index` has just met, under `keys`.
    """

    def __init__(self, shards: Sequence[Shard], keys: Sequence[bytes], index: Index) -> None:
        self.failed: dict[int, Failure] = {}
        for number, key in enumerate(keys) if index.failures else ():
            if key in index.failures:
                with suppress(ShardError):
                    now = DOOR.look(shards[number].path)
                    until = time.monotonic() + FAILED_SECONDS
                    self.failed[number] = Failure(now, FAILED_SECONDS, until, index.failures[key])

    def add(self, number: int, fingerprint: Fingerprint, took: float, text: str) -> bool:
        """Note that a shard with this fingerprint could not be indexed; the attempt `took` these seconds.

        Returns True if it is the first failure of this content.
        """
        last, wait = self.failed.get(number), FAILED_SECONDS
        if last is not None and last.fingerprint == fingerprint:
            wait = min(2 * last.wait, FAILED_SECONDS_MAX)
        until = time.monotonic() + max(wait, FAILED_SHARE * took)
        self.failed[number] = Failure(fingerprint, wait, until, text)
        return wait == FAILED_SECONDS

    def text_of(self, number: int, fingerprint: Fingerprint) -> str | None:
        """Return the reason why a shard with this fingerprint could not be indexed; None if there is none."""
        failure = self.failed.get(number)
        return failure.text if failure is not None and failure.fingerprint == fingerprint else None

    def refuse(self, number: int, fingerprint: Fingerprint) -> None:
        """Raise UnreadableShard for a shard that could not be indexed a moment ago."""
        failure = self.failed.get(number)
        if failure is not None and failure.fingerprint == fingerprint and time.monotonic() < failure.until:
            raise UnreadableShard(failure.text)
