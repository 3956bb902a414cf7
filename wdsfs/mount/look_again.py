"""One look at a set that grows: expands SHARDS again, and decides which new shards can be shown.

The look runs in a child of the supervisor, and changes only the index. Its result is JSON, which the supervisor
shows (`followed_set.py`). The look indexes new shards, so that no reader waits for the index.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from wdsfs import trust
from wdsfs.door.shard_door import DOOR
from wdsfs.door.urls import is_remote
from wdsfs.errors import MissingShard, MountError, NotATar, ShardError, WdsfsError
from wdsfs.host import default_jobs
from wdsfs.index.portable import attached
from wdsfs.index.record import Record
from wdsfs.index.record_of_file import BEING_WRITTEN, rest_of, settles_in
from wdsfs.index.store import Index
from wdsfs.inodes import SHARD_MAX
from wdsfs.mount.mounted_set import MountedSet
from wdsfs.shards import Shard, Shards
from wdsfs.spec import growth, objects, portable_head
from wdsfs.spec.dependencies import Dependencies, noted
from wdsfs.spec.existence import LIST_SUFFIXES
from wdsfs.spec.expand import expand_again
from wdsfs.spec.growth import Change
from wdsfs.spec.spec_words import LIST
from wdsfs.tree import merged_tree, shard_access
from wdsfs.tree.indexing import indexed
from wdsfs.tree.numbered_tree import NAME as BY_INDEX
from wdsfs.tree.numbered_tree import make_numbered
from wdsfs.tree.opening import rules
from wdsfs.tree.shard_access import GuardedAccess
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.view_set import make_shard_set

log = logging.getLogger(__name__)

FEW = 4  # below this number of shards one process indexes them all


class LeftOut(NamedTuple):
    """A new shard that the mount does not show, with the reason. `wait`: seconds until the next look, None: never.

    `seen` is its fingerprint. As long as the fingerprint stays the same, no look reads the shard again.
    """

    path: str
    why: str
    wait: float | None = None
    seen: Sequence[int] | None = None


class Earlier(NamedTuple):
    """The results of earlier looks.

    `left_out` has the shards that are not shown, by path. `superseded` is a list of shards that no process of the
    mount shows any more: the look drops its tables.
    """

    left_out: Mapping[str, LeftOut]
    superseded: Sequence[Shard] = ()


def look_again(served: MountedSet, directory: str, earlier: Earlier, fetches: bool) -> dict[str, Any]:
    """Expand the SHARDS of a mount again, relative to `directory`, and compare the set.

    `fetches`: the mount has a fetcher. Returns the argument of `change_of`, with `left_out`, `error`, `kept` and
    `directories`.
    """
    # The supervisor logs shards that are left out, once.
    logging.getLogger(shard_access.__name__).setLevel(logging.CRITICAL)
    with noted() as used:
        try:
            if directory:
                os.chdir(directory)
            shards = _expanded(served)
            _refuse_foreign_lists(served, used)
        except (WdsfsError, OSError) as error:
            return {"error": str(error), "left_out": [], "directories": used.absolute()}
    look = _Look(served, earlier, fetches)
    try:
        answer = look.compare(shards)
        look.drop_tables(earlier.superseded)
    finally:
        look.close()
    return {**answer, "error": "", "directories": used.absolute()}


def _expanded(served: MountedSet) -> list[Shard]:
    specs, selection = served.mount.specs, served.mount.selection
    urls = [url for spec in specs for part in objects.parts(spec) if (url := _listed_at(part))]
    if urls:  # the known state of a list at a URL may be old
        objects.ask_again(urls, 0)
    return expand_again(specs, selection.split, selection.reading, selection.base)


def _listed_at(part: str) -> str | None:
    """Return the path of a list at a URL; None for any other part."""
    text = part.removeprefix(LIST)
    is_list = text != part or text.endswith((*LIST_SUFFIXES, portable_head.SUFFIX))
    return objects.path_of_url(text) if is_list and objects.is_url(text) and not objects.is_command(text) else None


def _refuse_foreign_lists(served: MountedSet, used: Dependencies) -> None:
    """Raise MountError for a list with which other users could show shards that only the mounter may read."""
    for file in used.files if isinstance(served.access, GuardedAccess) else ():
        if not objects.is_url(file) and not trust.holds(os.fsencode(os.path.abspath(file))):
            raise MountError(
                f"{file} is not read again: other users can write it, and could name any of your files in it; to "
                "trust them, mount again with --trust USER"
            )


class _Look:
    """A look in progress, with an index of its own."""

    def __init__(self, served: MountedSet, earlier: Earlier, fetches: bool) -> None:
        self.served, self.earlier, self.fetches = served, earlier, fetches
        self.index: Index = served.index.reopen()
        self.left_out: list[LeftOut] = []
        self._sets: list[ShardSet] = []

    def compare(self, shards: Sequence[Shard]) -> dict[str, Any]:
        """Compare the set with these shards; return the change as JSON."""
        known = self.served.shards
        difference = growth.compare(known, shards)
        unreachable, why = growth.out_of_reach(known, difference.gone)
        samples = self._last_samples([number for number in difference.gone if number not in unreachable])
        left = growth.changed(known, Change(samples, (), ()))
        change = self._chosen(left, difference.candidates)._replace(gone=samples)
        if change:
            self._prepare(change)
        return {
            "gone": [[number, count] for number, count in samples.items()],
            "back": list(change.back),
            "new": [_row(shard) for shard in change.new],
            "left_out": self.left_out,
            "kept": why,
        }

    def close(self) -> None:
        """Close the opened sets and the index."""
        for below in self._sets:
            below.release()
        self.index.close()

    def _opened(self, served: MountedSet) -> ShardSet:
        """Return the set, over the index of this look."""
        below = make_shard_set(
            *(served.shards, self.index, served.composition, served.companions),
            tags=served.tags,
            access=served.access,
        )
        self._sets.append(below)
        return below

    def _last_samples(self, gone: Sequence[int]) -> dict[int, int]:
        below = self._opened(self.served)
        return {number: below.last_samples(number) for number in gone}

    def _chosen(self, known: Sequence[Shard], candidates: Sequence[Shard]) -> Change:
        """Return the candidates that can be shown, with names and numbers."""
        waiting = [shard for shard in candidates if self._passes(shard)]
        room = max(0, SHARD_MAX + 1 - len(known))
        for shard in waiting[room:]:
            self._leave(
                shard, f"the mount already has {SHARD_MAX + 1:,} shards, the most that it can show: mount again"
            )
        named = growth.named(known, waiting[:room])
        self._copy_records(named)
        stale = [shard for shard, _ in self.index.stale(named)]
        self.index.refresh(stale, 1 if len(stale) < FEW else default_jobs())
        back: list[int] = []
        new: list[Shard] = []
        for shard, samples in self._counted(named):
            number = growth.number_again(known, shard, samples)
            if number is None:
                new.append(shard)
            else:
                back.append(number)
        return Change({}, back, new)

    def _copy_records(self, candidates: Sequence[Shard]) -> None:
        """Copy records from portable indexes, which the workers have not mapped, into the index."""
        with contextlib.suppress(MissingShard):
            portables = attached(candidates)
            for shard in candidates if portables.files else ():
                with contextlib.suppress(ShardError):
                    data = portables.copy(shard.key, DOOR.look(shard.path))
                    if data is not None:
                        self.index.store([(shard.key, data)])

    def _counted(self, candidates: Sequence[Shard]) -> list[tuple[Shard, int]]:
        """Return the candidates that can be read and are settled, with their samples."""
        below = self._opened(self.served.grown(Change({}, (), candidates)))
        settled = []
        for number, shard in enumerate(candidates, len(self.served.shards)):
            try:
                indexed(below.record, number)
                why = self._objection(shard, indexed(below.plain.record, number))
            except ShardError as error:
                wait = settles_in(shard.path)
                is_begun = wait is not None and isinstance(error, NotATar)
                text = BEING_WRITTEN if is_begun else str(error).removeprefix(f"{os.fsdecode(shard.path)}: ")
                self._leave(shard, text, wait, keep=wait is None and below.plain is below)
                continue
            if why is None:
                settled.append((shard, below.summary(number).samples))
            else:
                self._leave(shard, *why)
        return settled

    def _passes(self, shard: Shard) -> bool:
        """Return True if a candidate is worth reading; else it is left out."""
        if is_remote(shard.path):
            if not self.fetches:
                self._leave(shard, "it is remote, and this mount began without remote shards: mount again")
            return self.fetches
        mount = self.served.mount
        if mount.tree.index_tree and not mount.merge and shard.name == BY_INDEX:
            self._leave(shard, "it has the name of the directory of --index-tree: rename it")
            return False
        try:
            seen = self.served.access.grown([shard.path]).look(shard.path)
        except ShardError as error:
            self._leave(shard, str(error).removeprefix(f"{os.fsdecode(shard.path)}: "))
            return False
        before = self.earlier.left_out.get(os.fsdecode(shard.path))
        if before is not None and before.seen is not None and tuple(before.seen) == tuple(seen):
            self.left_out.append(before)
            return False
        wait = rest_of(shard.path)
        if wait is not None:
            self._leave(shard, BEING_WRITTEN, wait)
        return wait is None

    def _objection(self, shard: Shard, record: Record) -> tuple[str, float | None] | None:
        """Return the reason why a readable shard is not shown (yet), and the wait (s); None for a shown shard."""
        wait = settles_in(shard.path) if record.problem_count else None
        if wait is not None:
            return BEING_WRITTEN, wait
        path = os.fsdecode(shard.path)
        findings = rules().findings_of_record(path, record) if self.served.mount.opening.tolerance.strict else ()
        return next(((f"--strict: {finding}", None) for finding in findings), None)

    def _leave(self, shard: Shard, why: str, wait: float | None = None, *, keep: bool = False) -> None:
        seen = None
        with contextlib.suppress(ShardError):
            seen = tuple(DOOR.look(shard.path)) if keep else None
        self.left_out.append(LeftOut(os.fsdecode(shard.path), why, wait, seen))

    def _prepare(self, change: Change) -> None:
        """Make the tables that workers would otherwise make at the first request after this change."""
        served = self.served.grown(change)
        below = self._opened(served)
        for number in change.back:
            with contextlib.suppress(ShardError):
                indexed(below.record, number)
        with contextlib.suppress(ShardError):
            indexed(make_numbered(below, served.mount.view).prepare)

    def drop_tables(self, superseded: Sequence[Shard]) -> None:
        """Drop the tables of an earlier list of shards."""
        if superseded and self.served.mount.merge:
            self._opened(replace(self.served, shards=Shards.of(superseded))).drop_tables(merged_tree.TABLES)


def _row(shard: Shard) -> list[Any]:
    without = sorted(map(os.fsdecode, shard.without))
    return [os.fsdecode(shard.path), os.fsdecode(shard.name), without, shard.expected_samples]


def change_of(served: MountedSet, answer: dict[str, Any]) -> Change:
    """Return the change of a set from the answer of `look_again`."""
    if answer["error"]:
        return Change({}, (), ())
    reading = served.mount.selection.reading
    new = [
        Shard(os.fsencode(path), os.fsencode(name), frozenset(map(os.fsencode, without)), samples, reading=reading)
        for path, name, without, samples in answer["new"]
    ]
    return Change(dict(answer["gone"]), answer["back"], new)
