"""Real mounts: what stat, readdir and read say, how a mount begins and ends, and how it is refused.

What the tools make of a mount is in `test_tools.py`, what a changed shard does to one in `test_stale.py`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import random
import re
import signal
import socket
import stat
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import sets, tars
from tests.conftest import (
    BOTH_ENGINES,
    FUSE,
    KERNEL,
    USER_HOME,
    Mounted,
    Program,
    fails,
    force_unmount,
    need_fuse,
)
from tests.kernel.mounts import need_erofs
from tests.processes import PATIENCE, wait_until
from wdsfs import mount_table
from wdsfs.errors import UsageError
from wdsfs.mount.mount_options import parse_options

libc = ctypes.CDLL(None, use_errno=True)

SMALL = tars.tar(tars.A, tars.B)  # a.txt and b.txt


@pytest.fixture
def small(program: Program) -> Program:
    """The program, with a shard `a.tar`."""
    program.write("a.tar", SMALL)
    return program


def read_back(path: Path) -> dict[bytes, bytes | int]:
    """Everything below a directory: content by relative path; for what cannot be read, the errno."""
    found: dict[bytes, bytes | int] = {}
    top = os.fsencode(path)
    for directory, _, files in os.walk(top, onerror=_raise):
        for name in files:
            full = os.path.join(directory, name)
            found[os.path.relpath(full, top)] = content_or_errno(full)
    return found


def content_or_errno(path: bytes) -> bytes | int:
    """Not by the size that stat says: a damaged shard may say anything."""
    try:
        with open(path, "rb", buffering=0) as file:
            return b"".join(iter(lambda: file.read(1 << 20), b""))
    except OSError as error:
        return error.errno or -1


def _raise(error: OSError) -> None:
    raise error


# --- a set that many tests read ------------------------------------------------------------------------------

BIG = random.Random(3).randbytes((3 << 20) + 12_345)
# Times that no file system has, too: these are shown as some time, and nothing breaks.
TIMES = [-(1 << 31), -1, 0, 1, 1 << 31, 1 << 33, *(1 << n for n in range(34, 80))]
ORDER = random.Random(1).sample([f"{number:04d}" for number in range(3000)], 3000)
MANY = {b"%04d" % number: random.Random(number).randbytes(number) for number in range(1500)}
EXTENSIONS = ["z", "a.b", "M", "m"]
LONG = [b"k" * 255, b"k" * 256, b"k" * 1000]


def shown_shards() -> Iterator[tuple[str, bytes]]:
    yield "a", SMALL
    yield "d", tars.tar(tars.member(b"d/a.txt", b"x" * 1025, mtime=1_600_000_000), tars.member(b"d/a.cls"))
    yield "n", tars.tar(tars.pax({b"mtime": b"1500000000.123456789"}), tars.member(b"n.txt", b"n"), tars.A)
    yield "times", tars.tar(*(tars.member(b"%d.txt" % n, mtime=time) for n, time in enumerate(TIMES)))
    names = (f"{key}.{extension}".encode() for key in ORDER for extension in EXTENSIONS)
    yield "order", tars.tar(*map(tars.member, names))
    yield "wide", tars.tar(*(tars.member(b"a.%d" % number, b"%d" % number) for number in range(10_000)))
    yield "many", tars.tar(*(tars.member(name + b".x", content) for name, content in MANY.items()))
    yield "huge", tars.tar(*(tars.header(b"%05d.x" % number) for number in range(50_000)))
    yield "long", tars.tar(*(tars.gnu_long(name + b".x") + tars.member(b"", name[:3]) for name in LONG))
    yield "up", tars.tar(tars.member(b"d/e/a.txt", b"x"), tars.member(b"../../b.txt", b"y"))
    yield "big", tars.tar(tars.A, tars.member(b"big.bin", BIG), tars.B)


@pytest.fixture(scope="module")
def shown(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    """The set, mounted once for all tests that only read it, by an engine."""
    if request.param == KERNEL:
        need_erofs()
    program = Program(tmp_path_factory.mktemp("shown"), engine=request.param)
    for name, content in shown_shards():
        program.write(f"{name}.tar", content)
    tars.write_large(program.home / "large.tar")
    with program.mounted("*.tar") as mounted:
        yield mounted


BY_BOTH = pytest.mark.parametrize("shown", [FUSE, KERNEL], indirect=True)
BY_FUSE = pytest.mark.parametrize("shown", [FUSE], indirect=True)


# --- what stat says ----------------------------------------------------------------------------------------


@BY_FUSE
def test_stat_is_complete(shown: Mounted) -> None:
    file = (shown.path / "d/d/a/txt").stat()
    assert stat.filemode(file.st_mode) == "-r--r--r--"
    assert (file.st_size, file.st_blocks, file.st_nlink) == (1025, 3, 1)
    assert (file.st_uid, file.st_gid) == (os.getuid(), os.getgid())
    assert file.st_mtime_ns == file.st_atime_ns == file.st_ctime_ns == 1_600_000_000 * 10**9
    assert file.st_blksize == 128 << 10
    empty = (shown.path / "d/d/a/cls").stat()
    assert (empty.st_size, empty.st_blocks) == (0, 0)
    assert (shown.path / "n/n/txt").stat().st_mtime_ns == 1_500_000_000_123_456_789
    sample = (shown.path / "d/d/a").stat()
    assert stat.filemode(sample.st_mode) == "dr-xr-xr-x"
    assert (sample.st_nlink, sample.st_blocks) == (2, 0)
    assert sample.st_mtime_ns == file.st_mtime_ns
    assert [(shown.path / path).stat().st_nlink for path in ("d/d", "d")] == [3, 3]
    assert shown.path.stat().st_nlink == 2 + len(os.listdir(shown.path))
    assert shown.path.stat().st_dev != shown.path.parent.stat().st_dev
    totals = os.statvfs(shown.path)
    assert totals.f_blocks * totals.f_frsize > 9 << 30
    assert (totals.f_bfree, totals.f_bavail, totals.f_ffree, totals.f_namemax) == (0, 0, 0, 255)
    assert totals.f_flag & os.ST_RDONLY


@BY_BOTH
def test_times_before_1970_and_after_2038(shown: Mounted) -> None:
    assert [(shown.path / f"times/{n}/txt").stat().st_mtime for n in range(6)] == TIMES[:6]
    assert len(read_back(shown.path / "times")) == len(TIMES)


def inodes(top: Path) -> dict[str, int]:
    return {str(path.relative_to(top)): path.lstat().st_ino for path in [top, *top.rglob("*")]}


@BOTH_ENGINES
@pytest.mark.parametrize("options", [[], ["--merge", "--layout", "files"]])
def test_inodes_are_unique_and_the_same_after_a_remount(program: Program, options: list[str]) -> None:
    for name in "ab":
        program.write(f"{name}.tar", tars.tar(*(tars.member(b"%c/%d.txt" % (ord(name), n)) for n in range(20))))
    with program.mounted(*options, "{a,b}.tar") as mounted:
        first = inodes(mounted.path)
        assert len(set(first.values())) == len(first) > 40
    with program.mounted(*options, "{a,b}.tar") as mounted:
        assert inodes(mounted.path) == first


@BY_BOTH
def test_readdir_tells_the_inodes_of_stat(shown: Mounted) -> None:
    for directory in (shown.path, shown.path / "a", shown.path / "a/a"):
        with os.scandir(directory) as listing:
            entries = list(listing)
        assert entries
        assert all(entry.inode() == os.lstat(entry.path).st_ino for entry in entries)
        listed = {name: inode for inode, name, _ in getdents(directory)}
        assert listed[b"."] == directory.stat().st_ino
        if directory != shown.path:
            assert listed[b".."] == directory.parent.stat().st_ino


def test_extended_attributes_tell_where_things_come_from(program: Program) -> None:
    content = os.urandom(1000)
    shard = program.write(
        "a.tar",
        tars.tar(tars.pax({b"path": b"./d/a.b\0c.jpg"}), tars.member(b"x"), tars.member(b"d/e.txt", content)),
    )
    names = ["user.wdsfs.shard", "user.wdsfs.key", "user.wdsfs.member", "user.wdsfs.offset"]
    with program.mounted("a.tar") as mounted:
        file = mounted.path / "a/d/e/txt"
        assert os.listxattr(file) == names
        assert os.getxattr(file, "user.wdsfs.shard") == bytes(shard)
        assert os.getxattr(file, "user.wdsfs.key") == b"d/e"
        assert os.getxattr(file, "user.wdsfs.member") == b"d/e.txt"
        offset = int(os.getxattr(file, "user.wdsfs.offset"))
        assert shard.read_bytes()[offset : offset + 1000] == content
        assert os.getxattr(file.parent, "user.wdsfs.key") == b"d/e"
        assert os.listxattr(file.parent) == names[:2]
        assert os.listxattr(mounted.path / "a") == names[:1]
        assert os.listxattr(mounted.path) == []
        escaped = mounted.path / "a/d/a/b%00c.jpg"
        assert os.getxattr(escaped, "user.wdsfs.member") == b"./d/a.b\0c.jpg"
        for name in ("user.wdsfs.nothing", "user.other", "security.selinux", "system.posix_acl_access"):
            with fails(errno.ENODATA, errno.EOPNOTSUPP):
                os.getxattr(file, name)
        assert b"user.wdsfs.member" in program.tool("getfattr", "-d", file)


# --- listings ----------------------------------------------------------------------------------------------


def getdents(directory: Path, size: int = 1 << 15, after: int = 0) -> list[tuple[int, bytes, int]]:
    """The entries behind a position as getdents64(2) gives them into a buffer: inode, name, the next position."""
    buffer = ctypes.create_string_buffer(size)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    found = []
    try:
        os.lseek(fd, after, os.SEEK_SET)
        while got := libc.syscall(217, fd, buffer, size):  # x86-64; the test of small buffers says so
            assert got > 0, os.strerror(ctypes.get_errno())
            data, at = ctypes.string_at(buffer, got), 0  # once: `buffer.raw` copies all of it each time
            while at < got:
                inode, position, length = struct.unpack_from("<QqH", data, at)
                found.append((inode, data[at + 19 : at + length].partition(b"\0")[0], position))
                at += length
    finally:
        os.close(fd)
    return found


@BY_FUSE
def test_a_listing_is_in_the_order_of_the_tar(shown: Mounted) -> None:
    for _ in range(2):
        assert os.listdir(shown.path / "order") == ORDER
    assert os.listdir(shown.path / "order" / ORDER[7]) == EXTENSIONS


@BY_BOTH
def test_a_huge_directory_in_small_pieces(shown: Mounted) -> None:
    """Complete and none twice, whatever the size of the buffer that the entries are asked for with."""
    expected = [b".", b"..", *(b"%05d" % number for number in range(50_000))]
    for size in (3000, 1 << 20):
        assert [name for _, name, _ in getdents(shown.path / "huge", size)] == expected
    if shown.program.engine == FUSE:
        with shown.program.mounted("--merge", "huge.tar", at=shown.program.directory("merged")) as merged:
            assert [name for _, name, _ in getdents(merged.path, 3000)] == expected


@BY_FUSE
def test_telldir_and_seekdir(shown: Mounted) -> None:
    """A program can go back to a position in a listing, also beyond the end of one read."""
    entries = getdents(shown.path / "order")
    assert len(entries) == 3002
    for at in random.Random(2).sample(range(3002), 40):
        assert getdents(shown.path / "order", after=entries[at][2]) == entries[at + 1 :]


@BY_BOTH
def test_10000_extensions_in_one_sample(shown: Mounted) -> None:
    sample = shown.path / "wide/a"
    listed = os.listdir(sample)  # by the kernel in the order of the names
    in_order = listed if shown.program.engine == FUSE else sorted(listed, key=int)
    assert in_order == [str(number) for number in range(10_000)]
    for number in (0, 1, 4999, 9999):
        assert (sample / str(number)).read_bytes() == b"%d" % number
    assert not (sample / "10000").exists()


def test_1000000_samples_in_one_shard(program: Program) -> None:
    """Ready, and found by name, in memory that does not grow with the shard."""
    count = 1_000_000
    sets.write_samples(program.home / "a.tar", count)
    with program.mounted("a.tar") as mounted:
        for number in (0, 1, 499_999, 999_999):
            assert (mounted.path / f"a/{number:07d}/x").stat().st_size == 0
        assert not (mounted.path / f"a/{count:07d}").exists()
        with os.scandir(mounted.path / "a") as entries:
            assert [entry.name for entry in itertools.islice(entries, 5000)] == [f"{n:07d}" for n in range(5000)]
        report = mounted.status()
        assert (report["samples"], report["members"]) == (count, count)
        assert report["memory_bytes"] < 200 << 20


# --- names -------------------------------------------------------------------------------------------------


@BY_BOTH
def test_names_at_the_limits(shown: Mounted) -> None:
    names = os.listdir(os.fsencode(shown.path / "long"))
    assert LONG[0] in names
    assert [len(name) for name in names] == [255, 255, 255]
    assert len(set(names)) == 3
    assert len(read_back(shown.path / "long")) == 3
    for length in (256, 1000, 1024, 1025, 4000):
        with fails(errno.ENAMETOOLONG):
            os.stat(shown.path / ("k" * length))


@BY_BOTH
def test_missing_paths_give_the_usual_errors(shown: Mounted) -> None:
    for name in ("b", "a/nothing", "a/a/jpg", "a/a/txt~2", "a/A", "a/a/TXT", "a/a.txt", "a/./b/../c"):
        for _ in range(2):
            with pytest.raises(FileNotFoundError):
                os.stat(shown.path / name)
            with pytest.raises(FileNotFoundError):
                os.open(shown.path / name, os.O_RDONLY)
    with pytest.raises(NotADirectoryError):
        os.stat(shown.path / "a/a/txt/more")
    with pytest.raises(NotADirectoryError):
        os.listdir(shown.path / "a/a/txt")
    with pytest.raises(IsADirectoryError):
        (shown.path / "a/a").read_bytes()


def test_a_request_wakes_only_the_worker_that_answers(small: Program) -> None:
    """The kernel wakes whoever polls its descriptor, at each request. For each that is another switch of tasks."""
    with small.mounted("a.tar") as mounted:
        found: list[set[int]] = []

        def there_is_one() -> bool:
            found.append(mounted.processes() - set(mounted.status()["processes"]))
            return len(found[-1]) == 1

        wait_until(there_is_one, "only the process that follows changes of shards to be left")
        [follower] = found[-1]
        before = sleeps(follower)
        for number in range(300):
            with pytest.raises(FileNotFoundError):
                os.stat(mounted.path / f"a/a/{number}")
        assert sleeps(follower) < before + 100


def sleeps(pid: int) -> int:
    """How often a process has gone to sleep."""
    [line] = re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    return int(line)


@BY_BOTH
def test_dot_dot_stays_in_the_tree(shown: Mounted) -> None:
    deep = shown.path / "up/d/e/a"
    for steps, place in enumerate((shown.path / "up", shown.path, shown.path.parent), 3):
        assert os.path.samefile(f"{deep}/" + "../" * steps, place)
    fd = os.open(deep, os.O_RDONLY)
    try:
        assert os.stat("..", dir_fd=fd).st_ino == deep.parent.stat().st_ino
    finally:
        os.close(fd)
    assert sorted(read_back(shown.path / "up")) == [b"%2E%2E/%2E%2E/b/txt", b"d/e/a/txt"]


# --- reading -----------------------------------------------------------------------------------------------


@BY_BOTH
def test_reads_at_any_offset(shown: Mounted) -> None:
    fd, size = os.open(shown.path / "big/big/bin", os.O_RDONLY), len(BIG)
    try:
        for place in (0, 1, 511, 512, 4095, 4097, 131_071, 131_072, size - 1, size, size + 1, size + (1 << 40)):
            for length in (0, 1, 513, 131_073, size):
                assert os.pread(fd, length, place) == BIG[place : place + length]
        some = random.Random(4)
        for _ in range(300):
            place, length = some.randrange(size + 10), some.randrange(200_000)
            assert os.pread(fd, length, place) == BIG[place : place + length]
        assert os.lseek(fd, 0, os.SEEK_END) == size
        assert os.lseek(fd, -3, os.SEEK_END) == size - 3
        assert os.read(fd, 100) == BIG[-3:]
        assert os.read(fd, 100) == b""
        assert os.lseek(fd, 0, os.SEEK_HOLE) == size
    finally:
        os.close(fd)


@BY_FUSE
def test_mmap_sendfile_and_reads_past_the_page_cache(shown: Mounted, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    with (shown.path / "big/big/bin").open("rb") as file, copy.open("wb") as out:
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as shared:
            assert shared[1_000_000:1_000_100] == BIG[1_000_000:1_000_100]
            assert shared[:] == BIG
        with mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as private:
            private[0] = BIG[0] ^ 1
        assert file.read(1) == BIG[:1]
        at = 0
        while moved := os.sendfile(out.fileno(), file.fileno(), at, 1 << 20):
            at += moved
        assert copy.read_bytes() == BIG
        # The kernel has no short cut from one file system to another; tools then copy by reading.
        with fails(errno.EXDEV):
            os.copy_file_range(file.fileno(), out.fileno(), 1 << 20, 0)
        fd = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        with os.fdopen(fd, "rb", buffering=0), mmap.mmap(-1, 1 << 20) as buffer:
            assert os.preadv(fd, [buffer], 1 << 20) == 1 << 20
            assert buffer[:] == BIG[1 << 20 : 2 << 20]


@BY_BOTH
def test_readers_at_the_same_time(shown: Mounted) -> None:
    """A large file in pieces of many sizes, and many small ones."""

    def read(seed: int) -> bool:
        some = random.Random(seed)
        with (shown.path / "big/big/bin").open("rb", buffering=0) as file:
            big = b"".join(iter(lambda: file.read(some.randrange(1, 300_000)), b""))
        keys = some.sample([*MANY], len(MANY))
        return (big, {key: (shown.path / f"many/{key.decode()}/x").read_bytes() for key in keys}) == (BIG, MANY)

    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        assert all(threads.map(read, range(6)))


@BY_BOTH
def test_a_member_over_8_gib(shown: Mounted) -> None:
    file = shown.path / "large/big/bin"
    assert file.stat().st_size == 9 << 30
    with file.open("rb") as opened:
        opened.seek((9 << 30) - 5)
        assert opened.read() == b"\0\0end"
    assert (shown.path / "large/a/txt").read_bytes() == b"aaa"


@BY_BOTH
def test_locks_and_access_checks(shown: Mounted) -> None:
    path = shown.path / "a/a/txt"
    assert os.access(path, os.R_OK)
    assert not os.access(path, os.W_OK)
    with path.open("rb") as one, path.open("rb") as other:
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with fails(errno.EWOULDBLOCK):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(one, fcntl.LOCK_UN)
        fcntl.lockf(other, fcntl.LOCK_SH | fcntl.LOCK_NB)


# --- nothing can be written --------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Path], object]] = {
    "open to write": lambda top: os.open(top / "a/a/txt", os.O_WRONLY),
    "open to read and write": lambda top: os.open(top / "a/a/txt", os.O_RDWR),
    "open to truncate": lambda top: os.open(top / "a/a/txt", os.O_RDONLY | os.O_TRUNC),
    "open to append": lambda top: os.open(top / "a/a/txt", os.O_WRONLY | os.O_APPEND),
    "create": lambda top: os.open(top / "a/a/new", os.O_WRONLY | os.O_CREAT),
    "create at the top": lambda top: os.open(top / "new", os.O_WRONLY | os.O_CREAT),
    "mkdir": lambda top: os.mkdir(top / "a/new"),
    "rmdir": lambda top: os.rmdir(top / "a/a"),
    "unlink": lambda top: os.unlink(top / "a/a/txt"),
    "rename": lambda top: os.rename(top / "a/a/txt", top / "a/a/other"),
    "rename a directory": lambda top: os.rename(top / "a/a", top / "a/c"),
    "link": lambda top: os.link(top / "a/a/txt", top / "a/a/other"),
    "symlink": lambda top: os.symlink("x", top / "a/a/other"),
    "mknod": lambda top: os.mknod(top / "a/fifo", stat.S_IFIFO | 0o600),
    "chmod": lambda top: os.chmod(top / "a/a/txt", 0o777),
    "chown": lambda top: os.chown(top / "a/a/txt", 1, 1),
    "utime": lambda top: os.utime(top / "a/a/txt"),
    "truncate": lambda top: os.truncate(top / "a/a/txt", 0),
    "setxattr": lambda top: os.setxattr(top / "a/a/txt", "user.x", b"y"),
    "removexattr": lambda top: os.removexattr(top / "a/a/txt", "user.wdsfs.key"),
    "unnamed file": lambda top: os.open(top / "a", os.O_WRONLY | os.O_TMPFILE),
}


@BY_BOTH
def test_everything_that_writes_gets_erofs(shown: Mounted) -> None:
    for write in WRITES.values():
        with fails(errno.EROFS):
            write(shown.path)
    assert read_back(shown.path / "a") == {b"a/txt": b"aaa", b"b/txt": tars.ABC}


# --- odd and bad shards ------------------------------------------------------------------------------------


def _file_name(case: str) -> str:
    return case.replace("/", "|")


# What is reported when it is mounted; the rest only `check` tells.
BAD = {_file_name(name) for name, case in tars.ODD.items() if case.problems}


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Program:
    program = Program(tmp_path_factory.mktemp("odd"))
    for name, case in tars.ODD.items():
        case.write(program.home / f"{_file_name(name)}.tar")
    program.write("good.tar", SMALL)
    return program


def test_every_odd_shard_of_a_set(odd: Program) -> None:
    """The mount works, each shard shows what is intact in it, and status names those that are not whole."""
    with odd.mounted("--layout", "files", odd.home) as mounted:
        named = sorted(BAD)[:3]
        mounted.expect_log(*(f"{re.escape(name)}.tar: .*; see: wdsfs check" for name in named))
        mounted.expect_log(f"{len(BAD) - 3} more shards are damaged", "cut in content.tar.* ends ")
        mounted.allow_log("huge size.tar.* ends ")
        assert (mounted.path / "good/b.txt").read_bytes() == tars.ABC
        for name, case in tars.ODD.items():
            shown = read_back(mounted.path / _file_name(name))
            # A cut member may be large: only whether it can be read is asked.
            expected = {path: errno.EIO if content is None else content for path, content in case.files.items()}
            assert shown == expected, f"{name}: {case.expected}"
        assert {Path(one["shard"]).stem for one in mounted.status()["damaged"]} == BAD
        assert all(one["problem"] for one in mounted.status()["damaged"])


@pytest.mark.parametrize("options", [[], ["--names", "full"], ["--merge"], ["--merge", "--layout", "files"]])
def test_odd_shards_in_the_other_views(odd: Program, options: list[str]) -> None:
    """Each file that is shown can be read or gives EIO; `find` and the listing of each directory agree."""
    with odd.mounted(*options, odd.home) as mounted:
        mounted.allow_log("; see: wdsfs check", "(cut in content|huge size).tar.* ends ")
        shown = read_back(mounted.path)
        assert len(shown) > 60
        assert set(map(type, shown.values())) == {bytes, int}
        assert {content for content in shown.values() if isinstance(content, int)} == {errno.EIO}
        found = odd.tool("find", ".", "-type", "f", "-print0", cwd=mounted.path)
        assert {path.removeprefix(b"./") for path in found.split(b"\0") if path} == set(shown)


@BOTH_ENGINES
def test_links_are_as_stored(program: Program) -> None:
    """Hard links are one file; symbolic links lead where they say, and are in no sample."""
    targets = {b"l1": b"a.txt", b"d/l2": b"../b.txt", b"l3": b"/etc/hostname", b"l4": b"gone", b"l5": b"l5"}
    links = [tars.member(name, kind=tars.SYMLINK, link=target) for name, target in targets.items()]
    hard = tars.member(b"d/l.txt", kind=tars.HARD_LINK, link=b"b.txt")
    program.write("a.tar", tars.tar(tars.A, tars.B, hard, *links))
    with program.mounted("--layout", "files", "a.tar") as mounted:
        one, other = (mounted.path / "a/b.txt").stat(), (mounted.path / "a/d/l.txt").stat()
        assert (one.st_ino, one.st_nlink, one.st_size) == (other.st_ino, 2, 768)
        assert (mounted.path / "a/a.txt").stat().st_nlink == 1
        for name, target in targets.items():
            path = os.path.join(bytes(mounted.path), b"a", name)
            assert os.readlink(path) == target
            assert (os.lstat(path).st_size, os.lstat(path).st_mode) == (len(target), stat.S_IFLNK | 0o777)
        assert (mounted.path / "a/l1").read_bytes() == b"aaa"
        assert (mounted.path / "a/d/l.txt").read_bytes() == (mounted.path / "a/d/l2").read_bytes() == tars.ABC
        with fails(errno.ELOOP):
            (mounted.path / "a/l5").read_bytes()
    with program.mounted("a.tar") as mounted:
        assert sorted(os.listdir(mounted.path / "a")) == ["a", "b"]


# --- who may see it, and as whose ---------------------------------------------------------------------------


def test_an_ordinary_user_mounts(user_program: Program) -> None:
    program = user_program
    program.write("a.tar", SMALL)
    with program.mounted("a.tar", ends_itself=True) as mounted:
        path = mounted.path / "a/b/txt"
        assert program.tool("cat", path) == tars.ABC
        assert program.tool("stat", "-c", "%u %a %A", path).split() == [b"%d" % program.uid, b"444", b"-r--r--r--"]
        assert mounted.status()["state"] == "running"
        program.tool("sh", "-c", f"! touch {mounted.path}/a/x 2>/dev/null && ! rm {path} 2>/dev/null")
        if program.user:  # not even root sees it without allow_root
            with pytest.raises(PermissionError):
                os.stat(path)
        line = next(one for one in mount_table.mounts() if one.path == bytes(mounted.path))
        assert {"nosuid", "nodev", "ro"} <= set(line.options)
        program.run("umount", mounted.path)
        assert mounted.wait_for_exit() == 0
    with program.mounted("a.tar", ends_itself=True) as mounted:
        kill_all(mounted)
        program.run("umount", mounted.path)
        assert mounted.wait_for_exit() == -signal.SIGKILL


needs_root = pytest.mark.root


@needs_root
def test_allow_other(small: Program, user_program: Program) -> None:
    open_to_all = Path(user_program.home / "all")
    open_to_all.mkdir()
    os.chmod(user_program.home, 0o755)
    with small.mounted("-o", "allow_other,uid=12,gid=34,umask=007", "a.tar", at=open_to_all) as mounted:
        found = (mounted.path / "a/a/txt").stat()
        assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (12, 34, 0o440)
        assert stat.S_IMODE(mounted.path.stat().st_mode) == 0o550
        user_program.tool("cat", mounted.path / "a/a/txt", code=1)
    with small.mounted("-o", "allow_other", "a.tar", at=open_to_all) as mounted:
        assert user_program.tool("cat", mounted.path / "a/a/txt") == b"aaa"
    with small.mounted("a.tar", at=open_to_all) as mounted:
        assert user_program.tool("ls", mounted.path, code=2) == b""


def test_the_mount_table_says_what_is_mounted(program: Program) -> None:
    program.write("a,b c.tar", SMALL)
    with program.mounted("a,b c.tar") as mounted:
        (line,) = [one for one in mount_table.mounts() if one.path == bytes(mounted.path)]
        assert (line.fstype, line.source) == ("fuse.wdsfs", b"wdsfs#a,b c.tar")
        assert "ro" in line.options
        assert "default_permissions" in line.super_options
    with program.mounted("-o", "fsname=my\\,data,noatime,noexec", "a,b c.tar") as mounted:
        (line,) = [one for one in mount_table.mounts() if one.path == bytes(mounted.path)]
        assert (line.fstype, line.source) == ("fuse.wdsfs", b"my,data")
        assert "noexec" in line.options
    with program.mounted("-o", "subtype=other", "-o", "ro,noatime", "a,b c.tar", ends_itself=True) as mounted:
        assert mount_table.mounted_at(mounted.path).fstype == "fuse.other"  # type: ignore[union-attr]
        program.refused("mount", "a,b c.tar", mounted.path, code=5)
        program.run("umount", mounted.path)


def test_options_that_mean_nothing_are_refused() -> None:
    refused = "allow_others uid fsname max_read=4096 uid=me uid=-1 gid=4294967295 umask=999 umask=1777 rw remount"
    for option in refused.split():
        with pytest.raises(UsageError, match=f"-o {option}"):
            parse_options([f"ro,{option}"])


@needs_root  # for others fusermount3 looks as root, which the kernel does not let in without allow_other
def test_auto_unmount(small: Program) -> None:
    """The mount point is free again when the whole mount is killed."""
    with small.mounted("-o", "auto_unmount", "a.tar", ends_itself=True) as mounted:
        kill_all(mounted, but=_is_fusermount)
        assert mounted.wait_for_exit() == -signal.SIGKILL
        wait_until(lambda: mount_table.mounted_at(mounted.path) is None, "the unmount")
        assert small.json("status", mounted.path)[0]["state"] == "dead"
        small.run("umount", mounted.path)


def _is_fusermount(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text().startswith("fusermount")


def kill_all(mounted: Mounted, but: Callable[[int], bool] = lambda pid: False) -> None:
    """Kill the processes of a mount. First stop them, the one that forks the others first: none escapes."""
    os.kill(mounted.pid, signal.SIGSTOP)
    wait_until(lambda: _state(mounted.pid) == b"T", "the supervisor to stop")
    pids = {pid for pid in mounted.processes() if not but(pid)}
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)
    # Those that are children of this process have become zombies, the others are gone.
    wait_until(lambda: not any(is_running(pid) for pid in pids), "the death of all")


def is_dead(path: Path) -> bool:
    """As a script would see it: by stat alone."""
    try:
        os.stat(path)
    except OSError as error:
        return error.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    return False


def is_running(pid: int) -> bool:
    return _state(pid) not in (b"", b"Z")


def _state(pid: int) -> bytes:
    """The state of a process as a letter of proc_pid_stat(5), empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the second if it ends between the opening and the reading
        return b""


# --- death -------------------------------------------------------------------------------------------------


def test_a_killed_mount(small: Program) -> None:
    """It is dead, status says so, mounting there says what to type, and that clears it."""
    with small.mounted("a.tar", ends_itself=True) as mounted:
        kill_all(mounted)
        with fails(errno.ENOTCONN, errno.ECONNABORTED):
            os.listdir(mounted.path)
        assert mounted.status()["state"] == "dead"
        assert b"dead" in small.run("status").stdout
        wait_until(lambda: is_dead(mounted.path), "stat to say so")
        message = small.refused("mount", "a.tar", mounted.path, code=5)
        assert f"wdsfs umount {mounted.path}" in message
        for command, code in (("where", 6), ("ls", 3), ("view", 3)):
            assert "wdsfs umount MOUNTPOINT" in small.refused(command, mounted.path / "a", code=code)
        small.run("umount", mounted.path)
        assert mounted.wait_for_exit() == -signal.SIGKILL
    with small.mounted("a.tar") as mounted:
        assert (mounted.path / "a/a/txt").read_bytes() == b"aaa"


def test_a_worker_is_replaced_also_while_a_shard_cannot_be_indexed(program: Program) -> None:
    """One tree over all shards wants them all before it serves. That is no reason for a worker to end."""
    shards = [program.write("a.tar", SMALL), program.write("b.tar", SMALL)]
    with program.mounted("--merge", "--allow-missing", *shards) as mounted:
        mounted.expect_log("ended .killed by SIGKILL.: replacing it", "is not a regular file; wdsfs tries again")
        # Between two steps of the test, there is no such file.
        mounted.allow_log("b.tar has changed", "a shard has changed while", "the shard is gone", "no such shard")
        os.rename(shards[1], program.home / "kept")
        shards[1].mkdir()
        before = workers(mounted)
        for one in before:
            os.kill(one, signal.SIGKILL)
        wait_until(lambda: len(workers(mounted) - before) == len(before), "other workers")
        wait_until(lambda: sorted(_listed(mounted.path)) == ["a", "b"], "the other shard's tree")
        shards[1].rmdir()
        os.rename(program.home / "kept", shards[1])
        wait_until(lambda: sorted(_listed(mounted.path)) == ["a", "a~b", "b", "b~b"], "the whole tree to be back")
        assert mounted.status()["restarts"] == len(before)


def _listed(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(path)
    return []


def workers(mounted: Mounted) -> set[int]:
    """Without the process that hears of changes, which serves nobody."""
    return {pid for pid in mounted.status()["processes"] if pid != mounted.pid and is_running(pid)}


@pytest.mark.parametrize(
    ("number", "foreground"), [(signal.SIGTERM, False), (signal.SIGINT, True), (signal.SIGHUP, True)]
)
def test_signals_end_a_mount_in_good_order(small: Program, number: signal.Signals, foreground: bool) -> None:
    """Also one that is in use."""
    with small.mounted("a.tar", foreground=foreground, ends_itself=True) as mounted:
        fd = os.open(mounted.path / "a/a/txt", os.O_RDONLY)
        assert os.read(fd, 9) == b"aaa"
        os.kill(mounted.pid, number)
        assert mounted.wait_for_exit() == 0
        assert mount_table.mounted_at(mounted.path) is None
        with fails(errno.ENOTCONN, errno.ECONNABORTED):  # the second if it was sent while the last process ended
            os.close(fd)
        assert number.name in mounted.log()


def test_an_early_signal_leaves_no_dead_mount(small: Program) -> None:
    """Whenever it comes, the mount point is usable afterwards."""
    need_fuse()
    small.run("index", "a.tar")
    for step in range(0, 12, 2):
        process = small.start("mount", "-f", "a.tar", small.mountpoint, stderr=subprocess.DEVNULL)
        try:
            # The work of the process so far is the clock: the signal comes ever later in its start.
            wait_until(lambda: _cpu_ticks(process.pid) >= 8 + 2 * step, "it to get on")  # noqa: B023  # called at once
            process.terminate()
            process.wait(PATIENCE)
            assert mount_table.mounted_at(small.mountpoint) is None
            assert os.listdir(small.mountpoint) == []
        finally:
            process.kill()
            force_unmount(small.mountpoint)
            process.wait()


def _cpu_ticks(pid: int) -> int:
    """Time that a process has computed for; much, when it is gone or mounted and idle."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    idle = fields[0] in (b"Z", b"S")
    return 1000 if idle else int(fields[11]) + int(fields[12])


# --- ending it ---------------------------------------------------------------------------------------------


def test_umount_returns_when_the_daemon_is_gone(small: Program) -> None:
    with small.mounted("a.tar", ends_itself=True) as mounted:
        processes = mounted.processes()
        done = small.run("umount", mounted.path)
        # On a busy machine it says after a while what it waits for.
        assert re.fullmatch(rb"(wdsfs: waiting for process \d+: .*\n)?", done.stderr)
        assert done.stdout == b""
        assert not any(is_running(pid) for pid in processes)
        # The daemon has waited for all others: none has become a child of the tests.
        assert [pid for pid in processes if os.path.exists(f"/proc/{pid}")] == [mounted.pid]
        assert mounted.wait_for_exit() == 0
        assert "no mount of wdsfs is there" in small.refused("umount", mounted.path, code=5)


@pytest.mark.parametrize("stopped", ["workers", "daemon", "all"])
def test_umount_of_a_mount_whose_processes_are_stopped(small: Program, stopped: str) -> None:
    """Somebody has sent them SIGSTOP, and forgotten it."""
    with small.mounted("a.tar", ends_itself=True) as mounted:
        workers = [pid for pid in mounted.status()["processes"] if pid != mounted.pid]
        pids = {"workers": workers, "daemon": [mounted.pid], "all": [mounted.pid, *workers]}[stopped]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: all(_state(pid) == b"T" for pid in pids), "them to stop")
        small.run("umount", mounted.path)
        mounted.check_exit()
        assert not any(map(is_running, pids))


def test_umount_of_a_mount_in_use(program: Program) -> None:
    """It is refused, and names the user. A lazy one frees the mount point for another mount; the user reads on."""
    program.write("a.tar", tars.tar(tars.member(b"a.bin", BIG)))
    with program.mounted("a.tar", ends_itself=True) as mounted, (mounted.path / "a/a/bin").open("rb") as file:
        message = program.refused("umount", mounted.path, code=5)
        assert f"{Path('/proc/self/comm').read_text().strip()} ({os.getpid()}" in message
        assert file.read(10) == BIG[:10]
        program.run("umount", "--lazy", mounted.path)
        assert mount_table.mounted_at(mounted.path) is None
        with program.mounted("a.tar") as new:
            assert file.read() == BIG[10:]
            file.close()
            assert mounted.wait_for_exit() == 0
            assert (new.path / "a/a/bin").read_bytes() == BIG


def test_umount_is_for_mounts_of_wdsfs_only(small: Program) -> None:
    """One that fails does not keep the others."""
    other = small.directory("other")
    with small.mounted("a.tar", ends_itself=True) as one, small.mounted("a.tar", at=other, ends_itself=True):
        assert str(one.path) in small.refused("umount", one.path / "a", code=5)
        for path in ("/proc", small.home, small.home / "missing"):
            small.refused("umount", path, code=5)
        done = small.run("umount", one.path, small.home, other, code=5)
        assert done.stderr.count(b"\n") == 1


@BOTH_ENGINES
def test_umount_by_another_name(small: Program) -> None:
    """However the mount point is written, with links or relative, it is the same mount."""
    (small.home / "link").symlink_to("mnt")
    (small.home / "up").symlink_to(small.home)
    for name in ("link", "up/link"):
        with small.mounted("a.tar", ends_itself=True) as mounted:
            assert small.json("status", name)[0]["pid"] == mounted.pid
            small.run("umount", name)
            assert mounted.wait_for_exit() == 0


# --- beginning it ------------------------------------------------------------------------------------------


def test_a_mount_lets_go_of_the_terminal(program: Program) -> None:
    """Also after several processes have indexed: a program that waits for the end of the output gets it.

    `Program.run` waits for that end.
    """
    for name in "abc":
        with (program.home / f"{name}.tar").open("wb") as shard:
            size = 30 << 20
            shard.write(tars.header(b"a.bin", size))
            shard.seek(size, os.SEEK_CUR)
            shard.write(tars.tar(tars.A))
    with program.mounted("--jobs", "2", "{a..c}.tar") as mounted:
        assert len(os.listdir(mounted.path)) == 3
        terminal = {os.readlink(f"/proc/{pid}/fd/{fd}") for pid in mounted.processes() for fd in (0, 1, 2)}
        assert terminal == {"/dev/null"}
        assert {os.getsid(pid) for pid in mounted.processes()} == {mounted.pid}
        assert os.readlink(f"/proc/{mounted.pid}/cwd") == "/"


def test_a_mount_in_the_foreground_tells_the_service_manager(small: Program) -> None:
    """READY=1 comes when the tree is usable; `mounted` has waited for it. Nor is one needed."""
    with small.mounted("a.tar", foreground=True) as mounted:
        assert os.listdir(mounted.path) == ["a"]
        assert mounted.status()["log"] == str(small.home / "foreground.log")  # where stderr goes
        assert f"mounted 1 shard at {mounted.path}" in mounted.log()
    gone = {"NOTIFY_SOCKET": str(small.home / "gone")}
    with small.start("mount", "-f", "a.tar", small.mountpoint, env=gone, stderr=subprocess.PIPE) as process:
        wait_until(lambda: small.registration(small.mountpoint).exists(), "the mount")
        assert (small.mountpoint / "a/a/txt").read_bytes() == b"aaa"
        small.run("umount", small.mountpoint)
        assert gone["NOTIFY_SOCKET"].encode() in process.stderr.read()  # type: ignore[union-attr]
    assert process.returncode == 0


def test_lazy_indexes_a_shard_when_it_is_used(program: Program) -> None:
    for name in "abc":
        program.write(f"{name}.tar", SMALL)
    with program.mounted("--lazy", "{a..c}.tar") as mounted:
        assert os.listdir(mounted.path) == ["a", "b", "c"]
        assert stat.S_ISDIR((mounted.path / "b").stat().st_mode)
        assert mounted.status()["indexed"] == 0
        with concurrent.futures.ThreadPoolExecutor(8) as threads:  # by many at once
            contents = threads.map(lambda _: (mounted.path / "b/b/txt").read_bytes(), range(8))
            assert {*contents} == {tars.ABC}
        report = mounted.status()
        assert (report["indexed"], report["members"]) == (1, 2)
        assert len(read_back(mounted.path)) == 6
        report = mounted.status()
        assert (report["indexed"], report["samples"]) == (3, 6)
        assert os.statvfs(mounted.path).f_files == 6


@pytest.mark.parametrize("name", ["a b\new,ü\\c\udcff%n$(id)`id`'\"", "-o"])
def test_mount_points_and_shards_of_any_name(program: Program, name: str) -> None:
    program.write(f"shards {name}/{name}.tar", SMALL)
    place = program.directory(f"at {name}")
    with program.mounted(f"shards {name}/{name}.tar", at=place) as mounted:
        assert (mounted.path / name / "b/txt").read_bytes() == tars.ABC
        assert mounted.status()["mountpoint"] == str(place)
        assert os.getxattr(mounted.path / name / "b/txt", "user.wdsfs.shard").endswith(os.fsencode(f"{name}.tar"))


def test_paths_are_relative_to_where_it_was_typed(program: Program) -> None:
    program.write("d/a.tar", SMALL)
    with program.mounted("--index-dir", "../own index", "*.tar", cwd=program.home / "d") as mounted:
        assert (mounted.path / "a/a/txt").read_bytes() == b"aaa"
        assert mounted.status()["index"] == str(program.home / "own index")
        assert (program.home / "own index" / "data.mdb").exists()


def test_closed_standard_streams(small: Program) -> None:
    """Nothing that the daemon opens may take their numbers: what is written to them would go there."""
    need_fuse()
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *small.command("mount", "a.tar", small.mountpoint)]
    done = subprocess.run(command, env=small.environment, cwd=small.home, timeout=PATIENCE, check=False)
    try:
        assert done.returncode == 0
        assert (small.mountpoint / "a/a/txt").read_bytes() == b"aaa"
    finally:
        small.run("umount", small.mountpoint)
    assert not small.registration(small.mountpoint).exists()


def test_a_state_directory_that_cannot_be_made(small: Program) -> None:
    """The mount works, and says that it keeps its log elsewhere."""
    small.write("state", b"a file where the directory should be")
    with small.mounted("a.tar") as mounted:
        mounted.expect_log("cannot write a log")
        log = Path(mounted.status()["log"])
        assert log.parent == small.registration(mounted.path).parent
        assert "mounted 1 shard" in log.read_text()
        log.unlink()


def test_an_index_directory_that_cannot_be_made(small: Program) -> None:
    """The mount works with a temporary index, says so, and leaves nothing of it."""
    small.write("file", b"where a directory should be")
    temporary = small.directory("tmp")
    places = {"TMPDIR": str(temporary), "WDSFS_INDEX_DIR": str(small.home / "file" / "index")}
    with small.mounted("a.tar", env=places) as mounted:
        mounted.expect_log("temporary index")
        assert (mounted.path / "a/a/txt").read_bytes() == b"aaa"
        report = mounted.status()
        assert report["index"].startswith(str(temporary))
        assert "temporary index" in report["notices"][0]
    assert list(temporary.iterdir()) == []
    small.run("mount", "a.tar", small.home / "missing", code=5, env=places)
    assert list(temporary.iterdir()) == []


# --- refusals ----------------------------------------------------------------------------------------------


def test_nonempty_hides_the_files_of_a_mount_point_and_gives_them_back(small: Program) -> None:
    small.write("full/file", b"x")
    full = small.home / "full"
    assert "-o nonempty" in small.refused("mount", "a.tar", full, code=5)
    with small.mounted("-o", "nonempty", "a.tar", at=full, ends_itself=True):
        assert os.listdir(full) == ["a"]
        small.run("umount", full)
        assert os.listdir(full) == ["file"]
        (full / "file").unlink()


def test_a_mount_must_not_hide_what_it_needs(program: Program) -> None:
    """Over one of these it would wait for itself for ever."""
    program.write("shards/a.tar", SMALL)
    # A link in the mount point to a shard elsewhere is needed to find it, and so is one from elsewhere into it.
    links, outside = program.directory("links"), program.directory("outside")
    (links / "b.tar").symlink_to(program.home / "shards/a.tar")
    (outside / "c.tar").symlink_to(links / "b.tar")
    (program.home / "state/wdsfs").mkdir(parents=True)
    for shard, place in (
        *(("shards/a.tar", "shards"), ("shards/a.tar", program.home)),
        *(("links/b.tar", links), ("outside/c.tar", links)),
        *(("shards/a.tar", program.home / "index"), ("shards/a.tar", program.home / "state/wdsfs")),  # the log
    ):
        assert "would hide" in program.refused("mount", "-o", "nonempty", shard, place, code=5)
    assert not program.registration(program.mountpoint).exists()


def test_mounting_twice_is_refused(small: Program) -> None:
    (small.home / "link").symlink_to("mnt")
    with small.mounted("a.tar") as mounted:
        for options, place in (([], mounted.path), (["-o", "nonempty"], small.home / "link")):
            assert f"(process {mounted.pid})" in small.refused("mount", *options, "a.tar", place, code=5)


def test_an_unreadable_shard_does_not_stop_the_mount(user_program: Program) -> None:
    """It stays listed, and looking inside gives EIO: never a smaller set."""
    user_program.write("a.tar", SMALL)
    os.chmod(user_program.write("b.tar", SMALL), 0)
    with user_program.mounted("{a,b}.tar") as mounted:
        mounted.expect_log(r"b\.tar: Permission denied")
        assert user_program.tool("ls", mounted.path).split() == [b"a", b"b"]
        assert user_program.tool("cat", mounted.path / "a/a/txt") == b"aaa"
        said = user_program.tool("ls", mounted.path / "b", code=2, stderr=subprocess.STDOUT)
        assert b"Input/output error" in said
        user_program.tool("cat", mounted.path / "b/a/txt", code=1)
        (damaged,) = mounted.status()["damaged"]
        assert damaged["shard"].endswith("b.tar")
    with user_program.mounted("--merge", "--allow-missing", "{a,b}.tar") as mounted:
        mounted.expect_log(r"b\.tar: Permission denied")
        assert user_program.tool("cat", mounted.path / "a/txt") == b"aaa"


def test_the_status_socket_answers_anything(small: Program) -> None:
    """Clients that send, leave at once or never read do not disturb it."""
    with small.mounted("a.tar") as mounted:
        path = str(small.registration(mounted.path).with_suffix(".sock"))
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        clients = [socket.socket(socket.AF_UNIX) for _ in range(20)]
        for number, client in enumerate(clients):
            client.connect(path)
            if number % 3 == 0:
                client.sendall(b"GET / HTTP/1.0\r\n\r\n" * 100)
            if number % 3 == 1:
                client.close()
        assert mounted.status()["state"] == "running"
        for client in clients:
            client.close()
        assert mounted.status()["state"] == "running"


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_left_mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """After anything that the tests have done."""
    yield
    own = (
        bytes(tmp_path_factory.getbasetemp()),
        os.path.join(os.fsencode(tempfile.gettempdir()), USER_HOME.encode()),
    )
    assert [one for one in mount_table.mounts() if one.path.startswith(own)] == []
