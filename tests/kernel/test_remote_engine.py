"""Remote shards served by the kernel: only what is complete in the cache, held and right, never a hole of it."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tars
from tests.conftest import Program
from tests.kernel.mounts import KERNEL, end_mount, engine_of, is_mounted, kill, mount, need_erofs
from tests.processes import wait_until
from tests.remote.cached import flip
from tests.web_server import WebServer
from wdsfs.kernel.guard import Guarded, guard_of

SIZE = 300_000


def content(letter: bytes) -> bytes:
    return tars.tar(tars.member(b"a.x", letter * SIZE), tars.member(b"b.x", b"b"))


@pytest.fixture
def web() -> Iterator[WebServer]:
    with WebServer().running() as server:
        server.put("/x-0.tar", content(b"o"), etag='"0"')
        server.put("/x-1.tar", content(b"p"), etag='"1"')
        yield server


@pytest.fixture
def mounts(web_program: Program) -> Iterator[Program]:
    need_erofs()
    try:
        yield web_program
    finally:
        end_mount(web_program.mountpoint)


def urls(web: WebServer) -> str:
    return web.url + "/x-{0..1}.tar"


def fetch_and_mount(program: Program, web: WebServer) -> Guarded:
    program.run("fetch", urls(web))
    return mount(program, urls(web))


def member(program: Program, shard: int = 0) -> Path:
    return program.mountpoint / f"x-{shard}" / "a" / "x"


def shown(program: Program, shard: int = 0) -> bytes:
    found = member(program, shard).read_bytes()
    assert found == found[:1] * SIZE
    return found[:1]


def data_of(program: Program, letter: bytes) -> Path:
    """The file in the cache with the shard of this content."""
    found = [one for one in (program.home / "cache").glob("*.data") if content(letter) == one.read_bytes()]
    assert len(found) == 1
    return found[0]


# --- complete, or not --------------------------------------------------------------------------------------


def test_fetched_objects_are_served_without_the_store(mounts: Program, web: WebServer) -> None:
    """Without the store; `where`, `status` and `cache` say what it is."""
    guard = fetch_and_mount(mounts, web)
    web.requests.clear()
    assert (shown(mounts, 0), shown(mounts, 1)) == (b"o", b"p")
    assert web.requests == []
    [one] = mounts.json("where", member(mounts))
    url = web.url + "/x-0.tar"
    expected = {"shard": url, "url": url, "compressed": False, "member": "a.x", "offset": 512}
    assert one.items() >= expected.items()
    assert guard.paths == [url, web.url + "/x-1.tar"]
    text = mounts.run("status", mounts.mountpoint).stdout.decode()
    assert "copies   of 2 shards" in text
    assert mounts.json("cache")["remote"]["held_bytes"] > 2 * SIZE
    with mounts.mounted(urls(web), at=mounts.directory("other")) as other:  # no writer of what the kernel reads
        assert (other.path / "x-0" / "a" / "x").read_bytes() == b"o" * SIZE
    mounts.run("cache", "--verify")
    assert shown(mounts) == b"o"
    assert guard.alive


def test_an_incomplete_object_is_not_served(mounts: Program, web: WebServer) -> None:
    """One block that is not there is enough: `kernel` says what to do, `auto` takes FUSE."""
    message = mounts.refused(*KERNEL, urls(web), mounts.mountpoint, code=5)
    assert f"{web.url}/x-0.tar is not complete in the cache; run: wdsfs fetch" in message
    mounts.run("fetch", urls(web))
    data = data_of(mounts, b"p")
    flip(data, 50_000)
    mounts.run("cache", "--verify")  # which drops the block
    message = mounts.refused(*KERNEL, urls(web), mounts.mountpoint, code=5)
    assert f"{web.url}/x-1.tar is not complete" in message
    with mounts.mounted("--engine", "auto", urls(web)) as found:
        assert engine_of(found.path) == "fuse.wdsfs"
    mount(mounts, web.url + "/x-0.tar")
    assert shown(mounts) == b"o"


@pytest.mark.parametrize("how", ["flipped", "hole"])
def test_a_damaged_object_is_not_served(how: str, mounts: Program, web: WebServer) -> None:
    """All bytes are compared with their checksums, however complete the table says that they are."""
    mounts.run("fetch", urls(web))
    mounts.run("index", "-q", urls(web))
    data = data_of(mounts, b"p")
    if how == "flipped":
        flip(data, 100_000)
    else:
        with data.open("r+b") as file:
            file.truncate(50_000)
            file.truncate(len(content(b"p")))
    message = mounts.refused(*KERNEL, urls(web), mounts.mountpoint, code=5)
    assert f"{web.url}/x-1.tar" in message
    assert "wdsfs fetch" in message
    assert not is_mounted(mounts)
    fetch_and_mount(mounts, web)
    assert shown(mounts, 1) == b"p"


def test_an_image_for_others_cannot_have_copies(mounts: Program, web: WebServer) -> None:
    mounts.run("fetch", urls(web))
    image = mounts.home / "set.erofs"
    message = mounts.refused("image", "-q", urls(web), "-o", image, code=9)
    assert "x-0.tar: is remote, and an image refers to local files" in message
    assert "wdsfs mount --engine kernel" in message


def test_a_compressed_object_is_served_from_its_copy(mounts: Program, web: WebServer) -> None:
    """Of which the unpacked copy is read, as long as there is one; the object may go."""
    web.put("/z.tar.gz", gzip.compress(content(b"z")), etag='"z"')
    url = web.url + "/z.tar.gz"
    mounts.run("fetch", url)
    mount(mounts, url)
    mounts.run("cache", "--clear")
    assert (mounts.mountpoint / "z" / "a" / "x").read_bytes() == b"z" * SIZE
    [one] = mounts.json("where", mounts.mountpoint / "z" / "a" / "x")
    assert (one["url"], one["compressed"], one["member"]) == (url, True, "a.x")
    cache = mounts.json("cache")
    assert (sum(one["bytes"] for one in cache["remote"]["objects"]), cache["unpacked"]["files"]) == (0, 1)
    mounts.run("umount", mounts.mountpoint)
    mount(mounts, url)
    assert sum(one["bytes"] for one in mounts.json("cache")["remote"]["objects"]) == 0


# --- held --------------------------------------------------------------------------------------------------


def test_a_cached_object_stays_while_it_is_mounted(mounts: Program, web: WebServer) -> None:
    """... or a program has a file of it open; also without a guard."""
    guard = fetch_and_mount(mounts, web)
    data = data_of(mounts, b"o")
    kill(guard)
    for words in (("--clear",), ("--trim", "0"), ("--clear", web.url)):
        mounts.run("cache", *words)
        assert data.exists()
    with member(mounts).open("rb") as opened:
        mounts.run("umount", "--lazy", mounts.mountpoint)
        mounts.run("cache", "--clear")
        assert data.exists()
        assert opened.read() == b"o" * SIZE
    wait_until(lambda: not mounts.json("cache")["remote"]["held_bytes"], "the objects to be let go")
    mounts.run("cache", "--clear")
    assert not data.exists()


# --- changes -----------------------------------------------------------------------------------------------


def test_a_replaced_object_is_shown_after_fetch_and_refresh(mounts: Program, web: WebServer) -> None:
    """The mount shows the object that it was made over, whole, until the new one is here and is taken."""
    fetch_and_mount(mounts, web)
    web.put("/x-0.tar", content(b"n"), etag='"n"')
    refused = mounts.refused("refresh", mounts.mountpoint, code=5)
    assert f"{web.url}/x-0.tar is not complete in the cache" in refused
    assert shown(mounts) == b"o"
    text = mounts.run("status", mounts.mountpoint).stdout.decode()
    assert f"replaced  {web.url}/x-0.tar; the old content is shown until" in text
    mounts.run("fetch", urls(web))
    assert shown(mounts) == b"o"
    assert mounts.json("refresh", mounts.mountpoint)["replaced"] == [web.url + "/x-0.tar"]
    assert (shown(mounts, 0), shown(mounts, 1)) == (b"n", b"p")


def test_damage_that_is_found_ends_the_mount(mounts: Program, web: WebServer) -> None:
    """Whoever finds it; who has a file open has to close it before the bytes are mended."""
    fetch_and_mount(mounts, web)
    data = data_of(mounts, b"o")
    checked = data.stat()
    kill(guard_of(str(mounts.mountpoint)))  # type: ignore[arg-type]
    flip(data, 100_000)
    message = mounts.run(*KERNEL, urls(web), mounts.mountpoint, code=5).stderr.decode()
    assert "some of its bytes in the cache were damaged" in message
    assert f"written while it had no guard, or are damaged: {web.url}/x-0.tar" in message
    assert not is_mounted(mounts)
    assert data.stat().st_ino == checked.st_ino
    fetch_and_mount(mounts, web)
    assert shown(mounts) == b"o"


def test_a_guard_notices_that_others_find_damage(mounts: Program, web: WebServer) -> None:
    """As if a disk had given other bytes: nobody has written."""
    fetch_and_mount(mounts, web)
    [table] = [one for one in (mounts.home / "cache").glob("*.table") if one.stem == data_of(mounts, b"o").stem]
    with table.open("r+b") as file:  # the checksum of the last block
        file.seek(-8, os.SEEK_END)
        file.write(b"????????")
    mounts.run("cache", "--verify")
    wait_until(lambda: not is_mounted(mounts), "the mount to end")
