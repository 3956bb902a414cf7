"""Turns a table into the bytes of a part of an image: inodes, then the blocks of large directories and of content
that is stored.

A directory is blocks of names in order, each block with its entries (12 bytes each) in front of their names. One
that fits into the block of its inode lies there, inline; so do short contents. These cross no block, so some files
may lie in front of their directory. All work is on whole columns.
"""

from __future__ import annotations

import stat
from bisect import bisect_left
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsfs.errors import ImageError
from wdsfs.kernel import erofs, erofs_columns
from wdsfs.kernel.erofs import BLOCK, DIRENT_SIZE, SLOT, SLOTS_PER_BLOCK
from wdsfs.kernel.erofs_columns import Times
from wdsfs.kernel.table import Chunks, Table, resolved
from wdsfs.tree.texts import Ints, Texts

_WORDS_MAX = 8  # of eight bytes: longer names are sorted one directory at a time
_PER_SLOT = SLOT // 4  # words
_DOTS = np.frombuffer(b"..", np.uint8)


class Part(NamedTuple):
    """Bytes to be written at the block where the part begins, and the inode numbers of the objects."""

    data: NDArray[np.uint8]
    nids: Ints


class Names(NamedTuple):
    """All entries of a table, also the two that every directory has, by directory and name."""

    holder: Ints
    child: Ints
    kind: Ints
    text: Texts


def lay_out(table: Table, first_block: int, metadata: int, times: Times, owner: tuple[int, int]) -> Part:
    """Lay a table out at the block `first_block` of the image, whose metadata begins at the block `metadata`.

    Raises ImageError.
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
    address = plan.addresses(first_block)
    if first_block + plan.blocks > erofs.BLOCKS_MAX:
        raise ImageError("the image would have more than 2 TiB; make several images")
    inodes = erofs_columns.Inodes(
        extended=extended,
        content=plan.content,
        mode=table.mode,
        links=table.links,
        size=size,
        address=address,
        number=nids,
        mtime_ns=table.mtime_ns,
        owner=owner,
    )
    words = np.zeros(plan.blocks * BLOCK // 4, np.uint32)
    _put_rows(words, plan.slot[~extended] * _PER_SLOT, inodes.compact(times.epoch_ns // 10**9))
    _put_rows(words, plan.slot[extended] * _PER_SLOT, inodes.long())
    tails = plan.slot * SLOT + plan.inode_size  # bytes from the start of the part
    plain = np.flatnonzero(plan.one_chunk)
    _put_rows(words, tails[plain] // 4, erofs_columns.chunk_words(table.device[plain], table.block[plain]))
    data = words.view(np.uint8)
    for number, chunks in table.chunks.items():
        _put_chunks(data, chunks, int(tails[number]), int(plan.place[number]), first_block)
    places = np.where(plan.place < 0, tails, plan.place)
    stored, contents = table.stored
    contents.copy_to(data, places[stored])
    listings.write(words, places[listings.objects], resolved(names.child, nids))
    return Part(data, nids)


def lay_out_directories(
    table: Table, nids: Ints, first_block: int, owner: tuple[int, int]
) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """The inodes, as rows of words, and the blocks of directories that have the inode numbers `nids`: the objects
    of a table that has no others.

    The inodes have the long form; the blocks are for the place `first_block`.
    """
    names = sorted_names(table)
    listings = _Listings(names)
    ends = np.cumsum(erofs_columns.blocks_of_all(listings.size))
    begins = ends - erofs_columns.blocks_of_all(listings.size)
    inodes = erofs_columns.Inodes(
        extended=np.ones(len(nids), bool),
        content=np.full(len(nids), erofs.PLAIN, np.int64),
        mode=table.mode,
        links=table.links,
        size=listings.size,
        address=first_block + begins,
        number=nids,
        mtime_ns=table.mtime_ns,
        owner=owner,
    )
    words = np.zeros(int(ends[-1]) * BLOCK // 4, np.uint32)
    listings.write(words, begins * BLOCK, resolved(names.child, nids))
    return inodes.long(), words.view(np.uint8)


def _put_rows(words: NDArray[np.uint32], places: Ints, rows: NDArray[np.uint32]) -> None:
    """Copy rows of words to these places (words)."""
    for column in range(rows.shape[1]):
        words[places + column] = rows[:, column]


def _put_chunks(data: NDArray[np.uint8], chunks: Chunks, tail: int, place: int, first_block: int) -> None:
    device, block = chunks.device.copy(), chunks.block.copy()
    if chunks.stored:
        device[-1], block[-1] = 0, first_block + place // BLOCK
        _put_bytes(data, chunks.stored, place)
    _put_bytes(data, erofs_columns.chunk_words(device, block).tobytes(), tail)


def _put_bytes(data: NDArray[np.uint8], raw: bytes, place: int) -> None:
    data[place : place + len(raw)] = np.frombuffer(raw, np.uint8)


class _Plan:
    """Where everything of a table lies in its part: `slot` of each inode, `place` (bytes) of content that has
    blocks of its own, else -1; `blocks` of the part."""

    def __init__(
        self,
        table: Table,
        size: Ints,
        extended: NDArray[np.bool_],
        is_directory: NDArray[np.bool_],
    ) -> None:
        self.inode_size = np.where(extended, erofs.EXTENDED_SIZE, erofs.COMPACT_SIZE)
        stored = is_directory.copy()
        tail = np.full(len(size), erofs.CHUNK_SIZE, np.int64)
        self._bits = erofs_columns.chunk_bits(size)
        self.one_chunk = ~is_directory
        last = np.zeros(len(size), np.int64)  # bytes of last chunks that are stored
        for number, chunks in table.chunks.items():
            tail[number], self._bits[number] = len(chunks.block) * erofs.CHUNK_SIZE, chunks.bits
            last[number] = len(chunks.stored)
        self.one_chunk[[*table.chunks]] = False
        self.one_chunk[table.stored.objects] = False
        stored[table.stored.objects] = True
        if len(size) and int(self._bits.max()) > erofs.CHUNK_BITS_MAX:
            raise ImageError("a member has more than 1 TiB, which EROFS does not take")
        inside = stored & (size <= BLOCK - self.inode_size)
        tail[stored] = np.where(inside, size, 0)[stored]
        self.content = np.where(stored, np.where(inside, erofs.INLINE, erofs.PLAIN), erofs.CHUNKS)
        slots = -(-(self.inode_size + tail) // SLOT)
        self.slot = places(slots, inside)
        used = int((self.slot + slots).max()) if len(slots) else 0
        outside = stored & ~inside
        blocks = erofs_columns.blocks_of_all(np.where(outside, size, last))
        ends = -(-used // SLOTS_PER_BLOCK) + np.cumsum(blocks)
        self.place = np.where(blocks > 0, (ends - blocks) * BLOCK, -1)
        self.blocks = int(ends[-1]) if len(ends) else 0

    def addresses(self, first_block: int) -> Ints:
        """What the inodes say of the place of their content."""
        of_blocks = np.where(self.place < 0, erofs.NO_BLOCK, first_block + self.place // BLOCK)
        return np.where(self.content == erofs.CHUNKS, self._bits, of_blocks)


def places(slots: Ints, whole: NDArray[np.bool_]) -> Ints:
    """The slots at which things of so many slots lie, one behind the other. What is `whole` crosses no block.

    One that would has as many of those behind it go first as fill the block: a directory some of its files. Where
    these do not do, a gap is left.
    """
    row = _Row(slots, whole)
    first, gaps = row.arranged()
    moved = first > 0
    one, last = row.at[moved], (row.at + first)[moved]
    shifts = np.append(gaps, 0)
    shifts[one + 1] -= slots[one]
    shifts[last + 1] += slots[one]
    found = row.ends - slots + np.cumsum(shifts[:-1])
    found[one] += row.ends[last] - row.ends[one]
    return np.asarray(found)


class _Row:
    """Things of so many slots each; `at` are those that are whole, `ends` is where each would end without gaps."""

    def __init__(self, slots: Ints, whole: NDArray[np.bool_]) -> None:
        self.ends, self.at = np.cumsum(slots), np.flatnonzero(whole)
        self._count, self._stop = slots[self.at], np.append(self.at, len(slots))[1:]
        self._found: dict[int, tuple[Ints, list[int]]] = {}

    def arranged(self) -> tuple[Ints, Ints]:
        """How many of those behind it go first, for each that is whole; the slots of the gap in front of each."""
        first, gaps = np.zeros(len(self.at), np.int64), np.zeros(len(self.ends), np.int64)
        done = padding = 0
        while done < len(self.at):  # a round for each gap, as this shifts all that follow
            phase = padding % SLOTS_PER_BLOCK
            if phase not in self._found:
                self._found[phase] = self._going_first(phase)
            found, impossible = self._found[phase]
            nth = bisect_left(impossible, done)
            end = impossible[nth] if nth < len(impossible) else len(self.at)
            first[done:end] = found[done:end]
            if end < len(self.at):
                at = self.at[end]
                gaps[at] = -(self.ends[at] - self._count[end] + padding) % SLOTS_PER_BLOCK
                padding += int(gaps[at])
            done = end + 1
        return first, gaps

    def _going_first(self, phase: int) -> tuple[Ints, list[int]]:
        """How many go first, for each that is whole, if all lie `phase` slots later; and which take a gap."""
        at, ends, count = self.at, self.ends, self._count
        within = (ends[at] - count + phase) % SLOTS_PER_BLOCK
        found = np.where(within + count > SLOTS_PER_BLOCK, -1, 0)
        left, nth = np.flatnonzero(found), 1
        while len(left := left[at[left] + nth < self._stop[left]]):
            ahead = ends[at[left] + nth] - ends[at[left]]
            fits = (within[left] + ahead) % SLOTS_PER_BLOCK + count[left] <= SLOTS_PER_BLOCK
            found[left[fits]] = nth
            left, nth = left[~fits], nth + 1
        return np.maximum(found, 0), np.flatnonzero(found < 0).tolist()


# --- names in order ----------------------------------------------------------------------------------------


def sorted_names(table: Table) -> Names:
    """The entries of a table and the two dots of each directory, sorted as EROFS has them: by bytes."""
    objects = np.flatnonzero(table.mode & 0o170000 == stat.S_IFDIR)
    count = len(objects)
    dots = Texts(_DOTS, np.zeros(2 * count, np.int64), np.repeat([1, 2], count))
    text = Texts.joined([table.names, dots])
    holder = np.concatenate([table.holder, objects, objects])
    order = _sorting(text, holder, len(table.mode))
    return Names(
        holder[order],
        np.concatenate([table.child, objects, table.parent])[order],
        np.concatenate([table.kind, np.full(2 * count, erofs.DIRECTORY, np.int64)])[order],
        text.take(order),
    )


def _sorting(names: Texts, holder: Ints, objects: int) -> Ints:
    """The order of entries by directory, an object of so many, then by name."""
    longest = np.zeros(objects, np.int64)
    np.maximum.at(longest, holder, names.lengths)
    words = -(-longest[holder] // 8)  # all names of a directory are compared by as many
    found = np.empty(len(holder), np.int64)
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
        found[first[own] + nth] = ordered
    return found


def _name_words(names: Texts, count: int) -> NDArray[np.uint64]:
    """Names of up to `count` times eight bytes as numbers that compare as the names do. Names have no NUL."""
    text, start, length = names
    padded = np.concatenate([text, np.zeros(8 * count + 8, np.uint8)])
    words = np.ndarray((len(padded) - 7,), ">u8", padded, strides=(1,))  # the eight bytes from each on
    found = np.empty((len(start), count), np.uint64)
    for nth in range(count):
        beyond = np.clip(64 - 8 * (length - 8 * nth), 0, 64).astype(np.uint64)  # bits that belong to the next name
        kept = words[start + 8 * nth].astype(np.uint64) >> np.minimum(beyond, 63) << np.minimum(beyond, 63)
        found[:, nth] = np.where(beyond == 64, 0, kept)
    return found


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
        total = ends[last] - begins[first]
        large = np.flatnonzero(total > BLOCK)
        starts, sizes = [first], total.copy()
        for one in large.tolist():
            begin = _split(ends, int(first[one]), int(last[one]) + 1)
            sizes[one] = (len(begin) - 1) * BLOCK + int(ends[last[one]] - begins[begin[-1]])
            starts.append(np.array(begin[1:], np.int64))
        self.size = sizes
        # A block, or a listing that is shorter than one: its first entry, its entries, its place in the directory.
        self._start = np.sort(np.concatenate(starts))
        self._count = np.diff(np.append(self._start, len(holder)))
        first_of_all = np.searchsorted(self._start, first)
        blocks = np.diff(np.append(first_of_all, len(self._start)))
        self._owner = np.repeat(np.arange(len(first)), blocks)
        self._nth = np.arange(len(self._start)) - first_of_all[self._owner]

    def write(self, words: NDArray[np.uint32], places: Ints, nids: Ints) -> None:
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
    """The first entries of the blocks of a directory; `ends` are running sums of the bytes of all entries."""
    found = []
    while first < stop:
        found.append(first)
        limit = (int(ends[first - 1]) if first else 0) + BLOCK
        first = int(ends.searchsorted(limit, "right"))
    return found
