"""Starts the program in processes that have imported it already: forks of one process per run of pytest.

Importing is most of the time that a short command takes, and the tests start thousands. A process from here is as
real as any other: a child of the tests with a number, streams, an environment, a directory and a user of its own.
What it does not show is how an interpreter starts it: its arguments in /proc, what is imported when, variables
that Python itself reads. Tests of that start it with `new_interpreter`, and with WDSFS_COLD_START=1 all do so.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import pickle
import pkgutil
import signal
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.processes import Process

ROOT = Path(__file__).parent.parent
# What an interpreter reads when it starts, here and in every environment of the program.
INTERPRETER = {
    "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    "LC_ALL": "C.UTF-8",
}
_OPTIONS = {
    "stdin",
    "stdout",
    "stderr",
    "cwd",
    "env",
    "start_new_session",
    "umask",
}  # of Popen, that are passed on
_READ_AT_START = ("PYTHON", "LC_", "LANG")

# Not `-m tests.warm_start`: what is pickled here must be of the same module there.
START = ["-c", "from tests import warm_start; warm_start.main()"]
_LENGTH = struct.Struct("Q")
_SET_DUMPABLE = 4  # prctl(2)


def serves(options: dict[str, Any]) -> bool:
    """Whether a program with these options of Popen would be the same in a new interpreter."""
    own = _of_interpreter({**os.environ, **INTERPRETER})
    return options.keys() <= _OPTIONS and _of_interpreter(options["env"]) == own


def _of_interpreter(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_START)}


@dataclass(frozen=True)
class Request:
    """What differs between two starts, besides the streams."""

    arguments: tuple[str | bytes, ...]
    environment: dict[str, str]
    directory: str
    user: tuple[int, int] | None  # uid and gid
    new_session: bool
    umask: int  # -1: that of the tests


class WarmStart:
    """The process that has imported the program. It ends with the tests, even when these are killed."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        self._lock = threading.Lock()  # tests start programs from several threads
        with theirs:
            self._process = Process(
                [sys.executable, *START, str(theirs.fileno())],
                cwd=ROOT,
                env={**os.environ, **INTERPRETER},
                pass_fds=[theirs.fileno()],
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._ours.close()
        self._process.wait()

    def fork(self, request: Request, streams: tuple[int, int, int]) -> int:
        """The number of the new process. Its parent is the calling process: a subreaper."""
        said = pickle.dumps(request)
        with self._lock:
            socket.send_fds(self._ours, [_LENGTH.pack(len(said))], streams)
            self._ours.sendall(said)
            (pid,) = _LENGTH.unpack(_receive(self._ours, _LENGTH.size))
        assert isinstance(pid, int)
        return pid


class WarmProcess(Process):
    """A Popen whose process is a fork of `start`, for a program that needs no other interpreter."""

    def __init__(
        self, start: WarmStart, command: list[str | bytes], user: tuple[int, int] | None, **options: Any
    ) -> None:
        self._start, self._user = start, user
        super().__init__(command, **options)

    def _execute_child(self, *given: Any) -> None:  # not documented, the same for ages
        """Instead of fork and exec. The parameters are those of Python 3.11 to 3.13."""
        (arguments, _executable, _preexec, _close, _pass, directory, environment, _info, _flags, _shell) = given[
            :10
        ]
        pipes, (_signals, _gid, _gids, _uid, umask, new_session, _group) = given[10:16], given[16:]
        streams = (pipes[0], pipes[3], pipes[5])
        request = Request(
            tuple(arguments), environment, os.fspath(directory), self._user, bool(new_session), umask
        )
        try:
            self.pid = self._start.fork(
                request,
                tuple(fd if fd >= 0 else own for own, fd in enumerate(streams)),  # type: ignore[arg-type]
            )
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _receive(connection: socket.socket, size: int) -> bytes:
    """So many bytes, or none at the end."""
    found = b""
    while len(found) < size:
        more = connection.recv(size - len(found))
        if not more:
            return b""
        found += more
    return found


def _import_all() -> None:
    """Everything that commands import, the slow parts of other packages too."""
    import wdsfs

    names = ["click._termui_impl", "concurrent.futures.process", "rich.box", "rich.console", "rich.progress"]
    names += ["rich.table", "rich.traceback", "difflib", "tempfile"]
    names += [module.name for module in pkgutil.walk_packages(wdsfs.__path__, "wdsfs.")]
    for name in names:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else the first collection in each fork copies all of it


def _requests(connection: socket.socket) -> Request | None:
    """Fork for each request. Returns in each new process its request, and None at the end of the tests."""
    while True:
        head, streams, _, _ = socket.recv_fds(connection, _LENGTH.size, 3)
        if not head:
            return None
        request = pickle.loads(_receive(connection, *_LENGTH.unpack(head)))
        assert isinstance(request, Request)
        receiver, sender = os.pipe()
        if not (between := os.fork()):
            # The parent of the program ends at once, so that the tests become its parent.
            if pid := os.fork():
                os.write(sender, _LENGTH.pack(pid))
                os._exit(0)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            return request
        os.waitpid(between, 0)
        connection.sendall(os.read(receiver, _LENGTH.size))
        for descriptor in (*streams, receiver, sender):
            os.close(descriptor)


def _become(request: Request) -> None:
    """What fork and exec, and then the interpreter, do at the start of a program."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request.new_session:
        os.setsid()
    if request.umask >= 0:
        os.umask(request.umask)
    os.chdir(request.directory)
    os.environ.clear()
    os.environ.update(request.environment)
    time.tzset()
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        new = open(number, "w" if number else "r", encoding=old.encoding, errors=old.errors, closefd=False)  # noqa: SIM115
        if name == "stderr":
            new.reconfigure(line_buffering=True)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    if request.user is not None:
        _change_user(*request.user)
    sys.argv = ["wdsfs", *(os.fsdecode(one) for one in request.arguments)]


def _change_user(uid: int, gid: int) -> None:
    os.setgroups([]), os.setgid(gid), os.setuid(uid)
    ctypes.CDLL(None).prctl(_SET_DUMPABLE, 1, 0, 0, 0)  # else the kernel takes it for a process with secrets


def _leave(code: object) -> None:
    """End as the interpreter does, but without taking apart what has been imported, which copies all of it."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # the interpreter says so
        return
    if isinstance(code, int | None):
        os._exit(code or 0)


def main() -> None:
    """The arguments are the descriptor of a socket: fork at requests; or a uid, a gid and those of the program."""
    if len(sys.argv) > 2:
        _import_all()
        uid, gid = map(int, sys.argv[1:3])
        del sys.argv[1:3]
        _change_user(uid, gid)
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the tests
        _import_all()
        request = _requests(socket.socket(fileno=int(sys.argv[1])))
        if request is None:
            return
        _become(request)
    from wdsfs import __main__

    try:
        __main__.main()
    except SystemExit as end:
        _leave(end.code)
        raise
