"""A web server that misbehaves on purpose, and counts: requests and bytes, so that no test has to measure time.

It serves what a test has `put`. How each object is answered is said by its fields, and by its `faults`, which are
used up one by one. HTTP/1.1 with connections that are kept, on one thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from email.utils import formatdate, parsedate_to_datetime
from functools import partial
from http import HTTPStatus
from urllib.parse import parse_qsl, quote, urlsplit
from xml.sax.saxutils import escape

BORN = 1_700_000_000  # when objects were last changed that a test gives no time
PIECE = 1 << 16
DRIPS, DRIP_SECONDS = 60, 0.05


@dataclass
class Fault:
    """One answer that is not what it should be."""

    status: int = 0  # instead of the object
    headers: dict[str, str] = field(default_factory=dict)  # instead of, or besides the right ones
    body: bytes = b""  # with `status`
    cut: int | None = None  # so many bytes of the body, then the connection is reset
    silent: bool = False  # no answer at all, until the client goes
    stalls: int | None = None  # so many bytes of the body, then nothing, until the client goes
    chunked: bool = False  # in chunks, without its length
    torn: bool = False  # with `cut`: in the middle of a chunk
    widens: tuple[int, int] = (0, 0)  # bytes by which a range begins too early and ends too late
    drips: str = ""  # "head" or "body": this part comes byte by byte, DRIPS bytes of it in DRIP_SECONDS each
    meanwhile: Callable[[], None] | None = None  # called between the head of the answer and its body


@dataclass
class Served:
    """An object, and how it is served."""

    content: bytes
    etag: str | None = '"1"'
    modified: int | None = BORN
    ranges: bool = True  # False: Range is ignored, and all sent with 200
    conditions: bool = True  # False: If-Match and If-Unmodified-Since are ignored
    headers: dict[str, str] = field(default_factory=dict)
    faults: deque[Fault] = field(default_factory=deque)  # for the next requests
    always: Fault | None = None  # for all after these
    only_gets: bool = False  # HEAD gets no faults, so that a test need not count it


@dataclass(frozen=True)
class Request:
    method: str
    target: str  # path and query, as they were sent
    headers: dict[str, str]  # names in lower case
    body: bytes = b""

    @property
    def path(self) -> str:
        return urlsplit(self.target).path


Handler = Callable[[Request], Awaitable[tuple[int, dict[str, str], bytes] | None]]


class WebServer:
    """The server while it runs; `running()` starts and ends it."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.objects: dict[str, Served] = {}
        self.requests: list[Request] = []
        self.connections = 0  # so far
        self.sent = 0  # bytes of bodies
        self.under_way = 0  # requests that are not answered in full
        self.most_under_way = 0
        self.handler: Handler | None = None  # asked first; None of it: the objects are
        self.hold = threading.Event()  # cleared: bodies wait, so that a test has requests under way
        self.hold.set()
        self.port = 0
        self._context = context
        self._writers: set[asyncio.StreamWriter] = set()
        self._talks: set[asyncio.Task[None]] = set()
        self._end: asyncio.Event
        self._stop: Callable[[], object]

    @property
    def url(self) -> str:
        return f"{'https' if self._context else 'http'}://127.0.0.1:{self.port}"

    def put(self, path: str, content: bytes, **how: object) -> Served:
        self.objects[path] = Served(content, **how)  # type: ignore[arg-type]
        return self.objects[path]

    def gets(self, path: str | None = None) -> list[Request]:
        return [one for one in self.requests if one.method == "GET" and path in (None, one.path)]

    def reset(self) -> None:
        self.objects.clear()
        self.requests.clear()
        self.handler = None
        self.hold.set()
        self.sent = self.most_under_way = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[WebServer]:
        started = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), daemon=True)
        thread.start()
        started.wait()
        try:
            yield self
        finally:
            self.hold.set()
            self._stop()
            thread.join()

    # --- on the thread of the server

    async def _serve(self, started: threading.Event) -> None:
        stop = self._end = asyncio.Event()  # what waits must be referred to, or it is collected as garbage
        self._stop = partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set)
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=self._context)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        # First accept no more, then end what was accepted: a task that is cancelled before it begins, or begins
        # after the end of the server, leaves its socket open.
        for listener in server.sockets:
            asyncio.get_running_loop().remove_reader(listener.fileno())
        await asyncio.sleep(0)
        server.close()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            self._abort()
            await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
        self._abort()
        await asyncio.sleep(0)

    def _abort(self) -> None:
        while self._writers:
            transport = self._writers.pop().transport
            # A client may be gone, or not read what is left. A transport that is closed can not be aborted.
            with contextlib.suppress(AttributeError):  # of TLS that the client has ended, which has no size
                if not transport.is_closing() or transport.get_write_buffer_size():
                    transport.abort()
        for task in self._talks:
            task.cancel()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        task = asyncio.create_task(self._talk(reader, writer))
        self._talks.add(task)
        task.add_done_callback(self._talks.discard)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._exchange(reader, writer):
                pass
        with contextlib.suppress(RuntimeError):  # the loop has ended
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request. False: the connection is to be closed."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        request = Request(method, target, headers, body)
        self.requests.append(request)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            return await self._answer(request, reader, writer)
        finally:
            self.under_way -= 1

    async def _answer(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        handled = await self.handler(request) if self.handler else None
        if handled is not None:
            return await self._send(request, writer, *handled)
        served = self.objects.get(request.path)
        if served is None:
            return await self._send(request, writer, 404, {}, b"there is no such thing")
        fault = Fault()
        if request.method == "GET" or not served.only_gets:
            fault = served.faults.popleft() if served.faults else served.always or fault
        if fault.silent:
            await reader.read()
            return False
        if fault.status:
            return await self._send(request, writer, fault.status, fault.headers, fault.body)
        status, found, body = right_answer(_widened(request, *fault.widens), served)
        return await self._send(request, writer, status, {**found, **fault.headers}, body, fault)

    async def _send(
        self,
        request: Request,
        writer: asyncio.StreamWriter,
        status: int,
        headers: dict[str, str],
        body: bytes,
        fault: Fault | None = None,
    ) -> bool:
        fault = fault or Fault()
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
        length = {"Transfer-Encoding": "chunked"} if fault.chunked else {"Content-Length": str(len(body))}
        lines += [f"{name}: {value}" for name, value in {**length, **headers}.items()]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        writer.write(await _dripped(writer, head) if fault.drips == "head" else head)
        if request.method == "HEAD":
            await writer.drain()
            return True
        if not self.hold.is_set():
            await asyncio.to_thread(self.hold.wait)
        if fault.meanwhile:
            fault.meanwhile()
        limits = [limit for limit in (fault.cut, fault.stalls) if limit is not None]
        part = memoryview(body)[: min(limits, default=len(body))]
        if fault.chunked:
            writer.write(b"%x\r\n" % len(body if fault.torn else part))
        if fault.drips == "body":
            part = await _dripped(writer, part)
        for at in range(0, len(part), PIECE):
            self.sent += len(part[at : at + PIECE])  # first: a client may have it before this thread goes on
            writer.write(part[at : at + PIECE])
            await writer.drain()
        if fault.stalls is not None:
            await self._end.wait()
        if fault.chunked and not fault.torn:
            writer.write(b"\r\n0\r\n\r\n")
        return fault.cut is None


async def _dripped(writer: asyncio.StreamWriter, data: bytes | memoryview) -> memoryview:
    """Send some bytes so slowly that no client should wait for the others; returns those."""
    for at in range(min(DRIPS, len(data))):
        writer.write(data[at : at + 1])
        await writer.drain()
        await asyncio.sleep(DRIP_SECONDS)
    return memoryview(data)[DRIPS:]


def _widened(request: Request, before: int, after: int) -> Request:
    """A request for more bytes at both ends of its range; for fewer (less than 0) if that leaves some."""
    begin, _, last = request.headers.get("range", "").removeprefix("bytes=").partition("-")
    if not begin or not last or not (before or after):
        return request
    end = int(last) + after
    wide = f"bytes={max(int(begin) - before, 0)}-{end if end > int(begin) else last}"
    return replace(request, headers={**request.headers, "range": wide})


def right_answer(request: Request, served: Served) -> tuple[int, dict[str, str], bytes]:
    content = served.content
    headers = {"Content-Type": "application/x-tar", **served.headers}
    if served.etag is not None:
        headers["ETag"] = served.etag
    if served.modified is not None:
        headers["Last-Modified"] = formatdate(served.modified, usegmt=True)
    if served.conditions and not _condition_holds(request, served):
        return 412, headers, b"a precondition failed"
    wanted = request.headers.get("range")
    if not served.ranges or wanted is None:
        return 200, headers, content
    headers["Accept-Ranges"] = "bytes"
    begin, _, last = wanted.removeprefix("bytes=").partition("-")
    end = min(int(last) + 1 if last else len(content), len(content))
    if int(begin) >= end:
        return 416, {"Content-Range": f"bytes */{len(content)}"}, b""
    headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
    return 206, headers, content[int(begin) : end]


def bucket_listing(request: Request, keys: Iterable[str], most: int = 1000) -> tuple[int, dict[str, str], bytes]:
    """The answer of S3 to a request for a list of these objects, each empty; up to `most` names on a page."""
    asked = dict(parse_qsl(urlsplit(request.target).query, keep_blank_values=True))
    prefix, delimiter = asked.get("prefix", ""), asked.get("delimiter", "")
    quoted = quote if asked.get("encoding-type") == "url" else escape
    names = set()
    for key in keys:
        if key.startswith(prefix):
            head, slash, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key[len(prefix) :], "", "")
            names.add(prefix + head + slash)
    page = [name for name in sorted(names) if name > asked.get("continuation-token", "")]
    rows = [
        f"<CommonPrefixes><Prefix>{quoted(name)}</Prefix></CommonPrefixes>"
        if delimiter and name.endswith(delimiter)
        else f"<Contents><Key>{quoted(name)}</Key><Size>0</Size><ETag>1</ETag>"
        "<LastModified>2023-11-14T22:13:20Z</LastModified></Contents>"
        for name in page[:most]
    ]
    if "encoding-type" in asked:
        rows.append("<EncodingType>url</EncodingType>")
    if len(page) > most:
        rows.append(f"<NextContinuationToken>{quoted(page[most - 1])}</NextContinuationToken>")
    rows.append(f"<IsTruncated>{'true' if len(page) > most else 'false'}</IsTruncated>")
    return 200, {}, f"<ListBucketResult>{''.join(rows)}</ListBucketResult>".encode()


def _condition_holds(request: Request, served: Served) -> bool:
    wanted, since = request.headers.get("if-match"), request.headers.get("if-unmodified-since")
    if wanted is not None:
        strong = served.etag is not None and not served.etag.startswith("W/")
        return wanted == "*" or (strong and served.etag in wanted.split(", "))
    return since is None or served.modified is None or served.modified <= parsedate_to_datetime(since).timestamp()
