"""What is measured, one function for each workload.

In every one the systems take turns (A B C A B C ...), each time on a fresh mount, with what lies behind it in the
page cache or, where a workload says so, dropped from it. Whatever was read is compared with what was written; a
system that is wrong, fails or hangs is out of the workload, and the table says why.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import sqlite3
import subprocess
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench import cache, clients
from bench.clients import ClientsFailed, File, Job, Measured
from bench.data import BLOCK, LARGE_MEMORY_SAMPLES, Member, Set, Shard
from bench.remote import remote, remote_order
from bench.report import Case
from bench.run import Bench, empty
from bench.systems import (
    Broken,
    Ratarmount,
    System,
    View,
    Wdsfs,
    WdsfsImage,
    anonymous_bytes,
    processor_seconds,
    run,
)
from bench.training import loader, node, training

MICRO = 1e6


def _plural(count: int) -> str:
    return f"{count} client{'s' if count > 1 else ''}"


# --- names ---------------------------------------------------------------------------------------------------


def walk(bench: Bench) -> None:
    """`find` over a fresh mount, again, and then stat of every file; and over samples of three files."""
    data = bench.sets.get("tree")
    for _, system in bench.turns(bench.taking(data)):
        with bench.attempt(system), bench.mounted(system, data) as view:
            for number, case in enumerate(("find", "find again")):
                seconds = _find(bench, view, data, check=not number)
                bench.results.add(Case("walk", case, "us/file"), system.name, seconds / data.count * MICRO)
            with bench.clients([clients.StatFiles(view.files(data))]) as readers:
                each = readers.go().seconds / data.count * MICRO
                bench.results.add(Case("stat", "1 client, after a listing", "us/file"), system.name, each)
    data = bench.sets.get("small")
    for _, system in bench.turns(bench.taking(data, "samples")):
        with bench.attempt(system), bench.mounted(system, data, "samples") as view:
            seconds = _find(bench, view, data)
            walk = Case("walk", "find, samples layout", "us/file")
            bench.results.add(walk, system.name, seconds / data.count * MICRO)


def _find(bench: Bench, view: View, data: Set, check: bool = True) -> float:
    """Seconds of a `find` over the mount. Raises Broken when it does not find what is there."""
    out = data.directory.parent / "found"
    with out.open("wb") as file:
        since = time.perf_counter()
        process = subprocess.Popen(["find", view.root], stdout=file, stdin=subprocess.DEVNULL)
        try:
            code = process.wait(timeout=max(bench.limit, data.count / 2000))
        finally:
            process.kill()
        seconds = time.perf_counter() - since
    if code:
        raise Broken(f"find ended with {code}")
    if check:
        _check_found(out, view, data)
    out.unlink()
    return seconds


def _check_found(out: Path, view: View, data: Set) -> None:
    tops = {str(view.root)} | {f"{view.root}{view.top(shard)}" for shard in data.shards}
    if data.shards[0].members:
        found = set(out.read_text().splitlines())
        files = {file.path for file in view.files(data)}
        expected = files | {path.rpartition("/")[0] for path in files} | tops
        if found != expected:
            raise Broken(f"find differs in {len(found ^ expected)} paths")
    else:
        with out.open("rb") as file:
            count = sum(1 for _ in file)
        if count != data.count + len(tops):
            raise Broken(f"find has found {count} paths, there are {data.count + len(tops)}")


# --- small files ---------------------------------------------------------------------------------------------


def first_read(bench: Bench) -> None:
    """Open, read and close small files after their directories were listed; then the same again."""
    data = bench.sets.get("small")
    for count in (1, 4):
        for order in ("sequential", "shuffled"):
            variant = f"{_plural(count)}, {order}"
            for turn, system in bench.turns(bench.taking(data)):
                with bench.attempt(system), bench.mounted(system, data) as view:
                    with bench.clients([clients.ListDirectories(view.directories(data), data.count)]) as lister:
                        lister.go()
                    _read_twice(bench, system, view, _ordered(view, data, order, turn), count, variant)


def _read_twice(bench: Bench, system: System, view: View, files: list[File], count: int, variant: str) -> None:
    jobs = [[clients.ReadFiles(part), clients.ReadFiles(part)] for part in clients.shares(files, count)]
    with bench.clients(*jobs) as readers:
        before = processor_seconds(view.pids)
        first = readers.go()
        if view.pid:
            used = (processor_seconds(view.pids) - before) / len(files) * MICRO
            bench.results.add(Case("processor time", variant, "us/file"), system.name, used)
        second = readers.go()
    for workload, measured in (("first read", first), ("second read", second)):
        each = measured.seconds / len(files) * MICRO
        bench.results.add(Case(workload, variant, "us/file"), system.name, each)


def _ordered(view: View, data: Set, order: str, seed: int) -> list[File]:
    files = view.files(data)
    if order == "shuffled":
        random.Random(seed).shuffle(files)
    return files


def cold_paths(bench: Bench) -> None:
    """The first read of small files by paths that were never listed or looked up."""
    data = bench.sets.get("small")
    for count, order in ((1, "sequential"), (1, "shuffled"), (4, "shuffled")):
        variant = f"{_plural(count)}, {order}"
        for turn, system in bench.turns(bench.taking(data)):
            with bench.attempt(system), bench.mounted(system, data) as view:
                files = _ordered(view, data, order, turn)
                with bench.clients(*([clients.ReadFiles(part)] for part in clients.shares(files, count))) as all_:
                    bench.add(variant, "us/file", system.name, all_.go().seconds / len(files) * MICRO)


# --- large files and whole sets ------------------------------------------------------------------------------


def stream(bench: Bench) -> None:
    """Large files from start to end: shards in the page cache, the same again, and from cold disk."""
    data = bench.sets.get("large")
    able = bench.taking(data)
    for turn, system in bench.turns(able):
        with bench.attempt(system), bench.mounted(system, data) as view:
            files = view.files(data)
            jobs: list[Job] = [clients.Stream(files), clients.Stream(files)]
            with bench.clients([*jobs, clients.ReadAll(files)] if not turn else jobs) as readers:
                for case in ("warm", "warm, again"):
                    bench.add(case, "MB/s", system.name, _megabytes(readers.go()))
                if not turn:
                    readers.go()
    for _, system in bench.turns(able):
        with bench.attempt(system):
            bench.add("cold disk", "MB/s", system.name, _megabytes(_cold_stream(bench, system, data)))


def _cold_stream(bench: Bench, system: System, data: Set) -> Measured:
    """All files of a set in the order of the tars, by one client, with nothing in the page cache."""
    with bench.mounted(system, data, cold=True) as view, bench.clients([clients.Stream(view.files(data))]) as one:
        return one.go()


def _megabytes(measured: Measured) -> float:
    return measured.bytes / measured.seconds / 1e6


def whole_set(bench: Bench) -> None:
    """Every file of a set in the order of the tars, from cold disk, against `cat` of the tars."""
    data = bench.sets.get("medium")
    among = [name for name in bench.systems if name not in {"energon"}]
    able = bench.taking(data, among=among)
    for _ in range(bench.repetitions):
        cache.evict(data.paths)
        since = time.perf_counter()
        run("sh", "-c", 'cat "$@" >/dev/null', "cat", *data.paths)
        seconds = time.perf_counter() - since
        size = sum(path.stat().st_size for path in data.paths)
        bench.add("files of 100 kB, cold disk", "MB/s", "cat", size / seconds / 1e6)
        for _, system in bench.turns(able, 1):
            with bench.attempt(system):
                # The bytes of the tars, so that the ratio to `cat` is that of the times.
                rate = size / _cold_stream(bench, system, data).seconds / 1e6
                bench.add("files of 100 kB, cold disk", "MB/s", system.name, rate)


PASSES = {
    "in order": 'find "$1" -type f | sort | xargs cat >/dev/null',
    "cp -r": 'd=$(mktemp -d -p /dev/shm) && cp -r "$1" "$d"; status=$?; rm -r "$d"; exit $status',
    "tar cf": 'tar cf - -C "$1" . | cat >/dev/null',
    "grep -r": 'grep -rc nothing-like-this "$1" >/dev/null; [ $? -le 1 ]',
}


def passes(bench: Bench) -> None:
    """Programs that go through all samples of photographs in order, each on a fresh mount."""
    data = bench.sets.get("photos")
    able = bench.taking(data, "samples", [name for name in bench.systems if name != "energon"])
    for case, command in PASSES.items():
        for _, system in bench.turns(able):
            with bench.attempt(system), bench.mounted(system, data, "samples") as view:
                before, since = processor_seconds(view.pids), time.perf_counter()
                run("sh", "-c", command, "sh", view.root, limit=bench.limit)
                bench.add(case, "ms", system.name, (time.perf_counter() - since) * 1000)
                if view.pid:
                    spent = processor_seconds(view.pids) - before
                    bench.add(f"{case}, processor time", "ms", system.name, spent * 1000)


# --- indexing, mounting, memory ------------------------------------------------------------------------------


def index(bench: Bench) -> None:
    """Reading all headers of a set whose headers are in the page cache; the programs' own start is taken off."""
    single = bench.sets.get("single")
    indexers = _indexers(bench)
    for set_name, size in (("headers3k", "3 kB"), ("headers100k", "100 kB")):
        data = bench.sets.get(set_name)
        out: set[str] = set()
        for repetition in range(-1, bench.repetitions):  # the first of each is for the page cache
            for name, indexer in indexers.items():
                if name in out or (name == "ratarmount" and repetition < 0):
                    continue
                try:
                    start = indexer(bench, single)
                    seconds = indexer(bench, data)
                except (Broken, OSError, ValueError, sqlite3.Error) as error:
                    out.add(name)
                    bench.results.failed(bench.workload, name, str(error))
                    continue
                if repetition >= 0:
                    if seconds > start:  # else there are too few members to tell
                        each = (seconds - start) / data.count * MICRO
                        bench.add(f"members of {size}", "us/member", name, each)
                    bench.results.add(Case("start", "of the indexing program", "ms"), name, start * 1000)
    if "wdsfs" in bench.systems:
        data = bench.sets.get("headers3k")
        directory = _scratch(data)
        _wdsfs_index(bench, data, 1)
        used = (directory / "data.mdb").stat().st_blocks * 512
        bench.results.add(Case("index size", "all", "bytes/member"), "wdsfs", used / data.count)
        besides = (used - data.name_bytes) / data.count
        bench.results.add(Case("index size", "besides names", "bytes/member"), "wdsfs", besides)
        shutil.rmtree(directory)


def images(bench: Bench) -> None:
    """Making images of a set that is indexed: time of each member beyond that of a set of one, and size."""
    name = "wdsfs-image"
    if name not in bench.systems:
        return
    system = bench.systems[name]
    assert isinstance(system, WdsfsImage)
    single, data = bench.sets.get("single"), bench.sets.get("headers3k")
    for one in (single, data):
        system.prepare(one)
    for layout in ("samples", "files"):
        for _ in range(bench.repetitions):
            (start, _), (seconds, size) = (system.image(one, layout) for one in (single, data))
            bench.results.add(Case("image", layout, "us/member"), name, (seconds - start) / data.count * MICRO)
            bench.results.add(Case("image size", layout, "bytes/member"), name, size / data.count)


def _scratch(data: Set) -> Path:
    return data.directory.parent / "index-of-the-benchmark"


Indexer = Callable[[Bench, Set], float]


def _indexers(bench: Bench) -> dict[str, Indexer]:
    found: dict[str, Indexer] = {}
    if "wdsfs" in bench.systems:
        found["wdsfs"] = lambda bench, data: _wdsfs_index(bench, data, 1)
        found["wdsfs, 2 processes"] = lambda bench, data: _wdsfs_index(bench, data, 2)
    if "wdsfs-base" in bench.systems:
        found["wdsfs-base"] = lambda bench, data: _wdsfs_index(bench, data, 1, "wdsfs-base")
    found["tar tf"] = _tar_list
    if "ratarmount" in bench.systems:
        found["ratarmount"] = _ratarmount_index
    return found


def _wdsfs_index(bench: Bench, data: Set, jobs: int, name: str = "wdsfs") -> float:
    directory = _scratch(data)
    shutil.rmtree(directory, ignore_errors=True)
    system = bench.systems[name]
    assert isinstance(system, Wdsfs)
    command = system.command("index", "-q", "--json", "-j", str(jobs), "--index-dir", directory, data.directory)
    since = time.perf_counter()
    report = json.loads(run(*command))
    seconds = time.perf_counter() - since
    if report["members"] != data.count:
        raise Broken(f"{report['members']} members indexed, there are {data.count}")
    return seconds


def _tar_list(bench: Bench, data: Set) -> float:
    since = time.perf_counter()
    for path in data.paths:
        run("tar", "-tf", path, keep=False)
    seconds = time.perf_counter() - since
    lines = sum(run("tar", "-tf", path).count("\n") for path in data.paths)
    if lines != data.count:
        raise Broken(f"{lines} members listed, there are {data.count}")
    return seconds


def _ratarmount_index(bench: Bench, data: Set) -> float:
    directory = _scratch(data)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    system = bench.systems["ratarmount"]
    assert isinstance(system, Ratarmount)
    since = time.perf_counter()
    run(*system.command(directory, "--no-mount", *data.paths))
    seconds = time.perf_counter() - since
    members = 0
    for file in directory.iterdir():
        with contextlib.closing(sqlite3.connect(file)) as base:
            members += base.execute("SELECT count(*) FROM files WHERE mode & 32768 AND name != ''").fetchone()[0]
    shutil.rmtree(directory)
    if members != data.count:
        raise Broken(f"{members} members indexed, there are {data.count}")
    return seconds


def mount_time(bench: Bench) -> None:
    """From the start of the program to the first listing, by a client that runs by then, of many shards that are
    indexed."""
    data = bench.sets.get("shards")
    cases = {f"{len(data.shards):,} shards, {data.count:,} members": data}
    if bench.sets.sizes.memory_samples >= LARGE_MEMORY_SAMPLES:
        many = bench.sets.get("many")
        cases[f"{len(many.shards):,} shards, {many.count:,} members"] = many
    for case, one in cases.items():
        among = ["wdsfs", "wdsfs-image", *(["ratarmount"] if one is data else [])]
        for _, system in bench.turns(bench.taking(one, among=among)):
            top = str(system.mountpoint(one))
            with bench.attempt(system), bench.clients([clients.ListTop(top)]) as lister:
                since = time.monotonic()
                with system.mounted(one):
                    seconds = lister.go().ended - since
                bench.add(case, "s", system.name, seconds)


def memory(bench: Bench) -> None:
    """Anonymous memory of all processes of a mount after a walk, of a small and of a large set."""
    few = bench.sets.get("few")
    many = bench.sets.get("many")
    large = bench.sets.sizes.memory_samples >= LARGE_MEMORY_SAMPLES
    among = ["wdsfs"] if large else ["wdsfs", "ratarmount"]
    for data in (few, many):
        case = f"walk over {data.count:,} samples"
        for _, system in bench.turns(bench.taking(data, among=among), 1):
            with bench.attempt(system), bench.mounted(system, data) as view:
                _find(bench, view, data)
                bench.add(case, "MiB", system.name, anonymous_bytes(view.pids) / (1 << 20))


# --- writing -------------------------------------------------------------------------------------------------

NEW_SIZE = 3000  # bytes of a new file


def write(bench: Bench) -> None:
    """Many new files in one directory, small files of the shards written anew, and one large file."""
    data = bench.sets.get("small")
    for turn, system in bench.turns(bench.taking(data, writing=True)):
        with bench.attempt(system), bench.overlay(system, data) as overlay:
            with bench.writable(system, data, overlay) as view:
                expected = _write(bench, system, view, data, turn)
                _verify(bench, expected)
            with bench.writable(system, data, overlay) as view:  # and what has reached the overlay
                _verify(bench, expected)


def _write(bench: Bench, system: System, view: View, data: Set, seed: int) -> list[File]:
    """Returns what is to be found now: all that was written, and the other files of the shards."""
    sizes, chosen = bench.sets.sizes, random.Random(seed)
    directory = f"{view.root}{view.top(data.shards[0])}/new"
    new = [(f"{directory}/{number:08d}.json", chosen.randbytes(NEW_SIZE)) for number in range(sizes.create_files)]
    old = {file.path: file for file in view.files(data)}
    again = chosen.sample(list(old), min(sizes.rewrite_files, len(old)))
    rewritten = [(path, chosen.randbytes(chosen.randrange(2000, 4000))) for path in again]
    film, size = f"{directory}/film.mp4", sizes.stream_mb * 1_000_000 // system.stream_part
    if system.stream_part > 1:
        bench.results.note(f"{bench.workload}, {system.name}: the stream has {size / 1e6:,.0f} MB")

    jobs: list[Job] = [
        clients.ListDirectories(view.directories(data), data.count),
        clients.WriteFiles(new, directory),
        clients.WriteFiles(rewritten),
        clients.WriteStream(film, size),
    ]
    with bench.clients(jobs) as writers:
        writers.go()
        for case, count in (("new files", len(new)), ("files of the shards", len(rewritten))):
            with _step(case):
                bench.add(case, "us/file", system.name, writers.go().seconds / count * MICRO)
        with _step("stream"):
            measured = writers.go()
            bench.add("stream", "MB/s", system.name, _megabytes(measured))
    for path, content in (*new, *rewritten):
        old[path] = File(path, len(content), zlib.crc32(content))
    return [*old.values(), File(film, size, int(measured.outcomes[0].facts["crc"]))]


@contextlib.contextmanager
def _step(case: str) -> Iterator[None]:
    """Says which step of a workload it was that failed."""
    try:
        yield
    except ClientsFailed as error:
        raise ClientsFailed(f"{case}: {error}") from None


def _verify(bench: Bench, files: Sequence[File]) -> None:
    directories = list(dict.fromkeys(file.path.rpartition("/")[0] for file in files))
    jobs: list[Job] = [clients.ListDirectories(directories, len(files)), clients.ReadAll(files)]
    with bench.clients(jobs) as readers, _step("reading it back"):
        for _ in jobs:
            readers.go()


CHANGED = "1 % of the samples changed"


def commit(bench: Bench) -> None:
    """Packing an overlay, in which one sample in 100 has a new label, against `cp` of the shards."""
    data = bench.sets.get("commit")
    copies = data.directory.parent / "copies"
    for system in bench.taking(data, among=["wdsfs"]):
        assert isinstance(system, Wdsfs)
        with bench.attempt(system), bench.overlay(system, data) as overlay:
            labels = [one for one in data.members() if one[1].name.endswith(".json")]
            changes = _relabel(bench, system, data, overlay, labels[50::100] or labels[:1])
            for _ in range(bench.repetitions):
                with _at_rest(data, copies):
                    _copy(bench, data, copies)
                with _at_rest(data, copies):
                    since = time.perf_counter()
                    system.commit(data, overlay, copies / "commit-%06d.tar", bench.limit)
                    bench.add(CHANGED, "s", system.name, time.perf_counter() - since)
                    _check_committed(data, copies, changes)


def _relabel(
    bench: Bench, system: System, data: Set, overlay: Path, chosen: Sequence[tuple[Shard, Member]]
) -> dict[str, bytes]:
    """Write these files anew, through a mount; returns their contents by the names of the members."""
    contents = {
        member.name: json.dumps({"text": "new " * (20 + at % 50)}).encode()
        for at, (_, member) in enumerate(chosen)
    }
    with bench.writable(system, data, overlay) as view:
        files = [(view.path(shard, member), contents[member.name]) for shard, member in chosen]
        with bench.clients([clients.WriteFiles(files)]) as writer:
            writer.go()
    return contents


@contextlib.contextmanager
def _at_rest(data: Set, copies: Path) -> Iterator[None]:
    """Shards in the page cache, an empty directory for copies of them, and nothing left to be written."""
    with empty(copies):
        run("sync", "-f", copies)
        cache.warm(data.paths)
        yield


def _copy(bench: Bench, data: Set, copies: Path) -> None:
    """`cp` ends before anything is on the disk; a commit does not. So the time until it is there, too."""
    since = time.perf_counter()
    run("cp", *data.paths, copies)
    bench.add(CHANGED, "s", "cp", time.perf_counter() - since)
    run("sync", *(copies / path.name for path in data.paths), copies)
    bench.add(CHANGED, "s", "cp and sync", time.perf_counter() - since)


def _check_committed(data: Set, copies: Path, changes: dict[str, bytes]) -> None:
    """Every member is in its place, and is what it was, its header included, or what it was changed to."""
    if sorted(path.name for path in copies.iterdir()) != sorted(path.name for path in data.paths):
        raise Broken("the committed shards are not those that there were")
    for shard in data.shards:
        copy = copies / shard.path.name
        with shard.path.open("rb") as source, copy.open("rb") as target, tarfile.open(copy, "r:") as tar:
            for found, member in itertools.zip_longest(tar, shard.members):
                if not found or not member or found.name != member.name:
                    raise Broken(f"{copy.name} has {found} where {member} should be")
                got = os.pread(target.fileno(), found.size, found.offset_data)
                if member.name in changes:
                    good = got == changes[member.name]
                else:
                    headers = [
                        os.pread(file.fileno(), BLOCK, offset - BLOCK)
                        for file, offset in ((source, member.offset), (target, found.offset_data))
                    ]
                    good = zlib.crc32(got) == member.crc and headers[0] == headers[1]
                if not good:
                    raise Broken(f"{copy.name}: {member.name} is not what it should be")


WORKLOADS: dict[str, tuple[str, Callable[[Bench], None]]] = {
    "walk": ("walk", walk),
    "stat": ("stat", walk),
    "first-read": ("first read", first_read),
    "second-read": ("second read", first_read),
    "cold-paths": ("paths never listed", cold_paths),
    "stream": ("large files", stream),
    "order": ("whole set in order", whole_set),
    "passes": ("passes in order", passes),
    "index": ("indexing", index),
    "image": ("image", images),
    "mount-time": ("mount time", mount_time),
    "memory": ("memory", memory),
    "write": ("writing", write),
    "commit": ("commit", commit),
    "loader": ("training loader", loader),
    "training": ("training", training),
    "node": ("training on a node", node),
    "remote": ("remote shards", remote),
    "remote-order": ("remote shards", remote_order),
}

ALONE = {"node"}  # what runs only when it is asked for

# Workloads that are asked for together: their names, and which systems take part unless others are named.
GROUPS: dict[str, tuple[list[str], list[str]]] = {
    "kernel": (
        ["walk", "first-read", "stream", "order", "image", "mount-time", "loader"],
        ["wdsfs", "wdsfs-image", "erofs", "extracted"],
    ),
    "in-order": (["order", "passes", "remote", "remote-order"], ["wdsfs", "extracted"]),
}
