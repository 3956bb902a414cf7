"""`wdsfs view MOUNT` of what the kernel serves: what the mount shows, and never what has taken its place since.

Most tests of `test_mounts.py` and `test_edits.py` are also for these mounts.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tars
from tests.conftest import Program, User, open_the_way, program_of
from tests.kernel.mounts import end_mount, need_erofs
from tests.pages.viewing import viewing
from tests.processes import wait_until
from wdsfs.kernel import manifest
from wdsfs.kernel.guard import guard_of

ALL = ["t-0/a", "t-0/b", "t-1/a", "t-1/b"]


def shard(letter: bytes) -> bytes:
    """Two samples; files of all shards have one size."""
    keys = (b"a", b"b")
    return tars.tar(*(tars.member(key + b"." + name, letter * 3) for key in keys for name in (b"txt", b"cls")))


@pytest.fixture
def mounts(program: Program) -> Iterator[Program]:
    """A directory `set` with two shards."""
    need_erofs()
    for number in range(2):
        program.write(f"set/t-{number}.tar", shard(b"o"))
    try:
        yield program
    finally:
        end_mount(program.mountpoint)


def mount(program: Program, *words: str | Path) -> None:
    program.run("mount", "-q", "--engine", "kernel", *words, program.mountpoint)


def put(program: Program, name: str, content: bytes) -> None:
    """As rsync does: another file takes the name."""
    program.write("new", content).rename(program.home / name)


@pytest.mark.parametrize("begun", ["before", "after"])
def test_a_shard_that_was_replaced_is_not_shown_in_the_place_of_the_old_one(mounts: Program, begun: str) -> None:
    mount(mounts, "set")
    times = os.stat(mounts.home / "set/t-0.tar")
    if begun == "after":
        put(mounts, "set/t-0.tar", shard(b"n"))
        os.utime(mounts.home / "set/t-0.tar", ns=(times.st_atime_ns, times.st_mtime_ns))  # as `cp -p`
    with viewing(mounts, mounts.mountpoint) as viewer:
        if begun == "before":
            assert viewer.ask("/file/t-0/a/txt").body == b"ooo"
            put(mounts, "set/t-0.tar", shard(b"n"))
        wait_until(lambda: viewer.paths() == ALL[2:], "the shard to be left out")
        assert (mounts.mountpoint / "t-0/a/txt").read_bytes() == b"ooo"
        answer = viewer.ask("/file/t-0/a/txt")
        assert (answer.status, b"nnn" in answer.body) == (502, False)
        assert viewer.ask("/file/t-1/a/txt").body == b"ooo"
        wait_until(lambda: f"wdsfs umount {mounts.mountpoint}" in viewer.ask("/plots").text, "the word")
        assert f"{mounts.home}/set/t-0.tar" in viewer.ask("/problems").text
        (mounts.home / "set/t-1.tar").unlink()
        wait_until(lambda: viewer.paths() == [], "the removed shard to be left out, too")


def test_a_removed_shard_is_one_that_the_page_cannot_show(mounts: Program) -> None:
    mount(mounts, "set")
    (mounts.home / "set/t-1.tar").unlink()
    with viewing(mounts, mounts.mountpoint) as viewer:
        assert viewer.paths() == ALL[:2]
        assert f"since they were mounted: {mounts.home}/set/t-1.tar" in viewer.ask("/").text


def test_labels_are_those_of_the_mount(mounts: Program) -> None:
    """The image has the old ones, wherever the file with them has gone to."""
    mounts.write("labels.csv", b"key,mood\na,good\nb,bad\n")
    mount(mounts, "--associate", "labels.csv", "set")
    elsewhere = mounts.directory("elsewhere")
    with viewing(mounts, mounts.mountpoint, cwd=elsewhere) as viewer:
        assert viewer.paths("?column=mood&value=bad") == ["t-0/b", "t-1/b"]
        put(mounts, "labels.csv", b"key,mood\na,sad!\nb,bad\n")
        wait_until(lambda: "wdsfs umount" in viewer.ask("/").text, "the word")
        assert b"sad!" not in viewer.ask("/file/t-0/a/mood").body
        refused = mounts.refused("view", mounts.mountpoint, code=3)
        assert f"{mounts.home}/labels.csv: was replaced" in refused
        assert (mounts.mountpoint / "t-0/a/mood").read_bytes() == b"good"


def test_an_image_that_was_carried_elsewhere(mounts: Program) -> None:
    """With names beside it that are relative, and without the index, the guard and the shards of its maker."""
    home = mounts.home
    mounts.write("labels.csv", b"key,mood\na,good\nb,bad\n")
    for number in range(2):
        mounts.write(f"more/t-{number}.tar", tars.tar(tars.member(b"a.more", b"m"), tars.member(b"b.more", b"m")))
    options = ("--associate", "labels.csv", "--join", "more/t-{0..1}.tar", "--names", "full")
    mounts.run("image", "-q", *options, "set", "-o", "set.erofs", "--base", home)
    there = mounts.directory("there")
    for name in ("set", "more", "labels.csv", "set.erofs", "index"):
        (home / name).rename(there / name)
    shutil.rmtree(there / "index")
    mounts.run("mount", "-q", there / "set.erofs", mounts.mountpoint)
    with viewing(mounts, mounts.mountpoint) as viewer:
        assert viewer.paths() == ALL
        for name in ("txt", "more", "mood"):
            expected = (mounts.mountpoint / f"t-1/b/b.{name}").read_bytes()
            assert viewer.ask(f"/file/t-1/b/b.{name}").body == expected


def test_copies_with_other_times(mounts: Program) -> None:
    mounts.run("image", "-q", "set", "-o", "set/set.erofs")
    for number in range(2):
        os.utime(mounts.home / f"set/t-{number}.tar", (1, 1))
    mounts.run("mount", "-q", "--trust-shards", "set/set.erofs", mounts.mountpoint)
    with viewing(mounts, mounts.mountpoint) as viewer:
        assert viewer.paths() == ALL
    guard = guard_of(str(mounts.mountpoint))
    assert guard is not None
    os.kill(guard.pid, 9)
    wait_until(lambda: not guard.alive, "the guard to die")
    with viewing(mounts, mounts.mountpoint) as viewer:
        assert viewer.ask("/file/t-1/b/txt").body == b"ooo"


def test_an_image_of_another_version(mounts: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts.run("image", "-q", "set", "-o", "set/set.erofs")
    image = mounts.home / "set/set.erofs"
    own = manifest.read_manifest(str(image))
    blocks = image.read_bytes().removesuffix(own.encoded())
    monkeypatch.setattr(manifest, "IMAGE", manifest.IMAGE._replace(reads=(2,)))
    image.write_bytes(blocks + own.encoded())
    assert "is an image of version 2, by another wdsfs" in mounts.refused(
        "mount", "-q", image, mounts.mountpoint, code=5
    )


def test_another_mount_at_the_same_place_is_not_shown(mounts: Program) -> None:
    mount(mounts, "set")
    with viewing(mounts, mounts.mountpoint) as viewer:
        mounts.run("umount", mounts.mountpoint)
        wait_until(lambda: "the mount has ended" in viewer.ask("/").text, "the word")
        mount(mounts, "--layout", "files", "set")
        wait_until(lambda: "another mount has taken its place" in viewer.ask("/").text, "the word")
        assert viewer.paths() == ALL


def test_another_user_sees_what_this_user_may_read(mounts: Program) -> None:
    mounts.run("image", "-q", "set", "-o", "set/set.erofs")
    mounts.run("mount", "-q", "set/set.erofs", mounts.mountpoint)
    open_the_way(mounts.home)
    with program_of(User(65534, 65534)) as other:
        with viewing(other, mounts.mountpoint) as viewer:
            assert viewer.ask("/file/t-0/a/txt").body == b"ooo"
        (mounts.home / "set/set.erofs").chmod(0o600)
        assert b"serving" not in other.run("view", "--no-browser", mounts.mountpoint, code=3).stderr
