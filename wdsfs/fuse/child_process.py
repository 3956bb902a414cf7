"""Processes that the supervisor forks besides its workers: short ones that answer a question, and one that stays.

The supervisor must not open an index or use its own mount: no request would be served meanwhile, and a mount that
does not answer would block it forever. Such work is done in a child.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
from collections.abc import Callable
from typing import Any

import trio

log = logging.getLogger(__name__)


def start_child(work: Callable[[], int], name: str) -> int:
    """Return the number of a forked process that does this work and exits with its result. Raises OSError."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            _restore_signals()
            code = work()
        except BaseException:
            log.exception("%s failed", name)
        finally:
            os._exit(code)
    return pid


def _restore_signals() -> None:
    """Restore the signal handling that the supervisor has changed for itself."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGHUP):  # the supervisor acts on these, and ends the mount
        signal.signal(number, signal.SIG_IGN)


def kill(pid: int) -> None:
    """Kill a child, unless `pid` is 0 or the child is gone."""
    with contextlib.suppress(ProcessLookupError):
        if pid:
            os.kill(pid, signal.SIGKILL)


class HelperProcess:
    """A process of the mount, at most one at a time; `pid` is 0 while no process runs."""

    def __init__(self, name: str) -> None:
        self.name, self.pid = name, 0

    def fork(self, work: Callable[[], int]) -> None:
        """Fork the process, which exits with the result of `work`. Raises OSError."""
        self.pid = start_child(work, self.name)

    def kill(self) -> None:
        """Kill the process, if there is one; `reap` collects it."""
        kill(self.pid)

    def reap(self) -> int | None:
        """Collect the process if it has ended: return its exit code, negative for a signal; else None."""
        pid, status = os.waitpid(self.pid, os.WNOHANG) if self.pid else (0, 0)
        if not pid:
            return None
        self.pid = 0
        return os.waitstatus_to_exitcode(status)


# --- questions


async def in_child(function: Callable[[], dict[str, Any]], device: int | None) -> dict[str, Any]:
    """Run `function` in a forked process; return its result, empty if it fails."""
    return await Child(function, device).answer()


_killed: set[int] = set()  # children that may not have ended yet: the next `Child` collects them


class Child:
    """A forked process that runs `function`.

    The child closes `device`, unless it is None. Otherwise a request that is never answered would keep the mount
    alive, and the mount would keep the child alive.
    """

    def __init__(self, function: Callable[[], dict[str, Any]], device: int | None) -> None:
        self._pid = 0  # no process could be started
        _killed.difference_update([pid for pid in _killed if os.waitpid(pid, os.WNOHANG)[0]])
        try:
            self._start(function, device)
        except OSError as error:
            log.error("a question to the mount has failed: %s", error.strerror)

    def _start(self, function: Callable[[], dict[str, Any]], device: int | None) -> None:
        """Start the process. Raises OSError."""
        self._receiver, sender = os.pipe()
        try:
            self._pid = start_child(lambda: _send_answer(function, sender, device), "a question to the mount")
        except OSError:
            os.close(self._receiver)
            raise
        finally:
            os.close(sender)

    async def answer(self) -> dict[str, Any]:
        """Wait for the result of the function, and return it; empty if the function fails. Call this once."""
        if not self._pid:
            return {}
        try:
            text = await self._read()
            await self._reap()
        except BaseException:
            # Not waited for: the child may wait for this mount, and cannot die before the mount answers or ends.
            os.kill(self._pid, signal.SIGKILL)
            _killed.add(self._pid)
            raise
        finally:
            os.close(self._receiver)
        # Without a line feed the child was killed while it wrote.
        answer: dict[str, Any] = json.loads(text) if text.endswith(b"\n") else {}
        return answer

    async def _read(self) -> bytes:
        """Return the answer, up to its line feed: a process that the child has forked may hold the pipe open."""
        text = b""
        while not text.endswith(b"\n"):
            await trio.lowlevel.wait_readable(self._receiver)
            part = os.read(self._receiver, 1 << 16)
            if not part:
                break
            text += part
        return text

    async def _reap(self) -> None:
        """Wait until the child has ended, and collect it. Raises OSError."""
        try:
            process = os.pidfd_open(self._pid)
        except OSError:  # a kernel before Linux 5.3, or too many files are open
            while not os.waitpid(self._pid, os.WNOHANG)[0]:  # noqa: ASYNC110, ASYNC222  # it does not block
                await trio.sleep(0.001)
            return
        try:
            await trio.lowlevel.wait_readable(process)
        finally:
            os.close(process)
        os.waitpid(self._pid, 0)  # noqa: ASYNC222  # it has ended


def _send_answer(function: Callable[[], dict[str, Any]], sender: int, device: int | None) -> int:
    """Write the result of a function as a line, in a child."""
    if device is not None:
        os.close(device)
    os.write(sender, json.dumps(function()).encode() + b"\n")
    return 0
