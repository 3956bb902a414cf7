"""What `status`, `.wdsfs` and the metrics say of a mount with remote shards, with a web server that counts."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import tars
from tests.conftest import Mounted, Program, drop_pages, fails
from tests.processes import PATIENCE, Process, wait_until
from tests.web_server import Fault, WebServer

SECRET = "deadbeef"
SIZE = 100_000  # of each member


def shard() -> bytes:
    return tars.tar(*(tars.member(name, name * (SIZE // 5)) for name in (b"a.jpg", b"b.jpg", b"c.jpg")))


@pytest.fixture
def web(web: WebServer) -> WebServer:
    for name in ("x", "y"):
        web.put(f"/s/{name}.tar", shard(), only_gets=True)
    return web


@contextlib.contextmanager
def mounted(program: Program, web: WebServer, url: str = "", *more: str) -> Iterator[Mounted]:
    """A mount whose shards are indexed, and not in the cache any more."""
    with program.mounted("--cache-size", "1G", *more, url or web.url + "/s/{x,y}.tar") as mount:
        program.run("cache", "--clear")
        mount.status()  # the fetcher answers: while a worker waits for its start another one opens the shard, too
        web.requests.clear()
        yield mount


def read(mount: Mounted, sample: str) -> bytes:
    """The content of a member, not from the caches of the kernel."""
    with (mount.path / sample / "jpg").open("rb") as file:
        drop_pages(file.fileno())
        return file.read()


def store(mount: Mounted) -> dict[str, Any]:
    [found] = mount.status()["remote"]["stores"]
    assert isinstance(found, dict)
    return found


def metrics(mount: Mounted) -> dict[str, float]:
    """The metrics of remote shards."""
    text = (mount.path / ".wdsfs" / "metrics").read_text()
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    return {one.name.removeprefix("wdsfs_"): one.value for one in samples if "kind" not in one.labels}


def text(program: Program, *words: str | Path) -> str:
    """What `status` prints. It lists the mounts of other tests, too, some of which have odd names."""
    return os.fsdecode(program.run("status", *words).stdout)


def test_what_is_fetched_and_read_is_counted_by_store(program: Program, web: WebServer) -> None:
    with mounted(program, web) as mount:
        before = web.sent
        content = read(mount, "x/b")
        first = store(mount)
        assert first["store"] == web.url
        assert first["requests"] == len(web.gets()) == 1
        assert first["fetched_bytes"] == web.sent - before < SIZE + 2 * 4096  # whole blocks of the cache
        assert first["used_bytes"] == SIZE  # no head: the record says that it is a plain tar
        assert first["reads"] >= 1
        assert read(mount, "x/b") == content
        second = store(mount)
        assert second["used_bytes"] == 2 * SIZE
        assert (second["requests"], second["fetched_bytes"]) == (first["requests"], first["fetched_bytes"])
        assert second["hits"] - first["hits"] == second["reads"] - first["reads"] >= 1
        found = metrics(mount)
        for name in ("requests", "fetched_bytes", "used_bytes", "reads", "hits"):
            assert found[f"store_{name}_total"] == second[name]
        assert found["store_in_flight"] == found["store_queued"] == found["store_offline_seconds"] == 0
        told = json.loads((mount.path / ".wdsfs" / "status.json").read_text())["remote"]
        assert told["stores"] == [second]
        assert found["cache_bytes"] == told["cache"]["bytes"] >= first["fetched_bytes"]
        assert found["cache_limit_bytes"] == told["cache"]["limit"] == 1 << 30
        rows = text(program, mount.path)
        assert re.search(rf"^  store +{re.escape(web.url)}: {second['requests']} requests?, ", rows, re.M)
        used = f"{second['used_bytes'] / 1024:.1f} KiB"
        assert f"{used} used by {second['reads']} reads ({second['hits']:,} cache hits)" in rows
        assert told["cache"]["directory"] in rows
        web.hold.clear()
        with Process(["cat", mount.path / "y/a/jpg"], stdout=subprocess.DEVNULL) as reader:
            wait_until(lambda: web.gets("/s/y.tar"), "the request")
            assert store(mount)["in_flight"] >= 1
            assert metrics(mount)["store_in_flight"] >= 1
            web.hold.set()
            assert reader.wait(PATIENCE) == 0
        assert store(mount)["in_flight"] == 0


def test_a_store_that_does_not_answer_is_offline_until_it_does(program: Program, web: WebServer) -> None:
    with mounted(program, web, "", "--store-option", "total_time=1") as mount:
        content = read(mount, "x/a")
        web.objects["/s/y.tar"].always = Fault(status=503)
        with fails(errno.EIO):
            read(mount, "y/a")
        assert read(mount, "x/a") == content
        one = store(mount)
        assert one["failures"] >= 1
        assert one["throttled"] >= one["failures"]
        assert (
            one["offline_since"] <= mount.status()["uptime_seconds"] + json.loads(registered(program))["started"]
        )
        assert metrics(mount)["store_offline_seconds"] > 0
        for words in ((), (mount.path,)):
            assert f"  offline  {web.url} since 20" in re.sub(" +offline +", "  offline  ", text(program, *words))
        web.objects["/s/y.tar"].always = None
        read(mount, "y/a")
        assert store(mount)["offline_since"] is None
        assert "offline" not in text(program, mount.path)
        assert f"{web.url} since" not in text(program)  # which shows mounts of other tests, too
        mount.expect_log("its store answers 503")


def registered(program: Program) -> str:
    return program.registration(program.mountpoint).read_text()


def test_the_report_of_a_mount_whose_fetcher_is_killed(program: Program, web: WebServer) -> None:
    with mounted(program, web) as mount:
        content = read(mount, "x/a")
        before = mount.fetcher()
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: mount.status()["remote"]["fetcher"] not in (0, before), "another fetcher")
        assert store(mount)["store"] == web.url
        assert read(mount, "x/a") == content
        assert store(mount)["hits"] >= 1


def test_no_secret_is_reported(program: Program, web: WebServer) -> None:
    """Nor is one in an image, or in the arguments of a process that others can see."""
    url = web.url.replace("://", f"://ann:{SECRET}@") + "/s/{x,y}.tar?X-Amz-Signature=" + SECRET
    labels = url.replace("{x,y}.tar", "labels.csv")
    web.put("/s/labels.csv", b"key,mood\na,good\nb,bad\nc,good\n")
    words = ("--cache-size", "1G", url, "--associate", labels)
    with program.mounted(*words, new_interpreter=True) as mount:
        read(mount, "x/a")
        assert all(SECRET in request.target for request in web.requests)
        assert store(mount)["store"] == web.url
        shown = [path.read_text(errors="replace") for path in (mount.path / ".wdsfs").rglob("*") if path.is_file()]
        shown += [text(program), text(program, mount.path), text(program, "--json"), json.dumps(mount.status())]
        shown += [registered(program), mount.log(), Path("/proc/self/mounts").read_text()]
        arguments = []
        for pid in mount.processes():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                arguments.append(Path(f"/proc/{pid}/cmdline").read_text())
        assert any("?X-Amz" not in one and ".tar?*" in one for one in arguments)
        assert not any(SECRET in one or "ann:" in one for one in [*shown, *arguments])
    program.write("x.tar", shard())
    program.run("image", "-q", "--associate", labels, "x.tar", "-o", "x.erofs")
    made = (program.home / "x.erofs").read_bytes()
    assert b"/labels.csv" in made
    assert SECRET.encode() not in made


def test_commands_are_counted_as_one_store(program: Program) -> None:
    for name in ("x", "y"):
        program.write(f"{name}.tar", shard())
    with program.mounted(f"pipe:cat {program.home}/{{x,y}}.tar") as mount:
        for name in ("x", "y"):
            read(mount, f"{name}/a")
        one = store(mount)
        assert one["store"] == "pipe:"
        assert one["used_bytes"] == 2 * SIZE
        assert metrics(mount)["store_used_bytes_total"] == one["used_bytes"]


def test_a_mount_without_remote_shards_reports_nothing_of_them(program: Program) -> None:
    with program.mounted(program.write("x.tar", shard())) as mount:
        read(mount, "x/a")
        assert "remote" not in mount.status()
        assert not any(name.startswith(("store_", "cache_", "fetch_")) for name in metrics(mount))
        assert not re.search("^ +(store|cache|offline) ", text(program, mount.path), re.M)
