"""The files of the runtime directory by which commands find and ask mounts, without any mount."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.processes import Process
from wdsfs import host, mount_table
from wdsfs.status import control
from wdsfs.status.control import Daemon


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runtime directory of these tests. The real path: `tmp_path` may lead through a link."""
    directory = Path(os.path.realpath(tmp_path)) / "run"
    directory.mkdir()
    monkeypatch.setattr(host, "runtime_dir", lambda: directory)
    return directory


def daemon(mountpoint: str = "/mnt/a", pid: int = 0) -> Daemon:
    pid = pid or os.getpid()
    return Daemon(pid, control.start_ticks(pid) or 0, mountpoint, ["a.tar"], "samples", "ext", False, 1.25, None)


# --- names -------------------------------------------------------------------------------------------------


def test_one_mount_has_one_name(runtime: Path) -> None:
    real = runtime.parent / "real"
    real.mkdir()
    (runtime.parent / "link").symlink_to("real")
    for written in ("real", "real/", "./real", "link", "link/.", "run/../real"):
        assert control.canonical(f"{runtime.parent}/{written}") == str(real)
    assert control.canonical("/") == "/"
    assert control.canonical(f"{runtime.parent}/missing") == f"{runtime.parent}/missing"


def test_where_something_is_mounted_nothing_is_looked_at(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mount may be dead or stuck."""
    monkeypatch.setattr(mount_table, "mounted_at", lambda path: path)
    looked: list[str] = []
    monkeypatch.setattr(os.path, "realpath", lambda path: looked.append(path) or path)
    assert control.canonical("/mnt/stuck") == "/mnt/stuck"
    assert looked == ["/mnt"]


@pytest.mark.parametrize("mountpoint", ["/", "/mnt/train", "/mnt/ü \n/..x", "/mnt/" + "x" * 255, "/inv\udcff"])
def test_identities_are_file_names(mountpoint: str) -> None:
    name = control.identity(mountpoint)
    assert name.isascii()
    assert name.replace("-", "").isalnum()
    assert len(name) <= 50
    assert control.identity(mountpoint) == name != control.identity(mountpoint + "x")


# --- registration ------------------------------------------------------------------------------------------


def test_a_daemon_is_known_while_it_is_registered(runtime: Path) -> None:
    one = daemon()
    with control.registered(one):
        assert control.daemons() == [one]
        assert control.find("/mnt/a") == control.find("/mnt/./a/") == one
        assert control.find("/mnt/b") is None
    assert control.daemons() == []
    assert list(runtime.iterdir()) == []


def test_the_end_of_a_mount_does_not_touch_its_successor(runtime: Path) -> None:
    """After a lazy unmount the old daemon may outlive the beginning of the next mount at the same place."""
    old, new = daemon(), replace(daemon(), started=2.5)
    with control.registered(old):
        successor = control.registered(new)
        successor.__enter__()
        control.socket_path("/mnt/a").touch()
    assert control.find("/mnt/a") == new
    assert control.socket_path("/mnt/a").exists()
    control.forget(old)
    assert control.find("/mnt/a") == new
    successor.__exit__(None, None, None)
    assert list(runtime.iterdir()) == []


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff", b"{}", b'{"pid": 1}', b'{"other": "version"}']
)
def test_what_cannot_be_understood_is_ignored(runtime: Path, content: bytes) -> None:
    (runtime / "x.json").write_bytes(content)
    with control.registered(daemon()):
        assert len(control.daemons()) == 1


def test_any_path_survives(runtime: Path) -> None:
    one = replace(daemon("/mnt/inv\udcff\n"), specs=["\udcfe.tar", "ü"])
    with control.registered(one):
        assert control.daemons() == [one]


# --- alive or dead -----------------------------------------------------------------------------------------


def test_a_daemon_is_alive_until_its_process_ends() -> None:
    with Process([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        one = daemon(pid=process.pid)
        assert one.alive
        assert not replace(one, start_ticks=one.start_ticks + 1).alive, "another process with the same number"
        process.stdin.close()  # type: ignore[union-attr]
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not one.alive, "a zombie"
        process.wait()
        assert not one.alive
    assert control.start_ticks(process.pid) is None


def test_a_dead_daemon_without_mount_is_dead(runtime: Path) -> None:
    one = replace(daemon(str(runtime)), start_ticks=1)
    assert control.state_without_answer(one) == control.DEAD
    assert control.state_without_answer(daemon(str(runtime))) == control.SILENT


# --- questions ---------------------------------------------------------------------------------------------


@pytest.fixture(params=["short", "x" * 150])
def server(
    runtime: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[socket.socket]:
    """Listens where the daemon of /mnt/a would, also where the path is too long for an address."""
    directory = runtime / request.param
    directory.mkdir()
    monkeypatch.setattr(host, "runtime_dir", lambda: directory)
    with socket.socket(socket.AF_UNIX) as listener:
        with control.socket_address("/mnt/a") as address:
            listener.bind(address)
        assert control.socket_path("/mnt/a").is_socket()
        listener.listen()
        yield listener


def answer_with(server: socket.socket, *parts: bytes) -> threading.Thread:
    def answer() -> None:
        connection, _ = server.accept()
        with connection:
            assert json.loads(connection.recv(100)) == {"do": "status"}
            for part in parts:
                connection.sendall(part)

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((b'{"shards": 1}',), {"shards": 1}),
        ((b'{"sha', b'rds": ', b"1}\n"), {"shards": 1}),
        ((json.dumps({"a": "x" * 200_000}).encode(),), {"a": "x" * 200_000}),
        ((b"",), None),
        ((b'{"shards": ',), None),
        ((b"\xff\xff",), None),
    ],
    ids=["at once", "in pieces", "long", "nothing", "cut off", "nonsense"],
)
def test_answers(server: socket.socket, parts: tuple[bytes, ...], expected: object) -> None:
    thread = answer_with(server, *parts)
    assert control.ask(daemon()) == expected
    thread.join()


def test_nobody_answers(server: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the connection and is silent; it does not take it; it is not there."""
    monkeypatch.setattr(control, "ANSWER_SECONDS", 0.05)
    assert control.ask(daemon()) is None
    server.close()
    assert control.ask(daemon()) is None
    control.socket_path("/mnt/a").unlink()
    assert control.ask(daemon()) is None


def test_no_descriptor_is_left_open(server: socket.socket) -> None:
    gc.collect()  # what earlier tests have left must not be closed meanwhile
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        thread = answer_with(server, b"{}")
        control.ask(daemon())
        thread.join()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_registration_is_json(runtime: Path) -> None:
    """One object with what `status` needs of a daemon that does not answer."""
    with control.registered(daemon()):
        (file,) = runtime.glob("*.json")
        assert json.loads(file.read_text()) == asdict(daemon())
