"""Shards that change under a live mount: a reader gets old bytes, new bytes or an error, never a mix."""

from __future__ import annotations

import errno
import faulthandler
import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tests import tars
from tests.conftest import Mounted, Program, drop_pages, fails
from tests.processes import wait_until

Answer = TypeVar("Answer")

GONE = (errno.ESTALE, errno.EIO)
CHANGED = r"a\.tar has changed"
SIZE = 1_000_000


def shard(generation: int, size: int = SIZE) -> bytes:
    """Every generation has the same names and sizes, and a content that tells it in every byte."""
    return tars.tar(
        tars.member(b"big.bin", bytes([generation]) * size),
        tars.member(b"small.txt", bytes([generation]) * 100),
        tars.member(b"%d.txt" % generation, b"only here"),
    )


@pytest.fixture
def mounted(program: Program) -> Iterator[Mounted]:
    program.write("a.tar", shard(1))
    program.write("b.tar", shard(99))
    with program.mounted("{a,b}.tar") as one:
        yield one
        # Whatever has happened to its neighbour:
        assert (one.path / "b/big/bin").read_bytes() == bytes([99]) * SIZE
        assert (one.path / "b/small/txt").read_bytes() == bytes([99]) * 100


def replace(path: Path, content: bytes) -> None:
    """As `mv new a.tar` does; the old file is gone when its last reader is."""
    new = path.with_name("new")
    new.write_bytes(content)
    new.rename(path)


def overwrite(path: Path, content: bytes) -> None:
    """In place, without cutting it first."""
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()


def cut(path: Path, content: bytes) -> None:
    os.truncate(path, 512 + 4096)


def delete(path: Path, content: bytes) -> None:
    path.unlink()


def rewrite(path: Path, content: bytes) -> None:
    """As `cp new a.tar` does: the same file, cut and written again."""
    path.write_bytes(content)


def touch(path: Path, content: bytes) -> None:
    """Change the time alone: who opens a file again gets the same bytes."""
    os.utime(path)


CHANGES = [replace, rewrite, overwrite, cut, delete, touch]
every_change = pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
with_new_content = pytest.mark.parametrize(
    "change", [replace, rewrite, overwrite], ids=lambda change: change.__name__
)


def unless_gone(question: Callable[[], Answer], *more: int) -> Answer | None:
    """The answer; None when there is none because the shard has changed."""
    try:
        return question()
    except OSError as error:
        if error.errno in (*GONE, *more):
            return None
        raise


def read_all(path: Path) -> bytes | None:
    return unless_gone(path.read_bytes, errno.ENOENT)


def names(path: Path) -> list[str] | None:
    return unless_gone(lambda: os.listdir(path))


# --- what was open -----------------------------------------------------------------------------------------


@every_change
def test_open_files_of_a_changed_shard_are_stale(
    program: Program, mounted: Mounted, change: Callable[[Path, bytes], None]
) -> None:
    """Nothing that had not been read before can be read: not even where the new content has the same bytes."""
    path = mounted.path / "a/big/bin"
    fd = os.open(path, os.O_RDONLY)
    try:
        assert os.pread(fd, 10, 0) == b"\1" * 10
        change(program.home / "a.tar", shard(2))
        drop_pages(fd)
        for place in (0, SIZE - 10, SIZE // 2):
            with fails(*GONE):
                os.pread(fd, 10, place)
    finally:
        os.close(fd)
    wait_until(lambda: (read_all(path) == b"\1" * SIZE) == (change is touch), "the end of the old content")
    mounted.expect_log(r"a\.tar( has changed|: the shard is gone)")
    mounted.allow_log(r"a\.tar", "Stale")


@with_new_content
def test_files_opened_after_a_change_are_new(
    program: Program, mounted: Mounted, change: Callable[[Path, bytes], None]
) -> None:
    for name in ("big/bin", "small/txt", "1/txt"):
        assert (mounted.path / "a" / name).read_bytes()
    old = (mounted.path / "a/big/bin").stat()
    change(program.home / "a.tar", shard(2, SIZE + 1))
    mounted.expect_log(CHANGED)
    mounted.allow_log(r"a\.tar")
    wait_until(lambda: read_all(mounted.path / "a/big/bin") == b"\2" * (SIZE + 1), "the new content")
    assert (mounted.path / "a/small/txt").read_bytes() == b"\2" * 100
    assert (mounted.path / "a/2/txt").read_bytes() == b"only here"
    assert os.listdir(mounted.path / "a") == ["big", "small", "2"]
    new = (mounted.path / "a/big/bin").stat()
    assert (new.st_size, old.st_size) == (SIZE + 1, SIZE)
    assert new.st_ino != old.st_ino
    with fails(errno.ENOENT):
        (mounted.path / "a/1/txt").read_bytes()


def test_a_shard_that_is_deleted(program: Program, mounted: Mounted) -> None:
    """It stays listed; looking inside is an error, never an empty directory. When it is back, so is all."""
    assert (mounted.path / "a/small/txt").read_bytes() == b"\1" * 100
    (program.home / "a.tar").rename(program.home / "away")
    mounted.expect_log(r"a\.tar.*(gone|no such)")
    mounted.allow_log(r"a\.tar")
    wait_until(lambda: read_all(mounted.path / "a/small/txt") is None, "the end of the old content")
    assert os.listdir(mounted.path) == ["a", "b"]
    seen: list[list[str] | None] = []
    wait_until(lambda: seen.append(names(mounted.path / "a")) or seen[-1] is None, "an error")
    assert [] not in seen
    assert unless_gone((mounted.path / "a/nothing like that").exists) in (None, False)
    assert [one["shard"] for one in mounted.status()["damaged"]] == [str(program.home / "a.tar")]
    (program.home / "away").rename(program.home / "a.tar")
    wait_until(lambda: read_all(mounted.path / "a/small/txt") == b"\1" * 100, "its return")
    assert mounted.status()["damaged"] == []


def test_a_shard_that_is_cut(program: Program, mounted: Mounted) -> None:
    """The rest of it is shown; reading beyond is an error."""
    path = mounted.path / "a/big/bin"
    assert path.read_bytes() == b"\1" * SIZE
    cut(program.home / "a.tar", b"")
    mounted.expect_log(CHANGED)
    mounted.allow_log(r"a\.tar", "ends")

    wait_until(lambda: names(mounted.path / "a") == ["big"], "the new content")
    fd = os.open(path, os.O_RDONLY)
    try:
        assert os.pread(fd, 4096, 0) == b"\1" * 4096
        with fails(errno.EIO):
            os.pread(fd, 10, 8192)
    finally:
        os.close(fd)
    (damaged,) = mounted.status()["damaged"]
    assert "ends" in damaged["problem"]


def test_a_shard_that_becomes_unreadable(user_program: Program) -> None:
    """Open files may go on; opened again they show the old content or give an error. Other shards go on."""
    user_program.write("a.tar", shard(1))
    user_program.write("b.tar", shard(99))
    with user_program.mounted("{a,b}.tar") as mounted:
        (user_program.home / "a.tar").chmod(0)
        mounted.allow_log(r"a\.tar")
        out = user_program.tool("sh", "-c", f"cat {mounted.path}/a/big/bin; cat {mounted.path}/b/small/txt")
        assert out in (b"c" * 100, b"\1" * SIZE + b"c" * 100)
        (user_program.home / "a.tar").chmod(0o644)
        mount = str(mounted.path)
        wait_until(
            lambda: user_program.tool("cat", f"{mount}/a/small/txt", code=None) == b"\1" * 100, "its return"
        )


# --- what the kernel has kept ------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "merge"), [(replace, False), (rewrite, True), (overwrite, True)])
def test_a_change_invalidates_the_page_cache(
    program: Program, change: Callable[[Path, bytes], None], merge: bool
) -> None:
    """Nobody asks the mount for the path, the listing or the content any more, and yet the next open is of the new
    content: the kernel's cache is invalidated.
    """
    path = program.write("a.tar", shard(1))
    with program.mounted(*["--merge"] * merge, "a.tar") as mounted:
        top = mounted.path if merge else mounted.path / "a"
        small = top / "small/txt"
        for _ in range(2):
            os.listdir(top)
            assert small.read_bytes() == b"\1" * 100
        before = asked(mounted)
        assert small.read_bytes() == b"\1" * 100
        assert asked(mounted) == before or not merge, "it is not kept: this test would show nothing"
        change(path, shard(2))
        mounted.expect_log(CHANGED)
        mounted.allow_log(r"a\.tar", "has changed while")
        wait_until(lambda: read_all(small) == b"\2" * 100, "the new content")
        # A listing of one tree may meet the change in the middle, and says so.
        wait_until(lambda: sorted(names(top) or []) == ["2", "big", "small"], "the new listing")
        assert (top / "2/txt").read_bytes() == b"only here"
        with fails(errno.ENOENT):
            (top / "1/txt").stat()


def asked(mounted: Mounted) -> dict[str, int]:
    """Return the requests of the kernel that have to do with names and contents."""
    requests = mounted.status()["requests"]
    return {kind: requests.get(kind, 0) for kind in ("lookup", "read", "readdir")}


@pytest.mark.parametrize("merge", [False, True], ids=["shards", "merge"])
def test_a_name_that_was_missing_turns_up(program: Program, merge: bool) -> None:
    """The kernel remembers that it is not there; also where whole samples come with the change."""
    path = program.write("a.tar", shard(1))
    with program.mounted("--workers", "1", *["--merge"] * merge, "a.tar") as mounted:
        top = mounted.path if merge else mounted.path / "a"
        for _ in range(2):
            assert not (top / "2").exists()
            assert not (top / "small/jpg").exists()
        new = tars.tar(tars.member(b"2.txt", b"new"), tars.member(b"small.jpg", b"new"))
        replace(path, new)
        mounted.expect_log(CHANGED)
        mounted.allow_log(r"a\.tar")
        wait_until(lambda: read_all(top / "2/txt") == b"new", "the new sample")
        wait_until(lambda: read_all(top / "small/jpg") == b"new", "the new file")
        assert read_all(top / "small/txt") is None


def test_a_change_that_hides_its_time(program: Program) -> None:
    """Rewritten while nothing was mounted, with size and times as before: the ctime tells."""
    path = program.write("a.tar", shard(1))
    before = path.stat()
    with program.mounted("a.tar") as mounted:
        assert (mounted.path / "a/1/txt").exists()
    overwrite(path, shard(2))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with program.mounted("a.tar") as mounted:
        assert read_all(mounted.path / "a/small/txt") == b"\2" * 100


def test_mapped_files(program: Program, mounted: Mounted) -> None:
    """Mapped pages that were read stay; one that cannot be read any more gives SIGBUS, as on any file system."""
    with (mounted.path / "a/big/bin").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    mapped.madvise(mmap.MADV_RANDOM)
    assert mapped[0] == 1
    replace(program.home / "a.tar", shard(2))
    pid = os.fork()
    if not pid:
        faulthandler.disable()
        try:
            ok = mapped[0] == 1 and mapped[SIZE - 1] == 1
            os._exit(0 if ok else 1)
        finally:
            os._exit(2)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGBUS)
    mapped.close()
    mounted.allow_log(r"a\.tar")
    wait_until(lambda: read_all(mounted.path / "a/big/bin") == b"\2" * SIZE, "the new content")


def test_a_listing_that_is_under_way(program: Program) -> None:
    """It is finished from one content or ends with an error; no name comes twice."""

    def many(generation: int) -> bytes:
        return tars.tar(*(tars.header(b"%d-%05d.x" % (generation, number)) for number in range(20_000)))

    path = program.write("a.tar", many(1))
    with program.mounted("a.tar") as mounted, os.scandir(mounted.path / "a") as entries:
        first = next(entries).name
        replace(path, many(2))
        gone = mounted.path / "a" / "1-00000"
        wait_until(lambda: unless_gone(gone.exists) is False, "the end of the old content")
        found = [first]
        unless_gone(lambda: found.extend(entry.name for entry in entries))
        assert found == [f"1-{number:05d}" for number in range(len(found))]
        mounted.allow_log(r"a\.tar")
        wait_until(lambda: (names(mounted.path / "a") or [""])[0] == "2-00000", "the new content")


def test_one_tree_after_a_change(program: Program) -> None:
    program.write("a.tar", shard(1))
    program.write("b.tar", tars.tar(tars.member(b"d/x.txt", b"x"), tars.member(b"small.txt", b"second")))
    with program.mounted("--merge", "{a,b}.tar") as mounted:
        assert sorted(os.listdir(mounted.path)) == ["1", "big", "d", "small", "small~b"]
        replace(program.home / "a.tar", tars.tar(tars.member(b"d/y.txt", b"y"), tars.member(b"e.txt", b"e")))
        mounted.expect_log(CHANGED)
        mounted.allow_log(r"a\.tar", "was listed")
        wait_until(lambda: sorted(names(mounted.path) or []) == ["d", "e", "small"], "the new content")
        assert names(mounted.path / "d") == ["y", "x"]
        assert (mounted.path / "small/txt").read_bytes() == b"second"


# --- again and again ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [replace, rewrite, overwrite], ids=lambda change: change.__name__)
def test_readers_never_see_a_mix(program: Program, change: Callable[[Path, bytes], None]) -> None:
    """A big file is read in a loop, by descriptor and as a whole, while its shard changes again and again.

    Whatever a reader gets between `open` and `close` is of one generation.
    """
    path = program.write("a.tar", shard(0))
    program.write("b.tar", shard(99))
    mixes: list[object] = []
    complete: set[int] = set()
    reads = [0, 0, 0]
    done = threading.Event()
    with program.mounted("{a,b}.tar") as mounted:
        mounted.allow_log(r"a\.tar", "ends", "zero block", "not a tar", "damaged")

        def read(number: int, piece: int) -> None:
            big = mounted.path / "a/big/bin"
            while not done.is_set():
                seen: set[int] = set()
                length = 0
                try:
                    with big.open("rb", buffering=0) as file:
                        while part := file.read(piece):
                            seen |= set(part)
                            length += len(part)
                    if length == SIZE:
                        complete.update(seen)
                    else:
                        mixes.append(f"{length} bytes")
                except OSError as error:
                    if error.errno not in (*GONE, errno.ENOENT):
                        mixes.append(error)
                if len(seen) > 1:
                    mixes.append(seen)
                reads[number] += 1

        def read_other() -> None:
            while not done.is_set():
                content = (mounted.path / "b/big/bin").read_bytes()
                if content != bytes([99]) * SIZE:
                    mixes.append("the other shard")

        threads = [threading.Thread(target=read, args=(number, 1 << (16 + number))) for number in range(3)]
        threads.append(threading.Thread(target=read_other))
        for thread in threads:
            thread.start()
        try:
            for generation in range(20):
                change(path, shard(generation))
                before = list(reads)
                wait_until(
                    lambda: all(new > old for new, old in zip(reads, before, strict=True)),  # noqa: B023  # at once
                    "every reader to have read",
                )
                if generation % 5 == 0:
                    wait_until(lambda: generation in complete, "a reader of the new content")  # noqa: B023  # at once
        finally:
            done.set()
            for thread in threads:
                thread.join()
    assert mixes == []
    assert complete >= {0, 5, 10, 15}
