"""A view of a set as a source of new shards: renamed columns, fields of JSON, joined columns, labels.

Every member gets a new header, and the content that a mount would show; the order is that of the tar. The plan of
one shard at a time is in memory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from wdsfs import names
from wdsfs.errors import CommitError
from wdsfs.index.record import Record
from wdsfs.packing import reasons
from wdsfs.packing.overlay_source import CommitOptions
from wdsfs.packing.plan import NEW, NewMember, Output, Plan, ShardFill, Step, Targets, Zeros, member_names, namer
from wdsfs.packing.runner import Runner
from wdsfs.storage.durable import CHUNK
from wdsfs.tar import headers
from wdsfs.tar.problems import HARMLESS, UNDECODED
from wdsfs.tree import content as content_module
from wdsfs.tree.numbered_tree import samples_of
from wdsfs.tree.shard_set import ShardSet, indexed, readable_numbers


class _Sample(NamedTuple):
    key: bytes
    members: list[NewMember]

    @property
    def size(self) -> int:
        """Bytes of content."""
        return sum(member.size for member in self.members)


class ViewContents:
    """The content of members of a set. The `path` of each says where it is: shard, tag and number."""

    def __init__(self, lower: ShardSet) -> None:
        self._lower = lower

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[[NewMember], Iterator[bytes]]]:
        yield self._read

    def _read(self, member: NewMember) -> Iterator[bytes]:
        content = indexed(self._lower.content, *map(int, member.path.split()))
        for at in range(0, content.size, CHUNK):
            yield content_module.read(content, at, CHUNK)


FIRST_MEMBERS = 1000  # of the first shard, that a commit reports


class ViewCommit:
    """A commit of what `lower` shows. `options` are those of the output.

    `on_shard` is called after each shard of the set. Members that cannot be decoded are packed as they are stored.
    """

    def __init__(
        self,
        lower: ShardSet,
        options: CommitOptions,
        on_shard: Callable[[], None] = lambda: None,
    ) -> None:
        self.lower, self.options, self._on_shard = lower, options, on_shard
        self.plan = Plan()  # of the shards so far, without their pieces
        self.done: list[Step] = []  # those of them that were written now
        self.left_out = 0  # members of the set that are in no sample
        # Members at the start of the first shard, as `member_names` has them.
        self.first: list[tuple[bytes, bytes]] = []

    def run(self, write: bool) -> None:
        """Write the shards, or only plan them. Shards that a killed commit has finished are kept.

        Raises CommitError, UsageError, ShardErrors, OSErrors.
        """
        self._refuse_damage()
        targets = Targets(shard.path for below in self.lower.sources for shard in below.shards)
        for step in self._steps():
            targets.add(step.target)
            self.first = self.first or [*itertools.islice(member_names(step.output, self.lower), FIRST_MEMBERS)]
            # Only the length is kept, or memory would grow with the set.
            short = step._replace(output=Output(step.target, (), length=step.output.length))
            # One thread: a set is read by one.
            if write and Runner(Plan([step]), ViewContents(self.lower)).write_missing():
                self.done.append(short)
            self.plan.steps.append(short)
        if not self.plan.steps:
            raise CommitError("nothing is left to be written: no sample is shown with these options")

    def _refuse_damage(self) -> None:
        """Refuse damaged shards before anything is written. Raises CommitError."""
        for number in readable_numbers(self.lower, self.options.allow_missing):
            if not indexed(self.lower.summary, number).problems:
                continue
            for problem in indexed(self.lower.record, number).problems:
                if problem.kind not in HARMLESS | {UNDECODED}:
                    text = "leave out the shard, the option, or the samples"
                    raise CommitError(f"{self.lower.path_text(number)} is damaged ({problem.text}): {text}")

    # --- which samples are in which shard

    def _steps(self) -> Iterator[Step]:
        name = namer(self.options.output)
        for nth, (number, samples) in enumerate(self._shards()):
            members = [member for sample in samples for member in sample.members]
            output = Output(name(nth), [*members, Zeros(len(headers.END))])
            yield Step(output, NEW, number, len(samples))

    def _shards(self) -> Iterator[tuple[int | None, list[_Sample]]]:
        """Yield the samples of each new shard. Semantics decision: there is no shard without samples."""
        if self.options.resplits:
            yield from ((None, samples) for samples in self._rolled())
            return
        for number in readable_numbers(self.lower, self.options.allow_missing):
            samples = list(self._samples(number))
            for first, second in itertools.pairwise(samples):
                if first.key == second.key:
                    text = "comes twice in a row, and readers would make one sample of it; use --group-by-key"
                    raise CommitError(f"{self.lower.path_text(number)}: the key {os.fsdecode(first.key)!r} {text}")
            if samples:
                yield number, samples
            self._on_shard()

    def _rolled(self) -> Iterator[list[_Sample]]:
        """Yield the samples of each new shard."""
        fill = ShardFill(self.options.maxcount, self.options.maxsize)
        placed: list[_Sample] = []
        for number in readable_numbers(self.lower, self.options.allow_missing):
            for sample in self._samples(number):
                if fill.starts_another(sample.size, sample.key):
                    yield placed
                    placed = []
                placed.append(sample)
            self._on_shard()
        if placed:
            yield placed

    def _samples(self, number: int) -> Iterator[_Sample]:
        """Yield the samples of a shard of the set, in the order of the tar or of their keys."""
        entries = indexed(samples_of, self.lower, number)
        record, tag = indexed(self.lower.record, number), self.lower.tag(number)
        plain = indexed(self.lower.plain.record, number)
        self.left_out += plain.entries - plain.samples
        order = [int(entry) for entry in entries]
        if self.options.sort:
            order.sort(key=record.entry_path)
        for entry in order:
            yield self._sample(record, number, tag, entry)

    def _sample(self, record: Record, number: int, tag: int, entry: int) -> _Sample:
        key, members = record.entry_path(entry), []
        taken: set[bytes] = set()
        for member in record.entry_members(entry):
            extension = record.extension(member)
            name = key + b"." + extension
            reason = _obstacle(name, key, extension, taken)
            if reason is not None:
                path = self.lower.path_text(number)
                raise CommitError(
                    f"{path}: {os.fsdecode(name)} cannot be packed: {reason}; see --columns NAME=..."
                )
            taken.add(extension.lower())
            size, mtime_ns = record.size_and_time(member)
            members.append(NewMember(name, b"%d %d %d" % (number, tag, member), size, mtime_ns))
        return _Sample(key, members)


def _obstacle(name: bytes, key: bytes, extension: bytes, taken: set[bytes]) -> str | None:
    """Return why readers would not find a member of this name in its sample; None if they would."""
    parts = names.split(name)
    if parts is None or (parts.folder + parts.stem, parts.extension) != (key, extension):
        return "readers would take it for another sample, or for none"
    if extension.lower() in taken:
        return reasons.ONLY_CASE
    return reasons.RESERVED if extension.lower() in names.RESERVED else None
