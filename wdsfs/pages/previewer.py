"""Makes previews of files, safe for hostile bytes, and caches them; decoding is done by worker processes.

Workers are started when they are first needed, and replaced when they end or take too long. A worker gets the
bytes of a member from here, in the ranges that it requests, and answers with plain data. It never gets a path, a
descriptor or the environment of this process, in which secrets may be.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wdsfs.errors import WdsfsError
from wdsfs.pages import wire
from wdsfs.pages.preview import (
    CARD,
    KIND_BYTES,
    PLAYERS,
    WHOLE,
    Content,
    Detail,
    Picture,
    Preview,
    Source,
    bytes_needed,
    content_of,
    hex_preview,
    plain_preview,
)

WORKERS = 2  # processes that decode
CACHE_BYTES = 32 << 20  # of previews in memory
STARTING = 120.0  # seconds that a worker may take to load its libraries, on a busy machine
REQUESTS_MAX = 20_000  # ranges that a worker may request to decode one member
_FIRST_BYTES = 256 << 10  # first bytes that a worker gets at once; most members are smaller

_START = "import sys; sys.path[:] = sys.argv[1:]; from wdsfs.pages.decoding_process import main; main()"
_PACKAGE = str(Path(__file__).parents[2])
_PASSED_VARIABLES = ("PATH", "LANG", "LD_LIBRARY_PATH", "PYTHONHOME")
# One thread is enough, and the stacks and arenas of more would count as memory.
_VARIABLES = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MALLOC_ARENA_MAX"), "1")


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a worker for one preview: memory above that of its libraries (bytes), seconds of a processor.

    `patience` (seconds): how long an answer may take, without the time for reading the member.
    """

    memory: int = 512 << 20
    seconds: int = 10
    patience: float = 60.0


class Undecoded(Exception):
    """Content that has no preview. The text is a whole sentence for the reader."""


class NoDecoder(WdsfsError):
    """Failure to start a worker: something is wrong with the installation, not with the content."""


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
    """A process and the socket to it. `is_used_up`: it must not decode another member."""

    def __init__(self, limits: Limits) -> None:
        self.is_used_up = False
        self.connection, theirs = socket.socketpair()
        with theirs:
            actions = [
                (os.POSIX_SPAWN_DUP2, theirs.fileno(), 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, 1, 2),  # libraries write warnings about the content there
            ]
            passed = {name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ}
            command = [sys.executable, "-P", "-c", _START, _PACKAGE, *sys.path]
            # In a process group of its own: an interrupt from the keyboard is for the server.
            self.pid = os.posix_spawn(
                sys.executable, command, passed | _VARIABLES, file_actions=actions, setpgroup=0
            )
        try:
            self.connection.settimeout(STARTING)
            settings = {"memory": limits.memory, "seconds": limits.seconds}
            wire.send(self.connection, settings)
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
        """Return the preview of a member. Raises Undecoded, and what reading raises."""
        self.is_used_up = True  # unless it answers in time
        try:
            return self._answer(work)
        except TimeoutError:
            raise Undecoded("It takes more time than a preview may take.") from None
        except (wire.Broken, BrokenPipeError, ConnectionResetError):
            text = "Its decoder was ended: it needs more time or memory than a preview may take."
            raise Undecoded(text) from None

    def _answer(self, work: Work) -> Preview:
        """Send the work and return the answer, as `decode`. Raises Broken, OSErrors of the socket, too."""
        task = {"decoder": work.decoder, "name": work.name, "size": work.size, "detail": list(work.detail)}
        wire.send(self.connection, task, work.head)
        unreadable: Exception | None = None
        for _ in range(REQUESTS_MAX):
            message, data = wire.receive(self.connection)
            if "read" not in message:
                break
            try:
                wire.send(self.connection, {}, _range(work, message["read"]))
            except Exception as error:
                unreadable = error
                wire.send(self.connection, {"failed": True})
        else:
            raise wire.Broken("too many requests")
        if unreadable is not None:
            raise unreadable
        if "failed" in message:
            self.is_used_up = "ends" in message
            raise Undecoded(str(message["failed"]))
        try:
            preview = wire.unpacked(message["done"], data)
        except (ValueError, TypeError, KeyError) as error:
            raise wire.Broken(str(error)) from None
        self.is_used_up = False
        return preview

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


def _range(work: Work, request: Any) -> bytes:
    """Return the bytes that a worker requests. Raises Broken for an impossible range, and what reading raises."""
    try:
        offset, length = (int(number) for number in request)
    except (TypeError, ValueError):
        raise wire.Broken("a malformed range") from None
    if not (0 <= offset <= work.size and 0 <= length <= wire.BYTES_MAX):
        raise wire.Broken("a range outside of the member")
    return work.read(offset, min(length, work.size - offset))


class Previewer:
    """Makes previews, several at a time. Safe for threads.

    No content makes it raise: content that cannot be shown gives a Preview with a `problem`.
    """

    def __init__(
        self, workers: int = WORKERS, limits: Limits | None = None, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self._limits = limits or Limits()
        # Callers wait here for a worker; None is one that has yet to be started.
        self._places: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(workers):
            self._places.put(None)
        self._count = workers
        self._workers: set[_Worker] = set()  # that there are now
        self._is_closed = False
        self._cache = _Cache(cache_bytes)

    def preview(self, name: str, source: Source, detail: Detail = WHOLE) -> Preview:
        """Return the preview of a file with this name or extension.

        Raises NoDecoder, and what `source.read` raises.
        """
        key = None if source.key is None else (source.key, name, source.size, detail)
        preview = self._cache.get(key)
        if preview is None:
            preview = self._make(name, source, detail)
            self._cache.put(key, preview)
        return preview

    def thumbnail(self, name: str, source: Source, side: int = CARD.edge) -> Picture | None:
        """Return a picture with edges of at most `side` pixels, or None if there is none. Raises as `preview`."""
        pictures = self.preview(name, source, CARD._replace(edge=side)).pictures
        return pictures[0] if pictures else None

    def _make(self, name: str, source: Source, detail: Detail) -> Preview:
        head = _read_beginning(source, b"", KIND_BYTES)
        content = content_of(name, head)
        if content.decoder in ("text", "label"):
            head = _read_beginning(source, head, bytes_needed(detail))
        preview = plain_preview(content, head, source.size, detail)
        return preview or self._decode(name, source, content, head, detail)

    def _decode(self, name: str, source: Source, content: Content, head: bytes, detail: Detail) -> Preview:
        head = _read_beginning(source, head, _FIRST_BYTES)
        is_known = content_of(name, b"").extension == content.extension
        name = name if is_known else content.extension
        try:
            return self._by_worker(Work(content.decoder, name, source.size, head, source.read, detail))
        except Undecoded as error:
            return _undecoded(content, head, source.size, str(error))

    # --- the workers

    def _by_worker(self, work: Work) -> Preview:
        """Return the preview of a member. Raises Undecoded, NoDecoder, and what reading the member raises."""
        worker = self._places.get()
        try:
            if worker is not None and worker.has_ended:
                self._end(worker)
                worker = None
            if worker is None:
                worker = self._start()
            try:
                return worker.decode(work)
            finally:
                if worker.is_used_up:
                    self._end(worker)
                    worker = None
        finally:
            self._places.put(worker)

    @property
    def workers(self) -> list[int]:
        """The process numbers of the workers that there are now."""
        return [worker.pid for worker in list(self._workers)]

    def _start(self) -> _Worker:
        """Start a worker. Raises NoDecoder."""
        if self._is_closed:
            raise NoDecoder("no more previews are made")
        worker = _Worker(self._limits)
        self._workers.add(worker)
        return worker

    def _end(self, worker: _Worker) -> None:
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
                self._end(worker)
        for _ in range(self._count):
            self._places.put(None)


def _read_beginning(source: Source, head: bytes, length: int) -> bytes:
    """Return the first bytes of a file, of which `head` are known."""
    length = min(length, source.size)
    return head + source.read(len(head), length - len(head)) if length > len(head) else head


def _undecoded(content: Content, head: bytes, size: int, problem: str) -> Preview:
    """Return the preview of a file that could not be decoded: a browser may still play it."""
    player = PLAYERS.get(content.extension)
    if player is None:
        return hex_preview(head, size, problem)
    return Preview("audio" if player.startswith("audio/") else "video", problem=problem)


class _Cache:
    """The previews that were used last, up to a number of bytes."""

    def __init__(self, most: int) -> None:
        self._most, self._bytes = most, 0
        self._previews: OrderedDict[Hashable, Preview] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Preview | None:
        """Return a preview, None if it is not cached."""
        with self._lock:
            preview = self._previews.get(key)
            if preview is not None:
                self._previews.move_to_end(key)
            return preview

    def put(self, key: Hashable, preview: Preview) -> None:
        """Cache a preview, unless the key is None; evict the longest unused ones."""
        if key is None or preview.weight > self._most:
            return
        with self._lock:
            if key in self._previews:
                return
            self._previews[key] = preview
            self._bytes += preview.weight
            while self._bytes > self._most:
                _, dropped = self._previews.popitem(last=False)
                self._bytes -= dropped.weight
