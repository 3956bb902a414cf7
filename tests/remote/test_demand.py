"""One request for each range, demand before prefetch, one budget: with a store in memory, without time."""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import AsyncIterator, Sequence

import pytest

from tests.remote.stores import (
    MemoryCache,
    MemoryStore,
    content,
    covered,
    demand_of,
    in_loop,
    memory_cache,
    settled,
    until,
)
from wdsfs.errors import CacheFull, NoRanges, Unreachable
from wdsfs.remote import demand as demand_module
from wdsfs.remote.demand import PART, Demand
from wdsfs.remote.held_bytes import SLAB
from wdsfs.remote.parts import RemoteObject

MIB = 1 << 20
SIZE = 3 * MIB
DATA = content(SIZE)


def made(
    gated: bool = False, cached: bool = True, memory: int = 64 * MIB, data: bytes = DATA
) -> tuple[MemoryStore, Demand, RemoteObject]:
    store = MemoryStore(gated)
    url, pin = store.put(data)
    item = RemoteObject(url, pin, memory_cache(len(data)) if cached else None)
    return store, demand_of(store, memory), item


async def read(demand: Demand, item: RemoteObject, begin: int, end: int, *spans: tuple[int, int]) -> bytes:
    return b"".join(await demand.read(item, begin, end, spans))


async def answered(store: MemoryStore, readers: Sequence[asyncio.Task[bytes]]) -> AsyncIterator[None]:
    """Let the store answer until all readers are done; a step for each look."""
    while not all(reader.done() for reader in readers):
        store.let()
        await asyncio.sleep(0)
        yield


@pytest.mark.parametrize("cached", [True, False])
@in_loop
async def test_many_readers_of_overlapping_ranges_make_one_request_for_each_byte(cached: bool) -> None:
    store, demand, item = made(gated=True, cached=cached)
    order = random.Random(3)
    ranges = [(begin, begin + order.randrange(1, 200_000)) for begin in order.sample(range(SIZE - 200_000), 100)]
    readers = [asyncio.create_task(read(demand, item, *one)) for one in ranges]
    await settled()
    store.let()
    assert await asyncio.gather(*readers) == [DATA[begin:end] for begin, end in ranges]
    covered(store.requests)
    assert sum(len(data) for _, _, data in item.held) <= demand.used == demand.held.size
    before = len(store.requests)
    assert await read(demand, item, *ranges[7]) == DATA[slice(*ranges[7])]
    assert len(store.requests) == before


@pytest.mark.parametrize("piece", [1 << 30, 5000])
@in_loop
async def test_the_loop_does_not_wait_for_room_in_the_cache(piece: int) -> None:
    """A thread does, now and then or always; what has come is in the cache then, and its readers have it."""
    order = random.Random(piece)
    for chance in (0.3, 1.0):
        store, demand, item = made()
        store.piece = piece
        assert isinstance(item.cached, MemoryCache)
        item.cached.is_busy = lambda chance=chance: order.random() < chance
        for begin in range(0, SIZE, 100_000):
            end = min(begin + 50_000, SIZE)
            assert await read(demand, item, begin, end) == DATA[begin:end]
            await demand.stored(item, begin, end)
            assert not item.cached.missing(begin, end)
            assert item.cached.read(end - begin, begin) == DATA[begin:end]
        assert demand.held.size == 0


@in_loop
async def test_the_columns_of_a_sample_are_one_request() -> None:
    """Also with gaps between them; a column that is far away is a request of its own."""
    store, demand, item = made()
    sample = (100_000, 150_000), (160_000, 161_000), (200_000, 260_000), (2 * MIB, 2 * MIB + 10)
    assert await read(demand, item, 160_000, 161_000, *sample) == DATA[160_000:161_000]
    await settled()
    assert store.requests == [(98_304, 262_144), (2 * MIB, 2 * MIB + 4096)]
    assert await read(demand, item, 200_000, 260_000, *sample) == DATA[200_000:260_000]
    assert len(store.requests) == 2


@in_loop
async def test_a_reader_does_not_wait_for_what_others_of_its_sample_need() -> None:
    store, demand, item = made(gated=True)
    reader = asyncio.create_task(read(demand, item, 0, 10, (2 * MIB, 2 * MIB + 10)))
    await settled()
    assert [span for span, _ in store.waiting] == [(0, 4096), (2 * MIB, 2 * MIB + 4096)]
    store.let(1)
    assert await reader == DATA[:10]
    store.let()
    await until(lambda: not demand.in_flight)
    assert await read(demand, item, 2 * MIB, 2 * MIB + 10) == DATA[2 * MIB : 2 * MIB + 10]
    assert len(store.requests) == 2


@in_loop
async def test_a_thousand_reads_are_under_way_at_once() -> None:
    """As many requests as there may be, the others in the order in which they came."""
    store, demand, item = made(gated=True, data=content(1000 * 4096))
    readers = [asyncio.create_task(read(demand, item, 4096 * n, 4096 * n + 5)) for n in range(1000)]
    await settled()
    assert len(store.waiting) == demand_module.REQUESTS
    assert demand.queued == 1000 - demand_module.REQUESTS
    readers.pop().cancel()  # one that waits for its turn makes no request
    await settled()
    async for _ in answered(store, readers):
        pass
    assert [await one for one in readers] == [store.objects[item.url][4096 * n : 4096 * n + 5] for n in range(999)]
    assert store.requests == [(4096 * n, 4096 * n + 4096) for n in range(999)]


@in_loop
async def test_demand_goes_before_prefetch() -> None:
    """However much prefetch is queued: the reader's request is the next one that the store sees."""
    store, demand, item = made(gated=True, data=bytes(64 * MIB))
    demand.prefetch(item, 0, 60 * MIB)
    await settled()
    ahead = len(store.waiting)
    assert ahead > 0
    assert demand.queued
    reader = asyncio.create_task(read(demand, item, 63 * MIB, 63 * MIB + 10))
    await settled()
    assert [span for span, _ in store.waiting][ahead:] == [(63 * MIB, 63 * MIB + 4096)]
    store.waiting[-1][1].set()
    assert await reader == bytes(10)
    demand.forget(item)


@in_loop
async def test_a_reader_pulls_what_it_needs_out_of_the_queue_of_prefetch() -> None:
    store, demand, item = made(gated=True, data=bytes(64 * MIB), memory=2 * PART)
    demand.prefetch(item, 0, 64 * MIB)
    await settled()
    assert [span for span, _ in store.waiting] == [(0, PART)]  # half of the memory
    reader = asyncio.create_task(read(demand, item, 40 * MIB, 40 * MIB + 10))
    await settled()
    assert [span for span, _ in store.waiting] == [(0, PART), (40 * MIB, 44 * MIB)]
    store.let()
    assert await reader == bytes(10)
    demand.forget(item)


@in_loop
async def test_announced_ranges_are_fetched_once_although_their_readers_leave() -> None:
    """From a request that is in flight, and from one that is queued."""
    store, demand, item = made(gated=True, data=bytes(64 * MIB), memory=2 * PART)
    demand.prefetch(item, 0, 64 * MIB)
    readers = [asyncio.create_task(read(demand, item, at * MIB, at * MIB + 10)) for at in (1, 41, 51)]
    await settled()
    assert (len(store.waiting), demand.queued) == (2, 14)
    for reader in readers:
        reader.cancel()
    await settled()
    while demand.in_flight or demand.queued:
        store.let()
        await asyncio.sleep(0)
    assert store.cancelled == []
    assert sorted(store.requests) == [(at * PART, (at + 1) * PART) for at in range(16)]


@pytest.mark.parametrize("cached", [True, False])
@in_loop
async def test_a_reader_gets_its_bytes_as_soon_as_they_have_come(cached: bool) -> None:
    """Of a part that is still under way, in pieces that do not end with a block; the part goes on without it."""
    store, demand, item = made(gated=True, cached=cached)
    store.piece = 300_001
    demand.prefetch(item, 0, MIB)
    first = asyncio.create_task(read(demand, item, 5, 300_000))
    last = asyncio.create_task(read(demand, item, MIB - 5, MIB))
    await settled()
    store.let(1)
    assert await first == DATA[5:300_000]
    assert demand.in_flight == 1
    assert await read(demand, item, 299_000, 300_001) == DATA[299_000:300_001]
    assert not last.done()
    async for _ in answered(store, [last]):
        pass
    assert await last == DATA[MIB - 5 : MIB]
    await until(lambda: not demand.in_flight)
    store.gated = False
    assert await read(demand, item, 0, MIB) == DATA[:MIB]
    assert store.requests == [(0, MIB)]
    assert demand.used == demand.held.size == (0 if cached else SLAB)


@in_loop
async def test_what_has_come_of_a_part_is_kept_when_the_rest_does_not() -> None:
    store, demand, item = made(gated=True)
    store.piece = 300_001
    reader = asyncio.create_task(read(demand, item, 0, MIB))
    await settled()
    store.let(1)
    await settled()
    store.error = Unreachable("the line is cut")
    store.let()
    with pytest.raises(Unreachable, match="the line is cut"):
        await reader
    store.gated, store.error = False, None
    assert await read(demand, item, 0, MIB) == DATA[:MIB]
    assert store.requests == [(0, MIB), (300_001 // 4096 * 4096, MIB)]


@pytest.mark.parametrize("cached", [True, False])
@in_loop
async def test_the_budget_is_kept_under_mixed_load(cached: bool) -> None:
    """Prefetch of four objects and random readers; what is counted, and what the store has in its hands."""
    memory = 16 * MIB
    store = MemoryStore(gated=True)
    demand = demand_of(store, memory)
    items = []
    for number in range(4):
        url, pin = store.put(content(12 * MIB, number), f"s3://b/{number}.tar")
        items.append(RemoteObject(url, pin, memory_cache(12 * MIB) if cached else None))
        demand.prefetch(items[-1], 0, 12 * MIB)
    order, most, ahead = random.Random(5), 0, 0
    readers, wanted = [], []
    for _ in range(300):
        item, begin = order.choice(items), order.randrange(11 * MIB)
        readers.append(asyncio.create_task(read(demand, item, begin, begin + 100_000)))
        wanted.append((item, begin, readers[-1]))
        await asyncio.sleep(0)
        if order.random() < 0.5:
            order.shuffle(store.waiting)
            store.let(3)
        in_hands = sum(end - begin for (begin, end), _ in store.waiting)
        most, ahead = max(most, demand.used, in_hands), max(ahead, demand.used_ahead)
    async for _ in answered(store, readers):
        most, ahead = max(most, demand.used), max(ahead, demand.used_ahead)
    for item, begin, reader in wanted:
        assert await reader == store.objects[item.url][begin : begin + 100_000]
    assert most <= memory
    assert 0 < ahead <= memory // 2
    while demand.in_flight or demand.queued:  # prefetch that no reader has waited for
        store.let()
        await asyncio.sleep(0)
        most = max(most, demand.used)
    assert most <= memory
    slabs = {id(data.obj): memoryview(data.obj).nbytes for item in items for _, _, data in item.held}
    assert demand.used == sum(slabs.values())  # nothing keeps memory that is not counted


@in_loop
async def test_readers_that_hold_all_memory_do_not_wait_for_each_other_for_ever() -> None:
    """Each holds a part and waits for another one, for which there is no room."""
    data = content(64 * MIB)
    store, demand, item = made(gated=True, cached=False, memory=16 * MIB, data=data)
    ends = [8 * MIB * n for n in range(1, 8)]
    readers = [asyncio.create_task(read(demand, item, end - 5, end + 5)) for end in ends]
    wide = [asyncio.create_task(read(demand, item, end - 8 * MIB, end)) for end in ends]
    async for _ in answered(store, [*readers, *wide]):
        pass
    assert await asyncio.gather(*readers) == [data[end - 5 : end + 5] for end in ends]
    assert await asyncio.gather(*wide) == [data[end - 8 * MIB : end] for end in ends]


@in_loop
async def test_what_is_held_leaves_some_of_the_memory_for_the_holes_between() -> None:
    data = content(64 * MIB)
    _, demand, item = made(cached=False, memory=16 * MIB, data=data)
    for number in range(32):
        await read(demand, item, number * MIB, number * MIB + MIB)
    assert demand.used == demand.held.size == 11 * MIB
    requests = demand.requests
    await read(demand, item, 22 * MIB, 32 * MIB)
    assert demand.requests == requests
    await read(demand, item, 18 * MIB, 19 * MIB)
    assert demand.requests == requests + 1
    demand.forget(item)
    assert demand.used == demand.held.size == 0


@in_loop
async def test_the_memory_of_what_is_held_is_given_back_when_no_reader_has_it() -> None:
    """A slab that a reader still uses keeps its bytes; then nothing keeps the slab."""
    data = content(64 * MIB)
    _, demand, item = made(cached=False, memory=16 * MIB, data=data)
    for number in range(4):
        await read(demand, item, number * MIB, number * MIB + MIB)
    _, _, piece = item.held.overlapping(MIB // 2, MIB)[0]
    slabs = [weakref.ref(data.obj) for _, _, data in item.held]
    used = bytes(piece)
    for number in range(8, 32):
        await read(demand, item, number * MIB, number * MIB + MIB)
    assert piece == used == data[:MIB]
    del piece
    assert not item.held.overlapping(0, 4 * MIB)
    assert {slab() for slab in slabs} == {None}


@in_loop
async def test_memory_that_others_need_is_not_taken_from_a_reader_that_waits() -> None:
    """It has found one half of its bytes in memory, and waits for the other half."""
    data = content(64 * MIB)
    store, demand, item = made(cached=False, memory=16 * MIB, data=data)
    await read(demand, item, 0, 4096)
    store.gated = True
    reader = asyncio.create_task(read(demand, item, 0, 8192))
    await settled()
    others = [asyncio.create_task(read(demand, item, n * 8 * MIB, n * 8 * MIB + 8 * MIB)) for n in (2, 4, 6)]
    await settled()
    store.waiting.append(store.waiting.pop(0))  # the others are answered first
    store.let(1)
    await settled()
    assert not item.held.overlapping(0, 4096)
    async for _ in answered(store, [reader, *others]):
        pass
    assert await reader == data[:8192]
    assert store.requests.count((0, 4096)) == 1


@in_loop
async def test_what_is_interrupted_is_dropped() -> None:
    """The request that is under way, and the one that waits; not those that somebody else needs, too."""
    store, demand, item = made(gated=True)
    first = [asyncio.create_task(read(demand, item, 4096 * n, 4096 * n + 9)) for n in (1, 9)]
    other = asyncio.create_task(read(demand, item, 4096 * 9, 4096 * 9 + 9))
    await settled()
    for reader in first:
        reader.cancel()
    await settled()
    assert store.cancelled == [(4096, 8192)]
    again = asyncio.create_task(read(demand, item, 4096, 4100))
    await settled()
    store.let()
    assert (await other, await again) == (DATA[4096 * 9 : 4096 * 9 + 9], DATA[4096:4100])
    assert demand.used == 0
    assert store.requests == [(4096, 8192), (4096 * 9, 4096 * 10), (4096, 8192)]


@pytest.mark.parametrize("cached", [True, False])
@in_loop
async def test_an_error_reaches_every_reader_and_nothing_is_left(cached: bool) -> None:
    store, demand, item = made(gated=True, cached=cached)
    store.error = Unreachable("no answer")
    readers = [asyncio.create_task(read(demand, item, 0, 10)) for _ in range(3)]
    await settled()
    store.let()
    assert [str(error) for error in await asyncio.gather(*readers, return_exceptions=True)] == ["no answer"] * 3
    assert (demand.used, demand.in_flight, len(item.parts)) == (0, 0, 0)
    store.error, store.gated = None, False
    assert await read(demand, item, 0, 10) == DATA[:10]


@in_loop
async def test_a_full_cache_means_going_on_without_the_cache(caplog: pytest.LogCaptureFixture) -> None:
    store, demand, item = made()
    assert isinstance(item.cached, MemoryCache)
    item.cached.full = True
    for begin in (0, 500_000, 0):
        assert await read(demand, item, begin, begin + 100) == DATA[begin : begin + 100]
    assert store.requests == [(0, 4096), (499_712, 503_808)]
    assert [record.getMessage() for record in caplog.records] == [
        "s3://b: the cache is full; some shards are read without it"
    ]


@in_loop
async def test_a_cache_that_forgets_at_once_serves_right_bytes() -> None:
    store, demand, item = made()
    assert isinstance(item.cached, MemoryCache)
    assert await read(demand, item, 0, 100) == DATA[:100]
    item.cached.blocks.clear()
    assert await read(demand, item, 50, 5000) == DATA[50:5000]
    assert store.requests == [(0, 4096), (0, 8192)]


@in_loop
async def test_what_another_process_fetches_is_not_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two mounts on one cache. A dead process has no claim; a stopped one has it for a while."""
    cache = memory_cache(SIZE)
    store = MemoryStore(gated=True)
    url, pin = store.put(DATA)
    sides = [
        (demand_of(store, 64 * MIB), RemoteObject(url, pin, memory_cache(SIZE, cache.blocks, cache.claims)))
        for _ in range(2)
    ]
    readers = [asyncio.create_task(read(*side, 0, 100_000)) for side in sides]
    await settled()
    assert store.requests == [(0, 102_400)]
    store.let()
    assert [await one for one in readers] == [DATA[:100_000]] * 2
    assert store.requests == [(0, 102_400)]
    cache.claims.append((MIB, 2 * MIB))  # of a third one
    reader = asyncio.create_task(read(*sides[0], MIB, MIB + 10))
    await settled()
    assert len(store.requests) == 1
    cache.claims.clear()
    await until(lambda: store.waiting)
    store.let()
    assert await reader == DATA[MIB : MIB + 10]
    cache.claims.append((0, SIZE))
    monkeypatch.setattr(demand_module, "CLAIM_SECONDS", 0.02)
    store.gated = False
    assert await read(*sides[1], 2 * MIB, SIZE) == DATA[2 * MIB :]


@pytest.mark.parametrize(
    ("memory", "in_parallel", "requests"), [(256, False, 1), (64, False, 4), (8, False, 5), (256, True, 10)]
)
@in_loop
async def test_an_announced_range_is_one_request_if_the_memory_allows_it(
    memory: int, in_parallel: bool, requests: int
) -> None:
    store, demand, item = made(data=bytes(20 * MIB), memory=memory * MIB)
    demand.prefetch(item, 0, 20 * MIB, in_parallel=in_parallel)
    await until(lambda: not demand.in_flight and not demand.queued)
    assert (len(store.requests), store.fetched) == (requests, 20 * MIB)
    assert demand.most <= memory * MIB


@in_loop
async def test_a_server_without_ranges_sends_the_object_once_and_needs_room_in_the_cache() -> None:
    store, demand, item = made()
    assert isinstance(item.cached, MemoryCache)
    store.ranges, item.cached.full = False, True
    for begin in (0, SIZE - 5):
        with pytest.raises(CacheFull, match=r"s3://b/o\.tar: .*--cache-size"):
            await read(demand, item, begin, begin + 5)
    assert (0, SIZE) not in store.requests
    item.cached.full = False
    readers = [asyncio.create_task(read(demand, item, n * 900_000, n * 900_000 + 5)) for n in range(3)]
    assert await asyncio.gather(*readers) == [DATA[n * 900_000 : n * 900_000 + 5] for n in range(3)]
    assert await read(demand, item, SIZE - 5, SIZE) == DATA[-5:]
    assert store.requests.count((0, SIZE)) == 1

    item.cached.blocks.clear()  # as by other objects; it comes again
    assert await read(demand, item, 0, 5) == DATA[:5]
    assert store.requests.count((0, SIZE)) == 2
    item.cached = None
    with pytest.raises(NoRanges):
        await read(demand, item, 0, 5)


@in_loop
async def test_a_whole_body_that_breaks_off_is_an_error_and_is_tried_again() -> None:
    store, demand, item = made()
    store.ranges, store.error = False, None

    async def broken(url: object, pin: object):  # type: ignore[no-untyped-def]
        yield DATA[:5000]
        raise Unreachable("the body was cut")

    whole, store.get_all = store.get_all, broken  # type: ignore[method-assign]
    with pytest.raises(Unreachable, match="the body was cut"):
        await read(demand, item, SIZE - 5, SIZE)
    store.get_all = whole  # type: ignore[method-assign]
    assert await read(demand, item, SIZE - 5, SIZE) == DATA[-5:]


@in_loop
async def test_forgetting_an_object_drops_its_prefetch_and_what_is_held() -> None:
    store, demand, item = made(gated=True, cached=False)
    demand.prefetch(item, 0, SIZE)
    await settled()
    store.let(1)
    await until(lambda: item.held)
    demand.forget(item)
    await until(lambda: not demand.in_flight)
    assert (demand.used, demand.queued, len(item.parts), len(item.held)) == (0, 0, 0, 0)
