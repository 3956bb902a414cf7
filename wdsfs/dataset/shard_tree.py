"""The tree: what a mounted shard set looks like, and under which inode.

The one place that decides what exists. It knows nothing of FUSE, and paths, LMDB and tar only through the
lower. Everything here is plain synchronous code on one thread: a call runs from start to end with the records
it looked at, so no lock is needed; nothing here waits for anything but a page of the index.

An inode number tells the shard and the place in its record (`inodes.py`), so nothing is remembered between
calls: no table of inodes, no open directories, and a listing goes on from the number it stopped at.

`ShardTree` shows each shard as a directory of its own. `MergedTree` shows one tree over all shards.
"""

from __future__ import annotations

import stat
import zlib
from collections.abc import Iterator

import numpy as np

from wdsfs import inodes, names
from wdsfs.dataset.content import Content, check_unchanged
from wdsfs.dataset.indexing import NotIndexed
from wdsfs.dataset.shard_set import ShardSet
from wdsfs.dataset.tree import (
    AT_PARENT,
    AT_SELF,
    DIRECTORY_MODE,
    SAMPLES_LAYOUT,
    XATTR,
    Entry,
    ListingRun,
    Node,
    Totals,
    View,
    resolve,
    text_of,
)
from wdsfs.errors import IsADirectory, NoSuchAttribute, NoSuchEntry, NotADirectory, ShardError, StaleShard
from wdsfs.index.record import BY_EXTENSION, BY_NAME, HAS_SAMPLES, STRAY, TWIN, Record
from wdsfs.inodes import FOLDER, MEMBER, ROOT, SAMPLE, index_of, kind_of, position
from wdsfs.tar.scan import read_name

_FIRST_SHARD = 3  # the cursor of the first child of the top
_FILE_MODE = stat.S_IFREG | 0o444
_SYMLINK_MODE = stat.S_IFLNK | 0o777


class ShardTree:
    """One directory per shard."""

    merged = False

    def __init__(self, lower: ShardSet, view: View) -> None:
        self.lower = lower
        self.view = view
        self.domain = view.domain
        self.files_layout = view.layout != SAMPLES_LAYOUT
        self.directory_mode, self.file_mode = DIRECTORY_MODE, _FILE_MODE
        self._numbers = {shard.name: number for number, shard in enumerate(lower.shards)}
        self._totals: tuple[int, Totals] | None = None
        self._root_mtime = max((_mtime_or_zero(lower, n) for n in (0, len(lower) - 1) if len(lower)), default=0)

    def make_writable(self, umask: int = 0) -> None:
        """Show files and directories as such that their owner may write: on a mount with an overlay that is so.

        `umask` is taken off here already, so that it is off what is copied up.
        """
        self.directory_mode, self.file_mode = stat.S_IFDIR | 0o755 & ~umask, stat.S_IFREG | 0o644 & ~umask

    def prepare(self) -> None:
        """Do once what the first request would otherwise wait for."""

    def close(self, clean: bool) -> None:
        """Let go of everything; `clean` says that the mount has ended."""
        self.lower.close()

    # --- looking things up

    def lookup(self, parent: int, name: bytes) -> Node:
        """The child `name` of a directory.

        Raises NoSuchEntry, NotADirectory, and for every method of this class: NotIndexed when a shard has to
        be indexed first, StaleShard when an inode number is of a shard that has changed, other ShardErrors.
        """
        if parent == ROOT:
            number = self._numbers.get(name)
            if number is None:
                raise NoSuchEntry(f"no {text_of(name)!r} at the top of the mount")
            return self._shard_node(number)
        number, record, where = self._open(parent)
        child = self._find(record, where, name)
        if child is None:
            raise NoSuchEntry(f"no {text_of(name)!r} in {self.lower.path_text(number)}")
        return self._node(number, record, child)

    def resolve(self, path: bytes) -> Node:
        """The node at a path below the top, for callers without a kernel."""
        return resolve(self, path)

    def _open(self, inode: int) -> tuple[int, Record, int]:
        tag, number, where = inodes.unpack(inode)
        if number >= len(self.lower) or where < inodes.position(FOLDER, 0):
            raise NoSuchEntry(f"no inode {inode}")
        return number, self.lower.record(number, tag), where

    def _find(self, record: Record, where: int, name: bytes) -> int | None:
        """The position of the child with this shown name of the directory at `where`."""
        kind = kind_of(where)
        if kind == MEMBER:
            raise NotADirectory(f"{text_of(name)!r}: its parent is a file")
        aliases = record.aliases[self.domain]
        if aliases is not None:
            child = aliases.find(_crc_below(record, where, name), home_of(record, where), name)
            if child is not None and (kind == FOLDER or kind_of(child) == MEMBER):
                return child
        for child in self._find_plain(record, where, name):
            if aliases is None or aliases.of(child) is None:
                return child
        return None

    def _find_plain(self, record: Record, where: int, name: bytes) -> Iterator[int]:
        """Children whose plain name this is, shown under it or not."""
        if kind_of(where) == SAMPLE:
            yield from self._find_in_sample(record, index_of(where), name)
            return
        folder = index_of(where)
        crc = record.crc_below(folder, name)
        child = record.find_folder(folder, name, crc)
        if child is not None and self._is_shown(record, child):
            yield position(FOLDER, child)
        if self.files_layout:
            yield from self._find_file(record, folder, name, crc)
            return
        for entry in record.find_entries(folder, name, crc):
            if not record.entry_flags[entry] & (STRAY | TWIN):
                yield position(SAMPLE, entry)
        twin = record.twin_sample(folder)
        if twin is not None:
            yield from self._find_in_sample(record, twin, name)

    def _is_shown(self, record: Record, folder: int) -> bool:
        return self.files_layout or bool(record.folder_flags[folder] & HAS_SAMPLES)

    def _find_in_sample(self, record: Record, entry: int, name: bytes) -> Iterator[int]:
        if self.domain == BY_NAME:
            stem = record.entry_name[entry] + b"."
            if not name.startswith(stem):
                return
            name = name[len(stem) :]
        for member in record.find_members(entry, name):
            yield position(MEMBER, member)

    def _find_file(self, record: Record, folder: int, name: bytes, crc: int) -> Iterator[int]:
        stem, dot, extension = name.partition(b".")
        if dot and stem:
            for entry in record.find_entries(folder, stem, record.crc_below(folder, stem)):
                if not record.entry_flags[entry] & STRAY:
                    for member in record.find_members(entry, extension):
                        yield position(MEMBER, member)
        for entry in record.find_entries(folder, name, crc):
            if record.entry_flags[entry] & STRAY:
                for member in record.entry_members(entry):
                    if record.link_target(member) is not None:
                        yield position(MEMBER, member)

    # --- attributes

    def getattr(self, inode: int) -> Node:
        if inode == ROOT:
            return Node(ROOT, self.directory_mode, 2 + len(self.lower), 0, self._root_mtime)
        _, shard, where = inodes.unpack(inode)
        if where == position(FOLDER, 0) and shard < len(self.lower):
            node = self._shard_node(shard)
            if node.inode != inode:
                raise StaleShard(f"{self.lower.path_text(shard)} has changed since this was opened")
            return node
        number, record, where = self._open(inode)
        return self._node(number, record, where)

    def _node(self, number: int, record: Record, where: int) -> Node:
        """The node at a position; a hard link is the node of the member that it stands for."""
        kind, index = kind_of(where), index_of(where)
        if kind == MEMBER:
            if record.has_links:
                index = record.link_target(index) or 0
            member = record.member(index)
            target = record.symlink(index)
            mode, size = (self.file_mode, member.size) if target is None else (_SYMLINK_MODE, len(target))
            inode = inodes.pack(self.lower.tag(number), number, position(MEMBER, index))
            return Node(inode, mode, record.link_count(index), size, member.mtime_ns)
        mtime = record.fingerprint[1]
        if kind == SAMPLE:
            first = record.entry_member[index]
            mtime, links = record.mtime_ns(first), 2
        else:
            links = 2 + self._count_directories(record, index)
            if self.files_layout:
                own = record.folder_mtime_ns(index)
                mtime = mtime if own is None else own
        return Node(inodes.pack(self.lower.tag(number), number, where), self.directory_mode, links, 0, mtime)

    def _count_directories(self, record: Record, folder: int) -> int:
        return len(record.child_folders(folder)) if self.files_layout else record.count_directories(folder)

    def _shard_node(self, number: int) -> Node:
        """The directory of a shard, without its record: a set may have many shards, and broken ones."""
        where = position(FOLDER, 0)
        try:
            summary = self.lower.summary(number)
        except NotIndexed:  # one link is what a directory has whose subdirectories nobody has counted
            fingerprint = self.lower.fingerprint(number)
            inode = inodes.pack(self.lower.tag(number), number, where)
            return Node(inode, self.directory_mode, 1, 0, fingerprint[1])
        except ShardError:  # it stays listed, never silently missing; what looks inside gets the error
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
        """Raises NotADirectory, or what a listing would raise."""
        if inode != ROOT:
            _, _, where = self._open(inode)
            if kind_of(where) == MEMBER:
                raise NotADirectory(f"inode {inode} is a file")

    def listing(self, inode: int, after: int = 0) -> Iterator[Entry]:
        """The children of a directory behind the cursor `after`, in the order of the tar.

        The iterator must be used up or dropped before any other call.
        """
        if after < AT_SELF:
            yield Entry(b".", self.getattr(inode), AT_SELF)
        if after < AT_PARENT:
            yield Entry(b"..", self.getattr(self.parent(inode)), AT_PARENT)
        if inode == ROOT:
            yield from self._list_shards(max(after - _FIRST_SHARD + 1, 0))
            return
        number, record, where = self._open(inode)
        if kind_of(where) == MEMBER:
            raise NotADirectory(f"inode {inode} is a file")
        children = self._children(record, where, after)
        if record.is_plain and record.aliases[self.domain] is None:
            yield from self._list_plain(number, record, children)
            return
        for child in children:
            yield Entry(self._shown(record, child), self._node(number, record, child), child)

    def run(self, inode: int, after: int, most: int) -> ListingRun | None:
        """What `listing` says of up to `most` children, in columns, where they are all alike; else None.

        A directory may have a million children, and what is not done for each of them in Python is done at once.
        """
        if inode == ROOT or kind_of(after) not in (SAMPLE, MEMBER):
            return None
        number, record, where = self._open(inode)
        if kind_of(where) != FOLDER or not record.is_plain or record.aliases[self.domain] is not None:
            return None
        first, entries = index_of(after) + 1, record.folder_entries(index_of(where))
        base = inodes.pack(self.lower.tag(number), number, 0)
        if self.files_layout and kind_of(after) == MEMBER:
            members = range(first, min(first + most, record.entry_member[entries.stop]))
            child = position(MEMBER, first)
            names, sizes, times = record.file_names(members), record.sizes(members), record.mtimes_ns(members)
            return ListingRun(names, base | child, child, self.file_mode, 1, sizes, times)
        if not self.files_layout and kind_of(after) == SAMPLE and record.all_listed:
            chosen = range(first, min(first + most, entries.stop))
            child = position(SAMPLE, first)
            names = record.entry_name.of(chosen)
            times = record.mtimes_ns(record.first_members(chosen))
            return ListingRun(
                names, base | child, child, self.directory_mode, 2, np.zeros(len(chosen), np.int64), times
            )
        return None

    def _list_plain(self, number: int, record: Record, children: Iterator[int]) -> Iterator[Entry]:
        """As the loop above, in half the time, where nothing is odd: no links, no other names."""
        base = inodes.pack(self.lower.tag(number), number, 0)
        stem, stray, stop = b"", False, -1
        for child in children:
            if kind_of(child) != MEMBER:
                yield Entry(self._shown(record, child), self._node(number, record, child), child)
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

    def _list_shards(self, first: int) -> Iterator[Entry]:
        for number in range(first, len(self.lower)):
            yield Entry(self.lower.shards[number].name, self._shard_node(number), number + _FIRST_SHARD)

    def _children(self, record: Record, where: int, after: int) -> Iterator[int]:
        """Positions of the children of a directory: its sample's files, its folders, its samples or files."""
        kind, index = kind_of(where), index_of(where)
        if kind == SAMPLE:
            yield from _behind(MEMBER, record.entry_members(index), after)
            return
        if self.files_layout:
            if kind_of(after) in (0, FOLDER):
                yield from _behind(FOLDER, record.child_folders(index), after)
            entries = record.folder_entries(index)
            members = range(record.entry_member[entries.start], record.entry_member[entries.stop])
            for child in _behind(MEMBER, members, after):
                if not record.has_links or record.link_target(index_of(child)) is not None:
                    yield child
            return
        if kind_of(after) in (0, MEMBER):
            twin = record.twin_sample(index)
            if twin is not None:
                yield from _behind(MEMBER, record.entry_members(twin), after)
            after = 0
        if kind_of(after) in (0, FOLDER):
            for child in _behind(FOLDER, record.child_folders(index), after):
                if record.all_sampled or self._is_shown(record, index_of(child)):
                    yield child
            after = 0
        for child in _behind(SAMPLE, record.folder_entries(index), after):
            if not record.entry_flags[index_of(child)] & (STRAY | TWIN):
                yield child

    def _shown(self, record: Record, child: int) -> bytes:
        """The name under which a child is listed."""
        aliases = record.aliases[self.domain]
        if aliases is not None:
            name = aliases.of(child)
            if name is not None:
                return name
        kind, index = kind_of(child), index_of(child)
        if home_of(record, child) != child:
            return self._shown(record, home_of(record, child))
        if kind == FOLDER:
            return record.folder_name[index]
        if kind == SAMPLE:
            return record.entry_name[index]
        if self.domain == BY_EXTENSION:
            return record.extension(index)
        entry = record.entry_of(index)
        if record.entry_flags[entry] & STRAY:
            return record.entry_name[entry]
        return record.entry_name[entry] + b"." + record.extension(index)

    def parent(self, inode: int) -> int:
        """The inode of the directory that holds this directory."""
        if inode == ROOT:
            return ROOT
        number, record, where = self._open(inode)
        kind, index = kind_of(where), index_of(where)
        if kind == FOLDER and index == 0:
            return ROOT
        folder = record.folder_parent[index] if kind == FOLDER else record.folder_of(index)
        return inodes.pack(self.lower.tag(number), number, position(FOLDER, folder))

    def places(self, inode: int) -> list[tuple[int, bytes]]:
        """Every name of something but the top: the inode of a directory, and the name in it.

        Hard links within a shard give a file several names.
        """
        number, record, where = self._open(inode)
        if where == position(FOLDER, 0):
            return [(ROOT, self.lower.shards[number].name)]
        return [self._place_in(number, record, one) for one in self._names_of(record, where)]

    def _names_of(self, record: Record, where: int) -> list[int]:
        """The positions that are shown as this one: itself, and in the files layout hard links to it."""
        if kind_of(where) != MEMBER or not self.files_layout or record.link_count(index_of(where)) < 2:
            return [where]
        links = record.array("link.member")[record.array("link.target") == index_of(where)]
        return [where, *(position(MEMBER, one) for one in links.tolist() if one != index_of(where))]

    def _place_in(self, number: int, record: Record, where: int) -> tuple[int, bytes]:
        holder = self._holder(record, where)
        return inodes.pack(self.lower.tag(number), number, holder), self._shown(record, where)

    def _holder(self, record: Record, where: int) -> int:
        """The position of the directory in which something is shown."""
        kind, index = kind_of(where), index_of(where)
        if kind == FOLDER:
            return position(FOLDER, record.folder_parent[index])
        if kind == SAMPLE:
            return position(FOLDER, record.folder_of(index))
        entry = record.entry_of(index)
        if self.files_layout:
            return position(FOLDER, record.folder_of(entry))
        return home_of(record, position(SAMPLE, entry))

    # --- content and provenance

    def content(self, inode: int) -> Content:
        """Where the bytes of a file are. Raises IsADirectory."""
        tag, number, where = inodes.unpack(inode)
        if inode == ROOT or kind_of(where) != MEMBER:
            raise IsADirectory(f"inode {inode} is a directory")
        return self.lower.content(number, tag, index_of(where))

    def xattrs(self, inode: int) -> list[bytes]:
        """Names of the extended attributes of a file or directory: those that it has, or `rsync -X` fails."""
        if inode == ROOT:
            return []
        kind = kind_of(inode)
        keys = {FOLDER: [b"shard"], SAMPLE: [b"shard", b"key"]}.get(kind) or self._member_keys(inode)
        return [XATTR + key for key in keys]

    def _member_keys(self, inode: int) -> list[bytes]:
        number, record, where = self._open(inode)
        member = index_of(where)
        if record.symlink(member) is not None:
            return []  # the kernel lets no symbolic link have any of users
        made_up = self.lower.origin(number, member) is None
        stray = record.entry_flags[record.entry_of(member)] & STRAY
        return [b"shard", *([] if stray else [b"key"]), b"member", *([] if made_up else [b"offset"])]

    def getxattr(self, inode: int, name: bytes) -> bytes:
        """Where a file or sample comes from. Raises NoSuchAttribute.

        `shard` is the absolute path of the tar; `key` the sample's key, `member` the whole name as they stand
        in the tar, escapes undone; `offset` the byte in the shard at which the file's content starts. A file
        that is no member of any shard (a label) has the file that it comes from, and its own name.
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
            return self._made_up(inode, what)
        below, number, member = origin
        if what == b"shard":
            return below.shards[number].path
        tag = below.tag(number)
        place = below.record(number, tag).member(member)
        if what == b"offset":
            return b"%d" % place.data
        content = below.content(number, tag, member)
        raw = read_name(content.file.source, place.head)
        check_unchanged(content)
        split = names.split(raw)
        if what == b"member":
            return raw
        if split is None:
            raise NoSuchAttribute(f"{text_of(raw)} is in no sample")
        return raw[: len(raw) - len(split.extension) - 1]

    def _made_up(self, inode: int, what: bytes) -> bytes:
        """An attribute of a file that is no member of a shard. Raises NoSuchAttribute."""
        _, record, where = self._open(inode)
        if what == b"shard":
            return self.content(inode).file.path
        entry = record.entry_of(index_of(where)) if kind_of(where) == MEMBER else index_of(where)
        key = record.entry_path(entry)
        if what == b"offset":
            raise NoSuchAttribute("it lies in no shard")
        return key if what == b"key" else key + b"." + record.extension(index_of(where))

    def totals(self) -> Totals:
        """Sums over the set; for `df` and `status`. Records that were in use are so no more."""
        if self._totals is None or self._totals[0] != self.lower.generation:
            self.lower.renew()  # other processes may have indexed shards since
            found, complete = self._sum()
            # What is left to index may be so by now, and nobody tells.
            self._totals = (self.lower.generation, found) if complete else None
            return found
        return self._totals[1]

    def _sum(self) -> tuple[Totals, bool]:
        """The sums, and whether no shard is left to be indexed."""
        indexed = samples = members = size = damaged = 0
        complete = True
        for number in range(len(self.lower)):
            try:
                one = self.lower.summary(number)
            except ShardError:
                damaged += 1
                continue
            except NotIndexed:
                complete = False
                continue
            indexed += 1
            samples += one.samples
            members += one.members
            size += one.member_bytes
            damaged += bool(one.problems)
        return Totals(len(self.lower), indexed, samples, members, size, damaged), complete


def _behind(kind: int, indexes: range, after: int) -> Iterator[int]:
    """Positions of these indexes behind the cursor `after`."""
    first = max(indexes.start, index_of(after) + 1) if kind_of(after) == kind else indexes.start
    base = kind << 30
    return (base | index for index in range(first, indexes.stop))


def home_of(record: Record, where: int) -> int:
    """The directory that a sample's files are in: its own, or the folder that it shares one with."""
    twin = record.twin_folder(index_of(where)) if kind_of(where) == SAMPLE else None
    return where if twin is None else position(FOLDER, twin)


def _crc_below(record: Record, where: int, name: bytes) -> int:
    if kind_of(where) == FOLDER:
        return record.crc_below(index_of(where), name)
    return zlib.crc32(name, zlib.crc32(record.entry_path(index_of(where)) + b"/"))


def _mtime_or_zero(lower: ShardSet, number: int) -> int:
    try:
        return lower.fingerprint(number)[1]
    except ShardError:
        return 0
