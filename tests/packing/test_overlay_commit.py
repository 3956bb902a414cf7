"""Commits of mounts: what writers and readers see of one, and of one that is killed."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Program, fails
from tests.fuse.test_supervisor import Patched
from tests.packing.overlays import keys, samples
from tests.processes import PATIENCE, Process, wait_until
from tests.writables import shard

SHARDS, SAMPLES = 3, 30
OPTIONS = ("--overlay", "o", f"s{{0..{SHARDS - 1}}}.tar")


def content(number: int, key: str, size: int = 3000) -> bytes:
    return random.Random(f"{number}{key}").randbytes(size)


@pytest.fixture
def a_set(program: Program) -> Program:
    for number in range(SHARDS):
        names = [f"{one:03}.{ext}" for one in range(SAMPLES) for ext in ("jpg", "cls")]
        program.write(f"s{number}.tar", shard([(name, content(number, name)) for name in names]))
    return program


def edit(top: Path, rename: Callable[[Path, Path], object] = os.rename) -> None:
    """Changes in the first shard and the second, and a new one."""
    (top / "s0/003/cls").write_bytes(b"7")
    shutil.rmtree(top / "s0/004")
    rename(top / "s0/005", top / "s0/renamed")
    (top / "s1/010/txt").write_bytes(b"a caption")
    (top / "more/x").mkdir(parents=True)
    (top / "more/x/jpg").write_bytes(b"new")


def check_edited(top: Path, new: str) -> None:
    assert (top / "s0/003/cls").read_bytes() == b"7"
    assert not (top / "s0/004").exists()
    assert not (top / "s0/005").exists()
    assert (top / "s0/renamed/jpg").read_bytes() == content(0, "005.jpg")
    assert (top / "s1/010/txt").read_bytes() == b"a caption"
    assert (top / new / "x/jpg").read_bytes() == b"new"
    assert (top / "s2/000/jpg").read_bytes() == content(2, "000.jpg")


def commit(program: Program, *arguments: Any, **options: Any) -> bytes:
    return program.run("commit", *arguments, **options).stdout


def test_a_shard_that_was_replaced_below_a_mount(a_set: Program) -> None:
    """Its current content is compared and committed, and a message says so."""
    with a_set.mounted(*OPTIONS) as mounted:
        mounted.allow_log("s1.tar has changed, so it is indexed again")
        (mounted.path / "s0/003/cls").write_bytes(b"7")
        a_set.write("new.tar", shard([("x.txt", b"x")])).replace(a_set.home / "s1.tar")
        text = b"was made: s1; the changes still apply"
        assert text in a_set.run("diff", mounted.path).stderr
        assert text in a_set.run("commit", "--output", "out/%d.tar", mounted.path).stderr
        wait_until(lambda: has(mounted.path / "s1", "x"), "the mount to notice")  # at the latest after a second
        assert os.listdir(mounted.path / "s1") == ["x"]


def has(directory: Path, name: str) -> bool:
    """True once a directory lists a name; while its shard is replaced it is stale."""
    with contextlib.suppress(OSError):
        return name in os.listdir(directory)
    return False


def test_what_a_mapped_file_cannot_keep(a_set: Program) -> None:
    """A commit has it written first; when that fails it says what has failed, and nothing of the daemon."""
    with a_set.mounted(*OPTIONS) as mounted:
        mounted.expect_log("s1.tar has changed since this was opened")
        mounted.allow_log("s1.tar has changed, so it is indexed again")
        path = mounted.path / "s1/000/jpg"
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            memory[:6] = b"mapped"
            a_set.write("new.tar", shard([("x.txt", b"x")])).replace(a_set.home / "s1.tar")
            wait_until(lambda: has(mounted.path / "s1", "x"), "the new shard")
            said = a_set.refused("commit", "--output", "out/%d.tar", mounted.path, code=7)
        assert f"{mounted.path}: the kernel could not write a change of a mapped file" in said
        assert "its shard was replaced meanwhile" in said
        assert not (a_set.home / "out").exists()


def test_a_commit_to_new_shards(a_set: Program) -> None:
    """Writers go on after it, and also after a `diff` and a commit that is refused."""
    changes = ["changed s0/003", "removed s0/004", "renamed s0/renamed", "changed s1/010", "added more/x"]
    with a_set.mounted(*OPTIONS) as mounted:
        edit(mounted.path)
        refused = a_set.refused("commit", mounted.path, "-o", mounted.path / "new/t-%d.tar", code=2)
        assert "new/t-0.tar would be in the mount that is committed: name another directory with" in refused
        with (mounted.path / "s0/003/cls").open("r+b", buffering=0) as file:
            commit(a_set, mounted.path, "-o", "out/t-%02d.tar")
            file.write(b"8")
        assert (mounted.path / "s0/003/cls").read_bytes() == b"8"
        found = a_set.json("diff", mounted.path)["samples"]
        assert [f"{one['kind']} {one['path']}" for one in found] == changes
        (mounted.path / "s2/000/cls").write_bytes(b"and writers go on")
    assert sorted(os.listdir(a_set.home / "out")) == [f"t-{number:02}.tar" for number in range(4)]


def test_a_commit_in_place(a_set: Program) -> None:
    """The mount shows the new shards, also further ones; what is open of others is still read."""
    with a_set.mounted(*OPTIONS) as mounted:
        top = mounted.path
        edit(top)
        with (top / "s2/000/jpg").open("rb", buffering=0) as unaffected:
            assert unaffected.read(1000) == content(2, "000.jpg")[:1000]
            done = commit(a_set, top, "--in-place")
            assert f"new: {a_set.home}/s3.tar".encode() in done
            os.posix_fadvise(unaffected.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert unaffected.read() == content(2, "000.jpg")[1000:]
        check_committed(top)
        assert not (top / "more").exists()
        assert sorted(os.listdir(top)) == ["s0", "s1", "s2", "s3"]
        assert a_set.json("diff", top)["samples"] == []
        (top / "s3/x/cls").write_bytes(b"1")  # and it goes on
        (top / "s0/renamed/cls").unlink()
        assert a_set.json("status", top)[0]["shards"] == 4
        commit(a_set, top, "--in-place")
        assert (top / "s3/x/cls").read_bytes() == b"1"
        assert os.listdir(top / "s0/renamed") == ["jpg"]
    assert [len(keys((a_set.home / f"s{n}.tar").read_bytes())[0]) for n in range(4)] == [29, 30, 30, 1]
    with a_set.mounted("--overlay", "o", "s{0..3}.tar") as mounted:
        check_edited(mounted.path, "s3")


def test_what_programs_have_left_behind_is_named_and_not_packed(a_set: Program) -> None:
    with a_set.mounted(*OPTIONS) as mounted:
        top = mounted.path
        (top / "s0/003/cls").write_bytes(b"7")
        left = [top / "s0/003" / name for name in (".cls.swp", "cls~")]
        for path in left:
            path.write_bytes(b"old")
        assert [row["path"] for row in a_set.json("diff", top)["leavings"]] == ["s0/003/.cls.swp", "s0/003/cls~"]
        commit(a_set, "-o", "out/%d.tar", "--with-leavings", top)
        report = json.loads(commit(a_set, "--in-place", "--json", top))
        assert [row["path"] for row in report["left_out"]] == ["s0/003/.cls.swp", "s0/003/cls~"]
        assert [path.read_bytes() for path in left] == [b"old"] * 2
        left[1].unlink()
        commit(a_set, "--in-place", "--with-leavings", top)
        assert sorted(os.listdir(top / "s0/003")) == [".cls.swp", "cls", "jpg"]
    assert set(samples((a_set.home / "out/0.tar").read_bytes())["003"]) == {"cls", "jpg", ".cls.swp", "cls~"}


# A daemon that is slow to admit writers again, as on a busy machine.
SLOW_THAW = """
import time
from wdsfs.overlay.mounted_overlay import MountedOverlay
original = MountedOverlay.freeze
def freeze(self, frozen):
    if not frozen:
        time.sleep(0.5)
    original(self, frozen)
MountedOverlay.freeze = freeze
"""


def test_when_a_commit_has_ended_nobody_is_refused_any_more(a_set: Program) -> None:
    a_set.__class__ = Patched
    assert isinstance(a_set, Patched)
    a_set.patch = SLOW_THAW
    with a_set.mounted(*OPTIONS) as mounted:
        edit(mounted.path)
        commit(a_set, mounted.path, "-o", "out/t-%02d.tar")
        (mounted.path / "s2/000/new").touch()
        commit(a_set, mounted.path, "--in-place")
        (mounted.path / "s2/000/new").write_bytes(b"written")
        commit(a_set, mounted.path, "--in-place")


# A commit that waits in front of a rename to NAME, having made the file "waits", until "go" is there.
SLOW = """
import os, time
from wdsfs import durable
original = durable.Disk.rename
def rename(self, source, target):
    if target.endswith(b"NAME"):
        open("waits", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.001)
    return original(self, source, target)
durable.Disk.rename = rename
from wdsfs.cli.main import main
main(prog_name="wdsfs")
"""


class Commit:
    """A commit in place of a mount that has stopped in front of a rename to this name."""

    def __init__(self, program: Program, path: Path, name: str = "s1.tar") -> None:
        self.program, code = program, SLOW.replace("NAME", name)
        command = [*program.command()[:1], "-c", code, "commit", "--in-place", "--jobs", "1", path]
        self.process = Process(
            command, env=program.environment, cwd=program.home, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        wait_until(lambda: (program.home / "waits").exists() or self.process.poll() is not None, "the commit")
        assert self.process.poll() is None, self.process.communicate()

    def finish(self) -> None:
        (self.program.home / "go").touch()
        assert self.process.communicate(timeout=PATIENCE)[1] == b""
        assert self.process.returncode == 0

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=PATIENCE)


def kill_half_way(program: Program, mounted: Any) -> None:
    """Edit a mount, and kill its commit in place when one shard of three is replaced."""
    mounted.expect_log("a commit in place was stopped half-way")
    mounted.allow_log("has changed")
    edit(mounted.path)
    Commit(program, mounted.path).kill()
    mounted.wait_for_log("a commit in place was stopped half-way")


def check_committed(top: Path) -> None:
    wait_until(lambda: (top / "s3").is_dir(), "the new shard")
    check_edited(top, "s3")


@pytest.fixture
def stop() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def opened_again(path: Path) -> bytes:
    """Return the content of a file; it is stale if its shard was just replaced, or the overlay emptied."""
    for _ in range(2):
        try:
            return path.read_bytes()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return path.read_bytes()


def test_meanwhile_nobody_writes_and_everybody_reads(a_set: Program, stop: threading.Event) -> None:
    problems: list[str] = []

    def read(top: Path) -> None:
        while not stop.is_set():
            for one in range(0, SAMPLES, 3):
                try:
                    if opened_again(top / f"s2/{one:03}/jpg") != content(2, f"{one:03}.jpg"):
                        problems.append(f"wrong bytes in {one}")
                    with (top / f"s2/{one:03}/jpg").open("rb") as file:
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    assert opened_again(top / "s0/003/cls") == b"7"
                except (OSError, AssertionError) as error:
                    problems.append(repr(error))

    with a_set.mounted(*OPTIONS) as mounted:
        mounted.allow_log("has changed")  # a shard, which some read may notice before the mount is notified
        top = mounted.path
        edit(top)
        reader = threading.Thread(target=read, args=(top,))
        reader.start()
        with (top / "s1/010/txt").open("r+b", buffering=0) as held:
            running = Commit(a_set, top)
            for action in (
                lambda: held.write(b"x"),
                lambda: (top / "s2/000/new").touch(),
                lambda: (top / "s2/000/jpg").write_bytes(b""),
                lambda: (top / "s2/000/jpg").unlink(),
                lambda: os.rename(top / "s2/000", top / "s2/x"),
                lambda: (top / "new").mkdir(),
                lambda: os.utime(top / "s2/000/jpg"),
                lambda: os.setxattr(top / "s2/000/jpg", "user.x", b""),
            ):
                with fails(errno.EBUSY):
                    action()
            assert held.read() == b"a caption"
            assert "is already being committed" in a_set.refused("commit", "--in-place", top, code=8)
            running.finish()
        check_committed(top)
        (top / "s2/000/new").touch()
        stop.set()
        reader.join()
    assert problems == []


def test_a_commit_that_is_killed_is_finished_by_the_next(a_set: Program) -> None:
    """Also when shards were touched, and with the names of what it leaves out."""
    with a_set.mounted(*OPTIONS) as mounted:
        top = mounted.path
        (top / "s0/003/cls~").write_bytes(b"old")
        kill_half_way(a_set, mounted)
        with fails(errno.EBUSY):
            (top / "new").mkdir()
        assert (top / "s2/000/jpg").read_bytes() == content(2, "000.jpg")
        assert "stopped half-way" in a_set.refused("diff", top, code=7)
        os.utime(a_set.home / "s1.tar")
        (a_set.home / "s0.tar").chmod(0o640)
        assert commit(a_set, "--in-place", top).startswith(b"left out: s0/003/cls~: looks like")
        check_committed(top)
        (top / "s1/010/cls").write_bytes(b"again")
        assert b"1 rewritten" in commit(a_set, "--in-place", top)
        assert (top / "s1/010/cls").read_bytes() == b"again"


def test_a_commit_that_cannot_be_finished_is_abandoned(a_set: Program) -> None:
    """The mount goes on: it shows the replaced shards, and over the others what was changed in them."""
    with a_set.mounted(*OPTIONS) as mounted:
        top = mounted.path
        kill_half_way(a_set, mounted)
        a_set.write("s1.tar", shard([("010.jpg", b"other"), ("new.jpg", b"other")]))
        for command in (["diff"], ["commit", "--in-place"]):
            assert "--abandon" in a_set.refused(*command, top, code=7)
        with fails(errno.EBUSY):
            (top / "s2/000/cls").write_bytes(b"")
        assert b"abandoned: 1 of 3 shards written" in commit(a_set, "--abandon", top)
        wait_until(lambda: _can_write(top), "the thaw")
        (top / "new").rmdir()
        changes = a_set.json("diff", top)["samples"]
        assert [(row["kind"], row["path"]) for row in changes] == [("changed", "s1/010"), ("added", "more/x")]
        assert (top / "s0/003/cls").read_bytes() == b"7"
        assert sorted(os.listdir(top / "s1")) == ["010", "new"]
        commit(a_set, "--in-place", top)
        wait_until(lambda: (top / "s3").is_dir(), "the new shard")
        assert (top / "s1/010/txt").read_bytes() == b"a caption"
        assert (top / "s1/010/jpg").read_bytes() == b"other"
        assert (top / "s3/x/jpg").read_bytes() == b"new"


@pytest.mark.parametrize("step", ["sync_directory", "remove"])
def test_a_commit_that_is_killed_while_it_empties_the_overlay(a_set: Program, step: str) -> None:
    """All shards are there. What is written afterwards must not go where nobody looks any more."""
    patch = f"""
import os, signal
from wdsfs.durable import Disk
original = Disk.{step}
def killed(self, path):
    if os.path.exists({str(a_set.home / "o/work/committed")!r}):
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, path)
Disk.{step} = killed
from wdsfs.cli.main import main
main(prog_name="wdsfs")
"""
    with a_set.mounted(*OPTIONS) as mounted:
        mounted.expect_log("a commit in place was stopped half-way")
        mounted.allow_log("has changed")
        top = mounted.path
        edit(top)
        command = [*a_set.command()[:1], "-c", patch, "commit", "--in-place", top]
        assert subprocess.run(command, env=a_set.environment, cwd=a_set.home, check=False).returncode == -9
        mounted.wait_for_log("a commit in place was stopped half-way")
        with fails(errno.EBUSY):
            (top / "s0/000/new").touch()
        assert (top / "s0/003/cls").read_bytes() == b"7"
        commit(a_set, "--in-place", top)
        check_committed(top)
        wait_until(lambda: _can_write(top), "the thaw")
    assert os.listdir(a_set.home / "o/upper") == ["new"]


def test_a_commit_that_is_killed_before_it_has_begun_changes_nothing(a_set: Program) -> None:
    with a_set.mounted(*OPTIONS) as mounted:
        top = mounted.path
        edit(top)
        running = Commit(a_set, top, "commit.json")
        with fails(errno.EBUSY):
            (top / "new").mkdir()
        running.kill()
        wait_until(lambda: _can_write(top), "the thaw")
        (top / "new").rmdir()
        check_edited(top, "more")
        commit(a_set, "--in-place", top)
        check_committed(top)


def _can_write(top: Path) -> bool:
    try:
        (top / "new").mkdir()
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


def test_after_the_end_of_all_a_killed_commit_is_finished_without_a_mount(a_set: Program) -> None:
    with a_set.mounted(*OPTIONS, ends_itself=True) as mounted:
        mounted.allow_log("stopped half-way")
        edit(mounted.path)
        running = Commit(a_set, mounted.path)
        # The supervisor first: it would replace the others. (Numbers start again from below some time.)
        for pid in sorted(mounted.processes(), key=lambda pid: pid != mounted.pid):
            with contextlib.suppress(ProcessLookupError):  # one that has seen the end of the supervisor
                os.kill(pid, signal.SIGKILL)
        running.kill()
        mounted.wait_for_exit()
        a_set.run("umount", mounted.path)
    assert "commit" in a_set.refused("mount", "-q", *OPTIONS, a_set.mountpoint, code=8)
    commit(a_set, "--in-place", *OPTIONS)
    with a_set.mounted("--overlay", "o", "s{0..3}.tar") as mounted:
        check_edited(mounted.path, "s3")
