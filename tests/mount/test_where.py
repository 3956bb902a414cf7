"""`wdsfs where`: both engines say the same of the same tree, and an overlay says what is its own."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import sets, tars
from tests.conftest import Program
from tests.kernel.mounts import end_mount, need_erofs
from tests.tars import member
from tests.web_server import WebServer
from wdsfs.index.store import open_index

LONG = b"long/" * 40 + b"name.txt"
SHARD = tars.tar(
    member(b"a/1.jpg", b"jpg" * 400),
    member(b"a/1.seg.png", b"png"),
    member(b"a/1.empty", b""),
    member(b"a/stray", b"no sample"),
    *(tars.gnu_long(LONG), member(LONG[:100], b"far away")),
    member(b"a/link", kind=tars.SYMLINK, link=b"1.jpg"),
    member(b"b.d/2.jpg", b"2"),
    member(b"a/1.jpg", b"the same key again"),
)
OTHER = tars.tar(member(b"a/1.jpg", b"other"), member(b"c/9.txt", b"9"))


@contextmanager
def mounted(program: Program, engine: str, *options: str) -> Iterator[Path]:
    """The two shards, mounted by this engine."""
    shards = [program.write("s0.tar", SHARD), program.write("s1.tar", OTHER)]
    if engine == "fuse":
        with program.mounted(*options, *shards) as found:
            yield found.path
        return
    need_erofs()
    try:
        program.run("mount", "--engine", "kernel", *options, *shards, program.mountpoint)
        yield program.mountpoint
    finally:
        end_mount(program.mountpoint)


def said(program: Program, *paths: Path, code: int = 0) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = program.json("where", *paths, code=code)
    return found


@pytest.mark.parametrize(
    "options",
    [[], ["--layout", "files"], ["--names", "full"], ["--merge"], ["--layout", "files", "--merge"]],
    ids="-".join,
)
def test_both_engines_say_the_same(options: list[str], program: Program) -> None:
    answers = []
    for engine in ("fuse", "kernel"):
        with mounted(program, engine, *options) as mountpoint:
            found = said(program, mountpoint, *sorted(mountpoint.rglob("*")))
            assert {one.pop("engine") for one in found} == {engine}
            answers.append({one["path"]: one for one in found})
            for one in found:
                if one["offset"] is not None:
                    with open(one["shard"], "rb") as shard:
                        there = os.pread(shard.fileno(), one["size"], one["offset"])
                    assert there == Path(one["path"]).read_bytes()
    assert answers[0] == answers[1]


def test_where_prints_lines_for_people(program: Program) -> None:
    with mounted(program, "kernel") as mountpoint:
        lines = program.run("where", mountpoint / "s0" / "a" / "1" / "seg.png").stdout.decode().splitlines()
        assert lines[0].endswith("seg.png: a file, served by the kernel")
        assert [line.split(maxsplit=1) for line in lines[1:5]] == [
            ["shard", str(program.home / "s0.tar")],
            ["member", "a/1.seg.png"],
            ["key", "a/1"],
            ["offset", "2,560"],
        ]
        program.write("new", OTHER).rename(program.home / "s0.tar")
        refused = program.refused("where", mountpoint / "s0" / "a" / "1" / "seg.png", code=3)
        assert f"{program.home}/s0.tar: was replaced since the set was mounted" in refused


def test_an_image_that_others_may_not_read(program: Program, user_program: Program) -> None:
    """That of a mount in one step lies in root's cache."""
    need_erofs()
    shard, place = program.write("s0.tar", sets.content(0)), user_program.directory("place")
    try:
        program.run("mount", "--engine", "kernel", "-o", "allow_other", shard, place)
        says = user_program.refused("where", place / "s0/d0/0-0/txt", code=6)
        assert (
            f"{place}/s0/d0/0-0/txt: is in no mount of wdsfs; see: wdsfs status. The kernel serves it from "
            in says
        )
        assert ".erofs, which you cannot read" in says
    finally:
        end_mount(place)


def test_an_image_that_is_another_one_now(program: Program) -> None:
    with mounted(program, "kernel") as mountpoint:
        image = program.json("status", mountpoint)[0]["image"]
        Path(image).unlink()
        program.run("image", program.home / "s1.tar", "-o", image)
        done = program.run("where", mountpoint / "s0", mountpoint / "s1", code=5)
        assert done.stderr.count(b"has been replaced by another one") == 2


@pytest.mark.parametrize("engine", ["fuse", "kernel"])
def test_where_names_the_file_of_a_label(engine: str, program: Program) -> None:
    """A label comes from its file, the sample from its shard; also with a relative path of the file.

    What a class shows is a member of a shard.
    """
    labels = program.write("labels.csv", b"key,cls\na/1,7\n")
    with mounted(program, engine, "--associate", "labels.csv", "--missing", "skip") as mountpoint:
        label, sample = said(program, mountpoint / "s0" / "a" / "1" / "cls", mountpoint / "s0" / "a" / "1")
        assert (label["shard"], label["key"], label["size"]) == (str(labels), "a/1", 1)
        assert (sample["kind"], sample["key"], sample["shard"]) == ("sample", "a/1", str(program.home / "s0.tar"))
    program.write("c.tar", tars.tar(member(b"x.jpg", b"j"), member(b"x.cls", b"7")))
    with mounted(program, engine, "--layout", "classes", "--missing", "skip", "c.tar") as mountpoint:
        (file,) = said(program, mountpoint / "7" / "c--x.jpg")
        assert (file["shard"], file["member"], file["offset"]) == (str(program.home / "c.tar"), "x.jpg", 512)


def test_where_tells_the_layers_of_an_overlay_apart(program: Program) -> None:
    """What was changed names its sample, what is new is in no shard, the rest shows through."""
    upper = program.home / "edits" / "upper" / "s0" / "a"
    with mounted(program, "fuse", "--overlay", str(program.home / "edits")) as mountpoint:
        top = mountpoint / "s0" / "a"
        (top / "1" / "seg.png").write_bytes(b"changed")
        (top / "1" / "new.txt").write_bytes(b"new")
        (top / "2").mkdir()
        changed, below, sample, directory = said(
            program, top / "1" / "seg.png", top / "1" / "jpg", top / "1", mountpoint / "s1"
        )
        assert (changed["layer"], changed["upper"]) == ("upper", str(upper / "1" / "seg.png"))
        assert (changed["key"], changed["member"], changed["size"]) == ("a/1", None, 7)
        assert (below["layer"], below["member"]) == ("lower", "a/1.jpg")
        assert (sample["layer"], sample["key"]) == ("upper", "a/1")
        assert (directory["layer"], directory["kind"]) == ("lower", "directory")
        for made in (top / "1" / "new.txt", top / "2"):
            message = program.refused("where", made, code=6)
            assert f"{made}: was made in the overlay, at {upper / made.relative_to(top)}" in message


def test_renames_in_an_overlay(program: Program) -> None:
    """What lies at the path of another file of the lower is no change of that."""
    with mounted(program, "fuse", "--overlay", str(program.home / "edits")) as mountpoint:
        sample, other = mountpoint / "s0" / "a" / "1", mountpoint / "s1" / "a" / "1"
        changed, moved = sample / "jpg", sample / "seg.png"
        with changed.open("ab") as file:
            file.write(b"more")
        (sample / "empty").unlink()
        moved.rename(sample / "empty")
        subprocess.run(["rm", "-r", other], check=True)
        subprocess.run(["mv", mountpoint / "s0" / "b.d" / "2", other], check=True)
        subprocess.run(["rm", "-r", mountpoint / "s1" / "c" / "9"], check=True)
        (mountpoint / "s1" / "c" / "9").mkdir()
        (one,) = said(program, changed)
        assert (one["key"], one["layer"], one["size"]) == ("a/1", "upper", 1204)
        for made in (sample / "empty", other, other / "jpg", mountpoint / "s1" / "c" / "9"):
            assert f"{made}: was made in the overlay" in program.refused("where", made, code=6)


@pytest.mark.parametrize("engine", ["fuse", "kernel"])
def test_only_what_the_path_needs_is_indexed(engine: str, program: Program) -> None:
    """Nothing is said of the other shards either: one may be damaged, one is gone."""
    program.write("damaged.tar", OTHER[:700] if engine == "kernel" else OTHER)  # of which a log would tell
    gone = program.write("gone.tar", SHARD)
    options = ["--overlay", "edits"] if engine == "fuse" else []
    with mounted(program, engine, *options, str(program.home / "damaged.tar"), str(gone)) as mountpoint:
        path = mountpoint / "s0" / "a" / "1" / "jpg"
        if engine == "fuse":
            with path.open("ab") as file:
                file.write(b"more")
        gone.unlink()
        known = [bytes(program.home / name) for name in ("s0.tar", "s1.tar", "damaged.tar")]
        with closing(open_index(program.home / "index")) as index:
            for shard in known:
                index.forget(shard)
        done = program.run("where", path, mountpoint / "s0" / "a" / "1" / "seg.png")
        assert done.stderr.decode().splitlines() == [f"wdsfs: indexing {os.fsdecode(known[0])}"]
        assert done.stdout.count(b"a/1\n") == 2
        with closing(open_index(program.home / "index")) as index:
            assert [shard for shard in known if index.summary(shard)] == known[:1]
        if engine == "kernel":
            refused = program.refused("where", mountpoint / "gone" / "a" / "1" / "jpg", code=3)
            assert refused.count(str(gone)) == 1
            assert f"wdsfs umount {mountpoint}" in refused


def test_the_output_of_a_command(program: Program) -> None:
    shard = program.write("x.tar", SHARD)
    with program.mounted("--overlay", "edits", f"pipe:cat {shard}") as found:
        sample = found.path / "x" / "a" / "1"
        (sample / "jpg").write_bytes(b"changed")
        changed, below, directory = said(program, sample / "jpg", sample / "seg.png", sample)
    assert (below["member"], below["key"], below["offset"]) == ("a/1.seg.png", "a/1", 2560)
    assert (changed["key"], changed["layer"]) == ("a/1", "upper")
    assert (directory["kind"], directory["key"]) == ("sample", "a/1")


def test_a_mount_of_another_session(program: Program) -> None:
    """Its daemon is not asked: the files say it, as they do for other users of a mount."""
    with mounted(program, "fuse") as mountpoint:
        path, elsewhere = mountpoint / "s0" / "a" / "1" / "jpg", program.directory("session")
        one = json.loads(program.run("where", "--json", path, env={"XDG_RUNTIME_DIR": str(elsewhere)}).stdout)[0]
        assert [one] == said(program, path)


def test_paths_in_no_shard_are_named(program: Program, tmp_path: Path) -> None:
    """One line each, and the others are answered all the same."""
    with mounted(program, "fuse") as mountpoint:
        done = program.run("where", tmp_path, mountpoint / "none", mountpoint / "s0", code=6)
        assert done.stderr.decode().splitlines() == [
            f"wdsfs: {tmp_path}: is in no mount of wdsfs; see: wdsfs status",
            f"wdsfs: {mountpoint / 'none'}: No such file or directory",
        ]
        assert done.stdout.startswith(os.fsencode(mountpoint / "s0"))
        assert "not of a shard" in program.refused("where", mountpoint / ".wdsfs" / "status.json", code=6)
        outside, inside = said(program, tmp_path, mountpoint, code=6)
        assert set(outside) == {"path", "error"}
        assert inside["kind"] == "directory"
    program.refused("where", "", code=2)


def test_shards_elsewhere_and_compressed_ones(web_program: Program) -> None:
    packed = web_program.write("p.tar.gz", gzip.compress(SHARD))
    with WebServer().running() as server:
        server.put("/x.tar", OTHER, etag='"1"')
        with web_program.mounted(packed, server.url + "/x.tar") as found:
            one, two = said(
                web_program, found.path / "p" / "a" / "1" / "jpg", found.path / "x" / "a" / "1" / "jpg"
            )
    assert (one["shard"], one["compressed"], one["url"], one["offset"]) == (str(packed), True, None, 512)
    assert (two["shard"], two["compressed"], two["url"]) == (two["url"], False, server.url + "/x.tar")
    assert json.dumps(two).count("a/1.jpg") == 1
