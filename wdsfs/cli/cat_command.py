"""The command `cat`: writes a file of the tree to standard output, without a mount."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from wdsfs.cli.console import (
    Opening,
    index_options,
    opened,
    set_options,
    soundness_options,
    tree_options,
    view_of,
)
from wdsfs.cli.output import is_directory, write_bytes
from wdsfs.errors import UsageError

if TYPE_CHECKING:
    from wdsfs.interop.soundness import Tolerance
    from wdsfs.spec.expand import Selection
    from wdsfs.views.composition import Composition


@click.command()
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

    from wdsfs.dataset import content as content_module
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
        if is_directory(node):
            raise IsADirectory(f"{path} is a directory; see: wdsfs ls")
        if stat.S_ISLNK(node.mode):
            target = os.fsdecode(below.with_index(lambda: tree.readlink(node.inode)))
            raise NoSuchEntry(f"{path} is a symbolic link to {target!r}: name the file itself")
        content = below.with_index(lambda: tree.content(node.inode))
        for offset in range(0, content.size, 1 << 20):
            write_bytes(content_module.read(content, offset, 1 << 20))
