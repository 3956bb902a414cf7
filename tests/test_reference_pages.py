"""docs/reference: the commands are those of `--help`, codes, words and versions those of the program."""

from __future__ import annotations

import ast
import errno
import itertools
import os
import platform
import re
import sys

import click
import pytest

from tests.conftest import ROOT
from tests.processes import finished
from tests.test_words import MODULES, messages
from wdsfs import errors, host
from wdsfs.cli.main import main
from wdsfs.kernel import erofs_mount
from wdsfs.kernel.erofs_header import OLDEST_KERNEL


def section(page: str, title: str) -> str:
    text = (ROOT / f"docs/reference/{page}.md").read_text()
    return re.split(r"^## ", text.partition(f"\n## {title}\n")[2], flags=re.MULTILINE)[0]


def test_the_page_of_commands_is_what_help_says() -> None:
    finished(sys.executable, ROOT / ".ci/commands.py", "--check")


# --- messages.md


def test_every_error_and_exit_code_is_on_the_page() -> None:
    """And `--help` has each exit code."""
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.WdsfsError)
    ]
    classes = {
        (int(code), name, named or "EIO")
        for code, cell in re.findall(
            r"^\| (\d+) \| (.*) \|$", section("messages", "Errors in Python"), re.MULTILINE
        )
        for name, named in re.findall(r"`(\w+)`(?: \((E\w+)\))?", cell)
    }
    assert classes == {(kind.exit_code, kind.__name__, errno.errorcode[kind.errno]) for kind in kinds}
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", section("messages", "Exit codes"), re.MULTILINE)}
    helped = {int(code) for code in re.findall(r" {3}(\d+) +\S", main.epilog or "")}
    assert listed == helped == {code for code, _, _ in classes} | {0, 130}


SAID = [text.words for file in MODULES for text in messages(ast.parse(file.read_text()), 1)]


def test_the_page_has_messages_of_the_program() -> None:
    """The words in backquotes that begin a row are in one message, or in one of another program."""
    rows = re.findall(r"^\| (`.*?) \| ", section("messages", "Messages that need action"), re.MULTILINE)
    assert len(rows) > 10
    for row in rows:
        for words in re.findall(r"`([^`]+)`", row.partition(" (")[0]):
            parts = re.split(r"\b[A-Z]{3,}\b(?=$|[^_A-Z])", words)
            assert re.search(".*".join(map(re.escape, parts)), "\n".join(SAID)) or "(of fuse3)" in row, words


def test_commands_options_and_pages_in_messages_exist() -> None:
    """So a message that tells users to act is complete."""
    context = click.Context(main)
    commands = {name: main.get_command(context, name) for name in main.list_commands(context)}
    options = {"--help", "--help-all"} | {
        option for command in commands.values() if command for each in command.params for option in each.opts
    }
    others = re.compile(r"(?:docker|podman|apptainer|sudo umount|cp) [^`]*--.*")
    for words in SAID:
        assert {*re.findall(r"(?<![\w-])--[a-z][a-z-]+", others.sub("", words))} <= options, words
        assert {*re.findall(r"(?:`|type |with: )wdsfs ([a-z]+)", words)} <= {*commands}, words
        assert all((ROOT / page).exists() for page in re.findall(r"docs/[\w/.-]+\.md", words)), words


# --- platforms.md

KNOWN = {"tested", "tried", "by stand-in", "by its documents", "never tried"}


def rows(title: str) -> list[list[str]]:
    table = section("platforms", title).strip().partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def first(column: int, word: str) -> tuple[int, ...]:
    """Return the oldest version of which a column of the table says so."""
    return min(
        host.kernel_version(row[0].partition(" to ")[0])
        for row in rows("Linux")
        if row[0][0].isdigit() and row[column].startswith(word)
    )


def test_versions_of_linux_are_those_of_the_program() -> None:
    """And each Linux from 4.18 on has one row, but for those of one distribution."""
    assert first(3, "yes") == OLDEST_KERNEL
    assert first(3, "yes, shards as files") == erofs_mount.FILES_SINCE
    assert first(2, "yes") == (6, 9)  # FUSE_NOTIFY_RESEND
    ranges = [row[0].replace(" otherwise", "").split(" to ") for row in rows("Linux") if row[0][0].isdigit()]
    bounds = [(host.kernel_version(words[0])[:2], host.kernel_version(words[-1])[:2]) for words in ranges]
    whole = [(low, high) for low, high in bounds if (low, high) != ((6, 1), (6, 1))]
    assert all(low <= high for low, high in whole)
    assert all(below[1] < above[0] for above, below in itertools.pairwise(whole))


def test_every_row_says_how_it_is_known() -> None:
    for title in ("Linux", "Python, libraries, distributions", "Containers"):
        for row in rows(title):
            assert any(word in row[-1] for word in KNOWN), row
    assert [
        row
        for row in rows("Python, libraries, distributions")
        if row[0].startswith("Python ") and row[-1] == "tested"
    ]


@pytest.mark.skipif("WDSFS_REQUIRE_FUSE" not in os.environ, reason="this machine runs no continuous integration")
def test_what_runs_the_tests_is_known() -> None:
    """Where continuous integration passes, no row says that nobody has tried it."""
    linux = host.kernel_version()[:2]
    around = {row[0]: row[-1] for row in rows("Python, libraries, distributions")}
    python = platform.python_version().rpartition(".")[0]
    names = [name for name in around if name.startswith("Python") and re.search(rf"\b{re.escape(python)}\b", name)]
    assert names, python
    for name in (*names, platform.machine()):
        assert around[name] != "never tried", name
    newest = max(host.kernel_version(word) for row in rows("Linux") for word in re.findall(r"\d+\.\d+", row[0]))
    assert linux <= newest, "a row for this Linux"
