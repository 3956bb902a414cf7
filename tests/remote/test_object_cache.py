"""The cache as a whole: where it is, what it knows of URLs, and what `wdsfs cache` does with it."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.remote.cached import LIMIT, URL, content_of, flip, pin_of
from wdsfs.cache import cache_directory, cache_room
from wdsfs.errors import IndexUnusable
from wdsfs.remote import cached_object, object_cache
from wdsfs.remote.cached_object import BLOCK
from wdsfs.remote.object_cache import ObjectCache, cache, key_of
from wdsfs.trust import Untrusted

NOBODY = 65534


def fill(one: ObjectCache, shown: str, size: int, end: int | None = None) -> None:
    with contextlib.closing(one.open(shown, pin_of(size))) as found:
        assert found.put(0, content_of(size)[:end])


def names(directory: Path) -> set[str]:
    return {path.suffix for path in directory.iterdir()}


# --- opening -----------------------------------------------------------------------------------------------


def test_an_object_that_is_removed_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the opening of its table and the lock on it."""
    one, other = ObjectCache(tmp_path, LIMIT), ObjectCache(tmp_path, LIMIT)
    one.open(URL, pin_of(BLOCK)).close()
    table_locked = cache_directory.table_locked

    def first_removed(fd: int) -> contextlib.AbstractContextManager[None]:
        monkeypatch.setattr(object_cache, "table_locked", table_locked)
        other.clear("")
        return table_locked(fd)

    monkeypatch.setattr(object_cache, "table_locked", first_removed)
    fill(one, URL, BLOCK)
    assert [entry.complete for entry in other.usage()] == [True]


# --- pins --------------------------------------------------------------------------------------------------


def test_the_pin_of_a_url_is_kept(tmp_path: Path) -> None:
    one = ObjectCache(tmp_path, LIMIT)
    assert one.pin_of(URL) is None
    fill(one, URL, 7)
    long = pin_of(5)._replace(etag='"' + "x" * 500 + '"', version="\udcff\0\n")
    for pin in (long, pin_of(7)):  # a shorter one over a longer one
        one.keep_pin(URL, pin)
        assert ObjectCache(tmp_path, LIMIT).pin_of(URL) == pin
        assert len(list(one.usage())) == 1
    assert one.pin_of(URL + "x") is None
    one.keep_pin(URL, pin_of(7)._replace(etag='"new"'))
    assert names(tmp_path) == {".note", ""}, "without the object of the last pin"


def test_a_damaged_pin_is_none(tmp_path: Path) -> None:
    one = ObjectCache(tmp_path, LIMIT)
    one.keep_pin(URL, pin_of(7))
    [file] = tmp_path.glob("*.note")
    for offset in range(file.stat().st_size):
        flip(file, offset)
        assert one.pin_of(URL) is None
        flip(file, offset)
    assert one.pin_of(URL) is not None
    os.truncate(file, 20)
    assert one.pin_of(URL) is None


def test_pins_that_nobody_asks_for_go_after_a_month(tmp_path: Path) -> None:
    one = ObjectCache(tmp_path, LIMIT)
    for url in ("s3://b/old", "s3://b/new"):
        one.keep_pin(url, pin_of(1))
    os.utime(one._note_file("s3://b/old"), (0, 0))
    list(one.usage())
    assert [one.pin_of(url) is None for url in ("s3://b/old", "s3://b/new")] == [True, False]


# --- where it is -------------------------------------------------------------------------------------------


def test_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WDSFS_CACHE_SIZE", raising=False)
    monkeypatch.delenv("WDSFS_CACHE_DIR", raising=False)
    monkeypatch.setenv("WDSFS_INDEX_DIR", str(tmp_path / "index"))
    fill(cache(), URL, BLOCK)
    assert {".data", ".table"} < names(tmp_path / "index/cache")
    assert stat.S_IMODE((tmp_path / "index/cache").stat().st_mode) == 0o700
    monkeypatch.setenv("WDSFS_CACHE_DIR", str(tmp_path / "given"))
    fill(cache(), URL, BLOCK)
    assert {".data", ".table"} < names(tmp_path / "given")
    monkeypatch.setenv("WDSFS_CACHE_SIZE", "1K")
    with contextlib.closing(cache().open(URL + "x", pin_of(BLOCK))) as one:
        assert not one.put(0, bytes(BLOCK))


@pytest.mark.root
def test_a_directory_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who could write it could have any bytes served."""
    os.mkdir(tmp_path / "theirs", 0o700)
    os.chown(tmp_path / "theirs", NOBODY, -1)
    monkeypatch.setenv("WDSFS_CACHE_DIR", str(tmp_path / "theirs"))
    with pytest.raises(IndexUnusable, match=r"the cache is not used, since .* --trust nobody"):
        cache()
    with pytest.raises(Untrusted, match="--trust nobody"):
        ObjectCache(tmp_path / "theirs", LIMIT).open(URL, pin_of(1))


def test_links_are_not_followed(tmp_path: Path) -> None:
    one = ObjectCache(tmp_path / "cache", LIMIT)
    (tmp_path / "mine").write_bytes(b"mine")
    for what in ("table", "data"):
        fill(one, URL, BLOCK)
        path = one._directory.file(key_of(URL, pin_of(BLOCK)), what)
        os.unlink(path)
        os.symlink(tmp_path / "mine", path)
        with pytest.raises(OSError, match="symbolic links"):
            one.open(URL, pin_of(BLOCK))
        os.unlink(path)
    assert (tmp_path / "mine").read_bytes() == b"mine"


# --- what stays, and what goes for others ------------------------------------------------------------------

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


def test_the_longest_unused_objects_go_first(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, limit_for(4))
    assert [fetch(cache, url) for url in urls(12)][:4] == ["kept"] * 4
    assert taken(tmp_path) <= limit_for(4) + 12 * TABLE
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
    steps = [(0.0, DAY), (MINUTE, DAY), (HOUR, HOUR), (MINUTE, HOUR), (2 * HOUR, 2 * HOUR), (9 * DAY, DAY)]
    for passed, expected in steps:  # DAY: as of a new object
        pass_time(tmp_path, passed)
        assert expected <= idle() < expected + MINUTE


@pytest.mark.parametrize("way", ["read", "view", "put"])
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
            "view": lambda: one.view(100, 0),
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
