"""Tables over a whole set of shards: which of them may have a path (PathUnion), and which want it (Claims).

The index keeps them like records, and makes them again when a shard of the set has changed (`Index.union`,
`Index.claims`). How claims are encoded is in `index/merged_names.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from wdsfs.index import merged_names
from wdsfs.index.record import Record
from wdsfs.storage.identity import GONE, Fingerprint


class KeptTables(Protocol):
    """The part of the index that the tables use."""

    snapshot: int

    def kept(self, key: bytes) -> memoryview:
        """The table at `key`, in place, valid until `snapshot` changes. Raises IndexUnusable."""


class PathUnion:
    """For each path the shards that may have it: candidates, whose records have the answer.

    Two columns sorted by the CRC-32 of the path, one pair for folders and one for everything else. Equal sums
    of different paths only cost one more lookup. 8 bytes a name.
    """

    def __init__(self, key: bytes, index: KeptTables) -> None:
        self._key, self._index = key, index

    @staticmethod
    def build(count: int, records: Callable[[int], Record | None]) -> tuple[list[Fingerprint], bytes]:
        """Return the fingerprints of the records that went into the table, and its bytes: two columns, twice."""
        fingerprints: list[Fingerprint] = []
        sums: dict[str, list[Any]] = {"folder": [], "entry": []}
        owners: dict[str, list[Any]] = {"folder": [], "entry": []}
        for number in range(count):
            one = records(number)
            fingerprints.append(GONE if one is None else one.fingerprint)
            if one is None:
                continue
            tables = {"folder": ["folder.hash"], "entry": ["entry.hash"]}
            tables["entry"] += [f"alias{domain}.hash" for domain in range(3) if one.aliases[domain]]
            tables["folder"] += [f"alias{domain}.hash" for domain in range(3) if one.aliases[domain]]
            for kind, sections in tables.items():
                for section in sections:
                    sums[kind].append(one.array(section).copy())
                    owners[kind].append(np.full(len(sums[kind][-1]), number, dtype=np.uint32))
        parts = []
        for kind in ("folder", "entry"):
            hashes = np.concatenate([np.zeros(0, np.uint64), *sums[kind]]).astype(np.uint64)
            shards = np.concatenate([np.zeros(0, np.uint32), *owners[kind]]).astype(np.uint64)
            pairs = np.unique(hashes << np.uint64(32) | shards)  # a shard once for each sum, however many have it
            columns = ((pairs >> np.uint64(32)).astype("<u4"), pairs.astype("<u4"))
            parts.append(len(pairs).to_bytes(8, "little") + b"".join(column.tobytes() for column in columns))
        return fingerprints, b"".join(parts)

    def columns(self) -> list[tuple[memoryview, memoryview]]:
        """(sums, shards) of folders and of entries, in place, valid until the index is renewed."""
        value = self._index.kept(self._key)
        at, found = 0, []
        for _ in range(2):
            size = 4 * int.from_bytes(value[at : at + 8], "little")
            at += 8
            found.append((value[at : at + size].cast("I"), value[at + size : at + 2 * size].cast("I")))
            at += 2 * size
        return found


class Claims:
    """For each path exactly the shards that want it in one tree over all of them. 8 bytes a name."""

    def __init__(self, key: bytes, index: KeptTables) -> None:
        self._key, self._index = key, index
        self._snapshot = -1
        self._tables: merged_names.Tables | None = None

    def tables(self) -> merged_names.Tables:
        """The tables in place, valid until the index is renewed."""
        if self._tables is None or self._snapshot != self._index.snapshot:
            self._tables = merged_names.parse(self._index.kept(self._key))
            self._snapshot = self._index.snapshot
        return self._tables
