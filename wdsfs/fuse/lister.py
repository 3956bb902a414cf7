"""Listings of samples that the kernel keeps before a client asks for them.

The kernel keeps a listing that a client has read to its end, and there is no message that gives it one. So the
lister is a client of its own mount. It is never waited for, and lists for some milliseconds at a time: where it
may not have a detached mount, a directory that it has open keeps the mount busy.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from wdsfs import mount_table
from wdsfs.fuse.passes import Passes
from wdsfs.inodes import index_of, unpack
from wdsfs.tree.tree import LowerTree, folder_path

THREADS = 4  # that list at a time, since each waits for a worker twice for each sample
# Of a descriptor of the lister. No other program opens a directory with O_DSYNC, and the kernel passes it on.
FLAG = os.O_DSYNC
SWITCH_SECONDS = 50e-6  # after which a thread that runs has to let one go on that was answered
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | FLAG


class Sample(NamedTuple):
    """The directory of a sample: its inode number, and its path below the top of the mount."""

    inode: int
    path: bytes


class Lister:
    """Lists samples of a tree by its mount, which has this mount point and device number."""

    def __init__(self, tree: LowerTree, passes: Passes, mountpoint: str, device: int) -> None:
        self.tree, self.passes = tree, passes
        self._mountpoint, self._device = mountpoint, device
        self._threads = ThreadPoolExecutor(THREADS)
        sys.setswitchinterval(SWITCH_SECONDS)
        self._busy: list[Future[None]] = []

    @property
    def busy(self) -> bool:
        """True while samples are listed."""
        return not all(future.done() for future in self._busy)

    def samples(self, inodes: range) -> list[Sample]:
        """Return the directories of the samples among these inodes of one shard.

        Raises NotIndexed, ShardErrors.
        """
        tag, number, where = unpack(inodes[0])
        record, base = self.tree.lower.record(number, tag), inodes[0] - index_of(where)
        folders: dict[int, bytes] = {}
        samples = []
        for inode in inodes:
            if inode >= base + record.entries:
                break
            parent, name = self.tree.places(inode)[0]
            if parent not in folders:
                folders[parent] = folder_path(self.tree, parent)
            samples.append(Sample(inode, folders[parent] + name))
        return samples

    def list(self, samples: Sequence[Sample]) -> None:
        """List samples, in threads."""
        parts = [samples[at::THREADS] for at in range(min(THREADS, len(samples)))]
        self._busy = [self._threads.submit(self._list, part) for part in parts]
        self.passes.listed(len(samples))

    def _list(self, samples: Sequence[Sample]) -> None:
        with contextlib.suppress(OSError):  # the mount is gone
            top = mount_table.detached(self._mountpoint)
            try:
                if os.fstat(top).st_dev == self._device:  # else something else is mounted there
                    for sample in samples:
                        _list(top, sample.path)
            finally:
                os.close(top)


def _list(top: int, path: bytes) -> None:
    """Read a listing to its end. What cannot be listed is left to the clients."""
    with contextlib.suppress(OSError):
        folder = os.open(path, _FOLDER, dir_fd=top)
        try:
            os.listdir(folder)
        finally:
            os.close(folder)
