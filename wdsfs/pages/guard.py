"""Who may ask: only the browser that was given the address, and only from the pages themselves.

The address that the command prints has a random token. It is exchanged for a cookie that other sites cannot
send (SameSite=Strict) and no script can read. A browser sends it to all ports of a host, also to a server of
another user that a page has led it to. So the cookie is good only for users who have opened the address with
the token, as far as the kernel knows whose a connection is (`peers.py`). Every request is also checked for the
name that it was sent to (Host, or another site could reach the server by a name of its own that resolves to
127.0.0.1) and the site that it comes from (Origin, Sec-Fetch-Site). Every answer carries a policy under which
no script runs but that of the pages.
"""

from __future__ import annotations

import hmac
import secrets
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wdsfs.pages.peers import user_of

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
# For contents of shards, in case a browser shows one as a page: an origin of its own, and no scripts.
MEMBER_POLICY = "sandbox; default-src 'none'"

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


class Guard:
    """Passes to `app` the requests that are allowed at this port."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app, self._port = app, port
        self.token, self._session = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self._users: set[int | None] = set()  # that have had the token
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
        """The answer that refuses a request; None for one that is allowed."""
        headers = Headers(scope=scope)
        if headers.get("host") not in self._hosts:
            return PlainTextResponse("This is not the name of this server.", 421)
        query = parse_qs(scope["query_string"].decode("ascii", "replace"))
        [given] = query.get("token", [""])[:1]
        is_entry = scope["method"] == "GET" and scope["path"] == "/" and given
        if is_entry and _equal(given, self.token):
            # Not a redirect: after a link on another site the browser would not send the cookie.
            entry = HTMLResponse(_ENTRY)
            self._users.add(_user(scope))
            entry.set_cookie(self._cookie, self._session, httponly=True, samesite="strict", path="/")
            return entry
        if not self._is_own(headers, scope["method"]):
            return PlainTextResponse("Requests of other sites are refused.", 403)
        if not _equal(self._sent(headers), self._session) or _user(scope) not in self._users:
            text = "Open the address that `wdsfs view` has printed: it has a token that this one lacks."
            return PlainTextResponse(text, 403)
        return None

    def _is_own(self, headers: Headers, method: str) -> bool:
        """True if a request comes from a page of this server, or from no page: the address was typed."""
        own = {f"http://{host}" for host in self._hosts}
        origin = headers.get("origin")
        if origin is not None and (origin not in own or origin != f"http://{headers['host']}"):
            return False
        if method not in ("GET", "HEAD") and origin is None:
            return False
        return headers.get("sec-fetch-site", "none") in ("same-origin", "none")

    def _sent(self, headers: Headers) -> str:
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return ""
        return "" if found is None else found.value


def _user(scope: Scope) -> int | None:
    """Whose process asks; None if that cannot be known."""
    client, server = scope.get("client"), scope.get("server")
    return user_of(tuple(client), tuple(server)) if client and server else None


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode())
