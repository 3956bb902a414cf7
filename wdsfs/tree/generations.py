"""The generation of each shard of a mounted set, in memory that the processes of the mount share.

Made before the workers are forked. Words are written atomically; a process that sees one late checks a file once
more.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

from wdsfs.inodes import TAG_MAX
from wdsfs.storage.identity import Fingerprint


class Generations:
    """The generation of each shard of a set under this mount, which its inode numbers carry.

    It goes up by one with each change that a process notices, so an inode number of the old content never stands
    for the new content. It starts from the fingerprint, so that numbers are the same after a
    remount. A shard's word is the sum of its last fingerprint (upper half) and the generation; two processes
    that notice the same change write the same word.

    `edition` counts how often shards have come or gone since the mount, and `changed_ns` is when they did last (ns
    since the epoch, 0 for never). In a set that is `followed`, a shard that is missing is about to be taken out.
    """

    def __init__(self, shards: int, followed: bool = False) -> None:
        self.followed, self.edition, self.changed_ns = followed, 0, 0
        self._out: dict[int, int] = {}
        self._words = memoryview(mmap.mmap(-1, 8 * (shards + 2))).cast("Q")
        self._shards = self._from_fingerprint = shards
        self._fetcher = memoryview(bytearray(8)).cast("Q")  # a counter of changes that the fetcher has met

    @property
    def alarms(self) -> int:
        """A counter of changed shards that any process of the mount has met or has been notified of."""
        return self._words[self._shards] + self._words[self._shards + 1] + self._fetcher[0]

    def heed(self, counter: memoryview[int]) -> None:
        """Count the changes of remote shards, too, that the fetcher counts in this shared memory."""
        self._fetcher = counter

    def alarm(self, notified: bool = False) -> None:
        """Note that a worker has met a changed shard, or, with `notified`, that inotify has reported one."""
        # Two words: a worker must not undo the increment of the process that follows changes.
        self._words[self._shards + notified] += 1

    def extended(self, shards: int) -> Generations:
        """The generations of this set with further shards at its end."""
        longer = Generations(shards)
        longer._words[: self._shards] = self._words[: self._shards]
        longer._fetcher = self._fetcher
        return longer

    def grown(self, shards: int, out: Iterable[int], now_ns: int) -> Generations:
        """The generations of this set after shards have come or gone; those with the numbers `out` are not in it.

        Tags of new shards start from 0, and those `out` keep the last one, so that the sum over the set stays as
        it is: a listing goes on.
        """
        longer = self.extended(shards)
        longer.followed, longer.edition, longer.changed_ns = self.followed, self.edition + 1, now_ns
        longer._from_fingerprint = self._from_fingerprint
        longer._out = {number: self._out.get(number, self._words[number] & TAG_MAX) for number in out}
        return longer

    @property
    def sum_out(self) -> int:
        """The sum of the last tags of shards that are not in the set any more."""
        return sum(self._out.values())

    def of(self, number: int, fingerprint: Fingerprint) -> int:
        """The tag of a shard that has this fingerprint now."""
        sum_ = fingerprint.sum
        word = self._words[number]
        seen, generation = word >> 32, word & 0xFFFFFFFF
        if seen != sum_:
            first = sum_ >> 1 & TAG_MAX if number < self._from_fingerprint else 0
            generation = generation + 1 & 0xFFFFFFFF if seen else first
            self._words[number] = sum_ << 32 | generation
        return generation & TAG_MAX

    def renew(self, number: int) -> None:
        """Count up: the shard has other content under the same fingerprint."""
        word = self._words[number]
        self._words[number] = word & ~0xFFFFFFFF | word + 1 & 0xFFFFFFFF
