"""Reads of remote shards on a real mount: handed over by the workers, answered by the fetcher."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import tars
from tests.conftest import ROOT, Mounted, drop_pages
from tests.fuse.test_supervisor import (  # fixtures
    FILES,
    OLD_KERNEL,
    Patched,
    content,
    files_of,
    kill,
    patched,
    read_raw,
    readers,
    shard,
    workers_of,
)
from tests.processes import PATIENCE, Process, wait_until
from wdsfs import mount_registry

__all__ = ["patched", "shard"]


class Far:
    """A mount whose shard is in a store."""

    def __init__(self, mounted: Mounted, directory: Path) -> None:
        self.mounted, self.log = mounted, directory / "fetcher.log"
        self.paths = files_of(mounted)

    @property
    def fetcher(self) -> int:
        """The process number of the fetcher that there is now, 0 without one."""
        for name in os.listdir("/proc"):
            if name.isdecimal():
                try:
                    command = Path(f"/proc/{name}/cmdline").read_bytes()
                    parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
                except OSError:
                    continue
                if b"fake_fetcher" in command and parent == self.mounted.pid:
                    return int(name)
        return 0


@contextmanager
def far(
    patched: Patched, shard: Path, kind: str, workers: int = 2, more: str = "", **settings: str
) -> Iterator[Far]:
    arguments = kind, str(shard), settings, str(patched.home / "fetcher.log")
    patched.patch = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom tests.fuse import remote_shards\n"
        f"remote_shards.install(*{arguments!r})\n{more}"
    )
    with patched.mounted("--layout", "files", "--workers", str(workers), shard) as mounted:
        yield Far(mounted, patched.home)


def drop(path: Path) -> None:
    with path.open("rb") as file:
        drop_pages(file.fileno())


@contextmanager
def reads_at_once(patched: Patched, shard: Path, count: int) -> Iterator[tuple[Far, list[bytes]]]:
    """Reads of so many files that a single worker has handed over; answered at the end of the block."""
    gate, found = patched.home / "gate", [b""] * count
    with far(patched, shard, "gated", workers=1, gate=str(gate)) as there:

        def read(number: int) -> None:
            found[number] = read_raw(there.paths[number])

        threads = [threading.Thread(target=read, args=(number,)) for number in range(count)]
        try:
            for thread in threads:
                thread.start()
            wait_until(lambda: there.mounted.status()["requests"].get("read", 0) >= count, "all reads")
            yield there, found
        finally:
            gate.touch()
            for thread in threads:
                thread.join()
        assert there.mounted.status()["requests"]["read"] == count


def test_more_reads_are_under_way_than_there_are_workers(patched: Patched, shard: Path) -> None:
    """All of them with one worker, which goes on answering."""
    with reads_at_once(patched, shard, 100) as (there, found):
        assert len(workers_of(there.mounted)) == 1
        assert set(found) == {b""}
        assert len(os.listdir(there.paths[0].parent)) == FILES
    assert found == [content(number) for number in range(100)]


def test_many_readers_at_once_make_one_request_each(patched: Patched, tmp_path: Path) -> None:
    """The kernel takes no device for congested that only waits for the network: it reads small files whole."""
    body = bytes(range(256)) * 240
    members = (tars.member(b"d/%03d.bin" % number, body) for number in range(80))
    (tmp_path / "s.tar").write_bytes(tars.tar(*members))
    with reads_at_once(patched, tmp_path / "s.tar", 80) as (_, found):
        pass
    assert found == [body] * 80


def test_the_fetcher_and_workers_killed_in_the_middle_of_reads(patched: Patched, shard: Path) -> None:
    """No error, and no wrong byte."""
    with far(patched, shard, "slow") as there:
        there.mounted.expect_log("killed by SIGKILL")

        def reads() -> int:
            return int(there.mounted.status()["requests"].get("read", 0))

        with readers(there.paths, 4):
            last = 0
            for round_ in range(8):
                wait_until(lambda last=last: there.fetcher not in (0, last), "another fetcher")
                before = reads()
                wait_until(lambda before=before: reads() > before + 8, "reads")
                last = there.fetcher
                os.kill(last, signal.SIGKILL)
                if round_ % 2:
                    kill(workers_of(there.mounted)[0])
            wait_until(lambda: there.fetcher != last, "another fetcher")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_reader_of_a_server_that_never_answers_can_be_killed(
    patched: Patched, shard: Path, number: signal.Signals
) -> None:
    with far(patched, shard, "never") as there:
        reader = Process([sys.executable, "-c", "import sys; open(sys.argv[1], 'rb').read()", there.paths[5]])
        wait_until(lambda: there.mounted.status()["requests"].get("read", 0), "the read")
        reader.send_signal(number)
        assert reader.wait(PATIENCE) == -number


def test_a_read_that_was_interrupted_gets_eintr_and_is_dropped(patched: Patched, shard: Path) -> None:
    """Directly, past the page cache: the kernel sends an INTERRUPT, and waits for the answer of the read."""
    script = """
import mmap, os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: None)
class Woken(Exception): pass
def raise_woken(*_): raise Woken
signal.signal(signal.SIGUSR1, raise_woken)
fd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
try:
    os.preadv(fd, [mmap.mmap(-1, 4096)], 0)
except Woken:
    sys.exit(7)
"""
    with far(patched, shard, "never") as there:
        reader = Process([sys.executable, "-c", script, there.paths[5]])
        wait_until(lambda: there.mounted.status()["requests"].get("read", 0), "the read")
        reader.send_signal(signal.SIGUSR1)
        assert reader.wait(PATIENCE) == 7


@pytest.mark.parametrize(
    ("kind", "number", "line"),
    [
        ("never", errno.EIO, "s3://b/never/o.tar: no answer"),
        ("denied", errno.EACCES, "s3://b/denied/o.tar: access denied"),
        ("changed", errno.ESTALE, "s3://b/changed/o.tar has changed"),
    ],
)
def test_an_error_of_the_store_is_an_errno_and_one_line(
    patched: Patched, shard: Path, kind: str, number: int, line: str
) -> None:
    with far(patched, shard, kind, total="0.1") as there:
        for path in there.paths[:3]:
            with pytest.raises(OSError, match=os.strerror(number)) as found:
                read_raw(path)
            assert found.value.errno == number
        assert there.log.read_text().count(line) == 1


def test_without_resend_workers_wait_for_the_fetcher(patched: Patched, shard: Path) -> None:
    """On kernels before 6.9; a fetcher that dies costs no error there, either."""
    with far(patched, shard, "slow", more=OLD_KERNEL) as there:
        for number in range(0, FILES, 20):
            assert read_raw(there.paths[number]) == content(number)
            fetcher = there.fetcher
            assert fetcher, "0 would be all processes of the tests"
            os.kill(fetcher, signal.SIGKILL)


def test_the_fetcher_ends_with_the_mount(patched: Patched, shard: Path) -> None:
    with far(patched, shard, "plain") as there:
        assert read_raw(there.paths[0]) == content(0)
        pid = there.fetcher
        assert pid
    wait_until(lambda: mount_registry.start_ticks(pid) is None, "the end of the fetcher")  # if only as a zombie
