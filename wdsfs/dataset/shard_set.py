"""The lower: the shards of a set as the tree sees them, by number, with their records and content.

Keeps few records and descriptors open at a time, whatever the size of the set, and sees to it that nothing of
a shard is used after the file has changed: what was opened from it gets `StaleShard`, and a look at the
changed shard raises `NotIndexed` until somebody has indexed it.

Threads: the methods of `ShardSet` are called by one thread, but for `build`, which touches nothing of the set;
`read` works on a `Content` alone, in any thread.
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from wdsfs.dataset.generations import Generations
from wdsfs.dataset.shard_access import Access
from wdsfs.errors import CorruptShard, RefusedShard, ShardError, StaleShard, UnreadableShard
from wdsfs.index import record as record_module
from wdsfs.index import store
from wdsfs.index.merged_names import Wants
from wdsfs.index.record import Record
from wdsfs.index.store import Claims, Index, PathUnion, Summary
from wdsfs.spec.expand import Shard
from wdsfs.storage import identity, source
from wdsfs.storage.source import TarBytes
from wdsfs.tar import compressed, scan

log = logging.getLogger(__name__)

RECORDS_MAX, RESTING_MAX = 64, 960  # opened records in use, some 6 KiB each, and others without their views, 2 KiB
FRESH_SECONDS = 1.0  # how long a look at a shard's path is believed
# Readahead over a shard: bytes that a read may be away from the last one to be of the same pass, reads that make a
# pass, and how much is read ahead of it (bytes), in steps of the least that a disk's readahead is set to.
NEAR, PASS, AHEAD, STEP = 4 << 20, 8, 8 << 20, 128 << 10
# How many bytes may go by for each that is read, and how many each read counts for at least: who takes one class
# of a set passes over it in order, too, but reads a hundredth of it.
GAPS, LEAST = 4, 4096
READ_MAX = 1 << 20  # bytes; the most that the kernel asks for at once
COPIES_MAX, READERS_MAX = 32, 4  # compressed shards open at a time: a copy takes disk, a reader up to 100 MB
MANY = 1000  # files that are not looked at in passing: on a slow disk others serve meanwhile
# A shard that cannot be indexed is not tried again for so long (twice as long each time, to the second number), or
# for so many times what the attempt took: in one tree over all shards each request would try.
FAILED_SECONDS, FAILED_SECONDS_MAX, FAILED_SHARE = 5.0, 60.0, 50
RENEW_SECONDS = 60.0  # how long one LMDB snapshot is held; an old one keeps freed pages from being used again

Answer = TypeVar("Answer")
Fingerprint = tuple[int, int, int]
GONE: Fingerprint = (0, 0, 0)  # of a shard that was there and cannot be read now


class NotIndexed(Exception):
    """The shard with this number has to be indexed first: unless `settled`, `build` it, then `install` that."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(slots=True)
class ShardFile:
    """An open shard. Whatever is done to it, or to its last name, changes its ctime.

    `source` is where its bytes come from: of a plain one `fd` itself.
    """

    fd: int
    source: TarBytes
    path: bytes
    fingerprint: Fingerprint
    ctime_ns: int
    run: int = 0  # reads of a pass in order so far
    start: int = 0  # where it began (bytes)
    used: int = 0  # how many bytes it has read
    front: int = 0  # how far it has come (bytes)
    ahead: int = 0  # how far the disk was asked to read ahead of it (bytes)

    def look_ahead(self, begin: int, end: int) -> None:
        """A read of these bytes: where it goes on in order, have the disk read what comes next.

        The kernel does so by itself only for a descriptor that is read without gaps by one reader. Several
        processes share a pass here, headers are left out, and a loader's processes are some samples apart.
        """
        if not -NEAR <= begin - self.front <= NEAR:
            self.run, self.start, self.used, self.front, self.ahead = 0, begin, 0, end, end
            return
        self.run += 1
        self.used += max(end - begin, LEAST)
        if end > self.front:
            self.front = end
        if self.run < PASS or self.front + AHEAD // 2 < self.ahead:
            return
        if self.used * GAPS < self.front - self.start:
            return
        start = max(self.ahead, self.front)
        self.ahead = start + AHEAD // 2
        fd = self.source
        assert isinstance(fd, int)  # nobody reads ahead through a reader
        # The kernel cuts each of these to what it would read ahead by itself, so in small steps.
        for step in range(start, self.ahead, STEP):
            os.posix_fadvise(fd, step, STEP, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        if self.source != self.fd:
            source.close(self.source)
        os.close(self.fd)


class Held:
    """Bytes that lie in no file as they are read: `load` gets them when they are not `data` already."""

    __slots__ = ("data", "load")

    def __init__(self, load: Callable[[], bytes], data: bytes | None = None) -> None:
        self.load, self.data = load, data


@dataclass(slots=True)
class Content:
    """Everything needed to read a member without the lower: where it lies (bytes) in which file.

    With `held` the bytes are those; `file` is what they come from, and `segments` is not None.
    """

    file: ShardFile
    data: int
    size: int
    segments: scan.Segments | None
    held: Held | None = None


class _Hot(NamedTuple):
    """What `content` found for a shard a moment ago, and until when (monotonic seconds) it is believed."""

    tag: int
    until: float
    record: Record
    file: ShardFile


class _Failure(NamedTuple):
    """Why a shard with this fingerprint could not be indexed.

    It is believed for `wait` seconds or more, `until` then (monotonic seconds).
    """

    fingerprint: Fingerprint
    wait: float
    until: float
    text: str


@dataclass(slots=True)
class _State:
    """What is known of a shard that has been looked at."""

    fingerprint: Fingerprint
    looked: float  # monotonic seconds of the last look at its path
    tag: int


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
        self._alarms, self._believed = 0, 0.0
        self._states: dict[int, _State] = {}
        self._failed = self._failures_of(index)
        self._said = ""  # the last error that was logged
        self._records: OrderedDict[int, Record] = OrderedDict()
        self._resting: OrderedDict[int, Record] = OrderedDict()  # those that were used before them
        self._verified: set[bytes] = set()  # the keys of records that were found sound in this snapshot
        self._files: OrderedDict[int, ShardFile] = OrderedDict()
        self._hot: dict[int, _Hot] = {}  # never without the record and the file being kept
        self._snapshot = index.snapshot  # of the index, which the records are of
        self._descriptors = descriptors
        self._renewed = time.monotonic()
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

    def fingerprint(self, number: int) -> Fingerprint:
        """The fingerprint of a shard, at most a second old. Raises MissingShard, UnreadableShard."""
        state = self._states.get(number)
        now = time.monotonic()
        if self._tags.alarms != self._alarms:
            self._alarms, self._believed = self._tags.alarms, now
        if state is None or state.fingerprint == GONE or state.looked < self._believed:
            return self._look(number, state, now)
        return state.fingerprint if now - state.looked < FRESH_SECONDS else self._look(number, state, now)

    def _look(self, number: int, state: _State | None, now: float) -> Fingerprint:
        try:
            found = self._stat(number)
        except ShardError as error:
            if state is not None and state.fingerprint != GONE:
                # A refusal is logged already; and of many shards it is the same where a view lacks something.
                if str(error) != self._said and not isinstance(error, RefusedShard):
                    log.error("%s; what was open from it gets ESTALE", error)
                self._said = str(error)
                self._forget(number)
                self._states[number] = _State(GONE, now, state.tag)
            raise
        if state is None:
            self._states[number] = _State(found, now, self._tags.of(number, found))
        elif state.fingerprint != found:
            self._tell_change(number, state.fingerprint, found)
            self._said = ""
            self._forget(number)
            self._states[number] = _State(found, now, self._tags.of(number, found))
        else:
            state.looked = now
            state.tag = self._tags.of(number, found)  # others may have seen it go and come back
        return found

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
        self._hot.pop(number, None)
        self._records.pop(number, None)
        self._resting.pop(number, None)
        file = self._files.pop(number, None)
        if file is not None:
            file.close()

    def tag(self, number: int) -> int:
        """The tag of the shard's inode numbers. Raises MissingShard, UnreadableShard."""
        state = self._states.get(number)
        if state is None or state.fingerprint == GONE:
            self.fingerprint(number)
            state = self._states[number]
        return state.tag

    def version(self) -> int:
        """A number that is another one after each change of a shard that was noticed, also after many of them.

        It is of what this process knows; the same in all that know the same, and after a remount.
        """
        return sum(2 * state.tag + (state.fingerprint == GONE) for state in self._states.values())

    def summary(self, number: int) -> Summary:
        """The summary of a shard. Raises NotIndexed, MissingShard, UnreadableShard."""
        fingerprint = self.fingerprint(number)
        found = self.index.summary(self._keys[number])
        if found is None or found.fingerprint != fingerprint:
            self._want(number, fingerprint)
            raise NotIndexed(number)
        return found

    def record(self, number: int, tag: int | None = None) -> Record:
        """The record of a shard, valid until `tidy` or `settled` is called.

        `tag` is that of an inode number: raises StaleShard when the number is of an earlier content. Raises
        NotIndexed, MissingShard, UnreadableShard.
        """
        fingerprint = self.fingerprint(number)
        state = self._states[number]
        if tag is not None and tag != state.tag:
            # Another process may have seen a change that this one has not looked for yet.
            fingerprint = self._look(number, state, time.monotonic())
            state = self._states[number]
        if tag is not None and tag != state.tag:
            if not tag:  # that of a shard which could not be indexed, and was listed all the same
                self._want(number, fingerprint)
            raise StaleShard(f"{self.path_text(number)} has changed since this was opened")
        if self._snapshot != self.index.snapshot:  # somebody else who shares the index has renewed it
            self._drop_records()
        found = self._records.get(number)
        if found is not None:
            self._records.move_to_end(number)
            return found
        found = self._resting.pop(number) if number in self._resting else self._read_record(number, fingerprint)
        self._records[number] = found
        if len(self._records) > RECORDS_MAX:
            self._let_one_rest()
        return found

    def _read_record(self, number: int, fingerprint: Fingerprint) -> Record:
        key = self._keys[number]
        found = self.index.record(key, fingerprint, verify=key not in self._verified)
        if found is None:
            self._want(number, fingerprint)
            raise NotIndexed(number)
        self._verified.add(key)
        return found

    def _let_one_rest(self) -> None:
        number, record = self._records.popitem(last=False)
        record.rest()
        self._resting[number] = record
        if len(self._resting) > RESTING_MAX:
            self._hot.pop(self._resting.popitem(last=False)[0], None)

    def _want(self, number: int, fingerprint: Fingerprint) -> None:
        """For a shard that is not indexed. Raises UnreadableShard when that was tried in vain just now."""
        failure = self._failed.get(number)
        if failure is not None and failure.fingerprint == fingerprint and time.monotonic() < failure.until:
            raise UnreadableShard(failure.text)

    def tidy(self) -> None:
        """Let go of an old snapshot of the index. To be called between requests, when no Record is in use."""
        if time.monotonic() - self._renewed > RENEW_SECONDS:
            self.renew()

    def renew(self) -> None:
        """See what other processes have indexed since. Records that were in use are so no more."""
        self.index.renew()
        self._drop_records()
        self._renewed = time.monotonic()

    def _drop_records(self) -> None:
        self._hot.clear()
        self._records.clear()
        self._resting.clear()
        self._verified.clear()
        self._snapshot = self.index.snapshot

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
        return store.build_file(one.path, one.reading, self.access.open)

    def install(self, number: int, data: bytes) -> None:
        """Store a record that `build` made. Raises MissingShard, UnreadableShard."""
        self.index.store([(self._keys[number], data)])
        self._drop_records()
        self._renewed = time.monotonic()
        self.generation += 1
        self._look(number, self._states.get(number), time.monotonic())
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
            failure = self._failed[number] = self._failure(number, before, time.monotonic() - began, str(error))
            if not self._has_failed(number):
                raise
            if failure.wait == FAILED_SECONDS:  # the first time
                log.error("%s; it is tried again later", error)

    def _failure(self, number: int, fingerprint: Fingerprint, took: float, text: str) -> _Failure:
        last, wait = self._failed.get(number), FAILED_SECONDS
        if last is not None and last.fingerprint == fingerprint:
            wait = min(2 * last.wait, FAILED_SECONDS_MAX)
        return _Failure(fingerprint, wait, time.monotonic() + max(wait, FAILED_SHARE * took), text)

    def _failures_of(self, index: Index) -> dict[int, _Failure]:
        """What could not be indexed a moment ago is not tried again at once."""
        found: dict[int, _Failure] = {}
        for number, key in enumerate(self._keys) if index.failures else ():
            if key in index.failures:
                with suppress(ShardError):
                    now = identity.look(self.shards[number].path)
                    until = time.monotonic() + FAILED_SECONDS
                    found[number] = _Failure(now, FAILED_SECONDS, until, index.failures[key])
        return found

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
                failure = self._failed.get(number)
                if failure is not None and failure.fingerprint == self._states[number].fingerprint:
                    yield self.path_text(number), failure.text
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
            or self._tags.alarms != self._alarms  # somebody has met a change: the next look sees to that
            or self._snapshot != self.index.snapshot
        ):
            hot = self._warm(number, tag)
        data, size = hot.record.extent(member)
        return Content(hot.file, data, size, hot.record.segments(member))

    def _warm(self, number: int, tag: int) -> _Hot:
        one = self.record(number, tag)
        file = self._file(number, one)
        hot = self._hot[number] = _Hot(tag, self._states[number].looked + FRESH_SECONDS, one, file)
        return hot

    def _file(self, number: int, one: Record) -> ShardFile:
        size, mtime_ns, inode = one.fingerprint
        fingerprint = size, mtime_ns, inode
        file = self._files.get(number)
        if file is not None and file.fingerprint == fingerprint:
            self._files.move_to_end(number)
            return file
        path = self.shards[number].path
        fd = self.access.open(path)
        file = ShardFile(fd, fd, path, fingerprint, 0)
        try:
            file.source = self._source(fd, path)
            file.ctime_ns = self._verify(number, one, file)
        except BaseException:
            file.close()
            raise
        if number in self._files:
            self._files.pop(number).close()
        self._files[number] = file
        if len(self._files) > self._descriptors:
            self._close(next(iter(self._files)))
        if file.source != fd:
            self._close_compressed()
        self.on_files(len(self._files))
        return file

    def is_compressed(self, number: int) -> bool:
        """Whether a shard is compressed. Raises MissingShard, UnreadableShard."""
        return store.is_compressed(self.shards[number].path, self.access.open)

    def _source(self, fd: int, path: bytes) -> TarBytes:
        """Where the bytes of a shard come from. Raises StaleShard, UnreadableShard."""
        try:
            kind = compressed.kind_of(fd)
        except OSError as error:
            raise UnreadableShard(f"{os.fsdecode(path)}: {error.strerror}") from None
        if kind is None:
            return fd
        with self.slowly():
            return compressed.unpacked(kind, fd, path).source

    def _close(self, number: int) -> None:
        self._hot.pop(number, None)
        self._files.pop(number).close()

    def _close_compressed(self) -> None:
        """Close the compressed shards that are too many, the one used longest ago first."""
        for wanted, limit in ((True, COPIES_MAX), (False, READERS_MAX)):
            found = [
                number
                for number, file in self._files.items()
                if file.source != file.fd and isinstance(file.source, int) == wanted
            ]
            for number in found[:-limit]:
                self._close(number)

    def _verify(self, number: int, one: Record, file: ShardFile) -> int:
        """See that an opened file is the one that was indexed; returns its ctime (ns).

        Raises StaleShard, UnreadableShard.
        """
        fd, fingerprint = file.fd, file.fingerprint
        try:
            found = os.fstat(fd)
            if identity.fingerprint_of(found) != fingerprint:  # replaced since the last look
                self._look(number, self._states.get(number), time.monotonic())
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
        self._tags.renew(number)
        self._states.pop(number, None)
        self.index.forget(self._keys[number])

    def release(self) -> None:
        """Close the shards, and let go of all records."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._drop_records()

    def close(self) -> None:
        self.release()
        self.index.close()


def _damage_text(record: Record) -> str:
    more = f" (and {record.problem_count - 1} more)" if record.problem_count > 1 else ""
    return record.problems[0].text + more


_scratch = memoryview(bytearray(READ_MAX))


def read(content: Content, offset: int, length: int) -> bytes:
    """Read a member; the bytes are those of the shard that was indexed, or there are none.

    Raises StaleShard when the shard has changed, CorruptShard when it ends too early, UnreadableShard.
    """
    file = content.file
    try:
        if content.held is not None:
            data = _held(content.held, offset, length)
        else:
            data = scan.read(file.source, content.data, content.size, content.segments, offset, length)
    except CorruptShard as error:
        check_unchanged(content)
        raise CorruptShard(f"{os.fsdecode(file.path)}: {error}") from None
    except OSError as error:
        raise UnreadableShard(f"{os.fsdecode(file.path)}: {error.strerror}") from None
    # After the read: a change before it or during it shows in the times, one behind it does not matter.
    check_unchanged(content)
    return data


def read_cached(content: Content, offset: int, length: int) -> memoryview | None:
    """As `read`, but None when it would have to wait for a disk, or is not worth the trouble here.

    The bytes are there until the next call: no memory is taken for each read.
    """
    length = min(length, content.size - offset)
    file = content.file
    fd = file.source
    if content.segments is not None or not 0 < length <= READ_MAX or not isinstance(fd, int):
        return None if content.held is None else _held_cached(content, offset, length)
    data, begin = _scratch[:length], content.data + offset
    file.look_ahead(begin, begin + length)
    try:
        got = os.preadv(fd, (data,), begin, os.RWF_NOWAIT)
    except OSError:  # EAGAIN: not in the page cache; EOPNOTSUPP: this file system cannot say
        return None
    if got < length:
        return None
    check_unchanged(content)
    return data


def _held(held: Held, offset: int, length: int) -> bytes:
    if held.data is None:
        held.data = held.load()
    return held.data[offset : offset + length]


def _held_cached(content: Content, offset: int, length: int) -> memoryview | None:
    if content.held is None or content.held.data is None:
        return None
    check_unchanged(content)
    return memoryview(content.held.data)[offset : offset + length]


def check_unchanged(content: Content) -> None:
    """Raises StaleShard when the shard is no longer the file that was indexed."""
    if os.fstat(content.file.fd).st_ctime_ns != content.file.ctime_ns:
        raise StaleShard(f"{os.fsdecode(content.file.path)} has changed since this was opened")
