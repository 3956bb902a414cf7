"""Bytes that come once and in order, from a program or the standard input -> a complete object in the cache.

They wait in a file without a name, in the directory of the cache, until all have come: only then size and hash are
known, which make the pin. Such an object has to be in the cache as a whole, so others go for it, however recently
they were used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from io import BufferedIOBase
from typing import IO, NamedTuple

from wdsfs import trust
from wdsfs.errors import UnreadableShard
from wdsfs.remote.object_cache import ObjectCache
from wdsfs.remote.urls import Pin

PIECE = 8 << 20  # bytes that are copied at a time


class Spooled(NamedTuple):
    """What has come."""

    file: IO[bytes]
    size: int  # bytes
    digest: str

    def pin(self, version: str = "") -> Pin:
        """The pin: equal output is the same object, so its index is found again."""
        return Pin(self.size, 0, f'"{self.digest}"', version)


def spool(cache: ObjectCache, shown: str, source: BufferedIOBase) -> Spooled:
    """Read all that comes. Raises UnreadableShard if the cache has no room for so much."""
    digest, size = hashlib.blake2b(digest_size=16), 0
    try:
        trust.directory(cache.directory, create=True)
        limit = cache.room.most()
        file = tempfile.TemporaryFile(dir=cache.directory)  # noqa: SIM115, for the caller
        with contextlib.ExitStack() as stack:
            stack.callback(file.close)
            while piece := source.read1(PIECE):
                size += len(piece)
                if size > limit:
                    raise _no_room(shown, size, limit)
                digest.update(piece)
                file.write(piece)
            file.flush()
            stack.pop_all()
    except OSError as error:
        raise _refused(cache, shown, error) from None
    return Spooled(file, size, digest.hexdigest())


def keep(cache: ObjectCache, shown: str, pin: Pin, spooled: Spooled) -> None:
    """Put what has come into the cache. Raises UnreadableShard if that has no room for it."""
    try:
        with contextlib.closing(cache.open(shown, pin)) as cached:
            for begin, end in cached.missing(0, pin.size):
                for offset in range(begin, end, PIECE):
                    piece = os.pread(spooled.file.fileno(), min(PIECE, end - offset), offset)
                    if not cached.put(offset, piece, is_needed=True):
                        raise _no_room(shown, pin.size, cache.room.most())
    except OSError as error:
        raise _refused(cache, shown, error) from None


def _no_room(shown: str, size: int, limit: int) -> UnreadableShard:
    return UnreadableShard(
        f"{shown}: at least {size:,} bytes come, and the cache has room for {limit:,}: --cache-size, or "
        "WDSFS_CACHE_DIR on another disk, gives it more"
    )


def _refused(cache: ObjectCache, shown: str, error: OSError) -> UnreadableShard:
    return UnreadableShard(f"{shown}: cannot be kept in the cache {str(cache.directory)!r}: {error.strerror}")
