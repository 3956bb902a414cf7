"""The rules of `wdsfs check` and `--strict` for a set: findings in its shards, and about all of them together."""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import numpy as np

from wdsfs import names
from wdsfs.cluster_workers import Workers
from wdsfs.errors import ShardError, counted, several
from wdsfs.index import process_pool
from wdsfs.index.record import Record
from wdsfs.interop.lint import (
    EMPTY,
    EXAMPLES,
    EXTRA,
    FIRST_SAMPLES,
    LATE,
    UNEVEN,
    UNREADABLE,
    FirstSample,
    Lint,
    LintFinding,
    escaped,
    lint,
    lint_record,
)
from wdsfs.names import Reading
from wdsfs.shards import Shard
from wdsfs.tar.problems import BROKEN_FIELD
from wdsfs.tree.draft import COLUMNS_NAMED
from wdsfs.tree.indexing import indexed
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.view_set import ViewSet

# Semantics decision: an empty text, such as a caption, is a text. An empty image, label or JSON stops its decoder.
MAY_BE_EMPTY = frozenset((b"txt", b"text", b"transcript", b"caption"))


class Judge:
    """Findings about the shards of a set together."""

    def __init__(self) -> None:
        self.samples = 0
        self.members = 0
        self.extensions: Counter[bytes] = Counter()
        self._shards: list[tuple[str, Lint]] = []  # by path

    def findings(
        self, shards: Sequence[Shard], reading: Reading, jobs: int, workers: Workers | None
    ) -> Iterator[tuple[str, LintFinding]]:
        """Check all shards of a set, by several processes; yield the findings with the path of their shard."""
        look = functools.partial(lint, reading=reading, together=process_pool.together(shards, workers))
        for shard, result in process_pool.each(look, shards, jobs, workers):
            path = os.fsdecode(shard.path)
            if isinstance(result, ShardError):
                yield path, LintFinding(UNREADABLE, -1, "", str(result))
            else:
                yield from ((path, finding) for finding in self.add(path, result, shard.miscount(result.samples)))
        yield from (*self.shared_keys(), *self.missing(), *self.uneven(), *self.late(), *self.empty())

    def add(self, path: str, shard: Lint, miscount: str = "") -> Iterator[LintFinding]:
        """Add a shard; yield its findings. `miscount` is the text about an unexpected number of samples."""
        if miscount:
            yield LintFinding("sample count", -1, "", miscount)
        self.samples += shard.samples
        self.members += shard.members
        for pattern, count in shard.patterns.items():
            for extension in pattern:
                self.extensions[extension] += count
        yield from shard.findings
        for kind, count in shard.counts.items():
            if count > EXAMPLES:
                yield LintFinding(kind, -1, "", f"and {count - EXAMPLES} more of this kind")
        shard.findings.clear()  # yielded; the rest is needed for findings over the whole set
        bisect.insort(self._shards, (path, shard), key=operator.itemgetter(0))

    def shared_keys(self) -> Iterator[tuple[str, LintFinding]]:
        """Yield for each shard the earlier shards (by path) that have some of its keys.

        Equal digests count as equal keys.
        """
        if not self._shards:
            return
        keys = np.concatenate([np.frombuffer(shard.keys, np.uint64) for _, shard in self._shards])
        offsets = np.concatenate([np.frombuffer(shard.offsets, np.int64) for _, shard in self._shards])
        counts = [len(shard.keys) for _, shard in self._shards]
        owners = np.repeat(np.arange(len(counts), dtype=np.uint32), counts)
        order = np.argsort(keys, kind="stable")
        same = np.flatnonzero(keys[order][1:] == keys[order][:-1])
        later, earlier = order[same + 1], order[same]
        pairs: dict[tuple[int, int], tuple[int, int]] = {}
        for later_shard, earlier_shard, offset in zip(
            owners[later].tolist(), owners[earlier].tolist(), offsets[later].tolist(), strict=True
        ):
            count, first = pairs.get((later_shard, earlier_shard), (0, offset))
            pairs[later_shard, earlier_shard] = count + 1, min(first, offset)
        for (later_shard, earlier_shard), (count, first) in sorted(pairs.items()):
            text = f"{count} of its keys are also in {self._shards[earlier_shard][0]}; here is the first"
            yield self._shards[later_shard][0], LintFinding("shared key", first, "", text)

    def uneven(self) -> Iterator[tuple[str, LintFinding]]:
        """Yield a note if Hugging Face's loader, which checks the first shard, would refuse the set."""
        path, first = next(((path, shard.first) for path, shard in self._shards if shard.first), ("", []))
        finding = uneven(first)
        if finding is not None:
            yield path, finding

    def late(self) -> Iterator[tuple[str, LintFinding]]:
        """Yield the columns that the first samples of the set lack, which Hugging Face's loader drops.

        It is a finding where a sample with such a column lacks one of the first, which the loader fills with None.
        """
        counts, places = self._late_columns()
        for extension, kind in itertools.islice(counts, EXAMPLES):
            path, offset, key = places[extension, kind]
            yield path, LintFinding(kind, offset, key, _late_text(extension, counts[extension, kind], kind))
        rest = [kind for _, kind in itertools.islice(counts, EXAMPLES, None)]
        if rest:
            kind = LATE if LATE in rest else EXTRA
            yield self._shards[0][0], LintFinding(kind, -1, "", f"and {len(rest)} more columns")

    def _late_columns(self) -> tuple[Counter[tuple[bytes, str]], dict[tuple[bytes, str], tuple[str, int, str]]]:
        """Return for each such column, by its kind, the number of samples that have it, and the first of them."""
        first = next((shard.first for _, shard in self._shards if shard.first), [])
        known = {names.lower_case(extension) for sample in first for extension in sample.extensions}
        counts = Counter[tuple[bytes, str]]()
        places: dict[tuple[bytes, str], tuple[str, int, str]] = {}
        for path, shard in self._shards:
            for pattern, count in shard.patterns.items():
                lowered = {extension: names.lower_case(extension) for extension in pattern}
                kind = LATE if known.difference(lowered.values()) else EXTRA
                for extension in pattern:
                    if lowered[extension] not in known:
                        counts[extension, kind] += count
                        places.setdefault((extension, kind), (path, *(shard.examples[pattern] or [(-1, "")])[0]))
        return counts, places

    def empty(self) -> Iterator[tuple[str, LintFinding]]:
        """Yield members of 0 bytes in columns of which most members have content, by shard."""
        members, empty = Counter[bytes](), Counter[bytes]()
        for _, shard in self._shards:
            for extension, column in shard.columns.items():
                members[extension] += column.members
                empty[extension] += column.empty
        usual = {extension for extension, count in members.items() if 2 * empty[extension] < count}
        usual -= {extension for extension in usual if extension.lower().rpartition(b".")[2] in MAY_BE_EMPTY}
        for path, shard in self._shards:
            columns = [column for extension, column in shard.columns.items() if extension in usual]
            examples = sorted(example for column in columns for example in column.examples)[:EXAMPLES]
            rest = sum(column.empty for column in columns) - len(examples)
            text = "has 0 bytes, and most members of its column have content"
            yield from ((path, LintFinding(EMPTY, offset, name, text)) for offset, name in examples)
            if rest:
                yield path, LintFinding(EMPTY, -1, "", f"and {rest} more of this kind")

    def missing(self) -> Iterator[tuple[str, LintFinding]]:
        """Yield the samples without an extension that more than half of all samples have, by shard."""
        usual = {extension for extension, count in self.extensions.items() if 2 * count > self.samples}
        for path, shard in self._shards:
            listed = rest = 0
            for pattern, count in shard.patterns.items():
                absent = usual - pattern
                if not absent:
                    continue
                text = _absent_text(absent, pattern)
                examples = shard.examples[pattern][: EXAMPLES - listed]
                listed += len(examples)
                rest += count - len(examples)
                for offset, key in examples:
                    yield path, LintFinding("missing extension", offset, key, text)
            if rest:
                text = f"and {rest} more samples that lack an extension that most others have"
                yield path, LintFinding("missing extension", -1, "", text)


def _late_text(extension: bytes, samples: int, kind: str) -> str:
    fills = ", and fills the columns that these samples lack with None" if kind == LATE else ""
    have = (
        f"the column {_columns_text([extension])} is in {counted(samples, 'sample')} of the set, first in this one"
    )
    return f"{have}; none of the first {FIRST_SAMPLES} samples has it: Hugging Face datasets drops it{fills}"


def _absent_text(absent: Iterable[bytes], there: Iterable[bytes]) -> str:
    """Return which extensions a sample lacks, with those in another letter case, which webdataset accepts."""
    cases = {names.lower_case(extension): extension for extension in there}
    parts = []
    for extension in sorted(absent):
        other = cases.get(names.lower_case(extension))
        more = "" if other is None else f", but {escaped(other)} (the same to webdataset, not to others)"
        parts.append(escaped(extension) + more)
    return "has no " + several(parts, COLUMNS_NAMED)


def _columns_text(extensions: Iterable[bytes]) -> str:
    """Return columns for a message, the first of many, each cut."""
    return several([names.readable(extension[:80]) for extension in sorted(extensions)], COLUMNS_NAMED)


def uneven(first: Sequence[FirstSample]) -> LintFinding | None:
    """Return where the first samples of a set differ in their columns; None if they are alike.

    `first` are the first `FIRST_SAMPLES` of its first shard, or all if it has fewer. The webdataset loader of
    Hugging Face's `datasets` takes the columns of a set from these, and raises ValueError if they differ.
    """
    for sample in first[1:FIRST_SAMPLES]:
        if sample.extensions != first[0].extensions:
            here, there = (_columns_text(own.extensions) for own in (sample, first[0]))
            text = (
                f"has the columns {here}, the first sample {first[0].key} has {there}: "
                f"Hugging Face datasets refuses a set whose first {FIRST_SAMPLES} samples differ in their columns"
            )
            return LintFinding(UNEVEN, sample.offset, sample.key, text)
    return None


def first_samples(members: Iterable[tuple[bytes, bytes]]) -> list[FirstSample]:
    """Return the first samples of these members, given as key and extension, in the order of the tar."""
    grouped: list[tuple[bytes, set[bytes]]] = []
    for key, extension in members:
        if not grouped or grouped[-1][0] != key:
            if len(grouped) == FIRST_SAMPLES:
                break
            grouped.append((key, set()))
        grouped[-1][1].add(extension)
    return [FirstSample(-1, escaped(key), frozenset(extensions)) for key, extensions in grouped]


def findings_of_set(below: ShardSet, unreadable: Iterable[bytes]) -> Iterator[str]:
    """Yield the findings in an open set, for `--strict`.

    These are damage, split samples and missing columns, as records show them, and members that a view cannot make.
    `unreadable` are the paths of shards that are left out.
    """
    judge, known = Judge(), set(unreadable)
    for lower in below.sources:
        for number, shard in enumerate(lower.shards):
            if shard.path in known:
                continue
            known.add(shard.path)
            path = os.fsdecode(shard.path)
            try:
                findings = lint_record(indexed(lower.record, number))
            except ShardError as error:
                yield str(error)
                continue
            yield from (finding.line(path) for finding in judge.add(path, findings))
    yield from (finding.line(path) for path, finding in judge.missing())
    if isinstance(below, ViewSet):
        missing = below.keys_missing()
        yield from [] if missing is None else [missing]
        yield from _findings_of_view(below)


def findings_of_record(path: str, record: Record) -> Iterator[str]:
    """Yield the findings in a shard, for `--strict`, as its record shows them."""
    yield from (finding.line(path) for finding in Judge().add(path, lint_record(record)))


def _findings_of_view(below: ShardSet) -> Iterator[str]:
    for number in below.numbers:
        with suppress(ShardError):  # reported already, of its source shard
            record, path = indexed(below.record, number), below.path_text(number)
            of_view = [problem for problem in record.problems if problem.kind == BROKEN_FIELD]
            yield from (
                LintFinding(problem.kind, problem.offset, "", problem.text).line(path) for problem in of_view
            )
            further = record.problem_count - len(record.problems)
            if of_view and further:
                yield LintFinding(of_view[0].kind, -1, "", f"and {further:,} more problems").line(path)
