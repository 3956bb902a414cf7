"""Fetcher and clients as processes: what happens when one of them dies, and who is served."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests import processes
from tests.processes import PATIENCE, forked, wait_until
from tests.remote import fake_fetcher
from tests.remote.fake_fetcher import PIN, SIZE, FakeCache, body_of
from tests.remote.stores import MemoryCache, MemoryStore, content, in_loop, settled, until
from wdsfs import host
from wdsfs.door.pins import Pin
from wdsfs.door.urls import Url
from wdsfs.errors import DeniedObject, MissingObject, ObjectChanged, Unreachable
from wdsfs.remote import client, messages
from wdsfs.remote.client import FetcherClient, FetcherConnection
from wdsfs.remote.fetcher import DEATHS_MAX, KernelReads
from wdsfs.remote.messages import Alarm, HandOver
from wdsfs.remote.object_cache import ObjectCache
from wdsfs.remote.open_objects import OpenObjects
from wdsfs.remote.retries import Threads

IS_RESENT = 1 << 63

Clients = Callable[..., FetcherClient]  # makes one for each call
STORE = "s3://b"
SO_SNDBUFFORCE = 32


class NoCache(ObjectCache):
    """For clients of the fake fetcher, whose cache is in memory."""

    def open(self, shown: str, pin: Pin) -> NoReturn:
        raise OSError


def url(kind: str, name: str = "o.tar") -> Url:
    return Url(STORE, f"{kind}/{name}")


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clients]:
    """Makes Remotes whose fetcher has stores in its memory."""
    monkeypatch.setattr(client, "_START", fake_fetcher.START)
    made: list[FetcherClient] = []

    def make(settings: Any = None, **options: Any) -> FetcherClient:
        made.append(FetcherClient(settings or {}, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()  # also one that is closed


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """The file for which a gated store waits."""
    yield tmp_path / "gate"
    (tmp_path / "gate").touch()


@pytest.fixture
def kernel() -> Iterator[tuple[socket.socket, int]]:
    """The kernel's end of a /dev/fuse, and the descriptor of the other one."""
    answers, device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with answers, device:
        device.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 1 << 23)
        yield answers, device.fileno()


def codes_of(*children: int) -> set[int]:
    return {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children}


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_stores_are_asked_by_the_fetcher(remote: Clients) -> None:
    ours = remote()
    found = ours.stat([url("plain"), url("missing")])
    assert found[0] == PIN
    assert isinstance(found[1], MissingObject)
    assert str(found[1]) == "s3://b/missing/o.tar: there is no such object"
    listed = [one.shown for one, _ in ours.list(Url(STORE, "plain"), deep=True).objects]
    assert listed == [f"s3://b/plain/{n}" for n in range(3)]
    assert ours.describe(url("plain")) == {"reachable": True}
    tar, whole = ours.open(url("plain"), PIN), body_of("plain/o.tar")
    assert tar.size == SIZE
    for size, offset in ((100, 5000), (100, SIZE - 50), (100, SIZE), (SIZE + 5, 0)):
        assert tar.pread(size, offset) == whole[offset:][:size]
    tar.close()


def test_many_clients_make_one_request_for_each_range(remote: Clients, gate: Path) -> None:
    """Threads and processes, before the store has answered any of them."""
    ours = remote({"gate": str(gate)})
    tar = ours.open(url("gated"), PIN)
    whole, results = body_of("gated/o.tar"), []

    def read() -> None:
        results.append(tar.pread(100_000, 300_000) == whole[300_000:400_000])

    children = [forked(lambda: tar.pread(100_000, 300_000) == whole[300_000:400_000]) for _ in range(4)]
    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    wait_until(lambda: ours.stats()["waiting"] == 12, "all readers")
    assert ours.stats()["requests"] == 1
    gate.touch()
    for thread in threads:
        thread.join()
    assert results == [True] * 8
    assert codes_of(*children) == {0}
    stats = ours.stats()
    assert (stats["requests"], stats["bytes_fetched"]) == (1, 102_400)


def test_the_fetcher_killed_in_the_middle_of_reads(remote: Clients) -> None:
    """No error and no wrong byte, for threads and for a child; each time another one has taken its place."""
    ours = remote(cache=NoCache(Path("/nowhere"), None))
    tar = ours.open(url("slow"), PIN)
    whole, problems, stop = body_of("slow/o.tar"), [], threading.Event()

    def read(seed: int) -> None:
        at = seed
        while not stop.is_set():
            at = (at * 48_271) % (SIZE - 70_000)
            if tar.pread(70_000, at) != whole[at : at + 70_000]:
                problems.append(at)

    ours.ensure()
    threads = [threading.Thread(target=read, args=(seed + 1,)) for seed in range(6)]
    places = range(0, SIZE - 70_000, 300_000)
    child = forked(lambda: all(tar.pread(70_000, at) == whole[at : at + 70_000] for at in places))
    for thread in threads:
        thread.start()
    killed: set[int] = set()
    for _ in range(4):
        wait_until(lambda: ours.fetcher not in {0, *killed}, "another fetcher")
        # Each reader has been answered by this one: at a request of which five in a row die it gives up.
        wait_until(lambda: (now := ours.stats())["in_flight"] and now["requests"] >= 30, "a request")
        killed.add(ours.fetcher)
        os.kill(ours.fetcher, signal.SIGKILL)
    stop.set()
    for thread in threads:
        thread.join()
    assert codes_of(child) == {0}
    assert problems == []
    assert len(killed) == 4


def test_a_fetcher_that_dies_at_each_request_or_cannot_start_is_an_error(
    remote: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = remote()
    with pytest.raises(Unreachable, match="has died 5 times"):
        ours.stat([url("crash")])
    assert ours.stat([url("plain")]) == [PIN]
    monkeypatch.setattr(client, "_START", "import sys; sys.exit(1)")
    with pytest.raises(Unreachable, match="has died"):
        remote().stat([url("plain")])
    monkeypatch.setattr(sys, "executable", "/nothing")
    with pytest.raises(Unreachable, match="cannot be started: /nothing: No such file or directory"):
        remote().stat([url("plain")])


def test_the_fetcher_ends_with_the_last_process_that_could_ask(remote: Clients) -> None:
    """The owner is killed, and its child goes on for a while."""
    out, into = os.pipe()
    wait, go = os.pipe()

    def last() -> bool:
        processes.outlive_parent()
        os.close(go)
        os.read(wait, 1)
        return os.write(into, b"+" if ours.stat([url("plain")]) == [PIN] else b"-") == 1

    def own() -> bool:
        ours.stat([url("plain")])
        forked(last)
        os.write(into, b"%8d" % ours.fetcher)
        signal.pause()
        return False

    ours = remote()
    owner = forked(own)
    os.close(into)
    ours.close()
    fetcher = int(os.read(out, 8))
    os.kill(owner, signal.SIGKILL)
    assert codes_of(owner) == {-signal.SIGKILL}
    assert is_alive(fetcher)
    os.close(go)
    assert os.read(out, 1) == b"+"
    wait_until(lambda: not is_alive(fetcher), "the end of the fetcher")
    for fd in (out, wait):
        os.close(fd)


def test_a_thousand_reads_of_one_connection_are_under_way(
    remote: Clients, gate: Path, kernel: tuple[socket.socket, int]
) -> None:
    """Handed over one after the other, none of them waits for another one to be answered."""
    answers, device = kernel
    ours = remote({"gate": str(gate)}, device=device)
    tar, whole = ours.open(url("gated"), PIN), body_of("gated/o.tar")
    for number in range(1000):
        tar.hand_over(2 * number, 8192 * number, 8192 * number + 50)
    ours.interrupt(14)
    ours.interrupt(4000)  # comes before its request
    tar.hand_over(4000, 0, 50)
    wait_until(lambda: ours.stats()["handed_over"] == 999, "all requests")
    replies = {unique: (error, data) for unique, error, data in (reply(answers) for _ in range(2))}
    assert replies == {14: (-4, b""), 4000: (-4, b"")}
    gate.touch()
    found = {unique: (error, data) for unique, error, data in (reply(answers) for _ in range(999))}
    assert found == {
        2 * number: (0, whole[8192 * number : 8192 * number + 50]) for number in range(1000) if number != 7
    }
    tar.close()


def reply(answers: socket.socket) -> tuple[int, int, bytes]:
    """The next reply to the kernel: number of the request, error, data."""
    data = answers.recv(1 << 16)
    assert int.from_bytes(data[:4], "little") == len(data)
    return int.from_bytes(data[8:16], "little"), int.from_bytes(data[4:8], "little", signed=True), data[16:]


def test_a_fetcher_in_the_place_of_a_dead_one_has_requests_sent_again(
    remote: Clients, kernel: tuple[socket.socket, int]
) -> None:
    """The first one does not: what was handed over before it came waits for it, and would be counted twice."""
    answers, device = kernel
    ours = remote(device=device)
    tar = ours.open(url("plain"), PIN)
    for unique in (2, 4):
        tar.hand_over(unique, 0, 4)
        assert reply(answers) == (unique, 0, body_of("plain/o.tar")[:4])
        fetcher = ours.fetcher
        os.kill(fetcher, signal.SIGKILL)
        # The kernel takes its lock away before it can be waited for: until then it may be one that just starts.
        wait_until(lambda pid=fetcher: not is_alive(pid), "its end")
        ours.ensure()
        assert reply(answers) == (0, 7, b"")
    tar.close()


@pytest.mark.parametrize("order", [(6, 6 | 1 << 63), (6 | 1 << 63, 6), (6, 6 | 1 << 63, 6 | 1 << 63, 6)])
def test_a_request_that_was_handed_out_again_is_answered_once_under_its_new_number(
    order: tuple[int, ...], remote: Clients, gate: Path, kernel: tuple[socket.socket, int]
) -> None:
    answers, device = kernel
    ours = remote({"gate": str(gate)}, device=device)
    tar = ours.open(url("gated"), PIN)
    for unique in order:
        tar.hand_over(unique, 4096, 4100)  # not the head, where the fetcher reads on
    wait_until(lambda: ours.stats()["handed_over"] == 1, "the request")
    gate.touch()
    assert reply(answers) == (6 | 1 << 63, 0, body_of("gated/o.tar")[4096:4100])
    wait_until(lambda: ours.stats()["handed_over"] == 0, "the reply")
    assert ours.stats()["requests"] == 1
    answers.setblocking(False)
    with pytest.raises(BlockingIOError):
        answers.recv(10)
    tar.close()


def opened_by(store: Any, cache: Any, alarm: Alarm, replies: Any) -> tuple[OpenObjects, KernelReads]:
    opened = OpenObjects(store, cache, alarm, 1 << 26, None)
    return opened, KernelReads(opened, replies, alarm)


class Replies:
    def __init__(self) -> None:
        self.found: list[tuple[int, int, bytes]] = []

    def data(self, unique: int, pieces: Sequence[memoryview]) -> None:
        self.found.append((unique, 0, b"".join(pieces)))

    def error(self, unique: int, number: int) -> None:
        self.found.append((unique, number, b""))


@in_loop
async def test_what_arrives_at_once_is_done_in_order() -> None:
    """A request, and before its work has begun its INTERRUPT; another one, and the end of its object."""
    store, replies, cache = MemoryStore(gated=True), Replies(), FakeCache()
    where, pin = store.put(content(100_000))
    opened, fetcher = opened_by(store, cache, Alarm(), replies)
    item = opened.open(where, pin, "a user")
    fetcher.hand_over(item, HandOver(2, 0, 0, 10, [], 0))
    fetcher.interrupt(2)
    fetcher.hand_over(item, HandOver(4, 0, 8192, 8200, [], 0))
    opened.close(item, "a user")
    assert replies.found == [(2, errno.EINTR, b"")]
    await settled()
    assert store.requests == [(8192, 12288)]
    store.let()
    await until(lambda: len(replies.found) == 2)
    assert replies.found[1] == (4, 0, content(100_000)[8192:8200])
    await until(lambda: item.cached.closed)  # type: ignore[union-attr]


@in_loop
async def test_a_request_of_which_each_fetcher_dies_ends_in_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """Others that are under way at the same time are counted on their own."""
    alarm = Alarm()
    replies = Replies()

    async def life(asked: Sequence[int], answered: bool = False) -> None:
        """The requests, and the sudden end of their fetcher, perhaps after it has answered."""
        store = MemoryStore(gated=True)
        where, pin = store.put(content(100_000))
        opened, fetcher = opened_by(store, None, alarm, replies)
        item = opened.open(where, pin, "a user")
        before = len(replies.found)
        for unique in asked:
            fetcher.hand_over(item, HandOver(unique, 0, 0, 10, [], 0))
            again = unique | IS_RESENT  # after the death of a worker: does not count
            fetcher.hand_over(item, HandOver(again, 0, 0, 10, [], 0))
        await settled()
        if answered:
            store.let()
            await until(lambda: len(replies.found) == before + len(asked))

    for _ in range(DEATHS_MAX):
        await life([2, 4])
    await life([4, 6], answered=True)  # not 2: its worker has died, too
    await life([2])
    assert [reply[:2] for reply in replies.found] == [(4 | IS_RESENT, 0), (6 | IS_RESENT, 0)]
    await life([2 | IS_RESENT])
    assert replies.found[2:] == [(2 | IS_RESENT, errno.EIO, b"")]
    assert "bytes 0 to 10 are not read: the process that fetches has died 6 times at it" in caplog.text


@in_loop
async def test_a_cache_is_closed_when_nothing_writes_to_it_any_more() -> None:
    """Also not a thread for a request that was dropped: its descriptor may be that of another file by then."""
    store, cache = MemoryStore(), FakeCache()
    where, pin = store.put(content(1 << 20))
    opened, _ = opened_by(store, cache, Alarm(), None)
    item = opened.open(where, pin, "a user")
    cached = item.cached
    assert isinstance(cached, MemoryCache)
    writing, go, plain = threading.Event(), threading.Event(), cached.put

    def slow_put(offset: int, data: bytes | memoryview, *, at_once: bool) -> bool:
        assert not at_once
        writing.set()
        go.wait()
        assert not cached.closed
        return plain(offset, data)

    cached.put = slow_put
    opened.will_need(item, messages.Read(0, 0, 1 << 20, 0))
    try:
        await until(writing.is_set)
        opened.close(item, "a user")
        await settled()
        assert not cached.closed
    finally:
        go.set()
    await until(lambda: cached.closed)
    assert len(cached.blocks) == 256


def test_errors_keep_their_kind_are_answered_as_errno_and_logged_once(
    remote: Clients, tmp_path: Path, kernel: tuple[socket.socket, int]
) -> None:
    answers, device = kernel
    ours = remote({"total": "0.05"}, device=device, log=tmp_path / "log")
    found = {}
    for kind, error in (("denied", DeniedObject), ("changed", ObjectChanged), ("never", Unreachable)):
        tar = ours.open(url(kind), PIN)
        with pytest.raises(error, match=f"^s3://b/{kind}/o.tar"):
            tar.pread(10, 0)
        for unique in (2, 4, 6):
            tar.hand_over(unique, 0, 4)
        found[kind] = {reply(answers)[1] for _ in range(3)}
        tar.close()
    assert found == {"denied": {-13}, "changed": {-116}, "never": {-5}}
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.partition(": ")[2] for line in lines] == [
        "s3://b/denied/o.tar: access denied",
        "s3://b/changed/o.tar has changed",
        "s3://b/never/o.tar: no answer",
    ]


def test_strangers_do_not_speak_to_each_other(
    remote: Clients, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The fetcher belongs to another user, as far as it knows, or as far as its client knows."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12_345)
        ours = remote(log=tmp_path / "log")
    with pytest.raises(Unreachable):
        ours.stat([url("plain")])
    assert "is not served" in (tmp_path / "log").read_text()
    monkeypatch.setattr(client, "peer_user", lambda connection: 12_345)
    with pytest.raises(Unreachable):
        remote().stat([url("plain")])


def test_the_fetcher_may_open_as_many_files_as_it_can(remote: Clients) -> None:
    """It has the objects of all processes open; the limit of a program is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        ours = remote()
        ours.stat([url("plain")])
        assert resource.prlimit(ours.fetcher, resource.RLIMIT_NOFILE)[0] == host.raise_file_limit()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_object_that_is_closed_right_after_a_request(remote: Clients) -> None:
    """As by another thread, whose set has the same shard."""
    connection = remote()._connection()
    number = connection.number_of(url("plain"), PIN)
    read = messages.range_frame(messages.READ, 99, messages.Read(number, 0, 10, 0))
    connection.send(lambda _: read + messages.text(messages.CLOSE, 0, number))
    assert connection._receive() == (messages.DATA, 99, body_of("plain/o.tar")[:10])


def test_an_object_is_closed_for_all_threads_that_have_read_it(remote: Clients) -> None:
    ours, together = remote(), threading.Barrier(4)
    with ThreadPoolExecutor(4) as pool:
        tar = ours.open(url("plain"), PIN)

        def read(_: int) -> bytes:
            together.wait(PATIENCE)  # so that each thread has a connection
            return tar.pread(10, 0)

        assert set(pool.map(read, range(4))) == {body_of("plain/o.tar")[:10]}
        tar.close()
        wait_until(lambda: ours.stats()["objects"] == 0, "the end of the object")
        assert ours.stats()["memory"] == 0
        assert set(pool.map(read, range(4))) == {body_of("plain/o.tar")[:10]}


@pytest.mark.parametrize("moment", ["sending", "receiving"])
def test_an_interrupt_in_the_middle_of_a_frame(
    remote: Clients, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """As by Ctrl-C in a notebook, which goes on: no bytes of that answer are taken for the next one."""
    ours = remote()
    tar = ours.open(url("plain"), PIN)
    assert tar.pread(10, 0) == body_of("plain/o.tar")[:10]

    def number_of(connection: FetcherConnection, *_: object) -> int:
        connection._socket.sendall(messages.text(messages.HEAD, 1, [url("plain")])[:-5])
        raise KeyboardInterrupt

    def answer_head_of(head: bytes) -> tuple[int, int, int]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if moment == "sending":
            patch.setattr(FetcherConnection, "number_of", number_of)
        else:
            patch.setattr(messages, "answer_head_of", answer_head_of)
        with pytest.raises(KeyboardInterrupt):
            tar.pread(100_000, 0)
    assert tar.pread(100_000, 500) == body_of("plain/o.tar")[500:100_500]


@pytest.mark.parametrize(
    ("kind", "length"),
    [(messages.READ, 0), (messages.DATA, messages.READ_MAX + 1), (255, 1), (messages.CACHED, 1)],
)
def test_an_answer_that_the_fetcher_cannot_send(kind: int, length: int) -> None:
    assert messages.answer_head_of(messages.head(messages.DATA, 3, 7)) == (7, messages.DATA, 3)
    with pytest.raises(ValueError, match="no answer"):
        messages.answer_head_of(messages.head(kind, 3, length))


def test_a_stream_is_fetched_ahead_within_the_budget(remote: Clients) -> None:
    ours = remote(memory=16 << 20)
    tar, whole = ours.open(url("slow"), PIN), body_of("slow/o.tar")
    tar.stream()
    read = b"".join(tar.pread(50_000, at) for at in range(0, SIZE, 50_000))
    assert read == whole
    stats = ours.stats()
    assert stats["bytes_fetched"] == SIZE
    assert stats["requests"] < 60
    assert stats["memory_most"] <= 16 << 20


def test_frames_may_arrive_in_pieces() -> None:
    sent = messages.text(messages.HEAD, 7, ["x"]) + messages.hand_over(1, 2, 3, 4, [(5, 6)], 7)
    received = bytearray()
    frames: list[Any] = []
    for byte in sent:
        received.append(byte)
        frames += messages.frames_of(received)
    assert [(frame.kind, frame.number) for frame in frames] == [(messages.HEAD, 7), (messages.HAND_OVER, 0)]
    assert messages.hand_over_of(frames[1].body) == (1, 2, 3, 4, [(5, 6)], 7)
    with pytest.raises(ValueError, match="no frame"):
        list(messages.frames_of(bytearray(b"\xff" * 20)))


def test_a_closed_client_leaves_no_descriptor_open(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    client = FetcherClient([])
    client.close()
    client.close()
    del client
    assert set(os.listdir("/proc/self/fd")) <= before


def test_calls_in_threads() -> None:
    """Results and errors reach their callers; a call that nobody waits for occupies its thread until it ends."""
    hold = threading.Event()

    async def run() -> None:
        threads = Threads(2)
        abandoned = threads.call(hold.wait)
        assert threads.is_free
        with pytest.raises(ZeroDivisionError):
            await threads.call(lambda: 1 // 0)
        abandoned.cancel()
        assert await asyncio.gather(*(threads.call(lambda n=n: n) for n in range(50))) == list(range(50))
        others = threads.call(hold.wait)
        assert not threads.is_free
        hold.set()
        assert await others

    asyncio.run(run())
