"""Completion in real shells, which run the program as they do for a user; and the manual page."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from tests import sets
from tests.conftest import Program
from tests.processes import PATIENCE, Process, finished
from wdsfs.cli.help_commands import SHELLS, script
from wdsfs.cli.main import main

NASTY = "mnt b;$(x)'*"  # of a directory


def need(program: str) -> None:
    if shutil.which(program) is None:
        (pytest.fail if os.environ.get("WDSFS_REQUIRE_TOOLS") else pytest.skip)(f"{program} is not installed")


def environment(program: Program) -> dict[str, str]:
    """That of a shell that finds the program."""
    programs = program.home / "bin"
    if not programs.exists():
        programs.mkdir()
        (programs / "wdsfs").write_text(f'#!/bin/sh\nexec {sys.executable} -m wdsfs "$@"\n')
        (programs / "wdsfs").chmod(0o755)
    found = {**program.environment, "PATH": f"{programs}:{os.environ['PATH']}", "TERM": "dumb"}
    return {**found, "XDG_CONFIG_HOME": str(program.home / "config"), "XDG_DATA_HOME": str(program.home / "data")}


class Terminal:
    """An interactive shell with the completion of the program, at a terminal."""

    def __init__(self, program: Program, *command: str) -> None:
        self.text = b""
        self._main, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (50, 1000))  # no line is broken, however long paths are here
        self._process = Process(
            command,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            cwd=program.home,
            env=environment(program),
            start_new_session=True,
        )
        os.close(terminal)

    def type(self, text: str) -> None:
        self.text = b""
        os.write(self._main, text.encode())

    def wait_for(self, expected: str) -> None:
        """Read until this has been shown."""
        until = time.monotonic() + PATIENCE
        while expected.encode() not in re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]|\r\n?|\x07", b"", self.text):
            if not select.select([self._main], [], [], max(0, until - time.monotonic()))[0]:
                raise AssertionError((expected, self.text))
            self.text += os.read(self._main, 4096)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._main)


def bash(program: Program) -> Terminal:
    need("bash")
    (program.home / "rc").write_text(script("bash") + "\nPS1='ready> '\n")
    return Terminal(program, "bash", "--noprofile", "--rcfile", "rc", "-i")


def zsh(program: Program) -> Terminal:
    need("zsh")
    functions = program.home / "zfunc"
    functions.mkdir()
    (functions / "_wdsfs").write_text(script("zsh"))
    (program.home / ".zshrc").write_text(
        "fpath=(~/zfunc $fpath)\nautoload -U compinit\ncompinit -u -D\nPS1='ready> '\n"
    )
    return Terminal(program, "zsh", "-i")


@pytest.mark.parametrize("start", [bash, zsh])
def test_a_shell_completes_commands_options_values_and_paths(
    program: Program, start: Callable[[Program], Terminal]
) -> None:
    program.write("shards/train-000.tar", sets.content(0))
    terminal = start(program)
    try:
        terminal.wait_for("ready> ")
        for typed, line in (
            ("wdsfs umou\t", "wdsfs umount "),
            ("wdsfs mount --dup\t", "--duplicates "),
            ("wdsfs mount --merg\t", "--merge "),
            ("wdsfs mount --layout cl\t", "--layout classes "),
            ("wdsfs mount sha\t", "mount shards/"),
            ("wdsfs image -o shards/tr\t", "shards/train-000.tar"),
        ):
            terminal.type(typed)
            terminal.wait_for(line)
            terminal.type("\x15")  # ^U: the line is emptied
    finally:
        terminal.close()


def test_fish_completes(program: Program) -> None:
    need("fish")
    program.write("shards/train-000.tar", sets.content(0))
    completions = program.home / "config/fish/completions"
    completions.mkdir(parents=True)
    (completions / "wdsfs.fish").write_text(script("fish"))

    def offered(line: str) -> list[str]:
        command = "fish", "-c", f"complete -C {line!r}"
        rows = finished(*command, cwd=program.home, env=environment(program)).stdout.splitlines()
        return [row.split("\t")[0] for row in rows]

    assert offered("wdsfs umou") == ["umount"]
    assert offered("wdsfs mount --dup") == ["--duplicates"]
    assert offered("wdsfs mount shards/tr") == ["shards/train-000.tar"]


# --- what is offered --------------------------------------------------------------------------------------------


def offered(program: Program, *words: str) -> list[str]:
    """What the program answers to bash for the last of these words."""
    return str(answer(program, *words).stdout).splitlines()


def answer(program: Program, *words: str, options: tuple[str, ...] = ()) -> Any:
    """The program, asked for completion as by bash; `options` are those of the interpreter."""
    line = {"COMP_WORDS": "\n".join(["wdsfs", *words]), "COMP_CWORD": str(len(words))}
    asked = {**program.environment, **line, "_WDSFS_COMPLETE": "bash_complete"}
    return finished(sys.executable, *options, "-m", "wdsfs", cwd=program.home, env=asked)


def test_a_dead_mount_is_offered_and_not_touched(program: Program) -> None:
    shard = program.write("s.tar", sets.content(0))
    with program.mounted(shard) as mounted:
        # Root is offered the mounts of others, too.
        assert f"plain,{mounted.path}" in offered(program, "umount", "")
        assert offered(program, "status", "./mn") == ["dir,./mn"]
        assert f"plain,{mounted.path}" in offered(program, "commit", "")
        assert offered(program, "commit", "m") == ["file,m"]
        mounted.allowed.append(".*")
        processes = mounted.processes()
        for process in processes:  # a mount that answers nobody
            os.kill(process, signal.SIGSTOP)
        try:
            assert offered(program, "umount", str(program.home)) == [f"plain,{mounted.path}"]
            assert offered(program, "mount", "s.tar", str(program.home / "m")) == [f"file,{program.home}/m"]
        finally:
            for process in processes:
                os.kill(process, signal.SIGCONT)
    assert offered(program, "umount", str(program.home)) == [f"dir,{program.home}"]


def test_a_mount_point_that_is_more_than_a_word_is_not_offered(program: Program) -> None:
    """bash would take it for words of the line, and run what is in it."""
    shard = program.write("s.tar", sets.content(0))
    program.mountpoint.rmdir()
    program.mountpoint = program.directory(NASTY)
    with program.mounted(shard):
        assert offered(program, "status", f"{program.home}/") == [f"dir,{program.home}/"]


def test_nothing_is_asked_of_the_network(program: Program) -> None:
    for words in ("ls s3://bucket/tr", "mount pipe:cat", "index -o gs://b/x", "cache s3://"):
        assert offered(program, *words.split()) in ([], [""]), words


def test_an_answer_needs_none_of_the_slow_packages(program: Program) -> None:
    for words in (("umount", "/"), ("mount", "--lazy", "--index-dir", "x", "--cache-size", "1G", "s")):
        loaded = answer(program, *words, options=("-X", "importtime")).stderr
        assert "click" in loaded
        found = {line.rpartition("|")[2].strip().partition(".")[0] for line in loaded.splitlines()}
        assert found.isdisjoint({"numpy", "lmdb", "trio", "yaml", "pyfuse3", "obstore", "rich"})


def test_the_script_of_each_shell_is_printed(program: Program) -> None:
    assert offered(program, "help", "umo") == ["plain,umount"]
    assert {"plain,completion", "plain,mount"} <= set(offered(program, ""))
    for shell in SHELLS:
        assert program.run("completion", shell).stdout.decode() == script(shell).rstrip("\n") + "\n"
    guessed = program.run("completion", env={"SHELL": "/usr/bin/fish"})
    assert guessed.stdout == program.run("completion", "fish").stdout
    assert "name the shell" in program.refused("completion", env={"SHELL": "/bin/tcsh"}, code=2)
    assert b"wdsfs completion --help says where" in program.on_terminal("completion", "bash")


# --- the manual page ---------------------------------------------------------------------------------------------


def test_the_manual_has_what_help_says(program: Program) -> None:
    need("man")
    builder = Path(__file__).parents[2] / "hatch_build.py"
    page = finished(sys.executable, builder).stdout
    assert page.startswith('.TH WDSFS 1 "" "wdsfs ')
    (program.home / "wdsfs.1").write_text(page)
    plain = {**os.environ, "MANWIDTH": "1000", "LC_ALL": "C.UTF-8", "MAN_KEEP_FORMATTING": ""}
    done = finished("man", "--warnings", "--local-file", "wdsfs.1", cwd=program.home, env=plain)
    assert done.stderr == ""
    shown = " ".join(done.stdout.split())
    top = click.Context(main)
    for name in main.list_commands(top):
        command = main.get_command(top, name)
        assert command is not None
        assert f"wdsfs {name} " in shown
        for param in command.params:
            is_shown = isinstance(param, click.Option) and not param.hidden
            for option in param.opts if is_shown else ():
                assert option in shown, (name, option)
    # As it has to be typed: no other dash, no other quote, each example on a line of its own.
    assert "\n         wdsfs mount --names full --merge 'a-{0..9}.tar' 'b-*.tar' /mnt/all\n" in done.stdout
    assert "130 interrupted" in shown
    assert "WDSFS_INDEX_DIR" in shown
