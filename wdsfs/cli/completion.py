"""Shell completion (TAB) for bash, zsh and fish: commands, options, mount points and paths.

Built on click's completion, whose scripts run the program with the words of the line. Nothing here asks a daemon,
a mount or the network: mount points are those of the registry and of the kernel's table, and paths are completed
by the shell itself.
"""

from __future__ import annotations

import os
import re

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
    get_completion_class,
)

SHELLS = ("bash", "zsh", "fish")

_PATH, _DIRECTORY = "file", "dir"  # of items: the shell completes what is typed
_UNSAFE = re.compile(r"([^\w@%+=:,./~-])")
_NOT_LOCAL = re.compile(r"^[a-z][a-z0-9+.-]*://|^pipe:")


@add_completion_class
class QuotingBash(BashComplete):
    """Completion for bash, which inserts texts unquoted and takes the `=` of `--layout=files` for a word."""

    name = "bash"
    # A text may have backslashes and wildcards, which are for the line and not for the script.
    source_template = BashComplete.source_template.replace("read type", "read -r type").replace(
        "+=($value)", '+=("$value")'
    )

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the cursor, and the one that it is in."""
        words, incomplete = super().get_completion_args()
        if words and words[-1] == "=" and incomplete != "=":
            return words[:-1], incomplete
        return (words, "") if incomplete == "=" else (words, incomplete)

    def format_completion(self, item: CompletionItem) -> str:
        """Return a line for the script.

        The type of the item, and its text, so that it is one word whatever is in it.
        """
        text: str = item.value
        if item.type == "plain":
            # A tilde stays one; the mount point of a stranger may have any name.
            text = _UNSAFE.sub(r"\\\1", text)
        return f"{item.type},{text}"


class _WholeWords(ShellComplete):
    """Completion for shells that replace whole words: the value in `--layout=files` comes with its option."""

    _before = ""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the cursor, and the one that it is in."""
        words, incomplete = super().get_completion_args()
        name, equals, _ = incomplete.partition("=")
        self._before = name + equals if equals and name.startswith("--") else ""
        return words, incomplete

    def format_completion(self, item: CompletionItem) -> str:
        """Return the text of an item for the script."""
        value = self._before + os.path.expanduser(item.value) if item.type == "plain" else item.value
        return super().format_completion(CompletionItem(value, item.type, item.help))


@add_completion_class
class WholeWordsZsh(_WholeWords, ZshComplete):
    """Completion for zsh, also from the second call on, when an autoloaded function has become its body."""

    name = "zsh"
    source_template = ZshComplete.source_template.replace("== loadautofunc", "== (loadautofunc|shfunc)")


@add_completion_class
class WholeWordsFish(_WholeWords, FishComplete):
    """Completion for fish. Paths and descriptions may have commas."""

    name = "fish"
    source_template = FishComplete.source_template.replace('string split ","', 'string split --max 1 ","')


def script(shell: str) -> str:
    """Return the code with which a shell completes `wdsfs`."""
    complete = get_completion_class(shell)
    assert complete is not None
    completer = complete(click.Command("wdsfs"), {}, "wdsfs", "_WDSFS_COMPLETE")
    # Not `completer.source()`: it looks at the bash of this machine, and the script may be for another one.
    return ShellComplete.source(completer)


def paths(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return files and directories, also after an `@` (`@list.txt`); no URLs, which would take requests."""
    if _NOT_LOCAL.match(incomplete):
        return []
    if incomplete.startswith("@"):
        return [CompletionItem(f"@{path}") for path in _files(incomplete[1:])]
    return [CompletionItem(incomplete, type=_PATH)]


def directories(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return directories."""
    return [] if _NOT_LOCAL.match(incomplete) else [CompletionItem(incomplete, type=_DIRECTORY)]


def mount_points(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the mounts of this user, dead ones included; directories if none begins like that."""
    offers = [CompletionItem(text) for path in _mounts() if (text := _as_typed(path, incomplete)) is not None]
    return offers or directories(ctx, param, incomplete)


def mount_points_or_paths(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the mounts of this user as long as nothing is typed, then paths."""
    return paths(ctx, param, incomplete) if incomplete else mount_points(ctx, param, incomplete)


def commands(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the commands of the program."""
    above = ctx.find_root().command
    assert isinstance(above, click.Group)
    return [CompletionItem(name) for name in above.list_commands(ctx) if name.startswith(incomplete)]


def _mounts() -> list[str]:
    from wdsfs import mount_table
    from wdsfs.mount_registry import Registration, registrations

    points = {registration.mountpoint for registration in registrations(Registration)}
    for mount in mount_table.mounts():
        if mount.fstype == "fuse.wdsfs" and os.geteuid() in (0, mount.user):
            points.add(os.fsdecode(mount.path))
    return sorted(path for path in points if path.isprintable())


def _as_typed(path: str, incomplete: str) -> str | None:
    """Return a mount point in the form that is typed, which may be relative or begin with a tilde.

    None for others.
    """
    if path.startswith(incomplete):
        return path
    try:
        above, begun = os.path.split(incomplete)
        full = os.path.join(os.path.abspath(os.path.expanduser(above)), begun)
    except OSError:  # the working directory is gone
        return None
    return incomplete + path[len(full) :] if path.startswith(full) else None


def _files(begun: str) -> list[str]:
    above, name = os.path.split(begun)
    try:
        with os.scandir(os.path.expanduser(above) or ".") as entries:
            # By what the listing says of them: no file is asked for.
            files = [entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return sorted(os.path.join(above, file) for file in files if file.startswith(name) and file.isprintable())
