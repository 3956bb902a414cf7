"""Shards at a web server behind a slow network under loads of many processes: a training loop, and mixed load.

python -m bench.remote_loads SECONDS <PIECES        the client of the mixed load
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench.data import Set
from bench.network import Piece, Remote, network, samples_of, without_proxies
from bench.systems import Broken, Wdsfs, descendants, run

if TYPE_CHECKING:
    from bench.run import Bench

IN_ORDER, AT_RANDOM = 4, 12  # threads of the mixed load, and one that lists
BYTES = ("Pss_Anon:", "Pss_Shmem:")  # of /proc/PID/smaps_rollup: what no file on a disk backs


def remote_loads(bench: Bench) -> None:
    """Eight shards of samples of three files: a training loop, mixed load."""
    data, home = bench.sets.get("commit"), bench.sets.home / "network"
    with network(bench.sets.home, home) as server:
        shards = Remote(Wdsfs(bench.say), server, home, data.paths)
        shards.index()
        _training(bench, shards, data)
        _mixed(bench, shards, data)


def _training(bench: Bench, shards: Remote, data: Set) -> None:
    """The first epoch of a PyTorch DataLoader with 4 workers, shards in random order: files of a mount with an
    empty cache, and the webdataset library's own streaming."""
    for module in ("torch", "webdataset"):
        if importlib.util.find_spec(module) is None:
            bench.results.absent("training loop over remote shards", f"no Python module {module}")
            return
    urls = [f"pipe:curl -s {url}" for url in shards.urls]
    for turn in range(bench.repetitions):
        with bench.attempt_at("wdsfs"), shards.mount("--layout", "files"):
            bench.say(f"training loop: wdsfs, turn {turn + 1}")
            _epoch(bench, "wdsfs", data, turn, "files", [str(shards.mountpoint)])
        with bench.attempt_at("webdataset pipe:curl"):
            bench.say(f"training loop: webdataset pipe:curl, turn {turn + 1}")
            _epoch(bench, "webdataset pipe:curl", data, turn, "webdataset", urls)


def _epoch(bench: Bench, name: str, data: Set, turn: int, kind: str, places: list[str]) -> None:
    here = without_proxies() | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-m", "bench.remote_epoch", kind, str(turn), *places]
    report = json.loads(run(*command, limit=bench.limit, env=here))
    members = [member for _, member in data.members()]
    if report["sum"] != sum(member.crc for member in members):
        raise Broken("the loader has seen other bytes than were written")
    bench.add("training loop, first epoch", "MB/s", name, sum(m.size for m in members) / report["seconds"] / 1e6)


# --- mixed load ----------------------------------------------------------------------------------------------


def _mixed(bench: Bench, shards: Remote, data: Set) -> None:
    """The memory of all processes of a mount, every second, while its cache holds half of what is read: passes in
    order, samples at random and listings at the same time, and nothing stays in the page cache of the mount."""
    if bench.load_minutes <= 0:
        return
    bench.say(f"mixed load, {bench.load_minutes:g} minutes")
    room = sum(path.stat().st_size for path in data.paths) // 2
    with bench.attempt_at("wdsfs"), shards.mount("--cache-size", str(room)) as pid:
        bench.add("mixed load, memory before it", "MiB", "wdsfs", _memory(descendants(pid)))
        seconds = bench.load_minutes * 60
        memory, report = _under_load(pid, samples_of(data, shards.mountpoint), seconds)
        quarter = max(len(memory) // 4, 1)
        second, last = median(memory[quarter : 2 * quarter]), median(memory[-quarter:])
        bench.add("mixed load, memory at most", "MiB", "wdsfs", max(memory))
        bench.add("mixed load, memory, last quarter", "MiB", "wdsfs", last)
        bench.add("mixed load, memory, last quarter / second", "", "wdsfs", last / second)
        bench.add("mixed load", "reads/s", "wdsfs", report["reads"] / seconds)


def _memory(pids: Sequence[int]) -> float:
    """MiB of these processes that no file on a disk backs; what they share is divided among those that do."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has just ended
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith(BYTES))
    return total / 1024


def _under_load(pid: int, samples: list[list[Piece]], seconds: float) -> tuple[list[float], dict[str, int]]:
    """The memory of a mount second by second, and what its client says. Raises Broken for a wrong byte."""
    command = [sys.executable, "-m", "bench.remote_loads", str(seconds)]
    memory: list[float] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        json.dump(samples, client.stdin)
        client.stdin.close()
        while client.poll() is None:
            memory.append(_memory(descendants(pid)))
            time.sleep(1)
        said = client.stdout.read()
    if client.returncode or not memory:
        raise Broken(f"mixed load: {said.strip() or 'the client has ended early'}")
    report: dict[str, int] = json.loads(said)
    return memory, report


class _Client:
    """Threads that read for a while, and stop at the first error."""

    def __init__(self, samples: list[list[Piece]], seconds: float) -> None:
        self._samples, self._end = samples, time.monotonic() + seconds
        self._shards: dict[str, list[list[Piece]]] = {}
        for sample in samples:
            self._shards.setdefault(os.path.dirname(os.path.dirname(sample[0].path)), []).append(sample)
        self._failed: list[str] = []
        self._reads = [0] * (IN_ORDER + AT_RANDOM + 1)

    def run(self) -> None:
        work = [self._in_order] * IN_ORDER + [self._at_random] * AT_RANDOM + [self._list]
        threads = [threading.Thread(target=self._guarded, args=(one, n)) for n, one in enumerate(work)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failed:
            print(self._failed[0])
            sys.exit(1)
        print(json.dumps({"reads": sum(self._reads)}))

    def _guarded(self, work: object, number: int) -> None:
        assert callable(work)
        choose = random.Random(number)
        try:
            while time.monotonic() < self._end and not self._failed:
                work(number, choose)
        except (OSError, ValueError) as error:
            self._failed.append(f"{error}")

    def _in_order(self, number: int, choose: random.Random) -> None:
        for sample in self._shards[choose.choice(list(self._shards))]:
            self._read(number, sample)
            if time.monotonic() > self._end:
                return

    def _at_random(self, number: int, choose: random.Random) -> None:
        self._read(number, choose.choice(self._samples))

    def _list(self, number: int, choose: random.Random) -> None:
        for entry in os.scandir(choose.choice(list(self._shards))):
            entry.stat()
            if time.monotonic() > self._end:
                return

    def _read(self, number: int, sample: list[Piece]) -> None:
        for piece in sample:
            fd = os.open(piece.path, os.O_RDONLY)
            try:
                content = os.pread(fd, piece.size, 0)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # it is to be read from the mount the next time
            finally:
                os.close(fd)
            if zlib.crc32(content) != piece.crc:
                raise ValueError(f"wrong bytes in {piece.path}")
            self._reads[number] += 1


if __name__ == "__main__":
    _Client([[Piece(*piece) for piece in sample] for sample in json.load(sys.stdin)], float(sys.argv[1])).run()
