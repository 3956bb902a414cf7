"""`--index-tree`: each link leads to the sample that readers count under its number, also after shards change."""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import sets, tars
from tests.conftest import Program, fails
from tests.processes import wait_until
from tests.tree.test_shard_tree import a_set, content_of, names_in
from tests.tree.test_view_record import a_view, asked
from wdsfs.errors import (
    InvalidRequest,
    IsADirectory,
    NoSuchAttribute,
    NoSuchEntry,
    NotADirectory,
    ShardError,
    StaleEntry,
    UsageError,
)
from wdsfs.index.store import open_index
from wdsfs.inodes import BY_INDEX, NUMBERED, ROOT, THOUSAND, pack_extra
from wdsfs.shards import Shard
from wdsfs.spec.expand import expand
from wdsfs.tree import numbered_tree
from wdsfs.tree.composition import Composition
from wdsfs.tree.indexing import NotIndexed, indexed
from wdsfs.tree.numbered_tree import NumberedTree, check_name, make_numbered
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.tree import AT_PARENT, LowerTree, View

EXT, FULL = View(index_tree=True), View(names="full", index_tree=True)


@contextmanager
def a_tree(shards: Sequence[bytes], view: View = EXT, merge: bool = False) -> Iterator[NumberedTree]:
    """The tree over these shards, called s0, s1 ..., in a directory of its own."""
    with a_set(shards) as below:
        tree = make_numbered(below, replace(view, merge=merge))
        assert isinstance(tree, NumberedTree)
        tree.prepare()
        yield tree


def links(tree: NumberedTree) -> dict[int, bytes]:
    """All links by number, as a walk finds them."""
    found: dict[int, bytes] = {}

    def walk(inode: int, path: bytes) -> None:
        entries = list(tree.listing(inode, AT_PARENT))
        for entry in entries:
            name, below = path + entry.name, tree.lookup(inode, entry.name)
            assert below == entry.node == tree.getattr(below.inode)
            assert (inode, entry.name) in tree.places(below.inode)
            rest = [one.name for one in tree.listing(inode, entry.cursor)]
            assert rest == [one.name for one in entries[entries.index(entry) + 1 :]]
            if stat.S_ISDIR(below.mode):
                assert tree.parent(below.inode) == inode
                walk(below.inode, name + b"/")
                continue
            target = tree.readlink(below.inode)
            assert below.size == len(target)
            top, thousand, last = name.split(b"/")
            assert int(last) == len(found) == int(top) * 10**6 + int(thousand) * 1000 + int(last) % 1000
            found[int(last)] = target

    walk(tree.lookup(ROOT, numbered_tree.NAME).inode, b"")
    return found


def sample_at(tree: NumberedTree, target: bytes) -> dict[bytes, bytes]:
    """Return the files at the target of a link: contents by the full name in the tar."""
    assert target.startswith(b"../../../")
    entries = list(tree.listing(tree.resolve(target.removeprefix(b"../../../")).inode, AT_PARENT))
    inodes = [entry.node.inode for entry in entries if stat.S_ISREG(entry.node.mode)]
    return {tree.getxattr(inode, b"user.wdsfs.member"): content_of(tree, inode) for inode in inodes}


def counted(tar: bytes) -> list[dict[bytes, bytes]]:
    """The samples of a shard as the webdataset library meets them: contents by whole name."""
    samples = []
    for one in tars.by_webdataset(tar):
        key = one["__key__"].encode("utf-8", "surrogateescape")
        samples.append({key + b"." + ext.encode(): data for ext, data in one.items() if not ext.startswith("__")})
    return samples


def check_links(tree: NumberedTree, shards: Sequence[bytes]) -> dict[int, bytes]:
    """Check that each link leads to the sample of its number; return the links."""
    found, expected = links(tree), [sample for shard in shards for sample in counted(shard)]
    assert len(found) == len(expected) == tree.totals().samples
    for number, sample in enumerate(expected):
        # Where a key is a folder, too, the directory has both: what is looked for is among the rest.
        assert sample_at(tree, found[number]).items() >= sample.items(), number
    return found


ODD = tars.tar(
    tars.member(b"README", b"no sample"),
    tars.member(b"b/x.txt", b"1"),
    tars.member(b"a/x.txt", b"2"),
    tars.member(b"a/x.cls", b"3"),
    tars.member(b"b/y.txt", b"4"),
    tars.member(b".hidden", b"no sample"),
    tars.member(b"a.txt", b"5: shares its directory with a/"),
    tars.member(b"top.txt", b"6"),
    tars.member(b"a/x.txt", b"7: once more"),
    tars.member(b"__meta__/i.json", b"no sample"),
    tars.member(b"b/y.txt", b"8: once more"),
)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("view", [EXT, FULL])
def test_the_numbers_are_those_of_a_reader(view: View, merge: bool) -> None:
    other = tars.tar(*(tars.member(b"a/%d.txt" % number, b"%d" % number) for number in range(3)))
    shards = [ODD, tars.tar(), other, ODD]
    with a_tree(shards, view, merge) as tree:
        found = check_links(tree, shards)
        assert len(found) == 17
        if merge:
            assert found[9] == b"../../../a/2"


@settings(max_examples=50)
@given(st.lists(st.lists(st.sampled_from([b"a", b"b", b"d/a", b"d/b", b"d", b"d/e/a"]), max_size=12), min_size=1))
def test_any_order_of_folders(shards: list[list[bytes]]) -> None:
    made = []
    for at, keys in enumerate(shards[:4]):
        members = [tars.member(key + b".%d" % n, b"%d-%d" % (at, n)) for n, key in enumerate(keys)]
        made.append(tars.tar(*members))
    with a_tree(made) as tree:
        check_links(tree, made)


def plain(count: int, first: int = 0, content: bytes = b"x") -> bytes:
    return tars.tar(*(tars.member(b"%05d.txt" % number, content) for number in range(first, first + count)))


def test_the_directory_in_the_top() -> None:
    with a_tree([plain(3), plain(1)]) as tree:
        assert names_in(tree) == [b"s0", b"s1", b"by-index"]
        last = list(tree.listing(ROOT))[-1]
        assert list(tree.listing(ROOT, last.cursor)) == []
        assert tree.getattr(ROOT).links == 2 + 3
        assert tree.parent(last.node.inode) == ROOT
        assert tree.places(last.node.inode) == [(ROOT, b"by-index")]
        assert names_in(tree, b"by-index") == [b"000"]
        for absent in (b"by-index/0", b"by-index/001", b"by-index/000/001", b"by-index/000/x", b"by-index/-01"):
            with pytest.raises(NoSuchEntry):
                tree.resolve(absent)
        for absent in (b"000004", b"4", b"3", b"0000003", "٣٣٣٣٣٣".encode(), b"9" * 5000):
            with pytest.raises(NoSuchEntry):
                tree.resolve(b"by-index/000/000/" + absent)
        directory, link = tree.resolve(b"by-index/000/000"), tree.resolve(b"by-index/000/000/000003")
        assert tree.readlink(link.inode) == b"../../../s1/00000"
        assert (link.mode, link.links) == (stat.S_IFLNK | 0o777, 1)
        assert tree.run(directory.inode, 0, 10) is None
        tree.open_directory(directory.inode)
        for inode in (directory.inode, link.inode):
            assert tree.xattrs(inode) == []
            with pytest.raises(NoSuchAttribute):
                tree.getxattr(inode, b"user.wdsfs.key")
            with pytest.raises(IsADirectory):
                tree.content(inode)
        with pytest.raises(NotADirectory):
            tree.lookup(link.inode, b"x")
        with pytest.raises(NotADirectory):
            tree.open_directory(link.inode)
        with pytest.raises(NotADirectory):
            next(tree.listing(link.inode))
        with pytest.raises(InvalidRequest):
            tree.readlink(directory.inode)
        sample = tree.resolve(b"s0/00001")
        assert tree.xattrs(sample.inode)
        assert tree.run(tree.parent(sample.inode), sample.inode & 0xFFFFFFFF, 10) is not None


def test_a_hundred_million_samples() -> None:
    """Nothing grows with them but the sums; the names get more digits."""
    with a_tree([plain(1)]) as tree:
        tree._load()
        tree._ends = np.array([123_456_789, 2_345_678_901], np.int64)
        top = tree.resolve(b"by-index").inode
        names = [entry.name for entry in tree.listing(top, AT_PARENT)]
        assert (len(names), names[0], names[999], names[-1]) == (2346, b"000", b"999", b"2345")
        (name,) = [entry.name for entry in tree.listing(tree.resolve(b"by-index/2345").inode, AT_PARENT)][-1:]
        assert name == b"678"
        last = tree.resolve(b"by-index/2345/678").inode
        numbers = tree._below(*tree._kind_and_number(last))
        assert len(numbers) == 901
        assert tree._name(numbered_tree._LEVELS[THOUSAND], numbers[-1]) == b"2345678900"
        assert len(tree._below(*tree._kind_and_number(tree.resolve(b"by-index/123/456").inode))) == 1000
        assert tree.parent(last) == tree.resolve(b"by-index/2345").inode


def test_a_view_has_the_order_of_the_tar(tmp_path: Path) -> None:
    """A record that was made of another one: some samples are left out, and offsets mean nothing."""
    names = [b"b/x.t", b"a/x.t", b"b/y.t", b"gone.t", b"a.t", b"README", b"a/x.t", b"c/z.t"]
    (tmp_path / "s.tar").write_bytes(tars.tar(*map(tars.member, names)))
    shard = replace(sets.at(tmp_path / "s.tar"), without=frozenset([b"gone"]))
    with a_view(tmp_path, [shard], Composition()) as below:
        tree = make_numbered(below, EXT)
        links = [tree.readlink(resolve(tree, b"/000/000/%06d" % at)) for at in range(6)]
    assert links == [b"../../../s/" + path for path in (b"b/x", b"a/x", b"b/y", b"a", b"a/x~2", b"c/z")]


# --- changes under a live mount ----------------------------------------------------------------------------


def test_links_follow_a_change(tmp_path: Path) -> None:
    for number in (0, 1):
        (tmp_path / f"s{number}.tar").write_bytes(plain(3, content=b"%d" % number))
    shards = expand([f"{tmp_path}/s{{0,1}}.tar"])
    index = open_index(tmp_path / "index")
    index.refresh(shards)
    one = make_numbered(ShardSet(shards, index), EXT)
    another = make_numbered(ShardSet(shards, index, tags=one.lower.generations), EXT)
    assert isinstance(one, NumberedTree)
    assert isinstance(another, NumberedTree)
    before = one.resolve(b"by-index/000/000/000003")
    assert another.readlink(before.inode) == b"../../../s1/00000"
    (tmp_path / "s0.tar").write_bytes(plain(5))
    one.lower.distrust()
    with pytest.raises(NotIndexed):
        one.readlink(before.inode)
    one.lower.index_now(0)
    with pytest.raises(StaleEntry):
        one.readlink(before.inode)
    after = indexed(one.resolve, b"by-index/000/000/000003")
    assert after.inode != before.inode
    assert one.readlink(after.inode) == b"../../../s0/00003"
    assert another.readlink(after.inode) == b"../../../s0/00003", "it had not looked yet"
    with pytest.raises(StaleEntry):
        another.getattr(before.inode)
    assert one.resolve(b"by-index").inode == another.resolve(b"by-index").inode
    # A shard that is gone: nobody knows the numbers of the samples after it.
    os.rename(tmp_path / "s0.tar", tmp_path / "kept")
    one.lower.distrust()
    assert names_in(one) == [b"s0", b"s1", b"by-index"]
    for path in (b"by-index/000", b"by-index/000/000/000006"):
        with pytest.raises(ShardError):
            one.resolve(path)
    with pytest.raises(ShardError):
        one.readlink(after.inode)
    assert one.resolve(b"s1/00000")
    os.rename(tmp_path / "kept", tmp_path / "s0.tar")
    one.lower.distrust()
    assert one.readlink(indexed(one.resolve, b"by-index/000/000/000006").inode) == b"../../../s1/00001"
    one.close(clean=True)


@given(st.integers(8, 15), st.integers(0, (1 << 56) - 1))
def test_a_forged_inode_is_stale(forged: NumberedTree, what: int, number: int) -> None:
    inode = pack_extra(what, number)
    real = [b"", b"/000", b"/000/000", *(b"/000/000/%06d" % one for one in range(3))]
    if inode in [resolve(forged, path) for path in real]:
        return
    for question in (forged.getattr, forged.readlink, forged.parent, forged.content, forged.places):
        with pytest.raises((StaleEntry, NoSuchEntry, IsADirectory)):
            question(inode)
    if BY_INDEX <= what <= NUMBERED:
        with pytest.raises(StaleEntry):
            forged.lookup(inode, b"000")


def resolve(tree: LowerTree, path: bytes) -> int:
    return tree.resolve(numbered_tree.NAME + path).inode


@pytest.fixture(scope="module")
def forged() -> Iterator[Any]:
    with a_tree([plain(3)]) as tree:
        yield tree


# --- whose name it is --------------------------------------------------------------------------------------


def test_a_shard_of_that_name_is_refused() -> None:
    shard = Shard(b"/d/by-index.tar", b"by-index")
    with pytest.raises(UsageError, match=r"/d/by-index\.tar: .*rename the shard, or leave out --index-tree"):
        check_name([shard], EXT)
    check_name([shard], replace(EXT, merge=True))
    check_name([shard], View())


def test_a_folder_of_that_name_wins() -> None:
    with a_tree([tars.tar(tars.member(b"by-index/a.txt", b"data"))], merge=True) as tree:
        assert names_in(tree) == [b"by-index"]
        assert tree.resolve(b"by-index/a/txt").size == 4


# --- the program -------------------------------------------------------------------------------------------


def test_links_of_a_mount(program: Program) -> None:
    choose = random.Random(4)
    tops = [b"%d/%s.txt" % (choose.randrange(3), name) for name in (b"a", b"b", b"c", b"d", b"e")]
    first = tars.tar(*(tars.member(name, b"0" + name) for name in tops))
    program.write("s-0.tar", first)
    program.write("s-1.tar", plain(1200))
    with program.mounted("--index-tree", "--lazy", "--names", "full", "s-{0,1}.tar") as mounted:
        by_index = mounted.path / "by-index"
        assert sorted(os.listdir(mounted.path)) == ["by-index", "s-0", "s-1"]
        assert mounted.status()["index_tree"] is True
        assert b"samples, full names, numbered" in program.run("status", mounted.path).stdout
        for number, name in enumerate(tops):
            path = by_index / f"000/000/{number:06}" / os.path.basename(os.fsdecode(name))
            assert path.read_bytes() == b"0" + name
        assert os.readlink(by_index / "000/001/001204") == "../../../s-1/01199"
        assert os.path.samefile(by_index / "000/001/001204", mounted.path / "s-1/01199")
        assert len(program.tool("find", by_index, "-type", "l").splitlines()) == 1205
        assert len(program.tool("find", "-L", by_index, "-name", "*.txt").splitlines()) == 1205
        with fails(errno.ENOENT):
            os.stat(by_index / "000/001/001205")
        with fails(errno.EROFS):
            os.unlink(by_index / "000/001/001204")
        program.write("s-0.new", plain(2, content=b"new")).rename(program.home / "s-0.tar")
        mounted.expect_log(r"s-0\.tar has changed")
        mounted.allow_log("ESTALE")
        wait_until(
            lambda: asked(os.readlink, by_index / "000/000/000002") == "../../../s-1/00000", "the new numbers"
        )
        assert (by_index / "000/000/000001/00001.txt").read_bytes() == b"new"


def test_where_it_does_not_go(program: Program) -> None:
    program.write("a.tar", plain(2))
    listed = program.run("ls", "--index-tree", "-R", "a.tar", "by-index").stdout
    assert listed.split() == [b"000/", b"000/000/", b"000/000/000000", b"000/000/000001"]
    program.refused("cat", "a.tar", "by-index/000/000/000000/txt", code=6)  # the name of the file itself is needed
    assert program.run("cat", "a.tar", "a/00000/txt").stdout == b"x"
    assert "--layout samples" in program.refused("ls", "--index-tree", "--layout", "files", "a.tar", code=2)
    assert "--overlay" in program.refused(
        "mount", "--index-tree", "--overlay", "edits", "a.tar", program.mountpoint, code=2
    )
    program.write("by-index.tar", plain(2))
    for command, *words in (("ls",), ("mount", program.mountpoint)):
        assert "rename the shard" in program.refused(command, "--index-tree", "by-index.tar", *words, code=2)
