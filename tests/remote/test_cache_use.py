"""How much the cache may hold, and which objects go when it is full."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.remote.cached import content_of, pin_of
from wdsfs.remote import cached_object
from wdsfs.remote.cached_object import BLOCK
from wdsfs.remote.object_cache import ObjectCache
from wdsfs.storage import cache_room

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


def test_another_set_has_the_cache_after_some_epochs(tmp_path: Path) -> None:
    cache, old, new = ObjectCache(tmp_path, limit_for(4)), urls(4, "old"), urls(4, "new")
    for _ in range(3):
        epoch(cache, tmp_path, old, 10 * MINUTE)
    for _ in range(2):
        assert set(epoch(cache, tmp_path, new, 10 * MINUTE)) == {"bypassed"}
    for _ in range(3):
        epoch(cache, tmp_path, new, 10 * MINUTE)
    assert epoch(cache, tmp_path, new, 10 * MINUTE).count("hit") >= 3


def test_a_limit_smaller_than_one_object(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, SIZE // 2)
    assert [fetch(cache, url) for url in urls(2)] == ["bypassed"] * 2
    assert ObjectCache(tmp_path, 0).open("s3://a/b", pin_of(0)).complete


def test_a_disk_that_others_fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left to others is not taken, and nothing that is in use goes for it."""
    cache = ObjectCache(tmp_path, limit_for(100))
    assert fetch(cache, urls(2)[0]) == "kept"
    monkeypatch.setattr(cache_room, "disk_room", lambda _: BLOCK)
    assert fetch(cache, urls(2)[1]) == "bypassed"
    assert fetch(cache, urls(2)[0]) == "hit"


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
