"""What a test starts ends with it (tests/processes.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.conftest import need_fuse
from tests.processes import Process, wait_until
from tests.sets import ENVIRONMENT
from wdsfs import mount_table

SLEEP = "import signal; signal.pause()"


# What pytest does at its start; then a program that leaves its session and its parent, and a fork.
TESTS = f"""
import os, subprocess, sys, time
from tests import processes
processes.mark_programs()
processes.start_keeper(os.getcwd())
subprocess.run([sys.executable, "-c", '''
import os, subprocess, sys
if not os.fork():
    os.setsid()
    subprocess.run([sys.executable, "-c", {SLEEP!r} + "#" + os.getcwd()])
'''])
if not os.fork():
    open("forked", "w").write(str(os.getpid()))
    time.sleep(10000)
while True:
    time.sleep(10000)
"""


def _left(place: Path) -> list[str]:
    shown = subprocess.run(["ps", "-wweo", "stat,args"], capture_output=True, check=True, text=True).stdout
    return [line for line in shown.splitlines() if str(place) in line and not line.startswith("Z")]


def test_nothing_stays_of_tests_that_are_killed(tmp_path: Path) -> None:
    with Process([sys.executable, "-c", TESTS], cwd=tmp_path, env=ENVIRONMENT) as tests:
        wait_until((tmp_path / "forked").exists, "a fork")
        wait_until(lambda: len(_left(tmp_path)) == 2, "the program, and the keeper")
        forked = int((tmp_path / "forked").read_text())
        tests.kill()
    wait_until(lambda: not _left(tmp_path), "the end of the program, and of the keeper")
    wait_until(lambda: not _lives(forked), "the end of the fork")
    with pytest.raises(ZeroDivisionError), Process([sys.executable, "-c", SLEEP]) as process:
        raise ZeroDivisionError
    assert process.returncode == -signal.SIGKILL


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


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
Path("mounted").touch()
signal.pause()
"""


def test_the_mounts_of_tests_that_are_killed_end(tmp_path: Path) -> None:
    need_fuse()
    with Process([sys.executable, "-c", MOUNTS], cwd=tmp_path, env=ENVIRONMENT) as process:
        wait_until(lambda: (tmp_path / "mounted").exists() or process.poll() is not None, "a mount")
        assert process.poll() is None
        process.kill()
    wait_until(lambda: mount_table.mounted_at(tmp_path / "mnt") is None, "the unmount")


def test_orphans_that_have_ended_are_reaped() -> None:
    """An ended process is a zombie as long as somebody may ask for its status, which is nobody for an orphan."""
    with Process([sys.executable, "-c", "import os; print(os.fork() or '')"], stdout=subprocess.PIPE) as parent:
        orphan = int(parent.communicate()[0])
    wait_until(lambda: os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOHANG | os.WNOWAIT), "its end")
    with Process(["true"]) as own:
        wait_until(lambda: os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT), "its end")
        processes.reap([orphan, own.pid])
        assert own.wait() == 0
    with pytest.raises(ChildProcessError):
        os.waitpid(orphan, os.WNOHANG)
