"""What a filter lets through, in which order, and the counts beside it, against plain Python over the samples."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import duckdb
import pytest

from tests import tars
from tests.processes import PATIENCE, wait_until
from wdsfs.errors import UsageError
from wdsfs.pages import set_query, table_maker
from wdsfs.pages.filters import Condition, Filter
from wdsfs.pages.set_query import TableOfSet, draws
from wdsfs.pages.shown_set import Snapshot, Snapshots, open_shards
from wdsfs.tree.composition import Composition
from wdsfs.tree.set_options import Opening, Selection

COUNT, SHARDS = 30, 3
HOSTILE = "'; DROP TABLE whole; --"


def a_sample(number: int) -> dict[str, Any]:
    """The columns of a sample, as the table has them."""
    shard = number // COUNT
    row: dict[str, Any] = {
        "__folder__": "ab"[number % 2],
        "key": f"{'ab'[number % 2]}/{'b' * (number % 4)}a{number}",
        "cls": number % 3,
    }
    row["n"] = number * (1 if shard < 2 else 0.5)  # whole numbers in two shards, fractions in the third
    row["mixed"] = number if shard < 1 else f"v{number % 5}"
    row["A"], row["a"] = number % 2 == 0, "upper" if number % 7 else None  # two names for SQL, which sees one
    row[HOSTILE] = f"50%_{number}*"
    if number % 4 == 0:
        row["txt"] = f"a {('Cat', 'dog')[number % 8 == 0]} no {number}\n"
    return row


ROWS = [a_sample(number) for number in range(COUNT * SHARDS)]


def a_shard(numbers: range) -> bytes:
    members = []
    for row in (a_sample(number) for number in numbers):
        fields = {name: row[name] for name in ("n", "mixed", "A", "a", HOSTILE)}
        columns = {"cls": b"%d" % row["cls"], "json": json.dumps(fields).encode()}
        columns |= {"txt": row["txt"].encode()} if "txt" in row else {}
        members += [tars.member(f"{row['key']}.{name}".encode(), data) for name, data in columns.items()]
    return tars.tar(*members, tars.member(b"README"))


@contextlib.contextmanager
def a_table(directory: Path) -> Iterator[tuple[TableOfSet, Snapshots]]:
    specs = sorted(str(path) for path in directory.glob("*.tar"))
    with open_shards(specs, Selection(), Composition(), Opening(quiet=True)) as subject:
        table = TableOfSet(subject)
        with contextlib.closing(table):
            yield table, subject.snapshots


def complete(table: TableOfSet, now: Snapshot) -> None:
    table.follow(now)
    assert table.wait(now, Filter(order="cls"), PATIENCE), table.progress(now)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TableOfSet, Snapshot]]:
    directory = tmp_path_factory.mktemp("filters")
    for shard in range(SHARDS):
        (directory / f"s-{shard}.tar").write_bytes(a_shard(range(shard * COUNT, (shard + 1) * COUNT)))
    (directory / "classes.txt").write_text("zero\none\ntwo\n")
    with a_table(directory) as (table, snapshots), snapshots.snapshot() as now:
        complete(table, now)
        yield table, now


Row = dict[str, Any]


@pytest.mark.parametrize(
    ("query", "passes"),
    [
        ("q=ba1", lambda row: "ba1" in row["key"]),
        ("q=/b", lambda row: "/b" in row["key"]),
        ("q=%25", lambda _: False),
        ("shard=s-[12]", lambda row: row["n"] >= COUNT or row["n"] % 1),
        ("class=a", lambda row: row["key"].startswith("a/")),
        ("class=a&has=txt&lacks=npy", None),
        ("column=__folder__&value=b&order=__folder__", lambda row: row["key"].startswith("b/")),
        ("has=txt,cls", lambda row: "txt" in row),
        ("lacks=txt", lambda row: "txt" not in row),
        ("column=cls&value=1", lambda row: row["cls"] == 1),
        ("column=cls&is==&value=1.0", lambda row: row["cls"] == 1),
        ("column=cls&is==&value=two", lambda row: row["cls"] == 2),
        ("column=cls&is=in&value=zero,2", lambda row: row["cls"] in (0, 2)),
        ("column=cls&is=!=&value=0", lambda row: row["cls"] != 0),
        ("column=json.n&is=>&value=40", lambda row: row["n"] > 40),
        ("column=json.n&is=range&value=30.5..40", lambda row: 30.5 <= row["n"] < 40),
        ("column=json&field=n&value=7", lambda row: row["n"] == 7),
        ("column=json.n&is=>=&value=10&column=json.n&is=<=&value=11", lambda row: 10 <= row["n"] <= 11),
        ("column=json.mixed&is==&value=v3", lambda row: row["mixed"] == "v3"),
        ("column=json.mixed&is==&value=5", lambda row: row["mixed"] == 5),
        ("column=json.mixed&is=!=&value=5", lambda row: row["mixed"] != 5),
        ("column=json.A&is==&value=true", lambda row: row["A"]),
        ("column=json.a&is=missing&value=", lambda row: row["a"] is None),
        ("column=json.a&is=present&value=&q=b/", lambda row: row["a"] is not None and "b/" in row["key"]),
        ("column=txt&is=~&value=cat", lambda row: "Cat" in row.get("txt", "")),
        ("column=txt&value=a *no 1*", lambda row: re.match("a .*no 1", row.get("txt", ""))),
        ("column=txt&value=a dog no 8", lambda row: row.get("txt") == "a dog no 8\n"),
        ("column=bytes.txt&is=>&value=11", lambda row: len(row.get("txt", "")) > 11),
        (f"column=json.{HOSTILE}&is==&value=50%25_3*", lambda row: row[HOSTILE].startswith("50%_3")),
        (f"column=json.{HOSTILE}&is=~&value=' OR 1=1 --", lambda _: False),
        ("order=json.n&down=1&q=a1", lambda row: "a1" in row["key"]),
        ("order=txt&column=cls&value=*", lambda _: True),
    ],
)
def test_a_filter(asked: tuple[TableOfSet, Snapshot], query: str, passes: Callable[[Row], bool] | None) -> None:
    table, now = asked
    filter_ = Filter.of(parse_qsl(query, keep_blank_values=True, separator="&"))
    assert Filter.of(parse_qsl(filter_.query(), keep_blank_values=True)) == filter_
    if passes is None:
        with pytest.raises(UsageError, match=r"No sample has a column npy\. Columns of this set: cls, json, txt"):
            table.result(now, filter_)
        return
    expected = [number for number, row in enumerate(ROWS) if passes(row)]
    if filter_.order:
        name = filter_.order.removeprefix("json.")
        there = [number for number in expected if ROWS[number].get(name) is not None]
        ordered = sorted(there, key=lambda number: ROWS[number][name], reverse=filter_.down)
        expected = ordered + [number for number in expected if number not in there]
    elif filter_.q:
        expected.sort(key=lambda number: ROWS[number]["key"] != filter_.q.decode())
    assert list(table.result(now, filter_)) == expected
    for place, number in list(enumerate(expected))[:: max(len(expected) // 3, 1)]:
        before, after = (expected[at] if 0 <= at < len(expected) else None for at in (place - 1, place + 1))
        assert table.neighbours(now, filter_, number) == (place, before, after)
    lines = table.key_lines(now, filter_, 0)[0].decode().split()
    assert lines == [f"s-{number // COUNT}/{ROWS[number]['key']}" for number in sorted(expected)]
    for histogram in table.histograms(now, filter_):
        assert sum(bar.count for bar in histogram.bars) + histogram.missing + histogram.rest == len(expected)
        for bar in histogram.bars:
            narrowed = filter_.plus(bar.condition)
            if narrowed.minus(bar.condition) == filter_:  # no other condition on this column was replaced
                assert len(table.result(now, narrowed)) == bar.count, (histogram.column, bar)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("column=josn.n&is=>&value=3", "No sample has a column josn.n. Columns of this set: __folder__, bytes"),
        ("order=x", "No sample has a column x"),
        ("column=json.n&is=>&value=x", "x: is no number; json.n has numbers"),
        ("column=json.n&is=<&value=nan", "nan: is no number"),
        ("column=cls&is==&value=x", "x: is no number, and no name of a class; cls has numbers"),
        ("column=json.n&is=range&value=3", "3: is no range; type FIRST..END"),
        ("column=json.A&is==&value=3", "3: json.A is true or false"),
        ("column=json.n&is=LIKE&value=3", "LIKE: is no operator"),
        ("column=cls&is=in&value=" + "1," * 200, "201 values are too many"),
        ("column=cls&is=in&value=1%0D2", "is no list of values"),
        ("column=cls&is==&value=1&" * 40, "40 conditions"),
        ("value=3", "type the name of its column"),
    ],
)
def test_a_filter_that_is_refused(asked: tuple[TableOfSet, Snapshot], query: str, message: str) -> None:
    table, now = asked
    pairs = [*enumerate_conditions(query)]
    with pytest.raises(UsageError, match=message):
        table.result(now, Filter.of(pairs))


def enumerate_conditions(query: str) -> Iterator[tuple[str, str]]:
    """The fields of a query; equal conditions count once, so each gets a value of its own."""
    pairs = parse_qsl(query.rstrip("&"), keep_blank_values=True)
    several = sum(name == "column" for name, _ in pairs) > 1
    return ((name, value + str(at) * (several and name == "value")) for at, (name, value) in enumerate(pairs))


def conditions(*columns: str) -> Filter:
    """A filter of the samples that have values in these columns."""
    return Filter(conditions=tuple(Condition(column, "present") for column in columns))


def test_values_of_cards_and_names_of_classes(asked: tuple[TableOfSet, Snapshot]) -> None:
    table, now = asked
    values = table.values(now, [0, 1, 31], ["txt", "cls", "json.n", "bytes.cls", "none"])
    assert values[0] == {"txt": "a dog no 0", "cls": 0, "json.n": 0.0, "bytes.cls": 1}
    assert (values[1], values[31]) == ({"cls": 1, "json.n": 1.0, "bytes.cls": 1}, values[31])
    assert (table.class_column(), table.caption_column(), table.class_name(2)) == ("cls", "txt", "two")
    [classes] = [one for one in table.histograms(now, Filter()) if one.column == "cls"]
    assert {bar.label: bar.count for bar in classes.bars} == {"0 zero": 30, "1 one": 30, "2 two": 30}
    charts = {chart.column: chart for chart in table.histograms(now, conditions(f"json.{HOSTILE}", "json.A"))}
    many, truths = charts[f"json.{HOSTILE}"], Counter(row["A"] for row in ROWS)
    assert (len(many.bars), many.rest, many.kind) == (20, 70, "text")
    expected = {"true": truths[True], "false": truths[False]}
    assert {bar.label: bar.count for bar in charts["json.A"].bars} == expected


def test_a_set_that_grows_and_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only new shards are read, and numbers are always those of the snapshot."""
    made: list[int] = []
    sizes = table_maker.TableMaker._sizes

    def note(self: table_maker.TableMaker, now: Snapshot, shard: int, number: int) -> dict[str, Any]:
        made.append(shard)
        return sizes(self, now, shard, number)

    monkeypatch.setattr(table_maker.TableMaker, "_sizes", note)
    for shard in range(2):
        (tmp_path / f"s-{shard}.tar").write_bytes(a_shard(range(shard * COUNT, (shard + 1) * COUNT)))
    cls = Filter(conditions=(Condition("cls", "=", "1"),))
    with a_table(tmp_path) as (table, snapshots):
        with snapshots.snapshot() as now:
            complete(table, now)
            assert list(table.result(now, cls)) == [*range(1, 60, 3)]
        made.clear()
        other = tmp_path / "new"
        other.write_bytes(a_shard(range(7)))
        other.rename(tmp_path / "s-0.tar")
        snapshots.tree.lower.distrust()

        def ask(now: Snapshot) -> list[int]:
            now.sample(0)
            complete(table, now)
            return list(table.result(now, cls))

        assert snapshots.answer(ask) == [1, 4, *range(8, 37, 3)]
        assert set(made) == {0}
        (tmp_path / "s-1.tar").unlink()
        snapshots.tree.lower.distrust()
        with contextlib.suppress(Exception), snapshots.snapshot() as now:
            now.sample(7)
        assert snapshots.answer(ask) == [1, 4]
        database = table._maker.database.cursor()
        wait_until(
            lambda: database.execute("SELECT count(*) FROM whole").fetchall() == [(7,)], "the old rows to go"
        )


def test_a_damaged_shard_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "s-0.tar").write_bytes(a_shard(range(COUNT)))
    (tmp_path / "s-1.tar").write_bytes(tars.tar(tars.member(b"cut.txt", bytes(5000)))[:-4096])
    with a_table(tmp_path) as (table, snapshots), snapshots.snapshot() as now:
        complete(table, now)
        assert len(table.result(now, Filter(has=b"txt"))) == 9
        assert len(table.result(now, conditions("txt"))) == 8
        assert "1 file without a value" in table.progress(now).note
        assert "s-1.tar: the shard ends" in table.progress(now).note


def test_the_columns_of_the_table_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_maker, "COLUMNS_MAX", 5)
    for shard in range(3):
        fields = {f"f{shard}{number}": number for number in range(4)}
        members = [tars.member(b"a.json", json.dumps(fields).encode())]
        members += [tars.member(b"a.c%d" % number) for number in range(shard * 10)]
        (tmp_path / f"s-{shard}.tar").write_bytes(tars.tar(*members))
    with a_table(tmp_path) as (table, snapshots), snapshots.snapshot() as now:
        complete(table, now)
        names = [column.name for column in table.columns()]
        assert names == ["bytes.json", "bytes.c0", "json.f00", "json.f01", "json.f02"]
        assert "The table has the first 5 columns" in table.progress(now).note
        assert len(table.result(now, conditions("bytes.json"))) == 3


def test_the_memory_of_the_table_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without a filter are there; a filter answers from the shards that are in the table, and says so."""
    monkeypatch.setattr(table_maker, "MEMORY_MAX", 64 << 20)
    monkeypatch.setattr(table_maker, "ROWS_AT_ONCE", 1)
    for shard in range(20):
        keys = (os.urandom(400).hex() for _ in range(3000))
        members = [tars.member(f"{key[:40]}.json".encode(), json.dumps({"a": key}).encode()) for key in keys]
        (tmp_path / f"s-{shard:02d}.tar").write_bytes(tars.tar(*members))
    with a_table(tmp_path) as (table, snapshots), snapshots.snapshot() as now:
        table.follow(now)
        assert table._maker.wait_until(lambda: bool(table.progress(now).note), PATIENCE)
        progress = table.progress(now)
        assert "The memory for the table (64 MiB) is full" in progress.note
        assert 0 < progress.valued < progress.shards == 20
        assert table.result(now, Filter()) == range(60_000)
        assert len(table.result(now, conditions("json.a"))) == progress.valued * 3000


def test_a_question_ends_after_its_time(
    asked: tuple[TableOfSet, Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    table, now = asked
    monkeypatch.setattr(set_query, "SECONDS", 0.01)
    endless = "SELECT count(*) FROM range(1000000) a, range(1000000) b, (SELECT shard {rows})"
    with pytest.raises(UsageError, match="the answer takes longer"), table._asking(now, Filter()) as ask:
        ask(endless)


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "COPY whole TO '/tmp/stolen.csv'",
        "ATTACH '/tmp/other.db'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "SET memory_limit = '100GB'",
        "SELECT * FROM ROWS",  # a name in Python
    ],
)
def test_the_database_reaches_nothing_else(asked: tuple[TableOfSet, Snapshot], query: str) -> None:
    """Whatever SQL there might be."""
    table, _ = asked
    with table._maker.database.cursor() as cursor, pytest.raises(duckdb.Error):
        cursor.execute(query)


def test_the_end_of_the_server_ends_the_table(tmp_path: Path) -> None:
    (tmp_path / "s.tar").write_bytes(tars.tar(*(tars.member(b"%05d.cls" % at, b"1") for at in range(20_000))))
    with a_table(tmp_path) as (table, snapshots):
        with snapshots.snapshot() as now:
            table.follow(now)
        table.close()
        assert not table._maker._thread.is_alive()


@pytest.mark.parametrize("total", [1, 2, 17, 1000, 10**9])
def test_a_random_order_has_every_sample_once(total: int) -> None:
    first = list(itertools.islice(draws(total, 7), 50))
    assert len(set(first)) == len(first) == min(total, 50)
    assert first == list(itertools.islice(draws(total, 7), 50))
    if total <= 1000:
        orders = [list(draws(total, seed)) for seed in range(3)]
        assert all(sorted(order) == list(range(total)) for order in orders)
        assert total <= 2 or len({tuple(order) for order in orders}) > 1
