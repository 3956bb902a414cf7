"""Guards that take over what a killed one has left, and what is said of shards that were replaced meanwhile."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import tars
from tests.conftest import Program
from tests.kernel.mounts import (
    KERNEL,
    end_mount,
    is_mounted,
    kill,
    mount,
    the_guard,
    wait_for_the_end,
)
from tests.processes import PATIENCE, Process, wait_until
from wdsfs import mount_table
from wdsfs.kernel import erofs_mount
from wdsfs.kernel.guard import Guarded, guard_of
from wdsfs.mount_registry import forget

SIZE = 1 << 20


def shard(letter: bytes) -> bytes:
    return tars.tar(tars.member(b"a.x", letter * SIZE), tars.member(b"b.x", b"b"))


@pytest.fixture
def mounts(program: Program) -> Program:
    """A directory `set` with two shards."""
    program.write("set/s0.tar", shard(b"o"))
    program.write("set/s1.tar", shard(b"p"))
    return program


def mount_set(program: Program, *options: str) -> Guarded:
    """Mount the directory, by a relative path; the guard of it."""
    return mount(program, *options, "set")


def replace(program: Program, name: str, letter: bytes) -> None:
    program.write("new", shard(letter)).rename(program.home / "set" / name)


def shown(program: Program) -> bytes:
    return (program.mountpoint / "s0" / "a" / "x").read_bytes()


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


def test_a_refresh_says_what_to_do_instead(mounts: Program) -> None:
    """Of a set, and of an image that is named; the mount keeps the old file, whole."""
    image = mounts.home / "set.erofs"
    mounts.run("image", "set", "-o", image)
    for words in (["--engine", "kernel", "set"], [image]):
        mounts.run("mount", "-q", *words, mounts.mountpoint)
        before = shown(mounts)
        replace(mounts, "s0.tar", b"n")
        assert f"wdsfs umount {mounts.mountpoint}" in mounts.refused("refresh", mounts.mountpoint, code=5)
        assert shown(mounts) == before
        mounts.run("umount", mounts.mountpoint)
        mounts.run("image", "set", "-o", image)


def test_a_commit_in_place_below_a_mount(mounts: Program) -> None:
    """The mount keeps the old shards, whole, and says so; the next one shows the new ones."""
    mount_set(mounts)
    with (mounts.mountpoint / "s0" / "a" / "x").open("rb", buffering=0) as opened:
        with mounts.mounted("--overlay", "edits", "set", at=mounts.directory("writable")) as writable:
            (writable.path / "s0" / "a" / "x").write_bytes(b"n")
            mounts.run("commit", "-q", "--in-place", writable.path)
        assert shown(mounts) == opened.read() == b"o" * SIZE
    [report] = mounts.json("status", mounts.mountpoint)
    assert report["replaced"] == [str(mounts.home / "set" / "s0.tar")]
    mounts.run("umount", mounts.mountpoint)
    mount_set(mounts)
    assert shown(mounts) == b"n"


def test_an_image_stays_in_the_cache_while_it_is_mounted(mounts: Program) -> None:
    """Commands read it."""
    image = Path(mount_set(mounts).image)
    mounts.run("cache", "--clear")
    assert mounts.json("where", mounts.mountpoint / "s1" / "b" / "x")[0]["key"] == "b"
    mounts.run("umount", mounts.mountpoint)
    mounts.run("cache", "--clear")
    assert not image.exists()


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
def test_shards_changed_without_a_guard_are_not_guarded(in_place: bool, mounts: Program) -> None:
    """What may be a mix gives way to the set as it is now; what was replaced is whole, and stays."""
    kill(mount_set(mounts))
    if in_place:
        (mounts.home / "set" / "s0.tar").write_bytes(shard(b"n"))
        said = mounts.run(*KERNEL, "set", mounts.mountpoint).stderr.decode()
        assert "unmounted, because files that it reads were written while it had no guard" in said
    else:
        replace(mounts, "s0.tar", b"n")
        message = mounts.refused(*KERNEL, "set", mounts.mountpoint, code=3)
        assert f"wdsfs umount {mounts.mountpoint}" in message
        assert shown(mounts) == b"o" * SIZE
        mounts.run("umount", mounts.mountpoint)
        mount_set(mounts)
    assert shown(mounts) == b"n" * SIZE


def test_an_image_over_shards_changed_without_a_guard_is_refused(mounts: Program) -> None:
    """It cannot be guarded. What may be a mix is ended; what was replaced is whole, and stays."""
    image = mounts.home / "set.erofs"
    mounts.run("image", "set", "-o", image)
    mounts.run("mount", image, mounts.mountpoint)
    kill(the_guard(mounts))
    replace(mounts, "s0.tar", b"n")
    assert "make the image again" in mounts.refused("mount", image, mounts.mountpoint, code=3)
    assert shown(mounts) == b"o" * SIZE
    (mounts.home / "set" / "s1.tar").write_bytes(shard(b"z"))
    done = mounts.run("mount", image, mounts.mountpoint, code=3)
    assert "unmounted, because files that it reads were written while it had no guard" in done.stderr.decode()
    assert not is_mounted(mounts)


def test_a_mount_by_mount_8_gets_a_guard(mounts: Program) -> None:
    """It ends with the mount, also while there are other ones of which it knows nothing. Before, `where` works."""
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
        (found,) = mounts.json("where", mounts.mountpoint / "s0" / "a" / "x")
        assert [found[name] for name in ("shard", "member", "key", "offset")] == [str(one), "a.x", "a", 512]
        mounts.run("mount", image, mounts.mountpoint)
        assert the_guard(mounts).leased == 1
        mounts.run("umount", mounts.mountpoint)
        end_mount(mounts.mountpoint)  # which waits for the guard
        assert mount_table.mounted_at(other) is not None
    finally:
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
    assert shown(mounts) == b"o" * SIZE
    shutil.rmtree(mounts.home / "set")
    assert shown(mounts) == b"o" * SIZE
