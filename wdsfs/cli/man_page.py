"""The manual page wdsfs(1), made of what `--help` says: of the program, and of each command.

Not by click-man: it makes a page for each command, fills the lines of examples, and leaves backslashes and dots at
the beginning of a line to roff.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click

_MEANT_AS_IT_IS = "\b"  # click's mark of a paragraph whose lines are kept


def manual(main: click.Group, version: str) -> str:
    """The page, in roff for `man`. No date: the same program always gives the same page."""
    top = click.Context(main, info_name="wdsfs", **main.context_settings)
    summary, _, description = inspect.cleandoc(main.help or "").partition("\n\n")
    lines = [
        f'.TH WDSFS 1 "" "wdsfs {_escaped(version)}" "User Commands"',
        *(".SH NAME", f"wdsfs \\- {_text(_sentence(summary))}"),
        *(".SH SYNOPSIS", ".B wdsfs", _text(" ".join(main.collect_usage_pieces(top)))),
        *(".SH DESCRIPTION", *_paragraphs(description)),
        *(".SH OPTIONS", *_options(main, top)),
        ".SH COMMANDS",
    ]
    for name in main.list_commands(top):
        command = main.get_command(top, name)
        if command is not None and not command.hidden:
            lines += _command(command, click.Context(command, info_name=name, parent=top))
    epilog = inspect.cleandoc(main.epilog or "").replace(_MEANT_AS_IT_IS + "\n", "")
    if epilog:
        lines += [".SH EXIT STATUS", *_paragraphs(epilog.removeprefix("Exit codes: "))]
    variables = sorted(set(_variables(main, top)))
    if variables:
        lines += [".SH ENVIRONMENT", "Defaults of the options of these names:", _text(", ".join(variables)) + "."]
    return "\n".join([*lines, ""])


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f".SS wdsfs {_escaped(str(context.info_name))}"
    yield ".B wdsfs " + _escaped(str(context.info_name))
    yield _text(" ".join(command.collect_usage_pieces(context)))
    yield ".PP"
    yield from _paragraphs(inspect.cleandoc(command.help or ""))
    yield from _options(command, context)


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    for param in command.get_params(context):
        record = param.get_help_record(context) if isinstance(param, click.Option) else None
        if record is not None and not (context.parent and param is command.get_help_option(context)):
            yield ".TP"
            yield f"\\fB{_escaped(record[0])}\\fR"
            yield _text(" ".join(record[1].split()))


def _paragraphs(text: str) -> Iterator[str]:
    """Paragraphs, of which those after click's mark keep their lines."""
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.split("\n")
        yield ".PP"
        if lines[0].strip(" ") == _MEANT_AS_IT_IS:
            yield from (".nf", *(_text(line) for line in lines[1:]), ".fi")
        else:
            yield _text(" ".join(line.strip() for line in lines))


def _variables(main: click.Group, top: click.Context) -> Iterator[str]:
    for name in main.list_commands(top):
        command = main.get_command(top, name)
        for param in [] if command is None else command.params:
            if isinstance(param.envvar, str):
                yield param.envvar


def _sentence(text: str) -> str:
    return " ".join(text.split()).rstrip(".")


def _text(line: str) -> str:
    """A line of text: one that begins with a dot or an apostrophe is no request."""
    shown = _escaped(line)
    return "\\&" + shown if shown.lstrip(" ").startswith((".", "'")) else shown


def _escaped(text: str) -> str:
    """Text in roff: backslashes and dashes stand for themselves, so that what is copied from the page works."""
    found = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\(ga").replace("'", "\\(aq")
    return found.replace("~", "\\(ti").replace("^", "\\(ha")
