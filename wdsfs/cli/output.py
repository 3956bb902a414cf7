"""Output of results: tables, blocks and lines on a terminal, whole lines in a pipe."""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from wdsfs.errors import UsageError, counted
from wdsfs.names import shown

if TYPE_CHECKING:
    from rich.table import Table

    from wdsfs.tree.tree import Node


log = logging.getLogger("wdsfs")


def table_of(*columns: str) -> Table:
    """An empty table with these columns; all but the first are numbers."""
    from rich import box
    from rich.table import Table

    class LineTable(Table):
        """A table in which a cell is a line, whatever names are in it."""

        def add_row(self, *cells: Any, **options: Any) -> None:
            super().add_row(*(shown(cell) if isinstance(cell, str) else cell for cell in cells), **options)

    table = LineTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    return table


def print_table(table: Table) -> None:
    """Show a table: fitted to a terminal; in a pipe with whole lines, for what is cut cannot be searched."""
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = 1000
    with console.capture() as capture:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip()))


def print_block(head: str, rows: Sequence[tuple[str, str]]) -> None:
    """A line, and below it names with their values: wrapped between words on a terminal, whole lines in a pipe.

    A path that is longer than the terminal is wide is left to it.
    """
    width = 0
    if sys.stdout is not None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    names = max((len(name) for name, _ in rows), default=0)
    for start, value in (("", head), *((f"  {name:<{names}}  ", value) for name, value in rows)):
        text, indent = start + shown(value), " " * max(len(start), 2)
        lines = textwrap.wrap(
            text, width or sys.maxsize, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        click.echo("\n".join(lines))


def say(*lines: str, err: bool = False) -> None:
    """Write lines for people. A name in them makes no further line and controls no terminal, also in a pipe.

    Semantics decision: only `ls` writes names into a pipe as they are, as ls(1) does; `--json` has them exactly.
    """
    for line in lines:
        click.echo(shown(line), err=err)


def complain(text: str) -> None:
    """Write an error message of the program, of one line or several."""
    say(*f"wdsfs: {text}".split("\n"), err=True)


def write_json(value: object) -> None:
    """Write a result as one line of JSON."""
    click.echo(json.dumps(value))


def write_page(text: str) -> None:
    """Write text of the program's own, without any name in it."""
    click.echo(text, nl=not text.endswith("\n"))


def contents_text(shards: int, samples: int, members: int) -> str:
    """`2 shards, 5 samples, 7 members`."""
    return ", ".join((counted(shards, "shard"), counted(samples, "sample"), counted(members, "member")))


def uneven_text(path: bytes, members: Iterable[tuple[bytes, bytes]]) -> str:
    """Return a note if Hugging Face's loader would refuse a set that begins with this new shard, else "".

    `members` are key and extension of its members, in order.
    """
    from wdsfs.interop.lint import first_samples, uneven

    finding = uneven(first_samples(members))
    return "" if finding is None else f"note: {os.fsdecode(path)}: the sample {finding.member} {finding.text}"


def note_uneven(text: str, quiet: bool) -> None:
    """Say what `uneven_text` has found."""
    if text and not quiet:
        log.info("%s", text)


def write_bytes(data: bytes) -> None:
    """Write to standard output as it is. Raises UsageError if that is closed."""
    if sys.stdout is None:
        raise UsageError("standard output is closed")
    sys.stdout.buffer.write(data)


def is_directory(node: Node) -> bool:
    return stat.S_ISDIR(node.mode)
