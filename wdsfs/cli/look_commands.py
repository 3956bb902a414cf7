"""The commands that look at shards without a mount: `ls`, `cat`, `info`, and `view`, the pages in a browser."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from wdsfs import wings
from wdsfs.cli.opening_options import executor_opening_options, opening_options
from wdsfs.cli.option_kinds import (
    Command,
    flag,
    gather_options,
    json_option,
    offer_mounts_or_paths,
    offer_paths,
    shards_argument,
)
from wdsfs.cli.output import (
    contents_text,
    flush,
    is_directory,
    print_table,
    say,
    table_of,
    write_bytes,
    write_json,
)
from wdsfs.cli.process import ended_in_order
from wdsfs.cli.view_options import (
    class_names_option,
    composition_options,
    keys_option,
    numbered_tree_options,
    set_options,
    tree_options,
)
from wdsfs.errors import UsageError, WdsfsError, bytes_text, counted, several
from wdsfs.names import SHARD_SUFFIXES_OF_ANY_CASE, shown

if TYPE_CHECKING:
    from wdsfs.spec.energon_dataset import DatasetPart
    from wdsfs.tree.composition import Composition
    from wdsfs.tree.set_options import Opening, Selection, TreeOptions
    from wdsfs.tree.tree import LowerTree, Node

log = logging.getLogger("wdsfs")

# --- ls, cat ------------------------------------------------------------------------------------------------


class Listing(NamedTuple):
    """The options of `ls` for its output."""

    long: bool
    recursive: bool
    null: bool
    as_json: bool

    def line(self, name: bytes, node: Node, on_terminal: bool) -> bytes:
        if self.as_json:
            return json.dumps(_describe(name, node)).encode() + b"\n"
        end = b"\0" if self.null else b"\n"
        text = os.fsencode(shown(os.fsdecode(name))) if on_terminal and not self.null else name
        if self.long:
            return _long_line(node) + b" " + text + end
        return text + (b"/" if is_directory(node) else b"") + end


listing_options = gather_options(
    "listing",
    Listing,
    {
        "long": flag("-l", "--long", "Also show type, size and time."),
        "recursive": flag("-R", "--recursive", "List all directories below, as paths."),
        "null": flag("-0", "--null", "End each name with a NUL byte."),
        "as_json": json_option,
    },
)


@click.command(cls=Command)
@click.argument("arguments", metavar="SHARDS... [PATH]", nargs=-1, required=True, shell_complete=offer_paths)
@set_options
@numbered_tree_options
@listing_options
@opening_options
def ls(
    arguments: tuple[str, ...], selection: Selection, tree: TreeOptions, listing: Listing, opening: Opening
) -> None:
    """List a directory of the tree without mounting it.

    If the last argument names no shard, it is a PATH in the tree.

    \b
    Examples:
      wdsfs ls 'train-{000000..000009}.tar'
      wdsfs ls train-000000.tar train-000000/images17
      wdsfs ls -R --layout files train-000000.tar
    """
    from wdsfs.spec.expand import split_path
    from wdsfs.tree.numbered_tree import check_name, make_numbered
    from wdsfs.tree.opening import open_typed_set, walk_tree

    shards, path = split_path(arguments)
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    failures: list[WdsfsError] = []
    view = tree.view(partial=opening.tolerance.allow_missing)
    with open_typed_set(shards, selection, opening, tree.composition, whole=view.merged) as below:
        check_name(below.shards, view)
        shown_tree = make_numbered(below, view)
        start, node = _start(shown_tree, path)
        entries = walk_tree(shown_tree, node, b"", listing.recursive, failures)
        for name, child in entries if is_directory(node) else [(start, node)]:
            write_bytes(listing.line(name, child, on_terminal))
    if failures:
        flush()
        sys.exit(failures[0].exit_code)


def _start(tree: LowerTree, path: str | None) -> tuple[bytes, Node]:
    """Return the name and the node of the listed directory. Raises EntryError, MissingShard, ShardErrors."""
    from wdsfs.errors import EntryError, MissingShard
    from wdsfs.tree.opening import resolve_path

    start = os.fsencode(path or "").strip(b"/")
    try:
        return start, resolve_path(tree, start)
    except EntryError as error:
        if path is None or not os.fsencode(path).endswith(SHARD_SUFFIXES_OF_ANY_CASE):
            raise
        raise MissingShard(f"no such shard: {path!r}; the tree has no such path either ({error})") from None


def _describe(name: bytes, node: Node) -> dict[str, Any]:
    return {
        "name": name.decode("utf-8", "surrogateescape"),
        "directory": is_directory(node),
        "size": node.size,
        "mtime_ns": node.mtime_ns,
        "inode": node.inode,
    }


def _long_line(node: Node) -> bytes:
    from datetime import datetime

    try:
        when = datetime.fromtimestamp(node.mtime_ns // 10**9).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        when = str(node.mtime_ns // 10**9)
    return f"{stat.filemode(node.mode)} {node.size:>12} {when}".encode()


@click.command(cls=Command)
@click.argument("arguments", metavar="SHARDS... PATH", nargs=-1, required=True, shell_complete=offer_paths)
@set_options
@tree_options
@opening_options
def cat(arguments: tuple[str, ...], selection: Selection, tree: TreeOptions, opening: Opening) -> None:
    """Write a file of the tree to standard output without mounting it.

    \b
    Example:
      wdsfs cat 'train-{000000..000009}.tar' train-000003/images17/image194/json
    """
    from wdsfs.errors import IsADirectory, NoSuchEntry
    from wdsfs.tree import content as content_module
    from wdsfs.tree.indexing import indexed
    from wdsfs.tree.merged_tree import make_tree
    from wdsfs.tree.opening import open_typed_set, resolve_path

    *shards, path = arguments
    if not shards:
        raise UsageError("cat needs SHARDS and the PATH of a file")
    view = tree.view(partial=opening.tolerance.allow_missing)
    with open_typed_set(shards, selection, opening, tree.composition, whole=view.merged) as below:
        shown_tree = make_tree(below, view)
        node = resolve_path(shown_tree, os.fsencode(path).strip(b"/"))
        if is_directory(node):
            raise IsADirectory(f"{path} is a directory; list it with: wdsfs ls")
        if stat.S_ISLNK(node.mode):
            target = os.fsdecode(indexed(shown_tree.readlink, node.inode))
            raise NoSuchEntry(f"{path} is a symbolic link to {target!r}: name the file itself")
        content = indexed(shown_tree.content, node.inode)
        for offset in range(0, content.size, 1 << 20):
            write_bytes(content_module.read(content, offset, 1 << 20))


# --- info ---------------------------------------------------------------------------------------------------


@click.command(cls=Command)
@shards_argument
@set_options
@json_option
@executor_opening_options
@keys_option
def info(shards: tuple[str, ...], selection: Selection, as_json: bool, opening: Opening, keys: str | None) -> None:
    """Count shards, samples, members and bytes, and the sizes of each extension.

    \b
    Example:
      wdsfs info 'train-{000000..000999}.tar'
    """
    from wdsfs.spec import energon_dataset
    from wdsfs.tree.composition import Composition
    from wdsfs.tree.opening import open_typed_set
    from wdsfs.tree.statistics import gather

    with open_typed_set(shards, selection, opening, Composition(keys=keys), whole=True) as below:
        report = gather(below)
    parts = [part for spec in shards for part in energon_dataset.parts_of(spec, selection.split)]
    if as_json:
        write_json(report | ({"parts": [part.as_json() for part in parts]} if parts else {}))
    else:
        _show_counts(report)
        _show_parts(parts)


def _show_parts(parts: Sequence[DatasetPart]) -> None:
    """Print the datasets of a metadataset, with their weights."""
    if parts:
        table = table_of("split", "dataset", "part", "weight")
        for part in parts:
            table.add_row(part.of, part.path, part.split, part.weight)
        print_table(table)


def _show_counts(report: dict[str, Any]) -> None:
    say(
        f"{contents_text(report['shards'], report['samples'], report['members'])}, "
        f"{bytes_text(report['bytes'])} of content in {bytes_text(report['shard_bytes'])} of shards"
    )
    if report["damaged"]:
        verb = "is" if report["damaged"] == 1 else "are"
        say(f"{counted(report['damaged'], 'shard')} {verb} damaged; see: wdsfs check")
    if report["apart"] or report["joined"]:
        samples = f"{counted(report['apart'], 'sample')} with members that lie apart"
        say(f"{samples}, {counted(report['joined'], 'shard')} of several tars; a commit puts that right")
    table = table_of("extension", "files", "bytes", "smallest", "median", "90 %", "largest")
    for row in report["extensions"]:
        sizes = [row[key] for key in ("bytes", "min", "median", "p90", "max")]
        table.add_row(shown(row["extension"]) or "(none)", f"{row['count']:,}", *map(bytes_text, sizes))
    print_table(table)
    if report["more_extensions"]:
        say(f"and {counted(report['more_extensions'], 'more extension')}")


# --- view ---------------------------------------------------------------------------------------------------

_NEEDED = ("duckdb", "jinja2", "PIL", "pyarrow", "starlette", "tinytag", "uvicorn")


@click.command(cls=Command)
@click.argument(
    "sources", metavar="SHARDS...|MOUNT", nargs=-1, required=True, shell_complete=offer_mounts_or_paths
)
@set_options
@composition_options
@class_names_option
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Port on 127.0.0.1.  [default: a free port]"
)
@click.option("--browser/--no-browser", default=True, help="Open the page in the browser, if there is a desktop.")
@opening_options
def view(
    sources: tuple[str, ...],
    selection: Selection,
    composition: Composition,
    class_names: str | None,
    port: int,
    browser: bool,
    opening: Opening,
) -> None:
    """Look at a set in the browser: samples with thumbnails, search, plots, problems.

    Only this machine serves the page, at a secret address, until you press Ctrl-C.

    \b
    Examples:
      wdsfs view 'train-{000000..000999}.tar'
      wdsfs view /mnt/train
    \f

    The pages change nothing. To change a sample, use a writable mount; the page of the sample names its path.
    `view` needs the libraries of the extra `view`. If they are missing, it names the command that installs them.
    """
    wings.load("pages")
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        from wdsfs.wings import install_command

        raise UsageError(f"the page needs {several(missing)}; install them with: {install_command('view')}")
    from wdsfs.mount import mount_search
    from wdsfs.pages.server import listen, serve
    from wdsfs.pages.shown_set import open_mount, open_shards
    from wdsfs.pages.site import Site

    mount = mount_search.find_viewed(sources)
    if mount is None:
        opened = open_shards(sources, selection, composition, opening, class_names)
    elif selection.arguments or not composition.is_plain or class_names:
        raise UsageError("options of the set are for SHARDS; leave them out for a mount")
    else:
        opened = open_mount(mount, opening)
    with (
        ended_in_order(),
        opened as subject,
        contextlib.closing(listen(port)) as listening,
        _launcher(browser) as launch,
    ):
        title = several([os.path.basename(source.rstrip("/")) or source for source in sources])
        with contextlib.closing(Site(subject, title)) as site:
            serve(site, listening, launch)


@contextlib.contextmanager
def _launcher(browser: bool) -> Iterator[Callable[[str], None]]:
    """Yield the function that prints the address. With `browser` it also opens the page, if there is a desktop."""
    with contextlib.ExitStack() as stack:

        def launch(address: str) -> None:
            say(address)
            log.info("serving on this machine until Ctrl-C")
            if browser and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
                import webbrowser

                from wdsfs.pages.server import page_leading_to

                webbrowser.open(f"file://{stack.enter_context(page_leading_to(address))}")

        yield launch
