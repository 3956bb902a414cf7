"""Encodes tables of objects and names as EROFS bytes: inodes, directories, stored content, and their places.

All work is on whole columns. A directory is a list of blocks. A block has entries (12 bytes each), then the names
of these entries, all in order. If a directory or a content fits into the block of its inode, it lies there,
inline. An inline part crosses no block, so some files may lie before their directory.

*Objects* are directories, files and symbolic links, numbered in the order in which they lie in the image.
*Entries* are names in directories. A *reference* to an object is its number, or `placed(nid)` for an object that
is in the image already.
"""

from __future__ import annotations

import stat
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from wdsfs.errors import ImageError
from wdsfs.kernel import erofs_header
from wdsfs.kernel.erofs_header import BLOCK, CHUNKS, DIRENT_SIZE, SLOT, SLOTS_PER_BLOCK
from wdsfs.tree.texts import Ints, Texts

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32]
Marks = NDArray[np.bool_]
Reference = TypeVar("Reference", int, Ints)

_WORDS_MAX = 8  # of eight bytes: longer names are sorted one directory at a time
_PER_SLOT = SLOT // 4  # words
_LOW = 0xFFFFFFFF  # the low word
_DOTS = np.frombuffer(b"..", np.uint8)


def placed(nid: Reference) -> Reference:
    """Return the reference to an object (or several) whose inode number in the image is known."""
    return ~nid


def resolved(references: Ints, nids: Ints) -> Ints:
    """Return the inode numbers of references; `nids` are the inode numbers of the objects."""
    return np.where(references < 0, ~references, nids[np.maximum(references, 0)])


class Chunks(NamedTuple):
    """Content in several chunks of `BLOCK << bits` bytes: the number of the device and the block of each.

    `stored`, if there is any, are the bytes of the last one, which is in the image itself.
    """

    bits: int
    device: Ints
    block: Ints
    stored: bytes = b""


class Stored(NamedTuple):
    """Content that is in the image itself: of these objects, the bytes of each."""

    objects: Ints
    contents: Texts


NOTHING_STORED = Stored(np.zeros(0, np.int64), Texts.of([]))


@dataclass(slots=True)
class Table:
    """A part of a tree in columns.

    Columns of objects: `mode` is type and permission bits, `size` in bytes (that of a directory is computed when
    it is laid out), `device` and `block` are where a file of one chunk begins. `chunks` and `stored` have the
    content of others.

    Columns of entries: `holder` is the directory, an object of this table; `child` a reference; `kind` the type as
    EROFS counts them; `names`, without the two dots that every directory has. `parent` is a reference for each
    directory, in their order.
    """

    mode: Ints
    links: Ints
    size: Ints
    mtime_ns: Ints
    device: Ints
    block: Ints
    parent: Ints
    holder: Ints
    child: Ints
    kind: Ints
    names: Texts
    chunks: dict[int, Chunks] = field(default_factory=dict)
    stored: Stored = NOTHING_STORED


class Outside(NamedTuple):
    """Names in directories that are objects of no table.

    Columns: the inode numbers of the directory and of the named object, its type as EROFS counts them, the name.
    """

    holders: Ints
    nids: Ints
    kinds: Ints
    names: Texts

    def take(self, rows: NDArray[Any]) -> Outside:
        """Return these rows."""
        return Outside(self.holders[rows], self.nids[rows], self.kinds[rows], self.names.take(rows))

    @staticmethod
    def joined(parts: Sequence[Outside]) -> Outside:
        """Return all of these, in their order."""
        holders, nids, kinds, names = zip(*parts, strict=True)
        return Outside(np.concatenate(holders), np.concatenate(nids), np.concatenate(kinds), Texts.joined(names))

    @staticmethod
    def directories(holders: Sequence[int], nids: Sequence[int], names: Sequence[bytes]) -> Outside:
        """Return the names of directories in others."""
        kinds = np.full(len(names), erofs_header.DIRECTORY_ENTRY, np.int64)
        return Outside(np.array(holders, np.int64), np.array(nids, np.int64), kinds, Texts.of(names))


# --- inodes and indexes of chunks, encoded by columns


class Times:
    """The times that a compact inode can have.

    Before Linux 6.15 this is only the time of the super block. Since then it is any whole second from that time
    on.
    """

    def __init__(self, common_ns: int, since: tuple[int, int]) -> None:
        self.own = since >= erofs_header.OWN_TIMES_KERNEL
        self.epoch_ns = 0 if self.own else common_ns

    def fit(self, mtime_ns: Ints) -> Marks:
        """Return True where a compact inode tells the time exactly."""
        if not self.own:
            return np.asarray(mtime_ns == self.epoch_ns)
        return np.asarray((mtime_ns >= 0) & (mtime_ns % 10**9 == 0) & (mtime_ns < 10**9 << 32))


def blocks_of_all(sizes: Ints) -> Ints:
    """Return the numbers of blocks for a column of sizes, as `erofs_header.blocks_of` for one."""
    return -(-sizes // BLOCK)


def chunk_bits(sizes: Ints) -> Ints:
    """Return, for files of one chunk, the number of doublings of a block that cover the file."""
    blocks = np.maximum(blocks_of_all(sizes), 1)
    return np.frexp((blocks - 1).astype(np.float64))[1].astype(np.int64)


def chunk_words(device: Ints, block: Ints) -> Words:
    """Return the indexes of chunks: an array of two words for each."""
    words = np.empty((len(block), 2), np.uint32)
    words[:, 0] = device << 16
    words[:, 1] = block
    return words


def inode_words(
    table: Table,
    size: Ints,
    nids: Ints,
    extended: Marks,
    content: Ints,
    address: Ints,
    owner: Sequence[int],
    epoch: int,
) -> tuple[Words, Words]:
    """Return the inodes of a table: the short ones, eight words each, and the long ones, sixteen words each.

    `size` is in bytes, `extended` says which have the long form, `content` is PLAIN, INLINE or CHUNKS, `address`
    the first block or the bits of the chunks. Times of short inodes count from `epoch` (seconds).
    """
    form = extended.astype(np.int64) | content << 1
    address = np.where(content == CHUNKS, address | erofs_header.WITH_INDEXES, address)
    seconds, nanoseconds = np.divmod(table.mtime_ns, 10**9)
    both = (owner[0] | owner[1] << 16) & _LOW
    short = _rows(
        *(~extended, erofs_header.COMPACT_SIZE),
        *(form, table.mode | table.links << 16, size, seconds - epoch, address, nids & _LOW, both),
    )
    long = _rows(
        *(extended, erofs_header.EXTENDED_SIZE),
        *(form, table.mode, size & _LOW, size >> 32, address, nids & _LOW, owner[0], owner[1]),
        *(seconds & _LOW, seconds >> 32 & _LOW, nanoseconds, table.links),
    )
    return short, long


def _rows(at: Marks, size: int, *columns: Ints | int) -> Words:
    """Return columns as rows of `size` bytes, where `at` is set."""
    words = np.zeros((int(at.sum()), size // 4), np.uint32)
    for number, column in enumerate(columns):
        words[:, number] = column if isinstance(column, int) else column[at]
    return words


# --- a part of an image


def lay_out(
    table: Table, first_block: int, metadata: int, times: Times, owner: tuple[int, int]
) -> tuple[Bytes, Ints]:
    """Lay a table out at the block `first_block` of the image, whose metadata begins at the block `metadata`.

    Returns the bytes from that block on, and the inode numbers of the objects. Raises ImageError.
    """
    names = sorted_names(table)
    listings = _Listings(names)
    is_directory = np.zeros(len(table.mode), bool)
    is_directory[listings.objects] = True
    size = table.size.copy()
    size[listings.objects] = listings.size
    extended = ~times.fit(table.mtime_ns) | (size > 0xFFFFFFFF) | (table.links > 0xFFFF) | (max(owner) > 0xFFFF)
    plan = _Plan(table, size, extended, is_directory)
    nids = (first_block - metadata) * SLOTS_PER_BLOCK + plan.slot
    if first_block + plan.blocks > erofs_header.BLOCKS_MAX:
        raise ImageError("the image would have more than 2 TiB; make several images")
    epoch, addresses = times.epoch_ns // 10**9, plan.addresses(first_block)
    short, long = inode_words(table, size, nids, extended, plan.content, addresses, owner, epoch)
    words = np.zeros(plan.blocks * BLOCK // 4, np.uint32)
    _put_rows(words, plan.slot[~extended] * _PER_SLOT, short)
    _put_rows(words, plan.slot[extended] * _PER_SLOT, long)
    tails = plan.slot * SLOT + plan.inode_size  # bytes from the start of the part
    plain = np.flatnonzero(plan.one_chunk)
    _put_rows(words, tails[plain] // 4, chunk_words(table.device[plain], table.block[plain]))
    data = words.view(np.uint8)
    for number, chunks in table.chunks.items():
        _put_chunks(data, chunks, int(tails[number]), int(plan.place[number]), first_block)
    places = np.where(plan.place < 0, tails, plan.place)
    objects, contents = table.stored
    contents.copy_to(data, places[objects])
    listings.write(words, places[listings.objects], resolved(names.child, nids))
    return data, nids


def lay_out_directories(table: Table, nids: Ints, first_block: int, owner: tuple[int, int]) -> tuple[Words, Bytes]:
    """Return the inodes, as rows of words, and the blocks of directories that have the inode numbers `nids`.

    All objects of the table are directories. The inodes have the long form; the blocks are for the place
    `first_block`.
    """
    names = sorted_names(table)
    listings = _Listings(names)
    ends = np.cumsum(blocks_of_all(listings.size))
    begins = ends - blocks_of_all(listings.size)
    extended, content = np.ones(len(nids), bool), np.full(len(nids), erofs_header.PLAIN, np.int64)
    _, inodes = inode_words(table, listings.size, nids, extended, content, first_block + begins, owner, 0)
    words = np.zeros(int(ends[-1]) * BLOCK // 4, np.uint32)
    listings.write(words, begins * BLOCK, resolved(names.child, nids))
    return inodes, words.view(np.uint8)


def _put_rows(words: Words, places: Ints, rows: Words) -> None:
    """Copy rows of words to these places (words)."""
    for column in range(rows.shape[1]):
        words[places + column] = rows[:, column]


def _put_chunks(data: Bytes, chunks: Chunks, tail: int, place: int, first_block: int) -> None:
    device, block = chunks.device.copy(), chunks.block.copy()
    if chunks.stored:
        device[-1], block[-1] = 0, first_block + place // BLOCK
        _put_bytes(data, chunks.stored, place)
    _put_bytes(data, chunk_words(device, block).tobytes(), tail)


def _put_bytes(data: Bytes, raw: bytes, place: int) -> None:
    data[place : place + len(raw)] = np.frombuffer(raw, np.uint8)


class _Plan:
    """The places in the part of a table.

    `slot` is that of each inode, `place` (bytes) that of content that has blocks of its own, else -1; `blocks` is
    the size of the part.
    """

    def __init__(self, table: Table, size: Ints, extended: Marks, is_directory: Marks) -> None:
        self.inode_size = np.where(extended, erofs_header.EXTENDED_SIZE, erofs_header.COMPACT_SIZE)
        stored = is_directory.copy()
        tail = np.full(len(size), erofs_header.CHUNK_SIZE, np.int64)
        self._bits = chunk_bits(size)
        self.one_chunk = ~is_directory
        last = np.zeros(len(size), np.int64)  # bytes of last chunks that are stored
        for number, chunks in table.chunks.items():
            tail[number], self._bits[number] = len(chunks.block) * erofs_header.CHUNK_SIZE, chunks.bits
            last[number] = len(chunks.stored)
        self.one_chunk[[*table.chunks]] = False
        self.one_chunk[table.stored.objects] = False
        stored[table.stored.objects] = True
        if len(size) and int(self._bits.max()) > erofs_header.CHUNK_BITS_MAX:
            raise ImageError("a member has more than 1 TiB, which EROFS does not take; mount by FUSE")
        inside = stored & (size <= BLOCK - self.inode_size)
        tail[stored] = np.where(inside, size, 0)[stored]
        self.content = np.where(stored, np.where(inside, erofs_header.INLINE, erofs_header.PLAIN), CHUNKS)
        slots = -(-(self.inode_size + tail) // SLOT)
        self.slot = first_slots(slots, inside)
        used = int((self.slot + slots).max()) if len(slots) else 0
        blocks = blocks_of_all(np.where(stored & ~inside, size, last))
        ends = -(-used // SLOTS_PER_BLOCK) + np.cumsum(blocks)
        self.place = np.where(blocks > 0, (ends - blocks) * BLOCK, -1)
        self.blocks = int(ends[-1]) if len(ends) else 0

    def addresses(self, first_block: int) -> Ints:
        """Return the field of each inode that says where its content is."""
        of_blocks = np.where(self.place < 0, erofs_header.NO_BLOCK, first_block + self.place // BLOCK)
        return np.where(self.content == CHUNKS, self._bits, of_blocks)


def first_slots(slots: Ints, whole: Marks) -> Ints:
    """Return the first slots of consecutive objects with these counts of slots. `whole` objects cross no block.

    If a whole object would cross the end of a block, the next objects are placed before it until the block is full
    (for a directory, some of its files). If they do not fill the block, a gap is left. The work is in columns, for
    all objects of a shard at once. The tests have the same for one object after the other, which is easier to
    read.
    """
    row = _Row(slots, whole)
    first, gaps = row.arranged()
    moved = first > 0
    begin, last = row.at[moved], (row.at + first)[moved]
    shifts = np.append(gaps, 0)
    shifts[begin + 1] -= slots[begin]
    shifts[last + 1] += slots[begin]
    arranged = row.ends - slots + np.cumsum(shifts[:-1])
    arranged[begin] += row.ends[last] - row.ends[begin]
    return np.asarray(arranged)


class _Row:
    """Objects with counts of slots; `at` are the whole ones, `ends` is where each would end without gaps."""

    def __init__(self, slots: Ints, whole: Marks) -> None:
        self.ends, self.at = np.cumsum(slots), np.flatnonzero(whole)
        self._count, self._stop = slots[self.at], np.append(self.at, len(slots))[1:]
        self._by_phase: dict[int, tuple[Ints, list[int]]] = {}

    def arranged(self) -> tuple[Ints, Ints]:
        """Return for each whole object the number of following objects that are placed before it, and all gaps."""
        first, gaps = np.zeros(len(self.at), np.int64), np.zeros(len(self.ends), np.int64)
        done = padding = 0
        while done < len(self.at):  # a round for each gap, as this shifts all that follow
            phase = padding % SLOTS_PER_BLOCK
            if phase not in self._by_phase:
                self._by_phase[phase] = self._going_first(phase)
            counts, impossible = self._by_phase[phase]
            nth = bisect_left(impossible, done)
            end = impossible[nth] if nth < len(impossible) else len(self.at)
            first[done:end] = counts[done:end]
            if end < len(self.at):
                at = self.at[end]
                gaps[at] = -(self.ends[at] - self._count[end] + padding) % SLOTS_PER_BLOCK
                padding += int(gaps[at])
            done = end + 1
        return first, gaps

    def _going_first(self, phase: int) -> tuple[Ints, list[int]]:
        """Return the same numbers if all objects lie `phase` slots later, and the objects with a gap."""
        at, ends, count = self.at, self.ends, self._count
        within = (ends[at] - count + phase) % SLOTS_PER_BLOCK
        counts = np.where(within + count > SLOTS_PER_BLOCK, -1, 0)
        left, nth = np.flatnonzero(counts), 1
        while len(left := left[at[left] + nth < self._stop[left]]):
            ahead = ends[at[left] + nth] - ends[at[left]]
            fits = (within[left] + ahead) % SLOTS_PER_BLOCK + count[left] <= SLOTS_PER_BLOCK
            counts[left[fits]] = nth
            left, nth = left[~fits], nth + 1
        return np.maximum(counts, 0), np.flatnonzero(counts < 0).tolist()


# --- names in order


class Names(NamedTuple):
    """All entries of a table, also the two dots that every directory has, by directory and name."""

    holder: Ints
    child: Ints
    kind: Ints
    text: Texts


def sorted_names(table: Table) -> Names:
    """Return the entries of a table and the two dots of each directory, sorted as EROFS has them: by bytes."""
    objects = np.flatnonzero(table.mode & 0o170000 == stat.S_IFDIR)
    count = len(objects)
    dots = Texts(_DOTS, np.zeros(2 * count, np.int64), np.repeat([1, 2], count))
    text = Texts.joined([table.names, dots])
    holder = np.concatenate([table.holder, objects, objects])
    order = _sorting(text, holder, len(table.mode))
    return Names(
        holder[order],
        np.concatenate([table.child, objects, table.parent])[order],
        np.concatenate([table.kind, np.full(2 * count, erofs_header.DIRECTORY_ENTRY, np.int64)])[order],
        text.take(order),
    )


def _sorting(names: Texts, holder: Ints, objects: int) -> Ints:
    """Return the order of entries by directory, which is one of `objects` objects, then by name."""
    longest = np.zeros(objects, np.int64)
    np.maximum.at(longest, holder, names.lengths)
    words = -(-longest[holder] // 8)  # all names of a directory are compared by the same number of words
    sorting = np.empty(len(holder), np.int64)
    first = np.concatenate([[0], np.cumsum(np.bincount(holder, minlength=objects))])
    for count in np.unique(words).tolist():
        rows = np.flatnonzero(words == count)
        if count <= _WORDS_MAX:
            keys = _name_words(names.take(rows), count)
            ordered = rows[np.lexsort([*keys.T[::-1], holder[rows]])]
        else:
            named = zip(holder[rows].tolist(), names.take(rows).to_list(), rows.tolist(), strict=True)
            ordered = np.array([row for *_, row in sorted(named)])
        # Directories keep their place among all: where its first entry belongs, and its number among its own.
        own = holder[ordered]
        begins = np.flatnonzero(np.diff(own, prepend=-1))
        nth = np.arange(len(own)) - np.repeat(begins, np.diff(np.append(begins, len(own))))
        sorting[first[own] + nth] = ordered
    return sorting


def _name_words(names: Texts, count: int) -> NDArray[np.uint64]:
    """Return names of up to `count` times eight bytes as numbers that compare as the names do.

    Names have no NUL.
    """
    text, start, length = names
    padded = np.concatenate([text, np.zeros(8 * count + 8, np.uint8)])
    words = np.ndarray((len(padded) - 7,), ">u8", padded, strides=(1,))  # the eight bytes from each on
    keys = np.empty((len(start), count), np.uint64)
    for nth in range(count):
        beyond = np.clip(64 - 8 * (length - 8 * nth), 0, 64).astype(np.uint64)  # bits that belong to the next name
        own = words[start + 8 * nth].astype(np.uint64) >> np.minimum(beyond, 63) << np.minimum(beyond, 63)
        keys[:, nth] = np.where(beyond == 64, 0, own)
    return keys


class _Listings:
    """The directories of a table as blocks: which entries are in which block, and where in it.

    `objects` are the directories, `size` their sizes (bytes).
    """

    def __init__(self, names: Names) -> None:
        self._names = names
        holder, need = names.holder, names.text.lengths + DIRENT_SIZE
        first = np.flatnonzero(np.diff(holder, prepend=-1))
        ends = np.cumsum(need)
        begins = ends - need
        last = np.append(first, len(holder))[1:] - 1
        self.objects = holder[first]
        self.size = ends[last] - begins[first]
        starts = [first]
        for large in np.flatnonzero(self.size > BLOCK).tolist():
            begin = _split(ends, int(first[large]), int(last[large]) + 1)
            self.size[large] = (len(begin) - 1) * BLOCK + int(ends[last[large]] - begins[begin[-1]])
            starts.append(np.array(begin[1:], np.int64))
        # A block, or a listing that is shorter than one: its first entry, its entries, its place in the directory.
        self._start = np.sort(np.concatenate(starts))
        self._count = np.diff(np.append(self._start, len(holder)))
        first_of_all = np.searchsorted(self._start, first)
        blocks = np.diff(np.append(first_of_all, len(self._start)))
        self._owner = np.repeat(np.arange(len(first)), blocks)
        self._nth = np.arange(len(self._start)) - first_of_all[self._owner]

    def write(self, words: Words, places: Ints, nids: Ints) -> None:
        """Write all directories: `places` are their first bytes, `nids` the inode numbers of the entries."""
        names, data = self._names, words.view(np.uint8)
        block = np.repeat(np.arange(len(self._start)), self._count)
        base = (places[self._owner] + self._nth * BLOCK)[block]
        within = np.arange(len(block)) - self._start[block]
        ends = np.cumsum(names.text.lengths)
        before = ends - names.text.lengths
        offset = self._count[block] * DIRENT_SIZE + before - before[self._start][block]
        at = (base + within * DIRENT_SIZE) // 4
        words[at], words[at + 1] = nids & 0xFFFFFFFF, nids >> 32
        words[at + 2] = offset | names.kind << 16
        names.text.copy_to(data, base + offset)


def _split(ends: Ints, first: int, stop: int) -> list[int]:
    """Return the first entries of the blocks of a directory.

    `ends` are running sums of the bytes of all entries.
    """
    begins = []
    while first < stop:
        begins.append(first)
        limit = (int(ends[first - 1]) if first else 0) + BLOCK
        first = int(ends.searchsorted(limit, "right"))
    return begins
