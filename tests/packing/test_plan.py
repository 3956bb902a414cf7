"""Commits: which shards come of an overlay, read by others, and what is left when one is stopped."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import sets, tars, writables
from tests.packing.test_shard_writer import Faulty, Killed
from tests.uppers import OPAQUE, WHITEOUT, a_tree, find, write_upper
from wdsfs.errors import CommitError, StaleShard, UsageError
from wdsfs.names import PLAIN, Reading
from wdsfs.overlay import overlay_directory
from wdsfs.overlay.overlay_directory import OverlayDirectory, OverlaySettings, ShardSeen, unfinished
from wdsfs.packing.output_names import continued, namer
from wdsfs.packing.overlay_source import NO_SAMPLE, CommitOptions, Planner
from wdsfs.packing.plan import Plan, Remark, Step
from wdsfs.packing.replacement import Replacement, plan_from_json, plan_to_json, read_plan
from wdsfs.packing.runner import Runner, _freed_by
from wdsfs.packing.shard_writer import Files
from wdsfs.storage.durable import Disk
from wdsfs.storage.identity import Fingerprint
from wdsfs.tree.tree import View

FIRST = tars.tar(
    tars.member(b"d/", kind=tars.DIRECTORY),
    tars.member(b"d/a.cls", b"1", mtime=5),
    tars.member(b"d/a.jpg", b"A"),
    tars.member(b"README", b"read me"),
    tars.member(b"d/b.cls", b"2"),
    tars.member(b"d/b.jpg", b"B"),
    tars.member(b"c.txt", b"c"),
)
SECOND = tars.tar(tars.member(b"e.txt", b"e"), tars.member(b"d/f.txt", b"f"))
EDITS: dict[Any, Any] = {
    "s0": {
        "d": {"a": {"jpg": b"changed", "txt": b"added"}, "b": WHITEOUT, "n": {"txt": b"new"}},
    }
}


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory: thousands of commits wait for the disk otherwise."""
    with writables.fast_directory() as path:
        yield path


class Set:
    """Shards s0, s1 ... with an overlay `o`, and a directory `out`."""

    def __init__(
        self,
        home: Path,
        *shards: bytes,
        view: View | None = None,
        merge: bool = False,
        reading: Reading = PLAIN,
    ) -> None:
        self.home, self.view, self.merge, self.reading = home, view or View(), merge, reading
        self.shards = [home / f"s{number}.tar" for number in range(len(shards))]
        for path, data in zip(self.shards, shards, strict=True):
            path.write_bytes(data)
        self.place = OverlayDirectory(home / "o")
        (home / "o/upper").mkdir(parents=True)
        (home / "o/work").mkdir()
        paths = [(path.stem.encode(), os.fsencode(path)) for path in self.shards]
        seen = (ShardSeen(name, path, Fingerprint.at(path)) for name, path in paths)
        settings = OverlaySettings(self.view.layout, self.view.names, merge, tuple(seen), reading)
        overlay_directory.write_settings(self.place, settings)

    def edit(self, upper: Mapping[Any, Any]) -> Set:
        write_upper(self.home / "o/upper", upper)
        return self

    def commit(self, disk: Disk | None = None, jobs: int = 1, **options: Any) -> list[bytes]:
        """Commit as the command does; returns the contents of the shards in `out`, or of the set if in place."""
        if not options.get("in_place"):
            options.setdefault("output", f"{self.home}/out/o-%03d.tar")
        upper = self.place.upper
        with a_tree(self.home, [b""] * len(self.shards), self.view, self.merge, self.reading) as tree:
            fresh = not unfinished(self.place)
            if fresh:
                plan = Planner(tree.lower, find(tree, upper), CommitOptions(**options)).make()
            else:
                plan = read_plan(self.place, tree.lower)
            runner = Runner(
                plan, Files(os.fsencode(upper)), tree.lower, jobs, disk=disk, space_check="in_place" in options
            )
            if options.get("in_place"):
                replacement = Replacement(self.place, runner)
                if fresh:
                    replacement.begin()
                replacement.finish()
            else:
                runner.write()
        return self.set() if options.get("in_place") else self.out()

    def abandon(self, disk: Disk | None = None) -> tuple[list[Step], Path | None]:
        """Abandon a commit in place that was stopped half-way, as the command does."""
        with a_tree(self.home, [b""] * len(self.shards), self.view, self.merge) as tree:
            runner = Runner(read_plan(self.place, tree.lower), Files(), tree.lower, disk=disk)
            return Replacement(self.place, runner).abandon(tree.merged)

    def plan(self, **options: Any) -> Plan:
        options.setdefault("output", f"{self.home}/out/o-%03d.tar")
        with a_tree(self.home, [b""] * len(self.shards), self.view, self.merge, self.reading) as tree:
            return Planner(tree.lower, find(tree, self.place.upper), CommitOptions(**options)).make()

    def out(self) -> list[bytes]:
        return [path.read_bytes() for path in sorted((self.home / "out").iterdir())]

    def set(self) -> list[bytes]:
        return [path.read_bytes() for path in sorted(self.home.glob("*.tar"))]


def keys(*contents: bytes) -> list[list[str]]:
    return [[sample["__key__"] for sample in tars.by_webdataset(tar)] for tar in contents]


def samples(tar: bytes) -> dict[str, dict[str, bytes]]:
    return {sample.pop("__key__"): sample for sample in tars.by_webdataset(tar)}


# --- one shard for each ------------------------------------------------------------------------------------


def test_an_edited_sample_stays_where_it_was(tmp_path: Path) -> None:
    first, second = Set(tmp_path, FIRST, SECOND).edit(EDITS).commit()
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


def test_gnu_tar_reads_it(tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST, SECOND).edit(EDITS)
    here.commit()
    (tmp_path / "x").mkdir()
    command = ["tar", "--warning=all", "-C", tmp_path / "x", "-xf", tmp_path / "out/o-000.tar"]
    done = subprocess.run(command, check=True, capture_output=True)
    assert done.stderr == b""
    assert (tmp_path / "x/d/a.jpg").read_bytes() == b"changed"
    assert (tmp_path / "x/d/n.txt").stat().st_mtime == 7


def test_the_sources_are_left_alone(tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST, SECOND).edit(EDITS)
    before = [path.stat() for path in here.shards]
    here.commit()
    assert here.set() == [FIRST, SECOND]
    assert [(s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for s in before] == [
        (s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for s in (path.stat() for path in here.shards)
    ]
    assert (tmp_path / "o/upper/s0").exists()


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST, SECOND)
    first = here.edit(EDITS).commit()
    shutil.rmtree(tmp_path / "out")
    os.utime(tmp_path / "o/upper/s0/d")
    assert here.commit(jobs=4) == first


def test_new_directories_become_further_shards(tmp_path: Path) -> None:
    upper = {"more": {"y": {"txt": b""}, "x": {"txt": b""}}, "again": {"x": {"txt": b""}}}
    contents = Set(tmp_path, FIRST, SECOND).edit(upper).commit()
    assert contents[:2] == [FIRST, SECOND]
    assert keys(*contents[2:]) == [["x"], ["x", "y"]]


def test_merged_new_samples_become_further_shards(tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST, SECOND, merge=True)
    contents = here.edit({"d": {"a": WHITEOUT, "z": {"cls": b""}}, "e": {"cls": b""}}).commit()
    assert keys(*contents) == [["d/b", "c"], ["e", "d/f"], ["d/z"]]
    assert samples(contents[1])["e"] == {"txt": b"e", "cls": b""}


def test_a_shard_without_samples_stays(tmp_path: Path) -> None:
    contents = Set(tmp_path, FIRST, SECOND).edit({"s1": WHITEOUT}).commit()
    assert contents == [FIRST, tars.END]


def test_a_damaged_shard_is_copied_but_not_changed(tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST, SECOND[:1100]).edit(EDITS)
    assert here.commit()[1] == SECOND[:1100]
    shutil.rmtree(tmp_path / "out")
    here.edit({"s1": {"e": {"txt": b"new"}}})
    with pytest.raises(CommitError, match="is damaged"):
        here.commit()
    assert not (tmp_path / "out").exists()


def test_what_lies_behind_the_end_mark_stays_there(tmp_path: Path) -> None:
    [tar] = Set(tmp_path, SECOND + FIRST).edit({"s0": {"n": {"txt": b""}}}).commit()
    assert keys(tar) == [["e", "d/f", "n"]]
    assert tar.endswith(tars.END + FIRST)


def test_links(tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST, SECOND).edit(EDITS)
    here.commit(link=True)
    assert (tmp_path / "out/o-001.tar").samefile(here.shards[1])
    assert not (tmp_path / "out/o-000.tar").samefile(here.shards[0])
    here.commit(link=True)  # finds everything there


def test_links_over_file_systems() -> None:
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        with pytest.raises(CommitError, match="use --copy"):
            Set(Path(home), FIRST).commit(link=True, output=f"{other}/%d.tar")
        assert os.listdir(other) == []


def test_sorted(tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST, SECOND)
    first, second = here.edit({"s0": {"b": {"txt": b"b"}}}).commit(sort=True)
    assert keys(first, second) == [["b", "c", "d/a", "d/b"], ["d/f", "e"]]
    assert tars.by_tarfile(first)[0].name == b"d"
    assert first.endswith(tars.END)
    for old, new in ((FIRST, first), (SECOND, second)):
        assert samples(old).items() <= samples(new).items()


@pytest.mark.parametrize(
    ("shard", "text"),
    [
        (tars.tar(tars.member(b"k.jpg"), tars.B, tars.member(b"k.cls")), "comes twice"),
        (tars.tar(tars.A, tars.member(b"l.txt", kind=tars.HARD_LINK, link=b"a.txt")), "hard links"),
        (tars.tar(tars.pax({b"mtime": b"7"}, b"g"), tars.A), "global PAX header"),
    ],
)
def test_what_cannot_be_sorted(shard: bytes, text: str, tmp_path: Path) -> None:
    with pytest.raises(CommitError, match=text):
        Set(tmp_path, shard).commit(sort=True)


# --- split up anew -----------------------------------------------------------------------------------------


def numbered(count: int, start: int = 0, size: int = 10) -> bytes:
    return tars.tar(*(tars.member(b"%03d.txt" % n, b"x" * size) for n in range(start, start + count)))


def test_split_by_count(tmp_path: Path) -> None:
    here = Set(tmp_path, numbered(5), numbered(5, 5)).edit({"s0": {"002": WHITEOUT, "z": {"txt": b"z"}}})
    contents = here.commit(maxcount=4)
    assert keys(*contents) == [["000", "001", "003", "004"], ["z", "005", "006", "007"], ["008", "009"]]
    assert all(tar.endswith(tars.END) for tar in contents)


def test_split_by_size(tmp_path: Path) -> None:
    """As in ShardWriter: a sample goes into a shard that is not full yet, and headers do not count."""
    import webdataset

    here = Set(tmp_path, numbered(7, size=600))
    ours = here.commit(maxsize=1000)
    with webdataset.ShardWriter(f"{tmp_path}/w-%03d.tar", maxsize=1000, encoder=False, verbose=0) as writer:
        for sample in tars.by_webdataset(numbered(7, size=600)):
            writer.write(sample)
    theirs = [path.read_bytes() for path in sorted(tmp_path.glob("w-*.tar"))]
    assert keys(*ours) == keys(*theirs) == [["000", "001"], ["002", "003"], ["004", "005"], ["006"]]


def test_a_global_header_goes_where_its_members_go(tmp_path: Path) -> None:
    """None is left at the end of a shard, where Python and webdataset would fail."""
    first, second = (tars.pax({b"comment": comment}, b"g") for comment in (b"x", b"y"))
    here = Set(tmp_path, first + numbered(4), second + numbered(4, 4))
    contents = here.edit({"s0": {"002": WHITEOUT}}).commit(maxcount=3)
    assert keys(*contents) == [["000", "001", "003"], ["004", "005", "006"], ["007"]]
    assert [tar.find(first) for tar in contents] == [0, -1, -1]
    assert [tar.find(second) for tar in contents] == [-1, 0, -1]


@pytest.mark.parametrize("options", [{}, {"sort": True}, {"maxcount": 3}, {"in_place": True}])
def test_a_shard_with_a_global_header_loses_all_samples(options: dict[str, Any], tmp_path: Path) -> None:
    here = Set(tmp_path, tars.pax({b"comment": b"x"}, b"g") + numbered(2))
    contents = here.edit({"s0": {"000": WHITEOUT, "001": WHITEOUT}}).commit(**options)
    assert contents == [tars.END]


def test_two_samples_of_one_key_are_not_put_side_by_side(tmp_path: Path) -> None:
    here = Set(tmp_path, tars.tar(tars.A), tars.tar(tars.A, tars.B))
    assert keys(*here.commit(maxcount=10)) == [["a"], ["a", "b"]]


def test_strays_stay_behind_their_sample(tmp_path: Path) -> None:
    contents = Set(tmp_path, FIRST).edit({"s0": {"d": {"a": WHITEOUT}}}).commit(maxcount=1)
    assert [[one.name for one in tars.by_tarfile(tar)] for tar in contents] == [
        [b"d", b"README", b"d/b.cls", b"d/b.jpg"],
        [b"c.txt"],
    ]


@pytest.mark.parametrize("options", [{}, {"maxcount": 9}, {"sort": True}, {"in_place": True}])
@pytest.mark.parametrize("rest", [(tars.A, tars.B), ()], ids=["samples", "no samples"])
def test_changed_members_in_front_of_the_first_sample(
    rest: tuple[bytes, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    shard = tars.tar(tars.member(b"README", b"r"), tars.member(b"NOTES", b"n"), *rest)
    here = Set(tmp_path, shard, view=View("files")).edit({"s0": {"README": b"changed", "NOTES": WHITEOUT}})
    [tar] = here.commit(**options)
    assert [one.name for one in tars.by_tarfile(tar)] == [b"README", *[b"a.txt", b"b.txt"][: len(rest)]]
    assert tar[512:].startswith(b"changed")


def test_changed_members_of_no_sample_are_not_among_changed_samples(tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST, view=View("files")).edit({"s0": {"README": b"changed", "n.txt": b"n"}})
    assert here.plan(changed_only=True).left_out == [Remark(b"s0/README", NO_SAMPLE)]
    assert keys(*here.commit(changed_only=True)) == [["n"]]


def test_only_what_has_changed(tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST, SECOND).edit(EDITS).edit({"more": {"x": {"txt": b"x"}}, "s1": {"e": WHITEOUT}})
    [tar] = here.commit(changed_only=True)
    assert tars.by_webdataset(tar) == [
        {"__key__": "d/a", "cls": b"1", "jpg": b"changed", "txt": b"added"},
        {"__key__": "d/n", "txt": b"new"},
        {"__key__": "x", "txt": b"x"},
    ]
    shutil.rmtree(tmp_path / "out")
    assert keys(*here.commit(changed_only=True, maxcount=1, sort=True)) == [["d/a"], ["d/n"], ["x"]]


def test_nothing_has_changed(tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST)
    assert here.plan(changed_only=True).steps == []
    assert here.plan(in_place=True).steps == []
    assert here.commit() == [FIRST]


# --- what is refused ---------------------------------------------------------------------------------------


def test_what_cannot_be_packed(tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST).edit({"s0": {"d": {"a": {"l": "jpg", "txt": b""}}}})
    with pytest.raises(CommitError, match=r"s0/d/a/l: is a symbolic link\n--leave-out goes ahead"):
        here.commit()
    with pytest.raises(CommitError, match=r"cannot be packed:\n.*link$"):
        here.commit(in_place=True, leave_out=True)
    [tar] = here.commit(leave_out=True)
    assert samples(tar)["d/a"] == {"cls": b"1", "jpg": b"A", "txt": b""}


def test_conflicts_are_never_left_out(tmp_path: Path) -> None:
    shard = tars.tar(tars.member(b"k.jpg"), tars.B, tars.member(b"k.cls"))
    with pytest.raises(CommitError, match="make one sample of two"):
        Set(tmp_path, shard).edit({"s0": {"b": WHITEOUT}}).commit(leave_out=True)


def test_a_sample_renamed_without_its_files_is_not_left_out(tmp_path: Path) -> None:
    upper = {"s0": {"d": {"a": WHITEOUT, "z": {OPAQUE: True, "a.jpg": b"A", "a.cls": b"1"}}}}
    here = Set(tmp_path, FIRST, view=View(names="full")).edit(upper)
    with pytest.raises(CommitError, match=r"conflict: s0/d/z/a.cls: .* is renamed together with its files"):
        here.commit(leave_out=True)


def test_extensions_that_readers_take_for_one_are_left_out(tmp_path: Path) -> None:
    [tar] = Set(tmp_path, FIRST).edit({"s0": {"d": {"a": {"JPG": b"x", "txt": b""}}}}).commit(leave_out=True)
    assert samples(tar)["d/a"] == {"cls": b"1", "jpg": b"A", "txt": b""}


def test_names_that_are_taken(tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST, SECOND)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/o-001.tar").write_bytes(b"mine")
    with pytest.raises(CommitError, match=r"o-001.tar exists already and is"):
        here.commit()
    assert os.listdir(tmp_path / "out") == ["o-001.tar"]
    assert here.out() == [b"mine"]


@pytest.mark.parametrize("output", ["s%d.tar", "./s{0..1}.tar", "s0.tar"])
def test_the_output_is_not_one_of_the_shards(output: str, tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST, SECOND) if "0.tar" not in output else Set(tmp_path, FIRST)
    with pytest.raises(CommitError, match="is one of the shards"):
        here.commit(output=f"{tmp_path}/{output}")


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (None, "--output is missing"),
        ("o-%s-%d.tar", "like %06d"),
        ("o-%.tar", "like %06d"),
        ("o-{0..0}.tar", "names 1 shard,"),
        ("o.tar", "names 1 shard,"),
        ("100%%.tar", "like %06d"),
        ("o-{a,b}%d.tar", "like %06d or in braces, not both"),
        ("o-%s.tar", "like %06d"),
        ("out{.tar", r"unbalanced braces in 'out\{.tar'"),
        ("out}.tar", "unbalanced braces"),
        ("o-{0..99999999999}.tar", "more than 10,000,000"),
        ("o-{0..1" + "0" * 5000 + "}.tar", "too large"),
    ],
)
def test_patterns_that_name_too_little(pattern: str | None, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        namer(pattern)(1)


@pytest.mark.parametrize("pattern", ["new/", "new/{0..1}/", "new/%d/..", "."])
def test_patterns_that_name_a_directory(pattern: str) -> None:
    with pytest.raises(UsageError, match=r"is a directory: name the shards in it, for example \S*/train-%06d.tar"):
        namer(pattern)(0)


@pytest.mark.parametrize("output", ["o-%d.tar.gz", "o-{0..1}.tgz", "o-%d.tar.zst"])
def test_names_of_compressed_tars(output: str, tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST, SECOND).edit(EDITS)
    with pytest.raises(
        UsageError, match=r"shards are written as plain tars.*name them \.tar and compress them afterwards"
    ):
        here.commit(output=f"{tmp_path}/out/{output}")
    assert not (tmp_path / "out").exists()


def test_patterns() -> None:
    assert namer("/o/%03d.tar")(7) == b"/o/007.tar"
    assert namer("/o/{a,b}.tar")(1) == b"/o/b.tar"
    assert namer(r"/o/\{a\}.tar")(0) == b"/o/{a}.tar"
    assert namer("o.tar")(0) == os.fsencode(os.path.abspath("o.tar"))
    assert list(itertools.islice(continued(b"/d1/t-008.tar"), 3)) == [
        b"/d1/t-009.tar",
        b"/d1/t-010.tar",
        b"/d1/t-011.tar",
    ]
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
    shutil.rmtree(tmp_path / "out")
    for step in itertools.count():
        disk = Faulty(step, Killed())
        try:
            here.commit(disk)
        except Killed:
            for path in (tmp_path / "out").glob("o-*.tar"):
                assert path.read_bytes() == whole[int(path.stem[-3:])]
            assert here.commit() == whole
            shutil.rmtree(tmp_path / "out")
        else:
            break
    assert step > 10
    assert here.out() == whole


def test_no_space(tmp_path: Path) -> None:
    """A real full disk: nothing half-written has a name, and nothing is left in the way."""
    code = """
import errno, sys, subprocess
from pathlib import Path
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", sys.argv[1]], check=True)
from tests.packing.test_plan import *
here = Set(Path(sys.argv[2]), FIRST, numbered(200))
try:
    here.commit(output=sys.argv[1] + "/%d.tar")
except OSError as error:
    assert error.errno == errno.ENOSPC
else:
    raise AssertionError
print(sorted(os.listdir(sys.argv[1])))
"""
    from tests.sets import in_own_mounts, run

    (tmp_path / "full").mkdir()
    (tmp_path / "set").mkdir()
    try:
        out = run(code, tmp_path / "full", tmp_path / "set", wrapper=in_own_mounts())
    except AssertionError as error:
        if "unshare" in str(error) or "permission denied" in str(error):
            pytest.skip("no file system can be mounted here")
        raise
    assert out == "['0.tar']\n"


def test_a_shard_that_changes_between_planning_and_writing(tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST).edit(EDITS)
    with a_tree(tmp_path, [b""], View()) as tree:
        options = CommitOptions(output=f"{tmp_path}/out/%d.tar")
        plan = Planner(tree.lower, find(tree, here.place.upper), options).make()
        here.shards[0].write_bytes(FIRST + SECOND)
        with pytest.raises(StaleShard):
            Runner(plan, Files(os.fsencode(here.place.upper)), tree.lower).write()
    assert here.out() == []


def test_a_shard_that_changes_before_the_planning(tmp_path: Path) -> None:
    """The changes are given as numbers that mean nothing in another shard."""
    here = Set(tmp_path, FIRST).edit(EDITS)
    with a_tree(tmp_path, [b""], View()) as tree:
        changes = find(tree, here.place.upper)
        here.shards[0].write_bytes(SECOND)
        tree.lower.distrust()
        with pytest.raises(StaleShard, match="start again"):
            Planner(tree.lower, changes, CommitOptions(output="%d")).make()


def test_what_lies_behind_the_end_mark_is_not_split_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert keys(*Set(tmp_path, SECOND + FIRST).commit(maxcount=1)) == [["e"], ["d/f"]]
    assert "after its end mark" in caplog.text


# --- in place ----------------------------------------------------------------------------------------------


def test_in_place(tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST, SECOND).edit(EDITS).edit({"more": {"x": {"txt": b"x"}}})
    elsewhere = here.commit()
    untouched = here.shards[1].stat()
    assert here.commit(in_place=True) == elsewhere
    assert sorted(os.listdir(tmp_path)) == ["index", "o", "out", "s0.tar", "s1.tar", "s2.tar"]
    assert here.shards[1].stat() == untouched
    assert os.listdir(tmp_path / "o/upper") == []
    assert os.listdir(tmp_path / "o/work") == []
    settings = overlay_directory.read_settings(here.place)
    assert settings is not None
    assert settings.shards[0].fingerprint == Fingerprint.at(os.fsencode(here.shards[0]))
    assert here.commit(in_place=True) == elsewhere


def test_in_place_through_a_symbolic_link(tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST, SECOND).edit(EDITS)
    (tmp_path / "real").mkdir()
    here.shards[0].rename(tmp_path / "real/data")
    here.shards[0].symlink_to("real/data")
    first, _ = here.commit(in_place=True)
    assert here.shards[0].is_symlink()
    assert (tmp_path / "real/data").read_bytes() == first
    assert os.listdir(tmp_path / "real") == ["data"]


def test_in_place_two_links_to_one_shard(tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST, SECOND).edit(EDITS)
    here.shards[1].unlink()
    here.shards[1].symlink_to("s0.tar")
    with pytest.raises(CommitError, match="is several shards"):
        here.commit(in_place=True)


class Everything:
    """A set and its overlay, as they were: to be put back for another try."""

    def __init__(self, here: Set, name: str = "kept") -> None:
        self.here = here
        self.kept = here.home.with_name(name)
        shutil.copytree(here.home, self.kept, symlinks=True, copy_function=self._copy)

    def _copy(self, source: str, target: str, **_: Any) -> None:
        subprocess.run(["cp", "-a", source, target], check=True)

    def put_back(self) -> None:
        shutil.rmtree(self.here.home)
        subprocess.run(["cp", "-a", self.kept, self.here.home], check=True)

    def stamp_log(self) -> None:
        """Let the log of a commit name the copies of the shards that it has written."""
        log = self.here.place.work / "commit.log"
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        for line in lines:
            line["file"][0] = os.stat(line["target"]).st_ino
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("merge", [False, True])
def test_in_place_killed_at_every_step(merge: bool, tmp_path: Path) -> None:
    """After the kill there is the old set or the new one, and the commit can be finished.

    With names that depend on other shards, or other members, which a second look would read differently.
    """
    shards = (
        tars.tar(tars.A, tars.member(b"a.txt", b"second"), tars.member(b"k.txt", b"k")),
        tars.tar(tars.A, tars.B),
    )
    edits: dict[Any, Any] = {"a": {"txt": WHITEOUT}, "n": {"txt": b"new"}}
    edits = (
        {**edits, "a~s1": {"txt": b"other"}}
        if merge
        else {"s0": edits, "s1": {"a": WHITEOUT}, "t": {"x": edits["n"]}}
    )
    (tmp_path / "set").mkdir()
    here = Set(tmp_path / "set", *shards, merge=merge).edit(edits)
    before = Everything(here)
    whole = here.commit(in_place=True)
    assert len(whole) == 3
    for step in itertools.count():
        before.put_back()
        disk = Faulty(step, Killed())
        try:
            here.commit(disk, in_place=True)
        except Killed:
            for old, path in zip(shards, here.shards, strict=True):
                assert path.read_bytes() in (old, whole[here.shards.index(path)])
            if here.commit(in_place=True) != whole:
                raise AssertionError(step) from None
            assert os.listdir(tmp_path / "set/o/upper") == []
            assert not unfinished(here.place)
        else:
            break
    assert step > 20


class PowerCut(Faulty):
    """Remembers what is not on disk yet, so that `lose` can take it away as a power cut might.

    What was written and not synced is gone, and so are new names and renames in directories that were not synced.
    """

    def __init__(self, step: int, attic: Path) -> None:
        self._attic = attic
        self._dirty: set[str] = set()
        self._synced: dict[str, int] = {}
        self._renamed: list[tuple[bytes, bytes, Path | None]] = []
        super().__init__(step, Killed())

    def write(self, fd: int, data: bytes | bytearray) -> None:
        self._dirty.add(os.readlink(f"/proc/self/fd/{fd}"))
        super().write(fd, data)

    def copy(self, source: int, target: int, start: int, count: int, path: bytes | None = None) -> None:
        self._dirty.add(os.readlink(f"/proc/self/fd/{target}"))
        super().copy(source, target, start, count)

    def sync(self, fd: int) -> None:
        super().sync(fd)
        path = os.readlink(f"/proc/self/fd/{fd}")
        self._dirty.discard(path)
        self._synced[path] = os.fstat(fd).st_size

    def rename(self, source: bytes, target: bytes) -> None:
        kept = None
        if os.path.isfile(target):
            kept = self._attic / str(len(self._renamed))
            kept.unlink(missing_ok=True)
            os.link(target, kept)
        assert os.fsdecode(source) not in self._dirty, "renamed before it was synced"
        super().rename(source, target)
        self._renamed.append((source, target, kept))

    def sync_directory(self, path: bytes) -> None:
        super().sync_directory(path)
        self._renamed = [one for one in self._renamed if os.path.dirname(one[1]) != path]

    def _lose(self) -> None:
        for path in self._dirty:
            with contextlib.suppress(FileNotFoundError):
                os.truncate(path, self._synced.get(path, 0))
        for source, target, kept in reversed(self._renamed):
            os.rename(target, source)
            if kept is not None:
                # Not a rename back: the link is the same file, and its name would stay.
                os.rename(kept, target)


def test_in_place_and_the_power_fails_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a kill, but what was not synced is gone, too."""

    def without_ctime(found: os.stat_result) -> Fingerprint:
        # Only a real power cut gives a file its old ctime back.
        return Fingerprint(found.st_size, found.st_mtime_ns, found.st_ino)

    monkeypatch.setattr(Fingerprint, "of", without_ctime)
    (tmp_path / "set").mkdir()
    (tmp_path / "attic").mkdir()
    here = (
        Set(tmp_path / "set", FIRST, SECOND)
        .edit(EDITS)
        .edit({"s1": {"e": {"txt": b"new"}}, "t": {"x": {"y": b""}}})
    )
    before = Everything(here)
    whole = here.commit(in_place=True)
    for step in itertools.count():
        before.put_back()
        disk = PowerCut(step, tmp_path / "attic")
        try:
            here.commit(disk, in_place=True)
        except Killed:
            disk._lose()
            assert here.commit(in_place=True) == whole
            assert os.listdir(tmp_path / "set/o/upper") == []
        else:
            break
    assert step > 20


def test_in_place_without_space(tmp_path: Path) -> None:
    """Before the first shard is replaced nothing has happened; after it, the commit has to be finished."""
    (tmp_path / "set").mkdir()
    here = Set(tmp_path / "set", FIRST, SECOND).edit(EDITS).edit({"s1": {"e": {"txt": b"new"}}})
    before = Everything(here)
    whole = here.commit(in_place=True)
    states = set()
    for step in itertools.count():
        before.put_back()
        try:
            here.commit(Faulty(step, OSError(errno.ENOSPC, "full")), in_place=True)
        except OSError:
            if not unfinished(here.place) and os.listdir(tmp_path / "set/o/upper"):
                assert here.set() == [FIRST, SECOND]
                states.add("old")
            else:
                states.add("begun")
            assert not list((tmp_path / "set").glob(".wdsfs*"))
            assert here.commit(in_place=True) == whole
        else:
            break
    assert states == {"old", "begun"}


def test_in_place_on_a_full_file_system(tmp_path: Path) -> None:
    """Nothing is begun that a real small disk has no room for, and the message has the numbers."""
    code = """
import sys, subprocess
from pathlib import Path
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", sys.argv[1]], check=True)
from tests.packing.test_plan import *
from wdsfs.errors import bytes_text
here = Set(Path(sys.argv[1]), *[numbered(110, size=500)] * 4)
here.edit({f"s{n}": {"001": {"txt": bytes(1000)}} for n in range(4)})
before = here.set()
sizes = [step.output.length for step in here.plan(in_place=True).steps]
growth = sum(sizes) - sum(map(len, before))
for jobs in (4, 1):
    try:
        here.commit(in_place=True, jobs=jobs)
    except CommitError as error:
        print(str(error).replace(bytes_text(growth + 4 * len(before[0])), "NEEDED"))
        assert here.set() == before and not unfinished(here.place)
    else:
        print("done", samples(here.set()[3])["001"] == {"txt": bytes(1000)})
"""
    from tests.sets import in_own_mounts, run

    (tmp_path / "small").mkdir()
    try:
        out = run(code, tmp_path / "small", wrapper=in_own_mounts())
    except AssertionError as error:
        if "unshare" in str(error) or "permission denied" in str(error):
            pytest.skip("no file system can be mounted here")
        raise
    refused, done = out.splitlines()
    assert refused.startswith(f"{tmp_path}/small: the new shards need NEEDED on this file system")
    assert "are free: make room, write fewer shards at a time (--jobs, now 4)" in refused
    assert done == "done True"


def test_an_old_shard_with_another_name_makes_no_room(tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST, SECOND)
    [step] = here.edit(EDITS).plan(in_place=True).steps
    assert _freed_by(step) == len(FIRST)
    os.link(here.shards[0], tmp_path / "backup")
    assert _freed_by(step) == 0


def half_way(home: Path, merge: bool = False) -> tuple[Set, list[bytes]]:
    """A set whose commit in place was killed when its first shard was replaced, and what it would become."""
    home.mkdir()
    here = Set(home, FIRST, SECOND, merge=merge)
    here.edit({"d": {"a": {"jpg": b"changed"}}, "e": {"txt": b"new"}} if merge else EDITS)
    here.edit({} if merge else {"s1": {"e": {"txt": b"new"}}, "more": {"x": {"txt": b"x"}}})
    before = Everything(here)
    whole = here.commit(in_place=True)
    before.put_back()
    for step in itertools.count():
        with pytest.raises(Killed):
            here.commit(Faulty(step, Killed()), in_place=True)
        if here.shards[0].read_bytes() != FIRST:
            break
    return here, whole


def chmod(path: Path) -> None:
    path.chmod(0o600)


def touch(path: Path) -> None:
    os.utime(path)


def move_and_back(path: Path) -> None:
    path.rename(path.with_suffix(".away"))
    path.with_suffix(".away").rename(path)


def copy_over(path: Path) -> None:
    shutil.copy(path, path.with_suffix(".copy"))
    path.with_suffix(".copy").rename(path)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize(
    ("act", "number"), [*((act, 1) for act in (chmod, touch, move_and_back, copy_over)), (touch, 0), (chmod, 0)]
)
def test_in_place_when_a_shard_has_another_time(
    act: Any, number: int, merge: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of one that is still to be replaced, or that is replaced: its members are what they were."""
    here, whole = half_way(tmp_path / "set", merge)
    act(here.shards[number])
    assert here.commit(in_place=True) == whole
    assert os.listdir(here.home / "o/upper") == []
    assert ("the same members" in caplog.text) == (number == 1)


def test_in_place_when_the_content_of_a_member_was_written(tmp_path: Path) -> None:
    """It is in the new shard, as if the commit were planned now."""
    here, _ = half_way(tmp_path / "set")
    content = SECOND.replace(b"f" + bytes(511), b"g" + bytes(511))
    assert content != SECOND
    here.shards[1].write_bytes(content)
    assert samples(here.commit(in_place=True)[1]) == {"e": {"txt": b"new"}, "d/f": {"txt": b"g"}}


def test_in_place_when_somebody_else_has_changed_a_shard(tmp_path: Path) -> None:
    """It cannot be finished, but abandoned: the rest is planned anew over what is there now."""
    here, whole = half_way(tmp_path / "set")
    other = numbered(3)
    here.shards[1].write_bytes(other)
    for _ in range(2):
        with pytest.raises(CommitError, match=r"s1.tar: changed by somebody else.*--abandon"):
            here.commit(in_place=True)
    assert here.set() == [whole[0], other]
    done, aside = here.abandon()
    assert ([step.number for step in done], aside) == ([0], None)
    assert not unfinished(here.place)
    assert os.listdir(here.home / "o/work") == []
    assert sorted(os.listdir(here.home / "o/upper")) == ["more", "s1"]
    assert here.set() == [whole[0], other]
    contents = here.commit(in_place=True)
    assert [contents[0], contents[2]] == [whole[0], whole[2]]
    assert samples(contents[1]) == {**samples(other), "e": {"txt": b"new"}}


def test_in_place_when_a_shard_has_changed_before_the_first_was_replaced(tmp_path: Path) -> None:
    """Then nothing is half done, and the commit is planned anew."""
    here = Set(tmp_path, FIRST, SECOND).edit(EDITS)
    for step in itertools.count():
        with pytest.raises(Killed):
            here.commit(Faulty(step, Killed()), in_place=True)
        if unfinished(here.place):
            break
    here.shards[0].write_bytes(SECOND)
    with pytest.raises(CommitError, match=r"s0.tar: changed by somebody else.*repeat the command"):
        here.commit(in_place=True)
    assert not unfinished(here.place)
    assert keys(*here.commit(in_place=True)) == [["e", "d/f", "d/a", "d/n"], ["e", "d/f"]]


@pytest.mark.parametrize("number", [1, 2])
def test_in_place_when_a_new_shard_is_somebody_else_s(number: int, tmp_path: Path) -> None:
    """The files of the further shards that are written go from the overlay, those of the others stay."""
    here = Set(tmp_path, FIRST).edit({"more": {"x": {"txt": b"x"}}, "next": {"y": {"txt": b"y", "cls": b"1"}}})
    for step in itertools.count():
        with pytest.raises(Killed):
            here.commit(Faulty(step, Killed()), in_place=True)
        if (tmp_path / "s1.tar").exists():
            break
    (tmp_path / f"s{number}.tar").unlink(missing_ok=True)
    (tmp_path / f"s{number}.tar").write_bytes(b"mine")
    with pytest.raises(CommitError, match=f"s{number}.tar: changed by somebody else"):
        here.commit(in_place=True)
    done, _ = here.abandon()
    assert [step.output.target for step in done] == ([os.fsencode(tmp_path / "s1.tar")] if number == 2 else [])
    assert sorted(os.listdir(tmp_path / "o/upper")) == (["next"] if number == 2 else ["more", "next"])
    assert sorted(os.listdir(tmp_path / "o/upper/next/y")) == ["cls", "txt"]


def test_abandoning_a_merged_commit_puts_the_overlay_aside(tmp_path: Path) -> None:
    """Names in a merged tree depend on all shards, so nobody can tell what the rest of it means now."""
    here, whole = half_way(tmp_path / "set", merge=True)
    here.shards[1].write_bytes(numbered(3))
    _, aside = here.abandon()
    assert aside is not None
    assert (aside / "e/txt").read_bytes() == b"new"
    assert os.listdir(here.home / "o/upper") == []
    assert here.commit(in_place=True) == [whole[0], numbered(3)]


@pytest.mark.parametrize("merge", [False, True])
def test_abandoning_is_killed_at_every_step(merge: bool, tmp_path: Path) -> None:
    here, whole = half_way(tmp_path / "set", merge)
    here.shards[1].write_bytes(numbered(3))
    before = Everything(here, "again")
    before.stamp_log()
    for step in itertools.count():
        before.put_back()
        before.stamp_log()
        try:
            here.abandon(Faulty(step, Killed()))
        except Killed:
            if unfinished(here.place):
                here.abandon()
        else:
            break
        assert here.set() == [whole[0], numbered(3)]
        assert sorted(os.listdir(here.home / "o/upper")) == ([] if merge else ["more", "s1"])
        aside = [path.read_bytes() for path in here.home.glob("o/upper.abandoned-*/e/txt")]
        assert aside == ([b"new"] if merge else [])
    assert step > 2


LEAVINGS: dict[Any, Any] = {
    "s0": {
        "d": {
            "a": {"jpg": b"changed", "jpg~": b"old"},
            "n": {OPAQUE: True, "txt": b"new", ".ipynb_checkpoints": {"txt": b"x"}},
        }
    },
    "s1": {"e": {"txt": b"new"}},
    "Thumbs.db": b"T",
}
KEPT = {"Thumbs.db": b"T", "s0/d/a/jpg~": b"old", "s0/d/n/.ipynb_checkpoints/txt": b"x"}


def files_of(top: Path) -> dict[str, bytes]:
    return {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kernel", [False, True])
def test_in_place_keeps_what_it_leaves_out(kernel: bool, tmp_path: Path) -> None:
    """Killed at any step, too, and no directory that stays hides what is in the shards now."""
    (tmp_path / "set").mkdir()
    here = Set(tmp_path / "set", FIRST, SECOND).edit({} if kernel else LEAVINGS)
    if kernel:
        bare(here, LEAVINGS)
    before = Everything(here)
    whole = here.commit(in_place=True)
    for step in itertools.count():
        assert here.set() == whole
        assert samples(whole[0])["d/n"] == {"txt": b"new"}
        assert files_of(here.place.upper) == KEPT
        assert here.commit(in_place=True) == whole
        assert here.place.upper.joinpath("s0").stat().st_mode == before.kept.joinpath("o").stat().st_mode
        before.put_back()
        try:
            here.commit(Faulty(step, Killed()), in_place=True)
        except Killed:
            here.commit(in_place=True)
        else:
            break
    assert step > 20


def test_abandoning_keeps_what_was_left_out(tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST, SECOND).edit(LEAVINGS)
    for step in itertools.count():
        with pytest.raises(Killed):
            here.commit(Faulty(step, Killed()), in_place=True)
        if here.shards[0].read_bytes() != FIRST:
            break
    whole = here.shards[0].read_bytes()
    here.shards[1].write_bytes(numbered(3))
    here.abandon()
    assert files_of(here.place.upper) == {**KEPT, "s1/e/txt": b"new"}
    assert here.commit(in_place=True)[0] == whole
    assert files_of(here.place.upper) == KEPT


@pytest.mark.parametrize("ended_by", ["finish", "abandon"])
@pytest.mark.parametrize("merge", [False, True])
def test_a_shard_is_replaced_when_only_the_overlay_is_left_to_be_emptied(
    merge: bool, ended_by: str, tmp_path: Path
) -> None:
    """All shards were there, so nothing of the overlay is needed any more, and the new one is not its business."""
    (tmp_path / "set").mkdir()
    here = Set(tmp_path / "set", FIRST, SECOND, merge=merge)
    here.edit({"d": {"a": {"jpg": b"changed"}}, "e": {"txt": b"new"}} if merge else EDITS)
    before = Everything(here)
    whole = here.commit(in_place=True)
    emptying = 0
    for step in itertools.count():
        before.put_back()
        try:
            here.commit(Faulty(step, Killed()), in_place=True)
        except Killed:
            log = here.place.work / "commit.log"
            if not unfinished(here.place) or b"published" not in log.read_bytes():
                continue
            emptying += 1
            (here.home / "other").write_bytes(numbered(3))
            (here.home / "other").rename(here.shards[0])
            if ended_by == "abandon":
                done, aside = here.abandon()
                assert (aside, len(done)) == (None, 2 if merge else 1)
            else:
                here.commit(in_place=True)
            assert here.set() == [numbered(3), *whole[1:]]
            assert os.listdir(here.home / "o/upper") == os.listdir(here.home / "o/work") == []
        else:
            break
    assert emptying >= 5


def test_abandoning_a_commit_of_a_bare_upper(tmp_path: Path) -> None:
    """Changes made since the commit began stay."""
    here = Set(tmp_path, FIRST, SECOND)
    bare(here, {**EDITS, "s1": {"e": {"txt": b"new"}}})
    for step in itertools.count():
        with pytest.raises(Killed):
            here.commit(Faulty(step, Killed()), in_place=True)
        if here.shards[0].read_bytes() != FIRST:
            break
    here.shards[1].write_bytes(numbered(3))
    (tmp_path / "o/s0/late").write_bytes(b"")
    with pytest.raises(CommitError, match="--abandon"):
        here.commit(in_place=True)
    here.abandon()
    assert sorted(os.listdir(tmp_path)) == ["index", "o", "s0.tar", "s1.tar"]
    assert sorted(path.relative_to(tmp_path / "o").as_posix() for path in (tmp_path / "o").glob("**/*")) == [
        *("s0", "s0/late", "s1", "s1/e", "s1/e/txt")
    ]


def test_a_plan_as_json(tmp_path: Path) -> None:
    shard = tars.tar(tars.pax({b"mtime": b"77"}, b"g"), tars.A, tars.member(b"\xff.txt", b"x"), end=b"")
    here = Set(tmp_path, shard).edit({"s0": {b"\xff": {"txt": b"1"}, "n": {"cls": b""}}})
    plan = here.plan(in_place=True)
    again = plan_from_json(plan_to_json(plan))
    assert plan == again
    assert {type(piece).__name__ for piece in again.steps[0].output.pieces} == {
        "CopiedRange",
        "NewMember",
        "Zeros",
    }


# --- uppers of our own mounts ------------------------------------------------------------------------------


def test_an_upper_that_a_writable_tree_wrote(tmp_path: Path) -> None:
    """The bytes and names are what the tree showed; a renamed sample stays where it was."""
    here = Set(tmp_path, FIRST, SECOND)
    with a_tree(tmp_path, [b"", b""], View()) as tree:
        mount = writables.Mount(tree, tmp_path / "o")
        mount.rename(b"s0/d/a", b"s0/d/z")
        mount.put(b"s0/d/z/jpg", b"changed")
        mount.rename(b"s0/d/b/jpg", b"s0/d/b/png")
        mount.mkdir(b"s1/n")
        mount.put(b"s1/n/txt", b"new")
        mount.unlink(b"s1/e/txt")
        mount.rmdir(b"s1/e")
        mount.put(b"s1/d/f/txt", b"")
        mount.unlink(b"s0/c/txt")
        mount.put(b"s0/c/txt", b"written again")
        mount.close()
        told = [(one.kind, one.path) for one in find(tree, here.place.upper).samples]
    first, second = here.commit()
    assert told == [
        *(("renamed", b"s0/d/z"), ("changed", b"s0/d/b"), ("changed", b"s0/c")),
        *(("removed", b"s1/e"), ("changed", b"s1/d/f"), ("added", b"s1/n")),
    ]
    assert tars.by_webdataset(first) == [
        {"__key__": "d/z", "cls": b"1", "jpg": b"changed"},
        {"__key__": "d/b", "cls": b"2", "png": b"B"},
        {"__key__": "c", "txt": b"written again"},
    ]
    assert tars.by_webdataset(second) == [{"__key__": "d/f", "txt": b""}, {"__key__": "n", "txt": b"new"}]


# --- uppers of the kernel ----------------------------------------------------------------------------------


def bare(here: Set, upper: Mapping[Any, Any]) -> None:
    """The overlay is just an upper, as the kernel's overlayfs wrote it."""
    shutil.rmtree(here.home / "o")
    write_upper(here.home / "o", upper)


def test_a_bare_upper(tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST, SECOND).edit(EDITS)
    whole = here.commit()
    bare(here, EDITS)
    shutil.rmtree(tmp_path / "out")
    assert here.commit() == whole
    assert here.commit(in_place=True) == whole
    assert sorted(os.listdir(tmp_path)) == ["index", "o", "out", "s0.tar", "s1.tar"]
    assert os.listdir(tmp_path / "o") == []


def test_a_bare_upper_killed_at_every_step(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    here = Set(tmp_path / "set", FIRST, SECOND)
    bare(here, EDITS)
    before = Everything(here)
    whole = here.commit(in_place=True)
    for step in itertools.count():
        before.put_back()
        try:
            here.commit(Faulty(step, Killed()), in_place=True)
        except Killed:
            if not unfinished(here.place):
                assert (here.set() == whole) != (tmp_path / "set/o/s0").exists()
                continue
            late = tmp_path / "set/o/s1/late"
            late.parent.mkdir()
            late.write_bytes(b"the kernel knows nothing of commits")
            assert here.commit(in_place=True) == whole
            assert late.exists()
        else:
            break


def can_mount() -> bool:
    script = """
        mount -t tmpfs t /mnt && cd /mnt && mkdir l u w m &&
        mount -t overlay -o lowerdir=l,upperdir=u,workdir=w o m
    """
    test = [*sets.in_own_mounts(), "sh", "-c", script]
    return os.geteuid() == 0 and subprocess.run(test, check=False, capture_output=True).returncode == 0


OVERLAY_SCRIPT = """
set -e
mount -t tmpfs t "$1/mnt"; cd "$1/mnt"; mkdir u w m
mount -t overlay -o lowerdir="$1/lower",upperdir=u,workdir=w o m
cd m/s0
printf changed > d/a/jpg; printf added > d/a/txt
rm -r d/b; mkdir d/n; printf new > d/n/txt
mv c c2
rm -r ../s1/e; mkdir ../s1/e; printf again > ../s1/e/cls
chmod 600 ../s1/d/f/txt
cd ../..; umount m
cp -a u "$1/o"
"""


@pytest.mark.skipif(not can_mount(), reason="no overlayfs can be mounted here")
def test_an_upper_that_the_kernel_wrote(tmp_path: Path) -> None:
    """Over a plain directory that mirrors the mount."""
    here = Set(tmp_path, FIRST, SECOND)
    shutil.rmtree(tmp_path / "o")
    with a_tree(tmp_path, [b"", b""], View()) as tree:
        from wdsfs.tree import content

        for path in (
            b"s0/d/a/cls",
            b"s0/d/a/jpg",
            b"s0/d/b/cls",
            b"s0/d/b/jpg",
            b"s0/c/txt",
            b"s1/e/txt",
            b"s1/d/f/txt",
        ):
            node = tree.resolve(path)
            file = tmp_path / "lower" / os.fsdecode(path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.read(tree.content(node.inode), 0, node.size))
            os.utime(file, ns=(node.mtime_ns, node.mtime_ns))
    (tmp_path / "mnt").mkdir()
    script = [*sets.in_own_mounts(), "sh", "-c", OVERLAY_SCRIPT, "-", tmp_path]
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


# --- anything ----------------------------------------------------------------------------------------------

KEYS = ["a", "b", "d/a", "d/c", "d"]
EXTENSIONS = ["cls", "jpg", "x.y"]
EditList = list[tuple[str, str, str, bytes]]
Model = dict[str, dict[str, bytes]]

shard_strategy = st.lists(
    st.tuples(st.sampled_from(KEYS), st.lists(st.sampled_from(EXTENSIONS), min_size=1, unique=True)),
    max_size=4,
    unique_by=lambda one: one[0],
)
edits_strategy = st.lists(
    st.tuples(
        st.sampled_from(["write", "remove", "drop", "renew"]),
        st.sampled_from([*KEYS, "n", "e/f"]),
        st.sampled_from([*EXTENSIONS, "txt"]),
        st.binary(max_size=3),
    ),
    max_size=8,
)


def apply(model: Model, edits: EditList, upper: Path, lower: Mapping[str, Sequence[str]]) -> None:
    """Do the edits to a model, and to an upper as overlayfs would."""
    for what, key, extension, content in edits:
        directory = upper / "s0" / key
        if what in ("remove", "drop") and key not in model:
            continue
        if what == "drop" and any(other.startswith(key + "/") for other in (*model, *lower)):
            continue  # a directory with others in it cannot go
        if what == "write":
            model.setdefault(key, {})[extension] = content
            for one in reversed([directory, *directory.parents]):
                if _is_whiteout(one):
                    _recreate(one)
            directory.mkdir(parents=True, exist_ok=True)
            (directory / extension).unlink(missing_ok=True)
            (directory / extension).write_bytes(content)
        elif what == "remove" and extension in model[key]:
            _remove(directory, extension, extension in lower.get(key, ()))
            del model[key][extension]
        elif what in ("drop", "renew") and key in model:
            if any(other.startswith(key + "/") for other in (*model, *lower)):
                continue
            shutil.rmtree(directory, ignore_errors=True)
            del model[key]
            if key in lower and not _is_whiteout(directory):
                directory.parent.mkdir(parents=True, exist_ok=True)
                os.mknod(directory, 0o020000)
    for key in [key for key, columns in model.items() if not columns]:
        del model[key]


def _is_whiteout(path: Path) -> bool:
    return path.is_char_device()


def _recreate(directory: Path) -> None:
    directory.unlink()
    write_upper(directory, {OPAQUE: True})


def _remove(directory: Path, name: str, below: bool) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if not _is_whiteout(directory / name):
        (directory / name).unlink(missing_ok=True)
        if below:
            os.mknod(directory / name, 0o020000)


@pytest.mark.root
@settings(max_examples=60, deadline=None)
@given(shard_strategy, edits_strategy, st.sampled_from([{}, {"maxcount": 2}, {"sort": True}, {"in_place": True}]))
def test_any_edits(shard: list[tuple[str, list[str]]], edits: EditList, options: dict[str, Any]) -> None:
    """The samples are those of the model: the old ones in their order, then the new ones sorted."""
    members = [(key, one, f"{key}.{one}".encode()) for key, extensions in shard for one in extensions]
    lower = dict(shard)
    model: Model = {key: {} for key, _ in shard}
    for key, extension, content in members:
        model[key][extension] = content
    with tempfile.TemporaryDirectory() as name:
        tar = tars.tar(*(tars.member(f"{key}.{one}".encode(), content) for key, one, content in members))
        here = Set(Path(name), tar)
        apply(model, edits, here.place.upper, lower)
        contents = here.commit(**options)
        found = {key: columns for content in contents for key, columns in samples(content).items()}
        assert found == model
        order = [key for key in lower if key in model] + sorted(key for key in model if key not in lower)
        assert [*itertools.chain(*keys(*contents))] == (sorted(order) if "sort" in options else order)
        for content in contents:
            with tarfile.open(fileobj=io.BytesIO(content)) as archive:
                archive.getmembers()
