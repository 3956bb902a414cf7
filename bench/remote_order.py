"""Remote shards in order where little but latency is a limit, and a server with and without TLS.

python -m bench.remote_order [WDSFS ...]     only in order: programs in turn, by default `wdsfs`, and their peers

One shard and six, members of 200 kB, an empty cache, an index made before; the directories are listed first, as by
any program that does not know the names. The server gives the first byte after 20 ms, and sends by sendfile(2), so
that it leaves the processors to the client; the network of `remote.py` passes each byte through Python.
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
from collections.abc import Callable, Iterator, Sequence
from email.utils import formatdate
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench.clients import Clients, ListDirectories, ReadAll, Stream
from bench.data import Set, Sets, Sizes
from bench.network import Network, Piece, Remote, network, without_proxies
from bench.remote import by_webdataset, many_readers
from bench.run import Values
from bench.systems import Broken, View, Wdsfs, processor_seconds, run, stem

if TYPE_CHECKING:
    from bench.run import Bench

LATENCY = 0.02  # seconds to the first byte of each answer
RATE = 80e6  # bytes a second of a connection, where there is a limit
PIECE = 256 << 10  # bytes that are sent at a time then
SETS = {"one shard": "order-one", "six shards": "order-six"}
TURNS = 2
LIMIT = 120.0  # seconds of a pass


def remote_order(bench: Bench) -> None:
    """Shards in order by wdsfs, curl, and webdataset with curl; with 80 MB/s for a connection by wdsfs alone."""
    for name, measure in _turns(bench.sets, [Wdsfs(bench.say)], bench.repetitions):
        with bench.attempt_at(name):
            bench.add_all(name, measure())


def main() -> None:
    programs = [Wdsfs(print, path, own_program=path) for path in sys.argv[1:] or ["wdsfs"]]
    with tempfile.TemporaryDirectory(dir="/var/tmp") as home:
        for name, measure in _turns(Sets(Path(home), Sizes(), print), programs, TURNS):
            try:
                for case, unit, value in measure():
                    print(f"{case}: {name}: {value:.3g} {unit}", flush=True)
            except Broken as error:  # the webdataset library may not be installed
                print(f"{name}: {error}")


def _turns(sets: Sets, programs: Sequence[Wdsfs], turns: int) -> Iterator[tuple[str, Callable[[], Values]]]:
    """Yield the programs in turn, each with what measures it."""
    for limit, rate in (("", 0.0), (", 80 MB/s a connection", RATE)):
        with _serving(sets.home, rate) as server:
            for title, data in ((title + limit, sets.get(name)) for title, name in SETS.items()):
                ways: dict[str, Callable[[], Values]] = {
                    wdsfs.name: partial(_by_wdsfs, title, wdsfs, server, data) for wdsfs in programs
                }
                if not rate:
                    ways["curl"] = partial(_by_peer, title, _by_curl, server, data)
                    ways["webdataset pipe:curl"] = partial(_by_peer, title, by_webdataset, server, data)
                for _ in range(turns):
                    yield from ways.items()


def _by_wdsfs(title: str, wdsfs: Wdsfs, server: Network, data: Set) -> Values:
    shards = Remote(wdsfs, server, server.root / "order", data.paths)
    shards.home.mkdir(mode=0o700, exist_ok=True)
    shards.index()
    return _in_order(title, shards, data)


def _in_order(title: str, shards: Remote, data: Set) -> Values:
    """One pass by one reader, and processor time of the mount; every byte is compared afterwards."""
    with shards.mount("--layout", "files") as pid:
        view = View(shards.mountpoint, "files", stem, pid)
        files = view.files(data)
        lister = ListDirectories(view.directories(data), len(files))
        with Clients([[lister, Stream(files), ReadAll(files)]], LIMIT) as reader:
            reader.go()
            before = processor_seconds(view.pids)
            reading = reader.go()
            spent = processor_seconds(view.pids) - before
            reader.go()
    return [
        (title, "MB/s", reading.bytes / reading.seconds / 1e6),
        (f"{title}, processor time for 1 GB", "s", spent * 1e9 / reading.bytes),
    ]


def _by_peer(title: str, peer: Callable[[Sequence[str]], float], server: Network, data: Set) -> Values:
    size = sum(member.size for _, member in data.members())
    return [(title, "MB/s", size / peer([server.of(path) for path in data.paths]) / 1e6)]


def _by_curl(urls: Sequence[str], options: Sequence[str] = ()) -> float:
    """Return the seconds in which processes of curl, one after the other, fetch these and keep nothing."""
    since = time.perf_counter()
    for url in urls:
        run("curl", "-s", "-f", "-o", "/dev/null", *options, url, env=without_proxies())
    return time.perf_counter() - since


def https(bench: Bench) -> None:
    """A server without latency, with and without TLS: a large shard in order, small files by many readers."""
    for turn in range(bench.repetitions):
        for scheme in ("http", "https"):
            home = bench.sets.home / scheme
            with network(bench.sets.home, home, slow=False, secure=scheme == "https") as server:
                _by_scheme(bench, scheme, server, home, turn)


def _by_scheme(bench: Bench, scheme: str, server: Network, home: Path, turn: int) -> None:
    large, small = bench.sets.get("order-one"), bench.sets.get("tiles")
    with bench.attempt_at("curl"):
        curl = partial(_by_curl, options=("--cacert", str(server.certificate)))
        bench.add_all("curl", _by_peer(f"{scheme}, in order", curl, server, large))
    with bench.attempt_at("wdsfs"):
        shards = Remote(Wdsfs(bench.say), server, home, large.paths)
        shards.index()
        bench.add_all("wdsfs", _in_order(f"{scheme}, in order", shards, large))
        shards = Remote(Wdsfs(bench.say), server, home, small.paths)
        shards.index()
        with shards.mount("--layout", "files") as pid:
            files = View(shards.mountpoint, "files", stem).files(small)
            random.Random(turn).shuffle(files)
            some = [Piece(file.path, 0, file.size, file.crc) for file in files]
            many_readers(bench, f"{scheme}, random", "wdsfs", some, server, pid)


@contextlib.contextmanager
def _serving(root: Path, rate: float) -> Iterator[Network]:
    """Serve files, each connection at so many bytes a second (0: all)."""
    command = [sys.executable, "-m", "bench.remote_order", "--serve", str(root), str(rate)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield Network(f"http://127.0.0.1:{int(server.stdout.readline())}", root, Path("/dev/null"))
        finally:
            server.stdin.close()


# --- the server, a process of its own ------------------------------------------------------------------------


def _serve(root: str, rate: float) -> None:
    """Serve until the standard input ends; prints its port."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        print(listening.getsockname()[1], flush=True)
        threading.Thread(target=_accept, args=(listening, root, rate), daemon=True).start()
        sys.stdin.read()


def _accept(listening: socket.socket, root: str, rate: float) -> None:
    while True:
        client, _ = listening.accept()
        threading.Thread(target=_answer_all, args=(client, root, rate), daemon=True).start()


def _answer_all(client: socket.socket, root: str, rate: float) -> None:
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
            _answer(client, root, rate, head.decode("latin-1"))


def _answer(client: socket.socket, root: str, rate: float, head: str) -> None:
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
        due = time.monotonic()
        while method == "GET" and begin < end:
            size = os.sendfile(client.fileno(), file.fileno(), begin, min(end - begin, PIECE if rate else end))
            begin += size
            if rate:
                due += size / rate
                time.sleep(max(due - time.monotonic(), 0))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        _serve(sys.argv[2], float(sys.argv[3]))
    else:
        main()
