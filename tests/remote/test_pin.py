"""Pins: when an answer of a store is of another object."""

from __future__ import annotations

import pytest

from wdsfs.remote.pin import Pin

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
    assert not PIN.is_weak
    assert not Pin(1, 0, '"a"', "").is_weak
    assert not Pin(1, 0, 'W/"a"', "7").is_weak
    assert Pin(1, 5, 'W/"a"', "").is_weak
    assert Pin(1, 5, "", "").is_weak


def test_the_fingerprint_depends_on_each_part_and_on_the_url() -> None:
    pins = [
        PIN,
        Pin(11, 5, '"a"', "v1"),
        Pin(10, 6, '"a"', "v1"),
        Pin(10, 5, '"b"', "v1"),
        Pin(10, 5, '"a"', "v2"),
    ]
    prints = [pin.fingerprint("s3://b/x.tar") for pin in pins] + [PIN.fingerprint("s3://b/y.tar")]
    assert len(set(prints)) == 6
    assert prints[0] == PIN.fingerprint("s3://b/x.tar")
    assert prints[0][:2] == (10, 5)
    assert 0 <= prints[0][2] < 1 << 64
