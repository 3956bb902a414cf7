"""Whole samples by their numbers: the places of their columns, and one read where these lie together.

For samples whose columns are pieces of one shard this is a direct way, without names, inodes and `Content`; all
other samples are read through `ShardSet.content`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import operator
import os
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsfs import host
from wdsfs.errors import IndexUnusable, ShardError, StaleShard
from wdsfs.index.record import Record
from wdsfs.inodes import MEMBER, position
from wdsfs.tar.headers import BLOCK
from wdsfs.tree import content as content_module
from wdsfs.tree.companions import KEYS
from wdsfs.tree.content import READ_MAX, SAMPLE_MAX, Content
from wdsfs.tree.indexing import indexed
from wdsfs.tree.numbered_tree import samples_of
from wdsfs.tree.open_shards import RENEW_SECONDS
from wdsfs.tree.path_table import KeyTable
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.shown_names import ShownNames
from wdsfs.tree.tree import View
from wdsfs.tree.view_content import OWN, SHARD

# Gaps up to this size (bytes) between columns of a sample are read with them; larger in a store, where each
# request costs more.
GAP, REMOTE_GAP = 32 << 10, 256 << 10
# Samples of a list, and bytes of a range, that are asked of the disk or the network at a time.
AHEAD_MAX, AHEAD_BYTES = 1024, 128 << 20
BATCH_BYTES = 16 << 20  # of the samples of a batch, about: the next batch gets their memory
SHARDS_MAX = 16384  # shards whose columns are kept in memory, 3 KB each

TEXT = ("utf-8", "surrogateescape")

RESERVED = ("__key__", "__shard__")  # in each sample: a column of this name gets a suffix

Sample = dict[str, Any]
ColumnRange = tuple[str, int, int]  # a column: its name, its first byte, the byte after its last one


class _ShardColumns:
    """The samples of a shard as columns of its record, and the open shard; valid as long as both are."""

    __slots__ = (
        *("_aliased", "_body", "_direct", "_entry_member", "_extension", "_folder", "_gap", "_head", "_is_view"),
        *("_names", "_record", "_rows", "_shift", "_shown", "_size", "_starts", "_text", "_watched"),
        *("fd", "file", "order", "shard"),
    )

    def __init__(
        self, lower: ShardSet, number: int, tag: int, shown: ShownNames, *, in_classes: bool = False
    ) -> None:
        order = samples_of(lower, number, tag, in_classes=in_classes)
        self.order: Any = order if isinstance(order, range) else np.ascontiguousarray(order).data
        record, plain = lower.record_and_plain(number, tag)
        self.shard = os.fsdecode(lower.shards[number].name)
        self._record, self._shown = record, shown
        self._aliased = record.aliases[shown.domain] is not None
        self._names: dict[int, str] = {}
        self._folder = (range(0), "")  # the entries of the last folder, and its path
        self._entry_member = record.entry_member
        self._starts, self._text = record.entry_name.starts, record.entry_name.text
        self._extension, self._size = record.column["member.ext"], record.column["member.size"]
        # In a view: `_rows` tells where a member comes from. Most come from the shard itself, whose number is 0.
        self._is_view, self._rows = record is not plain, record.column["member.head"]
        self._shift: int = 64 if record.view is None else record.view["shift"]
        self._head, self._body = plain.column["member.head"], plain.column["member.body"]
        self._direct = _is_direct(record) and _is_direct(plain)
        self.file = lower.plain.opened(number)
        self._gap = GAP if self.file.remote is None else REMOTE_GAP
        self.fd = self.file.source if isinstance(self.file.source, int) else None
        self._watched = self.file.shard if isinstance(self.file.shard, int) else None

    def key(self, entry: int) -> str:
        """Return the key of a sample."""
        entries, path = self._folder
        if entry not in entries:
            folder = self._record.folder_of(entry)
            entries = self._record.folder_entries(folder)
            path = (self._record.folder_path(folder) + b"/").decode(*TEXT) if folder else ""
            self._folder = entries, path
        starts = self._starts
        return path + str(self._text[starts[entry] : starts[entry + 1]], *TEXT)

    def members(self, entry: int) -> range:
        """Return the members of a sample."""
        return range(self._entry_member[entry], self._entry_member[entry + 1])

    def name(self, member: int) -> str:
        """Return the name of a column: the extension; a second one of a sample has a suffix, as in a mount."""
        name = self._shown.shown(self._record, position(MEMBER, member)).decode(*TEXT)
        if name in RESERVED:
            name += "~2"
        if not self._aliased:
            self._names[self._extension[member]] = name
        return name

    def pieces(self, entry: int) -> list[ColumnRange]:
        """Return the columns of a sample in the order of the shard; none if one is not a piece of the shard."""
        pieces: list[ColumnRange] = []
        if not self._direct:
            return pieces
        head, body, sizes, names, extensions = self._head, self._body, self._size, self._names, self._extension
        rows = self._rows if self._is_view else None
        last, in_order = 0, True
        for member in range(self._entry_member[entry], self._entry_member[entry + 1]):
            if rows is None:
                row = member
            elif (row := rows[member]) >> self._shift != OWN:
                return []
            start = (head[row] + body[row]) * BLOCK
            if start < last:
                in_order = False
            last = start + sizes[member]
            pieces.append((names.get(extensions[member]) or self.name(member), start, last))
        if not in_order:
            pieces.sort(key=operator.itemgetter(1))
        return pieces

    def ranges(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Return the ranges (bytes) of samples by their places in the shard, those of its own bytes."""
        if not self._direct or first >= stop:
            return []
        entries = np.asarray(self.order[first:stop], np.int64)
        begins = _taken(self._entry_member, entries)
        counts = _taken(self._entry_member, entries + 1) - begins
        members = np.repeat(begins - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        rows = _taken(self._rows, members) if self._is_view else members
        own = rows >> self._shift == OWN
        if not own.any():
            return []
        rows = rows[own]
        starts = (_taken(self._head, rows) + _taken(self._body, rows)) * BLOCK
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], (starts + _taken(self._size, members[own]))[order]
        cuts = np.flatnonzero(starts[1:] - ends[:-1] > self._gap)
        firsts, lasts = starts[np.append(0, cuts + 1)], ends[np.append(cuts, len(ends) - 1)]
        return list(zip(firsts.tolist(), lasts.tolist(), strict=True))

    def read_cached(self, pieces: list[ColumnRange], sample: Sample, scratch: memoryview) -> bool:
        """Add the columns to a sample if that takes one read, without waiting for a disk. Raises StaleShard."""
        begin, fd = pieces[0][1], self.fd
        size = pieces[-1][2] - begin
        if size > READ_MAX or (size > GAP and not _are_near(pieces)):
            return False
        if fd is None:
            remote = self.file.remote
            data = None if remote is None else remote.read_cached(size, begin)
            if data is None:
                return False
            for name, start, stop in pieces:
                sample[name] = bytes(data[start - begin : stop - begin])
            return True
        try:
            if os.preadv(fd, (scratch[:size],), begin, os.RWF_NOWAIT) < size:
                return False
        except OSError as error:  # EAGAIN: not in the page cache
            if error.errno == errno.EOPNOTSUPP:
                self.fd = None
            return False
        # After the read, as in `content.check_unchanged`: a change before or during it shows in the time.
        if self._watched is not None and os.fstat(self._watched).st_ctime_ns != self.file.ctime_ns:
            raise StaleShard(f"{os.fsdecode(self.file.path)} has changed since this was opened")
        for name, start, stop in pieces:
            sample[name] = bytes(scratch[start - begin : stop - begin])
        return True

    def reads(self, pieces: list[ColumnRange]) -> list[_RangeRead]:
        """Return the reads that bring the columns of a sample: one, unless too much lies between them."""
        runs: list[list[ColumnRange]] = []
        for piece in pieces:
            if runs and piece[1] - runs[-1][-1][2] <= self._gap and piece[2] - runs[-1][0][1] <= SAMPLE_MAX:
                runs[-1].append(piece)
            else:
                runs.append([piece])
        return [_RangeRead(Content(self.file, run[0][1], run[-1][2] - run[0][1], None), run) for run in runs]


class _RangeRead(NamedTuple):
    """A range of a shard, and the columns that lie in it."""

    content: Content
    pieces: list[ColumnRange]

    def into(self, sample: Sample) -> None:
        """Read, and add the columns to a sample. Raises ShardErrors."""
        data, base = content_module.read(self.content, 0, self.content.size), self.content.data
        for name, start, stop in self.pieces:
            sample[name] = data[start - base : stop - base]


def _taken(column: Any, at: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the values at these places of a column, whose numbers may be small."""
    return np.asarray(column)[at].astype(np.int64)


def _are_near(pieces: list[ColumnRange]) -> bool:
    return all(second[1] - first[2] <= GAP for first, second in itertools.pairwise(pieces))


def _is_direct(record: Record) -> bool:
    """Return True if the members of samples are whole pieces of the shard."""
    own = record.view is None or record.view["places"][OWN]["kind"] == SHARD
    return own and record.is_plain and record.moved is None and "sparse.member" not in record.column


class SampleReader:
    """The samples of a set by their numbers, as they were when this was made.

    `lock` is held for every call of the set, which is for one thread at a time. Reads that wait for a disk or the
    network are made without the lock. Reading from a shard that has changed since raises StaleShard. `in_classes`:
    the samples are in the folders of their classes. `skip_unreadable`: a shard that cannot be read has no samples;
    without it, its error is raised.
    """

    def __init__(
        self,
        lower: ShardSet,
        lock: AbstractContextManager[Any],
        *,
        in_classes: bool = False,
        skip_unreadable: bool = False,
    ) -> None:
        self._lower, self.lock, self._shown, self._in_classes = lower, lock, ShownNames(View()), in_classes
        self._columns: dict[int, _ShardColumns] = {}
        self._snapshot, self._old_at = -1, 0.0
        self._table = b""  # the key of the table of keys in the index
        self._scratch = memoryview(bytearray(READ_MAX))
        host.keep_freed_memory(BATCH_BYTES)
        # Of each shard: the tag of its content, the number after its last sample, and its size in bytes.
        self._tags, self._ends, self.shard_sizes = array("q"), array("q"), array("q")
        count, digest = 0, hashlib.blake2b(digest_size=16)
        for number in range(len(lower)):
            size = tag = 0
            try:
                summary = indexed(lower.summary, number)
                tag, size = lower.tag(number), summary.size
                count += summary.samples
                digest.update(summary.fingerprint.packed)
            except ShardError:
                if not skip_unreadable:
                    raise
            self._tags.append(tag)
            self._ends.append(count)
            self.shard_sizes.append(size)
        self.count = count
        self.digest = digest.digest()  # the same in each process that opens the same set

    @property
    def shards(self) -> int:
        """The number of shards."""
        return len(self._ends)

    def numbers(self, shard: int) -> range:
        """Return the numbers of the samples of a shard."""
        return range(self._ends[shard - 1] if shard else 0, self._ends[shard])

    # --- reading

    def sample(
        self, number: int, is_read: Callable[[str], bool] | None = None, *, is_ahead: bool = False
    ) -> Sample:
        """Return the sample with this number, which exists: all columns or those `is_read`. Raises ShardErrors.

        `is_ahead`: where that would wait for a disk or the network, only begin to read; return {}.
        """
        ends = self._ends
        shard = bisect_right(ends, number)
        with self.lock:
            columns = self._opened(shard)
            entry = columns.order[number - ends[shard - 1] if shard else number]
            sample: Sample = {"__key__": columns.key(entry), "__shard__": columns.shard}
            pieces = columns.pieces(entry)
            members: Sequence[int] = [] if pieces else columns.members(entry)
            if is_read is not None:
                pieces = [piece for piece in pieces if is_read(piece[0])]
                members = [member for member in members if is_read(columns.name(member))]
            if pieces and columns.read_cached(pieces, sample, self._scratch):
                return sample
            if is_ahead:
                for content, _ in columns.reads(pieces):
                    content.file.will_need(content.data, content.data + min(content.size, SAMPLE_MAX))
                return {}
            reads = columns.reads(pieces) if pieces else indexed(self._parts, shard, members, sample)
            for read in reads:
                sample.update((name, b"") for name, _, _ in read.pieces)  # in the order of the shard
                read.content.file.hold()
        try:
            for read in reads:
                read.into(sample)
        finally:
            with self.lock:
                for read in reads:
                    read.content.file.let_go()
        return sample

    def samples(self, numbers: Sequence[int]) -> list[Sample]:
        """Return the samples with these numbers, read in the order of the shards. Raises ShardErrors."""
        samples: list[Sample] = [{}] * len(numbers)
        order = sorted(range(len(numbers)), key=numbers.__getitem__)
        for begin in range(0, len(order), AHEAD_MAX):
            some = order[begin : begin + AHEAD_MAX]
            for at in some:
                samples[at] = self.sample(numbers[at], is_ahead=True)
            for at in some:
                samples[at] = samples[at] or self.sample(numbers[at])
        return samples

    def will_read(self, numbers: range) -> None:
        """Begin to read the samples with these numbers, AHEAD_BYTES of them at most; do not wait.

        Raises ShardErrors for shards that cannot be opened.
        """
        left = AHEAD_BYTES
        for shard in range(bisect_right(self._ends, numbers.start), len(self._ends)):
            own = self.numbers(shard)
            if own.start >= numbers.stop or not left:
                break
            with self.lock:
                columns = self._opened(shard)
                first, stop = max(numbers.start, own.start) - own.start, min(numbers.stop, own.stop) - own.start
                for begin, end in columns.ranges(first, stop):
                    columns.file.will_need(begin, min(end, begin + left))
                    left = max(left - (end - begin), 0)

    def _opened(self, shard: int) -> _ShardColumns:
        """Return the columns of a shard, as they are kept unless the shard or the snapshot of the index is old."""
        columns = self._columns.get(shard)
        is_old = self._snapshot != self._lower.index.snapshot or monotonic() > self._old_at
        return self._open(shard) if columns is None or columns.file.ended or is_old else columns

    def _open(self, shard: int) -> _ShardColumns:
        if monotonic() > self._old_at:
            self._lower.renew()
            self._old_at = monotonic() + RENEW_SECONDS
        tag, classes = self._tags[shard], self._in_classes
        columns = indexed(_ShardColumns, self._lower, shard, tag, self._shown, in_classes=classes)
        if self._snapshot != self._lower.index.snapshot or len(self._columns) >= SHARDS_MAX:
            self._columns.clear()
            self._snapshot = self._lower.index.snapshot
        self._columns[shard] = columns
        return columns

    def _parts(self, shard: int, members: Sequence[int], sample: Sample) -> list[_RangeRead]:
        """Return the reads of members that lie anywhere; add members that have to be made to the sample."""
        reads = []
        for member in members:
            content = self._lower.content(shard, self._tags[shard], member)
            name = self._columns[shard].name(member)
            if content.held is None:
                reads.append(_RangeRead(content, [(name, content.data, content.data + content.size)]))
            else:
                sample[name] = content_module.read(content, 0, content.size)
        return reads

    # --- keys

    def keys(self, shard: int) -> list[str]:
        """Return the keys of the samples of a shard, in the order of the tar. Raises ShardErrors."""
        with self.lock:
            columns = self._open(shard)
            return [columns.key(entry) for entry in columns.order]

    def find(self, key: str) -> list[int]:
        """Return the numbers of the samples with this key, or with this shard and key. Raises ShardErrors."""
        with self.lock:
            numbers = self._with_key(key, range(len(self._lower)))
            name, slash, rest = key.partition("/")
            if not numbers and slash:
                shards = [n for n, shard in enumerate(self._lower.shards) if os.fsdecode(shard.name) == name]
                numbers = self._with_key(rest, shards)
            return numbers

    def _with_key(self, key: str, shards: Sequence[int]) -> list[int]:
        try:
            path = key.encode(*TEXT)
        except UnicodeEncodeError:
            return []
        crc = zlib.crc32(path)
        candidates = self._candidates(crc) if len(shards) > 1 else shards
        numbers: list[int] = []
        for shard in candidates:
            order = np.asarray(self._open(shard).order)
            first = self._ends[shard - 1] if shard else 0
            entries = indexed(self._lower.record, shard, self._tags[shard]).find_samples(path, crc)
            numbers += [first + int(at) for entry in sorted(entries) for at in np.flatnonzero(order == entry)]
        return numbers

    def _candidates(self, crc: int) -> list[int]:
        """Return the shards that may have a key with this CRC-32, by a table made at the first question."""
        if self._table:
            with contextlib.suppress(IndexUnusable):  # the index was damaged, and is another one now
                return KeyTable.parse(self._lower.index.table(self._table)).candidates(crc)
        record, numbers = self._lower.record, range(len(self._lower))
        self._table = indexed(self._lower.keep_table, KEYS, lambda: KeyTable.build(map(record, numbers)))
        return KeyTable.parse(self._lower.index.table(self._table)).candidates(crc)
