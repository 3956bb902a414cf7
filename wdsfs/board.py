"""What the processes of a mount tell each other: counters of each worker, and which files have been pushed.

Plain shared memory, made before the workers are forked, so that nothing is lost with a worker and nobody waits
for anybody. Words are written whole; one that another process sees late costs a wrong digit in `wdsfs status`, a
push less, or a look at a file more.
"""

from __future__ import annotations

import mmap
import struct
import time
import zlib

from wdsfs.inodes import TAG_MAX

SLOTS = 64  # workers at a time
KINDS = (
    *("lookup", "getattr", "readlink", "open", "read", "release", "opendir", "readdir", "releasedir"),
    *("getxattr", "listxattr", "statfs", "forget", "other"),
)
_CELL_BITS = 20  # a million files that may count as pushed at a time, in 8 MiB

# Words of a slot behind the counters of the kinds: totals, then what the worker is doing now.
_BYTES_READ, _BYTES_PUSHED, _FAILED, _PUSHED, _DONE, _SINCE, _WAITING, _FILES = range(len(KINDS), len(KINDS) + 8)
_WORDS = _FILES + 1
_MIX = 0x9E3779B97F4A7C15  # spreads neighbouring inode numbers (the golden ratio in 64 bits)


class Board:
    """The shared memory of a mount."""

    def __init__(self) -> None:
        self._memory = memoryview(mmap.mmap(-1, SLOTS * _WORDS * 8 + (8 << _CELL_BITS)))
        self._words = self._memory[: SLOTS * _WORDS * 8].cast("q")
        self._pushed_files = self._memory[SLOTS * _WORDS * 8 :].cast("Q")

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
    def bytes_pushed(self) -> int:
        return self._total(_BYTES_PUSHED)

    @property
    def failures(self) -> int:
        return self._total(_FAILED)

    @property
    def pushed(self) -> int:
        """Files whose content was pushed at their first open."""
        return self._total(_PUSHED)

    @property
    def done(self) -> int:
        """Requests that were answered: what shows that the mount gets on."""
        return self._total(_DONE)

    @property
    def waiting(self) -> int:
        """How many workers wait for a disk."""
        return self._total(_WAITING)

    @property
    def open_files(self) -> int:
        return self._total(_FILES)

    # --- which files were pushed into the page cache

    def claim_push(self, inode: int) -> bool:
        """Whether nobody has pushed this file since the kernel forgot it; from now on somebody has.

        Each file has one cell, which several may share. Where another file is in it, the file is read instead,
        which is only slower; a push too many could wait for a read that waits for the pusher.
        """
        cell = self._cell(inode)
        if self._pushed_files[cell]:
            return False
        self._pushed_files[cell] = inode
        return True

    def forget(self, inode: int) -> None:
        cell = self._cell(inode)
        if self._pushed_files[cell] == inode:
            self._pushed_files[cell] = 0

    def _cell(self, inode: int) -> int:
        return (inode * _MIX & 0xFFFFFFFFFFFFFFFF) >> (64 - _CELL_BITS)


def sum_of(fingerprint: tuple[int, int, int]) -> int:
    """32 bits that stand for a fingerprint (size in bytes, mtime in ns, inode); never 0."""
    return zlib.crc32(struct.pack("<QqQ", *fingerprint)) | 1


class Tags:
    """The generation of each shard of a set under this mount, which its inode numbers carry.

    It goes up by one with each change that somebody notices, so a number of the content before is never taken
    for one of the content after it. It starts from the fingerprint, so that numbers are the same after a
    remount. A shard's word is the sum of its last fingerprint (upper half) and the generation; two processes
    that notice the same change write the same word.
    """

    def __init__(self, shards: int) -> None:
        self._words = memoryview(mmap.mmap(-1, 8 * shards + 8)).cast("Q")
        self._shards = shards

    @property
    def alarms(self) -> int:
        """Goes up whenever a process has met a shard that is not what it was."""
        return self._words[self._shards]

    def alarm(self) -> None:
        self._words[self._shards] += 1

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


class Slot:
    """The words of one worker; the worker writes, everybody reads."""

    __slots__ = ("_words",)

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def begin(self, kind: int) -> None:
        """A request of this kind has come in."""
        words = self._words
        words[kind] += 1
        words[_SINCE] = time.monotonic_ns()

    def end(self) -> None:
        words = self._words
        words[_SINCE] = 0
        words[_DONE] += 1

    def failed(self) -> None:
        self._words[_FAILED] += 1

    def read(self, count: int) -> None:
        self._words[_BYTES_READ] += count

    def pushed(self, count: int) -> None:
        """A file of `count` bytes was pushed."""
        self._words[_PUSHED] += 1
        self._words[_BYTES_PUSHED] += count

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

    def reset(self) -> None:
        """The worker is gone; its totals stay."""
        for word in (_SINCE, _WAITING, _FILES):
            self._words[word] = 0
