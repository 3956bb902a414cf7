"""Writes docs/reference/commands.md and commands-make.md from the help texts, so that each option has one text.

python .ci/commands.py           writes the pages
python .ci/commands.py --check   ends with 1 if it would change a page
"""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from wdsfs.cli.main import GROUPS, main

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference"
MAIN_PAGE, OTHER_PAGE = "commands.md", "commands-make.md"
OF_OTHER_PAGE = ("Make something of them", "Prepare")  # groups of `wdsfs --help`
HEADS = {
    MAIN_PAGE: f"""# Commands and options

`.ci/commands.py` writes this page from `wdsfs COMMAND --help-all`. The commands that make shards, images, tables \
and indexes have [their own page]({OTHER_PAGE}). Every command has `-h`, `--help`. \
[Options of several commands](#options-of-several-commands) are explained once, at the end. A wheel contains \
all of this as a manual page (`man wdsfs`). The [exit codes](messages.md#exit-codes) are the same for all commands.
""",
    OTHER_PAGE: f"""# Commands that make or prepare sets

`.ci/commands.py` writes this page from `wdsfs COMMAND --help-all`. [Options of several commands]\
({MAIN_PAGE}#options-of-several-commands) are explained once, on the page of the [other commands]({MAIN_PAGE}).
""",
}
SHARED = 2  # commands with an option in the same words, from which on it is explained once
KEEP_LINES = "\b"  # click's mark of a paragraph whose lines are not filled

Explained = tuple[str, str]  # the names of an option, with what it takes; its help


def pages() -> dict[Path, str]:
    """Return the text of each page."""
    top = click.Context(main, info_name="wdsfs", **main.context_settings)
    commands = {name: main.get_command(top, name) for name in main.list_commands(top)}
    shown = {name: command for name, command in commands.items() if command is not None and not command.hidden}
    options = {name: list(_options(command, top, name)) for name, command in shown.items()}
    others = {name for group in OF_OTHER_PAGE for name in GROUPS[group]}
    every = [explained for explanations in options.values() for explained in explanations]
    # Of several wordings the rarest comes first, so that the most frequent one stays.
    by_name = {_first_name(explained): explained for explained in sorted(every, key=every.count)}
    shared = [explained for _, explained in sorted(by_name.items()) if every.count(explained) >= SHARED]
    lines = {page: [head] for page, head in HEADS.items()}
    for name, command in shown.items():
        page = OTHER_PAGE if name in others else MAIN_PAGE
        lines[page] += _section(name, command, top, options[name], shared)
    lines[MAIN_PAGE] += ["## Options of several commands", "", *_points(shared), ""]
    return {REFERENCE / page: "\n".join(text).rstrip("\n") + "\n" for page, text in lines.items()}


def _options(command: click.Command, top: click.Context, name: str) -> Iterator[Explained]:
    context = click.Context(command, info_name=name, parent=top)
    for param in command.params:
        record = param.get_help_record(context) if isinstance(param, click.Option) else None
        if record is not None:
            yield record[0], " ".join(record[1].split())


def _section(
    name: str, command: click.Command, top: click.Context, options: list[Explained], shared: list[Explained]
) -> Iterator[str]:
    context = click.Context(command, info_name=name, parent=top)
    usage = f"`wdsfs {name} {' '.join(command.collect_usage_pieces(context))}`"
    yield from (f"## {name}", "")
    yield from _paragraphs(f"{usage}: {inspect.cleandoc(command.help or '')}")
    own = [explained for explained in options if explained not in shared]
    if own:
        yield from (*_points(own), "")
    others = sorted((explained for explained in options if explained in shared), key=_first_name)
    if others:
        names = ", ".join(f"`{_first_name(explained)}`" for explained in others)
        yield from (f"Also: {names}.", "")


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the text in one line, and what has click's mark, examples, as a block that keeps its lines."""
    paragraphs = [paragraph.split("\n") for paragraph in re.split(r"\n\s*\n", text)]
    said = [line.strip() for lines in paragraphs if lines[0].strip(" ") != KEEP_LINES for line in lines]
    yield from (_plain(" ".join(said)), "")
    for head, *rest in paragraphs:
        if head.strip(" ") != KEEP_LINES:
            continue
        block: list[str] = []
        for line in rest:
            if line.startswith("  "):
                block.append("  " + line)
            elif not re.fullmatch("Examples?:", line):  # words between the examples
                yield from (*block, *[""] * bool(block), line, "")
                block = []
        yield from (*block, "")


def _points(options: list[Explained]) -> Iterator[str]:
    for names, explanation in options:
        yield f"- `{names}`: {_plain(explanation)}"


def _plain(text: str) -> str:
    """Return text in which underscores and angle brackets stay what they are."""
    return "".join(
        part if at % 2 else part.replace("__", r"\_\_").replace("<", "&lt;")
        for at, part in enumerate(re.split("(`[^`]*`)", text))
    )


def _first_name(explained: Explained) -> str:
    """Return the long name of an option, or its only one."""
    words = [word.rstrip(",") for word in explained[0].split()]
    return next((word for word in words if word.startswith("--")), words[0])


if __name__ == "__main__":
    for path, text in pages().items():
        if "--check" not in sys.argv:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.exit(f"{path} is not up to date: python .ci/commands.py")
