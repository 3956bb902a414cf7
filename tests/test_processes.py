"""What a test starts ends with it (tests/processes.py)."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import need_fuse
from tests.processes import Process, finished, wait_until
from tests.sets import ENVIRONMENT
from wdsfs import mount_table

MOUNTS = """
import os, signal, sys
from pathlib import Path
from tests import processes, tars
processes.mark_programs()
processes.start_keeper(os.getcwd())
from tests.conftest import Program
program = Program(Path.cwd())
program.write("a.tar", tars.tar(tars.member(b"a.txt", b"a")))
program.run("mount", "a.tar", program.mountpoint)
if not os.fork():
    os.setsid()
    os.execv(sys.executable, [sys.executable, "-c", "import signal; signal.pause() #" + os.getcwd()])
Path("mounted").touch()
signal.pause()
"""


def _left(place: Path) -> list[str]:
    shown = finished("ps", "-wweo", "stat,args").stdout
    return [line for line in shown.splitlines() if str(place) in line and not line.startswith("Z")]


def test_nothing_stays_of_tests_that_are_killed(tmp_path: Path) -> None:
    """Neither a mount, nor a program that has left its session and its parent."""
    need_fuse()
    with Process([sys.executable, "-c", MOUNTS], cwd=tmp_path, env=ENVIRONMENT) as process:
        wait_until(lambda: (tmp_path / "mounted").exists() or process.poll() is not None, "a mount")
        assert process.poll() is None
        process.kill()
    wait_until(lambda: mount_table.mounted_at(tmp_path / "mnt") is None, "the unmount")
    wait_until(lambda: not _left(tmp_path), "the end of all programs, and of the keeper")
    with (
        pytest.raises(ZeroDivisionError),
        Process([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process,
    ):
        raise ZeroDivisionError
    assert process.returncode == -signal.SIGKILL
