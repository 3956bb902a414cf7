"""The server: a socket on 127.0.0.1, and the pages behind a guard, until an interrupt.

Every user of the machine can connect, with or without the token. So a connection that asks nothing is ended: after
a while, or at once where there are many of its kind. It takes the place of no other, and no descriptor for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from wdsfs.errors import UsageError
from wdsfs.pages import sandbox
from wdsfs.pages.guard import Guard
from wdsfs.pages.pages import Pages

CONNECTIONS_MAX = 200  # at a time; what further ones ask is answered with 503
QUIET_MAX = 50  # connections of which nothing is asked; each browser keeps up to six
QUIET_SECONDS = 20.0  # that a connection may take to ask for something


class _Connection(H11Protocol):
    """A connection, which is ended when it asks nothing."""

    _began = 0.0
    _request: RequestResponseCycle | None = None  # the last one when this was looked at

    @property
    def is_quiet(self) -> bool:
        """True if it waits for no answer."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._began = self.loop.time()
        self.loop.call_later(QUIET_SECONDS, self._look)
        there = [one for one in self.connections if isinstance(one, _Connection)]
        quiet = [one for one in there if one.is_quiet and not one.transport.is_closing()]
        if len(quiet) > QUIET_MAX:
            # The oldest goes: who has something to ask does so at once.
            min(quiet, key=lambda one: one._began).transport.abort()

    def _look(self) -> None:
        """End this connection if nothing was asked since the last look."""
        if self.transport.is_closing():
            return
        if self.is_quiet and self._request is self.cycle:
            self.transport.abort()
            return
        self._request = self.cycle
        self.loop.call_later(QUIET_SECONDS, self._look)


class _Server(uvicorn.Server):
    """As uvicorn's, which ends in order by SIGINT and SIGTERM: also by SIGHUP, unless that is ignored (nohup)."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A block that these signals end. Afterwards they have the effect that they had before it."""
        with super().capture_signals():
            before = signal.getsignal(signal.SIGHUP)
            if before is not signal.SIG_IGN:
                signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)


def listen(port: int) -> socket.socket:
    """A socket that only this machine can reach; any free port for 0. Raises UsageError."""
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(("127.0.0.1", port))
        found.listen(128)  # at once: until then another user could bind the same port, and listen first
    except OSError as error:
        found.close()
        raise UsageError(f"port {port}: {error.strerror}; name another one with --port, or leave it out") from None
    return found


def serve(pages: Pages, listening: socket.socket, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP. `ready` is called with the address when it can be opened."""
    sandbox.hide()  # from a decoder that a member has taken over: it is a process of the same user
    guard = Guard(pages.app, listening.getsockname()[1])
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
    # `pages` tells the user which file was not sent to its end, and why.
    logging.getLogger("uvicorn.error").addFilter(lambda record: "without completing" not in record.getMessage())
    ready(guard.address)  # the socket listens: a browser gets an answer, if only a moment later
    _Server(config).run(sockets=[listening])
