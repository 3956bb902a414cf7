"""How commands find and question running mounts: a small file and a socket for each in the runtime directory.

A daemon writes `<id>.json` (who it is) when its mount is usable and answers on `<id>.sock`, where either side
sends JSON objects, a line each. Both disappear with the daemon; files of a killed daemon are recognised, as their
process is gone. This module has the client side and the files; the daemon's side is in
`mount/control_socket.py`.

| the client sends | the daemon answers |
|---|---|
| `{"do": "status"}` | its report |
| `{"do": "refresh"}` | when the mount shows what SHARDS stand for now: what `Growth.look` returns |
| `{"do": "shards"}` | `{"shards": [[name, path], ...], "reading": {option: bool}, "without": {path: keys}}` |
| `{"do": "restore", "paths": [path, ...]}` | `{"done": true}` when it is done and visible, or `{"error": text}` |
| `{"do": "freeze"}` | the same once no change is under way any more, or `{"error": text}` |
| then `{"new": [path, ...]}` | `{}`: the mount shows what is there now, with these further shards |

When the client goes away, or sends no more, the mount thaws, unless it has left a commit half-way; then the daemon
sends no more, either.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from wdsfs import host, mount_table

RUNNING, SILENT, DEAD, UNSUPERVISED = "running", "not answering", "dead", "without supervisor"
ANSWER_SECONDS = 5.0  # a daemon that takes longer is shown as not answering
ADDRESS_MAX = 107  # bytes of a path that fit into the address of a socket (unix(7))


@dataclass(frozen=True, slots=True)
class Daemon:
    """The registration of a daemon. `started` is seconds since the epoch; `start_ticks` distinguishes a process
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
    overlay: str | None = None
    index: str | None = None
    selection: list[str] = field(default_factory=list)  # as options: --split, --shard-id, --ignore-zeros ...
    composition: str = ""  # the options of a view, as they are typed
    index_tree: bool = False
    follow: float | None = None  # how often the set is looked at again (s); None: it is fixed
    directory: str = ""  # the working directory, which relative specs are of

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


def waits_for_disk(pid: int) -> bool:
    """True if a process or a child of it is in uninterruptible sleep, which only a disk ends."""
    try:
        pids = [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
        return any(Path(f"/proc/{one}/stat").read_bytes().rpartition(b") ")[2][:1] == b"D" for one in pids)
    except OSError:  # one has just ended
        return False


def canonical(mountpoint: str) -> str:
    """The path under which a mount is known, however it is written: absolute, without links.

    The last component is looked at only when nothing is mounted there: the daemon may be dead or stuck.
    """
    parent, base = os.path.split(os.path.abspath(mountpoint))
    place = os.path.join(os.path.realpath(parent), base)
    return place if mount_table.mounted_at(place) else os.path.realpath(place)


def identity(mountpoint: str) -> str:
    """The name of a mount's files: readable, and different for different mount points."""
    digest = hashlib.blake2b(os.fsencode(mountpoint), digest_size=6).hexdigest()
    readable = "".join(c if c.isascii() and c.isalnum() else "-" for c in os.path.basename(mountpoint))[:32]
    return f"{readable or 'root'}-{digest}"


def socket_path(mountpoint: str) -> Path:
    return host.runtime_dir() / f"{identity(mountpoint)}.sock"


@contextlib.contextmanager
def socket_address(mountpoint: str) -> Iterator[str]:
    """The address to bind or connect to; shorter than the path where that is too long for an address."""
    path = socket_path(mountpoint)
    if len(os.fsencode(path)) <= ADDRESS_MAX:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def _file(mountpoint: str) -> Path:
    return host.runtime_dir() / f"{identity(mountpoint)}.json"


def log_path(mountpoint: str) -> Path:
    """Where the daemon of a mount logs when it is in the background; see `session.open_log`."""
    return host.state_dir() / f"{identity(mountpoint)}.log"


def spare_log_path(mountpoint: str) -> Path:
    """Where it logs when that place cannot be written."""
    return host.runtime_dir() / f"{identity(mountpoint)}.log"


@contextlib.contextmanager
def registered(daemon: Daemon) -> Iterator[None]:
    """Let commands find this daemon while the context is open."""
    write_registration(_file(daemon.mountpoint), asdict(daemon))
    try:
        yield
    finally:
        forget(daemon)


def write_registration(file: Path, content: Mapping[str, Any]) -> None:
    """Write how commands find a process, whose number is `pid`, in one step. Raises OSError."""
    # Not by `storage/durable.py`: it ends with the process, so it need not be on disk, and two processes may
    # register at one place at the same time.
    temporary = file.with_suffix(f".{content['pid']}")
    try:
        temporary.write_text(json.dumps(content))
        temporary.rename(file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def daemons() -> list[Daemon]:
    """Every daemon of this user that has not ended in good order, alive or not."""
    found = (_read(file) for file in sorted(host.runtime_dir().glob("*.json")))
    return [daemon for daemon in found if daemon is not None]


def _read(file: Path) -> Daemon | None:
    try:
        return Daemon(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):  # just gone, or written by another version
        return None


def foreign() -> list[mount_table.MountPoint]:
    """For root: the mounts of wdsfs that other users have made; empty for others.

    From the kernel's table alone. Their registrations are what they wrote, and a question to their sockets or
    their mounts may wait for ever.
    """
    if os.geteuid() != 0:
        return []
    return [one for one in mount_table.mounts() if one.fstype == "fuse.wdsfs" and one.user]


def find(mountpoint: str) -> Daemon | None:
    """The daemon of the mount at this path."""
    wanted = canonical(mountpoint)
    return next((daemon for daemon in daemons() if daemon.mountpoint == wanted), None)


def forget(daemon: Daemon) -> None:
    """Remove what makes a daemon known, unless a later one at the same place has taken it over."""
    file = _file(daemon.mountpoint)
    if _read(file) == daemon:
        file.unlink(missing_ok=True)
        socket_path(daemon.mountpoint).unlink(missing_ok=True)


def state_without_answer(daemon: Daemon) -> str:
    """The state, in one word, of a mount whose daemon does not answer."""
    if daemon.alive:
        return SILENT
    if mount_table.mounted_at(daemon.mountpoint) is None:
        return DEAD
    import subprocess  # late: every command loads this module, and only this takes processes

    try:
        # Not in this process: if the workers hang, the question hangs, too. It asks for the file system and not
        # for the directory, whose attributes the kernel may have cached: it returns these for a dead mount, too.
        stat = subprocess.Popen(
            ["stat", "--file-system", "--", daemon.mountpoint],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return DEAD if stat.wait(ANSWER_SECONDS) else UNSUPERVISED
    except subprocess.TimeoutExpired:
        stat.kill()  # and not waited for: a request that a worker has taken cannot be killed
        return SILENT


class Listening(Protocol):
    """A process that listens at the socket of a mount; other than a daemon, it is found in another way."""

    @property
    def mountpoint(self) -> str:
        """The path of the mount."""


class Talk:
    """A conversation with a daemon. Raises OSError, ValueError when it does not answer in time or in JSON."""

    def __init__(self, daemon: Daemon | Listening) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(ANSWER_SECONDS)
            with socket_address(daemon.mountpoint) as address:
                self._socket.connect(address)
            self._lines = self._socket.makefile("rb")
        except BaseException:
            self._socket.close()
            raise

    def ask(self, question: dict[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """Send a message; returns the answer. Raises what the class says."""
        self._socket.settimeout(ANSWER_SECONDS if seconds is None else seconds)
        self._socket.sendall(json.dumps(question).encode() + b"\n")
        answer: dict[str, Any] = json.loads(self._lines.readline())
        return answer

    def finish(self, seconds: float) -> None:
        """End the conversation; returns when the daemon has ended it, too, and with it what it did for this
        client: a mount that it has frozen is thawed. Not later than after so many seconds."""
        with contextlib.suppress(OSError):  # it is gone, or takes too long
            self._socket.settimeout(seconds)
            self._socket.shutdown(socket.SHUT_WR)  # not close: a child of this process may have it, too
            while self._lines.readline():
                pass

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._socket.close()


def report(daemon: Daemon, state: str, answer: dict[str, Any] | None) -> dict[str, Any]:
    """The report of `wdsfs status --json` about a mount: its daemon, its state, and the daemon's answer to
    "status"."""
    return {**asdict(daemon), "state": state, **(answer or {})}


def ask(daemon: Daemon) -> dict[str, Any] | None:
    """The daemon's own report; None when it does not answer."""
    try:
        with Talk(daemon) as talk:
            return talk.ask({"do": "status"})
    except (OSError, ValueError):
        return None
