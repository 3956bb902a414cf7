"""However a view ends, nothing stays: no page with its address, no process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tars
from tests.conftest import Program
from tests.processes import PATIENCE, wait_until


@contextlib.contextmanager
def a_view(program: Program, place: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A view on a desktop whose browser does nothing; `place` is the directory for temporary files."""
    desktop = {"DISPLAY": ":0", "BROWSER": "true", "TMPDIR": str(place)}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    before = set(pages(place))
    process = program.start("view", "a.tar", new_interpreter=True, env=desktop, **streams)
    try:
        wait_until(lambda: set(pages(place)) - before, "the page that leads to the address")
        yield process
    finally:
        process.kill()
        process.communicate()


def pages(place: Path) -> list[Path]:
    """The pages with addresses, which the browser is given."""
    return sorted(place.glob("wdsfs-view-*/open.html"))


@pytest.fixture
def place(program: Program) -> Path:
    program.write("a.tar", tars.tar(tars.member(b"x.txt", b"x")))
    return program.directory("tmp")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_behind(program: Program, place: Path, number: int) -> None:
    with a_view(program, place) as process:
        process.send_signal(number)
        assert process.wait(PATIENCE) == 128 + number
        assert os.listdir(place) == []


def test_the_leftovers_of_a_killed_view_are_removed_by_the_next_one(program: Program, place: Path) -> None:
    with a_view(program, place) as killed:
        [left] = pages(place)
        killed.kill()
        killed.wait()
        other = place / "wdsfs-view-other"
        other.mkdir()
        (other / "notes.txt").touch()
        with a_view(program, place):
            [first] = pages(place)
            assert first != left
            with a_view(program, place):
                assert first in pages(place)  # of a view that serves
        assert sorted(path.name for path in other.iterdir()) == ["notes.txt"]
