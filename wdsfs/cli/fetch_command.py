"""The command `fetch`: brings whole remote shards into the cache ahead of time.

The work is the fetcher's (`remote/fetcher.py`): what is in the cache is not asked for, and a range that another
process fetches at the moment is waited for.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from wdsfs.cli.options import (
    Directory,
    cache_size_option,
    executor_option,
    json_option,
    remote_options,
    set_for_all,
    set_options,
    shards_argument,
    trust_option,
    workers_of,
)
from wdsfs.cli.output import bytes_bar, say, write_json
from wdsfs.cli.process import when_interrupted
from wdsfs.errors import CacheFull, ShardError, bytes_text, counted, several
from wdsfs.remote import shard_paths
from wdsfs.remote.shard_paths import fetch_counted, is_remote, pin_of, remote

if TYPE_CHECKING:
    from queue import SimpleQueue

    from wdsfs.cluster.engines import Workers
    from wdsfs.remote.urls import Pin
    from wdsfs.spec.expand import Shard
    from wdsfs.spec.selection import Selection

JOBS = 8  # shards at a time: small ones are a request each

log = logging.getLogger("wdsfs")


@click.command()
@shards_argument
@set_options
@click.option("-q", "--quiet", is_flag=True, help="No progress bar, no hints.")
@click.option(
    "-j",
    "--jobs",
    type=click.IntRange(1),
    help=f"Shards fetched at a time.  [default: {JOBS}]",
)
@executor_option
@click.option(
    "--index-dir",
    type=Directory(),
    envvar="WDSFS_INDEX_DIR",
    help="The index beside which the cache is.  [env WDSFS_INDEX_DIR; WDSFS_CACHE_DIR names another place]",
)
@json_option
@remote_options
@cache_size_option
@trust_option
def fetch(
    shards: tuple[str, ...],
    selection: Selection,
    quiet: bool,
    jobs: int | None,
    executor: str | None,
    index_dir: str | None,
    as_json: bool,
) -> None:
    """Bring SHARDS at URLs into the cache, each as a whole, so that reading them needs no network.

    Can be interrupted and repeated: what is in the cache is not fetched again. With --executor each shard comes
    into the cache of the worker that fetches it, which all may share (WDSFS_CACHE_DIR).

    \b
    Example:
      wdsfs fetch --cache-size 500G 's3://bucket/train-{000000..000999}.tar'
    """
    import time

    from wdsfs.remote import object_cache
    from wdsfs.spec.expand import expand

    set_for_all("WDSFS_INDEX_DIR", index_dir)
    since = time.monotonic()
    found = expand(shards, *selection)
    wanted = [shard for shard in found if is_remote(shard.path)]
    paths = [shard.path for shard in wanted]
    if len(paths) < len(found) and not quiet:
        log.info("%s on this machine: passed over", counted(len(found) - len(paths), "shard"))
    workers = workers_of(executor, jobs)
    done = _Fetch(paths).run(jobs or JOBS, quiet) if workers is None else _fetch_elsewhere(wanted, workers, quiet)
    report: dict[str, Any] = {
        "shards": len(paths),
        "local": len(found) - len(paths),
        **done,
        "seconds": round(time.monotonic() - since, 3),
        "cache": str(object_cache.cache().directory) if workers is None else None,
    }
    _say_failures(report["failed"])
    report["failed"] = {os.fsdecode(path): str(error) for path, error in report["failed"].items()}
    if as_json:
        write_json(report)
    else:
        say(*_report_lines(report))
    if report["failed"]:
        sys.exit(3)


def _report_lines(report: Mapping[str, Any]) -> tuple[str, str]:
    part = f"{report['shards'] - len(report['failed']):,} of " if report["failed"] else ""
    return (
        f"{part}{counted(report['shards'], 'shard')} in the cache, {bytes_text(report['bytes'])}: "
        f"{bytes_text(report['fetched'])} fetched, {bytes_text(report['there'])} were there before",
        f"kept in {report['cache'] or 'the caches of the workers'}",
    )


def _say_failures(failed: Mapping[bytes, ShardError]) -> None:
    too_much = [os.fsdecode(path) for path, error in failed.items() if isinstance(error, CacheFull)]
    for error in failed.values():
        if not isinstance(error, CacheFull):
            log.error("%s", error)
    if too_much:
        log.error(
            "the cache has no room for %s more (%s): give it more by --cache-size, or remove what is not "
            "needed any more by `wdsfs cache`",
            counted(len(too_much), "shard"),
            several(too_much),
        )


def _fetch_elsewhere(shards: Sequence[Shard], workers: Workers, quiet: bool) -> dict[str, Any]:
    """Have workers of a cluster fetch the shards; returns the same as `_Fetch.run`."""
    from wdsfs.index import process_pool

    failed: dict[bytes, ShardError] = {}
    size = there = 0
    total = sum(pin_of(one.path).size for one in shards)
    with when_interrupted("; what has come is kept"), bytes_bar("fetching", total, quiet) as advance:
        for one, outcome in process_pool.each(fetch_counted, shards, 1, workers):
            if isinstance(outcome, ShardError):
                failed[one.path] = outcome
            else:
                size, there = size + outcome[0], there + outcome[1]
                advance(outcome[0])
    return {"bytes": size, "fetched": size - there, "there": there, "failed": failed}


class _Fetch:
    """Fetches shards by threads, which do not hold up the end of the program when it is interrupted."""

    def __init__(self, paths: Sequence[bytes]) -> None:
        import queue  # late, as all that `wdsfs --help` has no use for

        self._paths = paths
        self._waiting = deque(paths)
        self._done: SimpleQueue[tuple[bytes, Pin | Exception]] = queue.SimpleQueue()
        self._there: dict[bytes, int] = {}  # bytes that were in the cache at the start
        self._here: dict[bytes, int] = {}  # bytes that are in the cache

    def run(self, jobs: int, quiet: bool) -> dict[str, Any]:
        """Fetch all; return counts of bytes, and by path why shards could not be fetched. Raises WdsfsError."""
        failed: dict[bytes, ShardError] = {}
        size, before = 0, _fetched_bytes()
        total = sum(pin_of(path).size for path in self._paths)
        with when_interrupted("; what has come is kept"), bytes_bar("fetching", total, quiet) as advance:
            for _ in range(min(jobs, len(self._paths))):
                threading.Thread(target=self._work, args=(advance,), daemon=True).start()
            for _ in self._paths:
                path, outcome = self._done.get()
                if isinstance(outcome, ShardError):
                    failed[path] = outcome
                elif isinstance(outcome, Exception):
                    raise outcome
                else:
                    size += outcome.size
        # Of a fetcher that has died, nothing is known.
        fetched = max(_fetched_bytes() - before, 0)
        return {"bytes": size, "fetched": fetched, "there": sum(self._there.values()), "failed": failed}

    def _work(self, advance: Callable[[int], None]) -> None:
        while self._waiting:
            try:
                path = self._waiting.popleft()
            except IndexError:  # another thread was faster
                return

            def progress(here: int, _: int, path: bytes = path) -> None:
                self._there.setdefault(path, here)
                advance(here - self._here.get(path, 0))
                self._here[path] = here

            try:
                self._done.put((path, shard_paths.fetch(path, progress)))
            except Exception as error:  # raised by the main thread
                self._done.put((path, error))


def _fetched_bytes() -> int:
    """Bytes of content that stores have sent so far."""
    return sum(traffic["bytes"] for traffic in remote().stats()["stores"].values())
