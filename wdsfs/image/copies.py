"""The copies that the kernel reads in the place of shards: if they are as they were, and of which shards."""

from __future__ import annotations

import os

from wdsfs.storage import unpack_cache
from wdsfs.storage.held_files import HeldFile


def is_sound(fd: int, copy: HeldFile) -> bool:
    """True if an open file is this copy, and nobody has written into it. Raises OSError."""
    found = os.fstat(fd)
    return (found.st_size, found.st_ino) == (copy.size, copy.inode) and unpack_cache.is_as_made(found)


def is_there(copy: HeldFile) -> bool:
    """True if the copy is where it was."""
    try:
        return os.stat(copy.path).st_ino == copy.inode
    except OSError:
        return False


def is_of(shard: str, copy: str) -> bool:
    """True if what is at the path of a shard now is what this copy (a path) was made of."""
    try:
        return _stem(copy) == unpack_cache.key_of(os.fsencode(shard), os.stat(shard))
    except OSError:
        return False


def _stem(copy: str) -> str:
    return os.path.basename(copy).partition(".")[0]
