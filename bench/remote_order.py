"""Remote shards in order where only latency is a limit: 20 ms to the first byte on the loopback, no rate.

python -m bench.remote_order [WDSFS ...]     programs in turn, by default `wdsfs`; beside them curl

Members of 200 kB, an empty cache, an index made before; the directories are listed first, as by any program that
does not know the names. `make bench` has smaller sets. The server sends by sendfile(2), so that it leaves the
processors to the client; the network of `remote.py` passes each byte through Python. Bytes are compared.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import TYPE_CHECKING

from bench.data import header
from bench.network import Piece, mounted, read, without_proxies
from bench.systems import descendants, processor_seconds, program, run

if TYPE_CHECKING:
    from bench.run import Bench

LATENCY = 0.02  # seconds to the first byte of each answer
SIZE = 200_000  # bytes of a member
SETS = {"one shard of 480 MB": (1, 2400), "six shards of 40 MB": (6, 200)}  # shards, and members of each
SMALL = {"one shard of 120 MB": (1, 600), "three shards of 20 MB": (3, 100)}
TURNS = 2


def remote_order(bench: Bench) -> None:
    """Remote shards in order where only latency is a limit, with an empty cache."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place, _serving(Path(place)) as url:
        for title, (shards, members) in SMALL.items():
            urls, pieces = _make_all(Path(place), url, shards, members)
            for _ in range(bench.repetitions):
                with bench.attempt_at("wdsfs"):
                    rate, spent = _pass(program("wdsfs") or "wdsfs", urls, pieces)
                    bench.add(title, "MB/s", "wdsfs", rate)
                    bench.add(f"{title}, processor time for 1 GB", "s", "wdsfs", spent)
                with bench.attempt_at("curl"):
                    bench.add(title, "MB/s", "curl", _curl(urls, len(pieces) * SIZE))


def main() -> None:
    programs = sys.argv[1:] or ["wdsfs"]
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place, _serving(Path(place)) as url:
        for title, (shards, members) in SETS.items():
            urls, pieces = _make_all(Path(place), url, shards, members)
            for _ in range(TURNS):
                for wdsfs in programs:
                    rate, spent = _pass(wdsfs, urls, pieces)
                    print(f"{title}: {wdsfs}: {rate:.0f} MB/s, {spent:.2f} s of processor time for 1 GB")
                print(f"{title}: curl: {_curl(urls, len(pieces) * SIZE):.0f} MB/s", flush=True)


def _make_all(place: Path, url: str, shards: int, members: int) -> tuple[list[str], list[Piece]]:
    """Write shards; return their URLs and all their members."""
    paths = [place / f"{members}-{number}.tar" for number in range(shards)]
    return [f"{url}/{path.name}" for path in paths], [piece for path in paths for piece in _make(path, members)]


def _make(path: Path, members: int) -> list[Piece]:
    """Write a shard; return its members, with their paths below the mount point."""
    pieces, content = [], random.Random(path.name)
    with path.open("wb") as file:
        for number in range(members):
            name, data = f"{number:06}.bin", content.randbytes(SIZE)
            file.write(header(name, SIZE) + data + bytes(-SIZE % 512))
            pieces.append(Piece(f"{path.stem}/{name}", 0, SIZE, zlib.crc32(data)))
        file.write(bytes(1024))
    return pieces


def _pass(wdsfs: str, urls: list[str], pieces: list[Piece]) -> tuple[float, float]:
    """Read all members in order; return MB/s, and the seconds of all processes of the mount for 1 GB."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        home, env = Path(name), without_proxies() | {"XDG_RUNTIME_DIR": name, "XDG_STATE_HOME": name}
        index: list[str | Path] = ["--index-dir", home / "index"]
        run(wdsfs, "index", "-q", *index, *urls, env=env | {"WDSFS_CACHE_DIR": f"{name}/other"})
        options: list[str | Path] = ["--layout", "files", *index, *urls, home / "mnt"]
        command = [wdsfs, "mount", "-f", "-q", *options]
        with mounted(command, home / "mnt", env | {"WDSFS_CACHE_DIR": f"{name}/cache"}) as pid:
            for directory in {os.path.dirname(piece.path) for piece in pieces}:
                os.listdir(home / "mnt" / directory)
            before = processor_seconds(descendants(pid))
            reading = read([piece._replace(path=f"{home}/mnt/{piece.path}") for piece in pieces])
            spent = processor_seconds(descendants(pid)) - before
    return reading.rate, spent * 1e9 / reading.bytes


def _curl(urls: list[str], size: int) -> float:
    since = time.perf_counter()
    for url in urls:
        subprocess.run(["curl", "-s", "-o", "/dev/null", url], env=without_proxies(), check=True)
    return size / (time.perf_counter() - since) / 1e6


@contextlib.contextmanager
def _serving(root: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "bench.remote_order", "--serve", str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.stdin.close()


# --- the server, a process of its own ------------------------------------------------------------------------


def _serve(root: str) -> None:
    """Serve until the standard input ends; prints its port."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        print(listening.getsockname()[1], flush=True)
        threading.Thread(target=_accept, args=(listening, root), daemon=True).start()
        sys.stdin.read()


def _accept(listening: socket.socket, root: str) -> None:
    while True:
        client, _ = listening.accept()
        threading.Thread(target=_answer_all, args=(client, root), daemon=True).start()


def _answer_all(client: socket.socket, root: str) -> None:
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    received = b""
    with client, contextlib.suppress(OSError):
        while True:
            while b"\r\n\r\n" not in received:
                data = client.recv(1 << 16)
                if not data:
                    return
                received += data
            head, _, received = received.partition(b"\r\n\r\n")
            time.sleep(LATENCY)
            _answer(client, root, head.decode("latin-1"))


def _answer(client: socket.socket, root: str, head: str) -> None:
    first, *lines = head.split("\r\n")
    method, path, _ = first.split(" ")
    span = next((line.partition("=")[2] for line in lines if line.lower().startswith("range:")), "")
    with open(root + path, "rb") as file:
        state = os.stat(file.fileno())
        low, _, high = span.partition("-")
        begin, end = int(low or 0), min(int(high) + 1, state.st_size) if high else state.st_size
        partial = f"Content-Range: bytes {begin}-{end - 1}/{state.st_size}\r\n" if span else ""
        client.sendall(
            f"HTTP/1.1 {'206 Partial Content' if span else '200 OK'}\r\nContent-Length: {end - begin}\r\n"
            f'ETag: "{state.st_mtime_ns:x}"\r\nLast-Modified: {formatdate(state.st_mtime, usegmt=True)}\r\n'
            f"Accept-Ranges: bytes\r\n{partial}\r\n".encode()
        )
        while method == "GET" and begin < end:
            begin += os.sendfile(client.fileno(), file.fileno(), begin, end - begin)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        _serve(sys.argv[2])
    else:
        main()
