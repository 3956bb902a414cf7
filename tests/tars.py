"""Tars for the tests: by hand, with tarfile, with the webdataset library, with GNU tar; and the odd ones.

By hand a tar is `tar(member(...), ...)`, a member is a header and its padded content, and each argument of
`header` writes one field, rightly or wrongly. `ODD` names every odd case once, with what a reader gets to see
of it, so that the tests of the scan, of the record and of the mount can all go through it.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import os
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import webdataset
from webdataset import tariterators

from tests.processes import Word, finished

if sys.version_info >= (3, 14):
    from compression import zstd as zstd
else:
    from backports import zstd as zstd

BLOCK = 512
END = bytes(2 * BLOCK)

POSIX, GNU, V7 = b"ustar\x0000", b"ustar  \0", bytes(8)  # magic and version
FILE, HARD_LINK, SYMLINK, CHARACTER, BLOCK_DEVICE, DIRECTORY, FIFO = (b"%d" % n for n in range(7))
OLD_FILE, CONTIGUOUS, SPARSE = b"\0", b"7", b"S"

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


# --- by hand -----------------------------------------------------------------------------------------------


def header(
    name: bytes = b"a.txt",
    size: int = 0,
    kind: bytes = FILE,
    *,
    magic: bytes = POSIX,
    prefix: bytes = b"",
    link: bytes = b"",
    mtime: int = 1,
    base256: bool = False,
    signed: bool = False,
    checksum: int | None = None,
    fields: Mapping[int, bytes] | None = None,
) -> bytes:
    """A header block. `base256` is for the size; `fields` are bytes to put at an offset; the checksum is taken
    over all that, as signed bytes if `signed`, unless it is given."""
    block = bytearray(BLOCK)
    parts: dict[int, bytes] = {
        0: name[:100],
        100: b"0000644\0" + b"0000000\0" * 2,
        124: _base_256(size) if base256 else _number(size),
        136: _number(mtime),
        148: b" " * 8,
        156: kind,
        157: link[:100],
        257: magic,
        345: prefix,
    }
    for offset, value in (*parts.items(), *(fields or {}).items()):
        block[offset : offset + len(value)] = value
    total = sum(block) - (256 * sum(byte > 127 for byte in block) if signed else 0)
    block[148:156] = b"%06o\0 " % ((total if checksum is None else checksum) & 0o777777)
    return bytes(block)


def _number(value: int) -> bytes:
    return b"%011o\0" % value if 0 <= value < 8**11 else _base_256(value)


def _base_256(value: int) -> bytes:
    return (value & (1 << 96) - 1 | 1 << 95).to_bytes(12, "big")


def data(content: bytes) -> bytes:
    """Content, padded to whole blocks."""
    return content + bytes(-len(content) % BLOCK)


def member(name: bytes, content: bytes = b"", kind: bytes = FILE, **options: Any) -> bytes:
    return header(name, len(content), kind, **options) + data(content)


def pax(records: Mapping[bytes, bytes] | Iterable[tuple[bytes, bytes]], kind: bytes = b"x") -> bytes:
    """A PAX header; `kind` b"g" for a global one."""
    pairs = records.items() if isinstance(records, Mapping) else records
    return member(b"././@PaxHeader", b"".join(record(key, value) for key, value in pairs), kind)


def record(key: bytes, value: bytes) -> bytes:
    """`length key=value`, where the length counts its own digits."""
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest) + 1
    while len(b"%d" % length) + len(rest) != length:
        length += 1
    return b"%d" % length + rest


def gnu_long(value: bytes, kind: bytes = b"L") -> bytes:
    """GNU's header for a long name, or with kind b"K" for a long link target."""
    return member(b"././@LongLink", value + b"\0", kind, magic=GNU)


def old_sparse(name: bytes, segments: list[tuple[int, bytes]], size: int) -> bytes:
    """A sparse file in GNU's old format: 4 segments in the header, 21 in each block after it."""
    table = [_number(offset) + _number(len(content)) for offset, content in segments]
    content = b"".join(content for _, content in segments)
    blocks = [table[at : at + 21] for at in range(4, len(table), 21)]
    fields = {386: b"".join(table[:4]), 482: b"\1" if blocks else b"\0", 483: _number(size)}
    extra = b""
    for number, block in enumerate(blocks):
        more = b"\1" if number + 1 < len(blocks) else b"\0"
        extra += (b"".join(block).ljust(504, b"\0") + more).ljust(BLOCK, b"\0")
    return header(name, len(content), SPARSE, magic=GNU, fields=fields) + extra + data(content)


def tar(*members: bytes, end: bytes = END) -> bytes:
    return b"".join(members) + end


# --- by other programs -------------------------------------------------------------------------------------


def with_tarfile(members: Iterable[tuple[tarfile.TarInfo, bytes]], kind: str = "pax") -> bytes:
    """A tar by Python's tarfile; `kind` is one of `FORMATS`."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=FORMATS[kind], errors="surrogateescape") as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def with_webdataset(samples: Iterable[Mapping[str, Any]], **options: Any) -> bytes:
    """A shard by the webdataset library; samples have a `__key__` and bytes by extension."""
    out = io.BytesIO()
    with webdataset.TarWriter(out, encoder=False, **options) as writer:
        for sample in samples:
            writer.write(dict(sample))
    return out.getvalue()


def with_gnu_tar(directory: Path, *options: str, members: Iterable[bytes] = (b".",)) -> bytes:
    """Return the tar that GNU tar makes of a directory, or of some of its members."""
    command: list[Word] = ["tar", *options, "--sort=name", "--owner=0", "--group=0", "-C", directory]
    return bytes(finished(*command, "-cf", "-", "--", *members, text=False).stdout)


def names_of_one_checksum(bits: int) -> list[bytes]:
    """`1 << bits` names whose CRC-32 is the same, in whatever folder they are.

    CRC-32 is linear: of so many places with `a` or `b` in them some sets can be exchanged without a trace.
    """
    plain = b"a" * (32 + bits)
    # What the exchange of places does to the sum, and which places these are; each with a highest bit.
    rows: list[tuple[int, int]] = []
    same = []  # places whose exchange does nothing
    for place in range(len(plain)):
        changed = plain[:place] + b"b" + plain[place + 1 :]
        effect, places = zlib.crc32(plain) ^ zlib.crc32(changed), 1 << place
        for other, others in rows:
            if effect ^ other < effect:
                effect, places = effect ^ other, places ^ others
        if effect:
            rows = sorted([*rows, (effect, places)], reverse=True)
        else:
            same.append(places)
    found = [0]
    for places in same[:bits]:
        found += [one ^ places for one in found]
    return [bytes(98 if one >> place & 1 else 97 for place in range(len(plain))) for one in found]


@contextlib.contextmanager
def opened(content: bytes | Path) -> Iterator[int]:
    """A descriptor of a tar, without a file on disk if it is given as bytes."""
    if isinstance(content, bytes):
        fd = os.memfd_create("tar")
        os.write(fd, content)
    else:
        fd = os.open(content, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def write_large(path: Path, size: int = 9 << 30, by_pax: bool = False) -> None:
    """A shard with a member over 8 GiB, `big.bin`, and `a.txt` after it. It takes a few blocks on disk only.

    The member ends in b"end", the rest is a hole.
    """
    with path.open("wb") as out:
        own = header(b"big.bin", 0 if by_pax else size, base256=not by_pax)
        out.write(pax({b"size": b"%d" % size}) + own if by_pax else own)
        out.seek(size - 3, os.SEEK_CUR)
        out.write(b"end" + bytes(-size % BLOCK) + tar(member(b"a.txt", b"aaa")))


# --- as others see them ------------------------------------------------------------------------------------


class Listed(NamedTuple):
    """A member, in terms that every reader has. Times are whole seconds; what has no content has size 0."""

    name: bytes
    kind: str
    head: int
    data: int
    size: int
    mtime: int
    link: bytes


_KINDS = "file:isreg link:islnk symlink:issym directory:isdir character:ischr block:isblk fifo:isfifo"
_TESTS = {kind: getattr(tarfile.TarInfo, test) for kind, _, test in (one.partition(":") for one in _KINDS.split())}


def by_tarfile(tar: bytes) -> list[Listed]:
    """Return the members that tarfile sees before it fails."""
    found = []
    # IndexError: tarfile does not expect the end of the file inside a sparse map.
    errors = (tarfile.TarError, ValueError, OverflowError, RecursionError, IndexError, KeyError)
    with (
        contextlib.suppress(*errors),
        tarfile.open(fileobj=io.BytesIO(tar), mode="r:", errors="surrogateescape", encoding="utf-8") as archive,
    ):
        for one in archive:
            kind = next((kind for kind, test in _TESTS.items() if test(one)), "unknown")
            size = one.size if kind in ("file", "unknown") else 0
            link = one.linkname if kind in ("link", "symlink") else ""
            place = one.offset, one.offset_data
            found.append(Listed(_raw(one.name), kind, *place, size, int(one.mtime), _raw(link)))
    return found


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def by_webdataset(tar: bytes, hidden: bool = False) -> list[dict[str, Any]]:
    """The samples that the webdataset library reads: `__key__`, and bytes by extension.

    Where a sample has an extension twice the library raises an error; here it goes on after that. Without
    `hidden`, members whose base name starts with a dot are left out.
    """

    def select(name: str) -> bool:
        return hidden or not name.rpartition("/")[2].startswith(".")

    def go_on(error: Exception) -> bool:
        return True

    files = tariterators.tar_file_iterator(io.BytesIO(tar), select_files=select)
    samples = tariterators.group_by_keys(({**file, "__url__": ""} for file in files), handler=go_on)
    return [{key: value for key, value in sample.items() if key != "__url__"} for sample in samples]


# --- odd ones ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """An odd tar and what is expected of it.

    `files` is the whole `files` layout: shown path -> content; None where it cannot be read whole, because the
    shard ends before. `problems` are the kinds of what is reported. `write` puts the tar where it is wanted.
    """

    expected: str
    build: Callable[[], bytes] | bytes
    files: dict[bytes, bytes | None] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def tar(self) -> bytes:
        return self.build() if callable(self.build) else self.build

    def write(self, path: Path) -> None:
        path.write_bytes(self.tar())


ABC = bytes(range(256)) * 3  # content of more than one block
A, B = member(b"a.txt", b"aaa"), member(b"b.txt", ABC)
LONG = b"long/" * 40 + b"x" * 50 + b".txt"  # 254 bytes: too many for a ustar name, few enough to be shown


def _damaged(block: bytes) -> bytes:
    return block[:20] + b"?" + block[21:]


def _sparse_content() -> bytes:
    return bytes(1000) + b"one" + bytes(100_000) + b"two" + bytes(5000)


_SEGMENTS = [(1000, b"one"), (101_003, b"two")]
_SIZE = 106_006
_NUMBERED = [(2 * number, b"%d" % (number % 10)) for number in range(50)]
_STORED = data(b"onetwo")


def _sparse_0_0() -> bytes:
    records = [(b"GNU.sparse.size", b"%d" % _SIZE), (b"GNU.sparse.numblocks", b"2")]
    for offset, content in _SEGMENTS:
        records += [(b"GNU.sparse.offset", b"%d" % offset), (b"GNU.sparse.numbytes", b"%d" % len(content))]
    return pax(records) + header(b"s.txt", 6) + _STORED


def _sparse_0_1() -> bytes:
    text = b",".join(b"%d,%d" % (offset, len(content)) for offset, content in _SEGMENTS)
    records = {b"GNU.sparse.size": b"%d" % _SIZE, b"GNU.sparse.name": b"s.txt", b"GNU.sparse.map": text}
    return pax(records) + header(b"./GNUSparseFile.1/s.txt", 6) + _STORED


def _sparse_1_0() -> bytes:
    text = data(b"2\n" + b"".join(b"%d\n%d\n" % (offset, len(content)) for offset, content in _SEGMENTS))
    fields = {b"major": b"1", b"minor": b"0", b"name": b"s.txt", b"realsize": b"%d" % _SIZE}
    records = {b"GNU.sparse." + name: value for name, value in fields.items()}
    return pax(records) + header(b"GNUSparseFile.1/s.txt", len(text) + 6) + text + _STORED


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": zstd.compress,
}


_AB: dict[bytes, bytes | None] = {b"a.txt": b"aaa", b"b.txt": ABC}
_ONLY_A: dict[bytes, bytes | None] = {b"a.txt": b"aaa"}

# Files that are no tars at all, as failed downloads leave them: content, and what is said of it.
NO_TARS = {
    "empty": (b"", r"is empty \(0 bytes\), not a tar: download or make it again"),
    "page": (b"\n <!DOCTYPE HTML>\n<html>" + b"x" * 5000, "is an HTML page, not a tar: download it again"),
    "store": (b'<?xml version="1.0"?><Error/>', "is an XML document, as stores send errors, not a tar: download"),
    "pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
        "is a git LFS pointer, not a tar: fetch its content: git lfs pull",
    ),
    "text": (
        b"Access denied\n" * 100,
        r"is text, not a tar, and begins with 'Access denied\\n.*': download it again",
    ),
    "other": (bytes(range(256)) * 9, "is not a tar, but another file: download it again"),
    "short": (bytes(range(128)), "is not a tar, but another file of 128 bytes, less than a header: download it"),
    "archive": (b"PK\3\4" + bytes(600), "is a zip archive, not a tar"),
    "image": (b"\xff\xd8\xff\xe0" + bytes(600), "is a JPEG image, not a tar: .*wdsfs pack DIRECTORY"),
    "packed twice": (COMPRESS["gzip"](b"BZh9" + bytes(600)), "is bzip2-compressed inside: unpack it"),
}

# fmt: off
ODD: dict[str, Case] = {
    # formats
    "ustar with prefix": Case("the prefix is the start of the name",
        tar(member(b"b/a.txt", b"aaa", prefix=b"p" * 100 + b"/q")), {b"p" * 100 + b"/q/b/a.txt": b"aaa"}),
    "v7": Case("no magic, old type flag; a slash behind the name makes a directory",
        tar(member(b"d/", kind=OLD_FILE, magic=V7),
        member(b"d/a.txt", b"aaa", OLD_FILE, magic=V7, fields={345: b"junk"})), {b"d/a.txt": b"aaa"}),
    "GNU access times": Case("where POSIX has the prefix GNU tar keeps times, which are not part of a name",
        tar(member(b"a.txt", b"aaa", magic=GNU, fields={345: b"14000000000\0"})), _ONLY_A),
    "GNU long name": Case("it is the name", tar(gnu_long(LONG), member(LONG[:100], ABC, magic=GNU)), {LONG: ABC}),
    "GNU long link": Case("it is the target",
        tar(gnu_long(LONG), member(LONG, ABC), gnu_long(LONG, b"K"), member(b"l.txt", kind=HARD_LINK, link=LONG)),
        {LONG: ABC, b"l.txt": ABC}),
    "PAX": Case("path, size and time come from the extension header",
        tar(pax({b"path": LONG, b"size": b"768", b"mtime": b"12.5"}), header(b"cut", 7), data(ABC)), {LONG: ABC}),
    "PAX with empty values": Case("an empty value leaves the member's own header in force",
        tar(pax({b"path": b"", b"size": b"", b"mtime": b"", b"linkpath": b""}), A), _ONLY_A),
    "PAX global": Case("its records hold for all members behind it", tar(pax({b"mtime": b"77"}, b"g"), A, B), _AB),
    "PAX comment": Case("git archive writes a global comment", tar(pax({b"comment": b"x" * 40}, b"g"), A, B), _AB),
    "PAX Solaris": Case("type X is type x", tar(pax({b"path": b"b.txt"}, b"X"), member(b"a.txt", ABC)),
        {b"b.txt": ABC}),
    "base-256 size": Case("the size", tar(member(b"a.txt", b"aaa", base256=True)), _ONLY_A),
    "signed checksum": Case("accepted, as some old tars wrote it", tar(member(b"\xff.txt", b"aaa", signed=True)),
        {b"\xff.txt": b"aaa"}),
    "blank number fields": Case("spaces and NULs around the digits, as old tars wrote them",
        tar(member(b"a.txt", b"aaa", fields={124: b"         3 \0", 136: b"          5 "})), _ONLY_A),
    "junk behind names": Case("a name ends at its first NUL",
        tar(member(b"a.txt\0junk", b"aaa"), member(b"b.txt\0\0x", ABC)), _AB),
    # types
    "hard links": Case("they are the member that they name",
        tar(A, member(b"l.txt", kind=HARD_LINK, link=b"a.txt"), member(b"m.txt", kind=HARD_LINK, link=b"./l.txt")),
        {b"a.txt": b"aaa", b"l.txt": b"aaa", b"m.txt": b"aaa"}),
    "dangling hard link": Case("not shown, but reported",
        tar(member(b"l.txt", kind=HARD_LINK, link=b"b.txt"), A, B), _AB, ("dangling link",)),
    "links with a size": Case("a link has no content, whatever its size field says",
        tar(A, header(b"l.txt", 3, HARD_LINK, link=b"a.txt"), B),
        {b"a.txt": b"aaa", b"l.txt": b"aaa", b"b.txt": ABC}),
    "directories with a size": Case("the same", tar(header(b"d/", 4096, DIRECTORY), A, B), _AB),
    "devices": Case("never created",
        tar(*(member(b"dev" + kind, kind=kind) for kind in (CHARACTER, BLOCK_DEVICE, FIFO)), A, B), _AB),
    "contiguous": Case("an ordinary file", tar(member(b"a.txt", b"aaa", CONTIGUOUS)), _ONLY_A),
    "unknown type": Case("a file, but in no sample", tar(A, member(b"z.bin", ABC, b"Z"), B),
        {**_AB, b"z.bin": ABC}),
    "GNU incremental": Case("a directory, whose content is a list of its files",
        tar(member(b"d/", b"Yx.txt\0\0", b"D", magic=GNU), A, member(b"e", b"", b"D", magic=GNU), B), _AB),
    "GNU volumes": Case("a label, and the rest of a file of the volume before, are no files",
        tar(member(b"label", b"", b"V", magic=GNU), member(b"c.txt", b"rest", b"M", magic=GNU), A, B), _AB),
    "sparse GNU": Case("holes are zeros", lambda: tar(old_sparse(b"s.txt", _SEGMENTS, _SIZE), A),
        {b"s.txt": _sparse_content(), b"a.txt": b"aaa"}),
    "sparse GNU of nothing but a hole": Case("holes are zeros",
        lambda: tar(old_sparse(b"s.txt", [(5000, b"")], 5000), A), {b"s.txt": bytes(5000), b"a.txt": b"aaa"}),
    "sparse GNU of 50 segments": Case("the map goes on in blocks behind the header",
        lambda: tar(old_sparse(b"s.txt", _NUMBERED, 100), A),
        {b"s.txt": b"".join(content + b"\0" for _, content in _NUMBERED), b"a.txt": b"aaa"}),
    "sparse 0.0": Case("holes are zeros", lambda: tar(_sparse_0_0(), A),
        {b"s.txt": _sparse_content(), b"a.txt": b"aaa"}),
    "sparse 0.1": Case("holes are zeros", lambda: tar(_sparse_0_1(), A),
        {b"s.txt": _sparse_content(), b"a.txt": b"aaa"}),
    "sparse 1.0": Case("holes are zeros", lambda: tar(_sparse_1_0(), A),
        {b"s.txt": _sparse_content(), b"a.txt": b"aaa"}),
    "0-byte members": Case("empty files", tar(member(b"a.txt"), member(b"b.txt")), {b"a.txt": b"", b"b.txt": b""}),
    # ends
    "no end mark": Case("everything is there", tar(A, B, end=b""), _AB, ("no end mark",)),
    "no padding at the end": Case("everything is there", tar(B, A)[: -2 * BLOCK - 509], _AB, ("no end mark",)),
    "one zero block at the end": Case("an end mark", tar(A, B, end=bytes(BLOCK)), _AB),
    "half a zero block at the end": Case("everything is there, but the file was cut off",
        tar(A, B, end=bytes(200)), _AB, ("truncated",)),
    "padded to a record": Case("zeros behind the end mark are nothing", tar(A, B, end=bytes(20 * BLOCK)), _AB),
    "concatenated": Case("the second tar is reported, not read", tar(A) + tar(B), _ONLY_A, ("behind end mark",)),
    "zero block in the middle": Case("it ends the tar", tar(A, bytes(BLOCK), B), _ONLY_A, ("behind end mark",)),
    "empty tar": Case("an empty shard", END),
    # damage
    "cut in the first header": Case("a tar, of which nothing is there", tar(A)[:300], {}, ("truncated",)),
    "damaged first header": Case("a tar, of which nothing is intact", tar(_damaged(A), B), {}, ("damaged",)),
    "damaged header": Case("what is before it is intact", tar(A, _damaged(B), A), _ONLY_A, ("damaged",)),
    "damaged extension header": Case("what is before it is intact", tar(A, _damaged(pax({b"path": b"b.txt"})), B),
        _ONLY_A, ("damaged",)),
    "damaged PAX record": Case("what is before it is intact", tar(A, member(b"x", b"99 path=b\n", b"x"), B),
        _ONLY_A, ("damaged",)),
    "extension without member": Case("reported", tar(A, pax({b"path": b"b.txt"})), _ONLY_A, ("damaged",)),
    "cut in a header": Case("what is before it is intact", tar(A, B)[: len(A) + 100], _ONLY_A, ("truncated",)),
    "cut in an extension header": Case("what is before it is intact", tar(A, pax({b"path": LONG}))[: len(A) + 520],
        _ONLY_A, ("truncated",)),
    "cut behind an extension header": Case("what is before it is intact", tar(A, pax({b"path": LONG}), end=b""),
        _ONLY_A, ("truncated",)),
    "cut in content": Case("the last member is shown, and reading beyond the cut fails",
        tar(A, B)[: len(A) + BLOCK], {b"a.txt": b"aaa", b"b.txt": None}, ("truncated",)),
    "negative size": Case("damage", tar(A, header(b"b.txt", -5, base256=True)), _ONLY_A, ("damaged",)),
    "huge size": Case("a member that the shard ends in", tar(A, header(b"b.txt", 1 << 60, base256=True), end=b""),
        {b"a.txt": b"aaa", b"b.txt": None}, ("truncated",)),
    "impossible size": Case("damage", tar(A, header(b"b.txt", (1 << 80), base256=True), B), _ONLY_A, ("damaged",)),
    "size that is not a number": Case("damage", tar(A, header(b"b.txt", fields={124: b"1x"}), B), _ONLY_A,
        ("damaged",)),
    "huge extension header": Case("damage", tar(A, header(b"x", 1 << 30, b"x"), B), _ONLY_A, ("damaged",)),
    # names
    "leading ./": Case("means nothing", tar(member(b"./a.txt", b"aaa"), member(b"././b.txt", ABC)), _AB),
    "absolute name": Case("stays inside", tar(member(b"/etc/a.txt", b"aaa")), {b"%/etc/a.txt": b"aaa"}),
    "absolute name at the top": Case("is another one", tar(A, member(b"/a.txt", ABC)),
        {b"a.txt": b"aaa", b"%/a.txt": ABC}),
    "names that lead out": Case("stay inside", tar(member(b"../up.txt", b"aaa"), member(b"d/../../e.txt", ABC)),
        {b"%2E%2E/up.txt": b"aaa", b"d/%2E%2E/%2E%2E/e.txt": ABC}),
    "names with empty components": Case("keep them", tar(member(b"a//b.txt", b"aaa"), member(b"d/", ABC)),
        {b"a/%/b.txt": b"aaa", b"d/%": ABC}),
    "no name": Case("has one", tar(member(b"", ABC)), {b"%": ABC}),
    "names with percent signs": Case("only what looks like an escape is escaped",
        tar(member(b"100%.txt", b"aaa"), member(b"%2E/x%00.txt", ABC)),
        {b"100%.txt": b"aaa", b"%252E/x%2500.txt": ABC}),
    "NUL in a PAX name": Case("escaped", tar(pax({b"path": b"a\0b.txt"}), A), {b"a%00b.txt": b"aaa"}),
    "invalid UTF-8": Case("passes through", tar(member(b"\xc3(\xff/\x80.txt", ABC)), {b"\xc3(\xff/\x80.txt": ABC}),
    "newline and space": Case("pass through", tar(member(b" a\n/b c\n.txt", ABC)), {b" a\n/b c\n.txt": ABC}),
    "name over 255 bytes": Case("cut, with a checksum", tar(gnu_long(b"x" * 300 + b".txt"), member(b"", ABC)),
        {b"x" * 238 + b"%ec7201ce39fb4231": ABC}),
    "the same name twice": Case("the later one gets a number",
        tar(A, B, member(b"a.txt", b"2nd"), member(b"a.txt", b"3rd")),
        {**_AB, b"a.txt~2": b"2nd", b"a.txt~3": b"3rd"}),
    "file and directory of one name": Case("the file gets a number",
        tar(member(b"a", b"aaa"), member(b"a/b.txt", ABC)), {b"a~2": b"aaa", b"a/b.txt": ABC}),
}
# fmt: on
