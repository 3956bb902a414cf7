"""The command `ls`: lists a directory of the tree without a mount.

The tree is the one that a mount would show.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from wdsfs.cli.console import (
    Opening,
    index_options,
    index_tree_option,
    json_option,
    opened,
    set_options,
    soundness_options,
    tree_options,
    view_of,
)
from wdsfs.cli.output import is_directory, write_bytes
from wdsfs.errors import WdsfsError
from wdsfs.names import SHARD_SUFFIXES, shown

if TYPE_CHECKING:
    from wdsfs.dataset.tree import Entry, LowerTree, Node
    from wdsfs.interop.soundness import Tolerance
    from wdsfs.spec.expand import Selection
    from wdsfs.views.composition import Composition

log = logging.getLogger("wdsfs")


BATCH = 1000  # entries of a directory that are listed at a time


@click.command()
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
        rows = _walk(tree, node, b"", recursive, failed) if is_directory(node) else [(start, node)]
        for name, child in rows:
            if as_json:
                write_bytes(json.dumps(_describe(name, child)).encode() + b"\n")
                continue
            line = name if null or not on_terminal else os.fsencode(shown(os.fsdecode(name)))
            if long:
                write_bytes(_long_line(child) + b" " + line + end)
            else:
                write_bytes(line + (b"/" if is_directory(child) else b"") + end)
    if failed:
        sys.stdout.flush()
        sys.exit(failed[0].exit_code)


def _walk(
    tree: LowerTree, node: Node, prefix: bytes, recursive: bool, failed: list[WdsfsError]
) -> Iterator[tuple[bytes, Node]]:
    """Yield (path, node) of what is in a directory, in the tree's order, everything below if wanted.

    What cannot be listed below it is told and appended to `failed`; the others follow.
    """
    from wdsfs.dataset.tree import AT_PARENT

    cursor = AT_PARENT
    while True:
        batch = tree.lower.with_index(functools.partial(_batch, tree, node.inode, cursor))
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
