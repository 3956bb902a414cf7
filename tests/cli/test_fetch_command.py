"""`wdsfs fetch`, in front of a web server that counts requests and bytes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from typing import Any

import pytest

from tests import tars
from tests.conftest import Program
from tests.processes import wait_until
from tests.remote.stores import content, covered
from tests.web_server import Fault, Served, WebServer

PART = 4 << 20
SIZE = 3 * PART + 12_345
SECRET = "deadbeef"


def served(web: WebServer, number: int = 0, size: int = SIZE, **how: object) -> Served:
    return web.put(f"/s/x-{number}.tar", content(size, number), only_gets=True, **how)


def spans(web: WebServer, number: int = 0) -> list[tuple[int, int]]:
    """The ranges that were asked for."""
    found = [one.headers["range"].removeprefix("bytes=") for one in web.gets(f"/s/x-{number}.tar")]
    return [(int(begin), int(last) + 1) for begin, _, last in (one.partition("-") for one in found)]


def cached(program: Program, web: WebServer) -> dict[str, int]:
    """How many bytes of each shard are in the cache."""
    objects = program.json("cache")["remote"]["objects"]
    return {one["url"].removeprefix(web.url): one["bytes"] for one in objects}


def fetch_json(program: Program, *words: str, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = program.json("fetch", *words, code=code)
    return found


def test_whole_shards_are_fetched_once(program: Program, web: WebServer) -> None:
    served(web, 0)
    served(web, 1, size=5000)
    url = web.url + "/s/x-{0..1}.tar"
    first = fetch_json(program, url)
    assert (first["shards"], first["bytes"], first["fetched"], first["there"]) == (2, SIZE + 5000, SIZE + 5000, 0)
    assert web.sent == SIZE + 5000
    assert len(covered(spans(web))) == 4
    assert cached(program, web) == {"/s/x-0.tar": SIZE, "/s/x-1.tar": 5000}
    web.requests.clear()
    done = program.run("fetch", url)
    assert done.stdout.decode().splitlines() == [
        "2 shards in the cache, 12.0 MiB: 0 B fetched, 12.0 MiB were in it before",
        f"kept in {first['cache']}",
    ]
    assert web.gets() == []


def test_on_a_terminal_lines_are_lines_and_the_bar_moves_within_a_part(program: Program, web: WebServer) -> None:
    """The server stops for two seconds after half of it."""
    served(web, size=PART).faults.append(Fault(stalls=PART // 2))
    options = "--store-option", "timeout=2"
    shown = program.on_terminal("fetch", *options, f"{web.url}/s/x-0.tar").decode()
    assert "\\n" not in shown
    assert re.search(r"were in it before\r?\nkept in ", shown)
    assert re.search(r"(?<![\d.])[12]\.\d/4\.0 MiB", shown)
    assert "4.0/4.0 MiB" in shown


def test_workers_fetch_into_their_caches(program: Program, web: WebServer) -> None:
    served(web, 0)
    url = web.url + "/s/x-0.tar"
    report = fetch_json(program, "--executor", "tests.work:threads", url)
    assert (report["bytes"], report["fetched"], report["there"], report["cache"]) == (SIZE, SIZE, 0, None)
    assert web.sent == SIZE
    assert cached(program, web) == {"/s/x-0.tar": SIZE}
    done = program.run("fetch", "--executor", "tests.work:threads", url)
    assert done.stdout.decode().splitlines() == [
        "1 shard in the cache, 12.0 MiB: 0 B fetched, 12.0 MiB were in it before",
        "kept in the caches of the workers",
    ]


def test_local_shards_are_passed_over(program: Program, web: WebServer) -> None:
    local = program.write("local.tar", tars.tar(tars.A))
    served(web, size=5000)
    done = program.run("fetch", local, web.url + "/s/x-0.tar")
    assert done.stderr.decode() == "wdsfs: 1 shard on this machine: nothing to fetch\n"
    report = fetch_json(program, str(local))
    assert (report["shards"], report["local"], report["fetched"], report["failed"]) == (0, 1, 0, {})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_what_an_interrupted_fetch_has_got_is_not_fetched_again(
    program: Program, web: WebServer, number: signal.Signals
) -> None:
    """The server sends one part, and nothing of the others until the client has gone."""
    one = served(web)
    one.faults.extend([Fault(), Fault(stalls=0), Fault(stalls=0), Fault(stalls=0)])
    with program.start("fetch", web.url + "/s/x-0.tar", stderr=subprocess.PIPE) as process:
        wait_until(lambda: len(web.gets()) == 4, "all requests")
        wait_until(lambda: web.sent in (PART, SIZE - 3 * PART), "a part")
        here = web.sent
        wait_until(lambda: cached(program, web).get("/s/x-0.tar", 0) >= here, "a part in the cache")
        process.send_signal(number)
        _, said = process.communicate()
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert said == b"wdsfs: interrupted; the cache keeps the bytes fetched so far\n"
    web.requests.clear()
    report = fetch_json(program, web.url + "/s/x-0.tar")
    assert (report["fetched"], report["there"]) == (SIZE - here, here)
    assert web.sent == SIZE
    assert sum(end - begin for begin, end in spans(web)) == SIZE - here


def test_two_at_the_same_time_fetch_each_range_once(program: Program, web: WebServer) -> None:
    for number in range(3):
        served(web, number)
    web.hold.clear()
    url = web.url + "/s/x-{0..2}.tar"
    both = [program.start("fetch", "--json", url, stdout=subprocess.PIPE) for _ in range(2)]
    wait_until(lambda: len(web.gets()) == 12, "a request for each part")
    web.hold.set()
    reports = [json.loads(process.communicate()[0]) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert web.sent == 3 * SIZE
    for number in range(3):
        covered(spans(web, number))
    assert sum(report["fetched"] for report in reports) == 3 * SIZE
    assert cached(program, web) == {f"/s/x-{number}.tar": SIZE for number in range(3)}


def test_of_a_shard_that_is_replaced_meanwhile_the_new_one_is_fetched(program: Program, web: WebServer) -> None:
    one = served(web)
    new = content(SIZE - PART, 7)

    def replace() -> None:
        served(web, size=0, etag='"2"').content = new

    one.faults.append(Fault(meanwhile=replace))
    report = fetch_json(program, "--jobs", "1", web.url + "/s/x-0.tar")
    assert (report["bytes"], report["failed"]) == (len(new), {})
    objects = program.json("cache")["remote"]["objects"]
    assert [(one["etag"], one["bytes"], one["complete"]) for one in objects] == [('"2"', len(new), True)]


def test_a_shard_without_room_is_not_begun(program: Program, web: WebServer) -> None:
    served(web, 0, size=1 << 20)
    served(web, 1)
    served(web, 2)
    url = web.url + "/s/x-{0..2}.tar"
    done = program.run("fetch", "--jobs", "1", "--cache-size", "20M", url, code=3)
    assert done.stderr.decode() == (
        f"wdsfs: the cache has no room for 1 shard more ({web.url}/s/x-2.tar): raise its limit by "
        "--cache-size, or remove files by `wdsfs cache --trim` or `--clear`\n"
    )
    assert done.stdout.startswith(b"2 of 3 shards in the cache, 13.0 MiB: ")
    assert web.gets("/s/x-2.tar") == []
    assert fetch_json(program, "--cache-size", "40M", url)["fetched"] == SIZE


def test_shards_that_are_fetched_at_once_share_the_room(program: Program, web: WebServer) -> None:
    for number in range(3):
        served(web, number)
    web.hold.clear()
    url = web.url + "/s/x-{0..2}.tar"
    with program.start("fetch", "--json", "--cache-size", "30M", url, stdout=subprocess.PIPE) as process:
        wait_until(lambda: len(web.gets()) == 8, "the requests for two shards")
        web.hold.set()
        report = json.loads(process.communicate()[0])
    assert process.returncode == 3
    assert len(report["failed"]) == 1
    assert web.sent == report["bytes"] == 2 * SIZE


def test_what_fails_is_named_and_the_others_are_fetched(program: Program, web: WebServer) -> None:
    served(web, 0, size=5000)
    served(web, 1, size=5000, always=Fault(status=403))
    report = fetch_json(program, web.url + "/s/x-{0..1}.tar", code=3)
    assert report["bytes"] == 5000
    [(url, text)] = report["failed"].items()
    assert url == f"{web.url}/s/x-1.tar"
    assert text.startswith(f"{url}: its store refuses it")
    done = program.run("fetch", web.url + "/s/x-{0..1}.tar", code=3)
    assert done.stderr.decode() == f"wdsfs: {text}\n"


def test_a_server_without_ranges(program: Program, web: WebServer) -> None:
    served(web, ranges=False)
    report = fetch_json(program, web.url + "/s/x-0.tar")
    assert report["bytes"] == SIZE
    assert cached(program, web) == {"/s/x-0.tar": SIZE}


def test_no_secret_of_a_url_is_shown(program: Program, web: WebServer) -> None:
    served(web, 0, size=5000)
    served(web, 1, size=5000, always=Fault(status=403))
    url = web.url.replace("://", f"://ann:{SECRET}@") + "/s/x-{0..1}.tar?X-Amz-Signature=" + SECRET
    for words in ([], ["--json"], ["--cache-size", "1K"]):
        done = program.run("-v", "fetch", *words, url, code=3)
        assert SECRET.encode() not in done.stdout + done.stderr
    assert all(SECRET in one.target for one in web.requests)
