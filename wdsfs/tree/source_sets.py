"""The plain sets of shards that a view is made of: the shards themselves, and those of each joined set."""

from __future__ import annotations

from collections.abc import Sequence

from wdsfs.index.store import Index
from wdsfs.spec.expand import Shard
from wdsfs.tree.content import Content
from wdsfs.tree.shard_access import Access
from wdsfs.tree.shard_set import ShardSet


class SourceSets:
    """`plain`, the set without the view, and the `joined` sets. `descriptors` are shared evenly between them."""

    def __init__(
        self,
        shards: Sequence[Shard],
        joined: Sequence[Sequence[Shard]],
        index: Index,
        descriptors: int,
        access: Access,
    ) -> None:
        each = max(1, descriptors // (1 + len(joined)))
        self.plain = ShardSet(shards, index, each, access=access)
        self.joined = [ShardSet(one, index, each, access=access) for one in joined]
        self.all = [self.plain, *self.joined]
        self._places = {
            one.path: (source, number) for source in reversed(self.all) for number, one in enumerate(source.shards)
        }

    def find(self, path: bytes) -> tuple[ShardSet, int]:
        """The first set that has the shard at this path, and the shard's number there."""
        return self._places[path]

    @property
    def open_files(self) -> int:
        """How many shards are open."""
        return sum(one.open_files for one in self.all)

    def distrust(self) -> None:
        """Look at every shard again before it is used."""
        for one in self.all:
            one.distrust()

    def release(self) -> None:
        """Close the shards, and let go of all records."""
        for one in self.all:
            one.release()


def content_of(source: ShardSet, number: int, member: int) -> Content:
    """As `ShardSet.content`, of the shard as it is now."""
    return source.content(number, source.tag(number), member)
