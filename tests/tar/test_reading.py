"""Tars that other tools read in another way: joined ones, and samples whose members lie apart."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import shlex
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import sets, tars
from tests.conftest import Program
from tests.interop.test_lint import findings, write
from tests.packing.overlays import Set, files_of
from tests.tar.test_scan import count_reads
from tests.tars import BLOCK, END, member, tar
from tests.tree.test_view_record import a_view
from tests.uppers import WHITEOUT
from wdsfs.cli.mount_helper import translate
from wdsfs.index.record import Record
from wdsfs.index.record_builder import build
from wdsfs.index.record_of_file import build_file
from wdsfs.index.store import open_index
from wdsfs.interop.lint import lint
from wdsfs.names import PLAIN, Reading
from wdsfs.packing.file_source import PackOptions
from wdsfs.packing.view_source import ViewPack
from wdsfs.shards import GONE, Shard
from wdsfs.spec.expand import expand
from wdsfs.tar import scan, streams
from wdsfs.tar.problems import Problem
from wdsfs.tree.composition import Composition
from wdsfs.tree.indexing import indexed
from wdsfs.tree.shard_set import ShardSet

# Files in a directory, and the place and pattern of all parts of the split tar; None if they are no parts.
PARTS: list[tuple[list[str], str | None, str]] = [
    (["a b.tar.part.aa", "a b.tar.part.ab"], "a b.tar.part.", "*"),
    (["v.tar.000", "v.tar.001", "v.tar.002"], "v.tar.", "[0-9]*"),
    (["v.tar.gz-01", "v.tar.gz-02"], "v.tar.gz-", "[0-9]*"),
    (["v.tgz.partaaa", "v.tgz.partaab"], "v.tgz.part", "*"),
    (["a.tar", "a.tar.gz", "a.tar.idx", "a.tar.aa", "b.tar.00", "aa", "ab"], None, ""),
]


@pytest.mark.parametrize(("names", "start", "end"), PARTS)
def test_a_part_of_a_tar_is_no_damaged_download(
    tmp_path: Path, names: list[str], start: str | None, end: str
) -> None:
    for name in names:
        (tmp_path / name).touch()
    texts = [streams.split_tar(str(tmp_path / name)) for name in names]
    if start is None:
        assert texts == [""] * len(names)
        return
    command = f"pipe:cat {shlex.quote(str(tmp_path / start))}{end}"
    assert all(text.endswith(shlex.quote(command)) for text in texts)


def test_what_is_said_of_parts_of_a_tar(program: Program) -> None:
    whole = tar(*(member(b"%d.x" % number, random.Random(number).randbytes(3000)) for number in range(9)))
    for number, begin in enumerate(range(0, len(whole), 10_000)):
        program.write(f"v.tar.0{number}", whole[begin : begin + 10_000])
    parts = f"cat {program.home}/v.tar.[0-9]*"
    assert parts in program.run("info", "v.tar.00").stderr.decode()
    assert parts in program.refused("info", "v.tar.*", code=3)
    assert program.json("info", f"pipe:{parts}")["samples"] == 9


ZEROS, BY_KEY, BOTH = Reading(ignore_zeros=True), Reading(group_by_key=True), Reading(True, True)
OPTIONS = {PLAIN: [], ZEROS: ["--ignore-zeros"], BY_KEY: ["--group-by-key"], BOTH: BOTH.arguments}


def scanned(path: Path) -> tuple[list[bytes], list[Problem], list[int]]:
    """The names that a scan past end marks finds, its problems, and the marks."""
    problems: list[Problem] = []
    marks: list[int] = []
    fd = os.open(path, os.O_RDONLY)
    try:
        found = [name for chunk in scan.scan(fd, problems, marks=marks) for name in chunk.names]
    finally:
        os.close(fd)
    return found, problems, marks


def record_of(path: Path, reading: Reading = PLAIN) -> Record:
    return Record(build_file(os.fsencode(path), reading))


def shown(record: Record) -> list[tuple[bytes, list[bytes]]]:
    """The samples of a record in the order of the tar: key, extensions."""
    entries = record.samples_in_order().tolist()
    return [(record.entry_path(e), [record.extension(m) for m in record.entry_members(e)]) for e in entries]


def by_webdataset(content: bytes) -> list[tuple[bytes, list[bytes]]]:
    """The same, of a tar as the webdataset library groups it."""
    found = tars.by_webdataset(content)
    return [(one.pop("__key__").encode(), [name.encode() for name in one]) for one in found]


# --- tars that were joined ---------------------------------------------------------------------------------


# A tar, the names of its members where end marks are passed, the kinds of problems, and the marks that are passed.
_A, _B, _C, _D = (member(b"%c.txt" % name, b"%c" % name) for name in b"abcd")
_BROKEN = member(b"b.txt", b"b", checksum=1)
_CUT = tar(_A, member(b"b.txt", bytes(5000)))[: 4 * BLOCK]
_INNER = tar(member(b"inner.txt", b"x"))
JOINED: dict[str, tuple[bytes, str, list[str], list[int]]] = {
    "padded, and without an end": (
        *(tar(_A).ljust(20 * BLOCK, b"\0") + tar(_B) + _C, "a b c"),
        *(["no end mark"], [2 * BLOCK, 22 * BLOCK]),
    ),
    # What is no header ends the shard, also where one follows: it may be the content of a member.
    "no header": (tar(_A) + b"garbage".ljust(BLOCK, b".") + _INNER, "a", ["behind end mark"], []),
    "not at the start of a block": (tar(_A) + b"xyz" + _INNER, "a", ["behind end mark"], []),
    "a part of a header": (tar(_A) + _INNER[: BLOCK - 1], "a", ["behind end mark"], []),
    "tars in members": (
        tar(member(b"a.txt", bytes(2 * BLOCK) + _INNER + tar(_D)), _B) + tar(member(b"c.txt", _INNER)),
        *("a b c", [], [2 * BLOCK + len(bytes(2 * BLOCK) + _INNER + tar(_D)) + BLOCK]),
    ),
    "the first is cut off": (_CUT + tar(_C) * 10, "a b", ["damaged"], []),
    "the last is cut off": (tar(_A) + _CUT, "a a b", ["truncated"], [2 * BLOCK]),
    "a broken header behind a mark": (tar(_A) + tar(_BROKEN) + tar(_C) + tar(_D), "a", ["behind end mark"], []),
    "a broken header before a mark": (tar(_A, _BROKEN) + tar(_C), "a", ["damaged"], []),
}


@pytest.mark.parametrize("case", JOINED)
def test_joined_tars(tmp_path: Path, case: str) -> None:
    content, names, kinds, marks = JOINED[case]
    path = tmp_path / "s.tar"
    path.write_bytes(content)
    found, problems, passed = scanned(path)
    assert [name.removesuffix(b".txt").decode() for name in found] == names.split()
    assert ([problem.kind for problem in problems], passed) == (kinds, marks)
    plain, joined = record_of(path), record_of(path, ZEROS)
    assert (plain.end_marks, joined.members, joined.end_marks) == (0, len(found), len(marks))


def test_a_global_header_goes_on_behind_an_end_mark(tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    common = tars.pax({b"mtime": b"77"}, b"g")
    path.write_bytes(tar(common, member(b"a.txt")) + tar(member(b"b.txt")) + common + tar(member(b"c.txt")))
    record = record_of(path, ZEROS)
    assert [record.member(one).mtime_ns for one in range(3)] == [77 * 10**9] * 3
    with tarfile.open(path, "r:", ignore_zeros=True) as archive:
        assert [one.mtime for one in archive] == [77] * 3


def test_many_end_marks_are_read_in_little_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros are read a little at a time, not a mebibyte for each mark."""
    count = 3000
    content = b"".join(member(b"%d.txt" % n) + bytes(BLOCK) for n in range(count))
    with tars.opened(content) as fd:
        count_reads(monkeypatch, 40 * len(content))
        record = Record(build(fd, GONE, None, ZEROS))
    assert (record.members, record.end_marks) == (count, count - 1)


parts = st.lists(
    st.tuples(st.lists(st.sampled_from(["a.x", "a.y", "b.x", "d/b.y", "c"]), max_size=4), st.integers(0, 30)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(parts)
def test_joined_tars_are_read_as_by_tarfile_and_gnu_tar(
    tmp_path_factory: pytest.TempPathFactory, some: Any
) -> None:
    path = tmp_path_factory.mktemp("joined") / "s.tar"
    content = b""
    for names, zeros in some:
        content += b"".join(member(name.encode(), name.encode() * 9) for name in names) + bytes(BLOCK * zeros)
    path.write_bytes(content + END)
    with tarfile.open(path, "r:", ignore_zeros=True) as archive:
        by_tarfile = [os.fsencode(name) for name in archive.getnames()]
    by_gnu_tar = subprocess.run(["tar", "--ignore-zeros", "-tf", path], capture_output=True, check=True).stdout
    assert scanned(path)[0] == by_tarfile == by_gnu_tar.splitlines()


# --- members that lie apart --------------------------------------------------------------------------------

# As `tar cf x.tar *.jpg *.cls` writes it.
APART = tar(
    *(member(b"d/%b.jpg" % key, b"J" + key) for key in (b"a", b"b", b"c")),
    member(b"README", b"r"),
    *(member(b"d/%b.cls" % key, b"C" + key) for key in (b"a", b"b", b"c")),
)
TOGETHER = [(b"d/" + key, [b"jpg", b"cls"]) for key in (b"a", b"b", b"c")]


def test_members_are_in_the_order_of_the_tar(tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    names = (b"b.z", b"a.y", b"b.a", b"stray", b"c.x", b"b.z", b"a.x", b"./a.q", b"c.w", b"c.v")
    path.write_bytes(tar(*(member(name, name) for name in names)))
    record, plain = record_of(path, BY_KEY), record_of(path)
    assert (record.samples, plain.samples, plain.apart) == (4, 8, 0)
    # `./a` and `a` are two keys for every reader; a stray ends no sample; an extension may come twice.
    found = [(b"b", [b"z", b"a", b"z"]), (b"a", [b"y", b"x"]), (b"c", [b"x", b"w", b"v"]), (b"a", [b"q"])]
    assert shown(record) == found
    assert record.apart == 3


keys_and_extensions = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from("xyz")), unique=True, max_size=12
)


@settings(max_examples=100, deadline=None)
@given(keys_and_extensions, st.booleans())
def test_a_record_by_key_has_each_key_once(
    tmp_path_factory: pytest.TempPathFactory, some: list[tuple[str, str]], odd: bool
) -> None:
    path = tmp_path_factory.mktemp("apart") / "s.tar"
    start = [tars.old_sparse(b"sparse", [(0, b"x")], 9)] if odd else []  # the slow way through the builder
    path.write_bytes(tar(*start, *(member(f"{key}.{ext}".encode(), key.encode()) for key, ext in some)))
    record = record_of(path, BY_KEY)
    wanted: dict[bytes, list[bytes]] = {}
    for key, extension in some:
        wanted.setdefault(key.encode(), []).append(extension.encode())
    assert shown(record) == list(wanted.items())
    plain = record_of(path)
    assert record.apart == len({key for key, _ in shown(plain) if [one for one, _ in shown(plain)].count(key) > 1})


def test_ordinary_shards_have_the_same_record_whichever_way(tmp_path: Path) -> None:
    one = sets.make(tmp_path, 1, 20)[0]
    plain = build_file(one.path)
    assert all(build_file(one.path, reading) == plain for reading in OPTIONS)


# --- the set, the index ------------------------------------------------------------------------------------


def test_a_reading_is_part_of_what_a_record_is_kept_under() -> None:
    keys = {Shard(b"/x.tar", b"x", reading=reading).key for reading in OPTIONS}
    assert len(keys) == 4
    assert Shard(b"/x.tar", b"x").key == b"/x.tar"
    assert all(key.partition(b"\0")[0] == b"/x.tar" for key in keys)


def test_a_shard_is_indexed_on_demand_in_each_way(tmp_path: Path) -> None:
    """As a `--lazy` mount does; and the records of one that is gone go, of all readings."""
    path = tmp_path / "x.tar"
    path.write_bytes(APART)
    index = open_index(tmp_path / "index")
    for reading, samples in ((BY_KEY, 3), (PLAIN, 6), (BOTH, 3)):
        below = ShardSet(expand([str(path)], reading=reading), index)
        assert indexed(below.record, 0).samples == samples
        below.release()
    path.write_bytes(APART + tar(member(b"more.txt")))
    below = ShardSet(expand([str(path)], reading=BOTH), index)
    assert indexed(below.record, 0).samples == 4
    below.release()
    path.unlink()
    assert index.prune() == 3
    index.close()


def test_two_mounts_of_one_shard_are_both_right(program: Program) -> None:
    """Records of both readings are in one index."""
    program.write("x.tar", APART + tar(member(b"e.txt", b"e")))
    second = program.directory("mnt2")
    with program.mounted("x.tar") as plain, program.mounted(*BOTH.arguments, "x.tar", at=second) as whole:
        assert sorted(os.listdir(plain.path / "x/d")) == ["a", "a~2", "b", "b~2", "c", "c~2"]
        assert sorted(os.listdir(whole.path / "x/d")) == ["a", "b", "c"]
        assert os.listdir(whole.path / "x/d/a") == ["jpg", "cls"]
        assert (whole.path / "x/d/c/cls").read_bytes() == b"Cc"
        assert (whole.path / "x/e/txt").read_bytes() == b"e"
        assert not (plain.path / "x/e").exists()
        assert os.getxattr(whole.path / "x/d/a/cls", "user.wdsfs.member") == b"d/a.cls"
        inodes = [os.stat(whole.path / "x/d" / name).st_ino for name in ("a/jpg", "a/cls", "b/cls")]
        assert json.loads((whole.path / ".wdsfs/status.json").read_text())["selection"] == BOTH.arguments
        plain.expect_log("x.tar: ")
    with program.mounted(*BOTH.arguments, "x.tar", at=program.directory("mnt3")) as whole:
        assert inodes == [os.stat(whole.path / "x/d" / name).st_ino for name in ("a/jpg", "a/cls", "b/cls")]
    assert program.json("index", "x.tar")["rebuilt"] == 0
    assert program.json("index", *BOTH.arguments, "x.tar")["rebuilt"] == 0
    assert program.json("index", "--group-by-key", "x.tar")["rebuilt"] == 1


def test_the_options_go_with_views(program: Program) -> None:
    program.write("x.tar", APART)
    program.write(
        "j.tar", tar(member(b"d/a.txt", b"1")) + tar(*(member(b"d/%b.txt" % key, b"2") for key in (b"b", b"c")))
    )
    done = program.run(
        "ls", "-R", *BOTH.arguments, "--columns", "cls", "--columns", "txt", "--join", "j.tar", "x.tar"
    )
    assert [line for line in done.stdout.split() if not line.endswith(b"/")] == [
        b"x/d/%b/%b" % (key, one) for key in (b"a", b"b", b"c") for one in (b"cls", b"txt")
    ]
    merged = program.run("ls", "--merge", "-R", "--group-by-key", "--names", "full", "x.tar").stdout.split()
    assert b"d/a/a.cls" in merged
    classes = program.run("ls", "-R", "--group-by-key", "--layout", "classes", "x.tar").stdout.split()
    assert b"Ca/x--d--a.jpg" in classes
    numbered = program.run("ls", "-R", "--group-by-key", "--index-tree", "x.tar").stdout
    assert numbered.count(b"/00000") == 3
    counted = program.json("info", *BOTH.arguments, "x.tar", "j.tar")
    assert (counted["samples"], counted["apart"], counted["joined"]) == (6, 3, 1)


def test_fstab_takes_the_options() -> None:
    call = translate(["/x.tar", "/mnt", "-o", "ignore_zeros,group-by-key"])
    assert call.arguments[1:3] == BOTH.arguments
    assert translate(["/x.tar", "/mnt", "-o", "key_ends=last-dot"]).arguments[1] == "--key-ends=last-dot"


# --- check -------------------------------------------------------------------------------------------------


def test_check_names_the_options(tmp_path: Path) -> None:
    content = tar(member(b"a.x"), member(b"b.x"), member(b"a.y")) + tar(member(b"b.y"))
    path = write(tmp_path, content)
    plain = {one.kind: one.text for one in lint(path).findings}
    assert "--group-by-key shows them together" in plain["split sample"]
    assert "--ignore-zeros reads it" in plain["behind end mark"]
    twice = write(tmp_path, tar(member(b"a.x"), member(b"b.x"), member(b"a.X")), "twice.tar")
    assert [one.kind for one in lint(twice, BY_KEY).findings] == ["split sample", "duplicate extension"]
    whole = lint(path, BOTH)
    assert [(one.kind, one.offset, one.member) for one in whole.findings] == [
        ("split sample", 2 * BLOCK, "a"),
        ("split sample", 5 * BLOCK, "b"),
        ("behind end mark", 3 * BLOCK, ""),
    ]
    assert (whole.samples, whole.patterns) == (2, {frozenset([b"x", b"y"]): 2})
    assert lint(path, ZEROS).samples == 4
    clean = tar(member(b"a.x"), member(b"a.y"), member(b"b.x"))
    assert findings(tmp_path, clean) == [one[:3] for one in lint(write(tmp_path, clean), BOTH).findings] == []


# --- exports -----------------------------------------------------------------------------------------------


def test_an_export_is_right_for_its_reader(program: Program) -> None:
    program.write("x.tar", APART)
    out = program.directory("out")
    program.run("export", "--group-by-key", "-o", out, "x.tar")
    lines = (out / "x.idx").read_text().splitlines()
    assert lines[0] == "v1.2 3"
    for line, key in zip(lines[1:], "abc", strict=True):
        words = line.split()
        content = [APART[int(at) : int(at) + int(size)] for at, size in (words[1:3], words[5:7])]
        assert content == [f"J{key}".encode(), f"C{key}".encode()]
    (program.home / "x.idx").write_text((out / "x.idx").read_text())
    assert b"wrong index" not in program.run("check", "--group-by-key", "x.tar", code=1).stdout


# --- new shards --------------------------------------------------------------------------------------------


def packed(program: Program, *arguments: str) -> list[bytes]:
    """The shards that `pack` makes with these options, one of each."""
    program.run("pack", "--keep-shards", *arguments, "-o", "new/n-%03d.tar")
    return [path.read_bytes() for path in sorted((program.home / "new").glob("*.tar"))]


def test_pack_writes_samples_together(program: Program) -> None:
    """The documented way to put a set right."""
    program.write("x.tar", APART)
    program.write("y.tar", tar(member(b"ok.x"), member(b"ok.y")))
    joined = tar(member(b"a.txt", b"1")).ljust(20 * BLOCK, b"\0") + tar(member(b"b.txt", b"2"))
    program.write("z.tgz", gzip.compress(joined))
    program.write("zz.tar.gz", gzip.compress(joined[: 20 * BLOCK]) + gzip.compress(joined[20 * BLOCK :]))
    for name in ("z", "zz"):
        assert program.run("cat", "--ignore-zeros", ".", f"{name}/b/txt", cwd=program.home).stdout == b"2"
    first, second, third = packed(program, *BOTH.arguments, "x.tar", "y.tar", "z.tgz")
    assert by_webdataset(first) == TOGETHER
    assert second == tar(member(b"ok.x"), member(b"ok.y"))
    assert third == tar(member(b"a.txt", b"1"), member(b"b.txt", b"2"))
    # Nothing but the order of members is another: each is there byte for byte.
    blocks = {name: member(name, content) for name, content in ((b"d/a.jpg", b"Ja"), (b"d/a.cls", b"Ca"))}
    assert first.startswith(blocks[b"d/a.jpg"] + blocks[b"d/a.cls"])
    kept = APART.replace(member(b"README", b"r"), b"")
    assert sorted(first[at : at + BLOCK] for at in range(0, len(first), BLOCK)) == sorted(
        kept[at : at + BLOCK] for at in range(0, len(kept), BLOCK)
    )


@pytest.mark.parametrize(
    "odd",
    [member(b"link", kind=tars.HARD_LINK, link=b"a.x"), tars.pax({b"mtime": b"9"}, b"g")],
    ids=["a hard link", "a global header"],
)
def test_pack_moves_members_that_others_depend_on(program: Program, odd: bytes) -> None:
    program.write("x.tar", tar(odd, member(b"a.x", b"1"), member(b"b.x", b"2"), member(b"a.y", b"3")))
    (found,) = packed(program, "--group-by-key", "x.tar")
    assert tars.by_webdataset(found) == [{"__key__": "a", "x": b"1", "y": b"3"}, {"__key__": "b", "x": b"2"}]
    if odd[156:157] == b"g":
        with tarfile.open(fileobj=io.BytesIO(found)) as archive:
            assert {one.mtime for one in archive} == {9}


def test_pack_refuses_a_damaged_shard(program: Program) -> None:
    program.write("x.tar", APART[: 12 * BLOCK] + b"?" * BLOCK)
    done = program.run("pack", "--group-by-key", "-o", "n.tar", "x.tar", code=7)
    assert b"leave out the shard, the option, or the samples" in done.stderr
    assert not (program.home / "n.tar").exists()


@pytest.mark.parametrize("extension", [b"jpg", b"JPG"])
def test_pack_refuses_extensions_that_would_meet(program: Program, extension: bytes) -> None:
    program.write("x.tar", tar(member(b"a.jpg", b"1"), member(b"b.jpg"), member(b"a." + extension, b"2")))
    text = program.refused("pack", "--group-by-key", "-o", "n.tar", "x.tar", code=7)
    assert "x.tar: a has an extension twice, in members that lie apart" in text
    program.write("keys", b"b")
    assert by_webdataset(packed(program, "--group-by-key", "--keys", "keys", "x.tar")[0]) == [(b"b", [b"jpg"])]


def test_a_member_that_is_moved_takes_its_headers_along(program: Program) -> None:
    """Long names, and a global header between them."""
    comment = tars.pax({b"comment": b"x"}, b"g")
    long = b"d/" + b"n" * 150
    apart = tars.pax({b"path": long + b".y"}) + comment + member(b"short", b"Y")
    program.write("x.tar", tar(tars.gnu_long(long + b".x") + member(b"s", b"X"), member(b"b.x", b"B"), apart))
    (found,) = packed(program, "--group-by-key", "x.tar")
    with tarfile.open(fileobj=io.BytesIO(found)) as archive:
        assert [os.fsencode(name) for name in archive.getnames()] == [long + b".x", long + b".y", b"b.x"]
    assert by_webdataset(found) == [(long, [b"x", b"y"]), (b"b", [b"x"])]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_random_shards_are_put_right(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """webdataset reads from the new shards what a mount of the old ones shows."""
    rng = random.Random(seed)
    home = tmp_path_factory.mktemp("random")
    pairs = [(key, ext) for key in "abcde" for ext in "xyz" if rng.random() < 0.7] or [("a", "x")]
    rng.shuffle(pairs)
    content = b""
    wanted: dict[str, dict[str, bytes]] = {}
    for number, (key, ext) in enumerate(pairs):
        data = f"{key}{ext}".encode() * rng.randrange(400)
        wanted.setdefault(key, {})[ext] = data
        content += member(f"{key}.{ext}".encode(), data)
        content += rng.choice([b"", b"", bytes(BLOCK * rng.randrange(25)), member(b"stray%d" % number)])
    (home / "x.tar").write_bytes(content + END)
    shards = [replace(sets.at(home / "x.tar"), reading=BOTH)]
    choices: list[dict[str, Any]] = [{"keep_shards": True}, {"sort": True}, {"maxcount": 2}]
    options = PackOptions(f"{home}/n-%d.tar", **rng.choice(choices))
    with a_view(home, shards, Composition()) as below:
        ViewPack(below, options).run(write=True)
    out = [path.read_bytes() for path in sorted(home.glob("n-*.tar"))]
    found = {sample.pop("__key__"): sample for one in out for sample in tars.by_webdataset(one)}
    assert found == wanted


# --- overlays of earlier releases, which took such shards ----------------------------------------------------


def an_overlay(home: Path, *, merge: bool = False) -> Set:
    """A set whose overlay was made with --group-by-key, and has changes."""
    here = Set(home, APART, reading=BY_KEY, merge=merge)
    edits = {"d": {"a": {"txt": b"new"}, "b": {"cls": b"changed"}, "c": WHITEOUT}}
    return here.edit(edits if merge else {"s0": edits})


@pytest.mark.parametrize("merge", [False, True])
def test_changes_of_such_an_overlay_are_not_committed_but_saved(program: Program, *, merge: bool) -> None:
    """Nothing that was saved becomes unreadable: diff shows it, a mount serves it, pack saves it."""
    an_overlay(program.home, merge=merge)
    assert b"d/a +txt" in program.run("diff", "--overlay", "o", "s0.tar").stdout
    before = files_of(program.home / "o/upper")
    for options in (("--in-place",), ("-o", "n-%d.tar"), ("-n", "-o", "n-%d.tar")):
        text = program.refused("commit", *options, "--overlay", "o", "s0.tar", code=7)
        assert "because its shards are read with --group-by-key. Save what its mount shows" in text
    assert files_of(program.home / "o/upper") == before
    flags = ["--merge"] if merge else []
    place = program.directory("m nt")  # the command quotes it
    with program.mounted("--group-by-key", *flags, "--overlay", "o", "s0.tar", at=place) as mounted:
        top = mounted.path if merge else mounted.path / "s0"
        assert (top / "d/a/txt").read_bytes() == b"new"
        (top / "d/b/more").write_bytes(b"!")
        text = program.refused("commit", "-o", "n-%d.tar", mounted.path, code=7)
        command = text.partition("as new shards: ")[2].replace("new/%06d.tar", "saved.tar")
        program.run(*shlex.split(command.replace("/*", "/s0"))[1:])
        mounted.allow_log("cannot be committed")
    assert by_webdataset((program.home / "saved.tar").read_bytes()) == [
        (b"d/a", [b"cls", b"jpg", b"txt"]),
        (b"d/b", [b"cls", b"jpg", b"more"]),
    ]


def test_such_an_overlay_is_not_begun(program: Program) -> None:
    """Before an edit is made, and before anything is indexed; one without changes is refused, too."""
    program.write("x.tar", APART)
    for option in ("--group-by-key", "--ignore-zeros", "--key-ends last-dot"):
        text = program.refused("mount", *option.split(), "--overlay", "o", "x.tar", program.mountpoint, code=8)
        assert f"shards that are read with {option} cannot be edited" in text
        assert f"wdsfs pack --keep-shards {option} -o 'new/%06d.tar' SHARDS" in text
    assert not (program.home / "o").exists()
    empty = Set(program.home / "empty", APART, reading=BY_KEY)
    words = ("mount", "--group-by-key", "--overlay", empty.home / "o", empty.shards[0], program.mountpoint)
    assert "cannot be edited" in program.refused(*words, code=8)


def test_an_overlay_remembers_how_its_shards_are_read(program: Program) -> None:
    an_overlay(program.home)
    program.refused("diff", "--ignore-zeros", "--overlay", "o", "s0.tar", code=2)
    for more, told in (
        ([], "the same options"),
        (BOTH.arguments, "--ignore-zeros"),
        (["--merge"], "--merge"),
    ):
        text = program.refused("mount", "-q", *more, "--overlay", "o", "s0.tar", program.mountpoint, code=8)
        assert "was made with --layout samples --names ext --group-by-key" in text
        assert told in text
