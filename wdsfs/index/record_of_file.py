"""Reads one shard to make its record: a file once nobody writes to it, a remote shard by ranges.

A remote shard is read from header to header: ahead in order, or by hops, whichever takes less time. A hop costs
the latency of a request, and bytes cost the bandwidth of the network, which all shards that are indexed at the
same time share. Where headers are close together, everything is fetched ahead, in large parts, into the cache;
where members are large, their content is left out. The distances so far decide, again and again.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from wdsfs import source
from wdsfs.door.shard_door import DOOR, OpenShard, failure_of, fingerprint_of
from wdsfs.door.urls import is_remote
from wdsfs.errors import StaleShard, UnreadableShard
from wdsfs.index import record_builder
from wdsfs.names import PLAIN, Reading
from wdsfs.shards import Fingerprint, wait_for_tick
from wdsfs.source import TarBytes, open_beside
from wdsfs.tar import compressed, streams
from wdsfs.tar.problems import Problem

if TYPE_CHECKING:
    from wdsfs.door.remote_side import OpenObject

START = 256 << 10  # bytes that the first request brings: some headers, to decide by
WINDOW = 128 << 20  # bytes that are fetched ahead
PARALLEL_MIN = 5 << 20  # bytes of the rest of a shard, from which on several requests bring it
# What the network brings within the latency of a request (20 ms at 500 MB/s).
BYTES_PER_HOP = 10 << 20


class ScanReader:
    """A remote shard, or another `source.TarReader`, for a scan.

    `together` is how many shards are scanned at the same time.
    """

    def __init__(self, tar: OpenObject, together: int = 1) -> None:
        self.size = tar.size
        self._tar, self._gap_max = tar, BYTES_PER_HOP // together
        self._hops = self._last_hop = 0  # reads that went on, and where the last of them began
        self._ahead = START  # up to where it is fetched, or under way

    def pread(self, size: int, offset: int, /) -> bytes:
        if offset > self._last_hop:
            self._hops, self._last_hop = self._hops + 1, offset
            if offset // self._hops <= self._gap_max and offset + WINDOW // 2 > self._ahead:
                begin, self._ahead = max(offset, self._ahead), offset + WINDOW
                if begin < self.size:
                    self._tar.will_need(begin, self._ahead, in_parallel=self.size - begin > PARALLEL_MIN)
        return self._tar.pread(size, offset)

    def close(self) -> None:
        self._tar.close()


class ToScan(NamedTuple):
    """An open shard, the tar in it (`compressed.Opened`), and the reader of the tar for a scan."""

    shard: OpenShard
    content: compressed.Opened
    reader: TarBytes


@contextlib.contextmanager
def opened_to_scan(
    path: bytes, together: int = 1, open_file: Callable[[bytes], OpenShard] = DOOR.open_shard
) -> Iterator[ToScan]:
    """Open the shard at `path`; `together` remote shards are scanned at a time. Raises ShardErrors, OSErrors."""
    shard = open_file(path)
    try:
        if not isinstance(shard, int):
            shard.pread(START, 0)  # in one request; smaller reads would look like a pass over the shard
        elif not stat.S_ISREG(os.fstat(shard).st_mode):
            raise _no_file(path)
        with compressed.open_tar(shard, path) as content:
            reader = content.source
            if reader is shard and not isinstance(shard, int):
                reader = ScanReader(shard, together)
            yield ToScan(shard, content, reader)
    finally:
        source.close(shard)


def _no_file(path: bytes) -> UnreadableShard:
    return UnreadableShard(f"{os.fsdecode(path)}: is not a regular file")


PATIENCE_SECONDS, PAUSE_SECONDS = 10.0, 0.2  # how long to wait for a shard that is being written, and how often


def build_file(
    path: bytes,
    reading: Reading = PLAIN,
    open_file: Callable[[bytes], OpenShard] = DOOR.open_shard,
    together: int = 1,
) -> bytes:
    """Return the record of the shard at `path`, with the options `reading`; `open_file` opens it.

    `together` is how many remote shards are read at the same time. Raises MissingShard or UnreadableShard, also
    for a shard that is written to for longer than `PATIENCE_SECONDS`. A damaged shard gives a record.
    """
    if is_remote(path):
        return _build_remote(path, reading, open_file, together)
    try:
        return _build_when_quiet(path, reading, open_file)
    except OSError as error:
        raise UnreadableShard(f"{os.fsdecode(path)}: {error.strerror}") from None


def _build_when_quiet(path: bytes, reading: Reading, open_file: Callable[[bytes], OpenShard]) -> bytes:
    """Read the shard until it does not change meanwhile."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        fd, before = _opened_after_tick(path, open_file)
        assert isinstance(fd, int)
        try:
            with contextlib.suppress(StaleShard), compressed.open_tar(fd, path) as (tar, problem, kind):
                data = record_builder.build(tar, before, problem, reading, kind)
                if Fingerprint.of(os.fstat(fd)) == before:
                    return data
        finally:
            source.close(fd)
        _wait_for_writer(path, deadline)


def _opened_after_tick(path: bytes, open_file: Callable[[bytes], OpenShard]) -> tuple[OpenShard, Fingerprint]:
    """Return a shard, open, and the fingerprint that no other file at its path can have from now on."""
    with contextlib.ExitStack() as opened:
        fd = open_file(path)
        opened.callback(source.close, fd)
        assert isinstance(fd, int)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _no_file(path)
        if not wait_for_tick(status):
            opened.pop_all()
            return fd, Fingerprint.of(status)
    return open_file(path), Fingerprint.of(status)


def _build_remote(path: bytes, reading: Reading, open_file: Callable[[bytes], OpenShard], together: int) -> bytes:
    """Read a remote shard; an open one never changes, and is opened again when its store has a new version."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            with opened_to_scan(path, together, open_file) as (shard, (_, problem, kind), tar):
                problem = _failure(shard) or problem
                return record_builder.build(tar, fingerprint_of(shard), problem, reading, kind)
        except StaleShard as error:
            if time.monotonic() > deadline:
                raise UnreadableShard(f"{error}, each time it is read; try again when it is complete") from None
            time.sleep(PAUSE_SECONDS)
            DOOR.look_again(path)
        except OSError as error:
            raise UnreadableShard(f"{os.fsdecode(path)}: {error.strerror}") from None


def _failure(shard: OpenShard) -> Problem | None:
    text = failure_of(shard)
    return Problem(-1, "truncated", f"{text}; only the part that has arrived is shown") if text else None


def _wait_for_writer(path: bytes, deadline: float) -> None:
    if time.monotonic() > deadline:
        raise UnreadableShard(f"{os.fsdecode(path)}: is being written; try again when it is finished")
    time.sleep(PAUSE_SECONDS)


# Semantics decision: a new file that is damaged, or has no end yet, may be one that is being written, until it has
# not changed for this time. Of a compressed one the end cannot be seen, so it has to rest first.
SETTLED_SECONDS, RESTED_SECONDS = 30.0, 5.0
AHEAD_SECONDS = 60.0  # a time that is further ahead of this clock proves nothing
BEING_WRITTEN = (
    f"a program may be writing it, so it is shown when it is complete or has not changed for {SETTLED_SECONDS:g} s"
)
END = bytes(1024)  # of a complete tar


def rest_of(path: bytes) -> float | None:
    """Return how long (s) to wait before reading a file; None if it can be read now."""
    try:
        with open_beside(path) as file:  # stat does not wait for the writer of a pipe
            size = os.fstat(file.fileno()).st_size
            if streams.compression(os.pread(file.fileno(), 512, 0)) is not None:
                return _seconds_to_wait(path, RESTED_SECONDS)
            is_ended = size >= len(END) and os.pread(file.fileno(), len(END), size - len(END)) == END
    except OSError:
        return None  # indexing it gives the error
    return None if is_ended else _seconds_to_wait(path, SETTLED_SECONDS)


def settles_in(path: bytes) -> float | None:
    """Return the time (s) until an incomplete file counts as damaged; None if it does so now."""
    return None if is_remote(path) else _seconds_to_wait(path, SETTLED_SECONDS)


def _seconds_to_wait(path: bytes, seconds: float) -> float | None:
    try:
        age = time.time() - os.stat(path).st_mtime
    except OSError:
        return None
    return seconds - age if -AHEAD_SECONDS < age < seconds else None
