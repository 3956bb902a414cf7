"""Headers are read back by our own scan, by tarfile, by GNU tar and by the webdataset library."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest
import webdataset
from hypothesis import example, given
from hypothesis import strategies as st

from tests import tars
from wdsfs.tar import columns, headers, scan
from wdsfs.tar.columns import Chunk
from wdsfs.tar.headers import BLOCK
from wdsfs.tar.problems import Problem

LONGEST = b"p" * 155 + b"/" + b"n" * 96 + b".jpg"  # what ustar's prefix and name can hold together
PLAIN = [
    b"a.jpg",
    b"images17/image194.left.jpg",
    b"n" * 96 + b".jpg",
    LONGEST,
    "bücher/straße.jpg".encode(),
    b"\xff\xfe.jpg",
    b"./a.jpg",
    b"/abs/a.jpg",
    b"/" + b"d" * 90 + b"/" + b"n" * 50 + b".jpg",
    b" a\n.jpg",
]
TOO_LONG = [
    b"n" * 97 + b".jpg",  # no slash to split at
    b"p" * 156 + b"/a.jpg",  # the prefix does not fit
    b"p/" + b"n" * 97 + b".jpg",  # nor the name
    b"/" + b"n" * 97 + b".jpg",  # an empty prefix would lose the slash
    b"long/" * 80 + b"a.jpg",
    b"\xff" * 120 + b".jpg",
    "ü".encode() * 120 + b".jpg",
    b"a\0b.jpg",
]


def member(name: bytes, content: bytes = b"abc", mtime: int = 7, **options: object) -> bytes:
    head = headers.encode(name, len(content), mtime, **options)  # type: ignore[arg-type]
    return head + content + bytes(headers.padding(len(content)))


def scanned(tar: bytes) -> Chunk:
    problems: list[Problem] = []
    with tars.opened(tar) as fd:
        [chunk] = scan.scan(fd, problems)
    assert problems == []
    return chunk


@pytest.mark.parametrize("name", PLAIN + TOO_LONG)
def test_everyone_reads_the_same(name: bytes, tmp_path: Path) -> None:
    """A ustar header wherever it suffices, else a PAX header before it."""
    head = headers.encode(name, 3, 7)
    assert (len(head) == BLOCK, head[156:157]) == ((True, b"0") if name in PLAIN else (False, b"x"))
    assert head[-BLOCK:][257:265] == b"ustar\00000"
    tar = member(name, b"content", 1_700_000_000) + member(b"z.cls", b"1") + headers.END
    [first, second] = tars.by_tarfile(tar)
    assert first[:2] == (name, "file")
    assert (first.size, first.mtime, second.name) == (7, 1_700_000_000, b"z.cls")
    chunk = scanned(tar)
    assert chunk.names == [name, b"z.cls"]
    assert chunk.mtimes.tolist() == [1_700_000_000 * 10**9, 7 * 10**9]
    if b"\0" in name:  # a C program ends the name there
        return
    (tmp_path / "a.tar").write_bytes(tar)
    command: list[str | Path] = ["tar", "--quoting-style=literal", "-tPf", tmp_path / "a.tar"]
    listed = subprocess.run(command, check=True, capture_output=True)
    assert listed.stdout == name + b"\nz.cls\n"
    allowed = b"hdrcharset" if b"\xff" in name else b""  # GNU tar says that it does not know this keyword
    assert not listed.stderr or (allowed and allowed in listed.stderr)


def test_as_the_webdataset_library_writes_it() -> None:
    """With whole seconds, its TarWriter writes just these bytes: owner, mode and all."""
    out = io.BytesIO()
    with webdataset.TarWriter(out, encoder=False, mtime=7) as writer:
        writer.write({"__key__": "d/a", "cls": b"1", "jpg": b"abc"})
    ours = member(b"d/a.cls", b"1") + member(b"d/a.jpg") + headers.END
    assert out.getvalue()[: len(ours)] == ours


@pytest.mark.parametrize("size", [headers.OCTAL_MAX, headers.OCTAL_MAX + 1, 1 << 40])
def test_large_members(size: int, tmp_path: Path) -> None:
    head = headers.encode(b"a.bin", size, 7)
    assert len(head) == (BLOCK if size <= headers.OCTAL_MAX else 3 * BLOCK)
    with (tmp_path / "a.tar").open("wb") as out:
        out.write(head)
        out.truncate(len(head) + size + headers.padding(size))
        out.seek(0, io.SEEK_END)
        out.write(member(b"b.txt") + headers.END)
    with tarfile.open(tmp_path / "a.tar") as archive:
        assert [(one.name, one.size) for one in archive] == [("a.bin", size), ("b.txt", 3)]
    listed = subprocess.run(["tar", "-tvf", tmp_path / "a.tar"], check=True, capture_output=True, text=True)
    assert [line.split()[2] for line in listed.stdout.splitlines()] == [str(size), "3"]


@pytest.mark.parametrize("mtime", [0, headers.OCTAL_MAX, headers.OCTAL_MAX + 1, -1, -(9 * 10**9)])
def test_times_out_of_reach_of_ustar(mtime: int) -> None:
    tar = member(b"a.jpg", mtime=mtime) + headers.END
    assert (len(tar) > 4 * BLOCK) == (not 0 <= mtime <= headers.OCTAL_MAX)
    assert scanned(tar).mtimes.tolist() == [mtime * 10**9]
    assert tars.by_tarfile(tar)[0].mtime == mtime


def test_what_a_global_header_has_set_is_said_again() -> None:
    common = tars.pax({b"mtime": b"77", b"uname": b"eve", b"size": b"9"}, b"g")
    plain, ours = member(b"a.jpg"), member(b"b.jpg", common=[b"mtime", b"uname", b"size", b"comment"])
    with tarfile.open(fileobj=io.BytesIO(common + ours + headers.END)) as archive:
        [one] = archive
    assert (one.name, one.mtime, one.uname, one.size) == ("b.jpg", 7, "bigdata", 3)
    assert scanned(tars.pax({b"mtime": b"77"}, b"g") + plain + ours + headers.END).mtimes.tolist() == [
        77 * 10**9,
        7 * 10**9,
    ]


@pytest.mark.parametrize(("name", "size"), [(b"", 0), (b"a.jpg", -1)])
def test_what_cannot_be(name: bytes, size: int) -> None:
    with pytest.raises(ValueError, match="is impossible"):
        headers.encode(name, size, 0)


@given(
    st.lists(st.binary(min_size=1, max_size=90), min_size=1, max_size=8).map(b"/".join),
    st.integers(0, 1 << 40),
    st.integers(-(1 << 33), 9 * 10**9),
)
@example(b"x" * 989 + b".jpg", 0, 0)  # a record whose length has a digit more than what it counts
@example(b"x" * 87 + b"/" + b"y" * 101, 0, 0)
def test_any_name_comes_back(name: bytes, size: int, mtime: int) -> None:
    """Also the length of a PAX record, which counts its own digits."""
    head = headers.encode(name, size, mtime)
    problems: list[Problem] = []
    with tars.opened(head) as fd:
        [chunk] = scan.scan(fd, problems)
    # Of a slash at the end readers make what they like; no member of a sample has one.
    assert chunk.names[0].rstrip(b"/") == name.rstrip(b"/")
    assert (chunk.datas.tolist(), chunk.sizes.tolist()) == ([len(head)], [size])
    assert chunk.mtimes.tolist() == [mtime * 10**9]


SIZES = st.one_of(st.integers(0, 600), st.integers(0, 1 << 62), st.just(headers.OCTAL_MAX))
TIMES = st.one_of(st.integers(-5, 5), st.integers(-(1 << 70), 1 << 70), st.just(headers.OCTAL_MAX))
NAMES = st.one_of(st.binary(min_size=1, max_size=300), st.sampled_from([*PLAIN, b"x" * 100, b"x" * 101]))
COMMON = st.sampled_from([(), (), (b"mtime",), (b"path", b"size")])


@given(st.lists(st.tuples(NAMES, SIZES, TIMES, COMMON), max_size=20))
def test_headers_made_together_are_those_made_one_by_one(
    members: list[tuple[bytes, int, int, tuple[bytes]]],
) -> None:
    names, sizes, times, common = zip(*members, strict=True) if members else ((), (), (), ())
    together = columns.encode(names, sizes, times, common)
    assert together == [headers.encode(*member) for member in members]
