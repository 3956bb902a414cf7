"""The record of a shard file: waits until nobody writes to it, reads it, packs what it has found."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable

from wdsfs.errors import StaleShard, UnreadableShard
from wdsfs.index import record_builder
from wdsfs.index.hints import reading_ahead
from wdsfs.reading import PLAIN, Reading
from wdsfs.storage.identity import fingerprint_of
from wdsfs.storage.source import open_shard
from wdsfs.tar import compressed

PATIENCE_SECONDS, PAUSE_SECONDS = 10.0, 0.2  # how long to wait for a shard that is being written, and how often
TICK_NS = 20_000_000  # no clock of the kernel that gives files their times is coarser


def build_file(path: bytes, reading: Reading = PLAIN, open_file: Callable[[bytes], int] = open_shard) -> bytes:
    """The record of the shard at `path`, read so; `open_file` gives a descriptor of it.

    Raises MissingShard or UnreadableShard when there is nothing to read, or when it is being written for longer
    than one cares to wait; a damaged shard gives a record.
    """
    fd = open_file(path)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise UnreadableShard(f"{os.fsdecode(path)}: is no regular file")
        with reading_ahead(fd, path):
            return _build_when_quiet(fd, path, reading)
    except OSError as error:
        raise UnreadableShard(f"{os.fsdecode(path)}: {error.strerror}") from None
    finally:
        os.close(fd)


def _build_when_quiet(fd: int, path: bytes, reading: Reading) -> bytes:
    """A shard that is still being written changes while it is read: what counts is a quiet pass."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        found = os.fstat(fd)
        before = fingerprint_of(found)
        wait_for_tick(found)
        with contextlib.suppress(StaleShard), compressed.opened(fd, path) as (source, problem):
            data = record_builder.build(source, list(before), problem, reading)
            if fingerprint_of(os.fstat(fd)) == before:
                return data
        if time.monotonic() > deadline:
            raise UnreadableShard(f"{os.fsdecode(path)}: is being written; try again when it is finished")
        time.sleep(PAUSE_SECONDS)


def wait_for_tick(found: os.stat_result) -> None:
    """Wait until one more write to a file would show in its times: within the tick of the last it would not."""
    if 0 <= time.time_ns() - found.st_ctime_ns < TICK_NS:
        time.sleep(TICK_NS / 1e9)
