"""URLs of shards: what they mean, how they are shown, and that no secret is shown."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wdsfs.door import urls
from wdsfs.door.pins import Pin
from wdsfs.door.urls import Url
from wdsfs.errors import SpecError

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    ("text", "store", "key", "shown"),
    [
        ("S3://bucket/a b%20?#.tar", "s3://bucket", "a b%20?#.tar", "s3://bucket/a b%20?#.tar"),
        ("https://Host:443/a%20b.tar", "https://host", "a b.tar", "https://host/a%20b.tar"),
        ("http://host:8080/a/b.tar#top", "http://host:8080", "a/b.tar", "http://host:8080/a/b.tar"),
        ("http://[::1]:80/x.tar", "http://[::1]", "x.tar", "http://[::1]/x.tar"),
        ("https://host/%ff%C3%A9.tar", "https://host", "\udcffé.tar", "https://host/%FF%C3%A9.tar"),
        ("https://host/a%2fb/1%25/x+y", "https://host", "a%2Fb/1%25/x+y", "https://host/a%2Fb/1%25/x+y"),
        *(
            (f"{store}/{key}", store, key, f"{store}/{key}")
            for store, key in (
                *(("s3://bucket", "a/b.tar"), ("gs://bucket", ""), ("az://box", "x.tar"), ("ais://b", "x.tar")),
                *(("hf://datasets/me/set", "a.tar"), ("hf://datasets/me/set@v1", "d/a.tar")),
                ("hf://datasets/me/set@refs/pr/7", "a.tar"),
            )
        ),
    ],
)
def test_a_url_is_taken_apart_and_shown(text: str, store: str, key: str, shown: str) -> None:
    url = urls.parse(text)
    assert (url.store, url.key, url.shown) == (store, key, shown)
    assert urls.is_url(text)
    assert urls.parse(shown) == url


@pytest.mark.parametrize("text", ["file:///x.tar", "-", "/data/x.tar", "x.tar", "s3:bucket", "C://x"])
def test_what_is_no_url(text: str) -> None:
    assert not urls.is_url(text)


@pytest.mark.parametrize(
    "text",
    [
        f"s3://KEY:{SECRET}@bucket/x.tar",
        f"https://user:{SECRET}@/x.tar",
        f"https://user:{SECRET}@host:port/x.tar",
        f"https://user:{SECRET}@host/a//x.tar?sig={SECRET}",
        f"https://user:{SECRET}@[host/x.tar",
        f"https://host/a/../x.tar?token={SECRET}",
        f"az://container/a\n?{SECRET}",
        f"ftp://user:{SECRET}@host/x.tar",
        "s3:///x.tar",
        "s3://bucket//x.tar",
        "hf://models/me/set/x.tar",
        "hf://datasets/set/",
    ],
)
def test_a_url_that_cannot_be_read_is_refused_without_showing_a_secret(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        urls.parse(text)
    assert SECRET not in str(caught.value)


def test_user_and_query_are_kept_but_not_shown() -> None:
    url = urls.parse(f"https://user:{SECRET}@host:8443/x.tar?X-Amz-Signature={SECRET}")
    assert (url.store, url.user, url.query) == ("https://host:8443", f"user:{SECRET}", f"X-Amz-Signature={SECRET}")
    for text in (url.shown, str(url), repr(url), f"{url}", repr([url])):
        assert SECRET not in text
    assert url.shown == "https://host:8443/x.tar"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("X-Amz-Date=1&X-Amz-Signature=a&X-Amz-Expires=9", "X-Amz-Date=2&X-Amz-Signature=b"),
        ("AWSAccessKeyId=A&Signature=1&Expires=1", "AWSAccessKeyId=A&Signature=2&Expires=2"),
        ("GoogleAccessId=A&Signature=1&Expires=1", "X-Goog-Algorithm=x&X-Goog-Signature=2"),
        ("sv=2024&sp=r&se=1&sr=b&sig=1", "sv=2025&sp=r&se=2&sr=b&sig=2"),
        ("Policy=1&Signature=1&Key-Pair-Id=K", "Expires=1&Signature=2&Key-Pair-Id=K"),
        ("token=1", "access_token=2"),
    ],
)
def test_a_url_that_is_signed_anew_is_shown_the_same(first: str, second: str) -> None:
    one, two = (urls.parse(f"https://host/x.tar?{query}") for query in (first, second))
    assert one.shown == two.shown == "https://host/x.tar"
    with_file = [urls.parse(f"https://host/x.tar?file=7&{query}").shown for query in (first, second)]
    assert with_file[0] == with_file[1] != one.shown


@pytest.mark.parametrize(
    "query",
    [
        f"Expires={'9' * 400}",
        f"Expires={'9' * 5000}",
        "Expires=999999999999999",
        "Expires=-99999999999999",
        f"X-Amz-Date=20240101T000000Z&X-Amz-Expires={'9' * 400}",
        "sig=1&se=0001-01-01T00:00:00%2B14:00",
    ],
)
def test_a_time_beyond_the_calendar_is_no_end_of_a_signature(query: str) -> None:
    assert urls.expiry(urls.parse(f"https://host/x.tar?{query}")) is None


@pytest.mark.parametrize(
    ("query", "end"),
    [
        ("Expires=1700000000&Signature=x", 1_700_000_000),
        ("X-Amz-Date=20240101T000000Z&X-Amz-Expires=60&X-Amz-Signature=x", 1_704_067_260),
        ("X-Goog-Date=20240101T000000Z&X-Goog-Expires=60", 1_704_067_260),
        ("sig=x&se=2024-01-01T00:01:00Z", 1_704_067_260),
        ("sig=x&se=2024-01-01T00:01:00", 1_704_067_260),
        ("se=2024-01-01", None),
        ("X-Amz-Date=20240101T000000Z", None),
    ],
)
def test_the_end_of_a_signature(query: str, end: float | None) -> None:
    assert urls.expiry(urls.parse(f"https://host/x.tar?{query}")) == end


def test_parameters_that_choose_the_file_make_another_shard() -> None:
    shown = {urls.parse(f"https://host/get?{query}").shown for query in ("id=1", "id=2", "sp=1", "id=1&id=2", "")}
    assert len(shown) == 5
    assert urls.parse("https://host/get?a=1&b=2").shown == urls.parse("https://host/get?b=2&a=1").shown


def test_a_name_is_joined_to_a_prefix_and_keeps_its_signature() -> None:
    assert urls.join(urls.parse("s3://bucket/dir/"), "x/y.tar") == Url("s3://bucket", "dir/x/y.tar")
    assert urls.join(urls.parse("gs://bucket"), "x.tar") == Url("gs://bucket", "x.tar")
    assert urls.join(urls.parse("https://h/dir?sig=1"), "a b.tar") == Url("https://h", "dir/a b.tar", "sig=1")
    with pytest.raises(SpecError):
        urls.join(urls.parse("s3://bucket/dir"), "../x.tar")


@given(
    st.text(st.characters(codec="utf-8", exclude_characters="/%?#", min_codepoint=32), min_size=1),
    st.sampled_from(["s3", "https"]),
)
def test_what_is_shown_is_the_same_url_again(name: str, scheme: str) -> None:
    if name in (".", ".."):
        return
    url = Url(f"{scheme}://host", f"dir/{name}")
    assert urls.parse(url.shown) == url


@pytest.mark.parametrize(
    ("command", "first", "key"),
    [
        ("cat x.tar", "cat-", "x.tar"),
        ("/usr/bin/curl -s 'https://host/a/x-01.tar.gz?sig=" + SECRET + "' || true", "curl-", "x-01.tar.gz"),
        ("cat a.tar b.tgz", "cat-", "b.tgz"),
        ("ais get ais://bucket/x.tar - | tee copy", "ais-", "x.tar"),
        (f"TOKEN={SECRET} curl https://host/x.tar", "", "x.tar"),
        (f"'{SECRET}' x.tar/y", "", "pipe"),
        ("make-tar", "make-tar-", "pipe"),
        (f"sh -c 'echo {SECRET}.tar.txt'", "sh-", "pipe"),
    ],
)
def test_a_command_is_shown_by_its_program_and_its_shard(command: str, first: str, key: str) -> None:
    url = urls.program(command, "/data")
    assert re.fullmatch(f"pipe:{first}[0-9a-f]{{8}}/{key}", url.shown)
    assert (url.is_program, url.user, url.query) == (True, command, "/data")
    assert SECRET not in repr(url)
    assert urls.program(command, "/other").shown != url.shown
    assert urls.program(command + " ", "/data").shown != url.shown


# --- pins: when an answer of a store is of another object

PIN = Pin(10, 5, '"a"', "v1")


@pytest.mark.parametrize(
    ("pin", "now", "what"),
    [
        (PIN, PIN, None),
        (PIN, PIN._replace(size=11), "11 bytes"),
        (PIN, PIN._replace(version="v2"), "version"),
        (PIN._replace(version=""), PIN._replace(etag='"b"'), "ETag"),
        (PIN._replace(version=""), Pin(10, 6, '"a"', ""), None),  # the same bytes on another server of a cluster
        (PIN, Pin(10, 5, "", ""), None),
        (PIN, Pin(10, 6, "", ""), "Last-Modified"),
        (PIN, Pin(10, 0, "", ""), "neither"),
        (Pin(10, 5, 'W/"a"', ""), Pin(10, 5, 'W/"a"', ""), None),
        (Pin(10, 5, 'W/"a"', ""), Pin(10, 6, 'W/"a"', ""), "Last-Modified"),
        (Pin(10, 5, 'W/"a"', ""), Pin(10, 5, 'W/"b"', ""), "ETag"),
        (Pin(10, 0, "", ""), Pin(10, 0, "", ""), None),
        (Pin(10, 0, "", ""), Pin(10, 7, '"a"', ""), None),
    ],
)
def test_an_answer_is_of_the_same_object_or_says_in_what_it_differs(pin: Pin, now: Pin, what: str | None) -> None:
    found = pin.difference(now)
    assert found is None if what is None else what in str(found)


def test_a_pin_is_weak_without_a_strong_etag_or_a_version() -> None:
    strong, weak = (
        (PIN, Pin(1, 0, '"a"', ""), Pin(1, 0, 'W/"a"', "7")),
        (Pin(1, 5, 'W/"a"', ""), Pin(1, 5, "", "")),
    )
    assert [pin.is_weak for pin in strong + weak] == [False] * 3 + [True] * 2


def test_the_fingerprint_depends_on_each_part_and_on_the_url() -> None:
    changes: tuple[dict[str, Any], ...] = ({}, {"size": 11}, {"mtime_ns": 6}, {"etag": '"b"'}, {"version": "v2"})
    pins = [PIN._replace(**change) for change in changes]
    prints = [pin.fingerprint("s3://b/x.tar") for pin in pins] + [PIN.fingerprint("s3://b/y.tar")]
    assert len(set(prints)) == 6
    assert prints[0] == PIN.fingerprint("s3://b/x.tar")
    assert prints[0][:2] == (10, 5)
    assert 0 <= prints[0][2] < 1 << 64
