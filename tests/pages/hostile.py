"""A decoder that was taken over: it tries what a worker must not do. Imported by a worker before it begins."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import socket
import threading
from collections.abc import Callable
from typing import Any

from wdsfs.pages import decoders
from wdsfs.pages.preview import Preview

_libc = ctypes.CDLL(None, use_errno=True)


def _by_libc(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)


def _in_thread(attempt: Callable[[], object]) -> None:
    """Try it in a new thread. Raises what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            attempt()
        except OSError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in raised:
        raise error


def attempts(path: str, parent: int, port: int) -> dict[str, Callable[[], object]]:
    """What is tried, by name: with a file of the user's, the number of the server's process, and a port."""
    word = ctypes.create_string_buffer(8)
    vector = (ctypes.c_void_p * 2)(ctypes.addressof(word), 8)
    return {
        "unlink": lambda: os.unlink(path),
        "unlink in a thread": lambda: _in_thread(lambda: os.unlink(path)),
        "rename": lambda: os.rename(path, path + "x"),
        "truncate": lambda: os.truncate(path, 0),
        "chmod": lambda: os.chmod(path, 0),
        "utime": lambda: os.utime(path),
        "setxattr": lambda: os.setxattr(path, "user.x", b"x"),
        "mkdir": lambda: os.mkdir(path + "d"),
        "symlink": lambda: os.symlink("/", path + "l"),
        "open for write": lambda: os.open(path, os.O_WRONLY),
        "open to read": lambda: os.open(path, os.O_RDONLY),
        "create": lambda: os.open(path + "n", os.O_WRONLY | os.O_CREAT),
        "exec": lambda: os.execv("/bin/true", ["true"]),
        "fork": os.fork,
        "connect": lambda: socket.socket().connect(("127.0.0.1", port)),
        "socketpair": socket.socketpair,
        "kill": lambda: os.kill(parent, 0),
        "ptrace": lambda: _by_libc("ptrace", 16, parent, 0, 0),
        "process_vm_readv": lambda: _by_libc("process_vm_readv", parent, vector, 1, vector, 1, 0),
        "limits of others": lambda: resource.prlimit(parent, resource.RLIMIT_CPU, (0, 0)),
        "dumpable": lambda: _by_libc("prctl", 4, 1, 0, 0, 0),
        "memfd": lambda: os.memfd_create("x"),
    }


def refusals(path: str, parent: int, port: int, names: list[str] | None = None) -> dict[str, str]:
    """The error of each attempt; `done` for one that was not refused."""
    found = {}
    for name, attempt in attempts(path, parent, port).items():
        if names is None or name in names:
            found[name] = "done"
            try:
                attempt()
            except OSError as error:
                found[name] = errno.errorcode[error.errno or 0]
    return found


def _is_open(descriptor: int) -> bool:
    try:
        os.lseek(descriptor, 0, os.SEEK_CUR)
    except OSError as error:
        return error.errno != errno.EBADF
    return True


def _decode(member: Any, detail: object) -> Preview:
    about = json.loads(member.file.read())
    found = {
        "refusals": refusals(about["path"], about["parent"], about["port"]),
        "variables": list(os.environ),
        "descriptors": [number for number in range(1000) if _is_open(number)],
    }
    return Preview("text", text=json.dumps(found))


with contextlib.suppress(AttributeError):
    decoders._DECODERS["json"] = _decode
