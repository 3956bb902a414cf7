"""Commits in place: what is left when one is stopped, and how it is finished or abandoned."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tars, writables
from tests.packing.overlays import (
    EDITS,
    FIRST,
    SECOND,
    Everything,
    Faulty,
    Killed,
    Set,
    files_of,
    full,
    half_way,
    keys,
    kill_when,
    numbered,
    on_small_disks,
    samples,
    stops,
)
from tests.uppers import OPAQUE, WHITEOUT
from wdsfs.errors import CommitError
from wdsfs.overlay import overlay_directory
from wdsfs.overlay.overlay_directory import unfinished
from wdsfs.packing import replacement
from wdsfs.packing.replacement import plan_from_json, plan_to_json
from wdsfs.packing.runner import _freed_by
from wdsfs.shards import Fingerprint
from wdsfs.source import TarReader


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory: thousands of commits wait for the disk otherwise."""
    with writables.fast_directory() as path:
        yield path


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


DIGEST = "0123456789abcdef" * 4
KEY = f"SHA256E-s10240--{DIGEST}.tar"


@pytest.mark.parametrize(
    "place",
    [
        f"blobs/{DIGEST}",  # the cache of the Hugging Face hub
        f"blobs/{DIGEST[:40]}",
        f".dvc/cache/files/md5/{DIGEST[:2]}/{DIGEST[2:32]}",
        f".git/annex/objects/f7/W3/{KEY}/{KEY}",
        ".git/annex/objects/f7/W3/WORM-s9-m9--s0.tar/WORM-s9-m9--s0.tar",
    ],
)
def test_in_place_through_a_link_into_a_store_that_others_share(place: str, tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST, SECOND).edit(EDITS)
    stored = tmp_path / place
    stored.parent.mkdir(parents=True)
    here.shards[0].rename(stored)
    here.shards[0].symlink_to(place)
    with pytest.raises(CommitError, match=r"s0\.tar is a link to .*--output.*cp --remove-destination"):
        here.commit(in_place=True)
    assert stored.read_bytes() == FIRST
    subprocess.run(["cp", "--remove-destination", stored, here.shards[0]], check=True)
    first, _ = here.commit(in_place=True)
    assert (stored.read_bytes(), here.shards[0].read_bytes()) == (FIRST, first)


def test_in_place_the_other_names_of_a_shard_keep_it(tmp_path: Path) -> None:
    """As in a copy by `cp -al`, or in a cache that makes hard links. So the old shard makes no room."""
    here = Set(tmp_path, FIRST, SECOND).edit(EDITS)
    [step] = here.plan(in_place=True).steps
    assert _freed_by(step) == len(FIRST)
    (tmp_path / "backup").hardlink_to(here.shards[0])
    assert _freed_by(step) == 0
    first, _ = here.commit(in_place=True)
    assert ((tmp_path / "backup").read_bytes(), here.shards[0].read_bytes()) == (FIRST, first)


def test_in_place_two_links_to_one_shard(tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST, SECOND).edit(EDITS)
    here.shards[1].unlink()
    here.shards[1].symlink_to("s0.tar")
    with pytest.raises(CommitError, match="is several shards"):
        here.commit(in_place=True)


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
    if merge:
        edits = {**edits, "a~s1": {"txt": b"other"}}
    else:
        edits = {"s0": edits, "s1": {"a": WHITEOUT}, "t": {"x": edits["n"]}}
    here = Set(tmp_path / "set", *shards, merge=merge).edit(edits)
    before = Everything(here)
    whole = here.commit(in_place=True)
    assert len(whole) == 3
    for disk in stops(before.put_back, functools.partial(here.commit, in_place=True), least=20):
        for number, path in enumerate(here.shards):
            assert path.read_bytes() in (shards[number], whole[number])
        assert here.commit(in_place=True) == whole, disk.step
        assert os.listdir(tmp_path / "set/o/upper") == []
        assert not unfinished(here.place)


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

    def copy(
        self, source: int | TarReader, target: int, start: int, count: int, path: bytes | None = None
    ) -> None:
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
    # Only a real power cut gives a file its old ctime back.
    monkeypatch.setattr(Fingerprint, "of", lambda file: Fingerprint(file.st_size, file.st_mtime_ns, file.st_ino))
    (tmp_path / "attic").mkdir()
    here = Set(tmp_path / "set", FIRST, SECOND).edit(EDITS)
    here.edit({"s1": {"e": {"txt": b"new"}}, "t": {"x": {"y": b""}}})
    before = Everything(here)
    whole = here.commit(in_place=True)
    run = functools.partial(here.commit, in_place=True)
    for disk in stops(before.put_back, run, lambda step: PowerCut(step, tmp_path / "attic"), least=20):
        disk._lose()
        assert here.commit(in_place=True) == whole
        assert os.listdir(tmp_path / "set/o/upper") == []


def test_in_place_without_space(tmp_path: Path) -> None:
    """Before the first shard is replaced nothing has happened; after it, the commit has to be finished."""
    here = Set(tmp_path / "set", FIRST, SECOND).edit(EDITS).edit({"s1": {"e": {"txt": b"new"}}})
    before = Everything(here)
    whole = here.commit(in_place=True)
    states = set()
    for _ in stops(before.put_back, functools.partial(here.commit, in_place=True), full):
        begun = unfinished(here.place) or not os.listdir(tmp_path / "set/o/upper")
        states.add("begun" if begun else "old")
        assert begun or here.set() == [FIRST, SECOND]
        assert not list((tmp_path / "set").glob(".wdsfs*"))
        assert here.commit(in_place=True) == whole
    assert states == {"old", "begun"}


def test_in_place_on_a_full_file_system(tmp_path: Path) -> None:
    """Nothing is begun that a real small disk has no room for, and the message has the numbers."""
    code = """
import sys
from wdsfs.errors import CommitError, bytes_text
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", sys.argv[1]], check=True)
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
    refused, done = on_small_disks(code, tmp_path / "small").splitlines()
    assert refused.startswith(f"{tmp_path}/small: the new shards need NEEDED on this file system")
    assert "are free: make room, write fewer shards at a time (--jobs, now 4)" in refused
    assert done == "done True"


ACTS: dict[str, Callable[[Path], object]] = {
    "chmod": lambda path: path.chmod(0o600),
    "touch": os.utime,
    "move and back": lambda path: path.rename(path.with_suffix(".away")).rename(path),
    "copy over": lambda path: Path(shutil.copy(path, path.with_suffix(".copy"))).rename(path),
}


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize(("act", "number"), [*((act, 1) for act in ACTS), ("touch", 0), ("chmod", 0)])
def test_in_place_when_a_shard_has_another_time(
    act: str, number: int, merge: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of one that is still to be replaced, or that is replaced: its members are what they were."""
    here, whole = half_way(tmp_path / "set", merge)
    ACTS[act](here.shards[number])
    assert here.commit(in_place=True) == whole
    assert os.listdir(here.home / "o/upper") == []
    assert ("the same members" in caplog.text) == (number == 1)


def test_in_place_where_inode_numbers_do_not_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new shard that is there already is known by its size and time."""
    here, whole = half_way(tmp_path / "set")
    monkeypatch.setattr(replacement, "lasting_number", lambda status: 0)
    shutil.copy2(here.shards[0], tmp_path / "same")
    os.replace(tmp_path / "same", here.shards[0])
    assert here.commit(in_place=True) == whole


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
        with pytest.raises(CommitError, match=r"s1.tar: changed by another program.*--abandon"):
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
    kill_when(here, lambda: unfinished(here.place))
    here.shards[0].write_bytes(SECOND)
    with pytest.raises(CommitError, match=r"s0.tar: changed by another program.*repeat the command"):
        here.commit(in_place=True)
    assert not unfinished(here.place)
    assert keys(*here.commit(in_place=True)) == [["e", "d/f", "d/a", "d/n"], ["e", "d/f"]]


@pytest.mark.parametrize("number", [1, 2])
def test_in_place_when_a_new_shard_is_somebody_else_s(number: int, tmp_path: Path) -> None:
    """The files of the further shards that are written go from the overlay, those of the others stay."""
    here = Set(tmp_path, FIRST).edit({"more": {"x": {"txt": b"x"}}, "next": {"y": {"txt": b"y", "cls": b"1"}}})
    kill_when(here, (tmp_path / "s1.tar").exists)
    (tmp_path / f"s{number}.tar").unlink(missing_ok=True)
    (tmp_path / f"s{number}.tar").write_bytes(b"mine")
    with pytest.raises(CommitError, match=f"s{number}.tar: changed by another program"):
        here.commit(in_place=True)
    done, _ = here.abandon()
    assert [step.target for step in done] == ([os.fsencode(tmp_path / "s1.tar")] if number == 2 else [])
    assert sorted(os.listdir(tmp_path / "o/upper")) == (["next"] if number == 2 else ["more", "next"])
    assert sorted(os.listdir(tmp_path / "o/upper/next/y")) == ["cls", "txt"]


@pytest.mark.parametrize("merge", [False, True])
def test_abandoning_is_killed_at_every_step(merge: bool, tmp_path: Path) -> None:
    """Names in a merged tree depend on all shards, so nobody can tell what the rest of an overlay means then."""
    here, whole = half_way(tmp_path / "set", merge)
    here.shards[1].write_bytes(numbered(3))
    before = Everything(here, "again")
    before.stamp_log()

    def put_back() -> None:
        before.put_back()
        before.stamp_log()

    for _ in stops(put_back, here.abandon, least=2):
        if unfinished(here.place):
            here.abandon()
        assert here.set() == [whole[0], numbered(3)]
        assert sorted(os.listdir(here.home / "o/upper")) == ([] if merge else ["more", "s1"])
        aside = [path.read_bytes() for path in here.home.glob("o/upper.abandoned-*/e/txt")]
        assert aside == ([b"new"] if merge else [])
    if merge:
        assert here.commit(in_place=True) == [whole[0], numbered(3)]


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


def test_in_place_keeps_what_it_leaves_out(tmp_path: Path) -> None:
    """Killed at any step, too, and no directory that stays hides what is in the shards now."""
    here = Set(tmp_path / "set", FIRST, SECOND).edit(LEAVINGS)
    before = Everything(here)
    whole = here.commit(in_place=True)
    assert samples(whole[0])["d/n"] == {"txt": b"new"}
    for _ in stops(before.put_back, functools.partial(here.commit, in_place=True), least=20):
        for _ in range(2):
            assert here.commit(in_place=True) == whole
            assert files_of(here.place.upper) == KEPT
        assert here.place.upper.joinpath("s0").stat().st_mode == before.copy.joinpath("o").stat().st_mode


def test_abandoning_keeps_what_was_left_out(tmp_path: Path) -> None:
    here = Set(tmp_path, FIRST, SECOND).edit(LEAVINGS)
    kill_when(here, lambda: here.shards[0].read_bytes() != FIRST)
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
    here = Set(tmp_path / "set", FIRST, SECOND, merge=merge)
    here.edit({"d": {"a": {"jpg": b"changed"}}, "e": {"txt": b"new"}} if merge else EDITS)
    before = Everything(here)
    whole = here.commit(in_place=True)
    emptying = 0
    for _ in stops(before.put_back, functools.partial(here.commit, in_place=True)):
        if not unfinished(here.place) or b"published" not in (here.place.work / "commit.log").read_bytes():
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
    assert emptying >= 5


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
