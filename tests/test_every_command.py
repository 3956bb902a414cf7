"""Commands of pages that no other test types in: bash reads them, and wdsfs knows their words.

They need another machine (systemd, Docker, Slurm), or change it. The units, manifests and the job that the pages
speak of have tests of their own.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tests.conftest import ROOT
from tests.processes import finished
from wdsfs.cli.main import main

# Pages that are typed in, by test_first_steps, test_typed_pages, test_python_page and test_remote_page.
TYPED = {"README", "captions", "images", "labels", "layouts", "loaders", "python", "stores"}
GENERATED = {"commands", "commands-make"}
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.stem not in TYPED | GENERATED]
_FENCED = re.compile(r"^( *)```sh\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^    \S.*\n|(?<=\n)      .*\n)+", re.MULTILINE)
_HEREDOC = re.compile(r"<<'END'\n.*?^END$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> Iterator[str]:
    """Yield the blocks of a page that are for a shell."""
    text = page.read_text()
    for indent, block in _FENCED.findall(text):
        yield re.sub(rf"^{indent}", "", block, flags=re.MULTILINE)
    for block in _INDENTED.findall(re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)):
        if re.match(r" {4}(?:sudo )?(?:wdsfs|ls|cat|find|rm|cp|mv) ", block):
            yield block


BLOCKS = [(page.stem, block) for page in PAGES for block in blocks(page)]


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=[page for page, _ in BLOCKS])
def test_bash_reads_a_block_and_wdsfs_knows_its_words(page: str, block: str) -> None:
    assert finished("bash", "-n", input=block).stderr == ""
    for words in calls(block):
        refuse_unknown(words)


def test_there_are_such_blocks() -> None:
    pages = {"boot", "clusters", "containers", "engines", "monitor", "slurm", "users"}
    assert {page for page, _ in BLOCKS} >= pages
    assert sum(1 for _, block in BLOCKS for _ in calls(block)) > 30


@pytest.mark.parametrize(
    "text", ["wdsfs mount --layuot files a b", "wdsfs ls --layout flies a", "sudo wdsfs munt a"]
)
def test_a_mistake_would_be_noticed(text: str) -> None:
    with pytest.raises((click.UsageError, AssertionError)):
        refuse_unknown(next(calls(text)))


def calls(block: str) -> Iterator[list[str]]:
    """Yield the words after `wdsfs` of each call of it, also in what another shell is given."""
    text = _HEREDOC.sub("", block).replace("\\\n", " ")
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace, lexer.commenters = " \t\r", "#"
    words: list[str] = []
    for word in [*lexer, ";"]:
        if not re.fullmatch(r"[();<>|&\n]+", word):
            words.append(word)
            continue
        names = [at for at, name in enumerate(words) if re.fullmatch(r"(?:\S*/)?wdsfs", name)]
        if names and all(re.fullmatch(r"sudo|exec|timeout|\w+=.*", name) for name in words[: names[0]]):
            yield words[names[0] + 1 :]
        elif words[:1] != ["docker"]:
            for inner in words[1:]:
                if re.search(r"(?:^|[;&\s])wdsfs [a-z]", inner):
                    yield from calls(inner)
        words = []


def refuse_unknown(words: list[str]) -> None:
    """Raise click.UsageError or AssertionError for a command, an option or a choice that does not exist."""
    command = main.get_command(click.Context(main), words[0]) if words else None
    assert command is not None, words
    values, _, _ = command.make_parser(click.Context(command)).parse_args(list(words[1:]))
    for parameter in command.params:
        value = values.get(parameter.name)
        if isinstance(parameter.type, click.Choice) and isinstance(value, str):
            assert value in parameter.type.choices, (words, value)
