"""What obstore alone reaches with the same server and network: no client of this library can be faster here.

python -m bench.remote_bound WAY URL <RANGES    the client; at random: `threads`, `asyncio`; in order: `parts`

Nothing but requests: no mount, no cache, no pin. Bytes are compared when the clock has stopped. The processor time
of the server and of what makes its network slow is measured, too: with few cores it is a bound itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.data import Set
from bench.network import Network, without_proxies
from bench.systems import Broken, descendants, processor_seconds

if TYPE_CHECKING:
    from bench.run import Bench

READERS = 64  # threads, or tasks
PART, PARTS = 8 << 20, 8  # bytes of a request in order, and requests at once
STREAMED = 256 << 10  # bytes of a part that are taken at a time, at least


class Range(NamedTuple):
    """A range of the shard, and the checksum of its bytes."""

    begin: int
    end: int
    crc: int


def bound(bench: Bench, data: Set, server: Network) -> None:
    """One turn of each way: at random by threads and by asyncio, and the whole shard in parts."""
    [shard] = data.shards
    members = [Range(one.offset, one.offset + one.size, one.crc) for one in shard.members]
    random.Random(0).shuffle(members)
    for way in ("threads", "asyncio"):
        name = f"obstore alone, {way}"
        seconds, own, network = _measured(bench, way, server.of(shard.path), members)
        each = 1000 / len(members)
        bench.add(f"random, {READERS} readers", "reads/s", name, len(members) / seconds)
        bench.add("random, processor time of a read", "ms", name, own * each)
        bench.add("random, processor time of a read, server and network", "ms", name, network * each)
        bench.add("random, cores that server and network take", "", name, network / seconds)
    content = shard.path.read_bytes()
    starts = range(0, len(content), PART)
    parts = [
        Range(at, min(at + PART, len(content)), zlib.crc32(memoryview(content)[at : at + PART])) for at in starts
    ]
    seconds, own, network = _measured(bench, "parts", server.of(shard.path), parts)
    bench.add("in order", "MB/s", "obstore alone", len(content) / seconds / 1e6)
    bench.add("in order, cores that the client takes", "", "obstore alone", own / seconds)
    bench.add("in order, cores that server and network take", "", "obstore alone", network / seconds)


def _measured(bench: Bench, way: str, url: str, ranges: Sequence[Range]) -> tuple[float, float, float]:
    """The seconds of a client, its processor time, and that of the server and its network meanwhile.

    Notes if the server and its network leave less than half of the processors to any client.
    """
    network = descendants(os.getpid())[1:]
    before = processor_seconds(network)
    found = subprocess.run(
        [sys.executable, "-m", "bench.remote_bound", way, url],
        input=json.dumps(ranges),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=without_proxies(),
    )
    if found.returncode:
        raise Broken(found.stderr.strip().splitlines()[-1])
    seconds, own = json.loads(found.stdout)
    spent = processor_seconds(network) - before
    cores = len(os.sched_getaffinity(0))
    if spent / seconds > cores / 2:
        bench.results.note(
            f"server and network take {spent / seconds:.1f} of {cores} processors ({way}): they are the bound"
        )
    return seconds, own, spent


# --- the client ----------------------------------------------------------------------------------------------


class _Client:
    """Reads ranges of one URL; `contents` has their bytes afterwards."""

    def __init__(self, url: str, ranges: list[Range]) -> None:
        import obstore  # here: a child of a process that has used it hangs at its first call
        from obstore.store import HTTPStore

        self._obstore = obstore
        directory, _, self._path = url.rpartition("/")
        self._store = HTTPStore(directory + "/", client_options={"allow_http": True})
        self._turn = iter(ranges)
        self._lock = threading.Lock()
        self.contents: dict[Range, list[Any]] = {}

    def threads(self) -> None:
        every = [threading.Thread(target=self._by_thread) for _ in range(READERS)]
        for thread in every:
            thread.start()
        for thread in every:
            thread.join()

    def _by_thread(self) -> None:
        while True:
            with self._lock:
                one = next(self._turn, None)
            if one is None:
                return
            found = self._obstore.get_range(self._store, self._path, start=one.begin, end=one.end)
            self.contents[one] = [found]

    def asyncio(self) -> None:
        asyncio.run(self._at_once(READERS, self._whole))

    def parts(self) -> None:
        asyncio.run(self._at_once(PARTS, self._stream))

    async def _at_once(self, tasks: int, get: Any) -> None:
        async def work() -> None:
            for one in self._turn:
                self.contents[one] = await get(one)

        await asyncio.gather(*(work() for _ in range(tasks)))

    async def _whole(self, one: Range) -> list[Any]:
        return [await self._obstore.get_range_async(self._store, self._path, start=one.begin, end=one.end)]

    async def _stream(self, one: Range) -> list[Any]:
        found = await self._obstore.get_async(self._store, self._path, options={"range": (one.begin, one.end)})
        return [piece async for piece in found.stream(min_chunk_size=STREAMED)]


def _serve() -> None:
    ranges = [Range(*one) for one in json.load(sys.stdin)]
    client = _Client(sys.argv[2], ranges)
    since, before = time.perf_counter(), time.process_time()
    {"threads": client.threads, "asyncio": client.asyncio, "parts": client.parts}[sys.argv[1]]()
    print(json.dumps([time.perf_counter() - since, time.process_time() - before]), flush=True)
    wrong = len(client.contents) != len(ranges)
    for one, pieces in client.contents.items():
        wrong = wrong or zlib.crc32(b"".join(map(bytes, pieces))) != one.crc
    if wrong:
        print("wrong bytes", file=sys.stderr, flush=True)
    os._exit(int(wrong))  # an interpreter that has used its asyncio may abort when it ends


if __name__ == "__main__":
    _serve()
