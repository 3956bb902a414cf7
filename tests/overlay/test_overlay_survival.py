"""A writable mount whose processes are killed: nobody notices.

Writers do what programs do, to the mount and to a plain copy of it: any difference is a finding. They go on while
workers are killed at random, so that requests are cut off at every point. The kernel sends these requests again,
and a change that was made already must not be made twice.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import Mounted, Program, descendants, fails
from tests.fuse.test_supervisor import kill, workers_of
from tests.overlay.test_overlay_mount import outcome, picture, renameat2
from tests.processes import wait_until
from tests.writables import shard
from wdsfs.mount import mount_search
from wdsfs.overlay.overlay_directory import OverlayDirectory, held
from wdsfs.overlay.upper_files import EXCHANGE, NOREPLACE

SAMPLES = 60
KILLS = 45
WRITERS = 3
OPTIONS = ("--overlay", "o", f"s{{0..{WRITERS - 1}}}.tar")


def make_set(program: Program) -> None:
    for number in range(WRITERS):
        names = [f"{sample:03}.{ext}" for sample in range(SAMPLES) for ext in ("txt", "cls")]
        program.write(f"s{number}.tar", shard([(name, name.encode() * 100) for name in names]))


class Drawn(NamedTuple):
    """What an action is done with: two files, a directory, and a name that is not there yet."""

    old: str
    other: str
    folder: str
    new: str
    data: bytes
    offset: int
    coin: bool


# --- the actions: each must return the same for the mount and for the copy


def make(top: Path, drawn: Drawn) -> Any:
    with (top / drawn.new).open("xb", buffering=0) as file:
        assert file.write(drawn.data) == len(drawn.data)
    return outcome((top / drawn.new).open, "x")


def change(top: Path, drawn: Drawn) -> Any:
    fd = os.open(top / drawn.old, os.O_RDWR)
    try:
        os.pwrite(fd, drawn.data, drawn.offset)
        if drawn.coin:
            os.ftruncate(fd, drawn.offset)
        else:
            os.fsync(fd)
        return os.pread(fd, 1 << 16, 0)
    finally:
        os.close(fd)


def replace(top: Path, drawn: Drawn) -> Any:
    (top / drawn.new).write_bytes(drawn.data)
    os.rename(top / drawn.new, top / drawn.old)


def rename(top: Path, drawn: Drawn) -> Any:
    if drawn.coin:
        renameat2(top / drawn.old, top / drawn.new, NOREPLACE)
    else:
        os.rename(top / drawn.old, top / drawn.new)
    return outcome(os.rename, top / drawn.old, top / "x")


def exchange(top: Path, drawn: Drawn) -> Any:
    return outcome(renameat2, top / drawn.old, top / drawn.other, EXCHANGE)


def unlink(top: Path, drawn: Drawn) -> Any:
    os.unlink(top / drawn.old)


def mkdir(top: Path, drawn: Drawn) -> Any:
    os.mkdir(top / drawn.new)


def rmdir(top: Path, drawn: Drawn) -> Any:
    return outcome(os.rmdir, top / drawn.folder)


def link(top: Path, drawn: Drawn) -> Any:
    """Two names at once, and the old one goes."""
    os.link(top / drawn.old, top / drawn.new)
    links = os.stat(top / drawn.new).st_nlink
    os.unlink(top / drawn.old)
    return links


def attribute(top: Path, drawn: Drawn) -> Any:
    before = outcome(os.getxattr, top / drawn.old, "user.label")
    if isinstance(before, bytes):
        os.removexattr(top / drawn.old, "user.label")
    else:
        os.setxattr(top / drawn.old, "user.label", drawn.data[:10], os.XATTR_CREATE)
    return before


def rename_folder(top: Path, drawn: Drawn) -> Any:
    return outcome(os.rename, top / drawn.folder, top / drawn.new)  # into itself at times


def remove_folder(top: Path, drawn: Drawn) -> Any:
    for name in sorted(os.listdir(top / drawn.folder)):
        outcome(os.unlink, top / drawn.folder / name)
    return outcome(os.rmdir, top / drawn.folder)


def hold(top: Path, drawn: Drawn) -> Any:
    """A file that has lost its name stays readable as long as it is open."""
    (top / drawn.new).write_bytes(drawn.data)
    with (top / drawn.new).open("r+b", buffering=0) as file:
        os.unlink(top / drawn.new)
        file.seek(0, os.SEEK_END)
        file.write(b"more")
        file.seek(0)
        return file.read()


ACTIONS: list[Callable[[Path, Drawn], Any]] = [
    *(make, make, change, change, replace, rename, exchange, unlink, mkdir, rmdir, link, attribute),
    *(rename_folder, remove_folder, hold),
]


class Writer(threading.Thread):
    """Changes the directory of one shard, which is its own, and `plain`, a copy of it, in the same way."""

    def __init__(self, top: Path, plain: Path, seed: int) -> None:
        super().__init__()
        self.top, self.plain = top, plain
        self.random = random.Random(seed)
        self.problems: list[str] = []
        self.done = 0
        self.stopped = False

    def run(self) -> None:
        while not self.stopped and not self.problems:
            action, drawn = self.random.choice(ACTIONS), self._draw()
            expected = outcome(action, self.plain, drawn)
            try:
                result = outcome(action, self.top, drawn)
                assert result == expected, (result, expected)
            except BaseException as error:
                self.problems.append(f"{action.__name__}{drawn[:4]}: {error!r}")
            self.done += 1

    def _draw(self) -> Drawn:
        """Draw quickly: while a thread does this, no request of another one is under way."""
        chance, new = self.random, f"n{self.done}"
        with os.scandir(self.plain) as entries:
            names = {entry.name: entry.is_dir() for entry in entries}
        folder = chance.choice([name for name, is_folder in names.items() if is_folder])
        some = chance.sample([*names], 2)
        old, other = (f"{name}/{chance.choice(self._in(name))}" if names[name] else name for name in some)
        data, offset = chance.randbytes(chance.randrange(20_000)), chance.randrange(10_000)
        return Drawn(old, other, folder, chance.choice([new, f"{folder}/{new}"]), data, offset, offset < 5000)

    def _in(self, folder: str) -> list[str]:
        return os.listdir(self.plain / folder) or ["missing"]


@contextlib.contextmanager
def writing(mounted: Mounted, seed: int = 0) -> Iterator[list[Writer]]:
    plain = mounted.path.parent / "plain"
    subprocess.run(["cp", "-a", mounted.path, plain], check=True)
    writers = [Writer(mounted.path / f"s{n}", plain / f"s{n}", seed + n) for n in range(WRITERS)]
    for writer in writers:
        writer.start()
    try:
        yield writers
    finally:
        for writer in writers:
            writer.stopped = True
        for writer in writers:
            writer.join()
    assert [writer.problems for writer in writers] == [[]] * WRITERS


def go_on(writers: list[Writer], least: int = 1) -> None:
    """Returns when each of them has got so much further, or has failed."""
    before = [writer.done for writer in writers]
    wait_until(
        lambda: all(
            writer.done >= done + least or not writer.is_alive()
            for writer, done in zip(writers, before, strict=True)
        ),
        "the writers",
    )
    assert [writer.problems for writer in writers] == [[]] * WRITERS


@contextlib.contextmanager
def killing(mounted: Mounted) -> Iterator[Callable[[], None]]:
    """A function that kills the worker, as soon as there is another than the last."""
    others = descendants(mounted.pid) - set(workers_of(mounted))  # who hears of changes
    killed: set[int] = set()

    def kill_worker() -> None:
        wait_until(lambda: descendants(mounted.pid) - others - killed, "a worker")
        for pid in descendants(mounted.pid) - others - killed:
            kill(pid)
            killed.add(pid)

    yield kill_worker


def test_killed_workers_cost_no_writer_anything(program: Program) -> None:
    make_set(program)
    with program.mounted(*OPTIONS) as mounted:
        mounted.expect_log("killed by SIGKILL")
        with writing(mounted) as writers, killing(mounted) as kill_worker:
            for number in range(KILLS):
                kill_worker()
                if number % 3 == 0:  # the next one, too, as soon as there is one
                    kill_worker()
                go_on(writers)
        assert picture(mounted.path) == picture(program.home / "plain")
    assert os.listdir(program.home / "o/work/orphans") == []
    with program.mounted(*OPTIONS) as mounted:
        mounted.expect_log("killed by SIGKILL")
        assert picture(mounted.path) == picture(program.home / "plain")


def test_a_writable_mount_outlives_its_supervisor(program: Program) -> None:
    make_set(program)
    with program.mounted(*OPTIONS, ends_itself=True) as mounted:
        with writing(mounted) as writers:
            go_on(writers, 10)
            kill(mounted.pid)
            mounted.wait_for_exit()
            go_on(writers, 10)
            said = program.refused("diff", *OPTIONS, code=8)
            assert f"in use by workers of a mount whose daemon (process {mounted.pid}) has died" in said
            for command in (["diff"], ["commit", "--in-place"]):
                said = program.refused(*command, mounted.path, code=5)
                assert f"end it with `wdsfs umount {mounted.path}`, and mount it again" in said
        assert picture(mounted.path) == picture(program.home / "plain")
        program.run("umount", mounted.path)
    with program.mounted(*OPTIONS) as mounted:
        assert picture(mounted.path) == picture(program.home / "plain")


def test_the_unmount_of_a_killed_daemon_waits_for_its_workers(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next mount can have the overlay at once. They are stopped until somebody waits."""
    make_set(program)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(program.home / "run"))
    plainly, waits = time.sleep, 0
    with program.mounted(*OPTIONS, ends_itself=True) as mounted:
        workers = workers_of(mounted)

        def sleep(seconds: float) -> None:
            nonlocal waits
            waits += 1
            for pid in workers:
                kill(pid, signal.SIGCONT)
            plainly(seconds)

        kill(mounted.pid)
        mounted.wait_for_exit()
        for pid in workers:
            kill(pid, signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(time, "sleep", sleep)
            mount_search.require_mount(str(mounted.path)).end()
            assert waits
        with held(OverlayDirectory(program.home / "o")):
            pass


@pytest.mark.parametrize("seed", [10, 20])
def test_after_the_end_of_all_processes_everything_is_there(program: Program, seed: int) -> None:
    """All that was written, synced or not, is in the files of the upper."""
    make_set(program)
    with program.mounted(*OPTIONS, ends_itself=True) as mounted:
        with writing(mounted, seed) as writers:
            go_on(writers, 30)
        file = (mounted.path / "s0/open").open("wb", buffering=0)
        file.write(b"written")
        os.unlink(mounted.path / "s0/open")
        # The supervisor first: it would replace the others. (Numbers start again from below some time.)
        for pid in sorted(mounted.processes(), key=lambda pid: pid != mounted.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        mounted.wait_for_exit()
        with fails(107, 103), file:
            file.write(b"x")
        said = program.refused("commit", "--in-place", mounted.path, code=5)
        assert "its daemon is gone; end it with" in said
        assert f"wdsfs umount {mounted.path}" in said
        program.run("umount", mounted.path)
    with program.mounted(*OPTIONS) as mounted:
        assert picture(mounted.path) == picture(program.home / "plain")
        assert os.listdir(program.home / "o/work/orphans") == []
