"""The checks of `wdsfs doctor` for `--engine kernel`: what the kernel serves itself, and how shards are guarded.

A mount does not need it, since there is FUSE, so nothing here is a failure. As in `doctor.py`, nothing is changed.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import subprocess
from pathlib import Path

from wdsfs import host, mount_table
from wdsfs.host import MachineFinding
from wdsfs.kernel.erofs import OLDEST_KERNEL
from wdsfs.kernel.erofs_mount import FILES_SINCE, LOOPS, OVERTAKING_SINCE, refusal_of_kernel
from wdsfs.names import SHARD_SUFFIXES, suffix_of
from wdsfs.storage import held_files

NAME = "kernel engine"


def check_engine(
    version: tuple[int, ...] | None = None,
    file_systems: str = "/proc/filesystems",
    loops: str = LOOPS,
    user: int | None = None,
) -> MachineFinding:
    """If `--engine kernel` can be used: EROFS, shards as its devices, and root."""
    version = host.kernel_version() if version is None else version
    if version < OLDEST_KERNEL:
        return MachineFinding(
            NAME, "ok", f"not with Linux {host.version_text(version)}: it takes {host.version_text(OLDEST_KERNEL)}"
        )
    if not _has_erofs(file_systems):
        return MachineFinding(
            NAME, "warn", "this kernel has no EROFS: the kernel cannot serve a set itself", "sudo modprobe erofs"
        )
    by_files = version >= FILES_SINCE
    if not by_files and not os.path.exists(loops):
        return MachineFinding(
            NAME, "warn", f"there is no {loops}, which it takes before Linux 6.12", "modprobe loop"
        )
    shown = f"EROFS, shards as {'files' if by_files else 'loop devices'}"
    if version < OVERTAKING_SINCE:
        shown += f"; `wdsfs refresh` takes Linux {host.version_text(OVERTAKING_SINCE)}"
    if (os.geteuid() if user is None else user) != 0:
        return MachineFinding(NAME, "ok", f"{shown}; only for root")
    refusal = refusal_of_kernel() if user is None else None
    if refusal is not None:
        return MachineFinding(NAME, "ok", f"{shown}; but {refusal}")
    return MachineFinding(NAME, "ok", shown)


def _has_erofs(file_systems: str) -> bool:
    """True if the kernel has EROFS, or can load it."""
    try:
        if any(line.split()[-1:] == ["erofs"] for line in Path(file_systems).read_text().splitlines()):
            return True
    except OSError:
        return False
    modprobe = shutil.which("modprobe")
    if modprobe is None:
        return False
    dry = subprocess.run([modprobe, "--dry-run", "--quiet", "erofs"], check=False, capture_output=True)
    return dry.returncode == 0


def check_leases(directory: str) -> MachineFinding:
    """If the kernel has writers of the shards in this directory wait: tried with one of them."""
    name = f"leases in {directory}"
    fstype = mount_table.filesystem_type(directory)
    if mount_table.is_network(fstype):
        return MachineFinding(
            name,
            "warn",
            f"it lies on {fstype}, where other machines can write unnoticed: --engine kernel refuses that",
            "mount with --trust-shards if nobody will write; or by FUSE",
        )
    try:
        shard = _a_shard(directory)
        if shard is None:
            suffixes = ", ".join(map(os.fsdecode, SHARD_SUFFIXES[:1]))
            return MachineFinding(name, "warn", f"there is no shard ({suffixes}) to try it with")
        fd = os.open(shard, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        return MachineFinding(name, "warn", error.strerror or str(error), f"ls -ld {shlex.quote(directory)}")
    try:
        is_written = held_files.is_written(fd)
    except OSError as error:
        return _no_lease(name, fstype, shard, error)
    finally:
        os.close(fd)
    if is_written:
        who = f"fuser -v {shlex.quote(shard)}"
        return MachineFinding(name, "warn", f"a program has {shard} open for writing", who)
    if mount_table.is_layer(fstype):
        return MachineFinding(
            name,
            "warn",
            f"can be had, but {fstype} shows files of another file system, where no writer waits: changes are "
            "looked for every second",
            "name the shards by that file system",
        )
    return MachineFinding(name, "ok", f"can be had ({fstype or 'unknown file system'}): writers wait for readers")


def _a_shard(directory: str) -> str | None:
    """A shard in this directory. Raises OSError."""
    with os.scandir(directory) as entries:
        return next((one.path for one in entries if suffix_of(os.fsencode(one.name)) and one.is_file()), None)


def _no_lease(name: str, fstype: str, shard: str, error: OSError) -> MachineFinding:
    by_looking = "changes are looked for every second instead"
    if error.errno == errno.EACCES:
        return MachineFinding(
            name,
            "warn",
            f"{shard} is not yours, so {by_looking}",
            "mount as root with CAP_LEASE (docs/deployment.md)",
        )
    return MachineFinding(
        name, "warn", f"none on {fstype} ({error.strerror}): {by_looking}", "shards on a local disk"
    )
