"""The bytes of files as they are: saved by a browser, or played; never something that a page runs."""

from __future__ import annotations

import errno
import functools
import logging
import os
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple
from urllib.parse import quote, unquote_to_bytes

import anyio
import anyio.to_thread
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Send

from wdsfs import names as naming
from wdsfs.errors import NoSuchEntry, UsageError, WdsfsError
from wdsfs.pages.preview import PLAYERS, Source

# For contents of shards, in case a browser shows one as a page: an origin of its own, and no scripts.
MEMBER_POLICY = "sandbox; default-src 'none'"
SENT_BYTES = 256 << 10  # bytes of a download that are read at a time; a slow reader makes the server keep a few

log = logging.getLogger("wdsfs")


class Downloads:
    """Sends files. `with_source` answers a question about the bytes of one, in a thread of `limiter`.

    `refused` makes the page for an error.
    """

    def __init__(
        self,
        with_source: Callable[[bytes, Callable[[Source], _Begun]], _Begun],
        limiter: anyio.CapacityLimiter,
        refused: Callable[[Exception], Response],
    ) -> None:
        self._with_source, self._limiter, self._refused = with_source, limiter, refused

    async def answer(self, request: Request, as_media: bool) -> Response:
        """Return the bytes of a file, to be saved or for a player, but never as something that a page runs."""
        media_type = "application/octet-stream"
        try:
            path = requested_path(request)
            if as_media:
                media_type = _media_type(path)
            # The server would leave out the body of an answer to HEAD, but only after it has been read.
            begin = functools.partial(_begin, request.headers.get("range", ""), request.method != "HEAD")
            begun = await anyio.to_thread.run_sync(self._with_source, path, begin, limiter=self._limiter)
        except (WdsfsError, OSError) as error:
            return self._refused(error)
        size = begun.source.size
        if begun.refusal:
            return PlainTextResponse(begun.refusal, 416, {"Content-Range": f"bytes */{size}"})
        name = quote(saved_as(path), safe="")
        saved = "inline" if as_media else f"attachment; filename*=UTF-8''{name}"
        headers = {
            "Content-Security-Policy": MEMBER_POLICY,
            "Content-Length": str(begun.end - begun.begin),
            "Accept-Ranges": "bytes",
            "Content-Disposition": saved,
        }
        if begun.is_part:
            headers["Content-Range"] = f"bytes {begun.begin}-{begun.end - 1}/{size}"
        status = 206 if begun.is_part else 200
        if request.method == "HEAD":
            return Response(None, status, headers, media_type)
        return Download(self._parts(begun), status, headers, media_type)

    async def _parts(self, begun: _Begun) -> AsyncIterator[bytes]:
        at, data = begun.begin, begun.first
        while data:
            yield data
            at += len(data)
            read = functools.partial(_part, begun.source, at, begun.end)
            data = await anyio.to_thread.run_sync(read, limiter=self._limiter) if at < begun.end else b""


class _Begun(NamedTuple):
    """A file that is sent from `begin` to `end` (bytes), and its first bytes; or why this range is refused."""

    source: Source
    begin: int = 0
    end: int = 0
    is_part: bool = False
    first: bytes = b""
    refusal: str = ""


def _begin(header: str, has_body: bool, source: Source) -> _Begun:
    """Read the beginning of a range. Raises what reading raises."""
    try:
        part = _range(header, source.size)
    except UsageError as error:
        return _Begun(source, refusal=str(error))
    begin, end = part or (0, source.size)
    return _Begun(source, begin, end, part is not None, _part(source, begin, end) if has_body else b"")


def _part(source: Source, begin: int, end: int) -> bytes:
    """Return the next bytes of a file, none at its end. Raises ShardErrors, and OSErrors if it ends too early."""
    data = source.read(begin, min(SENT_BYTES, end - begin)) if begin < end else b""
    if begin < end and not data:
        raise OSError(errno.EIO, "the file has become shorter")
    return data


class Download(StreamingResponse):
    """A file that is sent. If it cannot be read to its end, the connection is cut, as a sign of the error."""

    async def stream_response(self, send: Send) -> None:
        """Send the file; log a failure."""
        try:
            await super().stream_response(send)
        except (WdsfsError, OSError) as error:
            # The server closes the connection of an answer that does not come to its end.
            log.warning("a file was not sent to its end: %s", text_of(str(error)))


def text_of(name: bytes | str) -> str:
    """Return a name or path as a page shows it, with unprintable characters escaped."""
    return naming.shown(name.decode("utf-8", "backslashreplace") if isinstance(name, bytes) else name)


def suffix(name: bytes) -> str:
    """Return the part of a name that decides the type of a file: "png" of `seg.PNG`."""
    return os.fsdecode(name).rpartition(".")[2].lower()


def requested_path(request: Request) -> bytes:
    """Return the path after the first part of an address, in bytes."""
    raw: bytes = request.scope["raw_path"]
    return inside(unquote_to_bytes(raw.split(b"/", 2)[2]))


def inside(path: bytes) -> bytes:
    """Return the path if it stays inside of the tree. Raises NoSuchEntry."""
    if not path or any(part in (b"", b".", b"..") or b"\0" in part for part in path.split(b"/")):
        raise NoSuchEntry("this address is not that of a sample")
    return path


def _media_type(path: bytes) -> str:
    """Return the media type of a file for a player. Raises NoSuchEntry if a player must not get it."""
    media_type = PLAYERS.get(suffix(path.rpartition(b"/")[2]))
    if media_type is None:
        raise NoSuchEntry("files of this type cannot be played here")
    return media_type


def saved_as(path: bytes) -> bytes:
    """Return the name under which a file is saved: the last part of the key, and the column."""
    _, _, rest = path.partition(b"/")
    folder, _, name = rest.rpartition(b"/")
    stem = folder.rpartition(b"/")[2]
    return name if name.startswith(stem + b".") else stem + b"." + name


def _range(header: str, size: int) -> tuple[int, int] | None:
    """Return the first byte of a range, and the byte after the last; None for all. Raises UsageError.

    Several ranges, and those in units other than bytes, may be answered with all.
    """
    unit, _, text = header.partition("=")
    if unit != "bytes" or "," in text:
        return None
    first, dash, last = text.strip().partition("-")
    digits = first + last
    if not (dash and digits.isascii() and digits.isdecimal()):
        raise UsageError("a range of bytes is expected")
    begin = _place(first) if first else max(size - _place(last), 0)
    end = min(_place(last) + 1, size) if first and last else size
    if begin >= end:
        raise UsageError("this range lies outside of the file")
    return begin, end


def _place(digits: str) -> int:
    """Return a place in a file, however many digits it has: no file is as long as the largest."""
    return int(digits) if len(digits) < 20 else 1 << 64
