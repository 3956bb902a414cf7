"""Samples of joined sets (`--join`) by key: first in the shard beside, then in the whole set."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from wdsfs.index.record import STRAY, Record
from wdsfs.names import plain_key
from wdsfs.shards import Shard
from wdsfs.tree.indexing import indexed
from wdsfs.tree.path_table import KeyTable
from wdsfs.tree.shard_set import ShardSet

MISSING, TWICE = -1, -2  # instead of a shard's number: no shard has the key, or it occurs more than once
KEYS = b"k"  # the table of the keys of a set, in the index


class KeysMissing(Exception):
    """The keys of a whole joined set are needed: to be loaded by `JoinedSet.load`."""

    def __init__(self, joined: JoinedSet) -> None:
        super().__init__()
        self.joined = joined


class JoinedSet:
    """The set `lower`, joined with a view of `shards`. `version` is a number that changes with any companion."""

    def __init__(self, shards: Sequence[Shard], lower: ShardSet, version: Callable[[], int]) -> None:
        self._shards, self.lower, self._version = shards, lower, version
        self._loaded, self._table = -1, b""  # the version of which the table of keys is, and its key

    def partner(self, number: int) -> int | None:
        """Return the shard here with the same number as a shard of the view, if both sets have as many shards."""
        at, count = self._shards[number].place or (number, len(self._shards))
        return at if len(self.lower) == count else None

    def load(self) -> None:
        """Load the keys of the whole set, indexing what is not indexed. Raises ShardError."""
        numbers, record = range(len(self.lower)), self.lower.record
        for number in numbers:
            indexed(record, number)
        self._table = indexed(self.lower.keep_table, KEYS, lambda: KeyTable.build(map(record, numbers)))
        self._loaded = self._version()

    def _keys(self) -> KeyTable:
        """Return the keys of the present set. Raises KeysMissing."""
        if self._loaded != self._version():
            raise KeysMissing(self)
        return KeyTable.parse(self.lower.index.table(self._table))

    def _excluded(self, number: int) -> set[bytes]:
        """Return the keys that the split file of a joined data set leaves out of one of its shards."""
        return {plain_key(key) for key in self.lower.shards[number].without}

    def find(self, number: int, keys: list[bytes]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return for each key of a shard of the view the shard here (or MISSING, TWICE), and the entry."""
        shards = np.full(len(keys), MISSING, np.int64)
        entries = np.full(len(keys), MISSING, np.int64)
        # Sets that were made together pair shard by shard; a key that the shard beside this one lacks is searched
        # for in the whole set.
        beside = self.partner(number)
        if beside is not None:
            samples, twice = _samples_of(self.lower.record(beside))
            excluded = self._excluded(beside)
            for at, key in enumerate(keys):
                entry = samples.get(key)
                if entry is not None and key not in excluded:
                    shards[at], entries[at] = (TWICE if key in twice else beside), entry
        left = np.flatnonzero(shards == MISSING).tolist()
        if left:
            self._find_anywhere(keys, left, shards, entries)
        return shards, entries

    def _find_anywhere(
        self, keys: list[bytes], left: list[int], shards: NDArray[np.int64], entries: NDArray[np.int64]
    ) -> None:
        table = self._keys()
        excluded = [self._excluded(number) for number in range(len(self.lower))]
        for at in left:
            crc = zlib.crc32(keys[at])
            places = [
                (number, entry)
                for number in table.candidates(crc)
                if keys[at] not in excluded[number]
                for entry in self.lower.record(number).find_samples(keys[at], crc)
            ]
            if places:
                shards[at], entries[at] = places[0] if len(places) == 1 else (TWICE, places[0][1])


def _samples_of(record: Record) -> tuple[dict[bytes, int], set[bytes]]:
    """Return the samples of a shard by key, and the keys that it has more than once."""
    samples: dict[bytes, int] = {}
    twice: set[bytes] = set()
    for entry, (path, flags) in enumerate(zip(record.paths(), record.entry_flags, strict=True)):
        if not flags & STRAY:
            if path in samples:
                twice.add(path)
            samples[path] = entry
    return samples, twice
