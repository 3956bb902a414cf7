"""Answers of a web server that misbehaves, one after the other: each as the table in stores.py says."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from tests.remote.apart import Apart
from tests.servers import certificate_of
from tests.web_server import BORN, Fault, Request, Served, WebServer, bucket_listing, right_answer
from wdsfs.door import urls
from wdsfs.door.pins import NO_LENGTH, Pin
from wdsfs.errors import (
    DeniedObject,
    MissingObject,
    NoRanges,
    ObjectChanged,
    ShardError,
    Unreachable,
    UnreadableShard,
)
from wdsfs.remote.etags import ETags

CONTENT = bytes(range(256)) * 1000
SECRET = "s3cr3t-f00"
TARGET = "/set/a%20b.tar"


@pytest.fixture
def served(web: WebServer) -> Served:
    return web.put(TARGET, CONTENT)


@pytest.fixture
def url(web: WebServer) -> str:
    return f"{web.url}{TARGET}"


def test_a_range_is_asked_for_with_a_condition(apart: Apart, web: WebServer, served: Served, url: str) -> None:
    pin = apart.head(url)
    assert pin == Pin(len(CONTENT), 1_700_000_000 * 10**9, '"1"', "")
    assert apart.get(url, pin, 1000, 3000) == CONTENT[1000:3000]
    asked = web.requests[-1].headers
    assert (asked["range"], asked["if-match"]) == ("bytes=1000-2999", '"1"')
    assert (len(web.requests), web.sent) == (2, 2000)
    assert apart.get(url, pin, 7, 7) == b""
    assert len(web.requests) == 2
    counted = apart.counted(url)
    assert (counted["requests"], counted["bytes"], counted["retries"]) == (2, 2000, 0)


@pytest.mark.parametrize("conditions", [True, False])
def test_an_object_that_was_replaced_is_stale(
    apart: Apart, web: WebServer, served: Served, url: str, conditions: bool
) -> None:
    """Also where a server ignores If-Match. Nothing of the new object is fetched."""
    pin = apart.head(url)
    web.put(TARGET, bytes(len(CONTENT)), etag='"2"', conditions=conditions, modified=BORN + 1)
    with pytest.raises(ObjectChanged, match="has been replaced"):
        apart.get(url, pin, 0, 200_000)
    assert [one.headers["range"] for one in web.gets()] == ["bytes=0-199999", "bytes=0-0"]  # what is there instead
    assert apart.waits() == []
    assert apart.head(url) == pin._replace(etag='"2"', mtime_ns=pin.mtime_ns + 10**9)


@pytest.mark.parametrize("conditions", [True, False])
def test_an_object_that_was_replaced_within_a_second_is_stale(
    apart: Apart, web: WebServer, served: Served, url: str, conditions: bool
) -> None:
    """Only its ETag differs then, and the old one never comes back."""
    pin = apart.head(url)
    web.put(TARGET, bytes(len(CONTENT)), etag='"2"', conditions=conditions)
    for _ in range(3):
        with pytest.raises(ObjectChanged, match="has been replaced"):
            apart.get(url, pin, 0, 200_000)
        assert apart.head(url) == pin._replace(etag='"2"')
    assert apart.logged() == []


@pytest.mark.parametrize("conditions", [True, False])
@pytest.mark.parametrize("machines", [2, 3])
def test_an_object_whose_etag_depends_on_the_machine_is_pinned_by_size_and_time(
    apart: Apart, web: WebServer, served: Served, url: str, machines: int, conditions: bool
) -> None:
    requests = itertools.count()

    async def answer(request: Request) -> tuple[int, dict[str, str], bytes]:
        etag = f'"machine {next(requests) % machines}"'
        return right_answer(request, replace(served, etag=etag, conditions=conditions))

    web.handler = answer
    pin = apart.head(url)
    assert pin.etag
    for _ in range(machines):  # one of these requests comes to another machine
        with contextlib.suppress(ObjectChanged):
            apart.get(url, pin, 0, 10)
    pin = apart.head(url)
    assert pin == Pin(len(CONTENT), BORN * 10**9, "", "")
    for begin, end in ((0, 10), (100, 250_000)):
        assert apart.get(url, pin, begin, end) == CONTENT[begin:end]
    assert apart.head(url) == pin
    [warning] = apart.logged()
    assert warning.startswith(f"{web.url}: has several ETags")
    served.modified = BORN + 1
    with pytest.raises(ObjectChanged, match="another Last-Modified" if not conditions else "replaced"):
        apart.get(url, pin, 0, 10)


class _Crowded(OrderedDict[Any, Any]):
    """Notes of which another thread drops the one that was just written."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.popitem(last=False)


def test_etags_are_noted_while_another_thread_drops_old_ones(url: str) -> None:
    etags = ETags()
    etags._seen = _Crowded()
    etags.note(urls.parse(url), Pin(1, 2, '"1"', ""))
    assert not etags._seen


@pytest.mark.parametrize("conditions", [True, False])
def test_without_a_time_an_etag_counts_until_the_object_is_pinned_again(
    apart: Apart, web: WebServer, served: Served, url: str, conditions: bool
) -> None:
    """Also when its server turns out to have several ETags for one object: the size alone proves nothing."""
    served.modified, served.conditions = None, conditions
    pin = apart.head(url)
    other = web.put("/set/other.tar", CONTENT)
    for etag in ('"1"', '"2"', '"1"'):
        other.etag = etag
        apart.head(f"{web.url}/set/other.tar")
    [_] = apart.logged()
    assert apart.get(url, pin, 0, 10) == CONTENT[:10]
    web.put(TARGET, bytes(len(CONTENT)), etag='"3"', modified=None, conditions=conditions)
    with pytest.raises(ObjectChanged, match="replaced"):
        apart.get(url, pin, 10, 20)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_server_that_refuses_every_condition_gets_none(
    apart: Apart, web: WebServer, served: Served, url: str, ranges: bool
) -> None:
    async def answer(request: Request) -> tuple[int, dict[str, str], bytes] | None:
        return (412, {}, b"") if "if-match" in request.headers else None

    web.handler, served.ranges = answer, ranges
    pin = apart.head(url)
    if ranges:
        assert apart.get(url, pin, 0, 10) == CONTENT[:10]
    assert apart.get_all(url, pin) == CONTENT
    [warning] = apart.logged()
    assert warning.startswith(f"{web.url}: refuses If-Match")
    served.etag = '"2"'
    with pytest.raises(ObjectChanged, match="another ETag"):
        apart.get_all(url, pin)


def test_the_ends_of_an_object(apart: Apart, web: WebServer, served: Served, url: str) -> None:
    pin = apart.head(url)
    assert apart.get(url, pin, len(CONTENT) - 1, len(CONTENT)) == CONTENT[-1:]
    served.content = CONTENT[:1000]
    with pytest.raises(ObjectChanged):
        apart.get(url, pin, 500, 1500)
    with pytest.raises(ObjectChanged):
        apart.get(url, pin, 5000, 6000)


def test_an_object_that_is_gone(apart: Apart, web: WebServer, served: Served, url: str) -> None:
    pin = apart.head(url)
    web.objects.clear()
    with pytest.raises(ObjectChanged, match="is gone"):
        apart.get(url, pin, 0, 10)
    with pytest.raises(MissingObject):
        apart.head(url)


@pytest.mark.parametrize("etag", [None, 'W/"1"'])
def test_without_an_etag_size_and_last_modified_have_to_do(
    apart: Apart, web: WebServer, served: Served, url: str, etag: str | None
) -> None:
    modified = 1_700_000_000
    served.etag, served.modified = etag, modified
    pin = apart.head(url)
    assert pin.is_weak
    assert apart.get(url, pin, 0, 10) == CONTENT[:10]
    assert "if-match" not in web.requests[-1].headers
    assert web.requests[-1].headers.get("if-unmodified-since") == formatdate(modified, usegmt=True)
    for conditions in (True, False):
        served.conditions = conditions
        served.modified = 1_700_000_999
        with pytest.raises(ObjectChanged):
            apart.get(url, pin, 0, 10)
    served.content += b"more"
    with pytest.raises(ObjectChanged):
        apart.get(url, pin, 0, 10)


def test_an_answer_without_what_the_pin_has_counts_as_another_object(
    apart: Apart, web: WebServer, served: Served, url: str
) -> None:
    pin = apart.head(url)
    served.etag, served.conditions = None, False
    assert apart.get(url, pin, 0, 10) == CONTENT[:10]  # by its Last-Modified
    served.modified = None
    with pytest.raises(ObjectChanged, match="neither version nor ETag nor Last-Modified"):
        apart.get(url, pin, 0, 10)


def test_a_server_that_ignores_range_sends_whole_objects(
    apart: Apart, web: WebServer, served: Served, url: str
) -> None:
    served.ranges = False
    pin = apart.head(url)
    with pytest.raises(NoRanges, match="whole objects only"):
        apart.get(url, pin, 10, 20)
    assert len(web.gets()) == 1
    assert apart.get_all(url, pin) == CONTENT


def test_a_whole_object_that_is_cut_is_asked_for_again_while_each_time_brings_more(
    apart: Apart, web: WebServer, served: Served, url: str
) -> None:
    served.ranges, served.only_gets = False, True
    served.content = big = CONTENT * 20
    pin = apart.head(url)
    served.faults.extend([Fault(cut=2_500_000), Fault(cut=4_000_000)])
    assert apart.get_all(url, pin) == big
    assert len(web.gets()) == 3
    served.always = Fault(cut=4_000_000)
    with pytest.raises(Unreachable, match="again and again before byte"):
        apart.get_all(url, pin)
    assert len(web.gets()) == 7
    served.always = None
    served.faults.append(Fault(cut=2_500_000, meanwhile=lambda: setattr(served, "etag", '"2"')))
    with pytest.raises(ObjectChanged):
        apart.get_all(url, pin)


def test_a_long_range_that_is_cut_goes_on_where_it_has_ended(
    apart: Apart, web: WebServer, served: Served, url: str
) -> None:
    served.content = big = CONTENT * 10
    pin = apart.head(url)
    served.faults.extend([Fault(cut=1_000_000), Fault(cut=600_000)])
    assert apart.get(url, pin, 1000, 2_000_000) == big[1000:2_000_000]
    begins = [int(request.headers["range"].removeprefix("bytes=").partition("-")[0]) for request in web.gets()]
    assert begins[0] == 1000 < begins[1] < begins[2]
    assert apart.counted(url)["bytes"] == 2_000_000 - 1000


@pytest.mark.parametrize(
    "fault",
    [
        Fault(cut=5_000),
        Fault(cut=0),
        Fault(headers={"Content-Length": "50"}),
        Fault(headers={"Content-Range": "bytes 0-9999/256000"}),
        Fault(headers={"Content-Range": "bytes 1000-10998/256000"}),
        Fault(headers={"Content-Range": "nonsense"}),
        Fault(headers={"Content-Range": "bytes 1000-10999/*"}),
        Fault(status=206, body=b"x" * 10_000),
        Fault(status=500, body=b"x"),
        Fault(status=502),
        Fault(status=504),
        Fault(status=408),
    ],
)
def test_an_answer_that_is_broken_once_is_asked_for_again(
    apart: Apart, web: WebServer, served: Served, url: str, fault: Fault
) -> None:
    pin = apart.head(url)
    served.faults.append(fault)
    assert apart.get(url, pin, 1000, 11_000) == CONTENT[1000:11_000]
    assert len(web.gets()) >= 2
    assert apart.counted(url)["throttled"] == 0


@pytest.mark.parametrize(
    ("fault", "attempts"),
    [
        (Fault(cut=50), None),
        (Fault(status=500), None),
        (Fault(status=400), 1),
        (Fault(status=302), 1),
        (Fault(status=304), 1),
        (Fault(status=501), 1),
    ],
)
def test_a_server_that_does_not_mend_gets_an_error_in_the_end(
    apart: Apart, web: WebServer, served: Served, url: str, fault: Fault, attempts: int | None
) -> None:
    pin = apart.head(url)
    served.always = fault
    with pytest.raises(Unreachable, match=f"{re.escape(url)}: ") as caught:
        apart.get(url, pin, 0, 100)
    assert type(caught.value) is Unreachable
    asked = len(web.gets())
    assert asked == attempts if attempts else 5 < asked < 30
    assert sum(apart.waits()) <= 60
    assert apart.counted(url)["failures"] == (0 if attempts == 1 else 1)


def test_a_size_that_the_range_belies_is_another_object(
    apart: Apart, web: WebServer, served: Served, url: str
) -> None:
    pin = apart.head(url)
    served.faults.append(Fault(headers={"Content-Range": "bytes 0-9/999"}))
    with pytest.raises(ObjectChanged, match="999 bytes"):
        apart.get(url, pin, 0, 10)


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_is_throttling_is_left_alone_for_as_long_as_it_says(
    apart: Apart, web: WebServer, served: Served, url: str, status: int
) -> None:
    pin = apart.head(url)
    served.faults.extend([Fault(status=status, headers={"Retry-After": "17"})] * 2)  # the second: to the question
    assert apart.get(url, pin, 0, 10) == CONTENT[:10]
    assert sum(apart.waits()) == pytest.approx(17)
    assert len(web.gets()) == 3
    assert apart.counted(url)["throttled"] == 1
    when = formatdate(time.time() + 30, usegmt=True)
    served.faults.extend([Fault(status=status, headers={"Retry-After": when})] * 2)
    assert apart.get(url, pin, 0, 10) == CONTENT[:10]
    assert 40 < sum(apart.waits()) <= 47.1


@pytest.mark.parametrize(
    "fault",
    [
        Fault(chunked=True),
        Fault(widens=(1000, 5000)),
        Fault(widens=(0, 10**9)),
        Fault(widens=(700, -3000)),
        Fault(chunked=True, widens=(0, -1)),
        Fault(headers={"Content-Range": "bytes 0-9/512000"}),
    ],
)
def test_a_server_whose_ranges_are_others_counts_as_one_without_ranges(
    apart: Apart, web: WebServer, served: Served, url: str, fault: Fault
) -> None:
    served.content = content = CONTENT * 2
    served.always = fault
    pin = apart.head(url)
    assert pin == Pin(len(content), 1_700_000_000 * 10**9, '"1"', "")
    before = len(web.gets())
    with pytest.raises(NoRanges, match="whole objects only"):
        apart.get(url, pin, 1000, 11_000)
    assert len(web.gets()) - before == (1 if fault.chunked else 3)
    assert apart.get_all(url, pin) == content
    web.put(url.removeprefix(web.url), bytes(len(content)), etag='"2"', conditions=False).always = fault
    with pytest.raises(ObjectChanged):
        apart.get_all(url, pin)


@pytest.mark.parametrize("size", [len(CONTENT) - 1, len(CONTENT) + 1])
def test_chunks_of_another_size_are_not_taken(
    apart: Apart, web: WebServer, served: Served, url: str, size: int
) -> None:
    pin = apart.head(url)
    served.content, served.always = (CONTENT * 2)[:size], Fault(chunked=True)
    error = ObjectChanged if size > len(CONTENT) else Unreachable
    with pytest.raises(error, match=r"more than|less than it says"):
        apart.get_all(url, pin)


def test_chunks_that_break_off_are_asked_for_again(apart: Apart, web: WebServer, served: Served, url: str) -> None:
    pin = apart.head(url)
    served.faults.extend([Fault(chunked=True, cut=50), Fault(chunked=True, cut=100_000, torn=True)])
    served.always = Fault(chunked=True)
    assert apart.get_all(url, pin) == CONTENT


@pytest.mark.parametrize(
    "nonsense",
    [
        {"Retry-After": "9" * 32},
        {"Retry-After": "9" * 400},
        {"Retry-After": "Fri, 31 Dec 9999 23:59:59 GMT"},
        {"Retry-After": f"Mon, {'9' * 20} Jan 2020 00:00:00 GMT"},
        {f"X-{number}": "y" for number in range(200)},
    ],
)
def test_a_complaint_with_nonsense_in_its_headers_is_an_error_that_names_the_shard(
    apart: Apart, web: WebServer, served: Served, url: str, nonsense: dict[str, str]
) -> None:
    pin = apart.head(url)
    served.faults.append(Fault(status=429))  # then the question for Retry-After
    served.always = Fault(status=429, headers=nonsense)
    with pytest.raises(Unreachable, match=f"{re.escape(url)}: "):
        apart.get(url, pin, 0, 10)


def test_a_time_that_is_none_is_another_one(apart: Apart, web: WebServer, served: Served, url: str) -> None:
    served.etag = None
    pin = apart.head(url)
    served.always = Fault(headers={"Last-Modified": f"Mon, {'9' * 20} Jan 2020 00:00:00 GMT"})
    with pytest.raises(ShardError, match=f"{re.escape(url)}: "):
        apart.get(url, pin, 0, 10)


def test_an_error_whose_body_breaks_off_in_chunks_names_the_shard(
    apart: Apart, web: WebServer, served: Served, url: str
) -> None:
    pin = apart.head(url)

    async def answer(request: Request) -> tuple[int, dict[str, str], bytes] | None:
        if request.headers.get("accept-encoding") != "identity":  # not urllib
            return None
        return 500, {"Transfer-Encoding": "chunked"}, b"no size of a chunk\r\n"

    web.handler = answer
    served.always = Fault(chunked=True)
    with pytest.raises(Unreachable, match=f"{re.escape(url)}: "):
        apart.get_all(url, pin)


def test_headers_that_are_too_large_are_named(apart: Apart, web: WebServer, served: Served, url: str) -> None:
    pin = apart.head(url)
    served.always = Fault(headers={f"X-{number}": "y" * 200 for number in range(200)})
    for ask in (lambda: apart.get(url, pin, 0, 10), lambda: apart.head(url)):
        with pytest.raises(Unreachable, match="headers that are too large"):
            ask()
    assert apart.waits() == []
    served.always = Fault(headers={"Content-Length": "many"})
    with pytest.raises(Unreachable, match="no answer of HTTP"):
        apart.head(url)


def test_a_redirect_to_nowhere_of_a_web_server_has_no_region(
    apart: Apart, web: WebServer, served: Served, url: str
) -> None:
    served.always = Fault(status=302)
    with pytest.raises(Unreachable, match="does not say where to") as caught:
        apart.head(url)
    assert "region" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["s3", "https"])
def test_a_certificate_of_an_authority_is_refused_with_the_ways_out(
    apart: Apart, tmp_path: Path, scheme: str
) -> None:
    """By itself `openssl req -x509` makes one of an authority, which obstore does not take for a server."""
    certificate, context = certificate_of(tmp_path)
    with WebServer(context).running() as server:
        server.put("/bucket/a.tar", CONTENT)
        prefix, options = server.url, dict[str, str]()
        if scheme == "s3":
            prefix, options = "s3:/", {"endpoint": server.url, "anonymous": "true"}
        address = f"{prefix}/bucket/a.tar"
        options["certificates"] = str(certificate)
        apart.configure((prefix, options))
        with pytest.raises(Unreachable, match=r"authority \(CA:TRUE\).*: openssl req -x509 ") as caught:
            apart.head(address)
        assert apart.waits() == []
        del options["certificates"]
        option = str(caught.value).rpartition(" --store-option ")[2].rpartition(":")
        apart.configure((prefix, options), (option[0], dict([option[2].split("=")])))
        pin = apart.head(address)
        assert apart.get(address, pin, 100, 5000) == CONTENT[100:5000]
        server.objects["/bucket/a.tar"].always = Fault(chunked=True)  # then urllib asks
        if scheme == "https":
            assert apart.head(address) == pin
            assert apart.get_all(address, pin) == CONTENT
    words = str(caught.value).partition("subjectAltName=DNS:HOST ")[2].partition(" . ")[0].split()
    certificate, context = certificate_of(tmp_path, *words)
    with WebServer(context).running() as server:
        server.put("/a.tar", CONTENT)
        with pytest.raises(Unreachable, match="certificate of its server is not trusted"):
            apart.head(f"{server.url}/a.tar")
        apart.configure((server.url, {"certificates": str(certificate)}))
        assert apart.head(f"{server.url}/a.tar").size == len(CONTENT)


def test_a_redirect_from_https_to_http_fails_at_once(apart: Apart, web: WebServer, tmp_path: Path) -> None:
    certificate, context = certificate_of(tmp_path, "-addext", "basicConstraints=critical,CA:FALSE")
    web.put("/a.tar", CONTENT)
    with WebServer(context).running() as server:
        server.put("/a.tar", CONTENT).always = Fault(status=302, headers={"Location": f"{web.url}/a.tar"})
        apart.configure((server.url, {"certificates": str(certificate)}))
        with pytest.raises(Unreachable, match="redirects from https to http"):
            apart.head(f"{server.url}/a.tar")
    assert apart.waits() == []
    assert web.requests == []


def test_a_long_wait_that_a_server_asks_for_stops_neither_other_objects_nor_itself_for_as_long(
    apart: Apart, web: WebServer, served: Served, url: str
) -> None:
    web.put("/healthy.tar", CONTENT)
    pin, healthy = apart.head(url), apart.head(f"{web.url}/healthy.tar")
    served.always = Fault(status=429, headers={"Retry-After": "3600"})
    with pytest.raises(Unreachable, match=r"429, and asks to wait until 20\d\d-"):
        apart.get(url, pin, 0, 10)
    assert apart.counted(url)["told_until"] > time.time() + 3000
    assert apart.get(f"{web.url}/healthy.tar", healthy, 0, 10) == CONTENT[:10]
    assert apart.waits() == []
    asked = len(web.requests)
    with pytest.raises(Unreachable, match="asks to wait until"):
        apart.get(url, pin, 0, 10)
    assert len(web.requests) == asked  # nor is it pestered
    apart.later(10)
    served.always = None
    assert apart.get(url, pin, 0, 10) == CONTENT[:10]
    assert apart.waits() == []


@pytest.mark.parametrize("part", ["head", "body"])
@pytest.mark.parametrize("end", [5000, len(CONTENT)])
def test_a_server_that_sends_byte_by_byte_is_given_up(
    apart: Apart, web: WebServer, served: Served, url: str, part: str, end: int
) -> None:
    served.content = CONTENT * 2
    pin = apart.head(url)
    apart.configure((web.url, {"timeout": "0.3", "total_time": "0.3", "lowest_rate": "1000000"}))
    served.always = Fault(drips=part)
    with pytest.raises(Unreachable, match="does not answer"):
        apart.get(url, pin, 0, end)
    if part == "head":
        with pytest.raises(Unreachable, match="does not answer"):
            apart.head(url)
        with pytest.raises(Unreachable, match="does not answer"):
            apart.get_all(url, pin)


def test_an_answer_without_a_length_that_comes_byte_by_byte_is_given_up(
    apart: Apart, web: WebServer, served: Served, url: str
) -> None:
    apart.configure((web.url, {"timeout": "0.3", "total_time": "0.3", "lowest_rate": "10000000"}))
    served.always = Fault(chunked=True, drips="body")
    with pytest.raises(Unreachable, match="does not answer"):
        apart.get_all(url, Pin(NO_LENGTH, 0, "", ""))


def test_a_name_that_hides_a_listing_of_google_is_named_with_the_way_out(apart: Apart, web: WebServer) -> None:
    """Only directly in the directory that is listed; further below it does no harm."""
    keys = {"d/a.tar", "d/e//b.tar"}

    async def answer(request: Request) -> tuple[int, dict[str, str], bytes]:
        return bucket_listing(request, keys)

    web.handler = answer
    apart.configure(("gs://", {"endpoint": web.url, "anonymous": "true"}))
    assert [url.key for url, _ in apart.listing("gs://bucket/d/", deep=False).objects] == ["d/a.tar"]
    keys.add("d//c.txt")
    with pytest.raises(
        Unreachable, match=r"gs://bucket/d/: .*\(//\).*write out the names of the shards with braces"
    ):
        apart.listing("gs://bucket/d/", deep=False)
    assert apart.waits() == []


@pytest.mark.parametrize("part", ["head", "body"])
def test_a_listing_that_comes_byte_by_byte_is_given_up(apart: Apart, web: WebServer, part: str) -> None:
    limits = {"timeout": "0.3", "total_time": "0.3", "lowest_rate": "10000000"}
    apart.configure(("s3://bucket", {"endpoint": web.url, "anonymous": "true", "region": "here", **limits}))
    web.put("/bucket", b"<ListBucketResult></ListBucketResult>").always = Fault(drips=part)
    with pytest.raises(Unreachable, match="does not answer"):
        apart.listing("s3://bucket/")
    assert web.requests


def test_fewer_requests_are_under_way_after_a_complaint(
    apart: Apart, web: WebServer, served: Served, url: str
) -> None:
    apart.configure((web.url, {"requests": "16"}))
    pin = apart.head(url)
    served.faults.extend([Fault(status=503)] * 2)
    assert set(apart.together(*[("get", url, pin, 0, 10)] * 100)) == {CONTENT[:10]}
    assert web.most_under_way <= 17  # with the question for Retry-After
    assert apart.counted(url)["throttled"] >= 1


def test_a_server_that_does_not_answer_is_given_up_in_the_end(
    apart: Apart, web: WebServer, served: Served, url: str
) -> None:
    pin = apart.head(url)
    apart.configure((web.url, {"timeout": "0.2", "total_time": "5"}))  # only now: it was to answer, however late
    served.always = Fault(silent=True)
    with pytest.raises(Unreachable, match="does not answer"):
        apart.get(url, pin, 0, 10)
    served.always = Fault(stalls=5)
    with pytest.raises(Unreachable, match="does not answer"):
        apart.get(url, pin, 0, 10)
    assert sum(apart.waits()) <= 10


def test_a_server_that_is_not_there_and_comes_back(apart: Apart, web: WebServer, served: Served, url: str) -> None:
    pin = apart.head(url)
    gone = "http://127.0.0.1:9"
    with pytest.raises(Unreachable, match="cannot be connected to"):
        apart.get(f"{gone}/x.tar", pin, 0, 10)
    apart.later(10)
    for _ in range(2):  # the second is not tried at all: what is cached has to do
        with pytest.raises(Unreachable, match=r"x\.tar: its server cannot be connected to$"):
            apart.head(f"{gone}/x.tar")
        with pytest.raises(Unreachable, match=r"y\.tar: its server cannot be connected to$"):
            apart.head(f"{gone}/y.tar")
    with pytest.raises(Unreachable, match="the name of its server is not known"):
        apart.head("http://no-such-host.invalid/x.tar")
    assert apart.get(url, pin, 0, 10) == CONTENT[:10]


@pytest.mark.parametrize("status", [401, 403])
def test_an_object_that_is_refused(apart: Apart, web: WebServer, served: Served, url: str, status: int) -> None:
    pin = apart.head(url)
    served.always = Fault(status=status, body=f"<Error><Code>AccessDenied</Code>{SECRET}</Error>".encode())
    with pytest.raises(DeniedObject, match=f"{status} AccessDenied") as caught:
        apart.get(url, pin, 0, 10)
    assert SECRET not in str(caught.value)
    assert len(web.gets()) == 1
    with pytest.raises(DeniedObject):
        apart.head(url)


def test_user_and_password_go_to_their_server_only(
    apart: Apart, web: WebServer, other_web: WebServer, served: Served
) -> None:
    url = web.url.replace("//", f"//user:{SECRET}@") + TARGET
    other_web.put("/elsewhere.tar", CONTENT)
    web.put("/here.tar", CONTENT)
    served.always = Fault(status=302, headers={"Location": "/here.tar"})
    pin = apart.head(url)
    assert apart.get(url, pin, 0, 10) == CONTENT[:10]
    assert web.requests[-1].path == "/here.tar"
    assert "authorization" in web.requests[-1].headers
    served.always = Fault(status=307, headers={"Location": f"{other_web.url}/elsewhere.tar?sig={SECRET}"})
    assert apart.get(url, pin, 0, 10) == CONTENT[:10]
    assert other_web.requests[-1].headers["range"] == "bytes=0-9"
    assert "authorization" not in other_web.requests[-1].headers
    other_web.objects.clear()
    with pytest.raises(ObjectChanged) as caught:
        apart.get(url, pin, 0, 10)
    assert SECRET not in str(caught.value)
    served.always = Fault(status=302, headers={"Location": TARGET})
    with pytest.raises(Unreachable):
        apart.get(url, pin, 0, 10)


@pytest.mark.parametrize("name", ["token", "password"])
def test_credentials_of_the_settings_are_sent(
    apart: Apart, web: WebServer, served: Served, url: str, name: str
) -> None:
    apart.configure((f"{web.url}/set", {name: SECRET, "user": "me"}))
    apart.head(url)
    kind = {"token": "Bearer ", "password": "Basic "}[name]
    assert web.requests[-1].headers["authorization"].startswith(kind)
    with pytest.raises(MissingObject):
        apart.head(f"{web.url}/x.tar")
    assert "authorization" not in web.requests[-1].headers


def test_a_signed_url_is_sent_as_it_stands_and_never_by_head(apart: Apart, web: WebServer, served: Served) -> None:
    query = f"X-Amz-Signature={SECRET}%2F%3D&X-Amz-Date=20240101T000000Z&b=%20+"
    url = urls.parse(f"{web.url}{TARGET}?{query}")
    served.headers["X"] = "y"
    pin = apart.head(url)
    assert pin.size == len(CONTENT)
    assert apart.get(url, pin, 5, 10) == CONTENT[5:10]
    assert {one.target for one in web.requests} == {f"{TARGET}?{query}"}
    assert {one.method for one in web.requests} == {"GET"}
    served.ranges = False
    assert apart.head(url) == pin


def test_a_signature_that_has_ended_is_named_with_its_time(apart: Apart, web: WebServer, served: Served) -> None:
    for query in (
        f"X-Amz-Date=20240101T000000Z&X-Amz-Expires=3600&X-Amz-Signature={SECRET}",
        f"X-Goog-Date=20240101T000000Z&X-Goog-Expires=3600&X-Goog-Signature={SECRET}",
        f"Expires=1704070800&Signature={SECRET}",
        f"sv=2020&se=2024-01-01T01%3A00%3A00Z&sig={SECRET}",
    ):
        served.always = None
        url = urls.parse(f"{web.url}{TARGET}?{query}")
        pin = apart.head(url)
        served.always = Fault(status=403, body=b"Request has expired")
        with pytest.raises(DeniedObject, match="ended at 2024-01-01 01:00:00") as caught:
            apart.get(url, pin, 0, 10)
        assert SECRET not in str(caught.value)
        assert f"{web.url}{TARGET}" in str(caught.value)


def test_head_that_is_refused_is_replaced_by_get(apart: Apart, web: WebServer, served: Served, url: str) -> None:
    for status in (405, 403, 501):
        served.faults.append(Fault(status=status))
        assert apart.head(url).size == len(CONTENT)
    served.content = b""
    served.faults.append(Fault(status=405))
    assert apart.head(url).size == 0


@pytest.mark.parametrize(
    "name", ["a%2Fb.tar", "100%25.tar", "a+b(1)!$&'*,;=@~.tar", "%C3%A9%20%FF.tar", "a:b.tar"]
)
def test_a_path_is_sent_as_it_was_typed(apart: Apart, web: WebServer, name: str) -> None:
    web.put(f"/d/{name}", CONTENT)
    url = f"{web.url}/d/{name}"
    assert apart.get(url, apart.head(url), 0, 5) == CONTENT[:5]


def test_a_web_server_does_not_list(apart: Apart, web: WebServer) -> None:
    with pytest.raises(Unreachable, match="does not list"):
        apart.listing(f"{web.url}/set/")
    assert web.requests == []


def test_no_error_has_a_secret_in_it(apart: Apart, web: WebServer, served: Served) -> None:
    """Whatever goes wrong: each text that a caller sees, also the repr."""
    url = urls.parse(web.url.replace("//", f"//user:{SECRET}@") + f"{TARGET}?token={SECRET}")
    pin = apart.head(url)
    faults = [
        Fault(status=status, body=SECRET.encode()) for status in (400, 401, 403, 404, 410, 412, 416, 500, 501)
    ]
    faults += [Fault(status=429, headers={"Retry-After": "9999"}), Fault(status=302), Fault(cut=3)]
    faults += [Fault(headers={"Content-Range": SECRET}), Fault(headers={"ETag": f'"{SECRET}"'})]
    faults += [Fault(status=302, headers={"Location": f"http://127.0.0.1:9/{SECRET}?sig={SECRET}"})]
    for fault in faults:
        for name, arguments in (("get", (pin, 0, 10)), ("head", ())):
            served.always = fault
            [answer] = apart.together((name, url, *arguments))
            if isinstance(answer, ShardError):
                assert SECRET not in str(answer) + repr(answer), fault
                assert f"{web.url}{TARGET}" in str(answer)
            else:
                assert name == "head"


def test_many_signed_urls_at_once(apart: Apart, web: WebServer, served: Served) -> None:
    """More than clients are kept."""
    places = [urls.parse(f"{web.url}{TARGET}?sig={number}") for number in range(300)]
    pin = apart.head(places[0])
    calls = [("get", place, pin, at, at + 10) for at, place in enumerate(places * 2)]
    assert apart.together(*calls) == [CONTENT[at : at + 10] for *_, at, _ in calls]
    assert {one.target for one in web.gets()} == {f"{TARGET}?sig={number}" for number in range(300)}


def test_what_doctor_is_to_say(apart: Apart, web: WebServer, served: Served, url: str) -> None:
    good = apart.describe(url)
    assert good["reachable"]
    assert (good["ranges"], good["conditions"], good["credentials"]) == (True, True, "none")
    assert (good["size"], good["pinned"], good["error"]) == (len(CONTENT), True, None)
    served.ranges = served.conditions = False
    served.etag = None
    bad = apart.describe(url)
    assert (bad["ranges"], bad["conditions"], bad["pinned"]) == (False, False, False)
    served.always = Fault(status=403)
    assert "403" in apart.describe(url.replace("//", f"//user:{SECRET}@"))["error"]
    assert not apart.describe(url)["reachable"]


def test_a_file_of_certificates_that_is_not_there(apart: Apart, tmp_path: Path) -> None:
    apart.configure(("https://", {"certificates": str(tmp_path / "none.pem")}))
    with pytest.raises(Unreachable, match="certificates"):
        apart.head("https://127.0.0.1:9/x.tar")
    (tmp_path / "none.pem").write_text("no certificate")
    with pytest.raises(Unreachable):
        apart.head("https://127.0.0.1:9/x.tar")


def test_a_proxy_is_used(
    own_apart: Callable[[dict[str, str]], contextlib.AbstractContextManager[Apart]], web: WebServer, served: Served
) -> None:
    with own_apart({"http_proxy": web.url}) as apart:
        url = f"http://far.invalid{TARGET}"
        assert apart.get(url, apart.head(url), 0, 10) == CONTENT[:10]
    assert web.requests[-1].target == url


def test_an_object_that_nothing_marks_is_refused_without_a_cache(apart: Apart, served: Served, url: str) -> None:
    served.etag = served.modified = None
    with pytest.raises(UnreadableShard, match="it can only be read from a cache, and there is none"):
        apart.head(url)
