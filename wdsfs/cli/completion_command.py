"""The command `completion`: the script by which a shell completes the words of `wdsfs`."""

from __future__ import annotations

import os
import sys

import click

from wdsfs.cli.completion import SHELLS, script
from wdsfs.cli.output import say, write_page
from wdsfs.errors import UsageError


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
