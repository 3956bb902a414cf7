"""`Samples.will_read`, and lists of numbers: which bytes are asked for ahead of a reader, once, and by whom."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import tarfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import wdsfs
from tests import tars
from tests.library.conftest import indexed_only
from tests.processes import answer_of_child, children, wait_until
from tests.web_server import Request, WebServer
from wdsfs.door.shard_door import DOOR
from wdsfs.source import STEP
from wdsfs.tree import content, sample_reader

COUNT = 6  # samples of a shard
SIZES = {b"cls": 10, b"jpg": 100_000, b"txt": 10}  # of the columns, in bytes

Range = tuple[str, int, int]  # the name of a shard, the first byte, and the one after the last


@pytest.fixture
def big(tmp_path: Path) -> str:
    for shard in range(3):
        members = ((b"k%d-%d.%s" % (shard, at, name), size) for at in range(COUNT) for name, size in SIZES.items())
        (tmp_path / f"b-{shard}.tar").write_bytes(
            tars.tar(*(tars.member(name, b"x" * size) for name, size in members))
        )
    return "b-{0..2}.tar"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Range]:
    """What the kernel was asked to read ahead."""
    calls: list[Range] = []

    def noted(fd: int, begin: int, length: int, advice: int) -> None:
        assert (advice, length <= STEP) == (os.POSIX_FADV_WILLNEED, True)
        calls.append((Path(os.readlink(f"/proc/self/fd/{fd}")).stem, begin, begin + length))

    monkeypatch.setattr(os, "posix_fadvise", noted)
    return calls


def places(names: set[str]) -> set[Range]:
    """The shard and the bytes of each of these members."""
    ranges: set[Range] = set()
    for path in sorted(Path().glob("b-*.tar")):
        with tarfile.open(path) as tar:
            ranges |= {
                (path.stem, member.offset_data, member.offset_data + member.size)
                for member in tar
                if member.name in names
            }
    assert len(ranges) == len(names)
    return ranges


@pytest.mark.parametrize(
    ("options", "numbers", "samples", "columns"),
    [
        ({}, (1, 4), ["0-1", "0-2", "0-3"], "cls jpg txt"),
        ({}, (4, 8), ["0-4", "0-5", "1-0", "1-1"], "cls jpg txt"),
        ({}, (-5, 10**9), [f"{shard}-{at}" for shard in range(3) for at in range(COUNT)], "cls jpg txt"),
        ({}, (3, 3), [], ""),
        ({}, (40, 50), [], ""),
        ({"columns": ["txt", "cls"]}, (1, 3), ["0-1", "0-2"], "cls txt"),
        ({"keys": ["k0-5", "k1-2", "k1-4"], "columns": "jpg"}, (1, 3), ["1-2", "1-4"], "jpg"),
        ({"associate": "labels.csv", "missing": "skip", "columns": ["cls", "age"]}, (0, 2), ["0-0", "1-1"], "cls"),
    ],
)
def test_what_is_asked_for_is_what_the_samples_are(
    big: str,
    asked: list[Range],
    options: dict[str, Any],
    numbers: tuple[int, int],
    samples: list[str],
    columns: str,
) -> None:
    """All of their bytes, and little else: a gap that costs less than another read."""
    Path("labels.csv").write_text("key,age\nk0-0,7\nk1-1,8\n")
    with wdsfs.samples(big, **options) as opened:
        opened.will_read(*numbers)
    needed = places({f"k{sample}.{column}" for sample in samples for column in columns.split()})
    marks = {path.stem: bytearray(path.stat().st_size) for path in Path().glob("b-*.tar")}
    for shard, begin, end in asked:
        marks[shard][begin:end] = b"\1" * (end - begin)
    assert [at for shard, begin, end in needed if (at := marks[shard].find(0, begin, end)) >= 0] == []
    gaps = 3 * 512 * (len(needed) + 1)  # headers and padding
    assert sum(end - begin for _, begin, end in asked) <= sum(end - begin for _, begin, end in needed) + gaps


@pytest.mark.parametrize("most", [0, 1, 150_000, 100 << 20])
def test_read_ahead_is_bounded(big: str, asked: list[Range], monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(sample_reader, "AHEAD_BYTES", most)
    with wdsfs.samples(big) as opened:
        opened.will_read(0, len(opened))
    size = sum(end - begin for _, begin, end in asked)
    assert size == most if most < 1_000_000 else 3 * COUNT * SIZES[b"jpg"] < size < 2_000_000


@pytest.mark.parametrize("name", sorted(tars.ODD))
def test_it_is_only_a_hint(tmp_path: Path, name: str) -> None:
    """Of any tar, also where a shard has gone since: what cannot be read raises where it is asked for."""
    tars.ODD[name].write(tmp_path / "s.tar")
    try:
        samples = wdsfs.samples("s.tar")
    except wdsfs.WdsfsError:
        return
    with samples:
        samples.will_read(0, len(samples))
        (tmp_path / "s.tar").unlink()
        samples.will_read(0, len(samples))
    with pytest.raises(wdsfs.UsageError, match="this is closed"):
        samples.will_read(0, 1)


def test_a_list_is_asked_of_the_disk_before_a_sample_of_it_is_read(
    big: str, asked: list[Range], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a disk gets all requests of a batch at once. What the page cache has is not asked for."""
    numbers, preadv, read = [11, 2, 7], os.preadv, content.read
    with wdsfs.samples(big) as samples:
        assert len(samples[numbers]) == 3
        assert asked == []
        ahead: list[int] = []

        def uncached(*given: Any) -> int:
            raise BlockingIOError

        monkeypatch.setattr(os, "preadv", uncached)
        monkeypatch.setattr(content, "read", lambda *given: ahead.append(len(asked)) or read(*given))
        keys = [sample["__key__"] for sample in samples[numbers]]
        monkeypatch.setattr(os, "preadv", preadv)
    assert keys == ["k1-5", "k0-2", "k1-1"]
    assert [name for name, _, _ in asked] == ["b-0", "b-1", "b-1"]
    assert ahead == [3, 3, 3]


def test_what_was_fetched_ahead_is_requested_once_for_all_processes(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [tars.member(b"k%02d.bin" % at, b"%02d" % at * 300_000) for at in range(24)]
    web.put("/s.tar", tars.tar(*members))
    with indexed_only(f"{web.url}/s.tar", monkeypatch) as samples:
        web.requests.clear()
        samples.will_read(0, 20)  # 12 MB, by one request
        wait_until(lambda: len(web.gets()) == 1, "the fetcher")
        for numbers in ([3, 19], [0, 11]):
            read: Any = answer_of_child(partial(samples.__getitem__, numbers))
            assert [sample["bin"][:2] for sample in read] == [b"%02d" % at for at in numbers]
        assert samples[19]["bin"] == b"19" * 300_000
        assert len(web.gets()) == 1


@pytest.mark.parametrize(("count", "requests"), [(60, 2), (100, 2), (200, 11)])
def test_a_small_shard_is_indexed_by_two_requests(web: WebServer, count: int, requests: int) -> None:
    """One for its beginning, and one for the rest; of a large shard the rest comes by requests in parallel."""
    web.put("/s.tar", tars.tar(*(tars.member(b"%03d.bin" % at, bytes(50_000)) for at in range(count))))
    wdsfs.samples(f"{web.url}/s.tar").close()
    assert len(web.gets()) == requests


def test_workers_fetch_each_byte_once_although_one_is_stopped_and_one_is_killed(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both wait for the store at that moment. The others get all samples, those of the two as well."""
    for shard in range(3):
        members = (tars.member(b"k%d-%02d.bin" % (shard, at), b"%02d" % at * 25_000) for at in range(24))
        web.put(f"/s-{shard}.tar", tars.tar(*members))
    with indexed_only(f"{web.url}/s-{{0..2}}.tar", monkeypatch) as samples:
        web.requests.clear()
        web.hold.clear()
        batches = list(wdsfs.Shuffle(samples, batch_size=9, range_bytes=300_000))
        with children(*(partial(samples.__getitem__, batch) for batch in batches[:2])) as waiting:
            wait_until(lambda: DOOR.remote.fetcher_state()["waiting"] == len(waiting), "two workers")
            os.kill(waiting[0], signal.SIGSTOP)
            os.kill(waiting[1], signal.SIGKILL)
            web.hold.set()
            for batch in batches:
                read: Any = answer_of_child(partial(samples.__getitem__, batch))
                assert [sample["bin"] for sample in read] == [b"%02d" % (at % 24) * 25_000 for at in batch]
    fetched = sorted(map(range_of, web.gets()))
    assert [pair for pair in pairwise(fetched) if pair[0][0] == pair[1][0] and pair[0][2] > pair[1][1]] == []


def range_of(request: Request) -> Range:
    begin, _, last = request.headers["range"].removeprefix("bytes=").partition("-")
    return request.path, int(begin), int(last) + 1


def test_batches_reuse_the_memory_of_batches_before(tmp_path: Path) -> None:
    """The heap keeps it: the kernel is not asked for it anew, page by page."""
    count, size, rounds = 60, 70_000, 20
    (tmp_path / "s.tar").write_bytes(
        tars.tar(*(tars.member(b"%02d.bin" % at, bytes(size)) for at in range(count)))
    )
    faults = "resource.getrusage(resource.RUSAGE_SELF).ru_minflt"
    lines = ["import resource, wdsfs", "samples = wdsfs.samples('s.tar')", "samples[:]", f"before = {faults}"]
    lines += [f"for _ in range({rounds}): samples[:]", f"print({faults} - before)"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, check=True)
    assert int(done.stdout) < rounds * count * size // mmap.PAGESIZE // 4
