"""Tables of sets: `wdsfs table` and `wdsfs.table`, against plain Python over the tars."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

import wdsfs
from tests import tars
from tests.conftest import Program
from wdsfs.tree import set_table, table_files, table_rows
from wdsfs.tree.table_rows import SIZE

FIXED = ["__key__", "__shard__", "__number__"]


def write(path: str, *files: tuple[str | bytes, bytes]) -> None:
    members = [tars.member(name if isinstance(name, bytes) else name.encode(), data) for name, data in files]
    Path(path).write_bytes(tars.tar(*members))


def sample(key: str, **columns: object) -> list[tuple[str, bytes]]:
    """The files of a sample; objects are written as JSON, texts as they are."""
    return [
        (f"{key}.{name}", value.encode() if isinstance(value, str) else json.dumps(value).encode())
        for name, value in columns.items()
    ]


def rows(shards: str, **options: Any) -> list[dict[str, Any]]:
    """The rows of a table, without columns that are null."""
    table = wdsfs.table(shards, **options).to_pylist()
    return [{name: value for name, value in row.items() if value is not None} for row in table]


def by_hand(shards: Mapping[str, list[list[tuple[str, bytes]]]]) -> list[dict[str, Any]]:
    """The rows of samples with `cls`, `txt` and flat objects in `json`, without wdsfs."""
    made: list[dict[str, Any]] = []
    for shard, samples in shards.items():
        for files in samples:
            row: dict[str, Any] = {"__shard__": shard, "__number__": len(made)}
            for name, data in files:
                row["__key__"], _, extension = name.partition(".")
                row[f"bytes.{extension}"] = len(data)
                if extension == "json":
                    fields = json.loads(data).items()
                    row |= {f"json.{field}": value for field, value in fields if value is not None}
                elif extension in ("cls", "txt"):
                    row[extension] = int(data) if extension == "cls" else data.decode()
            made.append(row)
    return made


@pytest.mark.parametrize("alone", [1 << 30, 0], ids=["here", "by processes"])
def test_a_table_has_what_the_shards_have(alone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_table, "_ALONE", alone)
    monkeypatch.setattr(set_table, "ROWS", 16)  # of the 40 of a shard
    monkeypatch.setattr(table_files, "ROWS", 50)
    choose = random.Random(7)
    shards = {}
    for number in range(3):
        samples = []
        for at in range(40):
            columns: dict[str, object] = {"jpg": "x" * choose.randrange(50)}
            if choose.random() < 0.8:
                columns["cls"] = str(choose.randrange(-5, 1000))
            if choose.random() < 0.8:
                columns["txt"] = f"a text of {at}, é\n"
            if choose.random() < 0.8:
                columns["json"] = {"score": choose.random(), "name": "Zoë", "good": True, "no": None, "n": at}
            samples.append(sample(f"k{number}-{at:02d}", **columns))
        shards[f"s-{number}"] = samples
        write(f"s-{number}.tar", *(file for files in samples for file in files))
    assert rows("s-{0..2}.tar", jobs=2) == by_hand(shards)
    table = wdsfs.table("s-{0..2}.tar")
    table_files.write_table("t.parquet", table.schema, [table.slice(at, 20) for at in range(0, 120, 20)])
    assert pa.parquet.read_table("t.parquet").equals(table)
    assert rows("s-{0..2}.tar", sizes=True) == [
        {name: value for name, value in row.items() if name in FIXED or name[:6] == "bytes."}
        for row in by_hand(shards)
    ]
    types = {field.name: str(field.type) for field in wdsfs.table("s-{0..2}.tar").schema}
    assert {name: types[name] for name in ("cls", "txt", "json.score", "json.good", "json.n", "json.no")} == {
        "cls": "int64",
        "txt": "string",
        "json.score": "double",
        "json.good": "bool",
        "json.n": "int64",
        "json.no": "null",
    }


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2.5], [1.0, 2.5]),
        ([1, "a", None, True, 2.5], ["1", "a", None, "true", "2.5"]),
        ([[1, "é"], {}], ['[1, "\\u00e9"]', "{}"]),
        ([1 << 63, 1], ["9223372036854775808", "1"]),
        (["a", 1.0], ["a", "1.0"]),
        ([(1 << 53) + 1, 0.5], [float(1 << 53), 0.5]),
        ([-(1 << 63), (1 << 63) - 1], [-(1 << 63), (1 << 63) - 1]),
    ],
)
@pytest.mark.parametrize("apart", [False, True])
def test_values_of_several_types(values: list[object], expected: list[object], apart: bool) -> None:
    """In one shard, and in a shard each, the column has a type for all of them."""
    samples = [sample(f"k{number}", json={"v": value}) for number, value in enumerate(values)]
    for number, files in enumerate(samples):
        write(f"s-{number}.tar", *files)
    write("one.tar", *(file for files in samples for file in files))
    table = wdsfs.table("s-*.tar" if apart else "one.tar")
    assert table.column("json.v").to_pylist() == expected


def test_names_and_values_of_a_hostile_author() -> None:
    deep: Any = 1
    for _ in range(50):
        deep = {"d": deep}
    write(
        "odd.tar",
        *sample("a", json={"deep": deep, "s": "\ud800", "\udcff": 1}, cls=" 3\n", txt="é" * 600),
        ("b.json", b"{nope"),
        ("b.txt", b"\xff"),
        ("b.cls", b"9" * 30),
        ("c.txt", b"first"),
        ("c.txt", b"second"),
        (b"\xff/d.cls", b"dog"),
        ("e.bytes.txt", b"not a size"),
        ("e.__key__", b"not a key"),
        ("f.json", b"[" * 100_000),
    )
    table = rows("odd.tar")
    assert [row["__key__"] for row in table] == ["a", "b", "c", "\\xff/d", "e", "f"]
    a, b, c, d, e, f = table
    assert json.loads(a["json.deep.d.d.d"]) == _below(deep, 3)
    assert (a["json.s"], a["json.\\xed\\xb3\\xbf"], a["cls"]) == ("\\xed\\xa0\\x80", 1, "3")
    assert a["txt"] == "é" * 510 + "..."
    assert (b["bytes.json"], b["cls"], "txt" in b, "json" in b) == (5, "9" * 30, False, False)
    assert (c["txt"], c["txt~2"], c["bytes.txt~2"]) == ("first", "second", 6)
    assert (d["cls"], e["value.bytes.txt"], e["bytes.bytes.txt"]) == ("dog", "not a size", 10)
    assert (f["bytes.json"], "json" in f) == (100_000, False)


def test_texts_that_are_cut_and_classes_that_are_no_numbers() -> None:
    write(
        "s.tar",
        ("a.txt", b"\xff" * 2000),
        ("b.txt", b"caf\xe9 " * 400),
        ("c.txt", b"x" * 1023 + "é".encode() * 9),
        ("d.cls", b"007"),
        ("e.cls", b"7"),
        ("f.cls", b""),
        ("f.json", json.dumps({"cls": 5, "a.b": 1, "a": {"b": 2}}).encode()),
        ("f.json.cls", b"9"),
        ("g.id", b"9223372036854775807"),
    )
    a, b, c, d, e, f, g = rows("s.tar")
    assert ("txt" in a, "txt" in b, c["txt"], d["cls"], e["cls"]) == (False, False, "x" * 1021 + "...", "007", "7")
    assert ("cls" in f, f["json.cls"], f["json.cls~2"], f["json.a.b"], f["json.a.b~2"]) == (False, 5, 9, 1, 2)
    assert g["id"] == (1 << 63) - 1


def test_shards_that_standard_input_names(program: Program) -> None:
    """Their names can be read only once; several processes read the values."""
    samples = [tars.member(b"k%04d.cls" % number, b"%d" % number) for number in range(3000)]
    for number in range(2):
        program.write(f"s-{number}.tar", tars.tar(*samples))
    names = program.write("list.txt", b"s-0.tar\ns-1.tar\n")
    with names.open("rb") as typed:
        program.run("table", "@-", "-j", "2", "-o", "t.csv", stdin=typed)
    assert pa.csv.read_csv(program.home / "t.csv")["cls"].to_pylist() == [*range(3000)] * 2


def _below(value: Any, levels: int) -> Any:
    return _below(value["d"], levels - 1) if levels else value


def test_columns_are_bounded() -> None:
    many = {f"f{number}": number for number in range(1000)}
    write("m.tar", *sample("a", json=many), *((f"a.e{number}", b"1") for number in range(1000)))
    names = wdsfs.table("m.tar").column_names
    assert len(names) == len(FIXED) + 2 * table_rows.COLUMNS_MAX


def test_values_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a shard whose values would take too much memory the first ones are in the table."""
    write("s.tar", *(file for number in range(99) for file in sample(f"k{number:02d}", txt="x" * 900, cls="1")))
    monkeypatch.setattr(table_rows, "ROOM", 20_000)
    table = wdsfs.table("s.tar")
    assert 0 < table.num_rows - table["txt"].null_count < 20
    assert table["txt"].null_count - table["cls"].null_count in (0, 1)


def test_a_set_that_grows_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    values_of = table_rows.values_of
    monkeypatch.setattr(set_table, "values_of", lambda *given: read.append(given[1]) or values_of(*given))
    write("s-0.tar", *sample("a", cls="1"))
    assert rows("s-*.tar")[0]["cls"] == 1
    write("s-1.tar", *sample("b", cls="2"))
    assert [row["cls"] for row in rows("s-*.tar")] == [1, 2]
    assert len(read) == 2
    write("s-0.tar", *sample("a", cls="3"))
    assert [row["cls"] for row in rows("s-*.tar")] == [3, 2]
    assert len(read) == 3
    for kept in Path("cache").rglob("*.rows"):
        kept.write_bytes(kept.read_bytes()[:-20])
    assert [row["cls"] for row in rows("s-*.tar")] == [3, 2]
    assert len(read) == 5


def test_views_have_tables(tmp_path: Path) -> None:
    write("s.tar", *sample("a", cls="1", json={"t": "x"}), *sample("b", cls="2", json={"t": "y"}))
    Path("keys").write_text("b\n")
    assert rows("s.tar", columns=["label=cls", "what.txt"], field="what.txt=json:t", keys="keys") == [
        {
            "__key__": "b",
            "__shard__": "s",
            "__number__": 0,
            "bytes.label": 1,
            "label": 2,
            "bytes.what.txt": 1,
            "what.txt": "y",
        }
    ]


def test_values_of_columns_of_any_name(tmp_path: Path) -> None:
    """Labels, fields and small texts have values: numbers where all are numbers. Other small files have none."""
    for key, number in (("a", 1), ("b", 2)):
        known = sample(
            key, cls=str(number / 2), json={"n": number}, ink=str(number), png="no picture", large="x" * 9000
        )
        write(f"{key}.tar", *known, (f"{key}.bin", b"text" if key == "a" else b"\xff"), (f"{key}.nul", b"a\0b"))
    Path("labels.csv").write_text("key,mood,score,cls\na,bad,0.25,\nb,007,3,1e3\n")
    table = wdsfs.table(["a.tar", "b.tar"], associate="labels.csv", field="size=json:n")
    values = {name: table[name].to_pylist() for name in table.column_names if not name.startswith((SIZE, "__"))}
    assert values == {
        "cls": [0.5, 1000.0],
        "mood": ["bad", "007"],
        "score": [0.25, 3.0],
        "size": [1, 2],
        "json.n": [1, 2],
        "ink": [1, 2],
        "bin": ["text", None],
    }


def test_numbers_of_files_stay_as_they_are_beside_texts() -> None:
    first, second = {"uid": "12e3", "v": "0.50", "n": "9223372036854775808"}, {"uid": "ab", "v": "2", "n": "-1"}
    write("s.tar", *sample("a", **first), *sample("b", **second))
    table = wdsfs.table("s.tar")
    values = [table[name].to_pylist() for name in ("uid", "v", "n")]
    assert values == [["12e3", "ab"], [0.5, 2.0], ["9223372036854775808", "-1"]]


def test_a_shard_that_is_cut_off() -> None:
    """The values of its whole samples are in the table."""
    write("s.tar", *sample("a", cls="1"), *sample("b", txt="x" * 600))
    data = Path("s.tar").read_bytes()
    Path("s.tar").write_bytes(data[: data.index(b"x" * 600) + 10])
    a, b = rows("s.tar")
    assert (a["cls"], b["bytes.txt"], "txt" in b) == (1, 600, False)


def test_no_samples() -> None:
    write("s.tar")
    assert wdsfs.table("s.tar").column_names == FIXED


def test_tables_without_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(wdsfs.UsageError, match=r"tables need pyarrow; type: pip install '\.\[parquet\]'"):
        wdsfs.table("s.tar")


def test_the_command(program: Program) -> None:
    for number in range(2):
        program.write(
            f"s-{number}.tar",
            tars.tar(*(tars.member(f"k{number}{at}.cls".encode(), b"%d" % at) for at in range(5))),
        )
    program.run("table", "s-{0..1}.tar", "-o", "t.parquet", "--executor", "tests.work:threads")
    program.run("table", "s-{0..1}.tar", "-o", "t.csv")
    done = program.run("table", "s-{0..1}.tar", "-o", "t.jsonl")
    assert b"10 samples, 5 columns in t.jsonl" in done.stderr
    tables = [
        pa.parquet.read_table(program.home / "t.parquet").to_pylist(),
        pa.csv.read_csv(program.home / "t.csv").to_pylist(),
        [json.loads(line) for line in (program.home / "t.jsonl").read_text().splitlines()],
    ]
    assert tables[0] == tables[1] == tables[2]
    chosen = [row["__key__"] for row in tables[0] if row["cls"] > 2]
    pa.parquet.write_table(pa.table({"__key__": chosen}), program.home / "chosen.parquet")
    shown = program.run("ls", "-R", "--keys", "chosen.parquet", "s-{0..1}.tar").stdout.split()
    assert [path.split(b"/")[1] for path in shown if path.endswith(b"cls")] == [key.encode() for key in chosen]


@pytest.mark.parametrize(
    ("output", "code", "text"),
    [("t.xls", 2, b".parquet"), ("no/t.csv", 9, b"No such file"), ("dir.csv", 2, b"is a directory")],
)
def test_a_file_that_cannot_be_written(program: Program, output: str, code: int, text: bytes) -> None:
    program.write("s.tar", tars.tar(tars.member(b"a.cls", b"1")))
    (program.home / "dir.csv").mkdir()
    done = program.run("table", "s.tar", "-o", output, code=code)
    assert text in done.stderr
    assert output.encode() in done.stderr
    assert not list(program.home.glob(".wdsfs-*"))


def test_a_full_disk_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch) -> None:
    write("s.tar", *sample("a", cls="1"))
    Path("t.csv").write_text("old")
    table = wdsfs.table("s.tar")

    def fail(_fd: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(wdsfs.WdsfsError, match="No space left"):
        table_files.write_table("t.csv", table.schema, [table])
    assert Path("t.csv").read_text() == "old"
    assert not list(Path().glob(".wdsfs-*"))


def test_a_shard_that_changes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    write("s.tar", *sample("a", cls="1"))
    values_of = table_rows.values_of

    def change(*given: Any) -> Any:
        write("s.tar", *sample("a", cls="12"), *sample("b", cls="3"))
        return values_of(*given)

    monkeypatch.setattr(set_table, "values_of", change)
    with pytest.raises(wdsfs.StaleShard):
        wdsfs.table("s.tar")
    monkeypatch.undo()


def test_values_that_are_missing_are_said(program: Program) -> None:
    program.write("s.tar", tars.tar(tars.member(b"a.json", b"{"), tars.member(b"b.txt", b"x" * 2000)))
    error = program.run("table", "s.tar", "-o", "t.csv").stderr
    assert b"1 file without a value, the first: s/a.json is not JSON" in error
    assert b"1 value cut after 1,024 bytes" in error


def test_numbers_that_json_or_python_do_not_take(program: Program) -> None:
    """JSON lines have null for numbers that JSON has not; a whole number without an end is no value."""
    documents = [b'{"v": NaN, "n": 1}', b'{"v": -Infinity}', b'{"v": 1.5}', b'{"v": %s}' % (b"9" * 5000)]
    program.write("s.tar", tars.tar(*(tars.member(b"%d.json" % at, data) for at, data in enumerate(documents))))
    done = program.run("table", "s.tar", "-o", "t.jsonl")
    lines = (program.home / "t.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["json.v"] for line in lines] == [None, None, 1.5, None]
    assert (
        b"1 file without a value, the first: s/3.json is not JSON (Exceeds the limit (4300 digits)" in done.stderr
    )
    assert b"set_int_max_str_digits" not in done.stderr


def test_a_cache_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    write("s.tar", *sample("a", cls="1"))
    monkeypatch.setenv("WDSFS_CACHE_SIZE", "100")
    with pytest.raises(wdsfs.UnreadableShard, match="--cache-size"):
        wdsfs.table("s.tar")
    assert wdsfs.table("s.tar", sizes=True).num_rows == 1


def test_a_joined_set_that_changes() -> None:
    """Its shard has other bytes, and everything else as before."""
    for directory in ("a", "b"):
        Path(directory).mkdir()
    write("a/s.tar", *sample("k", jpg="x"))
    for value in ("3", "7"):
        write("b/s.tar", *sample("k", cls=value))
        assert rows("a/s.tar", join="b/s.tar")[0]["cls"] == int(value)
