"""A file system that gives its files other inode numbers on request, as rclone, sshfs and FAT do now and then.

It shows the files of a directory. `renumbering` mounts it; a lookup of the name RENUMBER there does it. With
`ctimes` the ctimes are those of the files, else copies of the mtimes: most servers know no others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyfuse3
import trio

from tests.conftest import need_fuse
from tests.processes import Process, wait_until
from wdsfs import mount_table

RENUMBER = "renumber"


@contextlib.contextmanager
def renumbering(directory: Path, mountpoint: Path, *, ctimes: bool = False) -> Iterator[None]:
    """Show the files of `directory` at `mountpoint`."""
    need_fuse()
    mountpoint.mkdir()
    command = [sys.executable, "-m", "tests.renumbering", str(directory), str(mountpoint), *["ctimes"] * ctimes]
    with Process(command, cwd=Path(__file__).parent.parent) as process:
        wait_until(lambda: process.poll() is not None or mount_table.mounted_at(mountpoint), "the mount")
        try:
            yield
        finally:
            subprocess.run(["umount", "--lazy", mountpoint], check=True)
        assert process.wait() == 0


class _Files(pyfuse3.Operations):
    def __init__(self, directory: bytes, ctimes: bool) -> None:
        super().__init__()
        self._directory, self._ctimes = directory, ctimes
        self._names = [b""]  # of the inode numbers from the root's on
        self._numbers: dict[bytes, int] = {}

    def _attributes(self, number: int) -> pyfuse3.EntryAttributes:
        entry, state = pyfuse3.EntryAttributes(), os.stat(self._path(number))
        entry.st_ino, entry.st_mode, entry.st_nlink, entry.st_size = number, state.st_mode, 1, state.st_size
        entry.st_uid, entry.st_gid = state.st_uid, state.st_gid
        entry.st_atime_ns = entry.st_mtime_ns = state.st_mtime_ns
        entry.st_ctime_ns = state.st_ctime_ns if self._ctimes else state.st_mtime_ns
        entry.entry_timeout = entry.attr_timeout = 0
        return entry

    def _path(self, number: int) -> bytes:
        return os.path.join(self._directory, self._names[number - 1])

    def _number(self, name: bytes) -> int:
        if name not in self._numbers:
            self._names.append(name)
            self._numbers[name] = len(self._names)
        return self._numbers[name]

    async def lookup(self, parent: int, name: bytes, context: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        if name == os.fsencode(RENUMBER):
            self._numbers.clear()
        if name not in os.listdir(self._directory):
            raise pyfuse3.FUSEError(errno.ENOENT)
        return self._attributes(self._number(name))

    async def getattr(self, inode: int, context: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        return self._attributes(inode)

    async def opendir(self, inode: int, context: pyfuse3.RequestContext) -> int:
        return inode

    async def readdir(self, inode: int, start: int, token: pyfuse3.ReaddirToken) -> None:
        for place, name in enumerate(sorted(os.listdir(self._directory))[start:], start + 1):
            if not pyfuse3.readdir_reply(token, name, self._attributes(self._number(name)), place):
                return

    async def open(self, inode: int, flags: int, context: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=os.open(self._path(inode), os.O_RDONLY), keep_cache=False)

    async def read(self, fh: int, offset: int, size: int) -> bytes:
        return os.pread(fh, size, offset)

    async def release(self, fh: int) -> None:
        os.close(fh)


def _main(directory: str, mountpoint: str, more: Sequence[str]) -> None:
    pyfuse3.init(_Files(os.fsencode(directory), bool(more)), mountpoint, {*pyfuse3.default_options, "ro"})
    trio.run(pyfuse3.main)
    pyfuse3.close(unmount=False)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], sys.argv[3:])
