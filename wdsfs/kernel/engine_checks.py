"""Checks if the kernel can serve sets: EROFS, root, leases on shards, shards that are files of this machine.

`mount --engine` asks about a set, `wdsfs doctor` about the machine. Nothing is changed. A mount does not need the
kernel's engine, since there is FUSE, so no finding is a failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from wdsfs import host, mount_table, source, trust
from wdsfs.door.urls import is_remote
from wdsfs.errors import MountError
from wdsfs.host import MachineFinding
from wdsfs.kernel.devices import is_written, require_file_limit
from wdsfs.kernel.erofs_header import OLDEST_KERNEL
from wdsfs.kernel.erofs_mount import FILES_SINCE, LOOPS, refusal_of_kernel
from wdsfs.mount.engines import KERNEL_ENGINE
from wdsfs.names import suffix_of

if TYPE_CHECKING:
    from wdsfs.shards import Shard


def obstacle(shards: Sequence[Shard], trusting: bool) -> str | None:
    """Return why the kernel cannot serve these shards; None if no reason is known. Raises ShardErrors."""
    if os.geteuid() != 0:
        return "the kernel mounts sets for root only"
    if host.kernel_version() < OLDEST_KERNEL:
        return f"this kernel is older than Linux {_dotted(OLDEST_KERNEL)}"
    refusal = refusal_of_kernel()
    if refusal is not None:
        return refusal
    try:
        require_file_limit(len(shards))
    except MountError as error:
        return str(error)
    served = next(filter(None, (_not_plain(shard.path) for shard in shards)), None)
    return served or (None if trusting else _on_network(shards))


def _not_plain(path: bytes) -> str | None:
    """Return why the kernel cannot read a shard, as far as its name tells; the maker of the image knows more."""
    if is_remote(path):
        return f"{os.fsdecode(path)} is remote, and the kernel reads files of this machine only"
    if suffix_of(path) not in (b"", b".tar"):
        from wdsfs.tree.open_shards import is_compressed

        if is_compressed(path):
            return f"{os.fsdecode(path)} is compressed, and the kernel reads plain tars only"
    return None


def _on_network(shards: Sequence[Shard]) -> str | None:
    place = mount_table.on_network(shard.path for shard in shards)
    return None if place is None else f"{os.fsdecode(place[0])} lies on {place[1]}, which other machines can write"


def obstacle_now(shards: Sequence[Shard]) -> str | None:
    """Return why no guard can hold these shards now, such as a program that writes one. Raises ShardErrors."""
    return next(filter(None, (_cannot_be_held(shard.path) for shard in shards)), None)


def _cannot_be_held(path: bytes) -> str | None:
    fd = source.open_shard(path)
    try:
        refusal = trust.foreign_link(path, fd)
        if refusal is None and is_written(fd):
            refusal = f"{os.fsdecode(path)}: a program has it open for writing"
        return refusal
    except OSError:
        return None  # without leases its times are compared
    finally:
        source.close(fd)


# --- for `wdsfs doctor`


def check_engine(
    version: tuple[int, ...] | None = None,
    file_systems: str = "/proc/filesystems",
    loops: str = LOOPS,
    user: int | None = None,
) -> MachineFinding:
    """Check if `--engine kernel` can be used: EROFS, shards as its devices, and root."""
    version = host.kernel_version() if version is None else version
    if version < OLDEST_KERNEL:
        text = f"needs Linux {_dotted(OLDEST_KERNEL)} or later; this is {_dotted(version)}"
        return MachineFinding(KERNEL_ENGINE, "ok", text)
    if not _has_erofs(file_systems):
        text = "this kernel has no EROFS: the kernel cannot serve a set itself"
        return MachineFinding(KERNEL_ENGINE, "warn", text, "sudo modprobe erofs")
    by_files = version >= FILES_SINCE
    if not by_files and not os.path.exists(loops):
        text = f"there is no {loops}, which EROFS needs before Linux 6.12"
        return MachineFinding(KERNEL_ENGINE, "warn", text, "modprobe loop")
    shown = f"EROFS, shards as {'files' if by_files else 'loop devices'}"
    if (os.geteuid() if user is None else user) != 0:
        return MachineFinding(KERNEL_ENGINE, "ok", f"{shown}; only for root")
    refusal = refusal_of_kernel() if user is None else None
    return MachineFinding(KERNEL_ENGINE, "ok", shown if refusal is None else f"{shown}; but {refusal}")


def _has_erofs(file_systems: str) -> bool:
    """Return True if the kernel has EROFS, or can load it."""
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


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
