"""The command `man`: the manual page wdsfs(1). `man_page.py` makes its text."""

from __future__ import annotations

import shutil
import subprocess
import sys

import click

from wdsfs import __version__
from wdsfs.cli.output import write_page


@click.command()
@click.pass_context
def man(ctx: click.Context) -> None:
    """Show the manual page, all that --help says; if the output is no terminal, print it for `man` to read.

    \b
    Examples:
      wdsfs man
      wdsfs man > ~/.local/share/man/man1/wdsfs.1
    """
    from wdsfs.cli.man_page import manual

    above = ctx.find_root().command
    assert isinstance(above, click.Group)
    page = manual(above, __version__)
    program = shutil.which("man") if sys.stdout.isatty() else None
    if program is None:
        write_page(page)
        return
    sys.exit(subprocess.run([program, "--local-file", "-"], input=page.encode(), check=False).returncode)
