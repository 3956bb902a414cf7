"""The shards below one mount of an image, held open, and watched for changes: by leases, or by their times.

With a read lease (fcntl(2), F_SETLEASE) a program that opens a shard for writing, or truncates it, waits until the
lease is given up. Where a file system has no leases, the times of the shard are compared.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import select
from collections.abc import Sequence
from pathlib import Path

from wdsfs import mount_calls
from wdsfs.errors import MountError
from wdsfs.image.opened import OpenDevice, close_devices

SUPERBLOCKS = Path("/sys/fs/erofs")  # a directory for each superblock, as long as somebody uses it
_OWN_FILES = 64  # descriptors besides those of shards


def superblocks() -> set[str]:
    """The names of all EROFS file systems that are mounted or still in use."""
    try:
        return set(os.listdir(SUPERBLOCKS)) - {"features"}
    except OSError:
        return set()


def raise_file_limit(shards: int) -> None:
    """Let this process have so many shards open, besides its own files. Raises MountError."""
    wanted = shards + _OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(wanted, hard)))
        except (OSError, ValueError):
            raise MountError(
                f"{wanted:,} files have to be open for a moment, and {hard:,} are allowed; see: ulimit -n"
            ) from None


class HeldShards:
    """These shards, which belong to it now.

    `superblocks` are the names of those that the mount may have: for a process without inotify, and for the next
    guard. `deadline`: until when a writer waits for files of an ended mount that are still open.
    """

    def __init__(self, devices: Sequence[OpenDevice]) -> None:
        self.devices = devices
        self.superblocks: set[str] = set()
        self.deadline: float | None = None
        self.leased: list[OpenDevice] = []
        self._watched: list[tuple[OpenDevice, int]] = []  # with the ctime (ns) that they had
        self.ending: int | None = None  # the descriptor that is readable when the mount has ended
        self._has_ended = False

    def take_leases(self) -> None:
        """Have every later writer wait for this process. Raises MountError for a shard that is being written.

        Compare the shards afterwards: one may have been written before its lease was taken.
        """
        for one in self.devices:
            try:
                fcntl.fcntl(one.fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
                self.leased.append(one)
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    raise MountError(f"{os.fsdecode(one.path)}: a program has it open for writing") from None
                self._watched.append((one, os.fstat(one.fd).st_ctime_ns))

    def without_lease(self) -> list[str]:
        """The shards whose times have to be compared."""
        return [os.fsdecode(one.path) for one, _ in self._watched]

    def changing(self) -> list[str]:
        """The shards that somebody is about to write, or has written."""
        found = [one for one in self.leased if fcntl.fcntl(one.fd, fcntl.F_GETLEASE) != fcntl.F_RDLCK]
        found += [one for one, ctime_ns in self._watched if os.fstat(one.fd).st_ctime_ns != ctime_ns]
        return [os.fsdecode(one.path) for one in found]

    def watch_mount(self, mountpoint: str, device: int, own: set[str]) -> None:
        """Notice the end of the mount of these shards; it has this `st_dev`, and `own` as `superblocks`."""
        self.superblocks = own
        try:
            self.ending = mount_calls.end_of_use(mountpoint)
            if os.stat(mountpoint).st_dev != device:
                self._stop_watching()
        except OSError:
            self._stop_watching()  # without inotify; or the mount is gone already

    def is_used(self) -> bool:
        """True while a program has files of the mount open, or another namespace has the mount."""
        if self.ending is None:
            return not self._has_ended and bool(self.superblocks & superblocks())
        poller = select.poll()
        poller.register(self.ending, select.POLLIN)
        if poller.poll(0):
            self._has_ended = True
            self._stop_watching()
        return not self._has_ended

    def _stop_watching(self) -> None:
        if self.ending is not None:
            os.close(self.ending)
            self.ending = None

    def close(self) -> None:
        """Give up the leases and close the shards."""
        self._stop_watching()
        close_devices(self.devices)
        self.devices, self.leased, self._watched = [], [], []
