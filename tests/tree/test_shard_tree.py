"""The tree without FUSE: what exists, under which name and inode, for one shard and for many merged."""

from __future__ import annotations

import io
import itertools
import os
import re
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests import tars
from tests.tree.test_shard_set import a_lower
from wdsfs import inodes
from wdsfs.errors import IsADirectory, NoSuchAttribute, NoSuchEntry, NotADirectory, StaleShard, UnreadableShard
from wdsfs.index import record
from wdsfs.index.store import open_index
from wdsfs.inodes import MEMBER, ROOT, kind_of
from wdsfs.names import NAME_MAX
from wdsfs.spec.expand import expand
from wdsfs.tree import content as content_module
from wdsfs.tree.indexing import NotIndexed
from wdsfs.tree.merged_tree import TABLES, make_tree
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.tree import Entry, ListingRun, LowerTree, Node, View

VIEWS = [View(), View(names="full"), View("files")]

Item = tuple[str, bytes]  # a member's name and content; a name that ends in "/" is a directory


def tar(items: Sequence[Item]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in items:
            info = tarfile.TarInfo(name)
            if name.endswith("/"):
                info.type = tarfile.DIRTYPE
            info.size, info.mtime = len(content), 1_600_000_000 + len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@contextmanager
def a_set(shards: Sequence[bytes], *, indexed: bool = True) -> Iterator[ShardSet]:
    """The set of these shards, called s0, s1 ..., in a directory of its own."""
    with TemporaryDirectory() as home:
        for number, data in enumerate(shards):
            Path(home, f"s{number}.tar").write_bytes(data)
        with a_lower(Path(home), expand([f"{home}/s{{0..{len(shards) - 1}}}.tar"]), indexed=indexed) as below:
            yield below


@contextmanager
def a_tree(shards: Sequence[bytes], view: View, merge: bool = False, indexed: bool = True) -> Iterator[LowerTree]:
    """The tree over these shards."""
    with a_set(shards, indexed=indexed) as below:
        yield make_tree(below, replace(view, merge=merge))


def names_in(tree: LowerTree, path: bytes = b"") -> list[bytes]:
    return [entry.name for entry in tree.listing(tree.resolve(path).inode)][2:]


def content_of(tree: LowerTree, inode: int) -> bytes:
    content = tree.content(inode)
    return content_module.read(content, 0, content.size)


def walk(tree: LowerTree, inode: int = ROOT, path: bytes = b"") -> Iterator[tuple[bytes, Entry]]:
    for entry in list(tree.listing(inode))[2:]:
        below = path + b"/" + entry.name
        yield below, entry
        if entry.node.mode & 0o040000:
            yield from walk(tree, entry.node.inode, below)


def check_consistency(tree: LowerTree) -> dict[bytes, bytes]:
    """Everything that must hold of any tree; returns its files with their contents."""
    files: dict[bytes, bytes] = {}
    directories = [(b"", ROOT)]
    for path, inode in directories:
        entries = list(tree.listing(inode))
        names = [entry.name for entry in entries]
        assert names[:2] == [b".", b".."]
        assert entries[0].node == tree.getattr(inode)
        assert max(Counter(names).values()) == 1, f"a name twice in {path!r}: {names}"
        cursors = [entry.cursor for entry in entries]
        assert len(set(cursors)) == len(cursors)
        for at, entry in enumerate(entries):
            assert [e.name for e in tree.listing(inode, entry.cursor)] == names[at + 1 :], "resumed elsewhere"
            if at < 2:
                continue
            assert entry.name not in (b"", b".", b"..")
            assert not {b"/"[0], 0} & set(entry.name)
            assert len(entry.name) <= NAME_MAX
            assert tree.lookup(inode, entry.name) == entry.node == tree.getattr(entry.node.inode)
            assert (inode, entry.name) in tree.places(entry.node.inode)
            if entry.node.mode & 0o040000:
                assert tree.parent(entry.node.inode) == inode
                directories.append((path + b"/" + entry.name, entry.node.inode))
            else:
                files[path + b"/" + entry.name] = content_of(tree, entry.node.inode)
                assert len(files[path + b"/" + entry.name]) == entry.node.size
    return files


# --- one shard, in order ------------------------------------------------------------------------------------

ORDINARY: list[Item] = [
    ("images17/image194.left.jpg", b"left"),
    ("images17/image194.right.jpg", b"right"),
    ("images17/image194.json", b"{}"),
    ("images12/image4.left.jpg", b"L"),
    ("images12/image4.json", b"[]"),
]


def test_a_sample_is_a_directory_of_files_named_by_their_extensions() -> None:
    with a_tree([tar(ORDINARY)], View()) as tree:
        assert names_in(tree, b"s0") == [b"images17", b"images12"]  # the order of the tar
        assert names_in(tree, b"s0/images17/image194") == [b"left.jpg", b"right.jpg", b"json"]
        assert check_consistency(tree)[b"/s0/images12/image4/left.jpg"] == b"L"


def test_nothing_leads_outside_the_mount() -> None:
    items = [("../up.jpg", b"1"), ("/abs/a.jpg", b"2"), ("./dot.jpg", b"3"), ("a//b.jpg", b"4"), ("e.", b"5")]
    with a_tree([tar(items)], View()) as tree:
        assert check_consistency(tree) == {
            b"/s0/%2E%2E/up/jpg": b"1",
            b"/s0/%/abs/a/jpg": b"2",
            b"/s0/dot/jpg": b"3",
            b"/s0/a/%/b/jpg": b"4",
            b"/s0/e/%": b"5",
        }


def test_link_counts_and_times() -> None:
    with a_tree([tar([("d/", b""), *ORDINARY])], View()) as tree:
        assert tree.getattr(ROOT).links == 3
        assert tree.resolve(b"s0").links == 4  # images17, images12; the empty folder d is not shown
        assert tree.resolve(b"s0/images17").links == 3
        assert tree.resolve(b"s0/images17/image194").links == 2
        assert tree.resolve(b"s0/images17/image194/json").mtime_ns == 1_600_000_002 * 10**9
        assert tree.resolve(b"s0/images17/image194").mtime_ns == 1_600_000_004 * 10**9  # of its first member
        shard = os.stat(tree.lower.path_text(0)).st_mtime_ns  # of what has no member of its own
        assert tree.resolve(b"s0").mtime_ns == tree.resolve(b"s0/images17").mtime_ns == shard
    with a_tree([tar([("d/", b""), *ORDINARY])], View("files")) as tree:
        assert tree.resolve(b"s0").links == 5
        assert tree.resolve(b"s0/d").mtime_ns == 1_600_000_000 * 10**9


def test_provenance() -> None:
    data = tar(ORDINARY)
    with a_tree([data], View()) as tree:
        node = tree.resolve(b"s0/images17/image194/right.jpg")
        values = {name: tree.getxattr(node.inode, name) for name in tree.xattrs(node.inode)}
        assert values[b"user.wdsfs.member"] == b"images17/image194.right.jpg"
        assert values[b"user.wdsfs.key"] == b"images17/image194"
        assert values[b"user.wdsfs.shard"].endswith(b"/s0.tar")
        offset = int(values[b"user.wdsfs.offset"])
        assert data[offset : offset + 5] == b"right"
        sample = tree.resolve(b"s0/images17/image194")
        assert tree.getxattr(sample.inode, b"user.wdsfs.key") == b"images17/image194"
        with pytest.raises(NoSuchAttribute):
            tree.getxattr(sample.inode, b"user.wdsfs.offset")
        with pytest.raises(NoSuchAttribute):
            tree.getxattr(ROOT, b"user.wdsfs.shard")
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, "README"
    buffer = io.BytesIO(tar([("README", b"stray"), ("k.a", b"1")]))
    with tarfile.open(fileobj=buffer, mode="a") as archive:
        archive.addfile(link)
    with a_tree([buffer.getvalue()], View("files")) as tree:
        assert tree.xattrs(tree.resolve(b"s0/link").inode) == []
        stray = tree.resolve(b"s0/README").inode
        assert [name.rpartition(b".")[2] for name in tree.xattrs(stray)] == [b"shard", b"member", b"offset"]
        assert all(tree.getxattr(stray, name) for name in tree.xattrs(stray))


def test_errors_name_what_is_wrong() -> None:
    with a_tree([tar(ORDINARY)], View()) as tree:
        file = tree.resolve(b"s0/images17/image194/json").inode
        with pytest.raises(NoSuchEntry, match="nothing"):
            tree.lookup(ROOT, b"nothing")
        with pytest.raises(NotADirectory):
            tree.lookup(file, b"x")
        with pytest.raises(NotADirectory):
            tree.open_directory(file)
        with pytest.raises(IsADirectory):
            tree.content(tree.resolve(b"s0/images17").inode)
        for inode in (0, 2, 1 << 40, inodes.pack(0, 7, inodes.position(MEMBER, 0))):
            with pytest.raises((NoSuchEntry, StaleShard, UnreadableShard)):
                tree.getattr(inode)


def test_an_inode_number_is_the_same_in_every_view_and_after_a_remount(tmp_path: Path) -> None:
    numbers = []
    (tmp_path / "s0.tar").write_bytes(tar(ORDINARY))
    for view in (View(), View(), View(names="full"), View("files")):
        with a_lower(tmp_path, expand([f"{tmp_path}/s0.tar"])) as below:
            tree = make_tree(below, view)
            numbers.append({e.node.inode for _, e in walk(tree) if kind_of(e.node.inode) == MEMBER})
    assert len(numbers[0]) == 5
    assert numbers[0] == numbers[1] == numbers[2] == numbers[3]


def test_a_shard_is_indexed_when_it_is_first_looked_into() -> None:
    with a_tree([tar(ORDINARY), tar(ORDINARY)], View(), indexed=False) as tree:
        assert names_in(tree) == [b"s0", b"s1"]  # without an index
        node = tree.lookup(ROOT, b"s1")
        with pytest.raises(NotIndexed) as wanted:
            list(tree.listing(node.inode))
        assert wanted.value.number == 1
        tree.lower.index_now(1)
        assert names_in(tree, b"s1") == [b"images17", b"images12"]
        assert tree.totals().indexed == 1


# --- many shards as one tree ----------------------------------------------------------------------------------


SAME = "a.jpg=1 | a.jpg=2 a.cls=x | a.jpg=3"
# The members of each shard (name=content), the view, and all files of the merged tree.
MERGED = {
    "folders are one": (
        "d/a.jpg=1 b.jpg=2 | d/c.jpg=3 e/f.jpg=4",
        View(),
        "/d/a/jpg=1 /b/jpg=2 /d/c/jpg=3 /e/f/jpg=4",
    ),
    "a key that an earlier shard has": (SAME, View(), "/a/jpg=1 /a~s1/jpg=2 /a~s1/cls=x /a~s2/jpg=3"),
    "a file that an earlier shard has": (SAME, View("files"), "/a.jpg=1 /a.jpg~s1=2 /a.cls=x /a.jpg~s2=3"),
    "a key that is a folder of another shard": (
        "a/b.jpg=1 | a.jpg=2 a.b=3 | a.jpg=4",
        View(),
        "/a/b/jpg=1 /a~s1/jpg=2 /a~s1/b=3 /a~s2/jpg=4",
    ),
    # Only the first of its key shares the directory, so that no files of two samples are in one.
    "a key that is a folder of its own shard": (
        "a.jpg=1 a/b.jpg=2 | a.jpg=1 a/b.jpg=2 a/c.x=3 | a/jpg.x=4",
        View(),
        "/a/jpg=1 /a/b/jpg=2 /a~s1/jpg=1 /a/b~s1/jpg=2 /a/c/x=3 /a/jpg~s2/x=4",
    ),
    "plain names that end like those with a shard": (
        "a.x=1 a~s1.x=2 b~s7.x=no_such_shard | a.x=3 a~s1.x=4",
        View(),
        "/a/x=1 /a~s1~s0/x=2 /b~s7/x=no_such_shard /a~s1/x=3 /a~s1~s1/x=4",
    ),
}


def items_in(text: str) -> list[Item]:
    """The pairs of a text such as `a.jpg=1 b.jpg=2`."""
    return [(name, content.encode()) for name, _, content in (word.partition("=") for word in text.split())]


@pytest.mark.parametrize("case", MERGED)
def test_names_in_a_merged_tree(case: str) -> None:
    shards, view, files = MERGED[case]
    with a_tree([tar(items_in(members)) for members in shards.split("|")], view, merge=True) as tree:
        assert check_consistency(tree) == {name.encode(): content for name, content in items_in(files)}


def test_a_merged_listing_has_the_order_of_the_shards() -> None:
    """And a path that is twice in a shard is numbered there first."""
    shards = ["d/a.jpg=1 b.jpg=2", "d/c.jpg=3 e/f.jpg=4"]
    with a_tree([tar(items_in(members)) for members in shards], View(), merge=True) as tree:
        assert names_in(tree) == [b"d", b"b", b"e"]
        assert names_in(tree, b"d") == [b"a", b"c"]
        assert tree.getattr(ROOT).links == tree.resolve(b"d").links == 1  # to count would take a look into each
    with a_tree([tar([("a.x", b"1"), ("b.x", b"2"), ("a.x", b"3")])] * 2, View(), merge=True) as tree:
        assert names_in(tree) == [b"a", b"b", b"a~2", b"a~s1", b"b~s1", b"a~2~s1"]


def test_a_listed_directory_is_the_same_when_another_process_makes_the_table_of_the_set_again() -> None:
    """Workers that start together each make it, and the keys in each are others."""
    with a_tree([tar([("d/a.jpg", b"1")]), tar([("d/c.jpg", b"3")])], View(), merge=True) as tree:
        assert names_in(tree, b"d") == [b"a", b"c"]
        other = make_tree(ShardSet(tree.lower.shards, open_index(tree.lower.index.directory)), tree.view)
        try:
            other.lower.drop_tables(TABLES)
            assert names_in(other, b"d") == [b"a", b"c"]
        finally:
            other.lower.close()
        tree.lower.renew()
        assert names_in(tree, b"d") == [b"a", b"c"]


def test_a_folder_keeps_the_name_that_a_sample_would_get() -> None:
    shards = [tar([("a.x", b"1"), ("a~s1/b.x", b"2")]), tar([("a.x", b"3")])]
    with a_tree(shards, View(), merge=True) as tree:
        files = check_consistency(tree)
        place = next(path for path, content in files.items() if content == b"3")
        assert re.fullmatch(rb"/a%[0-9a-f]{8}~s1/x", place)
        assert files == {b"/a/x": b"1", b"/a~s1/b/x": b"2", place: b"3"}


@pytest.mark.parametrize("length", [242, 243, 244, 251, 252, 253, 254, 255])
def test_merged_names_that_are_cut_for_their_shard_are_found(length: int) -> None:
    keys = ["k" * length, "l" * (length - 3) + "~s2", "l" * (length - 3), "m" * 9 + "%80000001"]
    with a_tree([tar([(f"d/{key}.x", b"%d" % n) for key in keys]) for n in range(3)], View(), merge=True) as tree:
        assert len(check_consistency(tree)) == 12


def test_names_stay_when_a_set_grows() -> None:
    shards = [tar([("a.x", b"%d" % number), ("b/c.x", b"%d" % number)]) for number in range(4)]
    with a_tree(shards[:3], View(), merge=True) as tree:
        before = check_consistency(tree)
    with a_tree(shards, View(), merge=True) as tree:
        assert check_consistency(tree) == before | {b"/a~s3/x": b"3", b"/b/c~s3/x": b"3"}


Counted = Literal["listed", "looked up", "last page"]


def steps(tree: LowerTree, folder: bytes) -> dict[Counted, float]:
    """Calls of functions for each name of a folder, in all."""
    inode, count = tree.resolve(folder).inode, 0

    def call(*_: object) -> None:
        nonlocal count
        count += 1

    def counted(question: Callable[[], object], names: int) -> float:
        nonlocal count
        question()  # once, so that records are open
        count = 0
        sys.setprofile(call)
        try:
            question()
        finally:
            sys.setprofile(None)
        return count / names

    entries = list(tree.listing(inode))[2:]
    return {
        "listed": counted(lambda: list(tree.listing(inode)), len(entries)),
        "looked up": counted(lambda: [tree.lookup(inode, one.name) for one in entries], len(entries)),
        "last page": counted(lambda: list(tree.listing(inode, entries[-2].cursor)), 1),
    }


@pytest.mark.parametrize("view", [View(), View("files")], ids=str)
@pytest.mark.parametrize(
    "paths",
    [
        pytest.param(lambda shard: [f"d/{n}.x" for n in range(4)], id="equal"),
        pytest.param(lambda shard: [f"d/{shard}-{n}.x" for n in range(4)], id="unique"),
        pytest.param(lambda shard: ["d/a.x", "d/a~s2.x", "d/b.x", "d/b.x"], id="numbered"),
        pytest.param(lambda shard: ["d.y", "d/a.x", "d/a/b.x", "d/c.x", "d/~s2.x"], id="shared"),
        pytest.param(lambda shard: ["d/" + "a" * 255 + ".x", "d/b.x"], id="cut"),
    ],
)
def test_merged_a_name_takes_as_many_steps_in_many_shards_as_in_few(
    paths: Callable[[int], list[str]], view: View
) -> None:
    def measured(count: int) -> dict[Counted, float]:
        shards = [tar([(path, b"") for path in paths(shard)]) for shard in range(count)]
        with a_tree(shards, view, merge=True) as tree:
            return steps(tree, b"d")

    few, many = measured(6), measured(60)
    assert {what: value for what, value in many.items() if value > 1.25 * few[what]} == {}, (few, many)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("ends", [[".x"], [".x", "~s1.x", "~2.x"], ["/f.x", ".x"]])
def test_names_of_one_checksum_are_found_by_bisection(view: View, merge: bool, ends: list[str]) -> None:
    """Anybody can make them, and a search among them one by one takes time for each of the others."""

    def measured(bits: int) -> dict[Counted, float]:
        own = [name.decode() + end for name in tars.names_of_one_checksum(bits) for end in ends]
        with a_tree([tar([(f"d/{name}", b"") for name in own])] * 2, view, merge=merge) as tree:
            return steps(tree, b"d" if merge else b"s0/d")

    few, many = measured(4), measured(9)
    assert many["listed"] < 2.5 * few["listed"]
    assert many["looked up"] < 2.5 * few["looked up"]


def test_a_merged_listing_is_not_continued_in_a_changed_shard() -> None:
    shards = [tar([("a.jpg", b"1"), ("b.jpg", b"2")]), tar([("c.jpg", b"3")])]
    with a_tree(shards, View(), merge=True) as tree:
        first = list(tree.listing(ROOT))[2]
        assert [entry.name for entry in tree.listing(ROOT, first.cursor)] == [b"b", b"c"]
        changed = os.fsdecode(tree.lower.shards[1].path)
        Path(changed).write_bytes(tar([("d.jpg", b"4"), ("e.jpg", b"5")]))
        tree.lower.distrust()
        with pytest.raises(NotIndexed):
            tree.lower.record(1)
        tree.lower.index_now(1)
        with pytest.raises(StaleShard, match="has changed while"):
            list(tree.listing(ROOT, first.cursor))
        assert names_in(tree) == [b"a", b"b", b"d", b"e"]


# --- any shards ------------------------------------------------------------------------------------------

NAMES = st.text(alphabet="ab./~s1%", min_size=1, max_size=7).filter(lambda name: name.strip("/") != "")
SHARDS = st.lists(st.lists(NAMES, max_size=8), min_size=1, max_size=3)


def _shown_members(tree: LowerTree, number: int) -> int:
    """Count the members of a shard that the tree shows."""
    one = tree.lower.record(number)
    flags = [one.entry_flags[one.entry_of(member)] & record.STRAY for member in range(one.members)]
    return one.members if tree.view.layout == "files" else flags.count(0)


@settings(max_examples=100, deadline=None)
@example(shards=[["./"]], view=View(layout="files"), merge=False)
@given(shards=SHARDS, view=st.sampled_from(VIEWS), merge=st.booleans())
def test_every_member_is_shown_once_under_a_name_of_its_own(
    shards: list[list[str]], view: View, merge: bool
) -> None:
    """For any names nothing is hidden, nothing is shown twice, and each listed name can be looked up."""
    contents = [
        [(name, b"" if name.endswith("/") else f"{n}:{i}".encode()) for i, name in enumerate(one)]
        for n, one in enumerate(shards)
    ]
    with a_tree([tar(one) for one in contents], view, merge) as tree:
        files = check_consistency(tree)
        expected = sum(_shown_members(tree, number) for number in range(len(contents)))
        assert len(files) == expected
        assert len(set(files.values())) == expected
        written = {content for one in contents for name, content in one if not name.endswith("/")}
        assert set(files.values()) <= written
        if view.layout == "files":
            assert set(files.values()) == written


def test_odd_bytes_in_the_path_of_a_shard(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff\xfe/\xffx.tar"
    os.mkdir(os.path.dirname(path))
    Path(os.fsdecode(path)).write_bytes(tar(ORDINARY))
    with a_lower(tmp_path, expand([path])) as below:
        assert names_in(make_tree(below, View())) == [b"\xffx"]


def _entries_of(run: ListingRun) -> list[Entry]:
    sizes, times = (np.asarray(column).tolist() for column in (run.sizes, run.mtimes_ns))
    return [
        Entry(name, Node(run.inode + n, run.mode, run.links, size, mtime_ns), run.cursor + n)
        for n, (name, size, mtime_ns) in enumerate(zip(run.names, sizes, times, strict=True))
    ]


@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_a_run_is_the_rest_of_a_listing(view: View) -> None:
    """After every cursor, those of other directories too: the same lines; no run where something is odd."""
    plain = [(f"{folder}/{n}.{e}", b"x" * n) for folder in "cd" for n in range(9) for e in ("jpg", "left.json")]
    odd = [("d/a.jpg", b""), ("d/a.jpg", b"")]
    with a_tree([tar(plain), tar([*plain, ("d/README", b"r")]), tar(odd)], view) as tree:
        directories = {path: entry.node.inode for path, entry in walk(tree) if entry.node.mode & 0o040000}
        cursors = {entry.cursor for inode in directories.values() for entry in tree.listing(inode)} | {0}
        compared = set()
        for (path, inode), cursor in itertools.product(directories.items(), cursors):
            run = tree.run(inode, cursor, 99)
            if run is None:
                continue
            listed = list(tree.listing(inode, cursor))
            if run.parent:  # `.` and `..` come before
                assert run.parent == listed[1].node.inode
                del listed[:2]
            assert _entries_of(run) == listed
            assert len(tree.run(inode, cursor, 3).names) == min(3, len(listed))  # type: ignore[union-attr]
            compared |= {path} if listed else set()
        beside_strays = b"|/s1/./" if view.layout == "samples" else b"|/s1/."
        assert compared == {path for path in directories if re.match(b"/s0/." + beside_strays, path)}
