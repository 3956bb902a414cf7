"""The output of commands: tables, lines and JSON; progress bars.

Names in the output never control a terminal. A pipe gets whole lines.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shutil
import stat
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from wdsfs.cli.process import ended_in_order, when_interrupted
from wdsfs.errors import UsageError, bytes_text, counted
from wdsfs.names import shown

if TYPE_CHECKING:
    from rich.table import Table

    from wdsfs.packing.plan import Plan, Step
    from wdsfs.tree.set_options import Progress
    from wdsfs.tree.tree import Node

log = logging.getLogger("wdsfs")

OUTPUT = "the output"  # the file name in an OSError of the standard streams


@contextlib.contextmanager
def to_output() -> Iterator[None]:
    """Make `OUTPUT` the file name of an OSError in the block, for its message."""
    try:
        yield
    except OSError as error:
        error.filename = OUTPUT
        raise


def _echo(text: str, *, err: bool = False, newline: bool = True) -> None:
    with to_output():
        click.echo(text, err=err, nl=newline)


def flush() -> None:
    """Flush standard output. Raises OSError with `OUTPUT` as its file."""
    if sys.stdout is not None:
        with to_output():
            sys.stdout.flush()


def table_of(*columns: str) -> Table:
    """Return an empty table with these columns; all but the first are numbers."""
    from rich import box
    from rich.table import Table

    class LineTable(Table):
        """A table with one line for each cell, even for names with line breaks."""

        def add_row(self, *cells: Any, **options: Any) -> None:
            super().add_row(*(shown(cell) if isinstance(cell, str) else cell for cell in cells), **options)

    table = LineTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    return table


def print_table(table: Table) -> None:
    """Show a table: fitted to a terminal; in a pipe with whole lines, so that programs can search all of it."""
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = 1000
    with console.capture() as capture:
        console.print(table)
    _echo("\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip()))


def print_block(head: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print a line, and below it names with values: wrapped between words on a terminal, whole in a pipe.

    The terminal itself wraps paths that are longer than a line.
    """
    width = 0
    if on_terminal():
        width = shutil.get_terminal_size().columns
    names = max((len(name) for name, _ in rows), default=0)
    for start, value in (("", head), *((f"  {name:<{names}}  ", value) for name, value in rows)):
        text, indent = start + shown(value), " " * max(len(start), 2)
        lines = textwrap.wrap(
            text, width or sys.maxsize, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        _echo("\n".join(lines))


def say(*lines: str, err: bool = False) -> None:
    """Write lines for people. Names in them are escaped: they neither add lines nor control a terminal.

    Semantics decision: only `ls` writes raw names into a pipe, as ls(1) does; `--json` has exact names.
    """
    for line in lines:
        _echo(shown(line), err=err)


def complain(text: str) -> None:
    """Write an error message, of one line or several."""
    say(*f"wdsfs: {text}".split("\n"), err=True)


def write_json(value: object) -> None:
    """Write a result as one line of JSON."""
    _echo(json.dumps(value))


def write_page(text: str) -> None:
    """Write text of the program itself, which contains no names."""
    _echo(text, newline=not text.endswith("\n"))


def on_terminal() -> bool:
    """Return True if standard output is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def show_page(text: str) -> None:
    """Write a page of help; on a terminal that is too small for it, by a pager."""
    if on_terminal() and text.count("\n") + 1 >= shutil.get_terminal_size().lines:
        with to_output():
            click.echo_via_pager(text)
    else:
        write_page(text)


def contents_text(shards: int, samples: int, members: int) -> str:
    """Return `2 shards, 5 samples, 7 members`."""
    return ", ".join((counted(shards, "shard"), counted(samples, "sample"), counted(members, "member")))


def note_uneven(text: str, quiet: bool) -> None:
    """Log the note of `uneven_text`, unless `quiet`."""
    if text and not quiet:
        log.info("%s", text)


def write_bytes(data: bytes) -> None:
    """Write bytes to standard output unchanged. Raises UsageError if that is closed."""
    if sys.stdout is None:
        raise UsageError("standard output is closed")
    with to_output():
        sys.stdout.buffer.write(data)


def is_directory(node: Node) -> bool:
    """Return True if a node is a directory."""
    return stat.S_ISDIR(node.mode)


# --- progress bars: on standard error, and only on a terminal ------------------------------------------------


@contextlib.contextmanager
def _bar(label: str, total: int, quiet: bool, shown: str, **fields: Any) -> Iterator[Callable[..., None]]:
    """Show a bar; the block gets a function that takes the arguments of rich's `update`.

    `shown` is the unit of `total`: a noun such as `shards`, "bytes" for sizes with a speed, or "%".
    """
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield lambda **_: None
        return
    from rich import progress
    from rich.console import Console
    from rich.text import Text

    class Speed(progress.ProgressColumn):
        """Speed in powers of two, as the bytes beside it; rich's own column has powers of ten."""

        def render(self, task: progress.Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("?" if speed is None else f"{bytes_text(speed)}/s", style="progress.data.speed")

    columns: list[progress.ProgressColumn] = [progress.MofNCompleteColumn(), progress.TextColumn(shown)]
    if shown == "bytes":
        columns = [progress.DownloadColumn(binary_units=True), Speed()]
    elif shown == "%":
        columns = [progress.TaskProgressColumn()]
    around = progress.TextColumn(label), progress.BarColumn(), *columns, progress.TimeRemainingColumn()
    with progress.Progress(*around, console=Console(stderr=True)) as bar:
        yield functools.partial(bar.update, bar.add_task(label, total=total, **fields))


@contextlib.contextmanager
def bytes_bar(label: str, total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar over bytes; the block gets a function to call, in any thread, with each number of bytes done."""
    with _bar(label, total, quiet, "bytes") as update:
        yield lambda count: update(advance=count)


@contextlib.contextmanager
def shards_bar(label: str, total: int, quiet: bool) -> Iterator[Callable[[], None]]:
    """Show a bar over shards; the block gets a function to call after each of them."""
    with _bar(label, total, quiet, "shards") as update:
        yield lambda: update(advance=1)


def bars(quiet: bool) -> Progress:
    """Return the progress bars for opening a set."""
    from wdsfs.tree.set_options import Progress

    class Bars(Progress):
        @contextlib.contextmanager
        def indexing(self, shards: int) -> Iterator[Callable[[int], None]]:
            speed = "shards, {task.fields[rate]} members/s"
            total, start = 0, time.monotonic()
            with (
                when_interrupted("; the index keeps the shards read so far"),
                _bar("indexing", shards, quiet, speed, rate="-") as update,
            ):

                def advance(members: int) -> None:
                    nonlocal total
                    total += members
                    seconds = time.monotonic() - start
                    update(advance=1, rate=f"{total / seconds:,.0f}" if seconds > 0.1 else "-")

                yield advance

        @contextlib.contextmanager
        def shards(self, label: str, shards: int) -> Iterator[Callable[[], None]]:
            with ended_in_order(), shards_bar(label, shards, quiet or not shards) as on_shard:
                yield on_shard

        @contextlib.contextmanager
        def composing(self, shards: int) -> Iterator[Callable[[int], None]]:
            with _bar("composing", shards, quiet, "%") as update:
                yield lambda done: update(completed=done)

    return Bars()


# --- the shards of a plan, for `commit` and `pack` ------------------------------------------------------------

STOPPED = "; finished shards are kept: repeat the command, and it continues"
_DONE = {"rewrite": "rewritten", "new": "new", "copy": "copied", "link": "linked"}


def print_steps(steps: Sequence[Step]) -> None:
    """Print the shards of a plan, for `--dry-run`."""
    table = table_of("shard", "action", "samples", "bytes")
    for step in steps:
        cells = (f"{step.samples:,}", bytes_text(step.output.length))
        table.add_row(os.fsdecode(step.target), step.action, *cells)
    print_table(table)


def say_left_out(plan: Plan) -> None:
    """List the files that are in no new shard, with the reasons."""
    for remark in plan.left_out:
        say(f"left out: {os.fsdecode(remark.path)}: {remark.reason}")


def say_done(plan: Plan, done: Sequence[Step], seconds: float) -> None:
    """Print the numbers of shards and samples, the size and the time."""
    counts = Counter(step.action for step in plan.steps)
    parts = [f"{counts[action]:,} {word}" for action, word in _DONE.items() if counts[action]]
    before = len(plan.steps) - len(done)
    there = f" ({before:,} of these existed already)" if before else ""
    samples = sum(step.samples for step in plan.steps)
    size = bytes_text(sum(step.output.length for step in plan.steps))
    say(f"shards: {', '.join(parts)}{there}; {samples:,} samples, {size}, in {seconds:.1f} s")


def refuse_exports(paths: Sequence[bytes], exports: Sequence[str]) -> None:
    """Raise UsageError for indexes that would go into a store, beside the shards at these paths."""
    from wdsfs.door.urls import is_remote

    if exports and any(map(is_remote, paths)):
        raise UsageError("--export cannot write into a store: leave it out, then type wdsfs export -o DIR SHARDS")
