"""Decides if a command goes on with a set that is damaged or not whole.

The one home of that rule, for `mount` and for every command that opens a set. It uses what is known when the set
is indexed: records have the damage, however long ago they were made. Later changes of shards are for `dataset`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from wdsfs.errors import CorruptShard, NotATar, ShardError, UnreadableShard, several
from wdsfs.interop import lint
from wdsfs.interop.tolerance import Tolerance
from wdsfs.tar.problems import OF_VIEWS, problems_text
from wdsfs.tree.indexing import indexed
from wdsfs.tree.shard_set import ShardSet

log = logging.getLogger(__name__)

LISTED_BY_CHECK = "see: wdsfs check"
LISTED_BY_STRICT = "--strict lists all"  # of problems that only a view has, which `wdsfs check` does not see
NAMED = 3  # shards that warnings name one by one; the others are counted


def judge(below: ShardSet, unreadable: Mapping[bytes, ShardError], tolerance: Tolerance, whole: bool) -> list[str]:
    """Return the warnings about a set that is indexed, as far as it is; empty when all is well.

    `unreadable` says of shards, by path, why they could not be indexed. `whole` says that these would be missing
    unnoticed in the output of the command: in one tree over all shards, in a sum, in an index of the set.

    Raises NotATar for files that are no shards, UnreadableShard when shards would be missing, CorruptShard for
    what `strict` does not allow; that is logged before, in full.
    """
    texts = [*dict.fromkeys(map(str, unreadable.values()))]  # one that is joined can be known by two names
    if tolerance.strict:
        _refuse_all(below, unreadable)
    if not tolerance.allow_missing:
        advice = "; --allow-missing goes on without" if tolerance.is_option else ""
        # As shards that are not there: a download has failed, and will not be better later.
        no_tars = dict.fromkeys(str(error) for error in unreadable.values() if isinstance(error, NotATar))
        if no_tars and tolerance.is_option:
            raise NotATar(f"{several([*no_tars])}{advice}")
        if whole and texts:
            raise UnreadableShard(
                f"without what cannot be read the set would be smaller: {several(texts)}{advice}"
            )
    damaged = [
        f"{path}: {problems_text(first, count)}; {LISTED_BY_STRICT if first.kind in OF_VIEWS else LISTED_BY_CHECK}"
        for path, first, count in below.known_damage()
    ]
    return [*_some(texts, "cannot be read"), *_some(damaged, "are damaged")]


def _some(texts: Sequence[str], what: str) -> list[str]:
    if len(texts) <= NAMED + 1:  # one more takes no more room than its number
        return list(texts)
    last = LISTED_BY_STRICT if all(one.endswith(LISTED_BY_STRICT) for one in texts) else LISTED_BY_CHECK
    return [*texts[:NAMED], f"{len(texts) - NAMED:,} more shards {what}; {last}"]


def _refuse_all(below: ShardSet, unreadable: Mapping[bytes, ShardError]) -> None:
    findings = [*map(str, unreadable.values()), *_findings(below, unreadable)]
    for text in findings:
        log.error("%s", text)
    if findings:
        count = f"{len(findings):,} finding{'s' * (len(findings) > 1)}"
        raise CorruptShard(f"--strict: {count}, listed above")


def _findings(below: ShardSet, unreadable: Iterable[bytes]) -> Iterator[str]:
    """Yield the findings of `wdsfs check` that records show: damage, split samples, missing columns; and what a
    view cannot make of members."""
    judge, known = lint.Judge(), set(unreadable)
    for source in below.sources:
        for number, shard in enumerate(source.shards):
            if shard.path in known:
                continue
            known.add(shard.path)
            path = os.fsdecode(shard.path)
            try:
                found = lint.lint_record(indexed(source.record, number))
            except ShardError as error:
                yield str(error)
                continue
            yield from (one.line(path) for one in judge.add(path, found))
    yield from (one.line(path) for path, one in judge.missing())
    if below.plain is not below:
        yield from _findings_of_view(below)


def _findings_of_view(below: ShardSet) -> Iterator[str]:
    for number in below.numbers:
        with suppress(ShardError):  # it was told of its source
            record, path = indexed(below.record, number), below.path_text(number)
            of_view = [one for one in record.problems if one.kind in OF_VIEWS]
            yield from (lint.LintFinding(one.kind, one.offset, "", one.text).line(path) for one in of_view)
            further = record.problem_count - len(record.problems)
            if of_view and further:
                yield lint.LintFinding(of_view[0].kind, -1, "", f"and {further:,} more problems").line(path)
