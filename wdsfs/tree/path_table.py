"""Tables over all shards of a set: which have a path in a merged tree, and which may have a key.

The index keeps them like records, and makes them again when a shard of the set has changed (`Index.keep_table`).
`shown_names.py` decides which paths a shard shows; docs/reference/formats.md shows the bytes.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from wdsfs.index.record import Record
from wdsfs.index.record_columns import equal_range
from wdsfs.shards import GONE, Fingerprint

Keys = NDArray[np.uint64]

# The key of a path is a hash of its last name, seeded with the key of its directory. The key of the top is a
# random number of the table, so the writer of a shard cannot make paths with equal keys.
key_below = xxhash.xxh3_64_intdigest


def keys_below(names: Sequence[bytes], directories: Keys) -> Keys:
    """Return the keys of the paths with these names in the directories with these keys."""
    return np.fromiter(map(key_below, names, directories.tolist()), np.uint64, len(names))


class ShownPaths(NamedTuple):
    """The keys of the paths that a shard shows: those of folders, and of samples or files in folders."""

    folders: Keys
    others: Keys


class PathTable(NamedTuple):
    """The shards by the keys of their paths, in columns.

    `folders` has a row for each shard with a folder, `others` one for each path, with the first shard that has it.
    `leaders` are the shards that have a new folder: one that no earlier shard has. Two paths with the same key are
    very unlikely. They count as the same path: the second then gets the name of its shard, without need.
    """

    top: int
    folders: memoryview
    folder_shards: memoryview
    others: memoryview
    other_shards: memoryview
    leader_shards: memoryview

    @classmethod
    def build(cls, top: int, shards: Iterable[tuple[int, ShownPaths]]) -> bytes:
        """Return the bytes of the table of these shards, which are in ascending order."""
        parts = [(number, *paths) for number, paths in shards]
        folders, folder_shards = _concatenate_keys([(number, folders) for number, folders, _ in parts])
        others, other_shards = _concatenate_keys([(number, others) for number, _, others in parts])
        order = np.argsort(folders, kind="stable")
        folders, folder_shards = folders[order], folder_shards[order]
        others, firsts = np.unique(others, return_index=True)
        leaders = np.unique(folder_shards[np.unique(folders, return_index=True)[1]])
        columns = (folders, folder_shards, others, other_shards[firsts], leaders)
        return top.to_bytes(8, "little") + b"".join(_pack_column(column) for column in columns)

    @classmethod
    def parse(cls, data: memoryview) -> PathTable:
        """Return the table that these bytes contain, in place."""
        columns = _Reader(data, 8)
        return cls(
            int.from_bytes(data[:8], "little"),
            *(columns.next(8), columns.next(4), columns.next(8), columns.next(4), columns.next(4)),
        )

    def with_folder(self, key: int) -> memoryview:
        """Return the shards with this folder, in ascending order."""
        rows = equal_range(self.folders, key)
        return self.folder_shards[rows.start : rows.stop]

    def first(self, key: int) -> int | None:
        """Return the first shard that has a sample or file with this path."""
        at = bisect_left(self.others, key)
        return self.other_shards[at] if at < len(self.others) and self.others[at] == key else None

    def has_folder(self, key: int) -> bool:
        """Return True if a shard has this folder."""
        at = bisect_left(self.folders, key)
        return at < len(self.folders) and self.folders[at] == key

    def leads(self, shard: int) -> bool:
        """Return True if a shard has a folder that no shard before it has."""
        at = bisect_left(self.leader_shards, shard)
        return at < len(self.leader_shards) and self.leader_shards[at] == shard

    def count_folders(self, keys: Keys) -> NDArray[np.int64]:
        """Return the number of shards with each of these folders."""
        column = np.asarray(self.folders, np.uint64)
        return np.asarray(np.searchsorted(column, keys, "right") - np.searchsorted(column, keys))

    def are_first(self, keys: Keys, shard: int) -> NDArray[np.bool_]:
        """Return for each of these samples or files of a shard True if no earlier shard has its path."""
        order = np.argsort(keys)  # neighbours in the table are found much faster
        rows = np.empty(len(keys), np.int64)
        rows[order] = np.searchsorted(np.asarray(self.others, np.uint64), keys[order])
        rows = np.minimum(rows, len(self.others) - 1)
        return np.asarray(np.asarray(self.other_shards)[rows] == shard)


def new_top() -> int:
    """Return a key for the top of a table."""
    return secrets.randbits(64)


class KeyTable(NamedTuple):
    """The shards that may have a key, by its CRC-32: candidates, whose records have the answer. 8 bytes a key."""

    sums: memoryview
    shards: memoryview

    @classmethod
    def build(cls, records: Iterable[Record | None]) -> tuple[list[Fingerprint], bytes]:
        """Return the fingerprints of the records that went into the table, and its bytes."""
        fingerprints, parts = list[Fingerprint](), list[tuple[int, NDArray[Any]]]()
        for number, record in enumerate(records):
            fingerprints.append(GONE if record is None else record.fingerprint)
            if record is not None:
                parts.append((number, record.array("entry.hash").copy()))
        sums, shards = _concatenate_keys(parts)
        pairs = np.unique(sums << np.uint64(32) | shards)  # each shard once for each sum
        return fingerprints, _pack_column((pairs >> np.uint64(32)).astype("<u4")) + _pack_column(
            pairs.astype("<u4")
        )

    @classmethod
    def parse(cls, data: memoryview) -> KeyTable:
        """Return the table that these bytes contain, in place."""
        columns = _Reader(data)
        return cls(columns.next(4), columns.next(4))

    def candidates(self, crc: int) -> list[int]:
        """Return the shards that may have the key with this sum, in ascending order."""
        rows = equal_range(self.sums, crc)
        return self.shards[rows.start : rows.stop].tolist()


def _concatenate_keys(parts: Sequence[tuple[int, NDArray[Any]]]) -> tuple[Keys, NDArray[np.uint32]]:
    """Return the keys of all shards, one shard after the other, and the number of its shard for each."""
    keys = np.concatenate([np.zeros(0, np.uint64), *(keys for _, keys in parts)]).astype(np.uint64)
    counts = np.array([len(keys) for _, keys in parts], np.int64)
    return keys, np.repeat(np.array([number for number, _ in parts], np.uint32), counts)


def _pack_column(column: NDArray[Any]) -> bytes:
    return len(column).to_bytes(8, "little") + column.tobytes()


class _Reader:
    """Reads the columns of a table one after the other."""

    def __init__(self, data: memoryview, at: int = 0) -> None:
        self._data, self._at = data, at

    def next(self, size: int) -> memoryview:
        """Return the next column, of numbers of 4 or 8 bytes."""
        begin = self._at + 8
        self._at = begin + size * int.from_bytes(self._data[self._at : begin], "little")
        return self._data[begin : self._at].cast("Q" if size == 8 else "I")
