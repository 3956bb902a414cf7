"""Tables over a set: bytes, and what they answer."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import xxhash

from tests import tars
from wdsfs.index.record import Record
from wdsfs.index.record_of_file import build_file
from wdsfs.shards import GONE
from wdsfs.tree.path_table import KeyTable, PathTable, ShownPaths


def columns_of(data: bytes, kinds: str) -> list[tuple[int, ...]]:
    """The columns of numbers of 4 (`I`) or 8 bytes (`Q`)."""
    columns, at = [], 0
    for kind in kinds:
        count = int.from_bytes(data[at : at + 8], "little")
        columns.append(struct.unpack_from(f"<{count}{kind}", data, at + 8))
        at += 8 + struct.calcsize(f"<{count}{kind}")
    assert at == len(data)
    return columns


def test_the_tables_are_as_format_md_says(tmp_path: Path) -> None:
    records = []
    for number, names in enumerate(([b"a.x", b"d/b.x", b"stray"], [b"a.x", b"a.y", b"c.x"])):
        path = tmp_path / f"{number}.tar"
        path.write_bytes(tars.tar(*map(tars.member, names)))
        records.append(Record(build_file(bytes(path))))
    fingerprints, data = KeyTable.build([records[0], None, records[1]])
    assert fingerprints == [records[0].fingerprint, GONE, records[1].fingerprint]
    sums, shards = columns_of(data, "II")
    owners = [(b"a", 0), (b"a", 2), (b"c", 2), (b"d/b", 0), (b"stray", 0)]
    assert [*zip(sums, shards, strict=True)] == sorted((zlib.crc32(path), shard) for path, shard in owners)
    assert KeyTable.parse(memoryview(data)).candidates(zlib.crc32(b"a")) == [0, 2]
    assert KeyTable.parse(memoryview(data)).candidates(0) == []

    key = xxhash.xxh3_64_intdigest
    d, a, b, c = key(b"d", 7), key(b"a", 7), key(b"b", key(b"d", 7)), key(b"c", 7)
    parts = [(1, ShownPaths(_keys(d), _keys(a, b))), (4, ShownPaths(_keys(d), _keys(a, c)))]
    data = PathTable.build(7, parts)
    assert data[:8] == struct.pack("<Q", 7)
    assert columns_of(data[8:], "QIQII") == [
        (d, d),
        (1, 4),
        tuple(sorted((a, b, c))),
        tuple(first for _, first in sorted(((a, 1), (b, 1), (c, 4)))),
        (1,),
    ]
    table = PathTable.parse(memoryview(data))
    assert table.top == 7
    assert (table.first(a), table.first(c), table.first(d)) == (1, 4, None)
    assert ([*table.with_folder(d)], [*table.with_folder(a)]) == ([1, 4], [])
    assert (table.has_folder(d), table.has_folder(b)) == (True, False)
    assert table.count_folders(_keys(a, d)).tolist() == [0, 2]
    assert table.are_first(_keys(c, a), 4).tolist() == [True, False]
    assert [table.leads(number) for number in range(6)] == [False, True, False, False, False, False]


def _keys(*keys: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(keys, np.uint64)
