"""The cache as a whole: where it is, what it knows of URLs, and what `wdsfs cache` does with it."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import pytest

from tests.remote.cached import LIMIT, URL, content_of, flip, pin_of
from wdsfs.errors import IndexUnusable
from wdsfs.remote import object_cache
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
    flocked = object_cache.flocked

    def first_removed(fd: int) -> contextlib.AbstractContextManager[None]:
        monkeypatch.setattr(object_cache, "flocked", flocked)
        other.clear("")
        return flocked(fd)

    monkeypatch.setattr(object_cache, "flocked", first_removed)
    fill(one, URL, BLOCK)
    assert [entry.complete for entry in other.usage()] == [True]


# --- pins --------------------------------------------------------------------------------------------------


def test_the_pin_of_a_url_is_kept(tmp_path: Path) -> None:
    one = ObjectCache(tmp_path, LIMIT)
    assert one.pin_of(URL) is None
    long = pin_of(5)._replace(etag='"' + "x" * 500 + '"', version="\udcff\0\n")
    for pin in (long, pin_of(7)):  # a shorter one over a longer one
        one.keep_pin(URL, pin)
        found = ObjectCache(tmp_path, LIMIT).pin_of(URL)
        assert found is not None
        assert found[0] == pin
        [file] = tmp_path.glob("*.note")
        assert abs(found[1] - file.stat().st_mtime) < 60
    assert one.pin_of(URL + "x") is None


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


def test_another_pin_removes_the_object_of_the_last_one(tmp_path: Path) -> None:
    one = ObjectCache(tmp_path, LIMIT)
    one.keep_pin(URL, pin_of(BLOCK))
    fill(one, URL, BLOCK)
    one.keep_pin(URL, pin_of(BLOCK))
    assert len(list(one.usage())) == 1
    one.keep_pin(URL, pin_of(BLOCK)._replace(etag='"new"'))
    assert names(tmp_path) == {".note", ""}


def test_pins_that_nobody_asks_for_go_after_a_month(tmp_path: Path) -> None:
    one = ObjectCache(tmp_path, LIMIT)
    for url in ("s3://b/old", "s3://b/new"):
        one.keep_pin(url, pin_of(1))
    os.utime(one._note_file("s3://b/old"), (0, 0))
    list(one.usage())
    assert [one.pin_of(url) is None for url in ("s3://b/old", "s3://b/new")] == [True, False]


# --- what `wdsfs cache` shows and does ---------------------------------------------------------------------


def three(directory: Path) -> ObjectCache:
    one = ObjectCache(directory, LIMIT)
    for age, (url, size, end) in enumerate(
        [("s3://a/1", 10 * BLOCK + 3, None), ("s3://a/2", 10 * BLOCK, BLOCK), ("https://b/1", 0, None)]
    ):
        fill(one, url, size, end)
        path = one._directory.file(key_of(url, pin_of(size)), "table")
        os.utime(path, (1e9 - age, 1e9 - age))
    return one


def test_usage(tmp_path: Path) -> None:
    found = list(three(tmp_path).usage())
    assert [(one.shown, one.bytes, one.complete, one.used) for one in found] == [
        ("https://b/1", 0, True, 1e9 - 2),
        ("s3://a/2", BLOCK, False, 1e9 - 1),
        ("s3://a/1", 10 * BLOCK + 3, True, 1e9),
    ]
    assert sum(one.files.bytes for one in found) == sum(
        path.stat().st_blocks * 512 for path in tmp_path.iterdir() if path.name != "room"
    )
    assert [one.shown for one in three(tmp_path).usage("s3://a/")] == ["s3://a/2", "s3://a/1"]
    assert list(ObjectCache(tmp_path / "nowhere", LIMIT).usage()) == []


def test_trim_removes_the_longest_unused(tmp_path: Path) -> None:
    one = three(tmp_path)
    before = list(one.usage())
    one.room.trim(sum(entry.files.bytes for entry in before) - 1)
    assert [entry.shown for entry in one.usage()] == ["s3://a/2", "s3://a/1"]
    one.room.trim(before[-1].files.bytes)
    assert [entry.shown for entry in one.usage()] == ["s3://a/1"]
    one.room.trim(0)
    assert names(tmp_path) == {""}


def test_clear(tmp_path: Path) -> None:
    one = three(tmp_path)
    assert {entry.shown for entry in one.clear("s3://a/")} == {"s3://a/1", "s3://a/2"}
    assert [entry.shown for entry in one.usage()] == ["https://b/1"]
    assert [entry.shown for entry in one.clear("")] == ["https://b/1"]
    assert names(tmp_path) == {""}


def test_verify(tmp_path: Path) -> None:
    one = three(tmp_path)
    flip(Path(one._directory.file(key_of("s3://a/1", pin_of(10 * BLOCK + 3)), "data")), BLOCK)
    found = {entry.shown: damaged for entry, damaged in one.verify()}
    assert found == {"s3://a/1": BLOCK, "s3://a/2": 0, "https://b/1": 0}
    assert {entry.shown: entry.complete for entry in one.usage()}["s3://a/1"] is False


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


def test_a_directory_that_others_can_write(tmp_path: Path) -> None:
    os.mkdir(tmp_path / "open")
    os.chmod(tmp_path / "open", 0o777)
    with pytest.raises(Untrusted, match="others can write"):
        ObjectCache(tmp_path / "open", LIMIT).open(URL, pin_of(1))


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
