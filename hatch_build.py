"""Makes the manual page and the completions of shells from the program itself when a wheel is built.

As a program: writes the manual page, all that `--help-all` says, to standard output.
"""

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SHARED = {
    "share/man/man1/wdsfs.1": (__file__,),
    "share/bash-completion/completions/wdsfs": ("-m", "wdsfs", "completion", "bash"),
    "share/zsh/site-functions/_wdsfs": ("-m", "wdsfs", "completion", "zsh"),
    "share/fish/vendor_completions.d/wdsfs.fish": ("-m", "wdsfs", "completion", "fish"),
}


class SharedFiles(BuildHookInterface):
    """Adds these files to the wheel, which installs them below the prefix of the environment."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        for name, words in SHARED.items():
            file = Path(self.root, "build", name)
            file.parent.mkdir(parents=True, exist_ok=True)
            # In front of what is there: pip's isolated builds find their packages by this variable.
            path = os.pathsep.join(filter(None, (self.root, os.environ.get("PYTHONPATH"))))
            environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
            file.write_bytes(
                subprocess.run([sys.executable, *words], env=environment, capture_output=True, check=True).stdout
            )
            build_data["shared_data"][str(file)] = name


# --- the manual page
#
# Not by click-man: it makes a page for each command, fills the lines of examples, and leaves backslashes and dots
# at the beginning of a line to roff.

_KEEP_LINES = "\b"  # click's mark of a paragraph whose lines are not filled


def manual(main: click.Group, version: str) -> str:
    """Return the page, in roff for `man`; without a date, so that the same program gives the same page."""
    top = click.Context(main, info_name="wdsfs", **main.context_settings)
    summary, _, description = inspect.cleandoc(main.help or "").partition("\n\n")
    lines = [
        f'.TH WDSFS 1 "" "wdsfs {_roff_escaped(version)}" "User Commands"',
        *(".SH NAME", f"wdsfs \\- {_roff_text(' '.join(summary.split()).rstrip('.'))}"),
        *(".SH SYNOPSIS", ".B wdsfs", _roff_text(" ".join(main.collect_usage_pieces(top)))),
        *(".SH DESCRIPTION", *_roff_paragraphs(description)),
        *(".SH OPTIONS", *_manual_options(main, top)),
        ".SH COMMANDS",
    ]
    for name in main.list_commands(top):
        command = main.get_command(top, name)
        if command is not None and not command.hidden:
            lines += _manual_of(command, click.Context(command, info_name=name, parent=top))
    epilog = inspect.cleandoc(main.epilog or "").replace(_KEEP_LINES + "\n", "")
    if epilog:
        lines += [".SH EXIT STATUS", *_roff_paragraphs(epilog.removeprefix("Exit codes: "))]
    variables = sorted(set(_variables(main, top)))
    if variables:
        lines += [
            ".SH ENVIRONMENT",
            "Defaults of the options of these names:",
            _roff_text(", ".join(variables)) + ".",
        ]
    return "\n".join([*lines, ""])


def _manual_of(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f".SS wdsfs {_roff_escaped(str(context.info_name))}"
    yield ".B wdsfs " + _roff_escaped(str(context.info_name))
    yield _roff_text(" ".join(command.collect_usage_pieces(context)))
    yield ".PP"
    yield from _roff_paragraphs(inspect.cleandoc(command.help or ""))
    yield from _manual_options(command, context)


def _manual_options(command: click.Command, context: click.Context) -> Iterator[str]:
    for param in command.params if context.parent else command.get_params(context):
        record = param.get_help_record(context) if isinstance(param, click.Option) else None
        if record is not None:
            yield ".TP"
            yield f"\\fB{_roff_escaped(record[0])}\\fR"
            yield _roff_text(" ".join(record[1].split()))


def _roff_paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a help text; one with click's mark keeps its lines."""
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.split("\n")
        yield ".PP"
        if lines[0].strip(" ") == _KEEP_LINES:
            yield from (".nf", *(_roff_text(line) for line in lines[1:]), ".fi")
        else:
            yield _roff_text(" ".join(line.strip() for line in lines))


def _variables(main: click.Group, top: click.Context) -> Iterator[str]:
    for name in main.list_commands(top):
        command = main.get_command(top, name)
        for param in [] if command is None else command.params:
            if isinstance(param.envvar, str):
                yield param.envvar


def _roff_text(line: str) -> str:
    """Return a line of text in roff; one that begins with a dot or an apostrophe is no request."""
    line = _roff_escaped(line)
    return "\\&" + line if line.lstrip(" ").startswith((".", "'")) else line


def _roff_escaped(text: str) -> str:
    """Return text in roff whose backslashes, dashes and quotes can be copied from the page."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\(ga").replace("'", "\\(aq")
    return escaped.replace("~", "\\(ti").replace("^", "\\(ha")


if __name__ == "__main__":
    from wdsfs import __version__
    from wdsfs.cli import main as program

    print(manual(program.main, __version__), end="")
