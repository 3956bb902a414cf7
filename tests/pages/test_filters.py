"""What a filter lets through, against a look at every sample."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import pytest

from tests import tars
from tests.processes import PATIENCE
from tests.tree.test_shard_tree import a_tree
from wdsfs.index.record import Record
from wdsfs.index.record_of_file import build_file
from wdsfs.names import PLAIN
from wdsfs.pages import filters
from wdsfs.pages.filters import Filter, Masks, Pace, Search, SearchResult, draws
from wdsfs.pages.shown_set import MemberSource, Snapshot, Snapshots, Subject
from wdsfs.pages.site import Site
from wdsfs.tree.tree import View

NAMES = [b"".join(one) for length in (1, 2, 3) for one in itertools.product(b"a b".split(), repeat=length)]
FOLDERS = (b"", b"ab/", b"ab/ba/", b"b/")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Samples whose names run into each other: aabab..."""
    path = tmp_path_factory.mktemp("filters") / "a.tar"
    members = [
        tars.member(folder + name + (b".x" if at % 3 else b".y"))
        for folder in FOLDERS
        for at, name in enumerate(NAMES)
    ]
    path.write_bytes(tars.tar(*members, tars.member(b"README")))
    return Record(build_file(os.fsencode(path), PLAIN))


def _passing(record: Record, wanted: Filter) -> set[bytes]:
    mask = wanted.mask(record)
    return {record.entry_path(entry) for entry in range(record.entries) if mask[entry]}


@pytest.mark.parametrize("part", [*NAMES, b"aaaa", b"abab", b"ab/b", b"b/a", b"ab/ba/b", b"a.b", b"README"])
def test_a_part_of_a_key(record: Record, part: bytes) -> None:
    keys = [folder + name for folder in FOLDERS for name in NAMES]
    assert _passing(record, Filter(q=part)) == {key for key in keys if part in key}


def test_classes_and_columns(record: Record) -> None:
    below = {b"ab/" + name for name in NAMES} | {b"ab/ba/" + name for name in NAMES}
    assert _passing(record, Filter(class_=b"ab")) == below
    assert _passing(record, Filter(class_=b"a")) == set()
    has = _passing(record, Filter(has=b"y"))
    assert has == {folder + name for folder in FOLDERS for name in NAMES[::3]}
    assert _passing(record, Filter(lacks=b"x")) == has
    assert _passing(record, Filter(has=b"x,y")) == set()


@pytest.mark.parametrize(
    ("field", "value", "data", "expected"),
    [
        ("", "3", b"3\n", True),
        ("", "3", b"3.0", True),
        ("", "3", b"33", False),
        ("", "*at", b"a cat", True),
        ("", "a*a", b"a", False),
        ("", "a*a", b"aa", True),
        ("", "a**b*c", b"a b b c", True),
        ("", "a*b*c", b"a c b", False),
        ("", "*a*b*c*d", b"ab " * 80_000, False),  # by a regular expression, years
        ("a.b", "x", b'{"a": {"b": "x"}}', True),
        ("a.1", "2", b'{"a": [1, 2]}', True),
        ("a", "2", b'{"a": [1, 2]}', True),
        ("a", "true", b'{"a": true}', True),
        ("a", "x", b'{"b": "x"}', False),
        ("a", "x", b"no JSON", False),
        ("a", "x", b"[" * 100_000, False),
    ],
)
def test_values(field: str, value: str, data: bytes, expected: bool) -> None:
    assert Filter(column=b"json", field=field, value=value).matches(data) is expected


def test_a_shard_is_found_by_its_name_or_a_pattern() -> None:
    for wanted, expected in ((b"a[1]", {b"a[1]", b"a1"}), (b"a*", {b"a[1]", b"a1"}), (b"a[0-9]", {b"a1"})):
        assert {name for name in (b"a[1]", b"a1", b"b") if Filter(shard=wanted).takes_shard(name)} == expected


@pytest.mark.parametrize("total", [1, 2, 3, 17, 1000, 10**9])
def test_a_random_order_has_every_sample_once_and_goes_on_from_any_place(total: int) -> None:
    """Also from one beyond millions of others, at once."""
    whole = list(itertools.islice(draws(total, 7), 50))
    for start in (0, 1, 20):
        assert list(itertools.islice(draws(total, 7, start), 10)) == [one for one in whole if one[0] >= start][:10]
    assert len(list(itertools.islice(draws(10**9, 7, 9 * 10**8), 10))) == 10
    assert list(draws(total, 7, 1 << 62)) == []
    if total <= 1000:
        orders = [list(draws(total, seed)) for seed in range(3)]
        assert all(sorted(number for _, number in one) == list(range(total)) for one in orders)
        assert total <= 3 or orders[0] != orders[1] != orders[2]


def test_nobody_searches_for_a_client_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    members = [tars.member(b"s%03d.cls" % number, b"x") for number in range(200)]
    looked: list[bytes] = []

    source_of = Snapshot.source

    def note(now: Snapshot, path: bytes) -> MemberSource:
        looked.append(path)
        return source_of(now, path)

    monkeypatch.setattr(Snapshot, "source", note)
    with a_tree([tars.tar(*members)], View()) as tree, Snapshots(tree).snapshot() as now:

        def search(is_gone: Callable[[], bool]) -> Search:
            return Search(Masks(), Filter(column=b"cls", value="y"), now, Pace(is_gone))

        assert search(lambda: len(looked) >= 50).find(0, 60).after == 50
        # Each answer comes further, however late it is.
        assert search(lambda: True).find(50, 60).after == 51
        assert search(lambda: True).next(51, back=False).after == 52
        assert search(lambda: True).next(52, back=True).after == 51
        assert len(looked) == 53


def test_next_and_previous_stop_at_what_they_look_for() -> None:
    """They do not look for another one, which may be a million samples away."""
    members = [tars.member(b"s%03d.%s" % (number, b"a" if number in (10, 150) else b"b")) for number in range(200)]
    with a_tree([tars.tar(*members), tars.tar(*members)], View()) as tree, Snapshots(tree).snapshot() as now:

        def turn(at: int, *, back: bool) -> tuple[list[int], int]:
            pace = Pace()
            result: SearchResult = Search(Masks(), Filter(has=b"a"), now, pace).next(at, back=back)
            return [sample.number for sample in result.samples], pace.steps

        assert turn(0, back=False) == ([10], 0)
        assert turn(11, back=False) == ([150], 0)
        assert turn(151, back=False) == ([210], 1)
        assert turn(351, back=False) == ([], 0)
        assert turn(209, back=True) == ([150], 1)
        assert turn(9, back=True) == ([], 0)


def test_the_search_of_a_page_ends_with_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the server's interface: after the request comes the end of the connection."""
    monkeypatch.setattr(filters, "SECONDS", PATIENCE)
    count = 20_000
    closed, body = threading.Event(), bytearray()
    messages: Iterator[dict[str, Any]] = iter([{"type": "http.request", "body": b""}, {"type": "http.disconnect"}])

    async def receive() -> dict[str, Any]:
        message = next(messages)
        if message["type"] == "http.disconnect":
            closed.set()
        return message

    async def send(message: MutableMapping[str, Any]) -> None:
        body.extend(message.get("body", b""))

    shard = tars.tar(*(tars.member(b"s%05d.cls" % number, b"x") for number in range(count)))
    with a_tree([shard], View()) as tree, contextlib.closing(Site(Subject(Snapshots(tree)), "a set")) as site:
        reads: list[bytes] = []
        source_of = Snapshot.source

        def note(now: Snapshot, path: bytes) -> MemberSource:
            assert closed.wait(PATIENCE)  # no file is read before
            reads.append(path)
            return source_of(now, path)

        monkeypatch.setattr(Snapshot, "source", note)
        query = b"column=cls&value=none"
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/",
            "raw_path": b"/",
            "query_string": query,
            "headers": [],
        }
        asyncio.run(site.app({**scope, "scheme": "http", "server": ("127.0.0.1", 80)}, receive, send))
    assert 0 < len(reads) < count / 2
    assert b"None found yet" in body
