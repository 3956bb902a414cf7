"""Short ranges from web servers without TLS, on the event loop itself.

A request of obstore runs on other threads, which take turns with the event loop at the interpreter
(docs/performance.md#fetching). HTTP/1.1 for one range is little, so this is done here: a request on a connection
that is kept, and an answer that is exactly what was asked for, or an error. What is neither is left to obstore:
`get` then returns None. So are https, proxies, redirects, long ranges and everything that is not a range.
"""

from __future__ import annotations

import asyncio
import re
import socket
import urllib.request
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from wdsfs.remote import answers, settings, store_clients
from wdsfs.remote.retries import Transient
from wdsfs.remote.settings import Pace
from wdsfs.remote.store_clients import USER_AGENT, Options
from wdsfs.remote.urls import Pin, Url

CONNECT_SECONDS = 5.0
IDLE_SECONDS = 50.0  # servers close connections that were idle for longer: nginx after 75, others after 60
OTHER_WAY_SECONDS = 60.0  # for how long a server is left to obstore that answers in a way which is not known here
_HEAD_MAX = 16 << 10  # bytes of a head
_TEXT_MAX = 64 << 10  # bytes of an answer that is an error
# Sent as they are by everyone. A path with other characters is for obstore, which knows how to write it.
_PLAIN_PATH = re.compile(r"[\w/.~-]+", re.ASCII)
_HEADER = re.compile(r"[\x20-\x7e]*")
_LENGTH = re.compile(r"\d{1,19}", re.ASCII)
_CODINGS = frozenset({"transfer-encoding", "content-encoding"})
_BODILESS = frozenset({204, 304})
_STATUS = re.compile(rb"HTTP/1\.([01]) (\d{3})[ \r]")


class Answer(NamedTuple):
    status: int  # 0 for what is no answer of HTTP/1.1, or has a head that is too long
    headers: dict[str, str]  # names in lower case
    body: memoryview | None  # of the length of the range, or of an error


class PlainServers:
    """The servers that can be asked here."""

    def __init__(self) -> None:
        self._servers: dict[tuple[object, ...], PlainServer] = {}

    def of(self, url: Url, options: Options) -> PlainServer | None:
        """The server to ask for ranges of this object; None if that is for obstore. Raises Unreachable."""
        if url.scheme != "http" or url.query or not _PLAIN_PATH.fullmatch(url.key):
            return None
        headers = store_clients.access(url, options).headers
        place = urlsplit(url.store)
        values = [place.netloc, *(f"{name}: {value}" for name, value in headers.items())]
        if not all(map(_HEADER.fullmatch, values)) or _has_proxy(place.hostname or ""):
            return None
        pace = settings.pace(options)
        key = url.store, pace, *headers.items()
        if key not in self._servers:
            self._servers[key] = PlainServer(url.store, headers, pace)
        return self._servers[key]


class PlainServer:
    """A web server and the connections to it, which `get` takes turns at."""

    def __init__(self, store: str, headers: Mapping[str, str], pace: Pace) -> None:
        place = urlsplit(store)
        self._host, self._port = place.hostname or "", place.port or 80
        self._pace = pace
        self._idle: list[_Connection] = []
        self._other_way_until = 0.0
        lines = {"Host": place.netloc, "Accept": "*/*", "User-Agent": USER_AGENT, **headers}
        self._lines = "".join(f"{name}: {value}\r\n" for name, value in lines.items())

    async def get(self, url: Url, pin: Pin, begin: int, end: int) -> memoryview | None:
        """Bytes of the pinned object; None if obstore has to ask for them. Raises ShardError, Transient."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._other_way_until:
            return None
        condition = "".join(f"{name}: {value}\r\n" for name, value in pin.condition.items())
        lines = f"{self._lines}Range: bytes={begin}-{end - 1}\r\n{condition}"
        answer = await self._asked(f"GET /{url.key} HTTP/1.1\r\n{lines}\r\n".encode(), end - begin)
        if answer is not None:
            body = _checked(answer, url, pin, begin, end)
            if body is not None:
                return body
            self._other_way_until = loop.time() + OTHER_WAY_SECONDS
        return None

    async def _asked(self, request: bytes, size: int) -> Answer | None:
        """The answer; None if there is no connection, and obstore may say why. Raises Transient."""
        while True:
            connection, is_new = self._kept(), False
            if connection is None:
                connection, is_new = await self._connected(), True
            if connection is None:
                return None
            try:
                answer = await connection.ask(request, size, self._pace)
            except TimeoutError:
                raise Transient("its server does not answer", silent=True) from None
            except ConnectionError:
                if not is_new and not connection.received:  # its server has closed it meanwhile
                    continue
                raise Transient("the connection to its server broke") from None
            if connection.is_open:
                self._idle.append(connection)
            return answer

    def _kept(self) -> _Connection | None:
        oldest = asyncio.get_running_loop().time() - IDLE_SECONDS
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.used > oldest:
                return connection
            connection.end()
        return None

    async def _connected(self) -> _Connection | None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    _Connection, self._host, self._port, happy_eyeballs_delay=0.25
                )
        except TimeoutError:
            raise Transient("its server cannot be connected to", silent=True) from None
        except (OSError, UnicodeError):
            return None
        return connection


class _Connection(asyncio.BufferedProtocol):
    """A connection, one request at a time. The body is received where it stays."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._head = bytearray(_HEAD_MAX)
        self._answer: asyncio.Future[Answer] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._begin(0)
        self.is_open = True
        self._latest = 0.0  # when the answer has to be complete (seconds of the loop's clock)
        self.used = 0.0  # when the last answer was complete (seconds of the loop's clock)

    def _begin(self, size: int) -> None:
        self._size = size  # of the range
        self._at = 0  # bytes of the head, then of the body
        self._body: memoryview | None = None
        self._status, self._headers = 0, dict[str, str]()
        self._is_kept = False  # after this answer
        self.received = 0  # bytes since the request

    async def ask(self, request: bytes, size: int, pace: Pace) -> Answer:
        """The answer to a request for `size` bytes.

        Raises ConnectionError, and TimeoutError when nothing comes for a while, or it comes too slowly. A caller
        that is cancelled closes the connection.
        """
        self._begin(size)
        self._answer = self._loop.create_future()
        self._transport.write(request)
        self._latest = self._loop.time() + pace.seconds(size)
        self._timer = self._loop.call_later(pace.silence, self._look, pace.silence, 0)
        try:
            return await self._answer
        except BaseException:
            self.end()
            raise
        finally:
            self._timer.cancel()
            self._answer = None

    def end(self) -> None:
        self.is_open = False
        self._transport.abort()

    def _look(self, silence: float, before: int) -> None:
        """End a request for which nothing has come since the last look, or that takes too long."""
        left = self._latest - self._loop.time()
        if self.received == before or left <= 0:
            self._fail(TimeoutError())
        else:
            self._timer = self._loop.call_later(min(silence, left), self._look, silence, self.received)

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self.end()

    # --- as asyncio wants it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(ConnectionResetError())

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._head)[self._at :] if self._body is None else self._body[self._at :]

    def buffer_updated(self, count: int) -> None:
        self.received += count
        self._at += count
        if self._answer is None or self._answer.done():  # nobody has asked
            self.end()
        elif self._body is not None:
            self._look_at_end()
        elif (end := self._head.find(b"\r\n\r\n", 0, self._at)) >= 0:
            self._take_head(bytes(self._head[: end + 2]), bytes(self._head[end + 4 : self._at]))
        elif self._at == len(self._head):
            self._finish()

    def _take_head(self, head: bytes, rest: bytes) -> None:
        found = _STATUS.match(head)
        if found is None:
            self._finish()
            return
        self._status, self._headers = int(found[2]), _headers_of(head)
        size = self._size_of_body()
        if size is None or len(rest) > size:
            self._finish()
            return
        self._is_kept = found[1] == b"1" and self._headers.get("connection", "").lower() != "close"
        self._body, self._at = memoryview(bytearray(size)), len(rest)
        self._body[: len(rest)] = rest
        self._look_at_end()

    def _size_of_body(self) -> int | None:
        """Bytes of the body: of the range, or of a text that says what is wrong. None for any other."""
        size = None if self._status in _BODILESS else _length_of(self._headers)
        if size == self._size or (self._status >= 400 and size is not None and size <= _TEXT_MAX):
            return size
        return None

    def _look_at_end(self) -> None:
        if self._body is not None and self._at == len(self._body):
            self._finish()

    def _finish(self) -> None:
        assert self._answer is not None
        self._answer.set_result(Answer(self._status, self._headers, self._body))
        self.used = self._loop.time()
        self._body, self._at = None, 0
        if not self._is_kept:
            self.end()


def _has_proxy(host: str) -> bool:
    proxies = urllib.request.getproxies()
    return bool(proxies.keys() & {"http", "all"}) and not urllib.request.proxy_bypass(host)


def _headers_of(head: bytes) -> dict[str, str]:
    found = {}
    for line in head.decode("latin-1").split("\r\n")[1:]:
        name, _, value = line.partition(":")
        found[name.lower()] = value.strip()
    return found


def _length_of(headers: dict[str, str]) -> int | None:
    """The bytes of a body that is sent as it is."""
    length = headers.get("content-length", "")
    return int(length) if _LENGTH.fullmatch(length) and not headers.keys() & _CODINGS else None


def _checked(answer: Answer, url: Url, pin: Pin, begin: int, end: int) -> memoryview | None:
    """The body of an answer that is what was asked for; None for one that obstore may understand.

    Raises ShardError, Transient, as stores.py says for each.
    """
    status, headers = answer.status, answer.headers
    if status < 400 and status not in (200, 206, 304):  # a redirect, or no answer of HTTP/1.1
        return None
    text = bytes(answer.body or b"").decode("latin-1") if status >= 400 else ""
    if answers.range_of(status, headers, text, url, pin) != (begin, end):
        return None
    length = _length_of(headers)
    if answer.body is None and length is not None and length < end - begin:
        raise Transient("its server sends less than it says")
    return answer.body
