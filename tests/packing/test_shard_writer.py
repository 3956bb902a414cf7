"""One shard from pieces of others and from files: what readers find in it, and what is left when it stops."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tars
from wdsfs import durable
from wdsfs.durable import Disk, temporary_of
from wdsfs.errors import CommitError, CorruptShard, StaleShard
from wdsfs.index import record
from wdsfs.index.record_of_file import build_file
from wdsfs.packing import plan, shard_writer, source_layout
from wdsfs.packing.plan import CopiedRange, NewMember, Output, Piece, SourceShard, Zeros, joined
from wdsfs.packing.shard_writer import Files, ShardWriter
from wdsfs.packing.source_layout import SourceLayout
from wdsfs.tar import headers, scan
from wdsfs.tar.compressed import open_shard_and_tar
from wdsfs.tar.problems import HARMLESS

SAMPLES = tars.tar(
    tars.member(b"d/", kind=tars.DIRECTORY),
    tars.member(b"d/a.cls", b"1", mtime=5),
    tars.member(b"d/a.jpg", tars.ABC),
    tars.member(b"README", b"read me"),
    tars.member(b"d/b.cls", b"2"),
    tars.member(b"d/b.jpg", b""),
    tars.member(b"c.txt", b"c"),
)


class Bench:
    """A source shard `s.tar`, files to put into it, and a place for what is made of them."""

    def __init__(self, home: Path, content: bytes, disk: Disk | None = None) -> None:
        self.home, self.source, self.target = home, home / "s.tar", home / "out.tar"
        self.source.write_bytes(content)
        self.record = record.Record(build_file(os.fsencode(self.source)))
        self.path = os.fsencode(self.source)
        self.writer = ShardWriter(
            {0: SourceShard(self.path, self.record.fingerprint)}, Files(os.fsencode(home)), disk
        )

    def layout(self) -> SourceLayout:
        return source_layout.layout(0, self.path, self.record)

    def new(self, name: bytes, content: bytes, file: str = "new", **options: Any) -> NewMember:
        (self.home / file).write_bytes(content)
        os.utime(self.home / file, (7, 7))
        return NewMember(name, file.encode(), len(content), 7 * 10**9, **options)

    def members(self) -> dict[bytes, int]:
        """Numbers of the members by their names."""
        found = {}
        for entry in range(self.record.entries):
            for member in self.record.entry_members(entry):
                path = self.record.entry_path(entry)
                if not self.record.entry_flags[entry] & record.STRAY:
                    path += b"." + self.record.extension(member)
                found[path] = member
        return found

    def output(self, pieces: list[Piece], layout: SourceLayout | None = None) -> Output:
        return Output(os.fsencode(self.target), pieces, None if layout is None else {0: layout.places})

    def write(self, changes: Mapping[bytes, tuple[NewMember, ...]], appended: tuple[NewMember, ...] = ()) -> bytes:
        """The shard with new members in the place of some; of none, where one is to go."""
        layout, members = self.layout(), self.members()
        replaced = {members[name]: new for name, new in changes.items()}
        self.writer.publish(self.output(layout.pieces(replaced, {}, appended), layout))
        return self.target.read_bytes()


class OpenedShards:
    """`open_shard_and_tar`, which counts the shards that are open `now`, and how many were at the `most`."""

    def __init__(self) -> None:
        self.now = self.most = 0

    @contextlib.contextmanager
    def __call__(self, path: bytes) -> Iterator[Any]:
        with open_shard_and_tar(path) as opened:
            self.now += 1
            self.most = max(self.most, self.now)
            yield opened
            self.now -= 1


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, SAMPLES)


def names(tar: bytes) -> list[bytes]:
    return [one.name for one in tars.by_tarfile(tar)]


def scanned(tar: bytes) -> list[tuple[bytes, int, int]]:
    """Name, size and time of each member, as our own scan sees it."""
    with tars.opened(tar) as fd:
        chunks = list(scan.scan(fd, []))
    return [one for c in chunks for one in zip(c.names, c.sizes.tolist(), c.mtimes.tolist(), strict=True)]


# --- pieces ------------------------------------------------------------------------------------------------


def test_pieces_that_follow_each_other_are_one() -> None:
    pieces: list[Piece] = [
        CopiedRange(0, 0, 512),
        CopiedRange(0, 512, 512),
        CopiedRange(0, 512, 1024),
        CopiedRange(1, 1024, 2048),
        Zeros(0),
        CopiedRange(1, 0, 512),
    ]
    assert joined(pieces) == [CopiedRange(0, 0, 1024), CopiedRange(1, 1024, 2048), CopiedRange(1, 0, 512)]


def test_places_within_ranges() -> None:
    heads = np.arange(0, 100, 10)
    places = plan.MemberPlaces(heads, heads + 10, heads + 1)
    ranges = [CopiedRange(0, 0, 10), CopiedRange(0, 70, 90), CopiedRange(0, 90, 200), CopiedRange(0, 30, 40)]
    assert places.within(ranges).heads.tolist() == [0, 30, 70, 80, 90]
    assert places.within(ranges[3:]).sizes.tolist() == [31]
    assert not len(places.within([]).ends)


# --- cutting -----------------------------------------------------------------------------------------------


def test_a_member_is_replaced_where_it_was(bench: Bench) -> None:
    tar = bench.write({b"d/a.jpg": (bench.new(b"d/a.jpg", b"changed"),)})
    assert names(tar) == [b"d", b"d/a.cls", b"d/a.jpg", b"README", b"d/b.cls", b"d/b.jpg", b"c.txt"]
    assert tars.by_webdataset(tar) == [
        {"__key__": "d/a", "cls": b"1", "jpg": b"changed"},
        {"__key__": "d/b", "cls": b"2", "jpg": b""},
        {"__key__": "c", "txt": b"c"},
    ]
    old, new = (
        SAMPLES.partition(tars.member(b"d/a.jpg", tars.ABC)),
        tar.partition(headers.encode(b"d/a.jpg", 7, 7)),
    )
    assert new[0] == old[0]
    assert new[2] == b"changed".ljust(512, b"\0") + old[2]


def test_new_members_behind_one_and_at_the_end(bench: Bench) -> None:
    layout = bench.layout()
    one, two = bench.new(b"d/a.txt", b"txt"), bench.new(b"z.txt", b"z", "other")
    pieces = layout.pieces({}, {bench.members()[b"d/a.jpg"]: (one,)}, [two])
    bench.writer.publish(bench.output(pieces, layout))
    tar = bench.target.read_bytes()
    assert names(tar)[2:5] + names(tar)[-1:] == [b"d/a.jpg", b"d/a.txt", b"README", b"z.txt"]
    assert tar.endswith(headers.END)


def test_a_shard_that_loses_everything_is_an_empty_tar(bench: Bench) -> None:
    assert names(bench.write(dict.fromkeys(bench.members(), ()))) == [b"d"]


CUTTABLE = {name: case for name, case in tars.ODD.items() if not set(case.problems) - HARMLESS}


@pytest.mark.parametrize("name", CUTTABLE)
def test_odd_tars_lose_one_member_at_a_time(name: str, tmp_path: Path) -> None:
    """The others keep every byte, and so does what is no member: directories, global headers, a second tar."""
    content = tars.ODD[name].tar()
    bench = Bench(tmp_path, content)
    layout = bench.layout()
    before = tars.by_tarfile(content)
    for member in layout.members.tolist():
        start, end = layout.member(member)
        pieces = layout.pieces({member: ()}, {}, ())
        bench.writer.publish(bench.output(pieces, layout))
        tar = bench.target.read_bytes()
        bench.target.unlink()
        rest = content[:start] + content[end:]
        assert tar.startswith(rest)
        assert tar[len(rest) :].count(0) == len(tar) - len(rest)
        if not any(one.kind == "link" for one in before):
            found = [(one.name, one.kind, one.size) for one in tars.by_tarfile(tar)]
            assert found == [(one.name, one.kind, one.size) for one in before if not start <= one.head < end]


@pytest.mark.parametrize("name", CUTTABLE)
def test_odd_tars_get_one_member_more(name: str, tmp_path: Path) -> None:
    bench = Bench(tmp_path, tars.ODD[name].tar())
    new = bench.new(b"z/new.txt", b"new", common=bench.layout().common)
    tar = bench.write({}, (new,))
    before, after = scanned(bench.source.read_bytes()), scanned(tar)
    assert after[:-1] == before
    assert after[-1] == (b"z/new.txt", 3, 7 * 10**9)
    if name != "PAX with empty values":  # tarfile gives up at those
        last = tars.by_tarfile(tar)[-1]
        assert (last.name, last.size, last.mtime) == (b"z/new.txt", 3, 7)
        assert b"\0" * 512 in tar[last.data + 512 :]


@pytest.mark.parametrize("name", sorted(set(tars.ODD) - set(CUTTABLE)))
def test_damaged_shards_are_not_cut(name: str, tmp_path: Path) -> None:
    """Members that a reader cannot see would be lost or end up in the middle; so nothing is done."""
    bench = Bench(tmp_path, tars.ODD[name].tar())
    with pytest.raises(CommitError, match="is damaged"):
        bench.layout()


def test_what_a_global_header_says_is_not_true_of_new_members(tmp_path: Path) -> None:
    content = tars.tar(tars.pax({b"mtime": b"77", b"comment": b"x"}, b"g"), tars.A, tars.B)
    bench = Bench(tmp_path, content)
    layout = bench.layout()
    assert layout.common == (b"mtime",)
    tar = bench.write({b"a.txt": (bench.new(b"a.txt", b"new", common=layout.common),)})
    assert [(one.name, one.mtime) for one in tars.by_tarfile(tar)] == [(b"a.txt", 7), (b"b.txt", 77)]


COMMENT = tars.pax({b"comment": b"x"}, b"g")
DIRECTORY = tars.member(b"d/", kind=tars.DIRECTORY)
INSIDE = tars.pax({b"path": b"a.txt"}) + COMMENT + tars.member(b"x", b"aaa")  # a global header in a member


@pytest.mark.parametrize(
    ("content", "gone", "left"),
    [
        (tars.tar(INSIDE, tars.B), [b"a.txt"], tars.tar(COMMENT, tars.B)),
        (tars.tar(COMMENT, tars.A, COMMENT, tars.B), [b"b.txt"], tars.tar(COMMENT, tars.A)),
        (tars.tar(COMMENT, tars.A, COMMENT), [b"a.txt"], tars.END),
        (tars.tar(COMMENT, DIRECTORY, COMMENT, tars.A), [b"a.txt"], tars.tar(COMMENT, DIRECTORY)),
        (tars.tar(tars.B, COMMENT, tars.A, COMMENT), [b"b.txt"], tars.tar(COMMENT, tars.A)),
        (tars.tar(tars.A, tars.pax({}) + COMMENT + tars.B), [b"b.txt"], tars.tar(tars.A)),
        (tars.tar(tars.A, tars.pax({}, b"g"), end=b"") + tars.tar(tars.B), [b"b.txt"], tars.tar(tars.A)),
    ],
)
def test_a_global_header_that_no_member_follows_is_left_out(
    content: bytes, gone: list[bytes], left: bytes, tmp_path: Path
) -> None:
    """Python's tarfile and webdataset raise ReadError at one, and lose the last sample."""
    tar = Bench(tmp_path, content).write(dict.fromkeys(gone, ()))
    assert tar == left
    assert tars.by_webdataset(tar) == tars.by_webdataset(left)


def test_a_global_header_in_front_of_new_members_stays(tmp_path: Path) -> None:
    bench = Bench(tmp_path, tars.tar(COMMENT, tars.A))
    tar = bench.write({b"a.txt": ()}, (bench.new(b"z.txt", b"z"),))
    assert tar.startswith(COMMENT)
    assert [sample["__key__"] for sample in tars.by_webdataset(tar)] == ["z"]


@pytest.mark.parametrize("dense", [False, True])
def test_what_tarfile_cannot_read_to_its_end_is_never_published(
    dense: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the plan itself is wrong, and what is in the file is what was to be in it."""
    monkeypatch.setattr(shard_writer, "DENSE", 1 << 30 if dense else 0)
    monkeypatch.setattr(plan, "without_last_globals", lambda pieces: pieces)
    bench = Bench(tmp_path, tars.tar(COMMENT, tars.A, COMMENT, tars.B))
    with pytest.raises(CommitError, match=r"webdataset, fails at its end: end of file header"):
        bench.write({b"b.txt": ()})
    assert sorted(os.listdir(tmp_path)) == ["s.tar"]


@pytest.mark.parametrize("dense", [False, True])
def test_a_range_that_begins_within_a_member_is_never_published(
    dense: bool, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_writer, "DENSE", 1 << 30 if dense else 0)
    with pytest.raises(CommitError, match=r"no header|is not a tar"):
        bench.writer.publish(bench.output([CopiedRange(0, 1024, len(SAMPLES))], bench.layout()))


# --- writing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
@pytest.mark.parametrize("both", [False, True])
def test_where_the_kernel_does_not_copy(
    code: int, both: bool, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "copy_file_range", refuse)
    if both:
        monkeypatch.setattr(os, "sendfile", refuse)
    bench.writer.publish(bench.output([CopiedRange(0, 0, len(SAMPLES))]))
    assert bench.target.read_bytes() == SAMPLES


def test_few_sources_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_writer, "OPEN_SOURCES", 6)
    monkeypatch.setattr(shard_writer, "open_shard_and_tar", counted := OpenedShards())
    sources, places, parts = {}, {}, [tars.member(b"%d.txt" % number, b"x" * number) for number in range(5)]
    for number, part in enumerate(parts):
        path = os.fsencode(tmp_path / f"s{number}.tar")
        (tmp_path / f"s{number}.tar").write_bytes(tars.tar(part))
        one = record.Record(build_file(path))
        sources[number] = SourceShard(path, one.fingerprint)
        places[number] = source_layout.layout(number, path, one).places
    order = [0, 1, 2, 3, 4, 0, 4, 2, 0]
    pieces: list[Piece] = [*(CopiedRange(number, 0, len(parts[number])) for number in order), Zeros(1024)]
    writer = ShardWriter(sources, Files(os.fsencode(tmp_path)), threads=3)
    writer.publish(Output(os.fsencode(tmp_path / "out.tar"), pieces, places))
    assert (tmp_path / "out.tar").read_bytes() == tars.tar(*(parts[number] for number in order))
    assert (counted.now, counted.most) == (0, 2)


def test_what_is_copied_must_be_there(bench: Bench) -> None:
    with pytest.raises(CorruptShard, match="too early"):
        bench.writer.publish(bench.output([CopiedRange(0, 0, len(SAMPLES) + 1)]))
    assert sorted(os.listdir(bench.home)) == ["s.tar"]


def test_a_large_file_goes_in_parts(bench: Bench) -> None:
    content = os.urandom(3 * durable.CHUNK + 5)
    tar = bench.write({b"c.txt": (bench.new(b"c.txt", content),)})
    assert tars.by_webdataset(tar)[-1]["txt"] == content


def test_a_source_that_changes_meanwhile(bench: Bench) -> None:
    layout = bench.layout()
    bench.source.write_bytes(SAMPLES + bytes(512))
    with pytest.raises(StaleShard):
        bench.writer.publish(bench.output(layout.pieces({}, {}, ()), layout))
    with pytest.raises(StaleShard):
        bench.layout()
    assert sorted(os.listdir(bench.home)) == ["s.tar"]


def test_what_has_the_name_already_stays(bench: Bench) -> None:
    bench.target.write_bytes(b"mine")
    with pytest.raises(CommitError, match="exists already"):
        bench.write({})
    assert bench.target.read_bytes() == b"mine"
    assert not os.path.exists(temporary_of(os.fsencode(bench.target)))


def test_two_commits_do_not_write_one_shard(bench: Bench) -> None:
    temporary = temporary_of(os.fsencode(bench.target))
    fd = Disk().open_temporary(temporary)
    os.write(fd, b"mine")
    with pytest.raises(CommitError, match="another process of wdsfs is writing"):
        bench.write({})
    assert os.pread(fd, 9, 0) == b"mine"
    os.close(fd)
    bench.write({})  # a leftover gives way
    assert bench.target.read_bytes() == SAMPLES


def test_a_replaced_shard_keeps_its_mode(bench: Bench) -> None:
    bench.source.chmod(0o640)
    bench = Bench(bench.home, SAMPLES)
    output = Output(bench.path, [CopiedRange(0, 0, len(SAMPLES))])
    bench.writer.publish(output, replaces=bench.source.stat())
    assert bench.source.stat().st_mode & 0o7777 == 0o640
    assert bench.source.read_bytes() == SAMPLES


def test_whether_it_is_there_already(bench: Bench) -> None:
    layout, new = bench.layout(), bench.new(b"c.txt", b"content")
    output = bench.output(layout.pieces({bench.members()[b"c.txt"]: (new,)}, {}, ()), layout)
    assert not bench.writer.is_there(output)
    bench.writer.publish(output)
    assert bench.writer.is_there(output)
    tar = bench.target.read_bytes()
    for at in (0, len(SAMPLES) // 2, len(tar) - 1):
        bench.target.write_bytes(tar[:at] + bytes([tar[at] ^ 1]) + tar[at + 1 :])
        assert not bench.writer.is_there(output)
    bench.target.write_bytes(tar[:-1])
    assert not bench.writer.is_there(output)


# --- what was written is read back -------------------------------------------------------------------------


class Wrong(Disk):
    """Writes something else than it was told, where `spoil` says so."""

    def __init__(self, spoil: Callable[[bytearray], object]) -> None:
        self.spoil = spoil

    def sync(self, fd: int) -> None:
        data = bytearray(os.pread(fd, 1 << 20, 0))
        self.spoil(data)
        os.pwrite(fd, data, 0)
        os.ftruncate(fd, len(data))


def _flip(at: int) -> Callable[[bytearray], None]:
    return lambda data: data.__setitem__(at, data[at] ^ 1)


def _shift(data: bytearray) -> None:
    data[:] = data[512:] + bytes(512)


def _rename(data: bytearray) -> None:
    data[:] = data.replace(b"new.txt", b"enw.txt")  # of the same checksum


def _resize(data: bytearray) -> None:
    data[:] = data.replace(b"%011o" % len(tars.ABC), b"00000001040")  # of the same checksum, and as many blocks


WRONG: list[Callable[[bytearray], object]] = [
    lambda data: data.__delitem__(slice(-512, None)),
    _shift,
    _rename,
    _resize,
    *map(_flip, (10, 522)),  # in the header of a run, and in a later one
    *map(_flip, (len(SAMPLES) - 1024, len(SAMPLES) - 512)),  # in the new header, and in the content
    _flip(len(SAMPLES) + 40),  # after the end mark
]


@pytest.mark.parametrize("spoil", WRONG)
@pytest.mark.parametrize("dense", [False, True])
def test_what_is_wrong_is_never_published(
    dense: bool, spoil: Callable[[bytearray], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read back in either way: all headers, or all bytes where that is quicker."""
    monkeypatch.setattr(shard_writer, "DENSE", 1 << 30 if dense else 0)
    bench = Bench(tmp_path, SAMPLES, Wrong(spoil))
    with pytest.raises(CommitError, match="damaged when it is read back"):
        bench.write({}, (bench.new(b"new.txt", b"new"),))
    assert sorted(os.listdir(tmp_path)) == ["new", "s.tar"]
