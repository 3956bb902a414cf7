"""The scan of a tar: every odd case by name, everything that tarfile writes, and any damage."""

from __future__ import annotations

import contextlib
import functools
import gzip
import itertools
import os
import re
import sys
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests import tars
from tests.tars import ABC, BLOCK, END, LONG, ODD, A, B, Listed, by_tarfile
from tests.thorough import examples
from wdsfs.errors import CorruptShard
from wdsfs.tar import headers, scan, sparse, streams
from wdsfs.tar.columns import Chunk
from wdsfs.tar.problems import NO_TAR, Problem
from wdsfs.tar.sparse import Extents, Segments
from wdsfs.tree.content import read_stored

READ_MAX = 1 << 20  # members over this are not read by `look`


class Found(NamedTuple):
    """A member as `look` sees it. `content` is None where a read fails or would be large."""

    name: bytes
    kind: int
    head: int
    data: int
    size: int
    mtime: int
    link: bytes | None
    content: bytes | None


def look(tar: bytes | Path) -> tuple[list[Found], list[Problem]]:
    """All members of a tar, and what is wrong with it."""
    problems: list[Problem] = []
    with tars.opened(tar) as fd:
        found = [one for chunk in scan.scan(fd, problems) for one in _rows(fd, chunk)]
    return found, problems


def extents_of(segments: Segments | None) -> Extents | None:
    if segments is None:
        return None
    offsets, sizes = [start for start, _ in segments], [size for _, size in segments]
    return Extents(offsets, sizes, list(itertools.accumulate(sizes, initial=0))[:-1])


def _rows(fd: int, chunk: Chunk) -> Iterator[Found]:
    columns = (chunk.types, chunk.heads, chunk.datas, chunk.sizes, chunk.mtimes)
    rows = zip(chunk.names, *(column.tolist() for column in columns), strict=True)
    for row, (name, kind, head, data, size, mtime) in enumerate(rows):
        content = None
        if size <= READ_MAX and kind == headers.REGULAR:
            try:
                content = read_stored(fd, data, size, extents_of(chunk.sparse.get(row)), 0, size)
            except CorruptShard:
                content = None
        yield Found(name, kind, head, data, size, mtime, chunk.links.get(row), content)


def count_reads(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Fail when more than `limit` bytes have been read with pread(2)."""
    real, total = os.pread, 0

    def pread(fd: int, size: int, offset: int) -> bytes:
        nonlocal total
        data = real(fd, size, offset)
        total += len(data)
        assert total <= limit, f"more than {limit:,} bytes are read"
        return data

    monkeypatch.setattr(os, "pread", pread)


@contextlib.contextmanager
def peak_below(limit: int) -> Iterator[None]:
    """Fail if Python's memory (bytes) grows by more in the block."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit


@contextlib.contextmanager
def count_calls(limit: int) -> Iterator[None]:
    """Fail when the block calls more than `limit` functions, those in C included."""
    calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")
        assert calls <= limit, f"more than {limit:,} functions are called"

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("case", ODD)
def test_the_problems_of_an_odd_tar(case: str) -> None:
    """Each has a kind, an offset and words. The files are those of its record (`tests/index/test_record.py`)."""
    tar = ODD[case].tar()
    problems = look(tar)[1]
    assert [problem.kind for problem in problems] == [k for k in ODD[case].problems if k != "dangling link"]
    for problem in problems:
        assert 0 <= problem.offset <= len(tar)
        assert problem.kind in ("no end mark", "empty") or str(problem.offset) in problem.text


# --- formats -----------------------------------------------------------------------------------------------


SAYS: list[tuple[str, int, dict[str, object]]] = [
    ("v7", 0, {"kind": headers.DIRECTORY}),
    ("GNU long link", 1, {"link": LONG}),
    ("PAX", 0, {"name": LONG, "mtime": 12_500_000_000}),
    ("PAX global", 0, {"mtime": 77_000_000_000}),
    ("blank number fields", 0, {"mtime": 5_000_000_000}),
    ("hard links", 1, {"kind": headers.HARD_LINK, "link": b"a.txt", "content": None}),
    ("hard links", 2, {"kind": headers.HARD_LINK, "link": b"./l.txt"}),
    ("devices", 0, {"kind": headers.CHARACTER, "content": None}),
    ("devices", 1, {"kind": headers.BLOCK_DEVICE}),
    ("devices", 2, {"kind": headers.FIFO}),
    ("unknown type", 1, {"kind": ord("Z"), "size": len(ABC)}),  # a file, but in no sample
    ("GNU incremental", 0, {"name": b"d", "kind": headers.DIRECTORY, "size": 0}),
    ("GNU incremental", 2, {"name": b"e", "kind": headers.DIRECTORY, "size": 0}),
    ("GNU volumes", 0, {"kind": headers.GNU_VOLUME_LABEL}),
    ("GNU volumes", 1, {"kind": headers.GNU_CONTINUED}),
]


@pytest.mark.parametrize(("case", "row", "expected"), SAYS)
def test_what_odd_headers_say(case: str, row: int, expected: dict[str, object]) -> None:
    found = look(ODD[case].tar())[0][row]._asdict()
    assert {name: found[name] for name in expected} == expected


TIMES_OF_PAX = [
    (b"0", 0), (b"1.5", 1_500_000_000), (b"1.123456789123", 1_123_456_789), (b"-1.5", -1_500_000_000),
    (b"-0.25", -250_000_000), (b".5", 500_000_000), (b"5.", 5_000_000_000), (b"1" + b"0" * 30, (1 << 63) - 1),
    (b"-1" + b"0" * 30, -(1 << 63)), (b"2.5e-05", 25_000), (b"1e-300", 0),
    *((text, 1_000_000_000) for text in (b"1e999", b"", b"yesterday", b".", b"nan", b"9" * 5000)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "ns"), TIMES_OF_PAX)
def test_pax_time(text: bytes, ns: int) -> None:
    """A PAX time is kept to the nanosecond; where it is not a number, the time of the own header counts."""
    (found,), problems = look(tars.tar(tars.pax({b"mtime": text}), A))
    assert (found.mtime, found.content, problems) == (ns, b"aaa", [])


def test_pax_global() -> None:
    """The path, link target and time of a global PAX header hold for all members after it, unless their own
    PAX header says otherwise, or takes it back with an empty value; a size in it is ignored."""
    glob = tars.pax({b"mtime": b"77", b"size": b"5", b"linkpath": b"t"}, b"g")
    link, empty = tars.member(b"l", kind=tars.SYMLINK, link=b"x"), tars.pax({b"mtime": b""})
    found, problems = look(
        tars.tar(A, glob, tars.pax({b"mtime": b"8"}), B, link, empty, A, tars.pax({b"mtime": b""}, b"g"), A)
    )
    assert [one.mtime // 10**9 for one in found] == [1, 8, 77, 1, 1]
    assert (found[2].link, problems) == (b"t", [])


@pytest.mark.parametrize(
    "options",
    [["--format=gnu"], *(["--format=posix", f"--sparse-version={version}"] for version in ("0.0", "0.1", "1.0"))],
    ids=" ".join,
)
def test_sparse_by_gnu_tar(tmp_path: Path, options: list[str]) -> None:
    """Sparse files of GNU tar have their real names and sizes, and holes read as zeros."""
    segments = {0: b"start", 1 << 20: b"x" * 5000, 3 << 20: b"y"} | {(10 + 2 * n) << 16: b"z" for n in range(60)}
    for name in ("s.bin", "n" * 120 + ".bin"):
        with (tmp_path / name).open("wb") as out:
            for offset, content in segments.items():
                out.seek(offset)
                out.write(content)
            out.truncate(9 << 20)
    want = {os.fsencode(path.name): path.read_bytes() for path in tmp_path.iterdir()}
    tar = tars.with_gnu_tar(tmp_path, "-S", *options, members=sorted(want))
    assert len(tar) < 4 << 20
    problems: list[Problem] = []
    with tars.opened(tar) as fd:
        (chunk,) = scan.scan(fd, problems)
        sizes = chunk.sizes.tolist()
        for row, member_name in enumerate(chunk.names):
            extents = extents_of(chunk.sparse[row])
            got = read_stored(fd, int(chunk.datas[row]), sizes[row], extents, 0, sizes[row])
            assert got == want.pop(member_name)
    assert not want
    assert not problems


@pytest.mark.parametrize("format_", ["v7", "ustar", "gnu", "posix"])
def test_gnu_tar(tmp_path: Path, format_: str) -> None:
    """Every format of GNU tar is read as tarfile reads it."""
    for name in ("a.txt", "d/b.txt", "d/" + "e" * 60 + "/" + "f" * 60 + ".txt", "empty"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(ABC if "." in name else b"")
        os.utime(path, ns=(0, 1_234_567_890_987_654_321))
    (tmp_path / "link").symlink_to("a.txt")
    os.link(tmp_path / "a.txt", tmp_path / "twin")
    excluded = ["--exclude=" + "e" * 60] if format_ == "v7" else []
    tar = tars.with_gnu_tar(tmp_path, f"--format={format_}", *excluded)
    found, problems = look(tar)
    assert not problems
    assert [_listed(one) for one in found] == by_tarfile(tar)
    assert len(found) == 7 + (0 if excluded else 2)
    ns = 987_654_321 if format_ == "posix" else 0
    assert {one.mtime for one in found if one.kind == headers.REGULAR} == {1_234_567_890_000_000_000 + ns}


# --- ends --------------------------------------------------------------------------------------------------


def test_data_far_behind_the_end_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hole is skipped, not read."""
    count_reads(monkeypatch, 64 << 20)
    path = tmp_path / "hole.tar"
    path.write_bytes(tars.tar(A))
    os.truncate(path, 1 << 40)
    assert look(path)[1] == []
    with path.open("r+b") as out:
        out.seek(1 << 39)
        out.write(b"x")
    assert [(p.kind, p.offset) for p in look(path)[1]] == [("behind end mark", 1 << 39)]


def test_empty() -> None:
    """An empty tar is a shard without members, as GNU tar writes it (with 20 blocks) or others do."""
    for blocks in (1, 2, 20):
        assert look(bytes(blocks * BLOCK)) == ([], [])


@pytest.mark.parametrize("name", tars.NO_TARS)
def test_no_tar(name: str) -> None:
    """A file that is no tar has no members, and what is said of it names what it looks like."""
    content, said = tars.NO_TARS[name]
    found, [problem] = look(gzip.decompress(content) if name == "packed twice" else content)
    assert found == []
    assert problem.kind in NO_TAR
    assert re.match(said, problem.text)


def test_compressed_inside() -> None:
    for kind, compress in tars.COMPRESS.items():
        content = compress(tars.tar(tars.A))
        [problem] = look(content)[1]
        assert problem.kind == "compressed"
        assert kind in problem.text
        assert streams.compression(content[:BLOCK]) == kind


def test_a_tar_may_begin_like_a_compressed_file() -> None:
    """With the name of its first member."""
    tar = tars.tar(tars.member(b"BZh.txt", b"aaa"))
    assert streams.compression(tar[:BLOCK]) is None
    assert [one.name for one in look(tar)[0]] == [b"BZh.txt"]


# --- damage ------------------------------------------------------------------------------------------------


def test_damaged_headers() -> None:
    """A header with a wrong checksum, or with a number that is none, ends the shard; where it lies is reported."""
    damaged = ["damaged header", "damaged extension header", "damaged PAX record", "extension without member"]
    sizes = ["negative size", "impossible size", "size that is not a number", "huge extension header"]
    assert [look(ODD[case].tar())[1][0].offset for case in damaged + sizes] == [len(A)] * 8
    assert look(ODD["concatenated"].tar())[1][0].offset == 2 * BLOCK + len(END)


def test_cut_off() -> None:
    """A shard that was cut off shows its whole members, and reports where it ends. A member that is cut in its
    content is shown with its full size: what is there can be read, reading further fails with EIO."""
    found, _ = look(ODD["cut in content"].tar())
    assert [(one.content, one.size) for one in found] == [(b"aaa", 3), (None, len(ABC))]
    with tars.opened(ODD["cut in content"].tar()) as fd:
        left = len(ODD["cut in content"].tar()) - found[1].data
        data, size = found[1].data, len(ABC)
        for extents in (None, Extents([0], [size], [0])):
            assert read_stored(fd, data, size, extents, 0, left) == ABC[:left]
            # Never fewer bytes than asked for: the kernel would take that for the end of the file.
            with pytest.raises(CorruptShard):
                read_stored(fd, data, size, extents, 0, left + 1)


def test_truncation_at_every_byte() -> None:
    tar = tars.tar(A, tars.pax({b"path": b"p.txt"}), B, tars.member(b"z.txt"))
    whole, _ = look(tar)
    for end in [
        *range(0, len(tar), 37),
        *(at + delta for at in range(0, len(tar), BLOCK) for delta in (0, 1, 511)),
    ]:
        found, problems = look(tar[:end])
        assert [one._replace(content=None) for one in found] == [
            one._replace(content=None) for one in whole[: len(found)]
        ]
        ends = [one.data + one.size for one in found]
        assert bool(problems) == (end < len(tar) - BLOCK)
        assert "truncated" in {p.kind for p in problems} or not found or ends[-1] <= end


# --- content and single members ----------------------------------------------------------------------------


def test_read_name() -> None:
    with tars.opened(tars.tar(A, tars.pax({b"path": b"p\xff.txt"}), B, gnu := tars.gnu_long(LONG), A)) as fd:
        found, _ = look(tars.tar(A, tars.pax({b"path": b"p\xff.txt"}), B, gnu, A))
        assert [scan.placed(fd, one.head).name for one in found] == [b"a.txt", b"p\xff.txt", LONG]
        for offset in (BLOCK, os.fstat(fd).st_size - BLOCK, 1 << 40):
            with pytest.raises(CorruptShard):
                scan.placed(fd, offset)


# --- against tarfile ---------------------------------------------------------------------------------------


KINDS = {
    headers.REGULAR: "file",
    headers.HARD_LINK: "link",
    headers.SYMLINK: "symlink",
    headers.DIRECTORY: "directory",
    headers.CHARACTER: "character",
    headers.BLOCK_DEVICE: "block",
    headers.FIFO: "fifo",
}


def _listed(one: Found) -> Listed:
    kind = KINDS.get(one.kind, "unknown")
    seconds = one.mtime // 10**9 if one.mtime >= 0 else -(-one.mtime // 10**9)
    return Listed(one.name, kind, one.head, one.data, one.size, seconds, one.link or b"")


def name_bytes(length: int) -> st.SearchStrategy[bytes]:
    """Names with everything that a tar may hold: dots, slashes, spaces, newlines, invalid UTF-8; some long."""
    part = st.one_of(
        st.sampled_from(
            [b"a", b"b.jpg", b".", b"..", b"/", b"//", b"__", b"%2E", b"~2", b" ", b"\n", b"\xff", b"\xc3\xa9"]
        ),
        st.binary(min_size=1, max_size=3),
        st.integers(30, 120).map(lambda size: b"n" * size),
    )
    joined = st.lists(part, min_size=1, max_size=length).map(b"".join)
    return joined.map(lambda name: name.replace(b"\0", b"?")).filter(lambda name: not name.endswith(b"/"))


class Plan(NamedTuple):
    """A member that tarfile is to write."""

    name: bytes
    kind: bytes
    size: int
    mtime: float
    link: bytes

    def info(self) -> tarfile.TarInfo:
        info = tarfile.TarInfo(os.fsdecode(self.name))
        info.type, info.mtime = self.kind, self.mtime
        if self.kind in (tars.SYMLINK, tars.HARD_LINK):
            info.linkname = os.fsdecode(self.link)
        info.size = self.size if info.isreg() else 0
        return info


TYPES = [tars.OLD_FILE, tars.CONTIGUOUS, tars.DIRECTORY, tars.FIFO, tars.SYMLINK, tars.HARD_LINK, tars.CHARACTER]


def plans(times: st.SearchStrategy[float]) -> st.SearchStrategy[list[Plan]]:
    kinds = st.sampled_from([tars.FILE] * 8 + TYPES)
    sizes = st.sampled_from([0, 1, 511, 512, 513, 2000, 70_000])
    return st.lists(st.builds(Plan, name_bytes(5), kinds, sizes, times, name_bytes(3)), max_size=8)


TIMES: dict[str, st.SearchStrategy[float]] = {
    "ustar": st.integers(0, (1 << 33) - 1),
    "gnu": st.integers(-(1 << 33), 1 << 33),
    "pax": st.integers(0, 9 * 10**9) | st.floats(-1e9, 9e9),  # ns in 64 bits end in 2262
}


@pytest.mark.parametrize("kind", tars.FORMATS)
@examples(40)
@given(st.data())
def test_all_that_tarfile_writes(kind: str, data: st.DataObject) -> None:
    """All that tarfile writes, in each of its formats, is read as tarfile reads it."""
    wanted = data.draw(plans(TIMES[kind]))
    if kind == "ustar":
        wanted = [plan for plan in wanted if _fits_ustar(plan)]
    tar = tars.with_tarfile(((plan.info(), bytes(plan.size)) for plan in wanted), kind)
    found, problems = look(tar)
    assert [_listed(one) for one in found] == by_tarfile(tar)
    assert len(found) == len(wanted)
    assert problems == []


def _fits_ustar(plan: Plan) -> bool:
    try:
        plan.info().tobuf(tarfile.USTAR_FORMAT, errors="surrogateescape")
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("options", [{}, {"mtime": 0}, {"mtime": 1.5}, {"compress": False}], ids=repr)
def test_all_that_webdataset_writes(options: dict[str, float]) -> None:
    """So is what the webdataset library writes, with a PAX header per member by default."""
    samples = [{"__key__": f"dir/{n:06}", "jpg": ABC * n, "cls": b"%d" % n, "json": b"{}"} for n in range(20)]
    tar = tars.with_webdataset(samples, **options)
    found, problems = look(tar)
    assert [_listed(one) for one in found] == by_tarfile(tar)
    assert [one.content for one in found] == [sample[key] for sample in samples for key in ("cls", "jpg", "json")]
    assert problems == []


# --- chunks and windows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("case", ODD)
def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch, case: str, batch: int) -> None:
    """The places where chunks of the scan end make no difference."""
    want = look(ODD[case].tar())
    monkeypatch.setattr(scan, "BATCH", batch)
    assert look(ODD[case].tar()) == want
    monkeypatch.setattr(scan, "WEIGHT_MAX", 0)
    assert look(ODD[case].tar()) == want


@functools.cache
def mixed() -> bytes:
    """Runs of small and of large members, with extension headers in between."""
    parts = []
    for number, size in enumerate([0, 1, 600] * 150 + [300_000, 5, 70_000] * 12 + [9000] * 60 + [100] * 500):
        if number % 7 == 0:
            parts.append(tars.pax({b"mtime": b"%d" % number, b"path": b"%d.bin" % number}))
        parts.append(tars.member(b"%d.bin" % number, bytes([number % 256]) * size, mtime=number))
    return tars.tar(*parts)


@pytest.mark.parametrize("width", [BLOCK, 2048, 1 << 18])
def test_windows_do_not_show(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr(headers, "WINDOW_MIN", min(width, headers.WINDOW_MIN))
    monkeypatch.setattr(headers, "WINDOW_MAX", width)
    found, problems = look(mixed())
    assert problems == []
    assert [_listed(one) for one in found] == by_tarfile(mixed())


# --- any damage --------------------------------------------------------------------------------------------


@functools.cache
def victim() -> bytes:
    """A tar with something of everything."""
    return tars.tar(
        A,
        tars.pax({b"path": b"p.txt", b"mtime": b"5.25", b"size": b"700"}),
        tars.header(b"x", 1),
        tars.data(b"p" * 700),
        tars.gnu_long(b"g" * 150),
        tars.member(b"g", b"ggg", magic=tars.GNU),
        tars.member(b"d/", kind=tars.DIRECTORY),
        tars.old_sparse(b"s.bin", [(n * 10, b"%d" % (n % 10)) for n in range(30)], 400),
        ODD["sparse 1.0"].tar()[: -len(END)],
        tars.pax({b"mtime": b"9"}, b"g"),
        tars.member(b"l", kind=tars.HARD_LINK, link=b"a.txt"),
        B,
    )  # fmt: skip


Edit = tuple[str, int, int, int]


def damaged(tar: bytes, edits: list[Edit]) -> bytes:
    """Bytes changed, parts cut out or copied elsewhere; `mend` gives the header at a block a right checksum."""
    for what, at, other, value in edits:
        at, other = at % (len(tar) + 1), other % (len(tar) + 1)
        if what == "byte":
            tar = tar[:at] + bytes([value]) + tar[at + 1 :]
        elif what == "cut":
            tar = tar[:at]
        elif what == "splice":
            tar = tar[:at] + tar[other : other + value * 16] + tar[at + value % 3 :]
        elif what == "blocks":
            at, other = at & -BLOCK, other & -BLOCK
            tar = tar[:at] + tar[other : other + (value % 5) * BLOCK] + tar[at + (value % 3) * BLOCK :]
        elif what == "header":
            at &= -BLOCK
            block = bytearray(tar[at : at + BLOCK])
            if len(block) == BLOCK:
                block[other % BLOCK] = value
                block[148:156] = b" " * 8
                block[148:156] = b"%06o\0 " % sum(block)
                tar = tar[:at] + bytes(block) + tar[at + BLOCK :]
    return tar


edits = st.lists(
    st.tuples(
        st.sampled_from(["byte", "byte", "cut", "splice", "blocks", "blocks", "header", "header", "header"]),
        st.integers(0, 1 << 20),
        st.integers(0, 1 << 20),
        st.sampled_from([0, 1, 7, 32, 48, 49, 53, 55, 57, 61, 76, 83, 103, 120, 128, 255]) | st.integers(0, 255),
    ),
    min_size=1,
    max_size=4,
)


@examples(300)
@given(edits)
@example([("byte", 1024, 0, 255)])
def test_any_damage_is_reported_and_nothing_raised(changes: list[Edit]) -> None:
    """For any damage the scan ends, returns the members before the damage, and reports the damage."""
    tar = damaged(victim(), changes)
    found, problems = look(tar)
    first = min((p.offset for p in problems), default=len(tar))
    heads = [one.head for one in found]
    assert heads == sorted(set(heads))
    assert all(one.data > one.head for one in found)
    for mine, theirs in zip(found, by_tarfile(tar), strict=False):
        if mine.head >= first or not _agreed(tar, mine):
            break
        assert _listed(mine)._replace(mtime=0) == theirs._replace(mtime=0)


def _agreed(tar: bytes, one: Found) -> bool:
    """True if tarfile reads a member by the same rules.

    It does not: several extension headers for one member; a GNU long name that fills its header to the last
    byte; a GNU header with a prefix; old files that a slash makes a directory; sparse files, of which tarfile
    checks nothing; numbers with signs and underscores.
    """
    at = one.data - BLOCK
    own, extension = tar[at : at + BLOCK], tar[one.head : at]
    if extension[156:157] in (b"L", b"K") and b"\0" not in extension[BLOCK:][: int(extension[124:135], 8)]:
        return False
    plain = len(extension) <= 2 * BLOCK and b"GNU.sparse" not in extension and own[156] not in b"\0S"
    posix = own[257:263] == b"ustar\0" or own[345] == 0
    return plain and posix and not set(b"+-_oOxX") & set(own[100:156] + extension[100:156])


# --- memory ------------------------------------------------------------------------------------------------


def _endless_map(start: bytes) -> bytes:
    own = tars.header(b"s", 1 << 33, base256=True)
    records = {b"GNU.sparse.major": b"1", b"GNU.sparse.realsize": b"5"}
    return tars.pax(records) + own + start + b"9" * 8_000_000


def _empty_segments() -> bytes:
    content = b"200000\n" + b"".join(b"%d\n0\n" % n for n in range(200_000))
    return tars.tar(
        tars.pax({b"GNU.sparse.major": b"1", b"GNU.sparse.realsize": b"5"}), tars.member(b"s", content)
    )


def _endless_old_map() -> bytes:
    own = tars.header(b"s", 0, tars.SPARSE, magic=tars.GNU, fields={482: b"\1"})
    return own + (bytes(504) + b"\1" + bytes(7)) * 6000


HOSTILE: dict[str, Callable[[], bytes]] = {
    "many global records": lambda: tars.tar(tars.pax([(b"mtime", b"1")] * 5000, b"g") * 100, A),
    "chain of extension headers": lambda: tars.tar(tars.pax({b"comment": b"x" * 400}) * 10_000, A),
    "large extension headers": lambda: tars.tar((tars.pax({b"comment": b"x" * 500_000}) + A) * 60),
    "large names": lambda: tars.tar((tars.pax({b"path": b"x" * 500_000}) + A) * 60),
    "record without length": lambda: tars.tar(tars.member(b"x", b"mtime=1\n", b"x"), A),
    "record of no length": lambda: tars.tar(tars.member(b"x", b"0 mtime=1\n", b"x"), A),
    "record that is too short": lambda: tars.tar(tars.member(b"x", b"1 mtime=1\n", b"x"), A),
    "large count of segments": lambda: _endless_map(b"65536\n"),
    "segments that do not come": lambda: _endless_map(b"2\n"),
    "count without end": lambda: _endless_map(b""),
    "empty segments": _empty_segments,
    "old sparse map without end": _endless_old_map,
}


READS_A_BYTE = 4  # bytes that are read for each byte of a hostile tar
CALLS_A_BLOCK = 200  # functions that are called for each of its blocks


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_tars_cost_little(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """No tar makes the scan eat memory or work: extension headers before one member may have 1 MiB in all, a
    sparse file about a million segments."""
    monkeypatch.setattr(sparse, "SPARSE_MAX", sparse.SPARSE_MAX >> 4)
    tar = HOSTILE[case]()
    count_reads(monkeypatch, READS_A_BYTE * len(tar) + (4 << 20))
    calls = CALLS_A_BLOCK * len(tar) // BLOCK + CALLS_A_BLOCK * 100
    with tars.opened(tar) as fd, peak_below(64 << 20), count_calls(calls):
        for _ in scan.scan(fd, []):
            pass


def test_memory_does_not_grow_with_the_shard() -> None:
    """The scan holds one chunk of members at a time."""
    tar = tars.tar(tars.member(b"a/b.jpg", b"x") * 40_000)
    with tars.opened(tar) as fd, peak_below(40 << 20):
        assert sum(len(chunk.names) for chunk in scan.scan(fd, [])) == 40_000


def test_a_list_that_is_taken_for_a_shard() -> None:
    """WeNet's data.list, say: it is a list with the sign of one."""
    lists = [b"/d/a.tar\n/d/b.tar\n", b"s3://bucket/{000..999}.tar.gz", b"\r\nx.tar \r\n"]
    others = [b"a cat\nx.tar\n", b"x.tar \xe9\n"]
    assert [" @ " in streams.appearance(start) for start in lists + others] == [True] * 3 + [False] * 2
