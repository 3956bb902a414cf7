"""Index it, then ask again: the error of a shard that is not indexed, the loop that answers it, and failures.

Any question to a set of shards, or to a tree over one, may raise `NotIndexed`. `indexed` has the shard indexed and
asks again. A worker (`fuse/read_ops.py`) has a loop of its own, which lets go of old snapshots between two
attempts. `Attempts` ends the questions of both when a shard changes all the time. `ViewSet` derives the records of
a whole set itself, to store many of them at once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

from wdsfs.errors import ShardError, UnreadableShard
from wdsfs.index.store import Index
from wdsfs.remote import shard_paths
from wdsfs.spec.expand import Shard
from wdsfs.storage.identity import Fingerprint

# How long a shard that cannot be indexed is not tried again: the first number of seconds, doubled each time up to
# the second, but at least the duration of the attempt times the third. In a merged tree each request would try.
FAILED_SECONDS, FAILED_SECONDS_MAX, FAILED_SHARE = 5.0, 60.0, 50
ATTEMPTS_MAX = 10  # how often one question has a shard indexed that changes meanwhile


P = ParamSpec("P")
Answer = TypeVar("Answer")


class Indexing(Protocol):
    """A set that can index its shards: `ShardSet`."""

    def path_text(self, number: int) -> str: ...

    def index_now(self, number: int) -> None: ...

    def try_index(self, number: int) -> None: ...


class NotIndexed(Exception):
    """The shard with this number of the set `shards` has to be indexed first.

    It need not be the set that was asked: a view is made of the shards of several.
    """

    def __init__(self, shards: Indexing, number: int) -> None:
        super().__init__(number)
        self.shards, self.number = shards, number


class Attempts:
    """How often one question has had each shard indexed: not more than ATTEMPTS_MAX times."""

    def __init__(self) -> None:
        self._made: Counter[tuple[Indexing, int]] = Counter()

    def index(self, wanted: NotIndexed) -> None:
        """Index the shard that is wanted; then the question can be asked again.

        Raises UnreadableShard for a shard that changes each time, ShardErrors where the question would meet
        NotIndexed again.
        """
        shards, number = wanted.shards, wanted.number
        self._made[shards, number] += 1
        if self._made[shards, number] > ATTEMPTS_MAX:
            text = "changes each time it is indexed; try again when it is finished"
            raise UnreadableShard(f"{shards.path_text(number)}: {text}") from None
        shards.try_index(number)


def indexed(question: Callable[P, Answer], *args: P.args, **kwargs: P.kwargs) -> Answer:
    """The answer to a question; shards that are not indexed are indexed for it.

    A shard that cannot be indexed answers with its error then, so the question decides what it means. Raises what
    the question raises, and ShardErrors.
    """
    attempts = Attempts()
    while True:
        try:
            return question(*args, **kwargs)
        except NotIndexed as wanted:
            attempts.index(wanted)


class Failure(NamedTuple):
    """Why a shard with this fingerprint could not be indexed.

    There is no new attempt before `until` (monotonic seconds), which is `wait` seconds or more after the failure.
    """

    fingerprint: Fingerprint
    wait: float
    until: float
    text: str


class Failures:
    """The shards that could not be indexed, by number: they are not tried again at once.

    It starts with those that `index` has met a moment ago, under `keys`.
    """

    def __init__(self, shards: Sequence[Shard], keys: Sequence[bytes], index: Index) -> None:
        self.failed: dict[int, Failure] = {}
        for number, key in enumerate(keys) if index.failures else ():
            if key in index.failures:
                with suppress(ShardError):
                    now = shard_paths.look(shards[number].path)
                    until = time.monotonic() + FAILED_SECONDS
                    self.failed[number] = Failure(now, FAILED_SECONDS, until, index.failures[key])

    def add(self, number: int, fingerprint: Fingerprint, took: float, text: str) -> bool:
        """Note that a shard with this fingerprint could not be indexed; the attempt `took` so many seconds.

        Returns True if it is the first failure of this content.
        """
        last, wait = self.failed.get(number), FAILED_SECONDS
        if last is not None and last.fingerprint == fingerprint:
            wait = min(2 * last.wait, FAILED_SECONDS_MAX)
        until = time.monotonic() + max(wait, FAILED_SHARE * took)
        self.failed[number] = Failure(fingerprint, wait, until, text)
        return wait == FAILED_SECONDS

    def text_of(self, number: int, fingerprint: Fingerprint) -> str | None:
        """Why a shard with this fingerprint could not be indexed, if it could not."""
        failure = self.failed.get(number)
        return failure.text if failure is not None and failure.fingerprint == fingerprint else None

    def refuse(self, number: int, fingerprint: Fingerprint) -> None:
        """Raise UnreadableShard for a shard that could not be indexed a moment ago."""
        failure = self.failed.get(number)
        if failure is not None and failure.fingerprint == fingerprint and time.monotonic() < failure.until:
            raise UnreadableShard(failure.text)
