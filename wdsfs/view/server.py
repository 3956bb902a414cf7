"""The server: a socket on 127.0.0.1, and the pages behind a guard, until an interrupt."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn

from wdsfs.errors import UsageError
from wdsfs.view.guard import Guard
from wdsfs.view.pages import Pages

CONNECTIONS_MAX = 200  # at a time; further ones are answered with 503


def listen(port: int) -> socket.socket:
    """A socket that only this machine can reach; any free port for 0. Raises UsageError."""
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(("127.0.0.1", port))
    except OSError as error:
        found.close()
        raise UsageError(f"port {port} cannot be used: {error.strerror}") from None
    return found


def serve(pages: Pages, listening: socket.socket, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. `ready` is called with the address when it can be opened."""
    guard = Guard(pages.app, listening.getsockname()[1])
    config = uvicorn.Config(
        guard,
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
    listening.listen(128)  # from now on a browser can connect; it is answered a moment later
    ready(guard.address)
    uvicorn.Server(config).run(sockets=[listening])
