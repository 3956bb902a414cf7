"""The set that the pages show, of shards or of a live mount: opens it, renews that of a mount, takes snapshots.

Of a writable mount the pages show the shards, without the changes of the overlay, and say so.

Shards change, come and go at any moment, so a page is made of one `Snapshot`: which shards there are, which
content each has, and how many samples. It is the only way to the set. A question about a shard that has other
content by now raises StaleShard, so no number ever stands for another sample; `Snapshots.answer` asks a newer
snapshot then.

One lock protects the set and its records, which are for one thread at a time; questions under it read the index
and no shard. The bytes of files are read outside of the lock, so a slow shard delays only the requests for its
bytes. Nothing is kept for each sample: the numbers of the samples of a shard are in its record, and the order of
the last few shards is remembered.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import os
import shlex
import stat
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from wdsfs import inodes
from wdsfs import names as naming
from wdsfs.errors import NoSuchEntry, ShardError, StaleShard, UnreadableShard, UsageError, WdsfsError, counted
from wdsfs.host import in_directory
from wdsfs.index.portable import attached
from wdsfs.index.record import Member, Record
from wdsfs.inodes import MEMBER, ROOT, position
from wdsfs.mount.live_mount import LiveMount
from wdsfs.tree import content as content_module
from wdsfs.tree import view_set
from wdsfs.tree.companions import Companions, read_class_names
from wdsfs.tree.composition import Composition
from wdsfs.tree.content import Content
from wdsfs.tree.indexing import indexed
from wdsfs.tree.merged_tree import make_tree
from wdsfs.tree.numbered_tree import samples_of
from wdsfs.tree.opening import make_view, open_typed_set
from wdsfs.tree.set_options import Opening, Selection, TreeOptions
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.tree import AT_PARENT, LowerTree, Node, folder_path
from wdsfs.tree.view_content import OWN

ORDERS_MAX = 8  # shards whose order of samples is kept
FILES_MAX = 1000  # files of one sample that a page lists
NAMES_MAX = 16 << 20  # bytes of a file with the names of classes
DAMAGED_MAX = 200  # damaged shards that are listed
UNREADABLE = -1  # in place of the tag of a shard that cannot be read
ATTEMPTS = 3  # how often an answer is made while the shards that it is about change

Answer = TypeVar("Answer")
Parameters = ParamSpec("Parameters")
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
    """A file in the directory of a sample: name, size (bytes)."""

    name: bytes
    size: int


class FileOrigin(NamedTuple):
    """The origin of a file; `offset` is None for one that is no member of a shard."""

    shard: bytes
    member: bytes
    key: bytes
    offset: int | None


class MemberSource:
    """The bytes of a file of the shards, as `preview.Source`."""

    def __init__(self, snapshots: Snapshots, path: bytes, content: Content) -> None:
        self._snapshots, self._path, self._content, self.size = snapshots, path, content, content.size
        # Identifies the content; None for one that is in no shard in this form.
        self.key = (
            None if content.held is not None else (content.file.path, content.file.fingerprint, content.data)
        )

    def read(self, offset: int, length: int) -> bytes:
        """Return these bytes, fewer only at the end. Raises ShardErrors."""
        with self._snapshots.lock:
            if self._content.file.ended:  # closed meanwhile, for others that were opened
                with self._snapshots.snapshot() as now:
                    self._content = now.content_again(self._path, self._content)
            content = self._content
            content.file.hold()
        try:
            return content_module.read(content, offset, length)
        finally:
            with self._snapshots.lock:
                content.file.let_go()


@dataclass(eq=False, slots=True)
class _Shown:
    """A tree that is shown, or was when an answer began. `readers` are the answers that use it."""

    tree: LowerTree
    number: int  # a later tree has a higher one
    readers: int = 0
    orders: OrderedDict[tuple[int, int], Order] = field(default_factory=OrderedDict)  # by shard and tag


class Snapshots:
    """A tree of shards, samples in directories, for threads. The caller closes the tree.

    `in_classes`: the directories of samples are in those of their classes.
    """

    def __init__(self, tree: LowerTree, *, in_classes: bool = False) -> None:
        self.in_classes = in_classes
        self.lock = threading.RLock()
        self._shown = _Shown(tree, 0)
        self._last: Snapshot | None = None
        self._depth = 0  # questions within questions, of the thread that has the lock

    @property
    def tree(self) -> LowerTree:
        """The tree that is shown now."""
        return self._shown.tree

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Hold the lock while a tree is asked."""
        with self.lock:
            if not self._depth:  # no record is in use
                self.tree.lower.tidy()
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Take a snapshot of the set, whose shards stay open until the end of the block."""
        with self.asking():
            if self._last is None or self._is_old(self._last):
                self._last = Snapshot(self, self._shown)
            now = self._last
            now.shown.readers += 1
        try:
            yield now
        finally:
            with self.lock:
                now.shown.readers -= 1
                self._release(now.shown)

    def _is_old(self, snapshot: Snapshot) -> bool:
        """Return True if the set has changed since a snapshot, as far as anybody has looked."""
        shown = snapshot.shown
        return shown is not self._shown or shown.tree.lower.generation != snapshot.generation

    def _release(self, shown: _Shown) -> None:
        """Close the shards of a tree that is not shown any more and that no answer uses."""
        if shown is not self._shown and not shown.readers:
            shown.tree.lower.release()  # a file that is being read is closed after that

    def renew(self, tree: LowerTree) -> None:
        """Show another set from now on, over the same index."""
        with self.lock:
            before, self._shown = self._shown, _Shown(tree, self._shown.number + 1)
            self._release(before)

    def answer(self, question: Callable[[Snapshot], Answer]) -> Answer:
        """Return the answer to a question over one snapshot; over a newer one if the set has changed meanwhile.

        Raises what the question raises: StaleShard for shards that change each time.
        """
        attempt = 0
        while True:
            attempt += 1
            with self.snapshot() as now:
                try:
                    return question(now)
                except WdsfsError as error:
                    if attempt == ATTEMPTS or not self._has_outdated(now, error):
                        raise

    def _has_outdated(self, now: Snapshot, error: WdsfsError) -> bool:
        """Return True if an error comes from a change of the set since a snapshot."""
        with self.lock:
            if isinstance(error, StaleShard):
                now.distrust()  # a shard whose last look was a moment ago is believed to be what it was
                self._last = None if self._last is now else self._last
            return self._last is not now or self._is_old(now)


def _locked(
    question: Callable[Concatenate[Snapshot, Parameters], Answer],
) -> Callable[Concatenate[Snapshot, Parameters], Answer]:
    """Make a method that reads the tree or its records do so under the lock, and index what it lacks."""

    @functools.wraps(question)
    def ask(self: Snapshot, /, *arguments: Parameters.args, **names: Parameters.kwargs) -> Answer:
        with self.snapshots.asking():
            return indexed(question, self, *arguments, **names)

    return ask


class Snapshot:
    """The set at one moment, whatever its shards become.

    A shard that could not be read has no samples, and is listed by `damaged`. Questions about a shard that has
    changed since raise StaleShard, MissingShard and the like.
    """

    def __init__(self, snapshots: Snapshots, shown: _Shown) -> None:
        self.snapshots, self.shown = snapshots, shown
        self._tree, self._lower = shown.tree, shown.tree.lower
        self.shards = self._lower.shards  # in the order of the set
        self._tags = array("q")  # of the content that each shard has, or UNREADABLE
        self._ends = array("q")  # the number after the last sample of each shard
        self.total = 0  # samples
        for number in range(len(self._lower)):
            try:
                samples, tag = indexed(self._lower.summary, number).samples, self._lower.tag(number)
            except ShardError:
                samples, tag = 0, UNREADABLE
            self.total += samples
            self._tags.append(tag)
            self._ends.append(self.total)
        self.generation = self._lower.generation

    @property
    def version(self) -> tuple[int, int]:
        """The version of the content: it differs when the content does."""
        return self.shown.number, self.generation

    @property
    def lower(self) -> ShardSet:
        """The shards themselves, to be asked under the lock only."""
        return self._lower

    @property
    def readable(self) -> Iterator[int]:
        """The numbers of the shards that could be read."""
        return (number for number, tag in enumerate(self._tags) if tag != UNREADABLE)

    @property
    def is_view(self) -> bool:
        """True if the shards are shown through a view: columns are renamed, joined and so on."""
        return self._lower.plain is not self._lower

    @property
    def names(self) -> str:
        """The naming of the files of a sample: `ext` or `full`."""
        return self._tree.view.names

    def version_of(self, shard: int) -> tuple[int, int, int]:
        """Return a number of the content of a shard: another one whenever that changes."""
        return self.shown.number, shard, self._tag(shard)

    def _tag(self, shard: int) -> int:
        """Return the tag of the content of a shard in this snapshot. Raises UnreadableShard."""
        tag = self._tags[shard]
        if tag == UNREADABLE:
            raise UnreadableShard(f"{self._lower.path_text(shard)}: could not be read")
        return tag

    def _record(self, shard: int) -> Record:
        """Return the record of a shard, for the length of a question."""
        return self._lower.record(shard, self._tag(shard))

    @_locked
    def _node(self, path: bytes) -> Node:
        """Return the node at a path."""
        self._checked(self._tree.resolve(path.partition(b"/")[0]))  # or there may be no such path any more
        return self._checked(self._tree.resolve(path))

    def _checked(self, node: Node) -> Node:
        """Return a node of the content that its shard has in this snapshot. Raises ShardErrors."""
        tag, shard, _ = inodes.unpack(node.inode)
        if node.inode != ROOT and tag != self._tags[shard]:
            self._lower.summary(shard)  # raises the error of a shard that cannot be read
            raise StaleShard(f"{self._lower.path_text(shard)} has changed meanwhile")
        return node

    def distrust(self) -> None:
        """Check every shard before its next use."""
        self._lower.distrust()

    # --- samples

    def first_of(self, shard: int) -> int:
        """Return the number of the first sample of a shard."""
        return self._ends[shard - 1] if shard else 0

    def shard_of(self, number: int) -> int:
        """Return the shard of the sample with this number; the number of shards if there is no such sample."""
        return bisect.bisect_right(self._ends, number)

    @_locked
    def order(self, shard: int) -> Order:
        """Return the samples of a shard (entries of its record), in the order of the tar. Raises ShardErrors."""
        orders, key = self.shown.orders, (shard, self._tag(shard))
        order = orders.get(key)
        if order is None:
            order = orders[key] = samples_of(self._lower, *key, in_classes=self.snapshots.in_classes)
            if len(orders) > ORDERS_MAX:
                orders.popitem(last=False)
        return order

    @_locked
    def sample(self, number: int) -> Sample:
        """Return the sample with this number. Raises NoSuchEntry, ShardErrors."""
        shard = self.shard_of(number)
        if number < 0 or shard >= len(self._ends):
            raise NoSuchEntry(f"there is no sample {number:,}; the set has {self.total:,}")
        entry = int(self.order(shard)[number - self.first_of(shard)])
        record = self._record(shard)
        members = record.entry_members(entry)
        columns = tuple(record.extension(member) for member in members)
        sizes = tuple(record.size_and_time(member)[0] for member in members)
        names = tuple(self._place(shard, member)[1] for member in members)
        return Sample(number, shard, entry, self._path(shard, members[0]), columns, names, sizes)

    def _place(self, shard: int, member: int) -> tuple[int, bytes]:
        """Return the directory that shows a member, by its inode, and the name there."""
        return self._tree.places(inodes.pack(self._tag(shard), shard, position(MEMBER, member)))[0]

    def _path(self, shard: int, member: int) -> bytes:
        """Return the path of the directory that shows a member."""
        inode, _ = self._place(shard, member)
        return folder_path(self._tree, inode)[:-1]

    def number_at(self, path: bytes) -> int | None:
        """Return the number of the sample whose directory this is; None if it is no sample, or in no shard."""
        try:
            place = self._entry_at(path)
        except StaleShard:
            raise
        except WdsfsError:
            return None
        return None if place is None else self.number_of(*place)

    @_locked
    def _entry_at(self, path: bytes) -> tuple[int, int] | None:
        """Return the shard and the entry of the sample at a path."""
        node = self._node(path)
        if not stat.S_ISDIR(node.mode) or node.inode == ROOT:
            return None
        first = next((entry.node for entry in self._tree.listing(node.inode, AT_PARENT)), None)
        if first is None or not stat.S_ISREG(first.mode):
            return None
        _, shard, where = inodes.unpack(first.inode)
        return shard, self._record(shard).entry_of(inodes.index_of(where))

    def number_of(self, shard: int, entry: int) -> int | None:
        """Return the number in the set of an entry of a shard; None if it is no sample."""
        order = self.order(shard)
        at = np.flatnonzero(np.asarray(order) == entry) if not isinstance(order, range) else [entry]
        return self.first_of(shard) + int(at[0]) if len(at) else None

    @_locked
    def record(self, shard: int, question: Callable[[Record], Answer]) -> Answer:
        """Call `question` with the record of a shard, under the lock. Raises ShardErrors."""
        return question(self._record(shard))

    @_locked
    def keys(self, shard: int, places: Sequence[int]) -> list[bytes]:
        """Return the keys of samples, by their places in the order of a shard. Raises ShardErrors."""
        order, record = self.order(shard), self._record(shard)
        entries = [int(order[place]) for place in places]
        if not self.snapshots.in_classes:
            return [record.entry_path(entry) for entry in entries]
        # The record has the classes in their place; the shard has the keys.
        record, plain = self._lower.record_and_plain(shard, self._tag(shard))
        addresses = ([record.address(member) for member in record.entry_members(entry)] for entry in entries)
        own = (next(row for place, row in some if place == OWN) for some in addresses)
        return [plain.entry_path(plain.entry_of(row)) for row in own]

    @_locked
    def damaged(self) -> list[tuple[str, str]]:
        """Return the first damaged shards that the index knows, each with its path and problem."""
        return list(itertools.islice(self._lower.damaged(), DAMAGED_MAX))

    # --- files

    @_locked
    def files(self, path: bytes) -> list[File]:
        """Return the files in the directory of a sample. Raises EntryError, ShardErrors."""
        entries = itertools.islice(self._tree.listing(self._node(path).inode, AT_PARENT), FILES_MAX)
        return [File(entry.name, entry.node.size) for entry in entries if stat.S_ISREG(entry.node.mode)]

    def source(self, path: bytes) -> MemberSource:
        """Return the bytes of a file. Raises EntryError, ShardErrors."""
        return MemberSource(self.snapshots, path, self._content(path))

    def content_again(self, path: bytes, before: Content) -> Content:
        """Return the content of a file whose shard was closed. Raises StaleShard if it has changed."""
        content = self._content(path)
        same = content.file.fingerprint, content.data, content.size
        if same != (before.file.fingerprint, before.data, before.size):
            raise StaleShard(f"{os.fsdecode(before.file.path)} has changed since this was opened")
        return content

    @_locked
    def _content(self, path: bytes) -> Content:
        node = self._node(path)
        if not stat.S_ISREG(node.mode):
            raise NoSuchEntry("only files can be read here")
        return self._tree.content(node.inode)

    def origin(self, path: bytes) -> FileOrigin:
        """Return the origin of a file. Reads its header, without the lock. Raises EntryError, ShardErrors."""
        content, member = self._member(path)
        try:
            if member is None:
                return FileOrigin(content.file.path, path.rpartition(b"/")[2], b"", None)
            raw = content_module.read_name(content, member.head)
        finally:
            with self.snapshots.lock:
                content.file.let_go()
        split = naming.split(raw)
        key = b"" if split is None else raw[: len(raw) - len(split.extension) - 1]
        return FileOrigin(content.file.path, raw, key, member.data)

    @_locked
    def _member(self, path: bytes) -> tuple[Content, Member | None]:
        """Return the content of a file, held open, and its member; None for a file outside of the shards."""
        tag, number, where = inodes.unpack(self._node(path).inode)
        below = self._lower.origin(number, inodes.index_of(where), tag)
        if below is None:
            content, member = self._content(path), None
        else:
            source, number, index = below
            tag = source.tag(number)
            content, member = source.content(number, tag, index), source.record(number, tag).member(index)
        content.file.hold()
        return content, member


# Seconds between two renewals, and how many times as long as the last one: with many shards it takes its time.
RENEWAL_SECONDS, REST_SHARE = 1.0, 10


class Place(NamedTuple):
    """The place where samples are changed: below the directory `top`, once `command` has been typed."""

    top: str
    command: str


class Subject(NamedTuple):
    """The set that the pages show.

    `place` is None where samples have other paths in a mount than here. `note` is shown on every page: how the
    pages differ from the mount. `renewal` is that of a mount. `class_names` are the names of classes by their
    values in samples. `words` choose the set on a command line.
    """

    snapshots: Snapshots
    place: Place | None = None
    note: str = ""
    renewal: Renewal | None = None
    composition: Composition = Composition()
    class_names: Mapping[str, str] = {}
    words: tuple[str, ...] = ("SHARDS",)


@contextlib.contextmanager
def open_shards(
    specs: Sequence[str],
    selection: Selection,
    composition: Composition,
    opening: Opening,
    class_names: str | None = None,
) -> Iterator[Subject]:
    """Open the set that these words name; `class_names` is the path of a file.

    Raises what `tree.opening.open_typed_set` raises, and UsageError.
    """
    place = None
    words = *shlex.split(replace(composition, keys=None).text), *selection.arguments, *specs
    if composition.is_plain and selection.reading.is_plain:  # else no overlay can be made
        place = Place("MOUNTPOINT", shlex.join(["wdsfs", "mount", "--overlay", "DIR", *words, "MOUNTPOINT"]))
    with open_typed_set(specs, selection, opening, composition) as shards:
        names = _class_names_of(class_names, shards)
        snapshots = Snapshots(_samples_of(shards))
        yield Subject(snapshots, place, composition=composition, class_names=names, words=words)


@contextlib.contextmanager
def open_mount(mount: LiveMount, opening: Opening) -> Iterator[Subject]:
    """Open the set of a mount, as its options show it. Raises MountError, and what `LiveMount.opened` raises."""
    with Renewal.begin(mount, opening) as renewal:
        has_same_paths = mount.options.layout == "samples" and not mount.options.merge
        place = Place(mount.mountpoint, "") if has_same_paths else None
        composition = mount.options.composition
        with in_directory(mount.directory) if composition.names_files else contextlib.nullcontext():
            class_names = _class_names_of(composition.class_names, renewal.snapshots.tree.lower)
        yield Subject(
            renewal.snapshots, place, difference_from(mount), renewal, composition, class_names=class_names
        )


def _class_names_of(path: str | None, shards: ShardSet) -> dict[str, str]:
    """Return the names of classes in this file, or in `classes.txt` beside the first shard. Raises UsageError."""
    if path is not None:
        return read_class_names(path)
    path = os.path.join(os.path.dirname(os.fsdecode(shards.shards[0].path)), "classes.txt")
    with contextlib.suppress(OSError, UsageError):
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode) and status.st_size <= NAMES_MAX:
            return read_class_names(path)
    return {}


def difference_from(mount: LiveMount) -> str:
    """Return the difference between the pages and the mount, in sentences; empty if there is none."""
    notes = []
    if mount.overlay is not None:
        notes.append(
            "The pages show the shards, without the changes that were made in the mount. List the changes: "
            f"wdsfs diff {shlex.quote(mount.mountpoint)}."
        )
    if mount.options.merge and mount.options.layout != "classes":
        notes.append("The mount is one tree over all shards; here samples are below their shards.")
    return " ".join(notes)


def _samples_of(shards: ShardSet, names: str = "ext") -> LowerTree:
    """Return the tree of the pages: a directory for each sample, below that of its shard."""
    return make_tree(shards, TreeOptions(names=names).view())


class Renewal:
    """The set of a mount over time: asks the mount again before a page is made, at most every few seconds.

    Answers that have begun go on with the set that they began with.
    """

    snapshots: Snapshots

    def __init__(self, mount: LiveMount) -> None:
        self._mount, self._shown, options = mount, mount.shown(), mount.options
        if not self._shown.shards:
            raise UsageError(f"{mount.mountpoint}: has no shards yet; commit its files first")
        self._composition, self._in_classes = options.composition, options.layout == "classes"
        self._names = options.names if options.layout == "samples" else "ext"
        self._begun = {shard.name for shard in self._shown.shards}
        self._renewing = threading.Lock()
        self._next = 0.0
        self._error = ""

    @classmethod
    @contextlib.contextmanager
    def begin(cls, mount: LiveMount, opening: Opening) -> Iterator[Renewal]:
        """Open the set of a mount, which was judged before, so all that can be read is shown."""
        self = cls(mount)
        with mount.opened(self._shown, opening) as shards:
            self.snapshots = Snapshots(_samples_of(shards, self._names), in_classes=self._in_classes)
            yield self

    @property
    def _view(self) -> Composition | None:
        return self._composition if view_set.is_view(self._shown.shards, self._composition) else None

    def _in_directory(self) -> contextlib.AbstractContextManager[None]:
        """Enter the directory of the mount's command, for relative paths of joined shards and label files."""
        return in_directory(self._mount.directory) if self._composition.names_files else contextlib.nullcontext()

    def renew(self) -> None:
        """Ask the mount again, unless that was done a moment ago."""
        with self._renewing:
            began = time.monotonic()
            if began < self._next:
                return
            try:
                self._renew()
                self._error = ""
            except (WdsfsError, OSError) as error:
                self._error = str(error)
            finally:
                now = time.monotonic()
                self._next = now + max(RENEWAL_SECONDS, (now - began) * REST_SHARE)

    def _renew(self) -> None:
        before, self._shown = self._shown, self._mount.shown()
        if self._shown == before:
            return
        try:
            with self.snapshots.lock, self._in_directory():
                shards = self._opened_again(self.snapshots.tree.lower)
                self.snapshots.renew(_samples_of(shards, self._names))
        except BaseException:
            self._shown = before  # to be tried again
            raise

    def _opened_again(self, before: ShardSet) -> ShardSet:
        """Open the present set, over the same index; new shards are indexed when they are needed."""
        shards, index, view, access = self._shown.shards, before.index, self._view, self._shown.access
        companions = None if view is None else Companions(view, shards[0].reading)
        further = [] if companions is None else companions.shards
        index.portables = attached([*shards, *further])
        if view is None or companions is None:
            return ShardSet(shards, index, access=access)
        view_of_shards = view_set.make_shard_set(shards, index, view, companions, access=access)
        for source in view_of_shards.sources:
            for number in source.numbers:
                with contextlib.suppress(ShardError):  # is on the page of problems
                    indexed(source.summary, number)
        make_view(view_of_shards, Opening(quiet=True))
        return view_of_shards

    @property
    def news(self) -> str:
        """The news for each page; empty while nothing has changed."""
        if self._error:
            return f"The pages still show the set as before, because it cannot be read again: {self._error}"
        now = {shard.name for shard in self.snapshots.tree.lower.shards}
        changes = (len(now - self._begun), "came"), (len(self._begun - now), "went")
        texts = [f"{counted(number, 'shard')} {word}" for number, word in changes if number]
        changed = f"{' and '.join(texts)} since this view began." if texts else ""
        return " ".join(filter(None, (changed, self._shown.news)))
