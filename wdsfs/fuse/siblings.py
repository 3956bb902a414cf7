"""Files of a sample that a worker stores in the kernel's page cache because their client is at that sample.

A client is at a sample when it has listed its directory to the end, or reads one of its files. Most clients read
the same files of each sample. So from time to time the reads of one sample are watched, less often as long as the
habit of the client stays the same. Of the samples in between, the same files are stored before the client's
request is answered.

A worker that stores may have to wait for a READ that another worker has to answer (`page_cache.py`). So only one
worker stores at a time, and never the only worker of a mount.
"""

from __future__ import annotations

import mmap

from wdsfs.fuse.page_cache import Ended, PageCache
from wdsfs.fuse.passes import Passes
from wdsfs.inodes import MEMBER, SAMPLE, index_of, kind_of, pack, position, unpack
from wdsfs.tree.tree import LowerTree

FILES_MAX = 62  # files of a sample; larger samples are left to the readers
BYTES_MAX = 2 << 20  # that are stored for one request
ROW_MAX = 32  # samples between two that are watched
REST_MAX = 32  # requests of a client that are not looked at, after samples of which it has read one file

_PLACES = 256  # clients share places: then their habits are noticed later
# For each client: thread id, first inode number of its present sample, the file that it came by (a bit; 0 if
# it has listed it), files of that sample that were read (bits; -1 if it is not watched), files of the sample that
# was watched last, samples between two that are watched, how many of these are left, and the files and bytes that
# were stored in them; requests between two that are looked at, and how many of these are left.
_CLIENT, _SAMPLE, _FIRST, _SEEN, _HABIT, _ROW, _LEFT, _FILES, _BYTES, _REST, _RESTING, _WORDS = range(12)


class Habits:
    """The habits of all clients, in shared memory.

    Two workers at the requests of one client may guess wrong; that costs time only.
    """

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self._words = memoryview(mmap.mmap(-1, _PLACES * _WORDS * 8)).cast("q")
        self._none = memoryview(bytes(_WORDS * 8)).cast("q")

    def is_resting(self, client: int) -> bool:
        """Return True if this request of a client is not to be looked at: it reads single files."""
        words, at = self._words, client % _PLACES * _WORDS
        resting = words[at + _RESTING]
        if resting and words[at + _CLIENT] == client:
            words[at + _RESTING] = resting - 1
            return True
        return False

    def rest(self, client: int) -> None:
        """Look at the requests of a client less often."""
        at = self._at(client)
        self._words[at + _REST] = self._words[at + _RESTING] = min(2 * self._words[at + _REST] or 1, REST_MAX)
        self._words[at + _SEEN], self._words[at + _LEFT] = -1, 0

    def _at(self, client: int) -> int:
        """Return the place of a client, emptied if it was that of another one."""
        at = client % _PLACES * _WORDS
        if self._words[at + _CLIENT] != client:
            self._words[at : at + _WORDS] = self._none
            self._words[at + _CLIENT], self._words[at + _SEEN] = client, -1
        return at

    def next_files(self, client: int, sample: int, bit: int) -> int:
        """Note that a client reads the file with this bit of a sample; with 0 it has listed it.

        Returns the other files that it is expected to read, as bits.
        """
        words, at = self._words, self._at(client)
        seen = words[at + _SEEN]
        if words[at + _SAMPLE] == sample:
            if seen >= 0:
                words[at + _SEEN] = seen | bit
            return 0
        words[at + _SAMPLE] = sample
        if seen >= 0:
            self._judge(at, seen)
            if not seen & ~words[at + _FIRST]:
                self.rest(client)
                return 0
            words[at + _REST] = 0
        words[at + _FIRST] = bit
        if not words[at + _LEFT]:
            words[at + _SEEN] = bit
            return 0
        words[at + _LEFT], words[at + _SEEN] = words[at + _LEFT] - 1, -1
        habit = words[at + _HABIT]
        return habit & ~bit if habit & bit == bit else 0

    def _judge(self, at: int, seen: int) -> None:
        """Take these files of the sample that was watched for the habit of the client."""
        words = self._words
        is_same = seen == words[at + _HABIT] != 0
        if is_same:
            self.passes.passed(words[at + _FILES], words[at + _BYTES])
        words[at + _ROW] = words[at + _LEFT] = min(2 * words[at + _ROW] or 1, ROW_MAX) if is_same else 0
        words[at + _HABIT], words[at + _FILES], words[at + _BYTES] = seen, 0, 0

    def stored(self, client: int, files: int, size: int) -> None:
        """Count files that were stored for a client, and their bytes."""
        self.passes.stored(files, size)
        at = client % _PLACES * _WORDS
        self._words[at + _FILES] += files
        self._words[at + _BYTES] += size


class Siblings:
    """Stores the files that the clients of a worker read next."""

    def __init__(self, device: int, tree: LowerTree, habits: Habits) -> None:
        self.tree, self.habits = tree, habits
        self.pages = PageCache(device, tree)

    def after(self, client: int, inode: int) -> list[int]:
        """Note that a client has listed a sample, or reads a file; returns the files that it will read next.

        Raises NotIndexed, ShardErrors.
        """
        if self.habits.is_resting(client):
            return []
        tag, number, where = unpack(inode)
        record, index, kind = self.tree.lower.record(number, tag), index_of(where), kind_of(where)
        if kind not in (SAMPLE, MEMBER) or self.habits.passes.off:
            return []
        members = record.entry_members(index if kind == SAMPLE else record.entry_of(index))
        if len(members) > FILES_MAX or (kind == MEMBER and len(members) < 2):
            self.habits.rest(client)
            return []
        first = pack(tag, number, position(MEMBER, members.start))
        files = self.habits.next_files(client, first, 1 << index - members.start if kind == MEMBER else 0)
        return [first + at for at in range(len(members)) if files >> at & 1] if files else []

    def store(self, client: int, inodes: list[int]) -> None:
        """Store files for a client, unless another worker stores now. Raises NotIndexed, ShardErrors."""
        if not self.habits.passes.take_turn():
            return
        try:
            stored = self.pages.store(self.pages.members(inodes, BYTES_MAX), lambda: 0)
        except Ended as end:
            if end.unable:
                self.habits.passes.turn_off()
            return
        finally:
            self.habits.passes.give_turn()
        self.habits.stored(client, stored.files, stored.bytes)
