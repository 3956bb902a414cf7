"""A set of 100,000 shards and 100 million samples, on paper: what is measured here, and what follows from it.

`python -m bench.scale` prints these tables of bench/RESULTS.md. Measured: bytes and processor time of an
index of N shards (rows with names and ETags as long as real ones, records of real tars of 1,000 samples), and the
memory of the process that holds such a set. The model takes these and what a store gives as its constants.
Processor time and not wall time, so that another program on the machine changes little.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from tests import tars
from wdsfs.index.record import Record
from wdsfs.index.record_of_file import build_file
from wdsfs.index.store import summary_of
from wdsfs.names import Reading
from wdsfs.spec import portable_head
from wdsfs.spec.portable_head import Row

Answer = TypeVar("Answer")
SAMPLES = 1_000  # of a shard
COLUMNS = (b"jpg", b"cls", b"json")
SHARDS, NODES = 100_000, 1_000
ETAG = '"0123456789abcdef0123456789abcdef-64"'
# What a store is taken to give: seconds to the first byte, bytes a second of one connection, GET requests that one
# prefix of S3 answers for certain in a second, and keys of an answer to a LIST.
LATENCY, RATE, PREFIX, LISTED = 0.02, 80e6, 5500, 1000


class Measured(NamedTuple):
    """What was measured with a set of `shards` shards."""

    shards: int
    table: int  # bytes of header, table and texts
    load: float  # processor seconds until the table is checked
    expand: float  # ... until each shard has its path and name
    memory: int  # bytes that the process has more with all of it


def record_of_a_shard(directory: Path) -> tuple[bytes, float]:
    """The record of a tar of 1,000 samples, and the processor time to build it (seconds)."""
    path = directory / "x.tar"
    members = (b"%05d.%s" % (sample, column) for sample in range(SAMPLES) for column in COLUMNS)
    path.write_bytes(tars.tar(*(tars.member(name, b"x") for name in members)))
    found = [_timed(lambda: build_file(os.fsencode(path))) for _ in range(5)]
    return found[0][0], min(seconds for _, seconds in found)


def _timed(function: Callable[[], Answer]) -> tuple[Answer, float]:
    since = time.process_time()
    return function(), time.process_time() - since


def measure(shards: int, directory: Path, record: bytes) -> Measured:
    """Write an index of so many shards, and look at it in a process of its own, as a mount does."""
    target = directory / "set.wdsidx"
    numbers = tuple(summary_of(Record(record)))[3:]
    rows = [
        Row(1 << 30, 10**18 + number, 0, len(record), 0, f"train-{number:06}.tar", ETAG, "", numbers)
        for number in range(shards)
    ]
    # Only one of the records is written: no figure here depends on the others.
    _write_head(rows, len(record), target)
    found = subprocess.run(
        [sys.executable, "-m", "bench.scale", "--look", target], stdout=subprocess.PIPE, text=True, check=True
    )
    load, expand, memory = found.stdout.split()
    table = len(portable_head.head_of(rows, "", 1, Reading(), 0))
    return Measured(shards, table, float(load), float(expand), int(memory))


def _write_head(rows: list[Row], length: int, target: Path) -> None:
    """Header and table as of a whole index; the records are a hole."""
    size = len(portable_head.head_of(rows, "", 1, Reading(), 0))
    start = size + -size % portable_head.ALIGNMENT
    placed = [row._replace(offset=start + number * length) for number, row in enumerate(rows)]
    end = start + len(rows) * length
    with open(target, "wb") as out:
        out.write(portable_head.head_of(placed, "", 1, Reading(), end))
        out.truncate(end)


def look(target: str) -> None:
    """What a mount does with the table: read and check it, make shards of its rows; prints what that took."""
    from wdsfs import shards
    from wdsfs.spec import shard_names

    before = _resident()
    file, load = _timed(lambda: portable_head.load_index(target))
    base = "s3://bucket/set"
    # Objects that the index presumes are not asked for; here only names and paths are made.
    paths, first = _timed(lambda: [os.fsencode(path) for path in file.paths(base)])
    kept, second = _timed(
        lambda: [shards.Shard(path, name) for path, name in zip(paths, shard_names.names_of(paths), strict=True)]
    )
    print(load, first + second, _resident() - before)
    assert len(kept) == len(file)


def _resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def model(measured: Measured, record: int, build: float) -> list[tuple[str, str]]:
    """What follows for the set of 100 million samples on 1,000 nodes."""
    factor = SHARDS / measured.shards
    table, members = measured.table * factor, SAMPLES * len(COLUMNS)
    total = table + SHARDS * record
    gets = -int(-table // portable_head.READ_BYTES)
    transfer = LATENCY * (1 + gets) + table / RATE
    return [
        ("size of the index", f"{total / 1e9:.1f} GB ({total / SHARDS / members:.1f} bytes a member)"),
        ("of which header and table", f"{table / 1e6:.1f} MB"),
        ("building all records, processor time", f"{SHARDS * build / 60:.0f} min of one core"),
        ("... on 64 cores of a cluster, plus reading the shards", f"{SHARDS * build / 64:.0f} s"),
        ("start of a mount, requests", f"1 HEAD, {gets} GET"),
        ("start of a mount, from the store", f"{table / 1e6:.1f} MB, {transfer:.2f} s"),
        ("start of a mount, processor time for the table", f"{(measured.load + measured.expand) * factor:.1f} s"),
        ("all nodes at once, requests", f"{(1 + gets) * NODES:,} (a prefix of S3 answers {PREFIX:,} a second)"),
        ("all nodes at once, bytes", f"{table * NODES / 1e9:.0f} GB"),
        ("first look into a shard", f"2 requests, one of them for {record / 1e3:.0f} kB"),
        (
            "all nodes look into all their shards once (100 each)",
            f"{NODES * SHARDS // NODES:,} requests for records, {SHARDS * record / 1e9:.1f} GB",
        ),
        ("looking for changes, all nodes", f"{SHARDS // LISTED * NODES / 60:,.0f} LIST a second"),
        ("without an index: bytes that are read for the headers", f"all of it, or {SHARDS * members:,} requests"),
        (
            "memory of a node for table and shards",
            f"{measured.memory * factor / 1e6:.0f} MB, shared by its workers",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=SHARDS // 10, help="how many are measured")
    parser.add_argument("--look", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.look:
        look(arguments.look)
        return
    with tempfile.TemporaryDirectory() as home:
        record, build = record_of_a_shard(Path(home))
        print(f"| {'measured':60} | |\n|---|---|")
        print(f"| record of a shard of {SAMPLES * len(COLUMNS):,} members | {len(record):,} bytes |")
        print(f"| building it | {build * 1000:.1f} ms |")
        for shards in (arguments.shards // 10, arguments.shards):
            found = measure(shards, Path(home), record)
            print(f"| {shards:,} shards: header and table | {found.table / shards:.0f} bytes a shard |")
            print(f"| ... read and checked | {found.load / shards * 1e6:.1f} us a shard |")
            print(f"| ... paths and names | {found.expand / shards * 1e6:.1f} us a shard |")
            print(f"| ... memory | {found.memory / shards:.0f} bytes a shard |")
        print(f"\n| {SHARDS:,} shards, {NODES:,} nodes | |\n|---|---|")
        for name, value in model(found, len(record), build):
            print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
