"""Keys with dots: `--key-ends last-dot`, on tars of GNU tar and of the webdataset library."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import wdsfs
from tests import tars
from tests.conftest import BOTH_ENGINES, Program
from tests.tars import member, tar
from wdsfs import names
from wdsfs.errors import UsageError
from wdsfs.library.fsspec_files import WdsfsFileSystem

LAST_DOT = ("--key-ends", "last-dot")
UID = "1.2.840.113619.2.55"
# Keys, and the extensions of each, by the last dot.
SAMPLES = {
    f"scans/{UID}.1": ["dcm", "json"],
    f"scans/{UID}.2": ["dcm", "json", "nii.gz"],
    "talk_11.708_13.970": ["flac", "txt"],
    "talk_11.708_13.98": ["flac", "txt"],
    "a.seg": ["png"],
    "a": ["jpg"],
}
FILES = [(key, extension) for key, some in SAMPLES.items() for extension in some]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *((f"{UID}.dcm", UID), ("d.1/a.b.c", "d.1/a.b"), ("a.jpg", "a"), ("a.", "a"), ("a.b.", "a.b")),
        *(("a.b.nii.gz", "a.b"), ("x.tar.GZ", "x"), ("x.json.zst", "x"), ("json.gz", "json"), ("x.v2.gz", "x")),
        *(("talk_11.708.gz", "talk_11.708"), ("a..gz", "a."), ("a.b c.gz", "a.b c"), ("a.nii.gz.txt", "a.nii.gz")),
        *(
            (name, None)
            for name in ["README", ".hidden", ".hidden.jpg", "d.1/.a.b.c", "d.1/a", "__m.x__", "__m__/a.b"]
        ),
    ],
)
def test_keys(name: str, key: str | None) -> None:
    split = names.split(name.encode(), last_dot=True)
    assert (split and split.folder + split.stem) == (key and key.encode())
    assert split is None or b".".join((split.folder + split.stem, split.extension)) == name.encode()


@pytest.fixture
def shards(program: Program) -> list[str]:
    """The samples as a shard of GNU tar, and as one of the webdataset library."""
    directory = program.directory("files")
    members = [f"{key}.{extension}" for key, extension in FILES]
    for name, (key, extension) in zip(members, FILES, strict=True):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(f"{key} {extension}")
    program.write("gnu.tar", tars.with_gnu_tar(directory, members=map(os.fsencode, members)))
    samples = [{"__key__": key, **{one: f"{key} {one}".encode() for one in some}} for key, some in SAMPLES.items()]
    program.write("wds.tar", tars.with_webdataset(samples))
    return ["gnu.tar", "wds.tar"]


@BOTH_ENGINES
@pytest.mark.parametrize(
    ("options", "path"),
    [
        ([], "{key}/{extension}"),
        (["--names", "full"], "{key}/{stem}.{extension}"),
        (["--layout", "files"], "{key}.{extension}"),
    ],
)
def test_a_mount(options: list[str], path: str, shards: list[str], program: Program) -> None:
    """Each file is listed, and found by its path."""
    expected = {
        path.format(key=key, stem=key.rpartition("/")[2], extension=extension): f"{key} {extension}"
        for key, extension in FILES
    }
    with program.mounted(*LAST_DOT, *options, *shards) as mounted:
        mounted.allow_log("loaders that look for")
        for shard in ("gnu", "wds"):
            top = mounted.path / shard
            files = {str(file.relative_to(top)): file.read_text() for file in top.rglob("*") if file.is_file()}
            assert files == expected


def test_attributes_and_options_of_a_mount(shards: list[str], program: Program) -> None:
    with program.mounted("-q", *LAST_DOT, *shards) as mounted:
        path = mounted.path / f"gnu/scans/{UID}.2/dcm"
        assert os.getxattr(path, "user.wdsfs.key") == f"scans/{UID}.2".encode()
        assert mounted.status()["selection"] == [*LAST_DOT]


def test_names_that_meet_in_a_view(program: Program) -> None:
    """Of `1.2` the column `3.x` and of `1` the column `2.3.x` are called alike among the files."""
    program.write("s.tar", tar(member(b"1.2.jpg", b"first"), member(b"1.png", b"second")))
    options = ("--columns", "3.x=jpg", "--columns", "2.3.x=png", "--missing", "empty", "--layout", "files")
    listed = program.run("ls", *LAST_DOT, *options, "s.tar", "s").stdout.split()
    assert sorted(listed) == [b"1.2.2.3.x", b"1.2.3.x", b"1.2.3.x~2", b"1.3.x"]
    for name, content in ((b"1.2.3.x", b"first"), (b"1.2.3.x~2", b"second"), (b"1.3.x", b"")):
        assert program.run("cat", *LAST_DOT, *options, "s.tar", b"s/" + name).stdout == content


def test_views_and_merged_trees(shards: list[str], program: Program) -> None:
    program.write("keys", f"scans/{UID}.2\na.seg\n".encode())
    program.write("more.csv", f'key,note\n"scans/{UID}.2",good\na.seg,bad\n'.encode())
    options = ("--keys", "keys", "--associate", "more.csv", "--merge", "--layout", "files")
    found = program.run("ls", "-R", *LAST_DOT, *options, shards[0]).stdout.decode().split()
    expected = [f"scans/{UID}.2.{one}" for one in ("dcm", "json", "nii.gz", "note")]
    assert sorted(found) == sorted(["scans/", "a.seg.note", "a.seg.png", *expected])
    for name in expected[:3]:
        assert program.run("cat", *LAST_DOT, *options, shards[0], name).stdout.endswith(name[-3:].encode())


def test_records_of_both_readings(shards: list[str], program: Program) -> None:
    """A portable index is for the reading that it was made with; releases that know only one refuse it."""
    program.run("index", "-o", "last.wdsidx", *LAST_DOT, *shards)
    program.run("index", "-o", "first.wdsidx", *shards)
    versions = {name: (program.home / name).read_bytes()[8] for name in ("last.wdsidx", "first.wdsidx")}
    assert versions == {"last.wdsidx": 2, "first.wdsidx": 1}
    for index, options, samples in (
        *(("last.wdsidx", LAST_DOT, 6), ("first.wdsidx", (), 3)),
        *(("last.wdsidx", (), 3), ("first.wdsidx", LAST_DOT, 6)),
    ):
        place = program.home / f"{index}-{len(options)}"
        report = program.json("index", "--index-dir", place, *options, index)
        assert report["samples"] == 2 * samples, (index, options)
        assert report["rebuilt"] == (0 if bool(options) == index.startswith("last") else 2)


def test_the_library(shards: list[str], program: Program) -> None:
    paths = [str(program.home / name) for name in shards]
    with wdsfs.samples(paths, key_ends="last-dot") as samples:
        assert [sample["__key__"] for sample in samples] == [*SAMPLES] * 2
        assert samples[1]["nii.gz"] == f"scans/{UID}.2 nii.gz".encode()
    table = wdsfs.table(paths, key_ends="last-dot")
    assert table["__key__"].to_pylist() == [*SAMPLES] * 2
    files = WdsfsFileSystem(paths, key_ends="last-dot", skip_instance_cache=True)
    assert files.cat(f"gnu/scans/{UID}.1/dcm") == f"scans/{UID}.1 dcm".encode()
    files.close()
    with pytest.raises(UsageError, match="key_ends"):
        wdsfs.samples(paths, key_ends="dot")


def test_keys_that_look_like_names_of_files(program: Program) -> None:
    """Keys that a set has given choose their samples, also where such a file is in another one."""
    keys = {"a", "a.nii", "b.txt", "c.v1.JPG", "d.1"}
    path = str(program.write("s.tar", tar(*(member(f"{key}.jpg".encode()) for key in sorted(keys)))))
    for some in ({"a.nii"}, keys - {"a"}):
        with wdsfs.samples(path, key_ends="last-dot", keys=some) as chosen:
            assert set(chosen.keys()) == some
    table = str(program.write("t.csv", b"__key__,n\na.nii,1\nb.txt,2\n"))
    for options in (
        ["--keys", table],
        ["--keys", f"{table}:__key__"],
        ["--associate", table, "--missing", "skip"],
    ):
        assert program.run("ls", *LAST_DOT, *options, path, "s").stdout == b"a.nii/\nb.txt/\n"


def test_check(shards: list[str], program: Program) -> None:
    program.write("speech.tar", tar(*(member(b"talk_%d.7_13.9%d.flac" % (n, n)) for n in range(9))))
    plain = program.run("check", "speech.tar", code=1).stdout
    assert b"use --key-ends last-dot, or rename such files" in plain
    assert b"9 samples, 9 members: 0 findings" in program.run("check", *LAST_DOT, "speech.tar").stderr
    with program.mounted("speech.tar") as mounted:
        mounted.expect_log("columns are parts of names: type --key-ends last-dot")
    with program.mounted(*LAST_DOT, "speech.tar") as mounted:
        mounted.allow_log("loaders that look for")


# --- new shards, whose keys every reader finds -------------------------------------------------------------------


def mended(key: str) -> str:
    folder, slash, stem = key.rpartition("/")
    return folder + slash + stem.replace(".", "_")


def packed(program: Program, *arguments: str | Path) -> dict[str, dict[str, bytes]]:
    """The samples of new shards, as the webdataset library reads them."""
    program.run("pack", "-q", *LAST_DOT, *arguments, "-o", "new/%d.tar")
    again = program.json("pack", *LAST_DOT, *arguments, "-o", "new/%d.tar")
    assert again["written"] == 0
    found = [
        one for path in sorted((program.home / "new").iterdir()) for one in tars.by_webdataset(path.read_bytes())
    ]
    assert b"dotted name" not in program.run("check", program.home / "new", code=None).stdout
    return {one.pop("__key__"): one for one in found}


SOURCES = [
    ["gnu.tar"],
    ["--keep-shards", "wds.tar"],
    ["--group-by-key", "--shuffle", "1", "wds.tar"],
    ["--layout", "files", "files"],
    ["--maxcount", "2", "files"],
]


@pytest.mark.parametrize("source", SOURCES, ids="-".join)
def test_pack(source: list[str], shards: list[str], program: Program) -> None:
    """A column has the keys as they were."""
    samples = packed(program, *source)
    assert samples == {
        mended(key): {**{one: f"{key} {one}".encode() for one in some}, "key.txt": key.encode()}
        for key, some in SAMPLES.items()
    }


def test_pack_files_that_lie_apart(program: Program) -> None:
    """In the order of names another sample lies in between; a header with the column of the key is a long one."""
    files, long = program.directory("files"), ".".join(["1234"] * 19)
    for name in ("a.b.jpg", "a.b.c.jpg", "a.b.txt", f"{long}.x"):
        (files / name).write_text(name)
    (program.home / "table.csv").write_text('key,caption\na.b,first\n"a.b.c",second\n')
    samples = packed(program, "--table", "table.csv", "files")
    assert samples == {
        "a_b": {"jpg": b"a.b.jpg", "txt": b"a.b.txt", "caption": b"first", "key.txt": b"a.b"},
        "a_b_c": {"jpg": b"a.b.c.jpg", "caption": b"second", "key.txt": b"a.b.c"},
        mended(long): {"x": f"{long}.x".encode(), "key.txt": long.encode()},
    }


@pytest.mark.parametrize("places", [("files/d", "files/d"), ("files/1/d", "files/2/d")])
def test_pack_refuses_keys_that_meet(places: tuple[str, str], program: Program) -> None:
    """In one directory, of two trees, and of two shards; nothing is written."""
    for number, (place, name) in enumerate(zip(places, ("1.2_3.x", "1_2.3.x"), strict=True)):
        (program.home / place).mkdir(parents=True, exist_ok=True)
        (program.home / place / name).write_text("x")
        program.write(f"{number}.tar", tar(member(b"d/" + name.encode()), member(b"d/1.2.y")))
    trees = sorted({str(Path(place).parent) for place in places})
    done = program.run("pack", *LAST_DOT, "--layout", "files", *trees, "-o", "new/%d.tar", code=7)
    text = done.stderr.decode()
    assert "1_2.3.x: would have the key of another sample" in text or "the key 'd/1_2_3' occurs twice" in text
    text = program.refused("pack", *LAST_DOT, "0.tar", "1.tar", "-o", "new/%d.tar", code=7)
    assert "the keys 'd/1.2_3', 'd/1_2.3' would be one, with _ for their dots" in text
    assert not (program.home / "new").exists()


def test_pack_directories_of_samples(program: Program) -> None:
    """Their names have no extension that a key could end at."""
    (program.directory("files") / "1.2").mkdir()
    (program.home / "files/1.2/1.2.dcm").write_text("x")
    text = program.refused("pack", *LAST_DOT, "files", "-o", "new/%d.tar", code=2)
    assert "choose --layout files" in text
