"""The command line: the group of all commands, messages, exit codes, interrupts.

The module of a command is imported when the command is given, and imports what it works with when it is called, so
that `wdsfs mount --help` is there at once.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections import deque
from typing import Any

import click

from wdsfs import __version__
from wdsfs.cli.option_kinds import Paged, flag
from wdsfs.cli.output import OUTPUT, complain, flush, say
from wdsfs.cli.process import INTERRUPTED, failure_of, hide_secrets, interruptible, prepare_streams
from wdsfs.errors import WdsfsError
from wdsfs.log_lines import TerminalFormatter
from wdsfs.names import shown

EPILOG = """\b
Exit codes: 0 done, 1 `check` or `diff` has findings (or a bug), 2 wrong arguments, 3 a shard is missing
or unreadable, 4 no index can be made, 5 the mount cannot be made or ended, 6 no such path, 7 the commit
cannot be made or finished, 8 the overlay cannot be used, 9 an index for another tool or an image
cannot be written, 10 --executor names nothing that works, 130 interrupted."""


class _Log(logging.Handler):
    """Messages for the person at the terminal. `said` are the last warnings and errors."""

    def __init__(self) -> None:
        super().__init__()
        self.said: deque[str] = deque(maxlen=100)
        self.setFormatter(TerminalFormatter("wdsfs: %(word)s%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        record.word = "warning: " if record.levelno == logging.WARNING else ""
        text = self.format(record)
        if record.levelno >= logging.WARNING:
            self.said.append(record.message)
        # A terminal that is gone, or a pipe without a reader, must not end a mount.
        with contextlib.suppress(OSError, ValueError):
            say(*text.split("\n"), err=True)


_LOG = _Log()


class _Group(Paged, click.Group):
    """A group that turns exceptions into a message and an exit code, and lists its commands by purpose."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.list_commands(ctx)))
        for title, lines in GROUPS.items():
            with formatter.section(title):
                # Padded, so that all groups have one second column.
                formatter.write_dl([(f"{name:{width}}", line) for name, line in lines.items()])

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(name for lines in GROUPS.values() for name in lines)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of this name; import all if there is none, so that click proposes one like it."""
        from wdsfs import host  # late: `wdsfs --help` needs none of it

        host.refuse_algebra_threads()  # before anything imports NumPy
        known = self.list_commands(ctx)
        cmd_name = ALIASES.get(cmd_name, cmd_name)
        for name in {cmd_name} & {*known} or known:
            if name not in self.commands:
                module = importlib.import_module(f"wdsfs.cli.{MODULES.get(name, f'{name}_command')}")
                for command in vars(module).values():
                    if isinstance(command, click.Command):
                        self.add_command(command)
        return super().get_command(ctx, cmd_name)

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command as click does, but report a wrong call like every other error."""
        if not extra.get("standalone_mode", True):
            return super().main(*args, **extra)
        try:
            code = super().main(*args, **{**extra, "standalone_mode": False})
        except click.exceptions.NoArgsIsHelpError as error:
            say(*error.format_message().split("\n"), err=True)
            code = error.exit_code
        except click.ClickException as error:
            if isinstance(error, click.UsageError) and error.ctx is not None:
                hint = f"Try '{error.ctx.command_path} --help' for help."
                say(*error.ctx.get_usage().split("\n"), hint, err=True)
            # On one line: click has a line for each value that an option may have.
            complain(" ".join(map(str.strip, error.format_message().split("\n"))))
            code = error.exit_code
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with interruptible():
                result = super().invoke(ctx)
                flush()  # here, so that an error gets a message
            return result
        except WdsfsError as error:
            if shown(str(error)) not in _LOG.said:
                complain(f"{error}")
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            complain(f"interrupted{ctx.meta.get(INTERRUPTED, '')}")
            ctx.exit(130)
        except BrokenPipeError:  # `wdsfs ls ... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            ctx.exit(141)
        except OSError as error:
            if error.filename == OUTPUT:
                complain(f"{OUTPUT} cannot be written: {error.strerror}")
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            elif error.filename is None:
                complain(f"{failure_of(error)}; mend that, then repeat the command")
            else:
                raise
            ctx.exit(1)


_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(cls=_Group, epilog=EPILOG, context_settings=_HELP)
@click.version_option(__version__, "-V", "--version", prog_name="wdsfs")
@flag("-v", "--verbose", "Say more of what is done.")
def main(verbose: bool) -> None:
    """Mount WebDataset shards as directories: every sample a directory, every column a file.

    Not sure which command? `wdsfs help` says what to type for a task.

    SHARDS are brace expressions (quote them: wdsfs expands them itself), paths, URLs, globs or directories of
    tars, lists of these (@list.txt), portable indexes (x.wdsidx), wids indexes (x.json), webdataset's YAML specs
    (x.yaml), Energon datasets.

    \b
    Example:
      wdsfs mount 'train-{000000..000999}.tar' /mnt/train
      ls /mnt/train/train-000017
      wdsfs umount /mnt/train
    """
    hide_secrets()
    prepare_streams()
    _LOG.said.clear()
    logging.basicConfig(handlers=[_LOG], level=logging.DEBUG if verbose else logging.INFO, force=True)


# All commands as `wdsfs --help` shows them: by what one is about to do, with a line of at most 64 characters each.
GROUPS: dict[str, dict[str, str]] = {
    "Look at shards": {
        "info": "Count samples and members, and the sizes of each column.",
        "ls": "List a directory of the tree without mounting it.",
        "cat": "Write a file of the tree to standard output.",
        "check": "Look for what readers of the format trip over.",
        "view": "Look at samples, plots and problems in the browser.",
    },
    "Mount them": {
        "mount": "Show SHARDS as directories and files at MOUNTPOINT.",
        "umount": "End a mount, dead ones included.",
        "status": "Show all your mounts, or one of them in full.",
        "where": "Say from which shard, member and byte a path comes.",
        "refresh": "Show new shards in a mount, and hide those that are gone.",
    },
    "Change them (mount --overlay)": {
        "diff": "Show what was changed.",
        "restore": "Undo what was changed at a path, and below it.",
        "commit": "Pack the changes into new shards.",
    },
    "Make something of them": {
        "pack": "Make shards of directories of files.",
        "image": "Make an image of names that the kernel mounts by itself.",
        "table": "Write a table of a set: keys, sizes, labels, fields of JSON.",
        "export": "Write the index that NVIDIA DALI reads.",
    },
    "Prepare": {
        "index": "Build or refresh the index of SHARDS without mounting.",
        "fetch": "Bring whole remote shards into the cache.",
        "cache": "Show, trim or clear the caches of shards.",
    },
    "Help": {
        "doctor": "Check if this machine can mount, and say what to type if not.",
        "help": "Say what to type for a task; explain a command.",
        "completion": "Print what makes a shell complete commands and paths.",
    },
}
# The modules of several commands; any other command NAME is in the module NAME_command.
MODULES = {
    **dict.fromkeys(("mount", "image"), "mount_commands"),
    **dict.fromkeys(("check", "export"), "interop_commands"),
    **dict.fromkeys(("info", "ls", "cat", "view"), "look_commands"),
    **dict.fromkeys(("diff", "restore"), "overlay_commands"),
    **dict.fromkeys(("status", "where", "refresh", "umount"), "live_commands"),
    **dict.fromkeys(("doctor", "help", "completion"), "help_commands"),
    **dict.fromkeys(("index", "fetch", "cache"), "prepare_commands"),
}
ALIASES = {"unmount": "umount"}  # what else commands are called
