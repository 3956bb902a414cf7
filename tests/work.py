"""Work for the processes of a pool: functions that they can import without anything else.

The imports of a test would be theirs, too: seconds of work, and processes below a process that is to be killed
(importing trio starts `ldconfig`).
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

from tests.processes import PATIENCE
from wdsfs.errors import CorruptShard, MissingShard


def length(path: bytes) -> int:
    """The content of the file must be its name, unless the name says what happens."""
    name = os.path.basename(path).decode()
    match name.split("-")[0]:
        case "missing":
            raise MissingShard(name)
        case "corrupt":
            raise CorruptShard(name)
        case "bug":
            raise ValueError(name)
        case "deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "forever":
            signal.pause()
    with open(path, "rb") as file:
        assert file.read() == name.encode()
    return len(name)


def begun_and_never_done(path: bytes) -> int:
    """Leave a file `PATH.begun`, and wait."""
    with open(path + b".begun", "xb"):
        signal.pause()
    return 0


def process(path: bytes) -> int:
    return os.getpid()


def two_at_once(path: bytes) -> int:
    """The number of the process, once another one works at a shard of the same directory."""
    directory = os.path.dirname(path)
    with open(directory + b"/%d.process" % os.getpid(), "wb"):
        pass
    for _ in range(int(PATIENCE) * 100):
        if sum(name.endswith(b".process") for name in os.listdir(directory)) > 1:
            return os.getpid()
        time.sleep(0.01)
    raise ValueError("no other process")


def large(path: bytes) -> bytes:
    return bytes(5_000_000)


def group_and_signals(path: bytes) -> tuple[int, Any]:
    return os.getpgrp(), signal.getsignal(signal.SIGINT)


def threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2)


def no_executor() -> str:
    return "nothing that works"


class _OneAndNoMore(Executor):
    """Works at one unit (and at the question for the version), then leaves a note and hangs."""

    def __init__(self) -> None:
        self._left = 2

    def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._left -= 1
        if self._left >= 0:
            future.set_result(function(*arguments))
        else:
            open("stuck", "w").close()
        return future


def one_and_no_more() -> Executor:
    return _OneAndNoMore()
