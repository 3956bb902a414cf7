"""Compressed shards served by the kernel: it reads unpacked copies, which are held in the cache meanwhile."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tars
from tests.conftest import Program, descriptors
from tests.kernel.mounts import KERNEL, end_mount, engine_of, kill, mount, need_erofs, told, wait_for_the_end
from tests.processes import PATIENCE, Process, wait_until
from wdsfs.errors import MountError, bytes_text
from wdsfs.kernel import devices
from wdsfs.kernel.devices import OpenDevice
from wdsfs.kernel.guard import Guarded
from wdsfs.storage.cache_room import SLACK

SIZE = 300_000


def packed(letter: bytes) -> bytes:
    content = tars.tar(tars.member(b"a.x", letter * SIZE), tars.member(b"b.x", b"b"))
    return gzip.compress(content, mtime=0)


@pytest.fixture
def mounts(program: Program) -> Iterator[Program]:
    """A directory `set` with a compressed shard and a plain one."""
    need_erofs()
    program.write("set/s0.tar.gz", packed(b"o"))
    program.write("set/s1.tar", gzip.decompress(packed(b"p")))
    try:
        yield program
    finally:
        end_mount(program.mountpoint)


def mount_set(program: Program) -> Guarded:
    return mount(program, "set")


def shard(program: Program) -> Path:
    return program.home / "set" / "s0.tar.gz"


def member(program: Program) -> Path:
    return program.mountpoint / "s0" / "a" / "x"


def shown(program: Program) -> bytes:
    """What is in the member of the compressed shard, which is all of one letter."""
    content = member(program).read_bytes()
    assert content == content[:1] * SIZE
    return content[:1]


def copies(program: Program) -> list[Path]:
    found = Path(program.environment["WDSFS_INDEX_DIR"]).parent.glob("**/cache/*.tar")
    return sorted(found)


def wait_until_let_go(program: Program) -> None:
    """The kernel closes the devices of a mount a moment after that has ended."""
    wait_until(lambda: program.json("cache")["unpacked"]["held_bytes"] == 0, "the copies to be let go")


def require_guarded(program: Program) -> None:
    """A writer of the copy that is mounted waits until the mount has ended."""
    [copy] = copies(program)
    code = "import os, sys; os.pwrite(os.open(sys.argv[1], os.O_WRONLY), b'?' * 3000, 2048)"
    with (
        member(program).open("rb", buffering=0) as opened,
        Process([sys.executable, "-c", code, copy]) as writer,
    ):
        wait_for_the_end(program)
        assert opened.read(10) == b"o" * 10
        assert writer.poll() is None
        opened.close()
        assert writer.wait(PATIENCE) == 0


# --- held --------------------------------------------------------------------------------------------------


def test_an_unpacked_copy_stays_while_it_is_mounted(mounts: Program) -> None:
    """Whoever clears the cache, or wants its room; also without a guard; and not after the unmount."""
    guard = mount_set(mounts)
    [copy] = copies(mounts)
    about = mounts.json("cache")["unpacked"]
    assert about["held_bytes"] == about["bytes"] >= copy.stat().st_size
    for words in (("--clear",), ("--trim", "0")):
        mounts.run("cache", *words)
        assert copies(mounts) == [copy]
    kill(guard)
    mounts.run("cache", "--clear")
    # There is room for one copy, and this one has to be another.
    size = int((2 * copy.stat().st_size + 4096) / (1 - SLACK))
    room = {"WDSFS_CACHE_SIZE": str(size), "WDSFS_UNPACK": "always"}
    other = mounts.write("other.tar.gz", packed(b"q"))
    assert b"is full" in mounts.run("cat", other, "other/a/x", code=None, env=room).stderr
    assert copies(mounts) == [copy]
    assert shown(mounts) == b"o"
    mounts.run("umount", mounts.mountpoint)
    wait_until_let_go(mounts)
    mounts.run("cat", other, "other/a/x", env=room)
    [left] = copies(mounts)
    assert left != copy


def test_an_unpacked_copy_stays_while_a_program_reads_it(mounts: Program) -> None:
    mount_set(mounts)
    with member(mounts).open("rb") as opened:
        mounts.run("umount", "--lazy", mounts.mountpoint)
        mounts.run("cache", "--clear")
        assert len(copies(mounts)) == 1
        assert set(opened.read()) == {ord("o")}
    wait_until_let_go(mounts)
    mounts.run("cache", "--clear")
    assert copies(mounts) == []


def test_prune_spares_copies_that_are_mounted(mounts: Program) -> None:
    """`wdsfs index --prune` removes what belongs to shards that are gone, but not under a mount."""
    mount_set(mounts)
    shard(mounts).unlink()
    mounts.run("index", "--prune", "set")
    assert len(copies(mounts)) == 1
    mounts.run("umount", mounts.mountpoint)
    wait_until_let_go(mounts)
    mounts.run("index", "--prune", "set")
    assert copies(mounts) == []


# --- changes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["replaced", "in place", "removed"])
def test_a_changed_compressed_shard_is_shown_after_a_refresh(how: str, mounts: Program) -> None:
    """The mount shows what it was, whole; nobody waits; `refresh` takes what is there now."""
    guard = mount_set(mounts)
    with member(mounts).open("rb") as opened:
        if how == "replaced":
            mounts.write("new", packed(b"n")).rename(shard(mounts))
        elif how == "in place":
            shard(mounts).write_bytes(packed(b"n"))
        else:
            shard(mounts).unlink()
        assert shown(mounts) == b"o"
        text = mounts.run("status", mounts.mountpoint).stdout.decode()
        assert f"replaced  {shard(mounts)}; the old content is shown until" in text
        if how == "removed":
            assert mounts.run("refresh", mounts.mountpoint).stdout.decode().splitlines()[-1].endswith("1 removed")
            assert sorted(os.listdir(mounts.mountpoint)) == ["s1"]
        else:
            assert mounts.json("refresh", mounts.mountpoint)["replaced"] == [str(shard(mounts))]
            assert shown(mounts) == b"n"
        assert set(opened.read()) == {ord("o")}
    assert guard.alive
    assert "replaced" not in mounts.run("status", mounts.mountpoint).stdout.decode()


def test_writing_an_unpacked_copy_ends_the_mount(mounts: Program) -> None:
    """The mount ends first, and the next one shows the shard, not what was written."""
    mount_set(mounts)
    require_guarded(mounts)
    mount_set(mounts)
    assert shown(mounts) == b"o"
    require_guarded(mounts)


def test_a_copy_written_without_a_guard_is_replaced(mounts: Program) -> None:
    """The next guard does not take that over: a new copy takes its place."""
    kill(mount_set(mounts))
    [copy] = copies(mounts)
    with copy.open("r+b") as file:
        file.write(b"?" * 4096)
    mount_set(mounts)
    assert shown(mounts) == b"o"
    require_guarded(mounts)


def test_a_mount_outlives_the_removal_of_its_copy(mounts: Program) -> None:
    """The mount goes on; the same command again unpacks the shard, and what is mounted then is guarded."""
    guard = mount_set(mounts)
    for one in copies(mounts):
        one.unlink()
    assert shown(mounts) == b"o"
    assert "replaced" not in mounts.run("status", mounts.mountpoint).stdout.decode()
    kill(guard)
    mount_set(mounts)
    assert shown(mounts) == b"o"
    require_guarded(mounts)


# --- what cannot be ----------------------------------------------------------------------------------------


def test_copies_larger_than_the_cache_are_refused(mounts: Program) -> None:
    """All copies have to be there at once: `kernel` says so, and `auto` takes FUSE."""
    mounts.run("index", "-q", "set")
    mounts.run("cache", "--clear")
    message = mounts.refused(*KERNEL, "--cache-size", str(SIZE // 2), "set", mounts.mountpoint, code=5)
    assert f"it is larger than the cache may be ({bytes_text(SIZE // 2)})" in message
    assert "--cache-size gives it more room" in message
    assert "--engine auto takes FUSE instead" in message
    message = mounts.refused(*KERNEL, "--cache-size", "100", "set", mounts.mountpoint, code=5)
    assert "which has to hold all of them unpacked" in message
    message = mounts.refused(*KERNEL, "--unpack", "never", "set", mounts.mountpoint, code=5)
    assert "forbids to unpack it" in message
    with mounts.mounted("--engine", "auto", "--cache-size", str(SIZE // 2), "set") as found:
        assert engine_of(found.path) == "fuse.wdsfs"
        assert sorted(os.listdir(found.path / "s0")) == ["a", "b"]
    assert mounts.json("cache")["unpacked"]["held_bytes"] == 0


def test_copies_need_a_cache_with_leases(mounts: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a writer of a copy could not be noticed: its times change when it is used, too."""
    plainly = fcntl.fcntl

    def none(fd: int, command: int, argument: Any = 0) -> Any:
        if (command, argument) == (fcntl.F_SETLEASE, fcntl.F_RDLCK):
            raise OSError(errno.EINVAL, "Invalid argument")
        return plainly(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", none)
    message = told(mounts.home, *KERNEL, mounts.home / "set", mounts.mountpoint, code=5)
    assert "its copy cannot be kept in the cache: the file system has no leases" in message
    assert "--engine auto takes FUSE instead" in message
    assert not any(str(mounts.home) in path for _, path in descriptors())
    fd = os.open(shard(mounts), os.O_RDONLY)
    held = devices.HeldShards(OpenDevice(os.fsencode(shard(mounts)), fd, str(shard(mounts))))
    with contextlib.closing(held), pytest.raises(MountError, match="has no leases"):
        held.take_leases()


def test_an_overlay_above_copies_is_committed(mounts: Program) -> None:
    """Edits above copies are committed as those above plain shards."""
    mounts.run(*KERNEL, "--overlay", "edits", "set", mounts.mountpoint)
    (mounts.mountpoint / "s0" / "b" / "x").write_bytes(b"changed")
    assert "changed  s0/b ~x" in mounts.run("diff", mounts.mountpoint).stdout.decode()
    mounts.run("commit", mounts.mountpoint, "-o", mounts.home / "new-%d.tar")
    assert shown(mounts) == b"o"
    assert mounts.run("cat", mounts.home / "new-0.tar", "new-0/b/x").stdout == b"changed"
    assert mounts.json("cache")["unpacked"]["held_bytes"] > 0
