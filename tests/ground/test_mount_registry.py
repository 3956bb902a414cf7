"""The files of the runtime directory by which commands find and ask mounts, without any mount."""

from __future__ import annotations

import contextlib
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
from typing import Any

import pytest

from tests.processes import Process
from wdsfs import host, mount_registry, mount_table
from wdsfs.mount.live_mount import FuseMount
from wdsfs.mount_registry import DEAD, FUSE, LINE_MAX, SILENT, Registration, Talk, registered, registrations


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runtime directory of these tests. The real path: `tmp_path` may lead through a link."""
    directory = Path(os.path.realpath(tmp_path)) / "run"
    directory.mkdir()
    monkeypatch.setattr(host, "runtime_dir", lambda: directory)
    return directory


def a_registration(mountpoint: str = "/mnt/a", pid: int = 0) -> Registration:
    """The registration of a mount by FUSE, of this process or another one."""
    pid = pid or os.getpid()
    view: dict[str, Any] = {"layout": "samples", "names": "ext", "merge": False, "specs": ["a.tar"], "log": None}
    ticks = mount_registry.start_ticks(pid) or 0
    return Registration(engine=FUSE, pid=pid, start_ticks=ticks, mountpoint=mountpoint, started=1.25, **view)


# --- names -------------------------------------------------------------------------------------------------


def test_one_mount_has_one_name(runtime: Path) -> None:
    real = runtime.parent / "real"
    real.mkdir()
    (runtime.parent / "link").symlink_to("real")
    for written in ("real", "real/", "./real", "link", "link/.", "run/../real"):
        assert mount_registry.canonical(f"{runtime.parent}/{written}") == str(real)
    assert mount_registry.canonical("/") == "/"
    assert mount_registry.canonical(f"{runtime.parent}/missing") == f"{runtime.parent}/missing"


def test_where_something_is_mounted_nothing_is_looked_at(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mount may be dead or stuck."""
    monkeypatch.setattr(mount_table, "mounted_at", lambda path: path)
    looked: list[str] = []
    monkeypatch.setattr(os.path, "realpath", lambda path: looked.append(path) or path)
    assert mount_registry.canonical("/mnt/stuck") == "/mnt/stuck"
    assert looked == ["/mnt"]


@pytest.mark.parametrize("mountpoint", ["/", "/mnt/train", "/mnt/ü \n/..x", "/mnt/" + "x" * 255, "/inv\udcff"])
def test_identities_are_file_names(mountpoint: str) -> None:
    name = mount_registry.file_of(mountpoint, "", Path("/")).name
    assert name.isascii()
    assert name.replace("-", "").isalnum()
    assert len(name) <= 50
    same, other = (mount_registry.file_of(path, "", Path("/")).name for path in (mountpoint, mountpoint + "x"))
    assert same == name != other


# --- registration ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mountpoint", "specs"), [("/mnt/a", ["a.tar"]), ("/mnt/\udcff\n", ["\udcfe.tar", "ü"])])
def test_a_daemon_is_known_while_it_is_registered(runtime: Path, mountpoint: str, specs: list[str]) -> None:
    """By a file, one object of JSON, and a socket, both of its user."""
    one = replace(a_registration(mountpoint), specs=specs)
    with registered(one), mount_registry.listening(mountpoint):
        assert registrations(Registration) == [one]
        for name in (mountpoint, mountpoint.replace("mnt", "mnt/.") + "/"):
            assert mount_registry.find_registration(name) == one
        assert mount_registry.find_registration("/mnt/b") is None
        assert [json.loads(file.read_text()) for file in runtime.glob("*.json")] == [asdict(one)]
        assert mount_registry.file_of(mountpoint, ".sock").stat().st_mode & 0o777 == 0o600
    assert registrations(Registration) == []
    assert list(runtime.iterdir()) == []


def test_the_end_of_a_mount_does_not_touch_its_successor(runtime: Path) -> None:
    """After a lazy unmount the old daemon may outlive the beginning of the next mount at the same place."""
    old, new = a_registration(), replace(a_registration(), started=2.5)
    with contextlib.ExitStack() as successor:
        with mount_registry.listening("/mnt/a"), registered(old):
            successor.enter_context(mount_registry.listening("/mnt/a"))
            successor.enter_context(registered(new))
        assert mount_registry.find_registration("/mnt/a") == new
        assert mount_registry.file_of("/mnt/a", ".sock").exists()
        mount_registry.forget(old)
        assert mount_registry.find_registration("/mnt/a") == new
    assert list(runtime.iterdir()) == []


@pytest.mark.parametrize("successors", [1, 2])
def test_a_successor_that_comes_while_a_mount_is_forgotten(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, successors: int
) -> None:
    """Between the look at the registration, its removal, and the second look."""
    old, *later = (replace(a_registration(), started=float(number)) for number in range(successors + 1))
    mount_registry.register(old)
    read = mount_registry._read_registration

    def read_slowly(file: Path, kind: type[Registration]) -> Registration | None:
        found = read(file, kind)
        if later:
            mount_registry.register(later.pop(0))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(mount_registry, "_read_registration", read_slowly)
        mount_registry.forget(old)
    found = mount_registry.find_registration("/mnt/a")
    assert found is not None
    assert found.started == successors
    assert len(list(runtime.iterdir())) == 1


@pytest.mark.parametrize("alive", [True, False])
def test_the_socket_of_a_mount_that_is_forgotten(runtime: Path, alive: bool) -> None:
    """A process that is alive removes its own; a successor may have put another one there already."""
    one = a_registration() if alive else replace(a_registration(), start_ticks=1)
    mount_registry.register(one)
    socket_file = mount_registry.file_of("/mnt/a", ".sock")
    socket_file.touch()
    mount_registry.forget(one)
    assert socket_file.exists() == alive


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff", b"{}", b'{"pid": 1}', b'{"other": "version"}']
)
def test_what_cannot_be_understood_is_ignored(runtime: Path, content: bytes) -> None:
    (runtime / "x.json").write_bytes(content)
    with registered(a_registration()):
        assert len(registrations(Registration)) == 1


# --- alive or dead -----------------------------------------------------------------------------------------


def test_a_daemon_is_alive_until_its_process_ends() -> None:
    with Process([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        one = a_registration(pid=process.pid)
        assert one.alive
        assert not replace(one, start_ticks=one.start_ticks + 1).alive, "another process with the same number"
        process.stdin.close()  # type: ignore[union-attr]
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not one.alive, "a zombie"
        process.wait()
        assert not one.alive
    assert mount_registry.start_ticks(process.pid) is None


def test_a_dead_daemon_without_mount_is_dead(runtime: Path) -> None:
    one = replace(a_registration(str(runtime)), start_ticks=1)
    assert FuseMount(one.mountpoint, one).report()["state"] == DEAD
    one = a_registration(str(runtime))
    assert FuseMount(one.mountpoint, one).report()["state"] == SILENT


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
        with mount_registry.socket_address("/mnt/a") as address:
            listener.bind(address)
        assert mount_registry.file_of("/mnt/a", ".sock").is_socket()
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


def answer(seconds: float | None = None) -> object:
    """What a client gets, None if that is no answer."""
    try:
        with Talk(a_registration()) as talk:
            return talk.ask({"do": "status"}, seconds)
    except (OSError, ValueError):
        return None


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
    assert answer() == expected
    thread.join()


def test_nobody_answers(server: socket.socket) -> None:
    """It takes the connection and is silent; it does not take it; it is not there."""
    assert answer(0.05) is None
    server.close()
    assert answer() is None
    mount_registry.file_of("/mnt/a", ".sock").unlink()
    assert answer() is None


def test_a_line_has_an_end_and_no_descriptor_is_left_open(
    server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()  # what earlier tests have left must not be closed meanwhile
    before = len(os.listdir("/proc/self/fd"))
    for most, expected in ((LINE_MAX, {"shards": 12345}), (10, None)):
        monkeypatch.setattr(mount_registry, "LINE_MAX", most)
        thread = answer_with(server, b'{"shards": 12345}\n')
        assert answer() == expected
        thread.join()
    assert len(os.listdir("/proc/self/fd")) == before
