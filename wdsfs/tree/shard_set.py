"""The shards of a set by number, with their records and content, as trees ask for them.

`freshness.py` decides what has changed, `open_shards.py` keeps records and descriptors, and `content.py` reads.
After the file of a shard has changed, nothing that was known about the shard is used: its open inodes get
`StaleShard`, and questions about it raise `NotIndexed` until it is indexed again (`indexing.py`).

Threads: the methods of `ShardSet` are called by one thread, but for `build`, which touches nothing of the set.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import NamedTuple

from wdsfs.door.shard_door import DOOR, fingerprint_of
from wdsfs.errors import MissingShard, NotATar, ShardError, StaleShard, UnreadableShard
from wdsfs.index import portable, record_of_file
from wdsfs.index import record as record_module
from wdsfs.index.record import Record
from wdsfs.index.store import Index, Summary
from wdsfs.shards import GONE, Fingerprint, Shard, Shards, numbered_at
from wdsfs.tar.problems import Problem, problems_text
from wdsfs.tree.content import Content, ContentColumns, content_in_shard, read_name
from wdsfs.tree.freshness import Freshness, Generations
from wdsfs.tree.indexing import Failures, NotIndexed, indexed
from wdsfs.tree.open_shards import OpenFiles, OpenRecords, ShardFile
from wdsfs.tree.shard_access import Access

log = logging.getLogger(__name__)

MANY = 1000  # files; checking that many takes long on a slow disk, so other workers serve meanwhile


class _Current(NamedTuple):
    """Record and file of a shard as `content` found them, valid `until` then (monotonic seconds)."""

    tag: int
    until: float
    record: Record
    file: ShardFile


class ShardSet:
    """`shards` in the order of the set, their records from `index`."""

    def __init__(
        self,
        shards: Sequence[Shard],
        index: Index,
        descriptors: int = 256,
        tags: Generations | None = None,
        access: Access | None = None,
    ) -> None:
        self.shards = shards = Shards.of(shards)
        self.access = access or Access()
        self.index = index
        self.plain: ShardSet = self  # the set without a view
        self.label_files: Sequence[bytes] = ()  # the paths of other files that decide what is shown
        self._keys: Sequence[bytes] = shards.keys  # under which the index has their records
        self.generation = 0  # counts changes of the set under the mount
        # The state that the processes of a mount share about changes of this set.
        self.generations = Generations.at_mount(len(shards)) if tags is None else tags
        # Numbers whose shard is not in the set any more. Open files of such a shard work while the tar exists.
        self.out = shards.out
        self._freshness = Freshness(self.generations, self._stat, self._changed, self.out)
        # Used at every request, so kept here to save a call.
        self.fingerprint, self.tag = self._freshness.fingerprint, self._freshness.tag
        self._failures = Failures(shards, self._keys, index)
        self._current: dict[int, _Current] = {}  # never without the record and the file being kept
        self._records = OpenRecords(index, self._drop_current)
        self._files = OpenFiles(self.access, descriptors, self._drop_current, lambda: self.slowly())
        self.on_files: Callable[[int], None] = lambda _: None  # called with the number of open shards
        # Entered around blocking work, such as unpacking a shard, so that other workers can be started meanwhile.
        self.slowly: Callable[[], AbstractContextManager[None]] = nullcontext

    def __len__(self) -> int:
        return len(self.shards)

    @property
    def numbers(self) -> Iterator[int]:
        """The numbers of the shards that are in the set, in its order."""
        out = self.out
        return (number for number in range(len(self.shards)) if number not in out)

    @property
    def count(self) -> int:
        """The number of shards in the set."""
        return len(self.shards) - len(self.out)

    @property
    def sources(self) -> list[ShardSet]:
        """The plain sets of all shards that this is made of."""
        return [self]

    @property
    def open_files(self) -> int:
        """The number of open shards."""
        return len(self._files)

    # --- what a shard is now

    def _changed(self, number: int, before: Fingerprint, now: Fingerprint) -> None:
        if now != GONE:
            self._log_change(number, before, now)
        self._forget(number)

    def _log_change(self, number: int, before: Fingerprint, now: Fingerprint) -> None:
        text = "%s has changed, so it is indexed again, and files that were open get ESTALE"
        log.warning(text, self.path_text(number))

    def _stat(self, number: int) -> Fingerprint:
        return self.access.look(self.shards[number].path)

    def has_sum(self, number: int, sum_: int) -> bool:
        """Return True if this is the sum of a shard's fingerprint. Raises MissingShard, UnreadableShard."""
        return self.fingerprint(number).sum == sum_ or numbered_at(self.shards[number].path).sum == sum_

    def look_at_all(self) -> None:
        """Check every shard that was not checked within the last second. Its errors come when it is used."""
        with self.slowly() if len(self) > MANY else nullcontext():
            for number in self.numbers:
                with suppress(ShardError):
                    self.fingerprint(number)

    def distrust(self) -> None:
        """Mark every shard to be checked before its next use, in all processes of the mount.

        Called when a shard turned out to be stale: the kernel looks up the path again at once.
        """
        self.generations.alarm()

    def _forget(self, number: int) -> None:
        self.generation += 1
        self._drop_current(number)
        self._records.forget(number)
        self._files.forget(number)

    def _drop_current(self, number: int) -> None:
        self._current.pop(number, None)

    def version(self) -> int:
        """Return a number that differs after each change of a shard that this process has noticed.

        It is the same in all processes that have noticed the same changes, and after a remount.
        """
        return self._freshness.version()

    def summary(self, number: int) -> Summary:
        """Return the summary of a shard. Raises NotIndexed, MissingShard, UnreadableShard, NotATar."""
        fingerprint = self.fingerprint(number)
        summary = self.index.summary(self._keys[number], fingerprint)
        if summary is None:
            self._failures.refuse(number, fingerprint)
            raise NotIndexed(self, number)
        self.index.check_is_tar(self.shards[number], summary)
        return summary

    def samples_of(self, number: int) -> int:
        """Count the samples of a shard; for a shard that has left the set, or is about to, the last number.

        Raises what `summary` raises.
        """
        gone = self.shards[number].gone
        if gone is not None:
            return gone
        try:
            return self.summary(number).samples
        except MissingShard:
            if not self.generations.followed:
                raise
            return self.last_samples(number)

    def last_samples(self, number: int) -> int:
        """Count the samples that a shard had when it was indexed last; 0 if it never was."""
        summary = self.index.summary(self._keys[number])
        return 0 if summary is None else summary.samples

    def record(self, number: int, tag: int | None = None) -> Record:
        """Return the record of a shard, valid until `tidy` or `was_indexed_elsewhere` is called.

        `tag` is that of an inode number: raises StaleShard when the number is of an earlier content. Raises
        NotIndexed, MissingShard, UnreadableShard, NotATar.
        """
        freshness = self._freshness
        fingerprint = freshness.fingerprint(number)
        if tag is not None and tag != freshness.states[number].tag:
            # Another process may have seen a change that this one has not looked for yet.
            fingerprint = freshness.look_again(number)
            if tag != freshness.states[number].tag:
                if not tag:  # the tag of a shard that cannot be read, and was listed all the same
                    self._failures.refuse(number, fingerprint)
                    summary = self.index.summary(self._keys[number], fingerprint)
                    self.index.check_is_tar(self.shards[number], summary)
                raise StaleShard(f"{self.path_text(number)} has changed since this was opened")
        if self._records.snapshot != self.index.snapshot:  # another set that shares the index has renewed it
            self._drop_records()
        in_use = self._records.in_use  # without a call, because every request comes here
        record = in_use.get(number)
        if record is not None:
            in_use.move_to_end(number)
            return record
        record = self._records.fetch(number, self._keys[number], fingerprint)
        if record is None:
            self._failures.refuse(number, fingerprint)
            raise NotIndexed(self, number)
        if not record.members:
            try:
                record.check_is_tar(self.path_text(number))
            except NotATar:
                self._records.forget(number)
                raise
        return record

    def tidy(self) -> None:
        """Replace an old snapshot of the index. Call it between requests, when no Record is in use."""
        if time.monotonic() > self._records.old_at:
            self.renew()

    def renew(self) -> None:
        """Take a new snapshot of the index, with the records of other processes; no record stays valid."""
        self.index.renew()
        self._current.clear()
        self._records.renewed()

    def _drop_records(self) -> None:
        self._current.clear()
        self._records.clear()

    def was_indexed_elsewhere(self, number: int) -> bool:
        """Return True if a shard that was NotIndexed is indexed now, by another process."""
        self.renew()
        try:
            self.summary(number)
            self.record(number)
        except NotIndexed:
            return False
        except NotATar:
            pass  # an error is an answer, too
        self.generation += 1
        return True

    def build(self, number: int) -> bytes:
        """Return the record of a shard now. Safe in a thread. Raises MissingShard, UnreadableShard."""
        shard = self.shards[number]
        record = self.index.portables.copy(shard.key, self.access.look(shard.path))
        if record is not None:
            return record
        log.info("indexing %s", self.path_text(number))
        return record_of_file.build_file(shard.path, shard.reading, self.access.open)

    def install(self, number: int, data: bytes) -> None:
        """Store a record that `build` made. Raises MissingShard, UnreadableShard."""
        self.index.store([(self._keys[number], data)])
        self._current.clear()
        self._records.renewed()
        self.generation += 1
        self._freshness.look_again(number)
        self._log_damage(number, Record(data, verify=False))

    def _log_damage(self, number: int, made: Record) -> None:
        """Log the damage of a shard that was just indexed."""
        if made.problem_count:
            log.warning("%s: %s", self.path_text(number), _damage_text(made))

    def index_now(self, number: int) -> None:
        """Index a shard that is NotIndexed, unless another process has done so by now."""
        if not self.was_indexed_elsewhere(number):
            self.install(number, self.build(number))

    def try_index(self, number: int) -> None:
        """Index a shard as `index_now`, for a request that may be about other shards only.

        If the shard cannot be indexed, the reason is kept, and each question about it raises that from then on.
        Raises ShardErrors if the shard has changed meanwhile, because the request would meet NotIndexed again.
        """
        before, began = self.fingerprint(number), time.monotonic()
        try:
            with self.slowly():
                self.index_now(number)
        except ShardError as error:
            is_first = self._failures.add(number, before, time.monotonic() - began, str(error))
            if not self._has_failed(number):
                raise
            if is_first:
                log.error("%s; wdsfs tries again later", error)

    def _has_failed(self, number: int) -> bool:
        try:
            self.summary(number)
        except NotIndexed:  # it has changed meanwhile
            return False
        except ShardError:
            return True
        return False

    def keep_table(self, kind: bytes, build: Callable[[], tuple[Sequence[Fingerprint], bytes]]) -> bytes:
        """Make a table over the present set (`Index.keep_table`). Invalidates all records in use."""
        try:
            return self.index.keep_table(kind, self._keys, self._indexed_fingerprints(), build)
        finally:
            self._drop_records()

    def drop_tables(self, kinds: Sequence[bytes]) -> None:
        """Drop tables of a set that is not shown any more. A process that still uses one makes it again."""
        self.index.drop_tables(kinds, self._keys)

    def _indexed_fingerprints(self) -> list[Fingerprint]:
        """Return the fingerprints of all shards; GONE for one that cannot be read, or is not in the set."""
        fingerprints = [GONE] * len(self.shards)
        for number in self.numbers:
            with suppress(ShardError):
                fingerprints[number] = self._indexed_fingerprint(number)
        return fingerprints

    def _indexed_fingerprint(self, number: int) -> Fingerprint:
        return self.summary(number).fingerprint

    def damaged(self) -> Iterator[tuple[str, str]]:
        """Yield the shards that are not whole: path and fault, as far as they are indexed."""
        for number in self.numbers:
            try:
                if self.summary(number).problems and (record := self.record(number)).problem_count:
                    yield self.path_text(number), _damage_text(record)
            except NotIndexed:
                text = self._failures.text_of(number, self._freshness.states[number].fingerprint)
                if text is not None:
                    yield self.path_text(number), text
            except ShardError as error:
                path = self.path_text(number)
                yield path, str(error).removeprefix(f"{path}: ")  # callers print the path themselves

    def known_damage(self) -> Iterator[tuple[str, Problem, int]]:
        """Yield the shards that are indexed already and not whole: path, first problem, how many there are.

        No other file is looked at.
        """
        for number in self.numbers:
            if self.index.is_whole(self._keys[number]):
                continue
            summary = self.index.summary(self._keys[number])
            if summary is not None and summary.problems:
                with suppress(NotIndexed, ShardError):  # changed since, or not readable: damage is not known
                    record = self.record(number)
                    if record.problem_count:  # it may have changed meanwhile
                        yield self.path_text(number), record.problems[0], record.problem_count

    def path_text(self, number: int) -> str:
        return os.fsdecode(self.shards[number].path)

    # --- content

    def record_and_plain(self, number: int, tag: int | None = None) -> tuple[Record, Record]:
        """Return the record of a shard, and of the plain shard that it is made of. Raises as `record`."""
        record = self.record(number, tag)
        return record, record

    def origin(self, number: int, member: int, tag: int | None = None) -> tuple[ShardSet, int, int] | None:
        """Return the real place of a member: the set of plain shards, and the numbers of shard and member there.

        None for a file that is no member of any shard. `tag` is as in `record`.
        """
        return self, number, member

    def content(self, number: int, tag: int, member: int) -> Content:
        """Return the place of the bytes of a member. Raises what `record` raises."""
        current = self._current.get(number)
        if (
            current is None
            or current.tag != tag
            or current.until < time.monotonic()
            or self.generations.alarms != self._freshness.heard  # a shard has changed: check again
            or self._records.snapshot != self.index.snapshot
        ):
            current = self._current_of(number, tag)
        record = current.record
        if record.moved is not None and member not in record.moved:
            self._compare(number, record, member, current.file)
        data, size = record.extent(member)
        content = Content(current.file, data, size, record.extents(member))
        if current.file.remote is not None:
            content.sample = lambda: _sample_ranges(record, member)
        return content

    def member_name(self, number: int, member: int) -> bytes:
        """Return the name of a member as written in the tar. Raises what `record` raises, OSError."""
        return read_name(self.content(number, self.tag(number), member), self.record(number).member(member).head)

    def opened(self, number: int) -> ShardFile:
        """Return the shard, open. Raises what `record` raises."""
        return self._file(number, self.record(number))

    def content_columns(self, number: int) -> ContentColumns:
        """Return the content of all members, as `content`; no file is looked at. Raises what `record` raises."""
        return content_in_shard(self.record(number), self.shards[number].path)

    def _current_of(self, number: int, tag: int) -> _Current:
        record = self.record(number, tag)
        current = self._current[number] = _Current(
            tag, self._freshness.believed_until(number), record, self._file(number, record)
        )
        return current

    def _file(self, number: int, record: Record) -> ShardFile:
        file = self._files.get(number, record.fingerprint)
        if file is None:
            path = self.shards[number].path
            verify = partial(self._verify, number, record)
            file = self._files.open(number, path, record.fingerprint, record.compression, verify)
            if number + 1 < len(self.shards):
                DOOR.note_order(file.shard, self.shards[number + 1].path)
            self.on_files(len(self._files))
        return file

    def is_compressed(self, number: int) -> bool:
        """Return True if a shard is compressed, after indexing the shard. Raises ShardErrors."""
        return indexed(self.plain.record, number).compression is not None

    def _verify(self, number: int, record: Record, file: ShardFile) -> int:
        """Check that an opened file is the one that was indexed; returns its ctime (ns), 0 for a remote shard.

        Raises StaleShard, UnreadableShard.
        """
        shard = file.shard
        try:
            ctime_ns = os.fstat(shard).st_ctime_ns if isinstance(shard, int) else 0
            if fingerprint_of(shard) != file.fingerprint:  # replaced since the last look
                self._freshness.look_again(number)
                raise StaleShard(f"{self.path_text(number)} has changed since this was opened")
            # The fingerprint shows that nothing was written. This finds a file whose old times were restored after
            # a write, at the cost of two reads for each opened shard.
            same = (
                not isinstance(shard, int)
                or record_module.ends_match(file.source, record.ends)
                or not record.members
            )
        except OSError as error:
            raise UnreadableShard(f"{self.path_text(number)}: {error.strerror}") from None
        if not same:
            self._drop_changed(number)
            raise StaleShard(f"{self.path_text(number)} has other content than its index, with the same times")
        return ctime_ns

    def _compare(self, number: int, record: Record, member: int, file: ShardFile) -> None:
        """Check that a member of a moved shard is where its record says. Raises StaleShard, UnreadableShard."""
        try:
            same = portable.confirmed(record, member, file.source)
        except OSError as error:
            raise UnreadableShard(f"{self.path_text(number)}: {error.strerror}") from None
        if not same:
            self._drop_changed(number)
            raise StaleShard(f"{self.path_text(number)} is not the shard of its index, but another of its size")

    def _drop_changed(self, number: int) -> None:
        """Drop the record of a shard that has changed although its fingerprint is the same."""
        log.warning("%s has changed without a new time, so it is indexed again", self.path_text(number))
        self._reconsider(number)

    def _reconsider(self, number: int) -> None:
        """Forget a record, so that it is made again although the fingerprint may be the same."""
        self._forget(number)
        self._freshness.reconsider(number)
        self.index.forget(self._keys[number])

    def release(self) -> None:
        """Close the shards, and drop all records."""
        self._files.clear()
        self._drop_records()

    def close(self) -> None:
        self.release()
        self.index.close()


def readable_numbers(lower: ShardSet, allow_missing: bool) -> Iterator[int]:
    """Yield the numbers of all shards, with `allow_missing` only of readable ones. Raises ShardErrors."""
    for number in range(len(lower)):
        try:
            indexed(lower.summary, number)
        except ShardError:
            if not allow_missing:
                raise
        else:
            yield number


def _sample_ranges(record: Record, member: int) -> list[tuple[int, int]]:
    """Return the places of the members of the same sample, as begin and end (bytes)."""
    places = [record.extent(at) for at in record.entry_members(record.entry_of(member))]
    return [(data, data + size) for data, size in places]


def _damage_text(record: Record) -> str:
    return problems_text(record.problems[0], record.problem_count)
