"""Training: the loaders of `bench.loader` over mounts and shards, by wdsfs and by its peers, in turn.

Every loader is a process of its own. What a loader has read is compared: checksums with those of the shards, sums
of pixels with those of the other loaders.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import cache, clients
from bench.data import Set
from bench.network import Network, Remote, network
from bench.run import Bench
from bench.systems import Broken, System, Wdsfs, run

MICRO = 1e6
SYSTEMS = ("wdsfs", "wdsfs-image", "extracted", "ratarmount", "squashfuse_ll-raw")
NAMES = {"nothing": "no loader", "samples": "wdsfs.samples", "shuffle": "wdsfs.Shuffle"}  # in tables
MODULES = {
    "webdataset": "webdataset",
    "wids": "wids",
    "mosaic": "streaming",
    "litdata": "litdata",
    "energon": "megatron.energon",
}
FORMATS = ("mosaic", "litdata", "energon")  # what reads no shards until they are converted
REMOTE_SHARDS = 8
LIMIT = 3  # of the limit for a step: an epoch reads, decodes or converts 2 GB
COLD, REMOTE, LOCAL = "cold disk, files of 76 kB", "store at 20 ms, decoding", "page cache, decoding"

Environment = dict[str, str] | None


def loader(bench: Bench) -> None:
    """Two epochs of a PyTorch DataLoader that decodes JPEGs, 4 workers, shards and files in the page cache."""
    ways = _ways(bench, "webdataset")
    if not ways:
        return
    data = bench.sets.get("images")
    able = bench.taking(data, among=[name for name in SYSTEMS if name in bench.systems])
    totals: set[int] = set()
    for _ in range(bench.repetitions):
        totals |= _epochs_of_mounts(bench, able, data, "pixels")
        totals |= _epochs_of_ways(bench, ["shuffle", *ways], data, "pixels")
    if len(totals) > 1:
        bench.results.failed(bench.workload, "all", "the sums of all pixels differ between the systems")


def node(bench: Bench) -> None:
    """For a machine with many cores and a GPU: reads by 1, 4 and 16 processes, and training by each way."""
    ways = _ways(bench, "webdataset", "wids", "mosaic")
    if not ways:
        return
    data = bench.sets.get("images")
    able = bench.taking(data, among=[name for name in SYSTEMS[:3] if name in bench.systems])
    for _, system in bench.turns(able):
        with bench.attempt(system), bench.mounted(system, data) as view:
            files = view.files(data) * 4
            for readers in (1, 4, 16):
                with bench.clients(*([clients.ReadFiles(own)] for own in clients.shares(files, readers))) as all_:
                    measured = all_.go()
                bench.add(f"{readers} readers", "MB/s", system.name, measured.bytes / measured.seconds / 1e6)
    ways = _converted(bench, ways, data)
    for _ in range(bench.repetitions):
        _epochs_of_ways(bench, ["nothing", "samples", "shuffle", *ways], data, "train")
        _epochs_of_mounts(bench, able, data, "train")


def training(bench: Bench) -> None:
    """Shuffled epochs from cold disk and from a store, reads in the page cache, and a resumption."""
    ways = _ways(bench, *MODULES)
    if not ways:
        return
    data = bench.sets.get("training")
    ways = ["samples", "shuffle", *_converted(bench, ways, data)]
    for _ in range(bench.repetitions):
        _cold_cat(bench, data)
        for way in ways:
            with bench.attempt_at(NAMES.get(way, way)):
                bench.say(f"cold epoch: {NAMES.get(way, way)}")
                _cold_epoch(bench, way, data)
                if way in NAMES:
                    _cold_reads(bench, way, data)
    _from_store(bench, data)
    _read_again(bench)
    _resumed(bench)


def _ways(bench: Bench, *names: str) -> list[str]:
    """Those of the peers that are installed; none without what all need."""
    needed = {"torch": "torch", "Pillow": "PIL", "scikit-learn": "sklearn"}
    missing = [name for name, module in (needed | MODULES).items() if not _is_installed(module)]
    for name in missing:
        if name in (*needed, *names):
            bench.results.absent(name, "no such Python module")
    return [] if {*missing} & {*needed} else [name for name in names if name not in missing]


def _is_installed(module: str) -> bool:
    top, *below = module.split(".")
    return bool(importlib.util.find_spec(top)) and not (below and importlib.util.find_spec(module) is None)


def _converted(bench: Bench, ways: Sequence[str], data: Set) -> list[str]:
    """Convert the shards for each way that needs it; returns the ways that can go on."""
    able = []
    for way in ways:
        with bench.attempt_at(way):
            if way in FORMATS:
                shutil.rmtree(_own_format(data, way), ignore_errors=True)
                since = time.monotonic()
                _loader(bench, "make", 0, way, data.paths, data)
                bench.say(f"converted for {way} in {time.monotonic() - since:.0f} s")
            able.append(way)
    run("sync", "-f", data.directory)  # what is not written yet cannot leave the page cache
    return able


def _own_format(data: Set, way: str) -> Path:
    return data.directory.parent / way


def _loader(
    bench: Bench,
    work: str,
    epochs: int,
    way: str,
    places: Sequence[Any],
    data: Set,
    env: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Run `bench.loader`; returns what it says. Raises Broken."""
    own = os.environ | {"WDSFS_INDEX_DIR": str(data.directory.parent / "loader-index")}
    here = (env or own) | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    words = [work, str(epochs), way, *map(str, places)]
    out = run(sys.executable, "-m", "bench.loader", *words, limit=LIMIT * bench.limit, env=here)
    report: dict[str, Any] = json.loads(out.splitlines()[-1]) if work != "make" else {}  # peers print, too
    samples = data.count // 2
    if any(count != samples for count in report.get("counts", ())):
        raise Broken(f"the loader has seen {report['counts']} samples, there are {samples}")
    return report


def _epochs_of_mounts(bench: Bench, able: Sequence[System], data: Set, work: str) -> set[int]:
    totals = set()
    for _, system in bench.turns(able, 1):
        with bench.attempt(system), bench.mounted(system, data) as view:
            totals.add(_two_epochs(bench, system.name, data, work, "files", [view.root]))
    return totals


def _epochs_of_ways(bench: Bench, ways: Sequence[str], data: Set, work: str) -> set[int]:
    totals = set()
    for way in ways:
        name = NAMES.get(way, way)
        with bench.attempt_at(name):
            cache.warm(data.paths)
            totals.add(_two_epochs(bench, name, data, work, way, data.paths))
    return totals


def _two_epochs(bench: Bench, name: str, data: Set, work: str, way: str, places: Sequence[Path]) -> int:
    """Returns the sum of all pixels."""
    report = _loader(bench, work, 2, way, places, data)
    for case, seconds in zip(("first epoch", "second epoch"), report["seconds"], strict=True):
        bench.add(case, "images/s", name, data.count // 2 / seconds)
    return int(report["total"])


# --- parts of `training` ---------------------------------------------------------------------------------------


def _cold_cat(bench: Bench, data: Set) -> None:
    bench.evict("cat", data.paths)
    since = time.perf_counter()
    run("sh", "-c", 'cat "$@" >/dev/null', "cat", *data.paths)
    bench.add(f"{COLD}, one process", "MB/s", "cat", _size(data) / (time.perf_counter() - since) / 1e6)


def _cold_reads(bench: Bench, way: str, data: Set) -> None:
    """Reads without a loader: nothing is made of the samples, and no process hands them to another."""
    bench.evict(NAMES[way], data.paths)
    seconds = _loader(bench, "read", 1, way, data.paths, data)["seconds"][0]
    bench.add(f"{COLD}, one process", "MB/s", NAMES[way], _size(data) / seconds / 1e6)


def _cold_epoch(bench: Bench, way: str, data: Set) -> None:
    """Bytes are those of the tars in every format: a rate is one of samples, beside that of `cat`."""
    place = _own_format(data, way)
    bench.evict(NAMES.get(way, way), [*data.paths, *(path for path in place.rglob("*") if path.is_file())])
    report = _loader(bench, "bytes", 1, way, data.paths, data)
    if report["total"] != sum(member.crc for _, member in data.members()):
        raise Broken("the loader has seen other bytes than were written")
    bench.add(f"{COLD}, 4 workers", "MB/s", NAMES.get(way, way), _size(data) / report["seconds"][0] / 1e6)


def _size(data: Set) -> int:
    return sum(path.stat().st_size for path in data.paths)


def _from_store(bench: Bench, data: Set) -> None:
    """Some of the shards behind a slow network, each time with an empty cache; and from the page cache."""
    part = Set("training", data.directory, data.shards[:REMOTE_SHARDS])
    part.count = len(part.members())
    with network(bench.sets.home, bench.sets.home / "network") as server:
        shards = Remote(Wdsfs(bench.say), server, bench.sets.home / "network", part.paths)
        shards.index()
        totals = set()
        for _ in range(bench.repetitions):
            for way in ("shuffle", "webdataset"):
                name = "webdataset pipe:curl" if way == "webdataset" else NAMES[way]
                with bench.attempt_at(name):
                    totals.add(_epoch_from_store(bench, name, way, part, shards, server))
                    totals.add(_epoch_of_local(bench, name, way, part))
    if len(totals) > 1:
        bench.results.failed(bench.workload, "all", "the sums of all pixels differ between the loaders")


def _epoch_from_store(bench: Bench, name: str, way: str, data: Set, shards: Remote, server: Network) -> int:
    before, size = server.traffic()[0], _size(data)
    report = _loader(bench, "pixels", 1, way, shards.urls, data, shards.fresh())
    bench.add(REMOTE, "images/s", name, data.count // 2 / report["seconds"][0])
    bench.add(f"{REMOTE}, requests a GB", "", name, (server.traffic()[0] - before) / size * 1e9)
    return int(report["total"])


def _epoch_of_local(bench: Bench, name: str, way: str, data: Set) -> int:
    """The same images without a store: no loader of a store can be quicker."""
    cache.warm(data.paths)
    report = _loader(bench, "pixels", 1, way, data.paths, data)
    bench.add(LOCAL, "images/s", name, data.count // 2 / report["seconds"][0])
    return int(report["total"])


def _read_again(bench: Bench) -> None:
    """Samples of 3 kB in batches by one process, at random and in the order of Shuffle; epochs after the first."""
    data = bench.sets.get("pairs")
    for _ in range(bench.repetitions):
        cache.warm(data.paths)
        for way in ("samples", "shuffle"):
            with bench.attempt_at(NAMES[way]):
                report = _loader(bench, "read", 4, way, data.paths, data)
                each = statistics.median(report["seconds"][1:]) / (data.count // 2) * MICRO
                bench.add("samples of 3 kB, in the page cache, one process", "us/sample", NAMES[way], each)


def _resumed(bench: Bench) -> None:
    data = bench.sets.get("millions")
    for _ in range(bench.repetitions):
        with bench.attempt_at(NAMES["shuffle"]):
            seconds = _loader(bench, "resume", 0, "shuffle", [data.directory], data)["seconds"][0]
            bench.add(f"first batch in the middle of {data.count:,} samples", "s", NAMES["shuffle"], seconds)
