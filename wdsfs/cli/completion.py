"""Shell completion (TAB) for bash, zsh and fish: commands, options, mount points and paths.

The scripts are click's: they run the program with the words of the line. Nothing here asks a daemon, a mount or
the network: mount points are those of the registry and of the kernel's table. The shell itself completes paths.
"""

from __future__ import annotations

import os
import re

import click
from click.shell_completion import CompletionItem, ShellComplete, get_completion_class

SHELLS = ("bash", "zsh", "fish")

_PATH, _DIRECTORY = "file", "dir"  # of items: the shell completes what is typed
_NOT_LOCAL = re.compile(r"^[a-z][a-z0-9+.-]*://|^pipe:")
# A text that a shell takes for one word. bash inserts texts as they are, and others may have named a mount point.
_ONE_WORD = re.compile(r"[\w@%+=:,./-]+")


def script(shell: str) -> str:
    """Return the code with which a shell completes `wdsfs`."""
    complete = get_completion_class(shell)
    assert complete is not None
    completer = complete(click.Command("wdsfs"), {}, "wdsfs", "_WDSFS_COMPLETE")
    # Not `completer.source()`: it looks at the bash of this machine, and the script may be for another one.
    text = ShellComplete.source(completer)
    # An autoloaded function of zsh runs as "loadautofunc" once, and then as "shfunc".
    return text.replace("== loadautofunc", "== (loadautofunc|shfunc)")


def paths(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return files and directories; no URLs, which would take requests."""
    return [] if _NOT_LOCAL.match(incomplete) else [CompletionItem(incomplete, type=_PATH)]


def directories(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return directories."""
    return [] if _NOT_LOCAL.match(incomplete) else [CompletionItem(incomplete, type=_DIRECTORY)]


def mount_points(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the mounts of this user, dead ones included; directories if none begins like that."""
    offers = [CompletionItem(path) for path in _mounts() if path.startswith(incomplete)]
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
    return sorted(filter(_ONE_WORD.fullmatch, points))
