"""Names of files in tables: which sample a row means, with or without its extension and its directories."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Program
from tests.tree.test_view_record import Sample, a_view, shown, write
from wdsfs.names import PLAIN, Reading
from wdsfs.spec.expand import expand
from wdsfs.tree.composition import EMPTY, Composition
from wdsfs.tree.label_names import sample_name

NAMES = {
    "0001": (b"0001", False),
    "./a/0001": (b"a/0001", False),
    "images/0001.jpg": (b"images/0001", True),
    "0001.left.JPG": (b"0001", True),
    "v1.0/0001": (b"v1.0/0001", False),
    "17.0": (b"17", False),  # a text of CSV that pandas has written
    "a/17.0": (b"a/17.0", False),
    ".hidden": (b".hidden", False),
    r"a\b\0001.jpg": (b"a/b/0001", True),
    "/data/upload/12/0a1b2c3d-0001.jpg": (b"0001", True),
    "/data/local-files/?d=images/my%20photo.jpg": (b"images/my photo", True),
    "s3://bucket/a/0001.jpg": (b"s3://bucket/a/0001", True),
}
LAST_DOT = {
    "1.2.840.55": (b"1.2.840.55", False),
    "1.2.840.55.dcm": (b"1.2.840.55", True),
    "talk_11.708_13.970.flac": (b"talk_11.708_13.970", True),
    "talk.final": (b"talk.final", False),
}


def test_what_a_name_stands_for() -> None:
    assert {name: sample_name(name.encode(), PLAIN) for name in NAMES} == NAMES
    dotted = Reading(last_dot=True)
    assert {name: sample_name(name.encode(), dotted) for name in LAST_DOT} == LAST_DOT


# The rows of a table; the keys of the samples in two shards, each with the row that it gets, if any.
MATCHES: dict[str, tuple[list[str], list[dict[str, str | None]]]] = {
    "with an extension": (["a/1.jpg", "a/2.png"], [{"a/1": "a/1.jpg"}, {"a/2": "a/2.png", "a/3": None}]),
    "rows with directories": (["/x/a/1.jpg", "b/2.jpg"], [{"1": "/x/a/1.jpg"}, {"2": "b/2.jpg"}]),
    "keys with directories": (["1.jpg", "2.jpg"], [{"c/a/1": "1.jpg"}, {"b/2": "2.jpg", "b/3": None}]),
    "some directories": (["/x/a/1.wav", "/x/b/1.wav"], [{"a/1": "/x/a/1.wav"}, {"b/1": "/x/b/1.wav"}]),
    "other directories": (["a/1.jpg"], [{"b/1": None, "xa/1": None}, {"1/a": None}]),
    "keys are exact": (["1", "a/2"], [{"a/1": None, "2": None}, {"1": "1"}]),
    "a key wins over a file": (["1.jpg", "1"], [{"1": "1"}, {}]),
    "a whole name wins": (["a/1.jpg", "1.jpg"], [{"1": "1.jpg"}, {"a/1": "a/1.jpg"}]),
    "two rows": (["a/1.jpg", "b/1.jpg", "2.jpg"], [{"1": None, "2": "2.jpg"}, {"c": None}]),
}


def shards_of(directory: Path, keys: list[dict[str, str | None]]) -> list[str]:
    for number, some in enumerate(keys):
        samples: list[Sample] = [(key.encode(), [(b"txt", b"t")]) for key in some or ["z"]]
        write(directory / f"s{number}.tar", samples)
    return [f"{directory}/s{{0..{len(keys) - 1}}}.tar"]


@pytest.mark.parametrize("case", MATCHES)
@pytest.mark.parametrize("option", ["associate", "keys"])
def test_a_row_means_a_sample(tmp_path: Path, case: str, option: str) -> None:
    rows, keys = MATCHES[case]
    table = tmp_path / "l.jsonl"
    table.write_text("".join(json.dumps({"file": row, "label": row}) + "\n" for row in rows))
    options = Composition(associate=(str(table),), missing=EMPTY, duplicates=EMPTY)
    if option == "keys":
        options = Composition(keys=str(table))
    specs = shards_of(tmp_path, keys)
    expected = {key: row for some in keys for key, row in some.items()}
    with a_view(tmp_path, expand(specs), options) as below:
        found = {key: dict(columns) for number in below.numbers for key, columns in shown(below, number)}
    if option == "keys":
        assert {key.decode() for key in found} == {key for key, row in expected.items() if row}
    else:
        labels = {key: found[key.encode()].get(b"label", b"").decode() or None for key in expected}
        assert labels == expected


SHARED: dict[str, list[dict[str, str | None]]] = {
    "in a shard": [{"a/1": None, "b/1": None}],
    "in two": [{"a/1": None}, {"b/1": None}],
    "and a key": [{"1": None}, {"b/1": None}],
}


@pytest.mark.parametrize("case", SHARED)
def test_a_row_of_two_samples_is_refused(program: Program, case: str) -> None:
    program.write("l.csv", b"filename,label\n1.jpg,x\n")
    specs = shards_of(program.home, SHARED[case])
    for option in (("--associate", "l.csv", "--missing", "empty"), ("--keys", "l.csv")):
        text = program.refused("ls", "-q", *option, *specs, code=3)
        assert "l.csv: '1' is the name of several samples; write the directories" in text


def test_what_is_guessed_and_what_matches_nothing_is_said_once(program: Program) -> None:
    specs = shards_of(program.home, [{"a/1": None}, {"a/2": None, "a/3": None}])
    rows = "".join(f"{n},img/{n}.jpg,{n}\n" for n in range(9))
    program.write("l.csv", f"id,file_name,label\n{rows}1,1.jpg,x\n2,2.jpg,y\n".encode())
    done = program.run("ls", "--associate", "l.csv", "--missing", "skip", *specs)
    said = done.stderr.decode().splitlines()
    expected = ("l.csv: .*'file_name'; FILE:COLUMN", "9 of its 11 rows .*: 'img/0', 'img/1', 'img/2' ...")
    assert [bool(re.search(*pair)) for pair in zip(expected, said, strict=True)] == [True, True]
    assert program.run("ls", "-q", "--associate", "l.csv", "--missing", "skip", *specs).stderr == b""
    program.write("n.csv", b"id,label\n1,x\n")
    refusal = program.refused("ls", "--associate", "n.csv", *specs, code=3)
    assert re.search("'a/1' is not in .*n.csv, .*'id'; --missing skip", refusal)
    np.save(program.home / "k.npy", np.array(["a/1"]))
    assert ".csv .tsv" in program.refused("ls", "--associate", program.home / "k.npy", *specs, code=2)
