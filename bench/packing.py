"""A tree of small files made into shards: `wdsfs pack`, `tar cf`, and the webdataset library's ShardWriter.

All files are in the page cache. `tar` ends before anything is on the disk, so there is the time until it is there,
too. wdsfs also reads back what it has written.
"""

from __future__ import annotations

import random
import resource
import shutil
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bench.systems import Broken, Wdsfs, run

if TYPE_CHECKING:
    from bench.run import Bench

FOLDER = 1000  # files in a directory
CASE, PROCESSOR = "files of 0.5 to 4 kB", "processor time"

_WITH_WEBDATASET = """
import os, sys
import webdataset
tree, pattern = sys.argv[1:]
with webdataset.ShardWriter(pattern, maxcount=10_000, verbose=0, encoder=False) as writer:
    for folder in sorted(os.listdir(tree)):
        for name in sorted(os.listdir(f"{tree}/{folder}")):
            stem, _, extension = name.partition(".")
            with open(f"{tree}/{folder}/{name}", "rb") as file:
                writer.write({"__key__": f"{folder}/{stem}", extension: file.read()})
"""


def pack(bench: Bench) -> None:
    """Files in directories of a thousand, as shards of 10,000 samples; `tar` makes one file."""
    data = bench.sets.get("single")
    place = data.directory.parent / "packing"
    shutil.rmtree(place, ignore_errors=True)
    tree, out = place / "tree", place / "out"
    contents = _write(tree, bench.sets.sizes.pack_files)
    try:
        for system in bench.taking(data, among=["wdsfs"]):
            assert isinstance(system, Wdsfs)

            def with_wdsfs(jobs: str, system: Wdsfs = system) -> None:
                run(*system.command("pack"), "-q", "-j", jobs, "--layout", "files", tree, "-o", out / "%06d.tar")

            ways: dict[str, Callable[[], object]] = {
                "wdsfs": lambda: with_wdsfs("2"),
                "wdsfs, 1 process": lambda: with_wdsfs("1"),
                "tar": lambda: run("tar", "cf", out / "all.tar", "-C", tree, "."),
                "webdataset": lambda: run(sys.executable, "-c", _WITH_WEBDATASET, tree, out / "%06d.tar"),
            }
            for _ in range(bench.repetitions):
                for name, way in ways.items():
                    with bench.attempt_at(name):
                        _measure(bench, name, way, out, contents)
    finally:
        shutil.rmtree(place)


def _write(tree: Path, count: int) -> int:
    """Write the files; returns the bytes of all of them."""
    chosen, total = random.Random(7), 0
    for number in range(count):
        folder = tree / f"c{number // FOLDER:05d}"
        if number % FOLDER == 0:
            folder.mkdir(parents=True)
        content = chosen.randbytes(chosen.randrange(500, 4000))
        (folder / f"img{number:07d}.jpg").write_bytes(content)
        total += len(content)
    return total


def _measure(bench: Bench, name: str, way: Callable[[], object], out: Path, contents: int) -> None:
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    run("sync", "-f", out)
    since, spent = time.perf_counter(), _processor_seconds()
    way()
    bench.add(CASE, "s", name, time.perf_counter() - since)
    bench.add(PROCESSOR, "s", name, _processor_seconds() - spent)
    if name == "tar":
        run("sync", *out.iterdir())
        bench.add(CASE, "s", "tar and sync", time.perf_counter() - since)
    found = 0
    for path in out.iterdir():
        with tarfile.open(path, "r:") as archive:
            found += sum(member.size for member in archive if member.isfile())
    if found != contents:
        raise Broken(f"{found} bytes of files were packed, not {contents}")


def _processor_seconds() -> float:
    """Return the processor time of all processes that this one has waited for, and of those they have."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime
