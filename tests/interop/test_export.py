"""`wdsfs export` and `--export`: which files are where, what is refused, every kill; older indexes."""

from __future__ import annotations

import gzip
import os
import struct
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests import tars
from tests.conftest import InProcess, Program
from tests.packing.overlays import EDITS, FIRST, SECOND, Faulty, Killed, Set, stops
from tests.sets import at
from tests.tars import A, B, member, tar
from wdsfs.durable import Disk
from wdsfs.errors import ExportError
from wdsfs.index import process_pool
from wdsfs.index.store import open_index
from wdsfs.interop.export import export
from wdsfs.tree.shard_set import ShardSet

ONE = tar(A, member(b"a.cls", b"1"), B)
TWO = tar(member(b"d/c.txt", b"cc"))
EMPTY = tar(member(b"README", b"x"))

ONE_DALI = b"v1.2 2\ntxt 512 3 a.txt cls 1536 1 a.cls\ntxt 2560 768 b.txt\n"
TWO_DALI = b"v1.2 1\ntxt 512 2 d/c.txt\n"


@pytest.fixture
def program(in_process: InProcess) -> InProcess:
    return in_process


def exported(program: Program, *arguments: str, code: int = 0) -> dict[str, Any]:
    report: dict[str, Any] = program.json("export", *arguments, "--json", code=code)
    report["written"] = {os.path.relpath(path, program.home) for path in report["written"]}
    return report


def test_the_indexes_of_a_set(program: Program) -> None:
    for name, content in {"x/s": ONE, "y/s": TWO, "t.v1": TWO}.items():
        (program.home / name).parent.mkdir(exist_ok=True)
        program.write(f"{name}.tar", content)
    report = exported(program, "--format", "dali", "-o", "new/dali", "x/s.tar", "y/s.tar", "t.v1.tar")
    assert report["written"] == {f"new/dali/{name}.idx" for name in ("x--s", "y--s", "t.v1")}
    assert (report["warnings"], report["failures"]) == ([], [])
    found = {path.name: path.read_bytes() for path in (program.home / "new/dali").iterdir()}
    assert found == {"x--s.idx": ONE_DALI, "y--s.idx": TWO_DALI, "t.v1.idx": TWO_DALI}


def test_the_indexes_of_listed_samples(program: Program) -> None:
    program.write(
        "s.tar", tars.tar(*(tars.member(name, b"x") for name in (b"a.jpg", b"a.cls", b"b.jpg", b"c.jpg")))
    )
    program.write("t.tar", tars.tar(tars.member(b"d.jpg", b"x")))
    program.write("k.txt", b"s/c\na\nnone\n")
    done = program.run("export", "-o", "idx", "--keys", "k.txt", "s.tar", "t.tar")
    assert (program.home / "idx/s.idx").read_bytes() == (
        b"v1.2 2\njpg 512 1 a.jpg cls 1536 1 a.cls\njpg 3584 1 c.jpg\n"
    )
    assert not (program.home / "idx/t.idx").exists()
    assert b"1 of its 3 keys is not in the set: 'none'" in done.stderr


def test_a_shard_that_dali_cannot_read_is_no_obstacle_to_others(program: Program) -> None:
    contents = {
        "s0": ONE,
        "s1": tar(member(b"a.j pg", b"x")),
        "s2": EMPTY,
        "s3": TWO,
        "s4": tar(A, B)[:-1500],
        "s5": gzip.compress(ONE),  # the offsets of its record are worth nothing to others
    }
    for name, content in contents.items():
        program.write(f"{name}.tar", content)
        program.write(f"{name}.idx", b"older")
    report = exported(program, "-o", ".", "s{0..5}.tar", code=9)
    assert report["written"] == {"s0.idx", "s3.idx"}
    home = program.home
    blank, cut, compressed = report["failures"]
    assert blank.startswith(f"{home}/s1.tar: a.j pg: has a blank in its extension")
    assert blank.endswith(f"; the older {home}/s1.idx is removed")
    assert cut.startswith(f"{home}/s4.tar: the shard is damaged: ")
    assert compressed.startswith(f"{home}/s5.tar: is compressed, and other tools read plain tars only")
    [empty] = report["warnings"]
    assert empty.startswith(f"{home}/s2.tar: has no samples, and DALI refuses such a shard: it is left out; the ")
    assert {path.name for path in home.glob("*.idx")} == {"s0.idx", "s3.idx"}
    told = program.run("export", "-o", ".", "s{0..5}.tar", code=9)
    assert told.stdout == b"2 files written, 3 failures\n"
    assert len([line for line in told.stderr.splitlines() if b"wdsfs: warning: " not in line]) == 3


@pytest.mark.parametrize("command", [("export", "--format"), ("pack", "--export"), ("commit", "--export")])
def test_what_writes_the_other_indexes_is_named(program: Program, command: tuple[str, str]) -> None:
    program.write("s.tar", ONE)
    for kind, way_out in {
        "wids": "widsindex create SHARDS --output FILE.json",
        "energon": "energon prepare DIR",
        "wdsidx": "wdsfs index -o FILE.wdsidx SHARDS",
    }.items():
        text = program.refused(*command, kind, "-o", "new", "s.tar", code=2)
        assert f"{command[1]} {kind}: no longer written; type: {way_out}" in text


def test_several_processes_write_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        export(lower, os.fsencode(tmp_path), jobs)
        lower.close()
        written[jobs] = [(path.name, path.read_bytes()) for path in sorted(tmp_path.glob("*.idx"))]
    assert len(written[1]) == 5
    assert written[1] == written[3]
    assert [len(call.args[1]) for call in each.call_args_list if call.args[2] == 3] == [5]


# --- the disk ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [Killed(), OSError(28, "No space left on device")], ids=["killed", "full"])
def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path, error: BaseException) -> None:
    home = tmp_path / "s"
    home.mkdir()
    (home / "s.tar").write_bytes(ONE)
    (home / "t.tar").write_bytes(TWO)
    whole = {"s.idx": ONE_DALI, "t.idx": TWO_DALI}
    told: set[str] = set()

    def write_all(disk: Disk) -> None:
        lower = ShardSet([at(home / "s.tar"), at(home / "t.tar")], open_index(tmp_path / "index"))
        try:
            export(lower, None, disk=disk)
        except ExportError as refused:
            told.add(str(refused))
            raise OSError from refused
        finally:
            lower.close()

    def clear() -> None:
        for name in whole:
            (home / name).unlink(missing_ok=True)

    for _ in stops(clear, write_all, lambda step: Faulty(step, error), least=4):
        for path in {*home.iterdir()} - {home / "s.tar", home / "t.tar"}:
            if ".wdsfs-" in path.name:
                assert isinstance(error, Killed)  # what fails is cleared away
            else:
                assert path.read_bytes() == whole[path.name]
    assert {path.name for path in home.iterdir()} == {"s.tar", "t.tar", *whole}
    full = "No space left on device; mend that, then repeat the command"
    assert told == (set() if isinstance(error, Killed) else {full})


# --- commits -----------------------------------------------------------------------------------------------


def test_a_commit_exports_what_it_has_written(program: Program) -> None:
    Set(program.home, FIRST, SECOND).edit(EDITS)
    (program.home / "new").mkdir()
    words = ["commit", "--overlay", "o", "-o", "new/n-%02d.tar", "--export", "dali", "s{0..1}.tar"]
    for again in (True, False):  # a second time, as if the first had been stopped after its shards
        program.run(*words)
        for path in program.home.glob("new/n-0[01].idx"):
            assert path.read_bytes().startswith(b"v1.2 ")
            if again:
                path.unlink()
    assert len([*program.home.glob("new/*.idx")]) == 2
    assert program.run("check", "new/n-0{0..1}.tar", code=None).stdout.count(b"wrong index") == 0


def test_a_commit_in_place_renews_the_indexes_or_says_that_they_are_old(program: Program) -> None:
    Set(program.home, FIRST, SECOND).edit(EDITS)
    program.run("export", "-o", ".", "s{0..1}.tar")
    before = {name: (program.home / name).read_bytes() for name in ("s0.idx", "s1.idx")}
    (program.home / ".nv-meta").mkdir()
    for name in (".nv-meta/index.sqlite", "shardindex.json"):
        program.write(name, b"older")
    program.write("s0.tar.idx", struct.pack("=2Q", 0, 1024))
    done = program.run("commit", "--overlay", "o", "--in-place", "--export", "dali", "s{0..1}.tar")
    after = {name: (program.home / name).read_bytes() for name in before}
    assert after["s0.idx"] != before["s0.idx"]
    assert after["s1.idx"] == before["s1.idx"]
    assert b"s0.idx" not in done.stderr
    assert b"s0.tar.idx" in done.stderr
    assert b"index.sqlite" in done.stderr
    assert b"shardindex.json: made for the shards before this commit; renew them with: energon prep" in done.stderr
    told = program.run("check", "s{0..1}.tar", code=1).stdout
    assert told.count(b"[wrong index]") == 1


def test_a_commit_whose_export_fails_says_so_and_is_done(program: Program) -> None:
    Set(program.home, FIRST, tar(member(b"d/a.j pg", b"x"))).edit(EDITS)
    done = program.run("commit", "--overlay", "o", "--in-place", "--export", "dali", "s{0..1}.tar", code=9)
    assert b"shards: 1 rewritten" in done.stdout
    assert b"has a blank in its extension" in done.stderr
