"""The set that a FUSE mount shows, shared by its processes, each of which opens its own trees.

A mount makes the set before it forks the workers. Commits with new shards, and added or removed shards, make a new
set.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from wdsfs.errors import ShardError, WdsfsError
from wdsfs.index.store import Index
from wdsfs.mount.mount_options import MountOptions
from wdsfs.overlay.mounted_overlay import MountedOverlay
from wdsfs.shards import Shards
from wdsfs.spec.expand import extended
from wdsfs.spec.growth import Change, changed
from wdsfs.tree.companions import Companions
from wdsfs.tree.composition import Composition
from wdsfs.tree.freshness import Generations
from wdsfs.tree.indexing import indexed
from wdsfs.tree.numbered_tree import make_numbered
from wdsfs.tree.shard_access import Access
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.tree import LowerTree, MountedTree
from wdsfs.tree.view_set import ViewSet, make_shard_set

IDLE = 19  # niceness of processes that no reader waits for, relative to the others


@dataclass(frozen=True, slots=True)
class MountedSet:
    """The set of a mount: what each worker needs to open it for itself."""

    mount: MountOptions
    shards: Shards
    composition: Composition
    companions: Companions
    access: Access
    index: Index
    descriptors: int
    tags: Generations
    overlay: MountedOverlay | None

    @property
    def files(self) -> list[bytes]:
        """The paths of the shards, and of joined shards and label files."""
        return [*(shard.path for shard in self.shards if shard.gone is None), *self.companions.files]

    def extended(self, further: Sequence[bytes], published: Sequence[bytes]) -> MountedSet:
        """Return the set with the shards `further` at the end; a commit has replaced `published`."""
        shards = Shards(extended(self.shards, further))
        access = self.access.renewed(published, further)
        return replace(self, shards=shards, tags=self.tags.extended(len(shards)), access=access)

    def grown(self, change: Change) -> MountedSet:
        """Return the set with new shards, and without removed shards."""
        before = len(self.shards)
        # A shard stays paired with its joined shard. A shard that came later has no joined shard.
        shards = [
            shard
            if shard.place is not None or not self.companions.joined
            else replace(shard, place=(number, before))
            for number, shard in enumerate(self.shards)
        ]
        further = [replace(shard, place=(number, 0)) for number, shard in enumerate(change.new, before)]
        grown = Shards(changed(shards, change._replace(new=further)))
        tags = self.tags.grown(len(grown), grown.out, time.time_ns())
        return replace(self, shards=grown, tags=tags, access=self.access.grown(shard.path for shard in further))

    def tree(self) -> MountedTree:
        """Return the tree that a worker serves."""
        below = self.lower_tree()
        return below if self.overlay is None else _prepared(self.overlay.tree(below))

    def lower_tree(self) -> LowerTree:
        """Return the tree over the shards, without changes."""
        return _prepared(make_numbered(self._opened(), self.mount.view))

    def derive(self) -> dict[str, Any]:
        """Make the whole view, in a process of low priority; return the reason if this fails, or nothing."""
        os.nice(IDLE)
        below = self._opened()
        try:
            refusal = below.make() if isinstance(below, ViewSet) else None
        except WdsfsError as error:  # a companion was removed after the mount began
            refusal = f"{error}"
        finally:
            below.close()
        return {} if refusal is None else {"refusal": refusal}

    def _opened(self) -> ShardSet:
        index = self.index.reopen()
        return make_shard_set(
            self.shards,
            index,
            self.composition,
            self.companions,
            descriptors=self.descriptors,
            tags=self.tags,
            access=self.access,
        )


TreeKind = TypeVar("TreeKind", bound=MountedTree)


def _prepared(tree: TreeKind) -> TreeKind:
    # A shard may have changed since the mount began. An unreadable or unfinished shard must not keep a worker from
    # serving: only requests for this shard get the error.
    with contextlib.suppress(ShardError):
        indexed(tree.prepare)
    return tree
