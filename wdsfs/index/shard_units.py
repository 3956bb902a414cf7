"""Shards as units of work: each worker first checks that it sees the same shard as the driver."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from wdsfs.errors import ShardError, StaleMount
from wdsfs.executors import Workers
from wdsfs.index.far_side import SeenShard, on_shard
from wdsfs.index.spread import Job, spread
from wdsfs.remote import shard_paths
from wdsfs.remote.shard_paths import is_remote
from wdsfs.shards import Fingerprint, Shard, wait_for_tick

Result = TypeVar("Result")


def divided(shards: Sequence[Shard]) -> tuple[list[Shard], list[Shard]]:
    """Divide shards into those that only this machine can read, which are outputs of commands, and all others."""
    here = [shard for shard in shards if _is_output(shard.path)]
    return here, [shard for shard in shards if not _is_output(shard.path)] if here else list(shards)


def _is_output(path: bytes) -> bool:
    return path.startswith(b"pipe:")


def each(
    workers: Workers,
    function: Callable[[Any], Result],
    shards: Sequence[Shard],
    argument: Callable[[Shard], Any],
    adopt: Callable[[Result, Fingerprint], Result],
) -> Generator[tuple[Shard, Result | ShardError], None, None]:
    """Yield each shard with `adopt(function(argument(shard)), fingerprint)`, or with the ShardError it gave.

    The fingerprint is that which the shard had here before the worker looked at it. A worker that sees another
    shard gives StaleMount. Raises as `spread`.
    """
    seen: dict[bytes, Fingerprint] = {}

    def prepare(shard: Shard) -> tuple[Callable[[Any], Any], SeenShard, Any]:
        seen_shard = seen_here(shard.path)
        seen[shard.path] = seen_shard.fingerprint
        return function, seen_shard, argument(shard)

    def again(shard: Shard, sent: tuple[Any, SeenShard, Any], error: ShardError) -> bool:
        """Return True if the shard has changed since it was looked at here."""
        return isinstance(error, StaleMount) and not sent[1].is_same(shard_paths.look_again(shard.path))

    job = Job(on_shard, prepare, lambda shard: os.fsdecode(shard.path), again)
    for shard, result in spread(workers, job, shards):
        fingerprint = seen.pop(shard.path, None)
        if isinstance(result, ShardError) or fingerprint is None:
            yield shard, result
            continue
        try:
            ours: Result | ShardError = adopt(result, fingerprint)
        except StaleMount as error:
            ours = StaleMount(f"{os.fsdecode(shard.path)}: {error}")
        yield shard, ours


def seen_here(path: bytes) -> SeenShard:
    """Return the shard at `path` as this machine sees it, for a worker to compare. Raises ShardError."""
    if not is_remote(path):
        return SeenShard(path, _settled(path))
    url = shard_paths.url_of(path)
    return SeenShard(path, shard_paths.look(path), url if url.query or url.user else None)


def _settled(path: bytes) -> Fingerprint:
    """Return the fingerprint of a file, which another write from now on changes."""
    with contextlib.suppress(OSError):  # which the fingerprint says
        wait_for_tick(os.stat(path))
    return Fingerprint.at(path)
