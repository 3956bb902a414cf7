"""`wdsfs refresh` of a mount that the kernel serves, and guards that take over what a killed one has left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import tars
from tests.conftest import Program
from tests.kernel.mounts import end_mount, is_mounted, kill, mount, need_erofs, the_guard, wait_for_the_end
from tests.processes import PATIENCE, Process, wait_until
from wdsfs import mount_table
from wdsfs.cli.process import may_have_secrets
from wdsfs.kernel import erofs_mount
from wdsfs.kernel.guard import Guarded, guard_of
from wdsfs.mount_registry import forget

SIZE = 1 << 20


def shard(letter: bytes) -> bytes:
    return tars.tar(tars.member(b"a.x", letter * SIZE), tars.member(b"b.x", b"b"))


@pytest.fixture
def mounts(program: Program) -> Iterator[Program]:
    """A directory `set` with two shards."""
    need_erofs()
    program.write("set/s0.tar", shard(b"o"))
    program.write("set/s1.tar", shard(b"p"))
    try:
        yield program
    finally:
        end_mount(program.mountpoint)


def mount_set(program: Program, *options: str) -> Guarded:
    """Mount the directory, by a relative path; the guard of it."""
    return mount(program, *options, "set")


def replace(program: Program, name: str, letter: bytes) -> None:
    program.write("new", shard(letter)).rename(program.home / "set" / name)


def leases(found: Guarded) -> int:
    """How many files a guard holds."""
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return sum((lock[1], lock[4]) == ("LEASE", str(found.pid)) for lock in locks)


READ = """
import sys
seen = set()
while len(seen) < 2:
    found = set(open(sys.argv[1], "rb").read())
    assert len(found) == 1, found
    seen |= found
    print(sorted(seen), flush=True)
"""


@contextmanager
def reader(file: Path) -> Iterator[subprocess.Popen[str]]:
    """Reads a file again and again until its content is another one; fails if it is not there, or is a mix."""
    with Process([sys.executable, "-c", READ, file], stdout=subprocess.PIPE, text=True) as found:
        assert found.stdout is not None
        assert found.stdout.readline() == "[111]\n"
        yield found


def test_readers_find_the_old_or_the_new_content(mounts: Program) -> None:
    """At no moment is there nothing; what is open keeps the old content; then the old mount is let go."""
    first = mount_set(mounts)
    file = mounts.mountpoint / "s0" / "a" / "x"
    with reader(file) as reading, file.open("rb", buffering=0) as opened:
        assert opened.read(10) == b"o" * 10
        replace(mounts, "s0.tar", b"n")
        shown = mounts.run("status", mounts.mountpoint).stdout.decode()
        assert f"the old content is shown until: wdsfs refresh {mounts.mountpoint}" in shown
        answer = mounts.json("refresh", mounts.mountpoint)
        assert answer["replaced"] == [str(mounts.home / "set" / "s0.tar")]
        assert reading.wait(PATIENCE) == 0
        assert file.read_bytes() == b"n" * SIZE
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert opened.read() == b"o" * (SIZE - 10)
        assert leases(first) == 6  # of the image and two shards for each mount
    wait_until(lambda: leases(first) == 3, "the old mount to be let go")
    assert the_guard(mounts).pid == first.pid
    assert "replaced" not in mounts.run("status", mounts.mountpoint).stdout.decode()
    mounts.run("umount", mounts.mountpoint)
    wait_until(lambda: not first.alive, "the guard to end")
    assert not mounts.mountpoint.joinpath("s0").exists()


def test_another_file_of_the_same_size_and_time(mounts: Program) -> None:
    mount_set(mounts)
    times = (mounts.home / "set" / "s0.tar").stat()
    replace(mounts, "s0.tar", b"n")
    os.utime(mounts.home / "set" / "s0.tar", ns=(times.st_atime_ns, times.st_mtime_ns))  # as `cp -p`
    mounts.run("refresh", mounts.mountpoint)
    assert (mounts.mountpoint / "s0" / "a" / "x").read_bytes() == b"n" * SIZE


def test_shards_that_come_and_go(mounts: Program) -> None:
    mount_set(mounts)
    assert mounts.run("refresh", mounts.mountpoint).stdout == b"2 shards: 0 added, 0 removed\n"
    mounts.write("set/s2.tar", shard(b"q"))
    (mounts.home / "set" / "s0.tar").unlink()
    lines = mounts.run("refresh", mounts.mountpoint).stdout.decode().splitlines()
    assert lines == [
        f"+ s2  {mounts.home}/set/s2.tar",
        f"- s0  {mounts.home}/set/s0.tar",
        "2 shards: 1 added, 1 removed",
    ]
    assert sorted(os.listdir(mounts.mountpoint)) == ["s1", "s2"]


def test_after_a_refresh_writers_wait_all_the_same(mounts: Program) -> None:
    """For readers of the old mount, too."""
    mount_set(mounts)
    replace(mounts, "s0.tar", b"n")
    with (mounts.mountpoint / "s1" / "a" / "x").open("rb", buffering=0) as opened:
        mounts.run("refresh", mounts.mountpoint)
        code = "import os, sys; os.pwrite(os.open(sys.argv[1], os.O_WRONLY), b'z' * 3000, 512)"
        with Process([sys.executable, "-c", code, mounts.home / "set" / "s1.tar"]) as writer:
            wait_for_the_end(mounts)
            assert opened.read() == b"p" * SIZE
            assert writer.poll() is None
            opened.close()
            assert writer.wait(PATIENCE) == 0


def test_who_writes_an_old_shard_waits_for_its_readers(mounts: Program) -> None:
    """By another name of it; the mount, which shows the new shard, goes on."""
    first, old = mount_set(mounts), mounts.home / "old"
    os.link(mounts.home / "set" / "s0.tar", old)
    with (mounts.mountpoint / "s0" / "a" / "x").open("rb", buffering=0) as opened:
        replace(mounts, "s0.tar", b"n")
        mounts.run("refresh", mounts.mountpoint)
        code = "import os, sys; os.truncate(sys.argv[1], 512)"
        with Process([sys.executable, "-c", code, old]) as writer:
            assert opened.read() == b"o" * SIZE
            opened.close()
            assert writer.wait(PATIENCE) == 0
    assert (mounts.mountpoint / "s0" / "a" / "x").read_bytes() == b"n" * SIZE
    assert the_guard(mounts).pid == first.pid


def test_shards_are_named_by_their_whole_paths(mounts: Program) -> None:
    """Also when nothing is left of the guard that had them open."""
    paths = [str(mounts.home / "set" / name) for name in ("s0.tar", "s1.tar")]
    found = mount_set(mounts)

    def check() -> None:
        assert mounts.json("status", mounts.mountpoint)[0]["files"] == paths
        assert f"shards   {paths[0]}, {paths[1]}" in mounts.run("status", mounts.mountpoint).stdout.decode()
        assert mounts.json("where", mounts.mountpoint / "s1" / "b" / "x")[0]["shard"] == paths[1]

    check()
    kill(found)
    check()
    forget(found)
    check()


def test_a_refused_refresh_leaves_the_mount_and_says_why(mounts: Program) -> None:
    """Then the mount goes on as it is, and the message says what to do."""
    image, source = mounts.home / "set.erofs", mounts.home / "set"
    mounts.run("image", source, "-o", image)
    mounts.run("mount", image, mounts.mountpoint)
    of_the_user = mounts.write("set.erofs.before", b"mine")
    replace(mounts, "s0.tar", b"n")
    message = mounts.refused("refresh", mounts.mountpoint, code=5)
    assert "is older than" in message
    assert "make it again with `wdsfs image`, then repeat this" in message
    mounts.run("image", source, "-o", image)
    with (source / "s0.tar").open("r+b"):
        message = mounts.refused("refresh", mounts.mountpoint, code=5)
        assert "s0.tar: a program has it open for writing; the mount is unchanged" in message
    assert (mounts.mountpoint / "s0" / "a" / "x").read_bytes() == b"o" * SIZE
    mounts.run("refresh", mounts.mountpoint)
    assert (mounts.mountpoint / "s0" / "a" / "x").read_bytes() == b"n" * SIZE
    assert of_the_user.read_bytes() == b"mine"
    kill(the_guard(mounts))
    assert "has no guard, which a refresh needs" in mounts.refused("refresh", mounts.mountpoint, code=5)


def test_a_refresh_that_fails_leaves_the_image(mounts: Program) -> None:
    """It is the one that is mounted: commands read it. A refresh to another set never touches it."""
    image = Path(mount_set(mounts).image)
    before, inode = image.read_bytes(), image.stat().st_ino
    replace(mounts, "s1.tar", b"n")
    with (mounts.home / "set" / "s1.tar").open("r+b"):
        assert "has it open for writing" in mounts.refused("refresh", mounts.mountpoint, code=5)
    assert (image.read_bytes(), image.stat().st_ino) == (before, inode)
    mounts.run("refresh", mounts.mountpoint)
    assert the_guard(mounts).image != str(image)
    mounts.run("cache", "--clear")
    assert list(image.parent.glob("*.erofs")) == [Path(the_guard(mounts).image)]  # held while it is mounted


@pytest.mark.parametrize(
    ("arguments", "secret"),
    [
        (["--associate", "https://me:word@host/labels.csv", "set", "m"], True),
        (["--store-option", "aws_secret_access_key=x", "set", "m"], True),
        (["--layout", "files", "a?.tar", "m"], False),
    ],
)
def test_secrets_are_not_kept(arguments: list[str], secret: bool) -> None:
    assert may_have_secrets(arguments) is secret


# --- a guard that was killed -------------------------------------------------------------------------------


def test_a_mount_whose_guard_was_killed_is_guarded_again(mounts: Program) -> None:
    """By the same command, while it is read; then writers wait again."""
    first = mount_set(mounts)
    before = mount_table.mounted_at(mounts.mountpoint)
    assert "is mounted there already" in mounts.refused("mount", "set", mounts.mountpoint, code=5)
    finding = mounts.json("doctor", mounts.mountpoint)[-1]
    assert (finding["level"], f"process {first.pid}" in finding["detail"]) == ("ok", True)
    kill(first)
    assert mounts.json("doctor", mounts.mountpoint)[-1]["level"] == "warn"
    assert b"repeat its mount command" in mounts.run("status", mounts.mountpoint).stdout
    with (mounts.mountpoint / "s0" / "a" / "x").open("rb", buffering=0) as opened:
        second = mount_set(mounts)
        assert second.pid != first.pid
        assert second.leased == 2
        assert mount_table.mounted_at(mounts.mountpoint) == before
        code = "import os, sys; os.truncate(sys.argv[1], 512)"
        with Process([sys.executable, "-c", code, mounts.home / "set" / "s0.tar"]) as writer:
            wait_for_the_end(mounts)
            assert opened.read() == b"o" * SIZE
            opened.close()
            assert writer.wait(PATIENCE) == 0


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "replaced"])
def test_shards_changed_without_a_guard_are_shown_by_the_next_mount(in_place: bool, mounts: Program) -> None:
    """The set as it is now takes the place of what was mounted, without a moment of nothing."""
    kill(mount_set(mounts))
    if in_place:
        (mounts.home / "set" / "s0.tar").write_bytes(shard(b"n"))
    else:
        replace(mounts, "s0.tar", b"n")
    mount_set(mounts)
    assert (mounts.mountpoint / "s0" / "a" / "x").read_bytes() == b"n" * SIZE
    assert sum(one.path == os.fsencode(mounts.mountpoint) for one in mount_table.mounts()) == 1


def test_an_image_over_shards_changed_without_a_guard_is_refused(mounts: Program) -> None:
    """It cannot be guarded. What may be a mix is ended; what was replaced is whole, and stays."""
    image = mounts.home / "set.erofs"
    mounts.run("image", "set", "-o", image)
    mounts.run("mount", image, mounts.mountpoint)
    kill(the_guard(mounts))
    replace(mounts, "s0.tar", b"n")
    assert "make the image again" in mounts.refused("mount", image, mounts.mountpoint, code=3)
    assert (mounts.mountpoint / "s0" / "a" / "x").read_bytes() == b"o" * SIZE
    (mounts.home / "set" / "s1.tar").write_bytes(shard(b"z"))
    done = mounts.run("mount", image, mounts.mountpoint, code=3)
    assert "unmounted, because files that it reads were written while it had no guard" in done.stderr.decode()
    assert not is_mounted(mounts)


def test_a_mount_by_mount_8_gets_a_guard(mounts: Program) -> None:
    """It ends with the mount, also while there are other ones of which it knows nothing."""
    image, one = mounts.home / "set.erofs", mounts.home / "set" / "s0.tar"
    mounts.run("image", one, "-o", image)
    other = mounts.directory("other")
    with one.open("rb") as file:
        erofs_mount.mount_image(str(image), str(other), [file.fileno()], 0)
    losetup = ["losetup", "--find", "--show", "--read-only", str(one)]
    loop = subprocess.run(losetup, check=True, capture_output=True, text=True).stdout.strip()
    try:
        options = f"loop,ro,device={loop}"
        subprocess.run(["mount", "-t", "erofs", "-o", options, image, mounts.mountpoint], check=True)
        mounts.run("mount", image, mounts.mountpoint)
        assert the_guard(mounts).leased == 1
        mounts.run("umount", mounts.mountpoint)
        end_mount(mounts.mountpoint)  # which waits for the guard
        assert mount_table.mounted_at(other) is not None
    finally:
        end_mount(other)
        end_mount(mounts.mountpoint)
        subprocess.run(["losetup", "--detach", loop], check=True)


def test_in_the_foreground_as_a_unit_has_it(mounts: Program) -> None:
    """What systemd restarts after a kill adopts the mount and says that it is ready."""
    words: tuple[Any, ...] = ("mount", "--foreground", "-q", "--engine", "kernel", "set", mounts.mountpoint)
    for _ in range(2):
        with mounts.start(*words, stderr=subprocess.DEVNULL) as process:
            wait_until(lambda: (found := guard_of(str(mounts.mountpoint))) and found.alive, "the guard")
            kill(the_guard(mounts))
            process.wait(PATIENCE)
    assert (mounts.mountpoint / "s0" / "a" / "x").read_bytes() == b"o" * SIZE
    shutil.rmtree(mounts.home / "set")
    assert (mounts.mountpoint / "s0" / "a" / "x").read_bytes() == b"o" * SIZE
