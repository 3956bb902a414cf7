"""The messages between the fetcher and its clients: frames on a Unix socket.

A frame is a head (length of the body, kind, number of the request) and a body: a struct where there are many of
them, JSON elsewhere. Answers carry the number of their request. The clients have the code of the fetcher that they
have started, so there are no versions. Touches no socket.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from wdsfs.errors import (
    CacheFull,
    DeniedObject,
    MissingObject,
    NoRanges,
    ObjectChanged,
    ObjectExists,
    ShardError,
    SpecError,
    Unreachable,
    UnreadableShard,
    WdsfsError,
)
from wdsfs.remote.urls import Pin, Url

# Requests. OPEN, CLOSE, HAND_OVER, INTERRUPT, NOTE and WILL_NEED get no answer on the socket.
OPEN, CLOSE, READ, HAND_OVER, INTERRUPT, NOTE, WILL_NEED = 1, 2, 3, 4, 5, 6, 7
HEAD, LIST, FETCH, DESCRIBE, STATS, UPLOAD, COPY = 16, 17, 18, 19, 20, 21, 22
# Answers: the bytes themselves; they are in the cache; JSON; an error; how far a FETCH is, or that an UPLOAD or a
# COPY goes on.
DATA, CACHED, RESULT, FAILURE, PROGRESS = 32, 33, 34, 35, 36

_HEAD = struct.Struct("<IBxxxI")
_RANGE = struct.Struct("<IQQQ")  # object, begin, end; and a number that depends on the kind
_HAND_OVER = struct.Struct("<QIQQI")
_SPAN = struct.Struct("<QQ")
_NUMBER = struct.Struct("<Q")

HEAD_SIZE = _HEAD.size
BODY_MAX = 64 << 20  # bytes; a longer frame is no frame of ours

Span = tuple[int, int]  # begin and end (bytes)

_ERRORS: dict[str, type[WdsfsError]] = {
    kind.__name__: kind
    for kind in (
        MissingObject,
        ObjectChanged,
        ObjectExists,
        DeniedObject,
        CacheFull,
        NoRanges,
        Unreachable,
        UnreadableShard,
        SpecError,
    )
}


class Frame(NamedTuple):
    kind: int
    number: int
    body: bytes


class Read(NamedTuple):
    """A range of an object that is wanted; with `extra` what the kind of the request says."""

    object: int
    begin: int
    end: int
    extra: int  # READ: 1 if CACHED will do. NOTE: bytes read since the last one. WILL_NEED: 1 if it is a stream


class HandOver(NamedTuple):
    """A READ of the kernel that the fetcher answers; `spans` are what else belongs to the sample.

    `client` is the thread that reads; 0 if it is not known.
    """

    unique: int
    object: int
    begin: int
    end: int
    spans: list[Span]
    client: int


def frame(kind: int, number: int = 0, body: bytes = b"") -> bytes:
    return _HEAD.pack(len(body), kind, number) + body


def head(kind: int, number: int, length: int) -> bytes:
    """The head of a frame whose body, of `length` bytes, is sent after it."""
    return _HEAD.pack(length, kind, number)


def head_of(data: bytes) -> tuple[int, int, int]:
    """Length of the body, kind and number of the frame that starts so."""
    length, kind, number = _HEAD.unpack(data)
    return length, kind, number


def frames_of(received: bytearray) -> Iterator[Frame]:
    """The whole frames in what was received, taken out of it. Raises ValueError for what is no frame."""
    at = 0
    try:
        while len(received) - at >= HEAD_SIZE:
            length, kind, number = _HEAD.unpack_from(received, at)
            if length > BODY_MAX:
                raise ValueError("what was received is no frame")
            end = at + HEAD_SIZE + length
            if len(received) < end:
                return
            body = bytes(received[at + HEAD_SIZE : end])
            at = end
            yield Frame(kind, number, body)
    finally:
        del received[:at]


# --- bodies that are structs


def read(kind: int, number: int, wanted: Read) -> bytes:
    """READ, NOTE or WILL_NEED."""
    return frame(kind, number, _RANGE.pack(*wanted))


def read_of(body: bytes) -> Read:
    return Read(*_RANGE.unpack(body))


def hand_over(unique: int, object_: int, begin: int, end: int, spans: Sequence[Span], client: int = 0) -> bytes:
    packed = _HAND_OVER.pack(unique, object_, begin, end, client) + b"".join([_SPAN.pack(*span) for span in spans])
    return frame(HAND_OVER, 0, packed)


def hand_over_of(body: bytes) -> HandOver:
    unique, object_, begin, end, client = _HAND_OVER.unpack_from(body)
    spans = list(_SPAN.iter_unpack(memoryview(body)[_HAND_OVER.size :]))
    return HandOver(unique, object_, begin, end, spans, client)


def number(kind: int, value: int, request: int = 0) -> bytes:
    """INTERRUPT of a request of the kernel; CLOSE or FETCH of an object."""
    return frame(kind, request, _NUMBER.pack(value))


def number_of(body: bytes) -> int:
    value: int = _NUMBER.unpack(body)[0]
    return value


# --- bodies that are JSON


def text(kind: int, number: int, value: Any) -> bytes:
    return frame(kind, number, json.dumps(value).encode())


def value_of(body: bytes) -> Any:
    return json.loads(body)


def url_of(value: Sequence[str]) -> Url:
    return Url(*value)


def pin_of(value: Sequence[Any]) -> Pin:
    return Pin(*value)


def failure(error: Exception) -> dict[str, str]:
    """An error as JSON. Of one that no client knows only the text is kept."""
    name = type(error).__name__
    return {"error": name if name in _ERRORS else UnreadableShard.__name__, "text": str(error)}


def error_of(value: dict[str, str]) -> WdsfsError:
    """The error that the fetcher met."""
    return _ERRORS[value["error"]](value["text"])


def outcome(value: Any) -> list[Any] | dict[str, str]:
    """A pin or an error as JSON, in a list of several."""
    return failure(value) if isinstance(value, Exception) else list(value)


def outcome_of(value: Any) -> Pin | ShardError:
    if isinstance(value, dict):
        error = error_of(value)
        return error if isinstance(error, ShardError) else UnreadableShard(str(error))
    return pin_of(value)
