"""docs/reference/messages.md: exit codes and words of messages are those of the program."""

from __future__ import annotations

import ast
import re

from tests.conftest import ROOT
from wdsfs import errors
from wdsfs.cli.main import main

PAGE = (ROOT / "docs/reference/messages.md").read_text()


def section(title: str) -> str:
    return re.split(r"^## ", PAGE.partition(f"\n## {title}\n")[2], flags=re.MULTILINE)[0]


def test_every_exit_code_is_there() -> None:
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", section("Exit codes"), re.MULTILINE)}
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    raised = {value.exit_code for value in classes if issubclass(value, errors.WdsfsError)}
    helped = {int(code) for code in re.findall(r"(?:^|, |: )(\d+) ", " ".join((main.epilog or "").split()))}
    assert listed == raised | {0, 130}
    assert listed == helped


def test_messages_are_those_of_the_program() -> None:
    """The words in backquotes that begin a row are in a message, unless they are of another program."""
    rows = re.findall(r"^\| (`.*?) \| ", section("Messages that need action"), re.MULTILINE)
    assert len(rows) > 15
    texts = "\n".join(
        node.value
        for file in sorted((ROOT / "wdsfs").rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    for row in rows:
        for words in re.findall(r"`([^`]+)`", row.partition(" (")[0]):
            known = all(part in texts for part in re.split(r"\b[A-Z]{3,}\b(?=$|[^_A-Z])", words))
            assert known or "(of fuse3)" in row, words
