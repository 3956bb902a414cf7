"""An overlay as a source of new shards: plans which are written, and from which pieces.

Rules: an edited sample stays where its first member was, samples stay in their order, new samples follow the last
one of their shard. Unchanged members are raw ranges. The same input gives the same bytes. A shard that is read
with options (`names.Reading`) is rewritten, even without other changes, so that other tools find the same
samples in it.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsfs.door.urls import BUCKETS, is_remote, is_url, parse
from wdsfs.errors import CommitError, MissingShard, ShardError, StaleShard, UsageError
from wdsfs.index.record import STRAY, Record
from wdsfs.names import raw_key, split
from wdsfs.packing import plan
from wdsfs.packing.diff import Changes, NewSample, ShardChanges
from wdsfs.packing.shown_samples import Key, ShownSamples
from wdsfs.packing.source_layout import Cut, SourceLayout, layout, unpacked_size
from wdsfs.packing.upper_walk import Rules
from wdsfs.tar import headers
from wdsfs.tar.problems import HARMLESS
from wdsfs.tree.indexing import indexed
from wdsfs.tree.shard_set import ShardSet, readable_numbers

# The reason why a changed file is in no shard of a commit with --changed-only.
NO_SAMPLE = "is in no sample, and --changed-only writes samples"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CommitOptions:
    """Options of the command line. `output` names the new shards: `%06d` or braces for the number.

    `leave_out`: commit although some files cannot be packed; they stay in the overlay. `with_leavings` and
    `ignore_times` decide what is a change (`Rules`). `allow_missing`: commit although some shards cannot
    be read; these have no changes.
    """

    output: str | None = None
    maxcount: int | None = None
    maxsize: float | None = None
    changed_only: bool = False
    in_place: bool = False
    link: bool = False
    sort: bool = False

    leave_out: bool = False
    with_leavings: bool = False
    ignore_times: bool = False
    allow_missing: bool = False

    def check(self) -> CommitOptions:
        """Return the same. Raises UsageError for options that do not go together, and names no shard can have."""
        output, in_place, link = self.output, self.in_place, self.link
        clashes = [
            (in_place and self.changed_only, "--in-place and --changed-only exclude each other"),
            (in_place and link, "--in-place leaves shards without changes alone; there is no --link"),
            (in_place and self.leave_out, "--in-place packs all changes, so there is no --leave-out"),
            (self.changed_only and link, "--changed-only writes no shard without changes to --link"),
            (link and (self.sort or self.resplits), "--link is for shards that stay as they are"),
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

    @property
    def resplits(self) -> bool:
        """True if the samples are distributed to shards of another size."""
        return not self.in_place and not self.changed_only and (self.maxcount or self.maxsize) is not None


class Unit(NamedTuple):
    """A sample and the strays after it; strays alone have no key, and 0 `samples`."""

    key: bytes
    samples: int
    size: int
    pieces: list[plan.Piece]


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
            in_a_row = self.options.changed_only or self.options.resplits
            name = plan.namer(self.options.output)
            for number, step in enumerate(self._in_a_row() if in_a_row else self._shard_by_shard()):
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
            text = "nothing was written, since these files would be lost; this is an error of wdsfs"
            paths = [os.fsdecode(path) for path in sorted(forgotten)]
            raise CommitError(f"{text}, please report it:", *_listing(paths))
        strays = {new.path for new in self._changed_strays()}
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
        if options.changed_only:
            self.plan.left_out += self._changed_strays()

    def _changed_strays(self) -> Iterator[plan.Remark]:
        """Yield changed members of no sample, which have no place among whole samples."""
        for number, changes in sorted(self.changes.shards.items()):
            record = self.lower.record(number)
            for member, news in sorted(changes.members.items()):
                if record.entry_flags[record.entry_of(member)] & STRAY:
                    yield from (plan.Remark(new.path, NO_SAMPLE) for new in news)

    def _source(self, number: int) -> Record:
        """Return the record of a shard, and add the shard to the plan."""
        record = indexed(self.lower.record, number)
        self.plan.sources[number] = plan.SourceShard(self.lower.shards[number].path, record.fingerprint)
        return record

    def _layout(self, number: int) -> tuple[Record, SourceLayout]:
        record = self._source(number)
        changes = self.changes.shards.get(number)
        if changes is not None and changes.fingerprint != self.plan.sources[number].fingerprint:
            # The changes have the numbers of the record that they were found with.
            raise StaleShard(f"{self.lower.path_text(number)} has changed since it was looked at; start again")
        return record, layout(number, self.lower.shards[number].path, record)

    def _refuse_clashes(self) -> None:
        places = Counter(plan.canonical(shard.path) for shard in self.lower.shards)
        targets = plan.Targets(() if self.options.in_place else places, "choose another --output, or --in-place")
        for target in (plan.canonical(step.target) for step in self.plan.steps):
            targets.add(target, self.options.in_place and (target in places or os.path.lexists(target)))
            if places[target] > 1:
                raise CommitError(f"{os.fsdecode(target)} is several shards of the set")

    # --- one shard for each

    def _shard_by_shard(self) -> Iterator[plan.Step]:
        for number in readable_numbers(self.lower, self.options.allow_missing):
            as_it_is = number not in self.changes.shards and not self.options.sort and not self._mends(number)
            yield self._whole(number) if as_it_is else self._rewritten(number)
        yield from self._further()

    def _mends(self, number: int) -> bool:
        """Return True if a shard without changes is rewritten, because other readers find other samples in it."""
        if self.lower.shards[number].reading.is_plain:
            return False
        try:
            record = indexed(self.lower.record, number)
        except ShardError:
            if not self.options.allow_missing:
                raise
            return False
        if not record.is_irregular:
            return False
        damage = next((problem for problem in record.problems if problem.kind not in HARMLESS), None)
        reason = None if damage is None else f"is damaged ({damage.text})"
        if reason is None and self.options.in_place and self.lower.is_compressed(number):
            reason = "is compressed, so it cannot be replaced by a plain tar"
        if reason is not None:
            text = "%s %s: it is not rewritten, and other readers still find other samples in it"
            log.warning(text, self.lower.path_text(number), reason)
        return reason is None

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
        record, source = self._layout(number)
        changes = self.changes.shards.get(number, ShardChanges())
        samples = record.samples + len(changes.appended) - _removed(record, changes)
        if source.moves:
            self._refuse_scattering(number, record, source)
        if self.options.sort:
            units = self._sorted(list(self._units(number, record, source, changes)))
            pieces = source.whole([piece for unit in units for piece in unit.pieces])
        else:
            new = (member for sample in changes.appended for member in sample.members)
            appended = [member._replace(common=source.common) for member in new]
            pieces = source.pieces(_cuts(source, changes), appended)
        return plan.Step(plan.Output(b"", pieces), plan.REWRITE, number, samples)

    # --- samples in a row

    def _in_a_row(self) -> Iterator[plan.Step]:
        """Yield shards of the samples of the set, or of those that change, then of new shard directories."""
        if self.options.changed_only:
            old = map(self._delta_units, sorted(self.changes.shards))
        else:
            old = map(self._units_of, readable_numbers(self.lower, self.options.allow_missing))
        new = (map(_unit_of, self.changes.further[top]) for top in sorted(self.changes.further))
        yield from self._rolled(itertools.chain.from_iterable(itertools.chain(old, new)))

    def _units_of(self, number: int) -> Iterator[Unit]:
        record, source = self._layout(number)
        if any(problem.kind == "behind end mark" for problem in record.problems):
            log.warning("%s: the data after its end mark is not in the new shards", self.lower.path_text(number))
        yield from self._units(number, record, source, self.changes.shards.get(number, ShardChanges()))

    def _further(self) -> Iterator[plan.Step]:
        """Yield the samples of new shard directories: at least a shard for each."""
        for top in sorted(self.changes.further):
            yield from self._rolled(map(_unit_of, self.changes.further[top]))

    def _rolled(self, units: Iterator[Unit]) -> Iterator[plan.Step]:
        """Yield shards of these units."""
        fill = plan.ShardFill(self.options.maxcount, self.options.maxsize)
        placed: list[Unit] = []
        for unit in units:
            if unit.samples and fill.starts_another(unit.size, unit.key):
                step, trailing = self._shard_of(placed)
                yield step
                placed = [Unit(b"", 0, 0, trailing)]  # a global header stays in front of its members
            placed.append(unit)
        if placed:
            yield self._shard_of(placed)[0]

    def _shard_of(self, units: list[Unit]) -> tuple[plan.Step, list[plan.Piece]]:
        """Return a new shard, and the global headers after its last member."""
        units = self._sorted(units) if self.options.sort else units
        pieces, trailing = plan.split_trailing([piece for unit in units for piece in unit.pieces])
        output = plan.Output(b"", plan.joined([*pieces, plan.Zeros(len(headers.END))]))
        return plan.Step(output, plan.NEW, None, sum(unit.samples for unit in units)), trailing

    def _sorted(self, units: list[Unit]) -> list[Unit]:
        """Sort the samples by key, bytewise; strays before the first sample stay there."""
        samples = sorted((unit for unit in units if unit.samples), key=lambda unit: unit.key)
        for first, second in itertools.pairwise(samples):
            if first.key == second.key:
                text = f"the key {os.fsdecode(first.key)!r} occurs twice: sorted, the two samples would be one"
                raise CommitError(text)
        return [unit for unit in units if not unit.samples] + samples

    def _units(self, number: int, record: Record, source: SourceLayout, changes: ShardChanges) -> Iterator[Unit]:
        """Yield the samples of a shard in order, with the changes."""
        self._refuse_scattering(number, record, source)
        cuts = _cuts(source, changes)
        in_sample = (record.array("entry.flags")[source.entries] & STRAY) == 0
        # A sample begins with its first member. Members that lie apart are among the cuts.
        firsts = np.unique(source.entries[in_sample], return_index=True)[1]
        places = np.sort(np.flatnonzero(in_sample)[firsts])
        borders = [*source.heads[places].tolist(), source.tail]
        sizes = _sizes_of_units(source, in_sample, places)
        at = bisect.bisect_left(cuts, borders[0], key=lambda cut: cut.start)
        yield Unit(b"", 0, 0, list(source.between(0, borders[0], cuts[:at])))
        for nth, place in enumerate(places.tolist()):
            start, end = borders[nth], borders[nth + 1]
            first = at
            # New members after the last one of a sample are at its end, which may be the start of the next one.
            while at < len(cuts) and (cuts[at].start < end or cuts[at].end == cuts[at].start == end):
                at += 1
            pieces = list(source.between(start, end, cuts[first:at]))
            key, left, change = _outcome(record, int(source.entries[place]), changes)
            yield Unit(key, int(left), sizes[nth] + change if left else 0, pieces)
        yield from map(_unit_of, changes.appended)

    def _refuse_scattering(self, number: int, record: Record, source: SourceLayout) -> None:
        """Refuse to move members away from others that depend on them. Raises CommitError."""
        what = "hard links" if record.has_links else "a global PAX header" if source.common else ""
        if what:
            cannot = "its samples can neither be sorted nor divided among other shards"
            if source.moves:
                cannot = "members that lie apart cannot be moved; use it without --group-by-key"
            raise CommitError(f"{self.lower.path_text(number)} has {what}: {cannot}")

    def _delta_units(self, number: int) -> Iterator[Unit]:
        """Yield the changed and new samples of a shard, whole."""
        changes = self.changes.shards[number]
        record, source = self._layout(number)
        if changes.entries:
            self._refuse_scattering(number, record, source)
        for entry in sorted(changes.entries, key=lambda entry: source.member(record.entry_member[entry])):
            pieces: list[plan.Piece] = []
            for member in record.entry_members(entry):
                new = changes.members.get(member)
                pieces += source.pieces_of(member) if new is None else new
                pieces += changes.following.get(member, ())
            key, _, change = _outcome(record, entry, changes)
            size = sum(record.member(member).size for member in record.entry_members(entry))
            yield Unit(key, 1, size + change, pieces)
        yield from map(_unit_of, changes.appended)

    # --- in place

    def _plan_in_place(self) -> None:
        self._refuse_remote()
        for number in range(len(self.lower)):
            if number not in self.changes.shards and not self._mends(number):
                continue
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
    from wdsfs.door.shard_door import DOOR

    return bool(DOOR.remote.existing([target]))


def _listing(lines: Sequence[str]) -> list[str]:
    """Return the first lines of a long list, for a message."""
    more = [f"  and {len(lines) - 10} more; see: wdsfs diff"] if len(lines) > 10 else []
    return [f"  {line}" for line in lines[:10]] + more


def _unit_of(sample: NewSample) -> Unit:
    return Unit(sample.key, 1, sum(new.size for new in sample.members), list(sample.members))


def _sizes_of_units(source: SourceLayout, in_sample: NDArray[np.bool_], places: NDArray[np.int64]) -> list[int]:
    """Return the bytes of content of each unit: of its sample, and of the strays after it."""
    unit_of = np.searchsorted(places, np.arange(len(source.sizes)), side="right") - 1
    numbers = np.full(int(source.entries.max(initial=-1)) + 1, -1)
    numbers[source.entries[places]] = np.arange(len(places))
    unit_of[in_sample] = numbers[source.entries[in_sample]]
    totals = np.zeros(len(places) + 1, np.int64)  # the last element: before the first sample
    np.add.at(totals, unit_of, source.sizes)
    sizes: list[int] = totals.tolist()
    return sizes


def _removed(record: Record, changes: ShardChanges) -> int:
    """Return the number of samples of a shard that are removed."""
    entries = {record.entry_of(member) for member in changes.members}
    samples = {entry for entry in entries if not record.entry_flags[entry] & STRAY}
    return len(samples - changes.entries)


def _cuts(source: SourceLayout, changes: ShardChanges) -> list[Cut]:
    def with_common(news: dict[int, tuple[plan.NewMember, ...]]) -> dict[int, tuple[plan.NewMember, ...]]:
        return {m: tuple(new._replace(common=source.common) for new in some) for m, some in news.items()}

    return source.cut(with_common(changes.members), with_common(changes.following))


def _outcome(record: Record, entry: int, changes: ShardChanges) -> tuple[bytes, bool, int]:
    """Return the key of a changed sample, True if any member is left, and the bytes by which it grows."""
    change, left, key = 0, False, record.entry_path(entry)
    for member in record.entry_members(entry):
        new = changes.members.get(member)
        if new is None:
            left = True
        else:
            change -= record.member(member).size
        for news in (*(new or ()), *changes.following.get(member, ())):
            left, change = True, change + news.size
            parts = split(news.name)
            if parts is not None and new:
                key = parts.folder + parts.stem
    return key, left, change
