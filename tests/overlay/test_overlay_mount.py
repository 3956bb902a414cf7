"""Writable mounts with ordinary tools: whatever is done to one is done to a plain directory, too, and the two are
compared, at once and after the next mount.

What kills of its processes do to such a mount is in `test_overlay_survival.py`, what a commit does in
`test_overlay_commit.py`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import mmap
import os
import re
import shutil
import signal
import stat
import subprocess
import threading
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Mounted, Program, fails, need_fuse, open_the_way
from tests.processes import PATIENCE, wait_until
from tests.writables import shard, walk_directory
from wdsfs.errors import MountError
from wdsfs.mount import live_mount, mount_search
from wdsfs.overlay.upper_files import EXCHANGE, NOREPLACE, SystemCalls

MTIME = 1_600_000_000
COUNT = 4  # samples for each of the things that are done


def content(name: str) -> bytes:
    return (name.encode() + b"-") * 300


# --- the same thing twice ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A directory with COUNT samples of two files, 000.txt, 000.cls, 001.txt ..., in the mount or a copy of it."""

    top: Path
    view: str

    def sample(self, number: int) -> Path:
        return self.top / f"{number:03}" if self.view != "files" else self.top

    def file(self, number: int, extension: str) -> Path:
        name = f"{number:03}.{extension}" if self.view == "files" else extension
        return self.sample(number) / name


@dataclass(frozen=True)
class Pair:
    """A mount and the directory that it is compared with."""

    program: Program
    mounted: Mounted
    view: str
    options: tuple[str, ...]

    def places(self, name: str) -> Iterator[Place]:
        below = () if self.view == "merged" else ("s0",)
        for top in (self.mounted.path, self.program.home / "plain"):
            yield Place(top.joinpath(*below, name), self.view)


VIEWS = {"samples": (), "files": ("--layout", "files"), "merged": ("--merge",)}


def the_shards(names: list[str]) -> list[bytes]:
    rows = itertools.product(names, range(2 * COUNT), ("txt", "cls"))
    members = [
        (number, f"{name}/{number:03}.{ext}", content(f"{name}{number}{ext}")) for name, number, ext in rows
    ]
    return [shard([row[1:] for row in members if (row[0] < COUNT) is first]) for first in (True, False)]


@pytest.fixture(scope="module", params=VIEWS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    need_fuse()
    program = Program(tmp_path_factory.mktemp(f"view-{request.param}"))
    for number, data in enumerate(the_shards(sorted(DONE))):
        program.write(f"s{number}.tar", data)
    options = (*VIEWS[request.param], "--overlay", "o", "s{0..1}.tar")
    with program.mounted(*options) as mounted:
        program.tool("cp", "-a", mounted.path, program.home / "plain")
        yield Pair(program, mounted, request.param, options)
    with program.mounted(*options) as mounted:
        for name in DONE:
            there, plain = Pair(program, mounted, request.param, options).places(name)
            assert picture(there.top) == picture(plain.top), f"{name}: other after a remount"


def picture(top: Path) -> Any:
    """All that a user can see below a directory and that does not change with time."""
    names: defaultdict[int, list[bytes]] = defaultdict(list)
    shown = walk_directory(os.fsencode(top))
    statuses = {path: os.lstat(os.path.join(os.fsencode(top), path)) for path in sorted(shown)}
    for path, status in statuses.items():
        if stat.S_ISREG(status.st_mode):
            names[status.st_ino].append(path)
    return shown, {path: (status.st_mode, status.st_uid) for path, status in statuses.items()}, [*names.values()]


def outcome(action: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return the result, or the number of the error."""
    try:
        return action(*arguments, **options)
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def renameat2(old: Path, new: Path, flags: int) -> None:
    """As `os.rename`, with flags."""
    fd = os.open(old.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        SystemCalls().rename(os.fsencode(old.name), fd, os.fsencode(new), fd, flags)
    finally:
        os.close(fd)


def put(path: Path, data: bytes, offset: int = 0, flags: int = 0) -> None:
    fd = os.open(path, os.O_RDWR | flags, 0o644)
    try:
        assert os.pwrite(fd, data, offset) == len(data)
    finally:
        os.close(fd)


def run(*command: str | Path, at: Path) -> str:
    done = subprocess.run(
        [os.fspath(word) for word in command],
        cwd=at,
        env={**os.environ, "LC_ALL": "C", "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done
    return done.stdout.decode()


# --- what is done: each function gets a place, and what it returns has to be the same in both ---------------


def create(at: Place) -> Any:
    new = at.sample(0) / "new"
    new.write_bytes(b"new")
    exclusively = outcome(os.open, new, os.O_CREAT | os.O_EXCL)
    with os.fdopen(os.open(at.sample(1) / "ro", os.O_CREAT | os.O_RDWR, 0o400), "wb") as file:
        file.write(b"may be written by whoever has made it")
    (at.top / "a/b/c").mkdir(parents=True)
    (at.top / "a/b/c/file").touch()
    os.mkfifo(at.top / "fifo", 0o600)
    long = outcome((at.top / ("n" * 256)).touch)
    (at.top / ("n" * 255)).touch()
    odd = at.top / os.fsdecode(b"\xff \n\\")
    odd.mkdir()
    return exclusively, long, sorted(os.listdir(at.top)), sorted(os.listdir(odd))


def write(at: Place) -> Any:
    put(at.file(0, "txt"), b"in the middle", 100)
    put(at.file(0, "cls"), b"far beyond the end", 1 << 20)
    put(at.file(1, "txt"), b"x" * (3 << 20))
    put(at.file(1, "cls"), b"", 100)
    os.truncate(at.file(1, "cls"), 5)
    with at.file(2, "txt").open("r+b", buffering=0) as file:
        before = file.read(10)
        file.truncate(10)
        file.truncate(20)
        file.seek(0)
        file.write(b"01234")
        after = file.seek(3), file.read(10)
    at.file(2, "cls").write_bytes(b"short")  # opened with O_TRUNC
    os.truncate(at.file(2, "cls"), 100_000)
    with at.file(3, "txt").open("ab", buffering=0) as first, at.file(3, "txt").open("ab", buffering=0) as other:
        for number in range(20):
            (first, other)[number % 2].write(b"%d\n" % number)
    wrong = outcome(os.truncate, at.sample(3), 0), outcome(os.truncate, at.file(3, "txt"), -1)
    return before, after, wrong, os.stat(at.file(0, "cls")).st_size, at.file(3, "txt").read_bytes()


def rename_files(at: Place) -> Any:
    os.rename(at.file(0, "txt"), at.sample(0) / "other")
    os.rename(at.file(0, "cls"), at.file(1, "cls"))  # over one of the shard
    os.rename(at.sample(0) / "other", at.file(1, "txt"))
    (at.top / "new").write_bytes(b"new")
    os.rename(at.top / "new", at.file(2, "txt"))
    renameat2(at.file(2, "txt"), at.file(2, "cls"), EXCHANGE)
    renameat2(at.file(2, "cls"), at.top / "moved", NOREPLACE)
    if at.view != "files":
        renameat2(at.sample(2), at.sample(3), EXCHANGE)
        renameat2(at.sample(2), at.top / "moved", EXCHANGE)  # a directory and a file
    os.rename(at.top / "moved", at.top / "moved")
    wrong = [
        outcome(os.rename, at.top / "missing", at.top / "nothing"),
        outcome(os.rename, at.file(1, "cls"), at.top / "no/such"),
        outcome(os.rename, at.file(1, "txt"), at.file(1, "txt") / "in"),
        outcome(renameat2, at.file(1, "cls"), at.top / "moved", NOREPLACE),
        outcome(renameat2, at.file(1, "cls"), at.top / "nothing", EXCHANGE),
        outcome(renameat2, at.file(1, "cls"), at.top / "x", EXCHANGE | NOREPLACE),
    ]
    return wrong, at.file(1, "txt").read_bytes()


def rename_samples(at: Place) -> Any:
    os.rename(at.sample(0), at.top / "renamed")
    (at.top / "renamed" / "more").write_bytes(b"more")
    (at.top / "empty").mkdir()
    os.rename(at.sample(1), at.top / "empty")
    os.rename(at.top / "empty", at.sample(0))  # where one was
    (at.top / "folder").mkdir()
    os.rename(at.sample(0), at.top / "folder/inside")
    wrong = [
        outcome(os.rename, at.sample(2), at.sample(3)),
        outcome(os.rename, at.sample(2), at.sample(2) / "into"),
        outcome(os.rename, at.sample(2), at.file(3, "txt")),
        outcome(os.rename, at.file(3, "txt"), at.sample(2)),
    ]
    return wrong, sorted(os.listdir(at.top / "folder/inside"))


def unlink_while_open(at: Place) -> Any:
    outcomes = []
    (at.top / "new").write_bytes(b"a new one")
    for path in (at.file(0, "txt"), at.file(0, "cls"), at.top / "new"):
        with path.open("r+b", buffering=0) as file:
            path.unlink()
            gone = outcome(os.stat, path)
            outcomes += [gone, file.read(20), os.fstat(file.fileno()).st_nlink]
            file.seek(5)
            file.write(b"still here")
            file.seek(0)
            outcomes += [file.read(20), outcome(os.link, f"/proc/self/fd/{file.fileno()}", at.top / "back")]
            os.ftruncate(file.fileno(), 3)
            outcomes.append(os.fstat(file.fileno()).st_size)
            path.write_bytes(b"another one")
            file.seek(0)
            outcomes.append(file.read(20))
    with at.file(1, "txt").open("rb") as file:
        os.rename(at.file(1, "cls"), at.file(1, "txt"))  # replaced while open
        outcomes.append(file.read(20))
    return outcomes


def remove(at: Place) -> Any:
    wrong = [outcome(os.rmdir, at.sample(0)), outcome(os.unlink, at.sample(0)) in ("EISDIR", "EPERM")]
    for number in range(2):
        at.file(number, "txt").unlink()
        at.file(number, "cls").unlink()
        if at.view != "files":
            at.sample(number).rmdir()
    wrong += [outcome(os.unlink, at.file(0, "txt")), outcome(os.rmdir, at.file(2, "txt"))]
    if at.view != "files":
        at.sample(0).mkdir()
        wrong.append(os.listdir(at.sample(0)))
        shutil.rmtree(at.sample(2))
    (at.top / "folder/deep").mkdir(parents=True)
    return wrong, outcome(os.rmdir, at.top / "folder")


def links(at: Place) -> Any:
    os.link(at.file(0, "txt"), at.top / "hard")
    put(at.top / "hard", b"seen under both names")
    first = at.file(0, "txt").read_bytes(), at.file(0, "txt").stat().st_nlink
    os.link(at.top / "hard", at.file(0, "txt").with_name("again"))
    at.file(0, "txt").unlink()
    os.symlink("001/txt", at.top / "soft")
    os.symlink("x" * 4000, at.top / "long")
    os.link(at.top / "soft", at.top / "soft too")
    wrong = [
        outcome(os.link, at.file(1, "txt"), at.top / "hard"),
        outcome(os.link, at.top / "nothing", at.top / "x"),
        outcome(os.symlink, "x", at.top / "soft"),
    ]
    return first, wrong, os.path.samefile(at.top / "hard", at.file(0, "txt").with_name("again"))


def modes(at: Place) -> Any:
    os.chmod(at.file(0, "txt"), 0o4755)
    os.chmod(at.file(0, "cls"), 0o600)
    os.chmod(at.sample(1), 0o2770)
    put(at.file(0, "txt"), b"x")  # takes setuid away, unless root writes
    (at.sample(1) / "inherits").touch()
    (at.sample(1) / "directory").mkdir()
    before = os.umask(0o027)
    try:
        (at.top / "masked").touch()
        (at.top / "masked directory").mkdir()
    finally:
        os.umask(before)
    return [stat.filemode(os.stat(at.top / name).st_mode) for name in ("masked", "masked directory")]


def owners(at: Place) -> Any:
    os.chmod(at.file(0, "txt"), 0o6755)
    os.chown(at.file(0, "txt"), 1000, 1001)
    os.chown(at.sample(1), 1000, -1)
    os.symlink("x", at.top / "soft")
    os.lchown(at.top / "soft", 1000, 1001)
    os.chown(at.file(2, "txt"), -1, 1002)
    paths = (at.file(0, "txt"), at.sample(1), at.top / "soft", at.file(2, "txt"))
    return [(path.lstat().st_mode, path.lstat().st_uid, path.lstat().st_gid) for path in paths]


def times(at: Place) -> Any:
    os.utime(at.file(0, "txt"), ns=(1_000_000_000_123_456_789, -5_000_000_000))
    os.utime(at.sample(1), (1, 2))
    os.utime(at.file(2, "txt"), ns=(1, (1 << 32) * 10**9))
    os.symlink("x", at.top / "soft")
    os.utime(at.top / "soft", (3, 4), follow_symlinks=False)
    (at.file(3, "txt")).chmod(0o600)
    known = [at.file(0, "txt"), at.sample(1), at.file(2, "txt"), at.top / "soft", at.file(3, "txt")]
    if at.view == "files":
        known.pop(1)  # things happen in there
    seen: list[Any] = [path.lstat().st_mtime_ns for path in known]
    before = at.file(3, "cls").stat().st_mtime
    put(at.file(3, "cls"), b"now")
    os.utime(at.file(2, "cls"))
    return [*seen, at.file(3, "cls").stat().st_mtime > before, at.file(2, "cls").stat().st_mtime > before]


def extended_attributes(at: Place) -> Any:
    for path in (at.file(0, "txt"), at.sample(1), at.top):
        os.setxattr(path, "user.label", b"cat")
        os.setxattr(path, "user.empty", b"")
    os.setxattr(at.file(1, "txt"), "user.label", b"x" * 2000, os.XATTR_CREATE)
    os.removexattr(at.file(0, "txt"), "user.empty")
    os.setxattr(at.file(0, "txt"), "user.label", b"dog", os.XATTR_REPLACE)
    return [
        os.getxattr(at.file(0, "txt"), "user.label"),
        outcome(os.setxattr, at.file(0, "txt"), "user.label", b"", os.XATTR_CREATE),
        outcome(os.setxattr, at.file(2, "txt"), "user.label", b"", os.XATTR_REPLACE),
        outcome(os.removexattr, at.file(2, "txt"), "user.label"),
        outcome(os.getxattr, at.file(2, "txt"), "user.label"),
        *(outcome(os.removexattr, path, "user.missing") for path in (at.file(0, "txt"), at.sample(1), at.top)),
        outcome(os.setxattr, at.file(0, "txt"), "user.missing", b"", os.XATTR_REPLACE),
    ]


def mapped(at: Place) -> Any:
    for path in (at.file(0, "txt"), at.top / "new"):
        with path.open("a+b") as file:
            file.truncate(3 * mmap.PAGESIZE)
            with mmap.mmap(file.fileno(), 0) as memory:
                memory[10:20] = b"0123456789"
                memory[2 * mmap.PAGESIZE :] = b"z" * mmap.PAGESIZE
                memory.flush()
            with mmap.mmap(file.fileno(), 0) as memory:
                memory[5:6] = b"!"  # and written by the kernel some time
    return at.file(0, "txt").read_bytes()


def locks(at: Place) -> Any:
    outcomes = []
    with at.file(0, "txt").open("r+b") as first, at.file(0, "txt").open("r+b") as other:
        fcntl.flock(first, fcntl.LOCK_EX)
        outcomes.append(outcome(fcntl.flock, other, fcntl.LOCK_EX | fcntl.LOCK_NB))
        fcntl.flock(first, fcntl.LOCK_UN)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.lockf(first, fcntl.LOCK_EX, 10, 5)
        child = f"import fcntl; fcntl.lockf(open({str(at.file(0, 'txt'))!r}, 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB"
        for area in ("1, 8", "5, 20"):
            done = subprocess.run(["python3", "-c", f"{child}, {area})"], stderr=subprocess.PIPE, check=False)
            outcomes.append((done.returncode, b"BlockingIOError" in done.stderr))
    return outcomes


def synced(at: Place) -> Any:
    fd = os.open(at.file(0, "txt"), os.O_RDWR)
    os.pwrite(fd, b"to disk", 0)
    os.fdatasync(fd)
    os.fsync(fd)
    os.close(fd)
    for path in (at.sample(1), at.top):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    fd = os.open(at.top / "sync", os.O_CREAT | os.O_WRONLY | os.O_SYNC)
    os.write(fd, b"synchronous")
    os.close(fd)


def saved_by_an_editor(at: Place) -> Any:
    """A temporary file beside it, synced, renamed over it; the old one is kept as a backup."""
    path, temporary = at.file(0, "txt"), at.sample(0) / ".txt.swp"
    os.link(path, at.sample(0) / "txt~")
    with temporary.open("xb") as file:
        file.write(b"safely saved")
        file.flush()
        os.fsync(file.fileno())
        os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
    with path.open("rb") as reader:
        os.rename(temporary, path)
        return reader.read(), path.read_bytes(), os.listdir(at.sample(0)).count(".txt.swp")


def copied(at: Place) -> Any:
    source = at.top.parent / "source"
    if not source.exists():
        (source / "d/e").mkdir(parents=True)
        (source / "d/e/file").write_bytes(b"f" * 10_000)
        (source / "sparse").touch()
        os.truncate(source / "sparse", 1 << 20)
        os.symlink("d/e/file", source / "soft")
        os.link(source / "d/e/file", source / "hard")
    run("rsync", "-a", "--inplace", "source/", at.top / "rsync", at=at.top.parent)
    run("rsync", "-aH", "source/", at.top / "rsync", at=at.top.parent)
    (source / "d/e/file").write_bytes(b"g" * 10_001)
    run("rsync", "-aH", "--delete", "source/", at.top / "rsync", at=at.top.parent)
    run("cp", "-a", "source", at.top / "cp", at=at.top.parent)
    run("cp", "-a", at.file(0, "txt").parent if at.view != "files" else at.file(0, "txt"), "sample", at=at.top)
    run("cp", "--sparse=always", "source/sparse", at.top / "holes", at=at.top.parent)
    return run("rsync", "-anic", "--delete", "source/", at.top / "cp", at=at.top.parent)


def a_repository(at: Place) -> Any:
    git = ("git", "-c", "user.name=x", "-c", "user.email=x@y", "-c", "gc.auto=0")
    run(*git, "init", "-q", "-b", "main", ".", at=at.top)
    run(*git, "add", ".", at=at.top)
    run(*git, "commit", "-q", "-m", "first", at=at.top)
    put(at.file(0, "txt"), b"changed")
    status = run(*git, "status", "--porcelain", at=at.top)
    run(*git, "commit", "-q", "-a", "-m", "second", at=at.top)
    run(*git, "checkout", "-q", "HEAD~1", at=at.top)
    run(*git, "fsck", "--strict", at=at.top)
    clean = run(*git, "status", "--porcelain", at=at.top)
    shutil.rmtree(at.top / ".git")  # with times in it, and so never the same
    return status, clean


def allocated(at: Place) -> Any:
    """Calls without a request of their own, which the kernel and libc translate."""
    with (at.top / "new").open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, 100_000)
        size = os.fstat(file.fileno()).st_size
        source = os.open(at.file(0, "txt"), os.O_RDONLY)
        copied = os.copy_file_range(source, file.fileno(), 50, 0, 10)
        os.close(source)
        assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) > 0  # where depends on the file system
    return size, copied


def replaced_kinds(at: Place) -> Any:
    shutil.rmtree(at.sample(0))
    at.sample(0).write_bytes(b"a file now")
    at.file(1, "txt").unlink()
    at.file(1, "txt").mkdir()
    (at.file(1, "txt") / "in").touch()
    os.symlink("000", at.top / "soft")
    os.rename(at.top / "soft", at.file(2, "txt"))
    return sorted(os.listdir(at.top))


DONE = {
    action.__name__: action
    for action in (
        *(create, write, rename_files, rename_samples, unlink_while_open, remove, links, modes, times, mapped),
        *(extended_attributes, locks, synced, saved_by_an_editor, copied, a_repository, allocated, replaced_kinds),
        *[owners] * (os.geteuid() == 0),
    )
}
ON_SAMPLES = {"rename_samples", "replaced_kinds"}  # that have a directory each


@pytest.mark.parametrize("name", DONE)
def test_a_mount_behaves_as_a_plain_directory(pair: Pair, name: str) -> None:
    if pair.view == "files" and name in ON_SAMPLES:
        return
    there, plain = pair.places(name)
    expected = DONE[name](plain)
    assert DONE[name](there) == expected
    assert picture(there.top) == picture(plain.top)


# --- one mount in particular -------------------------------------------------------------------------------

SMALL = shard([("a.txt", b"a" * 1000), ("a.cls", b"1"), ("b.txt", b"b" * 1000), ("b.cls", b"2")])
OVERLAY = ("--overlay", "o", "s.tar")


@pytest.fixture
def small(program: Program) -> Program:
    program.write("s.tar", SMALL)
    return program


def test_stat_of_a_copied_file(small: Program) -> None:
    with small.mounted(*OVERLAY) as mounted:
        path = mounted.path / "s/a/txt"
        before, folder = path.stat(), path.parent.stat()
        assert (stat.filemode(before.st_mode), stat.filemode(folder.st_mode)) == ("-rw-r--r--", "drwxr-xr-x")
        with path.open("r+b", buffering=0) as file:
            file.write(b"x")
            assert os.fstat(file.fileno()).st_ino == before.st_ino
        after = path.stat()
        same = ("st_ino", "st_mode", "st_uid", "st_gid", "st_size", "st_nlink")
        assert [getattr(after, name) for name in same] == [getattr(before, name) for name in same]
        assert after.st_blocks >= 2
        assert after.st_mtime_ns > before.st_mtime_ns
        assert after.st_ctime_ns > before.st_ctime_ns
        assert path.parent.stat().st_mtime_ns == folder.st_mtime_ns  # its names are what they were
        assert {"user.wdsfs.shard", "user.wdsfs.key"} <= set(os.listxattr(path.parent))
        for name in ("user.wdsfs.origin", "user.overlay.opaque"):
            with fails(errno.EOPNOTSUPP):
                os.setxattr(path, name, b"x")


def test_readers_see_what_is_written_behind_them(small: Program) -> None:
    """Also when the kernel has the file of the shard in its cache."""
    with small.mounted(*OVERLAY) as mounted:
        path = mounted.path / "s/a/txt"
        with path.open("rb", buffering=0) as early, mmap.mmap(early.fileno(), 0, prot=mmap.PROT_READ) as memory:
            assert (early.read(), memory[:3]) == (b"a" * 1000, b"aaa")
            put(path, b"new")
            assert (memory[:4], os.pread(early.fileno(), 4, 0)) == (b"newa", b"newa")
            os.truncate(path, 2)
            assert os.pread(early.fileno(), 10, 0) == b"ne"
            os.truncate(path, 1000)
            (mounted.path / "s/a/x").write_bytes(b"another file")
            os.rename(mounted.path / "s/a/x", path)
            assert os.pread(early.fileno(), 3, 0) == b"ne\0"
        assert path.read_bytes() == b"another file"


def test_statfs_counts_free_space(small: Program) -> None:
    with small.mounted(*OVERLAY) as mounted:
        there, upper = os.statvfs(mounted.path), os.statvfs(small.home)
        assert not there.f_flag & os.ST_RDONLY
        assert there.f_frsize == upper.f_frsize
        assert 0 < there.f_bavail <= there.f_bfree <= there.f_blocks
        assert there.f_blocks > upper.f_blocks
        assert there.f_ffree > 0


# --- what a disk says --------------------------------------------------------------------------------------


@contextlib.contextmanager
def a_disk(program: Program, kind: str) -> Iterator[Path]:
    """A file system of 8 MB, which root can make."""
    if os.geteuid():
        pytest.skip("only root can mount a file system")
    place, image = program.directory("disk"), program.home / "image"
    if kind == "ext4":
        if not shutil.which("mkfs.ext4"):
            pytest.skip("there is no mkfs.ext4")
        image.touch()
        os.truncate(image, 8 << 20)
        program.tool("mkfs.ext4", "-q", "-O", "^has_journal", "-m", "0", image)
        command: list[str | Path] = ["mount", "-o", "loop", image, place]
    else:
        command = ["mount", "-t", "tmpfs", "-o", "size=8M", "tmpfs", place]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no {kind} can be mounted here: {done.stderr.decode()}")
    try:
        yield place
    finally:
        # Busy when the test has failed, or while something looks at a new disk: then it goes with its last user.
        # `mounted` checks that no process of the mount is left.
        if subprocess.run(["umount", place], check=False).returncode:
            subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_disk(small: Program, kind: str) -> None:
    """Writers get ENOSPC, everything else goes on; when there is space again, all works as before."""
    with a_disk(small, kind) as disk, small.mounted("--overlay", disk / "o", "s.tar") as mounted:
        mounted.expect_log("No space left on device")
        top = mounted.path / "s"
        put(top / "a/txt", b"changed")
        written = 0
        with (top / "big").open("wb", buffering=0) as file, fails(errno.ENOSPC):
            while True:
                written += file.write(b"x" * 65536)
        assert (top / "big").stat().st_size >= written
        with fails(errno.ENOSPC):  # nor can it be copied up
            put(top / "b/txt", b"y" * 100_000, 0)
        assert (top / "b/cls").read_bytes() == b"2"
        assert (top / "b/txt").read_bytes()[:1000] in (b"b" * 1000, b"y" * 1000)
        assert (top / "a/txt").read_bytes() == b"changed" + b"a" * 993
        assert sorted(os.listdir(top)) == ["a", "b", "big"]
        (top / "big").unlink()
        # The kernel does not wait until the mount has closed a file.
        wait_until(lambda: shutil.disk_usage(disk).free > written // 2, "its space to be free")
        (top / "after").write_bytes(b"there is space again")
        assert (top / "after").read_bytes() == b"there is space again"


def test_a_disk_that_is_read_only(small: Program) -> None:
    """Mounted so, or made so while it is in use: what was written is shown, and nobody can write."""
    with a_disk(small, "tmpfs") as disk:
        arguments = ("--overlay", disk / "o", "s.tar")
        with small.mounted(*arguments) as mounted:
            put(mounted.path / "s/a/txt", b"changed")
        small.tool("mount", "-o", "remount,ro", disk)
        with small.mounted(*arguments) as mounted:
            mounted.allow_log("Read-only file system")
            top = mounted.path / "s"
            for action in (
                lambda: put(top / "a/txt", b"x"),
                lambda: put(top / "b/txt", b"x"),
                lambda: (top / "b/txt").unlink(),
                lambda: (top / "new").touch(),
                lambda: os.rename(top / "a", top / "c"),
                lambda: os.setxattr(top / "a/txt", "user.x", b""),
                lambda: os.utime(top / "b"),
            ):
                with fails(errno.EROFS):
                    action()
            assert (top / "a/txt").read_bytes()[:8] == b"changeda"
            assert (top / "b/txt").read_bytes() == b"b" * 1000
        small.tool("mount", "-o", "remount,rw", disk)


# --- who may, and what is refused --------------------------------------------------------------------------


def test_several_users(small: Program) -> None:
    """The kernel checks; what somebody makes is theirs."""
    if os.geteuid():
        pytest.skip("only root can become somebody else")
    open_the_way(small.home)

    def as_nobody(script: str) -> bytes:
        return small.tool("sh", "-c", script, user=65534, group=65534, extra_groups=[], cwd=small.mountpoint)

    small.mountpoint.chmod(0o755)
    with small.mounted(*OVERLAY, "-o", "allow_other") as mounted:
        top = mounted.path / "s"
        assert as_nobody("cat s/a/cls; echo x 2>/dev/null >s/a/cls || echo no; mkdir s/n 2>/dev/null || echo no")
        assert (top / "a/cls").read_bytes() == b"1"
        top.chmod(0o1777)
        as_nobody("mkdir s/n && echo mine >s/n/txt && chmod 600 s/n/txt && ln -s txt s/n/soft && mkfifo s/n/fifo")
        for name in ("n", "n/txt", "n/soft", "n/fifo"):
            assert (top / name).lstat().st_uid == (top / name).lstat().st_gid == 65534
        os.chown(top / "b/txt", 65534, -1)
        as_nobody("echo theirs >s/b/txt; chmod 640 s/b/txt; touch s/b/txt")
        as_nobody("! chown root s/b/txt 2>/dev/null; ! rm -f s/b/txt 2>/dev/null; ! mv s/a s/z 2>/dev/null")
        assert (top / "b/txt").read_bytes() == b"theirs\n"
    with small.mounted(*OVERLAY, "-o", "allow_other") as mounted:
        assert stat.filemode((mounted.path / "s/n/txt").stat().st_mode) == "-rw-------"
        assert as_nobody("cat s/n/txt") == b"mine\n"


def test_a_write_takes_setuid_away_for_the_kernel_too(small: Program) -> None:
    """It asks again for size and times after a write, and not for the mode: that has to be invalidated."""
    if os.geteuid():
        pytest.skip("only root can become somebody else")
    small.mountpoint.chmod(0o755)
    with small.mounted(*OVERLAY, "-o", "allow_other") as mounted:
        path = mounted.path / "s/a/txt"
        path.chmod(0o6777)
        assert small.tool("stat", "-c", "%a", path) == b"6777\n"  # asks for the mode, and for nothing else
        open_the_way(small.home)
        small.tool("dd", f"of={path}", "conv=notrunc", "if=/proc/version", "count=1",
                   user=65534, group=65534, extra_groups=[])  # fmt: skip
        assert small.tool("stat", "-c", "%a", path) == b"777\n"


class Clock:
    """The time of an unmount: a second passes with each look at a daemon that waits for a disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        waits_for_disk = live_mount.waits_for_disk

        def look(pid: int) -> bool:
            waits = waits_for_disk(pid)
            self.now += waits
            return waits

        monkeypatch.setattr(live_mount, "waits_for_disk", look)
        clock = types.SimpleNamespace(monotonic=lambda: self.now, sleep=time.sleep)
        monkeypatch.setattr(live_mount, "time", clock)


def test_an_unmount_says_that_it_waits_for_a_disk(
    small: Program, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And waits for as long as the disk takes, many times its patience: a frozen one here, until it is thawed."""
    clock = Clock(monkeypatch)
    caplog.set_level(logging.INFO)
    for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, small.environment[name])
    with (
        a_disk(small, "ext4") as disk,
        small.mounted("--overlay", disk / "o", "s.tar", ends_itself=True) as mounted,
    ):
        small.tool("fsfreeze", "-f", disk)
        try:
            ending = threading.Thread(
                target=mount_search.require_mount(str(mounted.path)).end, kwargs={"wait_seconds": 5.0}
            )
            ending.start()
            wait_until(lambda: "waiting for process" in caplog.text, "a word about it")
            wait_until(lambda: clock.now > 50 or not ending.is_alive(), "its patience to be over")
            assert ending.is_alive()
        finally:
            small.tool("fsfreeze", "-u", disk)
        ending.join(PATIENCE)
        assert not ending.is_alive()
        assert f"it writes the changes in {disk}/o to the disk (unwritten on this machine:" in caplog.text
        mounted.check_exit()


def test_an_unmount_of_a_daemon_that_stays(small: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, small.environment[name])
    passing = itertools.count()  # a second with each look at the clock
    clock = types.SimpleNamespace(monotonic=lambda: float(next(passing)), sleep=time.sleep)
    with small.mounted(*OVERLAY, ends_itself=True) as mounted:
        os.kill(mounted.pid, signal.SIGSTOP)
        monkeypatch.setattr(live_mount, "_continue", lambda daemon: None)
        monkeypatch.setattr(live_mount, "time", clock)
        monkeypatch.setattr(live_mount, "waits_for_disk", lambda pid: False)  # its worker does, for a moment
        try:
            with pytest.raises(MountError, match=f"process {mounted.pid} still runs 8 s after the unmount"):
                mount_search.require_mount(str(mounted.path)).end(wait_seconds=7.0)
        finally:
            os.kill(mounted.pid, signal.SIGCONT)
        mounted.check_exit()


def test_a_daemon_that_is_not_root(user_program: Program) -> None:
    """It cannot make whiteouts that are devices, nor give files away; all else is the same."""
    user_program.write("s.tar", SMALL)
    script = """
        set -e
        cd "$1"
        rm s/a/txt; echo new >s/a/jpg; mv s/b s/c; chmod 0 s/c/txt; chmod 500 s/a; mkdir s/n; rm -r s/a/cls 2>&-||:
        chmod 700 s/a; rm s/a/cls; ! chown 0 s/c/cls 2>&-
        cat s/c/txt 2>&- && exit 1
        chmod 644 s/c/txt; chmod 400 s/c/cls; cat s/c/txt s/c/cls | wc -c
    """
    options = ("--overlay", user_program.home / "o", user_program.home / "s.tar")
    with user_program.mounted(*options) as mounted:
        assert user_program.tool("sh", "-c", script, "sh", mounted.path) == b"1001\n"
        listed = user_program.tool("find", mounted.path, "-printf", "%P %M\n")
    with user_program.mounted(*options) as mounted:
        assert sorted(user_program.tool("find", mounted.path, "-printf", "%P %M\n").split(b"\n")) == sorted(
            listed.split(b"\n")
        )
        assert b"s/a/jpg -rw-r--r--" in listed
        assert b"s/b" not in listed


def test_an_overlay_that_cannot_be_used(small: Program) -> None:
    other = small.directory("other")
    with small.mounted(*OVERLAY) as mounted:
        (mounted.path / "s/a/new").touch()
        assert f"is in use by process {mounted.pid};" in small.refused("mount", *OVERLAY, other, code=8)
        assert list(other.iterdir()) == []
    for options in ("--layout files", "--names full", "--merge"):
        text = small.refused("mount", *options.split(), *OVERLAY, other, code=8)
        assert "was made with --layout samples --names ext" in text
        assert options != "--merge" or "without --merge" in text
    for at in ("o", ".", "o/upper", "o/upper/s/a", "o/work"):
        text = small.refused("mount", "-o", "nonempty", *OVERLAY, small.home / at, code=5)
        assert re.search("which wdsfs needs|lies in the overlay", text)
    (small.home / "o/work/commit.json").write_text("{}")
    assert "wdsfs commit --in-place --overlay" in small.refused("mount", *OVERLAY, other, code=8)


def test_a_warning_about_a_set_that_has_changed(small: Program) -> None:
    small.write("t.tar", SMALL)
    with small.mounted("--overlay", "o", "{s,t}.tar") as mounted:
        put(mounted.path / "s/a/txt", b"changed")
        (mounted.path / "t/a/txt").unlink()
    small.write("s.tar", shard([("a.txt", b"another"), ("a.cls", b"7")]))
    # What was changed in a shard that is left out would pass for something new.
    assert "a set that has t, too" in small.refused("mount", *OVERLAY, small.mountpoint, code=8)
    with small.mounted("--overlay", "o", "{s,t}.tar") as mounted:
        mounted.expect_log("have changed since the overlay .* was made: s;")
        assert (mounted.path / "s/a/txt").read_bytes()[:8] == b"changeda"
        assert (mounted.path / "s/a/cls").read_bytes() == b"7"


def test_many_directories_and_shards_with_few_open_files(program: Program) -> None:
    """Under `ulimit -n 64`; the limits of shards and of the upper leave enough for each other."""
    for number in range(60):
        program.write(f"s{number:02}.tar", shard([("a.txt", b"%d" % number)]))

    def limit() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    with program.mounted("--overlay", "o", "s{00..59}.tar", preexec_fn=limit) as mounted:
        for _ in range(2):
            for number in range(60):
                assert (mounted.path / f"s{number:02}" / "a" / "txt").read_bytes() == b"%d" % number
                (mounted.path / "s00" / f"n{number}" / "x").mkdir(parents=True, exist_ok=True)
                (mounted.path / "s00" / f"n{number}" / "x" / "txt").write_bytes(b"%d" % number)
