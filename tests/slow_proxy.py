"""A network between a client and a server on one machine: so much time to the first byte, so many bytes a second.

`python -m tests.slow_proxy HOST:PORT [MILLISECONDS [BYTES_A_SECOND]]` prints its port, and ends with its standard
input. Each connection has the rate for itself, as with object stores. A process of its own, so that neither tests
nor benchmarks share an interpreter with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.processes import PATIENCE, Process

LATENCY, RATE = 0.02, 80e6
PIECE = 1 << 18


class SlowProxy:
    """Passes on what comes. An answer does not begin before its time, and then flows at the rate."""

    def __init__(self, host: str, port: int, latency: float, rate: float) -> None:
        self._server = host, port
        self._latency, self._rate = latency, rate
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(listening)
            task = loop.create_task(self._connection(client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connection(self, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with client, socket.socket() as server:
            for one in (client, server):
                one.setblocking(False)
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(OSError):  # either side has gone: so does the other
                await loop.sock_connect(server, self._server)
                connection = _Connection(client, server, self._latency, self._rate)
                up = asyncio.create_task(connection.pass_questions())
                try:
                    await connection.pass_answers()
                finally:
                    up.cancel()
                    await asyncio.wait([up])


class _Connection:
    def __init__(self, client: socket.socket, server: socket.socket, latency: float, rate: float) -> None:
        self._client, self._server = client, server
        self._latency, self._rate = latency, rate
        self._due = 0.0  # when the next byte of an answer may be passed on

    async def pass_questions(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while question := await loop.sock_recv(self._client, PIECE):
                self._due = max(self._due, loop.time() + self._latency)
                await loop.sock_sendall(self._server, question)
            self._server.shutdown(socket.SHUT_WR)

    async def pass_answers(self) -> None:
        loop = asyncio.get_running_loop()
        buffer = memoryview(bytearray(PIECE))
        while size := await loop.sock_recv_into(self._server, buffer):
            if (wait := self._due - loop.time()) > 0:
                await asyncio.sleep(wait)
            # Time that was not used is not saved up, but for what a timer is late.
            self._due = max(self._due, loop.time() - 0.005) + size / self._rate
            await loop.sock_sendall(self._client, buffer[:size])


@contextlib.contextmanager
def running(host: str, port: int, latency: float = LATENCY, rate: float = RATE) -> Iterator[int]:
    """The port of a proxy to this server, while the block lasts."""
    command = [sys.executable, "-m", "tests.slow_proxy", f"{host}:{port}", str(latency * 1000), str(rate)]
    root = Path(__file__).parent.parent
    with Process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()
            process.wait(PATIENCE)


async def _main(target: str, milliseconds: str = "20", rate: str = str(RATE)) -> None:
    host, _, port = target.rpartition(":")
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        listening.setblocking(False)
        print(listening.getsockname()[1], flush=True)
        serving = asyncio.create_task(
            SlowProxy(host, int(port), float(milliseconds) / 1000, float(rate)).serve(listening)
        )
        ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        await asyncio.wait([serving, ended], return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
