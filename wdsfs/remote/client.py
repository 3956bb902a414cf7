"""The clients of the fetcher: read, fetch and send remote objects for code without a network.

A process makes a `FetcherClient` before it forks. Its children use the same client, and each thread has its own
connection. The client reads cached bytes itself, and asks the fetcher for other bytes. When the fetcher dies, the
client that notices this starts a new fetcher and asks again: callers see only a delay.

`Launcher` makes three things once, and all fetchers inherit them. Requests wait at a listening socket while there
is no fetcher. A pipe ends with the last process that may have requests. A file in memory has the configuration.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wdsfs import host, shared_settings, waits
from wdsfs.door.pins import Listing, Pin
from wdsfs.door.urls import Url
from wdsfs.errors import Unreachable, UnreadableShard
from wdsfs.remote import messages
from wdsfs.remote.cached_object import CachedObject
from wdsfs.remote.messages import LOCK, READ_MAX, WAITING, Alarm, Configuration, Frame, Span, peer_user
from wdsfs.remote.object_cache import ObjectCache
from wdsfs.shards import Fingerprint

MEMORY = 256 << 20  # bytes, for requests in flight and for bytes that are in no cache
NOTE = 1 << 20  # bytes: reads from the cache are noted once for each stretch of this size
PAUSES = (0.0, 0.05, 0.2, 0.5, 1.0)  # seconds before a request is repeated after the death of the fetcher

_START = "import sys; sys.path[:] = sys.argv[2:]; from wdsfs.remote.fetcher import main; main(int(sys.argv[1]))"
_LOOK = struct.pack("ll", int(waits.LOOK_SECONDS), int(waits.LOOK_SECONDS % 1 * 1e6))  # a struct timeval


class Launcher:
    """Keeps one fetcher running for this process and its forks."""

    def __init__(self, alarm: int, device: int | None, **configured: Any) -> None:
        """`configured` are the fields of `Configuration` that are no descriptors."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("")  # a name that the kernel chooses; the user of each connection is checked
        self._listener.listen(WAITING)
        self._life, self._living = os.pipe()
        self._file = os.memfd_create("wdsfs-fetcher")
        listener = self._listener.fileno()
        configuration = Configuration(
            listener=listener, life=self._life, alarm=alarm, user=os.geteuid(), device=device, **configured
        )
        os.pwrite(self._file, json.dumps(asdict(configuration)).encode(), 0)
        self._inherited = [fd for fd in (listener, self._life, self._file, alarm, device) if fd is not None]
        self._keeper = os.getpid()
        self._started: dict[int, int] = {}  # by process: the pid of the fetcher that it has started
        # True if the process that has made this launcher restarts the fetcher whenever the fetcher dies.
        self.is_restarted = False
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()  # the thread that has it may be in the parent

    @property
    def pid(self) -> int:
        """The process number of the fetcher, 0 without one."""
        lock = fcntl.fcntl(self._file, fcntl.F_GETLK, LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
        kind, _, _, _, pid = LOCK.unpack(lock)
        return 0 if kind == fcntl.F_UNLCK else pid

    def connect(self) -> socket.socket:
        """Return a connection to the present fetcher, or to the next one. Raises OSError."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(self._listener.getsockname())
        except BaseException:
            connection.close()
            raise
        return connection

    def ensure(self) -> bool:
        """Start a fetcher unless there is one; True if one was started. Raises OSError.

        With `is_restarted`, a child leaves that to the process that has made this, as long as it is the child's
        parent: the parent notices at once when a fetcher dies.
        """
        with self._lock:
            if self.is_restarted and self._keeper == os.getppid():
                return False
            if self._is_starting() or self.pid:
                return False
            self._started[os.getpid()] = self._start()
            return True

    def _is_starting(self) -> bool:
        """Return True if a fetcher that this process has started is alive, with the lock or without it."""
        ours = self._started.get(os.getpid())
        if ours is None:
            return False
        with contextlib.suppress(ChildProcessError):
            if not os.waitpid(ours, os.WNOHANG)[0]:
                return True
        del self._started[os.getpid()]
        return False

    def _start(self) -> int:
        # It does not inherit standard output: a program that reads that to the end must not wait for the fetcher.
        actions = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), (os.POSIX_SPAWN_DUP2, 2, 1)]
        actions += [(os.POSIX_SPAWN_DUP2, fd, fd) for fd in self._inherited]  # makes it inheritable
        command = [sys.executable, "-P", "-c", _START, str(self._file), *sys.path]
        # In a new process group, so that an interrupt from the keyboard does not end it before its clients.
        environment = host.environment() | shared_settings.variables()  # in which it runs the commands of `pipe:`
        return os.posix_spawn(sys.executable, command, environment, file_actions=actions, setpgroup=0)

    def close(self) -> None:
        """Leave the fetcher; if this process started it, wait for its end. It ends when all processes have left.

        This can be called repeatedly.
        """
        if self._listener.fileno() < 0:
            return
        for fd in (self._life, self._living, self._file):
            os.close(fd)
        self._listener.close()
        ours = self._started.pop(os.getpid(), None)
        if ours is not None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(ours, 0)


class FetcherClient:
    """Remote objects for this process and its forks.

    `settings` are those of the stores (`settings.Settings.sections`). The fetcher fills
    `cache`, from which clients read. With `device`, requests of the kernel can be handed over.
    The fetcher prepares for requests to the store of `first`.
    """

    def __init__(
        self,
        settings: Any,
        cache: ObjectCache | None = None,
        memory: int = MEMORY,
        device: int | None = None,
        log: Path | None = None,
        first: Url | None = None,
    ) -> None:
        self.alarm = Alarm()
        self._cache = cache
        place = None if cache is None else (str(cache.directory), cache.limit)
        configured = {"settings": settings, "cache": place, "memory": memory, "first": first}
        self._launcher = Launcher(self.alarm.fd, device, log=None if log is None else str(log), **configured)
        self._local = threading.local()
        self._connections: dict[int, weakref.ref[FetcherConnection]] = {}  # by thread

    def ensure(self) -> None:
        """Start a fetcher unless there is one. Raises OSError."""
        self._launcher.ensure()

    def promise_restart(self) -> None:
        """Promise, before the first fork, that this process will call `ensure` when one of its children ends."""
        self._launcher.is_restarted = True

    @property
    def alarm_words(self) -> memoryview[int]:
        """See `FetcherLink`."""
        return self.alarm.words

    @property
    def fetcher(self) -> int:
        """The process number of the fetcher, 0 without one."""
        return self._launcher.pid

    def close(self) -> None:
        """Close the connection to the fetcher. No object may be in use any more."""
        self._disconnect()
        self._launcher.close()
        self.alarm.close()

    # --- stores

    def stat(self, urls: Sequence[Url]) -> list[Pin | Exception]:
        """Return the pin of the object at each URL, or the ShardError that it gives. Raises ShardError."""
        return [messages.outcome_of(outcome) for outcome in self._result(messages.HEAD, list(urls))]

    def list(self, prefix: Url, *, deep: bool) -> Listing:
        """Return the objects below a prefix; see `StoreReader.list`. Raises ShardError, SpecError."""
        objects, folders = self._result(messages.LIST, [prefix, deep])
        return Listing([(Url(*url), Pin(*pin)) for url, pin in objects], folders)

    def describe(self, url: Url) -> dict[str, Any]:
        """Return a report about a store, for people. Raises ShardError."""
        report: dict[str, Any] = self._result(messages.DESCRIBE, url)
        return report

    def stats(self) -> dict[str, Any]:
        """Return the counters and the present state of the fetcher."""
        stats: dict[str, Any] = self._result(messages.STATS, None)
        return stats

    def fetch(self, url: Url, pin: Pin, progress: Callable[[int], None] = lambda size: None) -> None:
        """Bring an object into the cache; `progress` gets the count of bytes that are there. Raises ShardError."""

        def request(connection: FetcherConnection, number: int) -> bytes:
            return messages.text(messages.FETCH, number, connection.number_of(url, pin))

        self._ask(request, lambda frame: progress(frame.value))

    def upload(self, url: Url, file: str, replaces: Pin | None, goes_on: Callable[[], None]) -> Pin:
        """Put a file into a store: replace the pinned object, or make a new one; return the new pin.

        `goes_on` is called twice a second, and may raise an exception: that ends the upload, which leaves nothing.
        Raises ShardError, of which ObjectExists and ObjectChanged say that another object is there.
        """
        return self._store_object(messages.UPLOAD, [url, file, replaces], goes_on)

    def copy(self, url: Url, pin: Pin, target: Url, goes_on: Callable[[], None]) -> Pin:
        """Copy the pinned object, by its store, to another place in its bucket, where there is none; as `upload`.

        Raises NoRanges if the store cannot copy.
        """
        return self._store_object(messages.COPY, [url, pin, target], goes_on)

    def _store_object(self, kind: int, value: Any, goes_on: Callable[[], None]) -> Pin:
        return Pin(*self._ask(lambda _, number: messages.text(kind, number, value), lambda _: goes_on()).value)

    def open(self, url: Url, pin: Pin) -> RemoteTar:
        """Return an object to read. No request is sent to its store yet."""
        cached = None
        if self._cache is not None:
            try:
                cached = self._cache.open(url.shown, pin)
            except OSError:  # the fetcher meets the same, and logs it
                cached = None
        return RemoteTar(self, url, pin, cached)

    def _result(self, kind: int, value: Any) -> Any:
        return self._ask(lambda _, number: messages.text(kind, number, value)).value

    # --- reading, for RemoteTar

    def read(self, tar: RemoteTar, begin: int, end: int, cached: bool) -> bytes | None:
        """Return a range of an object; None if it is in the cache now, and `cached` allows that.

        Raises ShardError.
        """

        def request(connection: FetcherConnection, number: int) -> bytes:
            return messages.range_frame(
                messages.READ,
                number,
                messages.Read(connection.number_of(tar.url, tar.pin, tar.following), begin, end, cached),
            )

        frame = self._ask(request)
        return frame.body if frame.kind == messages.DATA else None

    def tell(self, message: Callable[[FetcherConnection], bytes]) -> None:
        """Send a message that has no answer. Raises Unreachable."""
        for pause in PAUSES:
            _pause(pause)
            try:
                self._connection().send(message)
                return
            except OSError:
                self._disconnect()
        raise Unreachable("the process that fetches remote shards cannot be reached")

    def interrupt(self, unique: int) -> None:
        """Tell the fetcher that the client of a request, which may have been handed over, no longer waits."""
        self.tell(lambda _: messages.text(messages.INTERRUPT, 0, unique))

    def release(self, url: Url, pin: Pin) -> None:
        """Tell the fetcher, for all threads of this process, that the object is not needed any more."""
        for reference in self._connections.copy().values():
            connection = reference()
            if connection is not None and connection.process == os.getpid():
                # The fetcher has died: the next fetcher does not know this number.
                with contextlib.suppress(OSError):
                    connection.close_object(url, pin)

    # --- connections

    def _connection(self) -> FetcherConnection:
        """Return the connection of this thread; after a fork a new one."""
        connection: FetcherConnection | None = getattr(self._local, "connection", None)
        if connection is not None and connection.process != os.getpid():
            self._disconnect()
            connection = None
        if connection is None:
            try:
                self._launcher.ensure()
            except (PermissionError, FileNotFoundError) as error:  # of the interpreter: it stays so
                text = f"cannot be started: {sys.executable}: {error.strerror}"
                raise Unreachable(f"the process that fetches remote shards {text}") from None
            connection = self._local.connection = FetcherConnection(self._launcher, self._launcher.connect())
            self._connections[threading.get_ident()] = weakref.ref(connection)
        return connection

    def _disconnect(self) -> None:
        connection: FetcherConnection | None = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
        self._local.connection = None

    def _ask(
        self,
        request: Callable[[FetcherConnection, int], bytes],
        progress: Callable[[Frame], None] = lambda frame: None,
    ) -> Frame:
        """Return the answer to a request, which is repeated when the fetcher dies.

        Raises the error that the fetcher answers, Interrupted.
        """
        for pause in PAUSES:
            _pause(pause)
            try:
                frame = self._connection().ask(request, progress)
            except OSError:
                self._disconnect()
                continue
            except BaseException:  # also of Ctrl-C: half of an answer may be left in the connection
                self._disconnect()  # which stops the fetcher
                raise
            if frame.kind == messages.FAILURE:
                raise messages.error_of(frame.value)
            return frame
        raise Unreachable(f"the process that fetches remote shards has died {len(PAUSES)} times at one request")


class FetcherConnection:
    """A connection of one thread, one request at a time. Everything raises OSError when the fetcher has gone.

    Other threads only close objects.
    """

    def __init__(self, launcher: Launcher, connected: socket.socket) -> None:
        self.process = os.getpid()
        self._objects: dict[tuple[Url, Pin], int] = {}
        self._sending = threading.RLock()  # held until a message with the number of an object is sent
        self._launcher = launcher
        self._number = 0
        self._socket = connected
        # The kernel's timeout, for all receives: Python's would cost a system call for each send and receive.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _LOOK)
        if peer_user(self._socket) != os.geteuid():
            self._socket.close()
            raise ConnectionRefusedError("another user listens in the place of the fetcher")

    def close(self) -> None:
        if self.process != os.getpid():  # the parent's: a thread that is not here may have the lock
            self._socket.close()
            return
        self._shut_down()
        with self._sending:
            self._socket.close()

    def _shut_down(self) -> None:
        """End the connection for all threads, but leave the descriptor to the thread that uses it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:  # of a thread that has ended
        self._socket.close()

    def number_of(self, url: Url, pin: Pin, following: tuple[Url, Pin] | None = None) -> int:
        """Open an object in this connection, if it is not open; return its number. Only for use in `send`.

        `following` is the next object of the set, where passes continue.
        """
        number = self._objects.get((url, pin))
        if number is None:
            self._number += 1
            number = self._number
            self._socket.sendall(messages.text(messages.OPEN, 0, [number, url, pin, following]))
            self._objects[url, pin] = number
        return number

    def close_object(self, url: Url, pin: Pin) -> None:
        """Close an object, in any thread of the process."""
        with self._sending:
            number = self._objects.pop((url, pin), None)
            if number is not None:
                self.send(lambda _: messages.text(messages.CLOSE, 0, number))

    def send(self, message: Callable[[FetcherConnection], bytes]) -> None:
        with self._sending:
            try:
                self._socket.sendall(message(self))
            except BaseException:  # a part may have been sent
                self._shut_down()
                raise

    def ask(self, request: Callable[[FetcherConnection, int], bytes], progress: Callable[[Frame], None]) -> Frame:
        """Return the answer to a request; `progress` gets the frames that come before it."""
        self._number += 1
        number = self._number
        self.send(lambda connection: request(connection, number))
        while True:
            frame = self._receive()
            if frame.number != number:
                continue
            if frame.kind != messages.PROGRESS:
                return frame
            progress(frame)

    def _receive(self) -> Frame:
        try:
            length, kind, number = messages.answer_head_of(bytes(self._exactly(messages.HEAD_SIZE)))
        except ValueError as error:
            raise ConnectionResetError(f"the fetcher is not understood: {error}") from None
        return Frame(kind, number, bytes(self._exactly(length)))

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view, self_socket = memoryview(data), self._socket
        while view:
            try:
                count = self_socket.recv_into(view)
            except BlockingIOError:
                waits.look()
                if self._launcher.ensure():  # the fetcher had died before it accepted this connection
                    raise ConnectionResetError("the fetcher has died") from None
                continue
            if not count:
                raise ConnectionResetError("the fetcher has died")
            view = view[count:]
        return data


class RemoteTar:
    """A remote object as the bytes of a tar (`source.TarReader`). Usable by several threads."""

    def __init__(self, remote: FetcherClient, url: Url, pin: Pin, cached: CachedObject | None) -> None:
        self.size = pin.size
        self.url, self.pin = url, pin
        self.counted_as = url.counted_as
        self.following: tuple[Url, Pin] | None = None  # the next object of the set
        self._remote, self._cached = remote, cached
        self._complete = False
        self._stretch, self._unsaid = -1, 0  # the stretch of the last noted read; bytes read since that note

    @property
    def failure(self) -> str:
        """Return the failure of the command whose output this is; "" if it succeeded."""
        return f"its command ended with {self.pin.version}" if self.url.is_program and self.pin.version else ""

    def pread(self, size: int, offset: int, /) -> bytes:
        """Return up to `size` bytes at byte `offset`; none only at the end. Raises ShardError."""
        end = min(offset + size, self.size)
        if end - offset <= READ_MAX:
            return self._read(offset, end) if offset < end else b""
        return b"".join(self._read(at, min(at + READ_MAX, end)) for at in range(offset, end, READ_MAX))

    def _read(self, begin: int, end: int) -> bytes:
        data = self._from_cache(begin, end)
        if data is None:
            data = self._remote.read(self, begin, end, cached=self._cached is not None)
            if data is None and self._cached is not None:
                data = self._cached.read(end - begin, begin)
            if data is None:  # evicted, or damaged on the disk, since the fetcher answered
                data = self._remote.read(self, begin, end, cached=False)
                assert data is not None
        return data

    def _from_cache(self, begin: int, end: int) -> bytes | None:
        if self._cached is None:
            return None
        data = self._cached.read(end - begin, begin)
        if data is not None and not self._complete:
            self._note(begin, end)
        return data

    def read_cached(self, size: int, offset: int) -> memoryview | None:
        """Return bytes from the cache, valid until the next call of this thread.

        None if some are missing, or the read would have to wait for a disk.
        """
        data = None if self._cached is None else self._cached.view(size, offset, os.RWF_NOWAIT)
        if data is not None and not self._complete:
            self._note(offset, offset + size)
        return data

    def is_cached(self, begin: int, end: int) -> bool:
        """Return True if a range is in the cache, from where `pread` brings it without the network."""
        return self._cached is not None and not self._cached.missing(begin, end)

    def _note(self, begin: int, end: int) -> None:
        """Tell the fetcher about reads from the cache, so that it recognises passes over these ranges, too."""
        self._unsaid += end - begin
        if begin // NOTE == self._stretch:
            return
        self._stretch, used, self._unsaid = begin // NOTE, self._unsaid, 0
        if self._cached is not None and self._cached.complete:
            self._complete = True
            return
        self._tell_range(messages.NOTE, begin, end, used)

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the object, which never changes: it is always the same object."""
        return self.pin.fingerprint(self.url.shown)

    def whole(self) -> int:
        """Return a file with all bytes of the object, open until `close`. Raises ShardError, OSError.

        The file is that of the cache, and is compared with its checksums here.
        """
        self._remote.fetch(self.url, self.pin)
        while self._cached is not None and self._cached.complete:
            if not self._cached.verify():
                return self._cached.fd
            self._remote.fetch(self.url, self.pin)  # damaged blocks again
        raise UnreadableShard(f"{self.url.shown}: the cache does not keep all of it, and it has to be in a file")

    def will_need(self, begin: int, end: int, *, in_parallel: bool = True) -> None:
        """Announce that this range will be read soon. `in_parallel`: by several requests, if it is long."""
        self._tell_range(messages.WILL_NEED, begin, min(end, self.size), 0 if in_parallel else messages.UNDIVIDED)

    def stream(self) -> None:
        """Announce that everything will be read, in order."""
        self._tell_range(messages.WILL_NEED, 0, self.size, messages.STREAM)

    def _tell_range(self, kind: int, begin: int, end: int, extra: int) -> None:
        def message(connection: FetcherConnection) -> bytes:
            return messages.range_frame(
                kind, 0, messages.Read(connection.number_of(self.url, self.pin, self.following), begin, end, extra)
            )

        self._remote.tell(message)

    def hand_over(self, unique: int, begin: int, end: int, spans: Sequence[Span] = ()) -> None:
        """Hand a READ of the kernel to the fetcher, which answers it and fetches the sample that it belongs to.

        Raises Unreachable.
        """

        def message(connection: FetcherConnection) -> bytes:
            number = connection.number_of(self.url, self.pin, self.following)
            return messages.hand_over(unique, number, begin, end, spans, waits.client)

        self._remote.tell(message)

    def close(self) -> None:
        self._remote.release(self.url, self.pin)
        if self._cached is not None:
            self._cached.close()
            self._cached = None


def _pause(seconds: float) -> None:
    if seconds:  # sleeping for 0 s would give the processor away
        time.sleep(seconds)
