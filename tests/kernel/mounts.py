"""Shared by the tests of mounts by the kernel: guards found and killed, ends of mounts, words of the program."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests import tars
from tests.conftest import Program
from tests.processes import wait_until
from wdsfs import mount_table
from wdsfs.cli import main
from wdsfs.kernel import engine
from wdsfs.kernel.guard import Guarded, guard_of
from wdsfs.mount.mount_options import MountOptions, Serving
from wdsfs.mount_registry import forget

KERNEL = ("mount", "--engine", "kernel", "-q")
SHARD = tars.tar(tars.member(b"a.x", b"a"))


def need_erofs() -> None:
    """Skip a test that mounts images where that cannot be done."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts images")
    if b"\terofs\n" not in Path("/proc/filesystems").read_bytes():
        pytest.skip("this kernel has no EROFS")


def end_mount(path: Path) -> None:
    """End what is mounted there, if anything is."""
    while mount_table.mounted_at(path) is not None:
        subprocess.run(["umount", "--lazy", path], check=True)
    guard = guard_of(str(path))
    wait_until(lambda: guard is None or not guard.alive, "the guard to end")
    if guard is not None:
        forget(guard)  # one that was killed


def told(home: Path, *words: str | Path, code: int) -> str:
    """What the program says in this process, with this exit code."""
    environment, root = {"WDSFS_INDEX_DIR": str(home / "index")}, logging.getLogger()
    handlers, level = root.handlers[:], root.level
    done = CliRunner().invoke(main.main, [*map(str, words)], env=environment, prog_name="wdsfs")
    root.handlers[:] = handlers
    root.setLevel(level)
    assert done.exit_code == code, done.output
    return done.output


def shard_and_image(program: Program, content: bytes = SHARD) -> tuple[Path, Path]:
    """A shard, and its image."""
    need_erofs()
    shard, image = program.write("s.tar", content), program.home / "set.erofs"
    told(program.home, "image", shard, "-o", image, code=0)
    return shard, image


def run_image(program: Program, image: Path, *, foreground: bool = False) -> int:
    """Mount an image from this process; the exit code."""
    options = MountOptions([str(image)], str(program.mountpoint), serving=Serving(foreground=foreground))
    return engine.run(options, str(image), str(program.home))


def mount(program: Program, *words: str | Path) -> Guarded:
    """Have the kernel serve a set; returns its guard."""
    program.run(*KERNEL, *words, program.mountpoint)
    return the_guard(program)


def the_guard(program: Program) -> Guarded:
    """The guard of the mount, which is alive."""
    guard = guard_of(str(program.mountpoint))
    assert guard is not None
    assert guard.alive
    return guard


def kill(guard: Guarded) -> None:
    """Kill a guard, which leaves its mount."""
    os.kill(guard.pid, signal.SIGKILL)
    wait_until(lambda: not guard.alive, "the guard to die")


def is_mounted(program: Program) -> bool:
    return mount_table.mounted_at(program.mountpoint) is not None


def wait_for_the_end(program: Program) -> None:
    """Return when the mount has ended."""
    wait_until(lambda: not is_mounted(program), "the mount to end")


def engine_of(path: Path) -> str:
    """The type of the file system that is mounted there."""
    mounted = mount_table.mounted_at(path)
    return "" if mounted is None else mounted.fstype
