"""Progress bars of work that takes long, on standard error, and only on a terminal.

What draws them is imported when it is needed.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from wdsfs.cli.process import ended_in_order, when_interrupted
from wdsfs.errors import bytes_text

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

    from wdsfs.kernel.image import Built
    from wdsfs.kernel.manifest import ImageOptions
    from wdsfs.tree.opening_options import Progress
    from wdsfs.tree.tree import LowerTree


@contextlib.contextmanager
def _bar(
    label: str, total: int, quiet: bool, columns: Callable[[], Iterable[ProgressColumn]], **fields: Any
) -> Iterator[Callable[..., None]]:
    """A bar with these columns after it; the block gets a function that takes the arguments of rich's `update`."""
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield lambda **_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    around = TextColumn(label), BarColumn(), *columns(), TimeRemainingColumn()
    with Progress(*around, console=Console(stderr=True)) as progress:
        yield functools.partial(progress.update, progress.add_task(label, total=total, **fields))


def _counting(unit: str) -> Iterator[ProgressColumn]:
    from rich.progress import MofNCompleteColumn, TextColumn

    return iter((MofNCompleteColumn(), TextColumn(unit)))


def _percentage() -> Iterator[ProgressColumn]:
    from rich.progress import TaskProgressColumn

    yield TaskProgressColumn()


def _bytes_and_speed() -> Iterator[ProgressColumn]:
    from rich.progress import DownloadColumn, ProgressColumn, Task
    from rich.text import Text

    class Speed(ProgressColumn):
        """As rich's own, which has powers of ten beside the powers of two of the bytes."""

        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("?" if speed is None else f"{bytes_text(speed)}/s", style="progress.data.speed")

    return iter((DownloadColumn(binary_units=True), Speed()))


@contextlib.contextmanager
def bytes_bar(label: str, total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar over bytes; the block gets a function to be called, in any thread, with each number of bytes done."""
    with _bar(label, total, quiet, _bytes_and_speed) as update:
        yield lambda count: update(advance=count)


@contextlib.contextmanager
def shards_bar(label: str, total: int, quiet: bool) -> Iterator[Callable[[], None]]:
    """A bar over shards; the block gets a function to be called after each of them."""
    with _bar(label, total, quiet, functools.partial(_counting, "shards")) as update:
        yield lambda: update(advance=1)


def bars(quiet: bool) -> Progress:
    """Return the bars for what opening a set takes."""
    from wdsfs.tree.opening_options import Progress

    class Bars(Progress):
        @contextlib.contextmanager
        def indexing(self, shards: int) -> Iterator[Callable[[int], None]]:
            columns = functools.partial(_counting, "shards, {task.fields[rate]} members/s")
            total, start = 0, time.monotonic()
            with (
                when_interrupted("; what was indexed is kept"),
                _bar("indexing", shards, quiet, columns, rate="-") as update,
            ):

                def advance(members: int) -> None:
                    nonlocal total
                    total += members
                    seconds = time.monotonic() - start
                    update(advance=1, rate=f"{total / seconds:,.0f}" if seconds > 0.1 else "-")

                yield advance

        @contextlib.contextmanager
        def composing(self, shards: int) -> Iterator[Callable[[int], None]]:
            with _bar("composing", shards, quiet, _percentage) as update:
                yield lambda done: update(completed=done)

    return Bars()


def write_image(shown: LowerTree, target: bytes, options: ImageOptions, quiet: bool) -> Built:
    """Write the image of a tree, with a bar. Raises ImageError and ShardErrors."""
    from wdsfs.kernel.image import make_image

    with ended_in_order(), shards_bar("writing", len(shown.lower), quiet) as on_shard:
        return make_image(shown, target, options, on_shard)
