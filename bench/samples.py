"""Samples at random from Python: wdsfs without a mount, wids, ratarmountcore, a mount, extracted files.

    python -m bench.samples WAY DIRECTORY [TOP]     one of the ways over the shards of a directory, as JSON

Each way is a process of its own, and the ways take turns. One client goes twice through all samples of two columns
in random order; then a DataLoader of PyTorch with 4 workers does, shuffled. Shards and extracted files are in the
page cache, a mount is fresh. "limit" is what any reader of shards needs: the places of all members in a list, and
one read for a sample.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import random
import sys
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import cache
from bench.systems import Broken, run

if TYPE_CHECKING:
    from bench.data import Set
    from bench.run import Bench

BATCH, WORKERS, ROUNDS = 100, 4, 2
COLUMNS = ("bin", "cls")
MICRO = 1e6
MODULES = {"wids": "wids", "ratarmountcore": "ratarmountcore"}  # what a way needs
FILES = {"wdsfs mount": "wdsfs", "extracted": "extracted"}  # by the names of systems

Sample = tuple[bytes, ...]


def library(bench: Bench) -> None:
    """Every way in turn. Whatever was read is compared."""
    data = bench.sets.get("pairs")
    write_index(data)
    ways = ["limit", "wdsfs"]
    for way, module in MODULES.items():
        if importlib.util.find_spec(module) is None:
            bench.results.absent(way, f"no Python module {module}")
        else:
            ways.append(way)
    able = bench.taking(data, among=[system for system in FILES.values() if system in bench.systems])
    for _ in range(bench.repetitions):
        cache.warm(data.paths)
        for way in ways:
            with bench.attempt_at(way):
                _measure(bench, way, data)
        for way, name in FILES.items():
            for _, system in bench.turns([system for system in able if system.name == name], 1):
                with bench.attempt_at(way), bench.mounted(system, data) as view:
                    _measure(bench, way, data, str(view.root))


def write_index(data: Set) -> None:
    """Write what wids needs, `index.json`. Samples have two columns."""
    shards = [{"url": str(shard.path), "nsamples": len(shard.members) // 2} for shard in data.shards]
    index = {"wids_version": 1, "name": "bench", "shardlist": shards}
    (data.directory / "index.json").write_text(json.dumps(index))


def _measure(bench: Bench, way: str, data: Set, *top: str) -> None:
    command = (sys.executable, "-m", "bench.samples", way, str(data.directory), *top)
    here = os.environ | {
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "WDSFS_INDEX_DIR": str(data.directory.parent / "samples-index"),
    }
    report = json.loads(run(*command, limit=bench.limit, env=here).splitlines()[-1])  # peers print, too
    if report["sum"] != sum(member.crc for _, member in data.members()):
        raise Broken("other bytes were read than were written")
    for case, seconds in report["seconds"].items():
        bench.add(case, "us/sample", way, seconds / (data.count // 2) * MICRO)


# --- the ways: each gives the samples by their numbers ----------------------------------------------------------


def _limit(shards: list[str], _: str) -> Sequence[Sample]:
    places = []
    for path in shards:
        with tarfile.open(path) as tar:
            members = tar.getmembers()
        fd = os.open(path, os.O_RDONLY)
        for first, second in zip(members[::2], members[1::2], strict=True):
            places.append((fd, first.offset_data, first.size, second.offset_data, second.size))

    def sample(number: int) -> Sample:
        fd, start, size, label, label_size = places[number]
        data = os.pread(fd, label + label_size - start, start)
        return data[:size], data[label - start :]

    return _Numbered(len(places), sample)


def _wdsfs(shards: list[str], _: str) -> Any:
    return importlib.import_module("wdsfs").samples(shards)


def _wids(shards: list[str], _: str) -> Any:
    index = str(Path(shards[0]).parent / "index.json")
    return importlib.import_module("wids").ShardListDataset(index, keep=True, transformations=[])


def _ratarmountcore(shards: list[str], _: str) -> Sequence[Sample]:
    factory: Any = importlib.import_module("ratarmountcore.mountsource.factory")
    opened: dict[tuple[int, str], Any] = {}  # by process: a connection to SQLite survives no fork

    def source(shard: str) -> Any:
        place = os.getpid(), shard
        if place not in opened:
            folders = [os.path.dirname(shard)]
            opened[place] = factory.open_mount_source(shard, indexFolders=folders, writeIndex=True)
        return opened[place]

    paths = [(shard, key) for shard in shards for key in _keys(source(shard).list("/"))]

    def content(shard: str, path: str) -> bytes:
        about = source(shard).lookup(path)
        data: bytes = source(shard).read(about, about.size, 0)
        return data

    def sample(number: int) -> Sample:
        shard, key = paths[number]
        return tuple(content(shard, f"/{key}.{column}") for column in COLUMNS)

    return _Numbered(len(paths), sample)


def _files(_: list[str], top: str) -> Sequence[Sample]:
    keys = [f"{place}/{key}" for place, _, names in sorted(os.walk(top)) for key in _keys(names)]

    def content(path: str) -> bytes:
        with open(path, "rb", buffering=0) as file:
            return file.read()

    return _Numbered(len(keys), lambda number: tuple(content(f"{keys[number]}.{column}") for column in COLUMNS))


def _keys(names: Any) -> list[str]:
    return sorted(name.partition(".")[0] for name in names if name.endswith(f".{COLUMNS[0]}"))


class _Numbered(Sequence[Sample]):
    """Samples by number, from 0 on: also a data set of PyTorch."""

    def __init__(self, count: int, sample: Callable[[int], Sample]) -> None:
        self._count, self._sample = count, sample

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        return self._sample(number)


WAYS: dict[str, Callable[[list[str], str], Any]] = {
    "limit": _limit,
    "wdsfs": _wdsfs,
    "wids": _wids,
    "ratarmountcore": _ratarmountcore,
    "wdsfs mount": _files,
    "extracted": _files,
}


def _timed(samples: Any) -> Iterator[tuple[str, float]]:
    """Yield each case with its seconds."""
    order = random.Random(2).sample(range(len(samples)), len(samples))
    for case in ("one client", "one client, again"):
        since = time.perf_counter()
        for number in order:
            samples[number]
        yield case, time.perf_counter() - since
    if importlib.util.find_spec("torch") is None:
        return
    torch: Any = importlib.import_module("torch.utils.data")
    loader = torch.DataLoader(
        samples, BATCH, shuffle=True, num_workers=WORKERS, collate_fn=len, persistent_workers=True
    )
    for case in ("DataLoader, first epoch", "DataLoader, second epoch"):
        since = time.perf_counter()
        count = sum(loader)
        yield case, time.perf_counter() - since
        assert count == len(samples)


def _contents(sample: Any) -> Iterator[bytes]:
    """Yield the bytes of the columns of a sample: values of a dict, or streams, or the sample itself."""
    for number, column in enumerate(COLUMNS):
        value = (sample.get(column) or sample[f".{column}"]) if isinstance(sample, dict) else sample[number]
        yield value if isinstance(value, bytes) else value.read()


def main() -> None:
    way, directory, *top = sys.argv[1:]
    shards = sorted(str(path) for path in Path(directory).glob("*.tar"))
    samples = WAYS[way](shards, *(top or [""]))
    seconds = dict(_timed(samples))
    total = sum(zlib.crc32(content) for number in range(len(samples)) for content in _contents(samples[number]))
    print(json.dumps({"seconds": seconds, "sum": total}))


if __name__ == "__main__":
    main()
