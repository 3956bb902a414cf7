"""The tree with a directory for each shard: inodes, attributes, listings, and where a file comes from.

`shown_names.py` decides which names a record shows. The tree does not know FUSE, and it knows paths, LMDB and tar
only through the set of shards. All of it is plain synchronous code on one thread: a call runs from start to end
with the records that it has looked up, so no lock is needed. A call waits for nothing but a page of the index.

An inode number gives the shard and the position in its record (`inodes.py`), so no state is kept between calls: no
table of inodes, no open directories, and a listing continues from the cursor at which it stopped.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator

import numpy as np

from wdsfs import inodes
from wdsfs.errors import IsADirectory, NoSuchAttribute, NoSuchEntry, NotADirectory, ShardError, StaleShard
from wdsfs.index.record import BY_EXTENSION, STRAY, Record
from wdsfs.inodes import FOLDER, MEMBER, ROOT, SAMPLE, index_of, kind_of, position
from wdsfs.names import raw_key, text_of
from wdsfs.tree.content import Content, read_name
from wdsfs.tree.indexing import NotIndexed
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.shown_names import NameColumns, ShownColumns, ShownNames, columns_of, names_of, parent_folder
from wdsfs.tree.statistics import SetTotals
from wdsfs.tree.tree import (
    AT_PARENT,
    AT_SELF,
    DIRECTORY_MODE,
    XATTR,
    Entry,
    ListingRun,
    Node,
    Totals,
    View,
    own_entries,
    resolve,
)

_SHARD_TOP = position(FOLDER, 0)  # the directory of a shard
_FIRST_SHARD = 3  # the cursor of the first child of the top
_FILE_MODE = stat.S_IFREG | 0o444
_SYMLINK_MODE = stat.S_IFLNK | 0o777
_NO_LINES = ListingRun([], 0, 0, 0, 0, (), ())


class ShardTree:
    """One directory per shard.

    Every method may raise NotIndexed when a shard has to be indexed first, StaleShard for an inode number of a
    shard that has changed, and other ShardErrors.
    """

    merged = False

    def __init__(self, lower: ShardSet, view: View) -> None:
        self.lower = lower
        self.view = view
        self.names = ShownNames(view)
        self.domain, self.files_layout = self.names.domain, self.names.files_layout
        self.directory_mode, self.file_mode = DIRECTORY_MODE, _FILE_MODE
        self._numbers = {lower.shards[number].name: number for number in lower.numbers}
        self._totals = SetTotals(lower)
        self._root_mtime = lower.generations.changed_ns  # when a name was added or removed, as for any directory
        if not self._root_mtime:
            self._root_mtime = max(
                (_mtime_or_zero(lower, n) for n in (0, len(lower) - 1) if len(lower)), default=0
            )

    def make_writable(self, umask: int = 0) -> None:
        """Show modes with which the owner may write, for a mount with an overlay.

        `umask` is applied here, so that copied-up files have it, too.
        """
        self.directory_mode, self.file_mode = stat.S_IFDIR | 0o755 & ~umask, stat.S_IFREG | 0o644 & ~umask

    def prepare(self) -> None:
        """Do in advance, once, what the first request would have to wait for."""

    def close(self, clean: bool) -> None:
        """Close everything; `clean` is True if the mount has ended."""
        self.lower.close()

    # --- looking things up

    def lookup(self, parent: int, name: bytes) -> Node:
        """Return the child `name` of a directory. Raises NoSuchEntry, NotADirectory."""
        if parent == ROOT:
            number = self._numbers.get(name)
            if number is None:
                raise NoSuchEntry(f"no {text_of(name)!r} at the top of the tree")
            return self._shard_node(number)
        number, record, where = self._open(parent)
        child = self.names.find(record, where, name)
        if child is None:
            raise NoSuchEntry(f"no {text_of(name)!r} in {self.lower.path_text(number)}")
        return self._node(number, record, child)

    def resolve(self, path: bytes) -> Node:
        """Return the node at a path below the top, for callers without a kernel."""
        return resolve(self, path)

    def _open(self, inode: int) -> tuple[int, Record, int]:
        """Return the number and the record of an inode's shard, and the position there. Raises NoSuchEntry."""
        tag, number, where = inodes.unpack(inode)
        if number >= len(self.lower) or where < _SHARD_TOP:
            raise NoSuchEntry(f"no inode {inode}")
        return number, self.lower.record(number, tag), where

    # --- attributes

    def getattr(self, inode: int) -> Node:
        if inode == ROOT:
            return Node(ROOT, self.directory_mode, 2 + self.lower.count, 0, self._root_mtime)
        if inode & inodes.POSITION == _SHARD_TOP:
            return self._shard_node_of(inode)
        number, record, where = self._open(inode)
        return self._node(number, record, where)

    def _shard_node_of(self, inode: int) -> Node:
        """Return the directory of a shard by its inode. Raises StaleShard, NoSuchEntry."""
        _, number, _ = inodes.unpack(inode)
        if number >= len(self.lower):
            raise NoSuchEntry(f"no inode {inode}")
        node = self._shard_node(number)
        if node.inode != inode:
            raise StaleShard(f"{self.lower.path_text(number)} has changed since this was opened")
        return node

    def _node(self, number: int, record: Record, where: int) -> Node:
        """Return the node at a position; for a hard link that of its target."""
        kind, index = kind_of(where), index_of(where)
        if kind == MEMBER:
            if record.has_links:
                index = record.link_target(index) or 0
            size, mtime = record.size_and_time(index)
            target, mode = record.symlink(index), self.file_mode
            if target is not None:
                mode, size = _SYMLINK_MODE, len(target)
            inode = inodes.pack(self.lower.tag(number), number, position(MEMBER, index))
            return Node(inode, mode, record.link_count(index), size, mtime)
        mtime = record.fingerprint.mtime_ns
        if kind == SAMPLE:
            first = record.entry_member[index]
            mtime, links = record.mtime_ns(first), 2
        else:
            links = 2
            links += len(record.child_folders(index)) if self.files_layout else record.count_directories(index)
            if self.files_layout and index:  # the directory of a shard has the time of the shard
                own = record.folder_mtime_ns(index)
                mtime = mtime if own is None else own
        return Node(inodes.pack(self.lower.tag(number), number, where), self.directory_mode, links, 0, mtime)

    def _shard_node(self, number: int) -> Node:
        """Return the directory of a shard, without its record: a set may have many shards, some of them broken."""
        where = _SHARD_TOP
        try:
            summary = self.lower.summary(number)
        except NotIndexed:  # one link: the subdirectories are not counted
            fingerprint = self.lower.fingerprint(number)
            inode = inodes.pack(self.lower.tag(number), number, where)
            return Node(inode, self.directory_mode, 1, 0, fingerprint.mtime_ns)
        except ShardError:  # listed all the same, never silently missing; opening it gives the error
            return Node(inodes.pack(0, number, where), self.directory_mode, 1, 0, 0)
        links = 2 + (summary.top_folders if self.files_layout else summary.top_directories)
        inode = inodes.pack(self.lower.tag(number), number, where)
        return Node(inode, self.directory_mode, links, 0, summary.mtime_ns)

    def readlink(self, inode: int) -> bytes:
        _, record, where = self._open(inode)
        target = record.symlink(index_of(where)) if kind_of(where) == MEMBER else None
        if target is None:
            raise NoSuchEntry(f"inode {inode} is no symbolic link")
        return target

    # --- listing

    def open_directory(self, inode: int) -> None:
        """Raise NotADirectory, or what a listing would raise."""
        if inode != ROOT:
            _, _, where = self._open(inode)
            if kind_of(where) == MEMBER:
                raise NotADirectory(f"inode {inode} is a file")

    def listing(self, inode: int, after: int = 0) -> Iterator[Entry]:
        """Yield the children of a directory after the cursor `after`, in the order of the tar.

        Exhaust or drop the iterator before any other call.
        """
        if inode == ROOT:
            yield from self._list_top(after)
            return
        number, record, where = self._open(inode)
        if kind_of(where) == MEMBER:
            raise NotADirectory(f"inode {inode} is a file")
        if after < AT_SELF:
            yield Entry(b".", self._node(number, record, where), AT_SELF)
        if after < AT_PARENT:
            yield Entry(b"..", self.getattr(self.parent(inode)), AT_PARENT)
        children = self.names.children(record, where, after)
        if record.is_plain and record.aliases[self.domain] is None:
            yield from self._list_plain(number, record, children)
            return
        for child in children:
            yield Entry(self.names.shown(record, child), self._node(number, record, child), child)

    def run(self, inode: int, after: int, most: int) -> ListingRun | None:
        """Return up to `most` lines of `listing` in columns if the children are all of one kind; else None.

        This is for directories with up to a million children: columns need no Python code for each child. And for
        samples, of which a walk lists one after the other.
        """
        if kind_of(inode) == SAMPLE:
            return self._run_of_sample(inode, after, most)
        if kind_of(inode) != FOLDER or kind_of(after) not in (SAMPLE, MEMBER):
            return None
        _, record, where = self._open(inode)
        if not record.is_plain or record.aliases[self.domain] is not None:
            return None
        entries = record.folder_entries(index_of(where))
        if self.files_layout and kind_of(after) == MEMBER:
            rest = _rest(record.entry_member[entries.start], record.entry_member[entries.stop], after, most)
            names, sizes, times = record.file_names(rest), record.sizes(rest), record.mtimes_ns(rest)
            mode, links = self.file_mode, 1
        elif not self.files_layout and kind_of(after) == SAMPLE and record.all_listed:
            rest = _rest(entries.start, entries.stop, after, most)
            names, sizes = record.entry_name.of(rest), np.zeros(len(rest), np.int64)
            times = record.mtimes_ns(record.first_members(rest))
            mode, links = self.directory_mode, 2
        else:
            return None
        child = position(kind_of(after), rest.start)
        return ListingRun(names, inode - where + child, child, mode, links, sizes, times)

    def _run_of_sample(self, inode: int, after: int, most: int) -> ListingRun | None:
        """Return lines of a sample after a cursor, if its files are plain and have their own names."""
        _, record, where = self._open(inode)
        sample = index_of(where)
        first, stop = record.entry_member[sample], record.entry_member[sample + 1]
        if kind_of(after) == MEMBER:
            first = max(first, index_of(after) + 1)
            if first >= stop:
                return _NO_LINES
        elif after:
            return None
        if not record.is_plain or record.aliases[self.domain] is not None:
            return None
        base, child, members = inode - where, position(MEMBER, first), range(first, min(first + most, stop))
        parent = 0 if after else base + position(FOLDER, record.folder_of(sample))
        names = record.extensions(members) if self.domain == BY_EXTENSION else record.file_names(members)
        sizes, times = record.sizes_and_times(members)
        return ListingRun(names, base + child, child, self.file_mode, 1, sizes, times, parent)

    def _list_plain(self, number: int, record: Record, children: Iterator[int]) -> Iterator[Entry]:
        """Yield the lines of a record without links and aliases, in half the time of the general loop."""
        base = inodes.pack(self.lower.tag(number), number, 0)
        stem, stray, stop = b"", False, -1
        for child in children:
            if kind_of(child) != MEMBER:
                yield Entry(self.names.shown(record, child), self._node(number, record, child), child)
                continue
            member = index_of(child)
            if member >= stop and self.domain != BY_EXTENSION:
                entry = record.entry_of(member)
                stop = record.entry_member[entry + 1]
                stray = bool(record.entry_flags[entry] & STRAY)
                stem = record.entry_name[entry] + (b"" if stray else b".")
            name = stem if stray else stem + record.extension(member)
            size, mtime_ns = record.size_and_time(member)
            yield Entry(name, Node(base | child, self.file_mode, 1, size, mtime_ns), child)

    def _list_top(self, after: int) -> Iterator[Entry]:
        """Yield the directories of all shards."""
        yield from own_entries(self, ROOT, after)
        for number in range(max(after - _FIRST_SHARD + 1, 0), len(self.lower)):
            if number not in self.lower.out:
                yield Entry(self.lower.shards[number].name, self._shard_node(number), number + _FIRST_SHARD)

    def numbers(self) -> Iterable[int]:
        """Return the shards that have names in the tree. Raises as a listing does."""
        return self.lower.numbers

    def columns(self, number: int) -> ShownColumns:
        """Return all that is shown of a shard. Raises what `listing` raises."""
        named, tag = self.name_columns(number), self.lower.tag(number)
        nodes = [self.getattr(inodes.pack(tag, number, position(FOLDER, n))) for n in named.folders]
        return columns_of(self.lower.record(number), named, nodes)

    def name_columns(self, number: int) -> NameColumns:
        """Return all names that a shard shows. Raises what `listing` raises."""
        return names_of(self.lower.record(number), self.names)

    def parent(self, inode: int) -> int:
        """Return the inode of the directory that holds this directory."""
        if inode == ROOT:
            return ROOT
        number, record, where = self._open(inode)
        folder = parent_folder(record, where)
        return ROOT if folder is None else inodes.pack(self.lower.tag(number), number, position(FOLDER, folder))

    def places(self, inode: int) -> list[tuple[int, bytes]]:
        """Return every name of an inode except the top: the inode of the directory, and the name in it.

        With hard links within a shard a file has several names.
        """
        number, record, where = self._open(inode)
        if where == _SHARD_TOP:
            return [(ROOT, self.lower.shards[number].name)]
        return [self._place_in(number, record, at) for at in self.names.positions_of(record, where)]

    def _place_in(self, number: int, record: Record, where: int) -> tuple[int, bytes]:
        holder = self.names.holder(record, where)
        return inodes.pack(self.lower.tag(number), number, holder), self.names.shown(record, where)

    # --- content and provenance

    def content(self, inode: int) -> Content:
        """Return the place of the bytes of a file. Raises IsADirectory."""
        tag, number, where = inodes.unpack(inode)
        if inode == ROOT or kind_of(where) != MEMBER:
            raise IsADirectory(f"inode {inode} is a directory")
        return self.lower.content(number, tag, index_of(where))

    def xattrs(self, inode: int) -> list[bytes]:
        """Return the names of the attributes of an inode: exactly its own, or `rsync -X` fails."""
        if inode == ROOT:
            return []
        kind = kind_of(inode)
        keys = {FOLDER: [b"shard"], SAMPLE: [b"shard", b"key"]}.get(kind) or self._attributes_of_member(inode)
        return [XATTR + key for key in keys]

    def _attributes_of_member(self, inode: int) -> list[bytes]:
        number, record, where = self._open(inode)
        member = index_of(where)
        if record.symlink(member) is not None:
            return []  # in the kernel no symbolic link has attributes of users
        made_up = self.lower.origin(number, member) is None
        stray = record.entry_flags[record.entry_of(member)] & STRAY
        return [b"shard", *([] if stray else [b"key"]), b"member", *([] if made_up else [b"offset"])]

    def getxattr(self, inode: int, name: bytes) -> bytes:
        """Return the value of an extended attribute. Raises NoSuchAttribute.

        `shard` is the absolute path of the tar. `key` is the key of the sample and `member` the whole name of the
        file, both as in the tar, without escapes. `offset` is the byte in the shard at which the content starts.
        For a file that is no member of any shard (a label), `shard` is the file that it comes from, and `member`
        its own name.
        """
        if name not in self.xattrs(inode):
            raise NoSuchAttribute(f"no attribute {text_of(name)}")
        number, record, where = self._open(inode)
        what = name.removeprefix(XATTR)
        if what == b"shard" and kind_of(where) != MEMBER:
            return self.lower.shards[number].path
        member = index_of(where) if kind_of(where) == MEMBER else record.entry_member[index_of(where)]
        origin = self.lower.origin(number, member)
        if origin is None:
            return self._made_up_attribute(inode, what)
        below, number, member = origin
        if what == b"shard":
            return below.shards[number].path
        tag = below.tag(number)
        place = below.record(number, tag).member(member)
        if what == b"offset":
            return b"%d" % place.data
        content = below.content(number, tag, member)
        raw = read_name(content, place.head)
        key = raw_key(raw, last_dot=below.shards[number].reading.last_dot)
        if what == b"member":
            return raw
        if key is None:
            raise NoSuchAttribute(f"{text_of(raw)} is in no sample")
        return key

    def _made_up_attribute(self, inode: int, what: bytes) -> bytes:
        """Return the value of an attribute of a file that is no member of a shard. Raises NoSuchAttribute."""
        _, record, where = self._open(inode)
        if what == b"shard":
            tag, number, where = inodes.unpack(inode)
            return self.lower.content(number, tag, index_of(where)).file.path
        entry = record.entry_of(index_of(where)) if kind_of(where) == MEMBER else index_of(where)
        key = record.entry_path(entry)
        if what == b"offset":
            raise NoSuchAttribute("it is no member of a shard, so it has no offset there")
        return key if what == b"key" else key + b"." + record.extension(index_of(where))

    def totals(self) -> Totals:
        """Return sums over the set, for `df` and `status`. Invalidates all records in use."""
        return self._totals.get()


def _rest(start: int, stop: int, after: int, most: int) -> range:
    """Return at most `most` of these indexes after a cursor, which may be one of another directory."""
    first = max(start, index_of(after) + 1)
    return range(first, min(first + most, stop))


def _mtime_or_zero(lower: ShardSet, number: int) -> int:
    try:
        return lower.fingerprint(number).mtime_ns
    except ShardError:
        return 0
