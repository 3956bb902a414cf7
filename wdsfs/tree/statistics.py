"""Statistics of a shard set from its records: what `wdsfs info` shows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdsfs.errors import ShardError
from wdsfs.index.record import Record
from wdsfs.tree.distributions import Distribution, sizes_by_extension
from wdsfs.tree.indexing import indexed
from wdsfs.tree.shard_set import ShardSet

EXTENSIONS_MAX = 1000  # extensions of which sizes are reported
SAMPLED_SIZES = 1_000_000  # sizes per extension that quantiles are taken from; more are thinned out evenly


class _Sizes:
    """Counts and sizes of the files of one extension, in bounded memory."""

    def __init__(self) -> None:
        self.count = self.bytes = self.largest = 0
        self.smallest = 1 << 63
        self.kept: list[NDArray[Any]] = []
        self.kept_count = 0
        self.step = 1

    def add(self, sizes: NDArray[Any]) -> None:
        first = -self.count % self.step  # every `step`th of all, not of each shard's
        self.count += len(sizes)
        self.bytes += int(sizes.sum(dtype=np.uint64))
        self.smallest = min(self.smallest, int(sizes.min()))
        self.largest = max(self.largest, int(sizes.max()))
        self.kept.append(sizes[first :: self.step].copy())
        self.kept_count += len(self.kept[-1])
        while self.kept_count > SAMPLED_SIZES:
            self.kept = [np.concatenate(self.kept)[::2]]
            self.kept_count = len(self.kept[0])
            self.step *= 2

    def report(self, extension: bytes) -> dict[str, Any]:
        median, p90 = np.quantile(np.concatenate(self.kept), [0.5, 0.9], method="nearest")
        return {
            "extension": extension.decode("utf-8", "backslashreplace"),
            "count": self.count,
            "bytes": self.bytes,
            "min": self.smallest,
            "median": int(median),
            "p90": int(p90),
            "max": self.largest,
        }


def gather(lower: ShardSet, plotted: Distribution | None = None) -> dict[str, Any]:
    """Totals and, per extension, counts and size quantiles (bytes) of all shards that can be read.

    `apart` counts samples whose members lie apart, `joined` shards that are several tars, where they are read so.
    `plotted` gets all shards, too. Of more than `EXTENSIONS_MAX` extensions the most frequent are in the report,
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
            if plotted is not None:
                plotted.add_unreadable()
            continue
        report["samples"] += record.samples
        report["members"] += record.members
        report["bytes"] += record.total_size()
        report["shard_bytes"] += record.fingerprint.size
        report["damaged"] += bool(record.problem_count)
        report["apart"] += record.apart
        report["joined"] += bool(record.end_marks)
        report["in_no_sample"] += _add(record, by_extension)
        if plotted is not None:
            plotted.add(record)
            plotted.add_classes(record)
    found = sorted(by_extension.items(), key=lambda item: (-item[1].count, item[0]))
    report["extensions"] = [sizes.report(extension) for extension, sizes in found[:EXTENSIONS_MAX]]
    report["more_extensions"] = len(found[EXTENSIONS_MAX:])
    return report


def _add(record: Record, by_extension: dict[bytes, _Sizes]) -> int:
    """Add the sample members of a shard by extension; returns how many members are in no sample."""
    in_samples = 0
    for extension, sizes in sizes_by_extension(record):
        by_extension.setdefault(extension, _Sizes()).add(sizes)
        in_samples += len(sizes)
    return record.members - in_samples
