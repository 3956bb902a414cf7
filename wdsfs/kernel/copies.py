"""The copies that the kernel reads in the place of shards: if they are as they were, and of which shards."""

from __future__ import annotations

import os

from wdsfs.errors import WdsfsError
from wdsfs.storage import unpack_cache
from wdsfs.storage.held_files import HeldFile


def is_unpacked(copy: str) -> bool:
    """True for the copy (a path) of a compressed shard; else it is that of a remote one."""
    return copy.rpartition(".")[2] in unpack_cache.COPIES


def is_sound(fd: int, copy: HeldFile) -> bool:
    """True if an open file is this copy, all of which is there, and nobody has written into it. Raises OSError."""
    found = os.fstat(fd)
    if (found.st_size, found.st_ino) != (copy.size, copy.inode):
        return False
    if is_unpacked(copy.path):
        return unpack_cache.is_as_made(found)
    from wdsfs.remote.cache_directory import is_certified

    return is_certified(copy.path, fd)


def is_damaged(copy: HeldFile) -> bool:
    """True if the copy is where it was, but somebody has written into it, or its bytes were found to be wrong."""
    try:
        fd = os.open(copy.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return os.fstat(fd).st_ino == copy.inode and not is_sound(fd, copy)
    except OSError:
        return True
    finally:
        os.close(fd)


def is_there(copy: HeldFile) -> bool:
    """True if the copy is where it was."""
    try:
        return os.stat(copy.path).st_ino == copy.inode
    except OSError:
        return False


def is_of(shard: str, copy: str) -> bool:
    """True if what is at the path of a shard now is what this copy (a path) was made of.

    Of a remote shard, what was there when its store was asked last, by anybody.
    """
    if "://" in shard:
        return _is_of_object(shard, copy)
    try:
        return _stem(copy) == unpack_cache.key_of(os.fsencode(shard), os.stat(shard))
    except OSError:
        return False


def _is_of_object(url: str, copy: str) -> bool:
    from wdsfs.remote import cache_directory, object_cache

    try:
        cache = object_cache.cache()
    except WdsfsError:
        return True  # nothing else is known
    if cache.is_gone(url):
        return False
    known = cache.pin_of(url)
    if known is None:
        return True
    pin, _ = known
    if is_unpacked(copy):
        return _stem(copy) == unpack_cache.key_of_object(os.fsencode(url), pin.fingerprint(url))
    return _stem(copy) == cache_directory.key_of(url, pin)


def _stem(copy: str) -> str:
    return os.path.basename(copy).partition(".")[0]
