"""The header of an EROFS image: super block, device table, and the numbers of the format.

This module does without NumPy, because a mount imports it. `erofs_encoding.py` encodes inodes and directories.

Images use blocks of 512 bytes, as tars do, so that a member begins at a block of its shard. Everything is
little-endian. The kernel's documentation describes the format (filesystems/erofs.rst, erofs_fs.h).

An inode lies at a multiple of 32 bytes (a *slot*) of the metadata area; the number of its slot is its inode number
(`nid`). The indexes of its chunks follow at once. If its content is short (inline), the content follows, and must
not cross the end of a block.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from wdsfs.errors import ImageError, counted

BLOCK, SLOT = 512, 32
SLOTS_PER_BLOCK = BLOCK // SLOT
SUPER_OFFSET, SUPER_SIZE, DEVICE_SIZE = 1024, 128, 128
TABLE_OFFSET = SUPER_OFFSET + SUPER_SIZE  # of the device table
SUPER_MAGIC = 0xE0F5E1E2
VOLUME = b"wdsfs"
OLDEST_KERNEL = (5, 16)  # the first Linux that mounts an image over several devices
OWN_TIMES_KERNEL = (6, 15)  # the first Linux whose compact inodes have separate times
DEVICES_MAX = (1 << 16) - 2
BLOCKS_MAX = (1 << 32) - 1  # of one device, and of the image: 2 TiB
NO_BLOCK = (1 << 32) - 1  # as the address of a chunk: a hole
CHUNK_BITS_MAX = 31

# The version of the written bytes, a part of the keys of images. Count it up if the same records give other bytes.
LAYOUT = 5
COMPACT_SIZE, EXTENDED_SIZE, CHUNK_SIZE, DIRENT_SIZE = 32, 64, 8, 12
PLAIN, INLINE, CHUNKS = 0, 2, 4  # where the content of an inode is
FILE_ENTRY, DIRECTORY_ENTRY, SYMLINK_ENTRY = 1, 2, 7  # types of directory entries

_CHUNKED_FILE, _DEVICE_TABLE = 4, 8  # features that a kernel has to know
WITH_INDEXES = 0x20  # in the format of chunks: a chunk has the number of its device
_SUPER = struct.Struct("<IIIBBHQQIIII16s16sIHHHBBIQ24x")
_DEVICE = struct.Struct("<64sII56x")


def super_block(
    *, root: int, inodes: int, blocks: int, metadata: int, epoch_ns: int, identity: bytes, devices: int
) -> bytes:
    """Return the super block.

    `root` is the inode number of the top, `metadata` the block at which the metadata begins, `blocks` the size of
    the image. `epoch_ns` is the time of compact inodes, `identity` a UUID of 16 bytes.
    """
    seconds, nanoseconds = divmod(epoch_ns, 10**9)
    return _SUPER.pack(
        *(SUPER_MAGIC, 0, 0, 9, 0, root, inodes, seconds, nanoseconds, blocks, metadata, 0, identity, VOLUME),
        *(_CHUNKED_FILE | _DEVICE_TABLE, 0, devices, TABLE_OFFSET // DEVICE_SIZE, 0, 0, 0, 0),
    )


def identity(super_block: bytes) -> bytes | None:
    """Return the UUID in the super block of an image of wdsfs; None for any other bytes."""
    if len(super_block) < _SUPER.size:
        return None
    magic, *_, uuid, volume = _SUPER.unpack_from(super_block)[:14]
    return uuid if magic == SUPER_MAGIC and volume.rstrip(b"\0") == VOLUME else None


def metadata_block(devices: int) -> int:
    """Return the first block behind the device table."""
    return -(-(TABLE_OFFSET + devices * DEVICE_SIZE) // BLOCK)


def device_table(devices: Sequence[tuple[bytes, int]]) -> bytes:
    """Return the table of devices, each with a tag of up to 64 bytes and its size (bytes). Raises ImageError."""
    if len(devices) > DEVICES_MAX:
        raise ImageError(f"an image takes {DEVICES_MAX:,} shards, not {len(devices):,}; make several images")
    for tag, size in devices:
        if blocks_of(size) > BLOCKS_MAX:
            raise ImageError(f"{tag!r}: has {counted(size, 'byte')}, and EROFS takes up to 2 TiB; mount by FUSE")
    return b"".join(_DEVICE.pack(tag, blocks_of(size), 0) for tag, size in devices)


def blocks_of(size: int) -> int:
    """Return the number of blocks that hold this many bytes."""
    return -(-size // BLOCK)


def missing_device(devices: int) -> int | None:
    """Return a number that no device has, so that reading from it fails; None if there is no such number.

    The kernel looks at as many bits of the number as the largest device number needs.
    """
    return devices + 1 if devices + 1 < 1 << devices.bit_length() else None
