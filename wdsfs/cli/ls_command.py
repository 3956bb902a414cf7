"""The command `ls`: lists a directory of the tree without a mount.

The tree is the one that a mount would show.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from wdsfs.cli import completion
from wdsfs.cli.opening import opened, resolved
from wdsfs.cli.options import Opening, handing_over, json_option, opening_options, set_options, soundness_options
from wdsfs.cli.output import is_directory, write_bytes
from wdsfs.cli.tree_options import TreeOptions, numbered_tree_options
from wdsfs.errors import WdsfsError
from wdsfs.names import SHARD_SUFFIXES, shown

if TYPE_CHECKING:
    from wdsfs.spec.selection import Selection
    from wdsfs.tree.tree import Entry, LowerTree, Node

log = logging.getLogger("wdsfs")

BATCH = 1000  # entries of a directory that are listed at a time


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


listing_options = handing_over(
    "listing",
    Listing,
    {
        "long": click.option("-l", "--long", is_flag=True, help="Also type, size and time."),
        "recursive": click.option("-R", "--recursive", is_flag=True, help="Everything below, as paths."),
        "null": click.option("-0", "--null", is_flag=True, help="End each name with a NUL byte."),
        "as_json": json_option,
    },
)


@click.command()
@click.argument("arguments", metavar="SHARDS... [PATH]", nargs=-1, required=True, shell_complete=completion.paths)
@set_options
@numbered_tree_options
@listing_options
@soundness_options
@opening_options
def ls(
    arguments: tuple[str, ...], selection: Selection, tree: TreeOptions, listing: Listing, opening: Opening
) -> None:
    """List a directory of the tree without mounting it.

    The last argument is a PATH below the mount when it names no shard.

    \b
    Examples:
      wdsfs ls 'train-{000000..000009}.tar'
      wdsfs ls train-000000.tar train-000000/images17
      wdsfs ls -R --layout files train-000000.tar
    """
    from wdsfs.spec.expand import split_path
    from wdsfs.tree.merged_tree import is_merged
    from wdsfs.tree.numbered_tree import check_name, make_numbered

    shards, path = split_path(arguments)
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    failed: list[WdsfsError] = []
    view = tree.view(opening.tolerance.allow_missing)
    with opened(shards, selection, opening, tree.composition, is_merged(view, tree.merge)) as below:
        check_name(below.shards, view, tree.merge)
        shown_tree = make_numbered(below, view, tree.merge)
        start, node = _start(shown_tree, path)
        walk = _walk(shown_tree, node, b"", listing.recursive, failed)
        for name, child in walk if is_directory(node) else [(start, node)]:
            write_bytes(listing.line(name, child, on_terminal))
    if failed:
        sys.stdout.flush()
        sys.exit(failed[0].exit_code)


def _start(tree: LowerTree, path: str | None) -> tuple[bytes, Node]:
    """Return where the listing starts, as a name and a node. Raises EntryError, MissingShard, ShardErrors."""
    from wdsfs.errors import EntryError, MissingShard

    start = os.fsencode(path or "").strip(b"/")
    try:
        return start, resolved(tree, start)
    except EntryError as error:
        if path is None or not os.fsencode(path).endswith(SHARD_SUFFIXES):
            raise
        raise MissingShard(f"no such shard: {path!r}; nor is it a path in the tree ({error})") from None


def _walk(
    tree: LowerTree, node: Node, prefix: bytes, recursive: bool, failed: list[WdsfsError]
) -> Iterator[tuple[bytes, Node]]:
    """Yield (path, node) of the entries of a directory, in the tree's order; with `recursive` of everything below.

    An error of a directory below it is logged and appended to `failed`; the listing goes on.
    """
    from wdsfs.tree.indexing import indexed
    from wdsfs.tree.tree import AT_PARENT

    cursor = AT_PARENT
    while True:
        batch = indexed(_batch, tree, node.inode, cursor)
        for entry in batch:
            yield prefix + entry.name, entry.node
            if recursive and is_directory(entry.node):
                try:
                    yield from _walk(tree, entry.node, prefix + entry.name + b"/", recursive, failed)
                except WdsfsError as error:
                    log.error("%s", error)
                    failed.append(error)
        if len(batch) < BATCH:
            return
        cursor = batch[-1].cursor


def _batch(tree: LowerTree, inode: int, cursor: int) -> list[Entry]:
    return list(itertools.islice(tree.listing(inode, cursor), BATCH))


def _describe(name: bytes, node: Node) -> dict[str, Any]:
    return {
        "name": name.decode("utf-8", "surrogateescape"),
        "directory": is_directory(node),
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
