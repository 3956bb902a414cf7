"""The lower: nothing of a shard is used after the file has changed, and little is kept open.

Real files, changed in every way under a set that is in use. No test waits for the second that a look at a shard
is believed: `looks_at_once` takes it away, and the other tests want it.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from tests import sets, tars
from tests.conftest import descriptors, drop_pages
from tests.processes import wait_until
from tests.renumbering import RENUMBER, renumbering
from wdsfs import mount_table
from wdsfs.errors import CorruptShard, MissingShard, NotATar, StaleShard, UnreadableShard
from wdsfs.index import record_builder
from wdsfs.index.record import Record
from wdsfs.index.record_of_file import build_file
from wdsfs.index.store import open_index
from wdsfs.inodes import TAG_MAX
from wdsfs.shards import GONE, Fingerprint, Shard
from wdsfs.tree import content as content_module
from wdsfs.tree import freshness, indexing, open_shards, shard_set
from wdsfs.tree.content import Content
from wdsfs.tree.freshness import Generations
from wdsfs.tree.indexing import ATTEMPTS_MAX, NotIndexed, indexed
from wdsfs.tree.merged_tree import make_tree
from wdsfs.tree.path_table import KeyTable
from wdsfs.tree.sample_reader import SampleReader
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.tree import View

INDEX = """
import sys
from pathlib import Path
from tests import sets
from wdsfs.index.store import open_index
open_index(Path(sys.argv[1])).refresh([sets.at(Path(path)) for path in sys.argv[2:]])
"""


@contextlib.contextmanager
def a_lower(
    directory: Path, shards: list[Shard], descriptors: int = 256, indexed: bool = True
) -> Iterator[ShardSet]:
    index = open_index(directory / "index")
    assert not index.notices
    if indexed:
        index.refresh(shards)
    below = ShardSet(shards, index, descriptors)
    try:
        yield below
    finally:
        below.close()


@pytest.fixture
def shards(tmp_path: Path) -> list[Shard]:
    return sets.make(tmp_path / "shards", 3)


@pytest.fixture
def below(tmp_path: Path, shards: list[Shard]) -> Iterator[ShardSet]:
    with a_lower(tmp_path, shards) as below:
        yield below


@pytest.fixture
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freshness, "FRESH_SECONDS", 0.0)


def content(below: ShardSet, number: int, member: int = 0) -> Content:
    return below.content(number, below.tag(number), member)


def read_all(below: ShardSet, number: int) -> list[bytes]:
    """The content of all members."""
    record = below.record(number)
    return [content_module.read(content(below, number, member), 0, 1 << 20) for member in range(record.members)]


def right(shard: Shard) -> list[bytes]:
    """The content of all members in the order of a record, from where tarfile sees them."""
    tar = sets.path_of(shard).read_bytes()
    by_name = {one.name: tar[one.data : one.data + one.size] for one in tars.by_tarfile(tar)}
    listed = sets.listing(Record(build_file(shard.path)))
    return [by_name[key + b"." + extension] for key, extension, _ in listed]


def index_again(below: ShardSet, number: int) -> None:
    """Do what a worker does about NotIndexed."""
    assert not below.was_indexed_elsewhere(number)
    below.install(number, below.build(number))


def open_descriptors() -> list[str]:
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return [link for link in links if link.removesuffix(" (deleted)").endswith(".tar")]


# --- reading ----------------------------------------------------------------------------------------------


def test_any_part_of_a_member_can_be_read(tmp_path: Path) -> None:
    choose = random.Random(2)
    whole = choose.randbytes(5000)
    segments = [(0, b"abc"), (1000, whole[:700]), (4090, b"x")]
    sparse = bytearray(6000)
    for offset, data in segments:
        sparse[offset : offset + len(data)] = data
    path = tmp_path / "s.tar"
    path.write_bytes(tars.tar(tars.member(b"a.bin", whole), tars.old_sparse(b"b.bin", segments, 6000)))
    with a_lower(tmp_path, [sets.at(path)]) as below:
        contents = {b"a": (content(below, 0, 0), whole), b"b": (content(below, 0, 1), bytes(sparse))}
        for _ in range(300):
            one, expected = contents[choose.choice([b"a", b"b"])]
            offset, length = choose.randrange(7000), choose.choice([0, 1, 511, 512, 4096, 1 << 20])
            assert content_module.read(one, offset, length) == expected[offset : offset + length]
            cached = content_module.read_cached(one, offset, length)
            assert cached in (None, expected[offset : offset + length])
            assert cached is None or one.extents is None


def test_what_is_in_the_page_cache_is_read_at_once_and_what_is_not_is_left(tmp_path: Path) -> None:
    """A busy machine may take pages away, or be about to write them: then it is looked at again."""
    path = tmp_path / "s.tar"
    data = random.Random(1).randbytes(300_000)
    path.write_bytes(tars.tar(tars.member(b"a.bin", data)))
    with a_lower(tmp_path, [sets.at(path)]) as below, path.open("r+b") as file:
        os.fsync(file.fileno())
        one = content(below, 0)
        can_tell = mount_table.filesystem_type(tmp_path) in ("ext4", "xfs", "btrfs")

        def is_read_at_once() -> bool:
            assert content_module.read(one, 0, len(data)) == data
            cached = content_module.read_cached(one, 1000, 2000)
            assert cached in (data[1000:3000], None)
            return cached is not None or not can_tell

        def is_left() -> bool:
            drop_pages(file.fileno())
            cached = content_module.read_cached(one, 100_000, 50_000)
            assert cached in (None, data[100_000:150_000])
            return cached is None or not can_tell

        wait_until(is_read_at_once, "the pages to be read at once")
        wait_until(is_left, "what is not in the page cache to be left")


@pytest.mark.parametrize(
    ("size", "stride", "ahead"),
    [(3000, 4096, True), (5, 1024, True), (100_000, 101_000, True), (3000, 409_600, False), (5, 102_400, False)],
    ids=["samples", "tiny members", "large members", "one class of a hundred", "its labels"],
)
def test_what_comes_next_is_read_ahead_for_those_who_take_all_of_it(
    size: int, stride: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, length, advice: asked.append(offset))
    with tempfile.TemporaryFile() as shard:
        os.truncate(shard.fileno(), 1000 * stride + 2 * open_shards.READ_AHEAD)
        file = open_shards.ShardFile(shard.fileno(), shard.fileno(), b"s.tar", GONE, 0)
        for number in range(1000):
            file.look_ahead(number * stride, number * stride + size)
    assert bool(asked) == ahead
    assert len(asked) == len(set(asked))
    if ahead:
        assert 1000 * stride - open_shards.NEAR < max(asked) < 1000 * stride + 2 * open_shards.READ_AHEAD


def test_a_file_system_without_that_knowledge(tmp_path: Path) -> None:
    """tmpfs cannot say what it would have to wait for."""
    assert mount_table.filesystem_type("/dev/shm") == "tmpfs"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as home:
        shards = sets.make(Path(home), 1)
        with a_lower(tmp_path, shards) as below:
            one = content(below, 0)
            assert content_module.read_cached(one, 0, 100) in (None, content_module.read(one, 0, 100))
            assert read_all(below, 0) == right(shards[0])
            numbers = range(below.summary(0).samples)
            reader = SampleReader(below, contextlib.nullcontext())
            assert [reader.sample(number) for number in numbers] == reader.samples(numbers)


def test_what_the_shard_does_not_have_any_more_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "cut.tar"
    path.write_bytes(tars.tar(tars.member(b"a.x", b"a" * 600), tars.member(b"b.x", b"b" * 5000))[: 6 * 512 + 100])
    with a_lower(tmp_path, [sets.at(path)]) as below:
        assert content_module.read(content(below, 0, 0), 0, 1000) == b"a" * 600
        cut = content(below, 0, 1)
        assert content_module.read(cut, 0, 512) == b"b" * 512
        assert content_module.read_cached(cut, 0, 5000) is None
        with pytest.raises(CorruptShard, match="inside a member"):
            content_module.read(cut, 0, 5000)
        with pytest.raises(CorruptShard):
            content_module.read(cut, 4990, 10)
        with pytest.raises(CorruptShard, match=f"ends at byte {6 * 512 + 100}, inside a member"):  # at once
            content_module.read(replace(cut, size=1 << 50), 0, 1 << 50)
        assert next(below.damaged())[0] == str(path)
        path.write_bytes(b"")
        with pytest.raises(StaleShard):  # changed rather than damaged
            content_module.read(cut, 4990, 10)


# --- changes ----------------------------------------------------------------------------------------------


def _replace(path: Path) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(sets.content(9, samples=5))
    new.rename(path)


def _overwrite(path: Path) -> None:
    """Other bytes of the same length."""
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.write(bytes(byte ^ 1 if byte else 0 for byte in data))


def _write_secretly(path: Path) -> None:
    """Another tar of the same size, mtime and inode number: the ctime tells."""
    before = path.stat()
    with path.open("r+b") as file:
        file.write(sets.content(4))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, 700),
    "cut to nothing": lambda path: os.truncate(path, 0),
    "appended to": lambda path: os.truncate(path, path.stat().st_size + 512),
    "overwritten": _overwrite,
    "rewritten": lambda path: path.write_bytes(sets.content(8, samples=4)),
    "replaced": _replace,
    "written secretly": _write_secretly,
    "removed": Path.unlink,
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_open_is_stale_after_a_change(below: ShardSet, shards: list[Shard], change: str) -> None:
    """At once: the descriptor tells. To read a shard is no change."""
    one, other = content(below, 1), content(below, 2)
    for shard in shards:
        sets.path_of(shard).read_bytes()
    assert content_module.read(one, 0, 1) == b"1"
    CHANGES[change](sets.path_of(shards[1]))
    with pytest.raises(StaleShard, match=r"s1\.tar has changed"):
        content_module.read(one, 0, 1)
    with pytest.raises(StaleShard):
        content_module.check_unchanged(one)
    with contextlib.suppress(StaleShard):
        assert content_module.read_cached(one, 0, 1) is None  # ask `read`
    assert content_module.read(other, 0, 10) == b"2"


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.usefixtures("looks_at_once")
def test_a_changed_shard_is_indexed_again_or_an_error(
    below: ShardSet, shards: list[Shard], caplog: pytest.LogCaptureFixture, change: str
) -> None:
    path = sets.path_of(shards[1])
    tag, generation = below.tag(1), below.generation
    read_all(below, 1)
    CHANGES[change](path)
    for _ in range(2):
        with pytest.raises((StaleShard, MissingShard, UnreadableShard)):
            below.record(1, tag)
    assert below.generation == generation + 1
    assert [entry.message.split()[0].removesuffix(":") for entry in caplog.records] == [str(path)]
    if change == "removed":
        for question in ("fingerprint", "tag", "summary", "record", "build", "was_indexed_elsewhere"):
            with pytest.raises(MissingShard, match=r"s1\.tar"):
                getattr(below, question)(1)
        [(damaged, text)] = below.damaged()
        assert (damaged, "gone" in text) == (str(path), True)
    elif change in ("a directory", "a pipe"):
        with pytest.raises(UnreadableShard, match="not a regular file"):
            below.index_now(1)
    elif change in ("cut to nothing", "overwritten"):
        below.index_now(1)
        for ask in (below.summary, below.record):
            with pytest.raises(NotATar, match=r"s1\.tar: is .*not a tar"):
                ask(1)
    else:
        for ask in (below.summary, below.record):
            with pytest.raises(NotIndexed) as wanted:
                ask(1)
            assert wanted.value.number == 1
        index_again(below, 1)
        assert below.generation == generation + 2
        assert below.tag(1) != tag
        tag = below.tag(1)
        assert below.summary(1) == sets.right_summary(shards[1])
        if not below.record(1).problem_count:
            assert read_all(below, 1) == right(shards[1])
    assert read_all(below, 0) == right(shards[0])
    assert [link for link in open_descriptors() if "deleted" in link] == []


def test_processes_of_a_mount_agree_on_the_tags(tmp_path: Path, shards: list[Shard]) -> None:
    tags = Generations.at_mount(len(shards))
    with a_lower(tmp_path, shards) as below:
        ours, theirs = (ShardSet(shards, below.index, tags=tags) for _ in range(2))
        before = ours.fingerprint(0)
        first = theirs.tag(0)
        assert ours.tag(0) == first
        os.utime(shards[0].path, (5, 5))
        ours._freshness.states[0].checked = -1e9
        ours.fingerprint(0)
        assert ours.tag(0) != first
        # Another one looked before the change, but writes down its result after it; then it looks again.
        tags.of(0, before)
        last = tags.of(0, Fingerprint.at(shards[0].path))
        for one in (ours, theirs):
            one.index_now(0)
            assert one.record(0, last) is one.record(0)
            assert one.tag(0) == last


def test_a_changed_shard_gets_another_tag_whatever_its_fingerprint() -> None:
    tags = Generations.at_mount(2)
    first = tags.of(0, Fingerprint(1, 2, 3))
    assert tags.of(0, Fingerprint(1, 2, 3)) == first
    assert first == Generations.at_mount(1).of(0, Fingerprint(1, 2, 3))  # after a remount, too
    seen = [first]
    for number in range(4, 1004):
        seen.append(tags.of(0, Fingerprint(1, 2, number)))
        assert tags.of(0, Fingerprint(1, 2, number)) == seen[-1] <= TAG_MAX
    assert len(set(seen)) == len(seen)
    tags.renew(0)
    assert tags.of(0, Fingerprint(1, 2, 1003)) not in seen
    assert tags.of(1, Fingerprint(1, 2, 3)) == first


def test_a_shard_that_is_gone_is_not_believed_to_be_anything(
    below: ShardSet, shards: list[Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    below.fingerprint(0)
    away = sets.path_of(shards[0]).rename(sets.path_of(shards[0]).with_suffix(".away"))
    monkeypatch.setattr(freshness, "FRESH_SECONDS", -1.0)
    with pytest.raises(MissingShard):
        below.fingerprint(0)
    monkeypatch.setattr(freshness, "FRESH_SECONDS", 1e9)
    for ask in (below.fingerprint, below.record, below.summary, below.was_indexed_elsewhere):
        with pytest.raises(MissingShard):
            ask(0)
    away.rename(sets.path_of(shards[0]))
    below.index_now(0)
    assert read_all(below, 0) == right(shards[0])


def test_a_shard_that_cannot_be_indexed(
    tmp_path: Path, shards: list[Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tree over all shards shows the others: nobody tries again for each request, but from time to time."""
    with a_lower(tmp_path, shards) as below:
        build, tried = below.build, 0

        def refuse(number: int) -> bytes:
            nonlocal tried
            tried += 1
            if number == 1:
                raise UnreadableShard("there is no room")
            return build(number)

        monkeypatch.setattr(below, "build", refuse)
        monkeypatch.setattr(indexing, "FAILED_SECONDS", 1e9)  # the time comes when the test says so
        sets.path_of(shards[1]).write_bytes(sets.content(0))
        below.distrust()
        with pytest.raises(NotIndexed):
            below.record(1)
        assert list(below.damaged()) == []
        below.try_index(1)
        for ask in (below.record, below.summary):
            with pytest.raises(UnreadableShard, match="there is no room"):
                ask(1)
        tree = make_tree(below, View(merge=True))
        tree.prepare()
        assert tree.totals().damaged == 1
        assert tried == 1
        below._failures.failed[1] = below._failures.failed[1]._replace(until=0.0)  # later
        with pytest.raises(NotIndexed):
            below.record(1)
        assert [text for _, text in below.damaged()] == ["there is no room"]
        monkeypatch.setattr(below, "build", build)
        below.try_index(1)
        assert below.record(1).members
        assert list(below.damaged()) == []


def test_what_try_index_does_not_keep_to_itself(
    tmp_path: Path, shards: list[Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that changes all the time would be indexed for ever, as would what is not its own fault."""
    with a_lower(tmp_path, shards) as below:

        def grow(number: int) -> bytes:
            with sets.path_of(shards[number]).open("ab") as file:
                file.write(bytes(512))
            below.distrust()
            raise UnreadableShard("it is being written")

        monkeypatch.setattr(below, "build", grow)
        monkeypatch.setattr(below, "was_indexed_elsewhere", lambda number: False)
        with pytest.raises(UnreadableShard, match="being written"):
            below.try_index(1)
        monkeypatch.setattr(below, "build", lambda number: pytest.fail("not asked"))
        monkeypatch.setattr(below, "index_now", Mock(side_effect=UnreadableShard("another one")))
        with pytest.raises(UnreadableShard, match="another one"):
            below.try_index(2)


def test_a_file_that_was_replaced_since_the_last_look_is_not_used(
    below: ShardSet, shards: list[Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freshness, "FRESH_SECONDS", 1e9)
    tag, path = below.tag(0), sets.path_of(shards[0])
    below.record(0)
    away = path.with_suffix(".away")
    path.rename(away)
    # The same headers, other content: only the inode number tells.
    path.write_bytes(away.read_bytes().replace(b"0".ljust(512, b"\0"), b"9".ljust(512, b"\0")))
    os.utime(path, ns=(0, away.stat().st_mtime_ns))
    assert path.stat().st_size == away.stat().st_size
    with pytest.raises(StaleShard):
        below.content(0, tag, 0)
    assert open_descriptors() == []
    with pytest.raises(NotIndexed):
        below.record(0)
    away.rename(path)
    monkeypatch.setattr(freshness, "FRESH_SECONDS", 0.0)
    below.index_now(0)
    assert content_module.read(content(below, 0), 0, 10) == b"0"


def test_a_descriptor_of_the_old_file_is_not_used_for_the_new_record(below: ShardSet, shards: list[Shard]) -> None:
    """The old file is still there under another name, so that its descriptor would pass every check."""
    path = sets.path_of(shards[0])
    read_all(below, 0)
    path.rename(path.with_suffix(".away"))
    path.write_bytes(sets.content(5, samples=6))
    below.install(0, below.build(0))
    assert read_all(below, 0) == right(shards[0])
    assert open_descriptors() == [str(path)]


def test_a_file_that_is_not_what_its_record_says(
    below: ShardSet, shards: list[Shard], caplog: pytest.LogCaptureFixture
) -> None:
    """If even the ctime is the same, the first and last header show the change when the shard is opened."""
    other = below.record(1)
    with open(shards[1].path, "rb") as file:
        wrong = record_builder.build(file.fileno(), Fingerprint.at(shards[0].path))
    below.index.store([(shards[0].path, wrong)])
    below.renew()
    assert below.was_indexed_elsewhere(0)
    with pytest.raises(StaleShard, match="same times"):
        content(below, 0)
    assert "without a new time" in caplog.text
    assert below.record(1) is not other  # its memory may be used again
    with pytest.raises(NotIndexed):
        below.record(0)
    index_again(below, 0)
    assert read_all(below, 0) == right(shards[0])


@pytest.mark.parametrize("ctimes", [True, False])
@pytest.mark.usefixtures("looks_at_once")
def test_another_inode_number_alone_is_no_change(tmp_path: Path, shards: list[Shard], ctimes: bool) -> None:
    with renumbering(tmp_path / "shards", tmp_path / "shown", ctimes=ctimes):
        shown = [sets.at(tmp_path / "shown" / os.fsdecode(shard.name + b".tar")) for shard in shards]
        with a_lower(tmp_path, shown) as below:
            one, tag, number = content(below, 1), below.tag(1), os.stat(shown[1].path).st_ino
            assert below.has_sum(1, Fingerprint.numbered(os.stat(shown[1].path)).sum)
            assert not (tmp_path / "shown" / RENUMBER).exists()
            assert os.stat(shown[1].path).st_ino != number
            assert content_module.read(one, 0, 10) == b"1"
            assert below.tag(1) == tag
            assert list(below.index.stale(shown)) == []
            assert read_all(below, 1) == right(shown[1])


@pytest.mark.parametrize("ctimes", [True, False])
@pytest.mark.usefixtures("looks_at_once")
def test_a_replaced_shard_is_noticed_although_its_inode_number_tells_nothing(
    tmp_path: Path, shards: list[Shard], ctimes: bool
) -> None:
    """By the ctime; without one by the headers, as those of a shard that was copied without its times."""
    path = written(tmp_path / "shards" / "s1.tar", b"a.x b.x c.x", b"first")
    with renumbering(path.parent, tmp_path / "shown", ctimes=ctimes):
        shown = [sets.at(tmp_path / "shown" / "s1.tar")]
        with a_lower(tmp_path, shown) as below:
            assert content_module.read(content(below, 0, 1), 0, 10) == b"first"
            below.release()
            # The first and the last header, size and mtime are the same.
            os.replace(written(tmp_path / "new", b"a.x q.x c.x", b"other"), path)
            with pytest.raises((StaleShard, NotIndexed)):
                content_module.read(content(below, 0, 1), 0, 10)
            index_again(below, 0)
            assert content_module.read(content(below, 0, 1), 0, 10) == b"other"


def written(path: Path, members: bytes, content: bytes) -> Path:
    path.write_bytes(tars.tar(*(tars.member(name, content) for name in members.split())))
    os.utime(path, (1, 1))
    return path


@pytest.mark.root
@pytest.mark.usefixtures("looks_at_once")
def test_a_second_version_within_a_second_is_noticed_where_times_are_whole_seconds(tmp_path: Path) -> None:
    disk, image = tmp_path / "disk", tmp_path / "image"
    disk.mkdir()
    image.touch()
    os.truncate(image, 8 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-I", "128", image], check=True, stderr=subprocess.DEVNULL)
    subprocess.run(["mount", "-o", "loop", image, disk], check=True)
    try:
        shards = sets.make(disk, 1)
        assert os.stat(shards[0].path).st_ctime_ns % 1_000_000_000 == 0
        with a_lower(tmp_path, shards) as below:
            one = content(below, 0)
            with open(shards[0].path, "r+b") as file:
                file.write(sets.content(4))
            with pytest.raises(StaleShard):
                content_module.read(one, 0, 10)
            index_again(below, 0)
            assert read_all(below, 0) == right(shards[0])
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("reads_before", [0, 1])
def test_a_change_in_the_middle_of_a_read_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, reads_before: int
) -> None:
    """The stored parts of a sparse member are read at once; before or after that the shard changes."""
    path = tmp_path / "s.tar"
    path.write_bytes(tars.tar(tars.old_sparse(b"a.bin", [(0, b"a" * 600), (1000, b"b" * 600)], 2000)))
    with a_lower(tmp_path, [sets.at(path)]) as below:
        one = content(below, 0)
        pread, reads = os.pread, 0

        def changing(*arguments: int) -> bytes:
            nonlocal reads
            if reads == reads_before:
                CHANGES[change](path)
            reads += 1
            data = pread(*arguments)
            if reads == reads_before == 1:
                CHANGES[change](path)
            return data

        monkeypatch.setattr(os, "pread", changing)
        with pytest.raises(StaleShard):
            content_module.read(one, 0, 2000)


# --- indexing on demand -----------------------------------------------------------------------------------


def test_another_process_may_have_indexed_it(tmp_path: Path, shards: list[Shard]) -> None:
    with a_lower(tmp_path, shards, indexed=False) as below:
        with pytest.raises(NotIndexed):
            below.record(0)
        sets.run(INDEX, tmp_path / "index", *map(sets.path_of, shards))
        with pytest.raises(NotIndexed):
            below.record(0)  # as long as the snapshot is held
        generation = below.generation
        assert below.was_indexed_elsewhere(0)
        assert below.generation == generation + 1
        assert read_all(below, 1) == right(shards[1])


def test_others_serve_while_a_shard_is_indexed_for_a_question(
    tmp_path: Path, shards: list[Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_lower(tmp_path, shards, indexed=False) as below:
        steps: list[str] = []
        build = below.build
        monkeypatch.setattr(below, "build", lambda number: (steps.append(f"build {number}"), build(number))[1])

        @contextlib.contextmanager
        def slowly() -> Iterator[None]:
            steps.append("wait")
            yield
            steps.append("go on")

        below.slowly = slowly
        assert indexed(below.summary, 1) == sets.right_summary(shards[1])
        assert steps == ["wait", "build 1", "go on"]
        indexed(below.summary, 1)
        assert len(steps) == 3


def test_others_serve_while_many_shards_are_looked_at(
    below: ShardSet, shards: list[Shard], looks_at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[bool] = []
    below.slowly = lambda: contextlib.nullcontext(entered.append(True))
    below.look_at_all()
    assert not entered
    monkeypatch.setattr(shard_set, "MANY", len(shards) - 1)
    generation = below.generation
    sets.path_of(shards[1]).unlink()
    below.look_at_all()
    assert entered == [True]
    assert below.generation > generation, "what it has met counts"


def test_records_go_when_somebody_else_renews_the_index(below: ShardSet, shards: list[Shard]) -> None:
    """Both have records in memory whose pages are reused from then on."""
    other = ShardSet(shards, below.index)
    renewals = (other.renew, lambda: other.index.forget(b"/x.tar"), lambda: other.install(1, other.build(1)))
    for renew in renewals:
        before = below.record(0)
        assert content(below, 0)
        assert below.record(0) is before
        renew()
        assert read_all(below, 0) == right(shards[0])
        assert below.record(0) is not before
    below.record(0)
    content(below, 0)
    other.renew()
    content(below, 0)
    assert below._current[0].record is below.record(0)
    other.release()


def test_damaged_shards_are_listed_with_their_first_problem(tmp_path: Path, shards: list[Shard]) -> None:
    sets.path_of(shards[0]).write_bytes(sets.content(0)[:1300])
    sets.path_of(shards[1]).write_bytes(
        tars.tar(*(tars.member(b"l", b"", tars.HARD_LINK, link=b"x") for _ in range(3)))
    )
    with a_lower(tmp_path, shards) as below:
        assert [(path.rpartition("/")[2], text.rpartition(" (")[2]) for path, text in below.damaged()] == [
            ("s0.tar", next(below.damaged())[1]),
            ("s1.tar", "and 2 more)"),
        ]


def test_a_table_does_not_use_shards_that_are_gone(tmp_path: Path) -> None:
    shards = [*sets.make(tmp_path / "a", 1), *sets.make(tmp_path / "b", 1)]
    with a_lower(tmp_path, shards) as below:

        def record_of(number: int) -> Record | None:
            with contextlib.suppress(MissingShard):
                return below.record(number)
            return None

        def owners() -> set[int]:
            below._freshness.states.clear()
            key = below.keep_table(b"k", lambda: KeyTable.build(map(record_of, range(2))))
            return set(KeyTable.parse(below.index.table(key)).shards)

        assert owners() == {0, 1}
        (tmp_path / "b").rename(tmp_path / "away")  # as a file system that is not mounted for a while
        assert owners() == {0}
        (tmp_path / "away").rename(tmp_path / "b")
        assert owners() == {0, 1}


# --- what is kept open ------------------------------------------------------------------------------------


def test_few_descriptors_are_open_at_a_time(tmp_path: Path) -> None:
    shards = sets.make(tmp_path / "shards", 12)
    heard: list[int] = []
    with a_lower(tmp_path, shards, descriptors=3) as below:
        below.on_files = heard.append
        for number in [*range(12), 11, 10, 9, 11, 0, 9]:
            assert read_all(below, number) == right(shards[number])
            assert len(open_descriptors()) <= 3
        assert sorted(open_descriptors()) == sorted(os.fsdecode(shards[number].path) for number in (11, 0, 9))
        assert max(heard) == 3
    assert open_descriptors() == []


def test_nothing_is_left_open(tmp_path: Path, shards: list[Shard]) -> None:
    before = descriptors()
    for _ in range(3):
        with a_lower(tmp_path, shards) as below:
            read_all(below, 0)
            sets.path_of(shards[1]).write_bytes(b"")
            shutil.copy(shards[0].path, shards[1].path)
            with contextlib.suppress(StaleShard, NotIndexed):
                read_all(below, 1)
        assert descriptors() - before == set()


# --- index it, then ask again ---


def test_each_shard_of_each_set_may_change_some_times() -> None:
    """A view asks two sets, whose shards have the same numbers; a question about one that always changes ends."""
    one, other = (Mock(path_text=lambda number: f"train-{number}.tar") for _ in range(2))
    wanted = [NotIndexed(shards, number) for shards in (one, other) for number in (0, 1)] * ATTEMPTS_MAX

    def question(answer: str) -> str:
        if wanted:
            raise wanted.pop()
        return answer

    assert indexed(question, "found") == "found"
    asked = [call(0)] * ATTEMPTS_MAX + [call(1)] * ATTEMPTS_MAX
    assert sorted(one.try_index.call_args_list) == sorted(other.try_index.call_args_list) == asked
    wanted += [NotIndexed(one, 7)] * (ATTEMPTS_MAX + 1)
    with pytest.raises(UnreadableShard, match=r"^train-7\.tar: changes each time it is indexed; try again"):
        indexed(question, "none")
    assert one.try_index.call_args_list[2 * ATTEMPTS_MAX :] == [call(7)] * ATTEMPTS_MAX
    assert not one.index_now.called, "a question may be about other shards only"
