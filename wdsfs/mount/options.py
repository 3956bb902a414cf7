"""The options of a mount.

Options that cannot go together are refused before anything is done. The content of shards is not looked at here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wdsfs import mount_registry
from wdsfs.errors import UsageError
from wdsfs.fuse.worker import SPIN_SECONDS
from wdsfs.spec import objects
from wdsfs.spec.expand import Shard, refuse_left_out
from wdsfs.spec.selection import Selection
from wdsfs.tree.merged_tree import is_merged
from wdsfs.tree.options import Composition, Tolerance
from wdsfs.tree.tree import View
from wdsfs.tree.view_set import is_view


@dataclass(slots=True)
class MountOptions:
    """The options of a mount."""

    specs: list[str]
    mountpoint: str
    view: View = field(default_factory=View)
    merge: bool = False
    selection: Selection = field(default_factory=Selection)
    composition: Composition = field(default_factory=Composition)
    tolerance: Tolerance = field(default_factory=Tolerance)
    index_dir: Path | None = None
    lazy: bool = False
    overlay: Path | None = None
    new: bool = False  # a set that begins empty, without `specs`
    follow: float | None = None  # how often SHARDS are looked at again (s); None: the set is fixed
    workers: int = 2
    spin: float = SPIN_SECONDS  # seconds
    readahead: int = 256 << 10  # bytes
    options: list[str] = field(default_factory=list)
    foreground: bool = False
    log: Path | None = None  # of a mount in the background; chosen by `run`

    def __post_init__(self) -> None:
        self.mountpoint = mount_registry.canonical(self.mountpoint)
        self.merge = is_merged(self.view, self.merge)
        if self.follow is not None and self.fixed_because is not None:
            raise UsageError(f"--follow: {self.fixed_because}")

    @property
    def fixed_because(self) -> str | None:
        """Why the set of this mount cannot be looked at again; None if it can."""
        if self.overlay is not None:
            return (
                "a mount with --overlay has a fixed set, because its changes belong to the names of the shards: "
                "unmount it, and mount it again"
            )
        if self.selection.slice is not None:
            return (
                "a part of a set (--shard-id) is fixed: ranks look at different times, so a new shard could be in "
                "two parts, or in none. Mount the whole set, and have the loader divide it"
            )
        if any(part.removeprefix("@") == objects.STDIN for one in self.specs for part in objects.parts(one)):
            return "the standard input cannot be read again"
        return None


def refuse_view(shards: Sequence[Shard], view: View, composition: Composition) -> None:
    """Raise UsageError for options that cannot go with an overlay."""
    refuse_left_out(shards, "--overlay is for whole shards")
    if is_view(shards, composition):
        raise UsageError(
            "--overlay takes shards as they are: what a view leaves out or adds could not be committed. Mount "
            "without --overlay, or without the options of the view; `wdsfs commit` with them writes new shards"
        )
    if view.index_tree:
        raise UsageError(
            "--index-tree is for read-only mounts, because changes would give samples other numbers; leave out "
            "--index-tree, or --overlay"
        )
