"""Tables as other libraries write them (tests/data/tables/README.md) do what their users expect.

Each is given to `--associate` and `--keys` of a set, and to `pack --table` of the files that it is about. Every
set and every directory has one sample more than the table has rows.
"""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import tars
from tests.conftest import ROOT, Program

TABLES = ROOT / "tests/data/tables"
PHOTOS = ("cat/0001.png", "cat/0002.png", "dog/0003.png", "dog/0004.png")
SPEECH = tuple(f"84/121123/84-121123-000{number}.flac" for number in range(4))
IMG2DATASET = ("000000.jpg", "000001.jpg", "000010.jpg", "000011.jpg", "000012.jpg")
CAPTIONS = ("a cat on a mat", 'two cats, "quoted"', "un chien à Zürich")
KINDS = ("cat", "cat", "dog")


class Table(NamedTuple):
    """A table, the files of the samples, a column of it, its values in the samples with a row, and the guess."""

    file: str
    names: tuple[str, ...]
    column: str
    values: tuple[str, ...]
    guessed: str


CASES = [
    *(
        Table(f"metadata.{suffix}", PHOTOS, "text", CAPTIONS, "file_name")
        for suffix in ("csv", "jsonl", "parquet", "sqlite")
    ),
    Table("data.arrow", PHOTOS, "score", ("0.5", "1.5", "2.5"), "file_name"),
    Table("images.parquet", PHOTOS, "label", ("0", "0", "1"), "image.path"),
    Table("manifest.json", SPEECH, "text", CAPTIONS, "audio_filepath"),
    Table("img2dataset/*.parquet", IMG2DATASET, "caption", tuple(f"caption of {at}" for at in range(4)), ""),
    Table("min.csv", PHOTOS, "choice", KINDS, "image"),
    Table("min.json", PHOTOS, "choice", KINDS, "image"),
    Table("export.json", PHOTOS, "inner_id", ("1", "2", "3"), "data.image"),
]


def _values(members: dict[str, bytes], column: str) -> dict[str, str]:
    """The values of a column by key."""
    of = (name for name in members if name.endswith(f".{column}"))
    return {name.partition(".")[0]: members[name].decode() for name in of}


def _expected(table: Table) -> dict[str, str]:
    return {name.partition(".")[0]: value for name, value in zip(table.names, table.values, strict=False)}


@pytest.fixture
def given(program: Program, request: pytest.FixtureRequest) -> Table:
    """The set `s.tar` and the directory `files`, and the tables."""
    case: Table = request.param
    shutil.copytree(TABLES, program.home / "tables")
    program.write("s.tar", tars.tar(*(tars.member(name.encode(), b"x") for name in case.names)))
    for name in case.names:
        file = program.home / "files" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x")
    return case


with_tables = pytest.mark.parametrize("given", CASES, ids=lambda case: Path(case.file).name, indirect=True)


def _members(program: Program, tar: str) -> dict[str, bytes]:
    with tarfile.open(program.home / tar) as file:
        return {member.name: file.extractfile(member).read() for member in file}  # type: ignore[union-attr]


@with_tables
def test_labels(program: Program, given: Table) -> None:
    options = "--associate", f"tables/{given.file}", "--missing", "skip"
    done = program.run("pack", *options, "s.tar", "-o", "new-%d.tar")
    assert _values(_members(program, "new-0.tar"), given.column) == _expected(given)
    assert given.guessed.encode() in done.stderr


@with_tables
def test_lists(program: Program, given: Table) -> None:
    program.run("pack", "--keys", f"tables/{given.file}", "s.tar", "-o", "new-%d.tar")
    assert {*_members(program, "new-0.tar")} == {*given.names[: len(given.values)]}


@with_tables
def test_packing(program: Program, given: Table) -> None:
    options = "--layout", "files", "--table", f"tables/{given.file}"
    program.run("pack", *options, "files", "-o", "new-%d.tar")
    members = _members(program, "new-0.tar")
    assert members.keys() >= {*given.names}
    assert _values(members, given.column) == _expected(given)


def test_uids_of_datacomp(program: Program) -> None:
    shutil.copytree(TABLES, program.home / "tables")
    keys = [f"{number * 12345678901234567890123:032x}" for number in range(1, 6)]
    program.write("s.tar", tars.tar(*(tars.member(f"{key}.jpg".encode(), b"x") for key in keys)))
    shown = program.run("ls", "-R", "--layout", "files", "--keys", "tables/uids.npy", "s.tar").stdout.decode()
    assert [key in shown for key in keys] == [True, True, True, False, False]
