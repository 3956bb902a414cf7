"""Sets whose first samples differ in their columns, which the loader of Hugging Face's `datasets` refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tars
from tests.conftest import Program
from tests.peers import need_tool, run_script

REFUSES = "Hugging Face datasets refuses a set whose first 5 samples differ in their columns"


def shard(*columns: str) -> bytes:
    """A shard of samples `s0`, `s1` ..., each with these columns, separated by spaces."""
    samples = [
        tars.member(b"s%d.%s" % (number, one.encode()), b"1")
        for number, names in enumerate(columns)
        for one in names.split()
    ]
    return tars.tar(*samples)


EVEN = shard(*["cls txt"] * 7)
SETS = {
    "even": ([EVEN], ""),
    "in another order": ([shard("cls txt", "txt cls", "cls txt")], ""),
    "the fifth": ([shard(*["cls txt"] * 4, "cls thumb.txt txt")], "s4"),
    "the sixth": ([shard(*["cls txt"] * 5, "cls thumb.txt txt")], ""),
    "one lacks a column": ([shard("cls txt", "txt", "cls txt")], "s1"),
    "letter case": ([shard("cls txt", "cls TXT")], "s1"),
    "a later shard": ([EVEN, shard("cls txt", "cls thumb.txt txt")], ""),
    "few": ([shard("cls txt")], ""),
    "hidden": (
        [tars.tar(tars.member(b"a.txt", b"1"), tars.member(b".a.cls", b"1"), tars.member(b"b.txt", b"1"))],
        "",
    ),
}


def write(directory: Path, shards: list[bytes]) -> list[str]:
    directory.mkdir()
    paths = [directory / f"{number}.tar" for number in range(len(shards))]
    for path, content in zip(paths, shards, strict=True):
        path.write_bytes(content)
    return [*map(str, paths)]


@pytest.mark.parametrize("name", SETS)
def test_check_has_a_note(program: Program, name: str) -> None:
    shards, key = SETS[name]
    done = program.run("check", "--notes", *write(program.home / "set", shards), code=None)
    notes = [line for line in done.stdout.decode().splitlines() if "[uneven columns]" in line]
    assert len(notes) == bool(key)
    assert all(f": {key}: [uneven columns] has the columns " in one and REFUSES in one for one in notes)


def test_the_note_is_right(program: Program) -> None:
    """The loader refuses the sets that have it, and no others."""
    need_tool("datasets")
    jobs = [
        {"path": "webdataset", "data_files": write(program.home / str(number), shards)}
        for number, (shards, _) in enumerate(SETS.values())
    ]
    answers = run_script(program, "huggingface", jobs)
    assert {name: "refused" in found for name, found in zip(SETS, answers, strict=True)} == {
        name: bool(key) for name, (_, key) in SETS.items()
    }


def test_commands_that_write_shards_say_so(program: Program) -> None:
    """`commit` of each new or replaced first shard, `pack` of files and of a view; with `-q` nobody."""
    program.write("a.tar", EVEN)
    program.write("b.tar", EVEN)
    program.write("b.csv", b"key,mask\ns1,x\n")
    files = program.directory("files")
    for name in ("a.txt", "a.cls", "b.txt", "c.txt", "c.cls"):
        (files / name).write_bytes(b"1")
    others = f"the sample b has the columns txt, the first sample a has cls, txt: {REFUSES}"
    for options in (["-n"], []):
        assert others in program.run("pack", *options, "-o", "packed/%d.tar", files).stderr.decode()
    (files / "b.cls").write_bytes(b"1")
    assert REFUSES not in program.run("pack", "-o", "even/%d.tar", files).stderr.decode()
    words = ("pack", "--associate", "b.csv", "--missing", "empty", "-o", "view/%d.tar", "a.tar")
    assert "the sample s1 has the columns cls, mask, txt, the first" in program.run(*words).stderr.decode()
    with program.mounted("--overlay", "up", "{a,b}.tar") as mounted:
        note = f"the sample s2 has the columns cls, thumb.jpg, txt, the first sample s0 has cls, txt: {REFUSES}"
        (mounted.path / "b/s1/thumb.jpg").write_bytes(b"x")
        assert program.run("commit", "-o", "one/%d.tar", mounted.path).stderr == b""
        (mounted.path / "a/s2/thumb.jpg").write_bytes(b"x")
        for options in (["-n"], [], ["--json"]):
            place = program.home / f"new{'-'.join(options)}"
            done = program.run("commit", *options, "-o", f"{place}/%d.tar", mounted.path)
            assert done.stderr.decode() == f"wdsfs: note: {place}/0.tar: {note}\n"
        assert program.run("commit", "-q", "-o", "quiet/%d.tar", mounted.path).stderr == b""
        done = program.run("commit", "--in-place", mounted.path)
        assert done.stderr.decode() == f"wdsfs: note: {program.home}/a.tar: {note}\n"
        (mounted.path / "b/s2/thumb.jpg").write_bytes(b"x")
        assert program.run("commit", "--in-place", mounted.path).stderr == b""
