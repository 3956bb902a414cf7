"""The shards that come of an overlay, read by others, and what is refused."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import sets, tars, writables
from tests.overlay.test_upper_format import need_overlayfs
from tests.packing.overlays import (
    EDITS,
    FIRST,
    SECOND,
    Set,
    files_of,
    keys,
    numbered,
    on_small_disks,
    samples,
    stops,
)
from tests.packing.test_diff import nested
from tests.uppers import OPAQUE, WHITEOUT, a_tree, find
from wdsfs.errors import CommitError, StaleShard, UsageError
from wdsfs.index import member_draft
from wdsfs.packing import diff, reasons
from wdsfs.packing.file_source import PackOptions
from wdsfs.packing.overlay_commit import CommitOptions, Planner
from wdsfs.packing.plan import continued, namer
from wdsfs.packing.runner import Runner
from wdsfs.packing.shard_writer import Files
from wdsfs.tree import content
from wdsfs.tree.tree import View


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory: thousands of commits wait for the disk otherwise."""
    with writables.fast_directory() as path:
        yield path


# --- one shard for each ------------------------------------------------------------------------------------


def test_an_edited_sample_stays_where_it_was(tmp_path: Path) -> None:
    """GNU tar reads the new shards, the sources are left alone, and the same input gives the same bytes."""
    here = Set(tmp_path, FIRST, SECOND).edit(EDITS)
    before = [path.stat() for path in here.shards]
    first, second = here.commit()
    assert second == SECOND
    assert tars.by_webdataset(first) == [
        {"__key__": "d/a", "cls": b"1", "jpg": b"changed", "txt": b"added"},
        {"__key__": "c", "txt": b"c"},
        {"__key__": "d/n", "txt": b"new"},
    ]
    names = [b"d", b"d/a.cls", b"d/a.jpg", b"d/a.txt", b"README", b"c.txt", b"d/n.txt"]
    assert [one.name for one in tars.by_tarfile(first)] == names
    assert first.startswith(tars.member(b"d/", kind=tars.DIRECTORY) + tars.member(b"d/a.cls", b"1", mtime=5))
    assert tars.member(b"c.txt", b"c") in first
    (tmp_path / "x").mkdir()
    command: list[str | Path] = ["tar", "--warning=all", "-C", tmp_path / "x", "-xf", tmp_path / "out/o-000.tar"]
    assert subprocess.run(command, check=True, capture_output=True).stderr == b""
    assert (tmp_path / "x/d/a.jpg").read_bytes() == b"changed"
    assert (tmp_path / "x/d/n.txt").stat().st_mtime == 7
    assert here.set() == [FIRST, SECOND]
    for old, path in zip(before, here.shards, strict=True):
        new = path.stat()
        assert (new.st_mtime_ns, new.st_ctime_ns, new.st_ino) == (old.st_mtime_ns, old.st_ctime_ns, old.st_ino)
    shutil.rmtree(tmp_path / "out")
    os.utime(tmp_path / "o/upper/s0/d")
    assert here.commit(jobs=4) == [first, second]


GLOBAL = tars.pax({b"comment": b"x"}, b"g") + numbered(2)
GNU = [tars.ODD[case].tar() for case in ("GNU incremental", "GNU volumes")]  # members that are no files


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("shards", "upper", "new"),
    [
        ([FIRST], {}, [FIRST]),
        ([FIRST, SECOND], {"s1": WHITEOUT}, [FIRST, tars.END]),
        ([GLOBAL], {"s0": {"000": WHITEOUT, "001": WHITEOUT}}, [tars.END]),
        ([tars.tar(tars.A, tars.B) + FIRST], {"s0": {"b": WHITEOUT}}, [tars.tar(tars.A) + FIRST]),
        *(([content], {"s0": {"b": WHITEOUT}}, [content.replace(tars.B, b"")]) for content in GNU),
    ],
    ids=[
        "nothing",
        "all samples",
        "all below a global header",
        "behind the end",
        "GNU incremental",
        "GNU volumes",
    ],
)
def test_the_bytes_of_new_shards(
    shards: list[bytes], upper: dict[Any, Any], new: list[bytes], in_place: bool, tmp_path: Path
) -> None:
    here = Set(tmp_path, *shards).edit(upper)
    assert [step.number for step in here.plan(in_place=True).steps] == ([len(shards) - 1] if upper else [])
    options: dict[str, Any] = {"in_place": True} if in_place else {}
    assert here.commit(**options) == new


def test_new_directories_become_further_shards(tmp_path: Path) -> None:
    upper = {"more": {"ya": {"txt": b""}, "xb": {"txt": b""}}, "again": {"x": {"txt": b""}}}
    here = Set(tmp_path, FIRST, SECOND).edit(upper)
    contents = here.commit()
    assert contents[:2] == [FIRST, SECOND]
    assert keys(*contents[2:]) == [["x"], ["xb", "ya"]]
    (tmp_path / "t-0.tar").touch()
    steps = here.plan(in_place=True, output=f"{tmp_path}/t-%d.tar").steps
    assert [os.path.basename(step.target) for step in steps] == [b"t-1.tar", b"t-2.tar"]


def test_merged_new_samples_become_further_shards(tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST, SECOND, merge=True)
    contents = here.edit({"d": {"a": WHITEOUT, "z": {"cls": b""}}, "e": {"cls": b""}}).commit()
    assert keys(*contents) == [["d/b", "c"], ["e", "d/f"], ["d/z"]]
    assert samples(contents[1])["e"] == {"txt": b"e", "cls": b""}


def test_a_damaged_shard_is_copied_but_not_changed(tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST, SECOND[:1100]).edit(EDITS)
    assert here.commit()[1] == SECOND[:1100]
    shutil.rmtree(tmp_path / "out")
    here.edit({"s1": {"e": {"txt": b"new"}}})
    with pytest.raises(CommitError, match="is damaged"):
        here.commit()
    assert not (tmp_path / "out").exists()


def test_a_shard_without_its_last_padding(tmp_path: Path) -> None:
    shard = tars.tar(tars.A, tars.member(b"z.cls", b"1"), tars.member(b"z.txt", b"2"), end=b"")[:-511]
    contents = Set(tmp_path, shard).edit({"s0": {"z": {"cls": b"new"}, "n": {"txt": b"n"}}}).commit()
    assert {key: value for tar in contents for key, value in samples(tar).items()} == {
        "a": {"txt": b"aaa"},
        "z": {"cls": b"new", "txt": b"2"},
        "n": {"txt": b"n"},
    }


def test_links(tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST, SECOND).edit(EDITS)
    here.commit(link=True)
    assert (tmp_path / "out/o-001.tar").samefile(here.shards[1])
    assert not (tmp_path / "out/o-000.tar").samefile(here.shards[0])
    here.commit(link=True)  # finds everything there


def test_links_over_file_systems() -> None:
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        with pytest.raises(CommitError, match="leave out --link"):
            Set(Path(home), FIRST).commit(link=True, output=f"{other}/%d.tar")
        assert os.listdir(other) == []


# --- what a reader would not show --------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
def test_a_name_that_readers_leave_out_is_refused_before_anything_is_written(
    tmp_path: Path, in_place: bool
) -> None:
    here = Set(tmp_path, FIRST, SECOND).edit({"s0": {"c": {"txt": b"edited"}, **nested(300, {"txt": b"deep"})}})
    before = files_of(here.place.upper)
    with pytest.raises(CommitError, match="its name has 299 folders"):
        here.commit(in_place=in_place)
    assert (here.set(), files_of(here.place.upper)) == ([FIRST, SECOND], before)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("upper", "message"),
    [
        ({"s0": nested(300, {"txt": b"deep"})}, "would leave out d/d/"),
        ({"new": nested(300, {"txt": b"deep"})}, "would leave out d/d/"),
        ({"s0": {"__m__": {"a": {"txt": b""}}}}, "s0/__m__/a/txt"),
        ({"s0": {"x.y": {"txt": b""}}}, "s0/x.y/txt"),
    ],
)
def test_a_plan_is_compared_with_what_a_reader_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, upper: dict[Any, Any], message: str
) -> None:
    """As after an error in the rule of the writers: the plan is made of names that it lets pass."""
    monkeypatch.setattr(reasons, "misread", lambda key, extension: None)
    with pytest.raises(CommitError, match=message) as caught:
        Set(tmp_path, FIRST, SECOND).edit(upper).plan()
    assert "please report it" in str(caught.value)


def test_two_samples_that_a_reader_takes_for_one_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = tars.tar(tars.member(b"k.jpg"), tars.B, tars.member(b"k.cls"))
    monkeypatch.setattr(diff, "_may_repeat", lambda record, changes: False)
    here = Set(tmp_path, shard).edit({"s0": {"b": WHITEOUT}})
    for options in ({}, {"in_place": True}):
        with pytest.raises(CommitError, match="readers would find 1 sample in place of 2"):
            here.plan(**options)


def test_a_shard_of_more_folders_than_readers_take_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_draft, "FOLDERS_FREE", 5)
    monkeypatch.setattr(member_draft, "FOLDER_BYTES", 1 << 30)
    with pytest.raises(CommitError, match=r"no more than 5 folders .*--maxcount"):
        Set(tmp_path, FIRST).edit({"s0": nested(7, {"txt": b""})}).plan()
    Set(tmp_path / "two", FIRST).edit({"s0": {"d": nested(5, {"txt": b""})}}).plan()


@pytest.mark.parametrize("options", [{}, {"in_place": True}])
@pytest.mark.parametrize("rest", [(tars.A, tars.B), ()], ids=["samples", "no samples"])
def test_changed_members_in_front_of_the_first_sample(
    rest: tuple[bytes, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    shard = tars.tar(tars.member(b"README", b"r"), tars.member(b"NOTES", b"n"), *rest)
    here = Set(tmp_path, shard, view=View("files")).edit({"s0": {"README": b"changed", "NOTES": WHITEOUT}})
    [tar] = here.commit(**options)
    assert [one.name for one in tars.by_tarfile(tar)] == [b"README", *[b"a.txt", b"b.txt"][: len(rest)]]
    assert tar[512:].startswith(b"changed")


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shard", "upper", "names", "text"),
    [
        (
            tars.tar(tars.member(b"k.jpg"), tars.B, tars.member(b"k.cls")),
            {"b": WHITEOUT},
            "ext",
            "make one",
        ),
        (
            FIRST,
            {"d": {"a": WHITEOUT, "z": {OPAQUE: True, "a.jpg": b"A", "a.cls": b"1"}}},
            "full",
            r"conflict: s0/d/z/a.cls: .* is renamed together with its files",
        ),
    ],
)
def test_conflicts_are_never_left_out(
    shard: bytes, upper: dict[Any, Any], names: str, text: str, tmp_path: Path
) -> None:
    with pytest.raises(CommitError, match=text):
        Set(tmp_path, shard, view=View(names=names)).edit({"s0": upper}).commit(leave_out=True)


def test_what_cannot_be_packed(tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST).edit({"s0": {"d": {"a": {"l": "jpg", "JPG": b"x", "txt": b""}}}})
    with pytest.raises(CommitError, match=r"s0/d/a/l: is a symbolic link\n--leave-out packs all others"):
        here.commit()
    with pytest.raises(CommitError, match=r"cannot be packed:\n.*\n.*link$"):
        here.commit(in_place=True, leave_out=True)
    [tar] = here.commit(leave_out=True)
    assert samples(tar)["d/a"] == {"cls": b"1", "jpg": b"A", "txt": b""}


@pytest.mark.parametrize("output", ["s%d.tar", "./s{0..1}.tar", "s0.tar"])
def test_the_output_is_not_one_of_the_shards(output: str, tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST, SECOND) if "0.tar" not in output else Set(tmp_path, FIRST)
    with pytest.raises(CommitError, match="is one of the shards"):
        here.commit(output=f"{tmp_path}/{output}")


DIRECTORIES = ("new/", "new/{0..1}/", "new/%d/..", ".", "/tmp")
NO_NUMBERS = ("o-%s-%d.tar", "o-%.tar", "100%%.tar", "o-%s.tar", "o-{a,b}%d.tar")  # or two kinds of them
TOO_MANY = ("o-{0..99999999999}.tar", "o-{0..1" + "0" * 5000 + "}.tar")


@pytest.mark.parametrize(
    "pattern", [None, "o-{0..0}.tar", "o.tar", "out{.tar", "out}.tar", *NO_NUMBERS, *TOO_MANY, *DIRECTORIES]
)
def test_patterns_that_name_no_shards(pattern: str | None) -> None:
    example = (
        r"is a directory: .*/train-%06d\.tar" if pattern in DIRECTORIES else "--output|braces|shards|too large"
    )
    with pytest.raises(UsageError, match=example):
        namer(pattern)(0 if pattern in DIRECTORIES else 1)


@pytest.mark.parametrize("output", ["o", "o-%d", "o-{0..1}", "o.d/%06d", "o-%d.Tar", "s3://bucket/o-%d"])
def test_names_that_no_mount_of_their_directory_finds(output: str) -> None:
    for check in (CommitOptions(output).check, PackOptions(output).check):
        with pytest.raises(UsageError, match=rf"write -o '?{re.escape(output)}\.tar"):
            check()


def test_patterns() -> None:
    assert namer("/o/%03d.tar")(7) == b"/o/007.tar"
    assert namer("/o/{a,b}.tar")(1) == b"/o/b.tar"
    assert namer(r"/o/\{a\}.tar")(0) == b"/o/{a}.tar"
    assert namer("o.tar")(0) == os.fsencode(os.path.abspath("o.tar"))
    assert list(itertools.islice(continued(b"/d1/t-008.tar"), 2)) == [b"/d1/t-009.tar", b"/d1/t-010.tar"]
    with pytest.raises(UsageError, match="has no number"):
        next(continued(b"/d1/train.tar"))


def test_no_file_of_the_overlay_is_forgotten(tmp_path: Path) -> None:
    """A plan that lacks a file is not carried out, for any reason."""
    here = Set(tmp_path, FIRST).edit(EDITS).edit({"s0": {"d": {"a": {"cls": b"1"}}}, "more": {"x": {"txt": b""}}})
    os.utime(tmp_path / "o/upper/s0/d/a/cls", (5, 5))  # as in the shard
    with a_tree(tmp_path, [b""], View()) as tree:
        options = CommitOptions(output=f"{tmp_path}/out/%d.tar")
        found = find(tree, here.place.upper)
        assert Planner(tree.lower, found, options).make().steps
        found.shards[0].appended.clear()
        del found.further[b"more"]
        with pytest.raises(CommitError, match=r"nothing was written.*:\n  more/x/txt\n  s0/d/n/txt$"):
            Planner(tree.lower, found, options).make()
        found.covered.clear()
        with pytest.raises(CommitError, match=r"\n  s0/d/a/cls\n"):
            Planner(tree.lower, found, options).make()


# --- stopping ----------------------------------------------------------------------------------------------


def test_killed_at_every_step(tmp_path: Path) -> None:
    """A shard that has its name is complete, and the next run adds the missing ones."""
    here = Set(tmp_path, FIRST, SECOND).edit(EDITS)
    whole = here.commit()
    for _ in stops(lambda: shutil.rmtree(tmp_path / "out"), here.commit):
        for path in (tmp_path / "out").glob("o-*.tar"):
            assert path.read_bytes() == whole[int(path.stem[-3:])]
        assert here.commit() == whole
    assert here.out() == whole


def test_a_disk_without_room_and_a_read_only_one(tmp_path: Path) -> None:
    """Real ones: nothing half-written has a name, nothing is left in the way, and the place is named."""
    code = """
import sys
from wdsfs.errors import CommitError
full, only_read, home = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", full], check=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", only_read], check=True)
here = Set(Path(home), FIRST, numbered(200))
try:
    here.commit(output=full + "/%d.tar")
except OSError as error:
    print(error.errno == errno.ENOSPC, os.path.relpath(error.filename, os.fsencode(full)), os.listdir(full))
try:
    here.commit(output=only_read + "/new/%d.tar", in_place=False)
except CommitError as error:
    print(error)
"""
    no_room, refused = on_small_disks(code, *(tmp_path / name for name in ("full", "disk", "set"))).splitlines()
    assert no_room == "True b'1.tar' ['0.tar']"
    assert refused == f"{tmp_path}/disk: the disk is read-only: name another place with --output"


def test_a_shard_that_changes_between_planning_and_writing(tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST).edit(EDITS)
    options = CommitOptions(output=f"{tmp_path}/out/%d.tar")
    with a_tree(tmp_path, [b""], View()) as tree:
        changes = find(tree, here.place.upper)
        plan = Planner(tree.lower, changes, options).make()
        here.shards[0].write_bytes(SECOND)
        with pytest.raises(StaleShard):
            Runner(plan, Files(os.fsencode(here.place.upper)), tree.lower).write()
        # Before the planning: the changes are given as numbers that mean nothing in another shard.
        tree.lower.distrust()
        with pytest.raises(StaleShard, match="start again"):
            Planner(tree.lower, changes, options).make()
    assert here.out() == []


# --- an upper that the kernel wrote ----------------------------------------------------------------------------


OVERLAY_SCRIPT = """
set -e
mount -t tmpfs t "$1/mnt"; cd "$1/mnt"; mkdir u w m
mount -t overlay -o lowerdir="$1/lower",upperdir=u,workdir=w,userxattr,redirect_dir=nofollow,metacopy=off o m
cd m/s0
printf changed > d/a/jpg; printf added > d/a/txt
rm -r d/b; mkdir d/n; printf new > d/n/txt
mv c c2
rm -r ../s1/e; mkdir ../s1/e; printf again > ../s1/e/cls
chmod 600 ../s1/d/f/txt
cd ../..; umount m
mkdir -p "$1/o/work/kernel"; cp -a u "$1/o/upper"
"""


@pytest.mark.root
def test_an_upper_that_the_kernel_wrote(tmp_path: Path) -> None:
    """As an earlier release had it do, over a plain directory that mirrors the mount."""
    need_overlayfs()
    here = Set(tmp_path, FIRST, SECOND)
    shutil.rmtree(tmp_path / "o")
    with a_tree(tmp_path, [b"", b""], View()) as tree:
        for path in b"s0/d/a/cls s0/d/a/jpg s0/d/b/cls s0/d/b/jpg s0/c/txt s1/e/txt s1/d/f/txt".split():
            node = tree.resolve(path)
            file = tmp_path / "lower" / os.fsdecode(path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.read(tree.content(node.inode), 0, node.size))
            os.utime(file, ns=(node.mtime_ns, node.mtime_ns))
    (tmp_path / "mnt").mkdir()
    script: list[str | Path] = [*sets.in_own_mounts(), "sh", "-c", OVERLAY_SCRIPT, "-", tmp_path]
    subprocess.run(script, check=True)
    first, second = here.commit()
    assert tars.by_webdataset(first) == [
        {"__key__": "d/a", "cls": b"1", "jpg": b"changed", "txt": b"added"},
        {"__key__": "c2", "txt": b"c"},
        {"__key__": "d/n", "txt": b"new"},
    ]
    assert tars.by_webdataset(second) == [
        {"__key__": "e", "cls": b"again"},
        {"__key__": "d/f", "txt": b"f"},
    ]
    assert second.endswith(tars.member(b"d/f.txt", b"f") + tars.END)
