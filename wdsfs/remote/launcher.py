"""Starts the fetcher for a process and its forked children, and a successor when it dies.

Three things are made once and inherited by all fetchers: a listening socket, so that requests wait while there is
no fetcher; a pipe that ends with the last process that may have requests; and a file in memory with the
configuration, which may hold secrets and so must not be an argument. A fetcher holds a lock on that file as long
as it lives. So any process can see if there is a fetcher, and of two that are started at the same time one ends at
once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import socket
import struct
import sys
import threading
from dataclasses import asdict, dataclass, replace
from typing import Any

from wdsfs import host, shared_settings

MEMORY = 256 << 20  # bytes, for requests in flight and for bytes that are in no cache
WAITING = 4096  # connections that may wait for a fetcher

_START = "import sys; sys.path[:] = sys.argv[2:]; from wdsfs.remote.fetcher import main; main(int(sys.argv[1]))"
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_LOCK = struct.Struct("hhqqi4x")  # struct flock
SHARED = 1 << 17  # bytes of the memory that fetchers and their clients share


class Alarm:
    """An alarm that the fetcher raises for all processes of a mount: an object has changed.

    It is a number in shared memory, because a worker reads it at every request; only the fetcher writes it. `fd`
    can be inherited by a process that does not share the memory yet.
    """

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            fd = os.memfd_create("wdsfs-alarm")
            os.ftruncate(fd, SHARED)
        self.fd = fd
        self._words = memoryview(mmap.mmap(fd, SHARED)).cast("Q")

    @property
    def words(self) -> memoryview[int]:
        """The memory; the first word is `count`."""
        return self._words

    @property
    def left(self) -> memoryview[int]:
        """The memory from one fetcher to the next."""
        return self._words[1:]

    @property
    def count(self) -> int:
        """Return how often it was raised."""
        return self._words[0]

    def ring(self) -> None:
        self._words[0] += 1

    def close(self) -> None:
        """Close its descriptor; the memory stays as long as it is used. Can be repeated."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True, slots=True)
class Configuration:
    """The configuration of a fetcher; descriptors are inherited under these numbers."""

    listener: int
    life: int  # the read end of a pipe: at end of file no process can have a request any more
    alarm: int  # memory of an Alarm
    user: int  # the only one who is served
    memory: int  # bytes
    settings: Any  # of the stores, as JSON
    cache: tuple[str, int | None] | None  # directory and limit of the cache (bytes)
    device: int | None = None  # /dev/fuse: requests of the kernel are answered there
    log: str | None = None  # a file; else the standard error
    has_predecessor: bool = False  # an earlier fetcher may have left requests without an answer


def configuration_in(fd: int) -> Configuration:
    """Return the configuration that a Launcher has written to this file.

    Each fetcher adds a line feed once it holds the lock: JSON allows that, and the next fetcher sees it.
    """
    text = os.pread(fd, os.fstat(fd).st_size, 0)
    os.pwrite(fd, b"\n", len(text))
    return replace(Configuration(**json.loads(text)), has_predecessor=text.endswith(b"\n"))


def hold(fd: int) -> bool:
    """Become the only fetcher of this configuration; False if there is another one."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
    except OSError:
        return False
    return True


def peer_user(connection: socket.socket) -> int:
    """Return the user of the process at the other end of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(credentials)[1]
    return user


class Launcher:
    """Keeps one fetcher running for this process and those that it forks."""

    def __init__(
        self,
        settings: Any,
        cache: tuple[str, int | None] | None,
        alarm: int,
        memory: int = MEMORY,
        device: int | None = None,
        log: str | None = None,
    ) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("")  # a name that the kernel chooses; who connects is checked
        self._listener.listen(WAITING)
        self._life, self._living = os.pipe()
        self._file = os.memfd_create("wdsfs-fetcher")
        listener = self._listener.fileno()
        configuration = Configuration(
            *(listener, self._life, alarm, os.geteuid(), memory, settings, cache, device, log)
        )
        os.pwrite(self._file, json.dumps(asdict(configuration)).encode(), 0)
        self._inherited = [fd for fd in (listener, self._life, self._file, alarm, device) if fd is not None]
        self._keeper = os.getpid()
        self._started: dict[int, int] = {}  # by process: the pid of the fetcher that it has started
        self.is_restarted = False  # True if the process that has made this restarts the fetcher whenever it dies
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()  # the thread that has it may be in the parent

    @property
    def pid(self) -> int:
        """The process number of the fetcher, 0 without one."""
        lock = fcntl.fcntl(self._file, fcntl.F_GETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
        kind, _, _, _, pid = _LOCK.unpack(lock)
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
        """Return True if a fetcher that this process has started is alive; it may not have the lock yet."""
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
        actions += [(os.POSIX_SPAWN_DUP2, fd, fd) for fd in self._inherited]  # which makes it inheritable
        command = [sys.executable, "-P", "-c", _START, str(self._file), *sys.path]
        # In a process group of its own, so that an interrupt from the keyboard does not end it before its clients.
        environment = host.environment() | shared_settings.variables()  # in which it runs the commands of `pipe:`
        return os.posix_spawn(sys.executable, command, environment, file_actions=actions, setpgroup=0)

    def close(self) -> None:
        """Leave the fetcher, which ends when all processes have; wait for its end if this process started it.

        Can be repeated.
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
