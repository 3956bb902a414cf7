"""The table of a cached object, byte by byte."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import xxhash

from tests.remote.cached import URL, content_of, pin_of
from wdsfs.remote.cached_object import BLOCK, BlockTable


def test_the_bytes_of_a_table(tmp_path: Path) -> None:
    """As docs/format.md describes them: a cache outlives the version that filled it."""
    content = content_of(9 * BLOCK + 100)
    fd = os.open(tmp_path / "table", os.O_RDWR | os.O_CREAT)
    table = BlockTable.create(fd, URL, pin_of(len(content)))
    table.put(2, memoryview(content)[2 * BLOCK : 3 * BLOCK])
    table.put(9, memoryview(content)[9 * BLOCK :])
    table.note_whole(1234)
    found = (tmp_path / "table").read_bytes()
    os.close(fd)

    assert found[:8] == b"wdsfs-o\1"
    assert struct.unpack_from("<d", found, 8) == (86400.0,)
    length, seed = struct.unpack_from("<II", found, 32)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert found[16:32] == struct.pack("<Q", 1234) + xxhash.xxh3_64_digest(f"1234 {boot}".encode(), seed)
    assert json.loads(found[40 : 40 + length]) == [URL, *pin_of(len(content))]
    assert found[40 + length : 48 + length] == xxhash.xxh3_64_digest(found[32 : 40 + length])
    assert found[4096:4106] == bytes([0, 0, 1, 0, 0, 0, 0, 0, 0, 1])
    sums = struct.unpack_from("<10Q", found, 4112)
    assert len(found) == 4112 + 10 * 8
    assert sums[2] == xxhash.xxh3_64_intdigest(content[2 * BLOCK : 3 * BLOCK], seed + 2)
    assert sums[9] == xxhash.xxh3_64_intdigest(content[9 * BLOCK :], seed + 9)
    assert [sums[block] for block in (0, 1, 3, 8)] == [0] * 4


def test_a_long_url(tmp_path: Path) -> None:
    """Its text takes more than a page."""
    fd = os.open(tmp_path / "table", os.O_RDWR | os.O_CREAT)
    shown = URL + "\udcff" * 3000
    BlockTable.create(fd, shown, pin_of(BLOCK)).put(0, memoryview(content_of(BLOCK)))
    table = BlockTable.load(fd)
    assert table is not None
    assert (table.shown, table.pin, table.count()) == (shown, pin_of(BLOCK), 1)
    assert table.wrong(0, memoryview(content_of(BLOCK))) == []
    os.close(fd)


@pytest.mark.parametrize("digest", [None, 0])
def test_a_hole_is_no_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digest: int | None) -> None:
    """... of zeros, nor one whose checksum is 0, although a hole in the table has that."""
    if digest is not None:
        monkeypatch.setattr(xxhash, "xxh3_64_intdigest", lambda data, seed: digest)
    fd = os.open(tmp_path / "table", os.O_RDWR | os.O_CREAT)
    table = BlockTable.create(fd, URL, pin_of(2 * BLOCK))
    table.put(0, memoryview(bytes(BLOCK)))
    assert table.wrong(0, memoryview(bytes(2 * BLOCK))) == [1]
    os.close(fd)
