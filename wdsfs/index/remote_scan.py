"""Reads a remote shard from header to header: fetched ahead in order, or by hops, whichever takes less time.

A hop costs the latency of a request, and bytes cost the bandwidth of the network, which all shards that are read
at the same time share. So where headers are close together, everything is fetched ahead, in large parts that go to
the cache; where members are large, their content is left out. The distances so far decide, again and again.
"""

from __future__ import annotations

from typing import Protocol

from wdsfs.remote.shard_paths import OpenShard
from wdsfs.storage.source import TarBytes, TarReader

START = 256 << 10  # bytes that the first request brings: some headers, to decide by
WINDOW = 128 << 20  # bytes that are fetched ahead
# What the network brings within the latency of a request (20 ms at 500 MB/s).
BYTES_PER_HOP = 10 << 20


class RemoteReader(TarReader, Protocol):
    """The part of a `RemoteTar` that a scan uses."""

    def will_need(self, begin: int, end: int) -> None: ...


class ScanReader:
    """A remote shard (or what reads like one) for a scan, as `source.TarReader`.

    `together` is how many shards are scanned at the same time.
    """

    def __init__(self, tar: RemoteReader, together: int = 1) -> None:
        self.size = tar.size
        self._tar, self._gap_max = tar, BYTES_PER_HOP // together
        self._hops = self._front = 0  # reads that went on, and where the last of them began
        self._ahead = START  # up to where it is fetched, or under way

    def pread(self, size: int, offset: int, /) -> bytes:
        if offset > self._front:
            self._hops, self._front = self._hops + 1, offset
            if offset // self._hops <= self._gap_max and offset + WINDOW // 2 > self._ahead:
                begin, self._ahead = max(offset, self._ahead), offset + WINDOW
                if begin < self.size:
                    self._tar.will_need(begin, self._ahead)
        return self._tar.pread(size, offset)

    def close(self) -> None:
        self._tar.close()


def begin(shard: OpenShard) -> None:
    """Have the start of a shard fetched in one request; smaller reads there would look like a pass over it all."""
    if not isinstance(shard, int):
        shard.pread(START, 0)


def reader_of(shard: OpenShard, tar: TarBytes, together: int = 1) -> TarBytes:
    """Return what a scan reads of a shard that is open. `tar` is what is read of it else."""
    return ScanReader(shard, together) if tar is shard and not isinstance(shard, int) else tar
