"""The set as the pages ask for it: samples by number and by path, their files, where they come from.

One lock protects the set and its records, which are for one thread at a time; questions under it read the index
and no shard. The bytes of files are read outside of the lock, so a slow shard delays only the requests for its
bytes. Nothing is kept for each sample: the numbers of the samples of a shard are in its record, and the order of
the last few shards is remembered.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from wdsfs import inodes
from wdsfs import names as naming
from wdsfs.dataset import content as content_module
from wdsfs.dataset.content import Content
from wdsfs.dataset.indexing import indexed
from wdsfs.dataset.numbered_tree import class_order, sample_order, view_order
from wdsfs.dataset.shard_set import ShardSet
from wdsfs.dataset.tree import AT_PARENT, LowerTree, Node
from wdsfs.errors import NoSuchEntry, ShardError, StaleShard, WdsfsError
from wdsfs.index.record import STRAY, Record
from wdsfs.inodes import MEMBER, ROOT, position
from wdsfs.tar.member_reader import read_name

ORDERS_MAX = 8  # shards whose order of samples is kept
FILES_MAX = 1000  # files of one sample that a page lists
FOLDERS_MAX = 1000  # directories in a directory that are offered

Answer = TypeVar("Answer")
Order = Sequence[int] | NDArray[np.uint32]


class Sample(NamedTuple):
    """A sample of the shards: its number in the set, its shard, its entry there, the path of its directory.

    Of its files: `columns` as they are called in the tar, `names` as they are shown, and sizes (bytes).
    """

    number: int
    shard: int
    entry: int
    path: bytes
    columns: tuple[bytes, ...]
    names: tuple[bytes, ...]
    sizes: tuple[int, ...]


class File(NamedTuple):
    """A file in the directory of a sample: name, size (bytes), time (ns)."""

    name: bytes
    size: int
    mtime_ns: int


class Origin(NamedTuple):
    """Where a file comes from; `offset` is None for one that is no member of a shard."""

    shard: bytes
    member: bytes
    key: bytes
    offset: int | None


class MemberSource:
    """The bytes of a file of the shards, as `previews.preview.Source`."""

    def __init__(self, library: Library, path: bytes, content: Content) -> None:
        self._library, self._path, self._content, self.size = library, path, content, content.size
        # Identifies the content; None for one that is in no shard in this form.
        self.key = (
            None if content.held is not None else (content.file.path, content.file.fingerprint, content.data)
        )

    def read(self, offset: int, length: int) -> bytes:
        """These bytes, fewer only at the end. Raises ShardErrors."""
        with self._library.lock:
            if self._content.file.ended:  # closed meanwhile, for others that were opened
                self._content = self._library.content_again(self._path, self._content)
        with self._library.holding(self._content):
            return content_module.read(self._content, offset, length)


class Library:
    """A tree of shards, samples in directories, for threads. The caller closes the tree.

    `in_classes`: the directories of samples are in those of their classes.
    """

    def __init__(self, tree: LowerTree, in_classes: bool = False) -> None:
        self.tree, self.lower, self.in_classes = tree, tree.lower, in_classes
        self.lock = threading.RLock()
        self.renewals = 0  # how often it was given another set
        self._depth = 0  # questions within questions, of the thread that has the lock
        self._ends: list[int] = []
        self._generation = -1
        self._orders: OrderedDict[int, Order] = OrderedDict()

    @contextlib.contextmanager
    def asking(self) -> Iterator[ShardSet]:
        """Ask the set: hold the lock, with the numbers as they are now."""
        with self.lock:
            if not self._depth:  # no record is in use
                self.lower.tidy()
                if self._generation != self.lower.generation:
                    self._count()
            self._depth += 1
            try:
                yield self.lower
            finally:
                self._depth -= 1

    @property
    def version(self) -> tuple[int, int]:
        """Another one whenever numbers may stand for other samples."""
        return self.renewals, self.lower.generation

    def renew(self, tree: LowerTree) -> None:
        """Show another set from now on, over the same index. With the lock, and not within a question."""
        assert not self._depth
        old, self.tree, self.lower = self.lower, tree, tree.lower
        self.renewals += 1
        self._generation = -1
        old.release()  # a file that is being read is closed after that

    def _count(self) -> None:
        counts = []
        for number in range(len(self.lower)):
            try:
                counts.append(indexed(self.lower.summary, number).samples)
            except ShardError:
                counts.append(0)  # the page of problems lists it
        self._ends = list(itertools.accumulate(counts))
        self._orders.clear()
        self._generation = self.lower.generation

    @contextlib.contextmanager
    def holding(self, content: Content) -> Iterator[None]:
        """Keep the file of a content open while it is read, without the lock."""
        with self.lock:
            content.file.hold()
        try:
            yield
        finally:
            with self.lock:
                content.file.let_go()

    # --- samples

    @property
    def total(self) -> int:
        """How many samples the set has."""
        with self.asking():
            return self._ends[-1] if self._ends else 0

    @property
    def shard_names(self) -> list[bytes]:
        """The names of the shards, in the order of the set."""
        return [shard.name for shard in self.lower.shards]

    def first_of(self, shard: int) -> int:
        """The number of the first sample of a shard."""
        with self.asking():
            return self._ends[shard - 1] if shard else 0

    def shard_of(self, number: int) -> int:
        """The shard of the sample with this number; the number of shards if there is no such sample."""
        with self.asking():
            return bisect.bisect_right(self._ends, number)

    def order(self, shard: int) -> Order:
        """The samples of a shard (entries of its record), in the order of the tar. Raises ShardErrors."""
        with self.asking() as lower:
            found = self._orders.get(shard)
            if found is None:
                found = self._orders[shard] = indexed(self._make_order, lower, shard)
                if len(self._orders) > ORDERS_MAX:
                    self._orders.popitem(last=False)
            return found

    def _make_order(self, lower: ShardSet, shard: int) -> Order:
        record = lower.record(shard)
        if lower.plain is lower:
            return sample_order(record)
        plain = lower.plain.record(shard)

        def own(member: int) -> int | None:
            origin = lower.origin(shard, member)
            return origin[2] if origin is not None and origin[:2] == (lower.plain, shard) else None

        return (class_order if self.in_classes else view_order)(record, plain, own)

    def sample(self, number: int) -> Sample:
        """The sample with this number. Raises NoSuchEntry, ShardErrors."""
        return self.samples([number])[0]

    def samples(self, numbers: Sequence[int]) -> list[Sample]:
        """The samples with these numbers, in this order. Raises NoSuchEntry, ShardErrors."""
        with self.asking():
            return [indexed(self._sample, number) for number in numbers]

    def _sample(self, number: int) -> Sample:
        shard = bisect.bisect_right(self._ends, number)
        if number < 0 or shard >= len(self._ends):
            total = self._ends[-1] if self._ends else 0
            raise NoSuchEntry(f"there is no sample {number:,}; the set has {total:,}")
        at = number - (self._ends[shard - 1] if shard else 0)
        return self._sample_at(number, shard, int(self.order(shard)[at]))

    def _sample_at(self, number: int, shard: int, entry: int) -> Sample:
        record = self.lower.record(shard)
        members = record.entry_members(entry)
        columns = tuple(record.extension(member) for member in members)
        names = tuple(self._place(shard, member)[1] for member in members)
        sizes = tuple(record.size_and_time(member)[0] for member in members)
        return Sample(number, shard, entry, self._path(shard, members[0]), columns, names, sizes)

    def _place(self, shard: int, member: int) -> tuple[int, bytes]:
        """The directory that shows a member, by its inode, and the name there."""
        return self.tree.places(inodes.pack(self.lower.tag(shard), shard, position(MEMBER, member)))[0]

    def _path(self, shard: int, member: int) -> bytes:
        """The path of the directory that shows a member."""
        inode, _ = self._place(shard, member)
        parts = []
        while inode != ROOT:
            inode, name = self.tree.places(inode)[0]
            parts.append(name)
        return b"/".join(reversed(parts))

    def number_at(self, path: bytes) -> int | None:
        """The number of the sample whose directory this is; None if it is no sample, or in no shard."""
        with self.asking():
            try:
                node = indexed(self.tree.resolve, path)
            except WdsfsError:
                return None
            if not stat.S_ISDIR(node.mode) or node.inode == ROOT:
                return None
            first = next((one.node for one in self.tree.listing(node.inode, AT_PARENT)), None)
            if first is None or not stat.S_ISREG(first.mode):
                return None
            return self._number_of(first.inode)

    def has(self, path: bytes) -> bool:
        """True if the shards have something at a path, or may have it in a shard that cannot be read."""
        with self.asking():
            try:
                indexed(self.tree.resolve, path)
            except NoSuchEntry:
                return False
            except WdsfsError:
                return True
            return True

    def _number_of(self, inode: int) -> int | None:
        _, shard, where = inodes.unpack(inode)
        record = self.lower.record(shard)
        return self.number_of(shard, record.entry_of(inodes.index_of(where)))

    def number_of(self, shard: int, entry: int) -> int | None:
        """The number in the set of an entry of a shard; None if it is no sample."""
        with self.asking():
            order = self.order(shard)
            found = np.flatnonzero(np.asarray(order) == entry) if not isinstance(order, range) else [entry]
            return self.first_of(shard) + int(found[0]) if len(found) else None

    def sample_at_offset(self, shard: int, offset: int) -> bytes | None:
        """The path of the sample of a member, by the offset of the member's first header in its shard."""
        with self.asking() as lower:
            record = indexed(lower.record, shard)
            if record.view is not None or not record.members:
                return None
            found = np.flatnonzero(record.array("member.head") == offset // 512)
            if not len(found):
                return None
            member = int(found[0])
            stray = record.entry_flags[record.entry_of(member)] & STRAY
            return None if stray else self._path(shard, member)

    def record(self, shard: int, question: Callable[[Record], Answer]) -> Answer:
        """Call `question` with the record of a shard, under the lock. Raises ShardErrors."""
        with self.asking() as lower:
            return question(indexed(lower.record, shard))

    # --- files

    def files(self, path: bytes) -> list[File]:
        """The files in the directory of a sample. Raises EntryError, ShardErrors."""
        with self.asking():
            node = indexed(self.tree.resolve, path)
            entries = itertools.islice(self.tree.listing(node.inode, AT_PARENT), FILES_MAX)
            return [
                File(one.name, one.node.size, one.node.mtime_ns) for one in entries if stat.S_ISREG(one.node.mode)
            ]

    def folders(self, path: bytes) -> list[bytes]:
        """The names of the first FOLDERS_MAX directories in a directory. Raises EntryError."""
        with self.asking():
            node = indexed(self.tree.resolve, path)
            entries = itertools.islice(self.tree.listing(node.inode, AT_PARENT), FOLDERS_MAX)
            return [one.name for one in entries if stat.S_ISDIR(one.node.mode)]

    def source(self, path: bytes) -> MemberSource:
        """The bytes of a file. Raises EntryError, ShardErrors."""
        with self.asking():
            return MemberSource(self, path, indexed(self._content, path))

    def content_again(self, path: bytes, before: Content) -> Content:
        """The content of a file whose shard was closed. Raises StaleShard if it is another one by now."""
        with self.asking():
            found = indexed(self._content, path)
            same = found.file.fingerprint, found.data, found.size
            if same != (before.file.fingerprint, before.data, before.size):
                raise StaleShard(f"{os.fsdecode(before.file.path)} has changed since this was opened")
            return found

    def _content(self, path: bytes) -> Content:
        node = self.tree.resolve(path)
        if not stat.S_ISREG(node.mode):
            raise NoSuchEntry("only files can be read here")
        return self.tree.content(node.inode)

    def node(self, path: bytes) -> Node:
        """The node at a path. Raises EntryError, ShardErrors."""
        with self.asking():
            return indexed(self.tree.resolve, path)

    def origin(self, path: bytes) -> Origin:
        """Where a file comes from. Reads its header, without the lock. Raises EntryError, ShardErrors."""
        with self.asking() as lower:
            content = indexed(self._content, path)
            _, number, where = inodes.unpack(indexed(self.tree.resolve, path).inode)
            found = indexed(lower.origin, number, inodes.index_of(where))
            if found is None:
                return Origin(content.file.path, path.rpartition(b"/")[2], b"", None)
            below, number, member = found
            place = indexed(below.record, number).member(member)
            content = indexed(below.content, number, below.tag(number), member)
            shard = below.shards[number].path
        with self.holding(content):
            raw = read_name(content.file.source, place.head)
            content_module.check_unchanged(content)
        split = naming.split(raw)
        key = b"" if split is None else raw[: len(raw) - len(split.extension) - 1]
        return Origin(shard, raw, key, place.data)
