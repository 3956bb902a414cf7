"""Work that takes long: progress bars, and the effect of interrupts, signals and full disks meanwhile.

Bars are drawn on standard error, and only on a terminal. As `cli/main.py`, it imports what draws them when it is
needed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from wdsfs.errors import CommitError, bytes_text

if TYPE_CHECKING:
    from rich.progress import Progress as ProgressBar
    from rich.progress import ProgressColumn, TaskID

    from wdsfs.kernel.image import Built
    from wdsfs.kernel.manifest import ImageOptions
    from wdsfs.tree.opening import Progress
    from wdsfs.tree.tree import LowerTree

log = logging.getLogger("wdsfs")

INTERRUPTED = "wdsfs.interrupted"  # in the context's `meta`: what is to be added to "interrupted"


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """A block that SIGTERM and SIGHUP end with an exception, so that unfinished files are removed.

    The exit code is that of a process that the signal has killed, as a shell shows it.
    """

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is signal.SIG_DFL:  # else it is to be ignored, as by nohup
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def when_interrupted(text: str) -> Iterator[None]:
    """A block with this text for the user if it is interrupted, after the word "interrupted"."""
    meta = click.get_current_context().meta
    meta[INTERRUPTED] = text
    yield
    del meta[INTERRUPTED]  # and not after an exception: it may be the interrupt


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """A block whose OSErrors become CommitErrors, but that of `wdsfs ... | head`."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        raise CommitError(f"{where}{error.strerror}; mend that, then repeat the command") from None


def _has_a_terminal(quiet: bool) -> bool:
    """False where no bar is drawn in any case: then what draws it is not even imported."""
    return not quiet and sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def progress_bar(
    label: str, total: int, quiet: bool, *columns: ProgressColumn | str, **fields: Any
) -> Iterator[tuple[ProgressBar, TaskID]]:
    """A bar with these columns after it, and the time that is left; only on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    shown = (TextColumn(label), BarColumn(), *columns, TimeRemainingColumn())
    with Progress(*shown, console=console, disable=quiet or not console.is_terminal) as progress:
        yield progress, progress.add_task(label, total=total, **fields)


def bars(quiet: bool) -> Progress:
    """Bars for what opening a set takes."""
    from wdsfs.tree.opening import Progress

    class Bars(Progress):
        @contextlib.contextmanager
        def indexing(self, shards: int) -> Iterator[Callable[[int], None]]:
            from rich.progress import MofNCompleteColumn, TextColumn

            columns = MofNCompleteColumn(), TextColumn("shards, {task.fields[rate]} members/s")
            with (
                when_interrupted("; what was indexed is kept"),
                progress_bar("indexing", shards, quiet, *columns, rate="-") as (bar, task),
            ):
                total = 0

                def advance(members: int) -> None:
                    nonlocal total
                    total += members
                    elapsed = bar.tasks[task].elapsed or 0
                    bar.update(task, advance=1, rate=f"{total / elapsed:,.0f}" if elapsed > 0.1 else "-")

                yield advance

        @contextlib.contextmanager
        def composing(self, shards: int) -> Iterator[Callable[[int], None]]:
            from rich.progress import TaskProgressColumn

            with progress_bar("composing", shards, quiet, TaskProgressColumn()) as (bar, task):
                yield lambda done: bar.update(task, completed=done)

    return Bars()


@contextlib.contextmanager
def bytes_bar(label: str, total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar over bytes; the block gets a function to be called, in any thread, with each number of bytes done."""
    if not _has_a_terminal(quiet):
        yield lambda _: None
        return
    from rich.progress import DownloadColumn, ProgressColumn, Task
    from rich.text import Text

    class Speed(ProgressColumn):
        """As rich's own, which has powers of ten beside the powers of two of the bytes."""

        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("?" if speed is None else f"{bytes_text(speed)}/s", style="progress.data.speed")

    columns = DownloadColumn(binary_units=True), Speed()
    with progress_bar(label, total, quiet, *columns) as (bar, task):
        yield lambda count: bar.advance(task, count)


@contextlib.contextmanager
def shards_bar(label: str, total: int, quiet: bool) -> Iterator[Callable[[], None]]:
    """A bar over shards; the block gets a function to be called after each of them."""
    if not _has_a_terminal(quiet):
        yield lambda: None
        return
    from rich.progress import MofNCompleteColumn, TextColumn

    with progress_bar(label, total, quiet, MofNCompleteColumn(), TextColumn("shards")) as (bar, task):
        yield lambda: bar.advance(task)


def write_image(shown: LowerTree, target: bytes, options: ImageOptions, quiet: bool) -> Built:
    """Write the image of a tree, with a bar. Raises ImageError and ShardErrors."""
    from wdsfs.kernel.image import make_image

    with ended_in_order(), shards_bar("writing", len(shown.lower), quiet) as on_shard:
        return make_image(shown, target, options, on_shard)
