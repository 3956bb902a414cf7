"""Writing one shard from pieces of others and from files, so that it is there whole or not at all.

A shard to be written is a list of pieces in order: `CopiedRange`s, which are ranges of raw bytes of a source shard
(whole members with all their headers and padding, and what lies between them), and `NewMember` members, whose
content is a file. The kernel copies the runs, so untouched members stay byte-identical and a commit runs at disk
speed.

`SourceLayout` tells where in a source shard its members begin and end, and cuts it into pieces around what
changes. `ShardWriter` writes a shard under a temporary name, syncs it, reads it back and only then gives it its
name.

What leads to which pieces is decided in `commit/plan.py`. All that writes goes through `Disk`, whose steps the
tests record, stop and let fail. Threads: a `ShardWriter` may be used by several threads, each for another shard.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsfs.errors import CommitError, StaleShard
from wdsfs.index.record import LINK, Record
from wdsfs.index.store import opened_shard
from wdsfs.storage.durable import CHUNK, Disk, _sync_file_range, temporary_of
from wdsfs.storage.identity import fingerprint_of
from wdsfs.storage.source import TarBytes, pread, size_of
from wdsfs.tar import header_encoder, scan
from wdsfs.tar.scan import HARMLESS

COPY_MAX = 1 << 25  # bytes that the kernel is asked to copy at a time, and that may wait to be written to the disk
DENSE = 8192  # bytes per member; with less, comparing all bytes is quicker than reading the headers

_NO_FILES = (scan.HARD_LINK, scan.CHARACTER, scan.BLOCK_DEVICE, scan.DIRECTORY, scan.FIFO)

Numbers = NDArray[np.int64]


# --- pieces ------------------------------------------------------------------------------------------------


class CopiedRange(NamedTuple):
    """The bytes `start` to `end` of a source shard (its number in the set), as they are."""

    shard: int
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


class GlobalHeader(CopiedRange):
    """A run that is a global PAX header. While pieces are put together only: `joined` makes plain runs of them."""

    __slots__ = ()


class NewMember(NamedTuple):
    """A member with the content of a file of the upper directory.

    `size` in bytes and `mtime_ns` are those that the file had when the commit was planned; `common` the keywords
    of global PAX headers in front of it.
    """

    name: bytes
    path: bytes
    size: int
    mtime_ns: int
    common: tuple[bytes, ...] = ()

    @property
    def header(self) -> bytes:
        return header_encoder.encode(self.name, self.size, self.mtime, self.common)

    @property
    def mtime(self) -> int:
        return self.mtime_ns // 10**9

    @property
    def length(self) -> int:
        return len(self.header) + self.size + header_encoder.padding(self.size)


class Zeros(NamedTuple):
    """Padding that a source shard lacks, or an end mark."""

    length: int


Piece = CopiedRange | NewMember | Zeros


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The same bytes in as few pieces as possible."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if not piece.length:
            continue
        if (
            isinstance(piece, CopiedRange)
            and isinstance(last, CopiedRange)
            and (last.shard, last.end) == piece[:2]
        ):
            found[-1] = CopiedRange(piece.shard, last.start, piece.end)
        else:
            found.append(CopiedRange(*piece) if isinstance(piece, CopiedRange) else piece)
    return found


def split_trailing(pieces: Sequence[Piece]) -> tuple[list[Piece], list[Piece]]:
    """The pieces of a shard in front of its end mark, and the global headers after its last member.

    Semantics decision: those do not belong into the shard. They say nothing of any member of it, and tarfile, so
    webdataset too, raises ReadError where no member follows.
    """
    left = list(pieces)
    trailing: list[Piece] = []
    while left and (isinstance(left[-1], GlobalHeader) or not left[-1].length):
        trailing.insert(0, left.pop())
    return left, [piece for piece in trailing if piece.length]


# --- the layout of a source shard --------------------------------------------------------------------------


class Cut(NamedTuple):
    """A change of a shard: the bytes `start` to `end` give way to new members, or to ones from further on.

    `kept` are global PAX headers between the headers of a member that goes: those behind it depend on them.
    """

    start: int
    end: int
    new: tuple[Piece, ...] = ()
    kept: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class SourceLayout:
    """Where the members of a shard lie, in the order of the tar; hard links, directories and devices left out.

    `heads` and `ends` are bytes from a member's first header to behind its padding, `sizes` what a reader gets;
    `members` and `entries` are numbers in the record. `tail` is where the end mark starts, or would start.
    `globals` are the first and last bytes (the latter exclusive) of global PAX headers between members, in order,
    `common` the keywords of all global PAX headers.

    What other readers do not see (`reading.Reading`) is put right in each cut: `marks` are end marks to leave out
    (from byte, to byte), `moves` members that lie apart from the rest of their sample, with the one to follow.
    """

    number: int
    path: bytes
    size: int
    fingerprint: tuple[int, int, int]
    heads: Numbers
    ends: Numbers
    sizes: Numbers
    members: Numbers
    entries: Numbers
    tail: int
    globals: list[tuple[int, int]] = field(default_factory=list)
    common: tuple[bytes, ...] = ()
    marks: list[tuple[int, int]] = field(default_factory=list)
    moves: list[tuple[int, list[int]]] = field(default_factory=list)
    _place: Numbers | None = None

    def place(self, member: int) -> int:
        """The place of a member (its number in the record) in the order of the tar."""
        if self._place is None:
            self._place = np.full(int(self.members.max(initial=-1)) + 1, -1, dtype=np.int64)
            self._place[self.members] = np.arange(len(self.members))
        place = int(self._place[member]) if member < len(self._place) else -1
        if place < 0:  # never a place from the end of the list
            raise ValueError(f"member {member} is a hard link, or there is none")
        return place

    def member(self, member: int) -> tuple[int, int]:
        """The first byte of a member, and the one behind its padding."""
        at = self.place(member)
        return int(self.heads[at]), int(self.ends[at])

    def cut(
        self, members: Mapping[int, tuple[NewMember, ...]], behind: Mapping[int, tuple[NewMember, ...]]
    ) -> list[Cut]:
        """The cuts that put new members in the place of some, and others behind some, sorted by their place.

        Raises CorruptShard.
        """
        found = [Cut(*mark) for mark in self.marks]
        moved = {member for _, some in self.moves for member in some}
        after: dict[int, list[Piece]] = {one: list(new) for one, new in behind.items() if one not in moved}
        with opened_shard(self.path) as (_, tar):
            for anchor, some in self.moves:
                pieces = after.setdefault(anchor, [])
                for member in some:
                    start, end = self.member(member)
                    kept = tuple(scan.global_headers(tar.source, start, end))
                    pieces += members.get(member, self._without(start, end, kept))
                    pieces += behind.get(member, ())
                    found.append(Cut(start, end, (), kept))
            for member, new in members.items():
                if member not in moved:
                    start, end = self.member(member)
                    found.append(Cut(start, end, new, tuple(scan.global_headers(tar.source, start, end))))
        found += [Cut(self.member(one)[1], self.member(one)[1], tuple(new)) for one, new in after.items()]
        return sorted(found, key=lambda cut: (cut.start, cut.end))

    def _without(self, start: int, end: int, left_out: Sequence[tuple[int, int]]) -> Iterator[Piece]:
        """A part of the shard without some parts of it."""
        for begin, stop in left_out:
            yield from self._run(start, begin)
            start = stop
        yield from self._run(start, end)

    def pieces(self, cuts: Sequence[Cut], appended: Sequence[NewMember] = ()) -> list[Piece]:
        """The whole shard with these cuts, then new members; at least an end mark follows."""
        return self.whole([*self.between(0, self.tail, cuts), *appended])

    def whole(self, pieces: Sequence[Piece]) -> list[Piece]:
        """A shard of these pieces, with the end of this one."""
        return joined([*split_trailing(pieces)[0], *self.end()])

    def between(self, start: int, end: int, cuts: Sequence[Cut]) -> Iterator[Piece]:
        """A part of the shard in front of the tail, with the cuts that lie in it."""
        for cut in cuts:
            yield from self._run(start, cut.start)
            for kept in cut.kept:
                yield GlobalHeader(self.number, *kept)
            yield from cut.new
            start = cut.end
        yield from self._run(start, end)

    def _run(self, start: int, end: int) -> Iterator[Piece]:
        first, last = (bisect.bisect_left(self.globals, (at,)) for at in (start, end))
        for header_start, header_end in self.globals[first:last]:
            yield CopiedRange(self.number, start, header_start)
            yield GlobalHeader(self.number, header_start, header_end)
            start = header_end
        yield CopiedRange(self.number, min(start, self.size), min(end, self.size))
        yield Zeros(max(end - max(self.size, start), 0))

    def end(self) -> Iterator[Piece]:
        """The end mark and what lies behind it, as they are. Two zero blocks where there is no mark."""
        if self.size - self.tail >= header_encoder.BLOCK:
            yield CopiedRange(self.number, self.tail, self.size)
        else:
            yield Zeros(len(header_encoder.END))


def layout(number: int, path: bytes, record: Record) -> SourceLayout:
    """The layout of the shard at `path`. Raises CommitError for a damaged one, StaleShard, ShardErrors."""
    damage = [problem for problem in record.problems if problem.kind not in HARMLESS]
    if damage:
        text = f"{os.fsdecode(path)} is damaged ({damage[0].text}): it can be copied as it is, but not changed"
        raise CommitError(text)
    with opened_shard(path) as (fd, tar):
        size, mtime_ns, identity = record.fingerprint
        fingerprint = size, mtime_ns, identity
        _check_unchanged(fd, path, fingerprint)
        found = _measure(number, path, record, tar.source, fingerprint)
        _check_unchanged(fd, path, fingerprint)
        return found


def unpacked_size(path: bytes) -> int | None:
    """The bytes that a compressed shard is unpacked to for a new set; None for a plain one, which is copied.

    Raises CommitError for a damaged one, ShardErrors.
    """
    with opened_shard(path) as (fd, tar):
        if tar.source == fd:
            return None
        if tar.problem is not None and tar.problem.kind not in HARMLESS:
            raise CommitError(f"{os.fsdecode(path)} is damaged ({tar.problem.text}): it cannot be unpacked")
        return size_of(tar.source)


def _measure(
    number: int, path: bytes, record: Record, fd: TarBytes, fingerprint: tuple[int, int, int]
) -> SourceLayout:
    heads = record.array("member.head").astype(np.int64) * scan.BLOCK
    datas = heads + record.array("member.body").astype(np.int64) * scan.BLOCK
    sizes = record.array("member.size").astype(np.int64)
    ends = datas + ((sizes + scan.BLOCK - 1) & -scan.BLOCK)
    first = record.array("entry.member").astype(np.int64)
    entries = np.repeat(np.arange(record.entries), first[1:] - first[:-1])
    for member in record.column.get("sparse.member", ()):  # their end does not follow from their size
        ends[member] = scan.end_of(fd, int(heads[member]))
    members = np.arange(record.members)
    if record.has_links:
        kept = (record.array("entry.flags")[entries] & LINK) == 0
        members = members[kept]
    members = members[np.argsort(heads[members], kind="stable")]
    size = size_of(fd)
    tail = max((end for _, end, _ in scan.split_gap(fd, record.ends[0], size)), default=0)
    found = SourceLayout(
        *(number, path, size, fingerprint, heads[members], ends[members], sizes[members]),
        *(members, entries[members], tail),
    )
    found.moves = _moves(record)
    _read_gaps(found, fd)
    return found


def _moves(record: Record) -> list[tuple[int, list[int]]]:
    """For each sample whose members lie apart the last one of its first run, and those that are to follow it."""
    entries = record.samples_apart()
    if not entries:
        return []
    order = record.members_in_order()
    rank = np.empty(record.members, np.int64)
    rank[order] = np.arange(len(order))
    found = []
    for entry in entries:
        own = record.entry_members(entry)
        first = int(np.argmax(np.diff(rank[own.start : own.stop]) != 1))
        found.append((own[first], list(own[first + 1 :])))
    return found


def _read_gaps(found: SourceLayout, fd: TarBytes) -> None:
    """Fill in what lies in the gaps between members: global PAX headers, with their keywords, and end marks."""
    starts = np.concatenate(([0], found.ends))
    stops = np.concatenate((found.heads, [found.tail]))
    if (starts > stops).any():
        raise CommitError(f"{os.fsdecode(found.path)}: its members overlap")
    keywords: set[bytes] = set()
    for gap in np.flatnonzero(starts < stops).tolist():
        at, stop = int(starts[gap]), int(stops[gap])
        while at < stop:
            for start, end, words in scan.split_gap(fd, at, stop):
                if words is not None:
                    found.globals.append((start, end))
                    keywords |= words
                at = end
            if at < stop:  # a tar that follows the end mark of another one
                found.marks.append((at, scan.end_of_zeros(fd, at, stop)))
                at = found.marks[-1][1]
    found.common = tuple(key for key in header_encoder.OVERRIDABLE if key in keywords)


def _check_unchanged(fd: int, path: bytes, fingerprint: tuple[int, int, int]) -> None:
    if fingerprint_of(os.fstat(fd)) != fingerprint:
        raise StaleShard(f"{os.fsdecode(path)} has changed while it was packed; start again")


# --- writing -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def named(path: bytes) -> Iterator[None]:
    """An OSError in the block that names no file is one of this file: what writes has a descriptor only."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = path
        raise


if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


@dataclass(slots=True)
class Output:
    """A shard to be written: where, and of what. `layouts` are those of the shards of its runs, to verify it with.

    None for a copy of a whole shard, of whose inside nobody has to know anything.
    """

    target: bytes
    pieces: list[Piece]
    layouts: Mapping[int, SourceLayout] | None = None

    @property
    def length(self) -> int:
        return sum(piece.length for piece in self.pieces)

    @property
    def first_change(self) -> int:
        """The offset of the first byte that may differ from a source shard: up to there this is a copy of one."""
        at, source = 0, None
        for piece in self.pieces:
            if not isinstance(piece, CopiedRange) or piece.start != at or source not in (None, piece.shard):
                break
            at, source = piece.end, piece.shard
        return at


class _WrittenFile(NamedTuple):
    """A new member as it was written: what reading it back has to give."""

    head: int
    piece: NewMember
    checksum: int


class SourceShard(NamedTuple):
    """A shard of the set as it was when a commit was planned; `checksum` is that of its record, if it is known."""

    path: bytes
    fingerprint: tuple[int, int, int]
    checksum: str = ""


class ShardWriter:
    """Writes shards.

    `sources` tells of each shard of the set its path and what it was when the commit was planned; `open_file`
    opens a file of the upper directory; `on_bytes` hears how many bytes have been written, in any thread, and may
    raise an exception to stop.
    """

    def __init__(
        self,
        sources: Mapping[int, SourceShard],
        open_file: Callable[[bytes], int],
        disk: Disk | None = None,
        on_bytes: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.sources, self.open_file, self.on_bytes = sources, open_file, on_bytes
        self.disk = disk or Disk()

    def publish(
        self,
        output: Output,
        replaces: os.stat_result | None = None,
        before: Callable[[os.stat_result], None] = lambda _: None,
    ) -> None:
        """Write a shard and give it its name. Killed at any instant, the name is of the old file or the new one.

        `replaces` is the file that gives way; without it nothing may have the name yet. `before` is called with
        the finished file in front of the last step. Raises CommitError, ShardErrors, OSError, and leaves nothing.
        """
        with named(output.target):
            self._publish(output, replaces, before)

    def _publish(
        self, output: Output, replaces: os.stat_result | None, before: Callable[[os.stat_result], None]
    ) -> None:
        temporary = temporary_of(output.target)
        # What replaces a shard gets its mode at the end, and until then it is for nobody else.
        fd = self.disk.open_temporary(temporary, 0o666 if replaces is None else 0o600)
        try:
            written = self._write(fd, output)
            if replaces is not None:
                self.disk.set_owner(fd, replaces)
            self.disk.sync(fd)
            self._verify(fd, output, written)
            before(os.fstat(fd))
            if replaces is None and os.path.lexists(output.target):
                raise CommitError(f"{os.fsdecode(output.target)} is there already")
            self.disk.rename(temporary, output.target)
        except Exception:
            with contextlib.suppress(OSError):
                self.disk.remove(temporary)
            raise
        finally:
            os.close(fd)
        self.disk.sync_directory(os.path.dirname(output.target))

    def _write(self, fd: int, output: Output) -> list[_WrittenFile]:
        """Write the pieces, small ones together. Raises CommitError, StaleShard, CorruptShard, OSError."""
        written: list[_WrittenFile] = []
        pending, done, sent = bytearray(), 0, 0
        with contextlib.ExitStack() as stack:
            opened: dict[int, TarBytes] = {}
            for piece in output.pieces:
                if isinstance(piece, CopiedRange):
                    self._flush(fd, pending)
                    if piece.shard not in opened:
                        opened[piece.shard] = stack.enter_context(self._source(piece.shard))
                    self._copy(opened[piece.shard], fd, piece)
                elif isinstance(piece, NewMember):
                    pending += piece.header
                    checksum = self._write_file(fd, piece, pending)
                    written.append(_WrittenFile(done, piece, checksum))
                else:
                    pending += bytes(piece.length)
                done += piece.length
                if done - sent >= COPY_MAX:
                    self.disk.start_writing(fd)
                    sent = done
            self._flush(fd, pending)
        return written

    def _copy(self, source: TarBytes, fd: int, run: CopiedRange) -> None:
        for start in range(run.start, run.end, COPY_MAX):
            count = min(COPY_MAX, run.end - start)
            self.disk.copy(source, fd, start, count)
            self.on_bytes(count)
            if count == COPY_MAX:
                self.disk.start_writing(fd)

    @contextlib.contextmanager
    def _source(self, number: int) -> Iterator[TarBytes]:
        """A source shard, opened; that nothing was written to it is certain only behind the copying."""
        path, fingerprint, _ = self.sources[number]
        with opened_shard(path) as (fd, tar):
            _check_unchanged(fd, path, fingerprint)
            yield tar.source
            _check_unchanged(fd, path, fingerprint)

    def _write_file(self, fd: int, piece: NewMember, pending: bytearray) -> int:
        """Append a file and its padding; returns its CRC-32."""
        checksum = 0
        for data in self._content(piece):
            checksum = zlib.crc32(data, checksum)
            pending += data
            if len(pending) >= CHUNK:
                self._flush(fd, pending)
        pending += bytes(header_encoder.padding(piece.size))
        return checksum

    def _content(self, piece: NewMember) -> Iterator[bytes]:
        """The content of a file, which must be what it was when the commit was planned."""
        source = self.open_file(piece.path)
        try:
            left = piece.size
            while left and (data := os.read(source, min(left, CHUNK))):
                left -= len(data)
                yield data
            found = os.fstat(source)
            if left or (found.st_size, found.st_mtime_ns) != (piece.size, piece.mtime_ns):
                raise CommitError(f"{os.fsdecode(piece.path)} has changed while it was packed; start again")
        finally:
            os.close(source)

    def _flush(self, fd: int, pending: bytearray) -> None:
        if pending:
            self.disk.write(fd, pending)
            self.on_bytes(len(pending))
            pending.clear()

    def _verify(self, fd: int, output: Output, written: Sequence[_WrittenFile]) -> None:
        """See that what is in the file is what was to be in it. Raises CommitError.

        The whole of a copied shard may have its source's damage; there only the length is looked at.
        """
        if os.fstat(fd).st_size != output.length:
            raise _wrong(output, "it has another length")
        if output.layouts is None:
            return
        members = sum(len(one.heads) for one in output.layouts.values())
        if output.length < DENSE * members:
            self._compare(fd, output, written)
        else:
            _scan_back(fd, output, written)
        _read_end(fd, output)

    def _compare(self, fd: int, output: Output, written: Sequence[_WrittenFile]) -> None:
        """Compare everything with what it was made of. Each piece must start with a header, or at the end mark."""
        checksums = {one.head: one.checksum for one in written}
        at = 0
        with contextlib.ExitStack() as stack:
            opened: dict[int, TarBytes] = {}
            for piece in output.pieces:
                if not isinstance(piece, Zeros) and not _may_start(os.pread(fd, header_encoder.BLOCK, at)):
                    raise _wrong(output, f"there is no header at byte {at}")
                if isinstance(piece, CopiedRange):
                    if piece.shard not in opened:
                        opened[piece.shard] = stack.enter_context(self._source(piece.shard))
                    same = _is_same(opened[piece.shard], piece.start, fd, at, piece.length)
                elif isinstance(piece, NewMember):
                    head = piece.header
                    same = os.pread(fd, len(head), at) == head
                    same = same and _checksum(fd, at + len(head), piece.size) == checksums[at]
                else:
                    same = not any(os.pread(fd, piece.length, at))
                if not same:
                    raise _wrong(output, f"the {piece.length} bytes from byte {at} on are others")
                at += piece.length

    # --- what is there already

    def is_there(self, output: Output) -> bool:
        """Whether the target has exactly these bytes already: what a commit that was killed had finished."""
        try:
            fd = os.open(output.target, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        try:
            if os.fstat(fd).st_size != output.length:
                return False
            return all(os.pread(fd, len(data), at) == data for at, data in self._bytes(output))
        finally:
            os.close(fd)

    def _bytes(self, output: Output) -> Iterator[tuple[int, bytes]]:
        """The bytes of an output with their places, some at a time."""
        at = 0
        for piece in output.pieces:
            for data in self._piece_bytes(piece):
                yield at, data
                at += len(data)

    def _piece_bytes(self, piece: Piece) -> Iterator[bytes]:
        if isinstance(piece, CopiedRange):
            with self._source(piece.shard) as fd:
                for start in range(piece.start, piece.end, CHUNK):
                    yield pread(fd, min(CHUNK, piece.end - start), start)
        elif isinstance(piece, NewMember):
            yield piece.header
            yield from self._content(piece)
            yield bytes(header_encoder.padding(piece.size))
        else:
            yield bytes(piece.length)


# --- reading back ------------------------------------------------------------------------------------------


def _is_same(one: TarBytes, start: int, other: int, at: int, length: int) -> bool:
    """Whether two files have the same bytes from these places on."""
    for done in range(0, length, CHUNK):
        count = min(CHUNK, length - done)
        if pread(one, count, start + done) != os.pread(other, count, at + done):
            return False
    return True


def _checksum(fd: int, start: int, size: int) -> int:
    checksum = 0
    for done in range(0, size, CHUNK):
        checksum = zlib.crc32(os.pread(fd, min(CHUNK, size - done), start + done), checksum)
    return checksum


def _may_start(block: bytes) -> bool:
    return scan.is_header(block) or not any(block)


def _scan_back(fd: int, output: Output, written: Sequence[_WrittenFile]) -> None:
    """Read all headers: every member has to be where it belongs, with its size, and there must be no other.

    Of new members name, time and content are compared, too; those of the runs are the kernel's copies.
    """
    layouts = output.layouts or {}
    problems: list[scan.Problem] = []
    heads, sizes = _expected(output, layouts)
    new = {one.head: one for one in written}
    at = 0
    for chunk in scan.scan(fd, problems):
        rows = np.flatnonzero(~np.isin(chunk.types, _NO_FILES))
        stop = at + len(rows)
        same = np.array_equal(chunk.heads[rows], heads[at:stop])
        if not same or not np.array_equal(chunk.sizes[rows], sizes[at:stop]):
            raise _wrong(output, "its members are not where they should be")
        for row in rows[np.isin(chunk.heads[rows], list(new))].tolist() if new else ():
            _verify_new(fd, output, chunk, row, new.pop(int(chunk.heads[row])))
        at = stop
    damage = [problem for problem in problems if problem.kind not in HARMLESS]
    if at != len(heads) or new or damage:
        raise _wrong(output, damage[0].text if damage else "members are missing")


def _expected(output: Output, layouts: Mapping[int, SourceLayout]) -> tuple[Numbers, Numbers]:
    """Where the members of an output begin, and their sizes, in order."""
    heads: list[Any] = [np.zeros(0, np.int64)]
    sizes: list[Any] = [np.zeros(0, np.int64)]
    done = 0
    for piece in output.pieces:
        if isinstance(piece, CopiedRange):
            source = layouts[piece.shard]
            first, last = np.searchsorted(source.heads, [piece.start, piece.end])
            heads.append(source.heads[first:last] + (done - piece.start))
            sizes.append(source.sizes[first:last])
        elif isinstance(piece, NewMember):
            heads.append([done])
            sizes.append([piece.size])
        done += piece.length
    return np.concatenate(heads), np.concatenate(sizes)


def _verify_new(fd: int, output: Output, chunk: scan.Chunk, row: int, wanted: _WrittenFile) -> None:
    piece, at = wanted.piece, int(chunk.datas[row])
    if chunk.names[row] != piece.name or int(chunk.mtimes[row]) != piece.mtime * 10**9:
        raise _wrong(output, f"{os.fsdecode(piece.name)} has another name or time in it")
    if _checksum(fd, at, piece.size) != wanted.checksum:
        raise _wrong(output, f"{os.fsdecode(piece.name)} has other content in it")


def _read_end(fd: int, output: Output) -> None:
    """Read what follows the last member as Python's tarfile does, and so webdataset; others are less strict.

    An extension header that no member follows is an error there, which costs the reader the last sample, too.
    """
    try:
        with open(fd, "rb", closefd=False) as file:
            file.seek(_end_of_members(output))
            with tarfile.open(fileobj=file, mode="r:") as archive:
                while archive.next() is not None:
                    pass
    except (tarfile.TarError, RecursionError) as error:
        raise _wrong(output, f"Python's tarfile, and so webdataset, fails at its end: {error}") from None


def _end_of_members(output: Output) -> int:
    """The byte after the last regular member of an output and its padding."""
    at = output.length
    for piece in reversed(output.pieces):
        if isinstance(piece, NewMember):
            return at
        at -= piece.length
        if isinstance(piece, CopiedRange):
            source = (output.layouts or {})[piece.shard]
            last = int(np.searchsorted(source.heads, piece.end)) - 1
            if last >= 0 and source.heads[last] >= piece.start:
                return at + int(source.ends[last]) - piece.start
    return 0


def _wrong(output: Output, text: str) -> CommitError:
    return CommitError(f"{os.fsdecode(output.target)}: what was written cannot be read back: {text}")
