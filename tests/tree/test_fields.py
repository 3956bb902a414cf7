"""`--columns NAME=...` and `--field`: what they show, against a model; on a mount, by commands and in an image."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import Program
from tests.thorough import examples
from tests.tree.test_view_record import BROKEN, Sample, a_view, as_lines, one_shard, shown, write
from wdsfs.errors import CorruptShard, UsageError, ViewError
from wdsfs.tar.problems import BROKEN_FIELD
from wdsfs.tree import content as content_module
from wdsfs.tree import json_fields
from wdsfs.tree.composition import (
    EMPTY,
    SKIP,
    Column,
    Composition,
    columns_of,
    composition_of,
    fields_of,
    refuse_equal_names,
)
from wdsfs.tree.indexing import indexed
from wdsfs.tree.merged_tree import make_tree
from wdsfs.tree.tree import View


def document(**values: Any) -> bytes:
    return json.dumps(values).encode()


# --- renamed columns --------------------------------------------------------------------------------------------

MIXED: list[Sample] = [
    (b"a", [(b"png", b"P"), (b"jpg", b"J"), (b"cls", b"0")]),
    (b"b", [(b"png", b"PP"), (b"cls", b"1")]),
]


def test_a_named_column_has_the_first_alternative_in_the_order_of_typing(tmp_path: Path) -> None:
    assert one_shard(tmp_path, MIXED, columns=columns_of(["img=jpg;png"])) == [
        (b"a", [(b"img", b"J")]),
        (b"b", [(b"img", b"PP")]),
    ]
    # Without a name it is the first in the tar, as before.
    assert one_shard(tmp_path, MIXED, columns=columns_of(["jpg;png"]))[0] == (b"a", [(b"png", b"P")])
    # One member may have several names.
    found = one_shard(tmp_path, MIXED, columns=columns_of(["img=jpg;png", "thumb=png", "png", "label.txt=cls"]))
    assert found[0] == (b"a", [(b"thumb", b"P"), (b"png", b"P"), (b"img", b"J"), (b"label.txt", b"0")])


def test_what_is_typed_is_read_and_written_alike() -> None:
    assert columns_of(["img=jpg;png", "a;b", "x=y=z"]) == (
        Column((b"jpg", b"png"), b"img"),
        Column((b"a", b"b")),
        Column((b"y=z",), b"x"),
    )
    wanted = Composition(columns=columns_of(["img=jpg;png"]), fields=fields_of(["caption.txt=json:a.b[0]"]))
    assert wanted.text == "--columns 'img=jpg;png' --field 'caption.txt=json:a.b[0]'"


REFUSED: list[tuple[list[str], list[str]]] = [
    *(([text], []) for text in ("", "jpg;", ";", "a/b", "=jpg", "a/b=jpg", "img=")),
    (["img=jpg", "img=png"], []),
    (["jpg=png", "jpg"], []),
    (["txt=cls"], ["txt=json:a"]),
    ([], ["txt=json:a", "txt=json:b"]),
    *(([], [text]) for text in ("txt", "txt=json", "=json:a", "..=json:a", "txt=json:a..b", "txt=json:a[x]")),
    *(([], [text]) for text in ('txt=json:["\\u12"]', "txt=json:" + ".".join("a" * 65))),
]


@pytest.mark.parametrize(("columns", "fields"), REFUSED)
def test_options_that_cannot_be_meant(columns: list[str], fields: list[str]) -> None:
    with pytest.raises(UsageError) as refused:
        refuse_equal_names(columns_of(columns), fields_of(fields))
    assert f"{'--field' if fields else '--columns'} {[*columns, *fields][-1]!r}" in str(refused.value)


# --- fields -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("text", b'caf\xc3\xa9 "x"'),
        ("none", None),
        ("null", None),
        ("yes", b"true"),
        ("whole", b"7"),
        ("part", b"0.5"),
        ("empty", b""),
        ("list", '[1, "é", null]'.encode()),
        ("list[1]", "é".encode()),
        ("list[-3]", b"1"),
        ("list[3]", None),
        ("list[-4]", None),
        ("list.a", None),
        ("text[0]", None),
        ("deep.er[0].x", b"y"),
        ("deep", b'{"er": [{"x": "y"}], "a.b": {"[0]": 1}}'),
        ('deep["a.b"]["[0]"]', b"1"),
    ],
)
def test_what_a_file_of_a_field_holds(tmp_path: Path, path: str, content: bytes | None) -> None:
    deep = {"er": [{"x": "y"}], "a.b": {"[0]": 1}}
    values = {"null": None, "yes": True, "whole": 7, "part": 0.5, "empty": "", "list": [1, "é", None]}
    data = document(text='café "x"', deep=deep, **values)
    samples: list[Sample] = [(b"d/k", [(b"json", data), (b"jpg", b"J")])]
    made = [] if content is None else [(b"caption.txt", content)]
    assert one_shard(tmp_path, samples, fields=fields_of([f"caption.txt=json:{path}"])) == [
        (b"d/k", [(b"json", data), (b"jpg", b"J"), *made])
    ]


def test_a_column_of_the_name_of_a_field(tmp_path: Path) -> None:
    samples: list[Sample] = [(b"a", [(b"json", document(t="A")), (b"txt", b"own")])]
    fields = fields_of(["txt=json:t"])
    with pytest.raises(ViewError, match=r"'a' has a column with the name of a --field; --duplicates skip"):
        one_shard(tmp_path, samples, fields=fields)
    # What is not shown does not clash.
    [(_, columns)] = one_shard(tmp_path, samples, fields=fields, columns=columns_of(["meta=json"]))
    assert columns[1] == (b"txt", b"A")
    # A field that --columns names is a column like others: refused where it is missing.
    with pytest.raises(ViewError, match="sample 'a' has no column"):
        one_shard(tmp_path, samples, fields=fields_of(["t=json:none"]), columns=columns_of(["caption=t"]))


def test_fields_of_joined_and_labelled_columns(tmp_path: Path) -> None:
    write(tmp_path / "j.tar", [(b"k", [(b"meta.json", document(t="joined"))])])
    labels = as_lines(tmp_path / "l.jsonl", [{"key": "k", "extra": {"t": "label"}}])
    found = one_shard(
        tmp_path,
        [(b"k", [(b"JSON", document(t="own"))])],
        join=(str(tmp_path / "j.tar"),),
        associate=(str(labels),),
        ignore_case=True,
        fields=fields_of(["a=json:t", "b=meta.json:t", "c=extra:t"]),
        columns=columns_of(["x=json"]),
    )
    assert found == [(b"k", [(b"x", document(t="own")), (b"a", b"own"), (b"b", b"joined"), (b"c", b"label")])]


def test_what_is_no_json_is_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_fields, "JSON_MAX", 100)
    broken = [b"", b"{", b"[" * 90, b'{"t": "%s"}' % (b"x" * 100), b'{"t": "\\ud800"}', b"\xff\xfe\x00"]
    samples: list[Sample] = [(b"k%d" % n, [(b"json", data)]) for n, data in enumerate(broken)]
    samples.append((b"right", [(b"json", document(t="T"))]))
    shard = write(tmp_path / "s.tar", samples)
    with a_view(tmp_path, [shard], Composition(fields=fields_of(["t=json:t"]))) as below:
        record = indexed(below.record, 0)
        problems = [one.text for one in record.problems if one.kind == BROKEN_FIELD]
        assert [text.split(":")[0] for text in problems] == [f"k{n}.json" for n in range(len(broken))]
        assert "is parsed up to" in problems[3]
        made = [member for member in range(record.members) if record.extension(member) == b"t"]
        assert [record.size_and_time(member)[0] for member in made] == [*(max(1, len(one)) for one in broken), 1]
        for member in made[:-1]:
            content = below.content(0, below.tag(0), member)
            with pytest.raises(CorruptShard, match=r"s\.tar: k\d\.t: "):
                content_module.read(content, 0, 1)
        assert content_module.read(below.content(0, below.tag(0), made[-1]), 0, 9) == b"T"


def test_any_depth_is_shown_or_fails_to_be_read(tmp_path: Path) -> None:
    documents = {n: b'{"t": ' + b"[" * n + b"]" * n + b"}" for n in range(1, 3000, 53)}
    samples: list[Sample] = [(b"k%d" % n, [(b"json", data)]) for n, data in documents.items()]
    shard = write(tmp_path / "s.tar", samples)
    with a_view(tmp_path, [shard], Composition(fields=fields_of(["t=json:t"]))) as below:
        found = dict(shown(below, 0))
    for key, columns in samples:
        assert dict(found[key])[b"t"] in (BROKEN, columns[0][1][6:-1])
    assert dict(found[b"k1"])[b"t"] == b"[]"


def test_only_what_is_shown_is_a_problem(tmp_path: Path) -> None:
    shard = write(tmp_path / "s.tar", [(b"a", [(b"txt", b"own"), (b"json", b"{")]), (b"b", [(b"txt", b"own")])])
    fields = fields_of(["c=json:a", "d=json:b"])
    for columns, count in ((["x=txt;c", "y=txt;d"], 0), (["x=txt;c"], 1), (["x=c;txt", "y=txt;d"], 1)):
        with a_view(tmp_path, [shard], Composition(fields=fields, columns=columns_of(columns))) as below:
            assert [one.kind for one in indexed(below.record, 0).problems] == [BROKEN_FIELD] * count


def test_a_huge_document_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_fields, "JSON_MAX", 1000)
    shard = write(tmp_path / "s.tar", [(b"k", [(b"json", b'"' + b"x" * 5000 + b'"')])])
    with a_view(tmp_path, [shard], Composition(fields=fields_of(["t=json:t"]))) as below:
        content = below.content(0, below.tag(0), 1)
        monkeypatch.setattr(content_module, "read_stored", lambda *_: 1 / 0)
        with pytest.raises(CorruptShard, match="5,002 bytes"):
            content_module.read(content, 0, 1)


def test_the_class_may_be_a_field(tmp_path: Path) -> None:
    shard = write(tmp_path / "s.tar", [(b"k", [(b"json", document(tags=["cat"]))])])
    for options in (
        {"class_from": b"json", "class_field": "tags[0]"},
        {"class_from": b"tag", "fields": fields_of(["tag=json:tags[0]"])},
    ):
        wanted = Composition(classes=True, **options)  # type: ignore[arg-type]  # of two types
        with a_view(tmp_path, [shard], wanted) as below:
            assert make_tree(below, View("classes", merge=True)).resolve(b"cat/s--k.json").size


# --- against a model ------------------------------------------------------------------------------------------

EXTENSIONS = [b"jpg", b"png", b"txt", b"json"]
LISTS = st.lists(st.integers(), max_size=2)
VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3), LISTS)
DOCUMENTS = st.one_of(
    st.dictionaries(st.sampled_from("ab"), st.one_of(VALUES, st.dictionaries(st.just("b"), VALUES))), VALUES
).map(lambda value: json.dumps(value).encode())
CONTENTS = {b"json": st.one_of(DOCUMENTS, st.just(b"{"))}


@st.composite
def samples_of(draw: st.DrawFn, extensions: Sequence[bytes] = EXTENSIONS) -> list[Sample]:
    found: list[Sample] = []
    for number in sorted(draw(st.sets(st.integers(0, 3), max_size=3))):
        chosen = draw(st.lists(st.sampled_from(extensions), unique=True, min_size=1))
        columns = [(one, draw(CONTENTS.get(one, st.binary(max_size=3)))) for one in chosen]
        found.append((b"k%d" % number, columns))
    return found


TYPED = ["img=jpg;png", "img=png;jpg", "jpg;png", "png", "x=txt;c", "txt", "c", "y=json;c;d", "PNG;depth", "n;TXT"]
COLUMNS = st.lists(st.sampled_from(TYPED), max_size=3, unique=True)
TYPED_FIELDS = ["c=json:a", "d=json:a.b", "txt=json:b", "e=json:a[0]"]
FIELDS = st.lists(st.sampled_from(TYPED_FIELDS), max_size=2, unique=True)


OTHERS = st.lists(samples_of([b"depth", b"TXT", b"json"]), max_size=2)
ROW = st.fixed_dictionaries(
    {"key": st.sampled_from(["k0", "k1", "k2"]), "n": st.just("N"), "TXT": st.just("L")},
    optional={"json": st.just('{"a": "of a label"}')},
)
POLICY = st.sampled_from([SKIP, EMPTY])


@examples(150)
@given(
    *(st.lists(samples_of(), min_size=1, max_size=2), OTHERS, st.lists(ROW, max_size=3), COLUMNS, FIELDS),
    *(POLICY, POLICY, st.booleans(), st.booleans()),
)
def test_a_view_is_what_the_model_says(
    sets: list[list[Sample]],
    others: list[list[Sample]],
    rows: list[dict[str, str]],
    columns: list[str],
    fields: list[str],
    missing: str,
    duplicates: str,
    ignore_case: bool,
    lazy: bool,
) -> None:
    typed: dict[str, Any] = {"columns": columns, "field": fields, "missing": missing, "duplicates": duplicates}
    typed |= dict.fromkeys(["class_from", "class_names", "class_digits"]) | {"ignore_case": ignore_case}
    try:
        wanted = composition_of("samples", **typed, join=(), associate=())
    except UsageError:
        return
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        shards = [write(home / f"s{number}.tar", samples) for number, samples in enumerate(sets)]
        if others:
            wanted = replace(wanted, join=(f"{home}/j*.tar",))
            for number, samples in enumerate(others):
                write(home / f"j{number}.tar", samples)
        if rows:
            wanted = replace(wanted, associate=(str(as_lines(home / "l.jsonl", rows)),))
        with a_view(home, shards, wanted, indexed=not lazy) as below:
            found = [shown(below, number) for number in range(len(shards))]
    for number, samples in enumerate(sets):
        beside = others[number] if len(others) == len(sets) else []
        expected = [model(sample, wanted, beside, others, rows) for sample in samples]
        assert found[number] == [one for one in expected if one is not None]


Columns = list[tuple[bytes, bytes]]


def model(
    sample: Sample, wanted: Composition, beside: list[Sample], others: list[list[Sample]], rows: Sequence[Any]
) -> Sample | None:
    """The sample as it should be shown; None if it is left out."""
    key, columns, read = sample[0], [*sample[1]], [field.column for field in wanted.fields]
    if others:
        joined = [one for one in beside if one[0] == key]
        joined = joined or [one for other in others for one in other if one[0] == key]
        if not is_kept(joined, wanted):
            return None
        further = [one for one in joined[0][1] if asks(wanted, one[0], read)] if len(joined) == 1 else []
        new = [one for one in further if fold(wanted, one[0]) not in names_in(wanted, columns)]
        if new != further and wanted.duplicates == SKIP:
            return None
        columns += new
    if rows:
        lines = [row for row in rows if row["key"].encode() == key]
        if not is_kept(lines, wanted):
            return None
        labels = [(name.encode(), value.encode()) for name, value in lines[0].items()] if len(lines) == 1 else []
        new = [one for one in labels if one[0] != b"key" and asks(wanted, one[0], read)]
        columns = [one for one in columns if fold(wanted, one[0]) not in names_in(wanted, new)] + new
    made: Columns = []
    for field in wanted.fields:
        source = [data for ext, data in columns if fold(wanted, ext) == fold(wanted, field.column)]
        value = field_of(source[0], field.path) if source else None
        is_there = fold(wanted, field.name) in names_in(wanted, columns)
        if value is not None and is_there and asks(wanted, field.name):
            if wanted.duplicates == SKIP:
                return None
        elif value is not None:
            made.append((field.name, value))
    if wanted.columns:
        chosen = choice(wanted, columns + made, len(columns))
    else:
        chosen = [(fold(wanted, ext), data) for ext, data in columns + made]
    return (key, chosen) if chosen else None


def fold(wanted: Composition, extension: bytes) -> bytes:
    return extension.lower() if wanted.ignore_case else extension


def asks(wanted: Composition, extension: bytes, further: Sequence[bytes] = ()) -> bool:
    named = [*further, *(one for column in wanted.columns for one in column.alternatives)]
    return not wanted.columns or fold(wanted, extension) in {fold(wanted, one) for one in named}


def names_in(wanted: Composition, columns: Columns) -> set[bytes]:
    return {fold(wanted, ext) for ext, _ in columns}


def is_kept(matches: Sequence[object], wanted: Composition) -> bool:
    policy = {0: wanted.missing, 1: EMPTY}.get(len(matches), wanted.duplicates)
    return policy != SKIP


def choice(wanted: Composition, columns: Columns, own: int) -> Columns | None:
    """The columns that outputs name, and files of fields, those from `own` on, that none names."""
    free = [at for at in range(own, len(columns)) if not asks(wanted, columns[at][0])]
    found, taken, empty = [(at, columns[at][0]) for at in free], set[int](), []
    for column in wanted.columns:
        typed = {fold(wanted, one): one for one in reversed(column.alternatives)}
        typed |= {one: one for one in column.alternatives}
        names = {at: typed.get(ext) or typed.get(fold(wanted, ext)) for at, (ext, _) in enumerate(columns)}
        matches = [(at, name) for at, name in names.items() if name is not None]
        if column.name:
            matches.sort(key=lambda match: column.alternatives.index(match[1]))  # used at once
        if not matches and wanted.missing == SKIP:
            return None
        if not matches:
            empty.append((column.name or column.alternatives[0], b""))
        elif column.name or matches[0][0] not in taken:
            taken |= set() if column.name else {matches[0][0]}
            found.append((matches[0][0], column.name or matches[0][1]))
    return [(name, columns[at][1]) for at, name in sorted(found, key=lambda one: one[0])] + empty


def field_of(data: bytes, path: str) -> bytes | None:
    try:
        value = json.loads(data)
    except ValueError:
        return BROKEN
    for step in path.replace("[0]", ".0").split("."):
        try:
            value = value[0] if step == "0" and isinstance(value, list) else dict(value)[step]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    if value is None:
        return None
    return value.encode() if isinstance(value, str) else json.dumps(value, ensure_ascii=False).encode()


# --- in every command -------------------------------------------------------------------------------------------

OPTIONS = ("--columns", "img=jpg;png", "--field", "caption.txt=json:caption")


def captions(path: Path) -> None:
    write(
        path,
        [
            (b"d/0", [(b"jpg", b"J"), (b"json", document(caption="a cat"))]),
            (b"d/1", [(b"png", b"PP"), (b"json", document())]),
            (b"d/2", [(b"png", b"P"), (b"json", b'{"caption": ')]),
        ],
    )


def test_a_mount_shows_names_and_fields(program: Program) -> None:
    captions(program.home / "s.tar")
    with program.mounted("s.tar", *OPTIONS, "--names", "full") as mounted:
        mounted.expected.append(r"d/2\.json: is not JSON")
        mounted.allowed.append("is not JSON")
        top = mounted.path / "s" / "d"
        shown_ = {one: sorted(os.listdir(top / one)) for one in os.listdir(top)}
        assert shown_ == {"0": ["0.caption.txt", "0.img"], "1": ["1.img"], "2": ["2.caption.txt", "2.img"]}
        assert (top / "0" / "0.caption.txt").stat().st_size == len("a cat")
        assert (top / "0" / "0.caption.txt").read_text() == "a cat"
        assert (top / "1" / "1.img").read_bytes() == b"PP"
        with pytest.raises(OSError, match="Input/output error") as failed:
            (top / "2" / "2.caption.txt").read_bytes()
        assert failed.value.errno == errno.EIO
        for change in (
            lambda: (top / "0" / "0.caption.txt").write_text("x"),
            lambda: (top / "0" / "0.img").unlink(),
            lambda: (top / "1" / "1.caption.txt").write_text("x"),
        ):
            with pytest.raises(OSError, match="Read-only file system"):
                change()
        (status,) = program.json("status", mounted.path)
        assert status["composition"] == "--columns 'img=jpg;png' --field caption.txt=json:caption"
        assert "d/2.json: is not JSON" in (mounted.path / ".wdsfs" / "problems.txt").read_text()


def test_a_field_that_no_sample_has_is_mentioned(program: Program) -> None:
    write(program.home / "s.tar", [(b"k", [(b"jpg", b"J"), (b"json", document(caption="C"))])])
    options = ("--field", "t.txt=json:capton")
    assert b"--field t.txt=json:capton: no sample" in program.run("ls", "s.tar", *options).stderr
    assert b"--field" not in program.run("ls", "-q", "s.tar", *options).stderr
    assert b"no sample" not in program.run("ls", "s.tar", *OPTIONS).stderr
