"""Sums over a set, for `df` and `status`."""

from __future__ import annotations

from wdsfs.errors import ShardError
from wdsfs.tree.indexing import NotIndexed
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.tree import Totals


class SetTotals:
    """The totals of a set, summed up again after each change of it that is noticed."""

    def __init__(self, lower: ShardSet) -> None:
        self.lower = lower
        self._totals: tuple[int, Totals] | None = None

    def get(self) -> Totals:
        """The sums. Invalidates all records in use."""
        if self._totals is None or self._totals[0] != self.lower.generation:
            self.lower.renew()  # other processes may have indexed shards since
            found, complete = self._sum()
            # Another process may index the rest at any time, and this process is not notified.
            self._totals = (self.lower.generation, found) if complete else None
            return found
        return self._totals[1]

    def _sum(self) -> tuple[Totals, bool]:
        """The sums, and True if every shard is indexed."""
        indexed = samples = members = size = damaged = 0
        complete = True
        for number in self.lower.numbers:
            try:
                one = self.lower.summary(number)
            except ShardError:
                damaged += 1
                continue
            except NotIndexed:
                complete = False
                continue
            indexed += 1
            samples += one.samples
            members += one.members
            size += one.member_bytes
            damaged += bool(one.problems)
        return Totals(self.lower.count, indexed, samples, members, size, damaged), complete
