"""`wdsfs://` for fsspec: what is read, chained URLs, errors."""

from __future__ import annotations

import os
import pickle
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import fsspec
import pytest

from tests.conftest import ROOT
from tests.library.conftest import columns
from wdsfs.errors import UsageError
from wdsfs.library import fsspec_files
from wdsfs.library.fsspec_files import WdsfsFileSystem


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    """As the entry point of an installed wdsfs does, which the checkout's environment may not have yet."""
    fsspec.register_implementation("wdsfs", WdsfsFileSystem, clobber=True)
    yield
    WdsfsFileSystem.clear_instance_cache()


def test_the_entry_point_is_this_class() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["fsspec.specs"]
    assert points == {"wdsfs": f"{WdsfsFileSystem.__module__}:{WdsfsFileSystem.__name__}"}


def test_chained_urls(shards: str, tmp_path: Path) -> None:
    with fsspec.open(f"wdsfs://t-1/d0/k1-2/jpg::{shards}") as file:
        assert file.read() == columns(1, 2)["jpg"]
    with fsspec.open(
        f"wdsfs://t-1/d0/k1-2.json::file://{tmp_path}/{shards}", "r", wdsfs={"layout": "files"}
    ) as file:
        assert file.read() == '{"n": 2}'
    with pytest.raises(UsageError, match="options of file mean nothing to it: auto_mkdir"):
        fsspec.open(f"wdsfs://t-1::{shards}", file={"auto_mkdir": True})


def test_shards_in_stores_are_read_by_wdsfs() -> None:
    for rest, protocol, spec in (
        ("bucket/t-{0..9}.tar", "s3", "s3://bucket/t-{0..9}.tar"),
        ("bucket/t.tar", "gcs", "gs://bucket/t.tar"),
        ("https://host/t-{0..9}.tar", "https", "https://host/t-{0..9}.tar"),
        *(("/data/t.tar", protocol, "/data/t.tar") for protocol in ("file", None)),
    ):
        assert fsspec_files._spec_of(rest, protocol, {}) == spec


def test_a_file_system_of_shards(shards: str, tmp_path: Path) -> None:
    fs = fsspec.filesystem("wdsfs", shards=shards, columns=["jpg", "cls"])
    assert fs.ls("", detail=False) == ["t-0", "t-1", "t-2"]
    assert fs.find("t-0/d1") == [f"t-0/d1/k0-{at}/{name}" for at in (1, 3) for name in ("cls", "jpg")]
    assert fs.glob("*/d0/*/cls") == [f"t-{n}/d0/k{n}-{at}/cls" for n in range(3) for at in (0, 2)]
    assert fs.cat("t-0/d0/*/cls", recursive=True) == {"t-0/d0/k0-0/cls": b"0", "t-0/d0/k0-2/cls": b"2"}
    data = columns(0, 0)["jpg"]
    path = "wdsfs://t-0/d0/k0-0/jpg"
    assert (fs.size(path), fs.isfile(path), fs.isdir(path)) == (len(data), True, False)
    assert fs.cat_file(path, 5, -5) == data[5:-5]
    assert fs.cat_file(path, -7) == data[-7:]
    assert fs.cat_ranges([path] * 2, [0, 10], [3, 12]) == [data[:3], data[10:12]]
    fs.get("t-0/d1", "copy", recursive=True)
    fs.get(["t-1/d0/k1-0/cls", "t-1/d0/k1-2/jpg"], f"{tmp_path}/copy/")
    samples = [f"copy/k0-{at}/{name}" for at in (1, 3) for name in ("cls", "jpg")]
    copied = {str(file.relative_to(tmp_path)) for file in tmp_path.glob("copy/**/*[sg]")}
    assert copied == {*samples, "copy/cls", "copy/jpg"}
    assert fs.modified(path).timestamp() == 1
    with fs.open(path) as file:
        file.seek(-3, os.SEEK_END)
        assert file.read() == data[-3:]
    assert fs.read_block(path, 5, 10**9) == data[5:]
    assert fs.ls("/t-0/d0", detail=False) == ["t-0/d0/k0-0", "t-0/d0/k0-2"]
    assert fs.info("/t-0/d0/")["name"] == "t-0/d0"
    assert fs.ls("t-0/d0/k0-0/cls", detail=False) == ["t-0/d0/k0-0/cls"]
    sent = pickle.dumps(fs)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir("/")
        assert pickle.loads(sent).cat(path) == data
    fs.close()
    assert fsspec.filesystem("wdsfs", shards=shards, columns=["jpg", "cls"]).cat(path) == data


def test_errors_are_those_of_the_operating_system(shards: str, tmp_path: Path) -> None:
    fs = fsspec.filesystem("wdsfs", shards=shards)
    assert not fs.exists("t-0/none")
    for ask in (fs.info, fs.ls, fs.cat, fs.open):
        with pytest.raises(FileNotFoundError, match="none"):
            ask("t-0/none")
    with pytest.raises(IsADirectoryError):
        fs.cat_file("t-0")
    with pytest.raises(NotADirectoryError):
        fs.info("t-0/d0/k0-0/cls/x")
    with pytest.raises(OSError, match="no such shard: 'none"):
        fsspec.filesystem("wdsfs", shards="none.tar")
    for options, text in (
        ({}, "no shards are named"),
        ({"shards": shards, "layout": "no"}, "^layout='no': is one of samples, files, classes$"),
        ({"shards": shards, "keys": "none"}, "^keys none: there is no such file$"),
    ):
        with pytest.raises(UsageError, match=text):
            fsspec.filesystem("wdsfs", **options)
    (tmp_path / "empty").touch()
    with pytest.raises(OSError, match=r"empty: lists no key$") as caught:
        fsspec.filesystem("wdsfs", shards=shards, keys="empty")
    assert caught.value.filename is None
    with pytest.raises(TypeError, match="there is no option 'key'"):
        fsspec.filesystem("wdsfs", shards=shards, key="k.txt")
    assert fsspec.filesystem("wdsfs", shards=shards, use_listings_cache=False, skip_instance_cache=True).ls("")


def test_nothing_is_written(shards: str) -> None:
    fs = fsspec.filesystem("wdsfs", shards=shards)
    for write in (
        *(
            partial(getattr(fs, name), "t-0/d0")
            for name in ("mkdir", "makedirs", "rmdir", "rm", "rm_file", "touch")
        ),
        *(partial(fs.open, "t-0/x", "wb"), partial(fs.pipe, "t-0/x", b""), partial(fs.put, __file__, "t-0/x")),
        *(partial(getattr(fs, name), "t-0/d0/k0-0/cls", "t-0/x") for name in ("copy", "mv")),
    ):
        with pytest.raises(OSError, match="Read-only file system"):
            write()
