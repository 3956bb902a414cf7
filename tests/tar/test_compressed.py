"""Compressed shards: the bytes of the tar inside, whichever way they come; never others, never too many."""

from __future__ import annotations

import bz2
import contextlib
import fcntl
import gzip
import hashlib
import io
import itertools
import json
import lzma
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xz

from tests import sets, tars
from tests.bounded import bounded
from tests.conftest import Program
from tests.processes import PATIENCE, wait_until
from tests.tars import zstd
from wdsfs import source
from wdsfs.cache import file_cache
from wdsfs.cache.cache_directory import key_of
from wdsfs.errors import CorruptShard, StaleShard, UnreadableShard, bytes_text
from wdsfs.index import record_of_file
from wdsfs.index.record import Record
from wdsfs.index.store import open_index
from wdsfs.interop.lint import lint
from wdsfs.shards import Fingerprint, Shard
from wdsfs.tar import compressed, seekable, streams
from wdsfs.tree import content as content_module
from wdsfs.tree import freshness, open_shards
from wdsfs.tree.indexing import NotIndexed
from wdsfs.tree.shard_set import ShardSet

PIECE = 64 << 10


def _samples(count: int = 40, seed: int = 1) -> bytes:
    """A tar of some 350 kB, half of which can be compressed."""
    rng = random.Random(seed)
    parts = []
    for number in range(count):
        parts.append(tars.member(b"d/%03d.jpg" % number, rng.randbytes(4000) + bytes(4000)))
        parts.append(tars.member(b"d/%03d.cls" % number, b"%d" % number))
    return tars.tar(*parts)


TAR = _samples()
BY_NAME = {one.name: TAR[one.data : one.data + one.size] for one in tars.by_tarfile(TAR)}
PIECES = [TAR[start : start + PIECE] for start in range(0, len(TAR), PIECE)]


def _blocks_of_xz(pieces: list[bytes]) -> bytes:
    out = io.BytesIO()
    with xz.XZFile(out, "wb") as file:
        for piece in pieces:
            file.write(piece)
            file.change_block()
    return out.getvalue()


WHOLE: dict[str, bytes] = {
    "gz": gzip.compress(TAR),
    "gz of several members": b"".join(map(gzip.compress, PIECES)),
    "gz with zeros behind it": gzip.compress(TAR) + bytes(1000),
    "bz2": bz2.compress(TAR),
    "bz2 of several streams": b"".join(map(bz2.compress, PIECES)),
    "xz": lzma.compress(TAR),
    "xz of several streams": b"".join(lzma.compress(piece) + bytes(8) for piece in PIECES),
    "xz of several blocks": _blocks_of_xz(PIECES),
    "zst": zstd.compress(TAR),
    "zst of several frames": b"".join(map(zstd.compress, PIECES)),
    "zst behind a skippable frame": b"\x50\x2a\x4d\x18\4\0\0\0abcd" + zstd.compress(TAR),
}
# What can be read without a copy.
SEEKABLE = set(WHOLE) - {"gz with zeros behind it", "zst"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> file_cache.FileCache:
    monkeypatch.setenv("WDSFS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("WDSFS_CACHE_SIZE", raising=False)
    monkeypatch.delenv("WDSFS_UNPACK", raising=False)
    return file_cache.cache()


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda size: monkeypatch.setenv("WDSFS_CACHE_SIZE", str(size))


@pytest.fixture
def nothing_is_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "RECENT_SECONDS", -1.0)


def write(path: Path, content: bytes) -> Shard:
    path.write_bytes(content)
    return Shard(os.fsencode(path), os.fsencode(path.name))


def kinds_in(cache: file_cache.FileCache) -> list[str]:
    names = os.listdir(cache.directory) if cache.directory.exists() else []
    return sorted(name.partition(".")[2] for name in names if name != "room")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[compressed.Opened]:
    fd = os.open(path, os.O_RDONLY)
    try:
        with compressed.open_tar(fd, os.fsencode(path)) as found:
            yield found
    finally:
        os.close(fd)


def refused(path: Path, why: str, error: type[Exception] = UnreadableShard) -> None:
    """The tar in a file is not opened, for this reason."""
    with pytest.raises(error, match=why), opened(path):
        pass


def unpacked(kind: str, content: bytes) -> tuple[tuple[str, int], bytes]:
    """What `streams.unpack` says, and writes."""
    found: list[bytes] = []
    with tars.opened(content) as fd:
        return streams.unpack(kind, fd, found.append), b"".join(found)


def content_of(tar: source.TarBytes) -> bytes:
    return source.pread(tar, source.size_of(tar) + 1, 0)


@contextlib.contextmanager
def a_lower(directory: Path, *shards: Shard) -> Iterator[ShardSet]:
    with contextlib.closing(ShardSet(shards, open_index(directory / "index"))) as below:
        for number in range(len(shards)):
            below.index_now(number)
        yield below


def read_all(below: ShardSet, number: int = 0) -> list[bytes]:
    record = below.record(number)
    contents = (below.content(number, below.tag(number), member) for member in range(record.members))
    return [content_module.read(content, 0, 1 << 20) for content in contents]


def right(tar: bytes = TAR) -> list[bytes]:
    return [tar[one.data : one.data + one.size] for one in tars.by_tarfile(tar)]


# --- whole ones --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", WHOLE)
def test_with_a_copy_and_without(
    case: str, tmp_path: Path, cache: file_cache.FileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy is what it unpacks to. Without one any bytes are read, in any order; or an error names the reason."""
    write(tmp_path / "a", WHOLE[case])  # whatever its name
    for _ in range(2):
        with opened(tmp_path / "a") as (tar, problem, _):
            assert (type(tar), problem) == (int, None)
            assert content_of(tar) == TAR
    assert kinds_in(cache) == ["tar"]
    cache.clear()
    monkeypatch.setenv("WDSFS_UNPACK", "never")
    if case not in SEEKABLE:
        refused(tmp_path / "a", "can only be unpacked")
        assert kinds_in(cache) == []
        return
    rng = random.Random(2)
    for _ in range(2):
        with opened(tmp_path / "a") as (tar, problem, _):
            assert problem is None
            assert not isinstance(tar, int)
            assert tar.size == len(TAR)
            for start in (0, len(TAR) - 10, len(TAR), *(rng.randrange(len(TAR)) for _ in range(30))):
                assert tar.pread(5000, start) == TAR[start : start + 5000]
    assert kinds_in(cache) == ["seek"]


@pytest.mark.parametrize("way", compressed.POLICIES)
def test_members_below_the_mount(
    way: str, tmp_path: Path, cache: file_cache.FileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is that of the tar, the fingerprint that of the compressed file."""
    monkeypatch.setenv("WDSFS_UNPACK", way)
    one = write(tmp_path / "a.tar.gz", WHOLE["gz"])
    plain = write(tmp_path / "plain.tar", TAR)
    with a_lower(tmp_path, one, plain) as below:
        assert sorted(read_all(below)) == sorted(right())
        assert read_all(below, 0) == read_all(below, 1)
        assert sets.listing(below.record(0)) == sets.listing(below.record(1))
        assert below.summary(0).fingerprint == Fingerprint.at(one.path)
        content = below.content(0, below.tag(0), 3)
        cached = content_module.read_cached(content, 0, 100)
        assert cached is None if way == "never" else cached in (None, content_module.read(content, 0, 100))
        assert below.index.prune() == 0
        assert kinds_in(cache) == ["seek" if way == "never" else "tar"]
        assert lint(one.path).samples == 40


def test_pieces_that_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that unpacks half a shard is no random access."""
    monkeypatch.setenv("WDSFS_UNPACK", "never")
    monkeypatch.setattr(seekable, "PIECE_MAX", 2 * PIECE)
    for name in ("xz", "zst of several frames"):
        write(tmp_path / name, WHOLE[name])
    with opened(tmp_path / "zst of several frames") as (tar, _, _):
        assert content_of(tar) == TAR
    with pytest.raises(UnreadableShard, match=f"in pieces of up to {bytes_text(len(TAR))}"):
        record_of_file.build_file(os.fsencode(tmp_path / "xz"))


def test_others_go_on_while_a_shard_is_unpacked(tmp_path: Path, cache: file_cache.FileCache) -> None:
    waits: list[str] = []

    @contextlib.contextmanager
    def slowly() -> Iterator[None]:
        waits.append(f"{kinds_in(cache)}")
        yield
        waits.append(f"{kinds_in(cache)}")

    compressed_one, plain = write(tmp_path / "a.tar.gz", WHOLE["gz"]), write(tmp_path / "b.tar", TAR)
    with a_lower(tmp_path, compressed_one, plain) as below:
        below.slowly = slowly
        cache.clear()
        assert read_all(below, 1) == read_all(below, 1)
        assert waits == []
        read_all(below, 0)
        assert waits == ["[]", "['tar']"]


# --- damaged ones ------------------------------------------------------------------------------------------


def test_what_is_cut_off(tmp_path: Path) -> None:
    """Content before the cut is shown; the rest is an error, not an end."""
    for kind, compress in tars.COMPRESS.items():
        whole = compress(TAR)
        one = write(tmp_path / f"{kind}.tar", whole[: len(whole) // 2])
        with opened(tmp_path / f"{kind}.tar") as (tar, problem, _):
            assert problem is not None
            assert problem.kind == "truncated"
            assert kind in problem.text
            there = content_of(tar)
            assert TAR.startswith(there)
        record = Record(record_of_file.build_file(one.path))
        assert record.problems[0] == problem
        assert {"truncated", "no end mark"} >= {found.kind for found in record.problems}
        assert "truncated" in lint(one.path).counts
    with a_lower(tmp_path, Shard(os.fsencode(tmp_path / "gzip.tar"), b"gzip")) as below:
        *before, last = [below.content(0, below.tag(0), member) for member in range(below.record(0).members)]
        contents = [content_module.read(content, 0, 1 << 20) for content in before]
        assert len(contents) > 10
        assert set(contents) <= set(right())
        with pytest.raises(CorruptShard):
            content_module.read(last, 0, 1 << 20)


@pytest.mark.parametrize("way", ["auto", "always"])
def test_never_a_byte_that_no_checksum_vouches_for(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For damage at any place, noticed at any time: nothing after the last sound stream is shown."""
    monkeypatch.setenv("WDSFS_UNPACK", way)
    for name, compress in (("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)):
        streams = [compress(piece) for piece in PIECES]
        for place in (20, len(streams[2]) // 2, -5, -12):
            damaged = bytearray(streams[2])
            damaged[place] ^= 0x10
            path = tmp_path / f"{name}{place}"
            write(path, b"".join([*streams[:2], bytes(damaged), *streams[3:]]))
            with opened(path) as (tar, problem, _):
                assert problem is not None
                assert problem.kind == "damaged"
                assert content_of(tar) == b"".join(PIECES[:2])
    problems = Record(record_of_file.build_file(os.fsencode(tmp_path / "gz20"))).problems
    assert {problem.kind for problem in problems} == {"damaged", "truncated"}
    assert any(f"from byte {2 * PIECE} on" in problem.text for problem in problems)


def test_without_a_copy_damage_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats whose library sees a shorter, complete file, or checks no checksum."""
    monkeypatch.setenv("WDSFS_UNPACK", "never")
    for name in SEEKABLE:
        whole = WHOLE[name]
        for content in (whole[: len(whole) // 2], whole[:-3], whole + b"something else"):
            write(tmp_path / "a", content)
            refused(tmp_path / "a", "can only be unpacked")


@pytest.mark.parametrize(
    ("content", "members", "kind", "name"),
    [
        (WHOLE["gz"] + b"something else", 80, "behind end mark", "a.tar.gz"),  # as in gzip: reported, and not read
        (b"", 0, "empty", "a.tar.gz"),
        (gzip.compress(b""), 0, "empty", "a.tar.gz"),
        (gzip.compress(WHOLE["gz"]), 0, "compressed", "a.tar.gz"),  # unpacked once; what is inside has a name
        (gzip.compress(b"<html>"), 0, "not a tar", "a.tar.gz"),
        (gzip.compress(b"<html>")[:12], 0, "truncated", "a.tar.gz"),  # it may be a tar
        (
            WHOLE["gz"][:-8] + bytes(4) + WHOLE["gz"][-4:],
            0,
            "damaged",
            "a.tar.gz",
        ),  # no checksum vouches for a byte
        (WHOLE["gz"], 80, "compressed", "a.tar"),  # served, and told
    ],
    ids=itertools.count(),
)
def test_what_is_no_whole_tar(tmp_path: Path, content: bytes, members: int, kind: str, name: str) -> None:
    path = write(tmp_path / name, content).path
    record = Record(record_of_file.build_file(path))
    kinds = {problem.kind for problem in record.problems}
    assert (record.members, kinds) == (members, set() if name == "a.tar" else {kind})
    assert kind in lint(path).counts


def test_a_bomb_meets_the_limit(
    tmp_path: Path,
    cache: file_cache.FileCache,
    limited: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limited(1 << 20)
    monkeypatch.setattr(seekable, "PIECE_MAX", 1 << 20)
    bombs: dict[str, Callable[[bytes], bytes]] = {"zst": zstd.compress, "xz": lzma.compress, "bz2": bz2.compress}
    for name, bomb in ((name, compress(bytes(8 << 20))) for name, compress in bombs.items()):
        write(tmp_path / f"a.tar.{name}", bomb)
        with pytest.raises(UnreadableShard, match=r"larger than the cache may be.*--cache-size"):
            record_of_file.build_file(os.fsencode(tmp_path / f"a.tar.{name}"))
        assert kinds_in(cache) == []
    monkeypatch.setenv("WDSFS_UNPACK", "never")
    monkeypatch.setattr(compressed, "ALLOWED", 1 << 20)
    with pytest.raises(UnreadableShard, match="more than 200 times its size"):
        record_of_file.build_file(os.fsencode(tmp_path / "a.tar.bz2"))


def _asking_for_much(kind: str) -> bytes:
    """A small file that claims to need 1.5 GiB (xz) or 2 GiB (zstd) of memory to be unpacked."""
    if kind == "xz":
        content = bytearray(lzma.compress(TAR))
        content[16] = 37  # of the block header behind the 12 bytes of the stream header: 3 << 29 bytes
        end = 12 + 4 * (content[12] + 1)
        content[end - 4 : end] = zlib.crc32(content[12 : end - 4]).to_bytes(4, "little")
        return bytes(content)
    options: dict[int, int] = {zstd.CompressionParameter.content_size_flag: 0}
    with io.BytesIO() as out:
        with zstd.ZstdFile(out, "wb", options=options) as file:
            file.write(TAR)
        content = bytearray(out.getvalue())
    content[5] = 31 - 10 << 3  # the exponent of the window
    return bytes(content)


@pytest.mark.parametrize("kind", ["xz", "zst"])
def test_memory_that_a_file_asks_for(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it has given a byte: it is not given, whichever way the shard is read."""
    write(tmp_path / "a", _asking_for_much(kind))
    for way in compressed.POLICIES:
        monkeypatch.setenv("WDSFS_UNPACK", way)
        said = "--unpack-memory"
        if (kind, way) == ("zst", "never"):
            said = "can only be unpacked, since it is a single zstd frame"
        with pytest.raises(UnreadableShard, match=said):
            bounded(lambda: record_of_file.build_file(os.fsencode(tmp_path / "a")))
    monkeypatch.setenv("WDSFS_UNPACK", "auto")
    monkeypatch.setenv("WDSFS_UNPACK_MEMORY", "2G")
    with opened(tmp_path / "a") as (tar, problem, _):
        assert problem is None
        assert content_of(tar) == TAR


def test_what_honest_users_make_fits() -> None:
    """As `xz -9 --extreme` does, and `zstd -22 --ultra`; a frame to skip is no decoder for each byte behind it."""
    wide: dict[int, int] = {
        zstd.CompressionParameter.window_log: 27,
        zstd.CompressionParameter.content_size_flag: 0,
    }
    skipped = b"\x50\x2a\x4d\x18\0\0\0\0" * 1000
    assert unpacked("xz", lzma.compress(TAR, preset=9 | lzma.PRESET_EXTREME)) == (("tar", len(TAR)), TAR)
    assert unpacked("zstd", zstd.compress(TAR, options=wide)) == (("tar", len(TAR)), TAR)
    assert unpacked("zstd", skipped + zstd.compress(TAR)) == (("tar", len(TAR)), TAR)


@pytest.mark.parametrize("name", ["gzip", "bzip2", "xz", "zstd"])
def test_many_empty_streams_cost_no_more_than_their_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each used to get all that was read of the file, and to give nearly all of it back."""
    make, failures = streams._decoder_of(name)
    fed = 0

    class Counting:
        def __init__(self) -> None:
            self._decoder = make()

        def __getattr__(self, attribute: str) -> Any:
            return getattr(self._decoder, attribute)

        def decompress(self, data: bytes, most: int) -> bytes:
            nonlocal fed
            fed += len(data)
            return self._decoder.decompress(data, most)

    monkeypatch.setattr(streams, "_decoder_of", lambda kind: (Counting, failures))
    assert unpacked(name, tars.COMPRESS[name](b"") * 2000) == (("tar", 0), b"")
    assert fed <= 2000 * 600


def test_a_bomb_evicts_nothing_that_others_use(
    tmp_path: Path,
    cache: file_cache.FileCache,
    limited: Callable[[int], None],
    nothing_is_recent: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends at 200 times its size; what is to be unpacked in any case, at half of the cache."""
    limited(4 * len(TAR))
    for number in range(3):
        write(tmp_path / f"{number}.tar.zst", zstd.compress(_samples(seed=number)))
        with opened(tmp_path / f"{number}.tar.zst"):
            pass
    write(tmp_path / "bomb", zstd.compress(bytes(100 * len(TAR))))
    monkeypatch.setattr(compressed, "ALLOWED", 1000)
    assert 200 * (tmp_path / "bomb").stat().st_size > len(TAR) / 2
    refused(tmp_path / "bomb", "--unpack always")
    assert kinds_in(cache) == ["tar"] * 3
    monkeypatch.setenv("WDSFS_UNPACK", "always")
    refused(tmp_path / "bomb", "more than half of the cache")
    assert len(kinds_in(cache)) >= 2


# --- room --------------------------------------------------------------------------------------------------


def test_what_can_be_read_without_a_copy_makes_nobody_go(
    tmp_path: Path, cache: file_cache.FileCache, limited: Callable[[int], None]
) -> None:
    limited(int(2.5 * len(TAR)))
    for number in range(4):
        write(tmp_path / f"{number}.tar.gz", gzip.compress(_samples(seed=number)))
        with opened(tmp_path / f"{number}.tar.gz") as (tar, _, _):
            assert content_of(tar) == _samples(seed=number)
    assert kinds_in(cache) == ["seek", "seek", "tar", "tar"]


def test_prune_removes_what_belongs_to_no_shard(tmp_path: Path, cache: file_cache.FileCache) -> None:
    kept, gone, changed = (write(tmp_path / f"{name}.tar.gz", WHOLE["gz"]) for name in "abc")
    with a_lower(tmp_path, kept, gone, changed) as below:
        (cache.directory / f"{'0' * 32}.part").write_bytes(b"of a process that was killed")
        (cache.directory / "README").write_text("somebody else's")
        os.unlink(gone.path)
        write(tmp_path / "c.tar.gz", WHOLE["gz of several members"])
        assert below.index.prune() == 1
        assert kinds_in(cache) == ["", "tar"]
        os.rename(kept.path, tmp_path / "away")
        os.symlink(kept.path, kept.path)  # it cannot be looked at
        assert below.index.prune() == 0
        assert kinds_in(cache) == ["", "tar"]


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: file_cache.FileCache) -> None:
    """Without a copy if possible, else a clear error; and no file is left."""

    def refuse(fd: int, data: Any) -> int:
        if len(data) > 3000:
            raise OSError(28, "No space left on device")
        return original(fd, data)

    original = os.write
    monkeypatch.setattr(os, "write", refuse)
    write(tmp_path / "one", WHOLE["zst"])
    refused(tmp_path / "one", r"the disk of .* is full")
    assert kinds_in(cache) == []
    write(tmp_path / "several", WHOLE["zst of several frames"])
    with opened(tmp_path / "several") as (tar, _, _):
        assert content_of(tar) == TAR
    assert kinds_in(cache) == ["seek"]


def test_something_of_a_disk_is_left_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimpleNamespace(f_frsize=4096, f_blocks=1 << 20, f_bavail=(1 << 20) // 20 + 10)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    write(tmp_path / "a", WHOLE["zst"])
    refused(tmp_path / "a", "larger than the cache may be")
    disk.f_bavail += 1000
    with opened(tmp_path / "a") as (tar, _, _):
        assert content_of(tar) == TAR


@pytest.mark.parametrize(("name", "value"), [("WDSFS_CACHE_DIR", "/dev/null"), ("WDSFS_UNPACK", "sometimes")])
def test_a_wrong_setting_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    write(tmp_path / "a", WHOLE["gz"])
    refused(tmp_path / "a", name)


# --- libraries that are not there --------------------------------------------------------------------------


def test_missing_libraries_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: file_cache.FileCache
) -> None:
    """... where Python itself cannot do it, also when there is an index of places from before."""
    monkeypatch.setenv("WDSFS_UNPACK", "never")
    write(tmp_path / "gz", WHOLE["gz"])
    with opened(tmp_path / "gz"):
        monkeypatch.setenv("WDSFS_UNPACK", "auto")
    for module in ("rapidgzip", "xz", "indexed_zstd", "backports.zstd", "compression.zstd"):
        monkeypatch.setitem(sys.modules, module, None)
    write(tmp_path / "bz2", WHOLE["bz2"])
    write(tmp_path / "xz", WHOLE["xz"])
    for name in ("gz", "bz2", "xz"):
        with opened(tmp_path / name) as (tar, _, _):
            assert content_of(tar) == TAR
    assert kinds_in(cache) == ["seek", "tar", "tar", "tar"]
    write(tmp_path / "zst", WHOLE["zst"])
    refused(tmp_path / "zst", r"backports.zstd; type: .*pip install .*\[compressed\]'")
    monkeypatch.setenv("WDSFS_UNPACK", "never")
    refused(tmp_path / "gz", r"rapidgzip is not installed; type: .*\[compressed\]'")


def test_a_damaged_index_of_places_is_made_anew(
    tmp_path: Path, cache: file_cache.FileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WDSFS_UNPACK", "never")
    write(tmp_path / "a", WHOLE["gz"])
    with opened(tmp_path / "a"):
        [path] = cache.directory.glob("*.seek")
    good = path.read_bytes()
    for bad in (b"", good[:50], good[:-1] + b"\1" if good[-1:] != b"\1" else good[:-1] + b"\2"):
        path.write_bytes(bad)
        with opened(tmp_path / "a") as (tar, _, _):
            assert content_of(tar) == TAR
        assert path.read_bytes() == good


def test_files_in_the_cache_are_as_format_md_says(
    tmp_path: Path, cache: file_cache.FileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    write(path, WHOLE["zst of several frames"])
    state = b"".join(number.to_bytes(8, "little") for number in Fingerprint.at(os.fsencode(path)))
    key = hashlib.blake2b(os.fsencode(path) + b"\0" + state, digest_size=16).hexdigest()
    for policy in ("always", "never"):
        monkeypatch.setenv("WDSFS_UNPACK", policy)
        with opened(path) as (tar, _, _):
            assert content_of(tar) == TAR
        if policy == "always":
            assert (cache.directory / f"{key}.tar").read_bytes() == TAR
            (cache.directory / f"{key}.tar").unlink()
    index = (cache.directory / f"{key}.seek").read_bytes()
    assert index[:8] == b"wdsfs-k\n"
    assert int.from_bytes(index[8:12], "little") == zlib.crc32(index[12:])
    assert int.from_bytes(index[12:20], "little") == len(TAR)
    assert json.loads(index[20:])[0] == [0, 0]


# --- changes, kills and others -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["always", "never"])
def test_a_changed_file_is_stale(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """... although the copy is still there, or what was unpacked is still in memory."""
    monkeypatch.setattr(freshness, "FRESH_SECONDS", 0.0)
    monkeypatch.setenv("WDSFS_UNPACK", way)
    one = write(tmp_path / "a.tar.gz", WHOLE["gz"])
    with a_lower(tmp_path, one) as below:
        content = below.content(0, below.tag(0), 0)
        content_module.read(content, 0, 10)
        before = os.stat(one.path)
        other = gzip.compress(_samples(seed=9))
        with open(one.path, "r+b") as file:
            file.write(other[: before.st_size])
        os.utime(one.path, ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(StaleShard):
            content_module.read(content, 0, 10)
        assert content_module.read_cached(content, 0, 10) is None if way == "never" else True
        write(tmp_path / "a.tar.gz", other)
        below.distrust()
        with contextlib.suppress(NotIndexed):
            below.record(0)
        below.index_now(0)
        assert sorted(read_all(below)) == sorted(right(_samples(seed=9)))


def test_a_change_while_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen before anything of it is used; a record is made of the quiet file."""
    one = write(tmp_path / "a.tar.gz", WHOLE["gz"])
    changes = [gzip.compress(_samples(seed=5))]

    def unpack(*arguments: Any) -> tuple[str, int]:
        found = original(*arguments)
        if changes:
            write(tmp_path / "a.tar.gz", changes.pop())
        return found

    original = streams.unpack
    monkeypatch.setattr(streams, "unpack", unpack)
    refused(tmp_path / "a.tar.gz", "while it was unpacked", StaleShard)
    changes.append(WHOLE["gz of several members"])
    assert Record(record_of_file.build_file(one.path)).fingerprint == Fingerprint.at(one.path)


def test_few_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a set of any size: readers take memory, copies take disk."""
    monkeypatch.setattr(open_shards, "READERS_MAX", 2)
    monkeypatch.setattr(open_shards, "COPIES_MAX", 2)
    shards = [write(tmp_path / f"{number}.tar.gz", WHOLE["gz"]) for number in range(4)]
    for way in ("never", "always"):
        monkeypatch.setenv("WDSFS_UNPACK", way)
        with a_lower(tmp_path / way, *shards) as below:
            for number in (0, 1, 2, 3, 0):
                read_all(below, number)
                assert len(below._files.files) <= 2
            assert sorted(below._files.files) == [0, 3]


def _hold(path: str, started: Any) -> None:
    """Unpack a shard, and stop for good in the middle."""
    os.environ["WDSFS_CACHE_DIR"] = str(Path(path).parent / "cache")

    def stop(*_: object) -> None:
        started.set()
        time.sleep(1000)

    os.fdatasync = stop  # type: ignore[assignment]
    record_of_file.build_file(os.fsencode(path))


def test_killed_in_the_middle(tmp_path: Path, cache: file_cache.FileCache) -> None:
    """The leftover is not taken for a copy; the next process begins again in its place."""
    one = write(tmp_path / "a.tar.gz", WHOLE["gz"])
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    process = context.Process(target=_hold, args=(str(tmp_path / "a.tar.gz"), started))
    process.start()
    assert started.wait(PATIENCE)
    assert kinds_in(cache) == ["part"]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with opened(tmp_path / "a.tar.gz") as (tar, _, _):
        assert content_of(tar) == TAR
    assert kinds_in(cache) == ["tar"]
    assert Record(record_of_file.build_file(one.path)).members == 80


def test_who_else_needs_it_waits(tmp_path: Path, cache: file_cache.FileCache) -> None:
    """While one process unpacks a shard, the next one waits for its lock, and takes what it has made."""
    one = write(tmp_path / "a.tar.gz", WHOLE["gz"])
    key = key_of(one.path, Fingerprint.at(one.path))
    found: list[bytes] = []

    def read() -> None:
        with opened(tmp_path / "a.tar.gz") as (tar, _, _):
            found.append(content_of(tar))

    def is_waiting() -> bool:
        inode = f":{part.stat().st_ino} "
        return any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines())

    cache.directory.mkdir()
    part = cache.directory / f"{key}.part"
    reader = threading.Thread(target=read)
    with part.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        reader.start()
        wait_until(is_waiting, "the other to wait")
        file.write(b"by the first")
        file.flush()
        part.rename(cache.directory / f"{key}.tar")
        fcntl.flock(file, fcntl.LOCK_SH)
        reader.join()  # although the first has it open
    assert found == [b"by the first"]
    assert kinds_in(cache) == ["tar"]


# --- mounted, and committed --------------------------------------------------------------------------------


def test_a_mount(program: Program) -> None:
    """Of a plain shard, one with a copy and one without."""
    program.write("a.tar", TAR)
    program.write("b.tar.gz", WHOLE["gz of several members"])
    program.write("c.tar.bz2", WHOLE["bz2"])
    limit = str(int(1.5 * len(TAR)))
    with program.mounted("--cache-size", limit, "a.tar", "b.tar.gz", "c.tar.bz2") as mounted:
        kinds = sorted(one.partition(".")[2] for one in os.listdir(program.home / "index" / "cache"))
        assert kinds == ["", "seek", "tar"]
        names = sorted(os.listdir(mounted.path))
        assert len(names) == 3
        for number in random.Random(3).sample(range(40), 40):
            for ext in ("jpg", "cls"):
                wanted = BY_NAME[b"d/%03d.%s" % (number, ext.encode())]
                contents = {(mounted.path / name / "d" / f"{number:03}" / ext).read_bytes() for name in names}
                assert contents == {wanted}
        path = mounted.path / names[1] / "d" / "003" / "jpg"
        assert os.getxattr(path, "user.wdsfs.member") == b"d/003.jpg"
        offset = int(os.getxattr(path, "user.wdsfs.offset"))
        assert TAR[offset : offset + 4000] == path.read_bytes()[:4000]


def test_a_cache_in_a_relative_place_is_where_the_command_was_typed(program: Program) -> None:
    """The daemon itself is in the root directory."""
    program.write("a.tar.gz", WHOLE["gz"])
    place = f"wdsfs-test-{os.getpid()}"
    for name in ("WDSFS_INDEX_DIR", "WDSFS_CACHE_DIR"):
        with program.mounted("a.tar.gz", env={name: place}) as mounted:
            assert (mounted.path / "a/d/007/cls").read_bytes() == BY_NAME[b"d/007.cls"]
            assert (program.home / place).is_dir()
            assert not os.path.exists(f"/{place}")


def test_what_is_committed(program: Program) -> None:
    """Plain tars, also of what is not changed. In place and as links it is refused."""
    program.write("a.tar.gz", WHOLE["gz"])
    program.write("b.tar.bz2", WHOLE["bz2"])
    shards = ("a.tar.gz", "b.tar.bz2")
    with program.mounted("--overlay", "o", *shards) as mounted:
        first = mounted.path / "a"
        (first / "d/007/cls").write_bytes(b"changed")
        shutil.rmtree(first / "d/008")
    for place in (["--in-place"], ["--link", "--output", "out/%d.tar"]):
        assert "is compressed" in program.refused("commit", "--overlay", "o", *place, *shards, code=7)
    for way in ("auto", "never"):
        program.run(*("commit", "--unpack", way, "--overlay", "o", "--output", f"{way}/%d.tar"), *shards)
        changed, same = ((program.home / way / f"{number}.tar").read_bytes() for number in range(2))
        assert same == TAR
        members = {one.name: changed[one.data : one.data + one.size] for one in tars.by_tarfile(changed)}
        assert members.pop(b"d/007.cls") == b"changed"
        assert len(members) == 77
        assert all(content == BY_NAME[name] for name, content in members.items())


def test_commands(program: Program) -> None:
    program.write("a.tar.xz", WHOLE["xz of several blocks"])
    program.write("cut.tar.gz", WHOLE["gz"][:90_000])
    top = program.run("ls", "a.tar.xz").stdout.strip().decode()
    assert program.run("cat", "a.tar.xz", f"{top}d/011/cls").stdout == b"11"
    report = program.json("info", "--unpack", "never", "a.tar.xz")
    assert (report["samples"], report["shard_bytes"]) == (40, len(WHOLE["xz of several blocks"]))
    assert program.run("check", "a.tar.xz").stdout == b""
    assert b"[truncated]" in program.run("check", "cut.tar.gz", code=1).stdout
    (program.home / "a.tar.xz").unlink()
    assert len(list((program.home / "index/cache").glob("*.*"))) == 2
    assert program.json("index", "--prune", "cut.tar.gz")["pruned"] == 1
    assert len(list((program.home / "index/cache").glob("*.*"))) == 1
    assert "'1.5X' is not a size" in program.refused("index", "--cache-size", "1.5X", "cut.tar.gz", code=2)
    program.write("bomb.tar.zst", zstd.compress(bytes(9 << 20)))
    program.run("index", "--cache-size", "8M", "bomb.tar.zst", code=3)


def test_no_copy_is_made_of_what_was_replaced_within_the_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file may have the same size and times, and its inode number may count for nothing."""
    old, new = tmp_path / "a.tar.gz", tmp_path / "new"
    for file in (old, new):
        file.write_bytes(gzip.compress(tars.tar(tars.member(b"a.txt", os.fsencode(file.name)))))
    monkeypatch.setattr(compressed, "fingerprint_of", lambda _: Fingerprint(1, 2, 3))
    monkeypatch.setattr(compressed, "wait_for_tick", lambda _: bool(new.replace(old)))
    with pytest.raises(StaleShard, match=r"a\.tar\.gz"), compressed.open_shard_and_tar(os.fsencode(old)):
        pass
