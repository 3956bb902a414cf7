"""A portable index (`set.wdsidx`) of many shards: writing it, and mounting from it, here and in a store at 20 ms.

The shards are small tars; in the store the index has the ETags that nginx gives, as one has that was made there.
Each mount has an empty index and an empty cache. Requests are those in the log of the server.
"""

from __future__ import annotations

import json
import resource
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bench.network import network, without_proxies
from bench.systems import Wdsfs, anonymous_bytes, descendants, processor_seconds, run, unmount
from tests import sets
from wdsfs.index.record_builder import restamped
from wdsfs.names import PLAIN
from wdsfs.shards import Fingerprint
from wdsfs.spec import portable_head

if TYPE_CHECKING:
    from bench.network import Network
    from bench.run import Bench

COUNT, SAMPLES = 10_000, 5
NAME = "set.wdsidx"


def portable(bench: Bench) -> None:
    """10,000 shards: the index is written, and mounted from beside the shards, and from a store at 20 ms."""
    home = bench.sets.home / "portable"
    shards, web = home / "shards", home / "web"
    _make(shards)
    try:
        with bench.attempt_at("wdsfs"):
            _measure(bench, home, shards, web)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _make(shards: Path) -> None:
    shutil.rmtree(shards.parent, ignore_errors=True)
    shards.mkdir(parents=True)
    for number in range(COUNT):
        (shards / f"s{number:05}.tar").write_bytes(sets.content(number, SAMPLES))


def _measure(bench: Bench, home: Path, shards: Path, web: Path) -> None:
    wdsfs = Wdsfs(bench.say)
    run(*wdsfs.command("index", "-q", "--index-dir", home / "made", shards))
    web.symlink_to(shards)
    for turn in range(bench.repetitions):
        bench.say(f"turn {turn + 1}")
        since = time.perf_counter()
        run(*wdsfs.command("index", "-q", "--index-dir", home / "made", "-o", shards / NAME, shards))
        bench.add(f"writing, {COUNT:,} shards", "s", "wdsfs", time.perf_counter() - since)
        bench.add("bytes a shard", "B", "wdsfs", (shards / NAME).stat().st_size / COUNT)
        with _mounted(home, wdsfs, str(shards / NAME)) as cost:
            bench.add(f"mount, {COUNT:,} shards, local", "s", "wdsfs", cost.seconds)
        with _mounted(home, wdsfs, str(shards), "--index-dir", str(home / "made")) as cost:
            bench.add(f"mount, {COUNT:,} shards, indexed here", "s", "wdsfs", cost.seconds)
    made_there(shards / NAME, shards / "there.wdsidx")
    with network(web.parent, home / "network") as server:
        for turn in range(bench.repetitions):
            _remote(bench, home, wdsfs, server, turn)


def _remote(bench: Bench, home: Path, wdsfs: Wdsfs, server: Network, turn: int) -> None:
    before = server.traffic()
    with _mounted(home, wdsfs, f"{server.url}/web/there.wdsidx") as cost:
        requests, size = (now - then for now, then in zip(server.traffic(), before, strict=True))
        bench.add(f"mount, {COUNT:,} shards, in a store", "s", "wdsfs", cost.seconds)
        bench.add("mount, processor time of all processes", "s", "wdsfs", cost.processor)
        bench.add("mount, memory of all processes", "MiB", "wdsfs", cost.memory)
        bench.add("mount, requests", "", "wdsfs", requests)
        bench.add("mount, bytes a shard", "B", "wdsfs", size / COUNT)
        number = 17 * (turn + 1)
        before, since = server.traffic(), time.perf_counter()
        data = (home / "mnt" / f"s{number:05}" / "d1" / f"{number}-1" / "cls").read_bytes()
        bench.add("first look into a shard", "ms", "wdsfs", (time.perf_counter() - since) * 1000)
        bench.add("first look, requests", "", "wdsfs", server.traffic()[0] - before[0])
        assert data == b"1"


class _Cost(NamedTuple):
    """What a mount has taken when it is usable: seconds, those of processors, MiB of memory that no file backs."""

    seconds: float
    processor: float
    memory: float


@contextmanager
def _mounted(home: Path, wdsfs: Wdsfs, *arguments: str) -> Iterator[_Cost]:
    """A mount with an empty index and cache, unless the arguments name another; what it has cost."""
    for name in ("index", "cache"):
        shutil.rmtree(home / name, ignore_errors=True)
    (home / "mnt").mkdir(exist_ok=True)
    (home / "run").mkdir(mode=0o700, exist_ok=True)
    places = {
        "WDSFS_INDEX_DIR": home / "index",
        "WDSFS_CACHE_DIR": home / "cache",
        "XDG_RUNTIME_DIR": home / "run",
    }
    env = without_proxies() | {name: str(home / place) for name, place in places.items()}
    (home / "cache").mkdir(mode=0o700)
    since, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    run(*wdsfs.command("mount", "-q", *arguments, home / "mnt"), env=env)
    seconds, after = time.perf_counter() - since, resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    try:
        [status] = json.loads(run(*wdsfs.command("status", "--json", home / "mnt"), env=env))
        processes = descendants(status["pid"])
        memory = anonymous_bytes(processes) / (1 << 20)
        yield _Cost(seconds, spent + processor_seconds(processes), memory)
    finally:
        unmount(home / "mnt")


def made_there(source: Path, target: Path) -> None:
    """Write the same index with the ETags and times that nginx gives, in the rows and in the records."""
    file, old = portable_head.load_index(str(source)), source.read_bytes()
    rows, records = [], []
    for number in range(len(file)):
        row = file.row(number)
        seconds = row.mtime_ns // 10**9
        time_ns = seconds * 10**9
        record = restamped(old[row.offset : row.offset + row.length], Fingerprint(row.size, time_ns, 0))
        crc = int.from_bytes(record[8:16], "little")
        rows.append(
            row._replace(mtime_ns=time_ns, length=len(record), crc=crc, etag=f'"{seconds:x}-{row.size:x}"')
        )
        records.append(record)
    write(rows, records, file.record_format, target)


def write(rows: Sequence[portable_head.Row], records: Sequence[bytes], record_format: int, target: Path) -> None:
    """Write an index of these rows, in which the places of the records do not count."""
    size = len(portable_head.head_of(rows, "", record_format, PLAIN, 0))
    *starts, end = accumulate(map(len, records), initial=size + -size % portable_head.ALIGNMENT)
    placed = [row._replace(offset=start) for row, start in zip(rows, starts, strict=True)]
    with open(target, "wb") as out:
        out.write(portable_head.head_of(placed, "", record_format, PLAIN, end))
        out.seek(starts[0])
        out.writelines(records)
