"""Sets that are not sound: what every command and mount says of them, and which of them go on."""

from __future__ import annotations

import os
import re
from errno import EIO
from pathlib import Path
from typing import Any

import pytest

from tests import tars
from tests.conftest import Program, fails
from tests.processes import wait_until
from wdsfs.errors import UsageError
from wdsfs.index.record import Record
from wdsfs.index.record_of_file import build_file
from wdsfs.interop import lint
from wdsfs.tree.set_options import Tolerance

CUT = tars.ODD["cut in content"].tar()
CUT_SAYS = "the file ends at byte 1536, 768 bytes before the end of the member at offset 1024"
LABELLED = tars.tar(tars.member(b"a.txt", b"a"), tars.member(b"a.cls", b"0"))
CLASSES = ("--layout", "classes")


@pytest.fixture
def half(user_program: Program) -> Program:
    """Two shards, of which one cannot be read."""
    user_program.write("a.tar", LABELLED)
    os.chmod(user_program.write("b.tar", LABELLED), 0)
    return user_program


# --- damage is said each time ------------------------------------------------------------------------------


def test_every_command_says_what_is_damaged_however_often(program: Program) -> None:
    program.write("a.tar", CUT)
    commands = [("index", "a.tar"), ("ls", "a.tar"), ("ls", "--merge", "a.tar"), ("info", "a.tar")]
    commands += [("ls", *CLASSES, "--missing", "skip", "a.tar")]
    for _ in range(2):
        for command in commands:
            said = program.run(*command).stderr.decode()
            assert said == f"wdsfs: warning: {program.home}/a.tar: {CUT_SAYS}; see: wdsfs check\n", command
    assert CUT_SAYS in program.run("export", "--format", "dali", "-o", "x", "a.tar", code=9).stderr.decode()


def test_every_mount_says_what_is_damaged_and_logs_it(program: Program) -> None:
    program.write("a.tar", CUT)
    for number, options in enumerate([(), (), ("--lazy",), ("--merge",), ("--columns", "nothing;txt")]):
        with program.mounted("a.tar", *options, at=program.directory(f"m{number}")) as mounted:
            mounted.expect_log(f"a\\.tar: {CUT_SAYS}")
            assert mounted.output.count(CUT_SAYS) == 1, options
            assert mounted.log().count(CUT_SAYS) == 2
    # A lazy one that finds it later has nobody to tell but the log.
    program.write("new.tar", CUT)
    with program.mounted("--lazy", "new.tar", at=program.directory("later")) as mounted:
        assert mounted.output == ""
        os.listdir(mounted.path / "new")
        mounted.expect_log(f"new\\.tar: {CUT_SAYS}")


def test_of_many_damaged_shards_some_are_named(program: Program) -> None:
    for number in range(6):
        program.write(f"{number}.tar", CUT)
    said = program.run("ls", "{0..5}.tar").stderr.decode().splitlines()
    assert [line.count(CUT_SAYS) for line in said] == [1, 1, 1, 0]
    assert said[-1] == "wdsfs: warning: 3 more shards are damaged; see: wdsfs check"
    found = program.run("check", "{0..5}.tar", code=1).stdout.decode()
    assert found.count(CUT_SAYS) == 6


# --- what is no tar ----------------------------------------------------------------------------------------


@pytest.fixture(params=tars.NO_TARS)
def download(program: Program, request: pytest.FixtureRequest) -> tuple[Program, str]:
    """A good shard, and one that is no tar; what is said of it."""
    content, said = tars.NO_TARS[request.param]
    program.write("a.tar", LABELLED)
    program.write("b.tar", content)
    return program, rf"{re.escape(str(program.home))}/b\.tar: {said}"


def test_a_file_that_is_no_tar_is_refused_as_a_missing_one(download: tuple[Program, str]) -> None:
    program, said = download
    commands = [
        ("mount", "{a,b}.tar", "mnt"),
        ("mount", "--merge", "{a,b}.tar", "mnt"),
        ("ls", "{a,b}.tar"),
        ("cat", "{a,b}.tar", "a/a/txt"),
        ("info", "{a,b}.tar"),
        ("export", "-o", "x", "{a,b}.tar"),
        ("commit", "--overlay", "up", "-o", "new-%d.tar", "{a,b}.tar"),
        ("commit", "--overlay", "up", "--in-place", "{a,b}.tar"),
        ("ls", "--join", "b.tar", "a.tar"),
    ]
    program.directory("up")
    for command in commands:
        message = program.refused(*command, code=3)
        assert re.search(f"{said}.*; --allow-missing goes on without", message), command
        assert len(re.findall(said, message)) == 1, command
        assert not list(program.home.glob("new*"))
        assert (program.home / "b.tar").exists()


def test_index_and_check_name_what_is_no_tar(download: tuple[Program, str]) -> None:
    program, said = download
    indexed = program.run("index", "{a,b}.tar", code=3)
    assert re.search(said, indexed.stderr.decode())
    assert indexed.stdout.startswith(b"2 shards, 1 sample")
    refused = program.run("index", "-o", "x.wdsidx", "{a,b}.tar", code=3).stderr.decode()
    assert "an index must have all shards" in refused
    assert not (program.home / "x.wdsidx").exists()
    findings = program.run("check", "b.tar", code=1).stdout.decode().splitlines()
    [finding] = [one for one in findings if "called .tar, but" not in one]
    assert re.search(said.replace("tar: ", r"tar:0: \[.*\] ", 1), finding)


def test_what_is_no_tar_may_be_missing(program: Program) -> None:
    program.write("a.tar", LABELLED)
    program.write("b.tar", b"<html>")
    with program.mounted("--allow-missing", "{a,b}.tar") as mounted:
        mounted.expect_log(r"b\.tar: is an HTML page, not a tar: download it again")
        assert "b.tar: is an HTML page" in mounted.output
        assert (mounted.path / "a/a/txt").read_bytes() == b"a"
        assert sorted(os.listdir(mounted.path)) == ["a", "b"]
        with fails(EIO):
            os.listdir(mounted.path / "b")
        program.write("b.tar", LABELLED)
        wait_until(lambda: _listed(mounted.path / "b") == ["a"], "the shard")
        mounted.allow_log("has changed")


@pytest.mark.parametrize("merge", [False, True])
def test_what_was_changed_beside_a_file_that_is_no_tar(program: Program, merge: bool) -> None:
    """It is shown and undone; these commands have no --allow-missing that a message could name."""
    program.write("a.tar", LABELLED)
    program.write("b.tar", b"<html>")
    options = ["--merge"] if merge else []
    path = "a" if merge else "a/a"
    with program.mounted(*options, "--allow-missing", "--overlay", "up", "{a,b}.tar") as mounted:
        mounted.allow_log(r"b\.tar: is an HTML page")
        (mounted.path / path / "txt").write_bytes(b"new")
        if merge:
            commands: list[list[str | Path]] = [["diff", mounted.path], ["restore", mounted.path / path]]
            for command in commands:
                message = program.refused(*command, code=3)
                assert "b.tar: is an HTML page" in message
                assert "--allow-missing" not in message
            return
        shown = program.run("diff", mounted.path)
        assert shown.stdout == b"changed  a/a ~txt\n"
        assert "b.tar: is an HTML page" in shown.stderr.decode()
        program.run("restore", mounted.path / path)
        assert (mounted.path / path / "txt").read_bytes() == b"a"
        (mounted.path / path / "txt").write_bytes(b"new")
        assert "--allow-missing goes on" in program.refused("commit", "-o", "new-%d.tar", mounted.path, code=3)
    assert program.run("diff", "--overlay", "up", "{a,b}.tar").stdout == b"changed  a/a ~txt\n"
    program.run("restore", "--overlay", "up", "a/a")


def test_what_is_no_tar_and_lazy(program: Program) -> None:
    program.write("a.tar", LABELLED)
    program.write("b.tar", b"<html>")
    with program.mounted("--lazy", "{a,b}.tar") as mounted:
        assert os.listdir(mounted.path / "a") == ["a"]
        for _ in range(2):
            with fails(EIO):
                os.listdir(mounted.path / "b")
        mounted.expect_log(r"b\.tar: is an HTML page, not a tar: download it again")
    assert "is an HTML page" in program.refused("mount", "--lazy", "--merge", "{a,b}.tar", "mnt", code=3)


def test_an_empty_tar_is_a_shard(program: Program) -> None:
    program.write("a.tar", bytes(20 * tars.BLOCK))
    with program.mounted("a.tar") as mounted:
        assert "have no members" in mounted.output
        assert os.listdir(mounted.path / "a") == []
    assert b"a.tar: [no samples] has no member" in program.run("check", "a.tar", code=1).stdout


@pytest.mark.parametrize(
    ("content", "listed", "said"),
    [(CUT, ["a", "b"], CUT_SAYS), (b"<html>", [EIO], "is an HTML page, not a tar: download it again")],
)
def test_a_shard_that_becomes_another_file_under_a_mount(
    program: Program, content: bytes, listed: list[Any], said: str
) -> None:
    """It never looks as if it had no samples."""
    path = program.write("a.tar", LABELLED)
    with program.mounted("a.tar") as mounted:
        assert _listed(mounted.path / "a") == ["a"]
        program.write("new.tar", content).rename(path)
        wait_until(lambda: said in mounted.log() or not _listed(mounted.path / "a"), "the change")
        assert _listed(mounted.path / "a") == listed
        mounted.expect_log("has changed", rf"a\.tar: {said}")
        problem = mounted.status()["damaged"][0]["problem"].partition(":")[0]
        assert problem
        assert said.startswith(problem)


def test_a_download_that_has_begun_does_not_stop_a_mount_that_follows(program: Program) -> None:
    program.write("a.tar", LABELLED)
    begun = program.write("b.tar", b"")
    with program.mounted("--follow", "{a,b}.tar") as mounted:
        assert "a program may still be writing it" in mounted.output
        mounted.expect_log("a program may still be writing it")
        mounted.allow_log("has changed", "is empty")
        with fails(EIO):
            os.listdir(mounted.path / "b")
        begun.write_bytes(LABELLED)
        wait_until(lambda: _listed(mounted.path / "b") == ["a"], "the shard")
    os.utime(begun, (0, 0))
    begun.write_bytes(b"")
    os.utime(begun, (0, 0))
    assert "is empty" in program.refused("mount", "--follow", "{a,b}.tar", "mnt", code=3)


# --- what cannot be read -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ("mount", "--merge", "{a,b}.tar", "mnt"),
        ("mount", "--merge", "--lazy", "{a,b}.tar", "mnt"),
        ("mount", *CLASSES, "{a,b}.tar", "mnt"),
        ("ls", "--merge", "{a,b}.tar"),
        ("ls", *CLASSES, "{a,b}.tar"),
        ("cat", "--merge", "{a,b}.tar", "a/txt"),
        ("info", "--json", "{a,b}.tar"),
        ("export", "-o", "x", "{a,b}.tar"),
        ("commit", "--overlay", "up", "-o", "new-%d.tar", "{a,b}.tar"),
        ("commit", "--overlay", "up", "--merge", "--in-place", "{a,b}.tar"),
        ("diff", "--overlay", "up", "--merge", "{a,b}.tar"),
    ],
)
def test_a_set_is_never_smaller_without_being_asked(half: Program, command: tuple[str, ...]) -> None:
    half.directory("up")
    message = half.refused(*command, code=3)
    assert "the set would be smaller without shards that cannot be read" in message
    advice = "" if command[0] == "diff" else "; --allow-missing"  # which `diff` does not have
    assert f"{half.home}/b.tar: Permission denied{advice}" in message
    if command[0] not in ("mount", "diff", "cat") and "--merge" not in command[:4]:
        assert (
            half.run(*command, "--allow-missing")
            .stderr.decode()
            .startswith(f"wdsfs: warning: {half.home}/b.tar: Permission denied\n")
        )


def test_what_may_be_missing_is_left_out(half: Program) -> None:
    half.directory("up")
    assert half.run("ls", "--merge", "--allow-missing", "{a,b}.tar").stdout == b"a/\n"
    assert half.run("ls", *CLASSES, "--allow-missing", "{a,b}.tar", "0").stdout == b"a--a.txt\n"
    assert half.run("cat", "--merge", "--allow-missing", "{a,b}.tar", "a/txt").stdout == b"a"
    report = half.json("info", "--allow-missing", "{a,b}.tar")
    assert (report["shards"], report["samples"]) == (1, 1)
    half.run("export", "--allow-missing", "-o", "x", "{a,b}.tar")
    assert [path.name for path in (half.home / "x").iterdir()] == ["a.idx"]
    # Where each shard has a directory, none is missing: reading in it is an error.
    assert half.run("ls", "{a,b}.tar").stdout == b"a/\nb/\n"
    half.run("ls", "-R", "{a,b}.tar", code=3)
    half.run("commit", "--allow-missing", "--overlay", "up", "-o", "new-%d.tar", "{a,b}.tar")
    assert (half.home / "new-0.tar").read_bytes() == LABELLED
    assert not (half.home / "new-1.tar").exists()
    told = half.refused(
        "commit", "--allow-missing", "--overlay", "up", "--merge", "-o", "n-%d.tar", "{a,b}.tar", code=2
    )
    assert "--allow-missing cannot be used with an overlay of --merge" in told


def test_shards_that_are_not_there_may_be_missing(program: Program) -> None:
    program.write("a.tar", LABELLED)
    assert "no such" in program.refused("ls", "--allow-missing", "c.tar", code=3)
    assert "1 of 2 shards are missing" in program.refused("ls", "--merge", "{a,b}.tar", code=3)
    done = program.run("ls", "--merge", "--allow-missing", "{a,b}.tar")
    assert (done.stdout, b"b.tar: there is no such shard" in done.stderr) == (b"a/\n", True)
    with program.mounted("--merge", "--allow-missing", "{a,b}.tar") as mounted:
        assert os.listdir(mounted.path) == ["a"]
        mounted.expect_log(r"b\.tar: there is no such shard")
        program.write("b.tar", tars.tar(tars.member(b"b.txt", b"b")))
        wait_until(lambda: len(_listed(mounted.path)) == 2, "the shard")
        mounted.allow_log("")


def test_one_tree_cannot_be_listed_while_a_shard_cannot_be_read(program: Program) -> None:
    """A listing would be a smaller set, and a loader would train on it. What is known can be read."""
    program.write("a.tar", LABELLED)
    gone = program.write("b.tar", tars.tar(tars.member(b"d/b.txt", b"b")))
    for number, options in enumerate([("--merge",), ("--merge", "--allow-missing")]):
        whole = tars.tar(tars.member(b"d/b.txt", b"b"))
        program.write("b.tar", whole)
        with program.mounted(*options, "{a,b}.tar", at=program.directory(f"m{number}")) as mounted:
            assert sorted(os.listdir(mounted.path)) == ["a", "d"]
            gone.unlink()
            mounted.allow_log("")
            if options[1:]:
                wait_until(lambda: _listed(mounted.path) == ["a"], "the change")
                continue
            wait_until(lambda: _listed(mounted.path) == [EIO], "the change")
            assert (mounted.path / "a/txt").read_bytes() == b"a"
            with fails(EIO):
                (mounted.path / "new").stat()
            program.write("b.tar", whole)
            wait_until(lambda: sorted(_listed(mounted.path)) == ["a", "d"], "the shard")
            assert not (mounted.path / "new").exists()


def _listed(directory: Path) -> list[Any]:
    """Return the names in a directory, or the number of the error."""
    try:
        return os.listdir(directory)
    except OSError as error:
        return [error.errno]


# --- strict ------------------------------------------------------------------------------------------------

SPLIT = tars.tar(tars.member(b"a.txt"), tars.member(b"b.txt"), tars.member(b"a.cls"), tars.member(b"b.cls"))
LACKING = tars.tar(*(tars.member(name) for name in (b"a.txt", b"a.cls", b"b.txt", b"b.cls", b"c.txt")))


@pytest.mark.parametrize(
    ("content", "finding"),
    [
        (CUT, f"[truncated] {CUT_SAYS}"),
        (SPLIT, "a.tar:1024: a: [split sample] the sample has members at offset 0 already"),
        (LACKING, "a.tar:2048: c: [missing extension] has no cls"),
    ],
    ids=["damaged", "split", "lacking"],
)
def test_strict_refuses_what_is_not_sound(program: Program, content: bytes, finding: str) -> None:
    program.write("a.tar", content)
    program.directory("up")
    commands = [
        ("mount", "a.tar", program.mountpoint),
        ("mount", "--lazy", "a.tar", program.mountpoint),
        ("ls", "a.tar"),
        ("info", "a.tar"),
        ("export", "--format", "dali", "-o", "x", "a.tar"),
        ("commit", "--overlay", "up", "-o", "new-%d.tar", "a.tar"),
    ]
    for command in commands:
        *found, last = program.run(command[0], "--strict", *command[1:], code=3).stderr.decode().splitlines()
        assert any(finding in line for line in found), command
        assert f"--strict: {len(found)} finding" in last
    assert not program.registration(program.mountpoint).exists()
    assert list(program.home.glob("new*")) == []
    checked = program.run("check", "a.tar", code=1).stdout.decode()
    assert finding in checked


def test_what_a_view_cannot_read_is_listed_by_strict_and_not_by_check(program: Program) -> None:
    samples = [tars.member(b"%d.json" % number, b"{" if number % 2 else b'{"t": "x"}') for number in range(6)]
    program.write("a.tar", tars.tar(*samples))
    program.write("b.tar", tars.tar(tars.member(b"x.json", b"]")))
    options = ("--field", "c.txt=json:t", "{a,b}.tar")
    said = program.run("ls", *options).stderr.decode().splitlines()
    assert [line.rpartition("; ")[2] for line in said] == ["--strict lists all"] * 2
    assert "1.json" in said[0]
    assert "(and 2 more)" in said[0]
    refused = program.run("ls", "--strict", *options, code=3).stderr.decode()
    assert refused.count("[broken field]") == 4
    assert "--strict: " in refused
    program.write("b.tar", tars.tar(tars.member(b"x.json", b"{}")))
    assert program.run("check", "{a,b}.tar").stdout == b""


def test_strict_refuses_a_shard_that_cannot_be_read_and_lets_a_sound_set_pass(half: Program) -> None:
    done = half.run("ls", "--strict", "{a,b}.tar", code=3)
    assert b"b.tar: Permission denied" in done.stderr
    assert half.run("ls", "--strict", "a.tar").stdout == b"a/\n"
    assert "contradict" in half.refused("ls", "--strict", "--allow-missing", "a.tar", code=2)
    with pytest.raises(UsageError):
        Tolerance(allow_missing=True, strict=True).check()


@pytest.mark.parametrize("name", list(tars.ODD))
def test_a_record_knows_what_a_look_at_the_shard_finds(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tars.ODD[name].tar())
    record, found = Record(build_file(os.fsencode(path))), lint.lint(os.fsencode(path))
    known = lint.lint_record(record)
    assert (known.samples, known.members) == (found.samples, record.members)
    assert known.patterns == found.patterns
    split = [(one.offset, one.member) for one in found.findings if one.kind == "split sample"]
    assert [(one.offset, one.member) for one in known.findings if one.kind == "split sample"] == split


def test_the_patterns_of_a_record_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample has a column of its own: the most frequent sets are counted, a few examples are listed."""
    monkeypatch.setattr(lint, "PATTERNS", 50)
    monkeypatch.setattr(lint, "KEPT", 20)
    monkeypatch.setattr(lint, "EXAMPLES", 5)
    path = tmp_path / "a.tar"
    own = [tars.member(b"k%d.c%d" % (number, number)) for number in range(200)]
    path.write_bytes(tars.tar(*own, *(tars.member(b"t%d.txt" % number) for number in range(9))))
    known = lint.lint_record(Record(build_file(os.fsencode(path))))
    txt = frozenset((b"txt",))
    assert (known.samples, len(known.patterns), known.patterns[txt]) == (209, 50, 9)
    assert (sum(map(len, known.examples.values())), len(known.examples[txt])) == (20, 5)
