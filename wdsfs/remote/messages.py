"""The link between the fetcher and its clients: messages, the configuration of a fetcher, its lock, the alarm.

Messages are frames on a Unix socket. A frame is a head (length of the body, kind, number of the request) and a
body: a struct for frequent kinds, JSON for others. Answers carry the number of their request. Clients and the
fetcher that they have started run the same code, so there are no versions.

The configuration is a file in memory, since it may hold secrets and so must not be an argument. A fetcher holds a
lock on that file as long as it lives. So any process can see if there is a fetcher, and of two that are started at
the same time one ends at once.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from wdsfs import errors
from wdsfs.door.pins import Pin
from wdsfs.errors import ShardError, SpecError, UnreadableShard, WdsfsError

# Requests. OPEN, CLOSE, HAND_OVER, INTERRUPT, NOTE and WILL_NEED get no answer on the socket.
OPEN, CLOSE, READ, HAND_OVER, INTERRUPT, NOTE, WILL_NEED = 1, 2, 3, 4, 5, 6, 7
HEAD, LIST, FETCH, DESCRIBE, STATS, UPLOAD, COPY = 16, 17, 18, 19, 20, 21, 22
# Answers: the bytes themselves; a note that the bytes are in the cache; JSON; an error; how far a FETCH is, or
# that an UPLOAD or a COPY goes on.
DATA, CACHED, RESULT, FAILURE, PROGRESS = 32, 33, 34, 35, 36

STREAM, UNDIVIDED = 1, 2  # of a WILL_NEED: all from here on, in order; one of many ranges, each by one request

_FRAME_HEAD = struct.Struct("<IBxxxI")
_RANGE = struct.Struct("<IQQQ")  # object, begin, end; and a number that depends on the kind
_HAND_OVER = struct.Struct("<QIQQI")
_SPAN = struct.Struct("<QQ")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
LOCK = struct.Struct("hhqqi4x")  # struct flock

WAITING = 4096  # connections that may wait for a fetcher
SHARED = 1 << 17  # bytes of the memory that fetchers and their clients share
HEAD_SIZE = _FRAME_HEAD.size
BODY_MAX = 64 << 20  # bytes of a request
READ_MAX = 8 << 20  # bytes that a READ asks for
_ERROR_MAX = 1 << 20  # bytes of an error
_RESULT_MAX = 1 << 30  # bytes of a result; each object of a list takes some 200
_ANSWER_MAX = {DATA: READ_MAX, CACHED: 0, RESULT: _RESULT_MAX, FAILURE: _ERROR_MAX, PROGRESS: _ERROR_MAX}

Span = tuple[int, int]  # begin and end (bytes)


class Frame(NamedTuple):
    """A frame: the kind and the number of its request, and its body."""

    kind: int
    number: int
    body: bytes

    @property
    def value(self) -> Any:
        """The body, of JSON."""
        return json.loads(self.body)


class Read(NamedTuple):
    """A range of an object; `extra` depends on the kind of the request."""

    object: int
    begin: int
    end: int
    extra: int  # READ: 1 if CACHED will do. NOTE: bytes read since the last one. WILL_NEED: STREAM, UNDIVIDED or 0


class HandOver(NamedTuple):
    """A READ of the kernel that the fetcher answers; `spans` are the other ranges of the sample.

    `client` is the thread that reads; 0 if it is not known.
    """

    unique: int
    object: int
    begin: int
    end: int
    spans: list[Span]
    client: int


def frame(kind: int, number: int = 0, body: bytes = b"") -> bytes:
    """Return a frame as bytes."""
    return _FRAME_HEAD.pack(len(body), kind, number) + body


def text(kind: int, number: int, value: Any) -> bytes:
    """Return a frame whose body is JSON."""
    return frame(kind, number, json.dumps(value).encode())


def head(kind: int, number: int, length: int) -> bytes:
    """Return the head of a frame whose body, of `length` bytes, is sent after it."""
    return _FRAME_HEAD.pack(length, kind, number)


def answer_head_of(data: bytes) -> tuple[int, int, int]:
    """Return length of the body, kind and number of the answer that starts so. Raises ValueError if none does."""
    length, kind, number = _FRAME_HEAD.unpack(data)
    if length > _ANSWER_MAX.get(kind, -1):
        raise ValueError(f"no answer has the kind {kind} and {length:,} bytes")
    return length, kind, number


def frames_of(received: bytearray) -> Iterator[Frame]:
    """Remove the complete frames from the received bytes, and yield them. Raises ValueError for other bytes."""
    at = 0
    try:
        while len(received) - at >= HEAD_SIZE:
            length, kind, number = _FRAME_HEAD.unpack_from(received, at)
            if length > BODY_MAX:
                raise ValueError("the received bytes are no frame")
            end = at + HEAD_SIZE + length
            if len(received) < end:
                return
            body = bytes(received[at + HEAD_SIZE : end])
            at = end
            yield Frame(kind, number, body)
    finally:
        del received[:at]


def range_frame(kind: int, number: int, request: Read) -> bytes:
    """Return the frame of a READ, NOTE or WILL_NEED."""
    return frame(kind, number, _RANGE.pack(*request))


def range_of(body: bytes) -> Read:
    """Return the range in the body of a READ, NOTE or WILL_NEED."""
    return Read(*_RANGE.unpack(body))


def hand_over(unique: int, object_: int, begin: int, end: int, spans: Sequence[Span], client: int = 0) -> bytes:
    """Return the frame of a HAND_OVER."""
    packed = _HAND_OVER.pack(unique, object_, begin, end, client) + b"".join([_SPAN.pack(*span) for span in spans])
    return frame(HAND_OVER, 0, packed)


def hand_over_of(body: bytes) -> HandOver:
    """Return the read in the body of a HAND_OVER."""
    unique, object_, begin, end, client = _HAND_OVER.unpack_from(body)
    spans = list(_SPAN.iter_unpack(memoryview(body)[_HAND_OVER.size :]))
    return HandOver(unique, object_, begin, end, spans, client)


def failure(error: Exception) -> dict[str, str]:
    """Return an error as JSON: for a class that clients do not know its nearest base, or only the text."""
    known = (kind for kind in type(error).__mro__ if vars(errors).get(kind.__name__) is kind)
    kind = next(known) if isinstance(error, ShardError | SpecError) else UnreadableShard
    return {"error": kind.__name__, "text": str(error)}


def error_of(value: dict[str, str]) -> WdsfsError:
    """Return the error that the fetcher met."""
    error: WdsfsError = getattr(errors, value["error"])(value["text"])
    return error


def outcome(value: Any) -> list[Any] | dict[str, str]:
    """Return a pin or an error as JSON, in a list of several."""
    return failure(value) if isinstance(value, Exception) else list(value)


def outcome_of(value: Any) -> Pin | ShardError:
    """Return the pin or the error in JSON made by `outcome`."""
    if isinstance(value, dict):
        error = error_of(value)
        return error if isinstance(error, ShardError) else UnreadableShard(str(error))
    return Pin(*value)


# --- beside the messages


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
    first: Sequence[str] | None = None  # the URL that is probably read first
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
        fcntl.fcntl(fd, fcntl.F_SETLK, LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
    except OSError:
        return False
    return True


def peer_user(connection: socket.socket) -> int:
    """Return the user of the process at the other end of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(credentials)[1]
    return user
