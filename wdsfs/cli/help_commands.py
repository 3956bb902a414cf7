"""The commands `help`, `completion` and `doctor`.

The checks of the machine are in `mount/doctor.py` and `kernel/engine.py`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem, ShellComplete, get_completion_class

from wdsfs.cli.opening_options import index_dir_option, set_for_all, store_option
from wdsfs.cli.option_kinds import Command, json_option, offer_mounts
from wdsfs.cli.output import on_terminal, say, show_page, write_json, write_page
from wdsfs.errors import UsageError
from wdsfs.host import MachineFinding
from wdsfs.names import closest
from wdsfs.shared_settings import setting

LAYOUTS = "layouts"  # a topic: its page is for users without a checkout

_LINKS_INSIDE = re.compile(r"\[([^]]*)\]\(#[^)]*\)")  # of a page of Markdown: a terminal does not follow them


# The commands for each task, with their effect.
TASKS: dict[str, tuple[tuple[str, str], ...]] = {
    "Look at a set": (
        ("wdsfs mount SHARDS DIR", "Show samples as directories."),
        ("wdsfs umount DIR", "End the mount."),
        ("wdsfs info SHARDS", "Count samples; sizes of columns."),
        ("wdsfs ls SHARDS [PATH]", "List files; `cat` shows one."),
        ("wdsfs view SHARDS", "See samples in the browser."),
    ),
    "Choose samples by their labels, captions, sizes": (
        ("wdsfs table SHARDS -o set.parquet", "A row a sample, for DuckDB, pandas."),
        ("wdsfs mount --keys LIST SHARDS DIR", "Show only the samples of a list."),
    ),
    "Train from it": (
        ("wdsfs help layouts", "Show the layout for each loader."),
        ("wdsfs export -o DIR ...", "Write the index of NVIDIA DALI."),
    ),
    "Change samples: edit, add, delete, correct a label": (
        ("wdsfs mount --overlay EDITS SHARDS DIR", "Mount for changes by any program."),
        ("wdsfs diff DIR", "Show the changes."),
        ("wdsfs restore DIR/PATH", "Undo changes."),
        ("wdsfs commit DIR -o 'new/%06d.tar'", "Write new shards with the changes."),
    ),
    "Make shards": (
        ("wdsfs pack FOLDER -o 'set-%06d.tar'", "From files; --shuffle, --split."),
        ("wdsfs pack --table CSV FOLDER -o ...", "With the columns of a table."),
        ("wdsfs pack --keys LIST SHARDS -o ...", "From chosen samples of shards."),
        ("wdsfs pack --columns jpg SHARDS -o ...", "From chosen or joined columns."),
    ),
    "Speed: a slow mount, or slow reads": (
        ("wdsfs status DIR", "See what a mount waits for."),
        ("wdsfs index SHARDS", "Index before the first mount."),
        ("wdsfs fetch SHARDS", "Download remote shards first."),
        ("wdsfs mount --engine kernel SHARDS DIR", "Without a daemon (for root)."),
    ),
    "Trouble: errors, a busy mount, a full disk": (
        ("wdsfs doctor [DIR|URL]", "Show why it fails; what to type."),
        ("wdsfs check SHARDS", "Find damage, and odd samples."),
        ("wdsfs where DIR/PATH", "Show the shard of a file."),
        ("wdsfs umount --lazy DIR", "End a mount that is in use."),
        ("wdsfs umount --all", "End all mounts, even dead ones."),
        ("wdsfs cache", "Show the cache; free disk space."),
    ),
}
_TASKS_END = """SHARDS: a pattern in quotes ('train-{000..099}.tar'), files, directories, URLs.
`wdsfs help COMMAND` explains a command; `wdsfs --help` lists all commands.
In Python, without a mount: help(wdsfs.samples), help(wdsfs.Shuffle)."""


def _offer_commands(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the commands of the program."""
    above = ctx.find_root().command
    assert isinstance(above, click.Group)
    return [CompletionItem(name) for name in above.list_commands(ctx) if name.startswith(incomplete)]


@click.command("help", cls=Command)
@click.argument("words", metavar=f"[COMMAND|{LAYOUTS}]", nargs=-1, shell_complete=_offer_commands)
@click.pass_context
def help_command(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Show the commands for each task; explain COMMAND; with `layouts`, show which layout each loader reads.

    \b
    Examples:
      wdsfs help
      wdsfs help mount
      wdsfs help layouts
    """
    above = ctx.find_root()
    group = above.command
    assert isinstance(group, click.Group)
    topic = " ".join(words)
    if not topic:
        show_page(_tasks(above) + "\n" + _TASKS_END)
        return
    if topic in (LAYOUTS, "loaders"):
        _show_markdown(Path(__file__).with_name("layouts.md").read_text(encoding="utf-8"))
        return
    explained = group.get_command(above, topic)
    if explained is None:
        names = group.list_commands(above)
        close = closest(topic, [*names, LAYOUTS])
        hint = f"Did you mean `{close}`? " if close else ""
        raise UsageError(f"there is no command {topic!r}. {hint}Commands: {', '.join(names)}")
    with explained.context_class(explained, parent=above, info_name=explained.name) as context:
        show_page(explained.get_help(context))


def _tasks(ctx: click.Context) -> str:
    """Return the tasks with their commands; the second columns are aligned."""
    formatter = ctx.make_formatter()
    width = max(len(line) for rows in TASKS.values() for line, _ in rows)
    for title, rows in TASKS.items():
        with formatter.section(title):
            formatter.write_dl([(f"{line:{width}}", text) for line, text in rows], col_max=width)
    return formatter.getvalue().lstrip("\n")


def _show_markdown(text: str) -> None:
    """Show a page of Markdown, rendered on a terminal."""
    if not on_terminal():
        write_page(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    with console.capture() as capture:
        console.print(Markdown(_LINKS_INSIDE.sub(r"\1", text), hyperlinks=False))
    show_page(capture.get())


SHELLS = ("bash", "zsh", "fish")


def script(shell: str) -> str:
    """Return click's code with which a shell completes `wdsfs`: it runs the program with the words of the line."""
    complete = get_completion_class(shell)
    assert complete is not None
    completer = complete(click.Command("wdsfs"), {}, "wdsfs", "_WDSFS_COMPLETE")
    # Not `completer.source()`: it looks at the bash of this machine, and the script may be for another one.
    text = ShellComplete.source(completer)
    # An autoloaded function of zsh runs as "loadautofunc" once, and then as "shfunc".
    return text.replace("== loadautofunc", "== (loadautofunc|shfunc)")


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(SHELLS), required=False)
def completion(shell: str | None) -> None:
    """Print the script with which SHELL completes commands, options, paths and mount points.  [default: $SHELL]

    The completion asks no daemon, no mount and no network.

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
    if on_terminal():
        say("wdsfs: to use it, write it to a file: wdsfs completion --help says where", err=True)


@click.command(cls=Command)
@click.argument("place", metavar="[MOUNTPOINT|URL]", required=False, shell_complete=offer_mounts)
@index_dir_option("Directory of the index, to be checked.  [env WDSFS_INDEX_DIR]")
@click.option(
    "--report",
    "is_report",
    is_flag=True,
    help="Print the facts for a bug report: versions, kernel, mounts; no paths, URLs or names.",
)
@store_option
@json_option
def doctor(place: str | None, is_report: bool, as_json: bool) -> None:
    """Check if this machine can mount, or read shards from a URL; if not, show the command that helps.

    \b
    Examples:
      wdsfs doctor /mnt/train
      wdsfs doctor s3://bucket/train-000000.tar
      wdsfs doctor --report
    """
    from wdsfs.door.urls import is_url
    from wdsfs.mount.doctor import STORE_SECONDS, diagnose_engines, diagnose_store, report

    if is_report:
        if place is not None:
            raise UsageError("--report is about the whole machine: name nothing else")
        _show_report(report(), as_json)
    elif place is not None and is_url(place):
        set_for_all("STORE_OPTIONS", f"total_time={STORE_SECONDS} {setting('STORE_OPTIONS')}")
        _show(diagnose_store(place), as_json, code=3)
    else:
        _show(diagnose_engines(place), as_json, code=5)


def _show_report(report: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        write_json(report)
        return
    for name, value in report.items():
        if isinstance(value, list):
            for number, mount in enumerate(value, 1):
                say(f"mount {number}: " + ", ".join(f"{field} {_plain(item)}" for field, item in mount.items()))
        else:
            say(f"{name}: {_plain(value)}")


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{name} {item}" for name, item in value.items())
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def _show(findings: Sequence[MachineFinding], as_json: bool, code: int) -> None:
    """Print the findings; end with this exit code if one of them is a failure."""
    if as_json:
        write_json([finding._asdict() for finding in findings])
    else:
        for finding in findings:
            click.secho(
                f"{finding.level:<5}", nl=False, fg={"ok": "green", "warn": "yellow", "fail": "red"}[finding.level]
            )
            say(f"{finding.name}: {finding.detail}")
            if finding.remedy:
                say(f"      -> {finding.remedy}")
    sys.exit(code if any(finding.level == "fail" for finding in findings) else 0)
