"""`wdsfs diff` and `wdsfs commit`: what they print, and with which code they end."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests import tars
from tests.conftest import InProcess, Program
from tests.kernel.mounts import told
from tests.packing.overlays import EDITS, FIRST, SECOND, Killed, Set, half_way, keys, numbered
from tests.processes import PATIENCE, Process, wait_until
from tests.uppers import OPAQUE, WHITEOUT, write_upper
from tests.writables import shard
from wdsfs.cli import main
from wdsfs.durable import Disk
from wdsfs.tar import headers
from wdsfs.tree.tree import View


@pytest.fixture
def program(in_process: InProcess) -> InProcess:
    return in_process


@pytest.fixture
def here(program: Program) -> Set:
    return Set(program.home, FIRST, SECOND).edit(EDITS)


SHARDS = "s{0..1}.tar"


def lines(out: bytes) -> list[str]:
    return os.fsdecode(out).splitlines()


# --- diff --------------------------------------------------------------------------------------------------


def overlaid(program: Program, *words: str | Path, code: int = 0) -> subprocess.CompletedProcess[bytes]:
    """Run a command about the overlay `o`."""
    return program.run(*words, "--overlay", "o", code=code)


def test_diff(program: Program, here: Set) -> None:
    done = overlaid(program, "diff", SHARDS)
    assert lines(done.stdout) == ["changed  s0/d/a +txt ~jpg", "removed  s0/d/b", "added    s0/d/n"]
    assert b"samples: 1 added, 1 changed, 0 renamed, 1 removed; 0 cannot be packed\n" in done.stderr
    here.edit({"s1": {b"\xff": {"txt": b""}}, "loose": b""})
    report = json.loads(overlaid(program, "diff", "--json", SHARDS, code=1).stdout)
    sample = {"kind": "changed", "path": "s0/d/a", "was": None, "added": ["txt"], "changed": ["jpg"]}
    assert report["samples"][0] == {**sample, "removed": [], "times": []}
    assert report["samples"][-1]["path"] == "s1/\udcff"
    assert [row["path"] for row in report["unpackable"]] == ["loose"]
    assert report["conflicts"] == report["notes"] == report["others"] == []
    here.edit({"s1": {"txt~": b"", "n": {"txt~": b""}, "empty": {}}})
    report = json.loads(overlaid(program, "diff", "--json", SHARDS, code=1).stdout)
    assert "s1/n/txt~" in [row["path"] for row in report["leavings"]]
    assert "s1/empty" in [row["path"] for row in report["notes"]]


def test_diff_tells_conflicts_apart(program: Program) -> None:
    """They stand in the way with --leave-out, too."""
    upper = {"s0": {"d": {"a": WHITEOUT, "z": {OPAQUE: True, "a.jpg": b"A"}}}, "loose": b""}
    Set(program.home, FIRST, SECOND, view=View(names="full")).edit(upper)
    done = overlaid(program, "diff", SHARDS, code=1)
    words = [line.partition(":")[0] for line in lines(done.stdout)]
    assert words == ["removed  s0/d/a", "conflict", "cannot be packed"]
    assert b"1 removed; 1 cannot be packed, 1 conflict\n" in done.stderr
    report = json.loads(overlaid(program, "diff", "--json", SHARDS, code=1).stdout)
    assert [remark["path"] for remark in report["conflicts"] + report["unpackable"]] == ["s0/d/z/a.jpg", "loose"]


def test_an_overlay_without_changes(program: Program) -> None:
    Set(program.home, FIRST, SECOND)
    assert overlaid(program, "diff", SHARDS).stdout == b""
    assert overlaid(program, "commit", "--in-place", SHARDS).stdout == b"the overlay changes no shard\n"


# --- commit ------------------------------------------------------------------------------------------------


def test_commit(program: Program, here: Set) -> None:
    command = ("commit", "--output", "out/t-%02d.tar", SHARDS)
    done = overlaid(program, *command, "--dry-run")
    assert [line.split()[1:3] for line in lines(done.stdout)[2:]] == [["rewrite", "3"], ["copy", "2"]]
    [row, _] = json.loads(overlaid(program, *command, "--dry-run", "--json").stdout)
    assert (row["action"], row["samples"]) == ("rewrite", 3)
    assert not (program.home / "out").exists()
    assert b"shards: 1 rewritten, 1 copied; 5 samples" in overlaid(program, *command).stdout
    assert sorted(os.listdir(program.home / "out")) == ["t-00.tar", "t-01.tar"]
    assert row["bytes"] == (program.home / "out/t-00.tar").stat().st_size
    assert keys(*here.out()) == [["d/a", "c", "d/n"], ["e", "d/f"]]
    assert b"2 of these existed already" in overlaid(program, *command).stdout


def test_a_copied_folder_is_told(program: Program, here: Set) -> None:
    here.edit({"s0": {folder: {f"{number}.jpg": b"" for number in range(9)} for folder in ("cat", "dog")}})
    notes = [line for line in lines(overlaid(program, "diff", SHARDS).stdout) if "one sample" in line]
    assert notes[0].endswith("or pack the folder: wdsfs pack --layout classes")
    assert notes[1:] == ["note: s0/dog: is one sample with all its files as columns, too"]
    done = overlaid(program, "commit", "--output", "out/t-%02d.tar", "--dry-run", "--json", SHARDS)
    (told_line,) = (line for line in lines(done.stderr) if "is one sample" in line)
    assert "s0/cat (and 1 more)" in told_line
    assert "pack --layout classes" in told_line


def test_commit_in_place(program: Program, here: Set) -> None:
    here.edit({"more": {"x": {"txt": b""}}})
    assert lines(overlaid(program, "commit", "--in-place", "--jobs", "2", SHARDS).stdout)[1:] == [
        f"new: {program.home}/s2.tar",
        "the next mount must also name this shard: s2.tar",
    ]
    assert keys(*here.set()) == [["d/a", "c", "d/n"], ["e", "d/f"], ["x"]]
    assert overlaid(program, "diff", SHARDS).stdout == b""


WRONG = [
    ([], "--output"),
    (["--in-place", "--link"], "there is no --link"),
    (["--in-place", "--leave-out"], "there is no --leave-out"),
    (["-o", "x-%d-%d"], "like %06d"),
    (["--names", "full", "-o", "%d.tar"], "made with --layout samples --names ext"),
    (["-o", "out{.tar"], "unbalanced braces in 'out{.tar': close them"),
    (["-o", "new/"], "--output new/ is a directory: name the shards in it"),
    (["-o", "x-%d.tar.GZ"], "shards are written as plain tars, and under a name in .tar.gz readers would unpack"),
    (["-o", "o/upper/s%d.tar"], "would be in the directory of the overlay: name another directory with --output"),
    (["-o", "o/s%d.tar"], "would be in the directory of the overlay"),
    *((["--abandon", option], "leave out the other options")
      for option in ("--in-place", "--link", "--dry-run")),
]  # fmt: skip


def test_what_does_not_go_together(program: Program, here: Set) -> None:
    """Nothing is written, and a wrong name is said before what cannot be packed."""
    for options, text in WRONG:
        assert text in overlaid(program, "commit", *options, SHARDS, code=2).stderr.decode()
    assert not (program.home / "new").exists()
    assert sorted(os.listdir(program.home / "o")) == ["lock", "overlay.json", "upper", "work"]
    here.edit({"README": b"outside"})
    for pattern, code in (("out{.tar", 2), ("x-%d.tgz", 2), ("new/%d.tar", 7)):
        overlaid(program, "commit", "-o", pattern, SHARDS, code=code)
    for words in (("diff",), ("commit", "-o", "n/%d.tar", "--merge"), ("commit", "--in-place")):
        assert "name --overlay DIR" in program.refused(*words, "s0.tar", code=5)


# --- the overlay and its set -------------------------------------------------------------------------------


def test_the_view_is_that_of_the_overlay(program: Program) -> None:
    Set(program.home, FIRST, SECOND, view=View("files"), merge=True).edit({"d": {"a.jpg": b"new"}})
    assert lines(overlaid(program, "diff", SHARDS).stdout) == ["changed  d/a ~jpg"]
    done = overlaid(program, "diff", "--layout", "samples", SHARDS, code=2)
    assert b"made with --layout files --merge" in done.stderr


def test_an_overlay_that_cannot_be_used(program: Program, here: Set) -> None:
    """That no mount has made, as the upper of a kernel's overlayfs; of more shards; in use; of a later version."""
    write_upper(program.home / "bare", {"s0": {"d": {"a.jpg": b"new"}}})
    for command in (["diff"], ["commit", "--in-place"], ["commit", "-o", "new/s%d.tar"]):
        done = program.run(*command, "--overlay", "bare", SHARDS, code=8)
        assert b"neither empty nor an overlay of wdsfs" in done.stderr
    assert os.listdir(program.home / "bare") == ["s0"]
    assert b"an overlay of a set that has s0, too" in overlaid(program, "diff", "s1.tar", code=8).stderr
    with (program.home / "o/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert all("in use" in error for error in again(program, SHARDS, 8))
    here.place.outputs.write_text('{"version": 9}')
    assert all("of version 9, by a newer wdsfs" in error for error in again(program, SHARDS, 8))
    here.place.outputs.unlink()
    here.shards[1].write_bytes(FIRST)
    assert b"was made: s1; the changes still apply" in overlaid(program, "diff", SHARDS).stderr


def test_an_unfinished_commit(program: Program, here: Set) -> None:
    """All but the command that finishes it is refused, and the message names that command."""

    class Killer(Disk):
        dead = False

        def open_temporary(self, path: bytes, mode: int = 0o666) -> int:
            if self.dead:
                raise Killed
            return super().open_temporary(path, mode)

        def rename(self, source: bytes, target: bytes) -> None:
            super().rename(source, target)
            self.dead = target.endswith(b".tar")
            if self.dead:
                raise Killed

    here.edit({"s1": {"e": WHITEOUT}})
    with pytest.raises(Killed):
        here.commit(Killer(), in_place=True)
    finish = b"wdsfs commit --in-place --overlay o 's{0..1}.tar' (to give it up, type --abandon"
    assert finish in program.run("diff", "--overlay", "o", SHARDS, code=7).stderr
    assert finish in program.run("commit", "--overlay", "o", "--output", "%d.tar", SHARDS, code=7).stderr
    done = program.run("commit", "--in-place", "--overlay", "o", "s1.tar", "s0.tar", code=7)
    assert b"in the same order" in done.stderr
    done = program.run("commit", "--in-place", "--overlay", "o", SHARDS)
    assert b"1 of these existed already" in done.stdout
    assert b"changed since" not in done.stderr
    assert keys(*here.set()) == [["d/a", "c", "d/n"], ["d/f"]]


def again(program: Program, shards: str, code: int) -> list[str]:
    """Return the message of the commands about the overlay over these shards."""
    commands = (("diff",), ("commit", "--in-place", "--dry-run"), ("commit", "-o", "again/s%d.tar", "--dry-run"))
    return [overlaid(program, *command, shards, code=code).stderr.decode() for command in commands]


def write_new(program: Program) -> None:
    overlaid(program, "commit", "-o", "new/s%d.tar", SHARDS)


def test_an_overlay_is_not_used_over_what_was_written_from_it(program: Program, here: Set) -> None:
    here.edit({"more": {"x": {"txt": b"x"}}})
    write_new(program)
    for error in again(program, "new/s{0..2}.tar", 8):
        assert "new/s0.tar, " in error
        assert "new/s2.tar were written by a commit of the overlay" in error
        assert "Begin with a new directory for --overlay, or name the shards that this one was made over" in error
        assert "s1.tar" not in error  # nothing of it was changed
    again(program, SHARDS, 0)
    write_new(program)  # repeated
    mounted = overlaid(program, "mount", "new/s{0..2}.tar", program.home / "mnt", code=8)
    assert b"were written by a commit of the overlay" in mounted.stderr


@pytest.mark.parametrize("move", ["mv", "cp"])
def test_an_overlay_is_not_used_over_outputs_in_the_place_of_the_sources(
    move: str, program: Program, here: Set
) -> None:
    write_new(program)
    subprocess.run([move, "new/s0.tar", "s0.tar"], cwd=program.home, check=True)
    assert all("s0.tar was written by a commit" in error for error in again(program, SHARDS, 8))


def test_another_shard_of_the_same_size_in_their_place(program: Program, here: Set) -> None:
    """It is not what was written, and a new time does not make another shard of that."""
    write_new(program)
    new = program.home / "new/s0.tar"
    os.utime(new)
    assert all("new/s0.tar was written by a commit" in error for error in again(program, "{new/s0,s1}.tar", 8))
    new.write_bytes((program.home / "s0.tar").read_bytes().ljust(new.stat().st_size, b"\0"))
    again(program, "{new/s0,s1}.tar", 0)


LARGE = tars.tar(headers.encode(b"a.bin", 200_192, 5) + bytes(200_189) + b"old", tars.member(b"b.txt", b"b"))
ALIKE: dict[str, tuple[bytes, bytes, dict[str, Any]]] = {  # two shards, edits
    "one is a sample shorter": (numbered(3), numbered(2, 50), {"s0": {"002": WHITEOUT}}),
    "one is that without a sample": (numbered(3), numbered(2), {"s0": {"002": WHITEOUT}}),
    "one has no samples": (numbered(1), tars.tar(), {"s0": {"000": WHITEOUT}}),
    "the changed one is as long": (LARGE, numbered(2), {"s0": {"a": {"bin": bytes(200_189) + b"new"}}}),
}


def restamp(home: Path) -> None:
    """Give the sources other fingerprints: the same files with another ctime."""
    for source in home.glob("s?.tar"):
        os.chmod(source, 0o600)


@pytest.mark.parametrize("alike", ALIKE)
def test_a_source_does_not_pass_for_what_was_written(alike: str, program: Program) -> None:
    first, second, edits = ALIKE[alike]
    Set(program.home, first, second).edit(edits)
    for changed in (program.home / "o/upper").rglob("bin"):
        os.utime(changed, (5, 5))
    write_new(program)
    again(program, SHARDS, 0)
    if alike != "one is that without a sample":  # nothing but its times tells it from the one written
        restamp(program.home)
        again(program, SHARDS, 0)
    assert all("written by a commit of the overlay" in error for error in again(program, "new/s{0..1}.tar", 8))


def test_notes_of_zeros_of_an_earlier_version(program: Program) -> None:
    """Its samples began at the change: behind a last sample that was removed there are zeros only."""
    here = Set(program.home, numbered(3), numbered(2, 50)).edit({"s0": {"002": WHITEOUT}})
    write_new(program)
    notes = json.loads(here.place.outputs.read_text())
    [note] = notes["shards"]
    note["sample"] = [2048, zlib.crc32(bytes(note["size"] - 2048))]
    here.place.outputs.write_text(json.dumps(notes))
    restamp(program.home)
    again(program, SHARDS, 0)
    assert all("new/s0.tar was written by a commit" in error for error in again(program, "new/s{0..1}.tar", 8))


def test_an_overlay_whose_changes_were_restored_is_used_over_what_was_written(program: Program, here: Set) -> None:
    """Also once more, with new changes: it is an overlay of these shards now."""
    write_new(program)
    again(program, "new/s{0..1}.tar", 8)
    overlaid(program, "restore", "--all")
    again(program, "new/s{0..1}.tar", 0)
    here.edit({"more": {"x": {"txt": b"x"}}})
    again(program, "new/s{0..1}.tar", 0)


def test_an_overlay_that_was_emptied_has_nothing_of_what_was_written_from_it(program: Program, here: Set) -> None:
    write_new(program)
    overlaid(program, "commit", "--in-place", SHARDS)
    assert not here.place.outputs.exists()
    again(program, "new/s{0..1}.tar", 0)


def test_what_a_commit_left_that_was_killed_at_its_end_goes(program: Program, here: Set) -> None:
    for name in ("committed/d", "commit.log", "commit.json.tmp"):
        (here.place.work / name).mkdir(parents=True) if "/" in name else (here.place.work / name).touch()
    program.run("diff", "--overlay", "o", SHARDS)
    assert os.listdir(here.place.work) == []


@pytest.mark.parametrize("missing", [0, 1])
def test_in_place_without_a_shard_that_may_be_missing(missing: int, program: Program) -> None:
    """It has no changes, so nothing of it is needed; nor for the name of a further shard."""
    here = Set(program.home, FIRST, SECOND)
    upper = {"d": {"a": {"txt": b"new"}}} if missing else {"e": {"txt": b"new"}}
    here.edit({f"s{1 - missing}": upper, "more": {"x": {"txt": b"x"}}})
    here.shards[missing].unlink()
    command = ("commit", "--overlay", "o", "--in-place", "--allow-missing", SHARDS)
    assert b"1 rewritten, 1 new" in program.run(*command).stdout
    assert sorted(path.name for path in program.home.glob("*.tar")) == [f"s{1 - missing}.tar", "s2.tar"]
    assert os.listdir(program.home / "o/upper") == []
    assert b"the overlay changes no shard" in program.run(*command).stdout


def test_abandoning(program: Program, tmp_path: Path) -> None:
    half, whole = half_way(tmp_path / "set")
    half.shards[1].write_bytes(FIRST)
    options = ("--overlay", half.home / "o", f"{half.home}/{SHARDS}")
    assert b"s1.tar: changed by" in program.run("commit", "--in-place", *options, code=7).stderr
    assert lines(program.run("commit", "--abandon", *options).stdout) == [
        "abandoned: 1 of 3 shards written",
        f"not written: {half.home}/s1.tar",
        f"not written: {half.home}/s2.tar",
        "the overlay still has the other changes; see: wdsfs diff",
    ]
    done = program.run("diff", *options)
    assert lines(done.stdout) == ["added    s1/e", "added    more/x"]
    assert b"was made: s1; the changes still apply" in done.stderr
    assert b"s0.tar" not in done.stderr
    assert half.shards[0].read_bytes() == whole[0]
    done = program.run("commit", "--abandon", *options, code=7)
    assert b"was stopped half-way, so there is none to abandon" in done.stderr


def test_abandoning_without_a_shard(program: Program, tmp_path: Path) -> None:
    half, _ = half_way(tmp_path / "set")
    half.shards[1].unlink()
    options = ("--overlay", half.home / "o", f"{half.home}/{SHARDS}")
    for command in (["diff"], ["commit", "--in-place"], ["commit", "--abandon"]):
        error = program.run(*command, *options, code=7).stderr
        assert b"put the shard back, or an empty tar in its place (truncate -s 10240 FILE)" in error
    half.shards[1].write_bytes(bytes(10240))
    error = program.run("commit", "--in-place", *options, code=7).stderr
    assert b"changed by another program, or removed" in error
    assert b"1 of 3 shards written" in program.run("commit", "--abandon", *options).stdout
    assert lines(program.run("diff", *options).stdout) == ["added    s1/e", "added    more/x"]


def test_abandoning_as_json(program: Program, tmp_path: Path) -> None:
    half, _ = half_way(tmp_path / "set", merge=True)
    report = program.json("commit", "--abandon", "--overlay", half.home / "o", f"{half.home}/{SHARDS}")
    assert [Path(row["shard"]).name for row in report["shards"]] == ["s0.tar"]
    assert [Path(row["shard"]).name for row in report["left"]] == ["s1.tar"]
    assert (Path(report["aside"]) / "e/txt").read_bytes() == b"new"


# --- interrupted -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_while_writing(number: int, program: Program) -> None:
    """At some instant or other; nothing half-written has a name, and the next run finishes."""
    big = tars.tar(*(tars.member(b"%d.bin" % n, bytes(1 << 22)) for n in range(16)))
    here = Set(program.home, big, big, big).edit({f"s{n}": {"0": {"cls": b""}} for n in range(3)})
    command = [sys.executable, "-m", "wdsfs", "commit", "--overlay", "o", "-o", "out/%d.tar", "s{0..2}.tar"]
    options: dict[str, Any] = {"cwd": program.home, "env": {**os.environ, **program.environment}}
    process = Process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    out = Path(program.home, "out")
    wait_until(lambda: (out.exists() and os.listdir(out)) or process.poll() is not None, "the first shard")
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE)
    if number == signal.SIGINT and process.returncode == 130:
        assert err == b"wdsfs: interrupted; finished shards are kept: repeat the command, and it continues\n"
    suffixes = (".tar", ".tmp") if number == signal.SIGKILL else (".tar",)
    assert all(name.endswith(suffixes) for name in os.listdir(out))
    if number == signal.SIGTERM:
        assert process.returncode in (128 + number, 0)
    assert all(len(keys(path.read_bytes())[0]) == 16 for path in out.glob("?.tar"))
    done = program.run("commit", "--overlay", "o", "-o", "out/%d.tar", "s{0..2}.tar")
    assert b"3 rewritten" in done.stdout
    assert len(here.out()) == 3


@pytest.mark.parametrize("call", ["close", "read", "pread", "copy_file_range"])
@pytest.mark.parametrize("what", ["s0.tar", "upper/s0/a/cls"])
def test_an_error_of_a_disk_names_the_file(
    call: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the files that a commit reads it is, and also when it is closed; the set stays as it was."""
    source = tmp_path / "s0.tar"
    source.write_bytes(shard([("a.cls", b"1"), ("a.jpg", b"j"), ("b.cls", b"2")]))
    write_upper(tmp_path / "edits", {})
    write_upper(tmp_path / "edits/upper", {"s0": {"a": {"cls": b"3"}}})
    words = ("--overlay", tmp_path / "edits", source)
    told(tmp_path, "diff", *words, code=0)
    before, failed = source.read_bytes(), []

    def failing(real: Any) -> Any:
        def method(fd: int, *arguments: Any) -> Any:
            is_it = os.readlink(f"/proc/self/fd/{fd}").endswith(what)
            done = real(fd, *arguments)
            if is_it:
                failed.append(real)
                raise OSError(errno.EIO, "Input/output error")
            return done

        return method

    with monkeypatch.context() as patched:
        for name in {call, "pread"} if call == "copy_file_range" else {call}:
            patched.setattr(os, name, failing(getattr(os, name)))
        words_of_commit = ["commit", "--in-place", *map(str, words)]
        environment = {"WDSFS_INDEX_DIR": str(tmp_path / "index")}
        done = CliRunner().invoke(main.main, words_of_commit, env=environment, prog_name="wdsfs")
    if failed:
        assert done.exit_code in (3, 7), done.output
        assert f"{what.removeprefix('upper/')}: Input/output error" in done.output
        assert source.read_bytes() == before
        told(tmp_path, "commit", "--in-place", *words, code=0)
    new = source.read_bytes()
    assert [new[path.data : path.data + path.size] for path in tars.by_tarfile(new)] == [b"3", b"j", b"2"]
