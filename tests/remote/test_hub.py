"""hf:// against an imitation of the hub: commits, directories listed once, places for downloads."""

from __future__ import annotations

from typing import Any

import pytest

from tests.hub_server import HubServer
from tests.remote.apart import Apart
from tests.web_server import WebServer
from wdsfs.errors import DeniedObject, MissingObject, ObjectChanged, Unreachable

CONTENT = bytes(range(256)) * 100
URL = "hf://datasets/me/set/train/a.tar"
SECRET = "hf_s3cr3t"


@pytest.fixture
def hub(apart: Apart, web: WebServer, other_web: WebServer) -> HubServer:
    apart.configure(("hf://", {"endpoint": web.url}))
    server = HubServer(web, other_web)
    server.commit(train__a_tar=CONTENT, train__b_tar=CONTENT[:500], README=b"hello")
    return server


def test_a_file_is_found_by_two_requests_and_read_by_one_each(apart: Apart, hub: HubServer) -> None:
    """A revision, then the directory; and for all reads of a file its place at the other server, once."""
    pin = apart.head(URL)
    assert pin.size == len(CONTENT)
    assert not pin.is_weak
    assert apart.head(URL.replace("a.tar", "b.tar")).size == 500
    assert len(hub.hub.requests) == 2
    for begin in range(0, 10_000, 1000):
        assert apart.get(URL, pin, begin, begin + 100) == CONTENT[begin : begin + 100]
    assert [one.method for one in hub.hub.requests[2:]] == ["HEAD"]
    assert len(hub.cdn.requests) == 10


def test_all_files_below_a_prefix(apart: Apart, hub: HubServer) -> None:
    found = apart.listing("hf://datasets/me/set@main/train/").objects
    assert [url.shown for url, _ in found] == [f"hf://datasets/me/set@main/train/{name}.tar" for name in "ab"]
    assert found[0][1] == apart.head(URL)
    assert [url.key for url, _ in apart.listing("hf://datasets/me/set").objects] == [
        "README",
        "train/a.tar",
        "train/b.tar",
    ]
    assert [url.key for url, _ in apart.listing("hf://datasets/me/set/train/b").objects] == ["train/b.tar"]
    top = apart.listing("hf://datasets/me/set/", deep=False)
    assert ([url.key for url, _ in top.objects], top.folders) == (["README"], ["train/"])


def test_a_commit_that_leaves_the_file_alone_changes_nothing(apart: Apart, hub: HubServer) -> None:
    pin = apart.head(URL)
    hub.commit(README=b"something else")
    apart.configure(("hf://", {"endpoint": hub.hub.url}))
    assert apart.head(URL) == pin
    assert apart.get(URL, pin, 0, 9) == CONTENT[:9]


def test_a_file_that_was_replaced(apart: Apart, hub: HubServer) -> None:
    """Who has read the old commit goes on with it, as it is; a process that has not finds that it is replaced."""
    first, pin = hub.branch, apart.head(URL)
    hub.commit(train__a_tar=CONTENT[::-1])
    assert apart.get(URL, pin, 0, 9) == CONTENT[:9]
    assert apart.head(URL) == pin  # a listing answers for some seconds
    apart.later(11)
    assert apart.head(URL) != pin
    apart.configure(("hf://", {"endpoint": hub.hub.url}))
    with pytest.raises(ObjectChanged):
        apart.get(URL, pin, 0, 9)
    new = apart.head(URL)
    assert apart.get(URL, new, 0, 9) == CONTENT[::-1][:9]
    assert apart.get(URL.replace("me/set", f"me/set@{first}"), pin, 0, 9) == CONTENT[:9]


def test_a_place_that_has_expired_is_asked_for_anew(apart: Apart, hub: HubServer) -> None:
    pin = apart.head(URL)
    apart.get(URL, pin, 0, 9)
    hub.signature = "second"
    assert apart.get(URL, pin, 0, 9) == CONTENT[:9]
    assert [one.method for one in hub.hub.requests[2:]] == ["HEAD", "HEAD"]
    hub.signature = ""
    with pytest.raises(DeniedObject):
        apart.get(URL, pin, 0, 9)


def test_what_is_not_there(apart: Apart, hub: HubServer) -> None:
    for url in (URL.replace("a.tar", "c.tar"), URL.replace("train", "no"), URL.replace("me/set", "me/set@v9")):
        with pytest.raises(MissingObject):
            apart.head(url)
    with pytest.raises(DeniedObject, match="no such data set, or it is private"):
        apart.head("hf://datasets/me/other/a.tar")
    apart.configure(("hf://", {"endpoint": "http://127.0.0.1:9"}))
    with pytest.raises(Unreachable, match="cannot be connected to"):
        apart.head(URL)


def test_a_token_goes_to_the_hub_only(apart: Apart, hub: HubServer) -> None:
    hub.token = SECRET
    with pytest.raises(DeniedObject, match="HF_TOKEN"):
        apart.head(URL)
    apart.configure(("hf://", {"endpoint": hub.hub.url, "token": SECRET}))
    pin = apart.head(URL)
    assert apart.get(URL, pin, 0, 9) == CONTENT[:9]
    assert all("authorization" not in one.headers for one in hub.cdn.requests)
    assert apart.describe(URL)["credentials"] == "token of the configuration file"


def test_a_hub_that_is_throttling_says_for_how_long(apart: Apart, hub: HubServer) -> None:
    handler = hub.hub.handler
    refused: list[Any] = []

    async def answer(request):  # type: ignore[no-untyped-def]
        if len(refused) < 1:
            refused.append(request)
            return 429, {"Retry-After": "21"}, b"{}"
        return await handler(request)

    hub.hub.handler = answer
    assert apart.head(URL).size == len(CONTENT)
    assert sum(apart.waits()) == pytest.approx(21)
