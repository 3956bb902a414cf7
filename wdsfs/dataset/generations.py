"""The generation of each shard of a mounted set, in memory that the processes of the mount share.

Made before the workers are forked. Words are written whole; one that another process sees late costs a look at a
file more.
"""

from __future__ import annotations

import mmap

from wdsfs.inodes import TAG_MAX
from wdsfs.storage.identity import sum_of


class Generations:
    """The generation of each shard of a set under this mount, which its inode numbers carry.

    It goes up by one with each change that somebody notices, so a number of the content before is never taken
    for one of the content after it. It starts from the fingerprint, so that numbers are the same after a
    remount. A shard's word is the sum of its last fingerprint (upper half) and the generation; two processes
    that notice the same change write the same word.
    """

    def __init__(self, shards: int) -> None:
        self._words = memoryview(mmap.mmap(-1, 8 * (shards + 2))).cast("Q")
        self._shards = shards

    @property
    def alarms(self) -> int:
        """Goes up whenever a process has met a shard that is not what it was, or heard of one."""
        return self._words[self._shards] + self._words[self._shards + 1]

    def alarm(self, heard: bool = False) -> None:
        """A worker has met a changed shard; or the one process that hears of changes has `heard` of one."""
        self._words[self._shards + heard] += 1  # two words, so that a worker cannot undo what was heard

    def extended(self, shards: int) -> Generations:
        """The tags of a set to which shards were added behind these."""
        longer = Generations(shards)
        longer._words[: self._shards] = self._words[: self._shards]
        return longer

    def of(self, number: int, fingerprint: tuple[int, int, int]) -> int:
        """The tag of a shard that has this fingerprint (size in bytes, mtime in ns, inode) now."""
        sum_ = sum_of(fingerprint)
        word = self._words[number]
        seen, generation = word >> 32, word & 0xFFFFFFFF
        if seen != sum_:
            generation = generation + 1 & 0xFFFFFFFF if seen else sum_ >> 1 & TAG_MAX
            self._words[number] = sum_ << 32 | generation
        return generation & TAG_MAX

    def renew(self, number: int) -> None:
        """The shard has other content under the same fingerprint."""
        word = self._words[number]
        self._words[number] = word & ~0xFFFFFFFF | word + 1 & 0xFFFFFFFF
