"""The set that a mount shows, as its processes share it: each of them opens trees of its own from it.

Made once, before the workers are forked; a commit with new shards makes another one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from wdsfs.dataset.generations import Generations
from wdsfs.dataset.numbered_tree import make_numbered
from wdsfs.dataset.shard_access import Access
from wdsfs.dataset.tree import LowerTree, MountedTree
from wdsfs.errors import ShardError
from wdsfs.index.store import Index
from wdsfs.mount.options import MountOptions
from wdsfs.overlay.mounted_overlay import MountedOverlay
from wdsfs.spec.expand import Shard, extended
from wdsfs.views.composition import Composition
from wdsfs.views.view_set import Companions, open_set


@dataclass(frozen=True, slots=True)
class MountedSet:
    """The set of a mount: what each worker needs to open it for itself."""

    mount: MountOptions
    shards: Sequence[Shard]
    composition: Composition
    companions: Companions
    access: Access
    index: Index
    descriptors: int
    tags: Generations
    stack: MountedOverlay | None

    def extended(self, further: Sequence[bytes], published: Sequence[bytes]) -> MountedSet:
        """The set as it is now, with `further` shards at the end; a commit has replaced `published`."""
        shards = extended(self.shards, further)
        access = self.access.renewed(published, further)
        return replace(self, shards=shards, tags=self.tags.extended(len(shards)), access=access)

    def tree(self) -> MountedTree:
        """What is mounted, as a worker serves it."""
        below = self.lower_tree()
        return below if self.stack is None else _prepared(self.stack.tree(below))

    def lower_tree(self) -> LowerTree:
        """What the shards hold."""
        index = self.index.reopen()
        below = open_set(
            *(self.shards, index, self.composition, self.companions),
            *(self.descriptors, self.tags, self.access),
        )
        return _prepared(make_numbered(below, self.mount.view, self.mount.merge))


TreeKind = TypeVar("TreeKind", bound=MountedTree)


def _prepared(tree: TreeKind) -> TreeKind:
    # A shard may have changed since the mount began. One that cannot be read, or is being written, must not keep a
    # worker from serving: whoever asks for it is told.
    with contextlib.suppress(ShardError):
        tree.lower.with_index(tree.prepare)
    return tree
