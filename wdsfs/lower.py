"""The lower: the shards of a set as the tree sees them, by number, with their records and content.

Keeps few records and descriptors open at a time, whatever the size of the set, and sees to it that nothing of
a shard is used after the file has changed: what was opened from it gets `StaleShard`, and a look at the
changed shard raises `NotIndexed` until somebody has indexed it.

Threads: the methods of `Lower` are called by one thread, but for `build`, which touches nothing of the set;
`read` works on a `Content` alone, in any thread.
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from wdsfs import index as index_module
from wdsfs import record as record_module
from wdsfs import shard
from wdsfs.board import Tags
from wdsfs.errors import CorruptShard, ShardError, StaleShard, UnreadableShard
from wdsfs.index import Index, Summary, Union
from wdsfs.record import Record
from wdsfs.spec import Shard

log = logging.getLogger(__name__)

RECORDS_MAX = 1024  # opened records; each is a few KiB of views
FRESH_SECONDS = 1.0  # how long a look at a shard's path is believed
RENEW_SECONDS = 60.0  # how long one LMDB snapshot is held; an old one keeps freed pages from being used again

Fingerprint = tuple[int, int, int]
GONE: Fingerprint = (0, 0, 0)  # of a shard that was there and cannot be read now


class NotIndexed(Exception):
    """The shard with this number has to be indexed first: unless `settled`, `build` it, then `install` that."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(slots=True)
class Content:
    """Everything needed to read a member without the lower: for a thread."""

    fd: int
    path: bytes
    fingerprint: Fingerprint
    data: int
    size: int
    segments: shard.Segments | None


@dataclass(slots=True)
class _State:
    """What is known of a shard that has been looked at."""

    fingerprint: Fingerprint
    looked: float  # monotonic seconds of the last look at its path
    tag: int


class Lower:
    """`shards` in the order of the set, their records from `index`."""

    def __init__(
        self, shards: Sequence[Shard], index: Index, descriptors: int = 256, tags: Tags | None = None
    ) -> None:
        self.shards = shards
        self.index = index
        self.generation = 0  # counts changes of the set under the mount
        self._tags = Tags(len(shards)) if tags is None else tags
        self._alarms, self._believed = 0, 0.0
        self._states: dict[int, _State] = {}
        self._records: OrderedDict[int, Record] = OrderedDict()
        self._files: OrderedDict[int, tuple[int, Fingerprint]] = OrderedDict()
        self._descriptors = descriptors
        self._renewed = time.monotonic()
        self.on_files: Callable[[int], None] = lambda _: None  # hears how many shards are open

    def __len__(self) -> int:
        return len(self.shards)

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
            found = index_module.look(self.shards[number].path)
        except ShardError as error:
            if state is not None and state.fingerprint != GONE:
                log.error("%s; what was open from it gets ESTALE", error)
                self._forget(number)
                self._states[number] = _State(GONE, now, 0)
            raise
        if state is None:
            self._states[number] = _State(found, now, self._tags.of(number, found))
        elif state.fingerprint != found:
            log.warning(
                "%s has changed; it is indexed anew, what was open from it gets ESTALE",
                self.path_text(number),
            )
            self._forget(number)
            self._states[number] = _State(found, now, self._tags.of(number, found))
        else:
            state.looked = now
            state.tag = self._tags.of(number, found)  # others may have seen it go and come back
        return found

    def distrust(self) -> None:
        """Look at every shard again before it is used, here and in all other processes of the mount.

        For when something turned out to be stale: the kernel will ask for its path at once.
        """
        self._tags.alarm()

    def _forget(self, number: int) -> None:
        self.generation += 1
        self._records.pop(number, None)
        file = self._files.pop(number, None)
        if file is not None:
            os.close(file[0])

    def tag(self, number: int) -> int:
        """The tag of the shard's inode numbers. Raises MissingShard, UnreadableShard."""
        state = self._states.get(number)
        if state is None or state.fingerprint == GONE:
            self.fingerprint(number)
            state = self._states[number]
        return state.tag

    def summary(self, number: int) -> Summary:
        """The summary of a shard. Raises NotIndexed, MissingShard, UnreadableShard."""
        fingerprint = self.fingerprint(number)
        found = self.index.summary(self.shards[number].path)
        if found is None or found.fingerprint != fingerprint:
            raise NotIndexed(number)
        return found

    def record(self, number: int, tag: int | None = None) -> Record:
        """The record of a shard, valid until `tidy` or `settle` is called.

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
            raise StaleShard(f"{self.path_text(number)} has changed since this was opened")
        found = self._records.get(number)
        if found is not None:
            self._records.move_to_end(number)
            return found
        found = self.index.record(self.shards[number].path, fingerprint)
        if found is None:
            raise NotIndexed(number)
        self._records[number] = found
        if len(self._records) > RECORDS_MAX:
            self._records.popitem(last=False)
        return found

    def tidy(self) -> None:
        """Let go of an old snapshot of the index. To be called between requests, when no Record is in use."""
        if time.monotonic() - self._renewed > RENEW_SECONDS:
            self._renew()

    def _renew(self) -> None:
        self._records.clear()
        self.index.renew()
        self._renewed = time.monotonic()

    def settled(self, number: int) -> bool:
        """Whether a shard that was NotIndexed is so no more: another process may have done it."""
        self._renew()
        try:
            self.summary(number)
            self.record(number)
        except NotIndexed:
            return False
        self.generation += 1
        return True

    def build(self, number: int) -> bytes:
        """The record of a shard as it is now. Safe in a thread. Raises MissingShard, UnreadableShard."""
        return index_module.build_file(self.shards[number].path)

    def install(self, number: int, data: bytes) -> None:
        """Store a record that `build` made. Raises MissingShard, UnreadableShard."""
        self._records.clear()
        self.index.store([(self.shards[number].path, data)])
        self._renewed = time.monotonic()
        self.generation += 1
        self._look(number, self._states.get(number), time.monotonic())

    def index_now(self, number: int) -> None:
        """Index a shard that is NotIndexed, unless another process has done so by now."""
        if not self.settled(number):
            log.info("indexing %s", self.path_text(number))
            self.install(number, self.build(number))

    def union(self, records: Callable[[int], Record | None]) -> Union:
        """The union over the set as it is now. Records that were in use are so no more."""
        try:
            fingerprints = [self._indexed_fingerprint(number) for number in range(len(self.shards))]
            return self.index.union(self.shards, fingerprints, records)
        finally:
            self._records.clear()

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
                    record = self.record(number)
                    more = f" (and {record.problem_count - 1} more)" if record.problem_count > 1 else ""
                    yield self.path_text(number), record.problems[0].text + more
            except NotIndexed:
                continue
            except ShardError as error:
                yield self.path_text(number), str(error)

    def path_text(self, number: int) -> str:
        return os.fsdecode(self.shards[number].path)

    # --- content

    def content(self, number: int, tag: int, member: int) -> Content:
        """Where to read a member. Raises what `record` raises."""
        one = self.record(number, tag)
        place = one.member(member)
        fd, fingerprint = self._file(number, one)
        return Content(fd, self.shards[number].path, fingerprint, place.data, place.size, one.segments(member))

    def _file(self, number: int, one: Record) -> tuple[int, Fingerprint]:
        size, mtime_ns, inode = one.fingerprint
        fingerprint = size, mtime_ns, inode
        file = self._files.get(number)
        if file is not None and file[1] == fingerprint:
            self._files.move_to_end(number)
            return file
        fd = index_module.open_shard(self.shards[number].path)
        try:
            self._verify(number, one, fd, fingerprint)
        except BaseException:
            os.close(fd)
            raise
        if file is not None:
            os.close(self._files.pop(number)[0])
        file = fd, fingerprint
        self._files[number] = file
        if len(self._files) > self._descriptors:
            _, (old, _) = self._files.popitem(last=False)
            os.close(old)
        self.on_files(len(self._files))
        return file

    def _verify(self, number: int, one: Record, fd: int, fingerprint: Fingerprint) -> None:
        """See that an opened file is the one that was indexed. Raises StaleShard, UnreadableShard."""
        try:
            if index_module.fingerprint_of(os.fstat(fd)) != fingerprint:  # replaced since the last look
                self._look(number, self._states.get(number), time.monotonic())
                raise StaleShard(f"{self.path_text(number)} has changed since this was opened")
            # The fingerprint has proved that nothing was written; this catches a file that was given the old
            # times back, for the price of two reads per opened shard.
            same = record_module.ends_match(fd, one.ends) or not one.members
        except OSError as error:
            raise UnreadableShard(f"{self.path_text(number)}: {error.strerror}") from None
        if not same:
            self._spoil(number)
            raise StaleShard(f"{self.path_text(number)} has other content than its index, with the same times")

    def _spoil(self, number: int) -> None:
        """Have a shard indexed again although its fingerprint is that of the index."""
        log.warning("%s has changed without a new time; it is indexed anew", self.path_text(number))
        self._forget(number)
        self._records.clear()
        self._tags.renew(number)
        self._states.pop(number, None)
        self.index.forget(self.shards[number].path)

    def close(self) -> None:
        for fd, _ in self._files.values():
            os.close(fd)
        self._files.clear()
        self._records.clear()
        self.index.close()


def read(content: Content, offset: int, length: int) -> bytes:
    """Read a member; the bytes are those of the shard that was indexed, or there are none.

    Raises StaleShard when the shard has changed, CorruptShard when it ends too early, UnreadableShard.
    """
    try:
        data = shard.read(content.fd, content.data, content.size, content.segments, offset, length)
    except CorruptShard as error:
        check_unchanged(content)
        raise CorruptShard(f"{os.fsdecode(content.path)}: {error}") from None
    except OSError as error:
        raise UnreadableShard(f"{os.fsdecode(content.path)}: {error.strerror}") from None
    # After the read: a change before it or during it shows in the times, one behind it does not matter.
    check_unchanged(content)
    return data


def read_cached(content: Content, offset: int, length: int) -> bytes | None:
    """As `read`, but None when it would have to wait for a disk, or is not worth the trouble here."""
    length = max(min(length, content.size - offset), 0)
    if content.segments is not None:
        return None
    data = bytearray(length)
    try:
        got = os.preadv(content.fd, [data], content.data + offset, os.RWF_NOWAIT) if length else 0
    except OSError:  # EAGAIN: not in the page cache; EOPNOTSUPP: this file system cannot say
        return None
    if got < length:
        return None
    check_unchanged(content)
    return bytes(data)


def check_unchanged(content: Content) -> None:
    """Raises StaleShard when the shard is no longer the file that was indexed."""
    stat = os.fstat(content.fd)
    if index_module.fingerprint_of(stat) != content.fingerprint or not stat.st_nlink:
        raise StaleShard(f"{os.fsdecode(content.path)} has changed since this was opened")
