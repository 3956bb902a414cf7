"""The manner of docstrings, messages and pages: no phrase that has to be read twice, no name that says nothing."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "wdsfs").rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("wdsfs/**/*.md")])

RIDDLE = re.compile(
    r"\b(?:anew|so many|is to be|as it is|(?:\w+ )?of it|comes twice|somebody else|is there already|can be had"
    r"|(?:is|are) the most|one too many|otherwise than|what it (?:is|was) at|told to wait)\b"
)
# A part of a whole ("half of it") and a comparison ("as it is stored") can be read at once.
PLAIN = re.compile(
    r"\b(?:all|half|part|most|much|some|rest|none|inside|outside|out|front|ahead|read|used|MiB|\w+th) of it\b"
    r"|\b(?:as (?:long|far) as it is|as it is (?:shown|stored|typed|written))\b",
    re.IGNORECASE,
)
BEGINNING = re.compile(r"(?:What|Which|How|Raises|Have \S+ be)\b")
NAMES = {"one", "found", "wanted", "told", "kept", "asked", "looked"}


def riddles(text: str) -> list[str]:
    """Return the phrases of a module or page that readers stopped at, each with what is around it."""
    text = re.sub(r'"\s+f?"|\n\s*#', " ", text)  # a message, or a comment, of several lines
    text = PLAIN.sub(lambda plain: "-" * len(plain[0]), " ".join(text.split()))
    return [text[max(0, match.start() - 60) : match.end() + 60] for match in RIDDLE.finditer(text)]


def docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def names_given(tree: ast.Module) -> Iterator[str]:
    """Yield the names of values, attributes and parameters that a module gives."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr.strip("_")
        elif isinstance(node, ast.arg):
            yield node.arg


@pytest.mark.parametrize(
    "text", ["It is made anew.", "x = f(\n    f'nothing'\n)  # a copy\n# of it", 'say("so "\n    "many")']
)
def test_a_riddle_is_seen(text: str) -> None:
    assert riddles(text)


def test_texts_have_no_riddles() -> None:
    seen = [
        f"{file.relative_to(ROOT)}: {text}" for file in [*MODULES, *PAGES] for text in riddles(file.read_text())
    ]
    assert not seen, "\n".join(seen)


def test_docstrings_begin_with_a_verb_or_noun() -> None:
    seen = [
        f"{file.relative_to(ROOT)}: {text[:80]}"
        for file in MODULES
        for text in docstrings(ast.parse(file.read_text()))
        if BEGINNING.match(text)
    ]
    assert not seen, "\n".join(seen)


def test_values_are_named_by_what_they_are() -> None:
    seen = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in MODULES
        for name in names_given(ast.parse(file.read_text()))
        if name in NAMES
    ]
    assert not seen, "\n".join(seen)
