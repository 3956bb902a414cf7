"""The command `cat`: writes a file of the tree to standard output, without a mount."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from wdsfs.cli import completion
from wdsfs.cli.opening import opened, resolved
from wdsfs.cli.options import Opening, opening_options, set_options, soundness_options
from wdsfs.cli.output import is_directory, write_bytes
from wdsfs.cli.tree_options import TreeOptions, tree_options
from wdsfs.errors import UsageError

if TYPE_CHECKING:
    from wdsfs.spec.selection import Selection


@click.command()
@click.argument("arguments", metavar="SHARDS... PATH", nargs=-1, required=True, shell_complete=completion.paths)
@set_options
@tree_options
@soundness_options
@opening_options
def cat(
    arguments: tuple[str, ...],
    selection: Selection,
    tree: TreeOptions,
    opening: Opening,
) -> None:
    """Write a file of the tree to standard output without mounting it.

    \b
    Example:
      wdsfs cat 'train-{000000..000009}.tar' train-000003/images17/image194/json
    """
    import stat

    from wdsfs.errors import IsADirectory, NoSuchEntry
    from wdsfs.tree import content as content_module
    from wdsfs.tree.indexing import indexed
    from wdsfs.tree.merged_tree import is_merged, make_tree

    *shards, path = arguments
    if not shards:
        raise UsageError("cat needs SHARDS and the PATH of a file")
    view = tree.view(opening.tolerance.allow_missing)
    with opened(shards, selection, opening, tree.composition, is_merged(view, tree.merge)) as below:
        shown = make_tree(below, view, tree.merge)
        node = resolved(shown, os.fsencode(path).strip(b"/"))
        if is_directory(node):
            raise IsADirectory(f"{path} is a directory; see: wdsfs ls")
        if stat.S_ISLNK(node.mode):
            target = os.fsdecode(indexed(shown.readlink, node.inode))
            raise NoSuchEntry(f"{path} is a symbolic link to {target!r}: name the file itself")
        content = indexed(shown.content, node.inode)
        for offset in range(0, content.size, 1 << 20):
            write_bytes(content_module.read(content, offset, 1 << 20))
