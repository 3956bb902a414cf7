"""What several commands share: options, and opening a set with its index.

Imports only what starting takes, as `cli/main.py` does. What a command does is decided elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from wdsfs.errors import UsageError, counted

if TYPE_CHECKING:
    from pathlib import Path

    from wdsfs.dataset.shard_access import Access
    from wdsfs.dataset.shard_set import ShardSet
    from wdsfs.dataset.tree import View
    from wdsfs.index.store import Index
    from wdsfs.interop.soundness import Tolerance
    from wdsfs.spec.expand import Selection, Shard
    from wdsfs.views.composition import Composition

log = logging.getLogger("wdsfs")

Command = TypeVar("Command", bound=Callable[..., Any])

INTERRUPTED = "wdsfs.interrupted"  # in the context's `meta`: what is to be added to "interrupted"


# --- options that several commands have --------------------------------------------------------------------


def shards_argument(command: Command) -> Command:
    return click.argument("shards", nargs=-1, required=True)(command)


def set_options(command: Command) -> Command:
    """The options of whatever takes SHARDS: which part of them is wanted, and how they are read.

    The command gets a `selection`.
    """

    @wraps(command)
    def with_selection(
        *arguments: Any,
        split: str | None,
        shard_id: int | None,
        num_shards: int | None,
        ignore_zeros: bool,
        group_by_key: bool,
        **others: Any,
    ) -> Any:
        from wdsfs.reading import Reading

        selection = _selection(split, shard_id, num_shards)
        selection = selection._replace(reading=Reading(ignore_zeros, group_by_key))
        return command(*arguments, selection=selection, **others)

    for option in (
        click.option(
            "--group-by-key",
            is_flag=True,
            help="One sample for each key, also where its members lie apart in the shard.",
        ),
        click.option(
            "--ignore-zeros",
            is_flag=True,
            help="Read on after the end mark of a tar: several tars joined by cat are one shard.",
        ),
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
    from wdsfs.spec.expand import Selection, Slice

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
def ended_in_order() -> Iterator[None]:
    """A block that SIGTERM and SIGHUP end with an exception, so that unfinished files are removed.

    The exit code is that of a process that the signal has killed, as a shell tells it.
    """

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is signal.SIG_DFL:  # else somebody wants it to be ignored, as nohup does
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
        from wdsfs.storage.unpack_cache import parse_size

        tell_all("WDSFS_CACHE_SIZE", str(parse_size(value)))


def _trusted(_: click.Context, __: click.Parameter, value: str | None) -> None:
    if value is not None:
        from wdsfs.trust import trusted

        tell_all("WDSFS_TRUST", value)
        trusted()  # so that a name that nobody has is said now


def trust_option(command: Command) -> Command:
    """Whose directories and files count as one's own. Told to all processes by the environment."""
    return click.option(
        "--trust",
        metavar="WHO,...",
        envvar="WDSFS_TRUST",
        expose_value=False,
        callback=_trusted,
        help="Also use directories (index, cache, overlay) and changed shards of these users and @groups; "
        "`everyone` ends all such checks.  [default: only yours and root's; env WDSFS_TRUST]",
    )(command)


def compressed_options(command: Command) -> Command:
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
        click.option("-q", "--quiet", is_flag=True, help="No progress bar, no hints."),
    )

    def with_options(command: Command) -> Command:
        for option in options:
            command = option(command)
        return trust_option(compressed_options(command))

    return with_options


def soundness_options(command: Command) -> Command:
    """What a command tolerates of a set; it gets a `tolerance`."""

    @wraps(command)
    def with_tolerance(*arguments: Any, allow_missing: bool, strict: bool, **others: Any) -> Any:
        from wdsfs.interop.soundness import Tolerance

        return command(*arguments, tolerance=Tolerance(allow_missing, strict).check(), **others)

    for option in (
        click.option(
            "--strict",
            is_flag=True,
            help="Refuse a set with any damage, unreadable shard, split sample or missing column, and list them.",
        ),
        click.option(
            "--allow-missing",
            is_flag=True,
            help="Go on without shards that are missing or cannot be read, where that makes the set smaller.",
        ),
    ):
        with_tolerance = option(with_tolerance)
    return cast(Command, with_tolerance)


def view_options(command: Command) -> Command:
    """How shards are shown, as they are."""
    return _view_options(command, ["samples", "files"])


def tree_options(command: Command) -> Command:
    """How shards are shown, and what of them and with what; the command gets a `Composition` for that."""
    return _view_options(_composition_options(command), ["samples", "files", "classes"])


def _view_options(command: Command, layouts: list[str]) -> Command:
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
            type=click.Choice(layouts),
            default="samples",
            show_default=True,
            help="A directory for each sample, the members as `tar x` writes them, or a directory for each class.",
        ),
    ):
        command = option(command)
    return command


_POLICY = click.Choice(["error", "skip", "empty"])


def _composition_options(command: Command) -> Command:
    @functools.wraps(command)
    def with_composition(**given: Any) -> Any:
        own = {name: given.pop(name) for name in _COMPOSITION}
        return command(**given, composition=composition_of(given["layout"], **own))

    wrapped: Any = with_composition
    for option in (
        click.option(
            "--decode-members",
            is_flag=True,
            help="Show members such as x.json.gz also decoded, as x.json (gz, bz2, xz, zst).",
        ),
        click.option(
            "--associate",
            multiple=True,
            metavar="FILE",
            help="Add columns from FILE (.sqlite[:TABLE], .csv, .tsv, .jsonl) by key, over those in the shards.",
        ),
        click.option(
            "--join",
            multiple=True,
            metavar="SHARDS",
            help="Add the columns of the samples with the same keys in these shards.",
        ),
        click.option(
            "--duplicates",
            type=_POLICY,
            default="error",
            show_default=True,
            help="A key or column is there twice: refuse, leave the sample out, or show it without.",
        ),
        click.option(
            "--missing",
            type=_POLICY,
            default="error",
            show_default=True,
            help="A sample lacks a column, key or class: refuse, leave it out, or show an empty file.",
        ),
        click.option("--ignore-case", is_flag=True, help="Let --columns match in any letter case."),
        click.option(
            "--columns",
            multiple=True,
            metavar="EXT;EXT...",
            help="Show only these: one file for each --columns, the first in the tar of its alternatives.",
        ),
        click.option(
            "--class-digits",
            type=click.IntRange(0, 18),
            metavar="N",
            help="Show classes that are whole numbers with N digits, to sort as numbers do; 0: as they are. "
            " [default: as many as the longest has]",
        ),
        click.option(
            "--class-names",
            type=click.Path(dir_okay=False),
            metavar="FILE",
            help="Names of the classes: one a line for 0, 1, 2 ..., or a JSON list or object.",
        ),
        click.option(
            "--class-from",
            metavar="EXT[:FIELD]",
            help="Where --layout classes finds the class: a column, or a field of a JSON column.  [default: cls]",
        ),
    ):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[no-any-return]  # a command, as it came


_COMPOSITION = (
    *("columns", "ignore_case", "missing", "duplicates", "join", "associate", "decode_members"),
    *("class_from", "class_names", "class_digits"),
)


def composition_of(
    layout: str,
    columns: Sequence[str],
    ignore_case: bool,
    missing: str,
    duplicates: str,
    join: Sequence[str],
    associate: Sequence[str],
    decode_members: bool,
    class_from: str | None,
    class_names: str | None,
    class_digits: int | None,
) -> Composition:
    """The options of a view as `compose` takes them. Raises UsageError."""
    from wdsfs.views.composition import Composition, class_source, columns_of

    own = {"--class-from": class_from, "--class-names": class_names, "--class-digits": class_digits}
    given = [option for option, value in own.items() if value is not None]
    if layout != "classes" and given:
        raise UsageError(f"{given[0]} is for --layout classes")
    extension, field = class_source("cls" if class_from is None else class_from)
    return Composition(
        columns=columns_of(columns),
        ignore_case=ignore_case,
        missing=missing,
        duplicates=duplicates,
        join=tuple(join),
        associate=tuple(associate),
        decode=decode_members,
        classes=layout == "classes",
        class_from=extension,
        class_field=field,
        class_names=class_names,
        class_digits=class_digits,
    )


index_tree_option = click.option(
    "--index-tree",
    is_flag=True,
    help="Also by-index/000/000/000123: a link to each sample by its number in the set, from 0.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")


def view_of(layout: str, names: str, index_tree: bool = False, partial: bool = False) -> View:
    from wdsfs.dataset.tree import View

    if layout != "samples" and index_tree:
        raise UsageError(f"--index-tree is for --layout samples; in --layout {layout} a sample has no directory")
    if layout != "samples" and names == "full":
        raise UsageError(f"--names full is for --layout samples; in --layout {layout} the names are always whole")
    return View(layout, names, index_tree, partial)


def jobs_of(jobs: int | None) -> int:
    from wdsfs.index.process_pool import default_jobs

    return jobs or default_jobs()


def path_of(text: str | None) -> Path | None:
    from pathlib import Path

    return Path(text) if text else None


# --- indexing with progress --------------------------------------------------------------------------------


def build_index(index: Index, stale: Sequence[Shard], jobs: int, quiet: bool = False) -> dict[bytes, str]:
    """Index these shards, showing a bar when somebody watches; returns by path why some cannot be read."""
    if not stale:
        return {}
    with when_interrupted("; what was indexed is kept"):
        return _build_index(index, stale, jobs, quiet)


@contextlib.contextmanager
def when_interrupted(text: str) -> Iterator[None]:
    """What the user is told of an interrupt in the block, behind "interrupted"."""
    meta = click.get_current_context().meta
    meta[INTERRUPTED] = text
    yield
    del meta[INTERRUPTED]  # and not after an exception: it may be the interrupt


def _build_index(index: Index, stale: Sequence[Shard], jobs: int, quiet: bool) -> dict[bytes, str]:
    unreadable: dict[bytes, str] = {}
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from wdsfs.index.store import Summary

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
        members = 0

        def on_done(one: Shard, summary: Summary | None, error: str | None) -> None:
            nonlocal members
            if error is not None:
                unreadable[one.path] = error
            members += summary.members if summary else 0
            elapsed = progress.tasks[task].elapsed or 0
            progress.update(task, advance=1, rate=f"{members / elapsed:,.0f}" if elapsed > 0.1 else "-")

        index.refresh(stale, jobs, on_done)
    return unreadable


# --- the set -----------------------------------------------------------------------------------------------


def make_view(below: ShardSet, quiet: bool) -> dict[bytes, str]:
    """Derive what a view is made of, showing a bar when somebody watches; returns the shards of which it cannot be
    made, by path, and why. Raises ViewError when it is refused."""
    from rich.console import Console
    from rich.progress import Progress

    from wdsfs.errors import ViewError
    from wdsfs.views.view_set import ViewSet

    if not isinstance(below, ViewSet):
        return {}
    console = Console(stderr=True)
    with Progress(console=console, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task("composing", total=len(below))
        refused = below.make(lambda done: progress.update(task, completed=done))
    if refused is not None:
        raise ViewError(refused)
    return below.unmade


def _no_tolerance() -> Tolerance:
    from wdsfs.interop.soundness import Tolerance

    return Tolerance()


@dataclass(frozen=True, slots=True)
class Opening:
    """How a command opens its set: the options that all of them have."""

    index_dir: str | None
    jobs: int | None
    quiet: bool
    tolerance: Tolerance = field(default_factory=_no_tolerance)


@contextlib.contextmanager
def opened(
    shards: Sequence[str],
    selection: Selection,
    opening: Opening,
    composition: Composition | None = None,
    whole: bool = False,
) -> Iterator[ShardSet]:
    """The lower of a set, all of it indexed, shown as `composition` says; without one all shards as they are.

    What is wrong with it is said. `whole`: shards that cannot be read would be missing in what is shown; where
    that is tolerated, they are left out. Raises what `soundness.judge` raises, and ViewError when the view is
    refused.
    """
    from wdsfs.spec.expand import expand

    selection = selection._replace(allow_missing=opening.tolerance.allow_missing)
    with opened_set(expand(shards, *selection), opening, composition, whole) as below:
        yield below


@contextlib.contextmanager
def opened_set(
    shards: Sequence[Shard],
    opening: Opening,
    composition: Composition | None = None,
    whole: bool = False,
    access: Access | None = None,
) -> Iterator[ShardSet]:
    """As `opened`, of shards that are known, reached as `access` says."""
    from wdsfs.dataset.shard_set import ShardSet
    from wdsfs.index.store import open_index
    from wdsfs.interop.soundness import judge
    from wdsfs.views.view_set import Companions, open_set

    companions = None if composition is None else Companions(composition, shards[0].reading)
    index = open_index(path_of(opening.index_dir))
    for notice in index.notices:
        log.warning("%s", notice)
    stale = index.stale([*shards, *(companions.shards if companions else ())])
    unreadable = build_index(index, [one for one, _ in stale], jobs_of(opening.jobs), opening.quiet)
    if whole and opening.tolerance.allow_missing:
        shards = readable(shards, unreadable)
    if composition is None or companions is None:
        below = ShardSet(shards, index, access=access)
    else:
        below = open_set(shards, index, composition, companions)
    try:
        unreadable |= make_view(below, opening.quiet)
        for text in judge(below, unreadable, opening.tolerance, whole):
            log.warning("%s", text)
        yield below
    finally:
        below.close()


def readable(shards: Sequence[Shard], unreadable: Mapping[bytes, str]) -> list[Shard]:
    """The shards without those that cannot be read. Raises UnreadableShard if none is left."""
    from wdsfs.errors import UnreadableShard, several

    found = [one for one in shards if one.path not in unreadable]
    if not found:
        raise UnreadableShard(f"no shard of the set can be read: {several(list(unreadable.values()))}")
    return found


def left_out_text(shards: Sequence[Shard]) -> str:
    """What to say where whole shards are looked at, of which a mount leaves out samples; empty if it does not."""
    keys = sum(len(one.without) for one in shards)
    return f"counted here, too: {counted(keys, 'sample')} excluded by a split file" if keys else ""


# Images, sound and films, by the end of their names: what loaders look for in directories.
_MEDIA = frozenset(
    b"jpg jpeg png webp gif bmp tif tiff ppm pgm pbm avif jxl wav flac mp3 ogg opus m4a mp4 mkv webm mov".split()
)
_LOOKED_AT = 3  # shards


def suffix_hint(below: ShardSet, view: View, writable: bool) -> str | None:
    """What to say of a set of images or sound whose files are called `jpg`, so that loaders do not find them.

    None where there is nothing to say, or nothing known.
    """
    from wdsfs.dataset.indexing import NotIndexed
    from wdsfs.errors import ShardError

    if view.layout != "samples" or view.names == "full":
        return None
    for number in range(min(len(below), _LOOKED_AT)):
        with contextlib.suppress(ShardError, NotIndexed):
            record = below.record(number)
            for extension in record.extension_name.of(range(len(record.extension_name))):
                suffix = extension.lower().rpartition(b".")[2]
                if suffix in _MEDIA:
                    other = "--layout files" if writable else "--layout classes"
                    return f"loaders that look for *.{suffix.decode()} need --names full or {other}"
    return None
