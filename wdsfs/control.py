"""How commands find and question running mounts: a small file and a socket for each in the runtime directory.

A daemon writes `<id>.json` (who it is) when its mount is usable and answers on `<id>.sock`: a client connects,
sends nothing, reads one JSON object until the end. Both disappear with the daemon; what a killed one leaves
behind is recognised by its process being gone. This module has the client side and the files; the daemon's
side is in `mount.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wdsfs import system

ANSWER_SECONDS = 5.0  # a daemon that takes longer is shown as not answering


@dataclass(frozen=True, slots=True)
class Daemon:
    """What a daemon says of itself once. `started` is seconds since the epoch; `start_ticks` tells a process
    from a later one with the same number."""

    pid: int
    start_ticks: int
    mountpoint: str
    specs: list[str]
    layout: str
    names: str
    merge: bool
    started: float
    log: str | None

    @property
    def alive(self) -> bool:
        return start_ticks(self.pid) == self.start_ticks


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since the boot; None when there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] == b"Z" else int(fields[19])


def identity(mountpoint: str) -> str:
    """The name of a mount's files: readable, and different for different mount points."""
    digest = hashlib.blake2b(os.fsencode(mountpoint), digest_size=6).hexdigest()
    readable = "".join(c if c.isascii() and c.isalnum() else "-" for c in os.path.basename(mountpoint))[:32]
    return f"{readable or 'root'}-{digest}"


def socket_path(mountpoint: str) -> Path:
    return system.runtime_dir() / f"{identity(mountpoint)}.sock"


def _file(mountpoint: str) -> Path:
    return system.runtime_dir() / f"{identity(mountpoint)}.json"


def log_path(mountpoint: str) -> Path:
    """Where the daemon of a mount logs when it is in the background."""
    return system.state_dir() / f"{identity(mountpoint)}.log"


@contextlib.contextmanager
def registered(daemon: Daemon) -> Iterator[None]:
    """Let commands find this daemon while the context is open."""
    file = _file(daemon.mountpoint)
    temporary = file.with_suffix(f".{daemon.pid}")
    temporary.write_text(json.dumps(asdict(daemon)))
    temporary.rename(file)
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            if json.loads(file.read_text())["pid"] == daemon.pid:
                file.unlink()
                socket_path(daemon.mountpoint).unlink()


def daemons() -> list[Daemon]:
    """Every daemon of this user that has not ended in good order, alive or not."""
    found = []
    for file in sorted(system.runtime_dir().glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):  # half written or just gone
            found.append(Daemon(**json.loads(file.read_text())))
    return found


def find(mountpoint: str) -> Daemon | None:
    """The daemon of the mount at this path."""
    wanted = os.path.abspath(mountpoint)
    return next((daemon for daemon in daemons() if daemon.mountpoint == wanted), None)


def forget(daemon: Daemon) -> None:
    """Remove what a dead daemon left behind."""
    _file(daemon.mountpoint).unlink(missing_ok=True)
    socket_path(daemon.mountpoint).unlink(missing_ok=True)


def ask(daemon: Daemon) -> dict[str, Any] | None:
    """The daemon's own report; None when it does not answer."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(ANSWER_SECONDS)
            client.connect(str(socket_path(daemon.mountpoint)))
            parts = []
            while part := client.recv(1 << 16):
                parts.append(part)
        answer: dict[str, Any] = json.loads(b"".join(parts))
    except (OSError, ValueError):
        return None
    return answer
