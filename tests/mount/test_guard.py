"""The guard of a mounted image: whoever writes into a shard waits until nobody reads it through the mount."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import tars
from tests.conftest import PATIENCE, Program, wait_until
from tests.image.test_image import end_mount, need_erofs, told
from wdsfs import host, mount_calls, mount_table
from wdsfs.mount import held_shards, image_mount
from wdsfs.mount.guard import guard_of
from wdsfs.mount.image_mount import ImageMount

OLD, NEW, SIZE = b"o", b"n", 3 << 20
WRITE = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY)
os.pwrite(fd, b"n" * (3 << 20), 512)
"""
CUT = "import os, sys; os.truncate(sys.argv[1], 512)"


@contextmanager
def mounted(program: Program) -> Iterator[tuple[Path, Path]]:
    """An image over a shard of one large member: the paths of the shard and of the member."""
    need_erofs()
    content = tars.tar(tars.member(b"a.x", OLD * SIZE), tars.member(b"b.x", b"b"))
    shard = program.write("s.tar", content)
    image = program.home / "set.erofs"
    told(program.home, "image", shard, "-o", image, code=0)
    try:
        program.run("mount", image, program.mountpoint)
        yield shard, program.mountpoint / "s" / "a" / "x"
    finally:
        end_mount(program.mountpoint)


@pytest.mark.parametrize("code", [WRITE, CUT], ids=["write", "truncate"])
def test_a_writer_waits_for_readers(code: str, program: Program) -> None:
    """The mount ends at once; what is open of it can be read on, as it was; then the writer goes on."""
    with mounted(program) as (shard, file), file.open("rb", buffering=0) as reader:
        assert reader.read(SIZE // 2) == OLD * (SIZE // 2)
        with subprocess.Popen([sys.executable, "-c", code, shard]) as writer:
            wait_until(lambda: mount_table.mounted_at(program.mountpoint) is None, "the mount to end")
            assert not file.exists()
            os.posix_fadvise(reader.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert reader.read() == OLD * (SIZE - SIZE // 2)
            assert writer.poll() is None
            reader.close()
            assert writer.wait(PATIENCE) == 0
        assert shard.read_bytes()[512:1024] == (NEW * 512 if code == WRITE else b"")
        assert told(program.home, "status", program.mountpoint, code=5)


def test_readers_never_see_a_mix(program: Program) -> None:
    """Under load: whoever reads gets the old bytes, or finds no file."""
    reading = """
import sys
seen = 0
while True:
    try:
        found = set(open(sys.argv[1], "rb").read())
    except FileNotFoundError:
        sys.exit(0 if seen else 1)
    if found != {111}:
        sys.exit(2)
    seen += 1
    print(seen, flush=True)
"""
    with mounted(program) as (shard, file):
        command = [sys.executable, "-c", reading, file]
        readers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
        for reader in readers:
            assert reader.stdout is not None
            reader.stdout.readline()  # it is reading
        subprocess.run([sys.executable, "-c", WRITE, shard], check=True, timeout=60)
        for reader in readers:
            reader.communicate(timeout=60)
            assert reader.returncode == 0


def test_a_shard_that_is_replaced_is_shown_as_such(program: Program) -> None:
    """The mount keeps the old file; `status` tells; and without its guard it tells that, too."""
    with mounted(program) as (shard, file):
        other = program.write("other", b"x" * 4096)
        other.rename(shard)
        assert set(file.read_bytes()) == set(OLD)
        shown = told(program.home, "status", program.mountpoint, code=0)
        assert f"replaced  {shard}; the old content is shown until: wdsfs refresh {program.mountpoint}" in shown
        guard = guard_of(str(program.mountpoint))
        assert guard is not None
        assert (guard.leased, guard.paths) == (1, [str(shard)])
        os.kill(guard.pid, 9)
        wait_until(lambda: not guard.alive, "the guard to die")
        assert "it has no guard" in told(program.home, "status", program.mountpoint, code=0)
        told(program.home, "umount", program.mountpoint, code=0)
        assert guard_of(str(program.mountpoint)) is None


def test_a_signal_ends_the_mount(program: Program) -> None:
    with mounted(program) as (_, file):
        guard = guard_of(str(program.mountpoint))
        assert guard is not None
        os.kill(guard.pid, 15)
        wait_until(lambda: not guard.alive, "the guard to end")
        assert not file.exists()
        assert guard_of(str(program.mountpoint)) is None


def test_a_shard_that_is_being_written_is_refused(program: Program) -> None:
    need_erofs()
    shard = program.write("s.tar", tars.tar(tars.member(b"a.x", b"a")))
    image = program.home / "set.erofs"
    program.run("image", shard, "-o", image)
    with shard.open("r+b"):
        message = program.refused("mount", image, program.mountpoint, code=5)
    assert message == f"wdsfs: error: {shard}: a program has it open for writing"


def test_without_leases_times_are_looked_at(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on file systems that have none; on one that is shared with other machines it takes --trust-shards."""
    need_erofs()
    shard = program.write("s.tar", tars.tar(tars.member(b"a.x", b"a")))
    image = program.home / "set.erofs"
    program.run("image", shard, "-o", image)
    plainly = fcntl.fcntl

    def refuse(fd: int, command: int, argument: Any = 0) -> Any:
        if command == fcntl.F_SETLEASE:
            raise OSError(errno.EINVAL, "no leases here")
        return plainly(fd, command, argument)

    monkeypatch.setattr(held_shards.fcntl, "fcntl", refuse)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(program.home / "run"))
    wanted = ImageMount(str(image), str(program.mountpoint), str(program.home))
    serving = multiprocessing.get_context("fork").Process(target=image_mount.mount_in_front, args=(wanted,))
    try:
        serving.start()
        wait_until(lambda: guard_of(str(program.mountpoint)) is not None, "the mount")
        with shard.open("r+b") as file:
            file.write(b"b")
        wait_until(lambda: mount_table.mounted_at(program.mountpoint) is None, "the mount to end")
    finally:
        serving.join(PATIENCE)
        end_mount(program.mountpoint)
    assert serving.exitcode == 0
    monkeypatch.setattr(mount_table, "filesystem_type", lambda _: "nfs4")
    monkeypatch.setattr(host, "kernel_version", lambda text=None: (6, 12) if text is None else (6, 15))
    told(program.home, "image", shard, "-o", image, "--linux", "6.15", code=0)
    says = told(program.home, "mount", "-f", image, program.mountpoint, code=5)
    assert f"{shard}: lies on nfs4, where another machine can write it" in says
    assert "was made for Linux 6.15; with this kernel its files have the time 1970" in says


def test_without_inotify_the_superblock_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(mount_calls, "end_of_use", refuse)
    monkeypatch.setattr(held_shards, "SUPERBLOCKS", tmp_path)
    (tmp_path / "erofs-1").mkdir()
    held = held_shards.HeldShards([])
    held.watch_mount("/", os.stat("/").st_dev, {"erofs-1"})
    assert held.is_used()
    (tmp_path / "erofs-1").rmdir()
    assert not held.is_used()
