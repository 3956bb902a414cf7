"""The shards that are open: their descriptors, where their bytes come from, and readahead.

Few are kept open at a time, whatever the size of the set. Whether an opened file is the one that was indexed is
for `shard_set.py`.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from wdsfs.dataset.freshness import Fingerprint
from wdsfs.dataset.shard_access import Access
from wdsfs.errors import UnreadableShard
from wdsfs.storage import source
from wdsfs.storage.source import TarBytes
from wdsfs.tar import compressed

# Readahead over a shard: bytes that a read may be away from the last one to be of the same pass, reads that make a
# pass, and how much is read ahead of it (bytes), in steps of the least that a disk's readahead is set to.
NEAR, PASS, AHEAD, STEP = 4 << 20, 8, 8 << 20, 128 << 10
# How many bytes may go by for each that is read, and how many each read counts for at least: who takes one class
# of a set passes over it in order, too, but reads a hundredth of it.
GAPS, LEAST = 4, 4096
COPIES_MAX, READERS_MAX = 32, 4  # compressed shards open at a time: a copy takes disk, a reader up to 100 MB


@dataclass(slots=True)
class ShardFile:
    """An open shard. Whatever is done to it, or to its last name, changes its ctime.

    `source` is where its bytes come from: of a plain one `fd` itself.
    """

    fd: int
    source: TarBytes
    path: bytes
    fingerprint: Fingerprint
    ctime_ns: int
    run: int = 0  # reads of a pass in order so far
    start: int = 0  # where it began (bytes)
    used: int = 0  # how many bytes it has read
    front: int = 0  # how far it has come (bytes)
    ahead: int = 0  # how far the disk was asked to read ahead of it (bytes)

    def look_ahead(self, begin: int, end: int) -> None:
        """A read of these bytes: where it goes on in order, have the disk read what comes next.

        The kernel does so by itself only for a descriptor that is read without gaps by one reader. Several
        processes share a pass here, headers are left out, and a loader's processes are some samples apart.
        """
        if not -NEAR <= begin - self.front <= NEAR:
            self.run, self.start, self.used, self.front, self.ahead = 0, begin, 0, end, end
            return
        self.run += 1
        self.used += max(end - begin, LEAST)
        if end > self.front:
            self.front = end
        if self.run < PASS or self.front + AHEAD // 2 < self.ahead:
            return
        if self.used * GAPS < self.front - self.start:
            return
        start = max(self.ahead, self.front)
        self.ahead = start + AHEAD // 2
        fd = self.source
        assert isinstance(fd, int)  # nobody reads ahead through a reader
        # The kernel cuts each of these to what it would read ahead by itself, so in small steps.
        for step in range(start, self.ahead, STEP):
            os.posix_fadvise(fd, step, STEP, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        if self.source != self.fd:
            source.close(self.source)
        os.close(self.fd)


class OpenFiles:
    """Open shards by number, at most `most`, the one used longest ago is closed first.

    `closed` is called with the number of one that is closed to keep to that; `slowly` is entered for what takes as
    long as unpacking a shard does.
    """

    def __init__(
        self,
        access: Access,
        most: int,
        closed: Callable[[int], None],
        slowly: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.files: OrderedDict[int, ShardFile] = OrderedDict()
        self._access, self._most, self._closed, self._slowly = access, most, closed, slowly

    def __len__(self) -> int:
        return len(self.files)

    def get(self, number: int, fingerprint: Fingerprint) -> ShardFile | None:
        """The open shard, if it was opened when it had this fingerprint."""
        file = self.files.get(number)
        if file is None or file.fingerprint != fingerprint:
            return None
        self.files.move_to_end(number)
        return file

    def open(
        self, number: int, path: bytes, fingerprint: Fingerprint, ctime_of: Callable[[ShardFile], int]
    ) -> ShardFile:
        """Open a shard, in the place of what was open under its number.

        `ctime_of` compares the opened file with its record, and returns its ctime (ns). Raises what it raises, and
        MissingShard, UnreadableShard, RefusedShard.
        """
        fd = self._access.open(path)
        file = ShardFile(fd, fd, path, fingerprint, 0)
        try:
            file.source = self._source(fd, path)
            file.ctime_ns = ctime_of(file)
        except BaseException:
            file.close()
            raise
        if number in self.files:
            self.files.pop(number).close()
        self.files[number] = file
        if len(self.files) > self._most:
            self._close(next(iter(self.files)))
        if file.source != fd:
            self._close_compressed()
        return file

    def _source(self, fd: int, path: bytes) -> TarBytes:
        """Where the bytes of a shard come from. Raises StaleShard, UnreadableShard."""
        try:
            kind = compressed.kind_of(fd)
        except OSError as error:
            raise UnreadableShard(f"{os.fsdecode(path)}: {error.strerror}") from None
        if kind is None:
            return fd
        with self._slowly():
            return compressed.unpacked(kind, fd, path).source

    def _close(self, number: int) -> None:
        self._closed(number)
        self.files.pop(number).close()

    def _close_compressed(self) -> None:
        """Close the compressed shards that are too many, the one used longest ago first."""
        for wanted, limit in ((True, COPIES_MAX), (False, READERS_MAX)):
            found = [
                number
                for number, file in self.files.items()
                if file.source != file.fd and isinstance(file.source, int) == wanted
            ]
            for number in found[:-limit]:
                self._close(number)

    def forget(self, number: int) -> None:
        """Close one shard, if it is open."""
        file = self.files.pop(number, None)
        if file is not None:
            file.close()

    def clear(self) -> None:
        """Close all."""
        for file in self.files.values():
            file.close()
        self.files.clear()
