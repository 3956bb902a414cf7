"""What a test starts ends with it, also when the test fails, hangs or is killed.

- `Process` is a Popen that is killed where its block fails.
- Every program that the tests start has a mark in its environment, and so have all that it starts in turn. After
  each test that fails, and at the end of the session, what is left is killed and named (`conftest.py`).
- A keeper, a process of its own for each process of pytest, does the same when that one is killed, and unmounts
  what it has mounted.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import select
import signal
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

Word = str | bytes | Path  # of a command

# Seconds until a wait for something that must happen is given up; no test measures time. With a load of 15 on two
# processors things take twenty times as long. The time limit of a test is a multiple (pyproject.toml).
PATIENCE = 120.0

MARK = "STARTED_BY_TESTS"  # the name of the variable; not one of those that `Program` takes out
_GRACE = 1.0  # seconds that processes have to end by themselves when pytest is gone
# They end with the process that has started them, and other processes of it may still need them.
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
_SET_PDEATHSIG, _MNT_DETACH = 1, 2


def mark_programs() -> None:
    """Called once by pytest: mark what it starts; its own forks, which have no mark, end with it."""
    os.environ[MARK] = f"{os.getpid()}-{time.time_ns()}"
    os.register_at_fork(after_in_child=_end_with_parent)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def outlive_parent() -> None:
    """Called in a fork of pytest whose parent ends first."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, 0, 0, 0, 0)


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Return when the condition holds, or fail after PATIENCE. No test depends on how long it takes."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited too long for: {what}"
        time.sleep(0.01)


class Process(subprocess.Popen[Any]):
    """A Popen that is killed where its block fails; waits for its end give up after PATIENCE."""

    def __exit__(self, kind: type[BaseException] | None, *more: Any) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, *more)

    _started: ClassVar[weakref.WeakSet[Process]] = weakref.WeakSet()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._started.add(self)
        super().__init__(*arguments, **options)

    @classmethod
    def unfinished(cls) -> set[int]:
        """Return the numbers of the processes for whose end somebody may wait still."""
        return {process.pid for process in cls._started if process.returncode is None}

    def wait(self, timeout: float | None = PATIENCE) -> int:
        return super().wait(timeout)

    def communicate(self, input: Any = None, timeout: float | None = PATIENCE) -> tuple[Any, Any]:
        return super().communicate(input, timeout)


def finished(*command: Word, code: int | None = 0, **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run a program to its end; its output is text. `code`: the exit code that it must have (None: any)."""
    usual = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": PATIENCE}
    stdin = {} if "input" in options else {"stdin": subprocess.DEVNULL}
    done: subprocess.CompletedProcess[Any] = subprocess.run(command, **{**usual, **stdin, **options}, check=False)
    assert code is None or done.returncode == code, (command, done.returncode, done.stdout, done.stderr)
    return done


def forked(work: Callable[[], object]) -> int:
    """Fork a child that does this work, and return its number. It ends with 1 if the work raises or gives False.

    A child that hangs is killed after PATIENCE.
    """
    pid = os.fork()
    if not pid:
        code = 1
        try:
            signal.alarm(int(PATIENCE))
            code = int(work() is False)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def answer_of_child(question: Callable[[], object]) -> object:
    """Fork; return the answer of the child to the question."""
    reader, writer = os.pipe()
    pid = forked(lambda: os.write(writer, pickle.dumps(question())))
    os.close(writer)
    with open(reader, "rb") as file:
        answer = file.read()
    assert os.waitpid(pid, 0)[1] == 0
    return pickle.loads(answer)


@contextlib.contextmanager
def children(*work: Callable[[], object]) -> Iterator[list[int]]:
    """Fork a child for each work; provide their numbers. At the end of the block they are killed."""
    pids = [forked(each) for each in work]
    try:
        yield pids
    finally:
        for pid in pids:
            with contextlib.suppress(ChildProcessError):  # its end has been waited for
                if not os.waitpid(pid, os.WNOHANG)[0]:
                    kill(pid)
                    os.waitpid(pid, 0)


def reap(pids: Iterable[int]) -> None:
    """Reap those of these children that have ended and for which nobody waits.

    An orphan becomes a child of the tests. Fetchers of commands outlive these, and hundreds of zombies would be
    looked at by each test.
    """
    for pid in set(pids) - Process.unfinished():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def marked(mark: str) -> dict[int, str]:
    """The processes with this mark, and their commands. Zombies have none."""
    processes, entry = {}, f"{MARK}={mark}".encode()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended, or is that of another user
            if entry in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                command = Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace")
                processes[int(name)] = command.replace("\0", " ")
    return {pid: command for pid, command in processes.items() if not any(map(command.__contains__, _HELPERS))}


def kill_marked(mark: str, grace: float, free: Callable[[], None] = lambda: None) -> dict[int, str]:
    """Kill the processes with this mark that do not end within `grace` seconds; returns their commands.

    `free` ends what processes that were killed may wait for in the kernel.
    """
    until, killed = time.monotonic() + grace, dict[int, str]()
    while left := marked(mark):
        if time.monotonic() > until:
            killed |= left
            for pid in left:
                kill(pid)
            free()
        time.sleep(0.02)
    return killed


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def start_keeper(*places: Path | str) -> None:
    """Start the keeper of this process. `places` are where its mounts are, as beginnings of paths."""
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    command = [sys.executable, "-S", __file__, str(os.getpid()), os.environ[MARK], *map(str, places)]
    # Not in the way of whoever reads our output to its end; an interrupt from the terminal is not for it.
    actions = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1)]
    os.posix_spawn(sys.executable, command, environment, file_actions=actions, setsid=True)


def _keep(pid: int, mark: str, *places: str) -> None:
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(pid)], [], [])
    killed = kill_marked(mark, _GRACE, lambda: _unmount_below(places))
    for command in killed.values():
        print(f"ended after the tests: {command}", file=sys.stderr)
    _unmount_below(places)


def _unmount_below(places: Iterable[str]) -> None:
    for line in reversed(Path("/proc/self/mounts").read_bytes().splitlines()):
        path = line.split()[1].decode("unicode_escape").encode("latin-1")  # octal escapes, as in proc_mounts(5)
        if path.startswith(tuple(map(os.fsencode, places))):
            unmount(path)


def unmount(path: Path | bytes) -> None:
    """End a mount, whose requests that hang get an error."""
    command = ["fusermount3", "-u", "-z", "--"] if os.geteuid() else ["umount", "--force", "--lazy"]
    subprocess.run([*command, path], capture_output=True, check=False)


if __name__ == "__main__":
    _keep(int(sys.argv[1]), *sys.argv[2:])
