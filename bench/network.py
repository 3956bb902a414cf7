"""A web server behind a slow network, what mounts its shards, and a client that reads them.

The server is nginx on this machine; `tests/slow_proxy.py` makes 20 ms to the first byte and 80 MB/s for each
connection of the loopback. Bytes and requests are those in the server's log.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.data import Set
from bench.systems import Broken, Wdsfs, descendants, processor_seconds, run, unmount
from tests import slow_proxy

Mount = contextlib.AbstractContextManager[int]  # the number of its process
# A mount is at rest when its processes take less than this part of a processor for so many seconds. That is longer
# than a new object in the cache waits to be compared.
IDLE, LOOK_SECONDS = 0.02, 0.7
_NGINX = """
daemon off; pid {home}/pid; error_log {home}/error;
events {{ worker_connections 1024; }}
http {{
  log_format sizes '$body_bytes_sent'; access_log {home}/access sizes;
  client_body_temp_path {home}/body; proxy_temp_path {home}/proxy; fastcgi_temp_path {home}/fastcgi;
  uwsgi_temp_path {home}/uwsgi; scgi_temp_path {home}/scgi;
  sendfile on; keepalive_requests 1000000;
  server {{ listen 127.0.0.1:{port}; location / {{ root {root}; autoindex on; }} }}
}}
"""


class Network(NamedTuple):
    """The server behind its network."""

    url: str
    root: Path
    log: Path

    def of(self, path: Path) -> str:
        """The URL of a shard."""
        return f"{self.url}/{path.relative_to(self.root)}"

    def traffic(self) -> tuple[int, int]:
        """Requests that it has answered, and bytes."""
        sizes = [int(line) for line in self.log.read_text().split()]
        return len(sizes), sum(sizes)


@contextlib.contextmanager
def network(root: Path, home: Path) -> Iterator[Network]:
    """Serve the files below `root` behind a slow network. Raises Broken without nginx."""
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if nginx is None:
        raise Broken("nginx is not installed")
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    user = "user root;" if os.geteuid() == 0 else ""
    (home / "conf").write_text(user + _NGINX.format(home=home, port=port, root=root))
    with subprocess.Popen([nginx, "-p", home, "-c", home / "conf"], stderr=subprocess.DEVNULL) as server:
        try:
            _wait(lambda: _listens(port))
            with slow_proxy.running("127.0.0.1", port) as reached:
                yield Network(f"http://127.0.0.1:{reached}", root, home / "access")
        finally:
            server.terminate()


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def _wait(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise Broken(f"not ready within {seconds:.0f} s")
        time.sleep(0.01)


@contextlib.contextmanager
def mounted(command: Sequence[str | Path], mountpoint: Path, env: dict[str, str]) -> Iterator[int]:
    """Run the daemon of a mount while the block lasts."""
    mountpoint.mkdir(exist_ok=True)
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as daemon:
        try:
            _wait(lambda: os.path.ismount(mountpoint) or daemon.poll() is not None)
            if daemon.poll() is not None:
                raise Broken(f"{command[0]} ended with {daemon.returncode}")
            rest(daemon.pid)  # its processes may still be starting, which a read of 0.2 s would measure, too
            yield daemon.pid
        finally:
            unmount(mountpoint)
            daemon.terminate()


def rest(pid: int) -> None:
    """Wait until a mount does nothing any more."""
    before = -1.0

    def is_idle() -> bool:
        nonlocal before
        time.sleep(LOOK_SECONDS)
        then, before = before, processor_seconds(descendants(pid))
        return 0 <= before - then < IDLE * LOOK_SECONDS

    _wait(is_idle)


# --- the client, a process of its own ------------------------------------------------------------------------


class Piece(NamedTuple):
    """A member: the file with it, and where in that."""

    path: str
    offset: int
    size: int
    crc: int


class Reading(NamedTuple):
    seconds: float
    bytes: int
    each: float  # seconds, median

    @property
    def rate(self) -> float:
        """MB/s."""
        return self.bytes / self.seconds / 1e6


def read(pieces: Sequence[Piece], threads: int = 1) -> Reading:
    """Read all pieces by so many threads. Raises Broken for a wrong byte."""
    found = subprocess.run(
        [sys.executable, "-m", "bench.network", str(threads)],
        input=json.dumps(pieces),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if found.returncode:
        raise Broken(found.stderr.strip().splitlines()[-1])
    return Reading(*json.loads(found.stdout))


def _serve_reading() -> None:
    pieces = [Piece(*piece) for piece in json.load(sys.stdin)]
    times: list[float] = []
    turn = iter(pieces)
    lock = threading.Lock()
    failed: list[Exception] = []

    def work() -> None:
        opened, fd = "", -1
        try:
            while True:
                with lock:
                    piece = next(turn, None)
                if piece is None:
                    return
                since = time.perf_counter()
                if piece.path != opened:  # of a tar all members are read from one open file
                    if opened:
                        os.close(fd)
                    opened, fd = piece.path, os.open(piece.path, os.O_RDONLY)
                content = os.pread(fd, piece.size, piece.offset)
                times.append(time.perf_counter() - since)
                if zlib.crc32(content) != piece.crc:
                    raise ValueError(f"wrong bytes in {piece.path}")
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(int(sys.argv[1]))]
    since = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - since
    if failed:
        sys.exit(str(failed[0]))
    print(json.dumps([seconds, sum(piece.size for piece in pieces), median(times)]))


# --- wdsfs -----------------------------------------------------------------------------------------------------


class Remote:
    """wdsfs over shards of the server, with an index and a cache of its own below `home`."""

    def __init__(self, wdsfs: Wdsfs, server: Network, home: Path, shards: Sequence[Path]) -> None:
        self._wdsfs, self.home = wdsfs, home
        self.urls = [server.of(path) for path in shards]
        self.mountpoint = home / "mnt"
        places = {"RUNTIME_DIR": home, "STATE_HOME": home}
        self._env = without_proxies() | {f"XDG_{name}": str(place) for name, place in places.items()}
        self._env |= {"WDSFS_CACHE_DIR": str(home / "cache"), "WDSFS_INDEX_DIR": str(home / "index")}

    def index(self) -> float:
        """Index the shards into an empty index, through an empty cache that no mount has; the seconds of the
        command."""
        with self._empty() as env:
            since = time.monotonic()
            run(*self._wdsfs.command("index", "-q", *self.urls), env=env)
            return time.monotonic() - since

    @contextlib.contextmanager
    def _empty(self) -> Iterator[dict[str, str]]:
        for old in ("index", "other"):
            shutil.rmtree(self.home / old, ignore_errors=True)
        yield self._env | {"WDSFS_CACHE_DIR": str(self.home / "other")}

    def mount(self, *options: str, what: Sequence[str | Path] = (), fresh: bool = True) -> Mount:
        """Mount these shards (or `what`), with an empty cache if `fresh`."""
        env = self.fresh() if fresh else self._env
        start = self._wdsfs.command("mount", "-f", "-q", *options)
        command = [*start, *(what or self.urls), self.mountpoint]
        return mounted(command, self.mountpoint, env)

    def fresh(self) -> dict[str, str]:
        """Empty the cache; the environment of a program that uses it, and the index."""
        shutil.rmtree(self.home / "cache", ignore_errors=True)
        return self._env


def without_proxies() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}


def samples_of(data: Set, mountpoint: Path) -> list[list[Piece]]:
    """The files of each sample of a mount of wdsfs."""
    found: dict[tuple[str, str], list[Piece]] = {}
    for shard, member in data.members():
        key, _, extension = member.name.partition(".")
        piece = Piece(f"{mountpoint}/{shard.stem}/{key}/{extension}", 0, member.size, member.crc)
        found.setdefault((shard.stem, key), []).append(piece)
    return list(found.values())


if __name__ == "__main__":
    _serve_reading()
