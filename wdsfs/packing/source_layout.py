"""The layout of a source shard: places of its members, and its cuts into pieces around changes.

Reads source shards and their records. `packing/overlay_commit.py` decides which cuts are made.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from wdsfs.door.shard_door import OpenShard, fingerprint_of
from wdsfs.durable import named
from wdsfs.errors import CommitError, StaleShard
from wdsfs.index.record import LINK, Member, Record
from wdsfs.packing import plan
from wdsfs.shards import Fingerprint
from wdsfs.source import TarBytes, size_of
from wdsfs.tar import headers, scan
from wdsfs.tar.compressed import open_shard_and_tar
from wdsfs.tar.problems import HARMLESS


class Edit(NamedTuple):
    """A change of a shard: the bytes `start` to `end` are replaced by new members; none where they are inserted.

    `common` are global PAX headers between the headers of a replaced member: the members after it depend on them.
    """

    start: int
    end: int
    new: tuple[plan.NewMember, ...]
    common: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class SourceLayout:
    """The places of the members in a shard, in the order of the tar, without hard links, directories and devices.

    `places` verify the shard; `members` are numbers in the record. `tail` is where the end mark starts, or would
    start. `globals` are the first and last bytes (the latter exclusive) of global PAX headers between members, in
    order, `common` the keywords of all global PAX headers.
    """

    number: int
    path: bytes
    size: int
    places: plan.MemberPlaces
    members: plan.Numbers
    tail: int
    globals: list[tuple[int, int]] = field(default_factory=list)
    common: tuple[bytes, ...] = ()
    _place: plan.Numbers | None = None

    def place(self, member: int) -> int:
        """Return the place of a member (by its number in the record) in the order of the tar."""
        if self._place is None:
            self._place = np.full(int(self.members.max(initial=-1)) + 1, -1, dtype=np.int64)
            self._place[self.members] = np.arange(len(self.members))
        place = int(self._place[member]) if member < len(self._place) else -1
        if place < 0:  # a negative one would count from the end of the list
            raise ValueError(f"member {member} is a hard link, or there is none")
        return place

    def member(self, member: int) -> tuple[int, int]:
        """Return the first byte of a member, and the one after its padding."""
        at = self.place(member)
        return int(self.places.heads[at]), int(self.places.ends[at])

    def pieces_of(self, member: int) -> Iterator[plan.Piece]:
        """Yield the pieces of an unchanged member, with the padding that the last one of a shard may lack."""
        return self._edited(*self.member(member), ())

    def pieces(
        self,
        replaced: Mapping[int, tuple[plan.NewMember, ...]],
        following: Mapping[int, tuple[plan.NewMember, ...]],
        appended: Sequence[plan.NewMember],
    ) -> list[plan.Piece]:
        """Return the pieces of the shard with some members replaced, and new ones behind some, and at the end.

        Raises CorruptShard.
        """
        edits = sorted(self._edits(replaced, following), key=lambda edit: (edit.start, edit.end))
        pieces = [*self._edited(0, self.tail, edits), *map(self._overriding, appended)]
        return plan.joined([*plan.without_last_globals(pieces), *self._end()])

    def _edits(
        self,
        replaced: Mapping[int, tuple[plan.NewMember, ...]],
        following: Mapping[int, tuple[plan.NewMember, ...]],
    ) -> Iterator[Edit]:
        with named(self.path), open_shard_and_tar(self.path) as (_, tar):
            for member, new in replaced.items():
                start, end = self.member(member)
                common = tuple(scan.global_headers(tar.source, start, end))
                yield Edit(start, end, tuple(map(self._overriding, new)), common)
        for member, new in following.items():
            _, end = self.member(member)
            yield Edit(end, end, tuple(map(self._overriding, new)))

    def _overriding(self, new: plan.NewMember) -> plan.NewMember:
        """Return a new member that says itself what global PAX headers of the shard say of all members."""
        return new._replace(common=self.common)

    def _edited(self, start: int, end: int, edits: Sequence[Edit]) -> Iterator[plan.Piece]:
        """Yield the pieces of a range before the tail, with the edits in it."""
        for edit in edits:
            yield from self._run(start, edit.start)
            for header in edit.common:
                yield plan.GlobalHeader(self.number, *header)
            yield from edit.new
            start = edit.end
        yield from self._run(start, end)

    def _run(self, start: int, end: int) -> Iterator[plan.Piece]:
        first, last = (bisect.bisect_left(self.globals, (at,)) for at in (start, end))
        for header_start, header_end in self.globals[first:last]:
            yield plan.CopiedRange(self.number, start, header_start)
            yield plan.GlobalHeader(self.number, header_start, header_end)
            start = header_end
        yield plan.CopiedRange(self.number, min(start, self.size), min(end, self.size))
        yield plan.Zeros(max(end - max(self.size, start), 0))

    def _end(self) -> Iterator[plan.Piece]:
        """Yield the end mark and all bytes after it, unchanged. Two zero blocks if there is no mark."""
        if self.size - self.tail >= headers.BLOCK:
            yield plan.CopiedRange(self.number, self.tail, self.size)
        else:
            yield plan.Zeros(len(headers.END))


def pieces_of(number: int, member: Member, size: int) -> Iterator[plan.Piece]:
    """Yield the pieces of an unchanged member that is not sparse, of a shard of `size` bytes."""
    end = member.data + headers.padded(member.size)
    yield plan.CopiedRange(number, member.head, min(end, size))
    if end > size:
        yield plan.Zeros(end - size)


def layout(number: int, path: bytes, record: Record) -> SourceLayout:
    """Return the layout of the shard at `path`. Raises CommitError for a damaged one, StaleShard, ShardErrors."""
    damage = [problem for problem in record.problems if problem.kind not in HARMLESS]
    if damage:
        text = f"{os.fsdecode(path)} is damaged ({damage[0].text}): it can be copied whole, but not changed"
        raise CommitError(text)
    with named(path), open_shard_and_tar(path) as (shard, tar):
        check_unchanged(shard, path, record.fingerprint)
        result = _measure(number, path, record, tar.source)
        check_unchanged(shard, path, record.fingerprint)
        return result


def unpacked_size(path: bytes) -> int | None:
    """Return the unpacked size of a compressed shard in bytes; None for a plain one, which is copied.

    Raises CommitError for a damaged one, ShardErrors.
    """
    with named(path), open_shard_and_tar(path) as (shard, tar):
        if tar.source is shard:
            return None
        if tar.problem is not None and tar.problem.kind not in HARMLESS:
            raise CommitError(f"{os.fsdecode(path)} is damaged ({tar.problem.text}): it cannot be unpacked")
        return size_of(tar.source)


def _measure(number: int, path: bytes, record: Record, fd: TarBytes) -> SourceLayout:
    heads = record.array("member.head").astype(np.int64) * headers.BLOCK
    datas = heads + record.array("member.body").astype(np.int64) * headers.BLOCK
    sizes = record.array("member.size").astype(np.int64)
    ends = datas + ((sizes + headers.BLOCK - 1) & -headers.BLOCK)
    for member in record.column.get("sparse.member", ()):  # their end does not follow from their size
        ends[member] = scan.end_of(fd, int(heads[member]))
    members = np.arange(record.members)
    if record.has_links:
        first = record.array("entry.member").astype(np.int64)
        flags = np.repeat(record.array("entry.flags"), first[1:] - first[:-1])
        members = members[(flags & LINK) == 0]
    members = members[np.argsort(heads[members], kind="stable")]
    size = size_of(fd)
    tail = max((end for _, end, _ in scan.split_gap(fd, record.ends[0], size)), default=0)
    places = plan.MemberPlaces(heads[members], ends[members], sizes[members])
    result = SourceLayout(number, path, size, places, members, tail)
    _read_gaps(result, fd)
    return result


def _read_gaps(source: SourceLayout, fd: TarBytes) -> None:
    """Read the gaps between members: global PAX headers, with their keywords, and end marks of joined tars."""
    starts = np.concatenate(([0], source.places.ends))
    stops = np.concatenate((source.places.heads, [source.tail]))
    if (starts > stops).any():
        raise CommitError(f"{os.fsdecode(source.path)}: its members overlap")
    keywords: set[bytes] = set()
    for gap in np.flatnonzero(starts < stops).tolist():
        at, stop = int(starts[gap]), int(stops[gap])
        while at < stop:
            for start, end, words in scan.split_gap(fd, at, stop):
                if words is not None:
                    source.globals.append((start, end))
                    keywords |= words
                at = end
            if at < stop:  # another tar follows after the end mark
                at = scan.end_of_zeros(fd, at, stop)
    source.common = tuple(key for key in headers.OVERRIDABLE if key in keywords)


def check_unchanged(shard: OpenShard, path: bytes, fingerprint: Fingerprint) -> None:
    """Raise StaleShard if the open shard is another file than when it was looked at."""
    if fingerprint_of(shard) != fingerprint:
        raise StaleShard(f"{os.fsdecode(path)} has changed while it was packed; start again")
