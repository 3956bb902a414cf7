"""Indexes of other tools, as bytes: what is written, byte by byte; what is refused; what is noticed of others'."""

from __future__ import annotations

import io
import re
import struct
import tarfile

import pytest

from tests import tars
from tests.tars import A, B, member, tar
from wdsfs.errors import ExportError
from wdsfs.index import record_builder
from wdsfs.index.record import Record
from wdsfs.interop import dali as dali_module
from wdsfs.interop import energon
from wdsfs.shards import Fingerprint

# Headers of 512 bytes, each content padded to 512: a member of 1 to 512 bytes takes 1,024.
PLAIN = tar(
    member(b"d/a.jpg", b"jpeg"),
    member(b"d/a.cls", b"1"),
    member(b"b.left.jpg", b"x" * 513),
    member(b"d/c.jpg", b""),
    member(b"README", b"in no sample, and ends none"),
    member(b"d/c.cls", b"22"),
)
PAX = tar(
    tars.pax({b"mtime": b"1.5"}), A, tars.pax({b"path": b"long/" + b"n" * 120 + b".txt"}), member(b"cut", b"aa")
)
GNU = tar(tars.gnu_long(tars.LONG), member(tars.LONG[:100], b"aaa", magic=tars.GNU), B)
SPARSE = tars.ODD["sparse GNU"].tar()


def record_of(content: bytes) -> Record:
    with tars.opened(content) as fd:
        return Record(record_builder.build(fd, Fingerprint(len(content), 0, 0)))


def dali(content: bytes) -> bytes:
    return dali_module.dali_index(record_of(content))


# --- DALI --------------------------------------------------------------------------------------------------


DALI = {
    "plain": (
        PLAIN,
        b"v1.2 3\n"
        b"jpg 512 4 d/a.jpg cls 1536 1 d/a.cls\n"
        b"left.jpg 2560 513 b.left.jpg\n"
        b"jpg 4096 0 d/c.jpg cls 5632 2 d/c.cls\n",
    ),
    # An extension header and its content, then the member's own header.
    "PAX": (PAX, b"v1.2 2\ntxt 1536 3 a.txt\ntxt 3584 2 long/" + b"n" * 120 + b".txt\n"),
    "GNU": (GNU, b"v1.2 2\ntxt 1536 3 " + tars.LONG + b"\ntxt 2560 768 b.txt\n"),
    "in the order of the tar": (
        tar(
            member(b"z/b.txt", b"1"),
            member(b"./a.txt", b"2"),
            member(b"a.txt", b"3"),  # another key than ./a
            member(b"z/b.txt", b"4"),  # the key again: a second sample
            member(b"d/.hidden", b"5"),
            member(b"__m__/a.txt", b"6"),
            member(b"l.txt", kind=tars.SYMLINK, link=b"a.txt"),
            member(b"z/b.TXT", b"7"),
            member(b"z/b.txt", b"8"),
            member(b"\xff.txt", b"9"),
        ),
        b"v1.2 5\ntxt 512 1 z/b.txt\ntxt 1536 1 a.txt\ntxt 2560 1 a.txt\n"
        b"txt 3584 1 z/b.txt TXT 7168 1 z/b.TXT txt 8192 1 z/b.txt\ntxt 9216 1 \xff.txt\n",
    ),
    "stray": (tar(member(b"README", b"x")), b""),
    "sparse stray": (tar(A, tars.old_sparse(b"README", [(0, b"x")], 10)), b"v1.2 1\ntxt 512 3 a.txt\n"),
}


@pytest.mark.parametrize("name", DALI)
def test_a_dali_index(name: str) -> None:
    content, expected = DALI[name]
    assert dali(content) == expected
    assert not expected or misfit(content, expected) is None


@pytest.mark.parametrize("blank", [b" ", b"\t", b"\n", b"\r", b"\v", b"\f"])
def test_names_with_blanks_are_left_out_of_a_dali_index(blank: bytes) -> None:
    content = tar(member(b"a" + blank + b"b.jpg", b"x"), member(b"c.jpg", b"yy"))
    assert dali(content) == b"v1.1 2\njpg 512 1\njpg 1536 2\n"
    # What is in no sample is in no index.
    stray = tar(member(b"a" + blank + b"b", b"x"), member(b"c.jpg", b"yy"))
    assert dali(stray) == b"v1.2 1\njpg 1536 2 c.jpg\n"
    link = tar(member(b"l.jpg", kind=tars.SYMLINK, link=b"c.jpg"), member(b"c.jpg", b"yy"))
    assert dali(link) == b"v1.2 1\njpg 1024 2 c.jpg\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (tar(A, member(b"d/b.j pg", b"x")), r"^d/b\.j pg: has a blank in its extension"),
        (tar(A, member(b"d/b.", b"x")), r"^d/b\.: has an empty extension"),
        (SPARSE, r"^s\.txt: a sparse member"),
        (tar(B)[:600], "damaged"),
    ],
)
def test_what_a_dali_index_cannot_have(content: bytes, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        dali(content)


# --- a DALI index that lies there --------------------------------------------------------------------------


def misfit(content: bytes, index: bytes) -> str | None:
    with tars.opened(content) as fd:
        return dali_module.dali_misfit(fd, io.BytesIO(index))


def test_an_index_of_this_shard_fits_with_any_grouping() -> None:
    """`wds2idx` ends a sample at a member without an extension, and makes a sample of that."""
    theirs = (
        b"v1.2 5\njpg 512 4 d/a.jpg cls 1536 1 d/a.cls\nleft.jpg 2560 513 b.left.jpg\njpg 4096 0 d/c.jpg\n"
        b"README 4608 27 README\ncls 5632 2 d/c.cls\n"
    )
    assert misfit(PLAIN, theirs) is None


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"", None),  # other things are called .idx
        (b"MMIDIDX\0\0", None),
        (b"v1.0 3\n", "line 1 is not"),
        (b"v1.2\n", "line 1 is not"),
        (b"v1.2 1\njpg 512 4\n", "line 2 is not `extension offset size name`, repeated"),
        (b"v1.1 1\njpg 4 five\n", "line 2 is not `extension offset size`, repeated"),
        (b"v1.1 1\njpg 12345678901234567890123 4\n", "line 2 is not"),
        (b"v1.1 2\njpg 512 4 cls 1536 1\n\n", "line 3 is not"),
        (b"v1.1 2\njpg 512 4 cls 1536 1\n", "line 1 counts 2 samples, and 1 lines follow"),
        (b"v1.1 2\njpg 512 4 cls 1536 1\nleft.jpg 2048 513\n", "line 3 names 513 bytes at offset 2048"),
        (b"v1.1 1\njpg 512 5\n", "line 2 names 5 bytes at offset 512"),
        (b"v1.1 1\npng 512 4\n", "line 2 names 4 bytes at offset 512"),
        (b"v1.1 1\njpg 99999744 5\n", "line 2 names 5 bytes at offset 99999744"),
        (b"v1.1 1\njpg 512 4 cls 1536 1\n", "it lacks 3 of 5 members"),
    ],
)
def test_an_index_of_something_else_does_not(index: bytes, message: str | None) -> None:
    found = misfit(PLAIN, index)
    assert found is None if message is None else found is not None and message in found


def test_an_index_of_a_shard_without_members() -> None:
    assert misfit(tar(), b"v1.1 1\njpg 512 4\n") == "line 2 names 4 bytes at offset 512: there is no such member"


# --- Energon -----------------------------------------------------------------------------------------------

_NAME, _META = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$"), re.compile(r"__[^/]*__($|/)")


def prepared(content: bytes) -> list[int]:
    """Return the offsets that `energon prepare` writes for a shard, by tarfile, member by member."""
    found, last = list[int](), None
    with tarfile.open(fileobj=io.BytesIO(content)) as opened:
        for info in opened:
            match = _NAME.match(info.name)
            if not info.isreg() or _META.match(info.name) or match is None:
                continue
            if match[1] != last:
                found.append(info.offset)
                last = match[1]
        return [*found, opened.offset] if found else []


def borders(content: bytes) -> list[int]:
    with tars.opened(content) as fd:
        return energon.borders(fd).tolist()


# tarfile takes whatever lies where POSIX has a prefix for one, and an empty PAX path for a name.
ELSE_TO_TARFILE = ("v7", "GNU access times", "PAX with empty values")
READABLE = [
    name
    for name, case in tars.ODD.items()
    if not case.problems
    and "sparse" not in name
    and b"\xff" not in b"".join(case.files)
    and name not in ELSE_TO_TARFILE
]


@pytest.mark.parametrize("name", READABLE)
def test_samples_of_odd_tars_are_those_of_prepare(name: str) -> None:
    content = tars.ODD[name].tar()
    assert borders(content) == prepared(content)


def test_samples_of_odd_names_are_those_of_prepare() -> None:
    names = b"./a.txt a.txt d/.hidden README d/b.c.d __m__/a.txt __m__.txt d.v1/x e.".split()
    link = member(b"l.txt", kind=tars.SYMLINK, link=b"a.txt")
    for content in (
        PLAIN,
        tar(*(member(one, b"x") for one in names), link),
        tar(*(member(b"u\xc3\xbc.txt", b"x"), A))[:-1024],
    ):
        assert borders(content) == prepared(content) != []
    assert borders(tar(member(b"README", b"x"))) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (SPARSE, r"^s\.txt: a sparse member"),
        (tar(A, member(b"\xff.txt", b"x")), r"^\\xff\.txt: the name is not UTF-8"),
        (tar(B)[:600], "damaged"),
        (b"", "damaged"),
    ],
)
def test_what_energon_would_misread(content: bytes, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        borders(content)


def packed(*offsets: int) -> bytes:
    return struct.pack(f"={len(offsets)}Q", *offsets)


@pytest.mark.parametrize(
    ("content", "index", "message"),
    [
        (PLAIN, packed(0, 2048, 3584, 6144), None),
        (PLAIN, packed(0, 2048, 3584), "it has 2 samples, the shard 3"),
        (PLAIN, b"", "it has 0 samples, the shard 3"),
        (PLAIN, packed(0, 2048, 3072, 6144), "it has offset 3072 where sample 2 starts at 3584"),
        (PLAIN, packed(0, 2048, 3584, 6656), "it has offset 6656 where the samples end at 6144"),
        (PLAIN, packed(0, 2048, 3584, 6144) + b"x", "its 33 bytes are not a whole number of offsets"),
        (SPARSE, packed(0, 512), "the shard cannot be read by Energon: s.txt"),
    ],
)
def test_an_energon_offset_file_that_lies_there(content: bytes, index: bytes, message: str | None) -> None:
    with tars.opened(content) as fd:
        fault = energon.misfit(fd, io.BytesIO(index))
    assert fault is None if message is None else fault is not None and fault.startswith(message)
