"""The command `cache`."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests import tars
from tests.remote.cached import content_of, flip, pin_of
from wdsfs.cache import cache_room, file_cache
from wdsfs.cli.main import main
from wdsfs.remote import object_cache

SIZE = 100_000


def run(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(main, ["cache", *words])
    assert done.exit_code == code, (done.output, done.exception)
    return done.output if code else done.stdout


def report(*words: str) -> Any:
    return json.loads(run("--json", *words))


def taken() -> int:
    return sum(entry.bytes for entry in file_cache.cache().entries())


def urls(*words: str) -> list[str]:
    return sorted(one["url"] for one in report(*words)["remote"]["objects"])


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three remote shards, one of them in part, and an unpacked one."""
    monkeypatch.setenv("WDSFS_INDEX_DIR", str(tmp_path / "index"))
    monkeypatch.delenv("WDSFS_CACHE_DIR", raising=False)
    monkeypatch.delenv("WDSFS_CACHE_SIZE", raising=False)
    remote = object_cache.cache()
    for url, end in (("s3://b/train/0.tar", SIZE), ("s3://b/train/1.tar", 8192), ("https://h/0.tar", SIZE)):
        with contextlib.closing(remote.open(url, pin_of(SIZE))) as one:
            assert one.put(0, content_of(SIZE)[:end])
    (tmp_path / "s.tar.gz").write_bytes(gzip.compress(tars.tar(tars.A)))
    environment = {"WDSFS_UNPACK": "always"}
    done = CliRunner().invoke(main, ["ls", str(tmp_path / "s.tar.gz")], env=environment)
    assert done.exit_code == 0, done.output
    return tmp_path / "index"


def test_it_shows_what_is_there(filled: Path) -> None:
    lines = [line.split() for line in run().splitlines()]
    assert ["s3://b/train/", "2", "1", "105.7", "KiB", "195.3", "KiB"] in [line[:7] for line in lines]
    assert ["https://h/", "1", "1"] in [line[:3] for line in lines]
    assert ["unpacked", "shards:"] in [line[:2] for line in lines]
    assert any(line[:2] == ["in", "all:"] and str(filled / "cache") in line for line in lines)
    lines = [line.split() for line in run("--long", "s3://b/train").splitlines()]
    assert ["s3://b/train/1.tar", "no", "8.0", "KiB", "97.7", "KiB"] in [line[:6] for line in lines]
    assert not any(line[0] == "https://h/0.tar" for line in lines)
    found = report()
    assert urls() == ["https://h/0.tar", "s3://b/train/0.tar", "s3://b/train/1.tar"]
    assert found["directory"] == str(filled / "cache")
    assert found["unpacked"]["files"] == 1
    assert found["unpacked"]["bytes"] > 0
    [part] = report("s3://b/train/1.tar")["remote"]["objects"]
    expected = {"url": "s3://b/train/1.tar", "size": SIZE, "bytes": 8192, "complete": False, "etag": '"abc"'}
    assert part.items() >= expected.items()
    assert report("s3://b/train/1.tar")["unpacked"]["files"] == 0


def test_an_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDSFS_CACHE_DIR", str(tmp_path / "nothing"))
    monkeypatch.setenv("WDSFS_CACHE_SIZE", "1G")
    assert run() == f"in all: 0 B in {tmp_path}/nothing (limit: 1.0 GiB)\n"
    assert run("--clear") == run("--trim", "0") == "0 B freed\n"
    assert run("--verify") == "no damage\n"
    assert not (tmp_path / "nothing").exists()


def test_clear(filled: Path) -> None:
    assert run("--clear", "s3://b/train/", "ais://nothing/").endswith(" freed\n")
    assert urls() == ["https://h/0.tar"]
    assert report()["unpacked"]["files"] == 1
    assert report("--clear")["freed"] > SIZE
    assert urls() == []
    assert report()["unpacked"]["files"] == 0


def test_a_secret_in_a_url_selects_what_is_shown_without_it(filled: Path) -> None:
    run("--clear", "https://ann:secret@h/0.tar?X-Amz-Signature=secret")
    assert urls() == ["s3://b/train/0.tar", "s3://b/train/1.tar"]


def test_trim_keeps_the_last_used(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, file in enumerate(sorted((filled / "cache").glob("*.ta*"), reverse=True)):  # the copy last
        os.utime(file, (1e9 - (file.suffix == ".tar") + number / 10, 1e9 + number / 10))
    last = max(report()["remote"]["objects"], key=lambda one: one["last_used"])
    total = taken()
    monkeypatch.setattr(cache_room, "disk_room", lambda _: total - taken())  # others have filled the disk
    run("--trim")
    assert 0 < len(urls()) < 3  # half of what is taken
    run("--trim", str(last["disk_bytes"]))
    assert urls() == [last["url"]]
    run("--trim", "0")
    assert urls() == []
    assert file_cache.cache().entries() == []


def test_verify(filled: Path) -> None:
    assert run("--verify") == "no damage\n"
    for data in (filled / "cache").glob("*.data"):
        flip(data, 5000)
    assert report("--verify", "s3://b/train/1.tar") == {"damaged": {"s3://b/train/1.tar": 4096}}
    assert run("--verify", "s3://b/train").splitlines() == [
        "s3://b/train/0.tar: 64.0 KiB were damaged and dropped; the next read fetches them again"
    ]
    assert run("--verify", "s3://b/") == "no damage\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--clear", "--verify"], "cannot be combined"),
        (["--trim", "1G", "s3://b/"], "--trim takes no URL"),
        (["--trim", "1.5X"], "is not a size"),
        (["train.tar"], "train.tar is not a URL"),
        (["s3://"], "no name of a bucket"),
    ],
)
def test_wrong_arguments(filled: Path, words: list[str], message: str) -> None:
    assert message in run(*words, code=2)


def test_a_cache_that_cannot_be_read(filled: Path) -> None:
    for table in (filled / "cache").glob("*.table"):
        table.unlink()
        table.mkdir()
    assert "the cache cannot be used" in run(code=4)
