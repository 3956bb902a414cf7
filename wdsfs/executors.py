"""Executors: opens the engine that `--executor` names (Dask, Ray, MPI, Slurm, a callable).

::

    dask:ADDRESS         the scheduler at ADDRESS (tcp://host:8786), or the one of a scheduler file
    ray[:ADDRESS]        the cluster at ADDRESS (host:6379), or the one that this machine belongs to
    mpi                  the other ranks, under `mpiexec -n N python -m mpi4py.futures -m wdsfs ...`
    slurm:jobs=N,...     N jobs of Slurm, through dask-jobqueue, with its options (cores=4,memory=16GB,queue=cpu)
    MODULE:CALLABLE      any other: what CALLABLE returns, such as loky:get_reusable_executor

An engine is imported when it is first needed, and none is a dependency of wdsfs. `cluster_workers.py` hands work
to it. This module is a wing (`wings.py`).
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import socket
import sys
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import Any

from wdsfs.cluster_workers import Engine
from wdsfs.errors import ExecutorUnusable, UsageError
from wdsfs.wings import install_command

CONNECT_SECONDS = 10
SPELLINGS = "dask:ADDRESS, ray[:ADDRESS], mpi, slurm:jobs=N[,NAME=VALUE...] or MODULE:CALLABLE"

_CALLABLE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_ADDRESS = re.compile(r"(\w+://)?\S+:\d+|inproc://\S+")
_MPI = "start it by: mpiexec -n 3 python -m mpi4py.futures -m wdsfs COMMAND --executor mpi ..."


def opener(text: str) -> Callable[[], Engine]:
    """Return the function that opens the engine that a user names. Raises UsageError for an unknown name.

    The function raises UsageError for a package that is missing, ExecutorUnusable for an engine that is not there.
    """
    kind, _, rest = text.partition(":")
    if kind == "dask" and rest:
        return lambda: _dask(rest)
    if kind == "ray":
        return lambda: _ray(rest)
    if text == "mpi":
        return _mpi
    if kind == "slurm":
        options = _slurm_options(rest)
        return lambda: _slurm(dict(options))
    if kind not in ("dask", "mpi") and _CALLABLE.fullmatch(text):
        return lambda: _of_callable(text)
    raise UsageError(f"--executor {text}: write {SPELLINGS}")


def _package(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        text = f"needs the package {name}, which cannot be imported ({error}); type: {install_command(extra)}"
        raise UsageError(f"--executor {extra} {text}") from None


# --- Dask, and Slurm through it


def _dask(address: str) -> Engine:
    distributed = _package("distributed", "dask")
    place = {"scheduler_file": address} if os.path.exists(address) else {"address": address}
    if "address" in place and not _ADDRESS.fullmatch(address):  # for which Dask waits, and prints a traceback
        text = "is neither an existing scheduler file nor an address such as tcp://host:8786"
        raise UsageError(f"--executor dask:{address}: {text}")
    try:
        client = distributed.Client(**place, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError, TypeError, KeyError) as error:
        why = str(error) or type(error).__name__
        raise ExecutorUnusable(f"--executor dask:{address}: no scheduler answers there: {why}") from None
    return _of_client(distributed, client, client.close)


def _of_client(distributed: Any, client: Any, close: Callable[[], None]) -> Engine:
    # Errors that concern the command are raised. The messages in the log are about connections that it has closed.
    for name in ("distributed", "tornado"):
        logging.getLogger(name).setLevel(logging.CRITICAL)

    def width() -> int:
        return sum(client.nthreads().values())

    # Its own retries come first: `distributed.scheduler.allowed-failures` workers may die of a unit.
    return Engine(client.get_executor(), width, (distributed.KilledWorker,), retries=True, close=close)


def _slurm_options(text: str) -> dict[str, Any]:
    """Return the options after `slurm:`. Raises UsageError."""
    options: dict[str, Any] = {}
    for word in filter(None, text.split(",")):
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--executor slurm: {word!r} is not NAME=VALUE, such as jobs=20 or queue=cpu")
        options[name] = int(value) if value.isdecimal() else value
    jobs = options.get("jobs")
    if not isinstance(jobs, int) or jobs < 1:
        raise UsageError(
            "--executor slurm: the number of jobs is missing: slurm:jobs=20,cores=4,memory=16GB,queue=cpu"
        )
    return options


def _slurm(options: dict[str, Any]) -> Engine:
    jobqueue, distributed = _package("dask_jobqueue", "slurm"), _package("distributed", "slurm")
    jobs = options.pop("jobs")
    try:
        cluster = jobqueue.SLURMCluster(**options)
        cluster.scale(jobs=jobs)
        client = distributed.Client(cluster, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise ExecutorUnusable(f"--executor slurm: no jobs can be started: {error}") from None

    def close() -> None:
        client.close()
        cluster.close()  # which cancels the jobs

    return _of_client(distributed, client, close)


# --- Ray


class _RayExecutor(Executor):
    """Ray as an Executor, which it has none of."""

    def __init__(self, ray: Any) -> None:
        # A lambda travels by value: a worker without wdsfs can say so.
        self._call = ray.remote(lambda function, *arguments: function(*arguments))

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = self._call.remote(function, *arguments).future()
        return future


def _ray(address: str) -> Engine:
    ray = _package("ray", "ray")
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdecimal() and "/" not in host:
            # Ray itself waits for minutes, and cannot be interrupted meanwhile.
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        ray.init(address or "auto", log_to_driver=False, logging_level="error", configure_logging=True)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = f"ray:{address}" if address else "ray"
        raise ExecutorUnusable(f"--executor {where}: no cluster of Ray answers there: {why}") from None
    errors = ray.exceptions
    lost = (
        *(errors.WorkerCrashedError, errors.NodeDiedError, errors.LocalRayletDiedError),
        *(errors.OutOfMemoryError, errors.ObjectLostError),
    )

    def width() -> int:
        return int(ray.cluster_resources().get("CPU", 0))

    return Engine(_RayExecutor(ray), width, lost, retries=True, close=ray.shutdown)


# --- MPI, and all others


def _mpi() -> Engine:
    if "mpi4py.futures" not in sys.orig_argv:  # else each rank would be a driver of its own
        _package("mpi4py.futures", "mpi")
        raise UsageError(f"--executor mpi: {_MPI}")
    futures, mpi = _package("mpi4py.futures", "mpi"), _package("mpi4py.MPI", "mpi")
    ranks = mpi.COMM_WORLD.Get_size()
    if ranks < 2:
        raise ExecutorUnusable(f"--executor mpi: there is only one rank: {_MPI}")
    executor = futures.MPIPoolExecutor()
    return Engine(executor, lambda: ranks - 1, close=executor.shutdown)


def _of_callable(text: str) -> Engine:
    executor = _returned_by(text)
    if isinstance(executor, type) or not hasattr(executor, "submit"):
        kind = "class" if isinstance(executor, type) else type(executor).__name__
        raise UsageError(f"--executor {text}: returns a {kind}, not a concurrent.futures.Executor")

    def width() -> int:
        count = getattr(executor, "_max_workers", 0)  # of the executors of the standard library, and of loky
        return count if isinstance(count, int) else 0

    def close() -> None:
        with contextlib.suppress(BrokenExecutor):
            executor.shutdown(wait=True)

    return Engine(executor, width, renewable=True, close=close)


def _returned_by(text: str) -> Any:
    """Call MODULE:CALLABLE and return its result. Raises UsageError, whatever its code raises."""
    module, _, name = text.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--executor {text}: cannot be imported: {error}; is it in PYTHONPATH?") from None
    except Exception as error:
        raise UsageError(f"--executor {text}: cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(value):
        kind = type(value).__name__
        raise UsageError(f"--executor {text}: is a {kind}, not a callable that returns an Executor")
    try:
        return value()
    except Exception as error:
        raise UsageError(f"--executor {text}: cannot be called: {type(error).__name__}: {error}") from error
