"""Statistics of a shard set from its records: what `wdsfs info` shows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdsfs.dataset.indexing import NotIndexed
from wdsfs.dataset.shard_set import ShardSet
from wdsfs.errors import ShardError
from wdsfs.index.record import STRAY, Record

SAMPLED_SIZES = 1_000_000  # sizes per extension that quantiles are taken from; more are thinned out evenly


class _Sizes:
    """Counts and sizes of the files of one extension, in bounded memory."""

    def __init__(self) -> None:
        self.count = self.bytes = self.largest = 0
        self.smallest = 1 << 63
        self.kept: list[NDArray[Any]] = []
        self.step = 1

    def add(self, sizes: NDArray[Any]) -> None:
        first = -self.count % self.step  # every `step`th of all, not of each shard's
        self.count += len(sizes)
        self.bytes += int(sizes.sum(dtype=np.uint64))
        self.smallest = min(self.smallest, int(sizes.min()))
        self.largest = max(self.largest, int(sizes.max()))
        self.kept.append(sizes[first :: self.step].copy())
        while sum(map(len, self.kept)) > SAMPLED_SIZES:
            self.kept = [np.concatenate(self.kept)[::2]]
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


def gather(lower: ShardSet) -> dict[str, Any]:
    """Totals and, per extension, counts and size quantiles (bytes) of all shards that can be read.

    `apart` counts samples whose members lie apart, `joined` shards that are several tars, where they are read so.
    """
    by_extension: dict[bytes, _Sizes] = {}
    report: dict[str, Any] = dict.fromkeys(
        ("shards", "samples", "members", "bytes", "shard_bytes", "damaged", "in_no_sample", "apart", "joined"), 0
    )
    for number in range(len(lower)):
        report["shards"] += 1
        try:
            record = _record(lower, number)
        except (ShardError, NotIndexed):  # the latter: it is being written all the time
            report["damaged"] += 1
            continue
        report["samples"] += record.samples
        report["members"] += record.members
        report["bytes"] += record.total_size()
        report["shard_bytes"] += record.fingerprint[0]
        report["damaged"] += bool(record.problem_count)
        report["apart"] += record.apart
        report["joined"] += bool(record.end_marks)
        report["in_no_sample"] += _add(record, by_extension)
    rows = [sizes.report(extension) for extension, sizes in by_extension.items()]
    report["extensions"] = sorted(rows, key=lambda row: (-row["count"], row["extension"]))
    return report


def _record(lower: ShardSet, number: int) -> Record:
    try:
        return lower.record(number)
    except NotIndexed:  # changed since it was indexed, or its record is damaged
        lower.index_now(number)
        return lower.record(number)


def _add(record: Record, by_extension: dict[bytes, _Sizes]) -> int:
    """Add the sample members of a shard by extension; returns how many members are in no sample."""
    if not record.members:
        return 0
    stray = (record.array("entry.flags") & STRAY).astype(bool)
    firsts = record.array("entry.member").astype(np.int64)
    in_sample = ~np.repeat(stray, firsts[1:] - firsts[:-1])
    extensions, sizes = record.array("member.ext")[in_sample], record.array("member.size")[in_sample]
    order = np.argsort(extensions, kind="stable")
    numbers, starts = np.unique(extensions[order], return_index=True)
    bounds = pairwise([*starts.tolist(), len(order)])
    for number, (first, behind) in zip(numbers.tolist(), bounds, strict=True):
        part = sizes[order[first:behind]]
        by_extension.setdefault(record.extension_name[number], _Sizes()).add(part)
    return int((~in_sample).sum())
