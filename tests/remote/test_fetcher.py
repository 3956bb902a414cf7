"""The real fetcher, with its stores and its cache, in front of a web server that counts."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import wait_until
from tests.remote.stores import content
from tests.web_server import WebServer
from wdsfs.door.pins import Pin
from wdsfs.door.urls import Url, parse
from wdsfs.errors import ObjectChanged
from wdsfs.remote.client import FetcherClient, RemoteTar
from wdsfs.remote.object_cache import ObjectCache

Clients = Callable[..., FetcherClient]  # makes one for each call
SIZE = 20 << 20
DATA = content(SIZE)
LIMIT = 1 << 30


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Clients]:
    """Makes Remotes, each with a fetcher of its own, that share a cache."""
    made: list[FetcherClient] = []

    def make(settings: Any = (), **options: Any) -> FetcherClient:
        place = tmp_path / "cache", LIMIT
        made.append(FetcherClient(settings, ObjectCache(*place), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_the_client_for_the_first_shard_is_ready_before_its_first_read(remote: Clients, tmp_path: Path) -> None:
    """It takes 20 ms to make: the fetcher opens its file of certificates, here a pipe, and sends no request."""
    pipe = tmp_path / "certificates"
    os.mkfifo(pipe)
    settings = [("https://nowhere.invalid/", {"certificates": str(pipe)})]
    remote(settings, first=parse("https://nowhere.invalid/o.tar")).ensure()

    def is_opened() -> bool:
        with contextlib.suppress(OSError):  # nobody reads it yet
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
            return True
        return False

    wait_until(is_opened, "the certificates are read")


def served(web: WebServer, remote: FetcherClient) -> tuple[Url, Pin]:
    web.put("/o.tar", DATA)
    url = parse(f"{web.url}/o.tar")
    [pin] = remote.stat([url])
    assert isinstance(pin, Pin)
    web.requests.clear()
    web.sent = 0
    return url, pin


def ranges(web: WebServer) -> list[str]:
    return [request.headers["range"] for request in web.gets()]


def test_two_mounts_that_want_a_range_at_once_make_one_request(web: WebServer, remote: Clients) -> None:
    both = [remote(), remote()]
    url, pin = served(web, both[0])
    tars = [one.open(url, pin) for one in both]
    web.hold.clear()
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda tar=tar: found.append(tar.pread(50_000, 0))) for tar in tars]
    for thread in threads:
        thread.start()
    for one in both:
        wait_until(lambda one=one: one.stats()["waiting"] == 1, "both readers")
    wait_until(web.gets, "the request")
    web.hold.set()
    for thread in threads:
        thread.join()
    assert found == [DATA[:50_000]] * 2
    assert len(web.gets()) == 1


@pytest.mark.parametrize("cached", [True, False])
def test_a_pass_in_order_fetches_each_byte_once(web: WebServer, remote: Clients, cached: bool) -> None:
    ours = remote() if cached else FetcherClient(())
    url, pin = served(web, ours)
    tar = ours.open(url, pin)
    for at in range(0, SIZE, 100_000):
        assert tar.pread(100_000, at) == DATA[at : at + 100_000]
    assert web.sent == SIZE
    assert len(web.gets()) < 40
    tar.close()
    ours.close()


def test_a_replaced_object_is_stale_and_its_new_pin_is_known_before(web: WebServer, remote: Clients) -> None:
    """A range that is cached comes from the old object, no other one does."""
    ours = remote()
    url, pin = served(web, ours)
    tar = ours.open(url, pin)
    assert tar.pread(10, 0) == DATA[:10]
    web.put("/o.tar", content(SIZE, 2), etag='"2"')
    with pytest.raises(ObjectChanged):
        tar.pread(10, 10_000_000)
    assert ours.alarm.count == 1
    known = _cache(ours).pin_of(url.shown)
    assert known is not None
    assert known.etag == '"2"'
    new = ours.open(url, known)
    assert new.pread(10, 10_000_000) == content(SIZE, 2)[10_000_000:10_000_010]


def test_an_object_that_was_pinned_without_an_etag_stays_so_and_no_other(web: WebServer, remote: Clients) -> None:
    ours, urls = remote(), [parse(f"{web.url}/{name}.tar") for name in ("a", "b")]
    for url in urls:
        web.put(f"/{url.key}", DATA[:10])
    pins = [pin for pin in ours.stat(urls) if isinstance(pin, Pin)]
    assert [pin.etag for pin in pins] == ['"1"', '"1"']
    weak = pins[0]._replace(etag="")
    _cache(ours).keep_pin(urls[0].shown, weak)
    assert remote().stat(urls) == [weak, pins[1]]


def _cache(remote: FetcherClient) -> ObjectCache:
    assert isinstance(remote._cache, ObjectCache)
    return remote._cache


def test_fetching_ahead_of_time_goes_on_where_it_has_stopped(web: WebServer, remote: Clients) -> None:
    ours = remote()
    url, pin = served(web, ours)
    tar = ours.open(url, pin)
    assert tar.pread(4096, 8 << 20) == DATA[8 << 20 : (8 << 20) + 4096]
    seen: list[int] = []
    ours.fetch(url, pin, seen.append)
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (4096, SIZE)
    assert web.sent == SIZE
    ours.fetch(url, pin)
    assert web.sent == SIZE
    assert tar.pread(SIZE, 0) == DATA


def test_a_fetch_whose_fetcher_is_killed_goes_on(web: WebServer, remote: Clients) -> None:
    ours = remote()
    url, pin = served(web, ours)
    web.hold.clear()
    thread = threading.Thread(target=ours.fetch, args=(url, pin))
    thread.start()
    wait_until(web.gets, "the first request")
    os.kill(ours.fetcher, signal.SIGKILL)
    web.hold.set()
    thread.join()
    before = len(web.gets())
    assert ours.open(url, pin).pread(SIZE, 0) == DATA
    assert len(web.gets()) == before


def test_an_object_that_has_become_complete_is_verified_for_all_that_will_read_it(
    web: WebServer, remote: Clients, tmp_path: Path
) -> None:
    ours = remote()
    url, pin = served(web, ours)
    tar = ours.open(url, pin)

    def unchecked() -> int:
        with contextlib.closing(ObjectCache(tmp_path / "cache", LIMIT).open(url.shown, pin)) as fresh:
            return fresh._checked[: SIZE // 4096].count(b"\0")

    for at in range(0, SIZE, 1 << 20):
        assert tar.pread(1 << 20, at) == DATA[at : at + (1 << 20)]
    wait_until(lambda: unchecked() == 0, "the comparison")


def test_the_cache_of_a_mount_with_a_lower_limit_is_trimmed_at_its_start(
    web: WebServer, remote: Clients, tmp_path: Path
) -> None:
    ours = remote()
    url, pin = served(web, ours)
    ours.fetch(url, pin)
    device = os.open(os.devnull, os.O_WRONLY)
    place = tmp_path / "cache", SIZE // 2
    later = FetcherClient((), ObjectCache(*place), device=device)
    try:
        later.ensure()
        wait_until(lambda: not list(ObjectCache(*place).usage()), "the removal")
    finally:
        later.close()
        os.close(device)


def test_a_cache_that_is_damaged_serves_no_wrong_byte(web: WebServer, remote: Clients, tmp_path: Path) -> None:
    ours = remote()
    url, pin = served(web, ours)
    ours.fetch(url, pin)
    for file in (tmp_path / "cache").rglob("*"):
        if file.is_file() and file.stat().st_size == SIZE:
            with file.open("r+b") as opened:
                for at in range(0, SIZE, 1 << 20):
                    opened.seek(at + 77)
                    opened.write(b"damaged")
    tar = remote().open(url, pin)
    assert all(tar.pread(100_000, at) == DATA[at : at + 100_000] for at in range(0, SIZE, 100_000))


def test_secrets_are_in_no_list_of_processes(web: WebServer, remote: Clients) -> None:
    ours = remote([("http://", {"user": "me", "password": "geheim"})])
    url, pin = served(web, ours)
    tar: RemoteTar = ours.open(url._replace(query="sig=verborgen"), pin)
    assert tar.pread(10, 0) == DATA[:10]
    assert "authorization" in web.gets()[0].headers
    for name in ("cmdline", "environ"):
        told = Path(f"/proc/{ours.fetcher}/{name}").read_bytes()
        assert b"geheim" not in told
        assert b"verborgen" not in told


def test_the_threads_of_the_fetcher_share_a_heap(web: WebServer, remote: Clients) -> None:
    """For a heap of its own the C library reserves 64 MiB of addresses."""
    ours = remote()
    url, pin = served(web, ours)
    assert ours.open(url, pin).pread(len(DATA), 0) == DATA
    reserved = [line for line in Path(f"/proc/{ours.fetcher}/maps").read_text().splitlines() if " ---p " in line]
    ranges = [[int(at, 16) for at in line.split()[0].split("-")] for line in reserved]
    assert [end - begin for begin, end in ranges if end - begin > 16 << 20] == []


def test_a_pass_goes_on_in_the_next_shard_before_that_is_read(web: WebServer, remote: Clients) -> None:
    """All of it; and little once a pass has gone on elsewhere, as of shards in random order."""
    ours = remote()
    names = ["/a.tar", "/b.tar", "/c.tar", "/d.tar", "/e.tar"]
    for name in names:
        web.put(name, DATA)
    urls = [parse(f"{web.url}{name}") for name in names]
    pins = [pin for pin in ours.stat(urls) if isinstance(pin, Pin)]
    tars = [ours.open(url, pin) for url, pin in zip(urls, pins, strict=True)]
    for tar, following in zip(tars, zip(urls[1:], pins[1:], strict=True), strict=False):
        tar.following = following

    def read(tar: RemoteTar) -> int:
        """Read all of it in order; return the bytes of all that is fetched then."""
        for at in range(0, SIZE, 100_000):
            assert tar.pread(100_000, at) == DATA[at : at + 100_000]
        wait_until(lambda: not ours.stats()["in_flight"], "what is fetched ahead")
        fetched: int = ours.stats()["bytes_fetched"]
        return fetched

    assert read(tars[0]) == 2 * SIZE
    tars[4].pread(10, 0)  # not the next one
    before: int = ours.stats()["bytes_fetched"]
    assert read(tars[2]) == before + SIZE + (1 << 20)
    for tar in tars:
        tar.close()
    ours.close()
