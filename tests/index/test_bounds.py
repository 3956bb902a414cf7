"""What a shard costs is in proportion to its size, whatever is in it: memory by limits, work by counting."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests import tars
from tests.tar.test_scan import peak_below
from tests.tars import END, HARD_LINK, SYMLINK, A
from wdsfs.errors import CorruptShard
from wdsfs.index import member_draft, record_builder, record_check
from wdsfs.index.record import Record
from wdsfs.shards import Fingerprint
from wdsfs.tar import scan, sparse
from wdsfs.tar.headers import DEPTH_MAX, NAME_MAX
from wdsfs.tar.problems import PROBLEMS_MAX, Problems
from wdsfs.tar.scan import COMMON_MAX
from wdsfs.tar.sparse import Extents


def make(tar: bytes) -> Record:
    with tars.opened(tar) as fd:
        return Record(record_builder.build(fd, Fingerprint(1, 2, 3)))


def many(count: int, name: bytes = b"%d.x", kind: bytes = tars.FILE, link: bytes = b"") -> bytes:
    return b"".join(tars.member(name % number, kind=kind, link=link) for number in range(count))


def named(name: bytes) -> bytes:
    return tars.pax({b"path": name}) + tars.member(b"short")


# --- memory ------------------------------------------------------------------------------------------------

ROOM, FACTOR = 48 << 20, 6  # bytes that any shard may take, and for each byte of it

# Builds a record in a process of its own, which may have so much more memory than it had before.
BUILD = """
import os, resource, sys
from wdsfs.index.record_of_file import build_file
taken = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGESIZE")
resource.setrlimit(resource.RLIMIT_AS, (taken + int(sys.argv[2]),) * 2)
sys.stdout.buffer.write(build_file(os.fsencode(sys.argv[1])))
"""

HOSTILE: dict[str, tuple[Callable[[], bytes], list[str]]] = {
    "a global path": (lambda: tars.pax({b"path": b"x" * 1_000_000}, b"g") + many(1500), ["damaged"]),
    "a global target": (lambda: tars.pax({b"linkpath": b"x" * 1_000_000}, b"g") + many(1500), ["damaged"]),
    "a short global path": (lambda: tars.pax({b"path": b"x" * COMMON_MAX}, b"g") + many(50_000), []),
    "names of folders": (
        lambda: b"".join(named(b"%d/" % n + b"d/" * 100_000 + b"x.y") for n in range(20)),
        ["unusable name"] * 20,
    ),
    "many folders": (
        lambda: b"".join(named(b"%d/" % n + b"d/" * (DEPTH_MAX - 1) + b"x.y") for n in range(6000)),
        ["damaged"],
    ),
    "many folders in short names": (
        lambda: b"".join(tars.member(b"%d" % n + b"/d" * 45 + b"/x.y") for n in range(30_000)),
        ["damaged"],
    ),
    "links to a sparse member": (
        lambda: (
            tars.old_sparse(b"s", [(2 * n, b"x") for n in range(20_000)], 50_000)
            + many(2000, b"%d", HARD_LINK, b"s")
        ),
        [],
    ),
    "links to a link with a long target": (
        lambda: (
            tars.pax({b"linkpath": b"x" * NAME_MAX})
            + tars.member(b"s", kind=SYMLINK)
            + many(30_000, b"%d", HARD_LINK, b"s")
        ),
        [],
    ),
    "links of links": (
        lambda: (
            tars.member(b"0")
            + b"".join(tars.member(b"%d" % n, kind=HARD_LINK, link=b"%d" % (n - 1)) for n in range(1, 30_000))
        ),
        [],
    ),
    "one name": (lambda: (tars.member(b"a.x") + tars.member(b"b.x")) * 15_000, []),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_record_takes_memory_in_proportion_to_the_shard(tmp_path: Path, case: str) -> None:
    content, kinds = HOSTILE[case]
    path = tmp_path / "x.tar"
    path.write_bytes(content() + END)
    room = str(ROOM + FACTOR * path.stat().st_size)
    done = subprocess.run([sys.executable, "-c", BUILD, path, room], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-500:]
    assert [problem.kind for problem in Record(done.stdout).problems] == kinds


def test_end_marks_and_global_headers_by_turns_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "WEIGHT_MAX", 1 << 16)
    tar = (tars.pax({b"comment": b"x"}, b"g") + bytes(512)) * 10_000 + A + END
    problems, marks = Problems(), list[int]()
    with tars.opened(tar) as fd, peak_below(4 << 20):
        names = [name for chunk in scan.scan(fd, problems, marks=marks) for name in chunk.names]
    assert (len(names), len(marks), len(problems)) == (1, 10_000, 10_000)


# --- what is beyond a bound ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extension", "kind", "shown"),
    [
        (tars.pax({b"path": b"x" * (NAME_MAX + 1)}), "unusable name", [b"a", b"b"]),
        (tars.gnu_long(b"x" * (NAME_MAX + 1)), "unusable name", [b"a", b"b"]),
        (tars.gnu_long(b"x" * (NAME_MAX + 1), b"K"), "unusable name", [b"a", b"b"]),
        (tars.pax({b"path": b"x/" * DEPTH_MAX + b"/x"}), "unusable name", [b"a", b"b"]),
        # It would be the path of all members behind it, so it ends the shard.
        (tars.pax({b"path": b"x" * (COMMON_MAX + 1)}, b"g"), "damaged", [b"a"]),
    ],
)
def test_a_member_beyond_a_bound_is_left_out_and_named(extension: bytes, kind: str, shown: list[bytes]) -> None:
    one = make(tars.tar(A, extension + tars.member(b"short", b"content"), tars.member(b"b.txt")))
    assert one.paths() == shown
    (problem,) = one.problems
    assert problem[:2] == (len(A) + (len(extension) if kind == "damaged" else 0), kind)
    assert f"{problem.offset}" in problem.text


def test_names_up_to_the_bounds_are_shown() -> None:
    name, deep = b"x" * (NAME_MAX - 2) + b".y", b"d/" * DEPTH_MAX + b"x.y"
    one = make(
        tars.tar(named(name), named(deep), tars.gnu_long(b"t" * NAME_MAX, b"K") + tars.member(b"s", kind=b"2"))
    )
    assert one.problems == []
    assert sorted(one.paths()) == sorted([name[:-2], deep[:-2], b"s"])
    assert one.symlinks().tolist() == [member for member in range(3) if one.symlink(member) == b"t" * NAME_MAX]


def test_a_short_global_path_names_every_member() -> None:
    """As GNU tar and tarfile do."""
    tar = tars.tar(tars.pax({b"path": b"all.x"}, b"g"), A, named(b"own.x"), tars.member(b"b.txt"))
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        assert archive.getnames() == ["all.x", "own.x", "all.x"]
    assert make(tar).paths() == [b"all", b"own", b"all"]


@pytest.mark.parametrize("odd", [False, True])
def test_folders_beyond_the_bound_end_the_shard(monkeypatch: pytest.MonkeyPatch, odd: bool) -> None:
    """Both ways of taking members stop at the same one."""
    monkeypatch.setattr(member_draft, "FOLDERS_FREE", 10)
    monkeypatch.setattr(member_draft, "FOLDER_BYTES", 1 << 30)
    first = tars.member(b"dev", kind=tars.FIFO) + tars.member(b"d/", kind=tars.DIRECTORY) if odd else b""
    members = [tars.member(b"d/%d/x.y" % number, b"content") for number in range(20)]
    one = make(tars.tar(first, *members))
    assert one.paths() == [b"d/%d/x" % number for number in range(9)]
    assert [one.member(member).head for member in range(9)] == [len(first) + 1024 * n for n in range(9)]
    assert [problem[:2] for problem in one.problems] == [(len(first) + 9 * 1024, "damaged")]
    assert one.ends[0] == len(first) + 8 * 1024


def test_many_problems_are_counted_and_the_worst_listed() -> None:
    count = 3 * PROBLEMS_MAX
    device = tars.pax({b"path": b"x" * 4000}) + tars.member(b"n", kind=tars.FIFO)
    one = make(device + many(count, b"%d", HARD_LINK, b"none") + b"\xff" * 512)
    assert (one.unshown_count, len(one.unshown[0].text) < 2000) == (1, True)
    assert (len(one.problems), one.problem_count) == (PROBLEMS_MAX, count + 1)
    assert one.problems[-1].kind == "damaged"
    assert one.problems == sorted(one.problems)


# --- work ---------------------------------------------------------------------------------------------------


class Counted(Sequence[int]):
    """Numbers that count how often one is asked for."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers, self.reads = numbers, 0

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        self.reads += 1
        return self.numbers[at]


def test_a_part_of_a_sparse_member_is_found_by_bisection(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, pread = list[int](), os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: reads.append(size) or pread(fd, size, offset))
    count = 100_000
    columns = [Counted(column) for column in (range(0, 3 * count, 3), [1] * count, range(count))]
    with tars.opened(bytes(512) + bytes(n % 251 for n in range(count))) as fd:
        got = sparse.read_extents(fd, 512, Extents(*columns), 150_000, 30)
    assert got == b"".join(bytes([(50_000 + n) % 251, 0, 0]) for n in range(10))
    assert reads == [10]
    assert sum(column.reads for column in columns) < 200


def test_any_part_of_any_sparse_member_is_right() -> None:
    choose = random.Random(5)
    for _ in range(300):
        size, at, whole, extents = choose.randrange(1, 60), 0, b"", list[tuple[int, int]]()
        stored = b""
        while at < size:
            hole, length = choose.randrange(4), choose.randrange(1, 4)
            start = min(at + hole, size)
            length = min(length, size - start)
            data = choose.randbytes(length)
            whole = whole.ljust(start, b"\0") + data
            if length:
                extents.append((start, length))
            stored, at = stored + data, start + length
        whole = whole.ljust(size, b"\0")
        one = make(tars.tar(tars.old_sparse(b"s.x", [(a, whole[a : a + n]) for a, n in extents], size)))
        with tars.opened(bytes(512) + stored) as fd:
            for _ in range(20):
                offset = choose.randrange(size)
                length = choose.randrange(1, size - offset + 1)
                found = one.extents(0)
                assert found is not None
                assert sparse.read_extents(fd, 512, found, offset, length) == whole[offset : offset + length]


def test_a_sparse_member_that_is_cut_off_is_an_error() -> None:
    extents = Extents([0, 10], [5, 5], [0, 5])
    with tars.opened(b"x" * 7) as fd:
        assert sparse.read_extents(fd, 0, extents, 0, 9) == b"xxxxx\0\0\0\0"
        with pytest.raises(CorruptShard):
            sparse.read_extents(fd, 0, extents, 0, 15)


@pytest.mark.parametrize("apart", [False, True])
def test_members_of_a_huge_sample_are_found_by_bisection(monkeypatch: pytest.MonkeyPatch, apart: bool) -> None:
    """Of one sample with many extensions, and of many samples with one name."""
    count = 3000
    members = [tars.member(b"a.%d" % (n // 2)) + (tars.member(b"b.x") if apart else b"") for n in range(2 * count)]
    one = make(tars.tar(*members))
    looked = 0
    find_entries = Record.find_entries

    def counting(self: Record, folder: int, name: bytes, crc: int) -> Iterator[int]:
        nonlocal looked
        for entry in find_entries(self, folder, name, crc):
            looked += 1
            yield entry

    monkeypatch.setattr(Record, "find_entries", counting)
    for number in random.Random(1).sample(range(count), 500):
        found = list(one.find_files(0, b"a", b"%d" % number))
        assert [(one.entry_name[one.entry_of(member)], one.extension(member)) for member in found] == [
            (b"a", b"%d" % number)
        ] * 2
        assert found == sorted(found)
    assert looked < 4 * count
    assert list(one.find_files(0, b"a", b"x")) == []


def test_a_hostile_record_of_deep_folders_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with tars.opened(tars.tar(tars.member(b"a/b/c/d/x.y"))) as fd:
        data = record_builder.build(fd, Fingerprint(1, 2, 3))
    record_check.checked_record(data)
    monkeypatch.setattr(record_check, "DEPTH_MAX", 3)
    with pytest.raises(record_check.UnsoundRecord, match=r"folder\.parent"):
        record_check.checked_record(data)
