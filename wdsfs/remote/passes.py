"""Passes over an object: which reads follow one another, and how much is fetched ahead of them.

A *pass* is a reader in order. `Passes` notes the reads of all readers of an object. A read that begins shortly
after the end of another one continues that one; several such reads are a pass. The processes of a data loader are
some samples apart, and `ls` sorts 10 before 2. So several passes are followed at a time, and a read inside the
window of a recognized pass belongs to that pass. For a reader that skips most bytes, or reads at random, nothing
is fetched ahead.

The first window is `opening` bytes, as many as a store sends before its next answer comes; a pass that has hardly
begun gets less. The window grows with the pass, to FACTOR times the bytes that were read. Near the end of an
object the window also covers the first `NEXT` bytes of the next object of the set. If the latest pass did not
continue there, it covers WINDOW_MIN bytes only, because shards may be read in any order.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

WINDOW_MIN, WINDOW_MAX, FACTOR = 1 << 20, 128 << 20, 8
NEXT = 32 << 20  # bytes of the next object that are fetched before the first read in it
PASS_GAP = 64 << 10  # bytes that a read may leave out to continue a pass, or as many as it reads
BEGINNING = 64 << 10  # a read that begins before it begins at the head of the object
ADVANCES, ADVANCES_AT_HEAD = 3, 1  # reads that have to continue a read before it is a pass
ADVANCES_SURE = 2  # and before its window is wide
GAPS = 2  # how many bytes may be skipped for each byte that is read
LEAST = 4096  # bytes that a read counts for, at least: small members lie between large headers
BACK = 16 << 20  # how far before the front of a pass a read may lie and still belong to it
FOLLOWED = 16  # ends of reads that are remembered


@dataclass(slots=True)
class _Pass:
    """Reads that continue one another: from `start` up to `front` so far; `used` bytes were read in between."""

    start: int
    front: int
    used: int
    advances: int = 0
    ahead: int = 0  # the byte up to which prefetch was requested
    announced: bool = False  # a reader has announced that it will read all bytes
    before: int = 0  # the bytes of the same pass in objects before this one

    @property
    def passed(self) -> int:
        """The bytes between its start and its front, with those of objects before."""
        return self.before + self.front - self.start

    @property
    def recognized(self) -> bool:
        advances = ADVANCES_AT_HEAD if self.start < BEGINNING else ADVANCES
        return self.announced or self.advances >= advances

    def takes(self, begin: int, end: int) -> bool:
        gap = max(PASS_GAP, end - begin)
        if not self.recognized:
            return self.start <= begin <= self.front + gap
        return max(self.start, self.front - BACK) <= begin <= max(self.front, self.ahead) + gap


class Passes:
    """The passes over one object of `size` bytes; none fetches more than `window` bytes ahead."""

    def __init__(self, size: int, window: int = WINDOW_MAX) -> None:
        self.opening = WINDOW_MIN  # bytes of the first window of a pass
        self._size, self._window = size, window
        self._passes: OrderedDict[int, _Pass] = OrderedDict()  # the one with the latest read is the last
        self._made = 0

    def seen(
        self, begin: int, end: int, used: int, *, is_miss: bool = True, is_file: bool = False
    ) -> tuple[int, int] | None:
        """Note a read of this range; return the range to fetch ahead now, if any.

        `used` bytes of the range were read; `is_miss` says that they were not in the cache, `is_file`
        that a program reads a file of a mount: after the first file of a shard it probably reads the second one.
        """
        number = self._taking(begin, end, is_miss)
        used = max(used, LEAST)
        if number is None:
            pass_ = _Pass(begin, end, used)
            self._follow(pass_)
            return self._extend(pass_) if is_file and begin < LEAST else None
        pass_ = self._passes[number]
        pass_.used += used
        if end > pass_.front:
            pass_.front = end
            pass_.advances += 1
        if end >= self._size:  # a second pass over it is another one
            del self._passes[number]
            return None
        self._passes.move_to_end(number)
        return self._extend(pass_) if pass_.recognized else None

    def announced(self, begin: int) -> tuple[int, int] | None:
        """Note that a reader will read everything from here on; return as `seen`."""
        pass_ = _Pass(begin, begin, 0, announced=True)
        self._follow(pass_)
        return self._extend(pass_)

    def go_on(self, previous: Passes, *, is_usual: bool = False) -> tuple[int, int] | None:
        """Note that a pass over the previous object nears its end, and may continue here; return as `seen`.

        `is_usual` says that the latest pass did so.
        """
        passes = previous._passes.values()
        ending = [pass_ for pass_ in passes if pass_.recognized and pass_.ahead >= previous._size]
        if not ending or any(not pass_.start for pass_ in self._passes.values()):
            return None
        longest = max(ending, key=lambda pass_: pass_.passed)
        ahead = min(NEXT if longest.before or is_usual else WINDOW_MIN, self._window, self._size)
        self._follow(_Pass(0, 0, 0, ahead=ahead, before=longest.passed))
        return 0, ahead

    def gone_elsewhere(self) -> None:
        """Forget the pass that might have continued here: its reader has read a third object."""
        for number, pass_ in list(self._passes.items()):
            if pass_.before and not pass_.front:
                del self._passes[number]

    def _taking(self, begin: int, end: int, is_miss: bool) -> int | None:
        """Return the number of the pass that a read belongs to."""
        for number, pass_ in reversed(self._passes.items()):
            if pass_.takes(begin, end):
                if is_miss and begin < BEGINNING and end < pass_.front and not pass_.announced:
                    # The pass has read these bytes, and they were evicted since: this read begins another pass.
                    del self._passes[number]
                    return None
                return number
        return None

    def _follow(self, pass_: _Pass) -> None:
        self._made += 1
        self._passes[self._made] = pass_
        if len(self._passes) > FOLLOWED:
            self._passes.popitem(last=False)

    def _extend(self, pass_: _Pass) -> tuple[int, int] | None:
        if pass_.used * GAPS < pass_.front - pass_.start:
            return None
        begin = max(pass_.ahead, pass_.front)
        window = self._window_of(pass_)
        end = min(pass_.front + window, self._size)
        # In large steps, except for the last one.
        if begin >= end or (end - begin < window // 2 and end < self._size):
            return None
        pass_.ahead = end
        return begin, end

    def _window_of(self, pass_: _Pass) -> int:
        """Return the bytes that are fetched ahead of a recognized pass."""
        if pass_.announced:
            return self._window
        is_sure = pass_.before or pass_.advances >= ADVANCES_SURE
        return min(max(FACTOR * pass_.passed, self.opening) if is_sure else WINDOW_MIN, self._window)
