"""Finding samples by key in joined sets: first in the shard beside, then in the whole set."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from wdsfs.index.record import STRAY, Record
from wdsfs.names import plain_key
from wdsfs.spec.expand import Shard
from wdsfs.tree.draft import MISSING, TWICE
from wdsfs.tree.indexing import indexed
from wdsfs.tree.path_table import KeyTable
from wdsfs.tree.shard_set import ShardSet

KEYS = b"k"  # the table of the keys of a set, in the index


class KeysMissing(Exception):
    """The keys of a whole joined set (by its number) are needed: to be loaded by `JoinedSets.load`."""

    def __init__(self, which: int) -> None:
        super().__init__(which)
        self.which = which


class JoinedSets:
    """The joined sets of a view of `shards`. `version` returns a number that changes with any shard of them."""

    def __init__(self, shards: Sequence[Shard], joined: Sequence[ShardSet], version: Callable[[], int]) -> None:
        self._shards, self._joined, self._version = shards, joined, version
        self._tables: dict[int, tuple[int, bytes]] = {}  # version and key of the table of a joined set

    def partner(self, which: int, number: int) -> int | None:
        """The shard of a joined set that stands beside the one with this number, if both have as many shards."""
        at, count = self._shards[number].place or (number, len(self._shards))
        return at if len(self._joined[which]) == count else None

    def beside(self, number: int) -> bytes:
        """Bytes that differ between sets in which other shards stand beside this one."""
        return repr([self.partner(which, number) for which in range(len(self._joined))]).encode()

    def around(self, number: int) -> list[JoinedFrom]:
        """The joined sets as this shard of the view sees them."""
        return [JoinedFrom(self, which, number, source) for which, source in enumerate(self._joined)]

    def load(self, which: int) -> None:
        """Load the keys of a whole joined set, indexing what is not indexed. Raises ShardError."""
        source = self._joined[which]
        for number in range(len(source)):
            indexed(source.record, number)
        numbers = range(len(source))
        table = indexed(source.keep_table, KEYS, lambda: KeyTable.build(map(source.record, numbers)))
        self._tables[which] = self._version(), table

    def keys_of(self, which: int) -> KeyTable:
        """The keys of a joined set as it is now. Raises KeysMissing."""
        version, table = self._tables.get(which, (-1, b""))
        if version != self._version():
            raise KeysMissing(which)
        return KeyTable.parse(self._joined[which].index.table(table))


class JoinedFrom:
    """A joined set as one shard of the view sees it: `draft.JoinedSet`."""

    def __init__(self, owner: JoinedSets, which: int, number: int, source: ShardSet) -> None:
        self._owner, self._which, self._number, self._source = owner, which, number, source

    def path(self, number: int) -> bytes:
        """The path of a shard of the joined set."""
        return self._source.shards[number].path

    def record(self, number: int) -> Record:
        """The record of a shard of the joined set. Raises what `ShardSet.record` raises."""
        return self._source.record(number)

    def _excluded(self, number: int) -> set[bytes]:
        """The keys that the split file of a joined data set leaves out of one of its shards."""
        return {plain_key(key) for key in self._source.shards[number].without}

    def find(self, keys: list[bytes]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See `draft.JoinedSet`."""
        shards = np.full(len(keys), MISSING, np.int64)
        entries = np.full(len(keys), MISSING, np.int64)
        # Sets that were made together pair shard by shard; a key that the shard beside this one lacks is searched
        # for in the whole set.
        beside = self._owner.partner(self._which, self._number)
        if beside is not None:
            found, twice = _samples_of(self.record(beside))
            excluded = self._excluded(beside)
            for at, key in enumerate(keys):
                entry = found.get(key)
                if entry is not None and key not in excluded:
                    shards[at], entries[at] = (TWICE if key in twice else beside), entry
        left = np.flatnonzero(shards == MISSING).tolist()
        if left:
            self._find_anywhere(keys, left, shards, entries)
        return shards, entries

    def _find_anywhere(
        self, keys: list[bytes], left: list[int], shards: NDArray[np.int64], entries: NDArray[np.int64]
    ) -> None:
        table = self._owner.keys_of(self._which)
        excluded = [self._excluded(number) for number in range(len(self._source))]
        for at in left:
            crc = zlib.crc32(keys[at])
            places = [
                (number, entry)
                for number in table.candidates(crc)
                if keys[at] not in excluded[number]
                for entry in self.record(number).find_samples(keys[at], crc)
            ]
            if places:
                shards[at], entries[at] = places[0] if len(places) == 1 else (TWICE, places[0][1])


def _samples_of(record: Record) -> tuple[dict[bytes, int], set[bytes]]:
    """The samples of a shard by key, and the keys that it has more than once."""
    found: dict[bytes, int] = {}
    twice: set[bytes] = set()
    for entry, (path, flags) in enumerate(zip(record.paths(), record.entry_flags, strict=True)):
        if not flags & STRAY:
            if path in found:
                twice.add(path)
            found[path] = entry
    return found, twice
