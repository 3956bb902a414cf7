"""Uppers made by hand, and the trees that they lie over."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from wdsfs.index.store import open_index
from wdsfs.names import PLAIN, Reading
from wdsfs.overlay.overlay_directory import OverlayDirectory
from wdsfs.packing import upper_walk
from wdsfs.packing.diff import Changes, changes_of
from wdsfs.spec.expand import expand
from wdsfs.tree.merged_tree import make_tree
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.tree import LowerTree, View

NO_RULES = upper_walk.Rules()
WHITEOUT, OPAQUE = object(), object()  # in a description of an upper: a name that is gone; see `write_upper`


def whiteout(path: Path) -> None:
    """As the kernel makes one, or in its other form where device nodes are not allowed."""
    try:
        os.mknod(path, 0o020000)
    except PermissionError:
        path.write_bytes(b"")
        os.setxattr(path, "user.overlay.whiteout", b"y")
        os.setxattr(path.parent, "user.overlay.opaque", b"x")


def write_upper(directory: Path, wanted: Mapping[Any, Any]) -> None:
    """A dict is a directory, bytes are a file, WHITEOUT a whiteout, OPAQUE: True makes a directory opaque; a
    string is a symbolic link, a function makes the thing itself."""
    directory.mkdir(exist_ok=True)
    for name, what in wanted.items():
        if name is OPAQUE:
            os.setxattr(directory, "user.overlay.opaque", b"y")
            continue
        path = directory / (os.fsdecode(name))
        if isinstance(what, Mapping):
            write_upper(path, what)
        elif isinstance(what, bytes):
            path.write_bytes(what)
            os.utime(path, (7, 7))
        elif isinstance(what, str):
            path.symlink_to(what)
        elif what is WHITEOUT:
            whiteout(path)
        else:
            what(path)


@contextmanager
def a_tree(
    home: Path, shards: Sequence[bytes], view: View, merge: bool = False, reading: Reading = PLAIN
) -> Iterator[LowerTree]:
    for number, data in enumerate(shards):
        if not (home / f"s{number}.tar").exists():
            (home / f"s{number}.tar").write_bytes(data)
    found = expand([f"{home}/s{{0..{len(shards) - 1}}}.tar"], reading=reading)
    index = open_index(home / "index")
    index.refresh([one for one, _ in index.stale(found)])
    below = ShardSet(found, index)
    try:
        yield make_tree(below, replace(view, merge=merge))
    finally:
        below.close()


def find(tree: LowerTree, upper: Path, rules: upper_walk.Rules = NO_RULES) -> Changes:
    return changes_of(OverlayDirectory(upper.parent), tree, rules)
