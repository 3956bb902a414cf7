"""Names of shards, members and files that forge lines of logs and send escapes to terminals."""

from __future__ import annotations

import io
import json
import logging
import os

import pytest

from tests import tars
from tests.conftest import Program
from wdsfs.cli import output
from wdsfs.errors import CommitError, UsageError
from wdsfs.log_lines import TerminalFormatter

FORGED = "2026-11-23 20:00:00,000 1 ERROR wdsfs: forged"
NAME = f"a\n{FORGED} \x1b[31mred\x07\r\x9b2J"
SHOWN = f"a\\n{FORGED} \\x1b[31mred\\x07\\r\\x9b2J"


def is_safe(text: str) -> bool:
    """True if no name in a text begins a line of its own, or controls a terminal."""
    return not any(line.startswith(FORGED) or not line.isprintable() for line in text.split("\n"))


def test_the_text_of_an_error() -> None:
    """Its arguments are exact, and so is what is raised again from them."""
    error = UsageError(f"{NAME}: no such thing")
    assert str(error) == f"{SHOWN}: no such thing"
    assert str(type(error)(*error.args)) == str(error)
    assert str(CommitError("these:", f"  {NAME}", "and others")) == f"these:\n  {SHOWN}\nand others"
    assert str(UsageError()) == ""


def test_a_message_is_one_line_of_a_log_and_a_traceback_forges_none() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TerminalFormatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.Logger("wdsfs.test")
    logger.addHandler(handler)
    logger.error("%s: gone", NAME)
    logger.error(f"{NAME}: gone")
    assert stream.getvalue() == f"ERROR wdsfs.test: {SHOWN}: gone\n" * 2
    try:
        raise ValueError(NAME)
    except ValueError:
        logger.exception("it failed")
    first, *further = stream.getvalue().splitlines()[2:]
    assert first == "ERROR wdsfs.test: it failed"
    assert is_safe(stream.getvalue())
    assert all(line.startswith("  ") for line in further)


def test_lines_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    output.say(NAME)
    output.say(NAME, "and more", err=True)
    table = output.table_of("shard", "bytes")
    table.add_row(NAME, "1")
    output.print_table(table)
    output.print_block(NAME, [("shard", NAME)])
    out, err = capsys.readouterr()
    assert (is_safe(out), is_safe(err)) == (True, True)
    assert (out.count(SHOWN), err) == (4, f"{SHOWN}\nand more\n")


@pytest.fixture
def forging(program: Program) -> Program:
    """A sound shard and a damaged one of such names, with such members."""
    data = tars.tar(tars.member(os.fsencode(f"{NAME}.txt"), b"1"), tars.member(b"b.txt", b"2"))
    program.write(f"{NAME}.tar", data)
    program.write(f"x{NAME}.tar", data[:1600])
    program.write(f"edits/upper/{NAME}/{NAME}/cls", b"1")
    return program


SHARDS = [f"{NAME}.tar", f"x{NAME}.tar"]
COMMANDS: list[tuple[str, ...]] = [
    *(("info",), ("check",), ("check", "--notes"), ("index",), ("mount", "--strict")),
    *(("export", "-o", "."), ("image", "-o", f"{NAME}.erofs"), ("cat",)),
    *(("diff", "--overlay", "edits"), ("doctor", f"no {NAME}")),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_what_commands_say_of_them(forging: Program, command: tuple[str, ...]) -> None:
    last = {"cat": [f"no {NAME}"], "mount": [forging.mountpoint]}.get(command[0], [])
    done = forging.run(*command, *([] if command[0] == "doctor" else SHARDS), *last, code=None)
    said = (done.stdout + done.stderr).decode("utf-8", "surrogateescape")
    assert said
    assert is_safe(said)


def test_what_is_said_of_arguments(forging: Program) -> None:
    """A shell's glob makes options of names, too."""
    for words in (("info", f"--{NAME}"), (NAME,), ("info", f"no {NAME}"), ("mount", NAME), ("umount", NAME)):
        said = forging.run(*words, code=None).stderr.decode()
        assert is_safe(said)
        assert said.count("forged") in (1, 2)


def test_ls_into_a_pipe_has_the_names_themselves(forging: Program) -> None:
    """As ls(1); on a terminal it has not, and `--json` has them without lines of their own."""
    shard = SHARDS[0]
    assert forging.run("ls", shard, NAME).stdout == f"{NAME}/\nb/\n".encode()
    assert is_safe(forging.on_terminal("ls", shard, NAME).decode().replace("\r\n", "\n"))
    rows = forging.run("ls", "--json", shard, NAME).stdout.splitlines()
    assert [json.loads(row)["name"] for row in rows] == [NAME, "b"]


def test_what_a_mount_tells_of_them(forging: Program) -> None:
    at = forging.directory(NAME)
    with forging.mounted(*SHARDS, at=at) as mounted:
        problems = (at / ".wdsfs/problems.txt").read_bytes().decode()
        assert is_safe(problems)
        assert problems.count("\n") == 1
        assert is_safe((at / ".wdsfs/metrics").read_text())
        assert mounted.status()["mountpoint"] == str(at)
        for words in (("status",), ("status", at), ("where", at / f"{NAME}/b/txt"), ("where", at / NAME / NAME)):
            said = forging.run(*words, code=None)
            assert is_safe((said.stdout + said.stderr).decode())
        (forging.home / SHARDS[0]).unlink()
        assert is_safe(forging.run("refresh", at).stdout.decode())
        mounted.allow_log("forged")
        assert is_safe(mounted.log())


def test_findings_have_the_names_themselves_in_json(program: Program) -> None:
    """A line of text has the name escaped once, and other letters of it as they are."""
    program.write("a.tar", tars.tar(tars.member(b"b.txt", b"1"), tars.member(os.fsencode(f"\u00e4{NAME}"), b"2")))
    said = program.run("check", "--notes", "--json", "a.tar", code=None).stdout
    assert f"\u00e4{NAME}" in [json.loads(line).get("member") for line in said.splitlines()]
    lines = program.run("check", "--notes", "a.tar", code=None).stdout.decode()
    assert is_safe(lines)
    assert f": \u00e4{SHOWN}: [" in lines
