"""Work for the processes of a pool: functions that they can import without anything else.

The imports of a test would be theirs, too: seconds of work, and processes below a process that is to be killed
(importing trio starts `ldconfig`).
"""

from __future__ import annotations

import os
import signal
from typing import Any

from wdsfs.errors import CorruptShard, MissingShard


def length(path: bytes) -> int:
    """What the file holds must be its name; or else the name says what happens."""
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


def process(path: bytes) -> int:
    return os.getpid()


def large(path: bytes) -> bytes:
    return bytes(5_000_000)


def group_and_signals(path: bytes) -> tuple[int, Any]:
    return os.getpgrp(), signal.getsignal(signal.SIGINT)
