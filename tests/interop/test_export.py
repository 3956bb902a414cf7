"""`wdsfs export` and `commit --export`: which files are where, what is kept, what is refused, and every kill."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sqlite3
import struct
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests import tars
from tests.cli.test_main import program  # noqa: F401  # a fixture
from tests.conftest import Program
from tests.packing.overlays import EDITS, FIRST, SECOND, Faulty, Killed, Set, stops
from tests.sets import at
from tests.tars import A, B, member, tar
from wdsfs.cli import index_commands
from wdsfs.errors import ExportError
from wdsfs.index import process_pool
from wdsfs.index.store import open_index
from wdsfs.interop.export import DALI, ENERGON, FORMATS, WIDS, Export, below, energon_root
from wdsfs.storage.durable import Disk
from wdsfs.tree.shard_set import ShardSet

ONE = tar(A, member(b"a.cls", b"1"), B)
TWO = tar(member(b"d/c.txt", b"cc"))
EMPTY = tar(member(b"README", b"x"))

ONE_DALI = b"v1.2 2\ntxt 512 3 a.txt cls 1536 1 a.cls\ntxt 2560 768 b.txt\n"
TWO_DALI = b"v1.2 1\ntxt 512 2 d/c.txt\n"


def files(directory: Path) -> set[str]:
    """Return the files below a directory, without the index of wdsfs."""
    found = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    return {name for name in found if not name.startswith("index/")}


def offsets(path: Path) -> list[int]:
    data = path.read_bytes()
    return list(struct.unpack(f"={len(data) // 8}Q", data))


def rows(root: Path, table: str) -> list[Any]:
    db = sqlite3.connect(root / ".nv-meta/index.sqlite")
    found = db.execute(f"SELECT * FROM {table}").fetchall()
    db.close()
    return found


def export(program: Program, *arguments: str, code: int = 0) -> dict[str, Any]:  # noqa: F811
    report: dict[str, Any] = program.json("export", *arguments, "--json", code=code)
    report["written"] = {os.path.relpath(path, program.home) for path in report["written"]}
    return report


# --- DALI --------------------------------------------------------------------------------------------------


def test_dali(program: Program) -> None:  # noqa: F811
    for name, content in {"x/s": ONE, "y/s": TWO, "t.v1": TWO}.items():
        (program.home / name).parent.mkdir(exist_ok=True)
        program.write(f"{name}.tar", content)
    report = export(program, "--format", "dali", "-o", "new/dali", "x/s.tar", "y/s.tar", "t.v1.tar")
    assert report["written"] == {f"new/dali/{name}.idx" for name in ("x--s", "y--s", "t.v1")}
    assert (report["warnings"], report["failures"]) == ([], [])
    assert (program.home / "new/dali/x--s.idx").read_bytes() == ONE_DALI
    assert (program.home / "new/dali/y--s.idx").read_bytes() == TWO_DALI
    assert files(program.home / "new") == {"dali/x--s.idx", "dali/y--s.idx", "dali/t.v1.idx"}


def test_dali_of_listed_samples(program: Program) -> None:  # noqa: F811
    program.write(
        "s.tar", tars.tar(*(tars.member(name, b"x") for name in (b"a.jpg", b"a.cls", b"b.jpg", b"c.jpg")))
    )
    program.write("t.tar", tars.tar(tars.member(b"d.jpg", b"x")))
    program.write("k.txt", b"s/c\na\nnone\n")
    done = program.run("export", "--format", "dali", "-o", "idx", "--keys", "k.txt", "s.tar", "t.tar")
    assert (program.home / "idx/s.idx").read_bytes() == (
        b"v1.2 2\njpg 512 1 a.jpg cls 1536 1 a.cls\njpg 3584 1 c.jpg\n"
    )
    assert not (program.home / "idx/t.idx").exists()
    assert b"of its 3 keys 1 is not in the set: 'none'" in done.stderr
    refused = program.refused("export", "--format", "wids", "-o", "idx", "--keys", "k.txt", "s.tar", code=2)
    assert "--keys is for --format dali" in refused
    assert "wdsfs pack --keys k.txt" in refused


def test_a_shard_that_dali_cannot_read_is_no_obstacle_to_others(program: Program) -> None:  # noqa: F811
    contents = {"s0": ONE, "s1": tar(member(b"a.j pg", b"x")), "s2": EMPTY, "s3": TWO, "s4": tar(A, B)[:-1500]}
    for name, content in contents.items():
        program.write(f"{name}.tar", content)
        program.write(f"{name}.idx", b"older")
    report = export(program, "--format", "dali", "-o", ".", "s{0..4}.tar", code=9)
    assert report["written"] == {"s0.idx", "s3.idx"}
    home = program.home
    [blank, cut] = report["failures"]
    assert blank.startswith(f"{home}/s1.tar: a.j pg: has a blank in its extension")
    assert blank.endswith(f"; the older {home}/s1.idx is removed")
    assert cut.startswith(f"{home}/s4.tar: the shard is damaged: ")
    [empty] = report["warnings"]
    assert empty.startswith(f"{home}/s2.tar: has no samples, and DALI refuses such a shard: it is left out; the ")
    assert {name for name in files(home) if name.endswith(".idx")} == {"s0.idx", "s3.idx"}
    told = program.run("export", "--format", "dali", "-o", ".", "s{0..4}.tar", code=9)
    assert told.stdout == b"2 files written, 2 failures\n"
    assert len([line for line in told.stderr.splitlines() if b"wdsfs: warning: " not in line]) == 2


def test_only_plain_tars_are_exported(program: Program) -> None:  # noqa: F811
    """The offsets of a record are worth nothing where the bytes are not at them."""
    program.write("s.tar", gzip.compress(ONE))
    for kind in (DALI, ENERGON, WIDS):
        text = program.run("export", "--format", kind, "-o", ".", "s.tar", code=9).stderr
        assert b"s.tar: is compressed, and other tools read plain tars only" in text


# --- wids --------------------------------------------------------------------------------------------------


def test_wids(program: Program) -> None:  # noqa: F811
    (program.home / "set/x").mkdir(parents=True)
    program.write("set/x/s.tar", ONE)
    program.write("t.tar", EMPTY)
    report = export(program, "--format", "wids", "--md5", "-o", "set", "set/x/s.tar", "t.tar")
    assert report == {"written": {"set/shardindex.json"}, "warnings": [], "failures": []}
    assert json.loads((program.home / "set/shardindex.json").read_bytes())["shardlist"] == [
        {"url": "x/s.tar", "md5sum": hashlib.md5(ONE).hexdigest(), "nsamples": 2, "filesize": len(ONE)},
        {
            "url": f"{program.home}/t.tar",
            "md5sum": hashlib.md5(EMPTY).hexdigest(),
            "nsamples": 0,
            "filesize": len(EMPTY),
        },
    ]


def test_what_wids_reads_otherwise_is_told(program: Program) -> None:  # noqa: F811
    program.write("s.tar", tar(A, member(b"d/.hidden", b"x")))
    report = export(program, "--format", "wids", "-o", ".", "s.tar")
    [told] = report["warnings"]
    assert told.startswith(f"{program.home}/s.tar: wids takes d/.hidden for")
    program.write("s.tar", tar(A, B)[:-1500])
    done = program.run("export", "--format", "wids", "-o", ".", "s.tar", code=9)
    assert b"s.tar: the shard is damaged" in done.stderr


# --- Energon -----------------------------------------------------------------------------------------------


def test_energon(program: Program) -> None:  # noqa: F811
    (program.home / "x").mkdir()
    program.write("s.tar", ONE)
    program.write("x/t.tar", TWO)
    program.write("e.tar", EMPTY)
    program.write("e.tar.idx", b"older")
    report = export(program, "--format", "energon", "-o", ".", "s.tar", "e.tar", "x/t.tar")
    meta = {
        f".nv-meta/{name}" for name in ("index.sqlite", ".info.json", "split.yaml", "dataset.yaml", "index.uuid")
    }
    assert report["written"] == {"s.tar.idx", "x/t.tar.idx", *meta}
    home = program.home
    assert report["warnings"] == [
        f"{home}/e.tar: has no samples, and Energon refuses such a shard: it is left out; "
        f"the older {home}/e.tar.idx is removed"
    ]
    assert offsets(home / "s.tar.idx") == [0, 2048, 3584]
    assert offsets(home / "x/t.tar.idx") == [0, 1024]
    assert json.loads((home / ".nv-meta/.info.json").read_bytes())["shard_counts"] == {"s.tar": 2, "x/t.tar": 1}
    assert rows(home, "samples") == [(0, "a", 0, 0, 2048), (0, "b", 1, 2048, 1536), (1, "d/c", 0, 0, 1024)]
    assert len(rows(home, "sample_parts")) == 4
    assert b'  - "x/t.tar"\n' in (home / ".nv-meta/split.yaml").read_bytes()
    assert (home / ".nv-meta/dataset.yaml").read_bytes().endswith(b"__class__: CrudeWebdataset\n")
    assert files(home / ".nv-meta") == {name.removeprefix(".nv-meta/") for name in meta}


def test_what_somebody_has_edited_is_kept(program: Program) -> None:  # noqa: F811
    program.write("s.tar", ONE)
    (program.home / ".nv-meta").mkdir()
    kept = {"split.json": b'{"split_parts": {}}', "dataset.yaml": b"mine"}
    for name, content in kept.items():
        program.write(f".nv-meta/{name}", content)
    words = ("--format", "energon", "-o", ".")
    report = export(program, *words, "s.tar")
    [told] = report["warnings"]
    assert told.endswith(".nv-meta/split.json: is unchanged, but the shards are not (s.tar): edit it")
    identity = (program.home / ".nv-meta/index.uuid").read_bytes()
    assert export(program, *words, "s.tar")["warnings"] == []
    assert (program.home / ".nv-meta/index.uuid").read_bytes() != identity
    assert {name: (program.home / ".nv-meta" / name).read_bytes() for name in kept} == kept
    # A shard that Energon knows, and that is there, must not vanish from its data set by being left unsaid.
    program.write("t.tar", TWO)
    assert "has s.tar, too: name all shards" in program.refused("export", *words, "t.tar", code=9)
    (program.home / "s.tar").unlink()
    [told] = export(program, *words, "t.tar")["warnings"]
    assert told.endswith("(s.tar, t.tar): edit it")


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (
            {"s.tar": ONE, "t.tar": tar(member(b"b.cls", b"x"))},
            "t.tar: the key 'b' is also in s.tar: Energon needs",
        ),
        ({"s.tar": tar(A, B, member(b"a.cls", b"x"))}, "s.tar: the key 'a' is also in itself"),
        (
            {"s.tar": tar(*(member(b"d/%b.txt" % name, b"x") for name in (b"._a", b"a", b"._b", b"b")))},
            "hidden files (._x, .x): `wdsfs pack SHARDS` leaves them out",
        ),
        ({"s.tar": tar(A, B)[:-1500]}, "s.tar: the shard is damaged"),
        ({"s.tar": EMPTY}, "the set has no samples"),
        ({"s.bin": ONE}, "s.bin: Energon reads shards called *.tar only"),
    ],
)
def test_what_energon_would_refuse(program: Program, contents: dict[str, bytes], message: str) -> None:  # noqa: F811
    for name, content in contents.items():
        program.write(name, content)
    done = program.run("export", "--format", "energon", "-o", ".", *contents, code=9)
    assert message in done.stderr.decode()
    assert files(program.home) <= {*contents, "s.tar.idx"}


def test_what_energon_reads_otherwise_is_told(program: Program) -> None:  # noqa: F811
    program.write("s.tar", tar(A, member(b"d/.hidden", b"x"), A))
    program.write("t.tar", tar(B, B))
    report = export(program, "--format", "energon", "-o", ".", "t.tar")
    assert report["warnings"] == [
        f"{program.home}/t.tar: b has an extension twice, of which Energon shows the last"
    ]
    program.write("s.tar", tar(A, member(b"d/.hidden", b"x")))
    report = export(program, "--format", "energon", "-o", ".", "[st].tar")
    assert (
        f"{program.home}/s.tar: Energon finds 2 samples, as it counts hidden files, and other tools 1"
        in report["warnings"]
    )


def test_broken_metadata_and_shards_elsewhere_are_refused(program: Program) -> None:  # noqa: F811
    program.write("s.tar", ONE)
    (program.home / "set/.nv-meta").mkdir(parents=True)
    text = program.refused("export", "--format", "energon", "-o", "set", "s.tar", code=9)
    assert "s.tar is not below" in text
    program.write("set/.nv-meta/.info.json", b"[]")
    program.write("set/s.tar", ONE)
    text = program.refused("export", "--format", "energon", "-o", "set", "set/s.tar", code=9)
    assert ".info.json is not metadata of Energon" in text


@pytest.mark.parametrize("kind", [DALI, ENERGON])
def test_several_processes_write_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(process_pool, "ALONE_BYTES", 0)
    each = Mock(side_effect=process_pool.each)
    monkeypatch.setattr(process_pool, "each", each)
    shards = [at(tmp_path / f"s{number}.tar") for number in range(5)]
    for number in range(5):
        (tmp_path / f"s{number}.tar").write_bytes(tar(member(b"%d.x" % number), member(b"%d.x" % (10 + number))))
    index = open_index(tmp_path / "index")
    index.refresh(shards)
    written = {}
    for jobs in (1, 3):
        lower = ShardSet(shards, index)
        exported = Export(lower, jobs)
        exported.write(kind, os.fsencode(tmp_path))
        exported.finish()
        lower.close()
        written[jobs] = [(path.name, path.read_bytes()) for path in sorted(tmp_path.glob("*.idx"))]
    assert len(written[1]) == 5
    assert written[1] == written[3]
    assert [len(call.args[1]) for call in each.call_args_list if call.args[2] == 3] == [5]


def test_places(tmp_path: Path) -> None:
    (tmp_path / "set/.nv-meta").mkdir(parents=True)
    (tmp_path / "set/x").mkdir()
    (tmp_path / "link").symlink_to("set")
    home = os.fsencode(tmp_path)
    assert below(home, home + b"/a/b.tar") == b"a/b.tar"
    assert below(b"/", b"/a/b.tar") == b"a/b.tar"
    assert below(home + b"/set", home + b"/settee/b.tar") is None
    assert below(home + b"/link", home + b"/set/b.tar") == b"b.tar"
    assert energon_root(home + b"/set/x") == home + b"/set"
    assert energon_root(home) == home


# --- the disk ----------------------------------------------------------------------------------------------


def write_all(home: Path, disk: Disk) -> None:
    index = open_index(home / "index")
    lower = ShardSet([at(home / "s/s.tar"), at(home / "s/t.tar")], index)
    try:
        writer = Export(lower, 1, disk)
        for kind in (DALI, WIDS, ENERGON):
            writer.write(kind, os.fsencode(home / "s"))
        writer.finish()
    finally:
        lower.close()


@pytest.mark.parametrize("error", [Killed(), OSError(28, "No space left on device")], ids=["killed", "full"])
def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path, error: BaseException) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s/s.tar").write_bytes(ONE)
    (tmp_path / "s/t.tar").write_bytes(TWO)
    write_all(tmp_path, Disk())
    whole = {name: (tmp_path / "s" / name).read_bytes() for name in files(tmp_path / "s")}
    made = [name for name in whole if not name.endswith(".tar")]
    assert len(made) == 10

    def clear() -> None:
        for name in made:
            (tmp_path / "s" / name).unlink(missing_ok=True)

    for _ in stops(clear, lambda disk: write_all(tmp_path, disk), lambda step: Faulty(step, error), least=4):
        for name in files(tmp_path / "s"):
            if ".wdsfs-" in name:
                assert isinstance(error, Killed)  # what fails is cleared away
            elif not name.endswith(".uuid"):
                assert (tmp_path / "s" / name).read_bytes() == whole[name]
    assert files(tmp_path / "s") == set(whole)


def test_a_full_disk_has_a_message(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    program.write("s.tar", ONE)

    def sync(_disk: Disk, _fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Disk, "sync", sync)
    for kind in (DALI, ENERGON):
        text = program.refused("export", "--format", kind, "-o", ".", "s.tar", code=ExportError.exit_code)
        assert "No space left on device; mend that, then repeat the command" in text


# --- commit ------------------------------------------------------------------------------------------------


def test_a_commit_exports_what_it_has_written(program: Program) -> None:  # noqa: F811
    Set(program.home, FIRST, SECOND).edit(EDITS)
    (program.home / "new").mkdir()
    words = [
        "commit",
        "--overlay",
        "o",
        "-o",
        "new/n-%02d.tar",
        "--export",
        "dali",
        "--export",
        "energon",
        "s{0..1}.tar",
    ]
    for again in (True, False):  # a second time, as if the first had been stopped after its shards
        program.run(*words)
        made = files(program.home / "new")
        assert made >= {f"n-0{n}{end}" for n in (0, 1) for end in (".tar", ".idx", ".tar.idx")}
        counts = json.loads((program.home / "new/.nv-meta/.info.json").read_bytes())["shard_counts"]
        assert counts == {"n-00.tar": 3, "n-01.tar": 2}
        for name in made if again else ():
            if name.endswith(".idx"):
                (program.home / "new" / name).unlink()
    assert program.run("check", "new/n-0{0..1}.tar", code=None).stdout.count(b"wrong index") == 0


def test_a_commit_in_place_renews_the_indexes_or_says_that_they_are_old(program: Program) -> None:  # noqa: F811
    Set(program.home, FIRST, SECOND).edit(EDITS)
    program.run("export", "--format", "dali", "--format", "energon", "--format", "wids", "-o", ".", "s{0..1}.tar")
    before = {name: (program.home / name).read_bytes() for name in ("s0.idx", "s1.idx", "s0.tar.idx")}
    done = program.run("commit", "--overlay", "o", "--in-place", "--export", "dali", "s{0..1}.tar")
    after = {name: (program.home / name).read_bytes() for name in before}
    assert after["s0.idx"] != before["s0.idx"]
    assert after["s1.idx"] == before["s1.idx"]
    assert after["s0.tar.idx"] == before["s0.tar.idx"]
    assert b"s0.tar.idx" in done.stderr
    assert b"index.sqlite" in done.stderr
    assert b"shardindex.json: made for the shards before this commit; renew them with" in done.stderr
    told = program.run("check", "s{0..1}.tar", code=1).stdout
    assert b"[wrong index]" in told
    assert told.count(b"wrong index") == 1
    # Nothing is left to commit, and yet the export is done: an earlier one may have been stopped in front of it.
    done = program.run("commit", "--overlay", "o", "--in-place", "--export", "energon", "s{0..1}.tar")
    assert b"before" not in done.stderr
    assert b"wrong index" not in program.run("check", "s{0..1}.tar", code=1).stdout


def test_a_commit_whose_export_fails_says_so_and_is_done(program: Program) -> None:  # noqa: F811
    Set(program.home, FIRST, tar(member(b"d/a.txt", b"the key d/a again"))).edit(EDITS)
    words = ["commit", "--overlay", "o", "--in-place", "--export", "energon", "s{0..1}.tar"]
    done = program.run(*words, code=9)
    assert b"shards: 1 rewritten" in done.stdout
    assert b"the key 'd/a' is also in s0.tar" in done.stderr


def test_the_command_names_the_formats_without_loading_them() -> None:
    assert tuple(index_commands.FORMATS.choices) == FORMATS
