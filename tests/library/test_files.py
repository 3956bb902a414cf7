"""`wdsfs.tree`: the tree that a mount shows, without a mount."""

from __future__ import annotations

import bz2
import io
import os
import pickle
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import wdsfs
from tests import tars
from tests.conftest import Program, need_fuse
from tests.library.conftest import columns, shard
from tests.web_server import WebServer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layout": "files"},
        {"layout": "classes"},
        {"names": "full", "merge": True},
        {"index_tree": True, "columns": ["img=jpg", "cls"]},
    ],
    ids=str,
)
def test_it_is_the_tree_of_a_mount(program: Program, shards: str, options: dict[str, Any]) -> None:
    need_fuse()
    words: list[str] = []
    for name, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            words += [f"--{name.replace('_', '-')}", *([] if one is True else [str(one)])]
    with wdsfs.tree(shards, **options) as tree, program.mounted(*words, shards) as mounted:
        top = mounted.path
        ours = {path: (sorted(names), sorted(files)) for path, names, files in tree.walk()}
        theirs = {
            os.path.relpath(path, top).removeprefix("."): (
                sorted(name for name in names if not os.path.islink(os.path.join(path, name))),
                sorted(files + [name for name in names if os.path.islink(os.path.join(path, name))]),
            )
            for path, names, files in os.walk(top)
        }
        assert ours == theirs
        for path, (_, files) in ours.items():
            for name in files:
                below = f"{path}/{name}" if path else name
                if os.path.isfile(os.path.join(top, below)):
                    assert tree.read(below) == Path(top, below).read_bytes()
                    status = os.stat(os.path.join(top, below))
                    own = tree.stat(below)
                    assert (own.st_size, own.st_mtime_ns, own.st_ino, own.st_nlink) == (
                        *(status.st_size, status.st_mtime_ns, status.st_ino, status.st_nlink),
                    )


@pytest.fixture
def tree(shards: str) -> wdsfs.Tree:
    return wdsfs.tree(shards)


def test_names(tree: wdsfs.Tree) -> None:
    assert tree.listdir() == ["t-0", "t-1", "t-2"] == tree.listdir("/")
    assert tree.listdir("t-1/d1/") == ["k1-1", "k1-3"]
    assert [(entry.name, entry.stat.st_size) for entry in tree.scandir("t-0/d0/k0-0")] == [
        *(("jpg", len(columns(0, 0)["jpg"])), ("cls", 1), ("json", 8)),
    ]
    assert stat.S_ISDIR(tree.stat().st_mode)
    path = "t-2/d0/k2-0/json"
    assert (tree.exists(path), tree.isfile(path), tree.isdir(path)) == (True, True, False)
    assert (tree.exists("t-2/none"), tree.isfile(f"{path}/x"), tree.isdir("t-2")) == (False, False, True)
    for unknown in ("t-9", "t-0/d9", ".."):
        with pytest.raises(wdsfs.NoSuchEntry):
            tree.listdir(unknown)
    with pytest.raises(wdsfs.EntryError):
        tree.listdir(path)


def test_glob_and_a_walk_that_is_pruned(tree: wdsfs.Tree) -> None:
    assert tree.glob("t-0/d?/*/cls") == [f"t-0/d{at % 2}/k0-{at}/cls" for at in (0, 2, 1, 3)]
    assert tree.glob("**/k2-3/*") == [f"t-2/d1/k2-3/{name}" for name in ("jpg", "cls", "json")]
    assert tree.glob("t-[12]") == ["t-1", "t-2"]
    assert tree.glob("t-1/d0/k1-0/cls") == ["t-1/d0/k1-0/cls"]
    assert len(tree.glob("**")) == 3 * (1 + 2 + 4 + 12)
    assert tree.glob("none/*") == tree.glob("t-0/d0/k0-0/cls/*") == []
    seen = []
    for path, names, _ in tree.walk():
        seen.append(path)
        names[:] = [name for name in names if name in ("t-1", "d0")]
    assert seen == ["", "t-1", "t-1/d0"]


def test_files_seek(tree: wdsfs.Tree) -> None:
    data = columns(1, 2)["jpg"]
    with tree.open("t-1/d0/k1-2/jpg") as file:
        assert isinstance(file, io.BufferedReader)
        assert (file.seekable(), file.readable(), file.writable()) == (True, True, False)
        assert file.read(5) == data[:5]
        assert file.seek(-5, os.SEEK_END) == len(data) - 5
        assert (file.read(), file.read(), file.tell()) == (data[-5:], b"", len(data))
        assert file.seek(len(data) + 10) == len(data) + 10
        assert file.read() == b""
        with pytest.raises(ValueError, match="no such place"):
            file.raw.seek(-1)
        file.seek(0)
        assert b"".join(iter(lambda: file.read(700), b"")) == data
    with pytest.raises(ValueError, match="closed"):
        file.raw.pread(1, 0)
    with tree.open("t-1/d0/k1-2/json", "r", encoding="ascii") as text:
        assert text.read() == '{"n": 2}'
    with tree.open("t-1/d0/k1-2/jpg", buffering=0) as raw:
        assert isinstance(raw, io.RawIOBase)
        assert raw.readall() == data
    assert tree.read("t-1/d0/k1-2/jpg", 10, 7) == data[10:17]
    assert tree.read("t-1/d0/k1-2/jpg", 10**9) == b""
    with pytest.raises(wdsfs.UsageError, match="mode 'wb'"):
        tree.open("t-1/x", "wb")
    with pytest.raises(wdsfs.UsageError, match="mode rb takes no encoding"):
        tree.open("t-1/d0/k1-2/json", encoding="ascii")
    with pytest.raises(wdsfs.EntryError):
        tree.open("t-1")


def test_files_that_others_have_closed_meanwhile_are_read_on(
    tree: wdsfs.Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree._set.lower._files, "_most", 1)
    paths = [f"t-{n}/d0/k{n}-2/jpg" for n in range(3)]
    files = [tree.open(path) for path in paths]

    def read(at: int) -> bytes:
        with tree.open(paths[at % 3]) as file:
            return bytes(file.read())

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(read, range(300))) == [columns(at % 3, 2)["jpg"] for at in range(300)]
    assert [file.read() for file in files] == [columns(n, 2)["jpg"] for n in range(3)]


def test_a_file_of_a_shard_that_has_changed_raises(tree: wdsfs.Tree, tmp_path: Path) -> None:
    """What is opened after the change is new."""
    path = "t-1/d0/k1-0/jpg"
    file = tree.open(path, buffering=0)
    assert file.read(3)
    for content, found in (((b"d0/k1-0.jpg", b"new"), b"new"), ((b"d0/k8-0.cls", b"1"), None)):
        (tmp_path / "new").write_bytes(tars.tar(tars.member(*content)))
        (tmp_path / "new").rename(tmp_path / "t-1.tar")
        if found is not None:
            assert tree.read(path) == found  # at once
    with pytest.raises(wdsfs.StaleShard):
        file.read(3)
    assert tree.listdir("t-1/d0") == ["k8-0"]


def test_symbolic_links_are_followed_inside_the_set(tmp_path: Path) -> None:
    link = tars.SYMLINK
    members = [
        tars.member(b"d/a.txt", b"aaa"),
        tars.member(b"b.txt", kind=link, link=b"d/a.txt"),
        tars.member(b"e", kind=link, link=b"d"),
        tars.member(b"out", kind=link, link=b"../../etc"),
        tars.member(b"f", b"f at the top"),
        tars.member(b"a/f", b"f in a"),
        tars.member(b"a/b/x", b"x"),
        tars.member(b"deep", kind=link, link=b"a/b"),
        tars.member(b"above", kind=link, link=b"deep/../f"),
        tars.member(b"absolute", kind=link, link=b"/etc/passwd"),
        tars.member(b"round", kind=link, link=b"round"),
    ]
    (tmp_path / "s.tar").write_bytes(tars.tar(*members))
    with wdsfs.tree("s.tar", layout="files") as tree:
        assert tree.read("s/b.txt") == b"aaa" == tree.read("s/e/a.txt")
        assert tree.listdir("s/e") == ["a.txt"]
        assert tree.read("s/above") == b"f in a" == tree.read("s/deep/../f") == tree.read("s/e/../a/f")
        for path in ("s/out", "s/absolute", "s/round"):
            with pytest.raises(wdsfs.NoSuchEntry):
                tree.stat(path)
            assert not tree.exists(path)


def test_compressed_and_remote_shards(tmp_path: Path, web: WebServer) -> None:
    (tmp_path / "t-0.tar.bz2").write_bytes(bz2.compress(shard(0)))
    web.put("/t-1.tar", shard(1))
    with wdsfs.tree(["t-0.tar.bz2", f"{web.url}/t-1.tar"]) as tree:
        assert [tree.read(path) for path in tree.glob("*/d1/k?-3/jpg")] == [columns(n, 3)["jpg"] for n in (0, 1)]


def test_it_is_pickled_with_its_options(shards: str) -> None:
    with wdsfs.tree(shards, layout="files", columns=["cls"], merge=True) as tree:
        same = pickle.loads(pickle.dumps(tree))
        assert [*same.walk()] == [*tree.walk()]
        assert same.listdir("d0")[0] == "k0-0.cls"


def test_words_that_mean_nothing(shards: str) -> None:
    for options, text in (
        ({"layout": "sample"}, "layout='sample': is one of samples, files, classes"),
        ({"names": "short"}, "names='short': is one of ext, full"),
        ({"layout": "files", "index_tree": True}, "index_tree is for layout samples"),
        ({"class_from": "cls"}, "class_from is for layout classes"),
        ({"layout": "classes", "class_digits": 19}, "is a number from 0 to 18"),
    ):
        with pytest.raises(wdsfs.UsageError, match=text):
            wdsfs.tree(shards, **options)


def test_places_that_are_none(shards: str) -> None:
    with wdsfs.tree(shards) as tree:
        file = tree.open("t-0/d0/k0-0/cls")
        for offset, length in ((-1, None), (0, -1)):
            with pytest.raises(wdsfs.UsageError, match="neither can be negative"):
                tree.read("t-0/d0/k0-0/cls", offset, length)
        for ask in (tree.listdir, tree.scandir):
            with pytest.raises(wdsfs.EntryError, match=r"^t-0/d0/k0-0/cls is a file"):
                ask("t-0/d0/k0-0/cls")
        with pytest.raises(wdsfs.NoSuchEntry, match="not valid UTF-8"):
            tree.read("\ud800")
    for question in (tree.listdir, file.read, lambda: tree.open("t-0/d0/k0-0/cls")):
        with pytest.raises(wdsfs.UsageError, match="this is closed"):
            question()


def test_a_set_with_a_shard_that_cannot_be_read(tmp_path: Path, shards: str) -> None:
    (tmp_path / "t-1.tar").write_bytes(b"<html>no tar</html>" * 100)
    with pytest.raises(wdsfs.UnreadableShard):
        wdsfs.tree(shards, merge=True)
    with wdsfs.tree(shards, merge=True, allow_missing=True) as tree:
        assert tree.listdir("d0") == ["k0-0", "k0-2", "k2-0", "k2-2"]
