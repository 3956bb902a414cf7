"""The command line: the group of all commands, messages, exit codes, interrupts.

The group imports the module of a command when the command is typed. The command imports its other modules when it
runs, so that `wdsfs mount --help` appears at once.
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
Exit codes:
    0   done                                6   no such path
    1   findings of check, diff; or a bug   7   commit or pack failed
    2   wrong arguments                     8   unusable overlay
    3   a shard is missing or unreadable    9   image or export failed
    4   index failed                        10  --executor failed
    5   mount or unmount failed             130 interrupted"""


class _Log(logging.Handler):
    """Log records as messages on the terminal. `said` are the last warnings and errors."""

    def __init__(self) -> None:
        super().__init__()
        self.said: deque[str] = deque(maxlen=100)
        self.setFormatter(TerminalFormatter("wdsfs: %(word)s%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        record.word = "warning: " if record.levelno == logging.WARNING else ""
        text = self.format(record)
        if record.levelno >= logging.WARNING:
            self.said.append(record.message)
        # A closed terminal, or a pipe without a reader, must not end a mount.
        with contextlib.suppress(OSError, ValueError):
            say(*text.split("\n"), err=True)


_LOG = _Log()


class _Group(Paged, click.Group):
    """The group of all commands: turns exceptions into a message and an exit code, lists commands by purpose."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.list_commands(ctx)))
        for title, lines in GROUPS.items():
            with formatter.section(title):
                # Padded, so that the second columns of all groups are aligned.
                formatter.write_dl([(f"{name:{width}}", line) for name, line in lines.items()])

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(name for lines in GROUPS.values() for name in lines)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of this name. Import all for an unknown name: click then proposes a similar one."""
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
        """Run a command as click does, but report wrong arguments like every other error."""
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
            # On one line: click has a line for each value of an option.
            complain(" ".join(map(str.strip, error.format_message().split("\n"))))
            code = error.exit_code
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with interruptible():
                result = super().invoke(ctx)
                flush()  # here, so that a failure gets a message
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
                complain(f"{failure_of(error)}; repair this, then repeat the command")
            else:
                raise
            ctx.exit(1)


_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(cls=_Group, epilog=EPILOG, context_settings=_HELP)
@click.version_option(__version__, "-V", "--version", prog_name="wdsfs")
@flag("-v", "--verbose", "Log more.")
def main(verbose: bool) -> None:
    """Mount WebDataset shards as directories: every sample a directory, every column a file.

    Not sure which command? `wdsfs help` shows the commands for each task.

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


# All commands by purpose, as `wdsfs --help` shows them; a line has at most 64 characters.
GROUPS: dict[str, dict[str, str]] = {
    "Look at shards": {
        "info": "Count samples and members; show the sizes of each column.",
        "ls": "List a directory of the tree without mounting it.",
        "cat": "Write a file of the tree to standard output.",
        "check": "Find damaged shards, odd samples and odd names.",
        "view": "Look at samples, plots and problems in the browser.",
    },
    "Mount them": {
        "mount": "Show SHARDS as directories and files at MOUNTPOINT.",
        "umount": "End a mount, even a dead one.",
        "status": "Show all your mounts, or one of them in full.",
        "where": "Show the shard, member and byte of a path in a mount.",
        "refresh": "Show new shards in a mount, and hide removed shards.",
    },
    "Change them (mount --overlay)": {
        "diff": "Show the changes in a mount.",
        "restore": "Undo the changes at a path and below it.",
        "commit": "Write the changes into new shards.",
    },
    "Make something of them": {
        "pack": "Make shards from directories of files, or from shards.",
        "image": "Make an image that the kernel mounts without a daemon.",
        "table": "Write a table of a set: keys, sizes, labels, fields of JSON.",
        "export": "Write an index for NVIDIA DALI.",
    },
    "Prepare": {
        "index": "Build or refresh the index of SHARDS without mounting.",
        "fetch": "Download whole remote shards into the cache.",
        "cache": "Show, trim or clear the caches of shards.",
    },
    "Help": {
        "doctor": "Check if this machine can mount; if not, show what to type.",
        "help": "Show the commands for a task; explain a command.",
        "completion": "Print the script that completes commands in your shell.",
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
ALIASES = {"unmount": "umount"}  # other names of commands
