"""How well an epoch mixes: orders of wdsfs and of its peers, by the measures of docs/how-to/train.md.

    python -m bench.orders

No bytes are read: a million samples in 1,000 shards, batches of 64, one rank. Peers that are not installed are
left out. Of webdataset its own buffer is run: 4 workers get shuffled shards, and give batches in turn.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import wdsfs
from wdsfs.library import shuffle

SHARDS, SHARD, BATCH, WORKERS = 1000, 1000, 64, 4
SAMPLES = SHARDS * SHARD

Order = Any  # an array with the number of each sample, in the order of an epoch


def quality(order: Order) -> str:
    """Return the shards of a batch, its largest share of one shard, the distance of neighbours, and the trend."""
    places = np.argsort(order)
    batches = (order[: SAMPLES // BATCH * BATCH] // SHARD).reshape(-1, BATCH)
    shards = np.mean([len(np.unique(batch)) for batch in batches])
    share = np.mean([np.bincount(batch).max() for batch in batches]) / BATCH
    trend = np.corrcoef(np.arange(SAMPLES), places)[0, 1]
    return f"{shards:6.1f} {share:7.1%} {np.abs(np.diff(places)).mean() / SAMPLES:8.2%} {abs(trend):7.3f}"


def of_wdsfs(open_ranges: int) -> Order:
    """Of ranges with 64 samples, 4 MiB of images of 64 KiB."""
    shuffle.PLAIN_RANGE = 64
    return np.array(list(wdsfs.Shuffle(range(SAMPLES), rank=0, world_size=1, open_ranges=open_ranges)))


def of_webdataset(buffer: int) -> Order:
    filters = importlib.import_module("webdataset.filters")
    shards = list(range(SHARDS))
    random.Random(0).shuffle(shards)

    def worker(number: int) -> Iterator[int]:
        samples = (shard * SHARD + at for shard in shards[number::WORKERS] for at in range(SHARD))
        yield from filters._shuffle(samples, buffer, min(buffer, 100), rng=random.Random(number))

    workers = [worker(number) for number in range(WORKERS)]
    turns = (list(itertools.islice(next_, BATCH)) for next_ in itertools.cycle(workers))
    return np.array(list(itertools.chain.from_iterable(itertools.islice(turns, SAMPLES // BATCH + 2 * WORKERS))))


def of_wids() -> Order:
    class Shards:
        lengths = (SHARD,) * SHARDS

        def __len__(self) -> int:
            return SAMPLES

    return np.array(list(importlib.import_module("wids.wids").ChunkedSampler(Shards(), shuffle=True)))


def of_mosaic(name: str) -> Order:
    get_shuffle = getattr(importlib.import_module(f"streaming.base.shuffle.{name}"), f"get_shuffle_{name}")
    return get_shuffle(np.full(SHARDS, SHARD), 1, 1, 0, 1 << 18)


ORDERS: dict[str, tuple[str, Callable[[], Order]]] = {
    "a full shuffle": ("numpy", lambda: np.random.default_rng(0).permutation(SAMPLES)),
    "wdsfs.Shuffle": ("wdsfs", lambda: of_wdsfs(100)),
    "wdsfs.Shuffle, open_ranges=50": ("wdsfs", lambda: of_wdsfs(50)),
    "webdataset, .shuffle(1000)": ("webdataset", lambda: of_webdataset(1000)),
    "webdataset, .shuffle(50000)": ("webdataset", lambda: of_webdataset(50_000)),
    "wids, ChunkedSampler": ("wids", of_wids),
    "mosaic, py1e": ("streaming", lambda: of_mosaic("py1e")),
    "mosaic, py1br": ("streaming", lambda: of_mosaic("py1br")),
}


if __name__ == "__main__":
    print(f"{'':32} shards   share distance   trend")
    for name, (module, order) in ORDERS.items():
        if importlib.util.find_spec(module) is not None:
            print(f"{name:32} {quality(order())}", flush=True)
