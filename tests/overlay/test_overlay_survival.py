"""A writable mount whose processes are killed: nobody notices.

Writers do what programs do, and each keeps in mind what must be there; a name too many or too few, a byte that is
wrong, and any error is a finding. They go on while workers are killed at random, so that requests are cut off at
every point; the kernel hands them out again, and what has been done already must not be done twice.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Mounted, Program, descendants, fails
from tests.fuse.test_supervisor import kill, workers_of
from tests.processes import PATIENCE, wait_until
from tests.writables import shard
from wdsfs.mount import mount_search
from wdsfs.overlay.overlay_directory import OverlayDirectory, held
from wdsfs.overlay.upper_files import EXCHANGE, NOREPLACE, SystemCalls

SAMPLES = 400
KILLS = 30
WRITERS = 3


def content(name: str) -> bytes:
    return name.encode() * 100


def make_set(program: Program) -> None:
    for number in range(WRITERS):
        names = [f"{sample:03}.{ext}" for sample in range(SAMPLES) for ext in ("txt", "cls")]
        program.write(f"s{number}.tar", shard([(name, content(name)) for name in names]))


class Writer(threading.Thread):
    """Changes the directory of one shard, which is its own, and knows what must be in there.

    `files` has the content by path, `folders` the directories; only those of samples that were touched.
    """

    def __init__(self, top: Path, seed: int) -> None:
        super().__init__()
        self.top = top
        self.random = random.Random(seed)
        self.untouched = [f"{sample:03}" for sample in range(SAMPLES)]
        self.gone: set[str] = set()
        self.files: dict[str, bytes] = {}
        self.folders: set[str] = set()
        self.attributes: dict[str, bytes] = {}
        self.problems: list[str] = []
        self.done = 0
        self.stopped = False
        self._numbers = itertools.count()
        self._fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY)

    def run(self) -> None:
        actions = [
            *(self.make, self.make, self.change, self.replace, self.rename, self.exchange, self.unlink),
            *(self.mkdir, self.rmdir, self.link, self.attribute, self.touch_sample, self.drop_sample),
            *(self.rename_sample, self.hold),
        ]
        try:
            while not self.stopped:
                action = self.random.choice(actions)
                try:
                    action()
                except OSError as error:
                    self.problems.append(f"{action.__name__}: {error!r}")
                    return
                self.done += 1
        except BaseException as error:
            self.problems.append(repr(error))
            raise
        finally:
            os.close(self._fd)

    def _new_name(self) -> str:
        return f"n{next(self._numbers)}"

    def _place(self) -> str:
        folder = self.random.choice([*sorted(self.folders), ""])
        return f"{folder}/{self._new_name()}" if folder else self._new_name()

    def _some(self) -> str | None:
        return self.random.choice(sorted(self.files)) if self.files else None

    def _flagged(self, old: str, new: str, flags: int) -> None:
        SystemCalls().rename(os.fsencode(old), self._fd, os.fsencode(new), self._fd, flags)

    # --- what is done

    def make(self) -> None:
        path, data = self._place(), self.random.randbytes(self.random.randrange(20_000))
        with (self.top / path).open("xb", buffering=0) as file:
            assert file.write(data) == len(data)
        self.files[path] = data
        with contextlib.suppress(FileExistsError):
            (self.top / path).open("x").close()
            self.problems.append(f"{path} was made twice")

    def change(self) -> None:
        path = self._some()
        if path is None:
            return
        data, offset = self.random.randbytes(3000), self.random.randrange(10_000)
        fd = os.open(self.top / path, os.O_RDWR)
        try:
            os.pwrite(fd, data, offset)
            before = self.files[path].ljust(offset, b"\0")
            after = before[:offset] + data + before[offset + len(data) :]
            if self.random.random() < 0.3:
                os.ftruncate(fd, offset)
                after = after[:offset]
            if self.random.random() < 0.3:
                os.fsync(fd)
            if os.pread(fd, 1 << 16, 0) != after:
                self.problems.append(f"{path} reads back wrong")
        finally:
            os.close(fd)
        self.files[path] = after

    def replace(self) -> None:
        path = self._some()
        if path is None:
            return
        with self.random_temporary() as (temporary, data):
            os.rename(self.top / temporary, self.top / path)
        self.files[path] = data
        self.attributes.pop(path, None)

    @contextlib.contextmanager
    def random_temporary(self) -> Iterator[tuple[str, bytes]]:
        name, data = self._new_name(), self.random.randbytes(500)
        (self.top / name).write_bytes(data)
        yield name, data

    def rename(self) -> None:
        path, new = self._some(), self._place()
        if path is None:
            return
        if self.random.random() < 0.5:
            self._flagged(path, new, NOREPLACE)
        else:
            os.rename(self.top / path, self.top / new)
        self.files[new] = self.files.pop(path)
        if path in self.attributes:
            self.attributes[new] = self.attributes.pop(path)
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.top / path, self.top / "x")
            self.problems.append(f"{path} was there twice")

    def exchange(self) -> None:
        path, other = self._some(), self._some()
        if path is None or other is None or path == other:
            return
        self._flagged(path, other, EXCHANGE)
        files, own = self.files, self.attributes
        files[path], files[other] = files[other], files[path]
        first, second = own.pop(path, None), own.pop(other, None)
        own |= {name: value for name, value in ((path, second), (other, first)) if value is not None}

    def unlink(self) -> None:
        path = self._some()
        if path is None:
            return
        os.unlink(self.top / path)
        del self.files[path]
        self.attributes.pop(path, None)

    def mkdir(self) -> None:
        path = self._new_name()
        os.mkdir(self.top / path)
        self.folders.add(path)

    def rmdir(self) -> None:
        for folder in sorted(self.folders):
            if not any(path.startswith(f"{folder}/") for path in self.files):
                os.rmdir(self.top / folder)
                self.folders.remove(folder)
                if folder[0] != "n":
                    self.gone.add(folder)
                return

    def link(self) -> None:
        """Two names at once, and the old one goes."""
        path, new = self._some(), self._place()
        if path is None:
            return
        os.link(self.top / path, self.top / new)
        if os.stat(self.top / new).st_nlink != 2:
            self.problems.append(f"{path} has not two names")
        os.unlink(self.top / path)
        self.files[new] = self.files.pop(path)
        if path in self.attributes:
            self.attributes[new] = self.attributes.pop(path)

    def attribute(self) -> None:
        path = self._some()
        if path is None:
            return
        if path in self.attributes:
            if os.getxattr(self.top / path, "user.label") != self.attributes[path]:
                self.problems.append(f"{path} has another attribute")
            os.removexattr(self.top / path, "user.label")
            del self.attributes[path]
        else:
            self.attributes[path] = self.random.randbytes(10)
            os.setxattr(self.top / path, "user.label", self.attributes[path], os.XATTR_CREATE)

    def _take(self) -> str:
        key = self.untouched.pop()
        self.folders.add(key)
        for ext in ("txt", "cls"):
            self.files[f"{key}/{ext}"] = content(f"{key}.{ext}")
        return key

    def touch_sample(self) -> None:
        if self.untouched:
            key = self._take()
            with (self.top / key / "txt").open("r+b", buffering=0) as file:
                file.write(b"changed")
            self.files[f"{key}/txt"] = b"changed" + content(f"{key}.txt")[7:]
            os.unlink(self.top / key / "cls")
            del self.files[f"{key}/cls"]

    def drop_sample(self) -> None:
        if self.untouched:
            key = self.untouched.pop()
            for ext in ("txt", "cls"):
                os.unlink(self.top / key / ext)
            os.rmdir(self.top / key)
            self.gone.add(key)

    def rename_sample(self) -> None:
        if self.untouched:
            key, new = self._take(), self._new_name()
            os.rename(self.top / key, self.top / new)
            self.folders.remove(key)
            self.folders.add(new)
            self.gone.add(key)
            for ext in ("txt", "cls"):
                self.files[f"{new}/{ext}"] = self.files.pop(f"{key}/{ext}")

    def hold(self) -> None:
        """A file that has lost its name stays readable as long as it is open."""
        with self.random_temporary() as (name, data), (self.top / name).open("r+b", buffering=0) as file:
            os.unlink(self.top / name)
            for _ in range(3):
                file.seek(0)
                if file.read() != data:
                    self.problems.append(f"{name} has lost its content")
                data = data + b"more"
                file.seek(0)
                file.write(data)

    # --- afterwards

    def check(self, top: Path) -> None:
        """Exactly the expected files exist."""
        contents: dict[str, bytes] = {}
        folders = set()
        for directory, names, files in os.walk(top):
            folders |= {str(Path(directory, name).relative_to(top)) for name in names}
            contents |= {
                str(Path(directory, name).relative_to(top)): Path(directory, name).read_bytes() for name in files
            }
        rest = {f"{key}/{ext}": content(f"{key}.{ext}") for key in self.untouched for ext in ("txt", "cls")}
        expected = {**rest, **self.files}
        assert sorted(set(contents) ^ set(expected)) == []
        assert [path for path in contents if contents[path] != expected[path]] == []
        assert folders ^ (self.folders | set(self.untouched)) == set()
        assert {path: os.getxattr(top / path, "user.label") for path in self.attributes} == self.attributes


@contextlib.contextmanager
def writing(mounted: Mounted, seed: int = 0) -> Iterator[list[Writer]]:
    writers = [Writer(mounted.path / f"s{number}", seed + number) for number in range(WRITERS)]
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


OPTIONS = ("--overlay", "o", f"s{{0..{WRITERS - 1}}}.tar")


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
        for number, writer in enumerate(writers):
            writer.check(mounted.path / f"s{number}")
    assert os.listdir(program.home / "o/work/orphans") == []
    with program.mounted(*OPTIONS) as mounted:
        mounted.expect_log("killed by SIGKILL")
        for number, writer in enumerate(writers):
            writer.check(mounted.path / f"s{number}")


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
        for number, writer in enumerate(writers):
            writer.check(mounted.path / f"s{number}")
        program.run("umount", mounted.path)
    with program.mounted(*OPTIONS) as mounted:
        for number, writer in enumerate(writers):
            writer.check(mounted.path / f"s{number}")


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


# `wdsfs`, killed when the first of the shards has been replaced.
_KILLED_COMMIT = """
import os, signal
from wdsfs.cli import main as cli
from wdsfs import durable

def rename(disk, source, target):
    os.rename(source, target)
    if target.endswith(b".tar"):
        os.kill(os.getpid(), signal.SIGKILL)

durable.Disk.rename = rename
cli.main(prog_name="wdsfs")
"""


def test_a_killed_commit_of_a_mount_is_finished_by_another(program: Program) -> None:
    """Till then nobody writes; then the mount shows the new shards, and can be written and committed again."""
    make_set(program)
    with program.mounted(*OPTIONS) as mounted:
        mounted.expect_log("a commit in place was stopped half-way; to allow changes again, finish it")
        for number in range(WRITERS):
            (mounted.path / f"s{number}/000/txt").write_bytes(b"new")
        (mounted.path / "more/k").mkdir(parents=True)
        (mounted.path / "more/k/txt").write_bytes(b"added")
        finish = ["commit", "--in-place", "--jobs", "1", os.fspath(mounted.path)]
        command = [sys.executable, "-c", _KILLED_COMMIT, *finish]
        killed = subprocess.run(command, env=program.environment, cwd=program.home, timeout=PATIENCE, check=False)
        assert killed.returncode == -signal.SIGKILL
        mounted.wait_for_log("stopped half-way")
        assert (mounted.path / "s2/001/txt").read_bytes() == content("001.txt")
        with fails(errno.EBUSY):
            (mounted.path / "s1/001/txt").write_bytes(b"")
        assert "finish it with: wdsfs commit --in-place" in program.refused("diff", mounted.path, code=7)
        done = program.run(*finish)
        assert b"3 rewritten, 1 new (1 of these existed already)" in done.stdout
        assert done.stderr == b""
        assert [(mounted.path / f"s{n}/000/txt").read_bytes() for n in range(WRITERS)] == [b"new"] * WRITERS
        assert (mounted.path / f"s{WRITERS}/k/txt").read_bytes() == b"added"
        assert program.run("diff", mounted.path).stdout == b""
        (mounted.path / "s1/001/txt").write_bytes(b"and again")
        assert b"1 rewritten" in program.run(*finish).stdout


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
        for number, writer in enumerate(writers):
            writer.check(mounted.path / f"s{number}")
        assert os.listdir(program.home / "o/work/orphans") == []
