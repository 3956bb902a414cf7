"""Real clusters of two workers: what they make is what this machine makes, byte for byte, also if one is killed.

One test for each engine, because a cluster takes seconds to start. Slurm is played by a script that runs the jobs
on this machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

from tests import sets
from tests.conftest import ROOT, descendants
from tests.peers import TOOLS, need_tool
from tests.processes import PATIENCE, Process, wait_until
from tests.servers import free_ports, listens

PYTHON = TOOLS / "bin" / "python"
SHARDS = 6
# Of the parts of Ray, which otherwise listen where anybody on the machine may listen at that moment.
RAY_PORTS = (
    *("object-manager", "node-manager", "metrics-export", "runtime-env-agent"),
    *("dashboard-agent-listen", "dashboard-agent-grpc"),
)

# Engines take seconds to start, and many times that on a machine with other work.
pytestmark = pytest.mark.timeout(10 * PATIENCE)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A set, and an upper that changes a sample, adds one and removes none."""
    sets.make(tmp_path / "set", SHARDS, samples=20)
    for name, content in (("s3/d1/3-1/cls", b"other"), ("s3/new/txt", b"new"), ("s5/new/txt", b"new")):
        path = tmp_path / "edits" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, ns=(10**18, 10**18))
    return tmp_path


def environment(home: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("WDSFS_", "XDG_"))}
    return {
        **clean,
        "HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "PATH": f"{TOOLS / 'bin'}:{os.environ['PATH']}",
        "DASK_DISTRIBUTED__WORKER__DAEMON": "False",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "OMP_NUM_THREADS": "1",
    }


def drive(home: Path, *words: str, launcher: tuple[Any, ...] = (PYTHON,), code: int | None = 0) -> str:
    """Run drive.py; returns what it says."""
    done = subprocess.run(
        [*launcher, ROOT / "tests/index/drive.py", home, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment(home),
        cwd=home,
        timeout=2 * PATIENCE,
        check=False,
    )
    text = done.stdout.decode(errors="replace")
    assert code is None or done.returncode == code, text
    return text


@contextlib.contextmanager
def running(home: Path, *command: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process of a cluster, which is ended with all that it has started."""
    with (home / f"log-{Path(command[0]).name}").open("wb") as log:
        process = Process(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment(home), cwd=home
        )
    try:
        yield process
    finally:
        started = descendants(process.pid) | {process.pid}
        process.terminate()  # so that it removes its semaphores
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        for pid in started:  # they are this process's now, see conftest.py
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def records(index: Path) -> dict[bytes, bytes]:
    with lmdb.open(str(index), readonly=True, lock=False) as env, env.begin() as txn:
        return {key: value for key, value in txn.cursor() if key[:1] in b"rs"}


def files(directory: Path) -> dict[str, bytes]:
    found = {
        str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()
    }
    return {name: content for name, content in found.items() if not name.endswith((".died", "index.uuid"))}


def assert_same(home: Path, everything: bool = False, few: bool = False) -> None:
    """What was made here and there is the same, and nothing else is left."""
    here, there = records(home / "index-here"), records(home / "index-there")
    common = here.keys() & there.keys()  # of the set; the others have other paths
    assert len(common) == 2 * SHARDS
    assert {key for key in common if here[key] != there[key]} == set()
    names = ["new", *(["export"] if not few else []), *(["replaced"] if everything else [])]
    for name in names:
        made = files(home / f"{name}-here")
        assert len(made) >= SHARDS
        assert files(home / f"{name}-there") == made
    assert sorted(os.listdir(home / "new-there")) == [f"{number}.tar" for number in range(SHARDS)]
    if not everything:
        return
    assert (home / "new-there/3.tar").read_bytes() == (home / "replaced-there/s3.tar").read_bytes()
    assert files(home / "more-there/upper") == {}


def assert_killed(home: Path) -> None:
    """A worker has died in the middle of an index and of a commit."""
    for name in ("set/s3.tar", "edits-there/upper"):
        assert (home / f"{name}.died").exists()


def test_dask(home: Path) -> None:
    need_tool("distributed")
    [port] = free_ports(1)
    address = f"tcp://127.0.0.1:{port}"
    scheduler = f"scheduler --host 127.0.0.1 --port {port} --no-dashboard --no-show"
    worker = f"worker {address} --nworkers 2 --nthreads 1 --no-dashboard --local-directory {home}"
    with contextlib.ExitStack() as stack:
        for command in (scheduler, worker):
            stack.enter_context(running(home, TOOLS / "bin" / "dask", *command.split()))
        wait_until(lambda: listens(port), "the scheduler")
        said = drive(home, f"dask:{address}", "deadly")
    assert "Traceback" not in said
    assert_same(home)
    assert_killed(home)


def test_ray(home: Path) -> None:
    need_tool("ray")
    port, *ports = free_ports(1 + len(RAY_PORTS))
    start = f"start --head --block --node-ip-address 127.0.0.1 --port {port} --num-cpus 2 --disable-usage-stats"
    own_ports = (f"--{name}-port={number}" for name, number in zip(RAY_PORTS, ports, strict=True))
    more = ("--include-dashboard=false", "--object-store-memory=100000000", "--temp-dir")
    # Its sockets lie deep, and their paths must not be longer than 107 bytes.
    command = (TOOLS / "bin" / "ray", *start.split(), *own_ports, *more)
    with tempfile.TemporaryDirectory(prefix="wdsfs-ray-") as short, running(home, *command, short):
        wait_until(lambda: listens(port), "Ray")
        # It listens before it can answer, and whoever asks gives up after five seconds.
        wait_until(lambda: b"Ray runtime started." in (home / "log-ray").read_bytes(), "Ray's node")
        said = drive(home, f"ray:127.0.0.1:{port}", "deadly", "few")  # each command is a job of Ray, and slow
    assert "Traceback" not in said
    assert_same(home, few=True)
    assert_killed(home)


def test_loky(home: Path) -> None:
    """An executor of another library, which breaks as a whole when one of its processes dies."""
    need_tool("loky")
    said = drive(home, "loky:get_reusable_executor", "deadly", "all")
    assert "a worker of loky:get_reusable_executor has died: repeating its work" in said
    assert "Traceback" not in said
    assert_same(home, everything=True)
    assert_killed(home)


def test_mpi(home: Path) -> None:
    """MPI ends all its ranks when one dies; the command is repeated."""
    need_tool("mpi4py")
    mpi = (TOOLS / "bin" / "mpiexec", "-n", "3", PYTHON, "-m", "mpi4py.futures")
    before, processes = set(os.listdir("/dev/shm")), descendants(os.getpid())
    drive(home, "mpi", "deadly", "index", launcher=mpi, code=None)
    wait_until(lambda: not _alive(descendants(os.getpid()) - processes), "the end of all ranks")
    for name in set(os.listdir("/dev/shm")) - before:
        if name.startswith("mpich_shm_"):  # of the rank that was killed
            os.unlink(f"/dev/shm/{name}")
    assert [path.name for path in home.rglob("*.died")] == ["s3.tar.died"]
    said = drive(home, "mpi", launcher=mpi)
    assert "Traceback" not in said
    assert_same(home)


def test_slurm(home: Path) -> None:
    need_tool("dask_jobqueue")
    programs = home / "bin"
    programs.mkdir()
    for name, text in (
        ("sbatch", 'cp "$1" job.$$; setsid sh job.$$ >>jobs 2>&1 </dev/null & echo "Submitted batch job $!"'),
        ("scancel", 'kill -s KILL -- "-$1"'),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    options = f"jobs=2,cores=1,processes=1,memory=1GB,interface=lo,local_directory={home}"
    launcher = ("env", f"PATH={programs}:{TOOLS / 'bin'}:{os.environ['PATH']}", PYTHON)
    before = descendants(os.getpid())
    drive(home, f"slurm:{options}", "index", launcher=launcher)
    assert len(records(home / "index-there")) == 2 * SHARDS
    wait_until(lambda: not _alive(descendants(os.getpid()) - before), "the end of the jobs")


def _alive(pids: set[int]) -> set[int]:
    for pid in list(pids):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0]:
                pids.discard(pid)
    return pids
