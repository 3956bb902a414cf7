"""Samples at random from Python, without a mount: wdsfs, wids and the limit, in turn.

    python -m bench.samples [--shards 10] [--samples 1000] [--rounds 5] [DIRECTORY]

Makes a set in DIRECTORY (default: a temporary one): samples of 3 kB and a label, indexed for each tool. Prints
medians in us a sample: one client in one process; then a DataLoader with 4 workers, shuffled, for wdsfs and wids.
What is not installed is left out: torch and wids are among the tools (`make tools`).
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import random
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import wdsfs

BATCH, WORKERS = 100, 4


def write_set(directory: Path, shards: int, samples: int) -> list[Path]:
    numbers, paths = random.Random(1), []
    for shard in range(shards):
        path = directory / f"t-{shard:06d}.tar"
        with tarfile.open(path, "w") as tar:
            for sample in range(samples):
                for extension, content in (("bin", numbers.randbytes(3000)), ("cls", b"%d" % (sample % 10))):
                    member = tarfile.TarInfo(f"{shard:03d}{sample:06d}.{extension}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        paths.append(path)
    described = [{"url": str(path), "nsamples": samples} for path in paths]
    index = {"wids_version": 1, "name": "bench", "shardlist": described}
    (directory / "index.json").write_text(json.dumps(index))
    return paths


def limit(paths: list[Path]) -> list[Callable[[], Any]]:
    """Offsets in memory and one read: what any reader of shards needs at least."""
    reads: list[Callable[[], Any]] = []
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        with tarfile.open(path) as tar:
            members = tar.getmembers()
        for large, label in zip(members[::2], members[1::2], strict=True):
            reads.append(lambda fd=fd, begin=large.offset_data, label=label: _read(fd, begin, label))  # type: ignore[misc]
    return reads


def _read(fd: int, begin: int, label: tarfile.TarInfo) -> dict[str, bytes]:
    data = os.pread(fd, label.offset_data + label.size - begin, begin)
    return {"bin": data[:3000], "cls": data[label.offset_data - begin :]}


def readers(directory: Path, paths: list[Path]) -> dict[str, tuple[int, Callable[[int], Any]]]:
    """By name: how many samples it has, and what reads one."""
    spec = [str(path) for path in paths]
    ours, view = wdsfs.samples(spec), wdsfs.samples(spec, columns=["bin", "cls"])
    reads = limit(paths)
    found: dict[str, tuple[int, Callable[[int], Any]]] = {
        "limit": (len(reads), lambda at: reads[at]()),
        "wdsfs": (len(ours), ours.__getitem__),
        "wdsfs --columns": (len(view), view.__getitem__),
    }
    if importlib.util.find_spec("wids"):
        import wids

        theirs = wids.ShardListDataset(str(directory / "index.json"), keep=True, transformations=[])
        found["wids"] = len(theirs), lambda at: dict(theirs[at])
    return found


def measure(functions: dict[str, Callable[[], object]], rounds: int, per: int) -> None:
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            began = time.perf_counter()
            function()
            times[name].append((time.perf_counter() - began) / per * 1e6)
    for name, values in times.items():
        print(f"{name:24} {statistics.median(values):8.2f} us   (least {min(values):.2f})", flush=True)


def loop(read: Callable[[int], Any], order: Iterable[int]) -> None:
    for at in order:
        read(at)


def loaders(directory: Path, paths: list[Path]) -> dict[str, Callable[[], object]]:
    import torch.utils.data
    import wids

    def epoch(data: Any) -> Callable[[], object]:
        loader = torch.utils.data.DataLoader(
            data, BATCH, shuffle=True, num_workers=WORKERS, collate_fn=len, persistent_workers=True
        )
        return lambda: sum(loader)

    theirs = wids.ShardListDataset(str(directory / "index.json"), keep=True, transformations=[])
    return {"DataLoader: wdsfs": epoch(wdsfs.samples([str(p) for p in paths])), "DataLoader: wids": epoch(theirs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path)
    for name, default in (("shards", 10), ("samples", 1000), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wdsfs-bench-") as spare:
        directory = options.directory or Path(spare)
        paths = write_set(directory, options.shards, options.samples)
        found = readers(directory, paths)
        count = options.shards * options.samples
        assert {samples for samples, _ in found.values()} == {count}
        order = random.Random(2).sample(range(count), count)
        functions = {name: lambda read=read: loop(read, order) for name, (_, read) in found.items()}  # type: ignore[misc]
        measure(functions, options.rounds, count)
        if importlib.util.find_spec("torch") and importlib.util.find_spec("wids"):
            measure(loaders(directory, paths), options.rounds, count)


if __name__ == "__main__":
    main()
