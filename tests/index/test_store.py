"""The index: what is kept and what is built again, several processes at once, and every bad directory.

Everything here is real: LMDB files, shards, processes that are killed, file systems that are full or read-only.
What may crash runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import pytest

from tests import sets, tars
from tests.conftest import descendants, descriptors, new_processes
from tests.processes import PATIENCE, wait_until
from tests.thorough import THOROUGH
from wdsfs import host, mount_table
from wdsfs.cluster_workers import Workers
from wdsfs.errors import IndexUnusable, MissingShard, ShardError, UnreadableShard
from wdsfs.index import process_pool, record, record_builder, record_of_file, store
from wdsfs.index.record import Record
from wdsfs.index.record_of_file import build_file
from wdsfs.index.store import Index, Summary, open_index
from wdsfs.names import Reading
from wdsfs.shards import GONE, TICK_NS, Fingerprint, Shard


@pytest.fixture
def shards(tmp_path: Path) -> list[Shard]:
    return sets.make(tmp_path / "shards", 4)


@pytest.fixture
def directory(tmp_path: Path, shards: list[Shard]) -> Path:
    """An index directory that knows the four shards."""
    with opened(tmp_path / "index") as index:
        index.refresh(shards)
    return tmp_path / "index"


@contextlib.contextmanager
def opened(directory: Path, *notices: str) -> Iterator[Index]:
    """The index in a directory; each notice has to hold one of these texts."""
    index = open_index(directory)
    try:
        assert len(index.notices) == len(notices), index.notices
        for notice, text in zip(index.notices, notices, strict=True):
            assert text in notice
        yield index
    finally:
        index.close()


def refresh(index: Index, shards: list[Shard]) -> list[bytes]:
    """Index what is stale; returns the names of the shards that were built."""
    built: list[bytes] = []
    stale = [one for one, _ in index.stale(shards)]
    index.refresh(stale, on_done=lambda one, summary, error: built.append(one.name))
    return built


def data_of(directory: Path) -> Path:
    return directory / "data.mdb"


# --- what is kept, and what is built again ---------------------------------------------------------------


def test_keys_and_values_are_as_format_md_says(tmp_path: Path) -> None:
    shards = sets.make(tmp_path / "shards", 2)
    by_key = replace(shards[0], reading=Reading(ignore_zeros=True, group_by_key=True))
    with opened(tmp_path / "index") as index:
        index.refresh([*shards, by_key])
        table_of(index, shards)
    with lmdb.open(str(tmp_path / "index"), map_size=1 << 30, readonly=True) as env, env.begin() as txn:
        values = {bytes(key): bytes(value) for key, value in txn.cursor()}

    def digest(text: bytes) -> bytes:
        return hashlib.blake2b(text, digest_size=16).digest()

    paths = [shards[0].path, shards[1].path, shards[0].path + b"\0--ignore-zeros --group-by-key"]
    table = b"t" + digest(b"\0".join([*paths[:2], b"1"]))
    kept = {kind + digest(path) for kind in (b"s", b"r") for path in paths}
    assert set(values) == {b"format", table, *kept}
    assert values[b"format"] == b"2"
    summary, record = values[b"s" + digest(paths[0])], values[b"r" + digest(paths[0])]
    assert zlib.crc32(summary[4:]) == int.from_bytes(summary[:4], "little")
    assert summary[4 + struct.calcsize("<QqQIIIIIIQII") :] == paths[0]
    found = os.stat(paths[0])
    assert struct.unpack_from("<Qq", summary, 4) == (found.st_size, found.st_mtime_ns)
    assert record[:8] == b"wdsfs-r\n"
    assert zlib.crc32(record[16:]) == int.from_bytes(record[8:16], "little")
    assert zlib.crc32(values[table][20:]) == int.from_bytes(values[table][16:20], "little")


def test_a_new_index_knows_nothing_and_tells_what_it_learns(tmp_path: Path, shards: list[Shard]) -> None:
    """Its directory is made. A damaged shard has a record of what is intact. Any executor can do the work."""
    sets.path_of(shards[1]).write_bytes(sets.content(1)[: 5 * 512 + 100])
    told: dict[Shard, Summary | None] = {}
    with ThreadPoolExecutor(2) as executor, opened(tmp_path / "a/b/index") as index:
        assert index.summary(shards[0].path) is None
        assert index.record(shards[0].path, Fingerprint.at(shards[0].path)) is None
        sizes = [len(sets.path_of(one).read_bytes()) for one in shards]
        assert list(index.stale(shards)) == list(zip(shards, sizes, strict=True))
        workers = Workers.of(executor)
        index.refresh(shards, on_done=lambda one, summary, error: told.update({one: summary}), workers=workers)
        assert told == {one: sets.right_summary(one) for one in shards}
        summary = index.summary(shards[1].path)
        assert summary is not None
        assert (summary.problems, summary.members) == (1, 3)
        sets.check(index, shards)
    assert data_of(tmp_path / "a/b/index").stat().st_mode & 0o777 == 0o600


def test_the_environment_names_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, place in (("relative", "relative"), ("", "cache/wdsfs")):
        monkeypatch.setenv("WDSFS_INDEX_DIR", name)
        index = open_index()
        index.close()
        assert index.directory == tmp_path / place  # absolute: a daemon changes its directory


def _append(path: Path) -> None:
    # At the same time: the size alone tells.
    before = path.stat()
    with path.open("ab") as file:
        file.write(bytes(512))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _replace(path: Path) -> None:
    """The same bytes and times under another inode number."""
    before = path.stat()
    new = path.with_suffix(".new")
    new.write_bytes(path.read_bytes())
    os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
    new.rename(path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "touch": lambda path: os.utime(path, ns=(1, path.stat().st_mtime_ns + 1)),
    "append": _append,
    "rewrite": lambda path: path.write_bytes(sets.content(7)),
    "replace": _replace,
    "chmod": lambda path: path.chmod(0o400),  # what changes the ctime is not trusted
    "link": lambda path: os.link(path, path.with_suffix(".link")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_only_what_has_changed_is_built_again(directory: Path, shards: list[Shard], change: str) -> None:
    for one in shards:
        sets.path_of(one).read_bytes()
    CHANGES[change](sets.path_of(shards[2]))
    with opened(directory) as index:
        assert index.record(shards[2].path, Fingerprint.at(shards[2].path)) is None
        assert refresh(index, shards) == [b"s2"]
        sets.check(index, shards)
        assert refresh(index, shards) == []


def test_a_link_is_a_shard_of_its_own_and_follows_what_it_names(
    directory: Path, shards: list[Shard], tmp_path: Path
) -> None:
    link = tmp_path / "link.tar"
    link.symlink_to(sets.path_of(shards[0]))
    both = [shards[0], sets.at(link)]
    with opened(directory) as index:
        assert refresh(index, both) == [b"link"]
        link.unlink()
        link.symlink_to(sets.path_of(shards[1]))
        assert refresh(index, both) == [b"link"]
        sets.check(index, both)


def test_missing_and_unreadable_shards_are_told_and_the_others_are_indexed(tmp_path: Path) -> None:
    shards = sets.make(tmp_path / "shards", 5)
    missing, directory, pipe, loop, whole = (sets.path_of(one) for one in shards)
    for path in (missing, directory, pipe, loop):
        path.unlink()
    directory.mkdir()
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    errors: dict[bytes, str | None] = {}
    with opened(tmp_path / "index") as index:
        assert next(index.stale(shards)) == (shards[0], 0)
        index.refresh(shards, on_done=lambda one, summary, error: errors.update({one.name: error}))
        reasons = ("no such shard", "not a regular file", "not a regular file", "symbolic links")
        for number, reason in enumerate(reasons):
            assert re.search(f"/s{number}.tar: .*{reason}", errors[b"s%d" % number] or "")
        assert errors[b"s4"] is None
        sets.check(index, [sets.at(whole)])
        assert {one.name for one, _ in index.stale(shards)} == {b"s0", b"s1", b"s2", b"s3"}


def test_times_out_of_the_reach_of_64_bits(tmp_path: Path) -> None:
    """Some file systems have the year 2400; nanoseconds since 1970 in 64 bits end in 2262."""
    [shard] = sets.make(tmp_path / "shards", 1)
    os.utime(shard.path, (13_569_465_600, 13_569_465_600))
    with opened(tmp_path / "index") as index:
        index.refresh([shard])
        sets.check(index, [shard])
        os.utime(shard.path, (-1, -1))
        assert refresh(index, [shard]) == [b"s0"]
        sets.check(index, [shard])


def test_long_and_undecodable_paths(tmp_path: Path) -> None:
    deep = os.fsencode(tmp_path) + (b"/" + b"d" * 250) * 14
    os.makedirs(deep)
    paths = [deep + b"/" + b"x" * 200 + b".tar", os.fsencode(tmp_path) + b"/\xff\n \xe9.tar"]
    for number, path in enumerate(paths):
        with open(path, "wb") as file:
            file.write(sets.content(number))
    shards = [sets.at(path) for path in paths]
    with opened(tmp_path / "index") as index:
        index.refresh(shards)
        sets.check(index, shards)
        for path in paths:
            os.unlink(path)
        assert index.prune() == 2
        with pytest.raises(MissingShard, match="the shard is gone"):
            Fingerprint.at(paths[1])


# --- a shard that is being written ------------------------------------------------------------------------


def _writing(path: Path, times: int) -> Callable[..., bytes]:
    """`record_builder.build`, while somebody appends a member to the shard during the first so many scans."""
    scans = 0

    def build(*arguments: Any) -> bytes:
        nonlocal scans
        scans += 1
        data: bytes = original(*arguments)
        if scans <= times:
            whole = path.read_bytes().removesuffix(tars.END)
            path.write_bytes(whole + tars.tar(tars.member(b"late%d.txt" % scans)))
        return data

    original = record_builder.build
    return build


def test_a_shard_that_is_written_meanwhile_is_read_until_it_is_quiet(
    shards: list[Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or given up, if that takes too long."""
    path = shards[0].path
    monkeypatch.setattr(record_of_file, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(record_builder, "build", _writing(sets.path_of(shards[0]), 3))
    built = Record(build_file(path))
    assert built.fingerprint == Fingerprint.at(path)
    assert {b"late1", b"late2", b"late3"} < {key for key, _, _ in sets.listing(built)}
    monkeypatch.undo()
    monkeypatch.setattr(record_of_file, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(record_of_file, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(record_builder, "build", _writing(sets.path_of(shards[0]), 1000))
    with pytest.raises(UnreadableShard, match=r"s0\.tar: is being written"):
        build_file(path)


@pytest.mark.parametrize(
    ("ctime_ns", "tick_ns"),
    [
        (1_700_000_001_000_000_123, TICK_NS),
        (1_700_000_001_000_000_000, TICK_NS + 1_000_000_000),  # ext4 with small inodes, NFS
        (1_700_000_002_000_000_000, TICK_NS + 2_000_000_000),  # FAT
    ],
)
def test_a_shard_that_was_written_this_very_moment_is_read_a_tick_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ctime_ns: int, tick_ns: int
) -> None:
    """A second write within a tick of the file system's clock would leave the time as it is."""
    [shard] = sets.make(tmp_path, 1)
    waits: list[float] = []
    status = os.stat_result(os.stat(shard.path)[:10], {"st_mtime_ns": 1, "st_ctime_ns": ctime_ns})  # any mtime
    monkeypatch.setattr(os, "fstat", lambda _: status)
    monkeypatch.setattr(time, "sleep", waits.append)
    for age_ns in (0, tick_ns - 1, tick_ns, -1, 10**12):
        monkeypatch.setattr(time, "time_ns", lambda now=ctime_ns + age_ns: now)
        build_file(shard.path)
    assert waits == [tick_ns / 1e9, 1e-9]


def test_a_shard_that_is_replaced_within_the_tick_is_read_as_what_came_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have the same size and times, and its inode number may count for nothing."""
    [shard] = sets.make(tmp_path, 1)
    other = tmp_path / "other"
    other.write_bytes(sets.content(7))
    with monkeypatch.context() as within_the_tick:
        within_the_tick.setattr(Fingerprint, "of", lambda _: GONE)
        within_the_tick.setattr(
            record_of_file, "wait_for_tick", lambda _: bool(other.replace(sets.path_of(shard)))
        )
        record = Record(build_file(shard.path))
    assert sets.listing(record) == sets.listing(Record(build_file(shard.path)))


# --- several processes ------------------------------------------------------------------------------------

_INDEX = """
import sys
from pathlib import Path
from tests import sets
from wdsfs.index.store import open_index
index = open_index(Path(sys.argv[1]))
assert not index.notices, index.notices
shards = [sets.at(Path(path)) for path in sys.argv[2:]]
"""


def paths_of(shards: list[Shard]) -> list[Path]:
    return [sets.path_of(one) for one in shards]


def start(
    code: str, directory: Path, shards: list[Shard], before: str = "", **options: Any
) -> subprocess.Popen[bytes]:
    """A process that runs code with the `index` in a directory and `shards`; `before` it is opened."""
    return sets.start(before + _INDEX + code, directory, *paths_of(shards), **options)


def run(code: str, directory: Path, shards: list[Shard], before: str = "") -> None:
    """The same, to its end."""
    sets.run(before + _INDEX + code, directory, *paths_of(shards))


def run_in_mounts(code: str, place: Path, shards: list[Shard]) -> None:
    """Run code that mounts a file system at `place`."""
    place.mkdir()
    sets.run(_MOUNTS + code, place, *paths_of(shards), wrapper=sets.in_own_mounts())


def test_processes_that_index_the_same_set_at_the_same_time(tmp_path: Path) -> None:
    shards = sets.make(tmp_path / "shards", 30)
    before = """
import sys
from wdsfs.index import store as module
module.COMMIT_SECONDS = 0.0
sys.stdin.read(1)
"""
    code = """
index.refresh([one for one, _ in index.stale(shards)])
sets.check(index, shards)
index.close()
"""
    processes = [start(code, tmp_path / "index", shards, before) for _ in range(3)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"+")
        process.stdin.close()
        process.stdin = None
    for process in processes:
        assert process.communicate(timeout=PATIENCE) == (b"", b"")
        assert process.returncode == 0
    with opened(tmp_path / "index") as index:
        sets.check(index, shards)


def test_what_is_being_read_stays_as_it_was_until_it_is_renewed(directory: Path, shards: list[Shard]) -> None:
    """... however often another process writes meanwhile."""
    with opened(directory) as index:
        fingerprints = {one: Fingerprint.at(one.path) for one in shards}
        kept = {one: index.record(one.path, fingerprints[one]) for one in shards}
        before = {one: sets.listing(found) for one, found in kept.items() if found is not None}
        assert len(before) == len(shards)
        code = """
for turn in range(20):
    for number, one in enumerate(shards):
        sets.path_of(one).write_bytes(sets.content(number, 5 + turn))
    index.refresh(shards)
sets.check(index, shards)
index.close()
"""
        run(code, directory, shards)
        for one, found in kept.items():
            assert found is not None
            assert sets.listing(found) == before[one]
            assert index.record(one.path, fingerprints[one]) is not None
            assert index.record(one.path, Fingerprint.at(one.path)) is None
        index.renew()
        sets.check(index, shards)


def test_a_process_that_is_killed_while_it_indexes_leaves_a_valid_index(tmp_path: Path) -> None:
    shards = sets.make(tmp_path / "shards", 40)
    before = """
import os
from wdsfs.index import store as module
module.COMMIT_SECONDS = -1.0
"""
    code = """
while True:
    index.refresh(shards, on_done=lambda *_: os.write(1, b"."))
"""
    random.seed(7)
    known: dict[Shard, Summary] = {}
    for _ in range(4 * THOROUGH):
        process = start(code, tmp_path / "index", shards, before)
        assert process.stdout is not None
        for _ in range(random.randrange(1, 100)):
            assert process.stdout.read(1) == b"."
        process.kill()
        assert process.communicate()[1] == b""
        with opened(tmp_path / "index") as index:
            for one in shards:
                assert index.summary(one.path) in (None, sets.right_summary(one), known.get(one))
            refresh(index, shards)
            sets.check(index, shards)
        known = {one: sets.right_summary(one) for one in shards}
        for one in random.sample(shards, 10):
            sets.path_of(one).write_bytes(sets.content(random.randrange(100), 4))


def test_readers_that_were_killed_do_not_count_any_more(directory: Path, shards: list[Shard]) -> None:
    """As long as one counts, LMDB does not use the pages again that it could see, and the file grows."""
    with opened(directory) as index:
        code = "index.summary(shards[0].path); print(flush=True); sys.stdin.read()"
        process = start(code, directory, shards)
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        process.communicate()

        def readers() -> list[str]:
            """The numbers of the processes; the numbers of their threads may have these in them."""
            return [line.split()[0] for line in index._home.env.readers().splitlines()[1:]]

        assert str(process.pid) in readers()
        code = (
            "readers = [line.split()[0] for line in index._home.env.readers().splitlines()[1:]]\n"
            f'assert "{process.pid}" not in readers, readers'
        )
        run(code, directory, shards)


def build_or_wait(path: bytes, **options: Any) -> bytes:
    """`build_file`, which for some shards never ends."""
    if b"slow" in path:
        signal.pause()
    return build_file(path, **options)


def test_an_interrupt_keeps_what_is_finished_and_leaves_no_process(tmp_path: Path) -> None:
    shards = sets.make(tmp_path / "shards", 6)
    slow = [sets.at(tmp_path / f"slow{number}.tar") for number in range(20)]
    for one in slow:
        sets.path_of(one).write_bytes(sets.content(1))
    before = """
import os
from tests.index import test_store as test_index
from wdsfs.index import store as module, process_pool as pool
pool.ALONE_BYTES = 0
module.build_file = test_index.build_or_wait
"""
    code = """
try:
    index.refresh(shards, 2, lambda *_: os.write(1, b"."))
except KeyboardInterrupt:
    index.close()
    sys.exit(130)
"""
    process = start(code, tmp_path / "index", shards + slow, before, start_new_session=True)
    assert process.stdout is not None
    for _ in shards:
        assert process.stdout.read(1) == b"."
    wait_until(lambda: len(descendants(process.pid)) >= 2, "both processes")  # one may have done all so far
    workers = descendants(process.pid)
    assert len(workers) == 2
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=PATIENCE) == (b"", b"")
    assert process.returncode == 130
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with opened(tmp_path / "index") as index:
        sets.check(index, shards)
        assert [one for one, _ in index.stale(shards + slow)] == slow


def test_an_error_while_indexing_keeps_what_is_finished_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_pool, "ALONE_BYTES", -1)
    shards = sets.make(tmp_path / "shards", 30)
    told: list[Shard] = []

    def on_done(one: Shard, summary: Summary | None, error: str | None) -> None:
        told.append(one)
        if len(told) == 5:
            raise RuntimeError("the terminal is gone")

    with opened(tmp_path / "index") as index:
        with pytest.raises(RuntimeError) as caught:
            index.refresh(shards, 2, on_done)
        assert caught.tb is not None  # it holds the frames, and must not hold the processes
        assert new_processes() == set()
        sets.check(index, told)


def test_a_fork_can_open_again_what_was_suspended(directory: Path, shards: list[Shard]) -> None:
    code = """
index.suspend()
for _ in range(2):
    pid = os.fork()
    if not pid:
        own = index.reopen()
        sets.check(own, shards)
        own.store([(shards[0].path, module.build_file(shards[0].path))])
        own.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
index.discard()
"""
    before = "import os, warnings; warnings.simplefilter('ignore'); from wdsfs.index import store as module"
    run(code, directory, shards, before)
    with opened(directory) as index:
        sets.check(index, shards)


def test_a_temporary_index_can_be_opened_again_too(directory: Path, shards: list[Shard]) -> None:
    shutil.rmtree(directory)
    directory.write_bytes(b"a file")
    with opened(directory, "using a temporary index") as index:
        place = index.directory
        index.refresh(shards)
        index.suspend()
        for _ in range(2):
            again = index.reopen()
            assert again.directory == place
            sets.check(again, shards)
            again.close()
            assert place.is_dir()
    assert not place.exists()


def test_an_index_that_cannot_be_opened_again_gives_a_temporary_one(directory: Path, shards: list[Shard]) -> None:
    with opened(directory) as index:
        index.suspend()
        shutil.rmtree(directory)
        directory.write_bytes(b"a file")
        again = index.reopen()
        assert "using a temporary index" in again.notices[0]
        again.refresh(shards)
        sets.check(again, shards)
        again.close()
        directory.unlink()


# --- the directory ----------------------------------------------------------------------------------------


SPOILED: dict[str, Callable[[Path], object]] = {
    "a file": lambda directory: directory.write_bytes(b""),
    "below a file": lambda directory: (directory.parent.rmdir(), directory.parent.write_bytes(b"")),
    "its data are a directory": lambda directory: data_of(directory).mkdir(parents=True),
    "its locks are a directory": lambda directory: (directory / "lock.mdb").mkdir(parents=True),
    "its lock at opening is a directory": lambda directory: (directory / "open.lock").mkdir(parents=True),
    "a dangling link": lambda directory: directory.symlink_to(directory.parent / "nowhere" / "at all"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_directory_that_cannot_be_used(tmp_path: Path, case: str) -> None:
    shards = sets.make(tmp_path / "shards", 2)
    (tmp_path / "at").mkdir()
    directory = tmp_path / "at" / "index"
    SPOILED[case](directory)
    with opened(directory, f"{directory} cannot be") as index:
        assert "temporary" in index.notices[0]
        index.refresh(shards)
        sets.check(index, shards)


def test_not_even_a_temporary_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index").write_bytes(b"")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(IndexUnusable, match="set --index-dir"):
        open_index(tmp_path / "index")


@pytest.mark.parametrize("local_type", ["ext4", "nfs4", None])
def test_a_network_file_system_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_type: str | None
) -> None:
    shards = sets.make(tmp_path / "shards", 2)
    home, local = tmp_path / "home", tmp_path / "local"

    def node_local_dir() -> Path:
        if local_type is None:
            raise IndexUnusable("somebody else has it")
        return local

    types = {home: "nfs4", local: local_type}
    monkeypatch.setattr(mount_table, "filesystem_type", lambda path: types.get(path, "ext4"))
    monkeypatch.setattr(host, "node_local_dir", node_local_dir)
    with opened(home, f"{home} is on a network file system (nfs4)") as index:
        assert (index.directory == local) == (local_type == "ext4")
        assert ("temporary" in index.notices[0]) == (local_type != "ext4")
        index.refresh(shards)
        sets.check(index, shards)
    assert not home.exists()


def test_no_descriptor_is_left_open(directory: Path, shards: list[Shard]) -> None:
    before = descriptors()
    with opened(directory) as index:
        sets.check(index, shards)
        build_file(shards[0].path)
        with contextlib.suppress(ShardError):
            build_file(b"/nowhere")
    data_of(directory).write_bytes(b"nonsense" * 10_000)
    with opened(directory, "is rebuilt"):
        pass
    data_of(directory).unlink()
    data_of(directory).mkdir()
    with opened(directory, "temporary"):
        pass
    with pytest.raises(UnreadableShard):
        build_file(os.fsencode(directory))
    assert descriptors() - before == set()


# --- file systems that refuse, in mounts of their own -----------------------------------------------------

_MOUNTS = """
import os, subprocess, sys
from pathlib import Path
from tests import sets
from wdsfs.index import store as module
from wdsfs.index.store import open_index
place, shards = Path(sys.argv[1]), [sets.at(Path(path)) for path in sys.argv[2:]]
def mount(*arguments):
    subprocess.run(["mount", *map(str, arguments)], check=True)
def opened(*texts):
    index = open_index(place / "index")
    assert len(index.notices) == len(texts), index.notices
    for notice, text in zip(index.notices, texts):
        assert text in notice, notice
    return index
"""


@pytest.mark.parametrize(
    "words", [["mount -o remount,ro P"], ["mount --bind P P", "mount -o remount,bind,ro P"]], ids=["image", "bind"]
)
def test_a_read_only_directory_is_not_used_and_a_file_is_named(tmp_path: Path, words: list[str]) -> None:
    shards = sets.make(tmp_path / "shards", 2)
    code = f"""
mount("-t", "tmpfs", "none", place)
index = opened()
index.refresh(shards)
index.close()
for line in {words}:
    mount(*[str(place) if word == "P" else word for word in line.split()[1:]])
index = opened("an index to be read only is a file: wdsfs index -o")
assert [one for one, _ in index.stale(shards)] == shards
index.refresh(shards)
sets.check(index, shards)
index.close()
"""
    run_in_mounts(code, tmp_path / "place", shards)


def test_a_directory_without_permission(tmp_path: Path) -> None:
    """Its index is not used: who may not lock may not read."""
    with tempfile.TemporaryDirectory() as home:
        os.chmod(home, 0o755)
        place = Path(home)
        shards = sets.make(place / "shards", 2)
        with opened(place / "index") as index:
            index.refresh(shards)
        os.chmod(place / "index", 0o500)
        code = """
if os.geteuid() == 0:
    os.setgid(65534), os.setuid(65534)
index = opened("Permission denied")
index.refresh([one for one, _ in index.stale(shards)])
sets.check(index, shards)
index.close()
"""
        sets.run(_MOUNTS + code, place, *paths_of(shards))


def test_a_full_disk(tmp_path: Path) -> None:
    """From not a single block left to just enough: there is always an index, and no bus error."""
    shards = sets.make(tmp_path / "shards", 3)
    code = """
import logging
logging.disable()
mount("-t", "tmpfs", "-o", "size=1m", "none", place)
outcomes = set()
for left in [*range(0, 120, 4), *range(120, 500, 20)]:
    filler = os.open(place / "filler", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(filler, 0, (1 << 20) - (left << 10))
    index = open_index(place / "index")
    index.refresh(shards)
    sets.check(index, shards)
    outcomes.add(bool(index.notices))
    assert all("No space left" in notice or "disk is full" in notice for notice in index.notices), index.notices
    index.close()
    os.close(filler)
    for name in ("filler", "index/data.mdb", "index/lock.mdb", "index/lock.new", "index/open.lock"):
        (place / name).unlink(missing_ok=True)
assert outcomes == {False, True}
"""
    run_in_mounts(code, tmp_path / "place", shards)


def test_a_disk_that_fills_up_while_indexing(tmp_path: Path) -> None:
    shards = sets.make(tmp_path / "shards", 120, samples=20)
    code = """
import logging
logging.disable()
module.COMMIT_SECONDS = -1.0
mount("-t", "tmpfs", "-o", "size=600k", "none", place)
index = opened()
index.refresh(shards)
[notice] = index.notices
assert "disk is full" in notice and "temporary" in notice, notice
sets.check(index, shards)
index.forget(shards[0].path)  # it is in the full one
assert index.summary(shards[0].path) is None
index.refresh(shards[:1])
index.suspend()
again = index.reopen()
sets.check(again, shards)
assert again._home.full is not None
again.close()
index.discard()
index = opened()  # what went in before is there
left = [one for one, _ in index.stale(shards)]
assert 0 < len(left) < len(shards)
sets.check(index, [one for one in shards if one not in left])
index.forget(shards[0].path)  # a full disk takes no deletion either
assert index.summary(shards[0].path) is None
index.close()
"""
    run_in_mounts(code, tmp_path / "place", shards)


@pytest.mark.parametrize("gigabytes", [300, 40, 4])
def test_limited_address_space_gives_a_smaller_map(directory: Path, shards: list[Shard], gigabytes: int) -> None:
    before = f"""
import resource
limit = {gigabytes} << 30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
"""
    code = """
assert index._home.env.info()["map_size"] <= limit
sets.check(index, shards)
index.refresh(shards)
sets.check(index, shards)
index.close()
"""
    run(code, directory, shards, before)


def test_an_index_that_outgrows_the_map_of_a_process_gives_it_a_temporary_one(
    directory: Path, shards: list[Shard]
) -> None:
    before = """
import logging, subprocess, sys
from wdsfs.index import index_directory
index_directory.MAP_SIZES = (1 << 20,)
logging.disable()
"""
    code = """
grow = "import lmdb, sys\\nwith lmdb.open(sys.argv[1], map_size=1 << 30) as env, env.begin(write=True) as txn: "
subprocess.run([sys.executable, "-c", grow + "txn.put(b'x', bytes(2 << 20))", sys.argv[1]], check=True)
index.renew()
assert index.summary(shards[0].path) is None
assert "using a temporary index" in index.notices[0], index.notices
index.refresh(shards)
sets.check(index, shards)
index.close()
"""
    run(code, directory, shards, before)


def test_too_little_address_space_is_no_reason_to_throw_an_index_away(
    directory: Path, shards: list[Shard]
) -> None:
    code = """
import resource, sys
from pathlib import Path
from wdsfs.errors import IndexUnusable
from wdsfs.index.store import open_index
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20),) * 2)
try:
    open_index(Path(sys.argv[1]))
except IndexUnusable as error:
    assert "address space" in str(error), error
else:
    raise AssertionError
"""
    sets.run(code, directory)
    with opened(directory) as index:
        sets.check(index, shards)


# --- damage -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def written(directory: Path) -> Iterator[lmdb.Transaction]:
    """A transaction of another program, which writes into an index."""
    with lmdb.open(str(directory), map_size=1 << 30) as env, env.begin(write=True) as txn:
        yield txn


def _of_another_format(directory: Path) -> None:
    with written(directory) as txn:
        txn.put(b"format", b"1")


def _of_somebody_else(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()
    with written(directory) as txn:
        txn.put(b"something", b"else")


def _nonsense(data: bytes) -> Callable[[Path], object]:
    return lambda directory: data_of(directory).write_bytes(data)


NO_INDEX: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "nothing": (_nonsense(b""), ()),
    "a byte": (_nonsense(b"x"), ("is damaged",)),
    "a text": (_nonsense(b"nonsense" * 100), ("is damaged",)),
    "noise": (_nonsense(random.Random(1).randbytes(100_000)), ("is damaged",)),
    "zeros": (_nonsense(bytes(1 << 20)), ("is damaged",)),
    "another format": (_of_another_format, ()),
    "somebody else's": (_of_somebody_else, ("are not an index of wdsfs",)),
}


@pytest.mark.parametrize("case", NO_INDEX)
def test_what_is_no_index_is_replaced(directory: Path, shards: list[Shard], case: str) -> None:
    spoil, notices = NO_INDEX[case]
    spoil(directory)
    with opened(directory, *notices) as index:
        assert len(refresh(index, shards)) == 4
    with opened(directory) as index:
        sets.check(index, shards)


def _flipped(value: bytes, at: int) -> bytes:
    changed = bytearray(value)
    changed[at % len(value)] ^= 1 << at % 8
    return bytes(changed)


ALTERED = [(_flipped, at) for at in random.Random(3).sample(range(1 << 20), 40)]
ALTERED += [(lambda value, size: value[:size], size) for size in (0, 3, 4, 60, 63, 64, 100)]


@pytest.mark.parametrize("kind", [b"s", b"r"])
def test_a_value_that_was_altered_is_unknown(directory: Path, shards: list[Shard], kind: bytes) -> None:
    right = [sets.right_summary(one) for one in shards]
    for alter, at in ALTERED:
        key = kind + store._digest(shards[1].path)
        with written(directory) as txn:
            txn.put(key, alter(bytes(txn.get(key) or b""), at))
        with opened(directory) as index:
            assert [index.summary(one.path) for one in shards] == [
                None if kind == b"s" and number == 1 else summary for number, summary in enumerate(right)
            ]
            found = index.record(shards[1].path, Fingerprint.at(shards[1].path))
            assert (found is None) == (kind == b"r")
            index.refresh(shards[1:2])
            sets.check(index, shards)


def test_a_summary_of_another_shard_is_not_believed(directory: Path, shards: list[Shard]) -> None:
    with written(directory) as txn:
        keys = [b"s" + store._digest(one.path) for one in shards]
        txn.put(keys[0], txn.get(keys[1]) or b"")
    with opened(directory) as index:
        assert index.summary(shards[0].path) is None
        assert index.summary(shards[1].path) == sets.right_summary(shards[1])


def test_a_record_of_another_format_is_built_again(
    directory: Path, shards: list[Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(directory) as index, monkeypatch.context() as patch:
        later = record.RECORD._replace(reads=(record.RECORD.version + 1,))
        patch.setattr(record, "RECORD", later)
        patch.setattr(record_builder, "RECORD", later)
        assert index.record(shards[0].path, Fingerprint.at(shards[0].path)) is None


def survive(home: Path, spoil: Callable[[bytes, int], bytes], seeds: range) -> dict[int, str]:
    """Open and use copies of an index that were spoiled, each in a process of its own; what went wrong, by seed.

    Allowed are right answers, and no answer, after which the shard is indexed again. To be run in a process
    without threads.
    """
    shards = sets.make(home / "shards", 24, samples=40)
    right = {one: sets.right_summary(one) for one in shards}
    lists = {one: sets.listing(Record(build_file(one.path))) for one in shards}
    index = open_index(home / "index")
    index.refresh(shards)
    for turn in range(5):  # so that there are free pages
        index.refresh(shards[turn::3])
    index.close()
    good = data_of(home / "index").read_bytes()
    wrong = {}
    for seed in seeds:
        copy = home / f"copy{seed}"
        copy.mkdir()
        data_of(copy).write_bytes(spoil(good, seed))
        said, pid = home / "said", os.fork()
        if not pid:
            said.write_text("")
            resource.setrlimit(resource.RLIMIT_CPU, (30, 30))  # not by the clock: the machine may be busy
            try:
                _use(copy, right, lists)
            except BaseException:
                said.write_text(traceback.format_exc())
            finally:
                os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status or said.read_text():
            wrong[seed] = f"exit status {status}, {said.read_text()}"
        shutil.rmtree(copy)
    return wrong


def _use(directory: Path, right: dict[Shard, Summary], lists: dict[Shard, Any]) -> None:
    logging.disable()
    index = open_index(directory)
    for one, summary in right.items():
        assert index.summary(one.path) in (None, summary)
        found = index.record(one.path, summary.fingerprint)
        assert found is None or sets.listing(found) == lists[one]
    shards = list(right)
    index.refresh([one for one, _ in index.stale(shards)])
    index.refresh(shards[3:20])
    for one, summary in right.items():
        found = index.record(one.path, summary.fingerprint)
        if found is None:
            index.store([(one.path, build_file(one.path))])
            found = index.record(one.path, summary.fingerprint)
        assert found is not None
        assert sets.listing(found) == lists[one]
        assert index.summary(one.path) == summary
    index.prune()
    index.close()
    # And the file that is left is sound.
    again = open_index(directory)
    assert not again.notices, again.notices
    for one, summary in right.items():
        assert again.summary(one.path) in (None, summary)
    again.close()


def spoil_pages(good: bytes, seed: int) -> bytes:
    """Damage of one to three pages, mostly where it hurts: the structure, not the values."""
    choose = random.Random(seed)
    size = 4096
    data = bytearray(good)
    flags = [int.from_bytes(good[at + 10 : at + 12], "little") for at in range(0, len(good), size)]
    structure = [page for page, flag in enumerate(flags) if flag in (1, 2, 8)]
    for _ in range(choose.choice([1, 1, 2, 3])):
        at = size * choose.choice(
            [choose.choice(structure), choose.choice(structure), choose.randrange(len(flags)), 0]
        )
        match choose.randrange(6):
            case 0:
                data[at : at + size] = choose.randbytes(size)
            case 1:
                data[at : at + size] = bytes(size)
            case 2:
                for _ in range(choose.choice([1, 4])):
                    data[at + choose.randrange(160)] = choose.randrange(256)
            case 3:  # in a node
                slot = at + choose.randrange(16, 60, 2)
                node = at + int.from_bytes(data[slot : slot + 2], "little") % (size - 40)
                data[node + choose.randrange(40)] = choose.randrange(256)
            case 4:  # a number that could be a page's, or a size
                where = at + choose.randrange(0, size - 8)
                data[where : where + 8] = choose.choice(
                    [choose.randrange(len(flags) + 2), 1 << choose.randrange(63)]
                ).to_bytes(8, "little")
            case _:  # another page in its place
                other = size * choose.choice(structure)
                data[at : at + size] = data[other : other + size]
    return bytes(data)


def cut(good: bytes, seed: int) -> bytes:
    sizes = [1, 15, 16, 100, 151, 152, 4095, 4096, 4097, 4248, 8191, 8192, 8193, len(good) - 1, len(good) - 4096]
    return good[: sizes[seed] if seed < len(sizes) else random.Random(seed).randrange(len(good))]


@pytest.mark.parametrize(("spoil", "count"), [("spoil_pages", 12 * THOROUGH), ("cut", 15 + 3 * THOROUGH)])
def test_damaged_pages_never_crash_and_never_give_a_wrong_answer(tmp_path: Path, spoil: str, count: int) -> None:
    code = """
import json, sys, warnings
warnings.simplefilter("ignore")  # fork and threads: NumPy has started some, and they sleep
from pathlib import Path
from tests.index import test_store as test_index
print(json.dumps(test_index.survive(Path(sys.argv[1]), getattr(test_index, sys.argv[2]), range(int(sys.argv[3])))))
"""
    assert json.loads(sets.run(code, tmp_path, spoil, str(count))) == {}


def test_damage_that_shows_while_writing_has_the_index_rebuilt(tmp_path: Path) -> None:
    """The header of a large value is looked at only when the value is replaced."""
    shards = sets.make(tmp_path / "shards", 3, samples=300)
    directory = tmp_path / "index"
    with opened(directory) as index:
        index.refresh(shards)
    data = bytearray(data_of(directory).read_bytes())
    heads = [
        at
        for at in range(0, len(data), 4096)
        if data[at + 10] == 4 and data[at : at + 8] == struct.pack("<Q", at // 4096)
    ]
    assert len(heads) >= 3
    for at in heads:
        data[at + 12 : at + 16] = struct.pack("<I", 1 << 31)
    data_of(directory).write_bytes(data)
    with opened(directory) as index:
        index.refresh(shards)
        [notice] = index.notices
        assert "is damaged" in notice
        sets.check(index, shards)
        assert index.directory == directory
    with opened(directory) as index:
        sets.check(index, shards)


@pytest.mark.parametrize(
    ("error", "rebuilt"),
    [(lmdb.CorruptedError("x"), True), (lmdb.DiskError("x"), False), (lmdb.MapFullError("x"), False)],
)
def test_what_is_wrong_decides_whether_the_index_is_kept(
    directory: Path, shards: list[Shard], monkeypatch: pytest.MonkeyPatch, error: Exception, rebuilt: bool
) -> None:
    with opened(directory) as index:
        apply, errors = index._apply, [error]

        def failing(changes: object) -> None:
            if errors:
                raise errors.pop()
            apply(changes)  # type: ignore[arg-type]

        monkeypatch.setattr(index, "_apply", failing)
        index.refresh(shards[:1])
        assert len(index.notices) == 1
        assert (index.directory == directory) == rebuilt
        assert len(list(index.stale(shards))) == (3 if rebuilt else 0)
        refresh(index, shards)
        sets.check(index, shards)
        if not rebuilt:
            errors.append(error)
            with pytest.raises(IndexUnusable, match="temporary"):
                index.refresh(shards[:1])
    with opened(directory) as index:
        sets.check(index, shards)


# --- pruning ----------------------------------------------------------------------------------------------


def test_prune_drops_what_is_gone_and_nothing_else(directory: Path, shards: list[Shard]) -> None:
    sets.path_of(shards[1]).unlink()
    sets.path_of(shards[2]).unlink()
    sets.path_of(shards[2]).symlink_to(sets.path_of(shards[2]))  # nobody can say
    sets.path_of(shards[3]).write_bytes(b"changed")
    with opened(directory) as index:
        assert index.prune() == 1
        assert [index.summary(one.path) is None for one in shards] == [False, True, False, False]
        assert index.record(shards[0].path, Fingerprint.at(shards[0].path)) is not None
        assert index.prune() == 0
    with opened(directory) as index:
        assert [index.summary(one.path) is None for one in shards] == [False, True, False, False]


# --- tables over a set ------------------------------------------------------------------------------------


def fingerprints_of(shards: list[Shard]) -> list[Fingerprint]:
    return [Fingerprint.at(one.path) for one in shards]


def table_of(index: Index, shards: list[Shard], now: list[Fingerprint] | None = None) -> bytes:
    """A table that says which fingerprints it was made of."""
    now = fingerprints_of(shards) if now is None else now

    def build() -> tuple[list[Fingerprint], bytes]:
        return now, repr(now).encode()

    return bytes(index.table(index.keep_table(b"t1", [one.path for one in shards], now, build)))


def unexpected() -> tuple[list[Fingerprint], bytes]:
    raise AssertionError


def test_a_table_is_kept_until_a_shard_changes(directory: Path, shards: list[Shard]) -> None:
    paths = [one.path for one in shards]
    with opened(directory) as index:
        before = table_of(index, shards)
    with opened(directory) as index:
        assert index.table(index.keep_table(b"t1", paths, fingerprints_of(shards), unexpected)) == before
        assert table_of(index, shards[::-1]) != before
        sets.path_of(shards[0]).write_bytes(sets.content(9, 9))
        with pytest.raises(AssertionError):
            index.keep_table(b"t1", paths, fingerprints_of(shards), unexpected)
        assert table_of(index, shards) == repr(fingerprints_of(shards)).encode() != before
        with pytest.raises(AssertionError):
            index.keep_table(b"t2", paths, fingerprints_of(shards), unexpected)


def test_a_table_says_which_records_went_into_it(directory: Path, shards: list[Shard]) -> None:
    """A shard that disappears while the table is made must not be taken for a part of it later."""
    with opened(directory) as index:
        now = fingerprints_of(shards)
        part = [now[0], GONE, *now[2:]]
        index.keep_table(b"t1", [one.path for one in shards], now, lambda: (part, b"of a part"))
        assert table_of(index, shards) == repr(now).encode()


def test_a_damaged_table_is_made_again(directory: Path, shards: list[Shard]) -> None:
    key = b"t" + store._digest(b"\0".join([*(one.path for one in shards), b"1"]))
    with opened(directory) as index:
        expected = table_of(index, shards)
    for at in (0, 17, 25, -1):
        with written(directory) as txn:
            value = bytearray(txn.get(key) or b"")
            value[at] ^= 4
            txn.put(key, bytes(value) if at else b"short")
        with opened(directory) as index:
            assert table_of(index, shards) == expected


def test_a_table_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with opened(tmp_path) as index:
        key = index.keep_table(b"t1", [], [], lambda: ([], b"x"))
        index.drop_tables([b"t0", b"t1"], [])
        with pytest.raises(IndexUnusable, match="mount again"):
            index.table(key)
