"""What several commands share: options, opening a set with its index, and how results look on a terminal.

Imports only what starting takes, as `cli.py` does. What a command does is decided elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from wdsfs.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from wdsfs.index import Index
    from wdsfs.lower import Lower
    from wdsfs.spec import Selection, Shard
    from wdsfs.tree import View

log = logging.getLogger("wdsfs")

Command = TypeVar("Command", bound=Callable[..., Any])
Answer = TypeVar("Answer")


# --- options that several commands have --------------------------------------------------------------------


def shards_argument(command: Command) -> Command:
    return click.argument("shards", nargs=-1, required=True)(command)


def set_options(command: Command) -> Command:
    """The options of whatever takes SHARDS: which part of them is wanted. The command gets a `selection`."""

    @wraps(command)
    def with_selection(
        *arguments: Any, split: str | None, shard_id: int | None, num_shards: int | None, **others: Any
    ) -> Any:
        return command(*arguments, selection=_selection(split, shard_id, num_shards), **others)

    for option in (
        click.option(
            "--num-shards", type=click.IntRange(1), metavar="M", help="How many parts --shard-id counts."
        ),
        click.option(
            "--shard-id",
            type=click.IntRange(0),
            metavar="N",
            help="Only part N of M, from 0 on: shards N, N+M, N+2M ... of the set, one part for each rank.",
        ),
        click.option(
            "--split",
            metavar="NAME",
            help="Only this split (train, val ...) of a prepared Energon dataset, a directory with .nv-meta.",
        ),
    ):
        with_selection = option(with_selection)
    return cast(Command, with_selection)


def _selection(split: str | None, shard_id: int | None, num_shards: int | None) -> Selection:
    from wdsfs.spec import Selection, Slice

    if shard_id is None and num_shards is None:
        return Selection(split)
    if shard_id is None or num_shards is None:
        raise UsageError("--shard-id and --num-shards belong together: part N of M")
    if shard_id >= num_shards:
        raise UsageError(
            f"--shard-id {shard_id}: parts are counted from 0, so the last of {num_shards} is {num_shards - 1}"
        )
    return Selection(split, Slice(shard_id, num_shards))
@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def tell_all(name: str, value: str | None) -> None:
    """Set a variable for this command and all processes that it starts; None leaves it as it is."""
    if value is not None:
        click.get_current_context().with_resource(_environment(name, value))


def _told(name: str) -> Callable[[click.Context, click.Parameter, str | None], str | None]:
    def callback(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
        tell_all(name, value)
        return value

    return callback


def _size(_: click.Context, __: click.Parameter, value: str | None) -> None:
    if value is not None:
        from wdsfs.copies import parse_size

        tell_all("WDSFS_CACHE_SIZE", str(parse_size(value)))


def packed_options(command: Command) -> Command:
    """What becomes of compressed shards. Told to all processes by the environment, so no command sees it."""
    for option in (
        click.option(
            "--cache-size",
            metavar="SIZE",
            envvar="WDSFS_CACHE_SIZE",
            expose_value=False,
            callback=_size,
            help="Room for unpacked shards, such as 800M or 2T.  [default: 32G; env WDSFS_CACHE_SIZE]",
        ),
        click.option(
            "--unpack",
            type=click.Choice(["auto", "always", "never"]),
            envvar="WDSFS_UNPACK",
            expose_value=False,
            callback=_told("WDSFS_UNPACK"),
            help="Compressed shards: unpack them into the cache (always), read them where they are (never), or so "
            "only when there is no room (auto).  [default: auto; env WDSFS_UNPACK]",
        ),
    ):
        command = option(command)
    return command


def index_options(command: Command) -> Command:
    return index_options_with("Processes that index shards.")(command)


def index_options_with(jobs: str) -> Callable[[Command], Command]:
    """The options of whoever needs an index, where `--jobs` has this help."""
    options = (
        click.option(
            "--index-dir",
            type=click.Path(file_okay=False),
            envvar="WDSFS_INDEX_DIR",
            callback=_told("WDSFS_INDEX_DIR"),  # the cache of unpacked shards is beside it
            help="Where the index is kept.  [default: wdsfs in the user's cache directory; env WDSFS_INDEX_DIR]",
        ),
        click.option(
            "-j",
            "--jobs",
            type=click.IntRange(1),
            help=f"{jobs}  [default: one per core]",
        ),
        click.option("-q", "--quiet", is_flag=True, help="No progress bar."),
    )

    def with_options(command: Command) -> Command:
        for option in options:
            command = option(command)
        return packed_options(command)

    return with_options


def view_options(command: Command) -> Command:
    for option in (
        click.option(
            "--merge",
            is_flag=True,
            help="One tree over all shards. A second file of a name is shown as NAME~2.",
        ),
        click.option(
            "--names",
            type=click.Choice(["ext", "full"]),
            default="ext",
            show_default=True,
            help="Name the files of a sample `left.jpg` (ext) or `image194.left.jpg` (full).",
        ),
        click.option(
            "--layout",
            type=click.Choice(["samples", "files"]),
            default="samples",
            show_default=True,
            help="A directory for each sample, or the members as `tar x` would write them.",
        ),
    ):
        command = option(command)
    return command


json_option = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")


def view_of(layout: str, names: str) -> View:
    from wdsfs.tree import View

    if layout == "files" and names == "full":
        raise UsageError("--names full is for --layout samples; in --layout files the names are always whole")
    return View(layout, names)


def jobs_of(jobs: int | None) -> int:
    from wdsfs.pool import default_jobs

    return jobs or default_jobs()


def path_of(text: str | None) -> Path | None:
    from pathlib import Path

    return Path(text) if text else None


# --- indexing with progress --------------------------------------------------------------------------------


def build_index(index: Index, stale: Sequence[Shard], jobs: int, quiet: bool = False) -> int:
    """Index these shards, showing a bar when somebody watches; returns how many of them cannot be read."""
    if not stale:
        return 0
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from wdsfs.index import Summary

    console = Console(stderr=True)
    columns = (
        TextColumn("indexing"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("shards, {task.fields[rate]} members/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task("indexing", total=len(stale), rate="-")
        members = unreadable = 0

        def on_done(one: Shard, summary: Summary | None, error: str | None) -> None:
            nonlocal members, unreadable
            if summary is None:
                unreadable += 1
                log.warning("%s", error)
            elif summary.problems:
                path = os.fsdecode(one.path)
                log.warning("%s: something is wrong with it; see: wdsfs check %s", path, shlex.quote(path))
            members += summary.members if summary else 0
            elapsed = progress.tasks[task].elapsed or 0
            progress.update(task, advance=1, rate=f"{members / elapsed:,.0f}" if elapsed > 0.1 else "-")

        index.refresh(stale, jobs, on_done)
    return unreadable


def _index_of(found: Sequence[Shard], index_dir: str | None, jobs: int | None, quiet: bool) -> Index:
    from wdsfs.index import open_index

    index = open_index(path_of(index_dir))
    for notice in index.notices:
        log.warning("%s", notice)
    build_index(index, [one for one, _ in index.stale(found)], jobs_of(jobs), quiet)
    return index


# --- the set -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(
    shards: Sequence[str], selection: Selection, index_dir: str | None, jobs: int | None, quiet: bool
) -> Iterator[Lower]:
    """The lower of a set, all of it indexed."""
    from wdsfs.spec import expand

    with opened_set(expand(shards, *selection), index_dir, jobs, quiet) as below:
        yield below


@contextlib.contextmanager
def opened_set(shards: Sequence[Shard], index_dir: str | None, jobs: int | None, quiet: bool) -> Iterator[Lower]:
    """As `opened`, of shards that are known."""
    from wdsfs.lower import Lower

    below = Lower(shards, _index_of(shards, index_dir, jobs, quiet))
    try:
        yield below
    finally:
        below.close()


def left_out_text(shards: Sequence[Shard]) -> str:
    """What to say where whole shards are looked at, of which a mount leaves out samples; empty if it does not."""
    keys = sum(len(one.without) for one in shards)
    return f"{counted(keys, 'sample')} excluded by a split file are counted here, too" if keys else ""


def settled(below: Lower, question: Callable[[], Answer]) -> Answer:
    """The answer to a question about the tree. A shard that has just changed is indexed again first."""
    from wdsfs.lower import NotIndexed

    while True:
        try:
            return question()
        except NotIndexed as wanted:
            below.install(wanted.number, below.build(wanted.number))


# --- showing -----------------------------------------------------------------------------------------------


def table_of(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
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


def counted(count: int, noun: str) -> str:
    """`1 shard`, `2 shards`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def bytes_text(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
