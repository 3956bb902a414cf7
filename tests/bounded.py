"""Runs code in a process of its own that may use only so much memory and so much time of a processor.

For what hostile input may cost: the bounds are generous, and only what has no end, or grows with a number that the
input claims, reaches them.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import traceback
import warnings
from collections.abc import Callable
from typing import TypeVar

from wdsfs.errors import WdsfsError

T = TypeVar("T")

MEMORY = 256 << 20  # bytes above what the process has at its start
SECONDS = 60  # of a processor


def bounded(function: Callable[[], T], memory: int = MEMORY, seconds: int = SECONDS) -> T:
    """The result of a function, which may use `memory` more bytes than this process, and `seconds` of a processor.

    Raises the WdsfsError that it raises; AssertionError for any other, and when it has reached a bound.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: threads do not go on in the child
        pid = os.fork()
    if not pid:
        os.close(reader)
        _answer(function, memory, seconds, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        answer = stream.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        raise AssertionError(f"ended by {signal.Signals(os.WTERMSIG(status)).name}")
    is_right, result = pickle.loads(answer)
    if not is_right:
        raise result if isinstance(result, WdsfsError) else AssertionError(result)
    found: T = result
    return found


def _answer(function: Callable[[], T], memory: int, seconds: int, writer: int) -> None:
    """Run a function within limits, send what comes of it, and end this process."""
    try:
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[5]) * resource.getpagesize()
        used = resource.getrusage(resource.RUSAGE_SELF)
        # Not RLIMIT_AS: the map of an LMDB file takes no memory.
        resource.setrlimit(resource.RLIMIT_DATA, (now + memory, now + memory))
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + seconds,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        answer = pickle.dumps((True, function()))
    except WdsfsError as error:
        answer = pickle.dumps((False, error))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    with os.fdopen(writer, "wb") as stream:
        stream.write(answer)
    os._exit(0)
