"""Passes in order over a FUSE mount, with and without content pushed ahead, against extracted files.

python -m bench.passes [TURNS [WORK ...]]    medians

Each time on a fresh mount, with shards and extracted files in the page cache.
"""

from __future__ import annotations

import io
import json
import os
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.systems import descendants, processor_seconds

if TYPE_CHECKING:
    from bench.run import Bench

SETS: dict[str, tuple[int, dict[str, int]]] = {
    "3 kB": (10_000, {"bin": 3_000}),
    "photos": (2_000, {"jpg": 76_000, "json": 400, "cls": 3}),
    "200 kB": (2_000, {"bin": 200_000}),
    "texts": (5_000, {"txt": 3_000, "json": 3_000}),
}
WDSFS = [sys.executable, "-m", "wdsfs"]


def make(path: Path, samples: int, columns: dict[str, int]) -> None:
    """Write a shard."""
    with tarfile.open(path, "w") as tar:
        for number in range(samples):
            for extension, size in columns.items():
                member = tarfile.TarInfo(f"{number:06d}.{extension}")
                member.size = size
                tar.addfile(member, io.BytesIO(random.Random(number).randbytes(size)))


def in_order(top: Path) -> float:
    """Return the seconds for opening, reading and closing all files, whose names were listed before."""
    paths = [os.path.join(folder, name) for folder, _, names in os.walk(top) for name in sorted(names)]
    return _read(paths)


def at_random(top: Path) -> float:
    """Return the seconds for the same in random order."""
    paths = [os.path.join(folder, name) for folder, _, names in os.walk(top) for name in sorted(names)]
    random.Random(1).shuffle(paths)
    return _read(paths)


def whole_samples(top: Path) -> float:
    """Return the seconds for the same with samples in random order, of each all files."""
    samples = defaultdict(list)
    for path in (os.path.join(folder, name) for folder, _, names in os.walk(top) for name in sorted(names)):
        samples[path.partition(".")[0]].append(path)
    order = list(samples.values())
    random.Random(1).shuffle(order)
    return _read([path for paths in order for path in paths])


def _read(paths: list[str]) -> float:
    for path in paths:
        os.stat(path)
    begin = time.perf_counter()
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        while os.read(file, 1 << 20):
            pass
        os.close(file)
    return time.perf_counter() - begin


def running(command: str) -> Callable[[Path], float]:
    """Return a function that returns the seconds of this command; the name of the directory is its $1."""

    def run(top: Path) -> float:
        begin = time.perf_counter()
        subprocess.run(["sh", "-c", command, "sh", os.fspath(top)], check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - begin

    return run


WORK: dict[str, tuple[str, str, Callable[[Path], float]]] = {
    "3 kB in order": ("3 kB", "files", in_order),
    "photos in order": ("photos", "files", in_order),
    "200 kB in order": ("200 kB", "files", in_order),
    "3 kB at random": ("3 kB", "files", at_random),
    "photos, whole samples at random": ("photos", "files", whole_samples),
    "photos, cp -r": ("photos", "samples", running('d=$(mktemp -d -p /dev/shm); cp -r "$1" "$d"; rm -r "$d"')),
    "photos, tar cf": ("photos", "samples", running('tar cf - -C "$1" . | cat')),
    "texts, grep -r": ("texts", "samples", running('grep -rc nothing-like-this "$1" || true')),
}


def _status(mountpoint: str) -> dict[str, Any]:
    status = subprocess.run([*WDSFS, "status", "--json", mountpoint], check=True, capture_output=True)
    (report,) = json.loads(status.stdout)
    return dict(report)


@contextmanager
def mounted(shard: Path, layout: str, push: str, say: Callable[[str], object]) -> Iterator[tuple[Path, int]]:
    """Mount a shard, yield the place and the process; says how many READs the block has made."""
    with tempfile.TemporaryDirectory() as mountpoint:
        options = ["--quiet", "--layout", layout, "--push", push]
        subprocess.run([*WDSFS, "mount", *options, shard, mountpoint], check=True, stderr=subprocess.DEVNULL)
        try:
            yield Path(mountpoint), _status(mountpoint)["pid"]
            report = _status(mountpoint)
            say(f"  push {push}: {report['requests'].get('read', 0)} READs {report.get('pushed', '')}")
        finally:
            subprocess.run([*WDSFS, "umount", mountpoint], check=True, stdout=subprocess.DEVNULL)


def extract(shard: Path, layout: str, top: Path) -> None:
    """Write the files that a mount of the shard shows."""
    with tarfile.open(shard) as tar:
        for member in tar:
            key, _, extension = member.name.partition(".")
            path = top / key / extension if layout == "samples" else top / member.name
            path.parent.mkdir(parents=True, exist_ok=True)
            content = tar.extractfile(member)
            assert content is not None
            path.write_bytes(content.read())


def measured(
    home: Path, turns: int, chosen: Iterable[str], say: Callable[[str], object]
) -> Iterator[tuple[str, str, float]]:
    """Yield work, system and seconds, the systems in turn; of mounts processor time, too, with listing."""
    os.environ["WDSFS_INDEX_DIR"] = str(home / "index")
    for work in chosen:
        data, layout, measure = WORK[work]
        shard, extracted = home / f"{data.replace(' ', '-')}.tar", home / f"{data}-{layout}"
        if not shard.exists():
            make(shard, *SETS[data])
        if not extracted.exists():
            extract(shard, layout, extracted)
            os.sync()
        for _ in range(turns):
            yield work, "extracted", measure(extracted)
            for system, push in (("wdsfs, push off", "off"), ("wdsfs", "auto")):
                with mounted(shard, layout, push, say) as (top, pid):
                    before = processor_seconds(descendants(pid))
                    yield work, system, measure(top)
                    yield f"{work}, processor time", system, processor_seconds(descendants(pid)) - before


def passes(bench: Bench) -> None:
    """All of it as a workload of the benchmark."""
    with tempfile.TemporaryDirectory(dir=bench.sets.home) as home, bench.attempt_at("wdsfs"):
        for work, system, seconds in measured(Path(home), bench.repetitions, WORK, lambda _: None):
            bench.add(work, "ms", system, seconds * 1e3)


def main(turns: int, chosen: list[str]) -> None:
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as home:
        for work, system, value in measured(Path(home), turns, chosen or WORK, print):
            seconds[work][system].append(value)
    for work, systems in seconds.items():
        medians = {system: statistics.median(times) for system, times in systems.items()}
        base = medians.get("extracted") or medians["wdsfs, push off"]
        texts = [f"{name} {s * 1e3:.0f} ms ({s / base:.2f})" for name, s in medians.items()]
        print(f"{work}: {', '.join(texts)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5, sys.argv[2:])
