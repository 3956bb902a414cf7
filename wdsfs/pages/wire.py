"""The messages between a server and a worker: frames of JSON and bytes over a socket. Nothing is unpickled.

A worker decodes what others have written, so the server trusts none of its answers: their sizes are bounded here.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_HEAD = struct.Struct("<II")
JSON_MAX = 16 << 20  # bytes of a frame's JSON
BYTES_MAX = 32 << 20  # and of what follows it


class Broken(Exception):
    """The other side has ended, or breaks the protocol."""


def send(connection: socket.socket, message: dict[str, Any], data: bytes | bytearray = b"") -> None:
    """Send a frame. Raises OSError."""
    text = json.dumps(message).encode()
    connection.sendall(_HEAD.pack(len(text), len(data)) + text)
    if data:
        connection.sendall(data)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Receive a frame. Raises Broken, and TimeoutError where the socket has a timeout."""
    try:
        lengths = _HEAD.unpack(_exactly(connection, _HEAD.size))
        if lengths[0] > JSON_MAX or lengths[1] > BYTES_MAX:
            raise Broken("a frame is too large")
        message = json.loads(_exactly(connection, lengths[0]))
        if not isinstance(message, dict):
            raise Broken("a frame is no object")
        return message, bytes(_exactly(connection, lengths[1]))
    except TimeoutError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise Broken(str(error)) from None


def _exactly(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        got = connection.recv_into(view)
        if not got:
            raise Broken("the other side has ended")
        view = view[got:]
    return data
