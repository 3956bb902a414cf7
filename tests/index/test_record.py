"""The record: every tree of a shard against a model in plain Python, its tables, and its bytes.

The model says what docs/reference/semantics.md says, by lists and dictionaries, from what tarfile sees of a tar.
The trees of a record are read as the mount reads them, by `ShownNames`.
"""

from __future__ import annotations

import decimal
import json
import os
import random
import tarfile
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from webdataset import tariterators

from tests import tars
from tests.tars import ABC, BLOCK, END, ODD, A, B, Listed
from tests.thorough import examples
from wdsfs import names
from wdsfs.errors import CorruptShard
from wdsfs.index import record, record_builder
from wdsfs.index.record import BY_EXTENSION, BY_NAME, FILES, LINK, Record
from wdsfs.inodes import FOLDER, MEMBER, index_of, kind_of, position
from wdsfs.shards import Fingerprint
from wdsfs.tar import scan
from wdsfs.tar.problems import Problem
from wdsfs.tree.content import read_stored
from wdsfs.tree.shown_names import ShownNames
from wdsfs.tree.tree import View

TOP = position(FOLDER, 0)
DOMAINS = [BY_EXTENSION, BY_NAME, FILES]
FINGERPRINT = Fingerprint(1 << 40, -5, 1 << 63)

Tree = dict[bytes, Any]  # shown name -> Tree of a directory, or int of a file


def make(tar: bytes) -> Record:
    with tars.opened(tar) as fd:
        return Record(record_builder.build(fd, FINGERPRINT))


# --- the model ---------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """A sample, or with `stray` a single member that is in none. Members are (place in the tar, extension)."""

    folder: tuple[bytes, ...]
    name: bytes
    stray: bool
    members: list[tuple[int, bytes]]


class Model:
    """The trees of a shard, from what tarfile lists."""

    def __init__(self, listed: list[Listed]) -> None:
        self.folders: list[tuple[bytes, ...]] = [()]
        self.runs: list[Run] = []
        self.stands_for: dict[int, int | None] = {}  # member -> itself, or what a hard link resolves to
        last: dict[tuple[bytes, ...], int] = {}
        key: bytes | None = None
        for place, one in enumerate(listed):
            if one.kind == "directory":
                self.add_folder(one.name + b"/" if one.name else b"")
            elif one.kind not in ("character", "block", "fifo"):
                key = self.add_member(place, one, key)
                self.stands_for[place] = last.get(path_of(one.link)) if one.kind == "link" else place
                target = self.stands_for[place]
                if target is not None:
                    last[path_of(one.name)] = target

    def add_member(self, place: int, one: Listed, key: bytes | None) -> bytes | None:
        raw, base = one.name[: one.name.rfind(b"/") + 1], one.name[one.name.rfind(b"/") + 1 :]
        folder = self.add_folder(raw)
        split = split_by_webdataset(one.name) if one.kind == "file" else None
        if split is None:
            self.runs.append(Run(folder, base, True, [(place, b"")]))
            return key
        if split[0] != key:
            self.runs.append(Run(folder, base.partition(b".")[0], False, []))
        sample = next(run for run in reversed(self.runs) if not run.stray)
        sample.members.append((place, split[1]))
        return split[0]

    def add_folder(self, raw: bytes) -> tuple[bytes, ...]:
        path = path_of(raw + b"x")[:-1]
        for depth in range(len(path) + 1):
            if path[:depth] not in self.folders:
                self.folders.append(path[:depth])
        return path

    def sampled(self, folder: tuple[bytes, ...]) -> bool:
        return any(run.folder[: len(folder)] == folder for run in self.runs if not run.stray)

    def twin(self, folder: tuple[bytes, ...]) -> Run | None:
        """The sample that shares its directory with this folder."""
        if not folder or not self.sampled(folder):
            return None
        return next((run for run in self.runs if not run.stray and (*run.folder, run.name) == folder), None)

    def subfolders(self, folder: tuple[bytes, ...]) -> list[tuple[bytes, ...]]:
        return [other for other in self.folders if other and other[:-1] == folder]

    def tree(self, domain: int, folder: tuple[bytes, ...] = ()) -> Tree:
        if domain == FILES:
            return self.files(folder)
        directories: list[tuple[bytes, Tree]] = [
            (sub[-1], self.tree(domain, sub)) for sub in self.subfolders(folder) if self.sampled(sub)
        ]
        for run in self.runs:
            if run.folder == folder and not run.stray and self.twin((*folder, run.name)) is not run:
                directories.append((run.name, assigned(self.sample_files(domain, run))))
        tree = assigned(directories)
        twin = self.twin(folder)
        return tree if twin is None else {**tree, **assigned(self.sample_files(domain, twin), set(tree))}

    def sample_files(self, domain: int, run: Run) -> list[tuple[bytes, int]]:
        stem = run.name + b"." if domain == BY_NAME else b""
        return [(stem + extension, place) for place, extension in run.members]

    def files(self, folder: tuple[bytes, ...]) -> Tree:
        children: list[tuple[bytes, Any]] = [(sub[-1], self.files(sub)) for sub in self.subfolders(folder)]
        for run in self.runs:
            if run.folder == folder:
                for place, extension in run.members:
                    stands_for = self.stands_for[place]
                    if stands_for is not None:
                        name = run.name if run.stray else run.name + b"." + extension
                        children.append((name, stands_for))
        return assigned(children)


def split_by_webdataset(name: bytes) -> tuple[bytes, bytes] | None:
    """The library's own rule; but hidden files are in no sample."""
    text = name.decode("utf-8", "surrogateescape")
    meta = "/" not in text and text.startswith("__") and text.endswith("__")
    top, slash, _ = text.partition("/")
    meta = meta or (bool(slash) and len(top) >= 4 and top.startswith("__") and top.endswith("__"))
    key, extension = tariterators.base_plus_ext(text)
    if meta or key is None or name.rpartition(b"/")[2].startswith(b"."):
        return None
    return key.encode("utf-8", "surrogateescape"), extension.encode("utf-8", "surrogateescape")


def path_of(name: bytes) -> tuple[bytes, ...]:
    """The components of a name, without leading `./`."""
    parts = name.split(b"/")
    while len(parts) > 1 and parts[0] == b".":
        del parts[0]
    return tuple(parts)


def assigned(children: Iterable[tuple[bytes, Any]], taken: Iterable[bytes] = ()) -> Tree:
    """Give each child its name, or the lowest `name~N` that nobody has or wants."""
    children = [(names.escape(name), value) for name, value in children]
    wanted, gone = {name for name, _ in children}, set(taken)
    tree: Tree = {}
    for name, value in children:
        shown, number = name, 1
        while shown in gone or (number > 1 and shown in wanted):
            number += 1
            shown = names.numbered(name, number)
        gone.add(shown)
        tree[shown] = value
    return tree


# --- the trees of a record ---------------------------------------------------------------------------------


VIEWS = {BY_EXTENSION: View(), BY_NAME: View(names="full"), FILES: View("files")}


def tree_of(one: Record, domain: int, where: int = TOP) -> Tree:
    """Return shown name -> tree of a directory, or member. What is listed is also looked up."""
    shown = ShownNames(VIEWS[domain])
    tree: Tree = {}
    directories = 0
    for child in shown.children(one, where, 0):
        name = shown.shown(one, child)
        assert name not in tree
        assert shown.find(one, where, name) == child
        assert shown.holder(one, child) == where
        directories += kind_of(child) != MEMBER
        tree[name] = index_of(child) if kind_of(child) == MEMBER else tree_of(one, domain, child)
    if kind_of(where) == FOLDER:
        folder, path = index_of(where), one.folder_path(index_of(where))
        assert folder == 0 or one.find_path(path) == folder
        assert one.crc_below(folder, b"x") == zlib.crc32(path + b"/x" if folder else b"x")
        assert domain == FILES or one.count_directories(folder) == directories
    assert shown.find(one, where, b"no such name") is None
    return tree


def walk(one: Record, domain: int, listed: list[Listed]) -> Tree:
    """The tree of a record, with the places of the members in the tar."""
    places = {each.head: place for place, each in enumerate(listed)}

    def placed(tree: Tree) -> Tree:
        return {
            name: placed(value) if isinstance(value, dict) else places[one.member(value).head]
            for name, value in tree.items()
        }

    return placed(tree_of(one, domain))


def flat(tree: Tree, path: bytes = b"") -> dict[bytes, int]:
    files: dict[bytes, int] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            files |= flat(value, path + name + b"/")
        else:
            files[path + name] = value
    return files


def content_of(fd: int, one: Record, member: int) -> bytes:
    place = one.member(member)
    return read_stored(fd, place.data, place.size, one.extents(member), 0, place.size)


# --- trees against the model -------------------------------------------------------------------------------

PARTS = [b"a", b"b", b".", b"/", b"~2", b"%", b"2E", b"__", b"./", b"a.", b"a/", b"b.a", b"a.b~2", b"\0"]
tiny_names = st.lists(st.sampled_from(PARTS), min_size=1, max_size=5).map(b"".join)
ab_names = st.text("ab./", min_size=1, max_size=5).map(str.encode)
kinds = st.sampled_from([tars.FILE] * 12 + [tars.HARD_LINK] * 2 + [tars.SYMLINK, tars.DIRECTORY, tars.FIFO, b"Z"])


def built(members: list[tuple[bytes, bytes, bytes]]) -> bytes:
    """A tar of (name, type, link) with names that may hold NULs."""
    return tars.tar(
        *(
            (tars.pax({b"path": name}) if b"\0" in name else b"") + tars.member(name, kind=kind, link=link)
            for name, kind, link in members
        )
    )


def check_trees(tar: bytes) -> list[dict[bytes, int]]:
    """Compare the trees of a record with those of the model; return them, flat."""
    listed = tars.by_tarfile(tar)
    one, model = make(tar), Model(listed)
    trees = [walk(one, domain, listed) for domain in DOMAINS]
    assert trees == [model.tree(domain) for domain in DOMAINS]
    return [flat(tree) for tree in trees]


odd_members = st.lists(st.tuples(tiny_names, kinds, tiny_names), max_size=10)
clashing_members = st.lists(st.tuples(ab_names, kinds, ab_names), max_size=14)
repeated_names = st.sampled_from([b"a.a", b"a.b", b"a.a~2", b"b.a", b"b.a~3", b"a/a.a", b"a/a~2.b"])
repeated_members = st.lists(st.tuples(repeated_names, st.just(tars.FILE), st.just(b"")), max_size=40)


def files(text: bytes) -> list[tuple[bytes, bytes, bytes]]:
    return [(name, tars.FILE, b"") for name in text.split()]


ACROSS_CHUNKS = files(b"a.x a.y README a.z ./a.x a.x %.x %.y b.x b. b.z .h b.q ../c.x c.x __c.x __c.x__ __c.y")


@examples(450)
@given(st.one_of(odd_members, clashing_members, repeated_members), st.sampled_from([1, 2, scan.BATCH]))
@example(files(b"a.b a/b.a a/b.a a.b"), scan.BATCH)
@example(files(b".a __a.b __a.b__"), scan.BATCH)
@example([*files(b"//a.b /a.b a.b"), (b"l", tars.HARD_LINK, b"/a.b")], scan.BATCH)
@example(ACROSS_CHUNKS, 1)
@example(ACROSS_CHUNKS, 3)
def test_trees_of_any_names(members: list[tuple[bytes, bytes, bytes]], batch: int) -> None:
    """For any names, wherever chunks of the scan end, each tree has each member once, under a name of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "BATCH", batch)
        check_trees(built(members))


# Members, and the paths of the three trees: a directory for each sample with its extensions, the same with full
# names (`--names full`), and the `files` layout. Fewer columns where the others say nothing more.
TREES: dict[str, list[tuple[bytes, ...]]] = {
    "a sample is a directory": [
        (b"d/a.jpg d/a.cls d/b.left.jpg", b"d/a/cls d/a/jpg d/b/left.jpg", b"d/a/a.cls d/a/a.jpg d/b/b.left.jpg",
         b"d/a.cls d/a.jpg d/b.left.jpg")],
    "a member in no sample does not end one, and is in the files layout only": [
        (b"a.x README .hidden __meta__/i.json d/LICENSE a.y", b"a/x a/y", b"a/a.x a/a.y",
         b".hidden README __meta__/i.json a.x a.y d/LICENSE"),
        (b".DS_Store a.x ._a.x a.y", b"a/x a/y")],
    "a key that comes again is a second sample": [
        (b"a.x b.x a.x a.y", b"a/x a~2/x a~2/y b/x"), (b"a.x ./a.x", b"a/x a~2/x")],
    "an extension that comes again": [
        (b"a.x a.x a.x~2", b"a/x a/x~2 a/x~3", b"a/a.x a/a.x~2 a/a.x~3", b"a.x a.x~2 a.x~3")],
    # One directory has the files of the sample and those of the folder; a directory gets the name that both want.
    "a key that is a folder": [(b"a.b a.x a/b.x a/b.y", b"a/b/x a/b/y a/b~2 a/x", b"a/a.b a/a.x a/b/b.x a/b/b.y")],
    "strays in a folder do not show it": [
        (b"a.x a/README b.x b.x", b"a/x b/x b/x~2"), (b"a/README a.x b.x a.x", b"a/x a~2/x b/x")],
    "the second sample of a key in a folder goes before a file": [
        (b"a.b a.b~2 a/b.x a/c.x a/b.x", b"a/b/x a/b~2/x a/b~2~2 a/b~3 a/c/x")],
    "letter case is kept": [(b"a.JPG a.jpg A.jpg", b"A/jpg a/JPG a/jpg")],
    "the empty extension, and those that are . and ..": [
        (b"a. a.. a...", b"a/% a/%2E a/%2E%2E", b"a/a. a/a.. a/a...", b"a. a.. a...")],
}  # fmt: skip


@pytest.mark.parametrize("case", TREES)
def test_trees(case: str) -> None:
    for member_names, *expected in TREES[case]:
        shown = [sorted(tree) for tree in check_trees(built(files(member_names)))]
        assert shown[: len(expected)] == [paths.split() for paths in expected]


def test_long_names() -> None:
    """Names over 255 bytes are cut and end in a checksum; a sample's full file names may be so when its key and
    extension are not."""
    stem, extension = b"s" * 200, b"e" * 100
    tar = tars.tar(*(tars.gnu_long(stem + b"." + text) + A for text in (extension, extension + b"2", b"x")))
    by_extension, by_name, by_file = check_trees(tar)
    assert list(by_extension) == [stem + b"/" + text for text in (extension, extension + b"2", b"x")]
    assert {len(name.rpartition(b"/")[2]) for name in by_name} == {255, 202}
    assert len(by_name) == len(by_file) == 3


@pytest.mark.parametrize("case", ODD)
def test_odd_cases(case: str) -> None:
    """The `files` layout of every odd tar, byte for byte, and what is said of it."""
    tar = ODD[case].tar()
    one = make(tar)
    contents: dict[bytes, bytes | None] = {}
    with tars.opened(tar) as fd:
        for path, member in flat(tree_of(one, FILES)).items():
            assert (one.symlink(member), one.link_count(one.link_target(member) or 0) > 0) == (None, True)
            try:
                contents[path] = content_of(fd, one, member)
            except (CorruptShard, MemoryError, OverflowError):
                contents[path] = None
    assert contents == ODD[case].files
    assert tuple(problem.kind for problem in one.problems) == ODD[case].problems


# --- against the webdataset library ------------------------------------------------------------------------


def text_of(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def samples_of(tar: bytes) -> list[dict[str, Any]]:
    """Return the samples as the library returns them, with the documented differences undone: extensions are in
    lower case, and the first of each counts."""
    samples = []
    with tars.opened(tar) as fd:
        one = Record(record_builder.build(fd, FINGERPRINT))
        for entry in one.samples_in_order().tolist():
            members = one.entry_members(entry)
            raw = scan.placed(fd, one.member(members[0]).head).name
            sample: dict[str, Any] = {"__key__": text_of(raw[: -len(one.extension(members[0])) - 1])}
            for member in members:
                sample.setdefault(text_of(one.extension(member)).lower(), content_of(fd, one, member))
            samples.append(sample)
    return samples


KEYS = st.sampled_from(["a", "b", "d/a", "d/a", "d.v1/a", "d/d/b", "./a", "é", "\udcff"])
EXTENSIONS = st.sampled_from(["x", "X", "left.x", "", ".", "~2"])
OTHERS = st.sampled_from(["README", ".hidden", "d/.hidden", "__m__/a.x", "__m.x__", "a/README"])
member_names = st.one_of(*[st.tuples(KEYS, EXTENSIONS).map(".".join)] * 5, OTHERS)


@examples(100)
@given(st.lists(member_names, max_size=20), st.sampled_from(sorted(tars.FORMATS)))
def test_samples_as_webdataset_reads_them(member_names: list[str], kind: str) -> None:
    """A shard has the samples that the webdataset library reads, in its order and byte for byte, but for the
    documented differences: letter case, repeated extensions (the library raises an error, nothing is hidden
    here), and hidden files, which for the library are samples that end others."""
    infos = []
    for number, name in enumerate(member_names):
        info = tarfile.TarInfo(name)
        info.size = number
        infos.append((info, bytes([number]) * number))
    tar = tars.with_tarfile(infos, kind)
    assert samples_of(tar) == tars.by_webdataset(tar)


# --- links, sparse files, times, sizes ---------------------------------------------------------------------


def files_of(one: Record) -> dict[bytes, int]:
    return flat(tree_of(one, FILES))


def test_hard_links() -> None:
    """A hard link is the member that it names, also through other links: same content, same time, same inode;
    the member's link count tells how many names it has. Links are in no sample, as for webdataset."""
    tar = tars.tar(
        tars.member(b"d/a.bin", b"old"),
        tars.member(b"d/a.bin", ABC, mtime=9),
        tars.member(b"one", kind=tars.HARD_LINK, link=b"d/a.bin"),
        tars.member(b"two.x", kind=tars.HARD_LINK, link=b"./one"),
        tars.member(b"d/a.bin", b"new"),
        tars.member(b"three", kind=tars.HARD_LINK, link=b"d/a.bin"),
    )
    one = make(tar)
    files = files_of(one)
    target = one.link_target(files[b"one"])
    assert target is not None
    assert target == one.link_target(files[b"two.x"]) == files[b"d/a.bin~2"] == one.link_target(target)
    assert one.link_target(files[b"three"]) == files[b"d/a.bin~3"]
    assert [one.link_count(files[name]) for name in (b"d/a.bin", b"d/a.bin~2", b"d/a.bin~3")] == [1, 3, 2]
    assert one.member(files[b"two.x"]) == one.member(target)
    assert one.member(target).mtime_ns == 9_000_000_000
    assert one.has_links
    assert [bool(one.entry_flags[one.entry_of(files[n])] & LINK) for n in (b"one", b"d/a.bin")] == [True, False]
    assert list(flat(tree_of(one, BY_EXTENSION))) == [b"d/a/bin", b"d/a/bin~2", b"d/a/bin~3"]


def test_dangling_hard_links() -> None:
    """A hard link to nothing, to itself, to a directory or to a later member is not shown but reported."""
    links = [b"nothing", b"d/nothing", b"self", b"d", b"later.x", b"dangling"]
    members = [tars.member(b"d/", kind=tars.DIRECTORY)]
    members += [tars.member(b"dangling", kind=tars.HARD_LINK, link=link) for link in links]
    members += [tars.member(b"self", kind=tars.HARD_LINK, link=b"self"), tars.member(b"later.x")]
    one = make(tars.tar(*members))
    assert list(files_of(one)) == [b"later.x"]
    assert [(p.kind, p.offset) for p in one.problems] == [("dangling link", n * BLOCK) for n in range(1, 8)]
    assert "'d/nothing'" in one.problems[1].text


def test_hard_links_to_special_files() -> None:
    """A hard link to a symbolic link or to a sparse file is one, too."""
    tar = tars.tar(
        tars.member(b"s", kind=tars.SYMLINK, link=b"/anywhere"),
        ODD["sparse GNU"].tar()[: -len(END)],
        tars.member(b"hs", kind=tars.HARD_LINK, link=b"s"),
        tars.member(b"hx", kind=tars.HARD_LINK, link=b"s.txt"),
        tars.member(b"plain"),
    )
    one = make(tar)
    files = files_of(one)
    assert one.symlink(files[b"s"]) == one.symlink(files[b"hs"]) == b"/anywhere"
    assert one.symlink(files[b"plain"]) is None
    expected = [[1000, 101_003], [3, 3], [0, 3]]
    for name in (b"s.txt", b"hx"):
        assert list(map(list, one.extents(files[name]) or ())) == expected
    assert one.extents(files[b"plain"]) is None
    with tars.opened(tar) as fd:
        assert content_of(fd, one, files[b"hx"]) == ODD["sparse GNU"].files[b"s.txt"]


def test_sparse_file_that_is_a_hole() -> None:
    one = make(tars.tar(tars.old_sparse(b"a.hole", [], 1 << 40), ODD["sparse 1.0"].tar()))
    hole, other = files_of(one)[b"a.hole"], files_of(one)[b"s.txt"]
    assert (one.member(hole).size, [*map(len, one.extents(hole) or ())]) == (1 << 40, [0, 0, 0])
    assert [*map(list, one.extents(other) or ())] == [[1000, 101_003], [3, 3], [0, 3]]


@pytest.mark.parametrize(
    ("times", "width"),
    [
        ([b"7"] * 4, 0),
        ([b"-7.5"] * 4, 0),
        ([b"1700000000", b"0", b"1", b"4294967295"], 4),
        ([b"1700000000", b"0", b"1", b"4294967296"], 8),
        ([b"1700000000", b"0", b"1", b"-1"], 8),
        ([b"1700000000.123456789", b"0", b"1", b"2"], 8),
        ([b"9999999999999", b"-9999999999999", b"1", b"2"], 8),
    ],
)
def test_times(times: list[bytes], width: int) -> None:
    """Times are kept exactly; equal ones, and whole seconds, take less room."""
    one = make(tars.tar(*(tars.pax({b"mtime": text}) + tars.member(b"%d.x" % n) for n, text in enumerate(times))))
    exact = [int(decimal.Decimal(text.decode()) * 10**9) for text in times]
    want = [max(min(ns, (1 << 63) - 1), -(1 << 63)) for ns in exact]
    assert [one.member(member).mtime_ns for member in range(4)] == want
    assert one.column["member.mtime"].nbytes == width * 4 or (width, one.column["member.mtime"].nbytes) == (0, 8)


def test_folder_times() -> None:
    """A folder has the time of its own member in the tar, if it has one."""
    directory = tars.member(b"d/", kind=tars.DIRECTORY, mtime=33)
    one = make(tars.tar(tars.member(b"./", kind=tars.DIRECTORY, mtime=22), tars.member(b"e/a.x"), directory))
    d, e = one.find_path(b"d"), one.find_path(b"e")
    assert (d, e) != (None, None)
    assert [one.folder_mtime_ns(folder or 0) for folder in (0, d, e)] == [22 * 10**9, 33 * 10**9, None]
    assert make(tars.tar(A)).folder_mtime_ns(0) is None


@pytest.mark.parametrize("by_pax", [False, True])
def test_members_over_4_gib(tmp_path: Any, by_pax: bool) -> None:
    """Sizes and offsets over 4 GiB are kept."""
    path = tmp_path / "big.tar"
    tars.write_large(path, (9 << 30) + 7, by_pax)
    with tars.opened(path) as fd:
        one = Record(record_builder.build(fd, FINGERPRINT))
        files = files_of(one)
        big = one.member(files[b"big.bin"])
        assert big.size == (9 << 30) + 7
        assert read_stored(fd, big.data, big.size, None, big.size - 4, 100) == b"\0end"
        assert content_of(fd, one, files[b"a.txt"]) == b"aaa"
        assert one.total_size() == (9 << 30) + 10


# --- size and speed of shards ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large() -> bytes:
    """The record of 60,000 samples of 2 members."""
    columns = []
    block = bytearray(tars.header(b"0000/000000.jpg"))
    names_at = [b"%04d/%06d" % (number // 1000, number) for number in range(60_000)]
    base = sum(block[15:148]) + sum(block[156:]) + 8 * 32
    for key in names_at:
        for extension in (b".jpg", b".cls"):
            name = key + extension
            block[:15] = name
            block[148:156] = b"%06o\0 " % (base + sum(name))
            columns.append(bytes(block))
    with tars.opened(b"".join(columns) + END) as fd:
        return record_builder.build(fd, FINGERPRINT)


def test_many_samples(large: bytes) -> None:
    one = Record(large)
    assert (one.samples, one.members, one.folders, one.problems) == (60_000, 120_000, 61, [])
    assert one.aliases == [None, None, None]
    shown = ShownNames(View())
    for number in (0, 999, 1000, 23_456, 59_999):
        where: int | None = TOP
        for name in (b"%04d" % (number // 1000), b"%06d" % number, b"cls"):
            assert where is not None
            where = shown.find(one, where, name)
        assert where is not None
        assert one.member(index_of(where)).data == (2 * number + 1) * BLOCK + BLOCK
    assert shown.find(one, TOP, b"0060") is None


def test_records_are_small(large: bytes) -> None:
    """A member of an ordinary shard takes under 40 bytes of the index besides its name."""
    one = Record(large)
    text = one.column["entry.name"].nbytes + one.column["folder.name"].nbytes
    assert (len(large) - text) / one.members < 20
    rows = [{"__key__": f"{n:06}", "jpg": ABC, "cls": b"1", "json": b"{}"} for n in range(2000)]
    for options in ({}, {"mtime": 0}):
        with tars.opened(tars.with_webdataset(rows, **options)) as fd:
            data = record_builder.build(fd, FINGERPRINT)
        assert (len(data) - 2000 * 6) / 6000 < 40


# --- the bytes ---------------------------------------------------------------------------------------------


def test_what_is_stored() -> None:
    device = tars.member(b"null\xff", kind=tars.CHARACTER)
    with tars.opened(tars.tar(A, device, B)) as fd:
        data = record_builder.build(fd, FINGERPRINT)
        one = Record(data)
        assert one.fingerprint == FINGERPRINT
        assert record.ends_match(fd, one.ends)
    assert one.unshown == [Problem(len(A), "character device", "null\\xff")]
    assert (one.unshown_count, one.problem_count, one.members, one.samples) == (1, 0, 2, 2)
    assert one.total_size() == 3 + len(ABC)
    assert one.array("member.size").tolist() == [3, len(ABC)]


def test_no_files_are_shown_that_gnu_tar_does_not_extract() -> None:
    volumes, incremental = make(ODD["GNU volumes"].tar()), make(ODD["GNU incremental"].tar())
    assert [problem.text for problem in volumes.unshown] == ["label", "c.txt"]
    assert (volumes.members, incremental.members, incremental.unshown_count) == (2, 2, 0)
    assert {incremental.folder_name[folder] for folder in incremental.child_folders(0)} == {b"d", b"e"}


def test_ends_match() -> None:
    """A shard with other content but the same size and times is noticed by its first or last header."""
    tar = tars.tar(A, B, tars.member(b"c.txt"))
    last = len(A) + len(B)
    ends = make(tar).ends
    for at in (0, last):
        changed = tar[:at] + b"X" + tar[at + 1 :]
        with tars.opened(changed) as fd:
            assert not record.ends_match(fd, ends)
    for other in (b"", tar[:100], tar[: len(A)]):
        with tars.opened(other) as fd:
            assert not record.ends_match(fd, ends)
    for case in ODD.values():
        with tars.opened(case.tar()) as fd:
            assert record.ends_match(fd, make(case.tar()).ends)


def everything() -> bytes:
    """The record of a shard with all kinds of members."""
    parts = [case.tar()[: -len(END)] for name, case in ODD.items() if not case.problems and name != "empty tar"]
    with tars.opened(tars.tar(*parts)) as fd:
        return record_builder.build(fd, FINGERPRINT)


def test_a_damaged_record_is_refused() -> None:
    """A record is used only when its checksum is right; any changed byte, and any cut, is noticed."""
    data = everything()
    assert Record(data).members > 40
    random_bytes = random.Random(1)
    places = {*range(2000), *random_bytes.sample(range(len(data)), 3000), len(data) - 1}
    for at in places:
        changed = bytearray(data)
        changed[at] ^= random_bytes.randrange(1, 256)
        with pytest.raises(ValueError, match="record"):
            Record(changed)
    for end in (0, 1, 8, 15, 16, 17, 20, 100, len(data) // 2, len(data) - 1):
        with pytest.raises(ValueError):  # noqa: PT011  # the length may be gone, too
            Record(data[:end])
    unverified = bytearray(data)
    unverified[8] ^= 1
    assert Record(unverified, verify=False).members == Record(data).members


def test_another_format_is_refused() -> None:
    data = everything()
    length = int.from_bytes(data[16:20], "little")
    meta = json.loads(data[20 : 20 + length])
    meta["format"] = record.RECORD.version + 1
    text = json.dumps(meta, separators=(",", ":")).encode().ljust(length)
    body = len(text).to_bytes(4, "little") + text + data[20 + length :]
    with pytest.raises(ValueError, match=f"version {record.RECORD.version + 1}, by a newer wdsfs"):
        Record(data[:8] + zlib.crc32(body).to_bytes(8, "little") + body)
    with pytest.raises(ValueError, match="not a shard record"):
        Record(os.urandom(200))
