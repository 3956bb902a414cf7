"""Samples by number: `--index-tree`, a tree of symbolic links beside what another tree shows.

`by-index/000/000/000123 -> ../../../<where sample 123 is>`, numbered as wids counts: from 0, in the order of the
tar within a shard, shards in the order of the set. The first two levels are the millions and the thousands.

Memory does not grow with samples: it holds the sum of the samples up to each shard, and the order of samples in
the last shards that were used. All inode numbers here carry the version of the set: after any change they are
other numbers, which the kernel has nothing cached for. The samples of a shard that cannot be read cannot be
counted. So while there is such a shard, everything here gives EIO: with other numbers a link would lead to another
sample.

Semantics decision: in a set that grows, new samples get further numbers. The numbers of shards that are gone stay
unused: they have no link (ENOENT), and no directory lists them.
"""

from __future__ import annotations

import contextlib
import stat
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsfs import inodes
from wdsfs.errors import (
    InvalidRequest,
    IsADirectory,
    MissingShard,
    NoSuchAttribute,
    NoSuchEntry,
    NotADirectory,
    ShardError,
    StaleEntry,
    UsageError,
)
from wdsfs.index.record import STRAY, Record
from wdsfs.inodes import BY_INDEX, MILLION, NUMBERED, ROOT, SAMPLE, TAG_MAX, THOUSAND, pack_extra, position
from wdsfs.names import text_of
from wdsfs.shards import Shard
from wdsfs.tree.content import Content
from wdsfs.tree.merged_tree import make_tree
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.tree import (
    AT_PARENT,
    DIRECTORY_MODE,
    Entry,
    ListingRun,
    LowerTree,
    Node,
    Totals,
    View,
    folder_path,
    own_entries,
    resolve,
)
from wdsfs.tree.view_content import OWN

NAME = b"by-index"
LOOK_SECONDS = 5.0  # how often all shards are checked without an alarm
ORDERS_MAX = 8  # shards whose order of samples is kept
LINK_MODE, LINK_NAME, PER_DIRECTORY = stat.S_IFLNK | 0o777, b"%06d", 1_000

_TAG_SHIFT = 46  # in the number of an extra: below it is that of a directory or sample
_FIRST = AT_PARENT + 1  # the cursor of the first child
_LAST = inodes.UP  # of `by-index` in the top: after everything that a tree may have there
_TO_TOP = b"../../../"
_TARGET_MAX = 4095  # bytes that the kernel reads of a link
_TOO_LONG = b"the path of this sample is too long for a link"  # leads nowhere


def _link_target(path: bytes) -> bytes:
    """Return the target of the link to a sample at this path.

    Semantics decision: if a target is longer than the kernel reads, a text replaces it. FUSE would give an error,
    and an image would cut the target off.
    """
    target = _TO_TOP + path
    return target if len(target) <= _TARGET_MAX else _TOO_LONG


class _Level(NamedTuple):
    """A kind of directory: the kind of its children, samples in each child, number of children, their names."""

    child: int
    samples: int
    children: int
    name: bytes


_LEVELS = {
    BY_INDEX: _Level(MILLION, 1_000_000, 1 << _TAG_SHIFT, b"%03d"),
    MILLION: _Level(THOUSAND, 1_000, 1_000, b"%03d"),
    THOUSAND: _Level(NUMBERED, 1, PER_DIRECTORY, LINK_NAME),
}
_ABOVE = {MILLION: BY_INDEX, THOUSAND: MILLION, NUMBERED: THOUSAND}


def make_numbered(lower: ShardSet, view: View) -> LowerTree:
    """Return the tree that a mount with these options shows, with links by number if the view has them."""
    tree = make_tree(lower, view)
    return NumberedTree(tree) if view.index_tree else tree


def check_name(shards: Sequence[Shard], view: View) -> None:
    """Raise UsageError if a shard has the name of the directory of links."""
    for shard in shards:
        if view.index_tree and not view.merged and shard.name == NAME:
            raise UsageError(
                f"{text_of(shard.path)}: is shown as {text_of(NAME)}, which is the directory of --index-tree; "
                "rename the shard, or leave out --index-tree"
            )


def sample_order(record: Record) -> Sequence[int] | NDArray[np.uint32]:
    """Return the entries that are samples, in the order of the tar; a range if all are, in this order."""
    entries = record.samples_in_order()
    if len(entries) == record.entries and bool(np.all(entries[1:] > entries[:-1])):
        return range(len(entries))
    return entries.astype(np.uint32)


def view_order(
    record: Record, plain: Record, own: Callable[[int], int | None] = lambda _: None
) -> Sequence[int] | NDArray[np.uint32]:
    """Return the samples of a derived record in the order of the tar; `plain` is its source record.

    A derived record has no offsets, but the same keys. If samples have one key, their members tell them apart:
    `own` returns the number of a member in `plain`. A sample without such a member gets the first free place.
    """
    if isinstance(sample_order(plain), range) and _keeps_order(record):
        return range(record.entries)
    places: dict[bytes, list[tuple[int, int]]] = {}
    keys, own_keys = plain.paths(), record.paths()
    for place, entry in enumerate(sample_order(plain)):
        places.setdefault(keys[entry], []).append((place, int(entry)))

    def place_of(entry: int) -> int:
        among = places[own_keys[entry]]
        if len(among) == 1:
            return among[0][0]
        rows = {own(member) for member in record.entry_members(entry)}
        shared = (place for place in among if not rows.isdisjoint(plain.entry_members(place[1])))
        best = next(shared, among[0])
        among.remove(best)
        return best[0]

    return _samples_by(place_of, record)


def _samples_by(place_of: Callable[[int], int], record: Record) -> NDArray[np.uint32]:
    """Return the samples of a record in the order of their places."""
    entries = np.flatnonzero((record.array("entry.flags") & STRAY) == 0)
    order = np.argsort([place_of(entry) for entry in entries.tolist()], kind="stable")
    return entries[order].astype(np.uint32)


def _keeps_order(record: Record) -> bool:
    """Return True if a derived record has only samples, which begin with ascending members of the shard itself."""
    assert record.view is not None
    firsts = record.array("member.head")[record.array("entry.member")[:-1]].astype(np.int64)
    own = not len(firsts) or int(firsts.max()) >> record.view["shift"] == OWN
    return own and not (record.array("entry.flags") & STRAY).any() and bool(np.all(firsts[1:] > firsts[:-1]))


def class_order(record: Record, plain: Record, own: Callable[[int], int | None]) -> NDArray[np.uint32]:
    """Return the order, as `view_order`, for a record whose samples are in folders of classes, with other keys."""
    places = {int(entry): place for place, entry in enumerate(sample_order(plain))}

    def place_of(entry: int) -> int:
        rows = (own(member) for member in record.entry_members(entry))
        first = next((row for row in rows if row is not None), None)
        return len(places) if first is None else places[plain.entry_of(first)]

    return _samples_by(place_of, record)


def samples_of(
    lower: ShardSet, shard: int, tag: int | None = None, *, in_classes: bool = False
) -> Sequence[int] | NDArray[np.uint32]:
    """Return the entries of a shard that are samples, in the order of the tar.

    `tag` names the content of the shard. `in_classes`: the samples are in the folders of their classes. Raises as
    `ShardSet.record`; StaleShard if the shard changes meanwhile.
    """
    if tag is None:
        lower.fingerprint(shard)  # a look, if the last one was a while ago
        tag = lower.tag(shard)
    record, plain = lower.record_and_plain(shard, tag)
    if record is plain:
        return sample_order(record)
    return (class_order if in_classes else view_order)(record, plain, partial(_own_member, lower, shard, tag))


def _own_member(lower: ShardSet, shard: int, tag: int, member: int) -> int | None:
    """Return the number that a member of a view has in the shard itself, if it is from there."""
    origin = lower.origin(shard, member, tag)
    return origin[2] if origin is not None and origin[:2] == (lower.plain, shard) else None


class NumberedTree:
    """`tree`, with the links in its top. Raises the errors of `tree`.

    If the tree itself has a name `by-index`, that name is shown, and the links cannot be reached.
    """

    def __init__(self, tree: LowerTree) -> None:
        self.tree = tree
        self.lower, self.view, self.merged = tree.lower, tree.view, tree.merged
        self.domain, self.files_layout = tree.domain, tree.files_layout
        self.directory_mode, self.file_mode = tree.directory_mode, tree.file_mode
        self._generation, self._tag = -1, 0
        self._ends: NDArray[np.int64] = np.zeros(0, np.int64)
        self._last_look, self._heard = -LOOK_SECONDS, -1
        self._orders: OrderedDict[int, Sequence[int] | NDArray[np.uint32]] = OrderedDict()
        self._folder: tuple[int, bytes] = ROOT, b""  # the last directory whose path was computed, and that path

    def prepare(self) -> None:
        self.tree.prepare()

    def close(self, clean: bool) -> None:
        self.tree.close(clean)

    def make_writable(self, umask: int = 0) -> None:
        """Change nothing: links cannot be written."""
        self.tree.make_writable(umask)
        self.directory_mode, self.file_mode = self.tree.directory_mode, self.tree.file_mode

    # --- the samples of the set

    def _load(self) -> None:
        """Count again if a shard has changed. Every public method about links calls this first."""
        now = time.monotonic()
        if self.lower.generations.alarms != self._heard or now - self._last_look > LOOK_SECONDS:
            self._heard = self.lower.generations.alarms
            self.lower.look_at_all()
            self._last_look = now
        if self._generation != self.lower.generation:
            self._count()

    def _count(self) -> None:
        self._ends = np.cumsum([self._count_in(number) for number in range(len(self.lower))], dtype=np.int64)
        self._tag = self.lower.version() + self.lower.generations.edition & TAG_MAX
        self._orders.clear()
        self._folder = ROOT, b""
        self._generation = self.lower.generation

    def _count_in(self, number: int) -> int:
        """Count the numbers that a shard takes."""
        samples = self.lower.samples_of(number)
        if self._is_shown(number) and self.lower.summary(number).problems:
            self.lower.record(number)  # raises an error if the view was refused: its samples cannot be counted
        return samples

    def _is_shown(self, shard: int) -> bool:
        """Return True if a shard is in the set, and is not about to be removed."""
        if shard in self.lower.out:
            return False
        if self.lower.generations.followed:
            try:
                self.lower.fingerprint(shard)
            except MissingShard:
                return False
        return True

    def _sample(self, number: int) -> tuple[int, int]:
        """Return shard and inode of the sample with this number. Raises NoSuchEntry for an unused number."""
        shard = int(np.searchsorted(self._ends, number, "right"))
        if not self._is_shown(shard):
            raise NoSuchEntry(f"sample {number} does not exist any more: its shard has left the set")
        order = self._orders.get(shard)
        if order is None:
            order = self._orders[shard] = samples_of(self.lower, shard)
            if len(self._orders) > ORDERS_MAX:
                self._orders.popitem(last=False)
        self.lower.record(shard)
        if self.lower.generation != self._generation:
            self._orders.clear()
            raise StaleEntry("a shard has changed since its samples were counted")
        entry = int(order[number - int(self._ends[shard - 1] if shard else 0)])
        return shard, inodes.pack(self.lower.tag(shard), shard, position(SAMPLE, entry))

    def _target(self, number: int) -> tuple[int, bytes]:
        """Return the shard of a sample, and where its link leads."""
        shard, inode = self._sample(number)
        parent, name = self.tree.places(inode)[0]
        if self._folder[0] != parent:
            self._folder = parent, folder_path(self.tree, parent)
        return shard, _link_target(self._folder[1] + name)

    # --- the directories of links

    def _count_of(self, samples: int) -> int:
        """Count the directories of this number of samples each."""
        total = int(self._ends[-1]) if len(self._ends) else 0
        return -(-total // samples)

    def _inode(self, what: int, number: int = 0) -> int:
        return pack_extra(what, self._tag << _TAG_SHIFT | number)

    def _below(self, what: int, number: int) -> range:
        """Return the numbers of the children of a directory."""
        level = _LEVELS[what]
        first = number * level.children
        return range(first, min(first + level.children, self._count_of(level.samples)))

    def _kind_and_number(self, inode: int) -> tuple[int, int]:
        """Return kind and number of an inode among the links; kind 0 for others. Raises StaleEntry."""
        what, number = inodes.unpack_extra(inode)
        if not BY_INDEX <= what <= NUMBERED:
            return 0, 0
        self._load()
        tag, number = number >> _TAG_SHIFT, number & (1 << _TAG_SHIFT) - 1
        if self._is_stale(tag):  # another process may have seen a change that this one has not looked for yet
            self.lower.look_at_all()
            self._load()
        known = number == 0 if what == BY_INDEX else number < self._count_of(_LEVELS[_ABOVE[what]].samples)
        if self._is_stale(tag) or not known:
            raise StaleEntry(f"no inode {inode}")
        return what, number

    def _is_stale(self, tag: int) -> bool:
        """Return True for the tag of a set with other numbers. Added and removed shards change no number."""
        return self._tag - tag & TAG_MAX > self.lower.generations.edition

    def _node_of(self, what: int, number: int) -> Node:
        inode = self._inode(what, number)
        if what == BY_INDEX:
            return self._top()
        if what == NUMBERED:
            shard, target = self._target(number)
            return Node(inode, LINK_MODE, 1, len(target), self.lower.fingerprint(shard).mtime_ns)
        links = 2 + (0 if what == THOUSAND else len(self._below(what, number)))
        return Node(inode, DIRECTORY_MODE, links, 0, self.tree.getattr(ROOT).mtime_ns)

    def _top(self) -> Node:
        """Return the directory of links. It exists even while it cannot be listed."""
        links = 1
        with contextlib.suppress(ShardError):
            self._load()
            links = 2 + len(self._below(BY_INDEX, 0))
        return Node(self._inode(BY_INDEX), DIRECTORY_MODE, links, 0, self.tree.getattr(ROOT).mtime_ns)

    def _has_top(self) -> bool:
        """Return True if the top shows the links, because the tree has no such name."""
        try:
            self.tree.lookup(ROOT, NAME)
        except NoSuchEntry:
            return True
        return False

    # --- the tree

    def lookup(self, parent: int, name: bytes) -> Node:
        what, number = self._kind_and_number(parent)
        if not what:
            if parent == ROOT and name == NAME and self._has_top():
                return self._top()
            return self.tree.lookup(parent, name)
        if what == NUMBERED:
            raise NotADirectory(f"{text_of(name)!r}: its parent is a link")
        level, children = _LEVELS[what], self._below(what, number)
        if name.isdigit() and len(name) < 20:
            child = int(name) + (children.start if what == MILLION else 0)
            if child in children and self._name(level, child) == name:
                return self._node_of(level.child, child)
        raise NoSuchEntry(f"no {text_of(name)!r} among the numbers of {len(self._ends)} shards")

    def resolve(self, path: bytes) -> Node:
        return resolve(self, path)

    @staticmethod
    def _name(level: _Level, child: int) -> bytes:
        return level.name % (child % 1000 if level.child == THOUSAND else child)

    def getattr(self, inode: int) -> Node:
        what, number = self._kind_and_number(inode)
        if what:
            return self._node_of(what, number)
        node = self.tree.getattr(inode)
        if inode == ROOT and node.links > 1 and self._has_top():  # one link: the subdirectories are not counted
            return node._replace(links=node.links + 1)
        return node

    def readlink(self, inode: int) -> bytes:
        what, number = self._kind_and_number(inode)
        if not what:
            return self.tree.readlink(inode)
        if what != NUMBERED:
            raise InvalidRequest(f"inode {inode} is no symbolic link")
        return self._target(number)[1]

    def parent(self, inode: int) -> int:
        what, number = self._kind_and_number(inode)
        if not what:
            return self.tree.parent(inode)
        if what == BY_INDEX:
            return ROOT
        above = _ABOVE[what]
        return self._inode(above, 0 if above == BY_INDEX else number // _LEVELS[above].children)

    def places(self, inode: int) -> list[tuple[int, bytes]]:
        what, number = self._kind_and_number(inode)
        if not what:
            return self.tree.places(inode)
        name = NAME if what == BY_INDEX else self._name(_LEVELS[_ABOVE[what]], number)
        return [(self.parent(inode), name)]

    def open_directory(self, inode: int) -> None:
        what, _ = self._kind_and_number(inode)
        if not what:
            self.tree.open_directory(inode)
        elif what == NUMBERED:
            raise NotADirectory(f"inode {inode} is a link")

    def listing(self, inode: int, after: int = 0) -> Iterator[Entry]:
        what, number = self._kind_and_number(inode)
        if not what:
            if after != _LAST:
                yield from self.tree.listing(inode, after)
            if inode == ROOT and after != _LAST and self._has_top():
                yield Entry(NAME, self._top(), _LAST)
            return
        if what == NUMBERED:
            raise NotADirectory(f"inode {inode} is a link")
        yield from own_entries(self, inode, after)
        level, children = _LEVELS[what], self._below(what, number)
        for child in children[max(after - _FIRST + 1, 0) :]:
            cursor = child - children.start + _FIRST
            try:
                node = self._node_of(level.child, child)
            except NoSuchEntry:  # an unused number
                continue
            yield Entry(self._name(level, child), node, cursor)

    def run(self, inode: int, after: int, most: int) -> ListingRun | None:
        return None if inodes.unpack_extra(inode)[0] else self.tree.run(inode, after, most)

    def content(self, inode: int) -> Content:
        if self._kind_and_number(inode)[0]:
            raise IsADirectory(f"inode {inode} is a directory or a link")
        return self.tree.content(inode)

    def xattrs(self, inode: int) -> list[bytes]:
        return [] if self._kind_and_number(inode)[0] else self.tree.xattrs(inode)

    def getxattr(self, inode: int, name: bytes) -> bytes:
        if self._kind_and_number(inode)[0]:
            raise NoSuchAttribute(f"no attribute {text_of(name)}")
        return self.tree.getxattr(inode, name)

    def totals(self) -> Totals:
        return self.tree.totals()
