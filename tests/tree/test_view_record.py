"""Views made of records: columns, joins, labels, classes; and what happens when they change.

Most of it below the mount: what a derived record shows, with the content it leads to, is compared with a naive
model, which is a few lines over lists of samples.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import json
import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import Mock

import pytest

from tests import sets, tars
from tests.conftest import Program
from tests.processes import wait_until
from tests.tree.test_shard_tree import names_in
from wdsfs import names, source
from wdsfs.errors import (
    CorruptShard,
    NoSuchAttribute,
    ShardError,
    StaleShard,
    UnreadableShard,
    UsageError,
    ViewError,
)
from wdsfs.index.record import STRAY
from wdsfs.index.store import open_index
from wdsfs.shards import Fingerprint, Shard
from wdsfs.spec.expand import Slice, expand
from wdsfs.tree import content as content_module
from wdsfs.tree import label_files, label_rows, label_table, view_set
from wdsfs.tree.classes import numbers_of
from wdsfs.tree.companions import Companions, read_class_names
from wdsfs.tree.composition import (
    EMPTY,
    ERROR,
    SKIP,
    Composition,
    class_source,
    columns_of,
    composition_of,
    fields_of,
)
from wdsfs.tree.indexing import Attempts, NotIndexed, indexed
from wdsfs.tree.label_table import open_labels
from wdsfs.tree.merged_tree import make_tree
from wdsfs.tree.numbered_tree import make_numbered, samples_of
from wdsfs.tree.set_options import TreeOptions
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.tree import View
from wdsfs.tree.view_set import ViewSet, is_view, make_shard_set

BROKEN = b"it cannot be read"  # instead of a content
Sample = tuple[bytes, list[tuple[bytes, bytes]]]  # key, and (extension, content) in the order of the tar


def write(path: Path, samples: Sequence[Sample], more: bytes = b"") -> Shard:
    members = [member(key + b"." + ext, content) for key, columns in samples for ext, content in columns]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tars.tar(*members, more))
    return sets.at(path)


def member(name: bytes, content: bytes) -> bytes:
    return (tars.pax({b"path": name}) if len(name) > 100 else b"") + tars.member(name, content)


@contextlib.contextmanager
def a_view(
    directory: Path, shards: Sequence[Shard], wanted: Composition, indexed: bool = True
) -> Iterator[ShardSet]:
    """The lower of a view, derived unless it is to be lazy. Raises ViewError when it is refused."""
    index = open_index(directory / "index")
    companions = Companions(wanted)
    if indexed:
        index.refresh(
            [one for one, _ in index.stale([*shards, *(s for joined in companions.joined for s in joined)])]
        )
    below = make_shard_set(shards, index, wanted, companions)
    try:
        if indexed and isinstance(below, ViewSet):
            refused = below.make()
            if refused is not None:
                raise ViewError(refused)
        yield below
    finally:
        below.close()


def read(below: ShardSet, number: int, member: int) -> bytes:
    content = below.content(number, below.tag(number), member)
    return content_module.read(content, 0, content.size + 1)


def shown(below: ShardSet, number: int) -> list[Sample]:
    """Return the samples that a shard shows, with content; compare sizes on the way."""
    found: list[Sample] = []
    record = indexed(below.record, number)
    for entry in range(record.entries):
        if record.entry_flags[entry] & STRAY:
            continue
        columns = []
        for member in record.entry_members(entry):
            try:
                content = read(below, number, member)
                assert len(content) == record.size_and_time(member)[0]
            except CorruptShard:
                content = BROKEN
                assert record.size_and_time(member)[0]
            columns.append((record.extension(member), content))
        found.append((record.entry_path(entry), columns))
    return sorted(found)


def settle(below: ShardSet) -> None:
    """Make the records of all shards, or have them refused."""
    for number in below.numbers:
        with contextlib.suppress(ViewError):
            indexed(below.record, number)


def one_shard(directory: Path, samples: Sequence[Sample], **options: Any) -> list[Sample]:
    shard = write(directory / "s.tar", samples)
    with a_view(directory, [shard], Composition(**options)) as below:
        return shown(below, 0)


AB: list[Sample] = [
    (b"d/a", [(b"jpg", b"A"), (b"png", b"AA"), (b"cls", b"0\n")]),
    (b"d/b", [(b"png", b"BB"), (b"cls", b"1\n")]),
    (b"c", [(b"JPG", b"C"), (b"txt", b"c")]),
]


# --- columns ----------------------------------------------------------------------------------------------


def test_letter_case(tmp_path: Path) -> None:
    """Beyond ASCII; that of ASCII is in the model of `test_fields.py`."""
    for options in ({}, {"columns": columns_of(["é"])}):
        found = one_shard(tmp_path, [(b"k", [("É".encode(), b"E")])], ignore_case=True, **options)
        assert found == [(b"k", [("é".encode(), b"E")])]


def test_strays_are_shown_unless_columns_are_chosen(tmp_path: Path) -> None:
    link = tars.header(b"link", kind=tars.SYMLINK, link=b"d/a.jpg")
    hard = tars.header(b"hard.x", kind=tars.HARD_LINK, link=b"d/a.jpg")
    dangling = tars.header(b"dangling", kind=tars.HARD_LINK, link=b"nowhere")
    shard = write(tmp_path / "s.tar", AB, tars.member(b"README", b"me") + link + hard + dangling)
    left_out = replace(shard, without=frozenset([b"./d/b"]))
    with a_view(tmp_path, [left_out], Composition()) as below:
        tree = make_tree(below, View("files"))
        assert names_in(tree, b"s") == [b"d", b"c.JPG", b"c.txt", b"README", b"link", b"hard.x"]
        assert tree.readlink(tree.resolve(b"s/link").inode) == b"d/a.jpg"
        assert read(below, 0, tree.resolve(b"s/hard.x").inode & (1 << 30) - 1) == b"A"
        assert names_in(tree, b"s/d") == [b"a.jpg", b"a.png", b"a.cls"]
    with a_view(tmp_path, [left_out], Composition(columns=columns_of(["JPG;jpg"]))) as below:
        assert names_in(make_tree(below, View("files")), b"s") == [b"d", b"c.JPG"]


def test_samples_are_left_out_of_their_shard_only(tmp_path: Path) -> None:
    one, other = write(tmp_path / "s.tar", AB), write(tmp_path / "t.tar", AB)
    assert not is_view([one, other], Composition())
    with a_view(tmp_path, [replace(one, without=frozenset([b"d/a", b"none"])), other], Composition()) as below:
        assert [key for key, _ in shown(below, 0)] == [b"c", b"d/b"]
        assert shown(below, 1) == sorted(AB)
        assert indexed(below.record, 1).view is None  # the record that it has anyway


def test_damage_is_told_of_a_view_too(tmp_path: Path) -> None:
    tar = write(tmp_path / "s.tar", AB)
    sets.path_of(tar).write_bytes(sets.path_of(tar).read_bytes()[:-1536])  # the end mark, and into the last member
    with a_view(tmp_path, [tar], Composition(columns=columns_of(["txt;png"]))) as below:
        problems = indexed(below.record, 0).problems
        assert "truncated" in {problem.kind for problem in problems}
        assert list(below.damaged()) == [(str(tmp_path / "s.tar"), problems[0].text)]


# --- joined shards ----------------------------------------------------------------------------------------


def depth(*keys: bytes, ext: bytes = b"depth") -> list[Sample]:
    return [(key, [(ext, b"D" + key)]) for key in keys]


def joined(directory: Path, sets_: Sequence[Sequence[Sample]], **options: Any) -> list[Sample]:
    """Return the samples of AB joined with these shards; a second shard is empty."""
    shards = [write(directory / f"s{n}.tar", one) for n, one in enumerate((AB, ()))]
    for path in directory.glob("j*.tar"):
        path.unlink()
    for number, samples in enumerate(sets_):
        write(directory / f"j{number}.tar", samples)
    with a_view(directory, shards, Composition(join=(str(directory / "j*.tar"),), **options)) as below:
        assert shown(below, 1) == []
        return shown(below, 0)


def with_depth(*keys: bytes) -> list[Sample]:
    return sorted((key, columns + [(b"depth", b"D" + key)] * (key in keys)) for key, columns in AB)


def test_columns_are_joined_by_key_whatever_the_shards_are(tmp_path: Path) -> None:
    keys = [key for key, _ in AB]
    everything = with_depth(*keys)
    assert joined(tmp_path, [depth(*keys), depth(b"x")]) == everything  # shard by shard
    assert joined(tmp_path, [depth(b"x"), depth(*keys)]) == everything  # as many, but others
    assert joined(tmp_path, [depth(keys[1]), depth(b"x", keys[0]), depth(keys[2])]) == everything
    assert joined(tmp_path, [depth(*keys[:2]), depth(keys[2])]) == everything
    assert joined(tmp_path, [depth(*(b"./" + key for key in keys))])[0][1][-1] == (b"depth", b"D./c")


def test_keys_that_are_missing_or_there_twice(tmp_path: Path) -> None:
    with pytest.raises(ViewError, match=r"s0\.tar: sample 'd/b' is not in the joined set; --missing skip"):
        joined(tmp_path, [depth(b"d/a", b"c")])
    beside = [depth(b"d/a", b"c", b"d/b", b"c"), ()]
    for twice in (beside, [depth(b"d/a", b"c", b"d/b"), depth(b"c"), depth(b"x")]):
        with pytest.raises(ViewError, match=r"sample 'c' is more than once .*--duplicates skip"):
            joined(tmp_path, twice)


def test_a_column_that_the_shard_has_itself(tmp_path: Path) -> None:
    both = [[(key, [(b"png", b"other"), (b"depth", b"D" + key)]) for key, _ in AB]]
    with pytest.raises(ViewError, match="has the column 'png', and so"):
        joined(tmp_path, both)
    with pytest.raises(ViewError, match="has the column 'Png', and so"):
        joined(tmp_path, [depth(b"c"), depth(b"d/a", b"d/b", ext=b"Png")], ignore_case=True, missing=EMPTY)


@pytest.mark.parametrize("beside", [True, False])
def test_what_a_joined_data_set_excludes_is_not_joined(tmp_path: Path, beside: bool) -> None:
    """Shard by shard, and looked for in the whole set. Other excludes make another view."""
    shard = write(tmp_path / "s.tar", AB)
    names = ["a.tar"] if beside else ["a.tar", "b.tar"]
    columns = [depth(*(b"./" + key for key, _ in AB)), depth(b"x")]
    for name, samples in zip(names, columns, strict=False):
        write(tmp_path / "set" / name, samples)
    meta = tmp_path / "set" / ".nv-meta"
    meta.mkdir()
    (meta / ".info.json").write_text(json.dumps({"shard_counts": dict.fromkeys(names, 1)}))
    for excluded, left in (([], [b"d/a", b"d/b", b"c"]), (["a.tar/./d/b", "a.tar/c"], [b"d/a"])):
        (meta / "split.yaml").write_text(f"split_parts: {{train: {names}}}\nexclude: {excluded}\n")
        wanted = Composition(join=(str(tmp_path / "set"),), missing=EMPTY)
        with a_view(tmp_path, [shard], wanted) as below:
            assert [key for key, columns in shown(below, 0) if columns[-1][0] == b"depth"] == sorted(left)


def test_a_joined_shard_that_is_damaged_is_told(tmp_path: Path) -> None:
    """The members that it has lost are missing in the view, and nothing else."""
    shards = [write(tmp_path / "s.tar", AB)]
    other = write(tmp_path / "j.tar", depth(*(key for key, _ in AB)))
    whole = sets.path_of(other).read_bytes()
    sets.path_of(other).write_bytes(whole[: 3 * tars.BLOCK])
    wanted = Composition(
        join=(str(tmp_path / "[j].tar"), str(tmp_path / "j.tar")), missing=EMPTY, duplicates=EMPTY
    )
    with a_view(tmp_path, shards, wanted) as below:
        [(path, text)] = below.damaged()
        assert (path, "ends at byte 1536" in text) == (str(tmp_path / "j.tar"), True)


def test_a_shard_pairs_by_its_number_in_the_whole_set(tmp_path: Path) -> None:
    """With keys that repeat in each shard: also in a part of the set, and after any earlier mount."""
    for n in range(4):
        write(tmp_path / f"t{n}.tar", [(b"k", [(b"jpg", b"%d" % n)])])
        write(tmp_path / f"j{n}.tar", [(b"k", [(b"dep", b"%d" % n)])])
    whole = Composition(join=(f"{tmp_path}/j{{0..3}}.tar",))

    def pairs(specs: str, wanted: Composition = whole, part: Slice | None = None) -> list[bytes]:
        shards = expand([f"{tmp_path}/{one}" for one in specs.split()], slice=part)
        with a_view(tmp_path, shards, wanted) as below:
            return [b"".join(value for _, value in shown(below, at)[0][1]) for at in range(len(shards))]

    with pytest.raises(ViewError, match="more than once"):
        pairs("t1.tar")
    assert pairs("t{0..3}.tar") == [b"00", b"11", b"22", b"33"]
    assert pairs("t1.tar t0.tar t3.tar t2.tar") == [b"10", b"01", b"32", b"23"]
    assert pairs("t{0..3}.tar", part=Slice(1, 2)) == [b"11", b"33"]
    with pytest.raises(ViewError, match="more than once"):
        pairs("t{0..3}.tar", Composition(join=(f"{tmp_path}/j{{0..1}}.tar",)), Slice(1, 2))


# --- label files ------------------------------------------------------------------------------------------

ROWS: list[dict[str, Any]] = [
    {"key": "d/a", "cls": "7", "score": 0.5, "n": 3, "whole": 1.0},
    {"key": "d/b", "cls": "8", "score": None, "n": 4, "whole": None},
    {"key": "c", "cls": "9", "score": 1e-9, "n": None, "whole": None},
]
LABELLED = {
    b"d/a": {b"cls": b"7", b"score": b"0.5", b"n": b"3", b"whole": b"1.0"},
    b"d/b": {b"cls": b"8", b"n": b"4"},
    b"c": {b"cls": b"9", b"score": b"1e-09"},
}


def as_csv(path: Path, rows: Sequence[dict[str, Any]] = ROWS, delimiter: str = ",") -> Path:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    path.write_text(out.getvalue())
    return path


def as_lines(path: Path, rows: Sequence[dict[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_sqlite(path: Path, rows: Sequence[dict[str, Any]] = ROWS, key: str = "key", more: str = "") -> Path:
    with contextlib.closing(sqlite3.connect(path)) as db:
        names = [key, *list(rows[0])[1:]]
        db.executescript(f"CREATE TABLE t ({key} PRIMARY KEY, {','.join(names[1:])}); {more}")
        marks = ",".join("?" * len(names))
        db.executemany(f"INSERT INTO t VALUES ({marks})", [tuple(row.values()) for row in rows])
        db.commit()
    return path


def as_parquet(path: Path, rows: Sequence[dict[str, Any]] = ROWS) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    else:
        pytest.importorskip("pyarrow.feather").write_feather(table, str(path))
    return path


def as_list(path: Path) -> Path:
    path.write_text(json.dumps(ROWS, indent=2))
    return path


def labelled(directory: Path, file: str | Path, **options: Any) -> dict[bytes, dict[bytes, bytes]]:
    """The columns that a label file gives AB, by key."""
    known = {b"jpg", b"png", b"JPG", b"txt"}
    found = one_shard(directory, AB, associate=(str(file),), **options)
    return {key: {ext: content for ext, content in columns if ext not in known} for key, columns in found}


def test_every_format_gives_the_same_columns(tmp_path: Path) -> None:
    """Numbers are written as Python does; what is null or an empty field makes no file."""
    files: list[str | Path] = [
        as_csv(tmp_path / "l.csv"),
        as_csv(tmp_path / "l.tsv", delimiter="\t"),
        as_csv(tmp_path / "pandas.csv", [{"": number, **row} for number, row in enumerate(ROWS)]),
        as_lines(tmp_path / "l.jsonl"),
        as_sqlite(tmp_path / "l.sqlite"),
        as_sqlite(tmp_path / "primary.db", key="sample"),
        f"{as_sqlite(tmp_path / 'two.db', more='CREATE TABLE u (x);')}:t",
        f"{as_sqlite(tmp_path / 'named.db', key='id2', more='CREATE TABLE u (x);')}:t:id2",
        as_lines(tmp_path / "lines.json"),
        as_list(tmp_path / "list.json"),
        as_list(tmp_path / "list"),
        as_parquet(tmp_path / "l.parquet"),
        as_parquet(tmp_path / "l.feather"),
    ]
    for n, row in enumerate(ROWS):
        as_csv(tmp_path / f"part{n}.csv", [row])
    files += [str(tmp_path / "part*.csv"), f"{tmp_path}/part{{0..2}}.csv:key"]
    for file in files:
        assert labelled(tmp_path, file) == LABELLED, file  # and the label wins over the shard's own column


def test_values_of_parquet(tmp_path: Path) -> None:
    """An image of Hugging Face is its bytes; times and decimals are texts; what JSON has not is named."""
    row = {"file_name": "c", "image": {"bytes": b"\xff\0", "path": "c"}, "raw": b"\xff", "box": [1, 2], "f": 0.5}
    row |= {"t": datetime(2024, 1, 2, tzinfo=UTC), "d": Decimal("0.50"), "many": {"t": date(2024, 1, 2)}}
    file = as_parquet(tmp_path / "l.parquet", [row])
    found = labelled(tmp_path, file, missing=SKIP)
    assert found == {
        b"c": {
            b"image": b"\xff\0",
            b"raw": b"\xff",
            b"box": b"[1, 2]",
            b"f": b"0.5",
            b"t": b"2024-01-02 00:00:00.000000Z",
            b"d": b"0.50",
            b"many": b'{"t": "2024-01-02"}',
        }
    }
    with pytest.raises(ViewError, match=r"l\.parquet:1: the field 'x' holds bytes in a list"):
        labelled(tmp_path, as_parquet(file, [{"key": "c", "x": [b"a"]}]))
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"key": ["c"], "x": pyarrow.array([b"\xff"]).view(pyarrow.string())}), file)
    with pytest.raises(ViewError, match=r"l\.parquet: cannot be read as parquet: the column 'x': 'utf-8' codec"):
        labelled(tmp_path, file)


def test_values_are_written_as_they_are(tmp_path: Path) -> None:
    lines = as_lines(
        tmp_path / "l.jsonl",
        [{"__key__": "d/a", "__url__": "x", "l": [1, "\u00e9"], "o": {"a": None}, "t": True, "b": 1 << 70}],
    )
    found = labelled(tmp_path, lines, missing=EMPTY)[b"d/a"]
    assert found == {
        b"cls": b"0\n",
        b"l": '[1, "\u00e9"]'.encode(),
        b"o": b'{"a": null}',
        b"t": b"true",
        b"b": b"%d" % (1 << 70),
    }
    blob = as_sqlite(tmp_path / "b.db", [{"key": "d/a", "mask": b"\0\xff", "empty": ""}])
    assert labelled(tmp_path, blob, missing=SKIP) == {b"d/a": {b"cls": b"0\n", b"mask": b"\0\xff", b"empty": b""}}
    raw = tmp_path / "raw.csv"
    raw.write_bytes(b'\xef\xbb\xbfkey,n\xff\n./d/a,"a\nb"\n\nd/b,\xff\n')
    assert labelled(tmp_path, raw, missing=SKIP) == {
        b"d/a": {b"cls": b"0\n", b"n\xff": b"a\nb"},
        b"d/b": {b"cls": b"1\n", b"n\xff": b"\xff"},
    }
    generated = "CREATE TABLE t (key, a, b AS (a + 1) STORED);"
    with contextlib.closing(sqlite3.connect(tmp_path / "g.db")) as db:
        db.executescript(f"{generated} INSERT INTO t VALUES ('d/a', 1)")
    assert labelled(tmp_path, tmp_path / "g.db", missing=SKIP)[b"d/a"] == {b"cls": b"0\n", b"a": b"1", b"b": b"2"}


def test_rows_that_are_missing_or_there_twice(tmp_path: Path) -> None:
    file = as_csv(tmp_path / "l.csv", [*ROWS[:2], ROWS[0]])
    with pytest.raises(ViewError, match=r"sample 'c' is not in .*l\.csv; --missing skip"):
        labelled(tmp_path, file)
    with pytest.raises(ViewError, match=r"sample 'd/a' is more than once in .*l\.csv; --duplicates skip"):
        labelled(tmp_path, file, missing=SKIP)


def test_samples_that_are_refused_have_no_numbers(tmp_path: Path) -> None:
    """If the samples after them moved up, a link would lead to another sample than its number says."""
    shards = [write(tmp_path / f"s{n}.tar", [(b"k%d" % n, [(b"cls", b"%d" % n)])]) for n in (0, 1)]
    wanted = Composition(associate=(str(as_csv(tmp_path / "l.csv", [{"key": "k1", "a": "1"}])),))
    with a_view(tmp_path, shards, wanted, indexed=False) as below:
        tree = make_numbered(below, View(index_tree=True))
        for path in (b"by-index/000/000/000000", b"by-index/000", b"by-index/000/000/000001"):
            settle(below)
            with pytest.raises(ViewError, match="sample 'k0' is not in"):
                tree.resolve(path)
        assert tree.resolve(b"by-index").links == 1


def test_numbers_of_a_key_that_comes_again(tmp_path: Path) -> None:
    """The first sample of that name in the view is the second one in the tar."""
    samples: list[Sample] = [(b"a", [(b"txt", b"1")]), (b"b", [(b"jpg", b"2")]), (b"a", [(b"jpg", b"3")])]
    shard = write(tmp_path / "s.tar", [*samples, (b"c", [(b"jpg", b"4")]), (b"a", [(b"jpg", b"5")])])
    with a_view(tmp_path, [shard], Composition(columns=columns_of(["jpg"]), missing=SKIP)) as below:
        tree = make_numbered(below, View(index_tree=True))
        links = [tree.readlink(tree.resolve(b"by-index/000/000/%06d" % number).inode) for number in range(4)]
        assert [link.rpartition(b"/")[2] for link in links] == [b"b", b"a", b"c", b"a~2"]


def test_an_order_of_samples_is_of_one_content(tmp_path: Path) -> None:
    """The set of the shards has seen a change that the view has not looked for."""
    columns = [(b"txt", b"1"), (b"cls", b"0")]
    shard = write(tmp_path / "s.tar", [(key, columns) for key in (b"a", b"b", b"a")])
    with a_view(tmp_path, [shard], Composition(columns=columns_of(["txt"]))) as below:
        tag = below.tag(0)
        assert list(samples_of(below, 0, tag)) == [0, 1, 2]
        write(tmp_path / "s.tar", [(b"c", columns)])
        below.plain.distrust()
        indexed(below.plain.record, 0)
        with pytest.raises(StaleShard):
            indexed(samples_of, below, 0, tag)
        below.distrust()
        assert list(indexed(samples_of, below, 0)) == [0]


# A file that is wrong, and the place that the message names; the way out, or the column, where there is one.
WRONG: dict[str, tuple[str, bytes, str]] = {
    "no key": ("l.csv", b"a,b\n1,2\n", r": .* 'a', 'b'\).*l\.csv:COLUMN"),
    "empty": ("l.csv", b"", r": has no column"),
    "fields": ("l.csv", b"key,b\nx,1\ny\n", r":3: has 1 fields"),
    "quotes": ("l.csv", b'key,b\nx,"1\n', r":\d: a quote"),
    "twice": ("l.csv", b"key,b,b\n", r":1: .*'b'"),
    "semicolons": ("l.csv", b"\xef\xbb\xbfkey;b\nx;1,5\n", r":1: .* with a comma"),
    "commas": ("l.tsv", b"key,b\nx,1\n", r":1: .* with a tab"),
    "utf-16": ("l.csv", "key,b\nx,1\n".encode("utf-16"), r": is in UTF-16"),
    "json in utf-16": ("l.jsonl", '{"key": "x"}'.encode("utf-16"), r": is in UTF-16"),
    "UTF-16 in gzip": ("l.jsonl.gz", gzip.compress('{"key": 1}'.encode("utf-16")), r": is in UTF-16"),
    "large number": ("l.jsonl", b'{"key": "a", "n": ' + b"9" * 5000 + b"}\n", r":1: is not JSON .*digits\);"),
    "no json": ("l.jsonl", b'{"key": "a"}\n{', r":2: is not JSON"),
    "no object": ("l.jsonl", b"[1]\n", r":1: is not a JSON object"),
    "odd column": ("l.jsonl", b'{"key": "a", "\\ud800": 1}\n', r":1: the column"),
    "no key in line": ("l.jsonl", b'{"a": 1}\n', r":1: has no column"),
    "no key in a line": ("l.jsonl", b'{"id": 1}\n{"a": 1}\n', r":2: has no field 'id' \(fields: 'a'\)"),
    "odd key": ("l.jsonl", b'{"key": [1]}\n', r":1: the field 'key'"),
    "half a character": ("l.jsonl", b'{"key": "a", "b": "\\ud800"}\n', r":1: the field 'b'"),
    "many names": ("l.jsonl", b"".join(b'{"key": "a", "%d": 1}\n' % n for n in range((1 << 16) + 1)), r":65537: "),
    "no database": ("l.sqlite", b"what is this, no database at all?" * 9, r": cannot be read as SQLite"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_label_file_that_is_wrong(tmp_path: Path, case: str) -> None:
    name, content, message = WRONG[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ViewError, match=re.escape(name) + message):
        labelled(tmp_path, tmp_path / name)


def test_a_line_of_labels_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is in memory at once."""
    monkeypatch.setattr(label_rows, "LINE_MAX", 100)
    file = tmp_path / "l.jsonl"
    file.write_bytes(b'{"key": "c", "a": "' + b"x" * 79 + b'"}\n')
    assert file.stat().st_size == 101
    with pytest.raises(ViewError, match=r"l\.jsonl:1: is longer than"):
        labelled(tmp_path, file)
    file.write_bytes(file.read_bytes().replace(b"xx", b"x", 1))
    assert labelled(tmp_path, file, missing=SKIP)


@pytest.mark.parametrize("name", ["a/b", "..", "n" * 256])
def test_a_column_that_cannot_be_a_file_matters_only_where_it_is_shown(tmp_path: Path, name: str) -> None:
    file = as_csv(tmp_path / "l.csv", [{"key": "d/a", name: "1", "good": "2"}])
    found = labelled(tmp_path, file, columns=columns_of(["good"]), missing=SKIP)
    assert found == {b"d/a": {b"good": b"2"}}
    with pytest.raises(ViewError, match=rf"l\.csv: the column '{name[:9]}.*rename .* --columns"):
        labelled(tmp_path, file, missing=SKIP)


def test_label_files_that_cannot_be_meant(tmp_path: Path) -> None:
    two = as_sqlite(tmp_path / "two.db", more="CREATE TABLE u (x);")
    for text, message in ((two, "two.db:TABLE: .*'t', 'u'"), (f"{two}:v", "has no table 'v'")):
        with pytest.raises(ViewError, match=message):
            labelled(tmp_path, text)
    (tmp_path / "l.txt").write_text("a b\n")
    for name in ("l.txt", "none.csv"):
        with pytest.raises(UsageError, match=f"--associate .*{name}: "):
            label_files.label_files(str(tmp_path / name))


def _refuse_import(name: str) -> None:
    raise ImportError(name)


# --- classes ----------------------------------------------------------------------------------------------


def classes(directory: Path, shards: Sequence[Shard], **options: Any) -> dict[str, bytes]:
    """All files of the classes layout, by path."""
    found = {}
    with a_view(directory, shards, Composition(classes=True, **options)) as below:
        tree = make_tree(below, View("classes"))
        tree.prepare()
        for folder in tree.listing(tree.getattr(1).inode, 2):
            for entry in tree.listing(folder.node.inode, 2):
                content = tree.content(entry.node.inode)
                found[os.fsdecode(folder.name + b"/" + entry.name)] = content_module.read(content, 0, content.size)
    return found


def test_each_of_many_samples_of_one_name_is_numbered_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [b"x".join(parts) for parts in itertools.product((b"a/", b"a--"), repeat=7)]
    shard = write(tmp_path / "s.tar", [(b"%sk" % key, [(b"jpg", b""), (b"cls", b"0")]) for key in sorted(keys)])
    numbered = Mock(side_effect=names.numbered)
    monkeypatch.setattr(names, "numbered", numbered)
    with a_view(tmp_path, [shard], Composition(classes=True)) as below:
        tree = make_tree(below, View("classes"))
        tree.prepare()
        suffixes = [entry.name.partition(b"k")[2] for entry in tree.listing(tree.resolve(b"0").inode, 2)]
    assert sorted(suffixes) == sorted([b".jpg", *(b"~%d.jpg" % number for number in range(2, 129))])
    assert numbered.call_count == 127


def test_samples_lie_in_the_folders_of_their_classes(tmp_path: Path) -> None:
    one = write(tmp_path / "s.v1.tar", AB[:2])
    other = write(tmp_path / "t.tar", [(b"a", [(b"jpg", b"T"), (b"cls", b"0")]), (b"d--b", [(b"cls", b"1")])])
    keys = (b"v.1/x", b"v_1/x", b"y", b"z", b"y")
    again = write(tmp_path / "u.tar", [(key, [(b"jpg", key), (b"cls", b"0")]) for key in keys])
    assert classes(tmp_path, [one, other, again]) == {
        "0/s_v1--d--a.jpg": b"A",
        "0/s_v1--d--a.png": b"AA",
        "1/s_v1--d--b.png": b"BB",
        "0/t--a.jpg": b"T",
        "0/u--v_1--x.jpg": b"v.1/x",
        "0/u--v_1--x~2.jpg": b"v_1/x",
        "0/u--y.jpg": b"y",
        "0/u--y~2.jpg": b"y",
        "0/u--z.jpg": b"z",
    }
    text = write(tmp_path / "x.tar", [(b"a", [(b"jpg", b"A"), (b"cls", b"0"), (b"txt", b" a dog \r\n")])])
    assert classes(tmp_path, [text], class_from=b"txt") == {"a dog/x--a.jpg": b"A", "a dog/x--a.cls": b"0"}
    deep = write(
        tmp_path / "v.tar", [(b"d/" * 200 + key, [(b"jpg", key), (b"cls", b"0")]) for key in (b"a", b"b")]
    )
    assert {len(path) for path in classes(tmp_path, [deep])} == {2 + 200 + 4}
    cut = write(
        tmp_path / "w.tar", [(b"a", [(b"jpg", b"A"), (b"cls", b"0")]), (b"b", [(b"jpg", b"B"), (b"cls", b"1")])]
    )
    sets.path_of(cut).write_bytes(sets.path_of(cut).read_bytes()[:-1536])
    assert classes(tmp_path, [cut], missing=SKIP) == {"0/w--a.jpg": b"A"}
    names = tmp_path / "names.txt"
    names.write_text("cat\n../dog\n")
    chosen = classes(tmp_path, [one], class_names=str(names), columns=columns_of(["jpg;png", "cls"]))
    assert sorted(chosen) == [
        "..--dog/s_v1--d--b.cls",
        "..--dog/s_v1--d--b.png",
        "cat/s_v1--d--a.cls",
        "cat/s_v1--d--a.jpg",
    ]


def test_the_class_may_be_in_a_table_whose_column_is_not_shown(tmp_path: Path) -> None:
    shard, file = write(tmp_path / "s.tar", AB[:1]), as_csv(tmp_path / "l.csv", [{"key": "d/a", "cls": "7"}])
    found = classes(tmp_path, [shard], associate=(str(file),), columns=columns_of(["jpg"]))
    assert found == {"7/s--d--a.jpg": b"A"}


@pytest.mark.parametrize("policy", [ERROR, SKIP, EMPTY])
def test_samples_without_a_class(tmp_path: Path, policy: str) -> None:
    texts = [
        b'{"a": {"b": 3}}',
        b'{"a": {"b": " x "}}',
        b'{"a": 1}',
        b"no json",
        b'{"a": {"b": 1.5}}',
        b'{"a": {"b": ".."}}',
        b'{"a": {"b": "."}}',
        b'{"a": {"b": ""}}',
        b'{"a": {"b": "x\xc2\xa0"}}',
        b'{"a": {"b": true}}',
    ]
    samples = [(b"k%d" % n, [(b"json", text)]) for n, text in enumerate(texts)]
    shard = write(tmp_path / "s.tar", samples)
    options: dict[str, Any] = {"class_from": b"json", "class_field": "a.b", "missing": policy}
    if policy == ERROR:
        with pytest.raises(ViewError, match=r"sample 'k\d' has no class: "):
            classes(tmp_path, [shard], **options)
        return
    rest = [] if policy == SKIP else [f"%/s--k{n}.json" for n in range(2, 8)]
    named = ["3/s--k0.json", "true/s--k9.json", "x/s--k1.json", "x\xa0/s--k8.json"]
    assert sorted(classes(tmp_path, [shard], **options)) == [*rest, *named]


def test_names_of_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "names"
    for text, expected in (
        ("a\n b \n", {"0": "a", "1": "b"}),
        ('["a", "b"]', {"0": "a", "1": "b"}),
        ('{"n02": "a", "7": "b", "2": "a"}', {"n02": "a", "7": "b", "2": "a"}),
        ("a\fb\x1c\nc\u2028d\u0085\ne\xa0", {"0": "a\fb\x1c", "1": "c\u2028d\u0085", "2": "e\xa0"}),
        ("a\r\n\tb\rc", {"0": "a", "1": "b", "2": "c"}),
    ):
        file.write_bytes(text.encode())
        assert read_class_names(str(file)) == expected
    for text in ("a\nb\na\n", '["a", "b", "a"]', "[1]", "{", '{"a": null}'):
        file.write_text(text)
        with pytest.raises(UsageError, match=f"--class-names {file}: "):
            read_class_names(str(file))
    monkeypatch.setattr(source, "WRITER_SECONDS", 0.01)
    os.mkfifo(tmp_path / "fifo")
    for name in ("none", "fifo"):
        with pytest.raises(UsageError, match=f"--class-names .*/{name}: "):
            read_class_names(str(tmp_path / name))
    shard = write(tmp_path / "s.tar", AB[:2])
    file.write_text("only one\n")
    with pytest.raises(ViewError, match="has the class '1', which --class-names does not name"):
        classes(tmp_path, [shard], class_names=str(file))
    file.write_text('["", "\\udcff", "\\ud800"]')  # as `pack` writes a name that is not UTF-8; no text at all
    assert folders(tmp_path, [shard], class_names=str(file), missing=SKIP) == ["\udcff"]
    assert numbers_of(read_class_names(str(file)))[b"\xff"] == 1
    assert class_source("json:a.b") == (b"json", "a.b")
    for text in ("", ":x", "json:", "json:a..b"):
        with pytest.raises(UsageError, match="--class-from"):
            class_source(text)


def numbered(path: Path, *labels: bytes) -> Shard:
    """A shard of a sample for each label."""
    samples = [(b"k%03d" % n, [(b"jpg", label), (b"cls", label)]) for n, label in enumerate(labels)]
    return write(path, samples)


def folders(directory: Path, shards: Sequence[Shard], **options: Any) -> list[str]:
    """The classes of a set, as loaders sort them."""
    return sorted({path.partition("/")[0] for path in classes(directory, shards, **options)})


def test_classes_that_are_numbers_sort_as_numbers(tmp_path: Path) -> None:
    """Loaders number the sorted names of the folders: 12 classes, and the order of their numbers is theirs."""
    small = numbered(tmp_path / "a.tar", *(b"%d\n" % n for n in range(8)))
    large = numbered(tmp_path / "b.tar", *(b"%d" % n for n in range(5, 12)))
    for shards in ([small, large], [large, small]):
        found = classes(tmp_path, shards)
        assert sorted({path.partition("/")[0] for path in found}) == [f"{n:02d}" for n in range(12)]
        assert {int(path.partition("/")[0]) == int(content) for path, content in found.items()} == {True}
        assert len(found) == 15
    # The width is that of what is mounted, and the same in all of it.
    assert folders(tmp_path, [small]) == [str(n) for n in range(8)]
    huge = numbered(tmp_path / "c.tar", b"0", b"100000")
    assert folders(tmp_path, [small, large, huge]) == [*(f"{n:06d}" for n in range(12)), "100000"]
    assert folders(tmp_path, [small, large], class_digits=3) == [f"{n:03d}" for n in range(12)]
    assert folders(tmp_path, [small, large], class_digits=0) == sorted(str(n) for n in range(12))
    with pytest.raises(
        ViewError, match=r"b\.tar: sample 'k005' has the class 10, .* 1 digit; .*--class-digits .*2"
    ):
        folders(tmp_path, [small, large], class_digits=1)


@pytest.mark.parametrize(
    ("labels", "shown_"),
    [
        ([b"007", b"7", b" 7\n", b"+7", b"12"], ["007", "012"]),  # one number, however it is written
        ([b"-1", b"0", b"-0", b"10"], ["-01", "00", "10"]),
        ([b"10", b"9", b"other"], ["09", "10", "other"]),  # names beside numbers stay as they are
        ([b"1.5", b"1e3", b"1_000", b"1 2", b"9", b"+", b"-"], ["+", "-", "1 2", "1.5", "1_000", "1e3", "9"]),
        ([b"1" * 18, b"2"], ["0" * 17 + "2", "1" * 18]),
        ([b"1" * 19, b"2"], ["1" * 19, "2"]),  # too long for a number
        (["٣".encode(), b"12", b"3"], ["03", "12", "٣"]),
    ],
)
def test_what_counts_as_a_number_of_a_class(tmp_path: Path, labels: list[bytes], shown_: list[str]) -> None:
    shards = [numbered(tmp_path / f"{n}.tar", label) for n, label in enumerate(labels)]
    assert folders(tmp_path, shards) == shown_
    bare = {label.strip().decode() for label in labels}
    assert folders(tmp_path, shards, class_digits=0) == sorted(bare)


def test_numbers_from_a_field_and_from_a_file_of_names_have_one_width(tmp_path: Path) -> None:
    texts = [b'{"label": %d}' % n for n in (3, 12)]
    shard = write(tmp_path / "j.tar", [(b"k%d" % n, [(b"json", text)]) for n, text in enumerate(texts)])
    assert folders(tmp_path, [shard], class_from=b"json", class_field="label") == ["03", "12"]
    names = tmp_path / "names.json"
    names.write_text('{"cat": "3", "dog": "12"}')
    shard = numbered(tmp_path / "n.tar", b"cat", b"dog")
    assert folders(tmp_path, [shard], class_names=str(names)) == ["03", "12"]


# --- when something changes -------------------------------------------------------------------------------


def test_a_changed_label_file_is_another_shard(tmp_path: Path) -> None:
    shard, file = write(tmp_path / "s.tar", AB), as_csv(tmp_path / "l.csv")
    with a_view(tmp_path, [shard], Composition(associate=(str(file),))) as below:
        tag, content = below.tag(0), below.content(0, below.tag(0), indexed(below.record, 0).entry_member[1] - 1)
        before = content_module.read(content, 0, 100)
        as_csv(file, [{**row, "cls": "new", "score": "new", "n": "new"} for row in ROWS])
        for read_ in (content_module.read, content_module.read_cached):
            with pytest.raises(StaleShard):
                read_(content, 0, 100)
        below.distrust()
        with pytest.raises(StaleShard):
            below.content(0, tag, 0)
        assert {value for _, columns in shown(below, 0) for ext, value in columns if ext == b"cls"} == {b"new"}
        assert before != b"new"
        file.unlink()
        below.distrust()
        with pytest.raises(ShardError, match=r"l\.csv: the file is gone"):
            below.record(0)


def test_a_changed_joined_shard_is_another_shard(tmp_path: Path) -> None:
    shards = [write(tmp_path / "s.tar", AB)]
    other = write(tmp_path / "j.tar", depth(b"d/a", b"d/b", b"c"))
    with a_view(tmp_path, shards, Composition(join=(str(tmp_path / "j.tar"),))) as below:
        record = indexed(below.record, 0)
        last = record.entry_member[1] - 1
        content = below.content(0, below.tag(0), last)
        assert content_module.read(content, 0, 9).startswith(b"D")
        write(sets.path_of(other), [(key, [(b"depth", b"new")]) for key in (b"c", b"d/b", b"d/a")])
        with pytest.raises(StaleShard):
            content_module.read(content, 0, 9)
        below.distrust()
        assert {value for _, columns in shown(below, 0) for ext, value in columns if ext == b"depth"} == {b"new"}
        # One key less: refused, and that is kept.
        write(sets.path_of(other), depth(b"c", b"d/b"))
        below.distrust()
        for _ in range(2):
            with pytest.raises(ViewError, match="'d/a' is not in the joined set"):
                indexed(below.record, 0)
        assert [f"{path}: {text}" for path, text in below.damaged()] == [str(_error_of(below))]


def test_a_merged_tree_shows_what_was_not_refused(tmp_path: Path) -> None:
    shards = [write(tmp_path / f"s{n}.tar", [(b"k%d" % n, [(b"jpg", b"J")])]) for n in range(2)]
    file = as_lines(tmp_path / "l.jsonl", [{"key": "k0", "label": 0}, {"key": "k1", "label": 1}])
    with a_view(tmp_path, shards, Composition(associate=(str(file),))) as below:
        tree = make_tree(below, View(partial=True, merge=True))
        tree.prepare()
        assert names_in(tree) == [b"k0", b"k1"]
        as_lines(file, [{"key": "k1", "label": "new"}])
        below.distrust()
        settle(below)
        assert names_in(tree) == [b"k1"]
        whole = make_tree(below, View(merge=True))
        with pytest.raises(UnreadableShard, match=r"'k0' is not in .*; until it can be read, names .* missing"):
            list(whole.listing(1, 2))
        with pytest.raises(UnreadableShard):
            whole.lookup(1, b"k0")
        assert whole.lookup(1, b"k1").size == 0
        assert read(below, 1, tree.resolve(b"k1/label").inode & (1 << 30) - 1) == b"new"
        assert tree.totals().damaged == 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(below.index, "_write", _refuse_import)  # the table of names is as it was
            tree._generation = -1  # type: ignore[attr-defined]
            tree.prepare()


def test_what_another_process_refused_is_settled(tmp_path: Path) -> None:
    """The request may have been for another shard, as in one tree over all shards."""
    shard = write(tmp_path / "s.tar", [(b"k", [(b"jpg", b"J")])])
    file = as_lines(tmp_path / "l.jsonl", [{"key": "k", "label": 0}])
    wanted = Composition(associate=(str(file),))
    with a_view(tmp_path, [shard], wanted) as below, a_view(tmp_path, [shard], wanted, indexed=False) as another:
        as_lines(file, [{"key": "other", "label": 0}])
        below.distrust()
        another.distrust()
        with pytest.raises(NotIndexed):
            another.record(0)
        with pytest.raises(ViewError):
            indexed(below.record, 0)
        another.try_index(0)
        with pytest.raises(ViewError):
            another.record(0)


def _error_of(below: ShardSet) -> ViewError:
    with pytest.raises(ViewError) as caught:
        below.record(0)
    return caught.value


def test_a_shard_that_changes_below_a_view(tmp_path: Path) -> None:
    shard = write(tmp_path / "s.tar", AB)
    with a_view(tmp_path, [shard], Composition(columns=columns_of(["jpg;png;JPG"]))) as below:
        assert len(shown(below, 0)) == 3
        content = below.content(0, below.tag(0), 0)
        found = os.stat(shard.path)
        write(sets.path_of(shard), [(key, [(ext, bytes(len(data))) for ext, data in one]) for key, one in AB])
        os.utime(shard.path, ns=(found.st_atime_ns, found.st_mtime_ns))
        with pytest.raises(StaleShard):
            content_module.read(content, 0, 9)
        below.distrust()
        assert [columns[0][1].strip(b"\0") for _, columns in shown(below, 0)] == [b"", b"", b""]


def test_where_a_file_comes_from(tmp_path: Path) -> None:
    shard = write(tmp_path / "s.tar", [(b"d/k", [(b"json", b'{"t": "T"}')])])
    other = write(tmp_path / "j.tar", [(b"x", [(b"a", b"")]), (b"./d/k", [(b"depth", b"D")])])
    file = as_lines(tmp_path / "l.jsonl", [{"key": "d/k", "cls": 3}])
    os.utime(file, ns=(0, 1_600_000_000_123_456_789))
    wanted = Composition(
        join=(str(tmp_path / "j.tar"),),
        associate=(str(file),),
        columns=columns_of(["meta=json", "depth", "cls", "none"]),
        fields=fields_of(["t.txt=json:t"]),
        missing=EMPTY,
    )
    with a_view(tmp_path, [shard], wanted) as again:
        inode = make_tree(again, View()).resolve(b"s/d/k/t.txt").inode
    with a_view(tmp_path, [shard], wanted) as below:
        tree = make_tree(below, View())
        assert tree.resolve(b"s/d/k/t.txt").inode == inode

        def told(path: bytes, what: bytes) -> bytes:
            return tree.getxattr(tree.resolve(b"s/d/k/" + path).inode, b"user.wdsfs." + what)

        for path in (b"meta", b"t.txt"):
            assert (told(path, b"shard"), told(path, b"member")) == (shard.path, b"d/k.json")
            assert (told(path, b"key"), told(path, b"offset")) == (b"d/k", b"512")
        assert told(b"depth", b"shard") == other.path
        assert told(b"depth", b"member") == b"./d/k.depth"
        assert told(b"depth", b"key") == b"./d/k"
        assert int(told(b"depth", b"offset")) == 3 * tars.BLOCK - tars.BLOCK
        assert told(b"cls", b"shard") == os.fsencode(file)
        assert tree.resolve(b"s/d/k/cls").mtime_ns == 1_600_000_000_123_456_789
        assert (told(b"cls", b"key"), told(b"cls", b"member")) == (b"d/k", b"d/k.cls")
        assert told(b"none", b"shard") == shard.path
        assert tree.getxattr(tree.resolve(b"s/d/k").inode, b"user.wdsfs.shard") == shard.path
        with pytest.raises(NoSuchAttribute):
            told(b"cls", b"offset")
        for path in (b"meta", b"t.txt", b"depth", b"cls", b"none"):  # rsync -X fails otherwise
            inode = tree.resolve(b"s/d/k/" + path).inode
            assert all(tree.getxattr(inode, name) for name in tree.xattrs(inode))


def test_records_of_views_are_kept_and_dropped_with_their_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = write(tmp_path / "s.tar", AB)
    wanted = Composition(columns=columns_of(["jpg;png;JPG"]))
    with a_view(tmp_path, [shard], wanted):
        pass
    with monkeypatch.context() as patch:
        patch.setattr(view_set, "compose", _refuse_import)
        with a_view(tmp_path, [shard], wanted) as below:
            assert len(shown(below, 0)) == 3
    with contextlib.closing(open_index(tmp_path / "index")) as index:
        assert index.prune() == 0
    sets.path_of(shard).unlink()
    with contextlib.closing(open_index(tmp_path / "index")) as index:
        assert index.prune() == 2


def test_a_record_below_that_is_gone_is_made_again(tmp_path: Path) -> None:
    shard = write(tmp_path / "s.tar", AB)
    with a_view(tmp_path, [shard], Composition(columns=columns_of(["jpg;png;JPG"]))) as below:
        for ask in (below.plain.record, lambda number: below.content(number, below.tag(number), 0)):
            below._drop_records()
            below.index.forget(shard.path)
            with pytest.raises(NotIndexed) as caught:
                ask(0)
            Attempts().index(caught.value)
            ask(0)
        assert len(shown(below, 0)) == 3


def test_a_joined_record_that_is_gone_is_made_again_for_an_attribute(tmp_path: Path) -> None:
    """Its number there says nothing of the shards that are mounted."""
    shard = write(tmp_path / "s.tar", [(b"k", [(b"json", b"{}")])])
    others = [
        write(tmp_path / "other0.tar", [(b"x", [(b"depth", b"0")])]),
        write(tmp_path / "other1.tar", [(b"k", [(b"depth", b"1")])]),
    ]
    with a_view(tmp_path, [shard], Composition(join=(os.fsdecode(tmp_path / "other{0,1}.tar"),))) as below:
        tree = make_tree(below, View())
        inode = tree.resolve(b"s/k/depth").inode
        below.index.forget(others[1].path)
        with pytest.raises(NotIndexed) as caught:
            tree.getxattr(inode, b"user.wdsfs.shard")
        assert (caught.value.shards, caught.value.number) == (below.sources[1], 1)
        assert indexed(tree.getxattr, inode, b"user.wdsfs.member") == b"k.depth"


def test_a_derived_record_says_of_what_it_is_made(tmp_path: Path) -> None:
    """As docs/reference/formats.md has it: places with kind, path, fingerprint; an address for each member."""
    shard = write(tmp_path / "s.tar", [(b"d/a", [(b"jpg", b"J"), (b"json", b'{"x": 1}')])])
    file = as_lines(tmp_path / "l.jsonl", [{"key": "d/a", "label": 7}])
    wanted = Composition(
        associate=(str(file),),
        fields=fields_of(["x=json:x"]),
        columns=columns_of(["jpg", "label", "none"]),
        missing=EMPTY,
    )
    with a_view(tmp_path, [shard], wanted) as below:
        one, plain = below.record(0), below.plain.record(0)
        assert one.view is not None
        places = one.view["places"]
        assert places[0]["path"] == os.fsdecode(shard.path)
        assert tuple(places[0]["fingerprint"]) == tuple(plain.fingerprint)
        assert one.fingerprint[:2] == plain.fingerprint[:2]
        assert one.fingerprint[2] != plain.fingerprint[2]
        assert not any(one.column["member.body"])
        kinds = {
            one.extension(one.column["member.ext"][member]): places[
                one.column["member.head"][member] >> one.view["shift"]
            ]["kind"]
            for member in range(one.members)
        }
    assert kinds == {b"jpg": "shard", b"x": "field", b"label": "values", b"none": "empty"}


def test_a_table_of_labels_is_as_format_md_says(tmp_path: Path) -> None:
    file = as_lines(tmp_path / "l.jsonl", [{"key": "d/a", "label": 7}])
    labelled(tmp_path, file, missing=SKIP)
    [table] = Path(os.environ["WDSFS_CACHE_DIR"]).glob("*.labels")
    with contextlib.closing(sqlite3.connect(table)) as db:
        [(number, name)] = db.execute("SELECT number, name FROM columns")
        packed = number.to_bytes(2, "little") + (1).to_bytes(4, "little") + b"7"
        assert (name, *db.execute("SELECT * FROM labels")) == (b"label", (b"d/a", 0, 1, 0, packed))


def test_a_damaged_table_of_labels_is_made_anew_for_the_next_one(tmp_path: Path) -> None:
    (file,) = label_files.label_files(str(as_csv(tmp_path / "l.csv")))
    stamp = Fingerprint.at(file.path)

    def found() -> dict[bytes, list[label_table.LabelRow]]:
        with open_labels((file,), (stamp,)) as table:
            return table.find([b"c", b"d/a"])

    right = found()
    assert right
    (table,) = Path(os.environ["WDSFS_CACHE_DIR"]).glob("*.labels")
    with open(table, "r+b") as stream:
        stream.seek(4096)  # behind the page that says what else there is: rows
        stream.write(bytes(4096))
    with pytest.raises(UnreadableShard, match=r"the table of .*l\.csv"):
        found()
    assert found() == right


def test_sqlite_keeps_what_is_new_beside_the_file(tmp_path: Path) -> None:
    shard, file = write(tmp_path / "s.tar", AB), as_sqlite(tmp_path / "l.db")
    with contextlib.closing(sqlite3.connect(file)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        with a_view(tmp_path, [shard], Composition(associate=(str(file),))) as below:
            for text in ("one", "two"):
                db.execute("UPDATE t SET cls = ?", (text,))
                db.commit()
                below.distrust()
                assert {dict(columns)[b"cls"] for _, columns in shown(below, 0)} == {text.encode()}
                tag = below.tag(0)
                below.distrust()  # reading has touched the file, and changed nothing
                indexed(below.record, 0)
                assert below.tag(0) == tag


# --- on a mount -------------------------------------------------------------------------------------------


def test_labels_and_joined_shards_change_under_a_mount(program: Program) -> None:
    program.write("s.tar", sets.content(0))
    keys = ["d0/0-0", "d1/0-1", "d0/0-2"]
    file = as_lines(program.home / "l.jsonl", [{"key": key, "label": "old"} for key in keys])
    write(program.home / "j.tar", depth(*map(os.fsencode, keys)))
    options = ("--associate", "l.jsonl", "--join", "j.tar", "--lazy")
    with program.mounted("s.tar", *options) as mounted:
        sample = mounted.path / "s" / "d0" / "0-0"
        assert (sample / "label").read_text() == "old"
        assert (sample / "depth").read_bytes() == b"Dd0/0-0"
        assert sorted(os.listdir(sample)) == ["cls", "depth", "label", "txt"]
        status = program.json("status", mounted.path)[0]
        assert status["composition"] == "--join j.tar --associate l.jsonl"
        mounted.expected.append("tables, joined shards or lists have changed")
        mounted.allowed.append(r"has changed|nothing is shown of this shard|is not in ")
        as_lines(file, [{"key": key, "label": "newer"} for key in keys])
        wait_until(lambda: asked(Path.read_text, sample / "label") == "newer", "the new label")
        assert (sample / "label").stat().st_size == 5
        write(program.home / "j.tar", depth(*map(os.fsencode, keys[1:])))
        wait_until(lambda: asked(Path.read_text, sample / "label") is None, "the refusal")
        write(program.home / "j.tar", depth(*map(os.fsencode, [*keys, "more"])))
        wait_until(lambda: asked(Path.read_text, sample / "depth") == "Dd0/0-0", "the joined column")


T = TypeVar("T")


def asked(question: Callable[[Path], T], path: Path) -> T | None:
    """Return the answer to a question about a path of a mount; None for an error."""
    try:
        return question(path)
    except OSError:
        return None


def test_a_class_that_is_too_long_for_the_others_is_never_shown(program: Program) -> None:
    """A shard changes below a mount, and 100 would sort before 11."""
    numbered(program.home / "a.tar", b"0", b"11")
    numbered(program.home / "b.tar", b"5")
    with program.mounted("{a,b}.tar", "--layout", "classes", "--lazy") as mounted:
        assert sorted(os.listdir(mounted.path)) == ["00", "05", "11"]
        numbered(program.home / "new.tar", b"5", b"100")
        (program.home / "new.tar").rename(program.home / "b.tar")
        wait_until(lambda: "05" not in (asked(os.listdir, mounted.path) or ()), "the refusal")
        mounted.expect_log("has changed", "sample 'k001' has the class 100, .*--class-digits 3")
        mounted.allow_log("")
        assert (mounted.path / "11" / "a--k001.jpg").read_bytes() == b"11"
        for path in (mounted.path, mounted.path / "100"):
            with pytest.raises(OSError, match="Input/output error"):
                os.listdir(path)
    options = ("--layout", "classes", "--class-digits", "4")
    with program.mounted("{a,b}.tar", *options, at=program.directory("wide")) as mounted:
        assert sorted(os.listdir(mounted.path)) == ["0000", "0005", "0011", "0100"]
        assert mounted.status()["composition"] == "--class-from cls --class-digits 4"


def test_options_that_do_not_go_together() -> None:
    options: dict[str, Any] = dict.fromkeys(("columns", "join", "associate"), ())
    options |= {"ignore_case": False, "missing": ERROR, "duplicates": ERROR}
    for name, value in (("class_from", "x"), ("class_names", "x"), ("class_digits", 0)):
        further = {"class_from": None, "class_names": None, "class_digits": None, name: value}
        with pytest.raises(UsageError, match="is for --layout classes"):
            composition_of("samples", **options, **further)
    with pytest.raises(UsageError, match="is for --layout samples"):
        TreeOptions("classes", "full").view()


def test_what_commands_refuse(program: Program) -> None:
    write(program.home / "s.tar", AB)
    mount = ("mount", "s.tar", program.mountpoint)
    assert "sample 'c' has no column 'cls'" in program.refused(*mount, "--columns", "cls", code=3)
    overlay = ("--overlay", program.home / "o")
    refused = program.refused(*mount, "--columns", "jpg;JPG;png", *overlay, code=2)
    assert "--overlay cannot be combined with --keys, --columns" in refused
    for options, column in (((), "cls"), (("--class-from", "json:kind"), "json")):
        refused = program.refused(*mount, "--layout", "classes", *options, *overlay, code=2)
        assert re.search(f"--overlay .* --layout classes: .*SHARD/KEY/{column}", refused)
    listed = program.run("ls", "-R", "s.tar", "s/d", "--columns", "jpg;png", "--missing", "skip").stdout
    assert listed == b"a/\na/jpg\nb/\nb/png\n"
    shown_ = program.run("cat", "s.tar", "s/c/jpg", "--columns", "jpg", "--ignore-case", "--missing", "empty")
    assert shown_.stdout == b"C"
