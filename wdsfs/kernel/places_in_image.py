"""Reads an image back: where the bytes of a file are, by its inode number, which the kernel shows as `st_ino`."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from wdsfs.errors import MountError
from wdsfs.kernel import erofs

_CHUNKS_READ = 4096  # indexes of chunks that are read at a time


class ImageInode(NamedTuple):
    """An inode of an image.

    `device` and `offset` are the place of its first byte that is stored: the number of the shard (0: the image
    itself; None: no byte is stored, or its shard is missing), and the byte in it.
    """

    mode: int
    size: int
    device: int | None
    offset: int


class ImagePlaces:
    """Reads the image at `path`. Raises MountError if it is no image, or is damaged; OSError."""

    def __init__(self, path: bytes) -> None:
        self._name = os.fsdecode(path)
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        found = erofs.parsed_super_block(os.pread(self._fd, erofs.SUPER_SIZE, erofs.SUPER_OFFSET))
        if found is None:
            os.close(self._fd)
            raise MountError(f"{self._name}: is no image of wdsfs")
        self._super = found
        self._devices = found.devices

    def close(self) -> None:
        os.close(self._fd)

    def inode(self, number: int) -> ImageInode:
        """The inode with this number. Raises MountError, OSError."""
        at = self._super.metadata * erofs.BLOCK + number * erofs.SLOT
        found = erofs.parsed_inode(os.pread(self._fd, erofs.EXTENDED_SIZE, at))
        if found is None:
            raise MountError(f"{self._name}: has no inode {number}")
        if not found.size or stat.S_ISDIR(found.mode):
            return ImageInode(found.mode, found.size, None, 0)
        if found.content == erofs.CHUNKS:
            for nth, (device, block) in enumerate(self._chunks(found, at + found.length)):
                if block != erofs.NO_BLOCK:
                    is_there = device <= self._devices
                    return ImageInode(found.mode, found.size, device if is_there else None, block * erofs.BLOCK)
                if nth >= erofs.CHUNKS_LOOKED_AT:
                    break
            return ImageInode(found.mode, found.size, None, 0)
        inline = found.content == erofs.INLINE and found.size < erofs.BLOCK
        return ImageInode(found.mode, found.size, 0, at + found.length if inline else found.address * erofs.BLOCK)

    def _chunks(self, inode: erofs.ParsedInode, at: int) -> Iterator[tuple[int, int]]:
        """Device and block of each chunk of a file, whose indexes begin at byte `at`."""
        left = erofs.chunk_count(inode)
        while left:
            data = os.pread(self._fd, min(left, _CHUNKS_READ) * erofs.CHUNK_SIZE, at)
            if len(data) < erofs.CHUNK_SIZE:
                raise MountError(f"{self._name}: the image is not whole; make it anew with: wdsfs image")
            found = list(erofs.parsed_chunks(data))
            yield from found
            left, at = left - len(found), at + len(found) * erofs.CHUNK_SIZE
