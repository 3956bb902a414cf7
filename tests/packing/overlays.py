"""Sets with an overlay, for tests of commits, and commits that stop at every step."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import sets, tars
from tests.uppers import WHITEOUT, a_tree, find, write_upper
from wdsfs.durable import Disk
from wdsfs.names import PLAIN, Reading
from wdsfs.overlay import overlay_directory
from wdsfs.overlay.overlay_directory import OverlayDirectory, OverlaySettings, ShardSeen, unfinished
from wdsfs.packing.overlay_commit import CommitOptions, Planner
from wdsfs.packing.plan import Plan, Step
from wdsfs.packing.replacement import Replacement, read_plan
from wdsfs.packing.runner import Runner
from wdsfs.packing.shard_writer import Files
from wdsfs.shards import Fingerprint
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


class Killed(BaseException):
    """Stands for a kill: no code after it runs."""


class Faulty(Disk):
    """Fails in front of its `step`th step, counted from 0, and counts them. Behind a kill there are no more."""

    def __init__(self, step: int, error: BaseException) -> None:
        self.step, self.error, self.steps = step, error, 0

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name not in ("step", "error", "steps"):
            self.steps += 1
            if self.steps == self.step + 1 or (self.steps > self.step and isinstance(self.error, Killed)):
                raise self.error
        return super().__getattribute__(name)


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
        home.mkdir(exist_ok=True)
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


def numbered(count: int, start: int = 0, size: int = 10) -> bytes:
    return tars.tar(*(tars.member(b"%03d.txt" % n, b"x" * size) for n in range(start, start + count)))


def files_of(top: Path) -> dict[str, bytes]:
    return {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}


class Everything:
    """A set and its overlay, as they were: to be put back for another try."""

    def __init__(self, here: Set, name: str = "before") -> None:
        self.here, self.copy = here, here.home.with_name(name)
        subprocess.run(["cp", "-a", here.home, self.copy], check=True)

    def put_back(self) -> None:
        shutil.rmtree(self.here.home)
        subprocess.run(["cp", "-a", self.copy, self.here.home], check=True)

    def stamp_log(self) -> None:
        """Let the log of a commit name the copies of the shards that it has written."""
        log = self.here.place.work / "commit.log"
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        for line in lines:
            line["file"][0] = os.stat(line["target"]).st_ino
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))


def stops(
    put_back: Callable[[], object],
    run: Callable[[Any], object],
    disk_of: Callable[[int], Disk] = lambda step: Faulty(step, Killed()),
    least: int = 10,
) -> Iterator[Any]:
    """Do the same again and again, stopped at every step there is; yields the disk after each stop."""
    for step in itertools.count():
        put_back()
        disk = disk_of(step)
        try:
            run(disk)
        except (Killed, OSError):
            yield disk
        else:
            assert step > least
            return


def full(step: int) -> Faulty:
    """A disk that has no room for a step."""
    return Faulty(step, OSError(errno.ENOSPC, "full"))


def kill_when(here: Set, is_time: Callable[[], bool]) -> None:
    """Kill a commit in place at one step after the other, going on each time, until it is time."""
    for step in itertools.count():
        with pytest.raises(Killed):
            here.commit(Faulty(step, Killed()), in_place=True)
        if is_time():
            return


def half_way(home: Path, merge: bool = False) -> tuple[Set, list[bytes]]:
    """A set whose commit in place was killed when its first shard was replaced, and what it would become."""
    here = Set(home, FIRST, SECOND, merge=merge)
    here.edit({"d": {"a": {"jpg": b"changed"}}, "e": {"txt": b"new"}} if merge else EDITS)
    here.edit({} if merge else {"s1": {"e": {"txt": b"new"}}, "more": {"x": {"txt": b"x"}}})
    before = Everything(here)
    whole = here.commit(in_place=True)
    before.put_back()
    kill_when(here, lambda: here.shards[0].read_bytes() != FIRST)
    return here, whole


def on_small_disks(code: str, *directories: Path) -> str:
    """Run code in mounts of its own, with helpers of this module; returns its output."""
    for directory in directories:
        directory.mkdir()
    try:
        return sets.run(
            f"from tests.packing.overlays import *\n{code}", *directories, wrapper=sets.in_own_mounts()
        )
    except AssertionError as error:
        if "unshare" in str(error) or "permission denied" in str(error):
            pytest.skip("no file system can be mounted here")
        raise
