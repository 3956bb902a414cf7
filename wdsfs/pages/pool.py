"""Worker processes for decoding: started when they are first needed, replaced when they end or take too long.

A worker gets the bytes of a member from here, in the ranges that it asks for, and answers with plain data. It
never gets a path, a descriptor or the environment of this process, in which secrets may be.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wdsfs.errors import WdsfsError
from wdsfs.pages import wire
from wdsfs.pages.preview import Detail, Preview, unpacked

_START = "import sys; sys.path[:] = sys.argv[1:]; from wdsfs.pages.worker import main; main()"
_PACKAGE = str(Path(__file__).parents[2])
_KEPT_VARIABLES = ("PATH", "LANG", "LD_LIBRARY_PATH", "PYTHONHOME")
# One thread is enough, and the stacks and arenas of more would count as memory.
_VARIABLES = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
}
STARTING = 120.0  # seconds that a worker may take to load its libraries, on a busy machine
REQUESTS_MAX = 20_000  # ranges that a worker may ask for to decode one member


@dataclass(frozen=True, slots=True)
class Limits:
    """What one preview may cost a worker: memory above that of its libraries (bytes), seconds of a processor.

    `patience` (seconds): how long an answer may take, without the time for reading the member.
    """

    memory: int = 512 << 20
    seconds: int = 10
    patience: float = 60.0


class Undecoded(Exception):
    """There is no preview of this content. The text is a whole sentence for the reader."""


class NoDecoder(WdsfsError):
    """No worker can be started: something is wrong with the installation, not with the content."""


@dataclass(frozen=True, slots=True)
class Work:
    """A member to be decoded. `read(offset, length)` returns its bytes; `head` are the first of them."""

    decoder: str
    name: str
    size: int
    head: bytes
    read: Callable[[int, int], bytes]
    detail: Detail


class _Worker:
    """A process and the socket to it."""

    def __init__(self, libraries: Sequence[str], limits: Limits) -> None:
        self.is_used_up = False
        self.connection, theirs = socket.socketpair()
        with theirs:
            actions = [
                (os.POSIX_SPAWN_DUP2, theirs.fileno(), 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, 1, 2),  # libraries write warnings about the content there
            ]
            kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
            command = [sys.executable, "-P", "-c", _START, _PACKAGE, *sys.path]
            # In a process group of its own: an interrupt from the keyboard is for the server.
            self.pid = os.posix_spawn(
                sys.executable, command, kept | _VARIABLES, file_actions=actions, setpgroup=0
            )
        try:
            self.connection.settimeout(STARTING)
            wire.send(
                self.connection, {"libraries": libraries, "memory": limits.memory, "seconds": limits.seconds}
            )
            answer, _ = wire.receive(self.connection)
            if "failed" in answer:
                raise NoDecoder(f"previews cannot be made: {str(answer['failed'])[:500]}")
            self.connection.settimeout(limits.patience)
        except (wire.Broken, TimeoutError) as error:
            self.end()
            raise NoDecoder(f"previews cannot be made: the process for them does not start ({error})") from None
        except BaseException:
            self.end()
            raise

    def decode(self, work: Work) -> Preview:
        """The preview of a member. Raises Undecoded, Broken, TimeoutError, and what reading raises."""
        task = {
            "decoder": work.decoder,
            "name": work.name,
            "size": work.size,
            "detail": list(work.detail),
        }
        wire.send(self.connection, task, work.head)
        refused: Exception | None = None
        for _ in range(REQUESTS_MAX):
            message, data = wire.receive(self.connection)
            if "read" not in message:
                break
            try:
                wire.send(self.connection, {}, _range(work, message["read"]))
            except Exception as error:
                refused = error
                wire.send(self.connection, {"failed": True})
        else:
            raise wire.Broken("too many requests")
        if refused is not None:
            raise refused
        self.is_used_up = "ends" in message
        if "failed" in message:
            raise Undecoded(str(message["failed"]))
        try:
            return unpacked(message["done"], data)
        except (ValueError, TypeError, KeyError) as error:
            raise wire.Broken(str(error)) from None

    @property
    def has_ended(self) -> bool:
        """True if the process has ended, also if nobody has waited for it yet."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # where SIGCHLD is ignored, the kernel has removed it
            return True

    def end(self) -> None:
        """Kill the process, and wait until it has ended."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _range(work: Work, wanted: Any) -> bytes:
    """The bytes that a worker asks for. Raises Broken for an impossible range, and what reading raises."""
    try:
        offset, length = (int(number) for number in wanted)
    except (TypeError, ValueError):
        raise wire.Broken("no range") from None
    if not (0 <= offset <= work.size and 0 <= length <= wire.BYTES_MAX):
        raise wire.Broken("no range of the member")
    return work.read(offset, min(length, work.size - offset))


class Pool:
    """Up to `count` workers with `libraries` loaded. Safe for threads; callers wait for a free worker."""

    def __init__(self, count: int, libraries: Sequence[str], limits: Limits) -> None:
        self._libraries, self._limits = libraries, limits
        self._places: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(count):
            self._places.put(None)  # a worker that has yet to be started
        self._count = count
        self._workers: set[_Worker] = set()  # that there are now
        self._is_closed = False

    def decode(self, work: Work) -> Preview:
        """The preview of a member. Raises Undecoded, and what reading the member raises."""
        with self._taken() as taken:
            try:
                return taken.worker().decode(work)
            except Undecoded:
                if taken.current is not None and taken.current.is_used_up:
                    taken.drop()
                raise
            except TimeoutError:
                taken.drop()
                raise Undecoded("It takes more time than a preview may take.") from None
            except (wire.Broken, BrokenPipeError, ConnectionResetError):
                taken.drop()
                raise Undecoded(
                    "Its decoder was ended: it needs more time or memory than a preview may take."
                ) from None
            except BaseException:
                taken.drop()
                raise

    @contextlib.contextmanager
    def _taken(self) -> Iterator[_Taken]:
        taken = _Taken(self, self._places.get())
        try:
            yield taken
        finally:
            self._places.put(taken.current)

    @property
    def pids(self) -> list[int]:
        """The process numbers of the workers that there are now."""
        return [worker.pid for worker in list(self._workers)]

    def start(self) -> _Worker:
        """Start a worker. Raises NoDecoder."""
        if self._is_closed:
            raise NoDecoder("no more previews are made")
        worker = _Worker(self._libraries, self._limits)
        self._workers.add(worker)
        return worker

    def end(self, worker: _Worker) -> None:
        """Kill a worker."""
        self._workers.discard(worker)
        worker.end()

    def close(self) -> None:
        """End all workers; previews that are being made are given up."""
        self._is_closed = True
        for busy in list(self._workers):
            with contextlib.suppress(OSError):
                busy.connection.shutdown(socket.SHUT_RDWR)
        for _ in range(self._count):
            worker = self._places.get()
            if worker is not None:
                self.end(worker)
        for _ in range(self._count):
            self._places.put(None)


class _Taken:
    """The place of a worker while it is in use."""

    def __init__(self, pool: Pool, current: _Worker | None) -> None:
        self._pool, self.current = pool, current

    def worker(self) -> _Worker:
        if self.current is not None and self.current.has_ended:
            self.drop()
        if self.current is None:
            self.current = self._pool.start()
        return self.current

    def drop(self) -> None:
        if self.current is not None:
            self._pool.end(self.current)
            self.current = None
