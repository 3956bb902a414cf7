"""Shards elsewhere: only what is on the screen is fetched, and one that does not answer holds up nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests import tars
from tests.conftest import Program
from tests.pages.viewing import Viewer, picture, viewing
from tests.processes import wait_until
from tests.web_server import WebServer

LARGE = 4 << 20  # bytes of the members that nobody looks at


@pytest.fixture
def far(web_program: Program) -> Iterator[tuple[Viewer, WebServer]]:
    with WebServer().running() as web:
        members = []
        for at in range(6):
            members.append(tars.member(b"s%d.png" % at, picture(at)))
            members.append(tars.member(b"s%d.cls" % at, b"%d" % at))
            members.append(tars.member(b"s%d.bin" % at, bytes(LARGE)))
            members.append(tars.member(b"s%d.raw" % at, bytes(3 * LARGE)))
        web.put("/a.tar", tars.tar(*members))
        web_program.run("index", f"{web.url}/a.tar")
        web_program.run("cache", "--clear")
        web.requests.clear()
        web.sent = 0
        with viewing(web_program, f"{web.url}/a.tar") as viewer:
            yield viewer, web


def test_only_what_is_on_the_screen_is_fetched(far: tuple[Viewer, WebServer]) -> None:
    viewer, web = far
    assert viewer.ask("/").text.count('class="key"') == 6
    assert viewer.ask("/?has=raw&q=s3").status == 200
    assert viewer.ask("/random?seed=1").status == 200
    assert web.sent < LARGE  # the check that it is the shard of the index
    assert viewer.ask("/thumb/a/s2/png").status == 200
    assert web.sent < 3 * LARGE


def test_a_shard_that_does_not_answer_holds_up_no_page(far: tuple[Viewer, WebServer]) -> None:
    viewer, web = far
    assert viewer.ask("/snippet/a/s0/cls").body == b"0"
    web.hold.clear()
    found: list[int] = []
    waiting = [
        threading.Thread(target=lambda at=at: found.append(viewer.ask(f"/file/a/s{at}/bin").status))
        for at in (4, 5)
    ]
    try:
        for one in waiting:
            one.start()
        wait_until(lambda: web.under_way, "a request that gets no bytes")
        for path in ("/", "/?q=s3", "/random?seed=2", "/sample/a/s4", "/plots"):
            assert viewer.ask(path).status == 200
        assert found == []
    finally:
        web.hold.set()
        for one in waiting:
            one.join()
    assert found == [200, 200]
