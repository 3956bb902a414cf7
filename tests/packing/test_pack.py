"""Shards of trees of files: which samples there are, in which order, and what stops a pack."""

from __future__ import annotations

import errno
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import socket
import sys
import tarfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import webdataset
from hypothesis import example, given
from hypothesis import strategies as st

from tests import tars
from tests.conftest import InProcess, Program, new_processes
from tests.overlay.test_overlay_mount import a_disk
from tests.processes import Process, wait_until
from tests.thorough import examples
from tests.tree.test_shard_tree import a_tree, check_consistency
from wdsfs import names
from wdsfs.cluster_workers import Workers
from wdsfs.durable import temporary_of
from wdsfs.errors import CommitError, StaleShard, UsageError, ViewError
from wdsfs.packing import file_source, reasons
from wdsfs.packing.file_samples import parse_splits
from wdsfs.packing.file_source import FilePlan, PackOptions, make_plan, pack_files
from wdsfs.packing.file_table import WalkRules
from wdsfs.packing.shard_writer import Files as TreeFiles
from wdsfs.packing.shard_writer import ShardWriter
from wdsfs.tar import headers
from wdsfs.tree.companions import read_class_names
from wdsfs.tree.composition import columns_of
from wdsfs.tree.tree import View

Files = Mapping[Any, bytes]

FLAT = {"a.jpg": b"A", "a.cls": b"0", "b.seg.png": b"BB", "b.cls": b"", "d/a.jpg": b"d"}
SAMPLES = {"d/a/jpg": b"A", "d/a/cls": b"0", "b/left.jpg": b"BB", "b/json": b"{}"}
FULL = {"d/a/a.jpg": b"A", "d/a/a.cls": b"0", "b/b.left.jpg": b"BB"}
CLASSES = {"dog/1.jpg": b"D", "cat/2.jpg": b"CC", "cat/1.jpg": b"C"}
CLASSED = {"layout": "classes"}
SPLIT = {"splits": tuple(parse_splits(["train=0.9", "val=0.1"])), "output": "{split}-%d.tar"}


@pytest.fixture
def program(in_process: InProcess) -> InProcess:
    return in_process


def write(home: Path, files: Files, mtime: int = 1_600_000_000) -> Path:
    for name, content in files.items():
        path = home / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, (mtime, mtime))
    home.mkdir(exist_ok=True)
    return home


def plan_of(*trees: Path, output: str = "out/s-%06d.tar", **options: Any) -> FilePlan:
    output = str(trees[0].parent / output)
    return make_plan([str(tree) for tree in trees], PackOptions(output, **options))


def pack(*trees: Path, jobs: int = 1, **options: Any) -> list[bytes]:
    """Return the bytes of the shards."""
    plan = plan_of(*trees, **options)
    pack_files(plan, jobs)
    return [Path(os.fsdecode(step.target)).read_bytes() for step in plan.steps]


def members(*shards: bytes) -> list[tuple[bytes, bytes]]:
    """Names and contents, in the order of the tars."""
    return [(one.name, tar[one.data : one.data + one.size]) for tar in shards for one in tars.by_tarfile(tar)]


def keys(*shards: bytes) -> list[str]:
    return [sample["__key__"] for shard in shards for sample in tars.by_webdataset(shard)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it was gone before it was opened, or read
        return False


def left_behind(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "out").glob("*")) if (home / "out").exists() else []


# --- layouts -------------------------------------------------------------------------------------------------


def test_files_are_packed_as_they_are(tmp_path: Path) -> None:
    """The files of a directory come before its directories, both by name; a hard link is a file."""
    tree = write(tmp_path / "tree", FLAT)
    os.link(tree / "a.jpg", tree / "c.jpg")
    (shard,) = pack(tree)
    assert members(shard) == [
        (os.fsencode(name), {**FLAT, "c.jpg": b"A"}[name]) for name in sorted([*FLAT, "c.jpg"])
    ]
    assert keys(shard) == ["a", "b", "c", "d/a"]
    with tarfile.open(fileobj=io.BytesIO(shard)) as archive:
        facts = {(one.mode, one.uid, one.uname, one.mtime, one.type) for one in archive}
    assert facts == {(0o444, 0, "bigdata", 1_600_000_000, tarfile.REGTYPE)}


@pytest.mark.parametrize(
    ("files", "layout", "view"),
    [
        (SAMPLES, "auto", View()),
        (FULL, "auto", View(names="full")),
        ({"a/jpg": b"", "a/b/jpg": b"", "a/txt": b""}, "auto", View()),
        ({"a.jpg": b"J", "a..txt": b"", "a.": b"E", "b.é": b"", "b.ê": b""}, "files", View("files")),
        ({"a/jpg": b"J", "a/.txt": b""}, "samples", View()),
        ({"a/a.jpg": b"J", "a/a..txt": b"", "a/a.": b""}, "samples", View(names="full")),
    ],
)
def test_what_a_mount_shows_can_be_packed(tmp_path: Path, files: Files, layout: str, view: View) -> None:
    """Files of a sample stay together, beside the samples below it."""
    (shard,) = pack(write(tmp_path / "tree", files), layout=layout)
    assert len(set(keys(shard))) == len(keys(shard))
    with a_tree([shard], view, merge=True) as shown:
        assert check_consistency(shown) == {b"/" + os.fsencode(name): content for name, content in files.items()}


def test_classes_are_numbered_in_the_order_of_their_names(tmp_path: Path) -> None:
    (shard,) = pack(write(tmp_path / "tree", CLASSES), layout="classes")
    assert members(shard) == [
        *((b"cat/1.cls", b"0"), (b"cat/1.jpg", b"C"), (b"cat/2.cls", b"0"), (b"cat/2.jpg", b"CC")),
        *((b"dog/1.cls", b"1"), (b"dog/1.jpg", b"D")),
    ]
    assert (tmp_path / "out/classes.txt").read_bytes() == b"cat\ndog\n"


@pytest.mark.parametrize(
    ("options", "column", "labels"),
    [
        ({"class_as": "name"}, b"cls", [b"cat", b"dog"]),
        ({"class_as": "none"}, b"", []),
        ({"class_column": "label.txt"}, b"label.txt", [b"0", b"1"]),
        ({"class_names": "names"}, b"cls", [b"7", b"1"]),
    ],
)
def test_the_column_of_the_class(
    tmp_path: Path, options: dict[str, Any], column: bytes, labels: list[bytes]
) -> None:
    (tmp_path / "names").write_text('{"7": "cat", "1": "dog"}')
    if "class_names" in options:
        options = {"class_names": str(tmp_path / "names")}
    (shard,) = pack(write(tmp_path / "tree", CLASSES), layout="classes", **options)
    samples = zip((b"cat/1.", b"cat/2.", b"dog/1."), labels[:1] + labels, strict=bool(labels))
    added = {sample + column: label for sample, label in samples}
    assert dict(members(shard)) == {os.fsencode(name): content for name, content in CLASSES.items()} | added
    assert (tmp_path / "out/classes.txt").exists() == ("class_column" in options)


def test_names_of_classes_that_lines_cannot_have(tmp_path: Path) -> None:
    pack(write(tmp_path / "tree", {b"a\nb/1.jpg": b"", b"\xff/1.jpg": b""}), layout="classes")
    assert json.loads((tmp_path / "out/classes.json").read_text()) == ["a\nb", "\udcff"]
    for number, name in enumerate([" a", "a\r", "[a", "\ufeffa", "\udcff", "a\u2028\f\u0085b"]):
        pack(write(tmp_path / f"{number}/tree", {f"{name}/1.jpg": b""}), layout="classes")
        (file,) = (tmp_path / f"{number}/out").glob("classes.*")
        assert read_class_names(str(file)) == {"0": name}


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (FLAT, "files"),
        (SAMPLES, "samples"),
        (FULL, "samples"),
        ({"0/1.jpg": b"", "0/1.txt": b""}, "files"),
        ({"a.jpg": b""}, "files"),
        ({"README": b"", "a.jpg": b""}, "files"),
        ({"README": b"", "a/jpg": b""}, "samples"),
        (CLASSES, "can be a class"),
        ({**CLASSES, "captions.csv": b"", "README.txt": b"", "cat/more.jsonl": b""}, "can be a class"),
        ({**CLASSES, "3.jpg": b""}, "files"),
        ({"a/1.csv": b"", "b/2.csv": b""}, "files"),
        ({"a/jpg": b"", "b/1.jpg": b""}, "looks like a column"),
        ({"a/jpg": b"", "1.jpg": b""}, "looks like a column"),
        ({}, "there is no file to pack"),
    ],
)
def test_a_layout_is_detected_or_refused(tmp_path: Path, files: Files, found: str) -> None:
    tree = write(tmp_path / "tree", files)
    if found in ("files", "samples"):
        assert plan_of(tree, leave_out=True).layout.name == found
    else:
        with pytest.raises(CommitError, match=found):
            plan_of(tree, leave_out=True)


def in_parts(*parts: str) -> dict[str, bytes]:
    return {f"{part}/{path}": b"" for part in parts for path in CLASSES}


SPLITS = in_parts("train", "Val")


@pytest.mark.parametrize(
    ("files", "layout", "remark"),
    [
        (in_parts("one", "two"), "classes", "directories cat, dog"),
        (in_parts("one", "train"), "classes", "directories cat, dog"),
        ({**CLASSES, "cat/x/1.jpg": b"", "dog/x/1.jpg": b"", "cat/y/1.jpg": b""}, "classes", ""),
        (SPLITS, "files", ""),
        ({**CLASSES, "captions.csv": b""}, "files", "captions.csv: a table .* --table FILE"),
        ({**CLASSES, "dog/captions.csv": b""}, "classes", "dog/captions.csv: a table .* --table FILE"),
        ({"1.csv": b"", "1.json": b"", "2.csv": b""}, "files", ""),
        ({"1.csv": b"", "1.jpg": b"", "2.csv": b"", "2.jpg": b""}, "files", ""),
    ],
)
def test_what_readers_may_not_expect_is_told(tmp_path: Path, files: Files, layout: str, remark: str) -> None:
    remarks = plan_of(write(tmp_path / "tree", files), layout=layout).remarks
    assert len(remarks) == bool(remark)
    assert re.search(remark, "".join(remarks))


@pytest.mark.parametrize("tables", [{}, {"train/metadata.csv": b"", "Val/metadata.csv": b""}])
def test_splits_are_no_classes(tmp_path: Path, tables: Files) -> None:
    tree = write(tmp_path / "tree", {**SPLITS, **tables})
    way_out = f"wdsfs pack {tree} -o 'out/{{split}}-%06d.tar'.*--layout files"
    for layout in ("classes", "auto"):
        with pytest.raises(CommitError, match=way_out):
            plan_of(tree, layout=layout)
    if tables:
        return
    with pytest.raises(CommitError, match=r"occurs twice, in .*: \{split\} in --output packs"):
        plan_of(tree / "train", tree / "Val", layout="classes")
    (tree / "Val/cat/1.jpg").rename(tree / "Val/cat/4.jpg")
    (tree / "Val/cat/2.jpg").unlink()
    (tree / "Val/dog/1.jpg").unlink()
    (remark,) = plan_of(tree / "train", tree / "Val", layout="classes").remarks
    assert "train, Val become one set: {split} in --output" in remark


@pytest.mark.parametrize(
    ("change", "options", "layout"),
    [
        ({}, {}, "classes"),
        ({"README.md": b"", "train/metadata.csv": b""}, {"leave_out": True}, "classes"),
        ({"train/cat/1.txt": b""}, {"layout": "files"}, "files"),
        ({"extra/1.jpg": b""}, {"walk": WalkRules(exclude=("extra/",))}, "classes"),
        ({"extra/1.jpg": b""}, {}, "tree/extra is no split"),
        ({"1.jpg": b""}, {"layout": "classes"}, "outside of a split"),
        ({"Val/2.jpg": b""}, {"layout": "classes"}, "outside of a class"),
    ],
)
def test_folders_are_splits(tmp_path: Path, change: Files, options: dict[str, Any], layout: str) -> None:
    """One numbering of the classes, of which the second split lacks the first one."""
    tree = write(tmp_path / "tree", {**in_parts("train"), "Val/dog/1.jpg": b"", "Val/eel/1.jpg": b"", **change})
    options |= {"output": "out/{split}-%d.tar"}
    if layout not in ("files", "classes"):
        with pytest.raises((CommitError, UsageError), match=layout):
            pack(tree, **options)
        return
    plan = plan_of(tree, **options)
    assert (plan.layout.name, plan.splits) == (layout, ["Val", "train"])
    val, train = pack(tree, **options)
    assert len(keys(train)) == 3
    if layout == "files":
        assert keys(val) == ["Val/dog/1", "Val/eel/1"]
    else:
        assert {name: content for name, content in members(val) if name.endswith(b".cls")} == {
            b"Val/dog/1.cls": b"1",
            b"Val/eel/1.cls": b"2",
        }
        assert left_behind(tmp_path) == ["Val-0.tar", "classes.txt", "train-0.tar"]


def test_folders_that_are_named_are_splits(tmp_path: Path) -> None:
    """As if the folder above them were named; the new shards may lie beside them."""
    files = {**in_parts("train"), "train/note.log": b"", "train/t.csv": b"file_name,txt\ndog/1.jpg,A dog\n"}
    tree = write(tmp_path / "tree", {**files, "Val/dog/1.jpg": b"", "Val/eel/1.jpg": b"", "other/1.jpg": b""})
    options: dict[str, Any] = {"output": "splits/{split}-%d.tar", "tables": (str(tree / "train/t.csv"),)}
    shards = pack(tree / "train", tree / "Val", **options, walk=WalkRules(exclude=("*.log",)))
    assert {name for name, content in members(*shards) if content == b"A dog"} == {b"train/dog/1.txt"}
    assert shards == pack(tree, **options, walk=WalkRules(exclude=("*.log", "other", "splits")))
    assert (tree / "splits/classes.txt").read_bytes() == b"cat\ndog\neel\n"


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["*.log"], "a.jpg b/c.jpg b/raw/d.jpg"),
        (["raw", "x/*"], "a.jpg b/c.jpg b/e.log b/raw.log"),
        (["b/*.jpg", "raw*"], "a.jpg b/e.log"),
        (["b"], "a.jpg"),
    ],
)
def test_excluded_files_are_not_looked_at(tmp_path: Path, patterns: list[str], names: str) -> None:
    """Not even those that could not be packed."""
    files = dict.fromkeys(["a.jpg", "b/c.jpg", "b/e.log", "b/raw.log", "b/raw/d.jpg", "x/README"], b"")
    walk = WalkRules(exclude=(*patterns, "x"))
    plan = plan_of(tree := write(tmp_path / "tree", files), walk=walk, layout="files")
    assert plan.losses.summary.endswith("--exclude names")
    assert [name.decode() for name, _ in members(*pack(tree, walk=walk, layout="files"))] == names.split()
    assert len(plan.remarks) == ("x/*" in patterns)  # it excludes nothing that `x` leaves


# --- tables --------------------------------------------------------------------------------------------------


TABLE = b"key,caption,stars\ncat/1,A cat,5\ndog/1,A dog,\n"


@pytest.mark.parametrize(
    ("table", "options", "added"),
    [
        (TABLE, {}, {"cat/1.caption": b"A cat", "cat/1.stars": b"5", "dog/1.caption": b"A dog"}),
        (TABLE, {"columns": ["txt=caption"]}, {"cat/1.txt": b"A cat", "dog/1.txt": b"A dog"}),
        (TABLE, {"columns": ["stars"]}, {"cat/1.stars": b"5"}),
        (TABLE, {"columns": ["txt=stars;caption"]}, {"cat/1.txt": b"5", "dog/1.txt": b"A dog"}),
        (TABLE, {"columns": ["nothing"]}, "no table has 'nothing'; columns: 'caption', 'stars'"),
        (
            TABLE,
            {"columns": ["cls=stars"]},
            "--class-column cls: another column .* --columns NAME=stars.* --class-as none",
        ),
        (TABLE, {"columns": ["JPG=stars"]}, "1.jpg is the column jpg of its sample.*--columns NAME=stars"),
        (TABLE, {"columns": ["__key__=stars"]}, "column 'stars': readers use this name"),
        (TABLE + b"cat/1,Another,1\n", {}, "table.csv: the sample 'cat/1' has several rows.*--key-ends last-dot"),
        (b"key,x,X\ncat/1,1,2\n", {}, "column 'X': differs from another one in letter case only"),
    ],
)
def test_columns_of_a_table_become_members(
    tmp_path: Path, table: bytes, options: dict[str, Any], added: dict[str, bytes] | str
) -> None:
    tree = write(tmp_path / "tree", {**CLASSES, "table.csv": table})
    options = {"columns": columns_of(options.get("columns", [])), "tables": (str(tree / "table.csv"),), **CLASSED}
    if isinstance(added, str):
        with pytest.raises((CommitError, UsageError), match=added):
            plan_of(tree, **options)
        return
    shards = pack(tree, **options, maxcount=2)
    labels = {"cat/1.cls": b"0", "cat/2.cls": b"0", "dog/1.cls": b"1"}
    everything = {os.fsencode(name): content for name, content in (CLASSES | labels | added).items()}
    assert members(*shards) == sorted(everything.items())
    assert pack(tree, **options, jobs=2, maxcount=2) == shards  # they are there already


@pytest.mark.parametrize("files", [FLAT, SAMPLES, FULL])
def test_columns_of_a_table_in_every_layout(tmp_path: Path, files: Files) -> None:
    tree, table = write(tmp_path / "tree", files), tmp_path / "table.csv"
    table.write_text("key,a.txt\nd/a,one\nb,two\n")
    there = dict(members(*pack(tree, tables=(str(table),))))
    assert {name: content for name, content in there.items() if name.endswith(b".txt")} == {
        b"b.a.txt": b"two",
        b"d/a.a.txt": b"one",
    }


# --- what cannot be packed -----------------------------------------------------------------------------------


ODD = {
    "README": "has no extension",
    ".hidden.jpg": "starts? with a dot",
    "b.JPG": "only in letter case",
    "b.É": "only in letter case",
    "d/" * 257 + "a.jpg": "its name has 257 folders",
    "a.__KEY__": "readers use this name",
    "__a.b__": "a name like __this__",
    "__meta__/a.jpg": "a name like __this__",
    ".git/a.jpg": "hidden directory",
}
ODD_IN_SAMPLES = {
    "x.jpg": "outside of a sample",
    "a.b/jpg": "has a dot",
    "c/__Url__": "use this name",
    "c/JPG": "only in letter case",
}


@pytest.mark.parametrize(
    ("layout", "name"), [*(("files", name) for name in ODD), *(("samples", name) for name in ODD_IN_SAMPLES)]
)
def test_what_would_be_in_no_sample_is_refused(tmp_path: Path, layout: str, name: str) -> None:
    proper = "c/jpg" if layout == "samples" else "b.é" if name == "b.É" else "b.jpg"
    tree, reason = write(tmp_path / "tree", {proper: b"", name: b""}), {**ODD, **ODD_IN_SAMPLES}[name]
    with pytest.raises(CommitError, match=f"1 file cannot be packed:\n.*{reason}.*\n--leave-out packs all others"):
        pack(tree, layout=layout)
    assert len(members(*pack(tree, layout=layout, leave_out=True))) == 1


def test_a_plan_is_compared_with_what_a_reader_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an error in the rule of the writers: the plan is made of names that it lets pass."""
    monkeypatch.setattr(reasons, "_misread", lambda key, extension, lower: None)
    for number, name in enumerate(("d/" * 257 + "a.jpg", "__m__/a.jpg")):
        tree = write(tmp_path / f"{number}/tree", {name: b""})
        with pytest.raises(CommitError, match=r"readers would leave out .*please report it"):
            plan_of(tree, layout="files")
    tree = write(tmp_path / "two/tree", {"a.b/jpg": b"", "a.c/jpg": b""})
    with pytest.raises(CommitError, match="readers would find 1 sample in place of 2"):
        plan_of(tree, layout="samples")


def test_a_column_of_the_class_that_readers_leave_out_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headers, "NAME_MAX", 10)
    tree = write(tmp_path / "tree", {"cat/1234.x": b"", "cat/12.x": b""})
    with pytest.raises(CommitError, match=r"1 file cannot be packed:\n.*cat/1234\.x.* has 12 bytes"):
        plan_of(tree, layout="classes")


@pytest.mark.parametrize(
    ("files", "options", "text"),
    [
        ({**CLASSES, "a.csv": b""}, CLASSED, r"a\.csv: is a table.*--table FILE.*\n--leave-out packs all others"),
        ({**CLASSES, "readme.txt": b""}, CLASSED, "outside of a class"),
        ({**CLASSES, "cat/1.CLS": b"9"}, CLASSED, r"cat/1.CLS is the column cls .* --class-column"),
        (
            in_parts("train", "val"),
            {"output": "out/{split}-%d.tar", "walk": WalkRules(exclude=("dog",))},
            "can be a",
        ),
        (FLAT, {"output": "tree/out/%03d.tar"}, r"tree/out/000\.tar would be in .*/tree, which is packed"),
        ({"a.jpg": b""}, SPLIT, r"--split val=0.1: that is less than one of 1 samples"),
        # Options that do not go together.
        (FLAT, {"shuffle": "1", "order": "x"}, "--shuffle and --order"),
        (FLAT, {"output": "{split}-%d.tar"}, "/d is no split .*--exclude"),
        (FLAT, {"splits": SPLIT["splits"]}, "--split and {split}"),
        (FLAT, {"columns": columns_of(["txt=caption"])}, "--columns .* --table"),
        (FLAT, {"output": "s.tar.gz"}, "--output"),
        (FLAT, {"class_column": ".x"}, "--class-column"),
        (FLAT, {"class_as": "none", "class_names": "x"}, "--class-names is for .* --class-as none"),
        (FLAT, {"class_names": "x"}, "--class-names is for --layout classes"),
        (FLAT, {"output": "s.tar", "maxcount": 1}, "--output .* names 1 shard"),
    ],
)
def test_what_is_refused_before_anything_is_written(
    files: Files, options: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises((CommitError, UsageError), match=text):
        plan_of(write(tmp_path / "tree", files), **options)


def test_special_files_are_refused(tmp_path: Path) -> None:
    tree = write(tmp_path / "tree", {"a.jpg": b"A"})
    os.mkfifo(tree / "fifo.jpg")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tree / "socket.jpg"))
    with pytest.raises(CommitError, match=r"2 files cannot be packed:\n.*/(fifo|socket)\.jpg.*\n.*/(fifo|socket)"):
        plan_of(tree)
    assert plan_of(tree, leave_out=True).losses.unpackable_count == 2


def test_symbolic_links_are_packed_only_on_demand(tmp_path: Path) -> None:
    elsewhere = write(tmp_path / "elsewhere", {"x.jpg": b"X", "d/y.jpg": b"Y"})
    tree = write(tmp_path / "tree", {"a.jpg": b"A"})
    (tree / "x.jpg").symlink_to(elsewhere / "x.jpg")
    (tree / "d").symlink_to(elsewhere / "d")
    with pytest.raises(CommitError, match=r"2 files cannot be packed:\n.*--follow-links"):
        pack(tree)
    assert keys(*pack(tree, leave_out=True)) == ["a"]
    (tree / "nothing.jpg").symlink_to("nowhere")
    (tree / "itself.jpg").symlink_to("itself.jpg")
    (elsewhere / "d/up").symlink_to(tree)
    followed = plan_of(tree, leave_out=True, walk=WalkRules(follow_links=True), output="f-%d.tar")
    pack_files(followed)
    assert keys((tmp_path / "f-0.tar").read_bytes()) == ["a", "x", "d/y"]
    found = {os.path.basename(one.path): one.reason for one in followed.losses.unpackable}
    assert set(found) == {b"nothing.jpg", b"itself.jpg", b"up"}


def test_leavings_of_programs_are_left_out(tmp_path: Path) -> None:
    tree = write(tmp_path / "tree", {"a.jpg": b"A", "a.jpg~": b"", ".DS_Store": b"", "Thumbs.db": b"db"})
    assert plan_of(tree).losses.summary == "3 files that programs have left behind"
    assert keys(*pack(tree, leave_out=True, walk=WalkRules(with_leavings=True))) == ["Thumbs", "a"]


def test_a_file_that_cannot_be_read_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = write(tmp_path / "tree", {"a.jpg": b"A", "b.jpg": b"B"})
    (tree / "b.jpg").chmod(0)
    # As for a user who is not root; what root may read is asked of the kernel.
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "access", lambda name, mode, dir_fd: os.stat(name, dir_fd=dir_fd).st_mode & 0o444)
    with pytest.raises(CommitError, match=r"b\.jpg: cannot be read by this user"):
        plan_of(tree)


def test_a_key_in_two_trees_is_refused(tmp_path: Path) -> None:
    one, other = (write(tmp_path / name, {"a.jpg": b"", f"{name}.jpg": b""}) for name in ("x", "y"))
    with pytest.raises(CommitError, match=r"the key 'a' occurs twice, in .*/x and .*/y: pack the directory above"):
        plan_of(one, other)
    (other / "a.jpg").unlink()
    assert keys(*pack(one, other)) == ["a", "x", "y"]
    (one / "d").mkdir()
    with pytest.raises(UsageError, match="would be packed twice"):
        plan_of(one, one / "d")


# --- names, times, sizes -------------------------------------------------------------------------------------

_NAME = st.binary(min_size=1, max_size=12).map(
    lambda raw: raw.translate(bytes.maketrans(b"\0/.", b"0_-")).replace(b"~", b"-")
)
_EXTENSION = st.sampled_from([b"jpg", b"seg.png", b"json", b"x\ny", b"\xff", b"e" * 100])
_PATH = st.tuples(st.lists(_NAME, max_size=2), _NAME, _EXTENSION).map(
    lambda parts: b"/".join([*parts[0], parts[1] + b"." + parts[2]])
)


def escaped(path: bytes) -> bytes:
    """A path as a mount shows it: of what reads like an escape, the percent sign is escaped."""
    return b"/".join(map(names.escape, path.split(b"/")))


@examples(8)
@given(st.dictionaries(_PATH, st.binary(max_size=1200), min_size=1, max_size=6))
@example({b"%00.jpg": b"", b"%/a.jpg": b""})
@example({b"d/\xff\n.jpg": b"x", b"n" * 200 + b".jpg": b"", b"d/" + b"m" * 120 + b"/a.jpg": b"y"})
def test_a_mount_of_a_packed_tree_shows_the_tree(files: dict[bytes, bytes]) -> None:
    with TemporaryDirectory() as name:
        tree = Path(name, "tree")
        kept: dict[bytes, bytes] = {}
        for path, content in files.items():
            try:
                write(tree, {path: content})
            except (NotADirectoryError, IsADirectoryError, FileExistsError):
                continue  # another file or directory has the name
            kept[path] = content
        write(tree, {"always.txt": b"there"})
        kept[b"always.txt"] = b"there"
        # Files that are refused are not in the shards: they must be all that is missing.
        plan = plan_of(tree, layout="files", leave_out=True, maxcount=2)
        left_out = tuple(os.path.relpath(one.path, os.fsencode(tree)) + b"/" for one in plan.left_out)
        kept = {path: content for path, content in kept.items() if not (path + b"/").startswith(left_out)}
        pack_files(plan)
        shards = [Path(os.fsdecode(step.target)).read_bytes() for step in plan.steps]
        with a_tree(shards, View("files"), merge=True) as merged:
            shown = check_consistency(merged)
    assert shown == {b"/" + escaped(path): content for path, content in kept.items()}
    assert [len(shard) for shard in shards] == [step.output.length for step in plan.steps]


@pytest.mark.parametrize("mtime", [-5, 8**11])
def test_times_that_need_more_than_a_field(tmp_path: Path, mtime: int) -> None:
    plan = plan_of(write(tmp_path / "tree", CLASSES), layout="classes", mtime=mtime)
    pack_files(plan)
    shard = (tmp_path / "out/s-000000.tar").read_bytes()
    assert {one.mtime for one in tars.by_tarfile(shard)} == {mtime}
    assert len(shard) == plan.length


def test_copies_with_other_times_give_the_same_bytes_with_one_time(tmp_path: Path) -> None:
    one = pack(write(tmp_path / "a/tree", FLAT, mtime=5), mtime=7)
    other = pack(write(tmp_path / "b/tree", dict(reversed(FLAT.items())), mtime=6), mtime=7)
    assert one == other
    assert pack(tmp_path / "a/tree", output="own/%d.tar") != pack(tmp_path / "b/tree", output="own/%d.tar")


# --- order, shards, splits -----------------------------------------------------------------------------------

MANY: Files = {f"{number:03d}.txt": b"%d" % number for number in range(200)}


def test_a_shuffle_is_the_same_everywhere(tmp_path: Path) -> None:
    tree = write(tmp_path / "tree", MANY)
    shuffled = keys(*pack(tree, shuffle="1", maxcount=50))
    assert sorted(shuffled) == [name.partition(".")[0] for name in map(os.fsdecode, MANY)]
    # By what the documentation says, with nothing of wdsfs.
    by_hash = sorted(
        shuffled, key=lambda key: hashlib.blake2b(b"wdsfs shuffle 1\0" + key.encode(), digest_size=8).digest()
    )
    assert shuffled == by_hash
    assert keys(*pack(tree, shuffle="2", output="two/%d.tar")) != shuffled


def test_the_order_of_a_list(tmp_path: Path) -> None:
    tree = write(tmp_path / "tree", FLAT)
    listed = tmp_path / "keys"
    listed.write_bytes(b"d/a\r\nb\n")
    with pytest.raises(CommitError, match="a: its key is not in the list"):
        plan_of(tree, order=str(listed))
    assert keys(*pack(tree, order=str(listed), leave_out=True)) == ["d/a", "b"]
    listed.write_bytes(b"b\0nothing\0")
    with pytest.raises(UsageError, match="keys: 1 of its 2 keys is not in the set: 'nothing'"):
        plan_of(tree, order=str(listed))
    listed.write_bytes(b"d/a\n/elsewhere/b.jpg\n./d/a\n")  # as --keys takes it
    assert keys(*pack(tree, order=str(listed), leave_out=True, output="names/%d.tar")) == ["d/a", "b"]
    listed.with_suffix(".csv").write_text("n,path\n1,b\n2,d/a\n")
    assert keys(*pack(tree, order=f"{listed}.csv:path", leave_out=True, output="two/%d.tar")) == ["b", "d/a"]
    listed.write_bytes(b"\n")
    with pytest.raises(ViewError, match="keys: lists no key"):
        plan_of(tree, order=str(listed))
    with pytest.raises(UsageError, match="--order /dev/zero: is no file that can be read again"):
        plan_of(tree, order="/dev/zero")


def test_shards_are_cut_as_by_the_webdataset_library(tmp_path: Path) -> None:
    tree = write(tmp_path / "tree", {f"{number}.txt": b"x" * number * 100 for number in range(1, 10)})
    (tmp_path / "theirs").mkdir()
    with webdataset.ShardWriter(f"{tmp_path}/theirs/%d.tar", maxcount=3, maxsize=1100, verbose=0) as writer:
        for number in range(1, 10):
            writer.write({"__key__": str(number), "txt": "x" * number * 100})
    theirs = [keys(path.read_bytes()) for path in sorted((tmp_path / "theirs").iterdir())]
    assert [keys(shard) for shard in pack(tree, maxcount=3, maxsize=1100)] == theirs


def test_splits_are_exact_in_each_class_and_the_same_for_every_order(tmp_path: Path) -> None:
    files = {f"{'a' if number < 30 else 'b'}/{number}.jpg": b"" for number in range(100)}
    tree = write(tmp_path / "tree", files)
    splits = tuple(parse_splits(["train=0.8", "val=0.1", "test=0.1"]))
    found = {}
    for name, options in {"plain": {}, "shuffled": {"shuffle": "x"}}.items():
        plan = plan_of(tree, layout="classes", splits=splits, output=name + "/{split}/%d.tar", **options)
        pack_files(plan)
        found[name] = {one.name: keys((tmp_path / name / one.name / "0.tar").read_bytes()) for one in splits}
        assert (tmp_path / name / "classes.txt").exists()
    counts = {
        one: [sum(key.startswith(label) for key in some) for label in ("a/", "b/")]
        for one, some in found["plain"].items()
    }
    assert counts == {"train": [24, 56], "val": [3, 7], "test": [3, 7]}
    assert sorted(itertools.chain(*found["plain"].values())) == sorted(name.partition(".")[0] for name in files)
    for one in splits:
        assert set(found["plain"][one.name]) == set(found["shuffled"][one.name])
    assert found["plain"]["train"] != found["shuffled"]["train"]


@pytest.mark.parametrize("texts", ["train=0.9", "train", "a=0.5 a=0.5", "a=nan b=0.5", "a/b=1"])
def test_splits_that_mean_nothing(texts: str) -> None:
    wrong = r"0.9 together|--split (train|a=nan|a/b=1): write NAME=FRACTION|--split: a, a: .* a name of its own"
    with pytest.raises(UsageError, match=wrong):
        parse_splits(texts.split())


# --- writing -------------------------------------------------------------------------------------------------


def test_processes_and_workers_of_a_cluster_write_what_one_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_source, "ALONE_FILES", 10)
    tree = write(tmp_path / "tree", {f"{number % 2}/{number:02}.txt": b"%d" % number for number in range(40)})
    captions = "".join(f"{number % 2}/{number:02},{'x' * number}\n" for number in range(40))
    (tmp_path / "captions.csv").write_text("key,caption\n" + captions)
    options: dict[str, Any] = {"maxcount": 9, "tables": (str(tmp_path / "captions.csv"),), **CLASSED}
    alone = pack(tree, **options)
    assert len(alone) == 5
    assert {len(value): name for name, value in members(*alone)}[39] == b"1/39.caption"
    assert pack(tree, jobs=2, output="two/%d.tar", **options) == alone
    plan = plan_of(tree, output="far/%d.tar", **options)
    with ThreadPoolExecutor(2) as executor:
        assert pack_files(plan, workers=Workers.of(executor)) == plan.steps
    assert [Path(os.fsdecode(step.target)).read_bytes() for step in plan.steps] == alone


CHANGES: dict[str, Callable[[Path], object]] = {
    "grows": lambda path: path.write_bytes(b"more"),
    "shrinks": lambda path: path.write_bytes(b""),
    "same size": lambda path: path.write_bytes(b"e"),
    "vanishes": lambda path: path.unlink(),
    "becomes a link": lambda path: path.rename(path.parent / "x") and path.symlink_to("x"),
    "loses its place": lambda path: path.parent.rename(path.parent.parent / "elsewhere"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_file_that_changes_meanwhile_is_named(tmp_path: Path, change: Callable[[Path], object]) -> None:
    tree = write(tmp_path / "tree", FLAT)
    plan = plan_of(tree)
    change(tree / "d/a.jpg")
    with pytest.raises(CommitError, match=r"tree/d/a\.jpg"):
        pack_files(plan)
    assert left_behind(tmp_path) == []


def test_what_is_there_is_kept_if_it_is_the_same_and_refused_if_not(tmp_path: Path) -> None:
    tree = write(tmp_path / "tree", CLASSES)
    options: dict[str, Any] = {"layout": "classes", "maxcount": 1}
    shards = pack(tree, **options)
    titles = [f"s-{number:06d}.tar" for number in range(3)]
    assert left_behind(tmp_path) == ["classes.txt", *titles]
    (tmp_path / "out" / titles[1]).unlink()
    (tmp_path / "out/classes.txt").unlink()
    plan = plan_of(tree, **options)
    assert pack_files(plan) == [plan.steps[1]]
    assert [(tmp_path / "out" / name).read_bytes() for name in titles] == shards

    def refused(text: str) -> None:
        with pytest.raises(CommitError, match=text):
            pack_files(plan_of(tree, **options))

    (tmp_path / "out" / titles[0]).write_bytes(shards[0].replace(b"C", b"c", 1))  # as long as before
    refused(f"{titles[0]} exists already with other content")
    (tmp_path / "out" / titles[0]).write_bytes(shards[0])
    (tmp_path / "out/classes.txt").write_text("dog\ncat\n")
    refused(r"classes\.txt exists already with other content")
    (tmp_path / "out/classes.txt").unlink()
    (tmp_path / "out/s-000003.tar").touch()
    refused(r"s-000003\.tar exists, but this set has fewer shards")


def test_a_table_that_changes_makes_another_set(tmp_path: Path) -> None:
    tree, table = write(tmp_path / "tree", CLASSES), tmp_path / "table.csv"
    table.write_bytes(TABLE)
    options: dict[str, Any] = {"tables": (str(table),), **CLASSED}
    pack(tree, **options)
    plan = plan_of(tree, output="other/%d.tar", **options)
    table.write_bytes(TABLE.replace(b"A cat", b"A dog"))
    with pytest.raises(StaleShard, match=r"table\.csv has changed since"):
        pack_files(plan)
    with pytest.raises(CommitError, match="exists already with other content"):
        pack(tree, **options)


def test_a_full_disk_leaves_whole_shards_only(program: Program) -> None:
    tree = write(program.home / "tree", {f"{number}.bin": bytes(3 << 20) for number in range(4)})
    with a_disk(program, "tmpfs") as disk:
        plan = make_plan([str(tree)], PackOptions(f"{disk}/%d.tar", maxcount=1))
        with pytest.raises(CommitError, match=r"the new shards need 12.0 MiB on this file system"):
            pack_files(plan)
        assert os.listdir(disk) == []
        with pytest.raises(OSError, match="No space left") as caught:
            pack_files(plan, space_check=False)
        assert caught.value.errno == errno.ENOSPC
        assert sorted(os.listdir(disk)) == ["0.tar", "1.tar"]
        for path in disk.iterdir():
            path.unlink()
        small = plan_of(tree, maxcount=4, output=f"{disk}/all-%d.tar")
        with pytest.raises(OSError, match="No space left"):
            pack_files(small, space_check=False)
        assert os.listdir(disk) == []


# `wdsfs`, which hands out 20 shards to its processes and then no more.
STOPPING = """
import itertools, signal
from wdsfs.cli.main import main
from wdsfs.packing.file_source import PlannedFiles
original, calls = PlannedFiles.__reduce__, itertools.count()
def reduce(self):
    while next(calls) >= 20:
        signal.pause()
    return original(self)
PlannedFiles.__reduce__ = reduce
main(prog_name="wdsfs")
"""


def test_a_pack_that_is_killed_goes_on_when_it_is_repeated(program: Program) -> None:
    tree = write(program.home / "tree", {f"{number:05d}.txt": b"%d" % number * 99 for number in range(4200)})
    arguments = ("pack", "tree", "--maxcount", "100", "-j", "2", "-o")
    command = [sys.executable, "-c", STOPPING, *arguments, "out/%03d.tar"]
    with Process(command, cwd=program.home, env=program.environment) as process:
        first = program.home / "out/000.tar"
        wait_until(lambda: first.exists() or process.poll() is not None, "the first shard")
        process.kill()
    assert process.returncode == -signal.SIGKILL
    wait_until(lambda: not any(map(is_running, new_processes())), "the end of its processes")
    done = [path.name for path in (program.home / "out").glob("*.tar")]
    assert 0 < len(done) < 42
    leftover = Path(os.fsdecode(temporary_of(os.fsencode(program.home / "out/041.tar"))))
    leftover.write_bytes(b"of a process that was killed, too")
    report = program.json(*arguments, "out/%03d.tar", "--json")
    assert report["written"] == 42 - len(done)
    plan = make_plan([str(tree)], PackOptions(str(program.home / "out/%03d.tar"), maxcount=100))
    assert all(ShardWriter({}, TreeFiles()).is_there(step.output) for step in plan.steps)
    assert len(list((program.home / "out").iterdir())) == 42


# --- the command ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["files", "classes"])
def test_dots_that_cut_keys_are_told(program: Program, layout: str) -> None:
    images = {f"series{series}/1.2.840.{series}.{n}.dcm": b"" for series in range(2) for n in range(1000)}
    write(program.home / "tree", images)
    done = program.run("pack", "-n", "--layout", layout, "tree", "-o", "out/s-%06d.tar")
    lines = done.stderr.decode().splitlines()
    assert any("series0/1.2.840.0.0.dcm" in line and "1_2_840_0_0.dcm" in line for line in lines)
    assert max(map(len, lines)) < 2000


def test_the_command(program: Program) -> None:
    write(program.home / "tree", {**FLAT, "README": b"", ".DS_Store": b""})
    arguments = ("pack", "tree", "-o", "out/s-%06d.tar", "--maxcount", "2")
    assert b"1 file cannot be packed" in program.run(*arguments, code=7).stderr
    assert "packed as files" in program.run(*arguments, "--leave-out", "-n").stderr.decode()
    assert not (program.home / "out").exists()
    write(program.home, {"table.csv": b"key,caption\nb,A \xc3\xa9\x1b cat\n"})
    shown = program.run(*arguments, "--exclude", "README", "--table", "table.csv", "-n").stdout.decode()
    assert [line.split(maxsplit=3) for line in shown.splitlines()[6:11]] == [
        ["a", "cls", "1", "0"],
        ["a", "jpg", "1"],
        ["b", "caption", "9", "A é\\x1b cat"],
        *(["b", "cls", "0"], ["b", "seg.png", "2"]),
    ]
    done = program.run(*arguments, "--leave-out", "--export", "dali")
    assert "shards: 2 new; 3 samples, " in done.stdout.decode()
    assert "1 file that cannot be packed, 1 file that programs have left behind" in done.stdout.decode()
    assert left_behind(program.home) == [*("s-000000.idx", "s-000000.tar", "s-000001.idx", "s-000001.tar")]
    report = json.loads(program.run(*arguments, "--leave-out", "--json").stdout)
    assert report["written"] == 0
    assert [(row["samples"], row["bytes"]) for row in report["shards"]] == [(2, 4608), (1, 2048)]
    assert report["left_out_count"] == 2
    shutil.rmtree(program.home / "out")
    program.refused("pack", "tree", "-o", "s3://bucket/%d.tar", "--leave-out", "--export", "dali", code=2)
    program.refused("pack", "nowhere", "-o", "out/%d.tar", code=7)
