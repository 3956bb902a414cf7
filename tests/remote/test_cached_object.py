"""One object in the cache: what is put is read, and whatever happens to its files, never a wrong byte."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.processes import answer_of_child, children, wait_until
from tests.remote.cached import LIMIT, URL, content_of, file_of, filled, flip, opened, pin_of
from tests.sets import in_own_mounts, run
from wdsfs.remote import cached_object
from wdsfs.remote.cached_object import BLOCK, GROUP, BlockTable, CachedObject
from wdsfs.remote.object_cache import ObjectCache


def viewed(one: CachedObject, size: int, offset: int) -> bytes | None:
    """Return the bytes of `view`."""
    data = one.view(size, offset)
    return None if data is None else bytes(data)


def require_right(one: CachedObject, content: bytes) -> int:
    """See that each block is right or not there; how many are there."""
    found = 0
    for begin in range(0, len(content), BLOCK):
        data = one.read(BLOCK, begin)
        assert data in (None, content[begin : begin + BLOCK])
        found += data is not None
    return found


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the last change of each file was long ago."""
    monkeypatch.setattr(cached_object, "SETTLED_NS", -1 << 62)


# --- put and read ------------------------------------------------------------------------------------------


@given(
    size=st.sampled_from([0, 1, 511, BLOCK - 1, BLOCK, BLOCK + 1, 10 * BLOCK + 7]),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 11 * BLOCK), st.integers(0, 11 * BLOCK)), max_size=12),
)
def test_what_was_put_is_read(
    tmp_path_factory: pytest.TempPathFactory, size: int, steps: list[tuple[bool, int, int]]
) -> None:
    """... by this process and by another one; nothing else is, and what is missing is what was not put."""
    content, directory = content_of(size), tmp_path_factory.mktemp("cache")
    here: set[int] = set()
    with opened(directory, size) as one, opened(directory, size) as other:
        for is_put, offset, length in steps:
            end = min(offset + length, size)
            blocks = set(range(offset // BLOCK, -(-end // BLOCK))) if end > offset else set()
            if is_put:
                assert one.put(offset, content[offset:end])
                whole = {
                    block for block in blocks if block * BLOCK >= offset and min((block + 1) * BLOCK, size) <= end
                }
                here |= whole
            for reader in (one, other):
                expected = content[offset:end] if blocks <= here else None
                assert reader.read(length, offset) == expected
                is_whole = expected is not None and len(expected) == length
                assert viewed(reader, length, offset) == (expected if is_whole else None)
                missing = {
                    b for low, high in reader.missing(0, size) for b in range(low // BLOCK, -(-high // BLOCK))
                }
                assert missing == set(range(-(-size // BLOCK))) - here
                assert reader.complete == (not missing)


def test_a_put_at_once_waits_for_no_process_that_evicts(tmp_path: Path) -> None:
    """It takes room that this process has in advance, or leaves the rest to a thread that may wait."""
    size = 64 * BLOCK
    content = content_of(size)
    with opened(tmp_path, size) as one:
        with pytest.raises(BlockingIOError):
            one.put(0, content[:BLOCK], at_once=True)
        assert one.put(0, content[:BLOCK])
        with open(tmp_path / "room", "rb") as ledger:
            fcntl.flock(ledger, fcntl.LOCK_EX)
            assert one.put(BLOCK, content[BLOCK : 2 * BLOCK], at_once=True)
        assert one.read(2 * BLOCK, 0) == content[: 2 * BLOCK]


def test_an_object_of_100_gb_takes_what_is_put(tmp_path: Path) -> None:
    size, data = 100 << 30, content_of(3 * BLOCK)
    with opened(tmp_path, size) as one:
        assert one.put(50 << 30, data)
        assert one.put(size - BLOCK, data[:BLOCK])
        assert one.read(3 * BLOCK, 50 << 30) == data
        assert one.missing(0, size) == [(0, 50 << 30), ((50 << 30) + 3 * BLOCK, size - BLOCK)]
    assert sum(file.stat().st_blocks * 512 for file in tmp_path.iterdir()) < 1 << 18


def test_blocks_that_are_here_are_not_written_again(tmp_path: Path) -> None:
    with opened(tmp_path, 2 * BLOCK) as one:
        one.put(0, b"a" * BLOCK)
        assert one.put(0, b"b" * 2 * BLOCK)
        assert one.read(2 * BLOCK, 0) == b"a" * BLOCK + b"b" * BLOCK


def test_another_pin_is_another_object(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, LIMIT)
    pins = [pin_of(BLOCK), pin_of(BLOCK)._replace(etag='"def"'), pin_of(BLOCK)._replace(version="7")]
    for number, pin in enumerate(pins):
        with contextlib.closing(cache.open(URL, pin)) as one:
            assert one.read(BLOCK, 0) is None
            one.put(0, bytes([number]) * BLOCK)
    for number, pin in enumerate(pins):
        with contextlib.closing(cache.open(URL, pin)) as one:
            assert one.read(BLOCK, 0) == bytes([number]) * BLOCK


# --- damage ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("what", ["data", "table", "room"])
def test_a_flipped_byte_is_never_served(tmp_path: Path, what: str) -> None:
    """Bytes of each file in turn, all of those that mean something. What is damaged can be put again."""
    content = content_of(2 * BLOCK + 5)
    with opened(tmp_path / "whole", len(content)) as one:
        one.put(0, content)
        one.verify()
    path = file_of(tmp_path / "whole", what) if what != "room" else tmp_path / "whole/room"
    size = path.stat().st_size
    offsets: Sequence[int] = range(0, size, 37)
    if what == "table":
        offsets = [*range(160), *range(160, BLOCK, 101), *range(BLOCK, size)]
    for offset in offsets:
        directory = tmp_path / "damaged"
        shutil.copytree(tmp_path / "whole", directory)
        flip(directory / path.name, offset)
        with opened(directory, len(content)) as one:
            found = require_right(one, content)
            assert found == 2 or what != "data"
            assert one.put(0, content)
            assert one.read(1 << 20, 0) == content
        shutil.rmtree(directory)


@pytest.mark.parametrize("is_checked", [True, False])
@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EOPNOTSUPP])
@pytest.mark.usefixtures("settled")
def test_a_read_that_must_not_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_checked: bool, number: int
) -> None:
    """What is only slow is not taken for damaged. A file system that knows no such reads is asked for one once."""
    content = content_of(4 * BLOCK)
    flags: list[int] = []

    def preadv(fd: int, buffers: Sequence[bytearray], offset: int, flag: int = 0) -> int:
        flags.append(flag)
        if flag:
            raise OSError(number, os.strerror(number))
        return os.preadv(fd, buffers, offset)

    with filled(tmp_path, content) as one:
        if is_checked:
            assert one.read(len(content), 0) == content
        monkeypatch.setattr(cached_object, "preadv", preadv)
        assert one.view(BLOCK, 0, os.RWF_NOWAIT) is None
        assert flags == [os.RWF_NOWAIT]
        assert one.missing(0, one.size) == []
        assert (one.view(BLOCK, 0, os.RWF_NOWAIT) is not None) == (number == errno.EOPNOTSUPP)
        assert viewed(one, BLOCK, 0) == content[:BLOCK]


@pytest.mark.usefixtures("settled")
def test_a_part_in_the_page_cache_is_not_compared_as_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = content_of(4 * BLOCK)

    def preadv(fd: int, buffers: Sequence[bytearray], offset: int, flag: int = 0) -> int:
        return os.preadv(fd, [memoryview(buffers[0])[: BLOCK if flag else None]], offset)

    with filled(tmp_path, content) as one:
        monkeypatch.setattr(cached_object, "preadv", preadv)
        assert one.view(2 * BLOCK, 0, os.RWF_NOWAIT) is None
        assert one.missing(0, one.size) == []
        assert viewed(one, 2 * BLOCK, 0) == content[: 2 * BLOCK]


@pytest.mark.parametrize("what", ["data", "table"])
@pytest.mark.parametrize("size", [None, 0, 1, BLOCK, BLOCK + 100, 1 << 20])
def test_a_file_that_is_cut_off_too_long_or_gone(tmp_path: Path, what: str, size: int | None) -> None:
    """... while it is open, and when it is opened."""
    content = content_of(4 * BLOCK + 9)
    with filled(tmp_path, content) as one:
        assert file_of(tmp_path, "data").read_bytes() == content  # an ordinary tar
        one.read(BLOCK, 0)
        if size is None:
            file_of(tmp_path, what).unlink()
        else:
            os.truncate(file_of(tmp_path, what), size)
        require_right(one, content)
        assert viewed(one, len(content), 0) in (None, content)
    with opened(tmp_path, len(content)) as one:
        assert require_right(one, content) == 0 or size is not None
        assert one.put(0, content)
        assert one.read(1 << 20, 0) == content


@given(data=st.sets(st.integers(0, 7)), sums=st.sets(st.integers(0, 7)), here=st.sets(st.integers(0, 7)))
def test_a_power_cut(
    tmp_path_factory: pytest.TempPathFactory, data: set[int], sums: set[int], here: set[int]
) -> None:
    """Any part of what was written may not have reached the disk, in any order: holes are in its place."""
    content, directory = content_of(8 * BLOCK), tmp_path_factory.mktemp("cache")
    with opened(directory, len(content)) as one:
        one.put(0, content)
    table = file_of(directory, "table").read_bytes()
    lost = [(file_of(directory, "data"), block * BLOCK, BLOCK) for block in data]
    lost += [(file_of(directory, "table"), len(table) - 8 * (8 - block), 8) for block in sums]
    lost += [(file_of(directory, "table"), len(table) - 8 * 8 - 8 + block, 1) for block in here]
    for path, offset, count in lost:
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(bytes(count))
    with opened(directory, len(content)) as one:
        assert require_right(one, content) == 8 - len(data | sums | here)


def test_blocks_of_another_object_are_not_its_own(tmp_path: Path) -> None:
    """A data file that was put under the name of another one, and blocks at another place of the same one."""
    first, second = content_of(4 * BLOCK), content_of(4 * BLOCK)[::-1]
    with opened(tmp_path / "a", len(first)) as one:
        one.put(0, first)
    with opened(tmp_path / "b", len(second)) as one:
        one.put(0, second)
    shutil.copy(file_of(tmp_path / "a", "data"), file_of(tmp_path / "b", "data"))
    with opened(tmp_path / "b", len(second)) as one:
        assert require_right(one, second) == 0
    path = file_of(tmp_path / "a", "data")
    path.write_bytes(first[BLOCK:] + first[:BLOCK])
    with opened(tmp_path / "a", len(first)) as one:
        assert require_right(one, first) == 0


def test_verify_counts_and_drops_what_is_damaged(tmp_path: Path) -> None:
    content = content_of(1000 * BLOCK)
    with opened(tmp_path, len(content)) as one:
        one.put(0, content[: 990 * BLOCK])
        assert one.verify() == 0
        for block in (0, 255, 256, 989):
            flip(file_of(tmp_path, "data"), block * BLOCK)
        assert one.verify() == 3 * GROUP + 1
        assert one.verify() == 0
        assert one.missing(0, 256 * BLOCK) == [(0, GROUP * BLOCK), ((256 - GROUP) * BLOCK, 256 * BLOCK)]
        assert one.missing(980 * BLOCK, 990 * BLOCK) == [(989 * BLOCK, 990 * BLOCK)]


# --- how often checksums are compared ----------------------------------------------------------------------


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks whose checksums were compared."""
    blocks: list[int] = []
    wrong = cached_object.BlockTable.wrong

    def count(self: cached_object.BlockTable, first: int, data: memoryview) -> list[int]:
        blocks.extend(range(first, first + -(-len(data) // BLOCK)))
        return wrong(self, first, data)

    monkeypatch.setattr(cached_object.BlockTable, "wrong", count)
    return blocks


@pytest.mark.usefixtures("settled")
def test_blocks_that_came_together_are_compared_together(tmp_path: Path, compared: list[int]) -> None:
    content = content_of(5 * GROUP * BLOCK + 100)
    with opened(tmp_path, len(content)) as one:
        one.put(3 * BLOCK, content[3 * BLOCK :])
        one.put(0, content[: 3 * BLOCK])
        for block in (1, 20, 4 * GROUP + 1):
            assert one.read(10, block * BLOCK) == content[block * BLOCK : block * BLOCK + 10]
        assert compared == [1, *range(GROUP, 2 * GROUP), *range(4 * GROUP, 5 * GROUP)]
        assert one.read(len(content), 0) == content
        assert one.verify() == 0


@pytest.mark.parametrize("damaged", [GROUP, GROUP + 7, 2 * GROUP - 1])
def test_a_damaged_block_and_those_it_came_with_are_fetched_again(tmp_path: Path, damaged: int) -> None:
    content = content_of(4 * GROUP * BLOCK)
    with filled(tmp_path, content) as one:
        flip(file_of(tmp_path, "data"), damaged * BLOCK)
        assert one.view(10, (GROUP + 3) * BLOCK) is None
        assert one.read(10, (GROUP + 3) * BLOCK) is None
        assert one.missing(0, len(content)) == [(GROUP * BLOCK, 2 * GROUP * BLOCK)]
        assert one.read(10, 0) == content[:10]
        for begin, end in ((GROUP, GROUP + 5), (GROUP + 5, 2 * GROUP)):  # not together this time
            one.put(begin * BLOCK, content[begin * BLOCK : end * BLOCK])
        assert one.read(len(content), 0) == content


def test_a_group_of_which_a_block_is_put_alone_is_here_again_in_the_end(tmp_path: Path) -> None:
    """As by two processes that fetch the same: no block has a checksum that stays wrong."""
    content = content_of(2 * GROUP * BLOCK)
    with filled(tmp_path, content) as one:
        for block in (0, 5):
            one._table.put(block, memoryview(content)[block * BLOCK : (block + 1) * BLOCK])
        for _ in range(3):
            if one.read(len(content), 0) is not None:
                break
            for begin, end in one.missing(0, len(content)):
                assert one.put(begin, content[begin:end])
        assert one.read(len(content), 0) == content


@pytest.mark.usefixtures("settled")
def test_blocks_are_compared_once_and_again_after_a_change(tmp_path: Path, compared: list[int]) -> None:
    content = content_of(4 * BLOCK)
    with opened(tmp_path, len(content)) as one, opened(tmp_path, len(content)) as other:
        one.put(0, content[: 2 * BLOCK])
        for _ in range(3):
            assert one.read(BLOCK + 1, 10) == content[10 : BLOCK + 11]
            assert viewed(one, 5, 0) == content[:5]
        assert compared == [0, 1]
        other.put(2 * BLOCK, content[2 * BLOCK :])
        for _ in range(2):
            one.read(BLOCK, 0)
        assert compared == [0, 1, 0]


def test_what_has_just_changed_is_compared_each_time_and_not_taken_as_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compared: list[int]
) -> None:
    """The next change could have the same ctime."""
    monkeypatch.setattr(cached_object, "SETTLED_NS", 1 << 62)
    with opened(tmp_path, BLOCK) as one:
        one.put(0, content_of(BLOCK))
        for _ in range(3):
            one.read(BLOCK, 0)
        assert compared == [0, 0, 0]
        one.verify()
    with opened(tmp_path, BLOCK) as one:
        assert not one._table.is_whole(os.fstat(one.fd).st_ctime_ns)


@pytest.mark.usefixtures("settled")
def test_what_was_verified_is_not_compared_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compared: list[int]
) -> None:
    """... until its file changes, or the machine is started again: not all of it may have been on the disk."""
    content = content_of(4 * BLOCK)
    with opened(tmp_path, len(content)) as one:
        one.put(0, content[:BLOCK])
        one.verify()
    with opened(tmp_path, len(content)) as one:
        compared.clear()
        require_right(one, content)
        assert compared == [0]  # it was not complete
        one.put(0, content)
        one.verify()
    compared.clear()
    with opened(tmp_path, len(content)) as one:
        assert require_right(one, content) == 4
        assert compared == []
        with monkeypatch.context() as patch:
            patch.setattr(cached_object, "_boot", lambda: "another")
            with opened(tmp_path, len(content)) as other:
                assert require_right(other, content) == 4
        assert sorted(compared) == [0, 1, 2, 3]
        compared.clear()
        flip(file_of(tmp_path, "data"), 2 * BLOCK)
        with opened(tmp_path, len(content)) as other:
            assert require_right(other, content) == 3
        assert sorted(compared) == [0, 1, 2, 2, 3]  # what is wrong once more


# --- a disk that refuses -----------------------------------------------------------------------------------


def failing(call: Callable[..., object], at: int, number: int) -> Callable[..., object]:
    """`call`, of which the one with this number, and those after it, fail."""
    count = 0

    def fails(*arguments: object) -> object:
        nonlocal count
        count += 1
        if count > at:
            raise OSError(number, os.strerror(number))
        return call(*arguments)

    return fails


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("at", range(8))
def test_a_disk_that_takes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, at: int) -> None:
    content = content_of(4 * BLOCK)
    with opened(tmp_path, len(content)) as one:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", failing(os.pwrite, at, number))
            kept = one.put(0, content[:BLOCK]) and one.put(2 * BLOCK, content[2 * BLOCK :])
            assert kept == (at >= 8) or at >= 6
            require_right(one, content)
        require_right(one, content)
        assert one.put(0, content)
        assert one.read(1 << 20, 0) == content


def test_a_disk_that_gives_nothing_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be read is fetched again."""
    content = content_of(2 * BLOCK)
    with filled(tmp_path, content) as one:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", failing(os.pread, 0, errno.EIO))
            patch.setattr(cached_object, "pread", failing(os.pread, 0, errno.EIO))
            assert one.read(BLOCK, 0) is None
            assert one.missing(0, BLOCK) == [(0, BLOCK)]
            assert not one.put(0, content)
        assert one.missing(0, one.size) == [(0, BLOCK)]


_FULL_DISK = """
import os, subprocess, sys
from pathlib import Path
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", sys.argv[1]], check=True)
from wdsfs.cache import cache_room
from wdsfs.remote.object_cache import ObjectCache
from wdsfs.door.pins import Pin
cache_room.disk_room = lambda path: 1 << 40  # so that the disk says it, not the look at what is free
content = os.urandom(1 << 20)
one = ObjectCache(Path(sys.argv[1]) / "cache", 1 << 40).open("s3://b/x", Pin(len(content), 1, "", ""))
kept = [one.put(at, content[at : at + 4096]) for at in range(0, len(content), 4096)]
assert kept[0] and not kept[-1], kept
for at, here in enumerate(kept):
    data = one.read(4096, at * 4096)
    assert data == content[at * 4096 :][:4096] if here else data is None
try:
    for number in range(1000):
        ObjectCache(Path(sys.argv[1]) / "cache", 1 << 40).open(f"s3://b/{number}", Pin(1, 1, "", "")).close()
except OSError as error:
    print(error.strerror)
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """A real one, in a mount namespace of its own."""
    assert run(_FULL_DISK, tmp_path, wrapper=in_own_mounts()) == f"{os.strerror(errno.ENOSPC)}\n"


# --- several processes -------------------------------------------------------------------------------------


def test_a_child_that_is_forked_while_another_thread_compares(tmp_path: Path) -> None:
    with opened(tmp_path, BLOCK) as one:
        one.put(0, content_of(BLOCK))
        with cached_object._checking:  # as a thread that is not in the child
            assert answer_of_child(lambda: one.read(BLOCK, 0)) == content_of(BLOCK)


def keep_writing(directory: Path, content: bytes, begun: Path, seed: int) -> None:
    chance = random.Random(seed)
    while True:
        with opened(directory, len(content)) as one:
            for _ in range(50):
                offset = chance.randrange(len(content))
                one.put(offset, content[offset : offset + chance.randrange(64 * BLOCK)])
                (begun / str(seed)).touch()
            if chance.random() < 0.1:
                ObjectCache(directory, LIMIT).clear("")


def test_writers_are_killed_while_a_reader_looks_at_every_byte(tmp_path: Path) -> None:
    content, begun, tmp_path = content_of(300 * BLOCK + 77), tmp_path / "begun", tmp_path / "cache"
    begun.mkdir()
    chance, right = random.Random(1), 0
    for seed in range(0, 16, 2):
        writers = [partial(keep_writing, tmp_path, content, begun, number) for number in (seed, seed + 1)]
        with children(*writers) as pids:
            wait_until(lambda: len(list(begun.iterdir())) == seed + 2, "both writers")  # noqa: B023  # at once
            for _ in range(chance.randrange(1, 6)):
                with opened(tmp_path, len(content)) as one:
                    right += require_right(one, content)
            assert all(os.waitpid(pid, os.WNOHANG) == (0, 0) for pid in pids), "a writer has ended by itself"
        with opened(tmp_path, len(content)) as one:
            require_right(one, content)
    with opened(tmp_path, len(content)) as one:
        assert right
        assert one.put(0, content)
        assert one.complete
        assert one.read(1 << 22, 0) == content


def read_and_fetch(directory: Path, limit: int, seed: int) -> bool:
    """Read at random in a few objects, and fetch what is missing; return True if much was there."""
    cache, content, chance, hits = ObjectCache(directory, limit), content_of(64 * BLOCK), random.Random(seed), 0
    for _ in range(400):
        url = f"s3://b/{chance.randrange(12)}"
        with contextlib.closing(cache.open(url, pin_of(len(content)))) as one:
            for _ in range(5):
                begin = chance.randrange(len(content))
                end = begin + chance.randrange(20 * BLOCK)
                data = one.read(end - begin, begin)
                assert data in (None, content[begin:end])
                hits += data is not None
                for low, high in one.missing(begin, end):
                    one.put(low, content[low:high])
        if chance.random() < 0.02:
            cache.clear(url)
        if chance.random() < 0.02:
            cache.room.trim(limit // 2)
    return hits > 100


def test_processes_fill_and_evict_at_once(tmp_path: Path) -> None:
    limit = 6 * 64 * BLOCK
    with children(*(partial(read_and_fetch, tmp_path, limit, seed) for seed in range(3))) as pids:
        assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 3
    tables = 12 * 2 * BLOCK
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir()) <= limit + tables


def test_a_range_is_claimed_for_one_object_at_a_time(tmp_path: Path) -> None:
    """Until it is given back; `test_network_cache.py` has processes that are killed."""
    with opened(tmp_path, 10 * BLOCK) as one, opened(tmp_path, 10 * BLOCK) as other:
        assert one.claim(0, 4 * BLOCK)
        assert one.claim(3 * BLOCK, 5 * BLOCK)
        assert not other.claim(4 * BLOCK, 10 * BLOCK)
        assert other.claim(5 * BLOCK, 10 * BLOCK)
        one.release(3 * BLOCK, 5 * BLOCK)
        assert other.claim(3 * BLOCK, 5 * BLOCK)
        assert not other.claim(2 * BLOCK, 3 * BLOCK)


# --- eviction while it is in use ---------------------------------------------------------------------------


def test_who_has_an_evicted_object_open_goes_on(tmp_path: Path) -> None:
    content = content_of(4 * BLOCK)
    with filled(tmp_path, content) as one:
        assert not one.evicted
        ObjectCache(tmp_path, LIMIT).clear("")
        assert one.evicted
        assert one.read(1 << 20, 0) == content
        shutil.rmtree(tmp_path)  # as by hand
        with opened(tmp_path, len(content)) as new:
            assert not new.evicted
            assert new.missing(0, len(content)) == [(0, len(content))]
            assert not one.put(0, content)  # nobody would find it
            assert new.put(0, content)


# --- what is held ---------------------------------------------------------------------------------------------


def test_what_is_held_is_not_removed(tmp_path: Path) -> None:
    """As long as it is open there, also in a child."""
    cache = ObjectCache(tmp_path, LIMIT)
    content = content_of(BLOCK)
    with filled(tmp_path, content) as one:
        one.hold()
        assert cache.clear("") == []
        assert cache.room.trim(0) == 0
        assert file_of(tmp_path, "data").exists()
    assert cache.room.trim(0) > 0
    assert list(tmp_path.glob("*.data")) == []


# --- the table, byte by byte -------------------------------------------------------------------------------


def test_the_bytes_of_a_table(tmp_path: Path) -> None:
    """As docs/reference/formats.md describes them: a cache outlives the version that filled it."""
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


def test_the_bytes_of_a_group(tmp_path: Path) -> None:
    content = content_of(3 * GROUP * BLOCK)
    fd = os.open(tmp_path / "table", os.O_RDWR | os.O_CREAT)
    BlockTable.create(fd, URL, pin_of(len(content))).put(15, memoryview(content)[15 * BLOCK : 33 * BLOCK])
    found = (tmp_path / "table").read_bytes()
    os.close(fd)
    [seed] = struct.unpack_from("<I", found, 36)
    assert found[4096 : 4096 + 48] == bytes(15) + b"\1" + b"\2" * 16 + b"\1" + bytes(15)
    sums = struct.unpack_from("<48Q", found, 4096 + 48)
    assert sums[15] == xxhash.xxh3_64_intdigest(content[15 * BLOCK : 16 * BLOCK], seed + 15)
    assert sums[16] == xxhash.xxh3_64_intdigest(content[16 * BLOCK : 32 * BLOCK], seed + 16)
    assert sums[17:32] == (0,) * 15
    assert sums[32] == xxhash.xxh3_64_intdigest(content[32 * BLOCK : 33 * BLOCK], seed + 32)


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
