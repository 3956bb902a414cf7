"""Ends a mount: detaches it and waits for its daemon. Works on dead mounts, too.

What a daemon does when its mount is gone is in `session.py`.
"""

from __future__ import annotations

import logging
import os
import shlex
import time
from pathlib import Path

from wdsfs import host, mount_table
from wdsfs.errors import MountError, OverlayBusy, OverlayUnusable, bytes_text, several
from wdsfs.kernel.manifest import image_of
from wdsfs.mount.guard import Registration, forget, guard_of
from wdsfs.mount.mountpoint import DEAD_MOUNT_ERRNOS
from wdsfs.overlay.overlay_directory import OverlayDirectory, held
from wdsfs.status import control

log = logging.getLogger(__name__)

NAMED = 5  # processes that a message names
ANNOUNCE_SECONDS = 3.0  # of an unmount, after which it says what it waits for


def unmount(mountpoint: str, lazy: bool = False, wait_seconds: float = 30.0) -> None:
    """End the mount at this path, alive or dead; returns when its daemon is gone. Raises MountError."""
    path = control.canonical(mountpoint)
    daemon, guard = control.find(path), guard_of(path)  # before it ends: a guard is not known any more then
    mounted = mount_table.mounted_at(path)
    if mounted is None and daemon is None:
        raise MountError(f"{path}: nothing is mounted there{_mount_above(path)}")
    if mounted is not None:  # else the mount has ended otherwise; what is left of it is cleared below
        if daemon is None and mounted.fstype != "fuse.wdsfs" and not _is_of_kernel(path, mounted):
            raise MountError(f"{path}: that is a mount of type {mounted.fstype}, not one of wdsfs")
        dead = not daemon.alive if daemon is not None else _is_dead(path)
        _detach_mount(path, lazy or dead)
    if guard is not None and not lazy:
        _wait_for_guard(path, guard, wait_seconds)
    if guard is not None and not guard.alive:
        forget(guard)
    if daemon is not None:
        if not lazy:
            _wait_for_end(daemon, wait_seconds, 0 if mounted is None else mounted.device)
            _wait_for_overlay(daemon, wait_seconds)
        if not daemon.alive:
            control.forget(daemon)


def _mount_above(path: str) -> str:
    """Return the end of a message about a path below a mount of wdsfs: how that is ended; empty for others."""
    above = mount_table.mount_of(path)
    if above is None or above.fstype != "fuse.wdsfs":
        return ""
    return f"; it lies in a mount, which ends with: wdsfs umount {shlex.quote(os.fsdecode(above.path))}"


def _is_of_kernel(path: str, mounted: mount_table.MountPoint) -> bool:
    """True if the kernel serves an image here; that may have been removed since."""
    if image_of(mounted) is not None:
        return True
    return mounted.fstype in ("erofs", "overlay") and guard_of(path) is not None


def _is_dead(path: str) -> bool:
    try:
        os.statvfs(path)
    except OSError as error:
        return error.errno in DEAD_MOUNT_ERRNOS
    return False


def _detach_mount(path: str, lazy: bool) -> None:
    import subprocess

    name, *options = ["umount"] if os.geteuid() == 0 else ["fusermount3", "-u"]
    if lazy:
        options.append("-l" if name == "umount" else "-z")
    program = host.program(name)
    if program is None:
        package = "mount" if name == "umount" else "fuse3"
        raise MountError(f"{name} is not installed; type: sudo apt install {package}")
    # In English, for the message is searched below.
    environment = {**os.environ, "LC_ALL": "C"}
    command = [program, *options, "--", path]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=environment)
    if done.returncode:
        text = done.stderr.strip()
        raise MountError(_busy_text(path) if "busy" in text else text)


def _busy_text(path: str) -> str:
    """Return the message about a mount that is used: by whom, as far as this user may see."""
    quoted = shlex.quote(path)
    users = [f"{one.command} ({one.pid}, {one.what})" for one in mount_table.users(os.fsencode(path))]
    who = f"by {several(users, NAMED)}" if users else f"by whom only root sees: sudo fuser -vm {quoted}"
    return f"{path}: is in use {who}; end that, or detach the mount now: wdsfs umount --lazy {quoted}"


def _wait_for_guard(path: str, guard: Registration, seconds: float) -> None:
    """Wait for the guard of an image, which ends as soon as nothing of the mount is used. Raises MountError."""
    deadline = time.monotonic() + seconds
    while guard.alive:
        if time.monotonic() > deadline:
            raise MountError(
                f"{path}: is unmounted, but process {guard.pid} still guards the shards, {seconds:.0f} s later: "
                "another mount of it is there (a bind mount, one of a container), or the process is stopped. See: "
                f"grep -l {shlex.quote(guard.image)} /proc/*/mountinfo"
            )
        time.sleep(0.01)


def _wait_for_end(daemon: control.Daemon, seconds: float, device: int) -> None:
    """Wait until the daemon is gone: as long as it waits for a disk, and else up to `seconds`.

    `device` is that of the mount, 0 if it was gone already.
    """
    since = time.monotonic()
    deadline, announced = since + seconds, False
    while daemon.alive:
        now = time.monotonic()
        if control.waits_for_disk(daemon.pid):
            deadline = now + seconds
            if not announced and now - since > ANNOUNCE_SECONDS:
                announced = True
                log.info(
                    "waiting for process %s: %s. An interrupt ends the waiting only",
                    *(daemon.pid, _what_is_written(daemon)),
                )
        if now > deadline:
            still = f"process {daemon.pid} is still there, {now - since:.0f} s after the unmount"
            raise MountError(f"{still}, and {_why_still(daemon, device)}")
        time.sleep(0.01)


def _why_still(daemon: control.Daemon, device: int) -> str:
    """Return why a daemon may outlive its mount, and what to do."""
    holders = mount_table.holders(device) if device else []
    if holders:
        who = several([str(one) for one in holders])
        return (
            f"ends when the mount is gone everywhere: process {who} has a mount table of its own (a container?) "
            "from a time when it was there, and keeps it until it ends, or unmounts it"
        )
    return "does not wait for a disk" + (f"; see {daemon.log}" if daemon.log else "")


def _wait_for_overlay(daemon: control.Daemon, seconds: float) -> None:
    """Wait for workers that have outlived a daemon that was killed: the next mount can have the overlay then."""
    if daemon.overlay is None or control.find(daemon.mountpoint) != daemon:
        return  # one that ends in good order waits for its workers, and is not registered any more
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with held(OverlayDirectory(Path(daemon.overlay))):
                return
        except OverlayBusy:
            time.sleep(0.01)
        except (OverlayUnusable, OSError):  # it is removed, or of somebody else by now
            return


def _what_is_written(daemon: control.Daemon) -> str:
    """Return what the daemon of a mount that is gone waits for."""
    if daemon.overlay is None:
        return "it waits for a disk"
    left = host.unwritten_bytes()
    rest = "" if left is None else f", and this machine has {bytes_text(left)} to write in all"
    return f"it has the changes in {daemon.overlay} written to the disk{rest}"
