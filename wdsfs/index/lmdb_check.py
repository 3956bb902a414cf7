"""Checks that the pages of an LMDB file are consistent.

LMDB trusts its file: a damaged page can make it crash, hang, or hand out a page that is in use. Its format has no
checksums. So before an index is used, this checks all that LMDB would follow blindly: the two meta pages, every
branch and leaf page with the place of each node and the order of the keys, and the extents of large values. The
lists of free pages must not name a page in use. The values have checksums of their own, and are not checked here.

Knows the file format of LMDB 0.9 on 64-bit machines (mdb.c: MDB_page, MDB_node, MDB_meta) as far as one plain
database needs it. Others may write to the file meanwhile: the pages that belong to a snapshot stay as they are
while a transaction holds it. Takes milliseconds for a thousand shards: whole levels of a tree are checked
together, and values are not read.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

KEY_MAX = 64  # bytes of a key; keys of the index have 17
LEVELS_MAX = 32  # levels of a tree; LMDB's own limit
SPARE_PAGES = 1 << 20  # pages past the end of the file that may count as given out: a bound on nonsense
AT_ONCE = 4096  # pages that are checked together

_PAGE_HEADER = 16  # page number (8 bytes), pad (2), flags (2), end of the slots (2), start of the nodes (2)
_NODE = 8  # size (4; of a branch's node the child, 6), flags (2), bytes of the key (2); the key; the value
_BRANCH, _LEAF, _OVERFLOW, _META = 1, 2, 4, 8  # flags of a page
_BIG = 1  # flag of a node: its value is elsewhere, its data the number of the first page
_INTEGER_KEYS = 8  # flag of a tree; the tree of free pages has it, the other tree has none
_NONE = (1 << 64) - 1
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_META_PAGE = struct.Struct("=QHHHHIIQQ" + 2 * "IHHQQQQQ" + "QQ")

Numbers = NDArray[np.int64]


class Damaged(Exception):
    """LMDB must not open the file; the text says what is wrong with it."""


class BTree(NamedTuple):
    """A tree as a meta page describes it."""

    pad: int
    flags: int
    depth: int
    branches: int
    leaves: int
    overflows: int
    entries: int
    root: int


class Meta(NamedTuple):
    """A meta page: the two trees, the last page that was given out, the transaction that wrote this."""

    free: BTree
    main: BTree
    last: int
    transaction: int

    @property
    def page_size(self) -> int:
        """The size of a page in bytes."""
        return self.free.pad


def check_metas(fd: int) -> None:
    """Check what LMDB uses while it opens the file. Raises Damaged."""
    for _ in range(3):  # another process may be writing one of them just now
        try:
            first = _read_meta(fd, 0, None)
            _read_meta(fd, 1, first.page_size)
            return
        except Damaged as error:
            problem = error
    raise problem


def check(fd: int, transaction: int) -> bool:
    """Check all pages of the snapshot of `transaction`, which the caller holds. Raises Damaged.

    Returns False if its meta page is gone: two later transactions have been committed in the meantime.
    """
    meta = _read_meta(fd, transaction % 2, _read_meta(fd, 0, None).page_size)
    if meta.transaction != transaction:
        return False
    checker = _Checker(fd, meta)
    checker.walk(meta.main, free=False)
    checker.walk(meta.free, free=True)
    checker.compare()
    return True


def check_extent(value: memoryview, small: memoryview, page_size: int) -> None:
    """Check the header in front of a value of LMDB's before that is replaced. Raises Damaged.

    A large value's header says which pages LMDB frees with it. `check` leaves it out, because it lies with the
    value, and reading a page of each value would take long. `small` is another value, in a page of a tree: its
    address shows where in memory the file begins.
    """
    address, known = _address(value), _address(small)
    if address % page_size == _PAGE_HEADER:
        tree_page = int.from_bytes(ctypes.string_at(known - known % page_size, 8), sys.byteorder)
        number = address // page_size - known // page_size + tree_page
        count = (_PAGE_HEADER - 1 + len(value)) // page_size + 1
        if not _is_extent(ctypes.string_at(address - _PAGE_HEADER, _PAGE_HEADER), number, count):
            raise Damaged("the header of a value makes no sense")


def _address(value: memoryview) -> int:
    return int(np.frombuffer(value, np.uint8).__array_interface__["data"][0])


def _is_extent(header: bytes, number: int, count: int) -> bool:
    stored, _, flags, pages = struct.unpack("=QHHI", header)
    return (stored, flags, pages) == (number, _OVERFLOW, count)


def _read_meta(fd: int, number: int, page_size: int | None) -> Meta:
    raw = os.pread(fd, _META_PAGE.size, number * (page_size or 0))
    if len(raw) < _META_PAGE.size:
        raise Damaged("it is cut off")
    page, _, flags, _, _, magic, version, address, _, *rest = _META_PAGE.unpack(raw)
    meta = Meta(BTree(*rest[:8]), BTree(*rest[8:16]), *rest[16:])
    size = meta.page_size
    sound = (
        (page, flags, magic, version, address) == (number, _META, _MAGIC, _VERSION, 0)
        and (meta.free.flags, meta.main.flags, meta.main.pad) == (_INTEGER_KEYS, 0, 0)
        and size == (page_size or size)
        and size.bit_count() == 1
        and 512 <= size <= 1 << 15
        and meta.transaction % 2 == (number if meta.transaction else 0)
        and 1 <= meta.last <= 2 * (os.fstat(fd).st_size // size) + SPARE_PAGES
    )
    if not sound:
        raise Damaged(f"its meta page {number} makes no sense")
    return meta


class _Nodes(NamedTuple):
    """The nodes of some pages of one level, in order."""

    branch: bool
    words: NDArray[np.uint16]  # of all these pages
    starts: Numbers  # number of each page's first node, and at the end the number of nodes
    at: Numbers  # offset of each from the start of `words`, in bytes
    key_sizes: Numbers
    sizes: Numbers  # of leaves: bytes of the value
    targets: Numbers  # of branches: the child; of leaves: where a big value begins, 0 for a small one


class _Checker:
    def __init__(self, fd: int, meta: Meta) -> None:
        self.fd, self.meta, self.page_size = fd, meta, meta.page_size
        self.size = os.fstat(fd).st_size
        self.used = np.zeros(meta.last + 1, dtype=np.uint8)
        # What the extents of large values add to the number of users, page by page.
        self.steps = np.zeros(meta.last + 2, dtype=np.int64)
        self.free: list[NDArray[np.uint64]] = []

    def walk(self, tree: BTree, free: bool) -> None:
        """Check all levels of a tree, from the root down; then the keys, from the leaves up."""
        if tree.root == _NONE:
            _require(tree[2:7] == (0, 0, 0, 0, 0), "an empty tree is not empty")
            return
        _require(1 <= tree.depth <= LEVELS_MAX and tree.root <= self.meta.last, "a tree has no root")
        numbers = np.array([tree.root], dtype=np.int64)
        levels: list[tuple[NDArray[Any], Numbers]] = []
        branches = overflows = 0
        for height in range(tree.depth - 1, -1, -1):
            keys, starts, targets = [], [0], []
            for block in self._blocks(numbers, _BRANCH if height else _LEAF, free):
                keys.append(_keys(block, free))
                starts += (starts[-1] + block.starts[1:]).tolist()
                if height:
                    targets.append(block.targets)
                else:
                    overflows += self._values(block, free)
            levels.append((np.concatenate(keys), np.array(starts)))
            if height:
                branches += len(numbers)
                numbers = np.concatenate(targets)
        entries = len(levels[-1][0])
        counted = (branches, len(numbers), overflows, entries)
        _require(counted == tree[3:7], "a tree has other pages than it should")
        _check_order(levels)

    def _blocks(self, numbers: Numbers, kind: int, free: bool) -> Iterator[_Nodes]:
        """Check the pages of one level, a part at a time."""
        self._use(numbers)
        for start in range(0, len(numbers), AT_ONCE):
            block = numbers[start : start + AT_ONCE]
            yield self._nodes(block, kind, least=2 if kind == _BRANCH and not free else 1)

    def _use(self, numbers: Numbers) -> None:
        inside = bool(((numbers >= 2) & (numbers <= self.meta.last)).all())
        _require(inside, "a page does not exist")
        unique = bool((np.diff(np.sort(numbers)) > 0).all())  # np.unique imports numpy.ma, 15 ms for each command
        _require(unique and not self.used[numbers].any(), "a page is in two places")
        self.used[numbers] = 1

    def _nodes(self, numbers: Numbers, kind: int, least: int) -> _Nodes:
        size = self.page_size
        raw = b"".join(os.pread(self.fd, size, number * size) for number in numbers.tolist())
        _require(len(raw) == size * len(numbers), "it is cut off")
        words = np.frombuffer(raw, np.uint16)
        heads = words.reshape(len(numbers), size // 2)[:, :8]
        flags, lower, upper = (heads[:, word].astype(np.int64) for word in (5, 6, 7))
        sound = heads[:, :4].copy().view(np.uint64).ravel() == numbers.astype(np.uint64)
        sound &= (flags == kind) & (lower % 2 == 0) & (upper <= size)
        sound &= (lower >= _PAGE_HEADER + 2 * least) & (lower <= upper)
        _require(bool(sound.all()), "the header of a page makes no sense")

        counts = (lower - _PAGE_HEADER) // 2
        starts = np.concatenate(([0], np.cumsum(counts)))
        rows = np.repeat(np.arange(len(numbers)), counts)
        slots = rows * (size // 2) + _PAGE_HEADER // 2 + np.arange(starts[-1]) - starts[rows]
        offsets = words[slots].astype(np.int64)
        inside = (offsets % 2 == 0) & (offsets >= upper[rows]) & (offsets + _NODE <= size)
        _require(bool(inside.all()), "a node is not inside its page")
        at = rows * size + offsets
        low, high, node_flags, key_sizes = (words[at // 2 + word].astype(np.int64) for word in range(4))
        sizes, targets = low | high << 16, np.zeros_like(at)
        if kind == _BRANCH:
            targets, stored = sizes | node_flags << 32, 0 * sizes
        else:
            _require(bool((node_flags <= _BIG).all()), "a node is of an unknown kind")
            stored = np.where(node_flags == _BIG, 8, sizes)
        ends = offsets + (_NODE + key_sizes + stored + 1) // 2 * 2
        _check_tiles(rows, starts, offsets, ends, upper, size)
        if kind == _LEAF:
            big = np.flatnonzero(node_flags == _BIG)
            targets[big] = _gather(words, at[big] + _NODE + key_sizes[big], 8).view(np.int64).ravel()
            _require(bool((targets[big] > 0).all()), "a page does not exist")
        return _Nodes(kind == _BRANCH, words, starts, at, key_sizes, sizes, targets)

    def _values(self, leaves: _Nodes, free: bool) -> int:
        """Check where the values of these leaves lie; return how many pages the large ones have."""
        big = np.flatnonzero(leaves.targets)
        first, counts = leaves.targets[big], (_PAGE_HEADER - 1 + leaves.sizes[big]) // self.page_size + 1
        beyond = self.size // self.page_size
        inside = (first >= 2) & (first <= self.meta.last) & (first + counts <= min(self.meta.last + 1, beyond))
        _require(bool(inside.all()), "a value is not inside the file")
        np.add.at(self.steps, first, 1)
        np.add.at(self.steps, first + counts, -1)
        if free:
            keys = _keys(leaves, free)
            sound = (keys >= 1) & (keys <= np.uint64(self.meta.transaction))
            _require(bool(sound.all()), "a list of free pages is from the future")
            self.free += [self._free_list(leaves, node) for node in range(len(leaves.at))]
        return int(counts.sum())

    def _free_list(self, leaves: _Nodes, node: int) -> NDArray[np.uint64]:
        size, first = int(leaves.sizes[node]), int(leaves.targets[node])
        if first:
            raw = os.pread(self.fd, _PAGE_HEADER + size, first * self.page_size)
            count = (_PAGE_HEADER - 1 + size) // self.page_size + 1
            _require(_is_extent(raw[:_PAGE_HEADER], first, count), "a list of free pages makes no sense")
            raw = raw[_PAGE_HEADER:]
        else:
            start = int(leaves.at[node] + _NODE + leaves.key_sizes[node])
            raw = leaves.words.view(np.uint8)[start : start + size].tobytes()
        _require(len(raw) == size and size >= 8 and size % 8 == 0, "a list of free pages makes no sense")
        count, pages = int(np.frombuffer(raw, np.uint64)[0]), np.frombuffer(raw, np.uint64)[1:]
        falling = bool((pages[1:] < pages[:-1]).all())
        _require(count == len(pages) and falling, "a list of free pages makes no sense")
        _require(not count or (pages[-1] >= 2 and pages[0] <= self.meta.last), "a free page does not exist")
        return pages

    def compare(self) -> None:
        """Check that no page has two users, and that no free page has one."""
        users = np.cumsum(self.steps[:-1]) + self.used
        for pages in self.free:
            users[pages.astype(np.int64)] += 1
        _require(bool((users <= 1).all()), "a page is in two places")


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise Damaged(text)


def _check_tiles(
    rows: Numbers, starts: Numbers, begins: Numbers, ends: Numbers, upper: Numbers, size: int
) -> None:
    """Check that the nodes of a page fill its end without a gap: LMDB moves them by their sizes."""
    order = np.lexsort((begins, rows))
    begins, ends = begins[order], ends[order]
    sound = bool((begins[starts[:-1]] == upper).all() and (ends[starts[1:] - 1] == size).all())
    same_page = rows[1:] == rows[:-1]
    _require(sound and bool((ends[:-1] == begins[1:])[same_page].all()), "the nodes of a page overlap")


def _gather(words: NDArray[np.uint16], starts: Numbers, width: int) -> NDArray[np.uint8]:
    """Return `width` bytes from each of these places, fewer repeated at the very end."""
    data = words.view(np.uint8)
    return np.take(data, starts[:, None] + np.arange(width), mode="clip")


def _keys(nodes: _Nodes, free: bool) -> NDArray[Any]:
    """Return the keys in a form that sorts as LMDB does.

    The first of a branch page has no meaning, and may be empty.
    """
    width = max(int(nodes.key_sizes.max()), 1)
    _require(width <= KEY_MAX, "a key is too long")
    if free:
        has_key = np.ones(len(nodes.at), dtype=bool)
        has_key[nodes.starts[:-1]] = not nodes.branch
        _require(bool((nodes.key_sizes[has_key] == 8).all()), "a list of free pages makes no sense")
        return _gather(nodes.words, nodes.at + _NODE, 8).view(np.uint64).ravel()
    keys = _gather(nodes.words, nodes.at + _NODE, width)
    keys[np.arange(width) >= nodes.key_sizes[:, None]] = 0
    return keys.view(f"S{width}").ravel()


def _check_order(levels: list[tuple[NDArray[Any], Numbers]]) -> None:
    """Check that keys ascend, and that those of a branch separate its children."""
    keys, starts = levels[-1]
    _require(bool((keys[1:] > keys[:-1]).all()), "its keys are out of order")
    first, last = keys[starts[:-1]], keys[starts[1:] - 1]
    for keys, starts in reversed(levels[:-1]):
        between = np.ones(len(keys), dtype=bool)
        between[starts[:-1]] = False  # the first key of a branch has no meaning
        inner = np.flatnonzero(between)
        sound = (last[inner - 1] < keys[inner]) & (keys[inner] <= first[inner])
        _require(bool(sound.all()), "its keys are out of order")
        first, last = first[starts[:-1]], last[starts[1:] - 1]
