"""Shards that are not indexed: the error that says so, and how long a failure to index one is believed.

Indexing itself is `ShardSet.index_now`, and for a request that may be about other shards `ShardSet.try_index`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from wdsfs.dataset.freshness import Fingerprint
from wdsfs.errors import ShardError, UnreadableShard
from wdsfs.index.store import Index
from wdsfs.spec.expand import Shard
from wdsfs.storage import identity

# A shard that cannot be indexed is not tried again for so long (twice as long each time, to the second number), or
# for so many times what the attempt took: in one tree over all shards each request would try.
FAILED_SECONDS, FAILED_SECONDS_MAX, FAILED_SHARE = 5.0, 60.0, 50


class NotIndexed(Exception):
    """The shard with this number has to be indexed first: unless `settled`, `build` it, then `install` that."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Failure(NamedTuple):
    """Why a shard with this fingerprint could not be indexed.

    It is believed for `wait` seconds or more, `until` then (monotonic seconds).
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
                    now = identity.look(shards[number].path)
                    until = time.monotonic() + FAILED_SECONDS
                    self.failed[number] = Failure(now, FAILED_SECONDS, until, index.failures[key])

    def add(self, number: int, fingerprint: Fingerprint, took: float, text: str) -> bool:
        """A shard with this fingerprint could not be indexed, an attempt that `took` so many seconds.

        Returns whether it is the first failure of this content.
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
        """Raises UnreadableShard for a shard that could not be indexed a moment ago."""
        failure = self.failed.get(number)
        if failure is not None and failure.fingerprint == fingerprint and time.monotonic() < failure.until:
            raise UnreadableShard(failure.text)
