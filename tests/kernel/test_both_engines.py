"""The same set by FUSE and by the kernel, side by side: name for name, attribute for attribute, byte for byte.

What is another is in the table of docs/reference/files.md, "Images", and is left out here: inode numbers, the
order of listings, sizes of directories, which error damage gives.
"""

from __future__ import annotations

import errno
import json
import os
import random
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import tars
from tests.conftest import KERNEL, Program, fails
from tests.kernel.mounts import end_mount
from tests.kernel.test_image import LINKS, plain_tar
from tests.tars import member

SIZE_MAX = 1 << 40  # of files whose bytes are compared: one of the odd tars claims more
UNREADABLE = b"reading fails"


class Shown(NamedTuple):
    """What a mount shows of a path; `same` are the first path of the same file, and what is in it."""

    mode: str
    links: int
    owner: tuple[int, int]
    mtime_ns: int
    size: int
    first: bytes
    content: bytes


def everything(mountpoint: Path) -> dict[bytes, Shown]:
    """All that a mount shows but `.wdsfs`."""
    top, firsts, found = os.fsencode(mountpoint), dict[int, bytes](), dict[bytes, Shown]()
    for directory, folders, files in os.walk(top):
        for name in sorted([b"", *folders, *files]):
            path = os.path.join(directory, name)
            about = os.lstat(path)
            is_file = not stat.S_ISDIR(about.st_mode)
            below = os.path.relpath(path, top)
            found[below] = Shown(
                stat.filemode(about.st_mode),
                about.st_nlink,
                (about.st_uid, about.st_gid),
                about.st_mtime_ns,
                about.st_size if is_file else 0,
                firsts.setdefault(about.st_ino, below) if is_file else below,
                content(path, about),
            )
    return found


def content(path: bytes, about: os.stat_result) -> bytes:
    if stat.S_ISLNK(about.st_mode):
        return os.readlink(path)
    if not stat.S_ISREG(about.st_mode) or about.st_size > SIZE_MAX:
        return b""
    try:
        return Path(os.fsdecode(path)).read_bytes()
    except OSError:
        return UNREADABLE


@contextmanager
def both(program: Program, *words: str | Path) -> Iterator[tuple[Path, Path]]:
    """Mounts by FUSE and by the kernel, both at the same time, so that no directory is of a moment of its own."""
    by_kernel = program.directory(KERNEL)
    try:
        program.run("mount", "-q", "-o", "allow_other", *words, program.mountpoint)
        program.run("mount", "-q", "-o", "allow_other", "--engine", "kernel", *words, by_kernel)
        yield program.mountpoint, by_kernel
    finally:
        end_mount(by_kernel)
        program.run("umount", program.mountpoint, code=None)
        by_kernel.rmdir()


def compared(by_fuse: Path, by_kernel: Path) -> dict[bytes, Shown]:
    """What both show, which has to be the same."""
    one, other = everything(by_fuse), everything(by_kernel)
    assert other.keys() == one.keys()
    assert [path for path in one if one[path] != other[path]] == []
    return one


def compare(program: Program, *words: str | Path) -> dict[bytes, Shown]:
    """Mount by both engines and compare; what they show."""
    with both(program, *words) as mounts:
        return compared(*mounts)


WAYS = [
    [],
    ["--layout", "files"],
    ["--names", "full"],
    ["--merge"],
    ["--merge", "--layout", "files"],
    ["-o", "uid=7,gid=8,umask=027"],
    ["--ignore-zeros", "--group-by-key"],
    ["--key-ends", "last-dot"],
    ["--key-ends", "last-dot", "--merge", "--layout", "files"],
    ["--field", "t.txt=json:t"],
    ["--field", "t.txt=json:t", "--merge", "--layout", "files"],
]


@pytest.mark.parametrize("options", WAYS, ids="-".join)
def test_odd_tars(options: list[str], program: Program) -> None:
    """All odd tars as one set, with links, and one in which nothing is odd."""
    for number, (name, case) in enumerate(tars.ODD.items()):
        case.write(program.home / f"set-{number}-{''.join(c if c.isalnum() else '-' for c in name)}.tar")
    program.write("set-links.tar", LINKS)
    program.write("set-plain.tar", plain_tar(3, 60))
    found = compare(program, *options, program.home)
    assert len(found) > 150
    assert any(one.content == UNREADABLE for one in found.values())
    has_links = any(one.links > 1 and one.mode.startswith("-") for one in found.values())
    assert has_links == ("--field" not in options)  # in a view each is a file of its own


@pytest.mark.parametrize("left", [100, 5000, 300_000])
def test_what_can_be_read_of_a_member_that_is_cut_off(left: int, program: Program) -> None:
    """All but a page by FUSE, and but a folio by the kernel; never a wrong byte."""
    content = random.Random(left).randbytes(1 << 20)
    program.write("s.tar", tars.tar(member(b"a.bin", content))[: 512 + left])
    with both(program, "s.tar") as mounts:
        for top, least in zip(mounts, (left - (1 << 12), left - (128 << 10)), strict=True):
            found = read_until_an_error(top / "s/a/bin")
            assert found == content[: len(found)]
            assert least < len(found) <= left


def read_until_an_error(path: Path) -> bytes:
    """In order, by pages."""
    found = b""
    with path.open("rb", buffering=0) as file, fails(errno.EIO, errno.ENODEV):
        while data := file.read(4096):
            found += data
    return found


def sample(number: int) -> list[bytes]:
    about = {"caption": f"caption {number}", "n": {"deep": [number, 0.5]}}
    return [
        member(b"%02d.%s" % (number, column), data)
        for column, data in (
            (b"png" if number % 2 else b"jpg", b"image %d" % number * 300),
            (b"json", json.dumps(about).encode()),
            (b"txt", b"text %d" % number * 100),
            (b"cls", b"%d" % (number % 3)),
        )
    ]


VIEWS = [
    ["--columns", "img=jpg;png", "--field", "caption.txt=json:caption", "--field", "deep.json=json:n.deep"],
    ["--join", "depth.tar", "--associate", "labels.csv", "--names", "full"],
    ["--keys", "labels.csv:key", "--layout", "files"],
    ["--layout", "classes"],
    ["--layout", "classes", "--class-names", "names.txt"],
]


@pytest.mark.parametrize("options", VIEWS, ids=" ".join)
def test_views(options: list[str], program: Program) -> None:
    """Columns chosen and renamed, fields of JSON, decoded members, joined shards, labels, classes."""
    for first in (0, 6):
        members = (one for n in range(6) for one in sample(first + n))
        program.write(f"s{first // 6}.tar", tars.tar(*members))
    depth = (member(b"%02d.depth" % n, b"depth %d" % n * 200) for n in range(12))
    program.write("depth.tar", tars.tar(*depth))
    program.write("labels.csv", "\n".join(["key,label", *(f"{n:02},{n * n}" for n in range(12)), ""]).encode())
    program.write("names.txt", b"cat\ndog\nbird\n")
    found = compare(program, *options, "s{0..1}.tar")
    assert len(found) > 25
    assert not any(one.content == UNREADABLE for one in found.values())
