"""Answers of a web server that misbehaves, one after the other: each as the table in stores.py says."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from typing import Any, NamedTuple

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
from wdsfs.remote.answers import ETags

CONTENT = bytes(range(256)) * 1000
SECRET = "s3cr3t-f00"
TARGET = "/set/a%20b.tar"


@pytest.fixture
def served(web: WebServer) -> Served:
    return web.put(TARGET, CONTENT)


@pytest.fixture
def url(web: WebServer) -> str:
    return f"{web.url}{TARGET}"


class Site(NamedTuple):
    """An object of a web server, and the stores that read it."""

    apart: Apart
    web: WebServer
    served: Served
    url: str

    def head(self) -> Pin:
        return self.apart.head(self.url)

    def get(self, pin: Pin, begin: int, end: int) -> bytes:
        return self.apart.get(self.url, pin, begin, end)

    def get_all(self, pin: Pin) -> bytes:
        return self.apart.get_all(self.url, pin)


@pytest.fixture
def site(apart: Apart, web: WebServer, served: Served, url: str) -> Site:
    return Site(apart, web, served, url)


def test_a_range_is_asked_for_with_a_condition(site: Site) -> None:
    pin = site.head()
    assert pin == Pin(len(CONTENT), 1_700_000_000 * 10**9, '"1"', "")
    assert site.get(pin, 1000, 3000) == CONTENT[1000:3000]
    asked = site.web.requests[-1].headers
    assert (asked["range"], asked["if-match"]) == ("bytes=1000-2999", '"1"')
    assert (len(site.web.requests), site.web.sent) == (2, 2000)
    assert site.get(pin, 7, 7) == b""
    assert len(site.web.requests) == 2
    counted = site.apart.counted(site.url)
    assert (counted["requests"], counted["bytes"], counted["retries"]) == (2, 2000, 0)


@pytest.mark.parametrize("conditions", [True, False])
@pytest.mark.parametrize("later", [1, 0])
def test_an_object_that_was_replaced_is_stale(site: Site, conditions: bool, later: int) -> None:
    """Also where a server ignores If-Match. Nothing of the new object is fetched.

    Within a second only its ETag differs, and the old one never comes back.
    """
    pin = site.head()
    site.web.put(TARGET, bytes(len(CONTENT)), etag='"2"', conditions=conditions, modified=BORN + later)
    for _ in range(3):
        with pytest.raises(ObjectChanged, match="has been replaced"):
            site.get(pin, 0, 200_000)
        assert site.head() == pin._replace(etag='"2"', mtime_ns=pin.mtime_ns + later * 10**9)
    ranges = [one.headers["range"] for one in site.web.gets()]
    assert not later or ranges == ["bytes=0-199999", "bytes=0-0"] * 3
    assert (site.apart.waits(), site.apart.logged()) == ([], [])


@pytest.mark.parametrize("conditions", [True, False])
@pytest.mark.parametrize("machines", [2, 3])
def test_an_object_whose_etag_depends_on_the_machine_is_pinned_by_size_and_time(
    site: Site, machines: int, conditions: bool
) -> None:
    requests = itertools.count()

    async def answer(request: Request) -> tuple[int, dict[str, str], bytes]:
        etag = f'"machine {next(requests) % machines}"'
        return right_answer(request, replace(site.served, etag=etag, conditions=conditions))

    site.web.handler = answer
    pin = site.head()
    assert pin.etag
    for _ in range(machines):  # one of these requests comes to another machine
        with contextlib.suppress(ObjectChanged):
            site.get(pin, 0, 10)
    pin = site.head()
    assert pin == Pin(len(CONTENT), BORN * 10**9, "", "")
    for begin, end in ((0, 10), (100, 250_000)):
        assert site.get(pin, begin, end) == CONTENT[begin:end]
    assert site.head() == pin
    [warning] = site.apart.logged()
    assert warning.startswith(f"{site.web.url}: has several ETags")
    site.served.modified = BORN + 1
    with pytest.raises(ObjectChanged, match="another Last-Modified" if not conditions else "replaced"):
        site.get(pin, 0, 10)


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
def test_without_a_time_an_etag_counts_until_the_object_is_pinned_again(site: Site, conditions: bool) -> None:
    """Also when its server turns out to have several ETags for one object: the size alone proves nothing."""
    site.served.modified, site.served.conditions = None, conditions
    pin = site.head()
    other = site.web.put("/set/other.tar", CONTENT)
    for etag in ('"1"', '"2"', '"1"'):
        other.etag = etag
        site.apart.head(f"{site.web.url}/set/other.tar")
    [_] = site.apart.logged()
    assert site.get(pin, 0, 10) == CONTENT[:10]
    site.web.put(TARGET, bytes(len(CONTENT)), etag='"3"', modified=None, conditions=conditions)
    with pytest.raises(ObjectChanged, match="replaced"):
        site.get(pin, 10, 20)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_server_that_refuses_every_condition_gets_none(site: Site, ranges: bool) -> None:
    async def answer(request: Request) -> tuple[int, dict[str, str], bytes] | None:
        return (412, {}, b"") if "if-match" in request.headers else None

    site.web.handler, site.served.ranges = answer, ranges
    pin = site.head()
    if ranges:
        assert site.get(pin, 0, 10) == CONTENT[:10]
    else:
        with pytest.raises(NoRanges, match="whole objects only"):
            site.get(pin, 10, 20)
    assert site.get_all(pin) == CONTENT
    [warning] = site.apart.logged()
    assert warning.startswith(f"{site.web.url}: refuses If-Match")
    site.served.etag = '"2"'
    with pytest.raises(ObjectChanged, match="another ETag"):
        site.get_all(pin)


def test_the_ends_of_an_object(site: Site) -> None:
    pin = site.head()
    assert site.get(pin, len(CONTENT) - 1, len(CONTENT)) == CONTENT[-1:]
    site.served.content = CONTENT[:1000]
    for begin, end in ((500, 1500), (5000, 6000)):
        with pytest.raises(ObjectChanged):
            site.get(pin, begin, end)
    site.web.objects.clear()
    with pytest.raises(ObjectChanged, match="is gone"):
        site.get(pin, 0, 10)
    with pytest.raises(MissingObject):
        site.head()
    with pytest.raises(Unreachable, match="does not list"):
        site.apart.listing(f"{site.web.url}/set/")


@pytest.mark.parametrize("etag", [None, 'W/"1"'])
def test_without_an_etag_size_and_last_modified_have_to_do(site: Site, etag: str | None) -> None:
    modified = 1_700_000_000
    site.served.etag, site.served.modified = etag, modified
    pin = site.head()
    assert pin.is_weak
    assert site.get(pin, 0, 10) == CONTENT[:10]
    assert "if-match" not in site.web.requests[-1].headers
    assert site.web.requests[-1].headers.get("if-unmodified-since") == formatdate(modified, usegmt=True)
    for conditions in (True, False):
        site.served.conditions = conditions
        site.served.modified = 1_700_000_999
        with pytest.raises(ObjectChanged):
            site.get(pin, 0, 10)
    site.served.content += b"more"
    with pytest.raises(ObjectChanged):
        site.get(pin, 0, 10)


def test_an_answer_without_what_the_pin_has_counts_as_another_object(site: Site) -> None:
    pin = site.head()
    site.served.etag, site.served.conditions = None, False
    assert site.get(pin, 0, 10) == CONTENT[:10]  # by its Last-Modified
    site.served.modified = None
    with pytest.raises(ObjectChanged, match="neither version nor ETag nor Last-Modified"):
        site.get(pin, 0, 10)


def test_a_whole_object_that_is_cut_is_asked_for_again_while_each_time_brings_more(site: Site) -> None:
    site.served.ranges, site.served.only_gets = False, True
    site.served.content = big = CONTENT * 20
    pin = site.head()
    site.served.faults.extend([Fault(cut=2_500_000), Fault(cut=4_000_000)])
    assert site.get_all(pin) == big
    assert len(site.web.gets()) == 3
    site.served.always = Fault(cut=4_000_000)
    with pytest.raises(Unreachable, match="again and again before byte"):
        site.get_all(pin)
    assert len(site.web.gets()) == 7
    site.served.always = None
    site.served.faults.append(Fault(cut=2_500_000, meanwhile=lambda: setattr(site.served, "etag", '"2"')))
    with pytest.raises(ObjectChanged):
        site.get_all(pin)


def test_a_long_range_that_is_cut_goes_on_where_it_has_ended(site: Site) -> None:
    site.served.content = big = CONTENT * 10
    pin = site.head()
    site.served.faults.extend([Fault(cut=1_000_000), Fault(cut=600_000)])
    assert site.get(pin, 1000, 2_000_000) == big[1000:2_000_000]
    begins = [
        int(request.headers["range"].removeprefix("bytes=").partition("-")[0]) for request in site.web.gets()
    ]
    assert begins[0] == 1000 < begins[1] < begins[2]
    assert site.apart.counted(site.url)["bytes"] == 2_000_000 - 1000


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
def test_an_answer_that_is_broken_once_is_asked_for_again(site: Site, fault: Fault) -> None:
    pin = site.head()
    site.served.faults.append(fault)
    assert site.get(pin, 1000, 11_000) == CONTENT[1000:11_000]
    assert len(site.web.gets()) >= 2
    assert site.apart.counted(site.url)["throttled"] == 0


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
    site: Site, fault: Fault, attempts: int | None
) -> None:
    pin = site.head()
    site.served.always = fault
    with pytest.raises(Unreachable, match=f"{re.escape(site.url)}: ") as caught:
        site.get(pin, 0, 100)
    assert type(caught.value) is Unreachable
    asked = len(site.web.gets())
    assert asked == attempts if attempts else 5 < asked < 30
    assert sum(site.apart.waits()) <= 60
    assert site.apart.counted(site.url)["failures"] == (0 if attempts == 1 else 1)


NO_TIME = f"Mon, {'9' * 20} Jan 2020 00:00:00 GMT"
MANY_HEADERS = {f"X-{number}": "y" * 200 for number in range(200)}


def complaint(headers: dict[str, str]) -> Fault:
    return Fault(status=429, headers=headers)


@pytest.mark.parametrize(
    ("fault", "asked", "error", "said"),
    [
        (Fault(headers={"Content-Range": "bytes 0-9/999"}), "get", ObjectChanged, "999 bytes"),
        (Fault(headers={"Last-Modified": NO_TIME}), "get", Unreachable, "not understood"),
        (Fault(headers=MANY_HEADERS), "get", Unreachable, "headers that are too large"),
        (Fault(headers=MANY_HEADERS), "head", Unreachable, "headers that are too large"),
        (Fault(headers={"Content-Length": "many"}), "head", Unreachable, "no answer of HTTP"),
        (Fault(status=302), "head", Unreachable, "redirects, but does not say where to$"),
        (complaint({"Retry-After": "9" * 32}), "get", Unreachable, ""),
        (complaint({"Retry-After": "9" * 400}), "get", Unreachable, ""),
        (complaint({"Retry-After": "Fri, 31 Dec 9999 23:59:59 GMT"}), "get", Unreachable, ""),
        (complaint({"Retry-After": NO_TIME}), "get", Unreachable, ""),
        (complaint(MANY_HEADERS), "get", Unreachable, ""),
    ],
)
def test_an_answer_that_makes_no_sense_is_an_error_that_names_the_shard(
    site: Site, fault: Fault, asked: str, error: type[ShardError], said: str
) -> None:
    site.served.etag = None
    pin = site.head()
    if fault.status == 429:
        site.served.faults.append(Fault(status=429))  # then the question for Retry-After
    site.served.always = fault
    with pytest.raises(error, match=f"^{re.escape(site.url)}: .*{said}"):
        _ = site.get(pin, 0, 10) if asked == "get" else site.head()


def test_an_object_that_nothing_marks_needs_a_cache_and_an_answer_in_time(site: Site) -> None:
    site.served.etag = site.served.modified = None
    with pytest.raises(UnreadableShard, match="it can only be read from a cache, and there is none"):
        site.head()
    site.apart.configure((site.web.url, {"timeout": "0.3", "total_time": "0.3", "lowest_rate": "10000000"}))
    site.served.always = Fault(chunked=True, drips="body")
    with pytest.raises(Unreachable, match="does not answer"):
        site.get_all(Pin(NO_LENGTH, 0, "", ""))


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_is_throttling_is_left_alone_for_as_long_as_it_says(site: Site, status: int) -> None:
    pin = site.head()
    site.served.faults.extend(
        [Fault(status=status, headers={"Retry-After": "17"})] * 2
    )  # the second: to the question
    assert site.get(pin, 0, 10) == CONTENT[:10]
    assert sum(site.apart.waits()) == pytest.approx(17)
    assert len(site.web.gets()) == 3
    assert site.apart.counted(site.url)["throttled"] == 1
    when = formatdate(time.time() + 30, usegmt=True)
    site.served.faults.extend([Fault(status=status, headers={"Retry-After": when})] * 2)
    assert site.get(pin, 0, 10) == CONTENT[:10]
    assert 40 < sum(site.apart.waits()) <= 47.1


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
def test_a_server_whose_ranges_are_others_counts_as_one_without_ranges(site: Site, fault: Fault) -> None:
    site.served.content = content = CONTENT * 2
    site.served.always = fault
    pin = site.head()
    assert pin == Pin(len(content), 1_700_000_000 * 10**9, '"1"', "")
    before = len(site.web.gets())
    with pytest.raises(NoRanges, match="whole objects only"):
        site.get(pin, 1000, 11_000)
    assert len(site.web.gets()) - before == (1 if fault.chunked else 3)
    assert site.get_all(pin) == content
    site.web.put(
        site.url.removeprefix(site.web.url), bytes(len(content)), etag='"2"', conditions=False
    ).always = fault
    with pytest.raises(ObjectChanged):
        site.get_all(pin)


@pytest.mark.parametrize("size", [len(CONTENT) - 1, len(CONTENT) + 1])
def test_chunks_of_another_size_are_not_taken(site: Site, size: int) -> None:
    pin = site.head()
    site.served.content, site.served.always = (CONTENT * 2)[:size], Fault(chunked=True)
    error = ObjectChanged if size > len(CONTENT) else Unreachable
    with pytest.raises(error, match=r"more than|less than it says"):
        site.get_all(pin)


def test_chunks_that_break_off_are_asked_for_again(site: Site) -> None:
    pin = site.head()
    site.served.faults.extend([Fault(chunked=True, cut=50), Fault(chunked=True, cut=100_000, torn=True)])
    site.served.always = Fault(chunked=True)
    assert site.get_all(pin) == CONTENT


def test_an_error_whose_body_breaks_off_in_chunks_names_the_shard(site: Site) -> None:
    pin = site.head()

    async def answer(request: Request) -> tuple[int, dict[str, str], bytes] | None:
        if request.headers.get("accept-encoding") != "identity":  # not urllib
            return None
        return 500, {"Transfer-Encoding": "chunked"}, b"no size of a chunk\r\n"

    site.web.handler = answer
    site.served.always = Fault(chunked=True)
    with pytest.raises(Unreachable, match=f"{re.escape(site.url)}: "):
        site.get_all(pin)


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


def test_a_long_wait_that_a_server_asks_for_stops_neither_other_objects_nor_itself_for_as_long(site: Site) -> None:
    site.web.put("/healthy.tar", CONTENT)
    pin, healthy = site.head(), site.apart.head(f"{site.web.url}/healthy.tar")
    site.served.always = Fault(status=429, headers={"Retry-After": "3600"})
    with pytest.raises(Unreachable, match=r"429, and asks to wait until 20\d\d-"):
        site.get(pin, 0, 10)
    assert site.apart.counted(site.url)["told_until"] > time.time() + 3000
    assert site.apart.get(f"{site.web.url}/healthy.tar", healthy, 0, 10) == CONTENT[:10]
    assert site.apart.waits() == []
    asked = len(site.web.requests)
    with pytest.raises(Unreachable, match="asks to wait until"):
        site.get(pin, 0, 10)
    assert len(site.web.requests) == asked  # nor is it pestered
    site.apart.later(10)
    site.served.always = None
    assert site.get(pin, 0, 10) == CONTENT[:10]
    assert site.apart.waits() == []


@pytest.mark.parametrize("part", ["head", "body"])
@pytest.mark.parametrize("end", [5000, len(CONTENT)])
def test_a_server_that_sends_byte_by_byte_is_given_up(site: Site, part: str, end: int) -> None:
    site.served.content = CONTENT * 2
    pin = site.head()
    site.apart.configure((site.web.url, {"timeout": "0.3", "total_time": "0.3", "lowest_rate": "1000000"}))
    site.served.always = Fault(drips=part)
    with pytest.raises(Unreachable, match="does not answer"):
        site.get(pin, 0, end)
    if part == "head":
        with pytest.raises(Unreachable, match="does not answer"):
            site.head()
        with pytest.raises(Unreachable, match="does not answer"):
            site.get_all(pin)


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


def test_fewer_requests_are_under_way_after_a_complaint(site: Site) -> None:
    site.apart.configure((site.web.url, {"requests": "16"}))
    pin = site.head()
    site.served.faults.extend([Fault(status=503)] * 2)
    assert set(site.apart.together(*[("get", site.url, pin, 0, 10)] * 100)) == {CONTENT[:10]}
    assert site.web.most_under_way <= 17  # with the question for Retry-After
    assert site.apart.counted(site.url)["throttled"] >= 1


def test_a_server_that_does_not_answer_is_given_up_in_the_end(site: Site) -> None:
    pin = site.head()
    site.apart.configure(
        (site.web.url, {"timeout": "0.2", "total_time": "5"})
    )  # only now: it was to answer, however late
    site.served.always = Fault(silent=True)
    with pytest.raises(Unreachable, match="does not answer"):
        site.get(pin, 0, 10)
    site.served.always = Fault(stalls=5)
    with pytest.raises(Unreachable, match="does not answer"):
        site.get(pin, 0, 10)
    assert sum(site.apart.waits()) <= 10


def test_a_server_that_is_not_there_and_comes_back(site: Site) -> None:
    pin = site.head()
    gone = "http://127.0.0.1:9"
    with pytest.raises(Unreachable, match="cannot be connected to"):
        site.apart.get(f"{gone}/x.tar", pin, 0, 10)
    site.apart.later(10)
    for _ in range(2):  # the second is not tried at all: what is cached has to do
        with pytest.raises(Unreachable, match=r"x\.tar: its server cannot be connected to$"):
            site.apart.head(f"{gone}/x.tar")
        with pytest.raises(Unreachable, match=r"y\.tar: its server cannot be connected to$"):
            site.apart.head(f"{gone}/y.tar")
    with pytest.raises(Unreachable, match="the name of its server is not known"):
        site.apart.head("http://no-such-host.invalid/x.tar")
    assert site.get(pin, 0, 10) == CONTENT[:10]


@pytest.mark.parametrize("status", [401, 403])
def test_an_object_that_is_refused(site: Site, status: int) -> None:
    pin = site.head()
    site.served.always = Fault(status=status, body=f"<Error><Code>AccessDenied</Code>{SECRET}</Error>".encode())
    with pytest.raises(DeniedObject, match=f"{status} AccessDenied") as caught:
        site.get(pin, 0, 10)
    assert SECRET not in str(caught.value)
    assert len(site.web.gets()) == 1
    with pytest.raises(DeniedObject):
        site.head()


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
    assert web.requests[-1].headers["authorization"] == f"Basic {b64encode(f'user:{SECRET}'.encode()).decode()}"
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
def test_credentials_of_the_settings_are_sent(site: Site, name: str) -> None:
    site.apart.configure((f"{site.web.url}/set", {name: SECRET, "user": "me"}))
    site.head()
    sent = {"token": f"Bearer {SECRET}", "password": f"Basic {b64encode(f'me:{SECRET}'.encode()).decode()}"}
    assert site.web.requests[-1].headers["authorization"] == sent[name]
    with pytest.raises(MissingObject):
        site.apart.head(f"{site.web.url}/x.tar")
    assert "authorization" not in site.web.requests[-1].headers


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


def test_head_that_is_refused_is_replaced_by_get(site: Site) -> None:
    for status in (405, 403, 501):
        site.served.faults.append(Fault(status=status))
        assert site.head().size == len(CONTENT)
    site.served.content = b""
    site.served.faults.append(Fault(status=405))
    assert site.head().size == 0


@pytest.mark.parametrize(
    "name", ["a%2Fb.tar", "100%25.tar", "a+b(1)!$&'*,;=@~.tar", "%C3%A9%20%FF.tar", "a:b.tar"]
)
def test_a_path_is_sent_as_it_was_typed(apart: Apart, web: WebServer, name: str) -> None:
    web.put(f"/d/{name}", CONTENT)
    url = f"{web.url}/d/{name}"
    assert apart.get(url, apart.head(url), 0, 5) == CONTENT[:5]


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


def test_many_signed_urls_at_once(site: Site) -> None:
    """More than clients are kept."""
    places = [urls.parse(f"{site.web.url}{TARGET}?sig={number}") for number in range(300)]
    pin = site.apart.head(places[0])
    calls = [("get", place, pin, at, at + 10) for at, place in enumerate(places * 2)]
    assert site.apart.together(*calls) == [CONTENT[at : at + 10] for *_, at, _ in calls]
    assert {one.target for one in site.web.gets()} == {f"{TARGET}?sig={number}" for number in range(300)}


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
