"""Runs systemd for a test, with units and a control group of its own, on a machine where wdsfs is installed.

Nobody outside of its namespaces sees its mounts, its processes, and its changes in /etc, /mnt, /run, /usr/local
and /usr/sbin. They end with its first process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.processes import Process, finished, wait_until
from tests.servers import need_server
from wdsfs import mount_registry, mount_table

SYSTEMD = Path("/lib/systemd/systemd")
TARGETS = (
    *("basic", "local-fs", "local-fs-pre", "multi-user", "remote-fs", "remote-fs-pre"),
    *("shutdown", "sysinit", "umount"),
)
STARTED = "systemd is next"  # from here on a failure is a failure of the test
START = f"""
set -e
mount -t tmpfs run /run
mount -t tmpfs mnt /mnt
if [ "$(stat -fc %T /sys/fs/cgroup)" = cgroup2fs ]; then
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
else
    mount -t tmpfs cgroup /sys/fs/cgroup
    mkdir /sys/fs/cgroup/unified /sys/fs/cgroup/systemd
    mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified
    mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
fi
cd /run
mkdir -p systemd/system systemd/system.conf.d fstab late early over
for place in /etc /usr/local /usr/sbin; do
    mkdir -p over$place/upper over$place/work
    mount -t overlay -o lowerdir=$place,upperdir=over$place/upper,workdir=over$place/work overlay $place
done
ln -sf "$PROGRAMS/mount.wdsfs" /usr/sbin/mount.wdsfs
ln -sf "$PROGRAMS/wdsfs" /usr/local/bin/wdsfs
ln -sfT "$UNITS" /etc/wdsfs
printf '[Manager]\\nDefaultEnvironment=HOME=%s\\n' "$HOME" >/run/systemd/system.conf.d/home.conf
cd /
SYSTEMD_FSTAB="$UNITS/fstab" /lib/systemd/system-generators/systemd-fstab-generator /run/fstab /run/early /run/late
echo {STARTED}
SYSTEMD_UNIT_PATH="$UNITS:/run/fstab" exec {SYSTEMD} --system --unit=basic.target --show-status=no
"""


class ServiceManager:
    """A running systemd; `process` is its first process, in whose namespaces everything happens."""

    def __init__(self, process: int) -> None:
        self.process = process

    def run(self, *command: str | Path) -> str:
        """Return the output of a command beside the units, which has to succeed."""
        inside = ["nsenter", f"--target={self.process}", "--mount", "--pid", "--cgroup", *map(str, command)]
        return str(finished(*inside).stdout)


@contextlib.contextmanager
def service_manager(home: Path, units: Path) -> Iterator[ServiceManager]:
    """Run systemd with the units in this directory, and those that it makes of the file `fstab` there.

    Its programs have the home directory `home`. Skips the test where no systemd can run.
    """
    for program in ("unshare", "nsenter", "systemctl"):
        need_server(shutil.which(program), program)
    need_server(str(SYSTEMD) if SYSTEMD.exists() else None, "systemd")
    if not os.path.exists("/dev/autofs"):
        pytest.skip("the kernel has no autofs")
    for target in TARGETS:
        (units / f"{target}.target").write_text("[Unit]\nDefaultDependencies=no\n")
    namespaces = ["--mount", "--propagation=private", "--pid", "--mount-proc", "--cgroup"]
    programs = Path(sys.executable).parent
    names = {"HOME": str(home), "UNITS": str(units), "PROGRAMS": str(programs), "container": "tests"}
    said = home / "systemd.log"
    with own_group() as join, said.open("wb") as log:
        command = ["unshare", *namespaces, "--fork", "--kill-child", "sh", "-c", START]
        options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "preexec_fn": join}
        with Process(command, env={**os.environ, **names}, **options) as outer:
            try:
                wait_until(lambda: STARTED in said.read_text() or outer.poll() is not None, "systemd")
                if outer.returncode is not None:
                    pytest.skip(f"no systemd can run here: {said.read_text()}")
                manager = ServiceManager(mount_registry.children(outer.pid)[0])
                socket = Path(f"/proc/{manager.process}/root/run/systemd/private")
                wait_until(socket.exists, "systemd")
                yield manager
            finally:
                outer.kill()


@contextlib.contextmanager
def own_group() -> Iterator[Callable[[], object]]:
    """Yield the function by which a process moves into a control group of its own; the group goes at the end."""
    groups = [
        Path(os.fsdecode(mounted.path)) / f"wdsfs-tests-{os.getpid()}"
        for mounted in mount_table.mounts()
        if mounted.fstype == "cgroup2" or (mounted.fstype == "cgroup" and "name=systemd" in mounted.super_options)
    ]
    try:
        try:
            for group in groups:
                group.mkdir()
        except OSError as error:
            pytest.skip(f"no systemd can run here: {error}")
        yield lambda: [(group / "cgroup.procs").write_text("0") for group in groups]
    finally:
        for group in groups:
            wait_until(partial(remove_group, group), "the end of all processes of systemd")


def remove_group(group: Path) -> bool:
    """Remove a control group and those below it; returns False while there are processes in it."""
    try:
        for below, _, _ in os.walk(group, topdown=False):
            os.rmdir(below)
    except OSError:
        return False
    return True
