"""What an overlay changes, in terms of samples: for `wdsfs diff`, and for the commit to pack.

`find` walks the upper beside the tree of the lower and tells for each shard which members go, which get other
content, and which come; and in words which samples are removed, changed, renamed and added. What no tar of samples
can hold is told with the reason. Nothing is written.

Where new things go: into a sample that is there behind its last member, a new sample in a shard's directory behind
the shard's last one, everything else into further shards. docs/overlay.md tells a user the same.

What lies where in a tar is `commit/shard_writer.py`, what is written in which shard `commit/plan.py`. One thread.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from wdsfs import inodes, names
from wdsfs.commit.shard_writer import NewMember
from wdsfs.dataset import shard_set
from wdsfs.dataset.shard_set import NotIndexed
from wdsfs.dataset.shard_tree import AT_PARENT, ShardTree
from wdsfs.errors import NoSuchEntry, NotADirectory, ShardError
from wdsfs.index.record import BY_EXTENSION, BY_NAME, STRAY, Record, equal_range
from wdsfs.inodes import FOLDER, MEMBER, ROOT, SAMPLE, index_of, kind_of
from wdsfs.overlay.upper_format import DIRECTORY, FILE, SYMLINK, WHITEOUT, Origin, UpperNode
from wdsfs.storage.identity import sum_of
from wdsfs.tar.scan import read_name

CHUNK = 1 << 20  # bytes that are compared at a time

ADDED, CHANGED, REMOVED, RENAMED, TIME = "added", "changed", "removed", "renamed", "time only"

# Why something cannot be packed.
OUTSIDE = "is outside of a sample: a sample's files are in a directory of its own, below that of a shard"
OUTSIDE_MERGED = "is outside of a sample: a sample's files are in a directory of its own"
OUTSIDE_FILES = "is outside of the shards: files of samples are below the directory of a shard, or below a new one"
NO_EXTENSION = "has no extension, so it would be in no sample"
HIDDEN = "its name would start with a dot, which readers skip"
META = "a name like __this__ at the top belongs to the set, not to a sample"
DOTTED_KEY = "the name of the sample has a dot: readers would end the key there"
ODD_FOLDER = "the name of its folder would be read as another one"
OTHER_STEM = "does not start with the name of its sample and a dot"
ONLY_CASE = "differs from another file of its sample only in letter case: readers take the two for one"
RESERVED = "readers keep something of their own under this name: the webdataset library stops at such a column"
SYMBOLIC = "is a symbolic link"
SPECIAL = "is no regular file, but a fifo, a socket or a device"
# What would mix up or lose something else, too.
TWICE = "would have the same name in the tar as another file"
OLD_STEM = (
    "does not start with the name of its directory and a dot: whoever renames a sample renames its files, too"
)
MEETING = "would make one sample of two with the same key: rename one of them"
LINKED = "has hard links in the shard, which cannot be changed"
DOUBLED = (
    "has an extension twice, in members that lie apart: side by side readers refuse them; remove or rename one"
)
# Left out unless asked for.
LEAVING = "looks like what an editor or a desktop has left behind; a commit packs it with --with-leavings"
# Notes: nothing is left out.
JOINED = "is several tars joined: a commit makes one of them, which every reader sees whole"
APART = "has samples whose members lie apart: a commit puts them side by side, as other readers need them"
EMPTY_DIRECTORY = "is an empty directory, and a tar of samples has none"
DANGLING = "hides nothing: there is nothing of this name below"
TIME_IGNORED = "has another time than in the shard and the same content"
UNEXTRACTABLE = "tar cannot extract a member of this name"
FILE_AND_FOLDER = (
    "tar cannot extract it: another member needs a directory where this is a file, or the other way round"
)
SAME = "has what the shard has; another mode, owner or attribute has no place in a tar of samples"


class ChangedSample(NamedTuple):
    """A sample that differs from the lower, with its extensions. `was` is the path that a renamed one had, and of
    the extensions in `times` the content is the same and the time another."""

    kind: str
    path: bytes
    added: tuple[bytes, ...] = ()
    changed: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    was: bytes = b""
    times: tuple[bytes, ...] = ()


class Rules(NamedTuple):
    """What counts as a change: files that programs have left behind; another time (whole seconds) alone."""

    with_leavings: bool = False
    ignore_times: bool = False


class Remark(NamedTuple):
    """A path below the upper, and what is to be said of it."""

    path: bytes
    reason: str


class NewSample(NamedTuple):
    """A sample that is in no shard yet: its key, and its members in order."""

    key: bytes
    members: tuple[NewMember, ...]


@dataclass(slots=True)
class ShardChanges:
    """What becomes of a shard. Members and entries are numbers in its record.

    `members` have these new ones in their place, none where one goes; new ones come `behind` others; `appended`
    are whole samples. `entries` are the samples of which something stays and something changes. `fingerprint` is
    that of the record with these numbers.
    """

    members: dict[int, tuple[NewMember, ...]] = field(default_factory=dict)
    behind: dict[int, tuple[NewMember, ...]] = field(default_factory=dict)
    appended: list[NewSample] = field(default_factory=list)
    entries: set[int] = field(default_factory=set)
    fingerprint: tuple[int, int, int] = (0, 0, 0)

    def __bool__(self) -> bool:
        return bool(self.members or self.behind or self.appended)


@dataclass(slots=True)
class Changes:
    """All that an overlay changes.

    `shards` by number, those that change only; `further` the samples of each new shard directory, by its path
    (all in one for a merged tree). `samples` and `others` (members of no sample) are what `diff` shows, in the
    order of the shards and their tars, then of the paths. A commit that is to lose nothing needs `unpackable`
    empty; `conflicts` are what no commit can do at all; `leavings` are not packed; `notes` are harmless.

    `upper` is what was looked at, and `covered` are the paths of its files of which nothing has to be written: the
    shard has the same, or they are further names of a file that is written. A commit accounts for the rest.
    """

    shards: dict[int, ShardChanges] = field(default_factory=dict)
    further: dict[bytes, list[NewSample]] = field(default_factory=dict)
    samples: list[ChangedSample] = field(default_factory=list)
    others: list[ChangedSample] = field(default_factory=list)
    unpackable: list[Remark] = field(default_factory=list)
    conflicts: list[Remark] = field(default_factory=list)
    notes: list[Remark] = field(default_factory=list)
    leavings: list[Remark] = field(default_factory=list)
    upper: UpperNode | None = field(default=None, compare=False)
    covered: set[bytes] = field(default_factory=set, compare=False)


def find(
    tree: ShardTree,
    upper: UpperNode,
    open_file: Callable[[UpperNode], int],
    rules: Rules = Rules(),  # noqa: B008  # immutable
) -> Changes:
    """What the upper changes in the tree. `open_file` opens one of its files.

    Raises ShardErrors for shards that have to be looked at and cannot be, OSErrors of the upper.
    """
    while True:
        walk = _Walk(tree, open_file, rules)
        try:
            tree.prepare()
            walk.directory(upper, _Spot(b"", ROOT))
            found = _SampleSummary(walk).changes()
            found.upper, found.covered = upper, walk.covered
            return found
        except NotIndexed as wanted:
            tree.lower.index_now(wanted.number)


# --- walking -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Spot:
    """A directory of the upper: its shown path, and what of the lower shows through or is hidden there.

    `lower` is the inode number of the lower's directory, 0 if there is none. `shard` is its number, None for a new
    directory at the top and everywhere in a merged tree; `top` is the name of the former. `components` are the
    folders of what lies in it, as they stand in the tar. `left`: a program has left it behind, with all in it.
    """

    path: bytes
    lower: int
    shard: int | None = None
    top: bytes = b""
    components: tuple[bytes, ...] = ()
    left: bool = False

    def below(self, name: bytes) -> bytes:
        return self.path + b"/" + name if self.path else name


class _UpperFile(NamedTuple):
    """A file of the upper. `mtime_ns` and `size` (bytes) as they are now."""

    node: UpperNode
    path: bytes
    size: int
    mtime_ns: int

    def new(self, name: bytes) -> NewMember:
        return NewMember(name, self.path, self.size, self.mtime_ns)


class _Home(NamedTuple):
    """Which sample a new file belongs to: one that is there (`entry` of a shard), or a new one with this key."""

    shard: int | None
    entry: int
    top: bytes
    key: bytes


class _Walk:
    """Collects what happens to which member."""

    def __init__(self, tree: ShardTree, open_file: Callable[[UpperNode], int], rules: Rules) -> None:
        self.tree, self.lower, self.open_file, self.rules = tree, tree.lower, open_file, rules
        self.gone: dict[int, set[int]] = {}  # by shard: members that are hidden
        self.files: dict[int, dict[int, _UpperFile]] = {}  # by shard and member: what replaces it
        self.times: dict[int, set[int]] = {}  # by shard: those that are replaced by the same content
        self.kept: dict[int, set[int]] = {}  # by shard: members that a copy of themselves covers
        self.fresh: dict[_Home, dict[bytes, _UpperFile]] = {}  # by sample and extension: files that come
        self.origins: dict[_Home, Origin] = {}  # the sample that a new one was before
        self.paths: dict[tuple[int, int], bytes] = {}  # by shard and entry: where the sample is shown
        self.unpackable: list[Remark] = []
        self.conflicts: list[Remark] = []
        self.notes: list[Remark] = []
        self.leavings: list[Remark] = []
        self.covered: set[bytes] = set()  # paths of files of the upper of which nothing has to be written
        self._entries: dict[tuple[tuple[bytes, ...], bytes], tuple[int, int] | None] = {}

    def record(self, number: int) -> Record:
        return self.lower.record(number)

    # --- directories

    def directory(self, node: UpperNode, spot: _Spot) -> None:
        """Take what is in a directory of the upper, and below it."""
        waiting = [(node, spot)]
        while waiting:
            node, spot = waiting.pop()
            if node.opaque and spot.lower:
                self.hide(spot.lower, spot.path)
            for name in sorted(node.children):
                child = node.children[name]
                inner = self._child(node, spot, name, child)
                if inner is not None:
                    waiting.append((child, inner))
            if not spot.lower and not any(child.kind != WHITEOUT for child in node.children.values()):
                self.notes.append(Remark(spot.path, EMPTY_DIRECTORY))

    def _child(self, parent: UpperNode, spot: _Spot, name: bytes, child: UpperNode) -> _Spot | None:
        """Take one thing in a directory; returns where to go on if it is a directory."""
        path = spot.below(name)
        found = self._lookup(spot, name)
        if child.kind == WHITEOUT:
            if found is None:
                if not parent.opaque:
                    self.notes.append(Remark(path, DANGLING))
            else:
                self._hide_child(spot, name, found, path)
            return None
        if child.kind == DIRECTORY:
            return self._enter(spot, name, child, found)
        if found is not None and (kind_of(found) != MEMBER or child.kind != FILE):
            if child.kind == SYMLINK and self._is_same_link(found, child):
                _, number, where = inodes.unpack(found)
                self.kept.setdefault(number, set()).add(index_of(where))
                self.covered.add(path)
                return None
            self._hide_child(spot, name, found, path)
            found = None
        if found is None and self._is_left(spot, name, child):
            self.leavings.append(Remark(path, LEAVING))
        elif child.kind != FILE:
            self.unpackable.append(Remark(path, SYMBOLIC if child.kind == SYMLINK else SPECIAL))
        elif found is not None:
            self._replace(spot, name, found, child, path)
        else:
            # What does not show the lower is all that is left of a sample that was renamed to it.
            self._add(spot, name, child, path, parent.opaque or not spot.lower)
        return None

    def _lookup(self, spot: _Spot, name: bytes) -> int | None:
        """The inode number of a child of the lower's directory, hidden or not."""
        if not spot.lower:
            return None
        try:
            return self.tree.lookup(spot.lower, name).inode
        except (NoSuchEntry, NotADirectory):
            return None

    def _enter(self, spot: _Spot, name: bytes, child: UpperNode, found: int | None) -> _Spot:
        path = spot.below(name)
        if found is not None and kind_of(found) == MEMBER:
            self._hide_child(spot, name, found, path)
            found = None
        left = spot.left or (found is None and names.is_leaving(name, directory=True))
        if spot.lower == ROOT and not self.tree.merged:
            number = None if found is None else inodes.unpack(found)[1]
            inner = _Spot(path, found or 0, number, name if number is None else b"", (), left)
        else:
            components = (*spot.components, self._plain(name, found))
            inner = _Spot(path, found or 0, spot.shard, spot.top, components, left)
        origin = child.origin
        if found is None and origin is not None and not self.tree.files_layout and inner.components:
            self.origins[self._home(inner)] = origin
        return inner

    def _is_left(self, spot: _Spot, name: bytes, child: UpperNode) -> bool:
        """Whether a new file is one that some program has left behind.

        Semantics decision: a column that a sample has in its shard is none, whatever its name; nor is it when the
        sample is renamed. (An editor's `cls~` may be the file that was `cls` in the shard.)
        """
        if self.rules.with_leavings or not (spot.left or names.is_leaving(name)):
            return False
        place = None if child.origin is None else self.place_of(child.origin)
        if place is None or kind_of(place[1]) != MEMBER:
            return True
        number, member = place[0], index_of(place[1])
        if self.tree.domain == BY_EXTENSION:
            return not names.is_leaving(self.record(number).extension(member))
        return not names.is_leaving(self.member_name(number, member).rpartition(b"/")[2])

    def place_of(self, origin: Origin) -> tuple[int, int] | None:
        """The shard and the position in its record of an origin; None if the shard is not what it was."""
        _, number, where = inodes.unpack(origin.inode)
        if number >= len(self.lower) or sum_of(self.lower.fingerprint(number)) != origin.sum:
            return None
        record = self.record(number)
        if index_of(where) >= (record.entries if kind_of(where) == SAMPLE else record.members):
            return None
        return number, where

    def _plain(self, name: bytes, found: int | None) -> bytes:
        """The name of a directory as it stands in the tar."""
        if found is None:
            plain = names.unescape(name)
            return plain if names.escape(plain) == name else name
        _, number, where = inodes.unpack(found)
        record = self.record(number)
        kind = kind_of(where)
        return record.folder_name[index_of(where)] if kind == FOLDER else record.entry_name[index_of(where)]

    # --- what goes

    def hide(self, inode: int, path: bytes) -> None:
        """All that the lower's directory shows is gone."""
        if kind_of(inode) == SAMPLE:
            _, number, where = inodes.unpack(inode)
            entry = index_of(where)
            self.paths[number, entry] = path
            self.gone.setdefault(number, set()).update(self.record(number).entry_members(entry))
            return
        for name, child, cursor in self._listed(inode):
            self._hide_one(child, cursor, path + b"/" + name if path else name)

    def _listed(self, inode: int) -> list[tuple[bytes, int, int]]:
        return [(e.name, e.node.inode, e.cursor) for e in self.tree.listing(inode, AT_PARENT)]

    def _hide_one(self, inode: int, cursor: int, path: bytes) -> None:
        # The first shards of the mount's top have low cursors; the number itself says enough there.
        if kind_of(inode) != MEMBER:
            self.hide(inode, path)
        elif self._is_link(inode, cursor):
            self.conflicts.append(Remark(path, LINKED))
        else:
            self._hide_member(inode, path)

    def _hide_child(self, spot: _Spot, name: bytes, inode: int, path: bytes) -> None:
        if kind_of(inode) == MEMBER and self._is_linked(inode):
            self.conflicts.append(Remark(path, LINKED))
        elif kind_of(inode) == MEMBER:
            self._hide_member(inode, path)
        else:
            self.hide(inode, path)

    def _hide_member(self, inode: int, path: bytes) -> None:
        _, number, where = inodes.unpack(inode)
        self._tell_path(number, index_of(where), path)
        self.gone.setdefault(number, set()).add(index_of(where))

    def _tell_path(self, number: int, member: int, path: bytes) -> None:
        """Keep the path of a member's sample: its directory; in the files layout the member without extension."""
        record = self.record(number)
        entry = record.entry_of(member)
        if record.entry_flags[entry] & STRAY:
            shown = path
        elif self.tree.files_layout and record.has_links and record.link_count(member) > 1:
            # The path may be that of any link, in any folder.
            top = [] if self.tree.merged else [self.lower.shards[number].name]
            shown = b"/".join([*top, *map(names.escape, record.entry_path(entry).split(b"/"))])
        elif self.tree.files_layout:
            folder, base = names.split_folder(path)
            shown = folder + base.partition(b".")[0]
        else:
            shown = path.rpartition(b"/")[0]
        self.paths.setdefault((number, entry), shown)

    def _is_link(self, inode: int, cursor: int) -> bool:
        """Whether what a listing has at `cursor` is another name of the member with this number."""
        return self._is_linked(inode) and index_of(cursor) != index_of(inode)

    def _is_linked(self, inode: int) -> bool:
        _, number, where = inodes.unpack(inode)
        record = self.record(number)
        return record.has_links and record.link_count(index_of(where)) > 1

    # --- what comes

    def _replace(self, spot: _Spot, name: bytes, inode: int, child: UpperNode, path: bytes) -> None:
        _, number, where = inodes.unpack(inode)
        member, file = index_of(where), self._file(child, path)
        if self.record(number).symlink(member) is not None:
            self._hide_child(spot, name, inode, path)
            self._add(spot, name, child, path, False)
            return
        same = self.has_content(number, member, file)
        if same and (self.rules.ignore_times or self.has_time(number, member, file)):
            self.kept.setdefault(number, set()).add(member)
            self.covered.add(path)
            self.notes.append(Remark(path, SAME if self.has_time(number, member, file) else TIME_IGNORED))
        elif self._is_linked(inode) and not self._has_all_names(number, member, child):
            self.conflicts.append(Remark(path, LINKED))
        else:
            self._tell_path(number, member, path)
            files = self.files.setdefault(number, {})
            if member in files:  # further names of a file are links in the tar, too
                self.covered.add(path)
            else:
                files[member] = file
                if same:
                    self.times.setdefault(number, set()).add(member)

    def _has_all_names(self, number: int, member: int, child: UpperNode) -> bool:
        """Whether a file replaces all names of a member with hard links, which then are links of the new one."""
        return not self.tree.files_layout or len(child.places()) >= self.record(number).link_count(member)

    def _file(self, node: UpperNode, path: bytes) -> _UpperFile:
        fd = self.open_file(node)
        try:
            status = os.fstat(fd)
        finally:
            os.close(fd)
        return _UpperFile(node, path, status.st_size, status.st_mtime_ns)

    def has_time(self, number: int, member: int, file: _UpperFile) -> bool:
        return file.mtime_ns // 10**9 == self.record(number).member(member).mtime_ns // 10**9

    def has_content(self, number: int, member: int, file: _UpperFile) -> bool:
        """Whether a file has what the shard has: copied up for a change of mode, or written as it was before."""
        if file.size != self.record(number).member(member).size:
            return False
        content = self.lower.content(number, self.lower.tag(number), member)
        fd = self.open_file(file.node)
        try:
            return all(
                os.pread(fd, CHUNK, offset) == shard_set.read(content, offset, CHUNK)
                for offset in range(0, file.size, CHUNK)
            )
        finally:
            os.close(fd)

    def _is_same_link(self, inode: int, child: UpperNode) -> bool:
        _, number, where = inodes.unpack(inode)
        if kind_of(where) != MEMBER:
            return False
        target = self.record(number).symlink(index_of(where))
        if target is None or child.parent is None:
            return False
        directory = self.open_file(child.parent)
        try:
            return os.readlink(child.name, dir_fd=directory) == target
        finally:
            os.close(directory)

    def _add(self, spot: _Spot, name: bytes, child: UpperNode, path: bytes, alone: bool) -> None:
        """A file where the lower has none: of a sample that is there, of a new one, or of none at all.

        `alone`: the lower has nothing to do with its directory.
        """
        at_top = spot.shard is None and not spot.top and not self.tree.merged
        found = (
            None
            if at_top
            else self._in_files(spot, name)
            if self.tree.files_layout
            else self._in_sample(spot, name)
        )
        if at_top or found is None:
            self.unpackable.append(Remark(path, self._outside()))
        elif found == OTHER_STEM and alone and not name.startswith(b"."):
            self.conflicts.append(Remark(path, OLD_STEM))  # to leave it out would be to lose the sample
        elif isinstance(found, str):
            self.unpackable.append(Remark(path, found))
        else:
            home, extension = found
            files = self.fresh.setdefault(home, {})
            if extension in files:
                self.conflicts.append(Remark(path, TWICE))
            files[extension] = self._file(child, path)

    def _outside(self) -> str:
        if self.tree.files_layout:
            return OUTSIDE_FILES
        return OUTSIDE_MERGED if self.tree.merged else OUTSIDE

    def _in_sample(self, spot: _Spot, name: bytes) -> tuple[_Home, bytes] | str | None:
        """The sample and the extension of a new file in a sample's directory, or why it has none."""
        if not spot.components:
            return None
        home = self._home(spot)
        if home.shard is not None and home.entry >= 0:
            self.paths.setdefault((home.shard, home.entry), spot.path)
        extension = self._plain(name, None)
        if self.tree.domain == BY_NAME:
            stem = spot.components[-1] + b"."
            if not extension.startswith(stem):
                return NO_EXTENSION if b"." not in extension else OTHER_STEM
            extension = extension[len(stem) :]
        return self._checked(home, extension)

    def _home(self, spot: _Spot) -> _Home:
        """The sample that lives in a directory: the lower's, or a new one."""
        _, number, where = inodes.unpack(spot.lower)
        if spot.lower and kind_of(where) == SAMPLE:
            return self._existing(number, index_of(where))
        if spot.lower and kind_of(where) == FOLDER and spot.lower != ROOT:
            twin = self._twin(spot.lower)
            if twin is not None:
                return self._existing(*twin)
        return _Home(spot.shard, -1, spot.top, b"/".join(spot.components))

    def _twin(self, folder: int) -> tuple[int, int] | None:
        """The shard and the sample that shares its directory with a folder. Its files are listed first."""
        first = next(self.tree.listing(folder, AT_PARENT), None)
        if first is None or kind_of(first.node.inode) != MEMBER:
            return None
        _, number, where = inodes.unpack(first.node.inode)
        return number, self.record(number).entry_of(index_of(where))

    def _existing(self, number: int, entry: int) -> _Home:
        """A sample of a shard, with the key as it stands in the tar (`./` in front, for example)."""
        record = self.record(number)
        member = record.entry_member[entry]
        return _Home(number, entry, b"", self.member_name(number, member)[: -len(record.extension(member)) - 1])

    def member_name(self, number: int, member: int) -> bytes:
        """The name of a member as it stands in the tar."""
        content = self.lower.content(number, self.lower.tag(number), member)
        return read_name(content.file.source, self.record(number).member(member).head)

    def _in_files(self, spot: _Spot, name: bytes) -> tuple[_Home, bytes] | str | None:
        """The sample and the extension of a new file in the files layout, or why it has none."""
        base = self._plain(name, None)
        stem, dot, extension = base.partition(b".")
        if not dot:
            return NO_EXTENSION
        place = self._entry_at(spot, stem)
        key = b"/".join((*spot.components, stem))
        home = _Home(spot.shard, -1, spot.top, key) if place is None else self._existing(*place)
        if place is not None:
            self.paths.setdefault(place, spot.below(stem))
        return self._checked(home, extension)

    def _entry_at(self, spot: _Spot, stem: bytes) -> tuple[int, int] | None:
        """The first sample of this key, in the shard or in the merged set."""
        key = spot.components, stem
        if spot.shard is not None:
            entry = self._entry_in(spot.shard, *key)
            return None if entry is None else (spot.shard, entry)
        if spot.top:
            return None
        if key not in self._entries:
            found = ((n, self._entry_in(n, *key)) for n in range(len(self.lower)))
            self._entries[key] = next(((n, entry) for n, entry in found if entry is not None), None)
        return self._entries[key]

    def _entry_in(self, number: int, components: tuple[bytes, ...], stem: bytes) -> int | None:
        record = self.record(number)
        folder = _folder_of(record, components)
        if folder is None:
            return None
        entries = record.find_entries(folder, stem, record.crc_below(folder, stem))
        return next((entry for entry in entries if not record.entry_flags[entry] & STRAY), None)

    def _checked(self, home: _Home, extension: bytes) -> tuple[_Home, bytes] | str:
        """See that readers find this key and this extension in the name that they make."""
        if extension.lower() in names.RESERVED:
            return RESERVED
        found = names.split(home.key + b"." + extension)
        if found is None:
            base = home.key.rpartition(b"/")[2]
            return HIDDEN if not base or base.startswith(b".") else META
        if found.folder + found.stem != home.key:
            return DOTTED_KEY
        if home.entry < 0 and b"/".join((*names.folder_components(found.folder), found.stem)) != home.key:
            return ODD_FOLDER
        return home, extension


# --- putting it together -----------------------------------------------------------------------------------


class _SampleSummary:
    """Makes of what was found on the walk the changes of shards, and what is said of samples."""

    def __init__(self, walk: _Walk) -> None:
        self.walk, self.lower = walk, walk.lower
        self.found = Changes(
            unpackable=walk.unpackable, conflicts=walk.conflicts, notes=walk.notes, leavings=walk.leavings
        )
        self.added: dict[tuple[int, int], dict[bytes, _UpperFile]] = {}  # by shard and entry
        self.new: dict[_Home, dict[bytes, _UpperFile]] = {}
        for home, files in walk.fresh.items():
            if home.shard is not None and home.entry >= 0:
                self.added[home.shard, home.entry] = files
            else:
                self.new[home] = files
        self.keys = {(h.shard, h.entry): h.key for h in walk.fresh if h.shard is not None and h.entry >= 0}
        self.renamed: dict[tuple[int, int], _Home] = {}
        self.moved: dict[int, list[NewMember]] = {}  # by shard: members that get other names in their places
        self.were: dict[_Home, tuple[int, int]] = {}  # the same the other way round

    def changes(self) -> Changes:
        walk = self.walk
        for number, members in walk.gone.items():
            members.difference_update(walk.files.get(number, ()), walk.kept.get(number, ()))
        self._refuse_half_linked()
        self._find_renamed()
        self._drop_twins()
        numbers = {*walk.gone, *walk.files, *(number for number, _ in self.added)}
        numbers |= {home.shard for home in self.new if home.shard is not None}
        for number in sorted(numbers):
            changes = self._shard(number)
            if changes:
                self.found.shards[number] = changes
        self._tell_added()
        for number in range(len(self.lower)):
            if not self.lower.shards[number].reading.is_plain:
                with contextlib.suppress(ShardError):  # one that cannot be read cannot be written anew, either
                    self._tell_mended(number, walk.record(number))
        self._note_unextractable()
        self.found.leavings.sort()
        self.found.unpackable.sort()
        self.found.conflicts.sort()
        self.found.notes.sort()
        return self.found

    # --- renamed samples

    def _find_renamed(self) -> None:
        """Match new samples with those that they were: by their directory's origin, or else that of all files."""
        for home in sorted(self.new, key=_order):
            was = self._origin(home)
            if was is not None and was not in self.renamed and self._is_removed(*was):
                self.renamed[was], self.were[home] = home, was

    def _origin(self, home: _Home) -> tuple[int, int] | None:
        origin = self.walk.origins.get(home)
        if origin is not None and kind_of(origin.inode) == SAMPLE:
            return self._entry_of(origin)
        origins = [file.node.origin for file in self.new[home].values()]
        found = {None if one is None or kind_of(one.inode) != MEMBER else self._entry_of(one) for one in origins}
        return found.pop() if len(found) == 1 else None

    def _entry_of(self, origin: Origin) -> tuple[int, int] | None:
        """The shard and the sample that an origin is, or is in; None if the shard is not what it was.

        Semantics decision: a member of no sample is nobody's origin. Renamed to a name that makes it a sample, it
        is removed where it was, and the sample is a new one.
        """
        place = self.walk.place_of(origin)
        if place is None:
            return None
        number, where = place
        record = self.walk.record(number)
        entry = index_of(where) if kind_of(where) == SAMPLE else record.entry_of(index_of(where))
        return None if record.entry_flags[entry] & STRAY else (number, entry)

    def _refuse_half_linked(self) -> None:
        """Names of one member that are not one file any more: links in the tar would follow the new content."""
        for number, files in self.walk.files.items():
            for member in files.keys() & self.walk.kept.get(number, set()):
                self.found.conflicts.append(Remark(files[member].path, LINKED))

    def _is_removed(self, number: int, entry: int) -> bool:
        gone = self.walk.gone.get(number, set())
        members = self.walk.record(number).entry_members(entry)
        return (number, entry) not in self.added and all(member in gone for member in members)

    # --- extensions that readers take for one

    def _drop_twins(self) -> None:
        """Leave out new files whose extensions differ only in letter case from others of the sample.

        What the lower has already stays as it is, also under another key.
        """
        for place, files in list(self.added.items()):
            gone = self.walk.gone.get(place[0], set())
            there = [(member, one) for member, one in self._extensions(*place) if member not in gone]
            # Shown as `jpg~2` beside a directory `jpg`, which is gone now and has given its name free.
            self.found.conflicts += (Remark(files[one].path, TWICE) for _, one in there if one in files)
            self._drop_twins_of(files, there)
            if not files:
                del self.added[place]
        for home, files in self.new.items():
            was = self.were.get(home)
            before = [] if was is None else [one for one in self._extensions(*was) if one[1] in files]
            self._drop_twins_of(files, before)

    def _extensions(self, number: int, entry: int) -> list[tuple[int, bytes]]:
        record = self.walk.record(number)
        return [(member, record.extension(member)) for member in record.entry_members(entry)]

    def _drop_twins_of(self, files: dict[bytes, _UpperFile], there: list[tuple[int, bytes]]) -> None:
        first = {_lower_case(extension): extension for _, extension in there}
        old = {extension for _, extension in there}
        for extension in sorted(files.keys() - old):
            if first.setdefault(_lower_case(extension), extension) != extension:
                self.found.unpackable.append(Remark(files.pop(extension).path, ONLY_CASE))

    # --- one shard

    def _shard(self, number: int) -> ShardChanges:
        record, walk = self.walk.record(number), self.walk
        size, mtime_ns, identity = record.fingerprint
        changes = ShardChanges(fingerprint=(size, mtime_ns, identity))
        gone, files = walk.gone.get(number, set()), walk.files.get(number, {})
        touched = {record.entry_of(member) for member in (*gone, *files)}
        touched |= {entry for shard, entry in self.added if shard == number}
        for entry in sorted(touched, key=lambda entry: record.member(record.entry_member[entry]).head):
            self._entry(number, record, entry, changes)
        for home in sorted((home for home in self.new if home.shard == number), key=_order):
            if not self._stays(home):
                changes.appended.append(NewSample(home.key, self._members(home.key, self.new[home])))
        self._refuse_meetings(number, record, changes)
        return changes

    def _stays(self, home: _Home) -> bool:
        """Whether a new sample is a renamed one, in the shard in which it was."""
        return home in self.were and self.were[home][0] == home.shard

    def _entry(self, number: int, record: Record, entry: int, changes: ShardChanges) -> None:
        walk = self.walk
        members = record.entry_members(entry)
        gone = [member for member in members if member in walk.gone.get(number, ())]
        files = {member: walk.files.get(number, {}).get(member) for member in members}
        replaced = {member: file for member, file in files.items() if file is not None}
        path = walk.paths.get((number, entry), b"")
        for member in gone:
            changes.members[member] = ()
            if record.has_links and record.link_count(member) > 1:
                self.found.conflicts.append(Remark(path, LINKED))
        for member, file in replaced.items():
            changes.members[member] = (file.new(walk.member_name(number, member)),)
        added = self.added.get((number, entry), {})
        times = walk.times.get(number, set())
        if record.entry_flags[entry] & STRAY:
            kind = REMOVED if not replaced else TIME if times.issuperset(replaced) else CHANGED
            self.found.others.append(ChangedSample(kind, path))
            return
        home = self.renamed.get((number, entry))
        if home is not None:
            self._rename(number, record, entry, home, changes)
            return
        if added:
            changes.behind[members[-1]] = self._members(self.keys[number, entry], added)
        stays = len(gone) < len(members) or bool(added)
        if stays:
            changes.entries.add(entry)
        changed = tuple(record.extension(member) for member in replaced if member not in times)
        timed = tuple(record.extension(member) for member in replaced if member in times)
        removed = tuple(map(record.extension, gone))
        kind = REMOVED if not stays else CHANGED if added or changed or removed else TIME
        self.found.samples.append(ChangedSample(kind, path, tuple(sorted(added)), changed, removed, times=timed))

    def _rename(self, number: int, record: Record, entry: int, home: _Home, changes: ShardChanges) -> None:
        """A renamed sample stays where it was, and its members in their order, unless it went to another shard."""
        files = dict(self.new[home])
        members = record.entry_members(entry)
        before = [record.extension(member) for member in members]
        added, removed = sorted(files.keys() - set(before)), [one for one in before if one not in files]
        kept = [(member, one) for member, one in zip(members, before, strict=True) if one in files]
        changed, times = [], []
        for member, one in kept:
            if not self.walk.has_content(number, member, files[one]):
                changed.append(one)
            elif not self.walk.has_time(number, member, files[one]):
                times.append(one)
        was, path = self.walk.paths[number, entry], self._path(home)
        told = ChangedSample(RENAMED, path, tuple(added), tuple(changed), tuple(removed), was, tuple(times))
        self.found.samples.append(told)
        if home.shard != number:
            return
        changes.entries.add(entry)
        for member, extension in zip(members, before, strict=True):
            if extension in files:
                new = files.pop(extension).new(home.key + b"." + extension)
                changes.members[member] = (new,)
                self.moved.setdefault(number, []).append(new)
        if files:
            changes.behind[members[-1]] = self._members(home.key, files)

    def _members(self, key: bytes, files: dict[bytes, _UpperFile]) -> tuple[NewMember, ...]:
        """Members in the order in which webdataset's writer puts them: sorted by extension."""
        return tuple(files[extension].new(key + b"." + extension) for extension in sorted(files))

    def _path(self, home: _Home) -> bytes:
        """Where a new sample is shown."""
        file = min(self.new[home].values(), key=lambda file: file.path)
        if not self.walk.tree.files_layout:
            return file.path.rpartition(b"/")[0]
        folder, base = names.split_folder(file.path)
        return folder + base.partition(b".")[0]

    def _refuse_meetings(self, number: int, record: Record, changes: ShardChanges) -> None:
        """Two samples with one key that come to lie side by side would be one for every reader."""
        if not _may_repeat(record, changes):
            return
        last: tuple[int, bytes] | None = None
        for place, entry, key in _in_order(record, changes):
            if last is not None and key == last[1] and place > last[0] + 1:
                path = self.walk.paths.get((number, entry)) or self.lower.shards[number].name + b"/" + key
                self.found.conflicts.append(Remark(path, MEETING))
            last = place, key

    # --- shards that other tools read in another way

    def _tell_mended(self, number: int, record: Record) -> None:
        """What a commit puts right in a shard, and what it cannot put right."""
        name = self.lower.shards[number].name
        if record.end_marks:
            self.found.notes.append(Remark(name, JOINED))
        if record.apart:
            self.found.notes.append(Remark(name, APART))
        changes = self.found.shards.get(number, ShardChanges())
        for entry in record.samples_apart():
            left = [_lower_case(extension) for extension in _extensions_left(record, entry, changes)]
            if len(set(left)) < len(left):
                path = self.walk.paths.get((number, entry)) or name + b"/" + record.entry_path(entry)
                self.found.conflicts.append(Remark(path, DOUBLED))

    # --- new samples

    def _tell_added(self) -> None:
        renamed = set(self.renamed.values())
        for home in sorted(self.new, key=_order):
            if home.shard is None:
                sample = NewSample(home.key, self._members(home.key, self.new[home]))
                self.found.further.setdefault(home.top, []).append(sample)
            if home not in renamed:
                self.found.samples.append(ChangedSample(ADDED, self._path(home), tuple(sorted(self.new[home]))))

    # --- names that tar cannot extract

    def _note_unextractable(self) -> None:
        """Have notes on new names with which tar cannot extract a shard. Readers of samples do not mind them."""
        for number, changes in self.found.shards.items():
            new = [*self.moved.get(number, ()), *(one for news in changes.behind.values() for one in news)]
            new += [one for sample in changes.appended for one in sample.members]
            self._note_unextractable_of(new, self.walk.record(number), changes)
        for samples in self.found.further.values():
            self._note_unextractable_of([one for sample in samples for one in sample.members], None, None)

    def _note_unextractable_of(
        self, new: list[NewMember], record: Record | None, changes: ShardChanges | None
    ) -> None:
        files = {one.name for one in new}
        folders = {folder for one in new for folder in _folders(one.name)}
        for one in new:
            why = names.unextractable(one.name)
            meets = one.name in folders or not files.isdisjoint(_folders(one.name))
            if record is not None and changes is not None:
                meets = meets or _meets(one.name, record, changes)
            if why is not None:
                self.found.notes.append(Remark(one.path, f"{UNEXTRACTABLE}: {why}"))
            elif meets:
                self.found.notes.append(Remark(one.path, FILE_AND_FOLDER))


def _folders(name: bytes) -> Iterator[bytes]:
    """The directories that a member lies in: `a/b/c.txt` -> `a`, `a/b`."""
    at = name.find(b"/")
    while at >= 0:
        yield name[:at]
        at = name.find(b"/", at + 1)


def _meets(name: bytes, record: Record, changes: ShardChanges) -> bool:
    """Whether a new member is a file where the shard has a directory, or has a directory where that has a file."""
    if record.find_path(name) is not None:
        return True
    return any(changes.members.get(one, True) for folder in _folders(name) for one in _files_at(folder, record))


def _files_at(path: bytes, record: Record) -> Iterator[int]:
    """The members of a shard with this plain name."""
    *way, base = path.split(b"/")
    folder = record.find_path(b"/".join(way)) if way else 0
    if folder is None:
        return
    stem, dot, extension = base.partition(b".")
    for entry in record.find_entries(folder, base, record.crc_below(folder, base)):
        if record.entry_flags[entry] & STRAY:
            yield from record.entry_members(entry)
    for entry in record.find_entries(folder, stem, record.crc_below(folder, stem)) if dot else ():
        if not record.entry_flags[entry] & STRAY:
            yield from record.find_members(entry, extension)


def _folder_of(record: Record, components: Sequence[bytes]) -> int | None:
    folder: int | None = 0
    for component in components:
        if folder is not None:
            folder = record.find_folder(folder, component, record.crc_below(folder, component))
    return folder


def _extensions_left(record: Record, entry: int, changes: ShardChanges) -> Iterator[bytes]:
    """The extensions that a sample has with these changes."""
    for member in record.entry_members(entry):
        new = changes.members.get(member)
        if new is None:
            yield record.extension(member)
        for one in (*(new or ()), *changes.behind.get(member, ())):
            found = names.split(one.name)
            if found is not None:
                yield found.extension


def _lower_case(extension: bytes) -> str:
    """An extension as the webdataset library has it in a sample."""
    return extension.decode("utf-8", "surrogateescape").lower()


def _order(home: _Home) -> tuple[bool, int, bytes, bytes]:
    return home.shard is None, home.shard or 0, home.top, home.key


def _may_repeat(record: Record, changes: ShardChanges) -> bool:
    """Whether a key may come twice in a changed shard. Nearly never, and only then is every sample looked at."""
    sums = record.array("entry.hash")
    if (sums[1:] == sums[:-1]).any():
        return True
    new = {sample.key for sample in changes.appended}
    for member, news in changes.members.items():
        new.update({_key_of(one.name) for one in news} - {record.entry_path(record.entry_of(member))})
    return any(equal_range(record.column["entry.hash"], zlib.crc32(key)) for key in new)


def _in_order(record: Record, changes: ShardChanges) -> Iterator[tuple[int, int, bytes]]:
    """What is left of the samples of a changed shard, in order: (place that it had, entry, plain key).

    New samples have places that nothing had and that are no neighbours.
    """
    entries = [entry for entry in range(record.entries) if not record.entry_flags[entry] & STRAY]
    entries.sort(key=lambda entry: record.member(record.entry_member[entry]).head)
    for place, entry in enumerate(entries):
        members = record.entry_members(entry)
        left = [member for member in members if changes.members.get(member, True)]
        if not left and not any(member in changes.behind for member in members):
            continue
        new = next((new[0] for member in left if (new := changes.members.get(member))), None)
        yield place, entry, record.entry_path(entry) if new is None else _key_of(new.name)
    for at, sample in enumerate(changes.appended):
        yield len(entries) + 2 * at + 1, -1, sample.key


def _key_of(name: bytes) -> bytes:
    """The plain key of a member; its name, if it is in no sample."""
    found = names.split(name)
    if found is None:
        return name
    return b"/".join((*names.folder_components(found.folder), found.stem))
