"""A view of a set as a source of new shards: chosen samples, renamed columns, fields of JSON, labels ...

If the options only choose samples, these are copied as raw ranges. Else every member gets a new header, and the
content that a mount would show. The order is the order of the tar, or a given order. Only shards that are written
at the same time are planned at the same time, because the plan of a whole set could be larger than the memory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import xxhash

from wdsfs import names
from wdsfs.durable import CHUNK
from wdsfs.errors import CommitError, counted, several
from wdsfs.index.record import Record
from wdsfs.packing import reasons
from wdsfs.packing.file_samples import NO_CLASS, listed, shuffled, split_of
from wdsfs.packing.file_source import PackOptions
from wdsfs.packing.plan import (
    FIRST_MEMBERS,
    NEW,
    Key,
    NewMember,
    Output,
    Piece,
    Plan,
    PlannedMember,
    ShownSamples,
    SourceShard,
    Step,
    Targets,
    Zeros,
    joined,
    planned_members,
    refuse_beyond,
    rolled,
    shown_values,
)
from wdsfs.packing.runner import Runner
from wdsfs.packing.source_layout import SourceLayout, layout, pieces_of
from wdsfs.tar import headers
from wdsfs.tar.problems import HARMLESS
from wdsfs.tree import content as content_module
from wdsfs.tree.indexing import indexed
from wdsfs.tree.numbered_tree import samples_of
from wdsfs.tree.shard_set import ShardSet, readable_numbers
from wdsfs.tree.view_set import ViewSet


class _Sample(NamedTuple):
    """A sample to be packed: its key, its members without padding to others, and their content in bytes."""

    key: bytes
    pieces: list[Piece]
    size: int


class ViewContents:
    """The content of members of a set. The `path` of each says where it is: shard, tag and number."""

    def __init__(self, lower: ShardSet) -> None:
        self._lower = lower

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[[NewMember], Iterator[bytes]]]:
        yield self.read

    def read(self, member: NewMember) -> Iterator[bytes]:
        """Yield the content of a member in pieces. Raises ShardErrors."""
        if member.content is not None:
            yield member.content
            return
        content = indexed(self._lower.content, *map(int, member.path.split()))
        for at in range(0, content.size, CHUNK):
            yield content_module.read(content, at, CHUNK)


LAYOUTS = 64  # of shards with sparse members that are kept, for samples in another order
SAMPLES_AT_ONCE = 1000  # samples of a shard that are made together, from one reading of its record

Namer = Callable[[int], bytes]  # from a number, from 0 on, to the path of that new shard


class NewSet(NamedTuple):
    """A set of new shards: its split ("" for none), the paths of the shards, and its samples in order.

    The samples are given by the numbers of their shards and by their entries.
    """

    split: str
    name: Namer
    samples: Iterable[tuple[int, Sequence[int]]]


class _Shard(NamedTuple):
    """A source shard of samples; `size` (bytes of the tar) is None if its samples cannot be copied unchanged.

    `record` shows the view, `plain` the shard itself.
    """

    number: int
    record: Record
    tag: int
    plain: Record
    size: int | None


class ViewPack:
    """New shards of what `lower` shows.

    `on_shard` is called after each shard of the set. New shards are written `jobs` at a time, if all samples in
    them are copied as they are. With `allow_missing` shards that cannot be read are left out.
    """

    def __init__(
        self,
        lower: ShardSet,
        options: PackOptions,
        on_shard: Callable[[], None] = lambda: None,
        jobs: int = 1,
        *,
        allow_missing: bool = False,
    ) -> None:
        self.lower, self.options, self._on_shard, self._jobs = lower, options, on_shard, jobs
        self._allow_missing = allow_missing
        self._only_chooses = not isinstance(lower, ViewSet) or lower.composition.only_chooses
        self._last_dot = lower.shards[0].reading.last_dot
        self._layout, self._sizes = lru_cache(LAYOUTS)(self._measured), dict[int, int | None]()
        self.plan = Plan()  # of the shards so far, without their pieces
        self.splits: list[str] = []  # of each shard of the plan, "" for none
        self.done: list[Step] = []  # those of them that were written now
        self.left_out = 0  # members of the set that are in no sample
        self.first: list[PlannedMember] = []  # members at the start of the first shard
        self.shown: list[dict[str, Any]] = []  # what `shown_values` returns of these, if nothing is written

    def run(self, *, write: bool) -> None:
        """Write the shards, or only plan them. Shards that a killed command has finished are kept.

        Raises CommitError, UsageError, ShardErrors, OSErrors.
        """
        self._refuse_damage()
        if self._last_dot:
            self._refuse_meeting_keys()
        targets = Targets(shard.path for below in self.lower.sources for shard in below.shards)
        waiting = self._steps()
        while steps := [*itertools.islice(waiting, self._jobs)]:
            for step in steps:
                targets.add(step.target)
                if not self.first:
                    members = planned_members(step.output, self.lower, ViewContents(self.lower).read)
                    self.first = [*itertools.islice(members, FIRST_MEMBERS)]
                    self.shown = [] if write else shown_values(self.first)
            written = self._runner(steps).write_missing() if write else []
            # Keep only the lengths, because memory must not grow with the set.
            self.done += map(_without_pieces, written)
            self.plan.steps += map(_without_pieces, steps)
        if not self.plan.steps:
            raise CommitError("there is nothing to write: no sample is shown with these options")

    def _runner(self, steps: list[Step]) -> Runner:
        plain = self.lower.plain
        # The set is read by one thread, so only ranges of its shards are copied by several.
        copies = not any(isinstance(piece, NewMember) for step in steps for piece in step.output.pieces)
        sources = {
            number: SourceShard(plain.shards[number].path, plain.record(number).fingerprint)
            for step in steps
            for number in step.output.sources
        }
        return Runner(Plan(steps, sources), ViewContents(self.lower), plain, self._jobs if copies else 1)

    def _refuse_damage(self) -> None:
        """Refuse damaged shards before anything is written. Raises CommitError."""
        for number in readable_numbers(self.lower, self._allow_missing):
            if not indexed(self.lower.summary, number).problems:
                continue
            for problem in indexed(self.lower.record, number).problems:
                if problem.kind not in HARMLESS:
                    text = "leave out the shard, the option, or the samples"
                    raise CommitError(f"{self.lower.path_text(number)} is damaged ({problem.text}): {text}")

    # --- which samples are in which shard

    def _steps(self) -> Iterator[Step]:
        if self.options.keep_shards:
            yield from self._shard_by_shard(self.options.names[0])
            return
        for split, name, samples in self._new_sets():
            for step in self._rolled(
                name, itertools.chain.from_iterable(itertools.starmap(self._samples, samples))
            ):
                self.splits.append(split)
                yield step

    def _new_sets(self) -> list[NewSet]:
        """Return the new sets of shards: one in the order of the set, or the sets that the options ask for."""
        options = self.options
        if options.shuffle is None and options.order is None and not options.splits:
            return [NewSet("", options.names[0], self._in_order())]
        return sets_of(self.lower, options, self._on_shard)

    def _in_order(self) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield all samples of the set, in its order."""
        for number in readable_numbers(self.lower, self._allow_missing):
            entries = self._entries(number)
            yield from (
                (number, entries[at : at + SAMPLES_AT_ONCE]) for at in range(0, len(entries), SAMPLES_AT_ONCE)
            )
            self._on_shard()

    def _shard_by_shard(self, name: Namer) -> Iterator[Step]:
        """Yield a new shard for each source shard. Semantics decision: no new shard is without samples."""
        count = 0
        for number in readable_numbers(self.lower, self._allow_missing):
            samples = self._samples(number, self._entries(number))
            for first, second in itertools.pairwise(samples):
                if first.key == second.key:
                    text = "occurs twice in a row, and readers would take both for one sample; use --group-by-key"
                    raise CommitError(f"{self.lower.path_text(number)}: the key {os.fsdecode(first.key)!r} {text}")
            if samples:
                self.splits.append("")
                yield self._step(name(count), number, samples)
                count += 1
            self._on_shard()
        self._refuse_beyond(name, count)

    def _rolled(self, name: Namer, samples: Iterable[_Sample]) -> Iterator[Step]:
        """Yield shards of these samples, by the limits of the options."""
        count = 0
        sized = ((sample, sample.size, sample.key) for sample in samples)
        for count, placed in enumerate(rolled(sized, self.options.maxcount, self.options.maxsize), 1):
            yield self._step(name(count - 1), None, placed)
        if count:
            self._refuse_beyond(name, count)

    def _step(self, target: bytes, number: int | None, samples: Sequence[_Sample]) -> Step:
        """Return a new shard of these samples, compared with what a reader finds in it. Raises CommitError."""
        pieces = joined(piece for sample in samples for piece in sample.pieces)
        step = Step(Output(target, [*pieces, Zeros(len(headers.END))]), NEW, number, len(samples))
        shown = ShownSamples(step, self.lower)
        for sample in samples:
            new = [piece.name for piece in sample.pieces if isinstance(piece, NewMember)]
            if not new:
                key = Key(sample.key, lambda: b"")
                shown.add_copies(key, key)
            for name in new:
                shown.add_member(name)
        shown.compare()
        return step

    def _refuse_beyond(self, name: Namer, count: int) -> None:
        """Raise CommitError if the next name exists, because a glob over the new set would include that file."""
        if "%" in self.options.output and os.path.lexists(name(count)):
            refuse_beyond(name(count))

    # --- samples

    def _entries(self, number: int) -> list[int]:
        """Return the samples of a shard of the set, in the order of the tar or of their keys."""
        entries = [int(entry) for entry in indexed(samples_of, self.lower, number)]
        plain = indexed(self.lower.plain.record, number)
        self.left_out += plain.entries - plain.samples
        if self.options.sort:
            entries.sort(key=indexed(self.lower.record, number).entry_path)
        return entries

    def _samples(self, number: int, entries: Sequence[int]) -> list[_Sample]:
        """Return these samples of a shard. No other shard is used meanwhile: the record would not stay valid."""
        shard = self._opened_shard(number)
        make = self._copied_sample if shard.size is not None else self._new_sample
        return [make(shard, entry) for entry in entries]

    def _copied_sample(self, shard: _Shard, entry: int) -> _Sample:
        record = shard.record
        members = record.entry_members(entry)
        own = members if record.view is None else [record.address(member)[1] for member in members]
        if shard.plain.apart:
            self._refuse_doubled(shard, entry)
        pieces = itertools.chain.from_iterable(self._copies(shard, member) for member in sorted(own))
        return _Sample(record.entry_path(entry), joined(pieces), int(record.sizes(members).sum()))

    def _refuse_doubled(self, shard: _Shard, entry: int) -> None:
        """Raise CommitError for a sample whose adjacent members readers would refuse."""
        record = shard.record
        extensions = [names.lower_case(record.extension(member)) for member in record.entry_members(entry)]
        if len(set(extensions)) < len(extensions):
            where = f"{self.lower.path_text(shard.number)}: {os.fsdecode(record.entry_path(entry))}"
            raise CommitError(
                f"{where} has an extension twice, in members that lie apart: side by side readers refuse them; "
                "leave out the sample (--keys), or name the columns (--columns)"
            )

    def _new_sample(self, shard: _Shard, entry: int) -> _Sample:
        pieces = list(self._new_members(shard, entry))
        key = names.without_dots(shard.record.entry_path(entry))  # only keys with `last_dot` have dots
        return _Sample(key, [*pieces], sum(piece.size for piece in pieces))

    def _opened_shard(self, number: int) -> _Shard:
        if number not in self._sizes:
            self._sizes[number] = self._copied_size(number)
        record, plain = (indexed(lower.record, number) for lower in (self.lower, self.lower.plain))
        return _Shard(number, record, self.lower.tag(number), plain, self._sizes[number])

    def _copied_size(self, number: int) -> int | None:
        """Return the bytes of a shard whose samples are copied as they are; None for another."""
        if not self._only_chooses or self._last_dot:
            return None
        measured = self._layout(number)
        # Headers of members that a global one in front of them completes mean something else without it.
        return None if measured.common else measured.size

    def _measured(self, number: int) -> SourceLayout:
        return layout(number, self.lower.shards[number].path, indexed(self.lower.plain.record, number))

    def _copies(self, shard: _Shard, member: int) -> Iterator[Piece]:
        """Return the pieces of a member. Only where members are sparse does that take a layout of the shard."""
        assert shard.size is not None
        if "sparse.member" in shard.plain.column:
            return self._layout(shard.number).pieces_of(member)
        return pieces_of(shard.number, shard.plain.member(member), shard.size)

    def _new_members(self, shard: _Shard, entry: int) -> Iterator[NewMember]:
        record = shard.record
        original, taken, mtime_ns = record.entry_path(entry), {names.KEY_COLUMN} if self._last_dot else set(), 0
        key = names.without_dots(original)
        for member in record.entry_members(entry):
            extension = record.extension(member)
            name = key + b"." + extension
            reason = reasons.obstacle(key, extension, taken)
            if reason is not None:
                path = self.lower.path_text(shard.number)
                raise CommitError(
                    f"{path}: {os.fsdecode(name)} cannot be packed: {reason}; see --columns NAME=..."
                )
            size, mtime_ns = record.size_and_time(member)
            yield NewMember(name, b"%d %d %d" % (shard.number, shard.tag, member), size, mtime_ns)
        if self._last_dot:
            name = key + b"." + names.KEY_COLUMN
            yield NewMember(name, b"", len(original), mtime_ns, content=original)

    def _refuse_meeting_keys(self) -> None:
        """Raise CommitError if two keys are equal without their dots. Takes 16 bytes for each sample."""
        hashed = xxhash.xxh3_64_intdigest
        both = (hashed(text) for key in self._all_keys() for text in (key, names.without_dots(key)))
        keys, without = np.fromiter(both, np.uint64).reshape(-1, 2).T
        order = np.lexsort((keys, without))
        meeting = (np.diff(without[order]) == 0) & (np.diff(keys[order]) != 0)
        if meeting.any():
            shared = int(without[order][np.argmax(meeting)])
            some = sorted({key for key in self._all_keys() if hashed(names.without_dots(key)) == shared})
            text = several([repr(os.fsdecode(key)) for key in some])
            raise CommitError(f"the keys {text} would be one, with _ for their dots: leave one out (--keys)")

    def _all_keys(self) -> Iterator[bytes]:
        for number in readable_numbers(self.lower, self._allow_missing):
            entries = indexed(samples_of, self.lower, number)
            yield from map(indexed(self.lower.record, number).entry_path, map(int, entries))


class _NumberedSamples:
    """The samples of a set, by number, in its order. Order and splits of new shards are computed from these."""

    def __init__(self, lower: ShardSet, on_shard: Callable[[], None]) -> None:
        self._lower = lower
        self.shards, self.entries = array("I"), array("I")
        for number in lower.numbers:
            entries = array("I", np.asarray(indexed(samples_of, lower, number), np.uint32).tobytes())
            self.shards.extend(itertools.repeat(number, len(entries)))
            self.entries.extend(entries)
            on_shard()
        self.class_of = np.full(len(self), NO_CLASS, np.int32)

    def __len__(self) -> int:
        return len(self.entries)

    def key(self, sample: int) -> bytes:
        """Return the key of a sample."""
        return indexed(self._lower.record, self.shards[sample]).entry_path(self.entries[sample])

    def by_shard(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yield the name of each shard, and the keys of its samples."""
        for number, some in itertools.groupby(range(len(self)), self.shards.__getitem__):
            yield self._lower.shards[number].name, [*map(self.key, some)]


def sets_of(lower: ShardSet, options: PackOptions, on_shard: Callable[[], None]) -> list[NewSet]:
    """Return the samples of a set in the order, and in the splits, of the options.

    This takes 16 bytes of memory for each sample. Raises CommitError for a sample that `--order` does not list.
    """
    samples = _NumberedSamples(lower, on_shard)
    if options.order is None:
        order = shuffled(samples, options.shuffle)
    else:
        order, others, _ = listed(options.order, lower.shards[0].reading, samples.by_shard())
        if len(others) and not options.leave_out:
            text = "is not in the list of --order; --keys takes only the samples of a list, --leave-out these"
            first = os.fsdecode(samples.key(int(others[0])))
            raise CommitError(f"{counted(len(others), 'sample')}, the first {first!r}: {text}")
    numbers = split_of(samples, order, options.splits) if options.splits else [order]
    titles = [split.name for split in options.splits] or [""]
    return [
        NewSet(title, name, ((samples.shards[at], [samples.entries[at]]) for at in some))
        for title, name, some in zip(titles, options.names, numbers, strict=True)
    ]


def _without_pieces(step: Step) -> Step:
    return step._replace(output=Output(step.target, (), length=step.output.length))
