"""The server: a socket on 127.0.0.1 until an interrupt, and the guard that decides who may ask.

Only the browser that was given the address may ask, and only from the pages themselves. The address that the
command prints has a random token. It is exchanged for a cookie that other sites cannot send (SameSite=Strict) and
no script can read. A browser sends it to all ports of a host, also to a server of another user that a page has led
it to. So the cookie is good only for users who have opened the address with the token; the kernel says whose a
connection is (`user_of`). Every request is also checked for the name that it was sent to (Host, or another
site could reach the server by a name of its own that resolves to 127.0.0.1) and the site that it comes from
(Origin, Sec-Fetch-Site). Every answer carries a policy under which no script runs but that of the pages.

Every user of the machine can connect, with or without the token. So a connection without requests is ended: after
a while, or at once where there are many of its kind. It takes the place of no other, and no descriptor for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import glob
import hmac
import logging
import os
import secrets
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from wdsfs.errors import UsageError, several
from wdsfs.pages import sandbox
from wdsfs.pages.site import Site

log = logging.getLogger(__name__)

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)

_HEADERS = {
    "Content-Security-Policy": PAGE_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with no-referrer, a browser would send forms without their origin
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}

_ENTRY = """<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=/">
<link rel="icon" href="data:,"><title>wdsfs</title><p><a href="/">To the samples</a></html>"""


_UNKNOWN_USER = (
    "The kernel does not say which user has made this connection, so the page could not be kept from others: "
    "keep the connection open until the answer, mount /proc, or load the module tcp_diag."
)

CONNECTIONS_MAX = 200  # at a time; requests of further ones are answered with 503
QUIET_MAX = 50  # connections without requests; each browser holds up to six
PREFIX = "wdsfs-view-"  # of directories with pages that lead to addresses
QUIET_SECONDS = 20.0  # that a connection may take for its next request

_SOCK_DIAG, _BY_FAMILY, _REQUEST = 4, 20, 1  # linux/netlink.h, linux/sock_diag.h
_ESTABLISHED = 1
_NETLINK_HEAD = struct.Struct("=IHHII")  # length, type, flags, sequence, port
# Family, protocol, extensions, states; ports and addresses of the socket and of its peer; interface, no cookie.
_QUESTION = struct.Struct("=BBBxI2s2s4s12x4s12xIQ")
_ANSWER = struct.Struct("=BBxx48x12xI")  # family, state, user
_SECONDS = 5.0  # the kernel answers at once
_TABLES = {"/proc/net/tcp": "", "/proc/net/tcp6": "0000000000000000FFFF0000"}  # and how IPv4 addresses begin there


class Guard:
    """Passes to `app` the requests that are allowed at this port."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app, self._port = app, port
        self.token, self._session = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self._users: set[int] = set()  # that have sent the token
        self._cookie = f"wdsfs-{port}"  # cookies are shared by all ports of a host
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}

    @property
    def address(self) -> str:
        """The address to open, with the token."""
        return f"http://127.0.0.1:{self._port}/?token={self.token}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # no web sockets
        refusal = self._refusal(scope)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        # Not unquoted before they are split: names in shards may have any character, line ends too.
        scope = {**scope, "path": scope["raw_path"].decode("ascii", "replace")}
        await (self._app if refusal is None else refusal)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the answer that refuses a request; None for one that is allowed."""
        headers = Headers(scope=scope)
        if headers.get("host") not in self._hosts:
            return PlainTextResponse("This is not the name of this server.", 421)
        query = parse_qs(scope["query_string"].decode("ascii", "replace"))
        [given] = query.get("token", [""])[:1]
        is_entry = scope["method"] == "GET" and scope["path"] == "/" and given
        if is_entry and _equal(given, self.token):
            user = _user(scope)
            if user is None:
                return PlainTextResponse(_UNKNOWN_USER, 403)
            # Not a redirect: after a link on another site the browser would not send the cookie.
            entry = HTMLResponse(_ENTRY)
            self._users.add(user)
            entry.set_cookie(self._cookie, self._session, httponly=True, samesite="strict", path="/")
            return entry
        if not self._is_own(headers, scope["method"]):
            return PlainTextResponse("Requests of other sites are refused.", 403)
        if not _equal(self._sent(headers), self._session) or _user(scope) not in self._users:
            text = "Open the address that `wdsfs view` has printed: it has a token that this one lacks."
            return PlainTextResponse(text, 403)
        return None

    def _is_own(self, headers: Headers, method: str) -> bool:
        """Return True if a request comes from a page of this server, or from no page: the address was typed."""
        own = {f"http://{host}" for host in self._hosts}
        origin = headers.get("origin")
        if origin is not None and (origin not in own or origin != f"http://{headers['host']}"):
            return False
        if method not in ("GET", "HEAD") and origin is None:
            return False
        return headers.get("sec-fetch-site", "none") in ("same-origin", "none")

    def _sent(self, headers: Headers) -> str:
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return ""
        return "" if cookie is None else cookie.value


def _user(scope: Scope) -> int | None:
    """Return the user of a request; None if that cannot be known."""
    client, server = scope.get("client"), scope.get("server")
    return user_of(tuple(client), tuple(server)) if client and server else None


def _equal(text: str, secret: str) -> bool:
    return hmac.compare_digest(text.encode("utf-8", "replace"), secret.encode())


def user_of(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """Return the user of the client's socket; None if it is not open, half closed, or the kernel does not say."""
    try:
        user = _diagnosed(client, server)
        return _user_in_tables(client, server) if user is None else user
    except OSError:
        return None


def _diagnosed(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """Return the user as sock_diag(7) says; None where the kernel has no such module, or no such socket."""
    (here, here_port), (there, there_port) = map(_address, (client, server))
    question = _QUESTION.pack(
        socket.AF_INET,
        socket.IPPROTO_TCP,
        0,
        0xFFFFFFFF,
        here_port,
        there_port,
        here,
        there,
        0,
        0xFFFFFFFFFFFFFFFF,
    )
    head = _NETLINK_HEAD.pack(_NETLINK_HEAD.size + len(question), _BY_FAMILY, _REQUEST, 0, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as kernel:
            kernel.settimeout(_SECONDS)
            kernel.send(head + question)
            answer = kernel.recv(8192)
    except OSError:
        return None
    if _NETLINK_HEAD.unpack_from(answer)[1] != _BY_FAMILY:  # an error
        return None
    _, state, user = _ANSWER.unpack_from(answer, _NETLINK_HEAD.size)
    return int(user) if state == _ESTABLISHED else None


def _user_in_tables(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """Return the user in the kernel's tables of sockets, which take longer to read. Raises OSError."""
    for table, mapped in _TABLES.items():
        row = [mapped + _hexadecimal(client), mapped + _hexadecimal(server), f"{_ESTABLISHED:02X}"]
        with contextlib.suppress(FileNotFoundError), open(table) as rows:  # a kernel without IPv6
            for fields in map(str.split, rows):
                if fields[1:4] == row:
                    return int(fields[7])
    return None


def _hexadecimal(end: tuple[str, int]) -> str:
    return f"{int.from_bytes(socket.inet_aton(end[0]), sys.byteorder):08X}:{end[1]:04X}"


def _address(end: tuple[str, int]) -> tuple[bytes, bytes]:
    return socket.inet_aton(end[0]), struct.pack("!H", end[1])


class _Connection(H11Protocol):
    """A connection, which is ended when it makes no requests."""

    _began = 0.0
    _request: RequestResponseCycle | None = None  # the last one at the last check

    @property
    def is_quiet(self) -> bool:
        """True if it waits for no answer."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Watch the connection; end the oldest one without requests if there are many."""
        super().connection_made(transport)
        self._began = self.loop.time()
        self.loop.call_later(QUIET_SECONDS, self._check)
        others = [other for other in self.connections if isinstance(other, _Connection)]
        quiet = [other for other in others if other.is_quiet and not other.transport.is_closing()]
        if len(quiet) > QUIET_MAX:
            # The oldest goes: a browser makes its request at once.
            min(quiet, key=lambda other: other._began).transport.abort()

    def _check(self) -> None:
        """End this connection if there was no request since the last check."""
        if self.transport.is_closing():
            return
        if self.is_quiet and self._request is self.cycle:
            self.transport.abort()
            return
        self._request = self.cycle
        self.loop.call_later(QUIET_SECONDS, self._check)


class _Server(uvicorn.Server):
    """A server of uvicorn that ends in order also by SIGHUP, as by SIGINT and SIGTERM, unless ignored (nohup)."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End the block on these signals, which afterwards have the effect that they had before."""
        with super().capture_signals():
            before = signal.getsignal(signal.SIGHUP)
            if before is not signal.SIG_IGN:
                signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)


def listen(port: int) -> socket.socket:
    """Return a socket that only this machine can reach; any free port for 0. Raises UsageError."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", port))
        listening.listen(128)  # at once: until then another user could bind the same port, and listen first
    except OSError as error:
        listening.close()
        raise UsageError(f"port {port}: {error.strerror}; name another port, or leave out --port") from None
    return listening


def serve(site: Site, listening: socket.socket, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP. `ready` is called with the address when it can be opened."""
    sandbox.hide()  # from a decoder that a member has taken over: it is a process of the same user
    if lacking := sandbox.missing():
        log.warning(
            "the kernel has no %s here, so a hostile file could do more than docs/how-to/view.md says: look only "
            "at sets that you trust",
            several(lacking),
        )
    guard = Guard(site.app, listening.getsockname()[1])
    config = uvicorn.Config(
        guard,
        http=_Connection,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        proxy_headers=False,
        limit_concurrency=CONNECTIONS_MAX,
        timeout_graceful_shutdown=2,
    )
    # `downloads` tells the user which file was not sent to its end, and why.
    logging.getLogger("uvicorn.error").addFilter(lambda record: "without completing" not in record.getMessage())
    ready(guard.address)  # the socket listens: a browser gets an answer, if only a moment later
    _Server(config).run(sockets=[listening])


@contextlib.contextmanager
def page_leading_to(address: str) -> Iterator[str]:
    """Yield the path of a page that leads to an address. The page exists for the length of the block.

    Others can see the arguments of a process, so the browser is given a file of the user's with the address in it.
    The directory of the file is locked. Directories that killed views have left behind are removed.
    """
    for place in glob.iglob(os.path.join(glob.escape(tempfile.gettempdir()), f"{PREFIX}*")):
        _remove_if_left_behind(place)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as directory:
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file = os.path.join(directory, "open.html")
            with open(file, "x") as page:
                page.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={address}">')
            yield file
        finally:
            os.close(lock)


def _remove_if_left_behind(place: str) -> None:
    """Remove a directory with a page, if it is this user's and no process has it locked."""
    with contextlib.suppress(OSError):  # not this user's, in use, or removed meanwhile
        directory = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(directory).st_uid == os.getuid():
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink("open.html", dir_fd=directory)
                os.rmdir(place)
        finally:
            os.close(directory)
