"""The registry of live mounts: for each a file in the runtime directory, and a socket to talk to its process.

The process of a mount is a daemon (FUSE) or a guard (kernel). It writes `<id>.json`, its registration, when the
mount is usable; a daemon listens at `<id>.sock`. The process removes both when it ends. The number and start of
the process tell the files of a killed one. Client and daemon send JSON objects, a line each, which
`mount/control_socket.py` defines.

Nobody but this user can write there (`host.runtime_dir`). Waits and lines have limits: a process that is silent,
or talks nonsense, costs the other side an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self, TypeVar

from wdsfs import __version__, host, mount_table
from wdsfs.errors import MALFORMED
from wdsfs.formats import Format

FUSE, KERNEL = "fuse", "kernel"  # engines
RUNNING, SILENT, DEAD, UNSUPERVISED = "running", "not answering", "dead", "without supervisor"  # states of a mount
FOREIGN = "mounted"  # the state of a mount of another user, whose daemon is not asked
ANSWER_SECONDS = 5.0  # a process that takes longer counts as silent
LINE_MAX = 1 << 26  # bytes; a request or an answer may have the paths of all shards
# Of registrations and messages at sockets. Version 0 names no version; nothing else has changed since.
PROTOCOL = Format("a live mount", (0, 1), "use that one, or end it: wdsfs umount, and mount again")
ADDRESS_MAX = 107  # bytes of a path that fit into the address of a socket (unix(7))


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """The registration of the process of a mount.

    `started` is seconds since the epoch; `start_ticks` distinguishes a process from a later one with the same
    number. `specs` are SHARDS, or the image; relative ones are of `directory`. `selection` and `composition` are
    options as they are typed, `follow` is how often the set is looked at again (s), None for a fixed set. `index`
    and `overlay` are directories. `protocol` is the version of what its process says and understands, `wdsfs` that
    of its release. A later release adds fields, and none of those without a default goes.
    """

    engine: str
    pid: int
    start_ticks: int
    mountpoint: str
    specs: list[str]
    started: float
    log: str | None
    layout: str
    names: str
    merge: bool
    index_tree: bool = False
    composition: str = ""
    selection: list[str] = field(default_factory=list)
    directory: str = ""
    overlay: str | None = None
    index: str | None = None
    follow: float | None = None
    protocol: int = PROTOCOL.version
    wdsfs: str = __version__

    @classmethod
    def parse(cls, content: dict[str, Any]) -> Self:
        """Return the registration in an object of JSON. Raises one of MALFORMED."""
        return cls(**cls.known(content))

    @classmethod
    def known(cls, content: dict[str, Any]) -> dict[str, Any]:
        """Return the part of an object of JSON that are fields of this class."""
        content = {"protocol": 0, "wdsfs": "", **content}
        return {field.name: content[field.name] for field in fields(cls) if field.name in content}

    @property
    def alive(self) -> bool:
        return start_ticks(self.pid) == self.start_ticks

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name; `asdict` would copy each path."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


Registered = TypeVar("Registered", bound=Registration)


def children(pid: int) -> list[int]:
    """Return the processes that the first thread of a process has started, none if it is gone."""
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the boot; None when there is no such process."""
    try:
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if words[0] == b"Z" else int(words[19])


# --- names --------------------------------------------------------------------------------------------------


def canonical(mountpoint: str) -> str:
    """Return the path under which a mount is known, however it is written: absolute, without links.

    The last component is looked at only when nothing is mounted there: the process may be dead or stuck.
    """
    parent, base = os.path.split(os.path.abspath(mountpoint))
    place = os.path.join(os.path.realpath(parent), base)
    return place if mount_table.mounted_at(place) else os.path.realpath(place)


def file_of(mountpoint: str, suffix: str, directory: Path | None = None) -> Path:
    """Return a file of the mount at this canonical path: readable, and different for different mount points.

    It is in the runtime directory, or in `directory`.
    """
    digest = hashlib.blake2b(os.fsencode(mountpoint), digest_size=6).hexdigest()
    readable = "".join(c if c.isascii() and c.isalnum() else "-" for c in os.path.basename(mountpoint))[:32]
    return (directory or host.runtime_dir()) / f"{readable or 'root'}-{digest}{suffix}"


# --- registrations ------------------------------------------------------------------------------------------


def registration_of(mountpoint: str, kind: type[Registered]) -> Registered | None:
    """Return the registration of the mount at this canonical path, with the fields of `kind`.

    None if there is none.
    """
    return _read_registration(file_of(mountpoint, ".json"), kind)


def find_registration(mountpoint: str) -> Registration | None:
    """Return the registration of the mount at this path."""
    return registration_of(canonical(mountpoint), Registration)


def registrations(kind: type[Registered]) -> list[Registered]:
    """Return all processes of this user's mounts that have not ended in good order, alive or not."""
    candidates = (_read_registration(file, kind) for file in sorted(host.runtime_dir().glob("*.json")))
    return [registration for registration in candidates if registration is not None]


def _read_registration(file: Path, kind: type[Registered]) -> Registered | None:
    try:
        return kind.parse(json.loads(file.read_text()))
    except (OSError, *MALFORMED):  # just gone, or written by another version
        return None


@contextlib.contextmanager
def registered(registration: Registration) -> Iterator[None]:
    """Register this process, so that commands find it, while the context is open. Raises OSError."""
    register(registration)
    try:
        yield
    finally:
        forget(registration)


def register(registration: Registration) -> None:
    """Write a registration, or replace that of the same process, in one step. Raises OSError."""
    # Not by `durable.py`: it ends with the process, so it need not be on disk, and two processes may
    # register at one place at the same time.
    file = file_of(registration.mountpoint, ".json")
    temporary = file.with_suffix(f".{registration.pid}")
    try:
        temporary.write_text(json.dumps(registration.as_json()))
        temporary.rename(file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def forget(registration: Registration) -> None:
    """Remove the files of a process, unless a later process at the same place has taken them over."""

    def is_own(file: Path) -> bool:
        current = _read_registration(file, Registration)
        return current is not None and (current.pid, current.started) == (registration.pid, registration.started)

    place = canonical(registration.mountpoint)
    if _remove(file_of(place, ".json"), is_own) and not registration.alive:
        file_of(place, ".sock").unlink(missing_ok=True)  # else `listening` removes it


def _remove(file: Path, is_own: Callable[[Path], bool]) -> bool:
    """Remove a file of an ended mount; returns False if it is that of a later mount at the same place.

    The later one may put its file there at any time. So the file is taken away first, and given back if it is not
    the one to remove.
    """
    if not is_own(file):
        return False
    taken = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.rename(taken)
    except FileNotFoundError:
        return False
    own = is_own(taken)
    if not own:
        with contextlib.suppress(FileExistsError):  # there is one that is later still
            file.hardlink_to(taken)
    taken.unlink()
    return own


# --- the socket ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def socket_address(mountpoint: str) -> Iterator[str]:
    """Yield the address to bind or connect to; shorter than the path where that is too long for an address."""
    path = file_of(mountpoint, ".sock")
    if len(os.fsencode(path)) <= ADDRESS_MAX:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


@contextlib.contextmanager
def listening(mountpoint: str) -> Iterator[socket.socket]:
    """Open the socket at which commands talk to this process, for the context. Raises OSError."""
    path = file_of(mountpoint, ".sock")
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as listener:
        with socket_address(mountpoint) as address:
            listener.bind(address)
        path.chmod(0o600)
        listener.listen()
        own = path.stat().st_ino
        try:
            yield listener
        finally:
            with contextlib.suppress(FileNotFoundError):
                _remove(path, lambda file: file.stat().st_ino == own)


def encode(message: dict[str, Any]) -> bytes:
    """Return a message as a line."""
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Return the message of a line. Raises ValueError for anything but an object of JSON."""
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("no object")
    return message


class Talk:
    """A conversation with the process of a mount.

    Raises OSError, ValueError when it does not answer in time or in JSON; OtherVersion for one of a release that
    this one cannot talk to.
    """

    def __init__(self, registration: Registration) -> None:
        PROTOCOL.check(registration.protocol)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(ANSWER_SECONDS)
            with socket_address(registration.mountpoint) as address:
                self._socket.connect(address)
            self._lines = self._socket.makefile("rb")
        except BaseException:
            self._socket.close()
            raise

    def ask(self, request: dict[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """Send a message; returns the answer. Raises what the class says."""
        self._socket.settimeout(ANSWER_SECONDS if seconds is None else seconds)
        self._socket.sendall(encode(request))
        return decode(self._lines.readline(LINE_MAX))

    def finish(self, seconds: float) -> None:
        """End the conversation, and wait up to `seconds` until the process has done so, too.

        With that it has ended what it did for this client: a mount that it has frozen is thawed.
        """
        with contextlib.suppress(OSError):  # it is gone, or takes too long
            self._socket.settimeout(seconds)
            self._socket.shutdown(socket.SHUT_WR)  # not close: a child of this process may have it, too
            while self._lines.readline(LINE_MAX):
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._socket.close()
