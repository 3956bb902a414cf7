"""Messages between the server and a worker: frames of JSON and bytes, and previews in them.

A worker decodes what others have written, so the server trusts none of its answers: their sizes are bounded here,
and nothing is unpickled.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, cast, get_args

from wdsfs.pages.preview import Kind, Picture, Preview

JSON_MAX = 16 << 20  # bytes of a frame's JSON
BYTES_MAX = 32 << 20  # and of what follows it
_LENGTHS = struct.Struct("<II")


class Broken(Exception):
    """The other side has ended, or breaks the protocol."""


def send(connection: socket.socket, message: dict[str, Any], data: bytes | bytearray = b"") -> None:
    """Send a frame. Raises OSError."""
    text = json.dumps(message).encode()
    connection.sendall(_LENGTHS.pack(len(text), len(data)) + text)
    if data:
        connection.sendall(data)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Receive a frame. Raises Broken, and TimeoutError where the socket has a timeout."""
    try:
        text_length, data_length = _LENGTHS.unpack(_exactly(connection, _LENGTHS.size))
        if text_length > JSON_MAX or data_length > BYTES_MAX:
            raise Broken("a frame is too large")
        message = json.loads(_exactly(connection, text_length))
        if not isinstance(message, dict):
            raise Broken("a frame is not an object")
        return message, bytes(_exactly(connection, data_length))
    except TimeoutError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise Broken(str(error)) from None


def _exactly(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise Broken("the other side has ended")
        view = view[count:]
    return data


# --- previews


def packed(preview: Preview, blob: bytearray) -> dict[str, Any]:
    """Return a preview for JSON; the data of pictures is appended to `blob`."""
    fields = preview._asdict()
    fields["pictures"] = []
    for picture in preview.pictures:
        fields["pictures"].append((len(blob), len(picture.data), *picture[1:]))
        blob += picture.data
    return fields


def unpacked(fields: dict[str, Any], blob: bytes) -> Preview:
    """Return the preview that `packed` has packed. Raises ValueError, TypeError or KeyError for anything else.

    The worker that packed it may have been taken over by the bytes that it decoded, so each value gets its type
    here.
    """
    return Preview(
        kind=_kind(fields["kind"]),
        summary=_text(fields["summary"]),
        pictures=tuple(_picture(blob, *picture) for picture in fields["pictures"]),
        text=_text(fields["text"]),
        rows=tuple(tuple(_text(cell) for cell in row) for row in fields["rows"]),
        is_cut=bool(fields["is_cut"]),
        problem=_text(fields["problem"]),
    )


def _kind(value: Any) -> Kind:
    if value not in get_args(Kind):
        raise ValueError("a preview of an unknown kind")
    return cast(Kind, value)


def _text(value: Any) -> str:
    """Return text that can be sent as UTF-8: without lone surrogates, which JSON and tags can hold."""
    return str(value).encode("utf-8", "replace").decode()


def _picture(blob: bytes, start: int, length: int, media_type: str, width: int, height: int, alt: str) -> Picture:
    if media_type not in ("image/png", "image/webp"):
        raise ValueError("a picture of an unknown type")
    return Picture(blob[int(start) : int(start) + int(length)], media_type, int(width), int(height), _text(alt))
