"""Tables of a set: `wdsfs table` against loops over the same shards, which write the same values to Parquet.

    python -m bench.tables WAY OUTPUT SHARD...      one of the loops

All shards are indexed, and in the page cache. The time is that of the whole command.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import cache
from bench.systems import Broken, Wdsfs, run

if TYPE_CHECKING:
    from bench.data import Set
    from bench.run import Bench

MICRO = 1e6
FIRST = "values, first time"
CASES = {"sizes": ["--sizes"], FIRST: [], "values, from the cache": []}  # in this order

Sample = dict[str, Any]  # values are bytes, of pictures the number of bytes


def table(bench: Bench) -> None:
    """Every way in turn. The values in each table are compared with those that were written."""
    data = bench.sets.get("captions")
    output = data.directory.parent / "table.parquet"
    for _ in range(bench.repetitions):
        cache.warm(data.paths)
        for system in bench.taking(data, among=["wdsfs"]):
            assert isinstance(system, Wdsfs)
            with bench.attempt(system):
                _measure_wdsfs(bench, system, data, output)
        for way in LOOPS:
            with bench.attempt_at(way):
                if importlib.util.find_spec(way) is None:
                    raise Broken(f"no Python module {way}")
                command = [sys.executable, "-m", "bench.tables", way, str(output), *map(str, data.paths)]
                here = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
                _measure(bench, FIRST, way, command, here, data, output)


def _measure_wdsfs(bench: Bench, system: Wdsfs, data: Set, output: Path) -> None:
    place, index = system.home(data) / "values", system.home(data) / "index"
    shutil.rmtree(place, ignore_errors=True)
    env = system.environment(data) | {"WDSFS_CACHE_DIR": str(place)}
    for case, options in CASES.items():
        words = system.command("table", "-q", *options, "--index-dir", index, data.directory, "-o", output)
        _measure(bench, case, system.name, list(map(str, words)), env, data, output)


def _measure(
    bench: Bench, case: str, name: str, command: list[str], env: dict[str, str], data: Set, output: Path
) -> None:
    since = time.perf_counter()
    run(*command, limit=bench.limit, env=env)
    seconds = time.perf_counter() - since
    samples = data.count // 4
    made = importlib.import_module("pyarrow.parquet").read_table(output)
    sums = [sum(made[column].to_pylist()) for column in ("cls", "json.number") if column in made.column_names]
    if made.num_rows != samples or sums != ([] if case == "sizes" else [sum(range(samples))] * 2):
        raise Broken("the table has other values than the shards")
    bench.add(case, "us/sample", name, seconds / samples * MICRO)


# --- loops ------------------------------------------------------------------------------------------------------


def _by_tarfile(shards: list[str]) -> Iterator[Sample]:
    """Only small files are read."""
    for path in shards:
        sample: Sample = {}
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, extension = member.name.partition(".")
                if sample and sample["__key__"] != key:
                    yield sample
                    sample = {}
                file = None if extension == "jpg" else tar.extractfile(member)
                sample |= {"__key__": key, extension: file.read() if file else member.size}
        yield sample


def _by_webdataset(shards: list[str]) -> Iterator[Sample]:
    webdataset = importlib.import_module("webdataset")
    for sample in webdataset.WebDataset(shards, shardshuffle=False):
        yield {**sample, "jpg": len(sample["jpg"])}


LOOPS: dict[str, Callable[[list[str]], Iterator[Sample]]] = {
    "tarfile": _by_tarfile,
    "webdataset": _by_webdataset,
}


def main() -> None:
    way, output, *shards = sys.argv[1:]
    arrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    rows = [
        {
            "__key__": sample["__key__"],
            "bytes.jpg": sample["jpg"],
            "cls": int(sample["cls"]),
            "txt": sample["txt"].decode(),
            **{f"json.{name}": value for name, value in json.loads(sample["json"]).items()},
        }
        for sample in LOOPS[way](shards)
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), output)


if __name__ == "__main__":
    main()
