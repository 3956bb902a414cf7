"""Reading ahead by the indexes of other tools: where it is asked for, and that nothing depends on it."""

from __future__ import annotations

import itertools
import os
import struct
import threading
from pathlib import Path

import pytest

from tests import sets
from tests.tars import member, tar
from wdsfs.index import hints
from wdsfs.index.record import Record
from wdsfs.index.record_of_file import build_file
from wdsfs.interop import dali as dali_module

SIZE = 200_000  # bytes of a large member; with its header and padding 200,704
STEP = 200_704
LARGE = tar(*(member(b"%d.jpg" % n, bytes(SIZE)) for n in range(5)))
SMALL = tar(*(member(b"%d.jpg" % n, bytes(3000)) for n in range(300)))


def asked(path: Path, monkeypatch: pytest.MonkeyPatch, everything: bool = True) -> list[tuple[int, int]]:
    """Return the ranges that a scan of the shard asks the kernel for: from, to (bytes)."""
    found: list[tuple[int, int]] = []
    told = threading.Event()

    def advise(_fd: int, start: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        found.append((start, start + length))
        told.set()

    monkeypatch.setattr(hints.os, "posix_fadvise", advise)
    fd = os.open(path, os.O_RDONLY)
    try:
        with hints.reading_ahead(fd, os.fsencode(path)):
            thread = next((one for one in threading.enumerate() if one.name == "ahead"), None)
            if thread is not None and everything:
                thread.join(sets.PATIENCE)
            elif thread is not None:
                assert told.wait(sets.PATIENCE)
    finally:
        os.close(fd)
    assert not any(one.name == "ahead" for one in threading.enumerate())
    return found


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    (tmp_path / "s.tar").write_bytes(LARGE)
    return tmp_path / "s.tar"


def dali(shard: Path) -> bytes:
    return b"".join(dali_module.dali_index(Record(build_file(os.fsencode(shard)))))


def test_all_headers_between_large_members_are_asked_for(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(shard, monkeypatch) == []
    contents = dali(shard)
    shard.with_suffix(".idx").write_bytes(contents)
    by_dali = asked(shard, monkeypatch)
    shard.with_suffix(".idx").unlink()
    shard.with_suffix(".tar.idx").write_bytes(struct.pack("=6Q", *(n * STEP for n in range(6))))
    by_energon = asked(shard, monkeypatch)
    for found in (by_dali, by_energon):
        for n in range(5):  # a header and what a scan reads with it
            assert any(start <= n * STEP and n * STEP + 1024 <= end for start, end in found)
        assert sum(end - start for start, end in found) < 6 * 3 * 4096
        assert all(one[1] <= other[1] for one, other in itertools.pairwise(found))


def test_small_members_are_read_in_order_without_being_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = tmp_path / "s.tar"
    shard.write_bytes(SMALL)
    shard.with_suffix(".idx").write_bytes(dali(shard))
    shard.with_suffix(".tar.idx").write_bytes(struct.pack("=301Q", *(n * 3584 for n in range(301))))
    assert asked(shard, monkeypatch) == []


@pytest.mark.parametrize(
    "index",
    [
        b"v1.2 1\njpg 12345678901234567890123 4 a.jpg\n",
        b"v1.2 2\njpg 512 4\n",
        b"v1.2 many\n",
        b"\xff" * 100,
        b"",
        b"v1.1 2\njpg 512 1\njpg 99999999999 1\n",
    ],
)
def test_what_a_wrong_index_says_changes_nothing(
    shard: Path, index: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = sets.listing(Record(build_file(os.fsencode(shard))))
    for suffix in (".idx", ".tar.idx"):
        shard.with_suffix(suffix).write_bytes(index)
        assert sets.listing(Record(build_file(os.fsencode(shard)))) == right
        assert all(end <= len(LARGE) for _, end in asked(shard, monkeypatch))
        monkeypatch.undo()


def test_it_ends_with_the_scan(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = b"v1.1 1\n" + b" ".join(b"jpg %d 1" % (n * 5000) for n in range(200)) + b"\n"
    shard.with_suffix(".idx").write_bytes(many)
    assert len(asked(shard, monkeypatch)) == 200
    enough = threading.Event()
    enough.set()
    hints._advise(-1, len(LARGE), [0, 5000], enough)  # asks nothing of a descriptor that is none
    assert 1 <= len(asked(shard, monkeypatch, everything=False)) <= 200
