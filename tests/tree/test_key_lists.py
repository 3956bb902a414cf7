"""`--keys`: only the samples that a list names, whatever its format; what is listed and not there is said."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import sqlite3
import struct
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import tars
from tests.conftest import Program
from tests.processes import PATIENCE, wait_until
from tests.tree.test_view_record import Sample, a_view, asked, member, write
from wdsfs.errors import UsageError, ViewError
from wdsfs.shards import Fingerprint
from wdsfs.spec.expand import expand
from wdsfs.tree import label_files, label_rows, label_table
from wdsfs.tree.composition import Composition, parse_composition
from wdsfs.tree.indexing import indexed
from wdsfs.tree.label_files import label_files as files_of
from wdsfs.tree.label_table import Missing, open_key_list
from wdsfs.tree.opening import keys_missing
from wdsfs.tree.view_set import ViewSet

KEYS = ["a", "b/c", "b/d", "s1/a"]
SHARDS = {"s0": ["a", "b/c", "e"], "s1": ["a", "b/d", "x"], "s2": ["y"]}
NO_SAMPLE = member(b"README", b"no sample")


def keys_of(directory: Path, text: str) -> list[str]:
    files = label_files.label_files(text, label_files.LIST)
    cache = directory / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WDSFS_INDEX_DIR", str(cache))
        with open_key_list(files, label_files.fingerprints_of(files, Fingerprint.at)) as keys:
            missing = keys.missing([])
            rows = sorted(int(row) & (1 << 32) - 1 for row in keys._rows)
            return [keys.name(row).decode() for row in dict.fromkeys(rows)] if missing.lines else []


def a_set(home: Path, shards: Mapping[str, Sequence[str]] = SHARDS, more: bytes = NO_SAMPLE) -> None:
    for name, keys in shards.items():
        samples: list[Sample] = [
            (key.encode(), [(b"txt", f"{name} {key}".encode()), (b"cls", b"1")]) for key in keys
        ]
        write(home / f"{name}.tar", samples, more)


def as_database(path: Path) -> Path:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE good (path TEXT, note TEXT)")
        db.execute("CREATE TABLE other (x)")
        db.executemany("INSERT INTO good VALUES (?, 'x')", [(key,) for key in KEYS])
    return path


def as_parquet(path: Path) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    images = [{"bytes": b"\0", "path": key} for key in KEYS]  # as Hugging Face has them
    parquet.write_table(pyarrow.table({"n": [1, 2, 3, 4], "path": KEYS, "image": images}), path, row_group_size=2)
    return path


def as_arrow(path: Path, writer: str) -> Path:
    pyarrow, ipc = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.ipc")
    table = pyarrow.table({"n": [1, 2, 3, 4], "path": pyarrow.array(KEYS).dictionary_encode()})
    with getattr(ipc, writer)(str(path), table.schema) as stream:
        stream.write_table(table, max_chunksize=3)
    return path


def as_array(path: Path) -> Path:
    np.save(path, np.array(KEYS))
    return path


def text(*lines: str, end: str = "\n") -> bytes:
    return "".join(line + end for line in lines).encode()


NEMO = text(*(json.dumps({"audio_filepath": key, "duration": 1.5, "text": "x"}) for key in KEYS))
LABEL_STUDIO = [{"id": n, "data": {"image": key}, "annotations": []} for n, key in enumerate(KEYS)]

FORMATS: dict[str, tuple[str, bytes | Callable[[Path], Path]]] = {
    "text": ("k.txt", text(*KEYS)),
    "no end of the last line": ("k", text(*KEYS)[:-1]),
    "mark and CRLF": ("k.txt", b"\xef\xbb\xbf" + text(*KEYS, end="\r\n")),
    "empty lines": ("k.lst", b"\n\n" + text(*KEYS, end="\n\n")),
    "NULs": ("k.txt", text(*KEYS, end="\0")),
    "CR": ("k.txt", text(*KEYS, end="\r")),
    "leading ./": ("k.txt", text(*KEYS).replace(b"b/", b"./b/")),
    "twice": ("k.txt", text(*KEYS, *KEYS, "a", "a")),
    "gz": ("k.txt.gz", gzip.compress(text(*KEYS))),
    "csv": ("k.csv", text("__key__,x", *(f'"{key}",1' for key in KEYS))),
    "csv.gz, column": ("k.csv.gz:path", gzip.compress(text("n,path", *(f"1,{key}" for key in KEYS)))),
    "tsv": ("k.tsv:path", text("n\tpath", *(f"1\t{key}" for key in KEYS))),
    "jsonl": ("k.jsonl:path", text(*(json.dumps({"path": key, "__x": [{}]}) for key in KEYS))),
    "sqlite": ("k.db:good:path", as_database),
    "parquet": ("k.parquet:path", as_parquet),
    "parquet, a field": ("k.pq:image.path", as_parquet),
    "without a suffix": ("k:path", as_parquet),
    "Arrow": ("k.feather:path", partial(as_arrow, writer="new_file")),
    "a stream of Arrow": ("k.arrow", partial(as_arrow, writer="new_stream")),
    "npy": ("k.npy", as_array),
    "NeMo": ("k.json", NEMO),
    "NeMo, no suffix": ("manifest", NEMO),
    "a list of texts": ("k.json", json.dumps(KEYS, indent=1).encode()),
    "a list in lines": ("k.jsonl.gz", gzip.compress(json.dumps([{"uid": key} for key in KEYS]).encode())),
    "Label Studio": ("k.json", json.dumps(LABEL_STUDIO).encode()),
    "a field of a field": ("k.jsonl:a.b[0].c", text(*(json.dumps({"a": {"b": [{"c": key}]}}) for key in KEYS))),
    "a long list": ("k.json:b", json.dumps([{"b": key, "a": "x" * 90_000} for key in KEYS]).encode()),
}


@pytest.mark.parametrize("block", [1, 7])
def test_a_list_of_json_ends_wherever_it_ends(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_rows, "_BLOCK", block)
    for content in ('\ufeff [ 12 ,"a\u20ac", 345]\n', '["12","a\u20ac","345"]'):
        (tmp_path / "k.json").write_text(content.replace("12 ,", '"12",').replace("345]", '"345"]'))
        assert keys_of(tmp_path, str(tmp_path / "k.json")) == ["12", "a\u20ac", "345"]


def test_keys_of_numbers(tmp_path: Path) -> None:
    """DataComp's lists have a text of 32 hexadecimal digits as two numbers."""
    uid = "0123456789abcdef00000000000000ff"
    np.save(tmp_path / "uids.npy", np.array([(int(uid[:16], 16), int(uid[16:], 16))], np.dtype("u8,u8")))
    assert keys_of(tmp_path, str(tmp_path / "uids.npy")) == [uid]
    np.save(tmp_path / "n.npy", np.array([17, 3]))
    (tmp_path / "n.jsonl").write_text('{"id": 17}\n{"id": 3.0}\n')
    (tmp_path / "n.json").write_text("[17, 3]")
    (tmp_path / "n.csv").write_text("id\n17.0\n3.0\n")
    for suffix in ("npy", "jsonl", "json", "csv"):
        assert keys_of(tmp_path, str(tmp_path / f"n.{suffix}")) == ["17", "3"]


def test_several_files_are_one_list(tmp_path: Path) -> None:
    for n in range(4):
        (tmp_path / f"k{n}.csv").write_text(f"n,file_name\n1,{KEYS[n]}\n")
    for pattern in ("k*.csv", "k{0..3}.csv:file_name"):
        assert keys_of(tmp_path, f"{tmp_path}/{pattern}") == KEYS


@pytest.mark.parametrize("case", FORMATS)
def test_a_list_of_any_format(tmp_path: Path, case: str) -> None:
    name, content = FORMATS[case]
    file = tmp_path / name.partition(":")[0]
    content(file) if callable(content) else file.write_bytes(content)
    assert keys_of(tmp_path, str(tmp_path / name)) == KEYS


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_ends_of_lines_may_lie_in_two_blocks(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (label_table, label_rows):
        monkeypatch.setattr(module, "KEY_MAX", size)
    keys = ["a", "b", "cd", "e", "f", "gh"]
    (tmp_path / "k.txt").write_bytes(text(*keys, end="\r\n"))
    assert keys_of(tmp_path, str(tmp_path / "k.txt")) == keys


def array_of(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


WRONG = {
    "empty": ("k.txt", b"", "lists no key"),
    "lines only": ("k.txt", b"\n\r\n\n", "lists no key"),
    "10 MB": ("k.txt", b"a\n" + b"x" * (10 << 20) + b"\nb\n", r"k\.txt:2: is longer than"),
    "without an end": ("k.txt", bytes(2 << 20), r"k\.txt:1: "),
    "long in csv": ("k.csv", b"key\n" + b"x" * (2 << 20), r"k\.csv:2: is longer than"),
    "UTF-16": ("k.txt", "a\n".encode("utf-16"), "is in UTF-16"),
    "no gz": ("k.txt.gz", b"what is this?", "cannot be unpacked"),
    "cut gz": ("k.txt.gz", gzip.compress(os.urandom(5000))[:-100], "cannot be unpacked"),
    "bomb": ("k.txt.gz", gzip.compress(bytes(1 << 20)), "unpacks to more than"),
    "no column": ("k.csv", b"a,b\n1,2\n", r"k\.csv:COLUMN"),
    "not this column": ("k.csv:c", b"a,key\n1,2\n", "has no column 'c'"),
    "no parquet": ("k.parquet", b"PAR1 what is this? PAR1", "cannot be read as parquet"),
    "no Arrow": ("k.arrow", b"ARROW1\0\0 what is this?", "cannot be read as Arrow"),
    "no array": ("k.npy", b"\x93NUMPY what is this?", "cannot be read as an array"),
    "pickles": ("k.npy", array_of(np.array([{}], object)), r"dtype\('O'\)"),
    "cut array": ("k.npy", array_of(np.array(KEYS))[:-1], "ends before"),
    "fractions": ("k.jsonl", b'{"key": 1}\n{"key": 0.5}\n', r"k\.jsonl:2: the field 'key' .*: 0\.5"),
    "cut list": ("k.json", b'["a", "b"', r"k\.json:2: is not JSON: .* no end"),
    "no comma": ("k.json", b'["a" "b"]', r"k\.json:2: is not JSON: .* comma"),
    "after the list": ("k.json", b'["a"] ["b"]', r"k\.json:2: is not JSON: .* more"),
    "a list of lists": ("k.json", b"[" * 100_000, r"k\.json:1: is not JSON: .*recursion"),
    "one object": ("k.json", b'{\n "key": "a"\n}', r"k\.json:1: is not JSON .*; write an object in each line"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_list_that_is_wrong(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, content, message = WRONG[case]
    file, _, _ = name.partition(":")
    if case == "bomb":
        monkeypatch.setattr(label_files, "LINE_MAX", 0)
    if case in ("no parquet", "no Arrow"):
        pytest.importorskip("pyarrow")
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ViewError, match=message) as refused:
        keys_of(tmp_path, str(tmp_path / name))
    assert f"/{file}:" in str(refused.value)
    assert not list(tmp_path.glob("cache/**/*.keys"))


def test_lists_that_cannot_be_meant(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("a\n")
    (tmp_path / "dir").mkdir()
    os.mkfifo(tmp_path / "fifo")
    for name in ("none", "none.csv:key", "none.db:t:key", "list:col", "dir", "fifo"):
        with pytest.raises(UsageError, match=f"--order .*/{name}: " if ":key" not in name else "--order .*/none"):
            files_of(str(tmp_path / name), label_files.ORDER)
    for option in (label_files.LABELS, label_files.LIST):
        with pytest.raises(UsageError, match=f"{option} '': name the file"):
            files_of("", option)
    assert parse_composition("samples", "--keys 'a b.csv:key'").text == "--keys 'a b.csv:key'"


def test_keys_of_one_checksum_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that a hostile list has: never a sample that is not listed, and no search without an end."""
    keys = tars.names_of_one_checksum(5)
    listed, others = keys[::2], keys[1::2]
    assert len(others) > 10
    (tmp_path / "k").write_bytes(b"".join(key + b"\n" for key in [*listed, *listed, b"none"]))
    monkeypatch.setenv("WDSFS_INDEX_DIR", str(tmp_path / "cache"))
    (file,) = files_of(str(tmp_path / "k"), label_files.LIST)
    with open_key_list((file,), (Fingerprint.at(file.path),)) as opened:
        places, used = opened.find(b"s", [*others, *listed])
        assert [place >= 0 for place in places.tolist()] == [False] * len(others) + [True] * len(listed)
        assert opened.missing([used]) == Missing(1, 2 * len(listed) + 1, [b"none"])
    monkeypatch.setattr(label_table, "_EQUAL_MAX", 5)
    with (
        pytest.raises(ViewError, match="made to have one checksum"),
        open_key_list((file,), (Fingerprint(1, 2, 3),)),
    ):
        pass


LINES = st.binary(min_size=1, max_size=3).filter(lambda key: not {*b"\n\0"} & {*key})


@given(st.lists(LINES, min_size=1), st.lists(st.binary(min_size=1, max_size=2)))
def test_a_list_is_what_a_set_of_python_is(listed: list[bytes], keys: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("WDSFS_INDEX_DIR", str(Path(directory) / "cache"))
        patch.setattr(label_table, "_CHUNK", 8)
        path = Path(directory) / "k"
        path.write_bytes(b"x\n" + b"".join(b"x" + key + b"\n" for key in listed))
        (file,) = files_of(str(path), label_files.LIST)
        with open_key_list((file,), (Fingerprint.at(file.path),)) as opened:
            there = {b"x", *(b"x" + key.removesuffix(b"\r").rstrip(b"/").replace(b"//", b"/") for key in listed)}
            asked = [b"x" + key for key in keys if b"/" not in key]
            if any(b"/" in key or b"." in key or key.startswith(b"\xfe\xff") for key in listed):
                return  # plain keys, and names of files, have tests of their own
            places, used = opened.find(b"s", asked)
            assert [place >= 0 for place in places.tolist()] == [key in there for key in asked]
            assert opened.missing([used]).number == len(there - set(asked))


def test_a_table_of_keys_is_as_format_md_says(tmp_path: Path) -> None:
    (tmp_path / "k").write_bytes(text("b/d", "a", "a"))
    assert keys_of(tmp_path, str(tmp_path / "k")) == ["b/d", "a"]
    [table] = tmp_path.glob("cache/**/*.keys")
    sums = {key: zlib.crc32(key) << 32 for key in (b"a", b"b/d")}
    rows = sorted([sums[b"b/d"] | 16 // 8, sums[b"a"] | 24 // 8, sums[b"a"] | 24 // 8])
    keys = b"\3\0\0\0b/d\0" + 2 * b"\1\0\0\0a\0\0\0"
    about = json.dumps({"guessed": [], "has_names": False}).encode()
    assert table.read_bytes() == struct.pack("<QQ", 40, 3) + keys + struct.pack("<3Q", *rows) + about


# --- what is shown -------------------------------------------------------------------------------------------


def test_the_view_has_the_listed_samples_alone(tmp_path: Path) -> None:
    a_set(tmp_path)
    (tmp_path / "k.txt").write_bytes(text("s0/a", "b/d", "y", "nowhere", "s9/a", "README"))
    shards = expand([str(tmp_path / "s{0..2}.tar")])
    with a_view(tmp_path, shards, Composition(keys=str(tmp_path / "k.txt"))) as below:
        assert [below.record(number).paths() for number in below.numbers] == [[b"a"], [b"b/d"], [b"y"]]
        missing = below.keys_missing()  # type: ignore[attr-defined]  # it is a ViewSet
        assert missing.endswith("3 of its 6 keys are not in the set: 'nowhere', 's9/a', 'README'")


def test_a_mount_waits_for_the_first_shard_with_a_sample_alone(tmp_path: Path) -> None:
    """The others are derived when they are used, and equal what a whole view has."""
    a_set(tmp_path)
    (tmp_path / "k.txt").write_bytes(text("s1/a", "x", "y"))
    shards = expand([str(tmp_path / "s{0..2}.tar")])
    options = Composition(keys=str(tmp_path / "k.txt"))
    with (
        a_view(tmp_path / "some", shards, options, indexed=False) as below,
        a_view(tmp_path, shards, options) as whole,
    ):
        assert isinstance(below, ViewSet)
        below.index.refresh(shards)
        assert below.make(some=True) is None
        assert below.rest_waits
        assert [below.index.summary(key) is not None for key in below._view_keys()] == [True, True, False]
        assert [indexed(below.record, 2).paths(), whole.record(2).paths()] == [[b"y"]] * 2
        assert keys_missing(below) is None
        assert not below.rest_waits
    cased = replace(options, ignore_case=True)  # which may refuse a shard, so all have to be known
    with a_view(tmp_path / "all", shards, cased, indexed=False) as below:
        assert isinstance(below, ViewSet)
        below.index.refresh(shards)
        assert below.make(some=True) is None
        assert not below.rest_waits


COMMANDS = [
    ("ls", "-R", "--layout", "files"),
    ("ls", "-R", "--merge"),
    ("ls", "-R", "--index-tree"),
    ("ls", "-R", "--layout", "classes"),
    ("ls", "-R", "--columns", "txt", "--names", "full"),
    ("info", "--json"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_shows_the_chosen_samples(program: Program, command: tuple[str, ...]) -> None:
    """As it shows shards that have no others."""
    a_set(program.home)
    a_set(program.home / "chosen", {"s0": ["a"], "s1": ["a", "b/d"], "s2": ["y"]}, b"")
    listing = text("a", "s1/b/d", "y")
    shown = program.run(*command, "--keys", str(program.write("k.txt", listing)), "s{0..2}.tar").stdout
    with (program.home / "k.txt").open() as stdin:
        assert shown == program.run(*command, "--keys", "-", "s{0..2}.tar", stdin=stdin).stdout
    expected = program.run(*command, "chosen/s{0..2}.tar").stdout
    if command[0] == "info":
        assert json.loads(shown)["extensions"] == json.loads(expected)["extensions"]
    else:
        assert shown == expected


def test_what_is_listed_and_not_there_is_said(program: Program) -> None:
    a_set(program.home)
    program.write("k.txt", text("a", "gone", "s2/a"))
    done = program.run("ls", "--keys", "k.txt", "s{0..2}.tar")
    assert b"2 of its 3 keys are not in the set: 'gone', 's2/a'" in done.stderr
    assert b"2 of its 3 keys" in program.run("ls", "--strict", "--keys", "k.txt", "s{0..2}.tar", code=3).stderr
    assert b"[missing key] --keys" in program.run("check", "--keys", "k.txt", "s{0..2}.tar", code=1).stdout
    program.write("long.txt", text("a", "x" * 10_000))
    assert len(program.run("ls", "--keys", "long.txt", "s{0..2}.tar").stderr) < 500
    program.write("none.txt", b"\x1b[2Jgone\n")
    refusal = program.run("ls", "--keys", "none.txt", "s{0..2}.tar", code=3).stderr
    assert b"none of its keys is in the set: '\\x1b[2Jgone'" in refusal
    assert "--keys" in program.refused("mount", "--keys", "-", "s0.tar", program.mountpoint, code=2)


@pytest.mark.parametrize("command", ["mount", "view", "image", "ls", "cat", "info", "check", "pack", "export"])
def test_an_option_without_a_file_is_refused(program: Program, command: str) -> None:
    """A variable of a shell that is not set: the whole set would be shown."""
    a_set(program.home)
    last = {"mount": [program.mountpoint], "cat": ["s0/a/txt"], "export": ["-o", "x"]}.get(command, [])
    last = ["-o", "out.tar"] if command in ("image", "pack") else last
    assert "--keys '': name the file" in program.refused(command, "--keys", "", "s0.tar", *last, code=2)
    assert "--keys '{a" in program.refused(command, "--keys", "a", "--keys", "b", "s0.tar", *last, code=2)
    if command == "pack":
        assert "--order '': name the file" in program.refused(command, "--order", "", "s0.tar", *last, code=2)


def test_messages_about_a_stream_name_it_and_its_option(program: Program) -> None:
    a_set(program.home)
    empty = program.write("empty", b"")
    with empty.open() as stdin:
        refusal = program.refused("ls", "--keys", "-", "s0.tar", code=3, stdin=stdin)
        assert "standard input: lists no key" in refusal
    for option in ("--keys", "--order"):
        packing = ("pack", "s0.tar", "-o", "n-%d.tar", option)
        assert "/dev/null: lists no key" in program.refused(*packing, "/dev/null", code=3)
        assert f"{option} /dev/zero: is a device" in program.refused(*packing, "/dev/zero", code=2)
        assert f"{option} none: there is no such file" in program.refused(*packing, "none", code=2)
    with program.write("k", text("e", "a", "b/c")).open() as stdin:
        program.run("pack", "s0.tar", "-o", "n-%d.tar", "--order", "-", stdin=stdin)
    with tarfile.open(program.home / "n-0.tar") as archive:
        assert archive.getnames()[::2] == ["e.txt", "a.txt", "b/c.txt"]


def test_a_list_from_a_stream_leaves_nothing_behind(program: Program) -> None:
    a_set(program.home)
    place = program.directory("tmp")
    streams = {"stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL, "env": {"TMPDIR": str(place)}}
    with program.start("ls", "--keys", "-", "s0.tar", new_interpreter=True, **streams) as process:
        wait_until(lambda: [*place.glob("wdsfs-keys-*/keys.txt")], "the list is being copied")
        process.terminate()
        assert process.wait(PATIENCE) == 128 + signal.SIGTERM
    assert [*place.iterdir()] == []


def test_a_list_changes_under_a_mount(program: Program) -> None:
    a_set(program.home)
    file = program.write("k.txt", text("s0/a", "s1/b/d"))
    with program.mounted("--keys", "k.txt", "s{0..2}.tar") as mounted:
        assert (mounted.path / "s0/a/txt").read_text() == "s0 a"
        assert os.listdir(mounted.path / "s0") == ["a"]
        assert os.listdir(mounted.path / "s2") == []
        mounted.allow_log("has changed", "have changed", "is not in the set", "exchanged")
        file.write_bytes(text("s0/e", "s2/y"))
        wait_until(lambda: asked(os.listdir, mounted.path / "s0") == ["e"], "the new choice")
        wait_until(lambda: asked(os.listdir, mounted.path / "s2") == ["y"], "the new choice")
        assert (mounted.path / "s2/y/txt").read_text() == "s2 y"
