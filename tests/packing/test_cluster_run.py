"""Output shards as units of work: what a worker refuses, what it leaves, and how an unfinished commit goes on.

Here the workers are threads of this process or of the command; real clusters are in index/test_clusters.py.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import sets
from tests.conftest import Program
from tests.packing.overlays import stops
from tests.processes import wait_until
from wdsfs.cluster_workers import Workers
from wdsfs.durable import Disk, temporary_of
from wdsfs.errors import CommitError, ShardError, StaleShard
from wdsfs.index.spread import SeenShard
from wdsfs.packing import cluster_units
from wdsfs.packing.cluster_units import ClusterRun, OutputUnit, remove_attempts
from wdsfs.packing.plan import NEW, CopiedRange, NewMember, Output, SourceShard, Step, Zeros
from wdsfs.packing.shard_writer import Files
from wdsfs.shards import Fingerprint


class World:
    """A source shard, an upper with a file, and a step that makes a shard of both."""

    def __init__(self, directory: Path) -> None:
        [shard] = sets.make(directory, 1)
        (directory / "upper").mkdir()
        (directory / "upper/new").write_bytes(b"new")
        os.utime(directory / "upper/new", (10**9, 10**9))  # so that all worlds give the same bytes
        self.path, self.upper = shard.path, os.fsencode(directory / "upper")
        self.target = os.fsencode(directory / "out.tar")
        size = os.stat(self.path).st_size
        found = os.stat(directory / "upper/new")
        new = NewMember(b"new.txt", b"new", found.st_size, found.st_mtime_ns)
        output = Output(self.target, [CopiedRange(0, 0, size - 1024), new, Zeros(1024)])
        self.step = Step(output, NEW, None, 1)
        self.sources = {0: SourceShard(self.path, Fingerprint.at(self.path))}
        self.done: list[int] = []

    def unit(self) -> OutputUnit:
        return OutputUnit(
            self.step.output, {0: SeenShard(self.path, Fingerprint.at(self.path))}, Files(self.upper)
        )

    def run(self, disk: Disk | None = None) -> None:
        workers = Workers("tests.work:threads")
        try:
            run = ClusterRun(workers, Files(self.upper), self.sources, disk or Disk(), self.done.append)
            run.each([self.step], lambda _: None)
        finally:
            workers.close()

    def names(self) -> list[str]:
        return sorted(os.listdir(os.path.dirname(os.fsdecode(self.target))))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_unit_becomes_a_shard_and_leaves_nothing_else(world: World) -> None:
    pickle.loads(pickle.dumps(world.unit()))
    world.run()
    assert world.names() == ["out.tar", "s0.tar", "upper"]
    content = Path(os.fsdecode(world.target)).read_bytes()
    assert content.startswith(Path(os.fsdecode(world.path)).read_bytes()[:-1024])
    assert world.done == [len(content)]
    made, usual = os.stat(world.target), os.stat(world.path)
    assert (made.st_mode, made.st_uid) == (usual.st_mode, usual.st_uid)


Write = Callable[[OutputUnit], bytes]


def when_written(monkeypatch: pytest.MonkeyPatch, act: Callable[[Write, OutputUnit], bytes]) -> None:
    """Have workers do this instead of writing their units; it gets what they would do."""
    real = cluster_units.write
    monkeypatch.setattr(cluster_units, "write", lambda unit: act(real, unit))


def test_attempts_that_were_given_up_are_removed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    older = temporary_of(world.target) + b".0123abcd"
    Path(os.fsdecode(older)).write_bytes(b"of a killed driver")
    when_written(
        monkeypatch, lambda real, unit: real(unit) and real(unit)
    )  # the first one by a worker that has died
    world.run()
    assert world.names() == ["out.tar", "s0.tar", "upper"]


def test_what_workers_of_a_killed_driver_have_left_goes(tmp_path: Path) -> None:
    """A file stays as long as a commit waits for it, which its placeholder shows."""
    wanted, other = (os.fsencode(tmp_path / name) for name in ("out.tar", "other.tar"))
    for target in (wanted, other):
        Path(os.fsdecode(temporary_of(target) + b".0123abcd")).touch()
    placeholder = Path(os.fsdecode(temporary_of(wanted)))
    placeholder.touch()
    remove_attempts([wanted])
    assert len(os.listdir(tmp_path)) == 3
    placeholder.unlink()
    remove_attempts([wanted])
    assert os.listdir(tmp_path) == [".wdsfs-other.tar.tmp.0123abcd"]


def test_a_driver_that_is_killed_at_any_step_leaves_the_whole_shard_or_none(tmp_path: Path) -> None:
    whole = World(tmp_path / "whole")
    whole.run()
    content = Path(os.fsdecode(whole.target)).read_bytes()
    worlds: list[World] = []

    def run(disk: Disk) -> None:
        worlds.append(World(tmp_path / str(len(worlds))))
        worlds[-1].run(disk)

    for _ in stops(lambda: None, run, least=5):
        world = worlds[-1]
        if "out.tar" not in world.names():
            world.run()
        assert Path(os.fsdecode(world.target)).read_bytes() == content
    assert worlds[-1].names() == ["out.tar", "s0.tar", "upper"]


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda world: os.unlink(world.path), "s0.tar: the shard is gone"),
        (lambda world: os.utime(world.path, (1, 1)), "s0.tar has changed since the commit was planned"),
        (lambda world: os.rename(world.upper, world.upper + b"2"), "upper/new: the worker on .* cannot read"),
        (lambda world: os.unlink(world.upper + b"/new"), "upper/new: .* all machines need it"),
        (lambda world: os.utime(world.upper + b"/new", (1, 1)), "new has changed since the shards were planned"),
    ],
)
def test_what_has_changed_or_is_not_there_stops_the_commit(
    world: World, spoil: Callable[[World], None], text: str
) -> None:
    spoil(world)
    with pytest.raises((CommitError, ShardError), match=text):
        world.run()
    assert "out.tar" not in world.names()
    assert not [name for name in world.names() if name.startswith(".")]


def test_a_worker_writes_only_where_it_sees_the_commit(world: World) -> None:
    """Another file system under the same path, or a commit that was interrupted."""
    with pytest.raises(CommitError, match=r"does not see .*: put the new shards on a file system that all"):
        cluster_units.write(world.unit())
    assert world.names() == ["s0.tar", "upper"]


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (lambda world, path: os.unlink(path), CommitError, "this machine does not see"),
        (lambda world, path: os.truncate(path, 7), CommitError, "and this machine sees 7"),
        (lambda world, path: os.utime(world.path, (1, 1)), StaleShard, "has changed since the commit was planned"),
    ],
)
def test_what_changes_before_a_shard_is_published_stops_it(
    spoil: Callable[[World, bytes], object],
    error: type[Exception],
    text: str,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def late(real: Write, unit: OutputUnit) -> bytes:
        path = real(unit)
        spoil(world, path)
        return path

    when_written(monkeypatch, late)
    with pytest.raises(error, match=text):
        world.run()
    assert world.names() == ["s0.tar", "upper"]


def test_an_interrupt_keeps_what_is_finished(program: Program) -> None:
    """With the exit code of an interrupt. The executor works at one unit, and then no more."""
    program.home.joinpath("set").mkdir()
    shards = sets.make(program.home / "set", 6)
    words = ("--executor", "tests.work:one_and_no_more", "--jobs", "1", "set/s*.tar")
    with program.start("index", *words, stderr=-1, stdout=-1) as process:
        wait_until(lambda: (program.home / "stuck").exists(), "the executor to stop")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, out, err) == (
        130,
        b"",
        b"wdsfs: interrupted; the index keeps the shards read so far\n",
    )
    report = program.json("index", "set/s*.tar")
    assert report["rebuilt"] == len(shards) - 1
