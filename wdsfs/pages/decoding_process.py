"""The program of a worker: decodes members, one after the other, within limits that no content can exceed.

Before it loads its libraries it gives up all rights but to read files, and then all but those for decoding
(`sandbox`): it can open no file and no socket, change no file, start no process and signal none, and has limits
of memory, and of processor time for each member. A decoder that exceeds a limit ends this process, and the server
starts another.
"""

from __future__ import annotations

import io
import os
import resource
import socket
import warnings
from typing import Any

from wdsfs.pages import decoders, sandbox, wire
from wdsfs.pages.decoders import Member
from wdsfs.pages.preview import Detail, TooMuch, content_of, error_text

BUFFER = 256 << 10  # bytes of a member that are requested at a time, at least


def main() -> None:
    """Serve the socket that is descriptor 0 until its other side is closed."""
    warnings.simplefilter("ignore")  # of libraries, about what they decode
    os.closerange(3, 1 << 20)  # inherited descriptors: files that the parent of the server had open
    connection = socket.socket(fileno=0)
    try:
        settings, _ = wire.receive(connection)
        try:
            sandbox.begin()
            decoders.warm_up()
            _give_up(int(settings["memory"]))
        except Exception as error:
            wire.send(connection, {"failed": f"{type(error).__name__}: {error}"})
            return
        wire.send(connection, {"ready": True})
        while True:
            task, head = wire.receive(connection)
            _allow_time(int(settings["seconds"]))
            if not _answer(connection, task, head):
                return
    except (wire.Broken, OSError):
        return


def _give_up(memory: int) -> None:
    """Limit this process for good."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    sandbox.close()
    for limit, value in (
        (resource.RLIMIT_AS, now + memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def _allow_time(seconds: int) -> None:
    """Limit the processor time of this process to this many further seconds; the kernel ends it then."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    end = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))


def _answer(connection: socket.socket, task: dict[str, Any], head: bytes) -> bool:
    """Do one task; return False if this process should not do another."""
    size, detail = int(task["size"]), Detail(*task["detail"])
    file = io.BufferedReader(MemberFile(connection, size, head, detail.read), BUFFER)
    blob = bytearray()
    try:
        extension = content_of(task["name"], b"").extension
        member = Member(file, size, extension)
        preview = wire.packed(decoders.decode(task["decoder"], task["name"], member, detail), blob)
    except MemoryError:
        # The library may have stopped half-way, in an unknown state: so this process ends.
        wire.send(connection, {"failed": "It needs more memory than a preview may have.", "ends": True})
        return False
    except TooMuch as error:
        wire.send(connection, {"failed": str(error)})
        return True
    except wire.Broken:
        return False
    except Exception as error:
        # Decoders raise exceptions of any class; each means that the content is damaged.
        wire.send(connection, {"failed": f"It cannot be decoded: {error_text(error)}."})
        return True
    wire.send(connection, {"done": preview}, blob)
    return True


class MemberFile(io.RawIOBase):
    """The bytes of a member of `size` bytes, of which `head` are the first, and `most` more may be read.

    The server sends them over the connection. They can be read in any order.
    """

    def __init__(self, connection: socket.socket, size: int, head: bytes, most: int) -> None:
        self._connection, self.size, self._head, self._most = connection, size, head, most
        self._at = 0
        self._received = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        if start + offset < 0:
            raise ValueError("a seek before the beginning")
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, target: Any) -> int:
        """Fill `target` as far as there is content. Raises TooMuch, and OSError if the member cannot be read."""
        view = memoryview(target).cast("B")
        length = max(min(len(view), self.size - self._at), 0)
        if not length:
            return 0
        data = self._head[self._at : self._at + length] or self._request(length)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _request(self, length: int) -> bytes:
        length = min(length, wire.BYTES_MAX)
        self._received += length
        if self._received > self._most:
            raise TooMuch(f"A preview would need more than {self._most >> 20} MiB of the file.")
        wire.send(self._connection, {"read": [self._at, length]})
        answer, data = wire.receive(self._connection)
        if "failed" in answer:
            raise OSError("the member cannot be read")
        return data
