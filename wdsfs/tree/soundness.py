"""The questions of `--strict` to a set: the rules of the wing `interop`, which may not be installed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol, cast

from wdsfs import wings

if TYPE_CHECKING:
    from wdsfs.index.record import Record
    from wdsfs.tree.shard_set import ShardSet


class Rules(Protocol):
    """The functions of `interop/judge.py` for sets that are open already."""

    def findings_of_set(self, below: ShardSet, unreadable: Iterable[bytes]) -> Iterator[str]:
        """Yield a line for each finding in a set; `unreadable` are the paths of shards that are left out."""

    def findings_of_record(self, path: str, record: Record) -> Iterator[str]:
        """Yield a line for each finding in the shard at `path`."""


def rules() -> Rules:
    """Return the rules. Raises NotInstalled."""
    return cast(Rules, wings.load("interop", "judge"))
