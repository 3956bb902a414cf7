"""Copies that the kernel can read in the place of shards that are no plain tars of this machine.

The copy of a compressed shard is its unpacked file in the cache. The copy of a remote shard is its file in the
cache of remote objects, which has to be complete. The cache does not evict a copy while `LocalCopies` has it open,
nor afterwards while a mount reads it (`storage/held_files.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from wdsfs.errors import CorruptShard, UnreadableShard
from wdsfs.remote import shard_paths
from wdsfs.remote.shard_paths import is_remote
from wdsfs.storage import file_cache
from wdsfs.storage.held_files import HeldFile
from wdsfs.tar import compressed
from wdsfs.tree.shard_set import ShardSet, indexed


class LocalCopies:
    """Copies by the paths of their shards, open until `close`."""

    def __init__(self) -> None:
        self.files: dict[bytes, HeldFile] = {}
        self._closing: list[Callable[[], None]] = []

    def add(self, shard: bytes, path: str, fd: int, close: Callable[[], None]) -> None:
        """Add a copy that is open as `fd`."""
        self._closing.append(close)
        found = os.fstat(fd)
        self.files[shard] = HeldFile(path, found.st_size, found.st_ino)

    def close(self) -> None:
        """Close them. Only those that a mount reads are held from then on. Idempotent."""
        while self._closing:
            self._closing.pop()()


def wanted(lower: ShardSet) -> dict[bytes, str | None]:
    """The shards that the set, and whatever it is joined with, needs copies of: compression by path.

    Raises ShardErrors.
    """
    found: dict[bytes, str | None] = {}
    for below in lower.sources:
        for number, shard in enumerate(below.shards):
            kind = indexed(below.record, number).compression
            if kind is not None or is_remote(shard.path):
                found[shard.path] = kind
    return found


def held(shards: Mapping[bytes, str | None], on_shard: Callable[[], None]) -> LocalCopies:
    """The copies of these shards, held; what is not unpacked, or has been changed since, is unpacked here.

    `on_shard` is called after each of them. Raises ShardErrors, of which CorruptShard is for a copy whose bytes
    were wrong.
    """
    packed = {path: kind for path, kind in shards.items() if kind is not None}
    _refuse_more_than_the_cache([path for path in packed if not is_remote(path)])
    found = LocalCopies()
    try:
        _unpack(packed, found, on_shard)
        _hold_objects([path for path in shards if path not in packed], found, on_shard)
    except BaseException:
        found.close()
        raise
    return found


def _unpack(shards: Mapping[bytes, str], found: LocalCopies, on_shard: Callable[[], None]) -> None:
    with _threads() as threads:
        waiting = [threads.submit(compressed.held_copy, kind, path) for path, kind in shards.items()]
        for path, one in zip(shards, waiting, strict=True):
            copy = one.result()
            found.add(path, copy.path, copy.fd, copy.close)
            on_shard()


def _hold_objects(shards: list[bytes], found: LocalCopies, on_shard: Callable[[], None]) -> None:
    if not shards:
        return
    objects = []
    for path in shards:
        one = shard_paths.whole_in_cache(path)
        place = one.hold()
        if place is None:
            one.close()
            raise UnreadableShard(f"{os.fsdecode(path)} has just been evicted from the cache")
        found.add(path, place, one.fd, one.close)
        objects.append(one)
    # Afterwards: what was marked just now is compared once it has settled.
    with _threads() as threads:
        waiting = [threads.submit(one.certify) for one in objects]
        for path, certified in zip(shards, waiting, strict=True):
            if not certified.result():
                raise CorruptShard(
                    f"{os.fsdecode(path)}: some of its bytes in the cache were damaged, and are dropped; "
                    "`wdsfs fetch` brings them again"
                )
            on_shard()


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """One for each processor; what has not begun does not begin any more after an exception."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        try:
            yield threads
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise


def _refuse_more_than_the_cache(shards: list[bytes]) -> None:
    """Raise UnreadableShard if the copies cannot all be in the cache, as far as that is known beforehand."""
    limit = file_cache.cache().room.most()
    packed = sum(os.stat(path).st_size for path in shards)
    if packed > limit:
        raise UnreadableShard(
            f"the compressed shards have {packed:,} bytes, and unpacked they have to be in the cache all at once, "
            f"which holds {limit:,}; --cache-size gives it more room"
        )
