"""Commands on shards at a web server, which counts what it is asked."""

from __future__ import annotations

import contextlib
import gzip
import json
import signal
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import sets, tars
from tests.conftest import Program
from tests.processes import PATIENCE, wait_until
from tests.uppers import write_upper
from tests.web_server import Fault, WebServer

MEMBERS = 4


def shard(number: int) -> bytes:
    """A shard with a sample of a small and one of a large column."""
    return tars.tar(
        *(
            tars.member(b"d/%d-%d.%s" % (number, sample, column), bytes([number + sample]) * size)
            for sample in range(MEMBERS)
            for column, size in ((b"cls", 3), (b"jpg", 50_000))
        )
    )


@pytest.fixture
def web(web: WebServer) -> WebServer:
    for number in range(3):
        web.put(f"/set/x-{number}.tar", shard(number))
    return web


@pytest.fixture
def program(web_program: Program) -> Program:
    return web_program


def test_ls_cat_and_info(program: Program, web: WebServer) -> None:
    """What was fetched is not fetched again."""
    url = web.url + "/set/x-{0..2}.tar"
    (program.home / "here.tar").write_bytes(sets.content(5))
    assert program.run("ls", url, "here.tar").stdout == b"x-0/\nx-1/\nx-2/\nhere/\n"
    assert program.run("ls", url, "x-1/d/1-3").stdout == b"cls\njpg\n"
    assert program.run("cat", url, "x-1/d/1-3/jpg").stdout == b"\4" * 50_000
    report = program.json("info", url)
    assert (report["shards"], report["samples"], report["members"]) == (3, 3 * MEMBERS, 6 * MEMBERS)
    assert report["shard_bytes"] == 3 * len(shard(0)) == web.sent
    web.requests.clear()
    program.run("cat", url, "x-1/d/1-3/jpg")
    assert {request.method for request in web.requests} == {"HEAD"}


def test_index_says_what_it_has_indexed(program: Program, web: WebServer) -> None:
    url = web.url + "/set/x-{0..2}.tar"
    first = json.loads(program.run("index", "--json", url).stdout)
    assert (first["rebuilt"], first["samples"], first["members"]) == (3, 3 * MEMBERS, 6 * MEMBERS)
    web.objects["/set/x-1.tar"].content = shard(7)
    web.objects["/set/x-1.tar"].etag = '"2"'
    assert json.loads(program.run("index", "--json", url).stdout)["rebuilt"] == 1
    assert program.run("ls", url, "x-1/d").stdout == b"7-0/\n7-1/\n7-2/\n7-3/\n"


@pytest.mark.parametrize("unpack", ["auto", "never"])
def test_a_compressed_shard(program: Program, web: WebServer, unpack: str) -> None:
    packed = gzip.compress(shard(9))
    url = web.url + "/set/z.tar.gz"
    web.put("/set/z.tar.gz", packed)
    program.environment["WDSFS_UNPACK"] = unpack
    assert program.run("cat", url, "z/d/9-0/jpg").stdout == b"\t" * 50_000
    assert program.run("cat", url, "z/d/9-1/cls").stdout == b"\n" * 3
    assert web.sent == len(packed)
    assert bool(list((program.home / "cache").glob("*.seek"))) == (unpack == "never")


def test_an_object_that_is_replaced_while_it_is_indexed(program: Program, web: WebServer) -> None:
    before, after = (
        tars.tar(*(tars.member(b"%s/%d.bin" % (name, number), bytes(100_000)) for number in range(20)))
        for name in (b"old", b"new")
    )
    served = web.put("/set/r.tar", before, only_gets=True)

    def replace() -> None:
        served.content, served.etag = after, '"2"'

    served.faults.append(Fault(meanwhile=replace))
    assert program.run("ls", web.url + "/set/r.tar", "r").stdout == b"new/\n"


def test_a_signature_is_nowhere(program: Program, web: WebServer) -> None:
    url = web.url + "/set/x-0.tar?X-Amz-Signature=deadbeef"
    done = program.run("index", url)
    assert b"deadbeef" not in done.stdout + done.stderr
    for path in program.home.rglob("*"):
        assert not path.is_file() or b"deadbeef" not in path.read_bytes()
    assert program.run("cat", url, "x-0/d/0-0/cls").stdout == b"\0" * 3


def test_large_members_are_left_out_by_the_index(program: Program, web: WebServer) -> None:
    content = tars.tar(*(tars.member(b"%d.mp4" % number, bytes(12 << 20)) for number in range(8)))
    web.put("/set/v.tar", content)
    program.run("index", web.url + "/set/v.tar")
    assert web.sent < 400_000
    assert len(web.gets()) < 12


def test_prune_drops_what_the_store_does_not_have(program: Program, web: WebServer) -> None:
    (program.home / "here.tar").write_bytes(sets.content(5))
    program.run("index", web.url + "/set/x-{0..2}.tar")
    del web.objects["/set/x-0.tar"]
    web.objects["/set/x-1.tar"].always = Fault(status=403)
    assert json.loads(program.run("index", "--prune", "--json", "here.tar").stdout)["pruned"] == 1
    web.objects["/set/x-1.tar"].always = None
    assert json.loads(program.run("index", "--json", web.url + "/set/x-{1..2}.tar").stdout)["rebuilt"] == 0


def test_an_object_that_is_gone_is_missing(program: Program, web: WebServer) -> None:
    url = web.url + "/set/x-{0..1}.tar"
    program.run("cat", url, "x-1/d/1-0/jpg")
    del web.objects["/set/x-1.tar"]
    assert b"x-1.tar" in program.run("ls", url, code=3).stderr
    assert program.run("ls", "--allow-missing", url, "x-0/d").stdout == b"0-0/\n0-1/\n0-2/\n0-3/\n"
    program.run("ls", "--allow-missing", url, "x-1", code=3)
    web.put("/set/x-1.tar", shard(1))
    assert program.run("cat", url, "x-1/d/1-0/cls").stdout == b"\1" * 3


def test_an_interrupt_does_not_wait_for_a_silent_store(program: Program, web: WebServer) -> None:
    for served in web.objects.values():
        served.always, served.only_gets = Fault(silent=True), True
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    never = {"WDSFS_STORE_OPTIONS": "timeout=10000 total_time=10000"}  # would it be given up
    with program.start("index", web.url + "/set/x-{0..2}.tar", **streams, env=never) as process:
        wait_until(lambda: len(web.gets()) >= 3 or process.poll() is not None, "three requests")
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert b"interrupted" in process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 130


# --- check, export -----------------------------------------------------------------------------------------


def test_check(program: Program, web: WebServer) -> None:
    web.objects["/set/x-1.tar"].content = shard(1)[:-2000]
    done = program.run("check", web.url + "/set/x-{0..2}.tar", code=1)
    assert f"{web.url}/set/x-1.tar".encode() in done.stdout
    assert b"[truncated]" in done.stdout
    assert b"not checked: indexes of other tools beside 3 remote shards" in done.stderr
    assert {request.path for request in web.requests} == {f"/set/x-{number}.tar" for number in range(3)}
    url = web.url + "/set/x-{0,2}.tar"
    program.run("check", url)
    web.objects["/set/x-2.tar"].always = Fault(status=403)
    program.run("check", url, code=3)


def test_export(program: Program, web: WebServer) -> None:
    program.run("export", "-o", "indexes", web.url + "/set/x-{0..2}.tar")
    for number in range(3):
        (program.home / f"x-{number}.tar").write_bytes(shard(number))
    program.run("export", "-o", "local", "x-{0..2}.tar")
    for name in ("x-0.idx", "x-1.idx", "x-2.idx"):
        assert (program.home / "indexes" / name).read_bytes() == (program.home / "local" / name).read_bytes()


# --- views -------------------------------------------------------------------------------------------------


def test_join_and_associate(program: Program, web: WebServer) -> None:
    web.put("/more/x-0.tar", tars.tar(tars.member(b"d/0-1.txt", b"joined")))
    web.put("/labels.csv", b"key,score\nd/0-1,17\n")
    with contextlib.closing(sqlite3.connect(program.home / "labels.sqlite")) as database:
        database.executescript(
            "CREATE TABLE a (key, score); CREATE TABLE b (key, score); INSERT INTO b VALUES ('d/0-1', 5);"
        )
    web.put("/labels.sqlite", (program.home / "labels.sqlite").read_bytes())
    for labels, score in (("/labels.csv", b"17"), ("/labels.sqlite:b", b"5")):
        options = ["--missing", "empty", "--join", web.url + "/more/x-0.tar", "--associate", web.url + labels]
        shards = [*options, web.url + "/set/x-0.tar"]
        assert program.run("ls", *shards, "x-0/d/0-1").stdout == b"cls\njpg\ntxt\nscore\n"
        assert program.run("cat", *shards, "x-0/d/0-1/txt").stdout == b"joined"
        assert program.run("cat", *shards, "x-0/d/0-1/score").stdout == score
    gone = web.url + "/gone.csv?token=deadbeef"
    done = program.run("ls", "--associate", gone, web.url + "/set/x-0.tar", code=2)
    assert b"there is no such file" in done.stderr
    assert b"deadbeef" not in done.stderr


# --- changes -----------------------------------------------------------------------------------------------


@pytest.fixture
def edited(program: Program) -> Program:
    """An overlay with another class for the first sample of the second shard."""
    write_upper(program.directory("o") / "upper", {"x-1": {"d": {"1-0": {"cls": b"new"}}}})
    return program


def test_diff_and_commit_of_remote_shards(edited: Program, web: WebServer) -> None:
    url = web.url + "/set/x-{0..2}.tar"
    for options, text in (
        (["--in-place"], b"x-0.tar cannot be replaced where it is: name new shards with --output"),
        (["--output", "new-%d.tar", "--link"], b"x-0.tar: a store has no hard links; leave out --link"),
    ):
        done = edited.run("commit", "--overlay", "o", *options, url, code=None)
        assert done.returncode != 0
        assert text in done.stderr
    assert edited.run("diff", "--overlay", "o", url).stdout == b"changed  x-1/d/1-0 ~cls\n"
    edited.run("commit", "--overlay", "o", "--output", "new-%d.tar", url)
    assert (edited.home / "new-0.tar").read_bytes() == shard(0)
    assert (edited.home / "new-2.tar").read_bytes() == shard(2)
    assert edited.run("cat", "new-1.tar", "new-1/d/1-0/cls").stdout == b"new"
    assert edited.run("cat", "new-1.tar", "new-1/d/1-1/jpg").stdout == b"\2" * 50_000


# --- commands and the standard input -----------------------------------------------------------------------


@pytest.fixture
def local(tmp_path: Path) -> Path:
    found = tmp_path / "x.tar"
    found.write_bytes(shard(0))
    return found


def test_the_output_of_a_command(program: Program, web: WebServer) -> None:
    spec = f"pipe:curl -s {web.url}/set/x-{{0..2}}.tar || true"
    assert program.run("ls", spec).stdout == b"x-0/\nx-1/\nx-2/\n"
    assert program.run("cat", spec, "x-1/d/1-3/jpg").stdout == b"\4" * 50_000
    packed = f"pipe:curl -s {web.url}/set/x-0.tar | gzip"
    assert program.run("cat", packed, "x-0/d/0-3/jpg").stdout == b"\3" * 50_000


@pytest.mark.parametrize(("end", "ending"), [("false", "exit code 1"), ("kill -9 $$", "signal 9")])
def test_a_command_that_fails_is_a_damaged_shard(program: Program, local: Path, end: str, ending: str) -> None:
    """Also where all of the shard has come."""
    whole, cut = f"pipe:cat {local}; {end}", f"pipe:head -c 60000 {local}; {end}"
    for spec, samples in ((whole, MEMBERS), (cut, 2)):
        found = program.run("ls", spec, "x/d")
        assert len(found.stdout.splitlines()) == samples
        assert f"its command ended with {ending}; only the part that has arrived is shown".encode() in found.stderr
        assert program.run("cat", spec, "x/d/0-0/cls").stdout == b"\0" * 3
        program.run("info", "--strict", spec, code=3)


def test_a_command_without_output_makes_no_shard(program: Program) -> None:
    assert "is empty (0 bytes), not a tar" in program.refused("info", "--json", "pipe:true", code=3)
    assert program.json("info", "pipe:head -c 10240 /dev/zero")["samples"] == 0


def test_a_command_is_not_in_the_list_of_processes(program: Program, tmp_path: Path) -> None:
    """Nor in what the program says; the shell that runs it shows it as long as it runs."""
    flag = tmp_path / "go"
    spec = f"pipe:TOKEN=geheim; until [ -e {flag} ]; do sleep 0.05; done; false"
    streams = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    with program.start("ls", f"nothing.tar::{spec}", new_interpreter=True, **streams) as process:
        cmdline = Path(f"/proc/{process.pid}/cmdline")
        wait_until(
            lambda: b"ls" in cmdline.read_bytes() and b"geheim" not in cmdline.read_bytes(), "hidden arguments"
        )
        flag.touch()
        assert b"geheim" not in process.communicate()[1]


@pytest.mark.parametrize(
    "command",
    [
        ("mount", "--overlay", "s3://bucket/edits", "here.tar", "mnt"),
        ("export", "--format", "dali", "--output", "s3://bucket/index", "here.tar"),
        ("index", "--index-dir", "s3://bucket/index", "here.tar"),
    ],
)
def test_a_url_is_no_directory_to_write_to(program: Program, command: tuple[str, ...]) -> None:
    (program.home / "here.tar").write_bytes(sets.content(5))
    done = program.run(*command, code=2)
    assert b"a URL cannot be used here" in done.stderr
    assert not (program.home / "s3:").exists()


def test_a_server_that_does_not_say_which_object_it_is(program: Program, web: WebServer) -> None:
    """Without an ETag, times and sizes are compared; without either a whole answer is kept: never a mix of two."""
    web.put("/set/weak.tar", shard(9), etag=None, modified=1)
    assert b"gives no ETag" in program.run("ls", web.url + "/set/weak.tar").stderr
    one = web.put("/set/weak.tar", shard(9), etag=None, modified=None, only_gets=True)
    one.faults += [Fault(cut=1000), Fault(cut=20)]  # what has come of these is dropped
    web.requests.clear()
    with program.mounted(web.url + "/set/weak.tar") as mounted:
        mounted.expect_log("gives neither ETag nor Last-Modified: each shard is fetched as a whole")
        mounted.allow_log("has changed", "its bytes differ from those before")
        path = mounted.path / "weak" / "d" / "9-0" / "jpg"
        assert path.read_bytes() == bytes([9]) * 50_000
        assert len(web.gets()) == 3
        assert not any("range" in request.headers for request in web.gets())
        one.content = shard(8)  # of the same size
        program.run("fetch", "--quiet", web.url + "/set/weak.tar")
        assert len(web.gets()) == 3
        program.run("cache", "--clear")
        # The mount itself asks only once in a minute. It sees what other commands have found.
        program.run("fetch", "--quiet", web.url + "/set/weak.tar")

        def is_new() -> bool:
            with contextlib.suppress(OSError):
                (mounted.path / "weak" / "d" / "9-1" / "jpg").read_bytes()
            with contextlib.suppress(OSError):  # "Stale file handle", if the change is noticed in between
                return (mounted.path / "weak" / "d" / "8-1" / "jpg").exists()
            return False

        wait_until(is_new, "the new object")
        assert (mounted.path / "weak" / "d" / "8-1" / "jpg").read_bytes() == bytes([9]) * 50_000
