"""Units on workers: what is lost and repeated, what a worker refuses, and what travels, without a real cluster."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import sets, work
from tests.index.test_process_pool import shards_of
from wdsfs import errors, executors, shared_settings
from wdsfs.cluster_workers import Engine, Workers
from wdsfs.door.shard_door import DOOR
from wdsfs.door.urls import parse
from wdsfs.errors import (
    ExecutorUnusable,
    MissingShard,
    ShardError,
    StaleMount,
    UnreadableShard,
    UsageError,
    WdsfsError,
)
from wdsfs.executors import opener
from wdsfs.index import process_pool, record_builder, spread
from wdsfs.index.record import Record
from wdsfs.index.record_of_file import build_file
from wdsfs.index.spread import Batch
from wdsfs.shards import Fingerprint, Shard
from wdsfs.shared_settings import setting


class Lost(Exception):
    """What an engine of these tests raises for a unit whose worker has died."""


class Inline(Executor):
    """Does the work at once, in this process. Units called `deadly` kill their worker: `lose` makes the error."""

    def __init__(self, lose: Callable[[Inline], Exception] = lambda _: Lost("gone")) -> None:
        self.lose, self.sent, self.deaths = lose, 0, 0
        self.broken = False

    def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        if self.broken:
            raise BrokenExecutor("it broke before")
        future: Future[Any] = Future()
        batch = pickle.loads(pickle.dumps(arguments[0]))
        if isinstance(batch, Batch) and any(b"deadly" in unit[1].path for unit in batch.units):
            self.deaths += 1
            future.set_exception(self.lose(self))
        else:
            self.sent += 1
            future.set_result(pickle.loads(pickle.dumps(function(batch))))
        return future


def workers_of(executor: Executor, **engine: Any) -> Workers:
    workers = Workers.of(executor)
    workers._engine = Engine(executor, lost=(Lost,), **engine)
    return workers


def lengths(shards: list[Shard], workers: Workers) -> dict[Shard, int | ShardError]:
    found = list(process_pool.each(work.length, shards, 1, workers))
    assert len(found) == len(shards)
    return dict(found)


# --- losses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("retries", [False, True])
def test_a_unit_that_kills_its_workers_is_named_and_the_others_are_done(tmp_path: Path, retries: bool) -> None:
    executor = Inline()
    shards = shards_of(tmp_path, *(f"deadly-{n}" if n % 10 == 7 else f"{n}" for n in range(30)))
    found = lengths(shards, workers_of(executor, retries=retries))
    for one, result in found.items():
        if b"deadly" in one.path:
            assert isinstance(result, UnreadableShard)
            assert f"{os.fsdecode(one.path)}: the worker" in str(result)
        else:
            assert result == len(os.path.basename(one.path))
    # An engine that repeats by itself is believed as soon as a unit was alone.
    assert executor.deaths <= (2 if retries else spread.TRIES) * 3


def test_a_pool_that_breaks_is_made_again_and_the_killer_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Inline] = []

    def broken(executor: Inline) -> Exception:
        executor.broken = True
        return BrokenExecutor("one process was killed")

    def make() -> Inline:
        made.append(Inline(broken))
        return made[-1]

    monkeypatch.setattr(work, "make_executor", make, raising=False)
    shards = shards_of(tmp_path, *(f"{n}" for n in range(20)), "deadly-1", *(f"b{n}" for n in range(20)))
    found = lengths(shards, Workers("tests.work:make_executor"))
    bad = [one for one, result in found.items() if isinstance(result, ShardError)]
    assert [os.path.basename(one.path) for one in bad] == [b"deadly-1"]
    assert "killed" not in str(found[bad[0]])
    assert len(made) <= 2 + spread.TRIES


def test_an_engine_that_loses_everything_ends_the_work(tmp_path: Path) -> None:
    shards = shards_of(tmp_path, *(f"deadly-{n}" for n in range(50)))
    with pytest.raises(ExecutorUnusable, match="all its workers die"):
        lengths(shards, workers_of(Inline()))


def test_an_engine_that_cannot_be_made_again_ends_the_work(tmp_path: Path) -> None:
    shards = shards_of(tmp_path, "a", "deadly-1")
    with pytest.raises(ExecutorUnusable, match="has failed"):
        lengths(shards, workers_of(Inline(lambda _: BrokenExecutor())))


def test_what_an_engine_cannot_run_is_no_error_of_a_shard(tmp_path: Path) -> None:
    shards = shards_of(tmp_path, "deadly-1")
    with pytest.raises(ExecutorUnusable, match=r"a worker cannot run wdsfs: No module named 'wdsfs'"):
        lengths(shards, workers_of(Inline(lambda _: ModuleNotFoundError("No module named 'wdsfs'"))))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("string:ascii_letters", "not a callable"),
        ("concurrent.futures:Future.set_result", "cannot be called"),
        ("tests.work:one_and_no_more.__class__", "cannot be called"),
        ("os:getcwd", "returns a str"),
        ("tests.work:no_executor", "returns a str"),
        ("tests.work:missing", "cannot be imported: .*PYTHONPATH"),
        ("tests.nothing:at_all", "cannot be imported: .*PYTHONPATH"),
    ],
)
def test_a_callable_that_makes_no_executor(name: str, what: str) -> None:
    with pytest.raises(UsageError, match=f"--executor {name}: .*{what}"):
        _ = Workers(name).engine


def test_what_is_no_address_of_dask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "_package", lambda *_: None)
    for address in ("nonsense", "missing.json", "tcp://host"):
        with pytest.raises(UsageError, match=f"--executor dask:{address}: is neither an existing scheduler file"):
            _ = Workers(f"dask:{address}").engine


def _raise(*_: object) -> Future[Any]:
    raise OSError("the engine is down")


def _fail(*_: object) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(OSError("the engine is down"))
    return future


@pytest.mark.parametrize(
    ("submit", "what"),
    [(lambda *_: 42, "submit returns a int, not"), (_raise, "engine is down"), (_fail, "engine is down")],
)
def test_an_executor_that_is_none(monkeypatch: pytest.MonkeyPatch, submit: Callable[..., Any], what: str) -> None:
    """Nothing of it is taken for an error of the command's own files."""
    executor = Inline()
    monkeypatch.setattr(executor, "submit", submit)
    monkeypatch.setattr(work, "make_executor", lambda: executor, raising=False)
    with pytest.raises(ExecutorUnusable, match=what):
        _ = Workers("tests.work:make_executor").engine
    monkeypatch.setattr(work, "make_executor", lambda: Inline)
    with pytest.raises(UsageError, match="returns a class, not"):
        _ = Workers("tests.work:make_executor").engine
    workers = workers_of(executor)
    if submit is not _fail:
        with pytest.raises(ExecutorUnusable, match=what):
            workers.submit(len, "")


def test_small_units_travel_together(tmp_path: Path) -> None:
    executor = Inline()
    lengths(shards_of(tmp_path, *(f"{n}" for n in range(500))), workers_of(executor))
    assert executor.sent < 200


def test_a_bug_ends_the_work_and_says_where_it_was(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bug-1") as raised:
        lengths(shards_of(tmp_path, "a", "bug-1"), workers_of(Inline()))
    assert "on the worker on " in raised.value.__notes__[0]


def test_closing_cancels_what_has_not_begun(tmp_path: Path) -> None:
    begun, go = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as executor:
        executor.submit(lambda: (begun.set(), go.wait()))
        begun.wait()
        workers = workers_of(executor)
        results = process_pool.each(work.length, shards_of(tmp_path, "a", "b"), 1, workers)
        taker = threading.Thread(target=lambda: list(results), daemon=True)
        taker.start()
        go.set()
        taker.join()
        assert executor._work_queue.empty()


# --- what a worker sees -----------------------------------------------------------------------------------


def test_a_worker_that_sees_another_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = shards_of(tmp_path, "a", "b")
    real = Fingerprint.at
    other = {path: real(path)._replace(mtime_ns=5) for path in (shards[0].path, shards[1].path)}
    monkeypatch.setattr(DOOR, "look", lambda path: other.get(path) or real(path))
    monkeypatch.setattr(DOOR, "look_again", {**other, shards[1].path: real(shards[1].path)}.__getitem__)
    seen = {one.path: spread.SeenShard(one.path, real(one.path)) for one in shards}
    with pytest.raises(StaleMount, match=r"/a: the worker on .* sees another file"):
        spread.agree(seen[shards[0].path])
    now = spread.agree(seen[shards[1].path])  # what it knew was old
    assert now == real(shards[1].path)
    spread.agree(spread.SeenShard(shards[1].path, now.mixed_with(7)))  # inode and ctime do not count
    path = os.fsencode(tmp_path / "gone.tar")
    with pytest.raises(UnreadableShard, match=r"gone.tar: the worker on .* has no such file"):
        spread.agree(spread.SeenShard(path, Fingerprint(1, 2, 3)))


def test_a_shard_that_changes_before_the_worker_looks_is_sent_again(tmp_path: Path) -> None:
    [one] = shards_of(tmp_path, "a")

    class Late(Inline):
        def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
            if not self.sent:
                os.utime(one.path, ns=(1, 1))
            return super().submit(function, *arguments, **options)

    executor = Late()
    assert lengths([one], workers_of(executor)) == {one: 1}
    assert executor.sent == 2


def test_a_shard_that_is_missing_here_is_not_sent(tmp_path: Path) -> None:
    executor = Inline()
    found = lengths([sets.at(tmp_path / "gone.tar")], workers_of(executor))
    [error] = found.values()
    assert isinstance(error, MissingShard)
    assert executor.sent == 0


def test_a_record_of_a_worker_is_that_of_this_machine(tmp_path: Path) -> None:
    """Byte for byte, under the fingerprint of this machine."""
    [one] = sets.make(tmp_path, 1)
    ours = build_file(one.path)
    here = Record(ours).fingerprint
    theirs = record_builder.adopted(ours, here.mixed_with(9))
    assert Record(theirs).fingerprint == here.mixed_with(9)
    assert record_builder.adopted(theirs, here) == ours
    with pytest.raises(StaleMount, match="changed while a worker read it"):
        record_builder.adopted(ours, here._replace(size=1))
    with pytest.raises(StaleMount, match="malformed record"):
        record_builder.adopted(ours[:-1], here)


# --- what travels -----------------------------------------------------------------------------------------


def test_options_travel_and_hold_for_one_command_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_settings, "_chosen", {})
    monkeypatch.setenv("WDSFS_STORE_OPTIONS", "region=here")
    monkeypatch.setattr(spread, "_OWN_PLACES", {"CACHE_DIR"})
    monkeypatch.setenv("WDSFS_CACHE_DIR", "/own")
    options = spread._Options()
    first = {"STORE_OPTIONS": "region=one", "CACHE_DIR": "/theirs", "INDEX_DIR": None, "TRUST": None}
    second = {**first, "STORE_OPTIONS": None}
    entered = threading.Event()

    def other() -> None:
        with options.held(second):
            entered.set()

    with options.held(first), options.held(first):
        assert setting("STORE_OPTIONS") == "region=one"
        assert setting("CACHE_DIR") == "/own"
        thread = threading.Thread(target=other)
        thread.start()
        assert setting("STORE_OPTIONS") == "region=one"
        assert not entered.is_set()
    thread.join()
    assert entered.is_set()
    assert setting("STORE_OPTIONS") == ""


def test_a_url_with_a_secret_travels_and_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DOOR, "_remote", None)
    url = parse("https://host/a.tar?signature=hush")
    path = DOOR.remote.path_of(url)
    unit = work.length, spread.SeenShard(path, Fingerprint(1, 2, 3), url), path
    sent = pickle.loads(pickle.dumps(Batch(spread.on_shard, [unit], spread.options())))
    assert sent.units[0][1].url.query == "signature=hush"
    assert "hush" not in repr(sent)
    assert "hush" not in repr(sent.units)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(work.length, [], {})
    batch.version = "0.0.1"
    with pytest.raises(ExecutorUnusable, match=r"has wdsfs .*, and this command 0\.0\.1"):
        spread.run(batch)
    monkeypatch.setattr("wdsfs.cluster_workers.__version__", "0.0.1")
    workers = Workers("tests.work:threads")
    with pytest.raises(ExecutorUnusable, match=r"tests.work:threads: a worker has wdsfs .*: install 0\.0\.1"):
        _ = workers.engine
    workers.close()


def subclasses(kind: type[WdsfsError]) -> set[type[WdsfsError]]:
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


def test_every_error_can_be_sent_with_all_that_it_says() -> None:
    """One of another kind becomes its text."""

    class Local(Exception):
        pass

    sent = spread._portable(Local("what happened"))
    assert type(sent) is RuntimeError
    assert "what happened" in str(sent)
    kinds = {kind for kind in subclasses(WdsfsError) if kind.__module__ == errors.__name__}
    assert len(kinds) > 30
    for kind in kinds:
        error = kind("/a/b.tar:512: text")
        found = pickle.loads(pickle.dumps(spread._portable(error)))
        assert type(found) is kind
        assert (str(found), found.errno, found.exit_code) == (str(error), error.errno, error.exit_code)


# --- names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["", "dask", "mpi:3", "no such:thing", "slurm", "slurm:jobs=0", "slurm:jobs=2,what"]
)
def test_a_name_that_means_nothing_is_refused_at_once(name: str) -> None:
    with pytest.raises(UsageError, match=f"--executor {name.partition(':')[0]}"):
        opener(name)


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("dask:tcp://127.0.0.1:1", "distributed", "dask"),
        ("ray", "ray", "ray"),
        ("slurm:jobs=1", "dask_jobqueue", "slurm"),
        ("mpi", "mpi4py.futures", "mpi"),
    ],
)
def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str, extra: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(UsageError, match=rf"package {package}.*pip install .*\[{extra}\]'"):
        opener(name)()
