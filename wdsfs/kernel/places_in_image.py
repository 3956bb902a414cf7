"""Reads an image back: where the bytes of a file are, by its inode number, which the kernel shows as `st_ino`."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from typing import NamedTuple

from wdsfs.errors import MountError
from wdsfs.kernel import erofs

_CHUNKS_READ = 4096  # indexes of chunks that are read at a time
_CHUNKS_MAX = 1 << 20  # of a file that begins with holes, when its first piece is looked for
_CHUNK = struct.Struct("<HHI")
_COMPACT = struct.Struct("<HHHHIIIIHH4x")
_EXTENDED = struct.Struct("<HHHHQIIIIQII16x")


class _Inode(NamedTuple):
    """An inode as it is stored: `content` is PLAIN, INLINE or CHUNKS, `length` the bytes that the inode takes."""

    content: int
    mode: int
    size: int
    address: int
    length: int


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
        head = os.pread(self._fd, erofs.SUPER_SIZE, erofs.SUPER_OFFSET)
        if erofs.identity(head) is None:
            os.close(self._fd)
            raise MountError(f"{self._name}: is no image of wdsfs")
        (self._metadata,) = struct.unpack_from("<I", head, 40)
        (self._devices,) = struct.unpack_from("<H", head, 86)

    def close(self) -> None:
        os.close(self._fd)

    def inode(self, number: int) -> ImageInode:
        """The inode with this number. Raises MountError, OSError."""
        at = self._metadata * erofs.BLOCK + number * erofs.SLOT
        found = _parsed_inode(os.pread(self._fd, erofs.EXTENDED_SIZE, at))
        if found is None:
            raise MountError(f"{self._name}: has no inode {number}")
        if not found.size or stat.S_ISDIR(found.mode):
            return ImageInode(found.mode, found.size, None, 0)
        if found.content == erofs.CHUNKS:
            for nth, (device, block) in enumerate(self._chunks(found, at + found.length)):
                if block != erofs.NO_BLOCK:
                    is_there = device <= self._devices
                    return ImageInode(found.mode, found.size, device if is_there else None, block * erofs.BLOCK)
                if nth >= _CHUNKS_MAX:
                    break
            return ImageInode(found.mode, found.size, None, 0)
        inline = found.content == erofs.INLINE and found.size < erofs.BLOCK
        return ImageInode(found.mode, found.size, 0, at + found.length if inline else found.address * erofs.BLOCK)

    def _chunks(self, inode: _Inode, at: int) -> Iterator[tuple[int, int]]:
        """Device and block of each chunk of a file, whose indexes begin at byte `at`."""
        left = -(-inode.size // (erofs.BLOCK << (inode.address & (erofs.WITH_INDEXES - 1))))
        while left:
            data = os.pread(self._fd, min(left, _CHUNKS_READ) * erofs.CHUNK_SIZE, at)
            if len(data) < erofs.CHUNK_SIZE:
                raise MountError(f"{self._name}: the image is not whole; make it anew with: wdsfs image")
            found = _parsed_chunks(data)
            yield from found
            left, at = left - len(found), at + len(found) * erofs.CHUNK_SIZE


def _parsed_inode(data: bytes) -> _Inode | None:
    """The inode that begins with these bytes; None if there is none."""
    if len(data) < erofs.COMPACT_SIZE:
        return None
    form = int.from_bytes(data[:2], "little")
    if form & 1:
        if len(data) < erofs.EXTENDED_SIZE:
            return None
        _, _, mode, _, size, address, *_ = _EXTENDED.unpack_from(data)
    else:
        _, _, mode, _, size, _, address, *_ = _COMPACT.unpack_from(data)
    length = erofs.EXTENDED_SIZE if form & 1 else erofs.COMPACT_SIZE
    return _Inode(form >> 1 & 7, mode, size, address, length) if mode else None


def _parsed_chunks(data: bytes) -> list[tuple[int, int]]:
    """The device and the block of each of these indexes of chunks."""
    whole = data[: len(data) // erofs.CHUNK_SIZE * erofs.CHUNK_SIZE]
    return [(device, block) for _, device, block in _CHUNK.iter_unpack(whole)]
