"""An LRU cache of open records, all of one snapshot of the index.

A record that has not been used for a while rests: it drops its views, which are most of its memory.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from wdsfs.index.record import Record
from wdsfs.index.store import Index
from wdsfs.storage.identity import Fingerprint

RECORDS_MAX, RESTING_MAX = 64, 960  # opened records in use, some 6 KiB each, and others without their views, 2 KiB
RENEW_SECONDS = 60.0  # how long one LMDB snapshot is held; an old one keeps freed pages from being used again


class OpenRecords:
    """Records by the number of their shard. `dropped` is called with the number of an evicted one."""

    def __init__(self, index: Index, dropped: Callable[[int], None]) -> None:
        self.index = index
        self._dropped = dropped
        self.in_use: OrderedDict[int, Record] = OrderedDict()
        self.resting: OrderedDict[int, Record] = OrderedDict()
        self.snapshot = index.snapshot  # which the records are of
        self._verified: set[bytes] = set()  # the keys of records that were found sound in this snapshot
        self.old_at = time.monotonic() + RENEW_SECONDS  # when (monotonic seconds) the snapshot should be renewed

    def fetch(self, number: int, key: bytes, fingerprint: Fingerprint) -> Record | None:
        """A record that is not in use: one that rests, or the one that the index has under `key` for a shard with
        this fingerprint, if it has one. It is in use then."""
        found = self.resting.pop(number, None)
        if found is None:
            found = self._read(key, fingerprint)
        if found is None:
            return None
        self.in_use[number] = found
        if len(self.in_use) > RECORDS_MAX:
            self._let_one_rest()
        return found

    def _read(self, key: bytes, fingerprint: Fingerprint) -> Record | None:
        found = self.index.record(key, fingerprint, verify=key not in self._verified)
        if found is not None:
            self._verified.add(key)
        return found

    def _let_one_rest(self) -> None:
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
        """The index has a new snapshot: drop all records of the old one."""
        self.clear()
        self.old_at = time.monotonic() + RENEW_SECONDS
