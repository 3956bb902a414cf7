"""The commands `help`, `man`, `completion` and `doctor`.

The checks of the machine are in `mount/doctor.py` and `kernel/engine_checks.py`.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from wdsfs import __version__
from wdsfs.cli.completion import SHELLS, commands, mount_points, script
from wdsfs.cli.options import Directory, index_dir_option, json_option, set_for_all, store_option
from wdsfs.cli.output import say, write_json, write_page
from wdsfs.errors import UsageError
from wdsfs.host import MachineFinding
from wdsfs.names import meant

LAYOUTS = "layouts"  # a topic: its page is for users who have the program and no checkout

_LINKS_INSIDE = re.compile(r"\[([^]]*)\]\(#[^)]*\)")  # of a page of Markdown: a terminal does not follow them
_KEEP_LINES = "\b"  # click's mark of a paragraph whose lines are not filled


@click.command("help")
@click.argument("command", metavar="[COMMAND|TOPIC]", required=False, shell_complete=commands)
@click.pass_context
def help_command(ctx: click.Context, command: str | None) -> None:
    """Explain COMMAND, or the program: the same as --help; or show the page about TOPIC.

    The topic `layouts` is: which layout for which loader.

    \b
    Examples:
      wdsfs help mount
      wdsfs help layouts
    """
    above = ctx.find_root()
    group = above.command
    assert isinstance(group, click.Group)
    if command is None:
        write_page(above.get_help())
        return
    if command == LAYOUTS:
        _show_page(Path(__file__).with_name("layouts.md").read_text(encoding="utf-8"))
        return
    explained = group.get_command(above, command)
    if explained is None:
        names = group.list_commands(above)
        raise UsageError(
            f"there is no command {command!r}{meant(command, [*names, LAYOUTS])}; there are: {', '.join(names)}; "
            f"and the topic {LAYOUTS}"
        )
    with click.Context(explained, parent=above, info_name=command) as context:
        write_page(explained.get_help(context))


def _show_page(text: str) -> None:
    """Show a page of Markdown, on a terminal by a pager."""
    if sys.stdout is None or not sys.stdout.isatty():
        write_page(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    with console.capture() as capture:
        console.print(Markdown(_LINKS_INSIDE.sub(r"\1", text), hyperlinks=False))
    click.echo_via_pager(capture.get())


@click.command()
@click.argument("shell", type=click.Choice(SHELLS), required=False)
def completion(shell: str | None) -> None:
    """Print what makes SHELL complete commands, options, paths and mount points of wdsfs.  [default: $SHELL]

    Completing never asks a daemon, a mount or the network.

    \b
    Examples:
      wdsfs completion bash > ~/.local/share/bash-completion/completions/wdsfs
      wdsfs completion zsh > ~/.zfunc/_wdsfs      # ~/.zshrc: fpath+=~/.zfunc; autoload -U compinit; compinit
      wdsfs completion fish > ~/.config/fish/completions/wdsfs.fish
    For all users:
      wdsfs completion bash > /usr/share/bash-completion/completions/wdsfs
      wdsfs completion zsh > /usr/local/share/zsh/site-functions/_wdsfs
      wdsfs completion fish > /usr/share/fish/vendor_completions.d/wdsfs.fish
    Only in this shell (bash, zsh; fish takes `| source`):
      eval "$(wdsfs completion bash)"
    """
    shell = shell or os.path.basename(os.environ.get("SHELL", ""))
    if shell not in SHELLS:
        raise UsageError(f"name the shell: {', '.join(SHELLS)}")
    write_page(script(shell))
    if sys.stdout.isatty():
        say("wdsfs: to use it, write it to a file: wdsfs completion --help says where", err=True)


@click.command()
@click.argument("place", metavar="[MOUNTPOINT|URL]", required=False, shell_complete=mount_points)
@index_dir_option("Check this directory for the index.  [env WDSFS_INDEX_DIR]")
@click.option(
    "--shards",
    "shards_dir",
    type=Directory(),
    help="Check if shards in this directory can be guarded when the kernel serves them (mount --engine kernel).",
)
@store_option
@json_option
def doctor(place: str | None, shards_dir: str | None, as_json: bool) -> None:
    """Check if this machine can mount, or read shards from a URL, and say what to type if not.

    \b
    Examples:
      wdsfs doctor /mnt/train
      wdsfs doctor --shards /data/train
      wdsfs doctor s3://bucket/train-000000.tar
    """
    from wdsfs.mount.doctor import STORE_SECONDS, diagnose_engines, diagnose_store
    from wdsfs.remote.urls import is_url

    if place is not None and is_url(place):
        given = os.environ.get("WDSFS_STORE_OPTIONS", "")
        set_for_all("WDSFS_STORE_OPTIONS", f"total_time={STORE_SECONDS} {given}")
        _show(diagnose_store(place), as_json, code=3)
    else:
        _show(diagnose_engines(place, shards_dir), as_json, code=5)


def _show(findings: Sequence[MachineFinding], as_json: bool, code: int) -> None:
    """Print the findings; end with this exit code if one of them is a failure."""
    if as_json:
        write_json([finding._asdict() for finding in findings])
    else:
        for finding in findings:
            click.secho(
                f"{finding.level:<5}",
                nl=False,
                fg={"ok": "green", "warn": "yellow", "fail": "red"}[finding.level],
            )
            say(f"{finding.name}: {finding.detail}")
            if finding.remedy:
                say(f"      -> {finding.remedy}")
    sys.exit(code if any(finding.level == "fail" for finding in findings) else 0)


# --- the manual page -----------------------------------------------------------------------------------------
#
# Not by click-man: it makes a page for each command, fills the lines of examples, and leaves backslashes and dots
# at the beginning of a line to roff.


@click.command()
@click.pass_context
def man(ctx: click.Context) -> None:
    """Show the manual page, all that --help says; if the output is no terminal, print it for `man` to read.

    \b
    Examples:
      wdsfs man
      wdsfs man > ~/.local/share/man/man1/wdsfs.1
    """
    above = ctx.find_root().command
    assert isinstance(above, click.Group)
    page = manual(above, __version__)
    program = shutil.which("man") if sys.stdout.isatty() else None
    if program is None:
        write_page(page)
        return
    sys.exit(subprocess.run([program, "--local-file", "-"], input=page.encode(), check=False).returncode)


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
    for param in command.get_params(context):
        record = param.get_help_record(context) if isinstance(param, click.Option) else None
        if record is not None and not (context.parent and param is command.get_help_option(context)):
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
