"""Passes over an object: which reads fetch ahead, and how much is fetched for what is used."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable

import pytest

from tests.remote.stores import MemoryStore, covered, demand_of, memory_cache, until
from wdsfs.remote.demand import Demand
from wdsfs.remote.parts import RemoteObject
from wdsfs.remote.passes import NEXT, WINDOW_MAX, WINDOW_MIN, Passes

MIB = 1 << 20
SAMPLE = 101_376  # a member of 100 kB with its header
COUNT = 1200
SIZE = COUNT * SAMPLE


class Client:
    """Reads samples as a process of a mount does: what is in the cache is only noted, by the MiB."""

    def __init__(self, demand: Demand, item: RemoteObject) -> None:
        self.demand, self.item = demand, item
        self.at, self.unsaid = -1, 0

    async def read(self, number: int) -> None:
        begin, end = number * SAMPLE, (number + 1) * SAMPLE - 512
        assert self.item.cached is not None
        if self.item.cached.read(end - begin, begin) is None:
            await self.demand.read(self.item, begin, end)
            self.seen(begin, end, is_miss=True)
        else:
            self.unsaid += end - begin
            if begin // MIB != self.at:
                self.seen(begin, end, is_miss=False)
            self.at = begin // MIB

    def seen(self, begin: int, end: int, is_miss: bool) -> None:
        ahead = self.item.passes.seen(begin, end, end - begin if is_miss else self.unsaid, is_miss=is_miss)
        self.unsaid = 0
        if ahead is not None:
            self.demand.prefetch(self.item, *ahead)


def fetched_for(
    streams: Iterable[Iterable[int]], size: int = SIZE, opening: int = WINDOW_MIN
) -> tuple[MemoryStore, int]:
    """Read samples, one of each stream in turn; returns the store, and how many reads found nothing there."""
    store = MemoryStore()

    async def main() -> None:
        url, pin = store.put(bytes(size))
        item = RemoteObject(url, pin, memory_cache(size))
        item.passes.opening = opening
        demand = demand_of(store, 256 * MIB)
        waiting = [(Client(demand, item), iter(stream)) for stream in streams]
        while waiting:
            for one in list(waiting):
                number = next(one[1], None)
                if number is None:
                    waiting.remove(one)
                else:
                    await one[0].read(number)
                    await until(lambda: not demand.in_flight)  # the network is faster than the reader

    asyncio.run(main())
    covered(store.requests)
    return store, len(store.requests)


def blocks_of(worker: int, workers: int, block: int) -> list[int]:
    """The samples that one of several workers of a data loader reads."""
    return [number for number in range(COUNT) if number // block % workers == worker]


def test_a_pass_that_ends_early_has_fetched_little_in_vain() -> None:
    for read in (3, 10, 30, 100):
        store, _ = fetched_for([range(read)])
        assert store.fetched <= max(9.5 * read * SAMPLE, MIB + read * SAMPLE)


@pytest.mark.parametrize("window", [WINDOW_MAX, 8 * MIB])
def test_the_first_window_is_as_wide_as_latency_asks_and_memory_allows(window: int) -> None:
    """The first read after the head of an object may be chance; the next one is not."""
    passes = Passes(SIZE, window)
    passes.opening = 20 * MIB
    ahead = [passes.seen(at, at + SAMPLE, SAMPLE) for at in range(0, 3 * SAMPLE, SAMPLE)]
    wide = 3 * SAMPLE + min(20 * MIB, window)
    assert ahead == [None, (2 * SAMPLE, 2 * SAMPLE + WINDOW_MIN), (2 * SAMPLE + WINDOW_MIN, wide)]


def test_the_first_file_of_a_shard_brings_the_next_ones_but_of_this_shard_only() -> None:
    """A reader of files waits twice at the head of a shard, not three times; samples and scans fetch no more."""
    assert Passes(SIZE).seen(512, SAMPLE, SAMPLE, is_file=True) == (SAMPLE, SAMPLE + WINDOW_MIN)
    assert Passes(SIZE).seen(512, SAMPLE, SAMPLE) is None
    assert Passes(SIZE).seen(SAMPLE + 512, 2 * SAMPLE, SAMPLE, is_file=True) is None
    small = Passes(3 * SAMPLE)
    assert small.seen(512, SAMPLE, SAMPLE, is_file=True) == (SAMPLE, 3 * SAMPLE)
    assert Passes(SIZE).go_on(small, is_usual=True) is None  # nothing shows that the reader goes on


@pytest.mark.parametrize("members", [COUNT, 13_000])
def test_random_readers_of_a_distant_store_fetch_next_to_nothing_in_vain(members: int) -> None:
    size, vain, reads = SIZE // members, 0, 5000
    for seed in range(10):
        shards = [Passes(SIZE) for _ in range(8)]
        for shard in shards:
            shard.opening = 20 * MIB
        choose = random.Random(seed)
        for _ in range(reads):
            begin = choose.randrange(members) * size + 512
            ahead = choose.choice(shards).seen(begin, begin + size - 512, size - 512, is_file=True)
            vain += 0 if ahead is None else ahead[1] - ahead[0]
    assert vain <= 0.02 * 10 * reads * size


ORDERS: dict[str, tuple[list[Iterable[int]], float, int]] = {  # what is read, shares of the object, requests
    "in order": ([range(COUNT)], 1, 60),
    "from the middle": ([range(COUNT // 2, COUNT)], 0.505, 60),
    **{
        f"by workers in blocks of {n}": ([blocks_of(at, 4, n) for at in range(4)], 1.01, 100)
        for n in (1, 4, 16, 64)
    },
    "four passes at a time": ([range(start, start + 300) for start in range(0, COUNT, 300)], 1.01, 150),
    "as ls sorts 0, 1, 10, 100, 1000": ([sorted(range(COUNT), key=str)], 1.01, 200),
    "every tenth": ([range(0, COUNT, 10)], 0.11, COUNT // 10 + 1),
}


@pytest.mark.parametrize("order", ORDERS)
def test_passes_are_fetched_in_few_requests_and_little_in_vain(order: str) -> None:
    streams, share, most = ORDERS[order]
    store, requests = fetched_for(streams)
    assert store.fetched <= share * SIZE
    assert requests < most
    if order == "in order":
        assert store.fetched == SIZE
        assert max(end - begin for begin, end in store.requests) >= 4 * MIB


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("readers", [1, 8])
def test_random_reads_fetch_nothing_but_their_samples(seed: int, readers: int) -> None:
    numbers = random.Random(seed).sample(range(COUNT), 200)
    store, requests = fetched_for((numbers[start::readers] for start in range(readers)), opening=20 * MIB)
    # Blocks that two neighbours share are fetched with the first of them.
    assert store.fetched <= 200 * (SAMPLE + 8192)
    assert max(end - begin for begin, end in store.requests) <= SAMPLE + 8192
    assert requests <= 200


def test_random_reads_of_a_small_shard_fetch_it_at_most_once() -> None:
    for seed in range(20):
        numbers = random.Random(seed).sample(range(50), 50)
        store, _ = fetched_for([numbers], 50 * SAMPLE)
        assert store.fetched <= 50 * SAMPLE


def test_a_second_pass_is_recognized_like_the_first() -> None:
    """Nothing of the first one was kept."""
    passes = Passes(SIZE)
    for _ in range(2):
        assert passes.seen(0, SAMPLE, SAMPLE) is None
        assert passes.seen(SAMPLE, 2 * SAMPLE, SAMPLE) is not None
        for number in range(2, 20):
            passes.seen(number * SAMPLE, (number + 1) * SAMPLE, SAMPLE)


def test_a_pass_that_was_announced_has_its_whole_window_at_once() -> None:
    assert Passes(SIZE, 64 * MIB).announced(0) == (0, 64 * MIB)
    assert Passes(SIZE).announced(MIB) == (MIB, min(MIB + WINDOW_MAX, SIZE))


def test_what_is_read_of_a_pass_may_not_be_a_small_part_of_it() -> None:
    """A tenth of the bytes, all in small steps: no window."""
    passes = Passes(SIZE)
    ahead = [passes.seen(at, at + 6000, 6000) for at in range(0, SIZE, 60_000)]
    assert not any(ahead)


def going_on(order: Iterable[int], shards: int = 4) -> list[tuple[int, int] | None]:
    """Read shards whole, in this order; what is fetched of the one after each before it is read."""
    size = 400 * SAMPLE
    passes = [Passes(size) for _ in range(shards + 1)]
    further, last = [], -1
    for shard in order:
        if shard != last + 1:
            passes[last + 1].gone_elsewhere()
        last = shard
        for number in range(400):
            ahead = passes[shard].seen(number * SAMPLE, (number + 1) * SAMPLE, SAMPLE)
            if ahead is not None and ahead[1] == size:
                further.append(passes[shard + 1].go_on(passes[shard]))
    return further


def test_a_pass_goes_over_the_ends_of_shards() -> None:
    """With little of the second shard, for nothing shows yet that shards are read in their order."""
    assert going_on(range(4)) == [(0, WINDOW_MIN), *[(0, NEXT)] * 3]


def test_shards_that_are_read_in_any_order_fetch_little_of_others() -> None:
    assert going_on([2, 0, 3, 1]) == [(0, WINDOW_MIN)] * 4


@pytest.mark.parametrize("is_usual", [True, False])
def test_a_pass_that_has_come_from_another_shard_has_its_window_at_once(is_usual: bool) -> None:
    before, here = Passes(SIZE), Passes(SIZE)
    for number in range(COUNT - 1):
        before.seen(number * SAMPLE, (number + 1) * SAMPLE, SAMPLE)
    ahead = NEXT if is_usual else WINDOW_MIN
    assert here.go_on(before, is_usual=is_usual) == (0, ahead)
    assert here.go_on(before) is None
    assert here.seen(0, SAMPLE, SAMPLE) == (ahead, min(SAMPLE + WINDOW_MAX, SIZE))
