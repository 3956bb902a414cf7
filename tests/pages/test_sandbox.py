"""A worker that a member has taken over can do no harm: each part of the sandbox alone, and all together."""

from __future__ import annotations

import ctypes
import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.bounded import bounded
from tests.pages import hostile
from tests.pages.conftest import MEMORY, Bytes
from wdsfs.pages import previewer, sandbox, server
from wdsfs.pages.previewer import Limits, Previewer

ROOT = str(Path(__file__).parents[2])
# The parts of the kernel are there on all that tests run on; a test that finds one missing says so by its failure.
CHANGES = ["unlink", "unlink in a thread", "rename", "truncate", "mkdir", "symlink", "create"]
OPENS = ["open for write", "open to read"]


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    return path


def test_a_decoder_that_was_taken_over(victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = previewer._START.replace(
        "from wdsfs", f"sys.path.append({ROOT!r}); import tests.pages.hostile; from wdsfs"
    )
    monkeypatch.setattr(previewer, "_START", start)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    confined = Previewer(workers=1, limits=Limits(memory=MEMORY))
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            about = {"path": str(victim), "parent": os.getpid(), "port": server.getsockname()[1]}
            preview = confined.preview("json", Bytes(json.dumps(about).encode()))
        assert preview.problem == ""
        found = json.loads(preview.text)
    finally:
        confined.close()
    assert found["refusals"] == dict.fromkeys(hostile.attempts("", 0, 0), "EPERM")
    assert "AWS_SECRET_ACCESS_KEY" not in found["variables"]
    assert found["descriptors"] == [0, 1, 2]  # the socket to the server, and nothing
    assert victim.read_bytes() == b"content"
    assert os.listdir(victim.parent) == ["file"]


def test_landlock_alone(victim: Path) -> None:
    """As where there is no filter for the machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        arguments = (str(victim), os.getpid(), server.getsockname()[1])

        def attempt(names: list[str], closed: bool) -> dict[str, str]:
            sandbox.begin()
            if closed:
                sandbox._restrict_files(0)
            return hostile.refusals(*arguments, names)

        names = [*CHANGES, *OPENS, "connect", "kill", "ptrace"]
        expected = {**dict.fromkeys(names, "EACCES"), "kill": "EPERM", "ptrace": "EPERM"}
        assert bounded(lambda: attempt(names, True)) == expected
        # While its libraries are loaded, it reads.
        assert bounded(lambda: attempt(names, False)) == {**expected, "open to read": "done"}
    assert os.listdir(victim.parent) == ["file"]


def test_the_filter_alone(victim: Path) -> None:
    """As where the kernel has no Landlock."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        arguments = (str(victim), os.getpid(), server.getsockname()[1])

        def attempt() -> dict[str, str]:
            ctypes.CDLL(None).prctl(sandbox._PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            sandbox._filter_calls()
            return hostile.refusals(*arguments)

        assert set(bounded(attempt).values()) == {"EPERM"}
    assert victim.read_bytes() == b"content"


def test_a_hidden_process() -> None:
    def is_dumpable(hidden: bool) -> int:
        if hidden:
            sandbox.hide()
        return int(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))

    assert [bounded(lambda: is_dumpable(False)), bounded(lambda: is_dumpable(True))] == [1, 0]


def test_what_a_kernel_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sandbox.missing() == []
    monkeypatch.setattr(sandbox, "_landlock_version", lambda: 0)
    monkeypatch.setattr(sandbox, "_MACHINES", {})
    assert sandbox.missing() == ["Landlock", "seccomp"]
    sandbox._filter_calls()  # does nothing
    sandbox._restrict_files(0)


class _Reached(Exception):
    """The server has come to this step."""


@pytest.mark.parametrize("missing", [[], ["Landlock"], ["Landlock", "seccomp"]])
def test_the_server_hides_and_says_which_part_the_kernel_lacks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: list[str]
) -> None:
    """Before it serves anything: a decoder is a process of the same user."""
    steps: list[str] = []

    def guard(*_: object) -> None:
        raise _Reached

    monkeypatch.setattr(sandbox, "hide", lambda: steps.append("hidden"))
    monkeypatch.setattr(sandbox, "missing", lambda: missing)
    monkeypatch.setattr(server, "Guard", guard)
    nothing: Any = SimpleNamespace(app=None, getsockname=lambda: ("", 0))
    with pytest.raises(_Reached):
        server.serve(nothing, nothing, nothing)
    assert steps == ["hidden"]
    assert len(caplog.messages) == bool(missing)
    assert all(part in caplog.text for part in missing)
