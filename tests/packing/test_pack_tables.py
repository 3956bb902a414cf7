"""`pack --table`: tables as the tools of others write them, from directories as people have them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.conftest import InProcess
from tests.packing.test_pack import CLASSES, in_parts, keys, members, write

Rows = list[dict[str, Any]]
HOME = "/elsewhere"  # where the tables were written, and their files were then
UPLOADED = "/data/upload/1/1a2b3c4d-"  # as Label Studio names its tasks


@pytest.fixture
def program(in_process: InProcess) -> InProcess:
    return in_process


def jsonl(rows: Rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def shards_of(program: InProcess) -> list[bytes]:
    return [path.read_bytes() for path in sorted((program.home / "out").glob("*.tar"))]


def captions(program: InProcess) -> dict[str, str]:
    """What the shards have beside the files and classes."""
    there = members(*shards_of(program))
    return {
        name.decode(): value.decode() for name, value in there if not name.endswith((b".jpg", b".wav", b".cls"))
    }


CLIPS = {"1.wav": b"", "b/2.wav": b"", "b/3.wav": b""}
IN_SPLITS = {**in_parts("train"), "val/cat/1.jpg": b"", "val/dog/1.jpg": b""}


@pytest.mark.parametrize(
    ("files", "table", "content", "options", "added"),
    [
        (  # Hugging Face's ImageFolder with classes
            CLASSES,
            "data/metadata.csv",
            b"file_name,text\ncat/1.jpg,A cat\ndog/1.jpg,A dog\ncat/2.jpg,Two\n",
            ["--layout", "classes"],
            {"cat/1.text": "A cat", "dog/1.text": "A dog", "cat/2.text": "Two"},
        ),
        (  # a manifest of NeMo, written on another machine
            CLIPS,
            "manifest.json",
            jsonl([{"audio_filepath": f"{HOME}/clips/{name}", "duration": 1.5, "text": name} for name in CLIPS]),
            ["--columns", "txt=text", "--columns", "duration"],
            {"1.txt": "1.wav", "b/2.txt": "b/2.wav", "b/3.txt": "b/3.wav"}
            | {"1.duration": "1.5", "b/2.duration": "1.5", "b/3.duration": "1.5"},
        ),
        (  # an export of Label Studio
            CLASSES,
            "export.json",
            json.dumps(
                [{"id": n, "data": {"image": f"{UPLOADED}{n}.jpg"}, "annotations": [{"was": n}]} for n in (1, 2)]
            ).encode(),
            ["--layout", "files", "--columns", "json=annotations", "--exclude", "dog"],
            {"cat/1.json": '[{"was": 1}]', "cat/2.json": '[{"was": 2}]'},
        ),
        (  # names without directories
            {"a/001.jpg": b"", "b/002.jpg": b""},
            "captions.tsv",
            b"image\tcaption\n001.jpg\tOne\n002.jpg\tTwo\n",
            ["--layout", "files"],
            {"a/001.caption": "One", "b/002.caption": "Two"},
        ),
    ],
    ids=["Hugging Face", "NeMo", "Label Studio", "names"],
)
def test_tables_of_other_tools(
    program: InProcess,
    files: Mapping[str, bytes],
    table: str,
    content: bytes,
    options: list[str],
    added: dict[str, str],
) -> None:
    write(program.home / "data", files)
    write(program.home, {table: content})
    done = program.run("pack", "data", "--table", table, "-o", "out/%d.tar", *options)
    assert captions(program) == added
    assert b"the keys are in" in done.stderr
    assert b"warning" not in done.stderr


def test_a_table_in_each_split_has_paths_relative_to_it(program: InProcess) -> None:
    """As Hugging Face's ImageFolder has them; both tables name a `cat/1.jpg`."""
    write(program.home / "data", IN_SPLITS)
    for split, names in (("train", list(CLASSES)), ("val", ["cat/1.jpg"])):
        rows = [{"file_name": name, "text": f"{split} {name}"} for name in names]
        write(program.home / "data", {f"{split}/metadata.jsonl": jsonl(rows)})
    done = program.run("pack", "data", "--table", "data/*/metadata.jsonl", "-o", "out/{split}-%d.tar")
    named = [*(f"train/{name}" for name in CLASSES), "val/cat/1.jpg"]
    assert captions(program) == {name.replace(".jpg", ".text"): name.replace("/", " ", 1) for name in named}
    assert b"samples without a row: 1 of 5: val/dog/1" in done.stderr
    assert keys(*shards_of(program)) == ["train/cat/1", "train/cat/2", "train/dog/1", "val/cat/1", "val/dog/1"]
    (classes,) = program.home.glob("out/classes.*")
    assert classes.read_text() == "cat\ndog\n"


@pytest.mark.parametrize(
    ("rows", "code", "text"),
    [
        (["cat/1.jpg", "eel/1.jpg", "eel/2.jpg"], 0, "2 of its 3 rows have no sample: 'eel/1', 'eel/2'"),
        (["1.jpg"], 3, "'1' is the name of several samples"),
        (["eel/1.jpg"], 7, "none of its rows has a sample: 'eel/1'; FILE:COLUMN"),
        ([], 7, "none of its rows has a sample; FILE:COLUMN"),
    ],
)
def test_rows_and_samples_without_a_partner(program: InProcess, rows: list[str], code: int, text: str) -> None:
    write(program.home / "data", CLASSES)
    write(program.home, {"t.csv": "\n".join(["file_name,text", *(f"{row},x" for row in rows)]).encode()})
    command = ("pack", "--layout", "files", "data", "--table", "t.csv", "-o", "out/%d.tar")
    assert text in program.run(*command, code=None).stderr.decode()
    assert program.run(*command, code=None).returncode == code
    assert bool(list(program.home.glob("out/*.tar"))) == (code == 0)
