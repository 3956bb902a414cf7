"""The pool: which results come, how many wait, and how it ends, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import sets, work
from tests.conftest import descendants, descriptors, new_processes
from tests.processes import wait_until
from wdsfs.cluster_workers import Workers
from wdsfs.errors import CorruptShard, MissingShard, ShardError, UnreadableShard
from wdsfs.index import process_pool, spread
from wdsfs.index.spread import Batch
from wdsfs.shards import Shard


@pytest.fixture(params=["alone", "processes", "executor"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The three ways in which work is done, as arguments of `each`."""
    monkeypatch.setattr(process_pool, "ALONE_BYTES", -1)
    if request.param == "alone":
        yield {"jobs": 1}
    elif request.param == "processes":
        yield {"jobs": 2}
    else:
        with ThreadPoolExecutor(2) as executor:
            yield {"jobs": 2, "workers": Workers.of(executor)}


@pytest.fixture
def by_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little work there is."""
    monkeypatch.setattr(process_pool, "ALONE_BYTES", -1)


def shards_of(directory: Path, *names: str) -> list[Shard]:
    for name in names:
        (directory / name).write_bytes(name.encode())
    return [sets.at(directory / name) for name in names]


# --- results ----------------------------------------------------------------------------------------------


def test_every_shard_comes_once_with_its_result(tmp_path: Path, way: dict[str, Any]) -> None:
    shards = shards_of(tmp_path, *(f"{number}" * (number + 1) for number in range(40)))
    found = list(process_pool.each(work.length, shards, **way))
    assert dict(found) == {one: len(os.path.basename(one.path)) for one in shards}
    assert len(found) == len(shards)
    assert list(process_pool.each(work.length, [], **way)) == []


def test_shard_errors_are_results(tmp_path: Path, way: dict[str, Any]) -> None:
    shards = shards_of(tmp_path, "a", "missing-1", "b", "corrupt-1", "c")
    found = dict(process_pool.each(work.length, shards, **way))
    assert [found[one] for one in shards[::2]] == [1, 1, 1]
    missing, corrupt = found[shards[1]], found[shards[3]]
    assert isinstance(missing, MissingShard)
    assert isinstance(corrupt, CorruptShard)
    assert str(corrupt) == "corrupt-1"


def test_any_other_error_ends_it(tmp_path: Path, way: dict[str, Any]) -> None:
    shards = shards_of(tmp_path, "a", "bug-1", *(f"b{number}" for number in range(30)))
    with pytest.raises(ValueError, match="bug-1"):
        list(process_pool.each(work.length, shards, **way))
    assert new_processes() == set()


def test_large_results_come_through(tmp_path: Path, way: dict[str, Any]) -> None:
    shards = shards_of(tmp_path, "a", "b", "c")
    assert [result for _, result in process_pool.each(work.large, shards, **way)] == [bytes(5_000_000)] * 3


def test_much_work_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_pool, "ALONE_BYTES", 10)
    shards = shards_of(tmp_path, *(f"name{number}" for number in range(12)))
    used = {result for _, result in process_pool.each(work.two_at_once, shards, 2)}
    assert len(used) == 2
    assert os.getpid() not in used
    # One shard is one process's work; what is not there is no work.
    assert {result for _, result in process_pool.each(work.process, shards[:1], 2)} == {os.getpid()}
    for one in shards:
        os.unlink(one.path)
    assert {result for _, result in process_pool.each(work.process, shards, 2)} == {os.getpid()}


@pytest.mark.usefixtures("by_processes")
def test_no_more_processes_than_shards(tmp_path: Path) -> None:
    results = process_pool.each(work.process, shards_of(tmp_path, "a", "b"), 50)
    next(results)
    assert len(new_processes()) <= 2
    results.close()


# --- looking ahead ----------------------------------------------------------------------------------------


class Counting(Executor):
    """Does the work at once and counts the units that were submitted, but for the question for the version."""

    def __init__(self) -> None:
        self.submitted = 0

    def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        self.submitted += sum(len(one.units) for one in arguments if isinstance(one, Batch))
        future: Future[Any] = Future()
        future.set_result(function(*arguments, **options))
        return future


@pytest.mark.parametrize("most", [1, 3])
def test_only_so_many_results_wait_to_be_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(spread, "TOGETHER_MAX", 1)
    shards = shards_of(tmp_path, *(f"{number}" for number in range(50)))
    executor = Counting()
    for taken, _ in enumerate(process_pool.each(work.length, shards, 2, Workers.of(executor, most))):
        assert executor.submitted - taken <= most
    assert executor.submitted == 50


@pytest.mark.usefixtures("by_processes")
def test_a_slow_shard_does_not_hold_up_the_others(tmp_path: Path) -> None:
    shards = shards_of(tmp_path, "forever-1", *(f"{number}" for number in range(20)))
    results = process_pool.each(work.length, shards, 2)
    others = [next(results)[0] for _ in range(20)]
    assert set(others) == set(shards[1:])
    results.close()  # it is killed in the middle of its work
    assert new_processes() == set()


# --- the end ----------------------------------------------------------------------------------------------


def test_nothing_is_left_behind(tmp_path: Path, way: dict[str, Any]) -> None:
    shards = shards_of(tmp_path, *(f"{number}" for number in range(20)))
    before, threads = descriptors(), {*threading.enumerate()}
    for count in (0, 1, 5, 20):
        results = process_pool.each(work.length, shards, **way)
        for _ in range(count):
            next(results)
        results.close()
        assert new_processes() == set()
        if "workers" not in way:  # that executor is not ours to end
            assert descriptors() - before == set()
            assert {*threading.enumerate()} - threads == set()


@pytest.mark.usefixtures("by_processes")
def test_a_process_that_is_killed_costs_its_own_shard_only(tmp_path: Path) -> None:
    shards = shards_of(tmp_path, *(f"{number}" if number % 3 else f"deadly-{number}" for number in range(12)))
    before = descriptors()
    found = dict(process_pool.each(work.length, shards, 2))
    assert len(found) == len(shards)
    for one, result in found.items():
        if b"deadly" in one.path:
            assert isinstance(result, UnreadableShard)
            assert f"{os.fsdecode(one.path)}: " in str(result)
            assert "SIGKILL" in str(result)
        else:
            assert not isinstance(result, ShardError)
    assert descriptors() - before == set()


@pytest.mark.usefixtures("by_processes")
def test_a_process_that_ends_by_itself_is_a_bug(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="exit code 3"):
        list(process_pool.each(work.length, shards_of(tmp_path, "a", "exit-1", "b"), 2))
    assert new_processes() == set()


@pytest.mark.usefixtures("by_processes")
def test_an_interrupt_of_the_terminal_does_not_reach_the_processes(tmp_path: Path) -> None:
    for _, result in process_pool.each(work.group_and_signals, shards_of(tmp_path, "a", "b", "c"), 2):
        assert not isinstance(result, ShardError)
        assert result[0] != os.getpgrp()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_their_parent_in_the_middle_of_a_shard(tmp_path: Path, number: int) -> None:
    """At once: a signal that ends `wdsfs index` leaves nobody at work."""
    shards = shards_of(tmp_path, "a", "b")
    code = """
import sys
from pathlib import Path
from tests import sets
from tests import work
from wdsfs.index import process_pool as pool
pool.ALONE_BYTES = -1
for _ in pool.each(work.begun_and_never_done, [sets.at(Path(path)) for path in sys.argv[1:]], 2):
    pass
"""
    parent = sets.start(code, *(sets.path_of(one) for one in shards))
    wait_until(lambda: len(list(tmp_path.rglob("*.begun"))) == 2, "the work")
    workers = descendants(parent.pid)
    parent.send_signal(number)
    parent.communicate()
    assert parent.returncode == -number
    wait_until(lambda: all(_has_ended(pid) for pid in workers), "the end of the processes")


def test_a_process_whose_parent_dies_before_it_has_sent_anything_says_nothing() -> None:
    command = [sys.executable, "-I", "-S", "-c", process_pool._START]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


@pytest.mark.usefixtures("by_processes")
def test_processes_import_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = shards_of(tmp_path, "a", "b")
    for name in ("pickle", "wdsfs", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    assert [result for _, result in process_pool.each(work.length, shards, 2)] == [1, 1]
