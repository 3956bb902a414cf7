"""Portable indexes by the program: written, given to commands, mounted, and read by ranges from a web server."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path

import pytest

from tests import servers, sets, tars
from tests.conftest import Program, fails
from tests.processes import wait_until
from tests.servers import BUCKET, Server
from tests.web_server import WebServer

COUNT, SIZE = 70, 30_000  # shards: more than are asked for one by one


def shard(number: int) -> bytes:
    return tars.tar(
        *(
            tars.member(b"%d-%d.%s" % (number, sample, column), bytes([number + sample]) * size)
            for sample in range(4)
            for column, size in ((b"cls", 3), (b"jpg", SIZE))
        )
    )


@pytest.fixture
def program(web_program: Program) -> Program:
    return web_program


@pytest.fixture
def web(web: WebServer) -> WebServer:
    for number in range(COUNT):
        web.put(f"/set/x-{number}.tar", shard(number), etag=f'"{number}"')
    return web


def afresh(program: Program, web: WebServer | None = None) -> None:
    """Forget everything: another machine."""
    name = f"machine-{len(list(program.home.glob('machine-*')))}"
    program.environment["WDSFS_INDEX_DIR"] = str(program.home / name)
    program.environment["WDSFS_CACHE_DIR"] = str(program.directory(f"{name}-cache"))
    if web is not None:
        web.requests.clear()
        web.sent = 0


def indexed(program: Program, *arguments: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(program.run("index", "--json", *arguments).stdout)
    return found


def test_an_index_is_written_renewed_and_refused(program: Program) -> None:
    home = program.home
    sets.make(home / "a", 3)
    first = indexed(program, "-o", "a/set.wdsidx", "a/s{0..2}.tar")
    assert first["bytes"] == (home / "a/set.wdsidx").stat().st_size
    afresh(program)
    assert indexed(program, "a/set.wdsidx")["rebuilt"] == 0
    (home / "a/s1.tar").write_bytes(sets.content(1, samples=5))
    (home / "a/s3.tar").write_bytes(sets.content(3))
    done = program.run("index", "a/s{0..3}.tar")
    assert done.stderr.decode() == (
        f"wdsfs: warning: {home}/a/set.wdsidx: 1 of its 3 shards have changed since it was written "
        f"({home}/a/s1.tar) and are indexed; renew it: wdsfs index --update {home}/a/set.wdsidx\n"
    )
    afresh(program)
    assert indexed(program, "--update", "a/set.wdsidx", "a/s3.tar")["rebuilt"] == 2
    afresh(program)
    assert indexed(program, "a/set.wdsidx")["rebuilt"] == 0
    assert program.run("ls", "a/set.wdsidx").stdout == b"s0/\ns1/\ns2/\ns3/\n"
    (home / "a/s0.tar").unlink()
    assert b"1 of 4 shards are missing" in program.run("index", "--update", "a/set.wdsidx", code=3).stderr
    program.run("index", "--update", "a/set.wdsidx", "--allow-missing")
    assert program.run("ls", "a/set.wdsidx").stdout == b"s1/\ns2/\ns3/\n"
    before = (home / "a/set.wdsidx").read_bytes()
    program.run("index", "-o", "a/set.wdsidx", "a/s{1..3}.tar")
    assert (home / "a/set.wdsidx").read_bytes() == before
    (home / "a/set.wdsidx").write_bytes(before[:-9])
    afresh(program)
    damaged = program.run("index", "--json", "a/s{1..3}.tar")
    assert json.loads(damaged.stdout)["rebuilt"] == 3
    assert damaged.stderr.count(b"\n") == 1
    assert b"a/set.wdsidx: is not a sound index of shards" in damaged.stderr
    assert b"is not a sound index" in program.run("ls", "a/set.wdsidx", code=2).stderr
    program.run("index", "-o", "x.wdsidx", "--update", "x.wdsidx", "a/s1.tar", code=2)


def test_every_command_takes_a_portable_index(program: Program) -> None:
    home = program.home
    sets.make(home / "a", 2)
    program.run("index", "-o", "a/set.wdsidx", "a/s{0..1}.tar")
    (home / "a").rename(home / "b")
    (home / "b/set.wdsidx").rename(home / "set.wdsidx")
    there = ("--base", "b", "set.wdsidx")
    afresh(program)
    assert json.loads(program.run("info", "--json", *there).stdout)["samples"] == 6
    assert program.run("cat", *there, "s1/d0/1-0/txt").stdout == b"1"
    program.run("check", *there)
    program.run("export", "-o", "out", *there)
    with program.mounted("--overlay", "o", *there) as mounted:
        assert (mounted.path / "s0/d1/0-1/cls").read_bytes() == b"1"
        (mounted.path / "s0/d1/0-1/cls").write_bytes(b"7")
        program.run("diff", str(mounted.path))
    program.run("commit", "--overlay", "o", "-o", "new/n-%d.tar", *there)
    program.run("index", "-o", "new/set.wdsidx", "new/n-{0..1}.tar")
    afresh(program)
    assert program.run("cat", "new/set.wdsidx", "n-0/d1/0-1/cls").stdout == b"7"
    assert indexed(program, "new/set.wdsidx")["rebuilt"] == 0


def put(program: Program, web: WebServer, *arguments: str) -> str:
    """Write an index, and put it beside the shards; returns its URL."""
    program.run("index", "-o", "set.wdsidx", *arguments)
    web.put("/set/set.wdsidx", (program.home / "set.wdsidx").read_bytes(), etag='"index"')
    afresh(program, web)
    return web.url + "/set/set.wdsidx"


def asked(web: WebServer) -> list[str]:
    """What was asked for since the last call, without the method."""
    found = [f"{request.method} {request.path}" for request in web.requests]
    web.requests.clear()
    return found


def test_a_mount_asks_for_nothing_but_what_is_looked_at(program: Program, web: WebServer) -> None:
    url = put(program, web, f"{web.url}/set/x-{{0..{COUNT - 1}}}.tar")
    with program.mounted(url) as mounted:
        assert len(os.listdir(mounted.path)) == COUNT
        assert asked(web) == ["HEAD /set/set.wdsidx", "GET /set/set.wdsidx"]
        assert sorted(os.listdir(mounted.path / "x-5")) == [f"5-{sample}" for sample in range(4)]
        assert asked(web) in ([], ["GET /set/set.wdsidx"])
        assert (mounted.path / "x-5/5-2/jpg").read_bytes() == bytes([7]) * SIZE
        assert asked(web) == ["GET /set/x-5.tar"]
        web.objects["/set/x-6.tar"].content = shard(8)
        web.objects["/set/x-6.tar"].etag = '"another"'
        # One that was replaced since: what was indexed is shown until the first read, which has it indexed.
        assert sorted(os.listdir(mounted.path / "x-6")) == ["6-0", "6-1", "6-2", "6-3"]
        mounted.expect_log("x-6.tar: it has been replaced")
        mounted.expect_log("x-6.tar has changed")
        with fails(errno.ESTALE, errno.ENOENT):
            (mounted.path / "x-6/6-0/jpg").read_bytes()

        def is_new() -> bool:
            with contextlib.suppress(OSError):  # "Stale file handle", if the change is noticed in between
                return (mounted.path / "x-6/8-0/cls").exists()
            return False

        wait_until(is_new, "the new object")  # the kernel keeps names for 1 s
        assert (mounted.path / "x-6/8-1/cls").read_bytes() == b"\x09" * 3
    afresh(program, web)
    assert program.run("cat", url, "x-9/9-0/cls").stdout == b"\x09" * 3


def test_shards_that_were_uploaded(program: Program, web: WebServer) -> None:
    """Neither time nor ETag is that of the files that were indexed."""
    for number in range(3):
        (program.home / f"x-{number}.tar").write_bytes(shard(number))
    url = put(program, web, "x-{0..2}.tar")
    web.objects["/set/x-2.tar"].content = tars.tar(
        *(
            tars.member(b"2-%d.%s" % (sample, column), b"n" * SIZE)
            for sample in range(2)
            for column in (b"jpg", b"xyz")
        )
    ).ljust(len(shard(2)), b"\0")
    with program.mounted(url) as mounted:
        asked(web)
        assert (mounted.path / "x-1/1-2/jpg").read_bytes() == bytes([3]) * SIZE
        assert asked(web).count("GET /set/x-1.tar") <= 3
        assert (mounted.path / "x-2/2-1/xyz").read_bytes() == b"n" * SIZE


def test_one_beside_the_shards_in_a_listing(program: Program, tmp_path: Path) -> None:
    """What is asked for at a store without a listing is not more than without an index."""
    with WebServer().running() as web:
        web.put("/set/x-0.tar", shard(0), etag='"0"')
        put(program, web, f"{web.url}/set/x-0.tar")
        program.run("ls", f"{web.url}/set/x-0.tar")
        assert not any("wdsidx" in one for one in asked(web))
        afresh(program, web)
        program.run("ls", "--index-file", f"{web.url}/set/set.wdsidx", f"{web.url}/set/x-0.tar")
        assert sorted(asked(web)) == ["GET /set/set.wdsidx", "HEAD /set/set.wdsidx", "HEAD /set/x-0.tar"]


def test_fetch_image_and_a_mount_that_follows(program: Program, web: WebServer) -> None:
    home = program.home
    url = put(program, web, f"{web.url}/set/x-{{0..1}}.tar")
    assert program.json("fetch", url)["bytes"] == len(shard(0)) + len(shard(1))
    asked(web)
    assert program.run("cat", url, "x-1/1-2/jpg").stdout == bytes([3]) * SIZE
    assert not any(one.endswith(".tar") for one in asked(web))
    sets.make(home / "a", 3)
    program.run("index", "-o", "a/set.wdsidx", "a/s{0..1}.tar")
    program.run("image", "a/s{0..1}.tar", "-o", "from-shards.erofs")
    afresh(program)
    program.run("image", "a/set.wdsidx", "-o", "from-index.erofs")
    assert (home / "from-index.erofs").read_bytes() == (home / "from-shards.erofs").read_bytes()
    with program.mounted("--follow=1", "a/set.wdsidx") as mounted:
        program.run("index", "--update", "a/set.wdsidx", "a/s2.tar")
        wait_until(lambda: sorted(os.listdir(mounted.path)) == ["s0", "s1", "s2"], "the shard that was added")
        assert (mounted.path / "s2/d1/2-1/cls").read_bytes() == b"1"
        (home / "a/s0.tar").rename(home / "s0.tar")
        program.run("index", "--update", "a/set.wdsidx", "--allow-missing")
        wait_until(lambda: sorted(os.listdir(mounted.path)) == ["s1", "s2"], "the shard that was taken out")


def test_in_a_store_with_listings(program: Program, seaweedfs: Server) -> None:
    """Written to the store, and found beside the shards by the listing that finds these."""
    write, remove = servers.writing(seaweedfs, "s3")
    place = f"portable-{os.getpid()}"
    for number in range(2):
        write(f"{place}/x-{number}.tar", shard(number))
    lines = [f'[store."s3://{BUCKET}"]', *(f'{name} = "{value}"' for name, value in seaweedfs.options.items())]
    program.write(".config/wdsfs/config.toml", "\n".join(lines).encode()).chmod(0o600)
    url = f"s3://{BUCKET}/{place}"
    made = indexed(program, "-o", f"{url}/set.wdsidx", f"{url}/x-{{0..1}}.tar")
    assert made["rebuilt"] == 2
    for spec in (f"{url}/set.wdsidx", f"{url}/"):
        afresh(program)
        done = program.run("index", "--json", spec)
        assert (json.loads(done.stdout)["rebuilt"], done.stderr) == (0, b"")
        assert program.run("cat", spec, "x-1/1-2/jpg").stdout == bytes([3]) * SIZE
    write(f"{place}/x-2.tar", shard(2))
    indexed(program, "--update", f"{url}/set.wdsidx", f"{url}/x-2.tar")
    afresh(program)
    assert indexed(program, f"{url}/")["rebuilt"] == 0
    write(f"{place}/x-0.tar", shard(9))  # since then another one
    afresh(program)
    done = program.run("index", "--json", f"{url}/")
    assert json.loads(done.stdout)["rebuilt"] == 1
    assert f"{url}/set.wdsidx: 1 of its 3 shards have changed since it was written".encode() in done.stderr
    remove(f"{place}/set.wdsidx")
    assert f"{url}/set.wdsidx".encode() in program.run("ls", f"{url}/set.wdsidx", code=3).stderr


def test_names_in_indexes_that_look_like_something_else(program: Program) -> None:
    """Read again as the files that they are, not run as commands."""
    names = ["http:x.tar", "pipe:touch PWNED;: .tar", "x.tar"]
    for number, name in enumerate(names):
        program.write(f"set/{name}", shard(number))
    program.run("index", "-o", "set/all.wdsidx", "set")
    assert sorted(program.run("ls", "set/all.wdsidx").stdout.decode().splitlines()) == [
        name.removesuffix(".tar") + "/" for name in names
    ]
    assert not list(program.home.rglob("PWNED"))
