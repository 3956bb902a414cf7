"""The command line: arguments in, tables, lines or JSON out, exit codes.

Imports only what starting takes; each command imports what it works with, so that `wdsfs --help` is there at
once. What a command does is decided elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import logging
import os
import shlex
import signal
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from wdsfs import __version__
from wdsfs.cli import export_commands, overlay_commands, restore_command, status_command
from wdsfs.cli.console import (
    INTERRUPTED,
    Opening,
    build_index,
    bytes_text,
    compressed_options,
    index_options,
    index_tree_option,
    jobs_of,
    json_option,
    left_out_text,
    make_view,
    opened,
    path_of,
    print_table,
    set_options,
    shards_argument,
    soundness_options,
    suffix_hint,
    table_of,
    tree_options,
    trust_option,
    view_of,
)
from wdsfs.errors import UsageError, WdsfsError, counted
from wdsfs.names import SHARD_SUFFIXES, shown, shown_lines

if TYPE_CHECKING:
    from wdsfs.dataset.shard_set import ShardSet
    from wdsfs.dataset.shard_tree import Entry, Node, ShardTree
    from wdsfs.index.store import Index
    from wdsfs.interop.soundness import Tolerance
    from wdsfs.spec.expand import Selection, Shard
    from wdsfs.views.view_record import Composition

log = logging.getLogger("wdsfs")

BATCH = 1000  # entries of a directory that are listed at a time

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


# --- mounting ----------------------------------------------------------------------------------------------


@main.command()
@click.argument("shards", metavar="SHARDS...", nargs=-1)
@set_options
@click.argument("mountpoint", metavar="MOUNTPOINT", required=False)
@tree_options
@index_tree_option
@soundness_options
@click.option("-f", "--foreground", is_flag=True, help="Stay in front and log to the terminal.")
@click.option("-r", "--read-only", is_flag=True, help="The same as -o ro: an overlay is shown, not changed.")
@click.option(
    "-o",
    "options",
    multiple=True,
    metavar="OPT,...",
    help="Mount options: ro, allow_other, uid=, gid=, umask=, fsname=, auto_unmount, nonempty, ...",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 16),
    help="Processes that serve; no effect with --overlay, where it is one.  [default: one per core, 2 to 8]",
)
@click.option(
    "--spin",
    type=click.IntRange(0, 1000),
    default=50,
    show_default=True,
    metavar="MICROSECONDS",
    help="How long a worker looks for the next request before it sleeps: speed for processor time.",
)
@click.option(
    "--readahead",
    type=click.IntRange(4, 16384),
    default=256,
    show_default=True,
    metavar="KIB",
    help="How much of a large file the kernel asks for at a time; only root can change its 128 KiB.",
)
@click.option(
    "--overlay",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Make the tree writable; all changes go to DIR. See also `wdsfs diff` and `wdsfs commit`.",
)
@click.option("--lazy", is_flag=True, help="Mount at once; index each shard when it is first used.")
@index_options
def mount(
    shards: tuple[str, ...],
    selection: Selection,
    mountpoint: str | None,
    layout: str,
    names: str,
    merge: bool,
    index_tree: bool,
    foreground: bool,
    read_only: bool,
    options: tuple[str, ...],
    workers: int | None,
    spin: int,
    readahead: int,
    overlay: str | None,
    lazy: bool,
    index_dir: str | None,
    jobs: int | None,
    quiet: bool,
    composition: Composition,
    tolerance: Tolerance,
) -> None:
    """Mount SHARDS at MOUNTPOINT, read-only unless with --overlay. Returns when the tree is usable.

    \b
    Examples:
      wdsfs mount 'train-{000000..000999}.tar' /mnt/train
      wdsfs mount --layout files -o allow_other shards/ /mnt/train
      wdsfs mount --names full --merge 'a-{0..9}.tar' 'b-*.tar' /mnt/all
      wdsfs mount --layout classes --class-names names.txt 'train-{000..099}.tar' /mnt/train
      wdsfs mount --columns 'jpg;png' --columns cls --associate labels.csv shards/ /mnt/train
    """
    from wdsfs.index.process_pool import default_jobs
    from wdsfs.mount import daemon
    from wdsfs.mount import options as options_module
    from wdsfs.mount import session as mounting

    _refuse_own_options(options)
    if mountpoint is None or not shards:
        raise _incomplete(mountpoint)
    if not mountpoint:
        raise UsageError("the MOUNTPOINT is empty")
    wanted = options_module.MountOptions(
        specs=list(shards),
        selection=selection._replace(allow_missing=tolerance.allow_missing),
        mountpoint=mountpoint,
        view=view_of(layout, names, index_tree, tolerance.allow_missing),
        tolerance=tolerance,
        merge=merge,
        composition=composition,
        index_dir=path_of(index_dir),
        jobs=jobs_of(jobs),
        lazy=lazy,
        overlay=path_of(overlay),
        workers=workers or max(2, min(default_jobs(), 8)),
        spin=spin / 1e6,
        readahead=readahead << 10,
        options=[*options, *["ro"] * read_only],
        foreground=foreground,
    )

    def indexer(index: Index, stale: Sequence[Shard], jobs: int) -> dict[bytes, str]:
        return build_index(index, stale, jobs, quiet)

    def composer(below: ShardSet) -> dict[bytes, str]:
        return make_view(below, quiet)

    def adviser(below: ShardSet) -> str | None:
        return None if quiet else suffix_hint(below, wanted.view, overlay is not None)

    front = mounting.Front(indexer, composer, adviser)
    if foreground:
        code = daemon.guarded(
            lambda: mounting.run(wanted, front, lambda: None, lambda: daemon.notify_systemd("READY=1"))
        )
    else:
        code = daemon.in_background(wanted, front)
    sys.exit(code)


def _refuse_own_options(options: Sequence[str]) -> None:
    """Raises UsageError for `-o layout=files`, which only mount(8) takes, and for `-o layot=files`."""
    from wdsfs.mount.options import known_options
    from wdsfs.names import closest

    own = {name[2:] for param in mount.params for name in param.opts if name.startswith("--")}
    known = {name.rstrip("=") for name in known_options()}
    for option in ",".join(options).split(","):
        name, equals, value = option.partition("=")
        dashed = name.replace("_", "-")
        if dashed in own:
            typed = f"--{dashed}" + (f" {shlex.quote(value)}" if equals else "")
            raise UsageError(f"-o {option}: it is an option of its own here: {typed}")
        meant = closest(dashed, sorted(own | known)) if name not in known else None
        if meant in own:
            raise UsageError(f"-o {option}: no such option; did you mean --{meant}?")


def _incomplete(given: str | None) -> UsageError:
    """What to say of `wdsfs mount` with one argument, or with none."""
    from wdsfs.spec.expand import names_a_shard

    if given is None:
        return UsageError("mount needs SHARDS and a MOUNTPOINT: wdsfs mount SHARDS... MOUNTPOINT")
    quoted = shlex.quote(given)
    if given.endswith(tuple(map(os.fsdecode, SHARD_SUFFIXES))) or names_a_shard(given):
        return UsageError(f"the MOUNTPOINT is missing, an empty directory: wdsfs mount {quoted} MOUNTPOINT")
    return UsageError(f"SHARDS are missing, only a MOUNTPOINT is given: wdsfs mount SHARDS... {quoted}")


@main.command()
@click.argument("mountpoints", metavar="MOUNTPOINT...", nargs=-1)
@click.option(
    "-a", "--all", "everything", is_flag=True, help="End every mount that `wdsfs status` shows as yours."
)
@click.option("-l", "--lazy", is_flag=True, help="Detach now, end when the last user is gone.")
def umount(mountpoints: tuple[str, ...], everything: bool, lazy: bool) -> None:
    """End the mount at MOUNTPOINT, dead ones included. Returns when its daemon is gone.

    \b
    Examples:
      wdsfs umount /mnt/train
      wdsfs umount --all
    """
    from wdsfs.errors import MountError
    from wdsfs.mount.unmount import unmount
    from wdsfs.status import control

    if everything == bool(mountpoints):
        raise UsageError("name a MOUNTPOINT, or --all" if not everything else "--all takes no MOUNTPOINT")
    if everything:  # the latest first: it may lie in another one
        found = sorted(control.daemons(), key=lambda daemon: daemon.started, reverse=True)
        mountpoints = tuple(daemon.mountpoint for daemon in found)
        if not found:
            click.echo("no wdsfs mounts")
    code = 0
    for mountpoint in mountpoints:
        try:
            unmount(mountpoint, lazy)
        except MountError as error:  # the others are ended all the same
            log.error("%s", error)
            code = error.exit_code
        else:
            if everything:
                click.echo(shown(mountpoint))
    sys.exit(code)


# --- browsing without a mount ------------------------------------------------------------------------------


@main.command("index")
@shards_argument
@set_options
@index_options
@click.option("--prune", is_flag=True, help="Also drop what is kept of shards and label files that are gone.")
@json_option
def index_command(
    shards: tuple[str, ...],
    selection: Selection,
    index_dir: str | None,
    jobs: int | None,
    quiet: bool,
    prune: bool,
    as_json: bool,
) -> None:
    """Build or refresh the index of SHARDS without mounting. Only what has changed is read.

    \b
    Example:
      wdsfs index --jobs 8 'train-{000000..000999}.tar'
    """
    import time

    from wdsfs.dataset.shard_set import ShardSet
    from wdsfs.errors import IndexUnusable
    from wdsfs.index.store import open_index
    from wdsfs.interop.soundness import Tolerance, judge
    from wdsfs.spec.expand import expand
    from wdsfs.views import label_files

    since = time.monotonic()
    found = expand(shards, *selection)
    index = open_index(path_of(index_dir))
    for notice in index.notices:
        log.warning("%s", notice)
    stale = [one for one, _ in index.stale(found)]
    unreadable = build_index(index, stale, jobs_of(jobs), quiet)
    for text in [*judge(ShardSet(found, index), unreadable, Tolerance(), whole=False), *index.miscounted(found)]:
        log.warning("%s", text)
    pruned = index.prune() + label_files.prune(index.label_tables) if prune else 0
    summaries = [index.summary(one.key) for one in found]
    samples = sum(one.samples for one in summaries if one)
    members = sum(one.members for one in summaries if one)
    report = {
        "shards": len(found),
        "rebuilt": len(stale),
        "unreadable": len(unreadable),
        "damaged": sum(bool(one.problems) for one in summaries if one),
        "samples": samples,
        "members": members,
        "pruned": pruned,
        "seconds": round(time.monotonic() - since, 3),
        "index": str(index.directory),
    }
    kept = not index.temporary
    index.close()
    if not kept:
        raise IndexUnusable("nothing is kept: the index was a temporary one; see above, or set --index-dir")
    if as_json:
        click.echo(json.dumps(report))
    else:
        click.echo(
            f"{_contents(len(found), samples, members)}; "
            f"{report['rebuilt']} indexed in {report['seconds']} s\nkept in {report['index']}"
        )
    if report["unreadable"]:
        sys.exit(3)


def _output(data: bytes) -> None:
    if sys.stdout is None:
        raise UsageError("standard output is closed")
    sys.stdout.buffer.write(data)


@main.command()
@click.argument("arguments", metavar="SHARDS... [PATH]", nargs=-1, required=True)
@set_options
@tree_options
@index_tree_option
@click.option("-l", "--long", is_flag=True, help="Also type, size and time.")
@click.option("-R", "--recursive", is_flag=True, help="Everything below, as paths.")
@click.option("-0", "--null", is_flag=True, help="End each name with a NUL byte.")
@json_option
@soundness_options
@index_options
def ls(
    arguments: tuple[str, ...],
    selection: Selection,
    layout: str,
    names: str,
    merge: bool,
    index_tree: bool,
    long: bool,
    recursive: bool,
    null: bool,
    as_json: bool,
    index_dir: str | None,
    jobs: int | None,
    quiet: bool,
    composition: Composition,
    tolerance: Tolerance,
) -> None:
    """List a directory of the tree without mounting it.

    The last argument is a PATH below the mount when it names no shard.

    \b
    Examples:
      wdsfs ls 'train-{000000..000009}.tar'
      wdsfs ls train-000000.tar train-000000/images17
      wdsfs ls -R --layout files train-000000.tar
    """
    from wdsfs.dataset.merged_tree import is_merged
    from wdsfs.dataset.numbered_tree import check_name, make_numbered
    from wdsfs.errors import EntryError, MissingShard
    from wdsfs.spec.expand import split_path

    shards, path = split_path(arguments)
    end = b"\0" if null else b"\n"
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    failed: list[WdsfsError] = []
    view = view_of(layout, names, index_tree, tolerance.allow_missing)
    opening = Opening(index_dir, jobs, quiet, tolerance)
    with opened(shards, selection, opening, composition, is_merged(view, merge)) as below:
        check_name(below.shards, view, merge)
        tree = make_numbered(below, view, merge)
        start = os.fsencode(path or "").strip(b"/")
        try:
            node = below.with_index(lambda: tree.resolve(start))
        except EntryError as error:
            if path is None or not os.fsencode(path).endswith(SHARD_SUFFIXES):
                raise
            raise MissingShard(f"no such shard: {path!r}; nor is it a path in the tree ({error})") from None
        rows = _walk(tree, node, b"", recursive, failed) if _is_directory(node) else [(start, node)]
        for name, child in rows:
            if as_json:
                _output(json.dumps(_describe(name, child)).encode() + b"\n")
                continue
            line = name if null or not on_terminal else os.fsencode(shown(os.fsdecode(name)))
            if long:
                _output(_long_line(child) + b" " + line + end)
            else:
                _output(line + (b"/" if _is_directory(child) else b"") + end)
    if failed:
        sys.stdout.flush()
        sys.exit(failed[0].exit_code)


def _is_directory(node: Node) -> bool:
    import stat

    return stat.S_ISDIR(node.mode)


def _walk(
    tree: ShardTree, node: Node, prefix: bytes, recursive: bool, failed: list[WdsfsError]
) -> Iterator[tuple[bytes, Node]]:
    """Yield (path, node) of what is in a directory, in the tree's order, everything below if wanted.

    What cannot be listed below it is told and appended to `failed`; the others follow.
    """
    from wdsfs.dataset.shard_tree import AT_PARENT

    cursor = AT_PARENT
    while True:
        batch = tree.lower.with_index(functools.partial(_batch, tree, node.inode, cursor))
        for entry in batch:
            yield prefix + entry.name, entry.node
            if recursive and _is_directory(entry.node):
                try:
                    yield from _walk(tree, entry.node, prefix + entry.name + b"/", recursive, failed)
                except WdsfsError as error:
                    log.error("%s", error)
                    failed.append(error)
        if len(batch) < BATCH:
            return
        cursor = batch[-1].cursor


def _batch(tree: ShardTree, inode: int, cursor: int) -> list[Entry]:
    return list(itertools.islice(tree.listing(inode, cursor), BATCH))


def _describe(name: bytes, node: Node) -> dict[str, Any]:
    return {
        "name": name.decode("utf-8", "surrogateescape"),
        "directory": _is_directory(node),
        "size": node.size,
        "mtime_ns": node.mtime_ns,
        "inode": node.inode,
    }


def _long_line(node: Node) -> bytes:
    import stat
    from datetime import datetime

    try:
        when = datetime.fromtimestamp(node.mtime_ns // 10**9).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        when = str(node.mtime_ns // 10**9)
    return f"{stat.filemode(node.mode)} {node.size:>12} {when}".encode()


@main.command()
@click.argument("arguments", metavar="SHARDS... PATH", nargs=-1, required=True)
@set_options
@tree_options
@soundness_options
@index_options
def cat(
    arguments: tuple[str, ...],
    selection: Selection,
    layout: str,
    names: str,
    merge: bool,
    index_dir: str | None,
    jobs: int | None,
    quiet: bool,
    composition: Composition,
    tolerance: Tolerance,
) -> None:
    """Write a file of the tree to standard output without mounting it.

    \b
    Example:
      wdsfs cat 'train-{000000..000009}.tar' train-000003/images17/image194/json
    """
    import stat

    from wdsfs.dataset import shard_set
    from wdsfs.dataset.merged_tree import is_merged, make_tree
    from wdsfs.errors import IsADirectory, NoSuchEntry

    *shards, path = arguments
    if not shards:
        raise UsageError("cat needs SHARDS and the PATH of a file")
    view = view_of(layout, names, partial=tolerance.allow_missing)
    opening = Opening(index_dir, jobs, quiet, tolerance)
    with opened(shards, selection, opening, composition, is_merged(view, merge)) as below:
        tree = make_tree(below, view, merge)
        node = below.with_index(lambda: tree.resolve(os.fsencode(path).strip(b"/")))
        if _is_directory(node):
            raise IsADirectory(f"{path} is a directory; see: wdsfs ls")
        if stat.S_ISLNK(node.mode):
            target = os.fsdecode(below.with_index(lambda: tree.readlink(node.inode)))
            raise NoSuchEntry(f"{path} is a symbolic link to {target!r}: name the file itself")
        content = below.with_index(lambda: tree.content(node.inode))
        for offset in range(0, content.size, 1 << 20):
            _output(shard_set.read(content, offset, 1 << 20))


@main.command()
@shards_argument
@set_options
@json_option
@soundness_options
@index_options
def info(
    shards: tuple[str, ...],
    selection: Selection,
    as_json: bool,
    index_dir: str | None,
    jobs: int | None,
    quiet: bool,
    tolerance: Tolerance,
) -> None:
    """Count shards, samples, members and bytes, and the sizes of each extension.

    \b
    Example:
      wdsfs info 'train-{000000..000999}.tar'
    """
    from wdsfs.dataset.statistics import gather
    from wdsfs.views.view_record import Composition

    opening = Opening(index_dir, jobs, quiet, tolerance)
    with opened(shards, selection, opening, Composition(), whole=True) as below:
        report = gather(below)
    if as_json:
        click.echo(json.dumps(report))
        return
    click.echo(
        f"{_contents(report['shards'], report['samples'], report['members'])}, "
        f"{bytes_text(report['bytes'])} of content in {bytes_text(report['shard_bytes'])} of shards"
    )
    if report["damaged"]:
        verb = "is" if report["damaged"] == 1 else "are"
        click.echo(f"{counted(report['damaged'], 'shard')} {verb} damaged; see: wdsfs check")
    if report["apart"] or report["joined"]:
        told = f"{counted(report['apart'], 'sample')} with members that lie apart"
        click.echo(f"{told}, {counted(report['joined'], 'shard')} of several tars; a commit puts that right")
    table = table_of("extension", "files", "bytes", "smallest", "median", "90 %", "largest")
    for row in report["extensions"]:
        sizes = [row[key] for key in ("bytes", "min", "median", "p90", "max")]
        table.add_row(shown(row["extension"]) or "(none)", f"{row['count']:,}", *map(bytes_text, sizes))
    print_table(table)


@main.command()
@shards_argument
@set_options
@click.option("-j", "--jobs", type=click.IntRange(1), help="Processes that read shards.  [default: one per core]")
@click.option("--notes", is_flag=True, help="Also what is harmless: directories, __meta__ members.")
@compressed_options
@trust_option
@json_option
def check(shards: tuple[str, ...], selection: Selection, jobs: int | None, notes: bool, as_json: bool) -> None:
    """Look for what readers of the format trip over: one line per finding.

    Damaged and truncated shards, samples that are split or whose members are not side by side, extensions
    that occur twice, members in no sample, samples without an extension that the others have, keys in
    several shards, other numbers of samples than an index says, indexes of DALI and Energon beside a shard that
    are not of it. Exit code 0: nothing found; 1: findings; 3: a shard could not be read.

    \b
    Example:
      wdsfs check 'train-{000000..000999}.tar'
    """
    from wdsfs.errors import ShardError
    from wdsfs.index import process_pool
    from wdsfs.interop.lint import Judge, LintFinding, lint
    from wdsfs.spec.expand import expand

    judge = Judge()
    counts = {"findings": 0, "notes": 0, "unreadable": 0}
    found = expand(shards, *selection)

    def tell(path: str, finding: LintFinding) -> None:
        counts["notes" if finding.is_note else "findings"] += 1
        if finding.is_note and not notes:
            return
        if as_json:
            click.echo(json.dumps({"shard": path, **finding._asdict()}))
            return
        click.echo(shown(finding.line(path)))

    look = functools.partial(lint, reading=selection.reading)
    for one, result in process_pool.each(look, found, jobs_of(jobs)):
        path = os.fsdecode(one.path)
        if isinstance(result, ShardError):
            counts["unreadable"] += 1
            tell(path, LintFinding("unreadable", -1, "", str(result)))
            continue
        for finding in judge.add(path, result, one.miscount(result.samples)):
            tell(path, finding)
    for path, finding in [*judge.shared_keys(), *judge.missing()]:
        tell(path, finding)
    summary = (
        f"{_contents(len(found), judge.samples, judge.members)}: "
        f"{counted(counts['findings'], 'finding')}, {counted(counts['notes'], 'note')}"
        + (" (--notes shows them)" if counts["notes"] and not notes else "")
    )
    click.echo(summary, err=True)
    if left_out := left_out_text(found):
        click.echo(left_out, err=True)
    sys.exit(3 if counts["unreadable"] else 1 if counts["findings"] else 0)


main.add_command(export_commands.export)
main.add_command(overlay_commands.diff)
main.add_command(overlay_commands.commit)
main.add_command(restore_command.restore)


# --- about mounts and the machine --------------------------------------------------------------------------


main.add_command(status_command.status)


@main.command()
@click.argument("mountpoint", required=False)
@click.option("--index-dir", type=click.Path(file_okay=False), envvar="WDSFS_INDEX_DIR", help="Look at this one.")
@json_option
def doctor(mountpoint: str | None, index_dir: str | None, as_json: bool) -> None:
    """Tell whether this machine can mount, and what to type if not.

    \b
    Example:
      wdsfs doctor /mnt/train
    """
    from dataclasses import asdict

    from wdsfs.cli.doctor import diagnose

    findings = diagnose(mountpoint, index_dir)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings]))
    else:
        for finding in findings:
            click.secho(
                f"{finding.level:<5}",
                nl=False,
                fg={"ok": "green", "warn": "yellow", "fail": "red"}[finding.level],
            )
            click.echo(shown(f"{finding.name}: {finding.detail}"))
            if finding.remedy:
                click.echo(shown(f"      -> {finding.remedy}"))
    sys.exit(5 if any(finding.level == "fail" for finding in findings) else 0)


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


# --- showing -----------------------------------------------------------------------------------------------


def _contents(shards: int, samples: int, members: int) -> str:
    return ", ".join((counted(shards, "shard"), counted(samples, "sample"), counted(members, "member")))
