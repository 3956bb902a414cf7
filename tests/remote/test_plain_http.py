"""Short ranges that are read without obstore. What each odd answer means is in test_stores.py, for both ways."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from tests.remote.apart import Apart
from tests.web_server import Fault, Request, Served, WebServer, right_answer

CONTENT = bytes(range(256)) * 100


@pytest.fixture
def served(web: WebServer) -> Served:
    return web.put("/a.tar", CONTENT)


@pytest.fixture
def url(web: WebServer) -> str:
    return f"{web.url}/a.tar"


def test_connections_are_kept(apart: Apart, web: WebServer, served: Served, url: str) -> None:
    pin = apart.head(url)
    before = web.connections
    for at in range(20):
        assert apart.get(url, pin, at, at + 1000) == CONTENT[at : at + 1000]
    assert web.connections - before == 1
    asked = web.requests[-1].headers
    assert (asked["range"], asked["if-match"], asked["host"]) == (
        "bytes=19-1018",
        '"1"',
        f"127.0.0.1:{web.port}",
    )
    assert asked["user-agent"].startswith("wdsfs/")


def test_as_many_connections_as_requests_at_once(apart: Apart, web: WebServer, served: Served, url: str) -> None:
    pin = apart.head(url)
    calls = [("get", url, pin, at, at + 10) for at in range(200)]
    assert apart.together(*calls) == [CONTENT[at : at + 10] for at in range(200)]
    assert len(web.gets()) == 200


def test_a_connection_that_the_server_has_closed_is_no_error(
    apart: Apart, web: WebServer, served: Served, url: str
) -> None:
    pin = apart.head(url)
    for _ in range(5):
        served.faults.append(Fault(cut=10))  # after the last byte
        assert apart.get(url, pin, 0, 10) == CONTENT[:10]
    assert len(web.gets()) == 5
    assert apart.counted(url)["retries"] == 0


def test_a_server_that_redirects_is_left_to_obstore_for_a_while(
    apart: Apart, web: WebServer, served: Served, url: str
) -> None:
    pin = apart.head(url)
    web.put("/elsewhere.tar", CONTENT)
    served.always = Fault(status=302, headers={"Location": "/elsewhere.tar"})
    assert apart.get(url, pin, 0, 10) == CONTENT[:10]
    assert [one.path for one in web.gets()] == ["/a.tar", "/a.tar", "/elsewhere.tar"]
    assert apart.get(url, pin, 0, 10) == CONTENT[:10]
    assert [one.path for one in web.gets()][3:] == ["/a.tar", "/elsewhere.tar"]


@pytest.mark.parametrize("headers", [{"X-Long": "x" * 20_000}, {"Content-Encoding": "identity"}])
def test_an_answer_that_only_obstore_understands(
    apart: Apart, web: WebServer, served: Served, url: str, headers: dict[str, str]
) -> None:
    pin = apart.head(url)

    async def answer(request: Request) -> tuple[int, dict[str, str], bytes]:
        status, found, body = right_answer(request, served)
        return status, {**found, **headers}, body

    web.handler = answer
    assert apart.get(url, pin, 5, 1000) == CONTENT[5:1000]


def test_a_proxy_is_used(
    own_apart: Callable[[dict[str, str]], contextlib.AbstractContextManager[Apart]], web: WebServer, served: Served
) -> None:
    with own_apart({"http_proxy": web.url}) as apart:
        url = "http://far.invalid/a.tar"
        assert apart.get(url, apart.head(url), 0, 10) == CONTENT[:10]
    assert web.requests[-1].target == url
