"""Indexing by the workers of a cluster on this machine, against the processes of wdsfs; and what a shard costs the
process that hands the work out.

The clusters run before the clock does, and each command is measured without what connecting takes: the time of the
same command over one small shard is taken off.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.report import Case
from bench.systems import Broken, Wdsfs, run
from wdsfs.cluster_workers import Workers
from wdsfs.index.far_side import Batch, Outcome
from wdsfs.index.spread import Job, spread

if TYPE_CHECKING:
    from bench.run import Bench

MEMBERS = 21_000
WORKERS = 2
FLIGHT, UNITS = 4096, 20 * 4096
MICRO = 1e6
START_SECONDS = 60.0


def executor(bench: Bench) -> None:
    """Shards of 21,000 members of 2 bytes; then units that take no time, thousands of them in flight."""
    home = bench.sets.home / "executor"
    directory, one = home / "many", home / "one"
    shards = bench.sets.sizes.cluster_shards
    _write_shards(directory, shards, MEMBERS)
    _write_shards(one, 1, 2)
    index = home / "index"
    wdsfs = Wdsfs(bench.say)

    def seconds(data: Path, *how: str) -> float:
        shutil.rmtree(index, ignore_errors=True)
        since = time.perf_counter()
        run(*wdsfs.command("index", "-q", "--index-dir", index, *how, data))
        return time.perf_counter() - since

    with contextlib.ExitStack() as stack:
        ways: dict[str, tuple[str, ...]] = {"wdsfs": ("--jobs", str(WORKERS))}
        for name, module, start in (("Dask", "distributed", _dask), ("Ray", "ray", _ray)):
            if importlib.util.find_spec(module) is None:
                bench.results.absent(name, "is not installed beside this Python")
                continue
            ways[name] = ("--executor", stack.enter_context(start(home)))
        for repetition in range(-1, bench.repetitions):  # the first of each is for the page cache
            for name, how in ways.items():
                try:
                    value = seconds(directory, *how) - seconds(one, *how)
                except (Broken, OSError) as error:
                    bench.results.failed(bench.workload, name, str(error))
                    continue
                if repetition >= 0:
                    bench.add(f"{shards} shards of {MEMBERS:,} members", "s", name, value)
    for _ in range(bench.repetitions):
        case = Case("executor", f"of the driver for a shard, {FLIGHT:,} in flight", "us/shard")
        bench.results.add(case, "wdsfs", _driver_seconds() * MICRO)
    shutil.rmtree(home)


def _write_shards(directory: Path, count: int, members: int) -> None:
    """All have the same bytes, which makes no difference to an index."""
    directory.mkdir(parents=True, exist_ok=True)
    blocks = []
    for member in range(members):
        info = tarfile.TarInfo(f"{member:08d}.cls")
        info.size, info.mtime = 2, 1_700_000_000 + member
        blocks.append(info.tobuf(tarfile.USTAR_FORMAT) + b"1\n" + bytes(510))
    content = b"".join(blocks) + bytes(1024)
    for number in range(count):
        (directory / f"s{number:04d}.tar").write_bytes(content)


@contextlib.contextmanager
def _process(*command: Any) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-m", *map(str, command)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        process.terminate()  # then it ends what it has started
        try:
            process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_for(port: int) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        if time.monotonic() > end:
            raise Broken(f"nothing listens at port {port}")
        time.sleep(0.1)


def _free_port() -> int:
    while True:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            port = int(server.getsockname()[1])
        if not 10_002 <= port <= 19_999:  # which the workers of Ray take
            return port


@contextlib.contextmanager
def _dask(home: Path) -> Iterator[str]:
    port = _free_port()
    scheduler = ("distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", port, "--no-dashboard")
    address = f"tcp://127.0.0.1:{port}"
    worker = ("distributed.cli.dask_worker", address, "--nworkers", WORKERS, "--nthreads", 1, "--no-dashboard")
    with _process(*scheduler), _process(*worker, "--local-directory", home):
        _wait_for(port)
        yield f"dask:{address}"


@contextlib.contextmanager
def _ray(_: Path) -> Iterator[str]:
    port = _free_port()
    start = ("ray.scripts.scripts", "start", "--head", "--block", "--port", port, "--num-cpus", WORKERS)
    more = ("--node-ip-address", "127.0.0.1", "--include-dashboard=false", "--disable-usage-stats")
    # Paths of its sockets must not be longer than 107 bytes.
    short = tempfile.TemporaryDirectory(prefix="wdsfs-ray-", ignore_cleanup_errors=True)
    with short as place, _process(*start, *more, "--temp-dir", place):
        _wait_for(port)
        yield f"ray:127.0.0.1:{port}"


class _Waiting(Executor):
    """Finishes units of work, which nobody does, when FLIGHT of them have been submitted."""

    def __init__(self) -> None:
        self._left = UNITS
        self._waiting: list[Future[Any]] = []

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if not isinstance(arguments[0], Batch):
            future.set_result(function(*arguments))
            return future
        self._left -= 1
        self._waiting.append(future)
        if len(self._waiting) == FLIGHT or not self._left:
            for one in self._waiting:
                one.set_result([Outcome(None, None, 1.0)])  # so slow that each is sent alone
            self._waiting.clear()
        return future


def _driver_seconds() -> float:
    """Processor time for each unit, what the futures themselves take included."""
    job: Job[int] = Job(int, int, str)
    since = time.thread_time()
    done = sum(1 for _ in spread(Workers.of(_Waiting(), FLIGHT), job, range(UNITS)))
    return (time.thread_time() - since) / done
