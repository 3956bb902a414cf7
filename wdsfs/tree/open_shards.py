"""The open shards and records of a set, few at a time: descriptors, readahead, and views of the index.

`shard_set.py` decides whether an opened file is the indexed file. A record that is unused for a while rests: it
drops its views, which are most of its memory.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wdsfs import names, source
from wdsfs.door.shard_door import OpenShard
from wdsfs.door.urls import is_remote
from wdsfs.durable import named
from wdsfs.errors import MissingShard, UnreadableShard
from wdsfs.index.record import Record
from wdsfs.index.store import Index
from wdsfs.shards import Fingerprint
from wdsfs.source import TarBytes
from wdsfs.tar import compressed
from wdsfs.tree.shard_access import Access

if TYPE_CHECKING:
    from wdsfs.door.remote_side import OpenObject

# Readahead over a shard: the distance (bytes) between two reads of the same pass, the number of reads that make a
# pass, and how much is read ahead of the reader (bytes).
NEAR, PASS, READ_AHEAD = 4 << 20, 8, 8 << 20
# How many bytes may be skipped for each byte that is read, and the fewest bytes that a read counts for. A reader
# of one class also goes through the set in order, but reads only a hundredth of the bytes: it needs no readahead.
GAPS, LEAST = 4, 4096
COPIES_MAX, READERS_MAX = 32, 4  # compressed shards open at a time: a copy takes disk, a reader up to 100 MB

RECORDS_MAX, RESTING_MAX = 64, 960  # opened records in use, some 6 KiB each, and others without their views, 2 KiB
RENEW_SECONDS = 60.0  # after which an LMDB snapshot is renewed: an old one prevents the reuse of freed pages


class OpenRecords:
    """Records by the number of their shard. `dropped` is called with the number of each evicted record."""

    def __init__(self, index: Index, dropped: Callable[[int], None]) -> None:
        self.index = index
        self._dropped = dropped
        self.in_use: OrderedDict[int, Record] = OrderedDict()
        self.resting: OrderedDict[int, Record] = OrderedDict()
        self.snapshot = index.snapshot  # which the records are of
        self._verified: set[bytes] = set()  # the keys of records that were found sound in this snapshot
        self.old_at = time.monotonic() + RENEW_SECONDS  # when (monotonic seconds) the snapshot should be renewed

    def fetch(self, number: int, key: bytes, fingerprint: Fingerprint) -> Record | None:
        """Return a resting record, or the record under `key` in the index, for this fingerprint."""
        record = self.resting.pop(number, None)
        if record is None:
            record = self._read(key, fingerprint)
        if record is None:
            return None
        self.in_use[number] = record
        if len(self.in_use) > RECORDS_MAX:
            self._rest_oldest()
        return record

    def _read(self, key: bytes, fingerprint: Fingerprint) -> Record | None:
        record = self.index.record(key, fingerprint, verify=key not in self._verified)
        if record is not None:
            self._verified.add(key)
            # Semantics decision: a shard that only its mtime identifies may be another one, as one that was moved.
            if record.moved is None and fingerprint.is_by_mtime:
                record.moved = set()
        return record

    def _rest_oldest(self) -> None:
        number, record = self.in_use.popitem(last=False)
        record.rest()
        self.resting[number] = record
        if len(self.resting) > RESTING_MAX:
            self._dropped(self.resting.popitem(last=False)[0])

    def forget(self, number: int) -> None:
        """Drop the record of one shard."""
        self.in_use.pop(number, None)
        self.resting.pop(number, None)

    def clear(self) -> None:
        """Drop all records; the next ones are of the snapshot that the index has now."""
        self.in_use.clear()
        self.resting.clear()
        self._verified.clear()
        self.snapshot = self.index.snapshot

    def renewed(self) -> None:
        """Drop all records: the index has a new snapshot."""
        self.clear()
        self.old_at = time.monotonic() + RENEW_SECONDS


@dataclass(slots=True)
class ShardFile:
    """An open shard. Any change to the file, or to its last name, changes its ctime.

    `source` is where its bytes come from: `shard` itself for a plain tar.
    """

    shard: OpenShard
    source: TarBytes
    path: bytes
    fingerprint: Fingerprint
    ctime_ns: int
    run: int = 0  # reads of a pass in order so far
    start: int = 0  # where it began (bytes)
    used: int = 0  # how many bytes it has read
    front: int = 0  # how far it has come (bytes)
    ahead: int = 0  # the byte up to which the disk was asked to read ahead
    readers: int = 0  # other threads that read from it
    ended: bool = False  # to be closed as soon as these have finished

    def look_ahead(self, begin: int, end: int) -> None:
        """Note a read of these bytes; if reads continue in order, have the disk read ahead.

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
        if self.run < PASS or self.front + READ_AHEAD // 2 < self.ahead:
            return
        if self.used * GAPS < self.front - self.start:
            return
        start = max(self.ahead, self.front)
        self.ahead = start + READ_AHEAD // 2
        self.will_need(start, self.ahead)

    def will_need(self, begin: int, end: int) -> None:
        """Begin to bring these bytes into the page cache, those of a remote shard into the cache; do not wait.

        Compressed shards have no readahead.
        """
        if self.remote is not None:
            self.remote.will_need(begin, end, in_parallel=False)
        elif isinstance(self.source, int):
            # A header may claim more than there is.
            source.begin_reading(self.source, begin, min(end, source.size_of(self.source)))

    @property
    def descriptors(self) -> int:
        """The number of descriptors that it takes: a remote shard or a reader of a compressed one has two."""
        sources = [self.shard] if self.source is self.shard else [self.shard, self.source]
        return sum(1 if isinstance(source, int) else 2 for source in sources)

    @property
    def remote(self) -> OpenObject | None:
        """The shard if its bytes come from a store without unpacking."""
        return None if isinstance(self.shard, int) or self.source is not self.shard else self.shard

    def hold(self) -> None:
        """Keep the shard open for another thread than that of the set.

        This and the next are called in the thread of the set.
        """
        self.readers += 1

    def let_go(self) -> None:
        self.readers -= 1
        if self.ended:
            self.close()

    def close(self) -> None:
        """Close the shard. Raises OSErrors that name the shard."""
        self.ended = True
        if self.readers:
            return
        with named(self.path):
            if self.source is not self.shard:
                source.close(self.source)
            source.close(self.shard)


class OpenFiles:
    """An LRU cache of open shards by number, with at most `most` descriptors.

    `closed` is called with the number of a shard that is evicted; `slowly` is entered around slow work.
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
        self._taken = 0  # descriptors

    def __len__(self) -> int:
        return len(self.files)

    def get(self, number: int, fingerprint: Fingerprint) -> ShardFile | None:
        """Return the open shard, if it had this fingerprint when it was opened."""
        file = self.files.get(number)
        if file is None or file.fingerprint != fingerprint:
            return None
        self.files.move_to_end(number)
        return file

    def open(
        self,
        number: int,
        path: bytes,
        fingerprint: Fingerprint,
        compression: str | None,
        ctime_of: Callable[[ShardFile], int],
    ) -> ShardFile:
        """Open a shard, and close the file that was open under its number.

        `fingerprint` and `compression` are those of its record. `ctime_of` compares the opened file with the
        record, and returns its ctime (ns). Raises what it raises, and MissingShard, UnreadableShard, RefusedShard.
        """
        shard = self._access.open(path)
        file = ShardFile(shard, shard, path, fingerprint, 0)
        try:
            file.source = self._source(shard, path, compression)
            file.ctime_ns = ctime_of(file)
        except BaseException:
            file.close()
            raise
        self.forget(number)
        self.files[number] = file
        self._taken += file.descriptors
        while self._taken > self._most and len(self.files) > 1:
            self._close(next(iter(self.files)))
        if file.source is not shard:
            self._close_compressed()
        return file

    def _source(self, shard: OpenShard, path: bytes, compression: str | None) -> TarBytes:
        """Return the source of the bytes of a shard. Raises StaleShard, UnreadableShard."""
        kind = compression
        if isinstance(
            shard, int
        ):  # it may be another file with the same times; for a remote shard nothing is fetched
            try:
                kind = compressed.kind_of(shard)
            except OSError as error:
                raise UnreadableShard(f"{os.fsdecode(path)}: {error.strerror}") from None
        if kind is None:
            return shard
        with self._slowly():
            return compressed.unpacked(kind, shard, path).source

    def _close(self, number: int) -> None:
        self._closed(number)
        self.forget(number)

    def _close_compressed(self) -> None:
        """Evict compressed shards above their own, smaller limits."""
        for is_copy, limit in ((True, COPIES_MAX), (False, READERS_MAX)):
            numbers = [
                number
                for number, file in self.files.items()
                if file.source is not file.shard and isinstance(file.source, int) == is_copy
            ]
            for number in numbers[:-limit]:
                self._close(number)

    def forget(self, number: int) -> None:
        """Close one shard, if it is open."""
        file = self.files.pop(number, None)
        if file is not None:
            self._taken -= file.descriptors
            file.close()

    def clear(self) -> None:
        """Close all."""
        while self.files:
            self.forget(next(iter(self.files)))


def is_compressed(path: bytes) -> bool | None:
    """Return True for a compressed shard (a remote one is judged by its name); None if it cannot be read."""
    if is_remote(path):
        return names.suffix_of(path.partition(b"?")[0].lower()) not in (b"", b".tar")
    try:
        return compressed.kind_at(path) is not None
    except (MissingShard, UnreadableShard):
        return None
