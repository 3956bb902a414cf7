"""Mounts of shards at a web server, which counts what it is asked."""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tars
from tests.conftest import Mounted, Program, fails
from tests.processes import PATIENCE, Process, wait_until
from tests.servers import certificate_of
from tests.web_server import Fault, WebServer
from wdsfs import shared_settings
from wdsfs.mount import daemon
from wdsfs.shared_settings import setting

SAMPLES, SIZE = 30, 100_000
SAMPLE = SIZE + 512 + 1024  # bytes of a sample with its second column, rounded up


def image(number: int, sample: int) -> bytes:
    return random.Random(f"{number} {sample}").randbytes(SIZE)


def shard(number: int) -> bytes:
    return tars.tar(
        *(
            tars.member(b"%03d.%s" % (sample, column), data)
            for sample in range(SAMPLES)
            for column, data in ((b"cls", b"%d" % sample), (b"jpg", image(number, sample)))
        )
    )


@pytest.fixture
def web(web: WebServer) -> WebServer:
    for number in range(2):
        web.put(f"/x-{number}.tar", shard(number), etag=f'"{number}"')
    return web


@pytest.fixture
def program(web_program: Program) -> Program:
    return web_program


@contextlib.contextmanager
def cold_mount(program: Program, web: WebServer, *options: str) -> Iterator[Mounted]:
    """Mount what is indexed, with an empty cache; from then on the server counts anew."""
    with program.mounted(*options, web.url + "/x-{0..1}.tar") as mounted:
        program.run("cache", "--clear")
        web.requests.clear()
        web.sent = 0
        yield mounted


def test_a_relative_path_in_an_option_is_that_of_the_command(program: Program) -> None:
    """The processes of the mount, which are in another directory, open the file again and again."""
    _, context = certificate_of(program.home, "-addext", "basicConstraints=critical,CA:FALSE")
    with WebServer(context).running() as server:
        server.put("/x-0.tar", shard(0))
        with program.mounted("--store-option", "certificates=certificate.pem", f"{server.url}/x-0.tar") as mounted:
            program.run("cache", "--clear")
            assert (mounted.path / "x-0" / "003" / "jpg").read_bytes() == image(0, 3)


def test_paths_in_the_environment_are_those_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shared_settings, "_chosen", {})
    for name in (*daemon.PATH_VARIABLES, "WDSFS_CACHE_DIR"):
        monkeypatch.setenv(name, "a/../b")
    monkeypatch.setenv("HF_HOME", "~/hf")
    monkeypatch.setenv("SSL_CERT_DIR", "certs:/etc/certs")
    monkeypatch.setenv("WDSFS_INDEX_FILE", "a:b.wdsidx\nhttps://h/b.wdsidx")
    monkeypatch.setenv("TMPDIR", "")
    daemon._make_paths_absolute()
    assert os.environ["AWS_CONFIG_FILE"] == setting("CACHE_DIR") == f"{tmp_path}/b"
    assert os.environ["HF_HOME"] == "~/hf"
    assert os.environ["SSL_CERT_DIR"] == f"{tmp_path}/certs:/etc/certs"
    assert setting("INDEX_FILE") == f"{tmp_path}/a:b.wdsidx\nhttps://h/b.wdsidx"
    assert os.environ["TMPDIR"] == ""


def test_a_read_fetches_its_sample_in_one_request(program: Program, web: WebServer) -> None:
    with cold_mount(program, web) as mounted:
        assert sorted(os.listdir(mounted.path / "x-1" / "007")) == ["cls", "jpg"]
        assert (mounted.path / "x-1" / "007" / "jpg").stat().st_size == SIZE
        assert web.requests == []
        (mounted.path / "x-1" / "020" / "cls").read_bytes()  # the first look into a shard also reads its start
        web.requests.clear()
        web.sent = 0
        assert (mounted.path / "x-1" / "007" / "jpg").read_bytes() == image(1, 7)
        assert (mounted.path / "x-1" / "007" / "cls").read_bytes() == b"7"
        assert len(web.gets("/x-1.tar")) == len(web.requests) == 1
        assert web.sent <= SAMPLE + 2 * 4096


def test_every_byte_in_any_order(program: Program, web: WebServer) -> None:
    with cold_mount(program, web) as mounted:
        wanted = [(number, sample) for number in range(2) for sample in range(SAMPLES)]
        random.Random(0).shuffle(wanted)
        for number, sample in wanted:
            place = mounted.path / f"x-{number}" / f"{sample:03}"
            assert (place / "jpg").read_bytes() == image(number, sample)
            assert (place / "cls").read_bytes() == b"%d" % sample
        assert web.sent <= 1.2 * 2 * len(shard(0))


def outcome(path: Path) -> bytes | int | None:
    """What can be read there: a content, an errno."""
    try:
        return path.read_bytes()
    except OSError as error:
        return error.errno


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_replaced_object_is_stale_and_then_the_new_one(
    program: Program, web: WebServer, is_removed: bool
) -> None:
    """One that is removed is an error, and no smaller set; also for those that have known it so far."""
    with cold_mount(program, web) as mounted:
        mounted.allow_log("has changed", "it has been replaced", "it is gone", "there is no such object", "ESTALE")
        path = mounted.path / "x-1" / "003" / "jpg"
        with path.open("rb") as opened:
            if is_removed:
                del web.objects["/x-1.tar"]
            else:
                web.put("/x-1.tar", shard(9), etag='"9"')
            with fails(errno.ESTALE, *[errno.EIO] * is_removed):
                opened.read(1)
        wait_until(lambda: outcome(path) == (errno.EIO if is_removed else image(9, 3)), "what there is now")
        assert (mounted.path / "x-0" / "003" / "jpg").read_bytes() == image(0, 3)


def test_without_the_server_what_is_cached_is_served(program: Program, web: WebServer) -> None:
    # Not 1: it also limits how long an answer of the server may take, which runs on a thread of the tests.
    with cold_mount(program, web, "--store-option", "total_time=2") as mounted:
        mounted.expect_log("x-0.tar: its store answers 503; wdsfs tried for up to 2 s")
        mounted.allow_log("x-[01].tar")
        image_5 = (mounted.path / "x-0" / "005" / "jpg").read_bytes()
        web.handler = silence
        with fails(errno.EIO):
            (mounted.path / "x-0" / "020" / "jpg").read_bytes()
        assert (mounted.path / "x-0" / "005" / "cls").read_bytes() == b"5"
        assert image_5 == image(0, 5)
        web.handler = None
        assert (mounted.path / "x-0" / "020" / "jpg").read_bytes() == image(0, 20)


async def silence(_: object) -> tuple[int, dict[str, str], bytes]:
    return 503, {}, b""


# Longer than a test waits for a process to die, and short enough that a test that fails ends.
SLOW = ("--store-option", f"total_time={2 * PATIENCE:g}", "--store-option", f"timeout={2 * PATIENCE:g}")


@contextlib.contextmanager
def waiting(web: WebServer, command: list[str | Path], path: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command whose request to the server, for this object, is under way; bodies wait until the block ends."""
    before = len(web.gets(path))
    web.hold.clear()
    with Process(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: len(web.gets(path)) > before, "the request")
            yield process
        finally:
            web.hold.set()
            process.kill()


def dies(process: subprocess.Popen[bytes]) -> bool:
    process.kill()
    return process.wait(PATIENCE) == -signal.SIGKILL


def test_who_waits_for_a_shard_to_be_indexed_can_be_killed(program: Program, web: WebServer) -> None:
    """With more of them than workers, too. What comes later is answered all the same."""
    with program.mounted("--lazy", "--workers", "1", *SLOW, web.url + "/x-{0..1}.tar") as mounted:
        with contextlib.ExitStack() as stack:
            listing: list[str | Path] = ["ls", mounted.path / "x-0"]
            first = stack.enter_context(waiting(web, listing, "/x-0.tar"))
            more = [stack.enter_context(Process(listing)) for _ in range(20)]
            with pytest.raises(subprocess.TimeoutExpired):
                more[-1].wait(0.5)
            assert dies(first)
            assert all(map(dies, more))
        assert len(os.listdir(mounted.path / "x-0")) == SAMPLES


def test_only_a_signal_that_ends_a_program_ends_its_wait(program: Program, web: WebServer) -> None:
    """One with a handler for it gets EINTR, which says nothing of the shard."""
    text = """import os, signal, sys
signal.signal(signal.SIGCHLD, lambda *_: None)
try:
    assert len(os.listdir(sys.argv[1])) == 30
except KeyboardInterrupt:
    sys.exit(7)"""
    with program.mounted("--lazy", *SLOW, web.url + "/x-{0..1}.tar") as mounted:
        for number, code in ((signal.SIGINT, 7), (signal.SIGCHLD, 0)):
            with waiting(web, [sys.executable, "-c", text, mounted.path / "x-0"], "/x-0.tar") as process:
                process.send_signal(number)
                if number == signal.SIGCHLD:
                    with pytest.raises(subprocess.TimeoutExpired):
                        process.wait(1)
                    web.hold.set()
                assert process.wait(PATIENCE) == code


def test_who_waits_for_a_compressed_shard_can_be_killed(program: Program, web: WebServer) -> None:
    """The first unpacks it, the second waits for the first."""
    web.put("/y-0.tar.gz", gzip.compress(shard(0)))
    with program.mounted("--lazy", *SLOW, web.url + "/y-0.tar.gz") as mounted:
        listing: list[str | Path] = ["ls", mounted.path / "y-0"]
        with waiting(web, listing, "/y-0.tar.gz") as first, Process(listing) as second:
            with pytest.raises(subprocess.TimeoutExpired):
                second.wait(0.5)
            assert dies(second)
            assert dies(first)
        assert len(os.listdir(mounted.path / "y-0")) == SAMPLES


def test_who_waits_for_a_copy_up_can_be_killed_and_readers_beside_it(
    program: Program, web: WebServer, tmp_path: Path
) -> None:
    """There is one worker only, so nobody receives an INTERRUPT."""
    with cold_mount(program, web, "--overlay", str(tmp_path / "overlay"), *SLOW) as mounted:
        (mounted.path / "x-1" / "020" / "cls").read_bytes()  # the kernel asks once if closing is its own business
        reading: list[str | Path] = ["cat", mounted.path / "x-1" / "000" / "jpg"]
        text = "import sys\nopen(sys.argv[1], 'r+b').write(b'x')"
        writing: list[str | Path] = [sys.executable, "-c", text, mounted.path / "x-0" / "000" / "jpg"]
        with waiting(web, reading, "/x-1.tar") as reader, waiting(web, writing, "/x-0.tar") as writer:
            assert dies(reader)
            assert dies(writer)
        assert (mounted.path / "x-0" / "000" / "jpg").read_bytes() == image(0, 0)


def test_a_server_that_does_not_answer_holds_up_only_who_reads_from_it(program: Program, web: WebServer) -> None:
    """Also at the first look into a shard, for which workers wait themselves."""
    with cold_mount(program, web) as mounted:
        web.hold.clear()
        paths = [mounted.path / f"x-{number}" / "000" / "jpg" for number in range(2)]
        readers = [Process(["cat", path], stdout=subprocess.PIPE) for path in paths]
        wait_until(lambda: {one.path for one in web.gets()} == {"/x-0.tar", "/x-1.tar"}, "both to be asked for")
        assert program.tool("stat", "-c", "%s", mounted.path / "x-1" / "007" / "jpg") == b"%d\n" % SIZE
        web.hold.set()
        assert [reader.communicate(timeout=PATIENCE)[0] for reader in readers] == [image(0, 0), image(1, 0)]


def test_a_server_that_wants_an_hour_for_one_object_gives_the_others(program: Program, web: WebServer) -> None:
    """The object, too, once it does so."""
    with cold_mount(program, web) as mounted:
        mounted.expect_log("x-0.tar: its store answers 429, and asks to wait until 20")
        mounted.allow_log("x-0.tar")
        web.objects["/x-0.tar"].always = Fault(status=429, headers={"Retry-After": "3600"})
        path = mounted.path / "x-0" / "003" / "cls"
        assert outcome(path) == errno.EIO
        assert (mounted.path / "x-1" / "003" / "cls").read_bytes() == b"3"
        shown = program.run("status", mounted.path).stdout.decode()
        assert re.search(rf"{web.url}: .* asks to wait until 20\d\d-", shown)
        web.objects["/x-0.tar"].always = None
        wait_until(lambda: outcome(path) == b"3", "the object that is well again")


def test_a_server_that_sends_a_byte_now_and_then_is_given_up(program: Program, web: WebServer) -> None:
    """Also at the first look into a shard."""
    limits = "total_time=2", "lowest_rate=1000000"
    options = [word for limit in limits for word in ("--store-option", limit)]
    with program.mounted("--lazy", *options, web.url + "/x-{0..1}.tar") as mounted:
        mounted.expect_log("x-0.tar: its server does not answer")
        for served in web.objects.values():
            served.always = Fault(drips="body")
        with fails(errno.EIO):
            os.listdir(mounted.path / "x-0")


def test_a_mount_goes_on_without_shards_that_are_refused(program: Program, web: WebServer) -> None:
    """And comes back to one that is well again."""
    web.objects["/x-1.tar"].always = Fault(status=500)
    web.put("/x-2.tar", shard(2)).always = Fault(status=403)
    words = "--store-option", "total_time=2", web.url + "/x-{0..2}.tar"
    refused = program.run("mount", *words, program.mountpoint, code=3).stderr.decode()
    for reason in (
        "2 of 3 shards cannot be read",
        "x-1.tar: its store answers 500",
        "x-2.tar: its store refuses it",
    ):
        assert reason in refused
    warnings = program.run("info", "--allow-missing", *words).stderr.decode()
    assert "x-1.tar: its store answers 500" in warnings
    with program.mounted("--allow-missing", *words) as mounted:
        mounted.expect_log("x-1.tar: its store answers 500")
        mounted.expect_log("x-2.tar: its store refuses it")
        mounted.allow_log("has changed since this was opened")
        assert len(os.listdir(mounted.path / "x-0")) == SAMPLES
        with fails(errno.EACCES):
            os.listdir(mounted.path / "x-2")
        web.objects["/x-1.tar"].always = None

        wait_until(lambda: outcome(mounted.path / "x-1" / "003" / "cls") == b"3", "the shard that is well again")


def test_a_merged_tree_over_remote_shards(program: Program, web: WebServer) -> None:
    with program.mounted("--merge", web.url + "/x-{0..1}.tar") as mounted:
        assert len(os.listdir(mounted.path)) == 2 * SAMPLES
        assert (mounted.path / "003" / "jpg").read_bytes() == image(0, 3)


def test_a_server_without_ranges_and_no_room_in_the_cache(program: Program, web: WebServer) -> None:
    for served in web.objects.values():
        served.ranges = False
    environment = {**program.environment, "WDSFS_CACHE_SIZE": "1M"}
    said = program.refused("info", web.url + "/x-{0..1}.tar", code=3, env=environment)
    why = f"the cache has no room for it ({len(shard(0)):,} bytes): make the cache larger by --cache-size"
    assert f"/x-0.tar: {why}" in said
    with program.mounted("--cache-size", "1M", web.url + "/x-{0..1}.tar") as mounted:
        with fails(errno.EIO):
            os.listdir(mounted.path / "x-0")
        mounted.expect_log("x-0.tar: the cache has no room for it")
        mounted.allow_log("the cache has no room for it")
