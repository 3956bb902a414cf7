"""The manner of docstrings, comments, messages and pages: no sentence that has to be read twice, no empty name.

`python -m tests.test_words FILE...` prints the sentences to mend of these files, or of all.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "wdsfs").rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("wdsfs/**/*.md")])
GENERATED = {*ROOT.glob("docs/reference/commands*.md")}  # its sentences are those of the options
WORDS_MAX = 30  # of a sentence, without those in parentheses and from a colon on

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
BEGINNING = re.compile(
    r"(?:What|Which|Who|How|Why|Where|When|If|Raises|Have \S+ be|From|After|Before|Its?|They|This|That|These|Those"
    r"|There|Up|About|In|Of|At|By|For|To|With|Without|As|Like|Not|And|But|Or)(?= |$)"
)
NAMES = {"one", "found", "wanted", "told", "kept", "asked", "looked"}

# A clause without a noun before it. "What" may also begin a question within a sentence ("says what is left"), or
# have its own subject ("what a mount shows").
_VERB = (
    r"(?:is|was|are|were|has|have|had|can|cannot|may|must|would|will|could|came|lies|"
    r"(?:add|answer|appl|arrive|become|belong|change|come|compare|concern|copie|count|decide|distinguishe|exceed|fail"
    r"|goe|help|hold|implie|keep|list|look|make|need|open|passe|prevent|protect|read|remain|run|separate|show|speak"
    r"|start|stay|take|use|wait|work|write)s)"
)
_ASKS = (
    r"(?:say|show|know|tell|decide|explain|see|learn|ask|describe|report|print|depend on|find out|about)"
    r"(?:s|n|d|ed|ing)?(?: (?:you|it|them|only|also|a program|the user))?"
)
_FRONT = r"(?:^|[;:(]\s*|\b(?:and|but|or|for|by|to|than|of|from|with|as|if)\s+)"
CLAUSES = {
    "those that": re.compile(r"\b(?:(?:those|that|this|all) (?:who|which)|those (?:that|whose))\b", re.IGNORECASE),
    "who": re.compile(rf"{_FRONT}who (?:{_VERB}|\w+s)\b(?!.*\?)", re.IGNORECASE),
    "which": re.compile(rf"^which {_VERB}\b(?!.*\?)|^which\b.*[^?]\Z(?<=\.)", re.IGNORECASE),
    "what": re.compile(rf"\bwhat {_VERB}\b(?!.*\?)", re.IGNORECASE),
    "; it": re.compile(r"; (?:it|they|this|that|these|those|its|their|them|he|she)\b"),
}
QUESTION = re.compile(rf"\b{_ASKS} what\b|\bwhat is (?:left|new|missing)\b|\bwhat works where\b", re.IGNORECASE)
# Sentences that may stay, each with its reason.
ALLOWED = {
    "who is trusted": "the question that docs/explanation/trust.md answers",
    "ho may see": "the question that docs/how-to/users.md answers",
}

# What ends a sentence: an empty line, an item or row, a mark before a capital, the next cell.
END = re.compile(
    r"\n[ \t]*\n|\n(?=[ \t]*(?:[-*#|>]|\d+\.|\[\^) ?)|(?<=[.!?])[\"')*`]*\s+(?=[A-Z`\"'(*\[])| \| ?|\s*\|\n"
    r"|(?:\A|(?<=\n))[^\n]*\S {3,}\S[^\n]*(?:\Z|\n)"
)
SKIPPED = re.compile(  # code, comments and footnotes of pages; examples in docstrings; addresses of links
    r"^ *```.*?^ *```$|<!--.*?-->|^\[\^[^\n]*$"
    r"|(?:(?<=\n\n)|\A)(?: {4}[^\n]*(?:\n|\Z)|\n(?= {4}))+|(?<=\])\([^)]*\)",
    re.MULTILINE | re.DOTALL,
)
EXAMPLE = re.compile(r"(?<=::\n)(?:\n|[ \t]+\S.*\n?)+|\x08\n(?:.*\S.*\n?)+")


class Text(NamedTuple):
    """A docstring, comment, message or page, and the line where it begins."""

    line: int
    words: str


def riddles(text: str) -> list[str]:
    """Return the phrases of a module or page that readers stopped at, each with what is around it."""
    text = re.sub(r'"\s+f?"|\n\s*#', " ", text)  # a message, or a comment, of several lines
    text = PLAIN.sub(lambda plain: "-" * len(plain[0]), " ".join(text.split()))
    return [text[max(0, match.start() - 60) : match.end() + 60] for match in RIDDLE.finditer(text)]


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and ast.get_docstring(node):
                yield first.value


def comments(source: str) -> Iterator[Text]:
    """Yield the comments; lines of comment below each other are one."""
    end = (0, 0)
    lines: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"#(?:[!:]| (?:noqa|type:|pragma|fmt:))", token.string):
            continue
        row, column = token.start
        if (lines and (row - 1, column) != end) or token.line[:column].strip():
            if lines:
                yield Text(end[0] - len(lines) + 1, "\n".join(lines))
            lines = []
        lines.append(re.sub(r" ?-{5,}$|^ -{3} ", "", token.string[1:]))
        end = row, column
    if lines:
        yield Text(end[0] - len(lines) + 1, "\n".join(lines))


def messages(tree: ast.Module, spaces: int = 3) -> Iterator[Text]:
    """Yield the texts with so many spaces or more; "X" stands for each value in one."""
    inner = {id(node) for node in docstrings(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inner |= {id(value) for value in node.values}
            words = "".join(str(value.value) if isinstance(value, ast.Constant) else "X" for value in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            words = node.value
        else:
            continue
        if words.count(" ") >= spaces:
            yield Text(node.lineno, words)


def blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def texts(file: Path) -> Iterator[Text]:
    source = file.read_text()
    if file.suffix == ".md":
        yield Text(1, SKIPPED.sub(blank, source))
        return
    tree = ast.parse(source)
    for node in docstrings(tree):
        yield Text(node.lineno, EXAMPLE.sub(blank, str(node.value)))
    yield from comments(source)
    yield from messages(tree)


def sentences(text: Text) -> Iterator[Text]:
    """Yield the sentences of a text, each in one line, with "C" for a word of code."""
    words = re.sub(r"`+[^`]+`+", lambda code: "C" + blank(code), text.words)
    begin = 0
    for end in [match.span() for match in END.finditer(words)] + [(len(words), len(words))]:
        sentence = words[begin : end[0]]
        before = begin + len(sentence) - len(sentence.lstrip())
        if sentence.strip():
            yield Text(text.line + words.count("\n", 0, before), " ".join(sentence.split()))
        begin = end[1]


def faults(sentence: str) -> Iterator[str]:
    for part in re.sub(r"\([^()]*\)", "", sentence).split(": "):
        if (length := len([word for word in part.split() if re.search(r"\w", word)])) > WORDS_MAX:
            yield f"{length} words"
    asked = QUESTION.sub(lambda match: "-" * len(match[0]), sentence)
    yield from (name for name, clause in CLAUSES.items() if clause.search(asked))


def findings(file: Path) -> Iterator[str]:
    """Yield what has to be read twice in a module or page, as `FILE:LINE: FAULT: SENTENCE`."""
    name = file.relative_to(ROOT)
    for text in texts(file):
        for line, sentence in sentences(text):
            if not any(phrase in sentence for phrase in ALLOWED):
                yield from (f"{name}:{line}: {fault}: {sentence}" for fault in faults(sentence))


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


@pytest.mark.parametrize(
    ("sentence", "fault"),
    [
        (" ".join(["word"] * 31) + ".", "31 words"),
        ("Return the shards, without those that are gone.", "those that"),
        ("But who maps a large file waits.", "who"),
        ("Which samples these are follows from a hash.", "which"),
        ("What was not used for the longest time goes.", "what"),
        ("The index is damaged; it is rebuilt.", "; it"),
        (" ".join(["word"] * 16) + ": " + " ".join(["word"] * 16), None),
        ("The users who may read it.", None),
        ("It says what is left, what a mount shows, and what to do.", None),
        ("Which samples are these?", None),
    ],
)
def test_a_sentence_that_is_read_twice_is_seen(sentence: str, fault: str | None) -> None:
    assert list(faults(sentence)) == ([fault] if fault else [])


def test_sentences_are_read_once() -> None:
    seen = [finding for file in [*MODULES, *PAGES] if file not in GENERATED for finding in findings(file)]
    assert not seen, "\n".join(["say in other words:", *seen])


def test_docstrings_begin_with_a_verb_or_noun() -> None:
    seen = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {str(node.value)[:80]}"
        for file in MODULES
        for node in docstrings(ast.parse(file.read_text()))
        if BEGINNING.match(str(node.value))
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


def main() -> None:
    files = [Path(name).resolve() for name in sys.argv[1:]] or [*MODULES, *PAGES]
    seen = [finding for file in files if file not in GENERATED for finding in findings(file)]
    print(*seen, f"{len(seen)} sentences to mend", sep="\n")


if __name__ == "__main__":
    main()
