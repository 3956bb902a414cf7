"""A commit of an overlay: finds its changes, plans the new shards, and writes them elsewhere or in place.

Rules: a shard of the set becomes one new shard. An edited sample stays where its first member was, samples stay in
their order, new samples follow the last one of their shard. Unchanged members are raw ranges. The same input gives
the same bytes.

The caller holds the overlay, and freezes the mount that shows it, if there is one.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from wdsfs.door.shard_door import DOOR
from wdsfs.door.urls import BUCKETS, is_remote, is_url, parse
from wdsfs.errors import CommitError, MissingShard, StaleShard, UsageError
from wdsfs.index.record import STRAY, Record
from wdsfs.names import raw_key
from wdsfs.overlay.overlay_directory import OverlayDirectory, read_settings, unfinished
from wdsfs.overlay.overlay_shards import Written, add_outputs, distinct_sample, uncommitted_text
from wdsfs.packing import plan
from wdsfs.packing.diff import Changes, ShardChanges, changes_of
from wdsfs.packing.plan import Key, ShownSamples, Step, canonical
from wdsfs.packing.replacement import Replacement, read_plan
from wdsfs.packing.runner import Runner
from wdsfs.packing.shard_writer import Files
from wdsfs.packing.source_layout import layout, unpacked_size
from wdsfs.packing.upper_walk import Rules
from wdsfs.tar import headers
from wdsfs.tree.indexing import indexed
from wdsfs.tree.set_options import Opening
from wdsfs.tree.shard_set import ShardSet, readable_numbers
from wdsfs.tree.tree import LowerTree

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CommitOptions:
    """Options of the command line. `output` names the new shards: `%06d` or braces for the number.

    `leave_out`: commit although some files cannot be packed; such files stay in the overlay. `with_leavings` and
    `ignore_times` decide what is a change (`Rules`). `allow_missing`: commit although some shards without changes
    cannot be read.
    """

    output: str | None = None
    in_place: bool = False
    link: bool = False

    leave_out: bool = False
    with_leavings: bool = False
    ignore_times: bool = False
    allow_missing: bool = False

    def check(self) -> CommitOptions:
        """Return the same. Raises UsageError for options that do not go together, and names no shard can have."""
        output, in_place, link = self.output, self.in_place, self.link
        clashes = [
            (in_place and link, "--in-place leaves shards without changes alone; there is no --link"),
            (in_place and self.leave_out, "--in-place packs all changes, so there is no --leave-out"),
            (link and is_url(output or ""), "--link is for files, and --output names objects in a store"),
            (
                not in_place and output is None,
                "name the new shards with --output, such as -o 'new/%06d.tar', or use --in-place",
            ),
        ]
        for wrong, text in clashes:
            if wrong:
                raise UsageError(text)
        if output is not None:
            plan.refuse_output(output)
        return self

    @property
    def rules(self) -> Rules:
        return Rules(self.with_leavings, self.ignore_times)


class _InOrder(NamedTuple):
    """The members of samples in a source shard, in the order of the tar: their numbers, first bytes, entries."""

    number: int
    record: Record
    members: plan.Numbers
    heads: plan.Numbers
    entries: plan.Numbers


class Planner:
    """Makes the plan for these changes of the lower.

    Raises UsageError for options that exclude each other, CommitError if something cannot be packed, ShardErrors.
    """

    def __init__(self, lower: ShardSet, changes: Changes, options: CommitOptions) -> None:
        self.lower, self.changes, self.options = lower, changes, options
        self.plan = plan.Plan()
        self._ordered: _InOrder | None = None

    def make(self) -> plan.Plan:
        """Make the plan. Raises what the class says."""
        self._refuse_losses()
        if self.options.in_place:
            self._plan_in_place()
        else:
            name = plan.namer(self.options.output)
            for number, step in enumerate(self._shard_by_shard()):
                step.output.target = name(number)
                self.plan.steps.append(step)
        self._refuse_clashes()
        self._account()
        return self.plan

    def _account(self) -> None:
        """Raise CommitError for a plan that forgets a file of the upper: compare the files with the pieces."""
        if self.changes.upper is None:
            return
        written = {
            piece.path
            for step in self.plan.steps
            for piece in step.output.pieces
            if isinstance(piece, plan.NewMember)
        }
        appended = (changes.appended for changes in self.changes.shards.values())
        new_samples = itertools.chain.from_iterable((*appended, *self.changes.further.values()))
        written -= {new.path for key, members in new_samples for new in members if raw_key(new.name) != key}
        named = {remark.path for remark in self.plan.left_out}
        forgotten = set(self.changes.upper.contents()) - written - named - self.changes.covered
        if forgotten:
            text = "nothing was written, since these files would be lost, by an error of wdsfs"
            paths = [os.fsdecode(path) for path in sorted(forgotten)]
            raise CommitError(f"{text}; please report it:", *_listing(paths))
        strays = set(self._changed_strays())
        for step in self.plan.steps:
            if step.action not in (plan.COPY, plan.LINK):
                self._compare_with_reader(step, strays)

    def _compare_with_reader(self, step: plan.Step, strays: set[bytes]) -> None:
        """Raise CommitError for a planned shard in which a reader would not find each sample and new member."""
        shown = ShownSamples(step, self.lower)
        for piece in step.output.pieces:
            if isinstance(piece, plan.NewMember):
                shown.add_member(piece.name, in_sample=piece.path not in strays)
            elif isinstance(piece, plan.CopiedRange):
                self._add_copies(shown, piece)
        shown.compare()

    def _add_copies(self, shown: ShownSamples, piece: plan.CopiedRange) -> None:
        _, record, members, heads, entries = self._in_order(piece.shard)
        first, stop = np.searchsorted(heads, (piece.start, piece.end)).tolist()
        if first == stop:
            return

        def key(at: int) -> Key:
            plain = record.entry_path(int(entries[at]))
            return Key(plain, lambda: raw_key(self.lower.member_name(piece.shard, int(members[at]))) or plain)

        begun = int(np.count_nonzero(np.diff(entries[first:stop])))
        shown.add_copies(key(first), key(stop - 1), 1 + begun)

    def _in_order(self, number: int) -> _InOrder:
        if self._ordered is None or self._ordered.number != number:  # pieces of a shard come one after the other
            record = indexed(self.lower.record, number)
            members = record.members_in_order()
            heads = record.array("member.head")[members].astype(np.int64) * headers.BLOCK
            entries = np.searchsorted(record.array("entry.member"), members, side="right") - 1
            self._ordered = _InOrder(number, record, members, heads, entries)
        return self._ordered

    def _refuse_losses(self) -> None:
        changes, options = self.changes, self.options
        refused = [("conflict: ", remark) for remark in changes.conflicts]
        if options.in_place or not options.leave_out:
            refused += [("", remark) for remark in changes.unpackable]
        if refused:
            lines = [f"{word}{os.fsdecode(remark.path)}: {remark.reason}" for word, remark in refused]
            advice = [] if options.in_place or changes.conflicts else ["--leave-out packs all others"]
            raise CommitError("these files cannot be packed:", *_listing(lines), *advice)
        self.plan.left_out = [*changes.leavings, *changes.unpackable]

    def _changed_strays(self) -> Iterator[bytes]:
        """Yield the paths of the files that replace members of no sample."""
        for number, changes in self.changes.shards.items():
            record = self.lower.record(number)
            for member, news in changes.members.items():
                if record.entry_flags[record.entry_of(member)] & STRAY:
                    yield from (new.path for new in news)

    def _refuse_clashes(self) -> None:
        places = Counter(plan.canonical(shard.path) for shard in self.lower.shards)
        targets = plan.Targets(() if self.options.in_place else places, "choose another --output, or --in-place")
        for target in (plan.canonical(step.target) for step in self.plan.steps):
            targets.add(target, is_tar=self.options.in_place and (target in places or os.path.lexists(target)))
            if places[target] > 1:
                raise CommitError(f"{os.fsdecode(target)} is several shards of the set")

    # --- one shard for each

    def _shard_by_shard(self) -> Iterator[plan.Step]:
        for number in readable_numbers(self.lower, self.options.allow_missing):
            yield self._rewritten(number) if number in self.changes.shards else self._whole(number)
        yield from self._further()

    def _whole(self, number: int) -> plan.Step:
        """Return the step that copies or links a shard. Its record is not read: most shards are unchanged."""
        summary = indexed(self.lower.summary, number)
        path = self.lower.shards[number].path
        self.plan.sources[number] = plan.SourceShard(path, summary.fingerprint)
        if self.options.link and is_remote(path):
            raise CommitError(f"{os.fsdecode(path)}: a store has no hard links; leave out --link")
        size = unpacked_size(path)
        if size is not None and self.options.link:
            text = "is compressed: a hard link would not be the plain tar that its name promises; leave out --link"
            raise CommitError(f"{os.fsdecode(path)} {text}, which unpacks it")
        pieces: list[plan.Piece] = [plan.CopiedRange(number, 0, summary.size if size is None else size)]
        return plan.Step(
            plan.Output(b"", pieces), plan.LINK if self.options.link else plan.COPY, number, summary.samples
        )

    def _rewritten(self, number: int) -> plan.Step:
        record, path = indexed(self.lower.record, number), self.lower.shards[number].path
        changes = self.changes.shards[number]
        if changes.fingerprint != record.fingerprint:
            # The changes have the numbers of the record that they were found with.
            raise StaleShard(f"{self.lower.path_text(number)} has changed since it was looked at; start again")
        self.plan.sources[number] = plan.SourceShard(path, record.fingerprint)
        samples = record.samples + len(changes.appended) - _removed(record, changes)
        appended = [new for sample in changes.appended for new in sample.members]
        pieces = layout(number, path, record).pieces(changes.members, changes.following, appended)
        return plan.Step(plan.Output(b"", pieces), plan.REWRITE, number, samples)

    def _further(self) -> Iterator[plan.Step]:
        """Yield the samples of new shard directories: at least a shard for each."""
        for top in sorted(self.changes.further):
            sized = ((sample, sample.size, sample.key) for sample in self.changes.further[top])
            for placed in plan.rolled(sized, plan.MAXCOUNT, plan.MAXSIZE):
                pieces = [new for sample in placed for new in sample.members]
                output = plan.Output(b"", [*pieces, plan.Zeros(len(headers.END))])
                yield plan.Step(output, plan.NEW, None, len(placed))

    # --- in place

    def _plan_in_place(self) -> None:
        self._refuse_remote()
        for number in sorted(self.changes.shards):
            self._refuse_compressed_in_place(number, "replaced")
            plan.refuse_foreign_link(self.lower.shards[number].path)
            plan.refuse_shared_content(self.lower.shards[number].path)
            step = self._rewritten(number)
            step.output.target = plan.canonical(self.lower.shards[number].path)
            self.plan.steps.append(step)
        further = list(self._further())
        if further:
            names = self._further_names()
            for step in further:
                step.output.target = next(names)
                self.plan.steps.append(step)

    def _refuse_remote(self) -> None:
        """Refuse shards that cannot be written where they are. Raises CommitError."""
        for number, shard in enumerate(self.lower.shards):
            if is_remote(shard.path) and parse(os.fsdecode(shard.path)).scheme not in BUCKETS:
                text = "cannot be replaced where it is: name new shards with --output, without --in-place"
                raise CommitError(f"{self.lower.path_text(number)} {text}")

    def _refuse_compressed_in_place(self, number: int, what: str) -> None:
        if self.lower.is_compressed(number):
            text = f"is compressed: under such a name it cannot be {what} by a plain tar; commit with --output"
            raise CommitError(f"{self.lower.path_text(number)} {text}")

    def _further_names(self) -> Iterator[bytes]:
        """Return names for new shards beside the old ones: by the pattern, or counting on from the set's."""
        if self.options.output is not None:
            name = plan.namer(self.options.output)
            candidates: Iterator[bytes] = map(name, itertools.count())
        elif not self.lower.shards:
            raise UsageError("a new set has no shards to put new ones beside: name them with --output")
        else:
            with contextlib.suppress(*[MissingShard] * self.options.allow_missing):
                self._refuse_compressed_in_place(len(self.lower) - 1, "followed")
            candidates = plan.continued(self.lower.shards[-1].path)
        return (name for name in candidates if not _exists(name))


def _exists(target: bytes) -> bool:
    if not is_remote(target):
        return os.path.lexists(target)
    return bool(DOOR.remote.existing_objects([target]))


def _listing(lines: Sequence[str]) -> list[str]:
    """Return the first lines of a long list, for a message."""
    more = [f"  and {len(lines) - 10} more; see: wdsfs diff"] if len(lines) > 10 else []
    return [f"  {line}" for line in lines[:10]] + more


def _removed(record: Record, changes: ShardChanges) -> int:
    """Return the number of samples of a shard that are removed."""
    entries = {record.entry_of(member) for member in changes.members}
    samples = {entry for entry in entries if not record.entry_flags[entry] & STRAY}
    return len(samples - changes.entries)


# --- writing -------------------------------------------------------------------------------------------------


class OverlayCommit:
    """A commit of the overlay at `place` over the set that `tree` shows, planned.

    Where a commit in place was stopped half-way, it only goes on: then there are no `changes`. `mountpoint` is
    that of the mount that is committed. Raises UsageError, CommitError, ShardErrors, OSErrors.
    """

    def __init__(
        self,
        place: OverlayDirectory,
        tree: LowerTree,
        options: CommitOptions,
        mountpoint: str | None = None,
    ) -> None:
        self.place, self.lower, self.options = place, tree.lower, options
        self.changes: Changes | None = None
        if unfinished(place):
            self.plan = read_plan(place, tree.lower)
        else:
            self.changes = changes_of(place, tree, options.rules)
            if self.changes or not options.in_place:
                _refuse_reading(place, mountpoint)
            self.plan = Planner(tree.lower, self.changes, options).make()
        plan.refuse_below(self.plan, str(place.path), "the directory of the overlay")
        if mountpoint is not None:
            plan.refuse_below(self.plan, mountpoint, "the mount that is committed")

    @property
    def is_half_way(self) -> bool:
        """True if shards may have been replaced, so that the commit has to be finished."""
        return unfinished(self.place)

    def write(
        self,
        opening: Opening,
        on_bytes: Callable[[int], None] = lambda _: None,
        show: Callable[[Sequence[bytes], Sequence[bytes]], None] = lambda _new, _replaced: None,
        *,
        space_check: bool = True,
    ) -> list[Step]:
        """Write the shards of the plan; return the steps that were done now.

        `space_check` and `show` are for a commit in place (`Replacement`). Raises CommitError,
        ShardErrors, OSErrors.
        """
        in_place = self.options.in_place
        runner = Runner(
            self.plan,
            Files(os.fsencode(self.place.upper)),
            self.lower,
            opening.jobs,
            on_bytes=on_bytes,
            workers=opening.workers,
            space_check=in_place and space_check,
        )
        if not in_place:
            self._note_outputs(done=False)
            steps = runner.write()
            self._note_outputs(done=True)
            return steps
        if not self.plan.steps:
            return []
        replacement = Replacement(self.place, runner, show)
        if self.changes is not None:
            replacement.begin()
        return replacement.finish()

    def _note_outputs(self, *, done: bool) -> None:
        """Note which shards have the changes of the overlay, so that the overlay is not used over them."""
        changes, pattern = self.changes, self.options.output
        assert changes is not None
        assert pattern is not None
        written = []
        for step in self.plan.steps:
            if step.number in changes.shards or (step.number is None and (changes.shards or changes.further)):
                path, length = canonical(step.target), step.output.length
                if is_remote(path):
                    etag = DOOR.remote.pin_of(path).etag if done else ""
                    written.append(Written(path, length, pattern, etag=etag))
                else:
                    sources = [self.plan.sources[number].path for number in step.output.sources]
                    sample = distinct_sample(path, step.output.first_change, sources) if done else None
                    written.append(Written(path, length, pattern, sample))
        try:
            if written:
                add_outputs(self.place, written)
        except OSError as error:  # an overlay on a read-only disk can be committed, too
            text = "%s cannot be written (%s): nothing will stop this overlay from being used over the new shards"
            log.warning(text, self.place.outputs, error.strerror)


def _refuse_reading(place: OverlayDirectory, mountpoint: str | None) -> None:
    """Raise CommitError for an overlay over shards that are read with options, as earlier releases took them.

    Semantics decision: the new shards would have to be repaired, so that other readers find the samples that the
    mount shows. `pack` does that for a whole set, before it is edited.
    """
    settings = read_settings(place)
    if settings is not None and not settings.reading.is_plain:
        raise CommitError(uncommitted_text(place, settings, mountpoint or "MOUNTPOINT"))


class Abandoned(NamedTuple):
    """The shards of a commit in place that was ended half-way: the written ones, and the others.

    `aside` is where the overlay was moved to, if it was.
    """

    done: list[Step]
    left: list[Step]
    aside: Path | None


def abandon(
    place: OverlayDirectory, tree: LowerTree, show: Callable[[Sequence[bytes], Sequence[bytes]], None]
) -> Abandoned:
    """Give up a commit in place that was stopped half-way. Raises CommitError."""
    if not unfinished(place):
        raise CommitError("no commit in place of this overlay was stopped half-way, so there is none to abandon")
    runner = Runner(read_plan(place, tree.lower), Files(), tree.lower)
    done, aside = Replacement(place, runner, show=show).abandon(tree.merged)
    return Abandoned(done, [step for step in runner.plan.steps if step not in done], aside)
