"""Copies of shards that the kernel can read, of those that are no plain tars of this machine.

Of a compressed shard that is its unpacked copy in the cache. Copies are held against eviction: by whoever has them
open here, and then by the mount that reads them (`storage/held_files.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from wdsfs.dataset.indexing import indexed
from wdsfs.dataset.shard_set import ShardSet
from wdsfs.errors import UnreadableShard
from wdsfs.storage import unpack_cache
from wdsfs.storage.held_files import HeldFile
from wdsfs.tar import compressed


class LocalCopies:
    """Copies by the paths of their shards, open until `close`."""

    def __init__(self) -> None:
        self.files: dict[bytes, HeldFile] = {}
        self._fds: list[int] = []

    def add(self, shard: bytes, path: str, fd: int) -> None:
        """Add a copy; its descriptor belongs to this object now."""
        self._fds.append(fd)
        found = os.fstat(fd)
        self.files[shard] = HeldFile(path, found.st_size, found.st_ino)

    def close(self) -> None:
        """Close them. Only those that a mount reads are held from then on. Idempotent."""
        while self._fds:
            os.close(self._fds.pop())


def wanted(lower: ShardSet) -> dict[bytes, str]:
    """The shards that the set, and whatever it is joined with, needs as copies of: compression by path.

    Raises ShardErrors.
    """
    found: dict[bytes, str] = {}
    for below in lower.sources:
        for number, shard in enumerate(below.shards):
            kind = indexed(below.record, number).compression
            if kind is not None:
                found[shard.path] = kind
    return found


def held(shards: Mapping[bytes, str], on_shard: Callable[[], None]) -> LocalCopies:
    """The copies of these shards, held; what is not unpacked, or has been changed since, is unpacked here.

    `on_shard` is called after each of them. Raises ShardErrors.
    """
    _refuse_more_than_the_cache(list(shards))
    found = LocalCopies()
    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            waiting = [threads.submit(compressed.held_copy, kind, path) for path, kind in shards.items()]
            try:
                for path, one in zip(shards, waiting, strict=True):
                    copy = one.result()
                    found.add(path, copy.path, copy.fd)
                    on_shard()
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise
    except BaseException:
        found.close()
        raise
    return found


def _refuse_more_than_the_cache(shards: list[bytes]) -> None:
    """Raise UnreadableShard if the copies cannot all be in the cache, as far as that is known beforehand."""
    limit = unpack_cache.cache().limit
    packed = sum(os.stat(path).st_size for path in shards)
    if packed > limit:
        raise UnreadableShard(
            f"the compressed shards have {packed:,} bytes, and unpacked they have to be in the cache all at once, "
            f"which holds {limit:,}; --cache-size gives it more room"
        )
