"""The look at LMDB's pages: all that LMDB writes passes, and what passes is sound by another verifier's book.

The other verifier is the one that comes with py-lmdb, a walk byte by byte over a file at rest.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import pytest
from lmdb import verify

from tests.index.test_store import spoil_pages
from wdsfs.index import lmdb_check
from wdsfs.index.lmdb_check import Damaged

SIZE = os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def environment(directory: Path) -> Iterator[tuple[lmdb.Environment, int]]:
    """An environment and a descriptor of its file."""
    with lmdb.open(str(directory), map_size=1 << 30) as env:
        fd = os.open(directory / "data.mdb", os.O_RDONLY)
        try:
            yield env, fd
        finally:
            os.close(fd)


def look(env: lmdb.Environment, fd: int) -> bool:
    lmdb_check.check_metas(fd)
    with env.begin() as txn:
        return lmdb_check.check(fd, txn.id())


def at_rest(path: Path) -> None:
    """Run the checks before and after an index is opened, on a file that nobody has open. Raises Damaged."""
    fd = os.open(path, os.O_RDONLY)
    try:
        lmdb_check.check_metas(fd)
        metas = [lmdb_check._read_meta(fd, number, SIZE) for number in (0, 1)]
        assert lmdb_check.check(fd, max(meta.transaction for meta in metas))
    finally:
        os.close(fd)


@pytest.mark.parametrize("seed", range(12))
def test_what_lmdb_writes_is_sound(tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    sizes = [0, 1, 20, 130, 2000, 2030, 2040, 5000, 30_000]
    keys = [
        choose.choice([b"s", b"r"]) + choose.randbytes(16) for _ in range(choose.choice([1, 5, 50, 400, 2000]))
    ]
    reader = None
    with environment(tmp_path) as (env, fd):
        assert look(env, fd)
        for _ in range(20):
            with env.begin(write=True) as txn:
                txn.put(b"format", b"1")
                for key in choose.sample(keys, choose.randrange(min(len(keys), 300) + 1)):
                    if choose.random() < 0.3:
                        txn.delete(key)
                    else:
                        txn.put(key, choose.randbytes(choose.choice(sizes)))
                if choose.random() < 0.1:
                    for key in keys:
                        txn.delete(key)
            if reader is None and choose.random() < 0.2:
                reader = env.begin()  # keeps pages from being used again
            elif reader is not None and choose.random() < 0.3:
                reader.abort()
                reader = None
            assert look(env, fd)
            with env.begin(buffers=True) as txn:
                small = txn.get(b"format")
                assert small is not None
                for _, value in txn.cursor():
                    lmdb_check.check_extent(value, small, SIZE)
    assert verify.verify(str(tmp_path)) == []


def test_a_snapshot_that_is_held_stays_sound_while_others_commit(tmp_path: Path) -> None:
    with environment(tmp_path) as (env, fd):
        for turn in range(5):
            with env.begin(write=True) as txn:
                for number in range(50):
                    txn.put(b"%d" % number, bytes(100 * turn))
        with env.begin() as held:
            assert lmdb_check.check(fd, held.id())
            with env.begin(write=True) as txn:
                txn.put(b"x", b"y")
            assert lmdb_check.check(fd, held.id())
            with env.begin(write=True) as txn:
                txn.put(b"x", b"z")
            assert not lmdb_check.check(fd, held.id())  # its meta page is gone; the caller takes a newer snapshot


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with all kinds of pages: branches, leaves, large values, and a list of free pages with its own."""
    directory = tmp_path_factory.mktemp("env")
    choose = random.Random(1)
    with environment(directory) as (env, fd):
        keys = [b"r" + choose.randbytes(16) for _ in range(700)]
        for turn in range(3):
            with env.begin(write=True) as txn:
                for number, key in enumerate(keys[turn * 100 :]):
                    txn.put(key, choose.randbytes(20_000 if number % 3 == turn else 50 * (number % 9)))
        with env.begin(write=True) as txn:
            for key in keys[::2]:
                txn.delete(key)
        assert look(env, fd)
    data = (directory / "data.mdb").read_bytes()
    assert {1, 2, 4, 8} <= {flags_of(data, page) for page in range(len(data) // SIZE)}
    return data


def flags_of(data: bytes | bytearray, page: int) -> int:
    return int.from_bytes(data[page * SIZE + 10 : page * SIZE + 12], "little")


def trees(data: bytes) -> tuple[list[int], lmdb_check.Meta]:
    """The pages of both trees that are in use, and the meta page that counts."""
    fd = os.memfd_create("data")
    try:
        os.write(fd, data)
        meta = max((lmdb_check._read_meta(fd, number, SIZE) for number in (0, 1)), key=lambda one: one.transaction)
        checker = lmdb_check._Checker(fd, meta)
        checker.walk(meta.main, free=False)
        checker.walk(meta.free, free=True)
        return [page for page in range(len(checker.used)) if checker.used[page]], meta
    finally:
        os.close(fd)


def test_what_passes_is_sound_by_the_other_verifier(tmp_path: Path, file: bytes) -> None:
    passed = 0
    for seed in range(150):
        spoilt = spoil_pages(file, seed)
        (tmp_path / "data.mdb").write_bytes(spoilt)
        try:
            at_rest(tmp_path / "data.mdb")
        except Damaged:
            continue
        passed += 1
        # Headers of large values are looked at when the values are replaced; a leak costs space only.
        later = ("overflow page", "not a pure overflow page", "a leak")
        try:
            problems = verify.verify(str(tmp_path))
        except verify.VerifyError as error:
            raise AssertionError(seed) from error
        assert [text for text in problems if not any(one in text for one in later)] == [], seed
    assert passed > 5


def _put(data: bytearray, at: int, form: str, *values: int) -> None:
    data[at : at + struct.calcsize("=" + form)] = struct.pack("=" + form, *values)


def _get(data: bytes | bytearray, at: int, form: str) -> int:
    return int(struct.unpack_from("=" + form, data, at)[0])


class Spots:
    """Bytes of a file at which a damage begins: in the first pages, nodes and lists of their kinds."""

    def __init__(self, data: bytearray) -> None:
        self.data = data
        self.used, self.live = trees(bytes(data))
        self.leaf, self.branch = (self.first(flags) for flags in (2, 1))
        self.leaf_node, self.branch_node = self.nodes(self.leaf)[1], self.nodes(self.branch)[1]
        self.meta = self.live.transaction % 2 * SIZE + 16
        self.main = self.meta + 24 + 48
        leaves = [page * SIZE for page in self.used if flags_of(data, page) == 2]
        nodes = [node for leaf in leaves for node in self.nodes(leaf)]
        self.value = next(at for at in nodes if _get(data, at + 4, "H") == 1 and _get(data, at + 6, "H") == 17)
        lists = self.nodes(self.live.free.root * SIZE)
        self.last_list = lists[-1]
        self.free = next(filter(None, map(self.free_list, lists)))

    def first(self, flags: int) -> int:
        return next(page for page in self.used if flags_of(self.data, page) == flags) * SIZE

    def nodes(self, page_at: int) -> list[int]:
        slots = range(page_at + 16, page_at + _get(self.data, page_at + 12, "H"), 2)
        return [page_at + _get(self.data, slot, "H") for slot in slots]

    def free_list(self, node: int) -> int:
        """Where the list of free pages in a node begins, with its length; 0 for a list of few pages."""
        if _get(self.data, node + 4, "H") == 1:
            return _get(self.data, node + 16, "Q") * SIZE + 16
        return node + 16 if _get(self.data, node, "I") > 24 else 0


# What is damaged, what is told, the place, bytes behind it, the form of the number there, and a wrong one.
Wrong = int | Callable[[Spots], int]
DAMAGES: dict[str, tuple[str, str, int, str, Wrong]] = {
    "the number of a page": ("header of a page", "leaf", 0, "Q", 5),
    "the kind of a page": ("header of a page", "leaf", 10, "H", 1),
    "a dirty page": ("header of a page", "leaf", 10, "H", 0x12),
    "no nodes": ("header of a page", "leaf", 12, "H", 16),
    "too many nodes": ("header of a page", "leaf", 12, "H", 60_000),
    "an odd end of the slots": ("header of a page", "leaf", 12, "H", 33),
    "a branch of one": ("header of a page", "branch", 12, "H", 18),
    "a slot past the page": ("not inside", "leaf", 18, "H", 65_534),
    "a slot in the slots": ("not inside", "leaf", 18, "H", 18),
    "two slots for a node": ("overlap", "leaf", 18, "H", lambda at: _get(at.data, at.leaf + 16, "H")),
    "a key past the page": ("overlap", "leaf_node", 6, "H", 60_000),
    "a value past the page": ("overlap|inside the file", "leaf_node", 0, "I", 1 << 31),
    "a database in a value": ("unknown kind", "leaf_node", 4, "H", 2),
    "a child that is no page": ("does not exist", "branch_node", 0, "I", 1 << 30),
    "a child that is a meta page": ("does not exist", "branch_node", 0, "I", 1),
    "a child that is the parent": ("two places", "branch_node", 0, "I", lambda at: at.branch // SIZE),
    "keys out of order": ("out of order", "leaf_node", 8, "Q", 0),
    "a branch that misleads": ("out of order", "branch_node", 8, "Q", 0),
    "a value past the file": ("not inside the file", "value", 25, "Q", lambda at: at.live.last),
    "a value that is too long": ("not inside the file", "value", 0, "I", 1 << 31),
    "a value nowhere": ("does not exist", "value", 25, "Q", 0),
    "a value in a tree": ("two places", "value", 25, "Q", lambda at: at.used[0]),
    "a free page past the end": ("free page does not exist", "free", 8, "Q", lambda at: at.live.last + 1),
    "a free page twice": ("list of free pages", "free", 16, "Q", lambda at: _get(at.data, at.free + 8, "Q")),
    "too many free pages": ("list of free pages", "free", 0, "Q", 1 << 40),
    "free pages of the future": ("from the future", "last_list", 8, "Q", lambda at: at.live.transaction + 1),
    "a wrong number of entries": ("other pages", "main", 32, "Q", 1),
    "a wrong depth": ("header of a page", "main", 6, "H", 3),
    "no depth": ("no root", "main", 6, "H", 0),
    "a root past the end": ("no root", "main", 40, "Q", 1 << 62),
    "no root": ("empty tree", "main", 40, "Q", (1 << 64) - 1),
    "another magic": ("meta page", "meta", 0, "I", 1),
    "another version": ("meta page", "meta", 4, "I", 2),
    "a fixed address": ("meta page", "meta", 8, "Q", 1 << 30),
    "a page size of 0": ("meta page", "meta", 24, "I", 0),
    "another page size": ("meta page|cut off", "meta", 24, "I", 8192),
    "flags of a database": ("meta page", "main", 4, "H", 16),
    "far more pages than the file has": ("meta page", "meta", 120, "Q", 1 << 40),
    "fewer pages than there are": ("does not exist|no root", "meta", 120, "Q", 3),
    "a transaction in the wrong place": ("meta page", "meta", 128, "Q", lambda at: at.live.transaction + 1),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_each_kind_of_damage_is_told(tmp_path: Path, file: bytes, name: str) -> None:
    text, place, behind, form, wrong = DAMAGES[name]
    data = bytearray(file)
    spots = Spots(data)
    _put(data, getattr(spots, place) + behind, form, wrong if isinstance(wrong, int) else wrong(spots))
    assert data != file
    refused(tmp_path, data, text)


def test_a_page_that_is_free_and_in_use_and_a_file_that_is_cut_off_are_told(tmp_path: Path, file: bytes) -> None:
    spots = Spots(bytearray(file))
    last = spots.free + 8 * _get(file, spots.free, "Q")  # the lowest page of a list, which descends
    _put(spots.data, last, "Q", spots.used[0])
    refused(tmp_path, spots.data, "two places")
    for end in (spots.used[-1] * SIZE + 100, SIZE + 100):
        refused(tmp_path, file[:end], "cut off")


def refused(directory: Path, data: bytes | bytearray, text: str) -> None:
    (directory / "data.mdb").write_bytes(data)
    with pytest.raises(Damaged, match=text):
        at_rest(directory / "data.mdb")


@pytest.mark.parametrize("at", [0, 7, 10, 11, 12, 15])
def test_the_header_of_a_large_value_is_looked_at_before_it_is_replaced(at: int) -> None:
    with mmap.mmap(-1, 4 * SIZE) as memory, memoryview(memory) as view:
        # Page 7 of a file, a leaf; pages 8 and 9, the extent of a value.
        view[:16] = struct.pack("=Q4H", 7, 0, 2, 16, SIZE)
        view[SIZE : SIZE + 16] = struct.pack("=QHHI", 8, 0, 4, 2)
        with view[200:201] as small, view[SIZE + 16 : 3 * SIZE] as large, view[SIZE + 17 : SIZE + 99] as inline:
            for value in (small, large, inline):
                lmdb_check.check_extent(value, small, SIZE)
            view[SIZE + at] += 1
            lmdb_check.check_extent(inline, small, SIZE)
            with pytest.raises(Damaged, match="the header of a value"):
                lmdb_check.check_extent(large, small, SIZE)
