"""Notes of workers, in shared memory, about sequential passes over the files of a mount.

`pusher.py` decides how to serve a pass. A pass is a reader that continues with a file whose inode number is a
little higher. It reads the files of a shard in the order of the tar, all of them or every n-th. A client that
lists one sample after the other is a pass, too; here "file" and "READ" then mean sample and listing.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from typing import NamedTuple

STEP_MAX = 64  # most inode numbers from one READ to the next, until a pass is recognised
REACH_MAX = 256  # the same later, when files between two READs are in the page cache
FIRST = 3  # reads in a row that make a pass
PATIENCE_MAX = 1 << 10  # at most, after wrong guesses

REGION_BITS = 12
# A region is 4,096 neighbours of a shard. For each: the last inode number, the reads in a row, how many reads call
# the pusher, and the reader. Regions share places: then a pass is noticed later.
_PLACES = 4093  # a prime, so that shards that are read at the same time have places of their own
_LAST_INODE, _ROW, _DUE, _CLIENT, _WORDS = range(5)
# Words after the regions: the patience with new passes, then the counters of pushed pages.
_PATIENCE, _PUSHED_FILES, _PUSHED_BYTES, _PASSED_FILES, _PASSED_BYTES, _LISTED, _PUSHER, _OFF = range(8)

CALL = struct.Struct("<QQ")  # the inode number of a READ, and its distance from the READ before


class Pushed(NamedTuple):
    """Counts of pushed files, of pushed files that readers have passed, and of samples that were listed ahead."""

    files: int
    bytes: int
    passed_files: int
    passed_bytes: int
    listed: int


class PassNotes:
    """The shared memory in which workers note each READ, and the pipe by which they call the pusher."""

    def __init__(self) -> None:
        words = memoryview(mmap.mmap(-1, (_PLACES * _WORDS + _OFF + 1) * 8)).cast("q")
        self._regions, self._state = words[: _PLACES * _WORDS], words[_PLACES * _WORDS :]
        self._state[_PATIENCE] = FIRST
        self.calls, self._call = os.pipe()
        os.set_blocking(self._call, False)  # workers must not wait for the pusher
        os.set_blocking(self.calls, False)

    # --- workers

    def note(self, inode: int, client: int) -> int:
        """Note a READ of a file, by this thread.

        Returns the distance to the inode number before it if the pusher has to be called, else 0.
        """
        words, at = self._regions, _place(inode)
        words[at + _CLIENT] = client
        distance = inode - words[at]
        if -STEP_MAX < distance <= 0:  # another part of the same file, or two workers overtake each other
            return 0
        words[at] = inode
        row = words[at + _ROW]
        if distance > (STEP_MAX if row < FIRST else REACH_MAX) or distance < 0:
            words[at + _ROW], words[at + _DUE] = 0, self._state[_PATIENCE]
            return 0
        words[at + _ROW] = row = row + 1
        return distance if row >= words[at + _DUE] else 0

    def call(self, inode: int, distance: int) -> None:
        """Call the pusher. If it is busy or has ended, only speed is lost."""
        if not self.off:
            with contextlib.suppress(OSError):
                os.write(self._call, CALL.pack(inode, distance))

    # --- the pusher

    def take(self) -> list[tuple[int, int]]:
        """Return all waiting calls as (inode, distance)."""
        try:
            return list(CALL.iter_unpack(os.read(self.calls, CALL.size * 256)))
        except BlockingIOError:
            return []

    def last(self, inode: int) -> int:
        """Return the inode number that was noted last in the region of this one; 0 if it is not known."""
        return self._noted(inode, _LAST_INODE)

    def client(self, inode: int) -> int:
        """Return the thread that was noted last in the region of this inode number; 0 if it is not known."""
        return self._noted(inode, _CLIENT)

    def _noted(self, inode: int, word: int) -> int:
        """Return a word of the region of this inode number; 0 while another region has its place."""
        at = _place(inode)
        is_same = self._regions[at] >> REGION_BITS == inode >> REGION_BITS
        return self._regions[at + word] if is_same else 0

    def postpone(self, inode: int, reads: int = PATIENCE_MAX) -> None:
        """Call the pusher for this pass again only after twice as many reads in a row, or this many more."""
        at = _place(inode)
        self._regions[at + _DUE] = self._regions[at + _ROW] + min(self._regions[at + _ROW], reads)

    def trust(self) -> None:
        """Recognise passes earlier, because a pass has continued."""
        self._state[_PATIENCE] = max(FIRST, self._state[_PATIENCE] // 2)

    def doubt(self) -> None:
        """Recognise passes later, because the last guess was wrong."""
        self._state[_PATIENCE] = min(PATIENCE_MAX, self._state[_PATIENCE] * 2)

    def stored(self, files: int, size: int) -> None:
        """Count files that were pushed, and their bytes."""
        self._state[_PUSHED_FILES] += files
        self._state[_PUSHED_BYTES] += size

    def passed(self, files: int, size: int) -> None:
        """Count pushed files that a reader has gone past, and their bytes."""
        self._state[_PASSED_FILES] += files
        self._state[_PASSED_BYTES] += size

    def listed(self, samples: int) -> None:
        """Count samples that were listed ahead of a client."""
        self._state[_LISTED] += samples

    # --- everyone

    @property
    def pushed(self) -> Pushed:
        """The counts so far."""
        return Pushed(*self._state[_PUSHED_FILES : _LISTED + 1])

    @property
    def pusher(self) -> int:
        """The pid of the pusher, 0 while there is none."""
        return self._state[_PUSHER]

    @pusher.setter
    def pusher(self, pid: int) -> None:
        self._state[_PUSHER] = pid

    @property
    def off(self) -> bool:
        """True once the kernel has refused to take content."""
        return self._state[_OFF] != 0

    def turn_off(self) -> None:
        """Push nothing from now on."""
        self._state[_OFF] = 1


def _place(inode: int) -> int:
    """Return the first word of a region."""
    return (inode >> REGION_BITS) % _PLACES * _WORDS
