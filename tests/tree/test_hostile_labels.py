"""Label files that others have made: memory and time are in proportion to their size, and nothing is computed."""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import sqlite3
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.bounded import bounded
from tests.tree.test_view_record import LABELLED, as_parquet, as_sqlite, labelled
from wdsfs.errors import ViewError
from wdsfs.shards import Fingerprint
from wdsfs.tree import label_files, label_rows
from wdsfs.tree.composition import EMPTY, SKIP
from wdsfs.tree.label_table import open_labels


def values_of(directory: Path, text: str | Path) -> dict[bytes, bytes]:
    """The labels of the sample d/a."""
    (file,) = label_files.label_files(str(text))
    with open_labels((file,), (Fingerprint.at(file.path),)) as labels:
        return labels.find([b"d/a"])[b"d/a"][0].values


def test_a_row_of_csv_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in quotes may be of many lines; so may a row."""
    monkeypatch.setattr(label_rows, "LINE_MAX", 100)
    for content, line in ((b"key,a\n" + b"x," * 51, 2), (b"key,a\n" + b'"x\n",' * 40, 22)):
        (tmp_path / "l.csv").write_bytes(content)
        with pytest.raises(ViewError, match=rf"l\.csv:{line}: is part of a row of more than"):
            labelled(tmp_path, tmp_path / "l.csv")
    (tmp_path / "l.csv").write_bytes(b"key,a\n" + b"".join(b"d/%d,%s\n" % (n, b"x" * 80) for n in range(9)))
    assert labelled(tmp_path, tmp_path / "l.csv", missing=EMPTY)


def test_a_csv_file_of_very_many_columns(tmp_path: Path) -> None:
    """Each is looked at once: this took minutes."""
    file = tmp_path / "l.csv"
    for columns in (60_000, 70_000):
        file.write_text("key," + ",".join(f"c{n}" for n in range(columns)) + "\nd/a" + ",x" * columns + "\n")
        if columns > label_files.COLUMNS_MAX:
            with pytest.raises(ViewError, match=r"l\.csv:1: has 70,001 columns; the limit is 65,536"):
                bounded(lambda: values_of(tmp_path, file))
        else:
            assert bounded(lambda: len(values_of(tmp_path, file))) == columns


def test_short_rows_that_are_packed(tmp_path: Path) -> None:
    """4 MB in 4 kB, which took minutes to store, and so did names in many directories."""
    for number, content in enumerate((b"key\n" + b"a\n" * 2_000_000, b"key\n" + b"a/b/c/d/e.jpg\n" * 200_000)):
        file = tmp_path / f"{number}.csv.gz"
        file.write_bytes(gzip.compress(content))
        with pytest.raises(ViewError, match="unpacks to more than 200 times its size"):
            bounded(lambda file=file: values_of(tmp_path, file), seconds=120)


def as_database(path: Path, *statements: str) -> Path:
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript(";".join(statements))
    return path


ENDLESS = "WITH RECURSIVE n(key) AS (SELECT 1 UNION ALL SELECT key + 1 FROM n) SELECT key FROM n"
COMPUTED = {
    "an endless view": (["CREATE TABLE u (x)", f"CREATE VIEW v AS {ENDLESS}"], "'v' is computed by SQL"),
    "only a view": ([f"CREATE VIEW v AS {ENDLESS}"], "'v' is computed by SQL"),
    "a view of much": (["CREATE VIEW v AS SELECT hex(zeroblob(400000000)) AS key"], "'v' is computed by SQL"),
    "a column of much": (
        ["CREATE TABLE v (key, a AS (hex(zeroblob(400000000))))", "INSERT INTO v VALUES ('d/a')"],
        "the column 'a' of 'v' is computed .* declare it STORED",
    ),
    "a virtual table": (["CREATE VIRTUAL TABLE v USING fts5(key)"], "'v' is computed by SQL"),
    "a view that is called a table": (
        [
            f"CREATE VIEW v AS {ENDLESS}",
            "CREATE TABLE u (x)",
            "PRAGMA writable_schema = ON",
            "UPDATE sqlite_schema SET type = 'table', rootpage = 2, "
            "sql = 'CREATE VIRTUAL TABLE v USING fts5(key)' WHERE name = 'v'",
        ],
        "'v' is computed by SQL",
    ),
}


@pytest.mark.parametrize("case", COMPUTED)
def test_nothing_that_a_database_says_is_computed(tmp_path: Path, case: str) -> None:
    statements, said = COMPUTED[case]
    file = as_database(tmp_path / "l.db", *statements)
    with pytest.raises(ViewError, match=said):
        bounded(lambda: values_of(tmp_path, f"{file}:v"))


def test_what_the_names_of_a_schema_hide_is_not_computed() -> None:
    """As where a file lies about what is a table: SQLite itself is asked before it reads anything."""
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.executescript(f"CREATE TABLE t (key); CREATE VIEW v AS {ENDLESS}; CREATE VIEW w AS SELECT key FROM t")
        db.set_authorizer(label_rows._authorize)
        assert db.execute("SELECT key FROM t").fetchall() == []
        for query in ("SELECT key FROM v", "SELECT key FROM w", "SELECT hex(key) FROM t", "DELETE FROM t"):
            with pytest.raises(sqlite3.DatabaseError, match=r"prohibited|not authorized"):
                db.execute(query)


def test_pages_that_are_there_again_and_again(tmp_path: Path) -> None:
    """Each page of a tree names the next one sixty times: 60 to the power of 10 rows in a file of 6 kB."""
    file = as_database(tmp_path / "l.db", "PRAGMA page_size = 512", "CREATE TABLE t (key)")
    as_database(file, "INSERT INTO t VALUES ('d/a')")
    content = bytearray(file.read_bytes())
    leaf, levels, cells = content[512:1024], 10, 60
    del content[512:]
    for number in range(2, 2 + levels):
        page = bytearray(512)
        start = 512 - 5 * cells
        page[:12] = struct.pack(">BHHHBI", 5, 0, cells, start, 0, number + 1)
        page[12 : 12 + 2 * cells] = struct.pack(f">{cells}H", *range(start, 512, 5))
        page[start:] = struct.pack(">IB", number + 1, 1) * cells
        content += page
    content += leaf
    content[28:32] = struct.pack(">I", len(content) // 512)
    file.write_bytes(content)
    with pytest.raises(ViewError, match="more than 100 times the bytes of the file"):
        bounded(lambda: values_of(tmp_path, file), seconds=120)


def test_a_value_of_a_database_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_rows, "VALUE_MAX", 5000)
    for size in (4000, 6000):
        file = as_sqlite(tmp_path / f"{size}.db", [{"key": "d/a", "a": "x" * size}])
        if size == 4000:
            assert labelled(tmp_path, file, missing=SKIP)[b"d/a"][b"a"] == b"x" * 4000
        else:
            with pytest.raises(ViewError, match="string or blob too big"):
                labelled(tmp_path, file)


PACKED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "one text in many rows": (
        {"key": ["d/a"], "a": ["x" * 1000]},
        {},
        r":\d+: the rows hold more than 1,000 times",
    ),
    "one list in many rows": (
        {"key": ["d/a"], "a": [["x" * 900]]},
        {},
        r":\d+: the rows hold more than 1,000 times",
    ),
    "zeros": (
        {"key": ["d/a"] * 10, "a": [0] * 10},
        {"use_dictionary": False, "compression": "zstd"},
        "unpacks to more than 200 times its size",
    ),
}


@pytest.mark.parametrize("case", PACKED)
def test_parquet_that_unpacks_to_very_much(tmp_path: Path, case: str) -> None:
    """180 MB of values, or 16 MB of zeros, in some kB."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns, options, said = PACKED[case]
    file = tmp_path / "l.parquet"
    parquet.write_table(pyarrow.table({name: some * 200_000 for name, some in columns.items()}), file, **options)
    with pytest.raises(ViewError, match=said):
        bounded(lambda: values_of(tmp_path, file), seconds=120)


def test_a_value_of_parquet_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_rows, "VALUE_MAX", 5000)
    for size in (5000, 5001):
        file = as_parquet(tmp_path / f"{size}.parquet", [{"key": "d/a", "a": "x" * size}])
        if size == 5000:
            assert values_of(tmp_path, file)[b"a"] == b"x" * 5000
        else:
            with pytest.raises(ViewError, match=r"5001\.parquet:1: the field 'a' has more than"):
                values_of(tmp_path, file)


def test_an_interrupt_within_sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Any) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(label_rows, "_STEPS", 1)
    monkeypatch.setattr(label_rows._Bounds, "is_spent", interrupted)
    with pytest.raises(KeyboardInterrupt):
        labelled(tmp_path, as_sqlite(tmp_path / "l.db"))


def test_a_schema_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What SQLite reads by itself is counted, too."""
    monkeypatch.setattr(label_rows, "_STEPS", 1)
    monkeypatch.setattr(label_rows, "WORK_LEAST", 0)
    monkeypatch.setattr(label_rows, "WORK", 0)
    with pytest.raises(ViewError, match="cannot be read as SQLite: interrupted"):
        labelled(tmp_path, as_sqlite(tmp_path / "l.db"))


def test_no_file_appears_beside_a_database(tmp_path: Path) -> None:
    """With what its log has, and where nobody has it open any more."""
    (tmp_path / "d").mkdir()
    file = as_sqlite(tmp_path / "d" / "l.db")
    with contextlib.closing(sqlite3.connect(file)) as db:
        db.execute("PRAGMA journal_mode = WAL")
    assert labelled(tmp_path, file) == LABELLED
    assert os.listdir(tmp_path / "d") == ["l.db"]
    with contextlib.closing(sqlite3.connect(file)) as db:
        db.execute("UPDATE t SET cls = 'new'")
        db.commit()
        for name in ("l.db", "l.db-wal"):
            shutil.copyfile(tmp_path / "d" / name, tmp_path / name)
    before = sorted(os.listdir(tmp_path))
    found = labelled(tmp_path, tmp_path / "l.db")
    assert {columns[b"cls"] for columns in found.values()} == {b"new"}
    assert set(os.listdir(tmp_path)) - set(before) <= {"s.tar", "index"}
    assert len([path for path in (tmp_path / "cache").iterdir() if path.suffix == ".labels"]) == 2
