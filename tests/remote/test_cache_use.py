"""How much the cache may hold, and which objects go when it is full."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.remote.cached import content_of, pin_of
from wdsfs.remote import cached_object
from wdsfs.remote.cached_object import BLOCK
from wdsfs.remote.object_cache import ObjectCache
from wdsfs.storage import cache_room
from wdsfs.storage.cache_directory import CacheDirectory, CacheEntry

SIZE = 64 * BLOCK
TABLE = 4 * BLOCK  # the most that the table of such an object takes on a disk
MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0


def fetch(cache: ObjectCache, url: str) -> str:
    """Read an object as a fetcher does: `hit`, or else fetched and then `kept` or `bypassed`."""
    with contextlib.closing(cache.open(url, pin_of(SIZE))) as one:
        if one.complete:
            return "hit"
        content, step = content_of(SIZE), 8 * BLOCK
        kept = [one.put(offset, content[offset : offset + step]) for offset in range(0, SIZE, step)]
        return "kept" if all(kept) else "bypassed"


def pass_time(directory: Path, seconds: float) -> None:
    """As if so many seconds had passed: all that is there was used that much longer ago."""
    for path in directory.glob("*.table"):
        used = path.stat().st_mtime - seconds
        os.utime(path, (used, used))
    (directory / "room").unlink(missing_ok=True)  # it knows times, too


def taken(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.iterdir())


def urls(count: int, name: str = "train") -> list[str]:
    return [f"s3://bucket/{name}-{number:06d}.tar" for number in range(count)]


def limit_for(objects: int) -> int:
    return int(objects * (SIZE + TABLE) / (1 - cache_room.SLACK)) + 1


def epoch(cache: ObjectCache, directory: Path, names: Sequence[str], seconds: float) -> list[str]:
    found = []
    for url in names:
        found.append(fetch(cache, url))
        pass_time(directory, seconds / len(names))
    return found


def test_the_limit_holds(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, limit_for(4))
    found = [fetch(cache, url) for url in urls(12)]
    assert found[:4] == ["kept"] * 4
    assert found[-4:] == ["bypassed"] * 4
    assert taken(tmp_path) <= limit_for(4) + 12 * TABLE
    assert [fetch(cache, url) for url in urls(4)] == ["hit"] * 4


def test_the_longest_unused_objects_go_first(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, limit_for(4))
    for url in urls(4):
        fetch(cache, url)
    pass_time(tmp_path, 2 * DAY)
    assert fetch(cache, urls(4)[1]) == "hit"
    pass_time(tmp_path, HOUR)
    assert fetch(cache, "s3://bucket/new.tar") == "kept"
    assert fetch(cache, urls(4)[1]) == "hit"
    assert taken(tmp_path) <= limit_for(4)


@pytest.mark.parametrize("seconds", [10 * MINUTE, 5 * HOUR])
@pytest.mark.parametrize("shuffled", [False, True])
def test_an_epoch_larger_than_the_cache(tmp_path: Path, seconds: float, shuffled: bool) -> None:
    """It does not wash the cache out: LRU alone would have no hit at all in a pass in order."""
    cache, chance, names = ObjectCache(tmp_path, limit_for(6)), random.Random(1), urls(12)
    found = []
    for _ in range(4):
        found = epoch(cache, tmp_path, chance.sample(names, len(names)) if shuffled else names, seconds)
    assert found.count("hit") >= 4


def test_another_set_has_the_cache_after_some_epochs(tmp_path: Path) -> None:
    cache, old, new = ObjectCache(tmp_path, limit_for(4)), urls(4, "old"), urls(4, "new")
    for _ in range(3):
        epoch(cache, tmp_path, old, 10 * MINUTE)
    for _ in range(2):
        assert set(epoch(cache, tmp_path, new, 10 * MINUTE)) == {"bypassed"}
    for _ in range(3):
        epoch(cache, tmp_path, new, 10 * MINUTE)
    assert epoch(cache, tmp_path, new, 10 * MINUTE).count("hit") >= 3


def test_what_a_day_old_goes_for_a_new_set_at_once(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, limit_for(4))
    epoch(cache, tmp_path, urls(4, "old"), 10 * MINUTE)
    pass_time(tmp_path, DAY)
    assert set(epoch(cache, tmp_path, urls(3, "new"), 10 * MINUTE)) == {"kept"}


def test_a_limit_that_was_lowered(tmp_path: Path) -> None:
    """What is beyond it goes with the next write, however new it is."""
    for url in urls(8):
        fetch(ObjectCache(tmp_path, limit_for(8)), url)
    fetch(ObjectCache(tmp_path, limit_for(3)), "s3://bucket/new.tar")
    assert taken(tmp_path) <= limit_for(3) + TABLE


def test_a_limit_smaller_than_one_object(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, SIZE // 2)
    assert [fetch(cache, url) for url in urls(2)] == ["bypassed"] * 2
    assert ObjectCache(tmp_path, 0).open("s3://a/b", pin_of(0)).complete


def test_without_a_limit_it_has_a_share_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_room, "disk_room", lambda _: 2 * limit_for(4) - taken(tmp_path))
    cache = ObjectCache(tmp_path, None)
    for url in urls(12):
        fetch(cache, url)
    assert limit_for(3) < taken(tmp_path) < limit_for(4) + 12 * TABLE


def test_a_disk_that_others_fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left to others is not taken, and nothing that is in use goes for it."""
    cache = ObjectCache(tmp_path, limit_for(100))
    assert fetch(cache, urls(2)[0]) == "kept"
    monkeypatch.setattr(cache_room, "disk_room", lambda _: BLOCK)
    assert fetch(cache, urls(2)[1]) == "bypassed"
    assert fetch(cache, urls(2)[0]) == "hit"


@pytest.mark.parametrize("damage", [b"", b"x", b"\xff" * 24, bytes(24)])
def test_the_sum_is_damaged(tmp_path: Path, damage: bytes) -> None:
    cache = ObjectCache(tmp_path, limit_for(4))
    for url in urls(4):
        fetch(cache, url)
    (tmp_path / "room").write_bytes(damage)
    found = [fetch(cache, url) for url in urls(8)]
    assert found == ["hit"] * 4 + ["bypassed"] * 4


def test_room_that_was_asked_for_and_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process was killed between the two, again and again. What is on the disk counts in the end."""
    cache = ObjectCache(tmp_path, limit_for(4))
    assert cache.room.reserve(4 * SIZE, 0.0)
    assert fetch(cache, urls(1)[0]) == "bypassed"
    monkeypatch.setattr(cache_room, "RECOUNT_SECONDS", -1.0)
    assert [fetch(cache, url) for url in urls(4)] == ["kept"] * 4


def test_a_full_cache_is_not_read_for_each_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ObjectCache(tmp_path, limit_for(4))
    for url in urls(6):
        fetch(cache, url)
    scans = 0
    objects = CacheDirectory.entries

    def count(self: CacheDirectory) -> list[CacheEntry]:
        nonlocal scans
        scans += 1
        return objects(self)

    monkeypatch.setattr(CacheDirectory, "entries", count)
    assert {fetch(cache, url) for url in urls(20, "new")} == {"bypassed"}
    assert scans <= 1


def test_what_is_removed_is_counted_when_it_is_wanted(tmp_path: Path) -> None:
    """Another process, or somebody by hand, has removed objects."""
    cache = ObjectCache(tmp_path, limit_for(4))
    for url in urls(4):
        fetch(cache, url)
    pass_time(tmp_path, HOUR)
    for path in tmp_path.glob("*.data"):
        path.unlink()
    for url in urls(4):
        fetch(cache, url)
    assert [fetch(cache, url) for url in urls(4)] == ["hit"] * 4


def test_data_without_a_table_goes_first(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, limit_for(4))
    fetch(cache, urls(1)[0])
    (tmp_path / ("0" * 32 + ".data")).write_bytes(bytes(limit_for(3)))
    (tmp_path / "room").unlink()
    assert [fetch(cache, url) for url in urls(3)] == ["hit", "kept", "kept"]
    assert not (tmp_path / ("0" * 32 + ".data")).exists()


def test_use_is_noted_by_rounds(tmp_path: Path) -> None:
    """The pause before a pass counts, not those inside of it."""
    cache, url = ObjectCache(tmp_path, limit_for(4)), urls(1)[0]

    def idle() -> float:
        with contextlib.closing(cache.open(url, pin_of(SIZE))) as one:
            return one._table.idle()

    fetch(cache, url)
    assert idle() == cached_object.NEVER
    pass_time(tmp_path, MINUTE)
    assert idle() == cached_object.NEVER
    pass_time(tmp_path, HOUR)
    assert HOUR <= idle() < HOUR + MINUTE
    pass_time(tmp_path, MINUTE)
    assert HOUR <= idle() < HOUR + MINUTE
    pass_time(tmp_path, 2 * HOUR)
    assert 2 * HOUR <= idle() < 2 * HOUR + MINUTE
    pass_time(tmp_path, 9 * DAY)
    assert idle() == cached_object.NEVER


@pytest.mark.parametrize("way", ["read", "fill", "put"])
def test_what_is_read_for_long_stays_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """It is open all the time, and nobody fetches anything of it."""
    cache, names = ObjectCache(tmp_path, limit_for(2)), urls(2)
    for url in names:
        fetch(cache, url)
    monkeypatch.setattr(cached_object, "SETTLED_NS", -1 << 62)
    with contextlib.closing(cache.open(names[0], pin_of(SIZE))) as one:
        one.read(SIZE, 0)
        pass_time(tmp_path, 3 * DAY)
        monkeypatch.setattr(cached_object, "monotonic", lambda: time.monotonic() + HOUR)
        {
            "read": lambda: one.read(100, 0),
            "fill": lambda: one.fill(bytearray(100), 0),
            "put": lambda: one.put(0, bytes(BLOCK)),
        }[way]()
        assert fetch(cache, names[1]) == "hit"
        assert fetch(cache, "s3://bucket/new.tar") == "bypassed"
        assert not one.evicted


def test_to_ask_for_room_takes_none_and_removes_only_what_may_go(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, limit_for(4))
    for url in urls(3):
        fetch(cache, url)
    with contextlib.closing(cache.open("s3://bucket/new.tar", pin_of(SIZE))) as one:
        assert [one.has_room(size) for size in (SIZE, SIZE, 2 * SIZE, limit_for(4))] == [True, True, False, False]
    assert [fetch(cache, url) for url in urls(3)] == ["hit"] * 3
    pass_time(tmp_path, 4 * DAY)
    with contextlib.closing(cache.open("s3://bucket/new.tar", pin_of(SIZE))) as one:
        assert not one.has_room(5 * SIZE)
        assert len(list(cache.usage("s3://bucket/train"))) == 3
        assert one.has_room(2 * SIZE)
    assert len(list(cache.usage("s3://bucket/train"))) < 3
