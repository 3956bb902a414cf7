"""Counts over a set, from its records: totals, and sizes by column.

For `wdsfs info`, `df` and `status`. No member is read. Memory is bounded for sets of any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdsfs.errors import ShardError
from wdsfs.index.record import STRAY, Record
from wdsfs.tree.indexing import NotIndexed, indexed
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.tree import Totals

EXTENSIONS_MAX = 1000  # extensions of which sizes are reported
SAMPLED_SIZES = 1_000_000  # sizes per extension that quantiles are taken from; more are thinned out evenly


def _sizes_by_extension(record: Record) -> Iterator[tuple[bytes, NDArray[Any]]]:
    """Yield the sizes (bytes) of the members of samples, by extension."""
    if not record.members:
        return
    stray = (record.array("entry.flags") & STRAY).astype(bool)
    firsts = record.array("entry.member").astype(np.int64)
    in_sample = ~np.repeat(stray, firsts[1:] - firsts[:-1])
    extensions, sizes = record.array("member.ext")[in_sample], record.array("member.size")[in_sample]
    order = np.argsort(extensions, kind="stable")
    numbers, starts = np.unique(extensions[order], return_index=True)
    bounds = [*starts.tolist(), len(order)]
    for at, number in enumerate(numbers.tolist()):
        yield record.extension_name[number], sizes[order[bounds[at] : bounds[at + 1]]]


# --- sums, for `df` and `status`


class SetTotals:
    """The totals of a set, summed up again after each change that is noticed."""

    def __init__(self, lower: ShardSet) -> None:
        self.lower = lower
        self._totals: tuple[int, Totals] | None = None

    def get(self) -> Totals:
        """Return the sums. Invalidates all records in use."""
        if self._totals is None or self._totals[0] != self.lower.generation:
            self.lower.renew()  # other processes may have indexed shards since
            totals, complete = self._sum()
            # Another process may index the rest at any time, and this process is not notified.
            self._totals = (self.lower.generation, totals) if complete else None
            return totals
        return self._totals[1]

    def _sum(self) -> tuple[Totals, bool]:
        """Return the sums, and True if every shard is indexed."""
        indexed = samples = members = size = damaged = 0
        complete = True
        for number in self.lower.numbers:
            try:
                summary = self.lower.summary(number)
            except ShardError:
                damaged += 1
                continue
            except NotIndexed:
                complete = False
                continue
            indexed += 1
            samples += summary.samples
            members += summary.members
            size += summary.member_bytes
            damaged += bool(summary.problems)
        return Totals(self.lower.count, indexed, samples, members, size, damaged), complete


class _Sizes:
    """Counts and sizes of the files of one extension, in bounded memory."""

    def __init__(self) -> None:
        self.count = self.bytes = self.largest = 0
        self.smallest = 1 << 63
        self.sampled: list[NDArray[Any]] = []
        self.sampled_count = 0
        self.step = 1

    def add(self, sizes: NDArray[Any]) -> None:
        first = -self.count % self.step  # every `step`th of all, not of each shard's
        self.count += len(sizes)
        self.bytes += int(sizes.sum(dtype=np.uint64))
        self.smallest = min(self.smallest, int(sizes.min()))
        self.largest = max(self.largest, int(sizes.max()))
        self.sampled.append(sizes[first :: self.step].copy())
        self.sampled_count += len(self.sampled[-1])
        while self.sampled_count > SAMPLED_SIZES:
            self.sampled = [np.concatenate(self.sampled)[::2]]
            self.sampled_count = len(self.sampled[0])
            self.step *= 2

    def report(self, extension: bytes) -> dict[str, Any]:
        median, p90 = np.quantile(np.concatenate(self.sampled), [0.5, 0.9], method="nearest")
        return {
            "extension": extension.decode("utf-8", "backslashreplace"),
            "count": self.count,
            "bytes": self.bytes,
            "min": self.smallest,
            "median": int(median),
            "p90": int(p90),
            "max": self.largest,
        }


def gather(lower: ShardSet) -> dict[str, Any]:
    """Return totals and, per extension, counts and size quantiles (bytes) of all shards that can be read.

    `apart` counts samples whose members lie apart, `joined` shards that are several tars, where they are read so.
    Of more than `EXTENSIONS_MAX` extensions the most frequent are in the report,
    and the others are counted as `more_extensions`.
    """
    by_extension: dict[bytes, _Sizes] = {}
    report: dict[str, Any] = dict.fromkeys(
        ("shards", "samples", "members", "bytes", "shard_bytes", "damaged", "in_no_sample", "apart", "joined"), 0
    )
    for number in range(len(lower)):
        report["shards"] += 1
        try:
            record = indexed(lower.record, number)
        except ShardError:
            report["damaged"] += 1
            continue
        report["samples"] += record.samples
        report["members"] += record.members
        report["bytes"] += record.total_size()
        report["shard_bytes"] += record.fingerprint.size
        report["damaged"] += bool(record.problem_count)
        report["apart"] += record.apart
        report["joined"] += bool(record.end_marks)
        report["in_no_sample"] += _add(record, by_extension)
    rows = sorted(by_extension.items(), key=lambda item: (-item[1].count, item[0]))
    report["extensions"] = [sizes.report(extension) for extension, sizes in rows[:EXTENSIONS_MAX]]
    report["more_extensions"] = len(rows[EXTENSIONS_MAX:])
    return report


def _add(record: Record, by_extension: dict[bytes, _Sizes]) -> int:
    """Add the sample members of a shard by extension; returns how many members are in no sample."""
    in_samples = 0
    for extension, sizes in _sizes_by_extension(record):
        by_extension.setdefault(extension, _Sizes()).add(sizes)
        in_samples += len(sizes)
    return record.members - in_samples
