"""The command line: the group of all commands, messages, exit codes, and what an interrupt does.

Each command is a module beside this one. They import only what starting takes; what a command works with is
imported when it is called, so that `wdsfs --help` is there at once.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import click

from wdsfs import __version__
from wdsfs.cli.cat_command import cat
from wdsfs.cli.check_command import check
from wdsfs.cli.console import INTERRUPTED
from wdsfs.cli.doctor_command import doctor
from wdsfs.cli.export_commands import export
from wdsfs.cli.index_command import index_command
from wdsfs.cli.info_command import info
from wdsfs.cli.ls_command import ls
from wdsfs.cli.mount_command import mount
from wdsfs.cli.overlay_commands import commit, diff
from wdsfs.cli.restore_command import restore
from wdsfs.cli.status_command import status
from wdsfs.cli.umount_command import umount
from wdsfs.errors import UsageError, WdsfsError
from wdsfs.names import shown_lines

EPILOG = """\b
Exit codes: 0 done, 1 `check` or `diff` has findings (or a bug), 2 wrong arguments, 3 a shard is missing
or unreadable, 4 no index can be made, 5 the mount cannot be made or ended, 6 no such path, 7 the commit
cannot be made or finished, 8 the overlay cannot be used, 9 an index for another tool cannot be
written, 130 interrupted."""


class _Log(logging.Handler):
    """Messages for the person at the terminal. `said` are the last warnings and errors."""

    def __init__(self) -> None:
        super().__init__()
        self.said: deque[str] = deque(maxlen=100)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            self.said.append(text)
        if record.exc_info:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
        word = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        # A terminal that is gone, or a pipe that nobody reads, must not end a mount.
        with contextlib.suppress(OSError, ValueError):
            click.echo(shown_lines(f"wdsfs: {word}{text}"), err=True)


_LOG = _Log()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """An interrupt is a KeyboardInterrupt in the block. Outside of it, it ends the program (`__main__`)."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if before is signal.SIG_DFL:
            signal.signal(signal.SIGINT, before)


class _Group(click.Group):
    """Turns our exceptions into a message and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _interruptible():
                result = super().invoke(ctx)
                if sys.stdout is not None:
                    sys.stdout.flush()  # here, where what goes wrong with it has a message
            return result
        except WdsfsError as error:
            if str(error) not in _LOG.said:
                click.echo(shown_lines(f"wdsfs: {error}"), err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo(f"wdsfs: interrupted{ctx.meta.get(INTERRUPTED, '')}", err=True)
            ctx.exit(130)
        except BrokenPipeError:  # `wdsfs ls ... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            ctx.exit(141)
        except OSError as error:
            if error.filename is not None:
                raise
            click.echo(f"wdsfs: the output cannot be written: {error.strerror}", err=True)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            ctx.exit(1)


@click.group(cls=_Group, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="wdsfs")
@click.option("-v", "--verbose", is_flag=True, help="Say more of what is done.")
def main(verbose: bool) -> None:
    """Mount WebDataset shards as directories: every sample a directory, every column a file.

    SHARDS are brace expressions (quote them: wdsfs expands them itself), paths, globs or directories of tars,
    lists of these (@list.txt), wids indexes (x.json), webdataset's YAML specs (x.yaml), Energon datasets.

    \b
    Example:
      wdsfs mount 'train-{000000..000999}.tar' /mnt/train
      ls /mnt/train/train-000017
      wdsfs umount /mnt/train
    """
    _prepare_streams()
    _LOG.said.clear()
    logging.basicConfig(handlers=[_LOG], level=logging.DEBUG if verbose else logging.INFO, force=True)


def _prepare_streams() -> None:
    """See that the standard streams are there and take any path, whatever its bytes."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: a file opened later would get its number, and what is written to it
            os.open(os.devnull, os.O_RDWR)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")


@main.command("help")
@click.argument("command", required=False)
@click.pass_context
def help_command(ctx: click.Context, command: str | None) -> None:
    """Explain COMMAND, or the program: the same as --help.

    \b
    Example:
      wdsfs help mount
    """
    above = ctx.parent
    assert above is not None
    if command is None:
        click.echo(above.get_help())
        return
    found = main.get_command(above, command)
    if found is None:
        raise UsageError(f"there is no command {command!r}; there are: {', '.join(main.list_commands(above))}")
    with click.Context(found, parent=above, info_name=command) as context:
        click.echo(found.get_help(context))


for command in (
    *(mount, umount, status, doctor),
    *(index_command, ls, cat, info, check),
    *(diff, commit, restore, export),
):
    main.add_command(command)
