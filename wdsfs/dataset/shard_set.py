"""The lower: the shards of a set as the tree sees them, by number, with their records and content.

Puts the parts together: whether a shard is still what it was (`freshness.py`), its record (`open_records.py`),
its descriptor (`open_files.py`), and what could not be indexed (`indexing.py`). Decided here is that nothing of a
shard is used after its file has changed: what was opened from it gets `StaleShard`, and a look at the changed
shard raises `NotIndexed` until somebody has indexed it. Reading is for `content.py`.

Threads: the methods of `ShardSet` are called by one thread, but for `build`, which touches nothing of the set.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import NamedTuple, TypeVar

from wdsfs.dataset.content import Content
from wdsfs.dataset.freshness import GONE, Fingerprint, Freshness
from wdsfs.dataset.generations import Generations
from wdsfs.dataset.indexing import Failures, NotIndexed
from wdsfs.dataset.open_files import OpenFiles, ShardFile
from wdsfs.dataset.open_records import OpenRecords
from wdsfs.dataset.shard_access import Access
from wdsfs.errors import ShardError, StaleShard, UnreadableShard
from wdsfs.index import record as record_module
from wdsfs.index import record_of_file
from wdsfs.index.merged_names import Wants
from wdsfs.index.record import Record
from wdsfs.index.set_tables import Claims, PathUnion
from wdsfs.index.store import Index, Summary
from wdsfs.spec.expand import Shard
from wdsfs.storage import identity
from wdsfs.tar import compressed

log = logging.getLogger(__name__)

MANY = 1000  # files that are not looked at in passing: on a slow disk others serve meanwhile

Answer = TypeVar("Answer")


class _Hot(NamedTuple):
    """What `content` found for a shard a moment ago, and until when (monotonic seconds) it is believed."""

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
        self.shards = shards
        self.access = access or Access()
        self.index = index
        self.plain: ShardSet = self  # the lower of the shards as they are
        self._keys = [shard.key for shard in shards]  # under which the index has their records
        self.generation = 0  # counts changes of the set under the mount
        self._tags = Generations(len(shards)) if tags is None else tags
        self._freshness = Freshness(self._tags, self._stat, self._changed)
        # Asked at every request, so without a call in between.
        self.fingerprint, self.tag = self._freshness.fingerprint, self._freshness.tag
        self._failures = Failures(shards, self._keys, index)
        self._hot: dict[int, _Hot] = {}  # never without the record and the file being kept
        self._records = OpenRecords(index, self._cool)
        self._files = OpenFiles(self.access, descriptors, self._cool, lambda: self.slowly())
        self.on_files: Callable[[int], None] = lambda _: None  # hears how many shards are open
        # Around what takes as long as unpacking a shard does: whoever serves has others go on.
        self.slowly: Callable[[], AbstractContextManager[None]] = nullcontext

    def __len__(self) -> int:
        return len(self.shards)

    @property
    def sources(self) -> list[ShardSet]:
        """The lowers of all shards that this is made of, as they are."""
        return [self]

    @property
    def open_files(self) -> int:
        """How many shards are open."""
        return len(self._files)

    # --- what a shard is now

    def _changed(self, number: int, before: Fingerprint, now: Fingerprint) -> None:
        if now != GONE:
            self._tell_change(number, before, now)
        self._forget(number)

    def _tell_change(self, number: int, before: Fingerprint, now: Fingerprint) -> None:
        text = "%s has changed; it is indexed anew, what was open from it gets ESTALE"
        log.warning(text, self.path_text(number))

    def _stat(self, number: int) -> Fingerprint:
        return self.access.look(self.shards[number].path)

    def look_at_all(self) -> None:
        """See what every shard is, unless that was seen a moment ago. What cannot be read is for who needs it."""
        with self.slowly() if len(self) > MANY else nullcontext():
            for number in range(len(self)):
                with suppress(ShardError):
                    self.fingerprint(number)

    def distrust(self) -> None:
        """Look at every shard again before it is used, here and in all other processes of the mount.

        For when something turned out to be stale: the kernel will ask for its path at once.
        """
        self._tags.alarm()

    @property
    def alarms(self) -> int:
        """Goes up whenever any process of the mount has heard of a change, or met one."""
        return self._tags.alarms

    def _forget(self, number: int) -> None:
        self.generation += 1
        self._cool(number)
        self._records.forget(number)
        self._files.forget(number)

    def _cool(self, number: int) -> None:
        self._hot.pop(number, None)

    def version(self) -> int:
        """A number that is another one after each change of a shard that was noticed, also after many of them.

        It is of what this process knows; the same in all that know the same, and after a remount.
        """
        return self._freshness.version()

    def summary(self, number: int) -> Summary:
        """The summary of a shard. Raises NotIndexed, MissingShard, UnreadableShard."""
        fingerprint = self.fingerprint(number)
        found = self.index.summary(self._keys[number])
        if found is None or found.fingerprint != fingerprint:
            self._failures.refuse(number, fingerprint)
            raise NotIndexed(number)
        return found

    def record(self, number: int, tag: int | None = None) -> Record:
        """The record of a shard, valid until `tidy` or `settled` is called.

        `tag` is that of an inode number: raises StaleShard when the number is of an earlier content. Raises
        NotIndexed, MissingShard, UnreadableShard.
        """
        freshness = self._freshness
        fingerprint = freshness.fingerprint(number)
        if tag is not None and tag != freshness.states[number].tag:
            # Another process may have seen a change that this one has not looked for yet.
            fingerprint = freshness.look_again(number)
            if tag != freshness.states[number].tag:
                if not tag:  # that of a shard which could not be indexed, and was listed all the same
                    self._failures.refuse(number, fingerprint)
                raise StaleShard(f"{self.path_text(number)} has changed since this was opened")
        if self._records.snapshot != self.index.snapshot:  # somebody else who shares the index has renewed it
            self._drop_records()
        in_use = self._records.in_use  # not by a call: every request comes here
        found = in_use.get(number)
        if found is not None:
            in_use.move_to_end(number)
            return found
        found = self._records.fetch(number, self._keys[number], fingerprint)
        if found is None:
            self._failures.refuse(number, fingerprint)
            raise NotIndexed(number)
        return found

    def tidy(self) -> None:
        """Let go of an old snapshot of the index. To be called between requests, when no Record is in use."""
        if self._records.is_old:
            self.renew()

    def renew(self) -> None:
        """See what other processes have indexed since. Records that were in use are so no more."""
        self.index.renew()
        self._hot.clear()
        self._records.renewed()

    def _drop_records(self) -> None:
        self._hot.clear()
        self._records.clear()

    def settled(self, number: int) -> bool:
        """Whether a shard that was NotIndexed is so no more: another process may have done it."""
        self.renew()
        try:
            self.summary(number)
            self.record(number)
        except NotIndexed:
            return False
        self.generation += 1
        return True

    def build(self, number: int) -> bytes:
        """The record of a shard as it is now. Safe in a thread. Raises MissingShard, UnreadableShard."""
        one = self.shards[number]
        return record_of_file.build_file(one.path, one.reading, self.access.open)

    def install(self, number: int, data: bytes) -> None:
        """Store a record that `build` made. Raises MissingShard, UnreadableShard."""
        self.index.store([(self._keys[number], data)])
        self._hot.clear()
        self._records.renewed()
        self.generation += 1
        self._freshness.look_again(number)
        self._tell_damage(number, Record(data, verify=False))

    def _tell_damage(self, number: int, made: Record) -> None:
        """Log what is wrong with a shard that was indexed just now."""
        if made.problem_count:
            log.warning("%s: %s", self.path_text(number), _damage_text(made))

    def index_now(self, number: int) -> None:
        """Index a shard that is NotIndexed, unless another process has done so by now."""
        if not self.settled(number):
            log.info("indexing %s", self.path_text(number))
            self.install(number, self.build(number))

    def try_index(self, number: int) -> None:
        """As `index_now`, for a request that may be about other shards just as well.

        A shard that cannot be indexed is as one that cannot be opened then: whoever asks for it hears why. Raises
        ShardErrors where that is not so, and the request would meet NotIndexed again.
        """
        before, began = self.fingerprint(number), time.monotonic()
        try:
            self.index_now(number)
        except ShardError as error:
            is_first = self._failures.add(number, before, time.monotonic() - began, str(error))
            if not self._has_failed(number):
                raise
            if is_first:
                log.error("%s; it is tried again later", error)

    def _has_failed(self, number: int) -> bool:
        try:
            self.summary(number)
        except NotIndexed:  # it has changed meanwhile
            return False
        except ShardError:
            return True
        return False

    def with_index(self, question: Callable[[], Answer]) -> Answer:
        """The answer to a question about the set; a shard that is NotIndexed is indexed for it."""
        while True:
            try:
                return question()
            except NotIndexed as wanted:
                self.try_index(wanted.number)

    def union(self, records: Callable[[int], Record | None]) -> PathUnion:
        """The union over the set as it is now. Records that were in use are so no more."""
        try:
            return self.index.union(self._keys, self._indexed_fingerprints(), records)
        finally:
            self._drop_records()

    def claims(
        self, kind: bytes, records: Callable[[int], Record | None], wants: Callable[[Record], Wants]
    ) -> Claims:
        """The claims of the set as it is now (`Index.claims`). Records that were in use are so no more."""
        try:
            return self.index.claims(self._keys, kind, self._indexed_fingerprints(), records, wants)
        finally:
            self._drop_records()

    def _indexed_fingerprints(self) -> list[Fingerprint]:
        return [self._indexed_fingerprint(number) for number in range(len(self.shards))]

    def _indexed_fingerprint(self, number: int) -> Fingerprint:
        """The fingerprint of a shard that has a record; 0 for one that cannot be read."""
        try:
            return self.summary(number).fingerprint
        except ShardError:
            return GONE

    def damaged(self) -> Iterator[tuple[str, str]]:
        """The shards that are not whole: path and what is wrong, as far as they are indexed."""
        for number in range(len(self.shards)):
            try:
                if self.summary(number).problems:
                    yield self.path_text(number), _damage_text(self.record(number))
            except NotIndexed:
                text = self._failures.text_of(number, self._freshness.states[number].fingerprint)
                if text is not None:
                    yield self.path_text(number), text
            except ShardError as error:
                path = self.path_text(number)
                yield path, str(error).removeprefix(f"{path}: ")  # whoever shows it names the shard already

    def known_damage(self) -> Iterator[tuple[str, str]]:
        """As `damaged`, of shards that can be read and are indexed already; no other file is looked at."""
        for number, key in enumerate(self._keys):
            summary = self.index.summary(key)
            if summary is not None and summary.problems:
                with suppress(NotIndexed, ShardError):  # changed since, or not readable: no damage that is known
                    yield self.path_text(number), _damage_text(self.record(number))

    def path_text(self, number: int) -> str:
        return os.fsdecode(self.shards[number].path)

    # --- content

    def origin(self, number: int, member: int) -> tuple[ShardSet, int, int] | None:
        """Where a member really lies: the lower of plain shards, the shard's number and the member's there.

        None for what is no member of any shard.
        """
        return self, number, member

    def content(self, number: int, tag: int, member: int) -> Content:
        """Where to read a member. Raises what `record` raises."""
        hot = self._hot.get(number)
        if (
            hot is None
            or hot.tag != tag
            or hot.until < time.monotonic()
            or self._tags.alarms != self._freshness.heard  # somebody has met a change: the next look sees to that
            or self._records.snapshot != self.index.snapshot
        ):
            hot = self._warm(number, tag)
        data, size = hot.record.extent(member)
        return Content(hot.file, data, size, hot.record.segments(member))

    def _warm(self, number: int, tag: int) -> _Hot:
        one = self.record(number, tag)
        file = self._file(number, one)
        hot = self._hot[number] = _Hot(tag, self._freshness.believed_until(number), one, file)
        return hot

    def _file(self, number: int, one: Record) -> ShardFile:
        size, mtime_ns, inode = one.fingerprint
        fingerprint = size, mtime_ns, inode
        file = self._files.get(number, fingerprint)
        if file is None:
            path = self.shards[number].path
            file = self._files.open(number, path, fingerprint, lambda file: self._verify(number, one, file))
            self.on_files(len(self._files))
        return file

    def is_compressed(self, number: int) -> bool:
        """Whether a shard is compressed. Raises MissingShard, UnreadableShard."""
        return compressed.is_compressed(self.shards[number].path, self.access.open)

    def _verify(self, number: int, one: Record, file: ShardFile) -> int:
        """See that an opened file is the one that was indexed; returns its ctime (ns).

        Raises StaleShard, UnreadableShard.
        """
        fd, fingerprint = file.fd, file.fingerprint
        try:
            found = os.fstat(fd)
            if identity.fingerprint_of(found) != fingerprint:  # replaced since the last look
                self._freshness.look_again(number)
                raise StaleShard(f"{self.path_text(number)} has changed since this was opened")
            # The fingerprint has proved that nothing was written; this catches a file that was given the old
            # times back, for the price of two reads per opened shard.
            same = record_module.ends_match(file.source, one.ends) or not one.members
        except OSError as error:
            raise UnreadableShard(f"{self.path_text(number)}: {error.strerror}") from None
        if not same:
            self._spoil(number)
            raise StaleShard(f"{self.path_text(number)} has other content than its index, with the same times")
        return found.st_ctime_ns

    def _spoil(self, number: int) -> None:
        """Have a shard indexed again although its fingerprint is that of the index."""
        log.warning("%s has changed without a new time; it is indexed anew", self.path_text(number))
        self._reconsider(number)

    def _reconsider(self, number: int) -> None:
        """Have a record made again although its fingerprint may be as it was."""
        self._forget(number)
        self._freshness.reconsider(number)
        self.index.forget(self._keys[number])

    def release(self) -> None:
        """Close the shards, and let go of all records."""
        self._files.clear()
        self._drop_records()

    def close(self) -> None:
        self.release()
        self.index.close()


def _damage_text(record: Record) -> str:
    more = f" (and {record.problem_count - 1} more)" if record.problem_count > 1 else ""
    return record.problems[0].text + more
