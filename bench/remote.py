"""Shards behind a slow network: wdsfs, rclone, ratarmount, webdataset's `pipe:curl`.

Each measurement has an empty cache, unless it says otherwise; the index is made before with a cache of its own.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.data import Set
from bench.network import (
    Mount,
    Network,
    Piece,
    Reading,
    Remote,
    mounted,
    network,
    read,
    rest,
    samples_of,
    without_proxies,
)
from bench.systems import Broken, Wdsfs, descendants, processor_seconds, program, run

if TYPE_CHECKING:
    from bench.data import Shard
    from bench.run import Bench

READERS, READS = 64, 600  # threads of the client; files that each random measurement reads
SAMPLES = 150  # whole samples that are read at random
COLUMNS = 3  # of the set `commit`

_STREAM = """
import sys, time, webdataset
since = time.perf_counter()
for _ in webdataset.WebDataset(sys.argv[1:], shardshuffle=False):
    pass
print(time.perf_counter() - since)
"""


# --- what is measured ----------------------------------------------------------------------------------------


def remote(bench: Bench) -> None:
    """One shard of members of 100 kB: cold in order and at random, by many readers, from the cache; its index.
    Eight shards of samples of three files: whole samples."""
    one, several = bench.sets.get("remote"), bench.sets.get("commit")
    home = bench.sets.home / "network"
    wdsfs = Wdsfs(bench.say)
    with network(bench.sets.home, home) as server:
        shard = Remote(wdsfs, server, home, one.paths)
        samples = Remote(wdsfs, server, home / "samples", several.paths)
        samples.home.mkdir(mode=0o700)
        for turn in range(bench.repetitions):
            passes: tuple[tuple[str, Callable[[int], None]], ...] = (
                ("wdsfs", lambda turn: _wdsfs(bench, shard, one, server, turn)),
                ("rclone", lambda turn: _rclone(bench, one, several, server, home, turn)),
                ("ratarmount", lambda turn: _ratarmount(bench, one, server, home, turn)),
                ("webdataset pipe:curl", lambda _: _pipe(bench, one, server)),
                ("wdsfs", lambda turn: _whole_samples(bench, samples, several, server, turn)),
            )
            for name, take in passes:
                with bench.attempt_at(name):
                    bench.say(f"{name}, turn {turn + 1}")
                    take(turn)


def _cases(
    bench: Bench, name: str, pieces: list[Piece], server: Network, mount: Callable[[], Mount], turn: int
) -> None:
    some = random.Random(turn).sample(pieces, min(READS, len(pieces)))
    with mount():
        bench.add("in order", "MB/s", name, read(pieces).rate)
    with mount():
        count = len(some) // 6
        found, requests, size = _fetched(server, some[:count])
        bench.add("random, a read", "ms", name, found.each * 1000)
        bench.add("random, requests a read", "", name, requests / count)
        bench.add("random, bytes fetched / used", "", name, size / found.bytes)
    with mount() as pid:
        many_readers(bench, "random", name, some, server, pid)


def many_readers(bench: Bench, order: str, name: str, some: Sequence[Piece], server: Network, pid: int) -> None:
    """Reads of many readers at once: how many a second, their requests, bytes, and processor time of the mount."""
    before = processor_seconds(descendants(pid))
    found, requests, size = _fetched(server, some, READERS)
    spent = processor_seconds(descendants(pid)) - before
    bench.add(f"{order}, {READERS} readers", "reads/s", name, len(some) / found.seconds)
    bench.add(f"{order}, {READERS} readers, requests a read", "", name, requests / len(some))
    bench.add(f"{order}, {READERS} readers, bytes fetched / used", "", name, size / found.bytes)
    bench.add(f"{order}, processor time of a read", "ms", name, spent / len(some) * 1000)


def _fetched(server: Network, pieces: Sequence[Piece], threads: int = 1) -> tuple[Reading, int, int]:
    """Read pieces; what that took, the requests of the server for it, and their bytes."""
    before = server.traffic()
    found = read(pieces, threads)
    requests, size = (now - then for now, then in zip(server.traffic(), before, strict=True))
    return found, requests, size


def _wdsfs(bench: Bench, shards: Remote, data: Set, server: Network, turn: int) -> None:
    bench.add("index, the whole command", "s", "wdsfs", shards.index())
    [shard] = data.shards
    pieces = [
        Piece(f"{shards.mountpoint}/{shard.stem}/{member.name}", 0, member.size, member.crc)
        for member in shard.members
    ]
    files = ("--layout", "files")
    _cases(bench, "wdsfs", pieces, server, lambda: shards.mount(*files), turn)
    with shards.mount(*files) as pid:
        read(pieces)  # now it is in the cache
        rest(pid)
    anywhere = random.Random(turn).sample(pieces, len(pieces))
    for order, some in (("in order", pieces), ("random", anywhere)):
        for case, what in ((f"{order}, cached", []), (f"{order}, local shard", data.paths)):
            with shards.mount(*files, what=what, fresh=False):
                bench.add(case, "MB/s", "wdsfs", read(some).rate)


def _whole_samples(bench: Bench, shards: Remote, data: Set, server: Network, turn: int) -> None:
    if not turn:
        shards.index()
    with shards.mount():
        _samples(bench, "wdsfs", samples_of(data, shards.mountpoint), server, turn)


def _samples(bench: Bench, name: str, samples: list[list[Piece]], server: Network, turn: int) -> None:
    some = random.Random(turn).sample(samples, min(SAMPLES, len(samples) // 2))
    found, requests, size = _fetched(server, [piece for sample in some for piece in sample])
    bench.add("whole samples, a sample", "ms", name, found.seconds / len(some) * 1000)
    bench.add("whole samples, requests a sample", "", name, requests / len(some))
    bench.add("whole samples, bytes fetched / used", "", name, size / found.bytes)


def _rclone(bench: Bench, data: Set, several: Set, server: Network, home: Path, turn: int) -> None:
    """Its default mount; a member is read at its place in the tar."""
    mountpoint, found = home / "rclone", program("rclone")
    if found is None:
        raise Broken("rclone is not installed")

    def mount() -> Mount:
        source = f":http,url='{server.url}':"
        command: list[str | Path] = [found, "mount", "--read-only", "--config", "", source, mountpoint]
        return mounted(command, mountpoint, without_proxies())

    def pieces(shard: Shard) -> list[Piece]:
        path = f"{mountpoint}/{shard.path.relative_to(server.root)}"
        return [Piece(path, member.offset, member.size, member.crc) for member in shard.members]

    _cases(bench, "rclone", pieces(data.shards[0]), server, mount, turn)
    members = [piece for shard in several.shards for piece in pieces(shard)]
    samples = [members[start : start + COLUMNS] for start in range(0, len(members), COLUMNS)]
    with mount():
        _samples(bench, "rclone", samples, server, turn)


def _ratarmount(bench: Bench, data: Set, server: Network, home: Path, turn: int) -> None:
    """Over http by fsspec, with an index in a file."""
    mountpoint, index, found = home / "ratarmount", home / "ratarmount.sqlite", program("ratarmount")
    if found is None:
        raise Broken("ratarmount is not installed")
    [shard] = data.shards
    command: list[str | Path] = [found, "--index-minimum-file-count", "0", "--index-file", index]
    index.unlink(missing_ok=True)
    since = time.monotonic()
    run(*command, "--no-mount", server.of(shard.path), env=without_proxies())
    bench.add("index, the whole command", "s", "ratarmount", time.monotonic() - since)
    pieces = [Piece(f"{mountpoint}/{member.name}", 0, member.size, member.crc) for member in shard.members]
    whole: list[str | Path] = [*command, "-f", server.of(shard.path), mountpoint]
    _cases(bench, "ratarmount", pieces, server, lambda: mounted(whole, mountpoint, without_proxies()), turn)


def _pipe(bench: Bench, data: Set, server: Network) -> None:
    """The shard in order, as one loader worker of the webdataset library takes it."""
    size = sum(member.size for _, member in data.members())
    seconds = by_webdataset([server.of(path) for path in data.paths])
    bench.add("in order", "MB/s", "webdataset pipe:curl", size / seconds / 1e6)


def by_webdataset(urls: Sequence[str]) -> float:
    """Return the seconds in which the webdataset library reads shards in order, each by a process of curl."""
    commands = [f"pipe:curl -s {url}" for url in urls]
    return float(run(sys.executable, "-c", _STREAM, *commands, env=without_proxies()))


CLOCKED = "date +%s.%N; for place; do {}; date +%s.%N; done"  # the time before the first shard, and after each


def remote_order(bench: Bench) -> None:
    """Six shards of 40 MB in order: by a mount, and by curl, one shard after the other."""
    data, home = bench.sets.get("remote-several"), bench.sets.home / "network"
    with network(bench.sets.home, home) as server:
        shards = Remote(Wdsfs(bench.say), server, home, data.paths)
        shards.index()
        folders = [shards.mountpoint / shard.stem for shard in data.shards]
        for _ in range(bench.repetitions):
            with bench.attempt_at("curl"):
                _clocked(bench, "curl", 'curl -s "$place" >/dev/null', shards.urls, data)
            with bench.attempt_at("wdsfs"), shards.mount("--layout", "files"):
                _clocked(bench, "wdsfs", 'cat "$place"/* >/dev/null', folders, data)


def _clocked(bench: Bench, name: str, command: str, places: Sequence[str | Path], data: Set) -> None:
    said = run("sh", "-c", CLOCKED.format(command), "sh", *places, limit=bench.limit, env=without_proxies())
    times = list(map(float, said.split()))
    for case, first in (("all", 0), ("from the third on", 2)):
        size = sum(path.stat().st_size for path in data.paths[first:])
        bench.add(f"shards in order, {case}", "MB/s", name, size / (times[-1] - times[first]) / 1e6)
