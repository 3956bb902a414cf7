"""What a newcomer meets in the first hour: messages, hints, other ways to say the same."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tars
from tests.conftest import BOTH_ENGINES, Program
from wdsfs import mount_users

SHARD = tars.tar(tars.member(b"a.txt", b"a"), tars.member(b"b.txt", b"b"))


@pytest.fixture
def shard(program: Program) -> Program:
    program.write("a.tar", SHARD)
    return program


# --- messages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("ls",), 2),
        (("ls", "--nosuch", "a.tar"), 2),
        (("mount", "--workers", "many", "a.tar", "mnt"), 2),
        (("nosuch",), 2),
        (("cat", "-x"), 2),
        (("export", "a.tar"), 2),
        (("ls", "gone.tar"), 3),
        (("mount", "gone.tar", "mnt"), 3),
        (("mount", "a.tar", "gone"), 5),
        (("umount", "mnt"), 5),
        (("where", "a.tar"), 6),
    ],
)
def test_every_message_begins_with_the_program(shard: Program, command: tuple[str, ...], code: int) -> None:
    lines = shard.run(*command, code=code).stderr.decode().splitlines()
    assert lines[-1].startswith("wdsfs: ")
    assert not lines[-1].startswith("wdsfs: error")
    assert all(line.startswith(("wdsfs: ", "Usage: ", "Try ")) or not line for line in lines)


@pytest.mark.parametrize("command", ["ls", "mount", "pack"])
@pytest.mark.parametrize("layout", ["imagefolder", "ImageFolder", "image-folder"])
def test_the_layout_of_an_image_folder(shard: Program, command: str, layout: str) -> None:
    last = {"mount": ["mnt"], "pack": ["-o", "b.tar"]}.get(command, [])
    done = shard.run(command, "--layout", layout, "a.tar", *last, code=2)
    assert b"--layout classes" in done.stderr


@pytest.mark.parametrize(("size", "shards"), [("1kB", 2), ("1.0 KiB", 1), ("1012", 2)])
def test_sizes_have_units(program: Program, size: str, shards: int) -> None:
    program.write("a.tar", tars.tar(*(tars.member(b"%d.txt" % n, bytes(506)) for n in range(3))))
    done = program.run("pack", "--maxsize", size, "a.tar", "-o", "new/%d.tar")
    assert f"shards: {shards} new" in done.stdout.decode()
    assert "'1XB' is not a size" in program.refused("pack", "--maxsize", "1XB", "a.tar", "-o", "%d.tar", code=2)


def test_without_arguments_there_is_help(program: Program) -> None:
    said = program.run(code=2).stderr
    assert said == program.run("--help").stdout
    assert said.count(b"Usage:") == 1


# --- help --------------------------------------------------------------------------------------------------


def on_pages(program: Program, *words: str, rows: int) -> str:
    """What a command shows on a terminal with a pager, which begins with a line of its own."""
    pager = program.home / "pager"
    pager.write_text("#!/bin/sh\necho PAGED\nexec cat\n")
    pager.chmod(0o755)
    program.environment |= {"PAGER": str(pager), "TERM": "xterm", "LINES": str(rows)}
    keyboard, terminal = os.openpty()
    try:
        return program.on_terminal(*words, stdin=terminal).decode()
    finally:
        os.close(keyboard)
        os.close(terminal)


@pytest.mark.parametrize("words", [["mount", "--help"], ["--help"], ["help"]])
def test_help_that_is_longer_than_the_terminal_is_paged(program: Program, words: list[str]) -> None:
    """In a pipe it is plain; on a terminal its headings are bold."""
    plain = program.run(*words).stdout.decode()
    assert on_pages(program, *words, rows=9).startswith("PAGED")
    shown = on_pages(program, *words, rows=999)
    assert "PAGED" not in shown
    bold = re.compile("\x1b\\[[01]m")
    assert bold.search(shown)
    assert bold.sub("", shown).split() == plain.split()


def test_a_page_is_rendered_on_a_terminal(program: Program) -> None:
    """By the pager, without links, which a terminal does not follow; in a pipe it is the text itself."""
    shown = on_pages(program, "help", "layouts", rows=24)
    assert shown.startswith("PAGED")
    assert "Which layout for which loader" in shown
    assert not [mark for mark in ("# Which", "](", "(#", "\n## ") if mark in shown]
    assert program.run("help", "layouts").stdout.startswith(b"# ")


# --- mounts ------------------------------------------------------------------------------------------------


@BOTH_ENGINES
def test_hints_come_after_success_only(program: Program, engine: str) -> None:
    program.write("a.tar", tars.tar(tars.member(b"a.jpg", b"x"), tars.member(b"a.cls", b"0")))
    with program.mounted("a.tar") as mounted:
        assert "help layouts" in mounted.output
    file = program.write("file", b"")
    assert "help layouts" not in program.run("mount", "--engine", engine, "a.tar", file, code=5).stderr.decode()


@contextlib.contextmanager
def asleep(**options: Any) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"], **options) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_mount_that_is_used_names_who_uses_it(shard: Program) -> None:
    with shard.mounted("a.tar") as mounted:
        with (
            asleep(cwd=mounted.path / "a") as inside,
            (mounted.path / "a/a/txt").open() as file,
            asleep(stdin=file) as reader,
        ):
            file.close()
            said = shard.refused("umount", mounted.path, code=5)
        assert f"wdsfs: {mounted.path}: is in use by " in said
        assert f"sleep ({inside.pid}, its working directory)" in said
        assert f"sleep ({reader.pid}, an open file)" in said
        assert f"wdsfs umount --lazy {mounted.path}" in said


def test_a_mount_can_be_ended_from_inside(shard: Program) -> None:
    """The command itself does not keep it busy, nor is it named as who does. It needs no PATH, as libfuse."""
    with shard.mounted("a.tar", ends_itself=True) as mounted:
        with asleep(cwd=mounted.path / "a") as inside:
            said = shard.refused("umount", "..", cwd=mounted.path / "a", code=5)
        assert f"is in use by sleep ({inside.pid}, its working directory); end" in said
        shard.run("umount", ".", cwd=mounted.path, env={"PATH": "/nonexistent"})
        assert not os.path.ismount(mounted.path)


def test_who_uses_a_mount_is_found_without_looking_into_it(tmp_path: Path) -> None:
    """By the texts of links alone; a path that only begins alike is another one."""
    for name in ("mnt", "mnt2"):
        (tmp_path / name).mkdir()
    with asleep(cwd=tmp_path / "mnt2") as other:
        assert mount_users.users(os.fsencode(tmp_path / "mnt")) == []
        [use] = mount_users.users(os.fsencode(tmp_path / "mnt2"))
    assert (use.pid, use.command, use.what) == (other.pid, "sleep", "its working directory")
