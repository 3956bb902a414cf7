"""The room of the cache: what goes when there is no more, and the sum of what is taken."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from wdsfs.cache import cache_room
from wdsfs.cache.cache_directory import TABLE, CacheDirectory, CacheEntry
from wdsfs.cache.cache_room import NEEDED, CacheRoom, victims
from wdsfs.cache.file_cache import FileCache
from wdsfs.errors import UsageError, parse_size
from wdsfs.remote.cached_object import AGE, NEVER

MiB = 1 << 20
DAY = 86400.0


# --- what goes ---------------------------------------------------------------------------------------------


def entries_of(*ages: float, now: float, size: int = 1) -> list[CacheEntry]:
    return sorted(CacheEntry(now - age, size, f"{number:032x}", TABLE) for number, age in enumerate(ages))


@pytest.mark.parametrize(
    ("over", "short", "age", "going"),
    [
        (0, 0, NEEDED, []),
        (0, 1, NEEDED, [9.0]),
        (0, 2, 4.0, [9.0, 5.0]),
        (0, 4, 4.0, [9.0, 5.0]),
        (0, 4, NEEDED, [9.0, 5.0, 3.0, 1.0]),
        (0, 4, math.inf, []),
        (3, 0, math.inf, [9.0, 5.0, 3.0]),
        (1, 2, 4.0, [9.0, 5.0]),
        (9, 0, math.inf, [9.0, 5.0, 3.0, 1.0]),
    ],
)
def test_what_goes_first(over: int, short: int, age: float, going: list[float]) -> None:
    """The longest unused: what is beyond the limit in any case, and for others what is old enough."""
    now = 1e9
    assert [
        now - one.used for one in victims(entries_of(1.0, 3.0, 5.0, 9.0, now=now), over, short, age, now)
    ] == going


def hits(
    order: Callable[[list[str]], list[str]], age_of: Callable[[float], float], names: int, room: int
) -> float:
    """The share of hits in the last of many epochs over a set of `names` objects, of which `room` fit."""
    cached: dict[str, float] = {}
    used: dict[str, float] = {}
    now, found, epochs = 1e9, 0, 40
    for epoch in range(epochs):
        for name in order([f"{number:04}" for number in range(names)]):
            now += 10.0
            idle = min(now - used.get(name, 0.0), NEVER)
            if name in cached:
                found += epoch >= epochs // 2
            else:
                entries = sorted(CacheEntry(when, 1, key, TABLE) for key, when in cached.items())
                for gone in victims(entries, 0, len(cached) + 1 - room, age_of(idle), now):
                    del cached[gone.key]
            if name in cached or len(cached) < room:
                cached[name] = now
            used[name] = now
    return found / (epochs - epochs // 2) / names


def shuffled() -> Callable[[list[str]], list[str]]:
    chance = random.Random(1)
    return lambda names: chance.sample(names, len(names))


def test_an_epoch_larger_than_the_cache_does_not_wash_it_out() -> None:
    """With room for half of a set, half of it is hit in order, and nearly so shuffled. LRU has none, and few."""

    def ours(idle: float) -> float:
        return min(AGE * idle, NEVER)

    assert hits(list, ours, 100, 50) == 0.5
    assert hits(shuffled(), ours, 100, 50) > 0.43
    assert hits(list, lambda _: NEEDED, 100, 50) == 0.0
    assert hits(shuffled(), lambda _: NEEDED, 100, 50) < 0.2
    assert hits(list, ours, 50, 50) == 1.0


# --- the sum -----------------------------------------------------------------------------------------------


def put(directory: Path, key: int, size: int, age: float = 0.0) -> Path:
    path = directory / f"{key:032x}.tar"
    path.write_bytes(bytes(size))
    os.utime(path, (time.time() - age, 1))
    return path


@pytest.fixture
def room(tmp_path: Path) -> CacheRoom:
    return CacheRoom(CacheDirectory(tmp_path), 16 * MiB)


def test_the_sum_is_counted_when_it_is_lost(tmp_path: Path, room: CacheRoom) -> None:
    put(tmp_path, 1, 5 * MiB)
    (tmp_path / "README").write_bytes(bytes(MiB))  # somebody else's
    assert room.state() == (5 * MiB, 16 * MiB)
    put(tmp_path, 2, MiB)
    assert room.state()[0] == 5 * MiB
    for damage in (b"", b"x", b"\xff" * 32, bytes(32)):
        (tmp_path / "room").write_bytes(damage)
        assert room.state()[0] == 6 * MiB


def test_what_is_reserved_counts_at_once(tmp_path: Path, room: CacheRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    """... also if nothing is written then, until the directory is counted again."""
    assert room.reserve(9 * MiB, NEEDED)
    assert CacheRoom(CacheDirectory(tmp_path), 16 * MiB).state()[0] >= 9 * MiB
    assert not room.reserve(9 * MiB, math.inf)
    room.give_back(9 * MiB)
    assert room.reserve(9 * MiB, math.inf)
    assert not room.reserve(9 * MiB, DAY)
    monkeypatch.setattr(cache_room, "RECOUNT_SECONDS", -1.0)
    assert room.reserve(9 * MiB, DAY)


def test_what_is_in_use_stays_unless_it_is_needed(tmp_path: Path, room: CacheRoom) -> None:
    old, new = put(tmp_path, 1, 6 * MiB, age=2 * DAY), put(tmp_path, 2, 6 * MiB, age=60.0)
    assert not room.has_room(12 * MiB, DAY)  # which may go for that has gone
    assert (old.exists(), new.exists()) == (False, True)
    assert room.reserve(6 * MiB, DAY)
    put(tmp_path, 3, 6 * MiB)
    assert not room.reserve(6 * MiB, DAY)
    assert room.reserve(6 * MiB, NEEDED)
    assert not new.exists()


def test_a_lower_limit_removes_what_is_beyond_it(tmp_path: Path) -> None:
    files = [put(tmp_path, number, 2 * MiB, age=100.0 - number) for number in range(4)]
    room = CacheRoom(CacheDirectory(tmp_path), 5 * MiB)
    assert not room.reserve(2 * MiB, DAY)
    assert [file.exists() for file in files] == [False, False, True, True]
    assert room.trim(None) == 0
    assert room.trim(3 * MiB) == 2 * MiB
    assert [file.exists() for file in files] == [False, False, False, True]


def test_a_full_cache_is_not_read_for_each_write(
    tmp_path: Path, room: CacheRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, 1, 15 * MiB)
    assert not room.reserve(MiB, DAY)
    monkeypatch.setattr(CacheDirectory, "entries", None)
    assert not any(room.reserve(MiB, DAY) for _ in range(10))


def test_without_a_limit_it_has_a_share_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = CacheRoom(CacheDirectory(tmp_path), None)
    put(tmp_path, 1, 4 * MiB)
    monkeypatch.setattr(cache_room, "disk_room", lambda _: 12 * MiB)
    assert room.state() == (4 * MiB, 8 * MiB)
    assert room.most() == int(8 * MiB * (1 - cache_room.SLACK))
    monkeypatch.setattr(cache_room, "disk_room", lambda _: MiB // 2)  # others have filled it
    assert not room.reserve(MiB, DAY)


def test_data_without_a_table_goes_first(tmp_path: Path, room: CacheRoom) -> None:
    kept = put(tmp_path, 1, 6 * MiB, age=2 * DAY)
    data = put(tmp_path, 2, 6 * MiB).rename(tmp_path / ("0" * 32 + ".data"))
    assert room.reserve(6 * MiB, DAY)
    assert (kept.exists(), data.exists()) == (True, False)


def test_what_is_open_goes_last_and_what_is_written_never(tmp_path: Path, room: CacheRoom) -> None:
    cache = FileCache(tmp_path, 16 * MiB)

    def fill(size: int) -> None:
        cache_file = cache.make(f"{size:032x}", ("tar",), lambda new: (new.write(bytes(size)), ("tar", size))[1])
        opened.append(cache_file.fd)

    opened: list[int] = []
    fill(4 * MiB)
    os.utime(tmp_path / f"{4 * MiB:032x}.tar", (1, 1e-9))
    free = put(tmp_path, 1, 4 * MiB, age=60.0)
    assert room.trim(0) > 0
    assert not free.exists()
    part = put(tmp_path, 2, MiB).rename(tmp_path / ("0" * 32 + ".part"))
    assert room.reserve(13 * MiB, NEEDED)
    assert list(tmp_path.glob("*.tar")) == []
    assert not part.exists(), "of a process that was killed"
    assert len(os.pread(opened[0], MiB, 0)) == MiB
    os.close(opened[0])


def test_sizes() -> None:
    assert [parse_size(text) for text in ("0", "12", "3k", "2M", "1G", "5T")] == [
        *(0, 12, 3 << 10, 2 << 20, 1 << 30, 5 << 40)
    ]
    assert [
        parse_size(text) for text in ("7B", "1kB", "500MB", "2GiB", "1TB", "1gb", "1 GB", "1.5GB", "1.5k")
    ] == [*(7, 1000, 500_000_000, 2 << 30, 10**12, 10**9, 10**9, 1_500_000_000, 1536)]
    for text in ("", "G", "1.5", "-1", "1XB", "1iB", "1GBB", ".5G", "1 2G", "9" * 9999, "\u0661"):
        with pytest.raises(UsageError, match="is not a size"):
            parse_size(text)
